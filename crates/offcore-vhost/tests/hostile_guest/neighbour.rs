//! A well-behaved guest on the same worker, mover and channels as a hostile one. Its packets are sent by its TX
//! virtqueue and come back on its RX virtqueue, and each of them is checked.
#![allow(dead_code, reason = "each test binary and fuzz target uses its own part")]

use std::sync::Arc;

use offcore_dma::Binding;
use offcore_mem::Burst;
use offcore_ring::{device::Direction, driver};
use offcore_vhost::{Dequeue, Enqueue, VringCell, VringConfig};

use offcore_vhost::testing::{FEATURES, Guest, Receiver, Worker, pattern, start};

const SIZE: u16 = 64;
/// The TX buffers follow the RX buffers.
const TX_BUFFERS: usize = 256;

pub(crate) struct Neighbour {
    guest: Guest,
    receiver: Receiver,
    tx: driver::RingDriver<u64>,
    cells: [Arc<VringCell>; 2],
    enqueue: Enqueue,
    dequeue: Dequeue,
    free: Vec<u64>,
    held: Burst,
    sent: u64,
    pub(crate) received: u64,
}

fn length(serial: u64) -> usize {
    14 + (serial as usize * 331) % 1500
}

impl Neighbour {
    pub(crate) fn guest() -> Guest {
        Guest::new(SIZE)
    }

    /// Restarts both virtqueues of `guest`.
    pub(crate) fn new(guest: Guest, worker: &mut Worker, binding: &Binding) -> Self {
        guest.reset_rings();
        let cells = [0, 1].map(|queue| Arc::new(VringCell::new(queue)));
        for (cell, layout) in cells.iter().zip([&guest.layout, &guest.tx_layout]) {
            cell.publish(|wanted| wanted.binding = binding.clone());
            start(cell, VringConfig { layout: layout.clone(), ..guest.config(FEATURES) });
        }
        let receiver = Receiver::new(&guest, 2048);
        let tx = driver::RingDriver::new(guest.tx_layout.clone(), false);
        let free = (0..usize::from(SIZE)).map(|i| guest.buffer(TX_BUFFERS + i, 2048)).collect();
        let enqueue = Enqueue::attach(&cells[0], &mut worker.mover).unwrap();
        let dequeue = Dequeue::attach(&cells[1], &mut worker.mover).unwrap();
        let held = Burst::new();
        Self { guest, receiver, tx, cells, enqueue, dequeue, free, held, sent: 0, received: 0 }
    }

    /// Sends up to `packets` further packets.
    pub(crate) fn send(&mut self, packets: usize) {
        for _ in 0..packets {
            let Some(address) = self.free.pop() else { break };
            let bytes = [vec![0; 12], pattern(self.sent, length(self.sent))].concat();
            self.guest.write(address, &bytes);
            self.tx.add(address, bytes.len() as u32, Direction::Readable, address).unwrap();
            self.sent += 1;
        }
        self.tx.publish();
    }

    /// One round of the worker, followed by a check of the received packets.
    pub(crate) fn turn(&mut self, worker: &mut Worker) {
        let mut ctx = worker.ctx();
        if self.held.is_empty() {
            let dequeued = self.dequeue.try_dequeue(&mut ctx, &mut self.held);
            assert_eq!((dequeued.malformed, dequeued.too_big), (0, 0));
        }
        let submitted = self.enqueue.submit(&mut ctx, &mut self.held);
        assert_eq!(submitted.too_big, 0);
        self.enqueue.poll_completed(&mut ctx);
        self.tx.used().unwrap();
        while let Some(used) = self.tx.pop().unwrap() {
            self.free.push(used.token);
        }
        while let Some(packet) = self.receiver.receive(&self.guest) {
            let due = self.received;
            assert_eq!(packet[12..], pattern(due, length(due)), "the neighbour's packet {due}");
            self.received += 1;
        }
    }

    /// Whether all sent packets have arrived.
    pub(crate) fn is_done(&self) -> bool {
        self.received == self.sent
    }

    /// Returns the memory for the next run. Nothing may be in flight.
    pub(crate) fn into_guest(self) -> Guest {
        assert!(self.held.is_empty());
        for cell in &self.cells {
            assert_eq!(cell.report().broken, None, "a neighbour's virtqueue does not break");
            assert_eq!(cell.in_flight(), 0);
        }
        self.guest
    }
}
