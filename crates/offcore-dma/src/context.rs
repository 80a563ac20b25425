//! The resources that a worker lends to a queue for one call.

use offcore_mem::PoolCache;
use offcore_stats::StageClock;

use crate::Mover;

/// The resources that a worker lends to a queue for one call.
#[derive(Debug)]
pub struct Context<'a> {
    /// The worker's engines.
    pub mover: &'a mut Mover,
    /// The worker's free packet buffers.
    pub cache: &'a mut PoolCache,
    pub clock: &'a mut StageClock,
    /// Maximum number of packets to receive in one call; not more than [`BURST`](offcore_mem::BURST).
    pub burst: usize,
}
