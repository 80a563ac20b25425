//! Two hosts and a link between them, in virtual time. The server has an application.

use std::net::SocketAddr;
use std::sync::Arc;

use offcore_dma::{Context, Mover};
use offcore_flow::host::{App, Calls};
use offcore_mem::{BURST, Burst, HEADROOM, Hugepages, Pool, PoolCache};
use offcore_session::{Reader, Writer};
use offcore_stats::StageClock;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::path::Path;
use offcore_tcp::proto::{AppId, Config, ConnId, Event, IfaceConfig, Out, Prefix, Stack};
use offcore_wire::MacAddr;

/// Duration of a turn.
const TURN: Micros = Micros::from_millis(10);
const SERVER: [u8; 4] = [10, 0, 0, 1];

/// One host.
pub(crate) struct Side {
    pub(crate) path: Path,
    mover: Mover,
    cache: PoolCache,
    clock: StageClock,
}

impl Side {
    fn new(address: [u8; 4], config: Config) -> Self {
        let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
        let (mut stack, mut out, mut mover) = (Stack::new(config).unwrap(), Out::default(), Mover::new());
        let addresses = vec![Prefix { address: address.into(), len: 24 }];
        let mac = MacAddr([2, 0, 0, 0, 0, address[3]]);
        stack.add_iface(
            Time::from_micros(1),
            &IfaceConfig { mac, mtu: 1500, addresses, routes: Vec::new() },
            &mut out,
        );
        let path = Path::new(stack, out, &mut mover, pool);
        Self { path, mover, cache: pool.cache(), clock: StageClock::private() }
    }

    fn with<R>(&mut self, f: impl FnOnce(&mut Path, &mut Context<'_>) -> R) -> R {
        let Self { path, mover, cache, clock } = self;
        f(path, &mut Context { mover, cache, clock, burst: BURST })
    }

    fn receive(&mut self, now: Time, frames: &[Vec<u8>]) {
        for frames in frames.chunks(BURST) {
            let mut burst = Burst::new();
            for frame in frames {
                let mut packet = self.cache.take_sized(HEADROOM, frame.len()).unwrap();
                packet.bytes_mut().copy_from_slice(frame);
                burst.push(packet);
            }
            self.with(|path, ctx| path.receive(ctx, now, 0, &mut burst));
        }
    }

    fn send(&mut self) -> Vec<Vec<u8>> {
        let packets: Vec<_> = self.path.to_send(0).drain(..).collect();
        let frames = packets.iter().map(|packet| packet.bytes().to_vec()).collect();
        self.cache.free_all(packets);
        frames
    }

    fn events(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.path.take_events(&mut events);
        events
    }
}

/// Both hosts.
pub(crate) struct World<A> {
    pub(crate) server: Side,
    pub(crate) app: A,
    pub(crate) client: Side,
    /// Events of the client's stack.
    pub(crate) events: Vec<Event>,
    pub(crate) now: Time,
    /// The link drops all packets.
    pub(crate) cut: bool,
    on_wire: [Vec<Vec<u8>>; 2],
}

impl<A: App> World<A> {
    /// Creates both hosts, with an application on the server, whose stack uses `config`.
    pub(crate) fn new(mut app: A, config: Config) -> Self {
        let mut server = Side::new(SERVER, Config { secret: [1; 16], ..config });
        let client =
            Side::new([10, 0, 0, 2], Config { secret: [2; 16], memory: 256 << 20, ..Config::default() });
        let (stack, out) = server.path.call();
        let now = Time::from_micros(1);
        app.start(&mut Calls { stack, out, now }).unwrap();
        Self { server, app, client, events: Vec::new(), now, cut: false, on_wire: Default::default() }
    }

    /// Runs one turn of both hosts, like a worker.
    pub(crate) fn turn(&mut self) {
        self.now += TURN;
        let Self { server, app, client, events, now, cut, on_wire: [to_server, to_client] } = self;
        let now = *now;
        if *cut {
            to_server.clear();
            to_client.clear();
        }
        server.receive(now, to_server);
        server.with(|path, ctx| {
            let (stack, out) = path.call();
            app.round(ctx, &mut Calls { stack, out, now });
            path.turn(ctx, now, BURST);
        });
        for event in server.events() {
            let (stack, out) = server.path.call();
            app.event(event, &mut Calls { stack, out, now });
        }
        let (stack, out) = server.path.call();
        app.told(&mut Calls { stack, out, now });
        client.receive(now, to_client);
        client.with(|path, ctx| path.turn(ctx, now, BURST));
        events.extend(client.events());
        (*to_client, *to_server) = (server.send(), client.send());
    }

    /// Runs turns for this number of seconds.
    pub(crate) fn run(&mut self, seconds: f64) {
        let end = self.now + Micros::new((seconds * 1e6) as u64);
        while self.now < end {
            self.turn();
        }
    }

    /// Runs turns until `done`. Returns the elapsed seconds, or `None` after `most` seconds.
    pub(crate) fn run_until(&mut self, most: u64, mut done: impl FnMut(&mut Self) -> bool) -> Option<u64> {
        let began = self.now;
        while self.now < began + Micros::from_secs(most) {
            self.turn();
            if done(self) {
                return Some((self.now - began).as_secs());
            }
        }
        None
    }

    /// Connects the client to a port of the server.
    pub(crate) fn connect(&mut self, port: u16) -> Client {
        let (stack, out) = self.client.path.call();
        let conn = stack.connect(self.now, AppId::OWN, None, SocketAddr::from((SERVER, port)), out).unwrap();
        let client = self.as_client(conn);
        self.run_until(10, |world| world.events.contains(&Event::Connected(conn))).unwrap();
        client
    }

    /// Makes the client listen on a port.
    #[allow(dead_code, reason = "some tests only have servers")]
    pub(crate) fn listen(&mut self, port: u16) -> u32 {
        self.client.path.stack.listen(AppId::OWN, None, port, 16, false).unwrap()
    }

    /// Accepts the next connection to the client.
    #[allow(dead_code, reason = "some tests only have servers")]
    pub(crate) fn accept(&mut self, listener: u32) -> Option<Client> {
        let conn = self.client.path.stack.accept(listener)?;
        Some(self.as_client(conn))
    }

    pub(crate) fn as_client(&mut self, conn: ConnId) -> Client {
        let stack = &self.client.path.stack;
        let (memory, slot) = (stack.memory(AppId::OWN), stack.slot(conn).unwrap());
        let reader = Reader::new(Arc::clone(memory), slot).unwrap();
        let writer = Writer::new(Arc::clone(memory), slot).unwrap();
        Client { conn, reader, writer }
    }

    /// Whether the client's connection is over.
    pub(crate) fn is_closed(&self, client: &Client) -> bool {
        self.events.iter().any(|event| matches!(event, Event::Closed(conn, _) if *conn == client.conn))
    }

    /// Whether the server has ended its stream.
    pub(crate) fn has_ended(&self, client: &Client) -> bool {
        self.events.contains(&Event::EndOfStream(client.conn))
    }

    /// Writes data of the client.
    pub(crate) fn write(&mut self, client: &mut Client, bytes: &[u8]) -> usize {
        let written = client.writer.write(bytes);
        let (stack, out) = self.client.path.call();
        stack.written(self.now, client.conn, out).unwrap();
        written
    }

    /// Reads up to `most` bytes on the client.
    pub(crate) fn read(&mut self, client: &mut Client, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; client.reader.available().min(most)];
        client.reader.read(&mut bytes);
        let (stack, out) = self.client.path.call();
        let _ = stack.consumed(self.now, client.conn, out);
        bytes
    }
}

/// A connection of the client.
pub(crate) struct Client {
    pub(crate) conn: ConnId,
    reader: Reader,
    writer: Writer,
}
