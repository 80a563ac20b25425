//! Segmentation of TCP packets, datagrams and tunnel packets: each segment must equal the packet that etherparse, an
//! independent implementation, builds from the same part of the payload. Hostile headers are rejected.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

use etherparse::{
    IpHeaders, IpNumber, Ipv4Header, Ipv4Options, Ipv6Extensions, Ipv6Header, Ipv6RawExtHeader,
    PacketBuilder, TcpHeader, VlanId,
};
use offcore_wire::gso::{GsoError, Ip, MAX_HEADERS, Segmenter, is_tunnelled};
use offcore_wire::virtio_net::{
    GSO_TUNNEL, NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_TCPV4,
    VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP, VIRTIO_NET_HDR_GSO_UDP_L4,
};
use offcore_wire::{EtherType, IpProtocol, Sum};
use proptest::prelude::*;

/// A tunnel type.
#[derive(Debug, Clone, Copy)]
enum Tunnel {
    None,
    Vxlan { checksum: bool },
    Geneve { words: u8, bare: bool },
    Gre { checksum: bool, key: bool, bare: bool },
    IpInIp,
    IpInUdp,
}

/// The headers of a packet.
#[derive(Debug, Clone, Copy)]
struct Kind {
    tunnel: Tunnel,
    outer_v6: bool,
    v6: bool,
    tcp: bool,
    tags: u8,
    idents: [u16; 2],
    flags: [bool; 8],
    /// Words of IPv4 options, or a choice of IPv6 extension headers, of the inner IP header.
    options: u8,
}

const PLAIN: Kind = Kind {
    tunnel: Tunnel::None,
    outer_v6: false,
    v6: false,
    tcp: true,
    tags: 0,
    idents: [1, 2],
    flags: [true; 8],
    options: 0,
};

fn ip(v6: bool, ident: u16, options: u8) -> IpHeaders {
    if v6 {
        let header = Ipv6Header { source: [3; 16], destination: [7; 16], hop_limit: 9, ..Default::default() };
        // 6, 14 or 22 bytes of padding options, behind the first two bytes of the header.
        let raw = |len: usize| {
            let mut options = vec![0; len];
            options[..2].copy_from_slice(&[1, (len - 2) as u8]);
            Some(Ipv6RawExtHeader::new_raw(IpNumber::TCP, &options).unwrap())
        };
        let extensions = match options % 3 {
            0 => Ipv6Extensions::default(),
            1 => Ipv6Extensions { hop_by_hop_options: raw(6), ..Default::default() },
            _ => Ipv6Extensions {
                hop_by_hop_options: raw(14),
                destination_options: raw(22),
                ..Default::default()
            },
        };
        return IpHeaders::Ipv6(header, extensions);
    }
    let mut header = Ipv4Header::new(0, 64, IpNumber(0), [10, 0, 0, 1], [10, 0, 0, 2]).unwrap();
    header.identification = ident;
    header.options = Ipv4Options::try_from(&vec![1; usize::from(options) * 4][..]).unwrap();
    IpHeaders::Ipv4(header, Default::default())
}

impl Kind {
    /// Returns packet number `index` with the part of the payload that begins at `from`.
    fn packet(&self, index: usize, from: usize, last: bool, part: &[u8]) -> Vec<u8> {
        let [inner, outer] = self.idents.map(|ident| ident.wrapping_add(index as u16));
        let tags = if matches!(self.tunnel, Tunnel::None) { self.tags } else { 0 };
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]);
        let id = VlanId::try_new(5).unwrap();
        let ip = ip(self.v6, inner, self.options);
        let builder = match tags {
            0 => builder.ip(ip),
            1 => builder.single_vlan(id).ip(ip),
            _ => builder.double_vlan(id, id).ip(ip),
        };
        let mut frame = Vec::new();
        if self.tcp {
            let mut tcp = TcpHeader::new(80, 90, (u32::MAX - 700).wrapping_add(from as u32), 512);
            [tcp.fin, tcp.syn, tcp.rst, tcp.psh, tcp.ack, tcp.urg, tcp.ece, tcp.cwr] = self.flags;
            tcp.fin &= last;
            tcp.psh &= last;
            tcp.cwr &= index == 0;
            tcp.set_options_raw(&[1; 12]).unwrap();
            builder.tcp_header(tcp).write(&mut frame, part).unwrap();
        } else {
            builder.udp(443, 5555).write(&mut frame, part).unwrap();
        }
        self.carried(&frame, outer)
    }

    fn carried(&self, frame: &[u8], ident: u16) -> Vec<u8> {
        let packet = &frame[14..];
        let ethertype = if self.v6 { [0x86, 0xdd] } else { [8, 0] };
        let (inside, udp_checksum) = match self.tunnel {
            Tunnel::None => return frame.to_vec(),
            Tunnel::Vxlan { checksum } => ([&[8, 0, 0, 0, 0, 0, 42, 0], frame].concat(), Some(checksum)),
            Tunnel::Geneve { words, bare } => {
                let options = vec![words; usize::from(words) * 4];
                let carries = if bare { ethertype } else { [0x65, 0x58] };
                let header = [words, 0, carries[0], carries[1], 0, 0, 42, 0];
                ([&header[..], &options, if bare { packet } else { frame }].concat(), Some(true))
            }
            Tunnel::Gre { checksum, key, bare } => {
                let carries = if bare { ethertype } else { [0x65, 0x58] };
                let mut bytes = vec![u8::from(checksum) << 7 | u8::from(key) << 5, 0, carries[0], carries[1]];
                bytes.resize(4 + 4 * usize::from(checksum), 0);
                bytes.extend(&[0, 0, 0, 7][..4 * usize::from(key)]);
                bytes.extend(if bare { packet } else { frame });
                if checksum {
                    let sum = Sum::of(&bytes).checksum();
                    bytes[4..6].copy_from_slice(&sum.to_be_bytes());
                }
                (bytes, None)
            }
            Tunnel::IpInIp => (packet.to_vec(), None),
            Tunnel::IpInUdp => (packet.to_vec(), Some(true)),
        };
        let number = match self.tunnel {
            Tunnel::Gre { .. } => IpNumber::GRE,
            _ if self.v6 => IpNumber::IPV6,
            _ => IpNumber::IPV4,
        };
        let mut whole = Vec::new();
        let builder = PacketBuilder::ethernet2([6; 6], [8; 6]).ip(ip(self.outer_v6, ident, 0));
        match udp_checksum {
            None => builder.write(&mut whole, number, &inside).unwrap(),
            Some(checksum) => {
                builder.udp(50_000, 4789).write(&mut whole, &inside).unwrap();
                if !checksum {
                    let at = if self.outer_v6 { 60 } else { 40 };
                    whole[at..at + 2].fill(0);
                }
            }
        }
        whole
    }

    fn header(&self, whole: &[u8], payload: usize, gso_size: u16) -> NetHeader {
        let transport_len = if self.tcp { 32 } else { 8 };
        NetHeader {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            gso_type: match (self.tcp, self.v6) {
                (false, _) => VIRTIO_NET_HDR_GSO_UDP_L4,
                (true, false) => VIRTIO_NET_HDR_GSO_TCPV4,
                (true, true) => VIRTIO_NET_HDR_GSO_TCPV6,
            },
            gso_size,
            csum_start: (whole.len() - payload - transport_len) as u16,
            csum_offset: if self.tcp { 16 } else { 6 },
            ..NetHeader::default()
        }
    }
}

fn kinds() -> impl Strategy<Value = Kind> {
    let tunnel = prop_oneof![
        Just(Tunnel::None),
        any::<bool>().prop_map(|checksum| Tunnel::Vxlan { checksum }),
        (0..64u8, any::<bool>()).prop_map(|(words, bare)| Tunnel::Geneve { words, bare }),
        any::<[bool; 3]>().prop_map(|[checksum, key, bare]| Tunnel::Gre { checksum, key, bare }),
        Just(Tunnel::IpInIp),
        Just(Tunnel::IpInUdp),
    ];
    (tunnel, any::<[bool; 3]>(), 0..3u8, any::<[u16; 2]>(), any::<[bool; 8]>(), 0..=10u8).prop_map(
        |(tunnel, [outer_v6, v6, tcp], tags, idents, flags, options)| Kind {
            tunnel,
            outer_v6,
            v6,
            tcp,
            tags,
            idents,
            flags,
            options,
        },
    )
}

fn segments(header: &NetHeader, whole: &[u8]) -> Result<Vec<Vec<u8>>, GsoError> {
    let front = &whole[..whole.len().min(MAX_HEADERS)];
    let mut segmenter = Segmenter::new(header, front, whole.len())?;
    let (payload, longest) = (&whole[segmenter.header_len()..], segmenter.longest());
    let cut = segmenter.segments().map(|segment| {
        let part = &payload[segment.payload.clone()];
        // The payload is summed in parts of odd lengths, as it may be scattered in memory.
        [segmenter.headers(&segment, Sum::of_parts(part.chunks(7))), part].concat()
    });
    let packets: Vec<Vec<u8>> = cut.collect();
    assert_eq!(packets.iter().map(Vec::len).max(), Some(longest));
    Ok(packets)
}

proptest! {
    #[test]
    fn segments_match_etherparse(kind in kinds(), len in 0..5000usize, size in 8..1500u16) {
        let payload: Vec<u8> = (0..len).map(|i| (i * 37 + i / 251) as u8).collect();
        let mut whole = kind.packet(0, 0, true, &payload);
        let header = kind.header(&whole, len, size);
        prop_assert_eq!(is_tunnelled(&header, &whole), !matches!(kind.tunnel, Tunnel::None));
        // The sender leaves a partial checksum. Its values in other computed fields are ignored.
        let open = usize::from(header.csum_start + header.csum_offset);
        whole[open..open + 2].fill(0x5a);
        let (ip_at, v6) = match kind.tunnel {
            Tunnel::None => (14 + 4 * usize::from(kind.tags), kind.v6),
            _ => (14, kind.outer_v6),
        };
        for at in if v6 { [4, 5] } else { [2, 10] } {
            whole[ip_at + at] ^= 0x5a;
        }
        let count = len.div_ceil(size.into()).max(1);
        let expected: Vec<Vec<u8>> = (0..count)
            .map(|index| {
                let from = index * usize::from(size);
                kind.packet(index, from, index + 1 == count, &payload[from..len.min(from + usize::from(size))])
            })
            .collect();
        prop_assert_eq!(segments(&header, &whole), Ok(expected.clone()));
        let marked = NetHeader { gso_type: header.gso_type | GSO_TUNNEL, ..header };
        prop_assert_eq!(segments(&marked, &whole), Ok(expected));
    }

    /// A changed byte at any offset results in packets or in an error.
    #[test]
    fn changed_bytes_do_not_panic(
        kind in kinds(),
        changes in prop::collection::vec((0..200usize, any::<u8>()), 1..6),
        csum_start: Option<u16>,
        len in 0..60_000usize,
    ) {
        let mut whole = kind.packet(0, 0, true, &[7; 100]);
        let mut header = kind.header(&whole, 100, 16);
        header.csum_start = csum_start.map_or(header.csum_start, |start| start % 200);
        for (at, value) in changes {
            let within = whole.len() - 1;
            whole[at.min(within)] = value;
        }
        let Ok(mut segmenter) = Segmenter::new(&header, &whole, len) else { return Ok(()) };
        let mut payload = 0;
        for segment in segmenter.segments() {
            let headers = segmenter.headers(&segment, Sum::ZERO).len();
            prop_assert_eq!((headers, segment.payload.start), (segmenter.header_len(), payload));
            prop_assert!(headers + segment.payload.len() <= segmenter.longest());
            payload = segment.payload.end;
        }
        prop_assert_eq!(segmenter.header_len() + payload, len, "every byte is in a segment");
    }
}

fn vxlan() -> (NetHeader, Vec<u8>) {
    let tunnel = Tunnel::Vxlan { checksum: true };
    let kind = Kind { tunnel, ..PLAIN };
    let whole = kind.packet(0, 0, true, &[7; 3000]);
    (kind.header(&whole, 3000, 1000), whole)
}

#[test]
fn misplaced_tunnel_headers_are_refused() {
    let (header, whole) = vxlan();
    assert_eq!(segments(&header, &whole).map(|cut| cut.len()), Ok(3));
    let refused = |at: usize, value: u8| {
        let mut whole = whole.clone();
        whole[at] = value;
        segments(&header, &whole)
    };
    let expected = Err(GsoError::Checksum { csum_start: 84, csum_offset: 16, transport_at: 34 });
    assert_eq!(refused(64, 0x46), expected, "longer inner IP header");
    assert_eq!(refused(62, 9), expected, "inner frame of another protocol");
    assert_eq!(refused(23, 50), expected, "outer packet of another protocol");
    assert_eq!(refused(20, 0x20), expected, "outer packet that is a fragment");
    let inner = |found| GsoError::Transport { found, over: Ip::V4, gso_type: header.gso_type };
    assert_eq!(refused(73, 17), Err(inner(IpProtocol::UDP)));
    assert_eq!(refused(70, 0x20), Err(inner(IpProtocol::FRAGMENT)));
}

#[test]
fn gre_with_sequence_numbers_is_refused() {
    let tunnel = Tunnel::Gre { checksum: false, key: false, bare: true };
    let kind = Kind { tunnel, ..PLAIN };
    let mut whole = kind.packet(0, 0, true, &[7; 3000]);
    whole[34] = 0x10;
    whole.splice(38..38, [0, 0, 0, 9]);
    let header = kind.header(&whole, 3000, 1000);
    assert!(matches!(segments(&header, &whole), Err(GsoError::Checksum { .. })));
}

/// A datagram without a checksum, and without a request for one, gets none.
#[test]
fn zero_udp_checksum_stays_zero() {
    let kind = Kind { tcp: false, ..PLAIN };
    let mut whole = kind.packet(0, 0, true, &[7; 1300]);
    let header = NetHeader { flags: 0, ..kind.header(&whole, 1300, 1) };
    whole[40..42].fill(0);
    let cut = segments(&header, &whole).unwrap();
    assert!(cut.len() == 1300 && cut.iter().all(|packet| packet.len() == 43 && packet[40..42] == [0; 2]));
    whole[40..42].fill(1);
    let cut = segments(&header, &whole).unwrap();
    assert_eq!(cut[9], kind.packet(9, 9, false, &[7]));
}

#[test]
fn unsegmentable_packets_are_rejected() {
    let v4 = PLAIN.packet(0, 0, true, &[7; 3000]);
    let valid = PLAIN.header(&v4, 3000, 1000);
    let refused = |header: NetHeader| segments(&header, &v4).unwrap_err();
    let no_type = VIRTIO_NET_HDR_GSO_UDP_L4 | VIRTIO_NET_HDR_GSO_ECN;
    for gso_type in [0, VIRTIO_NET_HDR_GSO_UDP, no_type, VIRTIO_NET_HDR_GSO_ECN] {
        assert_eq!(refused(NetHeader { gso_type, ..valid }), GsoError::Type { found: gso_type });
    }
    assert_eq!(refused(NetHeader { gso_size: 7, ..valid }), GsoError::Size { found: 7, min_size: 8 });
    for gso_type in [VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP_L4] {
        let expected = GsoError::Transport { found: IpProtocol::TCP, over: Ip::V4, gso_type };
        assert_eq!(refused(NetHeader { gso_type, ..valid }), expected);
    }
    let elsewhere = NetHeader { csum_start: 35, ..valid };
    let expected = GsoError::Checksum { csum_start: 35, csum_offset: 16, transport_at: 34 };
    assert_eq!(refused(elsewhere), expected);
    // These fields are not used without a checksum request.
    assert!(segments(&NetHeader { flags: 0, ..elsewhere }, &v4).is_ok());

    let transport = |found, over| {
        let gso_type = if over == Ip::V4 { VIRTIO_NET_HDR_GSO_TCPV4 } else { VIRTIO_NET_HDR_GSO_TCPV6 };
        GsoError::Transport { found, over, gso_type }
    };
    for (at, value, expected) in [
        (13, 1, GsoError::EtherType { found: EtherType(0x0801) }),
        (23, 17, transport(IpProtocol::UDP, Ip::V4)),
        (20, 0x20, transport(IpProtocol::FRAGMENT, Ip::V4)),
        (14, 0x65, GsoError::IpHeader { found: 0x65 }),
        (14, 0x44, GsoError::IpHeader { found: 0x44 }),
        (46, 0x40, GsoError::TcpHeader { found: 16 }),
    ] {
        let mut changed = v4.clone();
        changed[at] = value;
        assert_eq!(segments(&valid, &changed), Err(expected), "byte {at}");
    }
    for (front, frame_len, expected) in [
        (66, 3066, Ok(66)),
        (65, 3066, Err(GsoError::TooShort { found: 65, needed: 66 })),
        (80, 65, Err(GsoError::TooShort { found: 65, needed: 66 })),
    ] {
        let found = Segmenter::new(&valid, &v4[..front], frame_len).map(|s| s.header_len());
        assert_eq!(found, expected, "{front} of {frame_len} bytes");
    }

    // A routing header with segments left changes the pseudo header.
    let kind = Kind { v6: true, ..PLAIN };
    let mut v6 = kind.packet(0, 0, true, &[7; 3000]);
    v6[20] = 43;
    v6.splice(54..54, [6, 0, 0, 1, 0, 0, 0, 0]);
    let header = kind.header(&v6, 3000, 1000);
    assert_eq!(segments(&header, &v6), Err(transport(IpProtocol::TCP, Ip::V6)));
    v6[57] = 0;
    assert!(segments(&header, &v6).is_ok());
}
