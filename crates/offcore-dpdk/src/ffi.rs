//! The functions of `shim/shim.h`, which documents them. They return a count or 0, or a negative errno value.

use std::ffi::{c_char, c_int, c_uint, c_void};

use offcore_dma::channel::CopyOp;

/// `struct rte_mempool`, only used behind pointers.
#[repr(C)]
pub(crate) struct Mempool {
    _opaque: [u8; 0],
}

/// The fields of `struct rte_mbuf` that are used here. `shim/pool.c` checks their offsets.
#[repr(C, align(64))]
pub(crate) struct Mbuf {
    pub(crate) buf_addr: *mut u8,
    _buf_iova: u64,
    pub(crate) rearm: Rearm,
    pub(crate) ol_flags: u64,
    pub(crate) packet_type: u32,
    pub(crate) pkt_len: u32,
    pub(crate) data_len: u16,
    _receive: [u16; 11],
    pub(crate) next: *mut Mbuf,
    _transmit: [u64; 7],
}

/// The fields of an mbuf that are reset for every use. They are written as one word and read one by one.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union Rearm {
    pub(crate) word: u64,
    pub(crate) fields: RearmFields,
}

/// The fields of the word.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RearmFields {
    /// Offset of the data from `buf_addr`.
    pub(crate) data_off: u16,
    pub(crate) refcnt: u16,
    pub(crate) nb_segs: u16,
    pub(crate) port: u16,
}

#[repr(C)]
pub(crate) struct PoolConfig {
    pub(crate) name: *const c_char,
    pub(crate) owner: *const c_void,
    pub(crate) chunks: c_uint,
    pub(crate) chunk_size: c_uint,
    pub(crate) base: *mut u8,
    pub(crate) external: c_int,
    pub(crate) unmapped: c_int,
    pub(crate) page_size: usize,
    pub(crate) headers: *mut u8,
    pub(crate) headers_len: usize,
}

#[repr(C)]
// fields-ok: a C interface
pub(crate) struct EthInfo {
    pub(crate) driver: [u8; 64],
    pub(crate) mac: [u8; 6],
    pub(crate) max_rx_queues: u16,
    pub(crate) max_tx_queues: u16,
    pub(crate) mtu: u16,
    pub(crate) min_mtu: u16,
    pub(crate) max_mtu: u16,
    pub(crate) overhead: u16,
    pub(crate) rx_desc_min: u16,
    pub(crate) rx_desc_max: u16,
    pub(crate) tx_desc_min: u16,
    pub(crate) tx_desc_max: u16,
    pub(crate) rx_desc_default: u16,
    pub(crate) tx_desc_default: u16,
    pub(crate) rx_offloads: u64,
    pub(crate) tx_offloads: u64,
    pub(crate) rss: u64,
}

#[repr(C)]
pub(crate) struct EthConfig {
    pub(crate) queues: u16,
    pub(crate) rx_desc: u16,
    pub(crate) tx_desc: u16,
    pub(crate) mtu: u16,
    pub(crate) rx_offloads: u64,
    pub(crate) tx_offloads: u64,
    pub(crate) rss: u64,
    pub(crate) promiscuous: c_int,
    pub(crate) pool: *mut Mempool,
    pub(crate) base: *mut u8,
    pub(crate) len: usize,
    pub(crate) unmapped: c_int,
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct EthStats {
    pub(crate) missed: u64,
    pub(crate) rx_errors: u64,
    pub(crate) no_mbuf: u64,
    pub(crate) tx_errors: u64,
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct EthLink {
    pub(crate) mbit: u32,
    pub(crate) up: c_int,
    pub(crate) full_duplex: c_int,
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct DmaInfo {
    pub(crate) capabilities: u64,
    pub(crate) max_vchans: u16,
    pub(crate) min_desc: u16,
    pub(crate) max_desc: u16,
    pub(crate) node: i16,
}

unsafe extern "C" {
    pub(crate) fn off_eal_init(argc: c_int, argv: *mut *mut c_char, said: c_int) -> c_int;
    pub(crate) fn off_probe(devargs: *const c_char) -> c_int;
    pub(crate) fn off_iova_is_va() -> c_int;
    pub(crate) fn off_memory_register(base: *mut u8, len: usize, page_size: usize, unmapped: c_int) -> c_int;
    pub(crate) fn off_memory_map_vfio(base: *mut u8, len: usize) -> c_int;

    pub(crate) fn off_pool_headers_len(chunks: c_uint) -> usize;
    pub(crate) fn off_pool_create(
        config: *const PoolConfig,
        pool: *mut *mut Mempool,
        first: *mut *mut Mbuf,
        stride: *mut usize,
    ) -> c_int;
    pub(crate) fn off_pool_alloc(pool: *mut Mempool, mbufs: *mut *mut Mbuf, count: c_uint) -> c_int;
    pub(crate) fn off_mbuf_free(mbuf: *mut Mbuf);
    pub(crate) fn off_mbuf_restore(mbuf: *mut Mbuf, buffer: *mut u8, len: c_uint, unmapped: c_int);

    pub(crate) fn off_eth_rss(kinds: c_uint) -> u64;
    pub(crate) fn off_eth_find(name: *const c_char) -> c_int;
    pub(crate) fn off_eth_info(port: u16, info: *mut EthInfo) -> c_int;
    pub(crate) fn off_eth_start(port: u16, config: *const EthConfig, step: *mut *const c_char) -> c_int;
    pub(crate) fn off_eth_close(port: u16, remove: c_int);
    pub(crate) fn off_eth_stats(port: u16, stats: *mut EthStats) -> c_int;
    pub(crate) fn off_eth_link(port: u16, link: *mut EthLink) -> c_int;
    pub(crate) fn off_eth_rx(port: u16, queue: u16, mbufs: *mut *mut Mbuf, max: u16) -> u16;
    pub(crate) fn off_eth_tx(port: u16, queue: u16, mbufs: *mut *mut Mbuf, count: u16) -> u16;

    pub(crate) fn off_dma_find(name: *const c_char) -> c_int;
    pub(crate) fn off_dma_info(dev: i16, info: *mut DmaInfo) -> c_int;
    pub(crate) fn off_dma_start(dev: i16, desc: u16) -> c_int;
    pub(crate) fn off_dma_stop(dev: i16) -> c_int;
    pub(crate) fn off_dma_capacity(dev: i16) -> u16;
    pub(crate) fn off_dma_copy(dev: i16, ops: *const CopyOp, count: c_uint) -> c_uint;
    pub(crate) fn off_dma_submit(dev: i16);
    pub(crate) fn off_dma_completed(dev: i16, max: u16, failed: *mut c_int) -> u16;
    pub(crate) fn off_dma_statuses(dev: i16, max: u16, statuses: *mut u32) -> u16;
}

/// Converts a negative errno value to an error.
pub(crate) fn errno(rc: c_int) -> std::io::Error {
    std::io::Error::from_raw_os_error(rc.wrapping_neg())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn mbuf_layout_matches_the_shim() {
        assert_eq!((size_of::<Mbuf>(), size_of::<Rearm>()), (128, 8));
        let fields = [offset_of!(Mbuf, rearm), offset_of!(Mbuf, ol_flags), offset_of!(Mbuf, packet_type)];
        assert_eq!(fields, [16, 24, 32]);
        let fields = [offset_of!(Mbuf, pkt_len), offset_of!(Mbuf, data_len), offset_of!(Mbuf, next)];
        assert_eq!(fields, [36, 40, 64]);
    }
}
