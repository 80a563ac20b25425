//! What a worker lends one of its queues for one call.

use offcore_mem::PoolCache;
use offcore_stats::StageClock;

use crate::Mover;

/// What a worker lends one of its queues for one call.
#[derive(Debug)]
pub struct Context<'a> {
    /// The worker's engines.
    pub mover: &'a mut Mover,
    /// The worker's free packet buffers.
    pub cache: &'a mut PoolCache,
    pub clock: &'a mut StageClock,
    /// Packets to receive in one call, at most [`BURST`](offcore_mem::BURST).
    pub burst: usize,
}
