//! The strength of an attack: what attackers report, and the kernel's count of their connections.

use std::fs;
use std::net::Ipv4Addr;
use std::time::Instant;

use anyhow::{Context, Result};

/// Connections of the calling thread's namespace (proc_net(5)).
const CONNECTIONS: &str = "/proc/thread-self/net/tcp";
/// The state ESTABLISHED in that file.
const ESTABLISHED: &str = "01";

/// A report of a hostile process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Report {
    /// Number of attempts so far.
    attempts: u64,
    /// Number of sockets that are open.
    open: u64,
}

impl Report {
    /// Returns the last complete report in a process's output.
    pub(super) fn last(output: &str) -> Self {
        let complete = output.rfind('\n').map_or("", |end| &output[..end]);
        let parse = |line: &str| {
            let numbers: Vec<u64> = line.split(' ').map_while(|word| word.parse().ok()).collect();
            let &[attempts, open] = &numbers[..] else { return None };
            Some(Self { attempts, open })
        };
        complete.lines().rev().find_map(parse).unwrap_or_default()
    }
}

/// The state of an attack at a point in time.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    at: Instant,
    reports: Vec<Report>,
    /// Number of established connections of hostile peers.
    pub(super) established: u64,
}

impl Sample {
    /// Takes a sample. `addresses` are the source addresses of the hostile peers in the namespace of this thread.
    pub(super) fn new(reports: Vec<Report>, addresses: &[&str]) -> Result<Self> {
        let text = fs::read_to_string(CONNECTIONS).context(CONNECTIONS)?;
        let addresses = addresses.iter().map(|address| address.parse()).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { at: Instant::now(), reports, established: established(&text, &addresses) })
    }

    pub(super) fn attempts_per_second(&self, before: &Self) -> u64 {
        let all = |sample: &Self| sample.reports.iter().map(|report| report.attempts).sum::<u64>();
        self.per_second(before, all)
    }

    /// Returns by how much the number of established connections has grown per second.
    pub(super) fn growth_per_second(&self, before: &Self) -> u64 {
        self.per_second(before, |sample| sample.established)
    }

    fn per_second(&self, before: &Self, count: impl Fn(&Self) -> u64) -> u64 {
        let seconds = self.at.duration_since(before.at).as_secs_f64();
        (count(self).saturating_sub(count(before)) as f64 / seconds).round() as u64
    }

    /// Returns the number of processes with attempts since the sample `before`.
    pub(super) fn advanced(&self, before: &Self) -> u64 {
        let pairs = self.reports.iter().zip(&before.reports);
        pairs.filter(|(now, before)| now.attempts > before.attempts).count() as u64
    }

    /// Returns the number of sockets that the processes hold open.
    pub(super) fn open(&self) -> u64 {
        self.reports.iter().map(|report| report.open).sum()
    }
}

/// Counts established connections from `addresses`.
fn established(text: &str, addresses: &[Ipv4Addr]) -> u64 {
    // The kernel prints addresses as numbers in the byte order of the machine.
    let address = |address: &Ipv4Addr| format!("{:08X}", u32::from_ne_bytes(address.octets()));
    let addresses: Vec<String> = addresses.iter().map(address).collect();
    let is_ours = |line: &&str| {
        let fields: Vec<&str> = line.split_whitespace().take(4).collect();
        let &[_, source, _, state] = &fields[..] else { return false };
        let source = source.split(':').next().unwrap_or_default();
        state == ESTABLISHED && addresses.iter().any(|address| address == source)
    };
    text.lines().filter(is_ours).count() as u64
}

/// The strength of an attack over an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Strength {
    pub(super) attackers: u64,
    pub(super) target: u64,
    pub(super) is_enough: bool,
    /// The unit of `attackers` and `target`.
    pub(super) unit: &'static str,
}

impl Strength {
    /// Returns a strength that is enough from half of the target on.
    pub(super) fn of(attackers: u64, target: u64, unit: &'static str) -> Self {
        Self { attackers, target, is_enough: attackers > 0 && attackers >= target / 2, unit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_and_connections_are_counted() {
        assert_eq!(Report::last("1 2\nready\n40 5\n70 8"), Report { attempts: 40, open: 5 });
        assert_eq!(Report::last("ready"), Report::default());
        let source = format!("{:08X}", u32::from_ne_bytes([10, 77, 0, 10]));
        let line =
            |source: &str, state| format!("   0: {source}:8AE0 0200A04D:1F90 {state} 00000000:00000000\n");
        let text = ["01", "01", "02", "06"].map(|state| line(&source, state)).concat();
        let text = format!("  sl  local_address rem_address   st\n{text}{}", line("0100007F", "01"));
        let [hostile, other] = ["10.77.0.10", "10.77.0.11"].map(|address| address.parse().unwrap());
        assert_eq!((established(&text, &[hostile]), established(&text, &[other])), (2, 0));
    }

    #[test]
    fn an_attack_has_half_of_its_target() {
        let enough = [(50, 100), (49, 100), (0, 0)].map(|(attackers, target)| {
            let Strength { is_enough, .. } = Strength::of(attackers, target, "programs");
            is_enough
        });
        assert_eq!(enough, [true, false, false]);
        let at = Instant::now();
        let sample = |ms, attempts| Sample {
            at: at + std::time::Duration::from_millis(ms),
            reports: vec![Report { attempts, open: 7 }, Report::default()],
            established: 2 * attempts,
        };
        let (first, second) = (sample(0, 100), sample(500, 250));
        assert_eq!((second.growth_per_second(&first), first.growth_per_second(&first)), (600, 0));
        assert_eq!((second.attempts_per_second(&first), second.advanced(&first)), (300, 1));
        assert_eq!(second.open(), 7);
    }
}
