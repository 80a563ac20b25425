//! Two hosts with one socket each, and a link between them that tests can observe and modify.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::{Binding, Context, CopyDevice, Mode, Mover};
use offcore_mem::{BURST, Burst, HEADROOM, Hugepages, Pool, PoolCache};
use offcore_session::datagram::{Header, More};
use offcore_session::{Datagrams, Segments, Writer};
use offcore_stats::StageClock;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::path::Path;
use offcore_tcp::proto::{AppId, Config, ConnId, Event, IfaceConfig, Out, Prefix, Share, Stack};
use offcore_wire::MacAddr;

pub(crate) const PORT: u16 = 7;
const MTU: u16 = 1500;
/// Number of turns that a copy by an engine takes.
const COPYING: u32 = 24;

/// A host with a socket at [`PORT`].
pub(crate) struct End {
    pub(crate) path: Path,
    pub(crate) cache: PoolCache,
    pub(crate) socket: ConnId,
    pub(crate) events: Vec<Event>,
    turns: u32,
    mover: Mover,
    clock: StageClock,
    stepper: Stepper,
    datagrams: Datagrams,
}

/// Returns the addresses of host `last`.
pub(crate) fn addresses(last: u8) -> [IpAddr; 2] {
    [[10, 0, 0, last].into(), [0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into()].into()]
}

impl End {
    fn new(last: u8, by_engine: bool, pool: &'static Pool) -> Self {
        let [v4, v6] = addresses(last);
        let addresses = vec![Prefix { address: v4, len: 24 }, Prefix { address: v6, len: 64 }];
        Self::with_config(
            last,
            vec![addresses],
            by_engine,
            pool,
            Config { memory: 8 << 20, ..Config::default() },
        )
    }

    /// Creates a worker. Several workers together form host `last`.
    pub(crate) fn shared(last: u8, pool: &'static Pool, share: Share) -> Self {
        let addresses = vec![Prefix { address: addresses(last)[0], len: 24 }];
        Self::with_config(
            last,
            vec![addresses],
            false,
            pool,
            Config { memory: 8 << 20, share, ..Config::default() },
        )
    }

    /// Creates a host with one interface per address and memory for many streams.
    pub(crate) fn streaming(addresses: &[[u8; 4]], pool: &'static Pool) -> Self {
        let ifaces = addresses.iter().map(|&address| vec![Prefix { address: address.into(), len: 24 }]);
        let config = Config { memory: 64 << 20, ..Config::default() };
        Self::with_config(addresses[0][3], ifaces.collect(), false, pool, config)
    }

    fn with_config(
        last: u8,
        ifaces: Vec<Vec<Prefix>>,
        by_engine: bool,
        pool: &'static Pool,
        config: Config,
    ) -> Self {
        let mut stack = Stack::new(Config { secret: [last; 16], ..config }).unwrap();
        let mut out = Out::default();
        for (number, addresses) in ifaces.into_iter().enumerate() {
            let mac = MacAddr([2, 0, 0, 0, number as u8, last]);
            stack.add_iface(
                Time::from_micros(1),
                &IfaceConfig { mac, mtu: MTU, addresses, routes: Vec::new() },
                &mut out,
            );
        }
        let socket = stack.open_datagrams(AppId::OWN, None, PORT).unwrap();
        let datagrams = Datagrams::new(stack.memory(AppId::OWN), stack.slot(socket).unwrap()).unwrap();
        let mut mover = Mover::new();
        let (device, stepper) = CoreDevice::stepped();
        let channel = mover.add_channel(device.open_channel(256).unwrap());
        let mut path = Path::new(stack, out, &mut mover, pool);
        if by_engine {
            let binding = Binding::new(Mode::Offload, vec![channel]);
            path.bind(&mut mover, &binding, &binding).unwrap();
        }
        let (cache, clock) = (pool.cache(), StageClock::private());
        Self { path, cache, socket, events: Vec::new(), turns: 0, mover, clock, stepper, datagrams }
    }

    pub(crate) fn with<R>(&mut self, f: impl FnOnce(&mut Path, &mut Context<'_>) -> R) -> R {
        let Self { path, mover, cache, clock, .. } = self;
        f(path, &mut Context { mover, cache, clock, burst: BURST })
    }

    /// Receives a frame, in a chain of as many buffers as it needs.
    pub(crate) fn receive(&mut self, now: Time, frame: &[u8]) {
        let mut packet = self.cache.take_chain(HEADROOM, frame.len()).unwrap();
        let mut rest = frame;
        for segment in self.cache.pool().segments_mut(&mut packet) {
            let (here, behind) = rest.split_at(segment.len());
            segment.copy_from_slice(here);
            rest = behind;
        }
        let mut burst = Burst::new();
        burst.push(packet);
        self.with(|path, ctx| path.receive(ctx, now, 0, &mut burst));
    }

    /// Runs one turn and returns the frames that it sends.
    pub(crate) fn turn(&mut self, now: Time) -> Vec<Vec<u8>> {
        // Copies take several turns, so that later copies overtake them.
        self.turns += 1;
        if self.turns.is_multiple_of(COPYING) {
            self.stepper.step();
        }
        self.with(|path, ctx| {
            ctx.mover.poll(ctx.clock);
            path.turn(ctx, now, BURST);
        });
        self.path.take_events(&mut self.events);
        let packets: Vec<_> = self.path.to_send(0).drain(..).collect();
        let pool = self.cache.pool();
        let frames =
            packets.iter().map(|packet| pool.segments(packet).collect::<Vec<_>>().concat()).collect();
        self.cache.free_all(packets);
        frames
    }

    pub(crate) fn send(&mut self, to: SocketAddr, payload: &[u8]) -> bool {
        self.send_with(to, payload, More::default())
    }

    pub(crate) fn send_with(&mut self, to: SocketAddr, payload: &[u8], more: More) -> bool {
        let local = if to.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
        let header = Header { more, ..Header::new(payload.len() as u16, to, local) };
        let Self { path, datagrams, .. } = self;
        let (stack, out) = path.call();
        let mut sent = datagrams.send(&header, payload);
        stack.written(Time::from_micros(1), self.socket, out).unwrap();
        if !sent {
            // The stack has seen the request for room now.
            sent = datagrams.send(&header, payload);
            stack.written(Time::from_micros(1), self.socket, out).unwrap();
        }
        sent
    }

    /// Writes bytes that are not a valid datagram.
    pub(crate) fn write_nonsense(&mut self, bytes: &[u8]) {
        let (stack, out) = self.path.call();
        let slot = stack.slot(self.socket).unwrap();
        let mut writer = Writer::new(Arc::clone(stack.memory(AppId::OWN)), slot).unwrap();
        assert!(writer.write_all(&[bytes]));
        stack.written(Time::from_micros(1), self.socket, out).unwrap();
    }

    /// Takes the oldest received datagram.
    pub(crate) fn take(&mut self) -> Option<(SocketAddr, Vec<u8>)> {
        self.take_header().map(|(header, bytes)| (header.peer, bytes))
    }

    /// Takes a received datagram with its header.
    pub(crate) fn take_header(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut bytes = vec![0; 65_535];
        let header = self.datagrams.receive(&mut bytes)?;
        bytes.truncate(header.len.into());
        let (stack, out) = self.path.call();
        stack.consumed(Time::from_micros(1), self.socket, out).unwrap();
        Some((header, bytes))
    }

    /// Returns the MTU in the socket's slot.
    pub(crate) fn mtu(&mut self) -> u32 {
        let (stack, _) = self.path.call();
        let slot = stack.slot(self.socket).unwrap();
        stack.memory(AppId::OWN).slot(slot).unwrap().mtu().load(Ordering::Relaxed)
    }
}

/// Both hosts.
pub(crate) struct World {
    pub(crate) ends: [End; 2],
    pub(crate) now: Time,
}

impl World {
    /// Creates host 1 and host 2.
    pub(crate) fn new(by_engine: bool) -> Self {
        let pool = Pool::new(2048, 2048, Hugepages::None).unwrap();
        let ends = [1, 2].map(|last| End::new(last, by_engine, pool));
        let mut world = Self { ends, now: Time::from_micros(1) };
        // Duplicate address detection of IPv6 takes some time.
        world.run(|_, frame| vec![frame]);
        world.now = Time::from_secs(2);
        world.run(|_, frame| vec![frame]);
        world
    }

    /// Runs until both hosts are idle. `wire` maps each sent frame to the frames that arrive.
    pub(crate) fn run(&mut self, mut wire: impl FnMut(usize, Vec<u8>) -> Vec<Vec<u8>>) {
        let mut quiet = 0;
        while quiet < 2 * COPYING {
            self.now += Micros::new(10);
            let mut busy = false;
            for from in 0..2 {
                for frame in self.ends[from].turn(self.now) {
                    busy = true;
                    for frame in wire(from, frame) {
                        self.ends[1 - from].receive(self.now, &frame);
                    }
                }
            }
            quiet = if busy { 0 } else { quiet + 1 };
        }
    }

    /// Makes the hosts resolve each other's link-layer addresses.
    pub(crate) fn resolve_neighbours(&mut self, to: IpAddr) {
        assert!(self.ends[0].send((to, PORT).into(), b"who are you"));
        self.run(|_, frame| vec![frame]);
        assert_eq!(self.ends[1].take().unwrap().1, b"who are you");
    }

    /// Returns the port of a host's socket.
    pub(crate) fn port_of(&self, host: usize, socket: ConnId) -> u16 {
        self.ends[host].path.stack.datagram_address(socket).unwrap().1
    }

    /// Returns the frames that host 1 sends for a datagram of `payload` to host 2. They are not delivered.
    pub(crate) fn frames_of(&mut self, to: IpAddr, payload: &[u8]) -> Vec<Vec<u8>> {
        self.resolve_neighbours(to);
        assert!(self.ends[0].send((to, PORT).into(), payload));
        let mut frames = Vec::new();
        self.run(|_, frame| {
            frames.push(frame);
            Vec::new()
        });
        frames
    }
}
