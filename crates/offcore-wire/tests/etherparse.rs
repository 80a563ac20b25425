//! Compares every view with etherparse, an independent implementation: on packets from its builder, and on IPv4 packets
//! with random damage, which both must accept or refuse alike. exhaustive.rs tests every length field.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

use etherparse::{
    EtherPayloadSlice, Ethernet2Slice, IpHeaders, IpNumber, Ipv4HeaderSlice, Ipv4Options, Ipv6HeaderSlice,
    PacketBuilder, SingleVlanSlice, TcpHeader, TcpSlice, UdpSlice,
};
use offcore_wire::{
    EtherType, EthernetFrame, EthernetFrameMut, IpProtocol, Ipv4Packet, Ipv6Packet, Layer, MacAddr, Sum,
    TcpFlags, TcpSegment, UdpDatagram, VlanTag, WireError, checksum,
};
use proptest::{prelude::*, sample::Index};

#[derive(Debug, Clone)]
enum Transport {
    Tcp { header: TcpHeader },
    Udp { src_port: u16, dst_port: u16 },
}

fn transports() -> impl Strategy<Value = Transport> {
    let tcp = (any::<[u16; 2]>(), any::<[u32; 2]>(), any::<[u16; 2]>(), any::<[bool; 8]>(), 0..=10usize)
        .prop_map(|([src, dst], [seq, ack], [window, urgent], flags, option_words)| {
            let mut header = TcpHeader::new(src, dst, seq, window);
            header.acknowledgment_number = ack;
            header.urgent_pointer = urgent;
            [
                header.fin, header.syn, header.rst, header.psh, header.ack, header.urg, header.ece,
                header.cwr,
            ] = flags;
            // No-operation options.
            header.set_options_raw(&vec![1; option_words * 4]).unwrap();
            Transport::Tcp { header }
        });
    let udp = any::<[u16; 2]>().prop_map(|[src_port, dst_port]| Transport::Udp { src_port, dst_port });
    prop_oneof![tcp, udp]
}

fn ipv4_headers() -> impl Strategy<Value = IpHeaders> {
    let flags = (any::<bool>(), any::<bool>(), 0..0x2000u16);
    let whole_or_part =
        prop_oneof![Just((true, false, 0)), Just((false, false, 0)), Just((false, true, 0)), flags];
    (any::<[u8; 4]>(), any::<[u8; 4]>(), any::<u8>(), any::<u16>(), any::<u8>(), 0..=10usize, whole_or_part)
        .prop_map(|(src, dst, ttl, ident, tos, option_words, (dont, more, offset))| {
            let mut header = etherparse::Ipv4Header::new(0, ttl, IpNumber::UDP, src, dst).unwrap();
            header.identification = ident;
            header.dscp = (tos >> 2).try_into().unwrap();
            header.ecn = (tos & 3).try_into().unwrap();
            header.dont_fragment = dont;
            header.more_fragments = more;
            header.fragment_offset = offset.try_into().unwrap();
            header.options = Ipv4Options::try_from(&vec![1; option_words * 4][..]).unwrap();
            IpHeaders::Ipv4(header, Default::default())
        })
}

fn ipv6_headers() -> impl Strategy<Value = IpHeaders> {
    (any::<[u8; 16]>(), any::<[u8; 16]>(), any::<u8>(), any::<u8>(), 0..0x10_0000u32).prop_map(
        |(source, destination, hop_limit, traffic_class, label)| {
            let header = etherparse::Ipv6Header {
                traffic_class,
                flow_label: label.try_into().unwrap(),
                hop_limit,
                source,
                destination,
                ..Default::default()
            };
            IpHeaders::Ipv6(header, Default::default())
        },
    )
}

fn payloads() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..120)
}

fn ip_packet(ip: IpHeaders, transport: Transport, payload: &[u8]) -> Vec<u8> {
    let mut packet = Vec::new();
    let builder = PacketBuilder::ip(ip);
    match transport {
        Transport::Tcp { header } => builder.tcp_header(header).write(&mut packet, payload).unwrap(),
        Transport::Udp { src_port, dst_port } => {
            builder.udp(src_port, dst_port).write(&mut packet, payload).unwrap();
        }
    }
    packet
}

/// Generates up to three changed bytes, most likely among the first ones, which contain lengths and versions, and
/// optionally a truncation.
fn damage() -> impl Strategy<Value = Damage> {
    (prop::collection::vec(any::<(Index, u8)>(), 0..4), prop::option::weighted(0.3, any::<Index>()))
        .prop_map(|(changes, cut)| Damage { changes, cut })
}

/// Changed bytes of a packet, and its truncation.
#[derive(Debug)]
struct Damage {
    changes: Vec<(Index, u8)>,
    cut: Option<Index>,
}

fn damaged(mut bytes: Vec<u8>, damage: Damage) -> Vec<u8> {
    for (at, value) in damage.changes {
        let within = bytes.len().min(24);
        bytes[at.index(within)] = value;
    }
    if let Some(cut) = damage.cut {
        bytes.truncate(cut.index(bytes.len() + 1));
    }
    bytes
}

/// Returns whether etherparse accepts an IPv4 packet, without its check of authentication headers.
fn etherparse_takes_ipv4(bytes: &[u8]) -> bool {
    Ipv4HeaderSlice::from_slice(bytes)
        .is_ok_and(|header| (header.slice().len()..=bytes.len()).contains(&header.total_len().into()))
}

fn same_ipv4(ours: &Ipv4Packet<'_>, bytes: &[u8]) -> Result<(), TestCaseError> {
    let theirs = Ipv4HeaderSlice::from_slice(bytes).unwrap();
    prop_assert_eq!(ours.header_len(), theirs.slice().len());
    prop_assert_eq!(ours.total_len(), theirs.total_len());
    prop_assert_eq!(ours.dscp(), theirs.dcp().value());
    prop_assert_eq!(ours.ecn(), theirs.ecn().value());
    prop_assert_eq!(ours.ident(), theirs.identification());
    prop_assert_eq!(ours.dont_fragment(), theirs.dont_fragment());
    prop_assert_eq!(ours.more_fragments(), theirs.more_fragments());
    prop_assert_eq!(ours.fragment_offset(), theirs.fragments_offset().value() << 3);
    prop_assert_eq!(ours.is_fragment(), theirs.is_fragmenting_payload());
    prop_assert_eq!(ours.ttl(), theirs.ttl());
    prop_assert_eq!(ours.protocol().0, theirs.protocol().0);
    prop_assert_eq!(ours.checksum(), theirs.header_checksum());
    prop_assert_eq!(ours.src(), theirs.source_addr());
    prop_assert_eq!(ours.dst(), theirs.destination_addr());
    prop_assert_eq!(ours.options(), theirs.options());
    prop_assert_eq!(ours.payload(), &bytes[theirs.slice().len()..theirs.total_len().into()]);
    // etherparse's header value lacks the reserved flag, so its checksum does not include this bit.
    if bytes[6] & 0x80 == 0 {
        let expected = theirs.to_header().calc_header_checksum();
        prop_assert_eq!(ours.verify_checksum(), expected == theirs.header_checksum());
    }
    Ok(())
}

fn same_tcp(ours: &TcpSegment<'_>, theirs: &TcpSlice<'_>) -> Result<(), TestCaseError> {
    prop_assert_eq!(ours.src_port(), theirs.source_port());
    prop_assert_eq!(ours.dst_port(), theirs.destination_port());
    prop_assert_eq!(ours.seq(), theirs.sequence_number());
    prop_assert_eq!(ours.ack(), theirs.acknowledgment_number());
    prop_assert_eq!(ours.header_len(), usize::from(theirs.data_offset()) * 4);
    prop_assert_eq!(ours.window(), theirs.window_size());
    prop_assert_eq!(ours.checksum(), theirs.checksum());
    prop_assert_eq!(ours.urgent(), theirs.urgent_pointer());
    prop_assert_eq!(ours.options(), theirs.options());
    prop_assert_eq!(ours.payload(), theirs.payload());
    for (flag, set) in [
        (TcpFlags::FIN, theirs.fin()),
        (TcpFlags::SYN, theirs.syn()),
        (TcpFlags::RST, theirs.rst()),
        (TcpFlags::PSH, theirs.psh()),
        (TcpFlags::ACK, theirs.ack()),
        (TcpFlags::URG, theirs.urg()),
        (TcpFlags::ECE, theirs.ece()),
        (TcpFlags::CWR, theirs.cwr()),
    ] {
        prop_assert_eq!(ours.flags().contains(flag), set);
    }
    Ok(())
}

fn same_udp(ours: &UdpDatagram<'_>, theirs: &UdpSlice<'_>) -> Result<(), TestCaseError> {
    prop_assert_eq!(ours.src_port(), theirs.source_port());
    prop_assert_eq!(ours.dst_port(), theirs.destination_port());
    prop_assert_eq!(ours.length(), theirs.length());
    prop_assert_eq!(ours.checksum(), theirs.checksum());
    prop_assert_eq!(ours.payload(), theirs.payload());
    Ok(())
}

proptest! {
    #[test]
    fn ethernet(dst: [u8; 6], src: [u8; 6], bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        let ours = EthernetFrame::new_checked(&bytes);
        let theirs = Ethernet2Slice::from_slice_without_fcs(&bytes);
        prop_assert_eq!(ours.is_ok(), theirs.is_ok());
        let Ok((ours, theirs)) = ours.map(|ours| (ours, theirs.unwrap())) else { return Ok(()) };
        prop_assert_eq!(ours.dst().0, theirs.destination());
        prop_assert_eq!(ours.src().0, theirs.source());
        prop_assert_eq!(ours.ethertype().0, theirs.ether_type().0);
        prop_assert_eq!(ours.payload(), theirs.payload_slice());

        let (old_dst, old_src) = (ours.dst(), ours.src());
        let mut changed = bytes.clone();
        let mut frame = EthernetFrameMut::new_checked(&mut changed).unwrap();
        frame.swap_addresses();
        prop_assert_eq!((frame.as_view().dst(), frame.as_view().src()), (old_src, old_dst));
        frame.set_dst(MacAddr(dst));
        frame.set_src(MacAddr(src));
        let expected = [&dst[..], &src, &bytes[12..]].concat();
        prop_assert_eq!(changed, expected);
    }

    #[test]
    fn vlan(bytes in prop::collection::vec(any::<u8>(), 0..20)) {
        let ours = VlanTag::new_checked(&bytes);
        let theirs = SingleVlanSlice::from_slice(&bytes);
        prop_assert_eq!(ours.is_ok(), theirs.is_ok());
        let Ok((ours, theirs)) = ours.map(|ours| (ours, theirs.unwrap())) else { return Ok(()) };
        prop_assert_eq!(ours.priority(), theirs.priority_code_point().value());
        prop_assert_eq!(ours.id(), theirs.vlan_identifier().value());
        prop_assert_eq!(ours.ethertype().0, theirs.ether_type().0);
        let EtherPayloadSlice { payload, .. } = theirs.payload();
        prop_assert_eq!(ours.payload(), payload);
    }

    #[test]
    fn ipv4_built(ip in ipv4_headers(), transport in transports(), payload in payloads(), padding in 0..20usize) {
        let is_tcp = matches!(transport, Transport::Tcp { .. });
        let mut bytes = ip_packet(ip, transport, &payload);
        bytes.extend(vec![0; padding]);
        let packet = Ipv4Packet::new_checked(&bytes).unwrap();
        prop_assert!(packet.verify_checksum());
        same_ipv4(&packet, &bytes)?;
        let (src, dst) = (packet.src(), packet.dst());
        if is_tcp {
            prop_assert_eq!(packet.protocol(), IpProtocol::TCP);
            let segment = TcpSegment::new_checked(packet.payload()).unwrap();
            same_tcp(&segment, &TcpSlice::from_slice(packet.payload()).unwrap())?;
            prop_assert!(segment.verify_checksum_v4(src, dst));
            prop_assert_eq!(segment.payload(), &payload[..]);
        } else {
            prop_assert_eq!(packet.protocol(), IpProtocol::UDP);
            let datagram = UdpDatagram::new_checked(packet.payload()).unwrap();
            same_udp(&datagram, &UdpSlice::from_slice(packet.payload()).unwrap())?;
            prop_assert!(datagram.verify_checksum_v4(src, dst));
            prop_assert_eq!(datagram.payload(), &payload[..]);
        }
    }

    #[test]
    fn ipv6_built(ip in ipv6_headers(), transport in transports(), payload in payloads(), padding in 0..20usize) {
        let is_tcp = matches!(transport, Transport::Tcp { .. });
        let mut bytes = ip_packet(ip, transport, &payload);
        let whole = bytes.len();
        bytes.extend(vec![0; padding]);
        let packet = Ipv6Packet::new_checked(&bytes).unwrap();
        let theirs = Ipv6HeaderSlice::from_slice(&bytes).unwrap();
        prop_assert_eq!(packet.traffic_class(), theirs.traffic_class());
        prop_assert_eq!(packet.flow_label(), theirs.flow_label().value());
        prop_assert_eq!(packet.payload_len(), theirs.payload_length());
        prop_assert_eq!(packet.next_header().0, theirs.next_header().0);
        prop_assert_eq!(packet.hop_limit(), theirs.hop_limit());
        prop_assert_eq!(packet.src(), theirs.source_addr());
        prop_assert_eq!(packet.dst(), theirs.destination_addr());
        prop_assert_eq!(packet.payload(), &bytes[40..whole]);
        let (src, dst) = (packet.src(), packet.dst());
        let protocol = if is_tcp { IpProtocol::TCP } else { IpProtocol::UDP };
        let pseudo = Sum::pseudo_v6(src, dst, protocol, packet.payload().len() as u32);
        prop_assert!((pseudo + Sum::of(packet.payload())).is_valid());
    }

    #[test]
    fn ipv4_damaged(ip in ipv4_headers(), transport in transports(), payload in payloads(), damage in damage()) {
        let bytes = damaged(ip_packet(ip, transport, &payload), damage);
        let takes = etherparse_takes_ipv4(&bytes);
        match Ipv4Packet::new_checked(&bytes) {
            Ok(packet) => {
                prop_assert!(takes);
                same_ipv4(&packet, &bytes)?;
            }
            Err(_) => prop_assert!(!takes),
        }
    }

    #[test]
    fn wrong_checksum_is_detected(
        src: [u8; 4],
        dst: [u8; 4],
        transport in transports(),
        payload in payloads(),
        at: Index,
        flip in 1..=255u8,
    ) {
        let is_tcp = matches!(transport, Transport::Tcp { .. });
        let ip = etherparse::Ipv4Header::new(0, 64, IpNumber::UDP, src, dst).unwrap();
        let packet = ip_packet(IpHeaders::Ipv4(ip, Default::default()), transport, &payload);
        let mut bytes = packet[20..].to_vec();
        // Damages a byte of the ports, so that lengths stay valid.
        let at = at.index(4);
        bytes[at] ^= flip;
        let valid = if is_tcp {
            TcpSegment::new_checked(&bytes).unwrap().verify_checksum_v4(src.into(), dst.into())
        } else {
            UdpDatagram::new_checked(&bytes).unwrap().verify_checksum_v4(src.into(), dst.into())
        };
        prop_assert!(!valid);
        if !is_tcp {
            // A datagram without a checksum is valid only over IPv4.
            bytes[6..8].fill(0);
            let datagram = UdpDatagram::new_checked(&bytes).unwrap();
            prop_assert!(datagram.verify_checksum_v4(src.into(), dst.into()));
        }
    }

    /// The packet of a guest with checksum offload: the field contains the sum of the pseudo header, and the device
    /// completes it.
    #[test]
    fn checksum_completed_for_virtio(
        src: [u8; 4],
        dst: [u8; 4],
        transport in transports(),
        payload in payloads(),
    ) {
        let (protocol, field) = match transport {
            Transport::Tcp { .. } => (IpProtocol::TCP, offcore_wire::tcp::CHECKSUM_OFFSET),
            Transport::Udp { .. } => (IpProtocol::UDP, offcore_wire::udp::CHECKSUM_OFFSET),
        };
        let ip = etherparse::Ipv4Header::new(0, 64, IpNumber::UDP, src, dst).unwrap();
        let packet = ip_packet(IpHeaders::Ipv4(ip, Default::default()), transport, &payload);
        let mut frame = [&[0; 14], &packet[..]].concat();
        let len = u16::try_from(packet.len() - 20).unwrap();
        let pseudo = Sum::pseudo_v4(src.into(), dst.into(), protocol, len);
        let at = 34 + usize::from(field);
        frame[at..at + 2].copy_from_slice(&pseudo.value().to_be_bytes());
        checksum::complete(&mut frame, 34, field).unwrap();
        let expected = &packet[20 + usize::from(field)..][..2];
        match expected {
            // A TCP checksum may be 0. The completed checksum has the equivalent value 0xffff.
            [0, 0] => prop_assert_eq!(&frame[at..at + 2], &[0xff, 0xff]),
            _ => prop_assert_eq!(&frame[14..], &packet[..]),
        }
    }
}

#[test]
fn parse_errors_report_found_values() {
    let says = |error: WireError| error.to_string();
    assert_eq!(
        says(EthernetFrame::new_checked(&[0; 13]).unwrap_err()),
        "Ethernet header needs 14 bytes, but only 13 are there"
    );
    assert_eq!(
        says(VlanTag::new_checked(&[0; 3]).unwrap_err()),
        "VLAN header needs 4 bytes, but only 3 are there"
    );
    let mut ip = [0; 24];
    ip[0] = 0x65;
    assert_eq!(says(Ipv4Packet::new_checked(&ip).unwrap_err()), "IPv4 header has version 6, expected 4");
    ip[0] = 0x44;
    assert_eq!(
        says(Ipv4Packet::new_checked(&ip).unwrap_err()),
        "IPv4 header says it is 16 bytes long; the least is 20"
    );
    ip[0] = 0x4f;
    let short = WireError::TooShort { layer: Layer::Ipv4, found: 24, needed: 60 };
    assert_eq!(Ipv4Packet::new_checked(&ip).unwrap_err(), short);
    ip[0] = 0x45;
    ip[3] = 25;
    assert_eq!(
        says(Ipv4Packet::new_checked(&ip).unwrap_err()),
        "IPv4 length field says 25 bytes; expected 20 to 24"
    );
    let udp = [0, 1, 0, 2, 0, 7, 0, 0];
    assert_eq!(
        says(UdpDatagram::new_checked(&udp).unwrap_err()),
        "UDP length field says 7 bytes; expected 8 to 8"
    );
    assert_eq!(format!("{:?}", TcpFlags::SYN | TcpFlags::ACK), r#"{"SYN", "ACK"}"#);
    assert_eq!(
        format!("{} {} {}", EtherType::IPV4, EtherType(0x1234), IpProtocol(89)),
        "IPv4 0x1234 IP protocol 89"
    );
}
