//! Loss recovery and congestion control of one connection's sender.
//!
//! Pure code: positions are offsets in the stream (0 is the first byte of payload, the FIN has one offset after the last
//! byte, the SYN has none), times are microseconds. What is sent passes two edges. It is *planned* when its copy is ordered
//! and counts against the window from then on; it is *published* when the port has it, and clocks start then.
//!
//! | what | how |
//! |---|---|
//! | lost with SACK | RACK-TLP (RFC 8985); RFC 6675 for what is in flight only |
//! | lost without SACK | three duplicate ACKs, NewReno (RFC 5681, 6582), limited transmit (RFC 3042) |
//! | timeout | RFC 6298 with Linux's least 200 ms and most 120 s |
//! | window in recovery | proportional rate reduction (RFC 6937, 9937) |
//! | window otherwise | NewReno (RFC 5681, 3465) or CUBIC (RFC 9438), RFC 3168 for marks |
//! | undone | reductions that timestamps (Eifel, RFC 3522), DSACK (RFC 3708) or F-RTO show to be spurious, as in RFC 4015 |
//!
//! F-RTO (RFC 5682) is the SACK variant, as on Linux.
//!
//! A connection that lost nothing has its runs of sent data and this structure, nothing else.

mod ack;
mod bbr;
mod cc;
mod delivery;
mod episode;
mod paced;
mod prr;
mod rtt;
mod runs;
mod timer;

use std::ops::Range;

pub(super) use ack::{Ack, Acked};
pub use cc::Algorithm;
pub(super) use timer::TimerAction;

use cc::Congestion;
use delivery::Newest;
use episode::Episode;
use paced::Paced;
use rtt::Rtt;
use runs::Runs;

/// A deadline that never comes.
const NEVER: u64 = u64::MAX;
/// A sequence number that nothing reaches.
const NOWHERE: u64 = u64::MAX;
/// So coarse may the peer's echo of a timestamp be: Linux counts milliseconds.
const GRANULARITY: u64 = 1000;
/// The least MSS that is worked with: IPv4's least MTU would leave 28 bytes.
const LEAST_MSS: u32 = 28;

/// Where the sender is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing is known to be lost.
    Open,
    /// Fast recovery, until what was sent before it is acknowledged.
    Recovery,
    /// After a timeout, until what was sent before it is acknowledged.
    Loss,
}

/// Whether a timeout was spurious (RFC 5682, section 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    /// No check is in progress.
    None,
    /// The first segment was retransmitted and is not acknowledged yet.
    Begun,
    /// An acknowledgement has arrived. New data is sent next, and its acknowledgement decides.
    NewData,
}

/// A probe for a lost tail (RFC 8985, section 7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    /// None is due or in flight.
    None,
    /// The timer asked for one.
    Due,
    /// The last segment is planned once more.
    Planned,
    /// New data is planned as one.
    NewPlanned,
    /// New data was sent as one.
    New,
    /// The last segment was sent again.
    Again,
}

/// What happened, in segments unless it says otherwise; for reports like `tcp_info`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Retransmitted in fast recovery.
    pub fast: u32,
    /// Retransmitted after timeouts.
    pub timeout: u32,
    /// Retransmitted as probes.
    pub probes: u32,
    /// Times that a reduction was undone because nothing had been lost.
    pub spurious: u32,
    /// ACKs that showed reordering.
    pub reordered: u32,
    /// Timeouts.
    pub timeouts: u32,
    /// ACKs with a DSACK.
    pub duplicates: u32,
    /// SACK blocks outside what is in flight.
    pub bad_sacks: u32,
    /// Reductions because of marks (ECN).
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
/// The caller sends lost data first ([`Recovery::next_lost`]), then new data as far as [`Recovery::window`] and the peer's
/// window go ([`Recovery::plan_new`]); tells what the port has ([`Recovery::published`]) and what it will not get
/// ([`Recovery::unplanned`]); and brings ACKs ([`Recovery::ack`]) and the time ([`Recovery::timer`]).
#[derive(Debug)]
pub(super) struct Recovery {
    runs: Runs,
    /// The end of what was planned.
    planned: u64,
    cc: Congestion,
    rtt: Rtt,
    /// RACK.xmit_ts and RACK.end_seq.
    newest: Newest,
    /// RACK.rtt.
    newest_rtt: u64,
    /// RACK.fack.
    highest: u64,
    /// When the timeout, a probe, and the end of the wait for reordered segments are due.
    timeout_at: u64,
    probe_at: u64,
    reorder_at: u64,
    /// Pacing holds data until then.
    release_at: u64,
    /// Up to here the window limited what was sent; before ACKs reach it, the window may grow.
    limited: u64,
    /// No second reduction for data below.
    recover: u64,
    /// TLP.end_seq.
    probe_end: u64,
    /// When data was published last.
    last_sent: u64,
    /// What only losses need; none before the first.
    episode: Option<Box<Episode>>,
    /// State of pacing; none without pacing.
    paced: Option<Box<Paced>>,
    mss: u32,
    /// Duplicate ACKs that stand for segments which have left the network, without SACK.
    duplicates: u32,
    state: State,
    probe: Probe,
    check: Check,
    /// Timeouts since an ACK advanced.
    expired: u8,
    sack: bool,
    timestamps: bool,
    cwr: bool,
    /// RACK.reordering_seen.
    reordering: bool,
}

impl Recovery {
    /// A connection that is established and has sent nothing. `mss`: bytes of payload per segment, options taken off;
    /// below 28 it is taken for 28, above 65,535 for that. `sack` and `timestamps`: both sides agreed to use them.
    pub(super) fn new(mss: u32, algorithm: Algorithm, sack: bool, timestamps: bool) -> Self {
        let mss = mss.clamp(LEAST_MSS, u32::from(u16::MAX));
        let mut new = Self {
            runs: Runs::default(),
            planned: 0,
            cc: Congestion::new(mss, algorithm),
            rtt: Rtt::new(),
            newest: Newest::default(),
            newest_rtt: 0,
            highest: 0,
            timeout_at: NEVER,
            probe_at: NEVER,
            reorder_at: NEVER,
            release_at: NEVER,
            limited: 0,
            recover: 0,
            probe_end: NOWHERE,
            last_sent: 0,
            episode: None,
            paced: None,
            mss,
            duplicates: 0,
            state: State::Open,
            probe: Probe::None,
            check: Check::None,
            expired: 0,
            sack,
            timestamps,
            cwr: false,
            reordering: false,
        };
        new.set_algorithm(algorithm);
        new
    }

    /// The round-trip time of the handshake, unless its segment was sent twice.
    pub(super) fn first_rtt(&mut self, now: u64, sample: u64) {
        self.rtt.sample(sample);
        self.rtt.least(now, sample);
    }

    /// The SYN or its answer had to be sent again: begins with one segment (RFC 5681, section 3.1) and a longer timeout (RFC
    /// 6298, section 5.7).
    pub(super) fn handshake_lost(&mut self) {
        self.cc.on_handshake_loss();
        self.rtt.handshake_lost();
    }

    /// The path carries segments of another size from now on (RFC 1191, 4821).
    pub(super) fn set_mss(&mut self, mss: u32) {
        self.mss = mss.clamp(LEAST_MSS, u32::from(u16::MAX));
        self.cc.set_mss(self.mss);
    }

    /// Bytes of new data that may be planned now; the peer's window is the caller's to apply. Lost data goes first, and
    /// takes from the same window. One segment is free while a probe is due.
    #[inline]
    pub(super) fn window(&self, now: u64) -> u64 {
        let pipe = self.pipe();
        let cwnd = if pipe == 0 { self.cc.after_idle(self.idle(now), self.rtt.base()) } else { self.cc.cwnd };
        let room = u64::from(cwnd).saturating_sub(pipe);
        match self.probe {
            Probe::Due => room.max(u64::from(self.mss)),
            _ if self.paced.is_some() => self.paced_room(room),
            _ => room,
        }
    }

    /// New data of `len` bytes is planned: it follows what was planned last.
    #[inline]
    pub(super) fn plan_new(&mut self, now: u64, len: u64) {
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
        if self.probe == Probe::Due {
            self.probe = Probe::NewPlanned;
        }
        self.count_out(len);
        // What does not fit the window another time was limited by it, not by the application (RFC 7661, section 4.2).
        let cwnd = u64::from(self.cc.cwnd);
        if self.pipe() + len.min(cwnd / 4).max(u64::from(self.mss)) > cwnd {
            self.limited = planned;
        }
    }

    /// Lost data to be retransmitted next, at most so many bytes and as far as the window goes; planned from now on. None
    /// where nothing is lost or there is no room.
    pub(super) fn next_lost(&mut self, at_most: u32) -> Option<Range<u64>> {
        if self.runs.lost == 0 || self.check == Check::NewData || self.is_held() {
            return None;
        }
        let room = u64::from(self.cc.cwnd).saturating_sub(self.pipe());
        let head = self.runs.head().is_some_and(runs::Run::waits);
        // The first segment always goes: everything waits for it.
        let room = if head && self.runs.replanned == 0 { room.max(u64::from(self.mss)) } else { room };
        if room < u64::from(self.mss.min(self.runs.lost)) {
            return None;
        }
        let room = if self.paced.is_some() { self.paced_room(room) } else { room };
        let most = room.min(u64::from(at_most)) as u32;
        let whole = if most > self.mss { most - most % self.mss } else { most };
        let range = self.runs.next_lost(whole)?;
        self.count_out(range.end - range.start);
        if self.paced.is_some() {
            self.pace(range.end - range.start);
        }
        Some(range)
    }

    /// No new data can be sent. Returns whether lost data waited for new data and may be sent now.
    pub(super) fn has_nothing_new(&mut self) -> bool {
        let waited = self.check == Check::NewData && self.planned <= self.recover;
        if waited {
            self.check = Check::None;
        }
        waited
    }

    /// Whether the timer has asked for a probe.
    pub(super) fn probe_is_due(&self) -> bool {
        self.probe == Probe::Due
    }

    /// The last segment, to be sent again because a probe is due and there is no new data to send; planned from now on.
    /// None where there is nothing to probe with.
    pub(super) fn next_probe(&mut self) -> Option<Range<u64>> {
        if self.probe != Probe::Due {
            return None;
        }
        let range = self.runs.next_probe(self.mss);
        self.probe = if range.is_some() { Probe::Planned } else { Probe::None };
        self.probe_end = range.as_ref().map_or(NOWHERE, |range| range.end);
        range
    }

    /// What was planned will not be published: the last new data, or a retransmission, which may be given again.
    pub(super) fn unplanned(&mut self, range: Range<u64>) {
        if range.start >= self.runs.published {
            if range.end == self.planned && range.start < self.planned {
                self.planned = range.start;
                self.count_in(range.end - range.start);
            }
            if self.probe == Probe::NewPlanned {
                self.probe = Probe::Due;
            }
            return;
        }
        let before = self.runs.replanned;
        self.runs.abandon(&range);
        self.count_in(u64::from(before - self.runs.replanned));
        if self.probe == Probe::Planned && range.end == self.probe_end {
            self.forget_probe();
        }
    }

    /// The port has this data: clocks start. `retransmission`: it is the range of [`Recovery::next_lost`] or
    /// [`Recovery::next_probe`] or a part of one; new data is published in order.
    #[inline]
    pub(super) fn published(&mut self, now: u64, range: Range<u64>, retransmission: bool) {
        if retransmission {
            return self.published_again(now, range);
        }
        let idle = self.paced.is_some() && self.is_quiet_on_wire();
        self.runs.push(now, range.end, self.mss);
        self.planned = self.planned.max(self.runs.published);
        if self.paced.is_some() {
            self.model_sent(now, idle);
        }
        self.last_sent = now;
        if self.timeout_at == NEVER {
            self.timeout_at = now + self.rtt.rto();
        }
        if matches!(self.probe, Probe::Due | Probe::NewPlanned) {
            self.probed(now, Probe::New);
        }
        self.arm_probe(now);
    }

    /// Memory of sent data is given back. To be called when the connection has been quiet for some time: a connection that
    /// sends now and then would allocate each time otherwise.
    pub(super) fn release(&mut self) {
        self.runs.release();
    }

    /// Whether the next new segment should have CWR set, if ECN was negotiated (RFC 3168, section 6.1.2).
    pub(super) fn cwr_due(&self) -> bool {
        self.cwr
    }

    /// A new segment was sent with CWR.
    pub(super) fn cwr_sent(&mut self) {
        self.cwr = false;
    }

    /// Bytes in flight, those planned included: neither acknowledged, nor SACKed, nor lost (RFC 6675, section 4).
    #[inline]
    pub(super) fn pipe(&self) -> u64 {
        let gone = u64::from(self.runs.sacked)
            + u64::from(self.runs.lost)
            + u64::from(self.duplicates) * u64::from(self.mss);
        (self.planned - self.runs.una).saturating_sub(gone)
    }

    /// The first byte that is not acknowledged.
    pub(super) fn una(&self) -> u64 {
        self.runs.una
    }

    /// The end of what was published.
    pub(super) fn published_to(&self) -> u64 {
        self.runs.published
    }

    /// The end of what was planned.
    pub(super) fn planned_to(&self) -> u64 {
        self.planned
    }

    /// Where the sender is.
    pub(super) fn state(&self) -> State {
        self.state
    }

    /// The smoothed round-trip time in microseconds, 0 before the first sample.
    pub(super) fn srtt(&self) -> u64 {
        self.rtt.srtt()
    }

    /// The variation of the round-trip time in microseconds.
    pub(super) fn rttvar(&self) -> u64 {
        self.rtt.variation()
    }

    /// The least round-trip time of the last minutes in microseconds, if there was a sample.
    pub(super) fn min_rtt(&self) -> Option<u64> {
        self.rtt.min()
    }

    /// The timeout in microseconds, with its doublings.
    pub(super) fn rto(&self) -> u64 {
        self.rtt.rto()
    }

    /// The congestion window in bytes.
    pub(super) fn cwnd(&self) -> u64 {
        u64::from(self.cc.cwnd)
    }

    /// The slow start threshold in bytes; `u32::MAX` before the first loss.
    pub(super) fn ssthresh(&self) -> u64 {
        u64::from(self.cc.ssthresh)
    }

    /// Timeouts since an ACK advanced: the caller gives up at some number (RFC 1122, section 4.2.3.5).
    pub(super) fn backoffs(&self) -> u8 {
        self.expired
    }

    /// What happened so far.
    pub(super) fn stats(&self) -> Stats {
        self.episode.as_ref().map_or_else(Stats::default, |episode| episode.stats)
    }

    /// What happened since this was asked last.
    pub(super) fn take_untold(&mut self) -> Stats {
        let Some(episode) = &mut self.episode else { return Stats::default() };
        let told = std::mem::replace(&mut episode.told, episode.stats);
        episode.stats.since(&told)
    }

    fn idle(&self, now: u64) -> u64 {
        if self.last_sent == 0 { 0 } else { now.saturating_sub(self.last_sent) }
    }

    /// Bytes were planned, which counts in a recovery.
    #[inline]
    fn count_out(&mut self, bytes: u64) {
        if self.state == State::Recovery
            && let Some(episode) = &mut self.episode
        {
            episode.prr.on_send(bytes);
        }
    }

    fn count_in(&mut self, bytes: u64) {
        if self.state == State::Recovery
            && let Some(episode) = &mut self.episode
        {
            episode.prr.on_unsend(bytes);
        }
    }

    /// A retransmission is in the port.
    fn published_again(&mut self, now: u64, range: Range<u64>) {
        let head = range.start <= self.runs.una;
        let probe = self.probe == Probe::Planned && range.end == self.probe_end;
        let idle = self.paced.is_some() && self.is_quiet_on_wire();
        let bytes = self.runs.transmit(now, range.clone(), self.mss);
        if self.paced.is_some() {
            self.model_sent(now, idle);
        }
        if bytes == 0 {
            if probe {
                self.forget_probe();
            }
            return;
        }
        self.last_sent = now;
        if head || self.timeout_at == NEVER {
            self.timeout_at = now + self.rtt.rto();
        }
        let segments = bytes.div_ceil(u64::from(self.mss)) as u32;
        let state = self.state;
        let episode = self.episode.get_or_insert_default();
        if probe {
            episode.stats.probes += segments;
            return self.probed(now, Probe::Again);
        }
        episode.undo.on_repeat(now, range);
        match state {
            State::Loss => episode.stats.timeout += segments,
            State::Open | State::Recovery => episode.stats.fast += segments,
        }
    }

    /// A probe was published (RFC 8985, section 7.3).
    fn probed(&mut self, now: u64, probe: Probe) {
        self.probe = probe;
        self.probe_end = self.runs.published;
        self.probe_at = NEVER;
        self.timeout_at = now + self.rtt.rto();
    }

    fn forget_probe(&mut self) {
        self.probe = Probe::None;
        self.probe_end = NOWHERE;
        self.probe_at = NEVER;
    }
}

#[cfg(test)]
mod tests;
