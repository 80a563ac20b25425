//! The state of one connection.

use std::ops::Range;

use offcore_wire::{IpProtocol, MacAddr, SackBlock, TcpFlags, TcpOptions, TcpTemplate, Timestamps};

use super::addr::FlowKey;
use super::iface::ResolvedRoute;
use super::ip::Envelope;
use super::keepalive::KeepaliveState;
use super::options::ConnOptions;
use super::output::{self, Fields, TxChecksum};
use super::packet::{Cause, HEAD};
use super::receive::{AckNeed, Receiver};
use super::segment::Segment;
use super::send::Sender;

/// Time in microseconds after which a reduced path MTU is probed again.
const PATH_AGE: u64 = 600_000_000;
/// Time that a connection closed by the application waits for the peer's FIN or for any progress (as Linux).
pub(super) const FIN_TIMEOUT: u64 = 60_000_000;
/// Maximum time that a reset waits for data that was written before, and the interval of checks, in microseconds.
pub(super) const RESET_TIMEOUT: u64 = 1_000_000;
pub(super) const RESET_CHECK: u64 = 1000;
/// Extra time for a peer that keeps its window closed and answers probes. Linux gives up after a similar time.
pub(super) const CLOSED_WINDOW: u64 = 240_000_000;
/// Minimum average rate of the peer in that case, in bytes per second.
pub(super) const ORPHAN_RATE: u64 = 1 << 10;

/// Minimum interval of answers to segments outside the window (RFC 5961, 7; as Linux).
pub(super) const CHALLENGE: u64 = 500_000;

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

/// The MAC address of the next hop, as last resolved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Link {
    pub mac: MacAddr,
    pub generation: u32,
    pub until: u64,
}

/// The state of path MTU reports.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PathMtu {
    /// Maximum payload bytes according to an unverified report, although longer segments have been acknowledged. It is
    /// used when segments are lost (RFC 5927, 7.2).
    pub claimed: Option<u16>,
    /// Time of the last reduction of the segment size, and the size before it.
    pub cut: Option<(u64, u16)>,
}

/// A connection in SYN-SENT or SYN-RECEIVED.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SynTimer {
    pub due: u64,
    pub tries: u8,
    /// The number of SYN retransmissions (`TCP_SYNCNT`).
    pub retries: u8,
    pub since: u64,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Tcb {
    pub key: FlowKey,
    pub way: ResolvedRoute,
    /// The generation of addresses and routes from which `way` was derived.
    pub routes: u32,
    pub link: Option<Link>,
    /// The IPv6 flow label of its packets.
    pub flow_label: u32,
    template: Option<TcpTemplate>,
    pub state: State,
    pub agreed: Agreed,
    pub options: ConnOptions,
    pub receiver: Receiver,
    pub sender: Sender,
    pub asking: Option<SynTimer>,
    /// Position up to which the application may see data.
    pub committed: u64,
    /// Copies to the rx_fifo that have not been reported.
    pub placing: u32,
    /// Time at which a connection closed by the application is given up, and the upper limit of this time.
    pub give_up: Option<u64>,
    pub ends_by: u64,
    /// State of ICMP reports about the path. `None` without reports.
    pub path: Option<Box<PathMtu>>,
    /// Time of the last accepted segment.
    pub heard: u64,
    /// State of keep-alive probes, if they are enabled.
    pub keeping: Option<Box<KeepaliveState>>,
    /// `TCP_USER_TIMEOUT` in microseconds; `u64::MAX` for none.
    pub user_timeout: u64,
    /// Time at which a quiet connection frees unneeded memory. `None` after that.
    pub trim: Option<u64>,
    /// Time of the last challenge ACK.
    challenged: Option<u64>,
    /// The application has closed the connection. `resets`: a reset follows the written data.
    pub orphan: bool,
    pub resets: bool,
    /// The application has been told that the stream has ended.
    pub told_end: bool,
    /// Why the connection has ended, if the application has not been notified because earlier bytes are still being
    /// copied.
    pub untold: Option<Cause>,
    /// In the list of connections whose acknowledgements and timers are checked at the end of the vector.
    pub touched: bool,
    /// In the list of connections that may have something to send.
    pub ready: bool,
}

impl Tcb {
    pub(crate) fn new(key: FlowKey, way: ResolvedRoute, receiver: Receiver, sender: Sender) -> Self {
        Self {
            key,
            way,
            routes: 0,
            link: None,
            flow_label: 0,
            template: None,
            state: State::SynSent,
            agreed: Agreed::default(),
            options: ConnOptions::default(),
            receiver,
            sender,
            asking: None,
            committed: 0,
            placing: 0,
            give_up: None,
            ends_by: u64::MAX,
            path: None,
            heard: 0,
            keeping: None,
            user_timeout: u64::MAX,
            trim: None,
            challenged: None,
            orphan: false,
            resets: false,
            told_end: false,
            untold: None,
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
    pub(crate) fn timestamp(&self, now: u64) -> Option<u32> {
        self.agreed.timestamps.map(|offset| offset.wrapping_add((now / 1000) as u32))
    }

    /// Returns the microseconds since the timestamp that a segment of the peer echoes.
    #[inline]
    pub(crate) fn echoed(&self, now: u64, segment: &Segment) -> Option<u64> {
        self.since(now, segment.options.timestamps?.echo)
    }

    /// Uses a full segment's echo as the receiver's sample of the round-trip time. As on Linux, each timestamp gives
    /// one sample.
    #[inline]
    pub(crate) fn measure_arrival(&mut self, now: u64, timestamps: Option<Timestamps>, len: u32) {
        let Some(Timestamps { echo, .. }) = timestamps else { return };
        if len >= self.receiver.peer_mss().into()
            && self.receiver.is_new_echo(echo)
            && let Some(sample) = self.since(now, echo)
        {
            self.receiver.measure(echo, sample);
        }
    }

    /// Returns the microseconds since our timestamp `echo`.
    #[inline]
    fn since(&self, now: u64, echo: u32) -> Option<u64> {
        let millis = self.timestamp(now).filter(|_| echo != 0)?.wrapping_sub(echo);
        // More than an hour is not a round-trip time, so the echo is invalid.
        (millis < 3_600_000).then_some(u64::from(millis) * 1000)
    }

    /// Limits segments to `mss` bytes of payload.
    pub(crate) fn cut_segments(&mut self, now: u64, mss: u16) {
        let path = self.path.get_or_insert_default();
        let before = path.cut.map_or(self.sender.mss(), |(_, before)| before);
        (path.cut, path.claimed) = (Some((now, before)), None);
        self.sender.set_mss(mss);
    }

    /// Processes a report that the path MTU is `mtu` bytes. If longer packets have been acknowledged, the report may be
    /// forged and is used only when segments are lost (RFC 5927, 7.2). Returns whether it is used now.
    pub(crate) fn report_path(&mut self, now: u64, mtu: u16) -> bool {
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
    pub(crate) fn validate_path_mtu(&mut self, now: u64, acked: u64) {
        let Some(path) = self.path.as_deref_mut() else { return };
        if acked >= self.sender.mss().into() {
            path.claimed = None;
        }
        if let Some((_, before)) = path.cut.filter(|(since, _)| now - since >= PATH_AGE) {
            self.path = None;
            self.sender.set_mss(before);
        }
    }

    /// Extends the life of a closed connection after the peer has accepted more data. A peer that accepts nothing would
    /// otherwise hold the memory (similar to Linux's limits of orphans).
    pub(crate) fn extend_orphan_timeout(&mut self, now: u64) {
        if !self.resets {
            self.give_up = Some(self.ends_by.min(now + FIN_TIMEOUT));
        }
    }

    /// Returns whether a challenge ACK may be sent now.
    pub(crate) fn may_challenge(&mut self, now: u64) -> bool {
        let may = self.challenged.is_none_or(|last| now - last >= CHALLENGE);
        if may {
            self.challenged = Some(now);
        }
        may
    }

    /// Returns the timestamps of a segment that is sent now.
    #[inline]
    pub(crate) fn timestamps(&self, now: u64) -> Option<Timestamps> {
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
        if self.template.is_none() {
            self.template = Some(self.make_template());
        }
        self.template.as_ref().expect("it has just been made")
    }

    /// Sets the options and discards the header template.
    pub(crate) fn set_options(&mut self, options: ConnOptions) {
        (self.options, self.template) = (options, None);
    }

    #[cold]
    fn make_template(&self) -> TcpTemplate {
        let none = MacAddr([0; 6]);
        let mut headers = [0; HEAD];
        let timestamps = self.agreed.timestamps.map(|_| Timestamps { value: 0, echo: 0 });
        let fields = Fields {
            src_port: self.key.local_port(),
            dst_port: self.key.remote_port(),
            seq: 0,
            ack: 0,
            flags: TcpFlags::ACK,
            window: 0,
            options: TcpOptions { timestamps, ..TcpOptions::default() },
        };
        let (len, _) = output::write(&mut headers, &self.envelope(none, none), &fields, 0, TxChecksum::Port);
        TcpTemplate::new(&headers[..len]).expect("headers as they are written have a template")
    }

    /// Returns the header of a segment that is sent now, at `seq`. It acknowledges all received data.
    #[inline]
    pub(crate) fn fields(&mut self, now: u64, seq: u32, flags: TcpFlags, with_sack: bool) -> Fields {
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

    /// Returns the addresses of the connection's packets.
    #[inline]
    pub(crate) fn envelope(&self, src_mac: MacAddr, dst_mac: MacAddr) -> Envelope {
        let envelope = Envelope::new(self.key.local().ip(), self.key.remote().ip(), IpProtocol::TCP);
        let (services, hops) = (self.options.services(), self.options.hops.unwrap_or(envelope.hops));
        Envelope { src_mac, dst_mac, ecn: services, hops, flow_label: self.flow_label, ..envelope }
    }

    /// Returns the time of the next timer.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let delayed = match self.receiver.need() {
            AckNeed::By(due) => Some(due),
            AckNeed::Now | AckNeed::No => None,
        };
        let asking = self.asking.map(|asking| asking.due);
        // This runs after every segment, so it avoids a branch per timer.
        let keeping = self.keeping.as_ref().map(|keeping| keeping.due);
        let times = [delayed, asking, self.give_up, self.trim, self.sender.deadline(), keeping];
        let user_timeout_deadline = self.sender.user_timeout_deadline(self.user_timeout);
        let first =
            times.into_iter().fold(user_timeout_deadline, |first, time| first.min(time.unwrap_or(u64::MAX)));
        (first != u64::MAX).then_some(first)
    }
}
