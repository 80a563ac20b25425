//! Packet buffers in the hands of somebody who knows them by where they are in the pool: a kernel with an XDP socket, the
//! ring of a network card.
//!
//! [`Pool::lend`] gives up a packet's handle for the place of its bytes in the pool; [`Pool::reclaim`] makes a handle
//! again of a place that came back. In between the buffer has an owner, and debug builds know that it has.

use crate::packet::Packet;
use crate::pool::Pool;

impl Pool {
    /// Gives up a handle on one buffer: where its bytes begin, counted from the start of the pool's memory. A packet of
    /// several buffers is [split](Pool::split) first, and linked again when it comes back.
    ///
    /// # Panics
    /// When the packet has several buffers, or is of another pool.
    #[inline(always)]
    pub fn lend(&self, packet: Packet) -> u64 {
        assert!(self.owns(&packet), "packet {} is not of this pool", packet.chunk());
        assert!(!packet.is_segmented(), "packet {} has several buffers", packet.chunk());
        (packet.chunk() as u64) << self.chunk_shift() | packet.headroom() as u64
    }

    /// The handle on a buffer that comes back: `len` bytes from `place` on, which is counted from the start of the pool's
    /// memory and may be anywhere in the buffer. `None` when they are not inside one buffer of the pool.
    ///
    /// # Safety
    /// The buffer that `place` is in was [lent](Pool::lend), and this is the first time since that it comes back.
    #[inline(always)]
    pub unsafe fn reclaim(&self, place: u64, len: usize) -> Option<Packet> {
        let size = self.chunk_size();
        let (chunk, offset) = (place >> self.chunk_shift(), place as usize & (size - 1));
        if chunk >= self.chunks() as u64 || len > size - offset {
            return None;
        }
        // SAFETY: the chunk is one of the pool's, and the range inside it; its last handle was given up by `lend`, as the
        // caller promises, and the pool lives as long as the process.
        Some(unsafe { Packet::new(self.chunk_base(chunk as u32), chunk as u32, offset as u16, len as u16) })
    }
}

#[cfg(test)]
mod tests {
    use crate::{HEADROOM, Hugepages, Pool};

    #[test]
    fn lent_buffer_is_found_by_any_byte() {
        let pool = Pool::new(64, 4096, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let mut packet = cache.take_sized(HEADROOM, 5).unwrap();
        packet.bytes_mut().copy_from_slice(b"there");
        let chunk = packet.chunk();
        let place = pool.lend(packet);
        assert_eq!(place, u64::from(chunk) * 4096 + HEADROOM as u64);
        // SAFETY: lent above, and back for the first time.
        let packet = unsafe { pool.reclaim(place + 1, 3) }.unwrap();
        assert_eq!((packet.chunk(), packet.headroom(), packet.bytes()), (chunk, HEADROOM + 1, &b"her"[..]));
        cache.free(packet);
    }

    #[test]
    fn places_outside_a_buffer_are_refused() {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        for (place, len) in [(64 * 2048, 0), (u64::MAX, 1), (2047, 2), (0, 2049), (4000, usize::MAX)] {
            // SAFETY: no handle is made of these.
            assert!(unsafe { pool.reclaim(place, len) }.is_none(), "{place} {len}");
        }
    }

    #[test]
    #[should_panic(expected = "several buffers")]
    fn long_packet_is_not_lent() {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        let packet = pool.cache().take_chain(HEADROOM, 4000).unwrap();
        pool.lend(packet);
    }
}
