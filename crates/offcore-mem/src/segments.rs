//! Packets of several buffers.
//!
//! The handle of such a packet is the handle of its first buffer, marked as [segmented](Packet::is_segmented). The
//! handles of the buffers that follow are stored as words in a table of the pool, each in the entry of the preceding
//! chunk. A handle is therefore only two words long, and the owner of the first buffer owns all buffers.
//! [`PoolCache::free`] frees them all.
//!
//! ```text
//! handle -> chunk 7 | headroom | first bytes |
//!           next[7] -> chunk 12 | further bytes ........... |
//!                      next[12] -> chunk 3 | the rest |
//! ```

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use crate::packet::Packet;
use crate::pool::{HEADROOM, Pool, PoolCache};

/// The share of the pool that one packet may take: one buffer in this many.
const LONGEST_SHARE: usize = 4;

impl Pool {
    /// Returns the length of the packet in bytes, over all its buffers.
    ///
    /// # Panics
    /// If the packet belongs to another pool.
    #[inline]
    pub fn total_len(&self, packet: &Packet) -> usize {
        if packet.is_segmented() { self.segments(packet).map(<[u8]>::len).sum() } else { packet.len() }
    }

    /// Returns the maximum length in bytes of packets to create from the pool's buffers. One packet gets at most a
    /// quarter of the buffers, so that enough are left for others.
    pub fn longest(&self) -> usize {
        self.chunks() / LONGEST_SHARE * self.data_room()
    }

    /// Returns the number of the packet's buffers.
    ///
    /// # Panics
    /// If the packet belongs to another pool.
    pub fn segment_count(&self, packet: &Packet) -> usize {
        Buffers::of(self, packet).count()
    }

    /// Iterates over the bytes of the packet's buffers, from the first.
    ///
    /// # Panics
    /// If the packet belongs to another pool.
    pub fn segments<'a>(&'a self, packet: &'a Packet) -> Segments<'a> {
        Segments { buffers: Buffers::of(self, packet), packet: PhantomData }
    }

    /// Iterates over the bytes of the packet's buffers, from the first, writable.
    ///
    /// # Panics
    /// If the packet belongs to another pool.
    pub fn segments_mut<'a>(&'a self, packet: &'a mut Packet) -> SegmentsMut<'a> {
        SegmentsMut { buffers: Buffers::of(self, packet), packet: PhantomData }
    }

    /// Returns chunk, offset in the chunk, and length of the second buffer of a packet with exactly two buffers; `None`
    /// for other packets.
    ///
    /// # Panics
    /// If the packet belongs to another pool.
    #[inline]
    pub fn second_of_two(&self, packet: &Packet) -> Option<(u32, u16, u16)> {
        assert!(self.owns(packet), "packet {} is not of this pool", packet.chunk());
        if !packet.is_segmented() {
            return None;
        }
        // SAFETY: a segmented packet of this pool, which is borrowed; the handle is only read.
        let second = unsafe { self.following(packet) };
        (!second.is_segmented()).then(|| (second.chunk(), second.headroom() as u16, second.len() as u16))
    }

    /// Calls `visit` with the address and length of the bytes in each of the packet's buffers, from the first.
    ///
    /// # Panics
    /// If the packet belongs to another pool.
    #[inline]
    pub fn for_each_segment(&self, packet: &Packet, mut visit: impl FnMut(NonNull<u8>, usize)) {
        visit(packet.data(), packet.len());
        if packet.is_segmented() {
            Buffers::of(self, packet).skip(1).for_each(|buffer| visit(buffer.data(), buffer.len()));
        }
    }

    /// Joins `front` and `rest` to one packet. A packet of several buffers is built from its last to its first buffer.
    ///
    /// # Panics If `front` already has several buffers, `rest` has an offload request (only the first buffer may have
    /// one), or either belongs to another pool.
    pub fn link(&self, mut front: Packet, rest: Packet) -> Packet {
        assert!(self.owns(&front) && self.owns(&rest), "packets of another pool");
        assert!(!front.is_segmented(), "packet {} has several buffers already", front.chunk());
        assert!(!rest.has_offload(), "packet {} has an offload header of its own", rest.chunk());
        self.next(front.chunk()).store(rest.word(), Ordering::Relaxed);
        front.set_segmented(true);
        front
    }

    /// Removes all buffers after the first from the packet and returns them, if there are any.
    ///
    /// # Panics
    /// If the packet belongs to another pool.
    pub fn split(&self, packet: &mut Packet) -> Option<Packet> {
        assert!(self.owns(packet), "packet {} is not of this pool", packet.chunk());
        if !packet.is_segmented() {
            return None;
        }
        // SAFETY: a segmented packet of this pool; the mark that makes the handle reachable is cleared below.
        let rest = unsafe { self.following(packet) };
        packet.set_segmented(false);
        Some(rest)
    }

    /// Returns the handle in the entry of the packet's chunk.
    ///
    /// # Safety
    /// The packet must belong to this pool and be segmented. The returned handle must be the only one in use for its
    /// chunk, or only be read while the packet is borrowed.
    unsafe fn following(&self, packet: &Packet) -> Packet {
        let word = self.next(packet.chunk()).load(Ordering::Relaxed);
        // SAFETY: `link` wrote a segmented packet's entry, and only accepts handles of this pool, so the pool has the
        // chunk; the caller guarantees that no other handle of the chunk is in use.
        unsafe { Packet::from_word(self.chunk_base(Packet::chunk_of(word)), word) }
    }
}

impl PoolCache {
    /// Takes a packet of `total` bytes in as many buffers as necessary, with undefined content. The first buffer's data
    /// begins `headroom` bytes into its chunk, the other buffers' data behind the standard headroom. Returns `None`,
    /// without taking any buffers, if the pool has too few.
    ///
    /// # Panics
    /// If `headroom` is not within a chunk.
    #[inline]
    pub fn take_chain(&mut self, headroom: usize, total: usize) -> Option<Packet> {
        let size = self.pool().chunk_size();
        assert!(headroom < size, "{headroom} bytes of headroom in a chunk of {size}");
        let first = total.min(size - headroom);
        if first == total {
            return self.take_sized(headroom, total);
        }
        self.take_several(headroom, first, total - first)
    }

    #[cold]
    fn take_several(&mut self, headroom: usize, first: usize, rest: usize) -> Option<Packet> {
        let room = self.pool().data_room();
        if rest.div_ceil(room) >= self.pool().chunks() {
            return None;
        }
        // From the last to the first buffer. The last buffer gets the remainder.
        let mut left = rest;
        let mut packet: Option<Packet> = None;
        while left > 0 {
            let len = (left - 1) % room + 1;
            packet = Some(self.take_before(packet, HEADROOM, len)?);
            left -= len;
        }
        self.take_before(packet, headroom, first)
    }

    /// Takes a buffer and links `rest` behind it. If the pool is empty, frees `rest` and returns `None`.
    fn take_before(&mut self, rest: Option<Packet>, headroom: usize, len: usize) -> Option<Packet> {
        match (self.take_sized(headroom, len), rest) {
            (Some(front), Some(rest)) => Some(self.pool().link(front, rest)),
            (Some(front), None) => Some(front),
            (None, rest) => {
                self.free_all(rest);
                None
            }
        }
    }

    /// Shortens the packet to `total` bytes over all its buffers, unless it is shorter already. Buffers that become
    /// empty are freed, except the first one.
    ///
    /// # Panics
    /// If the packet belongs to another pool.
    pub fn truncate(&mut self, packet: &mut Packet, total: usize) {
        let pool = self.pool();
        assert!(pool.owns(packet), "packet {} is not of this pool", packet.chunk());
        if total <= packet.len() {
            packet.truncate(total);
            let rest = pool.split(packet);
            return self.free_chain(rest);
        }
        let mut left = total - packet.len();
        // The entry of chunk `before` contains the word of the next buffer to examine.
        let (mut before, mut more) = (packet.chunk(), packet.is_segmented());
        while more {
            let entry = pool.next(before);
            let word = entry.load(Ordering::Relaxed);
            // SAFETY: this is the entry of a segmented packet's chunk, so it contains a handle of this pool. The handle
            // is not used after this iteration; it is stored again if the packet ends in this buffer.
            let mut buffer = unsafe { Packet::from_word(pool.chunk_base(Packet::chunk_of(word)), word) };
            if left <= buffer.len() {
                buffer.truncate(left);
                let rest = pool.split(&mut buffer);
                entry.store(buffer.word(), Ordering::Relaxed);
                return self.free_chain(rest);
            }
            left -= buffer.len();
            (before, more) = (buffer.chunk(), buffer.is_segmented());
        }
    }

    /// Frees the buffers after a packet's first.
    #[cold]
    pub(crate) fn free_rest(&mut self, packet: &mut Packet) {
        let rest = self.pool().split(packet);
        self.free_chain(rest);
    }

    /// Pads the packet with zeros to `total` bytes, in one buffer. A packet of at least that length is not changed.
    /// Returns `false` if its first buffer has no room for `total` bytes.
    ///
    /// # Panics
    /// If the packet belongs to another pool.
    pub fn pad(&mut self, packet: &mut Packet, total: usize) -> bool {
        let pool = self.pool();
        assert!(pool.owns(packet), "packet {} is not of this pool", packet.chunk());
        if pool.total_len(packet) >= total {
            return true;
        }
        if packet.headroom() + total > pool.chunk_size() {
            return false;
        }
        let (mut rest, mut len) = (pool.split(packet), packet.len());
        packet.place(packet.headroom(), total);
        packet.bytes_mut()[len..].fill(0); // copy-ok: fewer than `total` zeros
        while let Some(mut buffer) = rest {
            rest = pool.split(&mut buffer);
            let to = len..len + buffer.len();
            packet.bytes_mut()[to.clone()].copy_from_slice(buffer.bytes()); // copy-ok: less than `total` bytes
            len = to.end;
            self.free(buffer);
        }
        true
    }

    fn free_chain(&mut self, mut chain: Option<Packet>) {
        while let Some(mut packet) = chain {
            chain = self.pool().split(&mut packet);
            self.free(packet);
        }
    }
}

/// The handles of a packet's buffers. They are only read: they are neither moved out nor used to write.
#[derive(Debug)]
struct Buffers<'a> {
    pool: &'a Pool,
    next: Option<Packet>,
}

impl<'a> Buffers<'a> {
    fn of(pool: &'a Pool, packet: &'a Packet) -> Self {
        assert!(pool.owns(packet), "packet {} is not of this pool", packet.chunk());
        // SAFETY: the chunk belongs to the pool; the second handle stays in this iterator, where it is only read while
        // the packet is borrowed.
        let first = unsafe { Packet::from_word(pool.chunk_base(packet.chunk()), packet.word()) };
        Self { pool, next: Some(first) }
    }
}

impl Iterator for Buffers<'_> {
    type Item = Packet;

    #[inline]
    fn next(&mut self) -> Option<Packet> {
        let this = self.next.take()?;
        if this.is_segmented() {
            // SAFETY: a segmented packet of the pool; the handle is only read.
            self.next = Some(unsafe { self.pool.following(&this) });
        }
        Some(this)
    }
}

/// Iterator over the bytes of a packet's buffers: [`Pool::segments`].
#[derive(Debug)]
pub struct Segments<'a> {
    buffers: Buffers<'a>,
    packet: PhantomData<&'a Packet>,
}

impl<'a> Iterator for Segments<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        let buffer = self.buffers.next()?;
        // SAFETY: the packet, which is borrowed for 'a, owns the chunk, which lives as long as the process; the
        // handle's range is within its chunk.
        Some(unsafe { std::slice::from_raw_parts(buffer.data().as_ptr(), buffer.len()) })
    }
}

/// Iterator over the bytes of a packet's buffers, writable: [`Pool::segments_mut`].
#[derive(Debug)]
pub struct SegmentsMut<'a> {
    buffers: Buffers<'a>,
    packet: PhantomData<&'a mut Packet>,
}

impl<'a> Iterator for SegmentsMut<'a> {
    type Item = &'a mut [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a mut [u8]> {
        let buffer = self.buffers.next()?;
        // SAFETY: the packet owns the chunk, which lives as long as the process, and the handle's range is within its
        // chunk. The packet is borrowed mutably, and it contains no chunk twice, because `link` consumes handles and
        // each chunk has one.
        Some(unsafe { std::slice::from_raw_parts_mut(buffer.data().as_ptr(), buffer.len()) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mapping::Hugepages;

    const SIZE: usize = 2048;

    fn pool(chunks: usize) -> &'static Pool {
        Pool::new(chunks, SIZE, Hugepages::None).unwrap()
    }

    fn fill(pool: &Pool, packet: &mut Packet) {
        let bytes = (0u32..).map(|n| (n * 7 % 251) as u8);
        pool.segments_mut(packet).flatten().zip(bytes).for_each(|(byte, value)| *byte = value);
    }

    fn content(pool: &Pool, packet: &Packet) -> Vec<u8> {
        pool.segments(packet).flatten().copied().collect()
    }

    fn free_chunks(cache: &mut PoolCache) -> usize {
        let all: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
        let count = all.len();
        cache.free_all(all);
        count
    }

    #[test]
    fn offload_flag_clears_plain() {
        let mut cache = pool(64).cache();
        let mut packet = cache.take_chain(HEADROOM, SIZE - HEADROOM).unwrap();
        assert!(packet.is_plain() && !packet.is_segmented() && !packet.has_offload());
        let (chunk, data) = (packet.chunk(), packet.data());
        packet.set_offload(true);
        assert!(!packet.is_plain() && packet.has_offload() && !packet.is_segmented());
        packet.truncate(100);
        packet.pull(2);
        assert_eq!((packet.chunk(), packet.len(), packet.headroom()), (chunk, 98, HEADROOM + 2));
        assert!(packet.has_offload());
        packet.set_offload(false);
        packet.push(2);
        assert!(packet.is_plain() && packet.data() == data);
        assert_eq!(cache.pool().segment_count(&packet), 1);
        packet.set_offload(true);
        cache.free(packet);
        assert!(cache.take().unwrap().is_plain(), "a chunk keeps no marks");
    }

    #[test]
    fn longest_packet_leaves_buffers() {
        let pool = pool(64);
        assert_eq!(pool.longest(), 16 * (SIZE - HEADROOM));
        let packet = pool.cache().take_chain(HEADROOM, pool.longest()).unwrap();
        assert_eq!(pool.segment_count(&packet), 16);
        pool.cache().free(packet);
    }

    #[test]
    fn a_handle_is_two_words() {
        assert_eq!(size_of::<Option<Packet>>(), 16);
    }

    #[test]
    fn long_packet_has_enough_buffers() {
        let pool = pool(64);
        let mut cache = pool.cache();
        for (headroom, total, lens) in [
            (HEADROOM, 1792, vec![1792]),
            (HEADROOM, 1793, vec![1792, 1]),
            (HEADROOM, 2 * 1792, vec![1792, 1792]),
            (0, SIZE + 1, vec![SIZE, 1]),
            (SIZE - 1, 2 * 1792, vec![1, 1792, 1791]),
            (12, 0, vec![0]),
        ] {
            let packet = cache.take_chain(headroom, total).unwrap();
            assert_eq!(pool.segments(&packet).map(<[u8]>::len).collect::<Vec<_>>(), lens);
            let mut visited = Vec::new();
            pool.for_each_segment(&packet, |data, len| visited.push((data.as_ptr().cast_const(), len)));
            assert!(pool.segments(&packet).map(|s| (s.as_ptr(), s.len())).eq(visited));
            assert_eq!((pool.total_len(&packet), packet.headroom()), (total, headroom));
            assert_eq!(pool.segment_count(&packet), lens.len());
            assert_eq!((packet.is_segmented(), packet.is_plain()), (lens.len() > 1, lens.len() == 1));
            cache.free(packet);
        }
        assert_eq!(free_chunks(&mut cache), 64);
    }

    #[test]
    fn short_packets_are_padded() {
        let pool = pool(64);
        let mut cache = pool.cache();
        for parts in [&[20][..], &[20, 7], &[0, 1, 2, 30], &[20, 0], &[60], &[61], &[59, 1]] {
            let mut packets = parts.iter().rev().map(|len| {
                let mut packet = cache.take_chain(HEADROOM, 100).unwrap();
                fill(pool, &mut packet);
                packet.truncate(*len);
                packet
            });
            let last = packets.next().unwrap();
            let mut packet = packets.fold(last, |rest, front| pool.link(front, rest));
            packet.set_offload(true);
            let before = content(pool, &packet);
            assert!(cache.pad(&mut packet, 60));
            let after = content(pool, &packet);
            assert_eq!((after.len(), packet.has_offload()), (before.len().max(60), true));
            assert!(after.starts_with(&before) && after[before.len()..].iter().all(|byte| *byte == 0));
            cache.free(packet);
        }
        let mut packet = cache.take_chain(SIZE - 59, 20).unwrap();
        assert!(!cache.pad(&mut packet, 60) && packet.len() == 20);
        cache.free(packet);
        assert_eq!(free_chunks(&mut cache), 64);
    }

    #[test]
    fn short_pool_gives_nothing() {
        let mut cache = pool(64).cache();
        assert!(cache.take_chain(0, 64 * SIZE + 1).is_none());
        assert!(cache.take_chain(HEADROOM, usize::MAX).is_none());
        let held: Vec<Packet> = (0..60).map(|_| cache.take().unwrap()).collect();
        assert!(cache.take_chain(HEADROOM, 5 * 1792).is_none());
        let packet = cache.take_chain(HEADROOM, 4 * 1792).unwrap();
        assert!(cache.take().is_none());
        cache.free_all(held);
        cache.free(packet);
        assert_eq!(free_chunks(&mut cache), 64);
    }

    #[test]
    fn long_packet_changes_workers() {
        let pool = pool(256);
        let length = |n: usize| n * 6151 % 60_000;
        let (to, from) = std::sync::mpsc::sync_channel::<Packet>(4);
        let sink = std::thread::spawn(move || {
            let mut cache = pool.cache();
            for (n, packet) in from.iter().enumerate() {
                let mut expected = cache.take_chain(HEADROOM, length(n)).unwrap();
                fill(pool, &mut expected);
                assert!(pool.segments(&packet).eq(pool.segments(&expected)));
                cache.free_all([packet, expected]);
            }
        });
        let mut cache = pool.cache();
        for n in 0..1_000 {
            let mut packet = loop {
                match cache.take_chain(HEADROOM, length(n)) {
                    Some(packet) => break packet,
                    None => std::thread::yield_now(),
                }
            };
            fill(pool, &mut packet);
            to.send(packet).unwrap();
        }
        drop(to);
        sink.join().unwrap();
    }

    #[test]
    #[should_panic(expected = "has several buffers already")]
    fn linked_front_must_be_one_buffer() {
        let mut cache = pool(64).cache();
        let (front, rest) = (cache.take_chain(0, SIZE + 1).unwrap(), cache.take().unwrap());
        let _ = cache.pool().link(front, rest);
    }

    #[test]
    #[should_panic(expected = "not of this pool")]
    fn foreign_segments_are_refused() {
        let packet = pool(64).cache().take_chain(0, SIZE + 1).unwrap();
        pool(64).segments(&packet);
    }

    #[test]
    #[should_panic(expected = "packets of another pool")]
    fn a_foreign_packet_is_not_linked() {
        let (a, b) = (pool(64), pool(64));
        let _ = a.link(a.cache().take().unwrap(), b.cache().take().unwrap());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Packets are created, shortened and freed in any order. Their bytes do not change, and at the end every chunk
        /// is free, once.
        #[test]
        fn every_chunk_is_freed_once(
            steps in proptest::collection::vec((0..4u8, 0..SIZE, 0..12 * SIZE, any::<prop::sample::Index>()), 1..60)
        ) {
            let pool = pool(64);
            let mut cache = pool.cache();
            let mut live: Vec<(Packet, Vec<u8>)> = Vec::new();
            for (what, headroom, len, index) in steps {
                match what {
                    0 | 1 => {
                        let Some(mut packet) = cache.take_chain(headroom, len) else { continue };
                        prop_assert_eq!(pool.total_len(&packet), len);
                        fill(pool, &mut packet);
                        live.push((packet, Vec::new()));
                        let (packet, bytes) = live.last_mut().unwrap();
                        *bytes = content(pool, packet);
                    }
                    _ if live.is_empty() => {}
                    2 => {
                        let (packet, bytes) = index.get_mut(&mut live);
                        cache.truncate(packet, len);
                        bytes.truncate(len);
                    }
                    _ => {
                        let at = index.index(live.len());
                        let (packet, _) = live.swap_remove(at);
                        cache.free(packet);
                    }
                }
                for (packet, bytes) in &live {
                    prop_assert_eq!(&content(pool, packet), bytes);
                    prop_assert!(pool.segments(packet).skip(1).all(|s| !s.is_empty()));
                }
            }
            cache.free_all(live.into_iter().map(|(packet, _)| packet));
            let all: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
            let chunks: std::collections::HashSet<u32> = all.iter().map(Packet::chunk).collect();
            prop_assert_eq!((all.len(), chunks.len()), (64, 64));
        }
    }
}
