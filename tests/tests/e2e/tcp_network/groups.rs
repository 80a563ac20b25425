//! A Linux bridge with multicast snooping and a querier forwards a group's packets only to ports that have reported the
//! group. IPv6 hosts find each other through such groups.
//!
//! ```text
//! ours: tap0 ── br0 ── v0 ── v1 :kernel
//! ```

use std::thread;
use std::time::{Duration, Instant};

use peers::{Netns, one_core};

use crate::tcp;
use crate::tcp::inside;
use crate::tcp::{NEEDS, echo};

const OURS: &str = "fd79::2";
/// The solicited-node multicast group of the host's address.
const GROUP: &str = "ff02::1:ff00:2";
/// Timeout for the bridge to learn a port's group.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Creates a bridge that queries groups every second and forwards multicast packets according to the reports.
fn snooping_bridge(netns: &Netns) {
    let hundredths = |name: &str, value: &str| {
        netns.ip(&["link", "set", "br0", "type", "bridge", name, value]).unwrap();
    };
    netns.ip(&["link", "add", "br0", "type", "bridge", "mcast_snooping", "1"]).unwrap();
    for (name, value) in [
        ("mcast_mld_version", "2"),
        ("mcast_query_response_interval", "50"),
        ("mcast_query_interval", "100"),
        ("mcast_startup_query_interval", "100"),
        ("mcast_querier", "1"),
    ] {
        hundredths(name, value);
    }
    // The querier can use its link-local address immediately.
    netns.run("sysctl", &["-qw", "net.ipv6.conf.br0.accept_dad=0"]).unwrap();
    netns.ip(&["link", "set", "br0", "up"]).unwrap();
}

#[test]
fn snooping_bridge_forwards_solicitations() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let (switch, kernel) = (Netns::new().unwrap(), Netns::new().unwrap());
    snooping_bridge(&switch);
    switch.veth("v0", &kernel, "v1").unwrap();
    switch.ip(&["link", "set", "v0", "master", "br0", "up"]).unwrap();
    kernel.ip(&["link", "set", "v1", "up"]).unwrap();
    kernel.ip(&["addr", "add", "fd79::1/64", "dev", "v1", "nodad"]).unwrap();
    let port = format!("tap:tap0,addr={OURS}/64");
    let offcore = tcp::start(&switch, &port, &["--idle", "sleep"]);
    switch.ip(&["link", "set", "tap0", "master", "br0"]).unwrap();
    // The host's first reports were lost before the bridge existed. It answers the querier.
    let began = Instant::now();
    let known = || {
        let table = switch.run("bridge", &["mdb", "show"]).unwrap();
        table.lines().any(|line| line.contains("port tap0") && line.contains(GROUP))
    };
    while !known() {
        assert!(began.elapsed() < TIMEOUT, "the bridge knows no listener: {}", offcore.tail());
        thread::sleep(Duration::from_millis(100));
    }
    inside(&kernel, || {
        echo(OURS, 7, 1, 100_000);
    });
    assert!(offcore.stop().unwrap().status.success());
}
