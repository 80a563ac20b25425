//! Sets the DSCP field (RFC 2474) of a packet in place.

use crate::checksum::{self, Sum};
use crate::ethernet::{EtherType, HEADER_LEN, VLAN_TAG_LEN};

/// The maximum DSCP.
pub const MAX: u8 = 63;
/// Maximum number of VLAN tags that are skipped.
const TAGS: usize = 2;
/// Offset of the checksum in an IPv4 header.
const CHECKSUM: usize = 10;

/// Writes the lower six bits of `dscp` into the IPv4 or IPv6 header of an Ethernet frame, behind up to two VLAN tags.
/// The ECN bits are preserved. The checksum of an IPv4 header is updated (RFC 1624), so that a wrong one stays wrong.
/// `frame` only needs to contain the headers. Returns whether such a header was found.
pub fn set(frame: &mut [u8], dscp: u8) -> bool {
    let Some(ip) = ip_header(frame) else { return false };
    let dscp = dscp & MAX;
    match *ip {
        // Version and header length, then DSCP and ECN.
        [first @ 0x45..=0x4f, old, ..] if ip.len() >= crate::ipv4::HEADER_LEN => {
            let new = dscp << 2 | old & 3;
            ip[1] = new;
            let checksum = u16::from_be_bytes([ip[CHECKSUM], ip[CHECKSUM + 1]]);
            let checksum = checksum::update(checksum, Sum::of(&[first, old]), Sum::of(&[first, new]));
            ip[CHECKSUM..][..2].copy_from_slice(&checksum.to_be_bytes());
            true
        }
        // Version, then eight bits of traffic class, then the flow label.
        [first @ 0x60..=0x6f, second, ..] if ip.len() >= crate::ipv6::HEADER_LEN => {
            ip[0] = first & 0xf0 | dscp >> 2;
            ip[1] = second & 0x3f | dscp << 6;
            true
        }
        _ => false,
    }
}

/// Returns the frame from the IP header on, if its EtherType announces one.
fn ip_header(frame: &mut [u8]) -> Option<&mut [u8]> {
    let mut at = HEADER_LEN;
    for _ in 0..=TAGS {
        let ethertype = frame.get(at - 2..at)?;
        match EtherType(u16::from_be_bytes([ethertype[0], ethertype[1]])) {
            EtherType::VLAN | EtherType::QINQ => at += VLAN_TAG_LEN,
            EtherType::IPV4 | EtherType::IPV6 => return frame.get_mut(at..),
            _ => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ipv4::Ipv4Packet;
    use crate::ipv6::Ipv6Packet;

    fn frame(tags: &[u16], ethertype: u16, ip: &[u8]) -> Vec<u8> {
        let mut frame = vec![2; 12];
        for tag in tags {
            frame.extend(tag.to_be_bytes());
            frame.extend([0, 7]);
        }
        frame.extend(ethertype.to_be_bytes());
        frame.extend(ip);
        frame
    }

    fn ipv4(tos: u8) -> Vec<u8> {
        let mut ip = vec![0x45, tos, 0, 40, 1, 2, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        let checksum = Sum::of(&ip).checksum();
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        ip.extend([9; 20]);
        ip
    }

    fn ipv6(traffic_class: u8) -> Vec<u8> {
        let mut ip = vec![0x60 | traffic_class >> 4, traffic_class << 4 | 5, 6, 7, 0, 8, 17, 64];
        ip.extend([3; 40]);
        ip
    }

    proptest! {
        #[test]
        fn ipv4_checksum_and_ecn_stay_valid(tos: u8, dscp in 0..=MAX, tags in 0..=2usize) {
            let mut frame = frame(&[0x88a8, 0x8100][2 - tags..], 0x0800, &ipv4(tos));
            prop_assert!(set(&mut frame, dscp));
            let packet = Ipv4Packet::new_checked(&frame[14 + 4 * tags..]).unwrap();
            prop_assert_eq!((packet.dscp(), packet.ecn()), (dscp, tos & 3));
            prop_assert!(packet.verify_checksum());
        }

        #[test]
        fn ipv6_dscp_keeps_other_fields(traffic_class: u8, dscp in 0..=MAX) {
            let mut frame = frame(&[], 0x86dd, &ipv6(traffic_class));
            prop_assert!(set(&mut frame, dscp));
            let packet = Ipv6Packet::new_checked(&frame[14..]).unwrap();
            prop_assert_eq!(packet.traffic_class(), dscp << 2 | traffic_class & 3);
            prop_assert_eq!(packet.flow_label(), 0x50607);
        }

        #[test]
        fn only_marked_frames_change(bytes: Vec<u8>, dscp: u8) {
            let mut frame = bytes.clone();
            let marked = set(&mut frame, dscp);
            prop_assert!(marked || frame == bytes);
        }
    }

    #[test]
    fn unsupported_frames_are_unchanged() {
        for mut other in [
            frame(&[], 0x0806, &ipv4(0)),
            frame(&[0x8100, 0x8100, 0x8100], 0x0800, &ipv4(0)),
            frame(&[], 0x0800, &ipv4(0)[..19]),
            frame(&[], 0x86dd, &ipv6(0)[..39]),
            frame(&[], 0x0800, &[0x44; 40]),
        ] {
            let before = other.clone();
            assert!(!set(&mut other, 46));
            assert_eq!(other, before);
        }
    }
}
