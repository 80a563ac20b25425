//! Mapping of guest memory as described by a front end.

use std::os::fd::AsFd;
use std::sync::Arc;

use offcore_mem::mapping::MemoryError;
use offcore_mem::{GuestMemory, GuestRegion, Mapping};

use super::ControlError;
use crate::message::{Code, MemoryRegion};
use crate::passed::PassedFd;

/// File systems whose pages are provided by the kernel (linux/magic.h): memfds and other shared memory, hugepages, and
/// local disks. With other file systems (FUSE, network file systems), the server of the file could block a worker that
/// touches a page forever. With these, a front end can only delay a worker by operations on its file: a page fault
/// waits while a hole is punched. This takes 0.4 s for a hole of 2 GiB, and minutes if the punching process gets almost
/// no CPU time.
const FILE_SYSTEMS: [i64; 6] = [TMPFS, HUGETLBFS, RAMFS, EXT4, XFS, BTRFS];
const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;
const RAMFS: i64 = 0x8584_58f6;
const EXT4: i64 = 0xef53;
const XFS: i64 = 0x5846_5342;
const BTRFS: i64 = 0x9123_683e;

/// Maximum number of bytes that a front end may map in addition to guest memory. Half of it is enough for the dirty log
/// of 4 TiB, the other half for the descriptors in flight of 256 long virtqueues. It does not count as guest memory, so
/// that a guest that uses its whole limit can migrate.
const MAX_NON_GUEST: u64 = 256 << 20;

/// Maps the regions of a memory table, up to `most` bytes together. Regions that are `present` are shared and not
/// mapped again. The files are closed; the mappings live as long as the table.
pub(super) fn table(
    regions: Vec<(MemoryRegion, PassedFd)>,
    present: &[Arc<GuestRegion>],
    most: u64,
) -> Result<GuestMemory, ControlError> {
    let code = Code::SET_MEM_TABLE;
    let parts: Result<Vec<_>, _> = regions.iter().map(|(region, fd)| Part::of(code, region, fd)).collect();
    let parts = parts?;
    check(code, parts.iter().map(|part| part.len as u64), most)?;
    let mapped = regions.iter().zip(parts).map(|((region, fd), part)| {
        match present.iter().find(|known| part.is_mapped(known, region, fd)) {
            Some(known) => Ok(Arc::clone(known)),
            None => map(code, region, fd, &part).map(Arc::new),
        }
    });
    GuestMemory::sharing(mapped.collect::<Result<_, _>>()?)
        .map_err(|source| ControlError::Table { code, source })
}

/// Maps one region in addition to `others`, for the request `code`. All of them together must not exceed `most` bytes.
pub(super) fn region(
    code: Code,
    region: &MemoryRegion,
    fd: &PassedFd,
    others: &[Arc<GuestRegion>],
    most: u64,
) -> Result<GuestRegion, ControlError> {
    let part = Part::of(code, region, fd)?;
    check(code, [mapped(others), part.len as u64].into_iter(), most)?;
    map(code, region, fd, &part)
}

/// Maps memory that is not guest memory, with the given length and offset in its file. `mapped` is the number of bytes
/// of this kind that are already mapped. Returns the mapping and the offset of the requested range in it.
pub(super) fn beside(
    code: Code,
    size: u64,
    offset: u64,
    fd: &PassedFd,
    mapped: u64,
) -> Result<(Mapping, usize), ControlError> {
    // Treated like a region at guest address 0.
    let region = MemoryRegion { guest: 0, size, user: 0, mmap_offset: offset };
    let part = Part::of(code, &region, fd)?;
    let found = mapped.saturating_add(part.len as u64);
    if found > MAX_NON_GUEST {
        return Err(ControlError::NonGuestLimit {
            code,
            found: found.div_ceil(1 << 20),
            most: MAX_NON_GUEST >> 20,
        });
    }
    let mapping = Mapping::shared(fd.as_fd(), part.begin, part.len)
        .map_err(|source| ControlError::Mapping { code, guest: 0, source })?;
    Ok((mapping, part.offset))
}

/// Number of bytes mapped for `regions`.
fn mapped(regions: &[Arc<GuestRegion>]) -> u64 {
    regions.iter().map(|region| region.mapping().len() as u64).sum()
}

/// Refuses more than `most` bytes of address space, because one front end could use up the address space of all others.
fn check(code: Code, lengths: impl Iterator<Item = u64>, most: u64) -> Result<(), ControlError> {
    let found = lengths.fold(0, u64::saturating_add);
    if found > most {
        return Err(ControlError::TooMuch { code, found: found.div_ceil(1 << 20), most: most >> 20 });
    }
    Ok(())
}

/// The part of a file that is mapped for a region.
struct Part {
    /// Offset of the part in the file, and its length.
    begin: u64,
    len: usize,
    /// Offset of the region in the part.
    offset: usize,
}

impl Part {
    fn of(code: Code, region: &MemoryRegion, fd: &PassedFd) -> Result<Self, ControlError> {
        let &MemoryRegion { guest, size, mmap_offset, .. } = region;
        let page = page_size(code, guest, fd)?;
        // A region may begin and end inside a page (or hugepage), but a mapping may not.
        let begin = mmap_offset - mmap_offset % page;
        let part = || {
            let end = mmap_offset.checked_add(size)?.checked_next_multiple_of(page)?;
            // Only files of hugepages have whole pages. For other files, the mapping ends where the region ends.
            let end = if page > rustix::param::page_size() as u64 { end } else { mmap_offset + size };
            let len = usize::try_from(end - begin).ok()?;
            let offset = usize::try_from(mmap_offset - begin).ok()?;
            (size > 0).then_some(Self { begin, len, offset })
        };
        part().ok_or(ControlError::Region { code, guest, size, mmap_offset })
    }

    /// Whether the region in `fd` is the same as `known`, and no part of it has vanished.
    fn is_mapped(&self, known: &GuestRegion, region: &MemoryRegion, fd: &PassedFd) -> bool {
        (known.guest(), known.len(), known.user()) == (region.guest, region.size, region.user)
            && (known.offset(), known.mapping().len()) == (self.offset, self.len)
            && known.mapping().is_of(fd.as_fd(), self.begin)
            && !known.vanished()
    }
}

fn map(code: Code, region: &MemoryRegion, fd: &PassedFd, part: &Part) -> Result<GuestRegion, ControlError> {
    let &MemoryRegion { guest, size, user, .. } = region;
    let mapping = Mapping::shared(fd.as_fd(), part.begin, part.len)
        .map_err(|source| ControlError::Mapping { code, guest, source })?;
    GuestRegion::new(guest, user, size, mapping, part.offset)
        .map_err(|source| ControlError::Table { code, source })
}

/// Page size of the file system in bytes.
fn page_size(code: Code, guest: u64, fd: &PassedFd) -> Result<u64, ControlError> {
    let stat = fd.file_system().map_err(|source| {
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
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::passed::Errands;

    #[test]
    fn memory_on_unknown_file_systems_is_refused() {
        let region = |fd: OwnedFd| {
            let fd = PassedFd::new(fd, &Errands::default());
            let region = MemoryRegion { guest: 0, size: 4096, user: 0, mmap_offset: 0 };
            super::region(Code::ADD_MEM_REG, &region, &fd, &[], 4096)
        };
        let (_mapping, fd) = Mapping::memfd("guest", 4096, offcore_mem::Hugepages::None).unwrap();
        assert!(region(fd).is_ok());
        // A file on none of these file systems.
        let fd = OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
        let error = region(fd).unwrap_err();
        assert!(matches!(error, ControlError::FileSystem { guest: 0, found: 0x9fa0, .. }), "{error}");
    }
}
