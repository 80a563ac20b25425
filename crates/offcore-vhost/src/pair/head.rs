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

/// The first bytes of a packet, virtio-net header included.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Bytes([u8; LEN]);

/// What a packet in flight needs when it is published.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// Where its head goes, to the receiver's first buffer.
    place: *mut u8,
    /// Bytes of the head that go there, and that go to the buffer after it.
    lens: (u16, u16),
    /// The sender's chain.
    pub(super) from: Chain,
    /// The receiver's, when it takes one.
    pub(super) to: Chain,
    /// How many it takes: none when the packet is dropped.
    pub(super) chains: u16,
    /// Bytes of the frame.
    pub(super) frame: u32,
}

/// The packets of a pair, by slot of its reorder ring.
#[derive(Debug)]
pub(super) struct Heads {
    bytes: Box<[Bytes]>,
    slots: Box<[Slot]>,
    /// Where heads go on that do not fit one buffer.
    seconds: Box<[*mut u8]>,
}

// SAFETY: places are addresses that are only written through by `Heads::write`, whose caller vouches for them.
unsafe impl Send for Heads {}

impl Heads {
    pub(super) fn new(slots: usize) -> Self {
        let nowhere = std::ptr::null_mut();
        let (none, lens) = (Chain::default(), (0, 0));
        let slot = Slot { place: nowhere, lens, from: none, to: none, chains: 0, frame: 0 };
        Self {
            bytes: vec![Bytes([0; LEN]); slots].into(),
            slots: vec![slot; slots].into(),
            seconds: vec![nowhere; slots].into(),
        }
    }

    /// The head in slot `at`.
    #[inline(always)]
    pub(super) fn bytes(&mut self, at: usize) -> &mut [u8; LEN] {
        &mut self.bytes[at].0
    }

    /// The packet in slot `at`.
    #[inline(always)]
    pub(super) fn slot(&self, at: usize) -> &Slot {
        &self.slots[at]
    }

    /// Where the head in slot `at` goes.
    #[inline(always)]
    pub(super) fn place(&self, at: usize) -> *mut u8 {
        self.slots[at].place
    }

    /// Notes the chains of the packet in slot `at`, whose frame has `frame` bytes: the sender's `from`, and `chains` of the
    /// receiver, of which `to` is the only one or none.
    #[inline(always)]
    pub(super) fn enter(&mut self, at: usize, from: Chain, (chains, to): (u16, Chain), frame: usize) {
        let slot = &mut self.slots[at];
        (slot.from, slot.to, slot.chains, slot.frame) = (from, to, chains, frame as u32);
    }

    /// Slot `at` has no head to write.
    pub(super) fn forget(&mut self, at: usize) {
        self.slots[at].lens = (0, 0);
    }

    /// Reads a head, `len` bytes at `from`, into slot `at`. It is to go to `to`.
    ///
    /// # Safety
    /// Both must be that many bytes of mapped memory; they may belong to a guest.
    #[inline(always)]
    pub(super) unsafe fn read(&mut self, at: usize, from: NonNull<u8>, to: NonNull<u8>, len: usize) {
        let bytes = &mut self.bytes[at].0;
        let slot = &mut self.slots[at];
        slot.place = to.as_ptr();
        if len >= LEN {
            slot.lens = (LEN as u16, 0);
            // SAFETY: 64 bytes at either end, as the caller promises and by the array's length. They do not overlap: one
            // side is ours alone.
            // copy-ok: the head, which the core decides on
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), LEN) };
        } else {
            slot.lens = (len as u16, 0);
            // SAFETY: as above, with `len` bytes, which are less than the array has.
            // copy-ok: as above
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), len) };
        }
        // Whatever is decided is decided on this copy: the compiler must not look at the guest's bytes again.
        compiler_fence(Ordering::SeqCst);
    }

    /// Reads a head from the pieces `from` into slot `at`; it is to go to the pieces `to`, of which it takes the first two
    /// at most. Takes its bytes off both, and returns its length.
    ///
    /// # Safety
    /// The pieces must be mapped memory; it may belong to a guest.
    pub(super) unsafe fn read_pieces<const N: usize>(
        &mut self,
        at: usize,
        from: &mut ArrayVec<Piece, N>,
        to: &mut ArrayVec<Piece, N>,
    ) -> usize {
        let first = to.first().map_or(0, |piece| (piece.len as usize).min(LEN));
        let second = to.get(1).map_or(0, |piece| (piece.len as usize).min(LEN - first));
        let total: usize = from.iter().map(|piece| piece.len as usize).sum();
        let len = total.min(first + second);
        let first = first.min(len);
        let slot = &mut self.slots[at];
        slot.lens = (first as u16, (len - first) as u16);
        slot.place = to.first().map_or(std::ptr::null_mut(), |piece| piece.addr);
        self.seconds[at] = to.get(1).map_or(std::ptr::null_mut(), |piece| piece.addr);
        let mut read = 0;
        for piece in from.iter() {
            let part = (piece.len as usize).min(len - read);
            let bytes = &mut self.bytes[at].0[read..read + part];
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

    /// Writes the head in slot `at` where it goes.
    ///
    /// # Safety
    /// The memory that was named to [`Heads::read`] or [`Heads::read_pieces`] must still be there.
    #[inline(always)]
    pub(super) unsafe fn write(&self, at: usize) {
        let Slot { place, lens, .. } = self.slots[at];
        if lens == (LEN as u16, 0) {
            // SAFETY: 64 bytes of the receiver's memory, as the caller promises. They do not overlap: one side is ours
            // alone.
            // copy-ok: the head, which the core decided on
            unsafe { std::ptr::copy_nonoverlapping(self.bytes[at].0.as_ptr(), place, LEN) };
        } else {
            // SAFETY: the caller's promise, passed on.
            unsafe { self.write_parts(at) };
        }
    }

    /// # Safety
    /// As for [`Heads::write`].
    unsafe fn write_parts(&self, at: usize) {
        let Slot { place, lens: (first, second), .. } = self.slots[at];
        let (first, rest) = self.bytes[at].0.split_at(usize::from(first).min(LEN));
        let second = &rest[..usize::from(second).min(rest.len())];
        for (part, to) in [(first, place), (second, self.seconds[at])] {
            if !part.is_empty() {
                // SAFETY: the receiver's buffer has that many bytes, as the caller promises. They do not overlap: one side
                // is ours alone.
                // copy-ok: the head, which the core decided on
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
            }
        }
    }
}
