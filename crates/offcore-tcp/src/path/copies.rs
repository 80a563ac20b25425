//! The copies between packets and FIFOs, entered into the copy queues.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::time::Duration;

use offcore_dma::{Batch, Begun, Context, CopyQueue, Mover};
use offcore_mem::{Packet, Pool};
use offcore_stats::{StageClock, tsc};

use super::{Placing, Sending};
use crate::proto::Stack;

/// Maximum number of packets in flight in a copy queue.
const IN_FLIGHT: usize = 1024;
/// Time after which a copy counts as lost. It is well below the peer's retransmission timeout.
const LOST_AFTER: Duration = Duration::from_millis(50);

/// A packet that is copied to or from a FIFO.
pub(super) trait Copied {
    /// Calls `each` with the source, the target and the length of each copy.
    fn copies(&self, stack: &Stack, pool: &Pool, each: impl FnMut(NonNull<u8>, NonNull<u8>, usize));
}

impl Copied for Placing {
    #[inline]
    fn copies(&self, stack: &Stack, pool: &Pool, mut each: impl FnMut(NonNull<u8>, NonNull<u8>, usize)) {
        let skip = self.place.skip as usize;
        let Some(mut to) = stack.place_pieces(&self.place) else { return };
        if !self.packet.is_segmented() {
            // SAFETY: the offset is at most the length of the packet's data.
            let mut src = unsafe { self.packet.data().add(skip.min(self.packet.len())) };
            let mut left = self.packet.len().saturating_sub(skip);
            for (dst, room) in to {
                let n = room.min(left);
                if n > 0 {
                    each(src, dst, n);
                }
                left -= n;
                // SAFETY: `n` is at most the number of bytes left in the packet's data.
                src = unsafe { src.add(n) };
            }
            return;
        }
        pair(&self.packet, pool, skip, &mut to, &mut each);
    }
}

impl Copied for Sending {
    #[inline]
    fn copies(&self, stack: &Stack, pool: &Pool, mut each: impl FnMut(NonNull<u8>, NonNull<u8>, usize)) {
        let Some(mut from) = stack.plan_pieces(&self.plan) else { return };
        if self.packet.is_segmented() {
            return pair(&self.packet, pool, 0, &mut from, &mut |segment, piece, n| each(piece, segment, n));
        }
        let (mut dst, mut room) = (self.packet.data(), self.packet.len());
        for (src, len) in from {
            let n = len.min(room);
            if n > 0 {
                each(src, dst, n);
            }
            room -= n;
            // SAFETY: the result is in the packet's data, or at its end.
            dst = unsafe { dst.add(n) };
        }
    }
}

/// Calls `each` with matching parts of the packet's buffers and of the FIFO's pieces. The first `skip` bytes of the
/// packet are left out.
#[cold]
fn pair(
    packet: &Packet,
    pool: &Pool,
    mut skip: usize,
    pieces: &mut dyn Iterator<Item = (NonNull<u8>, usize)>,
    each: &mut dyn FnMut(NonNull<u8>, NonNull<u8>, usize),
) {
    let mut piece = pieces.next();
    pool.for_each_segment(packet, |buffer, mut len| {
        let left_out = skip.min(len);
        skip -= left_out;
        len -= left_out;
        // SAFETY: `left_out` is at most the length of the buffer.
        let mut buffer = unsafe { buffer.add(left_out) };
        while len > 0 {
            let Some((at, room)) = piece else { return };
            let n = room.min(len);
            each(buffer, at, n);
            len -= n;
            // SAFETY: `n` is at most the number of bytes left in the buffer and in the piece.
            unsafe {
                buffer = buffer.add(n);
                piece = if n < room { Some((at.add(n), room - n)) } else { pieces.next() };
            }
        }
    });
}

/// Packets whose payload is copied in one direction.
#[derive(Debug)]
pub(super) struct Copying<T: 'static> {
    pub(super) queue: CopyQueue<Option<T>>,
    /// Packets that the copy queue has no room for yet.
    waiting: VecDeque<T>,
    /// Packets that were complete on submission. Empty between calls.
    pub(super) done: Vec<T>,
    /// Buffers of all these packets, including packets whose copies are in flight.
    pub(super) held: usize,
}

impl<T: Copied> Copying<T> {
    pub(super) fn new(mover: &mut Mover) -> Self {
        let mut queue = CopyQueue::open(mover, IN_FLIGHT);
        queue.set_lost_after(mover, tsc::ticks(LOST_AFTER));
        Self { queue, waiting: VecDeque::new(), done: Vec::new(), held: 0 }
    }

    /// Adds a packet of `buffers` buffers.
    #[inline]
    pub(super) fn push(&mut self, packet: T, buffers: usize) {
        self.held += buffers;
        self.waiting.push_back(packet);
    }

    /// Returns whether packets wait for room in the copy queue.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the number of packets whose copies are in flight or wait for room.
    pub(super) fn in_flight(&self, mover: &mut Mover) -> usize {
        self.queue.in_flight(mover) + self.waiting.len()
    }

    /// Enters packets while there is room and submits their copies.
    #[inline]
    pub(super) fn submit(&mut self, stack: &Stack, ctx: &mut Context<'_>) {
        let Self { queue, waiting, done, .. } = self;
        let pool = ctx.cache.pool();
        let mut by_core = false;
        while !waiting.is_empty() {
            let mut plan = if by_core { queue.plan_by_core(ctx.mover) } else { queue.plan(ctx.mover) };
            let before = waiting.len();
            match queue.begin(ctx.mover, &mut plan) {
                Begun::Immediate(batch) => enter(batch, stack, pool, waiting, ctx.clock, done),
                Begun::Queued(batch) => enter(batch, stack, pool, waiting, ctx.clock, done),
            }
            let stuck = waiting.len() == before;
            if stuck && by_core {
                return;
            }
            // A packet may need more copies than a channel has room for.
            by_core = stuck;
        }
    }
}

#[inline]
fn enter<T: Copied, const IMMEDIATE: bool>(
    mut batch: Batch<'_, Option<T>, IMMEDIATE>,
    stack: &Stack,
    pool: &Pool,
    waiting: &mut VecDeque<T>,
    clock: &mut StageClock,
    done: &mut Vec<T>,
) {
    let most = batch.packets().min(waiting.len());
    for _ in 0..most {
        let Some(next) = waiting.front() else { break };
        let mut fits = true;
        next.copies(stack, pool, |src, dst, len| {
            fits &= batch.room() > 0;
            if fits {
                batch.copy(src.as_ptr(), dst.as_ptr(), len as u32);
            }
        });
        if !fits {
            batch.cancel();
            break;
        }
        if let Some(next) = waiting.pop_front() {
            done.extend(batch.enter(Some(next)).flatten());
        }
    }
    // SAFETY: the holder owns the packet. The stack keeps the FIFO's blocks until the holder is reported. Blocks of a
    // place are not published yet; blocks of a plan are not written any more.
    unsafe { batch.submit(clock) };
}
