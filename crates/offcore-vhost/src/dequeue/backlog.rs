//! Packets that were received, but are delivered in later calls because they exceed the amount of work for one round.
//!
//! The guest gets its chains back at once, and no packet is lost. A guest whose packets cause a lot of work takes turns
//! with the other guests of its worker.

use offcore_mem::{BURST, Burst, Packet, Pool};
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader};

use super::Dequeued;

/// Amount of work that the packets of one call may cause together, not counting the last packet. A unit is a segment or
/// 1 KiB of a packet. Four packets of 64 KiB that are segmented into frames of 1500 bytes are 440 units. A core takes
/// 50 to 100 ns per unit, so the packets of one call occupy it for less than 0.1 ms.
const WORK: usize = 512;
/// A burst with fewer bytes does not reach this limit if no packet requests segmentation.
pub(super) const SMALL_BURST_BYTES: u64 = ((WORK - BURST) << 10) as u64;

/// Packets of a virtqueue that wait for the next call.
#[derive(Debug, Default)]
pub(super) struct Backlog(Burst);

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Keeps the packets of `burst`, from `first` on, that exceed the work of one call. The backlog must be empty.
    #[cold]
    #[inline(never)]
    pub(super) fn defer_excess(
        &mut self,
        burst: &mut Burst,
        first: usize,
        pool: &Pool,
        dequeued: &mut Dequeued,
    ) {
        let given = deliverable_packets(burst, pool).max(first);
        for packet in burst.drain(given..) {
            dequeued.packets -= 1;
            dequeued.bytes -= pool.total_len(&packet) as u64;
            self.0.push(packet);
        }
    }

    /// Delivers as many packets as one call may deliver, at most `most`.
    pub(super) fn deliver_backlog(
        &mut self,
        most: usize,
        burst: &mut Burst,
        pool: &Pool,
        dequeued: &mut Dequeued,
    ) {
        let most = most.min(burst.remaining_capacity()).min(deliverable_packets(&self.0, pool));
        for packet in self.0.drain(..most) {
            dequeued.packets += 1;
            dequeued.bytes += pool.total_len(&packet) as u64;
            burst.push(packet);
        }
    }
}

/// Returns how many of `packets` one call delivers. It always delivers the first one.
fn deliverable_packets(packets: &[Packet], pool: &Pool) -> usize {
    let mut left = WORK;
    let over = packets.iter().position(|packet| {
        let enough = left == 0;
        left = left.saturating_sub(work_of(packet, pool));
        enough
    });
    over.unwrap_or(packets.len())
}

/// The work that a packet causes, in the unit of [`WORK`].
fn work_of(packet: &Packet, pool: &Pool) -> usize {
    let len = pool.total_len(packet);
    let header = packet.headroom_bytes(HEADER_LEN).first_chunk().map(NetHeader::from_bytes);
    let gso = header.filter(|header| packet.has_offload() && header.is_gso());
    1 + (len >> 10) + gso.map_or(0, |header| len / usize::from(header.gso_size.max(1)))
}
