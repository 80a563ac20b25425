//! Duplicates packets that are sent to several ports.

use arrayvec::ArrayVec;
use offcore_dma::CopyOp;
use offcore_dma::cpu::Copier;
use offcore_mem::{Burst, HEADROOM, Packet, PoolCache};
use offcore_wire::virtio_net::HEADER_LEN;

/// Number of copies made at a time, and thus the prefetch distance.
const LIST: usize = 128;

/// Duplicates packets, one burst at a time, with the CPU core.
#[derive(Debug, Default)]
pub struct Duplicator {
    copier: Copier,
}

impl Duplicator {
    /// Appends a copy of each packet to `copies`, in order: its bytes and its offload header. Stops when packet buffers
    /// run out; returns the number of packets that were not copied.
    ///
    /// # Panics
    /// If `copies` has no room for all packets, or a packet does not belong to the cache's pool.
    pub fn duplicate<'a>(
        &mut self,
        packets: impl IntoIterator<Item = &'a Packet>,
        cache: &mut PoolCache,
        copies: &mut Burst,
    ) -> usize {
        let mut packets = packets.into_iter();
        let mut list = List { copier: &mut self.copier, ops: ArrayVec::new() };
        let mut missing = 0;
        for packet in &mut packets {
            let Some(copy) = cache.take_chain(HEADROOM, cache.pool().total_len(packet)) else {
                missing = 1;
                break;
            };
            copies.push(list.add(packet, copy, cache));
        }
        list.make();
        missing + packets.count()
    }
}

/// A list of pending copies.
///
/// The caller of `add` keeps both packets alive until the copies are made: the sources are borrowed until
/// [`Duplicator::duplicate`] returns, which executes the list before that, and the destinations are in a burst that it
/// borrows mutably.
struct List<'a> {
    copier: &'a mut Copier,
    ops: ArrayVec<CopyOp, LIST>,
}

impl List<'_> {
    /// Adds the copies that make `copy` equal to `packet`. Both packets have the same length.
    fn add(&mut self, packet: &Packet, mut copy: Packet, cache: &PoolCache) -> Packet {
        // The offload header in front of the data is copied together with the first bytes.
        let front = if packet.has_offload() { HEADER_LEN } else { 0 };
        copy.set_offload(packet.has_offload());
        if packet.is_plain() && !copy.is_segmented() {
            self.push(packet.data().as_ptr(), copy.data().as_ptr(), packet.len());
            return copy;
        }
        let pool = cache.pool();
        if front > 0 {
            let from = packet.headroom_bytes(front).as_ptr();
            self.push(from, copy.headroom_mut(front).as_mut_ptr(), front);
        }
        let mut to = pool.segments_mut(&mut copy);
        let mut room: &mut [u8] = &mut [];
        for mut from in pool.segments(packet) {
            while !from.is_empty() {
                while room.is_empty() {
                    // Both packets have the same total length.
                    let Some(next) = to.next() else { return copy };
                    room = next;
                }
                let len = from.len().min(room.len());
                let (now, later) = std::mem::take(&mut room).split_at_mut(len);
                self.push(from.as_ptr(), now.as_mut_ptr(), len);
                (from, room) = (&from[len..], later);
            }
        }
        copy
    }

    #[inline]
    fn push(&mut self, src: *const u8, dst: *mut u8, len: usize) {
        if self.ops.is_full() {
            self.make();
        }
        self.ops.push(CopyOp { src, dst, len: len as u32, token: 0 });
    }

    fn make(&mut self) {
        // SAFETY: The sources are ranges of packets that are borrowed until `duplicate` returns. The destinations are
        // ranges of packets that only `copies` refers to. The pool's memory is never unmapped, and each chunk has one
        // owner, so sources and destinations do not overlap.
        unsafe { self.copier.copy_burst(&self.ops) };
        self.ops.clear();
    }
}

#[cfg(test)]
mod tests {
    use offcore_mem::{Hugepages, Pool};
    use offcore_wire::virtio_net::{NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM};

    use super::*;

    fn content(pool: &Pool, packet: &Packet) -> Vec<u8> {
        pool.segments(packet).flatten().copied().collect()
    }

    #[test]
    fn duplicate_equals_its_original() {
        let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let header = NetHeader {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            csum_start: 14,
            csum_offset: 2,
            ..Default::default()
        };
        let mut packets = Burst::new();
        for (serial, (headroom, len)) in
            [(HEADROOM, 60), (64, 1900), (HEADROOM, 1793), (1000, 9000), (20, 65_000), (HEADROOM, 0)]
                .into_iter()
                .enumerate()
        {
            for offload in [false, true] {
                let mut packet = cache.take_chain(headroom, len).unwrap();
                let bytes = (0u32..).map(|n| (n * 7 % 251) as u8 ^ serial as u8);
                pool.segments_mut(&mut packet).flatten().zip(bytes).for_each(|(byte, value)| *byte = value);
                if offload {
                    packet.headroom_mut(HEADER_LEN).copy_from_slice(&header.to_bytes());
                    packet.set_offload(true);
                }
                packets.push(packet);
            }
        }
        let mut copies = Burst::new();
        assert_eq!(Duplicator::default().duplicate(&packets, &mut cache, &mut copies), 0);
        assert_eq!(copies.len(), packets.len());
        for (copy, packet) in copies.iter().zip(&packets) {
            assert_ne!(copy.chunk(), packet.chunk());
            assert_eq!(content(pool, copy), content(pool, packet));
            assert_eq!((copy.has_offload(), copy.headroom()), (packet.has_offload(), HEADROOM));
            if packet.has_offload() {
                assert_eq!(copy.headroom_bytes(HEADER_LEN), header.to_bytes());
            }
        }
        cache.free_all(copies.into_iter().chain(packets));
    }

    #[test]
    fn dry_pool_gives_the_first_copies() {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let packets: Burst = (0..50).map(|_| cache.take_sized(HEADROOM, 100).unwrap()).collect();
        let mut copies = Burst::new();
        assert_eq!(Duplicator::default().duplicate(&packets, &mut cache, &mut copies), 36);
        assert_eq!(copies.len(), 14);
        cache.free_all(copies.into_iter().chain(packets));
    }
}
