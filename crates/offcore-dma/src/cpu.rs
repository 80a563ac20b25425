//! The core as an engine.
//!
//! It knows every address of a burst before the first byte moves, so it asks for the lines of later packets, the
//! source's to be read and the destination's to be written, while it copies earlier ones: a loop of plain copies waits
//! for each packet's lines in turn. Packets that are already in the core's own caches are copied faster without, and
//! some destinations are better not brought into the caches at all; a [`Copier`] finds out which.

mod channel;
mod choice;
mod kernel;
mod routine;
mod stream;

pub use channel::{CpuChannel, CpuDevice};
use choice::{Choice, Past, Size};
use offcore_stats::tsc;
use routine::{Burst, Cpu};
pub use routine::{Routine, Width};

use crate::channel::CopyOp;

/// Makes every copy of the list, in order, fetching ahead. Without any state; [`Copier`] is better for a queue.
///
/// # Safety
/// Each copy's source is readable and its destination writable for its length, and the two do not overlap. Another
/// process may write either meanwhile: what is copied is then whatever was there.
#[inline(always)]
pub unsafe fn copy_burst(ops: &[CopyOp]) {
    // SAFETY: the caller's promises; the loop is one whose instructions this CPU has.
    unsafe { (Cpu::this().ahead)(ops) }
}

/// Makes the copies of one queue, by the routine that has been best for it of late.
///
/// One burst in 16 is timed, and about one in 256 is copied by another routine, to see whether that is better by now
/// (the table in `cpu/choice.rs` says what is tried for which size). A change of temperature is noticed by the times,
/// and followed within some tens of bursts.
#[derive(Debug)]
pub struct Copier {
    until_timed: u32,
    /// The present routine's loop.
    burst: Burst,
    /// The size of the burst that was timed last.
    size: Size,
    small: Choice,
    large: Choice,
}

impl Default for Copier {
    fn default() -> Self {
        Self::new(if Cpu::this().has_direct { Past::Direct } else { Past::NonTemporal })
    }
}

impl Copier {
    /// Lines and copies together, from which on a burst takes so long, some hundred ticks, that reading the clock does
    /// not blur it.
    const WORTH_TIMING: u64 = 32;

    /// One that never stores past the caches: whoever reads its copies next finds them in this core's. For measurements
    /// that say where their data is; the core alone may be faster past them.
    pub fn through_caches() -> Self {
        Self::new(Past::None)
    }

    fn new(past: Past) -> Self {
        Self {
            until_timed: 1,
            burst: Cpu::this().ahead,
            size: Size::Small,
            small: Choice::new(Size::Small, past),
            large: Choice::new(Size::Large, past),
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
            // SAFETY: the caller's promises.
            return unsafe { self.copy_timed(ops) };
        }
        // SAFETY: the caller's promises; the loop is one whose instructions this CPU has.
        unsafe { (self.burst)(ops) }
    }

    /// The routine that makes the copies at present.
    pub fn routine(&self) -> Routine {
        Routine::of(match self.size {
            Size::Small => self.small.present(),
            Size::Large => self.large.present(),
        })
    }

    #[cfg(test)]
    pub(crate) fn goes_past_caches(&self) -> bool {
        [&self.small, &self.large].iter().any(|choice| choice.past() != Past::None)
    }

    #[cold]
    unsafe fn copy_timed(&mut self, ops: &[CopyOp]) {
        let bytes: u64 = ops.iter().map(|op| u64::from(op.len)).sum();
        let amount = bytes / 64 + ops.len() as u64;
        if amount < Self::WORTH_TIMING {
            self.until_timed = Choice::TIMED;
            // SAFETY: as in `copy_burst`.
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
        // SAFETY: the caller's promises; only routines that this CPU has are candidates.
        unsafe { burst(ops) };
        let ticks = tsc::now() - start;
        self.until_timed = choice.record(ticks as f64 / amount as f64);
        self.burst = Routine::of(choice.present()).burst();
        self.size = size;
    }
}

/// Makes one copy from byte `done` on: the rest of what an engine left unfinished.
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
    // SAFETY: the rest is part of what the caller promises.
    unsafe { copy_burst(std::slice::from_ref(&rest)) };
}

#[cfg(test)]
mod tests;
