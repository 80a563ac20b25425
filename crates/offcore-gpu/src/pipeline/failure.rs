//! What becomes of packets when their device has failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offcore_mem::{Packet, Pool, PoolCache};
use offcore_stats::tsc;
use offcore_wire::virtio_net::HEADER_LEN;

use super::Back;
use crate::device::Watch;
use crate::ring::WorkBurst;

/// What is said where nobody can go on.
const LOST: &str = "its packets are in its memory, and are dropped as `failed`, with all that come";

/// A device at work, for who collects.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) watch: Box<dyn Watch>,
    /// Whether it writes packets, or copies of them that others have, too.
    pub(super) swaps: bool,
    /// Whether nobody else reaches them.
    pub(super) direct: bool,
    /// What the front end has to know.
    pub(super) failed: Arc<AtomicBool>,
    pub(super) failure: Option<String>,
    /// It has failed, but may still be at work.
    pub(super) stuck: bool,
    /// Packets that it may write.
    pub(super) quarantine: Vec<Packet>,
    /// Packets of the oldest burst that have been looked at for that.
    pub(super) aside: usize,
}

impl Back {
    /// The oldest burst, if there is one, has not been answered: its device may be dead, or stand still.
    #[inline]
    pub(super) fn unanswered(&mut self) -> Option<u32> {
        let (since, shown) = self.collector.oldest().map(|burst| (burst.since, burst.shown))?;
        if !shown || self.serving.as_ref().is_some_and(|serving| serving.failure.is_some()) {
            return self.replace();
        }
        // What the device takes for one burst, and not for all that are before it.
        let now = tsc::now();
        let waited = now.saturating_sub(since.max(self.answered_at));
        if waited <= self.ask_after || now.saturating_sub(self.asked_at) <= self.ask_after {
            return None;
        }
        self.asked_at = now;
        self.look_after(waited)
    }

    #[cold]
    fn look_after(&mut self, waited: u64) -> Option<u32> {
        let Served { watch, failed, failure, stuck, direct, .. } = self.serving.as_mut()?;
        let silent = || format!("it has not answered for {:.1} ms", tsc::to_ns(waited) / 1e6);
        let found = match watch.failure() {
            Some(failure) => failure,
            None if waited > self.patience && watch.give_up() => silent(),
            // It was asked to give up, and had as long again to do so.
            None if waited > 2 * self.patience => {
                *stuck = true;
                let kept = if *direct { "stay behind" } else { "go on as copies" };
                format!("{} and does not end: packets that it may write {kept}", silent())
            }
            None => return None,
        };
        let what = match direct {
            true => LOST,
            false => "the CPU goes on in its place",
        };
        tracing::error!("a device has failed ({found}): {what}");
        *failure = Some(found);
        failed.store(true, Ordering::Relaxed);
        // It may have answered just before.
        self.answered()
    }

    /// Works on a burst that a failed device may have worked on in part, or was not told of; `None` while a copy is wanted
    /// and the pool is dry.
    #[cold]
    pub(super) fn replace(&mut self) -> Option<u32> {
        if self.serving.as_ref().is_some_and(|serving| serving.direct) {
            return self.lose();
        }
        let Self { collector, results, cpu, pool, serving, .. } = self;
        let (Some(burst), Some(cpu), Some(serving)) = (collector.oldest(), cpu, serving) else {
            return Some(0);
        };
        if serving.stuck {
            serving.put_aside(burst, pool)?;
        }
        for (packet, addresses) in burst.packets.iter_mut().zip(&burst.addresses) {
            if !packet.is_segmented() && packet.len() >= addresses.len() {
                packet.bytes_mut()[..addresses.len()].copy_from_slice(addresses); // copy-ok: addresses, as they were
            }
        }
        Some(cpu.run(pool, &mut burst.packets, results))
    }

    /// Lets go of the packets of a burst that nobody can work on any more.
    #[cold]
    fn lose(&mut self) -> Option<u32> {
        let Self { collector, pool, serving, lost, .. } = self;
        let (Some(burst), Some(serving)) = (collector.oldest(), serving) else { return Some(0) };
        if serving.failure.is_none() {
            let untold = || "what network cards have put into its memory cannot be shown to it".to_owned();
            let found = serving.watch.failure().unwrap_or_else(untold);
            tracing::error!("a device has failed ({found}): {LOST}");
            serving.failure = Some(found);
        }
        *lost += burst.packets.len() as u64;
        serving.look_at_quarantine(pool);
        if serving.stuck && serving.swaps && burst.shown {
            serving.quarantine.append(&mut burst.packets);
        } else {
            pool.cache().free_all(burst.packets.drain(..));
        }
        Some(0)
    }
}

impl Served {
    /// Frees what it may no longer write. Whether there was something.
    fn look_at_quarantine(&mut self, pool: &'static Pool) -> bool {
        let free = !self.quarantine.is_empty() && self.watch.give_up();
        if free {
            self.stuck = false;
            self.aside = 0;
            pool.cache().free_all(self.quarantine.drain(..));
        }
        free
    }

    /// Puts copies in the place of the packets that a device that stands still may write. `None`, and those that are done
    /// stay done, when the pool has no more buffers.
    fn put_aside(&mut self, burst: &mut WorkBurst, pool: &'static Pool) -> Option<()> {
        if self.look_at_quarantine(pool) || !self.swaps || !burst.shown {
            return Some(());
        }
        let mut cache = pool.cache();
        for packet in &mut burst.packets[self.aside..] {
            if !packet.is_segmented() {
                let copy = copied(&mut cache, packet)?;
                self.quarantine.push(std::mem::replace(packet, copy));
            }
            self.aside += 1;
        }
        self.aside = 0;
        Some(())
    }
}

/// A packet of one buffer again, in another one.
fn copied(cache: &mut PoolCache, packet: &Packet) -> Option<Packet> {
    let mut copy = cache.take_sized(packet.headroom(), packet.len())?;
    copy.bytes_mut().copy_from_slice(packet.bytes()); // copy-ok: its device stands still, once
    if packet.has_offload() {
        copy.headroom_mut(HEADER_LEN).copy_from_slice(packet.headroom_bytes(HEADER_LEN)); // copy-ok: a header
        copy.set_offload(true);
    }
    Some(copy)
}
