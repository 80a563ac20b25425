//! IPv6 flow labels (RFC 6437).

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::AppId;
use offcore_wire::Ipv6Packet;

use crate::station::{Station, introduce};

const SECOND: Micros = Micros::from_secs(1);

/// Returns the flow labels of the sent TCP packets.
fn labels(station: &mut Station) -> Vec<u32> {
    let frames = station.frames();
    let packets = frames.iter().filter(|frame| frame[12..14] == [0x86, 0xdd] && frame[20] == 6);
    packets.map(|frame| Ipv6Packet::new_checked(&frame[14..]).unwrap().flow_label()).collect()
}

#[test]
fn flow_keeps_its_label() {
    let mut station = Station::new(&["2001:db8::2/64"], &[]);
    station.run_to(Time::from_secs(3));
    introduce(&mut station, &["2001:db8::9"]);
    let to = "[2001:db8::9]:80".parse().unwrap();
    for _ in 0..2 {
        station.stack.connect(station.now, AppId::OWN, None, to, &mut station.out).unwrap();
    }
    station.take_out();
    let first = labels(&mut station);
    assert!(first.len() == 2 && first[0] != first[1] && !first.contains(&0), "{first:?}");
    // The SYNs are retransmitted with the same labels.
    station.run_to(station.now + SECOND + SECOND / 2);
    let mut again = labels(&mut station);
    again.sort_unstable();
    let mut expected = first;
    expected.sort_unstable();
    assert_eq!(again, expected);
}
