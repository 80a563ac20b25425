//! Counters of a port's queues: packets received, sent, and dropped, with the reasons.

use offcore_mem::{Burst, PoolCache};
use offcore_stats::page::{Block, PageError, StatsPage};
use offcore_stats::{Family, Label, counters, named};

named! {
    /// The reason for which a packet was dropped.
    #[repr(u8)]
    pub enum DropReason counts Packets {
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

counters! {
    /// Counters of a queue in addition to the dropped packets.
    pub struct QueueCounts, enum QueueCount {
        /// Packets received or sent.
        Packets = packets: Packets,
        /// Bytes of these packets, without FCS.
        Bytes = bytes: Bytes,
        /// Polls that left packets with the other side because no packet buffer was free.
        Starved = starved: Events,
    }
}

/// The names of a switch's ports in statistics, by number. Without names, a port is called `portN`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortNames(pub Vec<String>);

impl PortNames {
    /// Returns the name of port number `port`.
    pub fn of(&self, port: usize) -> String {
        self.0.get(port).map_or_else(|| format!("port{port}"), Clone::clone)
    }

    /// Returns the number of the port with this name.
    pub fn number(&self, name: &str) -> Option<usize> {
        match self.0.is_empty() {
            true => name.strip_prefix("port")?.parse().ok(),
            false => self.0.iter().position(|known| known == name),
        }
    }

    /// Returns the name of the ring behind the RX queues of port number `port`.
    pub fn ring_of(&self, port: usize) -> String {
        self.0.get(port).map_or_else(|| format!("ring{port}"), |name| format!("{name}>ring"))
    }
}

/// Returns whether a name in statistics belongs to a port. Rings, mirrors and pipelines of the switch have other names.
pub fn is_port(name: &str) -> bool {
    let numbered =
        |prefix| name.strip_prefix(prefix).is_some_and(|number: &str| number.parse::<usize>().is_ok());
    !name.contains('>') && !["ring", "mirror", "pipeline"].into_iter().any(numbered)
}

/// The counters of an RX queue.
pub static RX: Family =
    Family::new("rx", "Packets received by a queue.", &[&QueueCounts::COUNTERS, &DropReason::COUNTERS]);
/// The counters of a TX queue.
pub static TX: Family =
    Family::new("tx", "Packets sent by a queue.", &[&QueueCounts::COUNTERS, &DropReason::COUNTERS]);
/// Index of the first drop counter.
const DROPS: usize = QueueCounts::COUNTERS.len();

macro_rules! queue_counters {
    ($(#[$doc:meta])* $name:ident, $family:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name(Block);

        impl $name {
            /// Creates the counters of queue `index` of `port` on `page`.
            ///
            /// # Errors
            /// If the page is full.
            pub fn new(page: &StatsPage, port: &str, index: u16) -> Result<Self, PageError> {
                Ok(Self(page.block(&$family, &[(Label::Port, &port), (Label::Queue, &index)])?))
            }

            /// Creates counters that are not on a statistics page.
            pub fn private() -> Self {
                Self(Block::private(&$family))
            }

            /// Counts packets that were received or sent, and their bytes without FCS.
            #[inline(always)]
            pub fn add(&self, packets: u64, bytes: u64) {
                self.0.counter(QueueCount::Packets as usize).add(packets);
                self.0.counter(QueueCount::Bytes as usize).add(bytes);
            }

            /// Counts dropped packets.
            #[inline(always)]
            pub fn drop(&self, reason: DropReason, packets: u64) {
                self.0.counter(DROPS + reason as usize).add(packets);
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
                self.0.counter(QueueCount::Starved as usize).add(polls);
            }

            /// Number of packets so far.
            pub fn packets(&self) -> u64 {
                self.0.counter(QueueCount::Packets as usize).value()
            }

            /// Number of bytes so far, without FCS.
            pub fn bytes(&self) -> u64 {
                self.0.counter(QueueCount::Bytes as usize).value()
            }

            /// Number of packets dropped for `reason` so far.
            pub fn dropped(&self, reason: DropReason) -> u64 {
                self.0.counter(DROPS + reason as usize).value()
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
    RxCounters, RX
}
queue_counters! {
    /// Counters of a TX queue.
    TxCounters, TX
}
