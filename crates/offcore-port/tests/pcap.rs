//! Tests the pcap port: written packets are read back, and invalid files are refused or counted.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use common::{TempDir, Worker, pool, until};
use offcore_mem::{Burst, Hugepages, Pool};
use offcore_port::pcap::{PcapPort, part_of};
use offcore_port::spec::{PcapSpec, PortSpec};
use offcore_port::{DropReason, Port, RxQueue, TxQueue};
use offcore_wire::pcap::{MAX_RECORD_LEN, PcapReader, PcapWriter};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};

/// Length of the record header in front of each packet of a capture file, in bytes.
const RECORD_HEADER: usize = 16;

fn spec(text: &str) -> PcapSpec {
    let PortSpec::Pcap(spec) = text.parse().unwrap() else { panic!("{text}") };
    spec
}

fn open(text: &str) -> PcapPort {
    PcapPort::open(&spec(text)).unwrap_or_else(|e| panic!("{e}"))
}

fn error(text: &str) -> String {
    PcapPort::open(&spec(text)).unwrap_err().to_string()
}

/// Opens a port with a pool of `chunks` packet buffers, and takes its RX queue.
fn reading(text: &str, chunks: usize) -> (Worker, PcapPort, Box<dyn RxQueue>) {
    let (mut worker, mut port) = (Worker::new(pool(chunks)), open(text));
    let rx = worker.rx_queue(&mut port, 0).unwrap();
    (worker, port, rx)
}

/// The same with its TX queue.
fn writing(text: &str, chunks: usize) -> (Worker, PcapPort, Box<dyn TxQueue>) {
    let (mut worker, mut port) = (Worker::new(pool(chunks)), open(text));
    let tx = worker.tx_queue(&mut port, 0).unwrap();
    (worker, port, tx)
}

/// Makes a pipe in a new directory.
fn pipe() -> (TempDir, PathBuf) {
    let dir = TempDir::new();
    let path = dir.file("pipe");
    mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
    (dir, path)
}

/// Returns packet `n` of the test files.
fn frame(n: usize) -> Vec<u8> {
    let len = 60 + n * 37 % 1400;
    (0..len).map(|i| (i * 7 + n) as u8).collect()
}

/// Returns a capture file of `frames`.
fn capture(frames: &[Vec<u8>]) -> Vec<u8> {
    capture_of(65535, frames)
}

/// Returns a capture file whose packets are truncated to `snaplen` bytes.
fn capture_of(snaplen: u32, frames: &[Vec<u8>]) -> Vec<u8> {
    let mut writer = PcapWriter::new(Vec::new(), snaplen).unwrap();
    for frame in frames {
        writer.write_record(1_000_000_007, frame).unwrap();
    }
    writer.into_inner()
}

fn write(dir: &TempDir, name: &str, bytes: &[u8]) -> String {
    fs::write(dir.file(name), bytes).unwrap();
    dir.file(name).display().to_string()
}

/// Receives one burst and returns the buffers to the pool.
fn receive(worker: &mut Worker, rx: &mut dyn RxQueue) -> Vec<Vec<u8>> {
    let mut burst = Burst::new();
    worker.rx(rx, &mut burst);
    let pool = worker.cache.pool();
    let frames = burst.iter().map(|p| pool.segments(p).flatten().copied().collect()).collect();
    worker.free(&mut burst);
    frames
}

/// Receives until a burst is empty.
fn receive_all(worker: &mut Worker, rx: &mut dyn RxQueue) -> Vec<Vec<u8>> {
    std::iter::repeat_with(|| receive(worker, rx)).take_while(|burst| !burst.is_empty()).flatten().collect()
}

#[test]
fn capture_replays_sent_packets() {
    let dir = TempDir::new();
    let out = dir.file("out.pcap").display().to_string();
    let frames: Vec<Vec<u8>> = (0..200).map(frame).collect();
    let chunks = 256;
    let (mut worker, _, mut tx) = writing(&format!("pcap:-,{out}"), chunks);
    for part in frames.chunks(60) {
        let mut burst: Burst = part.iter().map(|frame| worker.packet(frame)).collect();
        worker.tx(&mut *tx, &mut burst);
        assert!(burst.is_empty());
    }
    assert!(tx.stop(&mut worker.ctx()));
    let bytes: usize = frames.iter().map(Vec::len).sum();
    assert_eq!((tx.counters().packets(), tx.counters().bytes()), (200, bytes as u64));
    assert_eq!(tx.counters().dropped_total(), 0);
    drop(tx);
    let mode = fs::metadata(&out).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "captures are private");
    match std::process::Command::new("tcpdump").args(["-r", &out, "-nn", "-e"]).output() {
        Err(missing) => eprintln!("SKIP: tcpdump cannot be run: {missing}"),
        Ok(run) => {
            let lines = String::from_utf8_lossy(&run.stdout).lines().filter(|l| l.contains("length")).count();
            assert_eq!(lines, 200, "{run:?}");
        }
    }

    let mut port = open(&format!("pcap:{out}"));
    let mut rx = worker.rx_queue(&mut port, 0).unwrap();
    assert_eq!(receive_all(&mut worker, &mut *rx), frames);
    assert_eq!((rx.counters().packets(), rx.counters().bytes()), (200, bytes as u64));
    assert!(port.status().contains("out.pcap (read to its end), output none"), "{}", port.status());
    assert_eq!(worker.free_chunks(), chunks);
}

#[test]
fn pipe_reads_return_available_packets() {
    let (_dir, path) = pipe();
    assert!(error(&format!("pcap:{},loop", path.display())).contains("it is a pipe: expected a file"));
    let (mut worker, port, mut rx) = reading(&format!("pcap:{}", path.display()), 64);
    assert!(receive(&mut worker, &mut *rx).is_empty(), "it has no writer");
    let frames: Vec<Vec<u8>> = (0..3).map(frame).collect();
    let bytes = capture(&frames);
    let mut writer = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut received = Vec::new();
    // The cuts are in the file header, in a record header, in a packet, and behind a packet.
    let second = 24 + 2 * RECORD_HEADER + frames[0].len();
    for cut in [0..10, 10..30, 30..second + 5, second + 5..bytes.len() - 1] {
        writer.write_all(&bytes[cut]).unwrap();
        received.extend(receive_all(&mut worker, &mut *rx));
    }
    assert_eq!(received, frames[..2]);
    writer.write_all(&bytes[bytes.len() - 1..]).unwrap();
    assert_eq!(receive_all(&mut worker, &mut *rx), frames[2..]);
    assert!(!port.status().contains("read to its end"), "its writer is there: {}", port.status());
    drop(writer);
    assert!(receive(&mut worker, &mut *rx).is_empty());
    assert!(port.status().contains("pipe (read to its end)"), "{}", port.status());
}

#[test]
fn skipped_packets_keep_pipe_open() {
    let (_dir, path) = pipe();
    let (mut worker, port, mut rx) = reading(&format!("pcap:{}", path.display()), 64);
    // A packet that is too long for the pool, and a packet that is shorter than an Ethernet header.
    let frames = [frame(0), vec![7; 200_000], vec![7; 13], frame(1)];
    let bytes = capture_of(MAX_RECORD_LEN, &frames);
    let mut writer = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut received = Vec::new();
    for piece in bytes.chunks(4099) {
        writer.write_all(piece).unwrap();
        received.extend(receive_all(&mut worker, &mut *rx));
    }
    assert_eq!(received, [frame(0), frame(1)]);
    let dropped = |reason| rx.counters().dropped(reason);
    assert_eq!((dropped(DropReason::TooBig), dropped(DropReason::Malformed)), (1, 1));
    // The writer, which stays connected, writes single bytes.
    let more = capture(&[vec![7; 5], frame(2)]);
    for byte in &more[24..] {
        writer.write_all(&[*byte]).unwrap();
        received.extend(receive_all(&mut worker, &mut *rx));
    }
    assert_eq!(received.len(), 3);
    drop(writer);
    receive(&mut worker, &mut *rx);
    assert!(port.status().contains("pipe (read to its end)"), "{}", port.status());
}

#[test]
fn pipe_output_waits_for_reader() {
    let (_dir, path) = pipe();
    let (mut worker, port, mut tx) = writing(&format!("pcap:-,{}", path.display()), 256);
    // More packets than a pipe and its port hold.
    let frames: Vec<Vec<u8>> = (0..600).map(frame).collect();
    // Sends until the pipe is full, because it has no reader.
    let mut next = 0;
    let mut burst = Burst::new();
    while burst.is_empty() {
        burst = frames[next..next + 32].iter().map(|frame| worker.packet(frame)).collect();
        next += 32;
        worker.tx(&mut *tx, &mut burst);
    }
    assert!(tx.counters().packets() > 10 && tx.counters().dropped_total() == 0);
    let reader = std::thread::spawn(move || fs::read(path).unwrap());
    while !(burst.is_empty() && next == 576) {
        if burst.is_empty() {
            burst = frames[next..next + 32].iter().map(|frame| worker.packet(frame)).collect();
            next += 32;
        }
        worker.tx(&mut *tx, &mut burst);
        // Workers do not poll either while packets are waiting.
        if burst.is_empty() {
            tx.poll(&mut worker.ctx());
        }
    }
    while !tx.stop(&mut worker.ctx()) {}
    assert_eq!((tx.counters().packets(), port.failure()), (576, None));
    drop(tx);
    let read = reader.join().unwrap();
    let mut read = PcapReader::new(&read[..]).unwrap();
    let mut buffer = vec![0; 2048];
    for frame in &frames[..576] {
        let record = read.next_record(&mut buffer).unwrap().unwrap();
        assert_eq!(&buffer[..record.len], frame);
    }
    assert_eq!(read.next_record(&mut buffer).unwrap(), None);
}

#[test]
fn unread_pipe_does_not_block_stop() {
    let (_dir, path) = pipe();
    let (mut worker, port, mut tx) = writing(&format!("pcap:-,{}", path.display()), 64);
    assert!(tx.stop(&mut worker.ctx()), "nothing is lost");
    let mut burst = Burst::from_iter([worker.packet(&frame(0))]);
    worker.tx(&mut *tx, &mut burst);
    while !tx.stop(&mut worker.ctx()) {}
    let lost = 24 + RECORD_HEADER + frame(0).len();
    assert!(port.failure().unwrap().contains(&format!("its last {lost} bytes were not read")));
}

#[test]
fn idle_port_flushes_its_file() {
    let dir = TempDir::new();
    let out = dir.file("out.pcap");
    let (mut worker, _port, mut tx) = writing(&format!("pcap:-,{}", out.display()), 64);
    let mut burst = Burst::from_iter([worker.packet(&frame(0))]);
    worker.tx(&mut *tx, &mut burst);
    until("the packet is in the file", || {
        tx.poll(&mut worker.ctx());
        fs::metadata(part_of(&out)).unwrap().len() == 24 + RECORD_HEADER as u64 + 60
    });
    assert!(!out.exists(), "it has its name when it is whole");
    drop(tx);
    assert!(out.exists() && !part_of(&out).exists());
}

#[test]
fn loop_key_repeats_the_file() {
    let dir = TempDir::new();
    let frames: Vec<Vec<u8>> = (0..5).map(frame).collect();
    let input = write(&dir, "in.pcap", &capture(&frames));
    let (mut worker, port, mut rx) = reading(&format!("pcap:{input},loop"), 256);
    let received: Vec<Vec<u8>> = (0..20).flat_map(|_| receive(&mut worker, &mut *rx)).collect();
    assert_eq!(received.len(), 20 * 64);
    assert!(received.iter().zip(frames.iter().cycle()).all(|(a, b)| a == b));

    // If the file's packets are removed meanwhile, repeating ends.
    fs::write(&input, capture(&[])).unwrap();
    assert!(receive_all(&mut worker, &mut *rx).len() <= 5);
    assert!(port.status().contains("no packets that can be received"), "{}", port.status());
}

#[test]
fn every_length_is_read_and_written() {
    let dir = TempDir::new();
    let lens = [14, 1791, 1792, 1793, 3584, 3585, 9014, 9216, 65535, 65536, 100_000, 262_143, 262_144];
    let frames: Vec<Vec<u8>> =
        lens.iter().map(|&len| (0..len).map(|i| (i * 7 + len) as u8).collect()).collect();
    let whole = capture_of(MAX_RECORD_LEN, &frames);
    let input = write(&dir, "in.pcap", &whole);
    let out = dir.file("out.pcap");
    for chunk in [2048, 4096, 32768] {
        let pool = Pool::new(1024, chunk, Hugepages::None).unwrap();
        let mut worker = Worker::new(pool);
        let chunks = worker.free_chunks();
        let mut port = open(&format!("pcap:{input},{},overwrite", out.display()));
        let mut rx = worker.rx_queue(&mut port, 0).unwrap();
        let mut tx = worker.tx_queue(&mut port, 0).unwrap();
        assert!(tx.accepts().segments && tx.accepts().offloads == Default::default());
        let mut burst = Burst::new();
        worker.rx(&mut *rx, &mut burst);
        let lengths: Vec<usize> = burst.iter().map(|packet| pool.total_len(packet)).collect();
        assert_eq!(lengths, lens, "buffers of {chunk}");
        let longest = 262_144usize.div_ceil(chunk - 256);
        assert_eq!(burst.iter().map(|packet| pool.segment_count(packet)).max(), Some(longest));
        worker.tx(&mut *tx, &mut burst);
        assert!(burst.is_empty() && tx.stop(&mut worker.ctx()));
        let bytes: usize = lens.iter().sum();
        for counters in [
            (rx.counters().packets(), rx.counters().bytes(), rx.counters().dropped_total()),
            (tx.counters().packets(), tx.counters().bytes(), tx.counters().dropped_total()),
        ] {
            assert_eq!(counters, (lens.len() as u64, bytes as u64, 0), "buffers of {chunk}");
        }
        assert_eq!(worker.free_chunks(), chunks);
        drop(tx);
        // Everything except the timestamps is equal.
        let written = fs::read(&out).unwrap();
        assert_eq!(written.len(), whole.len());
        let mut at = 24;
        for frame in &frames {
            let data = at + RECORD_HEADER..at + RECORD_HEADER + frame.len();
            assert!(written[at + 8..data.end] == whole[at + 8..data.end], "{} bytes", frame.len());
            at = data.end;
        }
    }
}

#[test]
fn bad_records_are_counted() {
    let dir = TempDir::new();
    // With a pool of 64 buffers, one packet may have at most 16 of them.
    let frames = [frame(0), vec![1; 28673], vec![2; 28672], vec![3; 13], vec![4; 14], vec![]];
    let input = write(&dir, "in.pcap", &capture(&frames));
    let chunks = 64;
    let (mut worker, _port, mut rx) = reading(&format!("pcap:{input}"), chunks);
    let received = receive_all(&mut worker, &mut *rx);
    assert_eq!(received, [frames[0].clone(), frames[2].clone(), frames[4].clone()]);
    assert_eq!(
        (rx.counters().dropped(DropReason::TooBig), rx.counters().dropped(DropReason::Malformed)),
        (1, 2)
    );
    assert_eq!(worker.free_chunks(), chunks);

    // Repeating also ends if no packet fits.
    let input = write(&dir, "big.pcap", &capture(&[vec![1; 30000]]));
    let mut port = open(&format!("pcap:{input},loop"));
    let mut rx = worker.rx_queue(&mut port, 0).unwrap();
    assert!(receive(&mut worker, &mut *rx).is_empty());
    assert!(port.status().contains("no packets that can be received"), "{}", port.status());
}

#[test]
fn a_packet_waits_for_its_buffers() {
    let dir = TempDir::new();
    let frames = [vec![1; 60], vec![2; 9000], vec![3; 60]];
    let input = write(&dir, "in.pcap", &capture(&frames));
    let mut worker = Worker::new(pool(64));
    let mut hoard: Vec<_> = std::iter::from_fn(|| worker.cache.take()).collect();
    let mut port = open(&format!("pcap:{input}"));
    let mut rx = worker.rx_queue(&mut port, 0).unwrap();
    assert!(receive(&mut worker, &mut *rx).is_empty());
    worker.cache.free_all(hoard.drain(..5));
    assert_eq!(receive(&mut worker, &mut *rx), frames[..1]);
    assert!(receive(&mut worker, &mut *rx).is_empty(), "five buffers are one too few");
    worker.cache.free_all(hoard.drain(..2));
    assert_eq!(receive(&mut worker, &mut *rx), frames[1..]);
    assert_eq!(rx.counters().dropped_total(), 0);
}

#[test]
fn returned_packets_are_received_again() {
    let dir = TempDir::new();
    let frames: Vec<Vec<u8>> = (0..100).map(frame).collect();
    let input = write(&dir, "in.pcap", &capture(&frames));
    let chunks = 256;
    let (mut worker, _port, mut rx) = reading(&format!("pcap:{input}"), chunks);
    let (mut burst, mut sent) = (Burst::new(), Vec::new());
    for taken in [10, 0, 54, 0, 36] {
        worker.rx(&mut *rx, &mut burst);
        for packet in burst.drain(..taken) {
            sent.push(packet.bytes().to_vec());
            worker.cache.free(packet);
        }
        rx.take_back(&mut burst);
        assert!(burst.is_empty());
    }
    assert!(sent == frames, "{} packets", sent.len());
    assert_eq!((rx.counters().packets(), worker.free_chunks()), (100, chunks));
}

#[test]
fn cut_packets_are_reported() {
    let dir = TempDir::new();
    let frames = [vec![1; 60], vec![2; 9000], vec![3; 97]];
    let input = write(&dir, "in.pcap", &capture_of(96, &frames));
    let (mut worker, port, mut rx) = reading(&format!("pcap:{input}"), 64);
    assert_eq!(receive_all(&mut worker, &mut *rx), [vec![1; 60], vec![2; 96], vec![3; 96]]);
    assert!(port.status().contains("2 packets were cut when they were captured"), "{}", port.status());
}

#[test]
fn a_file_cut_off_anywhere_is_noticed() {
    let dir = TempDir::new();
    let whole = capture(&[frame(0), frame(1)]);
    let first_end = 24 + RECORD_HEADER + frame(0).len();
    let mut worker = Worker::new(pool(64));
    let chunks = worker.free_chunks();
    for len in (0..whole.len()).step_by(7) {
        let input = write(&dir, "in.pcap", &whole[..len]);
        if len < 24 {
            let message = error(&format!("pcap:{input}"));
            assert!(
                message.contains("ends within its header") || message.contains("not a pcap file"),
                "{message}"
            );
            continue;
        }
        let mut port = open(&format!("pcap:{input}"));
        let mut rx = worker.rx_queue(&mut port, 0).unwrap();
        let received = receive_all(&mut worker, &mut *rx).len();
        assert_eq!(received, usize::from(len >= first_end), "{len} bytes");
        let whole_records = len == 24 || len == first_end;
        assert_eq!(rx.counters().dropped(DropReason::Malformed), u64::from(!whole_records), "{len} bytes");
        let status = port.status();
        assert_eq!(status.contains("ends within record"), !whole_records, "{len} bytes: {status}");
        if !whole_records {
            assert!(error(&format!("pcap:{input},loop")).contains("ends within record"));
        }
    }
    assert_eq!(worker.free_chunks(), chunks);
}

#[test]
fn bad_files_are_refused() {
    let dir = TempDir::new();
    let in_dir = |name: &str| dir.file(name).display().to_string();
    let missing = in_dir("missing.pcap");
    assert_eq!(
        error(&format!("pcap:{missing}")),
        format!("port 'pcap:{missing},-': file '{missing}': No such file or directory (os error 2)")
    );
    let text = write(&dir, "text", b"this is no capture file at all");
    assert!(error(&format!("pcap:{text}")).contains("not a pcap file: it begins with bytes 74 68 69 73"));
    let newer = write(&dir, "newer", &[0x0a, 0x0d, 0x0d, 0x0a, 0, 0, 0, 0]);
    assert!(error(&format!("pcap:{newer}")).contains("pcapng"));
    let empty = write(&dir, "empty.pcap", &capture(&[]));
    assert!(error(&format!("pcap:{empty},loop")).contains("no packets that could be repeated"));
    let nowhere = in_dir("nowhere/out.pcap");
    assert!(error(&format!("pcap:-,{nowhere}")).contains("No such file or directory"));
    assert!(error(&format!("pcap:{}", dir.0.display())).contains("Is a directory"));
}

#[test]
fn failed_output_drops_and_reports() {
    if Path::new("/dev/full").exists() {
        // The file header is written when the port is opened.
        assert!(error("pcap:-,/dev/full").contains("No space left on device"));
    }
    // A pipe whose reader disconnects.
    let (_dir, pipe) = pipe();
    let mut options = fs::OpenOptions::new();
    let reader = options.read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(&pipe).unwrap();
    let chunks = 64;
    let (mut worker, port, mut tx) = writing(&format!("pcap:-,{}", pipe.display()), chunks);
    drop(reader);
    let mut send = |worker: &mut Worker| {
        let mut burst: Burst = (0..60).map(|n| worker.packet(&frame(n))).collect();
        worker.tx(&mut *tx, &mut burst);
        assert!(burst.is_empty());
        (tx.counters().packets(), tx.counters().dropped(DropReason::Failed))
    };
    until("the pipe is broken", || send(&mut worker).1 > 0);
    let (packets, failed) = send(&mut worker);
    assert_eq!(send(&mut worker), (packets, failed + 60));
    assert!(port.status().contains("Broken pipe"), "{}", port.status());
    assert!(port.failure().is_some_and(|why| why.contains("Broken pipe")));
    assert_eq!(worker.free_chunks(), chunks);
}

#[test]
fn a_port_without_an_output_drops() {
    let dir = TempDir::new();
    let input = write(&dir, "in.pcap", &capture(&[frame(0)]));
    let chunks = 64;
    let (mut worker, mut port, mut tx) = writing(&format!("pcap:{input}"), chunks);
    let mut burst: Burst = (0..3).map(|n| worker.packet(&frame(n))).collect();
    worker.tx(&mut *tx, &mut burst);
    assert_eq!((tx.counters().packets(), tx.counters().dropped(DropReason::Down)), (0, 3));
    assert!(burst.is_empty());
    assert_eq!(worker.free_chunks(), chunks);
    assert!(worker.tx_queue(&mut port, 0).is_err(), "a queue is given out once");
}
