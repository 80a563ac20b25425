//! Pipelines: bursts of packets are worked on by a CPU or a device, and come back in order with their results.
//!
//! A pipeline has two ends for two lcores: [`Front`], where bursts begin, and [`Back`], where they come back. Between them
//! the packets are the device's, and nobody else has a handle on them. A device that dies is replaced by the CPU from the
//! first burst on that it has not answered: no packet is lost by it, and none is worked on twice.

#[cfg(test)]
#[cfg(host_kernels)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use offcore_mem::{Hugepages, Packet, Pool};
use offcore_stats::tsc;

use crate::cpu::{CpuWork, CpuWorkError};
use crate::device::{Device, DeviceError, Launch, Launcher, Memory, Service, Started, Watch};
use crate::layout::{Kind, PipelineView, PoolView, TrieView, WorkView};
use crate::patterns::Patterns;
use crate::ring::{Collector, RingConfig, RingError, Submitter, burst_ring};
use crate::trie::Trie;

/// How long a burst may be unanswered before anybody asks whether the device still lives.
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
    /// Bytes before its payload.
    pub skip: u32,
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
    /// How long a device may take for a burst until it is taken to stand still.
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
    let Work { kind, swap, skip, forced_ns, patterns } = work;
    let cpu = match worker {
        Worker::Nobody => None,
        _ => Some(CpuWork::new(kind, swap, skip, forced_ns, patterns)?),
    };
    // What a device that dies may have swapped has to be known.
    let keep_addresses = swap && matches!(worker, Worker::Device { .. });
    let (submitter, collector) = burst_ring(&RingConfig { slots, burst, keep_addresses, hugepages })?;
    let mut front = Front { submitter, serving: None, slots };
    let mut back = Back {
        collector,
        results: vec![0; burst],
        hits: None,
        cpu,
        watch: None,
        failure: None,
        patience: tsc::ticks(patience),
        ask_after: tsc::ticks(ASK_AFTER.min(patience)),
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
                swap: swap.into(),
                skip,
                forced_ns,
                trie: trie.as_ref().map_or(TrieView::EMPTY, |trie| trie.view()),
            },
        };
        // SAFETY: the pool is never unmapped. Ring and tables are `front`'s, which ends the service before it lets go of
        // them, or keeps them for good where it does not end. Packets are out of reach from when they are submitted until
        // their burst is answered or nobody is at work any more: `Back::done` sees to it.
        let Started { launcher, watch } =
            unsafe { device.start(Service { view, launch, blocks, lanes, memory }) }?;
        front.serving = Some(Serving { launcher: Some(launcher), trie });
        back.watch = Some(watch);
    }
    Ok((front, back))
}

/// A device at work, and what it reads.
#[derive(Debug)]
struct Serving {
    launcher: Option<Box<dyn Launcher>>,
    trie: Option<Arc<Trie>>,
}

/// The end where bursts begin.
#[derive(Debug)]
pub struct Front {
    submitter: Submitter,
    serving: Option<Serving>,
    slots: usize,
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
        let Some(Serving { launcher: Some(launcher), trie }) = self.serving.take() else { return };
        let told = self.submitter.quit(launcher.waiters());
        let ended = launcher.end();
        if !ended {
            tracing::error!(told, "a device has not ended: its memory stays");
            // Somebody may still read them.
            std::mem::forget((trie, self.submitter.keep()));
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
    watch: Option<Box<dyn Watch>>,
    failure: Option<String>,
    patience: u64,
    ask_after: u64,
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

    /// Why the CPU works in the device's place, if it does.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Works on the oldest burst, or takes what a device has made of it; `None` when there is none, or none yet.
    #[inline]
    fn work(&mut self) -> Option<u32> {
        if self.watch.is_some() {
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
        let Some(mut hits) = self.collector.answer(&mut self.results) else {
            return self.unanswered();
        };
        // Packets of several buffers are not the device's.
        let Self { collector, results, cpu, pool, .. } = self;
        let packets = &mut collector.oldest()?.packets;
        if let Some(cpu) = cpu
            && packets.iter().any(Packet::is_segmented)
        {
            for (packet, result) in
                packets.iter_mut().zip(results).filter(|(packet, _)| packet.is_segmented())
            {
                hits += cpu.run(pool, std::slice::from_mut(packet), std::slice::from_mut(result));
            }
        }
        Some(hits)
    }

    /// The oldest burst, if there is one, has not been answered: its device may be dead, or stand still.
    #[inline]
    fn unanswered(&mut self) -> Option<u32> {
        let since = self.collector.oldest()?.since;
        if self.failure.is_some() {
            return Some(self.replace());
        }
        let waited = tsc::now().wrapping_sub(since);
        if waited > self.ask_after { self.look_after(waited) } else { None }
    }

    #[cold]
    fn look_after(&mut self, waited: u64) -> Option<u32> {
        let watch = self.watch.as_mut()?;
        let failure = match watch.failure() {
            Some(failure) => failure,
            None if waited > self.patience && watch.give_up() => {
                format!("it has not answered for {:.1} ms", tsc::to_ns(waited) / 1e6)
            }
            None => return None,
        };
        tracing::error!("a device has failed ({failure}): the CPU goes on in its place");
        self.failure = Some(failure);
        // It may have answered just before.
        self.answered()
    }

    /// Works on a burst that a dead device may have worked on in part.
    #[cold]
    fn replace(&mut self) -> u32 {
        let Self { collector, results, cpu, pool, .. } = self;
        let (Some(burst), Some(cpu)) = (collector.oldest(), cpu) else { return 0 };
        for (packet, addresses) in burst.packets.iter_mut().zip(&burst.addresses) {
            if !packet.is_segmented() && packet.len() >= addresses.len() {
                packet.bytes_mut()[..addresses.len()].copy_from_slice(addresses); // copy-ok: addresses, as they were
            }
        }
        cpu.run(pool, &mut burst.packets, results)
    }
}
