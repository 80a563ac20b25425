use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::MacAddr;
use crate::traffic::{HeaderTemplate, Traffic, Transport, Vary};

const STREAM: u16 = 0xbeef;

fn template(v6: bool, tcp: bool, vlan: bool) -> HeaderTemplate {
    let address = |last: u8| match v6 {
        true => IpAddr::from([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]),
        false => IpAddr::from([10, 0, 0, last]),
    };
    let traffic = Traffic {
        src_mac: MacAddr::local(1),
        dst_mac: MacAddr::local(2),
        vlan: vlan.then_some(7),
        src_ip: address(1),
        dst_ip: address(2),
        transport: if tcp { Transport::Tcp } else { Transport::Udp },
        src_port: 1000,
        dst_port: 1001,
        vary: Vary::default(),
    };
    HeaderTemplate::new(&traffic).unwrap()
}

fn frame(template: &HeaderTemplate, stamp: Stamp, len: usize) -> Vec<u8> {
    let mut frame = vec![0; len];
    let at = template.len();
    frame[at..at + STAMP_LEN].copy_from_slice(&stamp.to_bytes(len - at));
    write_content(STREAM, stamp.content(), &mut frame[at + STAMP_LEN..]);
    let sum = Sum::of(&frame[at..]);
    template.write(&mut frame, stamp.flow.into(), stamp.number, len, sum);
    frame
}

fn stamps() -> impl Strategy<Value = Stamp> {
    (any::<u16>(), any::<u32>(), 0..DUE_RANGE).prop_map(|(flow, number, due)| Stamp {
        stream: STREAM,
        flow,
        number,
        due,
    })
}

#[test]
fn shortest_frame_fits_stamp() {
    assert_eq!(template(false, false, false).len() + STAMP_LEN, 60);
}

#[test]
fn foreign_and_broken_frames_differ() {
    let stamp = Stamp { stream: STREAM, flow: 3, number: 9, due: 5 };
    let good = frame(&template(false, false, false), stamp, 100);
    let find = |frame: &[u8]| find(frame, frame.len(), STREAM);
    assert!(find(&good).is_ok());
    for len in 0..40 {
        assert_eq!(find(&good[..len]), Err(StampError::Malformed), "{len}");
    }
    assert_eq!(find(&good[..99]), Err(StampError::Corrupt), "cut");
    let mut longer = good.clone();
    longer.push(0);
    assert_eq!(find(&longer), Err(StampError::Corrupt));
    let changed = |at: usize, value: u8| {
        let mut frame = good.clone();
        frame[at] = value;
        frame
    };
    assert_eq!(find(&changed(13, 6)), Err(StampError::Foreign), "ARP");
    assert_eq!(find(&changed(23, 1)), Err(StampError::Foreign), "ICMP");
    assert_eq!(find(&changed(14, 0x44)), Err(StampError::Malformed), "a header of 16 bytes");
    assert_eq!(find(&changed(14, 0x65)), Err(StampError::Malformed), "version 6");
    assert_eq!(find(&changed(42, 0)), Err(StampError::Foreign), "no magic");
    assert_eq!(super::find(&good, good.len(), STREAM + 1), Err(StampError::Foreign));
    // A frame of unrelated traffic.
    assert_eq!(find(&[0; 60]), Err(StampError::Foreign));
}

#[test]
fn removed_vlan_tag_keeps_stamp() {
    let stamp = Stamp { stream: STREAM, flow: 3, number: 9, due: 5 };
    let tagged = frame(&template(false, true, true), stamp, 200);
    let mut untagged = tagged.clone();
    untagged.drain(12..16);
    let found = find(&untagged, untagged.len(), STREAM).unwrap();
    assert_eq!(found.stamp, stamp);
    assert!(is_intact(&found, [&untagged[..]]));
}

proptest! {
    #[test]
    fn stamp_is_found_after_any_headers(
        stamp in stamps(),
        [v6, tcp, vlan]: [bool; 3],
        more in 0..3000usize,
        cut in 100..2000usize,
    ) {
        let template = template(v6, tcp, vlan);
        let len = template.len() + STAMP_LEN + more;
        let frame = frame(&template, stamp, len);
        let found = find(&frame, len, STREAM).unwrap();
        prop_assert_eq!(found.stamp, stamp);
        prop_assert_eq!(found.pattern, template.len() + STAMP_LEN);
        prop_assert!(is_intact(&found, [&frame[..]]));
        // The packet is split into several buffers at any offset.
        let (head, rest) = frame.split_at(cut.min(len));
        let (middle, end) = rest.split_at(rest.len() / 3);
        prop_assert_eq!(find(head, len, STREAM), Ok(found));
        prop_assert!(is_intact(&found, [head, middle, end]));
    }

    #[test]
    fn damage_is_noticed(stamp in stamps(), tcp: bool, at in 14..300usize, bit in 0..8u32) {
        let template = template(false, tcp, false);
        let mut frame = frame(&template, stamp, 300);
        let before = find(&frame, 300, STREAM).unwrap();
        frame[at] ^= 1 << bit;
        let noticed = match find(&frame, 300, STREAM) {
            Err(_) => true,
            Ok(found) => !is_intact(&found, [&frame[..]]),
        };
        // Transport headers are not checked, and one damaged stamp in 65536 passes the check.
        let transport = (34..template.len()).contains(&at);
        let stamp = (template.len()..before.pattern).contains(&at);
        prop_assert!(noticed || transport || stamp);
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200), len in 0..70_000usize) {
        let _ = find(&bytes, len.max(bytes.len()), STREAM);
    }
}
