//! Arbitrary capture files for the reader and a pcap port. Both must find the packets that a second, simple reader
//! finds, and end where it ends. A capture written from these packets must be read back.

use std::cell::RefCell;
use std::io::Write;
use std::os::fd::AsRawFd;

use offcore_dma::{Binding, Mover};
use offcore_mem::{BURST, Burst, Hugepages, Packet, Pool};
use offcore_port::pcap::PcapPort;
use offcore_port::spec::PcapSpec;
use offcore_port::{Context, DropReason, Port, QueueSetup};
use offcore_stats::StageClock;
use offcore_stats::page::StatsPage;
use offcore_wire::pcap::{MAX_RECORD_LEN, PcapError, PcapReader, PcapWriter};

use crate::script::Script;

const CHUNKS: usize = 512;
/// Length of the buffer that the caller of the reader provides.
const ROOM: usize = 2000;
/// Maximum number of polls of a port.
const ROUNDS: usize = 40;

thread_local! {
    /// Pools and a private clock's counters live as long as the process, so they are reused.
    static KEPT: RefCell<Option<(&'static Pool, StageClock)>> = const { RefCell::new(None) };
}

/// The outcome of a script.
#[derive(Clone, Copy, Debug, Default)]
#[allow(dead_code, reason = "a fuzz target looks at none of it")]
pub(crate) struct Outcome {
    /// Packets in the file.
    pub(crate) records: usize,
    /// Files that are not capture files.
    pub(crate) refused: usize,
    /// Files that end within a packet.
    pub(crate) damaged: usize,
    /// Packets received from the port.
    pub(crate) received: usize,
}

/// A packet: timestamp, bytes, and original length.
type Record = (u64, Vec<u8>, u32);

/// Runs a script and adds its results to `outcome`.
///
/// # Panics
/// If the packets read differ from those in the file.
pub(crate) fn play(script: &[u8], outcome: &mut Outcome) {
    let mut script = Script(script);
    let (options, file) = (script.u8(), file(&mut script));
    let Some((records, whole)) = records(&file) else {
        let error = PcapReader::new(&file[..]).unwrap_err();
        assert!(!error.to_string().is_empty());
        assert!(open(&file, false, |_| ()).is_none(), "{error}");
        outcome.refused += 1;
        return;
    };
    read(&file, &records, whole);
    write(&records);
    outcome.received += receive(&file, &records, whole, options & 1 != 0);
    outcome.records += records.len();
    outcome.damaged += usize::from(!whole);
}

/// Generates a file that is usually a capture file.
fn file(script: &mut Script<'_>) -> Vec<u8> {
    let kind = script.u8();
    if kind == 255 {
        return script.0.to_vec();
    }
    let big = kind & 1 != 0;
    let u32_of = |value: u32| if big { value.to_be_bytes() } else { value.to_le_bytes() };
    let u16_of = |value: u16| if big { value.to_be_bytes() } else { value.to_le_bytes() };
    let (magic, more) = match kind & 6 {
        0 => (0xa1b2_c3d4, 0),
        4 => (0xa1b2_cd34, 8),
        _ => (0xa1b2_3c4d, 0),
    };
    let mut file = u32_of(magic).to_vec();
    file.extend([u16_of(2), u16_of(4)].concat());
    file.extend([0; 8]);
    file.extend(u32_of([0, 96, 262_144, 1 << 30][script.below(4)]));
    file.extend(u32_of(1));
    while !script.0.is_empty() && file.len() < 1 << 19 {
        let len = match script.u8() {
            0 => u32::from(script.u16()) * 8,
            1 => u32::from_le_bytes(script.bytes()),
            2..8 => u32::from(script.u16()),
            8..32 => u32::from(script.u8()) % 16,
            _ => u32::from(script.u16()) % 1600,
        };
        let original = if script.u8() < 200 { len } else { u32::from(script.u16()) };
        file.extend([u32::from(script.u16()), u32::from(script.u16()), len, original].map(u32_of).concat());
        file.extend((0..more).map(|i| i as u8));
        let there = if script.u8() < 250 { len.min(1 << 16) } else { u32::from(script.u8()) };
        file.extend((0..there).map(|i| (i * 7) as u8));
    }
    // Arbitrary bytes at arbitrary positions, and an arbitrary end.
    for _ in 0..[0, 0, 0, 0, 0, 1, 2, 4][usize::from(kind >> 5)] {
        let at = script.below(file.len().min(256));
        file[at] = script.u8();
    }
    if kind & 28 == 0 {
        file.truncate(script.below(4096));
    }
    file
}

/// Returns the packets of a file and whether it is complete; `None` if it is not a capture file of Ethernet packets.
fn records(file: &[u8]) -> Option<(Vec<Record>, bool)> {
    let head = file.get(..24)?;
    let word = |big: bool, bytes: &[u8]| {
        let bytes = [bytes[0], bytes[1], bytes[2], bytes[3]];
        if big { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) }
    };
    let (big, unit, head_len) = [false, true].into_iter().find_map(|big| match word(big, head) {
        0xa1b2_c3d4 => Some((big, 1000, 16)),
        0xa1b2_3c4d => Some((big, 1, 16)),
        0xa1b2_cd34 => Some((big, 1000, 24)),
        _ => None,
    })?;
    let version = if big { [0, 2, 0, 4] } else { [2, 0, 4, 0] };
    let link = word(big, &head[20..]);
    if head[4..8] != version || link & 0x03ff_ffff != 1 || link & 0x0400_0000 != 0 && link >> 28 != 0 {
        return None;
    }
    let (mut records, mut rest) = (Vec::new(), &file[24..]);
    while !rest.is_empty() {
        let Some(head) = rest.get(..head_len) else { return Some((records, false)) };
        let len = word(big, &head[8..]);
        let Some(bytes) = rest.get(head_len..head_len + len as usize).filter(|_| len <= MAX_RECORD_LEN)
        else {
            return Some((records, false));
        };
        let time = u64::from(word(big, head)) * 1_000_000_000 + u64::from(word(big, &head[4..])) * unit;
        records.push((time, bytes.to_vec(), word(big, &head[12..])));
        rest = &rest[head_len + len as usize..];
    }
    Some((records, true))
}

/// Reads the file with both functions of the reader.
fn read(file: &[u8], records: &[Record], whole: bool) {
    let mut reader = PcapReader::new(file).unwrap();
    let mut parts = PcapReader::new(file).unwrap();
    let mut buffer = [0; ROOM];
    for (time, bytes, original) in records {
        match reader.next_record(&mut buffer) {
            Ok(Some(record)) => {
                assert_eq!((record.timestamp_ns, record.original_len), (*time, *original));
                assert_eq!(buffer[..record.len], bytes[..]);
            }
            Err(PcapError::BufferTooSmall { expected, .. }) => {
                assert!(expected == bytes.len() && expected > ROOM)
            }
            other => panic!("{other:?}"),
        }
        let record = parts.next_header().unwrap().unwrap();
        assert_eq!((record.timestamp_ns, record.len, record.original_len), (*time, bytes.len(), *original));
        // Some bytes of each packet are read, in two parts. The reader skips the rest.
        let (first, second) = (record.len / 3, record.len / 2);
        let mut read = vec![0; second];
        parts.read_packet(&mut read[..first]).unwrap();
        parts.read_packet(&mut read[first..]).unwrap();
        assert_eq!(read, bytes[..second]);
    }
    for reader in [&mut reader, &mut parts] {
        match reader.next_header() {
            Ok(None) => assert!(whole),
            // A missing end of a packet is only detected when the packet is read.
            Ok(Some(record)) => {
                assert!(!whole && reader.read_packet(&mut vec![0; record.len]).is_err());
            }
            Err(error) => assert!(!whole && !error.to_string().is_empty()),
        }
    }
}

/// Checks that a written capture is read back.
fn write(records: &[Record]) {
    let mut writer = PcapWriter::new(Vec::new(), MAX_RECORD_LEN).unwrap();
    for (time, bytes, _) in records {
        writer.write_parts(*time, bytes.len(), bytes.chunks(700)).unwrap();
    }
    let expected =
        records.iter().map(|(time, bytes, _)| (*time, bytes.clone(), bytes.len() as u32)).collect();
    assert_eq!(self::records(&writer.into_inner()), Some((expected, true)));
}

/// Opens a port on the file and passes it to `then`; returns `None` if the file was refused.
fn open<T>(file: &[u8], repeat: bool, then: impl FnOnce(PcapPort) -> T) -> Option<T> {
    let fd = rustix::fs::memfd_create("capture", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    std::fs::File::from(fd.try_clone().unwrap()).write_all(file).unwrap();
    let input = Some(format!("/proc/self/fd/{}", fd.as_raw_fd()).into());
    match PcapPort::open(&PcapSpec { input, output: None, repeat, overwrite: false }) {
        Ok(port) => Some(then(port)),
        Err(error) => {
            assert!(!error.to_string().is_empty());
            None
        }
    }
}

/// Receives the packets of the file from a port; returns their number.
fn receive(file: &[u8], records: &[Record], whole: bool, repeat: bool) -> usize {
    let (pool, clock) = KEPT
        .take()
        .unwrap_or_else(|| (Pool::new(CHUNKS, 2048, Hugepages::None).unwrap(), StageClock::private()));
    let (mut cache, mut mover, mut clock) = (pool.cache(), Mover::new(), clock);
    let fits = |record: &&Record| (14..=pool.longest()).contains(&record.1.len());
    let expected: Vec<&Record> = records.iter().filter(fits).collect();
    let received = open(file, repeat, |mut port| {
        let stats = StatsPage::new(1 << 16).unwrap();
        let setup = QueueSetup { mover: &mut mover, stats: &stats, binding: Binding::core(), port: "port0" };
        let mut rx = port.rx_queue(0, setup).unwrap();
        let mut received = 0;
        for _ in 0..ROUNDS {
            let mut burst = Burst::new();
            let mut ctx = Context { mover: &mut mover, cache: &mut cache, clock: &mut clock, burst: BURST };
            rx.rx(&mut ctx, &mut burst);
            for packet in burst.drain(..) {
                assert!(repeat || received < expected.len());
                let (_, bytes, _) = expected[received % expected.len()];
                assert!(pool.segments(&packet).flatten().eq(bytes), "packet {received}");
                received += 1;
                cache.free(packet);
            }
        }
        let is_read = received >= expected.len();
        // A truncated packet may end within the reader's buffer, or be too long for the pool.
        assert!(is_read || received >= ROUNDS, "{received} of {}", expected.len());
        if is_read && !repeat && received < ROUNDS * BURST {
            let counters = rx.counters();
            let too_big = records.iter().filter(|record| record.1.len() > pool.longest()).count() as u64;
            let short = records.iter().filter(|record| record.1.len() < 14).count() as u64;
            let end = u64::from(!whole);
            assert!((short..=short + end).contains(&counters.dropped(DropReason::Malformed)));
            assert!((too_big..=too_big + end).contains(&counters.dropped(DropReason::TooBig)));
        }
        assert_eq!(rx.counters().packets(), received as u64);
        assert!(!port.status().is_empty());
        received
    });
    let chunks: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
    assert_eq!(chunks.len(), CHUNKS, "packet buffers are missing");
    cache.free_all(chunks);
    KEPT.set(Some((pool, clock)));
    assert!(
        received.is_some() || repeat && (!whole || records.is_empty()),
        "a file that can be read is opened"
    );
    received.unwrap_or(0)
}
