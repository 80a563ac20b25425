//! Connections in TIME-WAIT: 64 bytes each and the links of a queue, in the order in which they expire.
//!
//! TIME-WAIT lasts 60 s for all of them, so the oldest is always the first. A flow is found through the same
//! demultiplexer as a connection: the top bit of its value says that the rest is an index here.

mod segment;

use super::addr::FlowKey;

pub(super) use segment::{Action, Segment};

/// How long TIME-WAIT lasts: two maximum segment lifetimes of 30 s, as in Linux.
const TIME_WAIT_US: u64 = 2 * 30_000_000;

/// The most connections in TIME-WAIT: 18 MiB.
pub(super) const MAX_ENTRIES: u32 = 1 << 18;

/// Milliseconds of TIME-WAIT.
const TIME_WAIT_MS: u32 = (TIME_WAIT_US / 1000) as u32;

/// Milliseconds in TIME-WAIT after which connect() may have the ports again, as in Linux.
const REUSE_MS: u32 = 1000;

/// Milliseconds from one ACK to the next for segments that no well-behaved peer sends in a row (RFC 5961, 7).
const ACK_GAP_MS: u32 = 500;

/// No slot.
const NOBODY: u32 = u32::MAX;

/// In `prev` of a slot without a connection.
const FREE: u32 = u32::MAX - 1;

/// What is left of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// Its ends.
    pub(super) key: FlowKey,
    /// SND.NXT, after this side's FIN.
    pub(super) snd_nxt: u32,
    /// RCV.NXT, after the peer's FIN.
    pub(super) rcv_nxt: u32,
    /// TS.Recent; without meaning where timestamps are off.
    pub(super) ts_recent: u32,
    /// What this side adds to its clock of timestamps.
    pub(super) ts_offset: u32,
    /// The receive window as it is sent, scaled.
    pub(super) window: u16,
    /// Shift of the receive window.
    pub(super) window_scale: u8,
    /// Timestamps are on.
    pub(super) timestamps: bool,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    entry: Ended,
    /// When TIME-WAIT began, in milliseconds. They wrap after 49 days.
    since: u32,
    /// When the last ACK was sent, those for FINs left out, in the same milliseconds.
    acked: u32,
}

/// Neighbours in the queue. Of a free slot: the next free one, and [`FREE`].
#[derive(Clone, Copy, Debug)]
struct Link {
    next: u32,
    prev: u32,
}

/// A connection that [`TimeWait::insert`] added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Inserted {
    /// Its index, the same while it is here.
    pub(super) index: u32,
    /// The oldest connection, with its index, where it had to go. The demultiplexer is to forget it: the new connection
    /// may have its index.
    pub(super) evicted: Option<(u32, FlowKey)>,
}

/// What a new connection between the same ends is to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Previous {
    /// SND.NXT of the old one.
    pub(super) snd_nxt: u32,
}

impl Previous {
    /// The initial sequence number for the new connection: this one, or where it is not past all that the old
    /// connection may have sent, one beyond (RFC 9293, 3.4.3; RFC 1122, 4.2.2.13).
    pub(super) const fn isn(&self, isn: u32) -> u32 {
        let beyond = self.snd_nxt.wrapping_add(0x1_0001);
        if is_before(isn, beyond) { beyond } else { isn }
    }
}

/// The connections of a worker that are in TIME-WAIT.
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
    /// Room for `max` connections, from one to [`MAX_ENTRIES`]. Allocates; the memory is touched as it is used.
    pub(super) fn new(max: u32) -> Self {
        let max = max.clamp(1, MAX_ENTRIES) as usize;
        let (slots, links) = (Vec::with_capacity(max), Vec::with_capacity(max));
        let (oldest, newest, free) = (NOBODY, NOBODY, NOBODY);
        Self { slots, links, max, len: 0, oldest, newest, free, evicted: 0 }
    }

    /// Connections present.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Connections that had to go before their time, for want of room.
    pub(super) const fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Begins TIME-WAIT. Where there is no room, the oldest connection goes.
    pub(super) fn insert(&mut self, now_us: u64, entry: Ended) -> Inserted {
        let mut evicted = None;
        if self.len == self.max
            && let Some(key) = self.get(self.oldest).map(|oldest| oldest.key)
        {
            evicted = Some((self.oldest, key));
            self.remove(self.oldest);
            self.evicted += 1;
        }
        let now = ms(now_us);
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

    /// The connection at an index.
    #[inline]
    pub(super) fn get(&self, index: u32) -> Option<&Ended> {
        let link = self.links.get(index as usize)?;
        (link.prev != FREE).then(|| &self.slots[index as usize].entry)
    }

    /// Ends TIME-WAIT of the connection at an index; false where there is none.
    pub(super) fn remove(&mut self, index: u32) -> bool {
        if self.get(index).is_none() {
            return false;
        }
        self.unlink(index);
        self.links[index as usize] = Link { next: self.free, prev: FREE };
        self.free = index;
        true
    }

    /// Removes connections whose time is over, `at_most` so many, and tells of each; the number of them.
    pub(super) fn expire(
        &mut self,
        now_us: u64,
        at_most: usize,
        mut expired: impl FnMut(u32, &FlowKey),
    ) -> usize {
        let now = ms(now_us);
        let mut count = 0;
        while count < at_most && self.left(now) == Some(0) {
            let index = self.oldest;
            expired(index, &self.slots[index as usize].entry.key);
            self.remove(index);
            count += 1;
        }
        count
    }

    /// When the next connection expires, in microseconds; a millisecond late at most.
    pub(super) fn next_deadline(&self, now_us: u64) -> Option<u64> {
        Some((now_us / 1000 + u64::from(self.left(ms(now_us))?)) * 1000)
    }

    /// What connect() is to know if it takes the ends of this connection again. None within the first second, or without
    /// timestamps, which tell old segments from new and make the peer accept the SYN (RFC 6191).
    pub(super) fn reuse(&self, index: u32, now_us: u64) -> Option<Previous> {
        let entry = self.get(index)?;
        let waited = ms(now_us).wrapping_sub(self.slots[index as usize].since);
        (entry.timestamps && waited >= REUSE_MS).then(|| entry.previous())
    }

    /// Milliseconds that the oldest has left.
    fn left(&self, now: u32) -> Option<u32> {
        let slot = self.slots.get(self.oldest as usize)?;
        Some(TIME_WAIT_MS.saturating_sub(now.wrapping_sub(slot.since)))
    }

    /// Begins TIME-WAIT of a connection anew.
    fn restart(&mut self, index: u32, now: u32) {
        self.slots[index as usize].since = now;
        self.unlink(index);
        self.append(index);
    }

    /// Adds a slot that is in no list to the end of the queue.
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

const fn ms(us: u64) -> u32 {
    (us / 1000) as u32
}

/// Whether a sequence number or timestamp comes before another (RFC 9293, 3.4; RFC 7323, 5.2).
const fn is_before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

#[cfg(test)]
mod tests;
