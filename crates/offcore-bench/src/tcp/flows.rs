//! `offcore bench tcp --case flows`: connections that fetch one file each from nginx on our stack (`offcore exec`),
//! compared with nginx on the kernel's stack.
//!
//! ```text
//! lcore                                                  other lcore
//! ours:   nginx, sessions, host, af_packet ── veth ──┐
//!         (the two alternate)                        ├── the client on the kernel's TCP, in its own namespace
//! theirs: nginx, the kernel's TCP ─────────── veth ──┘
//! ```
//! A cell opens its connections all at once or in limited numbers, over veth or over a relay as in
//! [`paths`](super::paths). A flow lasts from `connect` to the end of the stream. The client compares every byte.

mod client;

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};

use super::http::server::{self, Server, Site};
use super::kernel::{KernelOptions, alternate, connect};
use super::paths::{Path, start_relays};
use super::veth::{compare_with_kernel, median};
use crate::peer::netns::Netns;
use crate::peer::tempdir::TempDir;
use crate::report::progress::Progress;
use crate::report::row::{Counts, Latency, Row};

/// The unit of the rows.
pub const UNIT: &str = "connections_per_s";

/// Required programs with their packages.
const PROGRAMS: [(&str, &str); 2] = [("nginx", "nginx"), ("taskset", "util-linux")];
/// Path for many concurrent flows. Its queue overflows.
const NARROW: Path = Path { rate: 1_000_000_000, round_trip: Duration::from_millis(1), loss: 0, reorder: 0 };
/// Path for short flows.
const LOSSY: Path = Path { rate: 100_000_000, round_trip: Duration::from_millis(20), loss: 200, reorder: 0 };

/// Returns the number of pairs of windows of a cell. A pair consists of a window with our stack and a window with the
/// kernel's stack.
const fn pairs(quick: bool) -> usize {
    if quick { 2 } else { 5 }
}

/// A cell of the measurement.
#[derive(Clone, Copy, Debug)]
struct Cell {
    path: Option<Path>,
    /// Size of the file in bytes.
    size: usize,
    /// Number of flows in a window, and maximum number of concurrent flows.
    flows: usize,
    at_once: usize,
}

const CELLS: [Cell; 3] = [
    Cell { path: None, size: 100_000, flows: 5000, at_once: 5000 },
    Cell { path: Some(NARROW), size: 100_000, flows: 5000, at_once: 5000 },
    Cell { path: Some(LOSSY), size: 10_000, flows: 1000, at_once: 50 },
];

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path {
            Some(path) => write!(f, "{path}"),
            None => write!(f, "veth"),
        }
    }
}

/// The result of a window.
#[derive(Clone, Debug)]
struct Window {
    seconds: f64,
    /// Duration of each flow in seconds, sorted.
    flows: Vec<f64>,
}

impl Window {
    /// Returns the flows per second.
    fn rate(&self) -> f64 {
        self.flows.len() as f64 / self.seconds
    }

    /// Returns the duration in nanoseconds that a share of the flows did not exceed.
    fn percentile(&self, share: f64) -> f64 {
        let last = self.flows.len().saturating_sub(1);
        self.flows.get((last as f64 * share).round() as usize).map_or(0.0, |seconds| seconds * 1e9)
    }
}

/// Measures all cells and passes each finished row to `emit`.
///
/// # Errors
/// A missing requirement, a failed setup, or a lost or changed byte.
pub fn run(options: &KernelOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let other_lcore = options.start("flows from nginx", &PROGRAMS, server::missing)?;
    let version = server::version()?;
    progress.begin(CELLS.len() * pairs(options.quick));
    for cell in CELLS {
        progress.say(&format!("flows over {cell}"));
        let row = cell.measure(options, other_lcore, progress);
        let mut row = row.with_context(|| format!("flows over {cell}"))?;
        row.ends.about_peer.peer_version = Some(version.clone());
        emit(row);
    }
    progress.end();
    Ok(())
}

impl Cell {
    fn measure(self, options: &KernelOptions, other_lcore: usize, progress: &Progress) -> Result<Row> {
        let (ours, theirs, relay, far) = (Netns::new()?, Netns::new()?, Netns::new()?, Netns::new()?);
        let relay = self.path.map(|path| (path, relay));
        let between = relay.as_ref().map(|(_, netns)| netns);
        let near = connect([&ours, &theirs], between, &far, self.path.is_none(), "cubic")?;
        for netns in [&theirs, &far] {
            netns.run("sysctl", &["-qw", "net.ipv4.tcp_no_metrics_save=1"])?;
        }
        let start = |(path, netns): &(Path, Netns)| start_relays(*path, netns, &options.binary, other_lcore);
        let _relays = relay.as_ref().map(start).transpose()?;
        let dir = TempDir::new()?;
        let site = Site::new(&dir, options.lcore, &far)?;
        let name = site.add(self.size)?;
        let ours = Server::ours(&site, &ours, &near[0], &options.binary)?;
        let servers = [ours, Server::kernels(&site, &theirs)?];
        let window = |server: &Server, flows| {
            let load = client::Load {
                address: server.address,
                name: &name,
                content: site.content(self.size),
                flows,
            };
            let run = || {
                offcore_stats::lcore::pin(other_lcore)?;
                load.run(self.at_once)
            };
            far.within(run).with_context(|| server.tail())
        };
        // In this warm-up, nginx reads the file and memory is allocated.
        servers.iter().try_for_each(|server| window(server, self.flows).map(drop))?;
        let windows = alternate(pairs(options.quick), progress, |turn| window(&servers[turn], self.flows))?;
        Ok(self.row(&windows))
    }

    fn row(self, windows: &[Vec<Window>; 2]) -> Row {
        let [ours, theirs] = windows;
        let all = |windows: &[Window]| windows.iter().map(Window::rate).collect::<Vec<_>>();
        let (our_rates, their_rates) = (all(ours), all(theirs));
        let percentile = |windows, share| median(windows, |window: &Window| window.percentile(share));
        let mut row = compare_with_kernel(self, UNIT, [&our_rates, &their_rates]);
        (row.head.port, row.tcp.offloads) = (Some("af_packet"), Some(self.path.is_none()));
        (row.tcp.chunk, row.tcp.connections) = (Some(self.size), Some(self.at_once));
        row.tcp.payload.payload_gbps = Some(row.figures.spread.median * self.size as f64 * 8.0 / 1e9);
        row.counts = Counts::all_of(ours.iter().map(|window| window.flows.len() as u64).sum());
        row.latency = Latency {
            p50_ns: percentile(ours, 0.5),
            p99_ns: percentile(ours, 0.99),
            peer_p50_ns: percentile(theirs, 0.5),
            peer_p99_ns: percentile(theirs, 0.99),
            ..Latency::default()
        };
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    #[test]
    fn rows_compare_flows() {
        let of = |seconds: f64| Window {
            seconds,
            flows: (1..=100).map(|i| f64::from(i) * seconds / 100.0).collect(),
        };
        let row = CELLS[0].row(&[vec![of(2.0); 4], vec![of(1.0); 4]]);
        golden::check("tcp, flows", &row);
        assert_eq!(
            (row.peer.peer_ratio, row.counts.verified, row.ratios.noise.noise_floor),
            (Some(0.5), 400, Some(0.0))
        );
        assert_eq!((row.latency.p99_ns, row.latency.peer_p99_ns), (Some(1.98e9), Some(0.99e9)));
        assert_eq!(CELLS[2].to_string(), "100 Mbit/s, 20 ms, 2 % loss");
    }
}
