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
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::http::server::{self, Server, Site};
use super::paths::{Path, start_relay};
use super::veth::{compare_with_kernel, congestion_control, pair};
use crate::peer::netns::{self, Netns};
use crate::peer::tempdir::TempDir;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::Spread;

/// The unit of the rows.
pub const UNIT: &str = "connections_per_s";

/// Path for many concurrent flows. Its queue overflows.
const NARROW: Path = Path { rate: 1_000_000_000, round_trip: Duration::from_millis(1), loss: 0, reorder: 0 };
/// Path for short flows.
const LOSSY: Path = Path { rate: 100_000_000, round_trip: Duration::from_millis(20), loss: 200, reorder: 0 };

/// Parameters of a measurement.
#[derive(Clone, Debug)]
pub struct FlowOptions {
    /// This program, which is also the relay: `offcore`.
    pub binary: PathBuf,
    /// Number of pairs of windows per cell. A pair consists of a window with our stack and a window with the kernel's
    /// stack.
    pub pairs: usize,
    /// The core of the stack and nginx.
    pub lcore: usize,
    /// The core of the client.
    pub other_lcore: Option<usize>,
}

impl FlowOptions {
    /// Returns options with 5 pairs of windows in each cell, or 2 with `quick`.
    pub fn new(quick: bool, binary: PathBuf, lcore: usize, other_lcore: Option<usize>) -> Self {
        Self { binary, pairs: if quick { 2 } else { 5 }, lcore, other_lcore }
    }

    /// Returns a missing requirement of this machine, if any.
    pub fn missing(&self) -> Option<String> {
        netns::missing((self.lcore, self.other_lcore), &[("nginx", "nginx"), ("taskset", "util-linux")])
            .or_else(server::missing)
    }
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
/// A missing requirement ([`FlowOptions::missing`]), a failed setup, or a lost or changed byte.
pub fn run(options: &FlowOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    if let Some(missing) = options.missing() {
        bail!("flows from nginx: {missing}");
    }
    Netns::sweep()?;
    let version = server::version()?;
    progress.begin(CELLS.len() * options.pairs);
    for cell in CELLS {
        progress.say(&format!("flows over {cell}"));
        let mut row = cell.measure(options, progress).with_context(|| format!("flows over {cell}"))?;
        row.about_peer.peer_version = Some(version.clone());
        emit(row);
    }
    progress.end();
    Ok(())
}

impl Cell {
    fn measure(self, options: &FlowOptions, progress: &Progress) -> Result<Row> {
        let other_lcore = options.other_lcore.context("end to end needs two lcores")?;
        let (ours, theirs, relay, far) = (Netns::new()?, Netns::new()?, Netns::new()?, Netns::new()?);
        for (name, near, address) in [("ours", &ours, "10.77.0.1/24"), ("theirs", &theirs, "10.78.0.1/24")] {
            if self.path.is_some() {
                pair(&format!("{name}a"), None, near, &relay, false)?;
                pair(&format!("{name}b"), Some(address), &relay, &far, false)?;
            } else {
                pair(&format!("{name}a"), Some(address), near, &far, true)?;
            }
        }
        theirs.configure("theirsa0", "10.78.0.2/24")?;
        let far_end = if self.path.is_some() { "b1" } else { "a1" };
        let [to_theirs, to_ours] = ["theirs", "ours"].map(|name| format!("{name}{far_end}"));
        congestion_control((&theirs, "theirsa0"), (&far, [&to_theirs, &to_ours]), "cubic")?;
        for netns in [&theirs, &far] {
            netns.run("sysctl", &["-qw", "net.ipv4.tcp_no_metrics_save=1"])?;
        }
        let start = |name: &str, path| start_relay(path, name, &relay, &options.binary, other_lcore);
        let relays = ["ours", "theirs"].into_iter().filter_map(|name| Some(start(name, self.path?)));
        let _relays = relays.collect::<Result<Vec<_>>>()?;
        let dir = TempDir::new()?;
        let site = Site::new(&dir, options.lcore, &far)?;
        let name = site.add(self.size)?;
        let servers =
            [Server::ours(&site, (&ours, "oursa0"), &options.binary)?, Server::kernels(&site, &theirs)?];
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
        let mut windows = [Vec::new(), Vec::new()];
        for pair in 0..options.pairs {
            for turn in [pair % 2, 1 - pair % 2] {
                windows[turn].push(window(&servers[turn], self.flows)?);
            }
            progress.step();
        }
        Ok(self.row(&windows))
    }

    fn row(self, windows: &[Vec<Window>; 2]) -> Row {
        let [ours, theirs] = windows;
        let all = |windows: &[Window]| windows.iter().map(Window::rate).collect::<Vec<_>>();
        let (our_rates, their_rates) = (all(ours), all(theirs));
        let percentile = |windows: &[Window], share| {
            let of = windows.iter().map(|window| window.percentile(share)).collect::<Vec<_>>();
            Some(Spread::of(&of).median)
        };
        let row = compare_with_kernel(&our_rates, &their_rates);
        let received = ours.iter().map(|window| window.flows.len() as u64).sum();
        Row {
            case: self.to_string(),
            port: Some("af_packet"),
            offloads: Some(self.path.is_none()),
            chunk: Some(self.size),
            connections: Some(self.at_once),
            unit: UNIT,
            payload_gbps: Some(row.median * self.size as f64 * 8.0 / 1e9),
            received,
            verified: received,
            p50_ns: percentile(ours, 0.5),
            p99_ns: percentile(ours, 0.99),
            peer_p50_ns: percentile(theirs, 0.5),
            peer_p99_ns: percentile(theirs, 0.99),
            ..row
        }
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
        assert_eq!((row.peer_ratio, row.verified, row.noise_floor), (Some(0.5), 400, Some(0.0)));
        assert_eq!((row.p99_ns, row.peer_p99_ns), (Some(1.98e9), Some(0.99e9)));
        assert_eq!(CELLS[2].to_string(), "100 Mbit/s, 20 ms, 2 % loss");
    }
}
