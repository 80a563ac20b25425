//! Pattern matching and packet actions: a capture goes through `offcore gpu` into another capture, and the output is
//! compared with a naive search.

use std::fs;

use peers::{Need, Offcore, TempDir, one_core};

use super::traffic::{HEADERS, checksum, mix, noise, swapped, udp_frame};
use super::{device, work};
use crate::copy::{read_capture, write_capture};
use crate::switch::{Report, stop, wait_for_packets};

const ETHERTYPE: usize = 12;
const IP: usize = 14;
/// IEEE 802 Local Experimental EtherType.
const NO_IP: [u8; 2] = [0x88, 0xb5];
/// The default of `--mark`: expedited forwarding.
const DSCP: u8 = 46;
/// The workloads. All of them give the same results.
const WORKERS: [&str; 7] = [
    "cpu",
    "kernel",
    "persistent",
    "graph",
    "kernel -m gpu",
    "persistent -m gpu --split-at 100",
    "cpu --split-at 100",
];

/// The output of a run over a capture.
struct Outcome {
    out: Vec<Vec<u8>>,
    /// The output of the steering port, if any.
    steered: Vec<Vec<u8>>,
    report: Report,
}

/// Processes frames, with patterns in a file and the flags `how`.
fn through(lcore: usize, frames: &[Vec<u8>], patterns: &[Vec<u8>], how: &str) -> Outcome {
    let dir = TempDir::new().unwrap();
    let file = |name: &str| dir.file(name).display().to_string();
    write_capture(&dir.file("in"), frames);
    fs::write(file("patterns"), pattern_file(patterns)).unwrap();
    let port = format!("pcap:{},{}", file("in"), file("out"));
    let lcore = lcore.to_string();
    let mut args = vec!["gpu", "--port", &port, "--lcores", &lcore];
    args.extend(["--format", "json", "--stats-interval", "0.1"]);
    args.extend(device(how).chain(how.split_whitespace()));
    let (name, steer) = (file("patterns"), format!("pcap:-,{}", file("steered")));
    if how.contains("--work match") {
        args.extend(["--patterns", &name]);
    }
    if how.contains("--on-match steer") {
        args.extend(["--steer", &steer]);
    }
    let mut offcore = Offcore::start(&args).unwrap();
    wait_for_packets(&mut offcore, 0, "rx", frames.len() as u64);
    let report = stop(offcore);
    report.assert_only_drops(&[]);
    let steered = if dir.file("steered").exists() { read_capture(&dir.file("steered")) } else { vec![] };
    Outcome { out: read_capture(&dir.file("out")), steered, report }
}

/// Formats a pattern file: text as it is, other bytes escaped, with comments and empty lines.
fn pattern_file(patterns: &[Vec<u8>]) -> Vec<u8> {
    let mut file = b"# patterns, one a line\n\n".to_vec();
    for pattern in patterns {
        for byte in pattern {
            match byte {
                b'a'..=b'z' | b' ' => file.push(*byte),
                _ => file.extend(format!("\\x{byte:02x}").bytes()),
            }
        }
        file.extend(b"\r\n# another\n");
    }
    file
}

/// Returns pseudo-random patterns of 3 to 32 bytes, a text, a prefix and a suffix of another pattern, and a long
/// pattern.
fn patterns() -> Vec<Vec<u8>> {
    let mut patterns: Vec<Vec<u8>> =
        (0..40).map(|n| noise(n << 50 | 7).take(3 + n as usize * 11 % 30).collect()).collect();
    let [whole, text, long] = [&patterns[20][..], b"attack at dawn", &[b'#'; 700]].map(<[u8]>::to_vec);
    patterns.extend([whole[..5].to_vec(), whole[whole.len() - 4..].to_vec(), text, long]);
    patterns
}

/// Returns IPv4, IPv6 and other frames of all Ethernet lengths, some in several buffers. Every third frame contains a
/// pattern: at the start of the payload, one byte before it, at its end, inside, or across buffers.
fn frames(patterns: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let frame = |n: u64| {
        let random = mix(n);
        let len = if n % 61 == 60 { 2000 + n as usize * 7 % 5000 } else { 60 + n as usize * 677 % 1455 };
        let payload: Vec<u8> = noise(random).take(len - HEADERS).collect();
        let mut frame = udp_frame(n, n as u16, random as u8, &payload);
        if n % 7 == 5 {
            frame[ETHERTYPE..IP].copy_from_slice(&NO_IP);
        } else if n % 7 == 6 {
            let version_and_class = [0x60 | random as u8 >> 4, (random as u8) << 4 | 0x0a];
            frame[ETHERTYPE..IP + 2].copy_from_slice(&[&[0x86, 0xdd][..], &version_and_class].concat());
        }
        if n.is_multiple_of(3) {
            let pattern = &patterns[(random >> 8) as usize % patterns.len()];
            let last = len.saturating_sub(pattern.len());
            let at = match n / 3 % 5 {
                0 => HEADERS,
                1 => HEADERS - 1,
                2 => last,
                3 => HEADERS + (random >> 20) as usize % len,
                _ => 2048 - 256 - pattern.len() / 2,
            };
            let at = at.min(last).max(HEADERS - 1);
            let fits = pattern.len().min(len - at);
            frame[at..at + fits].copy_from_slice(&pattern[..fits]);
        }
        frame
    };
    (0..900).map(frame).collect()
}

/// Returns whether a pattern occurs in the payload, by a naive search.
fn is_match(frame: &[u8], skip: usize, patterns: &[Vec<u8>]) -> bool {
    let payload = frame.get(skip..).unwrap_or_default();
    patterns.iter().any(|pattern| payload.windows(pattern.len()).any(|place| place == pattern))
}

/// Returns the number of bytes before the payload, from the flags.
fn skip(how: &str) -> usize {
    if how.contains("--split-at 100") { 100 } else { HEADERS }
}

/// Returns the frame with a DSCP in its IP header and a correct checksum. The ECN bits stay.
fn marked(mut frame: Vec<u8>) -> Vec<u8> {
    match frame[ETHERTYPE..IP] {
        [0x08, 0x00] => {
            frame[IP + 1] = DSCP << 2 | frame[IP + 1] & 3;
            frame[IP + 10..IP + 12].fill(0);
            let sum = checksum(&frame[IP..IP + 20]).to_be_bytes();
            frame[IP + 10..IP + 12].copy_from_slice(&sum);
        }
        [0x86, 0xdd] => {
            frame[IP] = 0x60 | DSCP >> 2;
            frame[IP + 1] = DSCP << 6 | frame[IP + 1] & 0x3f;
        }
        _ => {}
    }
    frame
}

/// Checks that both have the same frames in order.
fn assert_same(found: &[Vec<u8>], expected: &[Vec<u8>], how: &str) {
    let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
    let first = differs.map(|at| {
        let byte = found[at].iter().zip(&expected[at]).position(|(found, expected)| found != expected);
        (at, found[at].len(), expected[at].len(), byte)
    });
    assert_eq!(
        (found.len(), first),
        (expected.len(), None),
        "{how}: frames, and the first that differs: number, lengths, first byte that differs"
    );
}

#[test]
fn match_results_steer_packets() {
    let Some(core) = one_core(&[Need::Cores(2), Need::HostDevice]) else { return };
    let patterns = patterns();
    let frames = frames(&patterns);
    let search = |skip| frames.iter().map(|frame| is_match(frame, skip, &patterns)).collect::<Vec<_>>();
    let found = [HEADERS, 100].map(|skip| (skip, search(skip)));
    for worker in WORKERS {
        let (_, matches) = found.iter().find(|(at, _)| *at == skip(worker)).unwrap();
        let hits = matches.iter().filter(|hit| **hit).count();
        assert!(hits > 100 && hits < 400, "{hits} frames match");
        let pick = |wanted: bool| -> Vec<Vec<u8>> {
            let picked = frames.iter().zip(matches).filter(|(_, hit)| **hit == wanted);
            picked.map(|(frame, _)| swapped(frame.clone())).collect()
        };
        let (all, hit, missed) =
            (frames.iter().cloned().map(swapped).collect::<Vec<_>>(), pick(true), pick(false));
        let with_marks: Vec<_> = all
            .iter()
            .zip(matches)
            .map(|(f, hit)| if *hit { marked(f.clone()) } else { f.clone() })
            .collect();
        let ip = |(frame, hit): (&Vec<u8>, &bool)| *hit && frame[ETHERTYPE..IP] != NO_IP;
        let ip_hits = frames.iter().zip(matches).filter(|pair| ip(*pair)).count();
        for (on_match, out, steered, [dropped, marked, sent_elsewhere]) in [
            ("pass", &all, &[][..], [0, 0, 0]),
            ("drop", &missed, &[], [hits, 0, 0]),
            ("only", &hit, &[], [frames.len() - hits, 0, 0]),
            ("mark", &with_marks, &[], [0, ip_hits, 0]),
            ("steer", &missed, &hit, [0, 0, hits]),
        ] {
            let how = format!("-w {worker} -b 100 --work match --on-match {on_match}");
            let outcome = through(core.number(), &frames, &patterns, &how);
            assert_same(&outcome.out, out, &how);
            assert_same(&outcome.steered, steered, &how);
            let report = &outcome.report;
            for (name, expected) in
                [("hits", hits), ("dropped", dropped), ("marked", marked), ("steered", sent_elsewhere)]
            {
                assert_eq!(work(report, name), expected as u64, "{how}: {name}: {report}");
            }
            assert_eq!(report.packets(0, "tx"), out.len() as u64, "{how}: {report}");
        }
    }
}

#[test]
fn no_swap_keeps_addresses() {
    let Some(core) = one_core(&[Need::Cores(2), Need::HostDevice]) else { return };
    let patterns = patterns();
    let frames = frames(&patterns);
    for work in ["match", "crc32c", "checksum"] {
        for worker in ["cpu", "kernel"] {
            let how = format!("-w {worker} --work {work} --no-swap");
            assert_same(&through(core.number(), &frames, &patterns, &how).out, &frames, &how);
        }
    }
}

/// Computes the CRC-32C bit by bit (RFC 3720, B.4).
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| divide(crc ^ u32::from(*byte), 8))
}

const POLYNOMIAL: u32 = 0x82f6_3b78;

fn divide(crc: u32, bits: u32) -> u32 {
    (0..bits).fold(crc, |crc, _| if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 })
}

/// Changes the last four bytes so that the CRC-32C is 0.
fn make_crc_zero(payload: &mut [u8]) {
    let (rest, last) = payload.split_last_chunk_mut::<4>().unwrap();
    // Runs the CRC backwards from 0, bit by bit: only a reduction sets the highest bit.
    let back = |crc: u32| if crc >> 31 == 1 { (crc ^ POLYNOMIAL) << 1 | 1 } else { crc << 1 };
    let before = (0..32).fold(!0, |crc, _| back(crc));
    *last = (before ^ !crc32c(rest)).to_le_bytes();
    assert_eq!(crc32c(payload), 0);
}

/// Changes the last whole word so that the Internet checksum is 0.
fn make_checksum_zero(payload: &mut [u8]) {
    let at = (payload.len() & !1) - 2;
    payload[at..at + 2].fill(0);
    let sum = checksum(payload).to_be_bytes();
    payload[at..at + 2].copy_from_slice(&sum);
    assert_eq!(checksum(payload), 0);
}

/// Non-zero results are counted; some payloads have result 0.
#[test]
fn checksums_match_bitwise_reference() {
    let Some(core) = one_core(&[Need::Cores(2), Need::HostDevice]) else { return };
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    for (kind, make_zero) in
        [("crc32c", make_crc_zero as fn(&mut [u8])), ("checksum", make_checksum_zero as fn(&mut [u8]))]
    {
        for worker in WORKERS {
            let skip = skip(worker);
            let mut frames = frames(&patterns());
            for frame in frames.iter_mut().step_by(4).filter(|frame| frame.len() >= skip + 4) {
                make_zero(&mut frame[skip..]);
            }
            let result = |frame: &Vec<u8>| match (frame.get(skip..).unwrap_or_default(), kind) {
                (payload, "crc32c") => crc32c(payload),
                (payload, _) => checksum(payload).into(),
            };
            let hits = frames.iter().filter(|frame| result(frame) != 0).count();
            assert!(hits > 500 && hits < 800, "{hits} frames have a result");
            let how = format!("-w {worker} -b 64 --work {kind}");
            let outcome = through(core.number(), &frames, &[], &how);
            let expected: Vec<_> = frames.into_iter().map(swapped).collect();
            assert_same(&outcome.out, &expected, &how);
            assert_eq!(work(&outcome.report, "hits"), hits as u64, "{how}: {}", outcome.report);
        }
    }
}
