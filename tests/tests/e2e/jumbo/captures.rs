//! Capture files with long frames: frames are written exactly as they were read.

use super::*;
use crate::copy::{read_capture, write_capture};

/// Lengths of frames without FCS.
const LENGTHS: [usize; 9] = [14, 60, 1514, 1792, 1793, 9014, 9216, 40_000, 65_549];

fn frame(n: usize) -> Vec<u8> {
    let len = LENGTHS[n % LENGTHS.len()];
    // All frames differ, and no frame has a period shorter than its length.
    (0..len).map(|i| (i * 7 + i / 256 + n * 3) as u8).collect()
}

fn assert_same(found: &[Vec<u8>], expected: &[Vec<u8>], what: &str) {
    let differing = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!((found.len(), differing), (expected.len(), None), "{what}");
}

/// From file to file in one process. The frames include the longest that a file can have.
#[test]
fn frames_of_every_length_from_file_to_file() {
    let Some(()) = require(&[]) else { return };
    let dir = TempDir::new().unwrap();
    let mut frames: Vec<_> = (0..200).map(frame).collect();
    frames.extend([vec![7; 100_000], vec![8; 262_144]]);
    let [input, output] = ["in.pcap", "out.pcap"].map(|name| dir.file(name).display().to_string());
    write_capture(input.as_ref(), &frames);
    for buffers in ["2048", "32768"] {
        let more = ["--mbuf-size", buffers, "--until-idle"];
        let ports = [format!("pcap:{input}"), format!("pcap:-,{output},overwrite")];
        let offcore = switch::start(&ports, Copies::Core, 1, &more);
        let finished = offcore.wait().unwrap();
        assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
        assert_same(&read_capture(output.as_ref()), &frames, buffers);
    }
}

/// From a file in one process, over a pair, to a file in another process.
#[test]
fn frames_from_file_to_file_over_every_pair() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    for pair in PAIRS {
        let dir = TempDir::new().unwrap();
        let frames: Vec<_> = (0..2000).map(frame).filter(|f| f.len() <= pair.longest as usize - 4).collect();
        let [input, output] = ["in.pcap", "out.pcap"].map(|name| dir.file(name).display().to_string());
        write_capture(input.as_ref(), &frames);
        let [first, second] = pair.ports(&dir);
        let mut reads = switch_of(1, [&first, &format!("pcap:-,{output}")]);
        switch::wait_for_report(&mut reads);
        let writes = switch_of(0, [&second, &format!("pcap:{input}")]);
        // Frames that are read before the ports are connected are dropped.
        let count = frames.len() as u64;
        let early = |report: &Report| report.dropped("port0 tx down");
        let mut writes = writes;
        let report = switch::wait_for(&mut writes, "frames sent", count, |report| {
            report.packets(0, "tx") + early(report)
        });
        let lost = early(&report) as usize;
        switch::wait_for_packets(&mut reads, 1, "tx", count - lost as u64);
        switch::stop(writes);
        switch::stop(reads).assert_only_drops(&[]);
        assert_same(&read_capture(output.as_ref()), &frames[lost..], pair.name);
    }
}
