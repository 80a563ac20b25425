//! Who a connection is between.

use std::net::{IpAddr, Ipv6Addr};

/// The ends of a connection. IPv4 addresses are mapped into IPv6's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlowKey {
    local: [u8; 16],
    remote: [u8; 16],
    pub local_port: u16,
    pub remote_port: u16,
}

impl FlowKey {
    /// Of both ends' addresses and ports.
    pub fn new(local: IpAddr, local_port: u16, remote: IpAddr, remote_port: u16) -> Self {
        Self { local: mapped(local), remote: mapped(remote), local_port, remote_port }
    }

    /// All of it, for hashes.
    #[inline]
    pub(super) fn bytes(&self) -> [u8; 36] {
        let mut bytes = [0; 36];
        bytes[..16].copy_from_slice(&self.local);
        bytes[16..32].copy_from_slice(&self.remote);
        bytes[32..34].copy_from_slice(&self.local_port.to_ne_bytes());
        bytes[34..].copy_from_slice(&self.remote_port.to_ne_bytes());
        bytes
    }

    /// Our address.
    pub fn local(&self) -> IpAddr {
        Ipv6Addr::from(self.local).to_canonical()
    }

    /// The peer's address.
    pub fn remote(&self) -> IpAddr {
        Ipv6Addr::from(self.remote).to_canonical()
    }
}

fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// A connection's name: its slot, and which of those that have had the slot it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnId {
    pub index: u32,
    pub generation: u32,
}
