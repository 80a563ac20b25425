//! Enqueue: packets to the guest.
//!
//! 1. Available chains are walked, and the copies of the burst are gathered. The virtio-net header is built in the
//!    headroom, so that header and payload need only one copy.
//! 2. The mover makes the copies, or hands them to a channel.
//! 3. Packets whose copies are all done are published in order, and their buffers are freed.

use std::sync::Arc;

use arrayvec::ArrayVec;
use offcore_dma::{Batch, Begun, Context, Mover};
use offcore_mem::{Burst, Packet, Pool};
use offcore_ring::device::{Chain, DeviceQueue, Direction, Wanted};
use offcore_ring::{RingError, with_queue};
use offcore_stats::Stage;
use offcore_wire::virtio_net::{NetHeader, Offloads};

use crate::cell::{VringCell, VringConfig};
use crate::dirty::Logging;
use crate::features::NET_HEADER;
use crate::pieces::{self, MAX_PIECES, Piece, pieces_of};
use crate::room::{Room, Unfit};
use crate::vring::{Active, Chains, InFlight, Out, QueueBurst, Taken, Vring, burst_limit};

/// Counters of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enqueued {
    /// Packets accepted: in flight, or already published.
    pub packets: usize,
    pub bytes: u64,
    /// Packets dropped and freed because the guest's chains are too short for them.
    pub too_big: usize,
    /// Packets dropped and freed because they request an offload that the guest did not negotiate (see
    /// [`Enqueue::offloads`]).
    pub unwanted: usize,
}

/// The worker's side of a virtqueue that the guest receives from.
#[derive(Debug)]
pub struct Enqueue {
    pub(crate) vring: Vring,
}

/// The reason for the end of a burst.
enum Stop {
    /// The next packet cannot be delivered: drop it and continue.
    TooBig,
    /// The next packet requests an offload that the guest does not support: drop it and continue.
    UnsupportedOffload,
    /// No chain is available, or too many packets are in flight: try again later.
    Full,
    /// The list or the channel has no room for the packet's copies: the next list begins with this packet.
    ListFull,
    /// The queue is broken.
    Broken(RingError),
}

impl From<RingError> for Stop {
    fn from(error: RingError) -> Self {
        Self::Broken(error)
    }
}

impl Enqueue {
    /// Attaches to `cell`, which must be an even virtqueue, as its worker.
    ///
    /// # Errors
    /// Fails if another worker is attached.
    pub fn attach(cell: &Arc<VringCell>, mover: &mut Mover) -> Result<Self, Taken> {
        Ok(Self { vring: Vring::attach(cell, mover)? })
    }

    /// `rte_vhost_submit_enqueue_burst`: takes packets from the front of `burst` and submits their copies. Packets stay
    /// in `burst` if the guest has no chains for them. The core makes the copies that do not fit into the channels.
    /// Packets that are complete at once are published and freed.
    #[inline]
    pub fn submit(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> Enqueued {
        let mut submitted = Enqueued::default();
        if !self.vring.service(ctx.mover) || !self.enabled() {
            return submitted;
        }
        let Vring { copies, active, chains, cell, .. } = &mut self.vring;
        let Some(active) = active.as_mut() else { return submitted };
        let Context { mover, cache, clock, .. } = ctx;
        let mut call = QueueBurst { active, cell, chains, cache, clock, burst, done: &mut submitted };
        let mut by_core = false;
        let mut broken = None;
        while !call.burst.is_empty() {
            let mut plan = if by_core { copies.plan_by_core(mover) } else { copies.plan(mover) };
            let before = call.done.packets;
            let stop = match copies.begin(mover, &mut plan) {
                Begun::Immediate(batch) => call.submit(batch),
                Begun::Queued(batch) => call.submit(batch),
            };
            match stop {
                None => by_core = false,
                Some(Stop::Full) => break,
                // A single packet has more copies than the channel has room for.
                Some(Stop::ListFull) => by_core = call.done.packets == before,
                Some(Stop::TooBig) => {
                    call.cache.free(call.burst.remove(0));
                    call.done.too_big += 1;
                }
                Some(Stop::UnsupportedOffload) => {
                    call.cache.free(call.burst.remove(0));
                    call.done.unwanted += 1;
                }
                Some(Stop::Broken(error)) => {
                    broken = Some(error);
                    break;
                }
            }
        }
        if let Some(error) = broken {
            self.vring.break_down(error);
        }
        submitted
    }

    /// `rte_vhost_poll_enqueue_completed`: publishes completed packets in order and frees them. Returns their number.
    #[inline]
    pub fn poll_completed(&mut self, ctx: &mut Context<'_>) -> usize {
        let Vring { copies, active, chains, cell, .. } = &mut self.vring;
        let mut ready = copies.ready(ctx.mover);
        let packets = ready.len();
        if packets == 0 {
            if ready.retire(0) == 0 {
                // Applies a change that had to wait until nothing is in flight.
                self.vring.service(ctx.mover);
            }
            return 0;
        }
        let Some(active) = active.as_mut() else { return 0 };
        with_queue!(&mut active.queue, queue => {
            for index in 0..packets {
                let InFlight { packet, chains: n } = ready.holder(index);
                for _ in 0..*n {
                    let Out { chain, written } = chains.pop();
                    queue.push_used(chain, written);
                }
                if let Some(packet) = packet.take() {
                    ctx.cache.free(packet);
                }
            }
        });
        active.complete(packets);
        active.publish();
        let left = ready.retire(packets);
        active.hold(cell, left);
        ctx.clock.lap(Stage::Publish);
        packets
    }

    /// `rte_vhost_async_get_inflight`: returns the number of packets submitted and not yet published.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        self.vring.in_flight(mover)
    }

    /// Returns whether the front end has started and enabled the queue, and has not requested a stop since. If not,
    /// packets left in a burst are lost rather than delayed.
    #[inline(always)]
    pub fn enabled(&self) -> bool {
        self.vring.is_enabled()
    }

    /// Offloads that packets to the guest may request: see [`Packet::set_offload`].
    pub fn offloads(&self) -> Offloads {
        self.vring.active.as_ref().map(|active| active.offloads).unwrap_or_default()
    }
}

impl QueueBurst<'_, Enqueued> {
    /// Gathers and submits one batch. Packets that are complete afterwards are published and freed. If the batch ended
    /// before the end of the burst, returns the reason.
    #[inline(always)]
    fn submit<const IMMEDIATE: bool>(&mut self, mut batch: Batch<'_, InFlight, IMMEDIATE>) -> Option<Stop> {
        let Self { active, cell, chains, cache, clock, burst, done: submitted } = self;
        let wanted = burst_limit(burst.len()).min(batch.packets());
        if wanted == 0 {
            return Some(Stop::Full);
        }
        let Active { queue, config, mergeable, offloads, logging, room, .. } = &mut **active;
        let pool = cache.pool();
        let (taken, stop) = with_queue!(queue, queue => {
            let mut gather = EnqueueGather {
                queue,
                config,
                mergeable: *mergeable,
                offloads: *offloads,
                pool,
                batch: &mut batch,
                chains,
                logging: logging.as_deref_mut(),
                room,
                ahead: 0,
                known: 0,
            };
            gather.burst(&mut burst[..wanted], submitted)
        });
        clock.lap(Stage::Virtqueue);
        if taken == 0 {
            return stop;
        }
        submitted.packets += taken;
        if !IMMEDIATE {
            active.hold(cell, batch.in_flight());
            for (index, packet) in burst.drain(..taken).enumerate() {
                batch.holder(index).packet = Some(packet);
            }
        }
        // SAFETY: sources are packet buffers that the holders own, or that stay in `burst` during this call.
        // Destinations are writable ranges of the guest, checked against its memory. `hold` keeps the memory until the
        // packet is published; if the copies complete within this call, `active` keeps it.
        unsafe { batch.submit(clock) };
        if IMMEDIATE {
            active.complete(taken);
            active.publish();
            cache.free_front(burst, taken);
            clock.lap(Stage::Publish);
        }
        stop
    }
}

/// Walks chains and gathers the copies of one batch.
struct EnqueueGather<'a, 'b, Q, const IMMEDIATE: bool> {
    queue: &'a mut Q,
    config: &'a VringConfig,
    mergeable: bool,
    offloads: Offloads,
    pool: &'static Pool,
    batch: &'a mut Batch<'b, InFlight, IMMEDIATE>,
    chains: &'a mut Chains,
    logging: Option<&'a mut Logging>,
    room: &'a mut Room,
    /// Number of entries taken.
    ahead: u16,
    /// Number of entries known to be available.
    known: u16,
}

impl<Q: DeviceQueue, const IMMEDIATE: bool> EnqueueGather<'_, '_, Q, IMMEDIATE> {
    /// Adds packets until one does not fit. Returns the number of packets added and the reason for the end.
    #[inline(always)]
    fn burst(&mut self, packets: &mut [Packet], submitted: &mut Enqueued) -> (usize, Option<Stop>) {
        self.known = match self.queue.look(packets.len()) {
            Ok(known) => known as u16,
            Err(error) => return (0, Some(Stop::Broken(error))),
        };
        self.queue.prefetch_used(self.known.into());
        let mut taken = 0;
        let stop = loop {
            taken += self.singles(&mut packets[taken..], submitted);
            let Some(packet) = packets.get_mut(taken) else { break None };
            match self.packet(packet, taken) {
                Ok(()) => {
                    taken += 1;
                    submitted.bytes += self.pool.total_len(packet) as u64;
                }
                Err(why) => break Some(why),
            }
        };
        self.queue.consume(self.ahead);
        if stop.is_none() {
            self.room.forget();
        }
        (taken, stop)
    }

    /// Adds packets as long as each fits into a chain of one buffer, which is the most frequent case. Returns their
    /// number.
    #[inline(always)]
    fn singles(&mut self, packets: &mut [Packet], submitted: &mut Enqueued) -> usize {
        let Self { queue, config, batch, chains, logging, ahead, offloads, .. } = self;
        // This path does not record destinations. Packets whose pages are logged are therefore added one by one.
        let most = if logging.is_some() { 0 } else { packets.len().min(batch.room()) };
        let wanted = Wanted { direction: Direction::Writable, least: NET_HEADER as u32, most: u32::MAX };
        let singles = queue.singles(*ahead, most as u16, &config.memory, wanted);
        let mut list = batch.singles();
        let (mut run, mut bytes) = (0, 0);
        for (packet, to) in packets.iter_mut().zip(singles) {
            let len = (NET_HEADER + packet.len()) as u32;
            let plain = packet.is_plain();
            if to.len() < len || (!plain && packet.is_segmented()) {
                break;
            }
            let header = packet.headroom_mut(NET_HEADER);
            if plain {
                // copy-ok: the header of an ordinary packet in one chain, which the core builds
                header.copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
            } else if is_wanted(header, offloads) {
                // copy-ok: as above; the rest is the packet's offload request
                header[10..].copy_from_slice(&1u16.to_le_bytes());
            } else {
                break;
            }
            let src = header.as_ptr();
            // SAFETY: the number of singles is limited by the room in the batch.
            match unsafe { list.enter(src, to.addr().as_ptr(), len) } {
                None => to.set_written(len),
                Some(holder) => {
                    holder.chains = 1;
                    chains.push(Out { chain: Chain::one(to.id()), written: len });
                }
            }
            bytes += u64::from(len);
            run += 1;
        }
        list.finish();
        if IMMEDIATE {
            queue.push_used_singles(*ahead, run as u16, Direction::Writable);
        }
        *ahead += run as u16;
        submitted.bytes += bytes - (NET_HEADER * run) as u64;
        run
    }

    /// Adds any packet, as number `taken` of the batch, with as many chains as it needs. On an error, nothing is added
    /// or taken.
    #[cold]
    fn packet(&mut self, packet: &mut Packet, taken: usize) -> Result<(), Stop> {
        if self.ahead > 0 {
            self.room.forget();
        }
        if self.ahead >= self.known && !self.queue.has(self.ahead)? {
            return Err(Stop::Full);
        }
        if packet.has_offload() && !is_wanted(packet.headroom_bytes(NET_HEADER), &self.offloads) {
            return Err(Stop::UnsupportedOffload);
        }
        match self.room.refuses((NET_HEADER + self.pool.total_len(packet)) as u32) {
            Some(Unfit::Never) => return Err(Stop::TooBig),
            Some(Unfit::Before(entry)) if !self.queue.has(entry)? => return Err(Stop::Full),
            _ => {}
        }
        let chains = self.packet_in_pieces(packet)?;
        for &out in &chains {
            if IMMEDIATE {
                self.queue.push_used(out.chain, out.written);
            } else {
                self.chains.push(out);
            }
        }
        if !IMMEDIATE {
            self.batch.holder(taken).chains = chains.len() as u16;
            self.batch.enter_filled();
        }
        Ok(())
    }

    /// Adds a packet that takes several buffers: chains of several descriptors or, with mergeable buffers, several
    /// chains.
    fn packet_in_pieces(&mut self, packet: &mut Packet) -> Result<ArrayVec<Out, MAX_PIECES>, Stop> {
        if packet.is_segmented() && self.pool.segment_count(packet) > MAX_PIECES {
            return Err(Stop::TooBig);
        }
        let from = pieces_of(self.pool, packet);
        let total = from.iter().map(|piece| piece.len).sum::<u32>();
        let mut left = total;
        let mut to: ArrayVec<Piece, MAX_PIECES> = ArrayVec::new();
        let mut taken: ArrayVec<Out, MAX_PIECES> = ArrayVec::new();
        // The limit applies to all chains of the packet together. If a guest offers many empty buffers, the packet is
        // dropped, so that other packets do not wait for it.
        let mut most = MAX_PIECES;
        let mut ahead = self.ahead;
        while left > 0 {
            if (!self.mergeable && !taken.is_empty()) || to.is_full() || most == 0 {
                self.room.note(total - left, Unfit::Never);
                return Err(Stop::TooBig);
            }
            // So far, only one entry per packet was checked.
            if ahead >= self.known && !self.queue.has(ahead)? {
                self.room.note(total - left, Unfit::Before(ahead - self.ahead));
                return Err(Stop::Full);
            }
            let before = left;
            let memory = &self.config.memory;
            let walked = self.queue.walk(ahead, memory, Direction::Writable, &mut most, |buffer| {
                let len = buffer.len.min(left);
                if len > 0 && !to.is_full() {
                    to.push(Piece { addr: buffer.addr.as_ptr(), len });
                    left -= len;
                }
            });
            let chain = match walked {
                Err(RingError::TooManyBuffers { .. }) if !taken.is_empty() => {
                    self.room.note(total - before, Unfit::Never);
                    return Err(Stop::TooBig);
                }
                walked => walked?,
            };
            taken.push(Out { chain, written: before - left });
            ahead += chain.entries;
        }
        if from.len() + to.len() - 1 > self.batch.room() {
            return Err(Stop::ListFull);
        }
        if let Some(logging) = &mut self.logging {
            logging.note(&self.config.memory, &to);
        }
        write_header(packet, taken.len() as u16);
        let token = self.batch.token();
        pieces::copies(&from, &to, token, |copy| self.batch.list().push(copy));
        self.ahead = ahead;
        Ok(taken)
    }
}

/// Returns whether the guest still accepts the offloads that a packet requests. The set may have changed since the
/// packet was prepared.
#[inline(always)]
fn is_wanted(header: &[u8], offloads: &Offloads) -> bool {
    let header = header.first_chunk().map(NetHeader::from_bytes);
    header.is_some_and(|header| offloads.allows(&header))
}

/// Builds the virtio-net header (virtio 1.2, section 5.1.6) in the headroom and returns its address. If the packet
/// requests an offload, all fields except `num_buffers` are already set.
#[inline(always)]
fn write_header(packet: &mut Packet, num_buffers: u16) -> *const u8 {
    let asks = packet.has_offload();
    let header = packet.headroom_mut(NET_HEADER);
    if !asks {
        // copy-ok: the core builds the header
        header[..10].fill(0);
    }
    // copy-ok: as above
    header[10..].copy_from_slice(&num_buffers.to_le_bytes());
    header.as_ptr()
}
