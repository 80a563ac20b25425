//! Schedules the work for applications: marked sessions and requests. A round spends a limited time on this work,
//! independent of the load. The time is shared equally among users, and among the applications of a user. Excess work
//! waits for the next round without delaying other users.

use std::time::Duration;

use offcore_stats::tsc;

use super::Serve;
use super::application::{Application, Work};
use crate::host::Calls;

/// The time per round for requests of applications, and the length of one slice. A unit of work is not interrupted.
const ROUND: Duration = Duration::from_micros(200);
const SLICE: Duration = Duration::from_micros(25);

/// The time used by users, which determines the next application.
#[derive(Debug)]
pub(super) struct Turns {
    /// [`ROUND`] and [`SLICE`] in ticks of the TSC.
    round: u64,
    slice: u64,
    /// Ticks used, by user.
    users: Vec<(u32, u64)>,
    /// The ticks used by the most recent user. A user that was idle starts from this value.
    least: u64,
    /// Number of slices so far.
    slices: u64,
}

impl Turns {
    pub(super) fn new() -> Self {
        let [round, slice] = [ROUND, SLICE].map(tsc::ticks);
        Self { round, slice, users: Vec::new(), least: 0, slices: 0 }
    }

    /// The ticks that a user has used.
    fn had(&self, user: u32) -> u64 {
        let had = self.users.iter().find(|(other, _)| *other == user).map_or(0, |(_, had)| *had);
        had.max(self.least)
    }

    /// Selects the next application among those with work: the least recently served application of the user with the
    /// least time used. Each is given as index, user, and number of its last slice.
    fn next(&self, waiting: impl Iterator<Item = (usize, u32, u64)>) -> Option<usize> {
        let by_user = waiting.map(|(app, user, last)| (self.had(user), last, app));
        by_user.min().map(|(_, _, app)| app)
    }

    /// Charges a user for a slice and returns the number of the slice.
    fn charge(&mut self, user: u32, ticks: u64) -> u64 {
        self.least = self.had(user);
        self.add(user, ticks);
        self.slices += 1;
        self.slices
    }

    /// Charges a user for time outside of its slices.
    pub(super) fn add(&mut self, user: u32, ticks: u64) {
        let had = self.had(user) + ticks;
        match self.users.iter_mut().find(|(other, _)| *other == user) {
            Some((_, of)) => *of = had,
            None => self.users.push((user, had)),
        }
    }
}

impl Serve {
    /// Charges a user for the time since TSC value `from`.
    pub(super) fn charge_time(&mut self, user: u32, from: u64) {
        let ticks = self.schedule.waking.spent(from, self.schedule.turns.round);
        self.schedule.turns.add(user, ticks);
    }

    /// Works for applications until the time of a round is used up. Returns whether work is left.
    pub(super) fn work_some(&mut self, calls: &mut Calls<'_>) -> bool {
        let began = tsc::now();
        let mut now = began;
        loop {
            let waiting = self.registry.awake.iter().filter_map(|number| {
                let app = self.registry.apps.get(number)?.as_deref().filter(|app| app.has_due_work())?;
                Some((number, app.user, app.slice))
            });
            let Some(app) = self.schedule.turns.next(waiting) else { return false };
            if now - began >= self.schedule.turns.round {
                return true;
            }
            let Some(user) = self.app(app).map(|app| app.user) else { return false };
            let from = now;
            loop {
                // A search without a result is charged as well.
                let worked = self.work(app, calls);
                now = tsc::now();
                if !worked || now - from >= self.schedule.turns.slice {
                    break;
                }
            }
            let ticks = self.schedule.waking.spent(from, self.schedule.turns.round);
            let slice = self.schedule.turns.charge(user, ticks);
            if let Some(application) = self.app(app) {
                application.slice = slice;
            }
        }
    }

    /// Performs one unit of work. Returns `false` if the application has none.
    fn work(&mut self, app: usize, calls: &mut Calls<'_>) -> bool {
        let Some(work) = self.app(app).and_then(Application::next_work) else { return false };
        match work {
            Work::Marked(number) => self.process_session(app, number, calls),
            Work::Rest(number) => self.process_after_exit(app, number, calls),
            Work::Question(key) => self.hear(key, calls),
            Work::Raw(number, generation) => self.relay_next(app, number, generation, calls),
            Work::Listener(number, generation) => self.serve_listener(app, number, generation, calls),
            Work::End(number) => self.continue_ending(app, number, calls),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the applications that get the next `count` slices. Two users compete: the first one has `apps`
    /// applications with unlimited work, the second one has one.
    fn slices(apps: usize, ticks: [u64; 2], count: usize) -> Vec<usize> {
        let mut turns = Turns::new();
        let mut last = vec![0; apps + 1];
        let mut next = || {
            let users = (0..=apps).map(|app| usize::from(app == apps));
            let waiting = last.iter().zip(users.clone()).enumerate();
            let app = turns.next(waiting.map(|(app, (last, user))| (app, user as u32, *last))).unwrap();
            let user = users.clone().nth(app).unwrap();
            last[app] = turns.charge(user as u32, ticks[user]);
            app
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn users_share_time_equally() {
        let had = slices(60, [10, 10], 120);
        assert_eq!(had.iter().filter(|app| **app == 60).count(), 60);
        let mut first: Vec<_> = had.into_iter().filter(|app| *app < 60).collect();
        first.sort_unstable();
        assert!(first.into_iter().eq(0..60), "each application has its turn");
        // A user with long slices gets fewer of them.
        let had = slices(3, [100, 10], 110);
        assert_eq!(had.iter().filter(|app| **app == 3).count(), 100);
    }

    #[test]
    fn events_are_charged() {
        let mut turns = Turns::new();
        let both = || [(0, 1, 0), (1, 2, 1)].into_iter();
        assert_eq!(turns.next(both()), Some(0));
        for _ in 0..3 {
            turns.add(1, 10);
        }
        let mut next = || {
            let app = turns.next(both()).unwrap();
            turns.charge(app as u32 + 1, 10);
            app
        };
        assert_eq!([(); 4].map(|()| next()), [1, 1, 1, 0], "user 2 has the time first that user 1 had");
    }

    #[test]
    fn long_call_is_charged_in_full() {
        let mut turns = Turns::new();
        turns.charge(1, 100 * turns.round);
        let both = || [(0, 1, 1), (1, 2, 0)].into_iter();
        let others = (0..).take_while(|_| {
            let app = turns.next(both()).unwrap();
            turns.charge(app as u32 + 1, turns.round);
            app == 1
        });
        assert!((100..=101).contains(&others.count()));
    }

    #[test]
    fn idle_user_accrues_no_credit() {
        let mut turns = Turns::new();
        for _ in 0..100 {
            turns.charge(1, 10);
        }
        let both = || [(0, 1, 1), (1, 2, 0)].into_iter();
        let mut of_second = 0;
        for _ in 0..20 {
            let app = turns.next(both()).unwrap();
            of_second += app;
            turns.charge(app as u32 + 1, 10);
        }
        assert!((9..=11).contains(&of_second), "{of_second}");
    }
}
