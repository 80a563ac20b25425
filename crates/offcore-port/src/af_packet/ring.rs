//! A ring of packets shared by the kernel and a queue. Each slot begins with a `struct tpacket2_hdr`, whose status word
//! says which side owns the slot.
//!
//! ```text
//! received  | header 32 | sender 20 | .. | virtio-net header 10 | frame ...... |
//! to send   | header 32 | virtio-net header 10 | frame ...... |
//! ```
//! Slots are an odd number of cache lines long, so that their first lines spread over all sets of the cache. The ring
//! is one memory block, so that a slot's address can be computed with one multiplication.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use offcore_ring::prefetch::{self, LINE};
use rustix::mm::{MapFlags, ProtFlags};

use super::socket::{self, Refusal, VNET_HEADER};

/// Prefetch distance in slots.
const AHEAD: usize = 4;
/// Maximum length of a slot in bytes: longer packets bypass the ring.
const MAX_SLOT: usize = 16 << 10;
const PAGE: usize = 4096;

/// Upper bound for the offset of a received frame in its slot: behind slot header, sender address, and virtio-net
/// header.
const RX_FRAME: usize = 96;
/// Offset of the virtio-net header of a packet to send. The frame follows it.
const TX_HEADER: usize = 32;
const TX_FRAME: usize = TX_HEADER + VNET_HEADER;

/// Status of a slot that the kernel may fill, or that is free for a packet to send.
pub(super) const IDLE: u32 = 0;
/// Status of a received packet.
pub(super) const USER: u32 = 1;
/// Status of a received packet that was longer than its slot: the complete packet is in the socket's queue.
pub(super) const COPY: u32 = 1 << 1;
/// Status of a received packet: packets were dropped because the ring was full.
pub(super) const LOSING: u32 = 1 << 2;
/// Status of a received packet: it had a VLAN tag, whose TCI is in the slot's header.
pub(super) const VLAN_VALID: u32 = 1 << 4;
/// Status of a received packet: the tag's TPID is in the slot's header, too.
pub(super) const VLAN_TPID_VALID: u32 = 1 << 6;
/// Status of a packet to send.
pub(super) const SEND_REQUEST: u32 = 1;

/// The header of a slot.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Header {
    pub(super) status: u32,
    /// Length of the packet in bytes.
    pub(super) len: u32,
    /// Number of its bytes in the slot.
    pub(super) there: u32,
    pub(super) frame: u16,
    pub(super) network: u16,
    pub(super) time: [u32; 2],
    pub(super) vlan_tci: u16,
    pub(super) vlan_tpid: u16,
    pub(super) padding: [u8; 4],
}

const _: () = assert!(size_of::<Header>() == TX_HEADER);

/// The direction of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Rx,
    Tx,
}

/// A socket and its ring.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) socket: OwnedFd,
    base: NonNull<u8>,
    slot_size: usize,
    slots: usize,
    /// The slot that is examined next.
    next: usize,
}

// SAFETY: only the owner of the ring and the kernel use the mapping.
unsafe impl Send for Ring {}

/// `struct tpacket_req`.
#[repr(C)]
struct Request {
    block_size: u32,
    blocks: u32,
    slot_size: u32,
    slots: u32,
}

/// Returns the size of a slot for frames of up to `frame` bytes, limited to [`MAX_SLOT`].
fn slot_size(direction: Direction, frame: usize) -> usize {
    let front = match direction {
        Direction::Rx => RX_FRAME,
        Direction::Tx => TX_FRAME,
    };
    let lines = (front + frame).min(MAX_SLOT).div_ceil(LINE);
    (lines | 1) * LINE
}

impl Ring {
    /// Gives `socket` a ring of at least `slots` slots for frames of up to `frame` bytes.
    pub(super) fn new(
        socket: OwnedFd,
        direction: Direction,
        slots: u32,
        frame: usize,
    ) -> Result<Self, Refusal> {
        let slot_size = slot_size(direction, frame);
        let block_size = (slots as usize * slot_size).next_multiple_of(PAGE);
        let slots = block_size / slot_size;
        let request = Request {
            block_size: block_size as u32,
            blocks: 1,
            slot_size: slot_size as u32,
            slots: slots as u32,
        };
        let option = match direction {
            Direction::Rx => libc::PACKET_RX_RING,
            Direction::Tx => libc::PACKET_TX_RING,
        };
        let what = format!("a ring of {slots} slots of {slot_size} bytes: ask for fewer with slots=N");
        socket::set(&socket, option, request, &what)?;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(
                std::ptr::null_mut(),
                block_size,
                protection,
                MapFlags::SHARED,
                socket.as_fd(),
                0,
            )
        }
        .map_err(|source| Refusal::new("mapping a ring", source.into()))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| {
            Refusal::new("mapping a ring", std::io::Error::other("the kernel put it at address 0"))
        })?;
        Ok(Self { socket, base, slot_size, slots, next: 0 })
    }

    /// Creates a ring without a kernel, for tests that play the kernel's part.
    #[cfg(test)]
    pub(super) fn alone(direction: Direction, slots: usize, frame: usize) -> Self {
        let (socket, _) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let slot_size = slot_size(direction, frame);
        let len = (slots * slot_size).next_multiple_of(PAGE);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE).unwrap()
        };
        Self { socket: socket.into(), base: NonNull::new(base.cast()).unwrap(), slot_size, slots, next: 0 }
    }

    fn mapped(&self) -> usize {
        (self.slots * self.slot_size).next_multiple_of(PAGE)
    }

    /// Number of slots.
    #[inline(always)]
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Length of the longest frame to send that fits into a slot.
    #[inline(always)]
    pub(super) fn tx_room(&self) -> usize {
        self.slot_size - TX_FRAME
    }

    /// Returns the address of the slot `ahead` of the next one. `ahead` must be less than the number of slots.
    #[inline(always)]
    fn slot(&self, ahead: usize) -> NonNull<u8> {
        debug_assert!(ahead < self.slots);
        let at = self.next + ahead;
        let at = if at >= self.slots { at - self.slots } else { at };
        // SAFETY: `next` and `ahead` are below the number of slots, so `at` is, too, and the slot is within the
        // mapping.
        unsafe { self.base.add(at * self.slot_size) }
    }

    /// Returns the status word of the slot `ahead` of the next one.
    #[inline(always)]
    fn status_word(&self, ahead: usize) -> &AtomicU32 {
        // SAFETY: a slot begins with its status word, is aligned to a cache line, and lives as long as the ring. The
        // kernel accesses the word with single loads and stores.
        unsafe { AtomicU32::from_ptr(self.slot(ahead).as_ptr().cast()) }
    }

    /// Returns the status of the slot `ahead` of the next one.
    #[inline(always)]
    pub(super) fn status(&self, ahead: usize) -> u32 {
        self.status_word(ahead).load(Ordering::Acquire)
    }

    /// Passes the slot `ahead` of the next one to the other side. Preceding reads and writes of the slot are complete
    /// by then.
    #[inline(always)]
    pub(super) fn set_status(&self, ahead: usize, status: u32) {
        self.status_word(ahead).store(status, Ordering::Release);
    }

    /// Advances by `slots` slots, at most the number of slots.
    #[inline(always)]
    pub(super) fn advance(&mut self, slots: usize) {
        self.next = (self.next + slots) % self.slots;
    }

    /// Steps back by `slots` slots, at most the number of slots.
    pub(super) fn step_back(&mut self, slots: usize) {
        self.next = (self.next + self.slots - slots) % self.slots;
    }

    /// Prefetches the first `lines` cache lines of the slot that is [`AHEAD`] slots behind the one at `ahead`.
    #[inline(always)]
    pub(super) fn prefetch(&self, ahead: usize, lines: usize) {
        let at = self.next + ahead + AHEAD;
        let at = if at >= self.slots { at - self.slots } else { at };
        let slot = self.base.as_ptr().wrapping_add(at * self.slot_size);
        for line in 0..lines {
            prefetch::read(slot.wrapping_add(line * LINE));
        }
    }

    /// Returns the header of the received packet in the slot `ahead` of the next one, if any.
    #[inline(always)]
    pub(super) fn received(&self, ahead: usize) -> Option<Header> {
        if self.status(ahead) & USER == 0 {
            return None;
        }
        // SAFETY: a slot begins with its header; the kernel does not write to slots with the status USER.
        Some(unsafe { self.slot(ahead).cast::<Header>().read() })
    }

    /// Returns the received frame and the virtio-net header in front of it; `None` if the slot's header is invalid.
    #[inline(always)]
    pub(super) fn frame(&self, ahead: usize, header: &Header) -> Option<(&[u8; VNET_HEADER], &[u8])> {
        let (at, len) = (usize::from(header.frame), header.there as usize);
        if at < size_of::<Header>() + VNET_HEADER || at + len > self.slot_size {
            return None;
        }
        // SAFETY: the range [at - VNET_HEADER, at + len) is within the slot, which belongs to the queue until
        // `set_status`.
        let bytes = unsafe {
            let first = self.slot(ahead).add(at - VNET_HEADER);
            std::slice::from_raw_parts(first.as_ptr(), VNET_HEADER + len)
        };
        bytes.split_first_chunk()
    }

    /// Writes the headers of a frame of `len` bytes to the slot `ahead` of the next one, which must be idle, and
    /// returns the address for the frame. `len` must be at most [`tx_room`](Self::tx_room).
    #[inline(always)]
    pub(super) fn prepare(&mut self, ahead: usize, vnet: &[u8; VNET_HEADER], len: usize) -> NonNull<u8> {
        assert!(len <= self.tx_room(), "{len} bytes in a slot for {}", self.tx_room());
        let slot = self.slot(ahead);
        // SAFETY: the slot is idle, so the kernel neither reads nor writes it; all writes are within the slot.
        unsafe {
            (&raw mut (*slot.cast::<Header>().as_ptr()).len).write((VNET_HEADER + len) as u32);
            slot.add(TX_HEADER).cast::<[u8; VNET_HEADER]>().write_unaligned(*vnet);
            slot.add(TX_FRAME)
        }
    }

    /// Returns the length of the frame in the slot `ahead` of the next one, which must be prepared.
    pub(super) fn prepared(&self, ahead: usize) -> usize {
        // SAFETY: a slot begins with its header; the kernel does not change the length.
        let len = unsafe { (&raw const (*self.slot(ahead).cast::<Header>().as_ptr()).len).read() };
        (len as usize).saturating_sub(VNET_HEADER)
    }

    /// Plays the kernel's part: puts a packet into the slot `ahead` of the next one.
    #[cfg(test)]
    pub(super) fn put(&mut self, ahead: usize, header: Header, vnet: [u8; VNET_HEADER], bytes: &[u8]) {
        let slot = self.slot(ahead);
        let at = usize::from(header.frame);
        let room = self.slot_size.saturating_sub(at);
        let bytes = &bytes[..bytes.len().min(room)];
        // SAFETY: the writes are within the slot, which only this test uses.
        unsafe {
            if at >= VNET_HEADER && at < self.slot_size {
                slot.add(at - VNET_HEADER).cast::<[u8; VNET_HEADER]>().write_unaligned(vnet);
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot.add(at).as_ptr(), bytes.len());
            }
            slot.cast::<Header>().write(header);
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: `new` created the mapping, and no borrows of it remain.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_an_odd_number_of_lines() {
        for direction in [Direction::Rx, Direction::Tx] {
            for frame in [64, 1518, 1522, 9018, 15000] {
                let size = slot_size(direction, frame);
                assert!(size >= frame + RX_FRAME.min(TX_FRAME), "{frame} {size}");
                assert_eq!((size % LINE, size / LINE % 2), (0, 1), "{frame}");
            }
            assert!(slot_size(direction, 1 << 20) <= MAX_SLOT + LINE);
        }
        // An ordinary frame without its stripped tag lies behind 86 bytes: netoff 80 and the virtio-net header.
        assert!(slot_size(Direction::Rx, 1518) >= 86 + 1518);
    }

    #[test]
    fn ring_position_wraps() {
        let mut ring = Ring::alone(Direction::Tx, 3, 100);
        ring.advance(2);
        ring.set_status(0, 7);
        ring.set_status(1, 8);
        ring.advance(1);
        assert_eq!((ring.status(0), ring.status(2)), (8, 7));
        ring.step_back(2);
        assert_eq!((ring.status(1), ring.status(2)), (7, 8));
    }
}
