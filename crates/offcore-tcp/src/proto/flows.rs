//! The table of flows. A flow is a connection, a half-open connection, or a connection in TIME-WAIT.

use super::addr::FlowKey;
use super::conns::Conns;
use super::demux::{Demux, Full};
use super::halves::Halves;
use super::siphash::FlowHash;
use super::timewait::TimeWait;

/// The meaning of a value in the demultiplexer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    Conn(u32),
    Half(u32),
    TimeWait(u32),
}

impl Entry {
    /// Connections have numbers below this.
    const HALF: u32 = 1 << 30;
    const TIME_WAIT: u32 = 1 << 31;

    pub(super) fn value(self) -> u32 {
        match self {
            Self::Conn(index) => index,
            Self::Half(index) => index | Self::HALF,
            Self::TimeWait(index) => index | Self::TIME_WAIT,
        }
    }

    pub(super) fn of(value: u32) -> Self {
        if value & Self::TIME_WAIT != 0 {
            Self::TimeWait(value & !Self::TIME_WAIT)
        } else if value & Self::HALF != 0 {
            Self::Half(value & !Self::HALF)
        } else {
            Self::Conn(value)
        }
    }
}

/// All flows.
#[derive(Debug)]
pub(super) struct Flows {
    hash: FlowHash,
    demux: Demux,
}

impl Flows {
    /// Creates a table with room for `entries` before it grows.
    pub(super) fn new(secret: &[u8; 16], entries: usize) -> Self {
        Self { hash: FlowHash::new(secret), demux: Demux::new(Demux::table(entries)) }
    }

    /// Returns the number of flows.
    pub(super) fn len(&self) -> usize {
        self.demux.len()
    }

    /// Returns the entry of a flow. `key_of` returns the flow of an entry.
    #[inline]
    pub(super) fn find<'a>(
        &self,
        key: &FlowKey,
        key_of: impl Fn(Entry) -> Option<&'a FlowKey>,
    ) -> Option<Entry> {
        let is = |value| key_of(Entry::of(value)) == Some(key);
        self.demux.lookup(self.hash.hash(key), is).map(Entry::of)
    }

    /// Returns a number below `count` for a flow. It is constant, and unpredictable without the secret.
    pub(super) fn spread(&self, key: &FlowKey, count: usize) -> usize {
        (((self.hash.hash(key) >> 32) * count as u64) >> 32) as usize
    }

    /// Adds a new flow.
    ///
    /// # Errors
    /// [`Full`] without any change.
    pub(super) fn enter(&mut self, key: &FlowKey, entry: Entry) -> Result<(), Full> {
        if self.demux.wants_growth() {
            // The flows move later, a few at a time. The kernel clears the pages now, which takes some milliseconds
            // once for a million flows.
            let larger = Demux::table(self.demux.capacity() * 2);
            // This cannot fail: the table is larger, and no growth is in progress.
            let _ = self.demux.grow(larger);
        }
        self.demux.insert(self.hash.hash(key), entry.value())
    }

    /// Replaces the entry of a flow, which needs no room. Returns `false` if the entry does not exist.
    pub(super) fn change(&mut self, key: &FlowKey, from: Entry, to: Entry) -> bool {
        self.demux.replace(self.hash.hash(key), from.value(), to.value())
    }

    /// Removes a flow if it has this entry.
    pub(super) fn leave(&mut self, key: &FlowKey, entry: Entry) {
        self.demux.remove(self.hash.hash(key), entry.value());
    }

    /// Moves some flows to the larger table during growth. Must be called periodically.
    pub(super) fn round(&mut self) {
        self.demux.round();
        drop(self.demux.take_emptied());
    }
}

/// Returns the flow of an entry. The parameters are parts of the stack, so that other parts can be borrowed mutably.
#[inline]
pub(super) fn key_of<'a>(
    conns: &'a Conns,
    halves: &'a Halves,
    time_wait: &'a TimeWait,
    entry: Entry,
) -> Option<&'a FlowKey> {
    match entry {
        Entry::Conn(index) => conns.peek(index).map(|conn| &conn.tcb.key),
        Entry::Half(index) => halves.get(index).map(|half| &half.both.key),
        Entry::TimeWait(index) => time_wait.get(index).map(|entry| &entry.key),
    }
}
