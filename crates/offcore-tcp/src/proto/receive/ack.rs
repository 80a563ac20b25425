//! Delayed acknowledgements (RFC 9293, 3.8.6.3; RFC 5681, 4.2).

use offcore_stats::time::{Micros, Time};

/// Maximum delay of an acknowledgement (RFC 9293, 3.8.6.3: less than half a second; Linux's minimum is
/// 40 ms).
pub(super) const DELAYED_ACK: Micros = Micros::from_millis(40);
/// For this many segments at the beginning, every second one is acknowledged immediately so that the peer's window
/// opens.
const QUICK_SEGMENTS: u8 = 32;

/// Whether an acknowledgement is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AckNeed {
    No,
    /// At this time.
    By(Time),
    Now,
}

/// The acknowledgement that is due, and the size of the segments on which its time depends.
#[derive(Debug)]
pub(crate) struct DelayedAck {
    need: AckNeed,
    /// The number of segments until every second one is no longer acknowledged immediately.
    quick: u8,
    /// The peer's segment size, estimated as the largest segment seen, and the largest size that it may send. Longer
    /// segments were merged on their way.
    peer_mss: u16,
    largest: u16,
    /// The position that was last acknowledged.
    acknowledged: u64,
    /// The number of packets since the last call of [`take_packets`](Self::take_packets).
    packets: u32,
}

impl DelayedAck {
    pub(super) fn new() -> Self {
        Self {
            need: AckNeed::No,
            quick: QUICK_SEGMENTS,
            peer_mss: 536,
            largest: u16::MAX,
            acknowledged: 0,
            packets: 0,
        }
    }

    /// Sets the maximum payload per segment that the peer has been told, and uses its MSS option as a first bound of
    /// its segment size.
    pub(crate) fn expect_segments(&mut self, largest: u16, mss: u16) {
        (self.largest, self.peer_mss) = (largest, self.peer_mss.min(mss));
    }

    /// Returns the estimated payload size of the peer's segments.
    #[inline]
    pub(crate) fn peer_mss(&self) -> u16 {
        self.peer_mss
    }

    /// Counts a packet of any kind.
    #[inline]
    pub(crate) fn count_packet(&mut self) {
        self.packets += 1;
    }

    /// Returns the number of packets since the last call.
    #[inline]
    pub(crate) fn take_packets(&mut self) -> u32 {
        std::mem::take(&mut self.packets)
    }

    #[inline]
    pub(crate) fn need(&self) -> AckNeed {
        self.need
    }

    /// Requests an immediate acknowledgement.
    #[inline]
    pub(crate) fn request(&mut self) {
        self.need = AckNeed::Now;
    }

    /// Records that `len` bytes of in-order data have arrived, up to `next`.
    #[inline]
    pub(super) fn arrived(&mut self, now: Time, next: u64, len: u64) {
        let due = next - self.acknowledged;
        if len <= u64::from(self.largest) {
            self.peer_mss = self.peer_mss.max(len as u16);
        }
        // At the beginning, every second segment is acknowledged. Later, a vector of segments gets one acknowledgement.
        self.quick = self.quick.saturating_sub(1);
        if due >= 2 * u64::from(self.peer_mss) {
            self.need = AckNeed::Now;
        } else if self.need == AckNeed::No {
            self.need = AckNeed::By(now + DELAYED_ACK);
        }
    }

    /// Returns whether an acknowledgement must be sent before more segments of the same vector are processed.
    #[inline]
    pub(super) fn is_immediate(&self, has_holes: bool) -> bool {
        self.need == AckNeed::Now && (self.quick > 0 || has_holes)
    }

    /// Records that an acknowledgement of all data before `next` is sent.
    #[inline]
    pub(super) fn sent(&mut self, next: u64) {
        (self.acknowledged, self.need) = (next, AckNeed::No);
    }

    /// Returns whether `position` was not beyond the last acknowledgement.
    #[inline]
    pub(super) fn covers(&self, position: u64) -> bool {
        position <= self.acknowledged
    }
}
