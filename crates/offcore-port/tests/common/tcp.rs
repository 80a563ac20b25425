//! Unsegmented TCP packets, as a guest or the kernel sends them, and checks of their segments.

use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TransportSlice};
use offcore_wire::virtio_net::{
    NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6,
};

/// The sequence number of the packets created here. It is about to wrap.
pub(crate) const SEQ: u32 = u32::MAX - 3000;

/// Creates a TCP packet with a partial checksum, and the header that requests segments of `size` bytes. Ethernet
/// addresses, IP addresses and ports are arbitrary.
pub(crate) fn whole(v6: bool, payload_len: usize, size: u16) -> (NetHeader, Vec<u8>) {
    let payload: Vec<u8> = (0..payload_len).map(|i| (i * 37 + i / 251) as u8).collect();
    let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 9], [2, 0, 0, 0, 0, 8]);
    let builder =
        if v6 { builder.ipv6([1; 16], [2; 16], 64) } else { builder.ipv4([10, 7, 0, 1], [10, 7, 0, 2], 64) };
    let mut frame = Vec::new();
    builder.tcp(7001, 7002, SEQ, 512).ack(5).psh().write(&mut frame, &payload).unwrap();
    let tcp_at = frame.len() - payload_len - 20;
    // The sum of the pseudo header: addresses, protocol and length.
    let addresses = if v6 { &frame[22..54] } else { &frame[26..34] };
    let pseudo = offcore_wire::Sum::of(addresses)
        + offcore_wire::Sum::from(6u16)
        + offcore_wire::Sum::from((frame.len() - tcp_at) as u32);
    frame[tcp_at + 16..tcp_at + 18].copy_from_slice(&pseudo.value().to_be_bytes());
    let header = NetHeader {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        gso_type: if v6 { VIRTIO_NET_HDR_GSO_TCPV6 } else { VIRTIO_NET_HDR_GSO_TCPV4 },
        hdr_len: (tcp_at + 20) as u16,
        gso_size: size,
        csum_start: tcp_at as u16,
        csum_offset: 16,
        num_buffers: 0,
    };
    (header, frame)
}

/// Checks the checksums of a TCP packet; returns its sequence number relative to [`SEQ`] and its payload.
pub(crate) fn checked(frame: &[u8]) -> (usize, Vec<u8>) {
    let parsed = SlicedPacket::from_ethernet(frame).unwrap();
    let Some(TransportSlice::Tcp(tcp)) = parsed.transport else { panic!("no TCP in {frame:x?}") };
    let expected = match parsed.net.unwrap() {
        NetSlice::Ipv4(ip) => {
            let header = ip.header().to_header();
            assert_eq!(header.header_checksum, header.calc_header_checksum());
            tcp.to_header().calc_checksum_ipv4(&header, tcp.payload())
        }
        NetSlice::Ipv6(ip) => tcp.to_header().calc_checksum_ipv6(&ip.header().to_header(), tcp.payload()),
        other => panic!("{other:?}"),
    };
    assert_eq!(tcp.checksum() % 0xffff, expected.unwrap() % 0xffff, "in ones' complement 0 is 0xffff");
    (tcp.sequence_number().wrapping_sub(SEQ) as usize, tcp.payload().to_vec())
}

/// Checks that `frames` are the segments of the packet `whole`, in order.
pub(crate) fn are_segments(frames: &[Vec<u8>], whole: &[u8], header: &NetHeader) {
    let payload = &whole[header.hdr_len.into()..];
    let mut next = 0;
    for frame in frames {
        let (seq, part) = checked(frame);
        assert_eq!(seq, next);
        assert_eq!(part, payload[next..next + part.len()]);
        assert_eq!(frame[..12], whole[..12]);
        next += part.len();
        assert!(part.len() == usize::from(header.gso_size) || next == payload.len());
    }
    assert_eq!(next, payload.len());
}
