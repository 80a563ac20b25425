//! `offcore copy` end to end: every packet arrives once, in order and unchanged, with any engine and after any engine
//! failure. Captured frames keep every byte except the addresses.

use std::path::Path;

use peers::{Need, Offcore, TempDir, exclusive};
use serde_json::Value;

use crate::switch::{Generated, Report, full};

/// Number of packets in a long run: one million, or ten million in a full test run.
fn many() -> u64 {
    if full() { 10_000_000 } else { 1_000_000 }
}

/// Number of packets in each of several cases.
fn few() -> u64 {
    many() / 10
}

/// Copies packets until all ports are idle. Returns the last report.
fn copy(args: &[String]) -> Report {
    let mut all = vec!["copy", "--until-idle", "--format", "json", "--stats-interval", "0.5"];
    all.extend(args.iter().map(String::as_str));
    let finished = Offcore::run(&all).unwrap();
    Report::last_of(&finished)
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(String::from).collect()
}

/// Returns one generator for each packet size. Each sends `packets` packets and receives them again.
fn generators(sizes: &[usize], packets: u64) -> Vec<String> {
    sizes.iter().flat_map(|size| ["--port".into(), format!("gen:size={size},count={packets}")]).collect()
}

fn sum(report: &Report, list: &str, name: &str) -> u64 {
    let entries = report.0[list].as_array().unwrap();
    entries.iter().map(|entry: &Value| entry[name].as_u64().unwrap()).sum()
}

/// Copies `packets` packets of each size and checks that all of them return.
fn assert_all_return(sizes: &[usize], packets: u64, how: &str) -> Report {
    let mut args = generators(sizes, packets);
    args.extend(words(how));
    let report = copy(&args);
    report.assert_only_drops(&[]);
    for port in 0..sizes.len() {
        let all = Generated {
            sent: packets,
            received: packets,
            verified: packets,
            lost: 0,
            duplicates: 0,
            wrong: 0,
        };
        assert_eq!(report.generator(port), all, "{how}: {report}");
    }
    let all = packets * sizes.len() as u64;
    assert_eq!(sum(&report, "copies", "packets"), all, "{how}: {report}");
    let by_engine = if report.0["channels"].is_null() { 0 } else { sum(&report, "channels", "submitted") };
    assert!(by_engine + sum(&report, "workers", "core_copies") >= all, "{how}: {report}");
    report
}

const SIZES: [usize; 3] = [64, 590, 1518];

#[test]
fn packets_copied_by_the_core_come_back() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let report = assert_all_return(&SIZES, few(), "--lcores 0");
    assert_eq!(sum(&report, "workers", "core_copies"), 3 * few(), "{report}");
}

/// Frames are in one buffer of 16 KiB, or in several buffers of 2 KiB. The pool has fewer of these than the copies in
/// flight need.
#[test]
fn jumbo_frames_come_back() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let sizes = [9018, 64, 4000];
    for how in ["", "--dma rxq0@core:1", "--mbuf-size 16384 --dma rxq0@core:1"] {
        assert_all_return(&sizes, few() / 20, &format!("--mbufs 4096 --lcores 0 {how}"));
    }
    assert_all_return(&sizes, few() / 20, "--mbufs 4096 --lcores 0,1 -s 256 --dma rxq0@core:1");
}

#[test]
fn packets_copied_by_a_helper_come_back() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    for how in ["", "--mode auto", "-b 4 -s 64", "--min-copy 100", "-m 1000"] {
        let how = format!("--lcores 0 --dma rxq0@core:1 {how}");
        let report = assert_all_return(&SIZES, few() / 5, &how);
        assert!(sum(&report, "channels", "completed") > 0, "{how}: {report}");
        assert_eq!(sum(&report, "channels", "failed"), 0, "{how}: {report}");
    }
}

#[test]
fn packets_come_back_over_two_lcores() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    for how in ["", "-s 32", "--dma rxq0@core:1", "--port-topology loop -q 2"] {
        let report = assert_all_return(&SIZES[1..], few() / 5, &format!("--lcores 0,1 {how}"));
        let rings = report.0["queues"].as_array().unwrap().iter();
        let through: u64 = rings
            .filter(|queue| queue["port"].as_str().is_some_and(|port| port.starts_with("ring")))
            .filter(|queue| queue["half"] == "rx")
            .map(|queue| queue["packets"].as_u64().unwrap())
            .sum();
        assert_eq!(through, 2 * (few() / 5), "{how}: {report}");
    }
}

/// A lost copy is detected after one second, while the core copies. Therefore only few copies are lost.
#[test]
fn million_packets_over_a_failing_device() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let faults = "fault=page:0.002+hw:0.002+late:0.001:300+drop:0.00001+lost:0.00001";
    let how = format!("--lcores 0 --dsa-sim 0:profile=vhost,lcore=1,{faults} --dma rxq0@dsa-sim0:wq0.0");
    let report = assert_all_return(&SIZES[1..2], many(), &how);
    assert!(sum(&report, "workers", "fallbacks") > 0, "{report}");
    assert!(sum(&report, "channels", "failed") > 0, "{report}");
}

/// The header of a little-endian capture file with timestamps in microseconds and frames of up to 256 KiB.
const FILE: [u8; 24] = [0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0];

/// Writes a capture of frames in the format of libpcap.
pub(crate) fn write_capture(path: &Path, frames: &[Vec<u8>]) {
    let mut file = FILE.to_vec();
    for (number, frame) in frames.iter().enumerate() {
        let len = frame.len() as u32;
        file.extend([number as u32, 0, len, len].map(u32::to_le_bytes).concat());
        file.extend(frame);
    }
    std::fs::write(path, file).unwrap();
}

/// Returns the frames of a capture. All frames are complete except possibly the last one, which may still be being
/// written.
pub(crate) fn read_capture(path: &Path) -> Vec<Vec<u8>> {
    let file = std::fs::read(path).unwrap();
    let (mut frames, mut rest) = (Vec::new(), file.get(24..).unwrap_or_default());
    while let Some((header, after)) = rest.split_at_checked(16) {
        let [len, on_the_line] = [8, 12].map(|at| u32::from_le_bytes(*header[at..].first_chunk().unwrap()));
        assert_eq!(len, on_the_line, "frame {} was cut", frames.len());
        let Some((frame, after)) = after.split_at_checked(len as usize) else { break };
        frames.push(frame.to_vec());
        rest = after;
    }
    frames
}

/// Returns frames of every length from 60 to 1514 bytes.
fn frames() -> Vec<Vec<u8>> {
    let byte = |number: usize, at: usize| (number.wrapping_mul(131) ^ at.wrapping_mul(17) ^ at >> 8) as u8;
    let frame = |number: usize| {
        let len = 60 + number * 677 % 1455;
        (0..len).map(|at| byte(number, at)).collect()
    };
    (0..3000).map(frame).collect()
}

/// Copies a capture. Returns the output capture and the report.
fn through(frames: &[Vec<u8>], how: &str) -> (Vec<Vec<u8>>, Report) {
    let dir = TempDir::new().unwrap();
    let (input, output) = (dir.file("in.pcap"), dir.file("out.pcap"));
    write_capture(&input, frames);
    let mut args = vec!["--port".into(), format!("pcap:{},{}", input.display(), output.display())];
    args.extend(words(how));
    let report = copy(&args);
    (read_capture(&output), report)
}

#[test]
fn capture_is_copied_unchanged() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let frames = frames();
    for how in [
        "--lcores 0",
        "--lcores 0 --dma rxq0@core:1",
        "--lcores 0,1",
        "--lcores 0,1 --dma rxq0@core:1 -c auto",
    ] {
        let (found, _) = through(&frames, &format!("--no-mac-updating {how}"));
        assert!(found == frames, "{how}: {} of {} frames", found.len(), frames.len());

        let (found, report) = through(&frames, how);
        let mac: Vec<u8> = report.0["ports"][0]["mac"]
            .as_str()
            .unwrap()
            .split(':')
            .map(|part| u8::from_str_radix(part, 16).unwrap())
            .collect();
        let addresses: Vec<u8> = [2, 0, 0, 0, 0, 0].into_iter().chain(mac).collect();
        assert_eq!(found.len(), frames.len(), "{how}");
        for (found, sent) in found.iter().zip(&frames) {
            assert_eq!(found[..12], addresses[..], "{how}");
            assert!(found[12..] == sent[12..], "{how}");
        }
    }
}

#[test]
fn too_long_copies_are_counted() {
    let frames = frames();
    let (found, report) = through(&frames, "--lcores 0 --no-mac-updating --max-frame 1004");
    let wanted: Vec<_> = frames.iter().filter(|frame| frame.len() <= 1000).cloned().collect();
    assert!(found == wanted, "{} of {} frames", found.len(), wanted.len());
    let dropped = frames.len() - wanted.len();
    assert_eq!(sum(&report, "copies", "too_big"), dropped as u64, "{report}");
}

#[test]
fn only_the_ports_of_the_mask_take_part() {
    let mut args = generators(&[64, 64], 1000);
    args.extend(words("--lcores 0 -p 0x2"));
    let report = copy(&args);
    assert_eq!(report.generator(1).received, 1000, "{report}");
    assert_eq!(report.generator(0).sent, 0, "{report}");
}

#[test]
fn table_has_dpdk_dma_counters() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let how = "copy --port gen:size=64,count=10000 --dma rxq0@core:1 --lcores 0 --until-idle";
    let finished = Offcore::run(&how.split(' ').collect::<Vec<_>>()).unwrap();
    assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
    for word in ["received", "copied", "sent", "copies submitted", "completed", "failed"] {
        assert!(finished.stdout.contains(word), "no {word:?} in {}", finished.stdout);
    }
}
