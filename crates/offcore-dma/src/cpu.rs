//! The core as an engine.
//!
//! All addresses of a burst are known before the first byte is copied. While the core copies earlier packets, it
//! therefore prefetches the lines of later ones: the source's for reading and the destination's for writing. A loop of
//! plain copies waits for each packet's lines in turn. Packets that are already in the core's own caches are copied
//! faster without prefetching, and some destinations are better not brought into the caches at all. A [`Copier`]
//! selects the best routine.

mod channel;
mod choice;
mod kernel;
mod routine;
mod stream;

pub use channel::{CpuChannel, CpuDevice};
use choice::{Past, RoutineChoice, Size};
use offcore_stats::tsc;
use routine::{CopyLoop, Cpu};
pub use routine::{Routine, Width};

use crate::channel::CopyOp;

/// Makes every copy of the list, in order, with prefetching. It keeps no state; prefer a [`Copier`] for a queue.
///
/// # Safety
/// Each copy's source is readable and its destination is writable for its length, and the two do not overlap. Another
/// process may write either meanwhile: the copy then contains whatever was there.
#[inline(always)]
pub unsafe fn copy_burst(ops: &[CopyOp]) {
    // SAFETY: the caller keeps source and destination of each copy valid for its length during the call; this CPU has
    // the loop's instructions.
    unsafe { (Cpu::this().ahead)(ops) }
}

/// Makes the copies of one queue, with the routine that has recently been the fastest for it.
///
/// One burst in 16 is timed, and about one in 256 is copied by another routine, to test whether that is faster now (the
/// table in `cpu/choice.rs` lists the candidates for each size). Changes of the data's location in the caches are
/// detected by the times, and followed within some tens of bursts.
#[derive(Debug)]
pub struct Copier {
    until_timed: u32,
    /// The loop of the present routine.
    burst: CopyLoop,
    /// The size of the last timed burst.
    size: Size,
    small: RoutineChoice,
    large: RoutineChoice,
}

impl Default for Copier {
    fn default() -> Self {
        Self::new(if Cpu::this().has_direct { Past::Direct } else { Past::NonTemporal })
    }
}

impl Copier {
    /// Minimum number of lines plus copies of a timed burst: it then takes some hundred ticks, so that reading the
    /// clock does not distort the result.
    const WORTH_TIMING: u64 = 32;

    /// Creates a copier that never bypasses the caches: the next reader of its copies finds them in this core's caches.
    /// This is for measurements with a defined location of the data. Bypassing the caches may be faster for the core
    /// alone.
    pub fn cached_stores_only() -> Self {
        Self::new(Past::None)
    }

    fn new(past: Past) -> Self {
        Self {
            until_timed: 1,
            burst: Cpu::this().ahead,
            size: Size::Small,
            small: RoutineChoice::new(Size::Small, past),
            large: RoutineChoice::new(Size::Large, past),
        }
    }

    /// Makes every copy of the list, in order.
    ///
    /// # Safety
    /// As for [`copy_burst`].
    #[inline(always)]
    pub unsafe fn copy_burst(&mut self, ops: &[CopyOp]) {
        self.until_timed -= 1;
        if self.until_timed == 0 {
            // SAFETY: the caller keeps source and destination of each copy valid for its length during the call.
            return unsafe { self.copy_timed(ops) };
        }
        // SAFETY: the caller keeps source and destination of each copy valid for its length during the call; this CPU
        // has the loop's instructions.
        unsafe { (self.burst)(ops) }
    }

    /// Returns the present routine.
    pub fn routine(&self) -> Routine {
        Routine::of(match self.size {
            Size::Small => self.small.present(),
            Size::Large => self.large.present(),
        })
    }

    #[cfg(test)]
    pub(crate) fn uses_streaming_stores(&self) -> bool {
        [&self.small, &self.large].iter().any(|choice| choice.past() != Past::None)
    }

    #[cold]
    unsafe fn copy_timed(&mut self, ops: &[CopyOp]) {
        let bytes: u64 = ops.iter().map(|op| u64::from(op.len)).sum();
        let amount = bytes / 64 + ops.len() as u64;
        if amount < Self::WORTH_TIMING {
            self.until_timed = RoutineChoice::TIMED;
            // SAFETY: the caller keeps source and destination of each copy valid for its length during the call, and
            // this CPU supports the routine.
            return unsafe { (self.burst)(ops) };
        }
        let size = Size::of(bytes, ops.len());
        let (choice, other) = match size {
            Size::Small => (&mut self.small, &mut self.large),
            Size::Large => (&mut self.large, &mut self.small),
        };
        other.abandon();
        let burst = Routine::of(choice.timed()).burst();
        let start = tsc::now();
        // SAFETY: the caller keeps source and destination of each copy valid for its length during the call; only
        // routines that this CPU supports are candidates.
        unsafe { burst(ops) };
        let ticks = tsc::now() - start;
        self.until_timed = choice.record(ticks as f64 / amount as f64);
        self.burst = Routine::of(choice.present()).burst();
        self.size = size;
    }
}

/// Makes a copy from byte `done` on, for example the rest of a copy that an engine did not complete.
///
/// # Safety
/// As for [`copy_burst`].
pub unsafe fn copy_one(op: &CopyOp, done: u32) {
    let done = done.min(op.len);
    let rest = CopyOp {
        src: op.src.wrapping_add(done as usize),
        dst: op.dst.wrapping_add(done as usize),
        len: op.len - done,
        token: op.token,
    };
    // SAFETY: the rest is a part of `op`, whose source and destination the caller keeps valid during the call.
    unsafe { copy_burst(std::slice::from_ref(&rest)) };
}

#[cfg(test)]
mod tests;
