//! iperf3, as a server and as a client on the stack.

use offcore_bench::peer::process::Process;
use peers::Need;
use serde_json::Value;

use super::{KERNEL, STACK, Stage, TIMEOUT, finish};

/// Number of bytes of a run, as an argument and as a number.
const BYTES: (&str, u64) = ("16M", 16 << 20);

/// Returns the JSON report, which must contain no error.
fn report(client: Process) -> Value {
    let text = finish(client);
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["error"], Value::Null, "{text}");
    report
}

/// Checks that bytes were transferred. The two sums may differ, because any number may be in flight when either end
/// stops counting.
fn moved(report: &Value) {
    let bytes = |sum: &str| report["end"][sum]["bytes"].as_u64().unwrap();
    assert!(bytes("sum_sent") + bytes("sum_received") >= BYTES.1, "{report}");
}

const SERVER: [&str; 3] = ["iperf3", "-s", "--forceflush"];

/// The options are set on sockets before `connect`.
const WAYS: [&[&str]; 7] = [
    &[],
    &["-R"],
    &["-P", "8"],
    &["-Z"],
    &["-R", "-P", "8"],
    &["-w", "64K", "-S", "0x10"],
    &["-R", "-w", "64K", "-M", "1000"],
];

/// Waits until a server listens again. It does not listen while it finishes a test.
fn wait_listening(server: &mut Process, tests: usize) {
    let listens = |text: &str| (text.matches("Server listening").count() > tests).then_some(());
    server.wait_for(0, TIMEOUT, "a listener", listens).unwrap();
}

fn client<'a>(address: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["iperf3", "--json", "--bytes", BYTES.0, "-c", address], more].concat()
}

#[test]
fn server_on_the_stack() {
    let Some(stage) = Stage::new(&[Need::Iperf3]) else { return };
    let mut server = stage.start(&SERVER);
    let mut tests = 0;
    for address in [STACK[0], STACK[1], "127.0.0.1"] {
        for way in WAYS {
            wait_listening(&mut server, tests);
            moved(&report(stage.start_beside(&client(address, way))));
            tests += 1;
        }
    }
}

#[test]
fn client_on_the_stack() {
    let Some(stage) = Stage::new(&[Need::Iperf3]) else { return };
    let mut server = stage.start_beside(&SERVER);
    for (tests, way) in WAYS.iter().enumerate() {
        wait_listening(&mut server, tests);
        let report = report(stage.start_apart(&client(KERNEL, way)));
        assert_eq!(report["start"]["connected"][0]["local_host"], STACK[0], "{report}");
        moved(&report);
    }
}

#[test]
fn datagrams_of_a_client() {
    let Some(stage) = Stage::new(&[Need::Iperf3]) else { return };
    let mut server = stage.start_beside(&SERVER);
    for (tests, way) in [&[][..], &["-R"]].iter().enumerate() {
        wait_listening(&mut server, tests);
        let client = ["iperf3", "--json", "-u", "--bitrate", "20M", "--bytes", "1M", "-c", KERNEL];
        let report = report(stage.start_apart(&[&client[..], way].concat()));
        let packets = report["end"]["sum"]["packets"].as_u64().unwrap();
        let lost = report["end"]["sum"]["lost_packets"].as_u64().unwrap();
        assert!(packets >= 100 && lost < packets / 2, "{report}");
    }
}
