//! A kernel router between the host and its peer. The link behind it has a smaller MTU than both ends know.
//!
//! ```text
//! ours: p0 ── vc :router: near ── far :peer
//! ```

use std::io::Read;
use std::thread;

use peers::{Netns, one_core};

use crate::tcp::{KERNEL, OURS, connect, stop};

use super::{NEEDS, Veth};

/// MTU of the link behind the router, in bytes.
const MTU: &str = "1300";
/// Payload of a segment for IPv4 and IPv6, after IP and TCP headers with timestamps.
const PAYLOAD: [u64; 2] = [1300 - 20 - 32, 1300 - 40 - 32];

/// Creates the peer's namespace, whose packets to the host pass the router.
fn peer(router: &Netns) -> Netns {
    let peer = Netns::new().unwrap();
    router.veth("near", &peer, "far").unwrap();
    for (netns, end, number) in [(router, "near", 1), (&peer, "far", 2)] {
        netns.ip(&["link", "set", end, "mtu", MTU, "up"]).unwrap();
        netns.ip(&["addr", "add", &format!("10.78.0.{number}/24"), "dev", end]).unwrap();
        netns.ip(&["addr", "add", &format!("fd78::{number}/64"), "dev", end, "nodad"]).unwrap();
    }
    router.run("sysctl", &["-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"]).unwrap();
    // The peer announces an MSS that is too large for its own link, so the host learns the path MTU only from the
    // router's ICMP messages.
    peer.ip(&["route", "add", "default", "via", "10.78.0.1", "advmss", "1460"]).unwrap();
    peer.ip(&["route", "add", "default", "via", "fd78::1", "advmss", "1440"]).unwrap();
    peer
}

fn sources(port: &str, offloads: bool) {
    let veth = Veth::new(1500);
    veth.set_offloads(1, offloads);
    let peer = peer(&veth.kernel);
    let gateways = KERNEL.map(|address| address.split('/').next().unwrap().to_owned());
    let port = format!("{port},gw={},gw={}", gateways[0], gateways[1]);
    let mut offcore = veth.host(&port, &["--app", "source", "--idle", "sleep", "--connections"]);
    for (address, payload) in OURS.into_iter().zip(PAYLOAD) {
        let stream = peer.within(|| {
            let mut stream = connect(address, 19);
            let mut bytes = vec![0; 1_000_000];
            stream.read_exact(&mut bytes)?;
            for (number, word) in (0u64..).zip(bytes.chunks_exact(8)) {
                assert_eq!(word, number.to_be_bytes(), "{address}");
            }
            Ok(stream)
        });
        let stream = stream.unwrap();
        let local = stream.peer_addr().unwrap().to_string();
        let is_it = |connection: &serde_json::Value| connection["local"] == local;
        let mss = |report: &serde_json::Value| {
            report["connections"].as_array()?.iter().find(|connection| is_it(connection))?["mss"].as_u64()
        };
        let what = format!("segments of {payload} bytes to {local}");
        offcore.wait_for(&what, |line| line.json.as_ref().and_then(mss) == Some(payload)).unwrap();
    }
    stop(offcore);
}

#[test]
fn a_path_with_a_smaller_mtu() {
    let Some(_core) = one_core(&NEEDS) else { return };
    thread::scope(|scope| {
        scope.spawn(|| sources("af_packet:p0", true));
        scope.spawn(|| sources("af_xdp:p0", false));
    });
}
