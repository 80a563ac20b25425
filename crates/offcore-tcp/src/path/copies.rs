//! The copies between packets and FIFOs, entered into the copy queues.

use std::collections::VecDeque;
use std::ptr::NonNull;

use offcore_dma::{Batch, Begun, Context, CopyQueue};
use offcore_mem::{Packet, Pool};
use offcore_stats::StageClock;

use super::{Placing, Sending};
use crate::proto::Stack;

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

/// Enters packets from `waiting` while there is room and submits their copies. Packets that are complete on submission
/// are moved to `done`.
#[inline]
pub(super) fn submit<T: Copied>(
    queue: &mut CopyQueue<Option<T>>,
    stack: &Stack,
    waiting: &mut VecDeque<T>,
    ctx: &mut Context<'_>,
    done: &mut Vec<T>,
) {
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
