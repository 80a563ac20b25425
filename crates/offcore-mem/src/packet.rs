//! Packet handles and bursts.
//!
//! A [`Packet`] is a handle of one chunk of a [`Pool`](crate::Pool). It owns the chunk: the holder of the handle may
//! read and write its bytes. Passing the chunk on (to a virtqueue, an engine or the pool) means moving the handle,
//! which cannot be cloned.
//!
//! A packet that is longer than a chunk has several buffers. Its handle is the first buffer's handle, and the pool
//! records the buffers that follow ([`segments`](crate::segments)). Most packets are [plain](Packet::is_plain): they
//! have one buffer and no offload request.

use arrayvec::ArrayVec;
use std::ptr::NonNull;

/// Maximum number of packets that a port receives or sends in one call.
pub const BURST: usize = 64;

/// A burst of packets.
pub type Burst = ArrayVec<Packet, BURST>;

/// A handle of a packet buffer: a chunk of a pool, and the range of the packet's bytes in it.
///
/// Dropping a handle does not return the chunk: pass it to [`PoolCache::free`](crate::PoolCache::free). (A handle that
/// frees itself would have to refer to its worker's cache.)
#[derive(Debug)]
#[must_use = "a dropped packet leaks its chunk: free it to a PoolCache"]
pub struct Packet {
    chunk_base: NonNull<u8>,
    /// The chunk's index starts at bit 0, flags start at [`SEGMENTED`], followed by 16 bits each of offset and length.
    /// It is one word because handles are moved as whole words right after they are created, and a load that spans
    /// several recent narrow stores would stall.
    word: u64,
}

/// Mask of the chunk's index: a pool has at most 2^24 chunks.
const CHUNK: u64 = (1 << 24) - 1;
/// More buffers follow; the next buffer's word is in the pool's table.
const SEGMENTED: u64 = 1 << 24;
/// The virtio-net header directly before the data has an offload request.
const OFFLOAD: u64 = 1 << 25;
const OFFSET: u32 = 32;
const LEN: u32 = 48;

// SAFETY: a packet is the only owner of its chunk, whose memory lives as long as the process.
unsafe impl Send for Packet {}

/// Takes values, because references to them in a panic message would force them into memory.
#[cold]
#[inline(never)]
fn no_headroom(wanted: usize, there: usize) -> ! {
    panic!("{wanted} bytes of headroom wanted, {there} there");
}

impl Packet {
    /// Creates a handle of `chunk`, whose memory starts at `chunk_base`.
    ///
    /// # Safety
    /// No other handle of the chunk may exist. Its memory must live as long as the process, and `offset + len` must be
    /// at most the chunk's size.
    pub(crate) unsafe fn new(chunk_base: NonNull<u8>, chunk: u32, offset: u16, len: u16) -> Self {
        let word = u64::from(len) << LEN | u64::from(offset) << OFFSET | u64::from(chunk);
        Self { chunk_base, word }
    }

    /// Recreates the handle from which `word` was taken, for a chunk whose memory starts at `chunk_base`.
    ///
    /// # Safety
    /// As for [`new`](Self::new); in particular, the handle from which the word was taken is not used any more.
    pub(crate) unsafe fn from_word(chunk_base: NonNull<u8>, word: u64) -> Self {
        Self { chunk_base, word }
    }

    /// Returns the chunk to which `word` refers.
    pub(crate) fn chunk_of(word: u64) -> u32 {
        (word & CHUNK) as u32
    }

    /// Returns the handle without the chunk's address, which the pool can compute.
    pub(crate) fn word(&self) -> u64 {
        self.word
    }

    /// Returns whether all of `packets` are [plain](Packet::is_plain).
    #[inline(always)]
    pub fn all_plain(packets: &[Self]) -> bool {
        packets.iter().fold(0, |marks, packet| marks | packet.word) & (SEGMENTED | OFFLOAD) == 0
    }

    /// Returns whether any of `packets` [is segmented](Packet::is_segmented).
    #[inline(always)]
    pub(crate) fn any_segmented(packets: &[Self]) -> bool {
        packets.iter().fold(0, |marks, packet| marks | packet.word) & SEGMENTED != 0
    }

    /// Returns the index of the chunk in its pool: the first chunk of a packet of several buffers.
    #[inline(always)]
    pub fn chunk(&self) -> u32 {
        (self.word & CHUNK) as u32
    }

    /// Returns whether the packet has one buffer and no offload request. Any port can send it unchanged.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.word & (SEGMENTED | OFFLOAD) == 0
    }

    /// Returns whether more buffers follow the first. [`bytes`](Self::bytes) and similar functions refer to the first
    /// buffer; [`Pool::segments`](crate::Pool::segments) and [`Pool::total_len`](crate::Pool::total_len) cover all of
    /// them.
    #[inline(always)]
    pub fn is_segmented(&self) -> bool {
        self.word & SEGMENTED != 0
    }

    /// Returns whether the 12 bytes of headroom directly before the data are a virtio-net header with an offload
    /// request: to complete a checksum, or to segment the packet. The header was checked against the packet when the
    /// mark was set.
    #[inline(always)]
    pub fn has_offload(&self) -> bool {
        self.word & OFFLOAD != 0
    }

    /// Sets whether the 12 bytes of headroom directly before the data are a virtio-net header with an offload request
    /// that was checked against the packet's total length. [`pull`](Self::pull) and [`push`](Self::push) do not move
    /// the header; their callers have to.
    #[inline(always)]
    pub fn set_offload(&mut self, offload: bool) {
        self.word = self.word & !OFFLOAD | if offload { OFFLOAD } else { 0 };
    }

    /// Sets whether more buffers follow. The pool's table contains the next one.
    pub(crate) fn set_segmented(&mut self, segmented: bool) {
        self.word = self.word & !SEGMENTED | if segmented { SEGMENTED } else { 0 };
    }

    /// Returns the start of the chunk's memory.
    #[inline(always)]
    pub(crate) fn chunk_base(&self) -> NonNull<u8> {
        self.chunk_base
    }

    /// Returns the length of the packet in bytes, without FCS; for a packet of several buffers, the length of the first
    /// buffer's part.
    #[inline(always)]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        (self.word >> LEN) as usize
    }

    /// Returns the number of bytes before the packet in the (first) chunk.
    #[inline(always)]
    pub fn headroom(&self) -> usize {
        usize::from((self.word >> OFFSET) as u16)
    }

    /// Returns the packet's bytes in the first buffer.
    #[inline(always)]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: this handle owns the chunk, which lives as long as the process; the range offset..offset + len is
        // within it.
        unsafe { std::slice::from_raw_parts(self.data().as_ptr(), self.len()) }
    }

    /// Returns the packet's bytes in the first buffer, writable.
    #[inline(always)]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: this handle owns the chunk, which lives as long as the process, and is borrowed mutably; the range
        // offset..offset + len is within the chunk.
        unsafe { std::slice::from_raw_parts_mut(self.data().as_ptr(), self.len()) }
    }

    /// Returns the address of the first byte.
    #[inline(always)]
    pub fn data(&self) -> NonNull<u8> {
        // SAFETY: the offset is within the chunk.
        unsafe { self.chunk_base.add(self.headroom()) }
    }

    /// Returns the `n` bytes of headroom directly before the packet.
    ///
    /// # Panics
    /// If the packet has less headroom.
    #[inline(always)]
    pub fn headroom_bytes(&self, n: usize) -> &[u8] {
        if n > self.headroom() {
            no_headroom(n, self.headroom());
        }
        // SAFETY: the range [offset - n, offset) is within the chunk that this handle owns.
        unsafe { std::slice::from_raw_parts(self.data().sub(n).as_ptr(), n) }
    }

    /// Returns the `n` bytes of headroom directly before the packet, writable. A header that accompanies the packet is
    /// stored there.
    ///
    /// # Panics
    /// If the packet has less headroom.
    #[inline(always)]
    pub fn headroom_mut(&mut self, n: usize) -> &mut [u8] {
        if n > self.headroom() {
            no_headroom(n, self.headroom());
        }
        // SAFETY: the range [offset - n, offset) is within the chunk that this handle owns.
        unsafe { std::slice::from_raw_parts_mut(self.data().sub(n).as_ptr(), n) }
    }

    /// Moves the packet's start forward by `n` bytes, which become headroom.
    ///
    /// # Panics
    /// If the packet is shorter.
    #[inline(always)]
    pub fn pull(&mut self, n: usize) {
        assert!(n <= self.len(), "{n} bytes to pull from a packet of {}", self.len());
        self.place(self.headroom() + n, self.len() - n);
    }

    /// Moves the packet's start back by `n` bytes of headroom.
    ///
    /// # Panics
    /// If the packet has less headroom.
    #[inline(always)]
    pub fn push(&mut self, n: usize) {
        if n > self.headroom() {
            no_headroom(n, self.headroom());
        }
        self.place(self.headroom() - n, self.len() + n);
    }

    /// Shortens the packet's first buffer to `len` bytes, unless it is shorter already. To shorten packets of several
    /// buffers, use [`PoolCache::truncate`](crate::PoolCache::truncate).
    #[inline(always)]
    pub fn truncate(&mut self, len: usize) {
        self.place(self.headroom(), len.min(self.len()));
    }

    /// Sets the range of the packet's bytes in the (first) chunk. The caller must have checked that it is within the
    /// chunk.
    #[inline(always)]
    pub(crate) fn place(&mut self, offset: usize, len: usize) {
        let low = self.word & u64::from(u32::MAX);
        self.word = u64::from(len as u16) << LEN | u64::from(offset as u16) << OFFSET | low;
    }
}
