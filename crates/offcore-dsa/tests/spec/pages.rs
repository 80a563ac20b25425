//! Memory with inaccessible pages, for the specification suite and the unit tests of the simulator.

const PAGE: usize = 4096;

/// Pages of memory, some of them inaccessible.
pub(crate) struct Pages {
    base: *mut u8,
    pages: usize,
}

impl Pages {
    /// Maps `pages` pages; the pages in `holes` are inaccessible.
    pub(crate) fn with_holes(pages: usize, holes: std::ops::Range<usize>) -> Self {
        Self::protected(pages, holes, libc::PROT_NONE)
    }

    /// Maps `pages` pages; the pages in `range` have another protection.
    pub(crate) fn protected(pages: usize, range: std::ops::Range<usize>, protection: libc::c_int) -> Self {
        // SAFETY: this creates a new anonymous mapping.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                pages * PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        let this = Self { base: base.cast(), pages };
        this.protect(range, protection);
        this
    }

    /// Changes the protection of some pages.
    pub(crate) fn protect(&self, range: std::ops::Range<usize>, protection: libc::c_int) {
        assert!(range.end <= self.pages);
        // SAFETY: the range is in the mapping.
        let outcome = unsafe {
            libc::mprotect(self.base.add(range.start * PAGE).cast(), range.len() * PAGE, protection)
        };
        assert_eq!(outcome, 0);
    }

    /// Returns the address `offset` bytes after the start.
    pub(crate) fn at(&self, offset: usize) -> u64 {
        self.base as u64 + offset as u64
    }

    /// Returns the bytes at an offset. They must be accessible.
    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.pages * PAGE);
        // SAFETY: the range is in the mapping; the device is not running.
        unsafe { std::slice::from_raw_parts(self.base.add(offset), len).to_vec() }
    }

    /// Writes bytes at an offset. They must be accessible.
    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.pages * PAGE);
        // SAFETY: the range is in the mapping; the device is not running.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.add(offset), bytes.len()) };
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and nothing uses it any more.
        unsafe { libc::munmap(self.base.cast(), self.pages * PAGE) };
    }
}
