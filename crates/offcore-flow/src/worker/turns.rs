//! Turns of a worker's tasks: a task that takes longer than the others has fewer of them, so that each that has packets gets as much of
//! the core as any other, whatever its packets or its guest's memory cost.
//!
//! As long as rounds are short nothing is measured but rounds. One long round, and for ten seconds each task's time is: a task waits
//! while it has used more than the one with packets that has used least. A task that has had none for 5 us is not waited for, and saves
//! nothing up; a guest that has got packets needs about as long to send the next ones.
//!
//! A turn counts as a millisecond at most, since the kernel may have given the core to somebody else meanwhile. If the worker has slept
//! in it, the task's memory made it: a page that was swapped out, is not there yet, or is in a hole that is being punched. Then the
//! task rests for as long, so that others have half of the time, whether they have packets at once or not.

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use offcore_stats::page::Block;
use offcore_stats::tsc;

/// A round that is longer has tasks' times measured. One of two tasks of 32 short packets takes 2 to 5 us, of 1518 bytes 10 to 20 us.
/// While rounds are shorter, whatever some cost, each task has a turn in every 10 us.
const LONG: Duration = Duration::from_micros(10);
/// For how long.
const MEASURED: Duration = Duration::from_secs(10);
/// What a task may be ahead of others.
const AHEAD: Duration = Duration::from_micros(5);
/// For how long after its last packets a task may have more.
const LINGER: Duration = Duration::from_micros(5);
/// What a turn in which the worker has not slept counts at most.
const TURN: Duration = Duration::from_millis(1);

/// Counters of one worker's turns on the statistics page: turns that tasks have waited, the longest turn in TSC ticks, how often the
/// worker has slept in one, and for how many ticks.
pub const TURN_COUNTERS: [&str; 4] = ["waited", "longest_ticks", "stalls", "stalled_ticks"];

/// The turns of one worker.
#[derive(Debug)]
pub struct Turns {
    stats: Block,
    /// What each task has used, in ticks; the part that all have in common does not matter.
    used: Vec<u64>,
    /// TSC since when each has been found to have no packets; `None` when it had some in its last turn.
    empty: Vec<Option<u64>>,
    /// Whether it has been so for long.
    idle: Vec<bool>,
    /// TSC until when each rests, or 0.
    rests: Vec<u64>,
    /// The least that a task with packets has used.
    least: u64,
    /// TSC when the last round began, or 0.
    began: u64,
    /// TSC until when turns are measured; `None` while rounds are short.
    until: Option<u64>,
    /// How often the thread had slept when it was last looked at.
    sleeps: i64,
    long: u64,
    measured: u64,
    ahead: u64,
    linger: u64,
    turn: u64,
}

impl Turns {
    /// Those of a worker that counts in `stats`, a block made with [`TURN_COUNTERS`].
    ///
    /// # Panics
    /// When the block has another number of counters.
    pub fn new(stats: Block) -> Self {
        assert_eq!(stats.len(), TURN_COUNTERS.len(), "a block of turns is made with TURN_COUNTERS");
        let [long, measured, ahead, linger, turn] = [LONG, MEASURED, AHEAD, LINGER, TURN].map(tsc::ticks);
        Self {
            stats,
            used: Vec::new(),
            empty: Vec::new(),
            idle: Vec::new(),
            rests: Vec::new(),
            least: 0,
            began: 0,
            until: None,
            sleeps: 0,
            long,
            measured,
            ahead,
            linger,
            turn,
        }
    }

    /// A round begins; whether turns are measured.
    #[inline(always)]
    pub(super) fn begin(&mut self) -> bool {
        let now = tsc::now();
        let last = std::mem::replace(&mut self.began, now);
        if now.wrapping_sub(last) > self.long {
            self.measure(last, now);
        }
        self.until.is_some()
    }

    /// The last round was long, unless there was none.
    #[cold]
    fn measure(&mut self, last: u64, now: u64) {
        if last == 0 {
            return;
        }
        if self.until.is_none() {
            self.sleeps = sleeps();
            self.forget();
        }
        self.until = Some(now.wrapping_add(self.measured));
    }

    /// The worker has slept by itself, for want of something to do.
    pub(super) fn slept(&mut self) {
        self.began = tsc::now();
        if self.until.is_some() {
            self.sleeps = sleeps();
        }
    }

    /// Gives each of `tasks` its turn, unless it has to wait; the packets of all.
    #[cold]
    pub(super) fn round<T>(&mut self, tasks: &mut [T], mut turn: impl FnMut(&mut T) -> usize) -> usize {
        self.set_tasks(tasks.len());
        let (mut began, mut packets) = (self.began, 0);
        for (index, task) in tasks.iter_mut().enumerate() {
            if self.waits(index, began) {
                self.stats.counter(0).add(1);
                continue;
            }
            let of_it = turn(task);
            let now = tsc::now();
            self.charge(index, (began, now), of_it);
            (began, packets) = (now, packets + of_it);
        }
        self.end();
        if self.until.is_some_and(|until| began.wrapping_sub(until) as i64 > 0) {
            self.until = None;
        }
        packets
    }

    /// Tasks come when the worker begins, and go when it ends.
    fn set_tasks(&mut self, tasks: usize) {
        self.used.resize(tasks, self.least);
        self.empty.resize(tasks, None);
        self.idle.resize(tasks, true);
        self.rests.resize(tasks, 0);
    }

    fn waits(&self, task: usize, now: u64) -> bool {
        let rests = self.rests[task] != 0 && (self.rests[task].wrapping_sub(now) as i64) > 0;
        rests || self.used[task] > self.least + self.ahead
    }

    /// A task has had a turn, with so many packets.
    fn charge(&mut self, task: usize, (began, now): (u64, u64), packets: usize) {
        let ticks = now.wrapping_sub(began);
        let longest = self.stats.counter(1);
        longest.add(ticks.saturating_sub(longest.value()));
        if ticks > self.turn {
            self.long_turn(task, ticks, now);
        }
        if packets > 0 {
            (self.empty[task], self.idle[task]) = (None, false);
        } else {
            let since = *self.empty[task].get_or_insert(began);
            self.idle[task] |= now.wrapping_sub(since) > self.linger;
        }
        self.used[task] += ticks.min(self.turn);
    }

    #[cold]
    fn long_turn(&mut self, task: usize, ticks: u64, now: u64) {
        let before = std::mem::replace(&mut self.sleeps, sleeps());
        if self.sleeps != before {
            self.rests[task] = now.wrapping_add(ticks);
            self.stats.counter(2).add(1);
            self.stats.counter(3).add(ticks);
        }
    }

    /// Nobody is ahead of anybody.
    fn forget(&mut self) {
        self.used.iter_mut().for_each(|used| *used = self.least);
    }

    /// All have had their turns. While nobody has packets, nobody waits.
    fn end(&mut self) {
        let busy = self.used.iter().zip(&self.idle).filter(|(_, idle)| !**idle);
        let Some(least) = busy.map(|(used, _)| *used).min() else { return self.forget() };
        self.least = least;
        for (used, idle) in self.used.iter_mut().zip(&self.idle) {
            if *idle {
                *used = (*used).max(least);
            }
        }
    }
}

/// How often this thread has slept so far.
fn sleeps() -> i64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.voluntary_context_switches())
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    /// Turns by a clock of a tick in a nanosecond.
    struct World {
        turns: Turns,
        now: u64,
    }

    impl World {
        fn new(tasks: usize) -> Self {
            let mut turns = Turns::new(Block::private(&TURN_COUNTERS));
            (turns.ahead, turns.linger, turns.turn) = (5 * US, 5 * US, 1000 * US);
            turns.began = 1000 * US;
            turns.set_tasks(tasks);
            Self { turns, now: 1000 * US }
        }

        /// Rounds for so long, of tasks whose turns cost so much if they have packets; what each has used in turns with packets.
        fn run(&mut self, time: u64, costs: &[u64], mut has: impl FnMut(u64, usize) -> bool) -> Vec<u64> {
            let (mut used, end) = (vec![0; costs.len()], self.now + time);
            while self.now < end {
                for (task, &cost) in costs.iter().enumerate() {
                    if self.turns.waits(task, self.now) {
                        continue;
                    }
                    let packets = usize::from(has(self.now, task));
                    let (began, cost) = (self.now, if packets > 0 { cost } else { 50 });
                    self.now += cost;
                    self.turns.charge(task, (began, self.now), packets);
                    used[task] += cost * packets as u64;
                }
                self.now += 10;
                self.turns.end();
            }
            used
        }

        fn waiting(&self) -> usize {
            (0..self.turns.used.len()).filter(|&task| self.turns.waits(task, self.now)).count()
        }
    }

    const SECOND: u64 = 1_000_000 * US;

    /// Whether there are packets: for task 0 always, for another one so long after it was found to have some.
    fn every(time: u64) -> impl FnMut(u64, usize) -> bool {
        let mut come = 0;
        move |now, task| {
            let has = task == 0 || now >= come;
            if has && task > 0 {
                come = now + time;
            }
            has
        }
    }

    #[test]
    fn dear_task_gets_no_more_of_the_core() {
        for dear in [50 * US, 100 * US, 900 * US] {
            let used = World::new(3).run(SECOND, &[dear, 4 * US, 5 * US], |_, _| true);
            assert!(used.iter().all(|&used| used.abs_diff(SECOND / 3) <= SECOND / 50), "{used:?}");
        }
    }

    #[test]
    fn task_is_waited_for_between_bursts() {
        // A guest with few packets on their way: they come 3 us after it has got the last ones back.
        let used = World::new(2).run(SECOND, &[60 * US, 4 * US], every(7 * US));
        assert!(used[0].abs_diff(SECOND / 2) < SECOND / 20, "{used:?}");
    }

    #[test]
    fn task_with_little_to_do_is_not_waited_for() {
        let mut world = World::new(2);
        let used = world.run(SECOND, &[60 * US, US], every(100 * US));
        assert!(used[0] > SECOND * 9 / 10, "{used:?}");
        // Nor has it saved anything up, when it has packets later.
        let used = world.run(SECOND, &[60 * US, US], |_, _| true);
        assert!(used[0].abs_diff(used[1]) < SECOND / 50, "{used:?}");
    }

    #[test]
    fn equal_tasks_wait_for_nobody() {
        let mut world = World::new(4);
        world.run(SECOND / 100, &[4 * US; 4], |_, _| true);
        assert_eq!(world.waiting(), 0);
    }

    #[test]
    fn nobody_waits_for_tasks_without_packets() {
        let mut world = World::new(3);
        world.run(1000 * US, &[900 * US, 4 * US, 5 * US], |_, _| true);
        assert_eq!(world.waiting(), 1);
        world.run(10 * US, &[0; 3], |_, _| false);
        assert_eq!(world.waiting(), 0);
        world.run(SECOND / 100, &[0; 3], |_, _| false);
        assert_eq!(world.waiting(), 0);
    }

    #[test]
    fn turn_counts_as_a_millisecond_and_one_that_slept_is_rested_for() {
        let World { mut turns, .. } = World::new(2);
        turns.sleeps = sleeps();
        turns.charge(0, (0, 400_000 * US), 1);
        turns.charge(1, (0, 5 * US), 1);
        assert_eq!((&*turns.used, &*turns.rests), (&[1000 * US, 5 * US][..], &[0, 0][..]));
        std::thread::sleep(Duration::from_millis(1));
        turns.charge(0, (1000, 1000 + 400_000 * US), 1);
        let counted: Vec<u64> = (0..4).map(|counter| turns.stats.counter(counter).value()).collect();
        assert_eq!(counted, [0, 400_000 * US, 1, 400_000 * US]);
        // Others have as much time, with packets or without.
        turns.used.fill(0);
        assert!(turns.waits(0, 1000 + 800_000 * US - 1) && !turns.waits(1, 1000));
        assert!(!turns.waits(0, 1000 + 800_000 * US));
    }

    #[test]
    fn long_round_has_turns_measured() {
        let mut turns = Turns::new(Block::private(&TURN_COUNTERS));
        turns.began = tsc::now();
        (turns.long, turns.measured) =
            (tsc::ticks(Duration::from_millis(20)), tsc::ticks(Duration::from_millis(50)));
        assert!(!turns.begin());
        std::thread::sleep(Duration::from_millis(25));
        turns.slept();
        assert!(!turns.begin(), "that was no round");
        std::thread::sleep(Duration::from_millis(25));
        assert!(turns.begin());
        let mut tasks = [3, 4];
        assert_eq!(turns.round(&mut tasks, |task| *task), 7);
        assert!(turns.begin());
        std::thread::sleep(Duration::from_millis(60));
        turns.slept();
        assert!(turns.begin());
        turns.round(&mut tasks, |task| *task);
        assert!(!turns.begin(), "rounds have been short since");
    }
}
