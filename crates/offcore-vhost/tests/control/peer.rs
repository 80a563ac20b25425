//! A front end that sends arbitrary messages, and helpers for the tests.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub(crate) use offcore_mem::testing::TempDir as Dir;
use offcore_mem::{Hugepages, Mapping};
use offcore_vhost::backend::Status;
use offcore_vhost::connection::{Connection, ConnectionError};
use offcore_vhost::message::{Code, HEADER, MemoryRegion, Reply, Request, VringAddr, VringFd, VringState};
use offcore_vhost::{Backend, BackendConfig, PassedFd, VhostDevice, features};

/// Maximum time to wait for anything that should happen at once.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// Features of a modern driver with a front end that supports protocol features.
pub(crate) const FEATURES: u64 = features::VIRTIO_F_VERSION_1 | features::VHOST_USER_F_PROTOCOL_FEATURES;

/// Memory of a guest. Guest addresses, front-end addresses and addresses in this process all differ.
pub(crate) struct Guest {
    pub(crate) mapping: Mapping,
    pub(crate) fd: OwnedFd,
}

impl Guest {
    pub(crate) const PHYSICAL: u64 = 0x10_0000;
    pub(crate) const USER: u64 = 0x7fff_0000_0000;

    pub(crate) fn new() -> Self {
        let (mapping, fd) = Mapping::memfd("guest", 1 << 20, Hugepages::None).unwrap();
        Self { mapping, fd }
    }

    pub(crate) fn region(&self) -> MemoryRegion {
        let size = self.mapping.len() as u64;
        MemoryRegion { guest: Self::PHYSICAL, size, user: Self::USER, mmap_offset: 0 }
    }

    pub(crate) fn table(&self) -> Request<BorrowedFd<'_>> {
        Request::SetMemTable(vec![(self.region(), self.fd.as_fd())])
    }
}

/// Addresses of virtqueue `index` in [`Guest`]'s memory. Each virtqueue has 64 KiB, enough for a size of 256.
pub(crate) fn addresses(index: u32) -> VringAddr {
    let desc = Guest::USER + u64::from(index) * 0x1_0000;
    VringAddr { index, flags: 0, desc, avail: desc + 0x4000, used: desc + 0x8000, log: 0 }
}

pub(crate) fn state(index: u32, num: u32) -> VringState {
    VringState { index, num }
}

pub(crate) fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()
}

/// A connected front end.
pub(crate) struct Peer {
    connection: Connection,
}

impl Peer {
    /// Connects without sending anything.
    pub(crate) fn connect(path: &Path) -> Self {
        let socket = std::os::unix::net::UnixStream::connect(path).unwrap();
        Self::over(socket.into())
    }

    pub(crate) fn over(socket: OwnedFd) -> Self {
        Self { connection: Connection::new(socket).unwrap() }
    }

    /// Connects and negotiates [`FEATURES`] and acknowledgements.
    pub(crate) fn negotiated(path: &Path) -> Self {
        let mut peer = Self::connect(path);
        peer.send(Request::SetProtocolFeatures(features::PROTOCOL_OFFERED));
        assert_eq!(peer.ask(Request::SetFeatures(FEATURES)), 0);
        peer
    }

    /// Like [`Peer::negotiated`], and sends the memory table.
    pub(crate) fn with_memory(path: &Path, guest: &Guest) -> Self {
        let mut peer = Self::negotiated(path);
        assert_eq!(peer.ask(guest.table()), 0);
        peer
    }

    /// Sends bytes unchanged.
    pub(crate) fn raw(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        self.connection.send(bytes, fds).unwrap();
    }

    /// Sends bytes unchanged. Returns whether the back end was still connected.
    pub(crate) fn try_raw(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.connection.send(bytes, fds).is_ok()
    }

    /// Sends a message with any code, flags and payload.
    pub(crate) fn message(&mut self, code: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut bytes = Vec::new();
        for word in [code, flags, payload.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(payload);
        self.raw(&bytes, fds);
    }

    /// Sends a request without asking for an acknowledgement.
    pub(crate) fn send(&mut self, request: Request<BorrowedFd<'_>>) {
        self.connection.send_request(request, false).unwrap();
    }

    /// Sends a request and returns its acknowledgement or the value of its reply.
    pub(crate) fn ask(&mut self, request: Request<BorrowedFd<'_>>) -> u64 {
        let code = request.code();
        self.connection.send_request(request, true).unwrap();
        match self.reply(code).unwrap() {
            Reply::Value(value) => value,
            reply => panic!("{code}: {reply:?}"),
        }
    }

    /// Stops virtqueue `index` and returns its base.
    pub(crate) fn base(&mut self, index: u32) -> u32 {
        self.send(Request::GetVringBase(state(index, 0)));
        match self.reply(Code::GET_VRING_BASE).unwrap() {
            Reply::Vring(reply) if reply.index == index => reply.num,
            reply => panic!("{reply:?}"),
        }
    }

    pub(crate) fn reply(&mut self, code: Code) -> Result<Reply<PassedFd>, ConnectionError> {
        let received = self.connection.receive_until(Instant::now() + TIMEOUT)?;
        Ok(received.unwrap_or_else(|| panic!("no reply to {code}")).reply(code).unwrap())
    }

    /// Sets up virtqueue `index` and starts it, without enabling it.
    pub(crate) fn start_ring(&mut self, index: u32) {
        assert_eq!(self.ask(Request::SetVringNum(state(index, 256))), 0);
        assert_eq!(self.ask(Request::SetVringBase(state(index, 0))), 0);
        assert_eq!(self.ask(Request::SetVringAddr(addresses(index))), 0);
        let kick = eventfd();
        let kick = VringFd { index: index as u8, fd: Some(kick.as_fd()) };
        assert_eq!(self.ask(Request::SetVringKick(kick)), 0);
    }

    pub(crate) fn enable(&mut self, index: u32, enable: bool) {
        assert_eq!(self.ask(Request::SetVringEnable(state(index, enable.into()))), 0);
    }

    /// Starts and enables virtqueues 0 and 1.
    pub(crate) fn start_pair(&mut self) {
        for index in 0..2 {
            self.start_ring(index);
            self.enable(index, true);
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.connection.is_alive()
    }

    /// Waits until the back end closes the connection.
    pub(crate) fn closed(&self) {
        until("the connection is closed", || !self.is_alive());
    }
}

/// Starts a back end with one queue pair.
pub(crate) fn backend(dir: &Dir) -> Backend {
    start(BackendConfig::new(dir.file("vhost.sock")))
}

pub(crate) fn start(config: BackendConfig) -> Backend {
    Backend::start(config, Box::new(())).unwrap()
}

/// Returns a back end, and a front end that has negotiated features.
pub(crate) fn negotiated() -> (Dir, Backend, Guest, Peer) {
    let dir = Dir::new();
    let (backend, peer) = (backend(&dir), Peer::negotiated(&dir.file("vhost.sock")));
    (dir, backend, Guest::new(), peer)
}

/// Like [`negotiated`], and the back end has the guest's memory.
pub(crate) fn connected() -> (Dir, Backend, Guest, Peer) {
    let (dir, backend, guest, mut peer) = negotiated();
    assert_eq!(peer.ask(guest.table()), 0);
    (dir, backend, guest, peer)
}

/// Stops a thread when it is dropped, even if the test fails.
pub(crate) struct Ends<'a>(pub(crate) &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until a condition is true.
pub(crate) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !so() {
        assert!(Instant::now() < deadline, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the last error of the back end contains `part`.
pub(crate) fn wait_for_error(device: &VhostDevice, part: &str) {
    until(&format!("last error says '{part}'"), || last_error(&device.status()).contains(part));
}

pub(crate) fn last_error(status: &Status) -> String {
    status.last_error.as_ref().map(ToString::to_string).unwrap_or_default()
}

/// Checks that the back end works: a new front end can start a queue pair and stop it again.
pub(crate) fn assert_serves(backend: &Backend) {
    let guest = Guest::new();
    let mut peer = Peer::with_memory(backend.device().path(), &guest);
    peer.start_pair();
    assert_eq!(peer.base(0), 0);
    assert_eq!(peer.base(1), 0);
}

/// Returns the bytes of a request, for truncating or modifying them.
pub(crate) fn bytes_of(request: Request<BorrowedFd<'_>>) -> Vec<u8> {
    let (bytes, _) = request.encode(true);
    assert!(bytes.len() >= HEADER);
    bytes
}

/// Sends a request that must be refused. The acknowledgement contains the refusal, the status contains the reason, and
/// the connection stays open.
#[track_caller]
pub(crate) fn refused(backend: &Backend, peer: &mut Peer, request: Request<BorrowedFd<'_>>, why: &str) {
    let before = backend.device().status().refused;
    let code = request.code();
    assert_eq!(peer.ask(request), 1, "{code}: {why}");
    let status = backend.device().status();
    assert_eq!(status.refused, before + 1);
    let said = last_error(&status);
    assert!(said.contains(why), "'{said}' does not say '{why}'");
    assert!(peer.is_alive());
}
