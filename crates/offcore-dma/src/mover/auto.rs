//! Mode `auto` in the mover: rounds are timed between leases, and the queues' choices follow the policy.

use arrayvec::ArrayVec;
use offcore_stats::tsc;

use super::choice::{self, Choice, NONE};
use super::policy::{LEASE, Next, Round};
use super::stats::{Reason, Way};
use super::{ChannelId, Mover, Queue, QueueId};
use crate::channel::Copy;

/// Copies of a list that goes partly to the core and partly to an engine, handled at a time.
const PART: usize = 128;
/// Queues of a worker that are decided on; others are left to the core.
const MOST: usize = 64;

/// A round that is being timed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Timed {
    /// TSC when it began.
    start: u64,
    /// [`Mover::half_copies`] then.
    half_copies: u64,
}

impl Mover {
    /// A burst of a queue in mode `auto` is submitted.
    #[inline(always)]
    pub(super) fn use_lease(&mut self, queue: QueueId, list: &[Copy]) {
        if self.lease == 0 {
            self.look(queue, list);
        } else {
            self.lease -= 1;
        }
    }

    /// A burst between two leases: its sizes stand for those of the lease.
    #[cold]
    fn look(&mut self, queue: QueueId, list: &[Copy]) {
        if self.policy.samples() && !list.is_empty() {
            let queue = self.queue(queue);
            queue.choice.seen = queue.tally.look(list);
        }
    }

    /// The copies of a list that the core makes.
    ///
    /// # Safety
    /// As for [`Mover::submit`].
    #[inline(always)]
    pub(super) unsafe fn core_part(&mut self, id: QueueId, auto: bool, list: &[Copy]) {
        let copies = list.len() as u64;
        let latency = self.max_latency.is_some();
        let queue = self.queue(id);
        // SAFETY: the caller's promises cover the time of the call.
        unsafe { queue.copier.copy_burst(list) };
        if auto {
            queue.tally.open[Way::Core as usize] += copies;
            if latency && copies > 0 {
                queue.latency.passed();
            }
            if queue.outstanding > 0 {
                queue.tally.held += copies;
                self.stats.held_by_order += copies;
            }
        }
        self.stats.core_copies += copies;
        self.stats.core_bytes += super::bytes(list);
    }

    /// The copies of a list that `channel` makes.
    ///
    /// # Safety
    /// As for [`Mover::submit`].
    #[inline(always)]
    pub(super) unsafe fn engine_part(&mut self, id: QueueId, auto: bool, channel: ChannelId, list: &[Copy]) {
        // Packets without copies say nothing of the engine.
        if auto && !list.is_empty() {
            if self.max_latency.is_some() {
                self.stamp(id);
            }
            self.queue(id).tally.open[Way::Engine as usize] += list.len() as u64;
        }
        // SAFETY: the caller's promises, passed on.
        unsafe { self.hand_over(id, channel, list) };
    }

    /// A list with copies for both, which only mode `auto` has.
    ///
    /// # Safety
    /// As for [`Mover::submit`].
    #[cold]
    pub(super) unsafe fn submit_parted(&mut self, queue: QueueId, channel: ChannelId, list: &[Copy]) {
        for list in list.chunks(PART) {
            let ring = &self.queue(queue).ring;
            // A packet was entered with its outstanding copies, so one that is done already is the core's.
            let core = |copy: &&Copy| ring.is_done(copy.token as usize & 0xffff);
            let by_core: ArrayVec<Copy, PART> = list.iter().filter(core).copied().collect();
            let by_engine: ArrayVec<Copy, PART> = list.iter().filter(|copy| !core(copy)).copied().collect();
            // The engine works while the core does.
            // SAFETY: the caller's promises, passed on.
            unsafe {
                self.engine_part(queue, true, channel, &by_engine);
                self.core_part(queue, true, &by_core);
            }
        }
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

    /// For mode `auto`: packets of the queue have been returned, and are retired from the reorder ring.
    #[inline(always)]
    pub fn reaped(&mut self, queue: QueueId) {
        let most = self.max_latency;
        let Queue { ring, latency, .. } = self.queue(queue);
        if latency.is_waiting() {
            latency.look(ring.oldest(), most.unwrap_or(u64::MAX), tsc::now);
        }
    }

    /// Work so far, counted in half copies: those of the core twice, those of an engine once when they are submitted and
    /// once when their packet is returned. Every round that did something moved it.
    fn half_copies(&self) -> u64 {
        let queues = self.queues.iter().flatten();
        let by_engine = queues.fold(0u64, |sum, queue| {
            sum.wrapping_add(2 * queue.by_engine).wrapping_sub(queue.ring.in_flight() as u64)
        });
        by_engine.wrapping_add(2 * self.stats.core_copies)
    }

    /// A round begins that is to be timed.
    #[cold]
    pub(super) fn begin_timed(&mut self) {
        self.timed = Timed { start: tsc::now(), half_copies: self.half_copies() };
    }

    /// For mode `auto`: the worker's round that began with [`Mover::poll`] has ended. A worker that does not say so leaves
    /// all copies to the core.
    #[inline(always)]
    pub fn end_round(&mut self) {
        if self.timed.start != 0 {
            self.end_timed();
        }
    }

    #[cold]
    fn end_timed(&mut self) {
        let ticks = tsc::now().wrapping_sub(self.timed.start);
        let now = self.half_copies();
        let half_copies = now.wrapping_sub(self.timed.half_copies);
        self.timed = Timed::default();
        // Nothing was done; or packets without copies were entered.
        if half_copies == 0 || half_copies > 1 << 32 {
            return;
        }
        let sample = self.policy.samples();
        let since = if sample { now.wrapping_sub(self.settled) } else { 0 };
        if sample {
            self.settled = now;
            self.settle();
        }
        let Self { queues, policy, .. } = self;
        // What comes back from an engine counts, but costs a core that copies nothing.
        let in_flight = queues.iter().flatten().any(|queue| queue.is_auto() && queue.outstanding > 0);
        let autos = queues.iter_mut().flatten().filter(|queue| queue.is_auto());
        let mut choices: ArrayVec<&mut Choice, MOST> =
            autos.take(MOST).map(|queue| &mut queue.choice).collect();
        let engine = in_flight || choices.iter().any(|choice| choice.from != NONE);
        let moves = choice::moves(&choices);
        let next = policy.round(&Round { half_copies, ticks, engine, since, moves });
        match next {
            Next::Again => {}
            Next::Lease => self.lease = LEASE,
            Next::Try(next) => choice::try_out(&mut choices, next),
            Next::Back => choice::back(&mut choices),
            Next::Adopt => {
                drop(choices);
                self.adopt();
            }
        }
    }

    /// What is being tried is decided.
    fn adopt(&mut self) {
        let reason = if self.policy.is_surprised() { Reason::Cheaper } else { Reason::Explored };
        for Queue { choice, tally, .. } in self.queues.iter_mut().flatten().filter(|queue| queue.is_auto()) {
            tally.settle(choice.decided);
            tally.decided(choice.decided, choice.from, reason);
            choice.decided = choice.from;
        }
        self.lease = LEASE;
    }

    /// Queues come or go: what is being tried ends.
    pub(super) fn begin_anew(&mut self) {
        for queue in self.queues.iter_mut().flatten() {
            queue.choice.from = queue.choice.decided;
        }
        self.policy.end_trial();
        (self.lease, self.timed) = (0, Timed::default());
    }

    /// The counters of a lease that has ended are shared out.
    fn settle(&mut self) {
        for queue in self.queues.iter_mut().flatten().filter(|queue| queue.is_auto()) {
            queue.choice.busy = queue.tally.open != [0; 2];
            queue.tally.settle(queue.choice.decided);
        }
    }
}
