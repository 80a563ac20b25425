//! Datagrams in a session's FIFOs: in both directions each is a header, its payload, and what is left of 8 bytes.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::app::{Reader, Writer};
use crate::place::{Place, Segments};

/// Bytes of the header in front of a datagram's payload.
pub const HEADER_LEN: usize = 40;
const ALIGN: usize = 8;

/// What stands in front of a datagram's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of payload.
    pub len: u16,
    /// Who sent it, or is to get it.
    pub peer: SocketAddr,
    /// The stack's address: where it came to, or is to be sent from; unspecified for any that is right.
    pub local: IpAddr,
}

/// Bytes that a datagram of `len` bytes takes in a FIFO.
pub const fn record_len(len: u16) -> usize {
    HEADER_LEN + (len as usize).next_multiple_of(ALIGN)
}

impl Header {
    /// As it lies in the FIFO: length, port and family in little endian, then both addresses, 16 bytes each.
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        // copy-ok: a few bytes of a header
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.len.to_le_bytes());
        put(2, &self.peer.port().to_le_bytes());
        put(4, &[if self.peer.is_ipv4() { 4 } else { 6 }]);
        for (at, address) in [(8, self.peer.ip()), (24, self.local)] {
            match address {
                IpAddr::V4(address) => put(at, &address.octets()),
                IpAddr::V6(address) => put(at, &address.octets()),
            }
        }
        bytes
    }

    /// `None` when the bytes are no header.
    pub fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Option<Self> {
        let [l0, l1, p0, p1, family, ..] = *bytes;
        let address = |at: usize| -> Option<IpAddr> {
            Some(match family {
                4 => Ipv4Addr::from(*bytes[at..].first_chunk::<4>()?).into(),
                6 => Ipv6Addr::from(*bytes[at..].first_chunk::<16>()?).into(),
                _ => return None,
            })
        };
        let peer = SocketAddr::new(address(8)?, u16::from_le_bytes([p0, p1]));
        Some(Self { len: u16::from_le_bytes([l0, l1]), peer, local: address(24)? })
    }
}

/// The application's side of a datagram socket.
#[derive(Debug)]
pub struct Datagrams<M: Segments> {
    reader: Reader<M>,
    writer: Writer<M>,
}

impl<M: Segments + Clone> Datagrams<M> {
    /// That of the socket whose slot is at `slot`; `None` when the slot is not in the memory.
    pub fn new(memory: &M, slot: Place) -> Option<Self> {
        let reader = Reader::new(memory.clone(), slot)?;
        Some(Self { reader, writer: Writer::new(memory.clone(), slot)? })
    }

    /// Copies the oldest datagram out: as much of its payload as `to` has room for; the rest of it is lost. `None` when
    /// there is none. The stack is to be told, by `consumed`.
    pub fn receive(&mut self, to: &mut [u8]) -> Option<Header> {
        let mut header = [0; HEADER_LEN];
        if self.reader.peek(&mut header) < HEADER_LEN {
            return None;
        }
        // What is no header, or has no payload, is a stack's nonsense: nothing is read any more.
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

    /// Copies a datagram in, `header.len` bytes of payload; `false`, and nothing has changed, when there is no space for
    /// it. The stack is to be told, by `written`.
    ///
    /// # Panics
    /// When `payload` has another length.
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
        Header { len, peer: peer.parse().unwrap(), local: local.parse().unwrap() }
    }

    #[test]
    fn headers_are_read_as_they_were_written() {
        for header in [header(0, "10.0.0.1:7", "10.0.0.2"), header(65_507, "[2001:db8::1]:65535", "::")] {
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
        assert_eq!(tx.written(&arena).unwrap(), 48);
        let mut bytes = [0; 43];
        tx.get(&arena, 0, &mut bytes);
        assert_eq!(Header::from_bytes(bytes.first_chunk().unwrap()), Some(to));
        assert_eq!(&bytes[40..], b"abc");

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
