//! One direction of one queue: decides which impairments apply to each packet, and when the packet leaves.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use arrayvec::ArrayVec;
use offcore_mem::{BURST, Burst, Packet, Pool, PoolCache};
use offcore_stats::page::Block;
use offcore_stats::{Family, SplitMix, named};
use offcore_wire::checksum;

use crate::DropReason;
use crate::duplicate::Duplicator;
use crate::offload_fallback::header;
use crate::spec::ImpairSpec;

/// Maximum number of packets that overtake a reordered packet.
const OVERTAKING: u64 = 5;
/// A packet waits to be overtaken for at most one second divided by this: one millisecond.
const OVERTAKEN_WITHIN: u64 = 1_000;
/// Maximum number of packets that wait to be overtaken. Further packets are not reordered.
const MAX_REORDERED: usize = 32;
/// Unused rate is credited for at most one second divided by this: one millisecond.
const BUCKET: u64 = 1_000;
/// A time at which all held packets leave.
pub(super) const END_OF_TIME: u64 = u64::MAX;

named! {
    /// Counters of one direction of a queue.
    pub(super) enum Count counts Packets {
        /// Packets dropped.
        Lost = "lost",
        /// Packets that others deliberately overtook.
        Reordered = "reordered",
        /// Packets that were sent twice.
        Duplicated = "duplicated",
        /// Packets in which one bit was flipped.
        Corrupted = "corrupted",
        /// Packets dropped because the limit of held packets was reached.
        TooMany = "too_many",
    }
}

/// The counters of impairments of received packets.
pub(super) static IMPAIR_RX: Family =
    Family::new("impair_rx", "Impairments of the packets received by a queue.", &[&Count::COUNTERS]);
/// The counters of impairments of sent packets.
pub(super) static IMPAIR_TX: Family =
    Family::new("impair_tx", "Impairments of the packets sent by a queue.", &[&Count::COUNTERS]);

/// The impairments. Times are in ticks.
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

/// A packet in the line.
#[derive(Debug)]
struct Held {
    due: u64,
    /// Orders packets that are due at the same time.
    serial: u64,
    /// Number of packets that still have to overtake this one.
    overtaking: u64,
    packet: Packet,
}

/// The packet that is due first compares as the greatest.
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

/// A packet that waits to be overtaken, at most until `due`.
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
    /// Its capacity covers all packets that may be held.
    held: BinaryHeap<Held>,
    back: ArrayVec<Back, MAX_REORDERED>,
    serial: u64,
    /// Number of packet buffers held, and its limit.
    buffers: usize,
    limit: usize,
    /// The caller checks [`Line::has_room`] first: no packets are dropped because of the limit.
    waited_for: bool,
    duplicator: Duplicator,
    pool: &'static Pool,
    counts: Block,
}

impl Line {
    /// Creates a line as `spec` describes it, at `hz` ticks per second, that holds at most `limit` packet buffers of
    /// `pool`. Lines with different numbers have different random numbers.
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
            // A caller that checks `has_room` may add a burst and as many duplicates when the line is half full.
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

    /// Number of held packets.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.held.len() + self.back.len()
    }

    /// Returns whether a caller that waits for room may add more packets. From now on no packets are dropped because of
    /// the limit.
    pub(super) fn has_room(&mut self) -> bool {
        self.waited_for = true;
        self.buffers < self.limit / 2
    }

    /// Takes a packet that arrived at `now`. A dropped packet is freed, and the reason is returned.
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
            // Without a free packet buffer, the packet is not duplicated.
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

    /// Flips one bit. An incomplete checksum is completed first, so that it no longer matches, like all checksums that
    /// cover the bit.
    #[cold]
    fn corrupt(&mut self, packet: &mut Packet) {
        if packet.has_offload() {
            let header = header(packet);
            if header.needs_checksum() {
                let parts = self.pool.segments_mut(packet);
                // If the header is invalid, the packet is already broken.
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

    /// Appends the packets that leave at `now` to `burst`, until `burst` has `most` packets. At [`END_OF_TIME`] all
    /// packets leave.
    #[inline]
    pub(super) fn give(&mut self, now: u64, most: usize, burst: &mut Burst) {
        while burst.len() < most.min(burst.capacity()) {
            let Some(packet) = self.next(now) else { return };
            self.buffers -= self.pool.segment_count(&packet);
            burst.push(packet);
        }
    }

    /// Returns the next packet that leaves at `now`.
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

    /// Returns when the next packet leaves, if any is held.
    pub(super) fn due(&self) -> Option<u64> {
        let back = self.back.iter().map(|back| back.held.due).min();
        self.held.peek().map(|first| first.due).into_iter().chain(back).min()
    }

    /// Frees packets that have left the line but were not passed on.
    pub(super) fn free_all(&self, burst: &mut Burst) {
        if !burst.is_empty() {
            self.pool.cache().free_all(burst.drain(..));
        }
    }

    fn count(&self, count: Count) {
        self.counts.counter(count as usize).add(1);
    }
}

/// A line that is dropped before it has been drained returns its buffers to the pool.
impl Drop for Line {
    fn drop(&mut self) {
        if self.len() > 0 {
            let mut cache = self.pool.cache();
            cache.free_all(self.held.drain().map(|held| held.packet));
            cache.free_all(self.back.drain(..).map(|back| back.held.packet));
        }
    }
}

/// A token bucket. Packets wait until it contains tokens, and then take as many as they need, which may put the bucket
/// into debt.
#[derive(Debug)]
struct Bucket {
    /// Ticks per byte, times 2^16.
    byte: u64,
    /// Maximum credit, in ticks.
    depth: u64,
    /// The time at which the bytes taken so far are paid for.
    paid: u64,
}

impl Bucket {
    fn new(rate: u64, hz: u64) -> Self {
        let byte = ((u128::from(hz) * 8) << 16) / u128::from(rate);
        Self { byte: u64::try_from(byte).unwrap_or(u64::MAX), depth: hz / BUCKET, paid: 0 }
    }

    /// Returns when a packet of `len` bytes that arrives at `now` may leave.
    #[inline]
    fn begin(&mut self, now: u64, len: usize) -> u64 {
        let ticks = ((u128::from(self.byte) * len as u128) >> 16) as u64;
        // The bucket is full at the beginning.
        self.paid = self.paid.max(now) + ticks;
        (self.paid - ticks).saturating_sub(self.depth).max(now)
    }
}

#[cfg(test)]
mod tests;
