//! Runs a script: processes its events in order, in virtual time.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use offcore_session::slot::Slot;
use offcore_session::{Reader, Writer};
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, ConnId, Event};

use crate::bed::{BEGINNING, Bed, addresses};
use crate::frames::{Flow, altered, content};
use crate::language::{Action, Call, Comparison, Line, Script, Segment, Setup, TimeRange, Value, seconds};
use crate::parse;

/// Permitted delay of a packet. A tick of the timer wheel takes 64 µs.
const LATE: Micros = Micros::from_millis(1);
/// Maximum duration of `*`.
const ANY: Micros = Micros::from_secs(300);
/// Port of the listening side, and base port of the connecting side, to which the flow number is added.
const PORT: u16 = 8080;
const PORTS: u16 = 40_000;

/// An application's end of a connection.
struct Session {
    conn: ConnId,
    reader: Reader,
    writer: Writer,
    /// Sequence numbers of the next byte to read and to write, as in scripts.
    read: u32,
    written: u32,
}

struct Runner {
    bed: Bed,
    setup: Setup,
    flows: HashMap<u16, Flow>,
    flow: u16,
    listener: Option<u32>,
    session: Option<Session>,
    /// Due time of the last event.
    last: Time,
}

/// Sent frames with their times.
pub(crate) type Trace = Vec<(Time, Vec<u8>)>;

/// Runs a script with copies made by an engine or by the core, and returns all sent frames. `name` identifies the
/// script in messages.
///
/// # Errors
/// Describes the first difference between the script and the behaviour of the host.
pub(crate) fn run(name: &str, text: &str, by_engine: bool) -> Result<Trace, String> {
    let Script { setup, lines } = parse::script(text).map_err(|error| format!("{name}:{error}"))?;
    let bed = Bed::new(&setup, by_engine);
    let mut runner =
        Runner { bed, setup, flows: HashMap::new(), flow: 1, listener: None, session: None, last: BEGINNING };
    let last = lines.last().map_or(0, |line| line.number);
    for line in &lines {
        runner.line(line).map_err(|error| format!("{name}:{}: {error}", line.number))?;
    }
    runner.end().map_err(|error| format!("{name}:{last}: {error}"))?;
    Ok(runner.bed.trace)
}

impl Runner {
    fn line(&mut self, line: &Line) -> Result<(), String> {
        let (from, to) = match line.time {
            TimeRange::At(from, to) => (BEGINNING + from, BEGINNING + to),
            TimeRange::After(from, to) => (self.last + from, self.last + to),
            TimeRange::Any => (self.last, self.last + ANY),
        };
        if let Action::Expect(segment) = &line.action {
            self.last = self.expect(segment, from, to)?;
            if line.time != TimeRange::Any && from == to {
                self.last = from;
            }
            return Ok(());
        }
        self.bed.run_until(from, false);
        self.last = from.max(self.last);
        self.no_packet_before(from)?;
        match &line.action {
            Action::Inject(segment) => {
                let frame = self.flow().frame(segment);
                self.bed.receive(&frame);
            }
            Action::InjectIcmp(icmp) => {
                let frame = self.flow().error(icmp);
                self.bed.receive(&frame);
            }
            Action::Call(call) => self.call(call)?,
            Action::Check(comparisons) => {
                return comparisons.iter().try_for_each(|comparison| self.check(comparison));
            }
            Action::Expect(_) => {}
        }
        self.bed.settle();
        Ok(())
    }

    /// Checks that no unexpected packets or events are left.
    fn end(&mut self) -> Result<(), String> {
        self.no_packet_before(Time::NEVER)?;
        match self.bed.events.iter().find(|event| matches!(event, Event::Closed(..))) {
            Some(event) => Err(format!("at the script's end: unexpected event {}", name_of(event))),
            None => Ok(()),
        }
    }

    fn flow(&mut self) -> &mut Flow {
        let (ours, theirs) = addresses(&self.setup);
        let number = self.flow;
        self.flows.entry(number).or_insert_with(|| {
            Flow::new(SocketAddr::new(ours, PORT), SocketAddr::new(theirs, PORTS + number))
        })
    }

    /// Checks that the next sent packet is the expected one and is in time. Returns its time.
    fn expect(&mut self, expected: &Segment, from: Time, to: Time) -> Result<Time, String> {
        let wanted = || format!("expected {} > {expected}", span(from, to));
        if self.bed.sent.is_empty() {
            self.bed.run_until(to + LATE, true);
        }
        let Some((at, frame)) = self.bed.sent.pop_front() else {
            return Err(format!("{}\n  came     nothing until {}", wanted(), seconds(to + LATE - BEGINNING)));
        };
        let (when, came) = (seconds(at - BEGINNING), self.flow().read(&frame, Some(expected)));
        let more = self.waiting();
        match came {
            Err(wrong) => Err(format!("{}\n  came     {when} {wrong}{more}", wanted())),
            Ok(came) if !expected.admits(&came) || at < from || at > to + LATE => {
                Err(format!("{}\n  came     {when} > {came}{more}", wanted()))
            }
            Ok(_) => Ok(at),
        }
    }

    /// Checks that all packets sent before `time` were expected.
    fn no_packet_before(&mut self, time: Time) -> Result<(), String> {
        match self.bed.sent.front() {
            Some((at, _)) if at.saturating_add(LATE) < time => {
                Err(format!("expected nothing more before{}", self.waiting()))
            }
            _ => Ok(()),
        }
    }

    /// Describes the sent packets that were not checked yet.
    fn waiting(&mut self) -> String {
        let mut text = String::new();
        for (at, frame) in self.bed.sent.clone().into_iter().take(16) {
            let came = self.flow().read(&frame, None);
            let came = came.map_or_else(|wrong| wrong, |came| format!("> {came}"));
            text += &format!("\n  and      {} {came}", seconds(at - BEGINNING));
        }
        text
    }

    fn session(&mut self) -> Result<&mut Session, String> {
        self.session.as_mut().ok_or("there is no connection: connect or accept one".into())
    }

    fn open(&mut self, conn: ConnId) -> Result<(), String> {
        let stack = self.bed.stack();
        let slot = stack.slot(conn).ok_or("the connection has no slot")?;
        let memory = stack.memory(AppId::OWN);
        let reader = Reader::new(Arc::clone(memory), slot).ok_or("the slot has no reader")?;
        let writer = Writer::new(Arc::clone(memory), slot).ok_or("the slot has no writer")?;
        self.session = Some(Session { conn, reader, writer, read: 1, written: 1 });
        Ok(())
    }

    fn call(&mut self, call: &Call) -> Result<(), String> {
        match call {
            Call::Listen { backlog } => {
                let (stack, ..) = self.bed.call();
                let listener = stack
                    .listen(AppId::OWN, None, PORT, *backlog, false)
                    .map_err(|error| error.to_string())?;
                self.listener = Some(listener);
            }
            Call::Connect => self.connect()?,
            Call::Accept => {
                let listener = self.listener.ok_or("there is no listener")?;
                let (stack, ..) = self.bed.call();
                let conn = stack.accept(listener).ok_or("there is no connection to be accepted")?;
                self.open(conn)?;
            }
            Call::Write(bytes, taken, more) => self.write(*bytes, *taken, *more)?,
            Call::Read(bytes, there, other) => self.read(*bytes, *there, *other)?,
            Call::UserTimeout(millis) => self.timeouts(*millis as u32, 0)?,
            Call::SynCount(count) => self.timeouts(0, *count as u8)?,
            Call::Cork(on) => {
                self.slot()?.cork(*on);
                self.look()?;
            }
            Call::NoDelay => {
                let conn = self.session.as_ref().ok_or("there is no connection")?.conn;
                self.slot()?.push();
                self.look()?;
                let (stack, out, now) = self.bed.call();
                return stack.set_nodelay(now, conn, true, out).map_err(|error| error.to_string());
            }
            Call::Close | Call::Abort | Call::Shutdown => {
                let conn = self.session()?.conn;
                let (stack, out, now) = self.bed.call();
                match call {
                    Call::Close => stack.close(now, conn, out),
                    Call::Abort => stack.abort(now, conn, out),
                    _ => stack.shutdown(now, conn, out).map_err(|error| error.to_string())?,
                }
            }
            Call::Event(event, comes) => self.event(event, *comes)?,
            Call::Engine(engine) => self.bed.engine(*engine),
            Call::Flow(number) => self.flow = *number,
            Call::Renumber => self.flow().renumber(),
        }
        Ok(())
    }

    fn connect(&mut self) -> Result<(), String> {
        let (_, theirs) = addresses(&self.setup);
        let to = SocketAddr::new(theirs, PORT);
        let (stack, out, now) = self.bed.call();
        let conn = stack.connect(now, AppId::OWN, None, to, out).map_err(|error| error.to_string())?;
        let info = stack.info(conn).ok_or("the connection is gone")?;
        self.flows.insert(self.flow, Flow::new(info.local, info.remote));
        self.open(conn)
    }

    fn timeouts(&mut self, user_timeout: u32, syn_retries: u8) -> Result<(), String> {
        let conn = self.session()?.conn;
        let (stack, out, now) = self.bed.call();
        stack.set_timeouts(now, conn, user_timeout, syn_retries, out).map_err(|error| error.to_string())
    }

    fn slot(&mut self) -> Result<&Slot, String> {
        self.session()?.writer.slot().ok_or("the session has no slot".into())
    }

    /// Makes the stack read the slot.
    fn look(&mut self) -> Result<(), String> {
        let conn = self.session()?.conn;
        let (stack, out, now) = self.bed.call();
        stack.written(now, conn, out).map_err(|error| error.to_string())
    }

    fn write(&mut self, bytes: usize, taken: usize, more: bool) -> Result<(), String> {
        let session = self.session.as_mut().ok_or("there is no connection")?;
        if more && let Some(slot) = session.writer.slot() {
            let from = session.writer.position();
            slot.expect_more(from..from + bytes as u64);
        }
        let data: Vec<u8> = (0..bytes).map(|at| content(session.written.wrapping_add(at as u32))).collect();
        let mut done = 0;
        loop {
            let written = session.writer.write(&data[done..]);
            done += written;
            let (stack, out, now) = self.bed.call();
            let result = stack.written(now, session.conn, out);
            if let (Err(error), true) = (result, written > 0) {
                return Err(error.to_string());
            }
            if written == 0 || done == bytes {
                break;
            }
        }
        session.written = session.written.wrapping_add(done as u32);
        if done == taken { Ok(()) } else { Err(format!("expected {taken} bytes to be taken, were {done}")) }
    }

    fn read(&mut self, bytes: usize, there: usize, other: bool) -> Result<(), String> {
        let session = self.session.as_mut().ok_or("there is no connection")?;
        let mut data = vec![0; bytes];
        let len = session.reader.read(&mut data);
        if len != there {
            return Err(format!("expected to read {there} bytes, were {len}"));
        }
        let byte = if other { altered } else { content };
        let start = session.read;
        let right = |at: usize| data[at] == byte(start.wrapping_add(at as u32));
        if let Some(wrong) = (0..len).find(|at| !right(*at)) {
            return Err(format!("expected another byte at {}", start.wrapping_add(wrong as u32)));
        }
        session.read = start.wrapping_add(len as u32);
        let conn = session.conn;
        let (stack, out, now) = self.bed.call();
        // Data of a closed connection can still be read. The stack needs no notification then.
        let _ = stack.consumed(now, conn, out);
        Ok(())
    }

    fn event(&mut self, wanted: &str, comes: bool) -> Result<(), String> {
        let found = self.bed.events.iter().position(|event| name_of(event) == wanted);
        match (found, comes) {
            (Some(at), true) => {
                self.bed.events.remove(at);
                Ok(())
            }
            (None, false) => Ok(()),
            (Some(_), false) => Err(format!("expected no event {wanted}, but it came")),
            (None, true) => {
                let came: Vec<String> = self.bed.events.iter().map(name_of).collect();
                Err(format!("expected event {wanted}\n  came     {}", came.join(", ")))
            }
        }
    }

    fn check(&mut self, comparison: &Comparison) -> Result<(), String> {
        let left = self.field(&comparison.field).ok_or(format!("'{}': unknown field", comparison.field))?;
        let right = match &comparison.value {
            Value::Number(number) => Field::Number(*number),
            Value::Segments(number) => match self.field("mss") {
                Some(Field::Number(mss)) => Field::Number(mss * number),
                _ => return Err("there is no mss".into()),
            },
            Value::Word(word) => self.field(word).unwrap_or_else(|| Field::Word(word.clone())),
        };
        let holds = match (comparison.operator.as_str(), &left, &right) {
            ("==", ..) => left == right,
            ("!=", ..) => left != right,
            ("<", Field::Number(left), Field::Number(right)) => left < right,
            ("<=", Field::Number(left), Field::Number(right)) => left <= right,
            (">", Field::Number(left), Field::Number(right)) => left > right,
            (">=", Field::Number(left), Field::Number(right)) => left >= right,
            _ => return Err(format!("{comparison}: words have no order")),
        };
        if holds { Ok(()) } else { Err(format!("expected {comparison}\n  came     {left:?}, {right:?}")) }
    }

    /// Returns a field of the connection or of the stack.
    fn field(&mut self, name: &str) -> Option<Field> {
        let stack = self.bed.stack();
        if let Some(reason) = name.strip_prefix("drops.") {
            let count = stack.drops().iter().find(|count| count.0 == reason)?.1;
            return Some(Field::Number(count as i64));
        }
        if name == "connections" {
            return Some(Field::Number(stack.connections() as i64));
        }
        let info = self.session.as_ref().and_then(|session| stack.info(session.conn));
        let Some(info) = info else { return (name == "state").then(|| Field::Word("GONE".into())) };
        let stats = info.stats;
        let number = match name {
            "state" => return Some(Field::Word(info.state.into())),
            "recovery" => return Some(Field::Word(format!("{:?}", info.recovery.state))),
            "cwnd" => info.cwnd,
            "ssthresh" => info.recovery.ssthresh,
            "pipe" => info.recovery.pipe,
            "srtt" => info.srtt.get(),
            "rttvar" => info.recovery.rttvar.get(),
            "min_rtt" => info.recovery.min_rtt.unwrap_or_default().get(),
            "rto" => info.recovery.rto.get(),
            "mss" => info.mss.into(),
            "fast" => stats.fast.into(),
            "timeout" => stats.timeout.into(),
            "probes" => stats.probes.into(),
            "spurious" => stats.spurious.into(),
            "reordered" => stats.reordered.into(),
            "timeouts" => stats.timeouts.into(),
            "duplicates" => stats.duplicates.into(),
            "bad_sacks" => stats.bad_sacks.into(),
            "marks" => stats.marks.into(),
            _ => return None,
        };
        Some(Field::Number(number as i64))
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Field {
    Number(i64),
    Word(String),
}

/// Returns the name of an event in scripts.
fn name_of(event: &Event) -> String {
    match event {
        Event::Connected(_) => "connected".into(),
        Event::Incoming { .. } => "incoming".into(),
        Event::Readable(_) => "readable".into(),
        Event::Writable(_) => "writable".into(),
        Event::EndOfStream(_) => "end".into(),
        Event::Closed(_, cause) => format!("closed({cause:?})"),
        Event::Failed(_, errno) => format!("failed({errno})"),
        Event::AddressConflict { .. } => "conflict".into(),
        Event::Address { .. } => "lease".into(),
    }
}

fn span(from: Time, to: Time) -> String {
    let (first, last) = (seconds(from - BEGINNING), seconds(to - BEGINNING));
    if from == to { first } else { format!("{first}~{last}") }
}
