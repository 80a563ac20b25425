//! The memory of an application's FIFOs, of which there may be less than connections want.
//!
//! A few blocks are kept for what applications can read next, so that those who read give memory back whatever others hold.
//! The last quarter is for who needs it now.

use std::sync::Arc;

use offcore_mem::mapping::MemoryError;
use offcore_session::layout::LARGE;
use offcore_session::{Arena, Charge};

/// Blocks that are kept, at most, and what part of all.
const RESERVE: usize = 64;
const RESERVE_SHARE: usize = 8;
/// What part of the memory has to be free for what may never be of use.
const PLENTY: usize = 4;
/// The share of the memory that is left when slow peers get less: 1/8.
const SCARCE: usize = 8;

/// Memory for the FIFOs of an application of another process, at most so many bytes.
#[derive(Debug)]
pub struct AppMemory(pub(super) Arena);

impl AppMemory {
    /// Maps the first 64 MiB of it, or all. The kernel allocates pages as they are used, which `charge` counts.
    ///
    /// # Errors
    /// When there is not as much memory, or the budget of `charge` is used up.
    pub fn new(memory: usize, charge: Arc<Charge>) -> Result<Self, MemoryError> {
        Ok(Self(reserved(Arena::shared(memory, charge)?, memory)))
    }
}

/// The same for this process.
pub(super) fn arena(memory: usize) -> Result<Arena, MemoryError> {
    Ok(reserved(Arena::new(memory)?, memory))
}

fn reserved(mut arena: Arena, memory: usize) -> Arena {
    arena.reserve(RESERVE.min(memory / LARGE / RESERVE_SHARE));
    arena
}

/// Whether there is memory for what may never be of use: a quarter of all, and what is left of the limit counts. Before more of
/// that is [mapped](is_low) what there is is for who needs it now.
pub(super) fn has_plenty(arena: &Arena) -> bool {
    let (len, limit) = arena.len_and_limit();
    unpromised(arena) * LARGE + (limit - len) >= limit / PLENTY && !is_low(arena)
}

/// Returns whether at most an eighth of the limit is free, and neither promised nor of the reserve.
pub(super) fn is_scarce(arena: &Arena) -> bool {
    let (len, limit) = arena.len_and_limit();
    arena.spare() * LARGE + (limit - len) <= limit / SCARCE
}

/// Returns whether less than an eighth of the mapped memory is free and not promised: some milliseconds' work, and the time to map
/// more.
#[inline]
pub(super) fn is_low(arena: &Arena) -> bool {
    let (len, _) = arena.len_and_limit();
    unpromised(arena) < len / LARGE / 8
}

/// Large blocks that are free and that no window promises.
#[inline]
fn unpromised(arena: &Arena) -> usize {
    arena.free().large.saturating_sub(arena.promised())
}
