//! Virtqueues, and rings between threads.
//!
//! * [`split`], [`packed`]: virtqueues (virtio 1.2, sections 2.7 and 2.8), with their layout and the code shared by
//!   both sides,
//! * [`chain`]: code shared by both formats,
//! * [`device`], [`driver`]: the two sides of a virtqueue, independent of the format,
//! * [`spsc`]: single-producer single-consumer rings between two threads of one process.

mod areas;
mod barrier;
#[cfg(test)]
mod both_sides;
pub mod chain;
pub mod device;
mod double;
pub mod driver;
mod error;
mod inflight;
mod layout;
pub mod packed;
pub mod prefetch;
mod queue;
pub mod split;
pub mod spsc;
mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod vector;

pub use areas::Areas;
pub use error::RingError;
pub use inflight::Inflight;
pub use layout::Layout;
