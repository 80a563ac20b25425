//! An engine that wraps another one and fails on purpose, for tests of error handling.
//!
//! A seeded generator decides the outcome of every operation when it is accepted. The wrapped channel makes the
//! operations that it gets, and never sees errors. Late operations are held here and made many polls later by the core,
//! even if they have been taken out as outstanding meanwhile, like in an engine that was given up and resumes. Only a
//! finished [`Channel::reset`] stops them.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use offcore_stats::{Counter, SplitMix};

use crate::channel::{Channel, ChannelInfo, ChannelStats, Completions, CopyOp, Failed, Failure, Reset};
use crate::cpu;

/// The faults to inject. Probabilities are per mille of operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Seed of the generator. The same seed and the same calls produce the same faults.
    pub seed: u64,
    /// Nothing is copied, and a failure is reported.
    pub error: u32,
    /// Some bytes at the start are copied, and a failure with their number is reported.
    pub partial: u32,
    /// The report is delayed by one to [`Faults::delay_polls`] polls.
    pub delay: u32,
    /// The operation is not executed and never reported.
    pub never: u32,
    /// The operation is executed and reported [`Faults::late_polls`] polls later.
    pub late: u32,
    /// Per mille of reports for which a random due report is selected instead of the oldest.
    pub reorder: u32,
    pub delay_polls: u32,
    pub late_polls: u32,
    /// Number of calls of [`Channel::reset`] that return [`Reset::Pending`] before a call can return [`Reset::Done`].
    pub reset_calls: u32,
}

/// Numbers of injected faults, readable while the channel is owned elsewhere.
#[derive(Debug, Default)]
pub struct FaultCounts {
    /// Failures without any bytes copied.
    pub errors: Counter,
    /// Failures with some bytes copied.
    pub partials: Counter,
    /// Delayed completions.
    pub delayed: Counter,
    /// Reports that overtook an older report.
    pub reordered: Counter,
    /// Operations that will never complete.
    pub never: Counter,
    /// Operations held for late execution.
    pub late: Counter,
    /// Late operations that were executed after they had been taken out as outstanding.
    pub late_after_taken: Counter,
    /// Late operations that a reset stopped.
    pub late_stopped: Counter,
    pub resets: Counter,
}

/// The channel with injected faults.
#[derive(Debug)]
pub struct FaultyChannel {
    inner: Box<dyn Channel>,
    faults: Faults,
    random: SplitMix,
    counts: Arc<FaultCounts>,
    info: ChannelInfo,
    stats: ChannelStats,
    /// Number of polls and resets so far: the clock of delays.
    now: u64,
    /// Operations not yet forgotten. The inner channel's tokens are indices of this list.
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    in_flight: usize,
    /// Reports that become due with the next submission.
    unsubmitted: Vec<Report>,
    /// Reports that are due, oldest first.
    reports: Vec<Report>,
    /// Operations held for late execution.
    late: Vec<Late>,
    resets_pending: Option<u32>,
    scratch: Completions,
}

#[derive(Debug)]
struct Entry {
    copy: CopyOp,
    /// Number of bytes given to the inner channel, if the operation fails after them.
    cut: Option<u32>,
    delay: u64,
    /// Given up by the owner, but kept because the inner channel or the late list still has it.
    taken: bool,
    /// Whether it is in the inner channel or the late list.
    held: bool,
}

#[derive(Debug)]
struct Report {
    entry: u32,
    due: u64,
    failed: Option<Failed>,
}

#[derive(Debug)]
struct Late {
    entry: u32,
    due: u64,
}

impl FaultyChannel {
    /// Wraps `inner`, which must have nothing in flight.
    pub fn new(inner: Box<dyn Channel>, faults: Faults) -> Self {
        let mut info = inner.info().clone();
        info.name = format!("faulty:{}", info.name);
        info.capabilities.synchronous = false;
        info.capabilities.out_of_order |= faults.reorder + faults.delay + faults.error + faults.late > 0;
        Self {
            inner,
            faults,
            random: SplitMix::new(faults.seed),
            counts: Arc::default(),
            info,
            stats: ChannelStats::default(),
            now: 0,
            entries: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            unsubmitted: Vec::new(),
            reports: Vec::new(),
            late: Vec::new(),
            resets_pending: None,
            scratch: Completions::default(),
        }
    }

    /// Returns the numbers of injected faults, which are updated continuously.
    pub fn counts(&self) -> Arc<FaultCounts> {
        Arc::clone(&self.counts)
    }

    /// # Safety
    /// As for [`Channel::copy`].
    unsafe fn accept(&mut self, copy: CopyOp) {
        let draw = self.random.below(1000) as u32;
        let Faults { error, partial, delay, never, late, .. } = self.faults;
        let bounds = [error, partial, delay, never, late].map({
            let mut sum = 0;
            move |share| {
                sum += share;
                draw < sum
            }
        });
        let fate = bounds.iter().position(|&hit| hit);
        let entry = self.remember(copy);
        let report = |failed| Report { entry, due: 0, failed };
        match fate {
            Some(0) => {
                self.counts.errors.add(1);
                let failed = Failed { copy, failure: Failure::Hardware, done: 0 };
                self.unsubmitted.push(report(Some(failed)));
            }
            Some(1) => {
                self.counts.partials.add(1);
                let cut = self.random.below(copy.len.max(1).into()) as u32;
                // SAFETY: the caller keeps source and destination of `copy` valid until the token is reported or a
                // reset is done.
                unsafe { self.pass_on(entry, copy, Some(cut), 0) };
            }
            Some(2) => {
                self.counts.delayed.add(1);
                let delay = 1 + self.random.below(self.faults.delay_polls.max(1).into());
                // SAFETY: the caller keeps source and destination of `copy` valid until the token is reported or a
                // reset is done.
                unsafe { self.pass_on(entry, copy, None, delay) };
            }
            Some(3) => self.counts.never.add(1),
            Some(_) => {
                self.counts.late.add(1);
                self.hold(entry);
                self.late.push(Late { entry, due: self.now + u64::from(self.faults.late_polls) });
            }
            // SAFETY: the caller keeps source and destination of `copy` valid until the token is reported or a reset is
            // done.
            None => unsafe { self.pass_on(entry, copy, None, 0) },
        }
        self.in_flight += 1;
        self.stats.submitted += 1;
    }

    fn remember(&mut self, copy: CopyOp) -> u32 {
        let entry = Some(Entry { copy, cut: None, delay: 0, taken: false, held: false });
        if let Some(index) = self.free.pop() {
            self.entries[index as usize] = entry;
            return index;
        }
        self.entries.push(entry);
        u32::try_from(self.entries.len() - 1).expect("no more entries than operations in flight")
    }

    fn entry(&mut self, index: u32) -> &mut Entry {
        self.entries[index as usize]
            .as_mut()
            .expect("an entry lives until the last list that names it drops it")
    }

    fn hold(&mut self, index: u32) {
        self.entry(index).held = true;
    }

    fn forget(&mut self, index: u32) {
        self.entries[index as usize] = None;
        self.free.push(index);
    }

    /// Gives the operation, or its first `cut` bytes, to the inner channel.
    ///
    /// # Safety
    /// As for [`Channel::copy`].
    unsafe fn pass_on(&mut self, index: u32, copy: CopyOp, cut: Option<u32>, delay: u64) {
        let entry = self.entry(index);
        (entry.cut, entry.delay, entry.held) = (cut, delay, true);
        let len = cut.unwrap_or(copy.len);
        // SAFETY: the caller keeps source and destination of `copy` valid until its token is reported or a reset is
        // done; `len` is at most its length.
        let accepted = unsafe { self.inner.copy(&[CopyOp { len, token: index, ..copy }]) };
        assert_eq!(accepted, 1, "{} had room and took nothing", self.inner.info().name);
    }

    /// Executes the late operations that are due. Their owner may have given them up.
    fn land(&mut self) {
        let now = self.now;
        let due: Vec<u32> = self.late.extract_if(.., |late| late.due <= now).map(|late| late.entry).collect();
        for index in due {
            let entry = self.entry(index);
            (entry.held, entry.delay) = (false, 0);
            let taken = entry.taken;
            // SAFETY: the owner keeps the memory valid until the operation is reported or a reset is done. Neither has
            // happened, because both remove the operation from the list.
            unsafe { cpu::copy_one(&entry.copy, 0) };
            if taken {
                self.counts.late_after_taken.add(1);
                self.forget(index);
            } else {
                self.reports.push(Report { entry: index, due: now, failed: None });
            }
        }
    }

    /// Collects the completions of the inner channel.
    fn gather(&mut self) {
        loop {
            let mut scratch = std::mem::take(&mut self.scratch);
            scratch.clear();
            self.inner.poll(&mut scratch);
            for &index in &scratch.tokens {
                self.gathered(index, None);
            }
            for failed in &scratch.failed {
                self.gathered(failed.copy.token, Some(*failed));
            }
            let full = scratch.is_full();
            self.scratch = scratch;
            if !full {
                return;
            }
        }
    }

    fn gathered(&mut self, index: u32, failed: Option<Failed>) {
        let now = self.now;
        let entry = self.entry(index);
        entry.held = false;
        if entry.taken {
            return self.forget(index);
        }
        let cut = entry.cut.map(|done| (Failure::PageFault, done));
        let failed = failed
            .map(|failed| (failed.failure, failed.done))
            .or(cut)
            .map(|(failure, done)| Failed { copy: entry.copy, failure, done });
        let due = now + entry.delay;
        self.reports.push(Report { entry: index, due, failed });
    }

    /// Discards the inner channel's operations after its reset: their memory is not accessed any more.
    fn release_dead(&mut self) {
        self.gather();
        let mut dead = Vec::new();
        self.inner.take_outstanding(&mut dead);
        let late = std::mem::take(&mut self.late);
        self.counts.late_stopped.add(late.len() as u64);
        for index in dead.iter().map(|copy| copy.token).chain(late.iter().map(|late| late.entry)) {
            let entry = self.entry(index);
            entry.held = false;
            if entry.taken {
                self.forget(index);
            }
        }
    }
}

impl Channel for FaultyChannel {
    fn info(&self) -> &ChannelInfo {
        &self.info
    }

    fn room(&self) -> usize {
        let own = self.info.ring_size - self.in_flight;
        own.min(self.inner.room())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    unsafe fn copy(&mut self, ops: &[CopyOp]) -> usize {
        let n = ops.len().min(self.room());
        for &op in &ops[..n] {
            // SAFETY: the caller keeps source and destination of `op` valid until the token is reported or a reset is
            // done.
            unsafe { self.accept(op) };
        }
        n
    }

    fn submit(&mut self) {
        self.inner.submit();
        self.reports.append(&mut self.unsubmitted);
    }

    fn poll(&mut self, completions: &mut Completions) {
        self.now += 1;
        self.land();
        self.gather();
        while !completions.is_full() {
            let mut due = (0..self.reports.len()).filter(|&i| self.reports[i].due <= self.now);
            let Some(oldest) = due.next() else { break };
            let younger = due.count();
            let mut picked = oldest;
            if younger > 0 && self.random.below(1000) < self.faults.reorder.into() {
                let skip = 1 + self.random.below(younger as u64) as usize;
                let mut due = (oldest..self.reports.len()).filter(|&i| self.reports[i].due <= self.now);
                picked = due.nth(skip).unwrap_or(oldest);
                self.counts.reordered.add(1);
            }
            let report = self.reports.remove(picked);
            let copy = self.entry(report.entry).copy;
            self.forget(report.entry);
            self.in_flight -= 1;
            match report.failed {
                None => {
                    completions.tokens.push(copy.token);
                    self.stats.completed += 1;
                    self.stats.bytes += u64::from(copy.len);
                }
                Some(failed) => {
                    completions.failed.push(failed);
                    self.stats.failed += 1;
                }
            }
        }
    }

    fn reset(&mut self) -> Reset {
        self.now += 1;
        self.land();
        let pending = self.resets_pending.unwrap_or(self.faults.reset_calls);
        if self.inner.reset() == Reset::Pending || pending > 0 {
            self.resets_pending = Some(pending.saturating_sub(1));
            return Reset::Pending;
        }
        self.resets_pending = None;
        self.release_dead();
        self.reports.append(&mut self.unsubmitted);
        self.counts.resets.add(1);
        Reset::Done
    }

    fn take_outstanding(&mut self, outstanding: &mut Vec<CopyOp>) {
        self.reports.clear();
        self.unsubmitted.clear();
        for index in 0..self.entries.len() {
            let Some(entry) = self.entries[index].as_mut().filter(|entry| !entry.taken) else { continue };
            outstanding.push(entry.copy);
            entry.taken = true;
            self.in_flight -= 1;
            self.stats.failed += 1;
            if !entry.held {
                // The list was indexed by u32 tokens when the entry was created.
                self.forget(u32::try_from(index).expect("indices are tokens"));
            }
        }
    }

    fn stats(&self) -> ChannelStats {
        self.stats
    }
}
