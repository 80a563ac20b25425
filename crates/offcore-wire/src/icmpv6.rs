//! ICMPv6 (RFC 4443), with neighbor discovery ([`neighbor`]) and router discovery ([`router`], both RFC 4861), and
//! multicast listener discovery ([`listener`]).
//!
//! Every checksum includes the pseudo header of IPv6, so functions that write messages need the packet's addresses.

use std::net::Ipv6Addr;

use crate::{
    checksum::Sum,
    error::{Layer, WireError},
    field::{be16, be32},
    icmp::{self, field},
    ip::IpProtocol,
};

pub use listener::ListenerQuery;
pub use neighbor::{NeighborAdvert, NeighborSolicit};
pub use router::{RouterAdvert, RouterSolicit};

pub mod listener;
pub mod neighbor;
pub mod router;

/// Length of the common header of all messages in bytes.
pub const HEADER_LEN: usize = icmp::HEADER_LEN;

/// Maximum length of an error message in bytes. With an IPv6 header, the packet has 1280 bytes (RFC 4443, 2.4).
pub const MAX_ERROR_LEN: usize = 1240;

/// Type: the packet was not delivered.
pub const DESTINATION_UNREACHABLE: u8 = 1;
/// Type: the packet is too long for the next hop.
pub const PACKET_TOO_BIG: u8 = 2;
/// Type: the hop limit reached 0, or fragments were missing.
pub const TIME_EXCEEDED: u8 = 3;
/// Type: a header is wrong or unknown.
pub const PARAMETER_PROBLEM: u8 = 4;
/// Type: asks for [`ECHO_REPLY`].
pub const ECHO_REQUEST: u8 = 128;
/// Type: the answer to [`ECHO_REQUEST`].
pub const ECHO_REPLY: u8 = 129;

/// Code of [`DESTINATION_UNREACHABLE`]: the port is closed.
pub const PORT_UNREACHABLE: u8 = 4;

/// A message. An error quotes the packet that caused it, from its IPv6 header on. The quotation may be truncated
/// anywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Icmpv6<'a> {
    /// A request to return the same bytes.
    EchoRequest { ident: u16, seq: u16 },
    /// The reply to an echo request.
    EchoReply { ident: u16, seq: u16 },
    /// The packet was not delivered.
    Unreachable { code: u8, quoted: &'a [u8] },
    /// The packet is too long for the next hop.
    PacketTooBig {
        /// The MTU of the next hop in bytes, as received. It may be any number, including numbers below 1280.
        mtu: u32,
        quoted: &'a [u8],
    },
    /// The hop limit reached 0, or the reassembly took too long.
    TimeExceeded { code: u8, quoted: &'a [u8] },
    /// A header of the packet is wrong or unknown.
    ParameterProblem {
        code: u8,
        /// Offset of the error, in bytes from the start of the packet.
        pointer: u32,
        quoted: &'a [u8],
    },
    /// A request for the MAC address of a neighbor.
    NeighborSolicit(NeighborSolicit),
    /// The MAC address of a neighbor.
    NeighborAdvert(NeighborAdvert),
    /// A router advertisement.
    RouterAdvert(RouterAdvert<'a>),
    /// A multicast listener query.
    ListenerQuery(ListenerQuery),
    /// Another host's version 1 report of a group.
    ListenerReport { group: Ipv6Addr },
    /// Any other message.
    Other { kind: u8, code: u8 },
}

impl<'a> Icmpv6<'a> {
    /// Parses the payload of an IPv6 packet, or its contiguous beginning. Messages of neighbor discovery must be
    /// complete. The checksum is not verified, nor the hop limit, which must be 255 for neighbor discovery.
    ///
    /// # Errors
    /// [`WireError::TooShort`] below [`HEADER_LEN`] bytes, and for messages of neighbor discovery (RFC 4861, 7.1) also
    /// below 24 bytes. For these messages also [`WireError::Field`] if the code is not 0,
    /// [`WireError::MulticastTarget`], and [`WireError::OptionLength`] if an option has length 0 or exceeds the
    /// message, or if a link-layer address is not a MAC address. For queries of listener discovery
    /// [`WireError::TooShort`] below 24 bytes, and [`WireError::NoGroup`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let Some((header, quoted)) = bytes.split_first_chunk::<HEADER_LEN>() else {
            return Err(WireError::TooShort { layer: Layer::Icmpv6, found: bytes.len(), needed: HEADER_LEN });
        };
        let (kind, code) = (header[field::TYPE], header[field::CODE]);
        let rest = be32(header, field::REST);
        let [ident, seq] = [be16(header, field::REST), be16(header, field::REST + 2)];
        Ok(match kind {
            ECHO_REQUEST => Self::EchoRequest { ident, seq },
            ECHO_REPLY => Self::EchoReply { ident, seq },
            DESTINATION_UNREACHABLE => Self::Unreachable { code, quoted },
            PACKET_TOO_BIG => Self::PacketTooBig { mtu: rest, quoted },
            TIME_EXCEEDED => Self::TimeExceeded { code, quoted },
            PARAMETER_PROBLEM => Self::ParameterProblem { code, pointer: rest, quoted },
            neighbor::SOLICIT => Self::NeighborSolicit(NeighborSolicit::parse(bytes)?),
            neighbor::ADVERT => Self::NeighborAdvert(NeighborAdvert::parse(bytes)?),
            router::ADVERT => Self::RouterAdvert(RouterAdvert::parse(bytes)?),
            listener::QUERY => Self::ListenerQuery(ListenerQuery::parse(bytes)?),
            listener::REPORT_V1 => Self::ListenerReport { group: listener::reported(bytes)? },
            _ => Self::Other { kind, code },
        })
    }
}

/// Turns an echo request into the reply. The checksum is updated, independently of the location of the rest of the
/// message. The addresses of the packet are swapped, which does not change the sum of the pseudo header. Therefore, the
/// function must not be used for a request to a multicast group, whose reply has another source address.
#[inline]
pub fn make_echo_reply(message: &mut [u8; HEADER_LEN]) {
    icmp::set_type(message, ECHO_REPLY);
}

/// Writes an error message of type `kind` with its checksum between `src` and `dst`, and returns its length in bytes.
/// `rest` is the second half of the header: 0, an MTU or a pointer. `quoted` is the packet, from its IPv6 header on. As
/// much of it is quoted as fits into `to` and into [`MAX_ERROR_LEN`]. If the header does not fit into `to`, nothing is
/// written and 0 is returned.
pub fn write_error(
    to: &mut [u8],
    kind: u8,
    code: u8,
    rest: u32,
    quoted: &[u8],
    src: Ipv6Addr,
    dst: Ipv6Addr,
) -> usize {
    #[allow(clippy::cast_possible_truncation, reason = "MAX_ERROR_LEN at most")]
    let pseudo = |len: usize| Sum::pseudo_v6(src, dst, IpProtocol::ICMPV6, len as u32);
    icmp::write_error(to, MAX_ERROR_LEN, [kind, code], rest, quoted, pseudo)
}

#[cfg(test)]
mod tests;
