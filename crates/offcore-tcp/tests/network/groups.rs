//! Multicast group reports (IGMP and MLD).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, CallError, ConnId, Membership, Reuse, Verdict};
use offcore_wire::icmpv6::listener;
use offcore_wire::{IpProtocol, Ipv4Header, Ipv6Header, Ipv6Packet, MacAddr, Sum, igmp, ipv4, ipv6};

use crate::station::{PEER_MAC, Station, address};

const IS_EXCLUDE: u8 = 2;
const TO_INCLUDE: u8 = 3;
const TO_EXCLUDE: u8 = 4;
const LINK_LOCAL: &str = "fe80::ff:fe00:1";

/// A sent report: its time, its addresses and its records.
#[derive(Debug, PartialEq)]
struct Report {
    at: Time,
    from: IpAddr,
    to: IpAddr,
    records: Vec<(u8, IpAddr)>,
}

/// Returns the sent reports of all versions in order. The record of an older version has the type of its message.
fn reports(station: &mut Station) -> Vec<Report> {
    let sent = std::mem::take(&mut station.sent);
    sent.iter().filter_map(|(at, frame)| read_v6(*at, frame).or_else(|| read_v4(*at, frame))).collect()
}

fn read_v6(at: Time, frame: &[u8]) -> Option<Report> {
    let ip = Ipv6Packet::new_checked(frame.get(14..).filter(|_| frame[12..14] == [0x86, 0xdd])?).ok()?;
    let transport = ip.transport().ok()?;
    let message = transport.payload;
    let kind = *message.first()?;
    if transport.protocol != IpProtocol::ICMPV6 || !matches!(kind, 131 | 132 | 143) {
        return None;
    }
    assert_eq!(
        (ip.hop_limit(), ip.payload()[..8].to_vec()),
        (1, vec![58, 0, 5, 2, 0, 0, 1, 0]),
        "router alert"
    );
    assert_eq!(frame[..6], ipv6::multicast_mac(ip.dst()).0);
    let pseudo = Sum::pseudo_v6(ip.src(), ip.dst(), IpProtocol::ICMPV6, message.len() as u32);
    assert!((pseudo + Sum::of(message)).is_valid());
    let group = |bytes: &[u8]| IpAddr::from(Ipv6Addr::from(*bytes.first_chunk::<16>().unwrap()));
    let records = match kind {
        143 => message[8..].chunks(20).map(|record| (record[0], group(&record[4..]))).collect(),
        _ => vec![(kind, group(&message[8..]))],
    };
    Some(Report { at, from: ip.src().into(), to: ip.dst().into(), records })
}

fn read_v4(at: Time, frame: &[u8]) -> Option<Report> {
    let ip =
        offcore_wire::Ipv4Packet::new_checked(frame.get(14..).filter(|_| frame[12..14] == [8, 0])?).ok()?;
    if ip.protocol() != IpProtocol::IGMP {
        return None;
    }
    assert!(ip.verify_checksum() && Sum::of(ip.payload()).is_valid());
    assert_eq!((ip.ttl(), ip.options()), (1, &[0x94, 4, 0, 0][..]), "router alert");
    assert_eq!(frame[..6], ipv4::multicast_mac(ip.dst()).0);
    let group = |bytes: &[u8]| IpAddr::from(Ipv4Addr::from(*bytes.first_chunk::<4>().unwrap()));
    let message = ip.payload();
    let records = match message[0] {
        igmp::REPORT_V3 => message[8..].chunks(8).map(|record| (record[0], group(&record[4..]))).collect(),
        kind => vec![(kind, group(&message[4..]))],
    };
    Some(Report { at, from: ip.src().into(), to: ip.dst().into(), records })
}

/// Returns a frame with an MLD query from a router.
fn query_v6(from: &str, hops: u8, within: u16, group: &str, more: &[u8]) -> Vec<u8> {
    let group: Ipv6Addr = group.parse().unwrap();
    let dst = if group.is_unspecified() { "ff02::1".parse().unwrap() } else { group };
    let src: Ipv6Addr = from.parse().unwrap();
    let [high, low] = within.to_be_bytes();
    let mut message = [&[listener::QUERY, 0, 0, 0, high, low, 0, 0][..], &group.octets(), more].concat();
    let pseudo = Sum::pseudo_v6(src, dst, IpProtocol::ICMPV6, message.len() as u32);
    let sum = (pseudo + Sum::of(&message)).checksum();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let payload = [&listener::ROUTER_ALERT[..], &message].concat();
    let header = Ipv6Header {
        src,
        dst,
        next_header: IpProtocol::HOP_BY_HOP,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: hops,
        payload_len: payload.len() as u16,
    };
    let mut ip = [0; 40];
    header.write(&mut ip);
    [&ipv6::multicast_mac(dst).0[..], &PEER_MAC.0, &[0x86, 0xdd], &ip, &payload].concat()
}

/// Returns a frame with an IGMP message from a router.
fn message_v4(to: Ipv4Addr, mut message: Vec<u8>) -> Vec<u8> {
    let sum = Sum::of(&message).checksum();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let header = Ipv4Header {
        src: [10, 0, 0, 254].into(),
        dst: to,
        protocol: IpProtocol::IGMP,
        dscp_ecn: 0xc0,
        ident: 0,
        dont_fragment: true,
        ttl: 1,
        total_len: 24 + message.len() as u16,
    };
    let mut ip = [0; ipv4::ALERT_LEN];
    header.write_with_router_alert(&mut ip);
    let MacAddr(mac) = ipv4::multicast_mac(to);
    [&mac[..], &PEER_MAC.0, &[8, 0], &ip, &message].concat()
}

fn solicited_nodes() -> Vec<IpAddr> {
    ["ff02::1:ff00:1", "ff02::1:ff00:2"].map(address).to_vec()
}

/// Returns the groups of all records, sorted, and checks that all records have type `kind`.
fn groups_of(reports: &[Report], kind: u8) -> Vec<IpAddr> {
    let records = reports.iter().flat_map(|report| &report.records);
    let mut groups: Vec<IpAddr> =
        records.inspect(|record| assert_eq!(record.0, kind)).map(|record| record.1).collect();
    groups.sort();
    groups
}

#[test]
fn solicited_nodes_are_reported_first() {
    let mut station = Station::new(&["2001:db8::2/64"], &[]);
    let question = station.sent.iter().position(|(_, frame)| frame[20] == IpProtocol::ICMPV6.0);
    assert_eq!(question, Some(1), "the report is first, then come the questions who has the addresses");
    let first = reports(&mut station);
    assert_eq!(groups_of(&first, TO_EXCLUDE), solicited_nodes());
    assert!(first.iter().all(|report| report.from == address("::") && report.to == address("ff02::16")));
    // RFC 3810, 8.12 and 9.1: a report is repeated within a second.
    station.run_to(Time::from_secs(1));
    let second = reports(&mut station);
    assert_eq!(groups_of(&second, TO_EXCLUDE), solicited_nodes());
    // The link-local address is valid now. Reports are sent again because routers ignore those from the unspecified
    // address.
    station.run_to(Time::from_secs(10));
    let third = reports(&mut station);
    assert_eq!(groups_of(&third, TO_EXCLUDE), solicited_nodes());
    assert!(third.iter().all(|report| report.from == address(LINK_LOCAL)), "{third:?}");
}

#[test]
fn general_query_is_answered_in_time() {
    let mut station = Station::new(&["2001:db8::2/64"], &[]);
    station.run_to(Time::from_secs(10));
    reports(&mut station);
    assert_eq!(station.receive(&query_v6("fe80::9", 1, 5000, "::", &[2, 125, 0, 0])), Verdict::Consumed);
    station.run_to(Time::from_secs(15));
    let answers = reports(&mut station);
    assert_eq!(groups_of(&answers, IS_EXCLUDE), solicited_nodes());
    assert!(answers.iter().all(|report| (Time::from_secs(10)..Time::from_secs(15)).contains(&report.at)));
    // A group-specific query is answered with a report for that group.
    station.receive(&query_v6("fe80::9", 1, 1000, "ff02::1:ff00:2", &[2, 125, 0, 0]));
    station.run_to(Time::from_secs(20));
    assert_eq!(groups_of(&reports(&mut station), IS_EXCLUDE), [address("ff02::1:ff00:2")]);
}

#[test]
fn off_link_queries_are_ignored() {
    let mut station = Station::new(&["2001:db8::2/64"], &[]);
    station.run_to(Time::from_secs(10));
    reports(&mut station);
    for (from, hops) in [("2001:db8::9", 1), ("fe80::9", 255), ("::", 1)] {
        let verdict = station.receive(&query_v6(from, hops, 1000, "::", &[2, 125, 0, 0]));
        assert!(matches!(verdict, Verdict::Drop(_)), "{from}");
    }
    station.run_to(Time::from_secs(20));
    assert_eq!(reports(&mut station), []);
}

#[test]
fn mldv1_querier_gets_v1_reports() {
    let mut station = Station::new(&["2001:db8::2/64"], &[]);
    station.run_to(Time::from_secs(10));
    reports(&mut station);
    station.receive(&query_v6("fe80::9", 1, 1000, "::", &[]));
    station.run_to(Time::from_secs(12));
    let mut answers = reports(&mut station);
    answers.sort_by_key(|report| report.to);
    assert_eq!(groups_of(&answers, listener::REPORT_V1), solicited_nodes());
    assert!(answers.iter().all(|report| report.to == report.records[0].1), "each to its group");
    // A version 1 router is considered gone 260 s after its last query.
    station.run_to(Time::from_secs(271));
    station.receive(&query_v6("fe80::9", 1, 1000, "::", &[2, 125, 0, 0]));
    station.run_to(Time::from_secs(273));
    assert_eq!(groups_of(&reports(&mut station), IS_EXCLUDE), solicited_nodes());
}

/// Opens a datagram socket.
fn socket(station: &mut Station, user: u32) -> ConnId {
    let reuse = Reuse { user, ..Reuse::default() };
    station.stack.open_reused_datagrams(AppId::OWN, None, 0, reuse).unwrap()
}

/// Joins a group on the interface of the route to it.
fn join(station: &mut Station, socket: ConnId, group: IpAddr) -> Result<(), CallError> {
    let membership = Membership { group, index: 0, address: None };
    station.stack.join_group(station.now, socket, &membership)
}

fn leave(station: &mut Station, socket: ConnId, group: IpAddr) -> Result<(), CallError> {
    let membership = Membership { group, index: 0, address: None };
    station.stack.leave_group(station.now, socket, &membership)
}

#[test]
fn joined_group_is_reported_until_left() {
    let group = address("239.1.2.3");
    let mut station = Station::new(&["10.0.0.2/24"], &[]);
    station.run_to(Time::from_secs(1));
    assert_eq!(reports(&mut station), [], "the group of all systems is never reported");
    let [one, other] = [1, 2].map(|user| socket(&mut station, user));
    assert_eq!(join(&mut station, one, group), Ok(()));
    let by_address = Membership { group, index: 0, address: Some(address("10.0.0.2")) };
    assert_eq!(station.stack.join_group(station.now, other, &by_address), Ok(()));
    assert_eq!(station.stack.join_group(station.now, other, &by_address), Err(CallError::InUse));
    let elsewhere = Membership { address: Some(address("10.0.0.3")), ..by_address };
    assert_eq!(station.stack.join_group(station.now, one, &elsewhere), Err(CallError::NoRoute));
    let unknown = Membership { group, index: 7, address: None };
    assert_eq!(station.stack.join_group(station.now, one, &unknown), Err(CallError::NoRoute));
    station.run_to(Time::from_secs(5));
    let joined = reports(&mut station);
    assert_eq!(groups_of(&joined, TO_EXCLUDE), [group, group], "twice, for two joins");
    assert!(
        joined.iter().all(|report| report.from == address("10.0.0.2") && report.to == address("224.0.0.22"))
    );
    station
        .receive(&message_v4([224, 0, 0, 1].into(), vec![igmp::QUERY, 10, 0, 0, 0, 0, 0, 0, 2, 125, 0, 0]));
    station.run_to(Time::from_secs(10));
    assert_eq!(groups_of(&reports(&mut station), IS_EXCLUDE), [group]);
    assert_eq!(leave(&mut station, one, group), Ok(()));
    assert_eq!(leave(&mut station, one, group), Err(CallError::NotOurs));
    station.run_to(Time::from_secs(15));
    assert_eq!(reports(&mut station), [], "the other socket is still in the group");
    station.close(other);
    station.run_to(Time::from_secs(20));
    assert_eq!(groups_of(&reports(&mut station), TO_INCLUDE), [group, group], "a closed socket has left");
    assert_eq!(join(&mut station, other, group), Err(CallError::Gone));
}

#[test]
fn igmp_falls_back_to_querier_version() {
    let group = address("239.1.2.3");
    let mut station = Station::new(&["10.0.0.2/24"], &[]);
    let socket = socket(&mut station, 1);
    join(&mut station, socket, group).unwrap();
    station.run_to(Time::from_secs(5));
    let kinds = |station: &mut Station| -> Vec<(u8, IpAddr)> {
        reports(station).iter().map(|report| (report.records[0].0, report.to)).collect()
    };
    kinds(&mut station);
    let query = |code| message_v4([224, 0, 0, 1].into(), vec![igmp::QUERY, code, 0, 0, 0, 0, 0, 0]);
    station.receive(&query(10));
    station.run_to(Time::from_secs(10));
    assert_eq!(kinds(&mut station), [(igmp::REPORT_V2, group)]);
    // The report of another host suppresses the own report.
    station.receive(&query(10));
    station.receive(&message_v4([239, 1, 2, 3].into(), vec![igmp::REPORT_V2, 0, 0, 0, 239, 1, 2, 3]));
    station.run_to(Time::from_secs(15));
    assert_eq!(kinds(&mut station), []);
    station.receive(&query(0));
    station.run_to(Time::from_secs(30));
    assert_eq!(kinds(&mut station), [(igmp::REPORT_V1, group)]);
    leave(&mut station, socket, group).unwrap();
    station.run_to(Time::from_secs(60));
    assert_eq!(kinds(&mut station), [], "version 1 has no word for it");
    // Version 2 is used again after 260 s without a version 1 query.
    station.run_to(Time::from_secs(400));
    station.receive(&query(10));
    join(&mut station, socket, group).unwrap();
    station.run_to(Time::from_secs(420));
    assert_eq!(kinds(&mut station), [(igmp::REPORT_V2, group); 2]);
    leave(&mut station, socket, group).unwrap();
    station.run_to(Time::from_secs(440));
    assert_eq!(kinds(&mut station), [(igmp::LEAVE, address("224.0.0.2"))]);
}

#[test]
fn query_flood_gets_ten_answers_a_second() {
    let mut station = Station::new(&["2001:db8::2/64"], &[]);
    station.run_to(Time::from_secs(10));
    reports(&mut station);
    for _ in 0..10_000 {
        station.receive(&query_v6("fe80::9", 1, 0, "::", &[2, 125, 0, 0]));
        station.run_to(station.now + Micros::new(100));
    }
    assert!(reports(&mut station).len() <= 11);
}

#[test]
fn group_memberships_are_limited() {
    let mut station = Station::new(&["10.0.0.2/24", "2001:db8::2/64"], &[]);
    let v4 = |number: u8| IpAddr::from([239, 1, 0, number]);
    let v6 = |number: u16| IpAddr::from([0xff05, 0, 0, 0, 0, 0, 0, number]);
    let [one, other, third] = [1, 2, 3].map(|user| socket(&mut station, user));
    for number in 0..20 {
        join(&mut station, one, v4(number)).unwrap();
    }
    assert_eq!(join(&mut station, one, v4(20)), Err(CallError::TooMany), "of a socket");
    assert_eq!(join(&mut station, one, address("10.0.0.1")), Err(CallError::NotOurs));
    // A user's groups leave room for other users.
    let all: u16 =
        (0..).find(|number| join(&mut station, one, v6(*number)) == Err(CallError::TooMany)).unwrap();
    assert_eq!(all, 512 - 20);
    leave(&mut station, one, v4(5)).unwrap();
    join(&mut station, one, v6(all)).unwrap();
    let more: u16 =
        (1000..).find(|number| join(&mut station, other, v6(*number)) == Err(CallError::TooMany)).unwrap();
    assert_eq!(more - 1000, 512);
    // The shares of three users are smaller.
    let more: u16 =
        (2000..).find(|number| join(&mut station, third, v6(*number)) == Err(CallError::TooMany)).unwrap();
    assert_eq!(more - 2000, 1024 / 3);
    leave(&mut station, other, v6(1000)).unwrap();
    assert_eq!(join(&mut station, other, v6(1000)), Err(CallError::TooMany));
    station.close(one);
    assert_eq!(join(&mut station, third, v6(5000)), Ok(()));
}
