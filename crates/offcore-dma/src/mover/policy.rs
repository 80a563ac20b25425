//! Mode `auto`: when another way to copy is tried, and when it has won.
//!
//! What is compared is the whole of what copies cost a worker: TSC ticks of its rounds, by the copies that they move.
//! Who copies decides what other stages cost, too (an engine leaves packets in another cache), and no sum of parts
//! shows that.
//!
//! Queues hold a *lease*: for [`LEASE`] bursts they do what was decided, and nothing is timed. The round after that is
//! a *sample*: what rounds cost now. Then the next lease begins, or a *trial*: some rounds as decided, some rounds the
//! other way, and the two costs make a gain. A gain counts when it lasts: [`ENOUGH`] is one trial that gains very much,
//! or some ten that gain 3 % each.
//!
//! Trials have a budget: what they cost more than the decided way would have is at most [`SHARE`] of the time. A way
//! that costs nothing to try is tried often, a dear one seldom and shortly, but at least once in [`FLOOR`].
//!
//! No clock is read here: ticks are handed in, so that a test can tell any story.

#[cfg(test)]
mod tests;

use std::time::Duration;

use arrayvec::ArrayVec;
use offcore_stats::tsc;

use super::choice::Move;
use super::stats::Way;

/// Bursts of a lease, over all queues of a worker. Odd, so that what is timed does not keep step with other periods.
pub(super) const LEASE: u32 = 63;
/// The part of the time that trials may cost.
const SHARE: f32 = 0.005;
/// There is a trial at least once in this time of work.
const FLOOR: Duration = Duration::from_millis(25);
/// The budget that can be saved up or owed, as a time in which it grows.
const SAVED: Duration = Duration::from_millis(50);
/// A trial is charged this part of its time at least, so that most rounds are as decided even between equals.
const LEAST: f32 = 8.0 * SHARE;
/// Work of a leg, a trial's unit, in half copies: when the core makes them all, and when an engine has some in flight.
const LEG: [u64; 2] = [128, 1024];
/// Legs as decided before a trial, and legs of a trial whose first one is not counted: caches have to settle. Odd
/// numbers count, for the median.
const BEFORE: usize = 5;
const LEGS: usize = 6;
/// Work after a trial that meets what the trial has left, and is charged to it.
const AFTER: u64 = 512;
/// How many times dearer than the decided way a leg may be for the trial to go on.
const FAR: f32 = 1.25;
/// A leg that costs this part of the one before, or less, shows that caches are still settling: what was before does not
/// count. That may take so many legs.
const FALLING: f32 = 0.9;
const SETTLING: u32 = 16;
/// How many times dearer or cheaper than of late two samples in a row make a trial due, on a little credit: what has
/// changed may be the CPU's clock, which both ways have in common.
const SURPRISE: f32 = 1.4;
/// What a trial must gain to count for the other way; less counts against it.
const SLACK: f32 = 0.01;
/// Gains, less [`SLACK`] each, with which the other way has won.
const ENOUGH: f32 = 0.3;
/// Gains with which the next trial does not wait for the budget: it is not likely to cost anything.
const PROMISING: f32 = 0.015;
/// The most that one trial counts for and against.
const MOST: f32 = 0.4;
/// The part of a new sample in the average.
const NEW: f32 = 1.0 / 8.0;

/// A round in which copies were moved.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    /// Copies made by the core twice; those of an engine once when they are submitted, once when their packet returns.
    pub(super) half_copies: u64,
    pub(super) ticks: u64,
    /// Whether copies go to an engine, or are with one still.
    pub(super) engine: bool,
    /// Half copies since the end of the lease before this one.
    pub(super) since: u64,
    /// Whether the moves [`Move::All`] to core and engine, and [`Move::Side`], would change something.
    pub(super) moves: [bool; 3],
}

/// What happens after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The next round is timed as well.
    Again,
    /// A lease begins.
    Lease,
    /// This is tried from now on.
    Try(Move),
    /// What was tried ends.
    Back,
    /// What was tried is decided, and a lease begins.
    Adopt,
}

#[derive(Debug)]
enum Phase {
    Lease,
    /// Rounds as decided before a trial.
    Before(Move, Legs),
    Trial(Move, Legs),
    /// Rounds as decided after a trial: they meet what it has left. So much work is left to do.
    After(Move, u64),
}

/// Rounds of one kind, by legs.
#[derive(Debug, Default)]
struct Legs {
    ticks: u64,
    half_copies: u64,
    /// Complete legs, and ticks a half copy of those that count.
    complete: u32,
    costs: ArrayVec<f32, LEGS>,
}

impl Legs {
    /// Adds a round; returns whether a leg is complete.
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

    /// The median, the lower one of two, of all legs from `first` on: an interrupt or two leave it as it is.
    fn cost(&self, first: usize) -> f32 {
        let mut costs: ArrayVec<f32, LEGS> =
            self.costs[first.min(self.costs.len() - 1)..].iter().copied().collect();
        costs.sort_unstable_by(f32::total_cmp);
        costs[(costs.len() - 1) / 2]
    }

    /// Whether the last leg was much cheaper than the one before, which then does not count.
    fn falls(&mut self) -> bool {
        let falls = matches!(self.costs[..], [.., before, last] if last < FALLING * before);
        if falls {
            self.costs.drain(..self.costs.len() - 1);
        }
        falls && self.complete < SETTLING
    }
}

/// The decisions of one worker.
#[derive(Debug)]
pub(super) struct Policy {
    phase: Phase,
    /// Ticks a half copy as decided: of late, and of the last sample.
    cost: f32,
    last: f32,
    /// What every trial has cost is subtracted, a part of all time added; in ticks.
    budget: f32,
    /// Ticks of work since the last trial.
    waited: f32,
    /// Of the present trial: ticks a half copy before it; what it has cost in excess of that, and in all, in ticks.
    base: f32,
    excess: f32,
    length: f32,
    /// By kind of move: what speaks for it, and what its last trial was charged.
    gains: [f32; 3],
    prices: [f32; 3],
    trials: u32,
    side: u32,
    /// The last trial was due because of a surprise.
    surprised: bool,
    /// Ticks a copy when everything goes one way, as last measured; 0 while not.
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

    /// Ticks a copy when everything goes one way, by [`Way`], as last measured; 0 while not.
    pub(super) fn ticks(&self) -> [f32; 2] {
        self.ticks
    }

    /// Whether a round is the sample between two leases, and no trial goes on.
    #[inline(always)]
    pub(super) fn samples(&self) -> bool {
        matches!(self.phase, Phase::Lease)
    }

    /// Whether what is being tried was due because the decided way's cost had changed.
    pub(super) fn is_surprised(&self) -> bool {
        self.surprised
    }

    /// Notes a timed round in which copies were moved.
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

    /// Queues come or go: a trial under way says nothing, and what others have said little.
    pub(super) fn end_trial(&mut self) {
        (self.phase, self.gains, self.cost) = (Phase::Lease, [0.0; 3], 0.0);
    }

    /// The round between two leases.
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
        let surprise = if dearer > SURPRISE * self.cost {
            Some(dearer)
        } else if cheaper * SURPRISE < self.cost {
            Some(cheaper)
        } else {
            None
        };
        match surprise {
            // What was found out before says nothing of now.
            Some(cost) => (self.cost, self.gains, self.trials) = (cost, [0.0; 3], 0),
            // One alone is an interrupt.
            None => self.cost += NEW * (cost.clamp(self.cost / SURPRISE, self.cost * SURPRISE) - self.cost),
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

    /// What is tried next: what has something to be said for it, or all queues the other way; one time in four
    /// something else.
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

/// The budget that can be saved up or owed, in ticks.
fn saved() -> f32 {
    SHARE * tsc::ticks(SAVED) as f32
}

/// A move's place among what is known by kind.
fn kind(tried: Move) -> usize {
    match tried {
        Move::All(way) => way as usize,
        Move::Side(_) => 2,
    }
}
