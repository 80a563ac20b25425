//! Encoding and decoding of vhost-user messages, for both sides.
//!
//! ```text
//! request u32 | flags u32 | size u32 | payload, `size` bytes        file descriptors beside it (SCM_RIGHTS)
//! ```
//! All numbers are in host byte order. Decoding is strict: a message is accepted only if it has exactly the payload and
//! the file descriptors that its request defines. Anything else is a [`MessageError`]. Whether a value is valid for a
//! particular device (for example, whether virtqueue 7 exists) is checked by the receiver.
//!
//! [`Request`] is generic over the type of file descriptors, so that a sender can borrow them and a receiver owns them.

mod body;
mod code;
mod error;

use body::{Body, encode};

pub use code::Code;
pub use error::MessageError;

/// Length of a message header in bytes.
pub const HEADER: usize = 12;
/// Maximum number of regions in one SET_MEM_TABLE. The protocol defines 8. More are accepted because they do no harm.
pub const MAX_REGIONS: usize = 32;
/// Maximum length of a payload in bytes: a full memory table.
pub const MAX_PAYLOAD: usize = 8 + MAX_REGIONS * REGION;
/// Maximum number of file descriptors of a message: a full memory table.
pub const MAX_FDS: usize = MAX_REGIONS;

const REGION: usize = 32;
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Bits with the virtqueue's index in the payload of SET_VRING_KICK, _CALL and _ERR.
const FD_INDEX: u64 = 0xff;
/// Bit of that payload which says that no file descriptor is passed and the queue is polled.
const FD_NONE: u64 = 1 << 8;

/// Flag of [`VringAddr`]: writes to the used ring are logged.
pub const VHOST_VRING_F_LOG: u32 = 1;

/// The header of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The request, or the request that this message replies to.
    pub code: Code,
    pub reply: bool,
    /// Whether the sender requests an acknowledgement (with REPLY_ACK negotiated).
    pub need_reply: bool,
    /// Bytes of payload that follow.
    pub size: u32,
}

impl Header {
    /// Decodes a header.
    ///
    /// # Errors
    /// Fails for another protocol version, unknown flags, or a payload longer than any message has. The start of the
    /// next message is then unknown, and the connection can no longer be used.
    pub fn decode(bytes: [u8; HEADER]) -> Result<Self, MessageError> {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (code, flags, size) = (Code(word(0)), word(4), word(8));
        if flags & VERSION_MASK != VERSION {
            return Err(MessageError::Version { code, found: flags & VERSION_MASK });
        }
        if flags & !(VERSION_MASK | REPLY | NEED_REPLY) != 0 {
            return Err(MessageError::Flags { code, found: flags });
        }
        if size as usize > MAX_PAYLOAD {
            return Err(MessageError::Oversize { code, found: size });
        }
        Ok(Self { code, reply: flags & REPLY != 0, need_reply: flags & NEED_REPLY != 0, size })
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER] {
        let flags =
            VERSION | if self.reply { REPLY } else { 0 } | if self.need_reply { NEED_REPLY } else { 0 };
        let mut bytes = [0; HEADER];
        for (at, word) in [self.code.0, flags, self.size].into_iter().enumerate() {
            bytes[at * 4..at * 4 + 4].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// A region of a memory table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Guest physical address of the first byte.
    pub guest: u64,
    /// Length in bytes.
    pub size: u64,
    /// The front end's own address of the first byte. Ring addresses use this address space.
    pub user: u64,
    /// Offset of the first byte in the region's file.
    pub mmap_offset: u64,
}

/// Location of the dirty log in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogArea {
    /// Length in bytes. The log has one bit for each page of 4 KiB, starting at guest physical address 0.
    pub size: u64,
    pub offset: u64,
}

/// Location of the shared region for descriptors in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightArea {
    /// Length in bytes and offset in the file. Both are ignored in a request for a region.
    pub size: u64,
    pub offset: u64,
    /// Number of virtqueues, and maximum number of descriptors in each.
    pub queues: u16,
    pub queue_size: u16,
}

/// A number that belongs to one virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringState {
    pub index: u32,
    /// The number: size, base, or another value, depending on the request.
    pub num: u32,
}

/// Addresses of the parts of a virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddr {
    pub index: u32,
    /// [`VHOST_VRING_F_LOG`], or 0.
    pub flags: u32,
    /// Front-end address of the descriptor table.
    pub desc: u64,
    /// Front-end address of the used ring.
    pub used: u64,
    /// Front-end address of the available ring.
    pub avail: u64,
    /// Guest address for logging writes to the used ring, if `flags` enables this.
    pub log: u64,
}

/// An eventfd for one virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringFd<F> {
    pub index: u8,
    /// The eventfd; `None` if the virtqueue is polled instead.
    pub fd: Option<F>,
}

/// Defines the requests. For each, it gets the number and the layout: the name of the functions in [`body`] that decode
/// and encode the message.
macro_rules! requests {
    ($($(#[$doc:meta])* $name:ident $(($($field:ident: $kind:ty),*))? = $code:ident, $layout:ident;)*) => {
        /// A front end's request. `F` is the type of file descriptors.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Request<F> {
            $($(#[$doc])* $name $(($($kind),*))?,)*
        }

        impl<F> Request<F> {
            /// Returns the number of this request.
            pub fn code(&self) -> Code {
                match self {
                    $(Self::$name { .. } => Code::$code,)*
                }
            }

            fn decode_body(body: Body<'_, F>) -> Result<Self, MessageError> {
                match body.code {
                    $(Code::$code => {
                        let ($($($field,)*)?) = body.$layout()?;
                        Ok(Self::$name $(($($field),*))?)
                    })*
                    code => Err(MessageError::Unsupported { code }),
                }
            }

            fn encode_body(self) -> (Vec<u8>, Vec<F>) {
                match self {
                    $(Self::$name $(($($field),*))? => encode::$layout($($($field),*)?),)*
                }
            }
        }
    };
}

requests! {
    /// Requests the offered virtio features.
    GetFeatures = GET_FEATURES, empty;
    /// Sets the virtio features.
    SetFeatures(features: u64) = SET_FEATURES, value;
    /// Begins a session.
    SetOwner = SET_OWNER, empty;
    /// Deprecated and ignored.
    ResetOwner = RESET_OWNER, empty;
    /// Sets the guest's memory: regions, each with its file.
    SetMemTable(regions: Vec<(MemoryRegion, F)>) = SET_MEM_TABLE, regions;
    /// Sets the dirty log and its file.
    SetLogBase(log: LogArea, fd: F) = SET_LOG_BASE, log;
    /// Sets the size of a virtqueue.
    SetVringNum(size: VringState) = SET_VRING_NUM, state;
    /// Sets the addresses of a virtqueue's parts.
    SetVringAddr(addr: VringAddr) = SET_VRING_ADDR, addr;
    /// Sets the start position of a virtqueue: the next available entry.
    SetVringBase(base: VringState) = SET_VRING_BASE, state;
    /// Stops virtqueue `index` and requests its base. `num` is ignored.
    GetVringBase(queue: VringState) = GET_VRING_BASE, state;
    /// Sets the eventfd that the driver uses to notify the device. This starts the virtqueue.
    SetVringKick(kick: VringFd<F>) = SET_VRING_KICK, vring_fd;
    /// Sets the eventfd that the device uses to notify the driver.
    SetVringCall(call: VringFd<F>) = SET_VRING_CALL, vring_fd;
    /// Sets the eventfd that the device uses to report a broken virtqueue.
    SetVringErr(err: VringFd<F>) = SET_VRING_ERR, vring_fd;
    /// Requests the offered protocol features.
    GetProtocolFeatures = GET_PROTOCOL_FEATURES, empty;
    /// Sets the protocol features.
    SetProtocolFeatures(features: u64) = SET_PROTOCOL_FEATURES, value;
    /// Requests the number of queue pairs.
    GetQueueNum = GET_QUEUE_NUM, empty;
    /// Enables (`num` is 1) or disables (`num` is 0) a virtqueue.
    SetVringEnable(enable: VringState) = SET_VRING_ENABLE, state;
    /// Sets the MTU shown to the guest, in bytes.
    NetSetMtu(mtu: u64) = NET_SET_MTU, value;
    /// Passes a socket for requests by the back end.
    SetBackendReqFd(fd: F) = SET_BACKEND_REQ_FD, fd;
    /// Stops all virtqueues and discards the negotiated state.
    ResetDevice = RESET_DEVICE, empty;
    /// Requests the maximum number of memory regions that can be added one by one.
    GetMaxMemSlots = GET_MAX_MEM_SLOTS, empty;
    /// Adds a region to the guest's memory, with its file.
    AddMemReg(region: MemoryRegion, fd: F) = ADD_MEM_REG, region;
    /// Removes the region with the same guest address, size and front-end address. A file descriptor is ignored, but
    /// old front ends send one.
    RemMemReg(region: MemoryRegion, fd: Option<F>) = REM_MEM_REG, removed_region;
    /// Requests a region for descriptors in flight.
    GetInflightFd(area: InflightArea) = GET_INFLIGHT_FD, inflight;
    /// Sets the region for descriptors in flight, and its file.
    SetInflightFd(area: InflightArea, fd: F) = SET_INFLIGHT_FD, inflight_fd;
    /// Sets the virtio device status (virtio 1.2, section 2.1).
    SetStatus(status: u64) = SET_STATUS, value;
    /// Requests the virtio device status.
    GetStatus = GET_STATUS, empty;
}

impl<F> Request<F> {
    /// Decodes a request from its payload and its file descriptors.
    ///
    /// # Errors
    /// Fails if the message does not match the definition of the request exactly, or if the request is not supported.
    /// The file descriptors are closed, and the next message can be read.
    pub fn decode(header: &Header, payload: &[u8], fds: Vec<F>) -> Result<Self, MessageError> {
        if header.reply {
            return Err(MessageError::Reply { code: header.code });
        }
        Self::decode_body(Body { code: header.code, payload, fds })
    }

    /// Encodes the request for the socket: header and payload as one byte string, and the file descriptors to pass with
    /// it.
    pub fn encode(self, need_reply: bool) -> (Vec<u8>, Vec<F>) {
        let code = self.code();
        let (payload, fds) = self.encode_body();
        (message(code, false, need_reply, &payload), fds)
    }
}

/// A back end's reply. `F` is the type of file descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply<F> {
    /// Features, a number of queues or slots, a status, or an acknowledgement (0 for success).
    Value(u64),
    /// The base of a virtqueue.
    Vring(VringState),
    /// A region for descriptors in flight, and its file.
    Inflight(InflightArea, F),
}

impl<F> Reply<F> {
    /// Encodes the reply to the request `code` for the socket: bytes, and the file descriptor to pass with them.
    pub fn encode(self, code: Code) -> (Vec<u8>, Option<F>) {
        let (payload, mut fds) = match self {
            Self::Value(value) => encode::value(value),
            Self::Vring(state) => encode::state(state),
            Self::Inflight(area, fd) => encode::inflight_fd(area, fd),
        };
        (message(code, true, false, &payload), fds.pop())
    }

    /// Decodes the reply to the request `code`.
    ///
    /// # Errors
    /// Fails for a message that is not a reply, or a reply to another request, or if payload or file descriptors do not
    /// match.
    pub fn decode(code: Code, header: &Header, payload: &[u8], fds: Vec<F>) -> Result<Self, MessageError> {
        if !header.reply || header.code != code {
            let kind = if header.reply { "a reply" } else { "a request" };
            return Err(MessageError::NoReply { expected: code, found: header.code, kind });
        }
        let body = Body { code, payload, fds };
        Ok(match code {
            Code::GET_VRING_BASE => Self::Vring(body.state()?.0),
            Code::GET_INFLIGHT_FD => body.inflight_fd().map(|(area, fd)| Self::Inflight(area, fd))?,
            _ => Self::Value(body.value()?.0),
        })
    }
}

fn message(code: Code, reply: bool, need_reply: bool, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let mut bytes = Header { code, reply, need_reply, size }.encode().to_vec();
    bytes.extend(payload);
    bytes
}

#[cfg(test)]
mod tests;
