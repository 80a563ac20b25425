//! A mapped portal page, and the device file that takes descriptors by write().

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::descriptor::Descriptor;

/// Bytes of a portal. The device ignores the low 12 address bits, so every 64-byte slot of the page is equivalent.
const PAGE: usize = 0x1000;

/// A mapped portal. Dropping it unmaps the page and closes the queue.
#[derive(Debug)]
pub(crate) struct Page {
    base: NonNull<u8>,
    /// Offset in the page of the next store. Consecutive stores use different cache lines so that they do not delay
    /// each other.
    at: usize,
    _file: OwnedFd,
}

// SAFETY: this value is the only owner of the mapping, and the mapping is not tied to a thread.
unsafe impl Send for Page {}

impl Page {
    /// Maps the portal of an open work queue. If the kernel refuses, the file is returned.
    ///
    /// # Errors
    /// The kernel's reason: EPERM without CAP_SYS_RAWIO on kernels since 6.10 (and stable ones since May 2024).
    pub(crate) fn map(file: OwnedFd) -> Result<Self, (Errno, OwnedFd)> {
        // SAFETY: this creates a new mapping at an address that the kernel chooses; nothing else refers to it.
        let mapped = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), PAGE, ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
        };
        match mapped.map(|base| NonNull::new(base.cast())) {
            Ok(Some(base)) => Ok(Self { base, at: 0, _file: file }),
            Ok(None) => Err((Errno::FAULT, file)),
            Err(reason) => Err((reason, file)),
        }
    }

    /// Returns the address of the next 64 bytes of the portal.
    #[inline(always)]
    pub(super) fn next(&mut self) -> *mut u8 {
        let portal = self.base.as_ptr().wrapping_add(self.at);
        self.at = (self.at + size_of::<Descriptor>()) % PAGE;
        portal
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `map` with this length, and nothing else uses it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), PAGE) };
    }
}

/// A device file that accepts an array of descriptors per write().
#[derive(Debug)]
pub(crate) struct Writer {
    file: OwnedFd,
    /// The error of a refused write() other than a full queue.
    broken: Option<Errno>,
}

impl Writer {
    /// Checks that the kernel accepts descriptors by write(), with a no-op that writes no completion record.
    ///
    /// # Errors
    /// The kernel's reason: EINVAL if the driver has no such method.
    pub(crate) fn probe(file: OwnedFd) -> Result<Self, Errno> {
        let noop = Descriptor::new(crate::Opcode::Noop, crate::Flags::empty());
        match rustix::io::write(&file, noop.bytes()) {
            Ok(written) if written == size_of::<Descriptor>() => Ok(Self { file, broken: None }),
            Ok(_) => Err(Errno::IO),
            // A full queue also proves that write() is supported.
            Err(Errno::AGAIN) => Ok(Self { file, broken: None }),
            Err(reason) => Err(reason),
        }
    }

    /// Submits descriptors in one system call. Returns the number that the kernel accepted.
    pub(super) fn write(&mut self, descriptors: &[Descriptor]) -> usize {
        // SAFETY: descriptors are 64 initialized bytes each, without padding, and contiguous in the slice.
        let bytes = unsafe {
            std::slice::from_raw_parts(descriptors.as_ptr().cast::<u8>(), size_of_val(descriptors))
        };
        loop {
            match rustix::io::write(self.file.as_fd(), bytes) {
                Ok(written) => return written / size_of::<Descriptor>(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return 0,
                Err(reason) => {
                    self.broken = Some(reason);
                    return 0;
                }
            }
        }
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// A pipe stands in for the device file; the reading end receives what the device would get.
    fn pipe() -> (OwnedFd, std::fs::File) {
        let (reader, writer) = std::io::pipe().unwrap();
        (writer.into(), std::fs::File::from(OwnedFd::from(reader)))
    }

    #[test]
    fn one_write_carries_descriptors_in_order() {
        let (file, mut device) = pipe();
        let mut writer = Writer::probe(file).unwrap();
        let mut bytes = [0; 64];
        device.read_exact(&mut bytes).unwrap();
        assert_eq!(Descriptor::from_bytes(&bytes).opcode(), Some(crate::Opcode::Noop));
        let burst: Vec<Descriptor> = (0..5).map(|i| Descriptor { src: i, ..Descriptor::default() }).collect();
        assert_eq!(writer.write(&burst), 5);
        let mut bytes = [0; 5 * 64];
        assert_eq!(device.read(&mut bytes).unwrap(), 5 * 64, "one write");
        for (i, chunk) in bytes.as_chunks::<64>().0.iter().enumerate() {
            assert_eq!(Descriptor::from_bytes(chunk).src, i as u64);
        }
    }

    #[test]
    fn full_queue_retries_and_closed_fails() {
        let (file, device) = pipe();
        rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::NONBLOCK).unwrap();
        let mut writer = Writer::probe(file).unwrap();
        let burst = [Descriptor::default(); 64];
        let mut accepted = 0;
        loop {
            match writer.write(&burst) {
                0 => break,
                n => accepted += n,
            }
        }
        assert!(accepted > 64, "{accepted}");
        assert!(!writer.is_broken(), "full");
        drop(device);
        assert_eq!(writer.write(&burst), 0);
        assert!(writer.is_broken(), "EPIPE");
    }

    #[test]
    fn portal_addresses_rotate_within_the_page() {
        let file = rustix::fs::memfd_create("portal", rustix::fs::MemfdFlags::empty()).unwrap();
        rustix::fs::ftruncate(&file, PAGE as u64).unwrap();
        let mut page = Page::map(file).map_err(|(reason, _)| reason).unwrap();
        let base = page.base.as_ptr().addr();
        let offsets: Vec<usize> = (0..130).map(|_| page.next().addr() - base).collect();
        assert!(offsets.iter().enumerate().all(|(i, &at)| at == i % 64 * 64), "{offsets:?}");
    }
}
