//! Counters of the copies of a queue in mode `auto`, by size class and by core or engine.
//!
//! Bursts only count copies. At the end of a lease, the copies are distributed among the classes in proportion to the
//! sizes in a single examined burst per lease.

use super::choice::{QueueChoice, class, up_to, way};
use super::stats::{CLASSES, Decision, Reason, Way};
use crate::channel::CopyOp;

#[derive(Clone, Copy, Debug, Default)]
struct Class {
    made: [u64; 2],
    held: u64,
    changes: u64,
    reason: Reason,
}

/// The counters of a queue.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    classes: [Class; CLASSES],
    /// Number of copies per class in the last examined burst, plus half of the previous value.
    sizes: [u16; CLASSES],
    /// Copies not yet distributed, by the core and by an engine; and copies by the core that waited behind older ones
    /// by an engine.
    pub(super) open: [u64; 2],
    pub(super) held: u64,
}

impl Tally {
    /// Examines a burst. Returns the classes that occurred recently.
    #[cold]
    pub(super) fn look<'a>(&mut self, burst: impl IntoIterator<Item = &'a CopyOp>) -> u16 {
        self.sizes.iter_mut().for_each(|size| *size /= 2);
        for copy in burst {
            let size = &mut self.sizes[class(copy.len)];
            *size = size.saturating_add(1);
        }
        (0..CLASSES).filter(|&class| self.sizes[class] > 0).fold(0, |seen, class| seen | 1 << class)
    }

    /// Distributes the counted copies among the classes; `from` as in [`QueueChoice`].
    pub(super) fn settle(&mut self, from: u32) {
        for by in [Way::Core, Way::Engine] {
            let open = std::mem::take(&mut self.open[by as usize]);
            self.distribute(open, by, from, |class| &mut class.made[by as usize]);
        }
        let held = std::mem::take(&mut self.held);
        self.distribute(held, Way::Core, from, |class| &mut class.held);
    }

    fn distribute(&mut self, copies: u64, by: Way, from: u32, counter: impl Fn(&mut Class) -> &mut u64) {
        // Exceptional copies (in a trial, or because of a full channel) may be of any class.
        let fits = |class: usize| way(class, from) == by && self.sizes[class] > 0;
        let any = !(0..CLASSES).any(fits);
        let shares: [u64; CLASSES] =
            std::array::from_fn(|class| if any || fits(class) { self.sizes[class].into() } else { 0 });
        let all: u64 = shares.iter().sum::<u64>().max(1);
        let Some(most) = (0..CLASSES).max_by_key(|&class| shares[class]) else { return };
        let mut left = copies;
        for (class, share) in self.classes.iter_mut().zip(shares) {
            let part = copies * share / all;
            *counter(class) += part;
            left -= part;
        }
        *counter(&mut self.classes[most]) += left;
    }

    /// Records a change of the decision from `before` to `now`.
    pub(super) fn decided(&mut self, before: u32, now: u32, reason: Reason) {
        for (index, class) in self.classes.iter_mut().enumerate() {
            if way(index, before) != way(index, now) {
                (class.reason, class.changes) = (reason, class.changes + 1);
            }
        }
    }

    /// Reports each class.
    pub(super) fn report(
        &self,
        choice: QueueChoice,
        unavailable: Option<Reason>,
        ticks: [f32; 2],
    ) -> [Decision; CLASSES] {
        let mut settled = self.clone();
        settled.settle(choice.decided);
        std::array::from_fn(|index| {
            let Class { made, held, changes, reason } = settled.classes[index];
            let decided = way(index, choice.decided);
            let unavailable = unavailable.filter(|_| decided == Way::Engine);
            Decision {
                up_to: up_to(index),
                way: if unavailable.is_some() { Way::Core } else { decided },
                reason: unavailable.unwrap_or(reason),
                core_ticks: ticks[Way::Core as usize],
                engine_ticks: ticks[Way::Engine as usize],
                by_core: made[Way::Core as usize],
                by_engine: made[Way::Engine as usize],
                held_by_order: held,
                changes,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::choice::NONE;
    use super::*;

    fn burst(lens: &[(u32, usize)]) -> Vec<CopyOp> {
        let copy = |len| CopyOp { src: std::ptr::null(), dst: std::ptr::null_mut(), len, token: 0 };
        lens.iter().flat_map(|&(len, n)| std::iter::repeat_n(copy(len), n)).collect()
    }

    #[test]
    fn copies_are_shared_out_by_size() {
        let mut tally = Tally::default();
        let seen = tally.look(&burst(&[(64, 7), (594, 4), (1518, 1)]));
        assert_eq!(seen.count_ones(), 3);
        let from = 513;
        (tally.open, tally.held) = ([701, 500], 10);
        let choice = QueueChoice { from, decided: from, ..QueueChoice::new() };
        let report = tally.report(choice, None, [1.0, 2.0]);
        let by = [64, 594, 1518].map(|len| (report[class(len)].by_core, report[class(len)].by_engine));
        assert_eq!(by, [(701, 0), (0, 400), (0, 100)]);
        assert_eq!(report[class(64)].held_by_order, 10);
        // A trial in which the core copies all sizes.
        (tally.open, tally.held) = ([1201, 0], 0);
        tally.settle(NONE);
        let report = tally.report(QueueChoice::new(), None, [1.0, 2.0]);
        assert_eq!(report.iter().map(|class| class.by_core).sum::<u64>(), 1201);
        assert_eq!(report[class(64)].by_core, 701, "7 of 12, and what is left of the division");
    }

    #[test]
    fn old_sizes_are_forgotten() {
        let mut tally = Tally::default();
        tally.look(&burst(&[(1518, 32)]));
        let seen: Vec<u16> = (0..7).map(|_| tally.look(&burst(&[(64, 32)]))).collect();
        assert_eq!((seen[0].count_ones(), seen[6].count_ones()), (2, 1));
    }
}
