//! Limits on the work that one call spends on long chains, and a cache of the capacity of the next receive chains.

/// Maximum number of descriptors per call in chains that are not a single short buffer.
const DESCRIPTORS: usize = 256;
/// Maximum number of packet bytes per call in such chains.
const BYTES: usize = 256 << 10;

/// Maximum length of a [`Single`](offcore_ring::device::Single) in bytes: 64 of this length are 1 MiB.
pub(crate) const LONGEST_SINGLE: u32 = 16 << 10;

/// The remaining work of a call for chains of several descriptors and for long chains. The last packet may exceed the
/// limit. Once it is used up, the remaining chains wait for the next call. This way a guest cannot get a larger share
/// of a worker by making each packet more expensive.
#[derive(Debug)]
pub(crate) struct Allowance {
    descriptors: usize,
    bytes: usize,
}

impl Allowance {
    pub(crate) fn new() -> Self {
        Self { descriptors: DESCRIPTORS, bytes: BYTES }
    }

    /// Charges a packet of `bytes` whose chains have `descriptors` descriptors.
    pub(crate) fn spend(&mut self, descriptors: usize, bytes: usize) {
        self.descriptors = self.descriptors.saturating_sub(descriptors);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    pub(crate) fn is_exhausted(&self) -> bool {
        self.descriptors == 0 || self.bytes == 0
    }
}

/// The capacity of the next chains of a guest's receive ring, recorded after a packet did not fit: their length in
/// bytes, header included, and how to treat longer packets. It saves walking the same chains again for every packet
/// that is too long. It is cleared when a chain is taken.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Room(Option<(u32, Unfit)>);

/// How to treat a packet that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// The packet never fits: the chains that it may use are too short.
    Never,
    /// The packet may fit once the driver has made this entry available, counted from the next entry to take.
    Before(u16),
}

impl Room {
    /// Returns how to treat a packet of `bytes` if it is known to be too long.
    pub(crate) fn refuses(self, bytes: u32) -> Option<Unfit> {
        self.0.filter(|(room, _)| bytes > *room).map(|(_, unfit)| unfit)
    }

    /// Records that the next chains hold `bytes`, and how to treat packets that are longer.
    pub(crate) fn note(&mut self, bytes: u32, unfit: Unfit) {
        self.0 = Some((bytes, unfit));
    }

    /// Clears the record, because other chains are next.
    #[inline(always)]
    pub(crate) fn forget(&mut self) {
        self.0 = None;
    }
}
