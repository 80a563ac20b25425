//! A hostile front end with its guest on a real socket, an honest guest as its peer, and a third guest (the neighbour)
//! on the same worker and channels. A single thread runs all of them and the worker. The back end has its own control
//! thread.
#![allow(dead_code, reason = "each test binary and fuzz target uses its own part")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::{Binding, CopyDevice, Mode, Mover};
use offcore_mem::testing::TempDir;
use offcore_mem::{BURST, Burst, Hugepages, Packet, Pool};
use offcore_ring::RingError;
use offcore_ring::split::VIRTQ_DESC_F_NEXT;
use offcore_ring::{device::Direction, driver};
use offcore_stats::StageClock;
use offcore_vhost::connection::Connection;
use offcore_vhost::dequeue::Dequeued;
use offcore_vhost::features::*;
use offcore_vhost::message::{MemoryRegion, Reply, Request, VringAddr, VringFd, VringState};
use offcore_vhost::pair::Next;
use offcore_vhost::testing::{Guest, Receiver, Worker, pattern, start};
use offcore_vhost::{Backend, BackendConfig, Dequeue, Enqueue, Pair, VringCell, VringConfig};

use crate::neighbour::Neighbour;

/// Guest address of the hostile guest's memory, and its front-end address.
pub(crate) const PHYSICAL: u64 = 0x10_0000;
pub(crate) const USER: u64 = 0x7fff_0000_0000;
/// Length of this memory in bytes, and offset of the buffers in it.
pub(crate) const MEMORY: u64 = 1 << 20;
pub(crate) const BUFFERS: u64 = 0x4_0000;
/// Length of its dirty log in bytes.
pub(crate) const LOG: u64 = 4096;
/// Descriptors of each of its virtqueues, unless a script uses another number.
pub(crate) const SIZE: u16 = 64;
/// All features for checksums, segmentation and buffers. A dirty log needs a separate message.
pub(crate) const EVERYTHING: u64 =
    OFFERED & !(VIRTIO_F_RING_PACKED | VIRTIO_F_IN_ORDER | VIRTIO_NET_F_MQ | VHOST_F_LOG_ALL);

const CHUNKS: usize = 1024;
const PARTNER: u16 = 64;
/// Maximum time to wait for progress.
const DEADLINE: Duration = Duration::from_secs(10);

/// How copies are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// By the core, at once.
    Core,
    /// By a helper core.
    Helper,
    /// By an engine that delays, reorders, fails and loses copies.
    Faulty,
    /// From guest to guest in one copy, by the core.
    OneCopy,
    /// From guest to guest in one copy, by a helper core.
    OneCopyHelper,
}

pub(crate) const PATHS: [Path; 5] =
    [Path::Core, Path::Helper, Path::Faulty, Path::OneCopy, Path::OneCopyHelper];

impl Path {
    fn is_one_copy(self) -> bool {
        matches!(self, Self::OneCopy | Self::OneCopyHelper)
    }
}

/// The path from one virtqueue to another.
struct Way {
    dequeue: Dequeue,
    enqueue: Enqueue,
    pair: Pair,
    /// Number of packets, and of chains that were not valid packets.
    counts: Dequeued,
    held: Burst,
}

impl Way {
    fn new(worker: &mut Worker, from: &Arc<VringCell>, to: &Arc<VringCell>) -> Self {
        let mover = &mut worker.mover;
        Self {
            dequeue: Dequeue::attach(from, mover).unwrap(),
            enqueue: Enqueue::attach(to, mover).unwrap(),
            pair: Pair::new(mover),
            counts: Dequeued::default(),
            held: Burst::new(),
        }
    }

    fn round(&mut self, worker: &mut Worker, path: Path) {
        let mut ctx = worker.ctx();
        let mut next = Next::Ordinary;
        if path.is_one_copy() {
            let forwarded = self.pair.forward(&mut ctx, &mut self.dequeue, &mut self.enqueue, |_| ());
            self.counts.packets += forwarded.packets;
            self.counts.malformed += forwarded.malformed;
            self.counts.too_big += forwarded.too_long + forwarded.too_big;
            next = forwarded.next;
        }
        let taken = match next {
            Next::Nothing => Dequeued::default(),
            Next::Ordinary => self.dequeue.try_dequeue(&mut ctx, &mut self.held),
            Next::Finish => self.dequeue.drain(&mut ctx, &mut self.held),
        };
        self.counts.packets += taken.packets;
        self.counts.malformed += taken.malformed;
        self.counts.too_big += taken.too_big;
        self.enqueue.submit(&mut ctx, &mut self.held);
        ctx.cache.free_all(self.held.drain(..));
        self.enqueue.poll_completed(&mut ctx);
    }

    fn in_flight(&mut self, worker: &mut Worker) -> usize {
        let mover = &mut worker.mover;
        self.dequeue.in_flight(mover) + self.enqueue.in_flight(mover)
    }
}

/// The honest guest on the other side.
pub(crate) struct Partner {
    guest: Guest,
    cells: [Arc<VringCell>; 2],
    receiver: Receiver,
    tx: driver::RingDriver<u64>,
    free: Vec<u64>,
    sent: u64,
    /// Number of received packets, and the content of the last one without its virtio-net header.
    pub(crate) received: usize,
    pub(crate) latest: Vec<u8>,
}

impl Partner {
    fn new() -> Self {
        let guest = Guest::new(PARTNER);
        let cells = [0, 1].map(|queue| Arc::new(VringCell::new(queue)));
        for (cell, layout) in cells.iter().zip([&guest.layout, &guest.tx_layout]) {
            start(cell, VringConfig { layout: layout.clone(), ..guest.config(EVERYTHING) });
        }
        let receiver = Receiver::new(&guest, 2048);
        let tx = driver::RingDriver::new(guest.tx_layout.clone(), false);
        let free = (0..usize::from(PARTNER)).map(|i| guest.buffer(256 + i, 2048)).collect();
        Self { guest, cells, receiver, tx, free, sent: 0, received: 0, latest: Vec::new() }
    }

    /// Sends the next packet of `len` bytes and returns its content; returns `None` if no buffer is free.
    pub(crate) fn send(&mut self, len: usize) -> Option<Vec<u8>> {
        let address = self.free.pop()?;
        let bytes = pattern(self.sent, len);
        self.guest.write(address, &[&[0; 12], &bytes[..]].concat());
        self.tx.add(address, 12 + len as u32, Direction::Readable, address).unwrap();
        self.tx.publish();
        self.sent += 1;
        Some(bytes)
    }

    /// Processes received packets. All of them must be complete.
    fn turn(&mut self) {
        self.tx.used().unwrap();
        while let Some(used) = self.tx.pop().unwrap() {
            self.free.push(used.token);
        }
        while let Some(packet) = self.receiver.receive(&self.guest) {
            assert!(packet.len() >= 12 + 14, "a packet of {} bytes", packet.len());
            (self.received, self.latest) = (self.received + 1, packet[12..].to_vec());
        }
        for cell in &self.cells {
            assert_eq!(cell.report().broken, None, "an honest guest's virtqueue does not break");
        }
    }
}

/// State that is kept from one case to the next. The back end serves one front end after another.
pub(crate) struct Live {
    dir: TempDir,
    pub(crate) backend: Backend,
    pub(crate) worker: Worker,
    pub(crate) stepper: Stepper,
    bindings: [Binding; 3],
    /// The paths from the hostile guest and to it.
    ways: [Way; 2],
    pub(crate) partner: Partner,
    pub(crate) neighbour: Neighbour,
    pub(crate) path: Path,
    /// Whether the hostile guest's virtqueues are packed.
    pub(crate) packed: bool,
    /// Connection of the hostile front end, if any.
    pub(crate) connection: Option<Connection>,
    /// Memory of the hostile guest, and its current length.
    pub(crate) memory: OwnedFd,
    pub(crate) len: u64,
    /// Position in each of its virtqueues: the number of entries made available.
    pub(crate) next: [u32; 2],
    /// Name of its file, used to find it among the open files of the process.
    memory_name: String,
}

impl Live {
    pub(crate) fn new() -> Self {
        let dir = TempDir::new();
        let backend = Backend::start(BackendConfig::new(dir.file("vhost.sock")), Box::new(())).unwrap();
        let pool = Pool::new(CHUNKS, 2048, Hugepages::None).unwrap();
        let (mover, cache) = (Mover::new(), pool.cache());
        let mut worker = Worker { mover, cache, clock: StageClock::private(), burst: BURST };
        let (device, stepper) = CoreDevice::stepped();
        let helper = worker.mover.add_channel(device.open_channel(256).unwrap());
        let faulty = worker.add_faulty(1);
        let offload = |channel| Binding::new(Mode::Offload, vec![channel]);
        let bindings = [Binding::core(), offload(helper), offload(faulty)];
        let partner = Partner::new();
        let [rx, tx] = backend.cells() else { panic!("two virtqueues") };
        let ways =
            [Way::new(&mut worker, tx, &partner.cells[0]), Way::new(&mut worker, &partner.cells[1], rx)];
        let neighbour = Neighbour::new(Neighbour::guest(), &mut worker, &bindings[1]);
        let memory_name = format!("hostile-{:?}", std::thread::current().id());
        let memory = memory(&memory_name, MEMORY);
        let mut live = Self {
            dir,
            backend,
            worker,
            stepper,
            bindings,
            ways,
            partner,
            neighbour,
            path: Path::Core,
            packed: false,
            connection: None,
            memory,
            len: MEMORY,
            next: [0; 2],
            memory_name,
        };
        live.turn();
        live
    }

    /// Begins a case with this path and a new guest.
    pub(crate) fn begin(&mut self, path: Path, packed: bool) {
        (self.path, self.packed) = (path, packed);
        let binding = match path {
            Path::Core | Path::OneCopy => 0,
            Path::Helper | Path::OneCopyHelper => 1,
            Path::Faulty => 2,
        };
        for cell in self.backend.cells().iter().chain(&self.partner.cells) {
            cell.publish(|wanted| wanted.binding = self.bindings[binding].clone());
        }
        self.reboot();
    }

    /// Replaces the guest by a new one with separate memory and without a connection.
    pub(crate) fn reboot(&mut self) {
        let memory = memory(&self.memory_name, MEMORY);
        (self.connection, self.memory, self.len, self.next) = (None, memory, MEMORY, [0; 2]);
        self.until("the back end is free", |live| !live.backend.device().status().connected);
        self.ways.iter_mut().for_each(|way| way.counts = Dequeued::default());
    }

    // ---- the worker ----

    /// One round of the worker, with all guests.
    pub(crate) fn turn(&mut self) {
        self.neighbour.send(1);
        self.round();
    }

    fn round(&mut self) {
        let ctx = self.worker.ctx();
        ctx.mover.poll(ctx.clock);
        for way in &mut self.ways {
            way.round(&mut self.worker, self.path);
        }
        self.neighbour.turn(&mut self.worker);
        self.partner.turn();
    }

    /// Runs until a condition is true. The engine also makes progress.
    pub(crate) fn until(&mut self, what: &str, mut so: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            self.stepper.step();
            self.round();
            if so(self) {
                return;
            }
            assert!(Instant::now() < deadline, "no progress: {what} ({:?})", self.path);
            std::thread::yield_now();
        }
    }

    /// Number of packets from the hostile guest, and of chains that were not valid packets.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let counts = self.ways[0].counts;
        (counts.packets, counts.malformed + counts.too_big)
    }

    /// The error of the hostile guest's RX (0) or TX (1) virtqueue.
    pub(crate) fn broken(&self, queue: usize) -> Option<RingError> {
        self.backend.cells()[queue].report().broken
    }

    /// Lets the worker go to sleep and wake up.
    pub(crate) fn sleep(&mut self) {
        self.ways[0].dequeue.arm();
        self.ways[0].dequeue.disarm();
    }

    // ---- the front end ----

    /// Connects.
    pub(crate) fn connect(&mut self) {
        let socket = UnixStream::connect(self.backend.device().path()).unwrap();
        self.connection = Some(Connection::new(socket.into()).unwrap());
    }

    /// Sends a request, unless the connection has ended, and lets the worker run until the back end has processed it.
    pub(crate) fn send(&mut self, request: Request<BorrowedFd<'_>>, need_reply: bool) {
        let before = self.backend.device().status().messages;
        let Some(connection) = &self.connection else { return };
        if connection.send_request(request, need_reply).is_err() {
            return;
        }
        let begin = Instant::now();
        // The wait is limited: the request may follow an incomplete message, or the back end may be closing another
        // connection.
        while self.backend.device().status().messages == before && begin.elapsed() < Duration::from_millis(5)
        {
            self.stepper.step();
            self.turn();
            std::thread::yield_now();
        }
    }

    /// Sends a request and returns its acknowledgement or the value of its reply.
    pub(crate) fn ask(&mut self, request: Request<BorrowedFd<'_>>) -> u64 {
        let code = request.code();
        self.connection.as_ref().unwrap().send_request(request, true).unwrap();
        let mut reply = None;
        self.until("a reply", |live| {
            reply = live.connection.as_mut().unwrap().receive().unwrap();
            reply.is_some()
        });
        match reply.unwrap().reply(code).unwrap() {
            Reply::Value(value) => value,
            Reply::Vring(state) => state.num.into(),
            Reply::Inflight(area, _) => area.size,
        }
    }

    pub(crate) fn region(&self) -> MemoryRegion {
        MemoryRegion { guest: PHYSICAL, size: MEMORY, user: USER, mmap_offset: 0 }
    }

    /// Connects, negotiates and starts both virtqueues in the same way as an honest front end.
    pub(crate) fn start(&mut self, features: u64) {
        self.connect();
        let packed = if self.packed { VIRTIO_F_RING_PACKED } else { 0 };
        let table = self.memory.try_clone().unwrap();
        self.send(Request::SetProtocolFeatures(PROTOCOL_OFFERED), false);
        assert_eq!(self.ask(Request::SetFeatures(features | VIRTIO_F_VERSION_1 | packed)), 0);
        assert_eq!(self.ask(Request::SetMemTable(vec![(self.region(), table.as_fd())])), 0);
        for index in 0..2 {
            self.start_ring(index);
        }
    }

    /// Starts a virtqueue whose memory is zeroed.
    pub(crate) fn start_ring(&mut self, index: u32) {
        self.next[index as usize] = 0;
        let base = if self.packed { 0x8000_8000 } else { 0 };
        for request in [
            Request::SetVringNum(VringState { index, num: SIZE.into() }),
            Request::SetVringBase(VringState { index, num: base }),
            Request::SetVringAddr(addresses(index)),
            Request::SetVringKick(VringFd { index: index as u8, fd: None }),
            Request::SetVringEnable(VringState { index, num: 1 }),
        ] {
            let code = request.code();
            assert_eq!(self.ask(request), 0, "{code}: {}", self.backend.device().status());
        }
    }

    /// Returns a file for a dirty log that covers the hostile guest's memory and a little more. As with its memory, the
    /// file must be closed at the end.
    pub(crate) fn log(&self) -> OwnedFd {
        memory(&self.memory_name, LOG)
    }

    // ---- the guest ----

    /// Writes to the hostile guest's memory. Bytes beyond its current length are ignored.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let len = self.len.saturating_sub(offset).min(bytes.len() as u64) as usize;
        if len > 0 {
            rustix::io::pwrite(&self.memory, &bytes[..len], offset).unwrap();
        }
    }

    pub(crate) fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read = rustix::io::pread(&self.memory, &mut bytes, offset).unwrap();
        assert!(read == len || self.len < MEMORY);
        bytes
    }

    fn read_u16(&self, offset: u64) -> u16 {
        let bytes = self.read(offset, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    /// Writes a descriptor. `rest` is the next index for a split virtqueue, and the ID for a packed one.
    pub(crate) fn descriptor(&self, offset: u64, addr: u64, len: u32, flags: u16, rest: u16) {
        let (low, high) = if self.packed { (rest, flags) } else { (flags, rest) };
        let bytes = [&addr.to_le_bytes()[..], &len.to_le_bytes(), &low.to_le_bytes(), &high.to_le_bytes()];
        self.write(offset, &bytes.concat());
    }

    /// Makes a chain available in the RX (0) or TX (1) virtqueue of `size` descriptors. NEXT is set here, all other
    /// flags are set by the caller.
    pub(crate) fn offer(&mut self, queue: usize, size: u16, chain: &[(u64, u32, u16)]) {
        let table = queue as u64 * 0x1_0000;
        let next = self.next[queue];
        let more = |i: usize| if i + 1 < chain.len() { VIRTQ_DESC_F_NEXT } else { 0 };
        if self.packed {
            let at = |i: usize| (next + i as u32) % (2 * u32::from(size));
            for (i, &(addr, len, flags)) in chain.iter().enumerate().rev() {
                let (index, state) =
                    (at(i) % u32::from(size), if at(i) < size.into() { 1 << 7 } else { 1 << 15 });
                self.descriptor(
                    table + u64::from(index) * 16,
                    addr,
                    len,
                    flags | more(i) | state,
                    at(0) as u16 % size,
                );
            }
            self.next[queue] = at(chain.len());
            return;
        }
        // Each entry has eight descriptors, or all of them for a small queue.
        let heads = (u32::from(size) / 8).max(1);
        let head = (next % heads) as u16 * 8;
        for (i, &(addr, len, flags)) in chain.iter().enumerate() {
            let index = (head + i as u16) % size;
            self.descriptor(table + u64::from(index) * 16, addr, len, flags | more(i), (index + 1) % size);
        }
        let slot = next % u32::from(size);
        self.write(table + 0x4000 + 4 + u64::from(slot) * 2, &head.to_le_bytes());
        self.next[queue] = (next + 1) & 0xffff;
        self.write(table + 0x4002, &(self.next[queue] as u16).to_le_bytes());
    }

    /// Number of chains (split) or descriptors (packed) returned in a virtqueue that has not wrapped.
    pub(crate) fn returned(&self, queue: usize) -> usize {
        let table = queue as u64 * 0x1_0000;
        if !self.packed {
            return self.read_u16(table + 0x8002).into();
        }
        let used = |i: &u16| {
            self.read_u16(table + u64::from(*i) * 16 + 14) & (1 << 7 | 1 << 15) == (1 << 7 | 1 << 15)
        };
        (0..SIZE).filter(used).count()
    }

    // ---- the end of a case ----

    /// Replaces the hostile front end by an honest one, and checks that everything works and that all buffers are
    /// returned.
    pub(crate) fn finish(&mut self) {
        self.reboot();
        self.packed = false;
        self.until("the partner's packets", |live| live.partner.free.len() == usize::from(PARTNER));
        self.start(VIRTIO_NET_F_MRG_RXBUF);
        self.partner.latest.clear();
        let sent = pattern(1 << 20, 500);
        self.write(BUFFERS, &[&[0; 12], &sent[..]].concat());
        self.offer(1, SIZE, &[(PHYSICAL + BUFFERS, 512, 0)]);
        self.offer(0, SIZE, &[(PHYSICAL + BUFFERS + 4096, 2048, 2)]);
        self.until("a packet of the honest guest", |live| live.partner.latest == sent);
        let before = self.counts();
        let due = self.partner.send(700).expect("the partner has its buffers back");
        self.until("a packet to the honest guest", |live| live.returned(0) == 1);
        assert_eq!(self.read(BUFFERS + 4096 + 12, 700), due);
        assert_eq!((before, self.broken(0), self.broken(1)), ((1, 0), None, None));
        self.reboot();
        self.until("the neighbour's packets", |live| {
            live.neighbour.is_done() && live.ways.iter_mut().all(|way| way.in_flight(&mut live.worker) == 0)
        });
        let all: Vec<Packet> = std::iter::from_fn(|| self.worker.cache.take()).collect();
        assert_eq!(all.len(), CHUNKS, "packet buffers are missing");
        self.worker.cache.free_all(all);
        let name = self.memory_name.clone();
        // The remaining file belongs to the next guest.
        self.until("the hostile guest's file is closed", |_| open_files(&name) == 1);
    }
}

/// How many open files with this name the process has.
fn open_files(name: &str) -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    links.filter(|link| link.to_string_lossy().contains(name)).count()
}

fn memory(name: &str, len: u64) -> OwnedFd {
    // Not sealed, so that the guest can truncate it.
    let memory = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, len).unwrap();
    memory
}

/// Front-end addresses of a virtqueue's parts.
pub(crate) fn addresses(index: u32) -> VringAddr {
    let desc = USER + u64::from(index) * 0x1_0000;
    VringAddr { index, flags: 0, desc, avail: desc + 0x4000, used: desc + 0x8000, log: 0 }
}
