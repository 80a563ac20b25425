//! The Internet checksum (RFC 1071): of contiguous bytes, of several parts, updated incrementally (RFC 1624), and
//! completed for packets with virtio checksum offload.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
    ops::Add,
};

use crate::ip::IpProtocol;

/// A ones' complement sum of 16-bit big-endian words. A checksum field holds the complement of this sum.
///
/// Sums of parts add up to the sum of the whole if every part but the last has an even length.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum(u16);

impl Sum {
    /// The sum of an empty slice.
    pub const ZERO: Self = Self(0);

    /// Returns the sum of `bytes`. An odd last byte counts as if a zero followed it.
    #[inline]
    pub fn of(bytes: &[u8]) -> Self {
        // Ones' complement addition is independent of byte order and word width (RFC 1071, 2). Little-endian 64-bit
        // words are added as two halves, which cannot overflow below 2^32 words, and folded at the end.
        let (words, tail) = bytes.as_chunks::<8>();
        let (mut low, mut high) = (0u64, 0u64);
        for word in words {
            let word = u64::from_le_bytes(*word);
            low += word & 0xffff_ffff;
            high += word >> 32;
        }
        let mut last = 0u64;
        for (i, byte) in tail.iter().enumerate() {
            last |= u64::from(*byte) << (8 * i);
        }
        low += last & 0xffff_ffff;
        high += last >> 32;
        Self(fold(low + high).swap_bytes())
    }

    /// Returns the sum of bytes in several slices of any length.
    #[inline]
    pub fn of_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let (sum, _) = parts.into_iter().fold((Self::ZERO, false), |(sum, odd), part| {
            (sum + Self::of(part).at(odd), odd ^ (part.len() % 2 == 1))
        });
        sum
    }

    /// Returns the sum for the same bytes at an odd offset: its two bytes are swapped (RFC 1071, 2).
    #[inline]
    const fn at(self, odd: bool) -> Self {
        if odd { Self(self.0.swap_bytes()) } else { self }
    }

    /// Returns the sum of the IPv4 pseudo header for TCP and UDP checksums. `len` is the length of the transport header
    /// and the payload in bytes.
    #[inline]
    pub fn pseudo_v4(src: Ipv4Addr, dst: Ipv4Addr, protocol: IpProtocol, len: u16) -> Self {
        Self::from(src.to_bits())
            + Self::from(dst.to_bits())
            + Self::from(u16::from(protocol.0))
            + Self::from(len)
    }

    /// Returns the sum of the IPv6 pseudo header for TCP and UDP checksums (RFC 8200, 8.1). `len` is the length of the
    /// transport header and the payload in bytes.
    #[inline]
    pub fn pseudo_v6(src: Ipv6Addr, dst: Ipv6Addr, protocol: IpProtocol, len: u32) -> Self {
        Self::of(&src.octets())
            + Self::of(&dst.octets())
            + Self::from(u16::from(protocol.0))
            + Self::from(len)
    }

    /// Returns the sum without complementing it. A virtio driver stores the pseudo header's sum in this form if the
    /// device must complete the checksum.
    #[inline]
    pub const fn value(self) -> u16 {
        self.0
    }

    /// Returns the checksum for a field that was zero when summed.
    #[inline]
    pub const fn checksum(self) -> u16 {
        !self.0
    }

    /// Returns the checksum, with 0 replaced by the equivalent 0xffff. In UDP, 0 stands for a missing checksum (RFC
    /// 768).
    #[inline]
    pub const fn checksum_nonzero(self) -> u16 {
        match self.checksum() {
            0 => 0xffff,
            checksum => checksum,
        }
    }

    /// Returns whether the checksum is right, for a sum that includes the checksum field.
    #[inline]
    pub const fn is_valid(self) -> bool {
        self.0 == 0xffff
    }
}

impl Add for Sum {
    type Output = Self;

    #[inline]
    fn add(self, other: Self) -> Self {
        let (sum, carry) = self.0.overflowing_add(other.0);
        Self(sum + u16::from(carry))
    }
}

impl From<u16> for Sum {
    #[inline]
    fn from(word: u16) -> Self {
        Self(word)
    }
}

impl From<u32> for Sum {
    #[inline]
    fn from(words: u32) -> Self {
        Self(fold_32(words))
    }
}

impl From<u64> for Sum {
    #[inline]
    fn from(words: u64) -> Self {
        Self(fold(words))
    }
}

impl fmt::Debug for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sum({:#06x})", self.0)
    }
}

/// Adds the four 16-bit words of `sum` with end-around carries. Only 0 folds to 0.
#[inline]
fn fold(sum: u64) -> u16 {
    // The upper half of x + rotated x is the sum of both halves of x, including the carry out of the lower half.
    fold_32((sum.wrapping_add(sum.rotate_left(32)) >> 32) as u32)
}

#[inline]
fn fold_32(sum: u32) -> u16 {
    (sum.wrapping_add(sum.rotate_left(16)) >> 16) as u16
}

/// Returns the checksum after covered bytes have changed. `old` is their sum before the change and `new` after it. The
/// bytes must begin at an even offset of the covered data (RFC 1624, equation 3).
#[inline]
#[must_use]
pub fn update(checksum: u16, old: Sum, new: Sum) -> u16 {
    (Sum(!checksum) + Sum(!old.0) + new).checksum()
}

/// Completes the checksum for `VIRTIO_NET_HDR_F_NEEDS_CSUM` (virtio 1.2, 5.1.6.2): sums `frame[csum_start..]` and
/// writes the checksum into the two bytes at `csum_start + csum_offset`. On entry, these hold the sum of the pseudo
/// header. A result of 0 is written as 0xffff, as on Linux, because 0 in a UDP header stands for a missing checksum.
///
/// `frame` begins with the Ethernet header, without the virtio-net header. It must be private memory: the two offsets
/// and the frame must not change between check and use.
///
/// # Errors
/// [`ChecksumRangeError`] if the field is not completely inside the frame. The frame is unchanged then.
#[inline]
pub fn complete(frame: &mut [u8], csum_start: u16, csum_offset: u16) -> Result<(), ChecksumRangeError> {
    let error = ChecksumRangeError { csum_start, csum_offset, frame_len: frame.len() };
    let covered = frame.get_mut(usize::from(csum_start)..).ok_or(error)?;
    let sum = Sum::of(covered);
    let field = covered.get_mut(usize::from(csum_offset)..).and_then(|rest| rest.first_chunk_mut());
    *field.ok_or(error)? = sum.checksum_nonzero().to_be_bytes();
    Ok(())
}

/// Works like [`complete`] for a frame in several slices of any lengths.
///
/// # Errors
/// [`ChecksumRangeError`] if the field is not completely inside the frame. The frame is unchanged then.
pub fn complete_parts<'a>(
    parts: impl IntoIterator<Item = &'a mut [u8]>,
    csum_start: u16,
    csum_offset: u16,
) -> Result<(), ChecksumRangeError> {
    let start = usize::from(csum_start);
    let place = start + usize::from(csum_offset);
    let (mut sum, mut begin) = (Sum::ZERO, 0);
    // The two bytes of the field. They may be the last byte of one slice and the first of the next.
    let mut field: [Option<&mut u8>; 2] = [None, None];
    for part in parts {
        let len = part.len();
        let covered_from = start.saturating_sub(begin);
        if let Some(covered) = part.get(covered_from..) {
            // `begin + covered_from` is at least `start`.
            sum = sum + Sum::of(covered).at((begin + covered_from - start) % 2 == 1);
        }
        // Offset of the field, or of its second byte, in this slice.
        let from = place.saturating_sub(begin);
        let already = begin.saturating_sub(place);
        if let (Some(wanted), Some(bytes)) = (field.get_mut(already..), part.get_mut(from..)) {
            for (wanted, byte) in wanted.iter_mut().zip(bytes) {
                *wanted = Some(byte);
            }
        }
        begin += len;
    }
    let [Some(high), Some(low)] = field else {
        return Err(ChecksumRangeError { csum_start, csum_offset, frame_len: begin });
    };
    [*high, *low] = sum.checksum_nonzero().to_be_bytes();
    Ok(())
}

/// checksum asked for at csum_start {csum_start} + csum_offset {csum_offset}, outside a frame of {frame_len} bytes
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub struct ChecksumRangeError {
    /// Where summing was to start, in bytes from the start of the frame.
    pub csum_start: u16,
    pub csum_offset: u16,
    /// The length of the frame in bytes.
    pub frame_len: usize,
}

impl ChecksumRangeError {
    /// Checks that the two-byte field is completely inside a frame of `frame_len` bytes.
    ///
    /// # Errors
    /// Returns an error if it is not.
    #[inline]
    pub(crate) fn check(csum_start: u16, csum_offset: u16, frame_len: usize) -> Result<(), Self> {
        // The sum of two `u16` and 2 cannot overflow a `usize`.
        if usize::from(csum_start) + usize::from(csum_offset) + 2 > frame_len {
            return Err(Self { csum_start, csum_offset, frame_len });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A literal implementation of RFC 1071.
    fn naive(bytes: &[u8]) -> u16 {
        let mut sum = 0u16;
        for pair in bytes.chunks(2) {
            let word = u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
            let (next, carry) = sum.overflowing_add(word);
            sum = next + u16::from(carry);
        }
        sum
    }

    #[test]
    fn rfc_1071_example() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(Sum::of(&bytes).value(), 0xddf2);
        assert_eq!(Sum::of(&bytes).checksum(), 0x220d);
    }

    #[test]
    fn rfc_1624_example() {
        // Section 4: the checksum is 0xdd2f, and a field changes from 0x5555 to 0x3285. Equation 2 of RFC 1141 returns
        // 0xffff.
        assert_eq!(update(0xdd2f, Sum::from(0x5555u16), Sum::from(0x3285u16)), 0x0000);
    }

    #[test]
    fn the_largest_sums_do_not_overflow() {
        assert_eq!(Sum::of(&[0xff; 65_550]).value(), 0xffff);
        assert_eq!(Sum::from(u64::MAX).value(), 0xffff);
        assert_eq!(Sum::from(0xffff_0000_ffff_0001u64).value(), 1);
        assert_eq!(Sum::of(&[0; 100]), Sum::ZERO);
        assert_eq!(Sum::ZERO.checksum(), 0xffff);
        assert_eq!(Sum::from(0xffffu16).checksum_nonzero(), 0xffff);
    }

    #[test]
    fn complete_rejects_out_of_range_fields() {
        let mut frame = [0xaa; 64];
        for (start, offset) in [(64, 0), (63, 0), (62, 1), (0, 63), (34, 29), (u16::MAX, u16::MAX), (65, 0)] {
            let expected = ChecksumRangeError { csum_start: start, csum_offset: offset, frame_len: 64 };
            assert_eq!(complete(&mut frame, start, offset), Err(expected));
            assert_eq!(ChecksumRangeError::check(start, offset, 64), Err(expected));
        }
        assert_eq!(frame, [0xaa; 64], "a refused frame stays as it was");
        assert_eq!(complete(&mut frame, 62, 0), Ok(()));
        assert_eq!(complete(&mut [], 0, 0).unwrap_err().frame_len, 0);
    }

    #[test]
    fn complete_writes_ffff_for_zero() {
        let mut frame = [0xff, 0xff, 0, 0];
        complete(&mut frame, 0, 2).unwrap();
        assert_eq!(frame, [0xff, 0xff, 0xff, 0xff]);
    }

    proptest! {
        #[test]
        fn fast_sum_matches_naive_sum(bytes in prop::collection::vec(any::<u8>(), 0..200), fill: Option<u8>) {
            let bytes = match fill {
                Some(fill) => vec![fill; bytes.len()],
                None => bytes,
            };
            prop_assert_eq!(Sum::of(&bytes).value(), naive(&bytes));
        }

        #[test]
        fn words_sum_like_their_bytes(word: u64) {
            prop_assert_eq!(Sum::from(word), Sum::of(&word.to_be_bytes()));
            let [.., c, d, e, f] = word.to_be_bytes();
            prop_assert_eq!(Sum::from(u32::from_be_bytes([c, d, e, f])), Sum::of(&[c, d, e, f]));
            prop_assert_eq!(Sum::from(u16::from_be_bytes([e, f])), Sum::of(&[e, f]));
        }

        #[test]
        fn odd_length_partial_sums_add_up(parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..8)) {
            let whole = parts.concat();
            prop_assert_eq!(Sum::of_parts(parts.iter().map(Vec::as_slice)).value(), naive(&whole));
        }

        #[test]
        fn complete_parts_matches_complete(
            mut parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..8),
            start in 0..100u16,
            offset in 0..40u16,
        ) {
            let mut whole = parts.concat();
            let expected = complete(&mut whole, start, offset);
            let found = complete_parts(parts.iter_mut().map(Vec::as_mut_slice), start, offset);
            prop_assert_eq!(found, expected);
            prop_assert_eq!(parts.concat(), whole);
        }

        #[test]
        fn incremental_update_matches_recomputation(
            mut bytes in prop::collection::vec(any::<u8>(), 8..80),
            at: prop::sample::Index,
            new: [u8; 4],
        ) {
            // The checksum field is at offset 0. Another byte is always non-zero, as in every real header.
            bytes[0..2].fill(0);
            bytes[2] |= 1;
            let at = 4 + (at.index(bytes.len() - 7) & !1);
            let before = Sum::of(&bytes).checksum();
            let old = Sum::of(&bytes[at..at + 4]);
            bytes[at..at + 4].copy_from_slice(&new);
            prop_assert_eq!(update(before, old, Sum::of(&new)), Sum::of(&bytes).checksum());
        }

        #[test]
        fn completed_checksum_is_valid(
            mut frame in prop::collection::vec(any::<u8>(), 0..100),
            start in 0..110u16,
            offset in (0..55u16).prop_map(|half| half * 2),
        ) {
            let before = frame.clone();
            let fits = usize::from(start) + usize::from(offset) + 2 <= frame.len();
            prop_assert_eq!(ChecksumRangeError::check(start, offset, frame.len()).is_ok(), fits);
            prop_assert_eq!(complete(&mut frame, start, offset).is_ok(), fits);
            let field = usize::from(start) + usize::from(offset);
            if fits {
                // With the pseudo header's sum from the field added, the total is 0xffff.
                let pseudo = Sum::of(&before[field..field + 2]);
                prop_assert!((Sum::of(&frame[usize::from(start)..]) + pseudo).is_valid());
                frame[field..field + 2].copy_from_slice(&before[field..field + 2]);
            }
            prop_assert_eq!(frame, before, "nothing else is written");
        }
    }
}
