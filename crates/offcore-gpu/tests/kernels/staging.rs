//! Packets processed in staging memory: the bytes and results are the same, and only swapped addresses are written
//! back. Most of [`crate::work`] and [`crate::bodies`] also runs staged.

use offcore_gpu::layout::{Kind, MAX_BURST, PacketDescriptor};

use crate::bodies::{MODES, by};
use crate::rig::{KINDS, Rig, STAGINGS, burst, threads};

/// Runs one burst and checks everything, including staging memory.
fn one_burst(rig: &Rig, mode: &str, packets: &[PacketDescriptor], number: u32, case: &str) {
    let (pool, expected) = rig.after(packets);
    rig.poison();
    rig.poison_results(0);
    rig.clear_answer(0);
    rig.post(0, packets);
    rig.quit(1);
    // SAFETY: nothing else uses the rig's memory.
    unsafe { by(mode, rig, packets.len(), number) };
    rig.check(0, packets.len(), &expected, case);
    rig.check_pool(&pool, case);
    rig.check_staging(packets, case);
}

#[test]
fn every_launch_uses_staging_memory() {
    for (count, swap) in [(1, 1), (33, 0), (300, 1), (1030, 1)] {
        let mut rig = Rig::new(count + 1, 2, count, Kind::Nothing);
        rig.work.swap = swap;
        for staging in STAGINGS {
            rig.stage(staging);
            for kind in KINDS {
                rig.work.kind = kind;
                for (mode, number) in
                    MODES.into_iter().cycle().zip([1, 32, 1000, 4096]).chain(MODES.map(|mode| (mode, 256)))
                {
                    let packets = rig.packets(count, u64::from(number));
                    let case =
                        format!("{mode}, {kind:?}, {number} threads, {count} packets, staging {staging:?}");
                    one_burst(&rig, mode, &packets, number, &case);
                }
            }
        }
    }
}

/// Every packet that fits into a chunk; chunks are smaller than, equal to, and larger than the copied word.
#[test]
fn every_offset_and_length_is_staged() {
    for chunk_shift in [3, 4, 7] {
        let room = 1usize << chunk_shift;
        let places: Vec<_> = (0..=room)
            .flat_map(|offset| (0..=room - offset).map(move |len| (offset as u16, len as u16)))
            .collect();
        for staging in STAGINGS {
            for (kind, number) in
                [(Kind::Nothing, 256), (Kind::Crc32c, 1), (Kind::Checksum, 1024), (Kind::Match, 32)]
            {
                let mut rig = Rig::with_chunks(chunk_shift, MAX_BURST, 2, MAX_BURST, kind);
                rig.stage(staging);
                for places in places.chunks(MAX_BURST) {
                    let packets: Vec<_> = places
                        .iter()
                        .zip(0..)
                        .map(|(&(offset, len), chunk)| PacketDescriptor { chunk, offset, len })
                        .collect();
                    let case = format!("{kind:?}, chunks of {room}, staging {staging:?}");
                    one_burst(&rig, "share", &packets, number, &case);
                }
            }
        }
    }
}

#[test]
fn long_and_bad_packets_are_staged() {
    let mut packets: Vec<_> = (0..=2048u16)
        .map(|len| {
            let offset = (len.wrapping_mul(7) % 32).min(2048 - len);
            PacketDescriptor { chunk: u32::from(len), offset, len }
        })
        .collect();
    // Chunk numbers behind the end of the pool, and an offset and length behind the end of a chunk.
    packets[5].chunk = 2049;
    packets[6].chunk = u32::MAX;
    packets[1000].offset = 1049;
    packets[2048].offset = 1;
    for kind in KINDS {
        for staging in STAGINGS {
            let mut rig = Rig::new(2049, 2, 2049, kind);
            rig.stage(staging);
            one_burst(&rig, "share", &packets, 256, &format!("{kind:?}, staging {staging:?}"));
        }
    }
}

#[test]
fn the_longest_packets_are_staged() {
    for number in [1, 64, 1024] {
        let mut rig = Rig::with_chunks(16, 3, 2, 8, Kind::Crc32c);
        rig.stage(Some(0));
        let packets = [(0, 1, 65535), (1, 0, 65535), (2, 65535, 1)]
            .map(|(chunk, offset, len)| PacketDescriptor { chunk, offset, len });
        one_burst(&rig, "persistent", &packets, number, &format!("{number} threads"));
    }
}

/// Staging memory starts one word before the pool. One thread copies from first to last word, so each word overwrites
/// the pool's previous word after it was copied. Only a reader of staging memory finds the first word.
#[test]
fn work_reads_the_staged_packet() {
    const CHUNK: usize = 2048;
    for (kind, words) in [(Kind::Crc32c, 64), (Kind::Checksum, 9), (Kind::Match, 127)] {
        let mut rig = Rig::new(2, 2, 1, kind);
        (rig.work.swap, rig.work.skip) = (0, 0);
        let packet = PacketDescriptor { chunk: 0, offset: 16, len: words * 16 };
        // Only the first word contains the lowest pattern, 0xff.
        let mut bytes = rig.pool.bytes().to_vec();
        bytes.iter_mut().for_each(|byte| *byte &= 0x7f);
        bytes[32..48].fill(0xff);
        rig.pool.fill(&bytes);
        let mut view = rig.view();
        (view.pool.base, view.pool.staging, view.pool.chunks) = (rig.pool.at(16), rig.pool.at(0), 1);
        let expected = rig.expect(&mut bytes[16..16 + CHUNK], &[packet]);
        rig.post(0, &[packet]);
        // SAFETY: both memories are inside the rig's pool, and nothing else uses it.
        assert!(unsafe { burst(&view, threads(1), 0, 1) });
        rig.check(0, 1, &expected, &format!("{kind:?}"));
        let mut left = rig.pool.bytes()[16..16 + CHUNK].to_vec();
        assert_ne!(rig.expect(&mut left, &[packet]), expected, "{kind:?}");
    }
}
