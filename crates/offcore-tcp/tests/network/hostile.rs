//! Hostile servers, routers and queriers: DHCP messages, router advertisements, MLD and IGMP queries, and ARP messages
//! with arbitrary content.

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::Verdict;
use offcore_wire::{
    Arp, ArpOperation, EthernetFrame, IpProtocol, Ipv4Packet, Ipv6Packet, MacAddr, Sum, ethernet, ipv6,
};

use crate::script::Script;
use crate::station::{OWN_MAC, PEER_MAC, Station, arp_frame, packet};

/// Maximum number of steps of a script.
const STEPS: usize = 200;
/// Addresses of the interface that do not depend on the network: two static ones and the link-local one.
const GIVEN: usize = 3;
/// Maximum number of addresses of the interface: in addition, one from a lease and 16 from advertisements.
const ADDRESSES: usize = GIVEN + 17;
const ROUTERS: [&str; 4] = ["fe80::99", "fe80::98", "2001:db8::9", "::"];
const OWN: [&str; 2] = ["10.0.0.2", "2001:db8::2"];

/// The results of scripts: frames that the host accepted, frames that it sent, and scripts that gave it an address.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) accepted: u64,
    pub(crate) sent: u64,
    pub(crate) configured: u64,
}

/// Plays a script and adds its results to `outcome`. Checks that all frames of the host are well formed and that its
/// number of addresses is bounded.
pub(crate) fn play(bytes: &[u8], outcome: &mut Outcome) {
    let mut script = Script(bytes);
    let mut station = Station::new(&["10.0.0.2/24", "2001:db8::2/64"], &[]);
    station.stack.start_dhcp(Time::from_micros(1), 0);
    station.stack.start_slaac(Time::from_micros(1), 0, &mut station.out);
    station.run_to(Time::from_micros(1));
    let (mut transaction, mut configured) = ([0; 4], false);
    for _ in 0..STEPS {
        if script.0.is_empty() {
            break;
        }
        let frame = match script.u8() % 10 {
            0..3 => Some(dhcp(&mut script, transaction)),
            3..6 => Some(advertisement(&mut script)),
            6 => Some(mld(&mut script)),
            7 => Some(igmp(&mut script)),
            8 => Some(arp(&mut script)),
            _ => None,
        };
        match frame {
            Some(frame) => {
                let verdict = station.receive(&frame);
                outcome.accepted += u64::from(!matches!(verdict, Verdict::Drop(_)));
                station.run_to(station.now + Micros::new(1));
            }
            // The time advances by up to 36 minutes.
            None => station.run_to(station.now + Micros::new(1 << (script.u8() % 32))),
        }
        for frame in station.frames() {
            check(&frame);
            outcome.sent += 1;
            transaction = dhcp_transaction(&frame).unwrap_or(transaction);
        }
        let addresses = station.stack.interfaces(station.now).pop().unwrap().addresses.len();
        assert!(addresses <= ADDRESSES, "{addresses} addresses");
        configured |= addresses > GIVEN;
    }
    outcome.configured += u64::from(configured);
}

/// Returns a DHCP message of a server. Most options are known and have the right length.
fn dhcp(script: &mut Script<'_>, transaction: [u8; 4]) -> Vec<u8> {
    const OPTIONS: [(u8, u8); 12] = [
        (51, 4),
        (54, 4),
        (1, 4),
        (3, 4),
        (6, 8),
        (26, 2),
        (58, 4),
        (59, 4),
        (121, 8),
        (52, 1),
        (53, 1),
        (0, 0),
    ];
    let mut message = vec![0; 240];
    message[..4].copy_from_slice(&[2, 1, 6, 0]);
    message[4..8].copy_from_slice(&transaction);
    message[16..20].copy_from_slice(&[10, 0, 0, 7 + script.u8() % 4]);
    message[28..34].copy_from_slice(&OWN_MAC.0);
    message[236..240].copy_from_slice(&[99, 130, 83, 99]);
    let kind = [2, 5, 2, 5, 6, 1][script.below(6)];
    message.extend([53, 1, kind, 54, 4, 10, 0, 0, 1 + script.u8() % 2]);
    if script.u8() < 128 {
        message.extend([1, 4, 255, 255, 255, 0, 51, 4, 0, 0, script.u8(), script.u8()]);
    }
    for _ in 0..script.u8() % 8 {
        let (number, len) = OPTIONS[script.below(OPTIONS.len())];
        let len = if script.u8() < 230 { len } else { script.u8() };
        message.extend([number, len]);
        message.extend((0..len).map(|_| script.u8()));
    }
    if script.u8() < 230 {
        message.push(255);
    }
    // Some messages have one random byte changed.
    if script.u8() > 200 {
        let at = script.below(message.len());
        message[at] = script.u8();
    }
    let mut udp = vec![0, 67, 0, 68, 0, 0, 0, 0];
    udp[4..6].copy_from_slice(&(8 + message.len() as u16).to_be_bytes());
    udp.extend(message);
    packet("10.0.0.1", "255.255.255.255", 17, 64, &udp)
}

/// Returns the transaction ID of a DHCP message of the host.
fn dhcp_transaction(frame: &[u8]) -> Option<[u8; 4]> {
    let ip = Ipv4Packet::new_checked(frame.get(14..).filter(|_| frame[12..14] == [8, 0])?).ok()?;
    let udp = ip.payload();
    (udp.get(..4)? == [0, 68, 0, 67]).then(|| *udp[12..].first_chunk().unwrap())
}

/// Sets the checksum of an ICMPv6 message.
fn set_checksum(src: &str, dst: &str, message: &mut [u8]) {
    let [from, to] = [src, dst].map(|text| text.parse().unwrap());
    let sum = Sum::pseudo_v6(from, to, IpProtocol::ICMPV6, message.len() as u32) + Sum::of(message);
    message[2..4].copy_from_slice(&sum.checksum().to_be_bytes());
}

/// A router advertisement with prefixes, an MTU, name servers and other options.
fn advertisement(script: &mut Script<'_>) -> Vec<u8> {
    let [high, low] = script.bytes::<2>();
    let mut message = vec![134, 0, 0, 0, 64, script.u8(), high, low, 0, 0, 0, 0, 0, 0, 0, 0];
    for _ in 0..script.u8() % 8 {
        match script.u8() % 6 {
            0..3 => {
                message.extend([3, 4, if script.u8() < 230 { 64 } else { script.u8() }, script.u8()]);
                let valid = u32::from_le_bytes(script.bytes());
                let preferred = valid.rotate_right(u32::from(script.u8() % 4));
                message.extend([valid.to_be_bytes(), preferred.to_be_bytes(), [0; 4]].concat());
                message.extend([0x20, 1, 0x0d, 0xb8, 0, script.u8() % 40, 0, 0]);
                message.extend([0; 8]);
            }
            3 => message.extend([5, 1, 0, 0, 0, 0, script.u8(), script.u8()]),
            4 => {
                message.extend([25, 3, 0, 0, 0, 0, script.u8(), script.u8()]);
                message.extend(script.bytes::<16>());
            }
            _ => {
                let len = script.u8() % 5;
                message.extend([script.u8(), len]);
                message.extend((0..script.below(40)).map(|_| script.u8()));
            }
        }
    }
    let router = ROUTERS[script.below(4)];
    set_checksum(router, "ff02::1", &mut message);
    // Neighbour discovery requires a hop limit of 255.
    packet(router, "ff02::1", 58, if script.u8() < 230 { 255 } else { script.u8() }, &message)
}

/// Returns an MLD query for all groups, for one group, or for any address.
fn mld(script: &mut Script<'_>) -> Vec<u8> {
    let [high, low] = script.bytes::<2>();
    let mut message = vec![130, 0, 0, 0, high, low, 0, 0];
    match script.u8() % 3 {
        0 => message.extend([0; 16]),
        1 => message.extend(ipv6::solicited_node(OWN[1].parse().unwrap()).octets()),
        _ => message.extend(script.bytes::<16>()),
    }
    message.extend((0..script.u8() % 24).map(|_| script.u8()));
    set_checksum(ROUTERS[0], "ff02::1", &mut message);
    // The packet has the Router Alert option.
    let payload = [&[58, 0, 5, 2, 0, 0, 1, 0][..], &message].concat();
    packet(ROUTERS[0], "ff02::1", 0, if script.u8() < 230 { 1 } else { script.u8() }, &payload)
}

/// Returns an IGMP query or another IGMP message.
fn igmp(script: &mut Script<'_>) -> Vec<u8> {
    let kind = [0x11, 0x11, 0x16, 0x17, 0x12, script.u8()][script.below(6)];
    let group = [[0; 4], [224, 0, 0, 1], [224, 0, 0, 251], script.bytes()][script.below(4)];
    let mut message = [&[kind, script.u8(), 0, 0][..], &group].concat();
    message.extend((0..script.u8() % 16).map(|_| script.u8()));
    let sum = Sum::of(&message).checksum();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut frame = packet("10.0.0.254", OWN[0], 2, 1, &message);
    frame[..6].copy_from_slice(&[1, 0, 0x5e, 0, 0, 1]);
    frame[30..34].copy_from_slice(&[224, 0, 0, 1]);
    frame[24..26].fill(0);
    let sum = Sum::of(&frame[14..34]).checksum();
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// Returns an ARP message about addresses of the host, of a lease, or any address.
fn arp(script: &mut Script<'_>) -> Vec<u8> {
    let mut address = || [[10, 0, 0, 2], [10, 0, 0, 7], [0; 4], script.bytes()][script.below(4)];
    let [sender_ip, target_ip] = [address(), address()].map(Into::into);
    let operation = if script.u8() < 128 { ArpOperation::Request } else { ArpOperation::Reply };
    let message = Arp { operation, sender_mac: PEER_MAC, sender_ip, target_mac: OWN_MAC, target_ip };
    arp_frame(MacAddr([0xff; 6]), &message)
}

/// Checks that a frame of the host is well formed.
fn check(frame: &[u8]) {
    assert!(frame.len() <= ethernet::HEADER_LEN + 1500, "{} bytes", frame.len());
    let link = EthernetFrame::new_checked(frame).unwrap();
    assert_eq!(link.src(), OWN_MAC);
    match frame[12..14] {
        [8, 6] => {
            Arp::parse(link.payload()).unwrap();
        }
        [8, 0] => {
            let ip = Ipv4Packet::new_checked(link.payload()).unwrap();
            assert!(ip.verify_checksum());
            let sum = Sum::of(ip.payload());
            let pseudo = Sum::pseudo_v4(ip.src(), ip.dst(), ip.protocol(), ip.payload().len() as u16);
            let sum = if ip.protocol() == IpProtocol::UDP { pseudo + sum } else { sum };
            assert!(sum.is_valid(), "a wrong checksum of {:?}", ip.protocol());
        }
        _ => {
            let ip = Ipv6Packet::new_checked(link.payload()).unwrap();
            let transport = ip.transport().unwrap();
            let len = transport.payload.len() as u32;
            let pseudo = Sum::pseudo_v6(ip.src(), ip.dst(), transport.protocol, len);
            assert!((pseudo + Sum::of(transport.payload)).is_valid(), "a wrong checksum");
        }
    }
}
