//! Mode `auto` in the mover: the lists are parted, and what they take is timed.

use arrayvec::ArrayVec;
use offcore_stats::{Stage, StageClock, tsc};

use super::policy::{self, Made};
use super::stats::Way;
use super::{ChannelId, Mode, Mover, POLL_TIMED, Plan, Queue, QueueId, bytes};
use crate::channel::Copy;

/// Copies of a list that goes partly to the core and partly to an engine, handled at a time.
const PART: usize = 128;

impl Mover {
    /// # Safety
    /// As for [`Mover::submit`].
    #[inline]
    pub(super) unsafe fn submit_auto(
        &mut self,
        queue: QueueId,
        plan: Plan,
        list: &[Copy],
        clock: &mut StageClock,
    ) {
        match plan.channel {
            Some(channel) if plan.by_core == 0 => {
                // SAFETY: the caller's promises, passed on.
                let classes = unsafe { self.engine_part(queue, channel, list) };
                self.queue(queue).policy.ended(classes, None, false);
            }
            // SAFETY: as above.
            Some(channel) if plan.by_engine > 0 => unsafe { self.submit_parted(queue, channel, list) },
            _ => {
                // SAFETY: as above.
                let made = unsafe { self.core_part(queue, list) };
                self.core_ended(queue, made.classes, &made);
                if !list.is_empty() {
                    self.queue(queue).latency.passed();
                }
                if plan.hindered && !list.is_empty() {
                    self.worked(queue);
                }
            }
        }
        self.explore_due |= self.queue(queue).policy.explore_is_due();
        let missed = if plan.hindered { list.len() as u64 } else { u64::from(plan.overflow) };
        self.stats.overflow += missed;
        clock.lap(if plan.channel.is_some() && plan.by_core == 0 { Stage::Submit } else { Stage::Copy });
    }

    /// # Safety
    /// As for [`Mover::submit`].
    #[cold]
    unsafe fn submit_parted(&mut self, queue: QueueId, channel: ChannelId, list: &[Copy]) {
        for list in list.chunks(PART) {
            let ring = &self.queue(queue).ring;
            // A packet was entered with its outstanding copies, so one that is done already is the core's.
            let core = |copy: &&Copy| ring.is_done(copy.token as usize & 0xffff);
            let by_core: ArrayVec<Copy, PART> = list.iter().filter(core).copied().collect();
            let by_engine: ArrayVec<Copy, PART> = list.iter().filter(|copy| !core(copy)).copied().collect();
            // The engine works while the core does.
            // SAFETY: the caller's promises, passed on.
            let (engine, core) =
                unsafe { (self.engine_part(queue, channel, &by_engine), self.core_part(queue, &by_core)) };
            self.core_ended(queue, core.classes | engine, &core);
        }
    }

    /// Returns the classes of the list.
    ///
    /// # Safety
    /// As for [`Mover::submit`].
    #[inline(always)]
    unsafe fn engine_part(&mut self, queue: QueueId, channel: ChannelId, list: &[Copy]) -> u16 {
        // Packets without copies say nothing of the engine.
        if self.max_latency.is_some() && !list.is_empty() {
            self.stamp(queue);
        }
        let (made, timed) = self.queue(queue).policy.look(list);
        if !timed {
            // SAFETY: the caller's promises, passed on.
            unsafe { self.hand_over(queue, channel, list) };
            self.queue(queue).policy.took(Way::Engine, &made, None);
            self.survey(queue, Way::Engine, &made);
            return made.classes;
        }
        let start = tsc::now();
        // SAFETY: as above.
        unsafe { self.hand_over(queue, channel, list) };
        let ticks = tsc::now().wrapping_sub(start).saturating_sub(self.timing);
        let policy = &mut self.queue(queue).policy;
        policy.took(Way::Engine, &made, Some(ticks as f32));
        if policy.explores() {
            self.until_poll_timed = 0;
        }
        self.survey(queue, Way::Engine, &made);
        made.classes
    }

    /// With a longest time that packets may take: a burst, which has been entered in the reorder ring, is handed over now.
    #[inline]
    fn stamp(&mut self, queue: QueueId) {
        let Queue { ring, latency, .. } = self.queue(queue);
        if latency.wants_stamp() {
            latency.stamp(ring.oldest().wrapping_add(ring.in_flight() as u32), tsc::now());
        }
    }

    /// With a longest time that packets may take: looks whether one takes longer, or was published without this mover
    /// having been told.
    #[inline]
    pub(super) fn look_for_late(&mut self) {
        let most = self.max_latency.unwrap_or(u64::MAX);
        for queue in self.queues.iter_mut().flatten().filter(|queue| queue.latency.is_waiting()) {
            queue.latency.look(queue.ring.oldest(), most, tsc::now);
        }
    }

    /// Returns what the list was.
    ///
    /// # Safety
    /// As for [`Mover::submit`].
    #[inline(always)]
    unsafe fn core_part(&mut self, queue: QueueId, list: &[Copy]) -> Made {
        self.stats.core_copies += list.len() as u64;
        self.stats.core_bytes += bytes(list);
        let timing = self.timing;
        let queue = self.queue(queue);
        let (made, timed) = queue.policy.look(list);
        if !timed {
            // SAFETY: the caller's promises cover the time of the call.
            unsafe { queue.copier.copy_burst(list) };
            queue.copied = None;
            queue.policy.took(Way::Core, &made, None);
            return made;
        }
        let start = tsc::now();
        // SAFETY: as above.
        unsafe { queue.copier.copy_burst(list) };
        let end = tsc::now();
        queue.copied = Some(end);
        queue.policy.took(Way::Core, &made, Some(end.wrapping_sub(start).saturating_sub(timing) as f32));
        made
    }

    #[inline(always)]
    fn core_ended(&mut self, queue: QueueId, classes: u16, by_core: &Made) {
        self.survey(queue, Way::Core, by_core);
        let queue = self.queue(queue);
        let behind = queue.outstanding > 0;
        queue.policy.ended(classes, Some(by_core), behind);
        self.stats.held_by_order += if behind { u64::from(by_core.copies) } else { 0 };
    }

    #[inline(always)]
    fn survey(&mut self, queue: QueueId, way: Way, made: &Made) {
        if self.survey.is_on() && made.copies > 0 {
            let expected = self.queue(queue).policy.expected(way, made);
            self.survey.copied(way, made.copies, expected);
        }
    }

    /// For mode `auto`: the worker's round that began with [`Mover::poll`] has ended. What rounds cost is only known to a
    /// mover whose owner says so.
    #[inline(always)]
    pub fn end_round(&mut self) {
        if self.autos > 0 && self.survey.end() {
            self.note_round();
        }
    }

    #[cold]
    fn note_round(&mut self) {
        let queues = || self.queues.iter().flatten().filter(|queue| queue.mode == Mode::Auto);
        let in_flight = queues().any(|queue| queue.outstanding > 0);
        let chosen =
            if queues().any(|queue| queue.policy.chooses_engine()) { Way::Engine } else { Way::Core };
        if let Some(aftermath) = self.survey.note(in_flight, chosen) {
            for queue in self.queues.iter_mut().flatten() {
                queue.policy.set_aftermath(aftermath);
            }
        }
    }

    /// Lets the queues in mode `auto` try the other way, from now on, at the beginning of a round.
    #[cold]
    pub(super) fn explore(&mut self) {
        self.explore_due = false;
        let queues = self.queues.iter_mut().flatten().filter(|queue| queue.mode == Mode::Auto);
        if policy::try_out(queues.map(|queue| &mut queue.policy)) {
            self.survey.try_out();
        }
    }

    /// For mode `auto`: says that the `packets` of the list just submitted, which the core copied and which did not go
    /// through the reorder ring, have been returned.
    #[inline(always)]
    pub fn published(&mut self, queue: QueueId, packets: usize) {
        let timing = self.timing;
        self.survey.returned();
        let queue = self.queue(queue);
        if let Some(copied) = queue.copied.take() {
            let ticks = tsc::now().wrapping_sub(copied).saturating_sub(timing);
            queue.policy.published(ticks as f32 / packets.max(1) as f32);
        }
    }

    /// For mode `auto`: `packets` are now going to be returned through the reorder ring. What this returns is for
    /// [`Mover::reaped`].
    #[inline(always)]
    pub fn reaping(&mut self, queue: QueueId, packets: usize) -> Option<u64> {
        self.survey.returned();
        let queue = self.queue(queue);
        (queue.mode == Mode::Auto && queue.policy.times_reap(packets)).then(tsc::now)
    }

    /// For mode `auto`: the `packets` have been returned, and are retired from the reorder ring.
    #[inline(always)]
    pub fn reaped(&mut self, queue: QueueId, packets: usize, since: Option<u64>) {
        let most = self.max_latency;
        let Queue { ring, latency, .. } = self.queue(queue);
        if latency.is_waiting() {
            latency.look(ring.oldest(), most.unwrap_or(u64::MAX), tsc::now);
        }
        if let Some(since) = since {
            let ticks = tsc::now().wrapping_sub(since).saturating_sub(self.timing);
            self.queue(queue).policy.reaped(ticks as f32 / packets.max(1) as f32);
        }
    }

    /// Notes for every queue in mode `auto` how long it took to collect `done` completions.
    pub(super) fn time_poll(&mut self, start: Option<u64>, done: usize) {
        let Some(start) = start else {
            self.until_poll_timed = self.until_poll_timed.saturating_sub(1);
            return;
        };
        self.until_poll_timed = POLL_TIMED;
        let ticks = tsc::now().wrapping_sub(start).saturating_sub(self.timing);
        for queue in self.queues.iter_mut().flatten().filter(|queue| queue.mode == Mode::Auto) {
            if queue.policy.polled(ticks as f32 / done as f32) {
                self.until_poll_timed = POLL_TIMED / 8;
            }
        }
    }
}
