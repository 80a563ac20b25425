//! Packets of a capture file, sent byte for byte as captured, with the capture's own timing or at a rate.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use offcore_mem::{HEADROOM, Packet, PoolCache};
use offcore_wire::ethernet::{FCS_LEN, HEADER_LEN};
use offcore_wire::pcap::{MAX_RECORD_LEN, PcapError, PcapReader};

/// Captures are kept in memory. Larger ones are refused.
const MAX_BYTES: usize = 1 << 30;
/// Gap before the capture is repeated, in nanoseconds, if its packets have no gaps.
const GAP_NS: u64 = 1_000_000;

/// A capture in memory.
#[derive(Clone, Debug)]
pub struct Capture {
    bytes: Vec<u8>,
    records: Vec<Record>,
    /// Packets whose end is missing in the capture.
    cut: u64,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    start: usize,
    len: usize,
    /// Capture time in nanoseconds after the first packet. It never decreases.
    at_ns: u64,
}

/// Why a capture cannot be sent.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum CaptureError {
    /// '{path}': {source}
    Io { path: PathBuf, source: io::Error },
    /// '{path}': {source}
    Pcap { path: PathBuf, source: PcapError },
    /// '{path}' has no packets: nothing to send
    Empty { path: PathBuf },
    /// '{path}': record {record} has {len} bytes, less than an Ethernet header: take it out with editcap
    Runt { path: PathBuf, record: u64, len: usize },
    /// '{path}' has more than {MAX_BYTES:?} bytes of packets: split it with editcap -c
    TooBig { path: PathBuf },
}

impl Capture {
    /// Reads a whole capture.
    ///
    /// # Errors
    /// [`CaptureError`] names the file and the error.
    pub fn read(path: &Path) -> Result<Self, CaptureError> {
        let fail = |error| match error {
            PcapError::Io(source) => CaptureError::Io { path: path.into(), source },
            source => CaptureError::Pcap { path: path.into(), source },
        };
        let file = File::open(path).map_err(|source| CaptureError::Io { path: path.into(), source })?;
        let mut reader = PcapReader::new(BufReader::new(file)).map_err(fail)?;
        let mut buffer = vec![0; MAX_RECORD_LEN as usize];
        let mut capture = Self { bytes: Vec::new(), records: Vec::new(), cut: 0 };
        let (mut first, mut last) = (None, 0);
        while let Some(record) = reader.next_record(&mut buffer).map_err(fail)? {
            let number = capture.records.len() as u64 + 1;
            if record.len < HEADER_LEN {
                return Err(CaptureError::Runt { path: path.into(), record: number, len: record.len });
            }
            if capture.bytes.len() + record.len > MAX_BYTES {
                return Err(CaptureError::TooBig { path: path.into() });
            }
            last = record.timestamp_ns.saturating_sub(*first.get_or_insert(record.timestamp_ns)).max(last);
            capture.records.push(Record { start: capture.bytes.len(), len: record.len, at_ns: last });
            // copy-ok: a file is read once, before anything is sent
            capture.bytes.extend_from_slice(&buffer[..record.len]);
            capture.cut += u64::from((record.original_len as usize) > record.len);
        }
        if capture.records.is_empty() {
            return Err(CaptureError::Empty { path: path.into() });
        }
        Ok(capture)
    }

    /// Returns the number of packets.
    pub fn packets(&self) -> u64 {
        self.records.len() as u64
    }

    /// Returns the number of packets whose end is missing in the capture. Only their beginning is sent.
    pub fn cut(&self) -> u64 {
        self.cut
    }

    /// Returns the length of the longest packet in bytes, including the FCS.
    pub fn largest(&self) -> usize {
        self.records.iter().map(|record| record.len).max().unwrap_or(0) + FCS_LEN
    }

    /// Returns the time from the first packet to its repetition: the time of the last packet plus an average gap.
    fn period_ns(&self) -> u64 {
        let last = self.records.last().map_or(0, |record| record.at_ns);
        let gaps = self.records.len() as u64 - 1;
        last + if last == 0 || gaps == 0 { GAP_NS } else { (last / gaps).max(1) }
    }
}

/// Sends a capture.
#[derive(Debug)]
pub(super) struct Replay {
    capture: Capture,
    period_ns: u64,
    repeat: bool,
    /// Ticks per nanosecond of the capture's timestamps.
    ticks_per_ns: f64,
    next: usize,
    /// When the first round began, in ticks.
    began: Option<u64>,
    /// Completed rounds.
    rounds: u64,
}

impl Replay {
    /// Creates a replay. `speed` is the speed-up relative to the capture.
    pub(super) fn new(capture: Capture, repeat: bool, speed: f64, hz: u64) -> Self {
        let period_ns = capture.period_ns();
        let ticks_per_ns = hz as f64 / 1e9 / speed;
        Self { capture, period_ns, repeat, ticks_per_ns, next: 0, began: None, rounds: 0 }
    }

    /// Restarts at the first packet.
    pub(super) fn rewind(&mut self) {
        (self.next, self.began, self.rounds) = (0, None, 0);
    }

    /// Returns when the next packet is due by the capture's timestamps, or `None` at the end.
    #[inline]
    pub(super) fn due(&mut self, now: u64) -> Option<u64> {
        let began = *self.began.get_or_insert(now);
        let record = self.record()?;
        let after = self.rounds as f64 * self.period_ns as f64 + record.at_ns as f64;
        Some(began + (after * self.ticks_per_ns) as u64)
    }

    /// Returns when the next packet is due by the capture's timestamps; after the last packet, the end of its gap.
    pub(super) fn end(&self) -> Option<u64> {
        let in_round = match self.capture.records.get(self.next) {
            Some(record) => record.at_ns,
            None => self.period_ns,
        };
        let after = self.rounds as f64 * self.period_ns as f64 + in_round as f64;
        self.began.map(|began| began + (after * self.ticks_per_ns) as u64)
    }

    /// Whether every packet was sent.
    pub(super) fn is_over(&self) -> bool {
        !self.repeat && self.next == self.capture.records.len()
    }

    #[inline]
    fn record(&mut self) -> Option<Record> {
        if self.next == self.capture.records.len() {
            if !self.repeat {
                return None;
            }
            self.next = 0;
            self.rounds += 1;
        }
        Some(self.capture.records[self.next])
    }

    /// Returns the next packet and its size, including the FCS. `None` if the pool is empty, or at the end.
    #[inline]
    pub(super) fn make(&mut self, cache: &mut PoolCache) -> Option<(Packet, usize)> {
        let Record { start, len, .. } = self.record()?;
        let mut packet = cache.take_chain(HEADROOM, len)?;
        let mut bytes = &self.capture.bytes[start..start + len];
        for segment in cache.pool().segments_mut(&mut packet) {
            let (here, rest) = bytes.split_at(segment.len());
            // copy-ok: packets of a file are written, not forwarded
            segment.copy_from_slice(here);
            bytes = rest;
        }
        self.next += 1;
        Some((packet, len + FCS_LEN))
    }
}

#[cfg(test)]
mod tests {
    use offcore_mem::{Hugepages, Pool};
    use offcore_wire::pcap::PcapWriter;

    use super::*;

    fn file(name: &str, records: &[(u64, usize)]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("offcore-replay-{}-{name}", std::process::id()));
        let mut writer = PcapWriter::new(File::create(&path).unwrap(), 65_535).unwrap();
        for (index, &(at, len)) in records.iter().enumerate() {
            writer.write_record(at, &vec![index as u8; len]).unwrap();
        }
        path
    }

    #[test]
    fn replay_keeps_timing_and_loops() {
        let path = file("time", &[(5_000, 60), (6_000, 5000), (5_500, 70)]);
        let capture = Capture::read(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        assert_eq!((capture.packets(), capture.largest(), capture.cut()), (3, 5004, 0));
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        let mut cache = pool.cache();
        // Two ticks per nanosecond, at double speed.
        let mut replay = Replay::new(capture.clone(), true, 2.0, 2_000_000_000);
        let mut seen = Vec::new();
        for _ in 0..7 {
            let due = replay.due(100).unwrap();
            let (packet, size) = replay.make(&mut cache).unwrap();
            let bytes: Vec<u8> = pool.segments(&packet).flatten().copied().collect();
            assert_eq!(bytes.len() + 4, size);
            assert!(bytes.iter().all(|&byte| byte == bytes[0]));
            seen.push((due, bytes[0], size));
            cache.free(packet);
        }
        let one = [(100, 0, 64), (1100, 1, 5004), (1100, 2, 74)];
        let again = |round: u64| one.map(|(due, byte, size)| (due + round * 1500, byte, size));
        let expected: Vec<_> = [again(0), again(1), again(2)].concat();
        assert_eq!(seen, expected[..7]);
        let mut once = Replay::new(capture, false, 1.0, 1_000_000_000);
        for _ in 0..3 {
            assert!(once.due(0).is_some());
            let (packet, _) = once.make(&mut cache).unwrap();
            cache.free(packet);
        }
        assert_eq!(once.end(), Some(1500), "the last packet has a gap behind it as well");
        assert!(once.is_over() && once.due(0).is_none() && once.make(&mut cache).is_none());
    }

    #[test]
    fn unsendable_captures_are_rejected() {
        let path = file("runt", &[(0, 60), (1, 13)]);
        assert!(Capture::read(&path).unwrap_err().to_string().contains("record 2 has 13 bytes"));
        let path = file("empty", &[]);
        assert!(Capture::read(&path).unwrap_err().to_string().contains("no packets"));
        let path = file("cut", &[(0, 60), (1, 60)]);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 7]).unwrap();
        let error = Capture::read(&path).unwrap_err().to_string();
        assert!(error.contains("ends within record 2: 53 bytes, expected 60"), "{error}");
        let mut other = bytes.clone();
        other[20] = 113;
        std::fs::write(&path, other).unwrap();
        let error = Capture::read(&path).unwrap_err().to_string();
        assert!(error.contains("link type 113") && error.contains("Ethernet"), "{error}");
        assert!(
            Capture::read(Path::new("/nonexistent.pcap")).unwrap_err().to_string().contains("/nonexistent")
        );
        for name in ["runt", "empty", "cut"] {
            let path = std::env::temp_dir().join(format!("offcore-replay-{}-{name}", std::process::id()));
            std::fs::remove_file(path).unwrap();
        }
    }
}
