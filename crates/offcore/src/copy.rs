//! `offcore copy`: the dpdk-dma application. Every packet is received, copied into a new buffer by the core or an
//! engine, rewritten with new addresses, and sent.

mod report;
#[cfg(test)]
mod tests;

use clap::Args;
use offcore_config::sections::{Copy, Section};
use offcore_dma::Mode;
use offcore_flow::dma_map::{Entry, QueueHalf};
use offcore_flow::switch::{EthPeers, Run};
use offcore_flow::{DmaMap, SwitchConfig, Topology};
use offcore_port::spec::{MAX_QUEUES, PortSpec};

use crate::args::flags::by_flag;
use crate::args::{EngineArgs, MacArgs, PortArgs, PrintArgs, RunArgs, choice, named, within};
use crate::failure::Failure;
use crate::switch::{Watching, plan, run_switch};
pub(crate) use report::tables;

pub(crate) const EXAMPLES: &str = "\
Examples:
  A generator whose packets are copied by the core and come back to it, for
  two seconds; needs no root, hugepages or hardware:
    offcore copy --port gen:size=1518 --duration 2

  The same copied by a helper thread on lcore 1, and by a simulated DSA:
    offcore copy --port gen:size=1518 --dma rxq0@core:1 --duration 2
    offcore copy --port gen:size=1518 --dsa-sim 0:profile=vhost \\
      --dma rxq0@dsa-sim0:wq0.0 --duration 2

  Two interfaces, one lcore that receives and copies and one that sends, as
  dpdk-dma -l 0-2 -- -p 0x3 -q 1 -c hw (with all DSA work queues):
    offcore copy --port af_xdp:eth0 --port af_xdp:eth1 --lcores 0,1 \\
      -p 0x3 -q 1 -c hw

  Copies by the core or the device, whichever is cheaper for the length:
    offcore copy --port tap:tap0 --dma rxq0@wq0.0 --mode auto

  Copy all packets of a capture into another one, with the same addresses:
    offcore copy --port pcap:in.pcap,out.pcap --no-mac-updating --until-idle

Without --port-topology a port's packets are sent back on that port, as in
dpdk-dma. `offcore switch --help` describes ports, channels and simulated
devices; rxqN of a port names the copies of that queue's packets.

Differences from dpdk-dma: --max-frame drops longer packets instead of setting
the port's MTU; --ring-size may be any number up to 32768; packets of a port's
queue N are sent on queue N, not all on queue 0.";

#[derive(Args, Debug)]
#[command(mut_arg("stats_interval", |arg| arg.short('i')))]
pub(crate) struct CopyArgs {
    #[command(flatten)]
    pub at: PortArgs,

    #[command(flatten)]
    pub run: RunArgs,

    #[command(flatten)]
    pub engines: EngineArgs,

    /// Mask of the ports to use, in hexadecimal [default: all ports]
    #[arg(short = 'p', long, value_name = "MASK", value_parser = portmask)]
    pub portmask: Option<u64>,

    /// Queues of each port [default: as in the port's SPEC]
    #[arg(short = 'q', long, visible_alias = "nb-queue", value_name = "N",
        value_parser = within(1..=MAX_QUEUES as usize))]
    pub queues: Option<usize>,

    /// Copies by the core (cpu or sw), by the channels of --dma, by default dsa:auto (offload or hw), or by the
    /// cheaper of both as measured (auto) [default: offload with --dma, else cpu]
    #[arg(short = 'c', long, visible_alias = "copy-type", value_name = "MODE",
        value_parser = choice::<Mode>(["cpu", "offload", "auto", "sw", "hw"]))]
    pub mode: Option<Mode>,

    /// Maximum packets in flight per queue, and size of the ring between two lcores
    #[arg(short = 's', long, value_name = "N", default_value_t = 2048, value_parser = within(1..=32768))]
    pub ring_size: usize,

    #[command(flatten)]
    pub mac: MacArgs,

    /// Packets per submitted batch of copies: 1 to 64
    #[arg(short = 'b', long, visible_alias = "dma-batch-size", value_name = "N", default_value_t = 32,
        value_parser = within(1..=offcore_mem::BURST))]
    pub dma_batch: usize,

    /// Maximum packet length in bytes, including FCS; longer packets are dropped and counted [default: unlimited]
    #[arg(short = 'f', long, visible_alias = "max-frame-size", value_name = "BYTES",
        value_parser = within(64..=65_561))]
    pub max_frame: Option<usize>,

    /// Minimum packet length in bytes, including FCS, for copies by an engine; the core copies shorter packets
    #[arg(long, visible_alias = "min-copy-size", value_name = "BYTES", default_value_t = 0,
        value_parser = within(0..=65_561))]
    pub min_copy: usize,

    /// Minimum number of bytes copied per packet; bytes behind the packet in its buffer are copied and not sent
    #[arg(short = 'm', long, value_name = "BYTES", default_value_t = 0, value_parser = within(0..=32768))]
    pub force_min_copy_size: usize,

    /// Output port of a port's packets: the same port, its neighbour (0 and 1, 2 and 3), or the next port
    #[arg(long, value_name = "TOPOLOGY", default_value = "loop", value_parser = named::<Topology>())]
    pub port_topology: Topology,

    /// 1: a queue's packets stay on one lcore; 2: lcores are used in pairs, the first receives and copies, the second
    /// sends [default: 2 when --lcores has an even number of them]
    #[arg(long, value_name = "N", value_parser = within(1..=2))]
    pub lcores_per_port: Option<usize>,

    /// Stop after a second without packets: for ports whose packets end, such as pcap and gen with a count
    #[arg(long)]
    pub until_idle: bool,

    #[command(flatten)]
    pub print: PrintArgs,
}

/// Copies packets until it is stopped.
pub(crate) fn run(args: &CopyArgs) -> Result<(), Failure> {
    let (config, ports) = plan(args)?;
    if args.print.print(&args.run, &Section::Copy(section(args)), &config, &ports)? {
        return Ok(());
    }
    run_switch(&config, Watching::new(&ports, &args.run, args.until_idle, tables))
}

/// Returns the configuration, and the ports with their number of queues.
pub(crate) fn plan(args: &CopyArgs) -> Result<(SwitchConfig, Vec<PortSpec>), String> {
    let ports = plan::with_queues(&args.at.ports, args.queues, "--queues")?;
    plan::check_duplicates(&ports)?;
    let dma = channels(args, &ports)?;
    let mapped = dma.entries.iter().any(|entry| entry.half == QueueHalf::Rx);
    if args.until_idle {
        plan::check_ports_end(&ports)?;
    }
    let lcores = plan::lcores(args.run.lcores.as_ref(), &args.engines.dsa_sims, &dma)?;
    let copy = section(args);
    let config = SwitchConfig {
        run: Run::Copy(copy.copying(args.portmask, EthPeers::new(), lcores.len())),
        mode: args.mode.unwrap_or(if mapped { Mode::Offload } else { Mode::Cpu }),
        lcores,
        simulators: args.engines.dsa_sims.clone(),
        dma,
        burst: copy.burst(),
        ..SwitchConfig::default()
    };
    config.check(&ports).map_err(by_flag)?;
    Ok((config, ports))
}

/// Returns the section of a configuration file with these flags.
pub(crate) fn section(args: &CopyArgs) -> Copy {
    Copy {
        topology: Some(args.port_topology),
        mac_updating: args.mac.updating(),
        ring_size: Some(args.ring_size),
        batch: Some(args.dma_batch),
        max_frame: args.max_frame,
        min_copy: Some(args.min_copy),
        at_least: Some(args.force_min_copy_size),
        lcores_per_port: args.lcores_per_port,
    }
}

/// Returns the channel mapping. Without named channels, an engine uses every available work queue.
fn channels(args: &CopyArgs, ports: &[PortSpec]) -> Result<DmaMap, String> {
    let mut dma = plan::dma_map(args.engines.dma.clone(), ports)?;
    let asked = matches!(args.mode, Some(Mode::Offload | Mode::Auto));
    if asked && !dma.entries.iter().any(|entry| entry.half == QueueHalf::Rx) {
        let queues = ports.iter().map(PortSpec::queues).max();
        dma.entries.extend((0..queues.unwrap_or(1)).map(|queue| Entry {
            port: None,
            half: QueueHalf::Rx,
            queue,
            weight: 1,
            channels: vec!["dsa:auto".into()],
        }));
    }
    Ok(dma)
}

/// Parses a hexadecimal number, with or without 0x.
fn portmask(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").or(text.strip_prefix("0X")).unwrap_or(text);
    let mask = u64::from_str_radix(digits, 16).ok().filter(|&mask| mask > 0);
    mask.ok_or_else(|| "expected a hexadecimal number with one bit for each port, such as 0x3".into())
}
