//! Clients: wrk, ab, pgbench, and a connection that compares an answer.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};

use super::hosts::{NGINX, PHP};
use super::{BYTES, Load};
use crate::peer::netns::{Netns, checked};
use crate::tcp::http::server::Site;
use crate::tcp::link::STALLED;

/// Number of pgbench's branches. It exceeds the number of connections, which would otherwise wait for one another.
const SCALE: &str = "10";

/// Namespace and core of the clients, and duration of their runs.
#[derive(Debug)]
pub(super) struct Client<'a> {
    pub(super) netns: &'a Netns,
    pub(super) lcore: usize,
    /// Length of a window in seconds.
    pub(super) window: u64,
    pub(super) site: &'a Site<'a>,
}

impl Client<'_> {
    fn command(&self, program: &str) -> Command {
        let mut command = self.netns.command("prlimit");
        command.args(["--nofile=8192", "taskset", "-c", &self.lcore.to_string(), program]);
        command
    }

    /// Fills the database at `address` for pgbench.
    pub(super) fn prepare(&self, load: Load, address: &str) -> Result<()> {
        if load == Load::TpcB {
            checked(self.command("pgbench").args(["-i", "-q", "-s", SCALE]).args(postgres(address)))?;
        }
        Ok(())
    }

    /// Returns the rate of a window in answers per second.
    pub(super) fn window(&self, load: Load, connections: usize, address: &str) -> Result<f64> {
        let (seconds, connections) = (self.window.to_string(), connections.to_string());
        let mut command = match load {
            Load::Wrk => self.command("wrk"),
            Load::Ab | Load::Php => self.command("ab"),
            Load::TpcB => self.command("pgbench"),
        };
        match load {
            Load::Wrk => command.args(["-t1", "--timeout", "10s", "-c", &connections, "-d", &seconds]),
            Load::Ab | Load::Php => {
                command.args(["-q", "-t", &seconds, "-n", "1000000", "-s", "10", "-c", &connections])
            }
            Load::TpcB => command.args(["-n", "-j", "1", "-c", &connections, "-T", &seconds]),
        };
        match load {
            Load::TpcB => command.args(postgres(address)),
            _ => command.arg(format!("http://{address}:{}{}", port(load), path(load))),
        };
        let said = checked(&mut command)?;
        rate(load, &said).with_context(|| format!("{command:?} said\n{said}"))
    }

    /// Compares an answer or the sums of the accounts. Returns the number of answers or transactions that were checked.
    pub(super) fn verify(&self, load: Load, address: &str) -> Result<u64> {
        if load != Load::TpcB {
            let php = [b'x'; BYTES];
            let (path, expected) = match load {
                Load::Php => (path(load), &php[..]),
                _ => (format!("/compared-{BYTES}"), self.site.content(BYTES)),
            };
            let answer = self.netns.within(|| answer(address, port(load), &path))?;
            ensure!(
                answer == expected,
                "{address}: {} bytes of {load} differ from the {} expected",
                answer.len(),
                expected.len()
            );
            return Ok(1);
        }
        let sums = "SELECT count(*), coalesce(sum(delta), 0) = (SELECT sum(abalance) FROM pgbench_accounts) \
                    FROM pgbench_history";
        let said = checked(self.command("psql").args(["-At", "-c", sums]).args(postgres(address)))?;
        let (count, same) = said.trim().split_once('|').context("psql said no row")?;
        ensure!(same == "t", "{address}: the balances of {count} transactions differ from their history");
        count.parse().with_context(|| format!("psql said {said:?}"))
    }
}

fn postgres(address: &str) -> [&str; 5] {
    ["-h", address, "-U", "postgres", "postgres"]
}

fn port(load: Load) -> u16 {
    if load == Load::Php { PHP } else { NGINX }
}

fn path(load: Load) -> String {
    if load == Load::Php { "/index.php".into() } else { format!("/wrk-{BYTES}") }
}

/// Returns the body of an answer.
fn answer(address: &str, port: u16, path: &str) -> Result<Vec<u8>> {
    let mut stream = TcpStream::connect((address, port)).context("connecting")?;
    stream.set_read_timeout(Some(STALLED))?;
    // Sent in one write: PHP's server closes some connections whose request arrives in parts, also on the kernel's
    // stack.
    let request = format!("GET {path} HTTP/1.0\r\n\r\n");
    stream.write_all(request.as_bytes()).context("a request")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).context("an answer")?;
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").context("an answer without a body")?;
    let head = String::from_utf8_lossy(&answer[..end]);
    ensure!(head.starts_with("HTTP/1.") && head.contains(" 200 "), "{head}");
    Ok(answer.split_off(end + 4))
}

/// Returns the rate that a client reports. Fails if it reports errors.
fn rate(load: Load, said: &str) -> Result<f64> {
    let (name, errors): (_, &[&str]) = match load {
        Load::Wrk => ("Requests/sec:", &["Socket errors", "Non-2xx"]),
        Load::Ab | Load::Php => ("Requests per second:", &["Non-2xx", "Write errors"]),
        Load::TpcB => ("tps =", &["error", "aborted in"]),
    };
    if let Some(line) = said.lines().find(|line| errors.iter().any(|error| line.contains(error))) {
        return Err(anyhow!("it counts errors: {line:?}"));
    }
    let number = |name: &str| {
        let line = said.lines().find_map(|line| line.trim().strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<f64>().ok()
    };
    ensure!(number("Failed requests:").unwrap_or(0.0) == 0.0, "it counts failed requests");
    number(name).with_context(|| format!("it says no {name:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_and_errors_refused() {
        let ab = "Complete requests:      100\nFailed requests:        0\nRequests per second:    7076.40 [#/sec] (mean)\n";
        assert_eq!(rate(Load::Ab, ab).unwrap(), 7076.4);
        assert!(rate(Load::Php, &ab.replace("        0", "        3")).is_err());
        let wrk = "  2 requests in 1.00s\nRequests/sec:   5922.10\nTransfer/sec: 1MB\n";
        assert_eq!(rate(Load::Wrk, wrk).unwrap(), 5922.1);
        assert!(rate(Load::Wrk, &format!("  Socket errors: connect 0, read 1\n{wrk}")).is_err());
        let tpcb =
            "number of failed transactions: 0 (0.000%)\ntps = 194.2 (without initial connection time)\n";
        assert_eq!(rate(Load::TpcB, tpcb).unwrap(), 194.2);
        assert!(rate(Load::TpcB, "latency average = 1 ms\n").is_err());
    }
}
