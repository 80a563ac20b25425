//! Copiers of a measurement: a mode, and an engine that the other core steps while the clock is stopped.

use std::fmt;
use std::str::FromStr;

use anyhow::Result;
use offcore_dma::core::CoreDevice;
use offcore_dma::{Channel, CopyDevice, Mode};
use offcore_dsa::WqMode;
use offcore_dsa::driver::{self, DsaDevice};
use offcore_dsa::sim::{Generation, Profile, SimDevice, SimEngine, SimOptions};
use offcore_stats::tsc;

use crate::model::load::layout;
use crate::model::rate::BATCH;
use crate::report::row::Row;
use crate::report::sample::Spread;

/// Maximum number of copies that an engine makes between two polls of the measured core, unless a single step of the
/// engine makes more: an engine that runs in parallel completes a few copies at a time.
pub const PORTION: usize = 32;
/// Number of operations that a channel holds.
pub const CHANNEL: usize = 1024;

/// The unit that copies: the measured core or an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Copier {
    /// The measured core itself.
    Core,
    /// A helper core. The other core steps its loop body between the timed parts.
    Helper,
    /// A work queue of a simulated DSA device behind the driver. It is stepped like the helper core and runs on its
    /// virtual clock.
    DsaSim {
        /// Whether a burst is submitted as batch descriptors. Otherwise each copy has its own descriptor.
        batch: bool,
    },
}

impl Copier {
    /// All copiers, the core first.
    pub const ALL: [Self; 4] =
        [Self::Core, Self::Helper, Self::DsaSim { batch: true }, Self::DsaSim { batch: false }];

    /// Returns the engine's name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Core => "cpu",
            Self::Helper => "core:1",
            Self::DsaSim { batch: true } => "dsa-sim",
            Self::DsaSim { batch: false } => "dsa-sim-direct",
        }
    }

    /// Returns whether the engine is simulated.
    pub const fn simulated(self) -> bool {
        matches!(self, Self::DsaSim { .. })
    }

    /// Returns the number of copies per submission if a burst is long enough.
    pub(crate) const fn batch(self) -> usize {
        match self {
            Self::DsaSim { batch: true } => BATCH,
            Self::Core | Self::Helper | Self::DsaSim { batch: false } => 1,
        }
    }

    /// Opens a channel of the engine, together with the function that steps it. Returns `None` for the core.
    ///
    /// # Errors
    /// If the engine cannot be opened.
    pub fn open(self) -> Result<Option<Engine>> {
        self.open_with(false)
    }

    /// As [`Copier::open`]. If `to_caches` is set, a helper core never uses stores that bypass its caches.
    pub(crate) fn open_with(self, to_caches: bool) -> Result<Option<Engine>> {
        match self {
            Self::Core => Ok(None),
            Self::Helper => {
                let (device, mut stepper) = CoreDevice::stepped();
                if to_caches {
                    stepper.disable_streaming_stores();
                }
                let step = move || {
                    let start = tsc::now();
                    let copies = stepper.step_at_most(PORTION);
                    Worked { copies, ns: (tsc::now() - start) as f64 * 1e9 / tsc::hz() as f64 }
                };
                Ok(Some(Engine::new(device.open_channel(CHANNEL)?, step)))
            }
            Self::DsaSim { batch } => Ok(Some(dsa_sim(batch)?)),
        }
    }
}

/// Opens a simulated DSA device with one dedicated queue that has all 256 entries of a second-generation device, so
/// that a window fits without batches, too. Its single group has four engines.
fn dsa_sim(batch: bool) -> Result<Engine> {
    let options = SimOptions {
        profile: Profile::Layout(Box::new(layout(1, 1, 4, 256, WqMode::Dedicated))),
        generation: Generation::Dsa2,
        ..SimOptions::default()
    };
    let (device, engine) = SimDevice::stepped("dsa-sim0", options)?;
    let queue =
        DsaDevice::simulated(&device, "wq0.0", driver::Options { batch, ..driver::Options::default() })?;
    Ok(Engine::new(queue.open_channel(CHANNEL)?, virtual_step(device, engine)))
}

/// Returns a function that steps a simulated device until it has completed a copy. Times are read from the virtual
/// clock.
pub(crate) fn virtual_step(device: SimDevice, mut engine: SimEngine) -> impl FnMut() -> Worked + Send {
    let copies = move |device: &SimDevice| {
        let stats = device.stats();
        stats.completed - stats.batches
    };
    move || {
        let (before, start) = (copies(&device), engine.now());
        while engine.step() {
            let copies = (copies(&device) - before) as usize;
            if copies > 0 {
                return Worked { copies, ns: (engine.now() - start) as f64 };
            }
        }
        Worked::default()
    }
}

impl fmt::Display for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Copier {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|copier| copier.name() == text);
        known.ok_or_else(|| format!("engine '{text}': expected {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// Mode and engine of a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// The copy mode of the queues.
    pub mode: Mode,
    /// The engine behind their channel.
    pub copier: Copier,
}

impl Setup {
    /// Sets mode and engine of a row.
    pub(crate) fn describe(self, row: &mut Row) {
        (row.head.mode, row.head.engine) = (self.mode.to_string(), self.copier.name().into());
        row.figures.simulated = self.copier.simulated();
    }

    /// The core copies.
    pub const CPU: Self = Self { mode: Mode::Cpu, copier: Copier::Core };
    /// A helper core copies.
    pub const HELPER: Self = Self { mode: Mode::Offload, copier: Copier::Helper };

    /// Returns the valid combinations of `modes` and `engines`: mode `cpu` takes no engine, and the other modes need
    /// one.
    pub fn combine(modes: &[Mode], engines: &[Copier]) -> Vec<Self> {
        let mut setups = Vec::new();
        for &copier in engines {
            for &mode in modes {
                if (mode == Mode::Cpu) == (copier == Copier::Core) {
                    setups.push(Self { mode, copier });
                }
            }
        }
        setups
    }

    /// Opens the engine.
    ///
    /// # Errors
    /// If the engine cannot be opened.
    pub fn open(self) -> Result<Option<Engine>> {
        self.copier.open()
    }

    /// As [`Setup::open`], with an engine that leaves its copies in a cache.
    pub(crate) fn open_to_caches(self) -> Result<Option<Engine>> {
        self.copier.open_with(true)
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.mode, self.copier)
    }
}

/// Work that an engine did in a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Worked {
    pub copies: usize,
    /// Duration in nanoseconds by the engine's clock: the TSC, or the virtual clock of a model.
    pub ns: f64,
}

/// The engine of a variant: its channel and the function that makes its copies.
pub struct Engine {
    channel: Option<Box<dyn Channel>>,
    step: Box<dyn FnMut() -> Worked + Send>,
    /// Nanoseconds per copy for each run. Their median is robust against preemption of the core.
    samples: Vec<f64>,
    latencies: Vec<f64>,
}

impl Engine {
    /// Creates an engine whose copies are made by `step`. `step` returns zero copies if no work is pending.
    pub fn new(channel: Box<dyn Channel>, step: impl FnMut() -> Worked + Send + 'static) -> Self {
        Self { channel: Some(channel), step: Box::new(step), samples: Vec::new(), latencies: Vec::new() }
    }

    /// Takes the channel for the submitting side. Returns `None` if it was taken before.
    pub fn take_channel(&mut self) -> Option<Box<dyn Channel>> {
        self.channel.take()
    }

    /// Runs the engine until no work is pending. Returns the work done.
    pub fn run(&mut self) -> Worked {
        self.run_for(usize::MAX)
    }

    /// Runs the engine until it has made [`PORTION`] copies or no work is pending. Returns the work done.
    pub fn run_portion(&mut self) -> Worked {
        self.run_for(PORTION)
    }

    fn run_for(&mut self, copies: usize) -> Worked {
        let mut all = Worked::default();
        while all.copies < copies {
            let worked = (self.step)();
            if worked.copies == 0 {
                break;
            }
            all.copies += worked.copies;
            all.ns += worked.ns;
        }
        if all.copies > 0 {
            self.samples.push(all.ns / all.copies as f64);
        }
        all
    }

    /// As [`Engine::run`], and records the completion time of each copy relative to the start.
    pub fn run_timed(&mut self) {
        self.latencies.clear();
        let mut now = 0.0;
        loop {
            let worked = (self.step)();
            if worked.copies == 0 {
                break;
            }
            now += worked.ns;
            self.latencies.extend(std::iter::repeat_n(now, worked.copies));
        }
    }

    /// Returns the nanoseconds from the start of the last [`Engine::run_timed`] to the completion of each copy, in
    /// order.
    pub fn latencies(&self) -> &[f64] {
        &self.latencies
    }

    /// Discards the recorded durations of copies.
    pub(crate) fn forget(&mut self) {
        self.samples.clear();
    }

    /// Returns the nanoseconds per copy, as the median over the engine's runs.
    pub fn ns_per_copy(&self) -> f64 {
        Spread::of(&self.samples).median
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("channel", &self.channel).field("runs", &self.samples.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_and_engines_combine() {
        let all = [Mode::Cpu, Mode::Offload, Mode::Auto];
        let setups = Setup::combine(&all, &Copier::ALL[..2]);
        let names: Vec<_> = setups.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["cpu cpu", "offload core:1", "auto core:1"]);
        assert_eq!(Setup::combine(&[Mode::Auto], &[Copier::Core]), []);
    }

    #[test]
    fn engine_runs_until_idle() {
        let mut engine = Copier::Helper.open().unwrap().unwrap();
        let channel = engine.take_channel().unwrap();
        assert!(engine.take_channel().is_none());
        assert_eq!((engine.run().copies, engine.ns_per_copy()), (0, 0.0));
        drop(channel);
        let mut left = 3;
        let (device, _stepper) = CoreDevice::stepped();
        let mut engine = Engine::new(device.open_channel(64).unwrap(), move || {
            left -= usize::from(left > 0);
            Worked { copies: left, ns: 5.0 * left as f64 }
        });
        assert_eq!((engine.run().copies, engine.ns_per_copy()), (3, 5.0));
        engine.forget();
        assert_eq!(engine.ns_per_copy(), 0.0);
    }
}
