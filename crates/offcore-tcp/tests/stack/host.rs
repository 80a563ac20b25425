//! A host: a stack, its applications, and copies that complete at once, later, or in any order.

use std::collections::HashMap;
use std::sync::Arc;

use offcore_session::{Reader, Writer};
use offcore_stats::SplitMix;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{
    AppId, Cause, Config, ConnId, ConnOptions, Event, HEAD, IfaceConfig, Out, Place, Placed, Plan, Prefix,
    Route, RxChecksum, RxSeg, Sealed, Stack, Verdict, sum_end,
};
use offcore_wire::gso::Segmenter;
use offcore_wire::virtio_net::{NetHeader, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6};
use offcore_wire::{EtherType, EthernetFrame, MacAddr, Sum};

/// One end of a connection, as its application sees it.
pub(crate) struct Session {
    pub(crate) reader: Reader,
    pub(crate) writer: Writer,
    /// The received bytes.
    pub(crate) received: Vec<u8>,
    /// The bytes to send. The first `sent` bytes are written.
    pub(crate) to_send: Vec<u8>,
    pub(crate) sent: usize,
    /// Close the connection when all bytes are written.
    pub(crate) close_after: bool,
    pub(crate) closed_here: bool,
    pub(crate) end_of_stream: bool,
    pub(crate) closed: Option<Cause>,
    /// Maximum number of bytes to read at a time, or 0 to read nothing.
    pub(crate) appetite: usize,
}

/// A submitted copy.
enum Copying {
    Place(Place, Vec<u8>),
    Plan(Plan, Vec<u8>),
}

impl Copying {
    fn conn(&self) -> ConnId {
        match self {
            Self::Place(place, _) => place.conn,
            Self::Plan(plan, _) => plan.conn,
        }
    }

    fn is_plan(&self) -> bool {
        matches!(self, Self::Plan(..))
    }
}

pub(crate) struct Host {
    pub(crate) stack: Stack,
    pub(crate) out: Out,
    /// Frames to be sent, in order.
    pub(crate) frames: Vec<Vec<u8>>,
    pub(crate) sessions: HashMap<ConnId, Session>,
    pub(crate) listener: Option<u32>,
    pub(crate) connected: Vec<ConnId>,
    pub(crate) accepted: Vec<ConnId>,
    /// Connections stay in the queues of their listeners.
    pub(crate) accepts_none: bool,
    /// Number of accepted connections per listener.
    pub(crate) by_listener: HashMap<u32, usize>,
    /// Maximum number of calls that a copy takes. With 0, copies complete at once.
    pub(crate) latency: usize,
    /// Copies that complete at once are made in random order.
    pub(crate) shuffled: bool,
    /// Percentage of planned packets that get no buffer. The packets behind them do not get one, either.
    pub(crate) starved: u64,
    /// Received data is reported, but not copied. This simulates a stack that commits data before its copy is complete.
    pub(crate) without_copies: bool,
    /// The port has verified the checksums of received packets.
    pub(crate) verified: bool,
    /// The worker is never idle.
    pub(crate) is_busy: bool,
    copies: Copies,
}

/// The copies in flight, and the chance that decides on their order and their buffers.
struct Copies {
    /// The number of calls that each copy still takes.
    in_flight: Vec<(usize, Copying)>,
    chance: SplitMix,
}

/// Segments a frame as a port with segmentation offload does, into segments of `size` bytes.
fn segments(frame: &[u8], headers: usize, size: u16) -> Vec<Vec<u8>> {
    let is_v6 = EthernetFrame::new_checked(frame).unwrap().ethertype() == EtherType::IPV6;
    let gso_type = if is_v6 { VIRTIO_NET_HDR_GSO_TCPV6 } else { VIRTIO_NET_HDR_GSO_TCPV4 };
    let header = NetHeader { gso_type, hdr_len: headers as u16, gso_size: size, ..NetHeader::default() };
    let mut segmenter = Segmenter::new(&header, &frame[..headers], frame.len()).unwrap();
    let payload = &frame[headers..];
    let cut = segmenter.segments();
    cut.map(|segment| {
        let payload = &payload[segment.payload.clone()];
        [segmenter.headers(&segment, Sum::of(payload)), payload].concat()
    })
    .collect()
}

pub(crate) fn mac(last: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, last])
}

impl Host {
    /// Creates a host with the addresses 10.0.0.`last`/24 and 2001:db8::`last`/64. The other host is its gateway.
    pub(crate) fn new(last: u8, mtu: u16, config: Config) -> Self {
        let mut stack =
            Stack::new(Config { secret: [last; 16], memory: config.memory.min(32 << 20), ..config }).unwrap();
        let mut out = Out::default();
        let addresses = vec![
            Prefix { address: [10, 0, 0, last].into(), len: 24 },
            Prefix { address: [0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into()].into(), len: 64 },
        ];
        let routes = vec![Route::default_by([10, 0, 0, 3 - last].into())];
        let iface = IfaceConfig { mac: mac(last), mtu, addresses, routes };
        stack.add_iface(Time::from_micros(1), &iface, &mut out);
        let mut host = Self {
            stack,
            out,
            frames: Vec::new(),
            sessions: HashMap::new(),
            listener: None,
            connected: Vec::new(),
            accepted: Vec::new(),
            accepts_none: false,
            by_listener: HashMap::new(),
            latency: 0,
            shuffled: false,
            starved: 0,
            without_copies: false,
            verified: false,
            is_busy: false,
            copies: Copies { in_flight: Vec::new(), chance: SplitMix::new(u64::from(last)) },
        };
        host.take_out(Time::from_micros(1));
        host
    }

    pub(crate) fn listen(&mut self, port: u16, backlog: usize) {
        self.listener = Some(self.stack.listen(AppId::OWN, None, port, backlog, false).unwrap());
    }

    pub(crate) fn connect(&mut self, now: Time, to: &str) -> ConnId {
        self.connect_for(AppId::OWN, now, to)
    }

    /// Connects on behalf of application `app`.
    pub(crate) fn connect_for(&mut self, app: AppId, now: Time, to: &str) -> ConnId {
        self.connect_with(app, ConnOptions::default(), now, to)
    }

    /// Connects with non-default options.
    pub(crate) fn connect_with(&mut self, app: AppId, options: ConnOptions, now: Time, to: &str) -> ConnId {
        let to = to.parse().unwrap();
        let conn = self.stack.connect_with(now, app, options, None, to, &mut self.out).unwrap();
        self.open(conn);
        self.take_out(now);
        conn
    }

    fn open(&mut self, conn: ConnId) {
        let slot = self.stack.slot(conn).unwrap();
        let memory = self.stack.memory(self.stack.app(conn).unwrap());
        let session = Session {
            reader: Reader::new(Arc::clone(memory), slot).unwrap(),
            writer: Writer::new(Arc::clone(memory), slot).unwrap(),
            received: Vec::new(),
            to_send: Vec::new(),
            sent: 0,
            close_after: false,
            closed_here: false,
            end_of_stream: false,
            closed: None,
            appetite: usize::MAX,
        };
        self.sessions.insert(conn, session);
    }

    /// Queues bytes for a connection to send.
    pub(crate) fn send(&mut self, now: Time, conn: ConnId, bytes: &[u8]) {
        self.sessions.get_mut(&conn).unwrap().to_send.extend_from_slice(bytes);
        self.pump(now, conn);
    }

    /// Receives frames.
    pub(crate) fn receive(&mut self, now: Time, frames: &mut [Vec<u8>]) {
        self.receive_by(0, now, frames);
    }

    pub(crate) fn receive_by(&mut self, iface: u8, now: Time, frames: &mut [Vec<u8>]) {
        let verified = self.verified;
        let mut packets: Vec<RxSeg<'_>> = frames
            .iter_mut()
            .map(|frame| {
                let len = frame.len();
                let end = sum_end(&frame[..len.min(HEAD)], len);
                let rest = frame.get(HEAD..end).map_or(Sum::ZERO, Sum::of);
                let head = &mut frame[..len.min(HEAD)];
                let checksum = if verified { RxChecksum::Verified } else { RxChecksum::Unknown { rest } };
                RxSeg { head, len: len as u32, checksum }
            })
            .collect();
        self.stack.rx(now, iface, &mut packets, &mut self.out);
        let verdicts = std::mem::take(&mut self.out.verdicts);
        let mut places = std::mem::take(&mut self.out.places).into_iter();
        assert_eq!(verdicts.len(), frames.len());
        for (verdict, frame) in verdicts.iter().zip(frames) {
            match verdict {
                Verdict::Place => {
                    let place = places.next().expect("each has a place");
                    let from = place.skip as usize;
                    let bytes = frame[from..from + place.len as usize].to_vec();
                    self.order(Copying::Place(place, bytes));
                }
                Verdict::Reply => self.frames.push(frame.clone()),
                Verdict::Consumed | Verdict::Copies | Verdict::Fragment | Verdict::Drop(_) => {}
            }
        }
        self.take_out(now);
    }

    /// Runs timers, copies and transmission. Returns the time at which the next timer is due.
    pub(crate) fn poll(&mut self, now: Time) -> Option<Time> {
        self.stack.timers(now, &mut self.out);
        self.take_out(now);
        for _ in 0..32 {
            self.stack.tx(now, 64, &mut self.out);
            if self.out.plans.is_empty() {
                break;
            }
            self.take_out(now);
        }
        self.complete(now);
        if self.is_busy {
            // An empty vector counts as work.
            self.stack.rx(now, 0, &mut [], &mut self.out);
        }
        let busy = self.stack.has_ready() || !self.copies.in_flight.is_empty();
        if busy {
            Some(now + Micros::new(1))
        } else {
            self.stack.deadline(now).map(|due| due.max(now + Micros::new(1)))
        }
    }

    fn order(&mut self, copying: Copying) {
        let wait =
            if self.latency == 0 { 0 } else { self.copies.chance.below(self.latency as u64 + 1) as usize };
        self.copies.in_flight.push((wait, copying));
    }

    /// Completes copies in any order. Completions are reported in the order of the connection and direction.
    fn complete(&mut self, now: Time) {
        for (wait, _) in &mut self.copies.in_flight {
            *wait = wait.saturating_sub(1);
        }
        let (mut blocked, mut done) = (Vec::new(), None);
        let mut index = 0;
        while index < self.copies.in_flight.len() {
            let (wait, copying) = &self.copies.in_flight[index];
            let key = (copying.conn(), copying.is_plan());
            if *wait > 0 || blocked.contains(&key) {
                blocked.push(key);
                index += 1;
                continue;
            }
            let (_, copying) = self.copies.in_flight.remove(index);
            self.finish(now, copying, &mut done);
        }
        self.report(&mut done);
        self.take_events(now);
    }

    /// Makes a copy to an rx_fifo.
    fn copy(&self, place: &Place, bytes: &[u8]) {
        let mut done = 0;
        for (address, len) in self.stack.place_pieces(place).into_iter().flatten() {
            // SAFETY: `place_pieces` returns ranges that lie in the mapped rx_fifo of the connection. They are not
            // committed yet, so the application does not read them.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes[done..].as_ptr(), address.as_ptr(), len);
            }
            done += len;
        }
        assert_eq!(done, bytes.len());
    }

    /// Makes all copies, in random order if `shuffled` is set, and reports them in their own order.
    fn drain(&mut self, now: Time) {
        let copying = std::mem::take(&mut self.copies.in_flight);
        let mut order: Vec<usize> = (0..copying.len()).collect();
        if self.shuffled {
            (1..order.len())
                .rev()
                .for_each(|i| order.swap(i, self.copies.chance.below(i as u64 + 1) as usize));
        }
        for at in order {
            if let (_, Copying::Place(place, bytes)) = &copying[at] {
                self.copy(place, bytes);
            }
        }
        let mut done = None;
        for (_, copying) in copying {
            self.finish(now, copying, &mut done);
        }
        self.report(&mut done);
    }

    /// Reports completed copies to an rx_fifo.
    fn report(&mut self, done: &mut Option<Placed>) {
        if let Some(done) = done.take() {
            self.stack.placed(done, &mut self.out);
        }
    }

    /// Completes a copy. Consecutive copies to an rx_fifo are merged in `done`.
    fn finish(&mut self, now: Time, copying: Copying, done: &mut Option<Placed>) {
        match copying {
            Copying::Place(place, bytes) => {
                if !self.without_copies {
                    self.copy(&place, &bytes);
                }
                if !done.as_mut().is_some_and(|done| done.join(&place)) {
                    self.report(done);
                    *done = Some(Placed::from(&place));
                }
            }
            Copying::Plan(plan, bytes) => {
                self.report(done);
                let mut headers = [0; HEAD];
                let sealed = self.stack.seal(now, &plan, Some(Sum::of(&bytes)), &mut headers, &mut self.out);
                if let Sealed::Send { headers: len, segment, .. } = sealed {
                    let mut frame = headers[HEAD - usize::from(len)..].to_vec();
                    frame.extend_from_slice(&bytes);
                    match segment {
                        0 => self.frames.push(frame),
                        size => self.frames.extend(segments(&frame, len.into(), size)),
                    }
                }
            }
        }
    }

    /// Processes the output of the stack.
    fn take_out(&mut self, now: Time) {
        for control in self.out.controls.drain(..) {
            self.frames.push(control.bytes().to_vec());
        }
        let mut plans = std::mem::take(&mut self.out.plans);
        let made =
            plans.iter().take_while(|_| self.starved == 0 || self.copies.chance.below(100) >= self.starved);
        let made = made.count();
        for plan in plans.drain(made..).rev() {
            self.stack.give_up(&plan, &mut self.out);
        }
        for plan in plans {
            let mut bytes = Vec::with_capacity(plan.len as usize);
            for (address, len) in self.stack.plan_pieces(&plan).into_iter().flatten() {
                // SAFETY: `plan_pieces` returns ranges that lie in the mapped tx_fifo of the connection. The
                // application has written these bytes and does not change them before they are acknowledged.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(address.as_ptr(), len) });
            }
            assert_eq!(bytes.len(), plan.len as usize);
            self.order(Copying::Plan(plan, bytes));
        }
        if self.latency == 0 {
            self.drain(now);
        }
        self.take_events(now);
    }

    fn take_events(&mut self, now: Time) {
        for event in std::mem::take(&mut self.out.events) {
            match event {
                Event::Connected(conn) => {
                    self.connected.push(conn);
                    self.pump(now, conn);
                }
                Event::Incoming { .. } if self.accepts_none => {}
                Event::Incoming { listener } => {
                    while let Some(conn) = self.stack.accept(listener) {
                        self.open(conn);
                        self.accepted.push(conn);
                        *self.by_listener.entry(listener).or_default() += 1;
                        self.read(now, conn);
                    }
                }
                Event::Readable(conn) => self.read(now, conn),
                Event::Writable(conn) => self.pump(now, conn),
                Event::EndOfStream(conn) => {
                    if let Some(session) = self.sessions.get_mut(&conn) {
                        session.end_of_stream = true;
                    }
                }
                Event::Closed(conn, cause) => {
                    if let Some(session) = self.sessions.get_mut(&conn) {
                        session.closed = Some(cause);
                    }
                }
                Event::Failed(..) | Event::AddressConflict { .. } | Event::Address { .. } => {}
            }
        }
        let controls: Vec<_> = self.out.controls.drain(..).collect();
        self.frames.extend(controls.iter().map(|control| control.bytes().to_vec()));
    }

    /// Lets the application read up to `appetite` bytes.
    pub(crate) fn read(&mut self, now: Time, conn: ConnId) {
        let Some(session) = self.sessions.get_mut(&conn) else { return };
        let len = session.reader.available().min(session.appetite);
        if len == 0 {
            return;
        }
        let at = session.received.len();
        session.received.resize(at + len, 0);
        assert_eq!(session.reader.read(&mut session.received[at..]), len);
        let _ = self.stack.consumed(now, conn, &mut self.out);
    }

    /// Lets the application write as much as fits.
    pub(crate) fn pump(&mut self, now: Time, conn: ConnId) {
        let Some(session) = self.sessions.get_mut(&conn) else { return };
        loop {
            let written = session.writer.write(&session.to_send[session.sent..]);
            session.sent += written;
            if written == 0 || self.stack.written(now, conn, &mut self.out).is_err() {
                break;
            }
        }
        if session.sent < session.to_send.len() {
            self.stack.want_room(conn);
        } else if session.close_after && !session.closed_here {
            session.closed_here = self.stack.shutdown(now, conn, &mut self.out).is_ok();
        }
    }

    /// Ends the stream when all bytes are written.
    pub(crate) fn close_after(&mut self, now: Time, conn: ConnId) {
        self.sessions.get_mut(&conn).unwrap().close_after = true;
        self.pump(now, conn);
    }

    /// Closes a connection.
    pub(crate) fn release(&mut self, now: Time, conn: ConnId) {
        self.sessions.remove(&conn);
        self.stack.close(now, conn, &mut self.out);
        self.take_out(now);
    }
}
