//! Patterns in device memory.

use std::sync::Arc;

use crate::cuda::driver::Context;
use crate::cuda::memory::Allocation;
use crate::layout::TrieView;
use crate::trie::Trie;

/// A copy of a trie.
#[derive(Debug)]
pub(crate) struct DeviceTrie {
    pub(crate) of: Arc<Trie>,
    edges: Allocation,
    links: Allocation,
    first: Allocation,
    pairs: Allocation,
}

impl DeviceTrie {
    pub(crate) fn new(context: &Arc<Context>, of: &Arc<Trie>) -> Result<Self, String> {
        fn copied<T: Copy>(context: &Arc<Context>, table: &[T]) -> Result<Allocation, String> {
            // SAFETY: the table is a slice of plain numbers.
            unsafe { Allocation::copy(context, "the patterns", table.as_ptr(), table.len()) }
        }
        let tables = of.tables();
        Ok(Self {
            of: Arc::clone(of),
            edges: copied(context, tables.edges)?,
            links: copied(context, tables.links)?,
            first: copied(context, tables.first)?,
            pairs: copied(context, tables.pairs)?,
        })
    }

    /// Returns the device addresses of the copy, valid as long as `self`.
    pub(crate) fn view(&self) -> TrieView {
        TrieView {
            edges: self.edges.at(),
            links: self.links.at(),
            first: self.first.at(),
            pairs: self.pairs.at(),
            ..self.of.view()
        }
    }
}
