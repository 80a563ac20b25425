//! Interoperability with smoltcp: streams in both directions over various links, in virtual time.

use std::collections::{BTreeMap, VecDeque};

use offcore_stats::SplitMix;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{Config, ConnId};
use proptest::prelude::*;
use smoltcp::iface::{self, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, DeviceCapabilities, Medium};
use smoltcp::socket::tcp::{CongestionControl, Socket, SocketBuffer, State};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr};

use crate::host::{Host, mac};
use crate::streams::content;
use crate::world::Impairment;

const SECOND: Micros = Micros::from_secs(1);
/// The test fails if no data arrives for this many microseconds.
const TIMEOUT: Micros = Micros::from_secs(600);
/// Transmission time of a frame in microseconds.
const DELAY: Micros = Micros::from_millis(1);
const PORT: u16 = 7;

/// smoltcp's end of the link.
struct Wire {
    received: VecDeque<Vec<u8>>,
    sent: Vec<Vec<u8>>,
    mtu: usize,
}

struct Received(Vec<u8>);
struct ToSend<'a>(&'a mut Vec<Vec<u8>>);

impl phy::Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = ToSend<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received, ToSend<'_>)> {
        let frame = self.received.pop_front()?;
        Some((Received(frame), ToSend(&mut self.sent)))
    }

    fn transmit(&mut self, _: Instant) -> Option<ToSend<'_>> {
        Some(ToSend(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = self.mtu + 14;
        capabilities
    }
}

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(&self.0)
    }
}

impl phy::TxToken for ToSend<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, fill: F) -> R {
        let mut frame = vec![0; len];
        let result = fill(&mut frame);
        self.0.push(frame);
        result
    }
}

/// Parameters of a run: the roles, the link and the behaviour of both ends.
#[derive(Debug, Clone)]
struct Case {
    seed: u64,
    we_connect: bool,
    we_close_first: bool,
    v6: bool,
    mtu: u16,
    /// Size of smoltcp's buffers.
    buffer: usize,
    stamps: bool,
    reno: bool,
    /// Maximum number of bytes that applications read or write at a time.
    chunk: usize,
    latency: usize,
    loss: u64,
    reorder: u64,
    duplicate: u64,
    len: [usize; 2],
}

/// The application that uses smoltcp.
struct Far {
    interface: Interface,
    wire: Wire,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    to_send: Vec<u8>,
    sent: usize,
    received: Vec<u8>,
    may_close: bool,
    end_of_stream: bool,
}

struct Pair {
    now: Time,
    case: Case,
    host: Host,
    far: Far,
    conn: Option<ConnId>,
    /// Frames in transit, by arrival time and number. The flag is set if the destination is our host.
    flying: BTreeMap<(Time, u64), (bool, Vec<u8>)>,
    number: u64,
    chance: SplitMix,
}

impl Far {
    fn new(case: &Case) -> Self {
        // The added 12 bytes let smoltcp send as much payload with timestamps as without. It sends no segments that are
        // too long.
        let mtu = usize::from(case.mtu) + if case.stamps { 12 } else { 0 };
        let mut wire = Wire { received: VecDeque::new(), sent: Vec::new(), mtu };
        let mut config = iface::Config::new(EthernetAddress(mac(2).0).into());
        config.random_seed = case.seed;
        let mut interface = Interface::new(config, &mut wire, Instant::from_micros(0));
        interface.update_ip_addrs(|addresses| {
            addresses.push(IpCidr::new(IpAddress::v4(10, 0, 0, 2), 24)).unwrap();
            addresses.push(IpCidr::new(IpAddress::v6(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2), 64)).unwrap();
        });
        let buffer = || SocketBuffer::new(vec![0; case.buffer]);
        let mut socket = Socket::new(buffer(), buffer());
        if case.stamps {
            socket.set_tsval_generator(Some(|| 4711));
        }
        if case.reno {
            socket.set_congestion_control(CongestionControl::Reno);
        }
        let mut sockets = SocketSet::new(Vec::new());
        let handle = sockets.add(socket);
        let to_send = content(case.seed + 1, case.len[1]);
        let (sent, received) = (0, Vec::new());
        Self {
            interface,
            wire,
            sockets,
            handle,
            to_send,
            sent,
            received,
            may_close: false,
            end_of_stream: false,
        }
    }

    fn socket(&mut self) -> &mut Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    /// Does all work that is possible now, and returns the time of the next call.
    fn poll(&mut self, now: Time, chunk: &mut impl FnMut() -> usize) -> Option<Time> {
        let at = Instant::from_micros(now.as_micros() as i64);
        self.interface.poll(at, &mut self.wire, &mut self.sockets);
        let socket = self.sockets.get_mut::<Socket<'static>>(self.handle);
        if socket.can_send() && self.sent < self.to_send.len() {
            let end = (self.sent + chunk()).min(self.to_send.len());
            self.sent += socket.send_slice(&self.to_send[self.sent..end]).unwrap();
        }
        if socket.can_recv() {
            let mut bytes = vec![0; chunk()];
            let len = socket.recv_slice(&mut bytes).unwrap();
            self.received.extend_from_slice(&bytes[..len]);
        }
        self.end_of_stream |=
            matches!(socket.state(), State::CloseWait | State::LastAck | State::Closing | State::TimeWait)
                && !socket.can_recv();
        if self.may_close && self.sent == self.to_send.len() {
            socket.close();
        }
        let busy = socket.can_recv() || socket.can_send() && self.sent < self.to_send.len();
        self.interface.poll(at, &mut self.wire, &mut self.sockets);
        let delay = self
            .interface
            .poll_delay(at, &self.sockets)
            .map(|delay| Micros::new(delay.total_micros().max(1)));
        if busy { Some(now + Micros::new(1)) } else { delay.map(|delay| now + delay) }
    }
}

impl Pair {
    fn new(case: &Case) -> Self {
        let host = Host::new(1, case.mtu, Config::default());
        let chance = SplitMix::new(case.seed);
        let far = Far::new(case);
        let flying = BTreeMap::new();
        Self {
            now: Time::from_micros(1),
            case: case.clone(),
            host,
            far,
            conn: None,
            flying,
            number: 0,
            chance,
        }
    }

    fn chunk(&mut self) -> usize {
        1 + self.chance.below(self.case.chunk as u64) as usize
    }

    /// Runs until `done`, and panics if nothing progresses.
    fn run_until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let (mut moved, mut since) = (0, self.now);
        while !done(self) {
            let next = self.step();
            let all = self.far.received.len()
                + self.conn.map_or(0, |conn| self.host.sessions[&conn].received.len());
            if all != moved {
                (moved, since) = (all, self.now);
            }
            let state = self.far.socket().state();
            assert!(self.now < since + TIMEOUT, "{what}: {state} at {all} of {:?}", self.case);
            self.now = self.now.max(next.unwrap_or(self.now + SECOND));
        }
    }

    /// Runs for `time` microseconds.
    fn run(&mut self, time: Micros) {
        let end = self.now + time;
        while self.now < end {
            let next = self.step();
            self.now = self.now.max(next.unwrap_or(end)).min(end);
        }
    }

    /// Does all work that is possible now, and returns the time of the next event.
    fn step(&mut self) -> Option<Time> {
        let impairment = Impairment {
            loss: self.case.loss,
            reorder: self.case.reorder,
            duplicate: self.case.duplicate,
            corrupt: 0,
        };
        while let Some(first) = self.flying.first_entry().filter(|first| first.key().0 <= self.now) {
            let (to_us, frame) = first.remove();
            if to_us {
                self.host.receive(self.now, &mut [frame]);
            } else {
                self.far.wire.received.push_back(frame);
            }
        }
        let mut due = self.host.poll(self.now);
        if let Some(conn) = self.conn {
            let (read, write) = (self.chunk(), self.chunk());
            due = self.application(conn, read, write).or(due);
        }
        let Self { far, chance, case, now, .. } = self;
        let most = case.chunk as u64;
        let next = far.poll(*now, &mut || 1 + chance.below(most) as usize);
        let sent: Vec<_> =
            std::mem::take(&mut self.host.frames).into_iter().map(|frame| (false, frame)).collect();
        let far_sent = std::mem::take(&mut self.far.wire.sent).into_iter().map(|frame| (true, frame));
        for (to_us, frame) in sent.into_iter().chain(far_sent) {
            self.fly(&impairment, to_us, frame);
        }
        let flying = self.flying.first_key_value().map(|(key, _)| key.0);
        [due, next, flying].into_iter().flatten().map(|at| at.max(self.now)).min()
    }

    /// Our application reads and writes some bytes. Returns the time at which it has more to do.
    fn application(&mut self, conn: ConnId, read: usize, write: usize) -> Option<Time> {
        let Self { host, now, .. } = self;
        host.sessions.get_mut(&conn)?.appetite = read;
        host.read(*now, conn);
        let session = host.sessions.get_mut(&conn)?;
        session.appetite = 0;
        let all = content(self.case.seed, self.case.len[0]);
        let at = session.to_send.len();
        if session.sent == at && at < all.len() {
            host.send(*now, conn, &all[at..(at + write).min(all.len())]);
        }
        let session = &self.host.sessions[&conn];
        let more = session.reader.available() > 0
            || session.sent == session.to_send.len() && session.sent < all.len();
        more.then_some(self.now + Micros::new(1))
    }

    /// Sends a frame over the link.
    fn fly(&mut self, impairment: &Impairment, to_us: bool, frame: Vec<u8>) {
        let mut happens = |thousandths| self.chance.below(1000) < thousandths;
        if happens(impairment.loss) {
            return;
        }
        let copies = 1 + usize::from(happens(impairment.duplicate));
        let late =
            if happens(impairment.reorder) { (4 * DELAY).random(&mut self.chance) } else { Micros::ZERO };
        for _ in 0..copies {
            self.number += 1;
            self.flying.insert((self.now + DELAY + late, self.number), (to_us, frame.clone()));
        }
    }

    /// Opens the connection from the side that the case selects.
    fn open(&mut self) {
        self.run(2 * SECOND);
        if self.case.we_connect {
            self.far.socket().listen(PORT).unwrap();
            let to = if self.case.v6 { "[2001:db8::2]:7" } else { "10.0.0.2:7" };
            self.conn = Some(self.host.connect(self.now, to));
            let connected = |pair: &mut Self| !pair.host.connected.is_empty();
            self.run_until("connect", connected);
        } else {
            self.host.listen(PORT, 4);
            let to = if self.case.v6 {
                IpAddress::v6(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)
            } else {
                IpAddress::v4(10, 0, 0, 1)
            };
            let Far { interface, sockets, handle, .. } = &mut self.far;
            sockets
                .get_mut::<Socket<'static>>(*handle)
                .connect(interface.context(), (to, PORT), 50_000)
                .unwrap();
            self.run_until("accept", |pair| !pair.host.accepted.is_empty());
            self.conn = self.host.accepted.pop();
        }
        self.host.latency = self.case.latency;
    }

    /// Closes both streams one after the other.
    fn close(&mut self, conn: ConnId) {
        let ours_ended = |pair: &mut Self| pair.far.end_of_stream;
        let theirs_ended = move |pair: &mut Self| pair.host.sessions[&conn].end_of_stream;
        let loss = self.case.loss;
        for ours in [self.case.we_close_first, !self.case.we_close_first] {
            if ours {
                self.case.loss = loss;
                self.host.close_after(self.now, conn);
                self.run_until("our end", ours_ended);
            } else {
                // smoltcp does not retransmit a FIN that it sent after a duplicate acknowledgement, because no timer
                // runs then.
                self.case.loss = 0;
                self.far.may_close = true;
                self.run_until("their end", theirs_ended);
                self.run(SECOND);
            }
        }
    }
}

/// Checks that both streams arrive unchanged, that both ends are closed, and that no resources are left.
fn exchange(case: &Case) {
    let mut pair = Pair::new(case);
    let before = pair.host.stack.memory_used();
    pair.open();
    let conn = pair.conn.unwrap();
    let [ours, theirs] = case.len;
    pair.run_until("streams", |pair| {
        pair.far.received.len() >= ours && pair.host.sessions[&conn].received.len() >= theirs
    });
    pair.close(conn);
    assert!(pair.far.received == content(case.seed, ours), "{case:?}: our stream");
    assert!(pair.host.sessions[&conn].received == content(case.seed + 1, theirs), "{case:?}: their stream");
    pair.conn = None;
    let now = pair.now;
    pair.host.release(now, conn);
    pair.run(200 * SECOND);
    let state = pair.far.socket().state();
    assert_eq!(state, State::Closed, "{case:?}");
    let stack = &pair.host.stack;
    assert_eq!((stack.connections(), stack.flows()), (0, 0), "{case:?}");
    assert_eq!(stack.memory_used(), before, "{case:?}");
}

fn cases() -> impl Strategy<Value = Case> {
    let ends = (any::<u64>(), any::<[bool; 5]>(), 576u16..=1500, 2000usize..100_000);
    let pace = (1usize..20_000, 0usize..10, [0usize..100_000, 0usize..100_000]);
    let link = (0u64..40, 0u64..80, 0u64..40);
    (ends, pace, link).prop_map(|(ends, pace, link)| {
        let (seed, [we_connect, we_close_first, v6, stamps, reno], mtu, buffer) = ends;
        let (chunk, latency, len) = pace;
        let (loss, reorder, duplicate) = link;
        let mtu = if v6 { mtu.max(1280) } else { mtu };
        Case {
            seed: seed >> 1,
            we_connect,
            we_close_first,
            v6,
            mtu,
            buffer,
            stamps,
            reno,
            chunk,
            latency,
            loss,
            reorder,
            duplicate,
            len,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, max_shrink_iters: 100, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn stack_interoperates_with_smoltcp(case in cases()) {
        exchange(&case);
    }
}
