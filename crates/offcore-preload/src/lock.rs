//! Locks between the threads and processes of an application, in a session's slot.
//!
//! A process that is killed while it holds a lock leaves it locked. The pages that the stack writes report that the
//! holder is dead, and a waiter takes the lock over. The protected data is committed by a single store, so no repair is
//! necessary.
//!
//! A signal handler cannot wait for the thread that it has interrupted. Therefore, a lock also names its thread, and
//! the same thread may enter again. The protected data permits this ([`offcore_session::app::Turn`],
//! `Reader::consume_alone`).

use core::hint;
use core::sync::atomic::{AtomicU64, Ordering};

use offcore_session::control::Owner;

use crate::link;
use crate::sys;

/// Set while a thread waits.
const CONTENDED: u64 = 1;
const SPINS: u32 = 200;
/// Maximum number of waits of 10 ms for the stack, which holds a lock for a few instructions only.
const STACK_WAITS: u32 = 500;

/// A lock that is held until this value is dropped.
pub(crate) struct SlotLock<'a> {
    word: &'a AtomicU64,
    nested: bool,
}

impl<'a> SlotLock<'a> {
    /// Waits for the lock.
    #[inline]
    pub(crate) fn new(word: &'a AtomicU64) -> Self {
        let me = u64::from(sys::thread()) << 32 | u64::from(link::owner()) << 1;
        let free = word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok();
        Self { word, nested: !free && !wait(word, me) }
    }

    /// Returns whether this thread already holds the lock, in a call that a signal handler has interrupted.
    pub(crate) fn is_nested(&self) -> bool {
        self.nested
    }
}

impl Drop for SlotLock<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.nested && self.word.swap(0, Ordering::Release) & CONTENDED != 0 {
            sys::futex_wake(futex_word(self.word));
        }
    }
}

/// Returns the half of the word that the futex uses.
fn futex_word(word: &AtomicU64) -> *const u32 {
    word.as_ptr().cast()
}

/// Waits for the lock. Returns `false` if this thread already holds it.
#[cold]
fn wait(word: &AtomicU64, me: u64) -> bool {
    let mut mine = me;
    for spin in 0u32.. {
        let found = word.load(Ordering::Relaxed);
        let holder = Owner::from_word(found as u32 >> 1);
        if found & !CONTENDED == me && holder.is_some_and(link::is_holder_alive) {
            return false;
        }
        let lives = holder.is_some_and(|holder| match holder {
            // The stack may have died with the lock held, and the pages do not report that.
            Owner::STACK => spin < SPINS + STACK_WAITS,
            holder => link::is_holder_alive(holder),
        });
        let gone = found != 0 && spin >= SPINS && !lives;
        if found == 0 || gone {
            // Others may still be waiting.
            let taken = mine | found & CONTENDED;
            if word.compare_exchange(found, taken, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return true;
            }
            continue;
        }
        if spin < SPINS {
            hint::spin_loop();
            continue;
        }
        mine = me | CONTENDED;
        let waited = found | CONTENDED;
        if found == waited
            || word.compare_exchange(found, waited, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            sys::futex_wait(futex_word(word), waited as u32);
        }
    }
    true
}
