//! A channel for several workers, shared with a lock.
//!
//! A [`SharedChannel`] provides handles that are channels themselves. Each belongs to one worker. The lock is taken
//! once per burst (a handle submits copies immediately) and once per poll, but not for room checks. If a handle's poll
//! finds completions of another handle, it stores them for that handle.
//!
//! While several handles are active, each may have its part of the ring in flight, by weight. A handle that is the only
//! active one leaves an eighth of the ring free, so that another handle can begin.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrayvec::ArrayVec;
use offcore_stats::named;

use crate::channel::{Channel, ChannelInfo, ChannelStats, Completions, CopyOp, Failed, Failure, Reset};

named! {
    /// The way in which a channel is shared between workers.
    #[derive(Default)]
    pub enum Sharing {
        /// The channel belongs to a single worker.
        #[default]
        Bound = "bound",
        /// Shared with a lock around the channel.
        Lock = "lock",
        /// Shared by the device: a shared work queue.
        SharedQueue = "swq",
    }
}

/// Number of submissions to the channel after which a handle without any of them counts as inactive.
const IDLE_AFTER: u64 = 64;
/// Number of operations submitted to the channel at a time.
const PART: usize = 64;
/// Number of polls for its operations by a dropped handle before it gives up the whole channel.
const TIMEOUT: usize = 1 << 16;

/// A channel used by several workers.
#[derive(Clone, Debug)]
pub struct SharedChannel {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    info: ChannelInfo,
    /// Number of operations that the channel has not reported yet, readable without the lock.
    used: AtomicUsize,
    /// Whether a reset is in progress, or the channel was given up.
    closed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` after the channel was given up.
    channel: Option<Box<dyn Channel>>,
    /// Operations in the channel or not yet fetched by their handle. The channel's tokens are indices of this list.
    entries: Box<[Entry]>,
    free: Vec<u32>,
    handles: Vec<HandleState>,
    submissions: u64,
    scratch: Completions,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    handle: usize,
    copy: CopyOp,
    /// Whether the operation is neither reported to its handle nor taken out by it.
    live: bool,
    /// Whether the handle has given up the operation.
    taken: bool,
    held: bool,
}

/// The state of a handle.
#[derive(Debug, Default)]
struct HandleState {
    taken: bool,
    weight: usize,
    /// Number of operations in the channel.
    held: usize,
    /// Number of the last submission.
    last: u64,
    /// Reports that the handle has not fetched: the index of the entry, and the failure if the operation failed.
    reports: VecDeque<(u32, Option<(Failure, u32)>)>,
}

impl SharedChannel {
    /// Shares `channel`, which must have nothing in flight.
    pub fn new(channel: Box<dyn Channel>) -> Self {
        let mut info = channel.info().clone();
        // Completions of a handle keep their order, but any handle's poll fetches them from the channel.
        info.capabilities.synchronous = false;
        let size = info.ring_size;
        let entry = Entry { handle: 0, copy: CopyOp::NONE, live: false, taken: false, held: false };
        let state = State {
            channel: Some(channel),
            // Operations that the channel has reported also need their entry until they are fetched.
            entries: vec![entry; 2 * size].into(),
            free: (0..2 * size as u32).rev().collect(),
            handles: Vec::new(),
            submissions: 0,
            scratch: Completions::default(),
        };
        let (used, closed) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { shared: Arc::new(Shared { info, used, closed, state: Mutex::new(state) }) }
    }

    /// Returns a handle for a worker, with weight 1.
    pub fn handle(&self) -> SharedHandle {
        self.handle_of_weight(1)
    }

    /// Returns a handle for a worker with this weight (0 counts as 1).
    pub fn handle_of_weight(&self, weight: u16) -> SharedHandle {
        let mut state = self.shared.lock();
        let reports = VecDeque::with_capacity(state.entries.len());
        let fresh = HandleState {
            taken: true,
            weight: usize::from(weight.max(1)),
            reports,
            ..HandleState::default()
        };
        let free = state.handles.iter().position(|handle| !handle.taken && handle.held == 0);
        let index = match free {
            Some(free) => {
                state.handles[free] = fresh;
                free
            }
            None => {
                state.handles.push(fresh);
                state.handles.len() - 1
            }
        };
        drop(state);
        let shared = Arc::clone(&self.shared);
        SharedHandle { shared, index, in_flight: 0, share: usize::MAX, stats: Default::default() }
    }

    /// Returns the kind of sharing: by lock.
    pub fn sharing(&self) -> Sharing {
        Sharing::Lock
    }

    /// Returns the counters of the channel itself, over all handles; zeros after it was given up.
    pub fn stats(&self) -> ChannelStats {
        self.shared.lock().channel.as_ref().map(|channel| channel.stats()).unwrap_or_default()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Poisoning is ignored: a panic under the lock leaves nothing inconsistent for other workers.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn in_channel(&self) -> usize {
        self.channel.as_ref().map_or(0, |channel| channel.in_flight())
    }

    /// Returns the number of operations that handle `index` may have in the channel.
    fn share(&self, index: usize, ring_size: usize) -> usize {
        let handles = self.handles.iter().enumerate();
        let others_taken = handles.filter(|(other, handle)| *other != index && handle.taken);
        let (mut others, mut weights) = (0, 0);
        for (_, handle) in others_taken {
            let active = handle.held > 0 || handle.last > 0 && handle.last + IDLE_AFTER > self.submissions;
            others += 1;
            weights += if active { handle.weight } else { 0 };
        }
        let weight = self.handles[index].weight;
        match (others, weights) {
            (0, _) => ring_size,
            (_, 0) => (ring_size - ring_size.div_ceil(8)).max(1),
            _ => (ring_size * weight / (weight + weights)).max(1),
        }
    }

    /// Collects everything that the channel reports.
    fn gather(&mut self) {
        while let Some(channel) = self.channel.as_mut() {
            self.scratch.clear();
            channel.poll(&mut self.scratch);
            let full = self.scratch.is_full();
            for i in 0..self.scratch.tokens.len() {
                self.report(self.scratch.tokens[i], None);
            }
            for i in 0..self.scratch.failed.len() {
                let Failed { copy, failure, done } = self.scratch.failed[i];
                self.report(copy.token, Some((failure, done)));
            }
            if !full {
                return;
            }
        }
    }

    fn report(&mut self, index: u32, failed: Option<(Failure, u32)>) {
        let entry = &mut self.entries[index as usize];
        entry.held = false;
        let handle = &mut self.handles[entry.handle];
        handle.held -= 1;
        if entry.taken {
            self.free.push(index);
        } else {
            handle.reports.push_back((index, failed));
        }
    }

    /// Handles operations that the channel will never complete: `mine` keeps its own as outstanding, those belonging to
    /// other handles are reported as aborted.
    fn release_dead(&mut self, mine: Option<usize>) {
        for index in 0..self.entries.len() {
            let Entry { held, handle, taken, .. } = self.entries[index];
            if held && (Some(handle) != mine || taken) {
                self.report(index as u32, Some((Failure::Aborted, 0)));
            } else if held {
                self.entries[index].held = false;
                self.handles[handle].held -= 1;
            }
        }
    }
}

/// A worker's handle to a shared channel.
#[derive(Debug)]
pub struct SharedHandle {
    shared: Arc<Shared>,
    index: usize,
    in_flight: usize,
    /// Number of operations that the handle may have in the channel, as of the last time that the lock was held.
    share: usize,
    stats: ChannelStats,
}

impl SharedHandle {
    /// Returns the kind of sharing: by lock.
    pub fn sharing(&self) -> Sharing {
        Sharing::Lock
    }

    /// Fetches the reports for this handle, up to the capacity of the lists.
    fn fetch(&mut self, state: &mut State, completions: &mut Completions) {
        let handle = &mut state.handles[self.index];
        while !completions.is_full()
            && let Some((index, failed)) = handle.reports.pop_front()
        {
            let entry = &mut state.entries[index as usize];
            entry.live = false;
            let copy = entry.copy;
            state.free.push(index);
            self.in_flight -= 1;
            match failed {
                None => {
                    completions.tokens.push(copy.token);
                    self.stats.completed += 1;
                    self.stats.bytes += u64::from(copy.len);
                }
                Some((failure, done)) => {
                    completions.failed.push(Failed { copy, failure, done });
                    self.stats.failed += 1;
                }
            }
        }
    }
}

impl Channel for SharedHandle {
    fn info(&self) -> &ChannelInfo {
        &self.shared.info
    }

    fn room(&self) -> usize {
        if self.shared.closed.load(Ordering::Relaxed) {
            return 0;
        }
        // Concurrent submissions by other handles are only seen when operations are submitted. Then fewer may fit.
        let free = self.shared.info.ring_size.saturating_sub(self.shared.used.load(Ordering::Relaxed));
        let own = self.shared.info.ring_size.min(self.share).saturating_sub(self.in_flight);
        free.min(own)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    unsafe fn copy(&mut self, ops: &[CopyOp]) -> usize {
        if ops.is_empty() {
            return 0;
        }
        let shared = Arc::clone(&self.shared);
        let mut guard = shared.lock();
        let state = &mut *guard;
        state.submissions += 1;
        state.handles[self.index].last = state.submissions;
        self.share = state.share(self.index, shared.info.ring_size);
        if shared.closed.load(Ordering::Relaxed) {
            return 0;
        }
        let Some(channel) = state.channel.as_mut() else { return 0 };
        let room = channel.room().min(self.share.saturating_sub(self.in_flight)).min(state.free.len());
        let mut given = 0;
        for part in ops[..ops.len().min(room)].chunks(PART) {
            let names = state.free.iter().rev();
            let list: ArrayVec<CopyOp, PART> =
                part.iter().zip(names).map(|(&op, &token)| CopyOp { token, ..op }).collect();
            // SAFETY: the caller keeps source and destination of each copy valid until its token is reported or a reset
            // is done; only the tokens are changed.
            let accepted = unsafe { channel.copy(&list) };
            for &copy in &part[..accepted] {
                let Some(name) = state.free.pop() else { break };
                state.entries[name as usize] =
                    Entry { handle: self.index, copy, live: true, taken: false, held: true };
            }
            given += accepted;
            if accepted < part.len() {
                break;
            }
        }
        channel.submit();
        state.handles[self.index].held += given;
        shared.used.store(state.in_channel(), Ordering::Relaxed);
        self.in_flight += given;
        self.stats.submitted += given as u64;
        given
    }

    /// Does nothing: accepted copies have been submitted already, under the same lock.
    fn submit(&mut self) {}

    fn poll(&mut self, completions: &mut Completions) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        state.gather();
        self.fetch(&mut state, completions);
        self.share = state.share(self.index, shared.info.ring_size);
        shared.used.store(state.in_channel(), Ordering::Relaxed);
    }

    /// Resets the channel for all its handles. Stopped operations of other handles are reported to them as aborted.
    fn reset(&mut self) -> Reset {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        let Some(channel) = state.channel.as_mut() else { return Reset::Done };
        shared.closed.store(true, Ordering::Relaxed);
        if channel.reset() == Reset::Pending {
            return Reset::Pending;
        }
        state.gather();
        if let Some(channel) = state.channel.as_mut() {
            // Cold path: once per reset.
            channel.take_outstanding(&mut Vec::new());
        }
        state.release_dead(Some(self.index));
        shared.used.store(0, Ordering::Relaxed);
        shared.closed.store(false, Ordering::Relaxed);
        Reset::Done
    }

    fn take_outstanding(&mut self, outstanding: &mut Vec<CopyOp>) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        let state = &mut *state;
        state.handles[self.index].reports.clear();
        for (index, entry) in (0u32..).zip(state.entries.iter_mut()) {
            if entry.handle != self.index || !entry.live {
                continue;
            }
            outstanding.push(entry.copy);
            entry.live = false;
            if entry.held {
                // The channel will report this operation, and the report will be discarded.
                entry.taken = true;
            } else {
                state.free.push(index);
            }
        }
        self.stats.failed += self.in_flight as u64;
        self.in_flight = 0;
    }

    fn stats(&self) -> ChannelStats {
        self.stats
    }
}

impl Drop for SharedHandle {
    /// Waits for the handle's operations. If they do not complete in time, the channel is dropped, which stops them.
    /// Operations of other handles are then reported as aborted, and these handles have no room any more.
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let others = |state: &State| {
            let mut handles = state.handles.iter().enumerate();
            handles.any(|(index, handle)| index != self.index && handle.taken)
        };
        for _ in 0..TIMEOUT {
            let mut state = shared.lock();
            state.gather();
            if state.handles[self.index].held == 0 || !others(&state) {
                break;
            }
            drop(state);
            std::hint::spin_loop();
        }
        let mut state = shared.lock();
        if state.handles[self.index].held > 0 {
            state.channel = None;
            state.release_dead(None);
        }
        // A reset begun by this handle ends with it.
        shared.closed.store(state.channel.is_none(), Ordering::Relaxed);
        let mut dead = Vec::new();
        drop(state);
        self.take_outstanding(&mut dead);
        shared.lock().handles[self.index].taken = false;
    }
}
