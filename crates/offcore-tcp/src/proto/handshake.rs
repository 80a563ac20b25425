//! SYNs: offered options, negotiated options, and half-open connections.

use std::net::IpAddr;

use offcore_stats::time::{Micros, Time};
use offcore_wire::{TcpFlags, TcpOptions, Timestamps};

use super::addr::FlowKey;
use super::challenge::ChallengeLimit;
use super::config::{Buffers, Config};
use super::cookie::{Offer, WithTimestamps};
use super::iface::ResolvedRoute;
use super::options::ConnOptions;
use super::output::{Fields, payload_of};
use super::receive::Receiver;
use super::recovery::Algorithm;
use super::segment::Segment;
use super::send::Sender;
use super::tcb::{Agreed, State, Tcb};

/// Our window scale, sufficient for 16 MiB.
pub(super) const SCALE: u8 = 8;
/// Maximum valid scale (RFC 7323, 2.3).
const SCALE_MAX: u8 = 14;
/// Segment size of a peer without an MSS option (RFC 9293, MUST-15).
const MSS_DEFAULT: u16 = 536;
const MSS_DEFAULT_V6: u16 = 1220;
/// Minimum accepted segment size. A smaller one would make this host send mostly headers (as Linux).
const MSS_MIN: u16 = 48;
/// First timeout of a SYN (RFC 6298, 2.1), doubled each time.
pub(super) const SYN_TIMEOUT: Micros = Micros::from_secs(1);
/// Bounds of the exponential backoff, as in Linux.
pub(super) const SYN_DOUBLINGS: u8 = 7;
pub(super) const SYN_TIMEOUT_MAX: Micros = Micros::from_secs(120);
/// Maximum number of retransmissions of SYNs and SYN-ACKs (as Linux).
pub(super) const SYN_RETRIES: u8 = 6;
pub(super) const SYN_ACK_RETRIES: u8 = 5;

/// The parameters of this side.
#[derive(Debug, Clone, Copy)]
pub(super) struct LocalParameters {
    pub receive_window: u32,
    pub largest_segment: u16,
    pub algorithm: Algorithm,
    pub ecn: bool,
}

impl LocalParameters {
    /// Returns the parameters for an application with these buffer sizes.
    pub(super) fn of(config: &Config, buffers: Buffers) -> Self {
        let &Config { largest_segment, algorithm, ecn, .. } = config;
        let receive_window = buffers.window(config, || config.receive_window);
        Self { receive_window, largest_segment, algorithm, ecn }
    }

    /// Returns the maximum window of a SYN.
    pub(super) fn syn_window(&self) -> u16 {
        self.receive_window.min(u16::MAX.into()) as u16
    }
}

/// Returns the options of our SYN, or of our SYN-ACK, which contains only options that the peer has offered.
pub(super) fn offer(
    mtu: u16,
    to: IpAddr,
    timestamps: Option<Timestamps>,
    sack: bool,
    scale: bool,
) -> TcpOptions {
    TcpOptions {
        mss: Some(payload_of(mtu, to, false)),
        window_scale: scale.then_some(SCALE),
        sack_permitted: sack,
        timestamps,
        ..TcpOptions::default()
    }
}

/// The offers of a peer's SYN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PeerSynOptions {
    pub mss: u16,
    pub scale: Option<u8>,
    pub sack: bool,
    pub timestamp: Option<u32>,
    pub ecn: bool,
    /// Not scaled.
    pub window: u16,
}

impl PeerSynOptions {
    pub(super) fn of(segment: &Segment, to: IpAddr) -> Self {
        let options = &segment.options;
        let default = if to.is_ipv4() { MSS_DEFAULT } else { MSS_DEFAULT_V6 };
        let ecn = if segment.has(TcpFlags::ACK) {
            segment.has(TcpFlags::ECE) && !segment.has(TcpFlags::CWR)
        } else {
            segment.flags.contains(TcpFlags::ECE | TcpFlags::CWR)
        };
        Self {
            mss: options.mss.unwrap_or(default).max(MSS_MIN),
            scale: options.window_scale.map(|scale| scale.min(SCALE_MAX)),
            sack: options.sack_permitted,
            timestamp: options.timestamps.map(|timestamps| timestamps.value),
            ecn,
            window: segment.window,
        }
    }
}

impl PeerSynOptions {
    /// Returns the part that a cookie must hold.
    pub(super) fn for_cookie(&self) -> Offer {
        let Self { mss, scale: window_scale, sack, ecn, .. } = *self;
        let with_timestamps = self.timestamp.map(|_| WithTimestamps { window_scale, sack, ecn });
        Offer { mss, with_timestamps }
    }

    /// Returns the offers of the SYN whose cookie `segment` acknowledges. The segment's window is already scaled and is
    /// used when the segment itself is processed.
    pub(super) fn of_cookie(offer: Offer, segment: &Segment) -> Self {
        let options = offer.with_timestamps;
        Self {
            mss: offer.mss,
            scale: options.and_then(|options| options.window_scale),
            sack: options.is_some_and(|options| options.sack),
            timestamp: segment.options.timestamps.map(|timestamps| timestamps.value),
            ecn: options.is_some_and(|options| options.ecn),
            window: segment.window,
        }
    }
}

/// The state of a handshake after the peer's SYN has arrived.
#[derive(Debug, Clone, Copy)]
pub(super) struct Both {
    pub key: FlowKey,
    pub way: ResolvedRoute,
    pub mtu: u16,
    pub iss: u32,
    pub irs: u32,
    pub offered: PeerSynOptions,
    /// The offset of our timestamps to the clock.
    pub timestamp_offset: u32,
    pub options: ConnOptions,
}

/// Creates a connection after the peer's SYN has arrived. Our SYN has the window `window`.
pub(super) fn connection(now: Time, both: &Both, wishes: &LocalParameters, window: u16) -> Tcb {
    let Both { key, way, iss, irs, offered, timestamp_offset, options: wanted, .. } = *both;
    let agreed = Agreed {
        timestamps: offered.timestamp.map(|_| timestamp_offset),
        sack: offered.sack,
        ecn: offered.ecn && wishes.ecn,
    };
    let remote = key.remote().ip();
    let mtu = wanted.mtu(both.mtu, remote);
    let options = if agreed.timestamps.is_some() { 12 } else { 0 };
    let theirs = offered.mss.saturating_sub(options).max(8);
    let mss = theirs.min(payload_of(mtu, remote, agreed.timestamps.is_some())).min(wishes.largest_segment);
    let scale = if offered.scale.is_some() { SCALE } else { 0 };
    let promise = match offered.scale {
        Some(_) => wishes.receive_window,
        None => wishes.receive_window.min(u16::MAX.into()),
    };
    let mut receiver = Receiver::new(irs, promise, scale);
    let algorithm = wanted.algorithm.unwrap_or(wishes.algorithm);
    let mut sender = Sender::new(iss, mss, algorithm, agreed.sack, agreed.timestamps.is_some());
    if let Some(rate) = wanted.pacing_rate {
        sender.recovery.set_max_pacing_rate(rate);
    }
    if let Some(timestamp) = offered.timestamp {
        receiver.start_timestamps(now, timestamp);
    }
    receiver.ack.expect_segments(payload_of(mtu, remote, false), theirs);
    receiver.announce_syn(window);
    let mut tcb = Tcb::new(key, way, receiver, sender);
    tcb.agreed = agreed;
    tcb.sender.scale = offered.scale.unwrap_or(0);
    tcb.sender.open_window(offered.window.into());
    tcb.state = State::Established;
    tcb
}

/// A connection whose SYN we have answered: RFC 9293's SYN-RECEIVED after a passive open.
#[derive(Debug, Clone)]
pub(super) struct Half {
    pub both: Both,
    pub listener: u32,
    pub due: Time,
    pub since: Time,
    pub tries: u8,
    /// The SYN-ACK was sent twice because the SYN arrived twice, so an acknowledgement is ambiguous (Karn).
    pub repeated: bool,
    /// The peer has acknowledged the SYN-ACK, and the listener waits for its data (`TCP_DEFER_ACCEPT`).
    pub deferred: bool,
    pub challenges: ChallengeLimit,
    /// The window of our SYN-ACK.
    pub window: u16,
}

impl Half {
    /// Creates the state after a SYN-ACK that is sent at `now` with the window `window`.
    pub(super) fn new(now: Time, both: Both, listener: u32, window: u16) -> Self {
        let due = now + SYN_TIMEOUT;
        Self {
            both,
            listener,
            due,
            since: now,
            tries: 0,
            repeated: false,
            deferred: false,
            challenges: ChallengeLimit::default(),
            window,
        }
    }

    /// Returns a challenge ACK, which acknowledges only the SYN (RFC 5961, 3.2).
    pub(super) fn acknowledgement(&self, now: Time, wishes: &LocalParameters) -> Fields {
        let answer = self.answer(now, wishes);
        let scale = if self.both.offered.scale.is_some() { SCALE } else { 0 };
        Fields {
            seq: self.both.iss.wrapping_add(1),
            flags: TcpFlags::ACK,
            window: self.window >> scale,
            options: TcpOptions { timestamps: answer.options.timestamps, ..TcpOptions::default() },
            ..answer
        }
    }

    /// PAWS: returns whether the segment's timestamp is old (RFC 7323, 5.3 R1).
    pub(super) fn is_old(&self, segment: &Segment) -> bool {
        let Some(recent) = self.both.offered.timestamp else { return false };
        segment.options.timestamps.is_some_and(|stamps| (stamps.value.wrapping_sub(recent) as i32) < 0)
    }

    /// Returns our SYN-ACK.
    pub(super) fn answer(&self, now: Time, wishes: &LocalParameters) -> Fields {
        let Both { key, iss, irs, offered, timestamp_offset, options, .. } = self.both;
        let mtu = options.mtu(self.both.mtu, key.remote().ip());
        let timestamps = offered
            .timestamp
            .map(|echo| Timestamps { value: timestamp_offset.wrapping_add(now.wrapping_millis()), echo });
        let ecn = if offered.ecn && wishes.ecn { TcpFlags::ECE } else { TcpFlags(0) };
        Fields {
            src_port: key.local_port(),
            dst_port: key.remote_port(),
            seq: iss,
            ack: irs.wrapping_add(1),
            flags: TcpFlags::SYN | TcpFlags::ACK | ecn,
            window: self.window,
            options: offer(mtu, key.remote().ip(), timestamps, offered.sack, offered.scale.is_some()),
        }
    }
}
