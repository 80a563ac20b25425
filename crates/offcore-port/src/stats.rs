//! Counters of a port's queues: what was received and sent, and what was dropped and why.

use offcore_mem::{Burst, PoolCache};
use offcore_stats::page::{Block, PageError, StatsPage};

/// Why a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DropReason {
    /// RX: longer than any packet, or than a packet buffer where the port takes only one. TX: longer than the port, or the
    /// guest's buffers, can take, or to be cut into more than 256 segments.
    TooBig,
    /// RX: shorter than an Ethernet header, or with an impossible virtio-net header. TX: to be segmented, but no TCP
    /// packet that can be.
    Malformed,
    /// TX: the other side left no room for it.
    Full,
    /// RX or TX: the queue is stopped or disabled, or its link is down.
    Down,
    /// TX: the system refused to send it, or a guest no longer does what the packet asks for.
    Failed,
    /// TX: no packet buffer was free for what it had to be made into.
    NoBuffer,
}

impl DropReason {
    /// Every reason.
    pub const ALL: [Self; 6] =
        [Self::TooBig, Self::Malformed, Self::Full, Self::Down, Self::Failed, Self::NoBuffer];

    /// The name used in reports and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TooBig => "too_big",
            Self::Malformed => "malformed",
            Self::Full => "full",
            Self::Down => "down",
            Self::Failed => "failed",
            Self::NoBuffer => "no_buffer",
        }
    }
}

/// The counters of a block made here, in order: packets, bytes, a drop counter for each reason, and polls that left
/// packets with the other side because the pool had no free packet buffer.
const COUNTERS: [&str; 3 + DropReason::ALL.len()] =
    ["packets", "bytes", "too_big", "malformed", "full", "down", "failed", "no_buffer", "starved"];

macro_rules! counters {
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
                self.0.counter(2 + reason as usize).add(packets);
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
                self.0.counter(2 + DropReason::ALL.len()).add(polls);
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
                self.0.counter(2 + reason as usize).value()
            }

            /// Packets dropped so far.
            pub fn dropped_total(&self) -> u64 {
                DropReason::ALL.iter().map(|&reason| self.dropped(reason)).sum()
            }
        }
    };
}

counters! {
    /// What an RX queue counts.
    RxCounters, "rx"
}
counters! {
    /// What a TX queue counts.
    TxCounters, "tx"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_and_counters_agree() {
        for (reason, name) in DropReason::ALL.iter().zip(&COUNTERS[2..8]) {
            assert_eq!(reason.name(), *name);
        }
        let counters = TxCounters::private();
        counters.drop(DropReason::Full, 3);
        counters.add(2, 128);
        assert_eq!((counters.dropped(DropReason::Full), counters.dropped_total()), (3, 3));
        assert_eq!((counters.packets(), counters.bytes()), (2, 128));
    }
}
