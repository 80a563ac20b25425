//! Memory that vanishes.
//!
//! A party that shares a memfd with us can truncate it; the next access then raises SIGBUS, which would end the process
//! and with it every other guest. While a [`Guarded`] mapping lives, the first fault inside it puts zeroes in place of all of
//! it, and flags it: the access goes on, and the owner drops that party when it next looks. However many pages are gone, it is
//! one mapping afterwards as before, so that nobody uses up those that a process may have (`vm.max_map_count`).

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, Once, PoisonError};

use crate::mapping::Mapping;

/// A guarded range of addresses, or a free entry, of length 0.
#[derive(Debug)]
struct Entry {
    /// The one that was made before.
    next: *const Self,
    /// Odd while the range changes.
    version: AtomicUsize,
    start: AtomicUsize,
    len: AtomicUsize,
    vanished: AtomicBool,
}

// SAFETY: `next` never changes, and what it refers to is never freed.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

impl Entry {
    /// Only by who has the entry.
    fn set(&self, start: usize, len: usize) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The range; none while it changes: then it is not the one of an access that goes on.
    fn range(&self) -> Option<(usize, usize)> {
        let before = self.version.load(Ordering::Acquire);
        let range = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (before.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == before).then_some(range)
    }
}

/// All entries there ever were, which a signal handler may look at: a list that only grows. Its length is that of the most
/// mappings that were guarded at the same time.
static ENTRIES: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());
/// Those that are free.
static FREE: Mutex<Vec<&'static Entry>> = Mutex::new(Vec::new());
/// Mappings that have vanished since the process began.
static VANISHED: AtomicUsize = AtomicUsize::new(0);

/// How many guarded mappings have vanished since the process began: as long as the number stays, none has that was looked at.
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
    /// Guards a mapping for as long as it lives.
    pub fn new(mapping: Mapping) -> Self {
        install_handler();
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = free.pop().unwrap_or_else(|| {
            // Others add entries under the same lock only.
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

    /// Whether a fault has been caught in it: what it maps now is zeroes of this process's own.
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
    /// Before the mapping goes: the entry must not answer for whatever is mapped there next.
    fn drop(&mut self) {
        self.entry.set(0, 0);
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(self.entry);
    }
}

struct Previous(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: written once, before the handler that reads it is installed.
unsafe impl Sync for Previous {}

static PREVIOUS: Previous = Previous(UnsafeCell::new(MaybeUninit::uninit()));

static INSTALL: Once = Once::new();

/// Installs the handler behind the guards, once in a process. [`Guarded::new`] does so, too; whoever has a handler of SIGBUS that
/// is to be asked before the guards calls this first and passes on to it what is not its own.
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
    // SAFETY: both pointers are to live values; the handler only does what is allowed in one (loads, stores, mmap,
    // sigaction).
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
            // Another thread has been here: the access is tried again until there is something.
            return;
        }
        // SAFETY: the range is a mapping that its owner keeps, and who makes the access with it; replacing it by zeroes is
        // what the guard is for, and nobody holds a reference (only raw pointers) into it.
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
    // SAFETY: `install` filled PREVIOUS in before this handler could run for SIGBUS, whose arguments these are.
    unsafe { pass_on((*PREVIOUS.0.get()).assume_init_ref(), signal, info, context) };
}

/// Lets `previous`, the action that was there before a handler was installed, decide about a signal that is not that
/// handler's; by default it ends the process.
///
/// # Safety
/// Called from the handler of `signal`, with its arguments; `previous` is what installing that handler replaced.
pub unsafe fn pass_on(
    previous: &libc::sigaction,
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    match previous.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: restores a valid earlier action; the faulting instruction runs again and meets it.
            unsafe { libc::sigaction(signal, previous, ptr::null_mut()) };
        }
        earlier if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with SA_SIGINFO the earlier action is a function of this signature.
            let earlier: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(earlier) };
            earlier(signal, info, context);
        }
        earlier => {
            // SAFETY: without SA_SIGINFO the earlier action is a function of one argument.
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
        // SAFETY: the addresses are inside the mapping; the guard catches the fault of the pages that vanished.
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

    /// Mappings of this process within a range.
    fn mappings(range: &Mapping) -> usize {
        let (start, end) = (range.base().as_ptr() as usize, range.base().as_ptr() as usize + range.len());
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let starts = maps.lines().filter_map(|line| usize::from_str_radix(line.split_once('-')?.0, 16).ok());
        starts.filter(|at| (start..end).contains(at)).count()
    }

    #[test]
    #[cfg_attr(miri, ignore = "truncates a memfd")]
    fn many_holes_are_one_mapping() {
        let pages = 4096;
        let (fd, guarded) = guarded(pages);
        for page in 0..pages {
            // SAFETY: inside the mapping.
            unsafe { guarded.base().add(page * PAGE).write_volatile(1) };
        }
        rustix::fs::ftruncate(&fd, 0).unwrap();
        rustix::fs::ftruncate(&fd, (pages * PAGE) as u64).unwrap();
        // Every other page is there again, and the others vanish when they are touched.
        rustix::fs::ftruncate(&fd, PAGE as u64).unwrap();
        for page in (1..pages).step_by(2) {
            // SAFETY: inside the mapping, which is guarded.
            unsafe { guarded.base().add(page * PAGE).read_volatile() };
        }
        // Zeroes beside others of this process's own may be one with them: then none begins here.
        assert!(mappings(&guarded) <= 1, "{} mappings", mappings(&guarded));
    }

    #[test]
    #[cfg_attr(miri, ignore = "truncates a memfd")]
    fn as_many_as_there_are_have_guards() {
        let all: Vec<_> = (0..3000).map(|_| guarded(1)).collect();
        let (fd, last) = all.last().unwrap();
        rustix::fs::ftruncate(fd, 0).unwrap();
        // SAFETY: inside the mapping, which is guarded.
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
                            // SAFETY: inside the mapping, which is guarded.
                            unsafe { guarded.base().add(page * PAGE + thread).write_volatile(1) };
                        }
                    });
                }
            });
            assert!(guarded.has_vanished());
        }
    }
}
