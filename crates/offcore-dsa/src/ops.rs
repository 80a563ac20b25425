//! Operations of a work queue: copy, fill, compare, CRC32C. The CPU core executes operations that the device does not
//! support, and finishes operations that the device fails.
//!
//! ```
//! use offcore_dsa::ops::{DoneBy, Engine, Operation, Why};
//!
//! let mut engine = Engine::core();
//! let done = engine.run(Operation::Crc { src: b"123456789", seed: 0 })?;
//! assert_eq!(done.crc, 0xe306_9283);
//! assert_eq!(done.done_by, DoneBy::Core(Why::NoDevice));
//! # Ok::<(), offcore_dsa::ops::LengthError>(())
//! ```

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use crate::completion::{Completed, CompletionRecord, Status};
use crate::compute::{compare, continued, fill};
use crate::descriptor::{Descriptor, Flags, Opcode};
use crate::portal::{Portal, SubmitResult};
use crate::wq::WqInfo;

/// Number of attempts to submit to a full shared queue.
const SUBMIT_TRIES: u32 = 10_000;
/// Number of polls of a record between two reads of the clock.
const POLLS_PER_CHECK: u32 = 256;
/// While nothing completes, the interval between checks that the queue still works.
const CHECK_EVERY: Duration = Duration::from_millis(10);

/// An operation. It may be longer than the maximum size of a descriptor.
#[derive(Debug)]
pub enum Operation<'a> {
    /// Copies between slices of the same length.
    Copy { src: &'a [u8], dst: &'a mut [u8] },
    /// Fills with a pattern of 8 bytes, the least significant byte first.
    Fill { pattern: u64, dst: &'a mut [u8] },
    /// Finds the first difference of slices of the same length.
    Compare { first: &'a [u8], second: &'a [u8] },
    /// Computes the CRC32C, continued from `seed`, which is 0 at the start.
    Crc { src: &'a [u8], seed: u32 },
}

/// The result of an operation and how it was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Compare: the offset of the first difference; `None` if the memory is equal.
    pub difference: Option<usize>,
    /// CRC32C: the CRC; 0 for other operations.
    pub crc: u32,
    pub done_by: DoneBy,
    /// Number of descriptors that the device accepted, one per piece of at most the queue's maximum transfer size.
    pub descriptors: u32,
}

/// The executor of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display)]
pub enum DoneBy {
    /// device
    Device,
    /// core: {0}
    Core(Why),
    /// device, finished by the core: {0}
    Both(Why),
}

/// The reason why the core executed an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display)]
pub enum Why {
    /// no bytes
    Nothing,
    /// no device
    NoDevice,
    /// the work queue does not have the operation
    Unsupported,
    /// the shared work queue stayed full
    QueueFull,
    /// the device failed: {0}
    Failed(Status),
    // The device was too slow, or it is halted.
    /// the device did not answer; its queue was closed
    Lost,
}

/// {operation}: the second slice has {found} bytes, expected {expected}
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub struct LengthError {
    pub operation: Opcode,
    pub found: usize,
    pub expected: usize,
}

/// A work queue that executes one operation at a time, with the core as a fallback.
#[derive(Debug)]
pub struct Engine {
    /// Dropped first: after that, the device does not write to the record.
    portal: Option<Portal>,
    record: Box<CompletionRecord>,
    wq: WqInfo,
    timeout: Duration,
}

impl Engine {
    /// Creates an engine over a queue. A dedicated queue must have no other user. If the device completes nothing for
    /// `timeout`, the queue is closed. A simulated device must be stepped by another thread.
    pub fn new(portal: Portal, wq: WqInfo, timeout: Duration) -> Self {
        Self { portal: Some(portal), record: Box::default(), wq, timeout }
    }

    /// Creates an engine without a device: the core executes everything.
    pub fn core() -> Self {
        let (wq, timeout) = (WqInfo::default(), Duration::ZERO);
        Self { portal: None, record: Box::default(), wq, timeout }
    }

    /// Executes an operation. If the device fails a piece, the core executes this piece and all later ones.
    ///
    /// # Errors
    /// The lengths of two slices differ.
    pub fn run(&mut self, mut operation: Operation<'_>) -> Result<Done, LengthError> {
        operation.check()?;
        let crc = if let Operation::Crc { seed, .. } = operation { seed } else { 0 };
        let mut done = Done { difference: None, crc, done_by: DoneBy::Device, descriptors: 0 };
        let mut at = 0;
        if let Err(why) = self.by_device(&mut operation, &mut at, &mut done) {
            operation.by_core(at, &mut done);
            done.done_by = if done.descriptors > 0 { DoneBy::Both(why) } else { DoneBy::Core(why) };
        }
        Ok(done)
    }

    /// Executes an operation from byte `at` on, until it is done or a piece fails.
    fn by_device(
        &mut self,
        operation: &mut Operation<'_>,
        at: &mut usize,
        done: &mut Done,
    ) -> Result<(), Why> {
        let len = operation.len();
        if len == 0 {
            return Err(Why::Nothing);
        }
        if self.portal.is_some() && !self.wq.ops.contains(operation.opcode()) {
            return Err(Why::Unsupported);
        }
        while *at < len && done.difference.is_none() {
            // A transfer size is a 32-bit field.
            let size = ((len - *at) as u64).min(self.wq.max_transfer_size.min(1 << 31)) as u32;
            // SAFETY: the descriptor's memory is borrowed by the operation until `execute` has returned.
            let record =
                unsafe { self.execute(operation.piece(*at, size, done.crc), &mut done.descriptors) }?;
            match (record.status, &*operation) {
                (Status::SUCCESS, Operation::Compare { .. }) if record.result == 1 => {
                    done.difference = Some(*at + record.completed.min(size) as usize);
                }
                (Status::SUCCESS, Operation::Crc { .. }) => done.crc = record.specific[0] as u32,
                (Status::SUCCESS, _) => {}
                (status, _) => return Err(Why::Failed(status)),
            }
            *at += size as usize;
        }
        Ok(())
    }

    /// Submits a descriptor and waits for its record. When this returns, the device does not access the descriptor's
    /// memory any more.
    ///
    /// # Safety
    /// The descriptor's memory is valid, and nothing else uses it until this function has returned or unwound.
    unsafe fn execute(&mut self, descriptor: Descriptor, descriptors: &mut u32) -> Result<Completed, Why> {
        // The portal is returned only when the device has completed the descriptor or has not accepted it. Otherwise it
        // is dropped here, also by a panic, and the queue is closed.
        let mut portal = self.portal.take().ok_or(Why::NoDevice)?;
        let completion = std::ptr::from_ref(&*self.record).expose_provenance() as u64;
        let descriptor = Descriptor { completion, ..descriptor };
        self.record.clear();
        portal.fence();
        let accepted = (0..SUBMIT_TRIES).any(|_| {
            spin_loop();
            // SAFETY: the caller keeps the descriptor's memory valid and unused until this returns; the record belongs
            // to this engine.
            unsafe { portal.submit(&descriptor) == SubmitResult::Accepted }
        });
        if !accepted {
            self.portal = Some(portal);
            return Err(Why::QueueFull);
        }
        *descriptors += 1;
        let (began, mut checked) = (Instant::now(), Duration::ZERO);
        loop {
            for _ in 0..POLLS_PER_CHECK {
                if let Some(record) = self.record.read() {
                    self.portal = Some(portal);
                    return Ok(record);
                }
                spin_loop();
            }
            let waited = began.elapsed();
            if waited > checked + CHECK_EVERY {
                checked = waited;
                if waited > self.timeout || !portal.is_alive() {
                    break;
                }
            }
        }
        tracing::warn!(wq = self.wq.name, "the device does not answer; closing its queue");
        drop(portal);
        self.record.read().ok_or(Why::Lost)
    }
}

impl Operation<'_> {
    /// Returns the operation code.
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Copy { .. } => Opcode::MemoryMove,
            Self::Fill { .. } => Opcode::Fill,
            Self::Compare { .. } => Opcode::Compare,
            Self::Crc { .. } => Opcode::CrcGeneration,
        }
    }

    const fn len(&self) -> usize {
        match self {
            Self::Copy { src, .. } | Self::Crc { src, .. } => src.len(),
            Self::Fill { dst, .. } => dst.len(),
            Self::Compare { first, .. } => first.len(),
        }
    }

    fn check(&self) -> Result<(), LengthError> {
        let found = match self {
            Self::Copy { dst, .. } => dst.len(),
            Self::Compare { second, .. } => second.len(),
            _ => return Ok(()),
        };
        let (operation, expected) = (self.opcode(), self.len());
        if found == expected { Ok(()) } else { Err(LengthError { operation, found, expected }) }
    }

    /// Returns the descriptor of `size` bytes from byte `at` on, without completion record (sections 8.3.4 to 8.3.13).
    fn piece(&mut self, at: usize, size: u32, crc: u32) -> Descriptor {
        let read = |memory: &[u8]| memory[at..].as_ptr().expose_provenance() as u64;
        let write = |memory: &mut [u8]| memory[at..].as_mut_ptr().expose_provenance() as u64;
        let whole = Descriptor { size, ..Descriptor::new(self.opcode(), Flags::CRAV | Flags::RCR) };
        match self {
            Self::Copy { src, dst } => Descriptor { src: read(src), dst: write(dst), ..whole },
            Self::Fill { pattern, dst } => {
                Descriptor { src: continued(*pattern, at), dst: write(dst), ..whole }
            }
            Self::Compare { first, second } => Descriptor { src: read(first), dst: read(second), ..whole },
            Self::Crc { src, .. } => Descriptor { src: read(src), specific: [crc.into(), 0, 0], ..whole },
        }
    }

    /// Executes the operation on the core, from byte `at` on.
    fn by_core(&mut self, at: usize, done: &mut Done) {
        match self {
            Self::Copy { src, dst } => dst[at..].copy_from_slice(&src[at..]),
            Self::Fill { pattern, dst } => fill(&mut dst[at..], continued(*pattern, at)),
            Self::Compare { first, second } => {
                done.difference = compare(&first[at..], &second[at..]).map(|found| at + found);
            }
            Self::Crc { src, .. } => done.crc = crc32c::crc32c_append(done.crc, &src[at..]),
        }
    }
}
