//! The queues of a network device, with one DPDK call per burst.

use std::sync::Arc;

use offcore_mem::{Burst, Packet, PoolCache};

use super::Ethdev;
use crate::convert::{self, Mbufs, NO_MBUFS};
use crate::ffi;
use crate::mempool::ActiveCache;

/// The result of receiving.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Receipt {
    pub packets: usize,
    pub bytes: u64,
    /// Invalid packets, which were freed: shorter than an Ethernet header, or with too many buffers.
    pub malformed: u64,
}

/// The result of sending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    pub packets: usize,
    pub bytes: u64,
}

/// The receiving half of a queue.
#[derive(Debug)]
pub struct EthRx {
    device: Arc<Ethdev>,
    queue: u16,
    /// Filled by the driver; only used during a call.
    mbufs: Mbufs,
}

// SAFETY: the list of mbufs is not used between two calls.
unsafe impl Send for EthRx {}

impl EthRx {
    pub(super) fn new(device: Arc<Ethdev>, queue: u16) -> Self {
        Self { device, queue, mbufs: NO_MBUFS }
    }

    /// The queue's device.
    pub fn device(&self) -> &Ethdev {
        &self.device
    }

    /// Appends up to `max` packets to `burst`, while it has room. The driver takes new packet buffers from `cache`.
    #[inline]
    pub fn rx(&mut self, cache: &mut PoolCache, burst: &mut Burst, max: usize) -> Receipt {
        let max = max.min(burst.remaining_capacity());
        let count = {
            let _lent = ActiveCache::new(cache);
            // SAFETY: the device is running, and this half is the only user of the queue. `mbufs` has room for `max`
            // entries.
            unsafe { ffi::off_eth_rx(self.device.port, self.queue, self.mbufs.as_mut_ptr(), max as u16) }
        };
        if count == 0 {
            return Receipt::default();
        }
        let before = burst.len();
        // SAFETY: the driver has just returned these mbufs, and there are at most as many as the burst has room for.
        let received =
            unsafe { convert::receive(self.device.pool, &self.mbufs[..usize::from(count).min(max)], burst) };
        Receipt { packets: burst.len() - before, bytes: received.bytes, malformed: received.malformed }
    }
}

/// The sending half of a queue.
#[derive(Debug)]
pub struct EthTx {
    device: Arc<Ethdev>,
    queue: u16,
    /// Passed to the driver; only used during a call.
    mbufs: Mbufs,
}

// SAFETY: the list of mbufs is not used between two calls.
unsafe impl Send for EthTx {}

impl EthTx {
    pub(super) fn new(device: Arc<Ethdev>, queue: u16) -> Self {
        Self { device, queue, mbufs: NO_MBUFS }
    }

    /// The queue's device.
    pub fn device(&self) -> &Ethdev {
        &self.device
    }

    /// Sends packets from the front of `burst`. Packets that the device has no room for stay there. The driver frees
    /// packet buffers into `cache`.
    ///
    /// # Panics
    /// If a packet belongs to another pool than the device's.
    #[inline]
    pub fn tx(&mut self, cache: &mut PoolCache, burst: &mut Burst) -> Sent {
        let offered = burst.len();
        let bytes = convert::transmit(self.device.pool, burst, &mut self.mbufs);
        let count = {
            let _lent = ActiveCache::new(cache);
            // SAFETY: the device is running, and this half is the only user of the queue. The mbufs belong to packets
            // that the burst owns.
            unsafe { ffi::off_eth_tx(self.device.port, self.queue, self.mbufs.as_mut_ptr(), offered as u16) }
        };
        let count = usize::from(count).min(offered);
        if count < offered {
            return self.sent_part(burst, count, bytes);
        }
        // The driver owns the buffers now.
        burst.clear();
        Sent { packets: count, bytes }
    }

    /// Handles the case that only the first `count` packets of the burst, whose length is `bytes`, were accepted.
    #[cold]
    fn sent_part(&self, burst: &mut Burst, count: usize, bytes: u64) -> Sent {
        convert::untransmit(&self.mbufs[count..burst.len()]);
        // The length is computed from the packets that are left: a driver that copies has already freed the accepted
        // ones, and another worker may have taken their buffers.
        let pool = self.device.pool.pool();
        let left: u64 = burst[count..].iter().map(|packet: &Packet| pool.total_len(packet) as u64).sum();
        burst.drain(..count).for_each(drop);
        Sent { packets: count, bytes: bytes - left }
    }
}
