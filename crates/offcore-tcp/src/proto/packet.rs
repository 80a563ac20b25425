//! What goes into the stack and what comes out: the heads of received packets, verdicts, plans and packets of headers.

use std::net::IpAddr;
use std::ops::Range;

use offcore_wire::Sum;

use super::addr::{ConnId, SOCKETS};
use super::joined::ToMany;

/// Bytes of a packet that the protocols see: the longest Ethernet, IP and TCP headers fit.
pub const HEAD: usize = 128;

/// A received packet.
#[derive(Debug)]
pub struct RxSeg<'a> {
    /// Its first bytes: all of them, or at least [`HEAD`]. A reply is made in place.
    pub head: &'a mut [u8],
    /// Bytes of the whole packet, without FCS.
    pub len: u32,
    pub checksum: RxChecksum,
}

/// What is known of a packet's TCP, UDP or ICMP checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RxChecksum {
    /// The port has verified it, or the packet comes from this machine and has none yet.
    Verified,
    /// Not verified. `rest` is the sum of the bytes from [`HEAD`] to [`sum_end`](super::ip::sum_end).
    Unknown { rest: Sum },
}

/// What becomes of a received packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It has done what it had to do.
    Consumed,
    /// It is dropped.
    Drop(DropReason),
    /// Its head is now the head of a reply, to be sent by the interface that it came from.
    Reply,
    /// Its payload belongs into a FIFO: the next one of [`Out::places`] says where.
    Place,
    /// Its payload belongs into several FIFOs: see [`Out::to_many`].
    Copies,
    /// It is a part of a packet for us, which is to be given to the stack when all of it is there.
    Fragment,
}

/// A copy of a packet's payload to an rx_fifo, whose blocks exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub conn: ConnId,
    /// Position of the first byte in the stream.
    pub pos: u64,
    /// Offset of the first byte in the packet.
    pub skip: u32,
    /// Bytes to copy, at least one.
    pub len: u32,
    /// Position up to which the application may see data when this and all earlier copies of the connection are done.
    pub commit_to: u64,
}

/// Completed copies of one connection whose bytes follow each other: [`Stack::placed`](super::Stack::placed) takes all of them
/// at once.
#[derive(Debug, Clone, Copy)]
pub struct Placed {
    pub(crate) conn: ConnId,
    pub(crate) pos: u64,
    /// Their bytes. They are in one FIFO, so less than 4 GiB.
    pub(crate) len: u32,
    pub(crate) copies: u32,
    pub(crate) commit_to: u64,
}

impl From<&Place> for Placed {
    fn from(place: &Place) -> Self {
        let Place { conn, pos, len, commit_to, .. } = *place;
        Self { conn, pos, len, copies: 1, commit_to }
    }
}

impl Placed {
    /// Adds a copy. Returns whether it is of the same connection and its bytes are the next ones.
    #[inline(always)]
    pub fn join(&mut self, place: &Place) -> bool {
        let follows = place.pos == self.pos + u64::from(self.len) && place.conn == self.conn;
        if follows {
            self.len += place.len;
            self.copies += 1;
            self.commit_to = self.commit_to.max(place.commit_to);
        }
        follows
    }
}

/// What is to be sent next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Next {
    /// Bytes of the stream.
    pub range: Range<u64>,
    /// The stream ends behind them.
    pub fin: bool,
    /// They have been sent before.
    pub again: bool,
}

/// A copy of data from a tx_fifo to a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    pub conn: ConnId,
    /// Position of the first byte in the stream.
    pub pos: u64,
    /// Bytes to copy; may be none, of a FIN alone.
    pub len: u32,
    /// The interface, and flags above. One word, since plans are moved right after they are made, and a load waits long for
    /// the several narrower stores that it covers.
    rest: u32,
}

impl Plan {
    const FIN: u32 = 1 << 8;
    const AGAIN: u32 = 1 << 9;
    const LONG: u32 = 1 << 10;

    #[inline]
    pub(crate) fn new(conn: ConnId, iface: u8, next: &Next) -> Self {
        let Next { range, fin, again } = next;
        let flags = (u32::from(*fin) * Self::FIN) | (u32::from(*again) * Self::AGAIN);
        let len = (range.end - range.start) as u32;
        Self { conn, pos: range.start, len, rest: u32::from(iface) | flags }
    }

    /// A datagram, which is `long` when its packet will be fragmented.
    pub(crate) fn datagram(conn: ConnId, iface: u8, pos: u64, len: u32, long: bool) -> Self {
        Self { conn, pos, len, rest: u32::from(iface) | (u32::from(long) * Self::LONG) }
    }

    /// Whether it is a datagram, which [`Stack::seal_datagram`](super::stack::Stack::seal_datagram) seals.
    #[inline]
    pub fn is_datagram(&self) -> bool {
        self.conn.index >= SOCKETS
    }

    /// Whether the packet will be fragmented: its checksum has to be complete before.
    #[inline]
    pub fn is_long(&self) -> bool {
        self.rest & Self::LONG != 0
    }

    /// Interface that it goes by.
    #[inline]
    pub fn iface(&self) -> u8 {
        self.rest as u8
    }

    /// What is to be sent.
    #[inline]
    pub(crate) fn next(&self) -> Next {
        let range = self.pos..self.pos + u64::from(self.len);
        Next { range, fin: self.rest & Self::FIN != 0, again: self.rest & Self::AGAIN != 0 }
    }
}

/// What becomes of a planned packet when its copies are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sealed {
    /// Send it by this interface. The headers are `headers` bytes, and the transport's begins at `transport`. The port is to
    /// cut the payload into segments of `segment` bytes, unless that is 0.
    Send { iface: u8, headers: u8, transport: u8, segment: u16 },
    /// It has been acknowledged meanwhile, or its connection is gone.
    Obsolete,
}

/// A packet of headers only, complete with its checksums.
#[derive(Debug, Clone, Copy)]
pub struct Control {
    /// Interface to send it by.
    pub iface: u8,
    len: u8,
    bytes: [u8; HEAD],
}

impl Control {
    /// `write` puts the packet into the buffer and returns its length.
    pub(crate) fn new(iface: u8, write: impl FnOnce(&mut [u8; HEAD]) -> usize) -> Self {
        let mut bytes = [0; HEAD];
        let len = write(&mut bytes).min(HEAD) as u8;
        Self { iface, len, bytes }
    }

    /// The packet, from the Ethernet header on.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..usize::from(self.len)]
    }
}

/// A packet of the stack's own that does not fit a [`Control`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Interface to send it by.
    pub iface: u8,
    /// The packet, from the Ethernet header on.
    pub bytes: Vec<u8>,
}

/// A datagram that is to be sent: the same fields as [`Sealed::Send`] has. Unless the next hop's station is `known`, it is still
/// to be written into the Ethernet header. A packet longer than `mtu` bytes is fragmented.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealedDatagram {
    pub iface: u8,
    pub headers: u8,
    pub transport: u8,
    pub known: bool,
    /// Sockets of this host receive a copy. The newest entry of [`Out::to_many`] is for it.
    pub loops: bool,
    pub mtu: u16,
}

/// What applications are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A connection that was asked for is there.
    Connected(ConnId),
    /// A listener has a connection to be accepted.
    Incoming { listener: u32 },
    /// There is data to be read that was not there before.
    Readable(ConnId),
    /// There is room to write that was not there before.
    Writable(ConnId),
    /// The peer sends no more; all that it sent can be read.
    EndOfStream(ConnId),
    /// The connection is over, and why.
    Closed(ConnId, Cause),
    /// An ICMP error about a datagram, as an `errno` of Linux. The socket stays open.
    Failed(ConnId, u16),
    /// Somebody else has an address of ours; it is not used.
    AddressConflict { iface: u8, address: IpAddr },
    /// The network has given the host an address (DHCP or a router advertisement), or the address has gone.
    Address { iface: u8, address: IpAddr, held: bool },
}

/// Why a connection is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Both sides have ended their streams.
    Finished,
    /// The peer has reset it.
    Reset,
    /// The peer refused it.
    Refused,
    /// The peer does not answer.
    TimedOut,
    /// ICMP says that the peer cannot be reached.
    Unreachable,
    /// The application aborted it.
    Aborted,
}

/// What a call of the stack asks of its caller. Who calls takes everything out before the next call.
#[derive(Debug, Default)]
pub struct Out {
    /// One for each received packet.
    pub verdicts: Vec<Verdict>,
    /// One for each verdict that is [`Verdict::Place`].
    pub places: Vec<Place>,
    /// One for each verdict that is [`Verdict::Copies`], and the sockets of all of them.
    pub to_many: Vec<ToMany>,
    pub receivers: Vec<ConnId>,
    /// To be sent, in this order, before what is planned.
    pub controls: Vec<Control>,
    /// The same.
    pub messages: Vec<Message>,
    pub plans: Vec<Plan>,
    pub events: Vec<Event>,
}

impl Out {
    /// Removes the newest entry of [`to_many`](Self::to_many), for lack of a packet.
    pub(crate) fn drop_copies(&mut self) {
        if let Some(many) = self.to_many.pop() {
            self.receivers.truncate(self.receivers.len().saturating_sub(many.count as usize));
        }
    }

    /// Whether there is nothing to be done.
    pub fn is_empty(&self) -> bool {
        self.verdicts.is_empty()
            && self.controls.is_empty()
            && self.messages.is_empty()
            && self.plans.is_empty()
            && self.events.is_empty()
    }

    /// Forgets everything; keeps the memory.
    pub fn clear(&mut self) {
        self.verdicts.clear();
        self.places.clear();
        self.to_many.clear();
        self.receivers.clear();
        self.controls.clear();
        self.messages.clear();
        self.plans.clear();
        self.events.clear();
    }
}

/// Declares [`DropReason`] with names for reports.
macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why a received packet is dropped.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum DropReason {
            $($(#[$doc])* $name,)*
        }

        impl DropReason {
            /// Names, as reports have them, in the order of the reasons.
            pub const NAMES: &[&str] = &[$($text),*];
        }
    };
}

drop_reasons! {
    /// Headers that contradict themselves or the packet's length.
    Malformed = "malformed",
    /// A wrong checksum.
    Checksum = "checksum",
    /// A checksum that its sender left to an interface which did not compute it.
    OpenChecksum = "open_checksum",
    /// Neither ARP nor IP.
    Protocol = "protocol",
    /// To another station.
    NotForUs = "not_for_us",
    /// From an address that nobody sends from.
    Source = "source",
    /// Fragments that overlap, are too many, or whose packet did not become whole in time.
    Fragment = "fragment",
    /// No connection, and a reset as answer.
    NoConnection = "no_connection",
    /// Segments of a connection that were out of its window, or old.
    OutOfWindow = "out_of_window",
    /// A timestamp older than what was there already (RFC 7323, 5).
    Paws = "paws",
    /// An acknowledgement of what was never sent.
    Acknowledgement = "ack_of_unsent",
    /// No memory for the data.
    NoSpace = "no_space",
    /// More holes than are kept.
    TooManyHoles = "too_many_holes",
    /// A listener whose queue is full.
    Backlog = "backlog",
    /// More answers than the limit allows.
    RateLimit = "rate_limit",
}

/// Counts of what was dropped, by reason.
#[derive(Debug, Clone, Default)]
pub struct Drops([u64; DropReason::NAMES.len()]);

impl Drops {
    #[inline]
    pub(crate) fn count(&mut self, reason: DropReason) -> Verdict {
        self.0[reason as usize] += 1;
        Verdict::Drop(reason)
    }

    pub(crate) fn count_many(&mut self, reason: DropReason, packets: u64) {
        self.0[reason as usize] += packets;
    }

    /// How many for this reason.
    pub fn get(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    /// Names and counts of all reasons.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        DropReason::NAMES.iter().copied().zip(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_following_copies_are_joined() {
        let conn = |index| ConnId { index, generation: 1 };
        let place = |index, pos, commit_to| Place { conn: conn(index), pos, skip: 0, len: 10, commit_to };
        let mut placed = Placed::from(&place(1, 100, 110));
        assert!(placed.join(&place(1, 110, 90)), "a gap was filled before");
        for other in [place(2, 120, 130), place(1, 110, 130), place(1, 121, 131)] {
            assert!(!placed.join(&other), "{other:?}");
        }
        let Placed { pos, len, copies, commit_to, .. } = placed;
        assert_eq!((pos, len, copies, commit_to), (100, 20, 2, 110));
    }
}
