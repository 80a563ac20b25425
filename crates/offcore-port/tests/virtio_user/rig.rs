//! A port and its back end, whose data path is part of the test.

use std::sync::Arc;

use offcore_mem::Burst;
use offcore_port::spec::{PortSpec, VirtioUserSpec};
use offcore_port::virtio_user::VirtioUserPort;
use offcore_port::{DropReason, RxQueue, TxQueue};
use offcore_ring::Layout;
use offcore_ring::device::{Buffer, Chain, DeviceQueue, Direction};
use offcore_ring::split::device;
use offcore_vhost::backend::{Backend, BackendConfig};
use offcore_vhost::cell::VringConfig;
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader};

use crate::common::{self, TempDir, Worker, pool, until};

pub(crate) const ROOM: usize = 2048 - 256;

/// The device side of one virtqueue, operated by the test.
pub(crate) struct Played {
    pub(crate) config: Arc<VringConfig>,
    pub(crate) queue: device::SplitDevice,
    pub(crate) direction: Direction,
}

impl Played {
    /// Returns virtqueue `index` of the device, once the driver has started it.
    pub(crate) fn new(backend: &Backend, index: usize) -> Self {
        let mut found = None;
        until("a virtqueue starts", || {
            found = backend.cells()[index].wanted().vring.filter(|vring| vring.enabled);
            found.is_some()
        });
        let config = found.unwrap();
        let Layout::Split(layout) = config.layout.clone() else { panic!("no packed ring was asked for") };
        let queue = device::SplitDevice::new(layout, config.base as u16, false, false);
        let direction = if index.is_multiple_of(2) { Direction::Writable } else { Direction::Readable };
        Self { config, queue, direction }
    }

    pub(crate) fn available(&mut self) -> usize {
        self.queue.available(u16::MAX).unwrap().into()
    }

    /// Returns the next chain and its buffers.
    pub(crate) fn take(&mut self) -> (Chain, Vec<Buffer>) {
        assert!(self.queue.available(1).unwrap() > 0, "the driver has made a buffer available");
        let mut buffers = Vec::new();
        let memory = &self.config.memory;
        let chain =
            self.queue.walk(0, memory, self.direction, &mut 64, |buffer| buffers.push(buffer)).unwrap();
        self.queue.consume(chain.entries);
        (chain, buffers)
    }

    /// Fills a chain with these bytes and returns it, claiming that `len` bytes were written.
    pub(crate) fn fill(&mut self, bytes: &[u8], len: usize) {
        let (chain, buffers) = self.take();
        let mut rest = bytes;
        for buffer in buffers {
            let (now, later) = rest.split_at(rest.len().min(buffer.len as usize));
            // SAFETY: `walk` found the complete buffer in guest memory, which the configuration keeps mapped. The
            // driver has made it available to the device, and `now` is not longer.
            unsafe { buffer.addr.as_ptr().copy_from_nonoverlapping(now.as_ptr(), now.len()) };
            rest = later;
        }
        assert!(rest.is_empty(), "{} of {} bytes do not fit the chain", rest.len(), bytes.len());
        self.queue.push_used(chain, len as u32);
        self.queue.publish();
    }

    /// Fills a chain with this header and frame and returns it, claiming that `len` bytes were written.
    pub(crate) fn give(&mut self, header: NetHeader, frame: &[u8], len: usize) {
        self.fill(&[&header.to_bytes(), frame].concat(), len);
    }

    /// Gives the driver a packet of one buffer without offload requests.
    pub(crate) fn send(&mut self, frame: &[u8]) {
        self.give(NetHeader { num_buffers: 1, ..NetHeader::default() }, frame, HEADER_LEN + frame.len());
    }

    /// Gives the driver a packet in as many buffers as necessary, as a back end with mergeable buffers does.
    pub(crate) fn send_merged(&mut self, header: NetHeader, frame: &[u8]) {
        let num_buffers = (HEADER_LEN + frame.len()).div_ceil(HEADER_LEN + ROOM) as u16;
        let bytes = [&NetHeader { num_buffers, ..header }.to_bytes(), frame].concat();
        bytes.chunks(HEADER_LEN + ROOM).for_each(|part| self.fill(part, part.len()));
    }

    /// Returns the next packet that the driver sends, with its header and the number of its buffers.
    pub(crate) fn receive_with(&mut self) -> (NetHeader, Vec<u8>, usize) {
        let (chain, buffers) = self.take();
        let count = buffers.len();
        let mut bytes = Vec::new();
        for buffer in buffers {
            let mut part = vec![0; buffer.len as usize];
            // SAFETY: as in `fill`, with the copy in the other direction.
            unsafe { buffer.addr.as_ptr().copy_to_nonoverlapping(part.as_mut_ptr(), part.len()) };
            bytes.extend(part);
        }
        self.queue.push_used(chain, 0);
        self.queue.publish();
        let header = NetHeader::from_bytes(bytes.first_chunk().unwrap());
        (header, bytes.split_off(HEADER_LEN), count)
    }

    /// Returns the next packet that the driver sends, which must not have an offload request.
    pub(crate) fn receive(&mut self) -> Vec<u8> {
        let (header, frame, _) = self.receive_with();
        assert_eq!(header, NetHeader::default());
        frame
    }
}

pub(crate) fn spec(text: &str) -> VirtioUserSpec {
    let PortSpec::VirtioUser(spec) = text.parse().unwrap() else { panic!("{text}") };
    spec
}

pub(crate) fn start(dir: &TempDir, features: Option<u64>, queue_pairs: u16) -> Backend {
    let mut config = BackendConfig { queue_pairs, ..BackendConfig::new(dir.file("s")) };
    config.features = features.unwrap_or(config.features);
    Backend::start(config, Box::new(())).unwrap()
}

/// A connected port, its first queues, and the device sides of their virtqueues.
pub(crate) struct Setup {
    pub(crate) dir: TempDir,
    pub(crate) worker: Worker,
    pub(crate) port: VirtioUserPort,
    pub(crate) rx: Box<dyn RxQueue>,
    pub(crate) tx: Box<dyn TxQueue>,
    pub(crate) backend: Option<Backend>,
    pub(crate) to_us: Played,
    pub(crate) from_us: Played,
    pub(crate) chunks: usize,
}

impl Setup {
    pub(crate) fn new(options: &str) -> Self {
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
        let mut setup = Self { dir, worker, port, rx, tx, backend: Some(backend), to_us, from_us, chunks };
        assert!(setup.receive().is_empty(), "the first call fills the ring");
        setup
    }

    pub(crate) fn receive(&mut self) -> Vec<Vec<u8>> {
        let mut burst = Burst::new();
        self.worker.rx(&mut *self.rx, &mut burst);
        let pool = self.worker.cache.pool();
        let frames = burst.iter().map(|p| common::frame(pool, p).1).collect();
        self.worker.free(&mut burst);
        frames
    }

    /// Receives one packet; returns its header and its bytes.
    pub(crate) fn receive_one(&mut self) -> (NetHeader, Vec<u8>) {
        let mut burst = Burst::new();
        self.worker.rx(&mut *self.rx, &mut burst);
        assert_eq!(burst.len(), 1);
        let packet = common::frame(self.worker.cache.pool(), &burst[0]);
        self.worker.free(&mut burst);
        packet
    }

    /// Sends `frames`; returns the number of frames that were not taken.
    pub(crate) fn send(&mut self, frames: &[Vec<u8>]) -> usize {
        let mut left = 0;
        for part in frames.chunks(64) {
            let mut burst: Burst =
                part.iter().map(|frame| self.worker.packet_with(&NetHeader::default(), frame)).collect();
            self.worker.tx(&mut *self.tx, &mut burst);
            left += burst.len();
            self.worker.free(&mut burst);
        }
        left
    }

    pub(crate) fn rx_dropped(&self, reason: DropReason) -> u64 {
        self.rx.counters().dropped(reason)
    }

    /// Checks that the port still receives packets.
    pub(crate) fn still_receives(&mut self) {
        self.to_us.send(&frame(77));
        assert_eq!(self.receive(), [frame(77)]);
    }

    /// Disconnects the back end.
    pub(crate) fn lose(&mut self) {
        self.backend = None;
        until("the port notices", || !self.port.is_connected());
    }

    /// Connects another back end.
    pub(crate) fn resumed(&mut self) {
        let backend = start(&self.dir, None, 1);
        until("the port is connected again", || self.port.is_connected());
        (self.to_us, self.from_us) = (Played::new(&backend, 0), Played::new(&backend, 1));
        self.backend = Some(backend);
    }

    /// Connects another back end, and checks that packets pass in both directions and that no packet buffer was lost.
    pub(crate) fn comes_back(mut self) {
        self.resumed();
        self.receive();
        self.still_receives();
        assert_eq!(self.send(&frames(1)), 0);
        assert_eq!(self.from_us.receive(), frame(0));
        self.close();
    }

    /// Closes everything, and checks that no packet buffer was lost.
    pub(crate) fn close(self) {
        let Self { mut worker, port, rx, tx, backend, chunks, .. } = self;
        drop((rx, tx));
        drop(port);
        assert_eq!(worker.free_chunks(), chunks);
        drop(backend);
    }
}

pub(crate) fn frame(n: usize) -> Vec<u8> {
    (0..60 + n * 37 % 1400).map(|i| (i * 7 + n) as u8).collect()
}

pub(crate) fn frames(count: usize) -> Vec<Vec<u8>> {
    (0..count).map(frame).collect()
}

pub(crate) fn long(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251 + len) as u8).collect()
}

/// Lengths around those at which a packet needs one more buffer, and the longest one.
pub(crate) const LONG: [usize; 8] =
    [ROOM, ROOM + 1, 2 * ROOM + 12, 2 * ROOM + 13, 9014, 9018, 40_000, 65_557];
