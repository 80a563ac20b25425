//! Mode `auto` in the mover: rounds are timed between leases, and the queues' choices follow the policy.

use arrayvec::ArrayVec;
use offcore_stats::tsc;

use super::Mover;
use super::channels::Channels;
use super::choice::{self, Choice, NONE};
use super::policy::{LEASE, Next, Round};
use super::queue::Queue;
use super::stats::Reason;
use crate::channel::CopyOp;

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

impl Channels {
    /// A burst of a queue in mode `auto` is submitted.
    #[inline(always)]
    pub(super) fn use_lease(&mut self, queue: &mut Queue, list: &[CopyOp], beside: &[CopyOp]) {
        if self.lease == 0 {
            self.look(queue, list, beside);
        } else {
            self.lease -= 1;
        }
    }

    /// A burst between two leases: its sizes stand for those of the lease.
    #[cold]
    fn look(&mut self, queue: &mut Queue, list: &[CopyOp], beside: &[CopyOp]) {
        if self.policy.samples() && !(list.is_empty() && beside.is_empty()) {
            queue.choice.seen = queue.tally.look(list.iter().chain(beside));
        }
    }
}

impl Queue {
    /// With a longest time that packets may take: a burst, which has been entered in the reorder ring, is handed over now.
    #[inline]
    pub(super) fn stamp(&mut self) {
        let Self { ring, latency, .. } = self;
        if latency.wants_stamp() {
            latency.stamp(ring.end(), tsc::now());
        }
    }

    /// Packets have been returned, and are retired from the reorder ring; one of `max_latency` ticks is late.
    #[inline(always)]
    pub(crate) fn reaped(&mut self, max_latency: Option<u64>) {
        let Self { ring, latency, .. } = self;
        if latency.is_waiting() {
            latency.look(ring.oldest(), max_latency.unwrap_or(u64::MAX), tsc::now);
        }
    }
}

impl Mover {
    /// With a longest time that packets may take: looks whether one takes longer, or was published without this mover
    /// having been told.
    #[inline]
    pub(super) fn look_for_late(&mut self) {
        let most = self.channels.max_latency.unwrap_or(u64::MAX);
        for queue in self.queues.iter_mut().filter(|queue| queue.latency.is_waiting()) {
            queue.latency.look(queue.ring.oldest(), most, tsc::now);
        }
    }

    /// Work so far, counted in half copies: those of the core twice, those of an engine once when they are submitted and
    /// once when their packet is returned. Every round that did something moved it.
    fn half_copies(&self) -> u64 {
        let queues = self.queues.iter();
        let by_engine = queues.fold(0u64, |sum, queue| {
            sum.wrapping_add(2 * queue.by_engine).wrapping_sub(queue.ring.in_flight() as u64)
        });
        by_engine.wrapping_add(2 * self.channels.stats.core_copies)
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
        let sample = self.channels.policy.samples();
        let since = if sample { now.wrapping_sub(self.settled) } else { 0 };
        if sample {
            self.settled = now;
            self.settle();
        }
        let Self { queues, channels, .. } = self;
        // What comes back from an engine counts, but costs a core that copies nothing.
        let in_flight = queues.iter().any(|queue| queue.is_auto() && queue.outstanding > 0);
        let autos = queues.iter_mut().filter(|queue| queue.is_auto());
        let mut choices: ArrayVec<&mut Choice, MOST> =
            autos.take(MOST).map(|queue| &mut queue.choice).collect();
        let engine = in_flight || choices.iter().any(|choice| choice.from != NONE);
        let moves = choice::moves(&choices);
        let next = channels.policy.round(&Round { half_copies, ticks, engine, since, moves });
        match next {
            Next::Again => {}
            Next::Lease => self.channels.lease = LEASE,
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
        let reason = if self.channels.policy.is_surprised() { Reason::Cheaper } else { Reason::Explored };
        for Queue { choice, tally, .. } in self.queues.iter_mut().filter(|queue| queue.is_auto()) {
            tally.settle(choice.decided);
            tally.decided(choice.decided, choice.from, reason);
            choice.decided = choice.from;
        }
        self.channels.lease = LEASE;
    }

    /// Queues come or go: what is being tried ends.
    pub(super) fn begin_anew(&mut self) {
        for queue in &mut self.queues {
            queue.choice.from = queue.choice.decided;
        }
        self.channels.policy.end_trial();
        (self.channels.lease, self.timed) = (0, Timed::default());
    }

    /// The counters of a lease that has ended are shared out.
    fn settle(&mut self) {
        for queue in self.queues.iter_mut().filter(|queue| queue.is_auto()) {
            queue.choice.busy = queue.tally.open != [0; 2];
            queue.tally.settle(queue.choice.decided);
        }
    }
}
