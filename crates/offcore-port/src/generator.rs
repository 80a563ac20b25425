//! The generator port: its RX side makes probe packets, its TX side checks those that come back.
//!
//! A probe (`offcore_wire::probe`) carries a number and a pattern that can be checked in full. Each RX queue is a
//! stream of its own with a random id, so a sink tells the generators of several queues, ports and processes apart.
//! Within a stream each flow (an IPv4 destination, 198.19.0.0 + flow) has its own numbers, so flows may take different
//! ways. Packets may be given other MAC addresses on their way; everything else is checked.
//!
//! A generator waits for the other side: a packet that there is no room for is not dropped, but sent again. Where there
//! is no other side (yet), its packets are dropped like any other's.
//!
//! Packets that are longer than a packet buffer take several, up to the longest that IPv4 can carry.
//!
//! What a packet costs here is the generator's own work as an application: it is no part of the data path between.

pub mod sequence;
mod sink;
mod source;

use std::hash::{BuildHasher, RandomState};
use std::ops::Add;
use std::sync::{Arc, Mutex, PoisonError};

use offcore_mem::Pool;
use offcore_stats::page::Block;

use crate::base::PortBase;
use crate::spec::{FCS, GenSpec};
use crate::{Port, PortError, QueueSetup, RxCounters, RxQueue, TxQueue, address};

use sink::{Counts, Sink};
use source::Source;

/// What was generated and what came back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GenReport {
    /// Packets generated.
    pub sent: u64,
    /// Probes that came back, duplicates included.
    pub received: u64,
    /// Probes whose content was checked byte for byte.
    pub verified: u64,
    /// Probes that are missing below the highest number that came in their flow.
    pub lost: u64,
    /// Probes that came after one with a higher number. One that comes more than [`sequence::WINDOW`] numbers late
    /// counts here and stays counted as lost.
    pub reordered: u64,
    /// Probes that came more than once, without their first time.
    pub duplicates: u64,
    /// Probes whose content, length or number is not what was sent. One whose number cannot be believed (headers,
    /// length or the number itself changed) does not count as received, and therefore as lost.
    pub corrupt: u64,
    /// Packets that are no probes: not counted anywhere else.
    pub foreign: u64,
    /// Streams of other generators that have come.
    pub others: u64,
}

impl GenReport {
    /// Packets that were sent and have not come back (yet), where a port's own packets, and no others, come back to it.
    pub fn missing(&self) -> Option<u64> {
        let comes_back = self.received > 0 && self.others == 0;
        comes_back.then(|| self.sent.saturating_sub(self.received - self.duplicates.min(self.received)))
    }

    /// Whether everything that came back came once, in order and unchanged, and nothing is lost.
    pub fn is_clean(&self) -> bool {
        self.lost == 0 && self.reordered == 0 && self.duplicates == 0 && self.corrupt == 0
    }
}

/// The counters behind a port's [`GenReport`], for any thread, as long as it likes.
#[derive(Clone, Debug, Default)]
pub struct GenCounters(Arc<Mutex<Queues>>);

#[derive(Debug, Default)]
struct Queues {
    sources: Vec<RxCounters>,
    sinks: Vec<Block>,
}

impl GenCounters {
    /// The sum over the port's queues, as it is now.
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
    /// Id of queue 0's stream; the others count on from it.
    stream: u32,
    counters: GenCounters,
}

impl GenPort {
    /// Opens the port; its packets will be chunks of `pool`.
    ///
    /// # Errors
    /// When the packets would take too many of the pool's packet buffers.
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

    /// What was generated and what came back, so far.
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
        let block = setup.stats.block(&format!("{}/sink{index}", setup.port), &Counts::NAMES)?;
        self.counters.add(|queues| queues.sinks.push(block.clone()));
        Ok(Box::new(Sink::new(&self.spec, (self.stream, self.spec.queues.into()), block, counters)))
    }

    fn status(&self) -> String {
        let report = self.report();
        let GenReport { sent, received, verified, lost, reordered, duplicates, corrupt, foreign, .. } =
            report;
        let mut text = match (received, report.missing()) {
            // Whether anything was to come back is not known here, and so neither is what is lost.
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
