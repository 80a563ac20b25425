//! Copies that do not fit the ring, submitted one descriptor at a time: the rest of a copy after a page fault, and the
//! parts of a copy that is longer than a descriptor allows.

use arrayvec::ArrayVec;
use offcore_dma::channel::{Completions, CopyOp, Failed, Failure, Ledger};

use super::entries::Entries;
use super::outcome::{Outcome, outcome};
use super::ring::Format;
use crate::completion::CompletionRecord;
use crate::portal::{Portal, SubmitResult};

/// Maximum number of descriptors outside the ring.
const PIECES: usize = 32;
/// Number of times that a rest is submitted again after page faults.
const TRIES: u8 = 2;

/// A part of a copy that fits a descriptor.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// The bytes not yet copied.
    rest: CopyOp,
    owner: Owner,
    /// Offset of the rest in the owner's copy.
    from: u32,
    tries: u8,
    record: usize,
    in_flight: bool,
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

/// The copies outside the ring.
#[derive(Debug)]
pub(super) struct Side {
    pieces: ArrayVec<Piece, PIECES>,
    records: Box<[CompletionRecord]>,
    free_records: ArrayVec<usize, PIECES>,
    long: Vec<Option<Long>>,
    longs: usize,
    max_transfer: u32,
    /// Number of copies outside the ring that are not reported yet.
    unreported: usize,
    /// Copies that have ended, until the next poll reports them.
    done: Vec<CopyOp>,
    failed: Vec<Failed>,
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
            unreported: 0,
            done: Vec::new(),
            failed: Vec::new(),
        }
    }

    /// Returns the number of copies outside the ring that are not reported yet.
    #[inline(always)]
    pub(super) fn unreported(&self) -> usize {
        self.unreported
    }

    /// Whether any copy has bytes that are not copied yet.
    #[inline(always)]
    pub(super) fn has_work(&self) -> bool {
        !self.pieces.is_empty() || self.longs != 0
    }

    /// Accepts a copy that is empty or longer than a descriptor allows.
    #[cold]
    pub(super) fn add(&mut self, copy: CopyOp) {
        self.unreported += 1;
        if copy.len == 0 {
            self.done.push(copy);
            return;
        }
        let long = Some(Long { copy, issued: 0, pieces: 0, failed: None });
        match self.long.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = long,
            None => self.long.push(long),
        }
        self.longs += 1;
    }

    /// Takes over a copy from the ring that did not complete in the usual way. After a page fault, the rest is
    /// submitted again. Without a free record, the copy ends with a failure.
    #[cold]
    pub(super) fn take_over(&mut self, copy: CopyOp, outcome: Outcome) {
        self.unreported += 1;
        let (owner, record) = (Owner::Whole(copy), usize::MAX);
        self.settle(Piece { rest: copy, owner, from: 0, tries: 0, record, in_flight: false }, outcome);
    }

    /// Creates pieces of long copies. Returns whether any piece waits for submission.
    #[cold]
    pub(super) fn prepare(&mut self) -> bool {
        self.issue();
        self.pieces.iter().any(|piece| !piece.in_flight)
    }

    /// Submits the waiting pieces, up to the number of free entries.
    ///
    /// # Safety
    /// The buffers of the copies stay valid until the copies are completed.
    #[cold]
    pub(super) unsafe fn submit(&mut self, portal: &mut Portal, entries: &mut Entries, format: Format) {
        for piece in self.pieces.iter_mut().filter(|piece| !piece.in_flight) {
            let descriptor = format.describe(&piece.rest, &self.records[piece.record]);
            // SAFETY: a piece is a part of a copy, whose buffers the caller keeps valid until it is completed.
            if entries.is_full() || unsafe { portal.submit(&descriptor) } == SubmitResult::Retry {
                break;
            }
            piece.in_flight = true;
            entries.take(1);
        }
    }

    /// Handles completed pieces, and releases their entries.
    #[cold]
    pub(super) fn reap(&mut self, entries: &mut Entries) {
        let mut at = 0;
        while at < self.pieces.len() {
            let piece = self.pieces[at];
            match self.records[piece.record].read() {
                Some(completed) if piece.in_flight => {
                    entries.release(1);
                    let piece = self.pieces.swap_remove(at);
                    self.settle(piece, outcome(&completed, piece.rest.len));
                }
                _ => at += 1,
            }
        }
    }

    /// Moves ended copies to the list of completions, up to its capacity. Returns their number.
    #[cold]
    pub(super) fn report(&mut self, completions: &mut Completions, ledger: &mut Ledger) -> usize {
        let before = self.unreported;
        while let Some(copy) = self.done.last()
            && completions.tokens.try_push(copy.token).is_ok()
        {
            self.done.pop();
            self.unreported -= 1;
        }
        while let Some(&failed) = self.failed.last()
            && completions.failed.try_push(failed).is_ok()
        {
            self.failed.pop();
            ledger.fail([&failed.copy]);
            self.unreported -= 1;
        }
        before - self.unreported
    }

    /// Creates pieces of the long copies, limited by the free records.
    fn issue(&mut self) {
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
    fn settle(&mut self, mut piece: Piece, outcome: Outcome) {
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
            Owner::Whole(copy) => self.end(copy, failed),
            Owner::Part(index) => self.end_part(index, failed),
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

    fn end_part(&mut self, index: usize, failed: Option<(Failure, u32)>) {
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
            self.end(copy, failed);
        }
    }

    fn end(&mut self, copy: CopyOp, failed: Option<(Failure, u32)>) {
        match failed {
            None => self.done.push(copy),
            Some((failure, done)) => self.failed.push(Failed { copy, failure, done }),
        }
    }

    /// Returns the unreported copies.
    pub(super) fn copies(&self) -> impl Iterator<Item = CopyOp> {
        let whole = self.pieces.iter().filter_map(|piece| match piece.owner {
            Owner::Whole(copy) => Some(copy),
            Owner::Part(_) => None,
        });
        let long = self.long.iter().flatten().map(|long| long.copy);
        let failed = self.failed.iter().map(|failed| failed.copy);
        whole.chain(long).chain(self.done.iter().copied()).chain(failed)
    }

    /// Forgets all copies. The device must no longer access their memory.
    pub(super) fn clear(&mut self) {
        self.free_records.extend(self.pieces.drain(..).map(|piece| piece.record));
        self.long.clear();
        self.done.clear();
        self.failed.clear();
        (self.longs, self.unreported) = (0, 0);
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
    fn bytes_done_from_the_end_are_not_counted() {
        let mut side = Side::new(1 << 20);
        side.take_over(copy(100), Outcome::Partial { bytes: 60, backwards: true });
        let piece = side.pieces.pop().unwrap();
        side.settle(piece, Outcome::Failed(Failure::Hardware));
        assert_eq!((side.failed[0].failure, side.failed[0].done), (Failure::Hardware, 0));
    }

    #[test]
    fn long_copy_fails_from_its_first_gap() {
        let mut side = Side::new(64);
        for fails in [false, true] {
            side.add(copy(64 * 3 + 10));
            side.issue();
            let mut pieces: Vec<Piece> = side.pieces.drain(..).collect();
            assert_eq!(pieces.iter().map(|p| p.rest.len).collect::<Vec<_>>(), [64, 64, 64, 10]);
            assert!(pieces.iter().zip(0..).all(|(p, i)| fields(&p.rest).0 == 0x1000 + 64 * i));
            pieces.rotate_left(2);
            for (i, piece) in pieces.into_iter().enumerate() {
                assert_eq!((side.done.len(), side.failed.len()), (usize::from(fails), 0));
                // The parts at the offsets 192 and 64 fail.
                let outcome =
                    if fails && i % 2 == 1 { Outcome::Failed(Failure::Hardware) } else { Outcome::Done };
                side.settle(piece, outcome);
            }
            assert!(!side.has_work() && side.free_records.len() == PIECES);
        }
        assert_eq!(side.done.len(), 1);
        assert_eq!((side.failed[0].copy.len, side.failed[0].done), (202, 64));
    }

    #[test]
    fn parts_wait_for_free_records() {
        let mut side = Side::new(16);
        side.add(copy(16 * 100));
        let mut parts = 0;
        while side.has_work() {
            side.issue();
            let piece = side.pieces.remove(0);
            side.settle(piece, Outcome::Done);
            parts += 1;
        }
        assert_eq!((parts, side.done.len()), (100, 1));
    }
}
