//! Fields at fixed offsets of a header held as an array.
//!
//! Every `at` is a constant of the caller, so after inlining the compiler knows it to be in range and drops the checks.

/// The `N` bytes at offset `at`.
#[inline(always)]
pub(crate) fn bytes<const N: usize, const LEN: usize>(header: &[u8; LEN], at: usize) -> [u8; N] {
    match header[at..].first_chunk() {
        Some(field) => *field,
        None => unreachable!("a field outside its header"),
    }
}

/// The big-endian 16-bit field at offset `at`.
#[inline(always)]
pub(crate) fn be16<const LEN: usize>(header: &[u8; LEN], at: usize) -> u16 {
    u16::from_be_bytes(bytes(header, at))
}

/// The big-endian 32-bit field at offset `at`.
#[inline(always)]
pub(crate) fn be32<const LEN: usize>(header: &[u8; LEN], at: usize) -> u32 {
    u32::from_be_bytes(bytes(header, at))
}

/// Writes `value` at offset `at`.
#[inline(always)]
pub(crate) fn put<const N: usize, const LEN: usize>(header: &mut [u8; LEN], at: usize, value: [u8; N]) {
    match header[at..].first_chunk_mut() {
        Some(field) => *field = value,
        None => unreachable!("a field outside its header"),
    }
}
