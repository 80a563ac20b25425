//! Path MTUs (RFC 1191, RFC 8201) by destination. All sockets share them.

use std::collections::HashMap;
use std::net::IpAddr;

use offcore_stats::time::{Micros, Time};

/// Maximum number of destinations.
const MOST: usize = 4096;
/// Lifetime of an entry. RFC 8201, 4 requires at least 5 minutes; Linux uses 10.
const LIFETIME: Micros = Micros::from_secs(600);

/// Path MTUs that are less than the interface's MTU.
#[derive(Debug, Default)]
pub(super) struct PathMtus(HashMap<IpAddr, (u16, Time)>);

impl PathMtus {
    /// Returns the MTU of a path, if a router has reported one.
    pub(super) fn get(&self, now: Time, to: IpAddr) -> Option<u16> {
        // Most hosts store none.
        if self.0.is_empty() {
            return None;
        }
        self.0.get(&to).filter(|(_, until)| now < *until).map(|(mtu, _)| *mtu)
    }

    /// Stores the MTU that a router reports. A larger value does not replace a smaller one before the smaller one
    /// expires. Returns whether the MTU is smaller than before.
    pub(super) fn set(&mut self, now: Time, to: IpAddr, mtu: u16) -> bool {
        if self.0.len() >= MOST && !self.0.contains_key(&to) {
            self.0.retain(|_, (_, until)| now < *until);
            if self.0.len() >= MOST {
                self.0.clear();
            }
        }
        let known = self.get(now, to).unwrap_or(u16::MAX);
        self.0.insert(to, (known.min(mtu), now + LIFETIME));
        mtu < known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_mtu_expires_after_ten_minutes() {
        let mut paths = PathMtus::default();
        let to = |last: u32| IpAddr::from((0x0a00_0000 + last).to_be_bytes());
        paths.set(Time::from_micros(1), to(1), 1400);
        paths.set(Time::from_micros(2), to(1), 1450);
        paths.set(Time::from_micros(2), to(2), 1300);
        assert_eq!(
            [1, 2, 3].map(|last| paths.get(Time::from_micros(3), to(last))),
            [Some(1400), Some(1300), None]
        );
        paths.set(Time::ZERO + LIFETIME, to(2), 1290);
        assert_eq!(
            [1, 2].map(|last| paths.get(Time::ZERO + LIFETIME + Micros::new(9), to(last))),
            [None, Some(1290)]
        );
    }

    #[test]
    fn path_mtu_cache_is_bounded() {
        let mut paths = PathMtus::default();
        let mut most = 0;
        for last in 0..3 * 4096u32 {
            paths.set(Time::from_micros(1), IpAddr::from(last.to_be_bytes()), 1400);
            most = most.max(paths.0.len());
            assert_eq!(paths.get(Time::from_micros(1), IpAddr::from(last.to_be_bytes())), Some(1400));
        }
        assert_eq!(most, 4096);
    }
}
