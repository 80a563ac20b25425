//! The state of one connection.

use std::ops::Range;

use offcore_stats::time::{Micros, Time};
use offcore_wire::{SackBlock, TcpFlags, TcpOptions, TcpTemplate, Timestamps};

use super::addr::FlowKey;
use super::challenge::ChallengeLimit;
use super::close_timer::CloseTimer;
use super::delivery::Delivery;
use super::headers::Headers;
use super::hop::Hop;
use super::iface::ResolvedRoute;
use super::keepalive::Liveness;
use super::output::{self, Fields};
use super::receive::{AckNeed, Receiver};
use super::segment::Segment;
use super::send::Sender;

/// Time after which a reduced path MTU is probed again.
const PATH_AGE: Micros = Micros::from_secs(600);

/// States of RFC 9293, 3.3.2. LISTEN is not a connection, and TIME-WAIT is stored elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    SynSent,
    SynReceived,
    Established,
    FinWait1,
    FinWait2,
    CloseWait,
    Closing,
    LastAck,
    /// The connection has ended. Received data can still be read.
    Closed,
}

impl State {
    /// Returns the name in RFC 9293.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SynSent => "SYN-SENT",
            Self::SynReceived => "SYN-RECEIVED",
            Self::Established => "ESTABLISHED",
            Self::FinWait1 => "FIN-WAIT-1",
            Self::FinWait2 => "FIN-WAIT-2",
            Self::CloseWait => "CLOSE-WAIT",
            Self::Closing => "CLOSING",
            Self::LastAck => "LAST-ACK",
            Self::Closed => "CLOSED",
        }
    }
}

/// The options negotiated by the SYNs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Agreed {
    /// The offset of our timestamps to the clock, in milliseconds.
    pub timestamps: Option<u32>,
    pub sack: bool,
    pub ecn: bool,
}

/// The state of path MTU reports.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PathMtu {
    /// Maximum payload bytes according to an unverified report, although longer segments have been acknowledged. It is
    /// used when segments are lost (RFC 5927, 7.2).
    pub claimed: Option<u16>,
    /// Time of the last reduction of the segment size, and the size before it.
    pub cut: Option<(Time, u16)>,
}

/// A connection in SYN-SENT or SYN-RECEIVED.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SynTimer {
    pub due: Time,
    pub tries: u8,
    /// The number of SYN retransmissions (`TCP_SYNCNT`).
    pub retries: u8,
    pub since: Time,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Tcb {
    pub key: FlowKey,
    pub hop: Hop,
    pub headers: Headers,
    pub state: State,
    pub agreed: Agreed,
    pub receiver: Receiver,
    pub sender: Sender,
    pub asking: Option<SynTimer>,
    pub delivery: Delivery,
    pub close_timer: CloseTimer,
    /// State of ICMP reports about the path. `None` without reports.
    pub path: Option<Box<PathMtu>>,
    pub liveness: Liveness,
    /// Time at which a quiet connection frees unneeded memory. `None` after that.
    pub trim: Option<Time>,
    pub challenges: ChallengeLimit,
    /// In the list of connections whose acknowledgements and timers are checked at the end of the vector.
    pub touched: bool,
    /// In the list of connections that may have something to send.
    pub ready: bool,
}

impl Tcb {
    pub(crate) fn new(key: FlowKey, way: ResolvedRoute, receiver: Receiver, sender: Sender) -> Self {
        Self {
            key,
            hop: Hop::new(way),
            headers: Headers::default(),
            state: State::SynSent,
            agreed: Agreed::default(),
            receiver,
            sender,
            asking: None,
            delivery: Delivery::default(),
            close_timer: CloseTimer::new(),
            path: None,
            liveness: Liveness::default(),
            trim: None,
            challenges: ChallengeLimit::default(),
            touched: false,
            ready: false,
        }
    }

    /// Returns whether both sides know the sequence numbers.
    pub(crate) fn is_synchronized(&self) -> bool {
        !matches!(self.state, State::SynSent | State::Closed)
    }

    /// Returns whether the application may write.
    pub(crate) fn may_send(&self) -> bool {
        use State::{CloseWait, Established, SynReceived, SynSent};
        matches!(self.state, SynSent | SynReceived | Established | CloseWait)
    }

    /// Returns our current timestamp.
    #[inline]
    pub(crate) fn timestamp(&self, now: Time) -> Option<u32> {
        self.agreed.timestamps.map(|offset| offset.wrapping_add(now.wrapping_millis()))
    }

    /// Returns the time since the timestamp that a segment of the peer echoes.
    #[inline]
    pub(crate) fn echoed(&self, now: Time, segment: &Segment) -> Option<Micros> {
        self.since(now, segment.options.timestamps?.echo)
    }

    /// Uses a full segment's echo as the receiver's sample of the round-trip time. As on Linux, each timestamp gives
    /// one sample.
    #[inline]
    pub(crate) fn measure_arrival(&mut self, now: Time, timestamps: Option<Timestamps>, len: u32) {
        let Some(Timestamps { echo, .. }) = timestamps else { return };
        if len >= self.receiver.ack.peer_mss().into()
            && self.receiver.is_new_echo(echo)
            && let Some(sample) = self.since(now, echo)
        {
            self.receiver.measure(echo, sample);
        }
    }

    /// Returns the time since our timestamp `echo`.
    #[inline]
    fn since(&self, now: Time, echo: u32) -> Option<Micros> {
        let millis = self.timestamp(now).filter(|_| echo != 0)?.wrapping_sub(echo);
        // More than an hour is not a round-trip time, so the echo is invalid.
        (millis < 3_600_000).then_some(Micros::from_millis(millis.into()))
    }

    /// Limits segments to `mss` bytes of payload.
    pub(crate) fn cut_segments(&mut self, now: Time, mss: u16) {
        let path = self.path.get_or_insert_default();
        let before = path.cut.map_or(self.sender.mss(), |(_, before)| before);
        (path.cut, path.claimed) = (Some((now, before)), None);
        self.sender.set_mss(mss);
    }

    /// Processes a report that the path MTU is `mtu` bytes. If longer packets have been acknowledged, the report may be
    /// forged and is used only when segments are lost (RFC 5927, 7.2). Returns whether it is used now.
    pub(crate) fn report_path(&mut self, now: Time, mtu: u16) -> bool {
        let mss = output::payload_of(mtu, self.key.remote().ip(), self.agreed.timestamps.is_some());
        if mss >= self.sender.mss() {
            return false;
        }
        let believed = mss >= self.sender.largest_acked_payload() || self.sender.timeouts() > 0;
        match believed {
            true => self.cut_segments(now, mss),
            false => self.path.get_or_insert_default().claimed = Some(mss),
        }
        believed
    }

    /// Records that `acked` bytes have been acknowledged. This refutes an unverified report. An old reduction is undone
    /// to probe the path again (RFC 1191, 6.3; RFC 8201, 4).
    pub(crate) fn validate_path_mtu(&mut self, now: Time, acked: u64) {
        let Some(path) = self.path.as_deref_mut() else { return };
        if acked >= self.sender.mss().into() {
            path.claimed = None;
        }
        if let Some((_, before)) = path.cut.filter(|&(since, _)| now - since >= PATH_AGE) {
            self.path = None;
            self.sender.set_mss(before);
        }
    }

    /// Returns the timestamps of a segment that is sent now.
    #[inline]
    pub(crate) fn timestamps(&self, now: Time) -> Option<Timestamps> {
        let value = self.timestamp(now)?;
        Some(Timestamps { value, echo: self.receiver.recent().unwrap_or(0) })
    }

    /// Returns ECE if the peer must be told about congestion marks (RFC 3168, 6.1.3).
    #[inline]
    pub(crate) fn echo_congestion(&self) -> TcpFlags {
        if self.agreed.ecn && self.receiver.echo_congestion { TcpFlags::ECE } else { TcpFlags(0) }
    }

    /// Returns the header template for data, which contains all constant fields.
    #[inline]
    pub(crate) fn template(&mut self) -> &TcpTemplate {
        self.headers.template(&self.key, self.agreed.timestamps.is_some())
    }

    /// Returns the header of a segment that is sent now, at `seq`. It acknowledges all received data.
    #[inline]
    pub(crate) fn fields(&mut self, now: Time, seq: u32, flags: TcpFlags, with_sack: bool) -> Fields {
        let mut options = TcpOptions { timestamps: self.timestamps(now), ..TcpOptions::default() };
        if with_sack && self.agreed.sack && self.receiver.has_sack() {
            let room = if options.timestamps.is_some() { 3 } else { 4 };
            let ranges = self.receiver.sack_ranges(room);
            let block = |range: Range<u64>| SackBlock {
                start: self.receiver.seq(range.start),
                end: self.receiver.seq(range.end),
            };
            options.sack = ranges.into_iter().map(block).collect();
        }
        let (ack, window) = self.receiver.acknowledge();
        let echo = self.echo_congestion();
        Fields {
            src_port: self.key.local_port(),
            dst_port: self.key.remote_port(),
            seq,
            ack,
            flags: flags | TcpFlags::ACK | echo,
            window,
            options,
        }
    }

    /// Returns the time of the next timer.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let delayed = match self.receiver.ack.need() {
            AckNeed::By(due) => Some(due),
            AckNeed::Now | AckNeed::No => None,
        };
        let asking = self.asking.map(|asking| asking.due);
        // This runs after every segment, so it avoids a branch per timer.
        let (closes, keeping) = (self.close_timer.due(), self.liveness.keepalive_due());
        let times = [delayed, asking, closes, self.trim, self.sender.deadline(), keeping];
        let user_timeout_deadline = self.sender.user_timeout_deadline(self.liveness.user_timeout());
        let first = times
            .into_iter()
            .fold(user_timeout_deadline, |first, time| first.min(time.unwrap_or(Time::NEVER)));
        (first != Time::NEVER).then_some(first)
    }
}
