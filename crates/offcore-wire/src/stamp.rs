//! What a traffic generator's packets carry behind their headers: which stream and flow they are of, their number, and
//! when they were due.
//!
//! ```text
//!  0       2        4      6        10            16      18                end of frame
//!  | magic | stream | flow | number | due (TSC)   | check | pattern        |
//! ```
//!
//! `check` is over all before it and the length of what it stands in, so damage to a number, or a packet that was cut,
//! is noticed in every packet without a look at its content. The pattern follows from stream, flow and number (of which
//! a few kinds are made, [`CONTENTS`]) and the position; its bytes are checked for as many packets as time allows. The
//! fields are little-endian, and there are 18 bytes of them, so that they fit the shortest frame with IPv4 and UDP.
//!
//! Unlike a [`probe`](crate::probe) it may stand behind any headers: see [`find`].

use crate::{
    checksum::Sum,
    ethernet::{self, EtherType},
    ip::IpProtocol,
    ipv4, ipv6, pattern, tcp, udp,
};

/// Length of the fields in bytes.
pub const STAMP_LEN: usize = 18;
/// Kinds of content. A prime, so that packet buffers that come round in bursts do not always come round to the content
/// that they have already: a copy that was left out is noticed.
pub const CONTENTS: u32 = 13;
/// Times are told modulo this many ticks: a day and a half at 2 GHz.
pub const DUE_RANGE: u64 = 1 << 48;

const MAGIC: u16 = u16::from_le_bytes(*b"OG");

/// What a packet says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Whose packet it is: a number of the generator's own.
    pub stream: u16,
    pub flow: u16,
    /// The packet's number in the flow, modulo 2^32.
    pub number: u32,
    /// When it was to be sent, in TSC ticks modulo [`DUE_RANGE`].
    pub due: u64,
}

impl Stamp {
    /// Which kind of content the packet has, below [`CONTENTS`].
    #[inline]
    pub fn content(&self) -> u32 {
        self.number.wrapping_add(self.flow.into()) % CONTENTS
    }

    /// The fields of a packet whose transport payload, these fields included, has `payload_len` bytes.
    #[inline]
    pub fn to_bytes(&self, payload_len: usize) -> [u8; STAMP_LEN] {
        let (low, high) = self.words();
        let mut bytes = [0; STAMP_LEN];
        bytes[..8].copy_from_slice(&low.to_le_bytes());
        bytes[8..16].copy_from_slice(&high.to_le_bytes());
        bytes[16..].copy_from_slice(&check(low, high, payload_len).to_le_bytes());
        bytes
    }

    /// The fields before the check.
    #[inline]
    fn words(&self) -> (u64, u64) {
        let Self { stream, flow, number, due } = *self;
        let low = u64::from(MAGIC) | u64::from(stream) << 16 | u64::from(flow) << 32;
        // The number's low half is the low word's highest, its high half the high word's lowest.
        (low | u64::from(number & 0xffff) << 48, u64::from(number >> 16) | (due % DUE_RANGE) << 16)
    }
}

/// Fills `content` with the pattern of this stream's packets of kind `content_number`, from its first byte.
pub fn write_content(stream: u16, content_number: u32, content: &mut [u8]) {
    pattern::write(fill(stream, content_number), content);
}

#[inline]
fn fill(stream: u16, content: u32) -> u32 {
    u32::from(stream) << 8 | content
}

/// A check of 16 bits: any change of one bit changes it, but for one in 65536.
#[inline]
fn check(low: u64, high: u64, payload_len: usize) -> u16 {
    let mixed = (low ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 32 ^ high).wrapping_mul(0x94d0_49bb_1331_11eb);
    let mixed = (mixed ^ mixed >> 32 ^ payload_len as u64).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed >> 48) as u16
}

/// A packet of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    pub stamp: Stamp,
    /// Where its IP header starts.
    pub ip: usize,
    /// Where its pattern starts, in bytes from the start of the frame.
    pub pattern: usize,
}

/// Why a packet is not one that arrived unharmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StampError {
    /// It is ours, but a header, a length or a field was changed: its number cannot be believed.
    Corrupt,
    /// It is somebody else's.
    Foreign,
    /// It is no sound packet: shorter than its headers, or than they say.
    Malformed,
}

/// Whether a packet of `frame_len` bytes that begins with `head` (all of it, or its first buffer) is one of `stream`.
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

/// Whether the content of a packet by [`find`] is what was sent: an IPv4 header by its checksum, and the pattern byte for
/// byte. `segments` are the packet's buffers, from the first.
#[inline]
pub fn is_unharmed<'a>(found: &Found, segments: impl IntoIterator<Item = &'a [u8]>) -> bool {
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

/// Whether the IP header is IPv6's, which has no checksum, or its checksum is right.
fn ipv4_is_valid(frame: &[u8], ip: usize) -> bool {
    let Some(&version) = frame.get(ip) else { return false };
    let header = frame.get(ip..ip + 4 * usize::from(version & 0xf));
    version >> 4 == 6 || header.is_some_and(|header| Sum::of(header).is_valid())
}

/// Where things are in a packet.
struct Place {
    ip: usize,
    payload: usize,
    /// The frame's length as its IP header tells.
    by_ip: usize,
}

/// Finds UDP's or TCP's payload.
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
