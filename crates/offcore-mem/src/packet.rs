//! Packet handles and bursts.
//!
//! A [`Packet`] is a handle on one chunk of a [`Pool`](crate::Pool): it owns the chunk, so whoever holds the handle
//! may read and write its bytes, and giving the chunk to somebody else (a virtqueue, an engine, the pool) is moving the
//! handle. It cannot be cloned.

use arrayvec::ArrayVec;
use std::ptr::NonNull;

/// Packets a port receives or sends in one call, at most.
pub const BURST: usize = 64;

/// A burst of packets.
pub type Burst = ArrayVec<Packet, BURST>;

/// A handle on a packet buffer: a chunk of a pool, and where in it the packet's bytes are.
///
/// Dropping a handle does not return the chunk: give it to [`PoolCache::free`](crate::PoolCache::free). (A handle that
/// freed itself would have to carry its worker's cache.)
#[derive(Debug)]
#[must_use = "a dropped packet leaks its chunk: free it to a PoolCache"]
pub struct Packet {
    chunk_base: NonNull<u8>,
    /// The chunk's index in the low half, above it 16 bits each of offset and length. One word, since handles are moved
    /// as whole words right after they are made, and a load waits long for the several narrower stores that it covers.
    word: u64,
}

const OFFSET: u32 = 32;
const LEN: u32 = 48;

// SAFETY: a packet is the only owner of its chunk, in memory that lives as long as the process.
unsafe impl Send for Packet {}

impl Packet {
    /// A handle on `chunk`, whose memory starts at `chunk_base`.
    ///
    /// # Safety
    /// No other handle on the chunk may exist; its memory must live as long as the process, and `offset + len` must be
    /// at most the chunk's size.
    pub(crate) unsafe fn new(chunk_base: NonNull<u8>, chunk: u32, offset: u16, len: u16) -> Self {
        let word = u64::from(len) << LEN | u64::from(offset) << OFFSET | u64::from(chunk);
        Self { chunk_base, word }
    }

    /// The chunk's index in its pool.
    #[inline(always)]
    pub fn chunk(&self) -> u32 {
        self.word as u32
    }

    /// Start of the chunk's memory.
    #[inline(always)]
    pub(crate) fn chunk_base(&self) -> NonNull<u8> {
        self.chunk_base
    }

    /// Length of the packet in bytes, without FCS.
    #[inline(always)]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        (self.word >> LEN) as usize
    }

    /// Bytes of the chunk before the packet.
    #[inline(always)]
    pub fn headroom(&self) -> usize {
        usize::from((self.word >> OFFSET) as u16)
    }

    /// The packet's bytes.
    #[inline(always)]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: this handle owns the chunk, which lives as long as the process; offset + len is inside it.
        unsafe { std::slice::from_raw_parts(self.data().as_ptr(), self.len()) }
    }

    /// The packet's bytes, writable.
    #[inline(always)]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data().as_ptr(), self.len()) }
    }

    /// Address of the first byte.
    #[inline(always)]
    pub fn data(&self) -> NonNull<u8> {
        // SAFETY: the offset is inside the chunk.
        unsafe { self.chunk_base.add(self.headroom()) }
    }

    /// The `n` bytes of headroom directly before the packet, writable: a header that travels with it goes there.
    ///
    /// # Panics
    /// When the packet has less headroom.
    #[inline(always)]
    pub fn headroom_mut(&mut self, n: usize) -> &mut [u8] {
        assert!(n <= self.headroom(), "{n} bytes of headroom wanted, {} there", self.headroom());
        // SAFETY: the range [offset - n, offset) is inside the chunk that this handle owns.
        unsafe { std::slice::from_raw_parts_mut(self.data().sub(n).as_ptr(), n) }
    }

    /// Moves the packet's start forward by `n` bytes: a header that was read goes to the headroom.
    ///
    /// # Panics
    /// When the packet is shorter.
    #[inline(always)]
    pub fn pull(&mut self, n: usize) {
        assert!(n <= self.len(), "{n} bytes to pull from a packet of {}", self.len());
        self.place(self.headroom() + n, self.len() - n);
    }

    /// Moves the packet's start back by `n` bytes of headroom.
    ///
    /// # Panics
    /// When the packet has less headroom.
    #[inline(always)]
    pub fn push(&mut self, n: usize) {
        assert!(n <= self.headroom(), "{n} bytes of headroom wanted, {} there", self.headroom());
        self.place(self.headroom() - n, self.len() + n);
    }

    /// Shortens the packet to `len` bytes; longer is left alone.
    #[inline(always)]
    pub fn truncate(&mut self, len: usize) {
        self.place(self.headroom(), len.min(self.len()));
    }

    /// Says which bytes of the chunk are the packet; the caller has checked that they are in it.
    #[inline(always)]
    pub(crate) fn place(&mut self, offset: usize, len: usize) {
        self.word =
            u64::from(len as u16) << LEN | u64::from(offset as u16) << OFFSET | u64::from(self.chunk());
    }

    /// Says which bytes of the chunk are the packet: `pool` knows how many there are.
    ///
    /// # Panics
    /// When the range is longer than the chunk, or the packet is of another pool.
    #[inline(always)]
    pub fn set_range(&mut self, pool: &crate::Pool, offset: usize, len: usize) {
        assert!(pool.owns(self), "packet {} is not of this pool", self.chunk());
        let size = pool.chunk_size();
        assert!(offset.saturating_add(len) <= size, "{offset}+{len} bytes in a chunk of {size}");
        self.place(offset, len);
    }
}
