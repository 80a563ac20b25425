//! What an ACK does.

use super::cc::Progress;
use super::delivery::{Delivery, Newest};
use super::{Algorithm, Check, GRANULARITY, NEVER, NOWHERE, Probe, Recovery, State};

/// SACK blocks of an ACK that are looked at: no more fit beside timestamps but one (RFC 2018, section 3). Each splits two
/// runs at most.
const BLOCKS: usize = 4;
/// DupThresh of RFC 5681 and 8985.
const THRESHOLD: u32 = 3;

/// An ACK as far as recovery is concerned.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ack<'a> {
    /// The next byte that the receiver expects.
    pub(crate) una: u64,
    /// SACK blocks, first byte and the one after the last, without the DSACK.
    pub(crate) sacks: &'a [(u64, u64)],
    /// What the receiver had twice (RFC 2883).
    pub(crate) dsack: Option<(u64, u64)>,
    /// The time since the segment was sent that the timestamp echoes, in microseconds.
    pub(crate) rtt_sample: Option<u64>,
    /// The ACK has ECE, and ECN was negotiated.
    pub(crate) ece: bool,
    /// The window it advertises is not the one before.
    pub(crate) window_changed: bool,
    /// It has payload, SYN or FIN.
    pub(crate) has_data: bool,
}

/// What an ACK did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Acked {
    /// Bytes that the cumulative ACK covers and the one before did not.
    pub(crate) newly_acked: u64,
    /// Bytes that SACK covers since this ACK.
    pub(crate) newly_sacked: u64,
    /// Bytes that are lost since this ACK.
    pub(crate) lost: u64,
    /// It showed that a reduction was for nothing, which is undone.
    pub(crate) spurious: bool,
    /// It ended a recovery.
    pub(crate) recovered: bool,
}

impl Recovery {
    /// An ACK has come. Old ones change nothing but by their SACK blocks; one beyond what was published changes nothing.
    #[inline]
    pub(crate) fn ack(&mut self, now: u64, ack: &Ack) -> Acked {
        let before = self.runs.una;
        let plain = ack.sacks.is_empty() && ack.dsack.is_none() && !ack.ece;
        if !(plain && self.quiet() && ack.una <= self.runs.published && ack.una > before) {
            // With every segment of a peer that we send nothing to.
            let is_nothing = plain && ack.una == before && before == self.runs.published && self.quiet();
            return if is_nothing { Acked::default() } else { self.ack_slow(now, ack) };
        }
        // Everything was sent once, so the estimators take the times as they are.
        let (first, last) = self.runs.advance_plain(ack.una);
        let newest = Newest { time: last, end: ack.una };
        let rtt = now.saturating_sub(last);
        if newest >= self.newest {
            (self.newest, self.newest_rtt) = (newest, rtt);
        }
        self.highest = self.highest.max(ack.una);
        self.rtt.least(now, rtt);
        self.rtt.sample(now.saturating_sub(first));
        self.expired = 0;
        self.grow(now, before, ack.una - before, false);
        if self.paced.is_some() {
            self.model_ack(now, before, ack.una - before, true);
        }
        self.rearm(now, true);
        Acked { newly_acked: ack.una - before, ..Acked::default() }
    }

    /// Nothing is under way.
    #[inline]
    pub(in crate::proto) fn is_done(&self) -> bool {
        self.runs.una == self.runs.published && self.quiet()
    }

    /// Nothing is missing and nothing is doubtful: an ACK that advances is all there is to it.
    #[inline]
    fn quiet(&self) -> bool {
        self.state == State::Open
            && self.runs.sacked | self.runs.lost | self.runs.replanned | self.duplicates == 0
            && matches!(self.probe, Probe::None | Probe::Due | Probe::NewPlanned)
            && !self.runs.repeats()
    }

    fn delivery(&self, now: u64, ack: &Ack) -> Delivery {
        Delivery::new(now, self.newest, self.highest, self.echo(now, ack), self.rtt.min())
    }

    /// The latest that the segment was sent that the ACK echoes.
    fn echo(&self, now: u64, ack: &Ack) -> Option<u64> {
        let sample = ack.rtt_sample.filter(|_| self.timestamps)?;
        Some(now.saturating_sub(sample).saturating_add(GRANULARITY))
    }

    /// Takes round-trip times and what RACK keeps from what was delivered.
    fn estimate(&mut self, now: u64, ack: &Ack, delivery: &Delivery) {
        if let Some(rtt) = delivery.once {
            self.rtt.least(now, rtt);
        }
        if let Some(rtt) = delivery.rtt {
            (self.newest, self.newest_rtt) = (delivery.newest, rtt);
        }
        self.highest = delivery.highest;
        if delivery.acked == 0 {
            return;
        }
        // An ACK for what was sent twice gives no sample but by its timestamp (RFC 6298, section 3; Karn).
        let own = delivery.first.filter(|_| !delivery.repeated).map(|first| now.saturating_sub(first));
        let echoed = ack.rtt_sample.filter(|_| self.timestamps);
        if let Some(sample) = own.or(echoed) {
            self.rtt.sample(sample);
        }
    }

    /// The window grows, unless it was not what limited the data that is acknowledged (RFC 7661, section 4). `restart`: slow
    /// start after a timeout, whose last ACK counts too.
    #[inline]
    fn grow(&mut self, now: u64, before: u64, acked: u64, restart: bool) {
        if acked == 0 {
            return;
        }
        let flight = self.planned - before;
        let started = self.cc.cwnd >= self.cc.ssthresh;
        let limited = before < self.limited || (!started && u64::from(self.cc.cwnd) < 2 * flight);
        if limited || restart {
            let progress = Progress { una: self.runs.una, sent: self.runs.published, rtt: self.newest_rtt };
            self.cc.on_ack(now, acked, self.rtt.srtt(), &progress);
        } else {
            self.cc.on_unlimited(now);
        }
    }

    /// Timers after an ACK.
    #[inline]
    fn rearm(&mut self, now: u64, advanced: bool) {
        if matches!(self.probe, Probe::Due | Probe::NewPlanned) && advanced {
            self.forget_probe();
        }
        if self.runs.is_empty() {
            (self.timeout_at, self.probe_at, self.reorder_at) = (NEVER, NEVER, NEVER);
            return;
        }
        if advanced {
            // RFC 6298, section 5.3.
            self.timeout_at = now + self.rtt.rto();
        }
        if advanced || self.runs.sacked > 0 {
            self.arm_probe(now);
        }
    }

    #[inline(never)]
    fn ack_slow(&mut self, now: u64, ack: &Ack) -> Acked {
        let before = self.runs.una;
        let flight = self.runs.published - before;
        if ack.una > self.runs.published {
            return Acked::default();
        }
        let mut delivery = self.delivery(now, ack);
        self.runs.advance(ack.una, &mut delivery);
        if self.sack {
            self.take_sacks(ack, &mut delivery);
        }
        self.estimate(now, ack, &delivery);
        let advanced = delivery.acked > 0;
        if advanced {
            self.expired = 0;
        }
        if delivery.reordered {
            self.reordering = true;
            self.episode.get_or_insert_default().stats.reordered += 1;
        }
        self.take_dsack(ack);
        let delivered = if self.sack {
            delivery.fresh + delivery.sacked
        } else {
            self.take_duplicate(ack, advanced, delivery.acked)
        };
        let mut spurious = self.judge(now, ack, &delivery);
        let reduced = self.take_probe_ack(now, ack, advanced);
        let restart = self.state == State::Loss;
        let (recovered, needless) = self.leave();
        spurious |= needless;
        let lost = self.find_lost(now, advanced);
        if lost > 0 && self.state == State::Open {
            self.enter(now, flight, delivered);
        }
        let marked = ack.ece && self.take_mark(now, flight);
        match self.state {
            State::Recovery => self.reduce(delivered, advanced && lost == 0),
            // The window was just set.
            _ if recovered && !restart || spurious || reduced || marked || ack.ece => {}
            State::Open | State::Loss => {
                // After a timeout an ACK also covers segments that arrived earlier. With SACK they are known and do not count.
                // Without SACK an ACK counts for one segment at most (RFC 3465, section 2.3).
                let acked = match (restart, self.sack) {
                    (false, _) => delivery.acked,
                    (true, true) if advanced => delivered,
                    (true, _) => delivery.acked.min(self.mss.into()),
                };
                self.grow(now, before, acked, restart);
            }
        }
        if self.paced.is_some() {
            self.model_ack(now, before, delivered, delivery.rtt.is_some());
        }
        self.rearm(now, advanced);
        Acked { newly_acked: delivery.acked, newly_sacked: delivery.sacked, lost, spurious, recovered }
    }

    fn take_sacks(&mut self, ack: &Ack, delivery: &mut Delivery) {
        for &(from, to) in ack.sacks.iter().take(BLOCKS) {
            if to <= self.runs.una && from < to {
                // An ACK that was overtaken.
                continue;
            }
            if from <= self.runs.una || from >= to || to > self.runs.published {
                self.episode.get_or_insert_default().stats.bad_sacks += 1;
                continue;
            }
            self.runs.sack(from, to, delivery);
        }
    }

    /// Widens RACK's window for what was retransmitted too soon.
    fn take_dsack(&mut self, ack: &Ack) {
        if ack.dsack.is_none() && self.episode.is_none() {
            return;
        }
        let episode = self.episode.get_or_insert_default();
        episode.stats.duplicates += u32::from(ack.dsack.is_some());
        episode.reordering.on_ack(self.runs.una, self.runs.published, ack.dsack.is_some());
    }

    /// Counts duplicate ACKs where there is no SACK: each is a segment that arrived (RFC 5681, section 2 and 3.2). Returns
    /// the bytes that are delivered by that.
    fn take_duplicate(&mut self, ack: &Ack, advanced: bool, acked: u64) -> u64 {
        let mss = u64::from(self.mss);
        if advanced {
            // One segment is the one that was missing; for the others duplicates came already.
            let others = u32::try_from((acked - 1) / mss).unwrap_or(u32::MAX);
            let known = self.duplicates.min(others);
            self.duplicates = if self.state == State::Recovery { self.duplicates - known } else { 0 };
            return acked - u64::from(known) * mss;
        }
        let repeats = ack.una == self.runs.una && !ack.has_data && !ack.window_changed;
        // Not more can have arrived than was sent; and after a timeout ACKs repeat what was before it.
        let most = match self.state {
            State::Open if self.may_fall() => THRESHOLD,
            State::Open => THRESHOLD - 1,
            State::Recovery => u32::MAX,
            State::Loss => 0,
        };
        let out = (self.runs.published - self.runs.una).div_ceil(mss).saturating_sub(1);
        if !repeats || u64::from(self.duplicates) >= u64::from(most).min(out) {
            return 0;
        }
        self.duplicates += 1;
        mss
    }

    /// What is lost is not of a window that was reduced for (RFC 6582, section 4; RFC 3168, section 6.1.2).
    fn may_fall(&self) -> bool {
        self.recover == 0 || self.runs.una > self.recover
    }

    /// Whether the ACK shows that the last reduction was for nothing; undoes it then (RFC 4015, section 3.2).
    fn judge(&mut self, now: u64, ack: &Ack, delivery: &Delivery) -> bool {
        let advanced = delivery.acked > 0;
        let echo = self.echo(now, ack);
        let (state, una) = (self.state, self.runs.una);
        let Some(episode) = &mut self.episode else { return false };
        let twice = ack.dsack.is_some_and(|range| episode.undo.on_duplicate(range, una));
        let late = advanced && state != State::Open && episode.undo.on_echo(echo);
        // RFC 5682, section 3.1, step 3.b: some data that the timeout marked lost has arrived.
        let arrived = self.check != Check::None && delivery.original <= self.recover;
        if (twice || late || arrived) && self.undo() {
            return true;
        }
        self.check = match self.check {
            // Steps 2.b and 3.a: data that arrives after a hole confirms the hole.
            Check::Begun if advanced && delivery.sacked == 0 => Check::NewData,
            Check::NewData if advanced && delivery.sacked == 0 => Check::NewData,
            Check::Begun if delivery.sacked == 0 => Check::Begun,
            _ => Check::None,
        };
        false
    }

    /// Takes the last reduction back. False where there is none.
    fn undo(&mut self) -> bool {
        let Some(episode) = &mut self.episode else { return false };
        let Some(before) = episode.undo.take() else { return false };
        episode.stats.spurious += 1;
        let cwnd = self.cc.cwnd.max(before.cwnd);
        self.cc = before;
        self.cc.cwnd = cwnd;
        self.cc.set_mss(self.mss);
        (self.state, self.check) = (State::Open, Check::None);
        self.duplicates = 0;
        self.runs.find_all();
        self.model_recovered(true);
        true
    }

    /// What became of the probe (RFC 8985, section 7.4.2). True when it repaired a loss, and the window is reduced.
    fn take_probe_ack(&mut self, now: u64, ack: &Ack, advanced: bool) -> bool {
        let una = self.runs.una;
        if self.probe_end == NOWHERE || una < self.probe_end || self.probe == Probe::Planned {
            return false;
        }
        let repeats = !advanced && ack.sacks.is_empty() && !ack.has_data;
        let twice = ack.dsack.is_some_and(|range| range.1 == self.probe_end);
        if self.probe != Probe::Again || twice {
            if twice {
                self.probed_needlessly();
            }
            self.forget_probe();
        } else if una > self.probe_end {
            self.episode.get_or_insert_default().probe_wait = 0;
            self.forget_probe();
            self.model_mark(now);
            self.cc.on_loss(u64::from(self.cc.cwnd));
            self.cc.cwnd = self.cc.cwnd.min(self.cc.ssthresh);
            (self.recover, self.cwr) = (self.runs.published, true);
            return true;
        } else if repeats {
            self.forget_probe();
        }
        false
    }

    /// Ends recovery when everything sent before it is acknowledged. Returns whether that is so, and whether it was for
    /// nothing.
    fn leave(&mut self) -> (bool, bool) {
        if self.state == State::Open || self.runs.una < self.recover {
            return (false, false);
        }
        // BBR has no threshold.
        if !self.model_recovered(false) && self.state == State::Recovery && self.cc.ssthresh < u32::MAX {
            self.cc.cwnd = self.cc.ssthresh;
        }
        (self.state, self.check) = (State::Open, Check::None);
        self.duplicates = 0;
        let Some(episode) = &mut self.episode else { return (true, false) };
        episode.reordering.on_recovered();
        let untouched = episode.undo.on_recovered(self.runs.published);
        (true, untouched && self.undo())
    }

    /// Marks what is lost, and returns how many bytes that were not before.
    pub(super) fn find_lost(&mut self, now: u64, advanced: bool) -> u64 {
        let third = self.state == State::Open && self.duplicates >= THRESHOLD;
        // RFC 6582, section 3.2: a partial ACK tells that the next segment is missing also.
        let partial = self.state == State::Recovery && advanced;
        let lost = if self.sack {
            self.find_overdue(now)
        } else if third || partial {
            self.runs.lose_head(self.mss)
        } else {
            0
        };
        if lost > 0 {
            self.model_lost(now, lost);
        }
        lost
    }

    /// RACK (RFC 8985, section 6.2, step 4 and 5).
    fn find_overdue(&mut self, now: u64) -> u64 {
        let eager = !self.reordering && (self.state != State::Open || self.runs.segments >= THRESHOLD);
        let least = self.rtt.min().unwrap_or(0);
        let srtt = self.rtt.srtt();
        let window = match &self.episode {
            _ if eager => 0,
            Some(episode) => episode.reordering.window(least, srtt),
            None => (least / 4).min(srtt),
        };
        let wait = self.newest_rtt + window;
        let (lost, waiting) = self.runs.detect(self.newest, now.checked_sub(wait));
        self.reorder_at = waiting.map_or(NEVER, |sent| (sent + wait).max(now + 1));
        lost
    }

    /// Begins fast recovery. `flight`: bytes that were not acknowledged before this ACK, of which it delivered some.
    pub(super) fn enter(&mut self, now: u64, flight: u64, delivered: u64) {
        self.model_recovery(now);
        let outside = u64::from(self.runs.sacked) + u64::from(self.duplicates) * u64::from(self.mss);
        let left = (self.runs.published - self.runs.una).saturating_sub(outside);
        let episode = self.episode.get_or_insert_default();
        episode.undo.begin(self.cc, self.runs.una);
        episode.prr = super::prr::Prr::new(left + delivered);
        self.cc.on_loss(flight);
        self.state = State::Recovery;
        (self.recover, self.cwr) = (self.runs.published, true);
        self.forget_probe();
    }

    /// Sets the window in fast recovery.
    pub(super) fn reduce(&mut self, delivered: u64, safe: bool) {
        let (pipe, ssthresh) = (self.pipe(), u64::from(self.cc.ssthresh));
        // BBR's model sets the window.
        let is_bbr = self.cc.algorithm() == Algorithm::Bbr;
        let Some(episode) = self.episode.as_mut().filter(|_| !is_bbr) else { return };
        let count = episode.prr.on_ack(delivered, pipe, ssthresh, u64::from(self.mss), safe);
        // With nothing in flight no ACK would come that lets a segment go.
        self.cc.set((pipe + count).max(u64::from(self.mss)));
    }

    /// The ACK says that a router marked a segment: one reduction per window (RFC 3168, section 6.1.2).
    fn take_mark(&mut self, now: u64, flight: u64) -> bool {
        if self.state != State::Open || !self.may_fall() {
            return false;
        }
        self.model_mark(now);
        self.cc.on_loss(flight);
        self.cc.cwnd = self.cc.cwnd.min(self.cc.ssthresh);
        (self.recover, self.cwr) = (self.runs.published, true);
        let episode = self.episode.get_or_insert_default();
        episode.undo.take();
        episode.stats.marks += 1;
        true
    }
}
