//! Tests of the choice with scripted times.

use super::*;

/// The time of each routine for an amount of data.
#[derive(Clone, Copy)]
struct Times {
    plain: f64,
    ahead: f64,
    non_temporal: f64,
    direct: f64,
}

const HOT: Times = Times { plain: 3.0, ahead: 3.4, non_temporal: 6.5, direct: 6.5 };
/// The guest is on a distant core.
const REMOTE: Times = Times { plain: 44.0, ahead: 28.0, non_temporal: 11.0, direct: 10.9 };
/// The guest is nearby: bypassing the caches saves a third of the time, which the guest then needs in addition.
const NEAR: Times = Times { plain: 12.0, ahead: 8.5, non_temporal: 5.9, direct: 5.5 };

impl Times {
    fn of(self, kind: RoutineKind) -> f64 {
        match kind {
            RoutineKind::Plain => self.plain,
            RoutineKind::Ahead => self.ahead,
            RoutineKind::NonTemporal => self.non_temporal,
            RoutineKind::Direct => self.direct,
        }
    }
}

/// A queue with scripted times of its bursts. It counts the bursts that each routine copied.
struct Queue {
    choice: RoutineChoice,
    until_timed: u32,
    copied: [u32; 4],
}

impl Queue {
    fn new(size: Size, has_direct: bool) -> Self {
        let past = if has_direct { Past::Direct } else { Past::NonTemporal };
        Self::past(size, past)
    }

    fn past(size: Size, past: Past) -> Self {
        Self { choice: RoutineChoice::new(size, past), until_timed: 1, copied: [0; 4] }
    }

    /// Copies bursts; `noise` returns a factor for each.
    fn bursts_with(&mut self, n: u32, times: Times, mut noise: impl FnMut(u32) -> f64) -> RoutineKind {
        for i in 0..n {
            self.until_timed -= 1;
            let kind = if self.until_timed == 0 { self.choice.timed() } else { self.choice.present() };
            self.copied[kind as usize] += 1;
            if self.until_timed == 0 {
                self.until_timed = self.choice.record(times.of(kind) * noise(i));
                assert!((1..=RoutineChoice::TIMED).contains(&self.until_timed));
            }
        }
        self.choice.present()
    }

    fn bursts(&mut self, n: u32, times: Times) -> RoutineKind {
        self.bursts_with(n, times, |_| 1.0)
    }
}

/// Returns noise from a fixed generator: up to 20 % more, and sometimes ten times as much.
fn noise() -> impl FnMut(u32) -> f64 {
    let mut random = offcore_stats::SplitMix::new(7);
    move |_| {
        let draw = random.fraction();
        if draw > 0.98 { 10.0 } else { 1.0 + draw / 5.0 }
    }
}

#[test]
fn routine_choice_settles_per_temperature() {
    for (size, has_direct, times, expected) in [
        (Size::Large, false, HOT, RoutineKind::Plain),
        (Size::Small, true, HOT, RoutineKind::Plain),
        (Size::Large, false, REMOTE, RoutineKind::NonTemporal),
        (Size::Small, true, REMOTE, RoutineKind::Ahead),
        (Size::Large, true, NEAR, RoutineKind::Ahead),
        (Size::Small, false, NEAR, RoutineKind::Ahead),
    ] {
        let mut queue = Queue::new(size, has_direct);
        assert_eq!(queue.bursts(64, times), expected, "{size:?} {expected:?}");
        for _ in 0..10_000 {
            assert_eq!(queue.bursts(1, times), expected, "{size:?} {expected:?}");
        }
    }
}

#[test]
fn first_of_equals_is_kept() {
    // Direct stores are 1 % faster here, which is not worth a change.
    let mut queue = Queue::new(Size::Large, true);
    assert_eq!(queue.bursts(10_000, REMOTE), RoutineKind::NonTemporal);
    let faster = Times { direct: 0.7 * REMOTE.direct, ..REMOTE };
    assert_eq!(queue.bursts(10_000, faster), RoutineKind::Direct);
}

#[test]
fn missing_instruction_is_not_chosen() {
    let times = Times { direct: 0.1, ..REMOTE };
    let mut queue = Queue::new(Size::Large, false);
    queue.bursts(10_000, times);
    assert_eq!(queue.copied[RoutineKind::Direct as usize], 0);
    let mut queue = Queue::new(Size::Large, true);
    assert_eq!(queue.bursts(10_000, times), RoutineKind::Direct);
}

#[test]
fn cached_queue_uses_no_streaming_stores() {
    let mut queue = Queue::past(Size::Large, Past::None);
    for (times, expected) in
        [(REMOTE, RoutineKind::Ahead), (HOT, RoutineKind::Plain), (REMOTE, RoutineKind::Ahead)]
    {
        assert_eq!(queue.bursts(10_000, times), expected);
    }
    assert_eq!(
        (queue.copied[RoutineKind::NonTemporal as usize], queue.copied[RoutineKind::Direct as usize]),
        (0, 0)
    );
}

#[test]
fn hot_data_is_never_stored_past_the_caches() {
    let mut queue = Queue::new(Size::Large, true);
    queue.bursts(64, HOT);
    queue.copied = [0; 4];
    queue.bursts_with(100_000, HOT, noise());
    let past = queue.copied[RoutineKind::NonTemporal as usize] + queue.copied[RoutineKind::Direct as usize];
    assert!(past < 100, "{past} of 100,000 bursts were stored past the caches");
}

#[test]
fn trials_are_rare_while_nothing_changes() {
    for times in [HOT, REMOTE, NEAR] {
        let mut queue = Queue::new(Size::Large, false);
        let settled = queue.bursts(1000, times);
        queue.copied = [0; 4];
        queue.bursts(256 * 100, times);
        let others = 256 * 100 - queue.copied[settled as usize];
        assert!((90..=101).contains(&others), "{others} of 25,600 bursts were trials");
    }
}

#[test]
fn temperature_change_is_followed() {
    const WITHIN: u32 = 10_000 / 32;
    let mut queue = Queue::new(Size::Large, false);
    for _ in 0..20 {
        for (times, expected) in [
            (HOT, RoutineKind::Plain),
            (REMOTE, RoutineKind::NonTemporal),
            (HOT, RoutineKind::Plain),
            (NEAR, RoutineKind::Ahead),
        ] {
            assert_eq!(queue.bursts(WITHIN, times), expected);
            // Continue into the pause between two trials.
            queue.bursts(777, times);
        }
    }
}

#[test]
fn outliers_do_not_change_the_choice() {
    for times in [HOT, REMOTE] {
        let mut queue = Queue::new(Size::Large, false);
        let settled = queue.bursts(1000, times);
        queue.copied = [0; 4];
        queue.bursts_with(100_000, times, noise());
        let part = f64::from(queue.copied[settled as usize]) / 1e5;
        assert!(part > 0.97, "{settled:?} made {part} of the bursts");
    }
}

#[test]
fn abandoned_trial_is_repeated() {
    let mut choice = RoutineChoice::new(Size::Large, Past::NonTemporal);
    assert_eq!(choice.record(28.0), 1);
    assert_eq!(choice.timed(), RoutineKind::Plain);
    choice.abandon();
    assert_eq!(choice.timed(), RoutineKind::Ahead);
    assert_eq!(choice.record(28.0), 1);
    assert_eq!(choice.timed(), RoutineKind::Plain);
}
