//! Common parts of ICMP and ICMPv6: the first eight bytes, quoted packets, and echo.

use crate::{
    checksum::{self, Sum},
    field::{be16, put},
};

/// Length of the common header in bytes: type, code, checksum, and four bytes that depend on the type.
pub(crate) const HEADER_LEN: usize = 8;

pub(crate) mod field {
    pub(crate) const TYPE: usize = 0;
    pub(crate) const CODE: usize = 1;
    pub(crate) const CHECKSUM: usize = 2;
    pub(crate) const REST: usize = 4;
}

/// Changes the type of a message, and updates the checksum (RFC 1624). A checksum of 0 is written as the equivalent
/// 0xffff, which is also right if all other bytes are 0.
#[inline]
pub(crate) fn set_type(message: &mut [u8; HEADER_LEN], kind: u8) {
    let old = Sum::from(be16(message, field::TYPE));
    message[field::TYPE] = kind;
    let new = Sum::from(be16(message, field::TYPE));
    let checksum = match checksum::update(be16(message, field::CHECKSUM), old, new) {
        0 => 0xffff,
        checksum => checksum,
    };
    put(message, field::CHECKSUM, checksum.to_be_bytes());
}

/// Writes an error message that quotes as much of a packet as fits into `to` and into `max` bytes. Returns its length
/// in bytes, or 0 if `to` has no room for the header. `pseudo` returns the sum of the pseudo header for that length.
pub(crate) fn write_error(
    to: &mut [u8],
    max: usize,
    [kind, code]: [u8; 2],
    rest: u32,
    quoted: &[u8],
    pseudo: impl FnOnce(usize) -> Sum,
) -> usize {
    let Some((header, body)) = to.split_first_chunk_mut::<HEADER_LEN>() else { return 0 };
    let room = body.len().min(max - HEADER_LEN);
    let quoted = quoted.get(..room).unwrap_or(quoted);
    for (to, from) in body.iter_mut().zip(quoted) {
        *to = *from;
    }
    let len = HEADER_LEN + quoted.len();
    *header = [kind, code, 0, 0, 0, 0, 0, 0];
    put(header, field::REST, rest.to_be_bytes());
    let sum = pseudo(len) + Sum::of(header) + Sum::of(quoted);
    put(header, field::CHECKSUM, sum.checksum().to_be_bytes());
    len
}
