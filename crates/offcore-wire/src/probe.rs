//! The payload of generated packets. With it, a sink can check that each packet arrives once, in order and unchanged.
//!
//! ```text
//!  0          42       46       50            58                    end of frame
//!  | headers  | magic  | fill   | sequence    | pattern made of fill |
//! ```
//!
//! The pattern depends on `fill` and the position only, not on the sequence number. Therefore, a generator fills each
//! of its packets once ([`write()`]) and then only changes the sequence number ([`patch_sequence`]), while the content
//! can still be fully verified. Packets should have different values of `fill`, so that stale content of another packet
//! is detected.
//!
//! [`check_header`] is intended for every packet, and [`check_content`] for as many packets as time permits. Both
//! expect the generated frame, except that MAC addresses may differ. The fields of the probe are little-endian.

use crate::{
    checksum::{self, Sum},
    ethernet::{self, EtherType},
    field::{be16, bytes, put},
    ip::IpProtocol,
    ipv4, pattern,
    template::{IP, UDP, UDP_HEADERS_LEN},
    udp,
};

/// Length of the magic number, fill and sequence number in bytes.
pub const PROBE_LEN: usize = 16;

/// Minimum length of a probe frame in bytes without FCS: the minimum of Ethernet.
pub const MIN_FRAME_LEN: usize = 60;

/// The magic number at the start of a probe.
pub const MAGIC: u32 = u32::from_le_bytes(*b"OFCP");

/// Offset of the pattern.
const PATTERN: usize = UDP_HEADERS_LEN + PROBE_LEN;

mod field {
    use super::UDP_HEADERS_LEN;

    pub(super) const MAGIC: usize = UDP_HEADERS_LEN;
    pub(super) const FILL: usize = UDP_HEADERS_LEN + 4;
    pub(super) const SEQUENCE: usize = UDP_HEADERS_LEN + 8;
}

/// The fields of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeHeader {
    /// The number from which the pattern is made.
    pub fill: u32,
    /// The packet's number in its flow.
    pub sequence: u64,
}

/// Writes a probe to `frame`, from byte 42 to its end. The headers before it (from a [`crate::UdpTemplate`] of the same
/// frame length) are not changed. If a UDP checksum is used, it must be filled in afterwards.
///
/// # Errors
/// [`ProbeError::TooShort`] below [`MIN_FRAME_LEN`] bytes.
#[inline]
pub fn write(frame: &mut [u8], header: ProbeHeader) -> Result<(), ProbeError> {
    let (head, pattern) = split_mut(frame)?;
    put(head, field::MAGIC, MAGIC.to_le_bytes());
    put(head, field::FILL, header.fill.to_le_bytes());
    put(head, field::SEQUENCE, header.sequence.to_le_bytes());

    pattern::write(header.fill, pattern);
    Ok(())
}

/// Changes the sequence number of a probe, and updates the UDP checksum, if there is one.
///
/// # Errors
/// [`ProbeError::TooShort`] below [`MIN_FRAME_LEN`] bytes. The function does not check whether the frame is a probe.
#[inline]
pub fn patch_sequence(frame: &mut [u8], sequence: u64) -> Result<(), ProbeError> {
    const CHECKSUM: usize = UDP + udp::field::CHECKSUM;
    let (head, _) = split_mut(frame)?;
    let checksum = be16(head, CHECKSUM);
    if checksum != 0 {
        let old = Sum::of(&bytes::<8, _>(head, field::SEQUENCE));
        // 0xffff is equivalent to 0, which would stand for a missing checksum.
        let updated = match checksum::update(checksum, old, Sum::of(&sequence.to_le_bytes())) {
            0 => 0xffff,
            updated => updated,
        };
        put(head, CHECKSUM, updated.to_be_bytes());
    }
    put(head, field::SEQUENCE, sequence.to_le_bytes());
    Ok(())
}

/// Checks that `frame` is a probe with its original length, and returns its fields.
///
/// # Errors
/// [`ProbeError::TooShort`], [`ProbeError::NotUdp`] or [`ProbeError::Magic`] for other traffic; [`ProbeError::Length`]
/// if the length of the frame differs from the lengths in its headers.
#[inline]
pub fn check_header(frame: &[u8]) -> Result<ProbeHeader, ProbeError> {
    let (head, _) = split(frame)?;
    if !is_plain_udp(head) {
        return Err(ProbeError::NotUdp);
    }
    let magic = u32::from_le_bytes(bytes(head, field::MAGIC));
    if magic != MAGIC {
        return Err(ProbeError::Magic { found: magic });
    }
    let ip_end = IP + usize::from(be16(head, IP + ipv4::field::TOTAL_LEN));
    let udp_end = UDP + usize::from(be16(head, UDP + udp::field::LENGTH));
    if ip_end != frame.len() || udp_end != frame.len() {
        return Err(ProbeError::Length { found: frame.len(), by_ip: ip_end, by_udp: udp_end });
    }
    Ok(header_of(head))
}

/// Checks that the content of `frame`, a probe according to [`check_header`], is unchanged: the IPv4 header by its
/// checksum, and the pattern byte by byte. The UDP ports and the UDP checksum are not checked.
///
/// # Errors
/// [`ProbeError::Content`] contains the first byte that differs; [`ProbeError::TooShort`].
#[inline]
pub fn check_content(frame: &[u8]) -> Result<(), ProbeError> {
    let (head, pattern) = split(frame)?;
    let ip: &[u8; ipv4::HEADER_LEN] = &bytes(head, IP);
    if !Sum::of(ip).is_valid() {
        return Err(checksum_mismatch(ip));
    }
    let fill = header_of(head).fill;
    if pattern::differs(fill, pattern) {
        return Err(find_mismatch(fill, pattern));
    }
    Ok(())
}

/// Finds the first byte that differs from the pattern.
#[cold]
#[inline(never)]
fn find_mismatch(fill: u32, pattern: &[u8]) -> ProbeError {
    first_difference(PATTERN, pattern, pattern::bytes(fill))
}

/// Finds the first byte of the IPv4 checksum that differs from the checksum of the rest of the header.
#[cold]
#[inline(never)]
fn checksum_mismatch(ip: &[u8; ipv4::HEADER_LEN]) -> ProbeError {
    const AT: usize = ipv4::field::CHECKSUM;
    let mut zeroed = *ip;
    put(&mut zeroed, AT, [0, 0]);
    first_difference(IP + AT, &bytes::<2, _>(ip, AT), Sum::of(&zeroed).checksum().to_be_bytes())
}

fn first_difference(at: usize, found: &[u8], expected: impl IntoIterator<Item = u8>) -> ProbeError {
    let mut pairs = found.iter().copied().zip(expected).enumerate();
    let (i, (found, expected)) = pairs.find(|(_, (found, expected))| found != expected).unwrap_or_default();
    ProbeError::Content(Mismatch { offset: at + i, found, expected })
}

#[inline]
fn is_plain_udp(head: &[u8; PATTERN]) -> bool {
    be16(head, ethernet::field::ETHERTYPE) == EtherType::IPV4.0
        && head[IP + ipv4::field::VERSION_IHL] == ipv4::VERSION_IHL_PLAIN
        && head[IP + ipv4::field::PROTOCOL] == IpProtocol::UDP.0
}

#[inline]
fn header_of(head: &[u8; PATTERN]) -> ProbeHeader {
    ProbeHeader {
        fill: u32::from_le_bytes(bytes(head, field::FILL)),
        sequence: u64::from_le_bytes(bytes(head, field::SEQUENCE)),
    }
}

/// Splits a frame into the fields and the pattern.
#[inline]
fn split(frame: &[u8]) -> Result<(&[u8; PATTERN], &[u8]), ProbeError> {
    match frame.split_first_chunk() {
        Some((head, pattern)) if frame.len() >= MIN_FRAME_LEN => Ok((head, pattern)),
        _ => Err(ProbeError::TooShort { found: frame.len() }),
    }
}

/// Works like [`split`] for mutable frames.
#[inline]
fn split_mut(frame: &mut [u8]) -> Result<(&mut [u8; PATTERN], &mut [u8]), ProbeError> {
    let found = frame.len();
    match frame.split_first_chunk_mut() {
        Some((head, pattern)) if found >= MIN_FRAME_LEN => Ok((head, pattern)),
        _ => Err(ProbeError::TooShort { found }),
    }
}

/// byte {offset} is {found:#04x}, sent as {expected:#04x}
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display)]
pub struct Mismatch {
    /// From the start of the frame.
    pub offset: usize,
    pub found: u8,
    pub expected: u8,
}

/// Why a frame is not a probe that arrived unharmed. Lengths are frame lengths in bytes without FCS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum ProbeError {
    /// probe content changed: {0}
    Content(Mismatch),
    /// probe of {found} bytes, sent with {by_ip} (IPv4 header) or {by_udp} (UDP header)
    Length { found: usize, by_ip: usize, by_udp: usize },
    /// UDP packet that is not a probe: magic {found:#010x}, expected {MAGIC:#010x}
    Magic { found: u32 },
    /// not a probe: not UDP over IPv4 without options
    NotUdp,
    /// not a probe: a frame of {found} bytes, the least is {MIN_FRAME_LEN:?} without FCS
    TooShort { found: usize },
}

#[cfg(test)]
mod tests;
