//! UDP (RFC 768).

use std::net::Ipv4Addr;

use crate::{
    checksum::Sum,
    error::{Layer, WireError},
    field::{be16, getters, put},
    ip::IpProtocol,
};

/// Length of the header in bytes.
pub const HEADER_LEN: usize = 8;

/// Offset of the checksum field in the header, in bytes: the `csum_offset` of a UDP packet.
pub const CHECKSUM_OFFSET: u16 = 6;

pub(crate) mod field {
    pub(crate) const SRC_PORT: usize = 0;
    pub(crate) const DST_PORT: usize = 2;
    pub(crate) const LENGTH: usize = 4;
    pub(crate) const CHECKSUM: usize = 6;
}

/// The fields of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpHeader {
    pub src_port: u16,
    pub dst_port: u16,
    /// Length of the header and the payload in bytes.
    pub len: u16,
}

impl UdpHeader {
    /// Writes the header with a checksum field of 0.
    #[inline]
    pub fn write(&self, to: &mut [u8; HEADER_LEN]) {
        put(to, field::SRC_PORT, self.src_port.to_be_bytes());
        put(to, field::DST_PORT, self.dst_port.to_be_bytes());
        put(to, field::LENGTH, self.len.to_be_bytes());
        put(to, field::CHECKSUM, [0, 0]);
    }
}

/// A read-only view of a UDP datagram.
#[derive(Debug, Clone, Copy)]
pub struct UdpDatagram<'a> {
    header: &'a [u8; HEADER_LEN],
    payload: &'a [u8],
}

impl<'a> UdpDatagram<'a> {
    /// Creates a view of the payload of an IP packet. Bytes beyond the datagram's length are ignored.
    ///
    /// # Errors
    /// The bytes end before the header, or the length field is below 8 or exceeds the number of bytes.
    #[inline]
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, WireError> {
        let Some((header, rest)) = bytes.split_first_chunk() else { return Err(too_short(bytes.len())) };
        match payload_len(header).and_then(|len| rest.get(..len)) {
            Some(payload) => Ok(Self { header, payload }),
            None => Err(bad_length(header, bytes.len())),
        }
    }

    getters! { self:
        /// Source port.
        src_port: u16 = be16(self.header, field::SRC_PORT);
        /// Destination port.
        dst_port: u16 = be16(self.header, field::DST_PORT);
        /// Length of the header and the payload in bytes.
        length: u16 = be16(self.header, field::LENGTH);
        /// The checksum field. Over IPv4, 0 means that the sender did not compute one.
        checksum: u16 = be16(self.header, field::CHECKSUM);
        /// The bytes after the header, up to the length.
        payload: &'a [u8] = self.payload;
    }

    /// Returns whether the checksum is right between these IPv4 addresses, or was not computed.
    #[inline]
    pub fn verify_checksum_v4(&self, src: Ipv4Addr, dst: Ipv4Addr) -> bool {
        let pseudo = Sum::pseudo_v4(src, dst, IpProtocol::UDP, self.length());
        self.checksum() == 0 || (pseudo + self.sum()).is_valid()
    }

    #[inline]
    fn sum(&self) -> Sum {
        Sum::of(self.header) + Sum::of(self.payload)
    }
}

#[inline]
fn payload_len(header: &[u8; HEADER_LEN]) -> Option<usize> {
    usize::from(be16(header, field::LENGTH)).checked_sub(HEADER_LEN)
}

#[cold]
fn too_short(found: usize) -> WireError {
    WireError::TooShort { layer: Layer::Udp, found, needed: HEADER_LEN }
}

#[cold]
fn bad_length(header: &[u8; HEADER_LEN], max: usize) -> WireError {
    let found = usize::from(be16(header, field::LENGTH));
    WireError::Length { layer: Layer::Udp, found, min: HEADER_LEN, max }
}
