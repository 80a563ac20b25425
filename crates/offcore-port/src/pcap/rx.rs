//! The receiving half of a pcap port.

use std::fs::File;
use std::io::{self, BufReader, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use offcore_mem::{Burst, HEADROOM, Packet, Pool};
use offcore_stats::Stage;
use offcore_wire::ethernet;
use offcore_wire::pcap::{FILE_HEADER_LEN, MAX_RECORD_LEN, PcapError, PcapReader, PcapRecord};

use super::pipe::{PipeReader, is_pipe};
use super::{FileState, reason};
use crate::{Context, DropReason, RxCounters, RxQueue, Wake, hand_over, room};

/// The file that packets are read from.
#[derive(Debug)]
pub(super) struct Source {
    reader: Reader,
    /// A packet whose header was read before all packet buffers or all data for it were available.
    waiting: Option<PcapRecord>,
    /// The reader's file, if it is repeated.
    repeated: Option<Arc<File>>,
    state: Arc<FileState>,
}

#[derive(Debug)]
enum Reader {
    File(PcapReader<BufReader<Arc<File>>>),
    Pipe(PcapReader<PipeReader>),
    /// A pipe whose file header has not arrived yet.
    Begun(Option<PipeReader>),
}

/// The next item of a capture.
enum Next {
    Record(PcapRecord),
    /// The next packet has not arrived yet.
    Later,
    End,
}

impl Source {
    /// Opens the file. A file that is repeated is read once to check it.
    pub(super) fn open(path: &Path, repeat: bool, state: Arc<FileState>) -> Result<Self, PcapError> {
        if is_pipe(path) {
            if repeat {
                return Err(
                    io::Error::other("it is a pipe: expected a file, for it is to be repeated").into()
                );
            }
            let reader = Reader::Begun(Some(PipeReader::open(path)?));
            state.waiting.store(true, Ordering::Relaxed);
            return Ok(Self { reader, waiting: None, repeated: None, state });
        }
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
            (&*file).seek(SeekFrom::Start(FILE_HEADER_LEN as u64))?;
        }
        let reader = Reader::File(reader);
        Ok(Self { reader, waiting: None, repeated: repeat.then_some(file), state })
    }

    /// Returns the next packet to receive.
    fn next(&mut self) -> Result<Next, PcapError> {
        if let Reader::Begun(begun) = &mut self.reader
            && let Some(mut pipe) = begun.take()
        {
            if !pipe.has(FILE_HEADER_LEN)? {
                *begun = Some(pipe);
                return Ok(Next::Later);
            }
            self.reader = Reader::Pipe(PcapReader::new(pipe)?);
        }
        let next = match &mut self.reader {
            _ if self.waiting.is_some() => self.waiting.take(),
            Reader::File(reader) => reader.next_header()?,
            Reader::Pipe(reader) => {
                // The unread rest of the previous packet comes first.
                let wanted = reader.left() + reader.record_header_len();
                if !reader.input().has(wanted)? {
                    return Ok(Next::Later);
                }
                reader.next_header()?
            }
            Reader::Begun(_) => None,
        };
        let Some(record) = next else { return Ok(Next::End) };
        if let Reader::Pipe(reader) = &mut self.reader
            && !reader.input().has(record.len)?
        {
            self.waiting = next;
            return Ok(Next::Later);
        }
        Ok(Next::Record(record))
    }

    /// Reads the record into the buffers of `packet`, which has the same length.
    fn read(&mut self, record: &PcapRecord, packet: &mut Packet, pool: &Pool) -> Result<(), PcapError> {
        if (record.len as u64) < record.original_len.into() {
            self.state.cut.fetch_add(1, Ordering::Relaxed);
        }
        if !packet.is_segmented() {
            return self.read_part(packet.bytes_mut());
        }
        pool.segments_mut(packet).try_for_each(|part| self.read_part(part))
    }

    fn read_part(&mut self, part: &mut [u8]) -> Result<(), PcapError> {
        match &mut self.reader {
            Reader::File(reader) => reader.read_packet(part),
            Reader::Pipe(reader) => reader.read_packet(part),
            Reader::Begun(_) => Ok(()),
        }
    }

    /// Returns to the first packet if the file is repeated.
    ///
    /// At the end of the file the reader's buffer is empty, so the next read starts at the file's new position.
    fn rewind(&mut self) -> io::Result<bool> {
        if let Some(mut file) = self.repeated.as_deref() {
            file.seek(SeekFrom::Start(FILE_HEADER_LEN as u64))?;
        }
        Ok(self.repeated.is_some())
    }
}

#[derive(Debug)]
pub(super) struct PcapRx {
    /// `None` without a file, and after its last packet.
    source: Option<Source>,
    /// Packets that were returned by `rx` and taken back, because the other side had no room.
    back: Burst,
    counters: RxCounters,
}

impl PcapRx {
    pub(super) fn new(source: Option<Source>, counters: RxCounters) -> Self {
        Self { source, back: Burst::new(), counters }
    }

    #[cold]
    fn end(&mut self, why: impl ToString) {
        if let Some(source) = self.source.take() {
            source.state.end(why);
        }
    }

    /// The rest of the file cannot be read.
    #[cold]
    fn damaged(&mut self, error: PcapError) {
        self.counters.drop(DropReason::Malformed, 1);
        self.fail(reason(error));
    }

    #[cold]
    fn fail(&mut self, why: impl ToString) {
        if let Some(source) = self.source.take() {
            source.state.fail(why);
        }
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
                Ok(Next::Record(record)) => record,
                Ok(Next::Later) => break,
                Ok(Next::End) if rewound => {
                    self.end("it has no packets that can be received");
                    break;
                }
                Ok(Next::End) => {
                    match source.rewind() {
                        Ok(true) => rewound = true,
                        Ok(false) => self.end("read to its end"),
                        Err(error) => self.fail(error),
                    }
                    continue;
                }
                Err(error) => {
                    self.damaged(error);
                    break;
                }
            };
            // The reader skips the unread bytes of a packet.
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

    /// The next packet of a file is always available. After the last one, the worker still has to poll the output file.
    fn arm(&mut self) -> Wake<'_> {
        let is_file = self.source.as_ref().is_some_and(|source| matches!(source.reader, Reader::File(_)));
        if is_file || !self.back.is_empty() { Wake::Now } else { Wake::Poll }
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
