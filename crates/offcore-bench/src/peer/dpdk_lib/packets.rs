//! Packet buffers of the peer: the pool and the burst that is being forwarded.

use std::ffi::CString;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};

use super::ffi::{self, Mbuf, Mempool};
use super::{c_len, errno};

/// An mbuf pool. It outlives every object that may hold one buffer or more.
#[derive(Debug)]
pub(super) struct Pool(*mut Mempool);

// SAFETY: the pool's ring is DPDK's "ring_mp_mc", which supports producers and consumers on several threads, and its
// caches are selected by the calling thread's lcore ID (no cache for threads without an ID).
unsafe impl Send for Pool {}
// SAFETY: as for `Send`, the pool's functions may be called by several threads.
unsafe impl Sync for Pool {}

impl Pool {
    /// Creates a pool of `mbufs` buffers.
    pub(super) fn new(mbufs: u32) -> Result<Self> {
        static POOLS: AtomicU32 = AtomicU32::new(0);
        let name = CString::new(format!("peer{}", POOLS.fetch_add(1, Ordering::Relaxed)))?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: EAL is running, `name` is a NUL-terminated string, and `pool` is a valid place for the result.
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

    /// Returns the page size of the pool's memory in bytes.
    pub(super) fn page_size(&self) -> Result<u64> {
        // SAFETY: the pool has not been freed.
        let size = unsafe { ffi::peer_pool_page_size(self.0) };
        u64::try_from(size).context("EAL does not know the memory of its own pool")
    }

    fn raw(&self) -> *mut Mempool {
        self.0
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the pool has not been freed. Every `Burst` that could hold a buffer also holds the `Arc` around the
        // pool and returns its buffers before it releases the `Arc`.
        unsafe { ffi::peer_pool_free(self.0) }
    }
}

/// Packets that a data thread holds between dequeue and enqueue, at most [`Burst::CAPACITY`]. Dropping the burst
/// returns them to the pool.
pub struct Burst {
    pool: Arc<Pool>,
    /// The first `len` elements are buffers owned by this burst.
    mbufs: [*mut Mbuf; Self::CAPACITY],
    len: usize,
}

impl Burst {
    /// Maximum number of packets.
    pub const CAPACITY: usize = 64;

    pub(super) fn new(pool: Arc<Pool>) -> Self {
        Self { pool, mbufs: [std::ptr::null_mut(); Self::CAPACITY], len: 0 }
    }

    /// Returns the number of packets held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the burst is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes of packet `index`, or `None` if the packet does not exist or spans several buffers (more than
    /// 2048 bytes).
    pub fn packet(&self, index: usize) -> Option<&[u8]> {
        let &mbuf = self.mbufs[..self.len].get(index)?;
        // SAFETY: `mbuf` is owned by this burst.
        let (data, len) = unsafe { payload(mbuf) }?;
        // SAFETY: `payload` returned the initialised bytes of a buffer that this burst owns, and only `&mut self`
        // methods write to it or release it.
        Some(unsafe { std::slice::from_raw_parts(data, len) })
    }

    /// Takes `count` packets of `len` bytes from the pool, appends them to the burst, and writes `content(i)` into the
    /// `i`th.
    ///
    /// # Errors
    /// If the burst has too little room, the pool is empty, or its buffers are shorter than a packet.
    ///
    /// # Panics
    /// If a content has another length.
    pub fn fill(&mut self, count: usize, len: u16, content: impl Fn(usize) -> Vec<u8>) -> Result<()> {
        let room = &mut self.mbufs[self.len..];
        ensure!(count <= room.len(), "{count} packets, and room for {}", room.len());
        // SAFETY: the pool has not been freed, and the first `count` elements of `room` hold no buffer.
        let rc = unsafe { ffi::peer_alloc(self.pool.raw(), room.as_mut_ptr(), c_len(count), len) };
        if rc < 0 {
            return Err(errno(rc).context(format!("taking {count} packets of {len} bytes from the pool")));
        }
        for (index, &mbuf) in room[..count].iter().enumerate() {
            // SAFETY: `mbuf` is owned by this burst.
            let (data, len) = unsafe { payload(mbuf) }.context("a packet in one buffer")?;
            // SAFETY: `payload` returned the bytes of a buffer that only this burst owns, and no other reference to it
            // exists.
            unsafe { std::slice::from_raw_parts_mut(data, len) }.copy_from_slice(&content(index));
        }
        self.len += count;
        Ok(())
    }

    /// Forwarding mode `mac`: writes both addresses into every packet, like testpmd.
    pub fn rewrite_mac(&mut self, destination: &[u8; 6], source: &[u8; 6]) {
        // SAFETY: the first `len` pointers are buffers owned by this burst, of at least 2048 bytes each. Both addresses
        // are 6 bytes long.
        unsafe {
            ffi::peer_mac(self.mbufs.as_mut_ptr(), c_len(self.len), destination.as_ptr(), source.as_ptr());
        }
    }

    /// Returns all packets to the pool.
    pub fn clear(&mut self) {
        // SAFETY: the first `len` pointers are buffers owned by this burst, which forgets them.
        unsafe { ffi::peer_free(self.mbufs.as_mut_ptr(), c_len(self.len)) };
        self.len = 0;
    }

    /// Dequeues up to `max` packets and appends them to the burst.
    pub(super) fn dequeue(&mut self, port: u32, pair: u8, max: usize) -> i32 {
        let max = max.min(Self::CAPACITY - self.len);
        // SAFETY: the `max` elements from `len` on are inside the array, and the pool has not been freed. The caller
        // holds the port and is the data thread.
        let rc = unsafe {
            let free = self.mbufs.as_mut_ptr().add(self.len);
            ffi::peer_dequeue(port, pair.into(), self.pool.raw(), free, c_len(max))
        };
        // A count is at most `max`. An error leaves the array unchanged.
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

/// Returns the address and length of a packet's bytes, or `None` if they span several buffers.
///
/// # Safety
/// `mbuf` must be a packet buffer that the caller owns.
unsafe fn payload(mbuf: *mut Mbuf) -> Option<(*mut u8, usize)> {
    let mut len = 0;
    // SAFETY: the caller owns `mbuf`, and `len` is a valid place for the result.
    let data = unsafe { ffi::peer_payload(mbuf, &raw mut len) };
    (!data.is_null()).then_some((data, len as usize))
}
