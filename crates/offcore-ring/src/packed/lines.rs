//! Runs of a packed ring's descriptors, read and written a cache line at a time.
//!
//! What is asked of the order of accesses, whatever their width: a descriptor's address, length and id are read after its
//! flags were found to say that it is available; and of a burst that is returned, the first descriptor's flags are written
//! after everything else (by [`Layout::publish`](super::Layout), not here), because the driver waits for those. x86 keeps
//! loads in order among each other, and stores, vectors included, as they are to write-back memory and none is
//! non-temporal. No more than eight aligned bytes at once are taken to be read or written as a whole.

use core::arch::asm;
use core::arch::x86_64::{
    __m256i, __m512i, _mm256_and_si256, _mm256_cmpeq_epi64, _mm256_movemask_epi8, _mm256_or_si256,
    _mm256_set_epi64x, _mm512_and_si512, _mm512_broadcast_i64x4, _mm512_cmpeq_epi64_mask, _mm512_or_si512,
};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Descriptor, STATE, fetch_ahead};
use crate::prefetch;
use crate::vector::{Entry, FOUR, Level, Single, Word, load_32};

/// Reads descriptors from `at` on into `into` until one has not the state bits `state`; returns how many there were.
///
/// # Safety
/// As many descriptors as `into` has room for are mapped at `at`, which is aligned to 16, and the CPU has `level`.
#[inline(always)]
pub(super) unsafe fn read_available(
    level: Level,
    at: *const Descriptor,
    state: u16,
    into: &mut [Entry],
) -> usize {
    // SAFETY: the caller's promises.
    unsafe {
        match level {
            Level::Plain => read_each(at, state, into, true),
            Level::Avx2 => read_avx2(at, state, into),
            Level::Avx512 => read_avx512(at, state, into),
        }
    }
}

/// # Safety
/// As for [`read_available`].
#[inline(always)]
unsafe fn read_each(at: *const Descriptor, state: u16, into: &mut [Entry], mut first: bool) -> usize {
    let mut found = 0;
    for entry in into {
        // SAFETY: one of the descriptors that the caller vouches for; its second half is aligned to 8.
        let (at, word) = unsafe {
            let at = at.add(found);
            (at, AtomicU64::from_ptr(at.cast::<u64>().add(1).cast_mut()))
        };
        // What the driver wrote before is visible after this.
        let word = Word(word.load(Ordering::Acquire));
        if word.flags() & STATE != state {
            break;
        }
        fetch_ahead(at, std::mem::take(&mut first), prefetch::write);
        // SAFETY: its first half. Volatile: read once, whatever the driver does.
        *entry = Entry { addr: unsafe { at.cast::<u64>().read_volatile() }, word };
        found += 1;
    }
    found
}

macro_rules! read_fours {
    ($name:ident, $feature:literal, $four:ident) => {
        /// # Safety
        /// As for [`read_available`].
        #[target_feature(enable = $feature)]
        unsafe fn $name(at: *const Descriptor, state: u16, into: &mut [Entry]) -> usize {
            let mut done = 0;
            while let Some(four) = into[done..].first_chunk_mut() {
                let at = at.wrapping_add(done);
                // SAFETY: four of the descriptors that the caller vouches for.
                if !unsafe { $four(at, state, four) } {
                    break;
                }
                // Of four in a row exactly one begins a line, if the first does not.
                let begin = at.addr().wrapping_neg() % prefetch::LINE;
                fetch_ahead(at.wrapping_byte_add(begin), done == 0, prefetch::write);
                done += FOUR;
            }
            // SAFETY: the rest of them.
            done + unsafe { read_each(at.add(done), state, &mut into[done..], done == 0) }
        }
    };
}

read_fours!(read_avx2, "avx2", four_avx2);
read_fours!(read_avx512, "avx2,avx512f", four_avx512);

/// The mask for both descriptors of a vector that leaves these bits of their words.
#[target_feature(enable = "avx2")]
fn in_words(bits: u64) -> __m256i {
    _mm256_set_epi64x(bits.cast_signed(), 0, bits.cast_signed(), 0)
}

/// Reads four descriptors if all are available.
///
/// # Safety
/// Four descriptors are mapped at `at`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn four_avx2(at: *const Descriptor, state: u16, into: &mut [Entry; FOUR]) -> bool {
    let (mask, state) = (in_words(u64::from(STATE) << 48), in_words(u64::from(state) << 48));
    // SAFETY: the caller vouches for four descriptors, which are twice 32 bytes.
    let halves = || unsafe { (load_32(at.cast()), load_32(at.add(2).cast())) };
    let (a, b) = halves();
    let all = _mm256_and_si256(
        _mm256_cmpeq_epi64(_mm256_and_si256(a, mask), state),
        _mm256_cmpeq_epi64(_mm256_and_si256(b, mask), state),
    );
    if _mm256_movemask_epi8(all) != -1 {
        return false;
    }
    // A vector may be loaded piece by piece: what was loaded with the flags may be older than they are. This comes after.
    let (a, b) = halves();
    let into = into.as_mut_ptr().cast::<__m256i>();
    // SAFETY: twice 32 bytes are four entries.
    unsafe {
        into.write_unaligned(a);
        into.add(1).write_unaligned(b);
    }
    true
}

/// The same.
///
/// # Safety
/// As for [`four_avx2`].
#[target_feature(enable = "avx2,avx512f")]
#[inline]
unsafe fn four_avx512(at: *const Descriptor, state: u16, into: &mut [Entry; FOUR]) -> bool {
    let load = || {
        let found: __m512i;
        // SAFETY: the load takes any alignment, and the caller vouches for 64 bytes. Assembly as in `load_32`.
        unsafe {
            asm!("vmovdqu64 {}, [{}]", lateout(zmm_reg) found, in(reg) at, options(nostack, preserves_flags, readonly));
        }
        found
    };
    let mask = _mm512_broadcast_i64x4(in_words(u64::from(STATE) << 48));
    let state = _mm512_broadcast_i64x4(in_words(u64::from(state) << 48));
    if _mm512_cmpeq_epi64_mask(_mm512_and_si512(load(), mask), state) != 0xff {
        return false;
    }
    // Again, for the same reason.
    // SAFETY: 64 bytes are four entries.
    unsafe { into.as_mut_ptr().cast::<__m512i>().write_unaligned(load()) };
    true
}

/// What a used descriptor has of the single that it returns, and what is added.
#[derive(Clone, Copy, Debug)]
pub(super) struct Used {
    /// Bits that are kept of its word.
    pub(super) keep: u64,
    /// Flags, at their place in the word.
    pub(super) mark: u64,
}

impl Used {
    /// The word of the descriptor that returns `single`.
    #[inline(always)]
    pub(super) fn word(self, single: &Single) -> Word {
        Word(single.word().0 & self.keep | self.mark)
    }
}

/// Writes used descriptors from `at` on, one for each of `singles`. The driver does not look at them yet. Those of whole
/// lines lose their addresses, but with [`Level::Plain`].
///
/// # Safety
/// As many descriptors as there are singles are mapped at `at`, which is aligned to 16, and the CPU has `level`.
#[inline(always)]
pub(super) unsafe fn write_used(level: Level, at: *mut Descriptor, singles: &[Single], used: Used) {
    // SAFETY: the caller's promises.
    unsafe {
        match level {
            Level::Plain => write_each(at, singles, used),
            Level::Avx2 => write_avx2(at, singles, used),
            Level::Avx512 => write_avx512(at, singles, used),
        }
    }
}

/// # Safety
/// As for [`write_used`].
#[inline(always)]
unsafe fn write_each(at: *mut Descriptor, singles: &[Single], used: Used) {
    for (i, single) in singles.iter().enumerate() {
        // SAFETY: the second half of one of the descriptors that the caller vouches for, aligned to 8.
        let word = unsafe { AtomicU64::from_ptr(at.add(i).cast::<u64>().add(1)) };
        word.store(used.word(single).0, Ordering::Relaxed);
    }
}

macro_rules! write_fours {
    ($name:ident, $feature:literal, $four:ident) => {
        /// # Safety
        /// As for [`write_used`].
        #[target_feature(enable = $feature)]
        unsafe fn $name(at: *mut Descriptor, singles: &[Single], used: Used) {
            let before = at.addr().wrapping_neg() % prefetch::LINE / size_of::<Descriptor>();
            let (begun, whole) = singles.split_at(before.min(singles.len()));
            let (lines, rest) = whole.as_chunks();
            // SAFETY: descriptors that the caller vouches for, a line's start where a line is written.
            unsafe {
                write_each(at, begun, used);
                let mut at = at.add(begun.len());
                for line in lines {
                    $four(at, line, used);
                    at = at.add(FOUR);
                }
                write_each(at, rest, used);
            }
        }
    };
}

write_fours!(write_avx2, "avx2", line_avx2);
write_fours!(write_avx512, "avx2,avx512f", line_avx512);

/// Writes a line.
///
/// # Safety
/// A line of descriptors is mapped at `at`, its start.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn line_avx2(at: *mut Descriptor, line: &[Single; FOUR], used: Used) {
    let (keep, mark) = (in_words(used.keep), in_words(used.mark));
    let (from, at) = (line.as_ptr().cast::<__m256i>(), at.cast::<__m256i>());
    for half in 0..2 {
        // SAFETY: two of the line's singles, and two of its descriptors, aligned to 32.
        unsafe {
            let two = from.add(half).read_unaligned();
            at.add(half).write_volatile(_mm256_or_si256(_mm256_and_si256(two, keep), mark));
        }
    }
}

/// The same.
///
/// # Safety
/// As for [`line_avx2`].
#[target_feature(enable = "avx2,avx512f")]
#[inline]
unsafe fn line_avx512(at: *mut Descriptor, line: &[Single; FOUR], used: Used) {
    let (keep, mark) =
        (_mm512_broadcast_i64x4(in_words(used.keep)), _mm512_broadcast_i64x4(in_words(used.mark)));
    // SAFETY: the line's singles, and its descriptors, aligned to 64.
    unsafe {
        let four = line.as_ptr().cast::<__m512i>().read_unaligned();
        at.cast::<__m512i>().write_volatile(_mm512_or_si512(_mm512_and_si512(four, keep), mark));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::packed::{VIRTQ_DESC_F_AVAIL, VIRTQ_DESC_F_USED};
    use crate::split::VIRTQ_DESC_F_WRITE;

    /// Descriptors of any content, most of which say that they are available in the first turn.
    fn ring() -> impl Strategy<Value = Vec<Descriptor>> {
        let flags = prop_oneof![
            30 => (any::<u16>(),).prop_map(|(other,)| other & !STATE | VIRTQ_DESC_F_AVAIL),
            1 => any::<u16>(),
        ];
        let descriptor = (any::<u64>(), any::<u32>(), any::<u16>(), flags);
        let descriptor = descriptor.prop_map(|(addr, len, id, flags)| Descriptor { addr, len, id, flags });
        proptest::collection::vec(descriptor, 0..80)
    }

    proptest! {
        /// Each level finds as many as the plain one, and reads the same, wherever in a line it begins, however many there
        /// are, and whatever a driver wrote.
        #[test]
        fn all_levels_read_alike(ring in ring(), from in 0usize..9, state in prop_oneof![Just(VIRTQ_DESC_F_AVAIL), Just(VIRTQ_DESC_F_USED)]) {
            let ring = &ring[from.min(ring.len())..];
            let read = |level| {
                let mut entries = vec![Entry::default(); ring.len()];
                // SAFETY: as many descriptors as entries, and a level that this CPU has.
                let found = unsafe { read_available(level, ring.as_ptr(), state, &mut entries) };
                entries.truncate(found);
                entries
            };
            let expected = read(Level::Plain);
            let there = ring.iter().take_while(|descriptor| descriptor.flags & STATE == state);
            let there = there.map(|found| Entry { addr: found.addr, word: Word::new(found.len, found.id, found.flags) });
            prop_assert_eq!(&expected, &there.collect::<Vec<_>>());
            for level in Level::available() {
                prop_assert_eq!(read(level), expected.clone(), "{:?}", level);
            }
        }

        /// Each level writes length, id and flags as the plain one does, and nothing beside its run.
        #[test]
        fn all_levels_write_alike(ring in ring(), from in 0usize..9, beside in 0usize..9, writable: bool) {
            let run = from.min(ring.len())..ring.len().saturating_sub(beside).max(from.min(ring.len()));
            let singles: Vec<_> = run.clone().map(|i| Single::found(i as u32 * 77 + 1, i as u16 * 13)).collect();
            let (keep, mark) = if writable {
                (Word::new(u32::MAX, u16::MAX, 0), Word::new(0, 0, STATE | VIRTQ_DESC_F_WRITE))
            } else {
                (Word::new(0, u16::MAX, 0), Word::new(0, 0, 0))
            };
            let used = Used { keep: keep.0, mark: mark.0 };
            for level in Level::available() {
                let mut written = ring.clone();
                // SAFETY: as many descriptors as singles, and a level that this CPU has.
                unsafe { write_used(level, written[run.clone()].as_mut_ptr(), &singles, used) };
                for (i, (written, before)) in written.iter().zip(&ring).enumerate() {
                    let found = Word::new(written.len, written.id, written.flags);
                    if run.contains(&i) {
                        prop_assert_eq!(found, used.word(&singles[i - run.start]), "{:?}", level);
                    } else {
                        prop_assert_eq!(written, before, "{:?}", level);
                    }
                }
            }
        }
    }
}
