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
use std::time::Duration;

use anyhow::{Context, Result};
use offcore_mem::Pool;

use super::kernel::{KernelOptions, connect};
use super::link::Side;
use super::veth::{self, Far, Host, Under};
use super::{BUFFER, BUFFERS};
use crate::peer::netns::Netns;
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
    fn pairs(self, quick: bool) -> usize {
        let pairs = if quick { 2 } else { 5 };
        pairs * if self.loss > 0 { 3 } else { 1 }
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

/// Measures all cells of `options` and passes each finished row to `emit`.
///
/// # Errors
/// A missing requirement, a failed setup, or a lost or changed byte.
pub fn run(options: &KernelOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let other_lcore = options.start("streams over paths", &[], || None)?;
    let pool = Pool::new(BUFFERS, BUFFER, options.hugepages)?;
    let pairs: usize = Path::ALL.iter().map(|path| path.pairs(options.quick)).sum();
    progress.begin(pairs * options.sides.len());
    for path in Path::ALL {
        for &side in &options.sides {
            progress.say(&format!("tcp over {path}, {side}"));
            let row = measure(path, side, options, other_lcore, pool, progress);
            emit(row.with_context(|| format!("{path}, {side}"))?);
        }
    }
    progress.end();
    Ok(())
}

fn measure(
    path: Path,
    side: Side,
    options: &KernelOptions,
    lcore: usize,
    pool: &'static Pool,
    progress: &Progress,
) -> Result<Row> {
    let (near, relay, far) = (Netns::new()?, Netns::new()?, Netns::new()?);
    let [interface, _] = connect([&near, &near], Some(&relay), &far, false, algorithm(side))?;
    for netns in [&near, &far] {
        // The same limits for buffers as ours.
        let limits =
            ["tcp_rmem=4096 131072 16777216", "tcp_wmem=4096 16384 16777216", "tcp_no_metrics_save=1"];
        for limit in limits {
            netns.run("sysctl", &["-qw", &format!("net.ipv4.{limit}")])?;
        }
    }
    let relays = start_relays(path, &relay, &options.binary, lcore)?;
    let cell = veth::Cell { side, under: Under::AfPacket };
    let (near_lcore, settle) = (options.lcore, Duration::ZERO);
    let far = Far { netns: &far, side, near_lcore, lcore, settle, drain: DRAIN };
    let lengths = [WARM_UP, Duration::from_secs(if options.quick { 4 } else { 8 })];
    let ours = Host::open(cell, &near, &interface, pool)?;
    let windows = cell.windows(ours, &near, far, lengths, path.pairs(options.quick), progress);
    let said = || relays.iter().map(Process::tail).collect::<String>();
    let mut row = cell.row(&windows.with_context(said)?);
    row.tcp.path = Some(path.to_string());
    Ok(row)
}

/// Returns the congestion control of the kernels.
fn algorithm(side: Side) -> &'static str {
    match side {
        Side::Send => "cubic",
        Side::Receive => "reno",
    }
}

/// Starts the relays of both sides, between NAMEa1 and NAMEb0.
pub(super) fn start_relays(
    path: Path,
    netns: &Netns,
    binary: &std::path::Path,
    lcore: usize,
) -> Result<[Process; 2]> {
    let start = |name: &str| {
        let mut command = netns.command(binary);
        // A quarter of the buffers is shared by the two directions.
        command.args(["switch", "--forward", "io", "--idle", "sleep", "--stats-interval", "0"]);
        command.args(["--lcores", &lcore.to_string(), "--mbufs", &(8 * path.held()).to_string()]);
        command.args(["--port", &path.port(&format!("{name}a1"))]);
        command.args(["--port", &format!("af_packet:{name}b0")]);
        Process::spawn("offcore switch", command)
    };
    Ok([start("ours")?, start("theirs")?])
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
