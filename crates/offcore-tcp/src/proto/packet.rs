//! The inputs and outputs of the stack: headers of received packets, verdicts, plans and packets without payload.

use std::net::IpAddr;
use std::ops::Range;

use offcore_stats::named;
use offcore_wire::{MacAddr, Sum};

use super::addr::{ConnId, SOCKETS};
use super::joined::MulticastDatagram;

/// Bytes of a packet that the protocols see. The longest Ethernet, IP and TCP headers fit.
pub const HEAD: usize = 128;

/// A received packet.
#[derive(Debug)]
pub struct RxSeg<'a> {
    /// The first bytes of the packet: all of them, or at least [`HEAD`]. A reply is written in place.
    pub head: &'a mut [u8],
    /// Length of the whole packet in bytes, without FCS.
    pub len: u32,
    pub checksum: RxChecksum,
}

/// The verification state of a packet's TCP, UDP or ICMP checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RxChecksum {
    /// The port has verified it, or the packet comes from this machine and its checksum is not computed yet.
    Verified,
    /// Not verified. `rest` is the sum of the bytes from [`HEAD`] to [`sum_end`](super::ip::sum_end).
    Unknown { rest: Sum },
}

/// The verdict about a received packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The packet is fully processed.
    Consumed,
    /// The packet is dropped.
    Drop(DropReason),
    /// The head now contains a reply, which is sent on the receiving interface.
    Reply,
    /// The payload belongs into a FIFO, as described by the next entry of [`Out::places`].
    Place,
    /// The payload belongs into several FIFOs. See [`Out::to_many`].
    Copies,
    /// The packet is a fragment for this host. The reassembled packet is passed to the stack when it is complete.
    Fragment,
}

/// A copy of a packet's payload to an rx_fifo whose blocks are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub conn: ConnId,
    /// Position of the first byte in the stream.
    pub pos: u64,
    /// Offset of the first byte in the packet.
    pub skip: u32,
    /// Bytes to copy, at least one.
    pub len: u32,
    /// Position up to which the application may see data when this and all earlier copies of the connection are
    /// complete.
    pub commit_to: u64,
}

/// Completed copies of one connection that are adjacent in the stream. [`Stack::placed`](super::Stack::placed)
/// processes all of them in one call.
#[derive(Debug, Clone, Copy)]
pub struct Placed {
    pub(crate) conn: ConnId,
    pub(crate) pos: u64,
    /// Total length in bytes. They are in one FIFO, so it is less than 4 GiB.
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
    /// Adds a copy if it belongs to the same connection and its bytes come next. Returns whether it was added.
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

/// The next data to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Next {
    /// Positions in the stream.
    pub range: Range<u64>,
    /// The stream ends behind the range.
    pub fin: bool,
    /// The range has been sent before.
    pub again: bool,
}

/// A copy of data from a tx_fifo to a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    pub conn: ConnId,
    /// Position of the first byte in the stream.
    pub pos: u64,
    /// Number of bytes to copy. 0 for a FIN without data.
    pub len: u32,
    /// The interface, with flags in the higher bits. They share one word because plans are moved right after their
    /// creation: a load that spans several narrower stores stalls.
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

    /// Creates the plan of a datagram. `long`: the packet will be fragmented.
    pub(crate) fn datagram(conn: ConnId, iface: u8, pos: u64, len: u32, long: bool) -> Self {
        Self { conn, pos, len, rest: u32::from(iface) | (u32::from(long) * Self::LONG) }
    }

    /// Returns whether this is a datagram, which [`Stack::seal_datagram`](super::stack::Stack::seal_datagram)
    /// completes.
    #[inline]
    pub fn is_datagram(&self) -> bool {
        self.conn.index >= SOCKETS
    }

    /// Returns whether the packet will be fragmented. Its checksum must be complete before that.
    #[inline]
    pub fn is_long(&self) -> bool {
        self.rest & Self::LONG != 0
    }

    /// Returns the sending interface.
    #[inline]
    pub fn iface(&self) -> u8 {
        self.rest as u8
    }

    /// Returns the data to send.
    #[inline]
    pub(crate) fn next(&self) -> Next {
        let range = self.pos..self.pos + u64::from(self.len);
        Next { range, fin: self.rest & Self::FIN != 0, again: self.rest & Self::AGAIN != 0 }
    }
}

/// The result for a planned packet whose copies are complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sealed {
    /// The packet must be sent on this interface. The headers have `headers` bytes, and the transport header begins at
    /// `transport`. The port must segment the payload into segments of `segment` bytes, unless `segment` is 0.
    Send { iface: u8, headers: u8, transport: u8, segment: u16 },
    /// The data has been acknowledged in the meantime, or the connection no longer exists.
    Obsolete,
}

/// A packet without payload, including its checksums.
#[derive(Debug, Clone, Copy)]
pub struct Control {
    /// The sending interface.
    pub iface: u8,
    len: u8,
    bytes: [u8; HEAD],
}

impl Control {
    /// Creates a packet. `write` writes it into the buffer and returns its length.
    pub(crate) fn new(iface: u8, write: impl FnOnce(&mut [u8; HEAD]) -> usize) -> Self {
        let mut bytes = [0; HEAD];
        let len = write(&mut bytes).min(HEAD) as u8;
        Self { iface, len, bytes }
    }

    /// Returns the packet, beginning with the Ethernet header.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..usize::from(self.len)]
    }
}

/// A packet that the stack creates and that does not fit a [`Control`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The sending interface.
    pub iface: u8,
    /// The packet, beginning with the Ethernet header.
    pub bytes: Vec<u8>,
}

/// A datagram to send. The fields are the same as in [`Sealed::Send`]. If the MAC address of the next hop is not
/// `known`, the Ethernet header is incomplete. A packet longer than `mtu` bytes is fragmented.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealedDatagram {
    pub iface: u8,
    pub headers: u8,
    pub transport: u8,
    pub known: bool,
    /// Sockets of this host receive a copy, described by the newest entry of [`Out::to_many`].
    pub loops: bool,
    pub mtu: u16,
}

/// Notifications for applications.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// An active open has completed.
    Connected(ConnId),
    /// A listener has a connection to accept.
    Incoming { listener: u32 },
    /// New data can be read.
    Readable(ConnId),
    /// New room to write is available.
    Writable(ConnId),
    /// The peer has ended its stream, and all its data can be read.
    EndOfStream(ConnId),
    /// The connection has ended, with the cause.
    Closed(ConnId, Cause),
    /// An ICMP error about a datagram, as a Linux `errno`. The socket stays open.
    Failed(ConnId, u16),
    /// Another host, with this Ethernet address, uses an address of this host. The address is not used here.
    AddressConflict { iface: u8, address: IpAddr, mac: MacAddr },
    /// The network has assigned an address to the host (DHCP or a router advertisement), or the address has expired.
    Address { iface: u8, address: IpAddr, held: bool },
}

/// Why a connection has ended.
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

/// The outputs of a call of the stack. The caller must take everything out before the next call.
#[derive(Debug, Default)]
pub struct Out {
    /// One verdict for each received packet.
    pub verdicts: Vec<Verdict>,
    /// One place for each [`Verdict::Place`].
    pub places: Vec<Place>,
    /// One entry for each [`Verdict::Copies`], and the sockets of all entries.
    pub to_many: Vec<MulticastDatagram>,
    pub receivers: Vec<ConnId>,
    /// Packets to send in this order, before the plans.
    pub controls: Vec<Control>,
    /// Longer packets to send before the plans.
    pub messages: Vec<Message>,
    pub plans: Vec<Plan>,
    pub events: Vec<Event>,
}

impl Out {
    /// Removes the newest entry of [`to_many`](Self::to_many), because the pool has no packet for it.
    pub(crate) fn drop_copies(&mut self) {
        if let Some(many) = self.to_many.pop() {
            self.receivers.truncate(self.receivers.len().saturating_sub(many.count as usize));
        }
    }

    /// Returns whether no output is pending.
    pub fn is_empty(&self) -> bool {
        self.verdicts.is_empty()
            && self.controls.is_empty()
            && self.messages.is_empty()
            && self.plans.is_empty()
            && self.events.is_empty()
    }

    /// Clears everything and keeps the memory.
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

named! {
    /// Why a received packet is dropped.
    pub enum DropReason counts Packets {
        /// Headers that are inconsistent in themselves or with the packet's length.
        Malformed = "malformed",
        /// A wrong checksum.
        Checksum = "checksum",
        /// A checksum left to an interface that did not compute it.
        OpenChecksum = "open_checksum",
        /// Neither ARP nor IP.
        Protocol = "protocol",
        /// Addressed to another station.
        NotForUs = "not_for_us",
        /// An invalid source address.
        Source = "source",
        /// Fragments that overlap, are too many, or were not reassembled in time.
        Fragment = "fragment",
        /// No matching connection. A reset is sent.
        NoConnection = "no_connection",
        /// Segments outside the receive window, or old segments.
        OutOfWindow = "out_of_window",
        /// A timestamp older than the last one (RFC 7323, 5).
        Paws = "paws",
        /// An acknowledgement of data that was never sent.
        Acknowledgement = "ack_of_unsent",
        /// No memory for the data.
        NoSpace = "no_space",
        /// Datagrams and connection requests to a user that has more than its share of a busy worker.
        UserShare = "user_share",
        /// More holes than the reassembly queue can hold.
        TooManyHoles = "too_many_holes",
        /// A listener whose accept queue is full.
        Backlog = "backlog",
        /// More answers than the rate limit allows.
        RateLimit = "rate_limit",
    }
}

/// Counters of dropped packets by reason.
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

    /// Returns the count for a reason.
    pub fn get(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    /// Returns the names and counts of all reasons.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        DropReason::NAMES.into_iter().zip(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_adjacent_copies_are_joined() {
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
