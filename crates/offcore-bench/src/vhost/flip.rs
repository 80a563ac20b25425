//! `offcore bench vhost --case flip`: data alternates between hot and cold every 100 ms. Mode `auto` is compared with
//! an oracle that uses the better of core and engine at each temperature.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use offcore_dma::Mode;
use offcore_stats::tsc;

use crate::guests::memory::{Need, RunMemory, Testbed, page_name};
use crate::guests::workload::{Ring, Route, Workload};
use crate::method::alternate::{Cost, FEWEST, Subject, mean};
use crate::method::copier::Setup;
use crate::method::lockstep::OtherCore;
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::{Bounds, ClockCheck, Spread, Steadiness, SumRatio};
use crate::vhost::Options;
use crate::vhost::core_cost::OwnVariant;

/// Wall-clock duration of a temperature phase.
pub const PHASE: Duration = Duration::from_millis(100);
/// The phases of a turn, in order.
const PHASES: [Temperature; 2] = [Temperature::Hot, Temperature::Cold];
/// Divisor of the number of blocks in `Options`, because blocks of this case are longer.
const SHORTER: usize = 10;

/// A variant and the cost of each of its turns, which have two phases.
struct Variant {
    setup: Setup,
    variant: OwnVariant,
    turns: Vec<[Cost; 2]>,
}

impl Variant {
    fn new(setup: Setup, bed: &Testbed) -> Result<Self> {
        Ok(Self { setup, variant: OwnVariant::new(bed, setup.mode, setup.open()?)?, turns: Vec::new() })
    }

    /// Runs both phases. Every packet counts, because the cost of adapting to the temperature is the object of the
    /// measurement.
    fn turn(&mut self, other: &OtherCore) -> Result<[Cost; 2]> {
        let mut costs = [Cost::default(); 2];
        for (temperature, cost) in PHASES.into_iter().zip(&mut costs) {
            self.variant.set_temperature(temperature, other)?;
            let started = Instant::now();
            while started.elapsed() < PHASE {
                *cost += self.variant.window(other)?;
            }
        }
        Ok(costs)
    }

    /// Returns the ticks per packet of each turn. Both temperatures have the same weight, whatever the number of
    /// packets in each.
    fn samples(&self) -> Vec<f64> {
        self.turns
            .iter()
            .map(|turn| turn.iter().map(|cost| cost.core_per_packet()).sum::<f64>() / 2.0)
            .collect()
    }

    /// Returns the ticks per packet at each temperature, over all turns.
    fn means(&self) -> [f64; 2] {
        [0, 1].map(|phase| {
            let mut all = Cost::default();
            self.turns.iter().for_each(|turn| all += turn[phase]);
            all.core_per_packet()
        })
    }
}

/// Measures every ring and frame length of `options` with its modes and engines. All three modes are required.
///
/// # Errors
/// If a mode is missing, something cannot be set up, or a packet is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let engines: Vec<_> = options.setups.iter().filter(|setup| setup.mode == Mode::Auto).collect();
    let wanted = |setup: &&Setup| {
        let offload = Setup { mode: Mode::Offload, ..**setup };
        options.setups.contains(&Setup::CPU) && options.setups.contains(&offload)
    };
    if engines.is_empty() || !engines.iter().all(wanted) {
        bail!(
            "case flip compares mode auto with the two others: leave out --mode, and give engine cpu and another"
        );
    }
    let other = options.extent.start()?;
    let memory = RunMemory::new(Need::of(Route::Loop, &PHASES), options.extent.hugepages)?;
    let mut clock = ClockCheck::new();
    let blocks = options.extent.blocks.div_ceil(SHORTER).max(FEWEST);
    progress.begin(options.rings.len() * options.frames.len() * blocks);
    for (&ring, &frame) in options.rings.iter().flat_map(|ring| options.frames.iter().map(move |f| (ring, f)))
    {
        let workload = Workload { ring, ..Workload::table8(Temperature::Cold, frame) };
        progress.say(&format!("flip, {ring}, {frame} B"));
        let bed = Testbed::new(&memory, &workload)?;
        let variants = options.setups.iter().map(|&setup| Variant::new(setup, &bed));
        let mut cell = Flipping { variants: variants.collect::<Result<_>>()?, ..Flipping::default() };
        // A second variant of the core, for the noise floor.
        cell.variants.push(Variant::new(Setup::CPU, &bed)?);
        cell.measure(blocks, &other, &mut clock, progress).with_context(|| workload.to_string())?;
        let noise = cell.noise();
        let (variants, steadiness) = (&cell.variants[..options.setups.len()], cell.steadiness);
        for variant in variants {
            let mut row = row(variant, variants, ring, frame);
            row.peer.pages = Some(page_name(memory.page_size()));
            row.ratios.noise = noise.into();
            row.clock = steadiness;
            emit(row);
        }
    }
    progress.end();
    Ok(())
}

/// The alternating variants.
#[derive(Default)]
struct Flipping {
    variants: Vec<Variant>,
    steadiness: Steadiness,
}

impl Flipping {
    /// Runs `blocks` blocks, each with every variant in order and then in reverse order. Blocks during which the clock
    /// changed are repeated, as in the other cases.
    fn measure(
        &mut self,
        blocks: usize,
        other: &OtherCore,
        clock: &mut ClockCheck,
        progress: &Progress,
    ) -> Result<()> {
        let Self { variants, steadiness } = self;
        let count = variants.len();
        let mut counted = 0;
        while counted < blocks {
            let order = (0..count).map(|i| (counted + i) % count);
            let mut turns = Vec::with_capacity(2 * count);
            let mut steady = clock.holds();
            for i in order.clone().chain(order.rev()) {
                turns.push((i, variants[i].turn(other)?));
                steady &= clock.holds();
            }
            if !steadiness.counts(steady, blocks) {
                continue;
            }
            turns.into_iter().for_each(|(i, turn)| variants[i].turns.push(turn));
            counted += 1;
            progress.step();
        }
        steadiness.note(clock);
        Ok(())
    }

    /// Returns the bounds of the core against itself: its first variant and the additional one.
    fn noise(&self) -> Option<Bounds> {
        let mut cpu = self.variants.iter().filter(|variant| variant.setup == Setup::CPU);
        let (a, b) = (cpu.next()?.samples(), cpu.next()?.samples());
        Bounds::of(&a, &b, a.len() / 2)
    }
}

fn row(variant: &Variant, all: &[Variant], ring: Ring, frame: usize) -> Row {
    let Setup { mode, copier } = variant.setup;
    let seen = variant.variant.seen();
    let names: Vec<_> = all.iter().map(|variant| variant.setup.to_string()).collect();
    let mut row = Row::new("vhost", "flip", "core-cost");
    variant.setup.describe(&mut row);
    (row.head.frame, row.head.ring, row.head.guest) = (frame, ring.name(), Some("simple"));
    row.head.temperature = "hot, cold".into();
    row.peer.variants = Some(names.join(", "));
    row.core.copy_routine = variant.variant.copy_routine();
    row.counts = seen.counts();
    let samples = variant.samples();
    row.set_cycles(Spread::of(&samples), tsc::hz());
    row.figures.mean = mean(&samples);
    if mode == Mode::Auto {
        let of = |setup: Setup| all.iter().find(|variant| variant.setup == setup);
        let both = of(Setup::CPU).zip(of(Setup { mode: Mode::Offload, copier }));
        let ratio = both.and_then(|(cpu, offload)| over_oracle(variant, cpu, offload));
        row.ratios.auto.auto_over_oracle = ratio.map(|ratio| ratio.sums);
        row.ratios.auto.auto_over_oracle_lower = ratio.map(|ratio| ratio.lower);
    }
    row
}

/// Returns the speed of `auto` relative to an oracle that uses the better mode at each temperature, for the packets
/// that `auto` has moved.
fn over_oracle(auto: &Variant, cpu: &Variant, offload: &Variant) -> Option<SumRatio> {
    let (by_core, by_engine) = (cpu.means(), offload.means());
    let pairs = auto.turns.iter().zip(cpu.turns.iter().zip(&offload.turns));
    let pairs = pairs.map(|(auto, (cpu, offload))| {
        let ticks = [0, 1].map(|phase| {
            let better = if by_core[phase] <= by_engine[phase] { cpu } else { offload };
            better[phase].core_per_packet() * auto[phase].packets as f64
        });
        (ticks.iter().sum::<f64>(), auto.iter().map(|cost| cost.core as f64).sum::<f64>())
    });
    let (oracle, spent): (Vec<f64>, Vec<f64>) = pairs.unzip();
    SumRatio::of(&oracle, &spent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;
    use offcore_mem::Hugepages;

    #[test]
    fn oracle_takes_the_better_mode() {
        let need = Need::of(Route::Loop, &[Temperature::Hot]);
        let memory = RunMemory::new(need, Hugepages::None).unwrap();
        let bed = Testbed::new(&memory, &Workload::table8(Temperature::Hot, 64)).unwrap();
        let variant = |hot: u64, cold: u64| Variant {
            setup: Setup::CPU,
            variant: OwnVariant::new(&bed, Mode::Cpu, None).unwrap(),
            turns: vec![[hot, cold].map(|ticks| Cost { packets: 10, core: 10 * ticks, guest: 0 }); 5],
        };
        // The core is better for hot data, the engine for cold data: (100 + 200) / (150 + 250).
        let cell = [Mode::Cpu, Mode::Offload, Mode::Auto].map(|mode| {
            let copier = if mode == Mode::Cpu { Setup::CPU.copier } else { Setup::HELPER.copier };
            Variant { setup: Setup { mode, copier }, ..variant(100, 200) }
        });
        for (index, name) in [(0, "cpu"), (2, "auto")] {
            golden::check(&format!("vhost, flip, {name}"), &row(&cell[index], &cell, Ring::Split, 64));
        }
        let ratio = over_oracle(&variant(150, 250), &variant(100, 1000), &variant(300, 200)).unwrap();
        assert!((ratio.sums - 300.0 / 400.0).abs() < 1e-9, "{ratio:?}");
    }
}
