//! Memory that vanishes.
//!
//! A party that shares a memfd with us can truncate it; the next access then raises SIGBUS, which would end the process
//! and with it every other guest. While a [`Guard`] covers a mapping, a fault inside it maps a zero page in place and
//! flags the guard: the access goes on, and the owner drops that party when it next looks.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Guards that a process can have at the same time.
pub const GUARDS: usize = 1024;

#[derive(Debug)]
struct Slot {
    start: AtomicUsize,
    len: AtomicUsize,
    page_size: AtomicUsize,
    used: AtomicBool,
    tripped: AtomicBool,
}

/// What a signal handler may look at: fixed, lock-free.
static TABLE: [Slot; GUARDS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        page_size: AtomicUsize::new(0),
        used: AtomicBool::new(false),
        tripped: AtomicBool::new(false),
    }
}; GUARDS];

struct Previous(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: written once, before the handler that reads it is installed.
unsafe impl Sync for Previous {}

static PREVIOUS: Previous = Previous(UnsafeCell::new(MaybeUninit::uninit()));

static INSTALL: Once = Once::new();

/// Protects a mapping for as long as it lives.
#[derive(Debug)]
pub struct Guard(&'static Slot);

impl Guard {
    /// Whether a fault has been caught in the mapping.
    pub fn tripped(&self) -> bool {
        self.0.tripped.load(Ordering::Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.len.store(0, Ordering::Release);
        self.0.used.store(false, Ordering::Release);
    }
}

/// Guards the mapping at `start`, whose pages are `page_size` bytes; `None` when all [`GUARDS`] are taken.
///
/// The mapping must outlive the guard.
pub fn guard(start: NonNull<u8>, len: usize, page_size: usize) -> Option<Guard> {
    install_handler();
    let slot = TABLE
        .iter()
        .find(|slot| slot.used.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok())?;
    slot.tripped.store(false, Ordering::Relaxed);
    slot.start.store(start.as_ptr() as usize, Ordering::Relaxed);
    slot.page_size.store(page_size, Ordering::Relaxed);
    slot.len.store(len, Ordering::Release);
    Some(Guard(slot))
}

/// Installs the handler behind the guards, once in a process. [`guard`] does so, too; whoever has a handler of SIGBUS that
/// is to be asked before the guards calls this first and passes on to it what is not its own.
pub fn install_handler() {
    INSTALL.call_once(install);
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
    for slot in &TABLE {
        let len = slot.len.load(Ordering::Acquire);
        let start = slot.start.load(Ordering::Relaxed);
        if address.wrapping_sub(start) >= len {
            continue;
        }
        let page_size = slot.page_size.load(Ordering::Relaxed);
        let page = start + (address - start) / page_size * page_size;
        let page_size = page_size.min(start + len - page);
        // SAFETY: the page lies in a guarded mapping that its owner keeps mapped; replacing it by zeroes is what the
        // guard is for, and nobody holds a reference (only raw pointers) into it.
        let mapped = unsafe {
            libc::mmap(
                page as *mut libc::c_void,
                page_size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapped != libc::MAP_FAILED {
            slot.tripped.store(true, Ordering::Relaxed);
            return;
        }
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
            unsafe { libc::sigaction(signal, previous, std::ptr::null_mut()) };
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
    use super::*;
    use crate::mapping::Mapping;
    use std::os::fd::AsFd;

    #[test]
    fn truncated_file_reads_as_zeroes() {
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 16384).unwrap();
        let mapping = Mapping::shared(fd.as_fd(), 0, 16384).unwrap();
        let guard = guard(mapping.base(), mapping.len(), mapping.page_size()).unwrap();
        // SAFETY: the addresses are inside the mapping; the guard catches the fault of the pages that vanished.
        unsafe {
            mapping.base().add(8192).write_volatile(9);
            assert!(!guard.tripped());
            rustix::fs::ftruncate(&fd, 4096).unwrap();
            assert_eq!(mapping.base().add(8192).read_volatile(), 0);
            mapping.base().add(8193).write_volatile(5);
            assert_eq!(mapping.base().add(8193).read_volatile(), 5);
        }
        assert!(guard.tripped());
    }
}
