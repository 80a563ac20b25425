//! What a view's `new_checked` refuses.

/// The header that was being looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display)]
pub enum Layer {
    /// Ethernet
    Ethernet,
    /// IPv4
    Ipv4, // RFC 791
    /// IPv6
    Ipv6, // RFC 8200
    /// TCP
    Tcp, // RFC 9293
    /// UDP
    Udp, // RFC 768
    /// VLAN
    Vlan, // IEEE 802.1Q
}

/// Why bytes are not the packet they were taken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum WireError {
    /// {layer} header says it is {found} bytes long; the least is {min}
    HeaderLength { layer: Layer, found: usize, min: usize },
    /// {layer} length field says {found} bytes; expected {min} to {max}
    Length { layer: Layer, found: usize, min: usize, max: usize },
    /// {layer} header needs {needed} bytes, but only {found} are there
    TooShort { layer: Layer, found: usize, needed: usize },
    /// {layer} header has version {found}, expected {expected}
    Version { layer: Layer, found: u8, expected: u8 },
}
