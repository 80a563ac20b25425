//! Datagrams in a session's FIFOs. In both directions each datagram is a header, its payload, and padding to a multiple
//! of 8 bytes.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::app::{Reader, Writer};
use crate::place::{Place, Segments};

/// Length of the header in front of a datagram's payload.
pub const HEADER_LEN: usize = 64;
const ALIGN: usize = 8;

/// Bits of [`Wishes::keep_idle`](crate::slot::Wishes::keep_idle) of a datagram socket that the stack reads:
/// `IP_RECVERR`. The application uses other bits itself.
pub const HEARS_ERRORS: u32 = 1 << 14;
/// `IPV6_RECVERR`.
pub const HEARS_ERRORS_6: u32 = 1 << 15;
/// `IP_MULTICAST_ALL`.
pub const TAKES_ALL_GROUPS: u32 = 1 << 16;
/// `IPV6_MULTICAST_ALL`.
pub const TAKES_ALL_GROUPS_6: u32 = 1 << 17;

/// The header in front of a datagram's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Length of the payload in bytes.
    pub len: u16,
    /// The sender of a received datagram, or the destination of a datagram to send.
    pub peer: SocketAddr,
    /// Received: the destination address. To send: the source address, which the stack selects if it is unspecified.
    pub local: IpAddr,
    pub more: More,
}

/// Fields of a [`Header`] that few programs use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct More {
    /// Time to live, or hop limit. To send: 0 selects the default.
    pub hops: u8,
    /// Type of service, or traffic class: DSCP and ECN.
    pub tos: u8,
    /// Received: the interface index of the kernel, or otherwise of the stack. To send to a group: the index of the
    /// outgoing interface. 0 selects any.
    pub index: u32,
    /// To send: [`PathMtu`] as a number.
    pub path_mtu: u8,
    /// To send: payload bytes of each segment (`UDP_SEGMENT`). 0 sends one datagram.
    pub segment: u16,
    /// To send: broadcasts are allowed (`SO_BROADCAST`).
    pub broadcast: bool,
    /// To send to a group: sockets of this host do not receive it (`IP_MULTICAST_LOOP` of 0).
    pub no_loop: bool,
    /// Received to a group or an IPv4 broadcast: an address of the receiving interface.
    pub own: Option<Ipv4Addr>,
    /// Received: the number of datagrams that the socket dropped before this one.
    pub lost: u32,
    /// Received: the time in microseconds since 1970.
    pub time: u64,
}

/// How a datagram longer than the path MTU is sent (`IP_MTU_DISCOVER`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum PathMtu {
    /// Sent in fragments. DF is not set.
    #[default]
    Ignore = 0,
    /// Sent in fragments. A datagram that fits has DF set.
    Want = 1,
    /// Not sent.
    Do = 2,
    /// Sent if it fits the interface's MTU; the path MTU is ignored. DF is set.
    Probe = 3,
}

impl More {
    /// Decodes the mode. An unknown number is [`PathMtu::Ignore`].
    pub fn path_mtu(&self) -> PathMtu {
        match self.path_mtu {
            1 => PathMtu::Want,
            2 => PathMtu::Do,
            3 => PathMtu::Probe,
            _ => PathMtu::Ignore,
        }
    }
}

/// Returns the number of bytes that a datagram of `len` bytes occupies in a FIFO.
pub const fn record_len(len: u16) -> usize {
    HEADER_LEN + (len as usize).next_multiple_of(ALIGN)
}

impl Header {
    /// Returns a header with defaults for all other fields.
    pub fn new(len: u16, peer: SocketAddr, local: IpAddr) -> Self {
        Self { len, peer, local, more: More::default() }
    }

    /// Encodes the header for the FIFO, little-endian: length, port, family, hops, type of service, path MTU; both
    /// addresses, 16 bytes each; time, lost datagrams, interface, segment, broadcast, whether sockets of this host do
    /// not receive it, address of the interface.
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let More { hops, tos, index, path_mtu, segment, broadcast, no_loop, own, lost, time } = self.more;
        // copy-ok: a few bytes of a header
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.len.to_le_bytes());
        put(2, &self.peer.port().to_le_bytes());
        put(4, &[if self.peer.is_ipv4() { 4 } else { 6 }, hops, tos, path_mtu]);
        for (at, address) in [(8, self.peer.ip()), (24, self.local)] {
            match address {
                IpAddr::V4(address) => put(at, &address.octets()),
                IpAddr::V6(address) => put(at, &address.octets()),
            }
        }
        put(40, &time.to_le_bytes());
        put(48, &lost.to_le_bytes());
        put(52, &index.to_le_bytes());
        put(56, &segment.to_le_bytes());
        put(58, &[broadcast.into(), no_loop.into()]);
        put(60, &own.unwrap_or(Ipv4Addr::UNSPECIFIED).octets());
        bytes
    }

    /// Decodes a header. Returns `None` if the bytes are invalid.
    pub fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Option<Self> {
        let [l0, l1, p0, p1, family, hops, tos, path_mtu, ..] = *bytes;
        let address = |at: usize| -> Option<IpAddr> {
            Some(match family {
                4 => Ipv4Addr::from(*bytes[at..].first_chunk::<4>()?).into(),
                6 => Ipv6Addr::from(*bytes[at..].first_chunk::<16>()?).into(),
                _ => return None,
            })
        };
        let peer = SocketAddr::new(address(8)?, u16::from_le_bytes([p0, p1]));
        let more = More {
            hops,
            tos,
            path_mtu,
            index: u32::from_le_bytes(*bytes[52..].first_chunk()?),
            segment: u16::from_le_bytes(*bytes[56..].first_chunk()?),
            broadcast: bytes[58] != 0,
            no_loop: bytes[59] != 0,
            own: Some(Ipv4Addr::from(*bytes[60..].first_chunk()?)).filter(|own| !own.is_unspecified()),
            lost: u32::from_le_bytes(*bytes[48..].first_chunk()?),
            time: u64::from_le_bytes(*bytes[40..].first_chunk()?),
        };
        Some(Self { len: u16::from_le_bytes([l0, l1]), peer, local: address(24)?, more })
    }
}

/// The application's side of a datagram socket.
#[derive(Debug)]
pub struct Datagrams<M: Segments> {
    reader: Reader<M>,
    writer: Writer<M>,
}

impl<M: Segments + Clone> Datagrams<M> {
    /// Creates the application's side of the socket whose slot is at `slot`. Returns `None` if the slot is not in the
    /// memory.
    pub fn new(memory: &M, slot: Place) -> Option<Self> {
        let reader = Reader::new(memory.clone(), slot)?;
        Some(Self { reader, writer: Writer::new(memory.clone(), slot)? })
    }

    /// Copies the oldest datagram out. Payload that does not fit into `to` is lost. Returns `None` without a datagram.
    /// After a datagram the caller must notify the stack with `consumed`.
    pub fn receive(&mut self, to: &mut [u8]) -> Option<Header> {
        let mut header = [0; HEADER_LEN];
        if self.reader.peek(&mut header) < HEADER_LEN {
            return None;
        }
        // An invalid header, or a missing payload, means that the stack has stored nonsense. Nothing is read any more.
        let header = Header::from_bytes(&header)?;
        let whole = record_len(header.len);
        if self.reader.available() < whole {
            return None;
        }
        self.reader.consume(HEADER_LEN);
        let len = to.len().min(header.len.into());
        let read = self.reader.read(&mut to[..len]);
        self.reader.consume(whole - HEADER_LEN - read);
        Some(header)
    }

    /// Copies a datagram with `header.len` bytes of payload in. Returns `false`, and changes nothing, if the space does
    /// not suffice. After a datagram the caller must notify the stack with `written`.
    ///
    /// # Panics
    /// If `payload` has another length.
    pub fn send(&mut self, header: &Header, payload: &[u8]) -> bool {
        assert_eq!(payload.len(), usize::from(header.len), "a datagram is as long as its header says");
        let padding = [0; ALIGN];
        let padding = &padding[..record_len(header.len) - HEADER_LEN - payload.len()];
        self.writer.write_all(&[&header.to_bytes(), payload, padding])
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;
    use crate::{Arena, Fifo, Rx, Tx};

    fn header(len: u16, peer: &str, local: &str) -> Header {
        Header::new(len, peer.parse().unwrap(), local.parse().unwrap())
    }

    #[test]
    fn datagram_header_round_trips() {
        let more = More {
            hops: 1,
            tos: 2,
            index: 3,
            path_mtu: 4,
            segment: 500,
            broadcast: true,
            no_loop: true,
            own: Some([10, 0, 0, 9].into()),
            lost: 1 << 20,
            time: 1 << 50,
        };
        let full = Header { more, ..header(65_507, "[2001:db8::1]:65535", "::") };
        for header in [header(0, "10.0.0.1:7", "10.0.0.2"), full] {
            assert_eq!(Header::from_bytes(&header.to_bytes()), Some(header));
        }
        assert_eq!(Header::from_bytes(&[0; HEADER_LEN]), None, "of no family");
    }

    #[test]
    fn datagrams_go_through_both_directions() {
        let mut arena = Arena::new(4 << 20).unwrap();
        let slot = arena.take_slot().unwrap();
        let (mut rx, mut tx) = (Fifo::<Rx>::new(slot), Fifo::<Tx>::new(slot));
        let mut socket = Datagrams::new(arena.memory(), slot).unwrap();
        assert!(tx.grant(&mut arena, 200));
        let to = header(3, "10.0.0.1:7", "0.0.0.0");
        assert!(socket.send(&to, b"abc"));
        assert!(
            !socket.send(&header(200, "10.0.0.1:7", "0.0.0.0"), &[0; 200]),
            "there is no space for all of it"
        );
        assert_eq!(tx.written(&arena).unwrap(), 72);
        let mut bytes = [0; 67];
        tx.get(&arena, 0, &mut bytes);
        assert_eq!(Header::from_bytes(bytes.first_chunk().unwrap()), Some(to));
        assert_eq!(&bytes[64..], b"abc");

        let mut at = 0;
        for payload in [&b"one"[..], b"", b"the third"] {
            let header = header(payload.len() as u16, "10.0.0.9:9", "10.0.0.2");
            assert!(rx.cover(&mut arena, at, record_len(header.len)));
            rx.put(&arena, at, &header.to_bytes());
            rx.put(&arena, at + HEADER_LEN as u64, payload);
            at += record_len(header.len) as u64;
        }
        let mut to = [0; 4];
        assert_eq!(socket.receive(&mut to), None, "nothing is committed");
        rx.commit(&arena, at);
        let mut receive = || socket.receive(&mut to).map(|header| (header.len, to));
        assert_eq!(receive(), Some((3, *b"one\0")));
        assert_eq!(receive(), Some((0, *b"one\0")));
        assert_eq!(receive(), Some((9, *b"the ")), "what there is no room for is lost");
        assert_eq!(receive(), None);
        assert_eq!(rx.consumed(&mut arena).unwrap(), at);
    }
}
