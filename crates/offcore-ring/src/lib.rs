//! Rings.
//!
//! * [`split`], [`packed`]: virtqueues (virtio 1.2, sections 2.7 and 2.8): layout, and what both sides share,
//! * [`device`], [`driver`]: the two sides, whatever the format,
//! * [`spsc`]: single-producer single-consumer rings between two threads of one process.

mod barrier;
pub mod device;
mod double;
pub mod driver;
mod layout;
pub mod packed;
pub mod prefetch;
pub mod split;
pub mod spsc;
mod sync;
mod vector;

pub use layout::Layout;
pub use split::RingError;
