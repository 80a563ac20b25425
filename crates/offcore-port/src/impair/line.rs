//! One direction of one queue: what becomes of each packet, and when it leaves.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use arrayvec::ArrayVec;
use offcore_mem::{BURST, Burst, Packet, Pool, PoolCache};
use offcore_stats::page::Block;
use offcore_stats::{SplitMix, named};
use offcore_wire::checksum;

use crate::DropReason;
use crate::duplicate::Duplicator;
use crate::offload_fallback::header;
use crate::spec::ImpairSpec;

/// Packets that overtake one which is to be reordered, at most.
const OVERTAKING: u64 = 5;
/// A second by this is how long a packet waits to be overtaken, at most: one millisecond.
const OVERTAKEN_WITHIN: u64 = 1_000;
/// Packets that wait to be overtaken, at most: further ones keep their places.
const MOST_BACK: usize = 32;
/// A second by this is how much of an unused rate is made up for at once: one millisecond's.
const BUCKET: u64 = 1_000;
/// When everything that is held leaves.
pub(super) const END_OF_TIME: u64 = u64::MAX;

named! {
    /// What a direction of a queue counts, in the block `PORT/impair_rxN` or `PORT/impair_txN`.
    pub(super) enum Count {
        /// Packets dropped.
        Lost = "lost",
        /// Packets that others have overtaken on purpose.
        Reordered = "reordered",
        /// Packets of which a copy was sent.
        Duplicated = "duplicated",
        /// Packets of which a bit was changed.
        Corrupted = "corrupted",
        /// Packets dropped since as many were held as may be.
        TooMany = "too_many",
    }
}

/// What is done to packets. Times are in ticks.
#[derive(Clone, Copy, Debug)]
struct Impairments {
    loss: f64,
    reorder: f64,
    duplicate: f64,
    corrupt: f64,
    delay: u64,
    jitter: u64,
    overtaken_within: u64,
}

/// A packet until it leaves.
#[derive(Debug)]
struct Held {
    due: u64,
    /// Tells packets apart that are due at the same time.
    serial: u64,
    /// How many packets are to overtake it.
    overtaking: u64,
    packet: Packet,
}

/// The greatest is due first.
impl Ord for Held {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.serial).cmp(&(self.due, self.serial))
    }
}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Held {}

/// A packet that waits to be overtaken, until `due` at most.
#[derive(Debug)]
struct Back {
    held: Held,
    overtaken: bool,
}

/// One direction of one queue.
#[derive(Debug)]
pub(super) struct Line {
    impairments: Impairments,
    rate: Option<Bucket>,
    random: SplitMix,
    /// Has room for all that may be held.
    held: BinaryHeap<Held>,
    back: ArrayVec<Back, MOST_BACK>,
    serial: u64,
    /// Packet buffers held, and how many may be.
    buffers: usize,
    limit: usize,
    /// Who fills it looks whether it has room: nothing is dropped for want of it.
    waited_for: bool,
    duplicator: Duplicator,
    pool: &'static Pool,
    counts: Block,
}

impl Line {
    /// A line as `spec` describes it at `hz` ticks a second, which holds `limit` packet buffers of `pool` at most.
    /// Lines with different numbers have different random numbers.
    pub(super) fn new(
        spec: &ImpairSpec,
        number: u64,
        hz: u64,
        limit: usize,
        pool: &'static Pool,
        counts: Block,
    ) -> Self {
        let ticks = |time: std::time::Duration| (time.as_secs_f64() * hz as f64) as u64;
        let impairments = Impairments {
            loss: spec.loss.probability(),
            reorder: spec.reorder.probability(),
            duplicate: spec.duplicate.probability(),
            corrupt: spec.corrupt.probability(),
            delay: ticks(spec.delay),
            jitter: ticks(spec.jitter),
            overtaken_within: hz / OVERTAKEN_WITHIN,
        };
        Self {
            impairments,
            rate: spec.rate.map(|rate| Bucket::new(rate, hz)),
            random: SplitMix::new(spec.seed ^ (number + 1) << 48),
            // Who waits may bring a burst, and as many copies, when it is half full.
            held: BinaryHeap::with_capacity(limit + 2 * BURST),
            back: ArrayVec::new(),
            serial: 0,
            buffers: 0,
            limit,
            waited_for: false,
            duplicator: Duplicator::default(),
            pool,
            counts,
        }
    }

    /// Packets that are held.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.held.len() + self.back.len()
    }

    /// Whether who waits for it may bring more. From now on nothing is dropped since too much is held.
    pub(super) fn has_room(&mut self) -> bool {
        self.waited_for = true;
        self.buffers < self.limit / 2
    }

    /// Takes a packet that comes at `now`; says why, if it is dropped, and has freed it then.
    #[inline]
    pub(super) fn take(&mut self, packet: Packet, now: u64, cache: &mut PoolCache) -> Result<(), DropReason> {
        let Impairments { loss, duplicate, .. } = self.impairments;
        if self.random.happens(loss) {
            cache.free(packet);
            self.count(Count::Lost);
            return Err(DropReason::Impaired);
        }
        let mut copies = Burst::new();
        if self.random.happens(duplicate) {
            // Without a packet buffer for it there is none.
            let _ = self.duplicator.duplicate([&packet], cache, &mut copies);
        }
        self.hold(packet, now, cache)?;
        for copy in copies {
            if self.hold(copy, now, cache).is_ok() {
                self.count(Count::Duplicated);
            }
        }
        Ok(())
    }

    #[inline]
    fn hold(&mut self, mut packet: Packet, now: u64, cache: &mut PoolCache) -> Result<(), DropReason> {
        let buffers = self.pool.segment_count(&packet);
        if self.buffers + buffers > self.limit && !self.waited_for {
            cache.free(packet);
            self.count(Count::TooMany);
            return Err(DropReason::Full);
        }
        let Impairments { reorder, corrupt, delay, jitter, .. } = self.impairments;
        if self.random.happens(corrupt) {
            self.corrupt(&mut packet);
        }
        let overtaking = match self.random.happens(reorder) {
            true => 1 + self.random.below(OVERTAKING),
            false => 0,
        };
        let begin = match &mut self.rate {
            None => now,
            Some(bucket) => bucket.begin(now, self.pool.total_len(&packet)),
        };
        let spread = if jitter == 0 { 0 } else { self.random.below(2 * jitter + 1) };
        let due = begin + (delay + spread).saturating_sub(jitter);
        self.serial += 1;
        self.buffers += buffers;
        self.held.push(Held { due, serial: self.serial, overtaking, packet });
        Ok(())
    }

    /// Changes one bit. A checksum that was open is completed first and is a wrong one then, as are all that cover the bit.
    #[cold]
    fn corrupt(&mut self, packet: &mut Packet) {
        if packet.has_offload() {
            let header = header(packet);
            if header.needs_checksum() {
                let parts = self.pool.segments_mut(packet);
                // A header that makes no sense: the packet is broken as it is.
                let _ = checksum::complete_parts(parts, header.csum_start, header.csum_offset);
            }
            packet.set_offload(false);
        }
        let bits = self.pool.total_len(packet) as u64 * 8;
        if bits == 0 {
            return;
        }
        let bit = self.random.below(bits);
        let mut at = (bit / 8) as usize;
        for part in self.pool.segments_mut(packet) {
            if let Some(byte) = part.get_mut(at) {
                *byte ^= 1 << (bit % 8);
                break;
            }
            at -= part.len();
        }
        self.count(Count::Corrupted);
    }

    /// Appends to `burst` what leaves at `now`, until it has `most` packets. At [`END_OF_TIME`] everything does.
    #[inline]
    pub(super) fn give(&mut self, now: u64, most: usize, burst: &mut Burst) {
        while burst.len() < most.min(burst.capacity()) {
            let Some(packet) = self.next(now) else { return };
            self.buffers -= self.pool.segment_count(&packet);
            burst.push(packet);
        }
    }

    /// The next packet that leaves at `now`.
    fn next(&mut self, now: u64) -> Option<Packet> {
        loop {
            let done = |back: &Back| back.held.overtaking == 0 || back.held.due <= now;
            if let Some(at) = self.back.iter().position(done) {
                let Back { held, overtaken } = self.back.remove(at);
                if overtaken {
                    self.count(Count::Reordered);
                }
                return Some(held.packet);
            }
            if self.held.peek().is_none_or(|first| first.due > now) {
                return None;
            }
            let mut held = self.held.pop()?;
            if held.overtaking == 0 || self.back.is_full() {
                for back in &mut self.back {
                    back.held.overtaking -= 1;
                    back.overtaken = true;
                }
                return Some(held.packet);
            }
            held.due = now.saturating_add(self.impairments.overtaken_within);
            self.back.push(Back { held, overtaken: false });
        }
    }

    /// When the next packet leaves, if any is held.
    pub(super) fn due(&self) -> Option<u64> {
        let back = self.back.iter().map(|back| back.held.due).min();
        self.held.peek().map(|first| first.due).into_iter().chain(back).min()
    }

    /// Frees packets that were given and came no further.
    pub(super) fn free_all(&self, burst: &mut Burst) {
        if !burst.is_empty() {
            self.pool.cache().free_all(burst.drain(..));
        }
    }

    fn count(&self, count: Count) {
        self.counts.counter(count as usize).add(1);
    }
}

/// Who goes without having drained the line gets no more packets, but the pool gets its buffers.
impl Drop for Line {
    fn drop(&mut self) {
        if self.len() > 0 {
            let mut cache = self.pool.cache();
            cache.free_all(self.held.drain().map(|held| held.packet));
            cache.free_all(self.back.drain(..).map(|back| back.held.packet));
        }
    }
}

/// A token bucket: packets wait until there is something in it, and then take what they need, on credit if need be.
#[derive(Debug)]
struct Bucket {
    /// Ticks that a byte takes, times 2^16.
    byte: u64,
    /// Ticks that are made up for.
    depth: u64,
    /// When what was taken so far is paid back.
    paid: u64,
}

impl Bucket {
    fn new(rate: u64, hz: u64) -> Self {
        let byte = ((u128::from(hz) * 8) << 16) / u128::from(rate);
        Self { byte: u64::try_from(byte).unwrap_or(u64::MAX), depth: hz / BUCKET, paid: 0 }
    }

    /// When a packet of `len` bytes that comes at `now` may go.
    #[inline]
    fn begin(&mut self, now: u64, len: usize) -> u64 {
        let ticks = ((u128::from(self.byte) * len as u128) >> 16) as u64;
        // The depth is there from the beginning.
        self.paid = self.paid.max(now) + ticks;
        (self.paid - ticks).saturating_sub(self.depth).max(now)
    }
}

#[cfg(test)]
mod tests;
