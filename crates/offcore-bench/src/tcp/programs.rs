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

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use offcore_stats::named;

use super::http::server::{self, Site};
use super::veth::compare_with_kernel;
use crate::peer::netns::{self, Netns};
use crate::peer::tempdir::TempDir;
use crate::report::progress::Progress;
use crate::report::row::Row;
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

/// Parameters of a measurement.
#[derive(Clone, Debug)]
pub struct ProgramOptions {
    /// This program, which is also the relay: `offcore`.
    pub binary: PathBuf,
    /// Number of pairs of windows per cell.
    pub pairs: usize,
    /// Length of a window in seconds.
    pub window: u64,
    /// The core of the programs, the stack and the relay.
    pub lcore: usize,
    /// The core of the clients.
    pub other_lcore: Option<usize>,
}

impl ProgramOptions {
    /// Returns options with 12 pairs of windows of 2 s in each cell, or 6 of 1 s with `quick`.
    pub fn new(quick: bool, binary: PathBuf, lcore: usize, other_lcore: Option<usize>) -> Self {
        let (pairs, window) = if quick { (6, 1) } else { (12, 2) };
        Self { binary, pairs, window, lcore, other_lcore }
    }

    /// Returns a missing requirement of this machine, if any.
    pub fn missing(&self) -> Option<String> {
        let postgres = || postgres_directory().err().map(|error| error.to_string());
        netns::missing((self.lcore, self.other_lcore), &PROGRAMS).or_else(server::missing).or_else(postgres)
    }
}

/// Measures all cells and passes each finished row to `emit`.
///
/// # Errors
/// A missing requirement ([`ProgramOptions::missing`]), a failed setup, an error that a client reports, or a wrong
/// byte.
pub fn run(options: &ProgramOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    if let Some(missing) = options.missing() {
        bail!("programs behind a TAP: {missing}");
    }
    Netns::sweep()?;
    let other_lcore = options.other_lcore.context("programs behind a TAP need two lcores")?;
    let (client, kernel, dir) = (Netns::new()?, Netns::new()?, TempDir::new()?);
    let site = Site::new(&dir, options.lcore, &client)?;
    let hosts = Hosts::open(&site, options, [&client, &kernel])?;
    let programs = Programs::start(&site, &hosts, options)?;
    let client = Client { netns: &client, lcore: other_lcore, window: options.window, site: &site };
    progress.begin(CELLS.len() * options.pairs);
    for (load, connections) in CELLS {
        progress.say(&format!("programs, {load}, {connections} connections"));
        let row = measure(load, connections, &client, options.pairs, progress);
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
    let mut rates = [Vec::new(), Vec::new()];
    let mut verified = 0;
    for address in ADDRESSES {
        client.prepare(load, address)?;
        client.window(load, connections, address)?;
    }
    for pair in 0..pairs {
        for turn in [pair % 2, 1 - pair % 2] {
            // The sums of pgbench's accounts cover all windows. They are checked at the end.
            if load != Load::TpcB {
                verified += client.verify(load, ADDRESSES[turn])?;
            }
            rates[turn].push(client.window(load, connections, ADDRESSES[turn])?);
        }
        progress.step();
    }
    for address in ADDRESSES {
        verified += client.verify(load, address)?;
    }
    let [ours, theirs] = rates;
    Ok(Row { verified, received: verified, ..row(load, connections, &ours, &theirs) })
}

fn row(load: Load, connections: usize, ours: &[f64], theirs: &[f64]) -> Row {
    Row {
        case: load.to_string(),
        port: Some("tap"),
        connections: Some(connections),
        unit: UNIT,
        ..compare_with_kernel(ours, theirs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    #[test]
    fn ratios_are_of_paired_windows() {
        let row = row(Load::Ab, 500, &[90.0, 180.0, 270.0, 360.0], &[100.0, 200.0, 300.0, 400.0]);
        golden::check("tcp, programs", &row);
        assert_eq!((row.peer_ratio, row.median, row.peer_median), (Some(0.9), 225.0, Some(250.0)));
        assert_eq!((row.case.as_str(), row.connections, row.runs), ("nginx, ab", Some(500), 4));
    }
}
