//! A back end that writes arbitrary data into the rings and the packets' headers and returns arbitrary chains, tested
//! against the project's driver. In all cases, received packets are valid, and at the end every packet buffer is back
//! in the pool, once.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offcore_dma::{Binding, Mover};
use offcore_mem::testing::TempDir;
use offcore_mem::{BURST, Burst, HEADROOM, Hugepages, Packet, Pool, PoolCache};
use offcore_port::spec::PortSpec;
use offcore_port::virtio_user::VirtioUserPort;
use offcore_port::{Context, Port, QueueSetup, RxQueue, TxQueue};
use offcore_ring::device::{Buffer, Chain, DeviceQueue, Direction, RingDevice};
use offcore_ring::{Areas, with_queue};
use offcore_stats::StageClock;
use offcore_stats::page::StatsPage;
use offcore_vhost::backend::{Backend, BackendConfig};
use offcore_vhost::cell::VringConfig;
use offcore_vhost::features::is_packed;
use offcore_vhost::frontend::ring_areas;
use offcore_wire::virtio_net::NetHeader;

use crate::script::Script;

const CHUNKS: usize = 1024;
const SIZE: u16 = 64;
const MAX_STEPS: usize = 200;

/// Options of the port.
const OPTIONS: [&str; 6] =
    ["", ",packed", ",mrg=off", ",packed,mrg=off,mtu=4000", ",offloads=off", ",packed,event_idx=off"];

/// State that is kept from script to script.
struct Kept {
    pool: &'static Pool,
    clock: StageClock,
    dir: TempDir,
    backend: Backend,
}

thread_local! {
    static KEPT: RefCell<Option<Kept>> = const { RefCell::new(None) };
}

/// The outcome of a script.
#[derive(Clone, Copy, Debug, Default)]
#[allow(dead_code, reason = "a fuzz target looks at none of it")]
pub(crate) struct Outcome {
    pub(crate) received: u64,
    /// Invalid packets from the back end.
    pub(crate) dropped: u64,
    pub(crate) sent: u64,
    /// Virtqueues that were found to be broken.
    pub(crate) broken: usize,
}

/// Runs a script and adds its results to `outcome`.
///
/// # Panics
/// If the back end has broken an invariant.
pub(crate) fn play(script: &[u8], outcome: &mut Outcome) {
    let mut kept = KEPT.take().unwrap_or_else(|| {
        let dir = TempDir::new();
        let backend = Backend::start(BackendConfig::new(dir.file("s")), Box::new(())).unwrap();
        let pool = Pool::new(CHUNKS, 2048, Hugepages::None).unwrap();
        Kept { pool, clock: StageClock::private(), dir, backend }
    });
    let mut script = Script(script);
    let options = OPTIONS[script.below(OPTIONS.len())];
    let mut rig = Rig::new(&mut kept, options);
    for _ in 0..MAX_STEPS {
        if script.0.is_empty() {
            break;
        }
        rig.step(&mut script);
    }
    rig.finish(outcome);
    KEPT.set(Some(kept));
}

/// A connected port, its queues' worker state, and the device sides of its virtqueues.
struct Rig<'a> {
    port: VirtioUserPort,
    rx: Box<dyn RxQueue>,
    tx: Box<dyn TxQueue>,
    cache: PoolCache,
    mover: Mover,
    clock: &'a mut StageClock,
    /// The devices of the receive queue and the transmit queue.
    devices: [Device; 2],
}

impl<'a> Rig<'a> {
    fn new(kept: &'a mut Kept, options: &str) -> Self {
        let text = format!("virtio-user:{},queue_size={SIZE}{options}", kept.dir.file("s").display());
        let PortSpec::VirtioUser(spec) = text.parse().unwrap() else { panic!("{text}") };
        let mut port = VirtioUserPort::open(&spec, kept.pool).unwrap_or_else(|e| panic!("{e}"));
        until("the port is connected", || port.is_connected());
        let (mut mover, stats) = (Mover::new(), StatsPage::new(1 << 14).unwrap());
        let rx = port.rx_queue(0, setup(&mut mover, &stats)).unwrap();
        let tx = port.tx_queue(0, setup(&mut mover, &stats)).unwrap();
        let devices = [0, 1].map(|index| Device::new(&kept.backend, index, kept.pool));
        let (cache, clock) = (kept.pool.cache(), &mut kept.clock);
        Self { port, rx, tx, cache, mover, clock, devices }
    }

    fn step(&mut self, script: &mut Script<'_>) {
        match script.below(16) {
            0..3 => self.receive(script),
            3 | 4 => self.send(script),
            5 => {
                self.rx.arm();
                self.rx.disarm();
            }
            // Buffers of the receive queue are filled, and buffers of the transmit queue are returned.
            6..9 => (0..1 + script.below(20)).for_each(|_| self.devices[0].fill(script, false)),
            9 => self.devices[0].fill(script, true),
            10 | 11 => (0..1 + script.below(20)).for_each(|_| self.devices[1].give_back(script)),
            12 | 13 => {
                let device = script.below(2);
                self.devices[device].forge(script);
            }
            14 => {
                let device = script.below(2);
                self.devices[device].scribble(script);
            }
            _ => {
                let device = script.below(2);
                self.devices[device].scribble_in_packets(script);
            }
        }
    }

    fn receive(&mut self, script: &mut Script<'_>) {
        let Self { rx, cache, mover, clock, .. } = self;
        let mut ctx = Context { mover, cache, clock, burst: 1 + script.below(BURST) };
        let mut burst = Burst::new();
        rx.rx(&mut ctx, &mut burst);
        let pool = ctx.cache.pool();
        for packet in &burst {
            let len = pool.total_len(packet);
            assert!((14..=65_557).contains(&len), "a packet of {len} bytes");
            if packet.has_offload() {
                let header = NetHeader::from_bytes(packet.headroom_bytes(12).first_chunk().unwrap());
                assert!(header.check(len).is_ok(), "{header:?} of {len} bytes");
            }
        }
        ctx.cache.free_all(burst);
    }

    fn send(&mut self, script: &mut Script<'_>) {
        let Self { tx, cache, mover, clock, .. } = self;
        let mut ctx = Context { mover, cache, clock, burst: BURST };
        let mut burst = Burst::new();
        for _ in 0..1 + script.below(BURST) {
            let len = 14 + if script.u8() < 16 { script.below(20_000) } else { script.below(1500) };
            let Some(packet) = ctx.cache.take_chain(HEADROOM, len) else { break };
            burst.push(packet);
        }
        tx.tx(&mut ctx, &mut burst);
        tx.poll(&mut ctx);
        ctx.cache.free_all(burst);
    }

    fn finish(self, outcome: &mut Outcome) {
        let Self { port, mut rx, mut tx, mut cache, mut mover, clock, .. } = self;
        let mut ctx = Context { mover: &mut mover, cache: &mut cache, clock, burst: BURST };
        let mut burst = Burst::new();
        rx.drain(&mut ctx, &mut burst);
        tx.stop(&mut ctx);
        ctx.cache.free_all(burst);
        let (received, sent) = (rx.counters(), tx.counters());
        outcome.received += received.packets();
        outcome.dropped += received.dropped_total();
        outcome.sent += sent.packets();
        outcome.broken += port.broken().len();
        drop((rx, tx, port));
        let all: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
        assert_eq!(all.len(), CHUNKS, "packet buffers are missing");
        let places: HashSet<_> = all.iter().map(|packet| packet.data().as_ptr() as usize / 2048).collect();
        assert_eq!(places.len(), CHUNKS, "packet buffers were given out twice");
        cache.free_all(all);
    }
}

/// The device side of a virtqueue.
struct Device {
    config: Arc<VringConfig>,
    queue: RingDevice,
    direction: Direction,
    packed: bool,
    areas: Areas,
}

impl Device {
    /// The device side of virtqueue `index`, once the driver has started it.
    fn new(backend: &Backend, index: u8, pool: &Pool) -> Self {
        let mut found = None;
        until("a virtqueue starts", || {
            found = backend.cells()[usize::from(index)].wanted().vring.filter(|vring| vring.enabled);
            found.is_some()
        });
        let config = found.unwrap();
        let queue = RingDevice::new(config.layout.clone(), config.base, false, false).unwrap();
        let packed = is_packed(config.features);
        let packets = pool.memory().0.as_ptr() as u64;
        let rings = config.memory.regions().iter().find(|region| region.user() != packets);
        let areas = ring_areas(rings.expect("a region for the rings").user(), index, SIZE, packed);
        let direction = if index == 0 { Direction::Writable } else { Direction::Readable };
        Self { config, queue, direction, packed, areas }
    }

    /// Returns the next chain that the driver has made available.
    fn take(&mut self) -> Option<(Chain, Vec<Buffer>)> {
        let (memory, direction) = (&self.config.memory, self.direction);
        with_queue!(&mut self.queue, queue => {
            if queue.look(1).ok()? == 0 {
                return None;
            }
            let mut buffers = Vec::new();
            let chain = queue.walk(0, memory, direction, &mut 64, |buffer| buffers.push(buffer)).ok()?;
            queue.consume(chain.entries);
            Some((chain, buffers))
        })
    }

    fn put_back(&mut self, chain: Chain, written: u32) {
        with_queue!(&mut self.queue, queue => {
            queue.push_used(chain, written);
            queue.publish();
        });
    }

    /// Gives the driver a packet of one buffer that is usually valid. With `wild`, its header and length are arbitrary.
    fn fill(&mut self, script: &mut Script<'_>, wild: bool) {
        let Some((chain, buffers)) = self.take() else { return };
        let mut len = 12 + 14 + u32::from(script.u8()) * 7;
        let mut header = NetHeader { num_buffers: 1, ..NetHeader::default() }.to_bytes();
        if wild {
            header[script.below(12)] = script.u8();
            header[script.below(12)] = script.u8();
            if script.u8() < 64 {
                len = u32::from_le_bytes(script.bytes());
            }
        } else if script.u8() < 16 {
            // A packet of several buffers; the next buffers contain the rest of it.
            header[10] = 2 + script.u8() % 4;
        }
        let Some(first) = buffers.first().filter(|first| first.len >= 12) else { return };
        // SAFETY: `walk` found the buffer in guest memory, which the configuration keeps mapped; no reference to it is
        // live.
        unsafe { first.addr.as_ptr().copy_from_nonoverlapping(header.as_ptr(), 12) };
        self.put_back(chain, len);
    }

    fn give_back(&mut self, script: &mut Script<'_>) {
        let Some((chain, _)) = self.take() else { return };
        let written = if script.u8() < 240 { 0 } else { u32::from_le_bytes(script.bytes()) };
        self.put_back(chain, written);
    }

    /// Returns a chain that the device does not have or has already returned.
    fn forge(&mut self, script: &mut Script<'_>) {
        let wild = script.u8() < 64;
        let id = if wild { script.u16() } else { script.u16() % SIZE };
        let len = u32::from(script.u16());
        let Areas { descriptors, device: used, .. } = self.areas;
        if self.packed {
            let slot = u64::from(script.u8()) % u64::from(SIZE);
            let flags = [0x8080, 0, 0x8000, 0x0080, 0x8082, 2, 1, 0xffff][script.below(8)];
            let rest = [&len.to_le_bytes()[..], &id.to_le_bytes(), &u16::to_le_bytes(flags)].concat();
            self.write(descriptors + slot * 16 + 8, &rest);
            return;
        }
        let index = self.read_u16(used + 2);
        let at = used + 4 + u64::from(index % SIZE) * 8;
        self.write(at, &[&u32::from(id).to_le_bytes()[..], &len.to_le_bytes()].concat());
        let more = if wild { script.u16() } else { 1 };
        self.write(used + 2, &index.wrapping_add(more).to_le_bytes());
    }

    /// Writes to an arbitrary place in the virtqueue.
    fn scribble(&mut self, script: &mut Script<'_>) {
        let Areas { descriptors: first, device: last, .. } = self.areas;
        let at = first + u64::from(script.u16()) % (last + 16 - first);
        self.write(at, &script.bytes::<2>());
    }

    /// Writes to an arbitrary place in the packet buffers, including buffers that the device does not have.
    fn scribble_in_packets(&mut self, script: &mut Script<'_>) {
        let regions = self.config.memory.regions();
        let packets = regions.iter().max_by_key(|region| region.len()).unwrap();
        let chunk = u64::from(script.u16()) * 2048 % packets.len();
        self.write(packets.user() + chunk + u64::from(script.u8()) * 2, &script.bytes::<4>());
    }

    /// Writes to an address of the front end.
    fn write(&self, at: u64, bytes: &[u8]) {
        let Some(to) = self.config.memory.translate_user(at, bytes.len()) else { return };
        // SAFETY: the memory is mapped, and the configuration keeps it mapped; no reference to it is live.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn read_u16(&self, at: u64) -> u16 {
        let from = self.config.memory.translate_user(at, 2).unwrap();
        // SAFETY: as in `write`.
        u16::from_le_bytes(unsafe { from.cast::<[u8; 2]>().read() })
    }
}

fn setup<'a>(mover: &'a mut Mover, stats: &'a StatsPage) -> QueueSetup<'a> {
    QueueSetup { mover, stats, binding: Binding::core(), port: "port0" }
}

/// Waits until `done` returns `true`.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}: not within ten seconds");
        std::thread::yield_now();
    }
}
