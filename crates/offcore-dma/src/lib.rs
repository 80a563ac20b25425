//! Copy engines.
//!
//! A data path collects the copies of a whole burst and submits them in one call. An engine executes them.
//!
//! * [`channel`]: the interface of every engine: devices, channels, operations, completions,
//! * [`cpu`]: the core itself, which prefetches across the whole list,
//! * [`core`]: a helper thread on another lcore,
//! * [`copy_queue`]: the interface for packet copies: room, copies with the holders that keep their memory alive,
//!   order,
//! * [`mover`]: the channels of a worker. It selects core or engine, and completes failed copies,
//! * [`share`]: a channel for several workers, with a lock,
//! * [`reorder`]: the ring that keeps packets in order,
//! * [`cost`]: the cost of submitting and reaping, for the benchmark,
//! * `fault`: an engine that fails on purpose, with feature `testing`,
//! * `conformance`: the test suite that every engine passes, with feature `testing`.

pub mod channel;
#[cfg(any(test, feature = "testing"))]
pub mod conformance;
mod context;
pub mod copy_queue;
pub mod core;
pub mod cost;
pub mod cpu;
#[cfg(any(test, feature = "testing"))]
pub mod fault;
pub mod mover;
pub mod reorder;
pub mod share;

pub use channel::{Channel, Completions, CopyDevice, CopyOp};
pub use context::Context;
pub use copy_queue::{Batch, Begun, CopyQueue};
pub use mover::{Binding, ChannelId, Mode, Mover, QueueId};
