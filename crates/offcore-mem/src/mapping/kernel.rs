//! The system calls for mappings. `miri.rs` replaces this file under Miri.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::File;

/// Creates a memfd of `len` bytes; an error includes the name of the call that failed.
pub(super) fn memfd(name: &str, len: usize, flags: MemfdFlags) -> Result<OwnedFd, (&'static str, Errno)> {
    let fail = |call| move |error| (call, error);
    let fd = rustix::fs::memfd_create(name, flags).map_err(fail("memfd_create"))?;
    rustix::fs::ftruncate(&fd, len as u64).map_err(fail("ftruncate"))?;
    // The seals keep other parties from shortening the file. They can punch holes, so shared memory has ordinary pages.
    let seals = SealFlags::SHRINK | SealFlags::GROW;
    rustix::fs::fcntl_add_seals(&fd, seals).map_err(fail("sealing a memfd"))?;
    Ok(fd)
}

/// Returns a file's number and lengths.
pub(super) fn file(fd: BorrowedFd<'_>) -> Result<File, Errno> {
    let stat = rustix::fs::fstat(fd)?;
    Ok(File {
        number: (stat.st_dev, stat.st_ino),
        len: u64::try_from(stat.st_size).unwrap_or(0),
        block: stat.st_blksize,
    })
}

/// Returns whether a file is in hugetlbfs.
pub(super) fn is_hugetlbfs(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(rustix::fs::fstatfs(fd)?.f_type == libc::HUGETLBFS_MAGIC)
}

/// Maps a part of a file as shared, readable and writable memory.
pub(super) fn map(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    flags: MapFlags,
) -> Result<NonNull<u8>, Errno> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses does not affect existing memory.
    let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED | flags, fd, offset) }?;
    NonNull::new(base.cast()).ok_or(Errno::NOMEM)
}

/// Removes a mapping.
///
/// # Safety
/// `map` must have created the mapping, and its addresses must not be used any more.
pub(super) unsafe fn unmap(base: NonNull<u8>, len: usize) {
    // SAFETY: the caller guarantees that `map` created the mapping and that it is not used any more.
    let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), len) };
}

/// Returns the NUMA node of the page at `address`, with get_mempolicy(MPOL_F_NODE | MPOL_F_ADDR).
pub(super) fn numa_node(address: NonNull<u8>) -> Option<usize> {
    const MPOL_F_NODE: libc::c_ulong = 1;
    const MPOL_F_ADDR: libc::c_ulong = 2;
    let mut node: libc::c_int = -1;
    // SAFETY: `node` outlives the call; the kernel checks the address; a null mask of zero bits is allowed.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut node,
            ptr::null_mut::<libc::c_ulong>(),
            0 as libc::c_ulong,
            address.as_ptr(),
            MPOL_F_NODE | MPOL_F_ADDR,
        )
    };
    (rc == 0).then(|| usize::try_from(node).ok())?
}
