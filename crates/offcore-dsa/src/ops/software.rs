//! What each operation computes, as safe functions on byte slices.
//!
//! The core runs them where a device lacks an operation, and the simulator computes its results with them. A
//! device may stop at a page fault in the middle of an operation and go on later, so each of them can be fed
//! in chunks: CRC with the value so far as seed, patterns with the offset, deltas with the offset or an
//! [`delta::Applier`], DIF block by block with the tags so far.

pub mod crc;
pub mod delta;
pub mod dif;

pub use crc::Crc;

/// The bytes that a fill writes and a compare-pattern expects, over and over (sections 8.3.5 and 8.3.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    bytes: [u8; 16],
    size: usize,
}

impl Pattern {
    /// A pattern of 8 bytes, the least significant one first.
    pub const fn of_8(pattern: u64) -> Self {
        Self { bytes: (pattern as u128 | (pattern as u128) << 64).to_le_bytes(), size: 8 }
    }

    /// A pattern of 16 bytes: `lower` first, then `upper`.
    pub const fn of_16(lower: u64, upper: u64) -> Self {
        Self { bytes: (lower as u128 | (upper as u128) << 64).to_le_bytes(), size: 16 }
    }

    /// The same byte everywhere.
    pub const fn of_byte(byte: u8) -> Self {
        Self::of_8(u64::from_ne_bytes([byte; 8]))
    }

    /// 8 or 16.
    pub const fn size(&self) -> usize {
        self.size
    }

    /// The pattern's lower and upper 8 bytes; in a pattern of 8 bytes they are the same.
    pub const fn words(&self) -> (u64, u64) {
        let bytes = u128::from_le_bytes(self.bytes);
        (bytes as u64, (bytes >> 64) as u64)
    }

    /// The byte that stands `offset` bytes from where the pattern began.
    pub const fn at(&self, offset: u64) -> u8 {
        self.bytes[offset as usize % 16]
    }

    /// The pattern as it goes on `offset` bytes from where it began.
    #[must_use]
    pub const fn from_offset(self, offset: u64) -> Self {
        let rotate = offset as usize % 16 * 8;
        let bytes = u128::from_le_bytes(self.bytes).rotate_right(rotate as u32).to_le_bytes();
        Self { bytes, size: self.size }
    }
}

/// Fills `dst` with the pattern, going on `offset` bytes from where the pattern began.
pub fn fill(dst: &mut [u8], pattern: Pattern, offset: u64) {
    let bytes = pattern.from_offset(offset).bytes;
    let mut chunks = dst.chunks_exact_mut(16);
    for chunk in &mut chunks {
        chunk.copy_from_slice(&bytes);
    }
    let rest = chunks.into_remainder();
    rest.copy_from_slice(&bytes[..rest.len()]);
}

/// The offset of the first byte in which the two differ, over the length of the shorter one.
pub fn compare(first: &[u8], second: &[u8]) -> Option<usize> {
    const STEP: usize = 64;
    let len = first.len().min(second.len());
    let (first, second) = (&first[..len], &second[..len]);
    let equal = first.chunks(STEP).zip(second.chunks(STEP)).take_while(|(a, b)| a == b).count() * STEP;
    let start = equal.min(len);
    first[start..].iter().zip(&second[start..]).position(|(a, b)| a != b).map(|at| start + at)
}

/// The offset in `src` of the first byte that is not the pattern's, which goes on `offset` bytes from where
/// it began.
pub fn compare_pattern(src: &[u8], pattern: Pattern, offset: u64) -> Option<usize> {
    let bytes = pattern.from_offset(offset).bytes;
    let start = src.chunks_exact(16).take_while(|chunk| *chunk == bytes).count() * 16;
    src[start..].iter().zip(bytes.iter().cycle()).position(|(a, b)| a != b).map(|at| start + at)
}

/// Copies `src` to both destinations, which are at least as long.
///
/// # Panics
///
/// When a destination is shorter than the source.
pub fn dualcast(src: &[u8], first: &mut [u8], second: &mut [u8]) {
    first[..src.len()].copy_from_slice(src);
    second[..src.len()].copy_from_slice(src);
}

/// Copies `src` to `dst`, which is at least as long, and returns the CRC of it, going on from `seed`.
///
/// # Panics
///
/// When the destination is shorter than the source.
pub fn copy_crc(src: &[u8], dst: &mut [u8], crc: Crc, seed: u32) -> u32 {
    dst[..src.len()].copy_from_slice(src);
    crc.of(src, seed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_are_little_endian_and_go_on_from_any_offset() {
        let pattern = Pattern::of_16(0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908);
        let mut dst = [0xff; 37];
        fill(&mut dst, pattern, 3);
        assert!(dst.iter().zip(3..).all(|(&byte, at)| byte == at % 16), "{dst:?}");
        assert_eq!(compare_pattern(&dst, pattern, 3), None);
        assert_eq!(compare_pattern(&dst, pattern, 4), Some(0));
        dst[35] ^= 1;
        assert_eq!(compare_pattern(&dst, pattern, 3), Some(35));
        assert_eq!(Pattern::of_8(0x0102_0304_0506_0708).at(8), 8);
        assert_eq!(Pattern::of_8(5).words(), (5, 5));
    }

    proptest! {
        #[test]
        fn filling_in_chunks_is_filling_at_once(
            len in 0..300_usize, cut in 0..300_usize, lower: u64, upper: u64,
        ) {
            for pattern in [Pattern::of_8(lower), Pattern::of_16(lower, upper)] {
                let cut = cut.min(len);
                let (mut whole, mut parts) = (vec![0; len], vec![0; len]);
                fill(&mut whole, pattern, 0);
                let (head, tail) = parts.split_at_mut(cut);
                fill(head, pattern, 0);
                fill(tail, pattern, cut as u64);
                prop_assert_eq!(&whole, &parts);
                let (lower, upper) = pattern.words();
                let words = [lower.to_le_bytes(), upper.to_le_bytes()];
                let expected = words.as_flattened()[..pattern.size()].iter().cycle();
                prop_assert!(whole.iter().eq(expected.take(len)));
            }
        }

        #[test]
        fn the_first_difference_is_found(
            bytes in prop::collection::vec(any::<u8>(), 1..400), at: prop::sample::Index,
        ) {
            let at = at.index(bytes.len());
            let mut other = bytes.clone();
            prop_assert_eq!(compare(&bytes, &other), None);
            other[at..].iter_mut().for_each(|byte| *byte ^= 0x80);
            prop_assert_eq!(compare(&bytes, &other), Some(at));
        }
    }

    #[test]
    fn copies_reach_their_destinations() {
        let (mut first, mut second) = ([0; 9], [0; 9]);
        dualcast(b"123456789", &mut first, &mut second);
        assert_eq!((&first, &second), (b"123456789", b"123456789"));
        let mut dst = [0; 9];
        assert_eq!(copy_crc(&first, &mut dst, Crc::default(), 0), 0xe306_9283);
        assert_eq!(dst, first);
    }
}
