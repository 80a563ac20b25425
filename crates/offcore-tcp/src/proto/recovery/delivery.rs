//! The data delivered by one ACK: collected while runs are acknowledged, then used by the estimators.

use offcore_stats::time::{Micros, Time};

/// How delivered data was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    /// Time of the last publication.
    pub(super) time: Time,
    /// It was sent more than once, so an ACK is ambiguous (Karn).
    pub(super) repeated: bool,
    /// SACK has already covered it.
    pub(super) known: bool,
}

/// The most recently sent segment among the delivered ones, for RACK (RFC 8985, section 5.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Newest {
    /// Send time: RACK.xmit_ts.
    pub(super) time: Time,
    /// End position, which decides among segments sent at the same time: RACK.end_seq.
    pub(super) end: u64,
}

/// The data delivered by an ACK.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delivery {
    now: Time,
    /// Retransmissions sent later than this did not cause the ACK, because no round trip is so short (RFC 8985, section
    /// 6.2, step 2).
    latest: Time,
    /// Retransmissions sent later than this did not advance the ACK, whose echo is older (the same step). The echo does
    /// not apply to SACKed data, which the step overlooks: it is from the last in-sequence segment (RFC 7323, section
    /// 4.3).
    echo: Time,
    /// Bytes that the cumulative ACK covers, whether SACKed before or not.
    pub(super) acked: u64,
    /// The part of them that SACK did not cover before.
    pub(super) fresh: u64,
    /// Bytes that this ACK newly SACKs.
    pub(super) sacked: u64,
    /// The newest segment of all ACKs so far.
    pub(super) newest: Newest,
    /// Its round-trip time. `None` if this ACK delivers no newer segment.
    pub(super) rtt: Option<Micros>,
    /// Round-trip time of a segment that was sent only once.
    pub(super) once: Option<Micros>,
    /// Send time of the first segment covered by the cumulative ACK, if the ACK gives a sample for it.
    pub(super) first: Option<Time>,
    /// The cumulative ACK covers data that was sent more than once.
    pub(super) repeated: bool,
    /// The highest byte delivered so far: RACK.fack.
    pub(super) highest: u64,
    /// Data below `highest` that was sent only once was delivered (step 3).
    pub(super) reordered: bool,
    /// The lowest end of delivered data that was sent only once.
    pub(super) original: u64,
}

impl Delivery {
    /// Creates an empty delivery. `echo`: send time of the segment whose timestamp the ACK echoes, if there is one.
    #[inline]
    pub(super) fn new(
        now: Time,
        newest: Newest,
        highest: u64,
        echo: Option<Time>,
        least: Option<Micros>,
    ) -> Self {
        let latest = now.saturating_sub(least.unwrap_or_default());
        Self {
            now,
            latest,
            echo: echo.unwrap_or(Time::NEVER),
            acked: 0,
            fresh: 0,
            sacked: 0,
            newest,
            rtt: None,
            once: None,
            first: None,
            repeated: false,
            highest,
            reordered: false,
            original: u64::MAX,
        }
    }

    /// Adds `bytes` up to `end`, sent as described by `sent`, that the cumulative ACK covers.
    #[inline]
    pub(super) fn ack(&mut self, sent: Sent, end: u64, bytes: u64) {
        self.acked += bytes;
        self.repeated |= sent.repeated;
        if sent.known {
            return;
        }
        self.fresh += bytes;
        if self.first.is_none() {
            self.first = Some(sent.time);
        }
        self.deliver(sent, end, self.latest.min(self.echo));
    }

    /// Adds `bytes` up to `end`, sent as described by `sent`, that SACK covers.
    #[inline]
    pub(super) fn sack(&mut self, sent: Sent, end: u64, bytes: u64) {
        self.sacked += bytes;
        self.deliver(sent, end, self.latest);
    }

    #[inline]
    fn deliver(&mut self, sent: Sent, end: u64, latest: Time) {
        if end > self.highest {
            self.highest = end;
        } else if !sent.repeated {
            self.reordered = true;
        }
        if !sent.repeated {
            self.original = self.original.min(end);
            self.once = Some(self.now.saturating_since(sent.time));
        } else if sent.time > latest {
            return;
        }
        let this = Newest { time: sent.time, end };
        if this >= self.newest {
            self.newest = this;
            self.rtt = Some(self.now.saturating_since(sent.time));
        }
    }
}
