//! Whether a peer takes an answer: that is what it acknowledges, not what is in the memory that it is sent from.

/// An answer of which the peer takes nothing for so long, in microseconds, is given up.
const STALLED: u64 = 30_000_000;
/// Bytes that a peer takes in a second, at least, on average: single bytes do not keep an answer alive.
const SLOWEST: u64 = 500;
const MICROS_PER_BYTE: u64 = 1_000_000 / SLOWEST;

/// How a peer gets on with answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// What it had acknowledged when it was last looked.
    acknowledged: u64,
    /// Until when it is to have taken more; each byte puts it off, up to [`STALLED`] from now.
    due: u64,
}

impl Progress {
    /// Of an answer that begins behind what is `acknowledged`.
    pub(super) fn new(now: u64, acknowledged: u64) -> Self {
        Self { acknowledged, due: now + STALLED }
    }

    /// Whether the peer takes too little. To be asked now and then.
    pub(super) fn is_stalled(&mut self, now: u64, acknowledged: u64) -> bool {
        let taken = acknowledged.saturating_sub(self.acknowledged);
        self.acknowledged = acknowledged;
        let put_off = self.due.saturating_add(taken.saturating_mul(MICROS_PER_BYTE));
        self.due = put_off.min(now + STALLED);
        self.due <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The second in which a peer is given up that takes `bytes` every `seconds`.
    fn given_up(bytes: u64, seconds: u64) -> Option<u64> {
        let mut progress = Progress::new(0, 0);
        (1..1000).find(|second| progress.is_stalled(second * 1_000_000, second / seconds * bytes))
    }

    #[test]
    fn who_takes_little_is_given_up() {
        assert_eq!(given_up(0, 1), Some(30));
        assert_eq!(given_up(1, 1), Some(31), "single bytes");
        assert_eq!(given_up(1, 29), Some(31));
        assert_eq!(given_up(400, 1), Some(150));
        assert_eq!(given_up(500, 1), None);
        assert_eq!(given_up(20_000, 29), None);
        assert_eq!(given_up(1_000_000, 31), Some(30), "what was taken long ago is no progress");
    }
}
