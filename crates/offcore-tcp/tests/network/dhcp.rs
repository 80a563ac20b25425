//! The DHCP client of an interface: leases, their renewal and their expiry.

use std::net::{IpAddr, Ipv4Addr};

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, Event, Origin};
use offcore_wire::{Arp, ArpOperation, Ipv4Packet, MacAddr, Sum};

use crate::station::{OWN_MAC, PEER_MAC, Station, address, arp_frame, arp_in, packet, prefix};

pub(crate) const SECOND: Micros = Micros::from_secs(1);
const SERVER: &str = "10.0.0.1";
pub(crate) const YIADDR: [u8; 4] = [10, 0, 0, 7];

/// A message of the client: its type, its options by number, and its addresses.
#[derive(Debug)]
pub(crate) struct Asked {
    at: Time,
    pub(crate) kind: u8,
    pub(crate) xid: [u8; 4],
    client: [u8; 4],
    from_to: [Ipv4Addr; 2],
    station: [u8; 6],
    options: Vec<(u8, Vec<u8>)>,
}

impl Asked {
    fn option(&self, number: u8) -> Option<&[u8]> {
        self.options.iter().find(|(found, _)| *found == number).map(|(_, value)| &value[..])
    }
}

/// Returns the client's messages since the last call.
pub(crate) fn asked(station: &mut Station) -> Vec<Asked> {
    let sent = std::mem::take(&mut station.sent);
    sent.iter().filter_map(|(at, frame)| read(*at, frame)).collect()
}

fn read(at: Time, frame: &[u8]) -> Option<Asked> {
    let ip = Ipv4Packet::new_checked(frame.get(14..).filter(|_| frame[12..14] == [8, 0])?).ok()?;
    let udp = ip.payload();
    if udp.get(..4)? != [0, 68, 0, 67] {
        return None;
    }
    assert!(ip.verify_checksum());
    let pseudo = Sum::pseudo_v4(ip.src(), ip.dst(), offcore_wire::IpProtocol::UDP, udp.len() as u16);
    assert!((pseudo + Sum::of(udp)).is_valid());
    let message = &udp[8..];
    assert!(message.len() >= 300 && message[28..34] == OWN_MAC.0);
    let mut options = Vec::new();
    let mut rest = &message[240..];
    while let [number @ 1..=254, len, tail @ ..] = rest {
        let (value, tail) = tail.split_at((*len).into());
        options.push((*number, value.to_vec()));
        rest = tail;
    }
    let four = |at: usize| *message[at..].first_chunk().unwrap();
    let kind = options.iter().find(|(number, _)| *number == 53).unwrap().1[0];
    let station = *frame.first_chunk().unwrap();
    Some(Asked { at, kind, xid: four(4), client: four(12), from_to: [ip.src(), ip.dst()], station, options })
}

/// Returns a frame with a server's message.
pub(crate) fn reply(kind: u8, xid: [u8; 4], to: &str, options: &[u8]) -> Vec<u8> {
    let mut message = vec![0; 240];
    message[..4].copy_from_slice(&[2, 1, 6, 0]);
    message[4..8].copy_from_slice(&xid);
    message[16..20].copy_from_slice(&YIADDR);
    message[28..34].copy_from_slice(&OWN_MAC.0);
    message[236..240].copy_from_slice(&[99, 130, 83, 99]);
    message.extend([53, 1, kind, 54, 4, 10, 0, 0, 1]);
    message.extend(options);
    message.push(255);
    let mut udp = vec![0, 67, 0, 68, 0, 0, 0, 0];
    udp[4..6].copy_from_slice(&(8 + message.len() as u16).to_be_bytes());
    udp.extend(message);
    packet(SERVER, to, 17, 64, &udp)
}

/// A lease of ten minutes in 10.0.0.0/24 with the router 10.0.0.254 and an MTU of 1400.
pub(crate) const OPTIONS: [u8; 22] =
    [51, 4, 0, 0, 2, 0x58, 1, 4, 255, 255, 255, 0, 3, 4, 10, 0, 0, 254, 26, 2, 5, 0x78];

fn client() -> Station {
    let mut station = Station::new(&[], &[]);
    station.stack.start_dhcp(Time::from_micros(1), 0);
    station.run_to(Time::from_micros(1));
    station
}

/// Returns a client that has obtained a lease.
pub(crate) fn bound() -> Station {
    let mut station = client();
    let discover = asked(&mut station).pop().unwrap();
    station.receive(&reply(2, discover.xid, "255.255.255.255", &OPTIONS));
    station.run_to(station.now + Micros::new(1));
    let request = asked(&mut station).pop().unwrap();
    station.receive(&reply(5, request.xid, "255.255.255.255", &OPTIONS));
    station.run_to(Time::from_secs(1));
    let leased = Event::Address { iface: 0, address: IpAddr::from(YIADDR), held: true };
    assert_eq!(std::mem::take(&mut station.out.events), [leased]);
    station.sent.clear();
    station
}

/// Returns whether the host answers an ARP request for its address.
fn answers(station: &mut Station) -> bool {
    let question = Arp {
        operation: ArpOperation::Request,
        sender_mac: PEER_MAC,
        sender_ip: [10, 0, 0, 1].into(),
        target_mac: MacAddr([0; 6]),
        target_ip: YIADDR.into(),
    };
    station.receive(&arp_frame(MacAddr([0xff; 6]), &question));
    let answered = station.sent.iter().filter_map(|(_, frame)| arp_in(frame));
    let answered = answered.filter(|answer| answer.operation == ArpOperation::Reply).count() > 0;
    station.sent.retain(|(_, frame)| arp_in(frame).is_none());
    answered
}

#[test]
fn lease_is_requested_probed_and_used() {
    let mut station = client();
    let discover = asked(&mut station).pop().unwrap();
    assert_eq!((discover.kind, discover.station), (1, [0xff; 6]));
    assert_eq!(discover.from_to, [Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST]);
    assert_eq!(station.stack.awaits_address(), Some(0), "programs wait for the address");
    assert!(station.stack.awaits_route(address("192.0.2.1")));
    station.receive(&reply(2, discover.xid, "255.255.255.255", &OPTIONS));
    station.run_to(Time::from_micros(2));
    let request = asked(&mut station).pop().unwrap();
    assert_eq!(
        (request.kind, request.option(50), request.option(54)),
        (3, Some(&YIADDR[..]), Some(&[10, 0, 0, 1][..]))
    );
    station.receive(&reply(5, request.xid, "255.255.255.255", &OPTIONS));
    station.run_to(Time::from_millis(60));
    assert!(!answers(&mut station), "the address is probed first");
    station.run_to(Time::from_secs(1));
    assert!(answers(&mut station) && station.stack.awaits_address().is_none());
    // Packets go to the router, and segments fit the MTU.
    station
        .stack
        .connect(station.now, AppId::OWN, None, "192.0.2.1:80".parse().unwrap(), &mut station.out)
        .unwrap();
    station.take_out();
    assert_eq!(station.answer_arp(), [address("10.0.0.254")]);
    let syn = station.frames().pop().unwrap();
    assert_eq!(syn[54..58], [2, 4, 5, 0x50], "an MSS of 1360");
}

#[test]
fn discover_retransmission_backs_off() {
    let mut station = client();
    station.run_to(Time::from_secs(400));
    let times: Vec<u64> = asked(&mut station).iter().map(|asked| asked.at.as_secs()).collect();
    let gaps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let near = |gap: u64, wait: u64| gap + 2 >= wait && gap <= wait + 2;
    assert!(gaps.iter().zip([4, 8, 16, 32, 64, 64]).all(|(gap, wait)| near(*gap, wait)), "{gaps:?}");
}

#[test]
fn renewal_is_unicast_to_server() {
    let mut station = bound();
    station.run_to(Time::from_secs(299));
    assert!(asked(&mut station).is_empty());
    station.run_to(Time::from_secs(301));
    assert_eq!(station.answer_arp(), [address(SERVER)]);
    station.run_to(Time::from_secs(303));
    let renewal = asked(&mut station).pop().unwrap();
    assert_eq!((renewal.kind, renewal.client, renewal.station), (3, YIADDR, PEER_MAC.0));
    assert_eq!(renewal.from_to, [Ipv4Addr::from(YIADDR), [10, 0, 0, 1].into()]);
    assert_eq!((renewal.option(50), renewal.option(54)), (None, None), "RFC 2131, 4.3.2");
    station.receive(&reply(5, renewal.xid, "10.0.0.7", &OPTIONS));
    station.run_to(Time::from_secs(599));
    assert!(asked(&mut station).is_empty() && answers(&mut station));
}

#[test]
fn address_expires_with_its_lease() {
    let mut station = bound();
    station.run_to(Time::from_secs(599));
    let requests = asked(&mut station);
    let by_broadcast = requests.iter().find(|asked| asked.station == [0xff; 6]).unwrap();
    assert!(
        by_broadcast.at >= Time::ZERO + 524 * SECOND && by_broadcast.client == YIADDR,
        "{by_broadcast:?}"
    );
    assert!(answers(&mut station));
    assert!(!station.stack.awaits_route(address("2001:db8::1")));
    assert!(!station.stack.awaits_route(address("192.0.2.1")));
    station.run_to(Time::from_secs(602));
    assert!(!answers(&mut station));
    assert!(station.stack.awaits_route(address("192.0.2.1")), "the next lease may have a router");
    assert_eq!(station.out.events, [Event::Address { iface: 0, address: IpAddr::from(YIADDR), held: false }]);
    assert_eq!(asked(&mut station).pop().unwrap().kind, 1, "it begins again");
}

#[test]
fn dhcpnak_restarts_discovery() {
    let mut station = bound();
    station.run_to(Time::from_secs(301));
    station.answer_arp();
    station.run_to(Time::from_secs(303));
    let renewal = asked(&mut station).pop().unwrap();
    station.receive(&reply(6, renewal.xid, "10.0.0.7", &[]));
    station.run_to(Time::from_secs(304));
    assert!(!answers(&mut station));
    assert_eq!(asked(&mut station).pop().unwrap().kind, 1);
}

#[test]
fn duplicate_address_is_declined() {
    let mut station = client();
    let discover = asked(&mut station).pop().unwrap();
    station.receive(&reply(2, discover.xid, "255.255.255.255", &OPTIONS));
    station.run_to(Time::from_micros(2));
    let request = asked(&mut station).pop().unwrap();
    station.receive(&reply(5, request.xid, "255.255.255.255", &OPTIONS));
    station.run_to(Time::from_millis(50));
    let claim = Arp {
        operation: ArpOperation::Reply,
        sender_mac: PEER_MAC,
        sender_ip: YIADDR.into(),
        target_mac: OWN_MAC,
        target_ip: Ipv4Addr::UNSPECIFIED,
    };
    station.receive(&arp_frame(OWN_MAC, &claim));
    station.run_to(Time::from_secs(1));
    let decline = asked(&mut station).pop().unwrap();
    assert_eq!((decline.kind, decline.option(50)), (4, Some(&YIADDR[..])));
    station.run_to(Time::from_secs(9));
    assert!(asked(&mut station).is_empty(), "ten seconds pass (RFC 2131, 3.1)");
    station.run_to(Time::from_secs(12));
    assert_eq!(asked(&mut station).pop().unwrap().kind, 1);
}

#[test]
fn foreign_replies_are_ignored() {
    let mut station = client();
    let discover = asked(&mut station).pop().unwrap();
    station.receive(&reply(2, [1, 2, 3, 4], "255.255.255.255", &OPTIONS));
    station.receive(&reply(5, discover.xid, "255.255.255.255", &OPTIONS));
    station.run_to(Time::from_secs(1));
    assert!(asked(&mut station).is_empty());
}

#[test]
fn dhcpnak_of_other_server_is_ignored() {
    let mut station = bound();
    station.run_to(Time::from_secs(301));
    station.answer_arp();
    station.run_to(Time::from_secs(303));
    let renewal = asked(&mut station).pop().unwrap();
    let mut refusal = reply(6, renewal.xid, "10.0.0.7", &[]);
    // The server identifier follows the headers, the fixed fields and the message type.
    assert_eq!(refusal[285..291], [54, 4, 10, 0, 0, 1]);
    refusal[290] = 2;
    station.receive(&refusal);
    station.run_to(Time::from_secs(304));
    assert!(answers(&mut station));
}

#[test]
fn offer_of_own_address_is_ignored() {
    let mut station = Station::new(&["10.0.0.7/24"], &[]);
    station.stack.start_dhcp(Time::from_micros(1), 0);
    station.run_to(Time::from_micros(1));
    let discover = asked(&mut station).pop().unwrap();
    station.receive(&reply(2, discover.xid, "255.255.255.255", &OPTIONS));
    station.run_to(Time::from_secs(1));
    assert!(asked(&mut station).is_empty() && answers(&mut station));
}

#[test]
fn zero_lease_time_is_rate_limited() {
    // The lease has a lifetime of zero and must be renewed at once.
    let hasty =
        [51, 4, 0, 0, 0, 0, 58, 4, 0, 0, 0, 0, 59, 4, 0, 0, 0, 0, 1, 4, 255, 255, 255, 0, 26, 2, 0, 0];
    let mut station = client();
    let mut requests = 0;
    for tenth in 1..600 {
        let is_probe = |frame: &[u8]| arp_in(frame).is_some_and(|arp| arp.sender_ip.is_unspecified());
        station.sent.retain(|(_, frame)| !is_probe(frame));
        station.answer_arp();
        for asked in asked(&mut station) {
            requests += 1;
            let kind = if asked.kind == 1 { 2 } else { 5 };
            station.receive(&reply(kind, asked.xid, "255.255.255.255", &hasty));
        }
        station.run_to(Time::from_millis(tenth * 100));
    }
    assert!(answers(&mut station));
    assert!((8..=16).contains(&requests), "{requests} messages in a minute");
}

#[test]
fn repeated_dhcpnaks_are_rate_limited() {
    let mut station = client();
    let mut messages = 0;
    for hundredth in 1..6000 {
        for asked in asked(&mut station) {
            messages += 1;
            let kind = if asked.kind == 1 { 2 } else { 6 };
            station.receive(&reply(kind, asked.xid, "255.255.255.255", &OPTIONS));
        }
        station.run_to(Time::from_millis(hundredth * 10));
    }
    assert!((100..=130).contains(&messages), "{messages} messages in a minute");
}

#[test]
fn invalid_offered_addresses_are_ignored() {
    for yours in
        [[0; 4], [127, 0, 0, 1], [224, 0, 0, 1], [255; 4], [10, 0, 0, 0], [10, 0, 0, 255], [10, 0, 0, 1]]
    {
        let mut station = client();
        let discover = asked(&mut station).pop().unwrap();
        let mut offer = reply(2, discover.xid, "255.255.255.255", &OPTIONS);
        assert_eq!(offer[58..62], YIADDR);
        offer[58..62].copy_from_slice(&yours);
        station.receive(&offer);
        station.run_to(Time::from_secs(1));
        assert!(asked(&mut station).is_empty(), "{yours:?}");
    }
}

#[test]
fn static_routes_outlive_lease() {
    let gateway = offcore_tcp::proto::Route::default_by(address("10.0.0.254"));
    let mut station = Station::new(&["10.0.0.9/24"], &[gateway]);
    station.stack.start_dhcp(Time::from_micros(1), 0);
    station.run_to(Time::from_micros(1));
    let discover = asked(&mut station).pop().unwrap();
    station.receive(&reply(2, discover.xid, "255.255.255.255", &OPTIONS));
    station.run_to(station.now + Micros::new(1));
    let request = asked(&mut station).pop().unwrap();
    station.receive(&reply(5, request.xid, "255.255.255.255", &OPTIONS));
    station.run_to(Time::from_secs(602));
    assert!(!answers(&mut station), "the lease has ended");
    station.sent.clear();
    let peer = "192.0.2.1:80".parse().unwrap();
    station.stack.connect(station.now, AppId::OWN, None, peer, &mut station.out).unwrap();
    station.take_out();
    assert_eq!(station.answer_arp(), [address("10.0.0.254")]);
}

#[test]
fn lease_is_released_on_exit() {
    let mut station = bound();
    station.stack.release_leases(station.now, &mut station.out);
    station.take_out();
    let release = asked(&mut station).pop().unwrap();
    assert_eq!((release.kind, release.client, release.station), (7, YIADDR, PEER_MAC.0));
    assert_eq!(release.from_to, [Ipv4Addr::from(YIADDR), [10, 0, 0, 1].into()]);
    assert_eq!((release.option(54), release.option(55)), (Some(&[10, 0, 0, 1][..]), None), "RFC 2131, 4.4.1");
    station.run_to(Time::from_secs(400));
    assert!(asked(&mut station).is_empty() && !answers(&mut station));
}

#[test]
fn interface_info_shows_lease() {
    let mut station = client();
    let shown = |station: &Station| station.stack.interfaces(station.now).pop().unwrap();
    assert_eq!((shown(&station).addresses, shown(&station).dhcp_server), (vec![], None));
    let discover = asked(&mut station).pop().unwrap();
    let options = [&OPTIONS[..], &[6, 8, 10, 0, 0, 53, 10, 0, 0, 54]].concat();
    station.receive(&reply(2, discover.xid, "255.255.255.255", &options));
    station.run_to(station.now + Micros::new(1));
    let request = asked(&mut station).pop().unwrap();
    station.receive(&reply(5, request.xid, "255.255.255.255", &options));
    station.run_to(Time::from_secs(100));
    let info = shown(&station);
    let [own] = info.addresses[..] else { panic!("{info:?}") };
    assert_eq!((own.prefix, own.origin, own.state), (prefix("10.0.0.7/24"), Origin::Dhcp, "preferred"));
    assert_eq!(own.valid, Some(500));
    assert_eq!(
        (info.mtu, info.gateways, info.dhcp_server),
        (1400, vec![address("10.0.0.254")], SERVER.parse().ok())
    );
    assert_eq!(info.name_servers, [address("10.0.0.53"), address("10.0.0.54")]);
}
