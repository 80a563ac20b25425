//! Written headers must equal the headers that etherparse, an independent implementation, writes, and must be parsed
//! correctly.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

use std::net::{Ipv4Addr, Ipv6Addr};

use etherparse::IpNumber;
use offcore_wire::{
    EtherType, EthernetFrame, IpProtocol, Ipv4Header, Ipv4Packet, Ipv6Header, Ipv6Packet, MacAddr, TcpFlags,
    TcpHeader, TcpSegment, UdpDatagram, UdpHeader, ethernet,
};
use proptest::prelude::*;

fn ipv4_headers() -> impl Strategy<Value = Ipv4Header> {
    (any::<([u8; 4], [u8; 4])>(), any::<[u8; 3]>(), any::<u16>(), any::<bool>(), 20u16..).prop_map(
        |((src, dst), [protocol, dscp_ecn, ttl], ident, dont_fragment, total_len)| Ipv4Header {
            src: Ipv4Addr::from(src),
            dst: Ipv4Addr::from(dst),
            protocol: IpProtocol(protocol),
            dscp_ecn,
            ident,
            dont_fragment,
            ttl,
            total_len,
        },
    )
}

fn ipv6_headers() -> impl Strategy<Value = Ipv6Header> {
    (any::<([u8; 16], [u8; 16])>(), any::<[u8; 3]>(), any::<u32>(), any::<u16>()).prop_map(
        |((src, dst), [next_header, traffic_class, hop_limit], flow_label, payload_len)| Ipv6Header {
            src: Ipv6Addr::from(src),
            dst: Ipv6Addr::from(dst),
            next_header: IpProtocol(next_header),
            traffic_class,
            flow_label,
            hop_limit,
            payload_len,
        },
    )
}

fn tcp_headers() -> impl Strategy<Value = TcpHeader> {
    (any::<[u16; 4]>(), any::<[u32; 2]>(), any::<u8>()).prop_map(
        |([src_port, dst_port, window, urgent], [seq, ack], flags)| TcpHeader {
            src_port,
            dst_port,
            seq,
            ack,
            flags: TcpFlags(flags),
            window,
            urgent,
        },
    )
}

proptest! {
    #[test]
    fn ethernet_header_round_trips(dst: [u8; 6], src: [u8; 6], ethertype: u16, mut to: [u8; 14]) {
        ethernet::write_header(&mut to, MacAddr(dst), MacAddr(src), EtherType(ethertype));
        let frame = EthernetFrame::new_checked(&to).unwrap();
        prop_assert_eq!((frame.dst(), frame.src()), (MacAddr(dst), MacAddr(src)));
        prop_assert_eq!(frame.ethertype(), EtherType(ethertype));
    }

    #[test]
    fn ipv4_header_matches_etherparse(header in ipv4_headers(), mut to: [u8; 20]) {
        header.write(&mut to);
        let len = header.total_len - 20;
        let (src, dst) = (header.src.octets(), header.dst.octets());
        let protocol = IpNumber(header.protocol.0);
        let mut theirs = etherparse::Ipv4Header::new(len, header.ttl, protocol, src, dst).unwrap();
        theirs.dscp = (header.dscp_ecn >> 2).try_into().unwrap();
        theirs.ecn = (header.dscp_ecn & 3).try_into().unwrap();
        theirs.identification = header.ident;
        theirs.dont_fragment = header.dont_fragment;
        theirs.header_checksum = theirs.calc_header_checksum();
        prop_assert_eq!(&to[..], &theirs.to_bytes()[..]);
        let packet = [&to[..], &vec![0; len.into()]].concat();
        let packet = Ipv4Packet::new_checked(&packet).unwrap();
        prop_assert!(packet.verify_checksum() && !packet.is_fragment());
        prop_assert_eq!((packet.src(), packet.dst()), (header.src, header.dst));
    }

    #[test]
    fn ipv6_header_matches_etherparse(header in ipv6_headers(), mut to: [u8; 40]) {
        header.write(&mut to);
        let theirs = etherparse::Ipv6Header {
            traffic_class: header.traffic_class,
            flow_label: (header.flow_label & 0xf_ffff).try_into().unwrap(),
            payload_length: header.payload_len,
            next_header: IpNumber(header.next_header.0),
            hop_limit: header.hop_limit,
            source: header.src.octets(),
            destination: header.dst.octets(),
        };
        prop_assert_eq!(to, theirs.to_bytes());
        let packet = [&to[..], &vec![0; header.payload_len.into()]].concat();
        let packet = Ipv6Packet::new_checked(&packet).unwrap();
        prop_assert_eq!(packet.traffic_class(), header.traffic_class);
        prop_assert_eq!(packet.flow_label(), header.flow_label & 0xf_ffff);
    }

    #[test]
    fn tcp_header_matches_etherparse(header in tcp_headers(), words in 0..=10usize, mut to: [u8; 20]) {
        header.write(&mut to, words * 4);
        let mut theirs =
            etherparse::TcpHeader::new(header.src_port, header.dst_port, header.seq, header.window);
        theirs.acknowledgment_number = header.ack;
        theirs.urgent_pointer = header.urgent;
        let is_set = |flag| header.flags.contains(flag);
        theirs.fin = is_set(TcpFlags::FIN);
        theirs.syn = is_set(TcpFlags::SYN);
        theirs.rst = is_set(TcpFlags::RST);
        theirs.psh = is_set(TcpFlags::PSH);
        theirs.ack = is_set(TcpFlags::ACK);
        theirs.urg = is_set(TcpFlags::URG);
        theirs.ece = is_set(TcpFlags::ECE);
        theirs.cwr = is_set(TcpFlags::CWR);
        theirs.set_options_raw(&vec![1; words * 4]).unwrap();
        let theirs = theirs.to_bytes();
        prop_assert_eq!(&to[..], &theirs[..20]);
        let segment = [&to[..], &vec![1; words * 4]].concat();
        let segment = TcpSegment::new_checked(&segment).unwrap();
        prop_assert_eq!((segment.options().len(), segment.flags()), (words * 4, header.flags));
    }

    #[test]
    fn tcp_option_length_is_clamped(header in tcp_headers(), len: usize, mut to: [u8; 20]) {
        header.write(&mut to, len);
        let segment = [&to[..], &[1; 40]].concat();
        let options = TcpSegment::new_checked(&segment).unwrap().options().len();
        prop_assert_eq!(options, len.min(40) / 4 * 4);
    }

    #[test]
    fn udp_header_matches_etherparse(src_port: u16, dst_port: u16, len in 8u16.., mut to: [u8; 8]) {
        UdpHeader { src_port, dst_port, len }.write(&mut to);
        let theirs = etherparse::UdpHeader {
            source_port: src_port,
            destination_port: dst_port,
            length: len,
            checksum: 0,
        };
        prop_assert_eq!(to, theirs.to_bytes());
        let datagram = [&to[..], &vec![0; usize::from(len) - 8]].concat();
        prop_assert_eq!(UdpDatagram::new_checked(&datagram).unwrap().length(), len);
    }
}

#[test]
fn tcp_flags_behave_as_sets() {
    let syn_ack = TcpFlags::SYN | TcpFlags::ACK;
    assert!(syn_ack.intersects(TcpFlags::ACK | TcpFlags::RST) && !syn_ack.intersects(TcpFlags::RST));
    assert!(!syn_ack.intersects(TcpFlags::default()) && syn_ack.contains(TcpFlags::default()));
    assert_eq!(syn_ack.without(TcpFlags::SYN | TcpFlags::FIN), TcpFlags::ACK);
    assert!(syn_ack.without(syn_ack).is_empty() && !syn_ack.is_empty());
}
