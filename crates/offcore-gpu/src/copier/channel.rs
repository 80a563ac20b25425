//! A channel: a ring of what was asked for, beside a stream.
//!
//! ```text
//! reported        finished        marked          issued            written
//!    | known, to be  |  an event    |  no event yet  |  not submitted  |
//!    | reported      |  is behind   |                |                 |
//! ```
//! A stream makes copies in the order in which they were given to it, so an event behind a burst says of all before it that
//! they are made, and memory of the device that a copy has gone through may be the next one's at once. Operations that do
//! not go to the stream (of no bytes, of too many, or in memory that the device does not reach) take a place in the ring all
//! the same, and are finished when all before them are.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use offcore_dma::channel::{
    Capabilities, Channel, ChannelInfo, ChannelStats, Completions, Copy, EngineError, Failed, Failure, Fill,
    Operation, Reset,
};

use super::Inner;
use super::event::Event;
use crate::cuda::driver::{CudaError, Stream, call};
use crate::cuda::gpu::yard;
use crate::cuda::memory::Allocation;

/// The largest ring.
const MAX_RING: usize = 1 << 14;
/// Events of a channel, at most: bursts that are marked at the same time. More bursts have one in common.
const EVENTS: usize = 64;
/// Bytes of the device's memory that copies go through.
const THROUGH: usize = 2 << 20;
/// Where a copy begins there.
const ALIGN: usize = 256;
/// How long a channel that is dropped waits for its stream.
const LAST_PATIENCE: Duration = Duration::from_secs(2);

/// What has become of an operation that is not in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// For the stream, or in it.
    Given,
    /// Not in it; its outcome is known.
    Known(Option<Failure>),
}

/// The channel of a CUDA device.
#[derive(Debug)]
pub struct CudaChannel {
    info: ChannelInfo,
    entries: Box<[(Copy, State)]>,
    /// Operations reported, finished, given to the stream or passed over, and written since the channel was opened.
    reported: usize,
    finished: usize,
    issued: usize,
    written: usize,
    /// Behind which an event was recorded.
    marked: usize,
    /// Events that have been recorded, the oldest first, each with the position that is finished when it is reached.
    marks: VecDeque<(Event, usize)>,
    /// Events that have not.
    spare: Vec<Event>,
    stopped: bool,
    resetting: bool,
    stats: ChannelStats,
    /// Memory of the device, and where the next copy goes through it.
    through: Option<Allocation>,
    next: usize,
    stream: Stream,
    device: Arc<Inner>,
}

// SAFETY: an operation is a description; whoever submits it promises that the memory may be touched by an engine.
unsafe impl Send for CudaChannel {}

impl CudaChannel {
    /// Whoever calls this has the yard, which is quiet.
    pub(super) fn open(name: &str, device: &Arc<Inner>, ring_size: usize) -> Result<Self, EngineError> {
        if !ring_size.is_power_of_two() || ring_size > MAX_RING {
            let device = name.to_owned();
            return Err(EngineError::RingSize { device, found: ring_size, min: 1, max: MAX_RING });
        }
        let events = ring_size.min(EVENTS);
        let made = || -> Result<_, CudaError> {
            let stream = Stream::new(device.context())?;
            let spare = (0..events).map(|_| Event::new(device.context())).collect::<Result<Vec<_>, _>>()?;
            Ok((stream, spare))
        };
        let refused = |reason| EngineError::Thread { device: name.into(), reason };
        let (stream, spare) = made()
            .map_err(|error| refused(format!("a stream for a channel: {error}: see nvidia-smi and dmesg")))?;
        let through = Allocation::new(device.context(), "a channel", THROUGH).map_err(refused)?;
        let nothing = Copy { src: std::ptr::null(), dst: std::ptr::null_mut(), len: 0, token: 0 };
        Ok(Self {
            info: ChannelInfo {
                name: name.into(),
                ring_size,
                max_len: THROUGH as u32,
                capabilities: Capabilities::default(),
            },
            entries: vec![(nothing, State::Known(None)); ring_size].into(),
            reported: 0,
            finished: 0,
            issued: 0,
            written: 0,
            marked: 0,
            marks: VecDeque::with_capacity(events),
            spare,
            stopped: false,
            resetting: false,
            stats: ChannelStats::default(),
            through: Some(through),
            next: 0,
            stream,
            device: Arc::clone(device),
        })
    }

    #[inline]
    fn slot(&mut self, position: usize) -> &mut (Copy, State) {
        let mask = self.entries.len() - 1;
        &mut self.entries[position & mask]
    }

    /// Gives the next operation that was written to the stream, unless its outcome is known.
    #[inline]
    fn issue(&mut self) {
        let issued = self.issued;
        let (copy, state) = *self.slot(issued);
        self.issued += 1;
        if state != State::Given {
            return;
        }
        let from = self.device.address(copy.src.addr(), copy.len);
        let to = self.device.address(copy.dst.addr(), copy.len);
        let outcome = match (from, to, &self.through) {
            (Some(from), Some(to), Some(through)) => {
                let len = copy.len as usize;
                if self.next + len > THROUGH {
                    self.next = 0;
                }
                let at = through.at::<u8>().addr() + self.next;
                self.next += len.next_multiple_of(ALIGN);
                // SAFETY: the context is current. Both ranges are registered, and whoever submitted the copy promises that
                // they stay and are nobody else's until its token is back. `len` is at most the device's memory between
                // them, where copies before this one are done with it when the stream comes to this one.
                let given = unsafe {
                    call!(cuMemcpyAsync(at as u64, from, len, self.stream.raw()))
                        .and_then(|()| call!(cuMemcpyAsync(to, at as u64, len, self.stream.raw())))
                };
                if given.is_ok() {
                    return;
                }
                Failure::Hardware
            }
            _ => Failure::PageFault,
        };
        self.slot(issued).1 = State::Known(Some(outcome));
    }

    /// Records an event behind what has been issued, if there is one to spare.
    fn mark(&mut self) {
        if self.marked == self.issued || self.finished == self.issued {
            return;
        }
        let Some(event) = self.spare.pop() else { return };
        if event.record(&self.stream).is_ok() {
            self.marked = self.issued;
            self.marks.push_back((event, self.issued));
            return;
        }
        // No event can say when the copies are made, but the stream can. What a lost context has not made, it never will.
        self.spare.push(event);
        match self.stream.is_idle() {
            Ok(false) => {}
            Ok(true) => self.finish(self.issued),
            Err(_) => self.lose(),
        }
    }

    /// Finds out what is finished.
    fn collect(&mut self) {
        if self.device.context().enter().is_err() {
            return self.pass();
        }
        while let Some((event, position)) = self.marks.front() {
            match event.is_reached() {
                Ok(false) => break,
                Ok(true) => {
                    let position = *position;
                    self.finish(position);
                    self.spare.extend(self.marks.pop_front().map(|(event, _)| event));
                }
                Err(_) => return self.lose(),
            }
        }
        self.pass();
        self.mark();
    }

    /// All operations before this position are finished.
    fn finish(&mut self, position: usize) {
        self.finished = self.finished.max(position);
    }

    /// Those that are not in the stream are finished when all before them are.
    fn pass(&mut self) {
        while self.finished < self.issued {
            let finished = self.finished;
            if self.slot(finished).1 == State::Given {
                break;
            }
            self.finished += 1;
        }
    }

    /// The context is lost, and nothing runs in it any more: what the stream has not been seen to finish has failed.
    #[cold]
    fn lose(&mut self) {
        for position in self.finished..self.issued {
            let entry = self.slot(position);
            if entry.1 == State::Given {
                entry.1 = State::Known(Some(Failure::Hardware));
            }
        }
        self.finished = self.finished.max(self.issued);
        self.marked = self.issued;
        self.spare.extend(self.marks.drain(..).map(|(event, _)| event));
    }
}

impl Channel for CudaChannel {
    fn info(&self) -> &ChannelInfo {
        &self.info
    }

    fn room(&self) -> usize {
        if self.stopped || self.resetting { 0 } else { self.entries.len() - self.in_flight() }
    }

    fn in_flight(&self) -> usize {
        self.written - self.reported
    }

    unsafe fn copy(&mut self, ops: &[Copy]) -> usize {
        let ops = &ops[..ops.len().min(self.room())];
        for op in ops {
            let state = match op.len as usize {
                0 => State::Known(None),
                1..=THROUGH => State::Given,
                _ => State::Known(Some(Failure::Refused)),
            };
            let written = self.written;
            *self.slot(written) = (*op, state);
            self.written += 1;
        }
        self.stats.submitted += ops.len() as u64;
        ops.len()
    }

    unsafe fn fill(&mut self, _: &[Fill]) -> usize {
        // The driver repeats patterns of 4 bytes at most.
        0
    }

    fn submit(&mut self) {
        if self.issued == self.written {
            return;
        }
        if self.device.context().enter().is_err() {
            // Nothing has been given to the stream, and nothing can be.
            for position in self.issued..self.written {
                let entry = self.slot(position);
                if entry.1 == State::Given {
                    entry.1 = State::Known(Some(Failure::Hardware));
                }
            }
            self.issued = self.written;
            self.pass();
            return;
        }
        while self.issued < self.written {
            self.issue();
        }
        self.pass();
        self.mark();
    }

    fn poll(&mut self, completions: &mut Completions) {
        if self.finished < self.issued {
            self.collect();
        }
        while self.reported < self.finished && !completions.is_full() {
            let reported = self.reported;
            let (copy, state) = *self.slot(reported);
            match state {
                State::Known(Some(failure)) => {
                    self.stats.failed += 1;
                    completions.failed.push(Failed { operation: Operation::Copy(copy), failure, done: 0 });
                }
                State::Given | State::Known(None) => {
                    self.stats.completed += 1;
                    self.stats.bytes += u64::from(copy.len);
                    completions.tokens.push(copy.token);
                }
            }
            self.reported += 1;
        }
    }

    fn reset(&mut self) -> Reset {
        // What was accepted and not yet submitted must not run later either: it runs now.
        self.submit();
        self.resetting = true;
        match self.stream.is_idle() {
            Ok(false) => return Reset::Pending,
            Ok(true) => {
                self.finish(self.issued);
                self.marked = self.issued;
                self.spare.extend(self.marks.drain(..).map(|(event, _)| event));
            }
            // A lost context has nobody at work.
            Err(_) => self.lose(),
        }
        self.resetting = false;
        Reset::Done
    }

    fn take_outstanding(&mut self, outstanding: &mut Vec<Operation>) {
        self.stats.failed += self.in_flight() as u64;
        let all = self.reported..self.written;
        let mask = self.entries.len() - 1;
        outstanding.extend(all.map(|position| Operation::Copy(self.entries[position & mask].0)));
        // Before a reset is done some are in the stream: they are made there, and reported by nobody. The rest never gets
        // there. Events of theirs say nothing new.
        self.issued = self.written;
        (self.reported, self.finished) = (self.written, self.written);
    }

    fn stop(&mut self) -> Result<(), EngineError> {
        match self.in_flight() {
            0 => self.stopped = true,
            in_flight => return Err(EngineError::InFlight { device: self.info.name.clone(), in_flight }),
        }
        Ok(())
    }

    fn start(&mut self) {
        self.stopped = false;
    }

    fn stats(&self) -> ChannelStats {
        self.stats
    }

    fn reset_stats(&mut self) {
        self.stats = ChannelStats { submitted: self.in_flight() as u64, ..ChannelStats::default() };
    }
}

impl Drop for CudaChannel {
    fn drop(&mut self) {
        let began = Instant::now();
        while self.reset() == Reset::Pending {
            if began.elapsed() > LAST_PATIENCE {
                tracing::error!("{}: copies were not answered, the stream is left alone", self.info.name);
                // What they may touch stays registered and allocated.
                std::mem::forget((Arc::clone(&self.device), self.through.take()));
                return;
            }
            std::thread::yield_now();
        }
        // Freeing it may wait for kernels that wait for bursts.
        yard().drop_when_quiet(Box::new(self.through.take()));
    }
}
