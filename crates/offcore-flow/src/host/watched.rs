//! What a host tells of itself: counters on the statistics page, and its connections.

use std::sync::{Arc, Mutex};

use offcore_stats::named::joined;
use offcore_stats::page::{Block, PageError, StatsPage};
use offcore_tcp::path::{Path, PathStats};
use offcore_tcp::proto::{DropReason, Info, StackCounts};

/// Microseconds between two updates.
const EVERY: u64 = 100_000;
/// Connections that are told of, at most.
pub const MOST: usize = 1000;

/// Counters of a host: the stack's, packets that were not made for want of buffers, and parts of packets that were not put
/// together.
pub const HOST_COUNTERS: [&str; StackCounts::NAMES.len() + 2] =
    joined(StackCounts::NAMES, ["starved", "fragments_dropped"]);

/// Each worker's connections as they were a moment ago, [`MOST`] of them.
pub type Connections = Arc<[Mutex<Vec<Info>>]>;

/// Where a host's counters go.
#[derive(Debug)]
pub struct Watched {
    counts: Block,
    drops: Block,
    /// And this worker's number among them.
    connections: Option<(Connections, usize)>,
    /// When they are to be updated.
    due: u64,
}

impl Watched {
    /// Counters on `page` of the host of `lcore`.
    ///
    /// # Errors
    /// When the page is full.
    pub fn new(
        page: &StatsPage,
        lcore: usize,
        connections: Option<(Connections, usize)>,
    ) -> Result<Self, PageError> {
        let counts = page.block(&format!("lcore{lcore}/tcp"), &HOST_COUNTERS)?;
        let drops = page.block(&format!("lcore{lcore}/tcp_drops"), DropReason::NAMES)?;
        Ok(Self { counts, drops, connections, due: 0 })
    }

    /// Tells how the host is `now`, unless that was told just before.
    pub(super) fn update(&mut self, now: u64, path: &mut Path) {
        if now >= self.due {
            self.due = now + EVERY;
            self.tell(path);
        }
    }

    /// Tells how the host is at last: nothing is told any more.
    pub(super) fn finish(&mut self, path: &mut Path) {
        self.due = u64::MAX;
        self.tell(path);
    }

    fn tell(&mut self, path: &mut Path) {
        let PathStats { starved, fragments_dropped } = path.stats();
        self.counts.set(path.stack.counts().values().into_iter().chain([starved, fragments_dropped]));
        self.drops.set(path.stack.drops().iter().map(|(_, count)| count));
        // Whoever reads them has them for a moment only; a worker does not wait for that.
        if let Some((connections, worker)) = &self.connections
            && let Ok(mut connections) = connections[*worker].try_lock()
        {
            connections.clear();
            connections.extend(path.stack.all().take(MOST).filter_map(|conn| path.stack.info(conn)));
        }
    }
}
