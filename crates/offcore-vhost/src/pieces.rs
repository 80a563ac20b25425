//! Copies between two lists of memory pieces whose boundaries need not match.

use arrayvec::ArrayVec;
use offcore_dma::CopyOp;
use offcore_dma::channel::Token;
use offcore_mem::{Packet, Pool};

use crate::features::NET_HEADER;

/// Maximum number of pieces in the chains of one packet. A longer chain breaks its queue.
pub(crate) const MAX_PIECES: usize = 64;

/// A contiguous range of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) addr: *mut u8,
    pub(crate) len: u32,
}

/// Calls `push` with the copies that transfer the bytes of `from`, in order, to `to`. It stops at the end of the
/// shorter list. The number of copies does not exceed the number of pieces in both lists together.
pub(crate) fn copies(from: &[Piece], to: &[Piece], token: Token, mut push: impl FnMut(CopyOp)) {
    let (mut from, mut to) = (from.iter().copied(), to.iter().copied());
    let (mut src, mut dst) = (from.next(), to.next());
    while let (Some(s), Some(d)) = (src, dst) {
        let len = s.len.min(d.len);
        if len > 0 {
            push(CopyOp { src: s.addr, dst: d.addr, len, token });
        }
        src = s.after(len).or_else(|| from.next());
        dst = d.after(len).or_else(|| to.next());
    }
}

/// Returns the buffers of a packet, at most [`MAX_PIECES`]. The first piece is extended to the front by the virtio-net
/// header.
pub(crate) fn pieces_of(pool: &Pool, packet: &Packet) -> ArrayVec<Piece, MAX_PIECES> {
    let mut pieces: ArrayVec<Piece, MAX_PIECES> = ArrayVec::new();
    pool.for_each_segment(packet, |addr, len| pieces.push(Piece { addr: addr.as_ptr(), len: len as u32 }));
    if let Some(first) = pieces.first_mut() {
        first.addr = first.addr.wrapping_sub(NET_HEADER);
        first.len += NET_HEADER as u32;
    }
    pieces
}

impl Piece {
    /// Removes the first `len` bytes from `pieces`.
    pub(crate) fn skip<const N: usize>(pieces: &mut ArrayVec<Self, N>, len: usize) {
        let mut left = len as u32;
        while let Some(first) = pieces.first_mut() {
            if left < first.len {
                first.addr = first.addr.wrapping_add(left as usize);
                first.len -= left;
                return;
            }
            left -= first.len;
            pieces.remove(0);
        }
    }

    /// Returns the rest of the piece behind its first `len` bytes, or `None` if nothing is left.
    fn after(self, len: u32) -> Option<Self> {
        let left = self.len - len;
        (left > 0).then(|| Self { addr: self.addr.wrapping_add(len as usize), len: left })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(base: usize, lens: &[u32]) -> Vec<Piece> {
        // Each piece begins where the one before it ended, so the address of a copy gives its byte offset.
        let mut at = base;
        let piece = |&len: &u32| {
            let addr = std::ptr::without_provenance_mut(at);
            at += len as usize;
            Piece { addr, len }
        };
        lens.iter().map(piece).collect()
    }

    proptest! {
        #[test]
        fn copies_cover_each_byte_once(from in prop::collection::vec(0..50u32, 0..8), to in prop::collection::vec(0..50u32, 0..8)) {
            let wanted = from.iter().sum::<u32>().min(to.iter().sum());
            let (mut done, mut count) = (0, 0);
            let mut right = true;
            copies(&pieces(1000, &from), &pieces(5000, &to), 7, |copy| {
                right &= copy.src.addr() == 1000 + done && copy.dst.addr() == 5000 + done && copy.len > 0;
                right &= copy.token == 7;
                done += copy.len as usize;
                count += 1;
            });
            prop_assert!(right);
            prop_assert_eq!(done, wanted as usize);
            prop_assert!(count <= from.len() + to.len());
        }
    }
}
