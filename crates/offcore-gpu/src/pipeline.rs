//! Pipelines: bursts of packets are worked on by a CPU or a device, and come back in order with their results.
//!
//! A pipeline has two ends for two lcores: [`Front`], where bursts begin, and [`Back`], where they come back. Between them
//! the packets are the device's, and nobody else has a handle on them. A device that dies is replaced by the CPU from the
//! first burst on that it has not answered: no packet is lost by it, and none is worked on twice. One that stands still and
//! cannot be made to end may go on some day: packets that it was told of, and may then write, go on as copies, and stay
//! behind themselves ([`Back::quarantined`]) until nobody is at work any more.
//!
//! **Buffer split.** With [`Work::split_at`] packets whose first bytes are in a buffer of their own, of that many bytes, are
//! the device's without these: it is told of what follows, and the CPU swaps the addresses. All other packets are the CPU's.
//!
//! **Packets in the device's memory.** With [`Memory::Direct`] nobody but the device reaches their bytes, and nobody can go on
//! in its place: when it fails, packets that it has not answered go back to the pool, and so do all that come later. They
//! are counted ([`Back::take_lost`]). Packets of several buffers pass with the result 0.

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
use crate::device::{Device, DeviceError, DeviceSlots, Launch, Launcher, Memory, Service, Started};
use crate::layout::{Kind, PipelineView, PoolView, TrieView, WorkView};
use crate::patterns::Patterns;
use crate::ring::{Collector, RingConfig, RingError, Split, Submitter, burst_ring};
use crate::trie::Trie;
use failure::Served;

/// How long a device may answer nothing before anybody asks whether it still lives, and between two such questions.
const ASK_AFTER: Duration = Duration::from_millis(1);

/// Why there is no pipeline.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// No burst ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The work cannot be done.
    #[error(transparent)]
    Work(#[from] CpuWorkError),
    /// The device does not serve it.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// What is done with every packet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work<'a> {
    /// What its result is.
    pub kind: Kind,
    /// Whether its MAC addresses change places.
    pub swap: bool,
    /// Bytes before its payload; with a split these are those of the first buffer instead.
    pub skip: u32,
    /// Bytes in the first buffer of packets that have been split.
    pub split_at: Option<usize>,
    /// Nanoseconds that it takes at least: one packet after the other on a CPU, all lanes of a block at once on a device.
    pub forced_ns: u32,
    /// The patterns of [`Kind::Match`].
    pub patterns: Option<&'a Patterns>,
}

/// Who works on bursts.
#[derive(Debug)]
pub enum Worker<'a> {
    /// Nobody: bursts pass, and every result is 0.
    Nobody,
    /// The lcore of the back end.
    Cpu,
    /// A device.
    Device {
        /// Which.
        device: &'a mut dyn Device,
        /// How bursts come to it.
        launch: Launch,
        /// Blocks that serve the ring, 1 to 64.
        blocks: u32,
        /// Lanes of a block, 1 to 1024.
        lanes: u32,
        /// Where it works on packets.
        memory: Memory,
    },
}

/// What a pipeline is made with.
#[derive(Debug)]
pub struct Setup<'a, 'd> {
    /// Packets of a burst at most, 1 to 4096.
    pub burst: usize,
    /// Bursts on their way at most: a power of two, 2 to 4096.
    pub slots: usize,
    /// Who works.
    pub worker: Worker<'d>,
    /// What is done.
    pub work: Work<'a>,
    /// How long a device that has bursts may answer none until it is taken to stand still: more than one takes.
    pub patience: Duration,
    /// The pool of the packets.
    pub pool: &'static Pool,
    /// Pages of the burst ring.
    pub hugepages: Hugepages,
}

/// A pipeline.
///
/// # Errors
/// Numbers out of range, work that cannot be done, a device that refuses.
pub fn pipeline(setup: Setup<'_, '_>) -> Result<(Front, Back), PipelineError> {
    let Setup { burst, slots, worker, work, patience, pool, hugepages } = setup;
    let Work { kind, swap, skip, split_at, forced_ns, patterns } = work;
    let before_payload = split_at.map_or(skip, |at| at as u32);
    let cpu = match worker {
        Worker::Nobody => None,
        _ => Some(CpuWork::new(kind, swap, before_payload, forced_ns, patterns)?),
    };
    let by_device = matches!(worker, Worker::Device { .. });
    let split = split_at.filter(|_| by_device).map(|at| Split { pool, at });
    let direct = matches!(&worker, Worker::Device { memory: Memory::Direct, .. });
    if let (Worker::Device { device, .. }, true, Some(_)) = (&worker, direct, split) {
        let reason = "packets in its memory cannot be split: their first bytes are for the CPU".into();
        return Err(DeviceError::Start { device: device.name().into(), reason }.into());
    }
    let cpu = cpu.filter(|_| !direct);
    // What a device that dies may have swapped has to be known.
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
        patience: tsc::ticks(patience),
        ask_after: tsc::ticks(ASK_AFTER.min(patience)),
        answered_at: 0,
        asked_at: 0,
        pool,
    };
    if let Worker::Device { device, launch, blocks, lanes, memory } = worker {
        let trie = patterns.filter(|_| kind == Kind::Match).map(Trie::new).map(Arc::new);
        let view = PipelineView {
            pool: PoolView {
                base: pool.mapping().base().as_ptr(),
                staging: std::ptr::null_mut(),
                chunk_shift: pool.chunk_size().trailing_zeros(),
                chunks: pool.chunks() as u32,
            },
            ring: front.submitter.view(),
            work: WorkView {
                kind,
                swap: device_swaps.into(),
                // Of a packet that has been split it sees the payload alone.
                skip: if split.is_some() { 0 } else { skip },
                forced_ns,
                trie: trie.as_ref().map_or(TrieView::EMPTY, |trie| trie.view()),
            },
        };
        // SAFETY: the pool is never unmapped. Ring and tables are `front`'s, which ends the service before it lets go of
        // them, or keeps them for good where it does not end. Packets are out of reach from when they are submitted until
        // their burst is answered or nobody is at work any more: `Back::done` sees to it. Where a device stands still those
        // that it may write stay out of reach; others go on, and it may at worst read what is no longer theirs, for an
        // answer that nobody looks at.
        let Started { launcher, watch, slots } =
            unsafe { device.start(Service { view, launch, blocks, lanes, memory }) }?;
        if let Some(slots) = &slots {
            // SAFETY: the device says so, and `front` keeps them as long as the ring.
            unsafe { front.submitter.write_slots_at(slots.base) };
        }
        front.serving = Some(Serving { launcher: Some(launcher), trie, slots });
        let quarantine = Vec::new();
        back.serving = Some(Served {
            watch,
            // What it copies into memory of its own is every pipeline's of that pool.
            swaps: device_swaps || memory == Memory::Gpu && split.is_none(),
            direct,
            failed,
            failure: None,
            stuck: false,
            quarantine,
            aside: 0,
        });
    }
    Ok((front, back))
}

/// A device at work, and what it reads.
#[derive(Debug)]
struct Serving {
    launcher: Option<Box<dyn Launcher>>,
    trie: Option<Arc<Trie>>,
    slots: Option<DeviceSlots>,
}

/// The end where bursts begin.
#[derive(Debug)]
pub struct Front {
    submitter: Submitter,
    serving: Option<Serving>,
    slots: usize,
    /// Network cards put packets into the device's memory.
    direct: bool,
    /// The device has failed: it is told nothing any more.
    failed: Arc<AtomicBool>,
}

impl Front {
    /// Bursts that can be submitted now, of `wanted` ones.
    #[inline]
    pub fn room(&mut self, wanted: usize) -> usize {
        self.submitter.room(wanted)
    }

    /// Hands on `packets`, and leaves an empty vector with as much room in their place; `false`, and they stay, when there is
    /// no room.
    ///
    /// # Panics
    /// When there are more packets than a burst may have.
    #[inline]
    pub fn submit(&mut self, packets: &mut Vec<Packet>) -> bool {
        if self.failed.load(Ordering::Relaxed) {
            return self.submitter.hide(packets).is_some();
        }
        if self.direct
            && let Some(launcher) = self.serving.as_mut().and_then(|serving| serving.launcher.as_mut())
            && !launcher.arrived()
        {
            self.failed.store(true, Ordering::Relaxed);
            return self.submitter.hide(packets).is_some();
        }
        let count = packets.len();
        let Some(turn) = self.submitter.submit(packets) else { return false };
        if let Some(launcher) = self.serving.as_mut().and_then(|serving| serving.launcher.as_mut()) {
            launcher.submitted(turn, count);
        }
        true
    }

    /// Whether every burst has come back and was retired.
    pub fn is_empty(&mut self) -> bool {
        self.submitter.room(self.slots) == self.slots
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        let Some(Serving { launcher: Some(launcher), trie, slots }) = self.serving.take() else { return };
        let told = self.submitter.quit(launcher.waiters());
        if !launcher.end_with(Box::new((trie, slots, self.submitter.keep()))) {
            tracing::error!(told, "a device has not ended: its memory stays");
        }
    }
}

/// The end where bursts come back.
#[derive(Debug)]
pub struct Back {
    collector: Collector,
    /// Of the burst that is done.
    results: Vec<u32>,
    /// How many of them are not 0, once the oldest burst is done.
    hits: Option<u32>,
    /// The work, for whoever does it here; nobody does anything without.
    cpu: Option<CpuWork>,
    /// What of a packet is the device's.
    split: Option<Split>,
    serving: Option<Served>,
    /// Packets that nobody could work on.
    lost: u64,
    patience: u64,
    ask_after: u64,
    /// TSC when the last answer was found.
    answered_at: u64,
    /// TSC when it was last asked whether the device still lives.
    asked_at: u64,
    pool: &'static Pool,
}

/// A burst that has been worked on.
#[derive(Debug)]
pub struct Done<'a> {
    /// Its packets, in order.
    pub packets: &'a mut Vec<Packet>,
    /// A result for each.
    pub results: &'a [u32],
    /// How many of them are not 0.
    pub hits: u32,
}

impl Back {
    /// The oldest burst, if it has been worked on; the same one until it is [retired](Back::retire).
    #[inline]
    pub fn done(&mut self) -> Option<Done<'_>> {
        if self.hits.is_none() {
            self.hits = self.work();
        }
        let hits = self.hits?;
        let packets = &mut self.collector.oldest()?.packets;
        Some(Done { packets, results: &self.results, hits })
    }

    /// The burst that is done has no packets any more: its place is free for another.
    ///
    /// # Panics
    /// When it still has packets.
    #[inline]
    pub fn retire(&mut self) {
        if self.hits.take().is_some() {
            self.collector.retire();
        }
    }

    /// Bursts are on their way, or may come: the front end is still there.
    pub fn is_waiting(&mut self) -> bool {
        self.collector.is_waiting()
    }

    /// Why the device works no more, and the CPU in its place if it can, if it is so.
    pub fn failure(&self) -> Option<&str> {
        self.serving.as_ref()?.failure.as_deref()
    }

    /// Packets that nobody could work on, since the device has failed and they are in its memory, and that went back to the
    /// pool: so many more since the last time.
    pub fn take_lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    /// Packets that went on as copies, or were lost, because a device that stands still may yet write them.
    pub fn quarantined(&self) -> usize {
        self.serving.as_ref().map_or(0, |serving| serving.quarantine.len())
    }

    /// Works on the oldest burst, or takes what a device has made of it; `None` when there is none, or none yet.
    #[inline]
    fn work(&mut self) -> Option<u32> {
        if self.serving.is_some() {
            return self.answered();
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
    fn answered(&mut self) -> Option<u32> {
        // Copies are in the place of some of its packets: an answer is no longer about all of them.
        if self.serving.as_ref().is_some_and(|serving| serving.aside > 0) {
            return self.replace();
        }
        let Some(hits) = self.collector.answer(&mut self.results) else {
            return self.unanswered();
        };
        self.answered_at = tsc::now();
        let Self { collector, results, cpu, pool, split, .. } = self;
        let (packets, Some(cpu)) = (&mut collector.oldest()?.packets, cpu) else { return Some(hits) };
        match split {
            Some(split) => Some(hits + beside_split(cpu, split, packets, results)),
            None if packets.iter().any(Packet::is_segmented) => {
                Some(hits + beside(cpu, pool, packets, results))
            }
            None => Some(hits),
        }
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        let Some(Served { watch, quarantine, .. }) = &mut self.serving else { return };
        if !quarantine.is_empty() && watch.give_up() {
            self.pool.cache().free_all(quarantine.drain(..));
        }
    }
}

/// Works on those packets of an answered burst that were not the device's. Returns how many of their results are not 0.
#[cold]
fn beside(cpu: &CpuWork, pool: &Pool, packets: &mut [Packet], results: &mut [u32]) -> u32 {
    let others = packets.iter_mut().zip(results).filter(|(packet, _)| packet.is_segmented());
    others.map(|(packet, result)| one(cpu, pool, packet, result)).sum()
}

/// The same where packets have been split, and swaps the addresses of those that were the device's.
#[inline]
fn beside_split(cpu: &CpuWork, split: &Split, packets: &mut [Packet], results: &mut [u32]) -> u32 {
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
