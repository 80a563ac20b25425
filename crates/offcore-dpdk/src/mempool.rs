//! The packet pool as a DPDK mempool of mbuf headers: mbuf i describes chunk i of the pool.
//!
//! ```text
//! mbuf i --buf_addr--> chunk i of the pool | headroom | data ... |
//! ```
//! The chunks may also be in a [device's memory](DeviceMemory), where the network card then receives packets and from
//! where it sends them: handles belong to the pool, and neither this module nor [`crate::convert`] accesses packets'
//! bytes.
//!
//! The mempool has its own operations. A driver's buffers for received packets are taken from the packet pool, and the
//! buffers that it frees after sending return there. This uses the cache of the worker that calls the driver
//! (`ActiveCache`), or a cache behind a lock if the driver allocates or frees outside of such calls (start, stop, its
//! own threads).

use std::cell::Cell;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use offcore_mem::mapping::MemoryError;
use offcore_mem::{DeviceMemory, Hugepages, Mapping, Packet, Pool, PoolCache};

use crate::eal;
use crate::ffi::{self, Mbuf, Mempool, PoolConfig};

/// Why a pool cannot be DPDK's.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum PoolError {
    /// mbufs of the packet buffers: {0}
    Memory(#[from] MemoryError),
    /// packet buffers in the memory of {device}: it has {found} bytes for them, expected {expected}
    Small { device: String, found: usize, expected: usize },
    /// {what}: {source}
    Dpdk { what: String, source: std::io::Error },
}

/// A packet pool with mbufs for its chunks. It is created once per pool and lives as long as the process.
#[derive(Debug)]
pub struct MbufPool {
    pool: &'static Pool,
    /// The memory of the chunks' bytes, if it is not the pool's.
    elsewhere: Option<DeviceMemory>,
    mempool: NonNull<Mempool>,
    first: NonNull<Mbuf>,
    /// Distance in bytes between two mbufs.
    stride: usize,
    /// State of the mempool's operations.
    source: &'static Source,
    _headers: Mapping,
}

// SAFETY: any thread may use a mempool, because its operations use the thread's lent cache or a lock. An mbuf is only
// written by the owner of its chunk.
unsafe impl Send for MbufPool {}
// SAFETY: as above.
unsafe impl Sync for MbufPool {}

/// The pool behind a mempool, for the mempool's operations.
#[derive(Debug)]
struct Source {
    pool: &'static Pool,
    /// Address of the chunks' bytes.
    base: usize,
    /// Whether the bytes have no CPU address.
    unmapped: bool,
    /// Set while the mempool is filled with its mbufs, whose chunks are already in the pool.
    filling: AtomicBool,
    /// The cache of threads that lend none; `None` unless such a thread needed it.
    fallback: Mutex<Option<PoolCache>>,
    /// Address of the mbufs, once it is known.
    first: AtomicPtr<Mbuf>,
    stride: AtomicUsize,
}

/// One entry for each registered pool.
static POOLS: Mutex<Vec<&'static MbufPool>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MbufPool {
    /// Returns the mbufs of `pool`. The first call registers its memory with DPDK. The EAL must be running.
    ///
    /// # Errors
    /// If memory is exhausted or DPDK refuses a step.
    pub fn of(pool: &'static Pool) -> Result<&'static Self, PoolError> {
        Self::find_or_create(pool, None)
    }

    /// Returns mbufs for the same chunks in `memory` instead of the pool's memory. They keep `memory` alive.
    ///
    /// # Errors
    /// As for [`MbufPool::of`]; in addition, if `memory` is smaller than the pool.
    pub fn elsewhere(pool: &'static Pool, memory: &DeviceMemory) -> Result<&'static Self, PoolError> {
        if !memory.holds(pool) {
            let expected = pool.chunks() * pool.chunk_size();
            return Err(PoolError::Small { device: memory.device().into(), found: memory.len(), expected });
        }
        Self::find_or_create(pool, Some(memory))
    }

    fn find_or_create(
        pool: &'static Pool,
        memory: Option<&DeviceMemory>,
    ) -> Result<&'static Self, PoolError> {
        let mut pools = lock(&POOLS);
        let is_it = |known: &&&Self| {
            let bases = [known.elsewhere.as_ref(), memory].map(|memory| memory.map(DeviceMemory::base));
            std::ptr::eq(known.pool, pool) && bases[0] == bases[1]
        };
        if let Some(known) = pools.iter().find(is_it) {
            return Ok(known);
        }
        match memory {
            None => register(pool)?,
            Some(memory) => register_elsewhere(memory)?,
        }
        let made = Box::leak(Box::new(Self::new(pool, memory.cloned(), pools.len())?));
        pools.push(made);
        Ok(made)
    }

    fn new(pool: &'static Pool, elsewhere: Option<DeviceMemory>, number: usize) -> Result<Self, PoolError> {
        let refused = |rc| PoolError::Dpdk {
            what: format!("making mbufs for {} packet buffers", pool.chunks()),
            source: ffi::errno(rc),
        };
        let chunks = pool.chunks() as c_uint;
        let own = (pool.memory().0.as_ptr(), pool.page_size());
        let (base, page_size) = elsewhere.as_ref().map_or(own, |memory| (memory.base(), memory.page_size()));
        let unmapped = elsewhere.as_ref().is_some_and(|memory| !memory.is_mapped());
        // SAFETY: the function only returns a size.
        let len = unsafe { ffi::off_pool_headers_len(chunks) };
        let (headers, _fd) = Mapping::memfd("offcore-mbufs", len, Hugepages::Auto)?;
        let source: &'static Source = Box::leak(Box::new(Source {
            pool,
            base: base.addr(),
            unmapped,
            filling: true.into(),
            fallback: Mutex::new(None),
            first: std::ptr::null_mut::<Mbuf>().into(),
            stride: 0.into(),
        }));
        let name = CString::new(format!("offcore-{number}")).map_err(|_| refused(-libc::EINVAL))?;
        let config = PoolConfig {
            name: name.as_ptr(),
            owner: std::ptr::from_ref(source).cast(),
            chunks,
            chunk_size: pool.chunk_size() as c_uint,
            base,
            external: elsewhere.is_some().into(),
            unmapped: unmapped.into(),
            page_size,
            headers: headers.base().as_ptr(),
            headers_len: headers.len(),
        };
        let (mut mempool, mut first, mut stride) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: the EAL is running; the configuration lives as long as the call; the memory that it refers to lives
        // as long as the process, and the headers are not used elsewhere.
        let rc = unsafe { ffi::off_pool_create(&config, &mut mempool, &mut first, &mut stride) };
        let (Some(mempool), Some(first)) = (NonNull::new(mempool), NonNull::new(first)) else {
            return Err(refused(if rc < 0 { rc } else { -libc::ENOMEM }));
        };
        source.first.store(first.as_ptr(), Ordering::Relaxed);
        source.stride.store(stride, Ordering::Relaxed);
        source.filling.store(false, Ordering::Release);
        Ok(Self { pool, elsewhere, mempool, first, stride, source, _headers: headers })
    }

    /// Returns the packet pool.
    pub fn pool(&self) -> &'static Pool {
        self.pool
    }

    /// Returns the address of the chunks' bytes.
    #[inline(always)]
    pub(crate) fn base(&self) -> usize {
        self.source.base
    }

    /// Returns the device memory that contains the bytes, if they are not in the pool.
    pub(crate) fn memory(&self) -> Option<&DeviceMemory> {
        self.elsewhere.as_ref()
    }

    pub(crate) fn mempool(&self) -> *mut Mempool {
        self.mempool.as_ptr()
    }

    /// Returns the mbuf of chunk `chunk`, which must be a chunk of the pool.
    #[inline(always)]
    pub(crate) fn mbuf(&self, chunk: u32) -> *mut Mbuf {
        self.first.as_ptr().wrapping_byte_add(chunk as usize * self.stride)
    }

    /// Returns the chunks cached for threads that lend no cache to the pool. Called after a device was stopped.
    pub(crate) fn settle(&self) {
        *lock(&self.source.fallback) = None;
    }
}

/// Registers the pool's memory with DPDK.
fn register(pool: &'static Pool) -> Result<(), PoolError> {
    let ((base, len), page_size) = (pool.memory(), pool.page_size());
    if !eal::iova_is_va() && page_size < 2 << 20 {
        return Err(PoolError::Dpdk {
            what: "with --iova-mode=pa the packet buffers must be on hugepages: sysctl -w vm.nr_hugepages=N and \
                   --hugepages 2M"
                .into(),
            source: ffi::errno(-libc::EINVAL),
        });
    }
    // SAFETY: the EAL is running; the memory belongs to the pool and is never unmapped.
    let rc = unsafe { ffi::off_memory_register(base.as_ptr(), len, page_size, 0) };
    if rc < 0 && rc != -libc::EEXIST {
        let what = format!("making {len} bytes of packet buffers known to DPDK");
        return Err(PoolError::Dpdk { what, source: ffi::errno(rc) });
    }
    Ok(())
}

/// Registers a device's memory with DPDK. The mbufs created for it keep it alive.
fn register_elsewhere(memory: &DeviceMemory) -> Result<(), PoolError> {
    let (len, unmapped) = (memory.len(), c_int::from(!memory.is_mapped()));
    // SAFETY: the EAL is running; DPDK only records the address, which belongs to the device while the memory is kept.
    let rc = unsafe { ffi::off_memory_register(memory.base(), len, memory.page_size(), unmapped) };
    if rc < 0 && rc != -libc::EEXIST {
        let what = format!("making {len} bytes in the memory of {} known to DPDK", memory.device());
        return Err(PoolError::Dpdk { what, source: ffi::errno(rc) });
    }
    Ok(())
}

thread_local! {
    /// The cache of the worker that is calling a driver on this thread.
    static ACTIVE_CACHE: Cell<*mut PoolCache> = const { Cell::new(std::ptr::null_mut()) };
}

/// While this lives, the mempool's operations on this thread use the cache that it was created with.
#[derive(Debug)]
pub(crate) struct ActiveCache<'a> {
    _cache: PhantomData<&'a mut PoolCache>,
    /// It must stay on its thread.
    _stays: PhantomData<*const ()>,
}

impl<'a> ActiveCache<'a> {
    #[inline(always)]
    pub(crate) fn new(cache: &'a mut PoolCache) -> Self {
        ACTIVE_CACHE.set(cache);
        Self { _cache: PhantomData, _stays: PhantomData }
    }
}

impl Drop for ActiveCache<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        ACTIVE_CACHE.set(std::ptr::null_mut());
    }
}

impl Source {
    /// Calls `act` with the cache that this thread lends, or with the shared one.
    #[inline(always)]
    fn with<R>(&self, act: impl FnOnce(&mut PoolCache) -> R) -> R {
        let lent = ACTIVE_CACHE.get();
        // SAFETY: `ActiveCache` borrows the cache mutably while the pointer is set. Its owner only calls a driver
        // meanwhile, which calls this function sequentially.
        if let Some(cache) = unsafe { lent.as_mut() }
            && std::ptr::eq(cache.pool(), self.pool)
        {
            return act(cache);
        }
        self.with_fallback(act)
    }

    /// Points an unused `mbuf` at its chunk again. A driver had attached another buffer to it (mlx5 with mprq_en=1).
    /// When DPDK detached that buffer, it pointed the mbuf at the memory behind itself, where other mempools have their
    /// data.
    #[cold]
    fn restore(&self, mbuf: *mut Mbuf) -> Option<Packet> {
        let (first, stride) = (self.first.load(Ordering::Relaxed), self.stride.load(Ordering::Relaxed));
        let chunk = mbuf.addr().checked_sub(first.addr())? / stride;
        if chunk >= self.pool.chunks() {
            return None;
        }
        let place = chunk * self.pool.chunk_size();
        let buffer = std::ptr::with_exposed_provenance_mut::<u8>(self.base).wrapping_add(place);
        // SAFETY: the mbuf belongs to the mempool, all of whose mbufs have a chunk; it is not used elsewhere, and this
        // is its chunk.
        unsafe {
            ffi::off_mbuf_restore(mbuf, buffer, self.pool.chunk_size() as c_uint, self.unmapped.into())
        };
        // SAFETY: as in `give_back`.
        unsafe { self.pool.reclaim(place as u64, 0) }
    }

    #[cold]
    fn with_fallback<R>(&self, act: impl FnOnce(&mut PoolCache) -> R) -> R {
        act(lock(&self.fallback).get_or_insert_with(|| self.pool.cache()))
    }
}

/// Takes `count` chunks from the pool for a driver, and writes their mbufs to `mbufs`. It takes all of them or none.
///
/// # Safety
/// `source` must be a mempool's owner, and `mbufs` must have room for `count` entries.
#[unsafe(no_mangle)]
unsafe extern "C" fn offcore_dpdk_dequeue(
    source: *const c_void,
    mbufs: *mut *mut Mbuf,
    count: c_uint,
) -> c_int {
    // SAFETY: `MbufPool::new` gave this owner to the mempool, and it is never freed.
    let source = unsafe { &*source.cast::<Source>() };
    let (first, stride) = (source.first.load(Ordering::Relaxed), source.stride.load(Ordering::Relaxed));
    // SAFETY: the caller guarantees room for `count` entries.
    let mbufs = unsafe { std::slice::from_raw_parts_mut(mbufs, count as usize) };
    source.with(|cache| {
        for at in 0..mbufs.len() {
            let Some(packet) = cache.take() else {
                give_back(source, cache, &mbufs[..at]);
                return -libc::ENOBUFS;
            };
            mbufs[at] = first.wrapping_byte_add(packet.chunk() as usize * stride);
            cache.pool().lend(packet);
        }
        0
    })
}

/// Returns the chunks of `count` mbufs to the pool.
///
/// # Safety
/// `source` must be a mempool's owner, and the mbufs at `mbufs` must belong to it and be unused.
#[unsafe(no_mangle)]
unsafe extern "C" fn offcore_dpdk_enqueue(
    source: *const c_void,
    mbufs: *const *mut Mbuf,
    count: c_uint,
) -> c_int {
    // SAFETY: as for dequeue.
    let source = unsafe { &*source.cast::<Source>() };
    if source.filling.load(Ordering::Relaxed) {
        return 0;
    }
    // SAFETY: the caller guarantees `count` entries.
    let mbufs = unsafe { std::slice::from_raw_parts(mbufs, count as usize) };
    source.with(|cache| give_back(source, cache, mbufs));
    0
}

#[inline(always)]
fn give_back(source: &Source, cache: &mut PoolCache, mbufs: &[*mut Mbuf]) {
    let base = source.base;
    for &mbuf in mbufs {
        // SAFETY: an unused mbuf of the mempool.
        let place = unsafe { (*mbuf).buf_addr }.addr().wrapping_sub(base);
        // SAFETY: the chunk was lent when its mbuf went to a driver, by dequeue or with a sent packet, and a driver
        // frees an mbuf once.
        let packet = unsafe { source.pool.reclaim(place as u64, 0) };
        if let Some(packet) = packet.or_else(|| source.restore(mbuf)) {
            cache.free(packet);
        }
    }
}

/// Returns the approximate number of free chunks.
///
/// # Safety
/// `source` must be a mempool's owner.
#[unsafe(no_mangle)]
unsafe extern "C" fn offcore_dpdk_count(source: *const c_void) -> c_uint {
    // SAFETY: as for dequeue.
    let source = unsafe { &*source.cast::<Source>() };
    c_uint::try_from(source.pool.available()).unwrap_or(c_uint::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::ethdev::{Ethdev, Request};

    #[test]
    fn driver_mbuf_returns_its_chunk() {
        let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
        let request = Request { device: "net_null7".into(), queues: 1, ..Request::default() };
        let device = Ethdev::open(&request, pool).unwrap();
        let mbufs = MbufPool::of(pool).unwrap();
        let mut cache = pool.cache();
        let mut taken = [std::ptr::null_mut::<Mbuf>(); 32];
        let lent = ActiveCache::new(&mut cache);
        for _ in 0..2 * pool.chunks() / taken.len() {
            // SAFETY: the mempool is valid, and there is room for that number of mbufs.
            let rc =
                unsafe { ffi::off_pool_alloc(mbufs.mempool(), taken.as_mut_ptr(), taken.len() as c_uint) };
            assert_eq!(rc, 0, "chunks are missing");
            for &mbuf in &taken {
                // SAFETY: the mbuf was just taken and is not used elsewhere. rte_pktmbuf_detach leaves an mbuf with
                // this address.
                unsafe {
                    let own = (*mbuf).buf_addr;
                    (*mbuf).buf_addr = mbuf.cast::<u8>().wrapping_add(size_of::<Mbuf>());
                    ffi::off_mbuf_free(mbuf);
                    assert_eq!((*mbuf).buf_addr, own);
                }
            }
        }
        drop((lent, device));
        let all: Vec<_> = std::iter::from_fn(|| cache.take()).collect();
        assert_eq!(all.len(), pool.chunks());
        cache.free_all(all);
    }
}
