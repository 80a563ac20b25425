//! What `cargo xtask counts` counts: the hot functions, in fixed loops, for callgrind.
//!
//! Without arguments it prints the names of the cases; with one, it runs that case and prints how many packets went
//! through. Only what happens inside [`counted`] is measured: not the set-up, nor the guest's side.

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::sync::Arc;

use common::{BUFFERS, FEATURES, GUEST, Guest, Receiver, Worker, start};
use offcore_mem::Burst;
use offcore_ring::split::device::Direction;
use offcore_ring::split::driver;
use offcore_vhost::{Dequeue, Enqueue, VringCell};

/// A case by its name.
type Case = (&'static str, fn() -> usize);

/// Frame lengths are without FCS: 64 and 1518 bytes on a wire.
const CASES: [Case; 4] = [
    ("dequeue-64", || dequeue(60)),
    ("dequeue-1518", || dequeue(1514)),
    ("enqueue-64", || enqueue(60)),
    ("enqueue-1518", || enqueue(1514)),
];

/// Packets a burst.
const PACKETS: usize = 32;
/// Bursts before counting starts, and bursts counted: a multiple of the stage clock's sample.
const WARM_UP: usize = 64;
const BURSTS: usize = 640;
/// The virtio-net header.
const HEADER: usize = 12;
const RING: u16 = 256;
const BUFFER: usize = 2048;

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

/// The function that callgrind is told to count in, with everything that it calls.
#[inline(never)]
fn counted<R>(work: impl FnOnce() -> R) -> R {
    black_box(work())
}

/// Calls `burst` until the set number of bursts is counted; returns the packets of those.
fn bursts(mut burst: impl FnMut(bool) -> usize) -> usize {
    let packets: usize = (0..WARM_UP + BURSTS).map(|i| burst(i >= WARM_UP)).skip(WARM_UP).sum();
    assert_eq!(packets, BURSTS * PACKETS, "every burst moves all its packets");
    packets
}

/// Packets from the guest, copied by the core.
fn dequeue(len: usize) -> usize {
    let (guest, mut worker) = (Guest::new(RING), Worker::new());
    let cell = Arc::new(VringCell::new(1));
    let mut dequeue = Dequeue::attach(&cell, &mut worker.mover).expect("the virtqueue is free");
    start(&cell, guest.config(FEATURES));
    let mut driver = driver::Queue::new(guest.layout, false);
    let mut received = Burst::new();
    let mut next = 0;
    bursts(|count| {
        for _ in 0..PACKETS {
            let address = GUEST + BUFFERS + (next * BUFFER) as u64;
            next = (next + 1) % usize::from(RING);
            driver
                .add(address, (HEADER + len) as u32, Direction::Readable, ())
                .expect("the driver has a free descriptor");
        }
        driver.publish();
        let mut ctx = worker.ctx();
        let mut work = || {
            ctx.clock.begin();
            let packets = dequeue.try_dequeue(&mut ctx, &mut received).packets;
            ctx.clock.end(offcore_stats::Stage::Idle);
            packets
        };
        let packets = if count { counted(work) } else { work() };
        worker.cache.free_all(received.drain(..));
        while driver.used().expect("the ring is sound") > 0 {
            driver.pop().expect("the ring is sound");
        }
        packets
    })
}

/// Packets to the guest, copied by the core.
fn enqueue(len: usize) -> usize {
    let (guest, mut worker) = (Guest::new(RING), Worker::new());
    let cell = Arc::new(VringCell::new(0));
    let mut enqueue = Enqueue::attach(&cell, &mut worker.mover).expect("the virtqueue is free");
    start(&cell, guest.config(FEATURES));
    let mut receiver = Receiver::new(&guest, BUFFER as u32);
    let mut done = Burst::new();
    bursts(|count| {
        let mut burst = worker.packets(0, &[len; PACKETS]);
        let mut ctx = worker.ctx();
        let mut work = || {
            ctx.clock.begin();
            let packets = enqueue.submit(&mut ctx, &mut burst).packets;
            enqueue.poll_completed(&mut ctx, &mut done);
            ctx.clock.end(offcore_stats::Stage::Idle);
            packets
        };
        let packets = if count { counted(work) } else { work() };
        worker.cache.free_all(done.drain(..));
        while receiver.receive(&guest).is_some() {}
        packets
    })
}
