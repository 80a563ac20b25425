//! Time limits of a connection. They depend on free memory and on the share of the connection's source.
//!
//! Slow peers hold memory: unread parts of requests, and answers that are not acknowledged. While memory is scarce the server ends
//! the slowest connections early. If a source has an unfair share of the connections, only its connections are ended early.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};

/// Connections that a source may have without holding an unfair share, and the part of all that it may have: 1/8.
const FEW: usize = 64;
const FAIR: usize = 8;

/// Limits of a connection, in microseconds.
#[derive(Debug)]
pub(super) struct Timeouts {
    /// Without progress of an answer.
    pub stalled: u64,
    /// Bytes per second that a peer takes on average, at least. Single bytes do not keep an answer alive.
    pub slowest: u64,
    /// Without a request.
    pub idle: u64,
    /// From the first byte of a request to its last.
    pub request: u64,
    /// Whether connections end without an answer.
    pub aborts: bool,
}

impl Timeouts {
    pub(super) const USUAL: Self =
        Self { stalled: 30_000_000, slowest: 500, idle: 30_000_000, request: 10_000_000, aborts: false };
    /// While memory is scarce.
    const SCARCE: Self =
        Self { stalled: 3_000_000, slowest: 16_000, idle: 1_000_000, request: 2_000_000, aborts: true };
    /// While memory is scarce, for a source with an unfair share.
    const UNFAIR: Self =
        Self { stalled: 1_000_000, slowest: 16_000, idle: 250_000, request: 250_000, aborts: true };
}

/// Hosts that share an address, or the first 64 bits of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    V4(Ipv4Addr),
    V6([u16; 4]),
}

impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Self::V6([a, b, c, d])
            }
        }
    }
}

/// The number of connections by source.
#[derive(Debug, Default)]
pub(super) struct Sources {
    counts: HashMap<Source, usize>,
    all: usize,
    /// Whether a source has an unfair share: in the last pass over all connections, and in this one so far.
    unfair: bool,
    met: bool,
}

impl Sources {
    pub(super) fn add(&mut self, source: Source) {
        *self.counts.entry(source).or_default() += 1;
        self.all += 1;
    }

    pub(super) fn remove(&mut self, source: Source) {
        if let Some(count) = self.counts.get_mut(&source) {
            *count -= 1;
            self.all -= 1;
            if *count == 0 {
                self.counts.remove(&source);
            }
        }
    }

    /// The limits of a connection from `source`. Called for each connection in a pass.
    pub(super) fn timeouts(&mut self, source: Source, is_scarce: bool) -> &'static Timeouts {
        if !is_scarce {
            return &Timeouts::USUAL;
        }
        let count = self.counts.get(&source).copied().unwrap_or_default();
        let is_unfair = count > FEW.max(self.all / FAIR);
        self.met |= is_unfair;
        match (is_unfair, self.unfair) {
            (true, _) => &Timeouts::UNFAIR,
            (false, true) => &Timeouts::USUAL,
            (false, false) => &Timeouts::SCARCE,
        }
    }

    /// A pass over all connections has ended.
    pub(super) fn end_pass(&mut self) {
        self.unfair = std::mem::take(&mut self.met);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(last: u8) -> Source {
        IpAddr::from([10, 0, 0, last]).into()
    }

    #[test]
    fn unfair_sources_wait_least() {
        let mut sources = Sources::default();
        (0..100).for_each(|_| sources.add(source(1)));
        (0..10).for_each(|_| sources.add(source(2)));
        assert_eq!(sources.timeouts(source(1), false).request, Timeouts::USUAL.request);
        assert_eq!(sources.timeouts(source(1), true).request, Timeouts::UNFAIR.request);
        sources.end_pass();
        assert_eq!(sources.timeouts(source(2), true).request, Timeouts::USUAL.request);
        // Without an unfair source all are slow alike.
        (0..60).for_each(|_| sources.remove(source(1)));
        sources.end_pass();
        assert_eq!(sources.timeouts(source(1), true).request, Timeouts::SCARCE.request);
        assert_eq!(sources.timeouts(source(2), true).request, Timeouts::SCARCE.request);
    }

    #[test]
    fn removed_sources_are_forgotten() {
        let mut sources = Sources::default();
        sources.add(source(1));
        sources.remove(source(1));
        sources.remove(source(1));
        assert_eq!((sources.all, sources.counts.len()), (0, 0));
    }

    #[test]
    fn networks_of_64_bits_are_one_source() {
        let of = |text: &str| Source::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(of("fd00:1:2:3::1"), of("fd00:1:2:3:ffff::2"));
        assert_ne!(of("fd00:1:2:3::1"), of("fd00:1:2:4::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }
}
