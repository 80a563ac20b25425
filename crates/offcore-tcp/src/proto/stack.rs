//! A host stack. Its inputs are packet headers and the time; its outputs are verdicts, plans, packets without payload
//! and events.

mod sending;
mod timers;
mod window_shares;

use std::ptr::NonNull;

use offcore_mem::mapping::MemoryError;
use offcore_session::Place as Slot;
use offcore_stats::time::{Micros, Time};
use offcore_wire::IpProtocol;

use super::addr::{ConnId, FlowKey};
use super::arenas::{App, Arenas};
use super::config::Config;
use super::conns::{Conn, Conns};
use super::cookie::Cookies;
use super::counts::StackCounts;
use super::flows::{Entry, Flows, key_of};
use super::halves::Halves;
use super::iface::IfaceConfig;
use super::input::{Input, Outcome};
use super::ip::{self, Frame, IpHeaders};
use super::isn::Origins;
use super::listeners::Listeners;
use super::net::Net;
use super::packet::{DropReason, Drops, Event, Next, Out, Place, Placed, Plan, RxChecksum, RxSeg, Verdict};
use super::ports::Ports;
use super::receive::AckNeed;
use super::run::Run;
use super::segment::Segment;
use super::sockets::Sockets;
use super::steering::Steering;
use super::tcb::State;
use super::timewait::{MAX_ENTRIES, TimeWait};

/// A connection counts as quiet after this time without activity.
const QUIET: Micros = Micros::from_secs(1);

/// One worker's stack.
#[derive(Debug)]
pub struct Stack {
    pub(super) config: Config,
    pub(super) origins: Origins,
    pub(super) ports: Ports,
    pub(super) cookies: Cookies,
    pub(super) net: Net,
    pub(super) steering: Steering,
    pub(super) arenas: Arenas,
    pub(super) conns: Conns,
    pub(super) flows: Flows,
    pub(super) halves: Halves,
    pub(super) listeners: Listeners,
    pub(super) time_wait: TimeWait,
    pub(super) udp: Sockets,
    /// The run that the next packet of a vector may continue.
    run: Option<Run>,
    pub(super) drops: Drops,
    pub(super) counts: StackCounts,
}

impl Stack {
    /// Creates a stack without interfaces, and without applications other than its own process.
    ///
    /// # Errors
    /// Fails if there is not enough memory for the FIFOs.
    pub fn new(config: Config) -> Result<Self, MemoryError> {
        let (first, second) = config.secret.split_at(size_of::<u64>());
        let half = |half: &[u8]| half.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let seed = half(first) ^ half(second).rotate_left(1);
        Ok(Self {
            origins: Origins::new(&config.secret),
            ports: Ports::new(&config.secret, config.ports.clone()),
            cookies: Cookies::new(&config.secret),
            net: Net::new(config.neighbours, config.share, seed),
            steering: Steering::new(&config.secret, config.share),
            arenas: Arenas::new(config.memory, config.connections as usize)?,
            conns: Conns::new(),
            flows: Flows::new(&config.secret, config.connections.min(1 << 16) as usize),
            halves: Halves::new(),
            listeners: Listeners::default(),
            time_wait: TimeWait::new(MAX_ENTRIES),
            udp: Sockets::default(),
            run: None,
            drops: Drops::default(),
            counts: StackCounts::default(),
            config,
        })
    }

    /// Adds an interface and returns its number.
    pub fn add_iface(&mut self, now: Time, config: &IfaceConfig, out: &mut Out) -> u8 {
        self.net.add(now, config, out)
    }

    /// Allows the stack to send up to `longest` bytes of payload as one packet, which the port of interface `iface`
    /// segments. 0 means that the port does not segment. Returns the length that the stack uses, which is 0 if
    /// [`Config::largest_segment`] is set.
    pub fn set_segment_offload(&mut self, iface: u8, longest: u32) -> u32 {
        let Some(iface) = self.net.ifaces.get_mut(usize::from(iface)) else { return 0 };
        iface.segment_offload = if self.config.largest_segment == u16::MAX { longest } else { 0 };
        iface.segment_offload
    }

    /// Reports that the port of interface `iface` has a full queue, or accepts packets again. While it is held, its
    /// connections neither send nor acknowledge.
    #[inline]
    pub fn hold(&mut self, iface: u8, held: bool) {
        let Some(iface) = self.net.ifaces.get_mut(usize::from(iface)) else { return };
        iface.held = held;
        if !held && !iface.unacknowledged.is_empty() {
            self.conns.resume(&mut iface.unacknowledged);
        }
    }

    /// Sets the interface index that applications see (`IP_PKTINFO`): the kernel's index if the port uses an interface
    /// of the kernel. The default is `iface` + 1.
    pub fn set_index(&mut self, iface: u8, index: u32) {
        if let Some(iface) = self.net.ifaces.get_mut(usize::from(iface)) {
            iface.index = index;
        }
    }

    /// Sets the clock for timestamps of datagrams, in microseconds since 1970.
    pub fn set_unix_time(&mut self, now: Time, unix_time: u64) {
        self.udp.unix_time = unix_time.saturating_sub(now.as_micros());
    }

    /// Returns the slot that a connection shares with its application.
    pub fn slot(&self, conn: ConnId) -> Option<Slot> {
        let connection = self.conns.get(conn).map(|conn| conn.slot);
        connection.or_else(|| self.udp.get(conn).map(|socket| socket.slot))
    }

    /// Processes packets that interface `iface` has received. `out` gets one verdict per packet, in order.
    pub fn rx(&mut self, now: Time, iface: u8, packets: &mut [RxSeg<'_>], out: &mut Out) {
        for at in 0..packets.len() {
            let (before, rest) = packets.split_at_mut(at);
            let packet = &mut rest[0];
            // The run refers to the previous packet of the same vector only.
            let run = self.run.zip(before.last());
            let followed = run.and_then(|(run, before)| self.follow(now, run, before.head, packet, out));
            let verdict = followed.unwrap_or_else(|| {
                self.run = None;
                self.packet(now, iface, packet, out)
            });
            let verdict = verdict.unwrap_or_else(Verdict::Drop);
            if let Verdict::Drop(reason) = verdict {
                self.drops.count(reason);
            }
            out.verdicts.push(verdict);
        }
        self.run = None;
        self.arenas.users.mark_busy(now);
        self.settle(now, out);
    }

    /// Records time that the worker has spent on calls of applications instead of packets.
    #[inline]
    pub fn record_calls(&mut self, time: Micros) {
        self.arenas.users.record_calls(time);
    }

    /// Processes a packet on the fast path if it continues the run of the packet `before` it.
    #[inline]
    fn follow(
        &mut self,
        now: Time,
        run: Run,
        before: &[u8],
        packet: &RxSeg<'_>,
        out: &mut Out,
    ) -> Option<Result<Verdict, DropReason>> {
        let again = (packet.checksum == RxChecksum::Verified).then(|| run.read(before, packet))??;
        let Self { conns, net, arenas, config, .. } = self;
        let (id, conn) = conns.at(run.index)?;
        let arena = &mut arenas[conn.app];
        let followed = Input { now, id, net, arena, config, out }.follow(conn, &again)?;
        conn.tcb.receiver.ack.count_packet();
        Some(followed)
    }

    #[inline]
    fn packet(
        &mut self,
        now: Time,
        iface: u8,
        packet: &mut RxSeg<'_>,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let mut ip = IpHeaders::NONE;
        match ip::parse(packet.head, packet.len as usize, &mut ip) {
            Ok(Frame::Ip) => {}
            Ok(Frame::Arp) => return Ok(self.net.arp(now, iface, packet.head, out)),
            Err(reason) => {
                self.send_parameter_problem(now, iface, packet, out);
                return Err(reason);
            }
        }
        let here = self.net.ifaces.get(usize::from(iface)).ok_or(DropReason::NotForUs)?;
        let looped = self.net.loopback == Some(iface);
        let to_us = here.owns(ip.dst) || looped && self.net.owns(ip.dst);
        let to_station = ip.dst_mac == here.mac;
        let to_many = here.is_in_group(ip.dst) || ip.protocol == IpProtocol::UDP && here.is_broadcast(ip.dst);
        if !to_station && !ip.dst_mac.is_multicast() || !to_us && !to_many {
            return self.dhcp_offer(now, iface, &ip, packet, out);
        }
        // A broadcast address is not a valid source and gets no answer (RFC 1122, 3.2.1.3).
        let forged = !looped && self.net.owns(ip.src);
        if ip.src.is_multicast() || ip.src.is_loopback() || here.is_broadcast(ip.src) || forged {
            return Err(DropReason::Source);
        }
        if ip.fragment {
            let takes = to_us && to_station || here.is_in_group(ip.dst);
            return if takes { Ok(Verdict::Fragment) } else { Err(DropReason::NotForUs) };
        }
        if let RxChecksum::Unknown { rest } = packet.checksum
            && matches!(
                ip.protocol,
                IpProtocol::TCP | IpProtocol::ICMP | IpProtocol::ICMPV6 | IpProtocol::IGMP
            )
            && !ip.checksum_is_valid(packet.head, rest)
        {
            return Err(ip.wrong_checksum(packet.head));
        }
        // A link-layer broadcast to our IP address gets no answer (RFC 1122, 3.3.6).
        let to_us = to_us && to_station;
        match ip.protocol {
            IpProtocol::TCP if to_us && !ip.src.is_unspecified() => {
                let mut segment = Segment::NONE;
                segment.read(&ip, packet.head)?;
                self.segment(now, &ip, &segment, out)
            }
            IpProtocol::UDP if to_many || to_us && !ip.src.is_unspecified() => {
                self.datagram(now, iface, &ip, packet, out)
            }
            IpProtocol::ICMP if ip.dst.is_ipv4() => self.icmp(now, &ip, packet, to_us, out),
            IpProtocol::IGMP if ip.dst.is_ipv4() => self.igmp(now, iface, &ip, packet.head),
            IpProtocol::ICMPV6 if ip.dst.is_ipv6() => self.icmpv6(now, iface, &ip, packet, to_us, out),
            _ if to_us && ip.dst.is_ipv4() => {
                self.protocol_unreachable(now, &ip, packet.head, out);
                Err(DropReason::NoConnection)
            }
            _ => {
                self.send_parameter_problem(now, iface, packet, out);
                Err(DropReason::NoConnection)
            }
        }
    }

    /// Passes a segment to its connection.
    #[inline]
    fn segment(
        &mut self,
        now: Time,
        ip: &IpHeaders,
        segment: &Segment,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let key = segment.flow(ip).ok_or(DropReason::Source)?;
        match self.flows.find(&key, |entry| self.key_of(entry)) {
            Some(Entry::Conn(index)) => {
                let verdict = self.conn_segment(now, index, segment, out)?;
                let repeatable = |conn: &Conn| {
                    let at = conn.tcb.receiver.position(segment.seq);
                    conn.tcb.sender.has_window_of(at)
                };
                if verdict == Verdict::Place && self.conns.peek(index).is_some_and(repeatable) {
                    self.run = Run::after(index, ip, segment);
                }
                Ok(verdict)
            }
            Some(Entry::Half(index)) => self.half_segment(now, index, segment, out),
            Some(Entry::TimeWait(index)) => self.time_wait_segment(now, key, index, segment, out),
            None => self.stray_segment(now, key, segment, out),
        }
    }

    /// Returns the flow of an entry.
    #[inline]
    pub(super) fn key_of(&self, entry: Entry) -> Option<&FlowKey> {
        key_of(&self.conns, &self.halves, &self.time_wait, entry)
    }

    #[inline]
    pub(super) fn conn_segment(
        &mut self,
        now: Time,
        index: u32,
        segment: &Segment,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let Some((id, conn)) = self.conns.at_touched(index) else { return Err(DropReason::NoConnection) };
        if conn.tcb.state == State::SynSent {
            return self.syn_sent_segment(now, id, segment, out);
        }
        let Self { net, arenas, config, .. } = self;
        let arena = &mut arenas[conn.app];
        conn.tcb.receiver.ack.count_packet();
        let mut input = Input { now, id, net, arena, config, out };
        let (verdict, outcome) = input.segment(conn, segment)?;
        // Dropped segments do not count as a sign of life, because anyone can send them.
        conn.tcb.liveness.hear(now);
        match outcome {
            Outcome::Open => {}
            Outcome::TimeWait => self.enter_time_wait(now, id, out),
            Outcome::Over(cause) => self.over(id, cause, out),
        }
        Ok(verdict)
    }

    /// Sends due acknowledgements, sets timers, and queues connections that may have something to send.
    pub(super) fn settle(&mut self, now: Time, out: &mut Out) {
        self.conns.on_neighbours(self.net.neighbours.seen());
        while let Some(next) = self.conns.next_touched() {
            let Some((id, conn)) = next else { continue };
            if conn.tcb.state == State::Closed {
                continue;
            }
            conn.tcb.trim = Some(now + QUIET);
            let packets = conn.tcb.receiver.ack.take_packets();
            if packets > 0 {
                window_shares::charge_received(&mut self.arenas.users, id, conn, packets);
            }
            if conn.tcb.receiver.next() != conn.funded {
                let App { arena, shortage, .. } = self.arenas.app(conn.app);
                conn.fund(arena, shortage.turn());
                if conn.lacks_window() {
                    shortage.wait(id, &mut conn.waits);
                }
            }
            let tcb = &mut conn.tcb;
            if tcb.receiver.ack.need() == AckNeed::Now && tcb.is_synchronized() {
                self.net.acknowledge(now, tcb, out);
            }
            let iface = &mut self.net.ifaces[usize::from(tcb.hop.iface())];
            if iface.held && tcb.receiver.ack.need() == AckNeed::Now && tcb.is_synchronized() {
                tcb.touched = true;
                iface.unacknowledged.push(id.index);
            }
            if tcb.is_synchronized() && !std::mem::replace(&mut tcb.ready, true) {
                iface.ready.push(conn.user, id.index);
            }
            if let Some(deadline) = tcb.deadline() {
                self.conns.timers.set(id.index, deadline);
            }
        }
    }

    /// Processes completed copies. All earlier copies of the connection must be complete.
    pub fn placed(&mut self, placed: Placed, out: &mut Out) {
        let Placed { conn, pos, len, copies, commit_to } = placed;
        let Some(this) = self.conns.get_mut(conn) else { return self.datagrams_placed(placed, out) };
        let more = this.tcb.delivery.placed(copies, commit_to);
        let arena = &mut self.arenas[this.app];
        this.rx.unhold(arena, pos, len as usize);
        if more {
            this.rx.commit(arena, commit_to);
            // One event covers all data that arrived together.
            if out.events.last() != Some(&Event::Readable(conn)) {
                out.events.push(Event::Readable(conn));
            }
        }
        this.settle(conn, out);
        if this.tcb.state == State::Closed {
            self.last_placed(conn, out);
        }
    }

    /// Returns the addresses and lengths of the memory for a [`Place`](super::packet::Place).
    #[inline]
    pub fn place_pieces(&self, place: &Place) -> Option<impl Iterator<Item = (NonNull<u8>, usize)>> {
        let (fifo, memory) = match self.conns.get(place.conn) {
            Some(conn) => (&conn.rx, &conn.memory),
            None => self.udp.rx(place.conn)?,
        };
        Some(fifo.pieces_in(memory, place.pos, place.len as usize))
    }

    /// Returns the addresses and lengths of the memory of a plan.
    #[inline]
    pub fn plan_pieces(&self, plan: &Plan) -> Option<impl Iterator<Item = (NonNull<u8>, usize)>> {
        if let Some(conn) = self.conns.get(plan.conn) {
            return Some(conn.tx.pieces_in(&conn.memory, plan.pos, plan.len as usize));
        }
        let (fifo, memory) = self.udp.tx(plan.conn)?;
        Some(fifo.pieces_in(memory, plan.pos, plan.len as usize))
    }
}

impl Conn {
    /// Adds the plan for the next packet.
    #[inline(always)]
    fn plan(&mut self, conn: ConnId, next: Next, out: &mut Out) {
        let len = (next.range.end - next.range.start) as u32;
        self.planned += 1;
        self.tx.hold(next.range.start, len as usize);
        out.plans.push(Plan::new(conn, self.tcb.hop.iface(), &next));
    }
}
