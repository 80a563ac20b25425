//! Access to runs of descriptors in a packed ring, one cache line at a time.
//!
//! Ordering requirements, regardless of the width of the accesses: address, length and ID of a descriptor are read
//! after its flags, once the flags say that it is available. When a burst is returned, the flags of the first
//! descriptor are written after everything else (by [`PackedLayout::publish`](super::PackedLayout), not here), because
//! the driver waits for them. x86 keeps the order of loads, and the order of stores. This includes vector stores,
//! because they go to write-back memory and are not non-temporal. Only aligned accesses of up to eight bytes are
//! assumed to be atomic.

use core::arch::asm;
use core::arch::x86_64::{
    __m256i, __m512i, _mm256_and_si256, _mm256_cmpeq_epi64, _mm256_movemask_epi8, _mm256_or_si256,
    _mm256_set_epi64x, _mm512_and_si512, _mm512_broadcast_i64x4, _mm512_cmpeq_epi64_mask, _mm512_or_si512,
};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{PackedDescriptor, STATE, fetch_ahead};
use crate::prefetch;
use crate::vector::{Entry, FOUR, Level, Single, Word, load_32};

/// Reads descriptors from `at` into `into`, up to the first one without the state bits `state`. Returns their number.
///
/// # Safety
/// `at` must be aligned to 16 and point to as many mapped descriptors as `into` has entries. The CPU must support
/// `level`.
#[inline(always)]
pub(super) unsafe fn read_available(
    level: Level,
    at: *const PackedDescriptor,
    state: u16,
    into: &mut [Entry],
) -> usize {
    // SAFETY: `at` is valid for the descriptors and the CPU supports `level`, as the caller guarantees.
    unsafe {
        match level {
            Level::Plain => read_each(at, state, into, true),
            Level::Avx2 => read_avx2(at, state, into),
            Level::Avx512 => read_avx512(at, state, into),
        }
    }
}

/// # Safety
/// The same as for [`read_available`].
#[inline(always)]
unsafe fn read_each(at: *const PackedDescriptor, state: u16, into: &mut [Entry], mut first: bool) -> usize {
    let mut found = 0;
    for entry in into {
        // SAFETY: the descriptor is mapped, as the caller guarantees. Its second half is aligned to 8.
        let (at, word) = unsafe {
            let at = at.add(found);
            (at, AtomicU64::from_ptr(at.cast::<u64>().add(1).cast_mut()))
        };
        // Everything that the driver wrote before is visible afterwards.
        let word = Word(word.load(Ordering::Acquire));
        if word.flags() & STATE != state {
            break;
        }
        fetch_ahead(at, std::mem::take(&mut first), prefetch::write);
        // SAFETY: this is the first half of the descriptor. Volatile, so that it is read exactly once.
        *entry = Entry { addr: unsafe { at.cast::<u64>().read_volatile() }, word };
        found += 1;
    }
    found
}

macro_rules! read_fours {
    ($name:ident, $feature:literal, $four:ident) => {
        /// # Safety
        /// The same as for [`read_available`].
        #[target_feature(enable = $feature)]
        unsafe fn $name(at: *const PackedDescriptor, state: u16, into: &mut [Entry]) -> usize {
            let mut done = 0;
            while let Some(four) = into[done..].first_chunk_mut() {
                let at = at.wrapping_add(done);
                // SAFETY: these four descriptors are mapped, as the caller guarantees.
                if !unsafe { $four(at, state, four) } {
                    break;
                }
                // Finds the start of a cache line. Four consecutive descriptors contain exactly one start.
                let begin = at.addr().wrapping_neg() % prefetch::LINE;
                fetch_ahead(at.wrapping_byte_add(begin), done == 0, prefetch::write);
                done += FOUR;
            }
            // SAFETY: the remaining descriptors are mapped, as the caller guarantees.
            done + unsafe { read_each(at.add(done), state, &mut into[done..], done == 0) }
        }
    };
}

read_fours!(read_avx2, "avx2", four_avx2);
read_fours!(read_avx512, "avx2,avx512f", four_avx512);

/// Returns a mask that selects these bits in the words of both descriptors of a vector.
#[target_feature(enable = "avx2")]
fn in_words(bits: u64) -> __m256i {
    _mm256_set_epi64x(bits.cast_signed(), 0, bits.cast_signed(), 0)
}

/// Reads four descriptors if all of them are available.
///
/// # Safety
/// Four descriptors must be mapped at `at`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn four_avx2(at: *const PackedDescriptor, state: u16, into: &mut [Entry; FOUR]) -> bool {
    let (mask, state) = (in_words(u64::from(STATE) << 48), in_words(u64::from(state) << 48));
    // SAFETY: four descriptors, which are twice 32 bytes, are mapped, as the caller guarantees.
    let halves = || unsafe { (load_32(at.cast()), load_32(at.add(2).cast())) };
    let (a, b) = halves();
    let all = _mm256_and_si256(
        _mm256_cmpeq_epi64(_mm256_and_si256(a, mask), state),
        _mm256_cmpeq_epi64(_mm256_and_si256(b, mask), state),
    );
    if _mm256_movemask_epi8(all) != -1 {
        return false;
    }
    // A vector load may be split, so data loaded together with the flags may be older than the flags. This load happens
    // after it.
    let (a, b) = halves();
    let into = into.as_mut_ptr().cast::<__m256i>();
    // SAFETY: four entries have twice 32 bytes.
    unsafe {
        into.write_unaligned(a);
        into.add(1).write_unaligned(b);
    }
    true
}

/// Like [`four_avx2`], with one vector.
///
/// # Safety
/// The same as for [`four_avx2`].
#[target_feature(enable = "avx2,avx512f")]
#[inline]
unsafe fn four_avx512(at: *const PackedDescriptor, state: u16, into: &mut [Entry; FOUR]) -> bool {
    let load = || {
        let found: __m512i;
        // SAFETY: the load is unaligned, and 64 bytes are mapped at `at`, as the caller guarantees. Assembly, because
        // the compiler may repeat or omit ordinary loads.
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
    // The second load is needed for the same reason as in `four_avx2`.
    // SAFETY: four entries have 64 bytes.
    unsafe { into.as_mut_ptr().cast::<__m512i>().write_unaligned(load()) };
    true
}

/// Defines how the word of a used descriptor is made from the single that it returns.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsedMark {
    /// Bits to keep from the word of the single.
    pub(super) keep: u64,
    /// Flags to add, at their position in the word.
    pub(super) mark: u64,
}

impl UsedMark {
    /// The word of the used descriptor that returns `single`.
    #[inline(always)]
    pub(super) fn word(self, single: &Single) -> Word {
        Word(single.word().0 & self.keep | self.mark)
    }
}

/// Writes one used descriptor for each of `singles`, starting at `at`. The driver does not read them yet. Except with
/// [`Level::Plain`], the addresses of descriptors in whole lines are overwritten.
///
/// # Safety
/// `at` must be aligned to 16 and point to as many mapped descriptors as `singles` has. The CPU must support `level`.
#[inline(always)]
pub(super) unsafe fn write_used(level: Level, at: *mut PackedDescriptor, singles: &[Single], used: UsedMark) {
    // SAFETY: `at` is valid for the descriptors and the CPU supports `level`, as the caller guarantees.
    unsafe {
        match level {
            Level::Plain => write_each(at, singles, used),
            Level::Avx2 => write_avx2(at, singles, used),
            Level::Avx512 => write_avx512(at, singles, used),
        }
    }
}

/// # Safety
/// The same as for [`write_used`].
#[inline(always)]
unsafe fn write_each(at: *mut PackedDescriptor, singles: &[Single], used: UsedMark) {
    for (i, single) in singles.iter().enumerate() {
        // SAFETY: this is the second half of a descriptor, mapped as the caller guarantees, and aligned to 8.
        let word = unsafe { AtomicU64::from_ptr(at.add(i).cast::<u64>().add(1)) };
        word.store(used.word(single).0, Ordering::Relaxed);
    }
}

macro_rules! write_fours {
    ($name:ident, $feature:literal, $four:ident) => {
        /// # Safety
        /// The same as for [`write_used`].
        #[target_feature(enable = $feature)]
        unsafe fn $name(at: *mut PackedDescriptor, singles: &[Single], used: UsedMark) {
            let before = at.addr().wrapping_neg() % prefetch::LINE / size_of::<PackedDescriptor>();
            let (begun, whole) = singles.split_at(before.min(singles.len()));
            let (lines, rest) = whole.as_chunks();
            // SAFETY: the descriptors are mapped, as the caller guarantees. Lines are written only at a line boundary.
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

/// Writes one cache line.
///
/// # Safety
/// A cache line of descriptors must be mapped at `at`, which is aligned to a cache line.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn line_avx2(at: *mut PackedDescriptor, line: &[Single; FOUR], used: UsedMark) {
    let (keep, mark) = (in_words(used.keep), in_words(used.mark));
    let (from, at) = (line.as_ptr().cast::<__m256i>(), at.cast::<__m256i>());
    for half in 0..2 {
        // SAFETY: each step reads two singles of the line and writes two descriptors, which are aligned to 32.
        unsafe {
            let two = from.add(half).read_unaligned();
            at.add(half).write_volatile(_mm256_or_si256(_mm256_and_si256(two, keep), mark));
        }
    }
}

/// Like [`line_avx2`], with one vector.
///
/// # Safety
/// The same as for [`line_avx2`].
#[target_feature(enable = "avx2,avx512f")]
#[inline]
unsafe fn line_avx512(at: *mut PackedDescriptor, line: &[Single; FOUR], used: UsedMark) {
    let (keep, mark) =
        (_mm512_broadcast_i64x4(in_words(used.keep)), _mm512_broadcast_i64x4(in_words(used.mark)));
    // SAFETY: these are the four singles of the line, and its descriptors, which are aligned to 64.
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

    /// Descriptors of any content. Most of them are available in the first turn.
    fn ring() -> impl Strategy<Value = Vec<PackedDescriptor>> {
        let flags = prop_oneof![
            30 => (any::<u16>(),).prop_map(|(other,)| other & !STATE | VIRTQ_DESC_F_AVAIL),
            1 => any::<u16>(),
        ];
        let descriptor = (any::<u64>(), any::<u32>(), any::<u16>(), flags);
        let descriptor =
            descriptor.prop_map(|(addr, len, id, flags)| PackedDescriptor { addr, len, id, flags });
        proptest::collection::vec(descriptor, 0..80)
    }

    proptest! {
        /// Each level reads the same descriptors as the plain one, for any start within a line, any number of
        /// descriptors, and any content.
        #[test]
        fn all_levels_read_alike(ring in ring(), from in 0usize..9, state in prop_oneof![Just(VIRTQ_DESC_F_AVAIL), Just(VIRTQ_DESC_F_USED)]) {
            let ring = &ring[from.min(ring.len())..];
            let read = |level| {
                let mut entries = vec![Entry::default(); ring.len()];
                // SAFETY: the number of descriptors equals the number of entries, and the CPU supports the level.
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

        /// Each level writes the same length, ID and flags as the plain one, and nothing outside of its run.
        #[test]
        fn all_levels_write_alike(ring in ring(), from in 0usize..9, beside in 0usize..9, writable: bool) {
            let run = from.min(ring.len())..ring.len().saturating_sub(beside).max(from.min(ring.len()));
            let singles: Vec<_> = run.clone().map(|i| Single::found(i as u32 * 77 + 1, i as u16 * 13)).collect();
            let (keep, mark) = if writable {
                (Word::new(u32::MAX, u16::MAX, 0), Word::new(0, 0, STATE | VIRTQ_DESC_F_WRITE))
            } else {
                (Word::new(0, u16::MAX, 0), Word::new(0, 0, 0))
            };
            let used = UsedMark { keep: keep.0, mark: mark.0 };
            for level in Level::available() {
                let mut written = ring.clone();
                // SAFETY: the number of descriptors equals the number of singles, and the CPU supports the level.
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
