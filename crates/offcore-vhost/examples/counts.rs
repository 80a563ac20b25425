//! Workloads for `cargo xtask counts`: the hot functions, in fixed loops, for callgrind.
//!
//! Without arguments, it prints the names of the cases. With a name, it runs that case and prints the number of packets
//! processed. Only code inside [`counted`] is measured, not the setup, the guest's side, or the engine.

use std::hint::black_box;
use std::sync::Arc;

use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::cost::SubmitReap;
use offcore_dma::mover::Way;
use offcore_dma::{Binding, Channel, ChannelId, Context, CopyDevice, CopyOp, Mode, Mover, QueueId, cpu};
use offcore_mem::Burst;
use offcore_ring::device::Direction;
use offcore_ring::driver;
use offcore_ring::split::VIRTQ_DESC_F_NEXT;
use offcore_stats::{Stage, StageClock};
use offcore_vhost::features::{VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM};
use offcore_vhost::testing::{BUFFERS, FEATURES, GUEST, Guest, Receiver, Worker, start};
use offcore_vhost::{Dequeue, Enqueue, Pair, VringCell};
use offcore_wire::virtio_net::{self, NetHeader};

/// A case and its name.
type Case = (&'static str, fn() -> usize);

/// Sizes are frame sizes, including the FCS. The engine's case has no size, because the core does not touch the
/// payload. In a virtqueue's case, the copy routine used by the core depends on the duration of copies. Copies with
/// prefetching have more instructions than plain ones, and the recorded case is the one with more instructions.
const CASES: [Case; 21] = [
    ("copy-64", || copy(60)),
    ("copy-1518", || copy(1514)),
    ("dequeue-64", || dequeue(SPLIT, CPU, Shape::Plain)),
    ("dequeue-auto-64", || dequeue(SPLIT, AUTO_CORE, Shape::Plain)),
    ("dequeue-auto-offload", || dequeue(SPLIT, AUTO_ENGINE, Shape::Plain)),
    ("dequeue-csum-64", || dequeue(SPLIT, CPU, Shape::Csum)),
    ("dequeue-indirect-512", || dequeue(SPLIT, CPU, Shape::Indirect)),
    ("dequeue-offload", || dequeue(SPLIT, OFFLOAD, Shape::Plain)),
    ("dequeue-packed-64", || dequeue(PACKED, CPU, Shape::Plain)),
    ("dequeue-packed-offload", || dequeue(PACKED, OFFLOAD, Shape::Plain)),
    ("enqueue-64", || enqueue(SPLIT, CPU, Shape::Plain)),
    ("enqueue-auto-64", || enqueue(SPLIT, AUTO_CORE, Shape::Plain)),
    ("enqueue-auto-offload", || enqueue(SPLIT, AUTO_ENGINE, Shape::Plain)),
    ("enqueue-csum-64", || enqueue(SPLIT, CPU, Shape::Csum)),
    ("enqueue-offload", || enqueue(SPLIT, OFFLOAD, Shape::Plain)),
    ("enqueue-packed-64", || enqueue(PACKED, CPU, Shape::Plain)),
    ("enqueue-packed-offload", || enqueue(PACKED, OFFLOAD, Shape::Plain)),
    ("pair-64", || pair(SPLIT, Mode::Cpu)),
    ("pair-offload", || pair(SPLIT, Mode::Offload)),
    ("pair-packed-64", || pair(PACKED, Mode::Cpu)),
    ("submit-reap", submit_reap),
];

/// Whether a guest's virtqueues are packed.
const SPLIT: bool = false;
const PACKED: bool = true;

/// Form of the packets.
#[derive(Clone, Copy, PartialEq)]
enum Shape {
    /// In one piece, without an offload request.
    Plain,
    /// In one piece, with a request for a UDP checksum.
    Csum,
    /// Longer, in two pieces (headers and payload) in an indirect table, as sent by a Linux guest.
    Indirect,
}

impl Shape {
    /// Length in bytes, without the FCS.
    const fn len(self) -> usize {
        match self {
            Self::Plain | Self::Csum => LEN,
            Self::Indirect => 508,
        }
    }

    /// Features needed for this form.
    const fn features(self) -> u64 {
        match self {
            Self::Plain | Self::Indirect => FEATURES,
            Self::Csum => FEATURES | VIRTIO_NET_F_CSUM | VIRTIO_NET_F_GUEST_CSUM,
        }
    }

    fn header(self) -> [u8; HEADER] {
        match self {
            Self::Plain | Self::Indirect => NetHeader::default().to_bytes(),
            Self::Csum => {
                let flags = virtio_net::VIRTIO_NET_HDR_F_NEEDS_CSUM;
                NetHeader { flags, csum_start: 34, csum_offset: 6, ..NetHeader::default() }.to_bytes()
            }
        }
    }
}

/// The mode and, for `auto`, its decision.
#[derive(Clone, Copy)]
struct Copying {
    mode: Mode,
    way: Way,
}

const CPU: Copying = Copying { mode: Mode::Cpu, way: Way::Core };
const OFFLOAD: Copying = Copying { mode: Mode::Offload, way: Way::Engine };
const AUTO_CORE: Copying = Copying { mode: Mode::Auto, way: Way::Core };
const AUTO_ENGINE: Copying = Copying { mode: Mode::Auto, way: Way::Engine };

/// Packets per burst.
const PACKETS: usize = 32;
/// Length of a packet in bytes, without the FCS.
const LEN: usize = 60;
/// Number of bursts before counting starts, and number of bursts counted: a multiple of the stage clock's sampling
/// interval.
const WARM_UP: usize = 64;
const BURSTS: usize = 640;
/// Number of bursts counted in mode `auto`. They fit into the lease that follows a decision.
const BURSTS_OF_LEASE: usize = 48;
/// Number of loop iterations that slow down the way that `auto` must not choose, on any machine.
const DEAR: u32 = 100_000;
/// Length of the virtio-net header.
const HEADER: usize = 12;
const RING: u16 = 256;
const BUFFER: usize = 2048;
/// Address of the indirect tables of two descriptors, behind all buffers, and length of a table in bytes.
const TABLES: u64 = GUEST + (8 << 20);
const TABLE: usize = 32;
/// Length of a packet's first piece in bytes: virtio-net, Ethernet, IPv4 and UDP headers.
const HEADERS: usize = HEADER + 42;
/// Capacity of the engine's channel in operations.
const CHANNEL: usize = 1024;

fn main() {
    let Some(wanted) = std::env::args().nth(1) else {
        CASES.iter().for_each(|(name, _)| println!("{name}"));
        return;
    };
    match CASES.iter().find(|(name, _)| *name == wanted) {
        Some((_, run)) => println!("{}", run()),
        None => {
            eprintln!("case '{wanted}': expected one of those that are listed without an argument");
            std::process::exit(2);
        }
    }
}

/// The function that callgrind counts, including everything it calls.
#[inline(never)]
fn counted<R>(work: impl FnOnce() -> R) -> R {
    black_box(work())
}

/// Calls `work`, counted or not.
#[inline(always)]
fn count_if<R>(count: bool, work: impl FnOnce() -> R) -> R {
    if count { counted(work) } else { work() }
}

/// Calls `burst` until the required number of bursts is counted. Returns the number of packets in them.
fn bursts(mut burst: impl FnMut(bool) -> usize) -> usize {
    let packets: usize = (0..WARM_UP + BURSTS).map(|i| burst(i >= WARM_UP)).skip(WARM_UP).sum();
    assert_eq!(packets, BURSTS * PACKETS, "every burst moves all its packets");
    packets
}

/// Like [`bursts`], with the worker that runs the bursts. In mode `auto`, counting starts after the other way has
/// become so expensive that the wanted one was chosen. For the core, the engine is chosen first. A lease has then just
/// begun, during which copies are not timed.
fn bursts_of(
    worker: &mut Worker,
    copying: Copying,
    mut burst: impl FnMut(&mut Worker, Run) -> usize,
) -> usize {
    if copying.mode != Mode::Auto {
        return bursts(|count| burst(worker, Run { count, dear: None }));
    }
    let queue = worker.mover.queues().next().expect("the virtqueue has a queue");
    let ways: &[Way] = if copying.way == Way::Core { &[Way::Engine, Way::Core] } else { &[Way::Engine] };
    for &way in ways {
        let dear = Some(if way == Way::Core { Way::Engine } else { Way::Core });
        // All copies belong to the same size class.
        while class_of(&worker.mover, queue) != way {
            burst(worker, Run { count: false, dear });
        }
    }
    // A new clock, so that it samples at the same position in every run.
    worker.clock = StageClock::private();
    let packets = (0..BURSTS_OF_LEASE).map(|_| burst(worker, Run { count: true, dear: None })).sum();
    assert_eq!(packets, BURSTS_OF_LEASE * PACKETS, "every burst moves all its packets");
    packets
}

/// How to run a burst: whether it is counted, and which way of copying is slowed down.
#[derive(Clone, Copy)]
struct Run {
    count: bool,
    dear: Option<Way>,
}

/// Returns the way of copying for the copies of a queue, which all have the size measured here.
fn class_of(mover: &Mover, queue: QueueId) -> Way {
    let len = (HEADER + LEN) as u32;
    let classes = mover.decisions(queue).classes;
    classes.iter().find(|class| len <= class.up_to).map(|class| class.way).unwrap_or_default()
}

/// Returns a worker with one channel of an engine that copies only when stepped.
fn worker() -> (Worker, ChannelId, Stepper) {
    let mut worker = Worker::new();
    let (device, stepper) = CoreDevice::stepped();
    let id = worker.mover.add_channel(channel(&device));
    (worker, id, stepper)
}

fn channel(device: &CoreDevice) -> Box<dyn Channel> {
    device.open_channel(CHANNEL).expect("the device has a channel")
}

/// Returns a virtqueue of a guest whose copies are made by `channel` in the given mode.
fn cell(guest: &Guest, queue: u16, mode: Mode, channel: ChannelId, shape: Shape) -> Arc<VringCell> {
    let cell = Arc::new(VringCell::new(queue));
    cell.publish(|wanted| wanted.binding = Binding::new(mode, vec![channel]));
    start(&cell, guest.config(shape.features()));
    cell
}

/// One round of a worker: collects completed copies, then calls `work`.
#[inline(always)]
fn round<R>(ctx: &mut Context<'_>, work: impl FnOnce(&mut Context<'_>) -> R) -> R {
    ctx.clock.begin();
    ctx.mover.poll(ctx.clock);
    let result = work(ctx);
    ctx.mover.end_round();
    ctx.clock.end(Stage::Idle);
    result
}

/// Called at the end of a round that began with new packets. Takes a long time if they were copied in the way to slow
/// down.
#[inline(always)]
fn slow_down(mover: &Mover, dear: Option<Way>) {
    if let Some(dear) = dear {
        let way = if mover.in_flight() > 0 { Way::Engine } else { Way::Core };
        if way == dear {
            (0..DEAR).for_each(|i| _ = black_box(i));
        }
    }
}

/// The driver side of a guest that sends bursts.
struct Sender {
    driver: driver::RingDriver<()>,
    shape: Shape,
    next: usize,
}

impl Sender {
    fn new(guest: &Guest, shape: Shape) -> Self {
        for i in 0..usize::from(RING) {
            let buffer = buffer(i);
            guest.write(buffer, &shape.header());
            // In a split virtqueue, the first descriptor is linked to the second.
            for (at, (address, len, flags, next)) in [
                (buffer, HEADERS, VIRTQ_DESC_F_NEXT, 1u16),
                (buffer + HEADERS as u64, HEADER + shape.len() - HEADERS, 0, 0),
            ]
            .into_iter()
            .enumerate()
            {
                let descriptor = u128::from(address)
                    | (len as u128) << 64
                    | u128::from(flags) << 96
                    | u128::from(next) << 112;
                guest.write(table(i) + 16 * at as u64, &descriptor.to_le_bytes());
            }
        }
        Self { driver: driver::RingDriver::new(guest.layout.clone(), false), shape, next: 0 }
    }

    /// Makes a burst available.
    fn send(&mut self) {
        for _ in 0..PACKETS {
            let len = (HEADER + self.shape.len()) as u32;
            let added = match self.shape {
                Shape::Indirect => self.driver.add_indirect(table(self.next), TABLE as u32, ()),
                Shape::Plain | Shape::Csum => {
                    self.driver.add(buffer(self.next), len, Direction::Readable, ())
                }
            };
            added.expect("the driver has a free descriptor");
            self.next = (self.next + 1) % usize::from(RING);
        }
        self.driver.publish();
    }

    /// Collects the returned chains.
    fn take_back(&mut self) {
        while self.driver.used().expect("the ring is sound") > 0 {
            self.driver.pop().expect("the ring is sound");
        }
    }
}

fn buffer(index: usize) -> u64 {
    GUEST + BUFFERS + (index * BUFFER) as u64
}

fn table(index: usize) -> u64 {
    TABLES + (index * TABLE) as u64
}

/// Packets from the guest. An engine has made the copies by the second round.
fn dequeue(packed: bool, copying: Copying, shape: Shape) -> usize {
    let (guest, (mut worker, channel, mut stepper)) = (Guest::with_rings(RING, packed), worker());
    let cell = cell(&guest, 1, copying.mode, channel, shape);
    let mut dequeue = Dequeue::attach(&cell, &mut worker.mover).expect("the virtqueue is free");
    let (mut sender, mut received) = (Sender::new(&guest, shape), Burst::new());
    bursts_of(&mut worker, copying, |worker, Run { count, dear }| {
        sender.send();
        let mut ctx = worker.ctx();
        let mut once = |dear| {
            count_if(count, || {
                round(&mut ctx, |ctx| {
                    let packets = dequeue.try_dequeue(ctx, &mut received).packets;
                    slow_down(ctx.mover, dear);
                    packets
                })
            })
        };
        let mut packets = once(dear);
        if packets == 0 {
            stepper.step();
            packets += once(None);
        }
        assert!(
            received.iter().all(|packet| packet.has_offload() == (shape == Shape::Csum)),
            "marked as asked"
        );
        worker.cache.free_all(received.drain(..));
        sender.take_back();
        packets
    })
}

/// Packets to the guest. An engine makes the copies between two rounds.
fn enqueue(packed: bool, copying: Copying, shape: Shape) -> usize {
    let (guest, (mut worker, channel, mut stepper)) = (Guest::with_rings(RING, packed), worker());
    let cell = cell(&guest, 0, copying.mode, channel, shape);
    let mut enqueue = Enqueue::attach(&cell, &mut worker.mover).expect("the virtqueue is free");
    let mut receiver = Receiver::new(&guest, BUFFER as u32);
    bursts_of(&mut worker, copying, |worker, Run { count, dear }| {
        let mut burst = worker.packets(0, &[LEN; PACKETS]);
        if shape == Shape::Csum {
            for packet in &mut burst {
                packet.headroom_mut(HEADER).copy_from_slice(&shape.header()); // copy-ok: the packet's sender
                packet.set_offload(true);
            }
        }
        let mut ctx = worker.ctx();
        let mut once = |dear| {
            count_if(count, || {
                round(&mut ctx, |ctx| {
                    enqueue.submit(ctx, &mut burst);
                    enqueue.poll_completed(ctx);
                    slow_down(ctx.mover, dear);
                });
            });
            ctx.mover.in_flight()
        };
        if once(dear) > 0 {
            stepper.step();
            once(None);
        }
        std::iter::from_fn(|| receiver.receive(&guest)).count()
    })
}

/// Packets from one guest to another in one copy, with rewritten addresses. An engine has made the copies by the second
/// round.
fn pair(packed: bool, mode: Mode) -> usize {
    let (from, to) = (Guest::with_rings(RING, packed), Guest::with_rings(RING, packed));
    let (mut worker, channel, mut stepper) = worker();
    let (from_cell, to_cell) =
        (cell(&from, 1, mode, channel, Shape::Plain), cell(&to, 0, mode, channel, Shape::Plain));
    let mut dequeue = Dequeue::attach(&from_cell, &mut worker.mover).expect("the virtqueue is free");
    let mut enqueue = Enqueue::attach(&to_cell, &mut worker.mover).expect("the virtqueue is free");
    let mut pair = Pair::new(&mut worker.mover);
    let (mut sender, mut receiver) = (Sender::new(&from, Shape::Plain), Receiver::new(&to, BUFFER as u32));
    bursts(|count| {
        sender.send();
        let mut ctx = worker.ctx();
        let mut once = || {
            count_if(count, || {
                round(&mut ctx, |ctx| {
                    let mac = |frame: &mut [u8]| frame[..12].copy_from_slice(&[2; 12]);
                    pair.forward(ctx, &mut dequeue, &mut enqueue, mac).packets
                })
            })
        };
        let mut packets = once();
        if mode == Mode::Offload {
            stepper.step();
            packets += once();
        }
        sender.take_back();
        let received = std::iter::from_fn(|| receiver.receive(&to)).count();
        assert_eq!(received, packets, "what was forwarded has arrived");
        packets
    })
}

/// Only the core's copies, with prefetching.
fn copy(len: usize) -> usize {
    let (src, mut dst) = (vec![7u8; PACKETS * BUFFER], vec![0u8; PACKETS * BUFFER]);
    let (from, to) = (src.as_ptr(), dst.as_mut_ptr());
    let list: Vec<CopyOp> = (0..PACKETS)
        .map(|i| {
            let (src, dst) = (from.wrapping_add(i * BUFFER), to.wrapping_add(i * BUFFER));
            CopyOp { src, dst, len: (HEADER + len) as u32, token: 0 }
        })
        .collect();
    bursts(|count| {
        // SAFETY: both vectors are alive. Each copy is inside a buffer of both vectors, which are not used otherwise.
        count_if(count, || unsafe { cpu::copy_burst(&list) });
        list.len()
    })
}

/// One copy per packet with the mover alone: addresses, plan, reorder ring, the memory's count of copies, submit, poll.
fn submit_reap() -> usize {
    let (device, mut stepper) = CoreDevice::stepped();
    let mut copies = SubmitReap::new(channel(&device), LEN as u32);
    bursts(|count| {
        count_if(count, || copies.submit());
        stepper.step();
        count_if(count, || copies.reap()).1
    })
}
