//! The stack's side of the pages that it shares with an application.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;

use offcore_mem::mapping::MemoryError;
use offcore_mem::{Hugepages, Mapping};
use rustix::fs::SealFlags;

use crate::control::{Control, Processes};

/// The pages of one application.
#[derive(Debug)]
pub struct Shared {
    control: (Mapping, OwnedFd),
    processes: (Mapping, OwnedFd),
    /// A thread has called [`Shared::lock_for_thread`].
    held: bool,
}

impl Shared {
    /// Creates pages without marks and without live processes.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new() -> Result<Self, MemoryError> {
        let control = Mapping::memfd("offcore-control", size_of::<Control>(), Hugepages::None)?;
        let (mapping, fd) = Mapping::memfd("offcore-processes", size_of::<Processes>(), Hugepages::None)?;
        // The stack's own mapping stays writable, but no new writable mapping is possible.
        let seals = SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        // Miri does not support seals.
        if !cfg!(miri) {
            rustix::fs::fcntl_add_seals(&fd, seals).map_err(|source| MemoryError::System {
                what: "sealing a memfd",
                len: mapping.len(),
                source,
            })?;
        }
        Ok(Self { control, processes: (mapping, fd), held: false })
    }

    /// Makes the end of this thread visible to the application ([`Processes::has_stack_ended`]). The same thread must
    /// call [`Shared::end`] or drop `self`, unless it ends before.
    pub fn lock_for_thread(&mut self) {
        let mut attributes = MaybeUninit::uninit();
        let mutex = self.worker();
        // SAFETY: `attributes` is initialized first. The mutex is aligned memory of sufficient length, which stays
        // mapped until `end` has removed the mutex from this thread's list, and no other thread uses it.
        let held = unsafe {
            libc::pthread_mutexattr_init(attributes.as_mut_ptr()) == 0
                && libc::pthread_mutexattr_setrobust(attributes.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST) == 0
                && libc::pthread_mutex_init(mutex, attributes.as_ptr()) == 0
                && libc::pthread_mutex_lock(mutex) == 0
        };
        self.held = held;
    }

    /// Tells the application that the stack ends all its sessions.
    pub fn end(&mut self) {
        if std::mem::take(&mut self.held) {
            // SAFETY: `hold` has initialized and locked the mutex. The call fails if the thread of `hold` has ended.
            unsafe { libc::pthread_mutex_unlock(self.worker()) };
        }
        self.processes().end();
    }

    fn worker(&self) -> *mut libc::pthread_mutex_t {
        ptr::from_ref(&self.processes().worker).cast_mut().cast()
    }

    /// Returns the pages that both sides write.
    #[inline]
    pub fn control(&self) -> &Control {
        // SAFETY: the pages are mapped for as long as `self` lives, page-aligned, and as long as a `Control`. All bytes
        // of a `Control` are parts of atomics, so other parties may write to it.
        unsafe { self.control.0.base().cast().as_ref() }
    }

    /// Returns the pages that only the stack writes.
    pub fn processes(&self) -> &Processes {
        // SAFETY: the pages are mapped for as long as `self` lives, page-aligned, and as long as a `Processes`, which
        // consists of atomics.
        unsafe { self.processes.0.base().cast().as_ref() }
    }

    /// Returns the memfds of both, for the application.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.control.1.as_fd(), self.processes.1.as_fd()]
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.end();
    }
}

// The mutex fits into its place in the page.
const _: () = {
    let place = size_of::<[u32; 16]>();
    assert!(size_of::<libc::pthread_mutex_t>() <= place && align_of::<libc::pthread_mutex_t>() <= 8);
};

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;
    use crate::control::{Owner, SESSIONS};

    #[test]
    fn marks_are_taken_once() {
        let shared = Shared::new().unwrap();
        let control = shared.control();
        let marks = || {
            let mut taken = Vec::new();
            control.take_marks(&mut 0, usize::MAX, |number| taken.push(number));
            taken
        };
        assert_eq!(marks(), []);
        for number in [5, 64, 5, SESSIONS as u32 - 1, 4096] {
            control.mark(number);
        }
        assert_eq!(marks(), [5, 64, 4096, 65_535]);
        assert_eq!(marks(), []);
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes")]
    fn partial_scans_visit_every_mark() {
        let shared = Shared::new().unwrap();
        let (control, all) = (shared.control(), SESSIONS as u32);
        (0..all).for_each(|number| control.mark(number));
        let (mut from, mut taken) = (0, Vec::new());
        for _ in 0..SESSIONS / 128 {
            let before = taken.len();
            control.take_marks(&mut from, 100, |number| taken.push(number));
            assert_eq!(taken.len() - before, 128);
            // Sessions that are marked again have to wait for the others.
            (0..64).for_each(|number| control.mark(number));
        }
        taken.sort_unstable();
        taken.dedup();
        assert_eq!(taken.len(), SESSIONS);
        control.take_marks(&mut from, usize::MAX, |_| ());
        assert!(!control.arm());
    }

    #[test]
    fn sleeping_worker_is_woken_once() {
        let shared = Shared::new().unwrap();
        let control = shared.control();
        control.mark(7);
        assert!(!control.ring(), "it is awake");
        assert!(control.arm(), "it sees the mark");
        control.take_marks(&mut 0, usize::MAX, |_| ());
        assert!(!control.arm());
        control.mark(8);
        assert!(control.ring());
        assert!(!control.ring(), "one has woken it");
        control.disarm();
        assert!(!control.take_look());
        control.look();
        assert!(control.take_look() && !control.take_look());
    }

    #[test]
    #[cfg_attr(miri, ignore = "seals a memfd")]
    fn process_table_is_read_only() {
        let shared = Shared::new().unwrap();
        let [_, fd] = shared.descriptors();
        assert!(Mapping::shared(fd, 0, size_of::<Processes>()).is_err());
        let owner = Owner::new(5, 9).unwrap();
        assert!(!shared.processes().lives(owner));
        shared.processes().set(5, 9);
        assert!(shared.processes().lives(owner));
        assert_eq!(Owner::from_word(owner.word()), Some(owner));
        assert!(Owner::new(0, 0).is_none() && Owner::new(0, Owner::GENERATIONS + 1).is_none());
        assert!(Owner::new(0, Owner::GENERATIONS).unwrap().word() < 1 << 31);
    }

    #[test]
    #[cfg_attr(miri, ignore = "the kernel changes the word")]
    fn end_of_worker_is_visible() {
        let mut shared = Shared::new().unwrap();
        shared.lock_for_thread();
        assert!(!shared.processes().has_stack_ended());
        shared.end();
        assert!(shared.processes().has_stack_ended());
        // A thread that ends without a call has the same effect.
        let mut shared = Shared::new().unwrap();
        std::thread::scope(|scope| scope.spawn(|| shared.lock_for_thread()).join()).unwrap();
        assert!(shared.processes().has_stack_ended());
    }

    #[test]
    fn broadcast_addresses_are_shared() {
        let shared = Shared::new().unwrap();
        let [first, second] = [[10, 0, 0, 255], [10, 1, 255, 255]].map(std::net::Ipv4Addr::from);
        let is = |address| shared.processes().is_broadcast(address);
        assert!(!is(first) && !is(std::net::Ipv4Addr::UNSPECIFIED));
        shared.processes().set_broadcasts([first, second].into_iter());
        assert!(is(first) && is(second));
        shared.processes().set_broadcasts([second].into_iter());
        assert!(!is(first) && is(second), "an address that is gone");
        shared.processes().set_broadcasts(std::iter::repeat_n(first, 1000));
        assert!(is(first) && !is(second));
    }
}
