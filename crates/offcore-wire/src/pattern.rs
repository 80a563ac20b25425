//! The content of generated packets: bytes that depend only on a number and their position.

/// The difference between consecutive words of the pattern. It is odd, so that all words of a pattern differ, and that
/// the low byte takes every value before it repeats.
const STEP: u64 = 0xd6e8_feb8_6659_fd93;

/// Returns the first word of a pattern. The factor is odd, so that different values of `fill` result in different words
/// at every position.
#[inline]
fn first_word(fill: u32) -> u64 {
    (u64::from(fill) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Returns word number `index` of a pattern.
#[inline]
fn word(fill: u32, index: usize) -> u64 {
    first_word(fill).wrapping_add(STEP.wrapping_mul(index as u64))
}

/// Returns the bytes of the pattern from the first on.
pub(crate) fn bytes(fill: u32) -> impl Iterator<Item = u8> {
    (0..).flat_map(move |index| word(fill, index).to_le_bytes())
}

/// Fills `pattern` from the pattern's first byte on.
#[inline]
pub(crate) fn write(fill: u32, pattern: &mut [u8]) {
    let (words, tail) = pattern.as_chunks_mut::<8>();
    let mut expected = first_word(fill);
    for word in words {
        *word = expected.to_le_bytes();
        expected = expected.wrapping_add(STEP);
    }
    for (byte, expected) in tail.iter_mut().zip(expected.to_le_bytes()) {
        *byte = expected;
    }
}

/// Returns whether any byte differs from the pattern.
#[inline]
pub(crate) fn differs(fill: u32, pattern: &[u8]) -> bool {
    words_differ(first_word(fill), pattern)
}

/// Works like [`differs`] for bytes that begin `start` bytes into the pattern, as in the later buffers of a packet.
pub(crate) fn differs_from(fill: u32, start: usize, pattern: &[u8]) -> bool {
    let (index, inside) = (start / 8, start % 8);
    if inside == 0 {
        return words_differ(word(fill, index), pattern);
    }
    let (head, rest) = pattern.split_at(pattern.len().min(8 - inside));
    let expected = word(fill, index).to_le_bytes();
    head.iter().zip(&expected[inside..]).any(|(found, expected)| found != expected)
        || words_differ(word(fill, index + 1), rest)
}

/// Returns whether `pattern` differs from the pattern that begins with word `first`.
///
/// The function compares all words and decides once at the end: without branches, the compiler generates vector code.
#[inline]
fn words_differ(first: u64, pattern: &[u8]) -> bool {
    /// Number of words that are compared in parallel.
    const LANES: usize = 8;
    let mut expected = [first; LANES];
    for (lane, word) in (0u64..).zip(&mut expected) {
        *word = word.wrapping_add(STEP.wrapping_mul(lane));
    }

    let (blocks, rest) = pattern.as_chunks::<{ 8 * LANES }>();
    let mut differing = [0; LANES];
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        for lane in 0..LANES {
            differing[lane] |= u64::from_le_bytes(words[lane]) ^ expected[lane];
            expected[lane] = expected[lane].wrapping_add(STEP.wrapping_mul(LANES as u64));
        }
    }
    let mut differing = differing.into_iter().fold(0, |all, lane| all | lane);

    let (words, tail) = rest.as_chunks::<8>();
    let mut next = expected[0];
    for word in words {
        differing |= u64::from_le_bytes(*word) ^ next;
        next = next.wrapping_add(STEP);
    }
    for (byte, expected) in tail.iter().zip(next.to_le_bytes()) {
        differing |= u64::from(byte ^ expected);
    }
    differing != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_matches_at_any_offset() {
        let mut whole = vec![0; 300];
        write(7, &mut whole);
        assert_eq!(whole, bytes(7).take(300).collect::<Vec<_>>());
        for start in [0, 1, 7, 8, 9, 64, 133] {
            for end in [start, start + 1, start + 7, start + 70, 300] {
                let mut part = whole[start..end].to_vec();
                assert!(!differs_from(7, start, &part), "{start}..{end}");
                assert!(part.is_empty() || differs_from(8, start, &part), "{start}..{end}");
                if let Some(last) = part.last_mut() {
                    *last ^= 1;
                    assert!(differs_from(7, start, &part), "{start}..{end}");
                }
            }
        }
    }
}
