//! Where the data of a copy is: in which cache, and whose.

use offcore_stats::{SplitMix, named};

named! {
    /// How warm a benchmark's buffers are. What a copy costs depends on it more than on its size.
    pub enum Temperature {
        /// 32 buffers, touched by the core that is measured only.
        Hot = "hot",
        /// 256 buffers; the other core wrote the source and last read the destination, as a guest on its own core does.
        Remote = "remote",
        /// 256 MiB of buffers, used in random order, untouched since their last turn.
        Cold = "cold",
    }
}

impl Temperature {
    /// Buffers that each direction goes through.
    pub const fn buffers(self) -> usize {
        match self {
            Self::Hot => 32,
            Self::Remote => 256,
            // So many at a time are whole pages.
            Self::Cold => (256_usize << 20).div_ceil(STRIDE).next_multiple_of(64),
        }
    }

    /// Packets in flight at a time.
    pub const fn window(self) -> usize {
        match self {
            Self::Hot => 32,
            Self::Remote | Self::Cold => 256,
        }
    }

    /// The order in which buffers are used.
    pub fn order(self, seed: u64) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.buffers() as u32).collect();
        if self == Self::Cold {
            SplitMix::new(seed).shuffle(&mut order);
        }
        order
    }
}

/// Bytes of a guest buffer.
pub const BUFFER: usize = 2048;
/// Bytes between the beginnings of two: as many lines as a DPDK packet buffer has, an odd number, so that packets do not
/// crowd the same sets of a cache.
pub const STRIDE: usize = 37 * 64;
