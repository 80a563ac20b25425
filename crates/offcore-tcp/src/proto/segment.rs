//! A received TCP segment, parsed from the head of a packet.

use std::ops::Range;

use offcore_wire::{TcpFlags, TcpOptions, TcpSegment};

use super::addr::FlowKey;
use super::ip::IpHeaders;
use super::packet::DropReason;

/// The header of a segment, and the offset and length of its payload.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub src_port: u16,
    pub dst_port: u16,
    pub seq: u32,
    pub ack: u32,
    pub flags: TcpFlags,
    /// As on the wire, not scaled.
    pub window: u16,
    /// Valid only with [`TcpFlags::URG`].
    pub urgent: u16,
    pub options: TcpOptions,
    /// Offset of the payload in the frame.
    pub payload_at: usize,
    /// Length of the payload in bytes.
    pub payload_len: u32,
    /// A router has set a congestion mark (RFC 3168, 6.1.3).
    pub congestion_experienced: bool,
}

impl Segment {
    /// An empty segment.
    pub(crate) const NONE: Self = Self {
        src_port: 0,
        dst_port: 0,
        seq: 0,
        ack: 0,
        flags: TcpFlags(0),
        window: 0,
        urgent: 0,
        options: TcpOptions::NONE,
        payload_at: 0,
        payload_len: 0,
        congestion_experienced: false,
    };

    /// Parses the segment in a frame that begins with `head`.
    // The result is written in place, as for the IP headers.
    #[inline]
    pub(crate) fn read(&mut self, ip: &IpHeaders, head: &[u8]) -> Result<(), DropReason> {
        let bytes = head.get(ip.transport..ip.end.min(head.len())).ok_or(DropReason::Malformed)?;
        let tcp = TcpSegment::new_checked(bytes).map_err(|_| DropReason::Malformed)?;
        let payload_at = ip.transport + tcp.header_len();
        self.src_port = tcp.src_port();
        self.dst_port = tcp.dst_port();
        self.seq = tcp.seq();
        self.ack = tcp.ack();
        self.flags = tcp.flags();
        self.window = tcp.window();
        self.urgent = tcp.urgent();
        self.options.read(tcp.options());
        self.payload_at = payload_at;
        self.payload_len = (ip.end - payload_at) as u32;
        self.congestion_experienced = ip.ecn == 3;
        Ok(())
    }

    /// Returns the segment's flow from this host's view. An IPv6 packet from a mapped address has none (RFC 4038, 4.2).
    #[inline]
    pub(crate) fn flow(&self, ip: &IpHeaders) -> Option<FlowKey> {
        ip.flow(self.dst_port, self.src_port)
    }

    pub(crate) fn has(&self, flag: TcpFlags) -> bool {
        self.flags.intersects(flag)
    }

    /// Returns the number of sequence numbers that it occupies: its payload, and one each for SYN and FIN.
    pub(crate) fn seq_len(&self) -> u32 {
        self.payload_len + u32::from(self.has(TcpFlags::SYN)) + u32::from(self.has(TcpFlags::FIN))
    }
}

/// Returns the position of a sequence number that is at most 2^31 from `near`. `first` is the sequence number of
/// position 0. Returns `None` if the position would be before 0.
#[inline]
pub(crate) fn position(seq: u32, first: u32, near: u64) -> Option<u64> {
    let distance = seq.wrapping_sub(first).wrapping_sub(near as u32).cast_signed();
    near.checked_add_signed(distance.into())
}

/// Returns the positions of both edges of a range. Returns `None` if the range is empty.
#[inline]
pub(crate) fn range(start: u32, end: u32, first: u32, near: u64) -> Option<Range<u64>> {
    let (start, end) = (position(start, first, near)?, position(end, first, near)?);
    (start < end).then_some(start..end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn position_inverts_sequence_number(first: u32, near in 0u64..1 << 40, away in -0x7fff_ffffi64..0x7fff_ffff) {
            let Some(pos) = near.checked_add_signed(away) else { return Ok(()) };
            let seq = first.wrapping_add(pos as u32);
            prop_assert_eq!(position(seq, first, near), Some(pos));
        }
    }

    #[test]
    fn sequence_before_stream_has_no_position() {
        assert_eq!(position(99, 100, 0), None);
        assert_eq!(position(99, 100, 1), None);
        assert_eq!(position(100, 100, 0), Some(0));
    }

    /// Returns numbers around the boundaries of 32 bits and of their halves.
    fn edges() -> impl Iterator<Item = u64> {
        let edges = [0_u64, 1 << 31, 1 << 32, 3 << 31, 5 << 32, u64::MAX - (1 << 31), u64::MAX];
        edges.into_iter().flat_map(|edge| (0..=6).map(move |more| edge.wrapping_add(more).wrapping_sub(3)))
    }

    /// `position` returns the nearest of all positions with a sequence number.
    #[test]
    fn position_is_nearest_to_reference() {
        for (near, first) in edges().flat_map(|near| edges().map(move |first| (near, first as u32))) {
            for away in edges().map(|edge| edge as u32) {
                let seq = first.wrapping_add(near as u32).wrapping_add(away);
                let away = if away < 1 << 31 { i128::from(away) } else { i128::from(away) - (1 << 32) };
                let expected = u64::try_from(i128::from(near) + away).ok();
                assert_eq!(position(seq, first, near), expected, "{away} from {near}, first {first}");
            }
        }
    }

    /// A range has the positions of its edges. The result is `None` if the end is not after the start.
    #[test]
    fn range_matches_edge_positions() {
        for near in edges() {
            let all: Vec<u32> = edges().map(|edge| (near as u32).wrapping_add(edge as u32)).collect();
            for (start, end) in all.iter().flat_map(|start| all.iter().map(move |end| (*start, *end))) {
                let found = range(start, end, 0, near);
                match (position(start, 0, near), position(end, 0, near)) {
                    (Some(start), Some(end)) if start < end => assert_eq!(found, Some(start..end)),
                    _ => assert_eq!(found, None),
                }
                let bytes = found.map(|range| range.end - range.start);
                assert!(bytes.is_none_or(|bytes| bytes == end.wrapping_sub(start).into()));
            }
        }
    }
}
