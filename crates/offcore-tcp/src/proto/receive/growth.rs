//! Growth of the receive window according to the data that the application reads per round trip.

use offcore_stats::time::{Micros, Time};

use super::Receiver;

/// Measures the data read per round trip, which determines the window's growth.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// Start of the current round, and the application's read position at that time.
    began: Time,
    from: u64,
    /// The largest number of bytes read in one round.
    most: u64,
    /// Measured duration of a round; zero before the first sample.
    rtt: Micros,
    /// The echoed timestamp of the last sample.
    echo: u32,
}

impl Receiver {
    /// Processes a sample of the round-trip time: the time until data arrives with the echo of a
    /// timestamp.
    #[inline]
    pub(crate) fn measure(&mut self, echo: u32, sample: Micros) {
        let rtt = self.round.rtt;
        self.round.echo = echo;
        self.round.rtt = if rtt == Micros::ZERO { sample } else { rtt - rtt / 8 + sample / 8 };
    }

    /// Returns whether an echoed timestamp has not given a sample.
    #[inline]
    pub(crate) fn is_new_echo(&self, echo: u32) -> bool {
        echo != self.round.echo
    }

    /// Grows the window to twice the bytes that the application reads in a round trip, and to four times while they
    /// grow: a sender in slow start doubles them in each round (Fisk and Feng, Dynamic Right-Sizing in TCP; Linux's
    /// `tcp_rcv_space_adjust`). `limit` bounds the window. Without timestamps a round trip takes `rtt`.
    pub(crate) fn adapt(&mut self, now: Time, rtt: Micros, limit: impl FnOnce() -> u32) {
        let Round { began, from, most, rtt: measured, echo } = self.round;
        let rtt = if measured > Micros::ZERO { measured } else { rtt };
        if now - began < rtt || rtt == Micros::ZERO {
            return;
        }
        let read = self.consumed - from;
        self.round = Round { began: now, from: self.consumed, most: most.max(read), rtt: measured, echo };
        let growth = (4 * read * read.saturating_sub(most)).checked_div(most).unwrap_or(2 * read);
        let wanted = 2 * read + growth.min(2 * read);
        // Without window scaling the window cannot grow.
        if wanted > u64::from(self.promise) && self.scale > 0 {
            self.promise = self.promise.max(limit().min(u32::try_from(wanted).unwrap_or(u32::MAX)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the window after rounds of 100 ms with these numbers of bytes.
    fn window_after(rounds: &[u64]) -> u32 {
        let mut receiver = Receiver::new(999, 65_536, 8);
        let mut now = Time::from_micros(1);
        for bytes in rounds {
            let end = receiver.next + bytes;
            receiver.announced = end;
            receiver.text(now, receiver.next..end, false, |_| true).unwrap();
            now += Micros::from_millis(100);
            receiver.measure(1, Micros::from_millis(100));
            receiver.consumed(end);
            receiver.adapt(now, Micros::from_millis(1), || u32::MAX);
        }
        receiver.promise
    }

    #[test]
    fn slow_start_quadruples_window() {
        assert_eq!(window_after(&[50_000, 100_000, 200_000]), 800_000);
        assert_eq!(
            window_after(&[50_000, 100_000, 200_000, 200_000, 200_000]),
            800_000,
            "it does not shrink"
        );
        assert_eq!(window_after(&[400_000]), 1_600_000, "the first round may be the beginning");
        // Steady reading needs twice as much. The 1 ms of the handshake is not a round-trip time.
        assert_eq!(window_after(&[20_000, 20_000, 22_000]), 4 * 20_000);
    }
}
