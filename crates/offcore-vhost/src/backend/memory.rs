//! Guest memory as a front end describes it.

use std::os::fd::{AsFd, OwnedFd};

use offcore_mem::mapping::MemoryError;
use offcore_mem::{GuestMemory, GuestRegion, Mapping};

use super::ControlError;
use crate::message::{Code, MemoryRegion};

/// File systems whose pages come from the kernel (linux/magic.h): memfds and shared memory, hugepages, and disks of this
/// machine. On others (FUSE, a network's) whoever serves the file could keep a worker that touches a page waiting for ever.
/// Here a front end can delay it by what it has the kernel do with its file: a fault waits for a hole that is being
/// punched, 0.4 s for one of 2 GiB.
const FILE_SYSTEMS: [i64; 6] = [TMPFS, HUGETLBFS, RAMFS, EXT4, XFS, BTRFS];
const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;
const RAMFS: i64 = 0x8584_58f6;
const EXT4: i64 = 0xef53;
const XFS: i64 = 0x5846_5342;
const BTRFS: i64 = 0x9123_683e;

/// Maps the regions of a memory table. The files are closed; the mappings stay as long as the table.
pub(super) fn table(regions: Vec<(MemoryRegion, OwnedFd)>) -> Result<GuestMemory, ControlError> {
    let code = Code::SET_MEM_TABLE;
    let mapped: Result<Vec<_>, _> = regions.into_iter().map(|(region, fd)| map(code, &region, &fd)).collect();
    GuestMemory::new(mapped?).map_err(|source| ControlError::Table { code, source })
}

/// Maps one region, for the request `code`.
pub(super) fn map(code: Code, region: &MemoryRegion, fd: &OwnedFd) -> Result<GuestRegion, ControlError> {
    let &MemoryRegion { guest, size, user, mmap_offset } = region;
    let page = page_size(code, guest, fd)?;
    // A region need not begin or end at a page, least of all at a hugepage, but a mapping does.
    let begin = mmap_offset - mmap_offset % page;
    let range = || {
        let end = mmap_offset.checked_add(size)?.checked_next_multiple_of(page)?;
        // Only hugepages fill their file up to whole pages; of others the mapping ends where the region does.
        let end = if page > rustix::param::page_size() as u64 { end } else { mmap_offset + size };
        let len = usize::try_from(end - begin).ok()?;
        (size > 0).then_some((len, usize::try_from(mmap_offset - begin).ok()?))
    };
    let (len, offset) = range().ok_or(ControlError::Region { code, guest, size, mmap_offset })?;
    let mapping = Mapping::shared(fd.as_fd(), begin, len).map_err(|source| ControlError::Mapping {
        code,
        guest,
        source,
    })?;
    GuestRegion::new(guest, user, size, mapping, offset)
        .map_err(|source| ControlError::Table { code, source })
}

/// Bytes of a page of the file.
fn page_size(code: Code, guest: u64, fd: &OwnedFd) -> Result<u64, ControlError> {
    let stat = rustix::fs::fstatfs(fd).map_err(|source| {
        let source = MemoryError::System { what: "fstatfs", len: 0, source };
        ControlError::Mapping { code, guest, source }
    })?;
    if !FILE_SYSTEMS.contains(&stat.f_type) {
        return Err(ControlError::FileSystem { code, guest, found: stat.f_type });
    }
    let huge = (stat.f_type == HUGETLBFS).then(|| u64::try_from(stat.f_bsize).ok()).flatten();
    Ok(huge.unwrap_or(rustix::param::page_size() as u64).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn withholdable_memory_is_refused() {
        let region = MemoryRegion { guest: 0, size: 4096, user: 0, mmap_offset: 0 };
        let (_mapping, fd) = Mapping::memfd("guest", 4096, offcore_mem::Hugepages::None).unwrap();
        assert!(map(Code::ADD_MEM_REG, &region, &fd).is_ok());
        // Any file that is in none of these file systems.
        let fd = OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
        let error = map(Code::ADD_MEM_REG, &region, &fd).unwrap_err();
        assert!(matches!(error, ControlError::FileSystem { guest: 0, found: 0x9fa0, .. }), "{error}");
    }
}
