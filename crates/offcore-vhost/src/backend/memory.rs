//! Guest memory as a front end describes it.

use std::os::fd::AsFd;
use std::sync::Arc;

use offcore_mem::mapping::MemoryError;
use offcore_mem::{GuestMemory, GuestRegion, Mapping};

use super::ControlError;
use crate::message::{Code, MemoryRegion};
use crate::passed::PassedFd;

/// File systems whose pages come from the kernel (linux/magic.h): memfds and shared memory, hugepages, and disks of this
/// machine. On others (FUSE, a network's) whoever serves the file could keep a worker that touches a page waiting for ever.
/// Here a front end can delay it by what it has the kernel do with its file: a fault waits for a hole that is being
/// punched, 0.4 s for one of 2 GiB, minutes if who punches it hardly gets a core.
const FILE_SYSTEMS: [i64; 6] = [TMPFS, HUGETLBFS, RAMFS, EXT4, XFS, BTRFS];
const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;
const RAMFS: i64 = 0x8584_58f6;
const EXT4: i64 = 0xef53;
const XFS: i64 = 0x5846_5342;
const BTRFS: i64 = 0x9123_683e;

/// What a front end may have mapped beside guest memory: a migration's log for 4 TiB takes half of it, the region of what is in flight of
/// 256 long virtqueues the other one. It is not part of what a guest may have: with all of that it has to be able to migrate.
const BESIDE: u64 = 256 << 20;

/// Maps the regions of a memory table, of `most` bytes at most, but for those that are `present`. The files are closed; the mappings
/// stay as long as the table.
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

/// Maps one region beside other regions, for the request `code`: of all of them no more than `most` bytes.
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

/// Maps what is not guest memory, length and offset in its file, where as much of that kind is `mapped`. It begins some bytes into the
/// mapping: how many.
pub(super) fn beside(
    code: Code,
    (size, offset): (u64, u64),
    fd: &PassedFd,
    mapped: u64,
) -> Result<(Mapping, usize), ControlError> {
    // As a region whose guest address is 0.
    let region = MemoryRegion { guest: 0, size, user: 0, mmap_offset: offset };
    let part = Part::of(code, &region, fd)?;
    let found = mapped.saturating_add(part.len as u64);
    if found > BESIDE {
        return Err(ControlError::TooMuchBeside { code, found: found.div_ceil(1 << 20), most: BESIDE >> 20 });
    }
    let mapping = Mapping::shared(fd.as_fd(), part.begin, part.len)
        .map_err(|source| ControlError::Mapping { code, guest: 0, source })?;
    Ok((mapping, part.offset))
}

/// Bytes that are mapped for regions.
fn mapped(regions: &[Arc<GuestRegion>]) -> u64 {
    regions.iter().map(|region| region.mapping().len() as u64).sum()
}

/// Refuses more than `most` bytes of address space, which one front end could use up for all others.
fn check(code: Code, lengths: impl Iterator<Item = u64>, most: u64) -> Result<(), ControlError> {
    let found = lengths.fold(0, u64::saturating_add);
    if found > most {
        return Err(ControlError::TooMuch { code, found: found.div_ceil(1 << 20), most: most >> 20 });
    }
    Ok(())
}

/// What is mapped of a file for a region.
struct Part {
    /// Where it begins in the file, and its length.
    begin: u64,
    len: usize,
    /// Where the region begins in it.
    offset: usize,
}

impl Part {
    fn of(code: Code, region: &MemoryRegion, fd: &PassedFd) -> Result<Self, ControlError> {
        let &MemoryRegion { guest, size, mmap_offset, .. } = region;
        let page = page_size(code, guest, fd)?;
        // A region need not begin or end at a page, least of all at a hugepage, but a mapping does.
        let begin = mmap_offset - mmap_offset % page;
        let part = || {
            let end = mmap_offset.checked_add(size)?.checked_next_multiple_of(page)?;
            // Only hugepages fill their file up to whole pages; of others the mapping ends where the region does.
            let end = if page > rustix::param::page_size() as u64 { end } else { mmap_offset + size };
            let len = usize::try_from(end - begin).ok()?;
            let offset = usize::try_from(mmap_offset - begin).ok()?;
            (size > 0).then_some(Self { begin, len, offset })
        };
        part().ok_or(ControlError::Region { code, guest, size, mmap_offset })
    }

    /// Whether the region of `fd` is the one that is `known`, and nothing of that has vanished.
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

/// Bytes of a page of the file.
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
    fn withholdable_memory_is_refused() {
        let region = |fd: OwnedFd| {
            let fd = PassedFd::new(fd, &Errands::default());
            let region = MemoryRegion { guest: 0, size: 4096, user: 0, mmap_offset: 0 };
            super::region(Code::ADD_MEM_REG, &region, &fd, &[], 4096)
        };
        let (_mapping, fd) = Mapping::memfd("guest", 4096, offcore_mem::Hugepages::None).unwrap();
        assert!(region(fd).is_ok());
        // Any file that is in none of these file systems.
        let fd = OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
        let error = region(fd).unwrap_err();
        assert!(matches!(error, ControlError::FileSystem { guest: 0, found: 0x9fa0, .. }), "{error}");
    }
}
