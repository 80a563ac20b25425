//! The four rings of an XDP socket, shared with the kernel: linux/if_xdp.h.
//!
//! ```text
//!                we produce            the kernel produces
//! packets        TX ring               RX ring                descriptors
//! buffers        fill ring (for RX)    completion ring (of TX)   places in the UMEM
//! ```
//! A ring has a power of two of entries, a producer index and a consumer index. Both indices wrap modulo 2^32 and are
//! masked. Each role here offers only the operations of its side of the ring. The local index is separate from the
//! shared one, so that a burst is published with one store.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

/// A descriptor of the RX and TX rings: place in the UMEM, length, options.
pub(super) use libc::xdp_desc as Descriptor;

/// The packet continues in the next descriptor.
pub(super) const CONTINUED: u32 = libc::XDP_PKT_CONTD;

/// Memory of a ring, mapped from the socket.
#[derive(Debug)]
struct Memory {
    base: NonNull<u8>,
    len: usize,
}

impl Memory {
    fn map(socket: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a new mapping at an address that the kernel chooses does not affect existing memory.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, socket, offset) }?;
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { base, len })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `map` created the mapping, and the ring that is dropped with it has the only pointers into it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A ring without a role.
#[derive(Debug)]
struct Ring<T> {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    entries: NonNull<T>,
    mask: u32,
    /// The ring's memory; `None` in tests.
    _memory: Option<Memory>,
}

// SAFETY: the pointers refer to a mapping that the ring owns. A ring has one user at a time on this side, and both
// sides synchronize through the two indices.
unsafe impl<T: Send> Send for Ring<T> {}

impl<T: Copy> Ring<T> {
    /// Maps the ring at offset `page` of the socket's file. `size` is the number of entries that was requested.
    fn map(socket: BorrowedFd<'_>, page: u64, at: &libc::xdp_ring_offset, size: u32) -> io::Result<Self> {
        let bad = || io::Error::from(io::ErrorKind::InvalidData);
        let offset = |offset: u64| usize::try_from(offset).map_err(|_| bad());
        let (entries, bytes) = (offset(at.desc)?, size as usize * size_of::<T>());
        let memory = Memory::map(socket, page, entries + bytes)?;
        let word = |offset: u64| {
            let offset = usize::try_from(offset).map_err(|_| bad())?;
            if offset + 4 > memory.len || !offset.is_multiple_of(4) {
                return Err(bad());
            }
            // SAFETY: the offset was just checked to be within the mapping.
            Ok(unsafe { memory.base.add(offset) }.cast::<AtomicU32>())
        };
        if !entries.is_multiple_of(align_of::<T>()) || !size.is_power_of_two() {
            return Err(bad());
        }
        Ok(Self {
            producer: word(at.producer)?,
            consumer: word(at.consumer)?,
            flags: word(at.flags)?,
            // SAFETY: the entries end where the mapping ends.
            entries: unsafe { memory.base.add(entries) }.cast(),
            mask: size - 1,
            _memory: Some(memory),
        })
    }

    #[inline(always)]
    fn producer(&self) -> &AtomicU32 {
        // SAFETY: within the mapping and aligned; both sides access it atomically.
        unsafe { self.producer.as_ref() }
    }

    #[inline(always)]
    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as for `producer`.
        unsafe { self.consumer.as_ref() }
    }

    #[inline(always)]
    fn entry(&self, index: u32) -> NonNull<T> {
        // SAFETY: the masked index is below the number of entries.
        unsafe { self.entries.add((index & self.mask) as usize) }
    }

    #[inline(always)]
    fn needs_wakeup(&self) -> bool {
        // SAFETY: within the mapping and aligned; both sides access it atomically.
        unsafe { self.flags.as_ref() }.load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}

/// A ring that the worker fills.
#[derive(Debug)]
pub(super) struct Producer<T> {
    ring: Ring<T>,
    /// Number of entries written so far.
    head: u32,
    /// The kernel's index when it was last read.
    seen: u32,
}

impl<T: Copy> Producer<T> {
    fn new(ring: Ring<T>) -> Self {
        let head = ring.producer().load(Ordering::Relaxed);
        let seen = ring.consumer().load(Ordering::Acquire);
        Self { ring, head, seen }
    }

    /// Returns how many entries can be written. The kernel's index is only read if fewer than `wanted` are known to be
    /// free.
    #[inline(always)]
    pub(super) fn free(&mut self, wanted: usize) -> usize {
        let free = self.ring.mask as usize + 1 - self.head.wrapping_sub(self.seen) as usize;
        if free >= wanted { free } else { self.ring.mask as usize + 1 - self.waiting() }
    }

    /// Returns how many entries the kernel has not taken yet.
    #[inline(always)]
    pub(super) fn waiting(&mut self) -> usize {
        let taken = self.ring.consumer().load(Ordering::Acquire);
        // An invalid index is ignored.
        if self.head.wrapping_sub(taken) <= self.ring.mask + 1 {
            self.seen = taken;
        }
        self.head.wrapping_sub(self.seen) as usize
    }

    /// Writes the next entry, which must be [free](Self::free).
    #[inline(always)]
    pub(super) fn push(&mut self, entry: T) {
        debug_assert!(self.head.wrapping_sub(self.seen) <= self.ring.mask, "the ring is full");
        // SAFETY: an entry of the ring, which belongs to the producer until `publish`.
        unsafe { self.ring.entry(self.head).write(entry) };
        self.head = self.head.wrapping_add(1);
    }

    /// Makes written entries visible to the kernel.
    #[inline(always)]
    pub(super) fn publish(&mut self) {
        self.ring.producer().store(self.head, Ordering::Release);
    }

    /// Returns whether the kernel requires a system call to process new entries.
    #[inline(always)]
    pub(super) fn needs_wakeup(&self) -> bool {
        self.ring.needs_wakeup()
    }

    /// Returns the index of the next entry.
    pub(super) fn head(&self) -> u32 {
        self.head
    }

    /// Returns an entry that was written at most one ring length ago.
    pub(super) fn written(&self, index: u32) -> T {
        // SAFETY: an entry of the ring; only this side writes it.
        unsafe { self.ring.entry(index).read() }
    }
}

/// A ring that the kernel fills.
#[derive(Debug)]
pub(super) struct Consumer<T> {
    ring: Ring<T>,
    /// Number of entries read so far.
    tail: u32,
    /// The kernel's index when it was last read.
    seen: u32,
}

impl<T: Copy> Consumer<T> {
    fn new(ring: Ring<T>) -> Self {
        let tail = ring.consumer().load(Ordering::Relaxed);
        Self { ring, tail, seen: tail }
    }

    /// Returns how many entries can be read. The kernel's index is only read if fewer than `wanted` are known.
    #[inline(always)]
    pub(super) fn available(&mut self, wanted: usize) -> usize {
        if (self.seen.wrapping_sub(self.tail) as usize) < wanted {
            let seen = self.ring.producer().load(Ordering::Acquire);
            // An invalid index is ignored.
            if seen.wrapping_sub(self.tail) <= self.ring.mask + 1 {
                self.seen = seen;
            }
        }
        self.seen.wrapping_sub(self.tail) as usize
    }

    /// Reads the next entry, which must be [available](Self::available).
    #[inline(always)]
    pub(super) fn pop(&mut self) -> T {
        debug_assert_ne!(self.seen, self.tail, "the ring is empty");
        // SAFETY: an entry of the ring, which belongs to the consumer until `release`.
        let entry = unsafe { self.ring.entry(self.tail).read() };
        self.tail = self.tail.wrapping_add(1);
        entry
    }

    /// Returns the entry `ahead` of the next one, if it is available.
    #[inline(always)]
    pub(super) fn peek(&self, ahead: u32) -> Option<T> {
        let known = self.seen.wrapping_sub(self.tail);
        // SAFETY: as in `pop`.
        (ahead < known).then(|| unsafe { self.ring.entry(self.tail.wrapping_add(ahead)).read() })
    }

    /// Returns the read entries to the kernel.
    #[inline(always)]
    pub(super) fn release(&mut self) {
        self.ring.consumer().store(self.tail, Ordering::Release);
    }
}

/// The rings of one socket.
#[derive(Debug)]
pub(super) struct Rings {
    pub(super) rx: Consumer<Descriptor>,
    pub(super) fill: Producer<u64>,
    pub(super) tx: Producer<Descriptor>,
    pub(super) completion: Consumer<u64>,
}

/// Numbers of entries, which are powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) rx: u32,
    pub(super) fill: u32,
    pub(super) tx: u32,
    pub(super) completion: u32,
}

impl Rings {
    /// Maps the rings of `socket`, which were created with `sizes`, at the offsets `at`.
    pub(super) fn map(
        socket: BorrowedFd<'_>,
        sizes: &Sizes,
        at: &libc::xdp_mmap_offsets,
    ) -> io::Result<Self> {
        #[allow(clippy::cast_sign_loss, reason = "both are small positive constants")]
        let [rx, tx] = [libc::XDP_PGOFF_RX_RING, libc::XDP_PGOFF_TX_RING].map(|page| page as u64);
        let (fill, completion) = (libc::XDP_UMEM_PGOFF_FILL_RING, libc::XDP_UMEM_PGOFF_COMPLETION_RING);
        Ok(Self {
            rx: Consumer::new(Ring::map(socket, rx, &at.rx, sizes.rx)?),
            fill: Producer::new(Ring::map(socket, fill, &at.fr, sizes.fill)?),
            tx: Producer::new(Ring::map(socket, tx, &at.tx, sizes.tx)?),
            completion: Consumer::new(Ring::map(socket, completion, &at.cr, sizes.completion)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Returns both sides of a ring of 8 entries whose indices are about to wrap.
    fn pair() -> (Producer<u64>, Consumer<u64>) {
        let start = u32::MAX - 5;
        let words: &'static [AtomicU32; 3] =
            Box::leak(Box::new([AtomicU32::new(start), AtomicU32::new(start), AtomicU32::new(0)]));
        let entries = NonNull::from(Box::leak(Box::new([0u64; 8]))).cast::<u64>();
        let ring = || Ring {
            producer: NonNull::from(&words[0]),
            consumer: NonNull::from(&words[1]),
            flags: NonNull::from(&words[2]),
            entries,
            mask: 7,
            _memory: None,
        };
        (Producer::new(ring()), Consumer::new(ring()))
    }

    #[test]
    fn publish_and_release_order() {
        let (mut producer, mut consumer) = pair();
        assert_eq!((producer.free(1), consumer.available(1)), (8, 0));
        (0..8).for_each(|entry| producer.push(entry));
        assert_eq!((producer.free(1), consumer.available(1)), (0, 0));
        producer.publish();
        assert_eq!((consumer.available(8), producer.waiting()), (8, 8));
        assert_eq!((consumer.peek(2), consumer.peek(8)), (Some(2), None));
        assert_eq!((consumer.pop(), consumer.pop()), (0, 1));
        assert_eq!((producer.free(1), producer.waiting()), (0, 8));
        consumer.release();
        assert_eq!((producer.free(1), producer.waiting()), (2, 6));
        assert_eq!(producer.written(producer.head().wrapping_sub(1)), 7);
    }

    #[test]
    fn bad_indices_are_not_followed() {
        let (mut producer, mut consumer) = pair();
        producer.push(1);
        producer.publish();
        producer.ring.consumer().store(77, Ordering::Relaxed);
        assert_eq!((producer.waiting(), producer.free(8)), (1, 7));
        consumer.ring.producer().store(77, Ordering::Relaxed);
        assert_eq!(consumer.available(1), 0);
    }

    proptest! {
        /// All entries come out once and in order, as from a queue with a capacity of 8.
        #[test]
        fn xdp_ring_is_fifo(steps in proptest::collection::vec((any::<bool>(), 1..9usize), 1..60)) {
            let (mut producer, mut consumer) = pair();
            let (mut model, mut next) = (VecDeque::new(), 0u64);
            for (produce, count) in steps {
                if produce {
                    prop_assert!(producer.free(8) == 8 - model.len());
                    for _ in 0..count.min(8 - model.len()) {
                        producer.push(next);
                        model.push_back(next);
                        next += 1;
                    }
                    producer.publish();
                } else {
                    let available = consumer.available(8);
                    prop_assert_eq!(available, model.len());
                    for _ in 0..count.min(available) {
                        prop_assert_eq!(Some(consumer.pop()), model.pop_front());
                    }
                    consumer.release();
                }
            }
        }
    }
}
