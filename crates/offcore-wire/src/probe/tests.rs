use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;
use crate::{EthernetFrameMut, IpProtocol, MacAddr, Sum, UdpDatagram, UdpFlow, UdpTemplate};

const LENS: [usize; 8] = [60, 61, 65, 124, 252, 1020, 1514, 9014];

fn probe(len: usize, header: ProbeHeader) -> Vec<u8> {
    let mut frame = vec![0xee; len];
    UdpTemplate::new(&UdpFlow::flowgen(3), len).unwrap().write(&mut frame).unwrap();
    write(&mut frame, header).unwrap();
    frame
}

/// Fills in the checksum of a datagram that has none.
fn fill_checksum(udp: &mut [u8], src: Ipv4Addr, dst: Ipv4Addr) {
    let pseudo = Sum::pseudo_v4(src, dst, IpProtocol::UDP, udp.len() as u16);
    let checksum = (pseudo + Sum::of(udp)).checksum_nonzero();
    udp[6..8].copy_from_slice(&checksum.to_be_bytes());
}

/// A literal implementation of the pattern's definition.
fn naive_pattern(fill: u32, len: usize) -> Vec<u8> {
    let byte = |i: usize| {
        let word = (u64::from(fill) + 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(0xd6e8_feb8_6659_fd93_u64.wrapping_mul(i as u64 / 8));
        word.to_le_bytes()[i % 8]
    };
    (0..len).map(byte).collect()
}

fn mismatch(frame: &[u8]) -> Mismatch {
    match check_content(frame) {
        Err(ProbeError::Content(mismatch)) => mismatch,
        other => panic!("expected a mismatch, found {other:?}"),
    }
}

#[test]
fn every_length_is_written_and_checked() {
    for len in 60..700 {
        let header = ProbeHeader { fill: 77, sequence: 1 << 40 };
        let frame = probe(len, header);
        assert_eq!(&frame[58..], naive_pattern(77, len - 58), "length {len}");
        assert_eq!(check_header(&frame), Ok(header), "length {len}");
        assert_eq!(check_content(&frame), Ok(()), "length {len}");
    }
}

#[test]
fn probe_layout_matches_documentation() {
    let frame = probe(60, ProbeHeader { fill: 0x0403_0201, sequence: 0x0c0b_0a09_0807_0605 });
    assert_eq!(frame[42..58], *b"OFCP\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c");
}

#[test]
fn changed_byte_is_found() {
    let frame = probe(1514, ProbeHeader { fill: 9, sequence: 5 });
    for offset in 58..frame.len() {
        let mut changed = frame.clone();
        changed[offset] ^= 0x40;
        let expected = Mismatch { offset, found: changed[offset], expected: frame[offset] };
        assert_eq!(check_content(&changed), Err(ProbeError::Content(expected)));
    }
    for offset in IP..UDP {
        let mut changed = frame.clone();
        changed[offset] ^= 0x40;
        let found = mismatch(&changed);
        assert!((24..26).contains(&found.offset), "byte {offset} of the IPv4 header: {found:?}");
        assert_ne!(found.found, found.expected);
    }
    // Forwarders may change ports and MAC addresses.
    let mut changed = frame.clone();
    EthernetFrameMut::new_checked(&mut changed).unwrap().swap_addresses();
    assert_eq!(check_content(&changed), Ok(()));
}

#[test]
fn rewritten_ip_header_passes() {
    let mut frame = probe(124, ProbeHeader { fill: 9, sequence: 5 });
    // Changes the time to live, and updates the checksum.
    let ttl = u16::from(frame[22]);
    frame[22] = 3;
    let checksum = u16::from_be_bytes([frame[24], frame[25]]);
    let changed = checksum::update(checksum, Sum::from(ttl << 8), Sum::from(3_u16 << 8));
    frame[24..26].copy_from_slice(&changed.to_be_bytes());
    assert_eq!(check_content(&frame), Ok(()));
    assert!(check_header(&frame).is_ok());
}

#[test]
fn foreign_content_is_found() {
    for len in LENS {
        let own = probe(len, ProbeHeader { fill: 1, sequence: 5 });
        let other = probe(len, ProbeHeader { fill: 2, sequence: 4 });
        for cut in (58..len).step_by(64) {
            let mut mixed = own.clone();
            mixed[cut..].copy_from_slice(&other[cut..]);
            assert!(mismatch(&mixed).offset >= cut, "length {len}, cut at {cut}");
        }
    }
}

#[test]
fn misplaced_content_is_found() {
    let frame = probe(1514, ProbeHeader { fill: 1, sequence: 5 });
    // Two cache lines are exchanged, or the content is shifted by one byte or one word.
    let mut swapped = frame.clone();
    swapped[122..186].copy_from_slice(&frame[186..250]);
    swapped[186..250].copy_from_slice(&frame[122..186]);
    assert_eq!(mismatch(&swapped).offset, 122);
    for slip in [1, 8, 64] {
        let mut slipped = frame.clone();
        slipped.copy_within(58..1514 - slip, 58 + slip);
        assert!(mismatch(&slipped).offset < 58 + slip + 8);
    }
}

#[test]
fn wrong_lengths_are_reported() {
    let frame = probe(124, ProbeHeader { fill: 1, sequence: 5 });
    assert_eq!(check_header(&frame[..123]), Err(ProbeError::Length { found: 123, by_ip: 124, by_udp: 124 }));
    let mut longer = frame.clone();
    longer.push(0);
    assert_eq!(
        check_header(&longer).unwrap_err().to_string(),
        "probe of 125 bytes, sent with 124 (IPv4 header) or 124 (UDP header)"
    );
    let mut udp = frame.clone();
    udp[39] -= 1;
    assert_eq!(check_header(&udp), Err(ProbeError::Length { found: 124, by_ip: 124, by_udp: 123 }));
    for found in 0..60 {
        assert_eq!(check_header(&frame[..found]), Err(ProbeError::TooShort { found }));
        assert_eq!(check_content(&frame[..found]), Err(ProbeError::TooShort { found }));
        let mut short = frame[..found].to_vec();
        assert_eq!(patch_sequence(&mut short, 1), Err(ProbeError::TooShort { found }));
        assert_eq!(
            write(&mut short, ProbeHeader { fill: 1, sequence: 1 }),
            Err(ProbeError::TooShort { found })
        );
        assert_eq!(short, frame[..found], "a refused frame stays as it was");
    }
}

#[test]
fn other_traffic_is_rejected() {
    let frame = probe(124, ProbeHeader { fill: 1, sequence: 5 });
    // ARP, IPv4 options, TCP.
    for (offset, value) in [(13, 0x06), (14, 0x46), (23, 6)] {
        let mut other = frame.clone();
        other[offset] = value;
        assert_eq!(check_header(&other), Err(ProbeError::NotUdp), "byte {offset}");
    }
    let mut other = frame;
    other[42..46].fill(0);
    assert_eq!(check_header(&other), Err(ProbeError::Magic { found: 0 }));
}

#[test]
fn patched_checksum_is_never_zero() {
    let (src, dst) = (Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 18, 0, 2));
    let mut frame = vec![0; 60];
    UdpTemplate::new(&UdpFlow::txonly(MacAddr::LOCAL, MacAddr::local(1)), 60)
        .unwrap()
        .write(&mut frame)
        .unwrap();
    write(&mut frame, ProbeHeader { fill: 1, sequence: 1 }).unwrap();
    fill_checksum(&mut frame[34..], src, dst);
    let mut written_as_ffff = 0;
    // The last two bytes of the number alone suffice to reach every checksum.
    for sequence in 0..=0xffff {
        patch_sequence(&mut frame, sequence).unwrap();
        assert_ne!(frame[40..42], [0, 0], "sequence {sequence}");
        written_as_ffff += u32::from(frame[40..42] == [0xff, 0xff]);
        let datagram = UdpDatagram::new_checked(&frame[34..]).unwrap();
        assert!(datagram.verify_checksum_v4(src, dst), "sequence {sequence}");
    }
    assert!(written_as_ffff > 0);
}

proptest! {
    #[test]
    fn patching_changes_only_sequence(
        fill: u32,
        old: u64,
        new: u64,
        len in 60..300usize,
        with_checksum: bool,
        src: [u8; 4],
    ) {
        let (src, dst) = (Ipv4Addr::from(src), Ipv4Addr::new(10, 0, 0, 1));
        let build = |sequence| {
            let mut flow = UdpFlow::txonly(MacAddr::LOCAL, MacAddr::local(1));
            (flow.src.ip, flow.dst.ip) = (src, dst);
            let mut frame = vec![0; len];
            UdpTemplate::new(&flow, len).unwrap().write(&mut frame).unwrap();
            write(&mut frame, ProbeHeader { fill, sequence }).unwrap();
            if with_checksum {
                fill_checksum(&mut frame[34..], src, dst);
            }
            frame
        };
        let mut frame = build(old);
        patch_sequence(&mut frame, new).unwrap();
        prop_assert_eq!(check_header(&frame), Ok(ProbeHeader { fill, sequence: new }));
        prop_assert_eq!(check_content(&frame), Ok(()));
        prop_assert_eq!(frame, build(new));
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(mut frame in prop::collection::vec(any::<u8>(), 0..200), sequence: u64) {
        let _ = check_header(&frame);
        let _ = check_content(&frame);
        let _ = patch_sequence(&mut frame, sequence);
    }
}
