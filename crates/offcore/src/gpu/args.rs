//! What `offcore gpu` understands: l2fwd-nv's letters, and words for them.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgAction, Args, Subcommand, ValueEnum};
use offcore_flow::Topology;
use offcore_flow::switch::Workload;
use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::layout::MAX_BURST;
use offcore_mem::{HEADROOM, Hugepages};
use offcore_port::spec::{MAX_QUEUES, PortSpec};

use super::doctor::{self, DoctorArgs};
use crate::args::{Format, Lcores, PoolArgs, duration, interval, lcores, port, topology, within};
use crate::eal::EalArgs;

/// Bytes before a payload: Ethernet, IPv4 and UDP headers.
pub(super) const SKIP: usize = 42;
/// Where packets are split: l2fwd-nv's.
pub(super) const SPLIT_AT: usize = 60;
/// Blocks of a pipeline.
pub(super) const BLOCKS: usize = 4;
/// Lanes of a block.
pub(super) const LANES: usize = 256;
/// How long a device may take for a burst.
pub(super) const PATIENCE_MS: usize = 1000;
/// Expedited forwarding (RFC 3246).
pub(super) const DSCP: usize = 46;
/// l2fwd-nv's: 20 ms.
const MAX_PACKET_TIME: usize = 20_000_000;

/// The examples of `offcore gpu --help`. A test parses each line that begins with `offcore`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  Packets of a generator, swapped by threads that stand in for a GPU, for two
  seconds; needs no root, no GPU and no hardware:
    offcore gpu --port gen:size=1024 -w persistent --device host --duration 2

  The same by the CPU; then packets of a network interface by a GPU, as
  l2fwdnv -w 3 -b 64 -p 2:
    offcore gpu --port gen:size=1024 -w cpu --duration 2
    offcore gpu --port af_xdp:eth0 -w 3 -b 64 -p 2 -g 0

  Packets that contain one of the patterns of a file go to another port:
    offcore gpu --port af_packet:eth0 --port af_packet:eth1 --port-topology \\
      paired -w graph -g 0 -b 1024 --work match --patterns signatures.txt \\
      --steer pcap:-,matches.pcap

  Headers stay in the CPU's memory, payloads are worked on in the GPU's:
    offcore gpu --port af_xdp:eth0 -w kernel -g 0 -m gpu -s --work crc32c

  Packets never are in host memory: the network card puts them into the GPU's
  (GPUDirect RDMA; untested; ports dpdk: need a build with --features dpdk):
    offcore gpu --port dpdk:0000:3b:00.0 -w persistent -g 0 --memory direct

  Ten million packets measured after a million, as l2fwd-nv does by itself:
    offcore gpu --port af_xdp:eth0 -w persistent -z 1000000 -v 10000000

  What is there to run on, and what stands in the way:
    offcore gpu doctor

A port's packets go back to that port, as l2fwd-nv has it, unless
--port-topology says otherwise. Ports are those of `offcore switch --help`.

Where l2fwd-nv's options mean something else here: without -v it runs until it
is stopped; an unknown -w is refused; -t 0 is no forced time; -b has no gap of
four packets, and what does not fill a burst goes on after --burst-timeout; a
pipeline that is too slow drops packets and counts them, and nothing ends.";

/// What `offcore gpu` understands.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct GpuArgs {
    /// What to do instead of running pipelines.
    #[command(subcommand)]
    pub command: Option<GpuCommand>,

    /// The pipelines.
    #[command(flatten)]
    pub run: RunArgs,
}

impl GpuArgs {
    /// The words that name the subcommand.
    pub(crate) fn names(&self) -> &'static [&'static str] {
        match self.command {
            Some(GpuCommand::Doctor(_)) => &["gpu", "doctor"],
            None => &["gpu"],
        }
    }
}

/// What `offcore gpu` does beside running pipelines.
#[derive(Debug, Subcommand)]
pub(crate) enum GpuCommand {
    /// Say what there is for packets on a GPU, what stands in the way, and what to do
    #[command(after_help = doctor::EXAMPLES)]
    Doctor(DoctorArgs),
}

/// Pipelines.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// A port, as KIND:ARGS; once for each port, they are counted from 0
    #[arg(long = "port", value_name = "SPEC", value_parser = port, required = true)]
    pub ports: Vec<PortSpec>,

    /// Packets that are worked on together, at most: 1 to 4096
    #[arg(short, long, value_name = "N", default_value_t = 64, value_parser = within(1..=MAX_BURST))]
    pub burst: usize,

    /// Microseconds that a packet waits for others of its burst
    #[arg(long, value_name = "US", default_value_t = 100, value_parser = within(0..=1_000_000))]
    pub burst_timeout: usize,

    /// Bytes of a packet that a packet buffer has room for; longer packets take several [default: 1792, of --mbuf-size]
    #[arg(short, long, visible_alias = "dataroom", value_name = "BYTES", conflicts_with = "mbuf_size",
        value_parser = within(1..=32768 - HEADROOM))]
    pub data_room: Option<usize>,

    /// The devices, which pipelines get by turns, such as cuda:0,cuda:1 (or 0,1); host: threads that stand in for a GPU
    /// [default: cuda:0]
    #[arg(short = 'g', long = "device", visible_alias = "gpu", value_name = "LIST")]
    pub devices: Option<DeviceList>,

    /// Where a device works on packets: in host memory, where they are (host or 0), in its own, where it copies them (gpu or
    /// 1), or where network cards put them (direct or 2: GPUDirect RDMA, untested; ports dpdk:
    /// alone, and so a build with --features dpdk) [default: host]
    #[arg(short, long, visible_alias = "mempool", value_name = "TYPE", value_parser = memory)]
    pub memory: Option<Memory>,

    /// The run is what a CUDA profiler looks at
    #[arg(short = 'n', long, visible_alias = "nvprofiler")]
    pub profile: bool,

    /// Queues of each port; each has a pipeline [default: what the port's description says]
    #[arg(short, long, value_name = "N", value_parser = within(1..=MAX_QUEUES as usize))]
    pub pipelines: Option<usize>,

    /// Buffer split: the first 60 bytes of a packet are in a buffer of their own, a device gets the rest only
    #[arg(short, long, visible_alias = "buffersplit")]
    pub split: bool,

    /// Buffer split with so many bytes in the first buffer
    #[arg(long, value_name = "BYTES", value_parser = within(14..=1024))]
    pub split_at: Option<usize>,

    /// Nanoseconds that each packet takes at least: on a CPU one packet after the other, on a device all lanes of a block
    /// at once
    #[arg(short = 't', long, visible_alias = "packettime", value_name = "NS", default_value_t = 0,
        value_parser = within(0..=MAX_PACKET_TIME))]
    pub packet_time: usize,

    /// Packets to be received and measured, behind those of --warm-up, before it stops; 0: it does not
    #[arg(short = 'v', long, visible_alias = "performance-packets", value_name = "N", default_value_t = 0)]
    pub packets: u64,

    /// Packets that are received before measuring begins
    #[arg(
        short = 'z',
        long,
        visible_alias = "warmup-packets",
        value_name = "N",
        default_value_t = 0,
        requires = "packets"
    )]
    pub warm_up: u64,

    /// Who works: nobody (none or 0), the CPU of the sending lcore (cpu, 1), a kernel for each burst (kernel, 2), a kernel
    /// that runs on (persistent, 3), graphs of kernels (graph, 4)
    #[arg(short, long, visible_alias = "workload-type", value_name = "TYPE", default_value = "cpu",
        value_parser = workload)]
    pub workload: Workload,

    /// What is done: addresses swapped, and with the others the payload's CRC-32C, Internet checksum, or lowest pattern
    /// that occurs in it
    #[arg(long, value_name = "WORK", default_value = "swap")]
    pub work: WorkKind,

    /// Addresses stay as they are
    #[arg(long)]
    pub no_swap: bool,

    /// The patterns of --work match: one a line, \xNN for any byte
    #[arg(long, value_name = "FILE")]
    pub patterns: Option<PathBuf>,

    /// Bytes of a packet before its payload [default: 42]
    #[arg(long, value_name = "BYTES", value_parser = within(0..=65_535))]
    pub skip: Option<usize>,

    /// What becomes of packets in which a pattern occurs [default: pass, or steer with --steer]
    #[arg(long, value_name = "WHAT")]
    pub on_match: Option<OnMatch>,

    /// The DSCP of --on-match mark [default: 46]
    #[arg(long, value_name = "DSCP", value_parser = within(0..=63))]
    pub mark: Option<usize>,

    /// The port that packets are sent to in which a pattern occurs; it does nothing else
    #[arg(long, value_name = "SPEC", value_parser = port)]
    pub steer: Option<PortSpec>,

    /// Bursts of a pipeline on their way, at most: a power of two from 2 to 4096
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = slots)]
    pub slots: usize,

    /// Blocks of lanes that serve a pipeline by turns, in a persistent kernel: 1 to 64 [default: 4]
    #[arg(long, value_name = "N", value_parser = within(1..=64))]
    pub blocks: Option<usize>,

    /// Lanes of a block: 1 to 1024 [default: 256]
    #[arg(long, value_name = "N", value_parser = within(1..=1024))]
    pub lanes: Option<usize>,

    /// Milliseconds that a device which has bursts may answer none, until the CPU goes on in its place: more than it takes
    /// for one [default: 1000]
    #[arg(long, value_name = "MS", value_parser = within(1..=3_600_000))]
    pub patience: Option<usize>,

    /// Where a port's packets go: back, to its neighbour (0 and 1, 2 and 3), or to the next one
    #[arg(long, value_name = "TOPOLOGY", default_value = "loop", value_parser = topology())]
    pub port_topology: Topology,

    /// The lcores: one for everything, or an even number, by twos: one receives and one sends [default: two for each
    /// pipeline, as far as there are so many]
    #[arg(long, value_name = "LIST", value_parser = lcores)]
    pub lcores: Option<Lcores>,

    #[command(flatten)]
    pool: PoolArgs,

    /// DPDK.
    #[command(flatten)]
    pub eal: EalArgs,

    /// Seconds between two reports; 0: only the last one
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub stats_interval: Duration,

    /// Reports for people, or JSON with one object a line
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,

    /// Stop after this time
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    pub duration: Option<Duration>,

    /// Stop when nothing has moved for a second: for ports whose packets end, such as pcap and gen with a count
    #[arg(long)]
    pub until_idle: bool,

    /// Log more; the letter -v is l2fwd-nv's here
    #[arg(long, action = ArgAction::Count)]
    pub verbose: u8,
}

impl RunArgs {
    /// The packet buffers.
    pub(super) fn pool(&self) -> PoolArgs {
        match self.data_room {
            Some(room) => {
                let mbuf_size = (room + HEADROOM).next_power_of_two().max(offcore_mem::pool::CHUNK_ALIGN);
                PoolArgs { mbuf_size, ..self.pool }
            }
            None => self.pool,
        }
    }

    pub(super) fn hugepages(&self) -> Hugepages {
        self.pool.hugepages
    }
}

/// What is done with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WorkKind {
    /// Addresses change places; no result.
    Swap,
    /// CRC-32C of the payload.
    Crc32c,
    /// The Internet checksum of the payload.
    Checksum,
    /// The lowest pattern that occurs in the payload.
    Match,
}

/// What becomes of packets in which a pattern occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnMatch {
    /// They go on, and are counted.
    Pass,
    /// They go on with another DSCP.
    Mark,
    /// They are dropped.
    Drop,
    /// All others are dropped.
    Only,
    /// They go to the port of --steer.
    Steer,
}

impl OnMatch {
    /// The name on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Mark => "mark",
            Self::Drop => "drop",
            Self::Only => "only",
            Self::Steer => "steer",
        }
    }
}

/// Names of devices, with numbers spelt out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceList(pub Vec<String>);

impl FromStr for DeviceList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let device = |name: &str| match name {
            "host" => Ok("host".to_owned()),
            "cuda" => Ok("cuda:0".to_owned()),
            _ => match name.strip_prefix("cuda:").unwrap_or(name).parse::<u16>() {
                Ok(number) => Ok(format!("cuda:{number}")),
                Err(_) => {
                    Err(format!("'{name}' is no device: expected host, cuda:N, or the number of a GPU"))
                }
            },
        };
        text.split(',').map(device).collect::<Result<_, _>>().map(Self)
    }
}

fn workload(text: &str) -> Result<Workload, String> {
    Ok(match text {
        "0" | "none" => Workload::Nobody,
        "1" | "cpu" => Workload::Cpu,
        "2" | "kernel" => Workload::Device(Launch::Kernel),
        "3" | "persistent" => Workload::Device(Launch::Persistent),
        "4" | "graph" | "graphs" => Workload::Device(Launch::Graph),
        _ => return Err("expected none (0), cpu (1), kernel (2), persistent (3) or graph (4)".into()),
    })
}

fn memory(text: &str) -> Result<Memory, String> {
    match text {
        "0" | "host" => Ok(Memory::Host),
        "1" | "gpu" => Ok(Memory::Gpu),
        "2" | "direct" => Ok(Memory::Direct),
        _ => Err("expected host (0), gpu (1) or direct (2)".into()),
    }
}

fn slots(text: &str) -> Result<usize, String> {
    let found =
        text.parse().ok().filter(|slots: &usize| slots.is_power_of_two() && (2..=4096).contains(slots));
    found.ok_or_else(|| "expected a power of two from 2 to 4096".into())
}
