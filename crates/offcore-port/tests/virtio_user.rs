//! The virtio-user port against a back end whose data path is played by hand: it can do wrong what a real one does not.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::sync::Arc;

use common::{TempDir, Worker, pool, until};
use offcore_mem::Burst;
use offcore_port::spec::{PortSpec, VirtioUserSpec};
use offcore_port::virtio_user::VirtioUserPort;
use offcore_port::{Drop, Port, RxQueue, TxQueue};
use offcore_ring::Layout;
use offcore_ring::device::{Buffer, Chain, DeviceQueue, Direction};
use offcore_ring::split::device;
use offcore_vhost::backend::{Backend, BackendConfig, DeviceEvents};
use offcore_vhost::cell::VringConfig;
use offcore_vhost::features::NET_MRG_RXBUF;
use offcore_wire::MacAddr;
use offcore_wire::checksum::Sum;
use offcore_wire::virtio_net::{F_NEEDS_CSUM, GSO_TCPV4, HEADER_LEN, NetHeader};

const ROOM: usize = 2048 - 256;

struct NoEvents;

impl DeviceEvents for NoEvents {}

/// One virtqueue, played by the test.
struct Played {
    config: Arc<VringConfig>,
    queue: device::Queue,
    direction: Direction,
}

impl Played {
    /// Virtqueue `index` of the device, once the driver has started it.
    fn new(backend: &Backend, index: usize) -> Self {
        let mut found = None;
        until("a virtqueue starts", || {
            found = backend.cells()[index].wanted().vring.filter(|vring| vring.enabled);
            found.is_some()
        });
        let config = found.unwrap();
        let Layout::Split(layout) = config.layout.clone() else { panic!("no packed ring was asked for") };
        let queue = device::Queue::new(layout, config.base as u16, false, false);
        let direction = if index.is_multiple_of(2) { Direction::Writable } else { Direction::Readable };
        Self { config, queue, direction }
    }

    fn available(&mut self) -> usize {
        self.queue.available(u16::MAX).unwrap().into()
    }

    fn take(&mut self) -> (u16, Buffer) {
        assert!(self.queue.available(1).unwrap() > 0, "the driver has made a buffer available");
        let head = self.queue.head(0).unwrap();
        let buffer = self.queue.single(0, &self.config.memory, self.direction).unwrap().unwrap().0;
        self.queue.consume(1);
        (head, buffer)
    }

    /// Fills a buffer with this header and frame and returns it, claiming `len` bytes.
    fn give(&mut self, header: NetHeader, frame: &[u8], len: usize) {
        let (head, buffer) = self.take();
        let bytes = [&header.to_bytes(), frame].concat();
        assert!(bytes.len() <= buffer.len as usize, "{} bytes into a buffer of {}", bytes.len(), buffer.len);
        // SAFETY: `single` found the whole buffer in guest memory, which the configuration keeps; the driver has lent it
        // to us, and the pieces are as long as was just checked.
        unsafe { buffer.addr.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.queue.push_used(Chain::one(head), len as u32);
        self.queue.publish();
    }

    /// Gives an ordinary packet.
    fn send(&mut self, frame: &[u8]) {
        self.give(NetHeader { num_buffers: 1, ..NetHeader::default() }, frame, HEADER_LEN + frame.len());
    }

    /// The next packet that the driver sends.
    fn receive(&mut self) -> Vec<u8> {
        let (head, buffer) = self.take();
        let mut bytes = vec![0; buffer.len as usize];
        // SAFETY: as in `give`, the other way round.
        unsafe { buffer.addr.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        self.queue.push_used(Chain::one(head), 0);
        self.queue.publish();
        assert_eq!(bytes[..HEADER_LEN], [0; HEADER_LEN]);
        bytes.split_off(HEADER_LEN)
    }
}

fn spec(text: &str) -> VirtioUserSpec {
    match text.parse().unwrap() {
        PortSpec::VirtioUser(spec) => spec,
        other => panic!("{other}"),
    }
}

fn start(dir: &TempDir, features: Option<u64>, queue_pairs: u16) -> Backend {
    let mut config = BackendConfig { queue_pairs, ..BackendConfig::new(dir.file("s")) };
    config.features = features.unwrap_or(config.features);
    Backend::start(config, Box::new(NoEvents)).unwrap()
}

/// A connected port, its first queues, and the device's side of them.
struct Setup {
    dir: TempDir,
    worker: Worker,
    port: VirtioUserPort,
    rx: Box<dyn RxQueue>,
    tx: Box<dyn TxQueue>,
    backend: Backend,
    to_us: Played,
    from_us: Played,
    chunks: usize,
}

impl Setup {
    fn new(options: &str) -> Self {
        let dir = TempDir::new();
        let backend = start(&dir, None, 1);
        let pool = pool(2048);
        let mut worker = Worker::new(pool);
        let chunks = worker.free_chunks();
        let text = format!("virtio-user:{}{options}", dir.file("s").display());
        let mut port = VirtioUserPort::open(&spec(&text), pool).unwrap_or_else(|e| panic!("{e}"));
        until("the port is connected", || port.is_connected());
        let rx = worker.rx_queue(&mut port, 0).unwrap();
        let tx = worker.tx_queue(&mut port, 0).unwrap();
        let (to_us, from_us) = (Played::new(&backend, 0), Played::new(&backend, 1));
        let mut setup = Self { dir, worker, port, rx, tx, backend, to_us, from_us, chunks };
        assert!(setup.receive().is_empty(), "the first call fills the ring");
        setup
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        let mut burst = Burst::new();
        self.worker.rx(&mut *self.rx, &mut burst);
        let frames = burst.iter().map(|p| p.bytes().to_vec()).collect();
        self.worker.free(&mut burst);
        frames
    }

    /// Sends `frames`; how many were not taken.
    fn send(&mut self, frames: &[Vec<u8>]) -> usize {
        let mut left = 0;
        for part in frames.chunks(64) {
            let mut burst: Burst = part.iter().map(|frame| self.worker.packet(frame)).collect();
            self.worker.tx(&mut *self.tx, &mut burst);
            left += burst.len();
            self.worker.free(&mut burst);
        }
        left
    }

    fn rx_dropped(&self, reason: Drop) -> u64 {
        self.rx.counters().dropped(reason)
    }

    /// A packet still comes through, after whatever happened before.
    fn still_receives(&mut self) {
        self.to_us.send(&frame(77));
        assert_eq!(self.receive(), [frame(77)]);
    }

    /// Closes everything; no packet buffer may be lost.
    fn close(self) {
        let Self { mut worker, port, rx, tx, backend, chunks, .. } = self;
        drop((rx, tx));
        drop(port);
        assert_eq!(worker.free_chunks(), chunks);
        drop(backend);
    }
}

fn frame(n: usize) -> Vec<u8> {
    (0..60 + n * 37 % 1400).map(|i| (i * 7 + n) as u8).collect()
}

fn frames(count: usize) -> Vec<Vec<u8>> {
    (0..count).map(frame).collect()
}

#[test]
fn packets_pass_both_ways() {
    for options in ["", ",mrg=off", ",event_idx=off,queue_size=64", ",queue_size=1024"] {
        let mut setup = Setup::new(options);
        let size = usize::from(spec(&format!("virtio-user:x{options}")).queue_size);
        assert_eq!(setup.to_us.available(), size, "the RX ring is kept full");
        // Often enough for the rings to come round a few times.
        for _ in 0..60 {
            let some = frames(40);
            some.iter().for_each(|frame| setup.to_us.send(frame));
            assert_eq!(setup.receive(), some);
            assert_eq!(setup.send(&some), 0);
            let sent: Vec<Vec<u8>> = some.iter().map(|_| setup.from_us.receive()).collect();
            assert_eq!(sent, some);
        }
        let bytes = 60 * frames(40).iter().map(Vec::len).sum::<usize>() as u64;
        for counters in [
            (setup.rx.counters().packets(), setup.rx.counters().bytes(), setup.rx.counters().dropped_total()),
            (setup.tx.counters().packets(), setup.tx.counters().bytes(), setup.tx.counters().dropped_total()),
        ] {
            assert_eq!(counters, (2400, bytes, 0));
        }
        setup.close();
    }
}

#[test]
fn a_call_receives_no_more_than_asked_for() {
    let mut setup = Setup::new("");
    let some = frames(200);
    some.iter().for_each(|frame| setup.to_us.send(frame));
    let mut received = Vec::new();
    for expected in [64, 64, 64, 8] {
        let burst = setup.receive();
        assert_eq!(burst.len(), expected);
        received.extend(burst);
    }
    assert_eq!(received, some);
    setup.close();
}

#[test]
fn a_full_ring_leaves_packets_with_the_sender() {
    let mut setup = Setup::new(",queue_size=64");
    assert_eq!(setup.send(&frames(100)), 36);
    assert_eq!(setup.tx.counters().packets(), 64);
    for n in 0..10 {
        assert_eq!(setup.from_us.receive(), frame(n));
    }
    assert_eq!(setup.send(&frames(100)), 90, "ten descriptors have come back");
    assert!(!setup.tx.stop(&mut setup.worker.ctx()), "packets are in flight");
    while setup.from_us.available() > 0 {
        setup.from_us.receive();
    }
    assert!(setup.tx.stop(&mut setup.worker.ctx()));
    setup.close();
}

#[test]
fn claimed_lengths_are_checked() {
    let mut setup = Setup::new("");
    let good = NetHeader { num_buffers: 1, ..NetHeader::default() };
    let limit = HEADER_LEN + ROOM;
    for (len, ok) in [
        (0, false),
        (HEADER_LEN - 1, false),
        (HEADER_LEN, false),
        (HEADER_LEN + 13, false),
        (HEADER_LEN + 14, true),
        (limit, true),
        (limit + 1, false),
        (65536 + HEADER_LEN + 60, false),
        (u32::MAX as usize, false),
    ] {
        let before = setup.rx_dropped(Drop::Malformed);
        setup.to_us.give(good, &[1; 60], len);
        let received = setup.receive();
        let lengths: Vec<usize> = received.iter().map(Vec::len).collect();
        if ok {
            assert_eq!(lengths, [len - HEADER_LEN]);
        } else {
            assert!(lengths.is_empty(), "{len} bytes claimed");
        }
        assert_eq!(setup.rx_dropped(Drop::Malformed) - before, u64::from(!ok), "{len} bytes claimed");
    }
    setup.still_receives();
    setup.close();
}

#[test]
fn impossible_headers_are_counted() {
    let mut setup = Setup::new("");
    let good = NetHeader { num_buffers: 1, ..NetHeader::default() };
    for bad in [
        NetHeader { num_buffers: 0, ..good },
        NetHeader { num_buffers: 257, ..good },
        NetHeader { num_buffers: u16::MAX, ..good },
        NetHeader { gso_type: GSO_TCPV4, gso_size: 1448, ..good },
        NetHeader { flags: F_NEEDS_CSUM, csum_start: 59, csum_offset: 0, ..good },
        NetHeader { flags: F_NEEDS_CSUM, csum_start: u16::MAX, csum_offset: u16::MAX, ..good },
    ] {
        let before = setup.rx_dropped(Drop::Malformed);
        setup.to_us.give(bad, &[1; 60], HEADER_LEN + 60);
        assert!(setup.receive().is_empty(), "{bad:?}");
        assert_eq!(setup.rx_dropped(Drop::Malformed) - before, 1, "{bad:?}");
        setup.still_receives();
    }
    setup.close();
}

#[test]
fn an_open_checksum_is_closed() {
    let mut setup = Setup::new("");
    let open = NetHeader {
        num_buffers: 1,
        flags: F_NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 6,
        ..Default::default()
    };
    let mut packet = frame(3);
    packet[40..42].fill(0);
    setup.to_us.give(open, &packet, HEADER_LEN + packet.len());
    let received = setup.receive().remove(0);
    assert!(Sum::of(&received[34..]).is_valid());
    assert_eq!((&received[..40], &received[42..]), (&packet[..40], &packet[42..]));
    setup.close();
}

#[test]
fn packets_of_several_buffers_are_dropped_as_a_whole() {
    let mut setup = Setup::new("");
    let several = NetHeader { num_buffers: 3, ..NetHeader::default() };
    setup.to_us.send(&frame(1));
    setup.to_us.give(several, &[7; 1000], HEADER_LEN + 1000);
    // The first buffer and its followers may come in different calls.
    assert_eq!(setup.receive(), [frame(1)]);
    setup.to_us.give(NetHeader::default(), &[7; 1000], HEADER_LEN + 1000);
    assert!(setup.receive().is_empty());
    setup.to_us.give(NetHeader::default(), &[7; 1000], 5);
    setup.to_us.send(&frame(2));
    assert_eq!(setup.receive(), [frame(2)]);
    assert_eq!((setup.rx_dropped(Drop::TooBig), setup.rx.counters().dropped_total()), (1, 1));
    setup.close();

    // Without mergeable buffers the number means nothing.
    let mut setup = Setup::new(",mrg=off");
    setup.to_us.give(several, &frame(1), HEADER_LEN + frame(1).len());
    assert_eq!(setup.receive(), [frame(1)]);
    setup.close();
}

#[test]
fn a_ring_that_makes_no_sense_is_broken_alone() {
    let mut setup = Setup::new("");
    // A chain that was not made available.
    setup.to_us.send(&frame(1));
    setup.to_us.queue.push_used(Chain::one(4000), 60);
    setup.to_us.queue.publish();
    assert_eq!(setup.receive(), [frame(1)], "what came before is good");
    let status = setup.port.status();
    assert!(status.contains("virtqueue 0 is broken: used element names chain 4000"), "{status}");
    assert!(setup.receive().is_empty());
    // The other one goes on.
    assert_eq!(setup.send(&frames(3)), 0);
    assert_eq!(setup.from_us.receive(), frame(0));

    // An index that is ahead of what is in flight: a third element where two packets are left.
    for _ in 0..3 {
        setup.from_us.queue.push_used(Chain::one(0), 0);
    }
    setup.from_us.queue.publish();
    assert_eq!(setup.send(&frames(1)), 0);
    assert_eq!(setup.tx.counters().dropped(Drop::Down), 1);
    assert_eq!(setup.port.broken().len(), 2);
    assert!(setup.tx.stop(&mut setup.worker.ctx()), "nothing comes back from a broken ring");
    setup.close();
}

#[test]
fn a_chain_returned_twice_breaks_its_ring() {
    let mut setup = Setup::new("");
    assert_eq!(setup.send(&frames(2)), 0);
    let (head, _) = setup.from_us.take();
    setup.from_us.queue.push_used(Chain::one(head), 0);
    setup.from_us.queue.push_used(Chain::one(head), 0);
    setup.from_us.queue.publish();
    setup.tx.poll(&mut setup.worker.ctx());
    assert_eq!(setup.port.broken().len(), 1);
    setup.close();
}

#[test]
fn a_dry_pool_is_no_loss() {
    let mut setup = Setup::new("");
    let mut hoard: Vec<_> = std::iter::from_fn(|| setup.worker.cache.take()).collect();
    for n in 0..256 {
        setup.to_us.send(&frame(n));
    }
    // Packets received are packet buffers, so hold on to them, too.
    for _ in 0..5 {
        let mut burst = Burst::new();
        setup.worker.rx(&mut *setup.rx, &mut burst);
        hoard.extend(burst);
    }
    assert_eq!(setup.rx.counters().packets(), 256);
    assert_eq!(setup.to_us.available(), 0, "there is nothing to fill the ring with");
    setup.worker.cache.free_all(hoard);
    assert!(setup.receive().is_empty());
    assert_eq!(setup.to_us.available(), 256);
    setup.still_receives();
    assert_eq!(setup.rx.counters().dropped_total(), 0);
    setup.close();
}

#[test]
fn a_back_end_that_goes_away_comes_back() {
    let mut setup = Setup::new("");
    assert_eq!(setup.send(&frames(10)), 0);
    setup.to_us.send(&frame(1));
    // Its end, with packets in flight both ways.
    let Setup { dir, mut worker, port, mut rx, mut tx, backend, chunks, .. } = setup;
    drop(backend);
    until("the port notices", || !port.is_connected());
    assert!(port.status().contains("waiting for a back end"), "{}", port.status());
    let mut burst = Burst::from_iter([worker.packet(&frame(2))]);
    worker.tx(&mut *tx, &mut burst);
    assert!(burst.is_empty());
    assert_eq!(tx.counters().dropped(Drop::Down), 1);
    worker.rx(&mut *rx, &mut burst);
    assert!(burst.is_empty());
    assert_eq!(worker.free_chunks(), chunks, "both queues have taken their packet buffers back");

    let backend = start(&dir, None, 1);
    until("the port is connected again", || port.is_connected());
    let (to_us, from_us) = (Played::new(&backend, 0), Played::new(&backend, 1));
    let mut setup = Setup { dir, worker, port, rx, tx, backend, to_us, from_us, chunks };
    setup.receive();
    setup.still_receives();
    assert_eq!(setup.send(&frames(1)), 0);
    assert_eq!(setup.from_us.receive(), frame(0));
    setup.close();
}

#[test]
fn a_broken_ring_is_whole_again_with_a_new_back_end() {
    let mut setup = Setup::new("");
    setup.to_us.queue.push_used(Chain::one(4000), 60);
    setup.to_us.queue.publish();
    assert!(setup.receive().is_empty());
    assert_eq!(setup.port.broken().len(), 1);
    let Setup { dir, worker, port, rx, tx, backend, chunks, .. } = setup;
    drop(backend);
    until("the port notices", || !port.is_connected());
    assert!(port.broken().is_empty());
    let backend = start(&dir, None, 1);
    until("the port is connected again", || port.is_connected());
    let (to_us, from_us) = (Played::new(&backend, 0), Played::new(&backend, 1));
    let mut setup = Setup { dir, worker, port, rx, tx, backend, to_us, from_us, chunks };
    setup.receive();
    setup.still_receives();
    setup.close();
}

#[test]
fn queues_may_outlive_their_port() {
    let mut setup = Setup::new("");
    assert_eq!(setup.send(&frames(10)), 0);
    let Setup { mut worker, port, mut rx, mut tx, chunks, .. } = setup;
    drop(port);
    let mut burst = Burst::from_iter([worker.packet(&frame(0))]);
    worker.tx(&mut *tx, &mut burst);
    assert_eq!(tx.counters().dropped(Drop::Down), 1);
    worker.rx(&mut *rx, &mut burst);
    assert_eq!(worker.free_chunks(), chunks);
}

#[test]
fn draining_takes_what_is_there_and_nothing_new() {
    let mut setup = Setup::new("");
    for n in 0..100 {
        setup.to_us.send(&frame(n));
    }
    let available = setup.to_us.available();
    let mut received = Vec::new();
    for left in [36, 0, 0] {
        let mut burst = Burst::new();
        assert_eq!(setup.rx.drain(&mut setup.worker.ctx(), &mut burst), left);
        received.extend(burst.iter().map(|p| p.bytes().to_vec()));
        setup.worker.free(&mut burst);
    }
    assert_eq!(received, frames(100));
    assert_eq!(setup.to_us.available(), available, "no buffers are made available any more");
    setup.close();
}

#[test]
fn two_queue_pairs_are_two_queue_pairs() {
    let dir = TempDir::new();
    let backend = start(&dir, None, 2);
    let pool = pool(2048);
    let mut worker = Worker::new(pool);
    let text = format!("virtio-user:{},queues=2,mac=02:00:00:00:00:07", dir.file("s").display());
    let mut port = VirtioUserPort::open(&spec(&text), pool).unwrap();
    until("the port is connected", || port.is_connected());
    assert_eq!((port.queues(), port.mac()), (2, MacAddr::local(7)));
    for queue in 0..2u16 {
        let mut rx = worker.rx_queue(&mut port, queue).unwrap();
        let mut tx = worker.tx_queue(&mut port, queue).unwrap();
        let mut burst = Burst::new();
        worker.rx(&mut *rx, &mut burst);
        Played::new(&backend, usize::from(queue) * 2).send(&frame(queue.into()));
        worker.rx(&mut *rx, &mut burst);
        assert_eq!(burst.len(), 1);
        assert_eq!(burst[0].bytes(), frame(queue.into()));
        worker.tx(&mut *tx, &mut burst);
        assert_eq!(Played::new(&backend, usize::from(queue) * 2 + 1).receive(), frame(queue.into()));
    }
    assert!(worker.rx_queue(&mut port, 0).is_err(), "a queue is given out once");
}

#[test]
fn a_back_end_may_come_later_or_be_the_client() {
    let dir = TempDir::new();
    let pool = pool(1024);
    let text = format!("virtio-user:{}", dir.file("s").display());
    let port = VirtioUserPort::open(&spec(&text), pool).unwrap();
    assert!(!port.is_connected());
    assert!(port.status().contains("waiting for a back end at"), "{}", port.status());
    let backend = start(&dir, None, 1);
    until("the port is connected", || port.is_connected());
    drop(port);
    drop(backend);

    let dir = TempDir::new();
    let text = format!("virtio-user:{},server", dir.file("s").display());
    let port = VirtioUserPort::open(&spec(&text), pool).unwrap();
    assert!(port.status().contains("waiting for a back end to connect to"), "{}", port.status());
    let config =
        BackendConfig { role: offcore_vhost::connection::Role::Client, ..BackendConfig::new(dir.file("s")) };
    let _backend = Backend::start(config, Box::new(NoEvents)).unwrap();
    until("the port is connected", || port.is_connected());
}

#[test]
fn what_waiting_would_not_help_is_an_error() {
    let dir = TempDir::new();
    let pool = pool(1024);
    let text = |options: &str| format!("virtio-user:{}{options}", dir.file("s").display());
    let error = |options: &str| VirtioUserPort::open(&spec(&text(options)), pool).unwrap_err().to_string();
    let _backend = start(&dir, Some(NET_MRG_RXBUF), 1);
    let message = error(",queues=2");
    assert!(message.contains("queue pairs") && message.contains("expected at least 2"), "{message}");
    let message = error(",server");
    assert!(message.contains("in use"), "{message}");
    std::fs::write(dir.file("file"), b"").unwrap();
    let text = format!("virtio-user:{},server", dir.file("file").display());
    let message = VirtioUserPort::open(&spec(&text), pool).unwrap_err().to_string();
    assert!(message.contains("not a socket"), "{message}");
}
