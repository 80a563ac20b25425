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
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use offcore_stats::named;

use super::cores::Repeats;
use super::veth::{FAR_BOUND, compare_with_kernel, congestion_control, pair};
use crate::peer::netns::{self, Netns};
use crate::peer::tempdir::TempDir;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::Spread;
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

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct HttpOptions {
    /// Path of this program: `offcore`.
    pub binary: PathBuf,
    /// Number of pairs of windows per cell. A pair consists of a window with our stack and a window with the kernel's
    /// stack.
    pub pairs: usize,
    /// Length of a window in seconds.
    pub window: u64,
    /// The core of the stack and nginx.
    pub lcore: usize,
    /// The core of wrk.
    pub other_lcore: Option<usize>,
}

impl HttpOptions {
    /// Returns options with 12 pairs of windows of 2 s in each cell, or 6 of 1 s with `quick`.
    pub fn new(quick: bool, binary: PathBuf, lcore: usize, other_lcore: Option<usize>) -> Self {
        let (pairs, window) = if quick { (6, 1) } else { (12, 2) };
        Self { binary, pairs, window, lcore, other_lcore }
    }

    /// Returns a missing requirement of this machine, if any.
    pub fn missing(&self) -> Option<String> {
        netns::missing((self.lcore, self.other_lcore), &PROGRAMS).or_else(server::missing)
    }
}

/// Measures all cells and passes each finished row to `emit`.
///
/// # Errors
/// If something is missing ([`HttpOptions::missing`]) or cannot be set up, a request is not answered, or a byte is
/// wrong.
pub fn run(options: &HttpOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    if let Some(missing) = options.missing() {
        bail!("nginx over veth: {missing}");
    }
    Netns::sweep()?;
    let other_lcore = options.other_lcore.context("end to end needs two lcores")?;
    let (ours, theirs, far) = (Netns::new()?, Netns::new()?, Netns::new()?);
    pair("ours", Some("10.77.0.1/24"), &ours, &far, true)?;
    pair("theirs", Some("10.78.0.1/24"), &theirs, &far, true)?;
    theirs.configure("theirs0", "10.78.0.2/24")?;
    congestion_control((&theirs, "theirs0"), (&far, ["theirs1", "ours1"]), "cubic")?;
    let version = server::version()?;
    let dir = TempDir::new()?;
    let site = Site::new(&dir, options.lcore, &far)?;
    let ours = Server::ours(&site, (&ours, "ours0"), &options.binary)?;
    let theirs = Server::kernels(&site, &theirs)?;
    let cells = Cell::all();
    progress.begin(cells.len() * options.pairs);
    for cell in cells {
        progress.say(&format!("http, {cell}"));
        let load = Load::new(cell, &site, &dir, (&far, other_lcore), options.window)?;
        let mut row = cell
            .measure(&load, [&ours, &theirs], options.pairs, progress)
            .with_context(|| cell.to_string())?;
        row.about_peer.peer_version = Some(version.clone());
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
        let mut repeats = Repeats::new(pairs);
        for server in servers {
            load.first(server)?;
        }
        while windows[0].len() < pairs {
            let pair = windows[0].len();
            let first = load.window(servers[pair % 2])?;
            let second = load.window(servers[1 - pair % 2])?;
            if !repeats.counts(first.others.max(second.others)) {
                continue;
            }
            windows[pair % 2].push(first);
            windows[1 - pair % 2].push(second);
            progress.step();
        }
        let [ours, theirs] = &windows;
        Ok(Row { rejected: repeats.rejected, unsteady: repeats.unsteady, ..self.row(ours, theirs) })
    }

    fn row(self, ours: &[Window], theirs: &[Window]) -> Row {
        let all = |windows: &[Window], of: fn(&Window) -> f64| windows.iter().map(of).collect::<Vec<_>>();
        let median = |windows: &[Window], of| Spread::of(&all(windows, of)).median;
        let (our_rates, their_rates) = (all(ours, Window::rate), all(theirs, Window::rate));
        let row = compare_with_kernel(&our_rates, &their_rates);
        let mut row = Row {
            case: format!("http {}", self.how),
            port: Some("af_packet"),
            offloads: Some(true),
            chunk: Some(self.size),
            connections: Some(self.connections),
            unit: "million_requests_per_s",
            payload_gbps: Some(row.median * self.size as f64 * 8.0 / 1e3),
            ..row
        };
        row.received = ours.iter().map(Window::answers).sum();
        row.verified = ours.iter().map(|window| window.compared).sum();
        row.server_us_per_request = Some(median(ours, Window::cost));
        row.peer_server_us_per_request = Some(median(theirs, Window::cost));
        let ns = |windows, of| Some(median(windows, of) * 1e3);
        (row.p50_ns, row.p99_ns) = (ns(ours, |window| window.p50), ns(ours, |window| window.p99));
        (row.peer_p50_ns, row.peer_p99_ns) =
            (ns(theirs, |window| window.p50), ns(theirs, |window| window.p99));
        row.both_us_per_request = Some(median(ours, Window::both_cost));
        row.peer_both_us_per_request = Some(median(theirs, Window::both_cost));
        let far = [ours, theirs].map(|windows| median(windows, Window::far_busy));
        (row.far_busy, row.peer_far_busy) = (Some(far[0]), Some(far[1]));
        row.fe_bound = Some(far[0] > FAR_BOUND || far[1] > FAR_BOUND);
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
        near(row.peer_ratio, 2.0);
        near(Some(row.median), 0.0145);
        near(row.peer_median, 0.00725);
        // Per answer, including the compared ones.
        near(row.server_us_per_request, 30.0);
        near(row.peer_server_us_per_request, 1e6 / 15_500.0);
        near(row.peer_both_us_per_request, 1.4e6 / 15_500.0);
        near(row.p99_ns, 9e6);
        assert_eq!((row.received, row.verified, row.noise_floor), (120_000, 4000, Some(0.0)));
    }
}
