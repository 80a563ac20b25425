//! BBR, version 3 (draft-ietf-ccwg-bbr-06): a model of the path determines the sending rate and the volume in flight.
//!
//! Windows, volumes and losses are in bytes, bandwidths in bytes per second, gains in percent.
//! Section numbers refer to the draft. There are two differences to the draft. All data that one ACK shows to be lost
//! counts as one packet with the latest send time. An ECN mark (ECE, RFC 3168) counts as a loss, because the draft does
//! not define a response.

mod cycle;
mod model;
mod rate;

use offcore_stats::time::{Micros, Time};

use cycle::{Phase, State, Undo};
use model::{Aggregation, Bounds, FullPipe, INFINITE, Latest, MaxBw, MinRtt, Rounds, bytes_in};
use rate::{Rate, Sample};

/// BBR.LossThresh, in percent.
const LOSS_THRESHOLD: u64 = 2;
/// BBR.PacingMarginPercent.
const MARGIN: u64 = 1;
/// BBR.MinPipeCwnd, in segments.
const LEAST_SEGMENTS: u64 = 4;
/// BBRStartupFullLossCnt.
const FULL_LOSSES: u8 = 6;
/// Maximum send quantum.
const LONGEST_QUANTUM: u64 = 64 << 10;
/// The round-trip time assumed for the first pacing rate without a sample.
const UNKNOWN_RTT: Micros = Micros::from_millis(1);

/// The state of the connection at an event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flow {
    pub(super) now: Time,
    pub(super) mss: u64,
    pub(super) cwnd: u64,
    pub(super) inflight: u64,
    /// C.is_cwnd_limited: the window limited transmission in the last round.
    pub(super) limited: bool,
    /// The connection is in fast recovery, or after a timeout.
    pub(super) recovering: bool,
    pub(super) sack: bool,
}

/// The data delivered by an ACK.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delivered {
    pub(super) bytes: u64,
    /// Send time and round-trip time of the newest segment. `None` if a newer segment was delivered before.
    pub(super) newest: Option<(Time, Micros)>,
    /// The minimum round-trip time of the connection.
    pub(super) least: Micros,
}

/// The state of BBR of a connection.
#[derive(Debug)]
pub(super) struct Bbr {
    rate: Rate,
    state: State,
    max_bw: MaxBw,
    /// BBR.bw: the smaller of BBR.max_bw and BBR.bw_shortterm.
    bw: u64,
    bounds: Bounds,
    latest: Latest,
    rounds: Rounds,
    full: FullPipe,
    phase: Phase,
    rtt: MinRtt,
    aggregation: Aggregation,
    undo: Undo,
    /// The window before a recovery or ProbeRTT.
    prior_cwnd: u64,
    /// The initial window.
    initial_cwnd: u64,
    idle_restart: bool,
    pub(super) pacing_rate: u64,
}

impl Bbr {
    /// Creates the initial state (sections 5.2.1 and 5.6.2). `srtt` is 0 before the first sample.
    pub(super) fn new(now: Time, srtt: Micros, cwnd: u64) -> Self {
        let nominal = cwnd.saturating_mul(1_000_000)
            / if srtt == Micros::ZERO { UNKNOWN_RTT.get() } else { srtt.get() };
        Self {
            rate: Rate::default(),
            state: State::Startup,
            max_bw: MaxBw::default(),
            bw: 0,
            bounds: Bounds::default(),
            latest: Latest::default(),
            rounds: Rounds::default(),
            full: FullPipe::default(),
            phase: Phase::default(),
            rtt: MinRtt::new(now),
            aggregation: Aggregation::new(now),
            undo: Undo::default(),
            prior_cwnd: 0,
            initial_cwnd: cwnd,
            idle_restart: false,
            pacing_rate: nominal.saturating_mul(State::Startup.pacing_gain()) / 100,
        }
    }

    /// Counts transmitted data, which `flow.inflight` includes. `idle`: nothing was in flight before.
    pub(super) fn on_sent(&mut self, flow: &Flow, idle: bool, srtt: Micros) {
        self.rate.on_sent(flow.now, idle, flow.inflight, srtt);
    }

    /// Restarts from idle (section 5.4.1). Returns the window.
    pub(super) fn restart(&mut self, flow: &Flow) -> u64 {
        if !self.rate.is_app_limited() {
            return flow.cwnd;
        }
        self.idle_restart = true;
        self.aggregation.since = flow.now;
        if self.state.is_probe_bw() {
            self.set_pacing_rate(100);
        } else if self.state == State::ProbeRtt {
            return self.check_probe_rtt_done(flow);
        }
        flow.cwnd
    }

    /// Marks the connection as limited by the application (section 4.1.2.4).
    pub(super) fn limit_by_app(&mut self, inflight: u64) {
        self.rate.limit_by_app(inflight);
    }

    /// Updates model and state for an ACK (section 5.2.3). Returns the window.
    pub(super) fn on_ack(&mut self, flow: &Flow, delivered: &Delivered) -> u64 {
        let newest = delivered.newest.map(|(sent, _)| sent);
        let sample = self.rate.on_ack(flow.now, delivered.bytes, newest, delivered.least);
        (self.rounds.start, self.latest.round_start) = (false, false);
        let sample = match sample {
            Some(sample) => {
                self.take_sample(flow, &sample);
                sample
            }
            None => Sample::default(),
        };
        self.aggregation.update(flow.now, self.bw, delivered.bytes, flow.cwnd);
        if self.rounds.start {
            self.aggregation.end_round(!self.full.reached);
            self.full.check(&sample);
        }
        self.check_startup_done(flow, &sample);
        self.check_drain_done(flow);
        if delivered.bytes > 0 {
            self.update_cycle(flow, &sample, delivered.bytes);
        }
        self.rtt.update(flow.now, delivered.newest.map(|(_, rtt)| rtt));
        let cwnd = self.check_probe_rtt(flow);
        if delivered.bytes > 0 {
            self.idle_restart = false;
        }
        self.latest.advance(&sample);
        self.bw = self.max_bw.get().min(self.bounds.bw);
        self.set_pacing_rate(self.state.pacing_gain());
        self.set_cwnd(&Flow { cwnd, ..*flow }, delivered.bytes)
    }

    /// UpdateLatestDeliverySignals and UpdateCongestionSignals (section 5.5.10.3), UpdateMaxBw (section 5.5.5).
    fn take_sample(&mut self, flow: &Flow, sample: &Sample) {
        self.latest.update(sample, self.rate.delivered);
        self.rounds.update(sample.before, self.rate.delivered);
        self.phase.rounds += u64::from(self.rounds.start);
        if sample.rate >= self.max_bw.get() || !sample.app_limited {
            self.max_bw.take(sample.rate);
        }
        if self.latest.round_start {
            if self.latest.lost && !self.state.is_probing() {
                self.bounds.reduce(self.max_bw.get(), flow.cwnd, &self.latest);
            }
            self.latest.lost = false;
        }
    }

    /// Counts `bytes` as lost (section 5.5.10.2). `sent` is their latest send time.
    pub(super) fn on_lost(&mut self, flow: &Flow, bytes: u64, sent: Time) {
        self.note_loss(flow);
        self.rate.lost += bytes;
        if !self.phase.is_sample {
            return;
        }
        let Some(&state) = self.rate.when_sent(sent) else { return };
        let sample = Sample {
            inflight: state.inflight,
            lost: self.rate.lost - state.lost,
            app_limited: state.app_limited,
            ..Sample::default()
        };
        if is_too_high(flow, &sample) {
            let inflight = inflight_at_loss(&sample, bytes);
            self.inflight_is_too_high(flow, &Sample { inflight, ..sample });
        }
    }

    /// Handles an ECN mark (RFC 3168, section 6.1.2).
    pub(super) fn on_mark(&mut self, flow: &Flow) {
        self.note_loss(flow);
        if self.phase.is_sample {
            self.inflight_is_too_high(flow, &Sample { inflight: flow.inflight, ..Sample::default() });
        }
    }

    /// NoteLoss.
    fn note_loss(&mut self, flow: &Flow) {
        if !self.latest.lost {
            self.latest.until = self.rate.delivered;
            self.save(flow);
        }
        self.latest.lost = true;
        self.latest.events = self.latest.events.saturating_add(1);
    }

    /// Saves state at the start of a recovery (section 5.5.11.1).
    pub(super) fn save(&mut self, flow: &Flow) {
        self.save_cwnd(flow);
        self.undo = Undo { state: None, bounds: self.bounds };
    }

    /// Returns the window after a recovery (section 5.6.4.4).
    pub(super) fn restored(&self, cwnd: u64) -> u64 {
        cwnd.max(self.prior_cwnd)
    }

    fn save_cwnd(&mut self, flow: &Flow) {
        let is_modulated = flow.recovering || self.state == State::ProbeRtt;
        self.prior_cwnd = if is_modulated { self.prior_cwnd.max(flow.cwnd) } else { flow.cwnd };
    }

    /// BBR.bdp.
    fn bdp(&self, bw: u64) -> u64 {
        if self.rtt.min == Micros::MAX { self.initial_cwnd } else { bytes_in(bw, self.rtt.min) }
    }

    /// QuantizationBudget (section 5.6.4.2).
    fn budget(&self, flow: &Flow, volume: u64) -> u64 {
        let quanta = 3 * quantum(self.pacing_rate, flow.mss);
        let extra = if self.state == State::Up { 2 * flow.mss } else { 0 };
        volume.max(quanta).max(LEAST_SEGMENTS * flow.mss) + extra
    }

    /// Inflight(1.0) for a bandwidth.
    fn inflight(&self, flow: &Flow, bw: u64) -> u64 {
        self.budget(flow, self.bdp(bw))
    }

    fn set_pacing_rate(&mut self, gain: u64) {
        let rate = self.bw.saturating_mul(gain * (100 - MARGIN)) / 10_000;
        if self.full.reached && rate > 0 || rate > self.pacing_rate {
            self.pacing_rate = rate;
        }
    }

    /// Section 5.6.4.6.
    fn set_cwnd(&mut self, flow: &Flow, acked: u64) -> u64 {
        let volume = self.bdp(self.bw).saturating_mul(self.state.cwnd_gain()) / 100;
        let most = self.budget(flow, volume + self.aggregation.most());
        let least = LEAST_SEGMENTS * flow.mss;
        let mut cwnd = flow.cwnd;
        if self.full.reached {
            cwnd = (cwnd + acked).min(most);
        } else if cwnd < most || self.rate.delivered < self.initial_cwnd {
            cwnd += acked;
        }
        cwnd = cwnd.max(least);
        if self.state == State::ProbeRtt {
            cwnd = cwnd.min(self.probe_rtt_cwnd(flow));
        }
        // Section 5.6.4.7.
        let cap = match self.state {
            State::Startup | State::Drain => INFINITE,
            State::ProbeRtt | State::Cruise => self.with_headroom(flow),
            State::Down | State::Refill | State::Up => self.bounds.long,
        };
        cwnd.min(cap.min(self.bounds.short).max(least))
    }
}

/// C.send_quantum (section 5.6.3): the bytes of one millisecond.
pub(super) fn quantum(rate: u64, mss: u64) -> u64 {
    let bytes = (rate / 1000).min(LONGEST_QUANTUM);
    (bytes - bytes % mss.max(1)).max(2 * mss)
}

/// IsInflightTooHigh.
fn is_too_high(flow: &Flow, sample: &Sample) -> bool {
    sample.lost > sample.inflight * LOSS_THRESHOLD / 100 || sample.lost > 0 && !flow.sack
}

/// InflightAtLoss: the volume in flight at which the loss rate reached the threshold. `bytes` were lost last.
fn inflight_at_loss(sample: &Sample, bytes: u64) -> u64 {
    let (inflight, lost) = (sample.inflight.saturating_sub(bytes), sample.lost.saturating_sub(bytes));
    inflight + (inflight * LOSS_THRESHOLD).saturating_sub(lost * 100) / (100 - LOSS_THRESHOLD)
}
