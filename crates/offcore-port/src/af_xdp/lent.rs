//! Which packet buffers the kernel has.
//!
//! A buffer that is given to a socket is one bit here, so what the kernel gives back can be checked, and what a socket
//! still had when it was closed is found again. A pool of 16384 buffers makes 2 KiB of bits.

use offcore_mem::{Packet, Pool, PoolCache};

/// The buffers of one pool that one half of a socket has.
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

    /// How many there are.
    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Gives a packet of one buffer away; where its bytes begin in the pool's memory.
    #[inline(always)]
    pub(super) fn lend(&mut self, packet: Packet) -> u64 {
        let chunk = packet.chunk() as usize;
        let place = self.pool.lend(packet);
        self.bits[chunk / 64] |= 1 << (chunk % 64);
        self.count += 1;
        place
    }

    /// The packet that comes back: `len` bytes at `place`. `None` when no buffer that the kernel has contains them.
    #[inline(always)]
    pub(super) fn reclaim(&mut self, place: u64, len: usize) -> Option<Packet> {
        let chunk = usize::try_from(place >> self.shift).ok()?;
        let (word, bit) = (self.bits.get_mut(chunk / 64)?, 1 << (chunk % 64));
        if *word & bit == 0 {
            return None;
        }
        // SAFETY: the chunk's bit is set, so it was lent, and has not come back since.
        let packet = unsafe { self.pool.reclaim(place, len) }?;
        *word &= !bit;
        self.count -= 1;
        Some(packet)
    }

    /// All of them, so that none is left here.
    pub(super) fn take(&mut self) -> Self {
        let Self { pool, shift, .. } = *self;
        Self { pool, shift, bits: std::mem::take(&mut self.bits), count: std::mem::take(&mut self.count) }
    }

    /// Takes all of them back: the socket is closed.
    pub(super) fn reclaim_all(mut self, cache: &mut PoolCache) {
        for word in 0..self.bits.len() {
            while self.bits[word] != 0 {
                let chunk = word * 64 + self.bits[word].trailing_zeros() as usize;
                match self.reclaim((chunk as u64) << self.shift, 0) {
                    Some(packet) => cache.free(packet),
                    // No such chunk: the bit was never set.
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
    fn lent_comes_back_once() {
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
    fn what_a_closed_socket_had_is_free_again() {
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
