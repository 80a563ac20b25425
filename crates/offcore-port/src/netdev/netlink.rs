//! Netlink: requests to the kernel in messages of attributes (netlink(7), rtnetlink(7)).

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

use super::NetDevCounters;

/// Length of a message's header in bytes: length, type, flags, sequence number, port.
const HEADER: usize = 16;
/// Length of an attribute's header: length, type.
const ATTRIBUTE: usize = 4;
/// Twice the maximum length of one answer to a dump request.
const ANSWER: usize = 64 << 10;
/// Receive timeout. The kernel answers before the request returns, so it only expires if something is badly wrong.
const TIMEOUT: Duration = Duration::from_secs(2);

const REQUEST: u16 = 1;
const DUMP: u16 = 0x300;
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// A netlink socket, for one request at a time.
#[derive(Debug)]
pub(crate) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

/// The content of a message, without its header.
#[derive(Debug)]
pub(crate) struct Answer(Vec<u8>);

impl Answer {
    /// Splits the content into the fixed structure of `len` bytes at its beginning and the attributes behind it.
    /// Returns `None` if the message is shorter than the structure.
    pub(crate) fn parts(&self, len: usize) -> Option<(&[u8], Attributes<'_>)> {
        let (fixed, rest) = self.0.split_at_checked(len)?;
        Some((fixed, Attributes(rest)))
    }
}

/// A sequence of attributes, as types and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes<'a>(pub(crate) &'a [u8]);

impl<'a> Attributes<'a> {
    /// Returns the value of the first attribute of type `kind`.
    pub(crate) fn find(mut self, kind: u16) -> Option<&'a [u8]> {
        self.find_map(|(other, value)| (other == kind).then_some(value))
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (header, _) = self.0.split_first_chunk::<ATTRIBUTE>()?;
        let [a, b, c, d] = *header;
        let len = usize::from(u16::from_ne_bytes([a, b]));
        let value = self.0.get(ATTRIBUTE..len)?;
        self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or_default();
        // The two highest bits are flags for nesting and byte order.
        Some((u16::from_ne_bytes([c, d]) & 0x3fff, value))
    }
}

/// Decodes the number in an attribute's value or a structure's field, in native byte order.
pub(crate) fn number(bytes: &[u8]) -> Option<u64> {
    Some(match *bytes {
        [a] => a.into(),
        [a, b] => u16::from_ne_bytes([a, b]).into(),
        [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]).into(),
        _ => u64::from_ne_bytes(*bytes.as_array()?),
    })
}

/// Encodes an attribute, including its padding.
pub(crate) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(ATTRIBUTE + value.len()).expect("attributes that are sent are short");
    let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

impl Netlink {
    /// Opens a socket for requests about interfaces and addresses in the calling thread's network namespace.
    pub(crate) fn route() -> io::Result<Self> {
        Self::new(None)
    }

    /// Opens a socket for requests to generic netlink families.
    pub(crate) fn generic() -> io::Result<Self> {
        Self::new(Some(netlink::GENERIC))
    }

    fn new(protocol: Option<Protocol>) -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
        )?;
        set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Returns the only answer to a request of type `kind`.
    pub(crate) fn ask(&mut self, kind: u16, body: &[u8]) -> io::Result<Answer> {
        let answers = self.exchange(kind, 0, body)?;
        answers.into_iter().next().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Returns all answers to a dump request of type `kind`.
    pub(crate) fn dump(&mut self, kind: u16, body: &[u8]) -> io::Result<Vec<Answer>> {
        self.exchange(kind, DUMP, body)
    }

    fn exchange(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<Vec<Answer>> {
        self.sequence = self.sequence.wrapping_add(1);
        let len = u32::try_from(HEADER + body.len()).map_err(io::Error::other)?;
        let mut message = Vec::with_capacity(HEADER + body.len());
        message.extend(len.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend((REQUEST | flags).to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend([0; 4]);
        message.extend(body);
        rustix::net::send(&self.socket, &message, SendFlags::empty())?;

        let (mut answers, mut buffer) = (Vec::new(), vec![0; ANSWER]);
        loop {
            let (len, _) = rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            let mut rest = &buffer[..len];
            while let Some(message) = Message::next(&mut rest) {
                if message.sequence != self.sequence {
                    continue;
                }
                match message.kind {
                    ERROR | DONE => {
                        let code = message.body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                        let error = || io::Error::from_raw_os_error(-code);
                        return if code == 0 { Ok(answers) } else { Err(error()) };
                    }
                    _ => answers.push(Answer(message.body.into())),
                }
                if flags & DUMP != DUMP {
                    return Ok(answers);
                }
            }
        }
    }

    /// Reads the counters of interface `index`: IFLA_STATS64 of RTM_GETLINK, a `struct rtnl_link_stats64`.
    pub(super) fn counters(&mut self, index: u32) -> io::Result<NetDevCounters> {
        let answer = self.ask(route::GETLINK, &route::link_request(index))?;
        let (_, attributes) = answer.parts(route::IFINFOMSG).ok_or(io::ErrorKind::InvalidData)?;
        let stats = attributes.find(route::IFLA_STATS64).ok_or(io::ErrorKind::Unsupported)?;
        let field = |nth: usize| stats.get(8 * nth..8 * nth + 8).and_then(number).unwrap_or_default();
        Ok(NetDevCounters {
            rx_packets: field(0),
            tx_packets: field(1),
            rx_bytes: field(2),
            tx_bytes: field(3),
            rx_errors: field(4),
            tx_errors: field(5),
            rx_dropped: field(6),
            tx_dropped: field(7),
        })
    }
}

struct Message<'a> {
    kind: u16,
    sequence: u32,
    body: &'a [u8],
}

impl<'a> Message<'a> {
    /// Removes the first message from `rest` and returns it.
    fn next(rest: &mut &'a [u8]) -> Option<Self> {
        let len = usize::try_from(u32::from_ne_bytes(*rest.first_chunk()?)).ok()?;
        let header = rest.first_chunk::<HEADER>()?;
        let [kind_low, kind_high] = [header[4], header[5]];
        let sequence = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
        let body = rest.get(HEADER..len)?;
        *rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(Self { kind: u16::from_ne_bytes([kind_low, kind_high]), sequence, body })
    }
}

/// Returns how many queues of the TAP interface `index` programs have open, as reported by the kernel since Linux 4.17.
/// `None` if the interface is not a TAP interface.
///
/// # Errors
/// The kernel's error.
pub(crate) fn tap_queues(index: u32) -> io::Result<Option<u32>> {
    const IFLA_TUN_NUM_QUEUES: u16 = 8;
    const IFLA_TUN_NUM_DISABLED_QUEUES: u16 = 9;
    let answer = Netlink::route()?.ask(route::GETLINK, &route::link_request(index))?;
    let info =
        answer.parts(route::IFINFOMSG).and_then(|(_, all)| all.find(route::IFLA_LINKINFO)).map(Attributes);
    let Some(info) =
        info.filter(|info| info.find(route::IFLA_INFO_KIND).is_some_and(|kind| kind.starts_with(b"tun")))
    else {
        return Ok(None);
    };
    let data = info.find(route::IFLA_INFO_DATA).map(Attributes);
    let count = |kind| data.and_then(|data| data.find(kind)).and_then(number).unwrap_or_default();
    let queues = count(IFLA_TUN_NUM_QUEUES) + count(IFLA_TUN_NUM_DISABLED_QUEUES);
    Ok(Some(u32::try_from(queues).unwrap_or(u32::MAX)))
}

/// Messages and attributes of linux/rtnetlink.h and linux/if_link.h.
pub(crate) mod route {
    pub(crate) const GETLINK: u16 = 18;
    pub(crate) const IFLA_LINKINFO: u16 = 18;
    pub(crate) const IFLA_INFO_KIND: u16 = 1;
    pub(crate) const IFLA_INFO_DATA: u16 = 2;
    /// Length of a `struct ifinfomsg` in bytes.
    pub(crate) const IFINFOMSG: usize = 16;
    pub(crate) const IFLA_STATS64: u16 = 23;

    /// Returns a `struct ifinfomsg` that names an interface.
    pub(crate) fn link_request(index: u32) -> [u8; IFINFOMSG] {
        let mut body = [0; IFINFOMSG];
        body[4..8].copy_from_slice(&index.to_ne_bytes()); // copy-ok: a control message
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netlink_attributes_round_trip() {
        let bytes = [attribute(3, b"eth0\0"), attribute(4, &1500u32.to_ne_bytes())].concat();
        assert_eq!(bytes.len(), 12 + 8);
        let attributes = Attributes(&bytes);
        assert_eq!(attributes.find(3), Some(&b"eth0\0"[..]));
        assert_eq!(attributes.find(4).and_then(number), Some(1500));
        assert_eq!(attributes.find(5), None);
    }

    #[test]
    fn truncated_attributes_end_iteration() {
        let bytes = attribute(3, b"eth0");
        for len in 0..bytes.len() {
            assert_eq!(Attributes(&bytes[..len]).count(), 0, "{len}");
        }
        // A length that is shorter than the attribute's header.
        assert_eq!(Attributes(&[2, 0, 1, 0]).count(), 0);
    }

    #[test]
    fn netlink_error_reply_is_returned() {
        let error = Netlink::route().unwrap().counters(u32::MAX >> 1).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    }
}
