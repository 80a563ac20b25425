//! The front end used in the tests.

use super::*;

/// A front end with one region of memory.
pub(super) struct Peer {
    pub(super) connection: Connection,
    pub(super) region: MemoryRegion,
    pub(super) fd: OwnedFd,
}

impl Peer {
    pub(super) fn new(backend: &Backend) -> Self {
        let (mapping, fd) = Mapping::memfd("guest", 1 << 18, Hugepages::None).unwrap();
        let region = MemoryRegion { guest: 0, size: mapping.len() as u64, user: 1 << 40, mmap_offset: 0 };
        let connection = Connection::new(connect(backend.device().path()).unwrap()).unwrap();
        let mut peer = Self { connection, region, fd };
        peer.connection
            .send_request(Request::SetProtocolFeatures(features::PROTOCOL_OFFERED), false)
            .unwrap();
        peer.done(Request::SetFeatures(features::VIRTIO_F_VERSION_1));
        assert!(matches!(peer.table(), Some(Reply::Value(0))));
        peer
    }

    /// Sends a request and returns the reply; `None` if the connection was closed instead.
    pub(super) fn ask(&mut self, request: Request<BorrowedFd<'_>>) -> Option<Reply<PassedFd>> {
        let code = request.code();
        self.connection.send_request(request, true).unwrap();
        let received = self.connection.receive_until(Instant::now() + TIMEOUT).ok()?;
        Some(received.expect("a reply within time").reply(code).unwrap())
    }

    /// Sends a request that is expected to succeed with reply 0.
    pub(super) fn done(&mut self, request: Request<BorrowedFd<'_>>) {
        assert!(matches!(self.ask(request), Some(Reply::Value(0))));
    }

    /// Replaces its memory by a new file.
    pub(super) fn other_table(&mut self) -> Option<Reply<PassedFd>> {
        self.fd = Mapping::memfd("other", self.region.size as usize, Hugepages::None).unwrap().1;
        self.table()
    }

    pub(super) fn table(&mut self) -> Option<Reply<PassedFd>> {
        let fd = self.fd.try_clone().unwrap();
        self.ask(Request::SetMemTable(vec![(self.region, fd.as_fd())]))
    }

    pub(super) fn start(&mut self, index: u8) {
        let desc = self.region.user + u64::from(index) * 0x1_0000;
        let (index, num) = (u32::from(index), 256);
        let addr = VringAddr { index, flags: 0, desc, avail: desc + 0x4000, used: desc + 0x8000, log: 0 };
        for request in [
            Request::SetVringNum(VringState { index, num }),
            Request::SetVringBase(VringState { index, num: 0 }),
            Request::SetVringAddr(addr),
            Request::SetVringKick(VringFd { index: index as u8, fd: None }),
        ] {
            self.done(request);
        }
    }

    pub(super) fn base(&mut self, index: u32) -> Option<Reply<PassedFd>> {
        self.ask(Request::GetVringBase(VringState { index, num: 0 }))
    }
}
