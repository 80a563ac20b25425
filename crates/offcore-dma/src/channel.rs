//! Devices, channels, copies and completions: the interface of every copy engine.
//!
//! A [`Device`] gives out channels. A [`Channel`] belongs to one worker: copies are put into its ring in bursts,
//! [`Channel::submit`] rings the doorbell, [`Channel::poll`] returns the tokens of what has completed, in any order.
//! One dynamic call handles a burst, never a single copy.

use std::fmt;

use arrayvec::ArrayVec;
use offcore_stats::counters;

/// Names a copy's packet to the one who submitted it; engines only hand it back.
pub type Token = u32;

/// One copy of `len` bytes. Source and destination do not overlap.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CopyOp {
    /// First byte to read.
    pub src: *const u8,
    /// First byte to write.
    pub dst: *mut u8,
    /// Bytes; 0 is allowed and completes like any other.
    pub len: u32,
    /// Handed back on completion.
    pub token: Token,
}

// SAFETY: a copy is a description; whoever submits it promises that the memory may be touched by an engine.
unsafe impl Send for CopyOp {}

impl CopyOp {
    /// Stands where there is no copy.
    pub const NONE: Self = Self { src: std::ptr::null(), dst: std::ptr::null_mut(), len: 0, token: 0 };
}

/// Why an operation did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum Failure {
    /// page fault
    PageFault,
    /// hardware error
    Hardware,
    /// operation refused
    Refused, // by its length, alignment or kind
    /// aborted
    Aborted, // before it ran: the channel was stopped or reset
}

/// A copy that failed: the first `done` bytes were written, the rest were not.
#[derive(Clone, Copy, Debug)]
pub struct Failed {
    pub copy: CopyOp,
    pub failure: Failure,
    /// Bytes at the start of the destination that are complete.
    pub done: u32,
}

/// What a poll found: a fixed-capacity list, reused from poll to poll.
#[derive(Debug, Default)]
pub struct Completions {
    /// Tokens of operations that succeeded, in the order in which they completed.
    pub tokens: ArrayVec<Token, 128>,
    pub failed: ArrayVec<Failed, 16>,
}

impl Completions {
    /// Forgets everything.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.failed.clear();
    }

    /// Whether there is no more room on either list.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.tokens.is_full() || self.failed.is_full()
    }
}

/// What a channel can do beyond copying.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Operations may complete in another order than they were submitted in.
    pub out_of_order: bool,
    /// Copies are made inside [`Channel::copy`], by the calling core.
    pub synchronous: bool,
    /// A model, not hardware: every figure from it is labelled so.
    pub simulated: bool,
}

/// A channel's fixed properties.
#[derive(Clone, Debug)]
pub struct ChannelInfo {
    /// What the command line calls it: `cpu`, `core:1`.
    pub name: String,
    /// Operations it holds at most.
    pub ring_size: usize,
    /// Bytes of the longest operation; longer ones fail with [`Failure::Refused`].
    pub max_len: u32,
    pub capabilities: Capabilities,
}

counters! {
    /// A channel's counters. `submitted = completed + failed + in flight`.
    pub struct ChannelStats {
        submitted,
        completed,
        /// Operations that failed, were aborted or were given up.
        failed,
        bytes,
    }
}

/// What a channel keeps to tell its [`ChannelStats`]. Copies in flight are subtracted only when somebody asks.
#[derive(Debug, Default)]
pub struct Ledger {
    submitted: u64,
    submitted_bytes: u64,
    failed: u64,
    failed_bytes: u64,
}

impl Ledger {
    /// Counts copies that were accepted, and their bytes.
    #[inline(always)]
    pub fn accept(&mut self, copies: usize, bytes: u64) {
        self.submitted += copies as u64;
        self.submitted_bytes += bytes;
    }

    /// Counts copies that failed or were taken out.
    pub fn fail<'a>(&mut self, copies: impl IntoIterator<Item = &'a CopyOp>) {
        for copy in copies {
            self.failed += 1;
            self.failed_bytes += u64::from(copy.len);
        }
    }

    /// The counters, with these copies in flight.
    pub fn stats(&self, in_flight: impl IntoIterator<Item = CopyOp>) -> ChannelStats {
        let (copies, bytes) = in_flight
            .into_iter()
            .fold((0, 0), |(copies, bytes), copy| (copies + 1, bytes + u64::from(copy.len)));
        ChannelStats {
            submitted: self.submitted,
            completed: self.submitted - self.failed - copies,
            failed: self.failed,
            bytes: self.submitted_bytes - self.failed_bytes - bytes,
        }
    }
}

/// How far a reset has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// Outstanding operations may still touch memory: call again.
    Pending,
    /// No operation submitted so far will touch memory any more.
    Done,
}

/// Why a channel or device refused.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum EngineError {
    /// {device}: all {max} channels are in use: free one, or share one between queues
    NoChannel { device: String, max: usize },
    /// {device}: ring size {found}: expected a power of two from {min} to {max}
    RingSize { device: String, found: usize, min: usize, max: usize },
    /// {device}: {reason}
    Thread { device: String, reason: String },
}

/// A device that copies.
pub trait Device: fmt::Debug + Send + Sync {
    /// What the command line calls it.
    fn name(&self) -> &str;

    /// Channels that can be open at a time; more workers than that have to share one by a lock.
    fn max_channels(&self) -> usize {
        usize::MAX
    }

    /// A new channel for one worker, with room for `ring_size` operations (a power of two).
    ///
    /// # Errors
    /// See [`EngineError`].
    fn open_channel(&self, ring_size: usize) -> Result<Box<dyn Channel>, EngineError>;
}

/// A channel of a device: owned by one worker, so it needs no lock. Dropping it frees it; operations still in flight
/// are finished or stopped first, so that none touches memory afterwards.
pub trait Channel: fmt::Debug + Send {
    /// Fixed properties.
    fn info(&self) -> &ChannelInfo;

    /// How many more copies fit.
    fn room(&self) -> usize;

    /// Operations accepted and not yet reported.
    fn in_flight(&self) -> usize;

    /// Puts copies into the ring, in order, as many as fit; returns how many.
    ///
    /// # Safety
    /// Each accepted copy's memory must stay valid, and be used by nobody else in a way that conflicts, until its token
    /// is reported, or until a [`Channel::reset`] has returned [`Reset::Done`]. (Memory of another process may be
    /// written by it at any time: what is copied is then whatever was there.)
    unsafe fn copy(&mut self, ops: &[CopyOp]) -> usize;

    /// Rings the doorbell: everything put into the ring so far may start.
    fn submit(&mut self);

    /// Adds what has completed to `completions`, as much as fits there.
    fn poll(&mut self, completions: &mut Completions);

    /// Works towards a state in which no operation submitted so far touches memory any more (drain, abort or reset,
    /// whatever the engine has). Call it until it returns [`Reset::Done`]; meanwhile submit nothing. Completions that
    /// happen meanwhile are still reported by [`Channel::poll`].
    fn reset(&mut self) -> Reset;

    /// Takes out every operation not yet reported. After [`Reset::Done`] they are dead and can be done over; before,
    /// they may still land.
    fn take_outstanding(&mut self, outstanding: &mut Vec<CopyOp>);

    /// The counters since the channel was opened.
    fn stats(&self) -> ChannelStats;
}
