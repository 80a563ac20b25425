//! Tests the fast path for segments whose headers repeat the headers of the previous segment. Its results must equal
//! the results of the full processing, which applies to segments with unverified checksums.

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{Config, ConnId};
use offcore_wire::{ArpOperation, TcpFlags, TcpHeader, TcpOptions, Timestamps};
use proptest::prelude::*;

use crate::frame;
use crate::host::Host;
use crate::hostile::peer::{self, PEER_ISN, Peer};

const PORT: u16 = 7;
/// Length of the headers with timestamps, in which a frame may have a changed byte, and the bytes that are never
/// changed. These are lengths or would need another checksum.
const HEADERS: usize = 66;
const FIXED: [usize; 6] = [14, 16, 17, 23, 50, 51];

/// One frame of a vector.
#[derive(Debug, Clone)]
enum Sent {
    /// The peer's next bytes in order.
    Next(u16),
    /// The peer's next bytes with a variation: with PSH, with another window or timestamp, with padding behind the
    /// packet, with a wrong IPv4 header checksum, or out of order.
    Pushed(u16),
    Window(u16, u8),
    Later(u16, u8),
    Padded(u16),
    Spoiled(u16),
    Ahead(u16, u16),
    /// The peer's next bytes with one byte of the headers changed.
    Changed(u16, usize, u8),
}

#[derive(Debug, Clone)]
enum Step {
    Vector(Vec<Sent>),
    Write(u16),
    Read(u16),
    Wait(u32),
}

/// Two hosts that receive the same input.
struct Twins {
    now: Time,
    hosts: [Host; 2],
    peer: Peer,
    conn: ConnId,
}

impl Twins {
    fn new(timestamps: bool, ecn: bool) -> Self {
        let now = Time::from_secs(2);
        let mut peer = Peer::new((PORT, 40_000), true);
        let mut options = TcpOptions::NONE;
        options.mss = Some(1460);
        options.window_scale = Some(7);
        options.sack_permitted = true;
        options.timestamps = timestamps.then(|| Timestamps { value: peer::clock(now), echo: 0 });
        let (header, _) = peer.segment(now, u16::MAX);
        let wishes = if ecn { TcpFlags::ECE | TcpFlags::CWR } else { TcpFlags(0) };
        let syn = TcpHeader { seq: PEER_ISN, flags: TcpFlags::SYN | wishes, ..header };
        let mut hosts = [true, false].map(|verified| {
            let config = Config { connections: 16, neighbours: 16, memory: 2 << 20, ..Config::default() };
            let mut host = Host::new(1, 1500, config);
            host.verified = verified;
            host.listen(PORT, 4);
            host.receive(Time::from_secs(1), &mut [peer::arp(ArpOperation::Request)]);
            host.frames.clear();
            host
        });
        let syn = peer.frame(&syn, &options, 0, 0);
        hosts.iter_mut().for_each(|host| host.receive(now, &mut [syn.clone()]));
        peer.take_syn(&hosts[0].frames[0]);
        peer.stamp = peer.stamp.filter(|_| timestamps);
        let (header, options) = peer.segment(now, u16::MAX);
        let ack = peer.frame(&header, &options, 0, 0);
        hosts.iter_mut().for_each(|host| host.receive(now, &mut [ack.clone()]));
        let conn = hosts[0].accepted[0];
        for host in &mut hosts {
            host.sessions.get_mut(&conn).unwrap().appetite = 0;
        }
        Self { now, hosts, peer, conn }
    }

    fn frame(&mut self, sent: &Sent) -> Vec<u8> {
        let Self { peer, now, .. } = self;
        let (mut header, mut options) = peer.segment(*now, 512);
        let len = match *sent {
            Sent::Next(len) => len,
            Sent::Pushed(len) => {
                header.flags = header.flags | TcpFlags::PSH;
                len
            }
            Sent::Window(len, window) => {
                header.window = window.into();
                len
            }
            Sent::Later(len, by) => {
                if let Some(stamps) = options.timestamps.as_mut() {
                    stamps.value = stamps.value.wrapping_add(by.into()).wrapping_sub(3);
                }
                len
            }
            Sent::Ahead(len, by) => {
                header.seq = header.seq.wrapping_add((by % 3000).into());
                return peer.frame(&header, &options, usize::from(len % 1449), 0);
            }
            Sent::Padded(len) | Sent::Spoiled(len) | Sent::Changed(len, ..) => len,
        };
        let len = usize::from(len % 1449);
        let mut frame = peer.frame(&header, &options, len, 0);
        peer.next += len as u64;
        match *sent {
            Sent::Padded(_) => frame.extend([0xa5; 9]),
            Sent::Spoiled(_) => frame[24] ^= 1,
            Sent::Changed(_, at, by) if !FIXED.contains(&at) => {
                // A byte behind the headers belongs to the payload.
                if let Some(byte) = frame.get_mut(at) {
                    *byte ^= by;
                    frame::mend(&mut frame);
                }
            }
            _ => {}
        }
        frame
    }

    /// Performs a step on both hosts and compares the results.
    fn step(&mut self, step: &Step) {
        let (now, conn) = (self.now, self.conn);
        match step {
            Step::Vector(sent) => {
                let frames: Vec<_> = sent.iter().map(|sent| self.frame(sent)).collect();
                self.hosts.iter_mut().for_each(|host| host.receive(now, &mut frames.clone()));
            }
            Step::Write(len) => {
                let bytes = vec![7; (*len).into()];
                self.hosts.iter_mut().for_each(|host| host.send(now, conn, &bytes));
            }
            Step::Read(len) => {
                for host in &mut self.hosts {
                    let Some(session) = host.sessions.get_mut(&conn) else { return };
                    session.appetite = (*len).into();
                    host.read(now, conn);
                    host.sessions.get_mut(&conn).unwrap().appetite = 0;
                }
            }
            Step::Wait(micros) => {
                self.now += Micros::new((*micros).into());
                let now = self.now;
                for host in &mut self.hosts {
                    host.poll(now);
                }
            }
        }
        let [one, other] = self.hosts.each_mut().map(|host| {
            let session = &host.sessions[&conn];
            let told = (session.received.clone(), session.reader.available(), session.end_of_stream);
            let info = host.stack.info(conn).map(|info| format!("{info:?}"));
            let drops = format!("{:?}", host.stack.drops());
            (std::mem::take(&mut host.frames), told, info, drops)
        });
        assert_eq!(one, other, "after {step:?}");
        // The peer continues at the first byte that the host lacks, and acknowledges everything that it has seen. A run
        // ends at a hole, and while a copy is in flight.
        self.peer.next = self.hosts[0].stack.info(conn).map_or(0, |info| info.received);
        for segment in one.0.iter().filter_map(|frame| peer::segment(frame)) {
            let end = self.peer.host_position(segment.seq()).unwrap_or(0) + segment.payload().len() as u64;
            self.peer.seen = self.peer.seen.max(end);
        }
    }
}

fn sent() -> impl Strategy<Value = Sent> {
    prop_oneof![
        8 => any::<u16>().prop_map(Sent::Next),
        2 => any::<u16>().prop_map(Sent::Pushed),
        1 => (any::<u16>(), 0..8u8).prop_map(|(len, by)| Sent::Later(len, by)),
        1 => (any::<u16>(), 0..40u8).prop_map(|(len, window)| Sent::Window(len, window)),
        1 => any::<u16>().prop_map(Sent::Padded),
        1 => any::<u16>().prop_map(Sent::Spoiled),
        1 => (any::<u16>(), any::<u16>()).prop_map(|(len, by)| Sent::Ahead(len, by)),
        2 => (any::<u16>(), 0..HEADERS, 1..=u8::MAX).prop_map(|(len, at, by)| Sent::Changed(len, at, by)),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => proptest::collection::vec(sent(), 1..24).prop_map(Step::Vector),
        1 => (1..5000u16).prop_map(Step::Write),
        3 => any::<u16>().prop_map(Step::Read),
        2 => (0..500_000u32).prop_map(Step::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn coalesced_segments_match_single_segments(
        timestamps: bool,
        ecn: bool,
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        let mut twins = Twins::new(timestamps, ecn);
        for step in &steps {
            twins.step(step);
        }
    }
}

#[test]
fn ignored_window_applies_with_new_data() {
    // The window of a retransmission is ignored. The next segment in the vector has the same window, which must be
    // used.
    let mut twins = Twins::new(false, false);
    let (now, conn) = (twins.now, twins.conn);
    let vector = |twins: &mut Twins, sent: &[(u64, usize, u16)]| {
        let mut frame = |&(at, len, window): &(u64, usize, u16)| {
            let (mut header, options) = twins.peer.segment(now, window);
            header.seq = twins.peer.seq(at);
            twins.peer.frame(&header, &options, len, 0)
        };
        let frames: Vec<_> = sent.iter().map(&mut frame).collect();
        twins.hosts.iter_mut().for_each(|host| host.receive(now, &mut frames.clone()));
    };
    vector(&mut twins, &[(0, 100, 0)]);
    vector(&mut twins, &[(100, 100, 0)]);
    for host in &mut twins.hosts {
        host.send(now, conn, b"it waits for a window");
        host.poll(now);
        host.frames.clear();
    }
    vector(&mut twins, &[(0, 300, 512), (300, 100, 512)]);
    for host in &mut twins.hosts {
        host.poll(now + Micros::new(1));
        let sent =
            |frame: &Vec<u8>| peer::segment(frame).is_some_and(|segment| !segment.payload().is_empty());
        assert!(host.frames.iter().any(sent), "verified: {}", host.verified);
    }
}
