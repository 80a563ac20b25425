//! The two ends of a measured pipeline: the generator at the front, the verifier at the back.
//!
//! ```text
//! Generator ── patches, Front::submit ──▶ pipeline ── Back::done ──▶ Verifier
//!     ◀───────────────── packets that were checked, by a ring ──────────┘
//! ```
//! Each end has a step of at most one burst, so that one thread can run both.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use offcore_gpu::cpu::CpuWork;
use offcore_gpu::pipeline::{Back, Front};
use offcore_mem::{HEADROOM, Packet, Pool};
use offcore_ring::prefetch;
use offcore_ring::spsc::{Consumer, Producer};
use offcore_stats::tsc;

use super::packets::{Check, Content, SAMPLED, mark, patch, stamp, stamped};
use super::window::{Phase, Seen, Traffic, Window};

/// Number of packets that are prefetched together.
const AHEAD: usize = 32;
/// Maximum time without a returned burst.
const DEADLINE: Duration = Duration::from_secs(10);

/// The source of bursts.
#[derive(Debug)]
pub(super) struct Generator {
    front: Front,
    returned: Consumer<Packet>,
    reserve: Vec<Packet>,
    /// Number of reserve packets that still have to be put into circulation.
    fresh: usize,
    gathered: Vec<Packet>,
    /// Number of the next gathered packet.
    next: u64,
    /// Value of `next` at the start of the window.
    first: u64,
    pool: &'static Pool,
    /// TSC ticks spent on submission, and number of submitted bursts.
    submits: (u64, u64),
}

impl Generator {
    /// Creates the generator of a pipeline for bursts of at most `burst` packets. It uses `packets`. Checked packets
    /// return through `returned`.
    pub(super) fn new(
        front: Front,
        returned: Consumer<Packet>,
        packets: Vec<Packet>,
        burst: usize,
        pool: &'static Pool,
    ) -> Self {
        let gathered = Vec::with_capacity(burst);
        Self {
            front,
            returned,
            reserve: packets,
            fresh: 0,
            gathered,
            next: 0,
            first: 0,
            pool,
            submits: (0, 0),
        }
    }

    /// Begins a window.
    pub(super) fn begin(&mut self, window: &Window) {
        let plan = &window.plan;
        self.fresh = plan.circulating.min(self.reserve.len());
        let first = self.reserve.len() - self.fresh;
        for packet in &mut self.reserve[first..] {
            packet.set_range(self.pool, HEADROOM, plan.len);
        }
        (self.first, self.submits) = (self.next, (0, 0));
    }

    /// Sends a burst if one is available and the pipeline has room. Returns whether it did any work.
    #[inline]
    pub(super) fn step(&mut self, window: &Window) -> bool {
        let plan = &window.plan;
        let marked = match plan.traffic {
            Traffic::Closed => false,
            Traffic::EveryOne(_) => true,
            Traffic::Paced { interval, timeout } => return self.paced(window, interval, timeout),
        };
        if self.front.room(1) == 0 {
            return false;
        }
        self.gather(plan.burst, marked);
        self.gathered.len() == plan.burst && self.submit()
    }

    /// Returns whether all packets of the window have been sent.
    #[inline(always)]
    pub(super) fn has_ended(&self, window: &Window) -> bool {
        let enough =
            matches!(window.plan.traffic, Traffic::EveryOne(packets) if self.next - self.first >= packets);
        enough || window.phase() == Phase::Ending
    }

    /// Gathers the packets that are due. Sends the burst if it is full or its first packet has reached the timeout.
    #[inline]
    fn paced(&mut self, window: &Window, interval: f64, timeout: u64) -> bool {
        let Some(since) = tsc::now().checked_sub(window.origin) else { return false };
        let due = (since as f64 / interval) as u64 + 1;
        let behind = due.saturating_sub(self.next - self.first) as usize;
        let room = window.plan.burst - self.gathered.len();
        self.gather(self.gathered.len() + behind.min(room), false);
        let Some(oldest) = (self.gathered.len() as u64).checked_sub(1).map(|more| self.next - 1 - more)
        else {
            return false;
        };
        let waited = since.saturating_sub(((oldest - self.first) as f64 * interval) as u64);
        (self.gathered.len() == window.plan.burst || waited >= timeout) && self.submit()
    }

    /// Gathers and patches packets until `wanted` are gathered or no packet is left.
    #[inline(always)]
    fn gather(&mut self, wanted: usize, marked: bool) {
        while self.gathered.len() < wanted {
            let missing = (wanted - self.gathered.len()).min(AHEAD);
            let (first, second) = self.returned.peek(missing);
            first.iter().chain(second).for_each(|packet| prefetch::write(packet.data().as_ptr()));
            let before = self.gathered.len();
            if self.fresh > 0 {
                self.fresh -= 1;
                self.gathered.extend(self.reserve.pop());
            } else {
                self.gathered.extend(self.returned.pop_burst(missing));
            }
            if self.gathered.len() == before {
                return;
            }
            for packet in &mut self.gathered[before..] {
                patch(packet, self.next);
                if marked {
                    mark(packet, self.next);
                }
                self.next += 1;
            }
        }
    }

    #[inline(always)]
    fn submit(&mut self) -> bool {
        let Some(first) = self.gathered.first_mut() else { return false };
        let begun = tsc::now();
        stamp(first, begun);
        if !self.front.submit(&mut self.gathered) {
            return false;
        }
        self.submits.0 += tsc::now().wrapping_sub(begun);
        self.submits.1 += 1;
        true
    }

    /// Ends sending. Returns the number of packets sent in all windows, and the ticks and bursts of submission.
    pub(super) fn finish(&mut self) -> (u64, (u64, u64)) {
        // Gathered packets that were not sent are patched again with the same numbers.
        self.next -= self.gathered.len() as u64;
        self.reserve.append(&mut self.gathered);
        (self.next, self.submits)
    }

    /// Takes back checked packets. Returns whether all packets have returned.
    pub(super) fn settle(&mut self) -> bool {
        self.reserve.extend(self.returned.pop_burst(usize::MAX));
        self.front.is_empty()
    }

    /// Returns the packets after all have come back.
    pub(super) fn into_packets(mut self) -> Vec<Packet> {
        self.settle();
        std::mem::take(&mut self.reserve)
    }
}

/// Expected values that all verifiers of a measurement share.
#[derive(Debug)]
pub(super) struct Known {
    /// Initial content of the packets.
    pub content: Arc<Content>,
    /// Whether the MAC addresses are swapped.
    pub swapped: bool,
    /// Result of the packet in each chunk. If empty, all results are 0.
    pub results: Arc<[u32]>,
    /// The same work on the CPU, without the swap. If `None`, results are 0.
    pub work: Option<Arc<CpuWork>>,
    /// Test switch: number of a packet and offset of a byte that is changed before the check.
    #[cfg(test)]
    pub corrupted: Option<(u64, usize)>,
}

/// The sink of bursts.
#[derive(Debug)]
pub(super) struct Verifier {
    back: Back,
    checked: Producer<Packet>,
    known: Arc<Known>,
    pool: &'static Pool,
    /// Number of the next packet.
    next: u64,
    /// Value of `next` at the start of the window.
    first: u64,
    scratch: Vec<u8>,
    seen: Seen,
    counted: Option<Counted>,
    error: Option<anyhow::Error>,
    /// Number of the next packet at the last check for progress, and time of the last progress.
    progress: (u64, Instant),
}

impl Verifier {
    /// Creates the verifier of a pipeline. Checked packets go to `checked`.
    pub(super) fn new(back: Back, checked: Producer<Packet>, known: Arc<Known>, pool: &'static Pool) -> Self {
        Self {
            back,
            checked,
            known,
            pool,
            next: 0,
            first: 0,
            scratch: Vec::new(),
            seen: Seen::default(),
            counted: None,
            error: None,
            progress: (0, Instant::now()),
        }
    }

    /// Begins a window.
    pub(super) fn begin(&mut self) {
        (self.first, self.seen, self.counted) = (self.next, Seen::default(), None);
        self.progress = (self.next, Instant::now());
    }

    /// Takes a completed burst and checks it. Returns whether a burst was available.
    #[inline]
    pub(super) fn step(&mut self, window: &Window, pipeline: usize) -> bool {
        let begun = tsc::now();
        let Some(done) = self.back.done() else { return false };
        let now = tsc::now();
        let count = done.packets.len();
        let submitted = done.packets.first().map_or(now, stamped);
        #[cfg(test)]
        if let Some((number, at)) = self.known.corrupted
            && let Some(packet) = done.packets.get_mut(number.wrapping_sub(self.next) as usize)
        {
            packet.bytes_mut()[at] ^= 1;
        }
        if self.error.is_none() {
            let check = Check {
                content: &self.known.content,
                len: window.plan.len,
                swapped: self.known.swapped,
                results: &self.known.results,
            };
            let marked = matches!(window.plan.traffic, Traffic::EveryOne(_));
            let checked = if marked {
                let work = self.known.work.as_deref();
                every_one(&check, self.pool, work, done.packets, done.results, self.next, &mut self.scratch)
            } else {
                sampled(&check, done.packets, done.results, self.next, self.first, &mut self.scratch)
            };
            match checked {
                Ok(verified) => self.seen.verified += verified,
                Err(error) => {
                    self.error = Some(error);
                    window.fail();
                }
            }
        }
        // The ring has room for every packet of the pipeline.
        self.checked.push_iter(&mut done.packets.drain(..));
        let retiring = tsc::now();
        self.back.retire();
        let taken = now.wrapping_sub(begun) + tsc::now().wrapping_sub(retiring);
        if window.phase() == Phase::Measured {
            self.count(window, pipeline, count as u64, submitted, now, taken);
        }
        self.next += count as u64;
        self.seen.received += count as u64;
        true
    }

    /// Counts a burst of `packets` packets, sent at `submitted` and returned at `returned`, which took `taken` ticks to
    /// collect. Whole bursts count, from the return of the first burst to the last. (See [`Counted::span`] for an
    /// exception.)
    #[inline(always)]
    fn count(
        &mut self,
        window: &Window,
        pipeline: usize,
        packets: u64,
        submitted: u64,
        returned: u64,
        taken: u64,
    ) {
        let Some(counted) = &mut self.counted else {
            self.counted = Some(Counted { first: returned, last: returned, packets: 0 });
            return;
        };
        counted.last = returned;
        counted.packets += packets;
        self.seen.bursts += 1;
        self.seen.collects += taken;
        match window.plan.traffic {
            Traffic::Paced { interval, .. } => {
                for number in self.next..self.next + packets {
                    let due = window.origin + ((number - self.first) as f64 * interval) as u64;
                    self.seen.latencies.record(returned.saturating_sub(due));
                }
            }
            _ => self.seen.latencies.record(returned.saturating_sub(submitted)),
        }
        window.has_counted(pipeline, self.seen.bursts);
    }

    /// Returns whether all packets that will be sent have come back.
    #[inline(always)]
    pub(super) fn is_through(&self, window: &Window, pipeline: usize) -> bool {
        window.sent(pipeline) == Some(self.next)
    }

    /// Returns whether the pipeline is stalled, that is, nothing has come back for [`DEADLINE`]. Called occasionally.
    #[cold]
    pub(super) fn is_stuck(&mut self, window: &Window) -> bool {
        if self.progress.0 != self.next {
            self.progress = (self.next, Instant::now());
        }
        let stuck = self.progress.1.elapsed() > DEADLINE;
        if stuck {
            self.error.get_or_insert_with(|| anyhow!("nothing has come back for {} s", DEADLINE.as_secs()));
            window.fail();
        }
        stuck
    }

    /// Returns the result of the window.
    pub(super) fn finish(&mut self, window: &Window) -> Result<Seen> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        if let Some(failure) = self.back.failure() {
            bail!("the device has failed: {failure}");
        }
        let mut seen = std::mem::take(&mut self.seen);
        if let Some(counted) = self.counted.filter(|counted| counted.last > counted.first) {
            let span = counted.span(seen.bursts, window.ended());
            seen.mpps = counted.packets as f64 * 1e3 / tsc::to_ns(span);
        }
        Ok(seen)
    }
}

/// TSC at the return of the first burst and of the last counted burst, and number of packets in between.
#[derive(Clone, Copy, Debug)]
struct Counted {
    first: u64,
    last: u64,
    packets: u64,
}

impl Counted {
    /// Returns the TSC ticks of `bursts` bursts that were counted after the first one. If the last burst is older than
    /// two such bursts at the end of the window, the time until the end is included: the pipeline stalled, and the
    /// stall counts.
    fn span(self, bursts: u64, ended: Option<u64>) -> u64 {
        let Self { first, last, .. } = self;
        let each = (last - first) / bursts.max(1);
        match ended {
            Some(ended) if ended.saturating_sub(last) > 2 * each => ended - first,
            _ => last - first,
        }
    }
}

/// Checks a burst of a timed window. Returns the number of completely checked packets.
#[inline(always)]
fn sampled(
    check: &Check<'_>,
    packets: &[Packet],
    results: &[u32],
    first: u64,
    windows_first: u64,
    scratch: &mut Vec<u8>,
) -> Result<u64> {
    let fetch = |packet: &Packet| prefetch::read(packet.data().as_ptr());
    packets.iter().take(AHEAD).for_each(fetch);
    let mut verified = 0;
    for (i, ((packet, result), number)) in packets.iter().zip(results).zip(first..).enumerate() {
        if let Some(packet) = packets.get(i + AHEAD) {
            fetch(packet);
        }
        check.head(packet, number, Some(*result))?;
        // Selects the first packet of a window, and then a different position in each burst.
        let of_window = number - windows_first;
        if (of_window + of_window / SAMPLED).is_multiple_of(SAMPLED) {
            check.content(packet, number, scratch)?;
            verified += 1;
        }
    }
    Ok(verified)
}

/// Checks every byte and result of a burst.
fn every_one(
    check: &Check<'_>,
    pool: &Pool,
    work: Option<&CpuWork>,
    packets: &mut [Packet],
    results: &[u32],
    first: u64,
    scratch: &mut Vec<u8>,
) -> Result<u64> {
    for ((packet, result), number) in packets.iter_mut().zip(results).zip(first..) {
        check.marked(pool, work, packet, number, *result, scratch)?;
    }
    Ok(packets.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn final_stall_counts_in_window() {
        // Ten bursts, one every 100 ticks.
        let counted = Counted { first: 1000, last: 2000, packets: 640 };
        assert_eq!(counted.span(10, None), 1000);
        assert_eq!(counted.span(10, Some(2150)), 1000);
        assert_eq!(counted.span(10, Some(2201)), 1201);
        assert_eq!(counted.span(10, Some(9000)), 8000);
        // The last burst was counted just before the end was noticed.
        assert_eq!(counted.span(10, Some(1990)), 1000);
    }
}
