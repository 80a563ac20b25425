//! Packets that are worked on in memory of the device's own: bytes and results are the same, and only addresses that
//! change places are written where packets are. Most of [`crate::work`] and [`crate::bodies`] runs staged, too.

use offcore_gpu::kernel;
use offcore_gpu::layout::{Kind, MAX_BURST, PacketDescriptor};

use crate::bodies::{MODES, by};
use crate::rig::{KINDS, Rig, STAGINGS, lanes};

/// One burst, checked as a whole, staging memory included.
fn one_burst(rig: &Rig, mode: &str, packets: &[PacketDescriptor], number: u32, case: &str) {
    let mut pool = rig.pool.bytes().to_vec();
    let expected = rig.expect(&mut pool, packets);
    rig.poison();
    rig.spoil_results(0);
    rig.clear_answer(0);
    rig.post(0, packets);
    rig.quit(1);
    // SAFETY: nobody else is at the rig's memory.
    unsafe { by(mode, rig, packets.len(), number) };
    rig.check(0, packets.len(), &expected, case);
    rig.check_pool(&pool, case);
    rig.check_staging(packets, case);
}

#[test]
fn whatever_launches_works_on_packets_in_staging_memory() {
    for (count, swap) in [(1, 1), (33, 0), (300, 1), (1030, 1)] {
        let mut rig = Rig::new(count + 1, 2, count, Kind::Nothing);
        rig.work.swap = swap;
        for staging in STAGINGS {
            rig.stage(staging);
            for kind in KINDS {
                rig.work.kind = kind;
                for (mode, number) in
                    MODES.into_iter().zip([1, 32, 1000, 4096]).chain(MODES.map(|mode| (mode, 256)))
                {
                    let packets = rig.packets(count, u64::from(number));
                    let case =
                        format!("{mode}, {kind:?}, {number} lanes, {count} packets, staging {staging:?}");
                    one_burst(&rig, mode, &packets, number, &case);
                }
            }
        }
    }
}

/// Every packet that a chunk has room for; chunks are smaller than a word of a copy, as large, and larger.
#[test]
fn every_offset_and_every_length_is_staged_to_the_byte() {
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
                    one_burst(&rig, "burst", &packets, number, &case);
                }
            }
        }
    }
}

#[test]
fn every_length_up_to_a_whole_chunk_is_staged_beside_bad_descriptors() {
    let mut packets: Vec<_> = (0..=2048u16)
        .map(|len| {
            let offset = (len.wrapping_mul(7) % 32).min(2048 - len);
            PacketDescriptor { chunk: u32::from(len), offset, len }
        })
        .collect();
    // Behind the pool's end, beyond a chunk's.
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
        one_burst(&rig, "persistent", &packets, number, &format!("{number} lanes"));
    }
}

/// Staging memory begins a word before the pool: one lane copies from the first word to the last, and overwrites each
/// word of the pool when it has been copied, by the next one. So only who looks at staging memory finds the first word.
#[test]
fn work_looks_at_the_staged_packet_and_not_at_the_other() {
    const CHUNK: usize = 2048;
    for (kind, words) in [(Kind::Crc32c, 64), (Kind::Checksum, 9), (Kind::Match, 127)] {
        let mut rig = Rig::new(2, 2, 1, kind);
        (rig.work.swap, rig.work.skip) = (0, 0);
        let packet = PacketDescriptor { chunk: 0, offset: 16, len: words * 16 };
        // The pattern 0xff, which no other is before, is in the first word alone.
        let mut bytes = rig.pool.bytes().to_vec();
        bytes.iter_mut().for_each(|byte| *byte &= 0x7f);
        bytes[32..48].fill(0xff);
        rig.pool.fill(&bytes);
        let mut view = rig.view();
        (view.pool.base, view.pool.staging, view.pool.chunks) = (rig.pool.at(16), rig.pool.at(0), 1);
        let expected = rig.expect(&mut bytes[16..16 + CHUNK], &[packet]);
        rig.post(0, &[packet]);
        // SAFETY: both memories are inside the rig's pool, and nobody else is at it.
        assert!(unsafe { kernel::burst(&view, lanes(1), 0, 1) });
        rig.check(0, 1, &expected, &format!("{kind:?}"));
        let mut left = rig.pool.bytes()[16..16 + CHUNK].to_vec();
        assert_ne!(rig.expect(&mut left, &[packet]), expected, "{kind:?}");
    }
}
