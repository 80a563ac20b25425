//! Keyed hashes of flows (Aumasson and Bernstein, SipHash). The secret comes from outside: 16 bytes of the system's
//! random numbers.

use std::fmt;
use std::hash::Hasher as _;

use siphasher::sip::SipHasher13;

use super::addr::FlowKey;

/// SipHash-1-3 for tables: nobody sees its values, so a peer cannot choose flows that collide.
#[derive(Clone)]
pub(super) struct FlowHash(SipHasher13);

impl FlowHash {
    /// The hash of this secret.
    pub(super) fn new(secret: &[u8; 16]) -> Self {
        Self(SipHasher13::new_with_key(secret))
    }

    /// The hash of a flow.
    #[inline]
    pub(super) fn hash(&self, flow: &FlowKey) -> u64 {
        // As words: bytes put together in memory would have to be read back at once. SipHash includes the length, so
        // the short form of IPv4 has values of its own; it saves three rounds of eight.
        let (local, remote, ports) = flow.words();
        let mut hasher = self.0;
        if flow.is_v4() {
            hasher.write_u64((local >> 96 << 32 | remote >> 96) as u64);
        } else {
            for address in [local, remote] {
                hasher.write_u64(address as u64);
                hasher.write_u64((address >> 64) as u64);
            }
        }
        hasher.write_u32(ports);
        hasher.finish()
    }
}

impl fmt::Debug for FlowHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key stays out of logs.
        f.write_str("FlowHash")
    }
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
    fn a_hash_depends_on_secret_and_flow() {
        let (a, b) = (FlowHash::new(&SECRET), FlowHash::new(&[7; 16]));
        assert_eq!(a.hash(&flow(1)), a.clone().hash(&flow(1)));
        assert_ne!(a.hash(&flow(1)), a.hash(&flow(2)));
        assert_ne!(a.hash(&flow(1)), b.hash(&flow(1)));
    }

    #[test]
    fn every_part_of_a_flow_is_hashed() {
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
}
