//! The submitter's side of a copying core.

use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use offcore_ring::spsc::{self, Producer};

use super::{Engine, MAX_RING};
use crate::channel::{
    Channel, ChannelCapabilities, ChannelInfo, ChannelStats, Completions, CopyOp, EngineError, Ledger, Reset,
    Token,
};

/// A channel to a copying core.
#[derive(Debug)]
pub struct CoreChannel {
    ring: Producer<CopyOp>,
    /// Tokens of the operations in the ring, at the same index.
    tokens: Box<[Token]>,
    /// Cursor of the operations reported since the channel was opened. Later operations are in flight.
    reported: usize,
    ledger: Ledger,
    info: ChannelInfo,
    withdrawn: Arc<AtomicBool>,
    engine: Engine,
}

impl CoreChannel {
    pub(super) fn open(engine: &Engine, ring_size: usize) -> Result<Self, EngineError> {
        let name = engine.shared.name.clone();
        let refused = EngineError::RingSize { device: name.clone(), found: ring_size, min: 1, max: MAX_RING };
        if ring_size > MAX_RING {
            return Err(refused);
        }
        let Ok((ring, consumer)) = spsc::ring(ring_size) else { return Err(refused) };
        let withdrawn = Arc::new(AtomicBool::new(false));
        engine.shared.hand_over(consumer, Arc::clone(&withdrawn))?;
        Ok(Self {
            ring,
            tokens: vec![0; ring_size].into(),
            reported: 0,
            ledger: Ledger::default(),
            info: ChannelInfo {
                name,
                ring_size,
                max_len: u32::MAX,
                capabilities: ChannelCapabilities::default(),
            },
            withdrawn,
            engine: engine.clone(),
        })
    }

    /// Writes descriptors for as many of `ops` as fit.
    #[inline(always)]
    fn write(&mut self, ops: &[CopyOp]) -> usize {
        let max = ops.len().min(self.room());
        let from = self.ring.written() & (self.tokens.len() - 1);
        let (first, second) = self.ring.spare(max);
        let n = first.len() + second.len();
        let (head, tail) = ops[..n].split_at(first.len());
        let mut bytes = 0;
        let mut write = |slots: &mut [MaybeUninit<CopyOp>], tokens: &mut [Token], ops: &[CopyOp]| {
            for ((slot, token), op) in slots.iter_mut().zip(tokens).zip(ops) {
                bytes += u64::from(op.len);
                slot.write(*op);
                *token = op.token;
            }
        };
        write(first, &mut self.tokens[from..from + head.len()], head);
        write(second, &mut self.tokens[..tail.len()], tail);
        // SAFETY: the `n` spare slots have just been written, and as many tokens.
        unsafe { self.ring.advance(n) };
        self.ledger.accept(n, bytes);
        n
    }

    /// Returns the copies in flight.
    fn outstanding(&self) -> impl Iterator<Item = CopyOp> {
        // SAFETY: `write` initializes every slot up to the written cursor.
        (self.reported..self.ring.written()).filter_map(|cursor| unsafe { self.ring.get(cursor) })
    }
}

impl Channel for CoreChannel {
    fn info(&self) -> &ChannelInfo {
        &self.info
    }

    #[inline]
    fn room(&self) -> usize {
        // Usually the reported operations limit the room, because their token slots are free. Slots of operations that
        // were taken out before they were made become free later.
        let taken = self.ring.written() - self.reported.min(self.ring.released_seen());
        self.tokens.len() - taken
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.ring.written() - self.reported
    }

    unsafe fn copy(&mut self, ops: &[CopyOp]) -> usize {
        self.write(ops)
    }

    fn submit(&mut self) {
        self.ring.publish();
    }

    fn poll(&mut self, completions: &mut Completions) {
        let mut released = self.ring.released_seen();
        if released != self.ring.published() {
            released = self.ring.released();
        }
        // Operations that were taken out are not reported, so `reported` may be ahead.
        let n = released.saturating_sub(self.reported).min(completions.tokens.remaining_capacity());
        let from = self.reported & (self.tokens.len() - 1);
        let first = n.min(self.tokens.len() - from);
        for tokens in [&self.tokens[from..from + first], &self.tokens[..n - first]] {
            // The list has room for `n` tokens, so both parts fit.
            let _ = completions.tokens.try_extend_from_slice(tokens);
        }
        self.reported += n;
        // The next burst is expected to be about as long as the completed one. Its slots are prefetched here and not
        // after the submission, because the engine's hardware prefetcher, busy with the submitted slots, would take the
        // lines away again.
        self.ring.prefetch(n);
    }

    fn reset(&mut self) -> Reset {
        // Accepted operations that were not submitted must not run later, so they are submitted now.
        self.ring.publish();
        // The liveness of the engine is read first: an engine that is not alive released nothing afterwards.
        let alive = self.engine.shared.is_alive();
        if !alive || self.ring.released() == self.ring.published() { Reset::Done } else { Reset::Pending }
    }

    fn take_outstanding(&mut self, outstanding: &mut Vec<CopyOp>) {
        let first = outstanding.len();
        outstanding.extend(self.outstanding());
        self.ledger.fail(&outstanding[first..]);
        self.reported = self.ring.written();
    }

    fn stats(&self) -> ChannelStats {
        self.ledger.stats(self.outstanding())
    }
}

impl Drop for CoreChannel {
    fn drop(&mut self) {
        self.engine.shared.withdraw(&self.withdrawn);
    }
}
