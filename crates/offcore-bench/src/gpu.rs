//! `offcore bench gpu`: l2fwd-nv's published tables, re-measured; what a device takes for a burst, how long packets
//! take, and from which burst on a device does more than a core.
//!
//! No port is under it: a generator submits packets to a pipeline, a verifier takes them from it and checks them, and
//! they go round. Each end has an lcore of its own where there are enough; with fewer, one lcore is both ends of a
//! pipeline. How much these two manage by themselves is measured in the same way, by pipelines in which nobody works
//! (workload `none`): rows say whether that, or whoever works, is the limit.
//!
//! What is compared with each other takes turns, forwards and backwards, each with pipelines of its own that are
//! started for it: a device that waits for bursts is no neighbour of one that is measured. Before the first window
//! every packet's every byte and result is checked, and one packet in 64 in the windows; length, order, addresses and
//! result of all.
//!
//! * `io`, `workload`: the two tables,
//! * `forced`: a forced time for each packet, by bursts,
//! * `break-even`: work that a device may be worth, by bursts, beside a core that does nothing else,
//! * `latency`: packets that come at a pace.

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

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use offcore_gpu::cuda::CudaDevice;
pub use offcore_gpu::device::{Device, Launch, Memory};
use offcore_gpu::devices;
use offcore_gpu::layout::Kind;
use offcore_gpu::patterns::Patterns;
use offcore_gpu::pipeline::Work;
use offcore_mem::Hugepages;

use crate::progress::Progress;
use crate::row::Row;
use rig::Rig;
pub use row::GpuColumns;

/// The device that stands in for a GPU.
pub const STAND_IN: &str = "host";

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// The first published table: packets of 64 to 1024 bytes on which nobody works.
    Io,
    /// The second one: MAC swap by bursts.
    Workload,
    /// A forced time for each packet.
    Forced,
    /// From which burst on a device does more than a core.
    BreakEven,
    /// How long packets take that come at a pace.
    Latency,
}

impl Case {
    /// Every one of them.
    pub const ALL: [Self; 5] = [Self::Io, Self::Workload, Self::Forced, Self::BreakEven, Self::Latency];

    /// The name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Io => "io",
            Self::Workload => "workload",
            Self::Forced => "forced",
            Self::BreakEven => "break-even",
            Self::Latency => "latency",
        }
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|case| case.name() == text);
        known.ok_or_else(|| {
            format!("case '{text}': expected io, workload, forced, break-even, latency or all")
        })
    }
}

/// Who works on bursts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Nobody.
    None,
    /// The lcore that takes bursts back.
    Cpu,
    /// A device.
    Device(Launch),
    /// One core that does nothing else: no pipeline, the baseline of [`Case::BreakEven`].
    Core,
}

impl Workload {
    /// The three of a device.
    pub(crate) const DEVICE: [Self; 3] =
        [Self::Device(Launch::Kernel), Self::Device(Launch::Persistent), Self::Device(Launch::Graph)];

    /// The name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cpu => "cpu",
            Self::Device(launch) => launch.name(),
            Self::Core => "core",
        }
    }

    /// Whether a device does it.
    pub const fn is_device(self) -> bool {
        matches!(self, Self::Device(_))
    }
}

/// What is done with every packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkKind {
    /// Nothing: packets go to who works on them and back.
    Nothing,
    /// Its MAC addresses change places.
    Swap,
    /// CRC-32C of its payload.
    Crc32c,
    /// The Internet checksum of its payload.
    Checksum,
    /// Its payload is searched for 5,000 patterns of 8 to 32 bytes.
    Match,
}

impl WorkKind {
    /// Those that can be asked for.
    pub const ALL: [Self; 4] = [Self::Swap, Self::Crc32c, Self::Checksum, Self::Match];

    /// The name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Swap => "swap",
            Self::Crc32c => "crc32c",
            Self::Checksum => "checksum",
            Self::Match => "match",
        }
    }

    /// How a core does it, at its best.
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

impl FromStr for WorkKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|work| work.name() == text);
        known.ok_or_else(|| format!("work '{text}': expected swap, crc32c, checksum or match"))
    }
}

/// What to measure, and with what.
#[derive(Clone, Debug)]
pub struct Options {
    /// What is measured.
    pub cases: Vec<Case>,
    /// Pipelines, each with a generator and a verifier.
    pub pipelines: usize,
    /// Packets of a burst; none: those of each case.
    pub bursts: Vec<usize>,
    /// Frame lengths of case `io`, FCS included.
    pub sizes: Vec<usize>,
    /// Work of case `break-even`.
    pub works: Vec<WorkKind>,
    /// Where devices work on packets. Cases that do not compare them take the first.
    pub memories: Vec<Memory>,
    /// Bursts on their way at most, in each pipeline: a power of two.
    pub slots: usize,
    /// Blocks that serve a pipeline of workload `persistent`; none: a few, and more for work that takes longer.
    pub blocks: Option<u32>,
    /// Lanes of a block.
    pub lanes: u32,
    /// Windows of each cell.
    pub windows: usize,
    /// Length of a window.
    pub window: Duration,
    /// How long packets go round before it.
    pub warm_up: Duration,
    /// How long all of it may take: when it becomes clear that it would take longer, cells have fewer windows, though
    /// one at least.
    pub limit: Duration,
    /// Packets on their way in a pipeline at most, unless two bursts are more.
    pub on_their_way: usize,
    /// Fewer cells.
    pub quick: bool,
    /// Pages of packet buffers and burst rings.
    pub hugepages: Hugepages,
    /// Where threads may run.
    pub lcores: Vec<usize>,
    /// Test switch: in every pipeline the packet of this number has a byte changed on its way.
    #[cfg(test)]
    pub(crate) corrupted: Option<(u64, usize)>,
}

impl Options {
    /// The whole of it for `device`, on `lcores`.
    pub fn new(device: &str, quick: bool, lcores: &[usize]) -> Self {
        let stand_in = device == STAND_IN;
        Self {
            cases: Case::ALL.into(),
            pipelines: if stand_in { 1 } else { 4.min(lcores.len().saturating_sub(1) / 2).max(1) },
            bursts: Vec::new(),
            sizes: if quick { [64, published::FRAME].into() } else { published::SIZES.into() },
            works: WorkKind::ALL.into(),
            memories: Memory::ALL.into(),
            slots: 64,
            blocks: if stand_in && lcores.len() < 8 { Some(1) } else { None },
            lanes: 256,
            windows: if quick { 2 } else { 4 },
            window: Duration::from_millis(200),
            warm_up: Duration::from_millis(30),
            limit: Duration::from_secs(if quick { 50 } else { 210 }),
            // What is on its way has to come back after each window, and a stand-in is slow.
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
        ensure!(!self.memories.is_empty(), "no memory is asked for: expected host, gpu or both");
        ensure!(self.windows > 0 && !self.window.is_zero(), "no window is measured");
        Ok(())
    }
}

/// Opens the device of this name; without a name the GPU, or else its stand-in and a line that says so.
///
/// # Errors
/// When it cannot be used.
pub fn open(name: Option<&str>) -> Result<(Box<dyn Device>, Option<String>)> {
    if let Some(name) = name {
        return Ok((devices::open(name)?, None));
    }
    // Not by its name: errors of that say what to name instead, which is what is done here.
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

/// What there is to say at the end.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// What a person should know about the device.
    pub notes: Vec<String>,
    /// What could not be measured, and why: a device that refused or failed; a packet that was lost, reordered or
    /// changed, or had a wrong result.
    pub failures: Vec<String>,
}

/// Measures everything that `options` asks for; `emit` gets each row as it is ready. What fails is left out, and the
/// rest measured all the same.
///
/// # Errors
/// When nothing can be measured.
pub fn run(
    options: &Options,
    device: Box<dyn Device>,
    progress: &Progress,
    emit: &mut dyn FnMut(Row),
) -> Result<Outcome> {
    options.check()?;
    let mut rig = Rig::new(options, device)?;
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
