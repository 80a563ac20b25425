//! Runs: consecutive segments of a flow in a vector that differ only in their data.
//!
//! Other stacks merge such segments first (GRO). This stack compares headers instead: if a packet repeats the headers
//! of the previous packet, which delivered in-order data, only its sequence number, timestamp and lengths are parsed.
//! All other checks have already been made. No merged packet is built, and each payload is copied separately.

use offcore_wire::{Ipv4Packet, Ipv6Packet, TcpFlags, Timestamps, ethernet, ipv4, ipv6, tcp};

use super::ip::IpHeaders;
use super::packet::RxSeg;
use super::segment::Segment;

/// Offsets of a TCP header without IP options or extension headers before it.
const BEHIND_V4: usize = ethernet::HEADER_LEN + ipv4::HEADER_LEN;
const BEHIND_V6: usize = ethernet::HEADER_LEN + ipv6::HEADER_LEN;
/// Length of a TCP header, the same with timestamps in the layout that RFC 7323 recommends in appendix A, and the first
/// bytes of that layout.
const PLAIN: usize = tcp::HEADER_LEN;
const TIMED: usize = PLAIN + 12;
const LAYOUT: [u8; 4] = [1, 1, 8, 10];

/// A connection whose next segment may continue a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub index: u32,
    /// Offset and length of the TCP header.
    transport: u8,
    header: u8,
}

/// The fields that vary within a run.
pub(super) struct Again {
    pub seq: u32,
    pub ack: u32,
    pub timestamps: Option<Timestamps>,
    /// Offset of the payload in the frame, and its length.
    pub payload_at: usize,
    pub payload_len: u32,
}

impl Run {
    /// Creates a run after a segment whose payload connection `index` has accepted.
    #[inline]
    pub(super) fn after(index: u32, ip: &IpHeaders, segment: &Segment) -> Option<Self> {
        let header = segment.payload_at - ip.transport;
        let known = matches!(ip.transport, BEHIND_V4 | BEHIND_V6)
            && matches!((header, segment.options.timestamps), (PLAIN, None) | (TIMED, Some(_)));
        let plain = segment.flags.without(TcpFlags::PSH) == TcpFlags::ACK;
        (known && plain).then_some(Self { index, transport: ip.transport as u8, header: header as u8 })
    }

    /// Parses a packet that repeats the headers of the packet `before` it, which belongs to the run.
    #[inline]
    pub(super) fn read(self, before: &[u8], packet: &RxSeg<'_>) -> Option<Again> {
        let (transport, header) = (usize::from(self.transport), usize::from(self.header));
        let (first, second) = (before.split_at_checked(transport)?, packet.head.split_at_checked(transport)?);
        let available = packet.len as usize - ethernet::HEADER_LEN;
        let network = second.0.get(ethernet::HEADER_LEN..)?;
        let total = if transport == BEHIND_V4 {
            // Type of service; fragment, time to live, protocol; addresses.
            let (a, b) = (first.0, second.0);
            if !same::<0, 16>(a, b) || !same::<20, 4>(a, b) || !same::<26, 8>(a, b) {
                return None;
            }
            let ip = Ipv4Packet::head_of(network, available).ok().filter(Ipv4Packet::verify_checksum)?;
            usize::from(ip.total_len()) - ipv4::HEADER_LEN
        } else {
            if !same::<0, 18>(first.0, second.0) || !same::<20, 34>(first.0, second.0) {
                return None;
            }
            let ip = Ipv6Packet::head_of(network, available).ok()?;
            usize::from(ip.payload_len())
        };
        let (first, second) = (first.1.get(..header)?, second.1.get(..header)?);
        let push = TcpFlags::PSH.0;
        // Ports; acknowledgement, header length; flags except PSH; window.
        let repeats = same::<0, 4>(first, second)
            && same::<8, 5>(first, second)
            && first[13] | push == second[13] | push
            && same::<14, 2>(first, second);
        let mut timestamps = None;
        if header == TIMED {
            if word(second, 20) != u32::from_be_bytes(LAYOUT) {
                return None;
            }
            timestamps = Some(Timestamps { value: word(second, 24), echo: word(second, 28) });
        }
        let payload_len = u32::try_from(total.checked_sub(header)?).ok()?;
        let (seq, ack, payload_at) = (word(second, 4), word(second, 8), transport + header);
        (repeats && payload_len > 0).then_some(Again { seq, ack, timestamps, payload_at, payload_len })
    }
}

/// Returns whether the `N` bytes from `AT` on are equal.
#[inline]
fn same<const AT: usize, const N: usize>(a: &[u8], b: &[u8]) -> bool {
    let part = |bytes: &[u8]| bytes.get(AT..).and_then(|bytes| bytes.first_chunk::<N>().copied());
    part(a) == part(b)
}

#[inline]
fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u32::from_be_bytes(*bytes))
}
