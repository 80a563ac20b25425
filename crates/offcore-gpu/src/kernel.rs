//! What kernels do with bursts, by a thread of the host: `kernels/bodies.h`, built by the host's C++ compiler.
//!
//! One thread does the work of a group of lanes, which is a block of threads on a GPU. Where no C++ compiler was there
//! when this crate was built, only [`BUILT`] is here.

/// Whether this build has the kernels for the host.
pub const BUILT: bool = cfg!(host_kernels);

/// Packets of one block where several work on a burst: a burst of n packets takes n / `SHARE` blocks, rounded up.
pub const SHARE: usize = 256;

#[cfg(host_kernels)]
pub use host::{burst, graph_node, persistent, share};

#[cfg(host_kernels)]
mod host {
    use std::num::NonZeroU32;
    use std::sync::atomic::AtomicU32;

    use crate::layout::PipelineView;

    // In kernels/host.cpp.
    unsafe extern "C" {
        fn og_host_burst(pipeline: *const PipelineView, lanes: u32, slot: u32, lap: u32) -> u32;
        fn og_host_share(
            pipeline: *const PipelineView,
            lanes: u32,
            slot: u32,
            lap: u32,
            block: u32,
            blocks: u32,
            tally: *mut u32,
        ) -> u32;
        fn og_host_persistent(
            pipeline: *const PipelineView,
            lanes: u32,
            first: u32,
            step: u32,
            from_turn: u64,
        );
        fn og_host_graph_node(pipeline: *const PipelineView, lanes: u32, slot: u32, lap: u32) -> u32;
    }

    /// Works on the burst in `slot` and answers it, if its lap is `lap` and it is no [`QUIT`](crate::layout::QUIT).
    /// Otherwise nothing happens, and `false` comes back.
    ///
    /// # Safety
    /// `pipeline` describes memory that is there until this returns: the chunks of the pool, and as much staging memory
    /// if that is not null; slots and answers, their strides at least the heads' 8 bytes, their number a power of two
    /// and not 0; the trie's tables, with an empty entry among the edges, if the work is
    /// [`Kind::Match`](crate::layout::Kind::Match) and `states` is not 0. Until the burst is answered nobody else writes
    /// its slot or touches its packets' bytes, staged or not, or its answer, except to read the answer's lap.
    pub unsafe fn burst(pipeline: &PipelineView, lanes: NonZeroU32, slot: u32, lap: u32) -> bool {
        // SAFETY: `PipelineView` has the layout of `og_pipeline` (both sides assert it); the rest is the caller's
        // promise.
        unsafe { og_host_burst(pipeline, lanes.get(), slot, lap) != 0 }
    }

    /// Works on the share of block `block` of `blocks` in the burst in `slot`: on every `blocks`th
    /// [`SHARE`](super::SHARE) packets. The last block that is done answers the burst. Blocks have `tally` in common,
    /// two words that are 0 before the first and again after the last of them. As [`burst`], it wants the burst to be
    /// there.
    ///
    /// # Safety
    /// As for [`burst`]; and each of 0..`blocks` is `block` of one call for a burst.
    pub unsafe fn share(
        pipeline: &PipelineView,
        lanes: NonZeroU32,
        (slot, lap): (u32, u32),
        (block, blocks): (u32, u32),
        tally: &[AtomicU32; 2],
    ) -> bool {
        // SAFETY: as in `burst`. The two words are changed by atomic operations only, there as here.
        unsafe {
            og_host_share(pipeline, lanes.get(), slot, lap, block, blocks, tally.as_ptr().cast_mut().cast())
                != 0
        }
    }

    /// Works on bursts as they come: on those of turns `from_turn` + `first`, and every `step`th from there on. Returns
    /// when one of them is [`QUIT`](crate::layout::QUIT). Between bursts the thread spins, then yields, then sleeps.
    ///
    /// # Safety
    /// As for [`burst`], for every burst until this returns.
    pub unsafe fn persistent(
        pipeline: &PipelineView,
        lanes: NonZeroU32,
        first: u32,
        step: NonZeroU32,
        from_turn: u64,
    ) {
        // SAFETY: as in `burst`.
        unsafe { og_host_persistent(pipeline, lanes.get(), first, step.get(), from_turn) }
    }

    /// Waits until the lap of `slot` is `lap`, then works on its burst and answers it. `false`: it was
    /// [`QUIT`](crate::layout::QUIT).
    ///
    /// # Safety
    /// As for [`burst`], from when the burst is there.
    pub unsafe fn graph_node(pipeline: &PipelineView, lanes: NonZeroU32, slot: u32, lap: u32) -> bool {
        // SAFETY: as in `burst`.
        unsafe { og_host_graph_node(pipeline, lanes.get(), slot, lap) != 0 }
    }
}
