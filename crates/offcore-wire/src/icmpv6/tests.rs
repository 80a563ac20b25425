use proptest::prelude::*;

use super::*;
use crate::{MacAddr, ipv6};

fn sum(message: &[u8], src: Ipv6Addr, dst: Ipv6Addr) -> Sum {
    Sum::pseudo_v6(src, dst, IpProtocol::ICMPV6, message.len().try_into().unwrap()) + Sum::of(message)
}

const MAC: MacAddr = MacAddr([0x52, 0x54, 0, 0x12, 0x34, 0x56]);

/// A solicitation from `fe80::5054:ff:fe12:3456` for `fe80::2`.
const SOLICIT: [u8; 32] = [
    135, 0, 0x72, 0x20, 0, 0, 0, 0, 0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 1, 0x52, 0x54,
    0, 0x12, 0x34, 0x56,
];

fn parse_solicit(message: &[u8]) -> Result<NeighborSolicit, WireError> {
    match Icmpv6::parse(message)? {
        Icmpv6::NeighborSolicit(solicit) => Ok(solicit),
        other => panic!("{other:?}"),
    }
}

#[test]
fn solicitation_layout_matches_rfc_4861() {
    let target: Ipv6Addr = "fe80::2".parse().unwrap();
    let src = ipv6::link_local(MAC);
    let dst = ipv6::solicited_node(target);
    assert!(sum(&SOLICIT, src, dst).is_valid());
    let solicit = NeighborSolicit { target, source_link: Some(MAC) };
    assert_eq!(parse_solicit(&SOLICIT), Ok(solicit));
    let mut to = [0xee; 32];
    assert_eq!(solicit.write(&mut to, src, dst), 32);
    assert_eq!(to, SOLICIT);

    // Duplicate address detection.
    let probe = NeighborSolicit { source_link: None, ..solicit };
    let mut to = [0xee; 32];
    assert_eq!(probe.write(&mut to, Ipv6Addr::UNSPECIFIED, dst), 24);
    assert!(sum(&to[..24], Ipv6Addr::UNSPECIFIED, dst).is_valid());
    assert_eq!((parse_solicit(&to[..24]), &to[24..]), (Ok(probe), &[0xee; 8][..]));
}

#[test]
fn advertisement_layout_matches_rfc_4861() {
    let (src, dst) = ("fe80::2".parse().unwrap(), ipv6::link_local(MAC));
    let advert = NeighborAdvert {
        router: false,
        solicited: true,
        replaces: true,
        target: src,
        target_link: Some(MAC),
    };
    let mut to = [0xee; 32];
    assert_eq!(advert.write(&mut to, src, dst), 32);
    assert_eq!((to[0], to[1], &to[4..8]), (136, 0, &[0x60, 0, 0, 0][..]));
    assert_eq!((&to[8..24], &to[24..]), (&SOLICIT[8..24], &[2, 1, 0x52, 0x54, 0, 0x12, 0x34, 0x56][..]));
    assert!(sum(&to, src, dst).is_valid());
    assert_eq!(Icmpv6::parse(&to), Ok(Icmpv6::NeighborAdvert(advert)));
    // Reserved bits are ignored.
    (to[4], to[7]) = (0xff, 0xff);
    let router = NeighborAdvert { router: true, ..advert };
    assert_eq!(Icmpv6::parse(&to), Ok(Icmpv6::NeighborAdvert(router)));
}

#[test]
fn malformed_discovery_is_rejected() {
    let says = |message: &[u8]| Icmpv6::parse(message).unwrap_err().to_string();
    for len in 8..24 {
        assert_eq!(says(&SOLICIT[..len]), format!("ICMPv6 header needs 24 bytes, but only {len} are there"));
    }
    for len in 25..32 {
        let expected = format!("ICMPv6 option 1 is {} bytes long; expected 8 to 8", len - 24);
        assert_eq!(says(&SOLICIT[..len]), expected);
    }
    let with = |at: usize, value: u8| {
        let mut message = SOLICIT;
        message[at] = value;
        says(&message)
    };
    assert_eq!(with(1, 1), "ICMPv6 field code is 1, expected 0");
    assert_eq!(with(8, 0xff), "ICMPv6 target is ff80::2, a multicast address; expected a unicast address");
    assert_eq!(with(25, 0), "ICMPv6 option 1 is 0 bytes long; expected 8 to 8");
    assert_eq!(with(25, 2), "ICMPv6 option 1 is 16 bytes long; expected 8 to 8");
    let mut other = SOLICIT;
    other[24] = 14;
    for (units, bytes) in [(0, 0), (2, 16), (255, 2040)] {
        other[25] = units;
        assert_eq!(says(&other), format!("ICMPv6 option 14 is {bytes} bytes long; expected 8 to 8"));
    }
}

#[test]
fn options_of_other_types_are_skipped() {
    let nonce = [14, 1, 1, 2, 3, 4, 5, 6];
    let redirected = [&[4, 3][..], &[1; 22]].concat();
    let target_link = [2, 1, 9, 9, 9, 9, 9, 9];
    let second = [1, 1, 8, 8, 8, 8, 8, 8];
    let message = [&SOLICIT[..24], &nonce, &redirected, &target_link, &SOLICIT[24..], &second].concat();
    assert_eq!(parse_solicit(&message).unwrap().source_link, Some(MAC));
    assert_eq!(parse_solicit(&message[..64]).unwrap().source_link, None);
}

#[test]
fn echo_and_errors_are_parsed() {
    let quoted = [0x60, 0, 0, 0];
    let read = |kind, code, rest: [u8; 4]| {
        let message = [&[kind, code, 0xaa, 0xbb][..], &rest, &quoted].concat();
        format!("{:?}", Icmpv6::parse(&message).unwrap())
    };
    assert_eq!(read(128, 0, [0x1a, 0x2b, 0, 7]), "EchoRequest { ident: 6699, seq: 7 }");
    assert_eq!(read(129, 0, [0x1a, 0x2b, 0, 7]), "EchoReply { ident: 6699, seq: 7 }");
    assert_eq!(read(1, 4, [0; 4]), "Unreachable { code: 4, quoted: [96, 0, 0, 0] }");
    assert_eq!(read(2, 0, [0, 0, 5, 0]), "PacketTooBig { mtu: 1280, quoted: [96, 0, 0, 0] }");
    assert_eq!(read(3, 1, [0; 4]), "TimeExceeded { code: 1, quoted: [96, 0, 0, 0] }");
    assert_eq!(read(4, 1, [0, 0, 0, 40]), "ParameterProblem { code: 1, pointer: 40, quoted: [96, 0, 0, 0] }");
    assert_eq!(read(137, 0, [64, 0, 0, 0]), "Other { kind: 137, code: 0 }");
    for found in 0..HEADER_LEN {
        let error = WireError::TooShort { layer: Layer::Icmpv6, found, needed: HEADER_LEN };
        assert_eq!(Icmpv6::parse(&SOLICIT[..found]), Err(error));
    }
}

#[test]
fn error_quote_is_truncated() {
    let (src, dst) = (Ipv6Addr::LOCALHOST, ipv6::link_local(MAC));
    let mut to = [0xee; 1500];
    let len = write_error(&mut to, PACKET_TOO_BIG, 0, 1400, &[0x5a; 2000], src, dst);
    assert_eq!(len, MAX_ERROR_LEN);
    assert!(sum(&to[..len], src, dst).is_valid() && to[len..].iter().all(|byte| *byte == 0xee));
    assert_eq!(write_error(&mut [0; HEADER_LEN - 1], TIME_EXCEEDED, 0, 0, &[1], src, dst), 0);
}

proptest! {
    #[test]
    fn written_error_parses_back(
        code: u8,
        pointer: u32,
        ends: [[u8; 16]; 2],
        packet in prop::collection::vec(any::<u8>(), 0..100),
        room in 8..120usize,
    ) {
        let [src, dst] = ends.map(Ipv6Addr::from);
        let mut to = vec![0xee; room];
        let len = write_error(&mut to, PARAMETER_PROBLEM, code, pointer, &packet, src, dst);
        prop_assert_eq!(len, room.min(8 + packet.len()));
        let quoted = &packet[..len - 8];
        prop_assert_eq!(Icmpv6::parse(&to[..len]), Ok(Icmpv6::ParameterProblem { code, pointer, quoted }));
        let theirs = etherparse::Icmpv6Slice::from_slice(&to[..len]).unwrap();
        prop_assert!(theirs.is_checksum_valid(src.octets(), dst.octets()));
    }

    #[test]
    fn reply_checksum_is_valid(
        id: u16,
        seq: u16,
        ends: [[u8; 16]; 2],
        data in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        let ping = etherparse::Icmpv6Type::EchoRequest(etherparse::IcmpEchoHeader { id, seq });
        let ping = etherparse::Icmpv6Header::with_checksum(ping, ends[0], ends[1], &data).unwrap();
        let mut message = [&ping.to_bytes()[..], &data].concat();
        prop_assert_eq!(Icmpv6::parse(&message), Ok(Icmpv6::EchoRequest { ident: id, seq }));
        make_echo_reply(message.first_chunk_mut().unwrap());
        prop_assert_eq!(Icmpv6::parse(&message), Ok(Icmpv6::EchoReply { ident: id, seq }));
        let theirs = etherparse::Icmpv6Slice::from_slice(&message).unwrap();
        prop_assert!(theirs.is_checksum_valid(ends[1], ends[0]));
    }

    #[test]
    fn discovery_messages_round_trip(
        flags: [bool; 3],
        mut target: [u8; 16],
        ends: [[u8; 16]; 2],
        mac in prop::option::of(any::<[u8; 6]>().prop_map(MacAddr)),
        mut to: [u8; 32],
    ) {
        target[0] &= 0x7f;
        let (target, [src, dst], [router, solicited, replaces]) = (target.into(), ends.map(Ipv6Addr::from), flags);
        let expected_len = if mac.is_some() { 32 } else { 24 };
        let solicit = NeighborSolicit { target, source_link: mac };
        prop_assert_eq!(solicit.write(&mut to, src, dst), expected_len);
        prop_assert!(sum(&to[..expected_len], src, dst).is_valid());
        prop_assert_eq!(Icmpv6::parse(&to[..expected_len]), Ok(Icmpv6::NeighborSolicit(solicit)));
        let advert = NeighborAdvert { router, solicited, replaces, target, target_link: mac };
        prop_assert_eq!(advert.write(&mut to, src, dst), expected_len);
        prop_assert!(sum(&to[..expected_len], src, dst).is_valid());
        prop_assert_eq!(Icmpv6::parse(&to[..expected_len]), Ok(Icmpv6::NeighborAdvert(advert)));
    }

    /// Generates types of neighbour and listener discovery, with options that are often truncated.
    #[test]
    fn arbitrary_bytes_are_parsed(
        kind in prop_oneof![Just(130u8), Just(131), Just(134), Just(135), Just(136), any::<u8>()],
        code in 0..2u8,
        bytes in prop::collection::vec(prop_oneof![0..3u8, any::<u8>()], 0..120),
    ) {
        let message = [&[kind, code][..], &bytes].concat();
        let read = Icmpv6::parse(&message);
        prop_assert!(read.is_ok() || message.len() < 8 || matches!(kind, 130 | 131 | 134 | 135 | 136));
        prop_assert!(read.is_err() || !matches!(kind, 135 | 136) || (message.len() >= 24 && code == 0));
    }
}
