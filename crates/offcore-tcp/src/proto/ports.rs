//! Ephemeral ports (RFC 6056): the double-hash algorithm (3.3.4).

use std::ops::RangeInclusive;

use super::addr::FlowKey;
use super::siphash::{FlowMac, Purpose};

/// The default range, as on Linux.
pub(super) const EPHEMERAL: RangeInclusive<u16> = 32768..=60999;

/// Number of counters. With a small table, two observers can find out that they see the same host (Kol, Klein and
/// Gilad, 2022).
const COUNTERS: usize = 1 << 16;

/// Maximum number of ports tried per connection. The next call continues behind them.
const TRIES: u32 = 2048;

/// The selection of ephemeral ports.
#[derive(Debug)]
pub(super) struct Ports {
    mac: FlowMac,
    first: u16,
    count: u32,
    counters: Box<[u16]>,
}

impl Ports {
    /// Selects from `range`, or always port `range.start()` if the range is empty.
    pub(super) fn new(secret: &[u8; 16], range: RangeInclusive<u16>) -> Self {
        let (first, last) = (*range.start(), *range.end());
        Self {
            mac: FlowMac::new(secret, Purpose::Port),
            first,
            count: u32::from(last.saturating_sub(first)) + 1,
            counters: vec![0; COUNTERS].into(),
        }
    }

    /// Returns an unpredictable port (RFC 6056, 3.3.1): the first unused one, beginning with the `from`th.
    pub(super) fn any(&self, from: u32, in_use: impl Fn(u16) -> bool) -> Option<u16> {
        let numbers = (0..self.count).map(|n| (from % self.count + n) % self.count);
        // Below the range's end, so within 16 bits.
        numbers.map(|number| self.first + number as u16).find(|port| !in_use(*port))
    }

    /// Selects a port for a connection between the addresses, and to the remote port, of `flow`. Its local port is
    /// ignored.
    ///
    /// `in_use` returns whether a port is unavailable: its flow exists, or another worker would receive the answers.
    /// Returns `None` after 2,048 unavailable ports. The ports towards one peer are consecutive, so that a port is
    /// reused as late as possible. A peer cannot predict the ports towards another peer.
    pub(super) fn select(&mut self, flow: &FlowKey, mut in_use: impl FnMut(u16) -> bool) -> Option<u16> {
        // The two functions F and G of the RFC are two parts of one value.
        let mac = self.mac.mac(&flow.with_ports(0, flow.remote_port()), 0);
        let offset = mac as u32 % self.count;
        let counter = self.counters.get_mut((mac >> 48) as usize)?;
        for _ in 0..TRIES.min(self.count) {
            let number = (offset + u32::from(*counter)) % self.count;
            // The counter stays below `count`, because a wrap at 16 bits would leave a gap in the sequence.
            *counter = ((u32::from(*counter) + 1) % self.count) as u16;
            // Below the range's end, so within 16 bits.
            let port = self.first + number as u16;
            if !in_use(port) {
                return Some(port);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::Ipv4Addr;

    use super::*;

    fn to(host: u8, port: u16) -> FlowKey {
        FlowKey::v4(Ipv4Addr::new(10, 0, 0, 1), 0, Ipv4Addr::new(10, 0, 0, host), port)
    }

    #[test]
    fn ephemeral_ports_cycle_through_range() {
        for range in [EPHEMERAL, 0..=u16::MAX, 9..=9] {
            let mut ports = Ports::new(&[1; 16], range.clone());
            for _ in 0..2 {
                let drawn = (0..range.len()).map(|_| ports.select(&to(2, 80), |_| false).unwrap());
                assert_eq!(drawn.collect::<BTreeSet<u16>>(), range.clone().collect());
            }
        }
    }

    #[test]
    fn first_free_port_is_chosen() {
        let ports = Ports::new(&[1; 16], 100..=109);
        for from in [7, 17, 4_294_967_287] {
            assert_eq!(ports.any(from, |_| false), Some(107));
            assert_eq!(ports.any(from, |port| port >= 107), Some(100), "it goes round");
        }
        assert_eq!(ports.any(7, |_| true), None);
    }

    #[test]
    fn ports_in_use_are_skipped() {
        let mut ports = Ports::new(&[1; 16], 100..=109);
        for _ in 0..20 {
            assert_eq!(ports.select(&to(2, 80), |port| port != 104), Some(104));
        }
        assert_eq!(ports.select(&to(2, 80), |_| true), None);
    }

    #[test]
    fn port_search_is_bounded_and_resumes() {
        let mut ports = Ports::new(&[1; 16], EPHEMERAL);
        let (mut tries, mut seen) = (0, BTreeSet::new());
        while seen.len() < EPHEMERAL.len() {
            let before = tries;
            let port = ports.select(&to(2, 80), |port| {
                tries += 1;
                seen.insert(port);
                true
            });
            assert_eq!((port, tries - before), (None, TRIES));
        }
        assert!(tries < EPHEMERAL.len() as u32 + TRIES);
    }

    #[test]
    fn port_sequence_is_per_destination() {
        let first = |secret, flow| Ports::new(&[secret; 16], EPHEMERAL).select(&flow, |_| false);
        assert_ne!(first(1, to(2, 80)), first(2, to(2, 80)));
        assert_ne!(first(1, to(2, 80)), first(1, to(3, 80)));
        assert_ne!(first(1, to(2, 80)), first(1, to(2, 81)));
        // A connection to another peer does not change this peer's sequence.
        let mut ports = Ports::new(&[1; 16], EPHEMERAL);
        let a = ports.select(&to(2, 80), |_| false).unwrap();
        ports.select(&to(3, 80), |_| false).unwrap();
        let next = if a == *EPHEMERAL.end() { *EPHEMERAL.start() } else { a + 1 };
        assert_eq!(ports.select(&to(2, 80), |_| false), Some(next));
    }
}
