//! State of packets between two guests: a private copy of the head, its destination, and the chains to return.

use std::ptr::NonNull;
use std::sync::atomic::{Ordering, compiler_fence};

use arrayvec::ArrayVec;
use offcore_ring::device::Chain;
use offcore_wire::ethernet;

use crate::features::NET_HEADER;
use crate::pieces::Piece;

/// Maximum length of a head in bytes: the virtio-net header and the first 52 bytes of the frame.
pub(super) const LEN: usize = 64;
/// Minimum length of a head in bytes: the virtio-net and Ethernet headers.
pub(super) const LEAST: usize = NET_HEADER + ethernet::HEADER_LEN;

/// A packet between two guests: its first bytes, virtio-net header included, and the state that is needed to publish
/// it.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Head {
    bytes: [u8; LEN],
    /// Destination of the head: an address in the receiver's first buffer, and one in the next buffer.
    places: [*mut u8; 2],
    /// Number of bytes for each of the two destinations.
    lens: [u16; 2],
    /// The sender's chain.
    pub(super) from: Chain,
    /// The receiver's chain if the packet uses exactly one.
    pub(super) to: Chain,
    /// Number of receiver's chains; 0 if the packet is dropped.
    pub(super) chains: u16,
    pub(super) frame: u32,
}

// SAFETY: `places` are only dereferenced by `Head::write`, whose caller guarantees that they are valid.
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

    /// The address that the head is written to.
    #[inline(always)]
    pub(super) fn place(&self) -> *mut u8 {
        self.places[0]
    }

    /// Records the packet's chains and the length of its frame in bytes: the sender's chain `from`, and `chains` chains
    /// of the receiver. `to` is the receiver's chain if there is exactly one.
    #[inline(always)]
    pub(super) fn enter(&mut self, from: Chain, chains: u16, to: Chain, frame: usize) {
        (self.from, self.to, self.chains, self.frame) = (from, to, chains, frame as u32);
    }

    /// Clears the head, so that nothing is written.
    pub(super) fn forget(&mut self) {
        self.lens = [0; 2];
    }

    /// Reads a head of `len` bytes from `from`, and records `to` as its destination.
    ///
    /// # Safety
    /// Both pointers must be valid for that many bytes of mapped memory, which may belong to a guest.
    #[inline(always)]
    pub(super) unsafe fn read(&mut self, from: NonNull<u8>, to: NonNull<u8>, len: usize) {
        self.places[0] = to.as_ptr();
        if len >= LEN {
            self.lens = [LEN as u16, 0];
            // SAFETY: both sides have 64 bytes: `from` as the caller guarantees, the array by its length. They do not
            // overlap, because the array is private to this process.
            // copy-ok: the head, which the core decides on
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.bytes.as_mut_ptr(), LEN) };
        } else {
            self.lens = [len as u16, 0];
            // SAFETY: `from` has `len` bytes as the caller guarantees, and the array is longer. They do not overlap,
            // because the array is private to this process.
            // copy-ok: the head, which the core decides on
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.bytes.as_mut_ptr(), len) };
        }
        // All decisions use this copy. The fence keeps the compiler from reading the guest's bytes again.
        compiler_fence(Ordering::SeqCst);
    }

    /// Reads a head from the pieces `from`, and records the first two pieces of `to` as its destination. Removes the
    /// bytes of the head from both lists and returns its length.
    ///
    /// # Safety
    /// The pieces must be mapped memory, which may belong to a guest.
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
            // SAFETY: the piece has at least `part` mapped bytes, and so has the rest of the head. They do not overlap,
            // because the head is private to this process.
            // copy-ok: the head, which the core decides on
            unsafe { std::ptr::copy_nonoverlapping(piece.addr, bytes.as_mut_ptr(), part) };
            read += part;
        }
        compiler_fence(Ordering::SeqCst);
        Piece::skip(from, len);
        Piece::skip(to, len);
        len
    }

    /// Writes the head to its destination.
    ///
    /// # Safety
    /// The memory that was passed to [`Head::read`] or [`Head::read_pieces`] must still be mapped.
    #[inline(always)]
    pub(super) unsafe fn write(&self) {
        if self.lens == [LEN as u16, 0] {
            // SAFETY: `places[0]` has 64 bytes of the receiver's memory, which the caller keeps mapped since
            // [`Head::read`]. They do not overlap, because the head is private to this process.
            // copy-ok: the head, which the core decided on
            unsafe { std::ptr::copy_nonoverlapping(self.bytes.as_ptr(), self.places[0], LEN) };
        } else {
            // SAFETY: the caller keeps the receiver's memory mapped, which `places` points to.
            unsafe { self.write_parts() };
        }
    }

    /// # Safety
    /// The same as for [`Head::write`].
    unsafe fn write_parts(&self) {
        let [first, second] = self.lens.map(usize::from);
        let (first, rest) = self.bytes.split_at(first.min(LEN));
        let second = &rest[..second.min(rest.len())];
        for (part, to) in [first, second].into_iter().zip(self.places) {
            if !part.is_empty() {
                // SAFETY: the receiver's buffer at `to` has `part.len()` bytes and is still mapped, as the caller
                // guarantees. They do not overlap, because the head is private to this process.
                // copy-ok: the head, which the core decided on
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
            }
        }
    }
}
