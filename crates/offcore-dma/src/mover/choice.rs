//! The choice between core and engine for a queue in mode `auto`, by copy size, and the moves that can be tried.

use super::stats::{CLASSES, Way};

/// Values of [`QueueChoice::from`]: the engine gets all copies, or none.
pub(super) const ALL: u32 = 0;
pub(super) const NONE: u32 = u32::MAX;

/// Returns the size class of a copy of `len` bytes.
#[inline(always)]
pub(super) const fn class(len: u32) -> usize {
    let class = 32 - (len.saturating_sub(1) >> 6).leading_zeros();
    if class < CLASSES as u32 { class as usize } else { CLASSES - 1 }
}

/// Returns the length of the longest copy of a class.
pub(super) const fn up_to(class: usize) -> u32 {
    if class == CLASSES - 1 { u32::MAX } else { 64 << class }
}

/// Returns the length of the shortest copy of a class.
const fn shortest(class: usize) -> u32 {
    if class == 0 { ALL } else { up_to(class - 1) + 1 }
}

/// Returns the way of a class if copies of at least `from` bytes go to the engine.
pub(super) const fn way(class: usize, from: u32) -> Way {
    if from != NONE && up_to(class) >= from { Way::Engine } else { Way::Core }
}

/// The choice for a queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueChoice {
    /// Minimum length of copies that presently go to the engine: the decided value, or a value that is being tried.
    pub(super) from: u32,
    pub(super) decided: u32,
    /// Size classes that occurred recently, as a bit mask.
    pub(super) seen: u16,
    /// Whether the queue had copies in the last lease.
    pub(super) busy: bool,
}

/// A change that can be tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// All copies of all queues go one way.
    All(Way),
    /// A smaller change, selected by this number modulo the number of possible ones.
    Side(u32),
}

/// The smaller changes of [`Move::Side`].
#[derive(Clone, Copy, Debug)]
enum Side {
    /// One more size class goes this way, if several classes are in use.
    Shift(Way),
    /// A single queue out of several goes the other way.
    One(usize),
}

impl QueueChoice {
    /// Returns the initial choice: the core makes every copy.
    pub(super) const fn new() -> Self {
        Self { from: NONE, decided: NONE, seen: 0, busy: false }
    }

    /// Returns the threshold with which one more class goes `to`, if both ways still have classes then.
    fn shifted(&self, to: Way) -> Option<u32> {
        let engine = (0..CLASSES).filter(|&class| way(class, self.decided) == Way::Engine);
        let by_engine = engine.fold(0, |all, class| all | 1u16 << class) & self.seen;
        let by_core = self.seen & !by_engine;
        let (from, left) = match to {
            Way::Engine if by_core != 0 => {
                let largest = CLASSES - 1 - (by_core << (16 - CLASSES)).leading_zeros() as usize;
                (shortest(largest), by_core & !(1 << largest))
            }
            Way::Core if by_engine != 0 => {
                let left = by_engine & (by_engine - 1);
                (shortest((left.trailing_zeros() as usize).min(CLASSES - 1)), left)
            }
            _ => return None,
        };
        (left != 0).then_some(from)
    }
}

/// Returns the possible smaller changes.
fn sides(choices: &[&mut QueueChoice]) -> impl Iterator<Item = Side> + Clone {
    let shifts = [Way::Engine, Way::Core].map(|to| {
        let can = choices.iter().any(|choice| choice.busy && choice.shifted(to).is_some());
        can.then_some(Side::Shift(to))
    });
    let busy = choices.iter().enumerate().fold(0u64, |busy, (i, choice)| busy | u64::from(choice.busy) << i);
    let several = if busy.count_ones() > 1 { busy } else { 0 };
    let ones = (0..64).filter(move |i| several >> i & 1 != 0).map(Side::One);
    shifts.into_iter().flatten().chain(ones)
}

/// Whether [`Move::All`] to the core, to the engine, and [`Move::Side`] would change anything.
pub(super) fn moves(choices: &[&mut QueueChoice]) -> [bool; 3] {
    let busy = || choices.iter().filter(|choice| choice.busy);
    [
        busy().any(|choice| choice.decided != NONE),
        busy().any(|choice| choice.decided != ALL),
        sides(choices).next().is_some(),
    ]
}

/// Applies `next` until [`back`] or [`adopt`] is called.
pub(super) fn apply_trial(choices: &mut [&mut QueueChoice], next: Move) {
    let side = match next {
        Move::All(way) => {
            let from = if way == Way::Engine { ALL } else { NONE };
            return choices.iter_mut().for_each(|choice| choice.from = from);
        }
        Move::Side(n) => {
            let sides = sides(choices);
            let count = sides.clone().count().max(1);
            sides.clone().nth(n as usize % count)
        }
    };
    for (i, choice) in choices.iter_mut().enumerate() {
        match side {
            Some(Side::Shift(to)) => choice.from = choice.shifted(to).unwrap_or(choice.decided),
            Some(Side::One(one)) if one == i => choice.from = if choice.decided == NONE { ALL } else { NONE },
            _ => {}
        }
    }
}

/// Ends a trial and returns to the decided values.
pub(super) fn back(choices: &mut [&mut QueueChoice]) {
    choices.iter_mut().for_each(|choice| choice.from = choice.decided);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_powers_of_two() {
        let classes = [0, 1, 64, 65, 128, 129, 1024, 1526, 65536, 65537, u32::MAX].map(class);
        assert_eq!(classes, [0, 0, 0, 1, 1, 2, 4, 5, 10, 11, 11]);
        assert!((0..CLASSES - 1).all(|c| class(up_to(c)) == c && class(up_to(c) + 1) == c + 1));
        assert!((0..CLASSES).all(|c| way(c, shortest(c)) == Way::Engine && way(c, NONE) == Way::Core));
        assert!((1..CLASSES).all(|c| way(c - 1, shortest(c)) == Way::Core));
    }

    #[test]
    fn shift_moves_one_class() {
        let seen = [64, 594, 1518].map(class).into_iter().fold(0, |seen, class| seen | 1 << class);
        let choice = |decided| QueueChoice { from: decided, decided, seen, busy: true };
        let both = |decided| [Way::Engine, Way::Core].map(|to| choice(decided).shifted(to));
        assert_eq!(both(NONE), [Some(1025), None]);
        assert_eq!(both(1025), [Some(513), None]);
        assert_eq!(both(513), [None, Some(1025)]);
        assert_eq!(both(ALL), [None, Some(513)]);
        let one = QueueChoice { seen: 1 << class(64), ..choice(NONE) };
        assert_eq!([one.shifted(Way::Engine), one.shifted(Way::Core)], [None, None]);
    }

    #[test]
    fn trials_differ_and_terminate() {
        let mut queues = [QueueChoice { busy: true, seen: 0b101, ..QueueChoice::new() }; 2];
        let mut choices: Vec<&mut QueueChoice> = queues.iter_mut().collect();
        assert_eq!(moves(&choices), [false, true, true]);
        // A shift, and each of the queues alone.
        let mut tried = Vec::new();
        for n in 0..3 {
            apply_trial(&mut choices, Move::Side(n));
            tried.push([choices[0].from, choices[1].from]);
            back(&mut choices);
        }
        assert_eq!(tried, [[129, 129], [ALL, NONE], [NONE, ALL]]);
        apply_trial(&mut choices, Move::All(Way::Engine));
        assert!(choices.iter().all(|choice| choice.from == ALL && choice.decided == NONE));
        back(&mut choices);
        assert!(choices.iter().all(|choice| choice.from == NONE));
        choices[1].busy = false;
        choices[0].seen = 1;
        assert_eq!(moves(&choices), [false, true, false]);
    }
}
