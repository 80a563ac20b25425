//! What can go wrong on the front end's side.

use std::path::PathBuf;
use std::time::Duration;

use offcore_mem::guest::TableError;
use offcore_mem::mapping::MemoryError;
use offcore_ring::RingError;

use crate::connection::{ConnectionError, SocketError};
use crate::message::{Code, MessageError, Reply, VringState};

/// Why a front end cannot be, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum FrontEndError {
    /// No socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// No back end to connect to.
    #[error("no back end within {waited:?}: {source}")]
    NoBackEnd {
        /// How long was waited.
        waited: Duration,
        /// What the last attempt said.
        source: SocketError,
    },
    /// No back end has connected to our socket.
    #[error("{}: no back end connected within {waited:?}", path.display())]
    NobodyConnected {
        /// The socket's path.
        path: PathBuf,
        /// How long was waited.
        waited: Duration,
    },
    /// The connection has ended.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// A reply is not what the protocol says.
    #[error("reply of the back end: {0}")]
    Message(#[from] MessageError),
    /// No reply came.
    #[error("{code}: no reply of the back end within {waited:?}")]
    NoReply {
        /// The request.
        code: Code,
        /// How long was waited.
        waited: Duration,
    },
    /// The back end has refused a request.
    #[error("{code}: refused by the back end ({reply:?}); its log says why")]
    Refused {
        /// The request.
        code: Code,
        /// What it replied.
        reply: Reply,
    },
    /// A legacy back end.
    #[error(
        "the back end offers {offered:#x} without VIRTIO_F_VERSION_1 (bit 32); only modern ones are used"
    )]
    Legacy {
        /// The features offered.
        offered: u64,
    },
    /// The back end has too few queue pairs, or does not offer several.
    #[error(
        "the back end offers {found} queue pairs (several only with NET_MQ), expected at least {expected}"
    )]
    QueuePairs {
        /// Queue pairs offered.
        found: u64,
        /// Queue pairs wanted.
        expected: u16,
    },
    /// No such number of queue pairs.
    #[error("{found} queue pairs: expected 1 to {}", crate::backend::MAX_QUEUE_PAIRS)]
    Pairs {
        /// The number given.
        found: u16,
    },
    /// Too much memory in pieces.
    #[error(
        "{found} regions of memory, expected at most {max}: the back end takes these and one for the rings"
    )]
    Regions {
        /// Regions given.
        found: usize,
        /// Regions that the back end takes beside that of the rings.
        max: usize,
    },
    /// The back end cleared the status bit that says that it accepts the features.
    #[error("SET_FEATURES {features:#x}: the back end does not accept them (device status {found:#x})")]
    FeaturesRefused {
        /// The features chosen.
        features: u64,
        /// The status it replied.
        found: u64,
    },
    /// The back end cannot be reset.
    #[error("the back end does not offer RESET_DEVICE (protocol feature 13): close the connection instead")]
    NoReset,
    /// Not a queue size.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// No memory for the rings.
    #[error("memory of the rings: {0}")]
    Memory(#[from] MemoryError),
    /// The rings' memory makes no table.
    #[error("memory of the rings: {0}")]
    Table(#[from] TableError),
    /// The base of a stopped virtqueue makes no sense.
    #[error("GET_VRING_BASE: the back end replies {found:?} for virtqueue {queue}")]
    Base {
        /// Index of the virtqueue.
        queue: usize,
        /// What it replied; `None` when it was no base.
        found: Option<VringState>,
    },
    /// The kernel refused.
    #[error("{what}: {source}")]
    System {
        /// The call.
        what: &'static str,
        /// The kernel's reason.
        source: std::io::Error,
    },
}
