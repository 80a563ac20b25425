//! Retransmission timeouts, probes, and the end of the reordering wait.

use offcore_stats::time::{Micros, Time};

use super::{Recovery, State};

/// Assumed maximum ACK delay of receivers (RFC 8985, section 7.2: TLP.max_ack_delay), as on Linux.
const ACK_DELAY: Micros = Micros::from_millis(200);
/// Delay of a probe beyond two round trips. It allows for late receivers and timers. Linux uses the same 2 ms.
const SLACK: Micros = Micros::from_millis(2);
/// Delay of a probe before the first round-trip time sample (RFC 8985, section 7.2).
const UNKNOWN: Micros = Micros::from_secs(1);

/// The action that the caller must take after a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TimerAction {
    /// No action.
    None,
    /// Send a segment of new data, for which [`Recovery::window`] has room now, if the peer's window allows it.
    /// Otherwise send [`Recovery::next_probe`].
    Probe,
    /// A timeout: all data counts as lost. Give up if [`Recovery::backoffs`] is too high. Otherwise send the data of
    /// [`Recovery::next_lost`].
    Retransmit,
    /// The reordering wait has ended: send the data of [`Recovery::next_lost`].
    Reorder,
}

impl Recovery {
    /// Returns the time of the next [`Recovery::timer`] call. Every call on this structure may change it.
    #[inline]
    pub(crate) fn deadline(&self) -> Option<Time> {
        let first = self.rtt.at.min(self.probe.at).min(self.rack.at).min(self.release_at);
        (first != Time::NEVER).then_some(first)
    }

    /// Stops the timers of data in flight.
    #[inline]
    pub(super) fn stop_timers(&mut self) {
        (self.rtt.at, self.probe.at, self.rack.at) = (Time::NEVER, Time::NEVER, Time::NEVER);
    }

    /// Processes expired timers, one action per call. If the deadline is not in the future afterwards, it must be
    /// called again.
    pub(crate) fn timer(&mut self, now: Time) -> TimerAction {
        self.release_due(now);
        if self.runs.is_empty() {
            self.stop_timers();
            return TimerAction::None;
        }
        if self.rack.at <= now {
            return self.reorder_timeout(now);
        }
        if self.probe.at <= now {
            self.probe.expire();
            // The probe and the timeout may be due together; the probe has precedence (RFC 8985, section 7.2).
            self.rtt.restart(now);
            return TimerAction::Probe;
        }
        if self.rtt.at > now {
            return TimerAction::None;
        }
        if self.runs.head_planned() {
            // The retransmission is still being copied. Its timer starts when it is published.
            self.rtt.restart(now);
            return TimerAction::None;
        }
        self.time_out(now);
        TimerAction::Retransmit
    }

    fn reorder_timeout(&mut self, now: Time) -> TimerAction {
        let flight = self.runs.published - self.runs.una;
        let lost = self.find_lost(now, false);
        if lost == 0 {
            return TimerAction::None;
        }
        if self.phase.is_open() {
            self.enter(now, flight, 0);
        }
        if self.phase.is_recovery() {
            self.reduce(0, false);
        }
        TimerAction::Reorder
    }

    /// RFC 6298, section 5.4 to 5.6, and RFC 5681, section 3.1.
    fn time_out(&mut self, now: Time) {
        if self.runs.head().is_some_and(super::runs::Run::sacked) {
            // The receiver acknowledges less than it SACKed, so it has dropped data (RFC 2018, section 8).
            self.runs.forget_sacks();
        }
        let flight = self.runs.published - self.runs.una;
        self.model_recovery(now);
        let episode = self.episode.get_or_insert_default();
        episode.stats.timeouts += 1;
        match self.phase.state() {
            State::Open => {
                episode.undo.begin(self.cc, self.runs.una);
                self.cc.on_loss(flight);
            }
            // The window was already reduced for this data.
            State::Recovery => episode.undo.go_on(),
            State::Loss => {}
        }
        self.cc.on_timeout();
        let lost = self.runs.mark_all_lost();
        self.model_lost(now, lost);
        self.phase.time_out(self.runs.published, self.sack);
        self.duplicates = 0;
        self.probe.forget();
        self.rack.at = Time::NEVER;
        self.rtt.back_off();
        self.rtt.restart(now);
    }

    /// Records a needless probe: the next one waits four times as long. Linux delays the ACK of any number of segments
    /// while its application does not read.
    pub(super) fn note_spurious_probe(&mut self) {
        let probe_wait = &mut self.episode.get_or_insert_default().probe_wait;
        *probe_wait = ((*probe_wait).max(SLACK) * 4).min(ACK_DELAY);
    }

    /// Starts the timer of the next probe if a probe is useful (RFC 8985, section 7.2).
    #[inline]
    pub(super) fn arm_probe(&mut self, now: Time) {
        let useful = self.sack && self.phase.is_open() && self.runs.sacked == 0 && self.probe.is_none();
        if !useful {
            self.probe.at = Time::NEVER;
            return;
        }
        let single = self.runs.published - self.runs.una <= u64::from(self.cc.mss);
        let probe_wait = self.episode.as_ref().map_or(Micros::ZERO, |episode| episode.probe_wait);
        let delay = if single { ACK_DELAY } else { probe_wait.max(SLACK) };
        let wait = match self.rtt.srtt() {
            Micros::ZERO => UNKNOWN,
            srtt => srtt * 2 + delay,
        };
        self.probe.at = (now + wait).min(self.rtt.at);
    }
}
