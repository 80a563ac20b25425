//! Lends packet buffers to users that identify them by their offset in the pool: a kernel with an XDP socket, or the
//! ring of a network card.
//!
//! [`Pool::lend`] converts a packet's handle to the offset of its bytes in the pool. [`Pool::reclaim`] converts a
//! returned offset to a handle. In between, the buffer counts as taken, which debug builds check.

use crate::packet::Packet;
use crate::pool::Pool;

impl Pool {
    /// Gives up a handle of one buffer; returns the offset of its bytes from the start of the pool's memory. A packet
    /// of several buffers is [split](Pool::split) first, and linked again when it comes back.
    ///
    /// # Panics
    /// If the packet has several buffers or belongs to another pool.
    #[inline(always)]
    pub fn lend(&self, packet: Packet) -> u64 {
        assert!(self.owns(&packet), "packet {} is not of this pool", packet.chunk());
        assert!(!packet.is_segmented(), "packet {} has several buffers", packet.chunk());
        (packet.chunk() as u64) << self.chunk_shift() | packet.headroom() as u64
    }

    /// Returns the handle of a buffer that comes back: `len` bytes at offset `place` from the start of the pool's
    /// memory, which may be anywhere in the buffer. `None` if the bytes are not within one buffer of the pool.
    ///
    /// # Safety
    /// The buffer that contains `place` must have been [lent](Pool::lend) and must not have been reclaimed since.
    #[inline(always)]
    pub unsafe fn reclaim(&self, place: u64, len: usize) -> Option<Packet> {
        let size = self.chunk_size();
        let (chunk, offset) = (place >> self.chunk_shift(), place as usize & (size - 1));
        if chunk >= self.chunks() as u64 || len > size - offset {
            return None;
        }
        // SAFETY: the chunk belongs to the pool, and the range is within it; `lend` gave up its last handle, as the
        // caller guarantees, and the pool lives as long as the process.
        Some(unsafe { Packet::new(self.chunk_base(chunk as u32), chunk as u32, offset as u16, len as u16) })
    }
}

#[cfg(test)]
mod tests {
    use crate::{HEADROOM, Hugepages, Pool};

    #[test]
    fn lent_buffer_is_reclaimed_by_any_offset() {
        let pool = Pool::new(64, 4096, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let mut packet = cache.take_sized(HEADROOM, 5).unwrap();
        packet.bytes_mut().copy_from_slice(b"there");
        let chunk = packet.chunk();
        let place = pool.lend(packet);
        assert_eq!(place, u64::from(chunk) * 4096 + HEADROOM as u64);
        // SAFETY: the buffer was lent above and is reclaimed for the first time.
        let packet = unsafe { pool.reclaim(place + 1, 3) }.unwrap();
        assert_eq!((packet.chunk(), packet.headroom(), packet.bytes()), (chunk, HEADROOM + 1, &b"her"[..]));
        cache.free(packet);
    }

    #[test]
    fn places_outside_a_buffer_are_refused() {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        for (place, len) in [(64 * 2048, 0), (u64::MAX, 1), (2047, 2), (0, 2049), (4000, usize::MAX)] {
            // SAFETY: no handles are made of these places.
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
