//! Failure of a device: detection, and handling of its packets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offcore_mem::{Packet, Pool, PoolCache};
use offcore_stats::tsc;
use offcore_wire::virtio_net::HEADER_LEN;

use super::Back;
use crate::device::Watch;
use crate::ring::{Collector, WorkBurst};

/// The log message if the CPU cannot take over.
const LOST: &str = "its packets are in its memory: these and all that follow are dropped as `failed`";

/// The device of a pipeline, as the collecting end sees it.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) watch: Box<dyn Watch>,
    /// Whether it writes packets, or a staging area that other pipelines use, too.
    pub(super) swaps: bool,
    /// Whether packets are in its memory.
    pub(super) direct: bool,
    /// Tells the front end of the failure.
    pub(super) failed: Arc<AtomicBool>,
    pub(super) failure: Option<String>,
    /// It has failed but has not stopped.
    pub(super) hung: bool,
    /// Packets that it may still write: its unanswered bursts.
    pub(super) quarantine: Vec<Held>,
    /// Packets of the oldest burst that have been replaced by copies so far.
    pub(super) replaced: usize,
}

/// Packets of a burst that a hung device may still write.
#[derive(Debug)]
pub(super) struct Held {
    turn: u64,
    pub(super) packets: Vec<Packet>,
}

impl Back {
    /// Handles an unanswered oldest burst: the device may be slow, dead or hung.
    #[inline]
    pub(super) fn unanswered(&mut self) -> Option<u32> {
        let (since, visible) = self.collector.oldest().map(|burst| (burst.since, burst.visible))?;
        if !visible || self.serving.as_ref().is_some_and(|serving| serving.failure.is_some()) {
            return self.run_on_cpu();
        }
        // The waiting time of this burst alone, without earlier bursts.
        let now = tsc::now();
        let waited = now.saturating_sub(since.max(self.answered_at));
        if waited <= self.check_interval || now.saturating_sub(self.checked_at) <= self.check_interval {
            return None;
        }
        self.checked_at = now;
        self.check_device(waited)
    }

    #[cold]
    fn check_device(&mut self, waited: u64) -> Option<u32> {
        let Served { watch, failed, failure, hung, direct, .. } = self.serving.as_mut()?;
        let no_answer = || format!("it has not answered for {:.1} ms", tsc::to_ns(waited) / 1e6);
        let found = match watch.failure() {
            Some(failure) => failure,
            None if waited > self.timeout && watch.request_abort() => no_answer(),
            // It was told to stop, and had the same time again to do so.
            None if waited > 2 * self.timeout => {
                *hung = true;
                let kept = if *direct { "are held back" } else { "are replaced by copies" };
                format!("{} and does not stop: packets that it may write {kept}", no_answer())
            }
            None => return None,
        };
        let what = match direct {
            true => LOST,
            false => "the CPU takes over",
        };
        tracing::error!("a device has failed ({found}): {what}");
        *failure = Some(found);
        failed.store(true, Ordering::Relaxed);
        // It may have answered just before it stopped.
        self.poll_answer()
    }

    /// Processes a burst that a failed device may have processed in part, or has not seen. Returns `None` while the
    /// pool has no buffer for a copy.
    #[cold]
    pub(super) fn run_on_cpu(&mut self) -> Option<u32> {
        if self.serving.as_ref().is_some_and(|serving| serving.direct) {
            return self.drop_burst();
        }
        let Self { collector, results, cpu, pool, serving, .. } = self;
        let Some(serving) = serving else { return Some(0) };
        serving.release_quarantine(collector, pool);
        let (Some(burst), Some(cpu)) = (collector.oldest(), cpu) else { return Some(0) };
        if serving.hung {
            serving.replace_by_copies(burst, pool)?;
        }
        for (packet, addresses) in burst.packets.iter_mut().zip(&burst.addresses) {
            if !packet.is_segmented() && packet.len() >= addresses.len() {
                packet.bytes_mut()[..addresses.len()].copy_from_slice(addresses); // copy-ok: the original addresses
            }
        }
        Some(cpu.run(pool, &mut burst.packets, results))
    }

    /// Frees the packets of a burst that can no longer be processed.
    #[cold]
    fn drop_burst(&mut self) -> Option<u32> {
        let Self { collector, pool, serving, lost, .. } = self;
        let Some(serving) = serving else { return Some(0) };
        serving.release_quarantine(collector, pool);
        let Some(burst) = collector.oldest() else { return Some(0) };
        if serving.failure.is_none() {
            let not_flushed = || "writes of network cards to its memory cannot be flushed".to_owned();
            let found = serving.watch.failure().unwrap_or_else(not_flushed);
            tracing::error!("a device has failed ({found}): {LOST}");
            serving.failure = Some(found);
        }
        *lost += burst.packets.len() as u64;
        if serving.hung && serving.swaps && burst.visible {
            serving.held(burst.turn).append(&mut burst.packets);
        } else {
            pool.cache().free_all(burst.packets.drain(..));
        }
        Some(0)
    }
}

impl Served {
    /// Frees the quarantine of a device that has stopped, or otherwise the bursts that it has answered late.
    pub(super) fn release_quarantine(&mut self, collector: &Collector, pool: &'static Pool) {
        if self.quarantine.is_empty() {
            return;
        }
        let stopped = self.watch.request_abort();
        if stopped {
            self.hung = false;
            self.replaced = 0;
        }
        let released = self.quarantine.extract_if(.., |held| stopped || collector.is_answered(held.turn));
        let packets: Vec<Packet> = released.flat_map(|held| held.packets).collect();
        if !packets.is_empty() {
            pool.cache().free_all(packets);
        }
    }

    /// Returns the packets of a burst in quarantine.
    fn held(&mut self, turn: u64) -> &mut Vec<Packet> {
        if self.quarantine.last().is_none_or(|held| held.turn != turn) {
            self.quarantine.push(Held { turn, packets: Vec::new() });
        }
        let last = self.quarantine.len() - 1;
        &mut self.quarantine[last].packets
    }

    /// Replaces the packets that a hung device may write by copies. Returns `None` when the pool is out of buffers. The
    /// next call continues at the same packet.
    fn replace_by_copies(&mut self, burst: &mut WorkBurst, pool: &'static Pool) -> Option<()> {
        if !self.swaps || !burst.visible {
            return Some(());
        }
        let mut cache = pool.cache();
        for packet in &mut burst.packets[self.replaced..] {
            if !packet.is_segmented() {
                let copy = copy_of(&mut cache, packet)?;
                let original = std::mem::replace(packet, copy);
                self.held(burst.turn).push(original);
            }
            self.replaced += 1;
        }
        self.replaced = 0;
        Some(())
    }
}

/// Returns a copy of a packet in one buffer.
fn copy_of(cache: &mut PoolCache, packet: &Packet) -> Option<Packet> {
    let mut copy = cache.take_sized(packet.headroom(), packet.len())?;
    copy.bytes_mut().copy_from_slice(packet.bytes()); // copy-ok: once, when a device hangs
    if packet.has_offload() {
        copy.headroom_mut(HEADER_LEN).copy_from_slice(packet.headroom_bytes(HEADER_LEN)); // copy-ok: a header
        copy.set_offload(true);
    }
    Some(copy)
}
