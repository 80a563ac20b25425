//! Copy engines.
//!
//! A data path gathers the copies of a whole burst and hands them over in one call; what moves the bytes is an engine.
//!
//! * [`channel`]: what every engine offers: devices, channels, operations, completions,
//! * [`cpu`]: the core itself, fetching ahead across the whole list,
//! * [`core`]: a helper thread on another lcore,
//! * [`copy_queue`]: what everything that copies packets uses: room, copies with what keeps their memory alive, order,
//! * [`mover`]: one worker's channels: chooses who copies, and finishes what an engine could not,
//! * [`share`]: one channel for several workers, by a lock,
//! * [`reorder`]: the ring that keeps that order,
//! * [`cost`]: what submitting and reaping costs, for the benchmark,
//! * `fault`: an engine that misbehaves on purpose, with feature `testing`,
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

pub use channel::{Channel, Completions, CopyOp, Device};
pub use context::Context;
pub use copy_queue::{Batch, Begun, CopyQueue};
pub use mover::{Binding, ChannelId, Mode, Mover, QueueId};
