//! The kernels on a thread of the host: `kernels/bodies.h`, built by the host's C++ compiler.
//!
//! One thread does the work of a block of GPU threads. If there was no C++ compiler when this crate was built, only
//! [`BUILT`] is available.

/// Whether this build has the kernels for the host.
pub const BUILT: bool = cfg!(host_kernels);

/// Packets per block when several blocks share a burst: a burst of n packets takes n / `SHARE` blocks, rounded up.
pub const SHARE: usize = 256;

#[cfg(all(host_kernels, any(test, feature = "test-switches")))]
pub use host::match_part;
#[cfg(host_kernels)]
pub use host::{graph_node, persistent, share};

#[cfg(host_kernels)]
mod host {
    use std::num::NonZeroU32;
    use std::sync::atomic::AtomicU64;

    use crate::layout::PipelineView;
    #[cfg(any(test, feature = "test-switches"))]
    use crate::layout::TrieView;

    // In kernels/host.cpp.
    unsafe extern "C" {
        fn og_host_share(
            pipeline: *const PipelineView,
            threads: u32,
            slot: u32,
            lap: u32,
            block: u32,
            blocks: u32,
            tally: *mut u64,
        ) -> u32;
        fn og_host_persistent(
            pipeline: *const PipelineView,
            threads: u32,
            first: u32,
            step: u32,
            from_turn: u64,
        );
        fn og_host_graph_node(pipeline: *const PipelineView, threads: u32, slot: u32, lap: u32) -> u32;
        #[cfg(any(test, feature = "test-switches"))]
        fn og_host_match_part(
            trie: *const TrieView,
            bytes: *const u8,
            len: u32,
            part: u32,
            parts: u32,
            reads: *mut u64,
        ) -> u32;
    }

    /// Processes the share of block `block` of `blocks` in the burst in `slot`: every `blocks`th group of
    /// [`SHARE`](super::SHARE) packets. The last block to finish answers the burst. The blocks share `tally`, which is
    /// 0 before the first block and after the last. If the slot's lap is not `lap`, or at a
    /// [`QUIT`](crate::layout::QUIT), it does nothing and returns `false`.
    ///
    /// # Safety
    /// `pipeline` must describe memory that stays valid until this returns: the chunks of the pool, and as much staging
    /// memory if that is not null; slots and answers, with strides of at least 8 bytes and a count that is a power of
    /// two; the trie's tables, with an empty entry among the edges, if the work is
    /// [`Kind::Match`](crate::layout::Kind::Match) and `states` is not 0. Until the burst is answered no other party
    /// may write its slot, access its packets' bytes, staged or not, or access its answer, except to read the answer's
    /// lap. Each of 0..`blocks` must be passed as `block` once per burst.
    pub unsafe fn share(
        pipeline: &PipelineView,
        threads: NonZeroU32,
        slot: u32,
        lap: u32,
        block: u32,
        blocks: u32,
        tally: &AtomicU64,
    ) -> bool {
        // SAFETY: `PipelineView` has the layout of `og_pipeline`, which both sides assert, and both access the tally
        // atomically. The caller guarantees that the memory of the view is valid and exclusive.
        unsafe { og_host_share(pipeline, threads.get(), slot, lap, block, blocks, tally.as_ptr()) != 0 }
    }

    /// Serves bursts as they arrive: turn `from_turn` + `first`, and every `step`th turn after it. Returns at a
    /// [`QUIT`](crate::layout::QUIT). Between bursts the thread spins, then yields, then sleeps.
    ///
    /// # Safety
    /// As for [`share`], for every burst until this returns.
    pub unsafe fn persistent(
        pipeline: &PipelineView,
        threads: NonZeroU32,
        first: u32,
        step: NonZeroU32,
        from_turn: u64,
    ) {
        // SAFETY: `PipelineView` has the layout of `og_pipeline`. The caller guarantees that the memory of the view is
        // valid and exclusive.
        unsafe { og_host_persistent(pipeline, threads.get(), first, step.get(), from_turn) }
    }

    /// Waits until the lap of `slot` is `lap`, then processes and answers its burst. Returns `false` at a
    /// [`QUIT`](crate::layout::QUIT).
    ///
    /// # Safety
    /// As for [`share`], from the arrival of the burst.
    pub unsafe fn graph_node(pipeline: &PipelineView, threads: NonZeroU32, slot: u32, lap: u32) -> bool {
        // SAFETY: `PipelineView` has the layout of `og_pipeline`. The caller guarantees that the memory of the view is
        // valid and exclusive.
        unsafe { og_host_graph_node(pipeline, threads.get(), slot, lap) != 0 }
    }

    /// For tests: returns the number of the lowest pattern that starts in part `part` of `parts` of a payload, and the
    /// number of edges read.
    ///
    /// # Safety
    /// `trie` must have the addresses of the tables of a trie that stays until this returns.
    #[cfg(any(test, feature = "test-switches"))]
    pub unsafe fn match_part(trie: &TrieView, payload: &[u8], part: u32, parts: u32) -> (Option<u32>, u64) {
        let mut reads = 0;
        // A payload is shorter than 64 KiB.
        let len = payload.len() as u32;
        // SAFETY: `TrieView` has the layout of `og_trie`, and the payload has `len` bytes. The tables are valid, as the
        // caller guarantees.
        let lowest = unsafe { og_host_match_part(trie, payload.as_ptr(), len, part, parts, &raw mut reads) };
        (Some(lowest).filter(|lowest| *lowest != u32::MAX), reads)
    }
}
