//! Pacing of connections that use BBR or have a maximum pacing rate, and the events for BBR.
//!
//! A paced connection sends a quantum, and is then *held* until the quantum's time has passed: `Recovery::release_at`.
//! Tail loss probes are not held.

use offcore_stats::time::{Micros, Time};

use super::bbr::{Bbr, Delivered, Flow, quantum};
use super::{Algorithm, Recovery};

/// Maximum timer delay that the next quantum compensates, in nanoseconds.
const LATE: u64 = 1_000_000;
/// Linux's `tcp_pacing_ss_ratio` and `tcp_pacing_ca_ratio`: percentage of the window that is sent per round trip.
const SLOW_START: u64 = 200;
const AVOIDANCE: u64 = 120;

/// State of a paced connection.
#[derive(Debug)]
pub(super) struct Paced {
    /// Maximum rate in bytes per second (`SO_MAX_PACING_RATE`).
    most: u64,
    /// C.next_send_time in nanoseconds.
    next: u64,
    /// Time of the last event.
    now: Time,
    bbr: Option<Bbr>,
}

impl Recovery {
    /// Switches to another congestion control algorithm.
    pub(in crate::proto) fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.cc.set_algorithm(algorithm);
        if let Some(episode) = &mut self.episode {
            // The saved window belongs to the other algorithm.
            episode.undo.take();
        }
        self.keep_paced(self.paced.as_ref().map_or(u64::MAX, |paced| paced.most), algorithm);
    }

    /// Sets the maximum pacing rate in bytes per second (`SO_MAX_PACING_RATE`). `u64::MAX` means no limit.
    pub(in crate::proto) fn set_max_pacing_rate(&mut self, most: u64) {
        let algorithm = self.cc.algorithm();
        self.keep_paced(most, algorithm);
    }

    /// Creates, keeps or drops the pacing state.
    fn keep_paced(&mut self, most: u64, algorithm: Algorithm) {
        let bbr = algorithm == Algorithm::Bbr;
        if !bbr && most == u64::MAX {
            (self.paced, self.release_at) = (None, Time::NEVER);
            return;
        }
        let paced =
            self.paced.get_or_insert_with(|| Box::new(Paced { most, next: 0, now: Time::ZERO, bbr: None }));
        paced.most = most.max(1);
        if !bbr {
            paced.bbr = None;
        }
    }

    /// Starts BBR when the handshake is complete, or when data is sent for the first time.
    fn begin_bbr(&mut self, now: Time) {
        let (srtt, cwnd) = (self.rtt.srtt(), u64::from(self.cc.cwnd));
        let bbr = self.cc.algorithm() == Algorithm::Bbr;
        if let Some(paced) = &mut self.paced {
            paced.now = now;
            if bbr && paced.bbr.is_none() {
                paced.bbr = Some(Bbr::new(now, srtt, cwnd));
            }
        }
    }

    /// Returns the pacing rate in bytes per second, or `u64::MAX` for a connection without pacing.
    pub(in crate::proto) fn pacing_rate(&self) -> u64 {
        let Some(paced) = &self.paced else { return u64::MAX };
        let rate = match (&paced.bbr, self.rtt.srtt()) {
            (Some(bbr), _) => bbr.pacing_rate,
            (None, Micros::ZERO) => u64::MAX,
            (None, srtt) => {
                let (cwnd, ssthresh) = (u64::from(self.cc.cwnd), u64::from(self.cc.ssthresh));
                let percent = if cwnd < ssthresh / 2 { SLOW_START } else { AVOIDANCE };
                cwnd.max(self.pipe()) * percent * 10_000 / srtt.get()
            }
        };
        rate.clamp(1, paced.most)
    }

    /// Returns the part of `room` that may be sent now: a quantum, or nothing.
    #[inline(never)]
    pub(super) fn paced_room(&self, room: u64) -> u64 {
        if self.release_at != Time::NEVER {
            0
        } else {
            room.min(quantum(self.pacing_rate(), self.cc.mss.into()))
        }
    }

    /// Prepares for the plan of `bytes` of new data.
    #[inline(never)]
    pub(super) fn pace_new(&mut self, now: Time, bytes: u64) {
        self.begin_bbr(now);
        let flow = self.flow(now, 0);
        if flow.inflight == 0
            && let Some(bbr) = self.bbr()
        {
            let cwnd = bbr.restart(&flow);
            self.cc.set(cwnd);
        }
        self.pace(bytes);
    }

    /// Charges `bytes` to the pacing rate.
    #[inline(never)]
    pub(super) fn pace(&mut self, bytes: u64) {
        let rate = self.pacing_rate();
        let Some(paced) = &mut self.paced else { return };
        let now = paced.now.as_micros().saturating_mul(1000);
        let took = bytes.saturating_mul(1_000_000_000) / rate;
        paced.next = paced.next.max(now.saturating_sub(LATE)).saturating_add(took);
        self.release_at =
            if paced.next > now { Time::from_micros(paced.next.div_ceil(1000)) } else { Time::NEVER };
    }

    /// Releases held data whose time has come.
    #[inline]
    pub(super) fn release_due(&mut self, now: Time) {
        if self.release_at <= now {
            self.release_at = Time::NEVER;
        }
        if let Some(paced) = &mut self.paced {
            paced.now = now;
        }
    }

    /// Returns whether pacing holds data.
    pub(in crate::proto) fn is_held(&self) -> bool {
        self.release_at != Time::NEVER
    }

    /// Reports that the application has less than a segment to send.
    #[inline]
    pub(in crate::proto) fn lacks_data(&mut self) {
        if self.paced.is_some() {
            self.limit_by_app();
        }
    }

    #[cold]
    fn limit_by_app(&mut self) {
        let pipe = self.pipe();
        if pipe < u64::from(self.cc.cwnd)
            && self.runs.lost == 0
            && let Some(bbr) = self.bbr()
        {
            bbr.limit_by_app(pipe);
        }
    }

    fn bbr(&mut self) -> Option<&mut Bbr> {
        self.paced.as_mut()?.bbr.as_mut()
    }

    /// Returns the state of the connection. `before`: the first unacknowledged byte before this ACK.
    fn flow(&self, now: Time, before: u64) -> Flow {
        Flow {
            now,
            mss: self.cc.mss.into(),
            cwnd: self.cc.cwnd.into(),
            inflight: self.pipe(),
            limited: before < self.limited,
            recovering: !self.phase.is_open(),
            sack: self.sack,
        }
    }

    /// Reports published data. `idle`: no data was in flight before.
    #[inline(never)]
    pub(super) fn model_sent(&mut self, now: Time, idle: bool) {
        self.begin_bbr(now);
        let (flow, srtt) = (self.flow(now, 0), self.rtt.srtt());
        if let Some(bbr) = self.bbr() {
            bbr.on_sent(&flow, idle, srtt);
        }
    }

    /// Returns whether no published data is in flight.
    pub(super) fn is_quiet_on_wire(&self) -> bool {
        let gone = self.runs.sacked + self.runs.lost + self.runs.replanned;
        self.runs.published - self.runs.una <= u64::from(gone)
    }

    /// Reports that an ACK has delivered `bytes`. `newest`: they include the segment that was sent last of all
    /// delivered ones.
    #[inline(never)]
    pub(super) fn model_ack(&mut self, now: Time, before: u64, bytes: u64, newest: bool) {
        self.release_due(now);
        let flow = self.flow(now, before);
        let newest = newest.then_some(self.rack.sample());
        let delivered = Delivered { bytes, newest, least: self.rtt.min().unwrap_or_default() };
        if let Some(bbr) = self.bbr() {
            let cwnd = bbr.on_ack(&flow, &delivered);
            self.cc.set(cwnd);
        }
    }

    /// Reports that `bytes` were marked lost.
    pub(super) fn model_lost(&mut self, now: Time, bytes: u64) {
        let (flow, sent) = (self.flow(now, 0), self.runs.lost_sent);
        if bytes > 0
            && let Some(bbr) = self.bbr()
        {
            bbr.on_lost(&flow, bytes, sent);
        }
    }

    /// Reports an ECN mark, or a loss repaired by a probe.
    pub(super) fn model_mark(&mut self, now: Time) {
        let flow = self.flow(now, 0);
        if let Some(bbr) = self.bbr() {
            bbr.on_mark(&flow);
        }
    }

    /// Reports the start of fast recovery or a timeout.
    pub(super) fn model_recovery(&mut self, now: Time) {
        let flow = self.flow(now, 0);
        if let Some(bbr) = self.bbr() {
            bbr.save(&flow);
        }
    }

    /// Reports the end of a recovery. Returns `false` without BBR.
    pub(super) fn model_recovered(&mut self, spurious: bool) -> bool {
        let cwnd = u64::from(self.cc.cwnd);
        let Some(bbr) = self.bbr() else { return false };
        if spurious {
            bbr.on_spurious();
        }
        let cwnd = bbr.restored(cwnd);
        self.cc.set(cwnd);
        true
    }
}
