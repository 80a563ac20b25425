//! `offcore bench vhost --work-ns`: measures the benefit of offloading for an application that works on every packet.
//!
//! If the core copies, work and copies add up. If an engine copies in parallel, the core only does the work and handles
//! descriptors, and the engine makes the copies in the meantime.

use anyhow::Result;
use offcore_stats::tsc;

use crate::guests::guest::Seen;
use crate::guests::memory::{Need, RunMemory, Testbed};
use crate::guests::workload::{Route, Workload};
use crate::method::alternate::turn;
use crate::method::copier::Setup;
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::{Counts, Row};
use crate::report::sample::Spread;
use crate::vhost::Options;
use crate::vhost::core_cost::OwnVariant;

/// Application work per packet in the steps of the sweep, in nanoseconds.
pub const WORK_NS: [u64; 8] = [0, 50, 100, 200, 400, 800, 1200, 1600];
/// Measures every combination of `options`' rings, frames and set-ups over [`WORK_NS`] with remote data.
///
/// # Errors
/// If something cannot be set up, or a packet is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let other = options.extent.start()?;
    let memory = RunMemory::new(Need::of(Route::Loop, &[Temperature::Remote]), options.extent.hugepages)?;
    let turns = options.extent.blocks.div_ceil(25).max(4);
    progress.begin(options.rings.len() * options.frames.len() * options.setups.len() * WORK_NS.len());
    for (&ring, &frame) in options.rings.iter().flat_map(|ring| options.frames.iter().map(move |f| (ring, f)))
    {
        let workload = Workload { ring, ..Workload::table8(Temperature::Remote, frame) };
        let bed = Testbed::new(&memory, &workload)?;
        for &setup in &options.setups {
            let mut variant = OwnVariant::new(&bed, setup.mode, setup.open()?)?;
            for work_ns in WORK_NS {
                progress.say(&format!("{workload}, {work_ns} ns of work"));
                variant.set_work(work_ns)?;
                let before = variant.seen();
                let turn = |_| Ok(turn(&mut variant, options.extent.bursts, &other)?.timed.core_per_packet());
                let samples = (0..turns).map(turn).collect::<Result<Vec<_>>>()?;
                emit(row(&mut variant, &before, setup, &workload, work_ns, &samples));
                progress.step();
            }
        }
    }
    progress.end();
    Ok(())
}

/// Returns the row. `before` holds the guests' counters at the start of these samples.
fn row(
    variant: &mut OwnVariant,
    before: &Seen,
    setup: Setup,
    workload: &Workload,
    work_ns: u64,
    samples: &[f64],
) -> Row {
    let seen = variant.seen();
    let received = seen.received - before.received;
    let mut row = Row::new("vhost", "work", "core-cost");
    setup.describe(&mut row);
    (row.head.frame, row.head.ring) = (workload.frame, workload.ring.name());
    row.head.temperature = Temperature::Remote.name().into();
    row.head.window = Temperature::Remote.window();
    row.figures.work_ns = work_ns;
    let (verified, lost) = (seen.verified - before.verified, seen.sent - before.sent - received);
    row.counts = Counts { received, verified, lost };
    row.set_cycles(Spread::of(samples), tsc::hz());
    match variant.engine_ns_per_copy() {
        Some(ns) => row.set_engine(ns, variant.copies()),
        None => (row.core.sustained_mpps, row.core.bound) = (Some(row.figures.mpps), Some("core")),
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;
    use offcore_mem::Hugepages;

    #[test]
    fn rows_state_their_work() {
        let memory = RunMemory::new(Need::of(Route::Loop, &[Temperature::Remote]), Hugepages::None).unwrap();
        let workload = Workload::table8(Temperature::Remote, 64);
        let bed = Testbed::new(&memory, &workload).unwrap();
        let mut variant = OwnVariant::new(&bed, Setup::CPU.mode, None).unwrap();
        let row = row(&mut variant, &Seen::default(), Setup::CPU, &workload, 50, &[100.0; 4]);
        golden::check("vhost, work", &row);
        assert_eq!((row.figures.work_ns, row.core.bound), (50, Some("core")));
    }
}
