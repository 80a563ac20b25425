//! Ethernet II: the 14-byte header, and the 802.1Q tag.
//!
//! Frames have no frame check sequence here: they start at the destination address and end with the payload.

use std::fmt;

use crate::{
    error::{Layer, WireError},
    field::{be16, bytes, getters, put},
};

pub use mac::{MacAddr, ParseMacError};

mod mac;

/// Length of the Ethernet II header in bytes.
pub const HEADER_LEN: usize = 14;

/// Length of an 802.1Q tag in bytes: tag control information and the next EtherType.
pub const VLAN_TAG_LEN: usize = 4;

/// Minimum length of a frame in bytes, without the frame check sequence (IEEE 802.3, 4A.4.2). Some network cards stop a
/// queue that contains a shorter frame.
pub const MIN_LEN: usize = 60;

/// Length of the frame check sequence in bytes. Frames do not contain it here, but published frame sizes include it.
pub const FCS_LEN: usize = 4;

pub(crate) mod field {
    pub(crate) const DST: usize = 0;
    pub(crate) const SRC: usize = 6;
    pub(crate) const ETHERTYPE: usize = 12;
}

/// The protocol in an Ethernet frame or behind a VLAN tag.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct EtherType(pub u16);

impl EtherType {
    /// ARP.
    pub const ARP: Self = Self(0x0806);
    /// IPv4.
    pub const IPV4: Self = Self(0x0800);
    /// IPv6.
    pub const IPV6: Self = Self(0x86dd);
    /// LLDP.
    pub const LLDP: Self = Self(0x88cc);
    /// A provider's outer VLAN tag (802.1ad).
    pub const QINQ: Self = Self(0x88a8);
    /// A VLAN tag (802.1Q).
    pub const VLAN: Self = Self(0x8100);
}

impl fmt::Display for EtherType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ARP => f.write_str("ARP"),
            Self::IPV4 => f.write_str("IPv4"),
            Self::IPV6 => f.write_str("IPv6"),
            Self::LLDP => f.write_str("LLDP"),
            Self::QINQ => f.write_str("802.1ad"),
            Self::VLAN => f.write_str("802.1Q"),
            Self(other) => write!(f, "{other:#06x}"),
        }
    }
}

impl fmt::Debug for EtherType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Writes the header of a frame without tags.
#[inline]
pub fn write_header(to: &mut [u8; HEADER_LEN], dst: MacAddr, src: MacAddr, ethertype: EtherType) {
    put(to, field::DST, dst.0);
    put(to, field::SRC, src.0);
    put(to, field::ETHERTYPE, ethertype.0.to_be_bytes());
}

/// A read-only view of an Ethernet frame.
#[derive(Debug, Clone, Copy)]
pub struct EthernetFrame<'a> {
    header: &'a [u8; HEADER_LEN],
    payload: &'a [u8],
}

impl<'a> EthernetFrame<'a> {
    /// Creates a view of a frame. An empty payload is accepted.
    ///
    /// # Errors
    /// [`WireError::TooShort`] below [`HEADER_LEN`] bytes.
    #[inline]
    pub fn new_checked(frame: &'a [u8]) -> Result<Self, WireError> {
        match frame.split_first_chunk() {
            Some((header, payload)) => Ok(Self { header, payload }),
            None => Err(too_short(frame.len())),
        }
    }

    getters! { self:
        /// Destination address.
        dst: MacAddr = MacAddr(bytes(self.header, field::DST));
        /// Source address.
        src: MacAddr = MacAddr(bytes(self.header, field::SRC));
        /// Protocol of the payload. A value below 0x0600 is a length (802.3).
        ethertype: EtherType = EtherType(be16(self.header, field::ETHERTYPE));
        /// Everything after the header, including the padding of short frames.
        payload: &'a [u8] = self.payload;
    }
}

/// A mutable view of an Ethernet frame.
#[derive(Debug)]
pub struct EthernetFrameMut<'a> {
    header: &'a mut [u8; HEADER_LEN],
    payload: &'a mut [u8],
}

impl<'a> EthernetFrameMut<'a> {
    /// Creates a view of a frame. An empty payload is accepted.
    ///
    /// # Errors
    /// [`WireError::TooShort`] below [`HEADER_LEN`] bytes.
    #[inline]
    pub fn new_checked(frame: &'a mut [u8]) -> Result<Self, WireError> {
        let found = frame.len();
        match frame.split_first_chunk_mut() {
            Some((header, payload)) => Ok(Self { header, payload }),
            None => Err(too_short(found)),
        }
    }

    /// Returns a read-only view of the same frame.
    #[inline]
    pub fn as_view(&self) -> EthernetFrame<'_> {
        EthernetFrame { header: self.header, payload: self.payload }
    }

    /// Sets the destination address.
    #[inline]
    pub fn set_dst(&mut self, dst: MacAddr) {
        put(self.header, field::DST, dst.0);
    }

    /// Sets the source address.
    #[inline]
    pub fn set_src(&mut self, src: MacAddr) {
        put(self.header, field::SRC, src.0);
    }

    /// Swaps the source and destination addresses, as the forwarding mode `macswap` does.
    #[inline]
    pub fn swap_addresses(&mut self) {
        let (dst, src) = (self.as_view().dst(), self.as_view().src());
        self.set_dst(src);
        self.set_src(dst);
    }
}

#[cold]
fn too_short(found: usize) -> WireError {
    WireError::TooShort { layer: Layer::Ethernet, found, needed: HEADER_LEN }
}

/// An 802.1Q tag and the bytes behind it. It is parsed from the payload of a frame or outer tag whose EtherType is
/// [`EtherType::VLAN`] or [`EtherType::QINQ`].
#[derive(Debug, Clone, Copy)]
pub struct VlanTag<'a> {
    tag: &'a [u8; VLAN_TAG_LEN],
    payload: &'a [u8],
}

impl<'a> VlanTag<'a> {
    /// Creates a view of the bytes behind the EtherType that announced the tag.
    ///
    /// # Errors
    /// [`WireError::TooShort`] below [`VLAN_TAG_LEN`] bytes.
    #[inline]
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, WireError> {
        match bytes.split_first_chunk() {
            Some((tag, payload)) => Ok(Self { tag, payload }),
            None => Err(WireError::TooShort { layer: Layer::Vlan, found: bytes.len(), needed: VLAN_TAG_LEN }),
        }
    }

    getters! { self:
        /// Priority code point, 0 to 7.
        priority: u8 = self.tag[0] >> 5;
        /// VLAN identifier, 0 to 4095. 0 means a priority tag.
        id: u16 = be16(self.tag, 0) & 0x0fff;
        /// Protocol of the payload behind the tag.
        ethertype: EtherType = EtherType(be16(self.tag, 2));
        /// The bytes after the tag.
        payload: &'a [u8] = self.payload;
    }
}
