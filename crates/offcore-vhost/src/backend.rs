//! The back end: serves front ends over a socket and hands their virtqueues to the workers.
//!
//! One control thread per socket decodes messages, checks them against the device's state, and publishes virtqueues in
//! their [`VringCell`]s. The cells are made when the back end starts and live as long as it does, so workers attach
//! before any front end has connected. One front end is served at a time; another one waits in the socket's queue.
//!
//! ```text
//! front end ── socket ──> control thread ──> session (what this front end has set up) ──> cells ──> workers
//!                               └──> DeviceEvents, Status
//! ```
//! A refused message changes nothing, is answered with a non-zero acknowledgement when the front end asked for one, and
//! is otherwise only logged and counted. The connection ends when nothing else can be said: a header without sense, a
//! refused request whose reply the front end waits for, a worker that does not answer, guest memory that vanished.

mod control;
mod device;
mod error;
mod memory;
mod ring;
mod session;
mod status;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use offcore_mem::mapping::all_memory;
use rustix::event::EventfdFlags;

use crate::cell::VringCell;
use crate::connection::{Listener, Role, SocketAccess, SocketError};
use crate::{eventfd, features};

pub use device::{Device, DeviceError, DeviceEvents};
pub use error::ControlError;
pub use status::{RingState, Status, VringStatus};

/// Queue pairs of one device, at most: a message names a virtqueue by eight bits.
pub const MAX_QUEUE_PAIRS: u16 = 128;
/// How long a process that listens at the socket is given to end: one that was killed gives its memory back first.
const ENDING: Duration = Duration::from_secs(1);
/// Regions of guest memory of one device, at most, when they are added one by one.
pub const MAX_SLOTS: usize = 64;
/// Regions for what is in flight that are made for one connection. One is needed; whoever does not read the answers keeps each one's file.
const REGIONS: usize = 8;
/// The least MTU (virtio 1.2, section 5.1.4.1).
pub const MIN_MTU: u16 = 68;

/// What a back end is to be.
#[derive(Clone, Debug)]
pub struct BackendConfig {
    pub path: PathBuf,
    /// Whether the back end makes the socket, or connects to a front end's and reconnects when it goes away.
    pub role: Role,
    /// Who may connect to a server's socket.
    pub access: SocketAccess,
    /// Queue pairs, 1 to [`MAX_QUEUE_PAIRS`]. There are twice as many virtqueues.
    pub queue_pairs: u16,
    /// The virtio features to offer: a subset of [`features::OFFERED`]. VIRTIO_F_VERSION_1 is always offered.
    pub features: u64,
    /// The longest MTU that a front end may announce, at least [`MIN_MTU`].
    pub max_mtu: u16,
    /// Bytes of guest memory that a front end may have mapped. What it never touches itself is charged to this process when
    /// packets are written there, up to as much.
    pub max_memory: u64,
    /// Whether copies of this port may be made by engines: without it, [`Device::register_async`] is refused.
    pub asynchronous: bool,
    /// How long a worker may take to let go of a virtqueue.
    pub timeout: Duration,
}

impl BackendConfig {
    /// A server at `path` with one queue pair, all features, any MTU, as much memory as
    /// the machine has, copies by engines allowed, a timeout of 10 seconds.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            role: Role::Server,
            access: SocketAccess::default(),
            queue_pairs: 1,
            features: features::OFFERED,
            max_mtu: u16::MAX,
            max_memory: all_memory().map_or(u64::MAX, |bytes| bytes as u64),
            asynchronous: true,
            timeout: Duration::from_secs(10),
        }
    }

    /// The features offered: VIRTIO_NET_F_MQ means nothing with one queue pair.
    fn offered(&self) -> u64 {
        let one_pair = if self.queue_pairs == 1 { features::VIRTIO_NET_F_MQ } else { 0 };
        (self.features | features::VIRTIO_F_VERSION_1) & !one_pair
    }
}

/// Why a back end cannot start.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum StartError {
    /// {found} queue pairs: expected 1 to {MAX_QUEUE_PAIRS:?}
    QueuePairs { found: u16 },
    /// features {found:#x}: {extra:#x} of them are not offered by this back end
    Features { found: u64, extra: u64 },
    /// an MTU of at most {found}: expected at least {MIN_MTU:?}
    Mtu { found: u16 },
    /// {0}
    Socket(#[from] SocketError),
    /// io_setup: {source}; signals to a front end need asynchronous I/O: raise fs.aio-max-nr, or have the sandbox allow it
    Signals { source: std::io::Error },
    /// {what}: {source}
    System { what: &'static str, source: std::io::Error },
}

/// A running back end. Dropping it stops it.
pub struct Backend {
    device: Device,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Starts a back end. Front ends are served from now on; a client keeps trying to connect.
    ///
    /// # Errors
    /// A configuration that cannot be, or a server's path that cannot be listened at.
    pub fn start(config: BackendConfig, events: Box<dyn DeviceEvents>) -> Result<Self, StartError> {
        if config.queue_pairs == 0 || config.queue_pairs > MAX_QUEUE_PAIRS {
            return Err(StartError::QueuePairs { found: config.queue_pairs });
        }
        if config.features & !features::OFFERED != 0 {
            let extra = config.features & !features::OFFERED;
            return Err(StartError::Features { found: config.features, extra });
        }
        if config.max_mtu < MIN_MTU {
            return Err(StartError::Mtu { found: config.max_mtu });
        }
        eventfd::prepare().map_err(|source| StartError::Signals { source })?;
        let listener = match config.role {
            Role::Server => Some(Listener::bind(&config.path, config.access, ENDING)?),
            Role::Client => None,
        };
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|source| StartError::System { what: "eventfd", source: source.into() })?;
        let stop = Arc::new(stop);
        let device = Device::new(&config);
        let control = control::Control::new(config, device.clone(), listener, Arc::clone(&stop), events);
        let thread = std::thread::Builder::new()
            .name("vhost-control".into())
            .spawn(|| control.run())
            .map_err(|source| StartError::System { what: "starting the control thread", source })?;
        Ok(Self { device, stop, thread: Some(thread) })
    }

    /// The virtqueues, by index: even ones the guest receives from, odd ones it transmits to.
    pub fn cells(&self) -> &[Arc<VringCell>] {
        self.device.cells()
    }

    /// The device that front ends see.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Stops: virtqueues are stopped and drained, callbacks are made, the connection is closed, a server's socket is
    /// removed. Waits for all of that, unless called from a callback, which cannot wait for itself.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // The counter cannot be full, and nothing else can fail.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        let Some(thread) = self.thread.take() else { return };
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!(path = %self.device.path().display(), "a vhost callback has panicked");
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backend").field("device", &self.device).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
