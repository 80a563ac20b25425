//! The worker's side of one virtqueue, shared by enqueue and dequeue.
//!
//! A `Vring` follows its [`VringCell`]. It picks up changes between bursts, takes no new chains while it drains, and
//! acknowledges a change once nothing is in flight. The buffer and the chains of a packet in flight are stored in its
//! holder in the copy queue.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use offcore_dma::{Binding, CopyQueue, Mover};
use offcore_mem::{BURST, Burst, Held, Packet, PoolCache, sigbus};
use offcore_ring::device::{self, Chain, DeviceQueue};
use offcore_ring::{RingError, with_queue};
use offcore_stats::StageClock;
use offcore_wire::virtio_net::Offloads;

use crate::cell::{Report, VringCell, VringConfig, Wanted};
use crate::dirty::Logging;
use crate::eventfd;
use crate::features::{self, VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_NET_F_MRG_RXBUF};
use crate::room::Room;

/// The event that an idle worker has to wait for.
#[derive(Clone, Copy, Debug)]
pub enum Arm<'a> {
    /// Do not wait: there is work.
    Now,
    /// Wait until this descriptor becomes readable.
    Event(BorrowedFd<'a>),
    /// The driver sends no kicks: poll again soon.
    Poll,
    /// Wait for a change by the control side. Nothing else can arrive before.
    Never,
}

/// virtqueue {0} already belongs to a worker
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub struct Taken(pub u16);

/// A ring that the front end has started.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) config: Arc<VringConfig>,
    /// The memory of `config`.
    memory: Held,
    pub(crate) queue: device::RingDevice,
    pub(crate) mergeable: bool,
    /// Offloads that packets of this direction may request.
    pub(crate) offloads: Offloads,
    /// Dirty log for a guest that migrates.
    pub(crate) logging: Option<Box<Logging>>,
    /// Known capacity of the next chains, for a guest's receive ring.
    pub(crate) room: Room,
}

impl Active {
    /// Sets up the ring of `config`. `receives` is true if the guest receives from it.
    fn new(config: Arc<VringConfig>, receives: bool) -> Result<Self, RingError> {
        let offloads = if receives { features::received } else { features::transmitted };
        let has = |bit| config.features & bit != 0;
        let mut queue = device::RingDevice::new(
            config.layout.clone(),
            config.base,
            has(VIRTIO_F_EVENT_IDX),
            has(VIRTIO_F_INDIRECT_DESC),
        )?;
        if let Some(inflight) = &config.inflight {
            queue.track(inflight.clone());
        }
        // The worker polls and needs no kicks.
        queue.set_notification(false);
        let mut active = Self {
            queue,
            mergeable: has(VIRTIO_NET_F_MRG_RXBUF),
            offloads: offloads(config.features),
            logging: None,
            room: Room::default(),
            memory: Held::new(Arc::clone(&config.memory)),
            config,
        };
        active.log();
        Ok(active)
    }

    /// Replaces the configuration by another one for the same start and the same memory. Nothing may be in flight.
    fn adjust(&mut self, config: Arc<VringConfig>) {
        self.config = config;
        self.room.forget();
        self.log();
    }

    /// Applies the logging configuration and marks the ring as written.
    fn log(&mut self) {
        self.logging = self.config.log.clone().map(|log| Box::new(Logging::new(log)));
        self.mark_ring();
    }

    fn mark_ring(&self) {
        if let Some(logging) = &self.logging {
            logging.mark_ring();
        }
    }

    /// Asks the driver to kick when new chains are available, and then checks once more for chains.
    pub(crate) fn arm(&mut self) -> Arm<'_> {
        let available = with_queue!(&mut self.queue, queue => {
            queue.set_notification(true);
            queue.look(1)
        });
        self.mark_ring();
        match (available, &self.config.kick) {
            (Ok(0), Some(kick)) => Arm::Event(kick.as_fd()),
            (Ok(0), None) => Arm::Poll,
            // Errors in the ring are reported when it is worked on.
            _ => Arm::Now,
        }
    }

    /// Asks the driver not to kick, and clears pending kicks.
    pub(crate) fn disarm(&mut self) {
        self.queue.set_notification(false);
        self.mark_ring();
        if let Some(kick) = &self.config.kick {
            eventfd::empty(kick);
        }
    }

    /// Records the number of packets in flight. They keep the memory mapped.
    #[inline(always)]
    pub(crate) fn hold(&mut self, cell: &VringCell, in_flight: usize) {
        self.memory.set_in_flight(in_flight);
        cell.set_in_flight(in_flight as u64);
    }

    /// Marks the pages written by the oldest `packets` in flight, whose copies are complete, if logging is enabled.
    #[inline(always)]
    pub(crate) fn complete(&mut self, packets: usize) {
        if let Some(logging) = &mut self.logging {
            logging.complete(packets);
        }
    }

    /// Makes the used elements written so far visible, and notifies the driver if it asked for a notification.
    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        self.queue.publish();
        if let Some(logging) = &self.logging {
            logging.mark_ring();
        }
        if self.queue.needs_notification() {
            self.notify();
        }
    }

    #[cold]
    fn notify(&self) {
        if let Some(call) = &self.config.call {
            eventfd::signal(call.as_fd());
        }
    }
}

/// Everything that one call needs to take packets from a virtqueue or to deliver them. The results are counted in
/// `done`.
pub(crate) struct QueueBurst<'a, T> {
    pub(crate) active: &'a mut Active,
    pub(crate) cell: &'a VringCell,
    pub(crate) chains: &'a mut Chains,
    pub(crate) cache: &'a mut PoolCache,
    pub(crate) clock: &'a mut StageClock,
    pub(crate) burst: &'a mut Burst,
    pub(crate) done: &'a mut T,
}

/// A chain that was taken and not yet returned.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Out {
    pub(crate) chain: Chain,
    /// Bytes written into the chain.
    pub(crate) written: u32,
}

/// State of a packet in flight that is needed when it is published.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    pub(crate) packet: Option<Packet>,
    pub(crate) chains: u16,
}

/// FIFO of chains to return. Its capacity is the queue size, so it never fills up.
#[derive(Debug)]
pub(crate) struct Chains {
    entries: Box<[Out]>,
    oldest: u16,
    next: u16,
}

impl Chains {
    /// Creates a FIFO for a queue of `size` descriptors.
    pub(crate) fn new(size: usize) -> Self {
        Self { entries: vec![Out::default(); size.next_power_of_two()].into(), oldest: 0, next: 0 }
    }

    #[inline(always)]
    fn mask(&self) -> usize {
        self.entries.len() - 1
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, chain: Out) {
        let slot = usize::from(self.next) & self.mask();
        self.entries[slot] = chain;
        self.next = self.next.wrapping_add(1);
    }

    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Out {
        debug_assert!(self.oldest != self.next);
        let chain = self.entries[usize::from(self.oldest) & self.mask()];
        self.oldest = self.oldest.wrapping_add(1);
        chain
    }
}

/// The worker's side of one virtqueue.
#[derive(Debug)]
pub(crate) struct Vring {
    pub(crate) cell: Arc<VringCell>,
    pub(crate) applied: u32,
    /// A publication that takes effect once nothing is in flight.
    pending: Option<(u32, Wanted)>,
    pub(crate) active: Option<Active>,
    pub(crate) copies: CopyQueue<InFlight>,
    pub(crate) chains: Chains,
    /// Packets of a [`Pair`](crate::Pair) that use buffers of this queue.
    pub(crate) lent: usize,
    /// Value of [`sigbus::vanished`] when the mappings of this ring were last checked.
    vanished: usize,
    /// The binding in effect: the requested one, or the core if that one was refused.
    pub(crate) binding: Binding,
    report: Report,
}

impl Vring {
    /// Attaches to `cell` as its worker.
    pub(crate) fn attach(cell: &Arc<VringCell>, mover: &mut Mover) -> Result<Self, Taken> {
        let (generation, wanted) = cell.attach().ok_or(Taken(cell.queue()))?;
        let mut vring = Self {
            cell: Arc::clone(cell),
            applied: generation,
            pending: None,
            active: None,
            copies: CopyQueue::open(mover, 1),
            chains: Chains::new(1),
            lent: 0,
            vanished: 0,
            binding: Binding::core(),
            // For a stopped ring, the last worker has reported its position.
            report: cell.report(),
        };
        vring.apply(mover, generation, &wanted);
        Ok(vring)
    }

    /// Packets in flight.
    pub(crate) fn in_flight(&self, mover: &mut Mover) -> usize {
        self.copies.in_flight(mover)
    }

    /// Applies changes published in the cell. Returns whether new chains may be taken.
    #[inline(always)]
    pub(crate) fn service(&mut self, mover: &mut Mover) -> bool {
        if self.cell.generation() != self.applied {
            self.change(mover);
        }
        if sigbus::vanished() != self.vanished {
            self.check_vanished_memory();
        }
        self.pending.is_none() && self.active.is_some() && self.report.broken.is_none()
    }

    /// Handles the loss of mapped memory. If memory of this ring is affected, no more chains are taken: reads from it
    /// return meaningless data, and writes to it allocate memory of this process. The control side ends the connection.
    #[cold]
    fn check_vanished_memory(&mut self) {
        self.vanished = sigbus::vanished();
        if self.active.as_ref().is_some_and(|active| active.config.memory.vanished()) && !self.is_broken() {
            self.break_down(RingError::Vanished);
        }
    }

    /// Whether a publication is not applied yet.
    pub(crate) fn is_changing(&self) -> bool {
        self.pending.is_some() || self.cell.generation() != self.applied
    }

    /// Whether the ring is broken. No chains are taken until the front end restarts it.
    pub(crate) fn is_broken(&self) -> bool {
        self.report.broken.is_some()
    }

    #[cold]
    fn change(&mut self, mover: &mut Mover) {
        let (generation, wanted) = self.cell.latest_publication();
        if self.in_flight(mover) > 0 || self.lent > 0 {
            // New chains wait. Packets in flight are published under the old configuration as they complete.
            self.pending = Some((generation, wanted));
            return;
        }
        self.pending = None;
        self.apply(mover, generation, &wanted);
    }

    fn apply(&mut self, mover: &mut Mover, generation: u32, wanted: &Wanted) {
        if let Some(active) = &self.active {
            self.report.base = active.queue.base();
        }
        let same = match (&mut self.active, &wanted.vring) {
            (Some(active), Some(vring)) if active.config.start == vring.start => {
                if Arc::ptr_eq(&active.config.memory, &vring.memory) {
                    active.adjust(Arc::clone(vring));
                } else {
                    self.move_to(mover, vring);
                }
                true
            }
            _ => false,
        };
        if !same {
            self.take_up(mover, wanted.vring.clone());
        }
        self.report.refused = None;
        if wanted.binding != self.binding {
            self.bind(mover, &wanted.binding);
        }
        self.applied = generation;
        self.cell.acknowledge(generation, self.report.clone());
    }

    /// Changes the binding. This resets the statistics and the decision of mode `auto`, so it is called only for a
    /// different binding. A refusal is reported by the control side and not logged here: a guest that restarts its
    /// queue repeatedly triggers a new attempt each time, and must not make the worker wait for the log.
    fn bind(&mut self, mover: &mut Mover, binding: &Binding) {
        self.binding = match self.copies.bind(mover, binding) {
            Ok(()) => binding.clone(),
            Err(error) => {
                self.report.refused = Some(error);
                let core = Binding { weight: binding.weight, ..Binding::core() };
                let bound = self.copies.bind(mover, &core);
                debug_assert!(bound.is_ok(), "no channel, so none is missing");
                core
            }
        };
    }

    /// Continues at the current position of the ring, in other memory. A broken ring stays broken.
    fn move_to(&mut self, mover: &mut Mover, vring: &VringConfig) {
        let broken = self.report.broken.take();
        self.take_up(mover, Some(Arc::new(VringConfig { base: self.report.base, ..vring.clone() })));
        self.report.broken = broken.or(self.report.broken.take());
    }

    /// Switches to another ring, or to none. Nothing may be in flight.
    fn take_up(&mut self, mover: &mut Mover, vring: Option<Arc<VringConfig>>) {
        self.report.broken = None;
        self.active = None;
        self.vanished = 0;
        let receives = self.cell.queue().is_multiple_of(2);
        match vring.map(|vring| Active::new(vring, receives)) {
            None => {}
            Some(Ok(active)) => {
                self.report.base = active.queue.base();
                let size = usize::from(active.queue.size());
                self.active = Some(active);
                self.resize(mover, size);
            }
            Some(Err(error)) => self.report.broken = Some(error),
        }
    }

    /// Makes room for as many chains in flight as a queue of `size` descriptors has, because each chain may be a
    /// packet. The capacity is not larger than needed, so that the entries stay in the core's caches. Nothing may be in
    /// flight.
    fn resize(&mut self, mover: &mut Mover, size: usize) {
        let size = size.next_power_of_two();
        if self.copies.capacity() == size {
            return;
        }
        let resized = self.copies.resize(mover, size);
        debug_assert!(resized.is_ok(), "a ring changes only when nothing is in flight");
        self.chains = Chains::new(size);
    }

    /// Marks the queue as broken. It takes no more chains until the front end restarts it. The control side logs the
    /// error: a guest that repeatedly breaks its queues must not make the worker wait for the log.
    #[cold]
    pub(crate) fn break_down(&mut self, error: RingError) {
        if let Some(active) = &self.active {
            self.report.base = active.queue.base();
        }
        self.report.broken = Some(error);
        self.cell.report_broken(self.report.clone());
    }

    /// Whether the front end has started and enabled the queue, and has not requested a stop since.
    #[inline(always)]
    pub(crate) fn is_enabled(&self) -> bool {
        let config = match &self.pending {
            Some((_, wanted)) => wanted.vring.as_ref(),
            None => self.active.as_ref().map(|active| &active.config),
        };
        config.is_some_and(|config| config.enabled)
    }

    /// Whether writes to the guest's memory are logged.
    #[inline(always)]
    pub(crate) fn is_logged(&self) -> bool {
        self.active.as_ref().is_some_and(|active| active.logging.is_some())
    }

    /// Records that `packets` of a pair use buffers of this queue. They keep the memory mapped.
    #[inline(always)]
    pub(crate) fn lend(&mut self, packets: usize) {
        self.lent += packets;
        if let Some(active) = &mut self.active {
            active.hold(&self.cell, self.lent);
        }
    }

    /// Records that `packets` of a pair were published and no longer need the memory.
    #[inline(always)]
    pub(crate) fn give_back(&mut self, packets: usize) {
        self.lent -= packets;
        if let Some(active) = &mut self.active {
            active.hold(&self.cell, self.lent);
        }
    }
}

impl Drop for Vring {
    /// If copies are still in flight, the guest's memory stays mapped forever: see [`Held`].
    fn drop(&mut self) {
        if let Some(active) = &self.active {
            self.report.base = active.queue.base();
        }
        self.cell.detach(self.active.as_ref().map(|active| &active.config), self.report.clone());
    }
}

/// Limits the number of packets of a burst that a call handles.
pub(crate) const fn burst_limit(packets: usize) -> usize {
    if packets < BURST { packets } else { BURST }
}
