//! The mover: one worker's channels and reorder rings.
//!
//! A queue asks for a [`Plan`], which says who will copy and how much there is room for, before it consumes anything;
//! enters its packets in its reorder ring; and submits the gathered list. Completions come back through
//! [`Mover::poll`], which routes every token to its queue, whatever channel it went through, so that any queue can use
//! any channel. What an engine fails to do the core finishes from the first byte not copied.
//!
//! A copy that is not answered in time is *quarantined*: its packet is neither published nor freed while the channel is
//! reset; only when the reset has proved the copy dead does the core make it.

mod auto;
mod choice;
mod health;
mod latency;
mod mode;
mod plan;
mod policy;
mod recovery;
mod shares;
mod stats;
mod tally;
#[cfg(test)]
mod tests;

pub use choice::CLASSES;
pub use health::{FAILURES, FORGET_AFTER};
pub use mode::{Binding, Mode};
pub use plan::Plan;
pub use stats::{ChannelHealth, Decision, Decisions, MoverStats, Reason, Service, Way};

use std::time::Duration;

use arrayvec::ArrayVec;
use offcore_stats::{Stage, StageClock, tsc};

use crate::channel::{Channel, Completions, Copy, Operation, Token};
use crate::cpu::{Copier, Routine};
use crate::reorder::ReorderRing;
use auto::Timed;
use choice::Choice;
use health::{BackOff, Health};
use latency::Latency;
use policy::Policy;
use tally::Tally;

/// Channels that one queue can spread its load over, at most.
pub const MAX_CHANNELS_PER_QUEUE: usize = 8;
/// How long a channel that failed repeatedly is left alone before one burst tries it: at first, and at most.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(10));

/// Names a queue of a mover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId(u16);

/// Names a channel of a mover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChannelId(u16);

impl ChannelId {
    /// The channel's position: the order in which channels were added.
    pub fn index(self) -> usize {
        self.0.into()
    }
}

impl QueueId {
    /// The token of a copy of the packet in reorder slot `slot`.
    #[inline(always)]
    pub fn token(self, slot: usize) -> Token {
        u32::from(self.0) << 16 | slot as u32
    }

    /// The position of the queue that a token belongs to.
    #[inline(always)]
    fn of(token: Token) -> usize {
        token as usize >> 16
    }
}

#[derive(Debug)]
struct Queue {
    ring: ReorderRing,
    mode: Mode,
    channels: ArrayVec<ChannelId, MAX_CHANNELS_PER_QUEUE>,
    turn: usize,
    copier: Copier,
    /// In mode `auto`: who copies, what has been copied, and why the engine is not used just now although it is chosen.
    choice: Choice,
    tally: Tally,
    hindrance: Option<Reason>,
    /// In mode `auto`, when there is a longest time that packets may take.
    latency: Latency,
    weight: u16,
    /// Copies in channels.
    outstanding: usize,
    /// Copies ever given to channels.
    by_engine: u64,
    /// Copies that may be in channels.
    share: usize,
    /// Whether it had work for its channels in the period before, and in this one.
    active: bool,
    worked: bool,
    /// How often its guest's memory could not be reached.
    faults: Health,
    /// The packet that was outstanding and the oldest when the queue was last looked at, and since when.
    watched: Option<(u32, u64)>,
}

#[derive(Debug)]
struct Slot {
    channel: Box<dyn Channel>,
    ring_size: usize,
    resetting: bool,
    health: Health,
}

/// Why a queue or channel cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoverError {
    /// Packets are in flight.
    #[error("{0} packets are in flight: poll until none is")]
    InFlight(usize),
    /// A queue still names the channel.
    #[error("a queue is bound to the channel: bind it to another one first")]
    Bound,
    /// More channels than a queue can use.
    #[error("{0} channels for one queue: at most {MAX_CHANNELS_PER_QUEUE}")]
    TooManyChannels(usize),
    /// A channel that this mover does not have.
    #[error("channel {0} is not this worker's")]
    NoChannel(usize),
}

/// One worker's channels and queues.
#[derive(Debug)]
pub struct Mover {
    queues: Vec<Option<Queue>>,
    channels: Vec<Option<Slot>>,
    completions: Box<Completions>,
    stats: MoverStats,
    lost_after: u64,
    until_lost_check: u32,
    until_idle_check: u32,
    /// Queues in mode `auto`.
    autos: usize,
    policy: Policy,
    /// Their bursts until a round is timed.
    lease: u32,
    timed: Timed,
    /// Work done when the lease before this one ended.
    settled: u64,
    /// TSC ticks that a packet may take through an engine in mode `auto`.
    max_latency: Option<u64>,
    back_off: BackOff,
    quarantine: bool,
    recovery: bool,
    shares: bool,
}

impl Default for Mover {
    fn default() -> Self {
        Self::new()
    }
}

impl Mover {
    /// A mover without channels: the core copies.
    pub fn new() -> Self {
        Self {
            queues: Vec::new(),
            channels: Vec::new(),
            completions: Box::default(),
            stats: MoverStats::default(),
            lost_after: tsc::hz(),
            until_lost_check: recovery::LOST_CHECK,
            until_idle_check: shares::IDLE_AFTER,
            autos: 0,
            policy: Policy::new(),
            lease: 0,
            timed: Timed::default(),
            settled: 0,
            max_latency: None,
            back_off: BackOff { first: tsc::ticks(BACK_OFF.0), most: tsc::ticks(BACK_OFF.1) },
            quarantine: true,
            recovery: true,
            shares: true,
        }
    }

    /// A channel that failed repeatedly is tried again after `first` ticks (TSC; 10 ms by default), and after twice as
    /// many whenever that fails, up to `most` (10 s by default).
    pub fn set_back_off(&mut self, first: u64, most: u64) {
        self.back_off = BackOff { first, most: most.max(first) };
    }

    /// A copy that has not completed after `ticks` (TSC; one second by default) counts as lost.
    pub fn set_lost_after(&mut self, ticks: u64) {
        self.lost_after = ticks;
    }

    /// In mode `auto`, a queue whose packets take longer than `ticks` (TSC) through an engine, from submission to
    /// publication, is left to the core ([`Reason::Latency`]); one burst in some thousands sees whether that has changed.
    /// `None`, the default: only cost counts.
    pub fn set_max_latency(&mut self, ticks: Option<u64>) {
        self.max_latency = ticks;
        for queue in self.queues.iter_mut().flatten() {
            queue.latency = Latency::new();
        }
    }

    // ---- set-up ----

    /// Adds a channel.
    pub fn add_channel(&mut self, channel: Box<dyn Channel>) -> ChannelId {
        let ring_size = channel.info().ring_size;
        self.channels.push(Some(Slot { channel, ring_size, resetting: false, health: Health::new() }));
        ChannelId(self.channels.len() as u16 - 1)
    }

    /// Takes a channel out.
    ///
    /// # Errors
    /// While operations are in flight in it, or a queue is bound to it.
    pub fn remove_channel(&mut self, id: ChannelId) -> Result<Box<dyn Channel>, MoverError> {
        if self.queues.iter().flatten().any(|q| q.channels.contains(&id)) {
            return Err(MoverError::Bound);
        }
        let slot = self.channels.get_mut(id.index()).ok_or(MoverError::NoChannel(id.index()))?;
        match slot.take() {
            None => Err(MoverError::NoChannel(id.index())),
            Some(busy) if busy.channel.in_flight() > 0 => {
                let in_flight = busy.channel.in_flight();
                *slot = Some(busy);
                Err(MoverError::InFlight(in_flight))
            }
            Some(idle) => Ok(idle.channel),
        }
    }

    /// The channels, with their ids.
    pub fn channels(&self) -> impl Iterator<Item = (ChannelId, &dyn Channel)> {
        let present = self.channels.iter().enumerate();
        present.filter_map(|(i, slot)| Some((ChannelId(i as u16), slot.as_ref()?.channel.as_ref())))
    }

    /// A new queue whose reorder ring has room for `packets` in flight; the core copies until it is bound.
    pub fn open_queue(&mut self, packets: usize) -> QueueId {
        let queue = Queue {
            ring: ReorderRing::new(packets),
            mode: Mode::Cpu,
            channels: ArrayVec::new(),
            turn: 0,
            copier: Copier::default(),
            choice: Choice::new(),
            tally: Tally::default(),
            hindrance: None,
            latency: Latency::new(),
            weight: 1,
            outstanding: 0,
            by_engine: 0,
            share: 0,
            active: false,
            worked: false,
            faults: Health::new(),
            watched: None,
        };
        if let Some(free) = self.queues.iter().position(Option::is_none) {
            self.queues[free] = Some(queue);
            return QueueId(free as u16);
        }
        self.queues.push(Some(queue));
        QueueId(self.queues.len() as u16 - 1)
    }

    /// Says who copies for a queue from now on. Copies in flight stay where they are; the order is kept all the same.
    ///
    /// # Errors
    /// Channels that are not this mover's, or too many.
    pub fn bind(&mut self, queue: QueueId, mode: Mode, channels: &[ChannelId]) -> Result<(), MoverError> {
        if let Some(missing) =
            channels.iter().find(|c| self.channels.get(c.index()).is_none_or(Option::is_none))
        {
            return Err(MoverError::NoChannel(missing.index()));
        }
        let list = ArrayVec::try_from(channels).map_err(|_| MoverError::TooManyChannels(channels.len()))?;
        let queue = self.queue(queue);
        (queue.mode, queue.channels, queue.turn) = (mode, list, 0);
        // What copies cost through other channels says nothing.
        (queue.choice, queue.tally, queue.hindrance) = (Choice::new(), Tally::default(), None);
        queue.latency = Latency::new();
        self.count_autos();
        self.share_out();
        Ok(())
    }

    fn count_autos(&mut self) {
        self.autos = self.queues.iter().flatten().filter(|queue| queue.is_auto()).count();
        self.begin_anew();
    }

    /// Gives a queue a reorder ring of another size.
    ///
    /// # Errors
    /// While packets are in flight.
    pub fn resize_queue(&mut self, queue: QueueId, packets: usize) -> Result<(), MoverError> {
        let queue = self.queue(queue);
        match queue.ring.in_flight() {
            0 => {
                queue.ring.resize(packets);
                Ok(())
            }
            n => Err(MoverError::InFlight(n)),
        }
    }

    /// Closes a queue.
    ///
    /// # Errors
    /// While packets are in flight.
    pub fn close_queue(&mut self, queue: QueueId) -> Result<(), MoverError> {
        match self.queue(queue).ring.in_flight() {
            0 => {
                self.queues[usize::from(queue.0)] = None;
                self.count_autos();
                self.share_out();
                Ok(())
            }
            n => Err(MoverError::InFlight(n)),
        }
    }

    /// The open queues.
    pub fn queues(&self) -> impl Iterator<Item = QueueId> {
        let open = self.queues.iter().enumerate().filter(|(_, queue)| queue.is_some());
        open.map(|(i, _)| QueueId(i as u16))
    }

    /// The queue's weight among those that share a channel, 1 by default: while several have work for it, a queue may
    /// have that part of the channel's ring in flight. 0 counts as 1.
    pub fn set_weight(&mut self, queue: QueueId, weight: u16) {
        self.queue(queue).weight = weight.max(1);
        self.share_out();
    }

    /// The routine by which the core makes the queue's copies at present, when it makes them; `None` for a queue that is
    /// not open.
    pub fn routine(&self, queue: QueueId) -> Option<Routine> {
        let queue = self.queues.get(usize::from(queue.0))?.as_ref()?;
        Some(queue.copier.routine())
    }

    /// What has been decided for a queue, and why.
    pub fn decisions(&self, queue: QueueId) -> Decisions {
        let Some(queue) = self.queues.get(usize::from(queue.0)).and_then(Option::as_ref) else {
            return Decisions::default();
        };
        let (longest_latency, late, latency_pauses) = queue.latency.report();
        Decisions {
            classes: queue.tally.report(queue.choice, queue.hindrance, self.policy.ticks()),
            longest_latency,
            late,
            latency_pauses,
            by_engine: queue.by_engine,
            faults: queue.faults.failed,
            fault_pauses: queue.faults.taken_out,
        }
    }

    /// How a channel does; as new when the mover does not have it.
    pub fn health(&self, channel: ChannelId) -> ChannelHealth {
        let slot = self.channels.get(channel.index()).and_then(Option::as_ref);
        slot.map(|slot| slot.health.report()).unwrap_or_default()
    }

    /// What the mover counted.
    pub fn stats(&self) -> MoverStats {
        let slots = || self.channels.iter().flatten();
        MoverStats {
            channels_out: slots().filter(|slot| !slot.health.is_in()).count() as u64,
            probes: slots().map(|slot| slot.health.probes).sum(),
            ..self.stats
        }
    }

    /// Packets and copies in flight over all queues and channels: while there are any, [`Mover::poll`] has to be called.
    pub fn in_flight(&self) -> usize {
        let packets: usize = self.queues.iter().flatten().map(|queue| queue.ring.in_flight()).sum();
        let busy = |slot: &&Slot| slot.resetting || slot.channel.in_flight() > 0;
        packets + self.channels.iter().flatten().filter(busy).count()
    }

    // ---- per burst ----

    #[inline(always)]
    fn queue(&mut self, id: QueueId) -> &mut Queue {
        self.queues[usize::from(id.0)].as_mut().expect("a QueueId is only given out for an open queue")
    }

    /// The queue's reorder ring.
    #[inline(always)]
    pub fn ring(&mut self, queue: QueueId) -> &mut ReorderRing {
        &mut self.queue(queue).ring
    }

    /// Makes the copies of `list`, or hands them to the planned channel. Every packet named by the tokens has been
    /// entered in the queue's reorder ring with [`Plan::outstanding`] copies.
    ///
    /// # Safety
    /// The memory of every copy must stay valid, and be used by nobody else in a way that conflicts, until its packet
    /// is ready in the reorder ring.
    #[inline(always)]
    pub unsafe fn submit(&mut self, queue: QueueId, plan: Plan, list: &[Copy], clock: &mut StageClock) {
        if plan.auto {
            self.use_lease(queue, list);
        }
        match plan.channel {
            Some(channel) if plan.by_core == 0 => {
                // SAFETY: the caller's promises, passed on.
                unsafe { self.engine_part(queue, plan.auto, channel, list) };
                clock.lap(Stage::Submit);
            }
            Some(channel) if plan.by_engine > 0 => {
                // SAFETY: as above.
                unsafe { self.submit_parted(queue, channel, list) };
                clock.lap(Stage::Copy);
            }
            _ => {
                if plan.hindered && !list.is_empty() {
                    self.worked(queue);
                }
                // SAFETY: as above.
                unsafe { self.core_part(queue, plan.auto, list) };
                clock.lap(Stage::Copy);
            }
        }
        self.stats.overflow += if plan.hindered { list.len() as u64 } else { u64::from(plan.overflow) };
    }

    /// # Safety
    /// As for [`Mover::submit`].
    #[inline]
    unsafe fn hand_over(&mut self, queue: QueueId, id: ChannelId, list: &[Copy]) {
        if list.is_empty() {
            return;
        }
        self.worked(queue);
        let sender = self.queue(queue);
        sender.outstanding += list.len();
        sender.by_engine += list.len() as u64;
        sender.faults.sent();
        let mut accepted = 0;
        if let Some(slot) = self.channels[id.index()].as_mut() {
            slot.health.sent();
            // SAFETY: the caller keeps the memory until the packet is ready, which is after its token was reported or
            // its channel was reset.
            accepted = unsafe { slot.channel.copy(list) };
            slot.channel.submit();
        }
        if accepted == 0 {
            // Nothing at all although it had room: a queue that is gone and could not be opened again, say.
            self.charge_channel(id.index(), 1);
        }
        for op in &list[accepted..] {
            // The channel had said that it had room. Whatever made it change its mind: the core copies.
            // SAFETY: as above.
            unsafe { self.redo(&Operation::Copy(*op), 0) };
        }
    }

    /// Notes that a queue has work for its channels, whether they take it or not.
    #[inline(always)]
    fn worked(&mut self, id: QueueId) {
        let queue = self.queue(id);
        queue.worked = true;
        if !queue.active {
            self.activate(id);
        }
    }

    #[cold]
    fn activate(&mut self, queue: QueueId) {
        self.queue(queue).active = true;
        self.share_out();
    }

    /// Collects what has completed on every channel and notes it in the reorder rings. To be called in every round,
    /// before the queues.
    #[inline]
    pub fn poll(&mut self, clock: &mut StageClock) {
        if self.channels.is_empty() {
            return;
        }
        self.until_idle_check -= 1;
        if self.until_idle_check == 0 {
            self.look_for_idle();
        }
        if self.lease == 0 && self.autos > 0 {
            self.begin_timed();
        }
        let mut waiting = false;
        for index in 0..self.channels.len() {
            waiting |= self.poll_channel(index);
        }
        if !waiting {
            return;
        }
        if self.max_latency.is_some() {
            self.look_for_late();
        }
        self.until_lost_check -= 1;
        if self.until_lost_check == 0 {
            self.until_lost_check = recovery::LOST_CHECK;
            self.look_for_lost();
        }
        clock.lap(Stage::Poll);
    }

    /// Returns whether the channel had anything in flight.
    #[inline]
    fn poll_channel(&mut self, index: usize) -> bool {
        let Some(slot) = self.channels[index].as_ref() else { return false };
        let resetting = slot.resetting;
        if slot.channel.in_flight() == 0 && !resetting {
            return false;
        }
        self.collect(index);
        if resetting {
            self.go_on_resetting(index);
        }
        true
    }

    /// Notes what a channel reports; returns how many operations that were.
    #[inline(always)]
    fn collect(&mut self, index: usize) -> usize {
        let Self { queues, channels, completions, .. } = self;
        let Some(slot) = channels[index].as_mut() else { return 0 };
        completions.clear();
        slot.channel.poll(completions);
        let mut tokens = completions.tokens.as_slice();
        let done = tokens.len();
        while let Some(&token) = tokens.first() {
            let run = match queues.get_mut(QueueId::of(token)).and_then(Option::as_mut) {
                Some(queue) => queue.completed(tokens),
                None => 1,
            };
            tokens = &tokens[run..];
        }
        slot.health.succeeded(done as u32);
        let failed = self.completions.failed.len();
        if failed > 0 {
            self.recover(index);
        }
        done + failed
    }

    /// Test switch: lost copies are made by the core at once, without waiting for proof that they are dead.
    #[cfg(feature = "test-switches")]
    pub fn switch_off_quarantine(&mut self) {
        self.quarantine = false;
    }

    /// Test switch: what a channel could not copy counts as copied.
    #[cfg(feature = "test-switches")]
    pub fn switch_off_recovery(&mut self) {
        self.recovery = false;
    }
}

/// The bytes of a list.
#[inline(always)]
fn bytes(list: &[Copy]) -> u64 {
    list.iter().map(|copy| u64::from(copy.len)).sum()
}

impl Queue {
    /// Whether mode `auto` has something to choose.
    fn is_auto(&self) -> bool {
        self.mode == Mode::Auto && !self.channels.is_empty()
    }

    /// Notes the completions at the start of `tokens` that are this queue's, the first at least; returns their number.
    #[inline(always)]
    fn completed(&mut self, tokens: &[Token]) -> usize {
        let run = self.ring.complete_run(tokens);
        self.outstanding = self.outstanding.saturating_sub(run);
        self.faults.succeeded(run as u32);
        run
    }
}

impl Drop for Mover {
    /// Channels finish or stop what is in flight before they go, so nothing lands afterwards.
    fn drop(&mut self) {
        self.channels.clear();
    }
}
