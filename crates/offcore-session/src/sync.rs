//! What a session's slot is made of: the standard library's atomics, or loom's when a test explores every interleaving
//! (`RUSTFLAGS='--cfg loom' cargo test -p offcore-session --lib loom`).

#[cfg(not(all(loom, test)))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(all(loom, test))]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
