//! Common flags of the core cost benchmarks: cells, engines, duration and lcores.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::TypedValueParser;
use offcore_bench::alternate::{Extent, TURN_BURSTS};
use offcore_bench::copier::{Copier, Setup};
use offcore_bench::temperature::Temperature;
use offcore_dma::Mode;
use offcore_mem::Hugepages;

use super::{FRAME, Format, plot_file, two_lcores};
use crate::args::{Lcores, choice, lcores, named, one_of, within};
use crate::failure::Failure;

/// A B B A blocks of a cell, as the design requires.
pub(super) const BLOCKS: usize = 200;
/// A B B A blocks of a cell with `--quick`.
pub(super) const QUICK_BLOCKS: usize = 60;
/// Time limit for a cell with `--quick`, beyond its minimum number of blocks. With it, a whole table takes some
/// minutes.
const QUICK_TIMEOUT: Duration = Duration::from_millis(500);

/// Flags of all commands that measure this machine.
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// The measured lcore, and the lcore of everything else, such as guests and engines [default: the first two]
    #[arg(long, value_name = "A,B", value_parser = lcores)]
    pub lcores: Option<Lcores>,

    /// Page size of packet buffers, guests and rings: auto selects the largest available, none selects ordinary pages
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = named::<Hugepages>())]
    pub hugepages: Hugepages,

    /// Measure fewer blocks and windows: a few minutes for all core costs, less than two minutes for end-to-end
    #[arg(long)]
    pub quick: bool,

    /// Results as a table, as JSON with one object per line, or as CSV
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,
}

/// Flags of `offcore bench vhost` and `offcore bench copy`.
#[derive(Args, Debug)]
pub(crate) struct CellArgs {
    /// Frame lengths in bytes, including FCS [default: 64,128,256,512,1024,1280,1518; flip: 512,1518; latency:
    /// 64,512,1518; neighbour: 64,1518]
    #[arg(long = "frame", value_name = "LIST", value_delimiter = ',', value_parser = within(FRAME))]
    pub frames: Vec<usize>,

    /// Location of the data: in this core's cache (hot), in the other core's (remote), or in none (cold) [default: all
    /// three]
    #[arg(long = "temperature", value_name = "LIST", value_delimiter = ',', value_parser = temperature())]
    pub temperatures: Vec<Temperature>,

    /// Copies by the core (cpu), by an engine (offload), or by the cheaper of both as measured (auto) [default: all
    /// three]
    #[arg(long = "mode", value_name = "LIST", value_delimiter = ',', value_parser = named::<Mode>())]
    pub modes: Vec<Mode>,

    /// Copy engines: cpu for mode cpu, the others for the other modes [default: cpu,core:1]
    #[arg(long = "engine", value_name = "LIST", value_delimiter = ',', value_parser = choice::<Copier>(Copier::ALL.map(Copier::name)))]
    pub engines: Vec<Copier>,

    /// Also measure mode cpu while the other core copies at an equal rate
    #[arg(long)]
    pub background: bool,

    /// Plot the core costs to an SVG file
    #[arg(long, value_name = "FILE.svg", value_parser = plot_file)]
    pub plot: Option<PathBuf>,

    #[command(flatten)]
    pub bench: BenchArgs,
}

pub(crate) fn temperature() -> impl TypedValueParser<Value = Temperature> {
    one_of(Temperature::NAMES, Temperature::find)
}

/// Returns `given`, or `otherwise` if nothing was given.
pub(crate) fn or<T: Clone>(given: &[T], otherwise: &[T]) -> Vec<T> {
    if given.is_empty() { otherwise.to_vec() } else { given.to_vec() }
}

/// The cases that a flag applies to.
#[derive(Clone, Copy)]
pub(super) struct FlagCases<'a, C> {
    pub(super) cases: &'a [C],
    /// Their names in an error message.
    pub(super) names: &'a str,
}

impl<'a, C: PartialEq> FlagCases<'a, C> {
    pub(super) const fn new(cases: &'a [C], names: &'a str) -> Self {
        Self { cases, names }
    }

    /// Checks that a `given` flag applies to one or more of the `chosen` cases. Otherwise the results would suggest
    /// that the flag was applied.
    pub(super) fn check(self, chosen: &[C], given: bool, flag: &str) -> Result<(), String> {
        match !given || chosen.iter().any(|case| self.cases.contains(case)) {
            true => Ok(()),
            false => Err(format!("{flag} requires --case {}: add the case, or remove {flag}", self.names)),
        }
    }
}

/// Returns all combinations of modes and engines.
pub(super) fn setups(modes: &[Mode], engines: &[Copier]) -> Result<Vec<Setup>, String> {
    let modes = or(modes, &[Mode::Cpu, Mode::Offload, Mode::Auto]);
    let engines = or(engines, &[Copier::Core, Copier::Helper]);
    let setups = Setup::combine(&modes, &engines);
    match setups.is_empty() {
        false => Ok(setups),
        true => Err(
            "--mode and --engine leave nothing to measure: mode cpu needs engine cpu, the other modes need another \
                     engine"
                .into(),
        ),
    }
}

impl BenchArgs {
    /// Returns the extent of a core cost measurement.
    pub(super) fn extent(&self) -> Result<Extent, Failure> {
        let (lcore, other_lcore) = two_lcores(self.lcores.as_ref())?;
        Ok(Extent {
            blocks: if self.quick { QUICK_BLOCKS } else { BLOCKS },
            bursts: TURN_BURSTS,
            timeout: self.quick.then_some(QUICK_TIMEOUT),
            hugepages: self.hugepages,
            lcore,
            other_lcore,
        })
    }
}

impl CellArgs {
    pub(super) fn setups(&self) -> Result<Vec<Setup>, String> {
        setups(&self.modes, &self.engines)
    }
}
