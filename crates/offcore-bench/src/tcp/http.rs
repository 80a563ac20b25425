//! The `end-to-end` arrangement of `offcore bench tcp --case http`: nginx, unmodified, on our stack by `offcore exec`, beside
//! the same nginx on the kernel's, under wrk.
//!
//! ```text
//! lcore                                                  other lcore
//! ours:   nginx, sessions, host, af_packet ── veth ──┐
//!         (blocking wake-ups; the other one rests)   ├── wrk on the kernel's TCP, in a namespace of its own
//! theirs: nginx, the kernel's TCP ─────────── veth ──┘
//! ```
//! Both have pairs of their own, made alike, with segmentation and checksums left open on both ends. Windows alternate. wrk
//! counts answers and bytes; how long an answer has to be says another client, which is slow, has connections of its own and
//! compares every byte. An answer that never comes is noticed on these; wrk forgets it, so that before anything is counted the
//! kernel is asked whether each of wrk's connections has had one.
//!
//! What a request costs is what processes used, by `/proc`: nginx and, of ours, the stack; and the clients. What others used of
//! the two cores is known, too: a pair of windows in which that is much is made anew. The kernel does what it
//! receives on the core that transmits, which over veth is the other end's: so what counts is the sum. (Where the kernel keeps
//! the time of interrupts apart, `CONFIG_IRQ_TIME_ACCOUNTING`, it is in nobody's.)
//!
//! The kernel sends a file by reference (`sendfile`) and passes its packets over a veth pair by reference. Ours are copied
//! into the FIFO, into packets and by the port into the kernel. With `read` nginx reads the files itself, and the kernel copies the
//! data, too. nginx has Debian's configuration with another log and site: `tcp_nopush` puts head and body into one packet.
//! `push` turns it off.

mod load;
pub(super) mod server;

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use offcore_stats::named;

use super::veth::{FAR_BOUND, beside_kernel, congestion_control, pair};
use crate::peer::netns::{self, Netns};
use crate::peer::tempdir::TempDir;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::Spread;
use load::Load;
use server::{Server, Site};

/// Bytes of the files.
pub const SIZES: [usize; 5] = [1 << 10, 4 << 10, 32 << 10, 256 << 10, 1 << 20];
/// Connections of wrk.
pub const CONNECTIONS: usize = 64;
/// What it is tried with besides.
const MANY: usize = 1000;
/// Programs that it takes, with their packages.
const PROGRAMS: [(&str, &str); 4] =
    [("nginx", "nginx"), ("wrk", "wrk"), ("taskset", "util-linux"), ("ss", "iproute2")];
/// What part of a core others may use in a window.
const OTHERS: f64 = 0.05;

named! {
    /// How files are asked for and sent.
    pub enum How {
        /// Connections are kept; nginx has the kernel send files, with `tcp_nopush`: Debian's configuration.
        SendFile = "sendfile",
        /// The same without `tcp_nopush`.
        Push = "push",
        /// Connections are kept; nginx reads files and writes them.
        Read = "read",
        /// Each request has a connection of its own.
        Close = "close",
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct HttpOptions {
    /// This program: `offcore`.
    pub binary: PathBuf,
    /// Pairs of windows, ours and the kernel's, of each cell.
    pub pairs: usize,
    /// Length of a window in seconds.
    pub window: u64,
    /// The core of stack and nginx.
    pub lcore: usize,
    /// The core of wrk.
    pub other_lcore: Option<usize>,
}

impl HttpOptions {
    /// 12 pairs of windows of 2 s in each cell; with `quick` 6 of 1 s.
    pub fn new(quick: bool, binary: PathBuf, lcore: usize, other_lcore: Option<usize>) -> Self {
        let (pairs, window) = if quick { (6, 1) } else { (12, 2) };
        Self { binary, pairs, window, lcore, other_lcore }
    }

    /// What this machine lacks for it, if anything.
    pub fn missing(&self) -> Option<String> {
        netns::missing((self.lcore, self.other_lcore), &PROGRAMS).or_else(server::missing)
    }
}

/// Measures all cells; `emit` gets each row as it is ready.
///
/// # Errors
/// When something is missing ([`HttpOptions::missing`]) or cannot be set up, a request is not answered, or a byte is wrong.
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

/// What a window saw.
#[derive(Clone, Copy, Debug)]
struct Window {
    requests: u64,
    seconds: f64,
    /// Latency in microseconds: half of wrk's requests took no longer, 99 of 100.
    p50: f64,
    p99: f64,
    /// Seconds of the server's processes.
    server: f64,
    /// Seconds of wrk and of the client that compares.
    client: f64,
    /// Answers that were compared, byte by byte. They are not among `requests`.
    compared: u64,
    /// What part of either core others used, the larger one.
    others: f64,
}

impl Window {
    /// Million requests a second.
    fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds / 1e6
    }

    /// Answers to both clients.
    fn answers(&self) -> u64 {
        self.requests + self.compared
    }

    /// Microseconds of the server for a request.
    fn cost(&self) -> f64 {
        self.server * 1e6 / self.answers().max(1) as f64
    }

    /// The same of server and clients.
    fn both_cost(&self) -> f64 {
        self.cost() + self.client * 1e6 / self.answers().max(1) as f64
    }

    /// What part of the time the clients used their core.
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
        let (mut rejected, mut unsteady) = (0, 0);
        for server in servers {
            load.first(server)?;
        }
        while windows[0].len() < pairs {
            let pair = windows[0].len();
            let first = load.window(servers[pair % 2])?;
            let second = load.window(servers[1 - pair % 2])?;
            let disturbed = first.others.max(second.others) > OTHERS;
            if disturbed && rejected < pairs {
                rejected += 1;
                continue;
            }
            unsteady += usize::from(disturbed);
            windows[pair % 2].push(first);
            windows[1 - pair % 2].push(second);
            progress.step();
        }
        let [ours, theirs] = &windows;
        Ok(Row { rejected, unsteady, ..self.row(ours, theirs) })
    }

    fn row(self, ours: &[Window], theirs: &[Window]) -> Row {
        let all = |windows: &[Window], of: fn(&Window) -> f64| windows.iter().map(of).collect::<Vec<_>>();
        let median = |windows: &[Window], of| Spread::of(&all(windows, of)).median;
        let (our_rates, their_rates) = (all(ours, Window::rate), all(theirs, Window::rate));
        let row = beside_kernel(&our_rates, &their_rates);
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

    #[test]
    fn rows_say_who_answers_faster_and_at_what_cost() {
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
        near(row.peer_ratio, 2.0);
        near(Some(row.median), 0.0145);
        near(row.peer_median, 0.00725);
        // Of all answers, those that were compared included.
        near(row.server_us_per_request, 30.0);
        near(row.peer_server_us_per_request, 1e6 / 15_500.0);
        near(row.peer_both_us_per_request, 1.4e6 / 15_500.0);
        near(row.p99_ns, 9e6);
        assert_eq!((row.received, row.verified, row.noise_floor), (120_000, 4000, Some(0.0)));
    }
}
