//! Cache temperature: the caches that hold the data of a copy.

use offcore_stats::{SplitMix, named};

named! {
    /// Cache temperature of the buffers of a benchmark. It influences the cost of a copy more than the size does.
    pub enum Temperature {
        /// 32 buffers that only the measured core touches.
        Hot = "hot",
        /// 256 buffers. The other core wrote the source and last read the destination, like a guest on its own core.
        Remote = "remote",
        /// 256 MiB of buffers in random order, not touched since their last use.
        Cold = "cold",
    }
}

impl Temperature {
    /// Returns the number of buffers per direction.
    pub const fn buffers(self) -> usize {
        match self {
            Self::Hot => 32,
            Self::Remote => 256,
            // 64 buffers fill whole pages.
            Self::Cold => (256_usize << 20).div_ceil(STRIDE).next_multiple_of(64),
        }
    }

    /// Returns the number of packets in flight.
    pub const fn window(self) -> usize {
        match self {
            Self::Hot => 32,
            Self::Remote | Self::Cold => 256,
        }
    }

    /// Returns the order in which buffers are used.
    pub fn order(self, seed: u64) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.buffers() as u32).collect();
        if self == Self::Cold {
            SplitMix::new(seed).shuffle(&mut order);
        }
        order
    }
}

/// Size of a guest buffer in bytes.
pub const BUFFER: usize = 2048;
/// Distance between the starts of two buffers in bytes. It is the size of a DPDK packet buffer in cache lines, which is
/// an odd number, so that packets are spread over the sets of a cache.
pub const STRIDE: usize = 37 * 64;
