//! Two hosts in a VLAN. The kernel is outside of it.

use peers::{Offcore, one_core};

use crate::tcp;
use crate::tcp::stop;
use crate::tcp_veth::{NEEDS, PEER, PORT, Veth};

const OURS: [&str; 2] = ["10.80.0.2", "fd80::2"];

/// Sends a stream to an echo server at the other end of the pair, and compares the echo.
fn echoes(veth: &Veth, to: &str) {
    let port = format!("af_packet:{PEER},vlan=10,addr=10.80.0.1/24,addr=fd80::1/64");
    let args = ["epping", "--port", &port, "-c", to, "-l", "64K", "-n", "4", "--verify", "--duration", "4"];
    let finished = Offcore::start_in(&veth.kernel, &args).unwrap().wait().unwrap();
    assert!(finished.status.success(), "{to}: {finished:?}");
}

fn host_in_vlan(offloads: bool) {
    let veth = Veth::new(1500);
    (0..2).for_each(|end| veth.set_offloads(end, offloads));
    let port = format!("af_packet:{PORT},vlan=10,addr={}/24,addr={}/64", OURS[0], OURS[1]);
    let offcore = tcp::start(veth.ours(), &port, &["--idle", "sleep"]);
    echoes(&veth, "10.80.0.2:7");
    echoes(&veth, "[fd80::2]:7");
    // The untagged network is a different one.
    veth.kernel.ip(&["addr", "add", "10.80.0.3/24", "dev", PEER]).unwrap();
    assert!(!veth.ping(OURS[0], 56), "a packet without a tag was answered");
    stop(offcore);
}

#[test]
fn hosts_in_a_vlan_communicate() {
    let Some(_core) = one_core(&NEEDS) else { return };
    host_in_vlan(true);
    host_in_vlan(false);
}
