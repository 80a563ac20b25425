//! Devices, channels, copies and completions: the interface of every copy engine.
//!
//! A [`Device`] provides channels. A [`Channel`] belongs to one worker: copies are put into its ring in bursts,
//! [`Channel::submit`] rings the doorbell, and [`Channel::poll`] returns the tokens of completed copies, in any order.
//! A dynamic call handles a burst, never a single copy.

use std::fmt;

use arrayvec::ArrayVec;
use offcore_stats::counters;

/// Identifies a copy's packet for the submitter. Engines return it unchanged.
pub type Token = u32;

/// A copy of `len` bytes. Source and destination do not overlap.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CopyOp {
    /// First byte to read.
    pub src: *const u8,
    /// First byte to write.
    pub dst: *mut u8,
    /// Number of bytes. A copy of 0 bytes is valid and completes like any other.
    pub len: u32,
    /// Returned on completion.
    pub token: Token,
}

// SAFETY: a copy is only a description. The submitter guarantees that an engine may access the memory.
unsafe impl Send for CopyOp {}

impl CopyOp {
    /// A placeholder for an absent copy.
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
    Refused, // because of its length, alignment or kind
    /// aborted
    Aborted, // before execution: the channel was stopped or reset
}

/// A failed copy: the first `done` bytes were written, the others were not.
#[derive(Clone, Copy, Debug)]
pub struct Failed {
    pub copy: CopyOp,
    pub failure: Failure,
    /// Number of complete bytes at the start of the destination.
    pub done: u32,
}

/// The results of a poll: lists of fixed capacity, reused for each poll.
#[derive(Debug, Default)]
pub struct Completions {
    /// Tokens of successful operations, in the order of completion.
    pub tokens: ArrayVec<Token, 128>,
    pub failed: ArrayVec<Failed, 16>,
}

impl Completions {
    /// Clears both lists.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.failed.clear();
    }

    /// Whether one list is full.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.tokens.is_full() || self.failed.is_full()
    }
}

/// The properties of a channel that are not common to all engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether operations may complete in another order than they were submitted in.
    pub out_of_order: bool,
    /// Whether the calling core makes the copies inside [`Channel::copy`].
    pub synchronous: bool,
    /// Whether it is a model, not hardware. Every figure from it is labelled as simulated.
    pub simulated: bool,
}

/// A channel's fixed properties.
#[derive(Clone, Debug)]
pub struct ChannelInfo {
    /// The name on the command line: `cpu`, `core:1`.
    pub name: String,
    /// Maximum number of operations in the ring.
    pub ring_size: usize,
    /// Maximum length of an operation in bytes. Longer ones fail with [`Failure::Refused`].
    pub max_len: u32,
    pub capabilities: Capabilities,
}

counters! {
    /// A channel's counters. `submitted = completed + failed + in flight`.
    pub struct ChannelStats {
        /// Operations given to the channel.
        submitted: Copies,
        /// Operations that the channel has completed.
        completed: Copies,
        /// Operations that failed, were aborted or were given up.
        failed: Copies,
        /// Bytes of completed operations.
        bytes: Bytes,
    }
}

/// The accounting behind [`ChannelStats`]. Copies in flight are only subtracted when the counters are read.
#[derive(Debug, Default)]
pub struct Ledger {
    submitted: u64,
    submitted_bytes: u64,
    failed: u64,
    failed_bytes: u64,
}

impl Ledger {
    /// Counts accepted copies and their bytes.
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

    /// Returns the counters, given the copies in flight.
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

/// The progress of a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// Outstanding operations may still access memory: call again.
    Pending,
    /// No operation submitted so far accesses memory any more.
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
    /// Returns the name on the command line.
    fn name(&self) -> &str;

    /// Returns the number of channels that can be open at a time. More workers than that must share channels with a
    /// lock.
    fn max_channels(&self) -> usize {
        usize::MAX
    }

    /// Opens a channel for one worker, with room for `ring_size` operations (a power of two).
    ///
    /// # Errors
    /// See [`EngineError`].
    fn open_channel(&self, ring_size: usize) -> Result<Box<dyn Channel>, EngineError>;
}

/// A channel of a device. It is owned by one worker, so it needs no lock. Dropping it frees it. Operations in flight
/// are completed or stopped first, so that none accesses memory afterwards.
pub trait Channel: fmt::Debug + Send {
    /// Returns the fixed properties.
    fn info(&self) -> &ChannelInfo;

    /// Returns the number of copies that can be accepted now.
    fn room(&self) -> usize;

    /// Returns the number of operations accepted and not yet reported.
    fn in_flight(&self) -> usize;

    /// Puts copies into the ring, in order, up to its room. Returns the number of accepted copies.
    ///
    /// # Safety
    /// The memory of each accepted copy must stay valid, and must not be used in a conflicting way, until its token is
    /// reported or until a [`Channel::reset`] has returned [`Reset::Done`]. (Memory of another process may be written
    /// by that process at any time. The copy then contains whatever was there.)
    unsafe fn copy(&mut self, ops: &[CopyOp]) -> usize;

    /// Rings the doorbell: everything put into the ring so far may start.
    fn submit(&mut self);

    /// Adds completed operations to `completions`, up to its capacity.
    fn poll(&mut self, completions: &mut Completions);

    /// Works towards a state in which no operation submitted so far accesses memory any more (by drain, abort or reset,
    /// depending on the engine). Call it until it returns [`Reset::Done`], and submit nothing meanwhile.
    /// [`Channel::poll`] still reports operations that complete meanwhile.
    fn reset(&mut self) -> Reset;

    /// Takes out every operation not yet reported. After [`Reset::Done`] they will never execute and can be repeated;
    /// before that, they may still write.
    fn take_outstanding(&mut self, outstanding: &mut Vec<CopyOp>);

    /// Returns the counters since the channel was opened.
    fn stats(&self) -> ChannelStats;
}
