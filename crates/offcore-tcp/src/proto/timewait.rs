//! Connections in TIME-WAIT: 64 bytes per connection plus the links of a queue, in the order of expiry.
//!
//! TIME-WAIT lasts 60 s for all connections, so the oldest one is always the first to expire. A flow is found through
//! the same demultiplexer as a connection: the top bit of the value marks the rest as an index into this table.

mod segment;

use offcore_stats::time::{Micros, Time};

use super::addr::FlowKey;

pub(super) use segment::{Action, Segment};

/// Duration of TIME-WAIT: two maximum segment lifetimes of 30 s, as in Linux.
const TIME_WAIT: Micros = Micros::from_secs(60);

/// Maximum number of connections in TIME-WAIT: 18 MiB.
pub(super) const MAX_ENTRIES: u32 = 1 << 18;

/// Duration of TIME-WAIT in milliseconds.
const TIME_WAIT_MS: u32 = TIME_WAIT.as_millis() as u32;

/// Time in TIME-WAIT in milliseconds after which connect() may reuse the ports, as in Linux.
const REUSE_MS: u32 = 1000;

/// Minimum interval in milliseconds between ACKs to segments that a well-behaved peer does not repeat (RFC 5961, 7).
const ACK_GAP_MS: u32 = 500;

/// No slot.
const NOBODY: u32 = u32::MAX;

/// The value of `prev` in a slot without a connection.
const FREE: u32 = u32::MAX - 1;

/// The remaining state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// The addresses and ports.
    pub(super) key: FlowKey,
    /// SND.NXT, after this side's FIN.
    pub(super) snd_nxt: u32,
    /// RCV.NXT, after the peer's FIN.
    pub(super) rcv_nxt: u32,
    /// TS.Recent. Undefined without timestamps.
    pub(super) ts_recent: u32,
    /// The offset that this side adds to its timestamp clock.
    pub(super) ts_offset: u32,
    /// The receive window as sent, scaled.
    pub(super) window: u16,
    /// Shift of the receive window.
    pub(super) window_scale: u8,
    /// Timestamps are on.
    pub(super) timestamps: bool,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    entry: Ended,
    /// Start of TIME-WAIT in milliseconds, which wrap after 49 days.
    since: u32,
    /// Time of the last ACK except ACKs of FINs, in the same milliseconds.
    acked: u32,
}

/// Neighbours in the queue. In a free slot: the next free slot, and [`FREE`].
#[derive(Clone, Copy, Debug)]
struct Link {
    next: u32,
    prev: u32,
}

/// The result of [`TimeWait::insert`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Inserted {
    /// The index of the new connection, which stays the same until it is removed.
    pub(super) index: u32,
    /// The oldest connection and its index, if it was evicted. The demultiplexer must remove it, because the new
    /// connection may have the same index.
    pub(super) evicted: Option<(u32, FlowKey)>,
}

/// State that a new connection between the same endpoints needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Previous {
    /// SND.NXT of the old connection.
    pub(super) snd_nxt: u32,
}

impl Previous {
    /// Returns the initial sequence number of the new connection: `isn`, or a number beyond all that the old connection
    /// may have sent if `isn` is not (RFC 9293, 3.4.3; RFC 1122, 4.2.2.13).
    pub(super) const fn isn(&self, isn: u32) -> u32 {
        let beyond = self.snd_nxt.wrapping_add(0x1_0001);
        if is_before(isn, beyond) { beyond } else { isn }
    }
}

/// The connections of a worker in TIME-WAIT.
#[derive(Debug)]
pub(super) struct TimeWait {
    slots: Vec<Slot>,
    links: Vec<Link>,
    max: usize,
    len: usize,
    oldest: u32,
    newest: u32,
    free: u32,
    evicted: u64,
}

impl TimeWait {
    /// Allocates room for `max` connections, from 1 to [`MAX_ENTRIES`]. The memory is touched only when it is used.
    pub(super) fn new(max: u32) -> Self {
        let max = max.clamp(1, MAX_ENTRIES) as usize;
        let (slots, links) = (Vec::with_capacity(max), Vec::with_capacity(max));
        let (oldest, newest, free) = (NOBODY, NOBODY, NOBODY);
        Self { slots, links, max, len: 0, oldest, newest, free, evicted: 0 }
    }

    /// Returns the number of connections.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of connections that were evicted early because the table was full.
    pub(super) const fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Adds a connection. If the table is full, the oldest connection is evicted.
    pub(super) fn insert(&mut self, now: Time, entry: Ended) -> Inserted {
        let mut evicted = None;
        if self.len == self.max
            && let Some(key) = self.get(self.oldest).map(|oldest| oldest.key)
        {
            evicted = Some((self.oldest, key));
            self.remove(self.oldest);
            self.evicted += 1;
        }
        let now = now.wrapping_millis();
        let slot = Slot { entry, since: now, acked: now.wrapping_sub(ACK_GAP_MS) };
        let index = self.free;
        if let Some(link) = self.links.get(index as usize) {
            self.free = link.next;
            self.slots[index as usize] = slot;
            self.append(index);
            return Inserted { index, evicted };
        }
        let index = self.slots.len() as u32;
        self.slots.push(slot);
        self.links.push(Link { next: NOBODY, prev: FREE });
        self.append(index);
        Inserted { index, evicted }
    }

    /// Returns the connection at an index.
    #[inline]
    pub(super) fn get(&self, index: u32) -> Option<&Ended> {
        let link = self.links.get(index as usize)?;
        (link.prev != FREE).then(|| &self.slots[index as usize].entry)
    }

    /// Removes the connection at an index. Returns `false` if the slot is free.
    pub(super) fn remove(&mut self, index: u32) -> bool {
        if self.get(index).is_none() {
            return false;
        }
        self.unlink(index);
        self.links[index as usize] = Link { next: self.free, prev: FREE };
        self.free = index;
        true
    }

    /// Removes up to `at_most` expired connections, calls `expired` for each, and returns their number.
    pub(super) fn expire(
        &mut self,
        now: Time,
        at_most: usize,
        mut expired: impl FnMut(u32, &FlowKey),
    ) -> usize {
        let now = now.wrapping_millis();
        let mut count = 0;
        while count < at_most && self.left(now) == Some(0) {
            let index = self.oldest;
            expired(index, &self.slots[index as usize].entry.key);
            self.remove(index);
            count += 1;
        }
        count
    }

    /// Returns the time when the next connection expires. It is at most a millisecond late.
    pub(super) fn next_deadline(&self, now: Time) -> Option<Time> {
        let left = self.left(now.wrapping_millis())?;
        Some(Time::from_millis(now.as_millis() + u64::from(left)))
    }

    /// Returns the state that connect() needs to reuse the endpoints of this connection. Returns `None` within the
    /// first second, or without timestamps, which distinguish old and new segments and make the peer accept the SYN
    /// (RFC 6191).
    pub(super) fn reuse(&self, index: u32, now: Time) -> Option<Previous> {
        let entry = self.get(index)?;
        let waited = now.wrapping_millis().wrapping_sub(self.slots[index as usize].since);
        (entry.timestamps && waited >= REUSE_MS).then(|| entry.previous())
    }

    /// Returns the remaining milliseconds of the oldest connection.
    fn left(&self, now: u32) -> Option<u32> {
        let slot = self.slots.get(self.oldest as usize)?;
        Some(TIME_WAIT_MS.saturating_sub(now.wrapping_sub(slot.since)))
    }

    /// Restarts TIME-WAIT of a connection.
    fn restart(&mut self, index: u32, now: u32) {
        self.slots[index as usize].since = now;
        self.unlink(index);
        self.append(index);
    }

    /// Appends an unlinked slot to the queue.
    fn append(&mut self, index: u32) {
        let prev = self.newest;
        self.links[index as usize] = Link { next: NOBODY, prev };
        match self.links.get_mut(prev as usize) {
            Some(link) => link.next = index,
            None => self.oldest = index,
        }
        self.newest = index;
        self.len += 1;
    }

    fn unlink(&mut self, index: u32) {
        let Link { next, prev } = self.links[index as usize];
        match self.links.get_mut(prev as usize) {
            Some(link) => link.next = next,
            None => self.oldest = next,
        }
        match self.links.get_mut(next as usize) {
            Some(link) => link.prev = prev,
            None => self.newest = prev,
        }
        self.len -= 1;
    }
}

impl Ended {
    fn previous(&self) -> Previous {
        Previous { snd_nxt: self.snd_nxt }
    }
}

/// Returns whether a sequence number or timestamp precedes another (RFC 9293, 3.4; RFC 7323, 5.2).
const fn is_before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

#[cfg(test)]
mod tests;
