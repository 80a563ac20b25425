//! The protocol between an application's process and the stack on their socket.
//!
//! The socket is a Unix socket of type `SOCK_SEQPACKET`. The process sends requests, and the stack answers each with
//! one message, in order. All messages have a fixed length and are little-endian. The first message of a process is
//! [`Hello`]. Its first two words never change between versions, so that both sides can report a version mismatch.
//!
//! Descriptors are passed with messages (`SCM_RIGHTS`) in this order:
//!
//! | message | descriptors |
//! |---|---|
//! | [`Welcome`] | the control pages, the pages of processes, the event that wakes the stack, then the segments |
//! | answer to [`Call::Segments`] | the segments from the requested one on |
//! | [`Call::Listen`] | the kernel's listener, if there is one |
//! | [`Call::Adopt`] | an end of a session |
//! | [`Call::Fork`] | a socket for the answer: only the calling process has its other end |
//! | answer to [`Call::Fork`] | a new socket to the stack, on which the process sends [`Hello`] |
//! | answer with a session | the application's end; for [`Call::Adopt`] of a listener: the kernel's listener |
//! | [`Accepted`], on a listener's end | the application's end |

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::slot::OPTIONS;
use crate::undelivered;

/// The first word of [`Hello`] and [`Welcome`].
pub const MAGIC: u32 = u32::from_le_bytes(*b"OFFC");
/// The second word.
pub const VERSION: u32 = 7;
/// A value in place of a version: the sender only requests the stack's version, and whether its user may attach. The
/// stack answers with [`Welcome`] and closes the socket.
pub const ASK: u32 = 0;
/// Maximum number of descriptors with one message.
pub const MOST_DESCRIPTORS: usize = 64;
/// Length of an application's key in bytes.
pub const KEY: usize = 16;

/// The first message of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    pub version: u32,
    /// The key of its application. The key selects an existing application of the same user, or is assigned to a new
    /// application. Zeros request a new application whose key the stack chooses.
    pub key: [u8; KEY],
}

/// The stack's answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Welcome {
    pub version: u32,
    /// 0, or an `errno`: `EPROTO` for another version, `EACCES` for a user without permission, `EUSERS` for too many
    /// applications, `EMFILE` for too many processes. After `EAGAIN`, or if the socket is closed, the process may
    /// retry.
    pub error: u32,
    pub key: [u8; KEY],
    /// Distinguishes the application from all others that have ever had the key, with this stack or with earlier ones.
    pub instance: u64,
    /// The process, as stored in locks.
    pub owner: u32,
    /// The stack's process ID, which the sessions' ends report (`SO_PEERCRED`).
    pub pid: u32,
    /// Number of bytes that close the gate.
    pub gate: u32,
    /// Number of segments.
    pub segments: u32,
}

/// The requests of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Call {
    /// `number`: the first wanted segment.
    Segments = 1,
    /// A session bound to the stack's address `local`. `value` is the type (`SOCK_STREAM` or `SOCK_DGRAM`). A datagram
    /// socket uses 0.0.0.0 for all IPv4 addresses and `::` for all addresses, and also has [`SHARE_PORT`],
    /// [`SHARE_ADDRESS`] and [`ONLY_V6`] in `value`. For datagrams `remote` is an optional first destination. Then it
    /// fails like [`Call::Connect`].
    Bind = 2,
    /// A connection to `remote`, from session `number`, or from a new one if that is [`NONE`], and from `local` if it
    /// is set. `EOPNOTSUPP`: an address of the stack without a server on the stack.
    ///
    /// For datagrams (`value` selects them for a new session, as in [`Call::Bind`]): sets or removes the peer. `local`
    /// is the unspecified address of the socket's family for an unbound socket without a peer.
    Connect = 3,
    /// Listens on session `number`, or if that is [`NONE`] at `local`, where 0.0.0.0 is all IPv4 addresses and `::` all
    /// addresses. `value` is the backlog, with [`SHARE_PORT`] if others may also listen there, and [`ONLY_V6`].
    Listen = 4,
    /// Finds the session of an end.
    Adopt = 5,
    /// Returns the `TCP_INFO` of session `number` in [`Answer::info`].
    Info = 6,
    /// A new process that has inherited this socket from its parent requests its own socket, because it may be unable
    /// to connect.
    Fork = 7,
    /// Returns the oldest error of datagram socket `number` in [`Answer::info`], encoded as
    /// [`Undelivered`](crate::undelivered::Undelivered). `EAGAIN`: the queue is empty. A `value` other than 0 is an
    /// MTU: the request adds the error of a datagram to `remote` that exceeds it.
    Undelivered = 8,
    /// Datagram socket `number` joins or leaves the multicast group `remote`. `value` is a [`Membership`]. The
    /// interface is selected by the index in `options[0]`, otherwise by the address `local`, otherwise by the route to
    /// the group. The first word of [`Answer::info`] is its index.
    Group = 9,
}

/// The operation of [`Call::Group`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Membership {
    Leave = 0,
    Join = 1,
    /// Finds the interface, without a session.
    Find = 2,
}

/// No session.
pub const NONE: u32 = u32::MAX;
/// For [`Call::Listen`] and datagram sockets: `SO_REUSEPORT`.
pub const SHARE_PORT: u32 = 1 << 31;
/// For [`Call::Listen`] and datagram sockets: `IPV6_V6ONLY`.
pub const ONLY_V6: u32 = 1 << 30;
/// For datagram sockets: `SO_REUSEADDR`.
pub const SHARE_ADDRESS: u32 = 1 << 29;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    pub call: Call,
    pub number: u32,
    pub value: u32,
    pub local: Option<SocketAddr>,
    pub remote: Option<SocketAddr>,
    /// Initial options of a new stream, as in [`Kept`](crate::slot::Kept).
    pub options: [u32; OPTIONS],
}

/// The stack's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// 0, or an `errno`.
    pub error: u32,
    /// The session.
    pub session: SessionId,
    /// Number of descriptors with the answer.
    pub descriptors: u32,
    pub info: [u32; INFO],
}

/// Words of [`Answer::info`]. For [`Call::Info`] they are: the state as numbered by Linux, retransmission timeout, own
/// and peer's segment size, segments sent and not acknowledged, round-trip time and its variation in microseconds,
/// congestion window and slow-start threshold in segments, retransmissions.
pub const INFO: usize = undelivered::WORDS;

/// Identifies a session by the location of its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionId {
    /// The place of its slot, or 0 for none.
    pub place: u32,
    /// The generation in the slot.
    pub generation: u32,
}

/// A new connection in the queue of a listener's end. Without a session it is the kernel's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    pub session: SessionId,
}

/// Writes consecutive fields.
struct Out<const N: usize> {
    bytes: [u8; N],
    at: usize,
}

impl<const N: usize> Out<N> {
    fn new() -> Self {
        Self { bytes: [0; N], at: 0 }
    }

    fn put(mut self, field: &[u8]) -> Self {
        let end = self.at + field.len();
        // copy-ok: a few bytes of a message
        self.bytes[self.at..end].copy_from_slice(field);
        self.at = end;
        self
    }

    fn words(self, words: &[u32]) -> Self {
        words.iter().fold(self, |out, word| out.put(&word.to_le_bytes()))
    }

    fn address(self, address: Option<SocketAddr>) -> Self {
        let (family, port) = address.map_or((0, 0), |to| (if to.is_ipv4() { 4 } else { 6 }, to.port()));
        let mut octets = [0; 16];
        match address.map(|address| address.ip()) {
            Some(IpAddr::V4(v4)) => octets[..4].copy_from_slice(&v4.octets()), // copy-ok: an address
            Some(IpAddr::V6(v6)) => octets = v6.octets(),
            None => {}
        }
        self.words(&[family | u32::from(port) << 16]).put(&octets)
    }
}

/// Reads consecutive fields.
struct In<'a>(&'a [u8]);

impl In<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    /// Reads an address. Returns `None` if bytes are missing or the family is unknown, and `Some(None)` for no address.
    fn address(&mut self) -> Option<Option<SocketAddr>> {
        let word = self.word()?;
        let octets = self.take::<16>()?;
        let ip: IpAddr = match word & 0xffff {
            0 => return Some(None),
            4 => Ipv4Addr::from(*octets.first_chunk::<4>()?).into(),
            6 => Ipv6Addr::from(octets).into(),
            _ => return None,
        };
        Some(Some(SocketAddr::new(ip, (word >> 16) as u16)))
    }
}

impl Hello {
    /// Length in bytes.
    pub const LEN: usize = 8 + KEY;

    /// Encodes the message.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        Out::new().words(&[MAGIC, self.version]).put(&self.key).bytes
    }

    /// Decodes the message. Returns `None` if it is invalid. With another version the key is zeros.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut from = In(bytes);
        let version = (from.word()? == MAGIC).then(|| from.word())??;
        let key = if version == VERSION { from.take()? } else { [0; KEY] };
        Some(Self { version, key })
    }
}

impl Welcome {
    /// Length in bytes.
    pub const LEN: usize = 12 + KEY + 8 + 16;

    /// Encodes the message.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let Self { version, error, key, instance, owner, pid, gate, segments } = self;
        let begin = Out::new().words(&[MAGIC, *version, *error]).put(key).put(&instance.to_le_bytes());
        begin.words(&[*owner, *pid, *gate, *segments]).bytes
    }

    /// Decodes the message. Returns `None` if it is invalid. With another version, only the version is set.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut from = In(bytes);
        let version = (from.word()? == MAGIC).then(|| from.word())??;
        let mut welcome = Self { version, ..Self::default() };
        if version == VERSION {
            welcome.error = from.word()?;
            welcome.key = from.take()?;
            welcome.instance = u64::from_le_bytes(from.take()?);
            for word in [&mut welcome.owner, &mut welcome.pid, &mut welcome.gate, &mut welcome.segments] {
                *word = from.word()?;
            }
        }
        Some(welcome)
    }
}

impl Call {
    const ALL: [Self; 9] = [
        Self::Segments,
        Self::Bind,
        Self::Connect,
        Self::Listen,
        Self::Adopt,
        Self::Info,
        Self::Fork,
        Self::Undelivered,
        Self::Group,
    ];
}

impl Question {
    /// Length in bytes.
    pub const LEN: usize = 12 + 2 * 20 + 4 * OPTIONS;

    /// Creates a request without addresses.
    pub fn new(call: Call, number: u32, value: u32) -> Self {
        Self { call, number, value, local: None, remote: None, options: [0; OPTIONS] }
    }

    /// Encodes the message.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let words = [self.call as u32, self.number, self.value];
        Out::new().words(&words).address(self.local).address(self.remote).words(&self.options).bytes
    }

    /// Decodes the message. Returns `None` if it is invalid.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut from = In(bytes);
        let call = from.word()?;
        let call = *Call::ALL.iter().find(|known| **known as u32 == call)?;
        let (number, value) = (from.word()?, from.word()?);
        let (local, remote) = (from.address()?, from.address()?);
        let mut question = Self { call, number, value, local, remote, options: [0; OPTIONS] };
        for word in &mut question.options {
            *word = from.word()?;
        }
        Some(question)
    }
}

impl Answer {
    /// Length in bytes.
    pub const LEN: usize = 16 + 4 * INFO;

    /// Creates an answer with an error, or 0, and nothing else.
    pub fn of(error: u32) -> Self {
        Self { error, session: SessionId::default(), descriptors: 0, info: [0; INFO] }
    }

    /// Encodes the message.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let SessionId { place, generation } = self.session;
        Out::new().words(&[self.error, place, generation, self.descriptors]).words(&self.info).bytes
    }

    /// Decodes the message. Returns `None` if it is invalid.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut from = In(bytes);
        let error = from.word()?;
        let session = SessionId { place: from.word()?, generation: from.word()? };
        let mut answer = Self { error, session, descriptors: from.word()?, info: [0; INFO] };
        for word in &mut answer.info {
            *word = from.word()?;
        }
        Some(answer)
    }
}

impl Accepted {
    /// Length in bytes.
    pub const LEN: usize = 8;

    /// Encodes the message.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        Out::new().words(&[self.session.place, self.session.generation]).bytes
    }

    /// Decodes the message. Returns `None` if it is invalid.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut from = In(bytes);
        Some(Self { session: SessionId { place: from.word()?, generation: from.word()? } })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;

    #[test]
    fn session_messages_round_trip() {
        let hello = Hello { version: VERSION, key: [7; KEY] };
        assert_eq!(Hello::from_bytes(&hello.to_bytes()), Some(hello));
        let (key, instance) = ([3; KEY], 1 << 40);
        let welcome =
            Welcome { version: VERSION, error: 1, key, instance, owner: 2, pid: 3, gate: 4, segments: 5 };
        assert_eq!(Welcome::from_bytes(&welcome.to_bytes()), Some(welcome));
        for (local, remote) in [("10.0.0.2:80", None), ("[fd00::2]:65535", Some("[fd00::1]:1"))] {
            let mut question = Question::new(Call::Connect, NONE, 3);
            question.local = Some(local.parse().unwrap());
            question.remote = remote.map(|remote| remote.parse().unwrap());
            question.options[OPTIONS - 1] = 9;
            assert_eq!(Question::from_bytes(&question.to_bytes()), Some(question));
        }
        let mut answer = Answer::of(5);
        (answer.session, answer.descriptors) = (SessionId { place: 9, generation: 8 }, 1);
        answer.info[9] = 7;
        assert_eq!(Answer::from_bytes(&answer.to_bytes()), Some(answer));
        let accepted = Accepted { session: answer.session };
        assert_eq!(Accepted::from_bytes(&accepted.to_bytes()), Some(accepted));
    }

    #[test]
    fn malformed_messages_are_rejected() {
        let question = Question::new(Call::Fork, 1, 2).to_bytes();
        for len in 0..question.len() {
            assert_eq!(Question::from_bytes(&question[..len]), None);
        }
        let mut other = question;
        other[0] = 99;
        assert_eq!(Question::from_bytes(&other), None);
        other = question;
        other[12] = 5;
        assert_eq!(Question::from_bytes(&other), None, "of no family");
        assert_eq!(Hello::from_bytes(&[0; Hello::LEN]), None);
    }

    #[test]
    fn hello_reports_other_version() {
        let mut hello = Hello { version: VERSION + 1, key: [7; KEY] }.to_bytes().to_vec();
        hello.truncate(8);
        assert_eq!(Hello::from_bytes(&hello).unwrap().version, VERSION + 1);
    }
}
