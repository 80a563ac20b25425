//! Unsegmented UDP packets of a guest or the kernel, their datagrams, and both in a VXLAN tunnel.

use etherparse::{IpHeaders, IpNumber, Ipv4Header, Ipv6Header, PacketBuilder};
use offcore_wire::virtio_net::{NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_UDP_L4};

/// Bytes before a tunnel's inner frame: Ethernet, IPv4, UDP and VXLAN.
const VXLAN: usize = 50;

fn frame(v6: bool, ident: u16, ports: [u16; 2], payload: &[u8]) -> Vec<u8> {
    let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 9], [2, 0, 0, 0, 0, 8]);
    let ip = if v6 {
        let (source, destination) = ([1; 16], [2; 16]);
        let header = Ipv6Header { source, destination, hop_limit: 64, ..Default::default() };
        IpHeaders::Ipv6(header, Default::default())
    } else {
        let mut header = Ipv4Header::new(0, 64, IpNumber::UDP, [10, 7, 0, 1], [10, 7, 0, 2]).unwrap();
        header.identification = ident;
        IpHeaders::Ipv4(header, Default::default())
    };
    let mut frame = Vec::new();
    builder.ip(ip).udp(ports[0], ports[1]).write(&mut frame, payload).unwrap();
    frame
}

/// Creates a UDP packet with `len` bytes of payload, its virtio-net header with a `gso_size` of `size` bytes, and its
/// datagrams.
pub(crate) fn whole(v6: bool, len: usize, size: u16) -> (NetHeader, Vec<u8>, Vec<Vec<u8>>) {
    let payload: Vec<u8> = (0..len).map(|i| (i * 37 + i / 251) as u8).collect();
    let mut bytes = frame(v6, 0, [7001, 7002], &payload);
    let udp_at = bytes.len() - len - 8;
    // The sum of the pseudo header: addresses, protocol and length.
    let addresses = if v6 { &bytes[22..54] } else { &bytes[26..34] };
    let pseudo = offcore_wire::Sum::of(addresses)
        + offcore_wire::Sum::from(17u16)
        + offcore_wire::Sum::from((len + 8) as u32);
    bytes[udp_at + 6..udp_at + 8].copy_from_slice(&pseudo.value().to_be_bytes());
    let header = NetHeader {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        gso_type: VIRTIO_NET_HDR_GSO_UDP_L4,
        hdr_len: (udp_at + 8) as u16,
        gso_size: size,
        csum_start: udp_at as u16,
        csum_offset: 6,
        num_buffers: 0,
    };
    let parts = payload.chunks(size.into()).enumerate();
    (header, bytes, parts.map(|(index, part)| frame(v6, index as u16, [7001, 7002], part)).collect())
}

/// Like [`whole`], in a VXLAN tunnel. The outer UDP header has no checksum, as Linux sends it.
pub(crate) fn tunnelled(len: usize, size: u16) -> (NetHeader, Vec<u8>, Vec<Vec<u8>>) {
    let (header, bytes, datagrams) = whole(false, len, size);
    let carried = |inner: Vec<u8>, ident: usize| {
        let payload = [&[8, 0, 0, 0, 0, 0, 42, 0], &inner[..]].concat();
        let mut outer = frame(false, ident as u16, [50_000, 4789], &payload);
        outer[40..42].fill(0);
        outer
    };
    let header = NetHeader {
        csum_start: header.csum_start + VXLAN as u16,
        hdr_len: header.hdr_len + VXLAN as u16,
        ..header
    };
    let datagrams = datagrams.into_iter().enumerate().map(|(index, datagram)| carried(datagram, index));
    (header, carried(bytes, 0), datagrams.collect())
}
