//! The pipeline of a DSA engine.

use std::collections::VecDeque;

use super::batch::Batch;
use super::{SimEngine, traffic};
use crate::config;
use crate::sim::Timing;
use crate::sim::shared::DeviceLayout;

/// Size of a read buffer in bytes. It is not published. With this value, the default of all buffers never limits a
/// group, and the allowed minimum of 4 buffers per DSA engine gives 4 GB/s.
const READ_BUFFER: f64 = 256.0;
/// Number of batches that a DSA engine has in progress. It is not published.
const BATCHES: u32 = 8;
/// Relative random variation of the memory read time if several DSA engines compete.
const JITTER: f64 = 0.1;

/// A DSA engine.
#[derive(Debug)]
pub(super) struct DsaEngine {
    pub(super) in_progress: u32,
    /// Batches that it has begun, oldest first.
    pub(super) batches: VecDeque<Batch>,
    /// Whether a batch member is next, if there are any.
    pub(super) members_turn: bool,
    /// Index of the batch from which the next member is taken in turn.
    pub(super) next_batch: usize,
    /// Descriptors past the front, with the time at which their first bytes are available.
    reading: VecDeque<(u64, usize)>,
    /// The descriptor on the data path, with the number of bytes left.
    moving: Option<(f64, usize)>,
    /// Descriptors past the data path, with the time at which data and record become visible.
    pub(super) completing: VecDeque<(u64, usize)>,
    front_free: u64,
    /// The time of the latest completion. Later completions do not overtake it.
    pub(super) last_done: u64,
    /// Limits the descriptors in progress to 1/2^N of the maximum.
    progress_limit: u32,
    batch_limit: u32,
    read_buffers: u32,
    /// Number of DSA engines of the group.
    pub(super) group_size: usize,
}

impl DsaEngine {
    pub(super) fn new(group: &config::Group, group_size: usize, layout: &DeviceLayout) -> Self {
        let total = layout.capabilities.read_buffers;
        let mut buffers = group.read_buffers_allowed.unwrap_or(total);
        if group.use_read_buffer_limit && layout.read_buffer_limit > 0 {
            buffers = buffers.min(layout.read_buffer_limit);
        }
        Self {
            in_progress: 0,
            batches: VecDeque::new(),
            members_turn: false,
            next_batch: 0,
            reading: VecDeque::new(),
            moving: None,
            completing: VecDeque::new(),
            front_free: 0,
            last_done: 0,
            progress_limit: group.desc_progress_limit.min(3),
            batch_limit: (BATCHES >> group.batch_progress_limit.min(3)).max(1),
            read_buffers: if total == 0 { u32::MAX } else { buffers },
            group_size,
        }
    }

    pub(super) fn has_place(&self, timing: &Timing) -> bool {
        self.in_progress < (timing.in_progress >> self.progress_limit).max(1)
    }

    pub(super) fn has_batch_place(&self) -> bool {
        (self.batches.len() as u32) < self.batch_limit
    }

    pub(super) fn is_moving(&self) -> bool {
        self.moving.is_some()
    }

    /// Returns the bandwidth in bytes per nanosecond while `active` DSA engines are moving data.
    fn bandwidth(&self, timing: &Timing, active: u32) -> f64 {
        let buffers = f64::from(self.read_buffers) / self.group_size as f64;
        timing.bandwidth(active).min(buffers * READ_BUFFER / timing.read_ns.max(1.0))
    }

    /// Returns the time of the next event in this engine.
    pub(super) fn next_event(&self, now: u64, timing: &Timing, active: u32) -> Option<u64> {
        let data = match self.moving {
            Some((left, _)) => {
                Some(now.saturating_add((left / self.bandwidth(timing, active) * 1000.0).ceil() as u64))
            }
            None => self.reading.front().map(|&(at, _)| at),
        };
        let record = self.completing.front().map(|&(at, _)| at);
        let batches = self.batches.iter().filter_map(Batch::next_event);
        batches.chain(data).chain(record).min()
    }

    /// Moves data for `ps` picoseconds.
    pub(super) fn move_data(&mut self, ps: u64, timing: &Timing, active: u32) {
        let bytes = self.bandwidth(timing, active) * ps as f64 / 1000.0;
        if let Some((left, _)) = &mut self.moving {
            *left = (*left - bytes).max(0.0);
        }
    }

    /// Puts the next ready descriptor, of `bytes` bytes, on the free data path, and takes a completely moved descriptor
    /// off it.
    fn turn(&mut self, now: u64, bytes: impl Fn(usize) -> f64) -> Option<usize> {
        // Fewer bytes than the clock can resolve.
        const NOTHING: f64 = 1e-3;
        if self.moving.is_none()
            && let Some(&(at, job)) = self.reading.front()
            && at <= now
        {
            self.reading.pop_front();
            self.moving = Some((bytes(job), job));
        }
        let (_, job) = self.moving.filter(|&(left, _)| left <= NOTHING)?;
        self.moving = None;
        Some(job)
    }
}

impl SimEngine {
    /// Puts a descriptor into a DSA engine's front.
    pub(super) fn enter(&mut self, engine: usize, job: usize) {
        let mut read_ns = self.timing.read_ns;
        if self.engines[engine].group_size > 1 {
            read_ns *= 1.0 + JITTER * (2.0 * self.random.fraction() - 1.0);
        }
        let (occupancy, read) = (Self::ps(self.timing.occupancy_ns), Self::ps(read_ns));
        let dsa = &mut self.engines[engine];
        dsa.in_progress += 1;
        dsa.front_free = dsa.front_free.max(self.now).saturating_add(occupancy);
        // Descriptors are moved in the order in which they were read.
        let ready = dsa.reading.back().map_or(0, |&(at, _)| at).max(dsa.front_free.saturating_add(read));
        dsa.reading.push_back((ready, job));
    }

    /// Executes the due events of the DSA engines.
    pub(super) fn work(&mut self) {
        for engine in 0..self.engines.len() {
            self.read_lists(engine);
            self.leave_data_path(engine);
            while let Some(&(at, job)) = self.engines[engine].completing.front()
                && at <= self.now
            {
                self.engines[engine].completing.pop_front();
                self.complete(engine, job);
                if self.shared.state() == crate::sim::DeviceState::Halted {
                    return;
                }
            }
            self.finish_batches(engine);
        }
    }

    /// Takes descriptors off the data path.
    fn leave_data_path(&mut self, engine: usize) {
        loop {
            let jobs = &self.jobs;
            let bytes = |job: usize| match jobs[job].as_ref() {
                Some(job) if job.refused.is_none() => traffic(&job.descriptor),
                _ => 0.0,
            };
            let Some(job) = self.engines[engine].turn(self.now, bytes) else { break };
            let at = self.after(self.timing.record_ns).saturating_add(self.lateness());
            let dsa = &mut self.engines[engine];
            dsa.last_done = dsa.last_done.max(at);
            dsa.completing.push_back((dsa.last_done, job));
        }
    }

    /// Returns the injected delay of a completion, in picoseconds.
    pub(super) fn lateness(&mut self) -> u64 {
        if !self.random.happens(self.faults.late) {
            return 0;
        }
        self.count(|counters| &counters.injected_late, 1);
        self.faults.late_ns.saturating_mul(1000)
    }
}
