//! Exhaustive tests of all positions in small rings, and of all 16-bit forms.

use super::*;

/// Index and wrap counter after a number of single steps.
fn walk(steps: u32, size: u32) -> (u32, bool) {
    (steps % size, (steps / size).is_multiple_of(2))
}

#[test]
fn positions_step_through_small_rings() {
    for size in (1..=33).chain([32_768]) {
        // The position stays inside the ring, even if a caller passes too many entries.
        assert!(Position(2 * size - 1).after(u32::MAX, size).index(size) < size);
    }
    for size in 1..=33 {
        for start in 0..2 * size {
            let at = Position(start);
            assert_eq!((at.index(size), at.wrap(size)), walk(start, size));
            assert_eq!(at.before_wrap(size), size - start % size);
            for entries in 0..=size {
                let next = at.after(entries, size);
                assert_eq!((next.index(size), next.wrap(size)), walk(start + entries, size));
                assert_eq!(next.since(at, size), entries);
                assert_eq!(at.since(next, size), (2 * size - entries) % (2 * size));
            }
        }
    }
}

#[test]
fn positions_encode_and_decode() {
    for size in [1u32, 2, 3, 7, 8, 255, 256, 257, 32_767, 32_768] {
        for form in 0..=u16::MAX {
            let (index, wrap) = (u32::from(form & !WRAP), form & WRAP != 0);
            let found = Position::decode(form, size);
            assert_eq!(found.is_some(), index < size, "{form:#x} of {size}");
            if let Some(at) = found {
                assert!(at.0 < 2 * size);
                assert_eq!((at.index(size), at.wrap(size), at.encode(size)), (index, wrap, form));
            }
        }
    }
}

/// A descriptor is available or used at a position in at most one turn, and never both in the same turn.
#[test]
fn descriptor_is_available_or_used() {
    let (first, second) = (Position(0), Position(1));
    for flags in 0..=u16::MAX {
        let word = Word::new(7, 9, flags);
        let is = |at: Position| (word.is(at.available(1)), word.is(at.used(1)));
        let (avail, used) = (flags & VIRTQ_DESC_F_AVAIL != 0, flags & VIRTQ_DESC_F_USED != 0);
        assert_eq!(is(first), (avail && !used, avail && used));
        assert_eq!(is(second), (!avail && used, !avail && !used));
        assert_eq!((word.len(), word.id(), word.flags()), (7, 9, flags));
    }
}
