//! The CPU's side of a burst ring, which carries bursts of packets to a device and back in order.
//!
//! ```text
//! RX lcore                                 device                                TX lcore
//! Submitter ── slot: packets, then lap ──▶ polls the lap, works ── answer: ────▶ Collector polls the lap
//!     │                                                            results, lap       │
//!     ├── WorkBurst: the handles ─────────────────────────────────────────────────────▶
//!     ◀──────────────────────────────────────────────────── the WorkBurst, empty ─────┘
//! ```
//! Slots and answers are the memory that a device accesses ([`crate::layout`]). The packet handles stay with the CPU
//! and use a separate queue. There are as many [`WorkBurst`]s as slots. They are allocated once and recycled, so an
//! empty one is a token for a free slot.

use std::mem::swap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use offcore_mem::mapping::MemoryError;
use offcore_mem::{Hugepages, Mapping, Packet, Pool};
use offcore_ring::spsc::{self, Consumer, Producer};
use offcore_stats::tsc;

use crate::layout::{AnswerHead, MAX_BURST, PacketDescriptor, QUIT, RingView, SlotHead};

/// Bytes of the destination and source address of an Ethernet frame.
const ADDRESSES: usize = 12;
/// Slots and answers are aligned to cache lines.
const LINE: usize = 64;

/// Why a burst ring could not be created.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum BurstRingError {
    /// {what}: found {found}, expected {expected}
    OutOfRange { what: &'static str, found: usize, expected: &'static str },
    /// a burst ring: {0}
    Memory(MemoryError),
}

/// Packets that a device processes together.
#[derive(Debug)]
pub struct WorkBurst {
    /// Sequence number, from 0 on.
    pub turn: u64,
    /// TSC at submission.
    pub since: u64,
    pub packets: Vec<Packet>,
    /// Whether the device sees it.
    pub visible: bool,
    /// The first 12 bytes of each packet at submission, if the ring keeps them, because a device that dies may or may
    /// not have swapped them.
    pub addresses: Vec<[u8; ADDRESSES]>,
}

/// The parameters of a ring.
#[derive(Clone, Copy, Debug)]
pub struct RingConfig {
    /// Maximum bursts in flight: a power of two, 2 to 4096.
    pub slots: usize,
    /// Maximum packets per burst, 1 to [`MAX_BURST`].
    pub burst: usize,
    /// Whether to keep the packets' addresses until their burst is back. This reads every packet.
    pub keep_addresses: bool,
    pub split: Option<Split>,
    /// Page size of the memory that the device accesses.
    pub hugepages: Hugepages,
}

/// Buffer split: the first bytes of a packet are in a separate buffer, and the device sees only the rest.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    pub pool: &'static Pool,
    /// Bytes in the first buffer.
    pub at: usize,
}

impl Split {
    /// Returns chunk, offset and length of the payload of `packet`, if it has been split.
    #[inline(always)]
    pub fn payload(&self, packet: &Packet) -> Option<(u32, u16, u16)> {
        if packet.len() == self.at { self.pool.second_of_two(packet) } else { None }
    }
}

/// The memory that the device accesses.
#[derive(Debug)]
struct Shared {
    mapping: Mapping,
    answers: usize,
    slot_stride: usize,
    answer_stride: usize,
    slots: usize,
}

impl Shared {
    /// Returns the offsets of a turn's slot and answer, and its lap.
    #[inline]
    fn place(&self, turn: u64) -> (usize, usize, u32) {
        let (index, lap) = slot_and_lap(self.slots as u32, turn);
        let index = index as usize;
        (index * self.slot_stride, self.answers + index * self.answer_stride, lap)
    }

    /// Returns the lap of an answer, written by the device.
    #[inline]
    fn lap(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at.is_multiple_of(LINE) && at + LINE <= self.mapping.len());
        // SAFETY: `place` returns offsets of heads, inside the mapping and line-aligned. A head starts with its lap,
        // which is accessed atomically once the ring is shared.
        unsafe { AtomicU32::from_ptr(self.mapping.base().as_ptr().add(at).cast()) }
    }
}

/// Creates a ring and returns its two ends.
///
/// # Errors
/// A number is out of range, or the memory cannot be allocated.
pub fn burst_ring(config: &RingConfig) -> Result<(Submitter, Collector), BurstRingError> {
    let out_of_range = |what, found, expected| BurstRingError::OutOfRange { what, found, expected };
    if !config.slots.is_power_of_two() || !(2..=4096).contains(&config.slots) {
        return Err(out_of_range("slots of a burst ring", config.slots, "a power of two from 2 to 4096"));
    }
    if !(1..=MAX_BURST).contains(&config.burst) {
        return Err(out_of_range("packets of a burst", config.burst, "1 to 4096"));
    }
    let slot_stride =
        (size_of::<SlotHead>() + config.burst * size_of::<PacketDescriptor>()).next_multiple_of(LINE);
    let answer_stride = (size_of::<AnswerHead>() + config.burst * size_of::<u32>()).next_multiple_of(LINE);
    let answers = config.slots * slot_stride;
    let (mapping, _fd) =
        Mapping::memfd("offcore-bursts", answers + config.slots * answer_stride, config.hugepages)
            .map_err(BurstRingError::Memory)?;
    let shared = Arc::new(Shared { mapping, answers, slot_stride, answer_stride, slots: config.slots });
    let queue = || spsc::ring(config.slots).map_err(|_| out_of_range("slots", config.slots, "fewer"));
    let ((submitted, to_collect), (mut returned, empty)) = (queue()?, queue()?);
    for _ in 0..config.slots {
        let kept = if config.keep_addresses { config.burst } else { 0 };
        let burst = WorkBurst {
            turn: 0,
            since: 0,
            packets: Vec::with_capacity(config.burst),
            visible: false,
            addresses: Vec::with_capacity(kept),
        };
        // The queue has room for every slot.
        let _ = returned.push(burst);
    }
    returned.publish();
    let submitter = Submitter {
        slots: shared.mapping.base(),
        own_slots: true,
        shared: Arc::clone(&shared),
        turn: 0,
        next_visible: 0,
        burst: config.burst,
        keep_addresses: config.keep_addresses,
        split: config.split,
        submitted,
        empty,
    };
    Ok((submitter, Collector { shared, oldest: None, to_collect, returned }))
}

/// The submitting end.
#[derive(Debug)]
pub struct Submitter {
    shared: Arc<Shared>,
    /// The memory to which slots are written: the ring's own memory or the device's.
    slots: NonNull<u8>,
    own_slots: bool,
    turn: u64,
    /// Turn of the first burst that is not visible to the device.
    next_visible: u64,
    burst: usize,
    keep_addresses: bool,
    split: Option<Split>,
    submitted: Producer<WorkBurst>,
    empty: Consumer<WorkBurst>,
}

// SAFETY: only the owner of the submitter writes the slots' memory, which lives as long as the submitter.
unsafe impl Send for Submitter {}

impl Submitter {
    /// Returns the ring's addresses for a device that uses this process's addresses. They stay valid until both ends of
    /// the ring are dropped.
    pub fn view(&self) -> RingView {
        self.view_at(self.shared.mapping.base().as_ptr())
    }

    /// Returns the ring's addresses for a device that maps [`Submitter::memory`] at `base`.
    pub fn view_at(&self, base: *mut u8) -> RingView {
        let Shared { answers, slot_stride, answer_stride, slots, .. } = *self.shared;
        RingView {
            slots: base,
            answers: base.wrapping_add(answers),
            slot_stride: slot_stride as u32,
            answer_stride: answer_stride as u32,
            count: slots as u32,
            reserved: 0,
        }
    }

    /// Returns the memory that a device must be able to access.
    pub fn memory(&self) -> &Mapping {
        &self.shared.mapping
    }

    /// Writes bursts to slots in device memory from now on.
    ///
    /// # Safety
    /// `slots` must point to zeroed memory for all slots with their strides, aligned to 64, that exists as long as the
    /// submitter. No burst may have been submitted yet, and the device must poll that memory.
    pub unsafe fn write_slots_at(&mut self, slots: NonNull<u8>) {
        (self.slots, self.own_slots) = (slots, false);
    }

    /// Publishes the burst in the slot at `at`.
    #[inline(always)]
    fn publish(&self, at: usize, lap: u32) {
        if !self.own_slots {
            // A mapping of device memory may be write-combining: without a fence its stores are unordered.
            store_fence();
        }
        // SAFETY: `place` returns offsets of heads, inside the slots' memory and line-aligned. A head starts with its
        // lap, which is accessed atomically once the ring is shared.
        unsafe { AtomicU32::from_ptr(self.slots.as_ptr().add(at).cast()) }.store(lap, Ordering::Release);
        if !self.own_slots {
            // Flushes the core's write-combining buffer.
            store_fence();
        }
    }

    /// Returns a reference that keeps the memory mapped.
    pub(crate) fn keep(&self) -> impl Send + use<> {
        Arc::clone(&self.shared)
    }

    /// Returns the turn of the next burst.
    pub fn turn(&self) -> u64 {
        self.turn
    }

    /// Returns the number of bursts that can be submitted now, at most `wanted`.
    #[inline]
    pub fn room(&mut self, wanted: usize) -> usize {
        self.empty.available(wanted).min(wanted)
    }

    /// Submits `packets` to the device and replaces them by an empty vector of the same capacity. Returns their turn,
    /// or `None` and keeps them if the ring is full. The device skips packets of several buffers, whose result is
    /// 0. If the ring [splits](RingConfig::split), it skips all packets that have not been split.
    ///
    /// # Panics
    /// If there are more packets than a burst may have, or after [`bypass`](Self::bypass).
    #[inline]
    pub fn submit(&mut self, packets: &mut Vec<Packet>) -> Option<u64> {
        assert!(self.next_visible == self.turn, "submit after bypass");
        assert!(packets.len() <= self.burst, "{} packets in a burst of {}", packets.len(), self.burst);
        let mut burst = self.empty.pop()?;
        let (slot, _, lap) = self.shared.place(self.turn);
        // SAFETY: the slot is inside the slots' memory, with room for a whole burst. An empty burst represents a slot
        // that no device reads: its last burst has been answered, or the device has failed. A hung device may still
        // read the slot if its failure has just been detected. It then reads whole descriptors, each of them a single
        // store, of packets that it has received and that are quarantined.
        unsafe {
            let head = self.slots.as_ptr().add(slot);
            let descriptors = head.add(size_of::<SlotHead>()).cast::<PacketDescriptor>();
            for (i, packet) in packets.iter().enumerate() {
                descriptors.add(i).write_volatile(self.described(packet));
            }
            let count = head.add(std::mem::offset_of!(SlotHead, count)).cast::<u32>();
            count.write_volatile(packets.len() as u32);
        }
        burst.addresses.clear();
        if self.keep_addresses {
            burst.addresses.extend(packets.iter().map(addresses));
        }
        (burst.turn, burst.since, burst.visible) = (self.turn, tsc::now(), true);
        swap(&mut burst.packets, packets);
        self.publish(slot, lap);
        self.next_visible += 1;
        Some(self.pass(burst))
    }

    /// Queues `packets` without the device, which gets no more bursts from now on.
    ///
    /// # Panics
    /// If there are more packets than a burst may have.
    #[cold]
    pub fn bypass(&mut self, packets: &mut Vec<Packet>) -> Option<u64> {
        assert!(packets.len() <= self.burst, "{} packets in a burst of {}", packets.len(), self.burst);
        let mut burst = self.empty.pop()?;
        burst.addresses.clear();
        (burst.turn, burst.since, burst.visible) = (self.turn, tsc::now(), false);
        swap(&mut burst.packets, packets);
        Some(self.pass(burst))
    }

    /// Passes a burst to the collector. Returns its turn.
    #[inline(always)]
    fn pass(&mut self, burst: WorkBurst) -> u64 {
        // The queue has room for every slot.
        let _ = self.submitted.push(burst);
        self.submitted.publish();
        self.turn += 1;
        self.turn - 1
    }

    /// Returns the descriptor of a packet.
    #[inline(always)]
    fn described(&self, packet: &Packet) -> PacketDescriptor {
        if let Some(split) = &self.split {
            return match split.payload(packet) {
                Some((chunk, offset, len)) => PacketDescriptor { chunk, offset, len },
                None => PacketDescriptor::default(),
            };
        }
        if packet.is_segmented() {
            return PacketDescriptor::default();
        }
        PacketDescriptor { chunk: packet.chunk(), offset: packet.headroom() as u16, len: packet.len() as u16 }
    }

    /// Tells the device that no more bursts follow: every block or node that waits for a burst of the next `waiters`
    /// turns ends. Returns false and does nothing if the ring has no room for that number of bursts.
    pub fn quit(&mut self, waiters: usize) -> bool {
        if self.room(waiters) < waiters {
            return false;
        }
        for turn in self.next_visible..self.next_visible + waiters as u64 {
            let (slot, _, lap) = self.shared.place(turn);
            // SAFETY: the slot is inside the slots' memory, and no device reads it. A hung device may still read
            // packets of an earlier lap, which stay valid.
            unsafe {
                let head = self.slots.as_ptr().add(slot);
                head.add(std::mem::offset_of!(SlotHead, count)).cast::<u32>().write_volatile(QUIT);
            }
            self.publish(slot, lap);
        }
        true
    }
}

/// Orders stores before it with stores after it, for any memory type.
#[inline(always)]
pub(crate) fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    fence(Ordering::SeqCst);
}

/// Returns the slot and lap of a turn in a ring of `slots` slots.
#[inline]
pub(crate) fn slot_and_lap(slots: u32, turn: u64) -> (u32, u32) {
    // The lap wraps after 2^32 - 1 and skips 0. Two bursts in flight are never that far apart.
    (turn as u32 & (slots - 1), (turn / u64::from(slots) % u64::from(u32::MAX)) as u32 + 1)
}

#[inline(always)]
fn addresses(packet: &Packet) -> [u8; ADDRESSES] {
    packet.bytes().first_chunk().copied().unwrap_or_default()
}

/// The collecting end.
#[derive(Debug)]
pub struct Collector {
    shared: Arc<Shared>,
    oldest: Option<WorkBurst>,
    to_collect: Consumer<WorkBurst>,
    returned: Producer<WorkBurst>,
}

impl Collector {
    /// Returns the oldest burst that has not been retired, answered or not.
    #[inline]
    pub fn oldest(&mut self) -> Option<&mut WorkBurst> {
        if self.oldest.is_none() {
            self.oldest = self.to_collect.pop();
        }
        self.oldest.as_mut()
    }

    /// If the device has answered the oldest burst, copies the packets' results to `results` and returns the device's
    /// number of non-zero results.
    ///
    /// # Panics
    /// If `results` is shorter than the burst.
    #[inline]
    pub fn answer(&mut self, results: &mut [u32]) -> Option<u32> {
        let (turn, packets) = self.oldest().map(|burst| (burst.turn, burst.packets.len()))?;
        if !self.is_answered(turn) {
            return None;
        }
        let (_, at, _) = self.shared.place(turn);
        let mapping = self.shared.mapping.base().as_ptr();
        // SAFETY: the answer is inside the mapping, with room for the results of a whole burst. Each is read once, and
        // any value is valid.
        let hits = unsafe {
            let answers = mapping.add(at + size_of::<AnswerHead>()).cast::<u32>();
            for (i, result) in results[..packets].iter_mut().enumerate() {
                *result = answers.add(i).read_volatile();
            }
            mapping.add(at + std::mem::offset_of!(AnswerHead, hits)).cast::<u32>().read_volatile()
        };
        Some(hits)
    }

    /// Returns whether the device has answered the burst of `turn`, the last one in its slot. Then it no longer writes
    /// its packets.
    #[inline]
    pub fn is_answered(&self, turn: u64) -> bool {
        let (_, at, lap) = self.shared.place(turn);
        self.shared.lap(at).load(Ordering::Acquire) == lap
    }

    /// Returns whether a burst is in flight or may still be submitted, because the other end exists.
    pub fn is_waiting(&mut self) -> bool {
        let gone = self.to_collect.is_abandoned();
        // Makes everything visible that the other end submitted before it was dropped.
        fence(Ordering::Acquire);
        self.oldest().is_some() || !gone
    }

    /// Frees the slot of the oldest burst, whose packets have been taken.
    ///
    /// # Panics
    /// If the burst still has packets.
    #[inline]
    pub fn retire(&mut self) {
        let Some(burst) = self.oldest.take() else { return };
        assert!(burst.packets.is_empty(), "{} packets of burst {} are left", burst.packets.len(), burst.turn);
        // The queue has room for every slot.
        let _ = self.returned.push(burst);
        self.returned.publish();
    }
}

#[cfg(test)]
mod tests;
