//! The core with the channel interface: copies are made when they are submitted.

use super::Copier;
use crate::channel::{
    Channel, ChannelCapabilities, ChannelInfo, ChannelStats, Completions, CopyDevice, CopyOp, EngineError,
    Ledger, Reset,
};

const NAME: &str = "cpu";
const MAX_RING: usize = 1 << 15;

/// The device `cpu`: any number of channels, each used by the core that owns it.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuDevice;

impl CopyDevice for CpuDevice {
    fn name(&self) -> &str {
        NAME
    }

    fn open_channel(&self, ring_size: usize) -> Result<Box<dyn Channel>, EngineError> {
        Ok(Box::new(CpuChannel::new(ring_size)?))
    }
}

/// A channel whose copies the calling core makes inside [`Channel::copy`]. The next poll reports their completion.
#[derive(Debug)]
pub struct CpuChannel {
    info: ChannelInfo,
    copier: Copier,
    /// Copies made and not yet reported, from `reported` to `accepted`, at their cursor modulo the ring size.
    ring: Box<[CopyOp]>,
    accepted: u64,
    reported: u64,
    ledger: Ledger,
}

impl CpuChannel {
    /// Creates a channel with room for `ring_size` copies.
    ///
    /// # Errors
    /// [`EngineError::RingSize`] if `ring_size` is not a power of two from 1 to 32768.
    pub fn new(ring_size: usize) -> Result<Self, EngineError> {
        if !ring_size.is_power_of_two() || ring_size > MAX_RING {
            return Err(EngineError::RingSize {
                device: NAME.into(),
                found: ring_size,
                min: 1,
                max: MAX_RING,
            });
        }
        Ok(Self {
            info: ChannelInfo {
                name: NAME.into(),
                ring_size,
                max_len: u32::MAX,
                capabilities: ChannelCapabilities { synchronous: true, ..ChannelCapabilities::default() },
            },
            copier: Copier::default(),
            ring: vec![CopyOp::NONE; ring_size].into(),
            accepted: 0,
            reported: 0,
            ledger: Ledger::default(),
        })
    }

    fn outstanding(&self) -> impl Iterator<Item = CopyOp> {
        (self.reported..self.accepted).map(|cursor| self.ring[self.index(cursor)])
    }

    #[inline(always)]
    fn index(&self, cursor: u64) -> usize {
        // The mask keeps the index below the ring's length, whatever the cast truncates.
        (cursor as usize) & (self.ring.len() - 1)
    }
}

impl Channel for CpuChannel {
    fn info(&self) -> &ChannelInfo {
        &self.info
    }

    fn room(&self) -> usize {
        self.ring.len() - self.in_flight()
    }

    fn in_flight(&self) -> usize {
        (self.accepted - self.reported) as usize
    }

    unsafe fn copy(&mut self, ops: &[CopyOp]) -> usize {
        let ops = &ops[..ops.len().min(self.room())];
        // SAFETY: the memory of each copy is valid now, as the caller guarantees.
        unsafe { self.copier.copy_burst(ops) };
        for &op in ops {
            let at = self.index(self.accepted);
            self.ring[at] = op;
            self.accepted += 1;
        }
        self.ledger.accept(ops.len(), ops.iter().map(|op| u64::from(op.len)).sum());
        ops.len()
    }

    fn submit(&mut self) {}

    fn poll(&mut self, completions: &mut Completions) {
        let n = self.in_flight().min(completions.tokens.remaining_capacity());
        for _ in 0..n {
            completions.tokens.push(self.ring[self.index(self.reported)].token);
            self.reported += 1;
        }
    }

    fn reset(&mut self) -> Reset {
        Reset::Done
    }

    fn take_outstanding(&mut self, outstanding: &mut Vec<CopyOp>) {
        let first = outstanding.len();
        outstanding.extend(self.outstanding());
        self.ledger.fail(&outstanding[first..]);
        self.reported = self.accepted;
    }

    fn stats(&self) -> ChannelStats {
        self.ledger.stats(self.outstanding())
    }
}
