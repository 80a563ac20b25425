//! Congestion control: the congestion window and its changes after ACKs and losses.
//!
//! Windows are in bytes. NewReno and CUBIC share slow start, the response to a timeout and the restart after idle
//! periods. Their growth in congestion avoidance and their response to a loss differ. HyStart++ ends CUBIC's first slow
//! start. BBR sets the window from its model.

mod cubic;
mod hystart;
mod newreno;

use offcore_stats::named;
use offcore_stats::time::{Micros, Time};

use cubic::Cubic;
use hystart::HyStart;
use newreno::NewReno;

pub(super) use hystart::Progress;

/// Maximum congestion window: the limit of a scaled window (RFC 7323, section 2.3).
const LARGEST: u32 = 1 << 30;

named! {
    /// Congestion control algorithms, with their names on Linux.
    #[derive(Default)]
    pub enum Algorithm {
        /// RFC 9438: the window grows by a cubic function of the time since the last loss.
        #[default]
        Cubic = "cubic",
        /// RFC 5681: the window grows by a segment per round trip, and is halved after a loss.
        NewReno = "reno",
        /// BBR version 3 (draft-ietf-ccwg-bbr): a model of the path sets rate and window.
        Bbr = "bbr",
    }
}

#[derive(Clone, Copy, Debug)]
enum Growth {
    NewReno(NewReno),
    /// CUBIC in its first slow start.
    Starting(HyStart),
    Cubic(Cubic),
    /// The window is set from outside.
    Bbr,
}

/// The congestion window of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Congestion {
    pub(super) cwnd: u32,
    pub(super) ssthresh: u32,
    pub(super) mss: u32,
    growth: Growth,
}

impl Growth {
    fn new(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::NewReno => Self::NewReno(NewReno::default()),
            Algorithm::Cubic => Self::Starting(HyStart::default()),
            Algorithm::Bbr => Self::Bbr,
        }
    }
}

impl Congestion {
    /// Creates the state with RFC 6928's initial window: ten segments, but not much more than 14,600 bytes.
    pub(super) fn new(mss: u32, algorithm: Algorithm) -> Self {
        Self { cwnd: initial(mss), ssthresh: u32::MAX, mss, growth: Growth::new(algorithm) }
    }

    /// Switches to another algorithm and keeps the current window.
    pub(super) fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.growth = Growth::new(algorithm);
        if algorithm == Algorithm::Bbr {
            self.ssthresh = u32::MAX;
        }
        if self.ssthresh < u32::MAX {
            self.end_first_start();
        }
    }

    pub(super) fn algorithm(&self) -> Algorithm {
        match self.growth {
            Growth::NewReno(_) => Algorithm::NewReno,
            Growth::Starting(_) | Growth::Cubic(_) => Algorithm::Cubic,
            Growth::Bbr => Algorithm::Bbr,
        }
    }

    /// Ends CUBIC's first slow start.
    fn end_first_start(&mut self) {
        if let Growth::Starting(_) = self.growth {
            self.growth = Growth::Cubic(Cubic::default());
        }
    }

    /// Grows the window for `acked` bytes that a cumulative ACK covers. In slow start it grows by the same number of
    /// bytes, because receivers of vectors acknowledge many segments at once (as on Linux; RFC 3465 would allow two).
    #[inline]
    pub(super) fn on_ack(&mut self, now: Time, acked: u64, srtt: Micros, progress: &Progress) {
        let mut acked = u32::try_from(acked).unwrap_or(u32::MAX).min(LARGEST);
        if self.cwnd < self.ssthresh {
            let mut grown = acked.min(self.ssthresh - self.cwnd);
            match &mut self.growth {
                Growth::NewReno(_) | Growth::Cubic(_) => {}
                Growth::Bbr => return,
                Growth::Starting(start) => {
                    grown = start.on_ack(grown, progress);
                    if start.is_over() {
                        self.ssthresh = self.cwnd;
                        return self.end_first_start();
                    }
                }
            }
            self.cwnd = (self.cwnd + grown).min(LARGEST);
            if self.cwnd < self.ssthresh {
                return;
            }
            // The rest after slow start counts for congestion avoidance.
            acked -= grown;
        }
        if acked == 0 {
            return;
        }
        let cwnd = match &mut self.growth {
            Growth::NewReno(newreno) => newreno.on_ack(self.cwnd, acked, self.mss),
            Growth::Starting(_) | Growth::Bbr => self.cwnd,
            Growth::Cubic(cubic) => cubic.on_ack(now, self.cwnd, acked, self.mss, srtt),
        };
        self.cwnd = cwnd.min(LARGEST);
    }

    /// Processes an ACK of data that was limited by the application, not by the window. The window does not change, and
    /// CUBIC's clock pauses (RFC 9438, section 5.8).
    #[inline]
    pub(super) fn on_unlimited(&mut self, now: Time) {
        if let Growth::Cubic(cubic) = &mut self.growth {
            cubic.pause(now);
        }
    }

    /// Sets the window in a recovery, independent of the algorithm.
    pub(super) fn set(&mut self, cwnd: u64) {
        self.cwnd = u32::try_from(cwnd).unwrap_or(LARGEST).min(LARGEST);
    }

    /// Handles a loss or a mark: sets `ssthresh` from the bytes in flight. The caller sets the window.
    pub(super) fn on_loss(&mut self, flight: u64) {
        // Limited transmit sends beyond the window, but the network has not carried this data (RFC 5681, section 3.2).
        let flight = u32::try_from(flight).unwrap_or(u32::MAX).min(self.cwnd);
        self.end_first_start();
        let kept = match &mut self.growth {
            Growth::NewReno(newreno) => newreno.on_loss(flight),
            Growth::Starting(_) | Growth::Bbr => return,
            Growth::Cubic(cubic) => cubic.on_loss(self.cwnd, flight),
        };
        self.ssthresh = kept.max(2 * self.mss);
    }

    /// Handles a timeout: the window becomes one segment (RFC 5681, section 3.1).
    pub(super) fn on_timeout(&mut self) {
        self.cwnd = self.mss;
        if let Growth::Cubic(cubic) = &mut self.growth {
            cubic.forget_epoch();
        }
    }

    /// Returns the window after `idle` without data in flight: it is halved for each `rto`, down to the
    /// restart window (RFC 5681, section 4.1; RFC 2861, section 3.2). BBR uses pacing instead.
    #[inline]
    pub(super) fn after_idle(&self, idle: Micros, rto: Micros) -> u32 {
        if matches!(self.growth, Growth::Bbr) {
            return self.cwnd;
        }
        let halvings = idle.get().checked_div(rto.get()).unwrap_or(0).min(31);
        let floor = self.cwnd.min(initial(self.mss));
        (self.cwnd >> halvings).max(floor)
    }

    /// Handles transmission after an idle period.
    pub(super) fn restart(&mut self, now: Time, idle: Micros, rto: Micros) {
        let cwnd = self.after_idle(idle, rto);
        if cwnd < self.cwnd {
            self.ssthresh = self.ssthresh.max(self.cwnd / 4 * 3);
            self.cwnd = cwnd;
        }
        self.on_unlimited(now);
    }

    /// Changes the segment size. The window stays the same in bytes, but holds at least one segment.
    pub(super) fn set_mss(&mut self, mss: u32) {
        self.mss = mss;
        self.cwnd = self.cwnd.max(mss);
        self.ssthresh = self.ssthresh.max(2 * mss);
    }

    /// Handles the loss of a handshake segment: the window becomes one segment (RFC 5681, section 3.1).
    pub(super) fn on_handshake_loss(&mut self) {
        self.cwnd = self.mss;
    }
}

/// RFC 6928, section 2.
fn initial(mss: u32) -> u32 {
    (10 * mss).min(14_600.max(2 * mss))
}

#[cfg(test)]
mod tests;
