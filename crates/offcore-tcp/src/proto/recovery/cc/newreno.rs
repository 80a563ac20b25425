//! Congestion avoidance of RFC 5681: the window grows by a segment per acknowledged window, and is halved after a loss.

/// The state of NewReno.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NewReno {
    /// Bytes acknowledged since the window grew (RFC 3465, section 2.1).
    acked: u32,
}

impl NewReno {
    /// Returns the window after `acked` more bytes.
    #[inline]
    pub(super) fn on_ack(&mut self, cwnd: u32, acked: u32, mss: u32) -> u32 {
        self.acked = self.acked.saturating_add(acked.min(cwnd));
        if self.acked < cwnd {
            return cwnd;
        }
        self.acked -= cwnd;
        cwnd.saturating_add(mss)
    }

    /// Returns the slow start threshold after a loss with `flight` bytes in flight (RFC 5681, equation 4).
    pub(super) fn on_loss(&mut self, flight: u32) -> u32 {
        self.acked = 0;
        flight / 2
    }
}
