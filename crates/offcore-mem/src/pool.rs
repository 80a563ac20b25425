//! The packet pool: chunks of one memfd, and per-worker caches of free chunks.
//!
//! ```text
//! chunk (2 KiB or a larger power of two, so aligned)
//! | 256 B headroom | data room ........................ |
//! ```
//! The pool lives as long as the process, because its address is given to others (a kernel's UMEM, a GPU, a DMA
//! device). Free chunks are kept in magazines of [`MAGAZINE`] indices. A worker's [`PoolCache`] holds two magazines,
//! from which it takes and to which it frees single chunks. Whole magazines move between caches and the pool through
//! two lock-free queues, at most once per [`MAGAZINE`] packets. Recently freed chunks are used first, because they are
//! likely in the CPU cache.

use std::cell::UnsafeCell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crossbeam_queue::ArrayQueue;

use crate::mapping::{Hugepages, Mapping, MemoryError};
use crate::packet::{Burst, Packet};

/// Alignment of chunks. Their length is a power-of-two multiple of it.
pub const CHUNK_ALIGN: usize = 2048;
/// Bytes before a new packet's data, for headers that are added in front.
pub const HEADROOM: usize = 256;
/// Number of free chunks in a magazine.
pub const MAGAZINE: usize = 64;
/// Maximum number of workers that can have a cache at the same time.
const MAX_CACHES: usize = if cfg!(miri) { 8 } else { 256 };

/// Errors of the creation of a pool.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum PoolError {
    /// chunk size {found}: expected a power of two from {CHUNK_ALIGN:?} to 32768 bytes
    ChunkSize { found: usize },
    /// pool of {found} packet buffers: expected {MAGAZINE:?} to 16777216
    Count { found: usize },
    /// packet pool: {0}
    Memory(#[from] MemoryError),
}

struct Magazine {
    chunks: UnsafeCell<[u32; MAGAZINE]>,
}

/// A pool of packet buffers. It is created once and never unmapped.
pub struct Pool {
    base: NonNull<u8>,
    chunk_size: usize,
    chunk_shift: u32,
    chunks: usize,
    mapping: Mapping,
    fd: OwnedFd,
    magazines: Box<[Magazine]>,
    full: ArrayQueue<u32>,
    empty: ArrayQueue<u32>,
    caches: AtomicU32,
    /// Chunks of dropped caches that do not fill a magazine. Only accessed when a cache is dropped or the pool is
    /// empty.
    leftovers: Mutex<Vec<u32>>,
    /// For every chunk, the word of the handle of the packet's next buffer, if the chunk's own handle is marked as
    /// segmented. The owner of a packet owns its entries: the synchronization that passes the handle to another thread
    /// also orders accesses to them.
    next: Box<[AtomicU64]>,
    #[cfg(debug_assertions)]
    taken: Box<[std::sync::atomic::AtomicBool]>,
}

// SAFETY: chunk memory is only accessed through handles that own their chunk; a magazine's array is only accessed by
// the cache that popped the magazine's id from a queue.
unsafe impl Send for Pool {}
// SAFETY: threads access chunk memory only through handles that own their chunk, and a magazine's array only after they
// popped its id from a queue.
unsafe impl Sync for Pool {}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("chunks", &self.chunks).field("chunk_size", &self.chunk_size).finish()
    }
}

impl Packet {
    /// Sets the range of the packet's bytes in the (first) chunk, after checking it against the pool's chunk size.
    ///
    /// # Panics
    /// If the range does not fit into the chunk, or the packet belongs to another pool.
    #[inline(always)]
    pub fn set_range(&mut self, pool: &Pool, offset: usize, len: usize) {
        assert!(pool.owns(self), "packet {} is not of this pool", self.chunk());
        let size = pool.chunk_size();
        assert!(offset.saturating_add(len) <= size, "{offset}+{len} bytes in a chunk of {size}");
        self.place(offset, len);
    }
}

impl Pool {
    /// Creates a pool of `chunks` packet buffers of `chunk_size` bytes (including headroom), rounded up to whole
    /// magazines.
    ///
    /// # Errors
    /// If sizes are out of range or memory is not available.
    pub fn new(chunks: usize, chunk_size: usize, hugepages: Hugepages) -> Result<&'static Self, PoolError> {
        if !chunk_size.is_power_of_two() || !(CHUNK_ALIGN..=32768).contains(&chunk_size) {
            return Err(PoolError::ChunkSize { found: chunk_size });
        }
        if !(MAGAZINE..=1 << 24).contains(&chunks) {
            return Err(PoolError::Count { found: chunks });
        }
        let chunks = chunks.next_multiple_of(MAGAZINE);
        let (mapping, fd) = Mapping::memfd("offcore-pool", chunks * chunk_size, hugepages)?;
        let full_magazines = chunks / MAGAZINE;
        let magazines = full_magazines + 2 * MAX_CACHES;
        let pool = Self {
            base: mapping.base(),
            chunk_size,
            chunk_shift: chunk_size.trailing_zeros(),
            chunks,
            fd,
            magazines: (0..magazines)
                .map(|m| Magazine {
                    chunks: UnsafeCell::new(std::array::from_fn(|i| {
                        (m * MAGAZINE + MAGAZINE - 1 - i) as u32
                    })),
                })
                .collect(),
            full: ArrayQueue::new(magazines),
            empty: ArrayQueue::new(magazines),
            caches: AtomicU32::new(0),
            leftovers: Mutex::new(Vec::new()),
            next: (0..chunks).map(|_| AtomicU64::new(0)).collect(),
            #[cfg(debug_assertions)]
            taken: (0..chunks).map(|_| false.into()).collect(),
            mapping,
        };
        for id in 0..magazines as u32 {
            let queue = if (id as usize) < full_magazines { &pool.full } else { &pool.empty };
            let fits = queue.push(id).is_ok();
            assert!(fits, "both queues have room for every magazine");
        }
        Ok(Box::leak(Box::new(pool)))
    }

    /// Creates a cache for one worker.
    ///
    /// # Panics
    /// If more than 256 caches exist. Each worker has one, and there are fewer lcores than that.
    pub fn cache(&'static self) -> PoolCache {
        let before = self.caches.fetch_add(1, Ordering::Relaxed);
        assert!((before as usize) < MAX_CACHES, "a pool serves at most {MAX_CACHES} workers");
        let empty = || self.empty.pop().expect("two empty magazines are reserved for every cache");
        PoolCache { pool: self, current: empty(), count: 0, spare: empty(), spare_full: false }
    }

    /// Returns the size of a chunk in bytes, including headroom.
    #[inline(always)]
    pub fn chunk_size(&self) -> usize {
        self.chunk_size
    }

    /// Returns the binary logarithm of [`chunk_size`](Self::chunk_size).
    #[inline(always)]
    pub(crate) fn chunk_shift(&self) -> u32 {
        self.chunk_shift
    }

    /// Returns the room for a packet behind the standard headroom, in bytes.
    #[inline(always)]
    pub fn data_room(&self) -> usize {
        self.chunk_size - HEADROOM
    }

    /// Number of chunks.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Returns address and length of the memory, for users that register it. The bytes of packets belong to their
    /// owners.
    #[inline(always)]
    pub fn memory(&self) -> (NonNull<u8>, usize) {
        (self.base, self.mapping.len())
    }

    /// Returns its page size in bytes.
    pub fn page_size(&self) -> usize {
        self.mapping.page_size()
    }

    /// Returns its NUMA node, if the kernel reported it.
    pub fn numa_node(&self) -> Option<usize> {
        self.mapping.numa_node()
    }

    /// Returns the memfd behind the memory.
    pub fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.fd)
    }

    /// Returns the number of free chunks in whole magazines. Chunks in caches are not counted.
    pub fn available(&self) -> usize {
        self.full.len() * MAGAZINE
    }

    /// Creates a handle of a chunk, with `len` bytes at `offset`.
    ///
    /// # Safety
    /// The index must come from a magazine, which contains only valid indices of chunks without an owner. `offset +
    /// len` must be at most the chunk size.
    #[inline(always)]
    unsafe fn packet(&'static self, chunk: u32, offset: usize, len: usize) -> Packet {
        #[cfg(debug_assertions)]
        assert!(!self.taken[chunk as usize].swap(true, Ordering::Relaxed), "chunk {chunk} has two owners");
        // SAFETY: the caller guarantees that the chunk has no owner and contains the range; the mapping is never
        // unmapped.
        unsafe { Packet::new(self.chunk_base(chunk), chunk, offset as u16, len as u16) }
    }

    /// Returns the start of a chunk's memory.
    ///
    /// # Safety
    /// `chunk` must be below the number of chunks.
    #[inline(always)]
    pub(crate) unsafe fn chunk_base(&self, chunk: u32) -> NonNull<u8> {
        // SAFETY: chunk < chunks, so the address is within the mapping.
        unsafe { self.base.add((chunk as usize) << self.chunk_shift) }
    }

    /// Returns the entry of `chunk` in the table of next buffers.
    pub(crate) fn next(&self, chunk: u32) -> &AtomicU64 {
        &self.next[chunk as usize]
    }

    /// Returns whether the packet's chunk belongs to this pool.
    #[inline(always)]
    pub fn owns(&self, packet: &Packet) -> bool {
        let offset = (packet.chunk_base().as_ptr() as usize).wrapping_sub(self.base.as_ptr() as usize);
        offset == (packet.chunk() as usize) << self.chunk_shift && (packet.chunk() as usize) < self.chunks
    }

    #[inline(always)]
    fn chunk(&self, packet: &Packet) -> u32 {
        let chunk = packet.chunk();
        if !self.owns(packet) {
            is_foreign(chunk);
        }
        #[cfg(debug_assertions)]
        assert!(self.taken[chunk as usize].swap(false, Ordering::Relaxed), "chunk {chunk} is freed twice");
        chunk
    }
}

#[cold]
#[inline(never)]
fn is_foreign(chunk: u32) -> ! {
    panic!("packet {chunk} is not of this pool");
}

/// Takes values, because references to them in a panic message would force them into memory.
#[cold]
#[inline(never)]
fn does_not_fit(headroom: usize, len: usize, size: usize) -> ! {
    panic!("{headroom}+{len} bytes in a chunk of {size}");
}

/// One worker's cache of free chunks.
#[derive(Debug)]
pub struct PoolCache {
    pool: &'static Pool,
    current: u32,
    count: usize,
    spare: u32,
    spare_full: bool,
}

impl PoolCache {
    /// Returns the cache's pool.
    #[inline(always)]
    pub fn pool(&self) -> &'static Pool {
        self.pool
    }

    /// Returns the number of free chunks that this cache can take: its own, and the pool's in whole magazines. Other
    /// workers may change it at any time.
    #[inline]
    pub fn available(&self) -> usize {
        self.pool.available() + self.count + if self.spare_full { MAGAZINE } else { 0 }
    }

    /// Takes an empty packet with the standard headroom; `None` if the pool is empty.
    #[inline(always)]
    pub fn take(&mut self) -> Option<Packet> {
        if self.count == 0 && !self.refill() {
            return None;
        }
        self.count -= 1;
        let count = self.count;
        let chunk = self.slots()[count % MAGAZINE];
        // SAFETY: the index comes from a magazine, and HEADROOM is less than the chunk size.
        Some(unsafe { self.pool.packet(chunk, HEADROOM, 0) })
    }

    /// Takes a packet of `len` bytes that starts `headroom` bytes into its chunk, with undefined content; `None` if the
    /// pool is empty.
    ///
    /// # Panics
    /// If the packet does not fit into the chunk.
    #[inline(always)]
    pub fn take_sized(&mut self, headroom: usize, len: usize) -> Option<Packet> {
        let size = self.pool.chunk_size();
        assert!(headroom.saturating_add(len) <= size, "{headroom}+{len} bytes in a chunk of {size}");
        if self.count == 0 && !self.refill() {
            return None;
        }
        self.count -= 1;
        let count = self.count;
        let chunk = self.slots()[count % MAGAZINE];
        // SAFETY: the index comes from a magazine; the range was checked above.
        Some(unsafe { self.pool.packet(chunk, headroom, len) })
    }

    /// Takes a packet for each of `items` and passes it to `each`. The packet has the length that `len` returns and
    /// starts `headroom` bytes into its chunk. Stops if the pool is empty; returns the number of packets taken.
    ///
    /// # Panics
    /// If a packet does not fit into the chunk.
    #[inline(always)]
    pub fn take_each<T>(
        &mut self,
        headroom: usize,
        items: &[T],
        len: impl Fn(&T) -> usize,
        mut each: impl FnMut(&T, Packet),
    ) -> usize {
        let (pool, room) = (self.pool, self.pool.chunk_size().saturating_sub(headroom));
        let mut left = items;
        while !left.is_empty() && (self.count > 0 || self.refill()) {
            let (now, later) = left.split_at(self.count.min(left.len()));
            // These chunks are removed first, so that they cannot be taken twice if a callback panics.
            self.count -= now.len();
            let first = self.count;
            let chunks = &self.slots()[first..first + now.len()];
            for (item, &chunk) in now.iter().zip(chunks.iter().rev()) {
                let len = len(item);
                if len > room {
                    does_not_fit(headroom, len, pool.chunk_size());
                }
                // SAFETY: the index comes from a magazine; the range was just checked.
                each(item, unsafe { pool.packet(chunk, headroom, len) });
            }
            left = later;
        }
        items.len() - left.len()
    }

    /// Returns all chunks of a packet to the pool.
    ///
    /// # Panics
    /// If the packet belongs to another pool.
    #[inline(always)]
    pub fn free(&mut self, mut packet: Packet) {
        if packet.is_segmented() {
            self.free_rest(&mut packet);
        }
        let chunk = self.pool.chunk(&packet);
        if self.count == MAGAZINE {
            self.flush();
        }
        let count = self.count;
        self.slots()[count] = chunk;
        self.count += 1;
    }

    /// Frees every packet of `packets`.
    #[inline]
    pub fn free_all(&mut self, packets: impl IntoIterator<Item = Packet>) {
        for packet in packets {
            self.free(packet);
        }
    }

    /// Frees the first `count` packets of `burst`, and removes them from it.
    ///
    /// # Panics If there are fewer packets, or any of them belongs to another pool.
    #[inline(never)]
    pub fn free_front(&mut self, burst: &mut Burst, count: usize) {
        if Packet::any_segmented(&burst[..count]) {
            return self.free_all(burst.drain(..count));
        }
        let mut done = 0;
        while done < count {
            if self.count == MAGAZINE {
                self.flush();
            }
            let (pool, first) = (self.pool, self.count);
            let room = &mut self.slots()[first..];
            let packets = &burst[done..count];
            let given = room.len().min(packets.len());
            for (slot, packet) in room.iter_mut().zip(packets) {
                *slot = pool.chunk(packet);
            }
            self.count += given;
            done += given;
        }
        burst.drain(..count);
    }

    #[inline(always)]
    fn slots(&mut self) -> &mut [u32; MAGAZINE] {
        // SAFETY: `current` is below the number of magazines, like all ids in the queues, and only this cache holds it.
        unsafe { &mut *self.pool.magazines.get_unchecked(self.current as usize).chunks.get() }
    }

    #[cold]
    fn refill(&mut self) -> bool {
        if self.spare_full {
            std::mem::swap(&mut self.current, &mut self.spare);
            self.spare_full = false;
        } else if let Some(full) = self.pool.full.pop() {
            self.give(&self.pool.empty, self.current);
            self.current = full;
        } else {
            return self.refill_from_dropped();
        }
        self.count = MAGAZINE;
        true
    }

    fn refill_from_dropped(&mut self) -> bool {
        let mut leftovers = self.pool.leftovers.lock().unwrap_or_else(PoisonError::into_inner);
        let n = leftovers.len().min(MAGAZINE);
        let from = leftovers.len() - n;
        for (slot, chunk) in self.slots().iter_mut().zip(leftovers.drain(from..)) {
            *slot = chunk;
        }
        self.count = n;
        n > 0
    }

    #[cold]
    fn flush(&mut self) {
        if self.spare_full {
            self.give(&self.pool.full, self.spare);
            self.spare = self.pool.empty.pop().expect("a full magazine was given, so an empty one is there");
        }
        std::mem::swap(&mut self.current, &mut self.spare);
        self.spare_full = true;
        self.count = 0;
    }

    fn give(&self, queue: &ArrayQueue<u32>, magazine: u32) {
        let fits = queue.push(magazine).is_ok();
        assert!(fits, "both queues have room for every magazine");
    }
}

impl Drop for PoolCache {
    fn drop(&mut self) {
        let count = self.count;
        let mut leftovers = self.pool.leftovers.lock().unwrap_or_else(PoisonError::into_inner);
        // copy-ok: chunk indices, when a worker ends
        leftovers.extend_from_slice(&self.slots()[..count]);
        if leftovers.len() >= MAGAZINE {
            let from = leftovers.len() - MAGAZINE;
            // copy-ok: as above
            self.slots().copy_from_slice(&leftovers[from..]);
            leftovers.truncate(from);
            self.give(&self.pool.full, self.current);
        } else {
            self.give(&self.pool.empty, self.current);
        }
        let queue = if self.spare_full { &self.pool.full } else { &self.pool.empty };
        self.give(queue, self.spare);
        self.pool.caches.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn pool() -> &'static Pool {
        Pool::new(256, 2048, Hugepages::None).unwrap()
    }

    #[test]
    fn chunks_are_taken_once() {
        let pool = pool();
        for _ in 0..5 {
            let mut cache = pool.cache();
            let taken: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
            let chunks: HashSet<u32> = taken.iter().map(Packet::chunk).collect();
            assert_eq!((taken.len(), chunks.len()), (256, 256));
            assert!(cache.take().is_none());
            cache.free_all(taken);
        }
    }

    #[test]
    fn leftovers_of_dropped_caches_are_not_lost() {
        let pool = pool();
        for n in 1..200 {
            let mut cache = pool.cache();
            let taken: Vec<Packet> = (0..n % 67).map_while(|_| cache.take()).collect();
            cache.free_all(taken);
        }
        assert_eq!(
            std::iter::from_fn({
                let mut cache = pool.cache();
                move || cache.take()
            })
            .count(),
            256
        );
    }

    #[test]
    fn chunks_freed_by_other_threads_return() {
        let pool = pool();
        let (to, from) = std::sync::mpsc::sync_channel::<Packet>(32);
        let sink = std::thread::spawn(move || {
            let mut cache = pool.cache();
            for (n, packet) in from.iter().enumerate() {
                assert_eq!(packet.bytes(), (n as u32).to_le_bytes());
                cache.free(packet);
            }
        });
        let mut cache = pool.cache();
        for n in 0u32..if cfg!(miri) { 200 } else { 100_000 } {
            let mut packet = loop {
                match cache.take() {
                    Some(packet) => break packet,
                    None => std::thread::yield_now(),
                }
            };
            packet.set_range(pool, HEADROOM, 4);
            packet.bytes_mut().copy_from_slice(&n.to_le_bytes());
            to.send(packet).unwrap();
        }
        drop(to);
        sink.join().unwrap();
    }

    #[test]
    #[should_panic(expected = "not of this pool")]
    fn a_foreign_packet_is_refused() {
        let (a, b) = (pool(), pool());
        let packet = a.cache().take().unwrap();
        b.cache().free(packet);
    }

    #[test]
    fn header_and_payload_move_in_the_headroom() {
        let mut cache = pool().cache();
        let mut packet = cache.take().unwrap();
        packet.set_range(cache.pool(), HEADROOM, 3);
        packet.bytes_mut().copy_from_slice(b"abc");
        packet.headroom_mut(2).copy_from_slice(b"xy");
        assert_eq!(packet.headroom_bytes(2), b"xy");
        packet.push(2);
        assert_eq!(packet.bytes(), b"xyabc");
        packet.pull(3);
        assert_eq!(packet.bytes(), b"bc");
        packet.truncate(1);
        assert_eq!(packet.bytes(), b"b");
        assert_eq!(packet.data().as_ptr() as usize % CHUNK_ALIGN, HEADROOM + 1);
        cache.free(packet);
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes")]
    fn ranges_outside_chunk_are_refused() {
        let mut cache = pool().cache();
        let mut packet = cache.take().unwrap();
        packet.set_range(cache.pool(), 2048, 0);
        packet.set_range(cache.pool(), 0, 2048);
        for (offset, len) in [(2048, 1), (1, 2048), (usize::MAX, 1), (1, usize::MAX), (usize::MAX, 0)] {
            let refused = |f: &mut dyn FnMut()| {
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).expect_err("out of the chunk");
            };
            refused(&mut || packet.set_range(cache.pool(), offset, len));
            refused(&mut || {
                let _ = cache.take_sized(offset, len);
            });
        }
        cache.free(packet);
    }

    #[test]
    fn sizes_out_of_range_are_named() {
        assert!(matches!(Pool::new(1, 2048, Hugepages::None), Err(PoolError::Count { found: 1 })));
        assert!(matches!(Pool::new(64, 3000, Hugepages::None), Err(PoolError::ChunkSize { found: 3000 })));
    }
}
