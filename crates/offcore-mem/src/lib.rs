//! Memory that packets live in.
//!
//! * [`mapping`]: shared mappings over memfds, with the largest pages to be had,
//! * [`device`]: a device's memory in place of the pool's,
//! * [`guest`]: another party's memory: a table of regions, address checks of whole ranges, reference counts held by
//!   in-flight copies,
//! * [`lend`]: buffers in the hands of a kernel or a network card, known by where they are,
//! * [`packet`]: packet handles and bursts,
//! * [`pool`]: the packet pool and its per-worker caches,
//! * [`segments`]: packets of several buffers,
//! * [`sigbus`]: what happens when shared memory vanishes under us.

pub mod device;
pub mod guest;
pub mod lend;
pub mod mapping;
pub mod packet;
pub mod pool;
pub mod segments;
pub mod sigbus;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use device::DeviceMemory;
pub use guest::{GuestMemory, GuestRegion, Held, RegionCache};
pub use mapping::{Hugepages, Mapping};
pub use packet::{BURST, Burst, Packet};
pub use pool::{CHUNK_ALIGN, HEADROOM, Pool, PoolCache};
pub use segments::{Segments, SegmentsMut};
