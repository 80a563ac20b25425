//! Packets that are answered, and packets that are not.

use std::net::Ipv4Addr;

use offcore_stats::time::Time;
use offcore_tcp::proto::Config;
use offcore_wire::{EtherType, IpProtocol, Ipv4Header, MacAddr, Sum, ethernet, icmpv4, ipv4};

use crate::host::{Host, mac};

/// Returns a frame with an echo request to a station.
fn echo(station: MacAddr, to: Ipv4Addr) -> Vec<u8> {
    let mut frame = vec![0; ethernet::HEADER_LEN + ipv4::HEADER_LEN + icmpv4::HEADER_LEN];
    let (link, rest) = frame.split_first_chunk_mut().unwrap();
    let (ip, message) = rest.split_first_chunk_mut().unwrap();
    ethernet::write_header(link, station, mac(2), EtherType::IPV4);
    let header = Ipv4Header {
        src: Ipv4Addr::new(10, 0, 0, 2),
        dst: to,
        protocol: IpProtocol::ICMP,
        dscp_ecn: 0,
        ident: 1,
        dont_fragment: true,
        ttl: 64,
        total_len: (ipv4::HEADER_LEN + icmpv4::HEADER_LEN) as u16,
    };
    header.write(ip);
    message[0] = icmpv4::ECHO;
    let sum = Sum::of(message).checksum();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    frame
}

#[test]
fn link_broadcast_echo_is_ignored() {
    // RFC 1122, 3.3.6: a unicast datagram that arrived in a link-layer broadcast is discarded. Otherwise, the reply
    // would have the request's destination, the broadcast address, as its source MAC address.
    let ours = Ipv4Addr::new(10, 0, 0, 1);
    let group = MacAddr([0x01, 0, 0x5e, 0, 0, 1]);
    for (station, to, answers) in [
        (mac(1), ours, 1),
        (MacAddr::BROADCAST, ours, 0),
        (group, ours, 0),
        (MacAddr::BROADCAST, Ipv4Addr::new(10, 0, 0, 255), 0),
    ] {
        let mut host = Host::new(1, 1500, Config::default());
        host.frames.clear();
        host.receive(Time::from_micros(1), &mut [echo(station, to)]);
        assert_eq!(host.frames.len(), answers, "{station:?} {to}");
        assert!(host.frames.iter().all(|frame| frame[6..12] == mac(1).0 && frame[..6] == mac(2).0));
    }
}
