//! Answers of the network layer: echo replies and ICMP errors.

use offcore_stats::time::Time;
use offcore_tcp::proto::{AppId, DropReason, Verdict};
use offcore_wire::{Icmpv4, Icmpv6, IpProtocol, Ipv4Packet, Ipv6Packet, Sum, TcpFlags, TcpHeader};

use crate::station::{OWN_MAC, PEER_MAC, Station, introduce, packet};

const PEERS: [&str; 2] = ["10.0.0.9", "2001:db8::9"];
const OWN: [&str; 2] = ["10.0.0.2", "2001:db8::2"];

fn host() -> Station {
    let mut station = Station::new(&["10.0.0.2/24", "2001:db8::2/64"], &[]);
    station.run_to(Time::from_secs(3));
    introduce(&mut station, &PEERS);
    station
}

/// Returns an ICMP message between two addresses, with its checksum.
fn message(src: &str, dst: &str, kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut message = [&[kind, 0, 0, 0, 0x12, 0x34, 0, 1][..], payload].concat();
    let pseudo = match (src.parse(), dst.parse()) {
        (Ok(src), Ok(dst)) => Sum::pseudo_v6(src, dst, IpProtocol::ICMPV6, message.len() as u32),
        _ => Sum::ZERO,
    };
    let sum = (pseudo + Sum::of(&message)).checksum();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    message
}

/// Returns a destination options header of `8 * (units + 1)` bytes that precedes header `next`.
fn padding(next: u8, units: u8) -> Vec<u8> {
    let mut header = vec![0; 8 * (usize::from(units) + 1)];
    (header[0], header[1]) = (next, units);
    header
}

#[test]
fn echo_reply_uses_default_hop_limit() {
    let mut station = host();
    station.receive(&packet(PEERS[0], OWN[0], 1, 3, &message("", "", 8, b"ping")));
    station.receive(&packet(PEERS[1], OWN[1], 58, 255, &message(PEERS[1], OWN[1], 128, b"ping")));
    let replies = station.frames();
    let v4 = Ipv4Packet::new_checked(&replies[0][14..]).unwrap();
    assert!(v4.verify_checksum());
    assert_eq!((v4.ttl(), v4.dst().to_string(), v4.payload()[0]), (64, PEERS[0].into(), 0));
    let v6 = Ipv6Packet::new_checked(&replies[1][14..]).unwrap();
    assert_eq!((v6.hop_limit(), v6.dst().to_string(), v6.payload()[0]), (64, PEERS[1].into(), 129));
}

#[test]
fn long_extension_headers_are_parsed() {
    let mut station = host();
    station.stack.listen(AppId::OWN, None, 80, 4, false).unwrap();
    let echo = message(PEERS[1], OWN[1], 128, b"ping");
    let header = TcpHeader {
        src_port: 4000,
        dst_port: 80,
        seq: 1,
        ack: 0,
        flags: TcpFlags::SYN,
        window: 1000,
        urgent: 0,
    };
    let mut syn = [0; 20];
    header.write(&mut syn, 0);
    let pseudo = Sum::pseudo_v6(PEERS[1].parse().unwrap(), OWN[1].parse().unwrap(), IpProtocol::TCP, 20);
    let sum = (pseudo + Sum::of(&syn)).checksum();
    syn[16..18].copy_from_slice(&sum.to_be_bytes());
    for units in [0, 7, 8, 9, 10, 60, 150] {
        let ping = [padding(58, units), echo.clone()].concat();
        let verdict = station.receive(&packet(PEERS[1], OWN[1], 60, 9, &ping));
        assert_eq!(verdict, Verdict::Reply, "{units} units");
        let mut wrong = packet(PEERS[1], OWN[1], 60, 9, &ping);
        *wrong.last_mut().unwrap() ^= 1;
        assert_eq!(station.receive(&wrong), Verdict::Drop(DropReason::Checksum), "{units} units");
        station.sent.clear();
        station.receive(&packet(PEERS[1], OWN[1], 60, 9, &[padding(6, units), syn.to_vec()].concat()));
        let answers = station.frames();
        assert_eq!(answers.len(), 1, "{units} units");
        assert_eq!(answers[0][14 + 40 + 13] & 0x12, 0x12, "a SYN-ACK");
    }
    // Several extension headers follow each other.
    let chain = [padding(60, 20), padding(60, 30), padding(58, 40), echo].concat();
    assert_eq!(station.receive(&packet(PEERS[1], OWN[1], 60, 9, &chain)), Verdict::Reply);
}

/// Returns the code and the pointer of the sent error.
fn parameter_problem(station: &mut Station) -> Option<(u8, u32)> {
    let frames = station.frames();
    assert!(frames.len() <= 1, "{frames:?}");
    let frame = frames.first()?;
    assert_eq!((&frame[..6], &frame[6..12]), (&PEER_MAC.0[..], &OWN_MAC.0[..]));
    let ip = Ipv6Packet::new_checked(&frame[14..]).unwrap();
    assert_eq!((ip.src().to_string(), ip.dst().to_string()), (OWN[1].into(), PEERS[1].into()));
    let pseudo = Sum::pseudo_v6(ip.src(), ip.dst(), IpProtocol::ICMPV6, ip.payload().len() as u32);
    assert!((pseudo + Sum::of(ip.payload())).is_valid());
    match Icmpv6::parse(ip.payload()).unwrap() {
        Icmpv6::ParameterProblem { code, pointer, quoted } => {
            assert_eq!(quoted[0] >> 4, 6, "the packet is quoted from its header on");
            Some((code, pointer))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn unknown_ipv6_headers_cause_parameter_problem() {
    let mut station = host();
    let mut of = |dst: &str, first: u8, payload: &[u8]| {
        station.receive(&packet(PEERS[1], dst, first, 9, payload));
        parameter_problem(&mut station)
    };
    assert_eq!(of(OWN[1], 132, &[0; 20]), Some((1, 6)), "SCTP");
    assert_eq!(of(OWN[1], 253, &[0; 20]), Some((1, 6)), "an experiment's header");
    assert_eq!(of(OWN[1], 60, &[padding(89, 0), vec![0; 8]].concat()), Some((1, 40)));
    assert_eq!(of(OWN[1], 59, &[0; 20]), None, "no next header");
    let option = |kind| [58, 0, kind, 4, 0, 0, 0, 0];
    assert_eq!(of(OWN[1], 60, &option(0x85)), Some((2, 42)));
    assert_eq!(of(OWN[1], 60, &option(0x45)), None);
    assert_eq!(of("ff02::1", 60, &option(0x85)), Some((2, 42)), "even to a group (RFC 8200, 4.2)");
    assert_eq!(of("ff02::1", 60, &option(0xc5)), None);
    assert_eq!(of("ff02::1", 132, &[0; 20]), None);
    assert_eq!(of("2001:db8::77", 132, &[0; 20]), None, "another host's packet");
}

#[test]
fn unknown_ipv4_protocols_are_unreachable() {
    let mut station = host();
    assert_eq!(
        station.receive(&packet(PEERS[0], OWN[0], 132, 9, &[0; 20])),
        Verdict::Drop(DropReason::NoConnection)
    );
    let frames = station.frames();
    let ip = Ipv4Packet::new_checked(&frames[0][14..]).unwrap();
    assert_eq!((frames.len(), ip.dst().to_string()), (1, PEERS[0].into()));
    let Ok(Icmpv4::Unreachable { code: 2, quoted, .. }) = Icmpv4::parse(ip.payload()) else {
        panic!("{ip:?}")
    };
    assert_eq!(quoted[9], 132);
    station.receive(&packet(PEERS[0], "255.255.255.255", 132, 9, &[0; 20]));
    assert_eq!(station.frames(), [[0; 0]; 0], "a broadcast is never answered");
}

#[test]
fn errors_are_rate_limited() {
    let mut station = host();
    for _ in 0..10_000 {
        station.receive(&packet(PEERS[0], OWN[0], 132, 9, &[0; 20]));
        station.receive(&packet(PEERS[1], OWN[1], 132, 9, &[0; 20]));
    }
    assert!((100..=1000).contains(&station.sent.len()), "{}", station.sent.len());
}

/// Errors for programs that send to closed ports of their own host do not consume the rate limit of errors for peers.
#[test]
fn loopback_errors_bypass_rate_limit() {
    let mut station = host();
    let loopback = station.stack.add_loopback();
    for _ in 0..10_000 {
        let mut frame = packet(OWN[0], OWN[0], 132, 9, &[0; 20]);
        frame[..6].copy_from_slice(&[0; 6]);
        station.receive_by(loopback, &frame);
    }
    assert_eq!(station.frames().len(), 10_000);
    station.receive(&packet(PEERS[0], OWN[0], 132, 9, &[0; 20]));
    assert_eq!(station.frames().len(), 1);
}
