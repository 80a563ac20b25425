//! The states of BBR and their transitions (draft-ietf-ccwg-bbr-06, section 5.3).

use offcore_stats::random::SplitMix;
use offcore_stats::time::{Micros, Time};

use super::model::{Bounds, INFINITE};
use super::rate::Sample;
use super::{Bbr, FULL_LOSSES, Flow, LEAST_SEGMENTS, is_too_high};

/// BBR.ProbeRTTDuration.
const PROBE_RTT_LASTS: Micros = Micros::from_millis(200);
/// BBR.Headroom, in percent.
const HEADROOM: u64 = 15;
/// Maximum number of round trips in Drain (section 5.3.2).
const DRAIN_ROUNDS: u64 = 3;
/// Maximum number of round trips between probes, so that Reno keeps its share (section 5.3.3.8).
const RENO_ROUNDS: u64 = 63;
/// Time between probes: two to three seconds.
const WAIT: Micros = Micros::from_secs(2);
const RANDOM_WAIT: Micros = Micros::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Startup,
    Drain,
    /// ProbeBW_DOWN. The next three are ProbeBW_CRUISE, ProbeBW_REFILL and ProbeBW_UP.
    Down,
    Cruise,
    Refill,
    Up,
    ProbeRtt,
}

impl State {
    pub(super) fn is_probe_bw(self) -> bool {
        matches!(self, Self::Down | Self::Cruise | Self::Refill | Self::Up)
    }

    /// IsProbingBW.
    pub(super) fn is_probing(self) -> bool {
        matches!(self, Self::Startup | Self::Refill | Self::Up)
    }

    /// Section 5.6.1, in percent.
    pub(super) fn pacing_gain(self) -> u64 {
        match self {
            Self::Startup => 277,
            Self::Drain => 50,
            Self::Down => 90,
            Self::Up => 125,
            Self::Cruise | Self::Refill | Self::ProbeRtt => 100,
        }
    }

    pub(super) fn cwnd_gain(self) -> u64 {
        match self {
            Self::Up => 225,
            Self::ProbeRtt => 50,
            _ => 200,
        }
    }
}

/// BBR.ack_phase: the phase whose data current ACKs report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Acks {
    #[default]
    Init,
    ProbeStarting,
    ProbeFeedback,
    ProbeStopping,
    Refilling,
}

/// The current cycle of ProbeBW, and ProbeRTT.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Phase {
    acks: Acks,
    /// BBR.cycle_stamp and BBR.bw_probe_wait.
    began: Time,
    wait: Micros,
    /// BBR.rounds_since_probe_up.
    pub(super) rounds: u64,
    /// BBR.is_bw_probe_sample.
    pub(super) is_sample: bool,
    /// BBR.prev_probe_too_high and BBR.prev_probe_precautionary.
    too_high: bool,
    precautionary: bool,
    /// BBR.bw_probe_up_rounds, BBR.bw_probe_up_acked and BBR.probe_up_acked_per_inc.
    up_rounds: u32,
    up_acked: u64,
    per_segment: u64,
    /// BBR.drain_start_round.
    drain_round: u64,
    /// BBR.probe_rtt_done_stamp and BBR.probe_rtt_round_done.
    done_at: Option<Time>,
    round_done: bool,
}

/// State from before a loss, for restoration after a spurious one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Undo {
    pub(super) state: Option<State>,
    pub(super) bounds: Bounds,
}

impl Bbr {
    fn begin_round(&mut self) {
        self.rounds.begin(self.rate.delivered);
    }

    /// CheckStartupDone (section 5.3.1).
    pub(super) fn check_startup_done(&mut self, flow: &Flow, sample: &Sample) {
        if self.state == State::Startup && flow.recovering && self.latest.round_start {
            let events = self.latest.events;
            let too_many =
                if flow.sack { events >= FULL_LOSSES && is_too_high(flow, sample) } else { events > 0 };
            if too_many {
                self.undo.state = Some(State::Startup);
                self.full.reached = true;
                self.bounds.long = self.bdp(self.max_bw.get()).max(self.latest.inflight);
            }
        }
        if self.latest.round_start {
            self.latest.events = 0;
        }
        if self.state == State::Startup && self.full.reached {
            self.state = State::Drain;
            self.phase.drain_round = self.rounds.count;
        }
    }

    /// Section 5.3.2.
    pub(super) fn check_drain_done(&mut self, flow: &Flow) {
        let is_long = self.rounds.count > self.phase.drain_round + DRAIN_ROUNDS;
        if self.state == State::Drain && (is_long || flow.inflight <= self.inflight(flow, self.bw)) {
            self.start_down(flow);
        }
    }

    fn start_down(&mut self, flow: &Flow) {
        self.latest.forget();
        self.phase.per_segment = INFINITE;
        // PickProbeWait.
        let mut random = SplitMix::new(flow.now.as_micros() ^ self.rate.delivered.rotate_left(32));
        self.phase.rounds = random.below(2);
        self.phase.wait = WAIT + RANDOM_WAIT.random(&mut random);
        self.phase.began = flow.now;
        self.phase.acks = Acks::ProbeStopping;
        self.begin_round();
        self.state = State::Down;
    }

    fn start_refill(&mut self) {
        self.bounds.reset_short_term_model();
        (self.phase.up_rounds, self.phase.up_acked) = (0, 0);
        self.phase.precautionary = false;
        self.phase.acks = Acks::Refilling;
        self.begin_round();
        self.state = State::Refill;
    }

    fn start_up(&mut self, flow: &Flow, sample: &Sample) {
        self.phase.acks = Acks::ProbeStarting;
        self.begin_round();
        self.full.reset(sample.rate);
        self.state = State::Up;
        self.raise_inflight_longterm_slope(flow);
    }

    /// UpdateProbeBWCyclePhase (section 5.3.3.9).
    pub(super) fn update_cycle(&mut self, flow: &Flow, sample: &Sample, acked: u64) {
        if !self.full.reached || self.adapt_long_term(flow, sample, acked) {
            return;
        }
        let state = self.state;
        match state {
            State::Down if self.is_time_to_probe(flow) => self.start_refill(),
            State::Down if self.is_time_to_cruise(flow) => self.state = State::Cruise,
            State::Cruise if self.is_time_to_probe(flow) => self.start_refill(),
            State::Refill if self.rounds.start => {
                self.phase.is_sample = true;
                self.start_up(flow, sample);
            }
            State::Up if self.is_time_to_go_down(flow, sample) => {
                self.phase.too_high = false;
                self.start_down(flow);
            }
            _ => {}
        }
    }

    fn is_time_to_probe(&self, flow: &Flow) -> bool {
        let reno = (self.target(flow) / flow.mss).min(RENO_ROUNDS);
        flow.now > self.phase.began + self.phase.wait || self.phase.rounds >= reno
    }

    fn is_time_to_cruise(&self, flow: &Flow) -> bool {
        flow.inflight <= self.with_headroom(flow) && flow.inflight <= self.inflight(flow, self.max_bw.get())
    }

    fn is_time_to_go_down(&mut self, flow: &Flow, sample: &Sample) -> bool {
        if self.phase.too_high && flow.inflight >= self.bounds.long {
            self.phase.precautionary = true;
            return true;
        }
        if flow.limited && flow.cwnd >= self.bounds.long {
            // BBR.inflight_longterm limits the bandwidth.
            self.full.reset(sample.rate);
            return false;
        }
        self.full.now
    }

    /// TargetInflight.
    fn target(&self, flow: &Flow) -> u64 {
        self.bdp(self.bw).min(flow.cwnd)
    }

    /// InflightWithHeadroom.
    pub(super) fn with_headroom(&self, flow: &Flow) -> u64 {
        if self.bounds.long == INFINITE {
            return INFINITE;
        }
        let headroom = (self.bounds.long / 100 * HEADROOM).max(flow.mss);
        self.bounds.long.saturating_sub(headroom).max(LEAST_SEGMENTS * flow.mss)
    }

    /// RaiseInflightLongtermSlope.
    fn raise_inflight_longterm_slope(&mut self, flow: &Flow) {
        let growth = 1 << self.phase.up_rounds;
        self.phase.up_rounds = (self.phase.up_rounds + 1).min(30);
        self.phase.per_segment = (flow.cwnd / growth).max(flow.mss);
    }

    /// ProbeInflightLongtermUpward.
    fn probe_upward(&mut self, flow: &Flow, acked: u64) {
        if !flow.limited || flow.cwnd < self.bounds.long {
            return;
        }
        self.phase.up_acked += acked;
        let segments = self.phase.up_acked / self.phase.per_segment;
        self.phase.up_acked -= segments * self.phase.per_segment;
        self.bounds.long += segments * flow.mss;
        if self.rounds.start {
            self.raise_inflight_longterm_slope(flow);
        }
    }

    /// AdaptLongTermModel. Returns whether it has changed the state.
    fn adapt_long_term(&mut self, flow: &Flow, sample: &Sample, acked: u64) -> bool {
        if self.rounds.start && self.phase.acks == Acks::ProbeStarting {
            self.phase.acks = Acks::ProbeFeedback;
        }
        if self.rounds.start && self.phase.acks == Acks::ProbeStopping {
            self.phase.is_sample = false;
            self.phase.acks = Acks::Init;
            if self.state.is_probe_bw() {
                if !sample.app_limited {
                    self.max_bw.advance();
                }
                if self.phase.precautionary && !self.phase.too_high {
                    self.start_refill();
                    return true;
                }
            }
        }
        if self.bounds.long < INFINITE && !is_too_high(flow, sample) {
            self.bounds.long = self.bounds.long.max(sample.inflight);
            if self.state == State::Up {
                self.probe_upward(flow, acked);
            }
        }
        false
    }

    /// HandleInflightTooHigh.
    pub(super) fn inflight_is_too_high(&mut self, flow: &Flow, sample: &Sample) {
        self.phase.too_high = true;
        self.phase.is_sample = false;
        if !sample.app_limited {
            self.bounds.long = sample.inflight.max(self.target(flow) / 10 * 7);
        }
        if self.state == State::Up {
            self.undo.state = Some(State::Up);
            self.start_down(flow);
        }
    }

    /// CheckProbeRTT (section 5.3.4.3). Returns the window.
    pub(super) fn check_probe_rtt(&mut self, flow: &Flow) -> u64 {
        if self.state != State::ProbeRtt && self.rtt.expired && !self.idle_restart {
            self.save_cwnd(flow);
            self.state = State::ProbeRtt;
            self.phase.done_at = None;
            self.phase.acks = Acks::ProbeStopping;
            self.begin_round();
        }
        if self.state != State::ProbeRtt {
            return flow.cwnd;
        }
        // Low delivery rates in ProbeRTT do not count.
        self.rate.limit_by_app(flow.inflight);
        if self.phase.done_at.is_none() {
            if flow.inflight <= self.probe_rtt_cwnd(flow) {
                self.phase.done_at = Some(flow.now + PROBE_RTT_LASTS);
                self.phase.round_done = false;
                self.begin_round();
            }
            return flow.cwnd;
        }
        self.phase.round_done |= self.rounds.start;
        if self.phase.round_done { self.check_probe_rtt_done(flow) } else { flow.cwnd }
    }

    /// CheckProbeRTTDone. Returns the window.
    pub(super) fn check_probe_rtt_done(&mut self, flow: &Flow) -> u64 {
        if self.phase.done_at.is_none_or(|done| flow.now <= done) {
            return flow.cwnd;
        }
        self.rtt.probe_stamp = flow.now;
        self.bounds.reset_short_term_model();
        if self.full.reached {
            self.start_down(flow);
            self.state = State::Cruise;
        } else {
            self.state = State::Startup;
        }
        self.restored(flow.cwnd)
    }

    pub(super) fn probe_rtt_cwnd(&self, flow: &Flow) -> u64 {
        let volume = self.bdp(self.bw) * State::ProbeRtt.cwnd_gain() / 100;
        volume.max(LEAST_SEGMENTS * flow.mss)
    }

    /// HandleSpuriousLossDetection (section 5.5.11.2).
    pub(in crate::proto::recovery) fn on_spurious(&mut self) {
        self.latest.lost = false;
        self.full.reset(0);
        self.bounds.widen(&self.undo.bounds);
        match self.undo.state.take() {
            Some(State::Startup) if self.state != State::Startup => {
                self.full.reached = false;
                if self.state != State::ProbeRtt {
                    self.state = State::Startup;
                }
            }
            Some(State::Up) if self.state != State::Up && self.state != State::ProbeRtt => {
                self.start_refill()
            }
            _ => {}
        }
    }
}
