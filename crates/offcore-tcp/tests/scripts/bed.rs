//! A stack with its copies in virtual time, between a scripted application and a scripted link.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::OnceLock;

use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::cpu::CpuChannel;
use offcore_dma::fault::{Faults, FaultyChannel};
use offcore_dma::{Binding, ChannelId, Context, CopyDevice, Mode, Mover};
use offcore_mem::{BURST, Burst, HEADROOM, Hugepages, Pool, PoolCache};
use offcore_stats::StageClock;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::path::Path;
use offcore_tcp::proto::{Algorithm, Config, Event, IfaceConfig, Out, Prefix, Stack};

use crate::frames::{self, OURS};
use crate::language::{Engine, Setup};

/// Time at which scripts begin. IPv6 addresses are valid by then. It is a whole number of milliseconds because
/// timestamps have this resolution.
pub(crate) const BEGINNING: Time = Time::from_secs(2);
/// Maximum number of copies in flight per engine.
const RING: usize = 1024;
/// Number of packets of all scripts that run at the same time, and the size of each in bytes.
const PACKETS: usize = 8192;
const PACKET_SIZE: usize = 16384;

/// A stack, its path, and engines that are stepped manually.
#[derive(Debug)]
pub(crate) struct Bed {
    path: Path,
    mover: Mover,
    cache: PoolCache,
    clock: StageClock,
    stepper: Stepper,
    good: ChannelId,
    faulty: ChannelId,
    holds: bool,
    theirs: IpAddr,
    deadline: Option<Time>,
    pub(crate) now: Time,
    /// Sent frames with their times: `sent` has the unchecked ones, `trace` has all.
    pub(crate) sent: VecDeque<(Time, Vec<u8>)>,
    pub(crate) trace: Vec<(Time, Vec<u8>)>,
    pub(crate) events: Vec<Event>,
}

fn pool() -> &'static Pool {
    static POOL: OnceLock<&Pool> = OnceLock::new();
    POOL.get_or_init(|| Pool::new(PACKETS, PACKET_SIZE, Hugepages::None).unwrap())
}

/// Returns the addresses of the host under test and of its peer.
pub(crate) fn addresses(setup: &Setup) -> (IpAddr, IpAddr) {
    if setup.ipv6 {
        ("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap())
    } else {
        ([10, 0, 0, 1].into(), [10, 0, 0, 2].into())
    }
}

impl Bed {
    /// Creates a bed whose copies are made by an engine, or else by the core at once.
    pub(crate) fn new(setup: &Setup, by_engine: bool) -> Self {
        let (ours, theirs) = addresses(setup);
        let default = Config::default();
        let config = Config {
            secret: [7; 16],
            connections: 64,
            memory: 16 << 20,
            receive_window: setup.receive_window.unwrap_or(default.receive_window),
            algorithm: if setup.newreno { Algorithm::NewReno } else { Algorithm::Cubic },
            ecn: !setup.no_ecn,
            ..default
        };
        let mut stack = Stack::new(config).unwrap();
        let mut out = Out::default();
        let iface = IfaceConfig {
            mac: OURS,
            mtu: setup.mtu.unwrap_or(1500),
            addresses: vec![Prefix { address: ours, len: if setup.ipv6 { 64 } else { 24 } }],
            routes: Vec::new(),
        };
        stack.add_iface(Time::from_micros(1), &iface, &mut out);
        let mut mover = Mover::new();
        // Time is virtual: a copy that an engine holds back must not count as lost.
        mover.set_lost_after(u64::MAX);
        let (device, stepper) = CoreDevice::stepped();
        let good = mover.add_channel(device.open_channel(RING).unwrap());
        let faults = Faults { error: 1000, ..Faults::default() };
        let faulty = FaultyChannel::new(Box::new(CpuChannel::new(RING).unwrap()), faults);
        let faulty = mover.add_channel(Box::new(faulty));
        let path = Path::new(stack, out, &mut mover, pool());
        let cache = pool().cache();
        let clock = StageClock::private();
        let (sent, events) = (VecDeque::new(), Vec::new());
        let mut bed = Self {
            path,
            mover,
            cache,
            clock,
            stepper,
            good,
            faulty,
            holds: false,
            theirs,
            deadline: None,
            now: Time::from_micros(1),
            sent,
            trace: Vec::new(),
            events,
        };
        if by_engine {
            bed.engine(Engine::Release);
        }
        bed.settle();
        bed.run_until(BEGINNING, false);
        bed
    }

    /// Sets how engines treat copies from now on.
    pub(crate) fn engine(&mut self, engine: Engine) {
        self.holds = engine == Engine::Hold;
        let channel = if engine == Engine::Fail { self.faulty } else { self.good };
        let binding = Binding::new(Mode::Offload, vec![channel]);
        self.path.bind(&mut self.mover, &binding, &binding).unwrap();
    }

    /// Returns the arguments for an application's calls of the stack.
    pub(crate) fn call(&mut self) -> (&mut Stack, &mut Out, Time) {
        let (stack, out) = self.path.call();
        (stack, out, self.now)
    }

    pub(crate) fn stack(&self) -> &Stack {
        &self.path.stack
    }

    /// Receives a frame.
    pub(crate) fn receive(&mut self, frame: &[u8]) {
        let mut packet = self.cache.take_sized(HEADROOM, frame.len()).unwrap();
        packet.bytes_mut().copy_from_slice(frame);
        let mut burst = Burst::new();
        burst.push(packet);
        let Self { path, mover, cache, clock, .. } = self;
        let mut ctx = Context { mover, cache, clock, burst: BURST };
        path.receive(&mut ctx, self.now, 0, &mut burst);
    }

    /// Runs until nothing more can be done at the current time.
    pub(crate) fn settle(&mut self) {
        let mut quiet = 0;
        let mut before = usize::MAX;
        while quiet < 2 {
            if !self.holds {
                self.stepper.step();
            }
            self.mover.poll(&mut self.clock);
            let Self { path, mover, cache, clock, .. } = self;
            let mut ctx = Context { mover, cache, clock, burst: BURST };
            path.turn(&mut ctx, self.now, BURST);
            self.deadline = path.stack.deadline(self.now);
            path.take_events(&mut self.events);
            let sent = self.collect();
            let in_flight = self.path.in_flight(&mut self.mover);
            let busy = sent > 0 || in_flight != before || self.path.stack.has_ready();
            quiet = if busy { 0 } else { quiet + 1 };
            before = in_flight;
        }
    }

    /// Takes the sent frames, and answers ARP requests and neighbour solicitations.
    fn collect(&mut self) -> usize {
        let packets: Vec<_> = self.path.to_send(0).drain(..).collect();
        let count = packets.len();
        for packet in packets {
            let frame = packet.bytes().to_vec();
            self.cache.free(packet);
            match frames::neighbour(&frame, self.theirs) {
                None => {
                    self.trace.push((self.now, frame.clone()));
                    self.sent.push_back((self.now, frame));
                }
                Some(None) => {}
                Some(Some(answer)) => self.receive(&answer),
            }
        }
        count
    }

    /// Advances the time to `end`, or until something is sent if `or_sent` is set.
    pub(crate) fn run_until(&mut self, end: Time, or_sent: bool) {
        while !or_sent || self.sent.is_empty() {
            match self.deadline.filter(|deadline| *deadline <= end) {
                Some(deadline) => self.now = deadline.max(self.now + Micros::new(1)).min(end.max(self.now)),
                None => {
                    self.now = end.max(self.now);
                    return self.settle();
                }
            }
            let before = self.now;
            self.settle();
            if before == end && self.deadline.is_some_and(|deadline| deadline <= end) {
                return;
            }
        }
    }
}
