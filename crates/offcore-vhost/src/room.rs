//! What a call spends on chains of many descriptors or bytes, and what is known of those that a packet did not fit.

/// Descriptors of chains that are not one short buffer each, at most.
const DESCRIPTORS: usize = 256;
/// Bytes of packets in such chains.
const BYTES: usize = 256 << 10;

/// A buffer that is longer is no [`Single`](offcore_ring::device::Single): 64 of this length are 1 MiB.
pub(crate) const LONGEST_SINGLE: u32 = 16 << 10;

/// What a call may still spend on chains of several descriptors, or of long ones. The driver's chains wait for the next call
/// once it is used up, which the last packet may overdraw: a guest gets no more of a worker by asking for more work per
/// packet.
#[derive(Debug)]
pub(crate) struct Allowance {
    descriptors: usize,
    bytes: usize,
}

impl Allowance {
    pub(crate) fn new() -> Self {
        Self { descriptors: DESCRIPTORS, bytes: BYTES }
    }

    /// Notes a packet of `bytes` whose chains have `descriptors`.
    pub(crate) fn spend(&mut self, descriptors: usize, bytes: usize) {
        self.descriptors = self.descriptors.saturating_sub(descriptors);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    pub(crate) fn is_used_up(&self) -> bool {
        self.descriptors == 0 || self.bytes == 0
    }
}

/// What is known of the next chains of a ring that a guest receives from, since a packet did not fit them: how many bytes
/// they hold, header included, and what becomes of longer packets. The next one that is longer finds out by this, and not by
/// taking the chains apart once more. Forgotten when a chain is taken.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Room(Option<(u32, Unfit)>);

/// What becomes of a packet that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// It never will: the chains that it may have are too short.
    Never,
    /// Not before the driver has made this entry available, counted from the next one to take.
    Before(u16),
}

impl Room {
    /// What becomes of a packet of `bytes`, if that is known to be too long.
    pub(crate) fn refuses(self, bytes: u32) -> Option<Unfit> {
        self.0.filter(|(room, _)| bytes > *room).map(|(_, unfit)| unfit)
    }

    /// The chains that come next hold `bytes`, and that is not enough.
    pub(crate) fn note(&mut self, bytes: u32, unfit: Unfit) {
        self.0 = Some((bytes, unfit));
    }

    /// Other chains come next.
    #[inline(always)]
    pub(crate) fn forget(&mut self) {
        self.0 = None;
    }
}
