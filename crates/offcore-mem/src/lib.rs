//! The memory that contains packets.
//!
//! * [`mapping`]: shared mappings of memfds, with the largest available pages,
//! * [`device`]: a device's memory in place of the pool's memory,
//! * [`guest`]: another party's memory: a table of regions, checks of address ranges, and reference counts held by
//!   in-flight copies,
//! * [`lend`]: buffers lent to a kernel or a network card, identified by their offset,
//! * [`packet`]: packet handles and bursts,
//! * [`pool`]: the packet pool and its per-worker caches,
//! * [`segments`]: packets of several buffers,
//! * [`sigbus`]: handles shared memory that another party truncates.

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
