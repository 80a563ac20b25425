//! Accounting of the cost of waking applications. Sending a byte to an end of a session makes the kernel walk through
//! all waiters on that end. An application may add its end to many thousand epoll sets, and the worker would spend its
//! time on that walk.
//!
//! A turn makes only a few long wake-ups per user. A user is charged for slow wake-ups by CPU time, which excludes the
//! time when other threads had the core. After at least three slow wake-ups, an application that raises its user's debt
//! above a limit is ended. The debt shrinks by a fixed part of the elapsed time. Until it is zero, the user cannot
//! begin new sessions, connections to its listeners wait, and each of its applications is ended at the next slow
//! wake-up.

use std::collections::HashMap;
use std::time::Duration;

use arrayvec::ArrayVec;
use offcore_stats::tsc;
use rustix::time::{ClockId, clock_gettime};

use super::Serve;
use super::stack_end::{ClosingDescriptor, slow_wakeup_ticks};

/// Number of users with long wake-ups that are distinguished in a turn. When there are this many, the announcements of
/// all users wait.
const USERS: usize = 8;
/// Number of announcements in a turn for a user beside other users.
const ANNOUNCED: u64 = 16;
/// The minimum CPU time of a wake-up that is charged: some thousand epoll sets wait, or a thousand threads.
const SLOW: Duration = Duration::from_millis(2);
/// The maximum debt of a user, the minimum number of slow wake-ups before the user is barred, and the part of the
/// elapsed time (1/100) that is deducted from a debt.
const OWED: Duration = Duration::from_millis(50);
const TIMES: u32 = 3;
const PART: u64 = 100;

/// The debts of users for slow wake-ups.
#[derive(Debug)]
pub(super) struct Waking {
    /// TSC ticks per second, in [`SLOW`], and in [`OWED`].
    hz: u64,
    slow: u64,
    owed: u64,
    /// The CPU time of this thread and the TSC at the last measurement, both in ticks.
    before: (u64, u64),
    users: HashMap<u32, Account>,
}

/// A user's debt in ticks, the time of its last update, the number of slow wake-ups, and whether the user is barred.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    owes: u64,
    since: u64,
    times: u32,
    barred: bool,
}

impl Account {
    fn at(self, now: u64) -> Self {
        let owes = self.owes.saturating_sub(now.saturating_sub(self.since) / PART);
        if owes == 0 { Self { since: now, ..Self::default() } } else { Self { owes, since: now, ..self } }
    }
}

impl Waking {
    pub(super) fn new() -> Self {
        let [slow, owed] = [SLOW, OWED].map(tsc::ticks);
        Self { hz: tsc::hz(), slow, owed, before: (0, 0), users: HashMap::new() }
    }

    /// Begins a measurement.
    pub(super) fn begin(&mut self) {
        self.before = (self.processor(), tsc::now());
    }

    /// Returns the CPU time of this thread, in ticks.
    fn processor(&self) -> u64 {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        let nanoseconds =
            u128::from(time.tv_sec.unsigned_abs()) * 1_000_000_000 + u128::from(time.tv_nsec.unsigned_abs());
        (nanoseconds * u128::from(self.hz) / 1_000_000_000) as u64
    }

    /// Returns the minimum CPU time within the last `ticks`, which an operation has just taken. It excludes time when
    /// other threads had the CPU.
    fn taken(&mut self, ticks: u64) -> u64 {
        let (processor, since) = self.before;
        self.begin();
        let all = self.before.1.wrapping_sub(since);
        self.before.0.saturating_sub(processor).saturating_sub(all.saturating_sub(ticks)).min(ticks)
    }

    /// Returns the time since TSC value `from` in ticks. Beyond `limit`, the time when other threads had the CPU is
    /// excluded, and the time before a wake-up that was measured meanwhile.
    pub(super) fn spent(&mut self, from: u64, limit: u64) -> u64 {
        let ticks = tsc::now().saturating_sub(from);
        if ticks > limit { self.taken(ticks).max(limit) } else { ticks }
    }

    /// Charges a user for a slow wake-up of `ticks`, at TSC value `now`. Returns whether the user is barred.
    fn charge(&mut self, user: u32, ticks: u64, now: u64) -> bool {
        let account = self.users.entry(user).or_default();
        *account = account.at(now);
        account.owes += ticks;
        account.times += 1;
        account.barred |= account.times >= TIMES && account.owes > self.owed;
        account.barred
    }

    fn is_barred_at(&self, user: u32, now: u64) -> bool {
        self.users.get(&user).is_some_and(|account| account.at(now).barred)
    }

    /// Whether a user may not begin new sessions: its debt exceeded the limit and is not paid off.
    pub(super) fn is_barred(&self, user: u32) -> bool {
        !self.users.is_empty() && self.is_barred_at(user, tsc::now())
    }
}

impl Serve {
    /// Makes the announcements of a turn. After a long wake-up, the remaining announcements of that user wait for the
    /// next turn. While other users have work, a user gets [`ANNOUNCED`] announcements per turn.
    pub(super) fn announce(&mut self) {
        if self.index.announced.is_empty() {
            return;
        }
        let mut announced = std::mem::take(&mut self.index.announced);
        let mut long: ArrayVec<(u32, usize, u64), USERS> = ArrayVec::new();
        let mut counts: ArrayVec<(u32, u64), USERS> = ArrayVec::new();
        let from = tsc::now();
        announced.retain(|&(app, number)| {
            let Some(application) = self.registry.app(app) else { return false };
            let user = application.user();
            if !long.is_empty() && (long.is_full() || long.iter().any(|(other, ..)| *other == user)) {
                return true;
            }
            let found = counts.iter().position(|(other, _)| *other == user);
            let Some(at) = found.or_else(|| counts.try_push((user, 0)).ok().map(|()| counts.len() - 1))
            else {
                return true;
            };
            if counts[at].1 >= ANNOUNCED && self.schedule.turns.competes(user) {
                return true;
            }
            counts[at].1 += 1;
            let Some((session, slot)) = application.both(number) else { return false };
            let ticks = session.announce_now(slot, &mut self.tally.counts);
            // The woken thread may have run on this core in between.
            let taken = if ticks > 0 { self.schedule.waking.taken(ticks) } else { 0 };
            if taken >= slow_wakeup_ticks() {
                long.push((user, app, taken));
            }
            false
        });
        self.schedule.behind |= !announced.is_empty();
        self.index.announced = announced;
        let (now, all) = (tsc::now(), counts.iter().map(|(_, count)| count).sum::<u64>());
        for (user, count) in counts {
            self.schedule.turns.add(user, (now - from) * count / all.max(1), now);
        }
        for (_, app, taken) in long {
            self.took(app, taken);
        }
    }

    /// Charges the slow wake-ups of a session.
    #[inline]
    pub(super) fn settle(&mut self, app: usize, number: u32) {
        let session = self.app(app).and_then(|app| app.session_mut(number));
        match session.map_or(0, |session| session.take_slow_ticks()) {
            0 => {}
            ticks => self.woke(app, ticks),
        }
    }

    /// Charges an application for a wake-up of `ticks`, if it was slow.
    #[inline]
    pub(super) fn woke(&mut self, app: usize, ticks: u64) {
        if ticks >= self.schedule.waking.slow {
            let taken = self.schedule.waking.taken(ticks);
            self.took(app, taken);
        }
    }

    /// Charges a user for wake-ups of a process that is attaching, since TSC value `from`.
    pub(super) fn woke_guest(&mut self, user: u32, from: u64) {
        let waking = &mut self.schedule.waking;
        let ticks = tsc::now().saturating_sub(from);
        let taken = if ticks >= waking.slow { waking.taken(ticks) } else { 0 };
        if taken >= waking.slow {
            waking.charge(user, taken, tsc::now());
        }
    }

    /// Charges an application for `taken` ticks of CPU time, and ends it when its user is barred.
    #[cold]
    fn took(&mut self, app: usize, taken: u64) {
        let Some(application) = self.registry.app(app) else { return };
        let user = application.user();
        if taken < self.schedule.waking.slow || !self.schedule.waking.charge(user, taken, tsc::now()) {
            return;
        }
        tracing::warn!(
            application = app,
            user,
            "an application was detached: waking it up takes {:.0} ms, since one of its sessions has thousands of waiters",
            tsc::to_ns(taken) / 1e6
        );
        // The ends are closed in a thread of the user, so that no worker waits for it.
        let ends = application.sessions_mut().take_descriptors();
        self.helpers.errands.run(user, move || ends.iter().for_each(ClosingDescriptor::hang_up));
        application.start_ending();
        self.wake_application(app);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_wakeups_bar_user_temporarily() {
        let mut waking = Waking::new();
        let milliseconds = |count| count * waking.hz / 1000;
        let [slow, second] = [20, 1000].map(milliseconds);
        // Occasional delays by the machine are forgiven.
        for times in 0..20 {
            assert!(!waking.charge(1, slow, times * 3 * second));
        }
        assert!(!waking.charge(2, second, 0) && !waking.charge(2, second, 0), "twice only");
        assert!(waking.charge(2, slow, 0));
        assert!(!waking.charge(3, slow, 0), "another user");
        assert!(waking.is_barred_at(2, 100 * second) && !waking.is_barred_at(2, 250 * second));
    }

    #[test]
    fn preempted_time_is_not_charged() {
        let mut waking = Waking::new();
        waking.begin();
        let from = tsc::now();
        std::thread::sleep(Duration::from_millis(20));
        assert!(waking.taken(tsc::now() - from) < waking.slow);
        let (mut taken, mut tried) = (0, 0);
        while taken < waking.slow && tried < 100 {
            let from = tsc::now();
            while tsc::now() - from < 5 * waking.slow {}
            taken = waking.taken(tsc::now() - from);
            tried += 1;
        }
        assert!(taken >= waking.slow);
    }
}
