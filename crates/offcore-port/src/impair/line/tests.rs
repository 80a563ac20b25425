use offcore_mem::{HEADROOM, Hugepages};
use offcore_wire::checksum::Sum;
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM};

use super::*;
use crate::spec::PortSpec;

/// One tick is a microsecond.
const HZ: u64 = 1_000_000;

/// A line, a clock that the test sets, and numbered packets.
struct Rig {
    line: Line,
    cache: PoolCache,
    now: u64,
    next: u32,
    dropped: u32,
}

impl Rig {
    fn new(keys: &str) -> Self {
        Self::with_limit(keys, 4096)
    }

    fn with_limit(keys: &str, limit: usize) -> Self {
        let Ok(PortSpec::Impair(spec)) = format!("impair:{keys},gen:size=64").parse() else {
            panic!("{keys} are no keys of an impair port")
        };
        let pool = Pool::new(8192, 2048, Hugepages::None).unwrap();
        let line = Line::new(&spec, 0, HZ, limit, pool, Block::private(&IMPAIR_RX));
        Self { line, cache: pool.cache(), now: 1_000_000, next: 0, dropped: 0 }
    }

    /// Puts packets into the line.
    fn put(&mut self, packets: u32, len: usize) {
        for number in self.next..self.next + packets {
            let mut packet = self.cache.take_chain(HEADROOM, len).unwrap();
            packet.bytes_mut().fill(0);
            packet.bytes_mut()[..4].copy_from_slice(&number.to_be_bytes());
            self.dropped += u32::from(self.line.take(packet, self.now, &mut self.cache).is_err());
        }
        self.next += packets;
    }

    /// Returns the numbers of the packets that leave now.
    fn get(&mut self) -> Vec<u32> {
        let mut numbers = Vec::new();
        loop {
            let mut burst = Burst::new();
            self.line.give(self.now, 32, &mut burst);
            if burst.is_empty() {
                return numbers;
            }
            numbers.extend(
                burst.iter().map(|packet| u32::from_be_bytes(*packet.bytes().first_chunk().unwrap())),
            );
            self.cache.free_all(burst);
        }
    }

    /// Passes `packets` packets through the line, 16 at a time; returns the numbers of all packets that leave it.
    fn pass(&mut self, packets: u32) -> Vec<u32> {
        let mut numbers = Vec::new();
        for _ in 0..packets / 16 {
            self.put(16, 60);
            numbers.extend(self.get());
            self.now += 10;
        }
        self.now = END_OF_TIME;
        numbers.extend(self.get());
        assert_eq!((self.line.len(), self.line.buffers), (0, 0));
        numbers
    }

    fn count(&self, count: Count) -> u64 {
        self.line.counts.counter(count as usize).value()
    }

    /// Checks that all packet buffers are back in the pool after the line was dropped.
    fn assert_no_leaks(self) {
        let pool = self.cache.pool();
        drop((self.line, self.cache));
        assert_eq!(pool.available(), pool.chunks());
    }
}

#[test]
fn default_line_changes_nothing() {
    let mut rig = Rig::new("seed=3");
    assert!(rig.pass(1600).into_iter().eq(0..1600));
    assert!(Count::ALL.into_iter().all(|count| rig.count(count) == 0));
    rig.assert_no_leaks();
}

#[test]
fn loss_rate_matches_setting() {
    let run = |keys| {
        let mut rig = Rig::new(keys);
        let came = rig.pass(100_000);
        assert!(came.is_sorted() && came.len() as u64 + rig.count(Count::Lost) == 100_000);
        assert_eq!(u64::from(rig.dropped), rig.count(Count::Lost));
        rig.assert_no_leaks();
        came
    };
    // Three standard deviations are 94.
    let came = run("loss=1%,seed=7");
    assert!((98_900..=99_100).contains(&came.len()), "{} of 100000", came.len());
    assert_eq!(came, run("loss=1%,seed=7"));
    assert_ne!(came, run("loss=1%,seed=8"));
    assert_eq!(run("loss=100%"), []);
}

#[test]
fn reordered_packets_move_few_places() {
    let mut rig = Rig::new("reorder=2%");
    let came = rig.pass(16_000);
    let late = came.windows(2).filter(|pair| pair[1] < pair[0]).count() as u64;
    assert!((200..=440).contains(&late), "{late} of 16000");
    assert!(rig.count(Count::Reordered) >= late);
    for (place, number) in (0_u32..).zip(&came) {
        assert!(place.abs_diff(*number) <= 5 * OVERTAKING as u32, "packet {number} came as number {place}");
    }
    let mut sorted = came;
    sorted.sort_unstable();
    assert!(sorted.into_iter().eq(0..16_000));
    rig.assert_no_leaks();
}

#[test]
fn reordered_packet_leaves_after_timeout() {
    let mut rig = Rig::new("reorder=100%");
    rig.put(1, 60);
    assert_eq!(rig.get(), []);
    assert_eq!(rig.line.due(), Some(rig.now + 1_000));
    rig.now += 999;
    assert_eq!(rig.get(), []);
    rig.now += 1;
    assert_eq!(rig.get(), [0]);
    assert_eq!((rig.count(Count::Reordered), rig.line.due()), (0, None));
    rig.assert_no_leaks();
}

#[test]
fn duplicates_are_adjacent() {
    let mut rig = Rig::new("duplicate=1%");
    let came = rig.pass(32_000);
    let twice = came.windows(2).filter(|pair| pair[0] == pair[1]).count() as u64;
    assert!(came.is_sorted());
    assert!((270..=370).contains(&twice), "{twice} of 32000");
    assert_eq!((rig.count(Count::Duplicated), came.len() as u64), (twice, 32_000 + twice));
    rig.assert_no_leaks();
}

#[test]
fn corruption_flips_one_bit() {
    let mut rig = Rig::new("corrupt=100%");
    let header = NetHeader {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        csum_start: 14,
        csum_offset: 6,
        ..Default::default()
    };
    // One buffer, and three buffers.
    for (len, rounds) in [(60, 200), (4000, 50)] {
        for round in 0..rounds {
            let mut packet = rig.cache.take_chain(HEADROOM, len).unwrap();
            let pool = rig.cache.pool();
            let bytes = (0_u32..).map(|n| (n * 7 + round) as u8);
            pool.segments_mut(&mut packet).flatten().zip(bytes).for_each(|(to, byte)| *to = byte);
            packet.headroom_mut(HEADER_LEN).copy_from_slice(&header.to_bytes());
            packet.set_offload(true);
            let mut wanted: Vec<u8> = pool.segments(&packet).flatten().copied().collect();
            checksum::complete(&mut wanted, header.csum_start, header.csum_offset).unwrap();
            rig.line.take(packet, rig.now, &mut rig.cache).unwrap();
            let mut burst = Burst::new();
            rig.line.give(rig.now, 1, &mut burst);
            let got: Vec<u8> = pool.segments(&burst[0]).flatten().copied().collect();
            assert!(!burst[0].has_offload(), "the receiver would consider the checksum valid");
            let bits: u32 = got.iter().zip(&wanted).map(|(a, b)| (a ^ b).count_ones()).sum();
            assert_eq!((got.len(), bits), (wanted.len(), 1));
            let (good, is) = (Sum::of(&wanted[14..]).checksum(), Sum::of(&got[14..]).checksum());
            assert_eq!(is != good, got[14..] != wanted[14..]);
            rig.cache.free_all(burst);
        }
    }
    assert_eq!(rig.count(Count::Corrupted), 250);
    rig.assert_no_leaks();
}

#[test]
fn duplicates_keep_offload_requests() {
    let mut rig = Rig::new("duplicate=100%");
    let header = NetHeader {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 16,
        ..Default::default()
    };
    let mut packet = rig.cache.take_chain(HEADROOM, 100).unwrap();
    packet.headroom_mut(HEADER_LEN).copy_from_slice(&header.to_bytes());
    packet.set_offload(true);
    rig.line.take(packet, rig.now, &mut rig.cache).unwrap();
    let mut burst = Burst::new();
    rig.line.give(rig.now, 32, &mut burst);
    assert!(burst.len() == 2 && burst.iter().all(|p| p.headroom_bytes(HEADER_LEN) == header.to_bytes()));
    assert!(burst.iter().all(Packet::has_offload));
    rig.cache.free_all(burst);
    rig.assert_no_leaks();
}

#[test]
fn delay_holds_and_keeps_the_order() {
    let mut rig = Rig::new("delay=5ms");
    rig.put(3, 60);
    rig.now += 2_000;
    rig.put(2, 60);
    rig.now += 2_999;
    assert_eq!(rig.get(), []);
    rig.now += 1;
    assert_eq!(rig.get(), [0, 1, 2]);
    assert_eq!(rig.line.due(), Some(rig.now + 2_000));
    rig.now += 2_000;
    assert_eq!(rig.get(), [3, 4]);
    rig.assert_no_leaks();
}

#[test]
fn jitter_is_within_its_bounds() {
    let mut rig = Rig::new("delay=5ms,jitter=1ms");
    rig.put(1000, 60);
    rig.now += 3_999;
    assert_eq!(rig.get(), []);
    rig.now += 1_001;
    let early = rig.get();
    assert!((400..=600).contains(&early.len()), "{} of 1000", early.len());
    assert!(!early.is_sorted());
    rig.now += 1_000;
    assert_eq!(rig.get().len(), 1000 - early.len());
    rig.assert_no_leaks();
}

#[test]
fn rate_is_kept() {
    // 125 bytes take a millisecond, and the bucket holds one millisecond.
    let mut rig = Rig::new("rate=1M");
    rig.put(100, 125);
    assert_eq!(rig.get(), [0, 1]);
    for came in 2..100 {
        rig.now += 999;
        assert_eq!(rig.get(), []);
        rig.now += 1;
        assert_eq!(rig.get(), [came]);
    }
    // A long pause accumulates no more credit than the bucket holds.
    rig.now += 10 * HZ;
    rig.put(10, 125);
    assert_eq!(rig.get().len(), 2);
    rig.assert_no_leaks();
}

#[test]
fn held_buffers_are_limited() {
    let mut rig = Rig::with_limit("delay=1s", 100);
    rig.put(150, 60);
    assert_eq!((rig.line.len(), rig.dropped, rig.count(Count::TooMany)), (100, 50, 50));
    rig.now += HZ;
    assert!(rig.get().into_iter().eq(0..100));
    // The limit is in buffers, not packets. These packets have three buffers.
    rig.put(40, 5_000);
    assert_eq!((rig.line.len(), rig.count(Count::TooMany)), (33, 57));
    rig.assert_no_leaks();
}

#[test]
fn backpressure_prevents_loss() {
    let mut rig = Rig::with_limit("delay=1s", 100);
    while rig.line.has_room() {
        rig.put(20, 5_000);
    }
    assert_eq!((rig.line.len(), rig.dropped), (20, 0));
    rig.put(20, 5_000);
    assert_eq!((rig.line.len(), rig.dropped), (40, 0), "a burst is taken as a whole");
    rig.assert_no_leaks();
}

#[test]
fn drain_releases_all_packets() {
    let mut rig = Rig::new("delay=10s,jitter=10s,rate=1k,reorder=50%");
    rig.put(500, 60);
    assert_eq!(rig.get(), []);
    rig.now = END_OF_TIME;
    let mut came = rig.get();
    came.sort_unstable();
    assert!(came.into_iter().eq(0..500));
    rig.assert_no_leaks();
}
