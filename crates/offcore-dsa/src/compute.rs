//! Operations computed by the CPU core: for the software fallback of [`ops`](crate::ops), and for the simulated device.

/// Fills `dst` with a pattern of 8 bytes, the least significant byte first (section 8.3.5).
pub(crate) fn fill(dst: &mut [u8], pattern: u64) {
    let bytes = pattern.to_le_bytes();
    for chunk in dst.chunks_mut(bytes.len()) {
        chunk.copy_from_slice(&bytes[..chunk.len()]);
    }
}

/// Returns the pattern rotated so that it starts at its byte `offset`.
pub(crate) const fn continued(pattern: u64, offset: usize) -> u64 {
    pattern.rotate_right((offset % 8 * 8) as u32)
}

/// Returns the offset of the first byte that differs, within the length of the shorter slice.
pub(crate) fn compare(first: &[u8], second: &[u8]) -> Option<usize> {
    const STEP: usize = 64;
    let len = first.len().min(second.len());
    let (first, second) = (&first[..len], &second[..len]);
    let equal = first.chunks(STEP).zip(second.chunks(STEP)).take_while(|(a, b)| a == b).count() * STEP;
    let start = equal.min(len);
    first[start..].iter().zip(&second[start..]).position(|(a, b)| a != b).map(|at| start + at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunked_fill_matches_whole_fill(len in 0..300_usize, cut in 0..300_usize, pattern: u64) {
            let cut = cut.min(len);
            let (mut whole, mut parts) = (vec![0; len], vec![0; len]);
            fill(&mut whole, pattern);
            let (head, tail) = parts.split_at_mut(cut);
            fill(head, pattern);
            fill(tail, continued(pattern, cut));
            prop_assert_eq!(&whole, &parts);
            prop_assert!(whole.iter().eq(pattern.to_le_bytes().iter().cycle().take(len)));
        }
    }
}
