//! Why a message was refused, or a connection ended.

use offcore_mem::guest::TableError;
use offcore_mem::mapping::MemoryError;
use offcore_ring::RingError;
use offcore_ring::split::MAX_SIZE;

use super::{MAX_SLOTS, MIN_MTU};
use crate::cell::Unanswered;
use crate::connection::ConnectionError;
use crate::features;
use crate::message::{Code, MessageError};

/// What a front end did that the device cannot follow, or what went wrong in serving it.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The connection has ended.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The message is not what the protocol says.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A legacy driver, or a front end that hides modern devices from it.
    #[error(
        "SET_FEATURES {found:#x}: VIRTIO_F_VERSION_1 (bit 32) is missing; only modern virtio 1.x drivers are served \
         (for QEMU: disable-legacy=on)"
    )]
    Legacy {
        /// The features chosen.
        found: u64,
    },
    /// Features that were not offered.
    #[error("{code} {found:#x}: {:#x} of them were not offered, expected a subset of {offered:#x}", found & !offered)]
    NotOffered {
        /// The request.
        code: Code,
        /// The features chosen.
        found: u64,
        /// The features offered.
        offered: u64,
    },
    /// There is no such virtqueue.
    #[error("{code}: virtqueue {index}, expected one below {vrings}")]
    VringIndex {
        /// The request.
        code: Code,
        /// The index found.
        index: u32,
        /// Virtqueues of the device.
        vrings: usize,
    },
    /// A request of a protocol feature that was not negotiated.
    #[error(
        "{code}: protocol feature {name} (bit {bit}) was not negotiated; choose it by SET_PROTOCOL_FEATURES first"
    )]
    NotNegotiated {
        /// The request.
        code: Code,
        /// The feature's name.
        name: &'static str,
        /// The feature's bit.
        bit: u32,
    },
    /// Not a queue size.
    #[error(
        "SET_VRING_NUM: virtqueue {queue} of {found}, expected {} from 1 to {MAX_SIZE}",
        if *packed { "a number" } else { "a power of two" }
    )]
    Size {
        /// Index of the virtqueue.
        queue: u16,
        /// The size found.
        found: u32,
        /// Whether the ring is packed, or may be.
        packed: bool,
    },
    /// Not a base of a split virtqueue.
    #[error("SET_VRING_BASE: virtqueue {queue} at {found}, expected at most 65535")]
    Base {
        /// Index of the virtqueue.
        queue: u16,
        /// The base found.
        found: u32,
    },
    /// Not a base of a packed virtqueue.
    #[error(
        "SET_VRING_BASE: packed virtqueue {queue} at {found:#x}, expected descriptors below {size} (bits 0 to 14, and 16 \
         to 30), each with a wrap counter above it"
    )]
    PackedBase {
        /// Index of the virtqueue.
        queue: u16,
        /// The base found.
        found: u32,
        /// Descriptors of the ring.
        size: u16,
    },
    /// Neither enable nor disable.
    #[error("SET_VRING_ENABLE: virtqueue {queue}, state {found}, expected 0 or 1")]
    Enable {
        /// Index of the virtqueue.
        queue: u16,
        /// The state found.
        found: u32,
    },
    /// Dirty pages would have to be logged.
    #[error("SET_VRING_ADDR: virtqueue {queue}, flags {found:#x}: logging was not offered, expected 0")]
    AddrFlags {
        /// Index of the virtqueue.
        queue: u16,
        /// The flags found.
        found: u32,
    },
    /// A virtqueue cannot be changed so while it runs.
    #[error("{code}: virtqueue {queue} is running; stop it by GET_VRING_BASE first")]
    Running {
        /// The request.
        code: Code,
        /// Index of the virtqueue.
        queue: u16,
    },
    /// Features cannot be changed while a virtqueue runs.
    #[error(
        "SET_FEATURES {found:#x}: virtqueue {queue} is running with {present:#x}; stop it by GET_VRING_BASE first"
    )]
    RunningFeatures {
        /// Index of a virtqueue that runs.
        queue: u16,
        /// The features found.
        found: u64,
        /// The features in force.
        present: u64,
    },
    /// A ring part is not in guest memory as a whole, or not aligned.
    #[error("virtqueue {queue}: {source}")]
    Layout {
        /// Index of the virtqueue.
        queue: u16,
        /// What is wrong.
        source: RingError,
    },
    /// A file descriptor that writing to might block.
    #[error("{code}: virtqueue {queue}: the file descriptor is {found}, expected an eventfd")]
    NotAnEventfd {
        /// The request.
        code: Code,
        /// Index of the virtqueue.
        queue: u16,
        /// What it is.
        found: String,
    },
    /// Not an MTU of this device.
    #[error("NET_SET_MTU: {found} bytes, expected {MIN_MTU} to {max}")]
    Mtu {
        /// The MTU found.
        found: u64,
        /// The longest that the port carries.
        max: u16,
    },
    /// Not a device status.
    #[error("SET_STATUS: {found:#x}, expected one byte")]
    Status {
        /// The status found.
        found: u64,
    },
    /// A file descriptor that requests cannot be sent to.
    #[error("{code}: the file descriptor is not a socket")]
    NotASocket {
        /// The request.
        code: Code,
    },
    /// A memory region whose end is beyond any file or address space.
    #[error("{code}: region {guest:#x}+{size:#x} at file offset {mmap_offset:#x} is empty or wraps around")]
    Region {
        /// The request.
        code: Code,
        /// Guest physical address.
        guest: u64,
        /// Length in bytes.
        size: u64,
        /// Offset in the file.
        mmap_offset: u64,
    },
    /// A memory region cannot be mapped.
    #[error("{code}: region {guest:#x}: {source}")]
    Mapping {
        /// The request.
        code: Code,
        /// Guest physical address.
        guest: u64,
        /// Why.
        source: MemoryError,
    },
    /// A memory region whose pages somebody could hold back.
    #[error(
        "{code}: region {guest:#x}: its file is on file system {found:#x}; expected shared memory (a memfd, tmpfs), \
         hugetlbfs, ext4, xfs or btrfs"
    )]
    FileSystem {
        /// The request.
        code: Code,
        /// Guest physical address.
        guest: u64,
        /// The file system's number in linux/magic.h.
        found: i64,
    },
    /// The memory table makes no sense.
    #[error("{code}: {source}")]
    Table {
        /// The request.
        code: Code,
        /// What is wrong.
        source: TableError,
    },
    /// Every slot for a memory region is taken.
    #[error("ADD_MEM_REG: region {guest:#x} is one too many, expected at most {MAX_SLOTS}; remove one first")]
    Slots {
        /// Guest physical address.
        guest: u64,
    },
    /// There is no such memory region.
    #[error(
        "REM_MEM_REG: no region is {guest:#x}+{size:#x} at front-end address {user:#x}; all three must be as they were added"
    )]
    NoRegion {
        /// Guest physical address.
        guest: u64,
        /// Length in bytes.
        size: u64,
        /// The front end's own address.
        user: u64,
    },
    /// A worker does not let go of a virtqueue.
    #[error(transparent)]
    Unanswered(#[from] Unanswered),
    /// A guest's memory has vanished under us.
    #[error("guest memory has vanished: a file of the memory table was truncated while the device used it")]
    Vanished,
    /// A virtqueue broke.
    #[error("virtqueue {queue} is broken until the guest resets it: {source}")]
    Broken {
        /// Index of the virtqueue.
        queue: u16,
        /// What the guest did.
        source: RingError,
    },
}

impl ControlError {
    /// Whether nothing but closing the connection is left.
    pub(super) fn ends_connection(&self) -> bool {
        match self {
            Self::Connection(_) | Self::Unanswered(_) | Self::Vanished => true,
            Self::Message(error) => error.loses_the_stream(),
            _ => false,
        }
    }
}

const _: () =
    assert!(features::VIRTIO_F_VERSION_1 == 1 << 32, "the text of ControlError::Legacy names bit 32");
