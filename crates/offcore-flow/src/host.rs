//! A host: the TCP/IP stack as a worker task on ports, with an application.

pub mod apps;
pub mod serve;
pub mod spread;
mod tagging;
pub mod watched;

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, SystemTime};

use offcore_dma::Mover;
use offcore_mem::{BURST, Burst, Packet};
use offcore_port::offload_fallback::{Accepts, Taker, fall_back};
use offcore_port::{Context, DropReason, RxCounters, RxQueue, TxQueue};
use offcore_stats::time::{Micros, Time};
use offcore_stats::{Stage, tsc};
use offcore_tcp::path::{Path, SendQueue};
use offcore_tcp::proto::{CallError, ConnId, Event, Out, Stack};
use offcore_wire::virtio_net::Offloads;

use crate::ring::RingRx;
use crate::worker::task::{Task, WakeSource, Wakes};
use spread::{Rings, Spread, Unfinished};
use watched::Watched;

/// How long connections may take to close when the worker stops.
const LINGER: Micros = Micros::from_secs(1);

/// An application in the process of the stack, on the worker of the stack.
pub trait App: std::fmt::Debug + Send {
    /// Starts the application: it listens or connects.
    ///
    /// # Errors
    /// Returns the error of a call that the stack refuses.
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError>;

    /// Handles an event of the stack. The host itself logs address conflicts.
    fn event(&mut self, event: Event, calls: &mut Calls<'_>);

    /// Called in every round, before packets are sent.
    fn round(&mut self, ctx: &mut Context<'_>, calls: &mut Calls<'_>) {
        let _ = (ctx, calls);
    }

    /// Called after all events of a turn were delivered.
    fn told(&mut self, calls: &mut Calls<'_>) {
        let _ = calls;
    }

    /// Publishes counters that are not updated directly on the statistics page. Called from time to time.
    fn publish(&mut self) {}

    /// Returns the wake sources of the application in addition to packets.
    fn wakes(&mut self) -> Option<&mut dyn Wakes> {
        None
    }

    /// Whether work is left for the next round. The worker does not sleep then.
    fn is_busy(&self) -> bool {
        false
    }

    /// Returns the number of the application's own copies in progress. The worker waits for them before it stops.
    fn in_flight(&self, mover: &mut Mover) -> usize {
        let _ = mover;
        0
    }

    /// Closes the application's connections because the worker stops.
    fn stop(&mut self, calls: &mut Calls<'_>);

    /// Whether the application still waits for something before it has stopped. It may do so for some seconds.
    fn is_ending(&self) -> bool {
        false
    }
}

/// The stack's interface for an application.
#[derive(Debug)]
pub struct Calls<'a> {
    pub stack: &'a mut Stack,
    pub out: &'a mut Out,
    /// The time since the host was created.
    pub now: Time,
}

impl Calls<'_> {
    /// Closes a connection.
    pub fn close(&mut self, conn: ConnId) {
        self.stack.close(self.now, conn, self.out);
    }
}

/// The MTU of an interface, which can change at runtime.
pub type Mtu = Arc<AtomicU16>;

/// The state of one interface of a host on one worker.
#[derive(Debug)]
pub struct HostPort {
    /// The port's receive queues that the worker polls; empty if other workers poll all of them.
    pub rx: Vec<Box<dyn RxQueue>>,
    pub tx: Box<dyn TxQueue>,
    /// Set if the host has several workers.
    pub spread: Option<Spread>,
}

/// A stack, its ports, and an application.
#[derive(Debug)]
pub struct Host {
    /// By the stack's interface number.
    ports: Vec<HostPort>,
    path: Path,
    app: Box<dyn App>,
    events: Vec<Event>,
    watched: Option<Watched>,
    /// By interface: the MTU to follow, and its upper limit.
    mtus: Vec<(Mtu, u16)>,
    /// By interface: the VLAN of its packets.
    vlans: Vec<Option<u16>>,
    /// TSC value when the host was created, and TSC ticks per microsecond.
    started: u64,
    ticks: u64,
    /// When the application was told to stop.
    stopping: Option<Time>,
    /// Address leases have been released.
    released: bool,
    /// Number of the host's workers that still need each other's queues; `None` for a single worker.
    unfinished: Option<Unfinished>,
    finished: bool,
    /// Rings that other workers may still use.
    ending: Vec<RingRx>,
}

impl Host {
    /// Creates a host whose stack has an interface for each port, in the same order.
    ///
    /// # Errors
    /// Returns the error of the application's start.
    pub fn new(path: Path, ports: Vec<HostPort>, app: Box<dyn App>) -> Result<Self, CallError> {
        let ticks = (tsc::hz() / 1_000_000).max(1);
        let (started, events) = (tsc::now(), Vec::new());
        let mut host = Self {
            ports,
            path,
            app,
            events,
            watched: None,
            mtus: Vec::new(),
            vlans: Vec::new(),
            started,
            ticks,
            stopping: None,
            released: false,
            unfinished: None,
            finished: false,
            ending: Vec::new(),
        };
        host.look_at_links();
        let now = host.now();
        let (stack, out) = host.path.call();
        host.app.start(&mut Calls { stack, out, now })?;
        Ok(host)
    }

    /// Makes the host report its state to `watched`.
    pub fn watched(mut self, watched: Watched) -> Self {
        self.watched = Some(watched);
        self
    }

    /// Makes the interfaces follow these MTUs, each up to its limit.
    pub fn following(mut self, mtus: Vec<(Mtu, u16)>) -> Self {
        self.mtus = mtus;
        self
    }

    /// Puts the interfaces into these VLANs.
    pub fn tagged(mut self, vlans: Vec<Option<u16>>) -> Self {
        self.vlans = vlans;
        self
    }

    /// Makes this worker share the host with others. All of them hold `unfinished`, which counts them.
    pub fn beside(mut self, unfinished: Unfinished) -> Self {
        self.unfinished = Some(unfinished);
        self
    }

    /// Updates the properties of the links. The other side of a port may have changed the offloads that it accepts.
    /// Until this update, packets that need more are converted in software.
    fn look_at_links(&mut self) {
        for (iface, port) in self.ports.iter().enumerate() {
            let accepts = port.tx.accepts();
            if let Some(spread) = &port.spread {
                spread.takes.set(accepts);
            }
            let Accepts { offloads, segments } = accepts;
            self.path.set_link(iface as u8, offloads, segments);
        }
        // The system clock may have been set.
        let unix_time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.path.stack.set_unix_time(self.now(), unix_time.as_micros() as u64);
        for (iface, (mtu, most)) in self.mtus.iter().enumerate() {
            self.path.stack.set_mtu(iface as u8, mtu.load(Ordering::Relaxed).min(*most));
        }
    }

    /// The time since the host was created, at least a microsecond.
    fn now(&self) -> Time {
        Time::from_micros(tsc::now().wrapping_sub(self.started) / self.ticks + 1)
    }

    /// The stack.
    pub fn stack(&mut self) -> &mut Stack {
        &mut self.path.stack
    }

    /// Runs one turn. Returns the number of received packets, plus 1 if the application has more work.
    fn turn(&mut self, ctx: &mut Context<'_>, take: bool) -> usize {
        let now = self.now();
        let mut received = self.receive(ctx, now, take);
        let begins = self.now();
        let (stack, out) = self.path.call();
        self.app.round(ctx, &mut Calls { stack, out, now });
        let calls = self.now() - begins;
        self.path.stack.record_calls(calls);
        if self.app.is_busy() {
            received += 1;
        }
        ctx.clock.lap(if received > 0 { Stage::Application } else { Stage::Idle });
        self.path.turn(ctx, now, BURST);
        // The worker must not sleep while data waits for the next turn.
        received += usize::from(self.path.has_more());
        received += self.path.receive_looped(ctx, now);
        if self.tell(now) {
            ctx.clock.lap(Stage::Application);
        }
        let Self { ports, path, vlans, .. } = self;
        for (iface, port) in ports.iter_mut().enumerate() {
            let waiting = path.to_send(iface as u8);
            if let Some(spread) = &mut port.spread {
                received += spread.relay(ctx, waiting);
            }
            send(&mut *port.tx, waiting, vlans.get(iface).copied().flatten(), ctx);
        }
        received
    }

    /// Passes received packets to the stack. Returns their number, including packets for other workers.
    fn receive(&mut self, ctx: &mut Context<'_>, now: Time, take: bool) -> usize {
        let Self { ports, path, vlans, .. } = self;
        let mut received = 0;
        let mut burst = Burst::new();
        for (iface, port) in ports.iter_mut().enumerate() {
            let iface = iface as u8;
            for queue in &mut port.rx {
                // Packets for other workers must not wait for this one.
                if take && (port.spread.is_some() || path.is_open()) {
                    queue.rx(ctx, &mut burst);
                } else {
                    queue.drain(ctx, &mut burst);
                }
                received += burst.len();
                if let Some(vlan) = vlans.get(usize::from(iface)).copied().flatten() {
                    path.stack.count_foreign(tagging::untag(vlan, &mut burst, ctx.cache));
                }
                if let Some(spread) = &mut port.spread {
                    spread.deal(ctx, &path.stack, &mut burst);
                    spread.take_own(ctx, &mut burst, path.is_open(), queue.counters());
                }
                give(&mut Input { path, now, iface, counters: queue.counters() }, ctx, &mut burst);
            }
            let Some(spread) = &mut port.spread else { continue };
            for ring in &mut spread.rings.from {
                if path.is_open() {
                    ring.rx(ctx, &mut burst);
                    received += burst.len();
                    give(&mut Input { path, now, iface, counters: ring.counters() }, ctx, &mut burst);
                }
            }
            received += spread.deal_whole(ctx, path, iface);
        }
        received
    }

    /// Reports that this worker no longer needs the queues of other workers.
    fn finish(&mut self) {
        if !mem::replace(&mut self.finished, true)
            && let Some(unfinished) = &self.unfinished
        {
            unfinished.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Whether another worker may still need this one's queues.
    fn is_needed(&self) -> bool {
        self.unfinished.as_ref().is_some_and(|unfinished| unfinished.load(Ordering::Acquire) > 0)
    }

    /// Frees packets that were not sent. Returns the number of packets that are still in rings from other workers,
    /// which do the same.
    fn end(&mut self, ctx: &mut Context<'_>) -> usize {
        for (iface, mut port) in self.ports.drain(..).enumerate() {
            ctx.cache.free_all(self.path.to_send(iface as u8).drain(..));
            port.tx.stop(ctx);
            self.ending.extend(port.spread.map(|spread| spread.end(ctx)).into_iter().flatten());
        }
        self.path.drop_loopback(ctx.cache);
        let mut burst = Burst::new();
        let mut left = 0;
        for ring in &mut self.ending {
            left += ring.drain(ctx, &mut burst);
            ctx.cache.free_all(burst.drain(..));
        }
        left
    }

    /// Delivers the events of the stack to the application. Events that the application causes are delivered in the
    /// next turn. Returns whether there were any events.
    fn tell(&mut self, now: Time) -> bool {
        let mut events = mem::take(&mut self.events);
        self.path.take_events(&mut events);
        let any = !events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Address { iface, address, held: true } => {
                    tracing::info!("port{iface} has the address {address} from the network");
                }
                Event::Address { iface, address, .. } if self.released => {
                    tracing::info!("port{iface} releases {address}");
                }
                Event::Address { iface, address, .. } => {
                    tracing::warn!("port{iface} has lost {address}: its lease has ended");
                }
                Event::AddressConflict { iface, address, mac } => {
                    tracing::warn!(
                        "port{iface} does not use its address {address}: the host {mac} on its link uses it"
                    );
                    continue;
                }
                _ => {}
            }
            let (stack, out) = self.path.call();
            self.app.event(event, &mut Calls { stack, out, now });
        }
        self.events = events;
        if any {
            let (stack, out) = self.path.call();
            self.app.told(&mut Calls { stack, out, now });
        }
        any
    }
}

/// The stack as the receiver of packets from one queue.
struct Input<'a> {
    path: &'a mut Path,
    now: Time,
    iface: u8,
    counters: &'a RxCounters,
}

impl Taker for Input<'_> {
    /// The stack accepts a large TCP packet as one segment, but no large UDP or tunnel packets, because it would treat
    /// them as one datagram.
    fn accepts(&self) -> Accepts {
        Accepts { offloads: Offloads { uso: false, ..Offloads::ALL }, segments: true }
    }

    fn take(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        self.path.receive(ctx, self.now, self.iface, burst);
    }

    fn count_drop(&self, reason: DropReason, packets: u64) {
        self.counters.drop(reason, packets);
    }
}

/// Passes a burst to the stack.
#[inline]
fn give(input: &mut Input<'_>, ctx: &mut Context<'_>, burst: &mut Burst) {
    if burst.is_empty() {
        // The time of a poll without packets is not attributed to a packet stage.
        ctx.clock.lap(Stage::Idle);
        return;
    }
    if !Packet::all_plain(burst) {
        fall_back(input, ctx, burst);
    }
    input.take(ctx, burst);
}

/// Sends packets until the port accepts no more. One received burst can cause several.
fn send(tx: &mut dyn TxQueue, waiting: &mut SendQueue, vlan: Option<u16>, ctx: &mut Context<'_>) {
    if waiting.is_empty() {
        tx.poll(ctx);
        return;
    }
    while !waiting.is_empty() {
        let count = waiting.len().min(BURST);
        let mut burst: Burst = waiting.drain(..count).collect();
        // Tags come before the fallback, which may already send full bursts.
        if let Some(vlan) = vlan {
            let dropped = tagging::tag(vlan, &mut burst, ctx.cache);
            tx.counters().drop(DropReason::NoBuffer, dropped);
        }
        if !Packet::all_plain(&burst) {
            fall_back(tx, ctx, &mut burst);
        }
        tx.tx(ctx, &mut burst);
        if !burst.is_empty() {
            burst.drain(..).rev().for_each(|packet| waiting.push_front(packet));
            return;
        }
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
                watched.finish(now, &mut self.path);
            }
            let (stack, out) = self.path.call();
            self.app.stop(&mut Calls { stack, out, now });
            now
        });
        // Peers may still answer, so connections get some time to close in an orderly way.
        let lingers = self.app.is_ending() || self.path.stack.connections() > 0 && now - since < LINGER;
        let needed = !self.ports.is_empty() && self.is_needed();
        if !lingers && !mem::replace(&mut self.released, true) {
            let (stack, out) = self.path.call();
            stack.release_leases(now, out);
        }
        self.turn(ctx, lingers || needed);
        let left = self.path.in_flight(ctx.mover) + self.app.in_flight(ctx.mover);
        if left == 0 && !lingers {
            self.finish();
            if !self.is_needed() {
                return self.end(ctx);
            }
        }
        // The value changes from turn to turn while connections close, so that the worker waits for them.
        left + 1 + (now.as_micros() % 1024) as usize
    }

    fn publish(&mut self) {
        let now = self.now();
        if let Some(watched) = &mut self.watched {
            watched.update(now, &mut self.path);
        }
        self.app.publish();
        self.look_at_links();
    }

    fn next_timer(&self) -> Option<Duration> {
        let now = self.now();
        let due = self.path.stack.next_conn_timer()?;
        Some(Duration::from_micros(due.saturating_since(now).get()))
    }

    fn wake_sources<'a>(&'a mut self, each: &mut dyn FnMut(WakeSource<'a>)) {
        if let Some(other) = self.app.wakes() {
            each(WakeSource::Other(other));
        }
        for HostPort { rx, spread, .. } in &mut self.ports {
            rx.iter_mut().for_each(|queue| each(WakeSource::Queue(&mut **queue)));
            if let Some(Rings { from, relayed, .. }) = spread.as_mut().map(|spread| &mut spread.rings) {
                from.iter_mut().chain(relayed).for_each(|ring| each(WakeSource::Queue(ring)));
            }
        }
    }
}
