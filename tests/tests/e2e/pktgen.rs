//! `offcore pktgen` against the kernel's bridge, against a switch that returns packets, and against tcpdump.

use std::time::Duration;

use peers::offcore::Finished;
use peers::{Need, Netns, Offcore, TempDir, exclusive};
use serde_json::Value;

use crate::copy::read_capture;
use crate::switch::{Report, quiet, tcpdump};

/// Starts `offcore pktgen` on lcore 1 with JSON reports.
fn pktgen(netns: Option<&Netns>, args: &[&str]) -> Offcore {
    let fixed = ["pktgen", "--lcores", "1", "--format", "json", "--stats-interval", "0.1"];
    let args = [&fixed[..], args].concat();
    match netns {
        Some(netns) => Offcore::start_in(netns, &args).unwrap(),
        None => Offcore::start(&args).unwrap(),
    }
}

/// Returns the last report of a successful run.
fn last(finished: &Finished) -> Value {
    Report::last_of(finished).0
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no {name} in {report}"))
}

/// Waits until `at_least` packets were sent.
fn wait_for_sent(pktgen: &mut Offcore, at_least: u64) -> Value {
    let line = pktgen.wait_for_count("sent packets", at_least, |report| report["sent"].as_u64());
    line.unwrap().json.unwrap()
}

/// Addresses of other stations, so that the bridge forwards the packets.
const ELSEWHERE: [&str; 4] = ["--src-mac", "02:00:00:00:aa:01", "--dst-mac", "02:00:00:00:aa:02"];

/// Adds pktgen's two TAP interfaces to the kernel's bridge, once they exist.
fn bridged(netns: &Netns, pktgen: &mut Offcore) {
    pktgen.wait_for("its ports", |line| line.json.is_some()).unwrap();
    netns.ip(&["link", "add", "name", "bridge0", "type", "bridge"]).unwrap();
    for interface in ["one", "two"] {
        netns.ip(&["link", "set", interface, "master", "bridge0"]).unwrap();
        netns.ip(&["link", "set", interface, "txqueuelen", "10000", "up"]).unwrap();
    }
    netns.ip(&["link", "set", "bridge0", "up"]).unwrap();
}

fn quiet_netns() -> Netns {
    let netns = Netns::new().unwrap();
    quiet(&netns);
    netns
}

/// Asserts that the counters of the ports and of the kernel's interfaces agree, and that the kernel has dropped all
/// lost packets.
fn assert_counts_agree(report: &Value) {
    let mut dropped = 0;
    for interface in report["interfaces"].as_array().unwrap() {
        assert_eq!(
            (&interface["sent_difference"], &interface["received_difference"]),
            (&0.into(), &0.into()),
            "{report}"
        );
        dropped += number(interface, "interface_dropped");
    }
    assert_eq!(report["interfaces"].as_array().unwrap().len(), 2);
    let [sent, received, lost] = ["sent", "received", "lost"].map(|name| number(report, name));
    assert_eq!(sent, received + lost, "{report}");
    assert!(lost <= dropped, "{report}");
    for wrong in ["reordered", "duplicates", "corrupt", "malformed", "tx_dropped"] {
        assert_eq!(number(report, wrong), 0, "{report}");
    }
}

#[test]
fn commands_change_bridged_traffic() {
    let Some(_cores) = exclusive(&[Need::Root, Need::Ip, Need::Tun, Need::Cores(2)]) else { return };
    let netns = quiet_netns();
    let ports = ["--port", "tap:one", "--port", "tap:two", "--bidirectional", "--no-start"];
    let mut pktgen = pktgen(Some(&netns), &[&ports[..], &ELSEWHERE].concat());
    bridged(&netns, &mut pktgen);
    for line in ["set rate 4k", "set size 128", "set flows 5", "start"] {
        pktgen.command(line).unwrap();
    }
    let first = wait_for_sent(&mut pktgen, 2000);
    assert_eq!(
        (&first["rate"], &first["size"], &first["flows"]),
        (&"4kpps".into(), &"128".into(), &5.into())
    );
    assert_eq!(number(&first, "sent_bytes"), number(&first, "sent") * 128);
    for line in ["set rate 10k", "set size imix", "set burst 8", "nonsense", "stats"] {
        pktgen.command(line).unwrap();
    }
    let second = pktgen.wait_for("stats", |line| line.json.as_ref().is_some_and(|j| j["report"] == "stats"));
    let second = second.unwrap().json.unwrap();
    assert_eq!(
        (&second["rate"], &second["size"], &second["burst"]),
        (&"10kpps".into(), &"imix".into(), &8.into())
    );
    wait_for_sent(&mut pktgen, number(&second, "sent") + 5000);
    pktgen.command("stop").unwrap();
    pktgen.wait_for("a stop", |line| line.json.as_ref().is_some_and(|j| j["running"] == false)).unwrap();
    pktgen.command("quit").unwrap();
    let finished = pktgen.wait().unwrap();
    let report = last(&finished);
    assert!(finished.stderr.contains("'nonsense' is no command"), "{}", finished.stderr);
    assert_eq!(report["stopped_by"], "command");
    assert_counts_agree(&report);
    assert_eq!(number(&report, "verified"), number(&report, "received"), "{report}");
    assert!(
        report["p50_ns"].as_f64() <= report["max_ns"].as_f64() && report["p50_ns"].is_number(),
        "{report}"
    );
    for direction in report["directions"].as_array().unwrap() {
        assert!(number(direction, "received") > 1000, "{report}");
    }
}

#[test]
fn long_packets_cross_the_bridge() {
    let Some(_cores) = exclusive(&[Need::Root, Need::Ip, Need::Tun, Need::Cores(2)]) else { return };
    let netns = quiet_netns();
    let flags =
        ["--size", "9018", "--proto", "tcp", "--dst-ip", "2001:db8::1", "--rate", "2k", "--count", "1000"];
    let ports = ["--port", "tap:one", "--port", "tap:two", "--no-start"];
    let mut pktgen = pktgen(Some(&netns), &[&ports[..], &flags, &ELSEWHERE].concat());
    bridged(&netns, &mut pktgen);
    for interface in ["one", "two", "bridge0"] {
        netns.ip(&["link", "set", interface, "mtu", "9000"]).unwrap();
    }
    pktgen.command("start").unwrap();
    wait_for_sent(&mut pktgen, 1000);
    pktgen.command("quit").unwrap();
    let report = last(&pktgen.wait().unwrap());
    assert_counts_agree(&report);
    assert_eq!((number(&report, "sent"), number(&report, "sent_bytes")), (1000, 9_018_000), "{report}");
    assert!(number(&report, "verified") > 0, "{report}");
}

/// Starts a switch that returns every packet after `work_ns` nanoseconds of work.
fn mirror(socket: &str, work_ns: &str) -> Offcore {
    let port = format!("vhost:{socket}");
    let args =
        ["switch", "--port", &port, "--port-topology", "loop", "--forward", "macswap", "--lcores", "0"];
    let more = ["--format", "json", "--stats-interval", "0.2", "--work-ns", work_ns];
    let mut switch = Offcore::start(&[&args[..], &more].concat()).unwrap();
    switch.wait_for("the switch", |line| line.json.is_some()).unwrap();
    switch
}

#[test]
fn returned_packets_are_checked() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    let socket = dir.file("s").display().to_string();
    let switch = mirror(&socket, "1");
    let port = format!("virtio-user:{socket},queue_size=1024");
    let flags =
        ["--rate", "20k", "--count", "20000", "--size", "64-1518", "--flows", "64", "--no-interactive"];
    let report = last(&pktgen(None, &[&["--port", port.as_str()][..], &flags].concat()).wait().unwrap());
    let [sent, received, lost] = ["sent", "received", "lost"].map(|name| number(&report, name));
    assert_eq!((sent, sent), (20_000, received + lost), "{report}");
    assert_eq!(number(&report, "verified"), received);
    for wrong in ["reordered", "duplicates", "corrupt", "malformed", "foreign"] {
        assert_eq!(number(&report, wrong), 0, "{report}");
    }
    assert_eq!(report["stopped_by"], "count");
    // The switch has dropped the missing packets for lack of room.
    let counted = Report::last_of(&switch.stop().unwrap());
    assert_eq!((counted.packets(0, "rx"), counted.packets(0, "tx")), (sent, received), "{counted}");
}

#[test]
fn search_finds_a_slow_switchs_rate() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    let socket = dir.file("s").display().to_string();
    let plot = dir.file("throughput.svg").display().to_string();
    // This limits the switch to 5000 packets per second.
    let switch = mirror(&socket, "200000");
    let port = format!("virtio-user:{socket}");
    let flags = ["--rfc2544", "--rate", "20k", "--duration", "0.3", "--wait", "0.2", "--resolution", "10"];
    let more = ["--frame", "64,512", "--loss", "0,1", "--plot", &plot];
    let finished = pktgen(None, &[&["--port", port.as_str()][..], &flags, &more].concat()).wait().unwrap();
    assert_eq!(finished.status.code(), Some(0), "{}\n{}", finished.stdout, finished.stderr);
    let rows: Vec<_> = finished.lines.iter().filter_map(|line| line.json.as_ref()).collect();
    let (end, rows) = rows.split_last().unwrap();
    let (rows, trials): (Vec<&Value>, Vec<&Value>) =
        rows.iter().copied().partition(|row| row["report"] == "throughput");
    assert!(trials.len() >= 4 && trials.iter().all(|trial| trial["report"] == "trial"), "{trials:?}");
    assert_eq!((&end["report"], &end["unfinished"]), (&"final".into(), &0.into()));
    let named: Vec<_> = rows.iter().map(|row| (row["frame"].as_u64(), row["loss"].as_f64())).collect();
    let expected = [(64, 0.0), (64, 1.0), (512, 0.0), (512, 1.0)];
    assert_eq!(named, expected.map(|(frame, loss)| (Some(frame), Some(loss))));
    for row in rows {
        // The rings absorb some packets above the limit.
        let found = row["mpps"].as_f64().unwrap_or(0.0);
        assert!(found <= 0.007, "{row}");
        assert_ne!(row["limited_by"], "max_rate", "{row}");
    }
    assert!(std::fs::read_to_string(plot).unwrap().contains("<svg"));
    switch.stop().unwrap();
}

/// Without mergeable buffers long frames do not return, so the third search fails. Earlier rows and the plot remain.
#[test]
fn failed_search_keeps_its_rows() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    let socket = dir.file("s").display().to_string();
    let plot = dir.file("throughput.svg").display().to_string();
    let switch = mirror(&socket, "1");
    let port = format!("virtio-user:{socket},mrg=off");
    let flags = ["--rfc2544", "--rate", "1k", "--duration", "0.2", "--wait", "0.2", "--resolution", "50"];
    let more = ["--frame", "64,512,4000", "--plot", &plot];
    let finished = pktgen(None, &[&["--port", port.as_str()][..], &flags, &more].concat()).wait().unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}\n{}", finished.stdout, finished.stderr);
    assert!(finished.stderr.contains("came back"), "{}", finished.stderr);
    let rows: Vec<_> = finished.lines.iter().filter_map(|line| line.json.as_ref()).collect();
    let frames: Vec<_> =
        rows.iter().filter(|row| row["report"] == "throughput").map(|row| row["frame"].as_u64()).collect();
    assert_eq!(frames, [Some(64), Some(512)]);
    assert_eq!(rows.last().unwrap()["report"], "final");
    assert!(std::fs::read_to_string(&plot).unwrap().contains("<svg"));

    // The run is interrupted during the second frame size.
    std::fs::remove_file(&plot).unwrap();
    let flags = ["--rfc2544", "--rate", "1k", "--duration", "3", "--wait", "0.2", "--resolution", "50"];
    let more = ["--frame", "64,512", "--plot", &plot];
    let mut pktgen = pktgen(None, &[&["--port", port.as_str()][..], &flags, &more].concat());
    let is_row = |row: &Value| row["report"] == "throughput";
    pktgen.wait_for("a row", |line| line.json.as_ref().is_some_and(is_row)).unwrap();
    pktgen.signal(rustix::process::Signal::INT).unwrap();
    let finished = pktgen.wait().unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}\n{}", finished.stdout, finished.stderr);
    let rows: Vec<_> = finished.lines.iter().filter_map(|line| line.json.as_ref()).collect();
    assert_eq!(
        (rows.iter().filter(|row| is_row(row)).count(), &rows.last().unwrap()["report"]),
        (1, &"final".into())
    );
    assert!(std::fs::read_to_string(&plot).unwrap().contains("<svg"));
    switch.stop().unwrap();
}

#[test]
fn a_capture_is_sent_byte_for_byte() {
    let Some(_cores) = exclusive(&[Need::Root, Need::Ip, Need::Tun, Need::Tcpdump, Need::Cores(2)]) else {
        return;
    };
    let dir = TempDir::new().unwrap();
    let (sent, seen) = (dir.file("sent.pcap"), dir.file("seen.pcap"));
    let output = format!("pcap:-,{}", sent.display());
    let made = ["switch", "--port", "gen:size=300,count=500,flows=7", "--port", &output, "--until-idle"];
    assert_eq!(Offcore::run(&made).unwrap().status.code(), Some(0));
    let netns = quiet_netns();
    let path = sent.display().to_string();
    let mut pktgen = pktgen(
        Some(&netns),
        &["--port", "tap:one", "--pcap", &path, "--rate", "5k", "--loop", "--count", "700", "--no-start"],
    );
    pktgen.wait_for("its port", |line| line.json.is_some()).unwrap();
    netns.ip(&["link", "set", "one", "up"]).unwrap();
    let mut tcpdump = tcpdump(&netns, "one", &seen, &["-c", "700"]);
    pktgen.command("start").unwrap();
    wait_for_sent(&mut pktgen, 700);
    // The packets captured so far are checked below.
    let _ = tcpdump.wait_for_exit(Duration::from_secs(10));
    drop(tcpdump);
    pktgen.command("quit").unwrap();
    let report = last(&pktgen.wait().unwrap());
    assert_eq!(number(&report, "sent"), 700, "{report}");
    let (sent, seen) = (read_capture(&sent), read_capture(&seen));
    assert_eq!((sent.len(), seen.len()), (500, 700));
    assert!(sent.iter().cycle().zip(&seen).all(|(sent, seen)| sent == seen));
}

#[test]
fn bad_commands_are_refused_by_name() {
    let dir = TempDir::new().unwrap();
    let bad = dir.file("bad.pcap");
    std::fs::write(&bad, [0xd4, 0xc3, 0xb2, 0xa1, 2, 0]).unwrap();
    let bad = bad.display().to_string();
    for (args, code, says) in [
        (&["--port", "gen:"][..], 2, "generates packets itself"),
        (&["--port", "pcap:-,/dev/null", "--size", "64", "--proto", "tcp"], 2, "take 76 bytes"),
        (&["--port", "pcap:-,/dev/null", "--rate", "50%"], 2, "--link"),
        (&["--port", "pcap:-,/dev/null", "--pcap", &bad], 1, "ends within its header"),
        (&["--port", "pcap:-,/dev/null", "--pcap", "/nonexistent.pcap"], 1, "/nonexistent.pcap"),
        (
            &["--port", "pcap:-,/dev/null", "--rfc2544", "--frame", "64", "--rate", "1k", "--wait", "0.1"],
            1,
            "came back",
        ),
    ] {
        let finished = Offcore::run(&[&["pktgen"][..], args].concat()).unwrap();
        assert_eq!(finished.status.code(), Some(code), "{args:?}: {}", finished.stderr);
        assert!(finished.stderr.contains(says), "{args:?}: {}", finished.stderr);
    }
}
