//! The system calls of mappings. Under Miri another file takes this one's place.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::File;

/// A memfd of `len` bytes; an error comes with the call that failed.
pub(super) fn memfd(name: &str, len: usize, flags: MemfdFlags) -> Result<OwnedFd, (&'static str, Errno)> {
    let fail = |call| move |error| (call, error);
    let fd = rustix::fs::memfd_create(name, flags).map_err(fail("memfd_create"))?;
    rustix::fs::ftruncate(&fd, len as u64).map_err(fail("ftruncate"))?;
    // Other parties cannot shorten the file. They can punch holes into it, so shared memory has ordinary pages.
    let seals = SealFlags::SHRINK | SealFlags::GROW;
    rustix::fs::fcntl_add_seals(&fd, seals).map_err(fail("sealing a memfd"))?;
    Ok(fd)
}

/// Finds a file's number and lengths.
pub(super) fn file(fd: BorrowedFd<'_>) -> Result<File, Errno> {
    let stat = rustix::fs::fstat(fd)?;
    Ok(File {
        number: (stat.st_dev, stat.st_ino),
        len: u64::try_from(stat.st_size).unwrap_or(0),
        block: stat.st_blksize,
    })
}

/// Whether a file consists of hugepages.
pub(super) fn is_hugetlbfs(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(rustix::fs::fstatfs(fd)?.f_type == libc::HUGETLBFS_MAGIC)
}

/// Maps a part of a file, to read and write it together with others.
pub(super) fn map(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    flags: MapFlags,
) -> Result<NonNull<u8>, Errno> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
    let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED | flags, fd, offset) }?;
    NonNull::new(base.cast()).ok_or(Errno::NOMEM)
}

/// Takes a mapping away.
///
/// # Safety
/// `map` made the mapping, and its addresses are no longer used.
pub(super) unsafe fn unmap(base: NonNull<u8>, len: usize) {
    // SAFETY: as the caller promises.
    let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), len) };
}

/// The node that holds the page at `address`, by get_mempolicy(MPOL_F_NODE | MPOL_F_ADDR).
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
