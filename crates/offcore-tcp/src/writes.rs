//! Offloaded writes: an engine copies from an application's buffer to the send FIFO. The bytes are published to the
//! stack when the copy is complete.
//!
//! The buffer is borrowed until then. mTCP's `epping` (Intel Vector Data Streaming Library) makes one copy at a time
//! and does not report when the application may reuse the buffer. This module uses a copy queue instead: many writes of
//! many connections are in flight, the writes of each connection are published in order, and the core makes the copies
//! that the engine does not.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use offcore_dma::mover::MoverError;
use offcore_dma::{Batch, Begun, Binding, Context, CopyQueue, Mover};
use offcore_mem::mapping::Mapping;
use offcore_session::Writer;
use offcore_stats::{StageClock, tsc};

use crate::proto::{ConnId, Stack};

/// Maximum number of pieces in flight.
const IN_FLIGHT: usize = 256;
/// Maximum length of a piece in bytes.
const PIECE: usize = 64 << 10;
/// Maximum number of copies per piece: a piece may begin in the small ring, wrap around there, and continue in two
/// large blocks.
const COPIES: usize = 4;
/// Time after which a copy counts as lost.
const LOST_AFTER: Duration = Duration::from_millis(50);

/// A piece of a write in flight.
#[derive(Debug)]
struct Piece {
    conn: ConnId,
    position: u64,
    len: usize,
    /// Keeps the source mapped.
    _buffer: Arc<Mapping>,
}

/// The writes of a worker's applications.
#[derive(Debug)]
pub struct Writes {
    queue: CopyQueue<Option<Piece>>,
    /// Pieces that were complete on submission.
    done: Vec<Piece>,
}

impl Writes {
    /// Opens a copy queue. The core makes all copies until it is [bound](Self::bind) to channels.
    pub fn open(mover: &mut Mover) -> Self {
        let mut queue = CopyQueue::open(mover, IN_FLIGHT);
        queue.set_lost_after(mover, tsc::ticks(LOST_AFTER));
        Self { queue, done: Vec::new() }
    }

    /// Selects the channels that make the copies.
    ///
    /// # Errors
    /// Fails if a channel does not belong to this mover, or if there are too many channels.
    pub fn bind(&mut self, mover: &mut Mover, binding: &Binding) -> Result<(), MoverError> {
        self.queue.bind(mover, binding)
    }

    /// Submits copies of the bytes in `range` of `buffer` to the FIFO of `writer`, which belongs to connection `conn`.
    /// Returns the number of bytes that the FIFO has room for. If the bytes change before [`poll`](Self::poll) reports
    /// them, the connection sends undefined data.
    ///
    /// # Panics
    /// Panics if the range exceeds the buffer.
    pub fn write(
        &mut self,
        ctx: &mut Context<'_>,
        stack: &mut Stack,
        conn: ConnId,
        writer: &mut Writer,
        buffer: &Arc<Mapping>,
        range: Range<usize>,
    ) -> usize {
        assert!(range.start <= range.end && range.end <= buffer.len(), "{range:?} of {} bytes", buffer.len());
        let mut left = range;
        let before = left.len();
        while !left.is_empty() {
            let Self { queue, done } = self;
            let mut plan = queue.plan(ctx.mover);
            let started = left.start;
            let mut order = Order { stack, conn, writer, buffer, left: &mut left };
            match queue.begin(ctx.mover, &mut plan) {
                Begun::Immediate(batch) => order.submit(batch, ctx.clock, done),
                Begun::Queued(batch) => order.submit(batch, ctx.clock, done),
            }
            if left.start == started {
                break;
            }
        }
        before - left.len()
    }

    /// Calls `each` with the connection and the number of bytes of each completed piece, in the order of the writes.
    /// The caller must then [show](Writer::show) the bytes.
    pub fn poll(&mut self, ctx: &mut Context<'_>, stack: &mut Stack, mut each: impl FnMut(ConnId, usize)) {
        let mut report = |piece: Piece| {
            stack.filled(piece.conn, piece.position, piece.len);
            each(piece.conn, piece.len);
        };
        self.done.drain(..).for_each(&mut report);
        let key = |piece: &Option<Piece>| piece.as_ref().map(|piece| piece.conn.index);
        self.queue.take_by_key(ctx.mover, key, |piece| piece.take().into_iter().for_each(&mut report));
    }

    /// Returns the number of pieces that have not been reported.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        self.queue.in_flight(mover) + self.done.len()
    }
}

/// The rest of a write.
struct Order<'a> {
    stack: &'a mut Stack,
    conn: ConnId,
    writer: &'a mut Writer,
    buffer: &'a Arc<Mapping>,
    left: &'a mut Range<usize>,
}

impl Order<'_> {
    /// Enters as many pieces as fit.
    fn submit<const IMMEDIATE: bool>(
        &mut self,
        mut batch: Batch<'_, Option<Piece>, IMMEDIATE>,
        clock: &mut StageClock,
        done: &mut Vec<Piece>,
    ) {
        for _ in 0..batch.packets() {
            if batch.room() < COPIES {
                break;
            }
            let (position, wanted) = (self.writer.position(), self.left.len().min(PIECE));
            let len = self.writer.space().min(wanted);
            if len == 0 || self.stack.filling(self.conn, position, len).is_err() {
                break;
            }
            let mut copied = 0;
            for span in self.writer.spans(len) {
                // SAFETY: `left.start + copied` does not exceed the buffer, because `len` bytes from `left.start` are
                // in the buffer.
                let src = unsafe { self.buffer.base().add(self.left.start + copied) };
                batch.copy(src.as_ptr(), span.address().as_ptr(), span.len() as u32);
                copied += span.len();
            }
            debug_assert_eq!(copied, len, "what is granted has blocks");
            let piece = Piece { conn: self.conn, position, len, _buffer: Arc::clone(self.buffer) };
            done.extend(batch.enter(Some(piece)).flatten());
            self.left.start += len;
        }
        // SAFETY: the piece keeps the buffer mapped. The stack keeps the FIFO's blocks until the piece is reported.
        // Only the writer accesses them, because it has not published them.
        unsafe { batch.submit(clock) };
    }
}

#[cfg(test)]
mod tests;
