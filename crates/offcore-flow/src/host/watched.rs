//! Reports of a host: counters on the statistics page, interfaces and connections.

use std::sync::{Arc, Mutex};

use offcore_stats::page::{Block, PageError, StatsPage};
use offcore_stats::time::{Micros, Time};
use offcore_stats::{Family, Label};
use offcore_tcp::path::{Path, PathStats};
use offcore_tcp::proto::{DropReason, IfaceInfo, Info, StackCounts};

/// Time between two updates.
const EVERY: Micros = Micros::from_millis(100);
/// Maximum number of connections in a report.
pub const MOST: usize = 1000;

/// The counters of a host's stack and path.
pub static TCP: Family =
    Family::new("tcp", "The TCP/IP stack of a host.", &[&StackCounts::COUNTERS, &PathStats::COUNTERS]);
/// The dropped packets of a host.
pub(crate) static TCP_DROPS: Family =
    Family::new("tcp_drops", "Packets that a host dropped.", &[&DropReason::COUNTERS]);

/// A recent snapshot of a host's state, without its counters.
#[derive(Debug)]
pub struct HostState {
    /// Interfaces, in order of their number.
    pub interfaces: Mutex<Vec<IfaceInfo>>,
    /// The connections of each worker, up to [`MOST`] of them; `None` if reports do not include connections.
    pub connections: Option<Vec<Mutex<Vec<Info>>>>,
}

impl HostState {
    /// Creates the state of a host with `workers` workers.
    pub fn new(workers: usize, with_connections: bool) -> Self {
        let connections = || (0..workers).map(|_| Mutex::default()).collect();
        Self { interfaces: Mutex::default(), connections: with_connections.then(connections) }
    }
}

/// The destinations of a host's reports.
#[derive(Debug)]
pub struct Watched {
    counts: Block,
    drops: Block,
    state: Arc<HostState>,
    /// This worker's number.
    worker: usize,
    /// When the next update is due.
    due: Time,
}

impl Watched {
    /// Creates counters on `page` for worker number `worker`, which runs on `lcore`.
    ///
    /// # Errors
    /// Returns an error if the page is full.
    pub fn new(
        page: &StatsPage,
        lcore: usize,
        state: Arc<HostState>,
        worker: usize,
    ) -> Result<Self, PageError> {
        let counts = page.block(&TCP, &[(Label::Lcore, &lcore)])?;
        let drops = page.block(&TCP_DROPS, &[(Label::Lcore, &lcore)])?;
        Ok(Self { counts, drops, state, worker, due: Time::ZERO })
    }

    /// Reports the state at time `now`, unless the last report is recent.
    pub(super) fn update(&mut self, now: Time, path: &mut Path) {
        if now >= self.due {
            self.due = now + EVERY;
            self.tell(now, path);
        }
    }

    /// Makes the final report.
    pub(super) fn finish(&mut self, now: Time, path: &mut Path) {
        self.due = Time::NEVER;
        self.tell(now, path);
    }

    fn tell(&mut self, now: Time, path: &mut Path) {
        self.counts.set(path.stack.counts().values().into_iter().chain(path.stats().values()));
        self.drops.set(path.stack.drops().iter().map(|(_, count)| count));
        // A reader holds the lock only for a moment, but a worker must not wait for it.
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
