//! Copies that do not fit the ring, submitted one descriptor at a time: the rest of a copy after a page fault, and the
//! parts of a copy that is longer than a descriptor allows.

use arrayvec::ArrayVec;
use offcore_dma::channel::{CopyOp, Failed, Failure};

use super::outcome::Outcome;
use crate::completion::CompletionRecord;

/// Maximum number of descriptors outside the ring.
pub(super) const PIECES: usize = 32;
/// Number of times that a rest is submitted again after page faults.
const TRIES: u8 = 2;

/// A part of a copy that fits a descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// The bytes not yet copied.
    pub(super) rest: CopyOp,
    owner: Owner,
    /// Offset of the rest in the owner's copy.
    from: u32,
    tries: u8,
    pub(super) record: usize,
    pub(super) in_flight: bool,
}

#[derive(Clone, Copy, Debug)]
enum Owner {
    /// A copy with a single piece.
    Whole(CopyOp),
    /// A long copy, by its index in the list.
    Part(usize),
}

/// A copy longer than a descriptor allows.
#[derive(Clone, Copy, Debug)]
struct Long {
    copy: CopyOp,
    /// Number of bytes for which pieces have been created.
    issued: u32,
    pieces: usize,
    failed: Option<(Failure, u32)>,
}

/// Copies that have ended, until the next poll reports them.
#[derive(Debug, Default)]
pub(super) struct Ended {
    pub(super) done: Vec<CopyOp>,
    pub(super) failed: Vec<Failed>,
}

#[derive(Debug)]
pub(super) struct Side {
    pub(super) pieces: ArrayVec<Piece, PIECES>,
    pub(super) records: Box<[CompletionRecord]>,
    free_records: ArrayVec<usize, PIECES>,
    long: Vec<Option<Long>>,
    longs: usize,
    max_transfer: u32,
}

impl Side {
    pub(super) fn new(max_transfer: u32) -> Self {
        Self {
            pieces: ArrayVec::new(),
            records: (0..PIECES).map(|_| CompletionRecord::default()).collect(),
            free_records: (0..PIECES).collect(),
            long: Vec::new(),
            longs: 0,
            max_transfer,
        }
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.longs == 0
    }

    /// Adds a copy that is longer than a descriptor allows.
    pub(super) fn add_long(&mut self, copy: CopyOp) {
        let long = Some(Long { copy, issued: 0, pieces: 0, failed: None });
        match self.long.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = long,
            None => self.long.push(long),
        }
        self.longs += 1;
    }

    /// Adds a copy that met a page fault, so that the rest is done. Without a free record, the copy ends with a
    /// failure.
    pub(super) fn resume(&mut self, copy: CopyOp, outcome: Outcome, ended: &mut Ended) {
        let piece = Piece {
            rest: copy,
            owner: Owner::Whole(copy),
            from: 0,
            tries: 0,
            record: usize::MAX,
            in_flight: false,
        };
        self.settle(piece, outcome, ended);
    }

    /// Creates pieces of the long copies, limited by the free records.
    pub(super) fn issue(&mut self) {
        if self.longs == 0 {
            return;
        }
        for (index, place) in self.long.iter_mut().enumerate() {
            let Some(long) = place else { continue };
            while long.issued < long.copy.len {
                let Some(record) = self.free_records.pop() else { return };
                let len = (long.copy.len - long.issued).min(self.max_transfer);
                self.records[record].clear();
                self.pieces.push(Piece {
                    rest: part(&long.copy, long.issued, len),
                    owner: Owner::Part(index),
                    from: long.issued,
                    tries: 0,
                    record,
                    in_flight: false,
                });
                long.issued += len;
                long.pieces += 1;
            }
        }
    }

    /// Handles the end of a piece: continues with the rest, or records the outcome of its copy.
    pub(super) fn settle(&mut self, mut piece: Piece, outcome: Outcome, ended: &mut Ended) {
        let given_up = match outcome {
            Outcome::Done => None,
            Outcome::Failed(failure) => Some(failure),
            Outcome::Partial { bytes, backwards } => {
                if backwards {
                    // The last bytes are done. They are not counted: if the rest fails as well, the core copies
                    // everything from `from` on, including these bytes. Source and destination do not overlap, so the
                    // source is unchanged.
                    piece.rest = part(&piece.rest, 0, piece.rest.len - bytes);
                } else {
                    piece.rest = part(&piece.rest, bytes, piece.rest.len - bytes);
                    piece.from += bytes;
                }
                piece.tries += 1;
                if piece.tries <= TRIES && self.keep(piece) {
                    return;
                }
                Some(Failure::PageFault)
            }
        };
        self.release(piece.record);
        let failed = given_up.map(|failure| (failure, piece.from));
        match piece.owner {
            Owner::Whole(copy) => end(copy, failed, ended),
            Owner::Part(index) => self.end_part(index, failed, ended),
        }
    }

    /// Keeps a piece for another submission; returns `false` if no record is free.
    fn keep(&mut self, mut piece: Piece) -> bool {
        if piece.record == usize::MAX {
            let Some(record) = self.free_records.pop() else { return false };
            piece.record = record;
        }
        self.records[piece.record].clear();
        piece.in_flight = false;
        self.pieces.push(piece);
        true
    }

    fn release(&mut self, record: usize) {
        if record != usize::MAX {
            self.free_records.push(record);
        }
    }

    fn end_part(&mut self, index: usize, failed: Option<(Failure, u32)>, ended: &mut Ended) {
        let Some(long) = self.long[index].as_mut() else { return };
        long.pieces -= 1;
        // The core starts at the first missing byte, so the failed part with the lowest offset counts.
        if let Some((failure, done)) = failed
            && long.failed.is_none_or(|(_, first)| done < first)
        {
            long.failed = Some((failure, done));
        }
        if long.failed.is_some() {
            // No more pieces are created: the core copies the rest.
            long.issued = long.copy.len;
        }
        if long.pieces == 0 && long.issued == long.copy.len {
            let Long { copy, failed, .. } = *long;
            self.long[index] = None;
            self.longs -= 1;
            end(copy, failed, ended);
        }
    }

    /// Returns the copies that this list holds.
    pub(super) fn copies(&self) -> impl Iterator<Item = CopyOp> {
        let whole = self.pieces.iter().filter_map(|piece| match piece.owner {
            Owner::Whole(copy) => Some(copy),
            Owner::Part(_) => None,
        });
        whole.chain(self.long.iter().flatten().map(|long| long.copy))
    }

    /// Removes all pieces and copies. The device must no longer access their memory.
    pub(super) fn clear(&mut self) {
        self.free_records.extend(self.pieces.drain(..).map(|piece| piece.record));
        self.long.clear();
        self.longs = 0;
    }
}

fn end(copy: CopyOp, failed: Option<(Failure, u32)>, ended: &mut Ended) {
    match failed {
        None => ended.done.push(copy),
        Some((failure, done)) => ended.failed.push(Failed { copy, failure, done }),
    }
}

/// Returns `len` bytes of a copy, from offset `at` on.
fn part(copy: &CopyOp, at: u32, len: u32) -> CopyOp {
    let (src, dst) = (copy.src.wrapping_add(at as usize), copy.dst.wrapping_add(at as usize));
    CopyOp { src, dst, len, ..*copy }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(len: u32) -> CopyOp {
        let (src, dst) = (std::ptr::without_provenance(0x1000), std::ptr::without_provenance_mut(0x9000));
        CopyOp { src, dst, len, token: 7 }
    }

    fn fields(copy: &CopyOp) -> (usize, usize, u32) {
        (copy.src.addr(), copy.dst.addr(), copy.len)
    }

    #[test]
    fn a_rest_is_resumed_in_either_direction() {
        let (mut side, mut ended) = (Side::new(1 << 20), Ended::default());
        side.resume(copy(100), Outcome::Partial { bytes: 30, backwards: false }, &mut ended);
        let piece = side.pieces.pop().unwrap();
        assert_eq!(fields(&piece.rest), (0x101e, 0x901e, 70), "forwards: addresses move");
        side.settle(piece, Outcome::Partial { bytes: 20, backwards: true }, &mut ended);
        let piece = side.pieces.pop().unwrap();
        assert_eq!(fields(&piece.rest), (0x101e, 0x901e, 50), "backwards: only the size shrinks");
        side.settle(piece, Outcome::Done, &mut ended);
        assert_eq!(fields(&ended.done[0]), (0x1000, 0x9000, 100), "reported as it was asked for");
        assert!(side.is_empty() && side.free_records.len() == PIECES);
    }

    #[test]
    fn repeated_faults_fail_the_copy() {
        let (mut side, mut ended) = (Side::new(1 << 20), Ended::default());
        side.resume(copy(100), Outcome::Partial { bytes: 10, backwards: false }, &mut ended);
        for bytes in [5, 0] {
            let piece = side.pieces.pop().unwrap();
            side.settle(piece, Outcome::Partial { bytes, backwards: false }, &mut ended);
        }
        assert!(side.is_empty());
        let failed = ended.failed[0];
        assert_eq!((failed.failure, failed.done, failed.copy.len), (Failure::PageFault, 15, 100));
    }

    #[test]
    fn bytes_done_from_the_end_are_not_counted() {
        let (mut side, mut ended) = (Side::new(1 << 20), Ended::default());
        side.resume(copy(100), Outcome::Partial { bytes: 60, backwards: true }, &mut ended);
        let piece = side.pieces.pop().unwrap();
        side.settle(piece, Outcome::Failed(Failure::Hardware), &mut ended);
        assert_eq!((ended.failed[0].failure, ended.failed[0].done), (Failure::Hardware, 0));
    }

    #[test]
    fn long_copy_fails_from_its_first_gap() {
        let (mut side, mut ended) = (Side::new(64), Ended::default());
        for fails in [false, true] {
            side.add_long(copy(64 * 3 + 10));
            side.issue();
            let mut pieces: Vec<Piece> = side.pieces.drain(..).collect();
            assert_eq!(pieces.iter().map(|p| p.rest.len).collect::<Vec<_>>(), [64, 64, 64, 10]);
            assert!(pieces.iter().zip(0..).all(|(p, i)| fields(&p.rest).0 == 0x1000 + 64 * i));
            pieces.rotate_left(2);
            for (i, piece) in pieces.into_iter().enumerate() {
                assert_eq!((ended.done.len(), ended.failed.len()), (usize::from(fails), 0));
                // The parts at the offsets 192 and 64 fail.
                let outcome =
                    if fails && i % 2 == 1 { Outcome::Failed(Failure::Hardware) } else { Outcome::Done };
                side.settle(piece, outcome, &mut ended);
            }
            assert!(side.is_empty() && side.free_records.len() == PIECES);
        }
        assert_eq!(ended.done.len(), 1);
        assert_eq!((ended.failed[0].copy.len, ended.failed[0].done), (202, 64));
    }

    #[test]
    fn parts_wait_for_free_records() {
        let (mut side, mut ended) = (Side::new(16), Ended::default());
        side.add_long(copy(16 * 100));
        let mut parts = 0;
        while !side.is_empty() {
            side.issue();
            let piece = side.pieces.remove(0);
            side.settle(piece, Outcome::Done, &mut ended);
            parts += 1;
        }
        assert_eq!((parts, ended.done.len()), (100, 1));
    }
}
