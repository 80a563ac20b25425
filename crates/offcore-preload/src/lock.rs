//! Locks between the threads and processes of an application, in a session's slot.
//!
//! A process that is killed while it holds a lock leaves it locked: the pages that the stack writes say that its holder does
//! not live, and who waits takes it. What a lock protects is committed by one store, so there is nothing to be mended.
//!
//! A signal handler cannot wait for the thread that it has interrupted. So a lock names its thread, too, and lets that one in
//! again: what it protects is made for this ([`offcore_session::app::Turn`], `Reader::consume_alone`).

use core::hint;
use core::sync::atomic::{AtomicU64, Ordering};

use offcore_session::control::Owner;

use crate::link;
use crate::sys;

/// Somebody waits.
const WAITED_FOR: u64 = 1;
const SPINS: u32 = 200;
/// Waits of a hundredth of a second, at most, for the stack, which has a lock for some instructions.
const STACK_WAITS: u32 = 500;

/// A lock that is held until this is dropped.
pub(crate) struct Held<'a> {
    word: &'a AtomicU64,
    nested: bool,
}

impl<'a> Held<'a> {
    /// Waits for the lock.
    #[inline]
    pub(crate) fn new(word: &'a AtomicU64) -> Self {
        let me = u64::from(sys::thread()) << 32 | u64::from(link::owner()) << 1;
        let free = word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok();
        Self { word, nested: !free && !wait(word, me) }
    }

    /// Whether this thread has it already, in a call that a signal handler has interrupted.
    pub(crate) fn is_nested(&self) -> bool {
        self.nested
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.nested && self.word.swap(0, Ordering::Release) & WAITED_FOR != 0 {
            sys::futex_wake(low(self.word));
        }
    }
}

/// The half that is waited for.
fn low(word: &AtomicU64) -> *const u32 {
    word.as_ptr().cast()
}

/// `false`: this thread has it.
#[cold]
fn wait(word: &AtomicU64, me: u64) -> bool {
    let mut mine = me;
    for spin in 0u32.. {
        let found = word.load(Ordering::Relaxed);
        let holder = Owner::from_word(found as u32 >> 1);
        if found & !WAITED_FOR == me && holder.is_some_and(link::lives) {
            return false;
        }
        let lives = holder.is_some_and(|holder| match holder {
            // It may have died in those instructions, and is not told of.
            Owner::STACK => spin < SPINS + STACK_WAITS,
            holder => link::lives(holder),
        });
        let gone = found != 0 && spin >= SPINS && !lives;
        if found == 0 || gone {
            // Others may wait still.
            let taken = mine | found & WAITED_FOR;
            if word.compare_exchange(found, taken, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return true;
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
            sys::futex_wait(low(word), waited as u32);
        }
    }
    true
}
