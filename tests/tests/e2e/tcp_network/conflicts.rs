//! Addresses that a host shares with another host or with the kernel of the same machine.

use peers::{Offcore, one_core};

use crate::tcp::{OURS, stop};
use crate::tcp_veth::{NEEDS, PEER, PORT, Veth};

#[test]
fn address_conflicts_are_reported() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let veth = Veth::new(1500);
    let (address, port) = (format!("{}/24", OURS[0]), format!("af_packet:{PORT},addr={}/24", OURS[0]));
    let run = |expected: &str| {
        let args = ["tcp", "--port", &port, "--idle", "sleep", "--stats-interval", "0.2", "--format", "json"];
        let mut offcore = Offcore::start_in(veth.ours(), &args).unwrap();
        let mut says = || {
            offcore.wait_for("a report", |line| line.json.is_some()).unwrap();
            offcore.stderr().contains(expected)
        };
        assert!((0..50).any(|_| says()), "{expected}: {}", offcore.tail());
        stop(offcore);
    };
    veth.ours().ip(&["addr", "add", &address, "dev", PORT]).unwrap();
    run(&format!("addr={} is also the kernel's", OURS[0]));
    veth.ours().ip(&["addr", "del", &address, "dev", PORT]).unwrap();
    veth.kernel.ip(&["addr", "add", &address, "dev", PEER]).unwrap();
    let link = veth.kernel.ip(&["-o", "link", "show", PEER]).unwrap();
    let (_, mac) = link.split_once("link/ether ").unwrap();
    let mac = mac.split(' ').next().unwrap();
    run(&format!("port0 does not use its address {}: the host {mac} on its link uses it", OURS[0]));
}
