//! Time limits of a connection. They depend on free memory and on the number of connections from the same source.
//!
//! Slow peers hold memory: unread parts of requests, and answers that are not acknowledged. While memory is scarce,
//! slow connections end early. For the first two seconds only connections of sources with an unfair share end, then
//! connections of all sources.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};

use offcore_stats::time::{Micros, Time};

/// Number of connections that is never an unfair share, and the divisor for a fair share of all connections: 1/8.
const FEW: usize = 64;
const FAIR: usize = 8;
/// Time in which only sources with an unfair share lose connections.
const SPARED: Micros = Micros::from_secs(2);
/// While memory is scarce: the time in which a peer must receive all written data, in seconds.
const DRAIN: u64 = 10;

/// Limits of a connection.
#[derive(Debug)]
pub(super) struct Timeouts {
    /// Maximum time without progress of an answer.
    pub stalled: Micros,
    /// Minimum average rate of a peer in bytes per second. Single bytes do not keep an answer alive.
    slowest: u64,
    /// Maximum time without a request.
    pub idle: Micros,
    /// Maximum time from the first byte of a request to its last.
    pub request: Micros,
    /// Memory is scarce: connections end without an answer.
    pub aborts: bool,
}

impl Timeouts {
    pub(super) const USUAL: Self = Self {
        stalled: Micros::from_secs(30),
        slowest: 500,
        idle: Micros::from_secs(30),
        request: Micros::from_secs(10),
        aborts: false,
    };
    const SCARCE: Self = Self {
        stalled: Micros::from_secs(3),
        slowest: 16_000,
        idle: Micros::from_secs(3),
        request: Micros::from_secs(3),
        aborts: true,
    };
    /// For a source with an unfair share.
    const UNFAIR: Self = Self {
        stalled: Micros::from_secs(1),
        slowest: 16_000,
        idle: Micros::from_millis(500),
        request: Micros::from_millis(500),
        aborts: true,
    };

    /// The minimum rate in bytes per second for a peer that has not acknowledged `left` bytes.
    pub(super) fn slowest(&self, left: u64) -> u64 {
        if self.aborts { self.slowest.max(left / DRAIN) } else { self.slowest }
    }
}

/// Hosts with the same IPv4 address, or the same first 64 bits of an IPv6 address.
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
    /// When the current scarcity of memory began.
    scarce_since: Option<Time>,
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

    /// Records whether memory is scarce.
    pub(super) fn set_scarce(&mut self, now: Time, is_scarce: bool) {
        self.scarce_since = is_scarce.then(|| self.scarce_since.unwrap_or(now));
    }

    /// The limits of a connection from `source`.
    pub(super) fn timeouts(&self, now: Time, source: Source) -> &'static Timeouts {
        let Some(since) = self.scarce_since else { return &Timeouts::USUAL };
        let count = self.counts.get(&source).copied().unwrap_or_default();
        if count > FEW.max(self.all / FAIR) {
            &Timeouts::UNFAIR
        } else if now.saturating_since(since) >= SPARED {
            &Timeouts::SCARCE
        } else {
            &Timeouts::USUAL
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(last: u8) -> Source {
        IpAddr::from([10, 0, 0, last]).into()
    }

    #[test]
    fn unfair_sources_time_out_first() {
        let at = Time::from_micros;
        let mut sources = Sources::default();
        (0..100).for_each(|_| sources.add(source(1)));
        (0..10).for_each(|_| sources.add(source(2)));
        let requests =
            |sources: &Sources, now| [1, 2].map(|last| sources.timeouts(now, source(last)).request);
        let [usual, scarce, unfair] =
            [Timeouts::USUAL, Timeouts::SCARCE, Timeouts::UNFAIR].map(|timeouts| timeouts.request);
        assert_eq!(requests(&sources, at(1)), [usual, usual]);
        sources.set_scarce(at(1), true);
        assert_eq!(requests(&sources, at(1)), [unfair, usual]);
        sources.set_scarce(at(2), true);
        assert_eq!(requests(&sources, at(0) + SPARED), [unfair, usual]);
        assert_eq!(requests(&sources, at(1) + SPARED), [unfair, scarce]);
        sources.set_scarce(at(2) + SPARED, false);
        sources.set_scarce(at(3) + SPARED, true);
        assert_eq!(requests(&sources, at(3) + SPARED), [unfair, usual]);
    }

    #[test]
    fn large_responses_need_fast_peers() {
        assert_eq!(Timeouts::USUAL.slowest(16 << 20), 500);
        assert_eq!([Timeouts::SCARCE.slowest(1), Timeouts::SCARCE.slowest(16_000_000)], [16_000, 1_600_000]);
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
    fn ipv6_64_prefix_is_one_source() {
        let of = |text: &str| Source::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(of("fd00:1:2:3::1"), of("fd00:1:2:3:ffff::2"));
        assert_ne!(of("fd00:1:2:3::1"), of("fd00:1:2:4::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }
}
