//! Guest memory as a front end describes it.

use std::os::fd::{AsFd, OwnedFd};

use offcore_mem::mapping::MemoryError;
use offcore_mem::{GuestMemory, GuestRegion, Mapping};

use super::ControlError;
use crate::message::{Code, MemoryRegion};

/// The file system of hugepages (linux/magic.h).
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// Maps the regions of a memory table. The files are closed; the mappings stay as long as the table.
pub(super) fn table(regions: Vec<(MemoryRegion, OwnedFd)>) -> Result<GuestMemory, ControlError> {
    let code = Code::SET_MEM_TABLE;
    let mapped: Result<Vec<_>, _> = regions.into_iter().map(|(region, fd)| map(code, &region, &fd)).collect();
    GuestMemory::new(mapped?).map_err(|source| ControlError::Table { code, source })
}

/// Maps one region, for the request `code`.
pub(super) fn map(code: Code, region: &MemoryRegion, fd: &OwnedFd) -> Result<GuestRegion, ControlError> {
    let &MemoryRegion { guest, size, user, mmap_offset } = region;
    let page = page_size(fd)
        .map_err(|source| ControlError::Mapping {
            code,
            guest,
            source: MemoryError::System { what: "fstatfs", len: 0, source },
        })?
        .max(1);
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
fn page_size(fd: &OwnedFd) -> Result<u64, rustix::io::Errno> {
    let stat = rustix::fs::fstatfs(fd)?;
    let huge = (stat.f_type == HUGETLBFS_MAGIC).then(|| u64::try_from(stat.f_bsize).ok()).flatten();
    Ok(huge.unwrap_or(rustix::param::page_size() as u64))
}
