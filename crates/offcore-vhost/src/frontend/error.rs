//! Errors of the front end.

use std::path::PathBuf;
use std::time::Duration;

use offcore_mem::guest::TableError;
use offcore_mem::mapping::MemoryError;
use offcore_ring::RingError;

use crate::backend::MAX_QUEUE_PAIRS;
use crate::connection::{ConnectionError, SocketError};
use crate::message::{Code, MessageError, Reply, VringState};
use crate::passed::PassedFd;

/// An error of the front end.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum FrontEndError {
    /// {0}
    Socket(#[from] SocketError),
    /// no back end: {source}
    NoBackEnd { source: SocketError },
    /// {path}: no back end connected within {waited:?}
    AcceptTimedOut { path: PathBuf, waited: Duration },
    /// {path}: the back end belongs to user {found}, expected root or {own}: a back end can write to all packets; to permit
    /// it, add peer={found} to the port
    WrongUser { path: PathBuf, found: u32, own: u32 },
    /// {left} file descriptors of this port's back ends are still being closed: their file systems or sockets block the close
    Errands { left: usize },
    /// {0}
    Connection(#[from] ConnectionError),
    /// reply of the back end: {0}
    Message(#[from] MessageError),
    /// {code}: no reply of the back end within {waited:?}
    NoReply { code: Code, waited: Duration },
    /// {code}: refused by the back end; its log says why
    Refused { code: Code, reply: Reply<PassedFd> },
    /// the back end offers {offered:#x} without VIRTIO_F_VERSION_1 (bit 32); only modern back ends are supported
    Legacy { offered: u64 },
    /// the back end offers {found} queue pairs, expected at least {expected}
    QueuePairs { found: u64, expected: u16 },
    /// the back end does not offer {lacking}, which {expected} queue pairs need: expected one pair
    NoMultiqueue { lacking: &'static str, expected: u16 },
    /// {found} queue pairs: expected 1 to {MAX_QUEUE_PAIRS:?}
    Pairs { found: u16 },
    /// {found} regions of memory, expected at most {max}: the back end takes these and one for the rings
    Regions { found: usize, max: usize },
    /// SET_FEATURES {features:#x}: the back end does not accept them (device status {found:#x})
    FeaturesRefused { features: u64, found: u64 },
    /// another back end, with features {found:#x}, expected {features:#x} and INFLIGHT_SHMFD (protocol feature 12): the virtqueues
    /// cannot continue
    Other { features: u64, found: u64 },
    /// the back end does not offer RESET_DEVICE (protocol feature 13): close the connection instead
    NoReset,
    /// {0}
    Ring(#[from] RingError),
    /// memory of the rings: {0}
    Memory(#[from] MemoryError),
    /// memory of the rings: {0}
    Table(#[from] TableError),
    /// GET_VRING_BASE: the back end replies {found:?} for virtqueue {queue}
    Base { queue: usize, found: Option<VringState> },
    /// io_setup: {source}; signals to a back end need asynchronous I/O: raise fs.aio-max-nr, or have the sandbox allow it
    Signals { source: std::io::Error },
    /// {what}: {source}
    System { what: &'static str, source: std::io::Error },
}
