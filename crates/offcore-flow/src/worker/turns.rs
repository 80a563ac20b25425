//! Turns of a worker's parties: the ports whose packets it takes, and other tasks. One that takes longer than the others has fewer of
//! them, so that each that has packets gets as much of the core as any other, whatever its packets or its guest's memory cost, and however
//! many queues it has.
//!
//! As long as rounds are short nothing is measured but rounds. One long round, and for ten seconds each party's time is: one waits
//! while it has used more than the one with packets that has used least. One that has had none for as long as its last ones took twice, or
//! for 5 us, is not waited for, and saves nothing up; a guest that has got packets needs about as long to send the next ones. One whose
//! turns are long takes fewer packets in each, so that others have theirs sooner.
//!
//! Of a turn of more than 100 us the time counts in which the thread ran: meanwhile the kernel may have given the core to
//! somebody else. If the thread has slept in it, somebody's memory made it: a page that was swapped out, is not there yet, or is in a hole
//! that is being punched. Then that party rests for as long, together with all whose memory did so lately, so that others have half of the
//! time, whether they have packets at once or not; of a sleep of less than a millisecond that is so from the second one on. One in which
//! the worker was preempted, too, is nobody's. So rests one for which the kernel works for milliseconds more than once: whoever waits
//! for its eventfd can make a signal take that long.

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use offcore_mem::BURST;
use offcore_port::Context;
use offcore_stats::page::{Block, PageError, StatsPage};
use offcore_stats::tsc;
use rustix::time::{ClockId, clock_gettime};

/// A round that takes longer for each party has parties' times measured. A turn of 32 short packets takes 1 to 2.5 us, of 1518 bytes 5
/// to 10 us. While rounds are shorter, whatever some cost, a party's turn comes again after 5 us for each party.
const LONG: Duration = Duration::from_micros(5);
/// For how long.
const MEASURED: Duration = Duration::from_secs(10);
/// What a party may be ahead of others.
const AHEAD: Duration = Duration::from_micros(5);
/// For how long after its last packets a party may have more, and no longer than these took so many times: who sends few and has others
/// wait for the next ones must not have the core idle.
const LINGERS: u64 = 2;
const LINGER: Duration = Duration::from_micros(5);
/// What a turn is to take at most, by taking fewer packets.
const TURN: Duration = Duration::from_micros(20);
/// A turn that is longer is asked about: whether the thread has run or slept.
const ASKED: Duration = Duration::from_micros(100);
/// After so long that is looked at anyway, lest more be counted than was in such a turn.
const LOOKS: Duration = Duration::from_millis(1);
/// A turn in which the thread runs for longer, and for longer than [`ASKED`] for each packet, is dear. A longer sleep has its party rest at
/// once.
const DEAR: Duration = Duration::from_millis(1);

/// That somebody's memory was waited for is remembered for so many times as long, for those ten seconds at most: a page that is not there
/// yet does not put its guest together with one that goes on like that.
const REMEMBERED: u64 = 25;

/// Counters of one worker's turns on the statistics page: turns that parties have waited, the longest turn in TSC ticks, how often the
/// worker has slept in one, and for how many ticks. Behind them stand two of each port, [`PORT_COUNTERS`].
const COUNTERS: [&str; 4] = ["waited", "longest_ticks", "stalls", "stalled_ticks"];
/// Of a port, while turns are measured: TSC ticks that its turns with packets took, ticks in which it had packets or was waited for, turns
/// that it has waited, and ticks that the worker has slept for its memory.
const PORT_COUNTERS: [&str; 4] = ["used_ticks", "active_ticks", "waited", "stalled_ticks"];

/// The turns of one worker.
#[derive(Debug)]
pub struct Turns {
    stats: Block,
    /// Ports at even indices, tasks that are no port's at odd ones.
    parties: Vec<Party>,
    /// The least that a party with packets has used.
    least: u64,
    /// TSC until when those rest whose memory was waited for, or 0.
    rest: u64,
    /// Tasks that have been named in this round.
    named: usize,
    /// Whether the present turn's packets cannot go on.
    stuck: bool,
    /// TSC when the last round began, or 0.
    began: u64,
    /// TSC when the last turn ended.
    ended: u64,
    /// TSC until which it has been counted for how long ports were active.
    counted: u64,
    /// TSC until when turns are measured; `None` while rounds are short.
    until: Option<u64>,
    /// What the thread had done when it was last looked at, and when that was.
    usage: Usage,
    looked: u64,
    look: fn() -> Usage,
    long: u64,
    measured: u64,
    ahead: u64,
    linger: u64,
    turn: u64,
    asked: u64,
    looks: u64,
    dear: u64,
}

#[derive(Clone, Debug)]
struct Party {
    /// Whether it has ever been named.
    is_known: bool,
    /// What it has used, in ticks; the part that all have in common does not matter.
    used: u64,
    /// TSC since when it has been found to have no packets; `None` when it had some in its last turn.
    empty: Option<u64>,
    /// Whether it has been so for long.
    idle: bool,
    /// What its last turn with packets took, in ticks.
    cost: u64,
    /// Packets that it takes in a turn, at most.
    burst: usize,
    /// TSC until when it rests as often as others of which the same is remembered.
    slow: Option<u64>,
    /// TSC until when another dear turn has it rest.
    dear: Option<u64>,
}

/// What a thread has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Usage {
    /// Ticks in which it ran.
    ran: u64,
    /// How often it has slept.
    sleeps: i64,
    /// How often the kernel has given its core to somebody else.
    preempted: i64,
}

impl Turns {
    /// Those of a worker that counts in a block `name` of `page`, with counters such as `portN_used_ticks` for so many ports.
    ///
    /// # Errors
    /// [`PageError::Full`] when the page has no room for the block.
    pub fn on(page: &StatsPage, name: &str, ports: usize) -> Result<Self, PageError> {
        let of_port = |port| PORT_COUNTERS.map(|counter| format!("port{port}_{counter}"));
        let ports: Vec<String> = (0..ports).flat_map(of_port).collect();
        let counters: Vec<&str> = COUNTERS.into_iter().chain(ports.iter().map(String::as_str)).collect();
        Ok(Self::new(page.block(name, &counters)?))
    }

    /// Those of a worker of no ports, whose counters nobody reads.
    pub fn private() -> Self {
        Self::new(Block::private(&COUNTERS))
    }

    fn new(stats: Block) -> Self {
        let [long, measured, ahead, linger, turn, asked, looks, dear] =
            [2 * LONG, MEASURED, AHEAD, LINGER, TURN, ASKED, LOOKS, DEAR].map(tsc::ticks);
        Self {
            stats,
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
            long,
            measured,
            ahead,
            linger,
            turn,
            asked,
            looks,
            dear,
        }
    }

    /// A round begins; whether turns are measured.
    #[inline(always)]
    pub(crate) fn begin(&mut self) -> bool {
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
            self.look_at_thread(now);
            self.forget();
            self.counted = now;
        }
        self.until = Some(later(self.until, now.wrapping_add(self.measured)));
    }

    /// The worker has slept by itself, for want of something to do.
    pub(super) fn slept(&mut self) {
        self.began = tsc::now();
        if self.until.is_some() {
            self.look_at_thread(self.began);
            self.counted = self.began;
        }
    }

    /// One round whose turns are measured, which `tasks` gives; the packets of all.
    #[cold]
    pub(crate) fn round(&mut self, tasks: impl FnOnce(&mut Self) -> usize) -> usize {
        // What was done between rounds, such as copies over again, is nobody's turn.
        if self.began.wrapping_sub(self.ended) > self.looks {
            self.look_at_thread(self.began);
        }
        (self.named, self.ended) = (0, self.began);
        let packets = tasks(self);
        self.end();
        if is_past(self.ended, self.looked.wrapping_add(self.looks)) {
            self.look_at_thread(self.ended);
        }
        if self.until.is_some_and(|until| is_past(self.ended, until)) {
            self.until = None;
        }
        packets
    }

    /// Gives `port` a turn with what was received there, or a task that is no port's, unless it has to wait; the packets that it had.
    /// Such tasks ask in the same order in each round.
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
            self.stats.counter(0).add(1);
            self.count(party, 2, 1);
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

    /// In the present turn, no packet could go on: nobody waits for that.
    pub(crate) fn set_stuck(&mut self) {
        self.stuck = true;
    }

    /// In another one's turn, so many packets are sent to `port`, unless that one rests; whether they were. It is the other's time, but for
    /// what the worker has slept, and for what is dear.
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
        if ticks > self.asked {
            let (ran, is_dear) = self.long_turn(party, ticks, packets, now);
            self.ended = self.ended.wrapping_add(if is_dear { ticks } else { ticks - ran });
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
            dear: None,
        };
        self.parties.resize(self.parties.len().max(party + 1), new);
        self.parties[party].is_known = true;
        let known = self.parties.iter().filter(|party| party.is_known).count();
        self.long = tsc::ticks(LONG) * known.max(2) as u64;
    }

    fn waits(&self, party: usize, now: u64) -> bool {
        self.rests(party, now) || self.parties[party].used > self.least + self.ahead
    }

    fn rests(&self, party: usize, now: u64) -> bool {
        self.rest != 0 && !is_past(now, self.rest) && is_before(now, self.parties[party].slow)
    }

    /// A party's turn has ended, which had so many packets.
    fn charge(&mut self, party: usize, now: u64, packets: usize) {
        let began = std::mem::replace(&mut self.ended, now);
        let mut ticks = now.wrapping_sub(began);
        let longest = self.stats.counter(1);
        longest.add(ticks.saturating_sub(longest.value()));
        if ticks > self.asked {
            (ticks, _) = self.long_turn(party, ticks, packets, now);
        }
        if packets > 0 {
            self.count(party, 0, ticks);
        }
        let party = &mut self.parties[party];
        party.used += ticks;
        if packets == 0 {
            let since = *party.empty.get_or_insert(began);
            party.idle |= now.wrapping_sub(since) > self.linger.min(LINGERS * party.cost);
            return;
        }
        (party.empty, party.idle, party.cost) = (None, false, ticks);
        if ticks > self.turn {
            party.burst = (packets.min(party.burst) / 2).max(1);
        } else if packets >= party.burst && ticks < self.turn / 2 {
            party.burst = (party.burst * 2).min(BURST);
        }
    }

    /// How many of `ticks` until `now` the thread has run in, for so many packets of the party, and whether that is dear. If it has slept,
    /// that was for the party's memory.
    #[cold]
    fn long_turn(&mut self, party: usize, ticks: u64, packets: usize, now: u64) -> (u64, bool) {
        let (before, elapsed) = (self.usage, now.wrapping_sub(self.looked));
        self.look_at_thread(now);
        // What it has not run since it was last looked at, it has not run in the longest turn since, which is this one.
        let paused = elapsed.saturating_sub(self.usage.ran.saturating_sub(before.ran));
        let ran = ticks.saturating_sub(paused);
        // If it was preempted as well, nobody knows which of the two took long.
        let is_sleep = self.usage.sleeps != before.sleeps && self.usage.preempted == before.preempted;
        let slept = if is_sleep { ticks - ran } else { 0 };
        let is_dear = ran > self.dear.max(self.asked.saturating_mul(packets as u64));
        let mut rest = if slept > self.dear { slept } else { 0 };
        if is_dear || slept > 0 {
            // Once may be the machine's, or somebody else's short sleep.
            if is_before(now, self.parties[party].dear) {
                rest = if is_dear { ticks } else { slept };
            }
            self.parties[party].dear = Some(self.remembered(if is_dear { ran } else { slept }, now));
        }
        if slept > 0 {
            self.stats.counter(2).add(1);
            self.stats.counter(3).add(slept);
            self.count(party, 3, slept);
        }
        if rest > 0 {
            self.parties[party].slow = Some(later(self.parties[party].slow, self.remembered(rest, now)));
            let until = now.wrapping_add(rest);
            self.rest = later((self.rest != 0).then_some(self.rest), until).max(1);
            // Those that rest are not forgotten meanwhile.
            self.until = self.until.map(|measured| later(Some(measured), until));
        }
        (ran, is_dear)
    }

    /// Until when so many ticks are remembered.
    fn remembered(&self, ticks: u64, now: u64) -> u64 {
        now.wrapping_add(ticks.saturating_mul(REMEMBERED).min(self.measured).max(ticks))
    }

    /// Adds to one of the [`PORT_COUNTERS`], if the party is a port that is counted.
    fn count(&self, party: usize, counter: usize, more: u64) {
        let index = COUNTERS.len() + party / 2 * PORT_COUNTERS.len() + counter;
        if party.is_multiple_of(2) && index < self.stats.len() {
            self.stats.counter(index).add(more);
        }
    }

    fn look_at_thread(&mut self, now: u64) {
        (self.usage, self.looked) = ((self.look)(), now);
    }

    /// Nobody is ahead of anybody.
    fn forget(&mut self) {
        self.parties.iter_mut().for_each(|party| party.used = self.least);
    }

    /// All have had their turns. Nobody waits for those without packets, or for those that rest.
    fn end(&mut self) {
        let mut least = u64::MAX;
        let round = self.ended.wrapping_sub(std::mem::replace(&mut self.counted, self.ended));
        for party in 0..self.parties.len() {
            if self.parties[party].idle {
                continue;
            }
            self.count(party, 1, round);
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

/// Whether the TSC has come to `until`.
fn is_past(now: u64, until: u64) -> bool {
    now.wrapping_sub(until) as i64 >= 0
}

/// Whether there is a time that the TSC has not come to.
fn is_before(now: u64, until: Option<u64>) -> bool {
    until.is_some_and(|until| !is_past(now, until))
}

/// The later one of two times.
fn later(one: Option<u64>, other: u64) -> u64 {
    one.filter(|&one| is_past(one, other)).unwrap_or(other)
}

impl Usage {
    fn of_thread() -> Self {
        // What getrusage says of time is as of the kernel's last tick.
        let ran = Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
        let (sleeps, preempted) = getrusage(UsageWho::RUSAGE_THREAD).map_or((0, 0), |usage| {
            (usage.voluntary_context_switches(), usage.involuntary_context_switches())
        });
        Self { ran: tsc::ticks(ran), sleeps, preempted }
    }
}

#[cfg(test)]
mod tests;
