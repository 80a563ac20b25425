//! The peer's receive window (RFC 9293, 3.10.7.4).

/// The window, and the segment that last updated it.
#[derive(Debug, Default)]
pub(super) struct PeerWindow {
    /// Right edge: SND.UNA + SND.WND.
    edge: u64,
    /// The position and the acknowledgement of the segment that last updated it: SND.WL1 and SND.WL2.
    updated: (u64, u64),
    /// Largest window that the peer has advertised, in bytes.
    largest: u32,
}

impl PeerWindow {
    /// Sets the window from the last segment of the handshake.
    pub(super) fn open(&mut self, window: u32) {
        (self.edge, self.largest) = (u64::from(window), window);
    }

    #[inline]
    pub(super) fn edge(&self) -> u64 {
        self.edge
    }

    #[inline]
    pub(super) fn largest(&self) -> u32 {
        self.largest
    }

    /// Returns whether the segment at position `at` set the window.
    #[inline]
    pub(super) fn is_of(&self, at: Option<u64>) -> bool {
        at == Some(self.updated.0)
    }

    /// Records a segment that repeats the window.
    #[inline]
    pub(super) fn repeat(&mut self, at: u64, ack: u64) {
        self.updated = (at, ack);
    }

    /// Updates the window from a newer segment at position `at`. `una` is the oldest unacknowledged position. Returns
    /// whether the window has changed.
    #[inline]
    pub(super) fn update(&mut self, una: u64, at: u64, ack: u64, window: u32) -> bool {
        let newer = ack > una || (at, ack) >= self.updated;
        if ack < una || !newer {
            return false;
        }
        let edge = ack + u64::from(window);
        let moved = edge != self.edge;
        self.edge = edge;
        self.updated = (at, ack);
        self.largest = self.largest.max(window);
        moved
    }
}
