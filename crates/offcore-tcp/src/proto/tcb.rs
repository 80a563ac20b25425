//! One connection.

use std::ops::Range;

use offcore_wire::{IpProtocol, MacAddr, SackBlock, TcpFlags, TcpOptions, TcpTemplate, Timestamps};

use super::addr::FlowKey;
use super::iface::Way;
use super::ip::Envelope;
use super::keepalive::Keeping;
use super::options::ConnOptions;
use super::output::{self, Fields, TxChecksum};
use super::packet::{Cause, HEAD};
use super::receive::{AckNeed, Receiver};
use super::segment::Segment;
use super::send::Sender;

/// How long a path is believed to take short packets only.
const PATH_AGE: u64 = 600_000_000;
/// How long a connection that the application has let go waits for the peer: for its FIN, or for it to take anything
/// (as Linux).
pub(super) const FIN_TIMEOUT: u64 = 60_000_000;
/// How long a reset waits for what was written before, and how often that is looked at, in microseconds.
pub(super) const RESET_TIMEOUT: u64 = 1_000_000;
pub(super) const RESET_CHECK: u64 = 1000;
/// Extra time for a peer that keeps its window closed and answers probes. Linux gives up after about as long.
pub(super) const CLOSED_WINDOW: u64 = 240_000_000;
/// Bytes a second that it has to take then, on average.
pub(super) const ORPHAN_RATE: u64 = 1 << 10;

/// Time between two answers to segments that do not belong into the window (RFC 5961, 7; as Linux).
pub(super) const CHALLENGE: u64 = 500_000;

/// States of RFC 9293, 3.3.2, but LISTEN, which is no connection, and TIME-WAIT, which is kept apart.
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
    /// Over; what has been received can be read still.
    Closed,
}

impl State {
    /// As in RFC 9293.
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

/// What the SYNs have agreed on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Agreed {
    /// What our timestamps are ahead of the clock, in milliseconds.
    pub timestamps: Option<u32>,
    pub sack: bool,
    pub ecn: bool,
}

/// The neighbour's station, as last resolved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Link {
    pub mac: MacAddr,
    pub generation: u32,
    pub until: u64,
}

/// Segments that were cut shorter for the path.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PathMtu {
    /// Bytes of payload that somebody says the path takes, though longer segments have got through: believed when some are
    /// lost (RFC 5927, 7.2).
    pub claimed: Option<u16>,
    /// When segments were cut shorter, and how long they were before.
    pub cut: Option<(u64, u16)>,
}

/// A connection that is being asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asking {
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
    pub way: Way,
    /// The state of addresses and routes that `way` is of.
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
    pub asking: Option<Asking>,
    /// Position up to which the application may see data.
    pub committed: u64,
    /// Copies to the rx_fifo that have not been reported.
    pub placing: u32,
    /// When a connection that the application has let go of is given up, as things are; and at the latest.
    pub give_up: Option<u64>,
    pub ends_by: u64,
    /// What ICMP has said of the path, where it has said anything.
    pub path: Option<Box<PathMtu>>,
    /// When the last segment has come.
    pub heard: u64,
    /// Whether, and when, a silent peer is asked for.
    pub keeping: Option<Box<Keeping>>,
    /// `TCP_USER_TIMEOUT` in microseconds; `u64::MAX` for none.
    pub user_timeout: u64,
    /// When memory that a quiet connection does not need is given back; none when it has been.
    pub trim: Option<u64>,
    /// When a segment that did not belong here was last answered.
    challenged: Option<u64>,
    /// The application has let go of it; and it is reset when what it has written is sent.
    pub orphan: bool,
    pub resets: bool,
    /// The application has been told that the stream has ended.
    pub told_end: bool,
    /// Why it is over, when the application has not been told: bytes that came before are still being copied.
    pub untold: Option<Cause>,
    /// In the list of connections whose acknowledgements and timers are looked at when the vector is done.
    pub touched: bool,
    /// In the list of connections that may have something to send.
    pub ready: bool,
}

impl Tcb {
    pub(crate) fn new(key: FlowKey, way: Way, receiver: Receiver, sender: Sender) -> Self {
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

    /// Whether both sides know sequence numbers.
    pub(crate) fn is_synchronized(&self) -> bool {
        !matches!(self.state, State::SynSent | State::Closed)
    }

    /// Whether the application may still write.
    pub(crate) fn may_send(&self) -> bool {
        use State::{CloseWait, Established, SynReceived, SynSent};
        matches!(self.state, SynSent | SynReceived | Established | CloseWait)
    }

    /// Our timestamp now.
    #[inline]
    pub(crate) fn timestamp(&self, now: u64) -> Option<u32> {
        self.agreed.timestamps.map(|offset| offset.wrapping_add((now / 1000) as u32))
    }

    /// Microseconds since the timestamp that a segment of the peer echoes.
    #[inline]
    pub(crate) fn echoed(&self, now: u64, segment: &Segment) -> Option<u64> {
        self.since(now, segment.options.timestamps?.echo)
    }

    /// Takes a full segment's echo as the receiver's sample of the round trip time. As on Linux, each timestamp gives one sample.
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

    /// Microseconds since our timestamp `echo`.
    #[inline]
    fn since(&self, now: u64, echo: u32) -> Option<u64> {
        let millis = self.timestamp(now).filter(|_| echo != 0)?.wrapping_sub(echo);
        // More than an hour is not a round trip: the echo is invalid.
        (millis < 3_600_000).then_some(u64::from(millis) * 1000)
    }

    /// The path takes segments with `mss` bytes of payload at most.
    pub(crate) fn cut_segments(&mut self, now: u64, mss: u16) {
        let path = self.path.get_or_insert_default();
        let before = path.cut.map_or(self.sender.mss(), |(_, before)| before);
        (path.cut, path.claimed) = (Some((now, before)), None);
        self.sender.set_mss(mss);
    }

    /// A report says that the path takes packets of `mtu` bytes at most. Where longer ones have got through, it may be forged: it
    /// is believed when segments are lost (RFC 5927, 7.2). Returns whether it is believed now.
    pub(crate) fn report_path(&mut self, now: u64, mtu: u16) -> bool {
        let mss = output::payload_of(mtu, self.key.remote().ip(), self.agreed.timestamps.is_some());
        if mss >= self.sender.mss() {
            return false;
        }
        let believed = mss >= self.sender.proven() || self.sender.timeouts() > 0;
        match believed {
            true => self.cut_segments(now, mss),
            false => self.path.get_or_insert_default().claimed = Some(mss),
        }
        believed
    }

    /// `acked` bytes have got through. What was said of the path meanwhile is not so; what was said long ago is tried again
    /// (RFC 1191, 6.3; RFC 8201, 4).
    pub(crate) fn got_through(&mut self, now: u64, acked: u64) {
        let Some(path) = self.path.as_deref_mut() else { return };
        if acked >= self.sender.mss().into() {
            path.claimed = None;
        }
        if let Some((_, before)) = path.cut.filter(|(since, _)| now - since >= PATH_AGE) {
            self.path = None;
            self.sender.set_mss(before);
        }
    }

    /// The application has let go, and the peer has taken more of what is to be sent: a peer that takes nothing, or next to
    /// nothing, would keep the memory otherwise (as Linux's limits of orphans).
    pub(crate) fn go_on_ending(&mut self, now: u64) {
        if !self.resets {
            self.give_up = Some(self.ends_by.min(now + FIN_TIMEOUT));
        }
    }

    /// Whether a segment that does not belong here may be answered now.
    pub(crate) fn may_challenge(&mut self, now: u64) -> bool {
        let may = self.challenged.is_none_or(|last| now - last >= CHALLENGE);
        if may {
            self.challenged = Some(now);
        }
        may
    }

    /// The timestamps of a segment that goes out now.
    #[inline]
    pub(crate) fn timestamps(&self, now: u64) -> Option<Timestamps> {
        let value = self.timestamp(now)?;
        Some(Timestamps { value, echo: self.receiver.recent().unwrap_or(0) })
    }

    /// Tells the peer of congestion marks (RFC 3168, 6.1.3).
    #[inline]
    pub(crate) fn echo_congestion(&self) -> TcpFlags {
        if self.agreed.ecn && self.receiver.echo_congestion { TcpFlags::ECE } else { TcpFlags(0) }
    }

    /// The headers of its data, of which everything is known but what varies.
    #[inline]
    pub(crate) fn template(&mut self) -> &TcpTemplate {
        if self.template.is_none() {
            self.template = Some(self.make_template());
        }
        self.template.as_ref().expect("it has just been made")
    }

    /// Rewrites the header template with new options.
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

    /// The header of a segment that goes out now, at `seq`. It acknowledges all that has come.
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

    /// Addresses of its packets.
    #[inline]
    pub(crate) fn envelope(&self, src_mac: MacAddr, dst_mac: MacAddr) -> Envelope {
        let envelope = Envelope::new(self.key.local().ip(), self.key.remote().ip(), IpProtocol::TCP);
        let (services, hops) = (self.options.services(), self.options.hops.unwrap_or(envelope.hops));
        Envelope { src_mac, dst_mac, ecn: services, hops, flow_label: self.flow_label, ..envelope }
    }

    /// When its timer is to go off.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let delayed = match self.receiver.need() {
            AckNeed::By(due) => Some(due),
            AckNeed::Now | AckNeed::No => None,
        };
        let asking = self.asking.map(|asking| asking.due);
        // Asked for after every segment: without a branch for each.
        let keeping = self.keeping.as_ref().map(|keeping| keeping.due);
        let times = [delayed, asking, self.give_up, self.trim, self.sender.deadline(), keeping];
        let over_at = self.sender.over_at(self.user_timeout);
        let first = times.into_iter().fold(over_at, |first, time| first.min(time.unwrap_or(u64::MAX)));
        (first != u64::MAX).then_some(first)
    }
}
