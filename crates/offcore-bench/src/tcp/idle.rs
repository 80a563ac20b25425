//! `offcore bench tcp --case idle`: measures the cost of a segment of one connection with and without idle connections.

use anyhow::Result;

use super::link::{Load, SMALL_FIFO, Traffic};
use super::pair::{self, Pair};
use super::{Options, PAIR, Rig, row};
use crate::method::copier::Setup;
use crate::report::progress::Progress;
use crate::report::row::{BesideRatio, Row};
use crate::report::sample::SumRatio;

/// Default number of idle connections.
pub const IDLE: usize = 10_000;
/// Default write size of the application in bytes.
pub const CHUNK: usize = 64 << 10;

/// Measures everything that `options` selects and passes each finished row to `emit`. The connections in `options` are
/// the idle ones.
///
/// # Errors
/// If something cannot be set up, or a byte is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let mut rig = Rig::new(options, PAIR)?;
    let pages = rig.pages();
    progress.begin(options.steps(usize::from(options.noise_floor) + options.setups.len()));
    let loads = options.loads();
    for (side, segment, idle) in options.wires() {
        // Both sides use the same FIFO size, so that they differ only in the idle connections.
        let (fifo, checksums, past_caches) = (SMALL_FIFO, options.checksums, options.past_caches);
        let asks = false;
        let alone = Traffic { side, segment, connections: 1, idle: 0, fifo, checksums, past_caches, asks };
        let noise = match options.noise_floor {
            true => pair::noise(&mut rig, alone, &loads, options, progress)?,
            false => vec![None; loads.len()],
        };
        for &setup in &options.setups {
            let wanted = [alone, Traffic { idle, ..alone }];
            let pairs =
                pair::measure(&mut rig, wanted.map(|traffic| (setup, traffic)), &loads, options, progress)?;
            for ((pair, &load), &noise) in pairs.iter().zip(&loads).zip(&noise) {
                for mut row in rows(pair, setup, wanted, load) {
                    (row.peer.pages, row.figures.bursts_per_turn) = (pages, Some(options.extent.bursts));
                    row.ratios.noise = noise.into();
                    emit(row);
                }
            }
        }
    }
    progress.end();
    Ok(())
}

/// Returns the rows without and with idle connections.
fn rows(pair: &Pair, setup: Setup, wanted: [Traffic; 2], load: Load) -> Vec<Row> {
    let steadiness = pair.turns.steadiness();
    let mut rows: Vec<Row> = Vec::new();
    let mut alone = None;
    for (((link, blocks), traffic), moved) in pair.turns.iter().zip(wanted).zip(pair.moved) {
        let mut row = row(setup, traffic, load, blocks, steadiness, moved);
        row.tcp.idle_connections = Some(traffic.idle);
        if let Some(ns) = link.borrow().engine_ns_per_copy() {
            row.set_engine(ns, 1.0);
        }
        match alone {
            None => alone = Some(blocks),
            Some(alone) => {
                let ratio = SumRatio::of(&alone.core, &blocks.core);
                row.tcp.beside = BesideRatio::new(ratio, pair.turns.bounds(alone, blocks));
            }
        }
        rows.push(row);
    }
    rows
}
