//! Connects the stack to packets with two copy queues: one from tx_fifos to packets, and one from packets to rx_fifos.
//!
//! A received packet is held until its payload is in the FIFO. A packet to be sent gets its headers when its payload is
//! complete. Neither becomes visible before its own copies and all earlier copies are complete.

#[allow(unsafe_code, reason = "copies are ordered here")]
mod copies;
mod fragments;
mod links;
mod loopback;
mod many;
mod queue;

use std::mem;

use arrayvec::ArrayVec;
use offcore_dma::mover::MoverError;
use offcore_dma::{Binding, Context, Mover};
use offcore_mem::{BURST, Burst, HEADROOM, Packet, Pool, PoolCache};
use offcore_ring::prefetch;
use offcore_stats::Stage;
use offcore_stats::time::Time;
use offcore_wire::virtio_net::{
    self, NetHeader, Offloads, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6,
};
use offcore_wire::{EtherType, EthernetFrame, Sum, TcpFlags, TcpSegment, tcp, udp};

use copies::Copying;
use fragments::Fragments;
use links::Links;

pub use links::PathStats;
pub use queue::SendQueue;

use crate::proto::{
    Event, HEAD, Out, Owner, Place, Placed, Plan, RxChecksum, RxSeg, Sealed, Stack, Verdict, sum_end,
};

/// Packets of one direction may hold one pool buffer in this many. A stalled engine thus leaves buffers for other
/// users.
const SHARE: usize = 4;
/// One turn plans to send at most one pool buffer in this many.
const AT_ONCE_SHARE: usize = 8;
/// Packets that wait for another worker may hold one pool buffer in this many.
const ELSEWHERE_SHARE: usize = 16;
/// Maximum payload in bytes of a packet that the port segments. The length field of an IP packet has 16 bits.
const LONGEST: usize = 65_000;
/// Such a packet may hold one pool buffer in this many.
const LONGEST_SHARE: usize = 64;

/// A packet whose payload is being copied to an rx_fifo. It owns the packet; the stack owns the FIFO's blocks.
#[derive(Debug)]
struct Placing {
    packet: Packet,
    place: Place,
}

/// A packet whose payload is being copied from a tx_fifo. It owns the packet; the stack owns the FIFO's blocks.
#[derive(Debug)]
struct Sending {
    packet: Packet,
    plan: Plan,
}

/// Merges a completed copy into `done`. If it is not adjacent, the earlier copies are reported to the stack first.
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
    /// Adds the headers to a packet with complete payload, and queues it.
    #[inline]
    fn finish(self, stack: &mut Stack, out: &mut Out, links: &mut Links, cache: &mut PoolCache, now: Time) {
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
        // The queue had room when the packet was planned.
        links.get(iface).queue.push_back(packet);
    }
}

/// Finishes a datagram. This is a separate function to keep the path of TCP segments short.
#[cold]
fn finish_datagram(
    (mut packet, plan): (Packet, &Plan),
    stack: &mut Stack,
    out: &mut Out,
    links: &mut Links,
    cache: &mut PoolCache,
    now: Time,
) {
    // The checksum of a fragmented datagram cannot be offloaded.
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
    /// The pool that all packets belong to.
    pool: &'static Pool,
    /// This worker's share of the pool in buffers.
    part: usize,
    rx: Copying<Placing>,
    tx: Copying<Sending>,
    fragments: Fragments,
    /// Reassembled packets. Empty between calls.
    whole: Vec<Packet>,
    /// Reassembled packets that belong to another worker, with their receiving interface, and the number of their
    /// buffers.
    elsewhere: Vec<(u8, Packet)>,
    elsewhere_held: usize,
    links: Links,
    /// The last turn has planned packets, and left others for the next turn.
    has_more: bool,
}

impl Path {
    /// Creates a path. `out` holds the pending requests of the stack; packets are allocated from `pool`. The core makes
    /// all copies until the path is [bound](Self::bind) to channels.
    pub fn new(stack: Stack, out: Out, mover: &mut Mover, pool: &'static Pool) -> Self {
        let part = pool.chunks().div_ceil(stack.share().of as usize);
        Self {
            stack,
            out,
            pool,
            rx: Copying::new(mover),
            tx: Copying::new(mover),
            fragments: Fragments::new(part),
            whole: Vec::new(),
            elsewhere: Vec::new(),
            elsewhere_held: 0,
            links: Links::new(pool, part),
            has_more: false,
            part,
        }
    }

    /// Selects the channels that copy received packets and packets to be sent.
    ///
    /// # Errors
    /// Fails if a channel does not belong to this mover, or if there are too many channels.
    pub fn bind(&mut self, mover: &mut Mover, rx: &Binding, tx: &Binding) -> Result<(), MoverError> {
        self.rx.queue.bind(mover, rx)?;
        self.tx.queue.bind(mover, tx)
    }

    /// Sets the offloads of the port of interface `iface`, and whether the port accepts packets of several buffers.
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

    /// Returns whether [`receive`](Self::receive) accepts packets. It does not while copies of earlier packets wait for
    /// room or hold their share of the buffers.
    pub fn is_open(&self) -> bool {
        !self.rx.is_waiting() && self.rx.held < self.part.div_ceil(SHARE)
    }

    /// Gives access to the stack's calls and their requests. The next [`turn`](Self::turn) processes and clears `out`.
    pub fn call(&mut self) -> (&mut Stack, &mut Out) {
        (&mut self.stack, &mut self.out)
    }

    /// Returns the counters of dropped packets.
    pub fn stats(&self) -> PathStats {
        PathStats { fragments_dropped: self.fragments.dropped, ..self.links.stats }
    }

    /// Receives packets from interface `iface`.
    pub fn receive(&mut self, ctx: &mut Context<'_>, now: Time, iface: u8, packets: &mut Burst) {
        self.take(ctx, now, iface, packets);
        if !self.whole.is_empty() {
            self.take_whole(ctx, now, iface);
        }
        self.submit_places(ctx);
    }

    /// Receives the reassembled packets that belong to this worker.
    #[cold]
    fn take_whole(&mut self, ctx: &mut Context<'_>, now: Time, iface: u8) {
        let mut whole = mem::take(&mut self.whole);
        while !whole.is_empty() {
            let most = whole.len().min(BURST);
            let mut burst = Burst::new();
            for packet in whole.drain(..most) {
                match self.stack.owner(head_of(&packet), self.pool.total_len(&packet)) {
                    Owner::Worker(worker) if worker != self.stack.share().worker => {
                        self.keep_for_other_worker(iface, packet, ctx.cache);
                    }
                    _ => burst.push(packet),
                }
            }
            self.take(ctx, now, iface, &mut burst);
            // A reassembled packet may itself be a fragment of another packet.
            whole.append(&mut self.whole);
        }
        self.whole = whole;
    }

    /// Keeps the packet for [`take_elsewhere`](Self::take_elsewhere) if there is room. There is always room for one
    /// packet.
    fn keep_for_other_worker(&mut self, iface: u8, packet: Packet, cache: &mut PoolCache) {
        let held = self.elsewhere_held + buffers(&packet, self.pool);
        if held > self.part.div_ceil(ELSEWHERE_SHARE) && !self.elsewhere.is_empty() {
            self.links.stats.starved += 1;
            cache.free(packet);
        } else {
            self.elsewhere_held = held;
            self.elsewhere.push((iface, packet));
        }
    }

    /// Moves reassembled packets that belong to another worker and arrived on interface `iface` to `burst`.
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
    fn take(&mut self, ctx: &mut Context<'_>, now: Time, iface: u8, packets: &mut Burst) {
        let pool = self.pool;
        let mut heads: ArrayVec<RxSeg<'_>, BURST> = ArrayVec::new();
        for packet in packets.iter() {
            let data = packet.data().as_ptr();
            prefetch::read(data);
            // The second cache line of headers. If the packet requests an offload, its virtio-net header is in the line
            // before.
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
                    let held = buffers(&packet, pool);
                    self.rx.push(Placing { packet, place }, held);
                }
                Verdict::Reply => {
                    packet.set_offload(false);
                    let mtu = self.stack.mtu(iface);
                    self.links.send_whole(&mut self.stack, iface, mtu, packet, ctx.cache);
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

    /// Runs one turn: expired timers, completed copies, and up to `budget` packets to send.
    pub fn turn(&mut self, ctx: &mut Context<'_>, now: Time, budget: usize) {
        self.links.go_on(ctx.cache);
        for iface in 0..self.links.len() {
            self.stack.hold(iface as u8, self.links.is_full(iface));
        }
        self.finish(ctx, now);
        self.stack.timers(now, &mut self.out);
        self.fragments.expire(now, ctx.cache);
        if self.links.has_waiting() {
            self.links.check_next_hops(now, &mut self.stack, &mut self.out, ctx.cache);
        }
        if self.rx.is_waiting() {
            self.submit_places(ctx);
        }
        let room = budget.min(self.packets(ctx.cache));
        if !self.tx.is_waiting() && room > 0 {
            self.stack.tx(now, room, &mut self.out);
        }
        self.has_more = !self.out.plans.is_empty() && self.stack.has_ready();
        // Time of a turn without work is not attributed to any packet stage.
        ctx.clock.lap(if self.out.is_empty() { Stage::Idle } else { Stage::Header });
        self.take_out(ctx, now);
        self.take_own_copies(ctx);
    }

    /// Returns whether the last turn has left data for the next one.
    pub fn has_more(&self) -> bool {
        self.has_more
    }

    /// Returns how many packets of maximum length the free buffers allow to send.
    fn packets(&self, cache: &PoolCache) -> usize {
        let pool = self.pool;
        let held = self.tx.held + self.links.fewest_queued();
        let share = self.part.div_ceil(SHARE).saturating_sub(held);
        let each = self.links.longest().div_ceil(pool.data_room());
        share.min(self.part / AT_ONCE_SHARE).min(cache.available() / 2) / each.max(1)
    }

    /// Reports completed copies in order per connection. Received packets are freed, and packets to be sent are
    /// finished.
    fn finish(&mut self, ctx: &mut Context<'_>, now: Time) {
        let Self { stack, out, pool, rx, tx, links, .. } = self;
        let Context { mover, cache, .. } = ctx;
        let key = |placing: &Option<Placing>| placing.as_ref().map(|placing| placing.place.conn.order());
        // The holder's contents are read in place. Moving them out would stall on their recent stores for every packet.
        let mut done = None;
        rx.queue.take_by_key(mover, key, |holder| {
            let Some(Placing { packet, place }) = holder else { return };
            rx.held -= buffers(packet, pool);
            report(&mut done, place, stack, out);
            cache.free_all(holder.take().map(|placing| placing.packet));
        });
        done.into_iter().for_each(|done| stack.placed(done, out));
        let key = |sending: &Option<Sending>| sending.as_ref().map(|sending| sending.plan.conn.order());
        tx.queue.take_by_key(mover, key, |holder| {
            let Some(Sending { packet, plan }) = holder else { return };
            tx.held -= buffers(packet, pool);
            let plan = *plan;
            if let Some(Sending { packet, .. }) = holder.take() {
                Sending { packet, plan }.finish(stack, out, links, cache, now);
            }
        });
    }

    /// Creates the packets that the stack has requested.
    fn take_out(&mut self, ctx: &mut Context<'_>, now: Time) {
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
            // Headers are written when the copy is complete. Another core may own these cache lines, so they are
            // prefetched.
            let data = packet.data().as_ptr();
            prefetch::write(data.wrapping_sub(prefetch::LINE));
            prefetch::write(data.wrapping_sub(2 * prefetch::LINE));
            let held = buffers(&packet, self.pool);
            self.tx.push(Sending { packet, plan }, held);
            made += 1;
        }
        // Last plan first: giving up the newest plan leaves no gap, and its data is planned again later.
        for plan in plans.drain(made..).rev() {
            self.links.stats.starved += 1;
            self.stack.give_up(&plan, &mut self.out);
        }
        plans.clear();
        self.out.plans = plans;
        if self.tx.is_waiting() {
            ctx.clock.lap(Stage::Header);
            self.submit_fills(ctx, now);
        }
    }

    fn submit_places(&mut self, ctx: &mut Context<'_>) {
        let Self { stack, out, rx, .. } = self;
        rx.submit(stack, ctx);
        let mut done = None;
        for Placing { packet, place } in rx.done.drain(..) {
            rx.held -= buffers(&packet, self.pool);
            report(&mut done, &place, stack, out);
            ctx.cache.free(packet);
        }
        done.into_iter().for_each(|done| stack.placed(done, out));
    }

    fn submit_fills(&mut self, ctx: &mut Context<'_>, now: Time) {
        let Self { stack, out, tx, links, .. } = self;
        tx.submit(stack, ctx);
        for sending in tx.done.drain(..) {
            tx.held -= buffers(&sending.packet, self.pool);
            sending.finish(stack, out, links, ctx.cache, now);
        }
    }

    /// Returns the queue of packets that interface `iface` has to send, in order.
    pub fn to_send(&mut self, iface: u8) -> &mut SendQueue {
        &mut self.links.get(iface).queue
    }

    /// Moves the application events since the last call to `into`.
    pub fn take_events(&mut self, into: &mut Vec<Event>) {
        into.append(&mut self.out.events);
    }

    /// Returns the number of packets whose copies are in flight or wait for room.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        self.rx.in_flight(mover) + self.tx.in_flight(mover)
    }
}

/// Returns the part of a packet that the protocols read: its first buffer, which contains the headers.
#[inline]
pub fn head_of(packet: &Packet) -> &[u8] {
    packet.bytes()
}

/// Returns the number of a packet's buffers.
#[inline]
fn buffers(packet: &Packet, pool: &Pool) -> usize {
    if packet.is_segmented() { buffers_of_chain(packet, pool) } else { 1 }
}

#[cold]
fn buffers_of_chain(packet: &Packet, pool: &Pool) -> usize {
    pool.segment_count(packet)
}

/// Returns the checksum of a packet's bytes.
#[inline]
fn sum_of(packet: &Packet, pool: &Pool) -> Sum {
    if packet.is_segmented() { sum_of_chain(packet, pool) } else { Sum::of(packet.bytes()) }
}

#[cold]
fn sum_of_chain(packet: &Packet, pool: &Pool) -> Sum {
    Sum::of_parts(pool.segments(packet))
}

/// Returns the header that makes the port complete the checksum at `offset` of the transport header.
#[inline]
fn open_checksum(transport: u8, offset: u16) -> NetHeader {
    NetHeader {
        flags: virtio_net::VIRTIO_NET_HDR_F_NEEDS_CSUM,
        csum_start: transport.into(),
        csum_offset: offset,
        ..NetHeader::default()
    }
}

/// Writes the virtio-net header into the packet's headroom.
#[inline]
fn leave_checksum(packet: &mut Packet, header: &NetHeader) {
    packet.headroom_mut(virtio_net::HEADER_LEN).copy_from_slice(&header.to_bytes());
    packet.set_offload(true);
}

/// Requests segmentation by the port of a packet with `headers` bytes of headers.
#[cold]
fn ask_for_segments(header: &mut NetHeader, segment: u16, headers: usize, packet: &Packet) {
    header.gso_type = segmentation(packet.bytes(), header.csum_start.into());
    (header.hdr_len, header.gso_size) = (headers as u16, segment);
}

/// Returns the segmentation type for a frame whose TCP header is at `transport`.
fn segmentation(frame: &[u8], transport: usize) -> u8 {
    let is_v6 = EthernetFrame::new_checked(frame).is_ok_and(|frame| frame.ethertype() == EtherType::IPV6);
    let version = if is_v6 { VIRTIO_NET_HDR_GSO_TCPV6 } else { VIRTIO_NET_HDR_GSO_TCPV4 };
    // Only the first segment may have CWR (RFC 3168, 6.1.2). Ports without ECN segmentation get the packet segmented in
    // software.
    let tcp = frame.get(transport..).and_then(|bytes| TcpSegment::new_checked(bytes).ok());
    let reduced = tcp.is_some_and(|tcp| tcp.flags().intersects(TcpFlags::CWR));
    version | if reduced { VIRTIO_NET_HDR_GSO_ECN } else { 0 }
}

/// Returns the checksum state of a packet. The core computes the sum if the port has not verified it.
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
    fn tso_with_cwr_sets_gso_ecn() {
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
