//! Exhaustive tests of all indices of a region, and of all states of a small ring.

use super::*;
use crate::split::{VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};

/// Length of a descriptor in bytes. The state bits are in its last two bytes.
const DESCRIPTOR: usize = 16;
const AVAIL: u16 = packed::VIRTQ_DESC_F_AVAIL;
const USED: u16 = packed::VIRTQ_DESC_F_USED;

#[test]
fn inflight_region_fits_every_ring_size() {
    let mut before = 0;
    for size in 0..=u16::MAX {
        let len = Inflight::len(size);
        let last = HEADER + ENTRY * usize::from(size.max(1) - 1) + WORD_AT + size_of::<u64>();
        assert!(len.is_multiple_of(ALIGN) && len >= HEADER && len >= before);
        assert!(size == 0 || last <= len && len < last + ENTRY + ALIGN);
        before = len;
    }
}

#[test]
fn every_burst_reads_back() {
    let inflight = World::new(8, true).inflight();
    for at in 0..=u16::MAX {
        for other in [0, 1, 0x7fff, 0x8000, 0xffff] {
            inflight.publish(at, other);
            assert_eq!(inflight.last_burst(), (at, other));
            inflight.publish(other, at);
            assert_eq!(inflight.last_burst(), (other, at));
        }
    }
}

#[test]
fn inflight_entries_do_not_overlap() {
    for size in [1, 2, 3, 64, 255, 256] {
        let inflight = World::new(size, true).inflight();
        let word = |index: u32| 0x8001_0203_0405_0600 + u64::from(index);
        (0..u32::from(size)).for_each(|index| inflight.keep(index, word(index)));
        inflight.publish(u16::MAX, u16::MAX);
        assert!((0..u32::from(size)).all(|index| inflight.kept_word(index) == word(index)));
    }
}

#[test]
fn inflight_headers_are_checked() {
    let world = World::new(4, true);
    let inflight = world.inflight();
    let all_features = [0, IN_ORDER, PACKED, IN_ORDER | PACKED, IN_ORDER | PACKED | 1, u64::MAX];
    for version in [0, 1, 2, u16::MAX] {
        for features in all_features {
            for found in 0..=9 {
                inflight.u16_at(VERSION_AT).store(version, Ordering::Relaxed);
                inflight.u64_at(FEATURES_AT).store(features, Ordering::Relaxed);
                inflight.u16_at(SIZE_AT).store(found, Ordering::Relaxed);
                for (size, is_packed) in (0..=9).flat_map(|size| [(size, false), (size, true)]) {
                    let bits = if is_packed { IN_ORDER | PACKED } else { IN_ORDER };
                    let expected = match version {
                        _ if size > 4 => None,
                        0 => Some(false),
                        1 if features == bits && found == size => Some(true),
                        _ => None,
                    };
                    assert_eq!(inflight.is_in_use(size, is_packed).ok(), expected);
                }
            }
        }
    }
}

/// The next device begins where the last burst began or ended. It restores used descriptors only if they were available
/// before.
#[test]
fn small_ring_resumes_from_every_state() {
    const SIZE: u16 = 2;
    let states = [0, AVAIL, USED, AVAIL | USED];
    let world = World::new(SIZE, true);
    let (inflight, ring) = (world.inflight(), world.memory.regions()[0].mapping());
    let ends: Vec<u16> = (0..=SIZE).flat_map(|index| [index, index | WRAP]).collect();
    let of = |number: usize, at: u32| states[number >> (2 * at) & 3];
    for (number, kept) in (0..16).flat_map(|number| (0..16).map(move |kept| (number, kept))) {
        for (old, new) in ends.iter().flat_map(|old| ends.iter().map(move |new| (*old, *new))) {
            inflight.begin(SIZE, true, 0);
            inflight.publish(old, new);
            for at in 0..u32::from(SIZE) {
                let flags = (of(number, at) | VIRTQ_DESC_F_NEXT).to_le_bytes();
                ring.write_at(AREAS.descriptors as usize + DESCRIPTOR * at as usize + 14, &flags);
                let word = u64::from(of(kept, at) | VIRTQ_DESC_F_WRITE) << 48;
                inflight.keep(at, word);
            }
            let found = world.layout.take_up(&inflight, 0);
            let is_inside = |end: u16| end & !WRAP < SIZE;
            if !is_inside(old) || !is_inside(new) {
                assert!(matches!(found, Err(RingError::Base { .. })), "{old:#x} {new:#x}: {found:?}");
                continue;
            }
            let base = found.unwrap().unwrap();
            assert!(base == u32::from(old) * 0x1_0001 || base == u32::from(new) * 0x1_0001);
            for at in 0..u32::from(SIZE) {
                let mut bytes = [0; 2];
                ring.read_at(AREAS.descriptors as usize + DESCRIPTOR * at as usize + 14, &mut bytes);
                let (is, was) = (u16::from_le_bytes(bytes), of(number, at));
                let is_kept = is == was | VIRTQ_DESC_F_NEXT;
                // It is available again, in the turn in which it was available before.
                let used_in = |kept: u16| if kept == AVAIL { AVAIL | USED } else { 0 };
                let again = of(kept, at);
                let is_restored = is == again | VIRTQ_DESC_F_WRITE
                    && [AVAIL, USED].contains(&again)
                    && was == used_in(again);
                assert!(is_kept || is_restored, "{number:#x} {kept:#x} {old:#x} {new:#x}: {is:#x}");
            }
        }
    }
}
