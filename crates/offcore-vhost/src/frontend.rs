//! Our own front end: the driver's side of a vhost-user connection.
//!
//! It negotiates, describes memory, and sets virtqueues up; packets are moved by whoever makes an
//! `offcore_ring::driver::Queue` of each [`DriverQueue`]. Guest addresses and front-end addresses are host
//! virtual addresses of this process, so that a buffer is made available by its address.
//!
//! 1. [`FrontEnd::connect`] negotiates and makes the virtqueues' memory,
//! 2. the caller makes a driver queue of each handle and fills it,
//! 3. [`FrontEnd::start`] starts and enables the virtqueues,
//! 4. [`FrontEnd::stop`] stops them; the back end has let go of all buffers when it returns.
//!
//! After the back end has gone, [`FrontEnd::resume`] has another one go on with the virtqueues as they are, where the first one noted
//! what was in flight; or else a new front end over the same memory takes up a new connection.

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
pub use queue::{DriverQueue, RingPlace, ring_parts};

/// How long after a failure to connect is tried again.
const RETRY: Duration = Duration::from_millis(50);
/// Regions of one SET_MEM_TABLE that every back end takes.
const TABLE: usize = 8;

/// What a front end is to be.
#[derive(Clone, Debug)]
pub struct FrontEndConfig {
    pub path: PathBuf,
    /// Whether the front end connects to a back end's socket, or makes one and waits for the back end.
    pub role: Role,
    /// A user whose processes may be the back end, beside root's and this process's own: it gets to write to all memory.
    pub peer: Option<u32>,
    pub queue_pairs: u16,
    /// Descriptors of each virtqueue: a power of two up to 32768, or with packed rings any number up to that.
    pub queue_size: u16,
    /// Virtio features to use if the back end offers them, and with them those that they need. VIRTIO_F_VERSION_1 is required in
    /// any case. Large packets (GUEST_TSO4 and the like) are received only along with mergeable buffers.
    pub features: u64,
    /// The MTU to tell the back end, in bytes, if it wants to know.
    pub mtu: Option<u16>,
    /// How long to wait for the back end: for its socket, and for each of its replies. It should be longer than the
    /// back end's timeout with its workers.
    pub timeout: Duration,
    /// What may have to wait for back ends: a configuration that is used again, or its clone, keeps it.
    pub errands: Errands,
}

impl FrontEndConfig {
    /// A client at `path` with one queue pair of 256 descriptors that uses mergeable buffers, event index and indirect
    /// descriptors where they are offered, with a timeout of 15 seconds.
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

/// Memory that packets are in, shared with the back end: a whole mapping and the file behind it.
#[derive(Clone, Copy, Debug)]
pub struct MemoryFd<'a> {
    /// The file; the mapping begins at its first byte.
    pub fd: BorrowedFd<'a>,
    /// Address of the mapping in this process, which is its guest address, too.
    pub address: u64,
    pub len: u64,
}

impl<'a> MemoryFd<'a> {
    /// The whole of a mapping that begins where its file does.
    pub fn new(mapping: &Mapping, fd: BorrowedFd<'a>) -> Self {
        Self { fd, address: mapping.base().as_ptr() as u64, len: mapping.len() as u64 }
    }

    /// As the back end gets to know it.
    fn region(&self) -> MemoryRegion {
        MemoryRegion { guest: self.address, size: self.len, user: self.address, mmap_offset: 0 }
    }
}

/// A region that the back end has: which one, and of which file.
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

/// A connected front end. Dropping it closes the connection, upon which the back end stops the virtqueues.
#[derive(Debug)]
pub struct FrontEnd {
    /// A server's socket, held so that nobody else takes the path. It goes before the connection does, so that the back
    /// end does not connect again to what is on its way out.
    _listener: Option<Listener>,
    connection: Connection,
    timeout: Duration,
    features: u64,
    protocol: u64,
    mtu: Option<u16>,
    /// The virtio device status as the back end knows it.
    status: u8,
    /// Regions of memory that the back end takes one by one; 0 when it takes only whole tables.
    slots: usize,
    /// Regions that the back end has.
    described: Vec<Described>,
    rings: Arc<RingMemory>,
    /// Where the back end notes what is in flight.
    inflight: Option<(InflightArea, PassedFd)>,
    queues: Vec<DriverQueue>,
    /// Where each virtqueue begins, as SET_VRING_BASE has it.
    bases: Vec<u32>,
    running: bool,
}

impl FrontEnd {
    /// Connects, negotiates, describes `memory`, and makes the virtqueues, which do not run yet.
    ///
    /// # Errors
    /// No back end within the configured timeout, or one that does not offer or accept what is needed.
    pub fn connect(config: &FrontEndConfig, memory: &[MemoryFd<'_>]) -> Result<Self, FrontEndError> {
        Self::connect_with(config, memory, None)
    }

    /// As [`FrontEnd::connect`], with the virtqueues at a place in `memory`; without one they get memory of their own.
    ///
    /// # Errors
    /// As for [`FrontEnd::connect`], and when there is no room at that place.
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
        front_end.begin_anew();
        front_end.queues = front_end.rings.queues(config, front_end.features)?;
        front_end.set_memory(memory)?;
        front_end.ask_for_inflight(config)?;
        Ok(front_end)
    }

    /// Has the back end make a region for what is in flight, if it knows how to.
    fn ask_for_inflight(&mut self, config: &FrontEndConfig) -> Result<(), FrontEndError> {
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
        self.tell_inflight()
    }

    fn tell_inflight(&mut self) -> Result<(), FrontEndError> {
        let Some((area, fd)) = self.inflight.take() else { return Ok(()) };
        let told = self.command(Request::SetInflightFd(area, fd.as_fd()));
        self.inflight = Some((area, fd));
        told
    }

    /// Whether [`FrontEnd::resume`] can be tried: what is in flight is noted.
    pub fn is_resumable(&self) -> bool {
        self.inflight.is_some()
    }

    /// After the back end has gone: connects to the one that has come in its place, which goes on with the virtqueues as they are.
    /// Driver queues may be used meanwhile. `config` and `memory` are those of [`FrontEnd::connect`].
    ///
    /// # Errors
    /// As for [`FrontEnd::connect`], and [`FrontEndError::Other`] for a back end with which the virtqueues cannot go on.
    pub fn resume(&mut self, config: &FrontEndConfig, memory: &[MemoryFd<'_>]) -> Result<(), FrontEndError> {
        let features = self.features;
        // Whoever connects is to find the new listener.
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
        self.tell_inflight()?;
        for (base, queue) in self.bases.iter_mut().zip(&self.queues) {
            // Of a packed one only what the back end noted tells it.
            if let Layout::Split(split) = queue.layout() {
                *base = split.used_index().into();
            }
        }
        self.start()
    }

    /// The virtio features negotiated.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The protocol features negotiated.
    pub fn protocol_features(&self) -> u64 {
        self.protocol
    }

    /// The virtqueues, by index: even ones receive, odd ones transmit.
    pub fn queues(&self) -> &[DriverQueue] {
        &self.queues
    }

    /// Starts and enables all virtqueues, each where it last stopped. Does nothing when they run.
    ///
    /// # Errors
    /// A back end that refuses or does not answer.
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
            // Enabled first, so that it starts once and for all.
            if self.features & VHOST_USER_F_PROTOCOL_FEATURES != 0 {
                self.command(Request::SetVringEnable(VringState { index, num: 1 }))?;
            }
            self.command(Request::SetVringKick(event(queue.kick())))?;
        }
        self.add_status(STATUS_DRIVER_OK)?;
        self.running = true;
        Ok(())
    }

    /// Stops all virtqueues. The back end has then returned or left alone every chain, and [`FrontEnd::start`] can
    /// begin again.
    ///
    /// # Errors
    /// A back end that does not answer.
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

    /// Resets the device: its virtqueues stop, whatever state they are in, and what was negotiated and `memory` are told
    /// once more. The virtqueues are then as fresh as after [`FrontEnd::connect`]: new driver queues have to be made of
    /// them before [`FrontEnd::start`].
    ///
    /// # Errors
    /// A back end that cannot be reset (it then goes on as before), refuses, or does not answer.
    pub fn reset(&mut self, memory: &[MemoryFd<'_>]) -> Result<(), FrontEndError> {
        if self.protocol & VHOST_USER_PROTOCOL_F_RESET_DEVICE == 0 {
            return Err(FrontEndError::NoReset);
        }
        self.command(Request::ResetDevice)?;
        self.running = false;
        self.status = 0;
        self.described.clear();
        self.begin_anew();
        self.choose_features()?;
        self.set_memory(memory)
    }

    /// Has every virtqueue begin where one does that was never used.
    fn begin_anew(&mut self) {
        // copy-ok: numbers of the control side
        self.bases.fill(if is_packed(self.features) { packed::FRESH_BASE } else { 0 });
    }

    /// Whether a virtqueue can be at `base`. Of a packed ring's some back ends tell the lower half only.
    fn is_base(&self, base: u32) -> bool {
        match self.queues.first().map(DriverQueue::layout) {
            Some(layout) if is_packed(self.features) => base & 0x7fff < u32::from(layout.size()),
            _ => base <= u16::MAX.into(),
        }
    }

    /// Whether the back end still has its end of the connection open. Does not wait.
    pub fn is_alive(&self) -> bool {
        self.connection.is_alive()
    }

    /// Exchanges the memory table for one of `memory` and the virtqueues' own memory, at any time. Regions that stay are
    /// not touched.
    ///
    /// # Errors
    /// Too many regions, a back end that refuses or does not answer.
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

    /// Sends a request that has no reply of its own; waits for its acknowledgement when those are negotiated.
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

/// Reaches the back end, waiting for it as long as the configuration says.
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
                // That it may not be reached is said at once: somebody has to do something about it, or is doing it.
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
                        // Others may come.
                        Err(error) => tracing::warn!("{error}"),
                    }
                }
                if left().is_zero() {
                    let (path, waited) = (config.path.clone(), config.timeout);
                    return Err(FrontEndError::NobodyConnected { path, waited });
                }
                poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(left()))?;
            }
        }
    }
}

/// Refuses a back end of a user that it is not to be of.
fn check(config: &FrontEndConfig, socket: &OwnedFd) -> Result<(), FrontEndError> {
    let own = rustix::process::geteuid().as_raw();
    let found = peer_user(socket)
        .map_err(|source| FrontEndError::System { what: "SO_PEERCRED", source: source.into() })?;
    match [0, own].contains(&found) || config.peer == Some(found) {
        true => Ok(()),
        false => Err(FrontEndError::Stranger { path: config.path.clone(), found, own }),
    }
}
