//! The binary as used by a person or a script: exit codes, messages, reports, signals.

#![allow(clippy::unwrap_used, reason = "tests may")]

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use offcore_wire::UdpFlow;
use offcore_wire::ethernet::MacAddr;
use offcore_wire::pcap::{PcapReader, PcapWriter};
use offcore_wire::template::UdpTemplate;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn offcore(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_offcore"));
    command.args(args).env_remove("OFFCORE_LOG");
    command
}

fn switch(args: &[&str]) -> Command {
    let mut command = offcore(&["switch", "--hugepages=none", "--mbufs=4096"]);
    command.args(args);
    command
}

/// Locks a mutex, so that only one test at a time runs a switch, which polls on its lcore.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A directory of one test that is removed with its content.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("offcore-cli-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Returns every line of stdout as JSON. The last one is the final report.
fn reports(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}: {}", output.status, stderr(output));
    let lines: Vec<Value> =
        output.stdout.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    let (last, before) = lines.split_last().unwrap();
    assert_eq!(last["report"], "final");
    assert!(before.iter().all(|line| line["report"] == "interval"));
    lines
}

fn queue<'a>(report: &'a Value, port: &str, half: &str) -> &'a Value {
    let queues = report["queues"].as_array().unwrap();
    queues.iter().find(|queue| queue["port"] == port && queue["half"] == half).unwrap()
}

#[test]
fn a_bad_log_filter_is_a_usage_error() {
    for filter in ["vhost=loud", "debg", "9", "info,offcore_vhost", "info,"] {
        let output = offcore(&["switch", "--port=gen:"]).env("OFFCORE_LOG", filter).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{filter}");
        assert!(stderr(&output).contains(&format!("OFFCORE_LOG='{filter}'")), "{}", stderr(&output));
    }
}

#[test]
fn help_and_version_exit_with_0() {
    for args in [&["--help"][..], &["switch", "--help"], &["switch", "-h"], &["--version"]] {
        let output = offcore(args).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}");
        assert!(String::from_utf8(output.stdout).unwrap().contains("offcore"));
    }
}

#[test]
fn a_socket_in_use_is_left_alone_and_named() {
    let folder = Folder::new("socket");
    let path = folder.file("vm1.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let port = format!("vhost:{}", path.display());
    let output = switch(&["--port", &port]).output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(&*path.to_string_lossy()) && text.contains("in use"), "{text}");
    assert!(path.exists());

    // No process listens any more: the stale socket is replaced, and the new one is removed at the end.
    drop(listener);
    assert!(path.exists());
    let _turn = turn();
    let output = switch(&["--port", &port, "--duration=0.1", "--format=json"]).output().unwrap();
    assert_eq!(reports(&output).last().unwrap()["stopped_by"], "duration");
    assert!(!path.exists());
    assert!(stderr(&output).contains("port0 vhost:"), "{}", stderr(&output));
}

#[test]
fn generators_check_each_others_packets() {
    let _turn = turn();
    let ports = ["--port=gen:size=64,count=5000", "--port=gen:size=1518,count=5000,flows=7"];
    let flags = ["--until-idle", "--format=json", "--stats-interval=0.2"];
    let output = switch(&[&ports[..], &flags].concat()).output().unwrap();
    assert!(stderr(&output).contains("packet buffers: 4096 x 2048 B on 4 KiB pages"), "{}", stderr(&output));
    let reports = reports(&output);
    assert!(reports.len() > 1, "no interval report in more than a second");
    let last = reports.last().unwrap();
    assert_eq!(last["stopped_by"], "idle");
    assert_eq!(last["unfinished"], 0);
    for port in ["port0", "port1"] {
        assert_eq!(queue(last, port, "rx")["packets"], 5000);
        assert_eq!(queue(last, port, "tx")["packets"], 5000);
        let ports = last["ports"].as_array().unwrap();
        let generator = &ports.iter().find(|line| line["port"] == port).unwrap()["generator"];
        for (name, count) in
            [("sent", 5000), ("received", 5000), ("verified", 5000), ("lost", 0), ("corrupt", 0)]
        {
            assert_eq!(generator[name], count, "{port} {name}");
        }
    }
    for group in ["switching", "virtqueue", "copy"] {
        assert!(last["workers"][0]["groups"][group].is_number(), "{group}");
    }
}

fn write_capture(path: &Path, packets: usize) -> Vec<Vec<u8>> {
    let mut writer = PcapWriter::new(std::fs::File::create(path).unwrap(), 65535).unwrap();
    let frame = |n: usize| {
        let flow = UdpFlow::txonly(MacAddr([2, 0, 0, 0, 0, 1]), MacAddr([2, 0, 0, 0, 0, 2]));
        let mut frame = vec![u8::try_from(n % 251).unwrap(); 60 + n % 1400];
        UdpTemplate::new(&flow, frame.len()).unwrap().write(&mut frame).unwrap();
        frame
    };
    let frames: Vec<_> = (0..packets).map(frame).collect();
    for frame in &frames {
        writer.write_record(0, frame).unwrap();
    }
    writer.flush().unwrap();
    frames
}

fn read_capture(path: &Path) -> Vec<Vec<u8>> {
    let mut reader = PcapReader::new(BufReader::new(std::fs::File::open(path).unwrap())).unwrap();
    let mut buffer = vec![0; 65535];
    let mut frames = Vec::new();
    while let Some(record) = reader.next_record(&mut buffer).unwrap() {
        frames.push(buffer[..record.len].to_vec());
    }
    frames
}

#[test]
fn mac_mode_rewrites_like_testpmd() {
    let _turn = turn();
    let folder = Folder::new("pcap");
    let (input, output) = (folder.file("in.pcap"), folder.file("out.pcap"));
    let sent = write_capture(&input, 3000);
    let ports = [format!("pcap:{}", input.display()), format!("pcap:-,{}", output.display())];
    let flags = ["--forward=mac", "--eth-peer=1,02:00:00:00:00:09", "--until-idle", "--format=json"];
    let done = switch(&["--port", &ports[0], "--port", &ports[1]]).args(flags).output().unwrap();
    let reports = reports(&done);
    let last = reports.last().unwrap();
    assert_eq!(queue(last, "port1", "tx")["packets"], 3000);
    let mac: MacAddr = last["ports"][1]["mac"].as_str().unwrap().parse().unwrap();
    let received = read_capture(&output);
    assert_eq!(received.len(), sent.len());
    for (received, sent) in received.iter().zip(&sent) {
        assert_eq!(received[..6], [2, 0, 0, 0, 0, 9]);
        assert_eq!(received[6..12], mac.0);
        assert_eq!(received[12..], sent[12..]);
    }
}

/// Starts a switch that sends endlessly, and waits until it runs.
fn running(format: &str) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = switch(&["--port=gen:rate=10000", "--stats-interval=0.1", format])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    stdout.read_line(&mut first).unwrap();
    assert!(!first.is_empty(), "it ended at once: {:?}", child.wait_with_output());
    (child, stdout)
}

#[test]
fn signals_end_with_final_report() {
    for (signal, format, expected) in [
        (Signal::INT, "--format=json", "\"stopped_by\":\"signal\""),
        (Signal::TERM, "--format=json", "\"stopped_by\":\"signal\""),
        (Signal::HUP, "--format=json", "\"stopped_by\":\"signal\""),
        (Signal::QUIT, "--format=json", "\"stopped_by\":\"signal\""),
        (Signal::USR1, "--format=json", "\"stopped_by\":\"signal\""),
        (Signal::USR2, "--format=json", "\"stopped_by\":\"signal\""),
        (Signal::ALARM, "--format=json", "\"stopped_by\":\"signal\""),
        (Signal::INT, "--format=table", "s in all"),
    ] {
        let _turn = turn();
        let (mut child, mut stdout) = running(format);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{signal:?}");
        assert!(rest.contains(expected), "{signal:?}: {rest}");
    }
}

#[test]
fn closed_stdout_ends_the_switch() {
    let _turn = turn();
    let (child, stdout) = running("--format=json");
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).contains("panicked")), (Some(0), false));
}

#[test]
fn shared_lcore_is_a_warning() {
    let _turn = turn();
    let folder = Folder::new("shared");
    let port = format!("vhost:{}", folder.file("vm1.sock").display());
    let first = offcore_stats::lcore::available().unwrap()[0];
    let (dma, lcores) = (format!("--dma=txq0@core:{first}"), format!("--lcores={first}"));
    let output = switch(&["--port", &port, &dma, &lcores, "--duration=0.1"]).output().unwrap();
    assert!(output.status.success());
    let warning = format!("warning: lcore {first} is shared");
    assert!(stderr(&output).contains(&warning), "{}", stderr(&output));
}

/// Sends packets from a generator through a vhost port to another switch's virtio-user port and back.
fn through_a_front_end(name: &str, dma: &[&str]) -> Value {
    let _turn = turn();
    let folder = Folder::new(name);
    let socket = folder.file("vm1.sock");
    let lcores = offcore_stats::lcore::available().unwrap();
    let (ours, theirs) = (lcores[0], *lcores.last().unwrap());
    let port = format!("virtio-user:{}", socket.display());
    let front_end = switch(&["--port", &port, "--port-topology=loop", "--format=json"])
        .args(["--stats-interval=0", &format!("--lcores={theirs}")])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let port = format!("vhost:{}", socket.display());
    let output = switch(&["--port=gen:size=512,count=30000,rate=20000", "--port", &port])
        .args(["--until-idle", "--format=json", &format!("--lcores={ours}")])
        .args(dma)
        .output()
        .unwrap();
    kill_process(Pid::from_child(&front_end), Signal::TERM).unwrap();
    let front_end = front_end.wait_with_output().unwrap();
    assert_eq!(reports(&front_end).last().unwrap()["stopped_by"], "signal");
    assert!(stderr(&front_end).contains("connected"), "{}", stderr(&front_end));
    assert!(stderr(&output).contains(": connected, 2 of 2 virtqueues"), "{}", stderr(&output));
    reports(&output).pop().unwrap()
}

/// Asserts that all packets that were not dropped came back unchanged. Which packets are dropped for lack of room
/// depends on the scheduler.
fn assert_returned_intact(last: &Value) {
    assert_eq!(last["stopped_by"], "idle");
    assert_eq!(last["unfinished"], 0);
    let generator = &last["ports"][0]["generator"];
    let received = generator["received"].as_u64().unwrap();
    assert_eq!(generator["sent"], 30_000);
    assert!(received > 0, "{last}");
    assert_eq!(generator["verified"], received);
    for wrong in ["reordered", "duplicates", "corrupt", "foreign"] {
        assert_eq!(generator[wrong], 0, "{wrong}: {last}");
    }
    assert_eq!(queue(last, "port1", "rx")["packets"], received);
}

#[test]
fn packets_come_back_from_a_front_end() {
    let last = through_a_front_end("front-end", &[]);
    assert_returned_intact(&last);
    assert_eq!(last["channels"].as_array().unwrap().len(), 0);
}

#[test]
fn helper_core_copies_packets_whole() {
    let helper = *offcore_stats::lcore::available().unwrap().last().unwrap();
    let dma = format!("--dma=txq0@core:{helper};rxq0@core:{helper}");
    let last = through_a_front_end("helper", &[&dma]);
    assert_returned_intact(&last);
    let channel = &last["channels"][0];
    assert_eq!(channel["channel"], format!("core:{helper}"));
    assert!(channel["submitted"].as_u64().unwrap() > 0, "{last}");
    assert_eq!(channel["in_flight"], 0);
}

#[test]
fn demo_checks_packets_and_explains() {
    let _turn = turn();
    let output = offcore(&["switch", "--demo", "--quick", "--format=json"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let lines: Vec<Value> =
        output.stdout.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    let (summary, sizes) = lines.split_last().unwrap();
    let frames: Vec<_> = sizes.iter().map(|size| size["frame"].as_u64().unwrap()).collect();
    assert_eq!(frames, [64, 128, 256, 512, 1024, 1280, 1518]);
    for size in sizes {
        assert!(size["verified"].as_u64().unwrap() > 0 && size["lost"] == 0, "{size}");
        assert!(size["cpu_cycles"].as_f64().unwrap() > 0.0 && size["offload_cycles"].as_f64().unwrap() > 0.0);
    }
    assert!(summary["meaning"].as_str().unwrap().starts_with("Offloading "), "{summary}");
}

#[test]
fn tcp_demo_checks_segments_and_explains() {
    let _turn = turn();
    let output = offcore(&["tcp", "--demo", "--quick", "--format=json"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let lines: Vec<Value> =
        output.stdout.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    let (summary, rows) = lines.split_last().unwrap();
    assert_eq!(rows.iter().filter(|row| row["side"] == "send").count(), 4);
    assert_eq!(rows.iter().filter(|row| row["side"] == "receive").count(), 4);
    for row in rows {
        assert!(row["verified"].as_u64().unwrap() > 0, "{row}");
        assert!(row["cpu_ns"].as_f64().unwrap() > 0.0 && row["offload_ns"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert!(summary["meaning"].as_str().unwrap().contains("not throughput"), "{summary}");
}
