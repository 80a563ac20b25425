//! The host's MTU follows the MTU of the port's interface.

use std::io::Read;

use peers::{Offcore, one_core};

use crate::tcp::{OURS, connect, stop};
use crate::tcp_veth::{NEEDS, PORT, Veth};

/// Length of the IP and TCP headers with timestamps, in bytes.
const HEADERS: [u64; 2] = [20 + 32, 40 + 32];

/// Waits for a report in which the connection of this local address has segments of `bytes` bytes.
fn wait_for_segments(offcore: &mut Offcore, local: &str, bytes: u64) {
    let is_it = |connection: &&serde_json::Value| connection["local"] == local;
    let mss =
        |report: &serde_json::Value| report["connections"].as_array()?.iter().find(is_it)?["mss"].as_u64();
    let what = format!("segments of {bytes} bytes to {local}");
    offcore.wait_for(&what, |line| line.json.as_ref().and_then(mss) == Some(bytes)).unwrap();
}

#[test]
fn mtu_follows_the_interface() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let args = ["--app", "source", "--idle", "sleep", "--connections"];
    for (address, headers) in OURS.into_iter().zip(HEADERS) {
        let veth = Veth::new(1400);
        let mut offcore = veth.host(&format!("af_packet:{PORT}"), &args);
        let read = |stream: &mut std::net::TcpStream| stream.read_exact(&mut vec![0; 300_000]);
        let mut stream = veth.kernel.within(|| Ok(connect(address, 19))).unwrap();
        read(&mut stream).unwrap();
        let local = stream.peer_addr().unwrap().to_string();
        wait_for_segments(&mut offcore, &local, 1400 - headers);
        veth.set_mtu(1300);
        read(&mut stream).unwrap();
        wait_for_segments(&mut offcore, &local, 1300 - headers);
        read(&mut stream).unwrap();
        stop(offcore);
    }
}

#[test]
fn mtu_above_interface_warns() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let veth = Veth::new(1400);
    let offcore = veth.host(&format!("af_packet:{PORT},mtu=1500"), &["--app", "source", "--idle", "sleep"]);
    let text = offcore.stderr();
    assert!(text.contains("mtu=1500 is above its interface's MTU of 1400"), "{text}");
    let mut stream = veth.kernel.within(|| Ok(connect(OURS[0], 19))).unwrap();
    stream.read_exact(&mut vec![0; 300_000]).unwrap();
    stop(offcore);
}
