//! Exhaustive tests of small index arithmetic.

use super::*;

/// Numbers of entries to test: small numbers, and the edges of all sizes.
fn counts() -> impl Iterator<Item = u16> {
    (0..=8).chain((4..=15).flat_map(|bits| (-1..=1).map(move |more| ((1 << bits) + more) as u16)))
}

/// A notification is due only if the step passes the entry of the event.
#[test]
fn need_event_is_exact() {
    for old in [0, 1, 0x7fff, 0x8000, 0xfffe, 0xffff_u16] {
        for count in counts() {
            let new = old.wrapping_add(count);
            for ahead in 0..=u16::MAX {
                let event = old.wrapping_add(ahead);
                assert_eq!(need_event(event, new, old), ahead < count, "{event} from {old} to {new}");
            }
        }
    }
}

/// Each position has its own entry, and each entry is inside its part of the ring.
#[test]
fn positions_map_to_distinct_entries() {
    for size in (0..=15).map(|bits| 1u16 << bits) {
        let parts = [desc_len(size), avail_len(size), used_len(size)];
        let memory = guest_memory(parts.iter().map(|len| len.next_multiple_of(4096)).sum());
        let avail = parts[0].next_multiple_of(4096) as u64;
        let used = avail + parts[1].next_multiple_of(4096) as u64;
        let layout = SplitLayout::in_memory(
            &memory,
            Areas { descriptors: 0, driver: avail, device: used },
            size.into(),
        )
        .unwrap();
        let offset = |address: usize, part: NonNull<u8>| address - part.as_ptr() as usize;
        for position in 0..=u16::MAX {
            let index = usize::from(position % size);
            assert_eq!(layout.before_wrap(position), usize::from(size) - index);
            assert_eq!(offset(layout.desc_at(position) as usize, layout.desc), 16 * index);
            assert_eq!(offset(layout.avail_at(position) as usize, layout.avail), 4 + 2 * index);
            assert_eq!(offset(layout.used_element(position) as usize, layout.used), 4 + 8 * index);
        }
        let last = usize::from(size) - 1;
        assert_eq!((parts[0], parts[1], parts[2]), (16 * (last + 1), 4 + 2 * last + 4, 4 + 8 * last + 10));
        assert_eq!(offset(layout.used_event().as_ptr() as usize, layout.avail) + 2, parts[1]);
        assert_eq!(offset(layout.avail_event().as_ptr() as usize, layout.used) + 2, parts[2]);
    }
}

/// A device accepts a driver's index exactly if the ring has room for that many chains.
#[test]
fn available_index_is_bounds_checked() {
    for (size, base) in [(1, 0_u16), (2, 0xffff), (8, 0xfffc)] {
        let guest = guest(size);
        for known in [0, 1, size] {
            for found in 0..=u16::MAX {
                guest.write(AVAIL + 2, base.wrapping_add(known));
                let mut queue = device::SplitDevice::new(guest.layout.clone(), base, false, false);
                assert_eq!(queue.available(1), Ok(known));
                guest.write(AVAIL + 2, found);
                let claimed = found.wrapping_sub(base);
                let expected = (known..=size).contains(&claimed).then_some(claimed);
                assert_eq!(queue.available(u16::MAX).ok(), expected, "{found} after {known} from {base}");
            }
        }
    }
}
