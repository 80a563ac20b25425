//! What a view's `new_checked` refuses.

use std::{error, fmt};

/// The header that was being looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// Ethernet II.
    Ethernet,
    /// IPv4, RFC 791.
    Ipv4,
    /// IPv6, RFC 8200.
    Ipv6,
    /// TCP, RFC 9293.
    Tcp,
    /// UDP, RFC 768.
    Udp,
    /// The tag of IEEE 802.1Q.
    Vlan,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ethernet => "Ethernet",
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Vlan => "VLAN",
        })
    }
}

/// Why bytes are not the packet they were taken for. All lengths are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireError {
    /// The header-length field is below the header's fixed part.
    HeaderLength {
        /// Which header.
        layer: Layer,
        /// The length the field gives.
        found: usize,
        /// The length of the fixed part.
        min: usize,
    },
    /// The packet-length field does not fit between its own header and the end of the bytes.
    Length {
        /// Which header.
        layer: Layer,
        /// The length the field gives.
        found: usize,
        /// The header's own length.
        min: usize,
        /// The bytes there are.
        max: usize,
    },
    /// The bytes end before the header does.
    TooShort {
        /// Which header.
        layer: Layer,
        /// The bytes there are.
        found: usize,
        /// The bytes the header takes, options included.
        needed: usize,
    },
    /// The version field is another one's.
    Version {
        /// Which header.
        layer: Layer,
        /// The version found.
        found: u8,
        /// The version expected.
        expected: u8,
    },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::HeaderLength { layer, found, min } => {
                write!(f, "{layer} header says it is {found} bytes long; the least is {min}")
            }
            Self::Length { layer, found, min, max } => {
                write!(f, "{layer} length field says {found} bytes; expected {min} to {max}")
            }
            Self::TooShort { layer, found, needed } => {
                write!(f, "{layer} header needs {needed} bytes, but only {found} are there")
            }
            Self::Version { layer, found, expected } => {
                write!(f, "{layer} header has version {found}, expected {expected}")
            }
        }
    }
}

impl error::Error for WireError {}
