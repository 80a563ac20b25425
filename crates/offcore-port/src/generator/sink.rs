//! The checking half: checks that each probe arrives once, in order and unchanged.

use offcore_mem::{Burst, Packet, Pool};
use offcore_ring::prefetch;
use offcore_stats::page::Block;
use offcore_stats::{Family, Stage, counters};
use offcore_wire::probe::{self, ProbeError, ProbeHeader};
use offcore_wire::template::UDP_HEADERS_LEN;

use super::sequence::{Arrival, Sequence};
use crate::spec::GenSpec;
use crate::{Accepts, Context, TxCounters, TxQueue};

/// Number of low bits of a probe's fill that select its content; the bits above are the stream id.
pub(super) const FILL_BITS: u32 = 8;
/// The highest stream id.
pub(super) const MAX_STREAM: u32 = u32::MAX >> FILL_BITS;
/// Number of streams that one sink distinguishes: probes of further streams are foreign.
const MAX_STREAMS: usize = 256;
/// Number of flows that one sink tracks, over all streams (36 MB): probes of further flows are foreign.
const MAX_SEQUENCES: usize = 1 << 18;
/// Prefetch distance in packets.
const AHEAD: usize = 4;
/// Offset of the low half of the IPv4 destination, which is the flow.
const FLOW: usize = 32;

/// One TX queue of a generator.
#[derive(Debug)]
pub(super) struct Sink {
    /// Each stream's id and flows. It grows when a stream or flow appears for the first time.
    streams: Vec<(u32, Vec<Sequence>)>,
    /// The first stream id of the sink's port, and the number of its streams.
    own: (u32, u32),
    /// Index of the last probe's stream.
    recent: usize,
    /// Number of flows of a new stream.
    flows: usize,
    verify: u32,
    /// Number of probes until the next one is verified.
    until_verify: u32,
    counts: Counts,
    /// A packet of several buffers, joined.
    whole: Vec<u8>,
    block: Block,
    counters: TxCounters,
}

counters! {
    /// Counters of a sink, or the contribution of one burst to them.
    pub(super) struct Counts {
        /// Probes received, including duplicates.
        received: Packets,
        /// Probes whose content was compared byte for byte.
        verified: Packets,
        /// Missing probes. The counter wraps below 0 if probes counted as lost earlier arrive late.
        lost: Packets gauge,
        /// Probes that arrived after a probe of their flow with a higher number.
        reordered: Packets,
        /// Probes that arrived again.
        duplicates: Packets,
        /// Probes whose content, length or number differs from the probe that was sent.
        corrupt: Packets,
        /// Packets of no generator.
        foreign: Packets,
        /// Streams of other ports.
        others: Events,
    }
}

/// The counters of a sink.
pub(super) static SINK: Family =
    Family::new("sink", "Checks of the probes that a queue sends to a generator.", &[&Counts::COUNTERS]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// The content is as sent, or was not checked.
    Good,
    /// The content behind the headers was changed: the number is still reliable.
    PayloadDamaged,
    /// The headers were changed.
    HeaderDamaged,
}

/// Why a probe's number is not evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unknown {
    /// The headers are damaged, or the flow is new and the content was changed.
    Damaged,
    /// The sink's limit of streams or flows is reached.
    TooMany,
}

impl Sink {
    pub(super) fn new(spec: &GenSpec, own: (u32, u32), block: Block, counters: TxCounters) -> Self {
        Self {
            own,
            streams: Vec::with_capacity(MAX_STREAMS),
            recent: 0,
            flows: spec.flows as usize,
            verify: spec.verify,
            until_verify: 1,
            counts: Counts::default(),
            whole: Vec::new(),
            block,
            counters,
        }
    }

    /// Checks a packet of several buffers; returns its length.
    #[cold]
    fn check_several(&mut self, packet: &Packet, pool: &Pool) -> usize {
        let mut whole = std::mem::take(&mut self.whole);
        whole.clear();
        for part in pool.segments(packet) {
            // copy-ok: a packet at its final destination, joined for checking
            whole.extend_from_slice(part);
        }
        self.check(&whole);
        let len = whole.len();
        self.whole = whole;
        len
    }

    #[inline]
    fn check(&mut self, frame: &[u8]) {
        let header = match probe::check_header(frame) {
            Ok(header) => header,
            Err(ProbeError::Length { .. }) => {
                self.counts.corrupt += 1;
                return;
            }
            Err(_) => {
                self.counts.foreign += 1;
                return;
            }
        };
        let content = self.content(frame);
        let flow = u16::from_be_bytes([frame[FLOW], frame[FLOW + 1]]);
        let arrival = match content {
            Content::HeaderDamaged => Err(Unknown::Damaged),
            _ => self.sequence(header, flow.into(), frame).map(|sequence| sequence.arrive(header.sequence)),
        };
        let damaged =
            content != Content::Good || matches!(arrival, Ok(Arrival::Implausible) | Err(Unknown::Damaged));
        self.counts.corrupt += u64::from(damaged);
        match arrival {
            Ok(arrival) => self.count(arrival),
            Err(Unknown::Damaged) => {}
            Err(Unknown::TooMany) => self.counts.foreign += 1,
        }
    }

    #[inline]
    fn count(&mut self, arrival: Arrival) {
        let counts = &mut self.counts;
        counts.received += 1;
        match arrival {
            Arrival::InOrder => {}
            Arrival::Ahead(gap) => counts.lost = counts.lost.wrapping_add(gap),
            Arrival::Late => {
                counts.reordered += 1;
                counts.lost = counts.lost.wrapping_sub(1);
            }
            Arrival::TooOld => counts.reordered += 1,
            Arrival::Duplicate => counts.duplicates += 1,
            Arrival::Implausible => counts.received -= 1,
        }
    }

    /// Checks the content, if it is this probe's turn.
    #[inline]
    fn content(&mut self, frame: &[u8]) -> Content {
        if self.verify == 0 {
            return Content::Good;
        }
        self.until_verify -= 1;
        if self.until_verify > 0 {
            return Content::Good;
        }
        self.until_verify = self.verify;
        self.counts.verified += 1;
        match probe::check_content(frame) {
            Ok(()) => Content::Good,
            Err(ProbeError::Content(at)) if at.offset >= UDP_HEADERS_LEN => Content::PayloadDamaged,
            Err(_) => Content::HeaderDamaged,
        }
    }

    #[inline]
    fn sequence(&mut self, header: ProbeHeader, flow: usize, frame: &[u8]) -> Result<&mut Sequence, Unknown> {
        let stream = header.fill >> FILL_BITS;
        let known = |(id, flows): &(u32, Vec<Sequence>)| *id == stream && flow < flows.len();
        if !self.streams.get(self.recent).is_some_and(known) {
            self.recent = self.find(stream, flow, frame)?;
        }
        Ok(&mut self.streams[self.recent].1[flow])
    }

    /// Returns the index of the stream, and makes sure that it has the flow. New streams and flows are added, unless
    /// the probe is damaged.
    #[cold]
    fn find(&mut self, stream: u32, flow: usize, frame: &[u8]) -> Result<usize, Unknown> {
        let index = self.streams.iter().position(|(id, _)| *id == stream).unwrap_or(self.streams.len());
        let present = self.streams.get(index).map_or(0, |(_, flows)| flows.len());
        if flow < present {
            return Ok(index);
        }
        if probe::check_content(frame).is_err() {
            return Err(Unknown::Damaged);
        }
        let wanted = (flow + 1).next_power_of_two().max(self.flows);
        let sequences = self.streams.iter().map(|(_, flows)| flows.len()).sum::<usize>() - present + wanted;
        if index == MAX_STREAMS || sequences > MAX_SEQUENCES {
            return Err(Unknown::TooMany);
        }
        if index == self.streams.len() {
            self.streams.push((stream, Vec::new()));
            let (first, count) = self.own;
            self.counts.others += u64::from(stream.wrapping_sub(first) & MAX_STREAM >= count);
        }
        self.streams[index].1.resize(wanted, Sequence::default());
        Ok(index)
    }
}

impl TxQueue for Sink {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if burst.is_empty() {
            return;
        }
        let pool = ctx.cache.pool();
        let mut bytes = 0;
        for index in 0..burst.len() {
            if let Some(ahead) = burst.get(index + AHEAD) {
                prefetch::read(ahead.data().as_ptr());
            }
            let packet = &burst[index];
            if packet.is_segmented() {
                bytes += self.check_several(packet, pool) as u64;
                continue;
            }
            let frame = packet.bytes();
            bytes += frame.len() as u64;
            self.check(frame);
        }
        self.counters.add(burst.len() as u64, bytes);
        std::mem::take(&mut self.counts).add_to(&self.block);
        ctx.cache.free_all(burst.drain(..));
        ctx.clock.lap(Stage::Tx);
    }

    fn accepts(&self) -> Accepts {
        Accepts { segments: true, ..Accepts::default() }
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }
}
