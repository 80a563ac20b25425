//! Packets that were received and are given on later, because what the others ask for is enough work for one round.
//!
//! The guest has its chains back already, and nothing is lost: a guest that leaves very much to do has it done in turns with
//! the others of its worker.

use offcore_mem::{BURST, Burst, Packet, Pool};
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader};

use super::Dequeued;

/// What the packets of a call may ask for, all together, but for the last of them: a unit is a segment to be made, or
/// 1 KiB of a packet. Four packets of 64 KiB to be segmented into frames of 1500 bytes are 440. Made by a core, a unit
/// takes 50 to 100 ns, so a call's packets keep it from the others for less than a tenth of a millisecond.
const WORK: usize = 512;
/// Bytes of a burst that are not that much work, if none of its packets is to be segmented.
pub(super) const LITTLE: u64 = ((WORK - BURST) << 10) as u64;

/// A virtqueue's packets that wait for the next call.
#[derive(Debug, Default)]
pub(super) struct Backlog(Burst);

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Keeps back packets of `burst`, `first` or later, that are more than one call gives on. It has none yet.
    #[cold]
    #[inline(never)]
    pub(super) fn keep_back(
        &mut self,
        burst: &mut Burst,
        first: usize,
        pool: &Pool,
        dequeued: &mut Dequeued,
    ) {
        let given = given_on(burst, pool).max(first);
        for packet in burst.drain(given..) {
            dequeued.packets -= 1;
            dequeued.bytes -= pool.total_len(&packet) as u64;
            self.0.push(packet);
        }
    }

    /// Gives on as many packets as one call does, at most `most`.
    pub(super) fn give_on(&mut self, most: usize, burst: &mut Burst, pool: &Pool, dequeued: &mut Dequeued) {
        let most = most.min(burst.remaining_capacity()).min(given_on(&self.0, pool));
        for packet in self.0.drain(..most) {
            dequeued.packets += 1;
            dequeued.bytes += pool.total_len(&packet) as u64;
            burst.push(packet);
        }
    }
}

/// How many of `packets` one call gives on: the first in any case.
fn given_on(packets: &[Packet], pool: &Pool) -> usize {
    let mut left = WORK;
    let over = packets.iter().position(|packet| {
        let enough = left == 0;
        left = left.saturating_sub(work_of(packet, pool));
        enough
    });
    over.unwrap_or(packets.len())
}

/// What a packet asks for: see [`WORK`].
fn work_of(packet: &Packet, pool: &Pool) -> usize {
    let len = pool.total_len(packet);
    let header = packet.headroom_bytes(HEADER_LEN).first_chunk().map(NetHeader::from_bytes);
    let gso = header.filter(|header| packet.has_offload() && header.is_gso());
    1 + (len >> 10) + gso.map_or(0, |header| len / usize::from(header.gso_size.max(1)))
}
