//! Routes and gateways.

use offcore_stats::time::Time;
use offcore_tcp::proto::{AppId, Route};

use crate::station::{PEER_MAC, Station, address, prefix};

/// Returns the destinations of IPv4 packets that were sent to the peer's MAC address.
fn packets_to_peer(station: &mut Station) -> Vec<String> {
    let frames = station.frames();
    let packets = frames.iter().filter(|frame| frame[..6] == PEER_MAC.0 && frame[12..14] == [8, 0]);
    packets.map(|frame| frame[30..34].iter().map(u8::to_string).collect::<Vec<_>>().join(".")).collect()
}

#[test]
fn gateway_outside_prefix_is_resolved() {
    let gateway = address("169.254.1.1");
    let mut station = Station::new(&["10.9.0.2/32"], &[Route::default_by(gateway)]);
    station.run_to(Time::from_secs(1));
    station.frames();
    for to in ["192.0.2.9:80", "169.254.1.1:80"] {
        station.stack.connect(station.now, AppId::OWN, None, to.parse().unwrap(), &mut station.out).unwrap();
    }
    station.take_out();
    assert_eq!(station.answer_arp(), [gateway], "one question, for the gateway");
    assert_eq!(packets_to_peer(&mut station), ["192.0.2.9", "169.254.1.1"]);
}

#[test]
fn longest_prefix_selects_gateway() {
    let [near, far] = ["10.0.0.254", "10.0.0.1"].map(address);
    let routes = [
        Route::default_by(far),
        Route { to: prefix("10.1.0.0/16"), gateway: near },
        Route { to: prefix("10.1.2.0/24"), gateway: address("10.0.0.253") },
    ];
    let mut station = Station::new(&["10.0.0.2/24"], &routes);
    station.run_to(Time::from_secs(1));
    station.frames();
    let mut asked = Vec::new();
    for to in ["10.1.9.9:80", "10.1.2.9:80", "192.0.2.1:80", "10.0.0.7:80"] {
        station.stack.connect(station.now, AppId::OWN, None, to.parse().unwrap(), &mut station.out).unwrap();
        station.take_out();
        asked.extend(station.answer_arp());
    }
    assert_eq!(asked, [near, address("10.0.0.253"), far, address("10.0.0.7")]);
}
