//! ICMP for IPv4 (RFC 792), with path MTUs (RFC 1191) and quotations of RFC 1812.

use crate::{
    checksum::Sum,
    error::{Layer, WireError},
    field::be16,
    icmp::{self, field},
};

/// Length of the common header of all messages in bytes.
pub const HEADER_LEN: usize = icmp::HEADER_LEN;

/// Maximum length of an error message in bytes. With an IPv4 header, the packet has 576 bytes (RFC 1812, 4.3.2.3).
pub const MAX_ERROR_LEN: usize = 556;

/// Type: the answer to [`ECHO`].
pub const ECHO_REPLY: u8 = 0;
/// Type: the packet was not delivered.
pub const DESTINATION_UNREACHABLE: u8 = 3;
/// Type: a better first hop exists.
pub const REDIRECT: u8 = 5;
/// Type: asks for [`ECHO_REPLY`].
pub const ECHO: u8 = 8;
/// Type: the time to live reached 0, or fragments were missing.
pub const TIME_EXCEEDED: u8 = 11;
/// Type: a header is wrong.
pub const PARAMETER_PROBLEM: u8 = 12;

/// Code of [`DESTINATION_UNREACHABLE`]: the host does not support the protocol.
pub const PROTOCOL_UNREACHABLE: u8 = 2;
/// Code of [`DESTINATION_UNREACHABLE`]: the port is closed.
pub const PORT_UNREACHABLE: u8 = 3;
/// Code of [`DESTINATION_UNREACHABLE`]: the packet is too long for the next hop and must not be fragmented.
pub const FRAGMENTATION_NEEDED: u8 = 4;

/// A message. An error quotes the packet that caused it, from its IPv4 header on. The quotation may be truncated
/// anywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Icmpv4<'a> {
    /// A request to return the same bytes.
    EchoRequest { ident: u16, seq: u16 },
    /// The reply to an echo request.
    EchoReply { ident: u16, seq: u16 },
    /// The packet was not delivered.
    Unreachable {
        code: u8,
        /// With [`FRAGMENTATION_NEEDED`], the MTU of the next hop in bytes; 0 from a router older than RFC 1191.
        mtu: u16,
        quoted: &'a [u8],
    },
    /// The time to live reached 0, or the reassembly took too long.
    TimeExceeded { code: u8, quoted: &'a [u8] },
    /// A header of the packet is wrong.
    ParameterProblem {
        /// Offset of the error, in bytes from the start of the packet.
        pointer: u8,
        quoted: &'a [u8],
    },
    /// A better first hop exists. Hosts may ignore this message.
    Redirect,
    /// Any other message.
    Other { kind: u8, code: u8 },
}

impl<'a> Icmpv4<'a> {
    /// Parses the payload of an IPv4 packet, or its contiguous beginning. The checksum is not verified.
    ///
    /// # Errors
    /// [`WireError::TooShort`] below [`HEADER_LEN`] bytes.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let Some((header, quoted)) = bytes.split_first_chunk::<HEADER_LEN>() else {
            return Err(WireError::TooShort { layer: Layer::Icmpv4, found: bytes.len(), needed: HEADER_LEN });
        };
        let (kind, code) = (header[field::TYPE], header[field::CODE]);
        let [high, low] = [be16(header, field::REST), be16(header, field::REST + 2)];
        Ok(match kind {
            ECHO => Self::EchoRequest { ident: high, seq: low },
            ECHO_REPLY => Self::EchoReply { ident: high, seq: low },
            DESTINATION_UNREACHABLE => Self::Unreachable { code, mtu: low, quoted },
            TIME_EXCEEDED => Self::TimeExceeded { code, quoted },
            PARAMETER_PROBLEM => Self::ParameterProblem { pointer: header[field::REST], quoted },
            REDIRECT => Self::Redirect,
            _ => Self::Other { kind, code },
        })
    }
}

/// Turns an echo request into the reply. The checksum is updated, independently of the location of the rest of the
/// message.
#[inline]
pub fn make_echo_reply(message: &mut [u8; HEADER_LEN]) {
    icmp::set_type(message, ECHO_REPLY);
}

/// Writes an error message of type `kind` with its checksum, and returns its length in bytes. `rest` is the second half
/// of the header: 0, the MTU of the next hop, or a pointer in its upper eight bits. `quoted` is the packet, from its
/// IPv4 header on. As much of it is quoted as fits into `to` and into [`MAX_ERROR_LEN`]. If the header does not fit
/// into `to`, nothing is written and 0 is returned.
pub fn write_error(to: &mut [u8], kind: u8, code: u8, rest: u32, quoted: &[u8]) -> usize {
    icmp::write_error(to, MAX_ERROR_LEN, [kind, code], rest, quoted, |_| Sum::ZERO)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A packet of `ping -c 1 -s 16 -p ab` without its timestamp.
    const PING: [u8; 24] = [
        8, 0, 0x80, 0x76, 0x1a, 0x2b, 0, 1, 0xab, 0xab, 0xab, 0xab, 0xab, 0xab, 0xab, 0xab, 0xab, 0xab, 0xab,
        0xab, 0xab, 0xab, 0xab, 0xab,
    ];

    /// The only reply whose updated checksum could be the wrong zero.
    #[test]
    fn all_zero_reply_has_valid_checksum() {
        let mut message = [8, 0, 0xf7, 0xff, 0, 0, 0, 0];
        assert!(Sum::of(&message).is_valid());
        make_echo_reply(&mut message);
        assert_eq!(message, [0, 0, 0xff, 0xff, 0, 0, 0, 0]);
        assert!(Sum::of(&message).is_valid());
    }

    #[test]
    fn icmp_errors_are_parsed() {
        let quoted = [0x45, 0, 0, 99];
        let read = |kind, code, rest: [u8; 4]| {
            let message = [&[kind, code, 0xaa, 0xbb][..], &rest, &quoted].concat();
            format!("{:?}", Icmpv4::parse(&message).unwrap())
        };
        assert_eq!(read(3, 4, [0, 0, 5, 0x14]), "Unreachable { code: 4, mtu: 1300, quoted: [69, 0, 0, 99] }");
        assert_eq!(read(11, 1, [0; 4]), "TimeExceeded { code: 1, quoted: [69, 0, 0, 99] }");
        assert_eq!(read(12, 0, [9, 1, 1, 1]), "ParameterProblem { pointer: 9, quoted: [69, 0, 0, 99] }");
        assert_eq!(read(5, 1, [10, 0, 0, 1]), "Redirect");
        assert_eq!(read(13, 2, [0; 4]), "Other { kind: 13, code: 2 }");
        for found in 0..HEADER_LEN {
            let error = WireError::TooShort { layer: Layer::Icmpv4, found, needed: HEADER_LEN };
            assert_eq!(Icmpv4::parse(&PING[..found]), Err(error));
        }
    }

    #[test]
    fn error_quote_is_truncated() {
        let packet = [0x5a; 2000];
        let mut to = [0xee; 1500];
        assert_eq!(
            write_error(&mut to, DESTINATION_UNREACHABLE, PORT_UNREACHABLE, 0, &packet),
            MAX_ERROR_LEN
        );
        assert!(Sum::of(&to[..MAX_ERROR_LEN]).is_valid());
        assert!(to[MAX_ERROR_LEN..].iter().all(|byte| *byte == 0xee));
        for len in 0..HEADER_LEN {
            let mut to = vec![0xee; len];
            assert_eq!(write_error(&mut to, TIME_EXCEEDED, 0, 0, &packet), 0);
            assert!(to.iter().all(|byte| *byte == 0xee));
        }
    }

    proptest! {
        #[test]
        fn written_error_parses_back(
            code: u8,
            rest: u32,
            packet in prop::collection::vec(any::<u8>(), 0..100),
            room in 8..120usize,
        ) {
            let mut to = vec![0xee; room];
            let len = write_error(&mut to, DESTINATION_UNREACHABLE, code, rest, &packet);
            prop_assert_eq!(len, room.min(8 + packet.len()));
            let quoted = &packet[..len - 8];
            let mtu = rest as u16;
            prop_assert_eq!(Icmpv4::parse(&to[..len]), Ok(Icmpv4::Unreachable { code, mtu, quoted }));
            prop_assert!(Sum::of(&to[..len]).is_valid());
            prop_assert!(to[len..].iter().all(|byte| *byte == 0xee));
            let theirs = etherparse::Icmpv4Slice::from_slice(&to[..len]).unwrap();
            prop_assert_eq!((theirs.type_u8(), theirs.code_u8(), theirs.payload()), (3, code, quoted));
        }

        #[test]
        fn reply_checksum_is_valid(ident: u16, seq: u16, data in prop::collection::vec(any::<u8>(), 0..60)) {
            let ping = etherparse::IcmpEchoHeader { id: ident, seq };
            let ping = etherparse::Icmpv4Header::with_checksum(etherparse::Icmpv4Type::EchoRequest(ping), &data);
            let mut message = [&ping.to_bytes()[..], &data].concat();
            prop_assert_eq!(Icmpv4::parse(&message), Ok(Icmpv4::EchoRequest { ident, seq }));
            make_echo_reply(message.first_chunk_mut().unwrap());
            prop_assert_eq!(Icmpv4::parse(&message), Ok(Icmpv4::EchoReply { ident, seq }));
            prop_assert!(Sum::of(&message).is_valid());
        }
    }
}
