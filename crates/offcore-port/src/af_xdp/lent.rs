//! Tracks the packet buffers that are lent to the kernel.
//!
//! Each buffer lent to a socket is represented by one bit. Buffers that the kernel returns can thus be checked, and
//! buffers that a socket had when it was closed can be found. A pool of 16384 buffers needs 2 KiB of bits.

use offcore_mem::{Packet, Pool, PoolCache};

/// The buffers of one pool that are lent to one half of a socket.
#[derive(Debug)]
pub(super) struct Lent {
    pool: &'static Pool,
    shift: u32,
    bits: Box<[u64]>,
    count: usize,
}

impl Lent {
    pub(super) fn new(pool: &'static Pool) -> Self {
        let bits = vec![0; pool.chunks().div_ceil(64)].into();
        Self { pool, shift: pool.chunk_size().trailing_zeros(), bits, count: 0 }
    }

    /// Number of lent buffers.
    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Lends a packet of one buffer; returns the offset of its bytes in the pool's memory.
    #[inline(always)]
    pub(super) fn lend(&mut self, packet: Packet) -> u64 {
        let chunk = packet.chunk() as usize;
        let place = self.pool.lend(packet);
        self.bits[chunk / 64] |= 1 << (chunk % 64);
        self.count += 1;
        place
    }

    /// Returns the packet that comes back: `len` bytes at `place`. `None` if no lent buffer contains these bytes.
    #[inline(always)]
    pub(super) fn reclaim(&mut self, place: u64, len: usize) -> Option<Packet> {
        let chunk = usize::try_from(place >> self.shift).ok()?;
        let (word, bit) = (self.bits.get_mut(chunk / 64)?, 1 << (chunk % 64));
        if *word & bit == 0 {
            return None;
        }
        // SAFETY: the chunk's bit is set, so it was lent and has not come back since.
        let packet = unsafe { self.pool.reclaim(place, len) }?;
        *word &= !bit;
        self.count -= 1;
        Some(packet)
    }

    /// Moves all entries to a new list, leaving this one empty.
    pub(super) fn take(&mut self) -> Self {
        let Self { pool, shift, .. } = *self;
        Self { pool, shift, bits: std::mem::take(&mut self.bits), count: std::mem::take(&mut self.count) }
    }

    /// Takes all buffers back. The socket must be closed.
    pub(super) fn reclaim_all(mut self, cache: &mut PoolCache) {
        for word in 0..self.bits.len() {
            while self.bits[word] != 0 {
                let chunk = word * 64 + self.bits[word].trailing_zeros() as usize;
                match self.reclaim((chunk as u64) << self.shift, 0) {
                    Some(packet) => cache.free(packet),
                    // The chunk does not exist, so the bit was never set.
                    None => return,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use offcore_mem::Hugepages;

    use super::*;

    #[test]
    fn lent_buffer_is_reclaimed_once() {
        let pool = Pool::new(128, 2048, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let mut lent = Lent::new(pool);
        let place = lent.lend(cache.take().unwrap());
        assert_eq!(lent.count(), 1);
        for (place, len) in [(place ^ 2048, 60), (128 * 2048, 60), (u64::MAX, 0), (place, 2048)] {
            assert!(lent.reclaim(place, len).is_none(), "{place} {len}");
        }
        let packet = lent.reclaim(place + 4, 60).unwrap();
        assert_eq!((packet.len(), packet.headroom(), lent.count()), (60, 260, 0));
        assert!(lent.reclaim(place, 60).is_none(), "it came back already");
        cache.free(packet);
    }

    #[test]
    fn closed_socket_returns_its_buffers() {
        let pool = Pool::new(128, 2048, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let mut lent = Lent::new(pool);
        while let Some(packet) = cache.take() {
            lent.lend(packet);
        }
        assert_eq!(lent.count(), 128);
        lent.reclaim_all(&mut cache);
        assert_eq!(std::iter::from_fn(|| cache.take()).count(), 128);
    }
}
