//! A hostile guest and its neighbour on one worker, and the checks after the hostile guest has finished.
#![allow(dead_code, reason = "each test binary and fuzz target uses its own part")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::{Binding, ChannelId, CopyDevice, Mode, Mover};
use offcore_mem::{BURST, Burst, HEADROOM, Hugepages, Pool};
use offcore_ring::{device::Direction, driver};
use offcore_stats::StageClock;
use offcore_vhost::dequeue::Dequeued;
use offcore_vhost::{Dequeue, Enqueue, VringCell};

use crate::arena::{Arena, BUFFERS, RX, TX};
use crate::neighbour::Neighbour;
use offcore_vhost::testing::{Guest, Worker, pattern};

/// Number of packet buffers. It is small, so that a guest can try to exhaust them.
const CHUNKS: usize = 512;
const CHUNK: usize = 2048;
/// A byte that no guest writes. It fills the pool before each case.
const CANARY: u8 = 0xc5;
/// Maximum time to wait for progress.
const DEADLINE: Duration = Duration::from_secs(10);

/// How copies are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// By the core.
    Core,
    /// By a helper core that the test steps.
    Helper,
    /// By an engine that delays, reorders, fails and loses copies.
    Faulty,
    /// One virtqueue uses both of these engines.
    Both,
}

pub(crate) const ENGINES: [Engine; 4] = [Engine::Core, Engine::Helper, Engine::Faulty, Engine::Both];

/// State that is expensive to create and can be reused in every case.
pub(crate) struct Memories {
    pub(crate) arena: Arc<Arena>,
    neighbour: Guest,
    pool: &'static Pool,
    /// The counters of a private clock live as long as the process.
    clock: StageClock,
}

impl Memories {
    pub(crate) fn new() -> Self {
        let pool = Pool::new(CHUNKS, CHUNK, Hugepages::None).unwrap();
        Self {
            arena: Arc::new(Arena::new()),
            neighbour: Neighbour::guest(),
            pool,
            clock: StageClock::private(),
        }
    }
}

/// Configuration of the hostile guest's virtqueues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) engine: Engine,
    pub(crate) features: u64,
    pub(crate) size: u16,
    pub(crate) seed: u64,
}

pub(crate) struct Rig {
    pub(crate) arena: Arc<Arena>,
    pub(crate) setup: Setup,
    pub(crate) worker: Worker,
    /// The cells of the RX and TX virtqueues.
    pub(crate) cells: [Arc<VringCell>; 2],
    pub(crate) enqueue: Enqueue,
    pub(crate) dequeue: Dequeue,
    pub(crate) neighbour: Neighbour,
    pub(crate) stepper: Stepper,
    pub(crate) held: Burst,
    serial: u64,
    pool: &'static Pool,
    /// The last packet from the hostile guest.
    pub(crate) latest: Vec<u8>,
    /// Counters of everything received from it.
    pub(crate) dequeued: Dequeued,
    /// Packets delivered to it.
    pub(crate) enqueued: usize,
}

impl Rig {
    /// Starts both virtqueues of the hostile guest at available entry `base`, with the current content of the memory.
    pub(crate) fn new(memories: Memories, setup: Setup, base: u16) -> Self {
        let Memories { arena, neighbour, pool, clock } = memories;
        let mut worker = Worker { mover: Mover::new(), cache: pool.cache(), clock, burst: BURST };
        let (device, stepper) = CoreDevice::stepped();
        let helper = worker.mover.add_channel(device.open_channel(256).unwrap());
        let faulty = worker.add_faulty(setup.seed);
        let (mode, channels): (Mode, Vec<ChannelId>) = match setup.engine {
            Engine::Core => (Mode::Cpu, vec![]),
            Engine::Helper => (Mode::Offload, vec![helper]),
            Engine::Faulty => (Mode::Offload, vec![faulty]),
            Engine::Both => (Mode::Offload, vec![helper, faulty]),
        };
        let binding = Binding::new(mode, channels);
        let cells = [0, 1].map(|queue| Arc::new(VringCell::new(queue)));
        for cell in &cells {
            cell.publish(|wanted| wanted.binding = binding.clone());
        }
        let enqueue = Enqueue::attach(&cells[0], &mut worker.mover).unwrap();
        let dequeue = Dequeue::attach(&cells[1], &mut worker.mover).unwrap();
        let neighbour = Neighbour::new(neighbour, &mut worker, &binding);
        let (held, dequeued) = (Burst::new(), Dequeued::default());
        let mut rig = Self {
            arena,
            setup,
            worker,
            cells,
            enqueue,
            dequeue,
            neighbour,
            stepper,
            held,
            serial: 0,
            pool,
            latest: Vec::new(),
            dequeued,
            enqueued: 0,
        };
        rig.forget_everything();
        rig.start(0, base, true);
        rig.start(1, base, true);
        rig
    }

    /// Starts the RX (0) or TX (1) virtqueue.
    pub(crate) fn start(&self, queue: usize, base: u16, enabled: bool) {
        let Setup { size, features, .. } = self.setup;
        let mut config = self.arena.config([RX, TX][queue], size, features, base);
        config.enabled = enabled;
        self.cells[queue].publish(|wanted| wanted.vring = Some(Arc::new(config)));
    }

    pub(crate) fn stop(&self, queue: usize) {
        self.cells[queue].publish(|wanted| wanted.vring = None);
    }

    /// Receives packets from the hostile guest, and checks that every byte was written by a guest.
    pub(crate) fn take(&mut self) {
        let broken = self.cells[1].wait(Duration::ZERO).is_ok_and(|report| report.broken.is_some());
        let before = self.dequeue.in_flight(&mut self.worker.mover);
        let mut burst = Burst::new();
        let dequeued = self.dequeue.try_dequeue(&mut self.worker.ctx(), &mut burst);
        assert_eq!(dequeued.packets, burst.len());
        let after = self.dequeue.in_flight(&mut self.worker.mover);
        assert!(!broken || after <= before, "a broken queue takes nothing");
        for mut packet in burst.drain(..) {
            assert!((14..=CHUNK - HEADROOM - 12).contains(&packet.len()));
            let bytes = packet.bytes_mut();
            assert!(
                !bytes.windows(16).any(|run| run == [CANARY; 16]),
                "a packet has bytes that were not copied"
            );
            self.latest.clear();
            self.latest.extend_from_slice(bytes);
            bytes.fill(CANARY);
            self.worker.cache.free(packet);
        }
        self.dequeued.packets += dequeued.packets;
        self.dequeued.malformed += dequeued.malformed;
        self.dequeued.too_big += dequeued.too_big;
    }

    /// Sends packets of these lengths to the hostile guest, and publishes completed ones.
    pub(crate) fn give(&mut self, lengths: &[usize]) {
        for &len in lengths {
            if self.held.is_full() {
                break;
            }
            let Some(mut packet) = self.worker.cache.take() else { break };
            packet.set_range(self.pool, HEADROOM, len);
            packet.bytes_mut().copy_from_slice(&pattern(self.serial, len));
            self.serial += 1;
            self.held.push(packet);
        }
        let before = self.held.len();
        let mut ctx = self.worker.ctx();
        let submitted = self.enqueue.submit(&mut ctx, &mut self.held);
        assert_eq!(submitted.packets + submitted.too_big + self.held.len(), before, "no packet is lost");
        self.enqueue.poll_completed(&mut ctx);
        self.enqueued += submitted.packets;
    }

    pub(crate) fn poll(&mut self) {
        let ctx = self.worker.ctx();
        ctx.mover.poll(ctx.clock);
    }

    /// One round of the worker, with all guests.
    pub(crate) fn turn(&mut self, lengths: &[usize]) {
        self.neighbour.send(2);
        self.poll();
        self.take();
        self.give(lengths);
        self.neighbour.turn(&mut self.worker);
    }

    fn in_flight(&mut self) -> usize {
        let mover = &mut self.worker.mover;
        self.enqueue.in_flight(mover) + self.dequeue.in_flight(mover)
    }

    fn is_stopped(&mut self) -> bool {
        self.in_flight() == 0 && self.cells.iter().all(|cell| cell.wait(Duration::ZERO).is_ok())
    }

    /// Runs rounds until `done` is true.
    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            self.stepper.step();
            self.poll();
            self.take();
            self.give(&[]);
            self.neighbour.turn(&mut self.worker);
            if done(self) {
                return;
            }
            assert!(Instant::now() < deadline, "no progress: {what} ({:?})", self.setup);
        }
    }

    /// Stops the hostile guest, reboots it as an honest guest, and checks that everything works and that all buffers
    /// are returned.
    pub(crate) fn finish(mut self) -> Memories {
        self.stop(0);
        self.stop(1);
        self.until("the neighbour's packets, and the hostile guest's stop", |rig| {
            rig.neighbour.is_done() && rig.is_stopped()
        });
        self.worker.cache.free_all(self.held.drain(..));
        self.reboot();
        self.neighbour.send(5);
        self.until("the neighbour after the reboot", |rig| rig.neighbour.is_done() && rig.in_flight() == 0);
        self.stop(0);
        self.stop(1);
        self.until("the last stop", Self::is_stopped);
        self.worker.cache.free_all(self.held.drain(..));
        self.check_pool();
        assert_eq!(self.in_flight(), 0);
        let Self { arena, neighbour, pool, worker, .. } = self;
        Memories { arena, neighbour: neighbour.into_guest(), pool, clock: worker.clock }
    }

    /// Creates new rings, and sends one packet in each direction.
    fn reboot(&mut self) {
        // A front end whose memory has vanished reconnects with other memory.
        if self.arena.memory.vanished() {
            self.arena = Arc::new(Arena::new());
        }
        self.arena.clear();
        let Setup { size, .. } = self.setup;
        let mut rx = driver::RingDriver::new(self.arena.layout(RX, size), false);
        let mut tx = driver::RingDriver::new(self.arena.layout(TX, size), false);
        self.start(0, 0, true);
        self.start(1, 0, true);
        rx.add(BUFFERS, 2048, Direction::Writable, ()).unwrap();
        rx.publish();
        let sent = pattern(1 << 20, 500);
        self.arena.write(BUFFERS + 4096 + 12, &sent);
        tx.add(BUFFERS + 4096, 512, Direction::Readable, ()).unwrap();
        tx.publish();
        let due = pattern(self.serial, 700);
        self.give(&[700]);
        self.until("the rebooted guest", |rig| {
            rig.arena.used_idx(RX) == 1 && rig.arena.used_idx(TX) == 1 && rig.in_flight() == 0
        });
        assert_eq!(self.latest, sent);
        assert_eq!(self.arena.used(RX, size, 0), (0, 712));
        assert_eq!(self.arena.read(BUFFERS + 12, 700), due);
        assert_eq!(self.cells.each_ref().map(|cell| cell.report().broken), [None, None]);
    }

    /// Checks that every packet buffer is returned, and that nothing was written outside of packet data.
    fn check_pool(&mut self) {
        let all: Vec<_> = std::iter::from_fn(|| self.worker.cache.take()).collect();
        assert_eq!(all.len(), CHUNKS, "packet buffers are missing");
        for chunk in 0..CHUNKS {
            // SAFETY: all chunks were taken, so this function owns the whole memory of the pool.
            let headroom =
                unsafe { self.pool.memory().0.add(chunk * CHUNK).cast::<[u8; HEADROOM - 12]>().read() };
            assert!(
                headroom.iter().all(|&byte| byte == CANARY),
                "something wrote before chunk {chunk}'s packet"
            );
        }
        self.worker.cache.free_all(all);
    }

    /// Fills all packet buffers with canaries. All of them must be free.
    fn forget_everything(&mut self) {
        for chunk in 0..CHUNKS {
            // SAFETY: the address is inside the pool's memory, and no chunk is in use.
            unsafe { self.pool.memory().0.add(chunk * CHUNK).write_bytes(CANARY, CHUNK) };
        }
        const { assert!(BURST < CHUNKS) };
    }
}
