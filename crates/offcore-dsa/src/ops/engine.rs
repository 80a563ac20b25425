//! The engine: operations in flight on one work queue.

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

/// A shared queue that has no room is asked so often.
const SUBMIT_TRIES: u32 = 10_000;
/// So many empty polls pass before the clock is looked at.
const POLLS_PER_LOOK: u32 = 256;
/// While nothing completes, the queue is asked so often whether it still works.
const ALIVE_EVERY: Duration = Duration::from_millis(10);

/// How an engine uses its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Let the device wait for page faults, where the queue allows it.
    pub block_on_fault: bool,
    /// Let the device write to the cache, where it can.
    pub to_cache: bool,
    /// After a page fault, the memory is touched and the device goes on, so often for one operation; then the
    /// core finishes it. 0: the core finishes at the first fault.
    pub resumes: u32,
    /// A queue from which nothing comes for so long is given up.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { block_on_fault: false, to_cache: false, resumes: 16, timeout: Duration::from_secs(10) }
    }
}

/// Names an operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// A completed operation: which, and what came of it.
pub type Completion = (Ticket, Result<Done, OpsError>);

/// Operations over one work queue, with the core standing in for the device.
///
/// Operations larger than the queue's maximum transfer size are done in pieces; after a page fault the device
/// goes on where it stopped, or the core does. The result is the same whoever computes it, and
/// [`Done::done_by`] says who.
#[derive(Debug)]
pub struct Engine {
    /// Dropped first: after that nothing writes to the records, nor to the memory of operations in flight.
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
    /// Bytes of the piece that the device has.
    piece: usize,
    descriptors: u32,
    resumed: u32,
}

/// How long nothing has come.
#[derive(Debug, Default)]
struct Quiet {
    polls: u32,
    since: Option<Instant>,
    asked: Option<Instant>,
}

impl Engine {
    /// An engine over a queue, whose only user it is if the queue is dedicated.
    pub fn new(portal: Portal, wq: WqInfo, options: Options) -> Self {
        let slots = wq.threshold.clamp(1, wq.size.max(1)) as usize;
        Self::with(Some(portal), wq, options, slots)
    }

    /// An engine without a device: the core does everything.
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

    /// The queue.
    pub fn wq(&self) -> &WqInfo {
        &self.wq
    }

    /// Whether there is a device, and it has not been given up.
    pub fn has_device(&self) -> bool {
        self.portal.is_some()
    }

    /// Operations in flight; those that [`Self::poll`] has still to return are not.
    pub fn in_flight(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Submits an operation. What the device cannot do, the core has done when this returns, and
    /// [`Self::poll`] tells.
    ///
    /// # Errors
    ///
    /// Lengths that differ, memory that overlaps, a full queue.
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
    /// Different lengths, overlapping memory, a copy onto itself that failed half way; a simulated device that no other
    /// thread steps. While the queue is full, this waits.
    pub fn run(&mut self, operation: Operation<'_>) -> Result<Done, OpsError> {
        self.check_stepper()?;
        while self.slots.iter().all(Option::is_some) {
            self.collect();
            spin_loop();
        }
        let unwinding = AbortOnUnwind;
        // SAFETY: only the lifetime changes. The operation is over before this returns: it is refused; or complete;
        // or the portal is closed, after which the device touches nothing, and the core has completed it. It does not
        // unwind.
        let operation = unsafe { std::mem::transmute::<Operation<'_>, Operation<'static>>(operation) };
        let result = self.submit(operation).and_then(|ticket| self.wait(ticket));
        std::mem::forget(unwinding);
        result
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Done, OpsError> {
        loop {
            if let Some(at) = self.done.iter().position(|(done, _)| *done == ticket)
                && let Some((_, result)) = self.done.remove(at)
            {
                return result;
            }
            self.collect();
            spin_loop();
        }
    }

    /// Refuses to wait for a simulated device that only the caller could step.
    fn check_stepper(&self) -> Result<(), OpsError> {
        let began = Instant::now();
        while let Some(portal) = &self.portal {
            match portal.stepper() {
                Stepper::Other => break,
                // Another thread may start stepping soon.
                Stepper::Nobody if began.elapsed() < self.options.timeout => std::thread::yield_now(),
                Stepper::Nobody | Stepper::Caller => {
                    return Err(OpsError::Stepped { wq: self.wq.name.clone() });
                }
            }
        }
        Ok(())
    }

    /// A completed operation, in no particular order; `None` when there is none now.
    pub fn poll(&mut self) -> Option<Completion> {
        if self.done.is_empty() {
            self.collect();
        }
        self.done.pop_front()
    }

    /// Collects what is complete, and gives the device up when nothing has been for too long.
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
            self.give_up();
        }
    }

    /// Whether the record of a slot has been written; if so, what it says is done.
    fn look(&mut self, slot: usize) -> bool {
        let Some(record) = self.records[slot].read() else { return false };
        let Some(mut work) = self.slots[slot].take() else { return false };
        let left = work.progress.left();
        // SAFETY: the memory is as `Source::new` and `Destination::new` ask; the device has finished with the piece, as
        // it wrote the record.
        let step = unsafe { work.progress.absorb(&work.operation, work.piece, &record) };
        match step {
            Step::Done => {
                let mended = work.progress.mended.map(|address| DoneBy::Both(Why::PageFault { address }));
                self.tell(&work, Ok(mended.unwrap_or(DoneBy::Device)));
            }
            Step::Damaged(why) => self.tell(&work, Err(OpsError::Damaged { why })),
            Step::Core(why) => self.finish(work, why),
            Step::Next => self.next_piece(slot, work),
            Step::Faulted(address) => {
                let again = work.resumed < self.options.resumes;
                if !again || (work.resumed > 0 && work.progress.left() == left) {
                    self.finish(work, Why::PageFault { address });
                } else {
                    // SAFETY: the memory is as `Source::new` and `Destination::new` ask.
                    unsafe { touch(&work.operation, &work.progress, address) };
                    work.resumed += 1;
                    self.next_piece(slot, work);
                }
            }
        }
        true
    }

    /// Gives the next piece of an operation to the device, in this slot; or lets the core finish it.
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
        // Reserved in operations that only read (Table 5-3).
        let to_cache = self.options.to_cache && work.operation.memory().iter().any(|memory| memory.written);
        flags.set(Flags::CACHE_CONTROL_1, to_cache && self.wq.gen_cap & gen_cap::CACHE_CONTROL_MEMORY != 0);
        let descriptor = descriptor.with_flags(flags);
        record.clear();
        portal.fence();
        let accepted = (0..SUBMIT_TRIES).any(|_| {
            // SAFETY: whoever has submitted the operation keeps its memory until it is finished; the record is this engine's.
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

    /// Why no device will do (the next piece of) an operation.
    fn refusal(&self, work: &InFlight) -> Option<Why> {
        match &self.portal {
            _ if work.operation.len() == 0 => Some(Why::Nothing),
            None if work.descriptors > 0 => Some(Why::Lost),
            None => Some(Why::NoDevice),
            Some(_) => refusal(&work.operation, &self.wq),
        }
    }

    /// The core finishes an operation.
    fn finish(&mut self, mut work: InFlight, why: Why) {
        // SAFETY: the memory is as `Source::new` and `Destination::new` ask, `submit` checked the operation, and no
        // device works on it: its last piece is complete, was never accepted, or died with its portal.
        unsafe { work.progress.finish(&work.operation) };
        self.tell(&work, Ok(if work.descriptors > 0 { DoneBy::Both(why) } else { DoneBy::Core(why) }));
    }

    fn tell(&mut self, work: &InFlight, done_by: Result<DoneBy, OpsError>) {
        let InFlight { ticket, progress: Progress { difference, crc, .. }, descriptors, resumed, .. } = *work;
        let result = done_by.map(|done_by| Done { difference, crc, done_by, descriptors, resumed });
        self.done.push_back((ticket, result));
    }

    /// Closes the queue, which stops what the device still had, and finishes it.
    fn give_up(&mut self) {
        let in_flight = self.in_flight();
        tracing::warn!(wq = self.wq.name, in_flight, "the device does not answer; closing its queue");
        self.portal = None;
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_none() || self.look(slot) {
                continue;
            }
            let Some(work) = self.slots[slot].take() else { continue };
            // A device that stopped anywhere in a piece may have overwritten what is still to be read.
            if work.operation.overlaps() {
                self.tell(&work, Err(OpsError::Damaged { why: Why::Lost }));
            } else {
                self.finish(work, Why::Lost);
            }
        }
        self.quiet = Quiet::default();
    }
}

/// Touches the memory where an operation goes on and where it faulted, so that it is there when the device
/// comes back.
///
/// # Safety
///
/// The operation's memory is valid and nobody else uses it.
unsafe fn touch(operation: &Operation<'_>, progress: &Progress, fault: u64) {
    const PAGE: usize = 4096;
    for memory in operation.memory() {
        let start = memory.ptr as usize;
        // The fault's low 12 bits may be masked: its page may begin before the memory.
        let page = (fault as usize & !(PAGE - 1)).max(start) - start;
        for at in [progress.start, page].into_iter().filter(|at| *at < memory.len) {
            // SAFETY: `at` is inside of the memory, which is valid; a byte that is written back as it was read belongs
            // to nobody else.
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

/// Ends the process when it is dropped. A panic must not free memory that a device still writes.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        std::process::abort();
    }
}
