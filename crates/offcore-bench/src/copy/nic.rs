//! The network card of a core-cost measurement: it fills packet buffers, hands them to an RX queue, takes the packets
//! that a TX queue sends, and checks every packet. It is never timed: the time that its two queues need to move handles
//! is subtracted.
//!
//! ```text
//! stock ──> filled ──> RX queue ──> [ copy ──> addresses ] ──> TX queue ──> checked ──> stock
//!   └─────> free buffers of the measured core ──┘   └─ those received in ──> stock
//! ```
//! All packet buffers of the measurement circulate through this stock in FIFO order, so that each buffer has the
//! required temperature on every path. An RX queue takes a free buffer for each packet that it delivers, like a driver
//! that keeps its ring full. The destination of a copy is therefore never the source of a recent copy.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use anyhow::{Context as _, Result, bail, ensure};
use offcore_mem::{Burst, HEADROOM, Packet, Pool, PoolCache};
use offcore_port::{Context, RxCounters, RxQueue, TxCounters, TxQueue};
use offcore_stats::tsc;
use offcore_wire::probe::{self, ProbeHeader};
use offcore_wire::template::UdpTemplate;
use offcore_wire::{MacAddr, UdpFlow, ethernet};

use crate::guests::guest::{GUEST_MAC, PEER_MAC, PORT_MAC};
use crate::method::lockstep::lock;
use crate::method::temperature::Temperature;

/// Number of windows of circulating buffers for warm data: the first to receive into, the second to copy into, and the
/// third for an RX queue, which takes it for the next window.
const WINDOWS: usize = 3;

/// Returns the number of packet buffers that a measurement takes from its pool.
pub(super) fn buffers(temperature: Temperature) -> usize {
    match temperature {
        Temperature::Cold => temperature.buffers(),
        Temperature::Hot | Temperature::Remote => WINDOWS * temperature.window(),
    }
}

/// A packet in flight.
#[derive(Clone, Copy, Debug)]
struct Sent {
    sequence: u64,
    /// The buffer in which it was received. The sent packet must be in another buffer.
    chunk: u32,
}

/// The network card.
#[derive(Debug)]
pub(super) struct Nic {
    pool: &'static Pool,
    stock: VecDeque<Packet>,
    /// The remaining packets of the pool.
    unused: Vec<Packet>,
    rings: Rings,
    temperature: Temperature,
    template: UdpTemplate,
    /// Sequence number of the packet in each buffer. Cold buffers are written only once.
    holds: Vec<u64>,
    sequence: u64,
    expected: VecDeque<Sent>,
    /// Source address for the packets of this turn. It differs from the address of the previous turn, so that a missing
    /// rewrite is detected.
    source: MacAddr,
}

/// State shared by the card and its queues. The two sides take turns, so the locks are never contended.
#[derive(Clone, Debug, Default)]
struct Rings {
    received: Arc<Mutex<VecDeque<Packet>>>,
    /// Buffers taken for the next packets.
    taken: Arc<Mutex<Vec<Packet>>>,
    sent: Arc<Mutex<Vec<Packet>>>,
    /// Number of packets in `sent`.
    count: Arc<AtomicUsize>,
    /// TSC ticks used by the two queues, because the measurement does not include a card's driver.
    taken_ticks: Arc<AtomicU64>,
}

impl Rings {
    /// Adds the time since `start` and the time for reading the clock.
    fn took_since(&self, start: u64) {
        static READING: LazyLock<u64> =
            LazyLock::new(|| (0..64).map(|_| tsc::now().abs_diff(tsc::now())).min().unwrap_or(0));
        let took = tsc::now() - start + *READING;
        // Only one thread adds, so that the addition need not be atomic.
        self.taken_ticks.store(self.taken_ticks.load(Ordering::Relaxed) + took, Ordering::Relaxed);
    }
}

impl Nic {
    /// Creates a card for frames of `frame` bytes, including the FCS, with exclusive use of `pool`.
    pub(super) fn new(pool: &'static Pool, temperature: Temperature, frame: usize) -> Result<Self> {
        let frame_len = frame.saturating_sub(ethernet::FCS_LEN);
        ensure!(frame_len <= pool.data_room(), "a frame of {frame} bytes does not fit a packet buffer");
        let template =
            UdpTemplate::new(&UdpFlow::txonly(GUEST_MAC, PORT_MAC), frame_len).context("frame length")?;
        let buffers = buffers(temperature);
        let mut cache = pool.cache();
        let mut all: Vec<_> = std::iter::from_fn(|| cache.take()).collect();
        ensure!(all.len() >= buffers, "{} free packet buffers, {buffers} needed", all.len());
        let unused = all.split_off(buffers);
        let stock = match temperature {
            Temperature::Hot | Temperature::Remote => all.into(),
            Temperature::Cold => {
                let mut all: Vec<_> = all.into_iter().map(Some).collect();
                temperature.order(11).into_iter().filter_map(|i| all[i as usize].take()).collect()
            }
        };
        let window = temperature.window();
        let rings = Rings::default();
        lock(&rings.taken).reserve(window);
        lock(&rings.sent).reserve(window);
        let mut nic = Self {
            pool,
            stock,
            unused,
            rings,
            temperature,
            template,
            holds: vec![0; pool.chunks()],
            sequence: 0,
            expected: VecDeque::new(),
            source: PORT_MAC,
        };
        if temperature == Temperature::Cold {
            for _ in 0..nic.stock.len() {
                let packet = nic.next()?;
                let packet = nic.write(packet)?;
                nic.stock.push_back(packet);
            }
        }
        Ok(nic)
    }

    /// Returns the receive queue.
    pub(super) fn rx_queue(&self) -> Box<dyn RxQueue> {
        Box::new(NicRx { rings: self.rings.clone(), counters: RxCounters::private() })
    }

    /// Returns the transmit queue.
    pub(super) fn tx_queue(&self) -> Box<dyn TxQueue> {
        Box::new(NicTx { rings: self.rings.clone(), counters: TxCounters::private() })
    }

    /// Returns the counter of packets sent in this turn, for waiting.
    pub(super) fn sent(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.rings.count)
    }

    /// Returns the counter of TSC ticks used by the two queues.
    pub(super) fn taken_ticks(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.rings.taken_ticks)
    }

    /// Returns the source address for packets until the next turn.
    pub(super) fn source(&self) -> MacAddr {
        self.source
    }

    /// Receives a window of packets.
    pub(super) fn receive(&mut self) -> Result<()> {
        self.source.0[4] ^= 1;
        for _ in 0..self.temperature.window() {
            let mut packet = self.next()?;
            if self.temperature == Temperature::Cold {
                packet.set_range(self.pool, HEADROOM, self.template.frame_len());
            } else {
                packet = self.write(packet)?;
            }
            let chunk = packet.chunk();
            self.expected.push_back(Sent { sequence: self.holds[chunk as usize], chunk });
            lock(&self.rings.received).push_back(packet);
        }
        Ok(())
    }

    /// Puts two windows of free buffers into `cache`, which belongs to the measured core: one to copy into, and one for
    /// its RX queue.
    pub(super) fn lend(&mut self, cache: &mut PoolCache) -> Result<()> {
        for _ in 0..(WINDOWS - 1) * self.temperature.window() {
            cache.free(self.next()?);
        }
        Ok(())
    }

    /// Takes back all free buffers.
    pub(super) fn take_back(&mut self, cache: &mut PoolCache) {
        self.stock.extend(std::iter::from_fn(|| cache.take()));
        self.stock.extend(lock(&self.rings.taken).drain(..));
    }

    /// Checks every sent packet byte by byte.
    pub(super) fn check(&mut self) -> Result<()> {
        let sent = std::mem::take(&mut *lock(&self.rings.sent));
        self.rings.count.store(0, Ordering::Relaxed);
        for packet in &sent {
            let Sent { sequence, chunk } =
                self.expected.pop_front().context("a packet was sent that was never received")?;
            self.check_one(packet, sequence).with_context(|| format!("packet {sequence}"))?;
            ensure!(packet.chunk() != chunk, "packet {sequence} was sent as it was received, and not copied");
            self.holds[packet.chunk() as usize] = sequence;
        }
        if !self.expected.is_empty() {
            bail!("{} of {} packets were not sent", self.expected.len(), self.temperature.window());
        }
        let mut sent = sent;
        self.stock.extend(sent.drain(..));
        // Keeps the vector's memory for the next turn.
        *lock(&self.rings.sent) = sent;
        Ok(())
    }

    fn check_one(&self, packet: &Packet, expected: u64) -> Result<()> {
        let frame = packet.bytes();
        ensure!(packet.is_plain(), "it has several buffers");
        let len = self.template.frame_len();
        ensure!(frame.len() == len, "{} bytes were sent, {len} were received", frame.len());
        let header = probe::check_header(frame)?;
        ensure!(header.sequence == expected, "packet {} was sent in its place", header.sequence);
        let addresses = (&frame[..6], &frame[6..12]);
        ensure!(
            addresses == (&PEER_MAC.0[..], &self.source.0[..]),
            "its addresses are {addresses:02x?}: {PEER_MAC} and {} were to be written",
            self.source
        );
        Ok(probe::check_content(frame)?)
    }

    fn next(&mut self) -> Result<Packet> {
        self.stock.pop_front().context("packet buffers have been lost on the way")
    }

    fn write(&mut self, mut packet: Packet) -> Result<Packet> {
        let sequence = self.sequence;
        self.sequence += 1;
        packet.set_range(self.pool, HEADROOM, self.template.frame_len());
        let frame = packet.bytes_mut();
        self.template.write(frame)?;
        probe::write(frame, ProbeHeader { fill: sequence as u32 ^ 0x5eed, sequence })?;
        self.holds[packet.chunk() as usize] = sequence;
        Ok(packet)
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        let mut cache = self.pool.cache();
        cache.free_all(self.stock.drain(..));
        cache.free_all(self.unused.drain(..));
        cache.free_all(lock(&self.rings.received).drain(..));
        cache.free_all(lock(&self.rings.taken).drain(..));
        cache.free_all(lock(&self.rings.sent).drain(..));
    }
}

#[derive(Debug)]
struct NicRx {
    rings: Rings,
    counters: RxCounters,
}

impl RxQueue for NicRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let start = tsc::now();
        let mut received = lock(&self.rings.received);
        let packets = received.len().min(ctx.burst).min(burst.remaining_capacity());
        if packets > 0 {
            burst.extend(received.drain(..packets));
            lock(&self.rings.taken).extend(std::iter::from_fn(|| ctx.cache.take()).take(packets));
        }
        drop(received);
        self.rings.took_since(start);
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }
}

#[derive(Debug)]
struct NicTx {
    rings: Rings,
    counters: TxCounters,
}

impl TxQueue for NicTx {
    fn tx(&mut self, _: &mut Context<'_>, burst: &mut Burst) {
        let start = tsc::now();
        let mut sent = lock(&self.rings.sent);
        sent.extend(burst.drain(..));
        self.rings.count.store(sent.len(), Ordering::Relaxed);
        drop(sent);
        self.rings.took_since(start);
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }
}
