//! A connection whose peer sends arbitrary segments. Numbers are relative to the state of the connection, so that most
//! operations pass the first checks.

use arbitrary::{Arbitrary, Unstructured};
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{Algorithm, CallError, Config, ConnId, KeepAlive};
use offcore_wire::{ArpOperation, SackBlock, TcpFlags, TcpOptions, Timestamps};

use super::peer::{self, PEER_ISN, Peer};
use crate::host::Host;

const SECOND: Micros = Micros::from_secs(1);
const PORT: u16 = 7;
/// Maximum number of operations of a script.
const OPERATIONS: usize = 400;
/// Maximum number of rounds at one time, and maximum number of timers during one wait.
const ROUNDS: usize = 64;
const TIMERS: usize = 500;

/// Parameters of the handshake.
#[derive(Arbitrary, Debug, Clone, Copy)]
struct Setup {
    active: bool,
    mss: u16,
    scale: Option<u8>,
    sack: bool,
    stamps: bool,
    ecn: bool,
    newreno: bool,
    window: u16,
    latency: u8,
}

/// A number relative to the correct one.
#[derive(Arbitrary, Debug, Clone, Copy)]
enum Offset {
    Exact,
    Near(i8),
    Far(i16),
    Anywhere(i32),
}

impl Offset {
    fn of(self, number: u32) -> u32 {
        number.wrapping_add_signed(match self {
            Self::Exact => 0,
            Self::Near(by) => by.into(),
            Self::Far(by) => i32::from(by) * 4,
            Self::Anywhere(by) => by,
        })
    }
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum Stamps {
    Right,
    None,
    Moved(Offset, Offset),
}

/// A segment, described by its differences from the correct one.
#[derive(Arbitrary, Debug, Clone, Copy)]
struct Forged {
    seq: Offset,
    ack: Offset,
    flags: u8,
    window: u16,
    len: u16,
    stamps: Stamps,
    blocks: u8,
    sack: [(Offset, i16); 4],
    ecn: u8,
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum Op {
    Segment(Forged),
    /// The peer's next bytes in a correct segment.
    Data(u16),
    /// A correct acknowledgement of all bytes that the peer has seen.
    Acknowledge(u16),
    /// An ICMP error about a segment.
    Error {
        code: u8,
        mtu: u16,
        seq: Offset,
    },
    Write(u16),
    Read(u16),
    /// A time in microseconds, as a power of two.
    Wait(u8),
    /// Maximum duration of copies.
    Latency(u8),
    /// For small numbers, the application ends its stream or closes the connection.
    End(u8),
    Options {
        nodelay: bool,
        keepalive: bool,
    },
}

/// Results of scripts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) connected: u64,
    pub(crate) delivered: u64,
    pub(crate) acknowledged: u64,
    pub(crate) closed: u64,
    pub(crate) finished: u64,
}

impl Outcome {
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            connected: self.connected + other.connected,
            delivered: self.delivered + other.delivered,
            acknowledged: self.acknowledged + other.acknowledged,
            closed: self.closed + other.closed,
            finished: self.finished + other.finished,
        }
    }
}

struct Game {
    now: Time,
    host: Host,
    peer: Peer,
    conn: ConnId,
    checked: usize,
    /// Number of bytes that the application has written, also after it has closed the connection.
    written: u64,
    /// Value of `written` when the host last asked for the peer's MAC address. Segments that were sent before may be
    /// lost.
    unaddressed: u64,
}

/// Plays a script, and checks the invariants after each operation.
pub(crate) fn play(bytes: &[u8]) -> Outcome {
    let mut script = Unstructured::new(bytes);
    let Ok(setup) = Setup::arbitrary(&mut script) else { return Outcome::default() };
    let algorithm = if setup.newreno { Algorithm::NewReno } else { Algorithm::Cubic };
    let config = Config { algorithm, connections: 16, neighbours: 16, memory: 2 << 20, ..Config::default() };
    let mut host = Host::new(1, 1500, config);
    let before = host.stack.memory_used();
    host.listen(PORT, 4);
    host.receive(Time::from_secs(1), &mut [peer::arp(ArpOperation::Request)]);
    host.frames.clear();
    let mut game = Game::open(host, &setup);
    game.settle();
    for _ in 0..OPERATIONS {
        let Ok(op) = Op::arbitrary(&mut script) else { break };
        if script.is_empty() {
            break;
        }
        game.operation(op);
        game.settle();
        game.check();
    }
    let outcome = game.outcome();
    game.end(before);
    outcome
}

impl Game {
    /// Opens the connection from the side that `setup` selects.
    fn open(mut host: Host, setup: &Setup) -> Self {
        let now = Time::from_secs(2);
        let asked = setup.active.then(|| host.connect(now, "10.0.0.2:7"));
        let mut peer = Peer::new((PORT, 40_000), setup.sack);
        let mut options = TcpOptions::NONE;
        options.mss = Some(setup.mss);
        options.window_scale = setup.scale;
        options.sack_permitted = setup.sack;
        options.timestamps = setup.stamps.then(|| Timestamps { value: peer::clock(now), echo: 0 });
        let mut flags = TcpFlags::SYN;
        if setup.ecn {
            flags = flags | TcpFlags::ECE;
        }
        if asked.is_some() {
            peer.take_syn(&host.frames.remove(0));
            flags = flags | TcpFlags::ACK;
        } else if setup.ecn {
            flags = flags | TcpFlags::CWR;
        }
        let (header, _) = peer.segment(now, setup.window);
        let syn = offcore_wire::TcpHeader { seq: PEER_ISN, flags, ..header };
        if let Some(stamps) = options.timestamps.as_mut() {
            stamps.echo = peer.stamp.unwrap_or(0);
        }
        host.receive(now, &mut [peer.frame(&syn, &options, 0, 0)]);
        peer.sent.clear();
        if asked.is_none() {
            peer.take_syn(&host.frames.remove(0));
        }
        if setup.stamps {
            peer.stamp = peer.stamp.or(Some(0));
        } else {
            peer.stamp = None;
        }
        if setup.scale.is_none() {
            peer.host_scale = 0;
        }
        let (header, options) = peer.segment(now, setup.window);
        host.receive(now, &mut [peer.frame(&header, &options, 0, 0)]);
        let conn = asked.unwrap_or_else(|| host.accepted.pop().expect("the handshake is right"));
        host.sessions.get_mut(&conn).unwrap().appetite = 0;
        host.latency = usize::from(setup.latency % 8);
        Self { now, host, peer, conn, checked: 0, written: 0, unaddressed: 0 }
    }

    fn operation(&mut self, op: Op) {
        let (now, conn) = (self.now, self.conn);
        match op {
            Op::Segment(forged) => self.forge(&forged),
            Op::Data(len) => {
                let len = usize::from(len % 4000);
                let (header, options) = self.peer.segment(now, u16::MAX);
                let frame = self.peer.frame(&header, &options, len, 0);
                self.peer.next += len as u64;
                self.host.receive(now, &mut [frame]);
            }
            Op::Acknowledge(window) => {
                let (header, options) = self.peer.segment(now, window);
                let frame = self.peer.frame(&header, &options, 0, 0);
                self.host.receive(now, &mut [frame]);
            }
            Op::Error { code, mtu, seq } => {
                let frame = self.peer.error(code % 16, mtu, seq.of(self.peer.ack(self.peer.acked)));
                self.host.receive(now, &mut [frame]);
            }
            Op::Write(len) => self.write(len.into()),
            Op::Read(len) => {
                if let Some(session) = self.host.sessions.get_mut(&conn) {
                    session.appetite = len.into();
                }
                self.host.read(now, conn);
                if let Some(session) = self.host.sessions.get_mut(&conn) {
                    session.appetite = 0;
                }
            }
            Op::Wait(power) => self.wait(Micros::new(1 << (power % 28))),
            Op::Latency(latency) => self.host.latency = usize::from(latency % 20),
            Op::End(0..8) if self.host.sessions.contains_key(&conn) => self.host.close_after(now, conn),
            Op::End(8..12) => self.host.release(now, conn),
            Op::End(12..16) => self.abort(),
            Op::End(_) => {}
            Op::Options { nodelay, keepalive } => self.options(nodelay, keepalive),
        }
    }

    fn options(&mut self, nodelay: bool, keepalive: bool) {
        let Host { stack, out, .. } = &mut self.host;
        let wanted = keepalive.then_some(KeepAlive { idle: 5 * SECOND, interval: SECOND, probes: 3 });
        let (one, other) = (
            stack.set_nodelay(self.now, self.conn, nodelay, out),
            stack.set_keepalive(self.now, self.conn, wanted, out),
        );
        let _ = stack.set_timeouts(self.now, self.conn, u32::from(keepalive) * 3000, 2, out);
        assert!(one == other && one.err().is_none_or(|error| error == CallError::Gone));
    }

    fn abort(&mut self) {
        self.host.sessions.remove(&self.conn);
        let Host { stack, out, .. } = &mut self.host;
        stack.abort(self.now, self.conn, out);
    }

    fn write(&mut self, len: usize) {
        let Some(session) = self.host.sessions.get_mut(&self.conn) else { return };
        if session.close_after {
            return;
        }
        // Bytes that do not fit are written later. Their number is limited.
        let at = session.to_send.len();
        if at - session.sent < 1 << 20 {
            session.to_send.extend((at..at + len).map(|at| peer::ours(at as u32)));
        }
        self.host.pump(self.now, self.conn);
    }

    /// Sends a segment with errors.
    fn forge(&mut self, forged: &Forged) {
        let (mut header, mut options) = self.peer.segment(self.now, forged.window);
        header.seq = forged.seq.of(header.seq);
        header.ack = forged.ack.of(header.ack);
        // Most segments have an ACK flag.
        header.flags = if forged.flags & 0x40 == 0 {
            TcpFlags(forged.flags & 0xc9 | 0x10)
        } else {
            TcpFlags(forged.flags)
        };
        match (forged.stamps, options.timestamps.as_mut()) {
            (Stamps::None, _) => options.timestamps = None,
            (Stamps::Moved(value, echo), Some(stamps)) => {
                *stamps = Timestamps { value: value.of(stamps.value), echo: echo.of(stamps.echo) };
            }
            _ => {}
        }
        let room = if options.timestamps.is_some() { 3 } else { 4 };
        let blocks = usize::from(forged.blocks % 8).saturating_sub(3).min(room);
        let una = self.peer.ack(self.peer.acked);
        options.sack = forged.sack[..blocks]
            .iter()
            .map(|(start, len)| {
                let start = start.of(una);
                SackBlock { start, end: start.wrapping_add_signed((*len).into()) }
            })
            .collect();
        // Some segments are as long as segments from receive offloads.
        let len = usize::from(if forged.len > 0xff00 { forged.len } else { forged.len % 3000 });
        let len = len.min(usize::from(u16::MAX) - 40 - options.len());
        let frame = self.peer.frame(&header, &options, len, forged.ecn);
        self.host.receive(self.now, &mut [frame]);
    }

    /// Advances the time.
    fn wait(&mut self, time: Micros) {
        let end = self.now + time;
        for _ in 0..TIMERS {
            match self.settle().filter(|next| *next <= end) {
                Some(next) => self.now = next,
                None => break,
            }
        }
        self.now = end;
    }

    /// Does all work that is possible now, and returns the time of the next event.
    fn settle(&mut self) -> Option<Time> {
        for _ in 0..ROUNDS {
            let next = self.host.poll(self.now);
            if let Some(session) = self.host.sessions.get(&self.conn) {
                self.written = session.sent as u64;
            }
            let frames = std::mem::take(&mut self.host.frames);
            for frame in &frames {
                if peer::asks(frame) {
                    self.unaddressed = self.written;
                    self.host.receive(self.now, &mut [peer::arp(ArpOperation::Reply)]);
                } else {
                    self.see(frame);
                }
            }
            if frames.is_empty() && next.is_none_or(|next| next > self.now + Micros::new(1)) {
                return next;
            }
        }
        Some(self.now + Micros::new(1))
    }

    /// Passes a frame to the peer, which checks it.
    fn see(&mut self, frame: &[u8]) {
        let Some(segment) = peer::segment(frame) else { return };
        let (peer, flags) = (&mut self.peer, segment.flags());
        // After the connection is closed, a frame with the same ports belongs to another connection.
        let is_open = self.host.stack.info(self.conn).is_some_and(|info| info.state != "CLOSED");
        let is_stray = (segment.src_port(), segment.dst_port()) != peer.ports;
        if !is_open || is_stray || flags.intersects(TcpFlags::SYN | TcpFlags::RST) {
            return;
        }
        let mut options = TcpOptions::NONE;
        options.read(segment.options());
        if let (Some(stamp), Some(stamps)) = (peer.stamp.as_mut(), options.timestamps) {
            *stamp = stamps.value;
        }
        let len = segment.payload().len() as u64;
        let fin = flags.contains(TcpFlags::FIN);
        // Window probes and keep-alive probes have the sequence number before the oldest unacknowledged byte.
        let at = peer.host_position(segment.seq()).unwrap_or(0);
        assert!(len == 0 || at + len <= self.written, "{at} and {len} bytes of {}", self.written);
        assert!(!fin || at + len == self.written, "an end at {at} of {}", self.written);
        let sent = peer.seen.max(self.unaddressed);
        assert!(len > 0 || fin || at <= sent, "{at} is ahead of {sent}");
        let wrong = segment.payload().iter().zip(at..).find(|(byte, at)| **byte != peer::ours(*at as u32));
        assert_eq!(wrong, None, "bytes that were written");
        peer.seen = peer.seen.max(at + len + u64::from(fin));
        let ack = peer.position(segment.ack()).expect("an acknowledgement before the stream");
        assert!(ack <= peer.sent_to(), "{ack} was never sent: {:?}", peer.sent);
        assert!(ack >= peer.host_acked, "{ack} after {}", peer.host_acked);
        peer.host_acked = ack;
        let edge = ack + (u64::from(segment.window()) << peer.host_scale);
        assert!(edge + (1 << peer.host_scale) > peer.host_edge, "the window shrinks: {edge}");
        peer.host_edge = peer.host_edge.max(edge);
        assert!(peer.sack || options.sack.is_empty());
        for block in &options.sack {
            let range = peer.position(block.start).zip(peer.position(block.end)).map(|(a, b)| a..b);
            let range = range.expect("a block before the stream");
            assert!(!range.is_empty() && peer.has_sent(&range), "{range:?} of {:?}", peer.sent);
        }
    }

    /// Checks the invariants.
    fn check(&mut self) {
        let Self { host, peer, conn, checked, .. } = self;
        let Some(session) = host.sessions.get(conn) else { return };
        let new = session.received.iter().enumerate().skip(*checked);
        let wrong = new.clone().find(|(at, byte)| **byte != peer::theirs(*at as u32));
        assert_eq!(wrong, None, "bytes that the peer has sent");
        *checked = session.received.len();
        let received = *checked as u64 + session.reader.available() as u64;
        assert!(received <= peer.sent_to(), "{received} bytes of {:?}", peer.sent);
        let acknowledged = session.writer.acknowledged();
        assert!(acknowledged <= peer.acked.min(session.sent as u64), "{acknowledged} of {}", peer.acked);
        if let Some(info) = host.stack.info(*conn) {
            assert!(info.cwnd > 0 && info.mss > 0 && info.recovery.rto > Micros::ZERO, "{info:?}");
            assert!(info.recovery.pipe <= session.sent as u64 + 1, "{info:?}");
        }
    }

    fn outcome(&self) -> Outcome {
        let session = self.host.sessions.get(&self.conn);
        Outcome {
            connected: 1,
            delivered: self.checked as u64,
            acknowledged: self.peer.acked,
            closed: u64::from(session.is_some_and(|session| session.closed.is_some())),
            finished: u64::from(session.is_some_and(|session| session.end_of_stream)),
        }
    }

    /// Closes the connection while the peer is silent, and checks that no state is left.
    fn end(mut self, before: usize) {
        self.host.latency = 0;
        self.host.release(self.now, self.conn);
        for conn in std::mem::take(&mut self.host.accepted) {
            self.host.release(self.now, conn);
        }
        for _ in 0..80 {
            self.wait(100 * SECOND);
        }
        let stack = &self.host.stack;
        assert_eq!((stack.connections(), stack.flows()), (0, 0));
        assert_eq!(stack.memory_used(), before);
    }
}
