//! `offcore bench tcp --case programs`: nginx, PostgreSQL and PHP on our stack (`offcore exec`), compared with the same
//! programs on the kernel's stack. The client on the kernel's stack reaches both through a TAP.
//!
//! ```text
//! lcore                                           other lcore
//! ours:   program, stack ───────────────── TAP ──┐
//! theirs: program, TAP ── offcore switch ─ TAP ──┴── wrk, ab or pgbench, in another namespace
//! ```
//! A process holds the other end of each TAP: our stack, or a relay with a second TAP that leads to the kernel's stack.
//! Both sides therefore have the same number of processes and the same cores. Both sleep when they are idle. Windows
//! alternate. On two cores the program, its stack and the relay share a core, so that a ratio includes the cost of
//! switching between them.
//!
//! Before each window an answer of each HTTP server is compared byte by byte. Each client has to count 0 errors. The
//! balances of pgbench's accounts have to be the sum of its history.

mod clients;
mod hosts;

use anyhow::{Context, Result};
use offcore_stats::named;

use super::http::extent;
use super::http::server::{self, Site};
use super::kernel::{KernelOptions, alternate};
use super::veth::compare_with_kernel;
use crate::peer::netns::Netns;
use crate::peer::tempdir::TempDir;
use crate::report::progress::Progress;
use crate::report::row::{Counts, Row};
use clients::Client;
use hosts::{Hosts, Programs, postgres_directory};

/// The unit of the rows.
pub const UNIT: &str = "answers_per_s";
/// Size of the answers of nginx and PHP in bytes.
const BYTES: usize = 1024;
/// Required programs with their packages.
const PROGRAMS: [(&str, &str); 8] = [
    ("nginx", "nginx-light"),
    ("wrk", "wrk"),
    ("ab", "apache2-utils"),
    ("pgbench", "postgresql"),
    ("php", "php-cli"),
    ("taskset", "util-linux"),
    ("setpriv", "util-linux"),
    ("prlimit", "util-linux"),
];

named! {
    /// A program and its client.
    pub enum Load {
        /// Persistent connections.
        Wrk = "nginx, wrk",
        /// One connection per request.
        Ab = "nginx, ab",
        /// TPC-B transactions.
        TpcB = "postgres, pgbench",
        /// PHP's built-in server, with one connection per request.
        Php = "php, ab",
    }
}

/// Loads with their numbers of connections.
const CELLS: [(Load, usize); 8] = [
    (Load::Wrk, 1),
    (Load::Wrk, 64),
    (Load::Ab, 500),
    (Load::Ab, 1000),
    (Load::TpcB, 1),
    (Load::TpcB, 8),
    (Load::Php, 1),
    (Load::Php, 16),
];

/// Measures all cells and passes each finished row to `emit`.
///
/// # Errors
/// A missing requirement, a failed setup, an error that a client reports, or a wrong byte.
pub fn run(options: &KernelOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let postgres = || postgres_directory().err().map(|error| error.to_string());
    let missing = || server::missing().or_else(postgres);
    let other_lcore = options.start("programs behind a TAP", &PROGRAMS, missing)?;
    let (pairs, window) = extent(options.quick);
    let (client, kernel, dir) = (Netns::new()?, Netns::new()?, TempDir::new()?);
    let site = Site::new(&dir, options.lcore, &client)?;
    let hosts = Hosts::open(&site, options, [&client, &kernel])?;
    let programs = Programs::start(&site, &hosts, options)?;
    let client = Client { netns: &client, lcore: other_lcore, window, site: &site };
    progress.begin(CELLS.len() * pairs);
    for (load, connections) in CELLS {
        progress.say(&format!("programs, {load}, {connections} connections"));
        let row = measure(load, connections, &client, pairs, progress);
        let said = || format!("{load}, {connections} connections\n{}{}", hosts.tail(), programs.tail());
        emit(row.with_context(said)?);
    }
    progress.end();
    Ok(())
}

/// The address of each server.
pub(super) const ADDRESSES: [&str; 2] = ["10.77.0.2", "10.78.0.2"];

fn measure(
    load: Load,
    connections: usize,
    client: &Client<'_>,
    pairs: usize,
    progress: &Progress,
) -> Result<Row> {
    let mut verified = 0;
    for address in ADDRESSES {
        client.prepare(load, address)?;
        client.window(load, connections, address)?;
    }
    let [ours, theirs] = alternate(pairs, progress, |turn| {
        // The sums of pgbench's accounts cover all windows. They are checked at the end.
        if load != Load::TpcB {
            verified += client.verify(load, ADDRESSES[turn])?;
        }
        client.window(load, connections, ADDRESSES[turn])
    })?;
    for address in ADDRESSES {
        verified += client.verify(load, address)?;
    }
    let counts = Counts::all_of(verified);
    Ok(Row { counts, ..row(load, connections, &ours, &theirs) })
}

fn row(load: Load, connections: usize, ours: &[f64], theirs: &[f64]) -> Row {
    let mut row = compare_with_kernel(load, UNIT, [ours, theirs]);
    (row.head.port, row.tcp.connections) = (Some("tap"), Some(connections));
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    #[test]
    fn ratios_are_of_paired_windows() {
        let row = row(Load::Ab, 500, &[90.0, 180.0, 270.0, 360.0], &[100.0, 200.0, 300.0, 400.0]);
        golden::check("tcp, programs", &row);
        assert_eq!(
            (row.peer.peer_ratio, row.figures.spread.median, row.peer.peer_median),
            (Some(0.9), 225.0, Some(250.0))
        );
        assert_eq!(
            (row.head.case.as_str(), row.tcp.connections, row.figures.spread.runs),
            ("nginx, ab", Some(500), 4)
        );
    }
}
