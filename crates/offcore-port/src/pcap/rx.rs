//! The receiving half of a pcap port.

use std::fs::File;
use std::io::{self, BufReader, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use offcore_mem::{Burst, HEADROOM, Packet, Pool};
use offcore_stats::Stage;
use offcore_wire::ethernet;
use offcore_wire::pcap::{MAX_RECORD_LEN, PcapError, PcapReader, Record};

use super::{FileState, reason};
use crate::{Context, DropReason, RxCounters, RxQueue, Wake, hand_over, room};

/// Where the records of a capture file begin.
const RECORDS: u64 = 24;

type Input = PcapReader<BufReader<Arc<File>>>;

/// The file that is received from.
#[derive(Debug)]
pub(super) struct Source {
    reader: Input,
    /// A packet whose header was read when there were no packet buffers for it.
    waiting: Option<Record>,
    /// The reader's file; of use only when the file is repeated.
    file: Arc<File>,
    repeat: bool,
    state: Arc<FileState>,
}

impl Source {
    /// Opens the file; one that is to be repeated is read once.
    pub(super) fn open(path: &Path, repeat: bool, state: Arc<FileState>) -> Result<Self, PcapError> {
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
pub(super) struct PcapRx {
    /// `None`: no file, or it is used up.
    source: Option<Source>,
    /// Received, and taken back because the other side had no room.
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

    /// The file cannot be read on.
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
                Ok(Some(record)) => record,
                Ok(None) if rewound => {
                    self.end("it has no packets that can be received");
                    break;
                }
                Ok(None) => {
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
