//! What it costs a core to hand a copy to a work queue and to learn that it is done: bursts of 32, reorder ring, region
//! references and policy included, waits excluded. The simulated device is stepped by the other core between the two
//! timed halves. `core:1`, batches and single descriptors take turns.
//!
//!     cargo run --release -p offcore-dsa --example submit_reap [BYTES [ROUNDS]]

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use offcore_dma::Device;
use offcore_dma::core::CoreDevice;
use offcore_dma::cost::{BURST, SubmitReap};
use offcore_dsa::config::{Capabilities, OneLine, one_line};
use offcore_dsa::driver::{DsaDevice, Options};
use offcore_dsa::sim::{Profile, SimDevice, SimEngine, SimOptions};
use offcore_dsa::wq::WqMode;
use offcore_stats::lcore;

/// Operations that the channel holds.
const CHANNEL: usize = 1024;
/// Bursts of one subject before the next has its turn.
const TURN: usize = 100;

type Step = Box<dyn FnMut() + Send>;
type Error = Box<dyn std::error::Error>;

struct Subject {
    name: &'static str,
    cost: SubmitReap,
    cycles: Vec<[f64; 2]>,
}

fn simulated(batch: bool) -> Result<(DsaDevice, SimEngine), Error> {
    let device = "dsa-sim0".to_owned();
    let layout =
        one_line(&OneLine { device, wqs: 1, mode: WqMode::Dedicated, engines: 4 }, &Capabilities::spr())?;
    let options = SimOptions { profile: Profile::Layout(Box::new(layout)), ..SimOptions::default() };
    let (device, engine) = SimDevice::stepped("dsa-sim0", options)?;
    Ok((DsaDevice::simulated(&device, "wq0.0", Options { batch, ..Options::default() })?, engine))
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let len: u32 = arguments.next().map_or(Ok(64), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(40), |text| text.parse())?;
    let (core, mut stepper) = CoreDevice::stepped();
    let (batch, mut batch_engine) = simulated(true)?;
    let (direct, mut direct_engine) = simulated(false)?;
    let mut subjects = Vec::new();
    for (name, channel) in [
        ("core:1", core.open_channel(CHANNEL)?),
        ("dsa-sim batch", batch.open_channel(CHANNEL)?),
        ("dsa-sim direct", direct.open_channel(CHANNEL)?),
    ] {
        subjects.push(Subject { name, cost: SubmitReap::new(channel, len), cycles: Vec::new() });
    }
    let mut steps: Vec<Step> = vec![
        Box::new(move || while stepper.step() > 0 {}),
        Box::new(move || {
            batch_engine.run_until_idle();
        }),
        Box::new(move || {
            direct_engine.run_until_idle();
        }),
    ];
    let lcores = lcore::available()?;
    let (mine, other) = (lcores[0], lcores[lcores.len() - 1]);
    let (turn, done, end) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| -> Result<(), Error> {
        scope.spawn(|| {
            let pinned = lcore::pin(other);
            let mut seen = 0;
            while !end.load(Ordering::Relaxed) {
                let given = turn.load(Ordering::Acquire);
                if given != seen {
                    steps[given as usize % 4]();
                    seen = given;
                    done.store(given, Ordering::Release);
                }
                spin_loop();
            }
            pinned
        });
        let result = lcore::pin(mine).map_err(Error::from).and_then(|()| {
            for round in 0..rounds * subjects.len() {
                let which = round % subjects.len();
                for burst in 0..TURN {
                    let subject = &mut subjects[which];
                    let submitted = subject.cost.submit();
                    // The subject's number stands in the lowest two bits.
                    let given = ((round * TURN + burst + 1) as u64) << 2 | which as u64;
                    turn.store(given, Ordering::Release);
                    while done.load(Ordering::Acquire) != given {
                        spin_loop();
                    }
                    let (reaped, copies) = subject.cost.reap();
                    if copies != BURST {
                        return Err(
                            format!("{}: {copies} of {BURST} copies were reported", subject.name).into()
                        );
                    }
                    subject.cycles.push([submitted, reaped].map(|ticks| ticks as f64 / BURST as f64));
                }
            }
            Ok(())
        });
        end.store(true, Ordering::Relaxed);
        result
    })?;
    println!(
        "TSC cycles per copy of {len} bytes, bursts of {BURST}: quarter, median (submit + reap), three quarters"
    );
    for Subject { name, cycles, .. } in &mut subjects {
        cycles.drain(..cycles.len() / 10);
        let mut sums: Vec<f64> = cycles.iter().map(|[submit, reap]| submit + reap).collect();
        sums.sort_by(f64::total_cmp);
        let mut halves = [0, 1].map(|half| cycles.iter().map(|c| c[half]).collect::<Vec<f64>>());
        halves.iter_mut().for_each(|half| half.sort_by(f64::total_cmp));
        let at = |sorted: &[f64], quarter: usize| sorted[sorted.len() * quarter / 4];
        println!(
            "{name:<15} {:5.1} {:5.1} ({:.1} + {:.1}) {:5.1}",
            at(&sums, 1),
            at(&sums, 2),
            at(&halves[0], 2),
            at(&halves[1], 2),
            at(&sums, 3)
        );
    }
    Ok(())
}
