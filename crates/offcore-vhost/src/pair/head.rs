//! Heads of packets: private copies of their first bytes, and where those go.

use std::ptr::NonNull;

use arrayvec::ArrayVec;

use crate::features::NET_HEADER;
use crate::pieces::Piece;
use offcore_wire::ethernet;

/// Bytes of a head, at most: the virtio-net header and the first 52 of the frame.
pub(super) const LEN: usize = 64;
/// Bytes of a head, at least: both headers.
pub(super) const LEAST: usize = NET_HEADER + ethernet::HEADER_LEN;

/// The first bytes of a packet, virtio-net header included.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Bytes([u8; LEN]);

/// Where a head goes: to the receiver's first two buffers at most.
#[derive(Clone, Copy, Debug)]
struct Place {
    first: *mut u8,
    first_len: u32,
    second_len: u32,
    second: *mut u8,
}

/// The heads of a pair's packets, by slot of its reorder ring.
#[derive(Debug)]
pub(super) struct Heads {
    bytes: Box<[Bytes]>,
    places: Box<[Place]>,
}

// SAFETY: places are addresses that are only written through by `Heads::write`, whose caller vouches for them.
unsafe impl Send for Heads {}

impl Heads {
    pub(super) fn new(slots: usize) -> Self {
        let nowhere = std::ptr::null_mut();
        let place = Place { first: nowhere, first_len: 0, second: nowhere, second_len: 0 };
        Self { bytes: vec![Bytes([0; LEN]); slots].into(), places: vec![place; slots].into() }
    }

    /// The head of `slot`.
    #[inline(always)]
    pub(super) fn bytes(&mut self, slot: usize) -> &mut [u8; LEN] {
        &mut self.bytes[slot].0
    }

    /// Where the head of `slot` goes.
    #[inline(always)]
    pub(super) fn place(&self, slot: usize) -> *mut u8 {
        self.places[slot].first
    }

    /// Reads the head of `slot`, `len` bytes at `from`, which are to go to `to`.
    ///
    /// # Safety
    /// Both must be that many bytes of mapped memory; they may belong to a guest.
    #[inline(always)]
    pub(super) unsafe fn read(&mut self, slot: usize, from: NonNull<u8>, to: NonNull<u8>, len: usize) {
        let len = len.min(LEN);
        self.places[slot] =
            Place { first: to.as_ptr(), first_len: len as u32, second: std::ptr::null_mut(), second_len: 0 };
        let bytes = &mut self.bytes[slot].0;
        if len == LEN {
            // SAFETY: 64 mapped bytes, as the caller promises. Volatile: read once, whatever their guest does; an array of
            // bytes needs no alignment.
            *bytes = unsafe { from.cast::<[u8; LEN]>().read_volatile() };
        } else {
            // SAFETY: `len` bytes at either end, as the caller promises and by the array's length. They do not overlap:
            // one side is ours alone.
            // copy-ok: the head, which the core decides on
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), len) };
        }
    }

    /// Reads the head of `slot` from the pieces `from`; it is to go to the pieces `to`, of which it takes the first two at
    /// most. Takes its bytes off both, and returns its length.
    ///
    /// # Safety
    /// The pieces must be mapped memory; it may belong to a guest.
    pub(super) unsafe fn read_pieces<const N: usize>(
        &mut self,
        slot: usize,
        from: &mut ArrayVec<Piece, N>,
        to: &mut ArrayVec<Piece, N>,
    ) -> usize {
        let first = to.first().map_or(0, |piece| piece.len.min(LEN as u32));
        let second = to.get(1).map_or(0, |piece| piece.len.min(LEN as u32 - first));
        let total: usize = from.iter().map(|piece| piece.len as usize).sum();
        let len = total.min((first + second) as usize);
        let first_len = first.min(len as u32);
        self.places[slot] = Place {
            first: to.first().map_or(std::ptr::null_mut(), |piece| piece.addr),
            first_len,
            second: to.get(1).map_or(std::ptr::null_mut(), |piece| piece.addr),
            second_len: len as u32 - first_len,
        };
        let mut read = 0;
        for piece in from.iter() {
            let part = (piece.len as usize).min(len - read);
            let bytes = &mut self.bytes[slot].0[read..read + part];
            // SAFETY: the piece has that many mapped bytes, and so has the part of the head. They do not overlap: one side
            // is ours alone.
            // copy-ok: the head, which the core decides on
            unsafe { std::ptr::copy_nonoverlapping(piece.addr, bytes.as_mut_ptr(), part) };
            read += part;
        }
        Piece::skip(from, len);
        Piece::skip(to, len);
        len
    }

    /// Writes the head of `slot` where it goes.
    ///
    /// # Safety
    /// The memory that was named to [`Heads::read`] or [`Heads::read_pieces`] must still be there.
    #[inline(always)]
    pub(super) unsafe fn write(&self, slot: usize) {
        let place = &self.places[slot];
        let bytes = &self.bytes[slot].0;
        if place.first_len as usize == LEN {
            // SAFETY: 64 bytes of the receiver's memory, as the caller promises; an array of bytes needs no alignment.
            unsafe { place.first.cast::<[u8; LEN]>().write_unaligned(*bytes) };
            return;
        }
        let (first, rest) = bytes.split_at((place.first_len as usize).min(LEN));
        let second = &rest[..(place.second_len as usize).min(rest.len())];
        for (part, to) in [(first, place.first), (second, place.second)] {
            if !part.is_empty() {
                // SAFETY: the receiver's buffer has that many bytes, as the caller promises. They do not overlap: one side
                // is ours alone.
                // copy-ok: the head, which the core decided on
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
            }
        }
    }
}
