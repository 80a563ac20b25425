//! TCP (RFC 9293): parsing and writing the header and its options.

use std::{fmt, net::Ipv4Addr, ops::BitOr};

use crate::{
    checksum::Sum,
    error::{Layer, WireError},
    field::{be16, be32, getters, put},
    ip::IpProtocol,
};

pub use options::{MAX_OPTIONS_LEN, MAX_SACK_BLOCKS, MAX_WINDOW_SCALE, SackBlock, TcpOptions, Timestamps};

mod options;

/// Length of the header without options, in bytes.
pub const HEADER_LEN: usize = 20;

/// Offset of the checksum field in the header, in bytes: the `csum_offset` of a TCP packet.
pub const CHECKSUM_OFFSET: u16 = 16;

pub(crate) mod field {
    pub(crate) const SRC_PORT: usize = 0;
    pub(crate) const DST_PORT: usize = 2;
    pub(crate) const SEQ: usize = 4;
    pub(crate) const ACK: usize = 8;
    pub(crate) const DATA_OFFSET: usize = 12;
    pub(crate) const FLAGS: usize = 13;
    pub(crate) const WINDOW: usize = 14;
    pub(crate) const CHECKSUM: usize = 16;
    pub(crate) const URGENT: usize = 18;
}

/// The eight control bits.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    /// The acknowledgement number is valid.
    pub const ACK: Self = Self(0x10);
    /// The sender has reduced its congestion window.
    pub const CWR: Self = Self(0x80);
    /// Echo of a congestion mark.
    pub const ECE: Self = Self(0x40);
    /// The sender has no more data.
    pub const FIN: Self = Self(0x01);
    /// Deliver the data immediately (push).
    pub const PSH: Self = Self(0x08);
    /// Reset the connection.
    pub const RST: Self = Self(0x04);
    /// Synchronise sequence numbers.
    pub const SYN: Self = Self(0x02);
    /// The urgent pointer is valid.
    pub const URG: Self = Self(0x20);

    /// Returns whether all bits of `other` are set.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns whether any bit of `other` is set.
    #[inline]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns whether no bit is set.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns these flags without the flags in `other`.
    #[inline]
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitOr for TcpFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for TcpFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 8] = ["FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"];
        let set = (0..8).filter(|bit| self.0 & (1 << bit) != 0).map(|bit| NAMES[bit]);
        f.debug_set().entries(set).finish()
    }
}

/// The fields of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpHeader {
    pub src_port: u16,
    pub dst_port: u16,
    /// Sequence number of the first byte of the payload, or of the SYN.
    pub seq: u32,
    /// The next expected sequence number. Only valid with [`TcpFlags::ACK`].
    pub ack: u32,
    pub flags: TcpFlags,
    /// The receive window on the wire, without scaling.
    pub window: u16,
    /// The urgent pointer. Only valid with [`TcpFlags::URG`].
    pub urgent: u16,
}

impl TcpHeader {
    /// Writes the header with a checksum field of 0. `options_len` is the length of the following options in bytes: a
    /// multiple of 4, at most [`MAX_OPTIONS_LEN`]. Other lengths are rounded down to whole words and limited.
    #[inline]
    pub fn write(&self, to: &mut [u8; HEADER_LEN], options_len: usize) {
        #[allow(clippy::cast_possible_truncation, reason = "15 at most")]
        let words = ((HEADER_LEN + options_len.min(MAX_OPTIONS_LEN)) / 4) as u8;
        put(to, field::SRC_PORT, self.src_port.to_be_bytes());
        put(to, field::DST_PORT, self.dst_port.to_be_bytes());
        put(to, field::SEQ, self.seq.to_be_bytes());
        put(to, field::ACK, self.ack.to_be_bytes());
        to[field::DATA_OFFSET] = words << 4;
        to[field::FLAGS] = self.flags.0;
        put(to, field::WINDOW, self.window.to_be_bytes());
        put(to, field::CHECKSUM, [0, 0]);
        put(to, field::URGENT, self.urgent.to_be_bytes());
    }
}

/// A read-only view of a TCP segment.
#[derive(Debug, Clone, Copy)]
pub struct TcpSegment<'a> {
    header: &'a [u8; HEADER_LEN],
    options: &'a [u8],
    payload: &'a [u8],
}

impl<'a> TcpSegment<'a> {
    /// Creates a view of the payload of an IP packet.
    ///
    /// # Errors
    /// The bytes end before the header with its options, or the data offset is below five words.
    #[inline]
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, WireError> {
        let layer = Layer::Tcp;
        let found = bytes.len();
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() else {
            return Err(WireError::TooShort { layer, found, needed: HEADER_LEN });
        };
        let header_len = usize::from(header[field::DATA_OFFSET] >> 4) * 4;
        let Some(options_len) = header_len.checked_sub(HEADER_LEN) else {
            return Err(WireError::HeaderLength { layer, found: header_len, min: HEADER_LEN });
        };
        match rest.split_at_checked(options_len) {
            Some((options, payload)) => Ok(Self { header, options, payload }),
            None => Err(WireError::TooShort { layer, found, needed: header_len }),
        }
    }

    getters! { self:
        /// Source port.
        src_port: u16 = be16(self.header, field::SRC_PORT);
        /// Destination port.
        dst_port: u16 = be16(self.header, field::DST_PORT);
        /// Sequence number of the first byte of the payload.
        seq: u32 = be32(self.header, field::SEQ);
        /// The next sequence number that the sender expects. Only valid with [`TcpFlags::ACK`].
        ack: u32 = be32(self.header, field::ACK);
        /// The control bits.
        flags: TcpFlags = TcpFlags(self.header[field::FLAGS]);
        /// The receive window on the wire, without scaling.
        window: u16 = be16(self.header, field::WINDOW);
        /// The checksum field.
        checksum: u16 = be16(self.header, field::CHECKSUM);
        /// The urgent pointer. Only valid with [`TcpFlags::URG`].
        urgent: u16 = be16(self.header, field::URGENT);
        /// Header length with options, 20 to 60 bytes.
        header_len: usize = HEADER_LEN + self.options.len();
        /// The options, 0 to 40 bytes, for [`TcpOptions::read`].
        options: &'a [u8] = self.options;
        /// The bytes after the header.
        payload: &'a [u8] = self.payload;
    }

    /// Returns whether the checksum is right between these IPv4 addresses.
    #[inline]
    pub fn verify_checksum_v4(&self, src: Ipv4Addr, dst: Ipv4Addr) -> bool {
        // An IPv4 payload has at most 65515 bytes, so a longer slice is not part of an IPv4 packet.
        let Ok(len) = u16::try_from(self.segment_len()) else { return false };
        (Sum::pseudo_v4(src, dst, IpProtocol::TCP, len) + self.sum()).is_valid()
    }

    #[inline]
    fn segment_len(&self) -> usize {
        self.header_len() + self.payload.len()
    }

    #[inline]
    fn sum(&self) -> Sum {
        // The header and the options consist of 32-bit words, so each part starts at an even offset.
        Sum::of(self.header) + Sum::of(self.options) + Sum::of(self.payload)
    }
}
