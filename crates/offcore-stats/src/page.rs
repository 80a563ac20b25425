//! The shared statistics page: named blocks of single-writer counters in a memfd.
//!
//! ```text
//! page    | magic u64 | blocks << 32 | layout version u64 | then blocks, each aligned to 64 bytes |
//! block   | name 64 B | counters u64 | names counters × 32 B | values counters × 8 B (own cache lines) |
//! ```
//! A block is written completely before the page's block count includes it, so a reader that maps the memfd read-only
//! never sees a partial block. After that, one worker stores the values, and any process loads them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::counter::Counter;

const MAGIC: u64 = u64::from_le_bytes(*b"offstats");
const VERSION: u32 = 1;
const HEADER: usize = 64;
const NAME: usize = 64;
const COUNTER_NAME: usize = 32;
const LINE: usize = 64;

/// Errors of a statistics page.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum PageError {
    /// statistics page: {0}
    System(#[from] rustix::io::Errno),
    /// statistics page is full: block '{name}' needs {needed} bytes, {left} are left
    Full { name: String, needed: usize, left: usize },
    /// not a statistics page of version {VERSION:?}: magic {magic:#x}, version {version}
    Foreign { magic: u64, version: u32 },
    /// statistics page is damaged at offset {0}
    Damaged(usize),
}

#[derive(Debug)]
struct Memory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is shared memory. After a block is created it is only accessed through atomics, and directory
// bytes are written under the page's mutex before the block count is released.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`; all concurrent accesses use atomics.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(fd: BorrowedFd<'_>, len: usize, prot: ProtFlags) -> Result<Self, PageError> {
        // SAFETY: a new shared mapping at an address that the kernel chooses does not affect existing memory.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        Ok(Self { base: NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?, len })
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "offset {offset}+{len} of {}",
            self.len
        );
        // SAFETY: the assertion ensures that the pointer is within the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Returns the version and the number of blocks. Both are in one word, because atomic accesses of different sizes
    /// to the same bytes are undefined behaviour.
    fn version_and_blocks(&self) -> (u32, u32) {
        let word = self.word(8).load(Ordering::Acquire);
        (word as u32, (word >> 32) as u32)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: `at` checks the range; callers pass multiples of 8, and the mapping is page aligned.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }

    fn text(&self, offset: usize, len: usize) -> String {
        let bytes: Vec<u8> = (0..len)
            // SAFETY: `at` checks the range; a volatile read copies the byte from memory that another process may
            // write.
            .map(|i| unsafe { self.at(offset + i, 1).read_volatile() })
            .take_while(|&b| b != 0)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and every block holds the Arc that owns it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The writer's side of the page, which creates blocks. Cold path only.
#[derive(Debug)]
pub struct StatsPage {
    memory: Arc<Memory>,
    fd: OwnedFd,
    next: Mutex<usize>,
}

impl StatsPage {
    /// Creates a page of `len` bytes in a new memfd.
    ///
    /// # Errors
    /// The kernel has no memory for it.
    pub fn new(len: usize) -> Result<Self, PageError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("offcore-stats", flags)?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        let memory = Memory::map(fd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        // Other processes with this fd can neither remove pages from the memfd nor write to it.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        memory.word(0).store(MAGIC, Ordering::Relaxed);
        memory.word(8).store(u64::from(VERSION), Ordering::Relaxed);
        Ok(Self { memory: Arc::new(memory), fd, next: Mutex::new(HEADER) })
    }

    /// Returns the memfd, to be mapped by readers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Creates a block `name` of counters.
    ///
    /// # Errors
    /// [`PageError::Full`].
    ///
    /// # Panics
    /// If a name is longer than its field (63 bytes for the block, 31 for a counter).
    pub fn block(&self, name: &str, counters: &[&str]) -> Result<Block, PageError> {
        assert!(name.len() < NAME, "block name '{name}' is longer than {} bytes", NAME - 1);
        let mut next = self.next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let values = (*next + NAME + LINE + counters.len() * COUNTER_NAME).next_multiple_of(LINE);
        let end = (values + counters.len() * 8).next_multiple_of(LINE);
        if end > self.memory.len {
            return Err(PageError::Full {
                name: name.into(),
                needed: end - *next,
                left: self.memory.len - *next,
            });
        }
        self.write(*next, name);
        self.memory.word(*next + NAME).store(counters.len() as u64, Ordering::Relaxed);
        for (i, counter) in counters.iter().enumerate() {
            assert!(
                counter.len() < COUNTER_NAME,
                "counter name '{counter}' is longer than {} bytes",
                COUNTER_NAME - 1
            );
            self.write(*next + NAME + LINE + i * COUNTER_NAME, counter);
        }
        self.memory.word(8).fetch_add(1 << 32, Ordering::Release);
        *next = end;
        Ok(Block::at(&self.memory, values, counters.len()))
    }

    fn write(&self, offset: usize, text: &str) {
        let to = self.memory.at(offset, text.len());
        // SAFETY: `at` checked the range, the source is a live str, and the two cannot overlap.
        unsafe { to.copy_from_nonoverlapping(text.as_ptr(), text.len()) };
    }
}

/// A block of counters: a part of the page that one worker writes.
#[derive(Clone, Debug)]
pub struct Block {
    _memory: Option<Arc<Memory>>,
    values: NonNull<Counter>,
    len: usize,
}

// SAFETY: the values are atomics, kept alive by `_memory` (or leaked, for a private block).
unsafe impl Send for Block {}
// SAFETY: as for `Send`; the values are atomics.
unsafe impl Sync for Block {}

impl Block {
    /// Creates a block outside any page, for tests and benchmarks. It lives as long as the process.
    pub fn private(counters: &[&str]) -> Self {
        let values: &'static [Counter] = Box::leak(counters.iter().map(|_| Counter::new()).collect());
        Self { _memory: None, values: NonNull::from(values).cast(), len: counters.len() }
    }

    fn at(memory: &Arc<Memory>, offset: usize, len: usize) -> Self {
        let values = memory.at(offset, len * 8).cast();
        // SAFETY: `at` never returns null, because it points into the mapping.
        Self { _memory: Some(Arc::clone(memory)), values: unsafe { NonNull::new_unchecked(values) }, len }
    }

    /// Returns the number of counters.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns counter `index`, in the order of the names with which the block was created.
    ///
    /// # Panics
    /// If `index` is not below [`Block::len`].
    #[inline(always)]
    pub fn counter(&self, index: usize) -> &Counter {
        assert!(index < self.len);
        // SAFETY: `values` points to `len` counters that live as long as self; the index was just checked.
        unsafe { self.values.add(index).as_ref() }
    }

    /// Stores `values` in the first counters, in order.
    pub fn set(&self, values: impl IntoIterator<Item = u64>) {
        for (index, value) in values.into_iter().enumerate() {
            self.counter(index).set(value);
        }
    }
}

/// The contents of a block as seen by a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub name: String,
    /// Counter names and values.
    pub counters: Vec<(String, u64)>,
}

/// A reader's side of the page, mapped read-only.
#[derive(Debug)]
pub struct Reader(Memory);

impl Reader {
    /// Maps the page behind `fd`.
    ///
    /// # Errors
    /// [`PageError::Foreign`] if it is not a statistics page of this version.
    pub fn open(fd: BorrowedFd<'_>) -> Result<Self, PageError> {
        let len = usize::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
        if len < HEADER {
            return Err(PageError::Foreign { magic: 0, version: 0 });
        }
        let memory = Memory::map(fd, len, ProtFlags::READ)?;
        let magic = memory.word(0).load(Ordering::Relaxed);
        let (version, _) = memory.version_and_blocks();
        if magic != MAGIC || version != VERSION {
            return Err(PageError::Foreign { magic, version });
        }
        Ok(Self(memory))
    }

    /// Returns the present contents of every block.
    ///
    /// # Errors
    /// [`PageError::Damaged`] if the directory points outside the page.
    pub fn read(&self) -> Result<Vec<Snapshot>, PageError> {
        let mut offset = HEADER;
        let (_, blocks) = self.0.version_and_blocks();
        (0..blocks).map(|_| self.read_block(&mut offset)).collect()
    }

    fn read_block(&self, offset: &mut usize) -> Result<Snapshot, PageError> {
        let (at, left) = (*offset, self.0.len.saturating_sub(*offset));
        if left < NAME + LINE {
            return Err(PageError::Damaged(at));
        }
        let count = usize::try_from(self.0.word(at + NAME).load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        if count > left / (COUNTER_NAME + 8) {
            return Err(PageError::Damaged(at));
        }
        let values = (at + NAME + LINE + count * COUNTER_NAME).next_multiple_of(LINE);
        let end = (values + count * 8).next_multiple_of(LINE);
        if end > self.0.len {
            return Err(PageError::Damaged(at));
        }
        *offset = end;
        let counters = (0..count)
            .map(|i| {
                let name = self.0.text(at + NAME + LINE + i * COUNTER_NAME, COUNTER_NAME);
                (name, self.0.word(values + i * 8).load(Ordering::Relaxed))
            })
            .collect();
        Ok(Snapshot { name: self.0.text(at, NAME), counters })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reader_sees_worker_counters() {
        let page = StatsPage::new(1 << 16).unwrap();
        let a = page.block("worker0", &["rx", "tx"]).unwrap();
        let b = page.block("worker1", &["drops"]).unwrap();
        let reader = Reader::open(page.fd()).unwrap();
        a.counter(1).add(7);
        b.counter(0).add(3);
        b.counter(0).add(1);
        let seen = reader.read().unwrap();
        assert_eq!(
            seen[0],
            Snapshot { name: "worker0".into(), counters: vec![("rx".into(), 0), ("tx".into(), 7)] }
        );
        assert_eq!(seen[1].counters, vec![("drops".into(), 4)]);
    }

    #[test]
    fn readers_can_only_read() {
        let page = StatsPage::new(4096).unwrap();
        assert_eq!(rustix::fs::ftruncate(page.fd(), 0), Err(rustix::io::Errno::PERM));
        assert!(Memory::map(page.fd(), 4096, ProtFlags::READ | ProtFlags::WRITE).is_err());
        assert!(Memory::map(page.fd(), 4096, ProtFlags::READ).is_ok());
    }

    #[test]
    fn full_page_is_an_error() {
        let page = StatsPage::new(4096).unwrap();
        let names = ["n"; 200];
        assert!(matches!(page.block("big", &names), Err(PageError::Full { .. })));
    }

    #[test]
    fn a_foreign_file_is_refused() {
        let fd = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert!(matches!(Reader::open(fd.as_fd()), Err(PageError::Foreign { .. })));
    }
}
