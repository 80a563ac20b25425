//! ICMP errors about datagrams. As on Linux, hard errors are reported to connected sockets. With `IP_RECVERR` or
//! `IPV6_RECVERR`, a socket gets all errors in a queue.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;

use offcore_session::Segments;
use offcore_session::undelivered::{Origin, PAYLOAD, Undelivered};
use offcore_stats::time::Time;
use offcore_wire::{IpProtocol, icmpv4, icmpv6};

use super::addr::ConnId;
use super::packet::{Event, Out};
use super::quoted::Quoted;
use super::stack::Stack;

/// Maximum length of a socket's error queue. Further errors are dropped.
const MOST: usize = 64;

// `asm-generic/errno.h`
const EACCES: u16 = 13;
const EPROTO: u16 = 71;
const EMSGSIZE: u16 = 90;
const ENOPROTOOPT: u16 = 92;
const EOPNOTSUPP: u16 = 95;
const ENETUNREACH: u16 = 101;
const ECONNREFUSED: u16 = 111;
const EHOSTDOWN: u16 = 112;
const EHOSTUNREACH: u16 = 113;
const ENONET: u16 = 64;

/// An ICMP error: type, code, and MTU or pointer.
#[derive(Debug, Clone, Copy)]
pub(super) struct IcmpError {
    pub v6: bool,
    pub kind: u8,
    pub code: u8,
    pub info: u32,
}

impl IcmpError {
    /// Returns the `errno` of Linux (`icmp_err_convert`, `icmpv6_err_convert`), and whether the error is hard. Returns
    /// `None` if the message is not an error.
    fn errno(self) -> Option<(u16, bool)> {
        Some(match (self.v6, self.kind, self.code) {
            (false, icmpv4::DESTINATION_UNREACHABLE, code) => match code {
                0 | 11 => (ENETUNREACH, false),
                icmpv4::PROTOCOL_UNREACHABLE => (ENOPROTOOPT, true),
                icmpv4::PORT_UNREACHABLE => (ECONNREFUSED, true),
                icmpv4::FRAGMENTATION_NEEDED => (EMSGSIZE, true),
                5 => (EOPNOTSUPP, false),
                6 | 9 => (ENETUNREACH, true),
                7 => (EHOSTDOWN, true),
                8 => (ENONET, true),
                10 | 13..=15 => (EHOSTUNREACH, true),
                _ => (EHOSTUNREACH, false),
            },
            (false, icmpv4::TIME_EXCEEDED, _) => (EHOSTUNREACH, false),
            (false, icmpv4::PARAMETER_PROBLEM, _) => (EPROTO, true),
            (true, icmpv6::DESTINATION_UNREACHABLE, code) => match code {
                0 => (ENETUNREACH, false),
                1 | 5 | 6 => (EACCES, true),
                icmpv6::PORT_UNREACHABLE => (ECONNREFUSED, true),
                2 | 3 => (EHOSTUNREACH, false),
                _ => (EPROTO, false),
            },
            (true, icmpv6::PACKET_TOO_BIG, _) => (EMSGSIZE, true),
            (true, icmpv6::TIME_EXCEEDED, _) => (EHOSTUNREACH, false),
            (true, icmpv6::PARAMETER_PROBLEM, _) => (EPROTO, true),
            _ => return None,
        })
    }
}

impl Stack {
    /// Handles an ICMP error that `offender` has sent.
    #[cold]
    pub(super) fn datagram_failed(
        &mut self,
        error: IcmpError,
        offender: IpAddr,
        quoted: Option<Quoted<'_>>,
        out: &mut Out,
    ) {
        let Some(quoted) = quoted.filter(|quoted| quoted.protocol == IpProtocol::UDP) else { return };
        let (Some((id, to)), Some((errno, is_hard))) = (self.sender_of(&quoted), error.errno()) else {
            return;
        };
        let Some(socket) = self.udp.get_mut(id) else { return };
        // A socket that allows fragmentation ignores the path MTU.
        if errno == EMSGSIZE && socket.outbox.ignores_path_mtu() {
            return;
        }
        let hears = if error.v6 { socket.errors.v6 } else { socket.errors.v4 };
        if !hears && (socket.peer.is_none() || !is_hard) {
            return;
        }
        if hears {
            let origin = if error.v6 { Origin::Icmp6 } else { Origin::Icmp };
            let mut failure = undelivered(errno, origin, to, error.info);
            (failure.kind, failure.code, failure.offender) = (error.kind, error.code, Some(offender));
            let len = quoted.payload.len().min(PAYLOAD);
            failure.payload[..len].copy_from_slice(&quoted.payload[..len]); // copy-ok: the quoted bytes of a datagram
            failure.len = len as u8;
            self.queue_error(id, failure);
        }
        out.events.push(Event::Failed(id, errno));
    }

    /// Sets `IP_RECVERR` and `IPV6_RECVERR` of a datagram socket. As on Linux, clearing an option empties the queue.
    pub fn set_recverr(&mut self, socket: ConnId, v4: bool, v6: bool) {
        let Some(found) = self.udp.get_mut(socket).filter(|socket| !socket.closed) else { return };
        let clears = found.errors.v4 && !v4 || found.errors.v6 && !v6;
        (found.errors.v4, found.errors.v6) = (v4, v6);
        if clears {
            found.errors.queue = Default::default();
            self.tell_errors(socket);
        }
    }

    /// Adds the error of a datagram that was not sent because its packet is longer than `mtu` bytes.
    pub fn datagram_too_long_to_send(&mut self, socket: ConnId, to: SocketAddr, mtu: u32) {
        let errors = self.udp.get(socket).map(|socket| &socket.errors);
        let hears = errors.is_some_and(|errors| if to.is_ipv4() { errors.v4 } else { errors.v6 });
        if hears {
            self.queue_error(socket, undelivered(EMSGSIZE, Origin::Local, to, mtu));
        }
    }

    /// Removes and returns the oldest error of a datagram socket, and returns the `errno` of the next one.
    pub fn take_undelivered(&mut self, socket: ConnId) -> Option<(Undelivered, Option<u32>)> {
        let queue = &mut self.udp.get_mut(socket)?.errors.queue;
        let first = queue.pop_front()?;
        let next = queue.front().map(|next| next.error);
        self.tell_errors(socket);
        Some((first, next))
    }

    fn queue_error(&mut self, id: ConnId, error: Undelivered) {
        let Some(socket) = self.udp.get_mut(id) else { return };
        if socket.errors.queue.len() < MOST {
            socket.errors.queue.push_back(error);
        }
        self.tell_errors(id);
    }

    /// Publishes the number of queued errors to the application.
    fn tell_errors(&self, id: ConnId) {
        let Some(socket) = self.udp.get(id) else { return };
        if let Some(slot) = socket.memory.slot(socket.slot) {
            slot.undelivered().store(socket.errors.queue.len() as u32, Ordering::Release);
        }
    }

    /// Returns the socket that sent the quoted datagram. A forged error would have to quote both ports.
    fn sender_of(&self, quoted: &Quoted<'_>) -> Option<(ConnId, SocketAddr)> {
        let (local, peer) = (quoted.key.local(), quoted.key.remote());
        let id = self.socket_of(local, peer)?;
        self.udp.get(id).filter(|socket| socket.outbox.has_planned())?;
        Some((id, peer))
    }

    /// Stores the path MTU from an ICMP error.
    pub(super) fn datagram_too_long(&mut self, now: Time, quoted: Option<Quoted<'_>>, mtu: u16) {
        let quoted = quoted.filter(|quoted| quoted.protocol == IpProtocol::UDP);
        let Some((id, peer)) = quoted.and_then(|quoted| self.sender_of(&quoted)) else { return };
        self.net.learn_path(now, peer.ip(), mtu);
        self.tell_mtu(now, id);
    }
}

fn undelivered(error: u16, origin: Origin, to: SocketAddr, info: u32) -> Undelivered {
    let (error, payload) = (error.into(), [0; PAYLOAD]);
    Undelivered { error, origin, kind: 0, code: 0, info, offender: None, to, payload, len: 0 }
}
