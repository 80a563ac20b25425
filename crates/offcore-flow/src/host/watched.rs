//! Reports of a host: counters on the statistics page, interfaces and connections.

use std::sync::{Arc, Mutex};

use offcore_stats::named::joined;
use offcore_stats::page::{Block, PageError, StatsPage};
use offcore_tcp::path::{Path, PathStats};
use offcore_tcp::proto::{DropReason, IfaceInfo, Info, StackCounts};

/// Microseconds between two updates.
const EVERY: u64 = 100_000;
/// Connections that are told of, at most.
pub const MOST: usize = 1000;

/// Counters of a host: the stack's, packets that were not made for want of buffers, and parts of packets that were not put
/// together.
pub const HOST_COUNTERS: [&str; StackCounts::NAMES.len() + 2] =
    joined(StackCounts::NAMES, ["starved", "fragments_dropped"]);

/// A host's state a moment ago, without its counters.
#[derive(Debug)]
pub struct HostState {
    /// By interface.
    pub interfaces: Mutex<Vec<IfaceInfo>>,
    /// Each worker's connections, [`MOST`] of them; none unless reports have them.
    pub connections: Option<Vec<Mutex<Vec<Info>>>>,
}

impl HostState {
    /// The state of a host of `workers` workers.
    pub fn new(workers: usize, with_connections: bool) -> Self {
        let connections = || (0..workers).map(|_| Mutex::default()).collect();
        Self { interfaces: Mutex::default(), connections: with_connections.then(connections) }
    }
}

/// Where a host's counters go.
#[derive(Debug)]
pub struct Watched {
    counts: Block,
    drops: Block,
    state: Arc<HostState>,
    /// This worker's number.
    worker: usize,
    /// When they are to be updated.
    due: u64,
}

impl Watched {
    /// Counters on `page` of worker number `worker`, which is on `lcore`.
    ///
    /// # Errors
    /// When the page is full.
    pub fn new(
        page: &StatsPage,
        lcore: usize,
        state: Arc<HostState>,
        worker: usize,
    ) -> Result<Self, PageError> {
        let counts = page.block(&format!("lcore{lcore}/tcp"), &HOST_COUNTERS)?;
        let drops = page.block(&format!("lcore{lcore}/tcp_drops"), DropReason::NAMES)?;
        Ok(Self { counts, drops, state, worker, due: 0 })
    }

    /// Tells how the host is `now`, unless that was told just before.
    pub(super) fn update(&mut self, now: u64, path: &mut Path) {
        if now >= self.due {
            self.due = now + EVERY;
            self.tell(now, path);
        }
    }

    /// Tells how the host is at last: nothing is told any more.
    pub(super) fn finish(&mut self, now: u64, path: &mut Path) {
        self.due = u64::MAX;
        self.tell(now, path);
    }

    fn tell(&mut self, now: u64, path: &mut Path) {
        let PathStats { starved, fragments_dropped } = path.stats();
        self.counts.set(path.stack.counts().values().into_iter().chain([starved, fragments_dropped]));
        self.drops.set(path.stack.drops().iter().map(|(_, count)| count));
        // Whoever reads them has them for a moment only; a worker does not wait for that.
        let HostState { interfaces, connections } = &*self.state;
        if self.worker == 0
            && let Ok(mut interfaces) = interfaces.try_lock()
        {
            *interfaces = path.stack.interfaces(now);
        }
        if let Some(connections) = connections
            && let Ok(mut connections) = connections[self.worker].try_lock()
        {
            connections.clear();
            connections.extend(path.stack.all().take(MOST).filter_map(|conn| path.stack.info(conn)));
        }
    }
}
