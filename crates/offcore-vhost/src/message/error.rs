//! What can be wrong with a message.

use super::{Code, MAX_FDS, MAX_PAYLOAD, MAX_REGIONS, VERSION};

/// What is wrong with a message, whatever the state of the device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Another version of the protocol.
    #[error("{code}: protocol version {found}, expected {VERSION}")]
    Version {
        /// The request.
        code: Code,
        /// The version found.
        found: u32,
    },
    /// Flags that the protocol does not have.
    #[error("{code}: flags {found:#x}, expected only version, reply and need_reply (bits 0 to 3)")]
    Flags {
        /// The request.
        code: Code,
        /// The flags found.
        found: u32,
    },
    /// A payload longer than that of any message.
    #[error("{code}: payload of {found} bytes, expected at most {MAX_PAYLOAD}")]
    Oversize {
        /// The request.
        code: Code,
        /// Bytes announced.
        found: u32,
    },
    /// A reply where a request is due.
    #[error("{code}: a reply, expected a request")]
    Reply {
        /// What it says it replies to.
        code: Code,
    },
    /// Something else where a reply is due.
    #[error("{found} ({}) where the reply to {expected} is due", if *reply { "a reply" } else { "a request" })]
    NoReply {
        /// The request that waits for its reply.
        expected: Code,
        /// What the message is about.
        found: Code,
        /// Whether it says it is a reply.
        reply: bool,
    },
    /// The payload has the wrong length.
    #[error("{code}: payload of {found} bytes, expected {expected}")]
    Payload {
        /// The request.
        code: Code,
        /// Bytes found.
        found: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// The wrong number of file descriptors.
    #[error("{code}: {found} file descriptors, expected {expected}")]
    Fds {
        /// The request.
        code: Code,
        /// How many came.
        found: usize,
        /// How many the request has.
        expected: usize,
    },
    /// More file descriptors than any message has, or than this process can hold.
    #[error(
        "{code}: file descriptors were lost: more than {MAX_FDS} of them, or this process may open no more (ulimit -n)"
    )]
    FdsLost {
        /// The request.
        code: Code,
    },
    /// A memory table without regions, or with too many.
    #[error("SET_MEM_TABLE: {found} regions, expected 1 to {MAX_REGIONS}")]
    Regions {
        /// Regions announced.
        found: u32,
    },
    /// The payload that names a virtqueue for a file descriptor has bits that mean nothing.
    #[error(
        "{code}: payload {found:#x}, expected a virtqueue index (bits 0 to 7) and the no-descriptor flag (bit 8)"
    )]
    FdPayload {
        /// The request.
        code: Code,
        /// The payload found.
        found: u64,
    },
    /// A request that is not understood.
    #[error("{code} is not supported")]
    Unsupported {
        /// The request.
        code: Code,
    },
}

impl MessageError {
    /// Whether the next message cannot be found any more.
    pub fn loses_the_stream(&self) -> bool {
        matches!(self, Self::Version { .. } | Self::Flags { .. } | Self::Oversize { .. })
    }
}
