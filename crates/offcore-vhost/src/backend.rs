//! The back end: serves front ends over a socket and hands their virtqueues to the workers.
//!
//! One control thread per socket decodes messages, checks them against the state of the device, and publishes
//! virtqueues in their [`VringCell`]s. The cells are created with the back end and live as long as it does, so workers
//! can attach before a front end has connected. One front end is served at a time. Others wait in the accept queue of
//! the socket.
//!
//! ```text
//! front end ── socket ──> control thread ──> session (what this front end has set up) ──> cells ──> workers
//!                               └──> DeviceEvents, Status
//! ```
//! A refused message changes nothing. If the front end requested an acknowledgement, it gets a non-zero one. Otherwise,
//! the refusal is only logged and counted. The connection is closed if no other answer is possible: after an invalid
//! header, a refused request that has a reply, a worker that does not answer, or a loss of guest memory.

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

pub use device::{DeviceEvents, VhostDevice, VhostDeviceError};
pub use error::ControlError;
pub use status::{RingState, Status, VringStatus};

/// Maximum number of queue pairs of one device: messages identify a virtqueue by eight bits.
pub const MAX_QUEUE_PAIRS: u16 = 128;
/// Time for a process that listens at the socket to terminate. A killed process first frees its memory.
const ENDING: Duration = Duration::from_secs(1);
/// Maximum number of guest memory regions of one device, if they are added one by one.
pub const MAX_SLOTS: usize = 64;
/// Maximum number of regions for descriptors in flight that are created for one connection. A front end needs only one.
/// A front end that does not read the replies keeps the files of all of them open.
const REGIONS: usize = 8;
/// Minimum MTU (virtio 1.2, section 5.1.4.1).
pub const MIN_MTU: u16 = 68;

/// Configuration of a back end.
#[derive(Clone, Debug)]
pub struct BackendConfig {
    pub path: PathBuf,
    /// Whether the back end listens on the socket, or connects to a front end's socket and reconnects after a
    /// disconnect.
    pub role: Role,
    /// Owner, group and mode of a server's socket.
    pub access: SocketAccess,
    /// Number of queue pairs, 1 to [`MAX_QUEUE_PAIRS`]. The number of virtqueues is twice as large.
    pub queue_pairs: u16,
    /// Virtio features to offer: a subset of [`features::OFFERED`]. VIRTIO_F_VERSION_1 is always offered.
    pub features: u64,
    /// Maximum MTU that a front end may announce, at least [`MIN_MTU`].
    pub max_mtu: u16,
    /// Maximum amount of guest memory that is mapped for a front end, in bytes. Memory that the front end never touches
    /// itself is charged to this process when packets are written to it, up to this amount.
    pub max_memory: u64,
    /// Whether engines may make copies for this port. Otherwise, [`VhostDevice::register_async`] is refused.
    pub asynchronous: bool,
    /// How long a worker may take to release a virtqueue.
    pub timeout: Duration,
}

impl BackendConfig {
    /// Returns the configuration of a server at `path` with one queue pair, all features, any MTU, as much memory as
    /// the machine has, copies by engines allowed, and a timeout of 10 seconds.
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

    /// Returns the offered features. VIRTIO_NET_F_MQ is omitted with one queue pair.
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
    device: VhostDevice,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Starts a back end, which serves front ends from now on. A client retries until it is connected.
    ///
    /// # Errors
    /// Fails if the configuration is invalid, or if a server cannot listen at its path.
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
        let device = VhostDevice::new(&config);
        let control = control::Control::new(config, device.clone(), listener, Arc::clone(&stop), events);
        let thread = std::thread::Builder::new()
            .name("vhost-control".into())
            .spawn(|| control.run())
            .map_err(|source| StartError::System { what: "starting the control thread", source })?;
        Ok(Self { device, stop, thread: Some(thread) })
    }

    /// The virtqueues by index. The guest receives from even ones and transmits to odd ones.
    pub fn cells(&self) -> &[Arc<VringCell>] {
        self.device.cells()
    }

    /// The device that front ends see.
    pub fn device(&self) -> &VhostDevice {
        &self.device
    }

    /// Stops the back end: stops and drains the virtqueues, makes the callbacks, closes the connection, and removes a
    /// server's socket. Waits until all of this is done, unless called from a callback, which cannot wait for itself.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // The counter cannot be full, and no other error is possible.
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
