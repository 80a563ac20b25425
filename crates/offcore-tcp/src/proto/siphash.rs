//! Keyed hashes of flows (Aumasson and Bernstein, SipHash). The caller provides the secret: 16 random bytes from the
//! system.

use std::fmt;
use std::hash::Hasher as _;

use siphasher::sip::{SipHasher13, SipHasher24};

use super::addr::{FLOW_KEY_LEN, FlowKey};

/// SipHash-1-3 for tables. Its values are never visible, so a peer cannot choose colliding flows.
#[derive(Clone)]
pub(super) struct FlowHash(SipHasher13);

impl FlowHash {
    /// Creates the hash with this secret.
    pub(super) fn new(secret: &[u8; 16]) -> Self {
        Self(SipHasher13::new_with_key(secret))
    }

    /// Creates the hash that spreads flows over workers. It is independent of the other hash, so each worker's table is
    /// filled evenly.
    pub(super) fn of_workers(secret: &[u8; 16]) -> Self {
        let [low, high] = derived(secret, Purpose::Worker);
        Self(SipHasher13::new_with_keys(low, high))
    }

    /// Returns the hash of a flow.
    #[inline]
    pub(super) fn hash(&self, flow: &FlowKey) -> u64 {
        // The words are hashed directly, because bytes assembled in memory would have to be loaded immediately. SipHash
        // includes the length, so the short form of IPv4 has distinct values. It saves three rounds of eight.
        let mut hasher = self.0;
        if let Some(addresses) = flow.v4_addresses() {
            hasher.write_u64(addresses);
        } else {
            for address in flow.addresses() {
                hasher.write_u64(address as u64);
                hasher.write_u64((address >> 64) as u64);
            }
        }
        hasher.write_u32(flow.ports());
        hasher.finish()
    }
}

impl fmt::Debug for FlowHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key must not appear in logs.
        f.write_str("FlowHash")
    }
}

/// SipHash-2-4 for values that peers see: sequence numbers, timestamps, ports, cookies. The full strength costs a few
/// nanoseconds per connection.
#[derive(Clone)]
pub(super) struct FlowMac(SipHasher24);

impl FlowMac {
    /// Creates the function of this secret for one purpose. Functions for different purposes are independent.
    pub(super) fn new(secret: &[u8; 16], purpose: Purpose) -> Self {
        let [low, high] = derived(secret, purpose);
        Self(SipHasher24::new_with_keys(low, high))
    }

    /// Returns the value for a flow and a number that depends on the purpose.
    #[inline]
    pub(super) fn mac(&self, flow: &FlowKey, more: u128) -> u64 {
        let mut bytes = [0; FLOW_KEY_LEN + 16];
        bytes[..FLOW_KEY_LEN].copy_from_slice(&flow.bytes());
        bytes[FLOW_KEY_LEN..].copy_from_slice(&more.to_le_bytes());
        self.0.hash(&bytes)
    }
}

impl fmt::Debug for FlowMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FlowMac")
    }
}

/// Returns the key of a function for one purpose, in two halves.
fn derived(secret: &[u8; 16], purpose: Purpose) -> [u64; 2] {
    let root = SipHasher24::new_with_key(secret);
    [0, 1].map(|half| root.hash(&[purpose as u8, half]))
}

/// The purpose of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Purpose {
    /// Initial sequence numbers (RFC 6528).
    Isn = 1,
    /// Offsets of timestamps (RFC 7323, 5.4).
    Timestamp,
    /// Ephemeral ports (RFC 6056).
    Port,
    /// SYN cookies (RFC 4987, 3.6).
    Cookie,
    /// Identifications of fragmented packets (RFC 7739).
    Fragment,
    /// Flow labels of IPv6 (RFC 6437).
    FlowLabel,
    /// The assignment of flows to workers.
    Worker,
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const SECRET: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    fn flow(port: u16) -> FlowKey {
        FlowKey::v4(Ipv4Addr::new(10, 0, 0, 1), 80, Ipv4Addr::new(10, 0, 0, 2), port)
    }

    #[test]
    fn siphash_matches_reference_vector() {
        // Appendix A of the paper: SipHash-2-4 of the bytes 0 to 14.
        let hash = SipHasher24::new_with_key(&SECRET).hash(&SECRET[..15]);
        assert_eq!(hash, 0xa129_ca61_49be_45e5);
    }

    #[test]
    fn a_hash_depends_on_secret_and_flow() {
        let (a, b) = (FlowHash::new(&SECRET), FlowHash::new(&[7; 16]));
        assert_eq!(a.hash(&flow(1)), a.clone().hash(&flow(1)));
        assert_ne!(a.hash(&flow(1)), a.hash(&flow(2)));
        assert_ne!(a.hash(&flow(1)), b.hash(&flow(1)));
    }

    #[test]
    fn hash_covers_four_tuple() {
        let hash = FlowHash::new(&SECRET);
        let ends = ["10.0.0.1:80", "10.0.0.1:81", "10.0.0.2:80", "11.0.0.1:80"];
        let long = ["[fd00::1]:80", "[fd00::1]:81", "[fd00:0:0:1::1]:80", "[fd00::a00:1]:80"];
        let mut values = Vec::new();
        for ends in [ends, long].map(|ends| ends.map(|end| end.parse().unwrap())) {
            for (local, remote) in
                ends.iter().flat_map(|local| ends.iter().map(move |remote| (local, remote)))
            {
                values.push(hash.hash(&FlowKey::new(*local, *remote).unwrap()));
            }
        }
        values.sort_unstable();
        values.dedup();
        assert_eq!(values.len(), 32);
    }

    #[test]
    fn mac_depends_on_purpose() {
        let of = |purpose| FlowMac::new(&SECRET, purpose).mac(&flow(1), 0);
        let mut values = [Purpose::Isn, Purpose::Timestamp, Purpose::Port, Purpose::Cookie].map(of);
        values.sort_unstable();
        assert!(values.windows(2).all(|pair| pair[0] != pair[1]));
        let isn = FlowMac::new(&SECRET, Purpose::Isn);
        assert_ne!(isn.mac(&flow(1), 0), isn.mac(&flow(1), 1));
        assert!(!format!("{isn:?}{:?}", FlowHash::new(&SECRET)).contains(char::is_numeric));
    }
}
