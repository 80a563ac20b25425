//! Access to fields at fixed offsets of a header that is stored as an array.
//!
//! Callers pass constants as `at`. After inlining, the compiler knows that they are in range, and removes the checks.

/// Defines the getters of a view. Each entry has documentation, a type and a value.
macro_rules! getters {
    ($self:ident: $($(#[doc = $doc:literal])+ $name:ident: $type:ty = $value:expr;)+) => {
        $($(#[doc = $doc])+
        #[inline]
        pub fn $name(&$self) -> $type {
            $value
        })+
    };
}
pub(crate) use getters;

/// Returns the `N` bytes at offset `at`.
#[inline(always)]
pub(crate) fn bytes<const N: usize, const LEN: usize>(header: &[u8; LEN], at: usize) -> [u8; N] {
    match header[at..].first_chunk() {
        Some(field) => *field,
        None => unreachable!("a field outside its header"),
    }
}

/// Returns the big-endian 16-bit field at offset `at`.
#[inline(always)]
pub(crate) fn be16<const LEN: usize>(header: &[u8; LEN], at: usize) -> u16 {
    u16::from_be_bytes(bytes(header, at))
}

/// Returns the big-endian 32-bit field at offset `at`.
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
