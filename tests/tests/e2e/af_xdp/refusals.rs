//! Interfaces that cannot be used as a port: each error message says what to do.

use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use offcore_bench::peer::process::Process;
use peers::{Need, one_core, require};

use super::{NEEDS, Net, TIMEOUT, stop};
use crate::switch::{Copies, arguments};

/// Runs a switch on `port` and a generator, which must fail with an error. Returns the error message.
fn refused(net: &Net, port: &str, more: &[&str]) -> String {
    let finished = net.start_with(&[port, "gen:"], more).wait().unwrap();
    assert_eq!(finished.status.code(), Some(1), "{finished:?}");
    finished.stderr
}

fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn missing_features_name_the_remedy() {
    let Some(core) = one_core(&NEEDS) else { return };
    let net = Net::new(core.number(), 2, 1500);
    for (port, more, parts) in [
        ("af_xdp:p7", &[][..], &["no interface 'p7'", "offcore port list"][..]),
        ("af_xdp:p0,mode=zc", &[], &["has no zero-copy", "mode=copy"]),
        ("af_xdp:p0,queues=4", &[], &["has 2 queues", "no queue 2", "ethtool -L p0"]),
        ("af_xdp:p0,first=2", &[], &["has 2 queues", "no queue 2"]),
        ("af_xdp:p0", &["--mbuf-size", "8192"], &["packet buffers of 8192 bytes", "--mbuf-size 4096"]),
        ("af_xdp:p0,ring_size=16384", &[], &["keep 32768 packet buffers", "--mbufs 65536"]),
    ] {
        assert_says(&refused(&net, port, more), parts);
        net.assert_no_programs();
    }
}

#[test]
fn too_large_mtu_names_the_remedy() {
    let Some(core) = one_core(&NEEDS) else { return };
    let net = Net::new(core.number(), 1, 40000);
    let text = refused(&net, "af_xdp:p0,mode=skb", &[]);
    assert_says(&text, &["MTU 40000", "17 packet buffers of 1792", "lower the MTU"]);
    net.assert_no_programs();
}

#[test]
fn missing_capabilities_are_named() {
    let Some(()) = require(&NEEDS) else { return };
    let net = Net::new(0, 1, 1500);
    let args = arguments(&["af_xdp:p0", "gen:"], Copies::Core, 1, &[]);
    let run = |drop: &str| {
        let mut command: Command = net.switch.command("setpriv");
        command.args([drop, "--"]).arg(peers::offcore::binary().unwrap()).args(&args);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert_says(&run("--bounding-set=-all"), &["root, or CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF"]);
    assert_says(&run("--bounding-set=-net_raw"), &["root, or CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF"]);
    assert_says(&run("--bounding-set=-ipc_lock"), &["locking 32 MiB", "ulimit -l", "CAP_IPC_LOCK"]);
}

#[test]
fn interface_of_another_switch_is_refused() {
    let Some(core) = one_core(&NEEDS) else { return };
    let net = Net::new(core.number(), 1, 1500);
    let offcore = net.start("", &[]);
    let text = refused(&net, "af_xdp:p0", &[]);
    assert_says(&text, &["'p0' has XDP program", "'offcore_af_xdp'", "attached by link", "end the process"]);
    assert!((0..20).any(|_| net.ping(56)), "the first switch continues");
    stop(offcore, &net);
}

#[test]
fn foreign_program_is_not_replaced() {
    let Some(core) = one_core(&[&NEEDS[..], &[Need::Testpmd]].concat()) else { return };
    let net = Net::new(core.number(), 1, 1500);
    let mut command = net.switch.command("dpdk-testpmd");
    let prefix = format!("--file-prefix={}", net.switch.name());
    command.args(["--no-pci", "--in-memory", "-m", "256", &prefix]);
    let core = core.number();
    command.args(["--lcores", &format!("0@{core},1@{core}")]);
    command.args(["--vdev", "net_af_xdp0,iface=p0", "--", "-i", "--no-mlockall", "--total-num-mbufs=8192"]);
    let mut testpmd = Process::spawn("testpmd", command).unwrap();
    testpmd.wait_for(0, TIMEOUT, "a prompt", |text| text.contains("testpmd>").then_some(())).unwrap();
    let attached = || net.has_program("p0") || (sleep(Duration::from_millis(100)), false).1;
    assert!((0..100).any(|_| attached()), "testpmd attaches no program: {}", testpmd.tail());
    let attached = ["XDP program", "attached", "ip link set dev p0 xdp off"];
    for mode in ["", ",mode=skb"] {
        assert_says(&refused(&net, &format!("af_xdp:p0{mode}"), &[]), &attached);
        assert!(net.has_program("p0"));
    }
    // The program stays attached when testpmd is killed, and the suggested remedy works.
    testpmd.kill();
    assert!(net.has_program("p0"), "{}", testpmd.tail());
    assert_says(&refused(&net, "af_xdp:p0", &[]), &attached);
    net.switch.ip(&["link", "set", "dev", "p0", "xdp", "off"]).unwrap();
    let offcore = net.start("", &[]);
    net.ping_until_answered();
    stop(offcore, &net);
}
