//! The identifiers of a connection: its endpoints on the wire, and its index in a worker's slab.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Length of [`FlowKey::bytes`].
pub(super) const FLOW_KEY_LEN: usize = 36;

/// The endpoints of a flow, in 36 bytes. An IPv4 address is stored v4-mapped (RFC 4291, 2.5.5.2).
///
/// An IPv6 packet must not carry a v4-mapped address on the wire (RFC 4038, 4.2). Such addresses are rejected, so that
/// an IPv6 peer cannot impersonate an IPv4 peer.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlowKey {
    local: [u8; 16],
    remote: [u8; 16],
    local_port: u16,
    remote_port: u16,
}

impl FlowKey {
    /// Creates the flow between two IPv4 addresses.
    #[inline]
    pub const fn v4(local: Ipv4Addr, local_port: u16, remote: Ipv4Addr, remote_port: u16) -> Self {
        let (local, remote) = (local.to_ipv6_mapped().octets(), remote.to_ipv6_mapped().octets());
        Self { local, remote, local_port, remote_port }
    }

    /// Creates the flow between two IPv6 addresses. Returns `None` if an address is v4-mapped.
    #[inline]
    pub fn v6(local: Ipv6Addr, local_port: u16, remote: Ipv6Addr, remote_port: u16) -> Option<Self> {
        let (local, remote) = (local.octets(), remote.octets());
        let key = Self { local, remote, local_port, remote_port };
        (!is_mapped(&local) && !is_mapped(&remote)).then_some(key)
    }

    /// Creates the flow between two addresses. Returns `None` if their families differ, or if [`Self::v6`] does.
    pub fn new(local: SocketAddr, remote: SocketAddr) -> Option<Self> {
        match (local.ip(), remote.ip()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => Some(Self::v4(a, local.port(), b, remote.port())),
            (IpAddr::V6(a), IpAddr::V6(b)) => Self::v6(a, local.port(), b, remote.port()),
            _ => None,
        }
    }

    /// Returns this stack's endpoint.
    pub fn local(&self) -> SocketAddr {
        SocketAddr::new(Ipv6Addr::from(self.local).to_canonical(), self.local_port)
    }

    /// Returns the peer's endpoint.
    pub fn remote(&self) -> SocketAddr {
        SocketAddr::new(Ipv6Addr::from(self.remote).to_canonical(), self.remote_port)
    }

    /// Returns this stack's port.
    #[inline]
    pub const fn local_port(&self) -> u16 {
        self.local_port
    }

    /// Returns the peer's port.
    #[inline]
    pub const fn remote_port(&self) -> u16 {
        self.remote_port
    }

    /// Returns whether the flow is between IPv4 addresses.
    #[inline]
    pub const fn is_v4(&self) -> bool {
        is_mapped(&self.local)
    }

    /// Returns the same addresses with other ports.
    #[inline]
    pub const fn with_ports(self, local_port: u16, remote_port: u16) -> Self {
        Self { local_port, remote_port, ..self }
    }

    /// Returns the key as bytes for a hash. The bytes of different keys differ.
    #[inline]
    pub(super) fn bytes(&self) -> [u8; FLOW_KEY_LEN] {
        let mut bytes = [0; FLOW_KEY_LEN];
        bytes[..16].copy_from_slice(&self.local);
        bytes[16..32].copy_from_slice(&self.remote);
        bytes[32..34].copy_from_slice(&self.local_port.to_be_bytes());
        bytes[34..].copy_from_slice(&self.remote_port.to_be_bytes());
        bytes
    }

    /// Returns the addresses as numbers.
    #[inline]
    pub(super) const fn addresses(&self) -> [u128; 2] {
        [u128::from_le_bytes(self.local), u128::from_le_bytes(self.remote)]
    }

    /// Returns two IPv4 addresses as one number. Each address is loaded as it was stored, because a wider load of a
    /// recently created key would stall on its stores.
    #[inline]
    pub(super) fn v4_addresses(&self) -> Option<u64> {
        let (local, remote) = (self.local.last_chunk()?, self.remote.last_chunk()?);
        let both = u64::from(u32::from_le_bytes(*local)) << 32 | u64::from(u32::from_le_bytes(*remote));
        self.is_v4().then_some(both)
    }

    /// Returns both ports as one number.
    #[inline]
    pub(super) const fn ports(&self) -> u32 {
        (self.local_port as u32) << 16 | self.remote_port as u32
    }
}

impl fmt::Debug for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} <-> {}", self.local(), self.remote())
    }
}

/// Returns the wildcard address of an address's family.
pub(super) fn any_like(address: IpAddr) -> IpAddr {
    if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// Returns whether two bound addresses overlap. `None` is the wildcard of both families; 0.0.0.0 and `::` of one.
pub fn overlap(one: Option<IpAddr>, other: Option<IpAddr>) -> bool {
    let (Some(one), Some(other)) = (one, other) else { return true };
    let any = one.is_unspecified() || other.is_unspecified();
    one == other || any && one.is_ipv4() == other.is_ipv4()
}

#[inline]
const fn is_mapped(address: &[u8; 16]) -> bool {
    u128::from_be_bytes(*address) >> 32 == 0xffff
}

/// An application, which owns the memory of connections, sockets and listeners. Numbers of gone applications are
/// reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AppId(u32);

impl AppId {
    /// The stack's own process.
    pub const OWN: Self = Self(0);

    /// Returns the ID of the application at this index of the stack's list.
    #[inline]
    pub(super) const fn at(index: usize) -> Self {
        Self(index as u32)
    }

    /// Returns a small number that is unique among the current applications.
    #[inline]
    pub const fn number(self) -> u32 {
        self.0
    }
}

/// Index of a user in the stack's list of users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UserIndex(u16);

impl UserIndex {
    /// Creates an index. There are at most as many users as applications, fewer than 65,536.
    pub(super) fn at(index: usize) -> Self {
        Self(index as u16)
    }

    #[inline]
    pub(super) fn number(self) -> usize {
        self.0.into()
    }
}

/// Datagram sockets have the indices from here on; connections have lower ones.
pub(crate) const SOCKETS: u32 = 1 << 30;

/// A connection or a datagram socket of this worker: a slab index and a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnId {
    /// The slot in the slab.
    pub index: u32,
    /// The number of earlier owners of the slot. An old ID does not match a new owner.
    pub generation: u32,
}

impl ConnId {
    /// Returns a small unique number, which is the key for ordering copies.
    #[inline]
    pub(crate) fn order(self) -> u32 {
        if self.index < SOCKETS { self.index << 1 } else { (self.index - SOCKETS) << 1 | 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_and_socket_order_is_dense() {
        let ids = |first| (0..100).map(move |index| ConnId { index: first + index, generation: 1 }.order());
        let mut all: Vec<u32> = ids(0).chain(ids(SOCKETS)).collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..200));
    }

    fn socket(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn flow_key_returns_its_endpoints() {
        for (local, remote) in [("10.0.0.1:80", "10.0.0.2:4000"), ("[fd00::1]:80", "[fd00::2]:4000")] {
            let key = FlowKey::new(socket(local), socket(remote)).unwrap();
            assert_eq!((key.local(), key.remote()), (socket(local), socket(remote)));
            assert_eq!((key.local_port(), key.remote_port()), (80, 4000));
            assert_eq!(key.is_v4(), key.local().is_ipv4());
            assert_eq!(format!("{key:?}"), format!("{local} <-> {remote}"));
        }
        assert_eq!(size_of::<FlowKey>(), 36);
    }

    #[test]
    fn flow_key_rejects_mixed_families() {
        let (own, mapped) = (socket("[fd00::1]:80"), socket("[::ffff:10.0.0.2]:4000"));
        assert_eq!(FlowKey::new(own, mapped), None);
        assert_eq!(FlowKey::new(mapped, own), None);
        assert_eq!(FlowKey::new(socket("10.0.0.1:80"), own), None);
    }

    #[test]
    fn key_bytes_cover_four_tuple() {
        let key = |local, remote| FlowKey::new(socket(local), socket(remote)).unwrap().bytes();
        let base = key("10.0.0.1:80", "10.0.0.2:4000");
        assert_ne!(base, key("10.0.0.3:80", "10.0.0.2:4000"));
        assert_ne!(base, key("10.0.0.1:81", "10.0.0.2:4000"));
        assert_ne!(base, key("10.0.0.1:80", "10.0.0.3:4000"));
        assert_ne!(base, key("10.0.0.1:80", "10.0.0.2:4001"));
        assert_ne!(base, key("10.0.0.2:4000", "10.0.0.1:80"));
    }

    #[test]
    fn wildcard_overlaps_its_family() {
        let at = |text: &str| Some(text.parse().unwrap());
        let (all, four, six) = (None, at("0.0.0.0"), at("::"));
        for (one, other, expected) in [
            (all, six, true),
            (all, at("10.0.0.2"), true),
            (four, at("10.0.0.2"), true),
            (four, six, false),
            (six, at("10.0.0.2"), false),
            (at("10.0.0.2"), at("10.0.0.2"), true),
            (at("10.0.0.2"), at("10.0.0.3"), false),
        ] {
            assert_eq!((overlap(one, other), overlap(other, one)), (expected, expected), "{one:?} {other:?}");
        }
    }
}
