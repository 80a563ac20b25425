//! Two hostile guests and the path between them. Nothing may panic, everything must be returned, and guest memory may
//! be written only where its guest allows it.
//!
//! A script of bytes defines their actions and the worker's. Every byte string is valid, and most generated
//! data is almost valid.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::{Binding, CopyDevice, Mode, Mover};
use offcore_mem::{BURST, Burst, Hugepages, Pool};
use offcore_ring::split::{VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use offcore_stats::StageClock;
use offcore_vhost::features::*;
use offcore_vhost::pair::Next;
use offcore_vhost::testing::*;
use offcore_vhost::{Dequeue, Enqueue, Pair, VringCell, VringConfig};

use crate::bytes::Script;
use crate::neighbour::Neighbour;

const CHUNKS: usize = 256;
/// Longer scripts are cut off, so that every case ends soon.
const STEPS: usize = 600;

thread_local! {
    /// State of the last successful case, for reuse.
    static KEPT: RefCell<Option<Kept>> = const { RefCell::new(None) };
}

/// State that is expensive to create and can be reused in every case. Pools and the counters of a private clock live as
/// long as the process.
struct Kept {
    pool: &'static Pool,
    clock: StageClock,
    neighbour: Guest,
}

impl Kept {
    fn new() -> Self {
        let pool = Pool::new(CHUNKS, 2048, Hugepages::None).unwrap();
        Self { pool, clock: StageClock::private(), neighbour: Neighbour::guest() }
    }
}

impl Script<'_> {
    /// Returns a number below `n`.
    fn pick(&mut self, n: u64) -> u64 {
        self.below(n as usize) as u64
    }
}

/// A virtqueue of a hostile guest.
struct Side {
    guest: Guest,
    /// Offsets of the parts of the RX or TX virtqueue.
    parts: [u64; 3],
    size: u16,
    writes: bool,
    cell: Arc<VringCell>,
    /// Next available index (split), or position modulo twice the size (packed).
    next: u32,
    features: u64,
}

impl Side {
    /// Creates a receiving side if `writes` is true, and a transmitting side otherwise.
    fn new(dice: &mut Script<'_>, writes: bool) -> Self {
        let (packed, size) = (dice.pick(2) == 0, 8 << dice.pick(3));
        let guest = Guest::with_rings(size, packed);
        let parts = if writes { [0, 0x8_0000, 0xa_0000] } else { [0x4_0000, 0x9_0000, 0xc_0000] };
        let mut features = VIRTIO_F_VERSION_1 | VIRTIO_F_INDIRECT_DESC | VIRTIO_F_EVENT_IDX;
        for bit in [
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_NET_F_CSUM,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_HOST_TSO4,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_HOST_USO,
            VIRTIO_NET_F_GUEST_USO4 | VIRTIO_NET_F_GUEST_USO6,
        ] {
            if dice.pick(3) > 0 {
                features |= bit;
            }
        }
        let cell = Arc::new(VringCell::new(if writes { 0 } else { 1 }));
        Self { guest, parts, size, writes, cell, next: 0, features }
    }

    fn start(&mut self, binding: &Binding, enabled: bool) {
        for part in self.parts {
            self.guest.write(GUEST + part, &[0; 0x2000]);
        }
        self.next = 0;
        let layout = if self.writes { self.guest.layout.clone() } else { self.guest.tx_layout.clone() };
        let config = VringConfig { layout, enabled, ..self.guest.config(self.features) };
        self.cell.publish(|wanted| {
            wanted.vring = Some(Arc::new(config));
            wanted.binding = binding.clone();
        });
    }

    fn length(&self, dice: &mut Script<'_>) -> u32 {
        match dice.pick(12) {
            0 => dice.pick(30) as u32,
            1 => 64 + dice.pick(3) as u32 - 1,
            2 => 65535 + dice.pick(64) as u32,
            3 if dice.pick(8) == 0 => dice.u64() as u32,
            _ => dice.pick(2000) as u32 + if self.writes { 60 } else { 14 },
        }
    }

    fn address(&self, dice: &mut Script<'_>) -> u64 {
        match dice.pick(1500) {
            0 => dice.u64(),
            1 => GUEST + MEMORY as u64 - dice.pick(100),
            _ => GUEST + BUFFERS + dice.pick(128) * 65536 + dice.pick(70),
        }
    }

    fn flags(&self, dice: &mut Script<'_>) -> u16 {
        let right = if self.writes { VIRTQ_DESC_F_WRITE } else { 0 };
        if dice.pick(1500) == 0 { dice.u64() as u16 & 7 } else { right }
    }

    fn entry(&self, address: u64, len: u32, tail: u32) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..].copy_from_slice(&tail.to_le_bytes());
        bytes
    }

    /// Makes a chain available, which is valid in most cases.
    fn offer(&mut self, dice: &mut Script<'_>) {
        let parts = 1 + if dice.pick(3) == 0 { dice.pick(6) as u16 } else { 0 };
        let indirect = dice.pick(8) == 0;
        let size = u32::from(self.size);
        if indirect {
            let table = GUEST + BUFFERS + 140 * 65536 - 4096 + dice.pick(8);
            let most = if dice.pick(20) == 0 { 80 } else { 8 };
            let entries = 1 + dice.pick(most) as u16;
            for i in 0..entries {
                let (address, len) = (self.address(dice), self.length(dice) / 4 + 20);
                let next = if i + 1 < entries { VIRTQ_DESC_F_NEXT } else { 0 };
                let flags = self.flags(dice) | if self.guest.packed() { 0 } else { next };
                let tail = if self.guest.packed() {
                    u32::from(flags) << 16
                } else {
                    u32::from(flags) | u32::from(i + 1) << 16
                };
                self.guest.write(table + u64::from(i) * 16, &self.entry(address, len, tail));
            }
            self.chain(dice, &[(table, u32::from(entries) * 16, VIRTQ_DESC_F_INDIRECT)]);
        } else if u32::from(parts) <= size {
            let buffers: Vec<_> = (0..parts)
                .map(|part| {
                    let header = !self.writes && parts > 1 && part == 0 && dice.pick(10) > 0;
                    let len = if header { 12 } else { self.length(dice) };
                    let flags = self.flags(dice);
                    (self.address(dice), len, flags)
                })
                .collect();
            self.chain(dice, &buffers);
        }
        if !self.writes {
            self.header(dice);
        }
    }

    /// Writes a header to a place where a packet may begin.
    fn header(&self, dice: &mut Script<'_>) {
        let at = self.address(dice);
        if at > GUEST + BUFFERS && at < GUEST + MEMORY as u64 - 200 {
            let ip = [8u8, 0, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6];
            let header = [
                dice.pick(2) as u8,
                [0, 0, 1, 4, 0x81, 9][dice.pick(6) as usize],
                54,
                0,
                100,
                2,
                34,
                0,
                16,
                0,
                0,
                0,
            ];
            self.guest.write(at, &header);
            self.guest.write(at + 24, &ip);
        }
    }

    fn chain(&mut self, dice: &mut Script<'_>, buffers: &[(u64, u32, u16)]) {
        let size = u32::from(self.size);
        let count = buffers.len();
        if self.guest.packed() {
            // Written from last to first, as drivers do it.
            for (i, &(address, len, flags)) in buffers.iter().enumerate().rev() {
                let at = (self.next + i as u32) % (2 * size);
                let (index, wrap) = (at % size, at < size);
                let state: u16 = if wrap { 1 << 7 } else { 1 << 15 };
                let more = if i + 1 < count { VIRTQ_DESC_F_NEXT } else { 0 };
                let tail = u32::from(at as u16) | u32::from(flags | more | state) << 16;
                let at = GUEST + self.parts[0] + u64::from(index) * 16;
                // In most cases, does not overwrite a descriptor that belongs to the device.
                let found = self.guest.read(at + 14, 2);
                let found = u16::from_le_bytes([found[0], found[1]]);
                let (avail, used) = (found & 1 << 7 != 0, found & 1 << 15 != 0);
                if avail != used && dice.pick(500) > 0 {
                    return;
                }
                self.guest.write(at, &self.entry(address, len, tail));
            }
            self.next = (self.next + count as u32) % (2 * size);
        } else {
            let used = self.guest.read(GUEST + self.parts[2] + 2, 2);
            let used = u16::from_le_bytes([used[0], used[1]]);
            let out = (self.next as u16).wrapping_sub(used);
            if out >= self.size / 8 && dice.pick(500) > 0 {
                return;
            }
            // Each entry has eight descriptors.
            let head = (self.next as u16 % (self.size / 8)) * 8;
            for (i, &(address, len, flags)) in buffers.iter().enumerate() {
                let more = if i + 1 < count { VIRTQ_DESC_F_NEXT } else { 0 };
                let next = if dice.pick(1500) == 0 { dice.u64() as u16 } else { head + i as u16 + 1 };
                let tail = u32::from(flags | more) | u32::from(next) << 16;
                let at = GUEST + self.parts[0] + u64::from(head + i as u16) * 16;
                self.guest.write(at, &self.entry(address, len, tail));
            }
            let avail = GUEST + self.parts[1];
            let head = if dice.pick(500) == 0 { dice.u64() as u16 } else { head };
            let slot = self.next as u16 % self.size;
            self.guest.write(avail + 4 + u64::from(slot) * 2, &head.to_le_bytes());
            self.next = u32::from((self.next as u16).wrapping_add(1));
            let shown = if dice.pick(1000) == 0 { dice.u64() as u16 } else { self.next as u16 };
            self.guest.write(avail + 2, &shown.to_le_bytes());
        }
    }
}

/// The path from one guest to the other, as used by a worker.
struct Forwarding<'a> {
    dequeue: Dequeue,
    enqueue: Enqueue,
    pair: Pair,
    neighbour: Neighbour,
    /// Packets that used one copy, and packets that used the ordinary path.
    ways: &'a mut [usize; 2],
}

impl Forwarding<'_> {
    fn round(&mut self, worker: &mut Worker, burst_size: usize) {
        self.neighbour.send(2);
        self.neighbour.turn(worker);
        let Self { dequeue, enqueue, pair, ways, .. } = self;
        let mut ctx = worker.ctx();
        ctx.burst = burst_size;
        ctx.mover.poll(ctx.clock);
        let mut burst = Burst::new();
        let forwarded = pair.forward(&mut ctx, dequeue, enqueue, |frame| frame[..12].rotate_left(6));
        ways[0] += forwarded.packets;
        match forwarded.next {
            Next::Nothing => return,
            Next::Ordinary => drop(dequeue.try_dequeue(&mut ctx, &mut burst)),
            Next::Finish => drop(dequeue.drain(&mut ctx, &mut burst)),
        }
        ways[1] += burst.len();
        enqueue.submit(&mut ctx, &mut burst);
        ctx.cache.free_all(burst.drain(..));
        enqueue.poll_completed(&mut ctx);
    }

    /// Takes no new packets. Returns the number of packets in flight.
    fn drain(&mut self, worker: &mut Worker) -> usize {
        let Self { dequeue, enqueue, pair, .. } = self;
        let mut ctx = worker.ctx();
        ctx.burst = 64;
        ctx.mover.poll(ctx.clock);
        let mut burst = Burst::new();
        let (_, left) = pair.drain(&mut ctx, dequeue, enqueue);
        dequeue.drain(&mut ctx, &mut burst);
        enqueue.submit(&mut ctx, &mut burst);
        ctx.cache.free_all(burst.drain(..));
        enqueue.poll_completed(&mut ctx);
        left + dequeue.in_flight(ctx.mover) + enqueue.in_flight(ctx.mover)
    }

    /// Runs until a stop of `side` has taken effect.
    fn stop(&mut self, worker: &mut Worker, stepper: &mut Stepper, side: &Side) {
        side.cell.publish(|wanted| wanted.vring = None);
        for turn in 0.. {
            stepper.step();
            self.round(worker, 64);
            if side.cell.wait(Duration::ZERO).is_ok() {
                break;
            }
            assert!(turn < 100_000, "a stop is not followed");
            std::hint::spin_loop();
        }
        check_stopped(side);
    }

    /// Ends the case. Checks that nothing is in flight, every packet buffer is back in the pool, and the neighbour has
    /// received its packets.
    fn end(mut self, worker: &mut Worker, stepper: &mut Stepper, sides: &[Side; 2]) -> Guest {
        for turn in 0.. {
            stepper.step();
            self.neighbour.turn(worker);
            if self.drain(worker) == 0 && self.neighbour.is_done() {
                break;
            }
            assert!(turn < 1_000_000, "packets in flight do not arrive");
        }
        for side in sides {
            assert_eq!(side.cell.in_flight(), 0);
            side.cell.publish(|wanted| wanted.vring = None);
        }
        self.drain(worker);
        self.drain(worker);
        for side in sides {
            side.cell.wait(Duration::ZERO).unwrap();
            check_stopped(side);
        }
        sides.iter().for_each(check_untouched);
        let all: Vec<_> = std::iter::from_fn(|| worker.cache.take()).collect();
        assert_eq!(all.len(), CHUNKS, "packet buffers are missing");
        worker.cache.free_all(all);
        self.neighbour.into_guest()
    }
}

/// Bindings for queues: an engine that the test steps, a faulty one, and the core.
fn bindings(worker: &mut Worker, dice: &mut Script<'_>) -> (Stepper, [Binding; 4]) {
    let (device, stepper): (_, Stepper) = CoreDevice::stepped();
    let helper = worker.mover.add_channel(device.open_channel(1 << (2 + dice.pick(7))).unwrap());
    let faulty = worker.add_faulty(dice.pick(256));
    let bindings = [
        Binding::core(),
        Binding::new(Mode::Offload, vec![helper]),
        Binding::new(Mode::Offload, vec![faulty]),
        Binding::new(Mode::Auto, vec![helper, faulty]),
    ];
    (stepper, bindings)
}

/// Plays a script with two hostile guests, and a third guest whose packets must all arrive. Counts the packets on each
/// path.
///
/// # Panics
/// Panics if a guest has broken an invariant.
pub(crate) fn play(script: &[u8], ways: &mut [usize; 2]) {
    let Kept { pool, clock, neighbour } = KEPT.take().unwrap_or_else(Kept::new);
    let mut dice = Script(script);
    let mut worker = Worker { mover: Mover::new(), cache: pool.cache(), clock, burst: BURST };
    let (mut stepper, bindings) = bindings(&mut worker, &mut dice);
    let pick = |dice: &mut Script<'_>| bindings[dice.pick(4) as usize].clone();
    let mut sides = [Side::new(&mut dice, false), Side::new(&mut dice, true)];
    let neighbour = Neighbour::new(neighbour, &mut worker, &pick(&mut dice));
    for side in &mut sides {
        let binding = pick(&mut dice);
        side.start(&binding, true);
    }
    let mut forwarding = Forwarding {
        dequeue: Dequeue::attach(&sides[0].cell, &mut worker.mover).unwrap(),
        enqueue: Enqueue::attach(&sides[1].cell, &mut worker.mover).unwrap(),
        pair: Pair::new(&mut worker.mover),
        neighbour,
        ways,
    };
    for _ in 0..STEPS {
        if dice.0.is_empty() {
            break;
        }
        let which = dice.pick(2) as usize;
        match dice.pick(20) {
            0..6 => sides[0].offer(&mut dice),
            6..12 => sides[1].offer(&mut dice),
            12..16 => {
                let burst = if dice.pick(3) == 0 { 1 + dice.pick(64) as usize } else { 64 };
                forwarding.round(&mut worker, burst);
            }
            16..18 => {
                stepper.step();
            }
            18 if dice.pick(3) == 0 => {
                let enabled = dice.pick(3) > 0;
                sides[which].cell.publish(|wanted| {
                    wanted.vring =
                        wanted.vring.as_deref().cloned().map(|v| Arc::new(VringConfig { enabled, ..v }));
                });
            }
            18 if dice.pick(2) == 0 => {
                let binding = pick(&mut dice);
                sides[which].cell.publish(|wanted| wanted.binding = binding);
            }
            _ if dice.pick(4) == 0 => {
                forwarding.stop(&mut worker, &mut stepper, &sides[which]);
                let (binding, enabled) = (pick(&mut dice), dice.pick(8) > 0);
                sides[which].start(&binding, enabled);
                forwarding.round(&mut worker, 64);
                sides[which].cell.wait(Duration::ZERO).unwrap();
            }
            _ => {}
        }
    }
    let neighbour = forwarding.end(&mut worker, &mut stepper, &sides);
    KEPT.set(Some(Kept { pool, clock: worker.clock, neighbour }));
}

/// Checks that every taken chain was returned.
fn check_stopped(side: &Side) {
    let base = side.cell.report().base;
    if side.guest.packed() {
        assert_eq!(base & 0xffff, base >> 16, "chains that were not returned");
    } else {
        let used = side.guest.read(GUEST + side.parts[2] + 2, 2);
        let used = u16::from_le_bytes([used[0], used[1]]);
        assert_eq!(base, u32::from(used), "chains that were not returned");
    }
}

/// Checks that nothing was written elsewhere: neither between the rings, nor to the buffers that a guest sends.
fn check_untouched(side: &Side) {
    let between = (0..BUFFERS)
        .step_by(0x4000)
        .filter(|at| side.parts.iter().all(|part| !(*part..part + 0x2000).contains(at)));
    let sent = (0..128).filter(|_| !side.writes).map(|buffer| BUFFERS + buffer * 65536 + 4096);
    for at in between.chain(sent) {
        assert_eq!(side.guest.read(GUEST + at, 64), [0; 64], "{at:#x} was written");
    }
}
