//! `offcore gpu` with threads that emulate a GPU, between veth pairs: every frame is sent once and in order, with
//! swapped addresses unless the workload is `none`, for any workload and burst size.

mod check;
mod refused;
mod traffic;
mod works;

use std::time::{Duration, Instant};

use peers::offcore::Signal;
use peers::{Need, Offcore, TempDir, Wire, exclusive, one_core};
use serde_json::Value;

use crate::copy::{read_capture, write_capture};
use crate::switch::{self, Report, full, wait_for_status};
use traffic::{Network, Stream, exchange, receive};

const NEEDS: &[Need] = &[Need::Root, Need::Ip, Need::Cores(2), Need::HostDevice];
const WORKLOADS: [&str; 5] = ["none", "cpu", "kernel", "persistent", "graph"];
/// The device workloads.
const LAUNCHES: [&str; 3] = ["kernel", "persistent", "graph"];
const BURSTS: [u32; 4] = [1, 7, 257, 1024];

/// Returns the flags of a device workload, with a long timeout for busy machines.
fn device(how: &str) -> impl Iterator<Item = &str> {
    let by_device = LAUNCHES.iter().any(|launch| how.contains(launch));
    let flags = if by_device { "--device host --timeout 10000" } else { "" };
    flags.split_whitespace()
}

/// Starts `offcore gpu` in the namespace and waits until its ports can send.
fn start(network: &Network, ports: &[&str], how: &str) -> Offcore {
    let mut args = vec!["gpu"];
    args.extend(ports.iter().flat_map(|port| ["--port", port]));
    args.extend(
        "--mbufs 16384 --stats-interval 0.1 --format json --lcores".split(' ').chain([&*network.lcores]),
    );
    args.extend(device(how).chain(how.split_whitespace()));
    let mut offcore = Offcore::start_in(&network.here, &args).unwrap();
    (0..ports.len()).for_each(|port| wait_for_status(&mut offcore, port, "is up"));
    offcore
}

/// Two ports that forward to each other, with room for all frames in flight.
const PAIRED: [&str; 2] = ["af_packet:p0,slots=4096", "af_packet:p1,slots=4096"];
const PAIR: &str = "--port-topology paired";

/// Returns streams between two wires in both directions. Without a workload, addresses are not swapped.
fn both_ways(how: &str) -> [Stream; 2] {
    [(0, 0, 1), (1, 1, 0)]
        .map(|(number, from, to)| Stream::new(number, from, to).that_swaps(!how.contains("-w none")))
}

/// Stops `offcore gpu` and checks that there was no error, that the packet counts of each port match the streams, and
/// that no frames are left on the wires.
fn stop(offcore: Offcore, wires: &mut [Wire], streams: &mut [Stream], ports: usize) -> Report {
    let report = switch::stop(offcore);
    report.assert_only_drops(&[]);
    for work in report.0["work"].as_array().unwrap() {
        assert_eq!((&work["failed"], &work["quarantined"]), (&false.into(), &0.into()), "{report}");
    }
    let all: u64 = streams.iter().map(|stream| u64::from(stream.received)).sum();
    for half in ["rx", "tx"] {
        let counted: u64 = (0..ports).map(|port| report.packets(port, half)).sum();
        assert_eq!(counted, all, "{half}: {report}");
    }
    assert_eq!(receive(wires, streams), 0, "more frames came than were sent");
    report
}

/// Returns a counter, summed over all pipelines.
fn work(report: &Report, name: &str) -> u64 {
    let pipelines = report.0["work"].as_array().unwrap_or_else(|| panic!("no work in {report}"));
    pipelines.iter().map(|work: &Value| work[name].as_u64().unwrap()).sum()
}

/// Returns a number of frames in flight that fills bursts.
fn window(burst: u32) -> u32 {
    (burst * 3 / 2).max(48)
}

/// Returns the number of frames of each stream.
fn packets() -> u32 {
    if full() { 50_000 } else { 1500 }
}

/// The burst timeout in microseconds.
const BURST_TIMEOUT: u64 = 20_000;

/// Frames go in both directions between two ports. Full bursts are sent first, the rest after the burst timeout.
fn frames_go_through(network: &Network, ports: [&str; 2], burst: u32, how: &str) {
    let mut wires = network.wires();
    let how = format!("{PAIR} -b {burst} --burst-timeout {BURST_TIMEOUT} {how}");
    let since = Instant::now();
    let offcore = start(network, &ports, &how);
    let mut streams = both_ways(&how);
    exchange(&mut wires, &mut streams, packets(), window(burst), &offcore);
    let report = stop(offcore, &mut wires, &mut streams, 2);
    let (all, bursts) = (2 * u64::from(packets()), work(&report, "bursts"));
    // Partial bursts have waited, except for the last burst of each pipeline.
    let waits = since.elapsed().as_micros() as u64 / BURST_TIMEOUT + 1;
    let most = all / u64::from(burst) + 2 * waits;
    assert!(bursts >= all.div_ceil(burst.into()) && bursts <= most, "{how}: {bursts} bursts: {report}");
}

/// Forty runs with some thousand frames each.
#[test]
fn every_workload_swaps_every_frame() {
    let Some(core) = one_core(NEEDS) else { return };
    let network = Network::new(core.number(), 2, 1);
    for split in ["", "--split"] {
        for workload in WORKLOADS {
            for burst in BURSTS {
                frames_go_through(&network, PAIRED, burst, &format!("-w {workload} {split}"));
            }
        }
    }
}

#[test]
fn frames_cross_two_lcores_swapped() {
    let Some(_cores) = exclusive(NEEDS) else { return };
    let network = Network::new("0,1", 2, 1);
    for workload in WORKLOADS {
        for split in ["", "--split"] {
            frames_go_through(&network, PAIRED, 64, &format!("-w {workload} {split}"));
        }
    }
}

#[test]
fn frames_cross_af_xdp_ports_swapped() {
    let Some(_cores) = exclusive(NEEDS) else { return };
    let network = Network::new("0,1", 2, 1);
    for workload in WORKLOADS {
        frames_go_through(&network, ["af_xdp:p0", "af_xdp:p1"], 64, &format!("-w {workload}"));
    }
}

#[test]
fn memory_gpu_returns_every_packet() {
    let Some(_cores) = exclusive(NEEDS) else { return };
    let network = Network::new("0,1", 2, 1);
    for workload in LAUNCHES {
        for split in ["", "--split-at 128"] {
            frames_go_through(&network, PAIRED, 64, &format!("-w {workload} -m gpu {split}"));
        }
    }
}

/// Flows are spread over the queues, and each flow keeps its order.
#[test]
fn two_pipelines_take_two_queues() {
    let Some(_cores) = exclusive(NEEDS) else { return };
    let network = Network::new("0,1", 1, 2);
    for workload in ["cpu", "kernel", "persistent", "graph"] {
        let mut wires = network.wires();
        let how = format!("-p 2 -w {workload} -b 32 --burst-timeout 5000");
        let offcore = start(&network, &["af_packet:p0,fanout=hash"], &how);
        let mut streams = [Stream::new(0, 0, 0).of_flows(32)];
        exchange(&mut wires, &mut streams, 2 * packets(), 48, &offcore);
        let report = stop(offcore, &mut wires, &mut streams, 1);
        let pipelines = report.0["work"].as_array().unwrap();
        assert_eq!(pipelines.len(), 2, "{report}");
        assert!(pipelines.iter().all(|work| work["bursts"].as_u64() > Some(0)), "{workload}: {report}");
    }
}

/// Everything that was received is sent after a stop.
#[test]
fn stop_loses_no_accepted_packet() {
    let Some(core) = one_core(NEEDS) else { return };
    let network = Network::new(core.number(), 2, 1);
    for workload in WORKLOADS {
        for split in ["", "--split"] {
            let mut wires = network.wires();
            // Without a stop, the last packets would wait a second for their burst to fill.
            let how = format!("{PAIR} -w {workload} {split} -b 257 --burst-timeout 1000000");
            let mut offcore = start(&network, &PAIRED, &how);
            let mut streams = both_ways(&how);
            exchange_until(&mut wires, &mut streams, 600);
            offcore.signal(Signal::TERM).unwrap();
            // Frames arrive during the stop.
            streams.iter_mut().for_each(|stream| stream.send(&wires, 50, 2000));
            let finished = offcore.wait().unwrap();
            let report = Report::last_of(&finished);
            assert_eq!(report.0["stopped_by"], "signal", "{report}");
            report.assert_only_drops(&[]);
            receive(&mut wires, &mut streams);
            for (port, stream) in streams.iter().enumerate() {
                let accepted = report.packets(port, "rx");
                let came_out = u64::from(stream.received);
                assert_eq!((came_out, report.packets(1 - port, "tx")), (accepted, accepted), "{report}");
                assert!(accepted > 0 && accepted <= stream.sent.into(), "{how}: {report}");
            }
        }
    }
}

/// Sends frames of each stream, and receives until the first burst has arrived.
fn exchange_until(wires: &mut [Wire], streams: &mut [Stream], packets: u32) {
    let since = Instant::now();
    while streams.iter().any(|stream| stream.sent < packets || stream.received == 0) {
        for stream in streams.iter_mut() {
            let rest = packets - stream.sent;
            stream.send(wires, rest.min(16), packets);
        }
        receive(wires, streams);
        assert!(since.elapsed() < Duration::from_secs(10), "no first burst for 10 s");
    }
}

/// Measures the packets after the warm-up, then stops.
#[test]
fn run_ends_after_its_measured_packets() {
    let Some(core) = one_core(NEEDS) else { return };
    let network = Network::new(core.number(), 1, 1);
    let mut wires = network.wires();
    let mut offcore = start(&network, &["af_packet:p0"], "-w kernel -b 32 -z 1000 -v 2000");
    let mut streams = [Stream::new(0, 0, 0)];
    let since = Instant::now();
    let mut moved = since;
    while !offcore.has_ended() {
        streams[0].send(&wires, 16, 64);
        if receive(&mut wires, &mut streams) > 0 {
            moved = Instant::now();
        }
        assert!(streams[0].sent < 1_000_000, "it did not stop: {}", offcore.tail());
        assert!(moved.elapsed() < Duration::from_secs(10), "{}", offcore.tail());
    }
    let finished = offcore.wait().unwrap();
    let report = Report::last_of(&finished);
    assert_eq!(report.0["stopped_by"], "packets", "{report}");
    report.assert_only_drops(&[]);
    receive(&mut wires, &mut streams);
    let accepted = report.packets(0, "rx");
    assert_eq!((u64::from(streams[0].received), report.packets(0, "tx")), (accepted, accepted), "{report}");
    let measured = &report.0["measured"];
    let [packets, bytes] = ["packets", "bytes"].map(|name| measured[name].as_u64().unwrap());
    let [seconds, mpps, gbps] = ["seconds", "mpps", "gbps_l1"].map(|name| measured[name].as_f64());
    let seconds = seconds.unwrap();
    assert!(packets >= 2000 && packets <= accepted - 1000, "{report}");
    assert!(bytes >= 60 * packets && bytes <= report.bytes(0, "rx"), "{report}");
    assert!(seconds > 0.0 && seconds < since.elapsed().as_secs_f64(), "{report}");
    // The length includes FCS, preamble and gap. A rate over less than 0.1 s is not meaningful.
    let bits = (bytes + 24 * packets) as f64 * 8.0;
    for (found, what) in [(mpps, packets as f64 / 1e6), (gbps, bits / 1e9)] {
        let expected = (seconds >= 0.1).then_some(what / seconds);
        let same = found.zip(expected).map(|(found, expected)| (found - expected).abs() < 1e-6 * expected);
        assert!(found.is_some() == expected.is_some() && same != Some(false), "{report}");
    }
}

/// Without a warm-up, all packets and the whole time count.
#[test]
fn short_capture_is_measured_whole() {
    let _cores = exclusive(&[]);
    let dir = TempDir::new().unwrap();
    let [from, to] = ["in", "out"].map(|name| dir.file(name));
    let frames = vec![vec![2; 100]; 500];
    write_capture(&from, &frames);
    let port = format!("pcap:{},{}", from.display(), to.display());
    let args = ["gpu", "--port", &port, "-v", "500", "--lcores", "0", "--format", "json"];
    let finished = Offcore::run(&args).unwrap();
    let report = Report::last_of(&finished);
    let measured = &report.0["measured"];
    assert_eq!((&measured["packets"], &measured["bytes"]), (&500.into(), &50_000.into()), "{report}");
    assert_eq!(read_capture(&to), frames);
}

/// The text has the exact time, not whole seconds.
#[test]
fn measurement_text_has_exact_time() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let args = "gpu --port gen:size=64,rate=100000 -z 1000 -v 20000 --lcores 0 --stats-interval 0";
    let finished = Offcore::run(&args.split(' ').collect::<Vec<_>>()).unwrap();
    assert_eq!(finished.status.code(), Some(0), "{finished:?}");
    let line = finished.lines.iter().find_map(|line| line.text.trim().strip_prefix("measured: "));
    let words: Vec<&str> = line.unwrap_or_else(|| panic!("{finished:?}")).split(' ').collect();
    let [
        packets,
        "packets",
        "received",
        "in",
        seconds,
        "s:",
        rate,
        "k",
        "packets/s,",
        _,
        "M",
        "bit/s",
        "(L1)",
    ] = words[..]
    else {
        panic!("{words:?}")
    };
    let (packets, seconds): (u64, f64) = (packets.parse().unwrap(), seconds.parse().unwrap());
    let (_, decimals) = words[4].split_once('.').unwrap();
    assert!(packets >= 20_000 && seconds > 0.0 && decimals.len() >= 3, "{words:?}");
    let expected = packets as f64 / seconds / 1e3;
    assert!((rate.parse::<f64>().unwrap() - expected).abs() < 0.1, "{words:?}");
}
