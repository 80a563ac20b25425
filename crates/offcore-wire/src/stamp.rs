//! The payload fields of a traffic generator's packets: stream, flow, packet number, and the time at which the packet
//! was due.
//!
//! ```text
//!  0       2        4      6        10            16      18                end of frame
//!  | magic | stream | flow | number | due (TSC)   | check | pattern        |
//! ```
//!
//! `check` covers all fields before it and the length of the transport payload. So damage to a number, and truncated
//! packets, are detected in every packet without reading its content. The pattern depends on stream, flow and number
//! (which select from a few kinds of content, [`CONTENTS`]) and on the position. Its bytes are checked for as many
//! packets as time permits. The fields are little-endian and have 18 bytes, so that they fit into the shortest frame
//! with IPv4 and UDP.
//!
//! In contrast to a [`probe`](crate::probe), the fields may follow any headers: see [`find`].

use crate::{
    checksum::Sum,
    ethernet::{self, EtherType},
    ip::IpProtocol,
    ipv4, ipv6, pattern, tcp, udp,
};

/// Length of the fields in bytes.
pub const STAMP_LEN: usize = 18;
/// Number of kinds of content. It is a prime, so that packet buffers that are reused in bursts do not always get the
/// content that they already have. Thus a missing copy is detected.
pub const CONTENTS: u32 = 13;
/// Times are modulo this number of ticks: a day and a half at 2 GHz.
pub const DUE_RANGE: u64 = 1 << 48;

const MAGIC: u16 = u16::from_le_bytes(*b"OG");

/// The fields of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Number of the stream, assigned by the generator.
    pub stream: u16,
    pub flow: u16,
    /// The packet's number in the flow, modulo 2^32.
    pub number: u32,
    /// Scheduled transmission time, in TSC ticks modulo [`DUE_RANGE`].
    pub due: u64,
}

impl Stamp {
    /// Returns the kind of the packet's content, below [`CONTENTS`].
    #[inline]
    pub fn content(&self) -> u32 {
        self.number.wrapping_add(self.flow.into()) % CONTENTS
    }

    /// Returns the fields for a packet whose transport payload, including these fields, has `payload_len` bytes.
    #[inline]
    pub fn to_bytes(&self, payload_len: usize) -> [u8; STAMP_LEN] {
        let (low, high) = self.words();
        let mut bytes = [0; STAMP_LEN];
        bytes[..8].copy_from_slice(&low.to_le_bytes());
        bytes[8..16].copy_from_slice(&high.to_le_bytes());
        bytes[16..].copy_from_slice(&check(low, high, payload_len).to_le_bytes());
        bytes
    }

    /// Returns the fields before the check.
    #[inline]
    fn words(&self) -> (u64, u64) {
        let Self { stream, flow, number, due } = *self;
        let low = u64::from(MAGIC) | u64::from(stream) << 16 | u64::from(flow) << 32;
        // The low half of the number is at the top of the low word, and its high half at the bottom of the high word.
        (low | u64::from(number & 0xffff) << 48, u64::from(number >> 16) | (due % DUE_RANGE) << 16)
    }
}

/// Fills `content` with the pattern for this stream's packets of kind `content_number`, from its first byte on.
pub fn write_content(stream: u16, content_number: u32, content: &mut [u8]) {
    pattern::write(fill(stream, content_number), content);
}

#[inline]
fn fill(stream: u16, content: u32) -> u32 {
    u32::from(stream) << 8 | content
}

/// Returns a 16-bit check. A change of the fields is missed with a probability of 1 in 65536.
#[inline]
fn check(low: u64, high: u64, payload_len: usize) -> u16 {
    let mixed = (low ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 32 ^ high).wrapping_mul(0x94d0_49bb_1331_11eb);
    let mixed = (mixed ^ mixed >> 32 ^ payload_len as u64).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed >> 48) as u16
}

/// A packet with a valid stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    pub stamp: Stamp,
    /// Offset of its IP header.
    pub ip: usize,
    /// Offset of its pattern, in bytes from the start of the frame.
    pub pattern: usize,
}

/// The reason why a packet has no valid stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StampError {
    /// The packet belongs to the stream, but a header, a length or a field was changed, so its number is not reliable.
    Corrupt,
    /// The packet does not belong to the stream.
    Foreign,
    /// The packet is shorter than its headers, or than the lengths in them.
    Malformed,
}

/// Finds the stamp of `stream` in a packet of `frame_len` bytes that begins with `head` (the whole packet, or its first
/// buffer).
///
/// # Errors
/// [`StampError`].
#[inline]
pub fn find(head: &[u8], frame_len: usize, stream: u16) -> Result<Found, StampError> {
    let Place { ip, payload, by_ip } = place(head)?;
    let Some(fields) = head.get(payload..).and_then(<[u8]>::first_chunk::<STAMP_LEN>) else {
        return Err(if by_ip > frame_len { StampError::Malformed } else { StampError::Foreign });
    };
    let low = u64_at(fields, 0);
    if low as u32 != u32::from(MAGIC) | u32::from(stream) << 16 {
        return Err(if by_ip > frame_len { StampError::Malformed } else { StampError::Foreign });
    }
    let high = u64_at(fields, 8);
    let found = u16::from_le_bytes([fields[16], fields[17]]);
    if by_ip != frame_len || found != check(low, high, frame_len - payload) {
        return Err(StampError::Corrupt);
    }
    let stamp = Stamp {
        stream,
        flow: (low >> 32) as u16,
        number: (low >> 48) as u32 | (high as u32) << 16,
        due: high >> 16,
    };
    Ok(Found { stamp, ip, pattern: payload + STAMP_LEN })
}

/// Returns whether the content of a packet that [`find`] has returned is unchanged: an IPv4 header by its checksum, and
/// the pattern byte by byte. `segments` are the packet's buffers, from the first on.
#[inline]
pub fn is_intact<'a>(found: &Found, segments: impl IntoIterator<Item = &'a [u8]>) -> bool {
    let fill = fill(found.stamp.stream, found.stamp.content());
    let mut at = 0;
    for (index, segment) in segments.into_iter().enumerate() {
        let from = found.pattern.saturating_sub(at).min(segment.len());
        if index == 0 && !ipv4_is_valid(segment, found.ip) {
            return false;
        }
        let pattern = &segment[from..];
        if !pattern.is_empty() && pattern::differs_from(fill, at + from - found.pattern, pattern) {
            return false;
        }
        at += segment.len();
    }
    true
}

/// Returns whether the IP header is an IPv6 header, which has no checksum, or its checksum is right.
fn ipv4_is_valid(frame: &[u8], ip: usize) -> bool {
    let Some(&version) = frame.get(ip) else { return false };
    let header = frame.get(ip..ip + 4 * usize::from(version & 0xf));
    version >> 4 == 6 || header.is_some_and(|header| Sum::of(header).is_valid())
}

/// Offsets in a packet.
struct Place {
    ip: usize,
    payload: usize,
    /// The frame's length according to its IP header.
    by_ip: usize,
}

/// Finds the payload of UDP or TCP.
#[inline]
fn place(head: &[u8]) -> Result<Place, StampError> {
    const SHORT: StampError = StampError::Malformed;
    let mut ip = ethernet::HEADER_LEN;
    let mut ethertype = EtherType(be16(head, ethernet::field::ETHERTYPE).ok_or(SHORT)?);
    if ethertype == EtherType::VLAN {
        ethertype = EtherType(be16(head, ip + 2).ok_or(SHORT)?);
        ip += ethernet::VLAN_TAG_LEN;
    }
    let (protocol, transport, by_ip) = match ethertype {
        EtherType::IPV4 => {
            let header = head.get(ip..).and_then(<[u8]>::first_chunk::<{ ipv4::HEADER_LEN }>).ok_or(SHORT)?;
            let len = 4 * usize::from(header[ipv4::field::VERSION_IHL] & 0xf);
            let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
            if header[0] >> 4 != 4 || len < ipv4::HEADER_LEN || total < len {
                return Err(StampError::Malformed);
            }
            (header[ipv4::field::PROTOCOL], ip + len, ip + total)
        }
        EtherType::IPV6 => {
            let header = head.get(ip..).and_then(<[u8]>::first_chunk::<{ ipv6::HEADER_LEN }>).ok_or(SHORT)?;
            if header[0] >> 4 != 6 {
                return Err(StampError::Malformed);
            }
            let payload = usize::from(u16::from_be_bytes([header[4], header[5]]));
            let transport = ip + ipv6::HEADER_LEN;
            (header[ipv6::field::NEXT_HEADER], transport, transport + payload)
        }
        _ => return Err(StampError::Foreign),
    };
    let transport_len = match IpProtocol(protocol) {
        IpProtocol::UDP => udp::HEADER_LEN,
        IpProtocol::TCP => {
            let offset = head.get(transport + tcp::field::DATA_OFFSET).ok_or(SHORT)?;
            match 4 * usize::from(offset >> 4) {
                len @ tcp::HEADER_LEN.. => len,
                _ => return Err(StampError::Malformed),
            }
        }
        _ => return Err(StampError::Foreign),
    };
    Ok(Place { ip, payload: transport + transport_len, by_ip })
}

#[inline(always)]
fn be16(head: &[u8], at: usize) -> Option<u16> {
    head.get(at..)?.first_chunk().map(|bytes| u16::from_be_bytes(*bytes))
}

#[inline(always)]
fn u64_at(fields: &[u8; STAMP_LEN], at: usize) -> u64 {
    u64::from_le_bytes(crate::field::bytes(fields, at))
}

#[cfg(test)]
mod tests;
