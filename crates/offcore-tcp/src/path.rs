//! The stack among packets: its copies are two copy queues, one from tx_fifos to packets and one from packets to rx_fifos.
//!
//! A packet that is received is held until its payload is in the FIFO; a packet that is sent gets its headers when its
//! payload is there. Neither is visible before its copies, and all before them, are done.

#[allow(unsafe_code, reason = "copies are ordered here")]
mod copies;
mod fragments;
mod links;
mod loopback;
mod many;
mod queue;

use std::collections::VecDeque;
use std::mem;
use std::time::Duration;

use arrayvec::ArrayVec;
use offcore_dma::mover::MoverError;
use offcore_dma::{Binding, Context, CopyQueue, Mover};
use offcore_mem::{BURST, Burst, HEADROOM, Packet, Pool, PoolCache};
use offcore_ring::prefetch;
use offcore_stats::{Stage, tsc};
use offcore_wire::virtio_net::{
    self, NetHeader, Offloads, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6,
};
use offcore_wire::{EtherType, EthernetFrame, Sum, TcpFlags, TcpSegment, tcp, udp};

use copies::submit;
use fragments::Fragments;
use links::Links;

pub use links::PathStats;
pub use queue::SendQueue;

use crate::proto::{
    Event, HEAD, Out, Owner, Place, Placed, Plan, RxChecksum, RxSeg, Sealed, Stack, Verdict, sum_end,
};

/// Packets in flight in each of the copy queues, at most, and what part of the pool they may hold: one buffer in this many.
/// What an engine holds up leaves buffers for everybody else.
const IN_FLIGHT: usize = 1024;
const SHARE: usize = 4;
/// The largest part of the pool that one turn plans to send.
const AT_ONCE_SHARE: usize = 8;
/// What part of the pool packets may hold that wait to be handed to another worker.
const ELSEWHERE_SHARE: usize = 16;
/// Bytes of payload, at most, that are sent as one packet for the port to segment: the length of an IP packet has 16 bits.
const LONGEST: usize = 65_000;
/// What part of the pool such a packet may be.
const LONGEST_SHARE: usize = 64;
/// How long a copy may take: well below what makes a peer retransmit.
const LOST_AFTER: Duration = Duration::from_millis(50);

/// A packet whose payload is on its way to an rx_fifo. It holds the packet; the stack holds the FIFO's blocks.
#[derive(Debug)]
struct Placing {
    packet: Packet,
    place: Place,
}

/// A packet whose payload is on its way from a tx_fifo. The same.
#[derive(Debug)]
struct Sending {
    packet: Packet,
    plan: Plan,
}

/// Adds a completed copy to `done`. If it does not follow, the stack is told of those before it.
#[inline(always)]
fn report(done: &mut Option<Placed>, place: &Place, stack: &mut Stack, out: &mut Out) {
    if done.as_mut().is_some_and(|done| done.join(place)) {
        return;
    }
    if let Some(done) = done.replace(Placed::from(place)) {
        stack.placed(done, out);
    }
}

impl Sending {
    /// The packet has its payload: it gets its headers and goes.
    #[inline]
    fn finish(self, stack: &mut Stack, out: &mut Out, links: &mut Links, cache: &mut PoolCache, now: u64) {
        let Self { mut packet, plan } = self;
        if plan.is_datagram() {
            return finish_datagram((packet, &plan), stack, out, links, cache, now);
        }
        let by_port = links.get(plan.iface()).checksums;
        let payload = (!by_port).then(|| sum_of(&packet, cache.pool()));
        let headroom = packet.headroom_mut(HEAD).first_chunk_mut().expect("as many bytes as were asked for");
        let sealed = stack.seal(now, &plan, payload, headroom, out);
        let Sealed::Send { iface, headers: len, transport, segment } = sealed else {
            return cache.free(packet);
        };
        let len = usize::from(len);
        packet.push(len);
        if by_port {
            let mut header = open_checksum(transport, tcp::CHECKSUM_OFFSET);
            if segment > 0 {
                ask_for_segments(&mut header, segment, len, &packet);
            }
            leave_checksum(&mut packet, &header);
        }
        // The queue had room when this was planned.
        links.get(iface).queue.push_back(packet);
    }
}

/// The same of a datagram. What is done for a segment is not to be made longer by it.
#[cold]
fn finish_datagram(
    (mut packet, plan): (Packet, &Plan),
    stack: &mut Stack,
    out: &mut Out,
    links: &mut Links,
    cache: &mut PoolCache,
    now: u64,
) {
    // Fragments have no checksum of their own.
    let by_port = links.get(plan.iface()).checksums && !plan.is_long();
    let payload = (!by_port).then(|| sum_of(&packet, cache.pool()));
    let headroom = packet.headroom_mut(HEAD).first_chunk_mut().expect("as many bytes as were asked for");
    let Some(sealed) = stack.seal_datagram(now, plan, payload, headroom, out) else {
        return cache.free(packet);
    };
    packet.push(sealed.headers.into());
    if sealed.loops {
        match many::copy_of(&packet, cache) {
            Some(copy) => links.own_copies.push(copy),
            None => out.drop_copies(),
        }
    }
    if by_port {
        leave_checksum(&mut packet, &open_checksum(sealed.transport, udp::CHECKSUM_OFFSET));
    }
    links.send_datagram(now, stack, packet, &sealed, cache);
}

/// A stack and its copies.
#[derive(Debug)]
pub struct Path {
    /// The protocols.
    pub stack: Stack,
    out: Out,
    /// Whose buffers the packets are.
    pool: &'static Pool,
    /// Buffers of it that are this worker's part.
    part: usize,
    rx: CopyQueue<Option<Placing>>,
    tx: CopyQueue<Option<Sending>>,
    /// What the copy queues have had no room for.
    to_place: VecDeque<Placing>,
    to_fill: VecDeque<Sending>,
    /// Packets that were complete as soon as they were submitted; empty between calls.
    placed: Vec<Placing>,
    filled: Vec<Sending>,
    /// Buffers of all these packets, and of those whose copies are in flight.
    placing: usize,
    filling: usize,
    fragments: Fragments,
    /// What parts were put together to; empty between calls.
    whole: Vec<Packet>,
    /// Those of them that are another worker's, the interface that they came by, and their buffers.
    elsewhere: Vec<(u8, Packet)>,
    elsewhere_held: usize,
    links: Links,
}

impl Path {
    /// `out` is what the stack has asked for so far; packets are `pool`'s. The core copies until the path is
    /// [bound](Self::bind).
    pub fn new(stack: Stack, out: Out, mover: &mut Mover, pool: &'static Pool) -> Self {
        let (mut rx, mut tx) = (CopyQueue::open(mover, IN_FLIGHT), CopyQueue::open(mover, IN_FLIGHT));
        rx.set_lost_after(mover, tsc::ticks(LOST_AFTER));
        tx.set_lost_after(mover, tsc::ticks(LOST_AFTER));
        let part = pool.chunks().div_ceil(stack.share().of as usize);
        Self {
            stack,
            out,
            pool,
            rx,
            tx,
            to_place: VecDeque::new(),
            to_fill: VecDeque::new(),
            placed: Vec::new(),
            filled: Vec::new(),
            placing: 0,
            filling: 0,
            fragments: Fragments::new(part),
            whole: Vec::new(),
            elsewhere: Vec::new(),
            elsewhere_held: 0,
            links: Links::new(pool, part),
            part,
        }
    }

    /// Says who copies what is received, and what is sent.
    ///
    /// # Errors
    /// Channels that are not this mover's, or too many.
    pub fn bind(&mut self, mover: &mut Mover, rx: &Binding, tx: &Binding) -> Result<(), MoverError> {
        self.rx.bind(mover, rx)?;
        self.tx.bind(mover, tx)
    }

    /// Says which offloads the port of interface `iface` has, and whether it takes packets of several buffers.
    pub fn set_link(&mut self, iface: u8, offloads: Offloads, chains: bool) {
        let pool = self.pool;
        let Offloads { checksum, tso4, tso6, .. } = offloads;
        let buffers = if chains { (self.part / LONGEST_SHARE).max(1) } else { 1 };
        let longest = match checksum && tso4 && tso6 {
            true => LONGEST.min(buffers * pool.data_room()),
            false => 0,
        };
        let link = self.links.get(iface);
        link.checksums = checksum;
        link.longest = self.stack.set_segment_offload(iface, longest as u32) as usize;
    }

    /// Whether packets may be given to [`receive`](Self::receive): not while copies of earlier ones wait for room, or hold
    /// their share of the buffers.
    pub fn is_open(&self) -> bool {
        self.to_place.is_empty() && self.placing < self.part.div_ceil(SHARE)
    }

    /// Calls of the stack, with what they ask for: `out` is emptied by the next [`turn`](Self::turn).
    pub fn call(&mut self) -> (&mut Stack, &mut Out) {
        (&mut self.stack, &mut self.out)
    }

    /// What has gone wrong for want of room.
    pub fn stats(&self) -> PathStats {
        PathStats { fragments_dropped: self.fragments.dropped, ..self.links.stats }
    }

    /// Takes packets that interface `iface` has received.
    pub fn receive(&mut self, ctx: &mut Context<'_>, now: u64, iface: u8, packets: &mut Burst) {
        self.take(ctx, now, iface, packets);
        if !self.whole.is_empty() {
            self.take_whole(ctx, now, iface);
        }
        self.submit_places(ctx);
    }

    /// Takes what was put together, as far as it is this worker's.
    #[cold]
    fn take_whole(&mut self, ctx: &mut Context<'_>, now: u64, iface: u8) {
        let mut whole = mem::take(&mut self.whole);
        while !whole.is_empty() {
            let most = whole.len().min(BURST);
            let mut burst = Burst::new();
            for packet in whole.drain(..most) {
                match self.stack.owner(head_of(&packet), self.pool.total_len(&packet)) {
                    Owner::Worker(worker) if worker != self.stack.share().worker => {
                        self.keep_for_another(iface, packet, ctx.cache);
                    }
                    _ => burst.push(packet),
                }
            }
            self.take(ctx, now, iface, &mut burst);
            // What was put together may be a part of yet another packet.
            whole.append(&mut self.whole);
        }
        self.whole = whole;
    }

    /// The packet waits for [`take_elsewhere`](Self::take_elsewhere), if there is room; one has always.
    fn keep_for_another(&mut self, iface: u8, packet: Packet, cache: &mut PoolCache) {
        let held = self.elsewhere_held + buffers(&packet, self.pool);
        if held > self.part.div_ceil(ELSEWHERE_SHARE) && !self.elsewhere.is_empty() {
            self.links.stats.starved += 1;
            cache.free(packet);
        } else {
            self.elsewhere_held = held;
            self.elsewhere.push((iface, packet));
        }
    }

    /// Moves packets that another worker is to be given, put together of fragments that came by interface `iface`, to `burst`.
    pub fn take_elsewhere(&mut self, iface: u8, burst: &mut Burst) {
        let mut room = burst.remaining_capacity();
        let fits = |(of, _): &mut (u8, Packet)| {
            let fits = *of == iface && room > 0;
            room -= usize::from(fits);
            fits
        };
        let taken = self.elsewhere.extract_if(.., fits).map(|(_, packet)| packet);
        burst.extend(taken.inspect(|packet| self.elsewhere_held -= buffers(packet, self.pool)));
    }

    #[inline]
    fn take(&mut self, ctx: &mut Context<'_>, now: u64, iface: u8, packets: &mut Burst) {
        let pool = self.pool;
        let mut heads: ArrayVec<RxSeg<'_>, BURST> = ArrayVec::new();
        for packet in packets.iter() {
            let data = packet.data().as_ptr();
            prefetch::read(data);
            // The second line of headers; where the packet asks for an offload, its header is in the line before.
            prefetch::read(data.wrapping_add(prefetch::LINE));
            prefetch::read(data.wrapping_sub(1));
        }
        for packet in packets.iter_mut() {
            let len = pool.total_len(packet);
            let checksum = checksum_of(packet, len, ctx.cache);
            heads.push(RxSeg { head: packet.bytes_mut(), len: len as u32, checksum });
        }
        self.stack.rx(now, iface, &mut heads, &mut self.out);
        drop(heads);
        let mut places = self.out.places.drain(..);
        let mut copied = Vec::new();
        for (mut packet, verdict) in packets.drain(..).zip(self.out.verdicts.drain(..)) {
            match verdict {
                Verdict::Consumed | Verdict::Drop(_) => ctx.cache.free(packet),
                Verdict::Place => {
                    let place = places.next().expect("each such verdict has a place");
                    self.placing += buffers(&packet, pool);
                    self.to_place.push_back(Placing { packet, place });
                }
                Verdict::Reply => {
                    packet.set_offload(false);
                    let link = (iface, self.stack.mtu(iface));
                    self.links.send_whole(&mut self.stack, link, packet, ctx.cache);
                }
                Verdict::Copies => copied.push(packet),
                Verdict::Fragment => self.whole.extend(self.fragments.add(now, packet, ctx.cache)),
            }
        }
        drop(places);
        if !copied.is_empty() {
            self.take_copies(copied, ctx);
        }
        ctx.clock.lap(Stage::Header);
    }

    /// One turn: what is due, copies that are done, and what is to be sent, `budget` packets at most.
    pub fn turn(&mut self, ctx: &mut Context<'_>, now: u64, budget: usize) {
        self.links.go_on(ctx.cache);
        for iface in 0..self.links.len() {
            self.stack.hold(iface as u8, self.links.is_full(iface));
        }
        self.finish(ctx, now);
        self.stack.timers(now, &mut self.out);
        self.fragments.expire(now, ctx.cache);
        if self.links.has_waiting() {
            self.links.look_for_stations(now, &mut self.stack, &mut self.out, ctx.cache);
        }
        if !self.to_place.is_empty() {
            self.submit_places(ctx);
        }
        let room = budget.min(self.packets(ctx.cache));
        if self.to_fill.is_empty() && room > 0 {
            self.stack.tx(now, room, &mut self.out);
        }
        // What a turn took that found nothing to do belongs to no stage of a packet's way.
        ctx.clock.lap(if self.out.is_empty() { Stage::Idle } else { Stage::Header });
        self.take_out(ctx, now);
        self.take_own_copies(ctx);
    }

    /// Packets to be sent that there are buffers for, those of the longest kind.
    fn packets(&self, cache: &PoolCache) -> usize {
        let pool = self.pool;
        let held = self.filling + self.links.fewest_queued();
        let share = self.part.div_ceil(SHARE).saturating_sub(held);
        let each = self.links.longest().div_ceil(pool.data_room());
        share.min(self.part / AT_ONCE_SHARE).min(cache.available() / 2) / each.max(1)
    }

    /// Copies that are done are reported and their packets freed, or sent: each connection's in order.
    fn finish(&mut self, ctx: &mut Context<'_>, now: u64) {
        let Self { stack, out, pool, rx, tx, links, placing: held, filling, .. } = self;
        let Context { mover, cache, .. } = ctx;
        let key = |placing: &Option<Placing>| placing.as_ref().map(|placing| placing.place.conn.order());
        // What a holder has is looked at where it is: a copy of it would wait for its own stores, with every packet.
        let mut done = None;
        rx.take_by_key(mover, key, |holder| {
            let Some(Placing { packet, place }) = holder else { return };
            *held -= buffers(packet, pool);
            report(&mut done, place, stack, out);
            cache.free_all(holder.take().map(|placing| placing.packet));
        });
        done.into_iter().for_each(|done| stack.placed(done, out));
        let key = |sending: &Option<Sending>| sending.as_ref().map(|sending| sending.plan.conn.order());
        tx.take_by_key(mover, key, |holder| {
            let Some(Sending { packet, plan }) = holder else { return };
            *filling -= buffers(packet, pool);
            let plan = *plan;
            if let Some(Sending { packet, .. }) = holder.take() {
                Sending { packet, plan }.finish(stack, out, links, cache, now);
            }
        });
    }

    /// What the stack has asked for becomes packets.
    fn take_out(&mut self, ctx: &mut Context<'_>, now: u64) {
        let mut controls = mem::take(&mut self.out.controls);
        for control in controls.drain(..) {
            self.links.enqueue_control(ctx.cache, control);
        }
        self.out.controls = controls;
        for message in mem::take(&mut self.out.messages) {
            let Some(mut packet) = ctx.cache.take_sized(HEADROOM, message.bytes.len()) else {
                self.links.stats.starved += 1;
                continue;
            };
            packet.bytes_mut().copy_from_slice(&message.bytes);
            self.links.enqueue(ctx.cache, message.iface, packet);
        }
        let mut plans = mem::take(&mut self.out.plans);
        let mut made = 0;
        for &plan in &plans {
            let Some(packet) = ctx.cache.take_chain(HEADROOM, plan.len as usize) else { break };
            self.filling += buffers(&packet, self.pool);
            // Headers are written when the copy is complete, into lines that somebody else had last.
            let data = packet.data().as_ptr();
            prefetch::write(data.wrapping_sub(prefetch::LINE));
            prefetch::write(data.wrapping_sub(2 * prefetch::LINE));
            self.to_fill.push_back(Sending { packet, plan });
            made += 1;
        }
        // The last first: what is given up behind it leaves no hole, and is planned anew.
        for plan in plans.drain(made..).rev() {
            self.links.stats.starved += 1;
            self.stack.give_up(&plan, &mut self.out);
        }
        plans.clear();
        self.out.plans = plans;
        if !self.to_fill.is_empty() {
            ctx.clock.lap(Stage::Header);
            self.submit_fills(ctx, now);
        }
    }

    fn submit_places(&mut self, ctx: &mut Context<'_>) {
        let Self { stack, out, rx, to_place, placed, .. } = self;
        submit(rx, stack, to_place, ctx, placed);
        let mut done = None;
        for Placing { packet, place } in placed.drain(..) {
            self.placing -= buffers(&packet, self.pool);
            report(&mut done, &place, stack, out);
            ctx.cache.free(packet);
        }
        done.into_iter().for_each(|done| stack.placed(done, out));
    }

    fn submit_fills(&mut self, ctx: &mut Context<'_>, now: u64) {
        let Self { stack, out, tx, to_fill, filled, links, .. } = self;
        submit(tx, stack, to_fill, ctx, filled);
        for sending in filled.drain(..) {
            self.filling -= buffers(&sending.packet, self.pool);
            sending.finish(stack, out, links, ctx.cache, now);
        }
    }

    /// Packets to be sent by interface `iface`, in order.
    pub fn to_send(&mut self, iface: u8) -> &mut SendQueue {
        &mut self.links.get(iface).queue
    }

    /// What applications are told, since the last call.
    pub fn take_events(&mut self, into: &mut Vec<Event>) {
        into.append(&mut self.out.events);
    }

    /// Packets whose copies are in flight, or wait for room.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        let waiting = self.to_place.len() + self.to_fill.len();
        self.rx.in_flight(mover) + self.tx.in_flight(mover) + waiting
    }
}

/// The part of a packet that the protocols read: its first buffer, which contains the headers.
#[inline]
pub fn head_of(packet: &Packet) -> &[u8] {
    packet.bytes()
}

/// How many buffers a packet has.
#[inline]
fn buffers(packet: &Packet, pool: &Pool) -> usize {
    if packet.is_segmented() { buffers_of_chain(packet, pool) } else { 1 }
}

#[cold]
fn buffers_of_chain(packet: &Packet, pool: &Pool) -> usize {
    pool.segment_count(packet)
}

/// The sum of a packet's bytes.
#[inline]
fn sum_of(packet: &Packet, pool: &Pool) -> Sum {
    if packet.is_segmented() { sum_of_chain(packet, pool) } else { Sum::of(packet.bytes()) }
}

#[cold]
fn sum_of_chain(packet: &Packet, pool: &Pool) -> Sum {
    Sum::of_parts(pool.segments(packet))
}

/// What leaves the checksum at `offset` of the transport header to the port.
#[inline]
fn open_checksum(transport: u8, offset: u16) -> NetHeader {
    NetHeader {
        flags: virtio_net::VIRTIO_NET_HDR_F_NEEDS_CSUM,
        csum_start: transport.into(),
        csum_offset: offset,
        ..NetHeader::default()
    }
}

/// Puts the header in front of the packet.
#[inline]
fn leave_checksum(packet: &mut Packet, header: &NetHeader) {
    packet.headroom_mut(virtio_net::HEADER_LEN).copy_from_slice(&header.to_bytes());
    packet.set_offload(true);
}

/// Has the port cut a packet with `headers` bytes of headers into segments.
#[cold]
fn ask_for_segments(header: &mut NetHeader, segment: u16, headers: usize, packet: &Packet) {
    header.gso_type = segmentation(packet.bytes(), header.csum_start.into());
    (header.hdr_len, header.gso_size) = (headers as u16, segment);
}

/// The kind of segmentation of a frame whose TCP header is at `transport`.
fn segmentation(frame: &[u8], transport: usize) -> u8 {
    let is_v6 = EthernetFrame::new_checked(frame).is_ok_and(|frame| frame.ethertype() == EtherType::IPV6);
    let version = if is_v6 { VIRTIO_NET_HDR_GSO_TCPV6 } else { VIRTIO_NET_HDR_GSO_TCPV4 };
    // Only the first segment is to have CWR (RFC 3168, 6.1.2). For a port without that the packet is segmented in software.
    let tcp = frame.get(transport..).and_then(|bytes| TcpSegment::new_checked(bytes).ok());
    let reduced = tcp.is_some_and(|tcp| tcp.flags().intersects(TcpFlags::CWR));
    version | if reduced { VIRTIO_NET_HDR_GSO_ECN } else { 0 }
}

/// What is known of a packet's checksum; the core sums up what nobody has looked at.
fn checksum_of(packet: &Packet, len: usize, cache: &PoolCache) -> RxChecksum {
    if packet.has_offload() {
        let header = packet.headroom_bytes(virtio_net::HEADER_LEN).first_chunk().map(NetHeader::from_bytes);
        if header.is_some_and(|header| header.needs_checksum()) {
            return RxChecksum::Verified;
        }
    }
    let end = sum_end(head_of(packet), len);
    if !packet.is_segmented() {
        return RxChecksum::Unknown { rest: packet.bytes().get(HEAD..end).map_or(Sum::ZERO, Sum::of) };
    }
    let mut at = 0;
    let parts = cache.pool().segments(packet).map(|part| {
        let (from, to) = (HEAD.max(at) - at, end.max(at) - at);
        at += part.len();
        part.get(from.min(part.len())..to.min(part.len())).unwrap_or_default()
    });
    RxChecksum::Unknown { rest: Sum::of_parts(parts) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_sends_with_cwr_ask_for_ecn() {
        let kind = |ethertype: u16, flags: TcpFlags| {
            let mut frame = [0; 54];
            frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
            (frame[34 + 12], frame[34 + 13]) = (5 << 4, flags.0);
            segmentation(&frame, 34)
        };
        assert_eq!(kind(0x0800, TcpFlags::ACK), VIRTIO_NET_HDR_GSO_TCPV4);
        assert_eq!(
            kind(0x0800, TcpFlags::ACK | TcpFlags::CWR),
            VIRTIO_NET_HDR_GSO_TCPV4 | VIRTIO_NET_HDR_GSO_ECN
        );
        assert_eq!(
            kind(0x86dd, TcpFlags::ACK | TcpFlags::CWR),
            VIRTIO_NET_HDR_GSO_TCPV6 | VIRTIO_NET_HDR_GSO_ECN
        );
    }
}
