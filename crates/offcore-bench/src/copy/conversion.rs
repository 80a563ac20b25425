//! `offcore bench copy --case conversion`: measures the conversion of DPDK's packet buffers to packet handles and of
//! handles to packet buffers, over net_null, whose packets cost no time.

use anyhow::{Context, Result};
use offcore_dpdk::measure::measure_conversion;
use offcore_stats::{lcore, tsc};

use crate::report::row::Row;
use crate::report::sample::Spread;

/// Number of repetitions, each with a new device.
const RUNS: usize = 5;

/// Measures `rounds` rounds of 32768 packets on lcore `core`. The rows are the conversion alone (`conversion`),
/// receiving and sending through our port (`net_null port`), and through DPDK's calls alone (`net_null calls`).
///
/// # Errors
/// If the environment layer does not start, or net_null is missing.
pub fn run(core: usize, rounds: usize, emit: &mut dyn FnMut(Row)) -> Result<()> {
    lcore::pin(core)?;
    let mut samples = [const { Vec::new() }; 3];
    for _ in 0..RUNS {
        let cost = measure_conversion(rounds.div_ceil(RUNS)).context("net_null")?;
        for (samples, cycles) in samples.iter_mut().zip([cost.loops, cost.port, cost.bare]) {
            samples.push(cycles);
        }
    }
    for (case, samples) in ["conversion", "net_null port", "net_null calls"].into_iter().zip(&samples) {
        let mut row = Row::new("copy", case, "core-cost");
        (row.head.frame, row.head.burst) = (64, 32);
        (row.head.engine, row.head.temperature) = ("none".into(), "hot".into());
        row.set_cycles(Spread::of(samples), tsc::hz());
        emit(row);
    }
    Ok(())
}
