//! The arguments of `offcore gpu`: l2fwd-nv's letters, and long names.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgAction, Args, Subcommand};
use offcore_config::sections::{OnMatch, WorkKind, device_name};
use offcore_flow::Topology;
use offcore_flow::switch::Workload;
use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::layout::MAX_BURST;
use offcore_mem::HEADROOM;
use offcore_port::spec::{MAX_QUEUES, PortSpec};

use super::check::{self, CheckArgs};
use super::costs::{self, CostsArgs};
use super::doctor::{self, DoctorArgs};
use crate::args::{PortArgs, PrintArgs, RunArgs, named, port, within};

/// Default split, as in l2fwd-nv.
pub(super) const SPLIT_AT: usize = 60;
/// l2fwd-nv's maximum: 20 ms.
const MAX_PACKET_TIME: usize = 20_000_000;

const LCORES: &str = "The lcores: one for everything, or an even number in pairs of receiver and sender [default: two per \
                      pipeline, as far as available]";

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

  Headers stay in host memory, payloads are processed in GPU memory:
    offcore gpu --port af_xdp:eth0 -w kernel -g 0 -m gpu -s --work crc32c

  Packets bypass host memory: the network card writes them to GPU memory
  (GPUDirect RDMA; untested; ports dpdk: need a build with --features dpdk):
    offcore gpu --port dpdk:0000:3b:00.0 -w persistent -g 0 --memory direct

  Measure ten million packets after a million, as l2fwd-nv does by default:
    offcore gpu --port af_xdp:eth0 -w persistent -z 1000000 -v 10000000

  Check what this machine has for packets on a GPU, and what is missing:
    offcore gpu doctor

Without --port-topology a port's packets are sent back on that port, as in
l2fwd-nv. `offcore switch --help` describes ports.

Differences from l2fwd-nv: without -v it runs until it is stopped; an unknown
-w is refused; -t 0 is no forced time; -b has no gap of four packets, and a
partial burst is submitted after --burst-timeout; a pipeline that is too slow
drops packets and counts them, and does not end.";

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct GpuArgs {
    #[command(subcommand)]
    pub command: Option<GpuCommand>,

    #[command(flatten)]
    pub pipelines: PipelineArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GpuCommand {
    /// Check the requirements for packets on a GPU on this machine
    #[command(after_help = doctor::EXAMPLES)]
    Doctor(DoctorArgs),
    /// Test a device step by step: all workload types with all packets verified, faults, performance
    #[command(after_help = check::EXAMPLES)]
    Check(CheckArgs),
    /// Measure the time of a GPU's reads of host memory and of kernel launches
    #[command(after_help = costs::EXAMPLES)]
    Costs(CostsArgs),
}

#[derive(Args, Debug)]
#[command(mut_arg("lcores", |arg| arg.help(LCORES)))]
// fields-ok: command-line arguments
pub(crate) struct PipelineArgs {
    #[command(flatten)]
    pub at: PortArgs,

    #[command(flatten)]
    pub run: RunArgs,

    /// Maximum packets per burst: 1 to 4096
    #[arg(short, long, value_name = "N", default_value_t = 64, value_parser = within(1..=MAX_BURST))]
    pub burst: usize,

    /// Microseconds that a packet waits for its burst to fill
    #[arg(long, value_name = "US", default_value_t = 100, value_parser = within(0..=1_000_000))]
    pub burst_timeout: usize,

    /// Data bytes of a packet buffer; longer packets take several [default: 1792, of --mbuf-size]
    #[arg(short, long, visible_alias = "dataroom", value_name = "BYTES", conflicts_with = "mbuf_size",
        value_parser = within(1..=32768 - HEADROOM))]
    pub data_room: Option<usize>,

    /// The devices, assigned to pipelines round-robin, such as cuda:0,cuda:1 (or 0,1); host: threads that stand in for
    /// a GPU [default: cuda:0]
    #[arg(short = 'g', long = "device", visible_alias = "gpu", value_name = "LIST")]
    pub devices: Option<DeviceList>,

    /// Memory in which a device processes packets: in host memory (host or 0), in a copy in GPU memory (gpu or 1), or
    /// in GPU memory that network cards access (direct or 2: GPUDirect RDMA, untested; only ports dpdk:, so a build
    /// with --features dpdk) [default: host; gpu on a GPU with a --work that reads payloads]
    #[arg(short, long, visible_alias = "mempool", value_name = "TYPE", value_parser = memory)]
    pub memory: Option<Memory>,

    /// Profile the run with a CUDA profiler
    #[arg(short = 'n', long, visible_alias = "nvprofiler")]
    pub profile: bool,

    /// Queues of each port, each with a pipeline [default: as in the port's SPEC]
    #[arg(short, long, value_name = "N", value_parser = within(1..=MAX_QUEUES as usize))]
    pub pipelines: Option<usize>,

    /// Buffer split: the first 60 bytes of a packet go into a separate buffer, a device gets only the rest
    #[arg(short, long, visible_alias = "buffersplit")]
    pub split: bool,

    /// Buffer split with this many bytes in the first buffer
    #[arg(long, value_name = "BYTES", value_parser = within(14..=1024))]
    pub split_at: Option<usize>,

    /// Minimum nanoseconds per packet: in sequence on a CPU, in parallel for the threads of a block on a device
    #[arg(short = 't', long, visible_alias = "packettime", value_name = "NS", default_value_t = 0,
        value_parser = within(0..=MAX_PACKET_TIME))]
    pub packet_time: usize,

    /// Stop after measuring this many received packets, not counting --warm-up; 0: do not stop
    #[arg(short = 'v', long, visible_alias = "performance-packets", value_name = "N", default_value_t = 0)]
    pub packets: u64,

    /// Packets received before measuring starts
    #[arg(
        short = 'z',
        long,
        visible_alias = "warmup-packets",
        value_name = "N",
        default_value_t = 0,
        requires = "packets"
    )]
    pub warm_up: u64,

    /// Processing of packets: none (none or 0), on the CPU of the sending lcore (cpu, 1), by a kernel per burst
    /// (kernel, 2), by a persistent kernel (persistent, 3), by graphs of kernels (graph, 4)
    #[arg(short, long, visible_alias = "workload-type", value_name = "TYPE", default_value = "cpu",
        value_parser = workload)]
    pub workload: Workload,

    /// The work: swap the addresses; the others also compute the payload's CRC-32C, its Internet checksum, or the
    /// lowest pattern in it
    #[arg(long, value_name = "WORK", default_value = "swap", value_parser = named::<WorkKind>())]
    pub work: WorkKind,

    /// Do not swap addresses
    #[arg(long)]
    pub no_swap: bool,

    /// The patterns of --work match, one per line, \xNN for any byte
    #[arg(long, value_name = "FILE")]
    pub patterns: Option<PathBuf>,

    /// Bytes before the payload [default: 42]
    #[arg(long, value_name = "BYTES", value_parser = within(0..=65_535))]
    pub skip: Option<usize>,

    /// Action for packets with a match [default: pass, or steer with --steer]
    #[arg(long, value_name = "WHAT", value_parser = named::<OnMatch>())]
    pub on_match: Option<OnMatch>,

    /// The DSCP of --on-match mark [default: 46]
    #[arg(long, value_name = "DSCP", value_parser = within(0..=63))]
    pub mark: Option<usize>,

    /// The port that packets with a match are sent to; used for nothing else
    #[arg(long, value_name = "SPEC", value_parser = port)]
    pub steer: Option<PortSpec>,

    /// Maximum bursts in flight per pipeline: a power of two from 2 to 4096
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = slots)]
    pub slots: usize,

    /// Bursts of a pipeline that kernels that poll (persistent, graph) process at once, a block each: 1 to 64; with
    /// graph rounded down to a power of two [default: 4; 32 on a GPU with a --work that reads payloads]
    #[arg(long, value_name = "N", value_parser = within(1..=64))]
    pub blocks: Option<usize>,

    /// Threads per block: 1 to 1024 [default: 256]
    #[arg(long, value_name = "N", value_parser = within(1..=1024))]
    pub threads: Option<usize>,

    /// Milliseconds without an answer after which a device that has bursts is considered hung and the CPU takes over;
    /// longer than one burst takes [default: 1000]
    #[arg(long, value_name = "MS", value_parser = within(1..=3_600_000))]
    pub timeout: Option<usize>,

    /// Output port of a port's packets: the same port, its neighbour (0 and 1, 2 and 3), or the next port
    #[arg(long, value_name = "TOPOLOGY", default_value = "loop", value_parser = named::<Topology>())]
    pub port_topology: Topology,

    /// Stop after a second without packets: for ports that end, such as pcap and gen with a count
    #[arg(long)]
    pub until_idle: bool,

    #[command(flatten)]
    pub print: PrintArgs,

    /// Log more; -v is taken by l2fwd-nv's letter
    #[arg(long, action = ArgAction::Count)]
    pub verbose: u8,
}

impl PipelineArgs {
    /// Returns the flags of the underlying switch, with packet buffers of `--data-room`.
    pub(crate) fn run(&self) -> RunArgs {
        let mut run = self.run.clone();
        if let Some(room) = self.data_room {
            run.pool.mbuf_size = (room + HEADROOM).next_power_of_two().max(offcore_mem::pool::CHUNK_ALIGN);
        }
        run
    }
}

/// Device names with expanded number ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceList(pub Vec<String>);

impl FromStr for DeviceList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',').map(device_name).collect::<Result<_, _>>().map(Self)
    }
}

fn workload(text: &str) -> Result<Workload, String> {
    Ok(match text {
        "0" | "none" => Workload::None,
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
