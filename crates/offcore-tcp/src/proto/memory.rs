//! The memory of an application's FIFOs, which may be less than its connections want.
//!
//! A few blocks are reserved for data that applications can read next, so that reading applications free memory
//! regardless of other connections. The last quarter is reserved for immediate needs.

use std::sync::Arc;

use offcore_mem::mapping::MemoryError;
use offcore_session::layout::LARGE;
use offcore_session::{Arena, Charge};

/// The charge in bytes for the private memory of a connection, socket or listener: its state, its entries in tables,
/// and its session in the server.
pub(super) const PRIVATE: usize = 4096;
/// Maximum number of reserved blocks, and their maximum share: one block in `RESERVE_SHARE`.
const RESERVE: usize = 64;
const RESERVE_SHARE: usize = 8;
/// Speculative use requires one part in this many of the memory to be free.
const SPECULATIVE_PART: usize = 4;
/// Slow peers get less memory when only one part in this many is left.
const SCARCE: usize = 8;

/// FIFO memory for an application of another process, with a limit in bytes. The private memory of its connections and
/// sockets is charged, too.
#[derive(Debug)]
pub struct AppMemory {
    pub(super) arena: Arena,
    pub(super) charge: Arc<Charge>,
}

impl AppMemory {
    /// Maps the first 64 MiB, or all if it is less. The kernel allocates pages on first use, which `charge` counts.
    ///
    /// # Errors
    /// Fails if there is not enough memory, or if the budget of `charge` is used up.
    pub fn new(memory: usize, charge: Arc<Charge>) -> Result<Self, MemoryError> {
        let arena = reserved(Arena::shared(memory, Arc::clone(&charge))?, memory);
        Ok(Self { arena, charge })
    }
}

/// Creates the FIFO memory of this process.
pub(super) fn arena(memory: usize) -> Result<Arena, MemoryError> {
    Ok(reserved(Arena::new(memory)?, memory))
}

fn reserved(mut arena: Arena, memory: usize) -> Arena {
    arena.reserve(RESERVE.min(memory / LARGE / RESERVE_SHARE));
    arena
}

/// Returns whether memory may be used speculatively: a quarter of the limit is free, including memory that is not
/// mapped yet. While the mapped memory is [low](is_low), its free blocks are for immediate needs.
pub(super) fn allows_speculative_use(arena: &Arena) -> bool {
    let (len, limit) = arena.len_and_limit();
    unpromised(arena) * LARGE + (limit - len) >= limit / SPECULATIVE_PART && !is_low(arena)
}

/// Returns whether at most an eighth of the limit is free, and neither promised nor reserved.
pub(super) fn is_scarce(arena: &Arena) -> bool {
    let (len, limit) = arena.len_and_limit();
    arena.spare() * LARGE + (limit - len) <= limit / SCARCE
}

/// Returns whether less than an eighth of the mapped memory is free and not promised. This lasts for some milliseconds,
/// the time needed to map more.
#[inline]
pub(super) fn is_low(arena: &Arena) -> bool {
    let (len, _) = arena.len_and_limit();
    unpromised(arena) < len / LARGE / 8
}

/// Returns the number of large blocks that are free and not promised by a window.
#[inline]
fn unpromised(arena: &Arena) -> usize {
    arena.free().large.saturating_sub(arena.promised())
}
