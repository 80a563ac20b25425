//! The state of the sender: fast recovery, recovery after a timeout, and the check for a spurious timeout.

/// State of the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No data is known to be lost.
    Open,
    /// Fast recovery, until all data sent before it is acknowledged.
    Recovery,
    /// After a timeout, until all data sent before it is acknowledged.
    Loss,
}

/// State of the check for a spurious timeout (RFC 5682, section 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    /// No check is in progress.
    None,
    /// The first segment was retransmitted and is not acknowledged yet.
    Begun,
    /// An acknowledgement has arrived. New data is sent next, and its acknowledgement decides.
    NewData,
}

/// The state of the sender, and the data to which the last reduction of the window belongs.
#[derive(Debug)]
pub(super) struct Phase {
    state: State,
    check: Check,
    /// The next new segment has CWR.
    cwr: bool,
    /// Losses up to this position cause no second reduction.
    recover: u64,
}

impl Phase {
    pub(super) fn new() -> Self {
        Self { state: State::Open, check: Check::None, cwr: false, recover: 0 }
    }

    #[inline]
    pub(super) fn state(&self) -> State {
        self.state
    }

    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    #[inline]
    pub(super) fn is_recovery(&self) -> bool {
        self.state == State::Recovery
    }

    /// Records a reduction of the window because of data up to `published`.
    pub(super) fn reduced(&mut self, published: u64) {
        (self.recover, self.cwr) = (published, true);
    }

    /// Begins fast recovery.
    pub(super) fn recover(&mut self, published: u64) {
        self.state = State::Recovery;
        self.reduced(published);
    }

    /// Handles a timeout. `check`: a check for a spurious timeout is possible.
    pub(super) fn time_out(&mut self, published: u64, check: bool) {
        self.state = State::Loss;
        self.check = if check { Check::Begun } else { Check::None };
        self.reduced(published);
    }

    pub(super) fn end(&mut self) {
        (self.state, self.check) = (State::Open, Check::None);
    }

    /// Returns whether all data sent before the recovery is acknowledged.
    pub(super) fn is_over(&self, una: u64) -> bool {
        self.state != State::Open && una >= self.recover
    }

    /// Returns whether a loss is outside the window that was already reduced (RFC 6582, section 4; RFC 3168, section
    /// 6.1.2).
    pub(super) fn may_reduce_window(&self, una: u64) -> bool {
        self.recover == 0 || una > self.recover
    }

    /// Returns whether data that a timeout marked lost has arrived: its lowest end is `original` (RFC 5682, section
    /// 3.1, step 3.b).
    pub(super) fn is_refuted(&self, original: u64) -> bool {
        self.check != Check::None && original <= self.recover
    }

    /// Continues the check after an ACK. Data that arrives after a hole confirms the hole (RFC 5682, section 3.1, steps
    /// 2.b and 3.a).
    pub(super) fn check_ack(&mut self, advanced: bool, sacked: u64) {
        self.check = match self.check {
            Check::Begun | Check::NewData if advanced && sacked == 0 => Check::NewData,
            Check::Begun if sacked == 0 => Check::Begun,
            _ => Check::None,
        };
    }

    /// Returns whether the check needs new data, so that lost data waits.
    pub(super) fn wants_new_data(&self) -> bool {
        self.check == Check::NewData
    }

    /// Handles the lack of new data beyond `planned`. Returns whether lost data waited for it.
    pub(super) fn has_nothing_new(&mut self, planned: u64) -> bool {
        let waited = self.check == Check::NewData && planned <= self.recover;
        if waited {
            self.check = Check::None;
        }
        waited
    }

    pub(super) fn cwr_due(&self) -> bool {
        self.cwr
    }

    pub(super) fn cwr_sent(&mut self) {
        self.cwr = false;
    }
}
