//! Packets from one worker to another: a ring of handles between a TX queue and an RX queue.
//!
//! ```text
//! worker 1: port's RX queue -> ... -> RingTx | ring | RingRx -> ... -> port's TX queue: worker 2
//! ```
//! Whole packets travel, of several buffers and with offload headers as they are: both sides have one pool. A ring that
//! is full takes no more; what its worker's RX side cannot take back is dropped there and counted. When both workers
//! stop, the one that sends ends first: the other one is not done before that one's half is gone and the ring is empty.

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

/// Packets that a ring has room for, at most.
const MOST: usize = 1 << 20;

/// What a ring is made with.
#[derive(Debug)]
pub struct RingSetup<'a> {
    /// Packets it has room for, rounded up to a power of two.
    pub packets: usize,
    pub pool: &'static Pool,
    /// Whether what the receiving worker cannot send waits, and then fills the ring, rather than being dropped there: for
    /// packets whose source waits as well ([`RxQueue::waits`]).
    pub waits: bool,
    /// Whether the receiving worker may sleep and is to be woken up.
    pub wakes: bool,
    pub stats: &'a StatsPage,
    /// Name in statistics, such as `ring0`.
    pub name: &'a str,
    /// The queue whose packets it takes.
    pub index: u16,
}

/// A ring between two workers.
///
/// # Errors
/// When it is to have no room, or too much, or the statistics page is full.
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
            // They were counted when they came.
            return hand_over(&mut self.returned, burst);
        }
        let first = burst.len();
        let room = ctx.burst.min(burst.remaining_capacity());
        for packet in self.consumer.pop_burst(room) {
            // The other worker's cache has the line that is looked at, and mostly written, next.
            prefetch::write(packet.data().as_ptr());
            burst.push(packet);
        }
        let new = &burst[first..];
        if !new.is_empty() {
            self.counters.add(new.len() as u64, bytes(self.pool, new));
            ctx.clock.lap(Stage::Rx);
        }
    }

    /// What is still to come: packets, and one for the other half as long as it is there.
    fn left(&mut self) -> usize {
        let gone = self.consumer.is_abandoned();
        // What the other half has sent before it went is seen after this.
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

/// The bytes of `packets`.
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
