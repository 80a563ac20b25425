//! Packet buffers of the peer: the burst being forwarded, and packets prepared for sending.

use std::ffi::CString;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

use super::ffi::{self, Mbuf, Mempool};
use super::{c_len, errno};

/// Where a prepared packet's sequence number is: behind Ethernet (14), IPv4 (20) and UDP (8), 8 bytes, big-endian.
pub const SEQUENCE_OFFSET: usize = 42;

/// An mbuf pool; it lives as long as anything that may hold one of its buffers.
#[derive(Debug)]
pub(super) struct Pool(*mut Mempool);

// SAFETY: the pool's ring is DPDK's "ring_mp_mc", made for producers and consumers on several threads, and its caches
// are chosen by the calling thread's own lcore number (none for threads without one).
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool of `mbufs` buffers.
    pub(super) fn new(mbufs: u32) -> Result<Self> {
        static POOLS: AtomicU32 = AtomicU32::new(0);
        let name = CString::new(format!("peer{}", POOLS.fetch_add(1, Ordering::Relaxed)))?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: EAL is up, `name` is a C string, and `pool` is a place for the result.
        let rc = unsafe { ffi::peer_pool_create(mbufs, name.as_ptr(), &raw mut pool) };
        if rc < 0 {
            return Err(errno(rc)).with_context(|| {
                format!(
                    "creating a pool of {mbufs} mbufs: EAL has the memory that the first DpdkLib of the process needed"
                )
            });
        }
        Ok(Self(pool))
    }

    /// Size in bytes of the pages it lies on.
    pub(super) fn page_size(&self) -> Result<u64> {
        // SAFETY: the pool is live.
        let size = unsafe { ffi::peer_pool_page_size(self.0) };
        u64::try_from(size).context("EAL does not know the memory of its own pool")
    }

    fn raw(&self) -> *mut Mempool {
        self.0
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the pool is live, and every `Burst` and `Prepared` that could hold one of its buffers
        // also holds the Arc around it and returns its buffers before it lets go of that.
        unsafe { ffi::peer_pool_free(self.0) }
    }
}

/// The packets that a data thread holds between dequeue and enqueue: at most [`Burst::CAPACITY`]. Dropping it returns
/// them to the pool.
pub struct Burst {
    pool: Arc<Pool>,
    /// The first `len` are buffers owned by this burst.
    mbufs: [*mut Mbuf; Self::CAPACITY],
    len: usize,
}

impl Burst {
    /// The most packets that it holds.
    pub const CAPACITY: usize = 64;

    pub(super) fn new(pool: Arc<Pool>) -> Self {
        Self { pool, mbufs: [std::ptr::null_mut(); Self::CAPACITY], len: 0 }
    }

    /// Number of packets held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes of packet `index`, or `None` when there is no such packet or it spans several buffers (more than 2048
    /// bytes).
    pub fn packet(&self, index: usize) -> Option<&[u8]> {
        let &mbuf = self.mbufs[..self.len].get(index)?;
        // SAFETY: `mbuf` is owned by this burst.
        let (data, len) = unsafe { payload(mbuf) }?;
        // SAFETY: `payload` gave the initialised bytes of a buffer that this burst owns, and only `&mut self` methods
        // write to it or give it back.
        Some(unsafe { std::slice::from_raw_parts(data, len) })
    }

    /// Forwarding mode `mac`: writes both addresses into every packet, as testpmd does.
    pub fn rewrite_mac(&mut self, destination: &[u8; 6], source: &[u8; 6]) {
        // SAFETY: the first `len` pointers are buffers owned by this burst, of 2048 bytes and more each; both
        // addresses are 6 bytes.
        unsafe {
            ffi::peer_mac(self.mbufs.as_mut_ptr(), c_len(self.len), destination.as_ptr(), source.as_ptr());
        }
    }

    /// Returns every packet to the pool.
    pub fn clear(&mut self) {
        // SAFETY: the first `len` pointers are buffers owned by this burst, which forgets them.
        unsafe { ffi::peer_free(self.mbufs.as_mut_ptr(), c_len(self.len)) };
        self.len = 0;
    }

    /// Dequeues up to `max` packets behind those held.
    pub(super) fn dequeue(&mut self, port: u32, pair: u8, max: usize) -> i32 {
        let max = max.min(Self::CAPACITY - self.len);
        // SAFETY: `max` elements from `len` on are inside the array; the pool is live. The caller holds the port and
        // is the data thread.
        let rc = unsafe {
            let free = self.mbufs.as_mut_ptr().add(self.len);
            ffi::peer_dequeue(port, pair.into(), self.pool.raw(), free, c_len(max))
        };
        // A count is at most `max`; an error leaves the array as it was.
        self.len += usize::try_from(rc).unwrap_or(0);
        rc
    }

    /// Enqueues the packets and returns all buffers to the pool.
    pub(super) fn enqueue(&mut self, port: u32, pair: u8) -> i32 {
        // SAFETY: the first `len` pointers are buffers owned by this burst. The caller holds the port and is the data
        // thread.
        let rc = unsafe { ffi::peer_enqueue(port, pair.into(), self.mbufs.as_mut_ptr(), c_len(self.len)) };
        self.clear();
        rc
    }
}

impl Drop for Burst {
    fn drop(&mut self) {
        self.clear();
    }
}

impl fmt::Debug for Burst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Burst").field("len", &self.len).finish_non_exhaustive()
    }
}

/// A ring of packets to send, of one length and in distinct buffers. Enqueueing takes from the front and frees;
/// [`Prepared::refill`] puts new packets behind the others. A number of packets above 32 makes every burst use other
/// buffers than the one before.
///
/// It may be handed to another thread, which writes the packets there and so leaves them in its own core's cache.
pub struct Prepared {
    pool: Arc<Pool>,
    /// `live` buffers from `head` on (wrapping) are owned by this ring; the others are stale.
    mbufs: Box<[*mut Mbuf]>,
    head: usize,
    live: usize,
    packet_len: u16,
}

// SAFETY: it owns its buffers alone, and giving buffers back is allowed on every thread (see `Pool`).
unsafe impl Send for Prepared {}

impl Prepared {
    pub(super) fn new(pool: Arc<Pool>, count: usize, packet_len: u16) -> Result<Self> {
        let mbufs = vec![std::ptr::null_mut(); count].into_boxed_slice();
        let mut prepared = Self { pool, mbufs, head: 0, live: 0, packet_len };
        prepared.refill()?;
        Ok(prepared)
    }

    /// Number of packets ready to be sent.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether none is left to be sent.
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Replaces the packets that were sent by new ones, behind those that were not, and returns their indices. What
    /// they contain is unknown. Takes the buffers from the pool: part of a benchmark's untimed half.
    ///
    /// # Errors
    /// When the pool is dry, or its buffers are shorter than a packet.
    pub fn refill(&mut self) -> Result<Range<usize>> {
        let old = self.live;
        while self.live < self.mbufs.len() {
            let start = self.slot(self.live);
            let end = if start < self.head { self.head } else { self.mbufs.len() };
            let free = &mut self.mbufs[start..end];
            // SAFETY: the pool is live, and `free` is a run of elements that hold no buffer.
            let rc = unsafe {
                ffi::peer_alloc(self.pool.raw(), free.as_mut_ptr(), c_len(free.len()), self.packet_len)
            };
            if rc < 0 {
                return Err(errno(rc).context(format!(
                    "preparing {} packets of {} bytes: open the peer with more mbufs, or prepare fewer or shorter \
                     packets",
                    self.mbufs.len(),
                    self.packet_len
                )));
            }
            self.live += free.len();
        }
        Ok(old..self.live)
    }

    /// The bytes of packet `index`, counted from the next one to be sent.
    ///
    /// # Panics
    /// When `index` is not below [`Prepared::len`].
    pub fn packet_mut(&mut self, index: usize) -> &mut [u8] {
        assert!(index < self.live, "packet {index} of {}", self.live);
        let mbuf = self.mbufs[self.slot(index)];
        // SAFETY: `mbuf` is owned by this ring: `index` is below `live`.
        let (data, len) = unsafe { payload(mbuf) }.expect("prepared packets fit into one buffer");
        // SAFETY: `payload` gave the initialised bytes of a buffer that this ring owns alone, and `self` is borrowed
        // mutably as long as the slice lives.
        unsafe { std::slice::from_raw_parts_mut(data, len) }
    }

    /// Writes `frame` into packet `index`, and `sequence` at [`SEQUENCE_OFFSET`].
    ///
    /// # Panics
    /// When there is no such packet, when `frame` has not the length that was prepared, or when it ends before the
    /// sequence number does.
    pub fn write(&mut self, index: usize, frame: &[u8], sequence: u64) {
        let packet = self.packet_mut(index);
        packet.copy_from_slice(frame);
        packet[SEQUENCE_OFFSET..SEQUENCE_OFFSET + 8].copy_from_slice(&sequence.to_be_bytes());
    }

    fn slot(&self, index: usize) -> usize {
        let slot = self.head + index;
        if slot < self.mbufs.len() { slot } else { slot - self.mbufs.len() }
    }

    /// Enqueues up to `max` packets from the front and frees those that were taken: their number, or an error when
    /// the front end is gone.
    pub(super) fn enqueue(&mut self, port: u32, pair: u8, max: usize) -> i32 {
        let mut sent = 0;
        let max = max.min(self.live);
        while sent < max {
            let run = (max - sent).min(self.mbufs.len() - self.head);
            let front = self.mbufs[self.head..self.head + run].as_mut_ptr();
            // SAFETY: `front` points at `run` buffers owned by this ring (run <= live). The caller holds the port and
            // is the data thread.
            let rc = unsafe { ffi::peer_enqueue(port, pair.into(), front, c_len(run)) };
            let Ok(taken) = usize::try_from(rc) else { return rc };
            // SAFETY: the first `taken` of them are still owned by this ring, which forgets them below.
            unsafe { ffi::peer_free(front, c_len(taken)) };
            self.head = self.slot(taken);
            self.live -= taken;
            sent += taken;
            if taken < run {
                break;
            }
        }
        i32::try_from(sent).unwrap_or(i32::MAX)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        for index in 0..self.live {
            let mut mbuf = self.mbufs[self.slot(index)];
            // SAFETY: `mbuf` is owned by this ring, which is not used again.
            unsafe { ffi::peer_free(&raw mut mbuf, 1) };
        }
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("len", &self.live)
            .field("of", &self.mbufs.len())
            .field("packet_len", &self.packet_len)
            .finish_non_exhaustive()
    }
}

/// Address and length of a packet's bytes, `None` when they are not in one buffer.
///
/// # Safety
/// `mbuf` is a packet buffer that the caller owns.
unsafe fn payload(mbuf: *mut Mbuf) -> Option<(*mut u8, usize)> {
    let mut len = 0;
    // SAFETY: as the caller promises; `len` is a place for the result.
    let data = unsafe { ffi::peer_payload(mbuf, &raw mut len) };
    (!data.is_null()).then_some((data, len as usize))
}
