//! The channels of a mover, and the submission of a queue's copies to them or to the core.

use offcore_stats::{Stage, StageClock, tsc};

use super::choice::{ALL, NONE};
use super::health::{BackOff, Health};
use super::plan::Plan;
use super::policy::Policy;
use super::queue::MoverQueue;
use super::stats::{MoverStats, Reason, Way};
use super::{ChannelId, Mode};
use crate::channel::{Channel, CopyOp};
use crate::cpu;

/// A channel and its health.
#[derive(Debug)]
pub(super) struct ChannelSlot {
    pub(super) channel: Box<dyn Channel>,
    pub(super) ring_size: usize,
    pub(super) resetting: bool,
    pub(super) health: Health,
}

/// All state of a mover except its queues.
#[derive(Debug)]
pub(crate) struct Channels {
    pub(super) slots: Vec<ChannelSlot>,
    pub(super) stats: MoverStats,
    pub(super) back_off: BackOff,
    /// Whether the core completes copies that a channel failed; false only as a test switch.
    pub(super) recovery: bool,
    /// Whether shares must be recalculated, because a queue has become active.
    pub(super) shares_stale: bool,
    pub(super) policy: Policy,
    /// Number of bursts of queues in mode `auto` until a round is timed.
    pub(super) lease: u32,
    /// Latency limit for packets through an engine in mode `auto`, in TSC ticks.
    pub(crate) max_latency: Option<u64>,
}

impl Channels {
    /// Creates the state without channels: the core copies.
    pub(super) fn new(back_off: BackOff) -> Self {
        Self {
            slots: Vec::new(),
            stats: MoverStats::default(),
            back_off,
            recovery: true,
            shares_stale: false,
            policy: Policy::new(),
            lease: 0,
            max_latency: None,
        }
    }

    /// Returns the plan for the queue's next copies.
    #[inline(always)]
    pub(crate) fn plan(&mut self, queue: &mut MoverQueue) -> Plan {
        let packets = queue.ring.room();
        match queue.mode {
            Mode::Cpu => Plan::core(packets),
            Mode::Offload => self.plan_offload(queue, packets, ALL),
            Mode::Auto => match queue.choice.from {
                NONE => Plan { auto: true, ..Plan::core(packets) },
                // Always admits without a latency limit.
                _ if !queue.latency.admits() => {
                    queue.unavailable = Some(Reason::Latency);
                    Plan { auto: true, ..Plan::core(packets) }
                }
                from => self.plan_offload(queue, packets, from),
            },
        }
    }

    fn plan_offload(&mut self, queue: &mut MoverQueue, packets: usize, from: u32) -> Plan {
        let auto = queue.mode == Mode::Auto;
        let left = queue.share.left(queue.outstanding);
        let mut best = (0, None);
        let mut in_service = false;
        for ahead in 0..queue.channels.all().len() {
            let candidate = queue.channels.ahead(ahead);
            let slot = &mut self.slots[candidate.index()];
            if slot.resetting {
                continue;
            }
            let room = slot.channel.room();
            if !slot.health.is_in() {
                if slot.channel.in_flight() > 0 {
                    continue;
                }
                slot.health.settled();
                if !slot.health.admits(tsc::now) {
                    continue;
                }
                if !slot.health.is_in() && room > 0 {
                    // A trial of the channel is due: this burst is the probe.
                    best = (room, Some(candidate));
                    break;
                }
            }
            in_service = true;
            if room > best.0 {
                best = (room, Some(candidate));
            }
        }
        queue.channels.advance();
        if !queue.faults.is_in() && queue.outstanding == 0 {
            queue.faults.settled();
        }
        let faults = !queue.faults.admits(tsc::now);
        let room = best.0.min(left);
        let unavailable = match best.1 {
            _ if faults => Reason::Faults,
            Some(channel) if room > 0 => {
                queue.unavailable = None;
                return Plan { auto, ..Plan::channel(channel, packets, from, room) };
            }
            None if !in_service => Reason::OutOfService,
            _ => Reason::Full,
        };
        queue.unavailable = Some(unavailable);
        Plan { auto, engine_unavailable: true, ..Plan::core(packets) }
    }

    /// Makes the copies of `list`, or submits them to the planned channel; then the core makes the copies of `beside`.
    ///
    /// # Safety
    /// As for [`Batch::submit`](crate::Batch::submit).
    #[inline(always)]
    pub(crate) unsafe fn submit(
        &mut self,
        queue: &mut MoverQueue,
        plan: &Plan,
        list: &[CopyOp],
        beside: &[CopyOp],
        clock: &mut StageClock,
    ) {
        if plan.auto {
            self.use_lease(queue, list, beside);
        }
        let Some(channel) = plan.channel else {
            if plan.engine_unavailable && !list.is_empty() {
                self.note_work(queue);
            }
            // SAFETY: the caller keeps source and destination of each copy in `list` valid during this call.
            unsafe { self.core_part(queue, list, plan.auto, list.len() as u64) };
            clock.lap(Stage::Copy);
            self.stats.overflow += if plan.engine_unavailable { list.len() as u64 } else { 0 };
            return;
        };
        // SAFETY: the caller keeps source and destination of each copy in `list` valid until its packet is ready.
        unsafe { self.engine_part(queue, channel, list, plan.auto) };
        if beside.is_empty() {
            clock.lap(Stage::Submit);
        } else {
            // The engine works while the core copies.
            // SAFETY: the caller keeps source and destination of each copy in `beside` valid during this call.
            unsafe { self.core_part(queue, beside, plan.auto, plan.by_core.into()) };
            clock.lap(Stage::Copy);
        }
        self.stats.overflow += u64::from(plan.overflow);
    }

    /// Makes copies by the core. In mode `auto`, `decided` of them are made by the core as planned.
    ///
    /// # Safety
    /// As for [`Channels::submit`].
    #[inline(always)]
    unsafe fn core_part(&mut self, queue: &mut MoverQueue, list: &[CopyOp], auto: bool, decided: u64) {
        // SAFETY: the caller keeps source and destination of each copy in `list` valid during this call.
        unsafe { queue.copier.copy_burst(list) };
        if auto {
            queue.tally.open[Way::Core as usize] += decided;
            if self.max_latency.is_some() && decided > 0 {
                queue.latency.passed();
            }
            if queue.outstanding > 0 {
                queue.tally.held += decided;
                self.stats.held_by_order += decided;
            }
        }
        self.stats.core_copies += list.len() as u64;
        self.stats.core_bytes += list.iter().map(|copy| u64::from(copy.len)).sum::<u64>();
    }

    /// Submits copies to `channel`.
    ///
    /// # Safety
    /// As for [`Channels::submit`].
    #[inline(always)]
    unsafe fn engine_part(
        &mut self,
        queue: &mut MoverQueue,
        channel: ChannelId,
        list: &[CopyOp],
        auto: bool,
    ) {
        // Packets without copies are not relevant for the engine's latency.
        if list.is_empty() {
            return;
        }
        if auto {
            if self.max_latency.is_some() {
                queue.stamp();
            }
            queue.tally.open[Way::Engine as usize] += list.len() as u64;
        }
        // SAFETY: the caller keeps source and destination of each copy in `list` valid until its packet is ready.
        unsafe { self.hand_over(queue, channel, list) };
    }

    /// # Safety
    /// As for [`Channels::submit`].
    #[inline]
    unsafe fn hand_over(&mut self, queue: &mut MoverQueue, id: ChannelId, list: &[CopyOp]) {
        self.note_work(queue);
        queue.outstanding += list.len();
        queue.by_engine += list.len() as u64;
        queue.faults.sent();
        let slot = &mut self.slots[id.index()];
        slot.health.sent();
        // SAFETY: the caller keeps the memory valid until the packet is ready, which is after its token was reported or
        // its channel was reset.
        let accepted = unsafe { slot.channel.copy(list) };
        slot.channel.submit();
        if accepted == 0 {
            // The channel accepted nothing although it reported room: for example, its queue is lost and could not be
            // reopened.
            self.charge(id.index(), 1);
        }
        for op in &list[accepted..] {
            // The channel had reported room for these copies but did not accept them, so the core copies.
            // SAFETY: the channel did not accept this copy, and the caller keeps its source and destination valid.
            unsafe { self.redo(Some(queue), op, 0) };
        }
    }

    /// Records that a queue has work for its channels, whether or not they accept it.
    #[inline(always)]
    fn note_work(&mut self, queue: &mut MoverQueue) {
        if queue.share.note_work() {
            self.shares_stale = true;
        }
    }

    /// Records a failure of the channel at `index` with this weight.
    #[cold]
    pub(super) fn charge(&mut self, index: usize, weight: u32) {
        if self.slots[index].health.failed(weight, tsc::now(), self.back_off) {
            self.stats.out_of_service += 1;
        }
    }

    /// Makes a copy of `queue` from byte `done` on, and records that it is complete.
    ///
    /// # Safety
    /// The copy's memory is valid, and no engine accesses it any more.
    #[cold]
    pub(super) unsafe fn redo(&mut self, queue: Option<&mut MoverQueue>, copy: &CopyOp, done: u32) {
        // SAFETY: the copy's source and destination are valid and no engine uses them, as the caller guarantees.
        unsafe { cpu::copy_one(copy, done) };
        self.stats.fallbacks += 1;
        if let Some(queue) = queue {
            queue.ring.complete(copy.token as usize & 0xffff);
            queue.outstanding = queue.outstanding.saturating_sub(1);
        }
    }
}
