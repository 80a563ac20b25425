//! What a worker does that finds nothing to do: it polls on, or sleeps.
//!
//! A worker that sleeps when idle polls for up to 50 us after the last packet, since the next one is usually not far. The time
//! adapts, as the halt polling of KVM does (Documentation/virt/kvm/halt-polling.rst). It shrinks when an application ends the sleep
//! after it: an application that shares the core cannot run, and write, while the worker polls. It grows when a packet comes soon.
//! Then the worker *arms* its queues ([`arm`](offcore_port::RxQueue::arm)), which ask for events and look once more, and waits in
//! one system call for the first of them. An event makes it poll again as if a packet had come; when the time is up without
//! one, it takes one round and sleeps on. It never sleeps beyond a task's next timer, nor for more than 10 ms, so whoever
//! changes something need not wake it; nor with a copy in flight, because its end is no event.

use std::str::FromStr;
use std::time::Duration;

use arrayvec::ArrayVec;
use offcore_port::Wake;
use offcore_stats::page::Block;
use offcore_stats::{named, tsc};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::worker::task::{Task, WakeSource};

/// The longest and the shortest time of polling before a sleep.
const TIMEOUT: Duration = Duration::from_micros(50);
const SHORTEST: Duration = Duration::from_micros(2);
/// One in this number of periods that end in sleep polls for the whole [`TIMEOUT`], to find out whether polling pays again.
const PROBE: u32 = 32;
/// How long it sleeps at most.
const LONGEST: Duration = Duration::from_millis(10);
/// The same when a queue has no event.
const SHORT: Duration = Duration::from_millis(1);
/// To look at a queue costs next to nothing, unless somebody's memory has the worker wait. Then it polls for so many times as long, in
/// turns in which that is somebody's time.
const POLLS: u64 = 25;
/// A look that is longer.
const LONG: Duration = Duration::from_millis(1);
/// Descriptors that one sleep waits for. Queues beyond are looked at as those without events.
const MOST: usize = 128;

/// Counters of one worker's sleep on the statistics page: how often it fell asleep, how often an event woke it, and how
/// long it slept in TSC ticks.
pub const IDLE_COUNTERS: [&str; 3] = ["sleeps", "woken", "slept_ticks"];

named! {
    /// What workers do that have nothing to do.
    #[derive(Default)]
    pub enum Idle {
        /// Poll on: the next packet is found at once.
        #[default]
        Poll = "poll",
        /// Sleep until something comes: the lcore is left to others meanwhile.
        Sleep = "sleep",
    }
}

impl FromStr for Idle {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::find(text).ok_or_else(|| format!("idle '{text}': expected poll or sleep"))
    }
}

/// The sleep of one worker.
#[derive(Debug)]
pub struct Sleeper {
    stats: Block,
    /// Rounds that have found nothing.
    quiet: Option<Quiet>,
    /// Sleeps since something has come.
    in_a_row: u32,
    /// TSC until when it does not sleep, or 0.
    polls_until: u64,
    poll_time: PollTime,
    times: [Timespec; 2],
}

impl Sleeper {
    /// One that counts in `stats`, a block made with [`IDLE_COUNTERS`].
    ///
    /// # Panics
    /// When the block has another number of counters.
    pub fn new(stats: Block) -> Self {
        assert_eq!(stats.len(), IDLE_COUNTERS.len(), "a sleeper's block is made with IDLE_COUNTERS");
        let times = [LONGEST, SHORT].map(|time| Timespec::try_from(time).unwrap_or_default());
        let poll_time = PollTime::new(tsc::ticks(SHORTEST), tsc::ticks(TIMEOUT));
        Self { stats, quiet: None, in_a_row: 0, polls_until: 0, poll_time, times }
    }

    /// Whether to sleep after a round that has moved `packets`.
    #[inline]
    pub(crate) fn is_due(&mut self, packets: usize) -> bool {
        if packets > 0 {
            if let Some(quiet) = self.quiet.take()
                && self.in_a_row == 0
            {
                self.poll_time.polled(&quiet);
            }
            self.in_a_row = 0;
            return false;
        }
        let now = tsc::now();
        let quiet = self.quiet.get_or_insert(Quiet { since: now, until: now, interrupted: false });
        quiet.interrupted |= now.wrapping_sub(quiet.until) > self.poll_time.least;
        quiet.until = now;
        now.wrapping_sub(quiet.since) >= self.poll_time.limit() && now >= self.polls_until
    }

    /// How often it has slept since something has come.
    pub(crate) fn in_a_row(&self) -> u32 {
        self.in_a_row
    }

    /// Sleeps, unless a task generates packets or one of their queues has something to do after all. The queues are
    /// [disarmed](offcore_port::RxQueue::disarm) then.
    pub(crate) fn sleep(&mut self, tasks: &mut [Box<dyn Task>]) {
        let (start, slept) = (tsc::now(), self.stats.counter(2).value());
        let awake = tasks.iter().any(|task| task.generates()) || self.sleep_armed(tasks);
        for task in tasks {
            task.wake_sources(&mut WakeSource::disarm);
        }
        let now = tsc::now();
        let looked = now.wrapping_sub(start).saturating_sub(self.stats.counter(2).value() - slept);
        if looked > tsc::ticks(LONG) {
            self.polls_until = now.saturating_add(looked.saturating_mul(POLLS));
        }
        if awake {
            self.quiet = None;
        }
        self.in_a_row = if awake { 0 } else { self.in_a_row.wrapping_add(1) };
    }

    /// Arms the queues and sleeps; returns whether there is something to do.
    fn sleep_armed(&mut self, tasks: &mut [Box<dyn Task>]) -> bool {
        let mut events: ArrayVec<PollFd<'_>, MOST> = ArrayVec::new();
        let [mut time, short] = self.times;
        // A bit for each event of something else than a queue: of applications.
        let mut others = 0u128;
        let mut awake = false;
        for task in tasks {
            if let Some(due) = task.next_timer()
                && let Ok(due) = Timespec::try_from(due.max(TIMEOUT))
            {
                time = time.min(due);
            }
            task.wake_sources(&mut |source| {
                if awake {
                    return;
                }
                let is_queue = matches!(source, WakeSource::Queue(_));
                match source.arm() {
                    Wake::Now => awake = true,
                    Wake::Event(fd) if !events.is_full() => {
                        others |= u128::from(!is_queue) << events.len();
                        events.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
                    }
                    Wake::Event(_) | Wake::Poll => time = time.min(short),
                    Wake::Never => {}
                }
            });
        }
        if !awake {
            let start = tsc::now();
            // A signal ends it like the end of the time does: it is looked again.
            awake = poll(&mut events, Some(&time)).is_ok_and(|ready| ready > 0);
            let [sleeps, woken, ticks] = [0, 1, 2].map(|counter| self.stats.counter(counter));
            sleeps.add(1);
            woken.add(awake.into());
            let slept = tsc::now().wrapping_sub(start);
            ticks.add(slept);
            let mut ended = events.iter().enumerate().filter(|(_, event)| !event.revents().is_empty());
            if awake {
                self.poll_time.slept(slept, ended.all(|(at, _)| others >> at & 1 != 0));
            }
        }
        awake
    }
}

/// Rounds in a row that have found nothing, in TSC ticks.
#[derive(Clone, Copy, Debug)]
struct Quiet {
    since: u64,
    until: u64,
    /// Another program ran on the core in between. Its data would have ended a sleep, too.
    interrupted: bool,
}

/// How long a worker polls before it sleeps, in TSC ticks.
#[derive(Debug)]
struct PollTime {
    ticks: u64,
    least: u64,
    most: u64,
    /// Sleeps that an event has ended, modulo [`PROBE`].
    slept: u32,
}

impl PollTime {
    fn new(least: u64, most: u64) -> Self {
        Self { ticks: most, least, most, slept: 0 }
    }

    fn limit(&self) -> u64 {
        if self.slept == 0 { self.most } else { self.ticks }
    }

    /// Polling has found something.
    fn polled(&mut self, quiet: &Quiet) {
        if !quiet.interrupted {
            self.ticks = self.ticks.max(2 * quiet.until.wrapping_sub(quiet.since)).min(self.most);
        }
    }

    /// Polling has found nothing. An event ended the sleep of `ticks` after it.
    fn slept(&mut self, ticks: u64, by_application: bool) {
        if by_application {
            self.slept = (self.slept + 1) % PROBE;
            self.ticks = (self.ticks - self.ticks / 4).max(self.least);
        } else if ticks < self.most {
            self.ticks = (2 * self.ticks).min(self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use offcore_port::Context;

    use super::*;

    #[test]
    fn packet_delays_sleep() {
        let mut sleeper = Sleeper::new(Block::private(&IDLE_COUNTERS));
        let wait = |sleeper: &Sleeper| {
            let start = tsc::now();
            while tsc::now() - start < sleeper.poll_time.most {}
        };
        assert!(!sleeper.is_due(0));
        wait(&sleeper);
        assert!(!sleeper.is_due(1), "a packet has come");
        assert!(!sleeper.is_due(0));
        wait(&sleeper);
        assert!(sleeper.is_due(0));
        // Nothing to wait for: the time passes.
        sleeper.sleep(&mut []);
        assert!(sleeper.is_due(0), "nothing has come");
        assert_eq!((sleeper.stats.counter(0).value(), sleeper.stats.counter(1).value()), (1, 0));
        assert!(sleeper.stats.counter(2).value() > tsc::ticks(SHORT));
    }

    #[test]
    fn vain_polling_gets_shorter() {
        let mut poll_time = PollTime::new(200, 5000);
        assert_eq!(poll_time.limit(), 5000);
        let limits: Vec<_> = (0..2 * PROBE)
            .map(|_| {
                poll_time.slept(9000, true);
                poll_time.limit()
            })
            .collect();
        assert!(limits.is_sorted_by(|a, b| a >= b || *b == 5000), "{limits:?}");
        assert_eq!(
            limits.iter().filter(|limit| **limit == 5000).count(),
            2,
            "one probe in {PROBE}: {limits:?}"
        );
        assert_eq!(limits[PROBE as usize], 200);
    }

    #[test]
    fn successful_polling_gets_longer() {
        let mut poll_time = PollTime::new(200, 5000);
        let shorten = |poll_time: &mut PollTime| (0..PROBE + 1).for_each(|_| poll_time.slept(9000, true));
        shorten(&mut poll_time);
        let quiet = Quiet { since: 1000, until: 2500, interrupted: true };
        poll_time.polled(&quiet);
        assert_eq!(poll_time.limit(), 200, "another program has had the core");
        poll_time.polled(&Quiet { interrupted: false, ..quiet });
        assert_eq!(poll_time.limit(), 3000);
        poll_time.polled(&Quiet { until: 5000, interrupted: false, ..quiet });
        assert_eq!(poll_time.limit(), 5000);
        shorten(&mut poll_time);
        poll_time.slept(9000, false);
        assert_eq!(poll_time.limit(), 200, "a packet came late");
        poll_time.slept(4000, false);
        assert_eq!(poll_time.limit(), 400, "a packet came soon");
    }

    /// A task whose timer is due in 2 ms.
    #[derive(Debug)]
    struct Timed;

    impl Task for Timed {
        fn round(&mut self, _: &mut Context<'_>) -> usize {
            0
        }

        fn drain(&mut self, _: &mut Context<'_>) -> usize {
            0
        }

        fn wake_sources<'a>(&'a mut self, _: &mut dyn FnMut(WakeSource<'a>)) {}

        fn next_timer(&self) -> Option<Duration> {
            Some(Duration::from_millis(2))
        }
    }

    #[test]
    fn timers_end_sleep() {
        let mut sleeper = Sleeper::new(Block::private(&IDLE_COUNTERS));
        let slept = |tasks: &mut [Box<dyn Task>], sleeper: &mut Sleeper| {
            let before = sleeper.stats.counter(2).value();
            sleeper.sleep(tasks);
            sleeper.stats.counter(2).value() - before
        };
        // The shortest of several sleeps: a busy machine makes some of them longer.
        let shortest = (0..50).map(|_| slept(&mut [Box::new(Timed)], &mut sleeper)).min().unwrap();
        assert!(shortest < tsc::ticks(LONGEST), "{shortest}");
        assert!(shortest > tsc::ticks(Duration::from_millis(1)), "{shortest}");
    }

    /// Memory that has the worker wait when its queue is armed.
    #[derive(Debug)]
    struct Slow;

    impl Task for Slow {
        fn round(&mut self, _: &mut Context<'_>) -> usize {
            0
        }

        fn drain(&mut self, _: &mut Context<'_>) -> usize {
            0
        }

        fn wake_sources<'a>(&'a mut self, _: &mut dyn FnMut(WakeSource<'a>)) {
            std::thread::sleep(4 * LONG);
        }
    }

    #[test]
    fn worker_polls_where_a_queue_has_it_wait() {
        let mut sleeper = Sleeper::new(Block::private(&IDLE_COUNTERS));
        assert!(!sleeper.is_due(0));
        let start = tsc::now();
        sleeper.sleep(&mut [Box::new(Slow)]);
        while !sleeper.is_due(0) {
            std::thread::yield_now();
        }
        assert!(tsc::now() - start >= tsc::ticks(8 * LONG * POLLS as u32));
    }

    #[test]
    fn both_words_are_read() {
        for idle in Idle::ALL {
            assert_eq!(idle.name().parse(), Ok(idle));
        }
        assert!("nap".parse::<Idle>().unwrap_err().contains("poll or sleep"));
    }
}
