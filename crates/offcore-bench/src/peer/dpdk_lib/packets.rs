//! Packet buffers of the peer: the burst being forwarded.

use std::ffi::CString;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};

use super::ffi::{self, Mbuf, Mempool};
use super::{c_len, errno};

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
        // SAFETY: the pool is live, and every `Burst` that could hold one of its buffers also holds the Arc around
        // it and returns its buffers before it lets go of that.
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

    /// Takes `count` packets of `len` bytes from the pool, behind those held, and writes `content(i)` into the `i`th.
    ///
    /// # Errors
    /// When there is no room for so many, the pool is dry, or its buffers are shorter than a packet.
    ///
    /// # Panics
    /// When a content has another length.
    pub fn fill(&mut self, count: usize, len: u16, content: impl Fn(usize) -> Vec<u8>) -> Result<()> {
        let room = &mut self.mbufs[self.len..];
        ensure!(count <= room.len(), "{count} packets, and room for {}", room.len());
        // SAFETY: the pool is live, and the first `count` elements of `room` hold no buffer.
        let rc = unsafe { ffi::peer_alloc(self.pool.raw(), room.as_mut_ptr(), c_len(count), len) };
        if rc < 0 {
            return Err(errno(rc).context(format!("taking {count} packets of {len} bytes from the pool")));
        }
        for (index, &mbuf) in room[..count].iter().enumerate() {
            // SAFETY: `mbuf` is owned by this burst.
            let (data, len) = unsafe { payload(mbuf) }.context("a packet in one buffer")?;
            // SAFETY: `payload` gave the bytes of a buffer that this burst owns alone, and nobody else has a reference.
            unsafe { std::slice::from_raw_parts_mut(data, len) }.copy_from_slice(&content(index));
        }
        self.len += count;
        Ok(())
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
