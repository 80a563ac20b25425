//! One channel for several workers, shared by a lock.
//!
//! A [`SharedChannel`] gives out handles that are channels themselves; each belongs to one worker. The lock is taken once
//! for a burst (what a handle is given it submits at once) and once for a poll, and never to ask for room. What one
//! handle's poll finds of another's it puts aside for it.
//!
//! While several handles have had work lately, each may have its part of the ring in flight, by weight; one that alone
//! has had work leaves an eighth of it free, so that another can begin.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrayvec::ArrayVec;
use offcore_stats::named;

use crate::channel::{Channel, ChannelInfo, ChannelStats, Completions, CopyOp, Failed, Failure, Reset};

named! {
    /// How a channel comes to be used by more than one worker, or not.
    #[derive(Default)]
    pub enum Sharing {
        /// One worker has it.
        #[default]
        Bound = "bound",
        /// By a lock around it.
        Lock = "lock",
        /// By the device: a shared work queue.
        SharedQueue = "swq",
    }
}

/// Submissions to the channel after which a handle that had none of them no longer counts as one that has work.
const IDLE_AFTER: u64 = 64;
/// Operations handed to the channel at a time.
const PART: usize = 64;
/// How often a handle that is dropped asks whether its operations are done before it gives the whole channel up.
const TIMEOUT: usize = 1 << 16;

/// A channel that several workers use.
#[derive(Clone, Debug)]
pub struct SharedChannel {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    info: ChannelInfo,
    /// Operations that are not yet reported by the channel: readable without the lock.
    used: AtomicUsize,
    /// A reset is going on, or the channel was given up.
    closed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` once it was given up.
    channel: Option<Box<dyn Channel>>,
    /// Operations in the channel or not yet fetched by their handle; the channel's tokens are indices of this list.
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
    /// Neither reported to its handle nor taken out by it.
    live: bool,
    /// Given up by its handle.
    taken: bool,
    held: bool,
}

/// What is kept for one handle.
#[derive(Debug, Default)]
struct HandleState {
    taken: bool,
    weight: usize,
    /// Operations in the channel.
    held: usize,
    /// Number of the last submission.
    last: u64,
    /// Reports that the handle has not fetched: index of the entry, and the failure if it is one.
    reports: VecDeque<(u32, Option<(Failure, u32)>)>,
}

impl SharedChannel {
    /// Shares `channel`, which must have nothing in flight.
    pub fn new(channel: Box<dyn Channel>) -> Self {
        let mut info = channel.info().clone();
        // Completions of one handle keep their order; but each is fetched from the channel by whoever polls first.
        info.capabilities.synchronous = false;
        let size = info.ring_size;
        let entry = Entry { handle: 0, copy: CopyOp::NONE, live: false, taken: false, held: false };
        let state = State {
            channel: Some(channel),
            // What was reported by the channel and not yet fetched needs its entry, too.
            entries: vec![entry; 2 * size].into(),
            free: (0..2 * size as u32).rev().collect(),
            handles: Vec::new(),
            submissions: 0,
            scratch: Completions::default(),
        };
        let (used, closed) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { shared: Arc::new(Shared { info, used, closed, state: Mutex::new(state) }) }
    }

    /// A handle for one worker, of weight 1.
    pub fn handle(&self) -> SharedHandle {
        self.handle_of_weight(1)
    }

    /// A handle for one worker, of the weight given (0 counts as 1).
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

    /// How it is shared: by lock.
    pub fn sharing(&self) -> Sharing {
        Sharing::Lock
    }

    /// The counters of the channel itself, over all handles; zeros once it was given up.
    pub fn stats(&self) -> ChannelStats {
        self.shared.lock().channel.as_ref().map(|channel| channel.stats()).unwrap_or_default()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while it was held has not left anything half done that another worker could not go on with.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn in_channel(&self) -> usize {
        self.channel.as_ref().map_or(0, |channel| channel.in_flight())
    }

    /// Operations that handle `index` may have in the channel.
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

    /// Takes in everything that the channel reports.
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

    /// What the channel still had is dead: `mine` keeps its own as outstanding, the others' are reported as aborted.
    fn bury(&mut self, mine: Option<usize>) {
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

/// One worker's handle on a shared channel.
#[derive(Debug)]
pub struct SharedHandle {
    shared: Arc<Shared>,
    index: usize,
    in_flight: usize,
    /// Operations that it may have in the channel, as of the last time that the lock was held.
    share: usize,
    stats: ChannelStats,
}

impl SharedHandle {
    /// How it is shared: by lock.
    pub fn sharing(&self) -> Sharing {
        Sharing::Lock
    }

    /// Takes the reports that are waiting for this handle, as many as fit.
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
        // What others do meanwhile is seen when operations are handed over: then fewer may fit.
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
            // SAFETY: the caller's promises; only the tokens are others.
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

    /// What was accepted has been submitted already, under the same lock.
    fn submit(&mut self) {}

    fn poll(&mut self, completions: &mut Completions) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        state.gather();
        self.fetch(&mut state, completions);
        self.share = state.share(self.index, shared.info.ring_size);
        shared.used.store(state.in_channel(), Ordering::Relaxed);
    }

    /// Resets the channel for all its handles; the others' operations that it stops are reported to them as aborted.
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
            // Cold: once per reset.
            channel.take_outstanding(&mut Vec::new());
        }
        state.bury(Some(self.index));
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
                // The channel will report it; nobody is told then.
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
    /// Waits for the handle's operations. If they do not complete in time, the channel is dropped, which stops them; the
    /// other handles' are then reported as aborted, and they have no room any more.
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
            state.bury(None);
        }
        // A reset that this handle had begun ends with it.
        shared.closed.store(state.channel.is_none(), Ordering::Relaxed);
        let mut dead = Vec::new();
        drop(state);
        self.take_outstanding(&mut dead);
        shared.lock().handles[self.index].taken = false;
    }
}
