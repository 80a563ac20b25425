//! The vhost port: a guest's virtio-net device, served over vhost-user.
//!
//! The port's TX queue `n` is the guest's RX virtqueue `2n` (enqueue). The port's RX queue `n` is the guest's TX
//! virtqueue `2n + 1` (dequeue).

use std::any::Any;
use std::sync::Arc;

use offcore_dma::{Binding, Context, Mover};
use offcore_mem::Burst;
use offcore_vhost::backend::{Backend, BackendConfig, DeviceEvents};
use offcore_vhost::dequeue::Dequeued;
use offcore_vhost::features;
pub use offcore_vhost::pair::Next;
use offcore_vhost::pair::{Forwarded, Pair};
use offcore_vhost::vring::{Arm, Taken};
use offcore_vhost::{Dequeue, Enqueue, VringCell};
use offcore_wire::ethernet::MacAddr;

use crate::{
    Accepts, DropReason, PeerReport, Port, PortBase, PortError, QueueSetup, RxCounters, RxQueue, TxCounters,
    TxQueue, Wake,
};

/// A vhost-user port.
#[derive(Debug)]
pub struct VhostPort {
    base: PortBase,
    backend: Backend,
}

/// The port needs no callbacks: device events are only logged.
#[derive(Debug, Default)]
struct Quiet;

impl DeviceEvents for Quiet {}

impl VhostPort {
    /// Opens the port. When this returns, the socket exists, or the port is trying to connect to it.
    ///
    /// # Errors
    /// If the socket cannot be created.
    pub fn open(name: &str, mac: MacAddr, config: BackendConfig) -> Result<Self, PortError> {
        let backend = Backend::start(config, Box::new(Quiet))
            .map_err(|error| PortError::Other { port: name.into(), reason: error.to_string() })?;
        let queues = (backend.cells().len() / 2) as u16;
        Ok(Self { base: PortBase::new(name.into(), mac, queues), backend })
    }

    /// Returns the back end, for its control functions.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    fn cell(&self, virtqueue: u16, binding: &Binding) -> Result<Arc<VringCell>, PortError> {
        let cell =
            self.backend.cells().get(usize::from(virtqueue)).ok_or_else(|| self.no_queue(virtqueue / 2))?;
        cell.publish(|wanted| wanted.binding = binding.clone());
        Ok(Arc::clone(cell))
    }

    fn no_queue(&self, index: u16) -> PortError {
        PortError::Queue { port: self.base.name.clone(), index }
    }
}

impl Port for VhostPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let cell = self.cell(2 * index + 1, &setup.binding)?;
        let counters = RxCounters::new(setup.stats, setup.port, index)?;
        rx_over(&cell, setup.mover, counters).map_err(|_| self.no_queue(index))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let cell = self.cell(2 * index, &setup.binding)?;
        let counters = TxCounters::new(setup.stats, setup.port, index)?;
        tx_over(&cell, setup.mover, counters).map_err(|_| self.no_queue(index))
    }

    fn offloads(&self) -> bool {
        true
    }

    fn status(&self) -> String {
        self.backend.device().status().to_string()
    }

    fn peer(&self) -> Option<PeerReport> {
        let status = self.backend.device().status();
        Some(PeerReport {
            connected: status.connected,
            connections: status.connects,
            messages: status.messages,
            refused: status.refused,
            broken: status.vrings.iter().filter(|vring| vring.broken.is_some()).count(),
            migrates: status.features.is_some_and(|features| features & features::VHOST_F_LOG_ALL != 0),
        })
    }
}

/// Creates the receiving half for the virtqueue `cell` of a guest without a socket, such as a guest in this process.
///
/// # Errors
/// If another worker uses the virtqueue.
pub fn rx_over(
    cell: &Arc<VringCell>,
    mover: &mut Mover,
    counters: RxCounters,
) -> Result<Box<dyn RxQueue>, Taken> {
    Ok(Box::new(VhostRx { dequeue: Dequeue::attach(cell, mover)?, counters }))
}

/// Creates the sending half for the virtqueue `cell`, as [`rx_over`] does for the receiving half.
///
/// # Errors
/// If another worker uses the virtqueue.
pub fn tx_over(
    cell: &Arc<VringCell>,
    mover: &mut Mover,
    counters: TxCounters,
) -> Result<Box<dyn TxQueue>, Taken> {
    Ok(Box::new(VhostTx { enqueue: Enqueue::attach(cell, mover)?, counters }))
}

/// Two queues between which packets are forwarded.
pub type Queues = (Box<dyn RxQueue>, Box<dyn TxQueue>);

/// The queues of two vhost ports, between which packets are forwarded with one copy.
#[derive(Debug)]
pub struct OneCopy {
    rx: Box<VhostRx>,
    tx: Box<VhostTx>,
    pair: Pair,
}

impl OneCopy {
    /// Creates the path from `rx` to `tx`. Both queues belong to the worker of `mover`.
    ///
    /// # Errors
    /// Returns the queues unless both belong to vhost ports.
    pub fn between(rx: Box<dyn RxQueue>, tx: Box<dyn TxQueue>, mover: &mut Mover) -> Result<Self, Queues> {
        let (any_rx, any_tx): (&dyn Any, &dyn Any) = (&*rx, &*tx);
        if !any_rx.is::<VhostRx>() || !any_tx.is::<VhostTx>() {
            return Err((rx, tx));
        }
        let (rx, tx): (Box<dyn Any>, Box<dyn Any>) = (rx, tx);
        match (rx.downcast(), tx.downcast()) {
            (Ok(rx), Ok(tx)) => Ok(Self { rx, tx, pair: Pair::new(mover) }),
            _ => unreachable!("both were just looked at"),
        }
    }

    /// Returns the two queues.
    pub fn queues(&mut self) -> (&mut dyn RxQueue, &mut dyn TxQueue) {
        (&mut *self.rx, &mut *self.tx)
    }

    /// Publishes completed packets and takes new ones, whose first bytes (at least the Ethernet header) are passed to
    /// `rewrite`. Returns the number of completed packets, and the remaining work for the two queues.
    #[inline]
    pub fn forward(&mut self, ctx: &mut Context<'_>, rewrite: impl FnMut(&mut [u8])) -> (usize, Next) {
        let Self { rx, tx, pair } = self;
        let forwarded = pair.forward(ctx, &mut rx.dequeue, &mut tx.enqueue, rewrite);
        count(rx, tx, &forwarded);
        (forwarded.packets, forwarded.next)
    }

    /// Publishes completed packets and takes no new ones; returns the number of packets still in flight.
    pub fn drain(&mut self, ctx: &mut Context<'_>) -> usize {
        let Self { rx, tx, pair } = self;
        let (forwarded, left) = pair.drain(ctx, &mut rx.dequeue, &mut tx.enqueue);
        count(rx, tx, &forwarded);
        left
    }
}

/// Counts packets at their source and at their destination.
#[inline(always)]
fn count(rx: &VhostRx, tx: &VhostTx, forwarded: &Forwarded) {
    let &Forwarded { packets, bytes, too_long, malformed, too_big, too_big_bytes, .. } = forwarded;
    rx.counters.add((packets + too_big) as u64, bytes + too_big_bytes);
    tx.counters.add(packets as u64, bytes);
    if too_long + malformed + too_big > 0 {
        rx.counters.drop(DropReason::TooBig, too_long as u64);
        rx.counters.drop(DropReason::Malformed, malformed as u64);
        tx.counters.drop(DropReason::TooBig, too_big as u64);
    }
}

/// RX: packets that the guest transmits.
#[derive(Debug)]
pub struct VhostRx {
    dequeue: Dequeue,
    counters: RxCounters,
}

impl VhostRx {
    #[inline(always)]
    fn count(&self, dequeued: Dequeued) {
        self.counters.add(dequeued.packets as u64, dequeued.bytes);
        if dequeued.too_big + dequeued.malformed + dequeued.discarded > 0 || dequeued.starved {
            self.count_rare(dequeued);
        }
    }

    #[cold]
    fn count_rare(&self, dequeued: Dequeued) {
        self.counters.drop(DropReason::TooBig, dequeued.too_big as u64);
        self.counters.drop(DropReason::Malformed, dequeued.malformed as u64);
        self.counters.drop(DropReason::Down, dequeued.discarded as u64);
        self.counters.starved(dequeued.starved.into());
    }
}

impl RxQueue for VhostRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let dequeued = self.dequeue.try_dequeue(ctx, burst);
        self.count(dequeued);
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }

    fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        let dequeued = self.dequeue.drain(ctx, burst);
        self.count(dequeued);
        self.dequeue.in_flight(ctx.mover)
    }

    fn arm(&mut self) -> Wake<'_> {
        match self.dequeue.arm() {
            Arm::Now => Wake::Now,
            Arm::Event(kick) => Wake::Event(kick),
            Arm::Poll => Wake::Poll,
            Arm::Never => Wake::Never,
        }
    }

    fn disarm(&mut self) {
        self.dequeue.disarm();
    }
}

/// TX: packets that the guest receives.
#[derive(Debug)]
pub struct VhostTx {
    enqueue: Enqueue,
    counters: TxCounters,
}

impl TxQueue for VhostTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let submitted = self.enqueue.submit(ctx, burst);
        self.counters.add(submitted.packets as u64, submitted.bytes);
        if submitted.too_big + submitted.unwanted > 0 {
            self.counters.drop(DropReason::TooBig, submitted.too_big as u64);
            self.counters.drop(DropReason::Failed, submitted.unwanted as u64);
        }
        if !burst.is_empty() && !self.enqueue.enabled() {
            self.counters.drop_all(DropReason::Down, burst, ctx.cache);
        }
        self.poll(ctx);
    }

    fn poll(&mut self, ctx: &mut Context<'_>) {
        self.enqueue.poll_completed(ctx);
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }

    fn accepts(&self) -> Accepts {
        Accepts { offloads: self.enqueue.offloads(), segments: true }
    }

    fn stop(&mut self, ctx: &mut Context<'_>) -> bool {
        self.poll(ctx);
        self.enqueue.in_flight(ctx.mover) == 0
    }
}
