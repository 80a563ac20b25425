//! Tracks one flow in a sink: which numbers arrived, and in which order.

/// Number of sequence numbers below the highest whose arrival is remembered.
pub const WINDOW: u64 = 1024;

const WORDS: usize = (WINDOW / 64) as usize;

/// Classification of an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The number after the highest one so far.
    InOrder,
    /// A higher number: this many numbers in between have not arrived, and are lost unless they arrive late.
    Ahead(u64),
    /// A lower number, for the first time: it is not lost.
    Late,
    /// A lower number that arrived before.
    Duplicate,
    /// A number below the window: it cannot be determined whether it is late or a duplicate.
    TooOld,
    /// A number that is too high to be correct. It is ignored.
    Implausible,
}

/// The numbers that arrived. Numbers begin at 0.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// The number after the highest number that arrived.
    next: u64,
    /// Bit n % WINDOW: whether n arrived, for the window below `next`.
    seen: [u64; WORDS],
}

impl Sequence {
    /// A gap of this length is not a loss but a damaged number.
    const MAX_PLAUSIBLE_GAP: u64 = 1 << 32;

    /// Records the arrival of `number`.
    #[inline]
    pub fn arrive(&mut self, number: u64) -> Arrival {
        if number == self.next {
            self.set(number);
            self.next += 1;
            return Arrival::InOrder;
        }
        self.arrive_out_of_order(number)
    }

    #[cold]
    fn arrive_out_of_order(&mut self, number: u64) -> Arrival {
        if number < self.next {
            return if self.next - number > WINDOW {
                Arrival::TooOld
            } else if self.has(number) {
                Arrival::Duplicate
            } else {
                self.set(number);
                Arrival::Late
            };
        }
        let gap = number - self.next;
        if gap >= Self::MAX_PLAUSIBLE_GAP {
            return Arrival::Implausible;
        }
        // Numbers below the window are forgotten, so clearing at most the whole window is sufficient.
        for missing in self.next.max(number.saturating_sub(WINDOW))..number {
            self.seen[Self::word(missing)] &= !Self::bit(missing);
        }
        self.set(number);
        self.next = number + 1;
        Arrival::Ahead(gap)
    }

    fn word(number: u64) -> usize {
        (number / 64) as usize % WORDS
    }

    fn bit(number: u64) -> u64 {
        1 << (number % 64)
    }

    fn has(&self, number: u64) -> bool {
        self.seen[Self::word(number)] & Self::bit(number) != 0
    }

    fn set(&mut self, number: u64) {
        self.seen[Self::word(number)] |= Self::bit(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Arrival::*;

    fn arrivals(numbers: &[u64]) -> Vec<Arrival> {
        let mut sequence = Sequence::default();
        numbers.iter().map(|&n| sequence.arrive(n)).collect()
    }

    #[test]
    fn in_order() {
        let mut sequence = Sequence::default();
        assert!((0..5 * WINDOW).all(|n| sequence.arrive(n) == InOrder));
    }

    #[test]
    fn loss_lateness_and_duplicates() {
        assert_eq!(arrivals(&[0, 1, 3, 4]), [InOrder, InOrder, Ahead(1), InOrder]);
        assert_eq!(arrivals(&[0, 2, 1, 3]), [InOrder, Ahead(1), Late, InOrder]);
        assert_eq!(arrivals(&[0, 0, 2, 1, 1]), [InOrder, Duplicate, Ahead(1), Late, Duplicate]);
        assert_eq!(arrivals(&[5, 0, 4, 5]), [Ahead(5), Late, Late, Duplicate]);
    }

    #[test]
    fn numbers_before_window_are_too_old() {
        assert_eq!(arrivals(&[WINDOW, 1, 0, WINDOW + 1, 1]), [Ahead(WINDOW), Late, TooOld, InOrder, TooOld]);
        // After a gap longer than the window, the window contains none of the earlier numbers.
        let far = 10 * WINDOW + 7;
        assert_eq!(
            arrivals(&[0, far, far - 1, far - WINDOW + 1, 0])[1..],
            [Ahead(far - 1), Late, Late, TooOld]
        );
    }

    #[test]
    fn implausible_numbers_are_ignored() {
        assert_eq!(arrivals(&[0, u64::MAX, 1 << 40, 1]), [InOrder, Implausible, Implausible, InOrder]);
    }
}
