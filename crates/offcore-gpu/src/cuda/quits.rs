//! A ring that only contains quits, so that kernels that are launched on it end immediately.

use std::ptr::null_mut;
use std::sync::Arc;

use crate::cuda::driver::Context;
use crate::cuda::memory::Allocation;
use crate::layout::{Kind, PipelineView, PoolView, QUIT, RingView, TrieView, WorkView};

/// Length of a slot and of an answer in bytes.
const LINE: usize = 64;

/// The ring, in device memory.
#[derive(Debug)]
pub(crate) struct Quits {
    memory: Allocation,
    slots: u32,
}

impl Quits {
    /// Creates a ring of `slots` slots, each with a quit of the first lap.
    pub(crate) fn new(context: &Arc<Context>, slots: u32) -> Result<Self, String> {
        // Slots, answers, and a zeroed u64 for each slot.
        let mut memory = vec![0u32; slots as usize * (2 * LINE + size_of::<u64>()) / size_of::<u32>()];
        for slot in memory.chunks_exact_mut(LINE / size_of::<u32>()).take(slots as usize) {
            (slot[0], slot[1]) = (1, QUIT);
        }
        // SAFETY: plain numbers of a vector.
        let memory = unsafe { Allocation::copy(context, "a self-test", memory.as_ptr(), memory.len()) }?;
        Ok(Self { memory, slots })
    }

    /// Returns the parameters of kernels, valid as long as `self`.
    pub(crate) fn view(&self) -> PipelineView {
        PipelineView {
            pool: PoolView { base: null_mut(), staging: null_mut(), chunk_shift: 0, chunks: 0 },
            ring: RingView {
                slots: self.memory.at(),
                answers: self.line(self.slots as usize),
                slot_stride: LINE as u32,
                answer_stride: LINE as u32,
                count: self.slots,
                reserved: 0,
            },
            work: WorkView { kind: Kind::Nothing, swap: 0, skip: 0, forced_ns: 0, trie: TrieView::EMPTY },
        }
    }

    /// Returns the words that `og_burst` and `og_graph_node` require, zeroed.
    pub(crate) fn words<T>(&self) -> *mut T {
        self.line(2 * self.slots as usize).cast()
    }

    fn line(&self, index: usize) -> *mut u8 {
        self.memory.at::<u8>().wrapping_add(index * LINE)
    }
}
