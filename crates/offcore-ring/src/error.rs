//! Errors of a queue.

/// An error that breaks a queue. Other queues are not affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum RingError {
    /// queue size {0}: expected a power of two from 1 to 32768
    Size(u32),
    /// packed queue size {0}: expected 1 to 32768
    PackedSize(u32),
    /// packed queue of {size} is to start at {found:#x}, which is not below its size (bit 15 is the wrap
    /// counter)
    Base { found: u16, size: u16 },
    /// {part} at {address:#x} is not aligned to {align} bytes
    Alignment { part: &'static str, address: usize, align: usize },
    /// {part} at {address:#x}+{len:#x} is not in guest memory
    Part { part: &'static str, address: u64, len: usize },
    /// {ring} index {found} is more than {size} ahead of {expected}
    Index { ring: &'static str, found: u16, expected: u16, size: u16 },
    /// descriptor {index} was made available again before it was returned
    Taken { index: u16 },
    /// chain at descriptor {head} continues in a descriptor that was not made available
    PartialChain { head: u16 },
    /// descriptor {found} of a table of {size}
    Descriptor { found: u32, size: u32 },
    /// chain at descriptor {head} is longer than its table of {size}: it loops
    Loop { head: u16, size: u32 },
    /// chain at descriptor {head} has more than {max} buffers
    TooManyBuffers { head: u16, max: usize },
    /// indirect table of {len} bytes with flags {flags:#x} at descriptor {head}: expected a multiple of 16, not too long,
    /// and no NEXT
    IndirectTable { head: u16, len: u32, flags: u16 },
    /// indirect descriptor at chain {head} where none is allowed
    IndirectNotAllowed { head: u16 },
    /// buffer {addr:#x}+{len:#x} is not in guest memory
    Address { addr: u64, len: u32 },
    /// chain at descriptor {head} has a buffer of the wrong direction
    Direction { head: u16 },
    /// used element names chain {0}, which is not in flight
    NotInFlight(u32),
    /// the in-flight region belongs to another ring or back end: version {version}, features {features:#x}, {found}
    /// descriptors, expected the {size} of this ring, at most {room}
    Inflight { version: u16, features: u64, found: u16, room: u16, size: u16 },
    /// a file of the guest's memory was truncated while the queue used it
    Vanished,
}
