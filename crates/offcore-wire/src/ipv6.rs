//! IPv6 (RFC 8200): the fixed header, extension headers, and derived addresses.

use std::net::Ipv6Addr;

use crate::{
    error::{Layer, WireError},
    field::{be16, be32, bytes, getters, put},
    ip::IpProtocol,
};

pub use address::{link_local, multicast_mac, solicited_node};
pub use extension::{Fragment, MAX_EXTENSIONS, TransportHeader};
pub use problem::Problem;

mod address;
mod extension;
mod problem;

/// Length of the fixed header in bytes.
pub const HEADER_LEN: usize = 40;

/// The bits of the flow label in the first word.
const FLOW_LABEL: u32 = 0x000f_ffff;

pub(crate) mod field {
    pub(crate) const VERSION_CLASS_LABEL: usize = 0;
    pub(crate) const PAYLOAD_LEN: usize = 4;
    pub(crate) const NEXT_HEADER: usize = 6;
    pub(crate) const HOP_LIMIT: usize = 7;
    pub(crate) const SRC: usize = 8;
    pub(crate) const DST: usize = 24;
}

/// The fields of a fixed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Header {
    pub src: Ipv6Addr,
    pub dst: Ipv6Addr,
    /// First header of the payload: a transport protocol or an extension header.
    pub next_header: IpProtocol,
    pub traffic_class: u8,
    /// Flow label. Only the lower 20 bits are used.
    pub flow_label: u32,
    pub hop_limit: u8,
    /// Length of everything after the fixed header, in bytes.
    pub payload_len: u16,
}

impl Ipv6Header {
    /// Writes the header.
    #[inline]
    pub fn write(&self, to: &mut [u8; HEADER_LEN]) {
        let word = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & FLOW_LABEL;
        put(to, field::VERSION_CLASS_LABEL, word.to_be_bytes());
        put(to, field::PAYLOAD_LEN, self.payload_len.to_be_bytes());
        to[field::NEXT_HEADER] = self.next_header.0;
        to[field::HOP_LIMIT] = self.hop_limit;
        put(to, field::SRC, self.src.octets());
        put(to, field::DST, self.dst.octets());
    }
}

/// A read-only view of an IPv6 packet.
#[derive(Debug, Clone, Copy)]
pub struct Ipv6Packet<'a> {
    header: &'a [u8; HEADER_LEN],
    payload: &'a [u8],
}

impl<'a> Ipv6Packet<'a> {
    /// Creates a view of the payload of an Ethernet frame. Bytes beyond the payload length (padding) are ignored. A
    /// jumbogram (payload length 0, with the actual length in an option) has an empty payload.
    ///
    /// # Errors
    /// The version is not 6, or the payload length exceeds the number of bytes.
    #[inline]
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, WireError> {
        Self::head_of(bytes, bytes.len())
    }

    /// Creates a view of the first bytes of a packet of `len` bytes, for packets that are not contiguous. The payload
    /// is then the available part.
    ///
    /// # Errors
    /// The same as for [`Ipv6Packet::new_checked`]. The header must be complete.
    #[inline]
    pub fn head_of(bytes: &'a [u8], len: usize) -> Result<Self, WireError> {
        let layer = Layer::Ipv6;
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() else {
            return Err(WireError::TooShort { layer, found: bytes.len(), needed: HEADER_LEN });
        };
        let version = header[field::VERSION_CLASS_LABEL] >> 4;
        if version != 6 {
            return Err(WireError::Version { layer, found: version, expected: 6 });
        }
        let payload_len = usize::from(be16(header, field::PAYLOAD_LEN));
        let max = len.saturating_sub(HEADER_LEN);
        if payload_len > max {
            return Err(WireError::Length { layer, found: payload_len, min: 0, max });
        }
        Ok(Self { header, payload: &rest[..payload_len.min(rest.len())] })
    }

    getters! { self:
        /// Traffic class.
        traffic_class: u8 = (self.header[0] << 4) | (self.header[1] >> 4);
        /// Flow label, 20 bits.
        flow_label: u32 = be32(self.header, field::VERSION_CLASS_LABEL) & FLOW_LABEL;
        /// Length of everything after the fixed header, in bytes.
        payload_len: u16 = be16(self.header, field::PAYLOAD_LEN);
        /// First header of the payload: a transport protocol or an extension header.
        next_header: IpProtocol = IpProtocol(self.header[field::NEXT_HEADER]);
        /// Hop limit.
        hop_limit: u8 = self.header[field::HOP_LIMIT];
        /// Source address.
        src: Ipv6Addr = Ipv6Addr::from(bytes::<16, _>(self.header, field::SRC));
        /// Destination address.
        dst: Ipv6Addr = Ipv6Addr::from(bytes::<16, _>(self.header, field::DST));
        /// The bytes after the fixed header, up to the payload length, including extension headers.
        payload: &'a [u8] = self.payload;
    }

    /// Returns the content behind the extension headers: hop-by-hop options, which must be the first header, and up to
    /// [`MAX_EXTENSIONS`] routing headers, destination options and fragment headers.
    ///
    /// # Errors
    /// [`WireError::TooShort`] if a header exceeds the payload, [`WireError::OptionLength`] if an option exceeds its
    /// header, [`WireError::UnknownOption`] if an option is unknown and must not be skipped, [`WireError::Routing`] if
    /// the packet must be forwarded, [`WireError::Extension`] for any other extension header, and
    /// [`WireError::TooManyHeaders`].
    #[inline]
    pub fn transport(&self) -> Result<TransportHeader<'a>, WireError> {
        match self.next_header() {
            IpProtocol::HOP_BY_HOP => {
                let (next_header, rest) = extension::options(self.payload)?;
                TransportHeader::behind(next_header, rest)
            }
            next_header => TransportHeader::behind(next_header, self.payload),
        }
    }
}
