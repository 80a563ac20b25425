//! The functions of `peer/dpdk_peer.h`, which documents them. All return a count or 0, or a negative errno.

use std::ffi::{c_char, c_int, c_uint};

/// `struct rte_mbuf`, used only behind pointers.
#[repr(C)]
pub(super) struct Mbuf {
    _opaque: [u8; 0],
}

/// `struct rte_mempool`, used only behind pointers.
#[repr(C)]
pub(super) struct Mempool {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub(super) fn peer_eal_init(
        huge: c_int,
        lcore: c_uint,
        mem_mb: c_uint,
        file_prefix: *const c_char,
    ) -> c_int;
    pub(super) fn peer_attach() -> c_int;
    pub(super) fn peer_detach();
    pub(super) fn peer_pool_create(mbufs: c_uint, name: *const c_char, pool: *mut *mut Mempool) -> c_int;
    pub(super) fn peer_pool_free(pool: *mut Mempool);
    pub(super) fn peer_pool_page_size(pool: *mut Mempool) -> i64;
    pub(super) fn peer_register(path: *const c_char, disabled: u64) -> c_int;
    pub(super) fn peer_unregister(port: c_uint) -> c_int;
    pub(super) fn peer_wait_ready(port: c_uint, pairs: c_uint, timeout_ms: c_uint) -> c_int;
    pub(super) fn peer_touch(port: c_uint) -> c_int;
    pub(super) fn peer_features(port: c_uint, features: *mut u64) -> c_int;
    pub(super) fn peer_dequeue(
        port: c_uint,
        pair: c_uint,
        pool: *mut Mempool,
        mbufs: *mut *mut Mbuf,
        max: c_uint,
    ) -> c_int;
    pub(super) fn peer_enqueue(port: c_uint, pair: c_uint, mbufs: *mut *mut Mbuf, count: c_uint) -> c_int;
    pub(super) fn peer_mac(mbufs: *mut *mut Mbuf, count: c_uint, destination: *const u8, source: *const u8);
    pub(super) fn peer_alloc(pool: *mut Mempool, mbufs: *mut *mut Mbuf, count: c_uint, len: u16) -> c_int;
    pub(super) fn peer_free(mbufs: *mut *mut Mbuf, count: c_uint);
    pub(super) fn peer_payload(mbuf: *mut Mbuf, len: *mut u32) -> *mut u8;
}
