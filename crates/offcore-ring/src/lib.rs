//! Rings.
//!
//! * [`split`]: split virtqueues (virtio 1.2, section 2.7): layout, and what both sides share,
//! * [`split::device`], [`split::driver`]: the two sides,
//! * [`spsc`]: single-producer single-consumer rings between two threads of one process.

pub mod prefetch;
pub mod split;
pub mod spsc;
mod sync;

pub use split::RingError;
