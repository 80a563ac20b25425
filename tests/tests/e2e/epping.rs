//! `offcore epping` to receivers on the kernel's TCP/IP stack, which check every byte.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use peers::{Need, Netns, Offcore, TempDir, exclusive, one_core};

use super::switch;
use super::tcp::{KERNEL, NEEDS, OURS, TAP};
use crate::tcp::inside;

const CHUNK: usize = 100_000;
const BUFFERS: usize = 7;
/// Number of bytes after which a receiver stops.
const ENOUGH: usize = 3_000_000;

/// Returns the expected byte at a stream position. Each 8 bytes of the buffers contain their index.
fn expected(position: usize) -> u8 {
    let at = position % (CHUNK * BUFFERS);
    ((at / 8) as u64).to_be_bytes()[at % 8]
}

/// Receives and compares bytes, and echoes them if `echoes` is set. Bytes after the first `ENOUGH` are not checked.
pub(super) fn receive(mut stream: TcpStream, echoes: bool) {
    let mut bytes = vec![0; 65536];
    let mut position = 0;
    while position < ENOUGH {
        let n = stream.read(&mut bytes).unwrap();
        assert!(n > 0, "it ends after {position} bytes");
        let wrong = (position..).zip(&bytes[..n]).find(|(at, byte)| **byte != expected(*at));
        assert_eq!(wrong, None);
        if echoes {
            stream.write_all(&bytes[..n]).unwrap();
        }
        position += n;
    }
    if echoes {
        // Everything that is acknowledged must be echoed until the source stops.
        thread::spawn(move || std::io::copy(&mut stream.try_clone()?, &mut stream));
    }
}

/// Returns the arguments of a source on the TAP port.
fn source<'a>(port: &'a str, chunk: &'a str, buffers: &'a str) -> Vec<&'a str> {
    let args = ["epping", "--port", port, "-c", "10.77.0.1:9", "-l", chunk, "-n", buffers];
    [&args[..], &["--stats-interval", "0.2", "--format", "json"]].concat()
}

/// Streams over a TAP port until the receiver has enough. Returns the summary.
fn stream(netns: &Netns, more: &[&str], echoes: bool) -> serde_json::Value {
    let port = format!("tap:{TAP},addr={}/24", OURS[0]);
    let (chunk, buffers) = (CHUNK.to_string(), BUFFERS.to_string());
    let args = [source(&port, &chunk, &buffers), more.to_vec()].concat();
    let mut offcore = Offcore::start_in(netns, &args).unwrap();
    offcore.wait_for("a report", |line| line.json.is_some()).unwrap();
    netns.ip(&["addr", "add", KERNEL[0], "dev", TAP]).unwrap();
    inside(netns, || {
        let listener = TcpListener::bind("10.77.0.1:9").unwrap();
        let (stream, _) = listener.accept().unwrap();
        thread::spawn(move || receive(stream, echoes)).join().unwrap();
    });
    let finished = offcore.stop().unwrap();
    assert!(finished.status.success(), "{finished:?}");
    finished.lines.iter().rev().find_map(|line| line.json.clone()).unwrap()
}

#[test]
fn chunks_arrive_with_each_copier() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    let engine = ["--dma", "txq0@core:1"];
    for copies in [&[][..], &["-d"], &["-d", "-m", "512"], &["-du", "-m", "512"], &["-du"]] {
        let more = if copies.is_empty() { vec![] } else { [copies, &engine].concat() };
        let summary = stream(&netns, &more, false);
        let chunks = summary["chunks"].as_u64().unwrap();
        // At the end, the acknowledgements of everything in the buffers may be in flight.
        assert!(chunks >= (ENOUGH / CHUNK - BUFFERS) as u64, "{copies:?}: {summary}");
        assert!(summary["p99_us"].as_f64() >= summary["p50_us"].as_f64(), "{summary}");
        assert!(summary["wrong"].is_null(), "nothing was compared: {summary}");
    }
}

#[test]
fn echoed_bytes_are_compared() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    let summary = stream(&netns, &["--verify", "-d", "--dma", "txq0@core:1"], true);
    assert!(summary["returned"].as_u64() > Some(1_000_000), "{summary}");
    assert_eq!((&summary["wrong"], &summary["missing"]), (&0.into(), &0.into()), "{summary}");
}

/// A peer that reads without sending data back is not an echo server.
#[test]
fn missing_echo_is_a_failure() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let netns = Netns::new().unwrap();
    let port = format!("tap:{TAP},addr={}/24", OURS[0]);
    let args = [source(&port, "100000", "7"), vec!["--verify"]].concat();
    let mut offcore = Offcore::start_in(&netns, &args).unwrap();
    offcore.wait_for("a report", |line| line.json.is_some()).unwrap();
    netns.ip(&["addr", "add", KERNEL[0], "dev", TAP]).unwrap();
    inside(&netns, || {
        let (mut stream, _) = TcpListener::bind("10.77.0.1:9").unwrap().accept().unwrap();
        let mut bytes = vec![0; ENOUGH];
        stream.read_exact(&mut bytes).unwrap();
        stream.write_all(&bytes[..ENOUGH / 2]).unwrap();
        thread::spawn(move || std::io::copy(&mut stream, &mut std::io::sink()));
    });
    let finished = offcore.stop().unwrap();
    assert_eq!(finished.status.code(), Some(1), "{finished:?}");
    let summary = finished.lines.iter().rev().find_map(|line| line.json.as_ref()).unwrap();
    assert_eq!((&summary["wrong"], &summary["returned"]), (&0.into(), &(ENOUGH / 2).into()), "{summary}");
    assert!(summary["missing"].as_u64() >= Some(ENOUGH as u64 / 2), "{summary}");
    assert!(format!("{finished:?}").contains("did not come back"), "{finished:?}");
}

/// Offcore's host stack is at both ends of the virtqueues and echoes all received data.
#[test]
fn chunks_between_a_vhost_port_and_a_virtio_user_port() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let every = ["--stats-interval", "0.2", "--format", "json"];
    for (mtu, options, more) in [
        ("", "", &[][..]),
        (",mtu=9000", ",packed", &["-d", "--dma", "txq0@core:0"]),
        (",mtu=9000", ",packed,offloads=off,mrg=off", &["-m", "512"]),
    ] {
        let dir = TempDir::new().unwrap();
        let socket = dir.file("s").display().to_string();
        let (port, lcore) =
            (format!("vhost:{socket}{mtu},addr=10.77.0.1/24,addr=fd77::1/64"), ["--lcores", "0"]);
        let args = [&["tcp", "--port", &port, "--idle", "sleep"], &lcore[..], &every].concat();
        let mut far = Offcore::start(&args).unwrap();
        switch::wait_for_report(&mut far);
        let port = format!("virtio-user:{socket}{options}{mtu},addr=10.77.0.2/24,addr=fd77::2/64");
        for to in ["10.77.0.1:7", "[fd77::1]:7"] {
            let flags =
                ["epping", "--port", &port, "-c", to, "-l", "100000", "-n", "7", "--verify", "--lcores", "1"];
            let mut near = Offcore::start(&[&flags[..], more, &every].concat()).unwrap();
            switch::wait_for(&mut near, "bytes that came back", 5_000_000, |report| report.bytes(0, "rx"));
            let finished = near.stop().unwrap();
            assert!(finished.status.success(), "{finished:?}");
            let summary = finished.lines.iter().rev().find_map(|line| line.json.as_ref()).unwrap();
            assert!(summary["returned"].as_u64() > Some(3_000_000), "{options} {to}: {summary}");
            assert_eq!(summary["wrong"], 0, "{options} {to}: {summary}");
        }
        switch::stop(far);
    }
}
