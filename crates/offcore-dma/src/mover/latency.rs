//! Latency of packets that are copied by an engine, and the decision whether it is too high.
//!
//! In some bursts, the last packet is *stamped* when its copies are submitted. It is late if it has not been published
//! when the latency limit expires. A single late packet may be an accident, for example if the core was preempted. Two
//! late packets among [`LATE_FORGOTTEN_AFTER`] are not, and the queue's engine is *declined*: the core copies for a
//! number of bursts, which doubles each time. Then one burst tries the engine. If that burst is in time, the engine
//! is used again, and a late packet among the next [`LATE_FORGOTTEN_AFTER`] declines it immediately. An engine that
//! is only slow under load therefore causes few late bursts.
//!
//! This module reads no clock. Ticks are passed in, so that tests can simulate any sequence of times.

/// Number of bursts given to an engine between two stamped ones, while none is late.
const SAMPLE: u32 = 8;
/// Number of packets in time after which a late packet is forgiven.
const LATE_FORGOTTEN_AFTER: u32 = 64;
/// First and maximum number of bursts by the core before a declined engine is tried again.
const PAUSE: (u32, u32) = (4096, 1 << 18);
/// Number of stamped packets in time, without a late one, that halves the next pause.
const LASTING: u32 = 1024;
/// Divisor for the decay of the longest recent latency per packet.
const DECAY: u64 = 64;

/// Whether a queue's engine is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The engine is used.
    In,
    /// The engine is not used for this number of bursts.
    Declined(u32),
    /// The next burst may try the engine.
    Trial,
    /// A burst that tries the engine is in flight.
    Trying,
}

/// A packet whose latency is measured.
#[derive(Clone, Copy, Debug)]
struct Stamp {
    /// Position of the oldest packet in the reorder ring after the stamped packet is published.
    end: u32,
    /// TSC when its copies were submitted.
    since: u64,
    /// Whether it is late and has been counted.
    counted: bool,
}

/// The latencies of a queue.
#[derive(Debug)]
pub(super) struct Latency {
    state: State,
    stamp: Option<Stamp>,
    until_stamp: u32,
    /// Number of packets that must be in time before a late one is forgiven; see [`LATE_FORGOTTEN_AFTER`].
    charged: u32,
    pause: u32,
    /// Number of stamped packets in time since the last late one.
    in_time: u32,
    /// Approximately the longest recent latency in ticks.
    longest: u64,
    /// Number of stamped packets that were late.
    late: u64,
    /// Number of times that the engine was declined.
    declined: u64,
}

impl Latency {
    pub(super) const fn new() -> Self {
        Self {
            state: State::In,
            stamp: None,
            until_stamp: 1,
            // The engine is unknown at first, so the first late packet declines it.
            charged: LATE_FORGOTTEN_AFTER,
            pause: PAUSE.0,
            in_time: 0,
            longest: 0,
            late: 0,
            declined: 0,
        }
    }

    /// Whether the queue's next burst may go to an engine.
    #[inline(always)]
    pub(super) fn admits(&self) -> bool {
        match self.state {
            State::In => true,
            // The latency of this burst must be measured.
            State::Trial => self.stamp.is_none(),
            State::Declined(_) | State::Trying => false,
        }
    }

    /// Records that the core has made a burst's copies.
    #[inline(always)]
    pub(super) fn passed(&mut self) {
        if let State::Declined(left) = &mut self.state {
            *left -= 1;
            if *left == 0 {
                self.state = State::Trial;
            }
        }
    }

    /// Whether the burst that is about to go to an engine must be stamped.
    #[inline]
    pub(super) fn wants_stamp(&mut self) -> bool {
        self.until_stamp = self.until_stamp.saturating_sub(1);
        let due = self.until_stamp == 0 || self.charged > 0 || self.state == State::Trial;
        due && self.stamp.is_none()
    }

    /// Stamps a burst submitted at `now`. It is published when the oldest position in the reorder ring reaches `end`.
    pub(super) fn stamp(&mut self, end: u32, now: u64) {
        self.until_stamp = SAMPLE;
        self.stamp = Some(Stamp { end, since: now, counted: false });
        if self.state == State::Trial {
            self.state = State::Trying;
        }
    }

    /// Whether a stamped packet is in flight.
    #[inline(always)]
    pub(super) fn is_waiting(&self) -> bool {
        self.stamp.is_some()
    }

    /// Checks whether the stamped packet is published, given the oldest position in the reorder ring, or has taken
    /// longer than `most` ticks.
    #[inline]
    pub(super) fn look(&mut self, oldest: u32, most: u64, now: impl FnOnce() -> u64) {
        let Some(stamp) = self.stamp else { return };
        let ticks = now().wrapping_sub(stamp.since);
        let published = oldest.wrapping_sub(stamp.end) < 1 << 31;
        if published {
            self.stamp = None;
            self.longest = ticks.max(self.longest - self.longest / DECAY);
        }
        if ticks > most {
            if !stamp.counted {
                self.stamp = self.stamp.map(|stamp| Stamp { counted: true, ..stamp });
                self.count_late();
            }
        } else if published {
            self.count_in_time();
        }
    }

    fn count_in_time(&mut self) {
        self.charged = self.charged.saturating_sub(1);
        self.in_time += 1;
        if self.in_time == LASTING {
            self.in_time = 0;
            self.pause = (self.pause / 2).max(PAUSE.0);
        }
        if self.state == State::Trying {
            self.state = State::In;
            self.charged = LATE_FORGOTTEN_AFTER;
        }
    }

    #[cold]
    fn count_late(&mut self) {
        self.late += 1;
        self.in_time = 0;
        match self.state {
            // The packet was submitted before the engine was declined.
            State::Declined(_) | State::Trial => {}
            State::In if self.charged == 0 => self.charged = LATE_FORGOTTEN_AFTER,
            State::In | State::Trying => {
                self.state = State::Declined(self.pause);
                self.declined += 1;
                self.pause = (2 * self.pause).min(PAUSE.1);
            }
        }
    }

    /// Returns the approximate longest recent latency in ticks, the number of late packets, and how often the engine
    /// was declined.
    pub(super) fn report(&self) -> (u64, u64, u64) {
        (self.longest, self.late, self.declined)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u64 = 1000;

    /// A queue's bursts, one at a time, with a scripted latency of its engine.
    struct Story {
        latency: Latency,
        now: u64,
        position: u32,
        by_engine: Vec<u64>,
    }

    impl Story {
        fn new() -> Self {
            // Positions and times start near the wrap-around.
            Self {
                latency: Latency::new(),
                now: u64::MAX - 50,
                position: u32::MAX - 100,
                by_engine: Vec::new(),
            }
        }

        /// Runs bursts that take `ticks(burst)` in the engine. Returns the number of bursts that the engine got.
        fn bursts(&mut self, bursts: u64, ticks: impl Fn(u64) -> u64) -> u64 {
            let before = self.by_engine.len();
            for burst in 0..bursts {
                self.now = self.now.wrapping_add(100);
                self.position = self.position.wrapping_add(32);
                if !self.latency.admits() {
                    self.latency.passed();
                    continue;
                }
                self.by_engine.push(burst);
                if self.latency.wants_stamp() {
                    self.latency.stamp(self.position, self.now);
                }
                let (start, took) = (self.now, ticks(burst));
                // Check while the packet is in flight.
                self.look(self.position.wrapping_sub(1), start.wrapping_add(took / 2));
                self.look(self.position, start.wrapping_add(took));
            }
            (self.by_engine.len() - before) as u64
        }

        fn look(&mut self, oldest: u32, now: u64) {
            self.now = now;
            self.latency.look(oldest, MOST, || now);
        }
    }

    #[test]
    fn fast_engine_is_always_used() {
        let mut story = Story::new();
        assert_eq!(story.bursts(100_000, |burst| burst % MOST), 100_000);
        let (longest, late, declined) = story.latency.report();
        assert_eq!((late, declined), (0, 0));
        assert!((MOST / 2..MOST).contains(&longest), "{longest}");
    }

    #[test]
    fn slow_engine_is_probed_less_often() {
        let mut story = Story::new();
        const BURSTS: u64 = 2_000_000;
        let used = story.bursts(BURSTS, |_| MOST + 1);
        // The pauses are 4096, 8192, … 131072 bursts, then 262144 repeatedly.
        assert!((2..=14).contains(&used), "{used} of {BURSTS}");
        assert_eq!(story.latency.report().2, used);
        let gaps: Vec<u64> = story.by_engine.windows(2).map(|two| two[1] - two[0]).collect();
        assert!(gaps.is_sorted() && gaps[0] > 4000, "{gaps:?}");
        assert!(story.latency.state != State::In);
    }

    #[test]
    fn recovered_engine_is_detected() {
        let mut story = Story::new();
        story.bursts(50_000, |_| 10 * MOST);
        let used = story.bursts(400_000, |_| MOST / 2);
        assert!(used > 300_000, "{used}");
        assert!(story.latency.state == State::In);
    }

    #[test]
    fn one_late_packet_is_forgiven() {
        let mut story = Story::new();
        story.bursts(1000, |_| 1);
        // Some time passes until a late burst is stamped.
        let stalled = |burst| if burst < u64::from(SAMPLE) { 50 * MOST } else { 1 };
        assert_eq!(story.bursts(u64::from(2 * SAMPLE), stalled), u64::from(2 * SAMPLE));
    }

    #[test]
    fn overloaded_engine_delays_few_bursts() {
        let mut story = Story::new();
        const BURSTS: u64 = 4_000_000;
        // The engine is in time for single bursts, and late from the fifth consecutive burst on, so every trial
        // succeeds.
        let used = std::cell::Cell::new((0u64, 0u64));
        let late = story.bursts(BURSTS, |burst| {
            let (last, row) = used.get();
            let row = if burst == last + 1 { row + 1 } else { 0 };
            used.set((burst, row));
            if row >= 4 { 2 * MOST } else { 1 }
        });
        assert!(late < BURSTS / 1000, "{late} of {BURSTS}");
        assert!(story.latency.report().2 > 10);
    }

    #[test]
    fn missing_packet_counts_as_late() {
        let mut latency = Latency::new();
        assert!(latency.admits() && latency.wants_stamp());
        latency.stamp(8, 100);
        assert!(!latency.wants_stamp(), "there is one on its way");
        latency.look(7, MOST, || 100 + MOST);
        assert!(latency.state == State::In);
        latency.look(7, MOST, || 101 + MOST);
        assert!(latency.state != State::In && latency.is_waiting());
        latency.look(8, MOST, || 500 + MOST);
        assert_eq!((latency.report().1, latency.is_waiting()), (1, false));
    }
}
