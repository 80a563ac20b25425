//! The `end-to-end` arrangement of `offcore bench tcp --case http`: unmodified nginx on our stack (`offcore exec`),
//! compared with nginx on the kernel's stack, under load from wrk.
//!
//! ```text
//! lcore                                                  other lcore
//! ours:   nginx, sessions, host, af_packet ── veth ──┐
//!         (blocking wake-ups; the other one rests)   ├── wrk on the kernel's TCP, in a namespace of its own
//! theirs: nginx, the kernel's TCP ─────────── veth ──┘
//! ```
//! Each side has its own veth pair, configured identically, with segmentation and checksum offload on both ends.
//! Windows alternate. wrk counts answers and bytes. A second, slow client with separate connections knows the length of
//! an answer and compares every byte. It also detects missing answers, which wrk ignores. Therefore, before anything is
//! counted, the benchmark asks the kernel whether each of wrk's connections has received an answer.
//!
//! The cost of a request is the CPU time of processes according to `/proc`: nginx, the stack (ours only) and the
//! clients. The benchmark also knows the CPU time that other processes used on the two cores. A pair of windows in
//! which this time is large is repeated. The kernel processes received packets on the transmitting core, which over
//! veth belongs to the other end. The decisive figure is therefore the sum. (If the kernel accounts interrupt time
//! separately, `CONFIG_IRQ_TIME_ACCOUNTING`, that time is not part of any process.)
//!
//! The kernel sends a file by reference (`sendfile`) and passes its packets over a veth pair by reference. Our stack
//! copies the data into the FIFO and into packets, and the port copies it into the kernel. In case `read`, nginx reads
//! the files itself, so that the kernel copies the data, too. nginx uses Debian's configuration with another log and
//! site: `tcp_nopush` puts head and body into one packet. Case `push` turns it off.

mod load;
pub(super) mod server;

use std::fmt;

use anyhow::{Context, Result};
use offcore_stats::named;

use super::cores::OTHERS;
use super::kernel::{KernelOptions, connect};
use super::veth::{FAR_BOUND, compare_with_kernel, median};
use crate::peer::netns::Netns;
use crate::peer::tempdir::TempDir;
use crate::report::progress::Progress;
use crate::report::row::{CostPerRequest, Latency, Row};
use crate::report::sample::Steadiness;
use load::Load;
use server::{Server, Site};

/// Sizes of the files in bytes.
pub const SIZES: [usize; 5] = [1 << 10, 4 << 10, 32 << 10, 256 << 10, 1 << 20];
/// Number of connections of wrk.
pub const CONNECTIONS: usize = 64;
/// Number of connections in an additional cell.
const MANY: usize = 1000;
/// Required programs with their packages.
const PROGRAMS: [(&str, &str); 4] =
    [("nginx", "nginx"), ("wrk", "wrk"), ("taskset", "util-linux"), ("ss", "iproute2")];

named! {
    /// Method of requesting and sending files.
    pub enum How {
        /// Persistent connections. The kernel sends files for nginx, with `tcp_nopush`: Debian's configuration.
        SendFile = "sendfile",
        /// The same without `tcp_nopush`.
        Push = "push",
        /// Persistent connections. nginx reads files and writes them.
        Read = "read",
        /// One connection per request.
        Close = "close",
    }
}

/// Returns the number of pairs of windows of a cell, and the length of a window in seconds. A pair consists of a window
/// with our stack and a window with the kernel's stack.
pub(super) const fn extent(quick: bool) -> (usize, u64) {
    if quick { (6, 1) } else { (12, 2) }
}

/// Measures all cells and passes each finished row to `emit`.
///
/// # Errors
/// If a requirement is missing or something cannot be set up, a request is not answered, or a byte is wrong.
pub fn run(options: &KernelOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let other_lcore = options.start("nginx over veth", &PROGRAMS, server::missing)?;
    let (pairs, window) = extent(options.quick);
    let (ours, theirs, far) = (Netns::new()?, Netns::new()?, Netns::new()?);
    let [interface, _] = connect([&ours, &theirs], None, &far, true, "cubic")?;
    let version = server::version()?;
    let dir = TempDir::new()?;
    let site = Site::new(&dir, options.lcore, &far)?;
    let ours = Server::ours(&site, &ours, &interface, &options.binary)?;
    let theirs = Server::kernels(&site, &theirs)?;
    let cells = Cell::all();
    progress.begin(cells.len() * pairs);
    for cell in cells {
        progress.say(&format!("http, {cell}"));
        let load = Load::new(cell, &site, &dir, &far, other_lcore, window)?;
        let row = cell.measure(&load, [&ours, &theirs], pairs, progress);
        let mut row = row.with_context(|| cell.to_string())?;
        row.ends.about_peer.peer_version = Some(version.clone());
        emit(row);
    }
    progress.end();
    Ok(())
}

/// A cell of the measurement.
#[derive(Clone, Copy, Debug)]
struct Cell {
    how: How,
    size: usize,
    connections: usize,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} bytes, {} connections", self.how, self.size, self.connections)
    }
}

/// Result of a window.
#[derive(Clone, Copy, Debug)]
struct Window {
    requests: u64,
    seconds: f64,
    /// Median and 99th percentile of wrk's latency in microseconds.
    p50: f64,
    p99: f64,
    /// CPU time of the server's processes in seconds.
    server: f64,
    /// CPU time of wrk and of the comparing client in seconds.
    client: f64,
    /// Number of answers that were compared byte by byte. They are not included in `requests`.
    compared: u64,
    /// Share of a core that other processes used, for the core with the larger share.
    others: f64,
}

impl Window {
    /// Returns million requests per second.
    fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds / 1e6
    }

    /// Returns the number of answers to both clients.
    fn answers(&self) -> u64 {
        self.requests + self.compared
    }

    /// Returns the server's CPU time in microseconds per request.
    fn cost(&self) -> f64 {
        self.server * 1e6 / self.answers().max(1) as f64
    }

    /// Returns the CPU time of server and clients in microseconds per request.
    fn both_cost(&self) -> f64 {
        self.cost() + self.client * 1e6 / self.answers().max(1) as f64
    }

    /// Returns the share of the time in which the clients used their core.
    fn far_busy(&self) -> f64 {
        self.client / self.seconds
    }
}

impl Cell {
    fn all() -> Vec<Self> {
        let of = |how, connections| move |size| Self { how, size, connections };
        let sent = SIZES.into_iter().map(of(How::SendFile, CONNECTIONS));
        let pushed = SIZES.into_iter().filter(|&size| size < 32 << 10).map(of(How::Push, CONNECTIONS));
        let read = SIZES.into_iter().filter(|&size| size >= 32 << 10).map(of(How::Read, CONNECTIONS));
        let more = [of(How::Close, CONNECTIONS), of(How::SendFile, 1), of(How::SendFile, MANY)];
        let more = more.map(|of| of(SIZES[0]));
        sent.chain(pushed).chain(read).chain(more).collect()
    }

    fn measure(
        self,
        load: &Load<'_>,
        servers: [&Server; 2],
        pairs: usize,
        progress: &Progress,
    ) -> Result<Row> {
        let mut windows = [Vec::new(), Vec::new()];
        let mut repeats = Steadiness::default();
        for server in servers {
            load.first(server)?;
        }
        while windows[0].len() < pairs {
            let pair = windows[0].len();
            let first = load.window(servers[pair % 2])?;
            let second = load.window(servers[1 - pair % 2])?;
            if !repeats.counts(first.others.max(second.others) <= OTHERS, pairs) {
                continue;
            }
            windows[pair % 2].push(first);
            windows[1 - pair % 2].push(second);
            progress.step();
        }
        let [ours, theirs] = &windows;
        Ok(Row { clock: repeats, ..self.row(ours, theirs) })
    }

    fn row(self, ours: &[Window], theirs: &[Window]) -> Row {
        let rates = [ours, theirs].map(|windows| windows.iter().map(Window::rate).collect::<Vec<_>>());
        let case = format!("http {}", self.how);
        let mut row = compare_with_kernel(case, "million_requests_per_s", [&rates[0], &rates[1]]);
        (row.head.port, row.tcp.offloads) = (Some("af_packet"), Some(true));
        (row.tcp.chunk, row.tcp.connections) = (Some(self.size), Some(self.connections));
        row.tcp.payload.payload_gbps = Some(row.figures.spread.median * self.size as f64 * 8.0 / 1e3);
        row.counts.received = ours.iter().map(Window::answers).sum();
        row.counts.verified = ours.iter().map(|window| window.compared).sum();
        let medians = |of: fn(&Window) -> f64| [ours, theirs].map(|windows| median(windows, of));
        let [server_us_per_request, peer_server_us_per_request] = medians(Window::cost);
        let [both_us_per_request, peer_both_us_per_request] = medians(Window::both_cost);
        row.tcp.per_request = CostPerRequest {
            server_us_per_request,
            peer_server_us_per_request,
            both_us_per_request,
            peer_both_us_per_request,
        };
        let [p50_ns, peer_p50_ns] = medians(|window| window.p50 * 1e3);
        let [p99_ns, peer_p99_ns] = medians(|window| window.p99 * 1e3);
        row.latency = Latency { p50_ns, p99_ns, peer_p50_ns, peer_p99_ns, ..Latency::default() };
        let far = medians(Window::far_busy);
        [row.tcp.payload.far_busy, row.tcp.payload.peer_far_busy] = far;
        row.ends.fe_bound = Some(far.iter().flatten().any(|&busy| busy > FAR_BOUND));
        row
    }
}
#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    #[test]
    fn http_rows_compare_rate_and_cost() {
        let ours = Window {
            requests: 29_000,
            seconds: 2.0,
            p50: 1500.0,
            p99: 9000.0,
            server: 0.9,
            client: 0.5,
            compared: 1000,
            others: 0.0,
        };
        let theirs = Window { requests: 14_500, server: 1.0, client: 0.4, ..ours };
        let row = Cell::all()[0].row(&[ours; 4], &[theirs; 4]);
        let near = |a: Option<f64>, b: f64| assert!((a.unwrap() / b - 1.0).abs() < 1e-9, "{a:?} {b}");
        golden::check("tcp, http", &row);
        near(row.peer.peer_ratio, 2.0);
        near(Some(row.figures.spread.median), 0.0145);
        near(row.peer.peer_median, 0.00725);
        // Per answer, including the compared ones.
        near(row.tcp.per_request.server_us_per_request, 30.0);
        near(row.tcp.per_request.peer_server_us_per_request, 1e6 / 15_500.0);
        near(row.tcp.per_request.peer_both_us_per_request, 1.4e6 / 15_500.0);
        near(row.latency.p99_ns, 9e6);
        assert_eq!(
            (row.counts.received, row.counts.verified, row.ratios.noise.noise_floor),
            (120_000, 4000, Some(0.0))
        );
    }
}
