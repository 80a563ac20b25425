//! Operations computed by the CPU core: for the software fallback of [`ops`](crate::ops), and for the simulated device.

mod pattern;

pub use pattern::Pattern;

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
}
