//! Packet handles and bursts.
//!
//! A [`Packet`] is a handle on one chunk of a [`Pool`](crate::Pool): it owns the chunk, so whoever holds the handle
//! may read and write its bytes, and giving the chunk to somebody else (a virtqueue, an engine, the pool) is moving the
//! handle. It cannot be cloned.
//!
//! A packet that is longer than a chunk has several buffers: its handle is the first one's, and the pool knows which
//! follow ([`segments`](crate::segments)). Most packets are [plain](Packet::is_plain): one buffer, and nothing is asked
//! of whoever sends them.

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
    /// From bit 0 the chunk's index, from [`SEGMENTED`] flags, above them 16 bits each of offset and length. One word,
    /// since handles are moved as whole words right after they are made, and a load waits long for the several narrower
    /// stores that it covers.
    word: u64,
}

/// Bits of a chunk's index: a pool has at most 2^24 chunks.
const CHUNK: u64 = (1 << 24) - 1;
/// More buffers follow; the next one's word is in the pool's table.
const SEGMENTED: u64 = 1 << 24;
/// The virtio-net header directly before the data asks for something.
const OFFLOAD: u64 = 1 << 25;
const OFFSET: u32 = 32;
const LEN: u32 = 48;

// SAFETY: a packet is the only owner of its chunk, in memory that lives as long as the process.
unsafe impl Send for Packet {}

/// Values, not references to them, as a message would take: those would keep them in memory.
#[cold]
#[inline(never)]
fn no_headroom(wanted: usize, there: usize) -> ! {
    panic!("{wanted} bytes of headroom wanted, {there} there");
}

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

    /// The handle that `word` was taken from, of a chunk whose memory starts at `chunk_base`.
    ///
    /// # Safety
    /// As for [`new`](Self::new): the handle that the word was taken from is not used any more.
    pub(crate) unsafe fn from_word(chunk_base: NonNull<u8>, word: u64) -> Self {
        Self { chunk_base, word }
    }

    /// The chunk that `word` is about.
    pub(crate) fn chunk_of(word: u64) -> u32 {
        (word & CHUNK) as u32
    }

    /// All of the handle but the chunk's address, which its pool can tell.
    pub(crate) fn word(&self) -> u64 {
        self.word
    }

    /// Whether all of `packets` are [plain](Packet::is_plain).
    #[inline(always)]
    pub fn all_plain(packets: &[Self]) -> bool {
        packets.iter().fold(0, |marks, packet| marks | packet.word) & (SEGMENTED | OFFLOAD) == 0
    }

    /// Whether any of `packets` [is segmented](Packet::is_segmented).
    #[inline(always)]
    pub(crate) fn any_segmented(packets: &[Self]) -> bool {
        packets.iter().fold(0, |marks, packet| marks | packet.word) & SEGMENTED != 0
    }

    /// The chunk's index in its pool: of a packet of several buffers, the first one's.
    #[inline(always)]
    pub fn chunk(&self) -> u32 {
        (self.word & CHUNK) as u32
    }

    /// Whether the packet is one buffer and asks for nothing: everybody can send it as it is.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.word & (SEGMENTED | OFFLOAD) == 0
    }

    /// Whether more buffers follow the first. [`bytes`](Self::bytes) and the like are about the first; about all of
    /// them [`Pool::segments`](crate::Pool::segments) and [`Pool::total_len`](crate::Pool::total_len).
    #[inline(always)]
    pub fn is_segmented(&self) -> bool {
        self.word & SEGMENTED != 0
    }

    /// Whether the 12 bytes of headroom directly before the data are a virtio-net header that asks for something: for
    /// a checksum to be completed, or for segmentation. Whoever set the mark has checked the header against the packet.
    #[inline(always)]
    pub fn has_offload(&self) -> bool {
        self.word & OFFLOAD != 0
    }

    /// Says whether the 12 bytes of headroom directly before the data are a virtio-net header that asks for something
    /// and that was checked against the packet's whole length. The mark does not move with [`pull`](Self::pull) and
    /// [`push`](Self::push): who uses them moves the header.
    #[inline(always)]
    pub fn set_offload(&mut self, offload: bool) {
        self.word = self.word & !OFFLOAD | if offload { OFFLOAD } else { 0 };
    }

    /// Says whether more buffers follow; the pool's table has the next one.
    pub(crate) fn set_segmented(&mut self, segmented: bool) {
        self.word = self.word & !SEGMENTED | if segmented { SEGMENTED } else { 0 };
    }

    /// Start of the chunk's memory.
    #[inline(always)]
    pub(crate) fn chunk_base(&self) -> NonNull<u8> {
        self.chunk_base
    }

    /// Length of the packet in bytes, without FCS; of a packet of several buffers, what the first one has of it.
    #[inline(always)]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        (self.word >> LEN) as usize
    }

    /// Bytes of the (first) chunk before the packet.
    #[inline(always)]
    pub fn headroom(&self) -> usize {
        usize::from((self.word >> OFFSET) as u16)
    }

    /// The packet's bytes: those in the first buffer.
    #[inline(always)]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: this handle owns the chunk, which lives as long as the process; offset + len is inside it.
        unsafe { std::slice::from_raw_parts(self.data().as_ptr(), self.len()) }
    }

    /// The packet's bytes, writable: those in the first buffer.
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

    /// The `n` bytes of headroom directly before the packet.
    ///
    /// # Panics
    /// When the packet has less headroom.
    #[inline(always)]
    pub fn headroom_bytes(&self, n: usize) -> &[u8] {
        if n > self.headroom() {
            no_headroom(n, self.headroom());
        }
        // SAFETY: the range [offset - n, offset) is inside the chunk that this handle owns.
        unsafe { std::slice::from_raw_parts(self.data().sub(n).as_ptr(), n) }
    }

    /// The `n` bytes of headroom directly before the packet, writable: a header that travels with it goes there.
    ///
    /// # Panics
    /// When the packet has less headroom.
    #[inline(always)]
    pub fn headroom_mut(&mut self, n: usize) -> &mut [u8] {
        if n > self.headroom() {
            no_headroom(n, self.headroom());
        }
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
        if n > self.headroom() {
            no_headroom(n, self.headroom());
        }
        self.place(self.headroom() - n, self.len() + n);
    }

    /// Shortens the packet's first buffer to `len` bytes; longer is left alone. Packets of several buffers are
    /// shortened by [`PoolCache::truncate`](crate::PoolCache::truncate).
    #[inline(always)]
    pub fn truncate(&mut self, len: usize) {
        self.place(self.headroom(), len.min(self.len()));
    }

    /// Says which bytes of the (first) chunk are the packet; the caller has checked that they are in it.
    #[inline(always)]
    pub(crate) fn place(&mut self, offset: usize, len: usize) {
        let low = self.word & u64::from(u32::MAX);
        self.word = u64::from(len as u16) << LEN | u64::from(offset as u16) << OFFSET | low;
    }
}
