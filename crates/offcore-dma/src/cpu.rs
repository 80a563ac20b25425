//! The core as an engine.
//!
//! It knows every address of a burst before the first byte moves, so it asks for the lines of later packets, the
//! source's to be read and the destination's to be written, while it copies earlier ones: a loop of plain copies waits
//! for each packet's lines in turn. Only packets that are already in the core's own caches are copied faster without;
//! a [`Copier`] notices.

mod channel;
mod kernel;

pub use channel::{CpuChannel, CpuDevice};

use offcore_stats::tsc;

use crate::channel::{Copy, Fill};

/// Makes every copy of the list, in order, fetching ahead. Without any state; [`Copier`] is better for a queue.
///
/// # Safety
/// Each copy's source is readable and its destination writable for its length, and the two do not overlap. Another
/// process may write either meanwhile: what is copied is then whatever was there.
#[inline(always)]
pub unsafe fn copy_burst(ops: &[Copy]) {
    // SAFETY: the caller's promises; the loop is one whose instructions this CPU has.
    unsafe { (kernel::kernel().ahead)(ops) }
}

/// Makes the copies of one queue, and fetches ahead as long as that pays.
///
/// One burst in 16 is timed. When it took hardly more than copying within the core's own caches takes, the next ones are
/// made without fetching ahead, which saves up to a fifth of their time; as soon as one takes longer, lines are asked
/// for again.
#[derive(Debug)]
pub struct Copier {
    until_timed: u32,
    hot: bool,
}

impl Default for Copier {
    fn default() -> Self {
        Self { until_timed: 1, hot: false }
    }
}

impl Copier {
    /// Bursts from one that is timed to the next.
    const TIMED: u32 = 16;
    /// Below this many bytes a copy, fetching ahead costs nothing even when all is hot.
    const WORTH_TIMING: u64 = 384;
    /// How many times slower than within the core's own caches a copy may be and still count as hot. (Fetching ahead for
    /// nothing is up to 1.25 times slower; remote and cold data are three times slower and more.)
    const HOT: f64 = 1.8;

    /// Makes every copy of the list, in order.
    ///
    /// # Safety
    /// As for [`copy_burst`].
    #[inline(always)]
    pub unsafe fn copy_burst(&mut self, ops: &[Copy]) {
        self.until_timed -= 1;
        if self.until_timed == 0 {
            // SAFETY: the caller's promises.
            return unsafe { self.copy_timed(ops) };
        }
        let kernel = kernel::kernel();
        // SAFETY: the caller's promises; both loops' instructions are ones this CPU has.
        unsafe { (if self.hot { kernel.plain } else { kernel.ahead })(ops) }
    }

    #[cold]
    unsafe fn copy_timed(&mut self, ops: &[Copy]) {
        self.until_timed = Self::TIMED;
        let kernel = kernel::kernel();
        let bytes: u64 = ops.iter().map(|op| u64::from(op.len)).sum();
        let start = tsc::now();
        // SAFETY: as in `copy_burst`.
        unsafe { (if self.hot { kernel.plain } else { kernel.ahead })(ops) }
        let ticks = (tsc::now() - start) as f64;
        self.hot = bytes >= Self::WORTH_TIMING * ops.len() as u64
            && ticks < Self::HOT * kernel.hot_ticks * (bytes / 64) as f64;
    }
}

/// Makes one copy from byte `done` on: the rest of what an engine left unfinished.
///
/// # Safety
/// As for [`copy_burst`].
pub unsafe fn copy_one(op: &Copy, done: u32) {
    let done = done.min(op.len);
    let rest = Copy {
        src: op.src.wrapping_add(done as usize),
        dst: op.dst.wrapping_add(done as usize),
        len: op.len - done,
        token: op.token,
    };
    // SAFETY: the rest is part of what the caller promises.
    unsafe { copy_burst(std::slice::from_ref(&rest)) };
}

/// Makes one fill from byte `done` on.
///
/// # Safety
/// The destination is writable for the fill's length.
pub unsafe fn fill_one(op: &Fill, done: u32) {
    let mut at = done.min(op.len) as usize;
    // The pattern as it stands at byte `at`.
    let pattern = op.pattern.rotate_right(8 * (done % 8));
    while at + 8 <= op.len as usize {
        // SAFETY: eight bytes from `at` are inside the destination.
        unsafe { op.dst.add(at).cast::<u64>().write_unaligned(pattern.to_le()) };
        at += 8;
    }
    for (i, byte) in (at..op.len as usize).zip(pattern.to_le_bytes()) {
        // SAFETY: i is below the length.
        unsafe { op.dst.add(i).write(byte) };
    }
}

#[cfg(test)]
mod tests;
