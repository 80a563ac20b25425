//! The mover: the channels of a worker, and the state of its copy queues.
//!
//! Copies submitted to a [`CopyQueue`](crate::CopyQueue) go to a channel or are made by the core, depending on the
//! [`Plan`]. Completions are collected by [`Mover::poll`], which routes every token to its queue, whatever channel the
//! copy used. Therefore any queue can use any channel. If an engine fails a copy, the core completes it from the first
//! byte not copied.
//!
//! A copy that does not complete in time is *quarantined*: its packet is neither published nor freed while the channel
//! is reset. The core makes the copy only after the reset has proved that the engine will not.

mod auto;
mod channels;
mod choice;
mod health;
mod latency;
mod mode;
mod plan;
mod policy;
mod queue;
mod recovery;
mod shares;
mod stats;
mod tally;
#[cfg(test)]
mod tests;

pub(crate) use channels::Channels;

pub use health::{FAILURES, FORGET_AFTER};
pub use mode::{Binding, Mode};
pub use plan::Plan;
pub(crate) use queue::MoverQueue;
pub use stats::{CLASSES, ChannelHealth, Decision, Decisions, MoverStats, Reason, Service, Way};

use std::time::Duration;

use arrayvec::ArrayVec;
use offcore_stats::{Stage, StageClock, tsc};

use crate::channel::{Channel, Completions, Token};
use crate::cpu::{Copier, Routine};
use auto::Timed;
use channels::ChannelSlot;
use choice::QueueChoice;
use health::{BackOff, Health};
use latency::Latency;
use queue::Turns;
use tally::Tally;

/// Maximum number of channels that a queue can use.
pub const MAX_CHANNELS_PER_QUEUE: usize = 8;
/// First and maximum time for which a repeatedly failing channel is not used, until one burst tries it.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(10));

/// Identifies a queue of a mover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId(u16);

/// Identifies a channel of a mover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChannelId(u16);

impl ChannelId {
    /// Returns the channel's position in the order in which channels were added.
    pub fn index(self) -> usize {
        self.0.into()
    }
}

impl QueueId {
    /// Returns the token for copies of the packet in reorder slot `slot`.
    #[inline(always)]
    pub(crate) fn token(self, slot: usize) -> Token {
        u32::from(self.0) << 16 | slot as u32
    }

    /// Returns the position of the queue that a token belongs to.
    #[inline(always)]
    fn of(token: Token) -> usize {
        token as usize >> 16
    }
}

/// Why a queue or channel cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum MoverError {
    /// {0} packets are in flight: poll until none is
    InFlight(usize),
    /// {0} channels for one queue: at most {MAX_CHANNELS_PER_QUEUE:?}
    TooManyChannels(usize),
    /// channel {0} is not this worker's
    NoChannel(usize),
}

/// The channels and queues of a worker.
#[derive(Debug)]
pub struct Mover {
    queues: Vec<MoverQueue>,
    channels: Channels,
    completions: Box<Completions>,
    lost_after: u64,
    until_lost_check: u32,
    until_idle_check: u32,
    /// Number of queues in mode `auto`.
    autos: usize,
    timed: Timed,
    /// Total work at the end of the previous lease.
    settled: u64,
    quarantine: bool,
    shares: bool,
    /// Whether the core never uses streaming stores.
    cached_stores_only: bool,
}

impl Default for Mover {
    fn default() -> Self {
        Self::new()
    }
}

impl Mover {
    /// Creates a mover without channels: the core copies.
    pub fn new() -> Self {
        Self {
            queues: Vec::new(),
            channels: Channels::new(BackOff { first: tsc::ticks(BACK_OFF.0), most: tsc::ticks(BACK_OFF.1) }),
            completions: Box::default(),
            lost_after: tsc::hz(),
            until_lost_check: recovery::LOST_CHECK,
            until_idle_check: shares::IDLE_AFTER,
            autos: 0,
            timed: Timed::default(),
            settled: 0,
            quarantine: true,
            shares: true,
            cached_stores_only: false,
        }
    }

    /// Makes the core use only stores through its caches ([`Copier::cached_stores_only`]) from now on, also for
    /// queues that are opened later.
    pub fn disable_streaming_stores(&mut self) {
        self.cached_stores_only = true;
        for queue in &mut self.queues {
            queue.copier = Copier::cached_stores_only();
        }
    }

    /// Sets the time in TSC ticks after which a repeatedly failing channel is tried again: first `first` (10 ms by
    /// default), then twice as long after each failure, up to `most` (10 s by default).
    pub fn set_back_off(&mut self, first: u64, most: u64) {
        self.channels.back_off = BackOff { first, most: most.max(first) };
    }

    /// Sets the time in TSC ticks (one second by default) after which an incomplete copy counts as lost.
    pub fn set_lost_after(&mut self, ticks: u64) {
        self.lost_after = ticks;
    }

    /// Sets a limit, in TSC ticks, of the latency from submission to publication for queues in mode `auto`. A queue
    /// that exceeds it through an engine is left to the core ([`Reason::Latency`]), and one burst in some thousands
    /// tests whether the latency has changed. With `None`, the default, only cost counts.
    pub fn set_max_latency(&mut self, ticks: Option<u64>) {
        self.channels.max_latency = ticks;
        for queue in &mut self.queues {
            queue.latency = Latency::new();
        }
    }

    // ---- set-up ----

    /// Adds a channel.
    pub fn add_channel(&mut self, channel: Box<dyn Channel>) -> ChannelId {
        let ring_size = channel.info().ring_size;
        self.channels.slots.push(ChannelSlot { channel, ring_size, resetting: false, health: Health::new() });
        ChannelId(self.channels.slots.len() as u16 - 1)
    }

    /// Returns the channels with their ids.
    pub fn channels(&self) -> impl Iterator<Item = (ChannelId, &dyn Channel)> {
        let channels = self.channels.slots.iter().enumerate();
        channels.map(|(i, slot)| (ChannelId(i as u16), slot.channel.as_ref()))
    }

    /// Opens a queue whose reorder ring has room for `packets` in flight. The core copies until the queue is bound.
    pub(crate) fn open_queue(&mut self, packets: usize) -> QueueId {
        let copier = if self.cached_stores_only { Copier::cached_stores_only() } else { Copier::default() };
        self.queues.push(MoverQueue::new(packets, copier));
        QueueId(self.queues.len() as u16 - 1)
    }

    /// Sets the copy mode and the channels of a queue from now on. Copies in flight are not moved, and the order of
    /// packets is kept.
    ///
    /// # Errors
    /// Channels of another mover, or too many channels.
    pub(crate) fn bind_queue(&mut self, queue: QueueId, binding: &Binding) -> Result<(), MoverError> {
        let Binding { mode, channels, weight } = binding;
        let is_missing = |c: &&ChannelId| self.channels.slots.get(c.index()).is_none();
        if let Some(missing) = channels.iter().find(is_missing) {
            return Err(MoverError::NoChannel(missing.index()));
        }
        let too_many = |_| MoverError::TooManyChannels(channels.len());
        let list = ArrayVec::try_from(channels.as_slice()).map_err(too_many)?;
        let queue = self.queue(queue);
        (queue.mode, queue.channels) = (*mode, Turns::new(list));
        queue.share.set_weight(*weight);
        // Costs measured with other channels do not apply.
        (queue.choice, queue.tally, queue.unavailable) = (QueueChoice::new(), Tally::default(), None);
        queue.latency = Latency::new();
        self.count_autos();
        self.distribute();
        Ok(())
    }

    fn count_autos(&mut self) {
        self.autos = self.queues.iter().filter(|queue| queue.is_auto()).count();
        self.cancel_trial();
    }

    /// Changes the size of a queue's reorder ring.
    ///
    /// # Errors
    /// Packets are in flight.
    pub(crate) fn resize_queue(&mut self, queue: QueueId, packets: usize) -> Result<(), MoverError> {
        let queue = self.queue(queue);
        match queue.ring.in_flight() {
            0 => {
                queue.ring.resize(packets);
                Ok(())
            }
            n => Err(MoverError::InFlight(n)),
        }
    }

    /// Returns the ids of the queues.
    pub fn queues(&self) -> impl Iterator<Item = QueueId> {
        (0..self.queues.len()).map(|i| QueueId(i as u16))
    }

    /// Returns the routine with which the core presently makes the queue's copies; `None` for a queue of another mover.
    pub fn routine(&self, queue: QueueId) -> Option<Routine> {
        let queue = self.queues.get(usize::from(queue.0))?;
        Some(queue.copier.routine())
    }

    /// Returns the decisions for a queue and their reasons.
    pub fn decisions(&self, queue: QueueId) -> Decisions {
        let Some(queue) = self.queues.get(usize::from(queue.0)) else {
            return Decisions::default();
        };
        let (longest_latency, late, latency_pauses) = queue.latency.report();
        Decisions {
            classes: queue.tally.report(queue.choice, queue.unavailable, self.channels.policy.ticks()),
            longest_latency,
            late,
            latency_pauses,
            by_engine: queue.by_engine,
            faults: queue.faults.failed,
            fault_pauses: queue.faults.taken_out,
        }
    }

    /// Returns the health of a channel; the default for a channel of another mover.
    pub fn health(&self, channel: ChannelId) -> ChannelHealth {
        let slot = self.channels.slots.get(channel.index());
        slot.map(|slot| slot.health.report()).unwrap_or_default()
    }

    /// Returns the mover's counters.
    pub fn stats(&self) -> MoverStats {
        let slots = || self.channels.slots.iter();
        MoverStats {
            channels_out: slots().filter(|slot| !slot.health.is_in()).count() as u64,
            probes: slots().map(|slot| slot.health.probes).sum(),
            ..self.channels.stats
        }
    }

    /// Returns the number of packets and busy channels. While it is not 0, the worker must call [`Mover::poll`].
    pub fn in_flight(&self) -> usize {
        let packets: usize = self.queues.iter().map(|queue| queue.ring.in_flight()).sum();
        let busy = |slot: &&ChannelSlot| slot.resetting || slot.channel.in_flight() > 0;
        packets + self.channels.slots.iter().filter(busy).count()
    }

    // ---- per burst ----

    #[inline(always)]
    fn queue(&mut self, id: QueueId) -> &mut MoverQueue {
        &mut self.queues[usize::from(id.0)]
    }

    /// Returns a queue's state and the channels.
    #[inline(always)]
    pub(crate) fn parts(&mut self, id: QueueId) -> (&mut MoverQueue, &mut Channels) {
        let Self { queues, channels, .. } = self;
        (&mut queues[usize::from(id.0)], channels)
    }

    /// Collects completions of every channel and records them in the reorder rings. Call it in every round, before the
    /// queues are served.
    #[inline]
    pub fn poll(&mut self, clock: &mut StageClock) {
        if self.channels.slots.is_empty() {
            return;
        }
        self.until_idle_check -= 1;
        if self.until_idle_check == 0 {
            self.check_idle_queues();
        }
        if self.channels.shares_stale {
            self.distribute();
        }
        if self.channels.lease == 0 && self.autos > 0 {
            self.begin_timed();
        }
        let mut waiting = false;
        for index in 0..self.channels.slots.len() {
            waiting |= self.poll_channel(index);
        }
        if !waiting {
            return;
        }
        if self.channels.max_latency.is_some() {
            self.check_late_packets();
        }
        self.until_lost_check -= 1;
        if self.until_lost_check == 0 {
            self.until_lost_check = recovery::LOST_CHECK;
            self.check_lost_copies();
        }
        clock.lap(Stage::Poll);
    }

    /// Returns whether the channel had anything in flight.
    #[inline]
    fn poll_channel(&mut self, index: usize) -> bool {
        let slot = &self.channels.slots[index];
        let resetting = slot.resetting;
        if slot.channel.in_flight() == 0 && !resetting {
            return false;
        }
        self.collect(index);
        if resetting {
            self.continue_reset(index);
        }
        true
    }

    /// Records the completions of a channel. Returns the number of operations.
    #[inline(always)]
    fn collect(&mut self, index: usize) -> usize {
        let Self { queues, channels, completions, .. } = self;
        let slot = &mut channels.slots[index];
        completions.clear();
        slot.channel.poll(completions);
        let mut tokens = completions.tokens.as_slice();
        let done = tokens.len();
        while let Some(&token) = tokens.first() {
            let run = match queues.get_mut(QueueId::of(token)) {
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

    /// Test switch: packets are returned at once, complete or not.
    #[cfg(feature = "testing")]
    pub fn switch_off_order(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.ring.switch_off());
    }

    /// Test switch: the core makes lost copies at once, without proof that the engine will not execute them.
    #[cfg(feature = "testing")]
    pub fn switch_off_quarantine(&mut self) {
        self.quarantine = false;
    }

    /// Test switch: copies that a channel failed count as copied.
    #[cfg(feature = "testing")]
    pub fn switch_off_recovery(&mut self) {
        self.channels.recovery = false;
    }
}

impl Drop for Mover {
    /// Closes the channels first: they complete or stop copies in flight, so that nothing is written afterwards.
    fn drop(&mut self) {
        self.channels.slots.clear();
    }
}
