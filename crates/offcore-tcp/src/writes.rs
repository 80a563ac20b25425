//! Writes that an engine makes: from an application's buffer to its send FIFO, shown to the stack when the copy is done.
//!
//! The buffer is borrowed until then. What mTCP's `epping` does by one copy at a time, and without telling the application
//! when it may use the buffer again (Intel Vector Data Streaming Library), is a copy queue here: many writes of many
//! connections are in flight, each connection's are shown in order, and what an engine does not do the core does.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use offcore_dma::mover::MoverError;
use offcore_dma::{Batch, Begun, Binding, Context, CopyQueue, Mover};
use offcore_mem::mapping::Mapping;
use offcore_session::Writer;
use offcore_stats::{StageClock, tsc};

use crate::proto::{ConnId, Stack};

/// Pieces in flight.
const IN_FLIGHT: usize = 256;
/// Bytes of a piece, at most.
const PIECE: usize = 64 << 10;
/// Copies of a piece, at most: it may begin in the small ring, go round there, and go on in two large blocks.
const COPIES: usize = 4;
/// How long a copy may take.
const LOST_AFTER: Duration = Duration::from_millis(50);

/// A piece of a write that is on its way.
#[derive(Debug)]
struct Piece {
    conn: ConnId,
    position: u64,
    len: usize,
    /// The source stays mapped.
    _buffer: Arc<Mapping>,
}

/// The writes of a worker's applications.
#[derive(Debug)]
pub struct Writes {
    queue: CopyQueue<Option<Piece>>,
    /// Pieces that were complete as soon as they were submitted.
    done: Vec<Piece>,
}

impl Writes {
    /// The core copies until this is [bound](Self::bind).
    pub fn open(mover: &mut Mover) -> Self {
        let mut queue = CopyQueue::open(mover, IN_FLIGHT);
        queue.set_lost_after(mover, tsc::ticks(LOST_AFTER));
        Self { queue, done: Vec::new() }
    }

    /// Says who copies.
    ///
    /// # Errors
    /// Channels that are not this mover's, or too many.
    pub fn bind(&mut self, mover: &mut Mover, binding: &Binding) -> Result<(), MoverError> {
        self.queue.bind(mover, binding)
    }

    /// Orders copies of the bytes in `range` of `buffer` to what `writer`, of connection `conn`, has room for; returns how
    /// many bytes. Whoever changes these bytes before [`poll`](Self::poll) has reported them sends what comes of it.
    ///
    /// # Panics
    /// When the range is not in the buffer.
    pub fn write(
        &mut self,
        ctx: &mut Context<'_>,
        stack: &mut Stack,
        conn: ConnId,
        writer: &mut Writer,
        (buffer, range): (&Arc<Mapping>, Range<usize>),
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

    /// Calls `each` with the connection and the bytes of pieces whose copies are done, in the order in which they were
    /// written: they are to be [shown](Writer::show).
    pub fn poll(&mut self, ctx: &mut Context<'_>, stack: &mut Stack, mut each: impl FnMut(ConnId, usize)) {
        let mut report = |piece: Piece| {
            stack.filled(piece.conn, piece.position, piece.len);
            each(piece.conn, piece.len);
        };
        self.done.drain(..).for_each(&mut report);
        let key = |piece: &Option<Piece>| piece.as_ref().map(|piece| piece.conn.index);
        self.queue.take_by_key(ctx.mover, key, |piece| piece.take().into_iter().for_each(&mut report));
    }

    /// Pieces that have not been reported.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        self.queue.in_flight(mover) + self.done.len()
    }
}

/// What is left of a write.
struct Order<'a> {
    stack: &'a mut Stack,
    conn: ConnId,
    writer: &'a mut Writer,
    buffer: &'a Arc<Mapping>,
    left: &'a mut Range<usize>,
}

impl Order<'_> {
    /// Enters as many pieces as there is room for.
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
                // SAFETY: `len` bytes of the buffer are left.
                let src = unsafe { self.buffer.base().add(self.left.start + copied) };
                batch.copy(src.as_ptr(), span.address().as_ptr(), span.len() as u32);
                copied += span.len();
            }
            debug_assert_eq!(copied, len, "what is granted has blocks");
            let piece = Piece { conn: self.conn, position, len, _buffer: Arc::clone(self.buffer) };
            done.extend(batch.enter(Some(piece)).flatten());
            self.left.start += len;
        }
        // SAFETY: the piece keeps the buffer mapped; the stack keeps the FIFO's blocks until the piece is reported, and
        // they are the writer's, who has not shown them.
        unsafe { batch.submit(clock) };
    }
}

#[cfg(test)]
mod tests;
