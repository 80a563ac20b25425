//! Processing of ACKs.

use offcore_stats::time::{Micros, Time};

use super::cc::Progress;
use super::delivery::Delivery;
use super::probe::ProbeAck;
use super::{Algorithm, GRANULARITY, Recovery, State};

/// Maximum number of SACK blocks processed per ACK: 4 fit into the options, or 3 beside timestamps (RFC 2018, section
/// 3). Each splits at most two runs.
const BLOCKS: usize = 4;
/// DupThresh of RFC 5681 and 8985.
const THRESHOLD: u32 = 3;

/// The fields of an ACK that recovery needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ack<'a> {
    /// The next byte that the receiver expects.
    pub(crate) una: u64,
    /// SACK blocks without the DSACK: the first position and the one after the last.
    pub(crate) sacks: &'a [(u64, u64)],
    /// The range that the receiver got twice (RFC 2883).
    pub(crate) dsack: Option<(u64, u64)>,
    /// Time since the segment with the echoed timestamp was sent.
    pub(crate) rtt_sample: Option<Micros>,
    /// The ACK has ECE, and ECN was negotiated.
    pub(crate) ece: bool,
    /// The advertised window differs from the previous one.
    pub(crate) window_changed: bool,
    /// The segment has payload, SYN or FIN.
    pub(crate) has_data: bool,
}

/// The effects of an ACK.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Acked {
    /// Bytes newly covered by the cumulative ACK.
    pub(crate) newly_acked: u64,
    /// Bytes newly covered by SACK.
    pub(crate) newly_sacked: u64,
    /// Bytes newly marked lost.
    pub(crate) lost: u64,
    /// The ACK showed that a reduction was spurious; the reduction was undone.
    pub(crate) spurious: bool,
    /// The ACK ended a recovery.
    pub(crate) recovered: bool,
}

impl Recovery {
    /// Processes an ACK. In an old ACK only the SACK blocks are used. An ACK beyond the published data is ignored.
    #[inline]
    pub(crate) fn ack(&mut self, now: Time, ack: &Ack) -> Acked {
        let before = self.runs.una;
        let plain = ack.sacks.is_empty() && ack.dsack.is_none() && !ack.ece;
        if !(plain && self.quiet() && ack.una <= self.runs.published && ack.una > before) {
            // This is the case for every segment of a peer to which no data is sent.
            let is_nothing = plain && ack.una == before && before == self.runs.published && self.quiet();
            return if is_nothing { Acked::default() } else { self.ack_slow(now, ack) };
        }
        // Everything was sent once, so the send times are valid samples.
        let (first, last) = self.runs.advance_plain(ack.una);
        let rtt = now.saturating_since(last);
        self.rack.advance(ack.una, last, rtt);
        self.rtt.least(now, rtt);
        self.rtt.sample(now.saturating_since(first));
        self.rtt.advanced();
        self.grow(now, before, ack.una - before, false);
        if self.paced.is_some() {
            self.model_ack(now, before, ack.una - before, true);
        }
        self.rearm(now, true);
        Acked { newly_acked: ack.una - before, ..Acked::default() }
    }

    /// Returns whether no data is in flight.
    #[inline]
    pub(in crate::proto) fn is_done(&self) -> bool {
        self.runs.una == self.runs.published && self.quiet()
    }

    /// Returns whether no data is lost or in doubt. An ACK then only advances the acknowledged position.
    #[inline]
    fn quiet(&self) -> bool {
        self.phase.is_open()
            && self.runs.sacked | self.runs.lost | self.runs.replanned | self.duplicates == 0
            && (self.probe.is_none() || self.probe.is_next())
            && !self.runs.repeats()
    }

    /// Returns the latest possible send time of the segment whose timestamp the ACK echoes.
    fn echo(&self, now: Time, ack: &Ack) -> Option<Time> {
        let sample = ack.rtt_sample.filter(|_| self.timestamps)?;
        Some(now.saturating_sub(sample).saturating_add(GRANULARITY))
    }

    /// Updates the round-trip time estimates and RACK's state from the delivered data.
    fn estimate(&mut self, now: Time, ack: &Ack, delivery: &Delivery) {
        if let Some(rtt) = delivery.once {
            self.rtt.least(now, rtt);
        }
        self.rack.deliver(delivery);
        if delivery.acked == 0 {
            return;
        }
        // An ACK of retransmitted data yields a sample only through its timestamp (RFC 6298, section 3; Karn).
        let own = delivery.first.filter(|_| !delivery.repeated).map(|first| now.saturating_since(first));
        let echoed = ack.rtt_sample.filter(|_| self.timestamps);
        if let Some(sample) = own.or(echoed) {
            self.rtt.sample(sample);
        }
    }

    /// Grows the window if it limited the acknowledged data (RFC 7661, section 4). `restart`: slow start after a
    /// timeout, whose last ACK also counts.
    #[inline]
    fn grow(&mut self, now: Time, before: u64, acked: u64, restart: bool) {
        if acked == 0 {
            return;
        }
        let flight = self.planned - before;
        let started = self.cc.cwnd >= self.cc.ssthresh;
        let limited = before < self.limited || (!started && u64::from(self.cc.cwnd) < 2 * flight);
        if limited || restart {
            let progress = Progress { una: self.runs.una, sent: self.runs.published, rtt: self.rack.rtt() };
            self.cc.on_ack(now, acked, self.rtt.srtt(), &progress);
        } else {
            self.cc.on_unlimited(now);
        }
    }

    /// Restarts or stops timers after an ACK.
    #[inline]
    fn rearm(&mut self, now: Time, advanced: bool) {
        if self.probe.is_next() && advanced {
            self.probe.forget();
        }
        if self.runs.is_empty() {
            return self.stop_timers();
        }
        if advanced {
            self.rtt.restart(now);
        }
        if advanced || self.runs.sacked > 0 {
            self.arm_probe(now);
        }
    }

    #[inline(never)]
    fn ack_slow(&mut self, now: Time, ack: &Ack) -> Acked {
        let before = self.runs.una;
        let flight = self.runs.published - before;
        if ack.una > self.runs.published {
            return Acked::default();
        }
        let mut delivery = self.rack.delivery(now, self.echo(now, ack), self.rtt.min());
        self.runs.advance(ack.una, &mut delivery);
        if self.sack {
            self.take_sacks(ack, &mut delivery);
        }
        self.estimate(now, ack, &delivery);
        let advanced = delivery.acked > 0;
        if advanced {
            self.rtt.advanced();
        }
        if delivery.reordered {
            self.episode.get_or_insert_default().stats.reordered += 1;
        }
        self.take_dsack(ack);
        let delivered = if self.sack {
            delivery.fresh + delivery.sacked
        } else {
            self.take_duplicate(ack, advanced, delivery.acked)
        };
        let mut spurious = self.detect_spurious_reduction(now, ack, &delivery);
        let reduced = self.take_probe_ack(now, ack, advanced);
        let restart = self.phase.state() == State::Loss;
        let (recovered, needless) = self.leave();
        spurious |= needless;
        let lost = self.find_lost(now, advanced);
        if lost > 0 && self.phase.is_open() {
            self.enter(now, flight, delivered);
        }
        let marked = ack.ece && self.take_mark(now, flight);
        match self.phase.state() {
            State::Recovery => self.reduce(delivered, advanced && lost == 0),
            // The window was just set.
            _ if recovered && !restart || spurious || reduced || marked || ack.ece => {}
            State::Open | State::Loss => {
                // After a timeout an ACK also covers segments that arrived earlier. With SACK they are known and do not
                // count. Without SACK an ACK counts for one segment at most (RFC 3465, section 2.3).
                let acked = match (restart, self.sack) {
                    (false, _) => delivery.acked,
                    (true, true) if advanced => delivered,
                    (true, _) => delivery.acked.min(self.cc.mss.into()),
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
                // An ACK that was overtaken by a newer one.
                continue;
            }
            if from <= self.runs.una || from >= to || to > self.runs.published {
                self.episode.get_or_insert_default().stats.bad_sacks += 1;
                continue;
            }
            self.runs.sack(from, to, delivery);
        }
    }

    /// Widens RACK's reordering window after a premature retransmission.
    fn take_dsack(&mut self, ack: &Ack) {
        if ack.dsack.is_none() && self.episode.is_none() {
            return;
        }
        let episode = self.episode.get_or_insert_default();
        episode.stats.duplicates += u32::from(ack.dsack.is_some());
        episode.reordering.on_ack(self.runs.una, self.runs.published, ack.dsack.is_some());
    }

    /// Counts duplicate ACKs without SACK. Each stands for a segment that arrived (RFC 5681, section 2 and 3.2).
    /// Returns the number of bytes delivered according to them.
    fn take_duplicate(&mut self, ack: &Ack, advanced: bool, acked: u64) -> u64 {
        let mss = u64::from(self.cc.mss);
        if advanced {
            // One segment is the missing one. Duplicate ACKs have already counted the others.
            let others = u32::try_from((acked - 1) / mss).unwrap_or(u32::MAX);
            let known = self.duplicates.min(others);
            self.duplicates = if self.phase.is_recovery() { self.duplicates - known } else { 0 };
            return acked - u64::from(known) * mss;
        }
        let repeats = ack.una == self.runs.una && !ack.has_data && !ack.window_changed;
        // No more segments can have arrived than were sent. After a timeout, duplicate ACKs refer to earlier segments.
        let most = match self.phase.state() {
            State::Open if self.phase.may_reduce_window(self.runs.una) => THRESHOLD,
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

    /// Returns whether the ACK shows that the last reduction was spurious, and undoes it in that case (RFC 4015,
    /// section 3.2).
    fn detect_spurious_reduction(&mut self, now: Time, ack: &Ack, delivery: &Delivery) -> bool {
        let advanced = delivery.acked > 0;
        let echo = self.echo(now, ack);
        let (open, una) = (self.phase.is_open(), self.runs.una);
        let Some(episode) = &mut self.episode else { return false };
        let twice = ack.dsack.is_some_and(|range| episode.undo.on_duplicate(range, una));
        let late = advanced && !open && episode.undo.on_echo(echo);
        if (twice || late || self.phase.is_refuted(delivery.original)) && self.undo() {
            return true;
        }
        self.phase.check_ack(advanced, delivery.sacked);
        false
    }

    /// Undoes the last reduction. Returns `false` without a reduction to undo.
    fn undo(&mut self) -> bool {
        let Some(episode) = &mut self.episode else { return false };
        let Some(before) = episode.undo.take() else { return false };
        episode.stats.spurious += 1;
        let (cwnd, mss) = (self.cc.cwnd.max(before.cwnd), self.cc.mss);
        self.cc = before;
        self.cc.cwnd = cwnd;
        self.cc.set_mss(mss);
        self.phase.end();
        self.duplicates = 0;
        self.runs.find_all();
        self.model_recovered(true);
        true
    }

    /// Evaluates the probe (RFC 8985, section 7.4.2). Returns whether the probe repaired a loss, so that the window is
    /// reduced.
    fn take_probe_ack(&mut self, now: Time, ack: &Ack, advanced: bool) -> bool {
        let repeats = !advanced && ack.sacks.is_empty() && !ack.has_data;
        match self.probe.on_ack(self.runs.una, ack.dsack.map(|range| range.1), repeats) {
            ProbeAck::Nothing => false,
            ProbeAck::Needless => {
                self.note_spurious_probe();
                false
            }
            ProbeAck::Repaired => {
                self.episode.get_or_insert_default().probe_wait = Micros::ZERO;
                self.model_mark(now);
                self.cc.on_loss(u64::from(self.cc.cwnd));
                self.cc.cwnd = self.cc.cwnd.min(self.cc.ssthresh);
                self.phase.reduced(self.runs.published);
                true
            }
        }
    }

    /// Ends recovery when all data sent before it is acknowledged. Returns whether recovery ended, and whether it was
    /// spurious.
    fn leave(&mut self) -> (bool, bool) {
        if !self.phase.is_over(self.runs.una) {
            return (false, false);
        }
        // BBR has no threshold.
        if !self.model_recovered(false) && self.phase.is_recovery() && self.cc.ssthresh < u32::MAX {
            self.cc.cwnd = self.cc.ssthresh;
        }
        self.phase.end();
        self.duplicates = 0;
        let Some(episode) = &mut self.episode else { return (true, false) };
        episode.reordering.on_recovered();
        let untouched = episode.undo.on_recovered(self.runs.published);
        (true, untouched && self.undo())
    }

    /// Marks lost data, and returns the number of bytes that were not lost before.
    pub(super) fn find_lost(&mut self, now: Time, advanced: bool) -> u64 {
        let third = self.phase.is_open() && self.duplicates >= THRESHOLD;
        // RFC 6582, section 3.2: a partial ACK indicates that the next segment is also lost.
        let partial = self.phase.is_recovery() && advanced;
        let lost = if self.sack {
            self.find_overdue(now)
        } else if third || partial {
            self.runs.mark_head_lost(self.cc.mss)
        } else {
            0
        };
        if lost > 0 {
            self.model_lost(now, lost);
        }
        lost
    }

    /// Detects losses with RACK (RFC 8985, section 6.2, steps 4 and 5).
    fn find_overdue(&mut self, now: Time) -> u64 {
        // RACK.reordering_seen.
        let reordering = self.episode.as_ref().is_some_and(|episode| episode.stats.reordered > 0);
        let eager = !reordering && (!self.phase.is_open() || self.runs.segments >= THRESHOLD);
        let least = self.rtt.min().unwrap_or_default();
        let srtt = self.rtt.srtt();
        let window = match &self.episode {
            _ if eager => Micros::ZERO,
            Some(episode) => episode.reordering.window(least, srtt),
            None => (least / 4).min(srtt),
        };
        self.rack.detect(now, window, &mut self.runs)
    }

    /// Begins fast recovery. `flight`: unacknowledged bytes before this ACK. `delivered`: bytes that the ACK delivered.
    pub(super) fn enter(&mut self, now: Time, flight: u64, delivered: u64) {
        self.model_recovery(now);
        let outside = u64::from(self.runs.sacked) + u64::from(self.duplicates) * u64::from(self.cc.mss);
        let left = (self.runs.published - self.runs.una).saturating_sub(outside);
        let episode = self.episode.get_or_insert_default();
        episode.undo.begin(self.cc, self.runs.una);
        episode.prr = super::prr::Prr::new(left + delivered);
        self.cc.on_loss(flight);
        self.phase.recover(self.runs.published);
        self.probe.forget();
    }

    /// Sets the window in fast recovery.
    pub(super) fn reduce(&mut self, delivered: u64, safe: bool) {
        let (pipe, ssthresh) = (self.pipe(), u64::from(self.cc.ssthresh));
        // BBR's model sets the window.
        let is_bbr = self.cc.algorithm() == Algorithm::Bbr;
        let Some(episode) = self.episode.as_mut().filter(|_| !is_bbr) else { return };
        let count = episode.prr.on_ack(delivered, pipe, ssthresh, u64::from(self.cc.mss), safe);
        // One segment is always allowed: with no data in flight, no ACK would open the window.
        self.cc.set((pipe + count).max(u64::from(self.cc.mss)));
    }

    /// Processes an ECN mark: one reduction per window (RFC 3168, section 6.1.2).
    fn take_mark(&mut self, now: Time, flight: u64) -> bool {
        if !self.phase.is_open() || !self.phase.may_reduce_window(self.runs.una) {
            return false;
        }
        self.model_mark(now);
        self.cc.on_loss(flight);
        self.cc.cwnd = self.cc.cwnd.min(self.cc.ssthresh);
        self.phase.reduced(self.runs.published);
        let episode = self.episode.get_or_insert_default();
        episode.undo.take();
        episode.stats.marks += 1;
        true
    }
}
