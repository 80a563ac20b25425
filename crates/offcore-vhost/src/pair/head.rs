//! Packets between two guests: private copies of their heads, where those go, and the chains that go back.

use std::ptr::NonNull;
use std::sync::atomic::{Ordering, compiler_fence};

use arrayvec::ArrayVec;
use offcore_ring::device::Chain;
use offcore_wire::ethernet;

use crate::features::NET_HEADER;
use crate::pieces::Piece;

/// Bytes of a head, at most: the virtio-net header and the first 52 of the frame.
pub(super) const LEN: usize = 64;
/// Bytes of a head, at least: both headers.
pub(super) const LEAST: usize = NET_HEADER + ethernet::HEADER_LEN;

/// A packet between two guests: its first bytes, virtio-net header included, and what is needed when it is published.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Head {
    bytes: [u8; LEN],
    /// Where the head goes: to the receiver's first buffer, and to the one after it.
    places: [*mut u8; 2],
    /// Bytes of it that go there.
    lens: [u16; 2],
    /// The sender's chain.
    pub(super) from: Chain,
    /// The receiver's, when it takes one.
    pub(super) to: Chain,
    /// How many it takes: none when the packet is dropped.
    pub(super) chains: u16,
    pub(super) frame: u32,
}

// SAFETY: places are addresses that are only written through by `Head::write`, whose caller vouches for them.
unsafe impl Send for Head {}

impl Default for Head {
    fn default() -> Self {
        let (none, places) = (Chain::default(), [std::ptr::null_mut(); 2]);
        Self { bytes: [0; LEN], places, lens: [0; 2], from: none, to: none, chains: 0, frame: 0 }
    }
}

impl Head {
    #[inline(always)]
    pub(super) fn bytes(&mut self) -> &mut [u8; LEN] {
        &mut self.bytes
    }

    /// Where it goes.
    #[inline(always)]
    pub(super) fn place(&self) -> *mut u8 {
        self.places[0]
    }

    /// Notes the packet's chains, and that its frame has `frame` bytes: the sender's `from`, and `chains` of the
    /// receiver, of which `to` is the only one or none.
    #[inline(always)]
    pub(super) fn enter(&mut self, from: Chain, (chains, to): (u16, Chain), frame: usize) {
        (self.from, self.to, self.chains, self.frame) = (from, to, chains, frame as u32);
    }

    /// There is nothing to write.
    pub(super) fn forget(&mut self) {
        self.lens = [0; 2];
    }

    /// Reads a head, `len` bytes at `from`. It is to go to `to`.
    ///
    /// # Safety
    /// Both must be that many bytes of mapped memory; they may belong to a guest.
    #[inline(always)]
    pub(super) unsafe fn read(&mut self, from: NonNull<u8>, to: NonNull<u8>, len: usize) {
        self.places[0] = to.as_ptr();
        if len >= LEN {
            self.lens = [LEN as u16, 0];
            // SAFETY: 64 bytes at either end, as the caller promises and by the array's length. They do not overlap: one
            // side is ours alone.
            // copy-ok: the head, which the core decides on
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.bytes.as_mut_ptr(), LEN) };
        } else {
            self.lens = [len as u16, 0];
            // SAFETY: as above, with `len` bytes, which are less than the array has.
            // copy-ok: as above
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.bytes.as_mut_ptr(), len) };
        }
        // Whatever is decided is decided on this copy: the compiler must not look at the guest's bytes again.
        compiler_fence(Ordering::SeqCst);
    }

    /// Reads a head from the pieces `from`; it is to go to the pieces `to`, of which it takes the first two at most. Takes
    /// its bytes off both, and returns its length.
    ///
    /// # Safety
    /// The pieces must be mapped memory; it may belong to a guest.
    pub(super) unsafe fn read_pieces<const N: usize>(
        &mut self,
        from: &mut ArrayVec<Piece, N>,
        to: &mut ArrayVec<Piece, N>,
    ) -> usize {
        let first = to.first().map_or(0, |piece| (piece.len as usize).min(LEN));
        let second = to.get(1).map_or(0, |piece| (piece.len as usize).min(LEN - first));
        let total: usize = from.iter().map(|piece| piece.len as usize).sum();
        let len = total.min(first + second);
        let first = first.min(len);
        self.lens = [first as u16, (len - first) as u16];
        self.places = [0, 1].map(|at| to.get(at).map_or(std::ptr::null_mut(), |piece| piece.addr));
        let mut read = 0;
        for piece in from.iter() {
            let part = (piece.len as usize).min(len - read);
            let bytes = &mut self.bytes[read..read + part];
            // SAFETY: the piece has that many mapped bytes, and so has the part of the head. They do not overlap: one side
            // is ours alone.
            // copy-ok: the head, which the core decides on
            unsafe { std::ptr::copy_nonoverlapping(piece.addr, bytes.as_mut_ptr(), part) };
            read += part;
        }
        compiler_fence(Ordering::SeqCst);
        Piece::skip(from, len);
        Piece::skip(to, len);
        len
    }

    /// Writes the head where it goes.
    ///
    /// # Safety
    /// The memory that was named to [`Head::read`] or [`Head::read_pieces`] must still be there.
    #[inline(always)]
    pub(super) unsafe fn write(&self) {
        if self.lens == [LEN as u16, 0] {
            // SAFETY: 64 bytes of the receiver's memory, as the caller promises. They do not overlap: one side is ours
            // alone.
            // copy-ok: the head, which the core decided on
            unsafe { std::ptr::copy_nonoverlapping(self.bytes.as_ptr(), self.places[0], LEN) };
        } else {
            // SAFETY: the caller's promise, passed on.
            unsafe { self.write_parts() };
        }
    }

    /// # Safety
    /// As for [`Head::write`].
    unsafe fn write_parts(&self) {
        let [first, second] = self.lens.map(usize::from);
        let (first, rest) = self.bytes.split_at(first.min(LEN));
        let second = &rest[..second.min(rest.len())];
        for (part, to) in [first, second].into_iter().zip(self.places) {
            if !part.is_empty() {
                // SAFETY: the receiver's buffer has that many bytes, as the caller promises. They do not overlap: one side
                // is ours alone.
                // copy-ok: the head, which the core decided on
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
            }
        }
    }
}
