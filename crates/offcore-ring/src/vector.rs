//! Processing of a burst's descriptors in groups of four, which is the number in a cache line.
//!
//! Descriptors are examined in private copies, [`Entry`], which have the form of packed descriptors for both formats.
//! [`resolve`] finds the chains of one buffer among them, which are nearly all. It has one loop with vector
//! instructions and one without. So do [`packed::lines`](crate::packed) and [`split::lines`](crate::split), which
//! access shared memory. The loops of a queue are selected when it is created, depending on the CPU. Tests compare
//! them.

use core::arch::asm;
use core::arch::x86_64::{
    __m256i, _mm256_add_epi64, _mm256_and_si256, _mm256_andnot_si256, _mm256_castsi256_pd,
    _mm256_cmpeq_epi64, _mm256_cmpgt_epi64, _mm256_movemask_pd, _mm256_or_si256, _mm256_set1_epi64x,
    _mm256_sub_epi64, _mm256_unpackhi_epi64, _mm256_unpacklo_epi64,
};
use std::ptr::NonNull;

use offcore_mem::{GuestMemory, RegionCache};

use crate::chain::{Direction, VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};

/// Number of descriptors processed at once with vector instructions.
pub(crate) const FOUR: usize = 4;

/// Instruction set used by the loops of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// General-purpose registers.
    Plain,
    /// 32-byte vectors.
    Avx2,
    /// 64-byte vectors for reading or writing whole cache lines, otherwise 32-byte vectors.
    Avx512,
}

impl Level {
    /// Returns the best level that the CPU and the operating system support.
    pub(crate) fn detect() -> Self {
        Self::available().last().unwrap_or(Self::Plain)
    }

    /// Returns all levels that the CPU supports, the best one last.
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        let avx2 = !cfg!(tsan) && is_x86_feature_detected!("avx2");
        let avx512 = avx2 && is_x86_feature_detected!("avx512f");
        [(Self::Plain, true), (Self::Avx2, avx2), (Self::Avx512, avx512)]
            .into_iter()
            .filter_map(|(level, there)| there.then_some(level))
    }
}

/// Length, ID and flags of a packed descriptor: eight bytes, as in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Word(pub(crate) u64);

impl Word {
    #[inline(always)]
    pub(crate) fn new(len: u32, id: u16, flags: u16) -> Self {
        Self(u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48)
    }

    #[inline(always)]
    pub(crate) fn len(self) -> u32 {
        self.0 as u32
    }

    #[inline(always)]
    pub(crate) fn id(self) -> u16 {
        (self.0 >> 32) as u16
    }

    #[inline(always)]
    pub(crate) fn flags(self) -> u16 {
        (self.0 >> 48) as u16
    }
}

/// A private copy of an available descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub(crate) struct Entry {
    /// Guest physical address.
    pub(crate) addr: u64,
    pub(crate) word: Word,
}

/// A chain of one buffer, which is completely in one region of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Single {
    addr: NonNull<u8>,
    word: Word,
}

// SAFETY: a single contains only an address and numbers. Code that dereferences the address has to justify it.
unsafe impl Send for Single {}

impl Single {
    /// Placeholder for an element that was not found yet.
    pub(crate) const NONE: Self = Self { addr: NonNull::dangling(), word: Word(0) };

    /// Creates a single at `addr` for the chain in `word`.
    #[inline(always)]
    pub(crate) fn new(addr: NonNull<u8>, word: Word) -> Self {
        Self { addr, word }
    }

    /// Creates a single at an arbitrary address, with all flags set.
    #[cfg(test)]
    pub(crate) fn found(len: u32, id: u16) -> Self {
        Self { addr: NonNull::dangling(), word: Word::new(len, id, u16::MAX) }
    }

    /// Host address of the buffer's first byte.
    #[inline(always)]
    pub fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    /// Length of the buffer in bytes.
    #[inline(always)]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u32 {
        self.word.len()
    }

    /// The buffer ID of the chain: [`Chain::id`](crate::device::Chain::id).
    #[inline(always)]
    pub fn id(&self) -> u16 {
        self.word.id()
    }

    /// Sets the number of bytes written to the buffer, for returning the chain by
    /// [`push_used_singles`](crate::device::DeviceQueue::push_used_singles).
    #[inline(always)]
    pub fn set_written(&mut self, len: u32) {
        self.word.0 = self.word.0 & !u64::from(u32::MAX) | u64::from(len);
    }

    #[inline(always)]
    pub(crate) fn word(&self) -> Word {
        self.word
    }
}

/// Requirements for singles. Longer or shorter buffers are processed in another way.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Direction of the buffers.
    pub direction: Direction,
    /// Minimum length of a buffer in bytes; 0 counts as 1.
    pub least: u32,
    /// Maximum length of a buffer in bytes.
    pub most: u32,
}

/// Flags that identify a single.
const SINGLE_FLAGS: u16 = VIRTQ_DESC_F_NEXT | VIRTQ_DESC_F_INDIRECT | VIRTQ_DESC_F_WRITE;

/// Finds singles at the start of `entries` that match `wanted`, and stores them in `singles`. Returns their number; the
/// next entry is of another kind or does not exist.
#[inline(always)]
pub(crate) fn resolve(
    level: Level,
    entries: &[Entry],
    singles: &mut [Single],
    memory: &GuestMemory,
    wanted: Wanted,
    region: &mut RegionCache,
) -> usize {
    match level {
        Level::Plain => resolve_each(entries, singles, memory, wanted, region),
        // SAFETY: this level is used only for a queue on a CPU that has AVX2.
        Level::Avx2 | Level::Avx512 => unsafe { resolve_fours(entries, singles, memory, wanted, region) },
    }
}

#[inline(always)]
fn resolve_each(
    entries: &[Entry],
    singles: &mut [Single],
    memory: &GuestMemory,
    wanted: Wanted,
    region: &mut RegionCache,
) -> usize {
    let mut found = 0;
    for (&Entry { addr, word }, single) in entries.iter().zip(singles) {
        let right = word.flags() & SINGLE_FLAGS == wanted.direction.flag();
        if !right || !(wanted.least.max(1)..=wanted.most).contains(&word.len()) {
            break;
        }
        let Some(addr) = memory.translate(addr, word.len(), region) else { break };
        *single = Single { addr, word };
        found += 1;
    }
    found
}

#[target_feature(enable = "avx2")]
fn resolve_fours(
    entries: &[Entry],
    singles: &mut [Single],
    memory: &GuestMemory,
    wanted: Wanted,
    region: &mut RegionCache,
) -> usize {
    let mut done = 0;
    while let (Some(four), Some(into)) = (entries[done..].first_chunk(), singles[done..].first_chunk_mut()) {
        if !resolve_four(four, into, wanted, region) {
            // The region changes, or this is the end of the singles.
            let found = resolve_each(four, into, memory, wanted, region);
            if found < FOUR {
                return done + found;
            }
        }
        done += FOUR;
    }
    done + resolve_each(&entries[done..], &mut singles[done..], memory, wanted, region)
}

/// Resolves four entries, and returns whether all are singles in `region`.
#[target_feature(enable = "avx2")]
fn resolve_four(
    entries: &[Entry; FOUR],
    singles: &mut [Single; FOUR],
    wanted: Wanted,
    region: &RegionCache,
) -> bool {
    let (guest, len, host) = region.range();
    let four = |x: u64| _mm256_set1_epi64x(x.cast_signed());
    let from = entries.as_ptr().cast::<__m256i>();
    // SAFETY: each access reads two entries inside the array. Unaligned reads are allowed.
    let (a, b) = unsafe { (from.read_unaligned(), from.add(1).read_unaligned()) };
    // The order is 0, 2, 1, 3.
    let (addrs, words) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    let flags = _mm256_and_si256(words, four(u64::from(SINGLE_FLAGS) << 48));
    let right = _mm256_cmpeq_epi64(flags, four(u64::from(wanted.direction.flag()) << 48));
    let lens = _mm256_and_si256(words, four(u32::MAX.into()));
    let short = _mm256_cmpgt_epi64(four(wanted.least.max(1).into()), lens);
    let long = _mm256_cmpgt_epi64(lens, four(wanted.most.into()));
    let offsets = _mm256_sub_epi64(addrs, four(guest));
    // The sign bit of a region's length is clear, because the region is mapped. An offset with its sign bit set is
    // outside of the region, all others can be compared directly. `left` is negative if the buffer is longer than the
    // region.
    let left = _mm256_sub_epi64(four(len), lens);
    let outside = _mm256_or_si256(_mm256_cmpgt_epi64(offsets, left), offsets);
    let good = _mm256_andnot_si256(_mm256_or_si256(outside, _mm256_or_si256(short, long)), right);
    if _mm256_movemask_pd(_mm256_castsi256_pd(good)) != 0b1111 {
        return false;
    }
    // The lanes are integers, so the provenance of the region is exposed. By the strict rules of Rust, a pointer that
    // is read from stored integers has no provenance. This code relies on the compiler treating it as a pointer with
    // exposed provenance. It points into a mapping, which contains no Rust objects.
    let hosts = _mm256_add_epi64(offsets, four(host.expose_provenance() as u64));
    let into = singles.as_mut_ptr().cast::<__m256i>();
    // SAFETY: each access writes two singles inside the array. Their addresses are inside a mapping and therefore not
    // null, and a word may have any value.
    unsafe {
        into.write_unaligned(_mm256_unpacklo_epi64(hosts, words));
        into.add(1).write_unaligned(_mm256_unpackhi_epi64(hosts, words));
    }
    true
}

/// Reads 32 bytes of shared memory exactly once.
///
/// # Safety
/// The 32 bytes at `from` must be mapped.
#[target_feature(enable = "avx2")]
#[inline]
pub(crate) unsafe fn load_32(from: *const u8) -> __m256i {
    let found;
    // SAFETY: the load is unaligned, and the caller guarantees that the memory is mapped. Assembly is used because the
    // compiler may repeat or omit ordinary loads.
    unsafe {
        asm!("vmovdqu {}, [{}]", lateout(ymm_reg) found, in(reg) from, options(nostack, preserves_flags, readonly));
    }
    found
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use offcore_mem::testing::guest_regions;
    use proptest::prelude::*;

    use super::*;

    const LEN: u64 = 0x1_0000;

    /// Two adjacent regions, and one at a higher address.
    fn memory() -> Arc<GuestMemory> {
        guest_regions([0x4000, 0x4000 + LEN, 1 << 40].map(|at| (at, at, LEN as usize)))
    }

    /// Addresses at the edges of the regions, inside them, and anywhere.
    fn addrs() -> impl Strategy<Value = u64> {
        let edges = [0x4000, 0x4000 + LEN, 0x4000 + 2 * LEN, 1 << 40, (1 << 40) + LEN, 0, 1 << 63, u64::MAX];
        prop_oneof![
            8 => 0x4000..0x4000 + LEN - 3000,
            3 => 0x4000 + LEN..0x4000 + 2 * LEN - 3000,
            2 => (0..edges.len(), -70i64..70).prop_map(move |(i, by)| edges[i].wrapping_add_signed(by)),
            1 => any::<u64>(),
        ]
    }

    fn lens() -> impl Strategy<Value = u32> {
        prop_oneof![8 => 1u32..2049, 1 => 0u32..3, 1 => LEN as u32 - 2..LEN as u32 + 2, 1 => any::<u32>()]
    }

    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        let flags = prop_oneof![20 => Just(0u16), 1 => any::<u16>()];
        let entry = (addrs(), lens(), any::<u16>(), flags);
        let entry = entry.prop_map(|(addr, len, id, flags)| Entry { addr, word: Word::new(len, id, flags) });
        proptest::collection::vec(entry, 0..40)
    }

    proptest! {
        /// For any content of the ring, each level finds the same singles as the plain one, whose addresses are those
        /// of [`GuestMemory`].
        #[test]
        fn all_levels_resolve_alike(
            entries in entries(),
            writable: bool,
            room in 0usize..45,
            warm: bool,
            (least, most) in (0u32..70, prop_oneof![2000u32..2100, Just(u32::MAX)]),
        ) {
            let memory = memory();
            let mut entries = entries;
            let direction = if writable { Direction::Writable } else { Direction::Readable };
            entries.iter_mut().for_each(|entry| entry.word.0 ^= u64::from(direction.flag()) << 48);
            let run = |level| {
                let (mut region, mut singles) = (RegionCache::empty(), vec![Single::NONE; room]);
                if warm {
                    memory.translate(0x4000, 1, &mut region).unwrap();
                }
                let wanted = Wanted { direction, least, most };
                let found = resolve(level, &entries, &mut singles, &memory, wanted, &mut region);
                singles.truncate(found);
                singles
            };
            let expected = run(Level::Plain);
            for level in Level::available() {
                prop_assert_eq!(run(level), expected.clone(), "{:?}", level);
            }
            for (single, entry) in expected.iter().zip(&entries) {
                let host = memory.translate(entry.addr, entry.word.len(), &mut RegionCache::empty());
                prop_assert_eq!((Some(single.addr()), single.word()), (host, entry.word));
            }
        }
    }
}
