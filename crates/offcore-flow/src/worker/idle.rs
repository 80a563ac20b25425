//! Behaviour of a worker that has nothing to do: it continues to poll, or sleeps.
//!
//! A worker that sleeps when idle polls for up to 50 us after the last packet, since the next one usually follows soon.
//! The time adapts, like halt polling in KVM (Documentation/virt/kvm/halt-polling.rst). It shrinks if an application
//! ends the sleep that follows: an application that shares the core cannot run, and write, while the worker polls. It
//! grows if a packet arrives soon.
//!
//! Then the worker *arms* its queues ([`arm`](offcore_port::RxQueue::arm)), which request events and check once more,
//! and waits in one system call for the first event. After an event, it polls again as after a packet. After a timeout,
//! it runs one round and sleeps again. A sleep never exceeds a task's next timer or 10 ms, so other threads need not
//! wake the worker after changes. The worker never sleeps with a copy in flight, because the end of a copy is not an
//! event.

use std::str::FromStr;
use std::time::Duration;

use arrayvec::ArrayVec;
use offcore_port::Wake;
use offcore_stats::page::Block;
use offcore_stats::{Family, counters, named, tsc};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::worker::task::{Task, WakeSource};

/// Longest and shortest time of polling before a sleep.
const TIMEOUT: Duration = Duration::from_micros(50);
const SHORTEST: Duration = Duration::from_micros(2);
/// One in this number of periods that end in sleep polls for the whole [`TIMEOUT`], to check whether polling pays off
/// again.
const PROBE: u32 = 32;
/// Maximum duration of a sleep.
const LONGEST: Duration = Duration::from_millis(10);
/// The same if a queue has no event.
const SHORT: Duration = Duration::from_millis(1);
/// Checking a queue costs almost nothing, unless the worker must wait for a port's memory. In that case, the worker
/// polls for this many times as long, because only in turns is the port charged for such waits.
const POLLS: u64 = 25;
/// Checks that take longer than this have waited for memory.
const LONG: Duration = Duration::from_millis(1);
/// Maximum number of descriptors that one sleep waits for. Further queues are checked like queues without events.
const MOST: usize = 128;

counters! {
    /// Counters of one worker's sleep.
    pub(crate) struct IdleCounts {
        /// Sleeps.
        sleeps: Events,
        /// Sleeps ended by an event and not by a timeout.
        woken: Events,
        /// Total duration of sleeps.
        slept_ticks: Ticks,
    }
}

/// The counters of one worker's sleep.
pub static IDLE: Family =
    Family::new("idle", "Sleep of a worker that has nothing to do.", &[&IdleCounts::COUNTERS]);

named! {
    /// Behaviour of workers that have nothing to do.
    #[derive(Default)]
    pub enum Idle {
        /// Continue to poll: the next packet is found at once.
        #[default]
        Poll = "poll",
        /// Sleep until an event, and leave the lcore to other threads.
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
    /// Consecutive rounds without packets.
    quiet: Option<Quiet>,
    /// Sleeps since the last packet or event.
    in_a_row: u32,
    /// TSC until which the worker does not sleep, or 0.
    polls_until: u64,
    poll_time: PollTime,
    times: [Timespec; 2],
}

impl Sleeper {
    /// Creates a sleeper that counts in `stats`, a block of the family [`IDLE`].
    ///
    /// # Panics
    /// If the block has another number of counters.
    pub fn new(stats: Block) -> Self {
        assert_eq!(stats.len(), IDLE.size(), "a sleeper's block is of the family IDLE");
        let times = [LONGEST, SHORT].map(|time| Timespec::try_from(time).unwrap_or_default());
        let poll_time = PollTime::new(tsc::ticks(SHORTEST), tsc::ticks(TIMEOUT));
        Self { stats, quiet: None, in_a_row: 0, polls_until: 0, poll_time, times }
    }

    /// Returns the total duration of sleeps.
    fn slept_ticks(&self) -> u64 {
        IdleCounts::read(&self.stats).slept_ticks
    }

    /// Whether to sleep after a round that moved `packets` packets.
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

    /// Returns the number of sleeps since the last packet or event.
    pub(crate) fn in_a_row(&self) -> u32 {
        self.in_a_row
    }

    /// Sleeps, unless a task generates packets or a queue has work after all. Afterwards, the queues are
    /// [disarmed](offcore_port::RxQueue::disarm).
    pub(crate) fn sleep(&mut self, tasks: &mut [Box<dyn Task>]) {
        let (start, slept) = (tsc::now(), self.slept_ticks());
        let awake = tasks.iter().any(|task| task.generates()) || self.sleep_armed(tasks);
        for task in tasks {
            task.wake_sources(&mut WakeSource::disarm);
        }
        let now = tsc::now();
        let looked = now.wrapping_sub(start).saturating_sub(self.slept_ticks() - slept);
        if looked > tsc::ticks(LONG) {
            self.polls_until = now.saturating_add(looked.saturating_mul(POLLS));
        }
        if awake {
            self.quiet = None;
        }
        self.in_a_row = if awake { 0 } else { self.in_a_row.wrapping_add(1) };
    }

    /// Arms the queues and sleeps. Returns whether there is work.
    fn sleep_armed(&mut self, tasks: &mut [Box<dyn Task>]) -> bool {
        let mut events: ArrayVec<PollFd<'_>, MOST> = ArrayVec::new();
        let [mut time, short] = self.times;
        // A bit for each event that comes from an application and not from a queue.
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
            // A signal ends the sleep like a timeout: the queues are checked again.
            awake = poll(&mut events, Some(&time)).is_ok_and(|ready| ready > 0);
            let slept = tsc::now().wrapping_sub(start);
            IdleCounts { sleeps: 1, woken: awake.into(), slept_ticks: slept }.add_to(&self.stats);
            let mut ended = events.iter().enumerate().filter(|(_, event)| !event.revents().is_empty());
            if awake {
                self.poll_time.slept(slept, ended.all(|(at, _)| others >> at & 1 != 0));
            }
        }
        awake
    }
}

/// Consecutive rounds without packets, in TSC ticks.
#[derive(Clone, Copy, Debug)]
struct Quiet {
    since: u64,
    until: u64,
    /// Whether another program ran on the core meanwhile. Its data would have ended a sleep, too.
    interrupted: bool,
}

/// Time of polling before a sleep, in TSC ticks.
#[derive(Debug)]
struct PollTime {
    ticks: u64,
    least: u64,
    most: u64,
    /// Sleeps ended by applications, modulo [`PROBE`].
    slept: u32,
}

impl PollTime {
    fn new(least: u64, most: u64) -> Self {
        Self { ticks: most, least, most, slept: 0 }
    }

    fn limit(&self) -> u64 {
        if self.slept == 0 { self.most } else { self.ticks }
    }

    /// Polling has found a packet.
    fn polled(&mut self, quiet: &Quiet) {
        if !quiet.interrupted {
            self.ticks = self.ticks.max(2 * quiet.until.wrapping_sub(quiet.since)).min(self.most);
        }
    }

    /// Polling has found nothing. An event ended the sleep that followed, which took `ticks`.
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
        let mut sleeper = Sleeper::new(Block::private(&IDLE));
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
        // Nothing can end this sleep early, so the sleep lasts until its timeout.
        sleeper.sleep(&mut []);
        assert!(sleeper.is_due(0), "nothing has come");
        assert_eq!((sleeper.stats.counter(0).value(), sleeper.stats.counter(1).value()), (1, 0));
        assert!(sleeper.slept_ticks() > tsc::ticks(SHORT));
    }

    #[test]
    fn unsuccessful_polling_gets_shorter() {
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
        let mut sleeper = Sleeper::new(Block::private(&IDLE));
        let slept = |tasks: &mut [Box<dyn Task>], sleeper: &mut Sleeper| {
            let before = sleeper.slept_ticks();
            sleeper.sleep(tasks);
            sleeper.slept_ticks() - before
        };
        // The shortest of several sleeps counts, because a busy machine makes some of them longer.
        let shortest = (0..50).map(|_| slept(&mut [Box::new(Timed)], &mut sleeper)).min().unwrap();
        assert!(shortest < tsc::ticks(LONGEST), "{shortest}");
        assert!(shortest > tsc::ticks(Duration::from_millis(1)), "{shortest}");
    }

    /// A task whose memory makes the worker wait when its queue is armed.
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
    fn slow_arming_keeps_worker_polling() {
        let mut sleeper = Sleeper::new(Block::private(&IDLE));
        assert!(!sleeper.is_due(0));
        let start = tsc::now();
        sleeper.sleep(&mut [Box::new(Slow)]);
        while !sleeper.is_due(0) {
            std::thread::yield_now();
        }
        assert!(tsc::now() - start >= tsc::ticks(8 * LONG * POLLS as u32));
    }

    #[test]
    fn idle_mode_names_parse() {
        for idle in Idle::ALL {
            assert_eq!(idle.name().parse(), Ok(idle));
        }
        assert!("nap".parse::<Idle>().unwrap_err().contains("poll or sleep"));
    }
}
