//! The pcap port: receives the packets of one capture file, writes what is sent to another.
//!
//! It reads and writes files in its bursts, which may block the worker: good for tests and for looking at traffic, not
//! for rates. What is written reaches the file when the port has been idle for a while, and when it is stopped.
//!
//! The file waits for the other side: a packet that there is no room for is received again.
//!
//! Packets may be as long as capture files have them, 256 KiB: those longer than a packet buffer take several. One that
//! was cut when it was captured is received as far as the file has it.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use offcore_mem::{Burst, HEADROOM, Packet, Pool};
use offcore_stats::Stage;
use offcore_wire::ethernet::{self};
use offcore_wire::pcap::{MAX_RECORD_LEN, PcapError, PcapReader, PcapWriter, Record};

use crate::base::PortBase;
use crate::spec::PcapSpec;
use crate::{
    Accepts, Context, DropReason, Port, PortError, QueueSetup, RxCounters, RxQueue, TxCounters, TxQueue,
    Wake, address, hand_over, room,
};

/// Where the records of a capture file begin.
const RECORDS: u64 = 24;
/// Rounds without a packet after which what was written is handed to the file.
const IDLE_ROUNDS: u32 = 1024;

type Input = PcapReader<BufReader<Arc<File>>>;
type Output = PcapWriter<BufWriter<File>>;

/// A pcap port. It has one queue pair.
#[derive(Debug)]
pub struct PcapPort {
    base: PortBase,
    source: Option<Source>,
    sink: Option<Sink>,
    input: Arc<FileState>,
    output: Arc<FileState>,
}

/// A file as the status line shows it.
#[derive(Debug)]
struct FileState {
    path: Option<PathBuf>,
    /// Why it is not used any more; written once, by the worker.
    end: Mutex<Option<String>>,
    /// Packets received that were longer once.
    cut: AtomicU64,
}

impl FileState {
    fn new(path: Option<PathBuf>) -> Arc<Self> {
        Arc::new(Self { path, end: Mutex::new(None), cut: AtomicU64::new(0) })
    }

    #[cold]
    fn end(&self, why: impl ToString) {
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.to_string());
    }

    fn describe(&self) -> String {
        let Some(path) = &self.path else { return "none".into() };
        let cut = match self.cut.load(Ordering::Relaxed) {
            0 => String::new(),
            packets => format!(", {packets} packets were cut when they were captured"),
        };
        match &*self.end.lock().unwrap_or_else(PoisonError::into_inner) {
            None => format!("{}{cut}", path.display()),
            Some(why) => format!("{} ({why}){cut}", path.display()),
        }
    }
}

impl PcapPort {
    /// Opens the files; the output is made anew.
    ///
    /// # Errors
    /// A file that cannot be opened, or an input that is not a capture file of Ethernet packets. An input that is to be
    /// repeated is read once to its end, so a damaged or empty one is refused too.
    pub fn open(spec: &PcapSpec) -> Result<Self, PortError> {
        let name = spec.to_string();
        let fail = |path: &Path, error: PcapError| match error {
            PcapError::Io(source) => {
                PortError::System { port: name.clone(), what: format!("file '{}'", path.display()), source }
            }
            other => {
                PortError::Other { port: name.clone(), reason: format!("file '{}': {other}", path.display()) }
            }
        };
        let input = FileState::new(spec.input.clone());
        let source = match &spec.input {
            None => None,
            Some(path) => {
                Some(Source::open(path, spec.repeat, Arc::clone(&input)).map_err(|e| fail(path, e))?)
            }
        };
        let output = FileState::new(spec.output.clone());
        let sink = match &spec.output {
            None => None,
            Some(path) => Some(Sink::open(path, Arc::clone(&output)).map_err(|e| fail(path, e))?),
        };
        let base = PortBase::new(name.clone(), address::derived(&name), 1);
        Ok(Self { base, source, sink, input, output })
    }
}

impl Port for PcapPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let counters = self.base.take_rx(index, &setup)?;
        Ok(Box::new(PcapRx { source: self.source.take(), back: Burst::new(), counters }))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let counters = self.base.take_tx(index, &setup)?;
        Ok(Box::new(PcapTx { sink: self.sink.take(), without: DropReason::Down, counters }))
    }

    fn status(&self) -> String {
        format!("input {}, output {}", self.input.describe(), self.output.describe())
    }
}

/// What is wrong, in words.
fn reason(error: PcapError) -> String {
    match error {
        PcapError::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

/// The file that is received from.
#[derive(Debug)]
struct Source {
    reader: Input,
    /// A packet whose header was read when there were no packet buffers for it.
    waiting: Option<Record>,
    /// The reader's file; of use only when the file is repeated.
    file: Arc<File>,
    repeat: bool,
    state: Arc<FileState>,
}

impl Source {
    fn open(path: &Path, repeat: bool, state: Arc<FileState>) -> Result<Self, PcapError> {
        let file = Arc::new(File::open(path)?);
        let mut reader = PcapReader::new(BufReader::new(Arc::clone(&file)))?;
        if repeat {
            let mut buffer = vec![0; MAX_RECORD_LEN as usize];
            let mut records = 0u64;
            while reader.next_record(&mut buffer)?.is_some() {
                records += 1;
            }
            if records == 0 {
                return Err(io::Error::other("it has no packets that could be repeated").into());
            }
            (&*file).seek(SeekFrom::Start(RECORDS))?;
        }
        Ok(Self { reader, waiting: None, file, repeat, state })
    }

    /// The packet to be received next; `None` at the end of the file.
    fn next(&mut self) -> Result<Option<Record>, PcapError> {
        match self.waiting.take() {
            None => self.reader.next_header(),
            waiting => Ok(waiting),
        }
    }

    /// Reads it into the buffers of `packet`, which is as long.
    fn read(&mut self, record: &Record, packet: &mut Packet, pool: &Pool) -> Result<(), PcapError> {
        if (record.len as u64) < record.original_len.into() {
            self.state.cut.fetch_add(1, Ordering::Relaxed);
        }
        if !packet.is_segmented() {
            return self.reader.read_packet(packet.bytes_mut());
        }
        pool.segments_mut(packet).try_for_each(|part| self.reader.read_packet(part))
    }

    /// Goes back to the first packet, if the file is to be repeated.
    ///
    /// At the file's end the buffer in between is empty, so what it reads next comes from the file's new position.
    fn rewind(&mut self) -> io::Result<bool> {
        if self.repeat {
            (&*self.file).seek(SeekFrom::Start(RECORDS))?;
        }
        Ok(self.repeat)
    }
}

#[derive(Debug)]
struct PcapRx {
    /// `None`: no file, or it is used up.
    source: Option<Source>,
    /// Received, and taken back because the other side had no room.
    back: Burst,
    counters: RxCounters,
}

impl PcapRx {
    #[cold]
    fn end(&mut self, why: impl ToString) {
        if let Some(source) = self.source.take() {
            source.state.end(why);
        }
    }

    /// The file cannot be read on.
    #[cold]
    fn damaged(&mut self, error: PcapError) {
        self.counters.drop(DropReason::Malformed, 1);
        self.end(reason(error));
    }
}

impl RxQueue for PcapRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if !self.back.is_empty() {
            return hand_over(&mut self.back, burst);
        }
        let (pool, wanted) = (ctx.cache.pool(), room(ctx, burst));
        let (mut packets, mut bytes, mut rewound) = (0, 0, false);
        while packets < wanted {
            let Some(source) = &mut self.source else { break };
            let record = match source.next() {
                Ok(Some(record)) => record,
                Ok(None) if rewound => {
                    self.end("it has no packets that can be received");
                    break;
                }
                Ok(None) => {
                    match source.rewind() {
                        Ok(true) => rewound = true,
                        Ok(false) => self.end("read to its end"),
                        Err(error) => self.end(error),
                    }
                    continue;
                }
                Err(error) => {
                    self.damaged(error);
                    break;
                }
            };
            // What is not read of a packet is passed over.
            if record.len < ethernet::HEADER_LEN {
                self.counters.drop(DropReason::Malformed, 1);
                continue;
            }
            if record.len > pool.longest() {
                self.counters.drop(DropReason::TooBig, 1);
                continue;
            }
            let Some(mut packet) = ctx.cache.take_chain(HEADROOM, record.len) else {
                source.waiting = Some(record);
                self.counters.starved(1);
                break;
            };
            if let Err(error) = source.read(&record, &mut packet, pool) {
                self.damaged(error);
                ctx.cache.free(packet);
                break;
            }
            burst.push(packet);
            (packets, bytes, rewound) = (packets + 1, bytes + record.len as u64, false);
        }
        if packets > 0 {
            self.counters.add(packets as u64, bytes);
            ctx.clock.lap(Stage::Rx);
        }
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }

    /// The next packet is always there. Once none is, the file that is sent to still wants its rounds.
    fn arm(&mut self) -> Wake<'_> {
        if self.source.is_some() || !self.back.is_empty() { Wake::Now } else { Wake::Poll }
    }

    fn drain(&mut self, _ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        hand_over(&mut self.back, burst);
        self.back.len()
    }

    fn take_back(&mut self, burst: &mut Burst) {
        hand_over(burst, &mut self.back);
    }

    fn waits(&self) -> bool {
        true
    }
}

/// The file that is sent to.
#[derive(Debug)]
struct Sink {
    writer: Output,
    /// Rounds since the last packet; at [`IDLE_ROUNDS`] nothing is left to be handed over.
    idle: u32,
    state: Arc<FileState>,
}

impl Sink {
    fn open(path: &Path, state: Arc<FileState>) -> Result<Self, PcapError> {
        let mut writer =
            PcapWriter::new(BufWriter::with_capacity(1 << 16, File::create(path)?), MAX_RECORD_LEN)?;
        writer.flush()?;
        Ok(Self { writer, idle: IDLE_ROUNDS, state })
    }
}

#[derive(Debug)]
struct PcapTx {
    /// `None`: no file, or it cannot be written any more.
    sink: Option<Sink>,
    /// Why packets are dropped when there is no file.
    without: DropReason,
    counters: TxCounters,
}

impl PcapTx {
    fn check(&mut self, result: Result<(), PcapError>) -> bool {
        let Err(error) = result else { return true };
        if let Some(sink) = self.sink.take() {
            sink.state.end(reason(error));
            self.without = DropReason::Failed;
        }
        false
    }

    fn flush(&mut self) {
        let result = self.sink.as_mut().map_or(Ok(()), |sink| sink.writer.flush());
        self.check(result);
    }
}

impl TxQueue for PcapTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if burst.is_empty() {
            return;
        }
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX);
        let pool = ctx.cache.pool();
        let (mut packets, mut bytes) = (0, 0);
        for packet in burst.iter() {
            let Some(sink) = &mut self.sink else { break };
            sink.idle = 0;
            let len = pool.total_len(packet);
            let result = sink.writer.write_parts(now, len, pool.segments(packet));
            if self.check(result) {
                (packets, bytes) = (packets + 1, bytes + len as u64);
            }
        }
        self.counters.add(packets, bytes);
        self.counters.drop(self.without, burst.len() as u64 - packets);
        ctx.cache.free_all(burst.drain(..));
        ctx.clock.lap(Stage::Tx);
    }

    fn poll(&mut self, _ctx: &mut Context<'_>) {
        let Some(sink) = &mut self.sink else { return };
        if sink.idle == IDLE_ROUNDS {
            return;
        }
        sink.idle += 1;
        if sink.idle == IDLE_ROUNDS {
            self.flush();
        }
    }

    fn accepts(&self) -> Accepts {
        Accepts { segments: true, ..Accepts::default() }
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }

    fn stop(&mut self, _ctx: &mut Context<'_>) -> bool {
        self.flush();
        true
    }
}
