//! Probes, announcements and defence of IPv4 addresses (RFC 5227).

use std::net::{IpAddr, Ipv4Addr};

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, CallError, Event};
use offcore_wire::{Arp, ArpOperation, MacAddr};

use crate::station::{OWN_MAC, PEER_MAC, Station, arp_frame, arp_in};

const SECOND: Micros = Micros::from_secs(1);
const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const PEER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 9);
const NONE: Ipv4Addr = Ipv4Addr::UNSPECIFIED;

fn probing() -> Station {
    let mut station = Station::new(&["10.0.0.2/24"], &[]);
    station.stack.detect_conflicts(Time::from_micros(1), 0);
    station
}

/// Returns the times of the sent ARP requests for our address, and whether each was a probe.
fn requests(station: &mut Station) -> Vec<(Time, bool)> {
    let sent = std::mem::take(&mut station.sent);
    let requests = sent.iter().filter_map(|(at, frame)| {
        let message = arp_in(frame)?;
        assert_eq!((message.operation, message.sender_mac), (ArpOperation::Request, OWN_MAC));
        assert!(message.target_ip == OWN && frame[..6] == [0xff; 6]);
        Some((*at, message.sender_ip == NONE))
    });
    requests.collect()
}

fn message(operation: ArpOperation, sender_ip: Ipv4Addr, target_ip: Ipv4Addr) -> Vec<u8> {
    let target_mac = MacAddr([0; 6]);
    arp_frame(MacAddr([0xff; 6]), &Arp { operation, sender_mac: PEER_MAC, sender_ip, target_mac, target_ip })
}

#[test]
fn address_is_probed_then_announced() {
    let mut station = probing();
    station.run_to(Time::from_secs(10));
    let sent = requests(&mut station);
    let at = Time::from_micros;
    let claimed = at(120_001);
    let expected = [
        (at(1), true),
        (at(40_001), true),
        (at(80_001), true),
        (claimed, false),
        (claimed + 2 * SECOND, false),
    ];
    assert_eq!(sent, expected);
}

#[test]
fn probed_address_is_not_used() {
    let mut station = probing();
    station.run_to(Time::from_millis(60));
    requests(&mut station);
    assert!(station.stack.is_probing());
    station.receive(&message(ArpOperation::Request, PEER, OWN));
    assert_eq!(station.frames(), [[0; 0]; 0], "a question for the address has no answer yet");
    let to = "10.0.0.9:80".parse().unwrap();
    let refused = station.stack.connect(station.now, AppId::OWN, None, to, &mut station.out);
    assert_eq!(refused, Err(CallError::Tentative));
    station.run_to(Time::from_millis(200));
    requests(&mut station);
    assert!(!station.stack.is_probing());
    station.receive(&message(ArpOperation::Request, PEER, OWN));
    assert_eq!(station.frames().len(), 1);
    station.stack.connect(station.now, AppId::OWN, None, to, &mut station.out).unwrap();
}

#[test]
fn duplicate_address_is_not_used() {
    for conflict in [
        message(ArpOperation::Reply, OWN, NONE),
        message(ArpOperation::Request, OWN, PEER),
        message(ArpOperation::Request, NONE, OWN),
    ] {
        let mut station = probing();
        station.run_to(Time::from_millis(50));
        station.receive(&conflict);
        let told = Event::AddressConflict { iface: 0, address: IpAddr::V4(OWN), mac: PEER_MAC };
        assert_eq!(station.out.events, [told]);
        station.run_to(Time::from_secs(1));
        assert!(requests(&mut station).iter().all(|(_, is_probe)| *is_probe), "nothing is announced");
        station.receive(&message(ArpOperation::Request, PEER, OWN));
        assert_eq!(station.frames(), [[0; 0]; 0]);
        // The conflicting host may have left, so the address is probed again a minute later.
        station.run_to(Time::from_secs(70));
        let again = requests(&mut station);
        assert_eq!(
            again.iter().map(|(_, is_probe)| *is_probe).collect::<Vec<_>>(),
            [true, true, true, false, false]
        );
        assert_eq!(again[0].0, Time::from_millis(50) + 60 * SECOND);
    }
}

#[test]
fn foreign_probe_is_not_a_conflict() {
    let mut station = probing();
    station.run_to(Time::from_millis(50));
    station.receive(&message(ArpOperation::Request, NONE, PEER));
    station.receive(&message(ArpOperation::Request, PEER, OWN));
    station.run_to(Time::from_secs(1));
    assert_eq!(station.out.events, []);
    assert!(requests(&mut station).iter().any(|(_, is_probe)| !is_probe));
}

#[test]
fn address_is_defended_every_ten_seconds() {
    let mut station = probing();
    station.run_to(Time::from_secs(5));
    requests(&mut station);
    for _ in 0..250 {
        station.receive(&message(ArpOperation::Reply, OWN, NONE));
        station.run_to(station.now + SECOND / 10);
    }
    assert_eq!(requests(&mut station), [5, 15, 25].map(|second| (Time::from_secs(second), false)));
}
