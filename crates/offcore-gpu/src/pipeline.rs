//! Pipelines: a CPU or a device processes bursts of packets, which come back in order with their results.
//!
//! A pipeline has two ends for two lcores: [`Front`] submits bursts, [`Back`] returns them. In between the device owns
//! the packets, and no other handle to them exists. When a device dies, the CPU takes over at the first burst that the
//! device has not answered: no packet is lost or processed twice. A device that hangs and cannot be stopped may resume
//! later. Packets that it may then write continue as copies. The originals are quarantined ([`Back::quarantined`])
//! until the device has stopped, or has answered their burst late.
//!
//! **Buffer split.** With [`Work::split_at`] the device gets packets whose first `split_at` bytes are in a separate
//! buffer. It only sees the rest, and the CPU swaps the addresses. The CPU processes all other packets.
//!
//! **Packets in device memory.** With [`Memory::Direct`] only the device can access packets, so the CPU cannot take
//! over. When the device fails, packets that it has not answered return to the pool, and so do all later packets. They
//! are counted ([`Back::take_lost`]). Packets of several buffers pass with result 0.

mod failure;
#[cfg(test)]
#[cfg(host_kernels)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use offcore_mem::{Hugepages, Packet, Pool};
use offcore_stats::tsc;

use crate::cpu::{CpuWork, CpuWorkError};
use crate::device::{DeviceError, DeviceSlots, GpuDevice, Launch, Launcher, Memory, Service, Started};
use crate::layout::{Kind, PipelineView, PoolView, TrieView, WorkView};
use crate::patterns::Patterns;
use crate::ring::{BurstRingError, Collector, RingConfig, Split, Submitter, burst_ring};
use crate::trie::Trie;
use failure::Served;

/// Time without an answer before the device is checked, and between two checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Why a pipeline could not be created.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// The burst ring.
    #[error(transparent)]
    Ring(#[from] BurstRingError),
    /// The work.
    #[error(transparent)]
    Work(#[from] CpuWorkError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The work on every packet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work<'a> {
    pub kind: Kind,
    /// Whether to swap the MAC addresses.
    pub swap: bool,
    /// Bytes before the payload. With a split, the first buffer contains them.
    pub skip: u32,
    /// Bytes in the first buffer of a split packet.
    pub split_at: Option<usize>,
    /// Minimum nanoseconds per packet: in sequence on a CPU, in parallel for the threads of a block on a device.
    pub forced_ns: u32,
    pub patterns: Option<&'a Patterns>,
}

/// The processor of bursts.
#[derive(Debug)]
pub enum PipelineWorker<'a> {
    /// Nothing: bursts pass through with result 0.
    None,
    /// The lcore of the [`Back`] end.
    Cpu,
    /// A device.
    Device {
        device: &'a mut dyn GpuDevice,
        /// How the device gets bursts.
        launch: Launch,
        /// Number of blocks that serve the ring, 1 to 64.
        blocks: u32,
        /// Threads per block, 1 to 1024.
        threads: u32,
        /// Where the device processes packets.
        memory: Memory,
    },
}

/// The parameters of a pipeline.
#[derive(Debug)]
pub struct Setup<'a, 'd> {
    /// Maximum packets per burst, 1 to 4096.
    pub burst: usize,
    /// Maximum bursts in flight: a power of two, 2 to 4096.
    pub slots: usize,
    pub worker: PipelineWorker<'d>,
    pub work: Work<'a>,
    /// Time without an answer after which a device with bursts is considered hung. It must be longer than one burst
    /// takes.
    pub timeout: Duration,
    pub pool: &'static Pool,
    /// Page size of the burst ring.
    pub hugepages: Hugepages,
}

/// Creates a pipeline.
///
/// # Errors
/// A number is out of range, the work is not possible, or the device refuses.
pub fn pipeline(setup: Setup<'_, '_>) -> Result<(Front, Back), PipelineError> {
    let Setup { burst, slots, worker, work, timeout, pool, hugepages } = setup;
    let Work { kind, swap, skip, split_at, forced_ns, patterns } = work;
    let before_payload = split_at.map_or(skip, |at| at as u32);
    let cpu = match worker {
        PipelineWorker::None => None,
        _ => Some(CpuWork::new(kind, swap, before_payload, forced_ns, patterns)?),
    };
    let by_device = matches!(worker, PipelineWorker::Device { .. });
    let split = split_at.filter(|_| by_device).map(|at| Split { pool, at });
    let direct = matches!(&worker, PipelineWorker::Device { memory: Memory::Direct, .. });
    if let (PipelineWorker::Device { device, .. }, true, Some(_)) = (&worker, direct, split) {
        let reason = "packets in its memory cannot be split: their first bytes are for the CPU".into();
        return Err(DeviceError::Start { device: device.name().into(), reason }.into());
    }
    let cpu = cpu.filter(|_| !direct);
    // A device that dies may have swapped them.
    let device_swaps = by_device && swap && split.is_none();
    let keep_addresses = device_swaps && !direct;
    let config = RingConfig { slots, burst, keep_addresses, split, hugepages };
    let (submitter, collector) = burst_ring(&config)?;
    let failed = Arc::new(AtomicBool::new(false));
    let mut front = Front { submitter, serving: None, slots, direct, failed: Arc::clone(&failed) };
    let mut back = Back {
        collector,
        results: vec![0; burst],
        hits: None,
        cpu,
        split,
        serving: None,
        lost: 0,
        timeout: tsc::ticks(timeout),
        check_interval: tsc::ticks(CHECK_INTERVAL.min(timeout)),
        answered_at: 0,
        checked_at: 0,
        pool,
    };
    if let PipelineWorker::Device { device, launch, blocks, threads, memory } = worker {
        let trie = patterns.filter(|_| kind == Kind::Match).map(Trie::shared);
        let view = PipelineView {
            pool: PoolView {
                base: pool.memory().0.as_ptr(),
                staging: std::ptr::null_mut(),
                chunk_shift: pool.chunk_size().trailing_zeros(),
                chunks: pool.chunks() as u32,
            },
            ring: front.submitter.view(),
            work: WorkView {
                kind,
                swap: device_swaps.into(),
                // The device only sees the payload of a split packet.
                skip: if split.is_some() { 0 } else { skip },
                forced_ns,
                trie: TrieView::EMPTY,
            },
        };
        // SAFETY: the pool is never unmapped. `front` owns the ring, and ends the service before it releases the
        // memory, or leaks it if the service does not end. Packets are inaccessible from their submission until their
        // burst is answered or the device has stopped, which `Back::done` ensures. If the device hangs, packets that it
        // may write stay inaccessible. It may read other packets that continue, but their answers are ignored.
        let Started { launcher, watch, slots } =
            unsafe { device.start(Service { view, trie, launch, blocks, threads, memory }) }?;
        if let Some(slots) = &slots {
            // SAFETY: the slots are valid and zeroed, as the device guarantees, and `front` keeps them as long as the
            // ring.
            unsafe { front.submitter.write_slots_at(slots.base) };
        }
        front.serving = Some(Serving { launcher: Some(launcher), slots });
        let quarantine = Vec::new();
        back.serving = Some(Served {
            watch,
            // Packets in its staging memory are shared by all pipelines with the same pool.
            swaps: device_swaps || memory == Memory::Gpu && split.is_none(),
            direct,
            failed,
            failure: None,
            hung: false,
            quarantine,
            replaced: 0,
        });
    }
    Ok((front, back))
}

/// A running service and the memory that it reads.
#[derive(Debug)]
struct Serving {
    launcher: Option<Box<dyn Launcher>>,
    slots: Option<DeviceSlots>,
}

/// The submitting end.
#[derive(Debug)]
pub struct Front {
    submitter: Submitter,
    serving: Option<Serving>,
    slots: usize,
    /// Packets are in device memory.
    direct: bool,
    /// The device has failed and gets no more bursts.
    failed: Arc<AtomicBool>,
}

impl Front {
    /// Returns the number of bursts that can be submitted now, at most `wanted`.
    #[inline]
    pub fn room(&mut self, wanted: usize) -> usize {
        self.submitter.room(wanted)
    }

    /// Submits `packets` and replaces them by an empty vector of the same capacity. Returns false and keeps them if the
    /// ring is full.
    ///
    /// # Panics
    /// If there are more packets than a burst may have.
    #[inline]
    pub fn submit(&mut self, packets: &mut Vec<Packet>) -> bool {
        if self.failed.load(Ordering::Relaxed) {
            return self.submitter.bypass(packets).is_some();
        }
        if self.direct
            && let Some(launcher) = self.serving.as_mut().and_then(|serving| serving.launcher.as_mut())
            && !launcher.flush_writes()
        {
            self.failed.store(true, Ordering::Relaxed);
            return self.submitter.bypass(packets).is_some();
        }
        let count = packets.len();
        let Some(turn) = self.submitter.submit(packets) else { return false };
        if let Some(launcher) = self.serving.as_mut().and_then(|serving| serving.launcher.as_mut()) {
            launcher.submitted(turn, count);
        }
        true
    }

    /// Returns whether every burst has been retired.
    pub fn is_empty(&mut self) -> bool {
        self.submitter.room(self.slots) == self.slots
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        let Some(Serving { launcher: Some(launcher), slots }) = self.serving.take() else { return };
        let told = self.submitter.quit(launcher.waiters());
        if !launcher.end_with(Box::new((slots, self.submitter.keep()))) {
            tracing::error!(told, "a device has not stopped: its memory is leaked");
        }
    }
}

/// The collecting end.
#[derive(Debug)]
pub struct Back {
    collector: Collector,
    results: Vec<u32>,
    /// The number of non-zero results, once the oldest burst is done.
    hits: Option<u32>,
    /// The work on the CPU, if it can take part.
    cpu: Option<CpuWork>,
    split: Option<Split>,
    serving: Option<Served>,
    /// Packets dropped after a failure.
    lost: u64,
    timeout: u64,
    check_interval: u64,
    /// TSC of the last answer.
    answered_at: u64,
    /// TSC of the last check of the device.
    checked_at: u64,
    pool: &'static Pool,
}

/// A processed burst.
#[derive(Debug)]
pub struct Done<'a> {
    pub packets: &'a mut Vec<Packet>,
    pub results: &'a [u32],
    pub hits: u32,
}

impl Back {
    /// Returns the oldest burst if it has been processed. It is the same burst until it is [retired](Back::retire).
    #[inline]
    pub fn done(&mut self) -> Option<Done<'_>> {
        if self.hits.is_none() {
            self.hits = self.work();
        }
        let hits = self.hits?;
        let packets = &mut self.collector.oldest()?.packets;
        Some(Done { packets, results: &self.results, hits })
    }

    /// Frees the slot of the burst returned by [`done`](Back::done), whose packets have been taken.
    ///
    /// # Panics
    /// If it still has packets.
    #[inline]
    pub fn retire(&mut self) {
        if self.hits.take().is_some() {
            self.collector.retire();
        }
    }

    /// Returns whether bursts are in flight or may still arrive, because the front end exists.
    pub fn is_waiting(&mut self) -> bool {
        self.collector.is_waiting()
    }

    /// Returns the reason if the device has failed.
    pub fn failure(&self) -> Option<&str> {
        self.serving.as_ref()?.failure.as_deref()
    }

    /// Returns the number of packets since the last call that returned to the pool unprocessed because they are in the
    /// memory of a failed device.
    pub fn take_lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    /// Returns the number of packets that are held because a hung device may still write them. They continued as
    /// copies, or were dropped.
    pub fn quarantined(&self) -> usize {
        let bursts = self.serving.iter().flat_map(|serving| &serving.quarantine);
        bursts.map(|held| held.packets.len()).sum()
    }

    /// Processes the oldest burst, or polls the device's answer. Returns `None` without a burst, or before the answer.
    #[inline]
    fn work(&mut self) -> Option<u32> {
        if self.serving.is_some() {
            return self.poll_answer();
        }
        let Self { collector, results, cpu, pool, .. } = self;
        let packets = &mut collector.oldest()?.packets;
        let results = &mut results[..packets.len()];
        Some(match cpu {
            Some(cpu) => cpu.run(pool, packets, results),
            None => {
                results.fill(0);
                0
            }
        })
    }

    #[inline]
    fn poll_answer(&mut self) -> Option<u32> {
        // Copies have replaced some of the packets, so an answer does not cover all of them.
        if self.serving.as_ref().is_some_and(|serving| serving.replaced > 0) {
            return self.run_on_cpu();
        }
        let Some(hits) = self.collector.answer(&mut self.results) else {
            return self.unanswered();
        };
        self.answered_at = tsc::now();
        let Self { collector, results, cpu, pool, split, .. } = self;
        let (packets, Some(cpu)) = (&mut collector.oldest()?.packets, cpu) else { return Some(hits) };
        match split {
            Some(split) => Some(hits + finish_split(cpu, split, packets, results)),
            None if packets.iter().any(Packet::is_segmented) => {
                Some(hits + finish_rest(cpu, pool, packets, results))
            }
            None => Some(hits),
        }
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        if let Some(serving) = &mut self.serving {
            serving.release_quarantine(&self.collector, self.pool);
        }
    }
}

/// Processes the packets of an answered burst that the device skipped. Returns the number of non-zero results.
#[cold]
fn finish_rest(cpu: &CpuWork, pool: &Pool, packets: &mut [Packet], results: &mut [u32]) -> u32 {
    let others = packets.iter_mut().zip(results).filter(|(packet, _)| packet.is_segmented());
    others.map(|(packet, result)| one(cpu, pool, packet, result)).sum()
}

/// Like `finish_rest`, with a split. It also swaps the addresses of the packets that the device processed.
#[inline]
fn finish_split(cpu: &CpuWork, split: &Split, packets: &mut [Packet], results: &mut [u32]) -> u32 {
    let mut hits = 0;
    for (packet, result) in packets.iter_mut().zip(results) {
        match split.payload(packet) {
            Some(_) => cpu.swap(split.pool, packet),
            None => hits += one(cpu, split.pool, packet, result),
        }
    }
    hits
}

fn one(cpu: &CpuWork, pool: &Pool, packet: &mut Packet, result: &mut u32) -> u32 {
    cpu.run(pool, std::slice::from_mut(packet), std::slice::from_mut(result))
}
