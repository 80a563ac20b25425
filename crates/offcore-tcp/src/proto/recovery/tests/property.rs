//! Arbitrary ACKs cause no panics and keep the counts consistent.

use offcore_stats::random::SplitMix;
use offcore_stats::time::{Micros, Time};
use proptest::prelude::*;

use super::super::*;

/// A call of a sender.
#[derive(Clone, Debug)]
enum Step {
    Plan(u64),
    Publish(u64),
    Lost(u32),
    Again(bool),
    Ack { una: u64, sacks: Vec<(u64, u64)>, dsack: Option<(u64, u64)>, rtt: Option<u64>, flags: u8 },
    Timer(u64),
    Mss(u32),
    Dry,
    Algorithm(Algorithm),
}

fn near() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..40_000_u64, 1 => 0..u64::MAX, 1 => Just(u64::MAX), 1 => (1_u64 << 31) - 9..(1 << 31) + 9]
}

fn step() -> impl Strategy<Value = Step> {
    let block = || (near(), near());
    let ack = (
        near(),
        prop::collection::vec(block(), 0..6),
        prop::option::of(block()),
        prop::option::of(near()),
        any::<u8>(),
    );
    prop_oneof![
        3 => (1..5000_u64).prop_map(Step::Plan),
        1 => near().prop_map(Step::Plan),
        3 => (1..5000_u64).prop_map(Step::Publish),
        3 => (0..9000_u32).prop_map(Step::Lost),
        2 => any::<bool>().prop_map(Step::Again),
        6 => ack.prop_map(|(una, sacks, dsack, rtt, flags)| Step::Ack { una, sacks, dsack, rtt, flags }),
        2 => (0..400_000_u64).prop_map(Step::Timer),
        1 => any::<u32>().prop_map(Step::Mss),
        1 => Just(Step::Dry),
        1 => prop_oneof![
            Just(Algorithm::Cubic), Just(Algorithm::NewReno), Just(Algorithm::Bbr)
        ].prop_map(Step::Algorithm),
    ]
}

/// A sender, and the ranges that it has planned.
struct Driver {
    sender: Recovery,
    now: Time,
    given: Vec<Range<u64>>,
    acked: u64,
    /// SACKed data counted as dropped by the receiver, so its earlier plans may be repeated.
    reneged: bool,
}

impl Driver {
    fn step(&mut self, step: Step) {
        let (una, published) = (self.sender.una(), self.sender.published_to());
        match step {
            Step::Plan(len) => self.sender.plan_new(self.now, len),
            Step::Publish(len) => {
                let end = self.sender.planned_to().min(published + len);
                self.sender.published(self.now, published..end, false);
            }
            Step::Lost(at_most) => {
                if let Some(range) = self.sender.next_lost(at_most) {
                    assert!(una <= range.start && range.start < range.end && range.end <= published);
                    assert!(range.end - range.start <= u64::from(at_most));
                    let apart = |other: &Range<u64>| other.end <= range.start || range.end <= other.start;
                    assert!(self.reneged || self.given.iter().all(apart));
                    self.given.push(range);
                }
            }
            Step::Again(kept) => {
                if let Some(range) = self.given.pop() {
                    match kept {
                        true => self.sender.published(self.now, range, true),
                        false => self.sender.unplanned(range),
                    }
                }
            }
            Step::Ack { una: to, sacks, dsack, rtt, flags } => {
                // Half of the positions are relative to the data in flight.
                let place = |at: u64| if flags & 1 == 0 { at } else { una.saturating_add(at % 20_000) };
                let sacks: Vec<_> = sacks.into_iter().map(|(from, to)| (place(from), place(to))).collect();
                let to = if flags & 2 == 0 { una } else { place(to) };
                let ack = Ack {
                    una: to,
                    sacks: &sacks,
                    dsack,
                    rtt_sample: rtt.map(Micros::new),
                    ece: flags & 0x0c == 0,
                    window_changed: flags & 0x30 == 0,
                    has_data: flags & 0xc0 == 0,
                };
                let acked = self.sender.ack(self.now, &ack);
                let valid = if to <= published { to.max(una) } else { una };
                assert_eq!((self.sender.una(), acked.newly_acked), (valid, valid - una));
                self.acked += acked.newly_acked;
            }
            Step::Timer(time) => {
                self.now += Micros::new(time);
                let head = self.sender.runs.head().is_some_and(runs::Run::sacked);
                let action = self.sender.timer(self.now);
                self.reneged |= head && action == TimerAction::Retransmit;
                if action == TimerAction::Probe
                    && let Some(range) = self.sender.next_probe()
                {
                    assert!(range.start >= una && range.end == published);
                    self.given.push(range);
                }
            }
            Step::Mss(mss) => self.sender.set_mss(mss),
            Step::Dry => self.sender.lacks_data(),
            Step::Algorithm(algorithm) => self.sender.set_algorithm(algorithm),
        }
        let una = self.sender.una();
        self.given.retain(|range| range.end > una);
        self.check();
    }

    fn check(&self) {
        let sender = &self.sender;
        let (una, published, planned) = (sender.una(), sender.published_to(), sender.planned_to());
        assert!(una <= published && published <= planned && planned - una < 1 << 31);
        assert_eq!(una, self.acked);
        assert!(sender.pipe() <= planned - una);
        let runs = &sender.runs;
        let counted = u64::from(runs.sacked) + u64::from(runs.lost) + u64::from(runs.replanned);
        assert!(counted <= published - una, "{sender:?}");
        let given: u64 = self.given.iter().map(|range| range.end - range.start.max(una)).sum();
        assert!(u64::from(runs.replanned) <= given, "{sender:?} {:?}", self.given);
        assert!(runs.len() <= runs::MOST);
        assert!(sender.cwnd() >= 28 && sender.window(self.now) <= 1 << 31);
        assert!(published == una || sender.deadline().is_some() || runs.head_planned(), "{sender:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 500, ..ProptestConfig::default() })]
    #[test]
    fn arbitrary_acks_keep_counts_consistent(
        steps in prop::collection::vec(step(), 1..300),
        algorithm in 0..3_usize, sack in any::<bool>(), timestamps in any::<bool>(), mss in 0..3000_u32,
        rate in near(),
    ) {
        let algorithm = [Algorithm::Cubic, Algorithm::NewReno, Algorithm::Bbr][algorithm];
        let mut sender = Recovery::new(mss, algorithm, sack, timestamps);
        sender.set_max_pacing_rate(rate);
        let mut driver = Driver { sender, now: Time::from_micros(1), given: Vec::new(), acked: 0, reneged: false };
        for step in steps {
            driver.step(step);
        }
    }
}

#[test]
fn clock_jumps_do_not_panic() {
    let mut random = SplitMix::new(3);
    let mut sender = Recovery::new(1000, Algorithm::Cubic, true, true);
    for step in 0..40_000 {
        if step == 20_000 {
            sender.set_algorithm(Algorithm::Bbr);
        }
        // A clock that jumps is the caller's mistake and must not cause a panic.
        let now = Time::from_micros(random.next() >> (random.below(63) + 1));
        sender.lacks_data();
        sender.plan_new(now, random.below(3000));
        let (from, to) = (sender.published_to(), sender.planned_to());
        sender.published(now, from..to, false);
        sender.timer(now);
        while let Some(range) = sender.next_lost(3000) {
            sender.published(now, range, true);
        }
        let una = sender.una() + random.below(sender.published_to() - sender.una() + 1);
        let sacks = [(una + 1000, una + 2000)];
        sender.ack(
            now,
            &Ack { una, sacks: &sacks, rtt_sample: Some(Micros::new(random.next())), ..Ack::default() },
        );
    }
}
