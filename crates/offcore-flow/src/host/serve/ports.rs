//! The ports of sessions.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// Ephemeral ports for sessions without a requested port. The range is the same as for connections.
pub(super) const ANY: RangeInclusive<u16> = 32768..=60999;

/// Bits per word.
const BITS: usize = u64::BITS as usize;

/// Bound sessions, or listeners and datagram sockets, by port.
#[derive(Debug)]
pub(super) struct Ports {
    /// Port, application and session number.
    all: BTreeSet<(u16, usize, u32)>,
    /// One bit per port, which is set if a session has the port.
    taken: Box<[u64]>,
    /// Number of sessions by application.
    counts: Vec<usize>,
}

impl Ports {
    pub(super) fn new() -> Self {
        Self { all: BTreeSet::new(), taken: vec![0; (1 << 16) / BITS].into(), counts: Vec::new() }
    }

    /// Adds a session, unless its port is 0.
    pub(super) fn add(&mut self, port: u16, app: usize, number: u32) {
        if port == 0 || !self.all.insert((port, app, number)) {
            return;
        }
        if app >= self.counts.len() {
            self.counts.resize(app + 1, 0);
        }
        self.counts[app] += 1;
        self.set_taken(port, true);
    }

    /// Removes a session if it is present.
    pub(super) fn remove(&mut self, port: u16, app: usize, number: u32) {
        if self.all.remove(&(port, app, number)) {
            self.counts[app] -= 1;
            let taken = self.at(port).next().is_some();
            self.set_taken(port, taken);
        }
    }

    fn set_taken(&mut self, port: u16, taken: bool) {
        let (word, bit) = (usize::from(port) / BITS, usize::from(port) % BITS);
        self.taken[word] = self.taken[word] & !(1 << bit) | u64::from(taken) << bit;
    }

    /// Application and number of all sessions at a port.
    pub(super) fn at(&self, port: u16) -> impl Iterator<Item = (usize, u32)> {
        let all = (port, 0, 0)..=(port, usize::MAX, u32::MAX);
        self.all.range(all).map(|(_, app, number)| (*app, *number))
    }

    /// Number of sessions of an application.
    pub(super) fn count(&self, app: usize) -> usize {
        self.counts.get(app).copied().unwrap_or(0)
    }

    /// Returns the first unused port of [`ANY`] at or after `from`, and otherwise before it. The port is unused both
    /// here and in `other`.
    pub(super) fn free(&self, other: &Self, from: u16) -> Option<u16> {
        let (first, last) = (usize::from(*ANY.start()), usize::from(*ANY.end()));
        let from = usize::from(from).clamp(first, last);
        let within = |range: RangeInclusive<usize>| {
            (range.start() / BITS..=range.end() / BITS).find_map(|word| {
                let free = !(self.taken[word] | other.taken[word]);
                let mut ports = (0..BITS).filter(|bit| free >> bit & 1 != 0).map(|bit| word * BITS + bit);
                if free == 0 { None } else { ports.find(|port| range.contains(port)) }
            })
        };
        let port = within(from..=last).or_else(|| within(first..=from))?;
        u16::try_from(port).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_port_search_wraps_around() {
        let (mut ports, mut bound) = (Ports::new(), Ports::new());
        for port in ANY.filter(|port| ![33_000, 50_001].contains(port)) {
            let of = if port % 2 == 0 { &mut ports } else { &mut bound };
            of.add(port, 3, u32::from(port));
        }
        for (from, expected) in [(0, 33_000), (32_768, 33_000), (33_001, 50_001), (50_001, 50_001)] {
            assert_eq!(ports.free(&bound, from), Some(expected), "from {from}");
        }
        assert_eq!(ports.free(&bound, 50_002), Some(33_000), "it goes round");
        ports.add(33_000, 3, 1);
        ports.add(33_000, 4, 1);
        ports.add(50_001, 3, 1);
        assert_eq!((ports.free(&bound, 7), ports.count(4), ports.count(9)), (None, 1, 0));
        ports.remove(33_000, 4, 1);
        assert_eq!(ports.free(&bound, 7), None, "another one has it");
        ports.remove(33_000, 3, 1);
        ports.remove(33_000, 3, 1);
        assert_eq!((ports.free(&bound, 60_999), ports.count(4)), (Some(33_000), 0));
        assert_eq!(ports.count(3) + bound.count(3), ANY.len() - 1);
    }
}
