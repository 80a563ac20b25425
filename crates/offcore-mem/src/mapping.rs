//! Shared mappings of memfds and of files that other parties pass.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::str::FromStr;

use rustix::fs::MemfdFlags;
use rustix::mm::MapFlags;

mod available;
#[cfg_attr(miri, path = "mapping/miri.rs")]
mod kernel;

pub use available::{all_memory, available_memory};

/// Properties of a file.
struct File {
    /// Its device and inode numbers.
    number: (u64, u64),
    /// Length of the file, and of a block of its file system, in bytes.
    len: u64,
    block: i64,
}

/// The page size of a mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hugepages {
    /// The largest available pages: 1 GiB pages if the length is at least 1 GiB, then 2 MiB pages, then ordinary pages.
    #[default]
    Auto,
    /// 1 GiB pages or an error.
    Size1G,
    /// 2 MiB pages or an error.
    Size2M,
    /// Ordinary pages.
    None,
}

impl FromStr for Hugepages {
    type Err = MemoryError;

    fn from_str(text: &str) -> Result<Self, MemoryError> {
        match text {
            "auto" => Ok(Self::Auto),
            "1G" => Ok(Self::Size1G),
            "2M" => Ok(Self::Size2M),
            "none" => Ok(Self::None),
            _ => Err(MemoryError::Syntax { found: text.into() }),
        }
    }
}

/// Errors of the creation and the mapping of memory.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum MemoryError {
    /// hugepages '{found}': expected auto, 1G, 2M or none
    Syntax { found: String },
    /// {len} bytes of {page_size} kB hugepages cannot be had ({source}): set
    /// /sys/kernel/mm/hugepages/hugepages-{page_size}kB/nr_hugepages, or use --hugepages none
    Hugepages { len: usize, page_size: usize, source: rustix::io::Errno },
    /// {wanted} MiB of memory are wanted and {available} MiB are available: use fewer (--mbufs) or smaller
    /// (--mbuf-size) packet buffers
    TooLarge { wanted: usize, available: usize },
    /// {what} of {len} bytes: {source}
    System { what: &'static str, len: usize, source: rustix::io::Errno },
    /// a mapping of {len} bytes at offset {offset} needs a longer file: it has {file} bytes
    Short { len: usize, offset: u64, file: u64 },
}

/// A shared, writable mapping. It provides addresses instead of slices, because other parties write to it.
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    page_size: usize,
    numa_node: Option<usize>,
    /// Device and inode of the file, and the mapping's offset in it. No other file has these numbers while this one is
    /// mapped.
    file: (u64, u64, u64),
}

// SAFETY: a mapping is an address range; users of its raw pointers justify their accesses.
unsafe impl Send for Mapping {}
// SAFETY: a mapping is an address range; users of its raw pointers justify their accesses.
unsafe impl Sync for Mapping {}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}+{:#x} ({} KiB pages)", self.base, self.len, self.page_size >> 10)
    }
}

impl Mapping {
    /// Creates `len` bytes (rounded up to whole pages) of new shared memory, sealed against shrinking and already
    /// populated. Returns the mapping and its memfd.
    ///
    /// # Errors
    /// If not enough memory of that page size is available.
    pub fn memfd(name: &str, len: usize, hugepages: Hugepages) -> Result<(Self, OwnedFd), MemoryError> {
        let sizes: &[usize] = match hugepages {
            Hugepages::Auto if len >= 1 << 30 => &[1 << 30, 2 << 20, 0],
            Hugepages::Auto => &[2 << 20, 0],
            Hugepages::Size1G => &[1 << 30],
            Hugepages::Size2M => &[2 << 20],
            Hugepages::None => &[0],
        };
        let mut result = Self::new_memfd(name, len, sizes[0], MapFlags::POPULATE);
        for &page_size in &sizes[1..] {
            if result.is_ok() {
                break;
            }
            result = Self::new_memfd(name, len, page_size, MapFlags::POPULATE);
        }
        result
    }

    /// The same with ordinary pages that are not populated. The kernel allocates each page on first access.
    ///
    /// # Errors
    /// If not enough memory is available.
    pub fn untouched_memfd(name: &str, len: usize) -> Result<(Self, OwnedFd), MemoryError> {
        Self::new_memfd(name, len, 0, MapFlags::empty())
    }

    fn new_memfd(
        name: &str,
        len: usize,
        huge: usize,
        mapped_with: MapFlags,
    ) -> Result<(Self, OwnedFd), MemoryError> {
        let page_size = if huge == 0 { rustix::param::page_size() } else { huge };
        let len = len.checked_next_multiple_of(page_size).unwrap_or(len);
        let fail = |what| {
            move |source| match huge {
                0 => MemoryError::System { what, len, source },
                _ => MemoryError::Hugepages { len, page_size: huge >> 10, source },
            }
        };
        // Ordinary pages are not reserved: if too many of them are accessed, the kernel kills this process and possibly
        // others.
        if huge == 0
            && let Some(available) = available_memory().filter(|&available| len > available)
        {
            return Err(MemoryError::TooLarge { wanted: len >> 20, available: available >> 20 });
        }
        let flags = MemfdFlags::CLOEXEC
            | MemfdFlags::ALLOW_SEALING
            | match huge {
                0 => MemfdFlags::empty(),
                size if size == 2 << 20 => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
                _ => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
            };
        let fd = kernel::memfd(name, len, flags).map_err(|(what, source)| fail(what)(source))?;
        // mmap reserves hugepages or fails here, instead of a SIGBUS later. POPULATE allocates them.
        let mapping = Self::map(fd.as_fd(), 0, len, page_size, mapped_with).map_err(fail("mmap"))?;
        Ok((mapping, fd))
    }

    /// Maps `len` bytes at `offset` of a file that another party passed.
    ///
    /// # Errors
    /// [`MemoryError::Short`] if the file is shorter; otherwise the kernel's error.
    pub fn shared(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Self, MemoryError> {
        let fail = |what| move |source| MemoryError::System { what, len, source };
        let found = kernel::file(fd).map_err(fail("fstat"))?;
        let file = found.len;
        if offset.checked_add(len as u64).is_none_or(|end| end > file) {
            return Err(MemoryError::Short { len, offset, file });
        }
        // Only hugetlbfs reports its page size in st_blksize. On other file systems the value can be arbitrary.
        let huge = kernel::is_hugetlbfs(fd).map_err(fail("fstatfs"))?;
        let ordinary = rustix::param::page_size();
        let page_size = if huge { usize::try_from(found.block).unwrap_or(ordinary) } else { ordinary };
        Self::map(fd, offset, len, page_size, MapFlags::empty()).map_err(fail("mmap"))
    }

    fn map(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        page_size: usize,
        flags: MapFlags,
    ) -> Result<Self, rustix::io::Errno> {
        let (device, inode) = kernel::file(fd)?.number;
        let base = kernel::map(fd, offset, len, flags)?;
        Ok(Self { base, len, page_size, numa_node: kernel::numa_node(base), file: (device, inode, offset) })
    }

    /// Returns whether this maps the file `fd` at `offset`.
    pub fn is_of(&self, fd: BorrowedFd<'_>, offset: u64) -> bool {
        kernel::file(fd).is_ok_and(|file| self.file == (file.number.0, file.number.1, offset))
    }

    /// Returns the first byte of the mapping, which is page aligned.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the page size in bytes.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the NUMA node of the first page, if the kernel reported it.
    pub fn numa_node(&self) -> Option<usize> {
        self.numa_node
    }

    /// Copies `bytes.len()` bytes at `offset` out of the mapping. Another party may write them concurrently: each byte
    /// is read once, with the value that it has at that time.
    ///
    /// # Panics
    /// If the range is not within the mapping.
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) {
        self.check(offset, bytes.len());
        // SAFETY: the range was just checked to be within the mapping.
        let from = unsafe { self.base.add(offset) };
        let (words, rest) = bytes.as_chunks_mut::<8>();
        let done = words.len() * 8;
        for (i, word) in words.iter_mut().enumerate() {
            // SAFETY: within the range; an array of bytes needs no alignment.
            *word = unsafe { from.cast::<[u8; 8]>().add(i).read_volatile() };
        }
        for (i, byte) in rest.iter_mut().enumerate() {
            // SAFETY: within the range.
            *byte = unsafe { from.add(done + i).read_volatile() };
        }
    }

    /// Copies `bytes` to `offset` of the mapping.
    ///
    /// # Panics
    /// If the range is not within the mapping.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: the range was just checked to be within the mapping.
        let to = unsafe { self.base.add(offset) };
        let (words, rest) = bytes.as_chunks::<8>();
        let done = words.len() * 8;
        for (i, word) in words.iter().enumerate() {
            // SAFETY: within the range; an array of bytes needs no alignment.
            unsafe { to.cast::<[u8; 8]>().add(i).write_volatile(*word) };
        }
        for (i, byte) in rest.iter().enumerate() {
            // SAFETY: within the range.
            unsafe { to.add(done + i).write_volatile(*byte) };
        }
    }

    fn check(&self, offset: usize, len: usize) {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{offset}+{len} in a mapping of {} bytes", self.len);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` created this range; users of its addresses keep the mapping alive while they use them.
        unsafe { kernel::unmap(self.base, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memfd_is_seen_through_a_second_mapping() {
        let (a, fd) = Mapping::memfd("test", 10_000, Hugepages::None).unwrap();
        assert_eq!(a.len(), 12288);
        let b = Mapping::shared(fd.as_fd(), 4096, 8192).unwrap();
        // SAFETY: both addresses are within their mappings.
        unsafe {
            a.base().add(4096).write_volatile(7);
            assert_eq!(b.base().read_volatile(), 7);
        }
    }

    #[test]
    fn mapping_reads_back_written_bytes() {
        let (mapping, _fd) = Mapping::memfd("test", 4096, Hugepages::None).unwrap();
        for (offset, len) in [(0, 0), (1, 7), (3, 8), (5, 29), (4096, 0), (4000, 96)] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + offset + 1) as u8).collect();
            mapping.write_at(offset, &bytes);
            let mut read = vec![0; len];
            mapping.read_at(offset, &mut read);
            assert_eq!(read, bytes);
        }
        for (offset, len) in [(4096, 1), (usize::MAX, 1), (0, 4097)] {
            let read = std::panic::catch_unwind(|| mapping.read_at(offset, &mut vec![0; len]));
            read.expect_err("outside the mapping");
        }
    }

    #[test]
    fn a_short_file_is_refused() {
        let (_a, fd) = Mapping::memfd("test", 4096, Hugepages::None).unwrap();
        assert!(matches!(Mapping::shared(fd.as_fd(), 4096, 1), Err(MemoryError::Short { file: 4096, .. })));
        assert!(matches!(Mapping::shared(fd.as_fd(), u64::MAX, 4096), Err(MemoryError::Short { .. })));
    }

    #[test]
    #[cfg_attr(miri, ignore = "truncates a memfd")]
    fn our_memory_cannot_be_truncated() {
        let (_a, fd) = Mapping::memfd("test", 8192, Hugepages::None).unwrap();
        assert_eq!(rustix::fs::ftruncate(&fd, 4096), Err(rustix::io::Errno::PERM));
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads the memory of the machine")]
    fn excessive_memory_is_not_asked_for() {
        let available = available_memory().unwrap();
        for (len, hugepages) in [
            (1 << 44, Hugepages::None),
            (1 << 50, Hugepages::Auto),
            (available + (64 << 30), Hugepages::None),
        ] {
            let error = Mapping::memfd("test", len, hugepages).unwrap_err();
            assert!(matches!(error, MemoryError::TooLarge { wanted, .. } if wanted >= len >> 20), "{error}");
            let text = error.to_string();
            assert!(text.contains(&format!("{} MiB", len >> 20)) && text.contains("--mbufs"), "{text}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks for hugepages")]
    fn hugepages_fall_back_or_report() {
        assert!(Mapping::memfd("test", 4 << 20, Hugepages::Auto).is_ok());
        if let Err(error) = Mapping::memfd("test", 1 << 42, Hugepages::Size2M) {
            assert!(error.to_string().contains("--hugepages none"), "{error}");
        }
        assert!("3M".parse::<Hugepages>().is_err());
    }
}
