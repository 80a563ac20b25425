//! Connections whose address or router changes.

use std::net::Ipv4Addr;

use offcore_stats::time::Time;
use offcore_tcp::proto::{AppId, ConnId, Event, HEAD, KeepAlive, Sealed};
use offcore_wire::{IpProtocol, Ipv4Packet, Sum, TcpFlags, TcpHeader};

use crate::dhcp::{OPTIONS, SECOND, YIADDR, asked, bound, reply};
use crate::station::{Station, address, packet};

const PEER: &str = "10.0.0.9";
const FAR: &str = "192.0.2.1";

/// Opens a connection to port 80 of `peer` with keep-alive probes every ten seconds.
fn connected(station: &mut Station, peer: &str) -> ConnId {
    let to = format!("{peer}:80").parse().unwrap();
    let id = station.stack.connect(station.now, AppId::OWN, None, to, &mut station.out).unwrap();
    station.take_out();
    station.answer_arp();
    let syn = station.frames().pop().unwrap();
    let seq = u32::from_be_bytes(*syn[38..].first_chunk().unwrap());
    let header = TcpHeader {
        src_port: 80,
        dst_port: u16::from_be_bytes([syn[34], syn[35]]),
        seq: 1000,
        ack: seq.wrapping_add(1),
        flags: TcpFlags::SYN | TcpFlags::ACK,
        window: 8000,
        urgent: 0,
    };
    let mut segment = [0; 20];
    header.write(&mut segment, 0);
    let pseudo = Sum::pseudo_v4(peer.parse().unwrap(), YIADDR.into(), IpProtocol::TCP, 20);
    let sum = (pseudo + Sum::of(&segment)).checksum();
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    station.receive(&packet(peer, "10.0.0.7", 6, 64, &segment));
    assert!(station.out.events.contains(&Event::Connected(id)));
    let keep = KeepAlive { idle: 10 * SECOND, interval: 10 * SECOND, probes: 50 };
    station.stack.set_keepalive(station.now, id, Some(keep), &mut station.out).unwrap();
    station.take_out();
    station.sent.clear();
    id
}

/// Returns the number of TCP segments that were sent since the last call.
fn segments(station: &mut Station) -> usize {
    let frames = station.frames();
    let packets = frames.iter().filter(|frame| frame[12..14] == [8, 0]);
    let packets = packets.map(|frame| Ipv4Packet::new_checked(&frame[14..]).unwrap());
    packets.filter(|ip| ip.protocol() == IpProtocol::TCP && ip.src() == Ipv4Addr::from(YIADDR)).count()
}

/// Refuses the renewal of the lease, so that the client loses its address.
fn refuse_renewal(station: &mut Station) {
    station.run_to(Time::from_secs(301));
    station.answer_arp();
    station.run_to(Time::from_secs(303));
    let renewal = asked(station).pop().unwrap();
    station.receive(&reply(6, renewal.xid, "10.0.0.7", &[]));
}

/// Answers the DHCP client until it has its address.
fn serve(station: &mut Station, options: &[u8]) {
    for _ in 0..4 {
        station.run_to(station.now + SECOND);
        for asked in asked(station) {
            let kind = if asked.kind == 1 { 2 } else { 5 };
            station.receive(&reply(kind, asked.xid, "255.255.255.255", options));
        }
    }
}

/// Sends the FIN if it is due.
fn end_of_stream(station: &mut Station) -> Option<Sealed> {
    let Station { stack, out, now, .. } = station;
    stack.tx(*now, 8, out);
    let plan = out.plans.pop()?;
    Some(stack.seal(*now, &plan, Some(Sum::ZERO), &mut [0; HEAD], out))
}

#[test]
fn connection_waits_for_its_address() {
    let mut station = bound();
    let id = connected(&mut station, PEER);
    station.run_to(Time::from_secs(60));
    assert!(segments(&mut station) > 0);
    refuse_renewal(&mut station);
    station.sent.clear();
    station.stack.shutdown(station.now, id, &mut station.out).unwrap();
    assert_eq!(end_of_stream(&mut station), Some(Sealed::Obsolete), "it counts as lost");
    station.run_to(Time::from_millis(303_500));
    assert_eq!(segments(&mut station), 0, "the address is not the host's");
    serve(&mut station, &OPTIONS);
    let mut sent = 0;
    for second in 310..340 {
        station.run_to(Time::ZERO + second * SECOND);
        station.answer_arp();
        sent += usize::from(matches!(end_of_stream(&mut station), Some(Sealed::Send { .. })));
    }
    assert!(sent > 0);
}

#[test]
fn unanswered_syn_waits_for_its_address() {
    let mut station = bound();
    station.run_to(Time::from_secs(299));
    let to = format!("{PEER}:80").parse().unwrap();
    station.stack.connect(station.now, AppId::OWN, None, to, &mut station.out).unwrap();
    station.take_out();
    station.answer_arp();
    assert_eq!(segments(&mut station), 1);
    refuse_renewal(&mut station);
    segments(&mut station);
    // The client waits for a second before it asks for another lease.
    station.run_to(Time::from_millis(303_500));
    assert_eq!(segments(&mut station), 0);
    serve(&mut station, &OPTIONS);
    station.run_to(Time::from_secs(340));
    assert!(segments(&mut station) > 0, "SYNs are sent by the address again");
}

#[test]
fn connection_uses_renewed_gateway() {
    let mut station = bound();
    connected(&mut station, FAR);
    station.run_to(Time::from_secs(301));
    station.answer_arp();
    station.run_to(Time::from_secs(303));
    let renewal = asked(&mut station).pop().unwrap();
    let mut options = OPTIONS;
    assert_eq!(options[14..18], [10, 0, 0, 254]);
    options[17] = 253;
    station.receive(&reply(5, renewal.xid, "10.0.0.7", &options));
    segments(&mut station);
    let mut asked = Vec::new();
    for second in 304..330 {
        station.run_to(Time::ZERO + second * SECOND);
        asked.extend(station.answer_arp());
    }
    assert!(asked.contains(&address("10.0.0.253")) && !asked.contains(&address("10.0.0.254")), "{asked:?}");
    assert!(segments(&mut station) > 0);
}
