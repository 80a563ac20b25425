//! The work on packets: bytes and results.

use std::time::{Duration, Instant};

use aho_corasick::AhoCorasick;
use offcore_gpu::layout::{Kind, PacketDescriptor};
use offcore_gpu::patterns::Patterns;
use offcore_gpu::trie::Trie;

use crate::rig::{COUNTS, KINDS, Numbers, Rig, burst, threads};

/// Runs one burst in place and staged, and checks everything.
fn one_burst(rig: &mut Rig, packets: &[PacketDescriptor], number: u32, case: &str) -> Vec<u32> {
    let before = rig.pool.bytes().to_vec();
    let (pool, expected) = rig.after(packets);
    for staging in [None, Some(0)] {
        let case = &format!("{case}, staging {staging:?}");
        rig.stage(staging);
        rig.pool.fill(&before);
        rig.poison_results(0);
        rig.clear_answer(0);
        rig.post(0, packets);
        let (slot, lap) = rig.place(0);
        // SAFETY: the rig is alive, and nothing else uses its memory.
        assert!(unsafe { burst(&rig.view(), threads(number), slot, lap) }, "{case}: no burst");
        rig.check(0, packets.len(), &expected, case);
        rig.check_pool(&pool, case);
        rig.check_staging(packets, case);
    }
    expected
}

/// Blocks of 1000 and 4096 threads also cut payloads into parts in bursts of several tiles.
#[test]
fn results_match_other_implementations() {
    let mut hits = 0;
    for count in COUNTS {
        let mut rig = Rig::new(count + 1, 2, count.max(1), Kind::Nothing);
        for kind in KINDS {
            for number in [1, 32, 256, 1000, 4096] {
                for (skip, swap) in [(0, 1), (14, 1), (15, 0)] {
                    (rig.work.kind, rig.work.skip, rig.work.swap) = (kind, skip, swap);
                    let packets = rig.packets(count, count as u64 + u64::from(skip));
                    let case =
                        format!("{kind:?}, {number} threads, {count} packets, skip {skip}, swap {swap}");
                    let results = one_burst(&mut rig, &packets, number, &case);
                    hits += results.iter().filter(|result| **result != 0 && kind == Kind::Match).count();
                }
            }
        }
    }
    // The test is only meaningful if some packets match and some do not.
    let matched: usize = 5 * 3 * COUNTS.iter().sum::<usize>();
    assert!(hits > matched / 10 && hits < matched * 9 / 10, "{hits} hits of {matched} packets");
}

#[test]
fn results_match_published_vectors() {
    let cases: [(Kind, &[u8], u32); 7] = [
        (Kind::Crc32c, b"123456789", 0xe306_9283),
        // RFC 3720, B.4.
        (Kind::Crc32c, &[0; 32], 0x8a91_36aa),
        (Kind::Crc32c, &[0xff; 32], 0x62a8_ab43),
        // RFC 1071, section 3: the sum is ddf2.
        (Kind::Checksum, &[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7], 0x220d),
        (Kind::Checksum, &[0xff; 64], 0),
        (Kind::Checksum, &[0; 3], 0xffff),
        (Kind::Nothing, b"123456789", 0),
    ];
    for number in [1, 5, 32, 256] {
        for (kind, payload, expected) in cases {
            let mut rig = Rig::new(1, 2, 1, kind);
            (rig.work.skip, rig.work.swap) = (0, 0);
            let mut pool = rig.pool.bytes().to_vec();
            pool[3..3 + payload.len()].copy_from_slice(payload);
            rig.pool.fill(&pool);
            let packet = PacketDescriptor { chunk: 0, offset: 3, len: payload.len() as u16 };
            let case = format!("{kind:?} of {} bytes, {number} threads", payload.len());
            assert_eq!(one_burst(&mut rig, &[packet], number, &case), [expected], "{case}");
        }
    }
}

#[test]
fn longest_packets_have_correct_results() {
    for kind in KINDS {
        for number in [1, 3, 256] {
            let mut rig = Rig::with_chunks(16, 3, 2, 8, kind);
            rig.work.skip = 0;
            let mut pool = rig.pool.bytes().to_vec();
            pool[1 << 16..2 << 16].fill(0xff);
            rig.pool.fill(&pool);
            let packets = [(0, 1, 65535), (1, 0, 65535), (2, 65535, 1)]
                .map(|(chunk, offset, len)| PacketDescriptor { chunk, offset, len });
            one_burst(&mut rig, &packets, number, &format!("{kind:?}, {number} threads"));
        }
    }
}

#[test]
fn bad_descriptors_have_result_0() {
    for kind in KINDS {
        for number in [1, 32, 256] {
            let mut rig = Rig::new(8, 2, 16, kind);
            let bad = [
                (8, 0, 64),
                (u32::MAX, 0, 64),
                (0x8000_0000, 128, 1),
                (7, 2047, 2),
                (7, 0, 2049),
                (7, 2048, 1),
                (0, 65535, 65535),
                (3, 65535, 1),
                (4, 1985, 64),
                (5, 100, 0),
            ]
            .map(|(chunk, offset, len)| PacketDescriptor { chunk, offset, len });
            let case = format!("{kind:?}, {number} threads");
            let before = rig.pool.bytes().to_vec();
            assert_eq!(one_burst(&mut rig, &bad, number, &case), [0; 10]);
            rig.check_pool(&before, &case);

            // Valid ones beside them are processed, up to the last byte of the pool.
            let mut mixed = bad.to_vec();
            mixed.insert(4, PacketDescriptor { chunk: 2, offset: 7, len: 101 });
            mixed.push(PacketDescriptor { chunk: 7, offset: 1984, len: 64 });
            one_burst(&mut rig, &mixed, number, &case);
            assert_ne!(rig.pool.bytes(), before);
        }
    }
}

#[test]
fn thousands_of_patterns_are_found() {
    let patterns = Patterns::random(5, 5000, 8..=32).expect("patterns");
    let trie = Trie::new(&patterns);
    let mut numbers = Numbers(3);
    for number in [1, 256] {
        let mut rig = Rig::new(300, 2, 300, Kind::Match);
        rig.work.trie = trie.view();
        rig.automaton = AhoCorasick::new(patterns.iter()).expect("patterns");
        let packets = rig.packets(300, 1);
        let mut pool = rig.pool.bytes().to_vec();
        for packet in &packets {
            // Zero to two patterns, anywhere in the packet, possibly truncated at its end.
            for _ in 0..numbers.below(3) {
                let pattern = patterns.iter().nth(numbers.below(patterns.len())).expect("a pattern");
                let at = usize::from(packet.offset) + numbers.below(usize::from(packet.len) + 1);
                let chunk = &mut pool[(packet.chunk as usize) << rig.chunk_shift..][at..];
                let len = pattern.len().min((1 << rig.chunk_shift) - at);
                chunk[..len].copy_from_slice(&pattern[..len]);
            }
        }
        rig.pool.fill(&pool);
        let results = one_burst(&mut rig, &packets, number, &format!("{number} threads"));
        let found = results.iter().filter(|result| **result != 0).count();
        assert!(found > 50 && found < 250, "{found} packets of 300 match");
    }
}

#[test]
fn no_patterns_match_nothing() {
    let mut rig = Rig::new(40, 2, 40, Kind::Match);
    rig.work.trie = offcore_gpu::layout::TrieView::EMPTY;
    let packets = rig.packets(40, 1);
    rig.post(0, &packets);
    // SAFETY: the rig is alive, and nothing else uses its memory.
    assert!(unsafe { burst(&rig.view(), threads(32), 0, 1) });
    rig.check(0, 40, &[0; 40], "no patterns");
}

#[test]
fn forced_time_is_parallel_in_a_block() {
    const FORCED: Duration = Duration::from_millis(2);
    for (count, number, rounds) in
        [(1, 32, 1), (32, 32, 1), (33, 32, 2), (5, 1, 5), (0, 32, 0), (300, 256, 2)]
    {
        let mut rig = Rig::new(301, 2, 300, Kind::Nothing);
        rig.work.forced_ns = FORCED.as_nanos() as u32;
        let packets = rig.packets(count, 3);
        rig.post(0, &packets);
        let since = Instant::now();
        // SAFETY: the rig is alive, and nothing else uses its memory.
        assert!(unsafe { burst(&rig.view(), threads(number), 0, 1) });
        let waited = since.elapsed();
        assert!(waited >= FORCED * rounds, "{count} packets on {number} threads took {waited:?}");
    }
}
