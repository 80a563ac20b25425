//! UDP (RFC 768): sockets whose datagrams lie in FIFOs, each behind a [`Header`].

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use offcore_session::Fifo;
use offcore_session::datagram::{HEADER_LEN, Header, record_len};
use offcore_wire::{IpProtocol, MacAddr, Sum, UdpHeader, icmpv4, icmpv6, udp};

use super::addr::{AppId, ConnId};
use super::ahead::Ahead;
use super::calls::CallError;
use super::config::Buffers;
use super::iface::Way;
use super::ip::{self, Envelope, IpHeaders};
use super::packet::{
    Cause, DropReason, Event, HEAD, Out, Place, Plan, RxChecksum, RxSeg, SealedDatagram, Verdict,
};
use super::sockets::{Outgoing, Socket};
use super::stack::Stack;
use super::steering::Share;

/// Sockets, at most.
const MOST: usize = 1 << 16;
/// Bytes of one socket that are being copied, at most.
const COPYING: u64 = 256 << 10;
/// Bytes of one socket that are planned in a row, at most.
const QUANTUM: usize = 64 << 10;

impl Stack {
    /// Takes datagrams to `port`, at one address of ours or at all, and sends such: the socket's number. Port 0 is one that
    /// nobody has. The application's side is [`Datagrams`](offcore_session::Datagrams) over the socket's
    /// [`slot`](Self::slot); it goes on with [`written`](Self::written), [`consumed`](Self::consumed),
    /// [`want_room`](Self::want_room) and [`close`](Self::close), as with a connection. It uses the memory of `app`.
    ///
    /// # Errors
    /// [`CallError::NotOurs`], [`CallError::InUse`], [`CallError::NoPort`], [`CallError::TooMany`], [`CallError::NoApp`].
    pub fn open_datagrams(
        &mut self,
        app: AppId,
        address: Option<IpAddr>,
        port: u16,
    ) -> Result<ConnId, CallError> {
        if !self.arenas.is_open(app) {
            return Err(CallError::NoApp);
        }
        if !address.as_ref().is_none_or(|address| self.net.has(*address)) {
            return Err(CallError::NotOurs);
        }
        let from = self.fragment_ident();
        let in_use = |port| self.udp.by_address.contains_key(&(address, port));
        let port = match port {
            0 => self.ports.any(from, in_use).ok_or(CallError::NoPort)?,
            port if in_use(port) => return Err(CallError::InUse),
            port => port,
        };
        if self.udp.len() >= MOST || !self.arenas.may_enter(app) {
            return Err(CallError::TooMany);
        }
        let arena = &mut self.arenas[app];
        let slot = arena.take_slot().ok_or(CallError::TooMany)?;
        let mut socket = Box::new(Socket {
            app,
            memory: Arc::clone(arena.memory()),
            address,
            port,
            peer: None,
            slot,
            rx: Fifo::new(slot),
            tx: Fifo::new(slot),
            buffers: Buffers::default(),
            ahead: Ahead::default(),
            touched: false,
            watched: false,
            next: 0,
            consumed: 0,
            placing: 0,
            written: 0,
            planned: 0,
            in_flight: VecDeque::new(),
            wants_room: false,
            waits: false,
            ready: false,
            closed: false,
        });
        socket.release(arena, &self.config);
        self.arenas.enter(app);
        Ok(self.udp.insert(socket))
    }

    /// A datagram finds its socket.
    #[inline(never)]
    pub(super) fn datagram(
        &mut self,
        now: u64,
        ip: &IpHeaders,
        packet: &RxSeg<'_>,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let header = packet.head.get(ip.transport..).and_then(<[u8]>::first_chunk::<{ udp::HEADER_LEN }>);
        let &[s0, s1, d0, d1, l0, l1, c0, c1] = header.ok_or(DropReason::Malformed)?;
        let (from, to) = (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1]));
        let len = usize::from(u16::from_be_bytes([l0, l1]));
        if len < udp::HEADER_LEN || len > ip.transport_len() {
            return Err(DropReason::Malformed);
        }
        match packet.checksum {
            // Over IPv4 the sender need not have computed any (RFC 768); over IPv6 he must (RFC 8200, 8.1).
            _ if [c0, c1] == [0, 0] && ip.src.is_ipv4() => {}
            _ if [c0, c1] == [0, 0] => return Err(DropReason::Checksum),
            RxChecksum::Verified => {}
            // What is behind the datagram is not in its sum.
            RxChecksum::Unknown { .. } if len < ip.transport_len() => return Err(DropReason::Malformed),
            RxChecksum::Unknown { rest } if !ip.checksum_is_valid(packet.head, rest) => {
                return Err(ip.wrong_checksum(packet.head));
            }
            RxChecksum::Unknown { .. } => {}
        }
        let peer = SocketAddr::new(ip.src, from);
        let Some(id) = self.udp.find(ip.dst, to, peer) else {
            self.port_unreachable(now, ip, packet.head, out);
            return Err(DropReason::NoConnection);
        };
        let header = Header { len: (len - udp::HEADER_LEN) as u16, peer, local: ip.dst };
        self.take_datagram(id, &header, ip.transport + udp::HEADER_LEN, out)
    }

    /// Orders the copy of a datagram, whose payload begins at `skip`, when there is room for it.
    fn take_datagram(
        &mut self,
        id: ConnId,
        header: &Header,
        skip: usize,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let Self { udp, arenas, config, .. } = self;
        let socket = udp.get_mut(id).ok_or(DropReason::NoConnection)?;
        let arena = &mut arenas[socket.app];
        let (start, whole) = (socket.next, record_len(header.len));
        let end = start + whole as u64;
        let most = socket.receive_buffer(config);
        if end - socket.consumed > most || !socket.rx.cover(arena, start, whole) {
            return Err(DropReason::NoSpace);
        }
        udp.watch(id);
        let socket = udp.get_mut(id).ok_or(DropReason::NoConnection)?;
        socket.rx.put(arena, start, &header.to_bytes());
        socket.next = end;
        self.counts.datagrams_received += 1;
        let (pos, len) = (start + HEADER_LEN as u64, u32::from(header.len));
        if len == 0 {
            // It shows with what is being copied before it.
            if socket.placing == 0 {
                self.commit_datagrams(id, end, out);
            }
            return Ok(Verdict::Consumed);
        }
        socket.rx.hold(pos, len as usize);
        socket.placing += 1;
        out.places.push(Place { conn: id, pos, skip: skip as u32, len, commit_to: end });
        Ok(Verdict::Place)
    }

    /// The copy of a datagram, and of all before it, is done.
    #[cold]
    pub(super) fn datagram_placed(&mut self, id: ConnId, pos: u64, len: u32, end: u64, out: &mut Out) {
        let Some(socket) = self.udp.get_mut(id) else { return };
        socket.placing -= 1;
        socket.rx.unhold(&mut self.arenas[socket.app], pos, len as usize);
        let upto = if socket.placing == 0 { socket.next } else { end };
        self.commit_datagrams(id, upto, out);
        self.free_socket_when_done(id);
    }

    /// Shows the application what lies before `upto`.
    fn commit_datagrams(&mut self, id: ConnId, upto: u64, out: &mut Out) {
        let Some(socket) = self.udp.get_mut(id).filter(|socket| !socket.closed) else { return };
        socket.rx.commit(&self.arenas[socket.app], upto);
        if out.events.last() != Some(&Event::Readable(id)) {
            out.events.push(Event::Readable(id));
        }
    }

    /// The application has read datagrams, or written some.
    #[inline(never)]
    pub(super) fn datagrams_moved(&mut self, id: ConnId, out: &mut Out) -> Result<(), CallError> {
        let socket = self.udp.get_mut(id).filter(|socket| !socket.closed).ok_or(CallError::Gone)?;
        let arena = &mut self.arenas[socket.app];
        let (read, written) = (socket.rx.consumed(arena), socket.tx.written(arena));
        let (Ok(read), Ok(written)) = (read, written) else {
            self.misused(id, out);
            return Err(CallError::Misuse);
        };
        socket.consumed = read;
        if read == socket.next && socket.placing == 0 {
            socket.rx.shrink(arena);
        }
        // There may have been no memory when there was room.
        socket.release_asked(arena, &self.config);
        if written > socket.written {
            socket.written = written;
            self.udp.make_ready(id);
        }
        self.udp.watch(id);
        Ok(())
    }

    /// The application waits for room.
    pub(super) fn datagrams_want_room(&mut self, id: ConnId) {
        let Some(socket) = self.udp.get_mut(id).filter(|socket| !socket.closed) else { return };
        socket.wants_room = true;
        // No datagram may be under way whose end would look again.
        let app = self.arenas.app(socket.app);
        let end = socket.tx.end();
        socket.release_asked(&mut app.arena, &self.config);
        if socket.is_short() || socket.tx.end() > end {
            app.shortage.wait(id, &mut socket.waits);
        }
    }

    /// The application has set the sizes of a socket's buffers.
    pub(super) fn set_datagram_buffers(&mut self, id: ConnId, buffers: Buffers) {
        let Self { udp, arenas, config, .. } = self;
        if let Some(socket) = udp.get_mut(id).filter(|socket| !socket.closed) {
            socket.set_buffers(buffers, &mut arenas[socket.app], config);
        }
    }

    /// The application lets go of a socket: what it has written is sent.
    pub(super) fn close_datagrams(&mut self, id: ConnId) {
        let Some(socket) = self.udp.get_mut(id).filter(|socket| !socket.closed) else { return };
        if let Ok(written) = socket.tx.written(&self.arenas[socket.app]) {
            socket.written = written;
        }
        self.udp.make_ready(id);
        self.close_socket(id);
    }

    /// What the application has written means nothing: the socket is over.
    fn misused(&mut self, id: ConnId, out: &mut Out) {
        let Some(socket) = self.udp.get_mut(id) else { return };
        socket.written = socket.planned;
        if !socket.closed {
            out.events.push(Event::Closed(id, Cause::Aborted));
        }
        self.close_socket(id);
    }

    /// Its port is free again; the rest when nothing of it is under way.
    fn close_socket(&mut self, id: ConnId) {
        let Some(socket) = self.udp.get_mut(id).filter(|socket| !socket.closed) else { return };
        socket.closed = true;
        let address = (socket.address, socket.port);
        self.udp.by_address.remove(&address);
        self.free_socket_when_done(id);
    }

    fn free_socket_when_done(&mut self, id: ConnId) {
        if let Some(mut socket) = self.udp.remove_done(id) {
            let arena = &mut self.arenas[socket.app];
            socket.rx.discard(arena);
            socket.tx.discard(arena);
            arena.give_slot(socket.slot);
            self.arenas.leave(socket.app);
        }
    }

    /// Plans datagrams to be sent, `budget` at most: each socket in its turn.
    #[inline(never)]
    pub(super) fn plan_datagrams(&mut self, mut budget: usize, out: &mut Out) {
        for _ in 0..self.udp.ready() {
            if budget == 0 {
                return;
            }
            let Some(id) = self.udp.next_ready() else { return };
            let mut quantum = QUANTUM;
            let mut more = true;
            while more && budget > 0 && quantum > 0 {
                let Some(bytes) = self.plan_datagram(id, out) else {
                    more = false;
                    continue;
                };
                budget -= 1;
                quantum = quantum.saturating_sub(bytes);
            }
            if more {
                self.udp.make_ready(id);
            }
            self.free_socket_when_done(id);
        }
    }

    /// Plans the next datagram of a socket, or finds that it cannot be sent: how many bytes it has; none when there is no
    /// more now.
    fn plan_datagram(&mut self, id: ConnId, out: &mut Out) -> Option<usize> {
        let socket = self.udp.get_mut(id)?;
        let (start, left) = (socket.planned, socket.written - socket.planned);
        if left == 0 || start - socket.tx.released() >= COPYING {
            return None;
        }
        let mut bytes = [0; HEADER_LEN];
        let header = (left >= HEADER_LEN as u64).then(|| {
            socket.tx.get(&self.arenas[socket.app], start, &mut bytes);
            Header::from_bytes(&bytes)
        });
        let header = header.flatten().filter(|header| record_len(header.len) as u64 <= left);
        let Some(header) = header else {
            self.misused(id, out);
            return None;
        };
        socket.planned = start + record_len(header.len) as u64;
        let bound = socket.address;
        let Some(way) = self.way_of_datagram(&header, bound) else {
            self.counts.datagrams_refused += 1;
            self.release_datagrams(id, out);
            return Some(record_len(header.len));
        };
        let mtu = usize::from(self.net.ifaces[usize::from(way.iface)].mtu);
        let headers = if way.source.is_ipv4() { 28 } else { 48 };
        let (payload, len) = (start + HEADER_LEN as u64, usize::from(header.len));
        let socket = self.udp.get_mut(id)?;
        socket.tx.hold(payload, len);
        out.plans.push(Plan::datagram(id, way.iface, payload, len as u32, headers + len > mtu));
        socket.in_flight.push_back(Outgoing { start, payload, peer: header.peer, way });
        Some(record_len(header.len))
    }

    /// How a datagram goes; none when it cannot.
    fn way_of_datagram(&self, header: &Header, bound: Option<IpAddr>) -> Option<Way> {
        let &Header { len, peer, local } = header;
        let to = peer.ip();
        let mut way = self.net.way(to)?;
        let broadcast = self.net.ifaces[usize::from(way.iface)].is_broadcast(to);
        // The length of header and payload has 16 bits, and of IPv4 that of the packet.
        let longest = usize::from(u16::MAX) - udp::HEADER_LEN - if to.is_ipv4() { 20 } else { 0 };
        if peer.port() == 0
            || to.is_multicast()
            || to.is_unspecified()
            || broadcast
            || usize::from(len) > longest
        {
            return None;
        }
        let wanted = bound.or((!local.is_unspecified()).then_some(local));
        if let Some(wanted) = wanted {
            if !self.net.has(wanted) || wanted.is_ipv4() != to.is_ipv4() {
                return None;
            }
            way.source = wanted;
        }
        Some(way)
    }

    /// The application has the room of what has been sent.
    fn release_datagrams(&mut self, id: ConnId, out: &mut Out) {
        let Some(socket) = self.udp.get_mut(id) else { return };
        socket.release(&mut self.arenas[socket.app], &self.config);
        let told = !socket.closed && std::mem::take(&mut socket.wants_room);
        if told {
            out.events.push(Event::Writable(id));
        }
        if socket.planned < socket.written {
            self.udp.make_ready(id);
        }
    }

    /// A planned datagram is sent, or given up: what is known of it.
    fn take_outgoing(&mut self, plan: &Plan, out: &mut Out) -> Option<(u16, Outgoing)> {
        let socket = self.udp.get_mut(plan.conn)?;
        socket.tx.unhold(&mut self.arenas[socket.app], plan.pos, plan.len as usize);
        let at = socket.in_flight.iter().position(|outgoing| outgoing.payload == plan.pos)?;
        let outgoing = socket.in_flight.remove(at)?;
        let port = socket.port;
        self.release_datagrams(plan.conn, out);
        self.free_socket_when_done(plan.conn);
        Some((port, outgoing))
    }

    /// The same as [`seal`](Self::seal) for a datagram; none when its socket is gone.
    #[cold]
    pub fn seal_datagram(
        &mut self,
        now: u64,
        plan: &Plan,
        payload: Option<Sum>,
        to: &mut [u8; HEAD],
        out: &mut Out,
    ) -> Option<SealedDatagram> {
        let (port, Outgoing { peer, way, .. }) = self.take_outgoing(plan, out)?;
        self.counts.datagrams_sent += 1;
        let station = self.net.station(now, (way.iface, way.next_hop), out);
        let mut envelope = Envelope::new(way.source, peer.ip(), IpProtocol::UDP);
        envelope.src_mac = self.net.ifaces[usize::from(way.iface)].mac;
        envelope.dst_mac = station.unwrap_or(MacAddr([0; 6]));
        envelope.ident = self.fragment_ident() as u16;
        let at = envelope.len();
        let len = udp::HEADER_LEN + plan.len as usize;
        let to = &mut to[HEAD - at - udp::HEADER_LEN..];
        envelope.write(to, len);
        ip::allow_fragments(to);
        let mut transport = [0; udp::HEADER_LEN];
        UdpHeader { src_port: port, dst_port: peer.port(), len: len as u16 }.write(&mut transport);
        let pseudo = ip::pseudo(envelope.src, envelope.dst, IpProtocol::UDP, len);
        let checksum = match payload {
            Some(payload) => (pseudo + Sum::of(&transport) + payload).checksum_nonzero(),
            None => pseudo.value(),
        };
        let place = usize::from(udp::CHECKSUM_OFFSET);
        transport[place..].copy_from_slice(&checksum.to_be_bytes());
        to[at..].copy_from_slice(&transport);
        let (headers, known) = ((at + udp::HEADER_LEN) as u8, station.is_some());
        Some(SealedDatagram { iface: way.iface, headers, transport: at as u8, known })
    }

    /// A planned datagram is not made: there is no buffer for it.
    #[cold]
    pub(super) fn give_up_datagram(&mut self, plan: &Plan, out: &mut Out) {
        self.take_outgoing(plan, out);
    }

    /// The station of whom a packet to `to` goes to first; it is asked for when it is not known.
    pub(crate) fn station(&mut self, now: u64, to: IpAddr, out: &mut Out) -> Option<MacAddr> {
        let way = self.net.way(to)?;
        self.net.station(now, (way.iface, way.next_hop), out)
    }

    /// How many neighbours have become known that were asked for.
    pub(crate) fn answered(&self) -> u32 {
        self.net.neighbours.answered()
    }

    /// Bytes of an IP packet, at most, by interface `iface`.
    pub(crate) fn mtu(&self, iface: u8) -> u16 {
        self.net.ifaces.get(usize::from(iface)).map_or(0, |iface| iface.mtu)
    }

    /// A name for a packet that is fragmented, which others cannot guess (RFC 7739).
    pub(crate) fn fragment_ident(&mut self) -> u32 {
        let Share { worker, of } = self.steering.share;
        self.origins.ident(self.udp.next_fragmented() * u64::from(of) + u64::from(worker))
    }

    /// Says that nobody takes datagrams to a port (RFC 1122, 4.1.3.1; RFC 4443, 3.1).
    #[cold]
    fn port_unreachable(&mut self, now: u64, ip: &IpHeaders, head: &[u8], out: &mut Out) {
        let Self { udp, origins, .. } = self;
        if !udp.may_complain(now, || origins.ident(u64::MAX - now / 1_000_000)) {
            return;
        }
        let Some(way) = self.net.way(ip.src) else { return };
        let (src, dst) = (ip.dst, ip.src);
        let protocol = if src.is_ipv4() { IpProtocol::ICMP } else { IpProtocol::ICMPV6 };
        let quoted = &head[ip::ETHERNET..ip.end.min(head.len())];
        self.net.send(now, way, Envelope::new(src, dst, protocol), out, |bytes, envelope| {
            let at = envelope.len();
            let to = &mut bytes[at..];
            let len = match (src, dst) {
                (IpAddr::V6(src), IpAddr::V6(dst)) => {
                    let (kind, code) = (icmpv6::DESTINATION_UNREACHABLE, icmpv6::PORT_UNREACHABLE);
                    icmpv6::write_error(to, kind, code, 0, quoted, src, dst)
                }
                _ => {
                    let (kind, code) = (icmpv4::DESTINATION_UNREACHABLE, icmpv4::PORT_UNREACHABLE);
                    icmpv4::write_error(to, kind, code, 0, quoted)
                }
            };
            envelope.write(bytes, len);
            at + len
        });
    }
}
