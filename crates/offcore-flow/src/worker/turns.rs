//! Fair turns for a worker's parties: the ports whose packets it takes, and other tasks. A party whose turns take
//! longer gets fewer turns. Each party with packets gets an equal share of CPU time, whatever its packets or its
//! guest's memory cost, and however many queues it has.
//!
//! While rounds are short, only the duration of rounds is measured. After a long round, the time of each party is
//! measured for ten seconds. A party waits while it has used more time than the party with packets that has used the
//! least. A party that had no packets for twice the time of its last packets, or for 5 us, is not waited for and saves
//! up no time. (A guest that has received packets needs about as long to send the next ones.) A party with long turns
//! takes fewer packets per turn, so that the turns of others begin sooner.
//!
//! In a turn of more than 100 us, only the time in which the thread ran counts, because the kernel may have given the
//! core to another thread. If the thread slept, a party's memory was the cause: a page that was swapped out, is not
//! present yet, or is in a hole that is being punched. This party is then throttled for the same time, together with
//! all parties whose memory was slow lately. The others therefore get half of the time, even if they have no packets at
//! once. For sleeps of less than a millisecond, this applies from the second sleep on. A sleep in a turn in which the
//! worker was also preempted is not attributed to any party. A party is also throttled if the kernel works for it for
//! milliseconds more than once: a process that waits for the party's eventfd can make a signal take that long.

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use offcore_mem::BURST;
use offcore_port::Context;
use offcore_port::stats::PortNames;
use offcore_stats::page::{Block, PageError, StatsPage};
use offcore_stats::{Family, Label, counters, tsc};
use rustix::time::{ClockId, clock_gettime};

/// If a round takes longer than this for each party, the time of parties is measured. A turn of 32 short packets takes
/// 1 to 2.5 us, with 1518 bytes each 5 to 10 us. In shorter rounds, a party waits at most 5 us per party for its next
/// turn.
const LONG_ROUND: Duration = Duration::from_micros(5);
/// Duration of the measurement after a long round.
const MEASURED: Duration = Duration::from_secs(10);
/// Maximum time that a party may be ahead of others.
const AHEAD: Duration = Duration::from_micros(5);
/// A party without packets is waited for until this multiple of the time of its last packets has passed, or [`LINGER`]
/// if that is shorter. A party that sends few packets must not leave the core idle.
const LINGERS: u64 = 2;
const LINGER: Duration = Duration::from_micros(5);
/// Target for the longest turn. In longer turns, a party takes fewer packets.
const TURN: Duration = Duration::from_micros(20);
/// After a longer turn, the kernel is asked whether the thread ran or slept.
const LONG_TURN: Duration = Duration::from_micros(100);
/// The kernel is asked at least this often, so that a long turn is not charged for time long before it.
const USAGE_INTERVAL: Duration = Duration::from_millis(1);
/// A turn is expensive if the thread runs for longer than this, and for longer than [`LONG_TURN`] for each packet. A
/// longer sleep throttles the party at once.
const EXPENSIVE_TURN: Duration = Duration::from_millis(1);

/// A wait for a party's memory is remembered for this multiple of its duration, for at most ten seconds. A guest with
/// one missing page is therefore not grouped with a guest whose memory is always slow.
const THROTTLE_FACTOR: u64 = 25;

counters! {
    /// Counters of one worker's turns.
    pub struct TurnCounts, enum TurnCount {
        /// Turns that ports' queues waited because they had used more time than others.
        Waited = waited: Events,
        /// The longest turn.
        LongestTicks = longest_ticks: Ticks gauge,
        /// Sleeps in turns because of ports' memory.
        Stalls = stalls: Events,
        /// Total duration of these sleeps.
        StalledTicks = stalled_ticks: Ticks,
    }
}

counters! {
    /// Counters of a port while a worker measures turns.
    pub struct PortTurnCounts, enum PortTurnCount {
        /// Time of its turns with packets.
        UsedTicks = used_ticks: Ticks,
        /// Time in which it had packets or was waited for.
        ActiveTicks = active_ticks: Ticks,
        /// Turns that it waited.
        Waited = waited: Events,
        /// Time that the worker slept for its memory.
        StalledTicks = stalled_ticks: Ticks,
    }
}

/// The counters of one worker's turns.
pub static TURNS: Family = Family::new("turns", "Turns of the ports of a worker.", &[&TurnCounts::COUNTERS]);
/// The counters of a port's turns.
pub static PORT_TURNS: Family =
    Family::new("port_turns", "Turns of a port while a worker measures turns.", &[&PortTurnCounts::COUNTERS]);

/// The turns of one worker.
#[derive(Debug)]
pub struct Turns {
    stats: Block,
    /// Counters of each port.
    ports: Vec<Block>,
    /// Ports have even indices, tasks without a port have odd ones.
    parties: Vec<Party>,
    /// The least time that a party with packets has used.
    least: u64,
    /// TSC until which parties with slow memory are throttled, or 0.
    rest: u64,
    /// Number of tasks without a port seen in this round.
    named: usize,
    /// Whether no packet of the present turn could be sent.
    stuck: bool,
    /// TSC at the start of the last round, or 0.
    began: u64,
    /// TSC at the end of the last turn.
    ended: u64,
    /// TSC until which the active time of ports has been counted.
    counted: u64,
    /// TSC until which turns are measured; `None` while rounds are short.
    until: Option<u64>,
    /// The thread's usage when it was last read, and the time of reading.
    usage: Usage,
    looked: u64,
    look: fn() -> Usage,
    times: Times,
}

/// Times in ticks of the TSC.
#[derive(Debug)]
struct Times {
    /// [`LONG_ROUND`] times the number of parties.
    long_round: u64,
    /// [`MEASURED`], [`AHEAD`], [`LINGER`], [`TURN`], [`LONG_TURN`], [`USAGE_INTERVAL`] and [`EXPENSIVE_TURN`].
    measured: u64,
    ahead: u64,
    linger: u64,
    turn: u64,
    long_turn: u64,
    usage_interval: u64,
    expensive_turn: u64,
}

#[derive(Clone, Debug)]
struct Party {
    /// Whether the party has ever had a turn or packets.
    is_known: bool,
    /// Time used, in ticks. Only differences between parties matter.
    used: u64,
    /// TSC since when it has had no packets; `None` if its last turn had packets.
    empty: Option<u64>,
    /// Whether it has had no packets for a long time.
    idle: bool,
    /// Ticks of its last turn with packets.
    cost: u64,
    /// Maximum packets in a turn.
    burst: usize,
    /// TSC until which it is throttled together with other parties with slow memory.
    slow: Option<u64>,
    /// TSC until which a second expensive turn throttles it.
    expensive_until: Option<u64>,
}

/// Resource usage of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Usage {
    /// Ticks in which it ran.
    ran: u64,
    /// Number of sleeps.
    sleeps: i64,
    /// Number of times that the kernel has given its core to another thread.
    preempted: i64,
}

impl Turns {
    /// Creates the turns of the worker on `lcore`, with counters on `page` for the worker and for `ports` ports with
    /// these names.
    ///
    /// # Errors
    /// [`PageError::Full`] if the page has no room for the counters.
    pub fn on(page: &StatsPage, lcore: usize, names: &PortNames, ports: usize) -> Result<Self, PageError> {
        let stats = page.block(&TURNS, &[(Label::Lcore, &lcore)])?;
        let of_port =
            |port| page.block(&PORT_TURNS, &[(Label::Lcore, &lcore), (Label::Port, &names.of(port))]);
        Ok(Self::new(stats, (0..ports).map(of_port).collect::<Result<_, _>>()?))
    }

    /// Creates the turns of a worker without ports and with private counters.
    pub fn private() -> Self {
        Self::new(Block::private(&TURNS), Vec::new())
    }

    fn new(stats: Block, ports: Vec<Block>) -> Self {
        let [long_round, measured, ahead, linger, turn, long_turn, usage_interval, expensive_turn] =
            [2 * LONG_ROUND, MEASURED, AHEAD, LINGER, TURN, LONG_TURN, USAGE_INTERVAL, EXPENSIVE_TURN]
                .map(tsc::ticks);
        Self {
            stats,
            ports,
            parties: Vec::new(),
            least: 0,
            rest: 0,
            named: 0,
            stuck: false,
            began: 0,
            ended: 0,
            counted: 0,
            until: None,
            usage: Usage::default(),
            looked: 0,
            look: Usage::of_thread,
            times: Times {
                long_round,
                measured,
                ahead,
                linger,
                turn,
                long_turn,
                usage_interval,
                expensive_turn,
            },
        }
    }

    /// Begins a round. Returns whether turns are measured.
    #[inline(always)]
    pub(crate) fn begin(&mut self) -> bool {
        let now = tsc::now();
        let last = std::mem::replace(&mut self.began, now);
        if now.wrapping_sub(last) > self.times.long_round {
            self.measure(last, now);
        }
        self.until.is_some()
    }

    /// Starts or extends the measurement after a long round, unless there was no round.
    #[cold]
    fn measure(&mut self, last: u64, now: u64) {
        if last == 0 {
            return;
        }
        if self.until.is_none() {
            self.look_at_thread(now);
            self.forget();
            self.counted = now;
        }
        self.until = Some(later(self.until, now.wrapping_add(self.times.measured)));
    }

    /// The worker has slept because it had nothing to do.
    pub(super) fn slept(&mut self) {
        self.began = tsc::now();
        if self.until.is_some() {
            self.look_at_thread(self.began);
            self.counted = self.began;
        }
    }

    /// Runs a round whose turns are measured. `tasks` runs the turns. Returns the number of packets.
    #[cold]
    pub(crate) fn round(&mut self, tasks: impl FnOnce(&mut Self) -> usize) -> usize {
        // Work between rounds, such as repeated copies, does not belong to any turn.
        if self.began.wrapping_sub(self.ended) > self.times.usage_interval {
            self.look_at_thread(self.began);
        }
        (self.named, self.ended) = (0, self.began);
        let packets = tasks(self);
        self.end();
        if is_past(self.ended, self.looked.wrapping_add(self.times.usage_interval)) {
            self.look_at_thread(self.ended);
        }
        if self.until.is_some_and(|until| is_past(self.ended, until)) {
            self.until = None;
        }
        packets
    }

    /// Gives a turn to `port`, or to a task without a port, unless it has to wait. Returns the number of its packets.
    /// Tasks without a port must ask in the same order in each round.
    pub(crate) fn turn(
        &mut self,
        port: Option<usize>,
        ctx: &mut Context<'_>,
        work: impl FnOnce(&mut Self, &mut Context<'_>) -> usize,
    ) -> usize {
        let party = port.map_or_else(|| self.named * 2 + 1, |port| port * 2);
        self.named += usize::from(port.is_none());
        self.know(party);
        if self.waits(party, self.ended) {
            self.stats.counter(TurnCount::Waited as usize).add(1);
            self.count(party, PortTurnCount::Waited, 1);
            return 0;
        }
        self.stuck = false;
        let burst = ctx.burst;
        if port.is_some() {
            ctx.burst = burst.min(self.parties[party].burst);
        }
        let packets = work(self, ctx);
        ctx.burst = burst;
        self.charge(party, tsc::now(), if self.stuck { 0 } else { packets });
        packets
    }

    /// Notes that no packet of the present turn could be sent, so other parties do not wait for this one.
    pub(crate) fn set_stuck(&mut self) {
        self.stuck = true;
    }

    /// Sends `packets` packets to `port` in the turn of another party, unless `port` is throttled. Returns whether they
    /// were sent. The other party is charged for the time, except for sleeps and expensive work.
    pub(crate) fn visit(&mut self, port: usize, packets: usize, work: impl FnOnce()) -> bool {
        let (party, began) = (port * 2, tsc::now());
        self.know(party);
        if self.rests(party, began) {
            return false;
        }
        work();
        self.visited(party, began, tsc::now(), packets);
        true
    }

    fn visited(&mut self, party: usize, began: u64, now: u64, packets: usize) {
        let ticks = now.wrapping_sub(began);
        if ticks > self.times.long_turn {
            let (ran, is_expensive) = self.long_turn(party, ticks, packets, now);
            self.ended = self.ended.wrapping_add(if is_expensive { ticks } else { ticks - ran });
        }
    }

    fn know(&mut self, party: usize) {
        if self.parties.get(party).is_some_and(|party| party.is_known) {
            return;
        }
        let new = Party {
            is_known: false,
            used: self.least,
            empty: None,
            idle: true,
            cost: 0,
            burst: BURST,
            slow: None,
            expensive_until: None,
        };
        self.parties.resize(self.parties.len().max(party + 1), new);
        self.parties[party].is_known = true;
        let known = self.parties.iter().filter(|party| party.is_known).count();
        self.times.long_round = tsc::ticks(LONG_ROUND) * known.max(2) as u64;
    }

    fn waits(&self, party: usize, now: u64) -> bool {
        self.rests(party, now) || self.parties[party].used > self.least + self.times.ahead
    }

    fn rests(&self, party: usize, now: u64) -> bool {
        self.rest != 0 && !is_past(now, self.rest) && is_before(now, self.parties[party].slow)
    }

    /// Charges a party for its turn, which has ended and had `packets` packets.
    fn charge(&mut self, party: usize, now: u64, packets: usize) {
        let began = std::mem::replace(&mut self.ended, now);
        let mut ticks = now.wrapping_sub(began);
        let longest = self.stats.counter(TurnCount::LongestTicks as usize);
        longest.add(ticks.saturating_sub(longest.value()));
        if ticks > self.times.long_turn {
            (ticks, _) = self.long_turn(party, ticks, packets, now);
        }
        if packets > 0 {
            self.count(party, PortTurnCount::UsedTicks, ticks);
        }
        let party = &mut self.parties[party];
        party.used += ticks;
        if packets == 0 {
            let since = *party.empty.get_or_insert(began);
            party.idle |= now.wrapping_sub(since) > self.times.linger.min(LINGERS * party.cost);
            return;
        }
        (party.empty, party.idle, party.cost) = (None, false, ticks);
        if ticks > self.times.turn {
            party.burst = (packets.min(party.burst) / 2).max(1);
        } else if packets >= party.burst && ticks < self.times.turn / 2 {
            party.burst = (party.burst * 2).min(BURST);
        }
    }

    /// Returns in how many of the `ticks` until `now` the thread ran for `packets` packets of the party, and whether
    /// that is expensive. If the thread slept, the cause was the party's memory.
    #[cold]
    fn long_turn(&mut self, party: usize, ticks: u64, packets: usize, now: u64) -> (u64, bool) {
        let (before, elapsed) = (self.usage, now.wrapping_sub(self.looked));
        self.look_at_thread(now);
        // Any time since the last reading in which the thread did not run was in the longest turn since then, which is
        // this one.
        let paused = elapsed.saturating_sub(self.usage.ran.saturating_sub(before.ran));
        let ran = ticks.saturating_sub(paused);
        // If the thread was also preempted, it is unknown which of the two took long.
        let is_sleep = self.usage.sleeps != before.sleeps && self.usage.preempted == before.preempted;
        let slept = if is_sleep { ticks - ran } else { 0 };
        let is_expensive =
            ran > self.times.expensive_turn.max(self.times.long_turn.saturating_mul(packets as u64));
        let mut rest = if slept > self.times.expensive_turn { slept } else { 0 };
        if is_expensive || slept > 0 {
            // A single event may be caused by the machine, or by a short sleep for another party.
            if is_before(now, self.parties[party].expensive_until) {
                rest = if is_expensive { ticks } else { slept };
            }
            self.parties[party].expensive_until =
                Some(self.remembered(if is_expensive { ran } else { slept }, now));
        }
        if slept > 0 {
            self.stats.counter(TurnCount::Stalls as usize).add(1);
            self.stats.counter(TurnCount::StalledTicks as usize).add(slept);
            self.count(party, PortTurnCount::StalledTicks, slept);
        }
        if rest > 0 {
            self.parties[party].slow = Some(later(self.parties[party].slow, self.remembered(rest, now)));
            let until = now.wrapping_add(rest);
            self.rest = later((self.rest != 0).then_some(self.rest), until).max(1);
            // Throttled parties are not forgotten meanwhile.
            self.until = self.until.map(|measured| later(Some(measured), until));
        }
        (ran, is_expensive)
    }

    /// Returns the time until which a wait of `ticks` is remembered.
    fn remembered(&self, ticks: u64, now: u64) -> u64 {
        now.wrapping_add(ticks.saturating_mul(THROTTLE_FACTOR).min(self.times.measured).max(ticks))
    }

    /// Adds to a counter of the party if it is a port with counters.
    fn count(&self, party: usize, counter: PortTurnCount, more: u64) {
        if party.is_multiple_of(2)
            && let Some(block) = self.ports.get(party / 2)
        {
            block.counter(counter as usize).add(more);
        }
    }

    fn look_at_thread(&mut self, now: u64) {
        (self.usage, self.looked) = ((self.look)(), now);
    }

    /// Sets the used time of all parties to the same value.
    fn forget(&mut self) {
        self.parties.iter_mut().for_each(|party| party.used = self.least);
    }

    /// Ends a round after all turns. Parties without packets and throttled parties are not waited for.
    fn end(&mut self) {
        let mut least = u64::MAX;
        let round = self.ended.wrapping_sub(std::mem::replace(&mut self.counted, self.ended));
        for party in 0..self.parties.len() {
            if self.parties[party].idle {
                continue;
            }
            self.count(party, PortTurnCount::ActiveTicks, round);
            if !self.rests(party, self.ended) {
                least = least.min(self.parties[party].used);
            }
        }
        if least == u64::MAX {
            return self.forget();
        }
        self.least = least;
        for party in 0..self.parties.len() {
            if self.parties[party].idle || self.rests(party, self.ended) {
                self.parties[party].used = self.parties[party].used.max(least);
            }
        }
    }
}

/// Whether the TSC has reached `until`.
fn is_past(now: u64, until: u64) -> bool {
    now.wrapping_sub(until) as i64 >= 0
}

/// Whether `until` is a time that the TSC has not reached.
fn is_before(now: u64, until: Option<u64>) -> bool {
    until.is_some_and(|until| !is_past(now, until))
}

/// Returns the later of two times.
fn later(one: Option<u64>, other: u64) -> u64 {
    one.filter(|&one| is_past(one, other)).unwrap_or(other)
}

impl Usage {
    fn of_thread() -> Self {
        // `getrusage` updates times only at the kernel's ticks.
        let ran = Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
        let (sleeps, preempted) = getrusage(UsageWho::RUSAGE_THREAD).map_or((0, 0), |usage| {
            (usage.voluntary_context_switches(), usage.involuntary_context_switches())
        });
        Self { ran: tsc::ticks(ran), sleeps, preempted }
    }
}

#[cfg(test)]
mod tests;
