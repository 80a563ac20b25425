//! The engine: operations in flight on one work queue.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::time::{Duration, Instant};

use crate::completion::CompletionRecord;
use crate::descriptor::Opcode;
use crate::portal::{Portal, Submitted};
use crate::wq::{WqInfo, gen_cap};

use super::encode;
use super::operation::Operation;
use super::outcome::{Done, DoneBy, OpsError, Value, Why};
use super::progress::{Progress, Step};

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
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { block_on_fault: false, to_cache: false, resumes: 16, patience: Duration::from_secs(10) }
    }
}

/// Names an operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// A completed operation: which, and what came of it.
pub type Completion = (Ticket, Result<Done<Value>, OpsError>);

/// All operations over one work queue, with the core standing in for the device.
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
    in_flight: usize,
    quiet: Quiet,
}

#[derive(Debug)]
struct InFlight {
    ticket: Ticket,
    operation: Operation,
    progress: Progress,
    /// Bytes of the piece that the device has.
    piece: usize,
    descriptors: u32,
    resumed: u32,
}

/// How long nothing has come.
#[derive(Debug)]
struct Quiet {
    polls: u32,
    since: Option<Instant>,
    asked: Option<Instant>,
}

impl Quiet {
    const NOT: Self = Self { polls: 0, since: None, asked: None };
}

impl Engine {
    /// An engine over a queue, whose only user it is if the queue is dedicated.
    pub fn new(portal: Portal, wq: WqInfo, options: Options) -> Self {
        let slots = wq.threshold.clamp(1, wq.size.max(1)) as usize;
        Self::with(Some(portal), wq, options, slots)
    }

    /// An engine without a device: the core does everything.
    pub fn core() -> Self {
        let wq = WqInfo {
            name: "no device".into(),
            mode: Default::default(),
            size: 0,
            threshold: 0,
            max_batch_size: 0,
            max_transfer_size: 0,
            block_on_fault: false,
            ops: Default::default(),
            gen_cap: 0,
            version: 0,
            engines: 0,
            numa_node: None,
        };
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
            in_flight: 0,
            quiet: Quiet::NOT,
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
        self.in_flight
    }

    /// Submits an operation. What the device cannot do, the core has done when this returns, and
    /// [`Self::poll`] tells.
    ///
    /// # Errors
    ///
    /// Lengths that do not fit, memory that overlaps, an inter-domain operation that the device lacks, a full
    /// queue.
    ///
    /// # Safety
    ///
    /// Until the operation's ticket has come back from [`Self::poll`], or the engine is dropped, for every
    /// [`Source`] of the operation: its bytes are valid for reads and nobody writes them; for every
    /// [`Destination`]: its bytes are valid for reads and writes and nobody else reads or writes them. (The
    /// source and the destination of one copy may overlap.) An engine that is leaked is never dropped. For
    /// inter-domain operations: the owner of the memory behind the handle has given it out for this.
    ///
    /// [`Source`]: super::Source
    /// [`Destination`]: super::Destination
    pub unsafe fn submit(&mut self, operation: Operation) -> Result<Ticket, OpsError> {
        operation.check()?;
        let progress = Progress::new(&operation);
        let ticket = Ticket(self.tickets);
        let work = InFlight { ticket, operation, progress, piece: 0, descriptors: 0, resumed: 0 };
        match self.refusal(&work) {
            Some(reason) if operation.is_inter_domain() => {
                let device = self.device();
                return Err(OpsError::NotSupported { operation: operation.opcode(), device, reason });
            }
            Some(why) => {
                self.tickets += 1;
                if operation == Operation::Drain {
                    self.wait_for_all();
                }
                self.finish(work, why);
            }
            None => {
                let limit = self.slots.len();
                let Some(slot) = self.slots.iter().position(Option::is_none) else {
                    return Err(OpsError::Full { device: self.device(), limit });
                };
                self.tickets += 1;
                self.in_flight += 1;
                self.next_piece(slot, work);
            }
        }
        Ok(ticket)
    }

    /// Submits an operation and waits for it.
    ///
    /// # Errors
    ///
    /// As [`Self::submit`] and as the operation has them. While the queue is full, this polls instead of
    /// failing.
    ///
    /// # Safety
    ///
    /// As [`Self::submit`], until this returns.
    pub unsafe fn run(&mut self, operation: Operation) -> Result<Done<Value>, OpsError> {
        let ticket = loop {
            // SAFETY: as for this function.
            match unsafe { self.submit(operation) } {
                Err(OpsError::Full { .. }) => self.collect(),
                other => break other?,
            }
        };
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

    /// A completed operation, in no particular order; `None` when there is none now.
    pub fn poll(&mut self) -> Option<Completion> {
        if self.done.is_empty() && self.in_flight > 0 {
            self.collect();
        }
        self.done.pop_front()
    }

    /// Collects what is complete, and gives the device up when nothing has been for too long.
    fn collect(&mut self) {
        let mut came = false;
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_some() {
                came |= self.look(slot);
            }
        }
        if came || self.in_flight == 0 {
            self.quiet = Quiet::NOT;
            return;
        }
        self.quiet.polls += 1;
        if !self.quiet.polls.is_multiple_of(POLLS_PER_LOOK) && self.quiet.since.is_some() {
            return;
        }
        let now = Instant::now();
        let since = *self.quiet.since.get_or_insert(now);
        let asked = self.quiet.asked.get_or_insert(now);
        let mut gone = now - since > self.options.patience;
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
        // SAFETY: the memory is as `submit` asks; the device has finished with the piece, as it wrote the
        // record.
        let step = unsafe { work.progress.absorb(&work.operation, work.piece, &record) };
        match step {
            Step::Done(value) => {
                let mended = work.progress.mended.map(|address| DoneBy::Both(Why::PageFault { address }));
                self.complete(&work, Ok(value), mended.unwrap_or(DoneBy::Device));
            }
            Step::Failed(error) => self.complete(&work, Err(error), DoneBy::Device),
            Step::Core(why) => self.stand_in(work, why),
            Step::Next => self.next_piece(slot, work),
            Step::Faulted(address) => {
                let again = work.resumed < self.options.resumes;
                if !again || (work.resumed > 0 && work.progress.left() == left) {
                    self.stand_in(work, Why::PageFault { address });
                } else {
                    // SAFETY: the memory is as `submit` asks.
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
            return self.stand_in(work, why);
        }
        let (descriptor, piece) = match work.progress.piece(&work.operation, &self.wq) {
            Ok(next) => next,
            Err(why) => return self.stand_in(work, why),
        };
        let opcode = work.operation.opcode();
        let record = &self.records[slot];
        let block = self.options.block_on_fault && self.wq.block_on_fault;
        let to_cache = self.options.to_cache && self.wq.gen_cap & gen_cap::CACHE_CONTROL_MEMORY != 0;
        let flags = descriptor.flags() | encode::common_flags(opcode, block, to_cache);
        let descriptor = encode::with_record(descriptor.with_flags(flags), std::ptr::from_ref(record) as u64);
        record.clear();
        let Some(portal) = &mut self.portal else { return self.stand_in(work, Why::NoDevice) };
        portal.fence();
        let accepted = (0..SUBMIT_TRIES).any(|_| {
            let accepted = portal.submit(&descriptor) == Submitted::Accepted;
            if !accepted {
                spin_loop();
            }
            accepted
        });
        if !accepted {
            return self.stand_in(work, Why::QueueFull);
        }
        work.piece = piece;
        work.descriptors += 1;
        self.slots[slot] = Some(work);
    }

    /// Why no device will do (the next piece of) an operation.
    fn refusal(&self, work: &InFlight) -> Option<Why> {
        let counts = !matches!(work.operation.opcode(), Opcode::Noop | Opcode::Drain | Opcode::UpdateWindow);
        if counts && work.operation.len() == 0 {
            return Some(Why::Nothing);
        }
        match &self.portal {
            None if work.descriptors > 0 => Some(Why::Lost),
            None => Some(Why::NoDevice),
            Some(_) => work.progress.piece(&work.operation, &self.wq).err(),
        }
    }

    /// An operation that was in flight is finished by the core.
    fn stand_in(&mut self, work: InFlight, why: Why) {
        self.in_flight -= 1;
        self.finish(work, why);
    }

    fn finish(&mut self, mut work: InFlight, why: Why) {
        let result = if work.operation.is_inter_domain() && why != Why::Nothing {
            let (operation, device) = (work.operation.opcode(), self.device());
            Err(OpsError::NotSupported { operation, device, reason: why })
        } else {
            // SAFETY: the memory is as `submit` asks, `submit` checked the operation, and no device works on
            // it: its last piece is complete, was never accepted, or died with its portal.
            unsafe { work.progress.finish(&work.operation) }
        };
        let done_by = if work.descriptors > 0 { DoneBy::Both(why) } else { DoneBy::Core(why) };
        self.tell(&work, result, done_by);
    }

    fn complete(&mut self, work: &InFlight, result: Result<Value, OpsError>, done_by: DoneBy) {
        self.in_flight -= 1;
        self.tell(work, result, done_by);
    }

    fn tell(&mut self, work: &InFlight, result: Result<Value, OpsError>, done_by: DoneBy) {
        let InFlight { ticket, descriptors, resumed, .. } = *work;
        let result = result.map(|value| Done { value, done_by, descriptors, resumed });
        self.done.push_back((ticket, result));
    }

    /// Closes the queue, which stops what the device still had, and finishes it.
    fn give_up(&mut self) {
        tracing::warn!(
            wq = self.wq.name,
            in_flight = self.in_flight,
            "the device does not answer; closing its queue"
        );
        self.portal = None;
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_none() || self.look(slot) {
                continue;
            }
            let Some(work) = self.slots[slot].take() else { continue };
            if work.progress.may_be_damaged(&work.operation) {
                self.complete(&work, Err(OpsError::Damaged { why: Why::Lost }), DoneBy::Device);
            } else {
                self.stand_in(work, Why::Lost);
            }
        }
        self.quiet = Quiet::NOT;
    }

    pub(super) fn wait_for_all(&mut self) {
        while self.in_flight > 0 {
            self.collect();
            spin_loop();
        }
    }

    fn device(&self) -> String {
        match self.portal {
            Some(_) => format!("work queue {}", self.wq.name),
            None => "the core (no device)".into(),
        }
    }
}

/// Touches the memory where an operation goes on and where it faulted, so that it is there when the device
/// comes back.
///
/// # Safety
///
/// The operation's memory is valid and nobody else uses it.
unsafe fn touch(operation: &Operation, progress: &Progress, fault: u64) {
    const PAGE: usize = 4096;
    let (sources, destinations) = operation.memory();
    let reads = sources.iter().map(|src| (src.ptr.cast_mut(), src.len, false));
    let writes = destinations.iter().map(|dst| (dst.ptr, dst.len, true));
    for (ptr, len, write) in reads.chain(writes).filter(|(_, len, _)| *len > 0) {
        let start = ptr as usize;
        // The fault's low 12 bits may be masked: its page may begin before the memory.
        let page = (fault as usize & !(PAGE - 1)).max(start) - start;
        for at in [progress.start.min(len - 1), page].into_iter().filter(|at| *at < len) {
            // SAFETY: `at` is inside of the memory, which is valid.
            let byte = unsafe { ptr.add(at) };
            // SAFETY: as above; a byte that is written back as it was read belongs to nobody else.
            unsafe {
                let value = byte.read_volatile();
                if write {
                    byte.write_volatile(value);
                }
            }
        }
    }
}
