//! Compares segments with etherparse, an independent implementation, which also builds the packets to segment; and
//! tests hostile headers.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

use etherparse::{
    IpHeaders, IpNumber, Ipv4Options, Ipv6ExtensionSlice, Ipv6Extensions, Ipv6RawExtHeader, NetSlice,
    PacketBuilder, SlicedPacket, TcpHeader, TcpHeaderSlice, TransportSlice, VlanId,
};
use offcore_wire::gso::{GsoError, Ip, MAX_HEADERS, Segmenter};
use offcore_wire::virtio_net::{
    NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_TCPV4,
    VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP, VIRTIO_NET_HDR_GSO_UDP_L4,
};
use offcore_wire::{EtherType, IpProtocol, Sum};
use proptest::{prelude::*, sample::Index};

/// A packet to segment: its frame, and the lengths of its parts.
#[derive(Debug, Clone)]
struct Whole {
    frame: Vec<u8>,
    payload_len: usize,
    tcp: TcpHeader,
    v6: bool,
    ident: u16,
}

impl Whole {
    fn tcp_at(&self) -> usize {
        self.frame.len() - self.payload_len - self.tcp.header_len()
    }

    fn payload(&self) -> &[u8] {
        &self.frame[self.frame.len() - self.payload_len..]
    }

    fn header(&self, gso_size: u16) -> NetHeader {
        NetHeader {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            gso_type: if self.v6 { VIRTIO_NET_HDR_GSO_TCPV6 } else { VIRTIO_NET_HDR_GSO_TCPV4 },
            hdr_len: 0,
            gso_size,
            csum_start: self.tcp_at() as u16,
            csum_offset: 16,
            num_buffers: 0,
        }
    }

    fn segmenter(&self, gso_size: u16) -> Result<Segmenter, GsoError> {
        let front = &self.frame[..self.frame.len().min(MAX_HEADERS)];
        Segmenter::new(&self.header(gso_size), front, self.frame.len())
    }

    /// Returns the segments. The payload is summed in parts of odd lengths, as it may be scattered in memory.
    fn cut(&self, gso_size: u16) -> Vec<Vec<u8>> {
        let mut segmenter = self.segmenter(gso_size).unwrap();
        let longest = segmenter.longest();
        let packets: Vec<Vec<u8>> = segmenter
            .segments()
            .map(|segment| {
                let payload = &self.payload()[segment.payload.clone()];
                let headers = segmenter.headers(&segment, Sum::of_parts(payload.chunks(7)));
                [headers, payload].concat()
            })
            .collect();
        assert_eq!(packets.iter().map(Vec::len).max(), Some(longest));
        packets
    }
}

fn ip_headers() -> impl Strategy<Value = (IpHeaders, u16)> {
    let v4 = (any::<[u8; 4]>(), any::<[u8; 4]>(), any::<u16>(), 0..=10usize, any::<bool>()).prop_map(
        |(src, dst, ident, option_words, dont_fragment)| {
            let mut header = etherparse::Ipv4Header::new(0, 64, IpNumber::TCP, src, dst).unwrap();
            header.identification = ident;
            header.dont_fragment = dont_fragment;
            header.ecn = 1u8.try_into().unwrap();
            header.options = Ipv4Options::try_from(&vec![1; option_words * 4][..]).unwrap();
            (IpHeaders::Ipv4(header, Default::default()), ident)
        },
    );
    let v6 =
        (any::<[u8; 16]>(), any::<[u8; 16]>(), 0..3usize).prop_map(|(source, destination, extension)| {
            let header = etherparse::Ipv6Header { source, destination, hop_limit: 9, ..Default::default() };
            // 6, 14 or 22 bytes of padding options, behind the first two bytes of the header.
            let raw = |len: usize| {
                let mut options = vec![0; len];
                options[..2].copy_from_slice(&[1, (len - 2) as u8]);
                Some(Ipv6RawExtHeader::new_raw(IpNumber::TCP, &options).unwrap())
            };
            let extensions = match extension {
                0 => Ipv6Extensions::default(),
                1 => Ipv6Extensions { hop_by_hop_options: raw(6), ..Default::default() },
                _ => Ipv6Extensions {
                    hop_by_hop_options: raw(14),
                    destination_options: raw(22),
                    ..Default::default()
                },
            };
            (IpHeaders::Ipv6(header, extensions), 0)
        });
    prop_oneof![v4, v6]
}

fn wholes(longest: usize) -> impl Strategy<Value = Whole> {
    let tcp = (any::<[u16; 2]>(), any::<u32>(), any::<[bool; 8]>(), 0..=10usize);
    let payload = (0..longest, any::<u8>());
    (ip_headers(), tcp, payload, 0..3u8).prop_map(
        |((ip, ident), ([src, dst], seq, flags, option_words), (payload_len, salt), tags)| {
            let mut tcp = TcpHeader::new(src, dst, seq, 512);
            [tcp.fin, tcp.syn, tcp.rst, tcp.psh, tcp.ack, tcp.urg, tcp.ece, tcp.cwr] = flags;
            tcp.set_options_raw(&vec![1; option_words * 4]).unwrap();
            let payload: Vec<u8> = (0..payload_len).map(|i| (i * 37 + i / 251) as u8 ^ salt).collect();
            let v6 = matches!(ip, IpHeaders::Ipv6(..));
            let builder = PacketBuilder::ethernet2([2; 6], [4; 6]);
            let id = VlanId::try_new(5).unwrap();
            let builder = match tags {
                0 => builder.ip(ip),
                1 => builder.single_vlan(id).ip(ip),
                _ => builder.double_vlan(id, id).ip(ip),
            };
            let mut frame = Vec::new();
            builder.tcp_header(tcp.clone()).write(&mut frame, &payload).unwrap();
            Whole { frame, payload_len, tcp, v6, ident }
        },
    )
}

/// Returns the TCP header and the payload of a segment, after all headers before them were checked.
fn checked<'a>(packet: &'a [u8], whole: &Whole, index: usize) -> (TcpHeaderSlice<'a>, &'a [u8]) {
    let parsed = SlicedPacket::from_ethernet(packet).unwrap();
    let Some(TransportSlice::Tcp(tcp)) = parsed.transport else { panic!("no TCP in {packet:x?}") };
    let expected = match parsed.net.unwrap() {
        NetSlice::Ipv4(ip) => {
            let header = ip.header().to_header();
            assert_eq!(usize::from(header.total_len), packet.len() - (whole.ip_at()));
            assert_eq!(header.header_checksum, header.calc_header_checksum());
            assert_eq!(header.identification, whole.ident.wrapping_add(index as u16));
            tcp.to_header().calc_checksum_ipv4(&header, tcp.payload())
        }
        NetSlice::Ipv6(ip) => {
            let header = ip.header().to_header();
            assert_eq!(usize::from(header.payload_length), packet.len() - whole.ip_at() - 40);
            let known = |e: Ipv6ExtensionSlice<'_>| {
                matches!(e, Ipv6ExtensionSlice::HopByHop(_) | Ipv6ExtensionSlice::DestinationOptions(_))
            };
            assert!(ip.extensions().clone().into_iter().all(known));
            tcp.to_header().calc_checksum_ipv6(&header, tcp.payload())
        }
        other => panic!("{other:?}"),
    };
    // In ones' complement, 0 and 0xffff are the same number.
    assert_eq!(tcp.checksum() % 0xffff, expected.unwrap() % 0xffff);
    (TcpHeaderSlice::from_slice(tcp.slice()).unwrap(), tcp.payload())
}

impl Whole {
    fn ip_at(&self) -> usize {
        match u16::from_be_bytes([self.frame[12], self.frame[13]]) {
            0x0800 | 0x86dd => 14,
            _ => match u16::from_be_bytes([self.frame[16], self.frame[17]]) {
                0x0800 | 0x86dd => 18,
                _ => 22,
            },
        }
    }
}

proptest! {
    #[test]
    fn segments_concatenate_to_payload(whole in wholes(6000), gso_size in 8..2000u16) {
        let packets = whole.cut(gso_size);
        let count = whole.payload_len.div_ceil(gso_size.into()).max(1);
        prop_assert_eq!(packets.len(), count);
        let mut payload = Vec::new();
        for (index, packet) in packets.iter().enumerate() {
            let (tcp, part) = checked(packet, &whole, index);
            let last = index + 1 == count;
            prop_assert!(last || part.len() == usize::from(gso_size));
            let mut expected = whole.tcp.clone();
            expected.sequence_number = whole.tcp.sequence_number.wrapping_add(payload.len() as u32);
            expected.fin &= last;
            expected.psh &= last;
            expected.cwr &= index == 0;
            expected.checksum = tcp.checksum();
            prop_assert_eq!(tcp.to_header(), expected);
            prop_assert_eq!(&packet[..whole.ip_at()], &whole.frame[..whole.ip_at()]);
            payload.extend_from_slice(part);
        }
        prop_assert_eq!(&payload[..], whole.payload());
    }

    /// A packet with a single segment must equal the original, whose checksums etherparse has computed.
    #[test]
    fn single_segment_equals_original(whole in wholes(1400), junk: [u8; 4]) {
        let mut damaged = whole.clone();
        // The driver's values in computed fields are ignored.
        let checksum = whole.tcp_at() + 16;
        damaged.frame[checksum..checksum + 2].copy_from_slice(&junk[..2]);
        let (length, sum) = if whole.v6 { (4, 4) } else { (2, 10) };
        damaged.frame[whole.ip_at() + length] = junk[2];
        damaged.frame[whole.ip_at() + sum] = junk[3];
        prop_assert_eq!(damaged.cut(1400), vec![whole.frame]);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(
        whole in wholes(300),
        changes in prop::collection::vec(any::<(Index, u8)>(), 0..6),
        header: [u8; 12],
        own_header in any::<bool>(),
        cut in prop::option::of(any::<Index>()),
        frame_len in prop::option::of(0..70_000usize),
    ) {
        let mut net = if own_header { whole.header(100) } else { NetHeader::from_bytes(&header) };
        if !own_header && header[11] & 1 == 0 {
            net.gso_type = [VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6 | VIRTIO_NET_HDR_GSO_ECN][usize::from(header[10] & 1)];
        }
        let mut frame = whole.frame;
        for (at, value) in changes {
            let within = frame.len().min(120);
            frame[at.index(within)] = value;
        }
        if let Some(cut) = cut {
            frame.truncate(cut.index(frame.len()));
        }
        let frame_len = frame_len.unwrap_or(frame.len());
        let Ok(mut segmenter) = Segmenter::new(&net, &frame, frame_len) else { return Ok(()) };
        let mut payload = 0;
        for segment in segmenter.segments() {
            let headers = segmenter.headers(&segment, Sum::ZERO).len();
            prop_assert_eq!(headers, segmenter.header_len());
            prop_assert_eq!(segment.payload.start, payload);
            prop_assert!(headers + segment.payload.len() <= segmenter.longest());
            payload = segment.payload.end;
        }
        prop_assert_eq!(segmenter.header_len() + payload, frame_len, "every byte is in a segment");
    }
}

fn sample(v6: bool) -> Whole {
    let mut frame = Vec::new();
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]);
    let builder =
        if v6 { builder.ipv6([1; 16], [2; 16], 64) } else { builder.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64) };
    let tcp = TcpHeader::new(1, 2, u32::MAX - 500, 512);
    builder.tcp_header(tcp.clone()).write(&mut frame, &[7; 3000]).unwrap();
    Whole { frame, payload_len: 3000, tcp, v6, ident: 0 }
}

#[test]
fn sequence_numbers_wrap() {
    let whole = sample(true);
    let packets = whole.cut(1000);
    let seqs: Vec<u32> = packets.iter().map(|p| checked(p, &whole, 0).0.sequence_number()).collect();
    assert_eq!(seqs, [u32::MAX - 500, 499, 1499]);
}

#[test]
fn unsegmentable_packets_are_rejected() {
    let refused = |whole: &Whole, header: NetHeader| {
        Segmenter::new(&header, &whole.frame, whole.frame.len()).unwrap_err()
    };
    let v4 = sample(false);
    let no_type = VIRTIO_NET_HDR_GSO_UDP_L4 | VIRTIO_NET_HDR_GSO_ECN;
    for gso_type in [0, VIRTIO_NET_HDR_GSO_UDP, no_type, VIRTIO_NET_HDR_GSO_ECN] {
        let header = NetHeader { gso_type, ..v4.header(1000) };
        assert_eq!(refused(&v4, header), GsoError::Type { found: gso_type });
    }
    assert_eq!(refused(&v4, v4.header(7)), GsoError::Size { found: 7, min_size: 8 });
    for gso_type in [VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP_L4] {
        let expected = GsoError::Transport { found: IpProtocol::TCP, over: Ip::V4, gso_type };
        assert_eq!(refused(&v4, NetHeader { gso_type, ..v4.header(1000) }), expected);
    }
    let elsewhere = NetHeader { csum_start: 35, ..v4.header(1000) };
    let expected = GsoError::Checksum { csum_start: 35, csum_offset: 16, transport_at: 34 };
    assert_eq!(refused(&v4, elsewhere), expected);
    // These fields are not used without a checksum request.
    assert!(Segmenter::new(&NetHeader { flags: 0, ..elsewhere }, &v4.frame, v4.frame.len()).is_ok());

    let change = |at: usize, value: u8| {
        let mut whole = v4.clone();
        whole.frame[at] = value;
        refused(&whole, v4.header(1000))
    };
    let transport = |found, over| {
        let gso_type = if over == Ip::V4 { VIRTIO_NET_HDR_GSO_TCPV4 } else { VIRTIO_NET_HDR_GSO_TCPV6 };
        GsoError::Transport { found, over, gso_type }
    };
    assert_eq!(change(13, 1), GsoError::EtherType { found: EtherType(0x0801) });
    assert_eq!(change(23, 17), transport(IpProtocol::UDP, Ip::V4));
    assert_eq!(change(20, 0x20), transport(IpProtocol::FRAGMENT, Ip::V4));
    assert_eq!(change(14, 0x65), GsoError::IpHeader { found: 0x65 });
    assert_eq!(change(14, 0x44), GsoError::IpHeader { found: 0x44 });
    assert_eq!(change(46, 0x40), GsoError::TcpHeader { found: 16 });

    let front = |len: usize, frame_len: usize| {
        Segmenter::new(&v4.header(1000), &v4.frame[..len], frame_len).map(|s| s.header_len())
    };
    assert_eq!(front(54, 3054), Ok(54));
    assert_eq!(front(53, 3054), Err(GsoError::TooShort { found: 53, needed: 54 }));
    assert_eq!(front(60, 53), Err(GsoError::TooShort { found: 53, needed: 54 }));

    // A routing header with segments left changes the pseudo header.
    let mut v6 = sample(true);
    v6.frame[20] = 43;
    v6.frame.splice(54..54, [6, 0, 0, 1, 0, 0, 0, 0]);
    assert_eq!(refused(&v6, v6.header(1000)), transport(IpProtocol::TCP, Ip::V6));
    v6.frame[57] = 0;
    assert!(v6.segmenter(1000).is_ok());
}
