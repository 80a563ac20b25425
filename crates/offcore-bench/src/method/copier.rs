//! Who makes the copies of a measurement: a mode, and an engine that somebody steps while the clock is stopped.

use std::fmt;
use std::str::FromStr;

use anyhow::Result;
use offcore_dma::core::CoreDevice;
use offcore_dma::{Channel, Device, Mode};
use offcore_dsa::WqMode;
use offcore_dsa::driver::{self, DsaDevice};
use offcore_dsa::sim::{Generation, Profile, SimDevice, SimEngine, SimOptions};
use offcore_stats::tsc;

use crate::model::load::layout;
use crate::model::rate::BATCH;
use crate::report::sample::Spread;

/// Copies that an engine makes from one look of the measured core to the next, at most, unless it makes more in one step:
/// a running engine completes some at a time.
pub const PORTION: usize = 32;
/// Operations that a channel holds.
pub const CHANNEL: usize = 1024;

/// What can copy besides, or instead of, the measured core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Copier {
    /// Nothing: the core itself.
    Core,
    /// A helper core, its loop body stepped by the other core between the timed parts.
    Helper,
    /// A work queue of a simulated DSA behind the driver, stepped as the helper core is, on its virtual clock.
    DsaSim {
        /// Bursts go as batch descriptors, or one descriptor a copy.
        batch: bool,
    },
}

impl Copier {
    /// All of them, the core first.
    pub const ALL: [Self; 4] =
        [Self::Core, Self::Helper, Self::DsaSim { batch: true }, Self::DsaSim { batch: false }];

    /// The engine's name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Core => "cpu",
            Self::Helper => "core:1",
            Self::DsaSim { batch: true } => "dsa-sim",
            Self::DsaSim { batch: false } => "dsa-sim-direct",
        }
    }

    /// Whether it is a model.
    pub const fn simulated(self) -> bool {
        matches!(self, Self::DsaSim { .. })
    }

    /// Copies that it hands over at a time when a burst is long enough.
    pub(crate) const fn batch(self) -> usize {
        match self {
            Self::DsaSim { batch: true } => BATCH,
            Self::Core | Self::Helper | Self::DsaSim { batch: false } => 1,
        }
    }

    /// A channel of the engine, and what steps it; `None` for the core.
    ///
    /// # Errors
    /// When the engine cannot be had.
    pub fn open(self) -> Result<Option<Engine>> {
        self.open_with(false)
    }

    /// As [`Copier::open`]; a helper core that is to keep `to_caches` never stores past its own.
    pub(crate) fn open_with(self, to_caches: bool) -> Result<Option<Engine>> {
        match self {
            Self::Core => Ok(None),
            Self::Helper => {
                let (device, mut stepper) = CoreDevice::stepped();
                if to_caches {
                    stepper.keep_to_caches();
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

/// One dedicated queue with all of a second-generation device's 256 entries, so that a window fits it without batches,
/// too; one group of four DSA engines.
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

/// Steps a simulated device until it has completed something; its time is the virtual clock's.
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

/// A mode and an engine: what a variant is measured with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Who copies for the queues.
    pub mode: Mode,
    /// The engine behind their channel.
    pub copier: Copier,
}

impl Setup {
    /// The core copies.
    pub const CPU: Self = Self { mode: Mode::Cpu, copier: Copier::Core };
    /// A helper core copies.
    pub const HELPER: Self = Self { mode: Mode::Offload, copier: Copier::Helper };

    /// What `modes` and `engines` make together: the core needs no engine, and an engine is for the other modes.
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
    /// When it cannot be had.
    pub fn open(self) -> Result<Option<Engine>> {
        self.copier.open()
    }

    /// As [`Setup::open`], an engine whose copies are in a cache when they are done.
    pub(crate) fn open_to_caches(self) -> Result<Option<Engine>> {
        self.copier.open_with(true)
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.mode, self.copier)
    }
}

/// What an engine did in a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Worked {
    pub copies: usize,
    /// Nanoseconds that took, by the engine's clock: the TSC, or a model's virtual clock.
    pub ns: f64,
}

/// An engine for a variant: a channel of it, and what makes its copies.
pub struct Engine {
    channel: Option<Box<dyn Channel>>,
    step: Box<dyn FnMut() -> Worked + Send>,
    /// Nanoseconds a copy, of each run: the median does not notice when the core was taken away for a while.
    samples: Vec<f64>,
    latencies: Vec<f64>,
}

impl Engine {
    /// An engine whose copies `step` makes; it returns no copies when there is nothing to do.
    pub fn new(channel: Box<dyn Channel>, step: impl FnMut() -> Worked + Send + 'static) -> Self {
        Self { channel: Some(channel), step: Box::new(step), samples: Vec::new(), latencies: Vec::new() }
    }

    /// The channel, for whoever submits; there is one.
    pub fn take_channel(&mut self) -> Option<Box<dyn Channel>> {
        self.channel.take()
    }

    /// Runs the engine until it has nothing to do; returns what it did.
    pub fn run(&mut self) -> Worked {
        self.run_for(usize::MAX)
    }

    /// Runs the engine until it has made a [`PORTION`] or has nothing to do; returns what it did.
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

    /// As [`Engine::run`], and notes how long after the beginning each copy was done.
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

    /// Nanoseconds from the beginning of the last [`Engine::run_timed`] to the end of each copy, in order.
    pub fn latencies(&self) -> &[f64] {
        &self.latencies
    }

    /// Forgets how long copies took.
    pub(crate) fn forget(&mut self) {
        self.samples.clear();
    }

    /// Nanoseconds that it took for a copy, the median over its runs.
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
