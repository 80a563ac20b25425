//! Maps a position of a stream to a block and an offset in it.
//!
//! A position is an offset in the stream of bytes, starting at 0. It is in the small ring exactly if it is below `p0`:
//! byte `position % 4096` of the small block. From `p0` on it is byte `position % 65536` of the large block in entry
//! `position / 65536 % 256` of the table. Both sides compute it from the same three words of the slot.

/// Length of a small block, and of a page, in bytes.
pub const SMALL: usize = 4096;
/// Length of a large block in bytes.
pub const LARGE: usize = 1 << LARGE_SHIFT;
/// Number of entries for large blocks in a FIFO's table.
pub const TABLE: usize = 256;
/// Capacity of a FIFO in bytes: one block less than the table has entries, because a range that begins inside a block
/// uses one more.
pub const CAPACITY: usize = (TABLE - 1) * LARGE;
/// The `p0` of a FIFO without large blocks: every position is below it.
pub const NEVER: u64 = u64::MAX;

const LARGE_SHIFT: u32 = 16;

/// Returns the number of the large block that contains `position`. Its entry in the table is this number modulo
/// [`TABLE`].
#[inline(always)]
pub(crate) fn block_number(position: u64) -> u64 {
    position >> LARGE_SHIFT
}

/// Returns the table entry of the large block with this number.
#[inline(always)]
pub(crate) fn entry(number: u64) -> usize {
    number as usize % TABLE
}

/// Contiguous bytes of a stream in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Entry of the table. `None` is the small block.
    pub(crate) entry: Option<usize>,
    /// Offset of the first byte in the block.
    pub(crate) offset: usize,
    /// Number of bytes, at least 1. `offset + len` is at most the block's length.
    pub(crate) len: usize,
}

/// The runs of a range, in order. A range of up to 64 KiB has up to two runs, or up to four if `p0` is inside.
#[derive(Clone, Debug)]
pub(crate) struct Runs {
    position: u64,
    left: usize,
    p0: u64,
}

impl Runs {
    /// Returns the runs of `len` bytes from `position` on.
    #[inline(always)]
    pub(crate) fn new(position: u64, len: usize, p0: u64) -> Self {
        Self { position, left: len, p0 }
    }
}

impl Iterator for Runs {
    type Item = Run;

    #[inline(always)]
    fn next(&mut self) -> Option<Run> {
        if self.left == 0 {
            return None;
        }
        let run = if self.position < self.p0 {
            let offset = self.position as usize % SMALL;
            let below = usize::try_from(self.p0 - self.position).unwrap_or(usize::MAX);
            Run { entry: None, offset, len: self.left.min(SMALL - offset).min(below) }
        } else {
            let offset = self.position as usize % LARGE;
            let entry = entry(block_number(self.position));
            Run { entry: Some(entry), offset, len: self.left.min(LARGE - offset) }
        };
        self.left -= run.len;
        // The application's side uses values from shared memory: nonsense may wrap, but must not panic.
        self.position = self.position.wrapping_add(run.len as u64);
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(position: u64, len: usize, p0: u64) -> Vec<(Option<usize>, usize, usize)> {
        Runs::new(position, len, p0).map(|run| (run.entry, run.offset, run.len)).collect()
    }

    #[test]
    fn ranges_split_at_block_boundaries() {
        assert_eq!(runs(0, 0, 0), []);
        assert_eq!(runs(4000, 200, NEVER), [(None, 4000, 96), (None, 0, 104)]);
        assert_eq!(runs(65_000, 65_536, 0), [(Some(0), 65_000, 536), (Some(1), 0, 65_000)]);
        assert_eq!(runs((256 << 16) + 5, 1, 7), [(Some(0), 5, 1)]);
        let across = [(None, 4090, 6), (None, 0, 10), (Some(1), 10, 65_526), (Some(2), 0, 4)];
        assert_eq!(runs(65_536 - 6, 65_546, 65_536 + 10), across);
    }

    #[test]
    fn positions_wrap_at_u64_max() {
        assert_eq!(Runs::new(u64::MAX, CAPACITY, 3).map(|run| run.len).sum::<usize>(), CAPACITY);
    }

    /// Returns positions around the edges of blocks, tables, and numbers.
    fn edges(around: u64) -> impl Iterator<Item = u64> {
        let (small, large, lap) = (SMALL as u64, LARGE as u64, (LARGE * TABLE) as u64);
        [0, small, large, 2 * large, lap - large, lap, 1 << 32, 1 << 63, NEVER - lap, NEVER]
            .into_iter()
            .flat_map(move |edge| {
                (0..=2 * around).map(move |more| edge.wrapping_sub(around).wrapping_add(more))
            })
    }

    /// Returns the location of one byte.
    fn place(position: u64, p0: u64) -> (Option<usize>, usize) {
        if position < p0 {
            (None, (position % 4096) as usize)
        } else {
            (Some((position / 65_536 % 256) as usize), (position % 65_536) as usize)
        }
    }

    /// Each run is inside one block, and its first and last bytes have the same locations as individual bytes.
    #[test]
    #[cfg_attr(miri, ignore = "takes minutes")]
    fn edge_runs_stay_inside_blocks() {
        for (position, p0) in edges(2).flat_map(|position| edges(1).map(move |p0| (position, p0))) {
            for len in [0, 1, 2, 4095, 4096, 4097, 65_535, 65_536, 65_537, CAPACITY] {
                let mut at = position;
                for run in Runs::new(position, len, p0) {
                    let block = if run.entry.is_some() { LARGE } else { SMALL };
                    assert!(run.len > 0 && run.offset + run.len <= block);
                    assert!(run.entry.is_none_or(|entry| entry < TABLE));
                    let last = at.wrapping_add(run.len as u64 - 1);
                    assert_eq!(place(at, p0), (run.entry, run.offset));
                    assert_eq!(place(last, p0), (run.entry, run.offset + run.len - 1));
                    at = last.wrapping_add(1);
                }
                assert_eq!(at.wrapping_sub(position), len as u64);
            }
        }
    }

    /// Blocks of a full FIFO have different entries.
    #[test]
    #[cfg_attr(miri, ignore = "takes minutes")]
    fn full_fifo_blocks_use_distinct_entries() {
        for position in edges(1).filter(|position| position.checked_add(CAPACITY as u64).is_some()) {
            let mut taken = [false; TABLE];
            let last = block_number(position + CAPACITY as u64 - 1);
            for number in block_number(position)..=last {
                assert!(
                    !std::mem::replace(&mut taken[entry(number)], true),
                    "block {number} from {position}"
                );
            }
        }
    }
}
