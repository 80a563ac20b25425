//! Handles shared memory that vanishes.
//!
//! A party that shares a memfd with this process can truncate it. The next access then raises SIGBUS, which would end
//! the process and disconnect every other guest. While a [`Guarded`] mapping lives, the first fault in it replaces the
//! whole mapping by zeros and sets a flag: the access completes, and the owner disconnects that party when it next
//! checks the flag. However many pages are gone, the result is a single mapping, so that the limit of mappings per
//! process (`vm.max_map_count`) cannot be exhausted.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, Once, PoisonError};

use crate::mapping::Mapping;

/// A guarded range of addresses; a free entry has length 0.
#[derive(Debug)]
struct Entry {
    /// The entry that was created before this one.
    next: *const Self,
    /// Odd while the range changes.
    version: AtomicUsize,
    start: AtomicUsize,
    len: AtomicUsize,
    vanished: AtomicBool,
}

// SAFETY: `next` never changes, and the entry that it refers to is never freed.
unsafe impl Send for Entry {}
// SAFETY: `next` never changes, and the entry that it refers to is never freed. The other fields are atomics.
unsafe impl Sync for Entry {}

impl Entry {
    /// Sets the range. Only the owner of the entry may call this.
    fn set(&self, start: usize, len: usize) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Returns the range; `None` while it changes, in which case no access can be using it.
    fn range(&self) -> Option<(usize, usize)> {
        let before = self.version.load(Ordering::Acquire);
        let range = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (before.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == before).then_some(range)
    }
}

/// List of all entries, which a signal handler may traverse. It only grows. Its length is the maximum number of
/// mappings that were guarded at the same time.
static ENTRIES: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());
/// Free entries.
static FREE: Mutex<Vec<&'static Entry>> = Mutex::new(Vec::new());
/// Number of mappings that have vanished since the process began.
static VANISHED: AtomicUsize = AtomicUsize::new(0);

/// Returns how many guarded mappings have vanished since the process began. If the number has not changed, the mappings
/// checked before have not vanished.
#[inline(always)]
pub fn vanished() -> usize {
    VANISHED.load(Ordering::Relaxed)
}

/// A mapping whose pages may vanish.
#[derive(Debug)]
pub struct Guarded {
    entry: &'static Entry,
    mapping: Mapping,
}

impl Guarded {
    /// Guards a mapping until this is dropped.
    pub fn new(mapping: Mapping) -> Self {
        install_handler();
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = free.pop().unwrap_or_else(|| {
            // Entries are only added under this lock.
            let entry = Box::leak(Box::new(Entry {
                next: ENTRIES.load(Ordering::Relaxed),
                version: AtomicUsize::new(0),
                start: AtomicUsize::new(0),
                len: AtomicUsize::new(0),
                vanished: AtomicBool::new(false),
            }));
            ENTRIES.store(entry, Ordering::Release);
            entry
        });
        entry.vanished.store(false, Ordering::Relaxed);
        entry.set(mapping.base().as_ptr() as usize, mapping.len());
        Self { entry, mapping }
    }

    /// Returns whether a fault occurred in the mapping. It then consists of private zero pages.
    pub fn has_vanished(&self) -> bool {
        self.entry.vanished.load(Ordering::Relaxed)
    }
}

impl Deref for Guarded {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

impl Drop for Guarded {
    /// The entry is cleared before the mapping is removed, so that it does not apply to a later mapping at the same
    /// address.
    fn drop(&mut self) {
        self.entry.set(0, 0);
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(self.entry);
    }
}

struct Previous(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: it is written once, before the handler that reads it is installed.
unsafe impl Sync for Previous {}

static PREVIOUS: Previous = Previous(UnsafeCell::new(MaybeUninit::uninit()));

static INSTALL: Once = Once::new();

/// Installs the SIGBUS handler of the guards, once per process. [`Guarded::new`] also does this. Code that installs
/// another SIGBUS handler in front of it must call this first, and pass signals that are not its own on to it.
pub fn install_handler() {
    // Miri has no signals.
    if !cfg!(miri) {
        INSTALL.call_once(install);
    }
}

fn install() {
    // SAFETY: an all-zero sigaction is a valid value to fill in.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: both pointers refer to live values; the handler only performs async-signal-safe operations (loads,
    // stores, mmap, sigaction).
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, PREVIOUS.0.get().cast()) };
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let address = unsafe { (*info).si_addr() } as usize;
    let mut next = ENTRIES.load(Ordering::Acquire).cast_const();
    // SAFETY: entries are never freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.next;
        let Some((start, len)) = entry.range().filter(|(start, len)| address.wrapping_sub(*start) < *len)
        else {
            continue;
        };
        if entry.vanished.swap(true, Ordering::Relaxed) {
            // Another thread is replacing the mapping: the access is repeated until the new pages exist.
            return;
        }
        // SAFETY: the range is a mapping that its owner and the accessing thread keep alive; replacing it by zeros is
        // the purpose of the guard, and only raw pointers refer to it.
        let mapped = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapped != libc::MAP_FAILED {
            VANISHED.fetch_add(1, Ordering::Relaxed);
            return;
        }
        entry.vanished.store(false, Ordering::Relaxed);
    }
    // SAFETY: `install` filled PREVIOUS before this handler could run; these are the handler's arguments.
    unsafe { chain_signal((*PREVIOUS.0.get()).assume_init_ref(), signal, info, context) };
}

/// Passes a signal that is not the handler's own on to `previous`, the action before the handler was installed. The
/// default action ends the process.
///
/// # Safety
/// It must be called from the handler of `signal`, with its arguments. `previous` must be the action that the handler
/// replaced.
pub unsafe fn chain_signal(
    previous: &libc::sigaction,
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    match previous.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: this restores a valid earlier action; the faulting instruction runs again and triggers it.
            unsafe { libc::sigaction(signal, previous, ptr::null_mut()) };
        }
        earlier if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with SA_SIGINFO, the earlier action is a function of this signature.
            let earlier: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(earlier) };
            earlier(signal, info, context);
        }
        earlier => {
            // SAFETY: without SA_SIGINFO, the earlier action is a function of one argument.
            let earlier: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(earlier) };
            earlier(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use super::*;

    const PAGE: usize = 4096;

    fn guarded(pages: usize) -> (OwnedFd, Guarded) {
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, (pages * PAGE) as u64).unwrap();
        let mapping = Mapping::shared(fd.as_fd(), 0, pages * PAGE).unwrap();
        (fd, Guarded::new(mapping))
    }

    #[test]
    #[cfg_attr(miri, ignore = "truncates a memfd")]
    fn truncated_file_reads_as_zeroes() {
        let (other, (fd, guarded)) = (guarded(4), guarded(4));
        let (_other, beside) = other;
        let before = vanished();
        // SAFETY: the addresses are within the mapping; the guard handles the fault of the pages that vanished.
        unsafe {
            guarded.base().write_volatile(7);
            guarded.base().add(8192).write_volatile(9);
            assert!(!guarded.has_vanished());
            rustix::fs::ftruncate(&fd, 4096).unwrap();
            assert_eq!(guarded.base().add(8192).read_volatile(), 0);
            guarded.base().add(8193).write_volatile(5);
            assert_eq!(guarded.base().add(8193).read_volatile(), 5);
            assert_eq!(guarded.base().read_volatile(), 0, "what is left of the file is gone as well");
        }
        assert!(guarded.has_vanished() && !beside.has_vanished() && vanished() > before);
    }

    /// Returns the number of this process's mappings that begin within a range.
    fn mappings(range: &Mapping) -> usize {
        let (start, end) = (range.base().as_ptr() as usize, range.base().as_ptr() as usize + range.len());
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let starts = maps.lines().filter_map(|line| usize::from_str_radix(line.split_once('-')?.0, 16).ok());
        starts.filter(|at| (start..end).contains(at)).count()
    }

    #[test]
    #[cfg_attr(miri, ignore = "truncates a memfd")]
    fn truncated_pages_share_one_mapping() {
        let pages = 4096;
        let (fd, guarded) = guarded(pages);
        for page in 0..pages {
            // SAFETY: within the mapping.
            unsafe { guarded.base().add(page * PAGE).write_volatile(1) };
        }
        rustix::fs::ftruncate(&fd, 0).unwrap();
        rustix::fs::ftruncate(&fd, (pages * PAGE) as u64).unwrap();
        // The mapping is accessed at every other page after all pages but one have vanished.
        rustix::fs::ftruncate(&fd, PAGE as u64).unwrap();
        for page in (1..pages).step_by(2) {
            // SAFETY: within the mapping, which is guarded.
            unsafe { guarded.base().add(page * PAGE).read_volatile() };
        }
        // The kernel may merge the zero pages with an adjacent private mapping. Then no mapping begins here.
        assert!(mappings(&guarded) <= 1, "{} mappings", mappings(&guarded));
    }

    #[test]
    #[cfg_attr(miri, ignore = "truncates a memfd")]
    fn thousands_of_mappings_are_guarded() {
        let all: Vec<_> = (0..3000).map(|_| guarded(1)).collect();
        let (fd, last) = all.last().unwrap();
        rustix::fs::ftruncate(fd, 0).unwrap();
        // SAFETY: within the mapping, which is guarded.
        unsafe { last.base().write_volatile(1) };
        assert_eq!(all.iter().filter(|(_, guarded)| guarded.has_vanished()).count(), 1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "truncates a memfd")]
    fn two_threads_meet_the_same_fault() {
        for _ in 0..200 {
            let (fd, guarded) = guarded(64);
            rustix::fs::ftruncate(&fd, 0).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..2 {
                    let guarded = &guarded;
                    scope.spawn(move || {
                        for page in 0..64 {
                            // SAFETY: within the mapping, which is guarded.
                            unsafe { guarded.base().add(page * PAGE + thread).write_volatile(1) };
                        }
                    });
                }
            });
            assert!(guarded.has_vanished());
        }
    }
}
