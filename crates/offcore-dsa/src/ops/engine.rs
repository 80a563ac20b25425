//! The engine: operations in flight on a work queue.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::time::{Duration, Instant};

use crate::completion::CompletionRecord;
use crate::descriptor::Flags;
use crate::portal::{Portal, Submitted};
use crate::sim::Stepper;
use crate::wq::{WqInfo, gen_cap};

use super::operation::Operation;
use super::outcome::{Done, DoneBy, OpsError, Why};
use super::progress::{Progress, Step, refusal};

/// Number of attempts to submit to a full shared queue.
const SUBMIT_TRIES: u32 = 10_000;
/// Number of empty polls between two reads of the clock.
const POLLS_PER_LOOK: u32 = 256;
/// While nothing completes, the interval between checks that the queue still works.
const ALIVE_EVERY: Duration = Duration::from_millis(10);

/// Options for the use of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Lets the device wait for page faults, if the queue allows it.
    pub block_on_fault: bool,
    /// Lets the device write to the cache, if it supports that.
    pub to_cache: bool,
    /// Maximum number of continuations of an operation by the device. After a page fault the memory is touched and the
    /// device continues; after the last continuation, the core finishes the operation. 0: the core finishes it at the
    /// first fault.
    pub resumes: u32,
    /// Time without completions after which the queue is given up.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { block_on_fault: false, to_cache: false, resumes: 16, timeout: Duration::from_secs(10) }
    }
}

/// Identifies an operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// A completed operation: its ticket and its result.
pub type Completion = (Ticket, Done);

/// Operations on a work queue, with the core as a fallback.
///
/// An operation larger than the queue's maximum transfer size is done in pieces. After a page fault the device
/// continues at the fault, or the core does. The result is the same in all cases, and [`Done::done_by`] records the
/// executor.
#[derive(Debug)]
pub struct Engine {
    /// Dropped first: after that, the device writes neither to the records nor to the memory of operations in flight.
    portal: Option<Portal>,
    records: Box<[CompletionRecord]>,
    slots: Box<[Option<InFlight>]>,
    done: VecDeque<Completion>,
    wq: WqInfo,
    options: Options,
    tickets: u64,
    quiet: Quiet,
}

#[derive(Debug)]
struct InFlight {
    ticket: Ticket,
    operation: Operation<'static>,
    progress: Progress,
    /// Size in bytes of the piece that the device has.
    piece: usize,
    descriptors: u32,
    resumed: u32,
}

/// The time since the last completion.
#[derive(Debug, Default)]
struct Quiet {
    polls: u32,
    since: Option<Instant>,
    asked: Option<Instant>,
}

impl Engine {
    /// Creates an engine over a queue. A dedicated queue must have no other user.
    pub fn new(portal: Portal, wq: WqInfo, options: Options) -> Self {
        let slots = wq.threshold.clamp(1, wq.size.max(1)) as usize;
        Self::with(Some(portal), wq, options, slots)
    }

    /// Creates an engine without a device: the core executes everything.
    pub fn core() -> Self {
        let wq = WqInfo { name: "no device".into(), ..WqInfo::default() };
        Self::with(None, wq, Options::default(), 1)
    }

    fn with(portal: Option<Portal>, wq: WqInfo, options: Options, slots: usize) -> Self {
        Self {
            portal,
            records: (0..slots).map(|_| CompletionRecord::default()).collect(),
            slots: (0..slots).map(|_| None).collect(),
            done: VecDeque::new(),
            wq,
            options,
            tickets: 0,
            quiet: Quiet::default(),
        }
    }

    /// Returns the properties of the queue.
    pub fn wq(&self) -> &WqInfo {
        &self.wq
    }

    /// Whether the engine has a device that it has not given up.
    pub fn has_device(&self) -> bool {
        self.portal.is_some()
    }

    /// Returns the number of operations in flight, without completed ones that [`Self::poll`] has yet to return.
    pub fn in_flight(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Submits an operation. If the device cannot execute it, the core has done so when this returns, and
    /// [`Self::poll`] returns the result.
    ///
    /// # Errors
    ///
    /// Fails if lengths differ or the queue is full.
    pub fn submit(&mut self, operation: Operation<'static>) -> Result<Ticket, OpsError> {
        operation.check()?;
        let (progress, ticket) = (Progress::new(&operation), Ticket(self.tickets));
        let work = InFlight { ticket, operation, progress, piece: 0, descriptors: 0, resumed: 0 };
        let free = self.slots.iter().position(Option::is_none);
        match (self.refusal(&work), free) {
            (Some(why), _) => self.finish(work, why),
            (None, Some(slot)) => self.next_piece(slot, work),
            (None, None) => {
                return Err(OpsError::Full { wq: self.wq.name.clone(), limit: self.slots.len() });
            }
        }
        self.tickets += 1;
        Ok(ticket)
    }

    /// Submits an operation and waits for it.
    ///
    /// # Errors
    ///
    /// Fails if lengths differ, or if no other thread steps the simulated device. If the queue is full, this function
    /// waits.
    pub fn run(&mut self, operation: Operation<'_>) -> Result<Done, OpsError> {
        self.check_stepper()?;
        while self.slots.iter().all(Option::is_some) {
            self.collect();
            spin_loop();
        }
        let unwinding = AbortOnUnwind;
        // SAFETY: only the lifetime changes. The operation has ended before this function returns: it was refused, or
        // completed, or the portal was closed, after which the device accesses no memory, and the core has completed
        // it. The function does not unwind in between.
        let operation = unsafe { std::mem::transmute::<Operation<'_>, Operation<'static>>(operation) };
        let result = self.submit(operation).map(|ticket| self.wait(ticket));
        std::mem::forget(unwinding);
        result
    }

    fn wait(&mut self, ticket: Ticket) -> Done {
        loop {
            if let Some(at) = self.done.iter().position(|(done, _)| *done == ticket)
                && let Some((_, done)) = self.done.remove(at)
            {
                return done;
            }
            self.collect();
            spin_loop();
        }
    }

    /// Returns an error instead of waiting for a simulated device that only the calling thread steps.
    fn check_stepper(&self) -> Result<(), OpsError> {
        let began = Instant::now();
        while let Some(portal) = &self.portal {
            match portal.stepper() {
                Stepper::Other => break,
                // Another thread may start stepping soon.
                Stepper::Unstepped if began.elapsed() < self.options.timeout => std::thread::yield_now(),
                Stepper::Unstepped | Stepper::Caller => {
                    return Err(OpsError::Stepped { wq: self.wq.name.clone() });
                }
            }
        }
        Ok(())
    }

    /// Returns a completed operation, in no particular order; `None` if none has completed.
    pub fn poll(&mut self) -> Option<Completion> {
        if self.done.is_empty() {
            self.collect();
        }
        self.done.pop_front()
    }

    /// Collects completions, and gives up the device if it has completed nothing for too long.
    fn collect(&mut self) {
        let (mut came, mut waiting) = (false, false);
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_some() {
                waiting = true;
                came |= self.look(slot);
            }
        }
        if came || !waiting {
            self.quiet = Quiet::default();
            return;
        }
        self.quiet.polls += 1;
        if !self.quiet.polls.is_multiple_of(POLLS_PER_LOOK) && self.quiet.since.is_some() {
            return;
        }
        let now = Instant::now();
        let since = *self.quiet.since.get_or_insert(now);
        let asked = self.quiet.asked.get_or_insert(now);
        let mut gone = now - since > self.options.timeout;
        if now - *asked > ALIVE_EVERY {
            *asked = now;
            gone |= self.portal.as_ref().is_some_and(|portal| !portal.is_alive());
        }
        if gone {
            self.abort_and_close();
        }
    }

    /// Handles the record of a slot, if it has been written. Returns whether it has.
    fn look(&mut self, slot: usize) -> bool {
        let Some(record) = self.records[slot].read() else { return false };
        let Some(mut work) = self.slots[slot].take() else { return false };
        let left = work.progress.left();
        match work.progress.absorb(&work.operation, work.piece, &record) {
            Step::Done => self.tell(&work, DoneBy::Device),
            Step::Core(why) => self.finish(work, why),
            Step::Next => self.next_piece(slot, work),
            Step::Faulted(address) => {
                let again = work.resumed < self.options.resumes;
                if !again || (work.resumed > 0 && work.progress.left() == left) {
                    self.finish(work, Why::PageFault { address });
                } else {
                    // SAFETY: the memory is valid as `Source::new` and `Destination::new` require.
                    unsafe { touch(&work.operation, &work.progress, address) };
                    work.resumed += 1;
                    self.next_piece(slot, work);
                }
            }
        }
        true
    }

    /// Submits the next piece of an operation from this slot, or lets the core finish the operation.
    fn next_piece(&mut self, slot: usize, mut work: InFlight) {
        if let Some(why) = self.refusal(&work) {
            return self.finish(work, why);
        }
        let Some(portal) = &mut self.portal else { return self.finish(work, Why::NoDevice) };
        let record = &self.records[slot];
        let mut descriptor = work.progress.piece(&work.operation, self.wq.max_transfer_size);
        descriptor.completion = std::ptr::from_ref(record) as u64;
        let mut flags = descriptor.flags() | Flags::CRAV | Flags::RCR;
        flags.set(Flags::BLOCK_ON_FAULT, self.options.block_on_fault && self.wq.block_on_fault);
        // Cache control is reserved in operations that only read (Table 5-3).
        let to_cache = self.options.to_cache && work.operation.memory().iter().any(|memory| memory.written);
        flags.set(Flags::CACHE_CONTROL_1, to_cache && self.wq.gen_cap & gen_cap::CACHE_CONTROL_MEMORY != 0);
        let descriptor = descriptor.with_flags(flags);
        record.clear();
        portal.fence();
        let accepted = (0..SUBMIT_TRIES).any(|_| {
            // SAFETY: the submitter keeps the operation's memory valid until it is finished; the record belongs to this
            // engine.
            let accepted = unsafe { portal.submit(&descriptor) } == Submitted::Accepted;
            if !accepted {
                spin_loop();
            }
            accepted
        });
        if !accepted {
            return self.finish(work, Why::QueueFull);
        }
        work.piece = descriptor.size as usize;
        work.descriptors += 1;
        self.slots[slot] = Some(work);
    }

    /// Returns the reason why the device cannot execute the next piece of an operation, if any.
    fn refusal(&self, work: &InFlight) -> Option<Why> {
        match &self.portal {
            _ if work.operation.len() == 0 => Some(Why::Nothing),
            None if work.descriptors > 0 => Some(Why::Lost),
            None => Some(Why::NoDevice),
            Some(_) => refusal(&work.operation, &self.wq),
        }
    }

    /// Lets the core finish an operation.
    fn finish(&mut self, mut work: InFlight, why: Why) {
        // SAFETY: the memory is valid as `Source::new` and `Destination::new` require, and `submit` checked the
        // operation. The device does not work on it: its last piece completed, was never accepted, or was aborted when
        // the portal was closed.
        unsafe { work.progress.finish(&work.operation) };
        self.tell(&work, if work.descriptors > 0 { DoneBy::Both(why) } else { DoneBy::Core(why) });
    }

    fn tell(&mut self, work: &InFlight, done_by: DoneBy) {
        let InFlight { ticket, progress: Progress { difference, crc, .. }, descriptors, resumed, .. } = *work;
        self.done.push_back((ticket, Done { difference, crc, done_by, descriptors, resumed }));
    }

    /// Closes the queue, which aborts the operations that the device has, and finishes them.
    fn abort_and_close(&mut self) {
        let in_flight = self.in_flight();
        tracing::warn!(wq = self.wq.name, in_flight, "the device does not answer; closing its queue");
        self.portal = None;
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_none() || self.look(slot) {
                continue;
            }
            let Some(work) = self.slots[slot].take() else { continue };
            self.finish(work, Why::Lost);
        }
        self.quiet = Quiet::default();
    }
}

/// Touches the memory at the position of the next piece and at the fault, so that the pages are present when the device
/// continues.
///
/// # Safety
///
/// The operation's memory is valid, and nothing else uses it.
unsafe fn touch(operation: &Operation<'_>, progress: &Progress, fault: u64) {
    const PAGE: usize = 4096;
    for memory in operation.memory() {
        let start = memory.ptr as usize;
        // The fault address's low 12 bits may be masked: its page may begin before the memory.
        let page = (fault as usize & !(PAGE - 1)).max(start) - start;
        for at in [progress.start, page].into_iter().filter(|at| *at < memory.len) {
            // SAFETY: `at` is within the memory, which is valid. Nothing else uses the memory, so the byte can be
            // written with the value that was read.
            unsafe {
                let byte = memory.ptr.add(at);
                let value = byte.read_volatile();
                if memory.written {
                    byte.write_volatile(value);
                }
            }
        }
    }
}

/// Aborts the process when it is dropped. A panic must not free memory that a device still writes.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        std::process::abort();
    }
}
