//! `auto`: who makes a copy, chosen from what copies have cost the core.
//!
//! For every size class there is a moving average of what a copy costs when the core makes it, and when an engine does.
//! What is chosen is measured all the time; one burst in [`EXPLORE`] goes the other way. The choice changes when the
//! other way is cheaper by more than [`HYSTERESIS`].
//!
//! * core: the copy, and returning the packet's chains at once; when such packets have lately been held back by older
//!   copies of an engine, part of what the reorder ring costs,
//! * engine: to submit, to collect the completion, and to return the chains later.
//!
//! No clock is read here: ticks are handed in, so that a test can tell any story.

#[cfg(test)]
mod tests;

use arrayvec::ArrayVec;

use super::stats::{Decision, Reason, Way};
use crate::channel::Copy;

/// Size classes of copies: up to 64 bytes, up to 128, and so on by powers of two up to 64 KiB, and all above.
pub const CLASSES: usize = 12;
/// One burst in this many goes the other way.
pub const EXPLORE: u32 = 256;
/// Changes of a class's choice after which the other way is soon tried again. (Later it would only make a choice between
/// two that are equally good dearer.)
const SETTLING: u64 = 4;
/// TSC ticks that a packet costs when it is entered in the reorder ring and its chains are remembered: part of gathering
/// the list, which is not timed, since what the guest's descriptors cost would drown it.
const ENTER: f32 = 8.0;
/// Bursts that go the other way one after the other when it is not far from being cheaper: the first finds neither its
/// instructions nor its data where they would be if it were always done so.
const TRIES: u8 = 3;
/// The same for the core now and then: until nothing is left that an engine has brought from elsewhere. Then what one
/// queue's copies leave in the core's cache makes the next one's cheap, which a short trial does not show.
const LONG: u8 = 24;
/// One trial of so many is a long one, and more of them are at first.
const LONG_EVERY: u32 = 32;
/// How many times dearer the other way may be to be tried again at once.
const NEAR: f32 = 1.6;
/// The same for a long trial, at whose beginning the core is dearer than it would be.
const NEAR_LONG: f32 = 4.0;
/// How many times dearer than the other way what is chosen may be.
pub const HYSTERESIS: f32 = 1.15;
/// Bursts that the first exploration waits for, and the first after a choice has changed: what was measured a long time
/// ago, or when everything was new, may be wrong. The next ones wait for twice as many, up to [`EXPLORE`].
const FIRST: u32 = 8;
/// Copies from one burst that is timed to the next, as long as nothing surprises: two readings of the TSC take some 40
/// ticks, and what is made of them takes more.
const TIMED: u32 = 1024;
/// How many times more or less than on average surprises: then one is timed soon.
const SURPRISE: f32 = 1.4;
/// Copies until then.
const SOON: i32 = 128;
/// Bursts after which it is forgotten which classes there were.
const SEEN: u32 = 64;
/// The part of a new value in a moving average.
const NEW: f32 = 1.0 / 8.0;
/// Queues of a worker that try together.
const MOST: usize = 64;
/// A value counts as at most so many times the average: a core that was taken away for a while is no reason to change.
const OUTLIER: f32 = 2.0;
/// Copies that a burst must have for its cost to be taken as it is when the other way is tried.
const ENOUGH: u32 = 8;

/// The size class of a copy of `len` bytes.
#[inline(always)]
pub(super) const fn class(len: u32) -> usize {
    let class = 32 - (len.saturating_sub(1) >> 6).leading_zeros();
    if class < CLASSES as u32 { class as usize } else { CLASSES - 1 }
}

/// The longest copy of a class.
const fn up_to(class: usize) -> u32 {
    if class == CLASSES - 1 { u32::MAX } else { 64 << class }
}

/// Lets all queues of a worker try the same way in their next bursts.
///
/// Together, because where one queue copies to is where the next copies from: the core copies both cheaply, or neither.
/// Returns whether it is a long trial.
#[cold]
pub(super) fn try_out<'a>(policies: impl Iterator<Item = &'a mut Policy>) -> bool {
    let mut policies: ArrayVec<&mut Policy, MOST> = policies.take(MOST).collect();
    unify(&mut policies);
    let [core, engine] = policies.iter().fold([0, 0], |[core, engine], policy| {
        let choices = policy.choices();
        [core | choices[0], engine | choices[1]]
    });
    let often = core != 0 && engine != 0;
    let last = policies.iter().any(|policy| policy.tried == Way::Core);
    let way = if engine == 0 || often && last { Way::Engine } else { Way::Core };
    let trials = policies.iter().map(|policy| policy.trials).max().unwrap_or(0).wrapping_add(1);
    let at_first = trials >= 4 && trials.is_power_of_two();
    let long = way == Way::Core && (at_first || trials.is_multiple_of(LONG_EVERY));
    for policy in &mut policies {
        (policy.tried, policy.trials) = (way, trials);
        policy.tries = if long { LONG } else { TRIES };
        policy.try_out(way, often);
    }
    long
}

/// Queues that go different ways although for none of them it matters much go the way that is cheaper for all together:
/// what the core copies from where an engine has copied to is dearer than either way alone.
fn unify(policies: &mut [&mut Policy]) {
    for class in 0..CLASSES {
        let known = policies.iter().filter(|policy| policy.has(class)).filter_map(|policy| {
            let [core, engine] = policy.ticks(class);
            Some((policy.choice(class), core?, engine?))
        });
        let mixed =
            [Way::Core, Way::Engine].iter().all(|way| known.clone().any(|(choice, ..)| choice == *way));
        let near = known.clone().all(|(_, core, engine)| core < NEAR * engine && engine < NEAR * core);
        if !mixed || !near {
            continue;
        }
        let saved: f32 = known.map(|(_, core, engine)| core - engine).sum();
        let way = if saved > 0.0 { Way::Engine } else { Way::Core };
        for policy in policies.iter_mut().filter(|policy| policy.has(class) && policy.choice(class) != way) {
            policy.change(class, Reason::Cheaper);
        }
    }
}

/// The copies of one list, by class.
#[derive(Debug)]
pub(super) struct Made {
    /// One bit for each class.
    pub(super) classes: u16,
    pub(super) copies: u32,
    /// Copies of each class, when there are several classes.
    counts: [u16; CLASSES],
}

impl Made {
    #[inline(always)]
    pub(super) fn of(list: &[Copy]) -> Self {
        // Usually all are of one class: the shortest and the longest tell.
        let (shortest, longest) = list
            .iter()
            .fold((u32::MAX, 0), |(shortest, longest), copy| (shortest.min(copy.len), longest.max(copy.len)));
        let one = class(longest);
        if class(shortest) == one || list.is_empty() { Self::one(one, list) } else { Self::several(list) }
    }

    #[inline(always)]
    fn one(class: usize, list: &[Copy]) -> Self {
        let classes = u16::from(!list.is_empty()) << class;
        Self { classes, copies: list.len() as u32, counts: [0; CLASSES] }
    }

    /// The same by a look at three copies: for lists that nothing is learnt from. What lies between copies of one class is
    /// taken to be of that class.
    #[inline(always)]
    pub(super) fn at_a_glance(list: &[Copy]) -> Self {
        let (Some(first), Some(last)) = (list.first(), list.last()) else { return Self::of(list) };
        let one = class(first.len);
        if class(last.len) != one || class(list[list.len() / 2].len) != one {
            return Self::of(list);
        }
        Self::one(one, list)
    }

    #[cold]
    fn several(list: &[Copy]) -> Self {
        let mut made = Self { classes: 0, copies: list.len() as u32, counts: [0; CLASSES] };
        for copy in list {
            let class = class(copy.len);
            made.classes |= 1 << class;
            made.counts[class] = made.counts[class].saturating_add(1);
        }
        made
    }

    /// Class and number of copies of each class that there is.
    #[inline(always)]
    fn parts(&self) -> impl Iterator<Item = (u8, u32)> + Clone {
        let mut left = self.classes;
        std::iter::from_fn(move || {
            let class = left.trailing_zeros();
            left &= left.wrapping_sub(1);
            let all = self.classes.is_power_of_two();
            let count = self.counts.get(class as usize)?;
            Some((class as u8, if all { self.copies } else { u32::from(*count) }))
        })
    }
}

/// A moving average in TSC ticks; 0 before the first value.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Average(f32);

impl Average {
    /// The average; 0 before the first value.
    pub(super) fn value(self) -> f32 {
        self.0
    }

    /// Takes in what is measured all the time; returns whether it surprises.
    #[inline]
    pub(super) fn follow(&mut self, value: f32) -> bool {
        let (value, before) = (value.max(1.0), self.0);
        self.0 = if before == 0.0 { value } else { before + (value.min(OUTLIER * before) - before) * NEW };
        value > SURPRISE * before || value * SURPRISE < before
    }

    /// Takes in what has not been measured for a while; when it was tried before just now, the better counts.
    #[inline]
    pub(super) fn replace(&mut self, value: f32, again: bool) {
        let value = value.max(1.0);
        self.0 = if again && self.0 > 0.0 { self.0.min(value) } else { value };
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Class {
    /// What the copy itself costs the core; what submitting it costs.
    costs: [Average; 2],
    made: [u64; 2],
    held: u64,
    changes: u64,
    reason: Reason,
    /// Bursts that have gone the other way in this exploration.
    tries: u8,
}

/// The decisions of one queue.
#[derive(Debug)]
pub(super) struct Policy {
    /// Classes whose copies go to an engine.
    engine: u16,
    /// Classes whose next burst goes the other way.
    explore: u16,
    /// Classes that there were lately: in this period and the one before.
    seen: [u16; 2],
    /// Classes that there ever were.
    known: u16,
    /// The way that was tried last.
    tried: Way,
    /// Trials so far; bursts of this one.
    trials: u32,
    tries: u8,
    /// Bursts between two explorations.
    period: u32,
    until_explore: u32,
    until_forget: u32,
    until_timed: i32,
    until_reap_timed: i32,
    classes: [Class; CLASSES],
    /// What returning a packet's chains costs when it is complete at once, and through the reorder ring.
    publish: Average,
    reap: Average,
    /// What collecting a completion costs.
    poll: Average,
    /// The part of the core's packets that is held back by an engine's older ones.
    held: f32,
    /// How much dearer a copy by an engine is than its parts say, compared with one by the core: [`super::survey`].
    aftermath: f32,
    /// Why the engine is not used just now although it is chosen.
    hindrance: Option<Reason>,
}

impl Policy {
    pub(super) fn new() -> Self {
        Self {
            engine: 0,
            explore: 0,
            seen: [0; 2],
            known: 0,
            tried: Way::Core,
            trials: 0,
            tries: TRIES,
            period: FIRST,
            until_explore: FIRST,
            until_forget: SEEN,
            until_timed: 0,
            until_reap_timed: 0,
            classes: [Class::default(); CLASSES],
            publish: Average::default(),
            reap: Average::default(),
            poll: Average::default(),
            held: 0.0,
            aftermath: 0.0,
            hindrance: None,
        }
    }

    /// The classes that go to an engine in the next burst, of those that there were lately.
    #[inline(always)]
    pub(super) fn wanted(&self) -> u16 {
        (self.engine ^ self.explore) & (self.seen[0] | self.seen[1])
    }

    /// Whether every class that there was lately goes to an engine: then nobody has to look at each copy.
    #[inline(always)]
    pub(super) fn all_to_engine(&self) -> bool {
        self.explore == 0 && (self.seen[0] | self.seen[1]) & !self.engine == 0
    }

    /// Whether the next burst of some class goes the other way.
    #[inline(always)]
    pub(super) fn explores(&self) -> bool {
        self.explore != 0
    }

    /// Whether it is time to try the other way.
    #[inline(always)]
    pub(super) fn explore_is_due(&self) -> bool {
        self.until_explore == 0
    }

    /// Whether there were copies of this class lately.
    fn has(&self, class: usize) -> bool {
        (self.seen[0] | self.seen[1]) >> class & 1 != 0
    }

    /// Of the classes that there were lately: those that the core copies, and those that an engine does.
    fn choices(&self) -> [u16; 2] {
        let seen = self.seen[0] | self.seen[1];
        [seen & !self.engine, seen & self.engine]
    }

    /// The next burst of every class goes `way`. When some classes would go the other way in any case, `often`: then this
    /// is called for both ways in turn, twice as often.
    fn try_out(&mut self, way: Way, often: bool) {
        self.period = (2 * self.period).min(if often { EXPLORE / 2 } else { EXPLORE });
        self.until_explore = self.period;
        self.explore = self.choices()[1 - way as usize];
    }

    /// Looks at a list; says whether to time it.
    #[inline(always)]
    pub(super) fn look(&mut self, list: &[Copy]) -> (Made, bool) {
        self.until_timed -= list.len() as i32;
        if self.until_timed > 0 && self.explore == 0 {
            return (Made::at_a_glance(list), false);
        }
        let made = Made::of(list);
        let timed = self.until_timed <= 0 || made.classes & self.explore != 0;
        if timed {
            self.until_timed = TIMED as i32;
        }
        (made, timed)
    }

    /// Whether to time the return of `packets` through the reorder ring.
    #[inline(always)]
    pub(super) fn times_reap(&mut self, packets: usize) -> bool {
        self.until_reap_timed -= packets as i32;
        self.until_reap_timed <= 0
    }

    /// Notes a list that one of the two has made or taken, and how long that took if it was timed.
    #[inline(always)]
    pub(super) fn took(&mut self, way: Way, made: &Made, ticks: Option<f32>) {
        for (class, copies) in made.parts() {
            self.classes[usize::from(class)].made[way as usize] += u64::from(copies);
        }
        if let Some(ticks) = ticks {
            self.learn(way, made, ticks);
        }
    }

    fn learn(&mut self, way: Way, made: &Made, ticks: f32) {
        let costs = self.classes.map(|class| class.costs[way as usize].0);
        let measured = |class: u8| costs[usize::from(class)];
        let known: f32 = made.parts().map(|(class, n)| measured(class) * n as f32).sum();
        let all_known = made.parts().all(|(class, _)| measured(class) > 0.0);
        // Before anything is known the core is taken to need time for bytes, and to submit takes the same for all.
        let weight = |class: u8| if way == Way::Core { 64.0 + (64u32 << class) as f32 } else { 1.0 };
        let weights: f32 = made.parts().map(|(class, n)| weight(class) * n as f32).sum();
        for (class, copies) in made.parts() {
            let share = if all_known { measured(class) / known } else { weight(class) / weights };
            let (bit, index) = (1u16 << class, usize::from(class));
            let other = way != self.choice(index);
            let entry = &mut self.classes[index];
            let average = &mut entry.costs[way as usize];
            if !other {
                if average.follow(ticks * share) {
                    self.until_timed = SOON;
                }
            } else if self.explore & bit != 0 {
                average.replace(ticks * share, entry.tries > 0);
                entry.tries += 1;
                if way == Way::Engine {
                    // What this costs later is of interest, too.
                    self.until_reap_timed = 0;
                }
            } else if copies >= ENOUGH {
                average.replace(ticks * share, false);
            }
            self.decide(index, if other { Reason::Explored } else { Reason::Cheaper });
        }
    }

    /// Notes the end of a burst: `made` by the core and an engine together, and how much of it the core made although
    /// older copies of an engine are in flight.
    #[inline(always)]
    pub(super) fn ended(&mut self, classes: u16, by_core: Option<&Made>, behind_engine: bool) {
        self.seen[0] |= classes;
        self.until_explore = self.until_explore.saturating_sub(1);
        self.until_forget -= 1;
        let new = classes & !self.known;
        if (self.explore & classes) | new != 0 || self.until_forget == 0 {
            self.turn(classes, new);
        }
        let Some(by_core) = by_core else { return };
        if behind_engine && by_core.copies > 0 {
            self.hold(by_core);
        } else if self.held > 0.0 && by_core.classes & !self.engine != 0 {
            self.held -= self.held * (NEW / 4.0);
        }
    }

    #[cold]
    fn turn(&mut self, classes: u16, new: u16) {
        let tried = self.explore & classes;
        for class in (0..CLASSES).filter(|class| tried >> class & 1 != 0) {
            let again = self.classes[class].tries < self.tries && self.is_near(class);
            if !again {
                self.explore &= !(1 << class);
                self.classes[class].tries = 0;
            }
        }
        if self.until_forget == 0 {
            self.until_forget = SEEN;
            self.seen = [0, self.seen[0]];
        }
        if new != 0 {
            self.known |= new;
            self.explore_soon();
        }
    }

    /// Whether the other way is not much dearer than what is chosen, as far as is known, and has not been chosen now.
    fn is_near(&self, class: usize) -> bool {
        let near = if self.tries == LONG { NEAR_LONG } else { NEAR };
        let tried = self.classes[class].tries > 0;
        tried
            && match (self.ticks(class), self.choice(class)) {
                ([Some(core), Some(engine)], Way::Core) => engine < near * core,
                ([Some(core), Some(engine)], Way::Engine) => core < near * (engine - self.aftermath.min(0.0)),
                // The rest of an engine's cost comes later.
                _ => true,
            }
    }

    /// Whether an engine is being tried for more than one burst.
    fn tried_before(&self) -> bool {
        self.classes.iter().any(|class| class.tries > 1)
    }

    fn explore_soon(&mut self) {
        self.period = FIRST;
        self.until_explore = self.until_explore.min(FIRST);
    }

    #[cold]
    fn hold(&mut self, by_core: &Made) {
        for (class, copies) in by_core.parts() {
            self.classes[usize::from(class)].held += u64::from(copies);
        }
        // Not when the other way is tried: that would not be so if it were chosen.
        if by_core.classes & !self.engine != 0 {
            self.held += (1.0 - self.held) * (NEW / 4.0);
        }
    }

    /// Notes what returning a packet's chains took, the packet being complete at once.
    pub(super) fn published(&mut self, ticks: f32) {
        if self.seen[0] & !self.engine == 0 {
            self.publish.replace(ticks, false);
        } else if self.publish.follow(ticks) {
            self.until_timed = SOON;
        }
    }

    /// Notes what collecting one completion of an engine took; returns whether that surprises.
    pub(super) fn polled(&mut self, ticks: f32) -> bool {
        if self.seen[0] & self.engine != 0 {
            return self.poll.follow(ticks);
        }
        self.poll.replace(ticks, self.tried_before());
        false
    }

    /// Notes what returning a packet's chains through the reorder ring took.
    pub(super) fn reaped(&mut self, ticks: f32) {
        self.until_reap_timed = TIMED as i32;
        if self.seen[0] & self.engine == 0 {
            self.reap.replace(ticks, self.tried_before());
        } else if self.reap.follow(ticks) {
            self.until_reap_timed = SOON;
        }
        let mut seen = self.seen[0];
        while seen != 0 {
            let class = seen.trailing_zeros() as usize;
            seen &= seen - 1;
            let engine = self.choice(class) == Way::Engine;
            self.decide(class, if engine { Reason::Cheaper } else { Reason::Explored });
        }
    }

    /// Whether copies of some size go to an engine.
    pub(super) fn chooses_engine(&self) -> bool {
        self.choices()[1] != 0
    }

    /// What the parts of a list's copies cost by what is known.
    pub(super) fn expected(&self, way: Way, made: &Made) -> Option<f32> {
        let beyond = if way == Way::Engine { self.aftermath } else { 0.0 };
        made.parts().try_fold(0.0, |sum, (class, copies)| {
            let ticks = self.ticks(usize::from(class))[way as usize]?;
            Some(sum + (ticks - beyond) * copies as f32)
        })
    }

    /// Takes note of how much dearer a copy by an engine is than its parts say.
    pub(super) fn set_aftermath(&mut self, ticks: f32) {
        self.aftermath = ticks;
    }

    /// Notes whether the engine can be used just now, and if not, why.
    #[inline(always)]
    pub(super) fn hinder(&mut self, hindrance: Option<Reason>) {
        self.hindrance = hindrance;
    }

    #[inline(always)]
    fn choice(&self, class: usize) -> Way {
        if self.engine >> class & 1 != 0 { Way::Engine } else { Way::Core }
    }

    /// What a copy costs the core either way; `None` while a part of it has not been measured.
    fn ticks(&self, class: usize) -> [Option<f32>; 2] {
        let [core, engine] = self.classes[class].costs.map(|average| average.0);
        let (reap, poll) = (self.reap.0, self.poll.0);
        // Not measured while an engine is chosen; never dearer than the return through the ring.
        let publish = if reap > 0.0 { self.publish.0.min(reap) } else { self.publish.0 };
        let returned = publish + self.held * (reap - publish).max(0.0);
        let complete = poll > 0.0 && (reap > 0.0 || publish == 0.0);
        [
            (core > 0.0).then_some(core + returned),
            (engine > 0.0 && complete).then_some(
                (engine + poll + reap + if reap > 0.0 { ENTER } else { 0.0 } + self.aftermath).max(1.0),
            ),
        ]
    }

    /// Every copy goes to an engine until it is known what that costs.
    #[cfg(test)]
    pub(super) fn choose_engine(&mut self) {
        (self.engine, self.seen, self.known) = (u16::MAX, [u16::MAX; 2], u16::MAX);
    }

    fn decide(&mut self, class: usize, reason: Reason) {
        let [Some(core), Some(engine)] = self.ticks(class) else { return };
        let change = match self.choice(class) {
            Way::Core => engine * HYSTERESIS < core,
            Way::Engine => core * HYSTERESIS < engine,
        };
        if change {
            self.change(class, reason);
        }
    }

    fn change(&mut self, class: usize, reason: Reason) {
        let bit = 1 << class;
        self.engine ^= bit;
        let class = &mut self.classes[class];
        (class.reason, class.changes) = (reason, class.changes + 1);
        class.tries = 0;
        let settling = class.changes <= SETTLING;
        self.explore &= !bit;
        if settling {
            self.explore_soon();
        }
    }

    pub(super) fn decision(&self, index: usize) -> Decision {
        let class = &self.classes[index];
        let [core, engine] = self.ticks(index);
        let choice = self.choice(index);
        let hindrance = self.hindrance.filter(|_| choice == Way::Engine);
        Decision {
            up_to: up_to(index),
            way: if hindrance.is_some() { Way::Core } else { choice },
            reason: hindrance.unwrap_or(class.reason),
            core_ticks: core.unwrap_or_default(),
            engine_ticks: engine.unwrap_or_default(),
            by_core: class.made[Way::Core as usize],
            by_engine: class.made[Way::Engine as usize],
            held_by_order: class.held,
            changes: class.changes,
        }
    }
}
