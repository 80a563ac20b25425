//! Schedules the work for applications: marked sessions and requests. A round spends a limited time on this work,
//! independent of the load. The time is shared equally among users, and among the applications of a user. Excess work
//! waits for the next round without delaying other users.

use std::collections::VecDeque;
use std::time::Duration;

use offcore_stats::tsc;

use super::Serve;
use super::application::Application;
use super::pending_work::Work;
use crate::host::Calls;

/// The time per round for requests of applications, and the length of one slice. A unit of work is not interrupted.
const ROUND: Duration = Duration::from_micros(200);
const SLICE: Duration = Duration::from_micros(25);

/// A user that has worked within this time competes with the others.
const RECENT: Duration = Duration::from_millis(10);

/// The time that a user has used, and its applications with work.
#[derive(Debug)]
struct Account {
    user: u32,
    /// Ticks used.
    used: u64,
    /// Ticks used since the last call of [`Turns::begin_slices`].
    slice: u64,
    /// TSC value at the end of the last work.
    active: u64,
    /// The indices of applications with work, the least recently served one first.
    ready: VecDeque<usize>,
}

/// The time used by users, which determines the next application.
#[derive(Debug)]
pub(super) struct Turns {
    /// [`ROUND`], [`SLICE`] and [`RECENT`] in ticks of the TSC.
    round: u64,
    slice: u64,
    recent: u64,
    users: Vec<Account>,
    /// The ticks used by the most recent user. A user that was idle starts from this value.
    least: u64,
}

impl Turns {
    pub(super) fn new() -> Self {
        let [round, slice, recent] = [ROUND, SLICE, RECENT].map(tsc::ticks);
        Self { round, slice, recent, users: Vec::new(), least: 0 }
    }

    fn account(&mut self, user: u32) -> &mut Account {
        let found = self.users.iter().position(|account| account.user == user);
        let at = found.unwrap_or_else(|| {
            self.users.push(Account { user, used: 0, slice: 0, active: 0, ready: VecDeque::new() });
            self.users.len() - 1
        });
        &mut self.users[at]
    }

    /// Adds an application with work.
    fn add_ready(&mut self, user: u32, app: usize) {
        self.account(user).ready.push_back(app);
    }

    /// Whether an application has work.
    fn is_ready(&self) -> bool {
        self.users.iter().any(|account| !account.ready.is_empty())
    }

    /// Takes the least recently served application with work of the user that has used the least time. Returns it with
    /// its user.
    fn next(&mut self) -> Option<(u32, usize)> {
        let least = self.least;
        let waiting = self.users.iter_mut().filter(|account| !account.ready.is_empty());
        let account = waiting.min_by_key(|account| account.used.max(least))?;
        account.ready.pop_front().map(|app| (account.user, app))
    }

    /// Charges a user for a slice that ended at TSC value `now`.
    fn charge(&mut self, user: u32, ticks: u64, now: u64) {
        let used = self.account(user).used;
        self.least = self.least.max(used);
        self.add(user, ticks, now);
    }

    /// Charges a user for time outside of its slices, which ended at TSC value `now`.
    pub(super) fn add(&mut self, user: u32, ticks: u64, now: u64) {
        self.pay(user, ticks);
        self.account(user).active = now;
    }

    /// Charges a user for time in which no work was done for it.
    pub(super) fn pay(&mut self, user: u32, ticks: u64) {
        let least = self.least;
        let account = self.account(user);
        account.used = account.used.max(least) + ticks;
        account.slice += ticks;
    }

    /// Begins a loop over the work of several users, see [`has_slice`](Self::has_slice).
    pub(super) fn begin_slices(&mut self) {
        self.users.iter_mut().for_each(|account| account.slice = 0);
    }

    /// Whether a user may do more work in this loop: it has used less than its [`limit`](Self::limit). The first unit
    /// of work is always allowed.
    pub(super) fn has_slice(&mut self, user: u32) -> bool {
        let used = self.account(user).slice;
        used == 0 || used < self.limit(user)
    }

    /// Returns the time in ticks that a round may spend on events of a user: a slice if other users have worked
    /// recently. Otherwise these events would take the time of the other users.
    pub(super) fn limit(&self, user: u32) -> u64 {
        if self.competes(user) { self.slice } else { self.round }
    }

    /// Whether users other than `user` have worked recently.
    pub(super) fn competes(&self, user: u32) -> bool {
        self.recent_users().any(|other| other != user)
    }

    /// Returns the time in ticks that a round may spend on events whose user is not known yet.
    pub(super) fn common_limit(&self) -> u64 {
        if self.recent_users().nth(1).is_some() { self.slice } else { self.round }
    }

    fn recent_users(&self) -> impl Iterator<Item = u32> {
        let since = tsc::now().saturating_sub(self.recent);
        self.users.iter().filter(move |account| account.active > since).map(|account| account.user)
    }
}

impl Serve {
    /// Charges a user for the time since TSC value `from`.
    pub(super) fn charge_time(&mut self, user: u32, from: u64) {
        let ticks = self.schedule.waking.spent(from, self.schedule.turns.round);
        self.schedule.turns.add(user, ticks, tsc::now());
    }

    /// Works for applications until the time of a round is used up. Returns whether work is left.
    pub(super) fn work_some(&mut self, calls: &mut Calls<'_>) -> bool {
        let began = tsc::now();
        let mut now = began;
        loop {
            if !self.schedule.turns.is_ready() && !self.queue_ready() {
                return false;
            }
            if now - began >= self.schedule.turns.round {
                return true;
            }
            let Some((user, app)) = self.schedule.turns.next() else { return false };
            // The application may have ended, and another one may have its index.
            let application = self.app(app).filter(|application| application.user() == user);
            if !application.is_some_and(|application| application.pending_mut().dequeue()) {
                continue;
            }
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
            self.schedule.turns.charge(user, ticks, now);
            if self.app(app).is_some_and(|application| application.pending_mut().enqueue_if_due()) {
                self.schedule.turns.add_ready(user, app);
            }
        }
    }

    /// Queues the applications that have work and are not queued yet. Returns whether there are any.
    fn queue_ready(&mut self) -> bool {
        let turns = &mut self.schedule.turns;
        for number in self.registry.awake.iter() {
            let application = self.registry.apps.get_mut(number).and_then(Option::as_deref_mut);
            if let Some(application) = application
                && application.pending_mut().enqueue_if_due()
            {
                turns.add_ready(application.user(), number);
            }
        }
        turns.is_ready()
    }

    /// Performs one unit of work. Returns `false` if the application has none.
    fn work(&mut self, app: usize, calls: &mut Calls<'_>) -> bool {
        let Some(work) = self.app(app).and_then(Application::next_work) else { return false };
        match work {
            Work::Marked(number) => self.process_session(app, number, calls),
            Work::Scanned(number) => self.process_after_exit(app, number, calls),
            Work::Message(key) => self.hear(key, calls),
            Work::PairData(number, generation) => self.relay_next(app, number, generation, calls),
            Work::Listener(number, generation) => self.serve_listener(app, number, generation, calls),
            Work::End(number) => self.continue_ending(app, number, calls),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Turns {
        /// Returns the ticks that a user has used.
        pub(in crate::host::serve) fn used_ticks(&mut self, user: u32) -> u64 {
            self.account(user).used
        }

        /// Keeps users active until the end of a test, and sets the length of slices to 0, so that a slice is one unit
        /// of work.
        pub(in crate::host::serve) fn end_slices_at_once(&mut self, users: [u32; 2]) {
            self.slice = 0;
            users.iter().for_each(|user| self.add(*user, 1, u64::MAX));
        }
    }

    /// Returns the applications that get the next `count` slices. Two users compete: the first one has `apps`
    /// applications with unlimited work, the second one has one.
    fn slices(apps: usize, ticks: [u64; 2], count: usize) -> Vec<usize> {
        let mut turns = Turns::new();
        for app in 0..=apps {
            turns.add_ready(u32::from(app == apps), app);
        }
        let mut next = || {
            let (user, app) = turns.next().unwrap();
            turns.charge(user, ticks[user as usize], 0);
            turns.add_ready(user, app);
            app
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn users_share_time_equally() {
        let served = slices(60, [10, 10], 120);
        assert_eq!(served.iter().filter(|app| **app == 60).count(), 60);
        let mut first: Vec<_> = served.into_iter().filter(|app| *app < 60).collect();
        first.sort_unstable();
        assert!(first.into_iter().eq(0..60), "each application has its turn");
        // A user with long slices gets fewer of them.
        let served = slices(3, [100, 10], 110);
        assert_eq!(served.iter().filter(|app| **app == 3).count(), 100);
    }

    /// Serves the next user, 1 or 2, for `ticks`.
    fn serve(turns: &mut Turns, ticks: u64) -> u32 {
        for user in [1, 2] {
            if turns.account(user).ready.is_empty() {
                turns.add_ready(user, 0);
            }
        }
        let (user, _) = turns.next().unwrap();
        turns.charge(user, ticks, 0);
        user
    }

    #[test]
    fn events_are_charged() {
        let mut turns = Turns::new();
        for _ in 0..3 {
            turns.add(1, 10, 0);
        }
        let users: Vec<_> = (0..4).map(|_| serve(&mut turns, 10)).collect();
        assert_eq!(users, [2, 2, 2, 1], "user 2 has the time first that user 1 had");
    }

    #[test]
    fn long_call_is_charged_in_full() {
        let mut turns = Turns::new();
        let round = turns.round;
        turns.charge(1, 100 * round, 0);
        let others = (0..).take_while(|_| serve(&mut turns, round) == 2);
        assert!((100..=101).contains(&others.count()));
    }

    #[test]
    fn idle_user_accrues_no_credit() {
        let mut turns = Turns::new();
        for _ in 0..100 {
            turns.charge(1, 10, 0);
        }
        let of_second = (0..20).filter(|_| serve(&mut turns, 10) == 2).count();
        assert!((9..=11).contains(&of_second), "{of_second}");
    }

    #[test]
    fn events_beside_other_users_get_a_slice() {
        let mut turns = Turns::new();
        turns.add(1, 10, tsc::now());
        turns.add(2, 10, tsc::now() - 2 * turns.recent);
        assert_eq!(
            (turns.limit(1), turns.limit(2), turns.common_limit()),
            (turns.round, turns.slice, turns.round)
        );
        turns.add(2, 10, tsc::now());
        assert_eq!(
            (turns.limit(1), turns.limit(2), turns.common_limit()),
            (turns.slice, turns.slice, turns.slice)
        );
    }
}
