//! The DPDK port: any network device that DPDK has a driver for, with one call of the driver per burst.
//!
//! It uses the pool's packet buffers: the pool is registered with DPDK as external memory, and each of its buffers has
//! an mbuf (`offcore_dpdk::mempool`). Packets of several buffers are received and sent if the device supports them.
//!
//! The packets' bytes can also be in a device's memory ([`DpdkPort::open`]). The port reads and writes no packet bytes
//! then.
//!
//! Packets that the device drops are added to the counters of queue 0 within a fifth of a second: `full` if a queue was
//! full, `malformed` if they were damaged, `no_buffer` if the driver had no packet buffer for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use offcore_dpdk::ethdev::{EthRx, EthTx, Ethdev, Link, Request, Rss};
use offcore_mem::{Burst, DeviceMemory, Pool};
use offcore_stats::Stage;
use offcore_wire::ethernet::{self, MacAddr};

use crate::base::PortBase;
use crate::spec::{DpdkSpec, Hash};
use crate::{
    Accepts, Context, DropReason, Port, PortError, QueueSetup, RxCounters, RxQueue, TxCounters, TxQueue, room,
};

/// Number of calls of `tend` between two reads of the device's counters.
const LOOK_EVERY: u32 = 10;

/// A DPDK port.
#[derive(Debug)]
pub struct DpdkPort {
    base: PortBase,
    device: Arc<Ethdev>,
    pool: &'static Pool,
    shared: Arc<Shared>,
    memory: Option<DeviceMemory>,
    link: Link,
    tended: u32,
}

/// State that the control thread shares with the queues.
#[derive(Debug, Default)]
struct Shared {
    down: AtomicBool,
    missed: AtomicU64,
    rx_errors: AtomicU64,
    no_buffer: AtomicU64,
    tx_errors: AtomicU64,
}

impl DpdkPort {
    /// Opens and starts the device. The first device also starts the EAL. Packets are chunks of `pool`; their bytes are
    /// in `memory` if that is given.
    ///
    /// # Errors The error names the problem, the expectation and the remedy.
    pub fn open(
        spec: &DpdkSpec,
        pool: &'static Pool,
        memory: Option<&DeviceMemory>,
    ) -> Result<Self, PortError> {
        let name = spec.to_string();
        let device = Ethdev::open(&Request { memory: memory.cloned(), ..request(spec) }, pool)
            .map_err(|error| PortError::Other { port: name.clone(), reason: error.to_string() })?;
        device.notes().iter().for_each(|note| tracing::info!("{name}: {note}"));
        let mut port = Self {
            base: PortBase::new(name, MacAddr(device.mac()), spec.queues),
            device,
            pool,
            shared: Arc::default(),
            memory: memory.cloned(),
            link: Link::default(),
            tended: 0,
        };
        port.look();
        Ok(port)
    }

    /// Messages for the user about the device.
    pub fn notes(&self) -> &[String] {
        self.device.notes()
    }

    fn look(&mut self) {
        self.link = self.device.link();
        self.shared.down.store(!self.link.up, Ordering::Relaxed);
        let losses = self.device.losses();
        for (shared, now) in [
            (&self.shared.missed, losses.missed),
            (&self.shared.rx_errors, losses.rx_errors),
            (&self.shared.no_buffer, losses.no_buffer),
            (&self.shared.tx_errors, losses.tx_errors),
        ] {
            shared.store(now, Ordering::Relaxed);
        }
    }
}

fn request(spec: &DpdkSpec) -> Request {
    let bit = |hash: &Hash| 1 << *hash as u8;
    Request {
        device: spec.device.clone(),
        args: spec.args.clone(),
        queues: spec.queues,
        mtu: spec.mtu,
        rx_desc: spec.rx_desc,
        tx_desc: spec.tx_desc,
        rss: match spec.rss.as_deref() {
            None => Rss::Usual,
            Some([]) => Rss::Off,
            Some(hashes) => Rss::Of(hashes.iter().map(bit).fold(0, |all, bit| all | bit)),
        },
        promiscuous: spec.promisc,
        memory: None,
    }
}

impl Port for DpdkPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        Ok(Box::new(DpdkRx {
            counters: self.base.take_rx(index, &setup)?,
            queue: self.device.rx(index),
            losses: (index == 0).then(|| Losses::new(&self.shared)),
        }))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        Ok(Box::new(DpdkTx {
            counters: self.base.take_tx(index, &setup)?,
            longest: self.device.longest(),
            segments: self.device.takes_segments(),
            queue: self.device.tx(index),
            pool: self.pool,
            shared: Arc::clone(&self.shared),
            failed: (index == 0).then_some(0),
        }))
    }

    fn memory(&self) -> Option<&DeviceMemory> {
        self.memory.as_ref()
    }

    fn tend(&mut self) {
        self.tended += 1;
        if self.tended >= LOOK_EVERY {
            self.tended = 0;
            self.look();
        }
    }

    fn mtu(&self) -> Option<usize> {
        Some(self.device.mtu().into())
    }

    fn status(&self) -> String {
        let link = match (self.link.up, self.link.mbit) {
            (false, _) => "link is down".to_owned(),
            (true, None) => "link is up".to_owned(),
            (true, Some(mbit)) => {
                let duplex = if self.link.full_duplex { "full" } else { "half" };
                format!("link is up at {mbit} Mbit/s {duplex} duplex")
            }
        };
        let (device, mac) = (&self.device, self.mac());
        format!("driver {}, {link}, MTU {}, address {mac}", device.driver(), device.mtu())
    }
}

/// The device's losses that have been counted so far.
#[derive(Debug)]
struct Losses {
    shared: Arc<Shared>,
    counted: [u64; 3],
}

impl Losses {
    fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), counted: [0; 3] }
    }

    #[inline]
    fn count(&mut self, counters: &RxCounters) {
        let shared = &self.shared;
        let now =
            [&shared.missed, &shared.rx_errors, &shared.no_buffer].map(|loss| loss.load(Ordering::Relaxed));
        if now == self.counted {
            return;
        }
        let reasons = [DropReason::Full, DropReason::Malformed, DropReason::NoBuffer];
        for ((now, before), reason) in now.into_iter().zip(&mut self.counted).zip(reasons) {
            // If the device resets its counters, nothing is counted as lost.
            counters.drop(reason, now.saturating_sub(*before));
            *before = now;
        }
    }
}

#[derive(Debug)]
struct DpdkRx {
    queue: EthRx,
    counters: RxCounters,
    /// Only in queue 0, which counts the device's losses.
    losses: Option<Losses>,
}

impl RxQueue for DpdkRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let wanted = room(ctx, burst);
        if wanted == 0 {
            return;
        }
        if let Some(losses) = &mut self.losses {
            losses.count(&self.counters);
        }
        let receipt = self.queue.rx(ctx.cache, burst, wanted);
        if receipt.malformed > 0 {
            self.counters.drop(DropReason::Malformed, receipt.malformed);
        }
        if receipt.packets > 0 {
            self.counters.add(receipt.packets as u64, receipt.bytes);
            ctx.clock.lap(Stage::Rx);
        }
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }
}

#[derive(Debug)]
struct DpdkTx {
    queue: EthTx,
    /// Length of the longest packet that the device accepts, in bytes.
    longest: usize,
    segments: bool,
    pool: &'static Pool,
    counters: TxCounters,
    shared: Arc<Shared>,
    /// Only in queue 0: the device's TX errors that have been counted so far.
    failed: Option<u64>,
}

impl DpdkTx {
    /// Frees and counts packets that cannot be sent, and pads short packets, because not every driver does.
    #[cold]
    fn drop_or_pad(&self, ctx: &mut Context<'_>, burst: &mut Burst) {
        for mut packet in std::mem::take(burst) {
            match self.pool.total_len(&packet) {
                len if len > self.longest => self.counters.drop(DropReason::TooBig, 1),
                len if len < ethernet::HEADER_LEN => self.counters.drop(DropReason::Malformed, 1),
                _ if !ctx.cache.pad(&mut packet, ethernet::MIN_LEN) => {
                    self.counters.drop(DropReason::Failed, 1)
                }
                _ => {
                    burst.push(packet);
                    continue;
                }
            }
            ctx.cache.free(packet);
        }
    }
}

impl TxQueue for DpdkTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if let Some(counted) = &mut self.failed {
            let now = self.shared.tx_errors.load(Ordering::Relaxed);
            if now != *counted {
                self.counters.drop(DropReason::Failed, now.saturating_sub(*counted));
                *counted = now;
            }
        }
        if burst.is_empty() {
            return;
        }
        if self.shared.down.load(Ordering::Relaxed) {
            return self.counters.drop_all(DropReason::Down, burst, ctx.cache);
        }
        let fits = |len: usize| (ethernet::MIN_LEN..=self.longest).contains(&len);
        if !burst.iter().all(|packet| fits(packet.len()) && !packet.is_segmented()) {
            self.drop_or_pad(ctx, burst);
        }
        let sent = self.queue.tx(ctx.cache, burst);
        self.counters.add(sent.packets as u64, sent.bytes);
        ctx.clock.lap(Stage::Tx);
    }

    fn accepts(&self) -> Accepts {
        Accepts { segments: self.segments, ..Accepts::default() }
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }
}
