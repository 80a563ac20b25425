//! Mode `auto`: the times at which another way of copying is tried, and the condition for adopting it.
//!
//! The policy compares the total cost of copies for a worker: TSC ticks of its rounds per copy. The way of copying also
//! affects the cost of other stages (for example, an engine leaves packets in another cache), which a sum of separate
//! measurements would not show.
//!
//! Queues hold a *lease*: for [`LEASE`] bursts they follow the decision, and nothing is timed. The next round is a
//! *sample* of the present cost. Then the next lease begins, or a *trial*: some rounds follow the decision, then some
//! rounds use the other way, and the two costs give a gain. Gains are accumulated. [`ENOUGH`] is reached by one trial
//! with a very large gain, or by about ten trials that gain 3 % each.
//!
//! Trials have a budget: their additional cost, compared with the decided way, is at most [`SHARE`] of the time. A way
//! that is cheap to try is tried often, an expensive one rarely and briefly, but at least once per [`FLOOR`].
//!
//! This module reads no clock. Ticks are passed in, so that tests can simulate any sequence of costs.

#[cfg(test)]
mod tests;

use std::time::Duration;

use arrayvec::ArrayVec;
use offcore_stats::tsc;

use super::choice::Move;
use super::stats::Way;

/// Number of bursts of a lease, over all queues of a worker. It is odd, so that the timed rounds are not in phase with
/// other periods.
pub(super) const LEASE: u32 = 63;
/// The fraction of time that trials may cost.
const SHARE: f32 = 0.005;
/// A trial runs at least once in this time of work.
const FLOOR: Duration = Duration::from_millis(25);
/// Maximum positive or negative budget, as a time in which it accumulates.
const SAVED: Duration = Duration::from_millis(50);
/// A trial is charged at least this fraction of its duration, so that most rounds follow the decision even if both ways
/// cost the same.
const LEAST: f32 = 8.0 * SHARE;
/// The work of a leg, the unit of a trial, in half copies: if the core makes all copies, and if an engine has some in
/// flight.
const LEG: [u64; 2] = [128, 1024];
/// Number of legs that follow the decision before a trial, and maximum number of legs of a trial. A trial's first leg
/// is not counted, because caches have to settle. The counted numbers are odd, for the median.
const BEFORE: usize = 5;
const LEGS: usize = 6;
/// Work after a trial that is affected by it, and is therefore charged to it.
const AFTER: u64 = 512;
/// Ratio of a leg's cost to the decided way's cost above which a trial ends.
const FAR: f32 = 1.25;
/// If a leg costs this fraction of the previous leg or less, caches are still settling, and earlier legs do not count.
/// This may take up to `SETTLING` legs.
const FALLING: f32 = 0.9;
const SETTLING: u32 = 16;
/// Minimum ratio between two consecutive samples and the recent average that makes a trial due without sufficient
/// budget. The debt is limited, because the cause may be the CPU's clock frequency, which affects both ways.
const COST_CHANGE: f32 = 1.4;
/// Minimum gain of a trial that counts in favour of the other way; less counts against it.
const SLACK: f32 = 0.01;
/// Sum of gains, less [`SLACK`] each, with which the other way is adopted.
const ENOUGH: f32 = 0.3;
/// Sum of gains with which the next trial does not wait for the budget, because it is unlikely to cost anything.
const PROMISING: f32 = 0.015;
/// Limit of a single trial's gain or loss.
const MOST: f32 = 0.4;
/// Weight of a new sample in the average.
const NEW: f32 = 1.0 / 8.0;

/// A round with copies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    /// Half copies: a copy by the core counts twice, a copy by an engine counts once on submission and once when its
    /// packet returns.
    pub(super) half_copies: u64,
    pub(super) ticks: u64,
    /// Whether copies go to an engine or are still in flight in one.
    pub(super) engine: bool,
    /// Half copies since the end of the previous lease.
    pub(super) since: u64,
    /// Whether the moves [`Move::All`] to core and to engine, and [`Move::Side`], would change anything.
    pub(super) moves: [bool; 3],
}

/// The action after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Time the next round as well.
    Again,
    /// Begin a lease.
    Lease,
    /// Try this move from now on.
    Try(Move),
    /// End the trial and return to the decision.
    Back,
    /// Adopt the tried move and begin a lease.
    Adopt,
}

#[derive(Debug)]
enum Phase {
    Lease,
    /// Rounds that follow the decision before a trial.
    Before(Move, Legs),
    Trial(Move, Legs),
    /// Rounds that follow the decision after a trial and are affected by it, with the remaining work.
    After(Move, u64),
}

/// Rounds of one kind, grouped into legs.
#[derive(Debug, Default)]
struct Legs {
    ticks: u64,
    half_copies: u64,
    /// Number of complete legs, and the ticks per half copy of the counted ones.
    complete: u32,
    costs: ArrayVec<f32, LEGS>,
}

impl Legs {
    /// Adds a round. Returns whether a leg is complete.
    fn add(&mut self, round: &Round) -> bool {
        self.ticks += round.ticks;
        self.half_copies += round.half_copies;
        let complete = self.half_copies >= LEG[usize::from(round.engine)];
        if complete && !self.costs.is_full() {
            self.costs.push(self.ticks as f32 / self.half_copies as f32);
            (self.ticks, self.half_copies) = (0, 0);
            self.complete += 1;
        }
        complete
    }

    /// Returns the median (of two, the lower) of all legs from `first` on. A few interrupts do not change it.
    fn cost(&self, first: usize) -> f32 {
        let mut costs: ArrayVec<f32, LEGS> =
            self.costs[first.min(self.costs.len() - 1)..].iter().copied().collect();
        costs.sort_unstable_by(f32::total_cmp);
        costs[(costs.len() - 1) / 2]
    }

    /// Whether the last leg was much cheaper than the previous ones, which are then discarded.
    fn falls(&mut self) -> bool {
        let falls = matches!(self.costs[..], [.., before, last] if last < FALLING * before);
        if falls {
            self.costs.drain(..self.costs.len() - 1);
        }
        falls && self.complete < SETTLING
    }
}

/// The decisions of a worker.
#[derive(Debug)]
pub(super) struct Policy {
    phase: Phase,
    /// Ticks per half copy of the decided way: the recent average, and the last sample.
    cost: f32,
    last: f32,
    /// The budget in ticks: a fraction of all time is added, the cost of every trial is subtracted.
    budget: f32,
    /// Ticks of work since the last trial.
    waited: f32,
    /// For the present trial: ticks per half copy before it, its excess cost, and its total duration, in ticks.
    base: f32,
    excess: f32,
    length: f32,
    /// Per kind of move: the sum of its gains, and the charge for its last trial.
    gains: [f32; 3],
    prices: [f32; 3],
    trials: u32,
    side: u32,
    /// Whether the last trial was due because of a surprise.
    surprised: bool,
    /// Ticks per copy if everything goes one way, as last measured; 0 before the first measurement.
    ticks: [f32; 2],
}

impl Policy {
    pub(super) fn new() -> Self {
        Self {
            phase: Phase::Lease,
            cost: 0.0,
            last: 0.0,
            budget: 0.0,
            waited: 0.0,
            base: 0.0,
            excess: 0.0,
            length: 0.0,
            gains: [0.0; 3],
            prices: [0.0; 3],
            trials: 0,
            side: 0,
            surprised: false,
            ticks: [0.0; 2],
        }
    }

    /// Returns the ticks per copy if everything goes one way, by [`Way`], as last measured; 0 before the first
    /// measurement.
    pub(super) fn ticks(&self) -> [f32; 2] {
        self.ticks
    }

    /// Whether the next timed round is a sample between two leases, and no trial is in progress.
    #[inline(always)]
    pub(super) fn samples(&self) -> bool {
        matches!(self.phase, Phase::Lease)
    }

    /// Whether the present trial was due because the decided way's cost had changed.
    pub(super) fn has_cost_change(&self) -> bool {
        self.surprised
    }

    /// Processes a timed round with copies.
    pub(super) fn round(&mut self, round: &Round) -> Next {
        match &mut self.phase {
            Phase::Lease => self.sample(round),
            Phase::Before(next, legs) => {
                if !legs.add(round) || legs.costs.len() < BEFORE {
                    return Next::Again;
                }
                let next = *next;
                self.base = legs.cost(0);
                if let [to_core, to_engine, _] = round.moves
                    && to_core != to_engine
                {
                    self.ticks[usize::from(to_core)] = 2.0 * self.base;
                }
                (self.excess, self.length) = (0.0, 0.0);
                self.phase = Phase::Trial(next, Legs::default());
                Next::Try(next)
            }
            Phase::Trial(..) => self.trial(round),
            Phase::After(tried, left) => {
                let (tried, rest) = (*tried, left.saturating_sub(round.half_copies));
                *left = rest;
                self.spend(round);
                if rest > 0 {
                    return Next::Again;
                }
                self.charge(tried);
                self.phase = Phase::Lease;
                Next::Lease
            }
        }
    }

    /// Ends a trial because queues were added or removed. Its result and earlier gains no longer apply.
    pub(super) fn end_trial(&mut self) {
        (self.phase, self.gains, self.cost) = (Phase::Lease, [0.0; 3], 0.0);
    }

    /// Processes the round between two leases.
    fn sample(&mut self, round: &Round) -> Next {
        let cost = round.ticks as f32 / round.half_copies as f32;
        if self.cost == 0.0 {
            (self.cost, self.last) = (cost, cost);
        }
        let worked = round.since as f32 * self.cost;
        self.waited += worked;
        self.budget = (self.budget + SHARE * worked).min(saved());
        let (dearer, cheaper) = (cost.min(self.last), cost.max(self.last));
        self.last = cost;
        let surprise = if dearer > COST_CHANGE * self.cost {
            Some(dearer)
        } else if cheaper * COST_CHANGE < self.cost {
            Some(cheaper)
        } else {
            None
        };
        match surprise {
            // Earlier results do not apply to the new cost.
            Some(cost) => (self.cost, self.gains, self.trials) = (cost, [0.0; 3], 0),
            // A single deviating sample is an interrupt.
            None => {
                self.cost += NEW * (cost.clamp(self.cost / COST_CHANGE, self.cost * COST_CHANGE) - self.cost)
            }
        }
        let Some(next) = self.next_move(round.moves) else { return Next::Lease };
        let kind = kind(next);
        let due = self.gains[kind] > PROMISING
            || self.budget >= self.prices[kind]
            || self.waited >= tsc::ticks(FLOOR) as f32
            || surprise.is_some() && self.budget > -saved() / 4.0;
        if !due {
            return Next::Lease;
        }
        self.surprised = surprise.is_some();
        self.phase = Phase::Before(next, Legs::default());
        Next::Again
    }

    /// Returns the move to try next: the most promising one, or all queues the other way; every fourth trial is a
    /// [`Move::Side`].
    fn next_move(&self, moves: [bool; 3]) -> Option<Move> {
        let all = [Move::All(Way::Core), Move::All(Way::Engine), Move::Side(self.side)];
        let possible = || all.into_iter().filter(|next| moves[kind(*next)]);
        let promising = possible().filter(|next| self.gains[kind(*next)] > 0.0);
        let best = promising.max_by(|a, b| self.gains[kind(*a)].total_cmp(&self.gains[kind(*b)]));
        let turn = match self.trials % 4 {
            3 => 2,
            turn => turn as usize % 2,
        };
        best.or_else(|| possible().find(|next| kind(*next) == turn)).or_else(|| possible().next())
    }

    fn trial(&mut self, round: &Round) -> Next {
        self.spend(round);
        let Phase::Trial(tried, legs) = &mut self.phase else { return Next::Again };
        let tried = *tried;
        if !legs.add(round) {
            return Next::Again;
        }
        let last = legs.costs[legs.costs.len() - 1];
        let too_dear = last > FAR * self.base || self.excess > self.budget.max(saved() / 8.0);
        if legs.complete < 2 || legs.falls() || !too_dear && !legs.costs.is_full() && legs.complete < SETTLING
        {
            return Next::Again;
        }
        let cost = legs.cost(1);
        if let Move::All(way) = tried {
            self.ticks[way as usize] = 2.0 * cost;
        }
        let gain = (1.0 - cost / self.base).clamp(-MOST, MOST) - SLACK;
        let gains = &mut self.gains[kind(tried)];
        *gains = (*gains + gain).max(0.0);
        self.trials = self.trials.wrapping_add(1);
        self.waited = 0.0;
        if *gains < ENOUGH {
            if matches!(tried, Move::Side(_)) && *gains == 0.0 {
                self.side = self.side.wrapping_add(1);
            }
            self.phase = Phase::After(tried, AFTER);
            return Next::Back;
        }
        self.charge(tried);
        (self.cost, self.last, self.gains) = (cost, cost, [0.0; 3]);
        self.phase = Phase::Lease;
        Next::Adopt
    }

    fn spend(&mut self, round: &Round) {
        self.excess += round.ticks as f32 - self.base * round.half_copies as f32;
        self.length += round.ticks as f32;
    }

    fn charge(&mut self, tried: Move) {
        let price = self.excess.max(LEAST * self.length);
        self.budget = (self.budget - price).max(-saved());
        self.prices[kind(tried)] = price.min(saved());
    }
}

/// Returns the maximum positive or negative budget, in ticks.
fn saved() -> f32 {
    SHARE * tsc::ticks(SAVED) as f32
}

/// Returns the index of a move's kind.
fn kind(tried: Move) -> usize {
    match tried {
        Move::All(way) => way as usize,
        Move::Side(_) => 2,
    }
}
