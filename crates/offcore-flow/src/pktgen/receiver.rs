//! The receiver: checks that each packet arrives once, in order and unchanged, and measures its latency.

use std::sync::Arc;

use offcore_mem::{Burst, Packet, Pool};
use offcore_port::generator::sequence::{Arrival, Sequence};
use offcore_port::{Context, RxCounters, RxQueue};
use offcore_stats::page::Block;
use offcore_stats::{Family, Histogram, Stage, counters, tsc};
use offcore_wire::ethernet::FCS_LEN;
use offcore_wire::stamp::{self, DUE_RANGE, Stamp, StampError};

use super::control::Handover;
use super::source::MAX_FLOWS;

/// The packets that a receiver expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// Packets of a stream. All other packets are foreign.
    Stream(u16),
    /// Any packets. They are only counted.
    Anything,
    /// No packets. All packets are foreign.
    Nothing,
}

/// Receives from one port.
#[derive(Debug)]
pub(super) struct Receiver {
    queues: Vec<Box<dyn RxQueue>>,
    check: Check,
    latencies: Histogram,
    handover: Arc<Handover>,
    counters: Block,
}

impl Receiver {
    /// Creates a receiver that verifies the content of one packet in `verify`, or of none if `verify` is 0.
    pub(super) fn new(
        queues: Vec<Box<dyn RxQueue>>,
        expected: Expected,
        verify: u32,
        handover: Arc<Handover>,
        counters: Block,
    ) -> Self {
        let check = Check::new(expected, verify);
        Self { queues, check, latencies: Histogram::new(), handover, counters }
    }

    /// Returns the counters of the port's RX queues.
    pub(super) fn rx_counters(&self) -> Vec<RxCounters> {
        self.queues.iter().map(|queue| queue.counters().clone()).collect()
    }

    /// Receives a burst from each queue. Returns the number of packets.
    #[inline]
    pub(super) fn round(&mut self, ctx: &mut Context<'_>) -> usize {
        let mut packets = 0;
        for queue in &mut self.queues {
            let mut burst = Burst::new();
            queue.rx(ctx, &mut burst);
            if !burst.is_empty() {
                packets += burst.len();
                self.check.burst(&burst, ctx.cache.pool(), tsc::now(), &mut self.latencies);
                ctx.cache.free_all(burst.drain(..));
                std::mem::take(&mut self.check.counts).add_to(&self.counters);
                ctx.clock.lap(Stage::Application);
            }
        }
        self.handover.answer(&mut self.latencies);
        packets
    }

    /// Receives packets in flight. Returns the number of packets that are still in flight.
    pub(super) fn drain(&mut self, ctx: &mut Context<'_>) -> usize {
        let mut left = 0;
        for queue in &mut self.queues {
            let mut burst = Burst::new();
            left += queue.drain(ctx, &mut burst) + burst.len();
            self.check.burst(&burst, ctx.cache.pool(), tsc::now(), &mut self.latencies);
            ctx.cache.free_all(burst.drain(..));
        }
        std::mem::take(&mut self.check.counts).add_to(&self.counters);
        self.handover.answer(&mut self.latencies);
        left
    }
}

/// Receive state of one flow.
#[derive(Clone, Debug, Default)]
struct Flow {
    sequence: Sequence,
    /// The number after the highest one received. It supplies the upper half of received 32-bit numbers.
    next: u64,
}

counters! {
    /// Counters of a receiver, or their increments for one burst.
    pub(super) struct Received {
        /// Packets received, including duplicates.
        received: Packets,
        /// Bytes of packets received for the first time, including the FCS.
        bytes: Bytes,
        /// Packets whose content was compared byte for byte.
        verified: Packets,
        /// Missing packets. The counter wraps below 0 if a packet that was counted as lost arrives late.
        lost: Packets gauge,
        /// Packets received after a packet of their flow with a higher number.
        reordered: Packets,
        /// Packets received again.
        duplicates: Packets,
        /// Packets whose content, length or number differs from the packet that was sent.
        corrupt: Packets,
        /// Packets from other senders.
        foreign: Packets,
        /// Packets shorter than their headers, or shorter than the headers say.
        malformed: Packets,
    }
}

/// The counters of a receiver.
pub(super) static RECEIVER: Family =
    Family::new("receiver", "Packets that a generator receives on a port.", &[&Received::COUNTERS]);

/// Receive state of a stream.
#[derive(Debug)]
struct Check {
    expected: Expected,
    flows: Box<[Flow]>,
    verify: u32,
    /// Packets until the next one is verified.
    until_verify: u32,
    counts: Received,
}

impl Check {
    fn new(expected: Expected, verify: u32) -> Self {
        let flows = if matches!(expected, Expected::Stream(_)) { MAX_FLOWS as usize } else { 0 };
        let flows = vec![Flow::default(); flows].into();
        Self { expected, flows, verify, until_verify: 1, counts: Received::default() }
    }

    #[inline]
    fn burst(&mut self, burst: &Burst, pool: &Pool, now: u64, latencies: &mut Histogram) {
        match self.expected {
            Expected::Stream(stream) => {
                for packet in burst {
                    self.packet(packet, pool, stream, now, latencies);
                }
            }
            Expected::Anything => {
                self.counts.received += burst.len() as u64;
                let bytes = |packet| (pool.total_len(packet) + FCS_LEN) as u64;
                self.counts.bytes += burst.iter().map(bytes).sum::<u64>();
            }
            Expected::Nothing => self.counts.foreign += burst.len() as u64,
        }
    }

    #[inline]
    fn packet(&mut self, packet: &Packet, pool: &Pool, stream: u16, now: u64, latencies: &mut Histogram) {
        let len = pool.total_len(packet);
        let found = match stamp::find(packet.bytes(), len, stream) {
            Ok(found) => found,
            Err(StampError::Corrupt) => return self.counts.corrupt += 1,
            Err(StampError::Foreign) => return self.counts.foreign += 1,
            Err(StampError::Malformed) => return self.counts.malformed += 1,
        };
        if self.verify > 0 {
            self.until_verify -= 1;
            if self.until_verify == 0 {
                self.until_verify = self.verify;
                self.counts.verified += 1;
                let unharmed = match packet.is_segmented() {
                    false => stamp::is_intact(&found, [packet.bytes()]),
                    true => stamp::is_intact(&found, pool.segments(packet)),
                };
                self.counts.corrupt += u64::from(!unharmed);
            }
        }
        if self.arrive(found.stamp) {
            self.counts.bytes += (len + FCS_LEN) as u64;
            // Stamps contain times modulo `DUE_RANGE`. The latency of a packet that was due after `now` is 0.
            let took = now.wrapping_sub(found.stamp.due) % DUE_RANGE;
            latencies.record(if took < DUE_RANGE / 2 { took } else { 0 });
        }
    }

    /// Records the arrival of a number. Returns whether it is the first arrival.
    #[inline]
    fn arrive(&mut self, stamp: Stamp) -> bool {
        let flow = &mut self.flows[usize::from(stamp.flow)];
        let ahead = stamp.number.wrapping_sub(flow.next as u32).cast_signed();
        let Some(number) = flow.next.checked_add_signed(ahead.into()) else {
            // The number is before the first one: no such packet was sent.
            self.counts.corrupt += 1;
            return false;
        };
        self.counts.received += 1;
        flow.next = flow.next.max(number + 1);
        let counts = &mut self.counts;
        match flow.sequence.arrive(number) {
            Arrival::InOrder => {}
            Arrival::Ahead(gap) => counts.lost = counts.lost.wrapping_add(gap),
            // Too late to know whether it is a duplicate. It is taken as a first arrival, as most are.
            Arrival::Late | Arrival::TooOld => {
                counts.reordered += 1;
                counts.lost = counts.lost.wrapping_sub(1);
            }
            Arrival::Duplicate => {
                counts.duplicates += 1;
                return false;
            }
            // Cannot happen: a number is within 2^31 of the previous one.
            Arrival::Implausible => counts.corrupt += 1,
        }
        true
    }
}

#[cfg(test)]
mod tests;
