//! A link in virtual time between a [`Recovery`] sender and a receiver that acknowledges as Linux does.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use offcore_stats::random::SplitMix;
use offcore_stats::time::{Micros, Time};

use super::super::*;

pub(super) const MB: u64 = 1 << 20;

/// The behaviour of the network.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    /// Bytes per second.
    pub(super) rate: u64,
    /// One-way delay.
    pub(super) delay: Micros,
    /// Length of the link's queue in bytes. Further segments are dropped.
    pub(super) queue: u64,
    pub(super) loss: f64,
    pub(super) ack_loss: f64,
    /// The probability of an additional delay of `late`.
    pub(super) reorder: f64,
    pub(super) late: Micros,
    pub(super) duplicate: f64,
    /// Marks instead of drops when the queue is half full.
    pub(super) marks: bool,
    pub(super) seed: u64,
}

impl Default for Link {
    /// 100 Mbit/s, 20 ms, and a queue of the bandwidth-delay product.
    fn default() -> Self {
        Self {
            rate: 12_500_000,
            delay: Micros::from_millis(10),
            queue: 250_000,
            loss: 0.0,
            ack_loss: 0.0,
            reorder: 0.0,
            late: Micros::ZERO,
            duplicate: 0.0,
            marks: false,
            seed: 1,
        }
    }
}

/// The negotiated options and the parameters of both endpoints.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    pub(super) algorithm: Algorithm,
    pub(super) sack: bool,
    pub(super) timestamps: bool,
    pub(super) mss: u32,
    /// Number of segments that are published together.
    pub(super) burst: u64,
    /// Duration of a copy, from plan to port.
    pub(super) copy: Micros,
    /// The peer's window.
    pub(super) window: u64,
    /// Maximum pacing rate in bytes per second.
    pub(super) pacing: u64,
    /// Bytes per write, and the time between two writes. Without an interval all data is written at the start.
    pub(super) writes: (u64, Micros),
}

impl Default for Peer {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Cubic,
            sack: true,
            timestamps: true,
            mss: 1448,
            burst: 1,
            copy: Micros::ZERO,
            window: 4 << 20,
            pacing: u64::MAX,
            writes: (0, Micros::ZERO),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A copy is complete: the data is passed to the port.
    Publish {
        range: (u64, u64),
        repeat: bool,
    },
    /// A segment arrives that was sent at `sent`.
    Segment {
        range: (u64, u64),
        sent: Time,
        marked: bool,
    },
    Answer {
        una: u64,
        sacks: Vec<(u64, u64)>,
        dsack: Option<(u64, u64)>,
        echo: Time,
        ece: bool,
    },
    /// The receiver's delayed ACK is due, unless it was replaced.
    Delayed {
        number: u64,
    },
    Write,
}

/// The result of a transfer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Report {
    pub(super) took: Micros,
    pub(super) stats: Stats,
    /// Segments that the network dropped.
    pub(super) dropped: u64,
    /// Segments that the receiver already had.
    pub(super) useless: u64,
    pub(super) most_runs: usize,
    /// Maximum queue length of the link in bytes, from one second after the start.
    pub(super) most_queued: u64,
}

impl Report {
    /// Returns the rate of a transfer of `bytes` bytes, in bytes per second.
    pub(super) fn rate(&self, bytes: u64) -> f64 {
        bytes as f64 * 1e6 / self.took.get() as f64
    }
}

/// A receiver according to RFC 5681, with SACK and DSACK.
#[derive(Debug, Default)]
struct Receiver {
    next: u64,
    /// Received ranges as a map from start to end.
    held: BTreeMap<u64, u64>,
    /// The most recent range is reported first.
    recent: VecDeque<u64>,
    unacked: u64,
    delayed: u64,
    echo: Time,
    ece: bool,
    useless: u64,
}

impl Receiver {
    /// Processes a segment. Returns the range that was already received.
    fn take(&mut self, range: (u64, u64), sent: Time) -> Option<(u64, u64)> {
        let (from, to) = range;
        let inside = self.held.range(..=from).next_back().is_some_and(|(_, &end)| end >= to);
        if to <= self.next || inside {
            self.useless += 1;
            if to <= self.next {
                self.echo = self.echo.max(sent);
            }
            return Some(range);
        }
        if from <= self.next {
            // RFC 7323, section 4.3: the echo is from the last in-sequence segment.
            self.echo = sent;
        }
        let (mut start, mut end) = (from, to);
        while let Some((&other, &other_end)) = self.held.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            (start, end) = (start.min(other), end.max(other_end));
            self.held.remove(&other);
        }
        if start <= self.next {
            self.next = end;
        } else {
            self.held.insert(start, end);
            self.recent.push_front(from);
            self.recent.truncate(16);
        }
        None
    }

    fn blocks(&self) -> Vec<(u64, u64)> {
        let mut blocks = Vec::new();
        for at in &self.recent {
            let Some((&from, &to)) = self.held.range(..=at).next_back() else { continue };
            if to > *at && !blocks.contains(&(from, to)) && blocks.len() < 3 {
                blocks.push((from, to));
            }
        }
        blocks
    }
}

/// A transfer over a link.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) sender: Recovery,
    link: Link,
    peer: Peer,
    random: SplitMix,
    receiver: Receiver,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    number: u64,
    now: Time,
    /// The time at which the link's queue is empty. Transfers may share it.
    busy: Rc<Cell<Time>>,
    bytes: u64,
    written: u64,
    report: Report,
    /// Numbers of the segments to drop, from 1.
    pub(super) victims: Vec<u64>,
    /// All segments sent in this period are lost, or with `pause`, delayed until its end.
    pub(super) outage: Range<Time>,
    pub(super) pause: bool,
    sent: u64,
}

impl Transfer {
    pub(super) fn new(link: Link, peer: Peer, bytes: u64) -> Self {
        let mut sender = Recovery::new(peer.mss, peer.algorithm, peer.sack, peer.timestamps);
        sender.first_rtt(Time::from_secs(1), 2 * link.delay);
        sender.set_max_pacing_rate(peer.pacing);
        Self {
            sender,
            link,
            peer,
            random: SplitMix::new(link.seed),
            receiver: Receiver::default(),
            events: BinaryHeap::new(),
            number: 0,
            now: Time::from_secs(1),
            busy: Rc::default(),
            bytes,
            written: if peer.writes.1 == Micros::ZERO { bytes } else { 0 },
            report: Report::default(),
            victims: Vec::new(),
            outage: Time::ZERO..Time::ZERO,
            pause: false,
            sent: 0,
        }
    }

    fn at(&mut self, time: Time, event: Event) {
        self.number += 1;
        self.events.push(Reverse((time, self.number, event)));
    }

    /// Uses the queue and the rate of another transfer's link.
    pub(super) fn share(&mut self, other: &Self) {
        self.busy = Rc::clone(&other.busy);
    }

    pub(super) fn begin(&mut self, at: Time) {
        self.now = at;
        if self.peer.writes.1 > Micros::ZERO {
            self.at(at, Event::Write);
        }
        self.send();
    }

    /// Writes all remaining data.
    pub(super) fn write_all(&mut self) {
        self.written = self.bytes;
        self.send();
    }

    /// Changes the one-way delay of the path.
    pub(super) fn set_delay(&mut self, delay: Micros) {
        self.link.delay = delay;
    }

    /// Returns the time of the next step.
    pub(super) fn next(&self) -> Time {
        let event = self.events.peek().map(|Reverse((time, ..))| *time);
        event.into_iter().chain(self.sender.deadline()).min().unwrap_or(Time::NEVER)
    }

    pub(super) fn step(&mut self) {
        let due = self.sender.deadline();
        let next = self.events.peek().map(|Reverse((time, ..))| *time);
        match (due, next) {
            (Some(due), next) if next.is_none_or(|next| due < next) => {
                self.now = self.now.max(due);
                self.act();
            }
            (_, Some(_)) => {
                let Some(Reverse((time, _, event))) = self.events.pop() else { return };
                self.now = self.now.max(time);
                self.handle(event);
            }
            _ => panic!("stalled at {:?}: {:?}", self.now, self.sender),
        }
        self.check();
    }

    /// Runs until every byte is acknowledged.
    pub(super) fn run(mut self) -> Report {
        let begin = self.now;
        self.begin(begin);
        let mut steps = 0_u64;
        while self.sender.una() < self.bytes {
            steps += 1;
            assert!(steps < 20_000_000, "no end: {:?}", self.sender);
            self.step();
        }
        assert_eq!(self.receiver.next, self.bytes);
        assert_eq!(self.sender.pipe(), 0, "{:?}", self.sender);
        while self.sender.is_held() {
            self.sender.timer(self.next());
        }
        assert_eq!(self.sender.deadline(), None);
        Report {
            took: self.now - begin,
            stats: self.sender.stats(),
            useless: self.receiver.useless,
            ..self.report
        }
    }

    fn check(&mut self) {
        let (sender, most) = (&self.sender, self.sender.planned_to() - self.sender.una());
        assert!(sender.pipe() <= most);
        assert!(sender.una() <= sender.published_to() && sender.published_to() <= sender.planned_to());
        assert!(self.receiver.next >= sender.una());
        self.report.most_runs = self.report.most_runs.max(sender.runs.len());
    }

    fn act(&mut self) {
        let action = self.sender.timer(self.now);
        assert!(self.sender.backoffs() < 15, "{:?}", self.sender);
        if !self.send() && action == TimerAction::Probe {
            let probe = self.sender.next_probe();
            if let Some(range) = probe {
                self.order(range, true);
            }
        }
    }

    /// Plans data within the windows. Returns whether it has planned any.
    fn send(&mut self) -> bool {
        let mut sent = false;
        let mss = u64::from(self.peer.mss);
        while let Some(range) = self.sender.next_lost((mss * self.peer.burst) as u32) {
            self.order(range, true);
            sent = true;
        }
        loop {
            let from = self.sender.planned_to();
            let edge = self.written.min(self.sender.una() + self.peer.window);
            let room = self.sender.window(self.now).min(edge.saturating_sub(from));
            let len = room.min(mss * self.peer.burst);
            // Silly window avoidance (RFC 9293, section 3.8.6.2.1).
            if len == 0 || (len < mss && from + len < self.written) {
                if from == self.written {
                    self.sender.lacks_data();
                }
                return sent || self.sender.has_nothing_new() && self.send();
            }
            self.sender.plan_new(self.now, len);
            self.order(from..from + len, false);
            sent = true;
        }
    }

    fn order(&mut self, range: Range<u64>, repeat: bool) {
        let range = (range.start, range.end);
        self.at(self.now + self.peer.copy, Event::Publish { range, repeat });
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Publish { range, repeat } => {
                if repeat && range.1 <= self.sender.una() {
                    self.sender.unplanned(range.0..range.1);
                } else {
                    self.sender.published(self.now, range.0..range.1, repeat);
                    self.transmit(range);
                }
            }
            Event::Segment { range, sent, marked } => self.receive(range, sent, marked),
            Event::Answer { una, sacks, dsack, echo, ece } => {
                let rtt_sample =
                    (echo > Time::ZERO).then(|| Micros::from_millis(self.now.as_millis() - echo.as_millis()));
                let ack = Ack { una, sacks: &sacks, dsack, rtt_sample, ece, ..Ack::default() };
                self.sender.ack(self.now, &ack);
                self.send();
            }
            Event::Write => {
                let (bytes, every) = self.peer.writes;
                self.written = self.bytes.min(self.written + bytes);
                if self.written < self.bytes {
                    self.at(self.now + every, Event::Write);
                }
                self.send();
            }
            Event::Delayed { number } => {
                if self.receiver.delayed == number && self.receiver.unacked > 0 {
                    self.answer(None);
                }
            }
        }
    }

    /// Transmits a packet's segments on the link.
    fn transmit(&mut self, range: (u64, u64)) {
        let mut from = range.0;
        while from < range.1 {
            let to = range.1.min(from + u64::from(self.peer.mss));
            let copies = 1 + u64::from(self.random.happens(self.link.duplicate));
            for _ in 0..copies {
                self.transmit_segment((from, to));
            }
            from = to;
        }
    }

    fn transmit_segment(&mut self, range: (u64, u64)) {
        self.sent += 1;
        let waiting = self.busy.get().saturating_since(self.now).get() * self.link.rate / 1_000_000;
        if self.now > Time::from_secs(2) {
            self.report.most_queued = self.report.most_queued.max(waiting);
        }
        let out = self.outage.contains(&self.now);
        let full = waiting + (range.1 - range.0) > self.link.queue && !(out && self.pause);
        let chance = self.random.happens(self.link.loss);
        if full || chance || self.victims.contains(&self.sent) || (out && !self.pause) {
            self.report.dropped += 1;
            return;
        }
        if out {
            self.busy.set(self.busy.get().max(self.outage.end));
        }
        let took = Micros::new((range.1 - range.0 + 52) * 1_000_000 / self.link.rate);
        self.busy.set(self.busy.get().max(self.now) + took);
        let late = if self.random.happens(self.link.reorder) {
            self.link.late.random(&mut self.random)
        } else {
            Micros::ZERO
        };
        let marked = self.link.marks && waiting > self.link.queue / 2;
        let at = self.busy.get() + self.link.delay + late;
        self.at(at, Event::Segment { range, sent: self.now, marked });
    }

    fn receive(&mut self, range: (u64, u64), sent: Time, marked: bool) {
        self.receiver.ece |= marked;
        if self.sender.cwr_due() {
            // The segment with CWR would have arrived half a round trip later.
            self.sender.cwr_sent();
            self.receiver.ece = marked;
        }
        let before = self.receiver.next;
        let dsack = self.receiver.take(range, sent);
        self.receiver.unacked += 1;
        let in_order = before == range.0 && self.receiver.next == range.1;
        if !in_order || !self.receiver.held.is_empty() || self.receiver.unacked >= 2 {
            return self.answer(dsack);
        }
        self.receiver.delayed += 1;
        let number = self.receiver.delayed;
        self.at(self.now + Micros::from_millis(40), Event::Delayed { number });
    }

    fn answer(&mut self, dsack: Option<(u64, u64)>) {
        self.receiver.unacked = 0;
        if self.random.happens(self.link.ack_loss) {
            return;
        }
        let (sacks, dsack) = match self.peer.sack {
            true => (self.receiver.blocks(), dsack),
            false => (Vec::new(), None),
        };
        let echo = if self.peer.timestamps { self.receiver.echo } else { Time::ZERO };
        let (una, ece) = (self.receiver.next, self.receiver.ece);
        self.at(self.now + self.link.delay, Event::Answer { una, sacks, dsack, echo, ece });
    }
}
