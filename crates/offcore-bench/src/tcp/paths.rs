//! `offcore bench tcp --case paths`: measures a stream over a slow, long or lossy path between our host and the
//! kernel's TCP, compared with the same stream between two kernels.
//!
//! ```text
//! lcore                                               other lcore
//! ours:   af_packet, host ──── veth ── offcore switch, impair: ── veth ──┐
//!         (the two alternate)                                            ├── the kernel's TCP, in its own namespace
//! theirs: the kernel's TCP ─── veth ── offcore switch, impair: ── veth ──┘
//! ```
//! Both paths have the same structure: a relay, an `offcore switch --idle sleep`, delays, limits, drops and reorders
//! packets in both directions. Offloads are off, so that the relay gets single segments. A relay holds twice the
//! bandwidth-delay product, and at least 512 packets, including packets in flight. Each window is a new connection,
//! measured from its first byte on, so that slow start is part of the figure. The reader compares every byte. The
//! kernels keep no metrics of earlier connections.
//!
//! If the measured hosts send, both use CUBIC. If they receive, the sending kernel uses Reno: HyStart in its CUBIC ends
//! slow start early by chance, in about a third of the connections over 200 ms, independent of the receiver.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use offcore_mem::{Hugepages, Pool};

use super::link::Side;
use super::veth::{self, Far, Host, Kernel, Under, congestion_control, pair};
use super::{BUFFER, BUFFERS};
use crate::peer::netns::{self, Netns};
use crate::peer::process::Process;
use crate::report::progress::Progress;
use crate::report::row::Row;

/// Size of a packet on the wire in bytes, for the length of the queue.
const PACKET: u64 = 1514;

/// Length of the uncounted first window of each host.
const WARM_UP: Duration = Duration::from_millis(500);
/// Time between windows. A relay with a full queue takes at most two round trips of 200 ms to forward it.
const DRAIN: Duration = Duration::from_secs(1);

/// A path: the parameters of the relay's port in each direction.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// Rate limit in bits per second.
    pub rate: u64,
    /// Round-trip time.
    pub round_trip: Duration,
    /// Share of dropped and of reordered packets, in hundredths of a percent.
    pub loss: u32,
    pub reorder: u32,
}

impl Path {
    const fn new(milliseconds: u64) -> Self {
        Self { rate: 100_000_000, round_trip: Duration::from_millis(milliseconds), loss: 0, reorder: 0 }
    }

    /// The measured paths.
    pub const ALL: [Self; 5] = [
        Self::new(20),
        Self::new(100),
        Self::new(200),
        Self { loss: 50, ..Self::new(40) },
        Self { reorder: 1000, ..Self::new(20) },
    ];

    /// Returns the specification of the relay's port on `interface`.
    fn port(self, interface: &str) -> String {
        let percent = |share: u32| format!("{}.{:02}%", share / 100, share % 100);
        let (rate, delay) = (self.rate, self.round_trip.as_micros() / 2);
        let [loss, reorder] = [self.loss, self.reorder].map(percent);
        format!("impair:rate={rate},delay={delay}us,loss={loss},reorder={reorder},af_packet:{interface}")
    }

    /// Returns the number of pairs of windows. Random losses make the rates of windows differ, so that a lossy path
    /// needs more pairs.
    fn pairs(self, options: &PathOptions) -> usize {
        options.pairs * if self.loss > 0 { 3 } else { 1 }
    }

    /// Returns the number of packets that one direction of the relay holds: in flight, and queued in front of the rate
    /// limit.
    fn held(self) -> u64 {
        let in_flight = self.rate * self.round_trip.as_millis() as u64 / 8_000 / PACKET;
        (2 * in_flight).max(512)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} Mbit/s, {} ms", self.rate / 1_000_000, self.round_trip.as_millis())?;
        for (share, name) in [(self.loss, "loss"), (self.reorder, "reordering")] {
            if share > 0 {
                write!(f, ", {} % {name}", f64::from(share) / 100.0)?;
            }
        }
        Ok(())
    }
}

/// Parameters of a measurement.
#[derive(Clone, Debug)]
pub struct PathOptions {
    /// This program, which is also the relay: `offcore`.
    pub binary: PathBuf,
    /// Whether the measured host sends or receives.
    pub sides: Vec<Side>,
    /// Number of pairs of windows per cell. A pair consists of a window with our stack and a window with the kernel's
    /// stack. A lossy path has three times as many.
    pub pairs: usize,
    pub window: Duration,
    pub hugepages: Hugepages,
    pub lcore: usize,
    /// The core of the relay and the other end.
    pub other_lcore: Option<usize>,
}

impl PathOptions {
    /// Returns options with 5 pairs of windows of 8 s in each cell, or 2 of 4 s with `quick`.
    pub fn new(quick: bool, binary: PathBuf, lcore: usize, other_lcore: Option<usize>) -> Self {
        let (pairs, seconds) = if quick { (2, 4) } else { (5, 8) };
        let (sides, window, hugepages) = (Side::ALL.into(), Duration::from_secs(seconds), Hugepages::Auto);
        Self { binary, sides, pairs, window, hugepages, lcore, other_lcore }
    }

    /// Returns a missing requirement of this machine, if any.
    pub fn missing(&self) -> Option<String> {
        netns::missing((self.lcore, self.other_lcore), &[])
    }
}

/// Measures all cells of `options` and passes each finished row to `emit`.
///
/// # Errors
/// A missing requirement ([`PathOptions::missing`]), a failed setup, or a lost or changed byte.
pub fn run(options: &PathOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    if let Some(missing) = options.missing() {
        bail!("streams over paths: {missing}");
    }
    Netns::sweep()?;
    let pool = Pool::new(BUFFERS, BUFFER, options.hugepages)?;
    let pairs: usize = Path::ALL.iter().map(|path| path.pairs(options)).sum();
    progress.begin(pairs * options.sides.len());
    for path in Path::ALL {
        for &side in &options.sides {
            progress.say(&format!("tcp over {path}, {side}"));
            let row = measure(path, side, options, pool, progress);
            emit(row.with_context(|| format!("{path}, {side}"))?);
        }
    }
    progress.end();
    Ok(())
}

fn measure(
    path: Path,
    side: Side,
    options: &PathOptions,
    pool: &'static Pool,
    progress: &Progress,
) -> Result<Row> {
    let other_lcore = options.other_lcore.context("streams over paths need two lcores")?;
    let (near, relay, far) = (Netns::new()?, Netns::new()?, Netns::new()?);
    for (name, address) in [("ours", "10.77.0.1/24"), ("theirs", "10.78.0.1/24")] {
        pair(&format!("{name}a"), None, &near, &relay, false)?;
        pair(&format!("{name}b"), Some(address), &relay, &far, false)?;
    }
    near.configure("theirsa0", "10.78.0.2/24")?;
    congestion_control((&near, "theirsa0"), (&far, ["theirsb1", "oursb1"]), algorithm(side))?;
    for netns in [&near, &far] {
        // The same limits for buffers as ours.
        let limits =
            ["tcp_rmem=4096 131072 16777216", "tcp_wmem=4096 16384 16777216", "tcp_no_metrics_save=1"];
        for limit in limits {
            netns.run("sysctl", &["-qw", &format!("net.ipv4.{limit}")])?;
        }
    }
    let relays = ["ours", "theirs"].map(|name| start_relay(path, name, &relay, &options.binary, other_lcore));
    let relays = relays.into_iter().collect::<Result<Vec<_>>>()?;
    let cell = veth::Cell { side, under: Under::AfPacket };
    let mut ours = Host::open(cell, &near, "oursa0", pool)?;
    let mut theirs = Kernel::listen(side, &near)?;
    let (settle, drain) = (Duration::ZERO, DRAIN);
    let far = Far { netns: &far, side, near_lcore: options.lcore, lcore: other_lcore, settle, drain };
    // A stream that passes shows that the relays have started.
    let said = || relays.iter().map(Process::tail).collect::<String>();
    far.window(&mut ours, WARM_UP).with_context(said)?;
    far.window(&mut theirs, WARM_UP).with_context(said)?;
    let (mut our_windows, mut their_windows) = (Vec::new(), Vec::new());
    for pair in 0..path.pairs(options) {
        // Each host is first in half of the pairs.
        for turn in [pair % 2, 1 - pair % 2] {
            match turn {
                0 => our_windows.push(far.window(&mut ours, options.window)?),
                _ => their_windows.push(far.window(&mut theirs, options.window)?),
            }
        }
        progress.step();
    }
    Ok(Row { path: Some(path.to_string()), ..cell.row(&our_windows, &their_windows) })
}

/// Returns the congestion control of the kernels.
fn algorithm(side: Side) -> &'static str {
    match side {
        Side::Send => "cubic",
        Side::Receive => "reno",
    }
}

/// Starts the relay between NAMEa1 and NAMEb0.
pub(super) fn start_relay(
    path: Path,
    name: &str,
    netns: &Netns,
    binary: &std::path::Path,
    lcore: usize,
) -> Result<Process> {
    let mut command = netns.command(binary);
    // A quarter of the buffers is shared by the two directions.
    command.args(["switch", "--forward", "io", "--idle", "sleep", "--stats-interval", "0"]);
    command.args(["--lcores", &lcore.to_string(), "--mbufs", &(8 * path.held()).to_string()]);
    command.args(["--port", &path.port(&format!("{name}a1"))]);
    command.args(["--port", &format!("af_packet:{name}b0")]);
    Process::spawn("offcore switch", command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_ports() {
        let [.., lossy, reordering] = Path::ALL;
        assert_eq!(
            lossy.port("a"),
            "impair:rate=100000000,delay=20000us,loss=0.50%,reorder=0.00%,af_packet:a"
        );
        assert_eq!(reordering.to_string(), "100 Mbit/s, 20 ms, 10 % reordering");
        // 20 ms at 100 Mbit/s are 165 packets, 200 ms are 1651.
        assert_eq!([Path::new(20), Path::new(200)].map(Path::held), [512, 3302]);
    }
}
