//! Datagram sockets that are connected: they hear one peer, and of errors that what they sent to it has met.

use std::net::{IpAddr, SocketAddr};

use offcore_session::datagram::PathMtu;
use offcore_wire::{IpProtocol, icmpv4, icmpv6};

use super::addr::ConnId;
use super::call_error::CallError;
use super::packet::{Cause, Event, Out};
use super::quoted::Quoted;
use super::sockets::{Peer, Socket};
use super::stack::Stack;

impl Stack {
    /// Our address from which packets to `to` go.
    ///
    /// # Errors
    /// [`CallError::NoRoute`]; [`CallError::Tentative`] in an interface's first second, over IPv6.
    pub fn source_to(&self, to: IpAddr) -> Result<IpAddr, CallError> {
        match self.net.way(to) {
            Some(way) => Ok(way.source),
            None if self.net.may_have_way(to) => Err(CallError::Tentative),
            None => Err(CallError::NoRoute),
        }
    }

    /// Connects a datagram socket: from now on it receives from `peer` only, and [`Event::Failed`] tells of errors by which
    /// what it sends to `peer` is not delivered. `None` undoes it. What it has received before stays. It still sends to
    /// whomever a datagram's header names.
    ///
    /// Returns our address from which datagrams to `peer` go, of no peer the one that the socket is bound to.
    ///
    /// # Errors
    /// [`CallError::Gone`]; those of [`source_to`](Self::source_to), with [`CallError::NoRoute`] also for broadcast
    /// addresses, and for a peer of another family than the socket's bound address.
    pub fn connect_datagrams(
        &mut self,
        socket: ConnId,
        peer: Option<SocketAddr>,
    ) -> Result<Option<IpAddr>, CallError> {
        let bound = self.udp.get(socket).filter(|socket| !socket.closed).ok_or(CallError::Gone)?.address;
        let new = match peer {
            Some(address) => {
                let to = address.ip();
                let source = match self.net.way_to_many(to, bound.filter(|bound| !bound.is_unspecified())) {
                    Some(way) => way.source,
                    None => self.source_to(to)?,
                };
                let is_broadcast = self.net.ifaces.iter().any(|iface| iface.is_broadcast(to));
                let other_family = bound.is_some_and(|bound| bound.is_ipv4() != to.is_ipv4());
                if to.is_unspecified() || is_broadcast || other_family {
                    return Err(CallError::NoRoute);
                }
                let source = bound.filter(|bound| !bound.is_unspecified()).unwrap_or(source);
                Some(Peer { address, source })
            }
            None => None,
        };
        self.udp.set_peer(socket, new);
        self.tell_mtu(0, socket);
        Ok(new.map_or(bound, |new| Some(new.source)))
    }

    /// A datagram of ours was not delivered: why, when that does not mend itself (RFC 1122, 4.1.3.3; as Linux).
    pub(super) fn lost_v4(code: u8) -> Option<Cause> {
        match code {
            icmpv4::PORT_UNREACHABLE => Some(Cause::Refused),
            // A protocol, unknown or isolated networks and hosts, and what is forbidden.
            icmpv4::PROTOCOL_UNREACHABLE | 6..=10 | 13..=15 => Some(Cause::Unreachable),
            _ => None,
        }
    }

    /// The same of IPv6 (RFC 4443, 3.1).
    pub(super) fn lost_v6(code: u8) -> Option<Cause> {
        match code {
            icmpv6::PORT_UNREACHABLE => Some(Cause::Refused),
            // What is forbidden, by an address or a route.
            1 | 5 | 6 => Some(Cause::Unreachable),
            _ => None,
        }
    }

    /// The socket that sent the quoted datagram. A forged error must quote both ports.
    fn sender_of(&self, quoted: Option<Quoted>) -> Option<(ConnId, SocketAddr)> {
        let quoted = quoted.filter(|quoted| quoted.protocol == IpProtocol::UDP)?;
        let (local, peer) = (quoted.key.local(), quoted.key.remote());
        let id = self.socket_of(local, peer)?;
        self.udp.get(id).filter(|socket| socket.planned > 0)?;
        Some((id, peer))
    }

    /// Reports a lost datagram to the connected socket that sent it.
    pub(super) fn datagram_lost(&mut self, quoted: Option<Quoted>, cause: Option<Cause>, out: &mut Out) {
        let (Some((id, _)), Some(cause)) = (self.sender_of(quoted), cause) else { return };
        if self.udp.get(id).is_some_and(|socket| socket.peer.is_some()) {
            out.events.push(Event::Failed(id, cause));
        }
    }

    /// Stores the path MTU of an ICMP error. A connected socket gets the error too, as on Linux, unless it allows
    /// fragments.
    pub(super) fn datagram_too_long(&mut self, now: u64, quoted: Option<Quoted>, mtu: u16, out: &mut Out) {
        let Some((id, peer)) = self.sender_of(quoted) else { return };
        self.net.learn_path(now, peer.ip(), mtu);
        self.tell_mtu(now, id);
        let hears = |socket: &Socket| socket.peer.is_some() && socket.path_mtu != PathMtu::Ignore;
        if self.udp.get(id).is_some_and(hears) {
            out.events.push(Event::Failed(id, Cause::TooLong));
        }
    }
}
