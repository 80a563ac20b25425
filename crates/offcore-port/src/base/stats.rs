//! Counters of a port's queues: packets received, sent, and dropped, with the reasons.

use offcore_mem::{Burst, PoolCache};
use offcore_stats::named;
use offcore_stats::named::joined;
use offcore_stats::page::{Block, PageError, StatsPage};

named! {
    /// The reason for which a packet was dropped.
    #[repr(u8)]
    pub enum DropReason {
        /// RX: longer than the longest packet, or longer than a packet buffer if the port uses one per packet. TX:
        /// longer than the port or the guest's buffers can take, or needs more than 256 segments.
        TooBig = "too_big",
        /// RX: shorter than an Ethernet header, or with an invalid virtio-net header. TX: requests segmentation that is
        /// not possible for this packet.
        Malformed = "malformed",
        /// TX: the other side had no room for it.
        Full = "full",
        /// RX or TX: the queue is stopped or disabled, or its link is down.
        Down = "down",
        /// TX: the system refused to send it, or a guest no longer accepts the packet's offload request.
        Failed = "failed",
        /// TX: no packet buffer was free for the packets that it had to be converted into.
        NoBuffer = "no_buffer",
        /// RX or TX: an impairment port dropped it on purpose.
        Impaired = "impaired",
    }
}

/// Names of a queue's counters, in order: packets, bytes, polls that left packets with the other side because the pool
/// had no free packet buffer, and one drop counter for each reason.
const COUNTERS: [&str; 3 + DropReason::ALL.len()] =
    joined(["packets", "bytes", "starved"], DropReason::NAMES);

macro_rules! queue_counters {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name(Block);

        impl $name {
            /// Creates the counters of queue `index` of `port` on `page`.
            ///
            /// # Errors
            /// If the page is full.
            pub fn new(page: &StatsPage, port: &str, index: u16) -> Result<Self, PageError> {
                Ok(Self(page.block(&format!(concat!("{}/", $kind, "{}"), port, index), &COUNTERS)?))
            }

            /// Creates counters that are not on a statistics page.
            pub fn private() -> Self {
                Self(Block::private(&COUNTERS))
            }

            /// Counts packets that were received or sent, and their bytes without FCS.
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

            /// Counts polls that left packets unreceived because no packet buffer was free. No packets were dropped.
            #[inline(always)]
            pub fn starved(&self, polls: u64) {
                self.0.counter(2).add(polls);
            }

            /// Number of packets so far.
            pub fn packets(&self) -> u64 {
                self.0.counter(0).value()
            }

            /// Number of bytes so far, without FCS.
            pub fn bytes(&self) -> u64 {
                self.0.counter(1).value()
            }

            /// Number of packets dropped for `reason` so far.
            pub fn dropped(&self, reason: DropReason) -> u64 {
                self.0.counter(3 + reason as usize).value()
            }

            /// Number of packets dropped so far.
            pub fn dropped_total(&self) -> u64 {
                DropReason::ALL.iter().map(|&reason| self.dropped(reason)).sum()
            }
        }
    };
}

queue_counters! {
    /// Counters of an RX queue.
    RxCounters, "rx"
}
queue_counters! {
    /// Counters of a TX queue.
    TxCounters, "tx"
}
