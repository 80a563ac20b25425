//! The command line: its syntax, and checks that run before anything is opened.

pub(crate) mod eal;
pub(crate) mod flags;

use std::ops::{RangeBounds, RangeInclusive};
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use offcore_config::sections::{Forward, Pool as PoolSection, Process, Section};
use offcore_config::values::Choices;
use offcore_dma::Mode;
use offcore_flow::bridge::stations::StationRule;
use offcore_flow::bridge::vlan::VlanRule;
use offcore_flow::mirror::Direction;
use offcore_flow::{DmaMap, Idle, Simulator, SwitchConfig, Topology};
use offcore_mem::pool::PoolError;
use offcore_mem::{Hugepages, Pool};
use offcore_port::PortError;
use offcore_port::spec::PortSpec;
use offcore_stats::lcore;
use offcore_wire::MacAddr;

use crate::failure::Failure;
use crate::output::write;
use eal::EalArgs;

// Headings of flag groups in --help.
const PORTS: &str = "Ports and packet buffers";
const FORWARDING: &str = "Forwarding";
const LEARNING: &str = "Learning switch (--forward l2)";
const COPIES: &str = "Copies";
const WORKERS: &str = "Workers";
const REPORTS: &str = "Reports and stopping";

#[derive(Args, Debug)]
// fields-ok: command-line arguments
pub(crate) struct SwitchArgs {
    #[command(flatten)]
    pub at: PortArgs,

    #[command(flatten)]
    pub run: RunArgs,

    #[command(flatten)]
    pub engines: EngineArgs,

    /// Forwarding mode: a mode of testpmd, l2 (a learning switch between all ports), or copy (as in `offcore copy`)
    #[arg(long, value_name = "MODE", default_value = "io", value_parser = named::<Forward>(), help_heading = FORWARDING)]
    pub forward: Forward,

    /// Output port of a port's packets: its neighbour (0 and 1, 2 and 3), the next port, or the same port; not with l2
    /// [default: paired]
    #[arg(long, value_name = "TOPOLOGY", value_parser = named::<Topology>(), help_heading = FORWARDING)]
    pub port_topology: Option<Topology>,

    #[command(flatten)]
    pub mac: MacArgs,

    #[command(flatten)]
    pub bridge: BridgeArgs,

    /// Copies packets that PORT receives or sends to another port, as PORT[:rx|tx|both]=SPEC, such as
    /// 0=pcap:-,capture.pcap; once for each mirror
    #[arg(long = "mirror", value_name = "MIRROR", value_parser = mirror, help_heading = PORTS)]
    pub mirrors: Vec<MirrorArg>,

    /// Destination address of packets that mac, copy, txonly and flowgen send on PORT [default: 02:00:00:00:00:PORT]
    #[arg(long = "eth-peer", value_name = "PORT,MAC", value_parser = eth_peer, help_heading = FORWARDING)]
    pub eth_peers: Vec<(usize, MacAddr)>,

    /// Copies of mapped queues: by the core (cpu), by the engine (offload), or by the cheaper of both as measured
    /// (auto) [default: offload if a queue is mapped, else cpu]
    #[arg(long, value_name = "MODE", value_parser = named::<Mode>(), help_heading = COPIES)]
    pub mode: Option<Mode>,

    /// Maximum packets per burst: 1 to 64
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = within(1..=offcore_mem::BURST), help_heading = WORKERS)]
    pub burst: usize,

    /// Length in bytes of packets of txonly and flowgen, including FCS (testpmd's --txpkts plus 4) [default: 64]
    #[arg(long, value_name = "BYTES", value_parser = within(46..=65553), help_heading = FORWARDING)]
    pub txpkts: Option<usize>,

    /// Simulated application work per received packet, in nanoseconds
    #[arg(long, value_name = "N", value_parser = within(1..=1_000_000_000), help_heading = WORKERS)]
    pub work_ns: Option<usize>,

    /// SCHED_FIFO priority of the workers, 1 to 99; needs root or CAP_SYS_NICE
    #[arg(long, value_name = "N", value_parser = within(1..=99), help_heading = WORKERS)]
    pub rt_priority: Option<usize>,

    /// Behaviour of an idle worker: poll, or sleep until packets arrive
    #[arg(long, value_name = "WHAT", default_value = "poll", value_parser = named::<Idle>(), help_heading = WORKERS)]
    pub idle: Idle,

    /// With --mode auto: maximum microseconds from the submission of a copy to the publication of its packet; the core
    /// copies if the engine takes longer
    #[arg(long, value_name = "MICROSECONDS", value_parser = within(1..=1_000_000), help_heading = COPIES)]
    pub max_latency: Option<usize>,

    /// Stop after a second without packets: for ports whose packets end, such as pcap and gen with a count
    #[arg(long, help_heading = REPORTS)]
    pub until_idle: bool,

    #[command(flatten)]
    pub print: PrintArgs,
}

/// The ports of a command whose ports have no addresses.
#[derive(Args, Clone, Debug)]
pub(crate) struct PortArgs {
    /// A port, as KIND:ARGS (see `offcore switch --help`); once for each port; the first is port 0
    #[arg(long = "port", value_name = "SPEC", value_parser = port, required = true, help_heading = PORTS)]
    pub ports: Vec<PortSpec>,
}

/// Flags that all commands with ports share.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunArgs {
    /// Lcores of the workers, such as 0,2-3 [default: the first lcore that no channel uses]
    #[arg(long, value_name = "LIST", value_parser = lcores, help_heading = WORKERS)]
    pub lcores: Option<Lcores>,

    #[command(flatten)]
    pub pool: PoolArgs,

    #[command(flatten)]
    pub eal: EalArgs,

    /// Seconds between two reports; 0: only the final report
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval, help_heading = REPORTS)]
    pub stats_interval: Duration,

    /// Reports as tables, or as JSON with one object per line
    #[arg(long, value_name = "FORMAT", default_value = "table", help_heading = REPORTS)]
    pub format: Format,

    /// Stop after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = duration, help_heading = REPORTS)]
    pub duration: Option<Duration>,
}

/// The flag of commands that a configuration file can replace.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct PrintArgs {
    /// Print the configuration file for `offcore run` that does the same, and end
    #[arg(long, help_heading = REPORTS)]
    pub print_config: bool,
}

impl PrintArgs {
    /// Prints the file, if it is requested. Returns whether it was.
    pub(crate) fn print(
        self,
        run: &RunArgs,
        section: &Section,
        config: &SwitchConfig,
        ports: &[PortSpec],
    ) -> Result<bool, Failure> {
        if !self.print_config {
            return Ok(false);
        }
        write(&file(run, section, config, ports)?)?;
        Ok(true)
    }
}

/// Returns the configuration file that describes the same as the flags.
pub(crate) fn file(
    run: &RunArgs,
    section: &Section,
    config: &SwitchConfig,
    ports: &[PortSpec],
) -> Result<String, String> {
    let given = |value: usize, default: usize| (value != default).then_some(value);
    let process = Process {
        name: None,
        lcores: Some(config.lcores.clone()),
        pool: PoolSection {
            buffers: given(run.pool.mbufs, PoolSection::BUFFERS),
            buffer: given(run.pool.mbuf_size, PoolSection::BUFFER),
            pages: Some(run.pool.hugepages).filter(|pages| *pages != Hugepages::Auto),
        },
        idle: Some(config.idle).filter(|idle| *idle != Idle::Poll),
        burst: given(config.burst, section.burst()),
        rt_priority: config.rt_priority,
        eal: run.eal.eal.clone(),
    };
    offcore_config::print(&process, section.clone(), config, ports)
}

/// Copy engines of a switch.
#[derive(Args, Clone, Debug)]
pub(crate) struct EngineArgs {
    /// Channels for the copies of queues: `[PORT.]txqN[*WEIGHT]@CH[+CH];...` or `rxqN@...`
    #[arg(long, value_name = "MAP", help_heading = COPIES)]
    pub dma: Option<DmaMap>,

    /// A simulated DSA device for channels dsa-simN:wqN.M, as N[:KEY=VALUE,...] (see `offcore switch --help`); once for
    /// each device
    #[arg(long = "dsa-sim", value_name = "SPEC", help_heading = COPIES)]
    pub dsa_sims: Vec<Simulator>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DemoSystem {
    Switch,
    Tcp,
}

#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// The measured system: forwarding between two guests, or a TCP connection between two hosts
    #[arg(value_name = "SYSTEM", default_value = "switch")]
    pub system: DemoSystem,

    /// A shorter, less accurate demo
    #[arg(long)]
    pub quick: bool,

    /// Results as tables, or as JSON with one object per line
    #[arg(long, value_name = "FORMAT", default_value = "table", help_heading = REPORTS)]
    pub format: Format,
}

/// Whether copying updates addresses.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct MacArgs {
    /// Set the source address of copied packets to the TX port's, the destination to 02:00:00:00:00:PORT (the default)
    #[arg(long, overrides_with = "no_mac_updating", help_heading = FORWARDING)]
    mac_updating: bool,

    /// Keep the addresses of copied packets
    #[arg(long, overrides_with = "mac_updating", help_heading = FORWARDING)]
    no_mac_updating: bool,
}

impl MacArgs {
    pub(crate) fn updating(&self) -> Option<bool> {
        (self.mac_updating || self.no_mac_updating).then_some(self.mac_updating)
    }
}

/// Flags of `--forward l2`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct BridgeArgs {
    /// With l2: seconds after which the entry of a silent station is removed; 0: learn nothing, flood all packets
    /// [default: 300]
    #[arg(long, value_name = "SECONDS", value_parser = ageing, help_heading = LEARNING)]
    pub ageing: Option<Duration>,

    /// With l2: maximum number of addresses in the forwarding table [default: 16384]
    #[arg(long, value_name = "N", value_parser = within(1..=1 << 20), help_heading = LEARNING)]
    pub fdb_size: Option<usize>,

    /// With l2: maximum packets per second of one port that are flooded (broadcast, multicast, unknown destinations);
    /// the others are dropped
    #[arg(long, value_name = "PPS", value_parser = within(1..=1_000_000_000), help_heading = LEARNING)]
    pub flood_limit: Option<usize>,

    /// With l2: PORT=access:VLAN or PORT=trunk:VLAN,FIRST-LAST,...[,native=VLAN]; once for each port. A port without
    /// a rule is in every VLAN, and its packets keep their tags
    #[arg(long = "vlan", value_name = "RULE", help_heading = LEARNING)]
    pub vlans: Vec<VlanRule>,

    /// With l2: `PORT=MAC,MAC,...[,locked]`, static addresses of a port (`bridge fdb add MAC dev PORT master static`);
    /// locked: packets from other addresses are dropped; once for each port
    #[arg(long = "fdb", value_name = "RULE", help_heading = LEARNING)]
    pub stations: Vec<StationRule>,
}

/// A mirror as written on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MirrorArg {
    /// The port that is mirrored.
    pub port: usize,
    /// The packets to mirror.
    pub direction: Direction,
    /// The port to which copies are sent.
    pub spec: PortSpec,
}

/// The packet buffers of a command that has ports.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct PoolArgs {
    /// Number of packet buffers in the pool
    #[arg(long, value_name = "N", default_value_t = PoolSection::BUFFERS, value_parser = within(64..=1 << 24), help_heading = PORTS)]
    pub mbufs: usize,

    /// Size of a packet buffer in bytes, including 256 bytes of headroom: a power of two from 2048 to 32768
    #[arg(long, value_name = "BYTES", default_value_t = PoolSection::BUFFER, value_parser = mbuf_size, help_heading = PORTS)]
    pub mbuf_size: usize,

    /// Page size of the packet buffers: auto selects the largest available, none selects ordinary pages
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = named::<Hugepages>(), help_heading = PORTS)]
    pub hugepages: Hugepages,
}

impl PoolArgs {
    /// Opens the pool. Returns it with a line that describes it.
    pub(crate) fn open(&self) -> Result<(&'static Pool, String), PoolError> {
        let pool = Pool::new(self.mbufs, self.mbuf_size, self.hugepages)?;
        let pages = match pool.page_size() {
            size if size >= 1 << 30 => format!("{} GiB", size >> 30),
            size if size >= 1 << 20 => format!("{} MiB", size >> 20),
            size => format!("{} KiB", size >> 10),
        };
        let node = pool.numa_node().map_or(String::new(), |node| format!(", NUMA node {node}"));
        let line =
            format!("packet buffers: {} x {} B on {pages} pages{node}", pool.chunks(), pool.chunk_size());
        Ok((pool, line))
    }
}

/// Format of results on standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Tables.
    Table,
    /// One object per line.
    Json,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lcores(pub Vec<usize>);

/// Parses a port. The text is left out of the error, because clap prints it before the error.
pub(crate) fn port(text: &str) -> Result<PortSpec, String> {
    text.parse().map_err(|error| match error {
        PortError::Syntax { expected, .. } => expected,
        other => other.to_string(),
    })
}

fn mirror(text: &str) -> Result<MirrorArg, String> {
    let expected = "expected PORT[:rx|tx|both]=SPEC such as 0=pcap:-,capture.pcap";
    let (of, spec) = text.split_once('=').ok_or_else(|| format!("no '=': {expected}"))?;
    let (number, direction) = of.split_once(':').unwrap_or((of, "both"));
    Ok(MirrorArg {
        port: number.parse().map_err(|_| format!("'{number}' is no port number: {expected}"))?,
        direction: direction.parse().map_err(|error| format!("{error}; {expected}"))?,
        spec: port(spec)?,
    })
}

fn ageing(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.0..=1e6).contains(seconds));
    let seconds =
        seconds.ok_or("expected seconds such as 300 or 0.5, at most 1000000; 0 for never learning")?;
    Ok(Duration::from_secs_f64(seconds))
}

fn eth_peer(text: &str) -> Result<(usize, MacAddr), String> {
    let expected = "expected PORT,MAC such as 0,02:00:00:00:00:01";
    let (port, mac) = text.split_once(',').ok_or_else(|| format!("no ',': {expected}"))?;
    let port = port.parse().map_err(|_| format!("'{port}' is no port number: {expected}"))?;
    Ok((port, mac.parse().map_err(|error| format!("{error}"))?))
}

pub(crate) fn lcores(text: &str) -> Result<Lcores, String> {
    let list = lcore::parse_list(text).map_err(|error| error.to_string())?;
    match list.iter().enumerate().find(|(i, lcore)| list[..*i].contains(lcore)) {
        Some((_, twice)) => Err(format!("lcore {twice} is listed twice: expected each once")),
        None => Ok(Lcores(list)),
    }
}

pub(crate) fn mbuf_size(text: &str) -> Result<usize, String> {
    let expected = "expected a power of two from 2048 to 32768, 256 bytes of headroom included";
    let found: usize = text.parse().map_err(|_| expected.to_string())?;
    match found {
        2048..=32768 if found.is_power_of_two() => Ok(found),
        2048..=32768 => Err(format!("{expected}; the next one is {}", found.next_power_of_two())),
        _ => Err(expected.into()),
    }
}

pub(crate) fn interval(text: &str) -> Result<Duration, String> {
    seconds(text).ok_or_else(|| "expected seconds such as 1 or 0.5, at most 86400; 0 for none".into())
}

pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let found = seconds(text).filter(|duration| !duration.is_zero());
    found.ok_or_else(|| "expected seconds such as 10 or 0.5, more than 0 and at most 86400".into())
}

fn seconds(text: &str) -> Option<Duration> {
    let seconds: f64 = text.parse().ok()?;
    (0.0..=86400.0).contains(&seconds).then(|| Duration::from_secs_f64(seconds))
}

/// Parses a number of bytes in `range`, with K or M for binary thousands and millions.
pub(crate) fn size(range: RangeInclusive<usize>) -> impl Fn(&str) -> Result<usize, String> + Clone {
    move |text| {
        let (digits, factor) = match text.strip_suffix(['K', 'k']) {
            Some(digits) => (digits, 1 << 10),
            None => text.strip_suffix(['M', 'm']).map_or((text, 1), |digits| (digits, 1 << 20)),
        };
        let bytes = digits.parse::<usize>().ok().and_then(|n| n.checked_mul(factor));
        let (least, most) = (range.start(), range.end() >> 20);
        bytes
            .filter(|n| range.contains(n))
            .ok_or_else(|| format!("expected bytes such as 512, 4K or 1M, from {least} to {most}M"))
    }
}

pub(crate) fn within(range: RangeInclusive<usize>) -> impl Fn(&str) -> Result<usize, String> + Clone {
    move |text| {
        let found = text.parse().ok().filter(|number| range.contains(number));
        found.ok_or_else(|| format!("expected a number from {} to {}", range.start(), range.end()))
    }
}

/// Parses a number in `range`. The error is `expected`.
pub(crate) fn number<T: FromStr + PartialOrd>(
    range: impl RangeBounds<T> + Clone,
    expected: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| text.parse().ok().filter(|number| range.contains(number)).ok_or(expected.into())
}

/// Parses a name from `names`. `find` knows all of them.
pub(crate) fn one_of<T: Clone + Send + Sync + 'static>(
    names: impl IntoIterator<Item = &'static str>,
    find: fn(&str) -> Option<T>,
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(names).try_map(move |name| find(&name).ok_or("no such name"))
}

/// Parses a name from `names`. Each of them must parse.
pub(crate) fn choice<T>(names: impl IntoIterator<Item = &'static str>) -> impl TypedValueParser<Value = T>
where
    T: FromStr + Clone + Send + Sync + 'static,
{
    one_of(names, |name| name.parse().ok())
}

/// Parses a name that a configuration file has, too.
pub(crate) fn named<T: Choices + Send + Sync>() -> impl TypedValueParser<Value = T> {
    let find = |text: &str| T::ALL.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
    one_of(T::ALL.iter().map(|(name, _)| *name), find)
}

#[cfg(test)]
mod tests;
