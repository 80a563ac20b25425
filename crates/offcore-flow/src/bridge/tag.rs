//! Reading and changing a packet's 802.1Q tag, in place.
//!
//! ```text
//!               | virtio-net header 12 | destination 6 | source 6 | type 2 | payload
//!      | header 12 | destination 6 | source 6 | 0x8100, tag 4 | type 2 | payload
//! ```
//! A tag is inserted or removed by moving the bytes in front of it. The checksum offset moves along.

use offcore_mem::Packet;
use offcore_wire::ethernet::{EtherType, HEADER_LEN, VLAN_TAG_LEN};
use offcore_wire::virtio_net::{self, NetHeader};

use super::vlan::Retag;

/// Bytes of both addresses.
const ADDRESSES: usize = 12;
/// Bits of the tag with the VLAN identifier.
const VLAN: u16 = 0x0fff;

/// Why a tag cannot be read or changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagError {
    /// The packet ends before its header or its tag does, or its checksum starts inside the tag.
    Malformed,
    /// The headroom is too small for a tag.
    NoRoom,
    /// The tag to remove is followed by another one. The receiver would take that one as the packet's VLAN.
    Inner,
}

/// Returns the VLAN in the packet's tag, 0 to 4095, or `None` if it has no tag.
///
/// # Errors
/// [`TagError::Malformed`].
#[inline]
pub fn vlan_of(packet: &Packet) -> Result<Option<u16>, TagError> {
    let frame = packet.bytes();
    let header = frame.first_chunk::<HEADER_LEN>().ok_or(TagError::Malformed)?;
    if [header[ADDRESSES], header[ADDRESSES + 1]] != EtherType::VLAN.0.to_be_bytes() {
        return Ok(None);
    }
    const BEHIND_TAG: usize = HEADER_LEN + VLAN_TAG_LEN;
    let tagged = frame.first_chunk::<BEHIND_TAG>().ok_or(TagError::Malformed)?;
    // The checksum never starts in front of the tag: see `NetHeader::check`.
    if offload(packet)
        .is_some_and(|asked| asked.needs_checksum() && usize::from(asked.csum_start) < BEHIND_TAG)
    {
        return Err(TagError::Malformed);
    }
    Ok(Some(u16::from_be_bytes([tagged[HEADER_LEN], tagged[HEADER_LEN + 1]]) & VLAN))
}

/// Changes the tag of a packet, which [`vlan_of`] has read, for sending.
///
/// # Errors
/// [`TagError`]; the packet is unchanged then.
#[inline]
pub fn retag(packet: &mut Packet, how: Retag) -> Result<(), TagError> {
    match how {
        Retag::Keep => Ok(()),
        Retag::Pop => pop(packet),
        Retag::Push(vlan) => push(packet, vlan),
        Retag::Set(vlan) => set(packet, vlan),
    }
}

fn set(packet: &mut Packet, vlan: u16) -> Result<(), TagError> {
    let tag = packet.bytes_mut().get_mut(HEADER_LEN..HEADER_LEN + 2).ok_or(TagError::Malformed)?;
    let [high, low] = vlan.to_be_bytes();
    // The priority is kept.
    (tag[0], tag[1]) = (tag[0] & 0xf0 | high, low);
    Ok(())
}

fn push(packet: &mut Packet, vlan: u16) -> Result<(), TagError> {
    let addresses: [u8; ADDRESSES] = addresses(packet)?;
    if packet.headroom() < VLAN_TAG_LEN + virtio_net::HEADER_LEN {
        return Err(TagError::NoRoom);
    }
    let header = offload(packet);
    packet.push(VLAN_TAG_LEN);
    let bytes = packet.bytes_mut();
    // copy-ok: addresses, and the tag behind them
    bytes[..ADDRESSES].copy_from_slice(&addresses);
    let [a, b] = EtherType::VLAN.0.to_be_bytes();
    let [c, d] = vlan.to_be_bytes();
    for (byte, value) in bytes[ADDRESSES..].iter_mut().zip([a, b, c, d]) {
        *byte = value;
    }
    if let Some(header) = header {
        write_offload(packet, moved(header, |at| at.saturating_add(VLAN_TAG_LEN as u16)));
    }
    Ok(())
}

fn pop(packet: &mut Packet) -> Result<(), TagError> {
    let addresses: [u8; ADDRESSES] = addresses(packet)?;
    if packet.len() < HEADER_LEN + VLAN_TAG_LEN {
        return Err(TagError::Malformed);
    }
    let inner = packet.bytes().get(HEADER_LEN + 2..HEADER_LEN + VLAN_TAG_LEN);
    if inner == Some(&EtherType::VLAN.0.to_be_bytes()) {
        return Err(TagError::Inner);
    }
    let header = offload(packet);
    packet.pull(VLAN_TAG_LEN);
    packet.bytes_mut()[..ADDRESSES].copy_from_slice(&addresses); // copy-ok: addresses
    if let Some(header) = header {
        write_offload(packet, moved(header, |at| at.saturating_sub(VLAN_TAG_LEN as u16)));
    }
    Ok(())
}

fn addresses(packet: &Packet) -> Result<[u8; ADDRESSES], TagError> {
    packet.bytes().first_chunk().copied().ok_or(TagError::Malformed)
}

/// Returns the virtio-net header in front of a packet that requests an offload.
fn offload(packet: &Packet) -> Option<NetHeader> {
    if !packet.has_offload() {
        return None;
    }
    packet.headroom_bytes(virtio_net::HEADER_LEN).first_chunk().map(NetHeader::from_bytes)
}

fn write_offload(packet: &mut Packet, header: NetHeader) {
    // copy-ok: the virtio-net header
    packet.headroom_mut(virtio_net::HEADER_LEN).copy_from_slice(&header.to_bytes());
}

/// Adjusts the fields that count from the start of the frame. Unused fields are 0 and stay 0.
fn moved(header: NetHeader, by: impl Fn(u16) -> u16) -> NetHeader {
    NetHeader {
        csum_start: if header.needs_checksum() { by(header.csum_start) } else { header.csum_start },
        hdr_len: if header.hdr_len > 0 { by(header.hdr_len) } else { 0 },
        ..header
    }
}

#[cfg(test)]
mod tests {
    use offcore_mem::{HEADROOM, Hugepages, Pool, PoolCache};
    use offcore_wire::virtio_net::{VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4};

    use super::*;

    fn packet(cache: &mut PoolCache, frame: &[u8]) -> Packet {
        let mut packet = cache.take_sized(HEADROOM, frame.len()).unwrap();
        packet.bytes_mut().copy_from_slice(frame);
        packet
    }

    const PLAIN: &[u8] = b"ddddddssssss\x08\x00payload";
    const DOUBLE: &[u8] = b"ddddddssssss\x81\x00\x00\x00\x81\x00\x00\x14\x08\x00payload";
    const TAGGED: &[u8] = b"ddddddssssss\x81\x00\x00\x0a\x08\x00payload";

    #[test]
    fn vlan_tag_is_parsed() {
        let mut cache = Pool::new(64, 2048, Hugepages::None).unwrap().cache();
        let mut vlan_in = |frame: &[u8]| {
            let packet = packet(&mut cache, frame);
            let found = vlan_of(&packet);
            cache.free(packet);
            found
        };
        assert_eq!(vlan_in(PLAIN), Ok(None));
        assert_eq!(vlan_in(TAGGED), Ok(Some(10)));
        assert_eq!(vlan_in(b"ddddddssssss\x81\x00\xff\xff\x08\x00"), Ok(Some(4095)));
        assert_eq!(vlan_in(b"ddddddssssss\x88\xa8\x00\x0a\x08\x00"), Ok(None), "a provider's tag is payload");
        for len in 0..TAGGED.len() {
            let found = vlan_in(&TAGGED[..len]);
            assert_eq!(found, if len < 18 { Err(TagError::Malformed) } else { Ok(Some(10)) }, "{len} bytes");
        }
    }

    #[test]
    fn checksum_inside_tag_is_malformed() {
        let mut cache = Pool::new(64, 2048, Hugepages::None).unwrap().cache();
        for (csum_start, expected) in
            [(14, Err(TagError::Malformed)), (17, Err(TagError::Malformed)), (18, Ok(Some(10)))]
        {
            let mut packet = packet(&mut cache, TAGGED);
            let header = NetHeader { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start, ..NetHeader::default() };
            write_offload(&mut packet, header);
            packet.set_offload(true);
            assert_eq!(vlan_of(&packet), expected);
            cache.free(packet);
        }
    }

    #[test]
    fn retag_adjusts_offload_header() {
        let mut cache = Pool::new(64, 2048, Hugepages::None).unwrap().cache();
        let header = NetHeader {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            gso_type: VIRTIO_NET_HDR_GSO_TCPV4,
            hdr_len: 54,
            gso_size: 1000,
            csum_start: 34,
            csum_offset: 16,
            num_buffers: 0,
        };
        for offload in [None, Some(header)] {
            let mut packet = packet(&mut cache, PLAIN);
            if let Some(header) = offload {
                write_offload(&mut packet, header);
                packet.set_offload(true);
            }
            retag(&mut packet, Retag::Push(10)).unwrap();
            assert_eq!(packet.bytes(), TAGGED);
            let expected = offload.map(|header| NetHeader { hdr_len: 58, csum_start: 38, ..header });
            assert_eq!(super::offload(&packet), expected);
            retag(&mut packet, Retag::Set(0xfff)).unwrap();
            assert_eq!(vlan_of(&packet), Ok(Some(0xfff)));
            retag(&mut packet, Retag::Pop).unwrap();
            assert_eq!((packet.bytes(), super::offload(&packet)), (PLAIN, offload));
            cache.free(packet);
        }
    }

    #[test]
    fn retag_keeps_priority() {
        let mut cache = Pool::new(64, 2048, Hugepages::None).unwrap().cache();
        let mut packet = packet(&mut cache, b"ddddddssssss\x81\x00\xa0\x00\x08\x00");
        retag(&mut packet, Retag::Set(0x123)).unwrap();
        assert_eq!(packet.bytes(), b"ddddddssssss\x81\x00\xa1\x23\x08\x00");
        cache.free(packet);
    }

    #[test]
    fn unretaggable_packet_is_unchanged() {
        let mut cache = Pool::new(64, 2048, Hugepages::None).unwrap().cache();
        let mut tight = cache.take_sized(VLAN_TAG_LEN, PLAIN.len()).unwrap();
        assert_eq!(retag(&mut tight, Retag::Push(10)), Err(TagError::NoRoom));
        assert_eq!(tight.headroom(), VLAN_TAG_LEN);
        let mut short = packet(&mut cache, &TAGGED[..16]);
        assert_eq!(retag(&mut short, Retag::Pop), Err(TagError::Malformed));
        // The receiver would take the inner tag as the packet's VLAN.
        let mut double = packet(&mut cache, DOUBLE);
        assert_eq!(retag(&mut double, Retag::Pop), Err(TagError::Inner));
        assert_eq!((short.len(), double.bytes()), (16, DOUBLE));
        cache.free_all([tight, short, double]);
    }
}
