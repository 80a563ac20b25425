//! Joined groups of a datagram socket, and datagrams for several sockets.

use std::collections::HashMap;
use std::net::IpAddr;

use offcore_session::datagram::Header;

/// The groups of a socket.
#[derive(Debug)]
pub(super) struct Joined {
    /// Interfaces and groups.
    pub groups: Vec<(u8, IpAddr)>,
    /// `IP_MULTICAST_ALL` and `IPV6_MULTICAST_ALL`: the socket also receives groups that only other sockets have
    /// joined.
    pub all: [bool; 2],
}

impl Default for Joined {
    fn default() -> Self {
        Self { groups: Vec::new(), all: [true; 2] }
    }
}

impl Joined {
    /// Returns whether the socket receives a datagram to a group. As on Linux, a socket that has joined an IPv6 group
    /// receives it from every interface.
    pub(super) fn takes(&self, iface: u8, to: IpAddr) -> bool {
        let joined = |(by, group): &(u8, IpAddr)| *group == to && (*by == iface || to.is_ipv6());
        !to.is_multicast() || self.all[usize::from(to.is_ipv6())] || self.groups.iter().any(joined)
    }
}

/// A datagram for several sockets.
#[derive(Debug, Clone, Copy)]
pub struct MulticastDatagram {
    pub header: Header,
    /// Offset of the payload in the packet.
    pub skip: u32,
    /// The number of its sockets in `Out::receivers`.
    pub count: u32,
}

/// The number of joins of each user.
pub(super) type UserJoins = HashMap<u32, u32>;
