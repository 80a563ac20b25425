//! Mode `auto` in the mover: rounds between leases are timed, and the queues' choices follow the policy.

use arrayvec::ArrayVec;
use offcore_stats::tsc;

use super::Mover;
use super::channels::Channels;
use super::choice::{self, NONE, QueueChoice};
use super::policy::{LEASE, Next, Round};
use super::queue::MoverQueue;
use super::stats::Reason;
use crate::channel::CopyOp;

/// Maximum number of queues per worker for which the policy decides. Others are left to the core.
const MOST: usize = 64;

/// A round that is being timed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Timed {
    /// TSC at the start of the round; 0 if no round is timed.
    start: u64,
    /// [`Mover::half_copies`] at the start of the round.
    half_copies: u64,
}

impl Channels {
    /// Uses the lease for a submitted burst of a queue in mode `auto`.
    #[inline(always)]
    pub(super) fn use_lease(&mut self, queue: &mut MoverQueue, list: &[CopyOp], beside: &[CopyOp]) {
        if self.lease == 0 {
            self.look(queue, list, beside);
        } else {
            self.lease -= 1;
        }
    }

    /// Examines a burst between two leases: its sizes represent the sizes of the lease.
    #[cold]
    fn look(&mut self, queue: &mut MoverQueue, list: &[CopyOp], beside: &[CopyOp]) {
        if self.policy.samples() && !(list.is_empty() && beside.is_empty()) {
            queue.choice.seen = queue.tally.look(list.iter().chain(beside));
        }
    }
}

impl MoverQueue {
    /// Records the submission time of a burst that has been entered in the reorder ring, if a latency limit is set.
    #[inline]
    pub(super) fn stamp(&mut self) {
        let Self { ring, latency, .. } = self;
        if latency.wants_stamp() {
            latency.stamp(ring.end(), tsc::now());
        }
    }

    /// Checks the latency after packets have been returned and retired from the reorder ring. `max_latency` ticks are
    /// late.
    #[inline(always)]
    pub(crate) fn reaped(&mut self, max_latency: Option<u64>) {
        let Self { ring, latency, .. } = self;
        if latency.is_waiting() {
            latency.look(ring.oldest(), max_latency.unwrap_or(u64::MAX), tsc::now);
        }
    }
}

impl Mover {
    /// Checks for packets that exceed the latency limit, or that were published without a call of
    /// [`MoverQueue::reaped`].
    #[inline]
    pub(super) fn check_late_packets(&mut self) {
        let most = self.channels.max_latency.unwrap_or(u64::MAX);
        for queue in self.queues.iter_mut().filter(|queue| queue.latency.is_waiting()) {
            queue.latency.look(queue.ring.oldest(), most, tsc::now);
        }
    }

    /// Returns the total work in half copies: a copy by the core counts twice, a copy by an engine counts once on
    /// submission and once when its packet returns. Every round with copies increases it.
    fn half_copies(&self) -> u64 {
        let queues = self.queues.iter();
        let by_engine = queues.fold(0u64, |sum, queue| {
            sum.wrapping_add(2 * queue.by_engine).wrapping_sub(queue.ring.in_flight() as u64)
        });
        by_engine.wrapping_add(2 * self.channels.stats.core_copies)
    }

    /// Starts timing a round.
    #[cold]
    pub(super) fn begin_timed(&mut self) {
        self.timed = Timed { start: tsc::now(), half_copies: self.half_copies() };
    }

    /// Ends the worker's round that began with [`Mover::poll`]; needed by mode `auto`. If a worker does not call it,
    /// all copies are left to the core.
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
        // The round did nothing, or packets without copies were entered.
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
        // Completions from an engine count as engine work, even in a round in which the core copies nothing.
        let in_flight = queues.iter().any(|queue| queue.is_auto() && queue.outstanding > 0);
        let autos = queues.iter_mut().filter(|queue| queue.is_auto());
        let mut choices: ArrayVec<&mut QueueChoice, MOST> =
            autos.take(MOST).map(|queue| &mut queue.choice).collect();
        let engine = in_flight || choices.iter().any(|choice| choice.from != NONE);
        let moves = choice::moves(&choices);
        let next = channels.policy.round(&Round { half_copies, ticks, engine, since, moves });
        match next {
            Next::Again => {}
            Next::Lease => self.channels.lease = LEASE,
            Next::Try(next) => choice::apply_trial(&mut choices, next),
            Next::Back => choice::back(&mut choices),
            Next::Adopt => {
                drop(choices);
                self.adopt();
            }
        }
    }

    /// Adopts the values that are being tried.
    fn adopt(&mut self) {
        let reason = if self.channels.policy.has_cost_change() { Reason::Cheaper } else { Reason::Explored };
        for MoverQueue { choice, tally, .. } in self.queues.iter_mut().filter(|queue| queue.is_auto()) {
            tally.settle(choice.decided);
            tally.decided(choice.decided, choice.from, reason);
            choice.decided = choice.from;
        }
        self.channels.lease = LEASE;
    }

    /// Ends a trial because queues were added or removed.
    pub(super) fn cancel_trial(&mut self) {
        for queue in &mut self.queues {
            queue.choice.from = queue.choice.decided;
        }
        self.channels.policy.end_trial();
        (self.channels.lease, self.timed) = (0, Timed::default());
    }

    /// Distributes the counters of the finished lease among the size classes.
    fn settle(&mut self) {
        for queue in self.queues.iter_mut().filter(|queue| queue.is_auto()) {
            queue.choice.busy = queue.tally.open != [0; 2];
            queue.tally.settle(queue.choice.decided);
        }
    }
}
