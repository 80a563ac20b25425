//! Connected datagram sockets, which receive from one peer.

use std::net::{IpAddr, SocketAddr};

use offcore_stats::time::Time;

use super::addr::ConnId;
use super::call_error::CallError;
use super::sockets::Peer;
use super::stack::Stack;

/// Returns whether a socket's bound address is the source of its datagrams. As on Linux, a group is not a source.
pub(super) fn sends_from(bound: &IpAddr) -> bool {
    !bound.is_unspecified() && !bound.is_multicast()
}

impl Stack {
    /// Returns the source address of packets to `to`.
    ///
    /// # Errors
    /// [`CallError::NoRoute`]; over IPv6 [`CallError::Tentative`] in an interface's first second.
    pub fn source_to(&self, to: IpAddr) -> Result<IpAddr, CallError> {
        match self.net.multicast_route(to, None, 0).or_else(|| self.net.way(to)) {
            Some(way) => Ok(way.source),
            None if self.net.may_have_route(to) => Err(CallError::Tentative),
            None => Err(CallError::NoRoute),
        }
    }

    /// Connects a datagram socket: from now on it receives from `peer` only, and
    /// [`Event::Failed`](super::packet::Event::Failed) reports ICMP errors about datagrams to `peer`. `None`
    /// disconnects it. Data received before stays. A datagram's header can still name another destination.
    ///
    /// Returns the source address of datagrams to `peer`, or without a peer the address to which the socket is bound.
    ///
    /// # Errors
    /// [`CallError::Gone`]; [`CallError::NoRoute`] if the families of the peer and the bound address differ; the errors
    /// of [`source_to`](Self::source_to).
    pub fn connect_datagrams(
        &mut self,
        now: Time,
        socket: ConnId,
        peer: Option<SocketAddr>,
    ) -> Result<Option<IpAddr>, CallError> {
        let bound = self.udp.get(socket).filter(|socket| !socket.closed).ok_or(CallError::Gone)?.address;
        let new = match peer {
            Some(address) => {
                let to = address.ip();
                let source = match self.net.multicast_route(to, bound.filter(sends_from), 0) {
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
