//! ICMPv6 (RFC 4443), with discovery of neighbors ([`neighbor`]) and routers ([`router`], both RFC 4861), and multicast listener
//! discovery ([`listener`]).
//!
//! Every checksum includes the pseudo header of IPv6, so what writes one takes the packet's addresses.

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

/// Length of the header in bytes: what every message begins with.
pub const HEADER_LEN: usize = icmp::HEADER_LEN;

/// Length of an error message at most, in bytes: with an IPv6 header in front of it 1280 (RFC 4443, 2.4).
pub const MAX_ERROR_LEN: usize = 1240;

/// Type: the packet was not delivered.
pub const DESTINATION_UNREACHABLE: u8 = 1;
/// Type: the packet is too long for the next hop.
pub const PACKET_TOO_BIG: u8 = 2;
/// Type: the hop limit came to 0, or fragments were missing.
pub const TIME_EXCEEDED: u8 = 3;
/// Type: a header is wrong, or not known.
pub const PARAMETER_PROBLEM: u8 = 4;
/// Type: asks for [`ECHO_REPLY`].
pub const ECHO_REQUEST: u8 = 128;
/// Type: the answer to [`ECHO_REQUEST`].
pub const ECHO_REPLY: u8 = 129;

/// Code of [`DESTINATION_UNREACHABLE`]: nobody takes the port.
pub const PORT_UNREACHABLE: u8 = 4;
/// Code of [`PARAMETER_PROBLEM`]: nobody takes the next header.
pub const UNRECOGNIZED_NEXT_HEADER: u8 = 1;

/// A message. What an error quotes is the packet that it is about, from its IPv6 header on; it may be cut anywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Icmpv6<'a> {
    /// A host wants its bytes back.
    EchoRequest { ident: u16, seq: u16 },
    /// They are here.
    EchoReply { ident: u16, seq: u16 },
    /// The packet was not delivered.
    Unreachable { code: u8, quoted: &'a [u8] },
    /// The packet is too long for the next hop.
    PacketTooBig {
        /// The MTU of the next hop in bytes, as it is sent: it may be any number, also one below 1280.
        mtu: u32,
        quoted: &'a [u8],
    },
    /// The packet was under way for too long.
    TimeExceeded { code: u8, quoted: &'a [u8] },
    /// A header of the packet is wrong, or not known.
    ParameterProblem {
        code: u8,
        /// Where, in bytes from the start of the packet.
        pointer: u32,
        quoted: &'a [u8],
    },
    /// Who has this address?
    NeighborSolicit(NeighborSolicit),
    /// This address is here.
    NeighborAdvert(NeighborAdvert),
    /// A router advertisement.
    RouterAdvert(RouterAdvert<'a>),
    /// A multicast listener query.
    ListenerQuery(ListenerQuery),
    /// Another host's version 1 report of a group.
    ListenerReport { group: Ipv6Addr },
    /// Any other.
    Other { kind: u8, code: u8 },
}

impl<'a> Icmpv6<'a> {
    /// Reads what an IPv6 packet carries, or as much of it as there is in one place; messages of neighbor discovery must
    /// be there as a whole. The checksum is not looked at, nor the hop limit, which must be 255 for those.
    ///
    /// # Errors
    /// [`WireError::TooShort`] below [`HEADER_LEN`] bytes. For messages of neighbor discovery (RFC 4861, 7.1) also below
    /// 24 bytes; [`WireError::Field`] if the code is not 0, [`WireError::MulticastTarget`], and
    /// [`WireError::OptionLength`] if an option is 0 bytes long or goes beyond the message, or if a link-layer address
    /// is no MAC address. For queries of listener discovery below 24 bytes, and [`WireError::NoGroup`].
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

/// Makes an echo request the reply to it. The checksum stays as right as it was, wherever the rest of the message lies:
/// the packet's addresses change places, which leaves the pseudo header's sum as it is. So it is not for a request to a
/// multicast group, whose reply comes from another address.
#[inline]
pub fn make_echo_reply(message: &mut [u8; HEADER_LEN]) {
    icmp::set_type(message, ECHO_REPLY);
}

/// Writes an error message of type `kind` with its checksum between `src` and `dst`, and returns its length in bytes.
/// `rest` is what the second four bytes of the header hold: 0, an MTU or a pointer. `quoted` is the packet, from its
/// IPv6 header on. As much of it is quoted as fits into `to` and into [`MAX_ERROR_LEN`]; where not even the header fits
/// into `to`, nothing is written and 0 is returned.
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
