//! The worker's side of one virtqueue: what enqueue and dequeue share.
//!
//! A `Vring` follows its [`VringCell`]: it picks up changes between bursts, takes no new chains while it drains, and
//! acknowledges when nothing is in flight any more. What is needed when a packet is published, its buffer and its chains,
//! is its holder in the copy queue.

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

/// What a worker that wants to sleep has to wait for.
#[derive(Clone, Copy, Debug)]
pub enum Arm<'a> {
    /// For nothing: there is work.
    Now,
    /// For this descriptor to become readable.
    Event(BorrowedFd<'a>),
    /// For nobody who would tell: it has to look again soon.
    Poll,
    /// For nothing that could come before the control side changes something.
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
    pub(crate) queue: device::Queue,
    pub(crate) mergeable: bool,
    /// What packets of this direction may ask for.
    pub(crate) offloads: Offloads,
    /// What is written is marked, for a guest that migrates.
    pub(crate) logging: Option<Box<Logging>>,
    /// What is known of the room of a guest's receive ring.
    pub(crate) room: Room,
}

impl Active {
    /// `receives`: whether the guest receives from it.
    fn new(config: Arc<VringConfig>, receives: bool) -> Result<Self, RingError> {
        let offloads = if receives { features::received } else { features::transmitted };
        let has = |bit| config.features & bit != 0;
        let mut queue = device::Queue::new(
            config.layout.clone(),
            config.base,
            has(VIRTIO_F_EVENT_IDX),
            has(VIRTIO_F_INDIRECT_DESC),
        )?;
        if let Some(inflight) = &config.inflight {
            queue.track(inflight.clone());
        }
        // A worker polls: it needs no kicks.
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

    /// Has another configuration of the same start, in the same memory. Nothing is in flight.
    fn adjust(&mut self, config: Arc<VringConfig>) {
        self.config = config;
        self.room.forget();
        self.log();
    }

    /// Logs as the configuration says, and that the ring was written.
    fn log(&mut self) {
        self.logging = self.config.log.clone().map(|log| Box::new(Logging::new(log)));
        self.mark_ring();
    }

    fn mark_ring(&self) {
        if let Some(logging) = &self.logging {
            logging.mark_ring();
        }
    }

    /// Asks the driver to kick when there is something new, and then looks whether there is.
    pub(crate) fn arm(&mut self) -> Arm<'_> {
        let available = with_queue!(&mut self.queue, queue => {
            queue.set_notification(true);
            queue.look(1)
        });
        self.mark_ring();
        match (available, &self.config.kick) {
            (Ok(0), Some(kick)) => Arm::Event(kick.as_fd()),
            (Ok(0), None) => Arm::Poll,
            // What is wrong with the ring is found when it is worked on.
            _ => Arm::Now,
        }
    }

    /// Asks the driver for no kicks, and forgets those that have come.
    pub(crate) fn disarm(&mut self) {
        self.queue.set_notification(false);
        self.mark_ring();
        if let Some(kick) = &self.config.kick {
            eventfd::empty(kick);
        }
    }

    /// Notes how many packets are in flight now: they hold the memory.
    #[inline(always)]
    pub(crate) fn hold(&mut self, cell: &VringCell, in_flight: usize) {
        self.memory.set_in_flight(in_flight);
        cell.set_in_flight(in_flight as u64);
    }

    /// Marks what the oldest `packets` in flight have written, if it is logged: their copies are complete.
    #[inline(always)]
    pub(crate) fn complete(&mut self, packets: usize) {
        if let Some(logging) = &mut self.logging {
            logging.complete(packets);
        }
    }

    /// Makes the used elements written so far visible, and tells the driver if it wants to be told.
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

/// What one call takes packets from a virtqueue with, or delivers them; it notes in `done` what became of them.
pub(crate) struct Call<'a, T> {
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
    /// Bytes written into it.
    pub(crate) written: u32,
}

/// What a packet in flight needs when it is published.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    pub(crate) packet: Option<Packet>,
    pub(crate) chains: u16,
}

/// Chains in the order in which they go back: as many as the queue has descriptors, so it never fills.
#[derive(Debug)]
pub(crate) struct Chains {
    entries: Box<[Out]>,
    oldest: u16,
    next: u16,
}

impl Chains {
    /// For a queue of `size`.
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
    /// A publication that waits until nothing is in flight.
    pending: Option<(u32, Wanted)>,
    pub(crate) active: Option<Active>,
    pub(crate) copies: CopyQueue<InFlight>,
    pub(crate) chains: Chains,
    /// Packets of a pair that are in this queue's buffers.
    pub(crate) lent: usize,
    /// Mappings that had vanished when this ring's were last looked at.
    vanished: usize,
    /// Who copies: what is wanted, or the core where that cannot be.
    pub(crate) binding: Binding,
    report: Report,
}

impl Vring {
    /// Takes the worker's side of `cell`.
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
            // Of a ring that rests, the last worker has said where it goes on.
            report: cell.report(),
        };
        vring.apply(mover, generation, &wanted);
        Ok(vring)
    }

    /// Packets in flight.
    pub(crate) fn in_flight(&self, mover: &mut Mover) -> usize {
        self.copies.in_flight(mover)
    }

    /// Follows the cell; returns whether new chains may be taken.
    #[inline(always)]
    pub(crate) fn service(&mut self, mover: &mut Mover) -> bool {
        if self.cell.generation() != self.applied {
            self.change(mover);
        }
        if sigbus::vanished() != self.vanished {
            self.look_for_memory();
        }
        self.pending.is_none() && self.active.is_some() && self.report.broken.is_none()
    }

    /// Some memory has vanished. Where it is this ring's, nothing is taken from it any more: what is read there means nothing, and
    /// what is written costs this process's own memory. The control side ends the connection.
    #[cold]
    fn look_for_memory(&mut self) {
        self.vanished = sigbus::vanished();
        if self.active.as_ref().is_some_and(|active| active.config.memory.vanished()) && !self.is_broken() {
            self.break_down(RingError::Vanished);
        }
    }

    /// Whether a publication waits to be followed.
    pub(crate) fn is_changing(&self) -> bool {
        self.pending.is_some() || self.cell.generation() != self.applied
    }

    /// Whether nothing is taken from the ring until the front end starts it anew.
    pub(crate) fn is_broken(&self) -> bool {
        self.report.broken.is_some()
    }

    #[cold]
    fn change(&mut self, mover: &mut Mover) {
        let (generation, wanted) = self.cell.pick_up();
        if self.in_flight(mover) > 0 || self.lent > 0 {
            // New chains wait; what is in flight is published under the old state as it completes.
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

    /// Lets somebody else copy. What mode `auto` has learnt and counted is forgotten, so this is only for a binding that
    /// is another one. That it was refused is for the control side to say: a guest that starts its queue again and again has it
    /// tried again, and must not have the worker wait for whoever reads the log.
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

    /// Goes on where the ring is, in other memory. One that is broken stays so.
    fn move_to(&mut self, mover: &mut Mover, vring: &VringConfig) {
        let broken = self.report.broken.take();
        self.take_up(mover, Some(Arc::new(VringConfig { base: self.report.base, ..vring.clone() })));
        self.report.broken = broken.or(self.report.broken.take());
    }

    /// Begins with another ring, or with none. Nothing is in flight.
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

    /// Makes room for as many chains in flight as a queue of `size` has, each of which may be a packet: no more, so that
    /// what is used in turn stays in the core's caches. Nothing is in flight.
    fn resize(&mut self, mover: &mut Mover, size: usize) {
        let size = size.next_power_of_two();
        if self.copies.capacity() == size {
            return;
        }
        let resized = self.copies.resize(mover, size);
        debug_assert!(resized.is_ok(), "a ring changes only when nothing is in flight");
        self.chains = Chains::new(size);
    }

    /// The queue is broken: it takes no more chains until the front end starts it anew. The control side says so: a guest
    /// that breaks its queues in turn must not have the worker wait for whoever reads the log.
    #[cold]
    pub(crate) fn break_down(&mut self, error: RingError) {
        if let Some(active) = &self.active {
            self.report.base = active.queue.base();
        }
        self.report.broken = Some(error);
        self.cell.report_broken(self.report.clone());
    }

    /// Whether the front end has started and enabled the queue, and not asked since for its end.
    #[inline(always)]
    pub(crate) fn is_enabled(&self) -> bool {
        let config = match &self.pending {
            Some((_, wanted)) => wanted.vring.as_ref(),
            None => self.active.as_ref().map(|active| &active.config),
        };
        config.is_some_and(|config| config.enabled)
    }

    /// Whether what is written to the guest is logged.
    #[inline(always)]
    pub(crate) fn is_logged(&self) -> bool {
        self.active.as_ref().is_some_and(|active| active.logging.is_some())
    }

    /// Notes `packets` of a pair in this queue's buffers: they hold the memory.
    #[inline(always)]
    pub(crate) fn lend(&mut self, packets: usize) {
        self.lent += packets;
        if let Some(active) = &mut self.active {
            active.hold(&self.cell, self.lent);
        }
    }

    /// Notes that `packets` of a pair were published, and lets go of the memory.
    #[inline(always)]
    pub(crate) fn give_back(&mut self, packets: usize) {
        self.lent -= packets;
        if let Some(active) = &mut self.active {
            active.hold(&self.cell, self.lent);
        }
    }
}

impl Drop for Vring {
    /// With copies still in flight the guest's memory stays mapped for good: see [`Held`].
    fn drop(&mut self) {
        if let Some(active) = &self.active {
            self.report.base = active.queue.base();
        }
        self.cell.detach(self.active.as_ref().map(|active| &active.config), self.report.clone());
    }
}

/// How many packets of a burst a call looks at, at most.
pub(crate) const fn burst_limit(packets: usize) -> usize {
    if packets < BURST { packets } else { BURST }
}
