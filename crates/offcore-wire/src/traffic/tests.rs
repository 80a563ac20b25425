use etherparse::{LinkExtSlice, NetSlice, SlicedPacket, TransportSlice};
use proptest::prelude::*;

use super::*;
use crate::{TcpSegment, UdpDatagram};

fn traffic() -> impl Strategy<Value = Traffic> {
    let addresses = prop_oneof![
        any::<[[u8; 4]; 2]>().prop_map(|[src, dst]| [IpAddr::from(src), IpAddr::from(dst)]),
        any::<[[u8; 16]; 2]>().prop_map(|[src, dst]| [IpAddr::from(src), IpAddr::from(dst)]),
    ];
    let vary = any::<[bool; 4]>().prop_map(|[src_ip, dst_ip, src_port, dst_port]| Vary {
        src_ip,
        dst_ip,
        src_port,
        dst_port,
    });
    let transport = prop_oneof![Just(Transport::Tcp), Just(Transport::Udp)];
    let vlan = proptest::option::of(0..4096u16);
    (any::<([u8; 6], [u8; 6])>(), vlan, addresses, transport, any::<(u16, u16)>(), vary).prop_map(
        |((src_mac, dst_mac), vlan, [src_ip, dst_ip], transport, (src_port, dst_port), vary)| Traffic {
            src_mac: MacAddr(src_mac),
            dst_mac: MacAddr(dst_mac),
            vlan,
            src_ip,
            dst_ip,
            transport,
            src_port,
            dst_port,
            vary,
        },
    )
}

fn plus(address: IpAddr, flow: u32) -> IpAddr {
    match address {
        IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits().wrapping_add(flow)).into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits().wrapping_add(flow.into())).into(),
    }
}

#[test]
fn mixed_address_families_are_rejected() {
    let traffic = Traffic {
        src_mac: MacAddr::LOCAL,
        dst_mac: MacAddr::LOCAL,
        vlan: None,
        src_ip: IpAddr::from([10, 0, 0, 1]),
        dst_ip: "::1".parse().unwrap(),
        transport: Transport::Udp,
        src_port: 9,
        dst_port: 9,
        vary: Vary::default(),
    };
    let error = HeaderTemplate::new(&traffic).unwrap_err().to_string();
    assert!(error.contains("10.0.0.1") && error.contains("::1") && error.contains("both"), "{error}");
}

proptest! {
    #[test]
    fn etherparse_reads_configured_fields(
        traffic in traffic(),
        flow in 0..70_000u32,
        number: u32,
        payload in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let template = HeaderTemplate::new(&traffic).unwrap();
        let mut frame = vec![0xee; template.len()];
        frame.extend_from_slice(&payload);
        template.write(&mut frame, flow, number, template.len() + payload.len(), Sum::of(&payload));

        let Traffic { src_mac, dst_mac, vlan, src_ip, dst_ip, src_port, dst_port, vary, .. } = traffic;
        let parsed = SlicedPacket::from_ethernet(&frame).unwrap();
        let Some(etherparse::LinkSlice::Ethernet2(ethernet)) = &parsed.link else { panic!("no Ethernet") };
        prop_assert_eq!((ethernet.source(), ethernet.destination()), (src_mac.0, dst_mac.0));
        let tag = parsed.link_exts.first().map(|tag| match tag {
            LinkExtSlice::Vlan(tag) => tag.vlan_identifier().value(),
            LinkExtSlice::Macsec(_) => panic!("no such tag was asked for"),
        });
        prop_assert_eq!(tag, vlan);

        let src = if vary.src_ip { plus(src_ip, flow) } else { src_ip };
        let dst = if vary.dst_ip { plus(dst_ip, flow) } else { dst_ip };
        match (parsed.net.unwrap(), src, dst) {
            (NetSlice::Ipv4(ip), IpAddr::V4(src), IpAddr::V4(dst)) => {
                let header = ip.header();
                prop_assert_eq!((header.source_addr(), header.destination_addr()), (src, dst));
                prop_assert_eq!(header.header_checksum(), header.to_header().calc_header_checksum());
                prop_assert_eq!(usize::from(header.total_len()) + template.ip, frame.len());
            }
            (NetSlice::Ipv6(ip), IpAddr::V6(src), IpAddr::V6(dst)) => {
                prop_assert_eq!((ip.header().source_addr(), ip.header().destination_addr()), (src, dst));
            }
            (other, ..) => panic!("{other:?}"),
        }

        let src_port = if vary.src_port { src_port.wrapping_add(flow as u16) } else { src_port };
        let dst_port = if vary.dst_port { dst_port.wrapping_add(flow as u16) } else { dst_port };
        let is_valid_v6 = |src, dst, protocol| {
            let bytes = &frame[template.transport..];
            (Sum::pseudo_v6(src, dst, protocol, bytes.len() as u32) + Sum::of(bytes)).is_valid()
        };
        match parsed.transport.unwrap() {
            TransportSlice::Tcp(tcp) => {
                prop_assert_eq!((tcp.source_port(), tcp.destination_port()), (src_port, dst_port));
                prop_assert_eq!((tcp.sequence_number(), tcp.ack()), (number, true));
                prop_assert_eq!(tcp.payload(), &payload[..]);
                let tcp = TcpSegment::new_checked(&frame[template.transport..]).unwrap();
                let valid = match (src, dst) {
                    (IpAddr::V4(src), IpAddr::V4(dst)) => tcp.verify_checksum_v4(src, dst),
                    (IpAddr::V6(src), IpAddr::V6(dst)) => is_valid_v6(src, dst, IpProtocol::TCP),
                    _ => false,
                };
                prop_assert!(valid);
            }
            TransportSlice::Udp(udp) => {
                prop_assert_eq!((udp.source_port(), udp.destination_port()), (src_port, dst_port));
                prop_assert_eq!(udp.payload(), &payload[..]);
                let udp = UdpDatagram::new_checked(&frame[template.transport..]).unwrap();
                match (src, dst) {
                    (IpAddr::V6(src), IpAddr::V6(dst)) => {
                        // The checksum is mandatory over IPv6 (RFC 8200, section 8.1).
                        prop_assert!(udp.checksum() != 0 && is_valid_v6(src, dst, IpProtocol::UDP));
                    }
                    _ => prop_assert_eq!(udp.checksum(), 0),
                }
            }
            other => panic!("{other:?}"),
        }
    }
}
