//! Dequeue: packets from the guest.
//!
//! 1. Available chains are taken apart and the copies of the burst gathered: each goes, virtio-net header and payload
//!    together, to the start of a packet buffer's data. Header and Ethernet addresses then share one cache line, the
//!    only one of a forwarded packet that the core touches.
//! 2. The mover makes the copies, or hands them to a channel.
//! 3. Chains whose copies are all done go back to the guest in order; the header is read from the copy.

use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use offcore_dma::channel::Token;
use offcore_dma::mover::Plan;
use offcore_dma::{Copy, Mover, QueueId};
use offcore_mem::{BURST, Burst, HEADROOM, Packet, Pool, PoolCache};
use offcore_ring::device::{Buffer, Chain, DeviceQueue, Direction, Single, Wanted};
use offcore_ring::{RingError, prefetch, with_queue};
use offcore_stats::{Stage, tsc};
use offcore_wire::ethernet;
use offcore_wire::virtio_net::{self, NetHeader, Offloads};

use crate::cell::{VringCell, VringConfig};
use crate::features::NET_HEADER;
use crate::pieces::{self, Piece};
use crate::vring::{Active, Chains, Context, InFlight, LIST, MAX_PIECES, Out, Taken, Vring, burst_limit};

/// Bytes of a frame, at most: a packet of 64 KiB that is to be segmented, with its Ethernet header and two VLAN tags.
pub(crate) const MAX_FRAME: usize = 65_535 + ethernet::HEADER_LEN + 8;

/// Bytes of a chain, at least: virtio-net and Ethernet header.
const SHORTEST: usize = NET_HEADER + ethernet::HEADER_LEN;

/// How long a started queue may be disabled before what the guest transmits is discarded.
const GRACE: Duration = Duration::from_millis(500);

pub use crate::vring::Arm;

/// What became of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dequeued {
    /// Packets appended to the burst.
    pub packets: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Chains returned to the guest without a packet: longer than any packet.
    pub too_big: usize,
    /// Likewise: too short, or with a header that asks for what was not negotiated.
    pub malformed: usize,
    /// Likewise: the front end has started the queue and not enabled it.
    pub discarded: usize,
    /// Whether the pool had no free packet buffer: the guest's chains wait.
    pub starved: bool,
}

/// The worker's side of a virtqueue that the guest transmits to.
#[derive(Debug)]
pub struct Dequeue {
    pub(crate) vring: Vring,
    /// The publication by which the started queue is disabled, and the TSC when it was found so.
    disabled_since: Option<(u32, u64)>,
}

impl Dequeue {
    /// Takes the worker's side of `cell`, an odd virtqueue.
    ///
    /// # Errors
    /// When another worker has it.
    pub fn attach(cell: &Arc<VringCell>, mover: &mut Mover) -> Result<Self, Taken> {
        Ok(Self { vring: Vring::attach(cell, mover)?, disabled_since: None })
    }

    /// `rte_vhost_async_try_dequeue_burst`: returns in `burst` what has completed, and submits the copies of newly
    /// available chains.
    #[inline]
    pub fn try_dequeue(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> Dequeued {
        let mut dequeued = Dequeued::default();
        if ctx.mover.ring(self.vring.queue).in_flight() > 0 {
            self.reap(ctx, burst, &mut dequeued);
        }
        if !self.vring.service(ctx.mover) {
            return dequeued;
        }
        if !self.vring.is_enabled() {
            self.wait_or_discard(&mut dequeued);
            return dequeued;
        }
        if let Err(error) = self.submit_some(ctx, burst, &mut dequeued) {
            self.vring.break_down(error);
        }
        dequeued
    }

    /// `rte_vhost_async_get_inflight`: packets submitted and not yet returned.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        self.vring.in_flight(mover)
    }

    /// Returns in `burst` what has completed and submits nothing: for `rte_vhost_clear_queue`, and before
    /// [`Dequeue::close`]. Changes by the front end take effect.
    pub fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> Dequeued {
        let mut dequeued = Dequeued::default();
        self.reap(ctx, burst, &mut dequeued);
        self.vring.service(ctx.mover);
        dequeued
    }

    /// For a worker that is about to sleep: asks the guest to kick when it transmits, and then looks once more.
    pub fn arm(&mut self) -> Arm<'_> {
        if self.vring.is_changing() {
            return Arm::Now;
        }
        let broken = self.vring.is_broken();
        match self.vring.active.as_mut().filter(|active| active.config.enabled) {
            Some(active) if !broken => active.arm(),
            _ => Arm::Never,
        }
    }

    /// After a sleep: asks for no kicks any more.
    pub fn disarm(&mut self) {
        if let Some(active) = &mut self.vring.active {
            active.disarm();
        }
    }

    /// Gives the virtqueue back once nothing is in flight; returns whether it did.
    pub fn close(&mut self, ctx: &mut Context<'_>) -> bool {
        self.vring.close(ctx.mover)
    }

    /// Submits the copies of newly available chains. When the core makes them and nothing older is in flight, the
    /// packets are complete at once and need not go through the reorder ring.
    #[inline]
    fn submit_some(
        &mut self,
        ctx: &mut Context<'_>,
        burst: &mut Burst,
        dequeued: &mut Dequeued,
    ) -> Result<(), RingError> {
        let mut plan = ctx.mover.plan(self.vring.queue);
        if !plan.by_core() {
            let wanted = burst_limit(ctx.burst).min(plan.packets).min(plan.copies);
            if self.gather::<false>(ctx, plan, wanted, burst, dequeued)? == Gathered::Some {
                return Ok(());
            }
            // The first chain alone has more copies than the channel has room for.
            plan = ctx.mover.plan_by_core(self.vring.queue);
        }
        let room = burst.remaining_capacity().min(ctx.burst.saturating_sub(dequeued.packets));
        if ctx.mover.ring(self.vring.queue).in_flight() == 0 {
            return self.gather::<true>(ctx, plan, room, burst, dequeued).map(drop);
        }
        let result = self.gather::<false>(ctx, plan, room.min(plan.packets), burst, dequeued);
        self.reap(ctx, burst, dequeued);
        result.map(drop)
    }

    /// Gathers and submits one list of at most `wanted` packets, and publishes them if they are complete at once
    /// (`NOW`).
    ///
    /// # Errors
    /// When the driver broke the rules; chains before the one where it did are submitted.
    #[inline(always)]
    fn gather<const NOW: bool>(
        &mut self,
        ctx: &mut Context<'_>,
        mut plan: Plan,
        wanted: usize,
        burst: &mut Burst,
        dequeued: &mut Dequeued,
    ) -> Result<Gathered, RingError> {
        let vring = &mut self.vring;
        let Some(active) = vring.active.as_mut() else { return Ok(Gathered::Some) };
        let Active { queue, config, offloads, .. } = active;
        let offloads = *offloads;
        let first_new = burst.len();
        let mut sink = Sink { burst, slots: &mut vring.slots, chains: &mut vring.chains, dequeued };
        vring.list.clear();
        let (mover, list) = (&mut *ctx.mover, &mut *vring.list);
        let gatherer = Gatherer { config, id: vring.queue, mover, list, cache: ctx.cache };
        let (taken, result) =
            with_queue!(queue, queue => gatherer.gather::<_, NOW>(queue, &mut plan, wanted, &mut sink));
        if taken == 0 {
            return result;
        }
        ctx.clock.lap(Stage::Virtqueue);
        if !NOW {
            vring.entered(ctx.mover, taken);
        }
        // SAFETY: sources are ranges that the guest gave us for reading, checked against its memory, which is held by
        // `entered` until the chain is published, or by `active` when the copies are complete at the end of this call;
        // destinations are packet buffers whose handles are in `slots`, or in `burst`, which nobody reads before the
        // call is over.
        unsafe { ctx.mover.submit(vring.queue, plan, &vring.list, ctx.clock) };
        if NOW {
            if let Some(active) = vring.active.as_mut() {
                active.publish();
            }
            ctx.clock.lap(Stage::Publish);
            if vring.list.len() == burst.len() - first_new {
                // SAFETY: each packet is one copy, which has just been made into its buffer, headers included.
                unsafe { check_copies(&vring.list, burst, first_new, offloads, ctx.cache, dequeued) };
            } else {
                check_headers(burst, first_new, offloads, ctx.cache, dequeued);
            }
            ctx.clock.lap(Stage::Header);
        }
        result
    }

    /// Publishes what has completed, in order, and moves the packets to `burst`.
    #[inline]
    fn reap(&mut self, ctx: &mut Context<'_>, burst: &mut Burst, dequeued: &mut Dequeued) {
        let vring = &mut self.vring;
        let ring = ctx.mover.ring(vring.queue);
        let done = ring.ready();
        let ready = done.min(burst.remaining_capacity()).min(ctx.burst);
        if ready == 0 {
            return;
        }
        let (first, mask) = (ring.oldest_slot(), ring.mask());
        let Some(active) = vring.active.as_mut() else { return };
        let offloads = active.offloads;
        // Those of the next call as well: their lines come over from the engine while this burst is worked on.
        for i in ready..done.min(ready + ctx.burst) {
            if let Some(packet) = &vring.slots[(first + i) & mask].packet {
                prefetch::write(start_of(packet));
            }
        }
        with_queue!(&mut active.queue, queue => {
            for i in 0..ready {
                let slot = &vring.slots[(first + i) & mask];
                if let Some(packet) = &slot.packet {
                    prefetch::write(start_of(packet));
                }
                queue.push_used(vring.chains.pop().chain, 0);
            }
        });
        active.publish();
        ctx.clock.lap(Stage::Publish);
        let first_new = burst.len();
        for i in 0..ready {
            burst.extend(vring.slots[(first + i) & mask].packet.take());
        }
        check_headers(burst, first_new, offloads, ctx.cache, dequeued);
        vring.left(ctx.mover, ready);
        ctx.mover.reaped(vring.queue);
        ctx.clock.lap(Stage::Header);
    }

    /// The specification of vhost-user asks that a disabled TX ring be drained and discarded. A ring that is just being
    /// started is disabled as well, for a moment: what waits in it then is not lost.
    #[cold]
    fn wait_or_discard(&mut self, dequeued: &mut Dequeued) {
        let (now, applied) = (tsc::now(), self.vring.applied);
        match self.disabled_since {
            // Enabling it, or starting it anew, would have been another publication.
            Some((publication, since)) if publication == applied => {
                if now.wrapping_sub(since) > tsc::ticks(GRACE) {
                    self.discard(dequeued);
                }
            }
            _ => self.disabled_since = Some((applied, now)),
        }
    }

    /// Returns available chains of a disabled queue unread.
    #[cold]
    fn discard(&mut self, dequeued: &mut Dequeued) {
        let Some(active) = self.vring.active.as_mut() else { return };
        let (chains, result) = with_queue!(&mut active.queue, queue => discard(queue, &active.config));
        if chains > 0 {
            active.publish();
            dequeued.discarded += chains;
        }
        if let Err(error) = result {
            self.vring.break_down(error);
        }
    }
}

/// Takes a burst of chains and returns them; their number, and whether the driver broke the rules after them.
#[cold]
fn discard<Q: DeviceQueue>(queue: &mut Q, config: &VringConfig) -> (usize, Result<(), RingError>) {
    let known = match queue.look(BURST) {
        Ok(known) => known as u16,
        Err(error) => return (0, Err(error)),
    };
    let (mut ahead, mut chains, mut result) = (0, 0, Ok(()));
    while ahead < known {
        match queue.walk(ahead, &config.memory, Direction::Readable, MAX_PIECES, |_| ()) {
            Ok(chain) => {
                queue.push_used(chain, 0);
                ahead += chain.entries;
                chains += 1;
            }
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    queue.consume(ahead);
    (chains, result)
}

/// Takes chains of one burst apart.
struct Gatherer<'a> {
    config: &'a VringConfig,
    id: QueueId,
    mover: &'a mut Mover,
    list: &'a mut ArrayVec<Copy, LIST>,
    cache: &'a mut PoolCache,
}

/// Where they go.
struct Sink<'a> {
    burst: &'a mut Burst,
    slots: &'a mut [InFlight],
    chains: &'a mut Chains,
    dequeued: &'a mut Dequeued,
}

impl Gatherer<'_> {
    /// Gathers the copies of at most `wanted` packets; how many chains that were, and what it ended with. Packets that
    /// are complete when their copies are (`NOW`) go to the burst, others into the reorder ring.
    #[inline(always)]
    fn gather<Q: DeviceQueue, const NOW: bool>(
        self,
        queue: &mut Q,
        plan: &mut Plan,
        wanted: usize,
        sink: &mut Sink<'_>,
    ) -> (usize, Result<Gathered, RingError>) {
        let Self { config, id, mover, list, cache } = self;
        let known = match queue.look(wanted) {
            Ok(0) => return (0, Ok(Gathered::Some)),
            Ok(known) => known as u16,
            Err(error) => return (0, Err(error)),
        };
        queue.prefetch_used(known.into());
        let max_copies = plan.copies.min(LIST);
        let ring = mover.ring(id);
        let (mut taken, mut ahead, mut result) = (0, 0, Ok(Gathered::Some));
        let wanted_singles = Wanted {
            direction: Direction::Readable,
            least: SHORTEST as u32,
            most: cache.pool().data_room() as u32,
        };
        loop {
            let most = usize::from(known - ahead).min(max_copies.saturating_sub(list.len())) as u16;
            // Chains of one buffer that fits one packet buffer: nearly all.
            let singles = queue.singles(ahead, most, &config.memory, wanted_singles);
            let run = if NOW {
                take_now(singles, list, sink.burst, cache) as u16
            } else {
                let mut run = 0;
                for from in &*singles {
                    let len = from.len() as usize - NET_HEADER;
                    let Some(packet) = cache.take_sized(HEADROOM + NET_HEADER, len) else { break };
                    let token = id.token(ring.next_slot());
                    list.push(Copy {
                        src: from.addr().as_ptr(),
                        dst: start_of(&packet),
                        len: from.len(),
                        token,
                    });
                    let slot = ring.push(plan.outstanding(&list[list.len() - 1..]));
                    sink.slots[slot] = InFlight { packet: Some(packet), chains: 1 };
                    sink.chains.push(Out { chain: Chain::one(from.id()), written: 0 });
                    run += 1;
                }
                run
            };
            if NOW {
                queue.push_used_singles(ahead, run, Direction::Readable);
            }
            ahead += run;
            taken += usize::from(run);
            if ahead >= known {
                break;
            }
            let before = list.len();
            let token = id.token(ring.next_slot());
            let (packet, chain) = match chain(queue, ahead, config, token, max_copies, list, cache) {
                Ok((packet, chain)) => (Some(packet), chain),
                Err(Unfit::TooBig(chain)) => {
                    sink.dequeued.too_big += 1;
                    (None, chain)
                }
                Err(Unfit::TooShort(chain)) => {
                    sink.dequeued.malformed += 1;
                    (None, chain)
                }
                Err(Unfit::Starved) => {
                    sink.dequeued.starved = true;
                    break;
                }
                Err(Unfit::ListFull) => {
                    if taken == 0 {
                        result = Ok(Gathered::NoRoom);
                    }
                    break;
                }
                Err(Unfit::Broken(error)) => {
                    result = Err(error);
                    break;
                }
            };
            if NOW {
                queue.push_used(chain, 0);
                sink.burst.extend(packet);
            } else {
                // A chain without a packet takes its place in the order all the same.
                let slot = ring.push(plan.outstanding(&list[before..]));
                sink.slots[slot] = InFlight { packet, chains: 1 };
                sink.chains.push(Out { chain, written: 0 });
            }
            ahead += chain.entries;
            taken += 1;
            if ahead >= known {
                break;
            }
        }
        queue.consume(ahead);
        (taken, result)
    }
}

/// Takes packet buffers for `singles` and gathers their copies; returns for how many. A function of its own, so that its
/// loop has the registers for itself.
#[inline(never)]
fn take_now(
    singles: &[Single],
    list: &mut ArrayVec<Copy, LIST>,
    burst: &mut Burst,
    cache: &mut PoolCache,
) -> usize {
    let most = singles.len().min(list.remaining_capacity()).min(burst.remaining_capacity());
    let (copies, packets) = (list.len(), burst.len());
    // SAFETY: both are inside their vectors' arrays, or end there.
    let (mut copy, mut place) = unsafe { (list.as_mut_ptr().add(copies), burst.as_mut_ptr().add(packets)) };
    // They are at least as long as the header.
    let len = |from: &Single| (from.len() as usize).wrapping_sub(NET_HEADER);
    let taken = cache.take_each(HEADROOM + NET_HEADER, &singles[..most], len, |from, packet| {
        let (src, dst) = (from.addr().as_ptr(), start_of(&packet));
        // SAFETY: called `most` times at most, and so many more there is room for in both.
        unsafe {
            copy.write(Copy { src, dst, len: from.len(), token: 0 });
            place.write(packet);
            (copy, place) = (copy.add(1), place.add(1));
        }
    });
    // SAFETY: so many more were just written.
    unsafe {
        list.set_len(copies + taken);
        burst.set_len(packets + taken);
    }
    taken
}

/// What became of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gathered {
    /// What could be submitted was, if anything.
    Some,
    /// Nothing: the first chain has more copies than fit.
    NoRoom,
}

/// Why a chain is not a packet.
enum Unfit {
    /// Longer than any packet.
    TooBig(Chain),
    /// Shorter than the headers.
    TooShort(Chain),
    /// There is no packet buffer: later.
    Starved,
    /// Its copies do not fit the list any more: the next one begins with it.
    ListFull,
    /// The driver broke the rules.
    Broken(RingError),
}

/// Gathers the copies of the chain `ahead` into fresh packet buffers: header into the headroom, payload behind it.
/// Unless a packet comes of it, nothing is gathered.
#[cold]
fn chain<Q: DeviceQueue>(
    queue: &mut Q,
    ahead: u16,
    config: &VringConfig,
    token: Token,
    max_copies: usize,
    list: &mut ArrayVec<Copy, LIST>,
    cache: &mut PoolCache,
) -> Result<(Packet, Chain), Unfit> {
    let mut from: ArrayVec<Piece, MAX_PIECES> = ArrayVec::new();
    let mut total = 0usize;
    let walked =
        queue.walk(ahead, &config.memory, Direction::Readable, MAX_PIECES, |Buffer { addr, len }| {
            from.push(Piece { addr: addr.as_ptr(), len });
            total += len as usize;
        });
    let chain = walked.map_err(Unfit::Broken)?;
    if total < SHORTEST {
        return Err(Unfit::TooShort(chain));
    }
    let frame = total - NET_HEADER;
    let pool = cache.pool();
    if frame > MAX_FRAME || frame.div_ceil(pool.data_room()) > MAX_PIECES {
        return Err(Unfit::TooBig(chain));
    }
    let packet = cache.take_chain(HEADROOM + NET_HEADER, frame).ok_or(Unfit::Starved)?;
    let to = pieces_of(pool, &packet);
    if list.len() + from.len() + to.len() - 1 > max_copies {
        cache.free(packet);
        return Err(Unfit::ListFull);
    }
    pieces::copies(&from, &to, token, |copy| list.push(copy));
    Ok((packet, chain))
}

/// The buffers of a packet, at most [`MAX_PIECES`], with room for the virtio-net header in front of the first.
pub(crate) fn pieces_of(pool: &Pool, packet: &Packet) -> ArrayVec<Piece, MAX_PIECES> {
    let mut pieces: ArrayVec<Piece, MAX_PIECES> = ArrayVec::new();
    pool.for_each_segment(packet, |addr, len| pieces.push(Piece { addr: addr.as_ptr(), len: len as u32 }));
    if let Some(first) = pieces.first_mut() {
        first.addr = first.addr.wrapping_sub(NET_HEADER);
        first.len += NET_HEADER as u32;
    }
    pieces
}

/// Where the virtio-net header of a packet goes.
#[inline(always)]
fn start_of(packet: &Packet) -> *mut u8 {
    packet.data().as_ptr().wrapping_sub(NET_HEADER)
}

/// Bits of the first two bytes of a virtio-net header that asks for something: `flags` and `gso_type`.
const ASKS: u16 = u16::from_le_bytes([virtio_net::F_NEEDS_CSUM, u8::MAX]);

/// Does what [`check_headers`] does, of packets that are each made by one of `copies`.
///
/// # Safety
/// Each of the copies is of two bytes at least, into memory that is there and that nobody writes.
#[inline(always)]
unsafe fn check_copies(
    copies: &[Copy],
    burst: &mut Burst,
    first: usize,
    offloads: Offloads,
    cache: &mut PoolCache,
    dequeued: &mut Dequeued,
) {
    let (mut asked, mut bytes) = (0, 0);
    for copy in copies {
        // SAFETY: as the caller promises.
        asked |= unsafe { copy.dst.cast::<u16>().read_unaligned() };
        bytes += u64::from(copy.len);
    }
    dequeued.packets += copies.len();
    dequeued.bytes += bytes - (NET_HEADER * copies.len()) as u64;
    if asked & ASKS != 0 {
        check_offloads(burst, first, offloads, cache, dequeued);
    }
}

/// Counts the packets from `first` on, and looks at those whose virtio-net header asks for something.
#[inline(always)]
fn check_headers(
    burst: &mut Burst,
    first: usize,
    offloads: Offloads,
    cache: &mut PoolCache,
    dequeued: &mut Dequeued,
) {
    let (mut asked, mut bytes) = (0, 0);
    for packet in &burst[first..] {
        let header = packet.headroom_bytes(NET_HEADER);
        // `flags` and `gso_type`, in one.
        asked |= u16::from_le_bytes([header[0], header[1]]);
        bytes += packet.len() as u64;
    }
    dequeued.packets += burst.len() - first;
    dequeued.bytes += bytes;
    if asked & ASKS != 0 || !Packet::all_plain(&burst[first..]) {
        check_offloads(burst, first, offloads, cache, dequeued);
    }
}

/// Marks the packets that ask for something, and drops those that ask for what makes no sense or was not negotiated.
#[cold]
fn check_offloads(
    burst: &mut Burst,
    first: usize,
    offloads: Offloads,
    cache: &mut PoolCache,
    dequeued: &mut Dequeued,
) {
    let mut index = first;
    while index < burst.len() {
        let (packet, pool) = (&mut burst[index], cache.pool());
        let total = pool.total_len(packet);
        dequeued.bytes += (total - packet.len()) as u64;
        let bytes = packet.headroom_mut(NET_HEADER);
        let header = bytes.first_chunk().map(NetHeader::from_bytes).unwrap_or_default();
        match asked_for(header, total, offloads) {
            Ok(None) => {}
            Ok(Some(header)) => {
                // copy-ok: the header as it was understood, without what else the guest wrote there
                bytes.copy_from_slice(&header.to_bytes());
                packet.set_offload(true);
            }
            Err(Malformed) => {
                let packet = burst.remove(index);
                dequeued.packets -= 1;
                dequeued.bytes -= total as u64;
                dequeued.malformed += 1;
                cache.free(packet);
                continue;
            }
        }
        index += 1;
    }
}

/// A header asks for what makes no sense or was not negotiated.
#[derive(Debug)]
pub(crate) struct Malformed;

/// What a header that a guest wrote asks for, if anything, in front of a frame of `total` bytes.
pub(crate) fn asked_for(
    header: NetHeader,
    total: usize,
    offloads: Offloads,
) -> Result<Option<NetHeader>, Malformed> {
    let flags = header.flags & virtio_net::F_NEEDS_CSUM;
    let header = NetHeader { flags, num_buffers: 0, ..header };
    // Segments have checksums of their own, so they are left open, too (virtio 1.2, section 5.1.6.2.1).
    let open = header.needs_checksum() || !header.is_gso();
    if header.check(total).is_err() || !offloads.allows(&header) || !open {
        return Err(Malformed);
    }
    Ok((header.needs_checksum() || header.is_gso()).then_some(header))
}
