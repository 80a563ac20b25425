//! Reasons for refusing a message or closing a connection.

use offcore_dma::mover::MoverError;
use offcore_mem::guest::TableError;
use offcore_mem::mapping::MemoryError;
use offcore_ring::RingError;
use offcore_ring::split::MAX_SIZE;

use super::{MAX_SLOTS, MIN_MTU, REGIONS};
use crate::cell::WorkerTimeout;
use crate::connection::ConnectionError;
use crate::features;
use crate::message::{Code, MessageError};

/// An error of a front end, or of the device while it serves the front end. `guest` is a guest physical address.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum ControlError {
    /// {0}
    Connection(#[from] ConnectionError),
    /// {0}
    Message(#[from] MessageError),
    /// SET_FEATURES {found:#x}: VIRTIO_F_VERSION_1 (bit 32) is missing; only modern virtio 1.x drivers are served
    /// (for QEMU: disable-legacy=on)
    Legacy { found: u64 },
    /// {code} {found:#x}: {extra:#x} of them were not offered, expected a subset of {offered:#x}
    NotOffered { code: Code, found: u64, offered: u64, extra: u64 },
    /// {code}: virtqueue {index}, expected one below {vrings}
    VringIndex { code: Code, index: u32, vrings: usize },
    /// {code}: protocol feature {name} (bit {bit}) was not negotiated; choose it by SET_PROTOCOL_FEATURES first
    NotNegotiated { code: Code, name: &'static str, bit: u32 },
    /// SET_VRING_NUM: virtqueue {queue} of {found}, expected {expected} from 1 to {MAX_SIZE:?}
    Size {
        queue: u16,
        found: u32,
        /// `a power of two`, or `a number` for a ring that is or may be packed.
        expected: &'static str,
    },
    /// SET_VRING_BASE: virtqueue {queue} at {found}, expected at most 65535
    Base { queue: u16, found: u32 },
    /// SET_VRING_BASE: packed virtqueue {queue} at {found:#x}, expected descriptors below {size} (bits 0 to 14, and
    /// 16 to 30), each with a wrap counter above it
    PackedBase { queue: u16, found: u32, size: u16 },
    /// SET_VRING_ENABLE: virtqueue {queue}, state {found}, expected 0 or 1
    Enable { queue: u16, found: u32 },
    /// SET_VRING_ADDR: virtqueue {queue}, flags {found:#x}, expected 0 or 1 (the used ring is logged)
    AddrFlags { queue: u16, found: u32 },
    /// {code}: virtqueue {queue} is running; stop it by GET_VRING_BASE first
    Running { code: Code, queue: u16 },
    /// SET_FEATURES {found:#x}: virtqueue {queue} is running with {present:#x}; stop it by GET_VRING_BASE first
    RunningFeatures { queue: u16, found: u64, present: u64 },
    /// virtqueue {queue}: {source}
    Layout { queue: u16, source: RingError },
    /// {code}: virtqueue {queue}: the file descriptor is {found}, expected an eventfd
    // Writing to another file might block.
    NotAnEventfd { code: Code, queue: u16, found: String },
    /// NET_SET_MTU: {found} bytes, expected {MIN_MTU:?} to {max}
    Mtu { found: u64, max: u16 },
    /// SET_STATUS: {found:#x}, expected one byte
    Status { found: u64 },
    /// {code}: the file descriptor is not a Unix socket
    NotASocket { code: Code },
    /// {code}: region {guest:#x}+{size:#x} at file offset {mmap_offset:#x} is empty or wraps around
    Region { code: Code, guest: u64, size: u64, mmap_offset: u64 },
    /// {code}: {found} MiB of guest memory, expected at most {most}: max_memory= of the port raises the limit
    TooMuch { code: Code, found: u64, most: u64 },
    /// {code}: {found} MiB of log and region in flight, expected at most {most}
    NonGuestLimit { code: Code, found: u64, most: u64 },
    /// {code}: region {guest:#x}: {source}
    Mapping { code: Code, guest: u64, source: MemoryError },
    /// {code}: region {guest:#x}: its file is on file system {found:#x}; expected shared memory (a memfd, tmpfs),
    /// hugetlbfs, ext4, xfs or btrfs
    // On another file system, a process could withhold the pages.
    FileSystem { code: Code, guest: u64, found: i64 },
    /// {code}: {source}
    Table { code: Code, source: TableError },
    /// ADD_MEM_REG: region {guest:#x} is one too many, expected at most {MAX_SLOTS:?}; remove one first
    Slots { guest: u64 },
    /// REM_MEM_REG: no region is {guest:#x}+{size:#x} at front-end address {user:#x}; all three must be as they were
    /// added
    NoRegion { guest: u64, size: u64, user: u64 },
    /// {code}: {queues} virtqueues of {queue_size} descriptors, expected 1 to {vrings}, of 1 to {MAX_SIZE:?}
    InflightQueues { code: Code, queues: u16, queue_size: u16, vrings: usize },
    /// SET_INFLIGHT_FD: {size} bytes at {offset:#x}, expected at least {expected}, at a multiple of 8: send a region from
    /// GET_INFLIGHT_FD
    InflightArea { size: u64, offset: u64, expected: usize },
    /// {code}: VHOST_F_LOG_ALL requires a log; send SET_LOG_BASE first
    NoLog { code: Code },
    /// {code}: the log of dirty pages ends at guest address {log_end:#x}, expected at least {expected:#x}
    LogTooShort { code: Code, log_end: u64, expected: u64 },
    /// {left} file descriptors of this port's front ends are still being closed: their file systems or sockets block the close
    Errands { left: usize },
    /// GET_INFLIGHT_FD: too many regions, expected at most {REGIONS:?} per connection
    Regions,
    /// {0}
    WorkerTimeout(#[from] WorkerTimeout),
    /// guest memory has vanished: a file of the memory table, or of the log, was truncated while the device used it
    Vanished,
    /// virtqueue {queue} is broken until the guest resets it: {source}
    Broken { queue: u16, source: RingError },
    /// virtqueue {queue} is copied by the core, because its channel cannot be used: {source}
    Refused { queue: u16, source: MoverError },
}

impl ControlError {
    /// Whether the connection must be closed.
    pub(super) fn ends_connection(&self) -> bool {
        match self {
            Self::Connection(_) | Self::Errands { .. } | Self::WorkerTimeout(_) | Self::Vanished => true,
            Self::Message(error) => error.is_framing_error(),
            _ => false,
        }
    }
}

const _: () =
    assert!(features::VIRTIO_F_VERSION_1 == 1 << 32, "the text of ControlError::Legacy names bit 32");
