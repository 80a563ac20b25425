//! Extension headers (RFC 8200, 4) between the IPv6 header and the transport header.

use crate::{
    error::{Layer, WireError},
    ip::IpProtocol,
};

/// Maximum number of extension headers that are skipped, not including a hop-by-hop options header.
pub const MAX_EXTENSIONS: usize = 8;

/// Length of the shortest extension header in bytes, and the unit of header lengths.
const UNIT: usize = 8;

/// The content of an IPv6 packet behind its extension headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransportHeader<'a> {
    /// First header of the payload. In a fragment other than the first, it is the first header of the whole packet's
    /// payload, and may be an extension header.
    pub protocol: IpProtocol,
    /// The bytes behind the last skipped header.
    pub payload: &'a [u8],
    /// Position of the payload in a fragmented packet. It is `None` for a fragment header that covers the whole packet
    /// (RFC 6946).
    pub fragment: Option<Fragment>,
}

/// The fields of a fragment header (RFC 8200, 4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fragment {
    /// Offset of the payload in the packet, in bytes: a multiple of 8.
    pub offset: u16,
    /// Whether more fragments follow.
    pub more: bool,
    /// Identification.
    pub ident: u32,
}

impl<'a> TransportHeader<'a> {
    /// Skips routing headers, destination options and fragment headers. `next_header` is the type of the first header
    /// in `bytes`, which either follow the IPv6 header and its hop-by-hop options, or are a reassembled payload. The
    /// walk ends at the fragment header of a partial packet, because later headers belong to the whole packet.
    ///
    /// # Errors
    /// The same as for [`super::Ipv6Packet::transport`].
    #[inline]
    pub fn behind(next_header: IpProtocol, bytes: &'a [u8]) -> Result<Self, WireError> {
        let (mut protocol, mut payload) = (next_header, bytes);
        for _ in 0..=MAX_EXTENSIONS {
            (protocol, payload) = match protocol {
                IpProtocol::ROUTING => routing(payload)?,
                IpProtocol::DESTINATION_OPTIONS => options(payload)?,
                IpProtocol::FRAGMENT => match fragment(payload)? {
                    (protocol, Fragment { offset: 0, more: false, .. }, payload) => (protocol, payload),
                    (protocol, part, payload) => {
                        return Ok(Self { protocol, payload, fragment: Some(part) });
                    }
                },
                found if is_extension(found) => return Err(WireError::Extension { found }),
                _ => return Ok(Self { protocol, payload, fragment: None }),
            };
        }
        Err(WireError::TooManyHeaders { max: MAX_EXTENSIONS })
    }
}

/// Returns whether a protocol is an extension header of IANA's registry that is not skipped: hop-by-hop options, which
/// must be the first header; ESP and AH, which need keys; mobility, HIP and Shim6; and two for experiments.
fn is_extension(protocol: IpProtocol) -> bool {
    matches!(protocol, IpProtocol(0 | 50 | 51 | 135 | 139 | 140 | 253 | 254))
}

/// Splits a header off according to its own length. Returns the next protocol, the header's bytes behind its length
/// field, and the rest.
fn header(bytes: &[u8]) -> Result<(IpProtocol, &[u8], &[u8]), WireError> {
    let too_short = |needed| WireError::TooShort { layer: Layer::Ipv6, found: bytes.len(), needed };
    let &[next, units, ..] = bytes else { return Err(too_short(UNIT)) };
    let len = UNIT + usize::from(units) * UNIT;
    match bytes.split_at_checked(len) {
        Some(([_, _, inside @ ..], rest)) => Ok((IpProtocol(next), inside, rest)),
        _ => Err(too_short(len)),
    }
}

/// Skips a routing header (4.4) of any type that has no segments left.
#[cold]
fn routing(bytes: &[u8]) -> Result<(IpProtocol, &[u8]), WireError> {
    match header(bytes)? {
        (_, &[_, segments_left @ 1..=0xff, ..], _) => Err(WireError::Routing { segments_left }),
        (next, _, rest) => Ok((next, rest)),
    }
}

/// Skips hop-by-hop or destination options (4.2). Only the two padding options are known. An unknown option is skipped
/// if the upper two bits of its type are 0.
#[cold]
pub(super) fn options(bytes: &[u8]) -> Result<(IpProtocol, &[u8]), WireError> {
    const PAD1: u8 = 0;
    let (next, mut options, rest) = header(bytes)?;
    loop {
        options = match *options {
            [] => return Ok((next, rest)),
            [PAD1, ref behind @ ..] => behind,
            [kind @ 0x40..=0xff, ..] => return Err(WireError::UnknownOption { kind }),
            [kind, ref behind @ ..] => {
                let len = 2 + behind.first().map_or(0, |len| usize::from(*len));
                let error = WireError::OptionLength {
                    layer: Layer::Ipv6,
                    kind,
                    found: len,
                    min: 2,
                    max: options.len(),
                };
                options.get(len..).ok_or(error)?
            }
        }
    }
}

#[cold]
fn fragment(bytes: &[u8]) -> Result<(IpProtocol, Fragment, &[u8]), WireError> {
    let Some((&[next, _, high, low, i0, i1, i2, i3], rest)) = bytes.split_first_chunk::<UNIT>() else {
        return Err(WireError::TooShort { layer: Layer::Ipv6, found: bytes.len(), needed: UNIT });
    };
    let offset_more = u16::from_be_bytes([high, low]);
    let ident = u32::from_be_bytes([i0, i1, i2, i3]);
    Ok((IpProtocol(next), Fragment { offset: offset_more & !7, more: offset_more & 1 != 0, ident }, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ipv6::{Ipv6Header, Ipv6Packet};

    /// Returns a packet with a chain of headers, each given by its number and its bytes without the first one, and a
    /// payload.
    fn packet(chain: &[(u8, Vec<u8>)], last: u8, payload: &[u8]) -> Vec<u8> {
        let numbers = chain.iter().map(|(number, _)| *number).chain([last]);
        let mut numbers = numbers.collect::<Vec<_>>().into_iter();
        let first = numbers.next().unwrap();
        let mut behind: Vec<u8> = Vec::new();
        for ((_, rest), next) in chain.iter().zip(numbers) {
            behind.push(next);
            behind.extend(rest);
        }
        behind.extend(payload);
        let header = Ipv6Header {
            src: "fe80::1".parse().unwrap(),
            dst: "fe80::2".parse().unwrap(),
            next_header: IpProtocol(first),
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            payload_len: behind.len().try_into().unwrap(),
        };
        let mut bytes = [0; 40];
        header.write(&mut bytes);
        [&bytes[..], &behind].concat()
    }

    fn error(chain: &[(u8, Vec<u8>)]) -> WireError {
        Ipv6Packet::new_checked(&packet(chain, 6, b"end")).unwrap().transport().unwrap_err()
    }

    /// Returns a header without its first byte, filled with PadN.
    fn padding(units: u8) -> Vec<u8> {
        let pad = 4 + 8 * units;
        [vec![units, 1, pad], vec![0; pad.into()]].concat()
    }

    fn part(offset_more: u16) -> (u8, Vec<u8>) {
        let [high, low] = offset_more.to_be_bytes();
        (44, vec![0, high, low, 0xde, 0xad, 0xbe, 0xef])
    }

    #[test]
    fn extension_chain_is_walked() {
        let router_alert = vec![0, 5, 2, 0, 0, 0, 0];
        let routed = vec![2, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
        let chain = [(0, router_alert), (60, padding(1)), (43, routed), part(0), (60, padding(0))];
        let bytes = packet(&chain, 58, b"echo");
        let packet = Ipv6Packet::new_checked(&bytes).unwrap();
        let expected = TransportHeader { protocol: IpProtocol::ICMPV6, payload: b"echo", fragment: None };
        assert_eq!(packet.transport(), Ok(expected));
    }

    #[test]
    fn transport_without_extensions_is_payload() {
        for protocol in [6, 17, 58, 59, 89] {
            let bytes = packet(&[], protocol, b"all");
            let packet = Ipv6Packet::new_checked(&bytes).unwrap();
            let expected =
                TransportHeader { protocol: IpProtocol(protocol), payload: b"all", fragment: None };
            assert_eq!(packet.transport(), Ok(expected));
        }
    }

    #[test]
    fn fragment_ends_header_walk() {
        for (field, offset, more) in
            [(1, 0, true), (185 << 3 | 1, 1480, true), (0xfff8, 0xfff8, false), (0xe, 8, false)]
        {
            // The payload does not begin with a header of this fragment: the number belongs to the whole packet.
            let bytes = packet(&[part(field)], 60, &[0xff; 9]);
            let found = Ipv6Packet::new_checked(&bytes).unwrap().transport().unwrap();
            let fragment = Fragment { offset, more, ident: 0xdead_beef };
            assert_eq!(found.fragment, Some(fragment));
            assert_eq!((found.protocol, found.payload), (IpProtocol::DESTINATION_OPTIONS, &[0xff; 9][..]));
        }
        // After reassembly, the walk continues.
        let whole = [&[6][..], &padding(0), b"tcp"].concat();
        let found = TransportHeader::behind(IpProtocol::DESTINATION_OPTIONS, &whole).unwrap();
        assert_eq!((found.protocol, found.payload), (IpProtocol::TCP, &b"tcp"[..]));
    }

    #[test]
    fn unsupported_extensions_are_reported() {
        assert_eq!(error(&[(43, vec![0, 2, 1, 0, 0, 0, 0])]), WireError::Routing { segments_left: 1 });
        for number in [0, 50, 51, 135, 139, 140, 253, 254] {
            let found = IpProtocol(number);
            assert_eq!(error(&[(60, padding(0)), (number, padding(0))]), WireError::Extension { found });
        }
        assert_eq!(
            error(&[(60, padding(0)), (0, padding(0))]).to_string(),
            "IPv6 packet has IP protocol 0, an extension header that is not known or not where it may be"
        );
        let option = |kind, len| error(&[(0, vec![0, 0, kind, len, 0, 0, 0])]);
        for kind in [0x40, 0x80, 0xc0, 0xc2] {
            assert_eq!(option(kind, 1), WireError::UnknownOption { kind });
        }
        let long = |found, max| WireError::OptionLength { layer: Layer::Ipv6, kind: 5, found, min: 2, max };
        assert_eq!(option(5, 4), long(6, 5));
        assert_eq!(option(5, 255), long(257, 5));
        assert_eq!(error(&[(60, vec![0, 0, 0, 0, 0, 0, 5])]), long(2, 1));
        let short = WireError::TooShort { layer: Layer::Ipv6, found: 10, needed: 2048 };
        assert_eq!(error(&[(60, vec![255, 0, 0, 0, 0, 0])]), short);
    }

    #[test]
    fn extension_chain_length_is_limited() {
        let longest = vec![(60, padding(0)); MAX_EXTENSIONS];
        let hop_by_hop = [&[(0, padding(0))], &longest[..]].concat();
        let bytes = packet(&hop_by_hop, 6, b"tcp");
        assert_eq!(Ipv6Packet::new_checked(&bytes).unwrap().transport().unwrap().payload, b"tcp");
        let longer = [&[(60, padding(0))], &longest[..]].concat();
        assert_eq!(error(&longer), WireError::TooManyHeaders { max: 8 });
        let atomic = vec![part(0); 9];
        assert_eq!(error(&atomic), WireError::TooManyHeaders { max: 8 });
    }

    #[test]
    fn truncated_extension_chain_is_rejected() {
        let chain = [(0, padding(1)), (60, padding(0)), (43, vec![0; 7]), part(0)];
        let bytes = packet(&chain, 6, &[]);
        let whole = Ipv6Packet::new_checked(&bytes).unwrap();
        assert!(whole.transport().is_ok());
        for len in 0..whole.payload().len() {
            let mut cut = bytes[..40 + len].to_vec();
            cut[5] = len.try_into().unwrap();
            let found = Ipv6Packet::new_checked(&cut).unwrap().transport();
            assert!(matches!(found, Err(WireError::TooShort { .. })), "{len}: {found:?}");
        }
    }
}
