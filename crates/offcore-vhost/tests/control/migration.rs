//! Live migration: a guest moves to other memory and another back end while its packets are on their way.
//!
//! The test is the front end of both ends. It copies the guest's memory as often as pages are said to be dirty, while the guest goes on,
//! stops the virtqueues, copies what is left, and compares all of it. The guest then goes on where it was, at the same addresses.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use offcore_dma::core::CoreDevice;
use offcore_dma::{Binding, Device as _, Mode};
use offcore_mem::{Burst, GuestMemory, GuestRegion, Hugepages, Mapping};
use offcore_ring::device::Direction;
use offcore_ring::{Layout, driver, packed};
use offcore_vhost::features::{VHOST_F_LOG_ALL, VIRTIO_F_RING_PACKED};
use offcore_vhost::message::{LogArea, MemoryRegion, Request, VHOST_VRING_F_LOG, VringAddr, VringFd};
use offcore_vhost::pair::Next;
use offcore_vhost::testing::{self, Worker};
use offcore_vhost::{Backend, BackendConfig, Dequeue, Enqueue, Pair, VringCell, VringConfig};

use crate::peer::*;

const PAGE: usize = 4096;
const HEADER: u64 = offcore_vhost::features::NET_HEADER as u64;
const LEN: u64 = 700;
const SIZE: u32 = 128;
/// Where buffers are in the guest's memory: those it receives in, and those it sends.
const BUFFERS: [u64; 2] = [0x4_0000, 0x9_0000];
/// Each begins in a page and ends in the next.
const BUFFER: u64 = 2048;
const OFFSET: u64 = 1500;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Core,
    /// A helper core that copies now and then.
    Stepped,
    /// Late, lost and failed copies, in another order.
    Faulty,
}

#[derive(Clone, Copy, Debug)]
struct Setup {
    packed: bool,
    engine: Engine,
    /// Packets come from another guest, in one copy, not from the guest itself.
    pair: bool,
}

/// A guest whose memory can be exchanged under it.
struct Migrating {
    fd: OwnedFd,
    memory: Arc<GuestMemory>,
    rx: driver::Queue<u64>,
    tx: driver::Queue<u64>,
    free: Vec<u64>,
    sent: u64,
    /// The least number that may come next.
    due: u64,
    received: u64,
}

impl Migrating {
    fn new(setup: Setup) -> Self {
        let guest = Guest::new();
        let region = guest.region();
        let mapping = Mapping::shared(guest.fd.as_fd(), 0, guest.mapping.len()).unwrap();
        let region = GuestRegion::new(region.guest, region.user, region.size, mapping, 0).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
        let queue = |index| {
            let ring = addresses(index);
            let layout = Layout::in_memory(&memory, (ring.desc, ring.avail, ring.used), SIZE, setup.packed);
            driver::Queue::new(layout.unwrap(), false)
        };
        let mut rx: driver::Queue<u64> = queue(0);
        for i in 0..u64::from(SIZE) {
            let address = Guest::PHYSICAL + BUFFERS[0] + i * BUFFER + OFFSET;
            rx.add(address, BUFFER as u32, Direction::Writable, address).unwrap();
        }
        rx.publish();
        let free = (0..u64::from(SIZE)).map(|i| Guest::PHYSICAL + BUFFERS[1] + i * BUFFER).collect();
        let tx = queue(1);
        Self { fd: guest.fd, memory, rx, tx, free, sent: 0, due: 0, received: 0 }
    }

    fn mapping(&self) -> &Mapping {
        self.memory.regions()[0].mapping()
    }

    fn at(address: u64) -> usize {
        (address - Guest::PHYSICAL) as usize
    }

    fn transmit(&mut self) {
        while self.tx.used().unwrap() > 0 {
            self.free.push(self.tx.pop().unwrap().unwrap().token);
        }
        for _ in 0..8 {
            let Some(address) = self.free.pop() else { break };
            self.mapping().write_at(Self::at(address + HEADER), &packet(self.sent));
            self.tx.add(address, (HEADER + LEN) as u32, Direction::Readable, address).unwrap();
            self.sent += 1;
        }
        self.tx.publish();
    }

    /// Packets are whole, and in order.
    fn receive(&mut self) {
        while self.rx.used().unwrap() > 0 {
            let used = self.rx.pop().unwrap().unwrap();
            assert_eq!(u64::from(used.len), HEADER + LEN);
            let mut bytes = vec![0; LEN as usize];
            self.mapping().read_at(Self::at(used.token + HEADER), &mut bytes);
            let number = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
            assert!(bytes == packet(number), "packet {number} is not whole");
            assert!(number >= self.due, "packet {number} came after {}", self.due);
            self.due = number + 1;
            self.received += 1;
            self.rx.add(used.token, BUFFER as u32, Direction::Writable, used.token).unwrap();
        }
        self.rx.publish();
    }

    /// Goes on until `packets` more have been received.
    fn run(&mut self, setup: Setup, packets: u64) {
        let until = self.received + packets;
        while self.received < until {
            if !setup.pair {
                self.transmit();
            }
            self.receive();
            std::thread::yield_now();
        }
    }

    /// What only the guest writes, and what it may write in any case: a hypervisor knows it without the log.
    fn own_pages(setup: Setup) -> Vec<usize> {
        let part = |address: u64, len: usize| {
            let at = (address - Guest::USER) as usize;
            at / PAGE..(at + len).div_ceil(PAGE)
        };
        let mut pages: Vec<_> = (0..2)
            .flat_map(|index| {
                let ring = addresses(index);
                let desc = if setup.packed { 0 } else { SIZE as usize * 16 };
                part(ring.desc, desc).chain(part(ring.avail, 6 + SIZE as usize * 2))
            })
            .collect();
        pages.extend(part(Guest::USER + BUFFERS[1], (u64::from(SIZE) * BUFFER) as usize));
        pages
    }
}

fn packet(number: u64) -> Vec<u8> {
    let mut bytes = testing::pattern(number, LEN as usize);
    bytes[..8].copy_from_slice(&number.to_ne_bytes());
    bytes
}

/// Sends from another guest, in one copy.
struct Sender {
    guest: testing::Guest,
    tx: driver::Queue<u64>,
    free: Vec<u64>,
    cell: Arc<VringCell>,
}

impl Sender {
    fn new() -> Self {
        let guest = testing::Guest::new(SIZE as u16);
        let cell = Arc::new(VringCell::new(1));
        let config = VringConfig { layout: guest.tx_layout.clone(), ..guest.config(testing::FEATURES) };
        testing::start(&cell, config);
        let tx = driver::Queue::new(guest.tx_layout.clone(), false);
        let free = (0..SIZE as usize).map(|i| guest.buffer(i, 2048)).collect();
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

/// A switch: what the guest sends, or another one, is what it receives, from number `next` on. Returns the number that another guest
/// would send next, and how many packets went in one copy; `dropped` counts those for which there was no buffer.
fn switch(
    cells: &[Arc<VringCell>],
    setup: Setup,
    mut next: u64,
    (stop, dropped): (&AtomicBool, &AtomicU64),
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
        // Nobody waits for a receiver without buffers.
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

/// Starts both virtqueues at `bases`, with the used rings logged or not.
fn start(peer: &mut Peer, setup: Setup, bases: [u32; 2], features: u64) {
    let features = FEATURES | features | if setup.packed { VIRTIO_F_RING_PACKED } else { 0 };
    assert_eq!(peer.ask(Request::SetFeatures(features)), 0);
    for index in 0..2 {
        for request in [
            Request::SetVringNum(state(index, SIZE)),
            Request::SetVringBase(state(index, bases[index as usize])),
            Request::SetVringAddr(addresses(index)),
            Request::SetVringEnable(state(index, 1)),
            Request::SetVringKick(VringFd { index: index as u8, fd: None }),
        ] {
            assert_eq!(peer.ask(request), 0);
        }
    }
}

/// As QEMU does it: the log, the feature, and the addresses once more, with the flag.
fn log(peer: &mut Peer, setup: Setup, fd: &OwnedFd, len: usize) {
    let area = LogArea { size: len as u64, offset: 0 };
    assert_eq!(peer.ask(Request::SetLogBase(area, fd.as_fd())), 0);
    let packed = if setup.packed { VIRTIO_F_RING_PACKED } else { 0 };
    assert_eq!(peer.ask(Request::SetFeatures(FEATURES | VHOST_F_LOG_ALL | packed)), 0);
    for index in 0..2 {
        let ring = addresses(index);
        let log = ring.used - Guest::USER + Guest::PHYSICAL;
        assert_eq!(peer.ask(Request::SetVringAddr(VringAddr { flags: VHOST_VRING_F_LOG, log, ..ring })), 0);
    }
}

/// The guest's memory in this file.
fn table(fd: BorrowedFd<'_>, len: usize) -> Request<BorrowedFd<'_>> {
    let region = MemoryRegion { guest: Guest::PHYSICAL, size: len as u64, user: Guest::USER, mmap_offset: 0 };
    Request::SetMemTable(vec![(region, fd)])
}

/// The dirty pages of the guest's memory, which are clean from now on.
fn take_dirty(log: &Mapping) -> Vec<usize> {
    let byte = |at: usize| {
        assert!(at < log.len());
        // SAFETY: the byte is in the mapping, and whoever shares it changes it atomically.
        unsafe { AtomicU8::from_ptr(log.base().as_ptr().add(at)) }.swap(0, Ordering::SeqCst)
    };
    let first = Guest::PHYSICAL as usize / PAGE;
    let bits = (0..log.len()).flat_map(|at| {
        let found = byte(at);
        (0..8).filter(move |bit| found >> bit & 1 == 1).map(move |bit| at * 8 + bit)
    });
    bits.map(|page| page.checked_sub(first).expect("a page of the guest")).collect()
}

fn copy_pages(from: &Mapping, to: &Mapping, pages: &[usize]) {
    let mut bytes = vec![0; PAGE];
    for page in pages {
        from.read_at(page * PAGE, &mut bytes);
        to.write_at(page * PAGE, &bytes);
    }
}

/// Pages in which two memories differ.
fn differing(a: &Mapping, b: &Mapping) -> Vec<usize> {
    let read = |mapping: &Mapping, page: usize| {
        let mut bytes = vec![0; PAGE];
        mapping.read_at(page * PAGE, &mut bytes);
        bytes
    };
    (0..a.len() / PAGE).filter(|&page| read(a, page) != read(b, page)).collect()
}

fn migrate(setup: Setup) {
    let dir = Dir::new();
    let backend = |name| Backend::start(BackendConfig::new(dir.file(name)), Box::new(())).unwrap();
    let (first, second) = (backend("first.sock"), backend("second.sock"));
    let mut guest = Migrating::new(setup);
    let len = guest.mapping().len();
    let (copy, copy_fd) = Mapping::memfd("copy", len, Hugepages::None).unwrap();
    let (bitmap, bitmap_fd) = Mapping::memfd("log", PAGE, Hugepages::None).unwrap();
    let fresh = if setup.packed { packed::FRESH_BASE } else { 0 };

    let (stop, dropped) = (AtomicBool::new(false), AtomicU64::new(0));
    let (bases, next) = std::thread::scope(|scope| {
        let ends = Ends(&stop);
        let switch = scope.spawn(|| switch(first.cells(), setup, 0, (&stop, &dropped)));
        let mut peer = Peer::negotiated(&dir.file("first.sock"));
        assert_eq!(peer.ask(table(guest.fd.as_fd(), len)), 0);
        start(&mut peer, setup, [fresh; 2], 0);
        guest.run(setup, 500);
        log(&mut peer, setup, &bitmap_fd, PAGE);
        let all: Vec<_> = (0..len / PAGE).collect();
        copy_pages(guest.mapping(), &copy, &all);
        for _ in 0..200 {
            let dirty = take_dirty(&bitmap);
            copy_pages(guest.mapping(), &copy, &dirty);
            guest.run(setup, 20);
        }
        let bases = [0, 1].map(|index| peer.base(index));
        let dirty = take_dirty(&bitmap);
        copy_pages(guest.mapping(), &copy, &dirty);
        copy_pages(guest.mapping(), &copy, &Migrating::own_pages(setup));
        drop(ends);
        let (next, in_one_copy) = switch.join().unwrap();
        assert_eq!(in_one_copy > 0, setup.pair, "before the migration");
        (bases, next)
    });
    assert_eq!(differing(guest.mapping(), &copy), [], "{setup:?}");
    assert_eq!(take_dirty(&bitmap), [], "nothing is written to a stopped ring");

    // The guest goes on in the other memory.
    let base = guest.mapping().base().as_ptr();
    // SAFETY: the test's own mapping is replaced by one of the same length, of a file that is as long.
    let replaced = unsafe {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        mmap(
            base.cast(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::FIXED,
            &copy_fd,
            0,
        )
    };
    assert_eq!(replaced.unwrap(), base.cast());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ends = Ends(&stop);
        let switch = scope.spawn(|| switch(second.cells(), setup, next, (&stop, &dropped)));
        let mut peer = Peer::negotiated(&dir.file("second.sock"));
        assert_eq!(peer.ask(table(copy_fd.as_fd(), len)), 0);
        start(&mut peer, setup, bases, 0);
        guest.run(setup, 500);
        // All that the guest has sent has arrived, but for what was dropped.
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
fn receiver_of_one_copy_migrates() {
    for packed in [false, true] {
        for engine in [Engine::Core, Engine::Stepped] {
            migrate(Setup { packed, engine, pair: true });
        }
    }
}
