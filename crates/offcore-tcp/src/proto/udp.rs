//! UDP (RFC 768): sockets whose datagrams are stored in FIFOs, each behind a [`Header`].

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use offcore_session::Segments;
use offcore_session::datagram::{HEADER_LEN, Header, More, PathMtu, record_len};
use offcore_stats::time::Time;
use offcore_wire::{IpProtocol, MacAddr, Sum, UdpHeader, dhcp, udp};

use super::addr::{AppId, ConnId, FlowKey, UserIndex};
use super::arenas::App;
use super::call_error::CallError;
use super::config::Buffers;
use super::ip::{self, Envelope, IpHeaders};
use super::joined::Joined;
use super::one_peer::sends_from;
use super::packet::{
    Cause, DropReason, Event, HEAD, Out, Place, Placed, Plan, RxChecksum, RxSeg, SealedDatagram, Verdict,
};
use super::sockets::{Activity, Errors, Inbox, Outbox, Outgoing, Record, Reuse, Route, Socket};
use super::stack::Stack;
use super::steering::Share;
use super::to_many::GROUP_HOPS;
use super::users::{Budget, VISIT};

/// Maximum number of bytes of one socket in copies.
const COPYING: u64 = 256 << 10;
/// The maximum number of segments of a datagram (`UDP_MAX_SEGMENTS` of Linux).
const MOST_SEGMENTS: usize = 128;
/// Maximum number of bytes of one socket that are planned in a row.
const QUANTUM: usize = 64 << 10;

/// The result of planning a datagram or a segment of one.
enum Planned {
    /// Planned or refused. The number counts against the socket's [`QUANTUM`].
    Bytes(usize),
    /// The port is [held](Stack::hold).
    Held,
}

impl Stack {
    /// Opens a datagram socket and returns its number. It is bound to an address of this host, to a wildcard (0.0.0.0
    /// or `::`), or to both wildcards. For port 0 the stack selects an unused port. The application uses
    /// [`Datagrams`](offcore_session::Datagrams) over the socket's [`slot`](Self::slot), and calls
    /// [`written`](Self::written), [`consumed`](Self::consumed), [`want_room`](Self::want_room) and
    /// [`close`](Self::close), as with a connection. It uses the memory of `app`.
    ///
    /// # Errors
    /// [`CallError::NotOurs`], [`CallError::InUse`], [`CallError::NoPort`], [`CallError::TooMany`],
    /// [`CallError::NoApp`].
    pub fn open_datagrams(
        &mut self,
        app: AppId,
        address: Option<IpAddr>,
        port: u16,
    ) -> Result<ConnId, CallError> {
        self.open_reused_datagrams(app, address, port, Reuse::default())
    }

    /// As [`open_datagrams`](Self::open_datagrams). `reuse` allows other sockets with the same address and port.
    ///
    /// # Errors
    /// As [`open_datagrams`](Self::open_datagrams).
    pub fn open_reused_datagrams(
        &mut self,
        app: AppId,
        address: Option<IpAddr>,
        port: u16,
        reuse: Reuse,
    ) -> Result<ConnId, CallError> {
        if !self.arenas.is_open(app) {
            return Err(CallError::NoApp);
        }
        let to_many = |address: IpAddr| address.is_unspecified() || address.is_multicast();
        if !address.is_none_or(|address| to_many(address) || self.net.has(address)) {
            return Err(CallError::NotOurs);
        }
        let from = self.fragment_ident();
        let in_use = |port| self.udp.is_taken(address, port, &Reuse::default());
        let port = match port {
            0 => self.ports.any(from, in_use).ok_or(CallError::NoPort)?,
            port if self.udp.is_taken(address, port, &reuse) => return Err(CallError::InUse),
            port => port,
        };
        if !self.arenas.may_enter(app) {
            return Err(CallError::TooMany);
        }
        let App { arena, user, .. } = self.arenas.app(app);
        let slot = arena.take_slot().ok_or(CallError::TooMany)?;
        let mut socket = Box::new(Socket {
            app,
            user: *user,
            memory: Arc::clone(arena.memory()),
            address,
            port,
            reuse,
            peer: None,
            slot,
            inbox: Inbox::new(slot),
            outbox: Outbox::new(slot),
            buffers: Buffers::default(),
            activity: Activity::default(),
            errors: Errors::default(),
            joined: Joined::default(),
            ready: false,
            closed: false,
        });
        socket.release(arena, &self.config);
        self.arenas.enter(app);
        let id = self.udp.insert(socket);
        self.tell_mtu(Time::ZERO, id);
        Ok(id)
    }

    /// Stores the path MTU in the application's slot.
    pub(super) fn tell_mtu(&self, now: Time, id: ConnId) {
        let Some(socket) = self.udp.get(id) else { return };
        let mtu = match socket.peer {
            Some(peer) => self.path_mtu(now, peer.address.ip()),
            None => self.net.ifaces.iter().map(|iface| iface.mtu).max(),
        };
        if let Some(slot) = socket.memory.slot(socket.slot) {
            slot.mtu().store(mtu.unwrap_or(0).into(), Ordering::Relaxed);
        }
    }

    /// Returns the path MTU to an address.
    fn path_mtu(&self, now: Time, to: IpAddr) -> Option<u16> {
        let way = self.net.way(to)?;
        let link = self.net.ifaces.get(usize::from(way.iface))?.mtu;
        Some(self.net.paths.get(now, to).map_or(link, |path| path.min(link)))
    }

    /// Passes a datagram to its socket.
    #[inline(never)]
    pub(super) fn datagram(
        &mut self,
        now: Time,
        iface: u8,
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
            // The checksum is optional over IPv4 (RFC 768) and mandatory over IPv6 (RFC 8200, 8.1).
            _ if [c0, c1] == [0, 0] && ip.src.is_ipv4() => {}
            _ if [c0, c1] == [0, 0] => return Err(DropReason::Checksum),
            RxChecksum::Verified => {}
            RxChecksum::Unknown { rest } => {
                // The checksum does not cover bytes after the datagram.
                let ip = IpHeaders { end: ip.transport + len, ..*ip };
                if !ip.checksum_is_valid(packet.head, rest) {
                    return Err(ip.wrong_checksum(packet.head));
                }
            }
        }
        let peer = SocketAddr::new(ip.src, from);
        if to == dhcp::CLIENT_PORT && self.net.has_client(iface, ip.dst) {
            let message = packet.head.get(ip.transport + udp::HEADER_LEN..ip.transport + len);
            self.dhcp_message(now, iface, ip.src_mac, message.unwrap_or_default(), out);
            return Ok(Verdict::Consumed);
        }
        let head: &[u8] = packet.head;
        let tos = match (ip.dst, head.get(ip::ETHERNET..)) {
            (IpAddr::V4(_), Some([_, tos, ..])) => *tos,
            (IpAddr::V6(_), Some([high, low, ..])) => high << 4 | low >> 4,
            _ => 0,
        };
        let time = self.udp.unix_time + now.as_micros();
        let index = self.net.ifaces.get(usize::from(iface)).map_or(0, |iface| iface.index);
        let more = More { hops: ip.hops, tos, index, time, ..More::default() };
        let header = Header { len: (len - udp::HEADER_LEN) as u16, peer, local: ip.dst, more };
        let skip = ip.transport + udp::HEADER_LEN;
        if !self.net.has(ip.dst) {
            return self.deliver_multicast(iface, header, to, skip, out);
        }
        let Some(id) = self.socket_of(SocketAddr::new(ip.dst, to), peer) else {
            self.port_unreachable(now, ip, packet.head, out);
            return Err(DropReason::NoConnection);
        };
        self.take_datagram(id, header, skip, out)
    }

    /// Returns the socket that receives datagrams from `peer` to `local`.
    pub(super) fn socket_of(&self, local: SocketAddr, peer: SocketAddr) -> Option<ConnId> {
        let choose = |count| FlowKey::new(local, peer).map_or(0, |key| self.flows.spread(&key, count));
        self.udp.find(local.ip(), local.port(), peer, choose)
    }

    /// Submits the copy of a datagram if there is room for it. Its payload begins at `skip`.
    pub(super) fn take_datagram(
        &mut self,
        id: ConnId,
        header: Header,
        skip: usize,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let Self { udp, arenas, config, .. } = self;
        let socket = udp.get_mut(id).ok_or(DropReason::NoConnection)?;
        if !arenas.users.datagram_received(socket.user, header.len.into()) {
            socket.inbox.count_lost();
            return Err(DropReason::UserShare);
        }
        let arena = &mut arenas[socket.app];
        let most = socket.receive_buffer(config);
        let (pos, end) = socket.inbox.add(arena, header, most).ok_or(DropReason::NoSpace)?;
        let is_placing = socket.inbox.is_placing();
        udp.watch(id);
        self.counts.datagrams_received += 1;
        let len = u32::from(header.len);
        if len == 0 {
            // It becomes visible together with the datagrams that are being copied before it.
            if !is_placing {
                self.commit_datagrams(id, end, out);
            }
            return Ok(Verdict::Consumed);
        }
        out.places.push(Place { conn: id, pos, skip: skip as u32, len, commit_to: end });
        Ok(Verdict::Place)
    }

    /// Processes completed copies of datagrams. All earlier copies of the socket must be complete.
    #[cold]
    pub(super) fn datagrams_placed(&mut self, placed: Placed, out: &mut Out) {
        let Some(socket) = self.udp.get_mut(placed.conn) else { return };
        let upto = socket.inbox.placed(&mut self.arenas[socket.app], &placed);
        self.commit_datagrams(placed.conn, upto, out);
        self.free_socket_when_done(placed.conn);
    }

    /// Shows the application all datagrams before `upto`.
    fn commit_datagrams(&mut self, id: ConnId, upto: u64, out: &mut Out) {
        let Some(socket) = self.udp.get_mut(id).filter(|socket| !socket.closed) else { return };
        socket.inbox.commit(&self.arenas[socket.app], upto);
        if out.events.last() != Some(&Event::Readable(id)) {
            out.events.push(Event::Readable(id));
        }
    }

    /// Records that the application has read or written datagrams.
    #[inline(never)]
    pub(super) fn datagrams_moved(&mut self, now: Time, id: ConnId, out: &mut Out) -> Result<(), CallError> {
        let socket = self.udp.get_mut(id).filter(|socket| !socket.closed).ok_or(CallError::Gone)?;
        let arena = &mut self.arenas[socket.app];
        let (read, written) = (socket.inbox.consumed(arena), socket.outbox.written(arena));
        let (Ok(()), Ok(more)) = (read, written) else {
            self.misused(now, id, out);
            return Err(CallError::Misuse);
        };
        // Memory may have been short when the room became free.
        socket.release_asked(arena, &self.config);
        if more {
            self.udp.make_ready(id);
        }
        self.udp.watch(id);
        Ok(())
    }

    /// Records that the application waits for room.
    pub(super) fn datagrams_want_room(&mut self, id: ConnId) {
        let Some(socket) = self.udp.get_mut(id).filter(|socket| !socket.closed) else { return };
        socket.outbox.wants_room = true;
        // Possibly no datagram is in flight whose completion would check again.
        let app = self.arenas.app(socket.app);
        let end = socket.outbox.fifo().end();
        socket.release_asked(&mut app.arena, &self.config);
        if socket.outbox.is_short() || socket.outbox.fifo().end() > end {
            app.shortage.wait(id, &mut socket.outbox.waits);
        }
    }

    pub(super) fn set_datagram_buffers(&mut self, id: ConnId, buffers: Buffers) {
        let Self { udp, arenas, config, .. } = self;
        if let Some(socket) = udp.get_mut(id).filter(|socket| !socket.closed) {
            socket.set_buffers(buffers, &mut arenas[socket.app], config);
        }
    }

    /// Closes a socket. Datagrams that are already written are still sent.
    pub(super) fn close_datagrams(&mut self, now: Time, id: ConnId) {
        let Some(socket) = self.udp.get_mut(id).filter(|socket| !socket.closed) else { return };
        // A socket whose application has written an invalid position sends the rest.
        let _ = socket.outbox.written(&self.arenas[socket.app]);
        self.udp.make_ready(id);
        self.close_socket(now, id);
    }

    /// Closes a socket whose application has written invalid data.
    fn misused(&mut self, now: Time, id: ConnId, out: &mut Out) {
        let Some(socket) = self.udp.get_mut(id) else { return };
        socket.outbox.forget_unplanned();
        if !socket.closed {
            out.events.push(Event::Closed(id, Cause::Aborted));
        }
        self.close_socket(now, id);
    }

    /// Frees the port immediately, and the rest when no datagram is in flight.
    fn close_socket(&mut self, now: Time, id: ConnId) {
        let Some(socket) = self.udp.get_mut(id).filter(|socket| !socket.closed) else { return };
        socket.closed = true;
        self.leave_groups(now, id);
        self.udp.give_port(id);
        self.free_socket_when_done(id);
    }

    fn free_socket_when_done(&mut self, id: ConnId) {
        if let Some(mut socket) = self.udp.remove_done(id) {
            let arena = &mut self.arenas[socket.app];
            socket.inbox.discard(arena);
            socket.outbox.discard(arena);
            arena.give_slot(socket.slot);
            self.arenas.leave(socket.app);
        }
    }

    /// Plans datagrams of a user, for each of its sockets in turn.
    #[inline(never)]
    pub(super) fn plan_datagrams(&mut self, now: Time, user: UserIndex, budget: &mut Budget, out: &mut Out) {
        for _ in 0..self.udp.ready.count(user) {
            if budget.is_empty() {
                return;
            }
            let Some(id) = self.udp.next_ready(user) else { return };
            budget.work -= VISIT;
            let mut quantum = QUANTUM;
            let mut more = true;
            while more && !budget.is_empty() && quantum > 0 {
                let Some(planned) = self.plan_datagram(now, id, out) else {
                    more = false;
                    continue;
                };
                // On a held port, a socket uses only work: this limits the number of sockets checked per turn.
                let Planned::Bytes(bytes) = planned else {
                    budget.take_work(0, 1, 0);
                    break;
                };
                budget.packets -= 1;
                budget.take_work(bytes as u64, 1, 1);
                quantum = quantum.saturating_sub(bytes);
            }
            if more {
                self.udp.make_ready(id);
            }
            self.free_socket_when_done(id);
        }
    }

    /// Plans the next datagram or segment of a socket, or refuses it. `None` if nothing is left to plan.
    fn plan_datagram(&mut self, now: Time, id: ConnId, out: &mut Out) -> Option<Planned> {
        let socket = self.udp.get_mut(id)?;
        if !socket.outbox.may_plan(COPYING) {
            return None;
        }
        let record = match socket.outbox.take_record() {
            Some(record) => record,
            None => match self.read_record(now, id, out)? {
                Ok(record) => record,
                Err(refused) => {
                    self.counts.datagrams_refused += 1;
                    self.release_datagrams(id, out);
                    return Some(Planned::Bytes(refused));
                }
            },
        };
        let socket = self.udp.get_mut(id)?;
        if self.net.ifaces[usize::from(record.route.way.iface)].held {
            socket.outbox.keep_record(record);
            return Some(Planned::Held);
        }
        let Record { header: Header { len, more, .. }, route, planned } = record;
        let segment = if more.segment == 0 { len } else { more.segment };
        let bytes = (usize::from(len) - planned).min(segment.into());
        let headers = if route.way.source.is_ipv4() { 28 } else { 48 };
        let is_long = headers + bytes > usize::from(route.mtu);
        let payload = socket.outbox.plan(record, bytes);
        out.plans.push(Plan::datagram(id, route.way.iface, payload, bytes as u32, is_long));
        Some(Planned::Bytes(HEADER_LEN + bytes))
    }

    /// Reads the next datagram of a socket from its FIFO. The error is the length of a datagram that cannot be sent.
    fn read_record(&mut self, now: Time, id: ConnId, out: &mut Out) -> Option<Result<Record, usize>> {
        let socket = self.udp.get_mut(id)?;
        let Some(header) = socket.outbox.read(&self.arenas[socket.app]) else {
            self.misused(now, id, out);
            return None;
        };
        let (bound, is_connected) = (socket.address, socket.peer.is_some());
        let whole = record_len(header.len);
        match self.route_of_datagram(now, &header, bound) {
            Some(route) => {
                if is_connected {
                    self.tell_mtu(now, id);
                }
                Some(Ok(Record { header, route, planned: 0 }))
            }
            None => {
                self.udp.get_mut(id)?.outbox.skip(whole);
                Some(Err(whole))
            }
        }
    }

    /// Returns the route of a datagram, or `None` if it cannot be sent.
    fn route_of_datagram(&self, now: Time, header: &Header, bound: Option<IpAddr>) -> Option<Route> {
        let &Header { len, peer, local, more } = header;
        let to = peer.ip();
        let any = |address: &IpAddr| address.is_unspecified();
        let wanted = bound.filter(sends_from).or(Some(local).filter(|local| !any(local)));
        let way = self.net.multicast_route(to, wanted, more.index).or_else(|| self.net.way(to));
        let mut way = way.filter(|_| !any(&to))?;
        let iface = &self.net.ifaces[usize::from(way.iface)];
        // The length of header and payload has 16 bits; over IPv4 the length of the whole packet.
        let longest = usize::from(u16::MAX) - udp::HEADER_LEN - if to.is_ipv4() { 20 } else { 0 };
        let is_allowed = more.broadcast || !iface.is_broadcast(to);
        if peer.port() == 0 || !is_allowed || usize::from(len) > longest {
            return None;
        }
        if bound.is_some_and(|bound| bound.is_ipv4() != to.is_ipv4()) {
            return None;
        }
        if let Some(wanted) = wanted {
            // A tentative address cannot be a source (RFC 4862, 5.4).
            if !self.net.owns(wanted) || wanted.is_ipv4() != to.is_ipv4() {
                return None;
            }
            way.source = wanted;
        }
        let mtu = match more.path_mtu() {
            PathMtu::Probe => iface.mtu,
            _ => self.net.paths.get(now, to).map_or(iface.mtu, |path| path.min(iface.mtu)),
        };
        // Neither segments nor packets with Don't Fragment are fragmented.
        let whole = if more.segment == 0 { len } else { len.min(more.segment) };
        let headers = if to.is_ipv4() { 28 } else { 48 };
        let must_fit = more.segment > 0 || matches!(more.path_mtu(), PathMtu::Do | PathMtu::Probe);
        let fits = headers + usize::from(whole) <= usize::from(mtu);
        let few = more.segment == 0 || usize::from(len) <= usize::from(more.segment) * MOST_SEGMENTS;
        (few && (fits || !must_fit)).then_some(Route { way, mtu })
    }

    /// Returns the room of sent datagrams to the application.
    fn release_datagrams(&mut self, id: ConnId, out: &mut Out) {
        let Some(socket) = self.udp.get_mut(id) else { return };
        socket.release(&mut self.arenas[socket.app], &self.config);
        let told = !socket.closed && std::mem::take(&mut socket.outbox.wants_room);
        if told {
            out.events.push(Event::Writable(id));
        }
        if socket.outbox.has_unplanned() {
            self.udp.make_ready(id);
        }
    }

    /// Removes a planned datagram that is sent or given up, and returns its state.
    fn take_outgoing(&mut self, plan: &Plan, out: &mut Out) -> Option<(u16, Outgoing)> {
        let socket = self.udp.get_mut(plan.conn)?;
        let arena = &mut self.arenas[socket.app];
        let outgoing = socket.outbox.take_outgoing(arena, plan.pos, plan.len as usize)?;
        let port = socket.port;
        self.release_datagrams(plan.conn, out);
        self.free_socket_when_done(plan.conn);
        Some((port, outgoing))
    }

    /// Does the same as [`seal`](Self::seal) for a datagram. Returns `None` if its socket no longer exists.
    #[cold]
    pub fn seal_datagram(
        &mut self,
        now: Time,
        plan: &Plan,
        payload: Option<Sum>,
        to: &mut [u8; HEAD],
        out: &mut Out,
    ) -> Option<SealedDatagram> {
        let (port, Outgoing { peer, route: Route { way, mtu }, more, .. }) = self.take_outgoing(plan, out)?;
        self.counts.datagrams_sent += 1;
        let station = self.net.multicast_station(way.iface, peer.ip());
        let station = station.or_else(|| self.net.station(now, (way.iface, way.next_hop), out));
        let mut envelope = Envelope::new(way.source, peer.ip(), IpProtocol::UDP);
        envelope.src_mac = self.net.ifaces[usize::from(way.iface)].mac;
        envelope.dst_mac = station.unwrap_or(MacAddr([0; 6]));
        envelope.ident = self.fragment_ident() as u16;
        envelope.ecn = more.tos;
        if more.hops > 0 {
            envelope.hops = more.hops;
        } else if peer.ip().is_multicast() {
            envelope.hops = GROUP_HOPS;
        }
        let flow = FlowKey::new(SocketAddr::new(way.source, port), peer);
        envelope.flow_label = flow.map_or(0, |flow| self.origins.flow_label(&flow));
        let at = envelope.len();
        let len = udp::HEADER_LEN + plan.len as usize;
        let to = &mut to[HEAD - at - udp::HEADER_LEN..];
        envelope.write(to, len);
        if plan.is_long() || more.path_mtu() == PathMtu::Ignore {
            ip::allow_fragments(to);
        }
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
        let to_many = peer.ip().is_multicast() && !more.no_loop
            || self.net.ifaces[usize::from(way.iface)].is_broadcast(peer.ip());
        let loops = to_many && {
            let more = More {
                hops: envelope.hops,
                tos: more.tos,
                time: self.udp.unix_time + now.as_micros(),
                ..More::default()
            };
            let from = SocketAddr::new(way.source, port);
            let header = Header { len: plan.len as u16, peer: from, local: peer.ip(), more };
            self.find_local_receivers(&way, header, peer.port(), headers.into(), out)
        };
        Some(SealedDatagram { iface: way.iface, headers, transport: at as u8, known, loops, mtu })
    }

    /// Gives up a planned datagram because the pool has no buffer.
    #[cold]
    pub(super) fn give_up_datagram(&mut self, plan: &Plan, out: &mut Out) {
        self.take_outgoing(plan, out);
    }

    /// Returns the MAC address of the next hop to `to`. If it is unknown, it is solicited.
    pub(crate) fn station(&mut self, now: Time, to: IpAddr, out: &mut Out) -> Option<MacAddr> {
        let way = self.net.way(to)?;
        self.net.station(now, (way.iface, way.next_hop), out)
    }

    /// Returns how many solicited neighbours have answered.
    pub(crate) fn answered(&self) -> u32 {
        self.net.neighbours.answered()
    }

    /// Returns the MTU of interface `iface` in bytes.
    pub(crate) fn mtu(&self, iface: u8) -> u16 {
        self.net.ifaces.get(usize::from(iface)).map_or(0, |iface| iface.mtu)
    }

    /// Returns an unpredictable identification for a packet that will be fragmented (RFC 7739).
    pub(crate) fn fragment_ident(&mut self) -> u32 {
        let Share { worker, of } = self.steering.share;
        self.origins.ident(self.udp.next_fragmented() * u64::from(of) + u64::from(worker))
    }
}
