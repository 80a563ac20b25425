//! IPv4 (RFC 791).

use std::net::Ipv4Addr;

use crate::{
    checksum::Sum,
    error::{Layer, WireError},
    ethernet::MacAddr,
    field::{be16, bytes, getters, put},
    ip::IpProtocol,
};

/// Length of the header without options, in bytes.
pub const HEADER_LEN: usize = 20;

/// First byte of a header without options: version 4, length of five 32-bit words.
pub const VERSION_IHL_PLAIN: u8 = 0x45;

/// Length of a header with the router alert option in bytes, and this option.
pub const ALERT_LEN: usize = HEADER_LEN + 4;
const ROUTER_ALERT: [u8; 4] = [0x94, 4, 0, 0];

/// Returns the MAC address of the multicast group `group` (RFC 1112, 6.4).
#[inline]
pub fn multicast_mac(group: Ipv4Addr) -> MacAddr {
    let [_, b, c, d] = group.octets();
    MacAddr([0x01, 0x00, 0x5e, b & 0x7f, c, d])
}

pub(crate) mod field {
    pub(crate) const VERSION_IHL: usize = 0;
    pub(crate) const DSCP_ECN: usize = 1;
    pub(crate) const TOTAL_LEN: usize = 2;
    pub(crate) const IDENT: usize = 4;
    pub(crate) const FLAGS_OFFSET: usize = 6;
    pub(crate) const TTL: usize = 8;
    pub(crate) const PROTOCOL: usize = 9;
    pub(crate) const CHECKSUM: usize = 10;
    pub(crate) const SRC: usize = 12;
    pub(crate) const DST: usize = 16;
}

/// The fields of a header without options, for a packet that is not a fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv4Header {
    pub src: Ipv4Addr,
    pub dst: Ipv4Addr,
    /// Protocol of the payload.
    pub protocol: IpProtocol,
    /// DSCP in the upper six bits, ECN in the lower two.
    pub dscp_ecn: u8,
    /// Identification.
    pub ident: u16,
    pub dont_fragment: bool,
    /// Time to live, in hops.
    pub ttl: u8,
    /// Length of the header and the payload in bytes.
    pub total_len: u16,
}

impl Ipv4Header {
    /// Writes the header with its checksum.
    #[inline]
    pub fn write(&self, to: &mut [u8; HEADER_LEN]) {
        to[field::VERSION_IHL] = VERSION_IHL_PLAIN;
        to[field::DSCP_ECN] = self.dscp_ecn;
        put(to, field::TOTAL_LEN, self.total_len.to_be_bytes());
        put(to, field::IDENT, self.ident.to_be_bytes());
        put(to, field::FLAGS_OFFSET, [u8::from(self.dont_fragment) << 6, 0]);
        to[field::TTL] = self.ttl;
        to[field::PROTOCOL] = self.protocol.0;
        put(to, field::SRC, self.src.octets());
        put(to, field::DST, self.dst.octets());
        put(to, field::CHECKSUM, self.checksum().to_be_bytes());
    }

    /// Writes the header with the router alert option (RFC 2113) of IGMP, and its checksum.
    pub fn write_with_router_alert(&self, to: &mut [u8; ALERT_LEN]) {
        let (plain, option) = to.split_at_mut(HEADER_LEN);
        if let (Ok(plain), Ok(option)) = (plain.try_into(), <&mut [u8; 4]>::try_from(option)) {
            self.write(plain);
            *option = ROUTER_ALERT;
        }
        to[field::VERSION_IHL] = VERSION_IHL_PLAIN + 1;
        put(to, field::CHECKSUM, [0, 0]);
        put(to, field::CHECKSUM, Sum::of(to).checksum().to_be_bytes());
    }

    /// Sums the fields: reading back the header would stall on the stores.
    #[inline]
    fn checksum(&self) -> u16 {
        let words = [
            [VERSION_IHL_PLAIN, self.dscp_ecn],
            self.total_len.to_be_bytes(),
            self.ident.to_be_bytes(),
            [u8::from(self.dont_fragment) << 6, 0],
            [self.ttl, self.protocol.0],
        ];
        let words: u32 = words.map(|word| u32::from(u16::from_be_bytes(word))).iter().sum();
        let halves = |address: Ipv4Addr| (address.to_bits() >> 16) + (address.to_bits() & 0xffff);
        Sum::from(words + halves(self.src) + halves(self.dst)).checksum()
    }
}

/// A read-only view of an IPv4 packet: header, options, and the payload up to the total length.
#[derive(Debug, Clone, Copy)]
pub struct Ipv4Packet<'a> {
    header: &'a [u8; HEADER_LEN],
    options: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Ipv4Packet<'a> {
    /// Creates a view of the payload of an Ethernet frame. Bytes beyond the total length (padding) are ignored.
    ///
    /// # Errors
    /// The version is not 4, or the header length or the total length does not match the number of bytes. The checksum
    /// is not verified; see [`Ipv4Packet::verify_checksum`].
    #[inline]
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, WireError> {
        Self::head_of(bytes, bytes.len())
    }

    /// Creates a view of the first bytes of a packet of `len` bytes, for packets that are not contiguous. The payload
    /// is then the available part.
    ///
    /// # Errors
    /// The same as for [`Ipv4Packet::new_checked`]. The header must be complete.
    #[inline]
    pub fn head_of(bytes: &'a [u8], len: usize) -> Result<Self, WireError> {
        let Some((header, rest)) = bytes.split_first_chunk() else { return Err(too_short(bytes.len())) };
        let lengths = Lengths::checked(header, len.saturating_sub(HEADER_LEN))?;
        let Some((options, rest)) = rest.split_at_checked(lengths.options) else {
            return Err(too_short(bytes.len()));
        };
        Ok(Self { header, options, payload: &rest[..lengths.payload.min(rest.len())] })
    }

    getters! { self:
        /// Header length with options, 20 to 60 bytes.
        header_len: usize = HEADER_LEN + self.options.len();
        /// Length of the header and the payload in bytes.
        total_len: u16 = be16(self.header, field::TOTAL_LEN);
        /// DSCP, 0 to 63.
        dscp: u8 = self.header[field::DSCP_ECN] >> 2;
        /// ECN codepoint, 0 to 3.
        ecn: u8 = self.header[field::DSCP_ECN] & 0x03;
        /// Identification.
        ident: u16 = be16(self.header, field::IDENT);
        /// Returns whether the packet must not be fragmented.
        dont_fragment: bool = be16(self.header, field::FLAGS_OFFSET) & 0x4000 != 0;
        /// Returns whether more fragments follow.
        more_fragments: bool = be16(self.header, field::FLAGS_OFFSET) & 0x2000 != 0;
        /// Offset of this fragment's payload in the packet, in bytes.
        fragment_offset: u16 = (be16(self.header, field::FLAGS_OFFSET) & 0x1fff) << 3;
        /// Returns whether this is a fragment. Its payload may lack the transport header.
        is_fragment: bool = be16(self.header, field::FLAGS_OFFSET) & 0x3fff != 0;
        /// Time to live, in hops.
        ttl: u8 = self.header[field::TTL];
        /// Protocol of the payload.
        protocol: IpProtocol = IpProtocol(self.header[field::PROTOCOL]);
        /// The checksum field.
        checksum: u16 = be16(self.header, field::CHECKSUM);
        /// Source address.
        src: Ipv4Addr = Ipv4Addr::from(bytes::<4, _>(self.header, field::SRC));
        /// Destination address.
        dst: Ipv4Addr = Ipv4Addr::from(bytes::<4, _>(self.header, field::DST));
        /// The options, 0 to 40 bytes, unparsed.
        options: &'a [u8] = self.options;
        /// The bytes after the header, up to the total length.
        payload: &'a [u8] = self.payload;
    }

    /// Returns whether the header checksum is right.
    #[inline]
    pub fn verify_checksum(&self) -> bool {
        if !self.options.is_empty() {
            return (Sum::of(self.header) + Sum::of(self.options)).is_valid();
        }
        // The sum of a valid header is 0xffff in any byte order and for any width of words (RFC 1071, 2).
        let (&[first, second], last) = self.header.as_chunks::<8>() else { return false };
        let last = last.first_chunk().map_or(0, |last| u32::from_ne_bytes(*last));
        let (sum, carry) = u64::from_ne_bytes(first).overflowing_add(u64::from_ne_bytes(second));
        let (sum, again) = sum.overflowing_add(u64::from(last) + u64::from(carry));
        Sum::from(sum + u64::from(again)).is_valid()
    }
}

/// The lengths in a header, checked against the bytes behind its fixed part.
struct Lengths {
    options: usize,
    payload: usize,
}

impl Lengths {
    #[inline]
    fn checked(header: &[u8; HEADER_LEN], rest: usize) -> Result<Self, WireError> {
        let layer = Layer::Ipv4;
        let version = header[field::VERSION_IHL] >> 4;
        if version != 4 {
            return Err(WireError::Version { layer, found: version, expected: 4 });
        }
        let header_len = usize::from(header[field::VERSION_IHL] & 0x0f) * 4;
        let available = HEADER_LEN + rest;
        if header_len < HEADER_LEN {
            return Err(WireError::HeaderLength { layer, found: header_len, min: HEADER_LEN });
        }
        if header_len > available {
            return Err(WireError::TooShort { layer, found: available, needed: header_len });
        }
        let total_len = usize::from(be16(header, field::TOTAL_LEN));
        if total_len < header_len || total_len > available {
            return Err(WireError::Length { layer, found: total_len, min: header_len, max: available });
        }
        Ok(Self { options: header_len - HEADER_LEN, payload: total_len - header_len })
    }
}

#[cold]
fn too_short(found: usize) -> WireError {
    WireError::TooShort { layer: Layer::Ipv4, found, needed: HEADER_LEN }
}
