//! What a port does with the virtio-net header in front of a packet that it received.

use offcore_mem::Packet;
use offcore_wire::virtio_net::NetHeader;
use offcore_wire::{checksum, ethernet};

/// Does what `header` asks for, so that the packet needs no header any more; whether that is possible. A checksum left
/// open is computed, although no port asks for such packets. A packet to be segmented is refused: none was asked for.
#[inline]
pub(crate) fn apply(header: NetHeader, packet: &mut Packet) -> bool {
    if packet.len() < ethernet::HEADER_LEN || header.is_gso() {
        return false;
    }
    if header.needs_checksum() {
        return checksum::complete(packet.bytes_mut(), header.csum_start, header.csum_offset).is_ok();
    }
    true
}

#[cfg(test)]
mod tests {
    use offcore_mem::{HEADROOM, Hugepages, Pool};
    use offcore_wire::virtio_net::{F_NEEDS_CSUM, GSO_TCPV4};

    use super::*;

    #[test]
    fn headers_are_applied_or_refused() {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        let mut packet = cache.take().unwrap();
        packet.set_range(pool, HEADROOM, 60);
        packet.bytes_mut().fill(1);
        assert!(apply(NetHeader::default(), &mut packet));
        assert_eq!(packet.bytes(), [1; 60]);

        let open = NetHeader { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..Default::default() };
        assert!(apply(open, &mut packet));
        // The complement of 13 words of 0x0101.
        assert_eq!(packet.bytes()[40..42], [0xf2, 0xf2]);

        assert!(!apply(NetHeader { csum_start: 59, ..open }, &mut packet));
        assert!(!apply(NetHeader { gso_type: GSO_TCPV4, gso_size: 9, ..Default::default() }, &mut packet));
        packet.truncate(13);
        assert!(!apply(NetHeader::default(), &mut packet));
        cache.free(packet);
    }
}
