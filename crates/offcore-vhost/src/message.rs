//! The vhost-user protocol's messages: encoding and decoding, for both sides.
//!
//! ```text
//! request u32 | flags u32 | size u32 | payload, `size` bytes        file descriptors beside it (SCM_RIGHTS)
//! ```
//! All numbers are in the host's byte order. Decoding is strict: a message is accepted only with exactly the payload
//! and exactly the file descriptors that its request has, and everything else is said in a [`MessageError`]. What is
//! valid for a particular device (is there a virtqueue 7?) is the receiver's business.
//!
//! [`Request`] is generic in what stands for a file descriptor, so that a sender lends what a receiver comes to own.

mod body;
mod code;
mod error;

use body::{Body, encode_inflight, encode_region, encode_regions};

pub use code::Code;
pub use error::MessageError;

/// Bytes of a message's header.
pub const HEADER: usize = 12;
/// Regions of one SET_MEM_TABLE, at most. The protocol has 8; more do no harm where a front end sends them.
pub const MAX_REGIONS: usize = 32;
/// Bytes of a payload, at most: that of a memory table.
pub const MAX_PAYLOAD: usize = 8 + MAX_REGIONS * REGION;
/// File descriptors beside a message, at most: those of a memory table.
pub const MAX_FDS: usize = MAX_REGIONS;

const REGION: usize = 32;
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Bits of the payload of SET_VRING_KICK, _CALL and _ERR that hold the virtqueue's index.
const FD_INDEX: u64 = 0xff;
/// Bit of that payload that says: no file descriptor, poll.
const FD_NONE: u64 = 1 << 8;

/// Flag of [`VringAddr`]: writes to the used ring are logged.
pub const VHOST_VRING_F_LOG: u32 = 1;

/// What every message begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Which request, or the request that this replies to.
    pub code: Code,
    pub reply: bool,
    /// Whether the sender wants an acknowledgement (with REPLY_ACK negotiated).
    pub need_reply: bool,
    /// Bytes of payload that follow.
    pub size: u32,
}

impl Header {
    /// Takes a header apart.
    ///
    /// # Errors
    /// Another protocol version, unknown flags, or a payload longer than any message's. Where the next message begins
    /// is then unknown: the connection is of no more use.
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

    /// The header's bytes.
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
    /// The front end's own address of the first byte, in which ring addresses are given.
    pub user: u64,
    /// Where in the region's file the first byte is.
    pub mmap_offset: u64,
}

/// Where the log of dirty pages is in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogArea {
    /// Length in bytes: a bit for each page of 4 KiB, from guest physical address 0 on.
    pub size: u64,
    pub offset: u64,
}

/// Where the parts of virtqueues are in a region for descriptors in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightArea {
    /// Length in bytes, and where it begins in its file. Mean nothing in a request for a region.
    pub size: u64,
    pub offset: u64,
    /// Virtqueues, and descriptors of each at most.
    pub queues: u16,
    pub queue_size: u16,
}

/// A number about one virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringState {
    pub index: u32,
    /// Size, base, or whatever the request is about.
    pub num: u32,
}

/// Where the parts of a virtqueue are.
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
    /// Guest address under which the used ring is logged, if `flags` says so.
    pub log: u64,
}

/// An eventfd for one virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringFd<F> {
    pub index: u8,
    /// The eventfd; `None` when the virtqueue is polled instead.
    pub fd: Option<F>,
}

/// A front end's request. `F` stands for a file descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<F> {
    /// Which virtio features are offered?
    GetFeatures,
    /// These virtio features are chosen.
    SetFeatures(u64),
    /// A session begins.
    SetOwner,
    /// Deprecated; to be ignored.
    ResetOwner,
    /// The guest's memory: regions, each with the file that holds it.
    SetMemTable(Vec<(MemoryRegion, F)>),
    /// The log of dirty pages, and its file.
    SetLogBase(LogArea, F),
    /// Size of a virtqueue.
    SetVringNum(VringState),
    /// Addresses of a virtqueue's parts.
    SetVringAddr(VringAddr),
    /// Available entry at which a virtqueue begins.
    SetVringBase(VringState),
    /// Stop the virtqueue `index` and tell its base. `num` means nothing.
    GetVringBase(VringState),
    /// Eventfd by which the driver notifies the device; starts the virtqueue.
    SetVringKick(VringFd<F>),
    /// Eventfd by which the device notifies the driver.
    SetVringCall(VringFd<F>),
    /// Eventfd by which the device says that a virtqueue is broken.
    SetVringErr(VringFd<F>),
    /// Which protocol features are offered?
    GetProtocolFeatures,
    /// These protocol features are chosen.
    SetProtocolFeatures(u64),
    /// How many queue pairs are there?
    GetQueueNum,
    /// Enable (`num` is 1) or disable (0) a virtqueue.
    SetVringEnable(VringState),
    /// The MTU that the guest is shown, in bytes.
    NetSetMtu(u64),
    /// A socket for requests of the back end.
    SetBackendReqFd(F),
    /// Stop all virtqueues and forget what was negotiated.
    ResetDevice,
    /// How many regions of memory may there be, added one by one?
    GetMaxMemSlots,
    /// One more region of the guest's memory, with the file that holds it.
    AddMemReg(MemoryRegion, F),
    /// A region goes: the one with the same guest address, size and front-end address. A file descriptor means nothing,
    /// but old front ends send one.
    RemMemReg(MemoryRegion, Option<F>),
    /// Make a region for descriptors in flight.
    GetInflightFd(InflightArea),
    /// The region for descriptors in flight, and its file.
    SetInflightFd(InflightArea, F),
    /// The virtio device status (virtio 1.2, section 2.1).
    SetStatus(u64),
    /// What is the virtio device status?
    GetStatus,
}

impl<F> Request<F> {
    /// Which request this is.
    pub fn code(&self) -> Code {
        match self {
            Self::GetFeatures => Code::GET_FEATURES,
            Self::SetFeatures(_) => Code::SET_FEATURES,
            Self::SetOwner => Code::SET_OWNER,
            Self::ResetOwner => Code::RESET_OWNER,
            Self::SetMemTable(_) => Code::SET_MEM_TABLE,
            Self::SetLogBase(..) => Code::SET_LOG_BASE,
            Self::SetVringNum(_) => Code::SET_VRING_NUM,
            Self::SetVringAddr(_) => Code::SET_VRING_ADDR,
            Self::SetVringBase(_) => Code::SET_VRING_BASE,
            Self::GetVringBase(_) => Code::GET_VRING_BASE,
            Self::SetVringKick(_) => Code::SET_VRING_KICK,
            Self::SetVringCall(_) => Code::SET_VRING_CALL,
            Self::SetVringErr(_) => Code::SET_VRING_ERR,
            Self::GetProtocolFeatures => Code::GET_PROTOCOL_FEATURES,
            Self::SetProtocolFeatures(_) => Code::SET_PROTOCOL_FEATURES,
            Self::GetQueueNum => Code::GET_QUEUE_NUM,
            Self::SetVringEnable(_) => Code::SET_VRING_ENABLE,
            Self::NetSetMtu(_) => Code::NET_SET_MTU,
            Self::SetBackendReqFd(_) => Code::SET_BACKEND_REQ_FD,
            Self::ResetDevice => Code::RESET_DEVICE,
            Self::GetMaxMemSlots => Code::GET_MAX_MEM_SLOTS,
            Self::AddMemReg(..) => Code::ADD_MEM_REG,
            Self::RemMemReg(..) => Code::REM_MEM_REG,
            Self::GetInflightFd(_) => Code::GET_INFLIGHT_FD,
            Self::SetInflightFd(..) => Code::SET_INFLIGHT_FD,
            Self::SetStatus(_) => Code::SET_STATUS,
            Self::GetStatus => Code::GET_STATUS,
        }
    }

    /// Decodes a request from its payload and the file descriptors that came with it.
    ///
    /// # Errors
    /// Whatever is not exactly as the request has it, and requests that are not understood. The file descriptors are
    /// closed; the next message can be read.
    pub fn decode(header: &Header, payload: &[u8], fds: Vec<F>) -> Result<Self, MessageError> {
        if header.reply {
            return Err(MessageError::Reply { code: header.code });
        }
        let code = header.code;
        let body = Body { code, payload, fds };
        Ok(match code {
            Code::GET_FEATURES => body.nothing(Self::GetFeatures)?,
            Code::SET_FEATURES => Self::SetFeatures(body.value()?),
            Code::SET_OWNER => body.nothing(Self::SetOwner)?,
            Code::RESET_OWNER => body.nothing(Self::ResetOwner)?,
            Code::SET_MEM_TABLE => Self::SetMemTable(body.regions()?),
            Code::SET_LOG_BASE => body.log().map(|(log, fd)| Self::SetLogBase(log, fd))?,
            Code::SET_VRING_NUM => Self::SetVringNum(body.state()?),
            Code::SET_VRING_ADDR => Self::SetVringAddr(body.addr()?),
            Code::SET_VRING_BASE => Self::SetVringBase(body.state()?),
            Code::GET_VRING_BASE => Self::GetVringBase(body.state()?),
            Code::SET_VRING_KICK => Self::SetVringKick(body.vring_fd()?),
            Code::SET_VRING_CALL => Self::SetVringCall(body.vring_fd()?),
            Code::SET_VRING_ERR => Self::SetVringErr(body.vring_fd()?),
            Code::GET_PROTOCOL_FEATURES => body.nothing(Self::GetProtocolFeatures)?,
            Code::SET_PROTOCOL_FEATURES => Self::SetProtocolFeatures(body.value()?),
            Code::GET_QUEUE_NUM => body.nothing(Self::GetQueueNum)?,
            Code::SET_VRING_ENABLE => Self::SetVringEnable(body.state()?),
            Code::NET_SET_MTU => Self::NetSetMtu(body.value()?),
            Code::SET_BACKEND_REQ_FD => Self::SetBackendReqFd(body.fd()?),
            Code::RESET_DEVICE => body.nothing(Self::ResetDevice)?,
            Code::GET_MAX_MEM_SLOTS => body.nothing(Self::GetMaxMemSlots)?,
            Code::ADD_MEM_REG => body.region().map(|(region, fd)| Self::AddMemReg(region, fd))?,
            Code::REM_MEM_REG => body.region_going().map(|(region, fd)| Self::RemMemReg(region, fd))?,
            Code::GET_INFLIGHT_FD => Self::GetInflightFd(body.inflight()?),
            Code::SET_INFLIGHT_FD => body.inflight_fd().map(|(area, fd)| Self::SetInflightFd(area, fd))?,
            Code::SET_STATUS => Self::SetStatus(body.value()?),
            Code::GET_STATUS => body.nothing(Self::GetStatus)?,
            _ => return Err(MessageError::Unsupported { code }),
        })
    }

    /// The request as it goes over the socket: header and payload in one piece, and the file descriptors beside it.
    pub fn encode(self, need_reply: bool) -> (Vec<u8>, Vec<F>) {
        let code = self.code();
        let (payload, fds) = match self {
            Self::GetFeatures
            | Self::SetOwner
            | Self::ResetOwner
            | Self::GetProtocolFeatures
            | Self::GetQueueNum
            | Self::ResetDevice
            | Self::GetMaxMemSlots
            | Self::GetStatus => (Vec::new(), Vec::new()),
            Self::SetFeatures(value)
            | Self::SetProtocolFeatures(value)
            | Self::NetSetMtu(value)
            | Self::SetStatus(value) => (value.to_ne_bytes().to_vec(), Vec::new()),
            Self::SetBackendReqFd(fd) => (Vec::new(), vec![fd]),
            Self::SetLogBase(log, fd) => {
                ([log.size.to_ne_bytes(), log.offset.to_ne_bytes()].concat(), vec![fd])
            }
            Self::GetInflightFd(area) => (encode_inflight(&area), Vec::new()),
            Self::SetInflightFd(area, fd) => (encode_inflight(&area), vec![fd]),
            Self::AddMemReg(region, fd) => (encode_region(&region), vec![fd]),
            Self::RemMemReg(region, fd) => (encode_region(&region), fd.into_iter().collect()),
            Self::SetVringNum(state)
            | Self::SetVringBase(state)
            | Self::GetVringBase(state)
            | Self::SetVringEnable(state) => (state.encode(), Vec::new()),
            Self::SetVringAddr(addr) => (addr.encode(), Vec::new()),
            Self::SetVringKick(event) | Self::SetVringCall(event) | Self::SetVringErr(event) => {
                let none = if event.fd.is_none() { FD_NONE } else { 0 };
                let value = u64::from(event.index) | none;
                (value.to_ne_bytes().to_vec(), event.fd.into_iter().collect())
            }
            Self::SetMemTable(regions) => encode_regions(regions),
        };
        (message(code, false, need_reply, &payload), fds)
    }
}

/// A back end's reply. `F` stands for a file descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply<F> {
    /// Features, a number of queues or slots, a status, or an acknowledgement: 0 for done.
    Value(u64),
    /// The base of a virtqueue.
    Vring(VringState),
    /// A region for descriptors in flight, and its file.
    Inflight(InflightArea, F),
}

impl<F> Reply<F> {
    /// The reply to the request `code` as it goes over the socket: bytes, and the file descriptor beside them.
    pub fn encode(self, code: Code) -> (Vec<u8>, Option<F>) {
        let (payload, fd) = match self {
            Self::Value(value) => (value.to_ne_bytes().to_vec(), None),
            Self::Vring(state) => (state.encode(), None),
            Self::Inflight(area, fd) => (encode_inflight(&area), Some(fd)),
        };
        (message(code, true, false, &payload), fd)
    }

    /// Decodes the reply to the request `code`.
    ///
    /// # Errors
    /// A message that is no reply, or replies to something else, or has another payload or other file descriptors.
    pub fn decode(code: Code, header: &Header, payload: &[u8], fds: Vec<F>) -> Result<Self, MessageError> {
        if !header.reply || header.code != code {
            let kind = if header.reply { "a reply" } else { "a request" };
            return Err(MessageError::NoReply { expected: code, found: header.code, kind });
        }
        let body = Body { code, payload, fds };
        Ok(match code {
            Code::GET_VRING_BASE => Self::Vring(body.state()?),
            Code::GET_INFLIGHT_FD => body.inflight_fd().map(|(area, fd)| Self::Inflight(area, fd))?,
            _ => Self::Value(body.value()?),
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
