//! The `neighbour` case of `offcore bench vhost`: measures the share of its packet rate that an honest guest retains
//! when another guest causes its worker as much work as possible.
//!
//! ```text
//! lcore                                   other lcore
//! two vhost ports, mac, back where it ──  one thread: the honest guest's closed loop, and
//! came (Table 8's loop)                   in every other window the bad guest's steps
//! ```
//! Windows alternate, A B B A: alone, beside, beside, alone. The result is the honest guest's packet rate beside the
//! bad guest relative to its rate alone. One half is a fair share. The bad guest's steps run on the honest guest's
//! core, which lowers our result. Every packet of the honest guest is checked, and every 64th byte by byte. For the bad
//! guest, the benchmark only checks that some packets come back.

mod bad_guest;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use offcore_dma::Mode;
use offcore_mem::{Hugepages, Pool};
use offcore_stats::tsc;

use super::latency::back_end::BackEnd;
use super::round_trips::{RoundTrips, WINDOW, Way};
use crate::guests::guest::PORT_MAC;
use crate::guests::workload::Ring;
use crate::peer::tempdir::TempDir;
use crate::report::progress::Progress;
use crate::report::row::{Counts, Row};
use crate::report::sample::Spread;
pub use bad_guest::Attack;
use bad_guest::BadGuest;

/// Default frame lengths.
pub const FRAMES: [usize; 2] = [64, 1518];

/// Number of packet buffers of the back end.
const BUFFERS: usize = 16384;
/// Run-in time of both guests before each window, in which the back end also finishes pending work.
const SETTLE: Duration = Duration::from_millis(50);
/// Time after which an outstanding packet counts as lost.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct NeighbourOptions {
    /// Frame lengths of the honest guest, including the FCS.
    pub frames: Vec<usize>,
    /// Number of A B B A blocks per attack.
    pub blocks: usize,
    /// Length of a window.
    pub window: Duration,
    pub hugepages: Hugepages,
    /// The back end's core.
    pub lcore: usize,
    /// The guests' core.
    pub other_lcore: Option<usize>,
}

impl NeighbourOptions {
    /// Returns options with ten blocks of windows of 0.2 s, or two blocks with `quick`.
    pub fn new(frames: &[usize], quick: bool, lcore: usize, other_lcore: Option<usize>) -> Self {
        let (blocks, window) = (if quick { 2 } else { 10 }, Duration::from_millis(200));
        Self { frames: frames.into(), blocks, window, hugepages: Hugepages::Auto, lcore, other_lcore }
    }
}

/// Measures everything that `options` selects and passes each finished row to `emit`. Attacks that need hugepages are
/// skipped if none are available.
///
/// # Errors
/// If two lcores are not available, something cannot be set up, or a packet comes back changed or out of order.
pub fn run(options: &NeighbourOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let Some(other_lcore) = options.other_lcore.filter(|&other| other != options.lcore) else {
        bail!("neighbour needs two lcores: one for the back end, one for the guests; see --lcores");
    };
    offcore_stats::lcore::pin(other_lcore)?;
    let pool = Pool::new(BUFFERS, 2048, options.hugepages)?;
    let attacks: Vec<Attack> = Attack::ALL.into_iter().filter(|attack| attack.is_possible()).collect();
    progress.begin(options.frames.len() * attacks.len() * options.blocks);
    for &frame in &options.frames {
        for &attack in &attacks {
            progress.say(&format!("neighbour {frame} B, {}", attack.name()));
            let cell = Cell::measure(options, frame, attack, pool, progress);
            emit(cell.with_context(|| format!("{frame} B beside {}", attack.name()))?);
        }
    }
    progress.end();
    Ok(())
}

/// One honest guest and one bad guest.
struct Cell {
    honest: RoundTrips,
    bad: BadGuest,
}

impl Cell {
    fn measure(
        options: &NeighbourOptions,
        frame: usize,
        attack: Attack,
        pool: &'static Pool,
        progress: &Progress,
    ) -> Result<Row> {
        let dir = TempDir::new()?;
        let sockets = ["honest", "bad"].map(|name| dir.file(name));
        let mut back_end = BackEnd::start(&sockets, options.lcore, pool, Mode::Cpu, None)?;
        let way = Way::Rewritten(Some(PORT_MAC));
        let honest = RoundTrips::connect(&sockets[..1], Ring::Split, frame, way, options.hugepages)?;
        let mut cell = Self { honest, bad: BadGuest::connect(&sockets[1], attack)? };
        cell.window(SETTLE, true)?;
        let (mut alone, mut beside) = (Vec::new(), Vec::new());
        let mut turns = [0; 2];
        for _ in 0..options.blocks {
            for is_beside in [false, true, true, false] {
                cell.window(SETTLE, is_beside)?;
                let before = back_end.turns()?;
                let rate = cell.window(options.window, is_beside)?;
                if is_beside {
                    let after = back_end.turns()?;
                    turns = [0, 1].map(|i| turns[i] + after[i + 1] - before[i + 1]);
                }
                if is_beside { &mut beside } else { &mut alone }.push(rate);
            }
            progress.step();
        }
        ensure!(
            cell.bad.received() > 0,
            "none of the bad guest's packets came back: it has had nothing done"
        );
        let [longest, ..] = back_end.turns()?;
        let mut row = cell.row(frame, attack, &alone, &beside);
        row.load.longest_turn_us = Some(tsc::to_ns(longest) / 1e3);
        row.load.core_share = (turns[1] > 0).then(|| turns[0] as f64 / turns[1] as f64);
        drop(cell);
        match back_end.stop()? {
            0 => Ok(row),
            left => bail!("{left} packets were never finished"),
        }
    }

    /// Returns the honest guest's packets per TSC tick in a closed loop, alone or beside the bad guest.
    fn window(&mut self, length: Duration, beside: bool) -> Result<f64> {
        let Self { honest, bad } = self;
        if !beside {
            bad.rest();
        }
        let (ticks, start) = (tsc::ticks(length), tsc::now());
        let (mut last, mut received) = (start, 0);
        // On a busy machine the first packet may arrive after the end of the window.
        let most = ticks.max(tsc::ticks(TIMEOUT));
        while last - start < ticks || received == 0 && last - start < most {
            if beside {
                bad.step()?;
            }
            honest.send(WINDOW - honest.outstanding())?;
            received += honest.receive()?;
            last = tsc::now();
        }
        honest.gather_in(TIMEOUT, |packets| {
            if beside {
                bad.step()?;
            }
            packets.receive()
        })?;
        ensure!(
            received > 0,
            "no packet has come back within {length:?}: does another program have the back end's lcore?"
        );
        ensure!(
            honest.lost() == 0,
            "of {WINDOW} packets under way {} have not come back within {TIMEOUT:?}: does another program have the back end's lcore?",
            honest.lost()
        );
        Ok(received as f64 / (last - start) as f64)
    }

    fn row(&self, frame: usize, attack: Attack, alone: &[f64], beside: &[f64]) -> Row {
        let sum = |rates: &[f64]| rates.iter().sum::<f64>();
        let mpps = |rates: &[f64]| sum(rates) / rates.len().max(1) as f64 * tsc::hz() as f64 / 1e6;
        let pairs = |rates: &[f64]| rates.chunks(2).map(sum).collect::<Vec<_>>();
        let kept: Vec<f64> = pairs(beside).iter().zip(pairs(alone)).map(|(b, a)| b / a).collect();
        // Noise: the deviation from 1 of the ratio of the two windows alone in each block, which differ in nothing.
        let same: Vec<f64> = alone.chunks_exact(2).map(|pair| (pair[0] / pair[1] - 1.0).abs()).collect();
        let seen = self.honest.seen();
        let mut row = Row::new("vhost", "neighbour", "end-to-end");
        (row.head.frame, row.head.ring, row.head.temperature) = (frame, "split", "remote".into());
        (row.load.attack, row.load.capacity_mpps) = (Some(attack.name()), Some(mpps(alone)));
        row.set_spread("kept", "ratio", Spread::of(&kept));
        row.tcp.beside.beside_over_alone = Some(sum(beside) / sum(alone));
        row.ratios.noise.noise_floor = Some(Spread::of(&same).median);
        row.figures.tsc_hz = tsc::hz();
        row.counts = Counts { received: seen.received, verified: seen.verified, lost: self.honest.lost() };
        row.set_mpps(mpps(beside));
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    #[test]
    fn every_attack_is_survived_and_counted() {
        let lcores = offcore_stats::lcore::available().unwrap();
        let options = NeighbourOptions {
            blocks: 1,
            window: Duration::from_millis(20),
            hugepages: Hugepages::None,
            ..NeighbourOptions::new(&[64], true, lcores[0], lcores.get(1).copied())
        };
        let mut rows = Vec::new();
        let result = run(&options, &Progress::hidden(), &mut |row| rows.push(row));
        if options.other_lcore.is_none() {
            assert!(result.unwrap_err().to_string().contains("two lcores"));
            return;
        }
        result.unwrap();
        let possible = Attack::ALL.into_iter().filter(|attack| attack.is_possible());
        let names: Vec<&str> = possible.map(Attack::name).collect();
        assert_eq!(rows.iter().filter_map(|row| row.load.attack).collect::<Vec<_>>(), names);
        for row in &rows {
            golden::check("vhost, neighbour", row);
            assert!(
                row.counts.received > 0
                    && row.counts.verified > 0
                    && row.counts.verified <= row.counts.received,
                "{row:?}"
            );
            assert!(
                row.figures.mpps > 0.0
                    && row.load.capacity_mpps > Some(0.0)
                    && row.figures.spread.median > 0.0,
                "{row:?}"
            );
            assert_eq!(row.counts.lost, 0, "{row:?}");
        }
    }
}
