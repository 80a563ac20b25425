//! A host on two lcores against the kernel's TCP/IP stack: each flow is handled by one lcore, whichever queue its
//! packets use.

use std::net::TcpListener;
use std::thread;

use peers::offcore::Finished;
use peers::{Netns, Offcore, exclusive};
use serde_json::Value;

use super::epping::receive;
use super::tcp::{self, KERNEL, NEEDS, OURS, TAP};
use super::udp;
use crate::tcp::inside;

/// Number of connections. The probability that all of them are on one lcore is one in 16 million.
const FLOWS: u64 = 24;

fn last_report(finished: &Finished) -> &Value {
    let mut reports = finished.lines.iter().filter_map(|line| line.json.as_ref());
    reports.rfind(|json| json.get("tcp").is_some()).unwrap()
}

/// Returns the number of packets that one lcore has handed to the other, from the queues that are not the port's.
fn handed_over(report: &Value, half: &str) -> u64 {
    let queues = report["queues"].as_array().unwrap().iter();
    let rings = queues.filter(|queue| queue["half"] == half && queue["port"] != "port0");
    rings.map(|queue| queue["packets"].as_u64().unwrap()).sum()
}

#[test]
fn every_flow_finds_its_lcore() {
    let Some(_cores) = exclusive(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    for (port, more) in [
        ("", &[][..]),
        (",queues=2", &["--idle", "sleep"]),
        (",queues=3,offloads=off", &["--dma", "rxq0@core:0;txq1@core:1", "--mode", "offload"]),
    ] {
        let offcore = tcp::host(&netns, port, &[&["--lcores", "0,1"], more].concat());
        inside(&netns, || {
            thread::scope(|scope| {
                for (seed, address) in (0..FLOWS).zip(OURS.iter().cycle()) {
                    scope.spawn(move || tcp::echo(address, 7, seed, 100_000));
                }
            });
            // Datagrams of one fragment and of three fragments. Fragments are reassembled before their ports are
            // known.
            for (seed, address) in (0..FLOWS).zip(OURS.iter().cycle()) {
                let socket = udp::connected(address, 7);
                udp::echo(&socket, &tcp::content(seed, 1000));
                udp::echo(&socket, &tcp::content(seed, 4000));
            }
        });
        for address in OURS {
            netns.run("ping", &["-c", "3", "-i", "0.1", "-W", "5", "-s", "9000", address]).unwrap();
        }
        let finished = tcp::stop(offcore);
        let report = last_report(&finished);
        let of =
            |name| report["tcp"].as_array().unwrap().iter().map(move |host| host[name].as_u64().unwrap());
        assert_eq!(of("accepted").sum::<u64>(), FLOWS, "{report}");
        assert!(of("accepted").count() == 2 && of("accepted").all(|count| count > 0), "{report}");
        assert_eq!(of("datagrams_received").sum::<u64>(), 2 * FLOWS, "{report}");
        assert!(handed_over(report, "rx") > FLOWS, "{report}");
        assert_eq!(handed_over(report, "rx"), handed_over(report, "tx"), "{report}");
    }
}

/// The connecting host chooses local ports such that answers arrive at its own lcore.
#[test]
fn streams_from_two_lcores() {
    let Some(_cores) = exclusive(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    let port = format!("tap:{TAP},addr={}/24", OURS[0]);
    let stream = ["epping", "--port", &port, "-c", "10.77.0.1:9", "-l", "100000", "-n", "7", "--verify"];
    let more = ["--lcores", "0,1", "--stats-interval", "0.2", "--format", "json"];
    let mut offcore = Offcore::start_in(&netns, &[&stream[..], &more].concat()).unwrap();
    offcore.wait_for("a report", |line| line.json.is_some()).unwrap();
    netns.ip(&["addr", "add", KERNEL[0], "dev", TAP]).unwrap();
    inside(&netns, || {
        let listener = TcpListener::bind("10.77.0.1:9").unwrap();
        let both: Vec<_> = (0..2).map(|_| listener.accept().unwrap().0).collect();
        let receivers: Vec<_> =
            both.into_iter().map(|stream| thread::spawn(move || receive(stream, true))).collect();
        receivers.into_iter().for_each(|receiver| receiver.join().unwrap());
    });
    let finished = offcore.stop().unwrap();
    assert!(finished.status.success(), "{finished:?}");
    let report = last_report(&finished);
    let opened = report["tcp"].as_array().unwrap().iter().map(|host| host["opened"].as_u64().unwrap());
    assert!(opened.clone().count() == 2 && opened.clone().all(|opened| opened > 0), "{report}");
    let summary = finished.lines.iter().rev().find_map(|line| line.json.as_ref()).unwrap();
    assert!(summary["returned"].as_u64() > Some(2_000_000), "{summary}");
    assert_eq!(summary["wrong"], 0, "{summary}");
}
