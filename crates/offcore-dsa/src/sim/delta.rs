//! Delta records: the operations Create Delta Record and Apply Delta Record (sections 8.3.8 and 8.3.9).
//!
//! A record is an array of deltas of ten bytes each: the offset of a block in units of 8 bytes, as a 16-bit
//! little-endian number, and the new contents of the 8-byte block.

use crate::completion::Status;

/// Size of a block in bytes. Source and destination addresses and the length are multiples of it.
pub(super) const BLOCK: usize = 8;
/// Size of a delta in bytes.
pub(super) const DELTA: usize = 10;
/// Maximum number of bytes to compare: the number of blocks must fit 16 bits.
pub(super) const MAX_TRANSFER: usize = 0x8_0000;
/// The smallest accepted value of the maximum record size: all deltas of a cache line.
pub(super) const MIN_RECORD: usize = 80;

/// The result of creating a record or a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Created {
    /// Number of record bytes written.
    pub(super) record: usize,
    /// Number of bytes compared: all of them, or the bytes before the first block whose delta did not fit.
    pub(super) compared: usize,
    /// Whether the record contains every difference.
    pub(super) complete: bool,
}

/// Compares `original` with `changed` and writes the deltas that turn `original` into `changed`. `offset` is added to
/// the offsets in the record, so that a comparison can be split into chunks.
///
/// # Panics
///
/// If the slices differ in length, if the length or `offset` is not a multiple of [`BLOCK`], or if a block is beyond
/// [`MAX_TRANSFER`].
pub(super) fn create(original: &[u8], changed: &[u8], offset: usize, record: &mut [u8]) -> Created {
    assert!(original.len() == changed.len() && original.len().is_multiple_of(BLOCK));
    assert!(offset.is_multiple_of(BLOCK) && offset + original.len() <= MAX_TRANSFER);
    let mut written = 0;
    let blocks = original.chunks_exact(BLOCK).zip(changed.chunks_exact(BLOCK));
    for ((before, after), block) in blocks.zip(0..) {
        if before == after {
            continue;
        }
        let Some(delta) = record.get_mut(written..written + DELTA) else {
            return Created { record: written, compared: block * BLOCK, complete: false };
        };
        delta[..2].copy_from_slice(&((offset / BLOCK + block) as u16).to_le_bytes());
        delta[2..].copy_from_slice(after);
        written += DELTA;
    }
    Created { record: written, compared: original.len(), complete: true }
}

/// Applies deltas one after the other and checks their offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Applier {
    transfer_size: usize,
    last: Option<u16>,
}

impl Applier {
    /// Creates an applier for a destination of `transfer_size` bytes.
    pub(super) const fn new(transfer_size: usize) -> Self {
        Self { transfer_size, last: None }
    }

    /// Decodes the next delta: returns the byte offset of its block, and the block.
    ///
    /// # Errors
    ///
    /// [`Status::DELTA_OFFSET`] if the offset is not greater than the previous one; [`Status::DELTA_OFFSET_ORDER`] if
    /// it is beyond the destination.
    pub(super) fn next(&mut self, delta: &[u8; DELTA]) -> Result<(usize, [u8; BLOCK]), Status> {
        let [low, high, block @ ..] = *delta;
        let offset = u16::from_le_bytes([low, high]);
        if self.last.is_some_and(|last| offset <= last) {
            return Err(Status::DELTA_OFFSET);
        }
        let at = usize::from(offset) * BLOCK;
        if at >= self.transfer_size {
            return Err(Status::DELTA_OFFSET_ORDER);
        }
        self.last = Some(offset);
        Ok((at, block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_record_is_written_byte_for_byte() {
        let original = [0; 32];
        let mut changed = original;
        changed[9] = 1;
        changed[24..].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        let mut record = [0xee; 30];
        let created = create(&original, &changed, 0x100 * 8, &mut record);
        assert_eq!(created, Created { record: 20, compared: 32, complete: true });
        let expected = [0x01, 0x01, 0, 1, 0, 0, 0, 0, 0, 0, 0x03, 0x01, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(record[..20], expected);
        assert_eq!(record[20..], [0xee; 10]);
        assert_eq!(
            create(&original, &changed, 0, &mut record[..19]),
            Created { record: 10, compared: 24, complete: false }
        );
        assert_eq!(
            create(&original, &original, 0, &mut []),
            Created { record: 0, compared: 32, complete: true }
        );
    }

    /// Returns the destination after the record is applied, or the status and the number of record bytes before the
    /// invalid delta.
    fn apply(record: &[u8], dst: &[u8]) -> Result<Vec<u8>, (Status, usize)> {
        let (mut dst, mut applier) = (dst.to_vec(), Applier::new(dst.len()));
        for (delta, before) in record.as_chunks::<DELTA>().0.iter().zip(0..) {
            let (at, block) = applier.next(delta).map_err(|status| (status, before * DELTA))?;
            dst[at..at + BLOCK].copy_from_slice(&block);
        }
        Ok(dst)
    }

    #[test]
    fn offsets_are_checked() {
        let delta = |offset: u16| [offset.to_le_bytes().as_slice(), &[7; 8]].concat();
        let record = [delta(0), delta(2), delta(2)].concat();
        assert_eq!(apply(&record, &[0; 32]), Err((Status::DELTA_OFFSET, 20)));
        assert_eq!(apply(&record[..20], &[0; 32]).unwrap(), [[7; 8], [0; 8], [7; 8], [0; 8]].concat());
        assert_eq!(apply(&[delta(3), delta(4)].concat(), &[0; 32]), Err((Status::DELTA_OFFSET_ORDER, 10)));
    }

    proptest! {
        #[test]
        fn created_deltas_apply(
            original in prop::collection::vec(prop::collection::vec(any::<u8>(), 8), 1..200),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<[u8; 8]>()), 0..50),
            cut: prop::sample::Index,
        ) {
            let original = original.concat();
            let mut changed = original.clone();
            for (at, block) in changes {
                let at = at.index(original.len() / BLOCK) * BLOCK;
                changed[at..at + BLOCK].copy_from_slice(&block);
            }
            let mut record = vec![0; original.len() / BLOCK * DELTA];
            let created = create(&original, &changed, 0, &mut record);
            prop_assert!(created.complete);
            prop_assert_eq!(apply(&record[..created.record], &original), Ok(changed.clone()));

            // A comparison in two chunks must produce the same record.
            let cut = cut.index(original.len() / BLOCK + 1) * BLOCK;
            let mut parts = vec![0; record.len()];
            let first = create(&original[..cut], &changed[..cut], 0, &mut parts);
            let second = create(&original[cut..], &changed[cut..], cut, &mut parts[first.record..]);
            prop_assert_eq!(first.record + second.record, created.record);
            prop_assert_eq!(&parts[..created.record], &record[..created.record]);
        }
    }
}
