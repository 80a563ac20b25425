//! The front end: the driver's side of a vhost-user connection.
//!
//! The front end negotiates features, describes memory, and sets up virtqueues. It does not move packets: the caller
//! does that with an `offcore_ring::driver::RingDriver` for each [`DriverQueue`]. Guest addresses and front-end
//! addresses are both host virtual addresses of this process, so a buffer is made available by its address.
//!
//! 1. [`FrontEnd::connect`] negotiates features and allocates the memory of the virtqueues.
//! 2. The caller creates a driver queue for each handle and fills it.
//! 3. [`FrontEnd::start`] starts and enables the virtqueues.
//! 4. [`FrontEnd::stop`] stops them. When it returns, the back end no longer uses any buffer.
//!
//! If the back end terminates and has recorded the descriptors in flight, [`FrontEnd::resume`] lets another back end
//! continue with the virtqueues as they are. Otherwise, create a new front end over the same memory, which uses a new
//! connection.

mod error;
mod negotiation;
mod queue;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offcore_mem::Mapping;
use offcore_ring::{Layout, packed};
use rustix::event::{PollFd, PollFlags};

use crate::connection::{Connection, Listener, Role, SocketAccess, SocketError, connect, peer_user, poll};
use crate::eventfd;
use crate::features::{
    STATUS_DRIVER_OK, VHOST_USER_F_PROTOCOL_FEATURES, VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD,
    VHOST_USER_PROTOCOL_F_REPLY_ACK, VHOST_USER_PROTOCOL_F_RESET_DEVICE, VIRTIO_F_EVENT_IDX,
    VIRTIO_F_INDIRECT_DESC, VIRTIO_NET_F_MRG_RXBUF, is_packed,
};
use crate::message::{Code, InflightArea, MemoryRegion, Reply, Request, VringFd, VringState};
use crate::passed::{Errands, PassedFd};

pub use error::FrontEndError;
use queue::RingMemory;
pub use queue::{DriverQueue, RingPlace, ring_areas};

/// Interval between attempts to connect.
const RETRY: Duration = Duration::from_millis(50);
/// Number of regions in one SET_MEM_TABLE that every back end supports.
const TABLE: usize = 8;

/// Configuration of a front end.
#[derive(Clone, Debug)]
pub struct FrontEndConfig {
    pub path: PathBuf,
    /// Whether the front end connects to the socket of a back end, or listens on a socket and waits for the back end.
    pub role: Role,
    /// Another user whose processes may act as back end, in addition to root and the user of this process. The back end
    /// can write to all shared memory.
    pub peer: Option<u32>,
    pub queue_pairs: u16,
    /// Descriptors of each virtqueue: a power of two up to 32768 for split rings, any number up to 32768 for packed
    /// rings.
    pub queue_size: u16,
    /// Virtio features to use if the back end offers them and all features that they depend on. VIRTIO_F_VERSION_1 is
    /// always required. Large packets (GUEST_TSO4 and similar) are received only with mergeable buffers.
    pub features: u64,
    /// The MTU to announce to the back end in bytes, if the back end supports it.
    pub mtu: Option<u16>,
    /// How long to wait for the back end: for its socket, and for each of its replies. It should be longer than the
    /// timeout of the back end for its workers.
    pub timeout: Duration,
    /// File descriptors of back ends that are still being closed. Clones of the configuration share them.
    pub errands: Errands,
}

impl FrontEndConfig {
    /// Returns the configuration of a client at `path` with one queue pair of 256 descriptors. It uses mergeable
    /// buffers, event index and indirect descriptors if they are offered, and has a timeout of 15 seconds.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            role: Role::Client,
            peer: None,
            queue_pairs: 1,
            queue_size: 256,
            features: VIRTIO_NET_F_MRG_RXBUF | VIRTIO_F_EVENT_IDX | VIRTIO_F_INDIRECT_DESC,
            mtu: None,
            timeout: Duration::from_secs(15),
            errands: Errands::default(),
        }
    }
}

/// Packet memory shared with the back end: a whole mapping and the file behind it.
#[derive(Clone, Copy, Debug)]
pub struct MemoryFd<'a> {
    /// The file. The mapping begins at its first byte.
    pub fd: BorrowedFd<'a>,
    /// Address of the mapping in this process, which is also its guest address.
    pub address: u64,
    pub len: u64,
}

impl<'a> MemoryFd<'a> {
    /// Describes a whole mapping that begins at the start of its file.
    pub fn new(mapping: &Mapping, fd: BorrowedFd<'a>) -> Self {
        Self { fd, address: mapping.base().as_ptr() as u64, len: mapping.len() as u64 }
    }

    /// The region as described to the back end.
    fn region(&self) -> MemoryRegion {
        MemoryRegion { guest: self.address, size: self.len, user: self.address, mmap_offset: 0 }
    }
}

/// A region that was described to the back end, and the device and inode number of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Described {
    region: MemoryRegion,
    file: (u64, u64),
}

impl Described {
    fn new(memory: &MemoryFd<'_>) -> Result<Self, FrontEndError> {
        let stat = rustix::fs::fstat(memory.fd)
            .map_err(|source| FrontEndError::System { what: "fstat of memory", source: source.into() })?;
        Ok(Self { region: memory.region(), file: (stat.st_dev, stat.st_ino) })
    }
}

/// A connected front end. Dropping it closes the connection, and the back end then stops the virtqueues.
#[derive(Debug)]
pub struct FrontEnd {
    /// The listening socket of a server, kept open so that no other process takes the path. It is dropped before the
    /// connection, so that the back end does not reconnect to a front end that is shutting down.
    _listener: Option<Listener>,
    connection: Connection,
    timeout: Duration,
    features: u64,
    protocol: u64,
    mtu: Option<u16>,
    /// The virtio device status that was sent to the back end.
    status: u8,
    /// Number of memory regions that the back end accepts one by one; 0 if it accepts only whole tables.
    slots: usize,
    /// Regions that the back end has.
    described: Vec<Described>,
    rings: Arc<RingMemory>,
    /// The region in which the back end records descriptors in flight.
    inflight: Option<(InflightArea, PassedFd)>,
    queues: Vec<DriverQueue>,
    /// The start position of each virtqueue, in the format of SET_VRING_BASE.
    bases: Vec<u32>,
    running: bool,
}

impl FrontEnd {
    /// Connects, negotiates features, describes `memory`, and creates the virtqueues in stopped state.
    ///
    /// # Errors
    /// Fails if no back end is found within the configured timeout, or if the back end does not offer or accept a
    /// required feature.
    pub fn connect(config: &FrontEndConfig, memory: &[MemoryFd<'_>]) -> Result<Self, FrontEndError> {
        Self::connect_with(config, memory, None)
    }

    /// Like [`FrontEnd::connect`], with the virtqueues at a place in `memory`. If `rings` is `None`, they get separate
    /// memory.
    ///
    /// # Errors
    /// The same as for [`FrontEnd::connect`]. Also fails if there is not enough room at that place.
    pub fn connect_with(
        config: &FrontEndConfig,
        memory: &[MemoryFd<'_>],
        rings: Option<RingPlace>,
    ) -> Result<Self, FrontEndError> {
        eventfd::prepare().map_err(|source| FrontEndError::Signals { source })?;
        let rings = Arc::new(RingMemory::new(config, rings)?);
        let (socket, listener) = reach(config)?;
        let mut front_end = Self {
            _listener: listener,
            connection: Connection::with_errands(socket, &config.errands)?,
            timeout: config.timeout,
            features: 0,
            protocol: 0,
            mtu: config.mtu,
            status: 0,
            slots: 0,
            described: Vec::new(),
            rings,
            inflight: None,
            queues: Vec::new(),
            bases: vec![0; usize::from(config.queue_pairs) * 2],
            running: false,
        };
        front_end.negotiate(config)?;
        front_end.reset_positions();
        front_end.queues = front_end.rings.queues(config, front_end.features)?;
        front_end.set_memory(memory)?;
        front_end.request_inflight(config)?;
        Ok(front_end)
    }

    /// Asks the back end for a region that records descriptors in flight, if it supports this.
    fn request_inflight(&mut self, config: &FrontEndConfig) -> Result<(), FrontEndError> {
        if self.protocol & VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD == 0 {
            return Ok(());
        }
        let (queues, queue_size) = (config.queue_pairs * 2, config.queue_size);
        let asked = InflightArea { size: 0, offset: 0, queues, queue_size };
        let code = Code::GET_INFLIGHT_FD;
        self.inflight = match self.query(Request::GetInflightFd(asked))? {
            Reply::Inflight(area, fd) => Some((area, fd)),
            reply => return Err(FrontEndError::Refused { code, reply }),
        };
        self.send_inflight()
    }

    fn send_inflight(&mut self) -> Result<(), FrontEndError> {
        let Some((area, fd)) = self.inflight.take() else { return Ok(()) };
        let told = self.command(Request::SetInflightFd(area, fd.as_fd()));
        self.inflight = Some((area, fd));
        told
    }

    /// Returns whether [`FrontEnd::resume`] can be tried, because descriptors in flight are recorded.
    pub fn is_resumable(&self) -> bool {
        self.inflight.is_some()
    }

    /// Connects to a new back end after the old one has terminated. The new back end continues with the virtqueues as
    /// they are. Driver queues may be used meanwhile. `config` and `memory` must be the same as for
    /// [`FrontEnd::connect`].
    ///
    /// # Errors
    /// The same as for [`FrontEnd::connect`]. Also fails with [`FrontEndError::Other`] if the features of the new back
    /// end do not match the state of the virtqueues.
    pub fn resume(&mut self, config: &FrontEndConfig, memory: &[MemoryFd<'_>]) -> Result<(), FrontEndError> {
        let features = self.features;
        // Closed first, so that the new back end connects to the new listener.
        self._listener = None;
        let (socket, listener) = reach(config)?;
        (self._listener, self.connection) = (listener, Connection::with_errands(socket, &config.errands)?);
        (self.protocol, self.status, self.slots, self.running) = (0, 0, 0, false);
        self.described.clear();
        self.negotiate(config)?;
        if self.features != features || self.protocol & VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD == 0 {
            return Err(FrontEndError::Other { features, found: self.features });
        }
        self.set_memory(memory)?;
        self.send_inflight()?;
        for (base, queue) in self.bases.iter_mut().zip(&self.queues) {
            // For a packed ring, the position is known only from the region of descriptors in flight.
            if let Layout::Split(split) = queue.layout() {
                *base = split.used_index().into();
            }
        }
        self.start()
    }

    /// Returns the negotiated virtio features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns the virtqueues by index. Even ones receive, odd ones transmit.
    pub fn queues(&self) -> &[DriverQueue] {
        &self.queues
    }

    /// Starts and enables all virtqueues, each at the position where it last stopped. Does nothing if they are running.
    ///
    /// # Errors
    /// Fails if the back end refuses a request or does not answer.
    pub fn start(&mut self) -> Result<(), FrontEndError> {
        if self.running {
            return Ok(());
        }
        let queues = self.queues.clone();
        for (queue, base) in queues.iter().zip(self.bases.clone()) {
            let (index, num) = (queue.index().into(), queue.layout().size().into());
            self.command(Request::SetVringNum(VringState { index, num }))?;
            self.command(Request::SetVringBase(VringState { index, num: base }))?;
            self.command(Request::SetVringAddr(queue.addresses()))?;
            let event = |fd| VringFd { index: queue.index(), fd: Some(fd) };
            self.command(Request::SetVringCall(event(queue.call())))?;
            // Enabled before the kick, so that the back end starts the queue only once.
            if self.features & VHOST_USER_F_PROTOCOL_FEATURES != 0 {
                self.command(Request::SetVringEnable(VringState { index, num: 1 }))?;
            }
            self.command(Request::SetVringKick(event(queue.kick())))?;
        }
        self.add_status(STATUS_DRIVER_OK)?;
        self.running = true;
        Ok(())
    }

    /// Stops all virtqueues. The back end has then either returned each chain or not taken it, and [`FrontEnd::start`]
    /// can start the queues again.
    ///
    /// # Errors
    /// Fails if the back end does not answer.
    pub fn stop(&mut self) -> Result<(), FrontEndError> {
        if !self.running {
            return Ok(());
        }
        for index in 0..self.bases.len() {
            let state = VringState { index: index as u32, num: 0 };
            let Reply::Vring(found) = self.query(Request::GetVringBase(state))? else {
                return Err(FrontEndError::Base { queue: index, found: None });
            };
            if found.index != state.index || !self.is_base(found.num) {
                return Err(FrontEndError::Base { queue: index, found: Some(found) });
            }
            self.bases[index] = found.num;
        }
        self.running = false;
        Ok(())
    }

    /// Resets the device. Its virtqueues stop regardless of their state, and the features and `memory` are sent again.
    /// The virtqueues are then in the same state as after [`FrontEnd::connect`]: new driver queues must be created
    /// before [`FrontEnd::start`].
    ///
    /// # Errors
    /// Fails if the back end does not support a reset (it then continues as before), refuses it, or does not answer.
    pub fn reset(&mut self, memory: &[MemoryFd<'_>]) -> Result<(), FrontEndError> {
        if self.protocol & VHOST_USER_PROTOCOL_F_RESET_DEVICE == 0 {
            return Err(FrontEndError::NoReset);
        }
        self.command(Request::ResetDevice)?;
        self.running = false;
        self.status = 0;
        self.described.clear();
        self.reset_positions();
        self.choose_features()?;
        self.set_memory(memory)
    }

    /// Sets the start position of every virtqueue to the position of an unused ring.
    fn reset_positions(&mut self) {
        // copy-ok: numbers of the control side
        self.bases.fill(if is_packed(self.features) { packed::FRESH_BASE } else { 0 });
    }

    /// Returns whether `base` is a valid position of a virtqueue. For a packed ring, some back ends report only the
    /// lower half.
    fn is_base(&self, base: u32) -> bool {
        match self.queues.first().map(DriverQueue::layout) {
            Some(layout) if is_packed(self.features) => base & 0x7fff < u32::from(layout.size()),
            _ => base <= u16::MAX.into(),
        }
    }

    /// Returns whether the back end still has the connection open. Does not wait.
    pub fn is_alive(&self) -> bool {
        self.connection.is_alive()
    }

    /// Replaces the memory table by `memory` and the memory of the virtqueues. This is possible at any time. Unchanged
    /// regions keep their mappings.
    ///
    /// # Errors
    /// Fails if there are too many regions, or if the back end refuses them or does not answer.
    pub fn set_memory(&mut self, memory: &[MemoryFd<'_>]) -> Result<(), FrontEndError> {
        let rings = Arc::clone(&self.rings);
        let regions: Vec<_> = memory.iter().copied().chain(rings.region()).collect();
        let max = self.slots.max(TABLE) - 1;
        if memory.len() > max {
            return Err(FrontEndError::Regions { found: memory.len(), max });
        }
        let described: Vec<_> = regions.iter().map(Described::new).collect::<Result<_, _>>()?;
        if regions.len() <= TABLE {
            self.command(Request::SetMemTable(regions.iter().map(|it| (it.region(), it.fd)).collect()))?;
        } else {
            for gone in self.described.clone().iter().filter(|old| !described.contains(old)) {
                self.command(Request::RemMemReg(gone.region, None))?;
            }
            let before = std::mem::take(&mut self.described);
            for (new, region) in described.iter().zip(&regions).filter(|(new, _)| !before.contains(new)) {
                self.command(Request::AddMemReg(new.region, region.fd))?;
            }
        }
        self.described = described;
        Ok(())
    }

    /// Sends a request without a reply. Waits for the acknowledgement if acknowledgements are negotiated.
    fn command(&mut self, request: Request<BorrowedFd<'_>>) -> Result<(), FrontEndError> {
        let code = request.code();
        let acknowledged = self.protocol & VHOST_USER_PROTOCOL_F_REPLY_ACK != 0;
        self.connection.send_request(request, acknowledged)?;
        if acknowledged {
            match self.reply(code)? {
                Reply::Value(0) => {}
                reply => return Err(FrontEndError::Refused { code, reply }),
            }
        }
        Ok(())
    }

    /// Sends a request and waits for its reply.
    fn query(&mut self, request: Request<BorrowedFd<'_>>) -> Result<Reply<PassedFd>, FrontEndError> {
        let code = request.code();
        self.connection.send_request(request, false)?;
        self.reply(code)
    }

    fn value(&mut self, request: Request<BorrowedFd<'_>>) -> Result<u64, FrontEndError> {
        let code = request.code();
        match self.query(request)? {
            Reply::Value(value) => Ok(value),
            reply => Err(FrontEndError::Refused { code, reply }),
        }
    }

    fn reply(&mut self, code: Code) -> Result<Reply<PassedFd>, FrontEndError> {
        let received = self.connection.receive_until(Instant::now() + self.timeout)?;
        let received = received.ok_or(FrontEndError::NoReply { code, waited: self.timeout })?;
        Ok(received.reply(code)?)
    }
}

/// Connects to the back end within the configured timeout.
fn reach(config: &FrontEndConfig) -> Result<(OwnedFd, Option<Listener>), FrontEndError> {
    if config.errands.is_full() {
        return Err(FrontEndError::Errands { left: config.errands.left() });
    }
    let deadline = Instant::now() + config.timeout;
    let left = || deadline.saturating_duration_since(Instant::now());
    match config.role {
        Role::Client => loop {
            match connect(&config.path) {
                Ok(socket) => return check(config, &socket).map(|()| (socket, None)),
                Err(error @ (SocketError::TooLong { .. } | SocketError::NotASocket { .. })) => {
                    return Err(error.into());
                }
                // Missing permissions are reported at once, because waiting does not help: an administrator has to act.
                Err(source) if left().is_zero() || source.is_denied() => {
                    return Err(FrontEndError::NoBackEnd { source });
                }
                Err(_) => std::thread::sleep(RETRY.min(left())),
            }
        },
        Role::Server => {
            let listener = Listener::bind(&config.path, SocketAccess::default(), Duration::ZERO)?;
            loop {
                if let Some(socket) = listener.accept()? {
                    match check(config, &socket) {
                        Ok(()) => return Ok((socket, Some(listener))),
                        // Keep waiting: other peers may connect.
                        Err(error) => tracing::warn!("{error}"),
                    }
                }
                if left().is_zero() {
                    let (path, waited) = (config.path.clone(), config.timeout);
                    return Err(FrontEndError::AcceptTimedOut { path, waited });
                }
                poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(left()))?;
            }
        }
    }
}

/// Refuses a back end whose user is not allowed.
fn check(config: &FrontEndConfig, socket: &OwnedFd) -> Result<(), FrontEndError> {
    let own = rustix::process::geteuid().as_raw();
    let found = peer_user(socket)
        .map_err(|source| FrontEndError::System { what: "SO_PEERCRED", source: source.into() })?;
    match [0, own].contains(&found) || config.peer == Some(found) {
        true => Ok(()),
        false => Err(FrontEndError::WrongUser { path: config.path.clone(), found, own }),
    }
}
