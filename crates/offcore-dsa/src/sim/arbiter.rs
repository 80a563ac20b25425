//! Arbitration between work queues, weighted by priority and without starvation.

/// An arbiter among work queues (smooth weighted round robin).
///
/// In each turn, every requesting queue gains credit equal to its weight. The queue with the most credit is served, and
/// its credit is reduced by the sum of all gains. In the long run, each queue is served in proportion to its weight,
/// evenly spread. A queue of weight 1 waits at most as many turns as the sum of the other weights.
#[derive(Clone, Debug)]
pub(super) struct Arbiter {
    weights: Vec<i64>,
    credits: Vec<i64>,
}

impl Arbiter {
    pub(super) fn new(weights: impl IntoIterator<Item = u32>) -> Self {
        let weights: Vec<i64> = weights.into_iter().map(|weight| i64::from(weight.max(1))).collect();
        Self { credits: vec![0; weights.len()], weights }
    }

    /// Returns the next queue to serve among the requesting ones.
    #[inline]
    pub(super) fn next(&mut self, wants: impl Fn(usize) -> bool) -> Option<usize> {
        if let [credit] = &mut self.credits[..] {
            *credit = 0;
            return wants(0).then_some(0);
        }
        let mut gained = 0;
        let mut best = None;
        for index in 0..self.weights.len() {
            if !wants(index) {
                continue;
            }
            gained += self.weights[index];
            self.credits[index] += self.weights[index];
            if best.is_none_or(|best: usize| self.credits[index] > self.credits[best]) {
                best = Some(index);
            }
        }
        let best = best?;
        self.credits[best] -= gained;
        Some(best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_is_proportional_to_weight() {
        let mut arbiter = Arbiter::new([15, 1, 4]);
        let mut served = [0; 3];
        for _ in 0..2000 {
            served[arbiter.next(|_| true).unwrap()] += 1;
        }
        assert_eq!(served, [1500, 100, 400]);
    }

    #[test]
    fn lowest_priority_wait_is_bounded() {
        let mut arbiter = Arbiter::new([15, 15, 1]);
        let mut waited = 0;
        for _ in 0..1000 {
            waited = if arbiter.next(|_| true) == Some(2) { 0 } else { waited + 1 };
            assert!(waited <= 31, "{waited}");
        }
    }

    #[test]
    fn idle_client_gains_nothing() {
        let mut arbiter = Arbiter::new([1, 15]);
        assert!((0..100).all(|_| arbiter.next(|index| index == 0) == Some(0)));
        let first: Vec<_> = (0..16).map(|_| arbiter.next(|_| true).unwrap()).collect();
        assert_eq!(first.iter().filter(|&&index| index == 0).count(), 1);
        assert_eq!(arbiter.next(|_| false), None);
    }
}
