//! Handles the virtio-net header in front of a received packet.

use offcore_mem::{Packet, Pool};
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader, Offloads};
use offcore_wire::{checksum, ethernet};

/// Applies `header` to a packet. Negotiated offload requests stay in front of the packet, which is marked. A partial
/// checksum without a negotiated offload is completed. Returns whether the packet is valid: it is not if it is shorter
/// than an Ethernet header, or if the header does not match the packet or was not negotiated.
#[inline]
pub(crate) fn apply(header: NetHeader, packet: &mut Packet, pool: &Pool, agreed: Offloads) -> bool {
    if packet.len() < ethernet::HEADER_LEN {
        return false;
    }
    if header.leaves_work() { apply_special(header, packet, pool, agreed) } else { true }
}

#[cold]
fn apply_special(header: NetHeader, packet: &mut Packet, pool: &Pool, agreed: Offloads) -> bool {
    if header.check(pool.total_len(packet)).is_err() {
        return false;
    }
    // Segments need checksums, so a GSO packet requires a partial checksum (virtio 1.2, section 5.1.6.4.1).
    let open = header.needs_checksum();
    if open && agreed.allows(&header) {
        // copy-ok: the virtio-net header in normalized form
        packet.headroom_mut(HEADER_LEN).copy_from_slice(&header.essence().to_bytes());
        packet.set_offload(true);
        return true;
    }
    let parts = pool.segments_mut(packet);
    !header.is_gso() && checksum::complete_parts(parts, header.csum_start, header.csum_offset).is_ok()
}

#[cfg(test)]
mod tests {
    use offcore_mem::{HEADROOM, Hugepages, Pool};
    use offcore_wire::virtio_net::{
        GSO_TUNNEL, VIRTIO_NET_HDR_F_DATA_VALID, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4,
        VIRTIO_NET_HDR_GSO_UDP, VIRTIO_NET_HDR_GSO_UDP_L4,
    };

    use super::*;

    const NONE: Offloads = Offloads { checksum: false, tso4: false, tso6: false, ecn: false, uso: false };

    #[test]
    fn headers_are_applied_or_refused() {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let mut packet = cache.take().unwrap();
        packet.set_range(pool, HEADROOM, 60);
        packet.bytes_mut().fill(1);
        assert!(apply(NetHeader::default(), &mut packet, pool, NONE));
        assert_eq!(packet.bytes(), [1; 60]);

        let open = NetHeader {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            csum_start: 34,
            csum_offset: 6,
            ..Default::default()
        };
        assert!(apply(open, &mut packet, pool, NONE));
        // The complement of the sum of 13 words of 0x0101.
        assert_eq!(packet.bytes()[40..42], [0xf2, 0xf2]);
        assert!(packet.is_plain());

        assert!(!apply(NetHeader { csum_start: 59, ..open }, &mut packet, pool, NONE));
        assert!(!apply(
            NetHeader { gso_type: VIRTIO_NET_HDR_GSO_TCPV4, gso_size: 9, ..open },
            &mut packet,
            pool,
            NONE
        ));
        packet.truncate(13);
        assert!(!apply(NetHeader::default(), &mut packet, pool, NONE));
        cache.free(packet);
    }

    #[test]
    fn negotiated_offloads_are_kept() {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let open = NetHeader {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            csum_start: 34,
            csum_offset: 6,
            ..Default::default()
        };
        let tcp = NetHeader { gso_type: VIRTIO_NET_HDR_GSO_TCPV4, gso_size: 1448, ..open };
        let udp = NetHeader { gso_type: VIRTIO_NET_HDR_GSO_UDP_L4, ..tcp };
        for (header, agreed, expected) in [
            (
                NetHeader {
                    flags: VIRTIO_NET_HDR_F_NEEDS_CSUM | VIRTIO_NET_HDR_F_DATA_VALID,
                    num_buffers: 3,
                    ..open
                },
                Offloads::ALL,
                Some(open),
            ),
            (NetHeader { num_buffers: 3, ..tcp }, Offloads::ALL, Some(tcp)),
            (tcp, Offloads { tso4: false, ..Offloads::ALL }, None),
            (udp, Offloads::ALL, Some(udp)),
            (udp, Offloads { uso: false, ..Offloads::ALL }, None),
            (NetHeader { gso_type: VIRTIO_NET_HDR_GSO_UDP, ..tcp }, Offloads::ALL, None),
            (NetHeader { gso_type: VIRTIO_NET_HDR_GSO_TCPV4 | GSO_TUNNEL, ..tcp }, Offloads::ALL, None),
            (NetHeader { flags: 0, ..tcp }, Offloads::ALL, None),
            (NetHeader { gso_size: 0, ..tcp }, Offloads::ALL, None),
            (NetHeader { csum_start: 3999, ..open }, Offloads::ALL, None),
        ] {
            let mut packet = cache.take_chain(HEADROOM, 4000).unwrap();
            let good = apply(header, &mut packet, pool, agreed);
            assert_eq!((good, packet.has_offload()), (expected.is_some(), expected.is_some()), "{header:?}");
            if let Some(expected) = expected {
                assert_eq!(packet.headroom_bytes(HEADER_LEN), expected.to_bytes());
            }
            cache.free(packet);
        }
    }
}
