//! Router advertisements: addresses, routes and their lifetimes.

use std::net::{IpAddr, Ipv6Addr};

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, CallError, Event, IfaceInfo, Origin, Verdict};
use offcore_wire::{Icmpv6, IpProtocol, Ipv6Packet, MacAddr, NeighborAdvert, NeighborSolicit, Sum, ipv6};

use crate::dhcp::SECOND;
use crate::station::{OWN_MAC, PEER_MAC, Station, address, packet};

const LINK_LOCAL: &str = "fe80::ff:fe00:1";
const ROUTER: &str = "fe80::99";
const OURS: &str = "2001:db8:1::ff:fe00:1";
const FAR: &str = "2001:db8:9::1";
const HOUR: u32 = 3600;

/// Returns a prefix option with a length of 64 bits and the on-link and autonomous flags.
fn prefix(text: &str, valid: u32, preferred: u32) -> Vec<u8> {
    let mut option = vec![0; 32];
    option[..4].copy_from_slice(&[3, 4, 64, 0xc0]);
    option[4..8].copy_from_slice(&valid.to_be_bytes());
    option[8..12].copy_from_slice(&preferred.to_be_bytes());
    option[16..].copy_from_slice(&text.parse::<Ipv6Addr>().unwrap().octets());
    option
}

fn message_from(src: &str, dst: &str, hops: u8, mut message: Vec<u8>) -> Vec<u8> {
    let [from, to] = [src, dst].map(|text| text.parse().unwrap());
    let sum = Sum::pseudo_v6(from, to, IpProtocol::ICMPV6, message.len() as u32) + Sum::of(&message);
    message[2..4].copy_from_slice(&sum.checksum().to_be_bytes());
    packet(src, dst, 58, hops, &message)
}

/// Returns an advertisement of a router with a lifetime in seconds and flags.
fn advert(router: &str, lifetime: u16, flags: u8, options: &[u8]) -> Vec<u8> {
    let [high, low] = lifetime.to_be_bytes();
    let head = [134, 0, 0, 0, 64, flags, high, low, 0, 0, 0, 0, 0, 0, 0, 0];
    message_from(router, "ff02::1", 255, [&head[..], options].concat())
}

/// Takes the neighbour discovery messages that were sent since the last call: times, sources and destinations, and
/// contents.
fn sent(station: &mut Station) -> Vec<(Time, [Ipv6Addr; 2], Vec<u8>)> {
    let frames = std::mem::take(&mut station.sent);
    let read = |(at, frame): &(Time, Vec<u8>)| {
        let ip = Ipv6Packet::new_checked(frame.get(14..).filter(|_| frame[12..14] == [0x86, 0xdd])?).ok()?;
        let is_discovery = ip.next_header() == IpProtocol::ICMPV6;
        is_discovery.then(|| (*at, [ip.src(), ip.dst()], ip.payload().to_vec()))
    };
    frames.iter().filter_map(read).collect()
}

/// Returns the times of router solicitations.
fn solicitations(station: &mut Station) -> Vec<Time> {
    sent(station).into_iter().filter(|(.., message)| message[0] == 133).map(|(at, ..)| at).collect()
}

/// Answers neighbour solicitations, except for `silent` targets. Returns all solicited addresses.
fn answer(station: &mut Station, silent: &[&str]) -> Vec<IpAddr> {
    let mut asked = Vec::new();
    for (_, [from, _], message) in sent(station) {
        let Ok(Icmpv6::NeighborSolicit(NeighborSolicit { target, .. })) = Icmpv6::parse(&message) else {
            continue;
        };
        if from.is_unspecified() {
            continue;
        }
        asked.push(target.into());
        if silent.contains(&target.to_string().as_str()) {
            continue;
        }
        let advert = NeighborAdvert {
            router: true,
            solicited: true,
            replaces: true,
            target,
            target_link: Some(PEER_MAC),
        };
        let mut bytes = [0; 32];
        let len = advert.write(&mut bytes, target, from);
        station.receive(&packet(&target.to_string(), &from.to_string(), 58, 255, &bytes[..len]));
    }
    asked
}

fn info(station: &Station) -> IfaceInfo {
    station.stack.interfaces(station.now).pop().unwrap()
}

/// Returns the addresses that were made from prefixes, with their states.
fn made(station: &Station) -> Vec<(IpAddr, &'static str)> {
    let own = info(station).addresses.into_iter().filter(|own| own.origin == Origin::Slaac);
    own.map(|own| (own.prefix.address, own.state)).collect()
}

fn answers(station: &mut Station, to: &str) -> bool {
    let echo = message_from("fe80::5", to, 64, vec![128, 0, 0, 0, 1, 2, 3, 4]);
    let answered = station.receive(&echo) == Verdict::Reply;
    station.sent.clear();
    answered
}

/// Returns an interface that has sent its first solicitation.
fn asking() -> Station {
    let mut station = Station::new(&[], &[]);
    station.stack.start_slaac(Time::from_micros(1), 0, &mut station.out);
    station.run_to(Time::from_millis(1500));
    station
}

/// Returns an interface with one address, valid for two hours and preferred for one hour, and a router with a lifetime
/// of 30 minutes.
fn configured() -> Station {
    let mut station = asking();
    station.receive(&advert(ROUTER, 1800, 0, &prefix("2001:db8:1::", 2 * HOUR, HOUR)));
    station.run_to(Time::from_secs(3));
    assert_eq!(made(&station), [(address(OURS), "preferred")]);
    station.sent.clear();
    station.out.events.clear();
    station
}

/// Returns the neighbour that is solicited for a packet to `to`.
fn next_hop(station: &mut Station, to: &str) -> Option<IpAddr> {
    station.sent.clear();
    let to = format!("[{to}]:80").parse().unwrap();
    station.stack.connect(station.now, AppId::OWN, None, to, &mut station.out).ok()?;
    station.take_out();
    answer(station, &[]).pop()
}

#[test]
fn slaac_forms_address() {
    let mut station = asking();
    let elsewhere = address("2001:db8:2::1");
    assert_eq!(station.stack.awaits_address(), Some(0));
    assert!(station.stack.awaits_route(elsewhere) && !station.stack.awaits_route(address("192.0.2.1")));
    let asked = sent(&mut station);
    let (_, from_to, solicit) = asked.iter().find(|(.., message)| message[0] == 133).unwrap();
    assert_eq!(from_to.map(IpAddr::V6), [address(LINK_LOCAL), address("ff02::2")]);
    assert_eq!(solicit[8..], [&[1, 1][..], &OWN_MAC.0].concat());
    station.receive(&advert(ROUTER, 1800, 0, &prefix("2001:db8:1::", 2 * HOUR, HOUR)));
    let question = sent(&mut station).pop().unwrap();
    let own = OURS.parse().unwrap();
    assert_eq!(question.1, [Ipv6Addr::UNSPECIFIED, ipv6::solicited_node(own)], "another host may have it");
    assert!(!answers(&mut station, OURS) && station.stack.awaits_address().is_some());
    station.run_to(Time::from_secs(3));
    assert!(answers(&mut station, OURS) && station.stack.awaits_address().is_none());
    assert!(!station.stack.awaits_route(elsewhere));
    assert_eq!(station.out.events, [Event::Address { iface: 0, address: address(OURS), held: true }]);
    assert_eq!(info(&station).gateways, [address(ROUTER)]);
    assert!(station.stack.interfaces(station.now)[0].addresses.iter().all(|own| own.state == "preferred"));
}

#[test]
fn router_solicitation_backs_off() {
    let mut station = asking();
    station.run_to(Time::from_secs(300));
    let times = solicitations(&mut station);
    let gaps: Vec<Micros> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let near = |gap: Micros, wait: u64| (wait * 9 / 10..=wait * 11 / 10).contains(&(gap.as_millis() / 10));
    assert!(gaps.len() >= 5, "{gaps:?}");
    assert!(gaps.iter().zip([400, 800, 1600, 3200, 6400]).all(|(gap, wait)| near(*gap, wait)), "{gaps:?}");
}

#[test]
fn default_router_lifetime_expires() {
    let mut station = configured();
    assert_eq!(next_hop(&mut station, FAR), Some(address(ROUTER)));
    station.run_to(Time::from_secs(1799));
    assert_eq!(solicitations(&mut station), Vec::<Time>::new());
    station.run_to(Time::from_secs(1804));
    let to = format!("[{FAR}]:80").parse().unwrap();
    let refused = station.stack.connect(station.now, AppId::OWN, None, to, &mut station.out);
    assert_eq!(refused, Err(CallError::NoRoute));
    assert_eq!(solicitations(&mut station).len(), 1, "routers are asked again");
    // A lifetime of 0 means that the router is not a default router.
    station.receive(&advert(ROUTER, 1800, 0, &[]));
    assert_eq!(info(&station).gateways, [address(ROUTER)]);
    station.receive(&advert(ROUTER, 0, 0, &[]));
    assert_eq!(info(&station).gateways, Vec::<IpAddr>::new());
}

#[test]
fn on_link_prefix_selects_next_hop() {
    let mut station = configured();
    assert_eq!(next_hop(&mut station, "2001:db8:1::77"), Some(address("2001:db8:1::77")));
    let mut off_link = prefix("2001:db8:2::", HOUR, HOUR);
    off_link[3] = 0x40;
    station.receive(&advert(ROUTER, 1800, 0, &off_link));
    station.run_to(Time::from_secs(6));
    assert_eq!(made(&station).len(), 2);
    assert_eq!(next_hop(&mut station, "2001:db8:2::77"), Some(address(ROUTER)), "RFC 5942");
    let mut no_address = prefix("2001:db8:3::", HOUR, HOUR);
    no_address[3] = 0x80;
    station.receive(&advert(ROUTER, 1800, 0, &no_address));
    assert_eq!(made(&station).len(), 2);
    assert_eq!(next_hop(&mut station, "2001:db8:3::77"), Some(address("2001:db8:3::77")));
}

#[test]
fn invalid_router_advertisements_are_dropped() {
    let mut station = asking();
    let option = prefix("2001:db8:1::", HOUR, HOUR);
    let head = [134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
    let whole = [&head[..], &option].concat();
    let mut code = whole.clone();
    code[1] = 1;
    let mut no_length = whole.clone();
    no_length[17] = 0;
    for (what, src, hops, message) in [
        ("hop limit", ROUTER, 64, whole.clone()),
        ("source", "2001:db8::1", 255, whole.clone()),
        ("code", ROUTER, 255, code),
        ("option without length", ROUTER, 255, no_length),
        ("cut", ROUTER, 255, whole[..44].to_vec()),
    ] {
        let verdict = station.receive(&message_from(src, "ff02::1", hops, message));
        assert!(matches!(verdict, Verdict::Drop(_)), "{what}: {verdict:?}");
    }
    for (what, option) in [
        ("preferred beyond valid", prefix("2001:db8:1::", 10, 20)),
        ("link-local", prefix("fe80::", HOUR, HOUR)),
        ("multicast", prefix("ff02::", HOUR, HOUR)),
        ("no lifetime", prefix("2001:db8:1::", 0, 0)),
        ("long prefix", {
            let mut option = prefix("2001:db8:1::", HOUR, HOUR);
            option[2] = 65;
            option
        }),
        ("longest", {
            let mut option = prefix("2001:db8:1::", HOUR, HOUR);
            option[2] = 200;
            option
        }),
    ] {
        station.receive(&advert(ROUTER, 0, 0, &option));
        assert_eq!(made(&station), [], "{what}");
    }
    assert_eq!(info(&station).gateways, Vec::<IpAddr>::new());
}

#[test]
fn valid_lifetime_obeys_two_hour_rule() {
    let left = |station: &Station| info(station).addresses.iter().find_map(|own| own.valid);
    let mut station = asking();
    station.receive(&advert(ROUTER, 1800, 0, &prefix("2001:db8:1::", 10 * HOUR, HOUR)));
    station.run_to(Time::from_secs(3));
    // A remaining lifetime above two hours is shortened to two hours, and is not shortened below.
    station.receive(&advert(ROUTER, 1800, 0, &prefix("2001:db8:1::", 1, 0)));
    assert_eq!((left(&station), made(&station)), (Some(7200), vec![(address(OURS), "deprecated")]));
    station.run_to(Time::from_secs(103));
    station.receive(&advert(ROUTER, 1800, 0, &prefix("2001:db8:1::", 1, 1)));
    assert_eq!((left(&station), made(&station)), (Some(7100), vec![(address(OURS), "preferred")]));
    // It can be extended.
    station.receive(&advert(ROUTER, 1800, 0, &prefix("2001:db8:1::", 3 * HOUR, HOUR)));
    assert_eq!(left(&station), Some(u64::from(3 * HOUR)));
}

#[test]
fn address_is_removed_after_valid_lifetime() {
    let mut station = configured();
    let hour = Time::from_secs(HOUR.into());
    station.run_to(hour + 10 * SECOND);
    assert_eq!(made(&station), [(address(OURS), "deprecated")]);
    assert!(answers(&mut station, OURS), "it still receives");
    station.run_to(Time::from_secs(2 * u64::from(HOUR) + 10));
    assert_eq!((made(&station), answers(&mut station, OURS)), (vec![], false));
    assert_eq!(station.out.events, [Event::Address { iface: 0, address: address(OURS), held: false }]);
}

#[test]
fn deprecated_source_address_is_avoided() {
    let mut station = configured();
    let source = |station: &Station| station.stack.source_to(address(FAR)).unwrap();
    assert_eq!(source(&station), address(OURS));
    let both = [prefix("2001:db8:1::", 2 * HOUR, 0), prefix("2001:db8:8::", HOUR, HOUR)].concat();
    station.receive(&advert(ROUTER, 1800, 0, &both));
    station.run_to(station.now + Micros::new(1));
    assert_eq!(source(&station), address(OURS), "there is no other yet");
    station.run_to(Time::from_secs(6));
    assert_eq!(source(&station), address("2001:db8:8::ff:fe00:1"));
}

#[test]
fn source_has_longest_matching_prefix() {
    let mut station = configured();
    let both = [prefix("fd00:1::", HOUR, HOUR), prefix("2001:db8:8::", HOUR, HOUR)].concat();
    station.receive(&advert(ROUTER, 1800, 0, &both));
    station.run_to(Time::from_secs(6));
    let source = |to: &str| station.stack.source_to(address(to)).unwrap();
    assert_eq!(source("fd00:2::1"), address("fd00:1::ff:fe00:1"));
    assert_eq!(source("2001:db8:8:1::1"), address("2001:db8:8::ff:fe00:1"));
    assert_eq!(source("2001:db8:1:1::1"), address(OURS));
    assert_eq!(source("fe80::7"), address(LINK_LOCAL));
}

#[test]
fn advertisement_flood_is_bounded() {
    let mut station = asking();
    for number in 0..2000u64 {
        station.now += SECOND / 20;
        let options: Vec<u8> =
            (0..4).flat_map(|more| prefix(&format!("2001:db8:{number:x}:{more}::"), HOUR, HOUR)).collect();
        station.receive(&advert(&format!("fe80::{:x}", number + 1), 1800, 0, &options));
    }
    assert_eq!((made(&station).len(), info(&station).gateways.len()), (16, 1));
    // Within one second, most advertisements are dropped unread.
    let mut station = asking();
    for number in 0..100 {
        station.receive(&advert(&format!("fe80::{number:x}"), 0, 0, &prefix("2001:db8:1::", HOUR, number)));
    }
    let dropped: u64 =
        station.stack.drops().iter().filter(|(name, _)| *name == "rate_limit").map(|(_, count)| count).sum();
    assert!(dropped >= 80, "{dropped}");
}

#[test]
fn duplicate_address_is_not_used() {
    let mut station = asking();
    station.receive(&advert(ROUTER, 1800, 0, &prefix("2001:db8:1::", 2 * HOUR, HOUR)));
    let target = OURS.parse().unwrap();
    let advert = NeighborAdvert {
        router: false,
        solicited: false,
        replaces: true,
        target,
        target_link: Some(PEER_MAC),
    };
    let (mut bytes, all) = ([0; 32], "ff02::1".parse().unwrap());
    let len = advert.write(&mut bytes, target, all);
    station.receive(&packet(OURS, "ff02::1", 58, 255, &bytes[..len]));
    station.run_to(Time::from_secs(3));
    assert_eq!(made(&station), [(address(OURS), "duplicated")]);
    assert!(!answers(&mut station, OURS));
}

#[test]
fn preferred_router_is_used_while_it_answers() {
    let mut station = configured();
    station.receive(&advert("fe80::77", 1800, 0b1000, &[]));
    assert_eq!(info(&station).gateways, [address("fe80::77")], "its preference is high");
    let to = format!("[{FAR}]:80").parse().unwrap();
    station.stack.connect(station.now, AppId::OWN, None, to, &mut station.out).unwrap();
    station.take_out();
    for _ in 0..6 {
        answer(&mut station, &["fe80::77"]);
        station.run_to(station.now + SECOND);
    }
    assert_eq!(info(&station).gateways, [address(ROUTER)]);
    station.receive(&advert("fe80::77", 1800, 0b1000, &[]));
    assert_eq!(info(&station).gateways, [address("fe80::77")], "it is there again");
}

#[test]
fn advertisement_options_are_applied() {
    let mut station = configured();
    let mut servers = vec![25, 3, 0, 0, 0, 0, 0, 60];
    servers.extend("2001:db8::53".parse::<Ipv6Addr>().unwrap().octets());
    let options = [&[1, 1, 2, 0, 0, 0, 0, 9, 5, 1, 0, 0, 0, 0, 5, 0x78][..], &servers].concat();
    station.receive(&advert(ROUTER, 1800, 0, &options));
    assert_eq!((info(&station).mtu, info(&station).name_servers), (1400, vec![address("2001:db8::53")]));
    let to = format!("[{FAR}]:80").parse().unwrap();
    station.sent.clear();
    station.stack.connect(station.now, AppId::OWN, None, to, &mut station.out).unwrap();
    station.take_out();
    let syn = station.frames().pop().unwrap();
    assert_eq!(
        MacAddr(*syn.first_chunk().unwrap()),
        MacAddr([2, 0, 0, 0, 0, 9]),
        "no neighbour is asked for it"
    );
    assert_eq!(syn[74..78], [2, 4, 5, 0x3c], "an MSS of 1340");
    station.receive(&advert(ROUTER, 1800, 0, &[5, 1, 0, 0, 0, 0, 0, 100]));
    assert_eq!(info(&station).mtu, 1280);
    station.run_to(Time::from_secs(70));
    assert_eq!(info(&station).name_servers, Vec::<IpAddr>::new());
}
