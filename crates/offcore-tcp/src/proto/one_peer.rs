//! Datagram sockets that are connected: they hear one peer.

use std::net::{IpAddr, SocketAddr};

use super::addr::ConnId;
use super::call_error::CallError;
use super::sockets::Peer;
use super::stack::Stack;

/// Whether datagrams of a socket that is bound to the address have it as their source. As on Linux, a group is not a source.
pub(super) fn sends_from(bound: &IpAddr) -> bool {
    !bound.is_unspecified() && !bound.is_multicast()
}

impl Stack {
    /// Our address from which packets to `to` go.
    ///
    /// # Errors
    /// [`CallError::NoRoute`]; [`CallError::Tentative`] in an interface's first second, over IPv6.
    pub fn source_to(&self, to: IpAddr) -> Result<IpAddr, CallError> {
        match self.net.way_to_many(to, None, 0).or_else(|| self.net.way(to)) {
            Some(way) => Ok(way.source),
            None if self.net.may_have_way(to) => Err(CallError::Tentative),
            None => Err(CallError::NoRoute),
        }
    }

    /// Connects a datagram socket: from now on it receives from `peer` only, and
    /// [`Event::Failed`](super::packet::Event::Failed) reports ICMP errors about datagrams to `peer`. `None` disconnects it. Data received before stays. A datagram's header can still name another destination.
    ///
    /// Returns our address from which datagrams to `peer` go, of no peer the one that the socket is bound to.
    ///
    /// # Errors
    /// [`CallError::Gone`]; [`CallError::NoRoute`] if the peer and the bound address differ in their family; the errors of
    /// [`source_to`](Self::source_to).
    pub fn connect_datagrams(
        &mut self,
        now: u64,
        socket: ConnId,
        peer: Option<SocketAddr>,
    ) -> Result<Option<IpAddr>, CallError> {
        let bound = self.udp.get(socket).filter(|socket| !socket.closed).ok_or(CallError::Gone)?.address;
        let new = match peer {
            Some(address) => {
                let to = address.ip();
                let source = match self.net.way_to_many(to, bound.filter(sends_from), 0) {
                    Some(way) => way.source,
                    None => self.source_to(to)?,
                };
                let other_family = bound.is_some_and(|bound| bound.is_ipv4() != to.is_ipv4());
                if to.is_unspecified() || other_family {
                    return Err(CallError::NoRoute);
                }
                let source = bound.filter(sends_from).unwrap_or(source);
                Some(Peer { address, source })
            }
            None => None,
        };
        self.udp.set_peer(socket, new);
        self.tell_mtu(now, socket);
        Ok(new.map_or(bound, |new| Some(new.source)))
    }
}
