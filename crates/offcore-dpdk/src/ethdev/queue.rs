//! The queues of a network device: one call of DPDK a burst.

use std::sync::Arc;

use offcore_mem::{Burst, Packet, PoolCache};

use super::Ethdev;
use crate::convert::{self, Mbufs, NO_MBUFS};
use crate::ffi;
use crate::mempool::Lent;

/// What a call received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Receipt {
    pub packets: usize,
    pub bytes: u64,
    /// Packets that are none, and were freed: shorter than an Ethernet header, or of too many buffers.
    pub malformed: u64,
}

/// What a call sent.
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
    /// Where the driver puts what it hands over; only used during a call.
    mbufs: Mbufs,
}

// SAFETY: the list of mbufs means nothing between two calls.
unsafe impl Send for EthRx {}

impl EthRx {
    pub(super) fn new(device: Arc<Ethdev>, queue: u16) -> Self {
        Self { device, queue, mbufs: NO_MBUFS }
    }

    /// The queue's device.
    pub fn device(&self) -> &Ethdev {
        &self.device
    }

    /// Appends up to `max` packets to `burst`, as far as it has room. What the driver needs of packet buffers comes from
    /// `cache`.
    #[inline]
    pub fn rx(&mut self, cache: &mut PoolCache, burst: &mut Burst, max: usize) -> Receipt {
        let max = max.min(burst.remaining_capacity());
        let count = {
            let _lent = Lent::new(cache);
            // SAFETY: the device is running, the queue is its own and this half its only user; there is room for `max`.
            unsafe { ffi::off_eth_rx(self.device.port, self.queue, self.mbufs.as_mut_ptr(), max as u16) }
        };
        if count == 0 {
            return Receipt::default();
        }
        let before = burst.len();
        // SAFETY: the driver has just handed these over, at most as many as there is room for.
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
    /// What the driver is given; only used during a call.
    mbufs: Mbufs,
}

// SAFETY: the list of mbufs means nothing between two calls.
unsafe impl Send for EthTx {}

impl EthTx {
    pub(super) fn new(device: Arc<Ethdev>, queue: u16) -> Self {
        Self { device, queue, mbufs: NO_MBUFS }
    }

    /// The queue's device.
    pub fn device(&self) -> &Ethdev {
        &self.device
    }

    /// Sends packets from the front of `burst`; those that the device has no room for stay there. What it frees goes to
    /// `cache`.
    ///
    /// # Panics
    /// When a packet is of another pool than the device's.
    #[inline]
    pub fn tx(&mut self, cache: &mut PoolCache, burst: &mut Burst) -> Sent {
        let offered = burst.len();
        let bytes = convert::transmit(self.device.pool, burst, &mut self.mbufs);
        let count = {
            let _lent = Lent::new(cache);
            // SAFETY: the device is running, the queue is its own and this half its only user; the mbufs are those of
            // packets that are ours.
            unsafe { ffi::off_eth_tx(self.device.port, self.queue, self.mbufs.as_mut_ptr(), offered as u16) }
        };
        let count = usize::from(count).min(offered);
        if count < offered {
            return self.sent_part(burst, count, bytes);
        }
        // The driver has the buffers now.
        burst.clear();
        Sent { packets: count, bytes }
    }

    /// Only the first `count` packets of the burst, which has `bytes`, were taken.
    #[cold]
    fn sent_part(&self, burst: &mut Burst, count: usize, bytes: u64) -> Sent {
        convert::untransmit(&self.mbufs[count..burst.len()]);
        // By what is left: a driver that copies has freed what it took, and another worker may have the buffers by now.
        let pool = self.device.pool.pool();
        let left: u64 = burst[count..].iter().map(|packet: &Packet| pool.total_len(packet) as u64).sum();
        burst.drain(..count).for_each(drop);
        Sent { packets: count, bytes: bytes - left }
    }
}
