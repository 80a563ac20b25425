//! Errors in messages.

use super::{Code, MAX_PAYLOAD, MAX_REGIONS, VERSION};

/// An invalid message, independent of the state of the device.
#[derive(Clone, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum MessageError {
    /// {code}: protocol version {found}, expected {VERSION:?}
    Version { code: Code, found: u32 },
    /// {code}: flags {found:#x}, expected only version, reply and need_reply (bits 0 to 3)
    Flags { code: Code, found: u32 },
    /// {code}: payload of {found} bytes, expected at most {MAX_PAYLOAD:?}
    Oversize { code: Code, found: u32 },
    /// {code}: a reply, expected a request
    Reply { code: Code },
    /// {found} ({kind}), expected the reply to {expected}
    NoReply {
        expected: Code,
        found: Code,
        /// `a reply` or `a request`, as it says.
        kind: &'static str,
    },
    /// {code}: payload of {found} bytes, expected {expected}
    Payload { code: Code, found: usize, expected: usize },
    /// {code}: {found} file descriptors, expected {expected}
    Fds { code: Code, found: usize, expected: usize },
    /// {code}: file descriptors were lost: this process has reached its limit (ulimit -n)
    FdsLost { code: Code },
    /// SET_MEM_TABLE: {found} regions, expected 1 to {MAX_REGIONS:?}
    Regions { found: u32 },
    /// {code}: payload {found:#x}, expected a virtqueue index (bits 0 to 7) and the no-descriptor flag (bit 8)
    FdPayload { code: Code, found: u64 },
    /// {code} is not supported
    Unsupported { code: Code },
}

impl MessageError {
    /// Whether the start of the next message is unknown.
    pub fn is_framing_error(&self) -> bool {
        matches!(self, Self::Version { .. } | Self::Flags { .. } | Self::Oversize { .. })
    }
}
