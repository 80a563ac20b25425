//! The atomics of a session's slot: the standard library's, or loom's if a test explores every interleaving
//! (`RUSTFLAGS='--cfg loom' cargo test -p offcore-session --lib loom`).

#[cfg(not(all(loom, test)))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(all(loom, test))]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
