//! `offcore bench gpu`: re-measures l2fwd-nv's published tables, and measures the processing time of bursts, the
//! latency of packets, and the burst size from which a device is faster than a core.
//!
//! No ports are used: packets circulate from a generator through a pipeline to a verifier, which checks them, and back.
//! Each end has its own lcore if enough lcores are available. Otherwise one lcore runs both ends of a pipeline. The
//! rate of the two ends alone is measured in the same way, with workload `none`. Each row states whether the ends or
//! the workload are the bottleneck.
//!
//! Subjects that are compared take turns, forwards and backwards. Each has pipelines that are started for it, so that
//! an idle device does not disturb a measured device. Before the first window every byte and result of every packet is
//! checked. In the windows one packet in 64 is checked completely, and length, order, addresses and result of all
//! packets.
//!
//! - `io`, `workload`: the two tables,
//! - `forced`: artificial processing time per packet, by burst,
//! - `break-even`: work that may benefit from a device, by burst, compared with a core that does nothing else,
//! - `latency`: packets at a fixed rate.

mod baseline;
mod cases;
mod ends;
mod latency;
mod pace;
mod packets;
pub mod plot;
mod published;
mod rig;
mod row;
mod session;
#[cfg(test)]
mod tests;
mod window;

use offcore_stats::named;
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use offcore_gpu::cuda::CudaDevice;
pub use offcore_gpu::device::{GpuDevice, Launch, Memory};
use offcore_gpu::devices;
use offcore_gpu::layout::Kind;
use offcore_gpu::patterns::Patterns;
use offcore_gpu::pipeline::Work;
use offcore_mem::Hugepages;

use crate::report::progress::Progress;
use crate::report::row::Row;
use rig::Rig;

/// Name of the device that replaces a GPU.
pub const STAND_IN: &str = "host";

named! {
    /// The measurement case.
    pub enum Case {
        /// The first published table: packets of 64 to 1024 bytes without work.
        Io = "io",
        /// The second published table: MAC swap by burst.
        Workload = "workload",
        /// Artificial processing time per packet.
        Forced = "forced",
        /// The burst size from which a device is faster than a core.
        BreakEven = "break-even",
        /// Latency at a fixed rate.
        Latency = "latency",
    }
}

/// The unit that processes bursts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Nothing.
    None,
    /// The lcore of the verifier.
    Cpu,
    /// A device.
    Device(Launch),
    /// One core without a pipeline, the baseline of [`Case::BreakEven`].
    Core,
}

impl Workload {
    /// All device workloads.
    pub(crate) const DEVICE: [Self; 3] =
        [Self::Device(Launch::Kernel), Self::Device(Launch::Persistent), Self::Device(Launch::Graph)];

    /// Returns the name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cpu => "cpu",
            Self::Device(launch) => launch.name(),
            Self::Core => "core",
        }
    }

    /// Returns whether the workload uses a device.
    pub const fn is_device(self) -> bool {
        matches!(self, Self::Device(_))
    }
}

named! {
    /// The work on every packet.
    pub enum WorkKind {
        /// No work.
        Nothing = "nothing",
        /// Swaps the MAC addresses.
        Swap = "swap",
        /// CRC-32C of the payload.
        Crc32c = "crc32c",
        /// The Internet checksum of the payload.
        Checksum = "checksum",
        /// Search of the payload for 5,000 patterns of 8 to 32 bytes.
        Match = "match",
    }
}

impl WorkKind {
    /// The selectable kinds of work.
    pub const WORKS: [Self; 4] = [Self::Swap, Self::Crc32c, Self::Checksum, Self::Match];

    /// Returns the description of the CPU implementation.
    const fn baseline(self) -> &'static str {
        match self {
            Self::Nothing => "none",
            Self::Swap => "two stores a packet",
            Self::Crc32c => "crc32c crate",
            Self::Checksum => "64-bit sums",
            Self::Match => "aho-corasick crate, interleaved",
        }
    }

    const fn kind(self) -> Kind {
        match self {
            Self::Nothing | Self::Swap => Kind::Nothing,
            Self::Crc32c => Kind::Crc32c,
            Self::Checksum => Kind::Checksum,
            Self::Match => Kind::Match,
        }
    }

    fn of_pipeline(self, forced_ns: u32, patterns: &Patterns) -> Work<'_> {
        Work {
            kind: self.kind(),
            swap: self == Self::Swap,
            skip: packets::SKIP as u32,
            split_at: None,
            forced_ns,
            patterns: Some(patterns),
        }
    }
}

/// Windows of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Number of windows of a cell.
    pub count: usize,
    pub length: Duration,
    /// Warm-up time of a window, in which packets circulate.
    pub warm_up: Duration,
    /// Time limit of the whole run. If it would be exceeded, cells have fewer windows, but at least one.
    pub limit: Duration,
}

/// Options of a measurement.
#[derive(Clone, Debug)]
pub struct Options {
    pub cases: Vec<Case>,
    /// Number of pipelines, each with a generator and a verifier.
    pub pipelines: usize,
    /// Burst sizes in packets. If empty, each case uses its default.
    pub bursts: Vec<usize>,
    /// Frame lengths of case `io`, including the FCS.
    pub sizes: Vec<usize>,
    /// Kinds of work of case `break-even`.
    pub works: Vec<WorkKind>,
    /// Memories in which devices process packets. Cases that do not compare memories use the first.
    pub memories: Vec<Memory>,
    /// Maximum number of bursts in flight per pipeline: a power of two.
    pub slots: usize,
    /// Thread blocks per pipeline of workload `persistent`. `None` selects a few, and more for longer work.
    pub blocks: Option<u32>,
    /// Threads per block.
    pub threads: u32,
    pub windows: Windows,
    /// Maximum number of packets in flight per pipeline, or two bursts if that is more.
    pub on_their_way: usize,
    /// Whether to measure fewer cells.
    pub quick: bool,
    /// Page size of packet buffers and burst rings.
    pub hugepages: Hugepages,
    /// Lcores on which threads may run.
    pub lcores: Vec<usize>,
    /// Test switch: number of a packet and offset of a byte that is changed in flight, in every pipeline.
    #[cfg(test)]
    pub(crate) corrupted: Option<(u64, usize)>,
}

impl Options {
    /// Returns the number of thread blocks for work that takes no time. Such blocks mostly wait for bursts.
    fn few_blocks(&self) -> u32 {
        self.blocks.unwrap_or(4)
    }

    /// Returns the burst sizes given in the options, or else the defaults of the case.
    fn bursts_or(&self, all: &[usize], quick: &[usize]) -> Vec<usize> {
        match self.bursts[..] {
            [] if self.quick => quick.into(),
            [] => all.into(),
            ref given => given.into(),
        }
    }

    /// Returns options for all cases on `device` with `lcores`.
    pub fn new(device: &str, quick: bool, lcores: &[usize]) -> Self {
        let stand_in = device == STAND_IN;
        Self {
            cases: Case::ALL.into(),
            pipelines: if stand_in { 1 } else { 4.min(lcores.len().saturating_sub(1) / 2).max(1) },
            bursts: Vec::new(),
            sizes: if quick { [64, published::FRAME].into() } else { published::SIZES.into() },
            works: WorkKind::WORKS.into(),
            memories: Memory::ALL.into(),
            slots: 64,
            blocks: if stand_in && lcores.len() < 8 { Some(1) } else { None },
            threads: 256,
            windows: Windows {
                count: if quick { 2 } else { 4 },
                length: Duration::from_millis(200),
                warm_up: Duration::from_millis(30),
                limit: Duration::from_secs(if quick { 50 } else { 210 }),
            },
            // Packets in flight have to return after each window, and the replacement for a GPU is slow.
            on_their_way: if stand_in { 1024 } else { 32_768 },
            quick,
            hugepages: Hugepages::Auto,
            lcores: lcores.into(),
            #[cfg(test)]
            corrupted: None,
        }
    }

    fn first_memory(&self) -> Memory {
        self.memories.first().copied().unwrap_or_default()
    }

    fn check(&self) -> Result<()> {
        let range = |what, found: usize, least, most| {
            ensure!((least..=most).contains(&found), "{what} {found}: expected {least} to {most}");
            Ok(())
        };
        self.bursts.iter().try_for_each(|&burst| range("--bursts", burst, 1, 4096))?;
        self.sizes.iter().try_for_each(|&size| range("--sizes", size, 64, packets::LONGEST + 4))?;
        range("--pipelines", self.pipelines, 1, 64)?;
        range("--slots", self.slots, 2, 4096)?;
        ensure!(self.slots.is_power_of_two(), "--slots {}: expected a power of two", self.slots);
        ensure!(!self.memories.is_empty(), "no memory is selected: expected host, gpu or both");
        ensure!(self.windows.count > 0 && !self.windows.length.is_zero(), "no window is measured");
        Ok(())
    }
}

/// Opens the device `name`. Without a name, opens the GPU, or else its replacement and returns a message about it.
///
/// # Errors
/// If the device cannot be used.
pub fn open(name: Option<&str>) -> Result<(Box<dyn GpuDevice>, Option<String>)> {
    if let Some(name) = name {
        return Ok((devices::open(name)?, None));
    }
    // Not opened by name, because the error message would then suggest another name, which this function already
    // selects.
    let missing = match CudaDevice::open(0) {
        Ok(device) => return Ok((Box::new(device), None)),
        Err(error) => error,
    };
    let line = format!(
        "measuring with --device {STAND_IN}, threads in place of a GPU: what they take says nothing of one (no GPU was \
         found: {missing})"
    );
    let device = devices::open(STAND_IN).map_err(|error| anyhow!("{missing}; {error}"))?;
    Ok((device, Some(line)))
}

/// Result of a measurement.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Notes of the device for the user.
    pub notes: Vec<String>,
    /// Measurements that failed, with reasons: a device that refused or failed; a packet that was lost, reordered or
    /// changed, or had a wrong result.
    pub failures: Vec<String>,
}

/// Measures everything that `options` selects and passes each finished row to `emit`. Failed parts are skipped.
///
/// # Errors
/// If nothing can be measured.
pub fn run(
    options: &Options,
    device: Box<dyn GpuDevice>,
    progress: &Progress,
    emit: &mut dyn FnMut(Row),
) -> Result<Outcome> {
    options.check()?;
    let groups = options.cases.iter().flat_map(|&case| cases::groups(options, case)).collect();
    let mut rig = Rig::new(options, device, groups)?;
    progress.begin(rig.pace.steps());
    for &case in &options.cases {
        match case {
            Case::Io => cases::io(&mut rig, progress, emit),
            Case::Workload => cases::workload(&mut rig, progress, emit),
            Case::Forced => cases::forced(&mut rig, progress, emit),
            Case::BreakEven => cases::break_even(&mut rig, progress, emit),
            Case::Latency => latency::measure(&mut rig, progress, emit),
        }
    }
    progress.end();
    Ok(rig.outcome())
}
