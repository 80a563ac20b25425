//! Counters of a port's queues: what was received and sent, and what was dropped and why.

use offcore_mem::{Burst, PoolCache};
use offcore_stats::named;
use offcore_stats::named::joined;
use offcore_stats::page::{Block, PageError, StatsPage};

named! {
    /// Why a packet was dropped.
    #[repr(u8)]
    pub enum DropReason {
        /// RX: longer than any packet, or than a packet buffer where the port takes only one. TX: longer than the port, or the
        /// guest's buffers, can take, or to be cut into more than 256 segments.
        TooBig = "too_big",
        /// RX: shorter than an Ethernet header, or with an impossible virtio-net header. TX: to be segmented, but no
        /// packet that can be.
        Malformed = "malformed",
        /// TX: the other side left no room for it.
        Full = "full",
        /// RX or TX: the queue is stopped or disabled, or its link is down.
        Down = "down",
        /// TX: the system refused to send it, or a guest no longer does what the packet asks for.
        Failed = "failed",
        /// TX: no packet buffer was free for what it had to be made into.
        NoBuffer = "no_buffer",
        /// RX or TX: an impairment port was told to lose it.
        Impaired = "impaired",
    }
}

/// The counters of a block made here, in order: packets, bytes, polls that left packets with the other side because the
/// pool had no free packet buffer, and a drop counter for each reason.
const COUNTERS: [&str; 3 + DropReason::ALL.len()] =
    joined(["packets", "bytes", "starved"], DropReason::NAMES);

macro_rules! queue_counters {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name(Block);

        impl $name {
            /// Counters of queue `index` of `port` on `page`.
            ///
            /// # Errors
            /// When the page is full.
            pub fn new(page: &StatsPage, port: &str, index: u16) -> Result<Self, PageError> {
                Ok(Self(page.block(&format!(concat!("{}/", $kind, "{}"), port, index), &COUNTERS)?))
            }

            /// Counters that nobody else sees.
            pub fn private() -> Self {
                Self(Block::private(&COUNTERS))
            }

            /// Counts packets that were taken over, and their bytes without FCS.
            #[inline(always)]
            pub fn add(&self, packets: u64, bytes: u64) {
                self.0.counter(0).add(packets);
                self.0.counter(1).add(bytes);
            }

            /// Counts dropped packets.
            #[inline(always)]
            pub fn drop(&self, reason: DropReason, packets: u64) {
                self.0.counter(3 + reason as usize).add(packets);
            }

            /// Frees every packet of the burst and counts it as dropped.
            #[inline]
            pub fn drop_all(&self, reason: DropReason, burst: &mut Burst, cache: &mut PoolCache) {
                self.drop(reason, burst.len() as u64);
                cache.free_all(burst.drain(..));
            }

            /// Counts polls that left packets where they were for want of a packet buffer: nothing was dropped.
            #[inline(always)]
            pub fn starved(&self, polls: u64) {
                self.0.counter(2).add(polls);
            }

            /// Packets so far.
            pub fn packets(&self) -> u64 {
                self.0.counter(0).value()
            }

            /// Bytes so far, without FCS.
            pub fn bytes(&self) -> u64 {
                self.0.counter(1).value()
            }

            /// Packets dropped for `reason` so far.
            pub fn dropped(&self, reason: DropReason) -> u64 {
                self.0.counter(3 + reason as usize).value()
            }

            /// Packets dropped so far.
            pub fn dropped_total(&self) -> u64 {
                DropReason::ALL.iter().map(|&reason| self.dropped(reason)).sum()
            }
        }
    };
}

queue_counters! {
    /// What an RX queue counts.
    RxCounters, "rx"
}
queue_counters! {
    /// What a TX queue counts.
    TxCounters, "tx"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_counted_apart() {
        let counters = TxCounters::private();
        counters.drop(DropReason::Full, 3);
        counters.add(2, 128);
        assert_eq!((counters.dropped(DropReason::Full), counters.dropped_total()), (3, 3));
        assert_eq!((counters.packets(), counters.bytes()), (2, 128));
    }
}
