//! A host on ports: the TCP/IP stack as a task, and applications on it.

pub mod apps;
pub mod watched;

use std::collections::VecDeque;
use std::mem;

use offcore_dma::Mover;
use offcore_mem::{BURST, Burst, Packet};
use offcore_port::offload_fallback::{Accepts, fall_back};
use offcore_port::{Context, RxQueue, TxQueue};
use offcore_stats::{Stage, tsc};
use offcore_tcp::path::Path;
use offcore_tcp::proto::{CallError, ConnId, Event, Out, Stack};

use crate::worker::task::Task;
use watched::Watched;

/// How long connections may take to end when the worker stops.
const LINGER_MICROS: u64 = 1_000_000;

/// An application in the stack's own process and on its worker.
pub trait App: std::fmt::Debug + Send {
    /// Begins: listens, or connects.
    ///
    /// # Errors
    /// What the stack refuses.
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError>;

    /// Something has happened.
    fn event(&mut self, event: Event, calls: &mut Calls<'_>);

    /// Called in every round, before packets are sent.
    fn round(&mut self, ctx: &mut Context<'_>, calls: &mut Calls<'_>) {
        let _ = (ctx, calls);
    }

    /// Whether there is more to do in the next round, whatever comes: the worker does not sleep then.
    fn is_busy(&self) -> bool {
        false
    }

    /// Copies of its own that are under way: the worker waits for them.
    fn in_flight(&self, mover: &mut Mover) -> usize {
        let _ = mover;
        0
    }

    /// The worker stops: connections are closed.
    fn stop(&mut self, calls: &mut Calls<'_>);
}

/// The stack, as an application calls it.
#[derive(Debug)]
pub struct Calls<'a> {
    pub stack: &'a mut Stack,
    pub out: &'a mut Out,
    /// Microseconds since the stack was made.
    pub now: u64,
}

impl Calls<'_> {
    /// The application lets go of a connection.
    pub fn close(&mut self, conn: ConnId) {
        self.stack.close(self.now, conn, self.out);
    }
}

/// One interface of a host.
#[derive(Debug)]
pub struct HostPort {
    pub rx: Box<dyn RxQueue>,
    pub tx: Box<dyn TxQueue>,
}

/// A stack, its ports, and an application.
#[derive(Debug)]
pub struct Host {
    /// By number of the stack's interface.
    ports: Vec<HostPort>,
    path: Path,
    app: Box<dyn App>,
    events: Vec<Event>,
    watched: Option<Watched>,
    /// Time stamp counter when the host was made, and its ticks in a microsecond.
    started: u64,
    ticks: u64,
    /// When the application was told to stop.
    stopping: Option<u64>,
}

impl Host {
    /// A host whose stack has an interface for each port, in their order.
    ///
    /// # Errors
    /// What the application's beginning was refused.
    pub fn new(path: Path, ports: Vec<HostPort>, app: Box<dyn App>) -> Result<Self, CallError> {
        let ticks = (tsc::hz() / 1_000_000).max(1);
        let (started, events) = (tsc::now(), Vec::new());
        let mut host = Self { ports, path, app, events, watched: None, started, ticks, stopping: None };
        host.look_at_links();
        let now = host.now();
        let (stack, out) = host.path.call();
        host.app.start(&mut Calls { stack, out, now })?;
        Ok(host)
    }

    /// The same, and where it tells how it is.
    pub fn watched(mut self, watched: Watched) -> Self {
        self.watched = Some(watched);
        self
    }

    /// Whoever is behind a port may have changed what it takes. Until that is seen, it is done for him in software.
    fn look_at_links(&mut self) {
        for (iface, port) in self.ports.iter().enumerate() {
            let Accepts { offloads, segments } = port.tx.accepts();
            self.path.set_link(iface as u8, offloads, segments);
        }
    }

    /// Microseconds since the host was made, at least one.
    fn now(&self) -> u64 {
        (tsc::now().wrapping_sub(self.started)) / self.ticks + 1
    }

    /// The stack.
    pub fn stack(&mut self) -> &mut Stack {
        &mut self.path.stack
    }

    /// One turn; returns the packets received, and one more when the application has more to do.
    fn turn(&mut self, ctx: &mut Context<'_>, take: bool) -> usize {
        let now = self.now();
        let mut received = 0;
        let mut burst = Burst::new();
        for (iface, port) in self.ports.iter_mut().enumerate() {
            if take && self.path.is_open() {
                port.rx.rx(ctx, &mut burst);
            } else {
                port.rx.drain(ctx, &mut burst);
            }
            received += burst.len();
            if burst.is_empty() {
                // What a poll that found nothing took belongs to no stage of a packet's way.
                ctx.clock.lap(Stage::Idle);
            } else {
                self.path.receive(ctx, now, iface as u8, &mut burst);
            }
        }
        let (stack, out) = self.path.call();
        self.app.round(ctx, &mut Calls { stack, out, now });
        if self.app.is_busy() {
            received += 1;
        }
        ctx.clock.lap(if received > 0 { Stage::Application } else { Stage::Idle });
        self.path.turn(ctx, now, BURST);
        if self.tell(now) {
            ctx.clock.lap(Stage::Application);
        }
        let Self { ports, path, .. } = self;
        for (iface, port) in ports.iter_mut().enumerate() {
            send(&mut *port.tx, path.to_send(iface as u8), ctx);
        }
        received
    }

    /// The application hears what has happened. What it does may make more happen, which it hears in the next turn. Whether
    /// there was anything.
    fn tell(&mut self, now: u64) -> bool {
        let mut events = mem::take(&mut self.events);
        self.path.take_events(&mut events);
        let any = !events.is_empty();
        for event in events.drain(..) {
            let (stack, out) = self.path.call();
            self.app.event(event, &mut Calls { stack, out, now });
        }
        self.events = events;
        any
    }
}

/// Sends what waits, a burst at most.
fn send(tx: &mut dyn TxQueue, waiting: &mut VecDeque<Packet>, ctx: &mut Context<'_>) {
    if waiting.is_empty() {
        tx.poll(ctx);
        return;
    }
    let count = waiting.len().min(BURST);
    let mut burst: Burst = waiting.drain(..count).collect();
    if !Packet::all_plain(&burst) {
        fall_back(tx, ctx, &mut burst);
    }
    tx.tx(ctx, &mut burst);
    for packet in burst.drain(..).rev() {
        waiting.push_front(packet);
    }
}

impl Task for Host {
    fn round(&mut self, ctx: &mut Context<'_>) -> usize {
        self.turn(ctx, true)
    }

    fn drain(&mut self, ctx: &mut Context<'_>) -> usize {
        let now = self.now();
        let since = *self.stopping.get_or_insert_with(|| {
            if let Some(watched) = &mut self.watched {
                watched.finish(&mut self.path);
            }
            let (stack, out) = self.path.call();
            self.app.stop(&mut Calls { stack, out, now });
            now
        });
        // Peers may still answer: connections end as they should, if that does not take long.
        let lingers = self.path.stack.connections() > 0 && now - since < LINGER_MICROS;
        self.turn(ctx, lingers);
        let left = self.path.in_flight(ctx.mover) + self.app.in_flight(ctx.mover);
        if left == 0 && !lingers {
            for (iface, port) in self.ports.iter_mut().enumerate() {
                ctx.cache.free_all(self.path.to_send(iface as u8).drain(..));
                port.tx.stop(ctx);
            }
            return 0;
        }
        // It differs from turn to turn while connections end, so that the worker waits for them.
        left + 1 + (now % 1024) as usize
    }

    fn publish(&mut self) {
        let now = self.now();
        if let Some(watched) = &mut self.watched {
            watched.update(now, &mut self.path);
        }
        self.look_at_links();
    }

    fn wake_sources<'a>(&'a mut self, each: &mut dyn FnMut(&'a mut dyn RxQueue)) {
        for port in &mut self.ports {
            each(&mut *port.rx);
        }
    }
}
