//! A wire between two hosts in this process: packets are handed over unchanged, with partial checksums. The wire is
//! never timed: the time of its ends is subtracted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use offcore_flow::host::HostPort;
use offcore_mem::{Burst, Packet, Pool};
use offcore_port::{Accepts, Context, RxCounters, RxQueue, TxCounters, TxQueue};
use offcore_stats::{Stage, tsc};
use offcore_wire::virtio_net::{HEADER_LEN, Offloads};

use crate::method::flush::flush;
use crate::method::lockstep::lock;

/// Stage that the stage clock charges with the time of the wire. A host on a wire does not use this stage otherwise, so
/// that readers of the clock can exclude it.
pub(super) const WIRE_STAGE: Stage = Stage::Publish;

/// One direction.
#[derive(Debug)]
struct Lane {
    packets: Mutex<VecDeque<Packet>>,
    waiting: AtomicUsize,
    /// Number of packets sent so far, and number of those with payload.
    all: AtomicU64,
    segments: AtomicU64,
    /// Bytes of payload, including retransmitted segments.
    payload: AtomicU64,
    /// Whether packets must not be in any cache on arrival.
    cold: AtomicBool,
    /// Whether to drop the next packet with payload.
    #[cfg(test)]
    loses: AtomicBool,
    pool: &'static Pool,
}

impl Lane {
    fn new(pool: &'static Pool) -> Arc<Self> {
        let (packets, waiting, all, segments, payload, cold) = Default::default();
        Arc::new(Self {
            packets,
            waiting,
            all,
            segments,
            payload,
            cold,
            #[cfg(test)]
            loses: AtomicBool::new(false),
            pool,
        })
    }

    /// Counts sent packets. Only one thread sends, so that the additions need not be atomic.
    fn count(&self, burst: &Burst) {
        let add = |to: &AtomicU64, n: u64| to.store(to.load(Ordering::Relaxed) + n, Ordering::Relaxed);
        let payloads = || burst.iter().map(|packet| payload(packet.bytes()) as u64);
        add(&self.all, burst.len() as u64);
        add(&self.segments, payloads().filter(|&bytes| bytes > 0).count() as u64);
        add(&self.payload, payloads().sum());
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.pool.cache().free_all(lock(&self.packets).drain(..));
    }
}

/// A host's end of the wire.
#[derive(Clone, Debug)]
pub(super) struct WireEnd {
    incoming: Arc<Lane>,
    outgoing: Arc<Lane>,
    /// TSC ticks that its queues have used.
    pub(super) taken_ticks: Arc<AtomicU64>,
    /// Whether the wire transfers packets with partial checksums.
    checksums: bool,
}

/// Creates a wire and returns both ends.
pub(super) fn wire(pool: &'static Pool, checksums: bool) -> [WireEnd; 2] {
    let (there, back) = (Lane::new(pool), Lane::new(pool));
    let end = |incoming: &Arc<Lane>, outgoing: &Arc<Lane>| WireEnd {
        incoming: Arc::clone(incoming),
        outgoing: Arc::clone(outgoing),
        taken_ticks: Arc::default(),
        checksums,
    };
    [end(&back, &there), end(&there, &back)]
}

impl WireEnd {
    /// Returns the host's port.
    pub(super) fn port(&self) -> HostPort {
        HostPort {
            rx: vec![Box::new(WireRx { end: self.clone(), counters: RxCounters::private() })],
            spread: None,
            tx: Box::new(WireTx { end: self.clone(), counters: TxCounters::private() }),
        }
    }

    /// Returns the number of packets that wait to be received.
    pub(super) fn waiting(&self) -> usize {
        self.incoming.waiting.load(Ordering::Relaxed)
    }

    /// Returns the number of packets with payload, received and sent so far.
    pub(super) fn segments(&self) -> [u64; 2] {
        [&self.incoming, &self.outgoing].map(|lane| lane.segments.load(Ordering::Relaxed))
    }

    /// Returns the bytes of payload received and sent so far, including retransmitted segments.
    pub(super) fn payload(&self) -> [u64; 2] {
        [&self.incoming, &self.outgoing].map(|lane| lane.payload.load(Ordering::Relaxed))
    }

    /// Returns the number of all packets received and sent so far.
    pub(super) fn packets(&self) -> u64 {
        [&self.incoming, &self.outgoing].map(|lane| lane.all.load(Ordering::Relaxed)).iter().sum()
    }

    /// Returns the TSC ticks that this end's queues have used so far.
    pub(super) fn taken(&self) -> u64 {
        self.taken_ticks.load(Ordering::Relaxed)
    }

    /// Drops the next packet with payload that is sent from this end.
    #[cfg(test)]
    pub(super) fn drop_next(&self) {
        self.outgoing.loses.store(true, Ordering::Relaxed);
    }

    /// Selects whether received packets are evicted from all caches.
    pub(super) fn set_cold(&self, cold: bool) {
        self.incoming.cold.store(cold, Ordering::Relaxed);
    }

    fn took_since(&self, start: u64) {
        let took = tsc::now() - start;
        // Only one thread adds, so that the addition need not be atomic.
        self.taken_ticks.store(self.taken_ticks.load(Ordering::Relaxed) + took, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct WireRx {
    end: WireEnd,
    counters: RxCounters,
}

impl RxQueue for WireRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        ctx.clock.lap(Stage::Rx);
        let start = tsc::now();
        let lane = &self.end.incoming;
        if lane.waiting.load(Ordering::Relaxed) > 0 {
            let mut packets = lock(&lane.packets);
            let count = packets.len().min(ctx.burst).min(burst.remaining_capacity());
            burst.extend(packets.drain(..count));
            lane.waiting.store(packets.len(), Ordering::Relaxed);
        }
        self.end.took_since(start);
        ctx.clock.lap(WIRE_STAGE);
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }
}

#[derive(Debug)]
struct WireTx {
    end: WireEnd,
    counters: TxCounters,
}

impl TxQueue for WireTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        // Charges the previous work: headers and assembly of this burst.
        ctx.clock.lap(Stage::Tx);
        let start = tsc::now();
        let lane = &self.end.outgoing;
        lane.count(burst);
        #[cfg(test)]
        if let Some(lost) = burst.iter().position(|packet| payload(packet.bytes()) > 0)
            && lane.loses.swap(false, Ordering::Relaxed)
        {
            ctx.cache.free(burst.remove(lost));
        }
        if lane.cold.load(Ordering::Relaxed) {
            burst.iter_mut().for_each(evict_packet);
        }
        let mut packets = lock(&lane.packets);
        packets.extend(burst.drain(..));
        lane.waiting.store(packets.len(), Ordering::Relaxed);
        drop(packets);
        self.end.took_since(start);
        ctx.clock.lap(WIRE_STAGE);
    }

    fn accepts(&self) -> Accepts {
        let offloads = Offloads { checksum: self.end.checksums, ..Offloads::default() };
        Accepts { offloads, segments: true }
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }
}

/// Returns the bytes of payload of a TCP packet over IPv4 without options, and 0 for any other packet. Only such
/// packets with payload pass a wire.
fn payload(packet: &[u8]) -> usize {
    const IPV4: [u8; 3] = [8, 0, 0x45];
    const TCP: u8 = 6;
    let Some(head) = packet.first_chunk::<54>() else { return 0 };
    if head[12..15] != IPV4 || head[23] != TCP {
        return 0;
    }
    let (total, offset) = (u16::from_be_bytes([head[16], head[17]]), head[46] >> 4);
    usize::from(total).saturating_sub(20 + 4 * usize::from(offset))
}

/// Evicts headers, payload and the offload information for the port from all caches.
fn evict_packet(packet: &mut Packet) {
    flush(packet.headroom_mut(HEADER_LEN));
    flush(packet.bytes());
}
