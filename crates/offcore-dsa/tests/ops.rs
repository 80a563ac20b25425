//! Operations: their results do not depend on the executor.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "ops/on_core.rs"]
mod on_core;
#[path = "ops/on_simulator.rs"]
mod on_simulator;

use offcore_dsa::ops::{Destination, Engine, Operation, Source};

/// Copies `src` to `dst` and returns the outcome.
fn copy(engine: &mut Engine, src: &[u8], dst: &mut [u8]) -> offcore_dsa::ops::Done {
    engine.run(Operation::Copy { src: src.into(), dst: dst.into() }).unwrap()
}

/// Returns a copy of memory that the caller does not use otherwise until the operation has ended.
fn unbounded(src: *const u8, dst: *mut u8, len: usize) -> Operation<'static> {
    // SAFETY: the tests' buffers outlive their engines, and are not accessed before the operation has ended.
    unsafe { Operation::Copy { src: Source::new(src, len), dst: Destination::new(dst, len) } }
}
