//! The generator port: its RX side generates probe packets, and its TX side checks probes that come back.
//!
//! A probe (`offcore_wire::probe`) carries a number and a pattern that allows checking all its bytes. Each RX queue is
//! a stream with its own random id, so that a sink distinguishes the streams of several queues, ports and processes.
//! Within a stream, each flow (an IPv4 destination, 198.19.0.0 + flow) has its own numbers, so flows may take different
//! paths. MAC addresses may be rewritten on the way; everything else is checked.
//!
//! A generator loses nothing by waiting: a packet that the other side has no room for is not dropped, but sent again.
//! If no other side is connected, its packets are dropped like those from any other port.
//!
//! Packets that are longer than a packet buffer take several buffers, up to the longest packet that IPv4 can carry.
//!
//! The time that packets cost here is the generator's work as an application. It is not part of the data path between
//! generators.

pub mod sequence;
mod sink;
mod source;

use std::hash::{BuildHasher, RandomState};
use std::ops::Add;
use std::sync::{Arc, Mutex, PoisonError};

use offcore_mem::Pool;
use offcore_stats::Label;
use offcore_stats::page::Block;

use crate::base::PortBase;
use crate::spec::{FCS, GenSpec};
use crate::{Port, PortError, QueueSetup, RxCounters, RxQueue, TxQueue, address};

use sink::{Counts, SINK, Sink};
use source::Source;

/// Counters of generated and returned packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GenReport {
    /// Packets generated.
    pub sent: u64,
    /// Probes that came back, including duplicates.
    pub received: u64,
    /// Probes whose content was checked byte by byte.
    pub verified: u64,
    /// Probes missing below the highest number received in their flow.
    pub lost: u64,
    /// Probes received after a probe with a higher number. A probe that is more than [`sequence::WINDOW`] numbers late
    /// is counted here and remains counted as lost.
    pub reordered: u64,
    /// Probes received again after their first reception.
    pub duplicates: u64,
    /// Probes whose content, length or number differs from the sent one. A probe whose number is unreliable (headers,
    /// length or the number itself changed) is not counted as received, and is therefore counted as lost.
    pub corrupt: u64,
    /// Packets that are not probes. No other counter includes them.
    pub foreign: u64,
    /// Received streams of other generators.
    pub others: u64,
}

impl GenReport {
    /// Returns the number of packets sent that have not come back yet. `None` unless the port receives its own packets,
    /// and no others.
    pub fn missing(&self) -> Option<u64> {
        let comes_back = self.received > 0 && self.others == 0;
        comes_back.then(|| self.sent.saturating_sub(self.received - self.duplicates.min(self.received)))
    }

    /// Returns whether all probes that came back came back once, in order and unchanged, without gaps.
    pub fn is_clean(&self) -> bool {
        self.lost == 0 && self.reordered == 0 && self.duplicates == 0 && self.corrupt == 0
    }
}

/// The counters behind a port's [`GenReport`]. Any thread may read them, even after the port is closed.
#[derive(Clone, Debug, Default)]
pub struct GenCounters(Arc<Mutex<Queues>>);

#[derive(Debug, Default)]
struct Queues {
    sources: Vec<RxCounters>,
    sinks: Vec<Block>,
}

impl GenCounters {
    /// Returns the present sum over the port's queues.
    pub fn report(&self) -> GenReport {
        let queues = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Counts { received, verified, lost, reordered, duplicates, corrupt, foreign, others } =
            queues.sinks.iter().map(Counts::read).fold(Counts::default(), Add::add);
        let sent = queues.sources.iter().map(RxCounters::packets).sum();
        GenReport { sent, received, verified, lost, reordered, duplicates, corrupt, foreign, others }
    }

    fn add(&self, change: impl FnOnce(&mut Queues)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// A generator port.
#[derive(Debug)]
pub struct GenPort {
    base: PortBase,
    spec: GenSpec,
    /// Id of queue 0's stream; the other queues use the following ids.
    stream: u32,
    counters: GenCounters,
}

impl GenPort {
    /// Opens the port. Its packets are chunks of `pool`.
    ///
    /// # Errors
    /// If the packets would take too many of the pool's packet buffers.
    pub fn open(spec: &GenSpec, pool: &Pool) -> Result<Self, PortError> {
        let name = spec.to_string();
        let most = pool.longest() + FCS;
        if spec.size > most {
            let (found, chunks, room) = (spec.size, pool.chunks(), pool.data_room());
            let expected = format!(
                "size={found}: expected at most {most} with {chunks} packet buffers of {room} bytes, a quarter of which \
                 a packet may take: use more (--mbufs) or larger ones (--mbuf-size)"
            );
            return Err(PortError::Syntax { found: name, expected });
        }
        Ok(Self {
            base: PortBase::new(name.clone(), address::derived(&name), spec.queues),
            spec: spec.clone(),
            #[allow(clippy::cast_possible_truncation, reason = "any 24 random bits will do")]
            stream: RandomState::new().hash_one("stream") as u32 & sink::MAX_STREAM,
            counters: GenCounters::default(),
        })
    }

    /// The port's counters.
    pub fn counters(&self) -> GenCounters {
        self.counters.clone()
    }

    /// Returns the packets generated and received so far.
    pub fn report(&self) -> GenReport {
        self.counters.report()
    }
}

impl Port for GenPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let counters = self.base.take_rx(index, &setup)?;
        let stream = (self.stream + u32::from(index)) & sink::MAX_STREAM;
        let source = Source::new(&self.spec, index, stream, self.base.mac, counters.clone())
            .map_err(|e| PortError::Other { port: self.base.name.clone(), reason: e.to_string() })?;
        self.counters.add(|queues| queues.sources.push(counters));
        Ok(Box::new(source))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let counters = self.base.take_tx(index, &setup)?;
        let block = setup.stats.block(&SINK, &[(Label::Port, &setup.port), (Label::Queue, &index)])?;
        self.counters.add(|queues| queues.sinks.push(block.clone()));
        Ok(Box::new(Sink::new(&self.spec, (self.stream, self.spec.queues.into()), block, counters)))
    }

    fn status(&self) -> String {
        let report = self.report();
        let GenReport { sent, received, verified, lost, reordered, duplicates, corrupt, foreign, .. } =
            report;
        let mut text = match (received, report.missing()) {
            // It is unknown whether packets should come back, so none can be reported as lost.
            (0, _) => format!("{sent} sent, nothing received"),
            (_, Some(missing)) => {
                format!("{sent} sent, {received} received ({verified} verified), {missing} lost")
            }
            (_, None) => format!(
                "{sent} sent; {received} of others received ({verified} verified), {lost} lost between"
            ),
        };
        let rare = [
            (reordered, "reordered"),
            (duplicates, "duplicates"),
            (corrupt, "corrupt"),
            (foreign, "foreign"),
        ];
        for (packets, what) in rare.into_iter().filter(|(packets, _)| *packets > 0) {
            text += &format!(", {packets} {what}");
        }
        text
    }
}
