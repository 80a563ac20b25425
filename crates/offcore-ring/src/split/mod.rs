//! Split virtqueues: virtio 1.2, section 2.7.
//!
//! ```text
//! descriptor table  size × { addr u64, len u32, flags u16, next u16 }      aligned to 16
//! available ring    flags u16, idx u16, size × u16, used_event u16         aligned to 2   driver → device
//! used ring         flags u16, idx u16, size × { id u32, len u32 },
//!                   avail_event u16                                        aligned to 4   device → driver
//! ```
//! All fields are little endian, which is the byte order of x86-64. The other side may write any byte at any time. Each
//! field is therefore read once, by a volatile or atomic access, and checked before use.

pub mod device;
pub(crate) mod driver;
mod lines;

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use offcore_mem::GuestMemory;

use crate::areas::Areas;
use crate::chain::read_descriptor;
pub use crate::chain::{Descriptor, MAX_SIZE, VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use crate::error::RingError;

/// Flag of the available ring: the driver requests no notifications.
pub const VIRTQ_AVAIL_F_NO_INTERRUPT: u16 = 1;
/// Flag of the used ring: the device requests no notifications.
pub const VIRTQ_USED_F_NO_NOTIFY: u16 = 1;

/// An element of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(4))]
pub struct UsedElement {
    /// First descriptor of the chain.
    pub id: u32,
    /// Bytes written into its buffers.
    pub len: u32,
}

/// Length in bytes of the descriptor table of a queue of `size`.
pub const fn desc_len(size: u16) -> usize {
    size as usize * 16
}

/// Length in bytes of the available ring, including its used_event field.
pub const fn avail_len(size: u16) -> usize {
    6 + size as usize * 2
}

/// Length in bytes of the used ring, including its avail_event field.
pub const fn used_len(size: u16) -> usize {
    6 + size as usize * 8
}

/// The three parts of a queue in host memory: pointers, the size they were validated for, and the memory that contains
/// them.
#[derive(Clone, Debug)]
pub struct SplitLayout {
    desc: NonNull<u8>,
    avail: NonNull<u8>,
    used: NonNull<u8>,
    size: u16,
    _memory: Option<Arc<GuestMemory>>,
}

// SAFETY: a layout contains only addresses. They are accessed by atomic and volatile operations, while the memory is
// kept mapped.
unsafe impl Send for SplitLayout {}
// SAFETY: all threads access the addresses by atomic and volatile operations, while the memory is kept mapped.
unsafe impl Sync for SplitLayout {}

impl SplitLayout {
    /// Describes a queue of `size` whose parts are at these addresses.
    ///
    /// # Errors
    /// Fails if the size is not a power of two up to 32768, or if an address is not aligned.
    ///
    /// # Safety
    /// The parts must be [`desc_len`], [`avail_len`] and [`used_len`] bytes long. They must stay mapped as long as the
    /// layout (or a side created from it) is used.
    pub unsafe fn new(
        desc: NonNull<u8>,
        avail: NonNull<u8>,
        used: NonNull<u8>,
        size: u32,
    ) -> Result<Self, RingError> {
        if size == 0 || size > u32::from(MAX_SIZE) || !size.is_power_of_two() {
            return Err(RingError::Size(size));
        }
        for (part, address, align) in
            [("descriptor table", desc, 16), ("available ring", avail, 2), ("used ring", used, 4)]
        {
            let address = address.as_ptr() as usize;
            if !address.is_multiple_of(align) {
                return Err(RingError::Alignment { part, address, align });
            }
        }
        Ok(Self { desc, avail, used, size: size as u16, _memory: None })
    }

    /// Describes a queue of `size` whose parts are at these addresses of `memory`. The layout keeps the memory mapped.
    ///
    /// # Errors
    /// The same as for [`SplitLayout::new`], and [`RingError::Part`] if a part is not completely in the memory.
    pub fn in_memory(memory: &Arc<GuestMemory>, areas: Areas, size: u32) -> Result<Self, RingError> {
        if size == 0 || size > u32::from(MAX_SIZE) || !size.is_power_of_two() {
            return Err(RingError::Size(size));
        }
        let queue_size = size as u16;
        let find = |part, address, len| {
            memory.translate_user(address, len).ok_or(RingError::Part { part, address, len })
        };
        let desc = find("descriptor table", areas.descriptors, desc_len(queue_size))?;
        let avail = find("available ring", areas.driver, avail_len(queue_size))?;
        let used = find("used ring", areas.device, used_len(queue_size))?;
        // SAFETY: each part is completely in `memory`, which the layout keeps mapped.
        let layout = unsafe { Self::new(desc, avail, used, size) }?;
        Ok(Self { _memory: Some(Arc::clone(memory)), ..layout })
    }

    /// Queue size.
    #[inline(always)]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// See [`crate::Layout::written`]: the used ring, and an empty range.
    pub(crate) fn written(&self) -> [(NonNull<u8>, usize); 2] {
        [(self.used, used_len(self.size)), (self.used, 0)]
    }

    /// Returns the current used index of the ring: the number of chains returned since the driver created the ring,
    /// modulo 65536. Any process that shares the memory can change it.
    pub fn used_index(&self) -> u16 {
        self.used_idx().load(Ordering::Acquire)
    }

    #[inline(always)]
    fn mask(&self) -> u16 {
        self.size - 1
    }

    #[inline(always)]
    fn u16_at(base: NonNull<u8>, offset: usize) -> &'static AtomicU16 {
        // SAFETY: callers pass offsets of two-byte fields inside the part at `base`. The caller of `new` keeps the part
        // mapped while the layout is used. The parts are at least 2-byte aligned. The reference is not used outside the
        // accessors below.
        unsafe { AtomicU16::from_ptr(base.as_ptr().add(offset).cast()) }
    }

    #[inline(always)]
    fn avail_flags(&self) -> &AtomicU16 {
        Self::u16_at(self.avail, 0)
    }

    #[inline(always)]
    fn avail_idx(&self) -> &AtomicU16 {
        Self::u16_at(self.avail, 2)
    }

    #[inline(always)]
    fn avail_entry(&self, position: u16) -> &AtomicU16 {
        Self::u16_at(self.avail, 4 + usize::from(position & self.mask()) * 2)
    }

    /// Address of the entry. [`SplitLayout::before_wrap`] returns the number of entries from there to the end.
    #[inline(always)]
    fn avail_at(&self, position: u16) -> *const u16 {
        // SAFETY: the masked position is below the size, so the entry is inside the available ring. The pointer is not
        // derived from a reference to the entry, because readers also use it for the next entries.
        unsafe { self.avail.as_ptr().add(4 + usize::from(position & self.mask()) * 2).cast() }
    }

    /// Number of entries (of either ring) from `position` to the end of the ring.
    #[inline(always)]
    fn before_wrap(&self, position: u16) -> usize {
        usize::from(self.size - (position & self.mask()))
    }

    #[inline(always)]
    fn used_event(&self) -> &AtomicU16 {
        Self::u16_at(self.avail, 4 + usize::from(self.size) * 2)
    }

    #[inline(always)]
    fn used_flags(&self) -> &AtomicU16 {
        Self::u16_at(self.used, 0)
    }

    #[inline(always)]
    fn used_idx(&self) -> &AtomicU16 {
        Self::u16_at(self.used, 2)
    }

    #[inline(always)]
    fn avail_event(&self) -> &AtomicU16 {
        Self::u16_at(self.used, 4 + usize::from(self.size) * 8)
    }

    #[inline(always)]
    fn used_element(&self, position: u16) -> *mut UsedElement {
        // SAFETY: the masked position is below the size, so the element is inside the used ring.
        unsafe { self.used.as_ptr().add(4 + usize::from(position & self.mask()) * 8).cast() }
    }

    /// Makes a private copy of descriptor `index`, which callers have checked against the size.
    #[inline(always)]
    fn descriptor(&self, index: u16) -> Descriptor {
        debug_assert!(index < self.size);
        // SAFETY: `desc_at` masks the index, so it returns a descriptor of the table, which stays mapped and is aligned
        // to 16.
        unsafe { read_descriptor(self.desc_at(index)) }
    }

    #[inline(always)]
    fn desc_at(&self, index: u16) -> *mut Descriptor {
        // SAFETY: the masked index is below the size, so the descriptor is inside the table.
        unsafe { self.desc.as_ptr().add(usize::from(index & self.mask()) * 16).cast() }
    }
}

/// Returns whether a notification is due when the index advances from `old` to `new` and the other side has requested
/// one at `event` (vring_need_event in virtio 1.2, section 2.7.7.2).
#[inline(always)]
fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests;
