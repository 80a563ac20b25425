//! Loss recovery and congestion control of one connection's sender.
//!
//! Pure code: positions are offsets in the stream (0 is the first byte of payload, the FIN occupies one position after
//! the last byte, the SYN none). Sent data passes two stages. It is *planned* when its copy is
//! submitted; from then on it counts against the window. It is *published* when the port has it; its timers start then.
//!
//! | subject | method |
//! |---|---|
//! | loss detection with SACK | RACK-TLP (RFC 8985); RFC 6675 only for the amount of data in flight |
//! | loss detection without SACK | three duplicate ACKs, NewReno (RFC 5681, 6582), limited transmit (RFC 3042) |
//! | timeout | RFC 6298 with Linux's minimum of 200 ms and maximum of 120 s |
//! | window in recovery | proportional rate reduction (RFC 6937, 9937) |
//! | window otherwise | NewReno (RFC 5681, 3465) or CUBIC (RFC 9438), RFC 3168 for ECN marks |
//! | undo | reductions that timestamps (Eifel, RFC 3522), DSACK (RFC 3708) or F-RTO prove spurious, as in RFC 4015 |
//!
//! F-RTO (RFC 5682) is the SACK variant, as on Linux.
//!
//! A connection without losses needs only its runs of sent data and this structure.

mod ack;
mod bbr;
mod cc;
mod delivery;
mod episode;
mod paced;
mod phase;
mod probe;
mod prr;
mod rack;
mod rtt;
mod runs;
mod timer;

use std::ops::Range;

use offcore_stats::time::{Micros, Time};

pub(super) use ack::{Ack, Acked};
pub use cc::Algorithm;
pub use phase::State;
pub(super) use timer::TimerAction;

use cc::Congestion;
use episode::Episode;
use paced::Paced;
use phase::Phase;
use probe::Probe;
use rack::Rack;
use rtt::Rtt;
use runs::Runs;

/// A deadline that never expires.
/// Granularity of the peer's timestamps: Linux counts milliseconds.
const GRANULARITY: Micros = Micros::from_millis(1);
/// Minimum MSS: IPv4's minimum MTU of 68 leaves 28 bytes.
const LEAST_MSS: u32 = 28;

/// Statistics in segments unless stated otherwise, for reports like `tcp_info`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Retransmitted before a timeout, except as probes.
    pub fast: u32,
    /// Retransmitted after timeouts.
    pub timeout: u32,
    /// Retransmitted as probes.
    pub probes: u32,
    /// Number of spurious reductions that were undone.
    pub spurious: u32,
    /// ACKs that indicated reordering.
    pub reordered: u32,
    /// Timeouts.
    pub timeouts: u32,
    /// ACKs with a DSACK.
    pub duplicates: u32,
    /// SACK blocks outside the data in flight.
    pub bad_sacks: u32,
    /// Reductions caused by ECN marks.
    pub marks: u32,
}

impl Stats {
    fn since(&self, before: &Self) -> Self {
        Self {
            fast: self.fast.wrapping_sub(before.fast),
            timeout: self.timeout.wrapping_sub(before.timeout),
            probes: self.probes.wrapping_sub(before.probes),
            spurious: self.spurious.wrapping_sub(before.spurious),
            reordered: self.reordered.wrapping_sub(before.reordered),
            timeouts: self.timeouts.wrapping_sub(before.timeouts),
            duplicates: self.duplicates.wrapping_sub(before.duplicates),
            bad_sacks: self.bad_sacks.wrapping_sub(before.bad_sacks),
            marks: self.marks.wrapping_sub(before.marks),
        }
    }
}

/// Loss recovery and congestion control of one connection's sender.
///
/// The caller sends lost data first ([`Recovery::next_lost`]), then new data within [`Recovery::window`] and the peer's
/// window ([`Recovery::plan_new`]). It reports data that the port has ([`Recovery::published`]) or will not get
/// ([`Recovery::unplanned`]), and passes ACKs ([`Recovery::ack`]) and the time ([`Recovery::timer`]).
#[derive(Debug)]
pub(super) struct Recovery {
    runs: Runs,
    /// The end of the planned data.
    planned: u64,
    cc: Congestion,
    rtt: Rtt,
    rack: Rack,
    probe: Probe,
    phase: Phase,
    /// Pacing holds data until this time.
    release_at: Time,
    /// The window limited transmission up to this position. The window may grow until ACKs reach it.
    limited: u64,
    /// Time of the last publication.
    last_sent: Time,
    /// State that only losses need. `None` before the first loss.
    episode: Option<Box<Episode>>,
    /// Pacing state. `None` without pacing.
    paced: Option<Box<Paced>>,
    /// Without SACK: the number of duplicate ACKs that stand for segments which have left the network.
    duplicates: u32,
    sack: bool,
    timestamps: bool,
}

impl Recovery {
    /// Creates the state of an established connection that has sent nothing. `mss` is the number of payload bytes per
    /// segment without options; it is clamped to 28..=65,535. `sack` and `timestamps`: both sides agreed to use the
    /// option.
    pub(super) fn new(mss: u32, algorithm: Algorithm, sack: bool, timestamps: bool) -> Self {
        let mss = mss.clamp(LEAST_MSS, u32::from(u16::MAX));
        let mut new = Self {
            runs: Runs::default(),
            planned: 0,
            cc: Congestion::new(mss, algorithm),
            rtt: Rtt::new(),
            rack: Rack::new(),
            probe: Probe::new(),
            phase: Phase::new(),
            release_at: Time::NEVER,
            limited: 0,
            last_sent: Time::ZERO,
            episode: None,
            paced: None,
            duplicates: 0,
            sack,
            timestamps,
        };
        new.set_algorithm(algorithm);
        new
    }

    /// Takes the first sample of the round-trip time. The caller omits ambiguous samples (Karn's algorithm).
    pub(super) fn first_rtt(&mut self, now: Time, sample: Micros) {
        self.rtt.sample(sample);
        self.rtt.least(now, sample);
    }

    /// Handles a retransmitted SYN or SYN-ACK: transmission begins with one segment (RFC 5681, section 3.1) and a
    /// longer timeout (RFC 6298, section 5.7).
    pub(super) fn handshake_lost(&mut self) {
        self.cc.on_handshake_loss();
        self.rtt.handshake_lost();
    }

    /// Changes the segment size (RFC 1191, 4821).
    pub(super) fn set_mss(&mut self, mss: u32) {
        self.cc.set_mss(mss.clamp(LEAST_MSS, u32::from(u16::MAX)));
    }

    /// Returns how many bytes of new data may be planned now. The caller applies the peer's window. Lost data takes
    /// precedence and uses the same window. One segment is always allowed while a probe is due.
    #[inline]
    pub(super) fn window(&self, now: Time) -> u64 {
        let pipe = self.pipe();
        let cwnd = if pipe == 0 { self.cc.after_idle(self.idle(now), self.rtt.base()) } else { self.cc.cwnd };
        let room = u64::from(cwnd).saturating_sub(pipe);
        if self.probe.is_due() {
            room.max(u64::from(self.cc.mss))
        } else if self.paced.is_some() {
            self.paced_room(room)
        } else {
            room
        }
    }

    /// Plans `len` bytes of new data behind the data that was planned last.
    #[inline]
    pub(super) fn plan_new(&mut self, now: Time, len: u64) {
        if self.paced.is_some() {
            self.pace_new(now, len);
        }
        if self.pipe() == 0 {
            let (idle, rto) = (self.idle(now), self.rtt.base());
            if idle >= rto {
                self.cc.restart(now, idle, rto);
            }
        }
        let most = self.runs.una + (1 << 31) - 1;
        let planned = self.planned.saturating_add(len).min(most);
        let len = planned - self.planned;
        self.planned = planned;
        self.probe.plan_new();
        self.count_out(len);
        // If another transmission does not fit the window, the window is the limit, not the application (RFC 7661,
        // section 4.2).
        let cwnd = u64::from(self.cc.cwnd);
        if self.pipe() + len.min(cwnd / 4).max(u64::from(self.cc.mss)) > cwnd {
            self.limited = planned;
        }
    }

    /// Plans the next retransmission of at most `at_most` bytes, within the window, and returns its range. Returns
    /// `None` if nothing is lost or the window is full.
    pub(super) fn next_lost(&mut self, at_most: u32) -> Option<Range<u64>> {
        if self.runs.lost == 0 || self.phase.wants_new_data() || self.is_held() {
            return None;
        }
        let room = u64::from(self.cc.cwnd).saturating_sub(self.pipe());
        let head = self.runs.head().is_some_and(runs::Run::waits);
        // The first segment is always sent, because all later data depends on it.
        let room = if head && self.runs.replanned == 0 { room.max(u64::from(self.cc.mss)) } else { room };
        if room < u64::from(self.cc.mss.min(self.runs.lost)) {
            return None;
        }
        let room = if self.paced.is_some() { self.paced_room(room) } else { room };
        let most = room.min(u64::from(at_most)) as u32;
        let whole = if most > self.cc.mss { most - most % self.cc.mss } else { most };
        let range = self.runs.next_lost(whole)?;
        self.count_out(range.end - range.start);
        if self.paced.is_some() {
            self.pace(range.end - range.start);
        }
        Some(range)
    }

    /// Reports that no new data can be sent. Returns whether lost data waited for new data and may be sent now.
    pub(super) fn has_nothing_new(&mut self) -> bool {
        self.phase.has_nothing_new(self.planned)
    }

    /// Returns whether the timer has requested a probe.
    pub(super) fn probe_is_due(&self) -> bool {
        self.probe.is_due()
    }

    /// Plans the retransmission of the last segment because a probe is due and no new data is available. Returns its
    /// range, or `None` if no data can be used as a probe.
    pub(super) fn next_probe(&mut self) -> Option<Range<u64>> {
        if !self.probe.is_due() {
            return None;
        }
        let range = self.runs.next_probe(self.cc.mss);
        self.probe.plan_again(range.as_ref());
        range
    }

    /// Cancels planned data that will not be published: the last new data, or a retransmission, which may be planned
    /// again.
    pub(super) fn unplanned(&mut self, range: Range<u64>) {
        if range.start >= self.runs.published {
            if range.end == self.planned && range.start < self.planned {
                self.planned = range.start;
                self.count_in(range.end - range.start);
            }
            self.probe.unplan_new();
            return;
        }
        let before = self.runs.replanned;
        self.runs.abandon(&range);
        self.count_in(u64::from(before - self.runs.replanned));
        if self.probe.is_planned(range.end) {
            self.probe.forget();
        }
    }

    /// Reports that the port has the data, which starts the timers. A `retransmission` is the range of
    /// [`Recovery::next_lost`] or [`Recovery::next_probe`], or a part of it. New data is published in order.
    #[inline]
    pub(super) fn published(&mut self, now: Time, range: Range<u64>, retransmission: bool) {
        if retransmission {
            return self.published_again(now, range);
        }
        let idle = self.paced.is_some() && self.is_quiet_on_wire();
        self.runs.push(now, range.end, self.cc.mss);
        self.planned = self.planned.max(self.runs.published);
        if self.paced.is_some() {
            self.model_sent(now, idle);
        }
        self.last_sent = now;
        self.rtt.start(now);
        if self.probe.is_next() {
            self.probed(now, false);
        }
        self.arm_probe(now);
    }

    /// Frees the memory of sent data. This is meant for connections that have been quiet for some time; a connection
    /// that sends occasionally would otherwise allocate each time.
    pub(super) fn release(&mut self) {
        self.runs.release();
    }

    /// Returns whether the next new segment should set CWR, if ECN was negotiated (RFC 3168, section 6.1.2).
    pub(super) fn cwr_due(&self) -> bool {
        self.phase.cwr_due()
    }

    /// Reports that a new segment was sent with CWR.
    pub(super) fn cwr_sent(&mut self) {
        self.phase.cwr_sent();
    }

    /// Returns the number of bytes in flight, including planned data: neither acknowledged, nor SACKed, nor lost (RFC
    /// 6675, section 4).
    #[inline]
    pub(super) fn pipe(&self) -> u64 {
        let gone = u64::from(self.runs.sacked)
            + u64::from(self.runs.lost)
            + u64::from(self.duplicates) * u64::from(self.cc.mss);
        (self.planned - self.runs.una).saturating_sub(gone)
    }

    /// Returns the first unacknowledged position.
    pub(super) fn una(&self) -> u64 {
        self.runs.una
    }

    /// Returns the end of the published data.
    pub(super) fn published_to(&self) -> u64 {
        self.runs.published
    }

    /// Returns the end of the planned data.
    pub(super) fn planned_to(&self) -> u64 {
        self.planned
    }

    /// Returns the state of the sender.
    pub(super) fn state(&self) -> State {
        self.phase.state()
    }

    /// Returns the smoothed round-trip time, or zero before the first sample.
    pub(super) fn srtt(&self) -> Micros {
        self.rtt.srtt()
    }

    /// Returns the variation of the round-trip time.
    pub(super) fn rttvar(&self) -> Micros {
        self.rtt.variation()
    }

    /// Returns the minimum round-trip time of the last minutes, if there was a sample.
    pub(super) fn min_rtt(&self) -> Option<Micros> {
        self.rtt.min()
    }

    /// Returns the retransmission timeout, including backoff.
    pub(super) fn rto(&self) -> Micros {
        self.rtt.rto()
    }

    /// Returns the congestion window in bytes.
    pub(super) fn cwnd(&self) -> u64 {
        u64::from(self.cc.cwnd)
    }

    /// Returns the slow start threshold in bytes, or `u32::MAX` before the first loss.
    pub(super) fn ssthresh(&self) -> u64 {
        u64::from(self.cc.ssthresh)
    }

    /// Returns the number of timeouts since an ACK advanced. The caller gives up at some number (RFC 1122, section
    /// 4.2.3.5).
    pub(super) fn backoffs(&self) -> u8 {
        self.rtt.expired()
    }

    /// Returns the statistics since the beginning.
    pub(super) fn stats(&self) -> Stats {
        self.episode.as_ref().map_or_else(Stats::default, |episode| episode.stats)
    }

    /// Returns the statistics since the last call.
    pub(super) fn take_unreported(&mut self) -> Stats {
        let Some(episode) = &mut self.episode else { return Stats::default() };
        let told = std::mem::replace(&mut episode.told, episode.stats);
        episode.stats.since(&told)
    }

    fn idle(&self, now: Time) -> Micros {
        if self.last_sent == Time::ZERO { Micros::ZERO } else { now.saturating_since(self.last_sent) }
    }

    /// Counts planned bytes in fast recovery.
    #[inline]
    fn count_out(&mut self, bytes: u64) {
        if self.phase.is_recovery()
            && let Some(episode) = &mut self.episode
        {
            episode.prr.on_send(bytes);
        }
    }

    fn count_in(&mut self, bytes: u64) {
        if self.phase.is_recovery()
            && let Some(episode) = &mut self.episode
        {
            episode.prr.on_unsend(bytes);
        }
    }

    /// Reports that the port has a retransmission.
    fn published_again(&mut self, now: Time, range: Range<u64>) {
        let head = range.start <= self.runs.una;
        let probe = self.probe.is_planned(range.end);
        let idle = self.paced.is_some() && self.is_quiet_on_wire();
        let bytes = self.runs.transmit(now, range.clone(), self.cc.mss);
        if self.paced.is_some() {
            self.model_sent(now, idle);
        }
        if bytes == 0 {
            if probe {
                self.probe.forget();
            }
            return;
        }
        self.last_sent = now;
        if head {
            self.rtt.restart(now);
        }
        self.rtt.start(now);
        let segments = bytes.div_ceil(u64::from(self.cc.mss)) as u32;
        let state = self.phase.state();
        let episode = self.episode.get_or_insert_default();
        if probe {
            episode.stats.probes += segments;
            return self.probed(now, true);
        }
        episode.undo.on_repeat(now, range);
        match state {
            State::Loss => episode.stats.timeout += segments,
            State::Open | State::Recovery => episode.stats.fast += segments,
        }
    }

    /// Records that a probe was published.
    fn probed(&mut self, now: Time, again: bool) {
        self.probe.published(self.runs.published, again);
        self.rtt.restart(now);
    }
}

#[cfg(test)]
mod tests;
