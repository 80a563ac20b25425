//! How long packets take that go through an engine, and whether that is too long.
//!
//! Of some bursts the last packet is *stamped* when its copies are handed over; when it has been published, or is not
//! after the longest time allowed, it is known whether it was late. One late packet may be an accident: a core that was
//! taken away. Two among [`FORGIVEN`] are not, and the queue's engine is *declined*: the core copies, for a number of
//! bursts that doubles each time. Then one burst tries the engine, and if that is in time, the next late packet is one
//! too many until [`FORGIVEN`] in a row were not. So an engine that is only slow under load costs a few late bursts
//! among very many.
//!
//! No clock is read here: ticks are handed in, so that a test can tell any story.

/// Bursts given to an engine from one that is stamped to the next, as long as none is late.
const SAMPLE: u32 = 8;
/// Packets in time for which a late one is forgiven.
const FORGIVEN: u32 = 64;
/// Bursts by the core before an engine that was declined is tried again: at first, and at most.
const PAUSE: (u32, u32) = (4096, 1 << 18);
/// Stamped packets in time, none late between them, that make the next pause half as long.
const LASTING: u32 = 1024;
/// The part of the distance to a shorter time that the longest of late moves with every packet.
const DECAY: u64 = 64;

/// Whether a queue's engine is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The engine is used.
    In,
    /// It is not, for so many bursts.
    Declined(u32),
    /// The next burst may try it.
    Trial,
    /// A burst is on its way that tries it.
    Trying,
}

/// A packet whose time is taken.
#[derive(Clone, Copy, Debug)]
struct Stamp {
    /// Position in the reorder ring that is the oldest once the packet is published.
    end: u32,
    /// TSC when its copies were handed over.
    since: u64,
    /// It is late already, and counted.
    counted: bool,
}

/// The latencies of one queue.
#[derive(Debug)]
pub(super) struct Latency {
    state: State,
    stamp: Option<Stamp>,
    until_stamp: u32,
    /// Packets that have to be in time until a late one is forgiven; see [`FORGIVEN`].
    charged: u32,
    pause: u32,
    /// Stamped packets in time since the last late one.
    in_time: u32,
    /// About the longest time of late, in ticks.
    longest: u64,
    /// Stamped packets that were late.
    late: u64,
    /// How often the engine was declined.
    declined: u64,
}

impl Latency {
    pub(super) const fn new() -> Self {
        Self {
            state: State::In,
            stamp: None,
            until_stamp: 1,
            // Nothing is known: the first late packet is one too many.
            charged: FORGIVEN,
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
            // Its time is to be taken.
            State::Trial => self.stamp.is_none(),
            State::Declined(_) | State::Trying => false,
        }
    }

    /// The core has made a burst's copies.
    #[inline(always)]
    pub(super) fn passed(&mut self) {
        if let State::Declined(left) = &mut self.state {
            *left -= 1;
            if *left == 0 {
                self.state = State::Trial;
            }
        }
    }

    /// Whether the time of the burst is to be taken that is just going to an engine.
    #[inline]
    pub(super) fn wants_stamp(&mut self) -> bool {
        self.until_stamp = self.until_stamp.saturating_sub(1);
        let due = self.until_stamp == 0 || self.charged > 0 || self.state == State::Trial;
        due && self.stamp.is_none()
    }

    /// The burst was handed over at `now`; it is published when the oldest packet in the reorder ring is that at `end`.
    pub(super) fn stamp(&mut self, end: u32, now: u64) {
        self.until_stamp = SAMPLE;
        self.stamp = Some(Stamp { end, since: now, counted: false });
        if self.state == State::Trial {
            self.state = State::Trying;
        }
    }

    /// Whether a packet is on its way whose time is taken.
    #[inline(always)]
    pub(super) fn is_waiting(&self) -> bool {
        self.stamp.is_some()
    }

    /// Looks whether the stamped packet is published, `oldest` being the oldest packet in the reorder ring, or has taken
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
            self.charged = FORGIVEN;
        }
    }

    #[cold]
    fn count_late(&mut self) {
        self.late += 1;
        self.in_time = 0;
        match self.state {
            // Handed over before that was decided.
            State::Declined(_) | State::Trial => {}
            State::In if self.charged == 0 => self.charged = FORGIVEN,
            State::In | State::Trying => {
                self.state = State::Declined(self.pause);
                self.declined += 1;
                self.pause = (2 * self.pause).min(PAUSE.1);
            }
        }
    }

    /// Whether the engine is declined, or only tried.
    #[cfg(test)]
    pub(super) fn declines(&self) -> bool {
        self.state != State::In
    }

    /// About the longest time of late in ticks, late packets, and how often the engine was declined.
    pub(super) fn report(&self) -> (u64, u64, u64) {
        (self.longest, self.late, self.declined)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u64 = 1000;

    /// Bursts of a queue whose engine takes a time that the burst decides; one at a time.
    struct Story {
        latency: Latency,
        now: u64,
        position: u32,
        by_engine: Vec<u64>,
    }

    impl Story {
        fn new() -> Self {
            // Positions wrap.
            Self {
                latency: Latency::new(),
                now: u64::MAX - 50,
                position: u32::MAX - 100,
                by_engine: Vec::new(),
            }
        }

        /// Bursts that take `ticks(burst)` by the engine; how many of them the engine got.
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
                // Looked at while it is on its way.
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
    fn an_engine_in_time_is_always_used() {
        let mut story = Story::new();
        assert_eq!(story.bursts(100_000, |burst| burst % MOST), 100_000);
        let (longest, late, declined) = story.latency.report();
        assert_eq!((late, declined), (0, 0));
        assert!((MOST / 2..MOST).contains(&longest), "{longest}");
    }

    #[test]
    fn slow_engine_is_tried_ever_less() {
        let mut story = Story::new();
        const BURSTS: u64 = 2_000_000;
        let used = story.bursts(BURSTS, |_| MOST + 1);
        // 4096, 8192, … 131072 bursts, then 262144 again and again.
        assert!((2..=14).contains(&used), "{used} of {BURSTS}");
        assert_eq!(story.latency.report().2, used);
        let gaps: Vec<u64> = story.by_engine.windows(2).map(|two| two[1] - two[0]).collect();
        assert!(gaps.is_sorted() && gaps[0] > 4000, "{gaps:?}");
        assert!(story.latency.declines());
    }

    #[test]
    fn an_engine_that_becomes_fast_is_found() {
        let mut story = Story::new();
        story.bursts(50_000, |_| 10 * MOST);
        let used = story.bursts(400_000, |_| MOST / 2);
        assert!(used > 300_000, "{used}");
        assert!(!story.latency.declines());
    }

    #[test]
    fn one_late_packet_is_forgiven() {
        let mut story = Story::new();
        story.bursts(1000, |_| 1);
        // It takes a while until a burst is stamped that is late.
        let stalled = |burst| if burst < u64::from(SAMPLE) { 50 * MOST } else { 1 };
        assert_eq!(story.bursts(u64::from(2 * SAMPLE), stalled), u64::from(2 * SAMPLE));
    }

    #[test]
    fn slow_in_use_makes_few_bursts_late() {
        let mut story = Story::new();
        const BURSTS: u64 = 4_000_000;
        // In time when tried alone, late from the fifth burst in a row on: a trial is always a success.
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
        assert!(!latency.declines());
        latency.look(7, MOST, || 101 + MOST);
        assert!(latency.declines() && latency.is_waiting());
        latency.look(8, MOST, || 500 + MOST);
        assert_eq!((latency.report().1, latency.is_waiting()), (1, false));
    }
}
