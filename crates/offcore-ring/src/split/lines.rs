//! Access to runs of entries in a split queue: available ring, descriptors, used ring.
//!
//! All accesses happen between reading an index with acquire ordering and writing an index with release ordering. These
//! two order them. Among each other, they may happen in any order.

use core::arch::asm;
use core::arch::x86_64::{
    __m128i, __m256i, _mm_insert_epi16, _mm_set_epi8, _mm_shuffle_epi8, _mm256_and_si256, _mm256_cmpeq_epi16,
    _mm256_min_epu16, _mm256_movemask_epi8, _mm256_permute4x64_epi64, _mm256_set1_epi16, _mm256_set1_epi64x,
    _mm256_shuffle_epi32, _mm256_storeu_si256, _mm256_unpackhi_epi64,
};
use std::sync::atomic::{AtomicU16, Ordering};

use super::UsedElement;
use crate::chain::{Descriptor, read_descriptor};
use crate::vector::{Entry, FOUR, Level, Single, Word, load_32};

/// Number of available ring entries in a vector.
const SIXTEEN: usize = 16;

/// Reads entries of the available ring from `at` into `into`, until an entry is not below `size`. Returns the number of
/// valid entries.
///
/// # Safety
/// `at` must be aligned to 2 and point to as many mapped entries as `into` has. The CPU must support `level`.
#[inline(always)]
pub(super) unsafe fn read_heads(level: Level, at: *const u16, size: u16, into: &mut [u16]) -> usize {
    // SAFETY: `at` is valid for the entries and the CPU supports `level`, as the caller guarantees.
    unsafe {
        match level {
            Level::Plain => read_heads_each(at, size, into),
            Level::Avx2 | Level::Avx512 => read_heads_avx2(at, size, into),
        }
    }
}

/// # Safety
/// The same as for [`read_heads`].
#[inline(always)]
unsafe fn read_heads_each(at: *const u16, size: u16, into: &mut [u16]) -> usize {
    let mut found = 0;
    for head in into {
        // SAFETY: the entry is mapped, as the caller guarantees.
        *head = unsafe { AtomicU16::from_ptr(at.add(found).cast_mut()) }.load(Ordering::Relaxed);
        if *head >= size {
            break;
        }
        found += 1;
    }
    found
}

/// # Safety
/// The same as for [`read_heads`].
#[target_feature(enable = "avx2")]
unsafe fn read_heads_avx2(at: *const u16, size: u16, into: &mut [u16]) -> usize {
    // A queue's size is at least 1.
    let last = _mm256_set1_epi16((size - 1).cast_signed());
    let mut done = 0;
    while let Some(heads) = into[done..].first_chunk_mut::<SIXTEEN>() {
        // SAFETY: these 16 entries are mapped, as the caller guarantees.
        let found = unsafe { load_32(at.add(done).cast()) };
        if _mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_min_epu16(found, last), found)) != -1 {
            break;
        }
        // SAFETY: `heads` has 16 elements of two bytes.
        unsafe { heads.as_mut_ptr().cast::<__m256i>().write_unaligned(found) };
        done += SIXTEEN;
    }
    // SAFETY: the remaining entries are mapped, as the caller guarantees.
    done + unsafe { read_heads_each(at.add(done), size, &mut into[done..]) }
}

/// Reads the descriptors with these indices from the table at `table`, in the form of packed descriptors: the ID is the
/// index.
///
/// # Safety
/// `table` must be aligned to 16, and the descriptor of each head must be mapped. The CPU must support `level`.
#[inline(always)]
pub(super) unsafe fn read_descriptors(
    level: Level,
    table: *const Descriptor,
    heads: &[u16],
    into: &mut [Entry],
) {
    // SAFETY: the descriptors are mapped and the CPU supports `level`, as the caller guarantees.
    unsafe {
        match level {
            Level::Plain => read_descriptors_each(table, heads, into),
            Level::Avx2 | Level::Avx512 => read_descriptors_avx2(table, heads, into),
        }
    }
}

/// # Safety
/// The same as for [`read_descriptors`].
#[inline(always)]
unsafe fn read_descriptors_each(table: *const Descriptor, heads: &[u16], into: &mut [Entry]) {
    for (&head, entry) in heads.iter().zip(into) {
        // SAFETY: the descriptor of each head is mapped, as the caller guarantees.
        let found = unsafe { read_descriptor(table.add(head.into())) };
        *entry = Entry { addr: found.addr, word: Word::new(found.len, head, found.flags) };
    }
}

/// # Safety
/// The same as for [`read_descriptors`].
#[target_feature(enable = "avx2")]
unsafe fn read_descriptors_avx2(table: *const Descriptor, heads: &[u16], into: &mut [Entry]) {
    /// Marks a byte that becomes 0.
    const NO: i8 = -1;
    // Address and length stay in place. The flags move to the end, and the ID takes their place.
    let places = _mm_set_epi8(13, 12, NO, NO, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (&head, entry) in heads.iter().zip(into) {
        let found: __m128i;
        // SAFETY: the descriptor of each head is mapped, as the caller guarantees. Assembly makes sure that it is read
        // exactly once.
        unsafe {
            let at = table.add(head.into());
            asm!("vmovdqu {}, [{}]", lateout(xmm_reg) found, in(reg) at, options(nostack, preserves_flags, readonly));
        }
        let moved = _mm_insert_epi16::<6>(_mm_shuffle_epi8(found, places), head.into());
        // SAFETY: an entry has 16 bytes.
        unsafe { std::ptr::from_mut(entry).cast::<__m128i>().write_unaligned(moved) };
    }
}

/// Writes one used element for each of `singles`, starting at `at`. Their lengths are masked by `written`.
///
/// # Safety
/// `at` must be aligned to 4 and point to as many mapped elements as `singles` has. The CPU must support `level`.
#[inline(always)]
pub(super) unsafe fn write_used(level: Level, at: *mut UsedElement, singles: &[Single], written: u32) {
    // SAFETY: `at` is valid for the elements and the CPU supports `level`, as the caller guarantees.
    unsafe {
        match level {
            Level::Plain => write_used_each(at, singles, written),
            Level::Avx2 | Level::Avx512 => write_used_avx2(at, singles, written),
        }
    }
}

/// # Safety
/// The same as for [`write_used`].
#[inline(always)]
unsafe fn write_used_each(at: *mut UsedElement, singles: &[Single], written: u32) {
    for (i, single) in singles.iter().enumerate() {
        let element = UsedElement { id: single.id().into(), len: single.len() & written };
        // SAFETY: the element is mapped, as the caller guarantees.
        unsafe { at.add(i).write_volatile(element) };
    }
}

/// # Safety
/// The same as for [`write_used`].
#[target_feature(enable = "avx2")]
unsafe fn write_used_avx2(at: *mut UsedElement, singles: &[Single], written: u32) {
    let keep = _mm256_set1_epi64x((u64::from(u16::MAX) | u64::from(written) << 32).cast_signed());
    let (fours, rest) = singles.as_chunks::<FOUR>();
    let mut at = at;
    for four in fours {
        let from = four.as_ptr().cast::<__m256i>();
        // SAFETY: each read covers two of the four singles.
        let (a, b) = unsafe { (from.read_unaligned(), from.add(1).read_unaligned()) };
        // The words stay in order. In each word, ID and flags move before the length.
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_unpackhi_epi64(a, b));
        let elements = _mm256_and_si256(_mm256_shuffle_epi32::<0b10_11_00_01>(words), keep);
        // SAFETY: these four elements (32 bytes) are mapped, as the caller guarantees. The store is unaligned.
        unsafe {
            _mm256_storeu_si256(at.cast(), elements);
            at = at.add(FOUR);
        }
    }
    // SAFETY: the remaining elements are mapped, as the caller guarantees.
    unsafe { write_used_each(at, rest, written) };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Each level stops at the first head that is not below the size, and reads the same heads before it.
        #[test]
        fn all_levels_read_heads_alike(
            heads in proptest::collection::vec(prop_oneof![40 => 0u16..256, 1 => any::<u16>()], 0..80),
            from in 0usize..20,
            size in prop_oneof![Just(256u16), Just(1), Just(128), Just(32768)],
        ) {
            let heads = &heads[from.min(heads.len())..];
            let there: Vec<_> = heads.iter().copied().take_while(|&head| head < size).collect();
            for level in Level::available() {
                let mut read = vec![0; heads.len()];
                // SAFETY: the slice has as many entries as `read`, and the CPU supports the level.
                let found = unsafe { read_heads(level, heads.as_ptr(), size, &mut read) };
                prop_assert_eq!(&read[..found], &there[..], "{:?}", level);
                // The invalid head is stored as well.
                prop_assert_eq!(read.get(found), heads.get(found), "{:?}", level);
            }
        }

        /// Each level converts descriptors with arbitrary content in the same way.
        #[test]
        fn all_levels_read_descriptors_alike(
            table in proptest::collection::vec(any::<(u64, u32, u16, u16)>(), 1..40),
            heads in proptest::collection::vec(any::<u16>(), 0..70),
        ) {
            let descriptor = |(addr, len, flags, next)| Descriptor { addr, len, flags, next };
            let table: Vec<_> = table.into_iter().map(descriptor).collect();
            let heads: Vec<_> = heads.into_iter().map(|head| head % table.len() as u16).collect();
            for level in Level::available() {
                let mut entries = vec![Entry::default(); heads.len()];
                // SAFETY: the heads are below the length of the table, and the CPU supports the level.
                unsafe { read_descriptors(level, table.as_ptr(), &heads, &mut entries) };
                for (entry, &head) in entries.iter().zip(&heads) {
                    let found = table[usize::from(head)];
                    let word = Word::new(found.len, head, found.flags);
                    prop_assert_eq!(*entry, Entry { addr: found.addr, word }, "{:?}", level);
                }
            }
        }

        /// Each level writes the same used elements, and no others.
        #[test]
        fn all_levels_write_alike(words in proptest::collection::vec(any::<u32>(), 0..80), from in 0usize..5, writable: bool) {
            let singles: Vec<_> = words.iter().map(|&len| {
                Single::found(len, (len / 3) as u16)
            }).collect();
            let written = if writable { u32::MAX } else { 0 };
            let nothing = UsedElement { id: 7, len: 7 };
            for level in Level::available() {
                let mut ring = vec![nothing; from + singles.len() + 5];
                // SAFETY: the ring has an element for each single, and the CPU supports the level.
                unsafe { write_used(level, ring[from..].as_mut_ptr(), &singles, written) };
                let expected = std::iter::repeat_n(nothing, from)
                    .chain(singles.iter().map(|single| UsedElement { id: single.id().into(), len: single.len() & written }))
                    .chain(std::iter::repeat_n(nothing, 5));
                prop_assert_eq!(ring, expected.collect::<Vec<_>>(), "{:?}", level);
            }
        }
    }
}
