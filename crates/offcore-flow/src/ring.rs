//! Packet rings between workers: a ring of handles between a TX queue and an RX queue.
//!
//! ```text
//! worker 1: port's RX queue -> ... -> RingTx | ring | RingRx -> ... -> port's TX queue: worker 2
//! ```
//! Packets are passed on unchanged, including segmented packets and offload headers: both sides use the same pool. A
//! full ring accepts no packets. Packets that the sending worker's RX side cannot take back are dropped there and
//! counted. When both workers stop, the sender ends first. The receiver ends when the sender's half is gone and the
//! ring is empty.

mod bell;

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use offcore_mem::{Burst, Packet, Pool};
use offcore_port::{Accepts, Context, PortError, RxCounters, RxQueue, TxCounters, TxQueue, Wake, hand_over};
use offcore_ring::{prefetch, spsc};
use offcore_stats::Stage;
use offcore_stats::page::StatsPage;
use offcore_wire::virtio_net::Offloads;

use bell::Bell;

/// Maximum number of packets in a ring.
const MOST: usize = 1 << 20;

/// Parameters of a ring.
#[derive(Debug)]
pub struct RingSetup<'a> {
    /// Number of packets, rounded up to a power of two.
    pub packets: usize,
    pub pool: &'static Pool,
    /// Whether packets that the receiving worker cannot send wait and then fill the ring. Otherwise, they are dropped
    /// there. This is for packets whose source waits, too ([`RxQueue::waits`]).
    pub waits: bool,
    /// Whether the receiving worker may sleep and needs a wake-up.
    pub wakes: bool,
    pub stats: &'a StatsPage,
    /// Name in statistics, such as `ring0`.
    pub name: &'a str,
    /// The queue whose packets the ring takes.
    pub index: u16,
}

/// Creates a ring between two workers.
///
/// # Errors
/// If the number of packets is 0 or too large, an eventfd cannot be created, or the statistics page is full.
pub fn ring(setup: RingSetup<'_>) -> Result<(RingTx, RingRx), PortError> {
    let RingSetup { packets, pool, waits, wakes, stats, name, index } = setup;
    let refuse = |reason: String| PortError::Other { port: name.into(), reason };
    if !(1..=MOST).contains(&packets) {
        return Err(refuse(format!("a ring of {packets} packets: expected 1 to {MOST}")));
    }
    let ends = spsc::ring(packets.next_power_of_two()).map_err(|error| refuse(error.to_string()))?;
    let (producer, consumer) = ends;
    let bell = match wakes {
        true => Some(Arc::new(Bell::new().map_err(|error| refuse(error.to_string()))?)),
        false => None,
    };
    let tx = RingTx { producer, pool, bell: bell.clone(), counters: TxCounters::new(stats, name, index)? };
    let counters = RxCounters::new(stats, name, index)?;
    Ok((tx, RingRx { consumer, pool, returned: Burst::new(), waits, bell, armed: false, counters }))
}

/// The sending half.
#[derive(Debug)]
pub struct RingTx {
    producer: spsc::Producer<Packet>,
    pool: &'static Pool,
    bell: Option<Arc<Bell>>,
    counters: TxCounters,
}

impl TxQueue for RingTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let taken = self.producer.room(burst.len()).min(burst.len());
        if taken == 0 {
            return;
        }
        let bytes = bytes(self.pool, &burst[..taken]);
        self.producer.push_iter(&mut burst.drain(..taken));
        if let Some(bell) = &self.bell {
            bell.ring();
        }
        self.counters.add(taken as u64, bytes);
        ctx.clock.lap(Stage::Tx);
    }

    fn accepts(&self) -> Accepts {
        Accepts { offloads: Offloads::ALL, segments: true }
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }
}

/// The receiving half.
#[derive(Debug)]
pub struct RingRx {
    consumer: spsc::Consumer<Packet>,
    pool: &'static Pool,
    returned: Burst,
    waits: bool,
    bell: Option<Arc<Bell>>,
    armed: bool,
    counters: RxCounters,
}

impl RingRx {
    #[inline]
    fn receive(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if !self.returned.is_empty() {
            // Already counted when they were first received.
            return hand_over(&mut self.returned, burst);
        }
        let first = burst.len();
        let room = ctx.burst.min(burst.remaining_capacity());
        for packet in self.consumer.pop_burst(room) {
            // The packet's data is in the other worker's cache. It is read, and mostly written, next.
            prefetch::write(packet.data().as_ptr());
            burst.push(packet);
        }
        let new = &burst[first..];
        if !new.is_empty() {
            self.counters.add(new.len() as u64, bytes(self.pool, new));
            ctx.clock.lap(Stage::Rx);
        }
    }

    /// Returns the number of packets left, plus one while the other half exists.
    fn left(&mut self) -> usize {
        let gone = self.consumer.is_abandoned();
        // Packets that the other half sent before it was dropped are visible after this fence.
        fence(Ordering::Acquire);
        self.consumer.available(self.consumer.capacity()) + self.returned.len() + usize::from(!gone)
    }
}

impl RxQueue for RingRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        self.receive(ctx, burst);
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }

    fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        self.receive(ctx, burst);
        self.left()
    }

    fn arm(&mut self) -> Wake<'_> {
        let Self { consumer, returned, bell, armed, .. } = self;
        if let Some(bell) = bell {
            *armed = true;
            bell.arm();
        }
        if consumer.available(1) > 0 || !returned.is_empty() {
            return Wake::Now;
        }
        bell.as_ref().map_or(Wake::Poll, |bell| Wake::Event(bell.event()))
    }

    fn disarm(&mut self) {
        if let Some(bell) = &self.bell
            && std::mem::take(&mut self.armed)
        {
            bell.disarm();
        }
    }

    fn take_back(&mut self, burst: &mut Burst) {
        if self.waits {
            hand_over(burst, &mut self.returned);
        }
    }

    fn waits(&self) -> bool {
        self.waits
    }
}

/// Returns the number of bytes in `packets`.
#[inline]
pub(crate) fn bytes(pool: &Pool, packets: &[Packet]) -> u64 {
    let first: u64 = packets.iter().map(|packet| packet.len() as u64).sum();
    if Packet::all_plain(packets) {
        return first;
    }
    packets.iter().map(|packet| pool.total_len(packet) as u64).sum()
}

#[cfg(test)]
mod tests;
