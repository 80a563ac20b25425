//! Live migration: a guest moves to other memory and another back end while packets are in flight. The test acts as the
//! front end of both back ends: see [`crate::migrating`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use offcore_dma::core::CoreDevice;
use offcore_dma::{Binding, CopyDevice as _, Mode};
use offcore_mem::Burst;
use offcore_ring::device::Direction;
use offcore_ring::driver;
use offcore_vhost::pair::Next;
use offcore_vhost::testing::{self, Worker};
use offcore_vhost::{Backend, BackendConfig, Dequeue, Enqueue, Pair, VringCell, VringConfig};

use crate::migrating::{COUNT, HEADER, LEN, Migrating, packet};
use crate::peer::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Core,
    /// A helper core that copies from time to time.
    Stepped,
    /// Late, lost and failed copies, in another order.
    Faulty,
}

#[derive(Clone, Copy, Debug)]
struct Setup {
    packed: bool,
    engine: Engine,
    /// Whether packets come from another guest in one copy, rather than from the guest itself.
    pair: bool,
}

/// Another guest that sends packets in one copy.
struct Sender {
    guest: testing::Guest,
    tx: driver::RingDriver<u64>,
    free: Vec<u64>,
    cell: Arc<VringCell>,
}

impl Sender {
    fn new() -> Self {
        let guest = testing::Guest::new(COUNT as u16);
        let cell = Arc::new(VringCell::new(1));
        let config = VringConfig { layout: guest.tx_layout.clone(), ..guest.config(testing::FEATURES) };
        testing::start(&cell, config);
        let tx = driver::RingDriver::new(guest.tx_layout.clone(), false);
        let free = (0..COUNT as usize).map(|i| guest.buffer(i, 2048)).collect();
        Self { guest, tx, free, cell }
    }

    fn transmit(&mut self, next: &mut u64) {
        while self.tx.used().unwrap() > 0 {
            self.free.push(self.tx.pop().unwrap().unwrap().token);
        }
        for _ in 0..8 {
            let Some(address) = self.free.pop() else { break };
            self.guest.write(address, &[vec![0; HEADER as usize], packet(*next)].concat());
            self.tx.add(address, (HEADER + LEN) as u32, Direction::Readable, address).unwrap();
            *next += 1;
        }
        self.tx.publish();
    }
}

/// A switch. The guest receives the packets that it sends or that another guest sends, starting with number `next`.
/// Returns the next number for the other guest, and the number of packets that used one copy. `dropped` counts packets
/// without a receive buffer.
fn switch(
    cells: &[Arc<VringCell>],
    setup: Setup,
    mut next: u64,
    stop: &AtomicBool,
    dropped: &AtomicU64,
) -> (u64, usize) {
    let mut worker = Worker::new();
    let (mut stepper, mut binding) = (None, Binding::core());
    match setup.engine {
        Engine::Core => {}
        Engine::Stepped => {
            let (device, steps) = CoreDevice::stepped();
            let channel = worker.mover.add_channel(device.open_channel(256).unwrap());
            (stepper, binding) = (Some(steps), Binding::new(Mode::Offload, vec![channel]));
        }
        Engine::Faulty => binding = Binding::new(Mode::Offload, vec![worker.add_faulty(7)]),
    }
    for cell in cells {
        cell.publish(|wanted| wanted.binding = binding.clone());
    }
    let mut sender = setup.pair.then(Sender::new);
    let mut enqueue = Enqueue::attach(&cells[0], &mut worker.mover).unwrap();
    let from = sender.as_ref().map_or(&cells[1], |sender| &sender.cell);
    let mut dequeue = Dequeue::attach(from, &mut worker.mover).unwrap();
    let mut pair = Pair::new(&mut worker.mover);
    let (mut burst, mut round, mut in_one_copy) = (Burst::new(), 0u64, 0);
    while !stop.load(Ordering::Relaxed) {
        if let Some(sender) = &mut sender {
            sender.transmit(&mut next);
        }
        let mut ctx = worker.ctx();
        ctx.mover.poll(ctx.clock);
        let way = match &sender {
            None => Next::Ordinary,
            Some(_) => {
                let forwarded = pair.forward(&mut ctx, &mut dequeue, &mut enqueue, |_| ());
                in_one_copy += forwarded.packets;
                forwarded.next
            }
        };
        match way {
            Next::Nothing => {}
            Next::Ordinary => drop(dequeue.try_dequeue(&mut ctx, &mut burst)),
            Next::Finish => drop(dequeue.drain(&mut ctx, &mut burst)),
        }
        enqueue.submit(&mut ctx, &mut burst);
        // The switch does not wait for a receiver without buffers.
        dropped.fetch_add(burst.len() as u64, Ordering::Relaxed);
        ctx.cache.free_all(burst.drain(..));
        enqueue.poll_completed(&mut ctx);
        round += 1;
        if let Some(stepper) = stepper.as_mut().filter(|_| round.is_multiple_of(5)) {
            stepper.step();
        }
        std::thread::yield_now();
    }
    (next, in_one_copy)
}

fn migrate(setup: Setup) {
    let dir = Dir::new();
    let backend = |name| Backend::start(BackendConfig::new(dir.file(name)), Box::new(())).unwrap();
    let (first, second) = (backend("first.sock"), backend("second.sock"));
    let mut guest = Migrating::new(setup.packed, !setup.pair);

    let (stop, dropped) = (AtomicBool::new(false), AtomicU64::new(0));
    let next = std::thread::scope(|scope| {
        let ends = Ends(&stop);
        let switch = scope.spawn(|| switch(first.cells(), setup, 0, &stop, &dropped));
        let mut peer = Peer::negotiated(&dir.file("first.sock"));
        guest.start(&mut peer);
        guest.run(500);
        guest.leave(&mut peer);
        drop(ends);
        let (next, in_one_copy) = switch.join().unwrap();
        assert_eq!(in_one_copy > 0, setup.pair, "before the migration");
        next
    });

    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ends = Ends(&stop);
        let switch = scope.spawn(|| switch(second.cells(), setup, next, &stop, &dropped));
        let mut peer = Peer::negotiated(&dir.file("second.sock"));
        guest.start(&mut peer);
        guest.run(500);
        // All packets of the guest have arrived, except for dropped ones.
        while !setup.pair && guest.received + dropped.load(Ordering::Relaxed) < guest.sent {
            guest.receive();
            std::thread::yield_now();
        }
        drop(ends);
        switch.join().unwrap();
        assert!(setup.pair || guest.received + dropped.load(Ordering::Relaxed) == guest.sent, "{setup:?}");
    });
    for backend in [first, second] {
        let status = backend.device().status();
        assert!(status.refused == 0 && status.vrings.iter().all(|vring| vring.broken.is_none()), "{status}");
    }
}

#[test]
fn guest_migrates_with_copies_by_the_core() {
    for packed in [false, true] {
        migrate(Setup { packed, engine: Engine::Core, pair: false });
    }
}

#[test]
fn guest_migrates_with_copies_under_way() {
    for packed in [false, true] {
        migrate(Setup { packed, engine: Engine::Stepped, pair: false });
    }
}

#[test]
fn guest_migrates_with_an_engine_that_fails() {
    for packed in [false, true] {
        migrate(Setup { packed, engine: Engine::Faulty, pair: false });
    }
}

#[test]
fn pair_receiver_migrates() {
    for packed in [false, true] {
        for engine in [Engine::Core, Engine::Stepped] {
            migrate(Setup { packed, engine, pair: true });
        }
    }
}
