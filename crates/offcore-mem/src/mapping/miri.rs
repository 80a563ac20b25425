//! Mappings under Miri, which supports neither memfds nor shared mappings. An empty file represents a memfd, and all
//! mappings of a file are parts of one allocation, so that Miri checks all accesses of all parties.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fs::OpenOptions;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::mm::MapFlags;

use super::File;

/// The memory of a mapped file.
struct Pages {
    number: (u64, u64),
    /// Keeps the file open, so that no other file gets its number.
    _kept: OwnedFd,
    base: NonNull<u8>,
    layout: Layout,
    mappings: u32,
}

// SAFETY: an address range; users of its raw pointers justify their accesses.
unsafe impl Send for Pages {}

static MAPPED: Mutex<Vec<Pages>> = Mutex::new(Vec::new());

/// Returns a file's number and lengths.
pub(super) fn file(fd: BorrowedFd<'_>) -> Result<File, Errno> {
    let found = fd.try_clone_to_owned().map(std::fs::File::from).and_then(|file| file.metadata());
    let found = found.map_err(|_| Errno::BADF)?;
    Ok(File { number: (found.dev(), found.ino()), len: found.len(), block: 4096 })
}

/// Creates a file of `len` bytes.
pub(super) fn memfd(name: &str, len: usize, _flags: MemfdFlags) -> Result<OwnedFd, (&'static str, Errno)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("{name}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let made = OpenOptions::new().read(true).write(true).create_new(true).open(&path).and_then(|file| {
        std::fs::remove_file(&path)?;
        file.set_len(len as u64)?;
        Ok(file)
    });
    made.map(OwnedFd::from).map_err(|_| ("a file in place of a memfd", Errno::IO))
}

/// Files are never in hugetlbfs here.
pub(super) fn is_hugetlbfs(_fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(false)
}

/// Maps a part of the file's memory.
pub(super) fn map(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    _flags: MapFlags,
) -> Result<NonNull<u8>, Errno> {
    let File { number, len: size, .. } = file(fd)?;
    let size = usize::try_from(size).map_err(|_| Errno::OVERFLOW)?;
    let offset = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
    let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    let at = match mapped.iter().position(|pages| pages.number == number) {
        Some(at) => at,
        None => {
            let layout = Layout::from_size_align(size.max(1), rustix::param::page_size());
            let layout = layout.map_err(|_| Errno::NOMEM)?;
            // SAFETY: the layout's size is not 0.
            let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Errno::NOMEM)?;
            let kept = fd.try_clone_to_owned().map_err(|_| Errno::MFILE)?;
            mapped.push(Pages { number, _kept: kept, base, layout, mappings: 0 });
            mapped.len() - 1
        }
    };
    let pages = &mut mapped[at];
    if offset.checked_add(len).is_none_or(|end| end > pages.layout.size()) {
        return Err(Errno::INVAL);
    }
    pages.mappings += 1;
    // SAFETY: the range was just checked to be within the allocation.
    Ok(unsafe { pages.base.add(offset) })
}

/// Removes a mapping, and frees the memory with the last one.
///
/// # Safety
/// `map` must have created the mapping, and its addresses must not be used any more.
pub(super) unsafe fn unmap(base: NonNull<u8>, _len: usize) {
    let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    let is_of = |pages: &Pages| base.addr().get().wrapping_sub(pages.base.addr().get()) < pages.layout.size();
    let Some(at) = mapped.iter().position(is_of) else { return };
    mapped[at].mappings -= 1;
    if mapped[at].mappings == 0 {
        let pages = mapped.swap_remove(at);
        // SAFETY: `map` allocated it with this layout, and the callers guarantee that it is not used any more.
        unsafe { dealloc(pages.base.as_ptr(), pages.layout) };
    }
}

/// Miri does not support this system call.
pub(super) fn numa_node(_address: NonNull<u8>) -> Option<usize> {
    None
}
