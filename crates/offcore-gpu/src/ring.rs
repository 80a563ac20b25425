//! The CPU's side of a burst ring: bursts of packets go to a device and come back in order.
//!
//! ```text
//! RX lcore                                 device                                TX lcore
//! Submitter ── slot: packets, then lap ──▶ polls the lap, works ── answer: ────▶ Collector polls the lap
//!     │                                                            results, lap       │
//!     ├── WorkBurst: the handles ─────────────────────────────────────────────────────▶
//!     ◀──────────────────────────────────────────────────── the WorkBurst, empty ─────┘
//! ```
//! Slots and answers are the memory that a device sees ([`crate::layout`]); the handles of the packets stay with the CPU and
//! go by a queue of their own. There are as many [`WorkBurst`]s as slots, made once and handed back empty: who holds an
//! empty one has a free slot.

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
/// Slots and answers begin on lines of their own.
const LINE: usize = 64;

/// Why there is no burst ring.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// A number that cannot be.
    #[error("{what}: found {found}, expected {expected}")]
    OutOfRange {
        /// What the number is.
        what: &'static str,
        /// What was asked for.
        found: usize,
        /// What can be.
        expected: &'static str,
    },
    /// No memory.
    #[error("a burst ring: {0}")]
    Memory(#[from] MemoryError),
}

/// Packets that a device works on together.
#[derive(Debug)]
pub struct WorkBurst {
    /// Counts bursts, from 0 on.
    pub turn: u64,
    /// TSC when it was submitted.
    pub since: u64,
    /// The packets, in order.
    pub packets: Vec<Packet>,
    /// Whether the device has been told of it.
    pub shown: bool,
    /// The first 12 bytes of each as it was submitted, when the ring keeps them: what a device that has died may or may
    /// not have swapped.
    pub addresses: Vec<[u8; ADDRESSES]>,
}

/// What a ring is made with.
#[derive(Clone, Copy, Debug)]
pub struct RingConfig {
    /// Bursts on their way at most: a power of two, 2 to 4096.
    pub slots: usize,
    /// Packets of a burst at most, 1 to [`MAX_BURST`].
    pub burst: usize,
    /// Whether the packets' addresses are kept until their burst is back. It takes a look at every packet.
    pub keep_addresses: bool,
    /// Whether packets are split.
    pub split: Option<Split>,
    /// Pages of the memory that a device sees.
    pub hugepages: Hugepages,
}

/// Buffer split: packets have their first bytes in a buffer of their own, and the device is told of the rest only.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    /// The pool of the packets.
    pub pool: &'static Pool,
    /// Bytes in the first buffer.
    pub at: usize,
}

impl Split {
    /// What the device is told of `packet`: chunk, offset and length of its payload, if it has been split.
    #[inline(always)]
    pub fn payload(&self, packet: &Packet) -> Option<(u32, u16, u16)> {
        if packet.len() == self.at { self.pool.second_of_two(packet) } else { None }
    }
}

/// The memory that a device sees.
#[derive(Debug)]
struct Shared {
    mapping: Mapping,
    /// Where answers begin.
    answers: usize,
    slot_stride: usize,
    answer_stride: usize,
    slots: usize,
}

impl Shared {
    /// Where the slot and the answer of a turn are, and their lap.
    #[inline]
    fn place(&self, turn: u64) -> (usize, usize, u32) {
        let (index, lap) = slot_and_lap(self.slots as u32, turn);
        let index = index as usize;
        (index * self.slot_stride, self.answers + index * self.answer_stride, lap)
    }

    /// The lap of an answer, which the device writes.
    #[inline]
    fn lap(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at.is_multiple_of(LINE) && at + LINE <= self.mapping.len());
        // SAFETY: `place` gives places of heads, inside the mapping and aligned to a line; a head begins with its lap, which
        // everybody reads and writes atomically once the ring is shared.
        unsafe { AtomicU32::from_ptr(self.mapping.base().as_ptr().add(at).cast()) }
    }
}

/// A ring with its two ends, and what a device has to know of it.
///
/// # Errors
/// Numbers that cannot be, or no memory.
pub fn burst_ring(config: &RingConfig) -> Result<(Submitter, Collector), RingError> {
    let out_of_range = |what, found, expected| RingError::OutOfRange { what, found, expected };
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
        Mapping::memfd("offcore-bursts", answers + config.slots * answer_stride, config.hugepages)?;
    let shared = Arc::new(Shared { mapping, answers, slot_stride, answer_stride, slots: config.slots });
    let queue = || spsc::ring(config.slots).map_err(|_| out_of_range("slots", config.slots, "fewer"));
    let ((submitted, to_collect), (mut returned, empty)) = (queue()?, queue()?);
    for _ in 0..config.slots {
        let kept = if config.keep_addresses { config.burst } else { 0 };
        let burst = WorkBurst {
            turn: 0,
            since: 0,
            packets: Vec::with_capacity(config.burst),
            shown: false,
            addresses: Vec::with_capacity(kept),
        };
        // There is room for as many as there are slots.
        let _ = returned.push(burst);
    }
    returned.publish();
    let submitter = Submitter {
        slots: shared.mapping.base(),
        own_slots: true,
        shared: Arc::clone(&shared),
        turn: 0,
        shown: 0,
        burst: config.burst,
        keep_addresses: config.keep_addresses,
        split: config.split,
        submitted,
        empty,
    };
    Ok((submitter, Collector { shared, oldest: None, to_collect, returned }))
}

/// The end where bursts begin.
#[derive(Debug)]
pub struct Submitter {
    shared: Arc<Shared>,
    /// Where slots are written: in the shared memory, or at the device.
    slots: NonNull<u8>,
    own_slots: bool,
    /// Of the next burst.
    turn: u64,
    /// Of the first burst that the device has not been told of.
    shown: u64,
    burst: usize,
    keep_addresses: bool,
    split: Option<Split>,
    submitted: Producer<WorkBurst>,
    empty: Consumer<WorkBurst>,
}

// SAFETY: the slots' memory is written by whoever has the submitter alone; it stays as long as that does.
unsafe impl Send for Submitter {}

impl Submitter {
    /// What a device has to know of the ring, for a device that sees this process's memory where it is. It lives as long
    /// as one of the ring's ends.
    pub fn view(&self) -> RingView {
        self.view_at(self.shared.mapping.base().as_ptr())
    }

    /// The same for a device that sees [`Submitter::memory`] at `base`.
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

    /// The memory that a device has to see.
    pub fn memory(&self) -> &Mapping {
        &self.shared.mapping
    }

    /// Writes bursts to slots at the device from now on.
    ///
    /// # Safety
    /// At `slots` is memory for all slots with their strides, aligned to 64 and all 0, until the submitter is dropped; no
    /// burst has been submitted yet, and the device looks for them there.
    pub unsafe fn write_slots_at(&mut self, slots: NonNull<u8>) {
        (self.slots, self.own_slots) = (slots, false);
    }

    /// Says of a slot at `at` that it has a burst of this lap.
    #[inline(always)]
    fn publish(&self, at: usize, lap: u32) {
        if !self.own_slots {
            // A mapping of a device's memory may be write-combining: stores to it are in no order without a fence.
            store_fence();
        }
        // SAFETY: `place` gives places of heads, inside the slots' memory and aligned to a line; a head begins with its lap,
        // which everybody reads and writes atomically once the ring is shared.
        unsafe { AtomicU32::from_ptr(self.slots.as_ptr().add(at).cast()) }.store(lap, Ordering::Release);
        if !self.own_slots {
            // And it stays in a buffer of the core without this.
            store_fence();
        }
    }

    /// Something that keeps the memory where it is, for as long as it is there.
    pub(crate) fn keep(&self) -> impl Send + use<> {
        Arc::clone(&self.shared)
    }

    /// The turn of the next burst.
    pub fn turn(&self) -> u64 {
        self.turn
    }

    /// Bursts that can be submitted now, of `wanted` ones.
    #[inline]
    pub fn room(&mut self, wanted: usize) -> usize {
        self.empty.available(wanted).min(wanted)
    }

    /// Hands `packets` to the device, and leaves an empty vector with as much room in their place. Returns their turn;
    /// `None`, and they stay, when the ring is full. Packets of several buffers are not for the device, unless they have been
    /// [split](RingConfig::split), and then all others are not: their result is 0.
    ///
    /// # Panics
    /// When there are more packets than a burst may have, or after [`hide`](Self::hide).
    #[inline]
    pub fn submit(&mut self, packets: &mut Vec<Packet>) -> Option<u64> {
        assert!(self.shown == self.turn, "the device is not to see any more bursts");
        assert!(packets.len() <= self.burst, "{} packets in a burst of {}", packets.len(), self.burst);
        let mut burst = self.empty.pop()?;
        let (slot, _, lap) = self.shared.place(self.turn);
        // SAFETY: the slot is inside the slots' memory, with room for as many packets as a burst has. Whoever holds an empty burst
        // has a slot that no device reads: the burst that was in it has been answered, or the device is gone. One that
        // stands still may read it, if its failure was found just now; it then meets whole descriptors, each one store, of
        // packets that it was told of, which are put aside.
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
        (burst.turn, burst.since, burst.shown) = (self.turn, tsc::now(), true);
        swap(&mut burst.packets, packets);
        self.publish(slot, lap);
        self.shown += 1;
        Some(self.pass(burst))
    }

    /// The same without the device: from now on it is told of no burst any more.
    ///
    /// # Panics
    /// When there are more packets than a burst may have.
    #[cold]
    pub fn hide(&mut self, packets: &mut Vec<Packet>) -> Option<u64> {
        assert!(packets.len() <= self.burst, "{} packets in a burst of {}", packets.len(), self.burst);
        let mut burst = self.empty.pop()?;
        burst.addresses.clear();
        (burst.turn, burst.since, burst.shown) = (self.turn, tsc::now(), false);
        swap(&mut burst.packets, packets);
        Some(self.pass(burst))
    }

    /// Passes a burst to the other end; its turn.
    #[inline(always)]
    fn pass(&mut self, burst: WorkBurst) -> u64 {
        // There is room for as many as there are slots.
        let _ = self.submitted.push(burst);
        self.submitted.publish();
        self.turn += 1;
        self.turn - 1
    }

    /// What the device is told of a packet.
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

    /// Tells the device that no more bursts will come: whoever waits for one of the next `waiters` turns ends. Says whether
    /// that could be done: there must be room for so many bursts.
    pub fn quit(&mut self, waiters: usize) -> bool {
        if self.room(waiters) < waiters {
            return false;
        }
        for turn in self.shown..self.shown + waiters as u64 {
            let (slot, _, lap) = self.shared.place(turn);
            // SAFETY: as in `submit`; a device that stands still may yet read the packets of an earlier lap, which stay.
            unsafe {
                let head = self.slots.as_ptr().add(slot);
                head.add(std::mem::offset_of!(SlotHead, count)).cast::<u32>().write_volatile(QUIT);
            }
            self.publish(slot, lap);
        }
        true
    }
}

/// Nothing that is stored before it is seen after what is stored behind it, whatever the kind of memory.
#[inline(always)]
pub(crate) fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 CPU has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    fence(Ordering::SeqCst);
}

/// Where the burst of a turn is in a ring of so many slots, and its lap.
#[inline]
pub(crate) fn slot_and_lap(slots: u32, turn: u64) -> (u32, u32) {
    // The lap goes round at 2^32 times the slots, and leaves 0 out: no burst is ever so far from another.
    (turn as u32 & (slots - 1), (turn / u64::from(slots) % u64::from(u32::MAX)) as u32 + 1)
}

#[inline(always)]
fn addresses(packet: &Packet) -> [u8; ADDRESSES] {
    packet.bytes().first_chunk().copied().unwrap_or_default()
}

/// The end where bursts come back.
#[derive(Debug)]
pub struct Collector {
    shared: Arc<Shared>,
    oldest: Option<WorkBurst>,
    to_collect: Consumer<WorkBurst>,
    returned: Producer<WorkBurst>,
}

impl Collector {
    /// The oldest burst that has not been retired, answered or not.
    #[inline]
    pub fn oldest(&mut self) -> Option<&mut WorkBurst> {
        if self.oldest.is_none() {
            self.oldest = self.to_collect.pop();
        }
        self.oldest.as_mut()
    }

    /// Whether the device has answered the oldest burst. If so, the result of each packet goes to its place in `results`, and
    /// the device's count of results that are not 0 comes back.
    ///
    /// # Panics
    /// When there are fewer places than packets.
    #[inline]
    pub fn answer(&mut self, results: &mut [u32]) -> Option<u32> {
        let (turn, packets) = self.oldest().map(|burst| (burst.turn, burst.packets.len()))?;
        let (_, at, lap) = self.shared.place(turn);
        if self.shared.lap(at).load(Ordering::Acquire) != lap {
            return None;
        }
        let mapping = self.shared.mapping.base().as_ptr();
        // SAFETY: the answer is inside the mapping, with room for the results of as many packets as a burst has. They are
        // read once, whatever the device has made of them.
        let hits = unsafe {
            let answers = mapping.add(at + size_of::<AnswerHead>()).cast::<u32>();
            for (i, result) in results[..packets].iter_mut().enumerate() {
                *result = answers.add(i).read_volatile();
            }
            mapping.add(at + std::mem::offset_of!(AnswerHead, hits)).cast::<u32>().read_volatile()
        };
        Some(hits)
    }

    /// Whether there is a burst, or may be one yet: the other end is still there.
    pub fn is_waiting(&mut self) -> bool {
        let gone = self.to_collect.is_abandoned();
        // What the other end submitted before it went is seen after this.
        fence(Ordering::Acquire);
        self.oldest().is_some() || !gone
    }

    /// The oldest burst is done with: its packets have been taken out, and its slot is free.
    ///
    /// # Panics
    /// When it still has packets.
    #[inline]
    pub fn retire(&mut self) {
        let Some(burst) = self.oldest.take() else { return };
        assert!(burst.packets.is_empty(), "{} packets of burst {} are left", burst.packets.len(), burst.turn);
        // There is room for as many as there are slots.
        let _ = self.returned.push(burst);
        self.returned.publish();
    }
}

#[cfg(test)]
mod tests;
