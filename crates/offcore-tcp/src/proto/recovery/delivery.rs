//! What one ACK delivers: gathered while runs are acknowledged, used by the estimators afterwards.

/// How what is delivered was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    /// When it was published last.
    pub(super) time: u64,
    /// It was sent more than once, so an ACK may be for either (Karn).
    pub(super) repeated: bool,
    /// SACK covers it already.
    pub(super) known: bool,
}

/// What RACK knows of the segment delivered that was sent last (RFC 8985, section 5.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Newest {
    /// When it was sent: RACK.xmit_ts.
    pub(super) time: u64,
    /// Its end, which decides among segments sent at the same time: RACK.end_seq.
    pub(super) end: u64,
}

/// What an ACK delivered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delivery {
    now: u64,
    /// What was sent again later than this did not cause the ACK: no segment comes back so soon (RFC 8985, section 6.2,
    /// step 2).
    latest: u64,
    /// What was sent again later than this did not advance the ACK, whose echo is older (the same step). It says nothing of
    /// what is SACKed: the echo is that of the last segment in sequence (RFC 7323, section 4.3), where the step overlooks it.
    echo: u64,
    /// Bytes that the cumulative ACK covers, which were SACKed before or not.
    pub(super) acked: u64,
    /// Of those, what SACK did not cover before.
    pub(super) fresh: u64,
    /// Bytes that SACK covers since this ACK.
    pub(super) sacked: u64,
    /// The newest segment of all ACKs so far.
    pub(super) newest: Newest,
    /// How long that took; none when this ACK has none newer.
    pub(super) rtt: Option<u64>,
    /// How long a segment took that was sent only once.
    pub(super) once: Option<u64>,
    /// When the first segment was sent that the cumulative ACK covers, if the ACK gives a sample for it.
    pub(super) first: Option<u64>,
    /// The cumulative ACK covers data that was sent more than once.
    pub(super) repeated: bool,
    /// The highest byte delivered so far: RACK.fack.
    pub(super) highest: u64,
    /// Data below it was delivered that was sent only once (step 3).
    pub(super) reordered: bool,
    /// The lowest end of delivered data that was sent only once.
    pub(super) original: u64,
}

impl Delivery {
    /// Nothing yet. `echo`: when the segment was sent that the ACK echoes, if it has a timestamp.
    #[inline]
    pub(super) fn new(now: u64, newest: Newest, highest: u64, echo: Option<u64>, least: Option<u64>) -> Self {
        let latest = now.saturating_sub(least.unwrap_or(0));
        Self {
            now,
            latest,
            echo: echo.unwrap_or(u64::MAX),
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

    /// A cumulative ACK covers `bytes` up to `end`, which were `sent` so.
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

    /// SACK covers `bytes` up to `end`, which were `sent` so.
    #[inline]
    pub(super) fn sack(&mut self, sent: Sent, end: u64, bytes: u64) {
        self.sacked += bytes;
        self.deliver(sent, end, self.latest);
    }

    #[inline]
    fn deliver(&mut self, sent: Sent, end: u64, latest: u64) {
        if end > self.highest {
            self.highest = end;
        } else if !sent.repeated {
            self.reordered = true;
        }
        if !sent.repeated {
            self.original = self.original.min(end);
            self.once = Some(self.now.saturating_sub(sent.time));
        } else if sent.time > latest {
            return;
        }
        let this = Newest { time: sent.time, end };
        if this >= self.newest {
            self.newest = this;
            self.rtt = Some(self.now.saturating_sub(sent.time));
        }
    }
}
