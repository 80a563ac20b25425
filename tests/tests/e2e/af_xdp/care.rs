//! Interfaces go down and up, are deleted and created again, and are left as they were found.

use peers::{Offcore, one_core};
use rustix::process::Signal;

use super::{NEEDS, Net, SERVER, stop};
use crate::switch::{self, wait_for_status};

/// Sends from the client while the other port's link is down. The packets must be dropped and counted at that port.
fn send_while_down(net: &Net, offcore: &mut Offcore, before: u64) -> u64 {
    // The stack resolves neighbours again, so it sends packets whatever it has cached.
    let _ = net.client.ip(&["neighbour", "flush", "dev", "vc"]);
    let _ = net.client.run("ping", &["-c", "2", "-i", "0.1", "-W", "1", SERVER]);
    let dropped = |report: &switch::Report| report.dropped("port1 tx down");
    let report = switch::wait_for(offcore, "packets dropped for a link that is down", before + 1, dropped);
    dropped(&report)
}

#[test]
fn link_goes_down_and_up() {
    let Some(core) = one_core(&NEEDS) else { return };
    let net = Net::new(core.number(), 1, 1500);
    let mut offcore = net.start("", &[]);
    net.ping_until_answered();
    // First the switch's end of the link goes down, then the other end, which takes the carrier away.
    let ours = (&net.switch, "p1", "interface p1 is down");
    let theirs = (&net.server, "vs", "interface p1 has no carrier");
    let mut dropped = 0;
    for (netns, interface, state) in [ours, theirs, ours] {
        netns.ip(&["link", "set", interface, "down"]).unwrap();
        wait_for_status(&mut offcore, 1, state);
        dropped = send_while_down(&net, &mut offcore, dropped);
        netns.ip(&["link", "set", interface, "up"]).unwrap();
        wait_for_status(&mut offcore, 1, "interface p1 is up");
        net.ping_until_answered();
    }
    let report = stop(offcore, &net);
    report.assert_only_drops(&["port0 tx down", "port1 tx down", "port1 tx failed"]);
}

#[test]
fn recreated_interface_is_reopened() {
    let Some(core) = one_core(&NEEDS) else { return };
    for mode in ["", ",mode=skb"] {
        let net = Net::new(core.number(), 1, 1500);
        // Each port holds half of these buffers. If buffers were lost with a socket, the pool would soon be empty.
        let mut offcore = net.start(mode, &["--mbufs", "8192"]);
        for _ in 0..6 {
            net.ping_until_answered();
            net.switch.ip(&["link", "delete", "p0"]).unwrap();
            wait_for_status(&mut offcore, 0, "interface p0 is gone");
            net.connect_client();
            wait_for_status(&mut offcore, 0, "interface p0 is up");
        }
        net.ping_until_answered();
        net.streams();
        let report = stop(offcore, &net);
        assert_eq!((report.starved(0, "rx"), report.starved(1, "rx")), (0, 0), "{report}");
    }
}

#[test]
fn quickly_recreated_interface_is_reopened() {
    let Some(core) = one_core(&NEEDS) else { return };
    let net = Net::new(core.number(), 1, 1500);
    let mut offcore = net.start("", &[]);
    net.ping_until_answered();
    offcore.signal(Signal::STOP).unwrap();
    net.switch.ip(&["link", "delete", "p0"]).unwrap();
    net.connect_client();
    offcore.signal(Signal::CONT).unwrap();
    net.ping_until_answered();
    wait_for_status(&mut offcore, 0, "interface p0 is up");
    stop(offcore, &net);
}

#[test]
fn killed_switch_leaves_no_program() {
    let Some(core) = one_core(&NEEDS) else { return };
    let net = Net::new(core.number(), 2, 1500);
    for _ in 0..3 {
        let mut offcore = net.start("", &[]);
        net.ping_until_answered();
        assert!(net.has_program("p0"));
        offcore.signal(Signal::KILL).unwrap();
        assert!(!offcore.wait().unwrap().status.success());
        net.assert_no_programs();
    }
    let offcore = net.start("", &[]);
    net.ping_until_answered();
    stop(offcore, &net);
    // The kernel can use the interface as before.
    net.switch.ip(&["address", "add", "10.77.0.9/24", "dev", "p0"]).unwrap();
    net.client.run("ping", &["-c", "1", "-W", "5", "10.77.0.9"]).unwrap();
    let link = net.switch.ip(&["-d", "link", "show", "dev", "p0"]).unwrap();
    assert!(link.contains("promiscuity 0"), "{link}");
}
