//! A host: a stack, its packets, and an engine that injects faults.

use std::sync::Arc;

use offcore_dma::cpu::CpuChannel;
use offcore_dma::fault::{FaultCounts, Faults, FaultyChannel};
use offcore_dma::{Binding, Context, Mode, Mover};
use offcore_mem::{BURST, Burst, HEADROOM, Hugepages, Pool, PoolCache};
use offcore_stats::StageClock;
use offcore_stats::time::Time;
use offcore_tcp::path::Path;
use offcore_tcp::proto::{Config, Event, IfaceConfig, Out, Prefix, Stack};
use offcore_wire::MacAddr;

const MTU: u16 = 1500;
const BUFFERS: usize = 2048;

pub(crate) struct End {
    pub(crate) path: Path,
    pub(crate) events: Vec<Event>,
    pub(crate) faults: Arc<FaultCounts>,
    cache: PoolCache,
    mover: Mover,
    clock: StageClock,
    /// Initial memory of FIFOs in bytes and initial number of free packet buffers.
    memory: usize,
    buffers: usize,
}

impl End {
    pub(crate) fn new(last: u8, mode: Mode, faults: Faults) -> Self {
        let config = Config { secret: [last; 16], memory: 8 << 20, ..Config::default() };
        let mut stack = Stack::new(config).unwrap();
        let mut out = Out::default();
        let addresses = vec![
            Prefix { address: [10, 0, 0, last].into(), len: 24 },
            Prefix { address: [0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into()].into(), len: 64 },
        ];
        let mac = MacAddr([2, 0, 0, 0, 0, last]);
        stack.add_iface(
            Time::from_micros(1),
            &IfaceConfig { mac, mtu: MTU, addresses, routes: Vec::new() },
            &mut out,
        );
        let memory = stack.memory_used();
        let pool = Pool::new(BUFFERS, 2048, Hugepages::None).unwrap();
        let mut mover = Mover::new();
        let channel = FaultyChannel::new(Box::new(CpuChannel::new(256).unwrap()), faults);
        let faults = channel.counts();
        let channel = mover.add_channel(Box::new(channel));
        let mut path = Path::new(stack, out, &mut mover, pool);
        let binding = Binding::new(mode, vec![channel]);
        path.bind(&mut mover, &binding, &binding).unwrap();
        let (cache, clock) = (pool.cache(), StageClock::private());
        let buffers = cache.available();
        Self { path, events: Vec::new(), faults, cache, mover, clock, memory, buffers }
    }

    fn with<R>(&mut self, f: impl FnOnce(&mut Path, &mut Context<'_>) -> R) -> R {
        let Self { path, mover, cache, clock, .. } = self;
        f(path, &mut Context { mover, cache, clock, burst: BURST })
    }

    /// Receives a frame. It is lost if no buffer is free, or if copies hold too many buffers.
    pub(crate) fn receive(&mut self, now: Time, frame: &[u8]) {
        if !self.path.is_open() {
            return;
        }
        let Some(mut packet) = self.cache.take_chain(HEADROOM, frame.len()) else { return };
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

    /// Returns whether there is work at the current time.
    pub(crate) fn is_busy(&mut self) -> bool {
        self.path.in_flight(&mut self.mover) > 0 || !self.events.is_empty() || self.path.stack.has_ready()
    }

    /// Returns whether all connections are gone.
    pub(crate) fn is_quiet(&self) -> bool {
        self.path.stack.connections() == 0 && self.path.stack.flows() == 0
    }

    /// Checks that nothing is left of the connections.
    pub(crate) fn check_empty(&mut self) {
        assert_eq!(self.path.in_flight(&mut self.mover), 0, "copies in flight");
        assert_eq!(self.mover.in_flight(), 0, "copies in flight");
        let stack = &self.path.stack;
        assert_eq!((stack.connections(), stack.flows()), (0, 0));
        assert_eq!(stack.memory_used(), self.memory, "blocks of FIFOs");
        assert_eq!(self.cache.available(), self.buffers, "packet buffers: {:?}", self.path.stats());
    }
}
