//! Locks between the threads and processes of an application, in a session's slot.
//!
//! A process that is killed while it holds a lock leaves it locked: the pages that the stack writes say that its holder does
//! not live, and who waits takes it. What a lock protects is committed by one store, so there is nothing to be mended.

use core::hint;
use core::sync::atomic::{AtomicU32, Ordering};

use offcore_session::control::Owner;

use crate::link;
use crate::sys;

/// Somebody waits.
const WAITED_FOR: u32 = 1;
const SPINS: u32 = 200;

/// A lock that is held until this is dropped.
pub(crate) struct Held<'a>(&'a AtomicU32);

impl<'a> Held<'a> {
    /// Waits for the lock.
    #[inline]
    pub(crate) fn new(word: &'a AtomicU32) -> Self {
        let me = link::owner() << 1;
        if word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_err() {
            wait(word, me);
        }
        Self(word)
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.0.swap(0, Ordering::Release) & WAITED_FOR != 0 {
            sys::futex_wake(self.0.as_ptr());
        }
    }
}

#[cold]
fn wait(word: &AtomicU32, me: u32) {
    let mut mine = me;
    for spin in 0u32.. {
        let found = word.load(Ordering::Relaxed);
        let holder = Owner::from_word(found >> 1);
        let gone = found != 0 && spin >= SPINS && !holder.is_some_and(link::lives);
        if found == 0 || gone {
            // Others may wait still.
            let taken = mine | found & WAITED_FOR;
            if word.compare_exchange(found, taken, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return;
            }
            continue;
        }
        if spin < SPINS {
            hint::spin_loop();
            continue;
        }
        mine = me | WAITED_FOR;
        let waited = found | WAITED_FOR;
        if found == waited
            || word.compare_exchange(found, waited, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            sys::futex_wait(word.as_ptr(), waited);
        }
    }
}
