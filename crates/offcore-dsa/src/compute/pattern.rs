//! The pattern of a fill operation (section 8.3.5).

/// A repeated pattern of 8 bytes, or of 16 bytes if the two halves differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern(u128);

impl Pattern {
    /// Returns a pattern of 8 bytes, the least significant byte first.
    pub const fn of_8(pattern: u64) -> Self {
        Self::of_16(pattern, pattern)
    }

    /// Returns a pattern of 16 bytes: `lower` first, then `upper`.
    pub const fn of_16(lower: u64, upper: u64) -> Self {
        Self(lower as u128 | (upper as u128) << 64)
    }

    /// Returns the lower and the upper 8 bytes of the pattern. They are equal in a pattern of 8 bytes.
    pub const fn words(self) -> (u64, u64) {
        (self.0 as u64, (self.0 >> 64) as u64)
    }

    /// Returns the pattern as it continues `offset` bytes after its start.
    #[must_use]
    pub const fn from_offset(self, offset: usize) -> Self {
        Self(self.0.rotate_right((offset % 16 * 8) as u32))
    }

    /// Fills `dst`, beginning at the pattern's start.
    pub fn fill(self, dst: &mut [u8]) {
        let bytes = self.0.to_le_bytes();
        for chunk in dst.chunks_mut(bytes.len()) {
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_continue_at_any_offset() {
        let pattern = Pattern::of_16(0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908);
        let mut dst = [0xff; 37];
        pattern.from_offset(19).fill(&mut dst);
        assert!(dst.iter().zip(3..).all(|(&byte, at)| byte == at % 16), "{dst:?}");
        assert_eq!(Pattern::of_8(5).words(), (5, 5));
    }

    proptest! {
        #[test]
        fn chunked_fill_matches_whole_fill(
            len in 0..300_usize, cut in 0..300_usize, lower: u64, upper: u64,
        ) {
            let (pattern, cut) = (Pattern::of_16(lower, upper), cut.min(len));
            let (mut whole, mut parts) = (vec![0; len], vec![0; len]);
            pattern.fill(&mut whole);
            let (head, tail) = parts.split_at_mut(cut);
            pattern.fill(head);
            pattern.from_offset(cut).fill(tail);
            prop_assert_eq!(&whole, &parts);
            let words = [lower.to_le_bytes(), upper.to_le_bytes()];
            prop_assert!(whole.iter().eq(words.as_flattened().iter().cycle().take(len)));
        }
    }
}
