//! Closed loops on a stepped simulated device: clients that keep a number of copies in flight on the virtual clock.

use anyhow::{Result, bail, ensure};
use offcore_dsa::config::{DeviceConfig, Group, WqConfig};
use offcore_dsa::sim::{Faults, Profile, SimDevice, SimEngine, SimOptions, SimPortal, Timing};
use offcore_dsa::{CompletionRecord, Descriptor, Flags, Opcode, Status, SubmitResult, WqMode};
use offcore_stats::SplitMix;

/// Step of the clock in virtual nanoseconds while a client waits before its next copy.
const TICK: u64 = 2;
/// Virtual time without progress after which the device counts as hung: a second.
const TIMEOUT: u64 = 1_000_000_000;

/// Load of one client.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub wq: usize,
    pub bytes: u32,
    pub depth: usize,
    /// Number of copies in a batch descriptor; 1 for direct descriptors.
    pub batch: usize,
    /// Maximum pause before the next copy in nanoseconds. Pauses are evenly distributed, so that clients do not run in
    /// step.
    pub pause_ns: u64,
    /// Whether every copy causes a page fault, which the device waits for.
    pub faults: bool,
}

impl Load {
    /// Returns a load of copies of `bytes` bytes with `depth` copies in flight and without pauses.
    pub const fn new(wq: usize, bytes: u32, depth: usize) -> Self {
        Self { wq, bytes, depth, batch: 1, pause_ns: 0, faults: false }
    }
}

/// Result of a load.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Number of copies completed in the counted time.
    pub copies: u64,
    /// The counted time in virtual nanoseconds.
    pub elapsed_ns: u64,
    /// Latency from submission to completion of every descriptor that was submitted and completed in that time.
    pub latencies: Vec<f64>,
    bytes: u64,
}

impl Outcome {
    /// Returns the bandwidth in bytes per nanosecond (GB/s).
    pub fn bandwidth(&self) -> f64 {
        self.rate() * self.bytes as f64
    }

    /// Returns the copies per nanosecond.
    pub fn rate(&self) -> f64 {
        self.copies as f64 / self.elapsed_ns.max(1) as f64
    }

    /// Returns the mean latency in nanoseconds.
    pub fn latency_ns(&self) -> f64 {
        self.latencies.iter().sum::<f64>() / self.latencies.len().max(1) as f64
    }
}

/// Returns a layout of `groups` groups, each with `queues` work queues and `engines` DSA engines. Every queue has
/// `size` entries.
pub fn layout(groups: usize, queues: usize, engines: usize, size: u32, mode: WqMode) -> DeviceConfig {
    let wq = |group| WqConfig {
        mode,
        size,
        threshold: if mode == WqMode::Shared { size } else { 0 },
        group: Some(group),
        block_on_fault: true,
        max_batch_size: 1024,
        max_transfer_size: 1 << 31,
        label: "bench".into(),
        ..WqConfig::default()
    };
    DeviceConfig {
        groups: vec![Group::default(); groups],
        wqs: (0..groups * queues).map(|i| wq(i / queues)).collect(),
        engines: (0..groups * engines).map(|i| Some(i / engines)).collect(),
        ..DeviceConfig::default()
    }
}

/// A simulated device under load.
#[derive(Debug)]
pub struct Bench {
    device: SimDevice,
    engine: SimEngine,
    clients: Vec<Client>,
    random: SplitMix,
}

impl Bench {
    /// Creates a device with `timing` and `layout`, and one client for each of `loads`.
    ///
    /// # Errors
    /// If the layout is invalid, or a work queue cannot be opened.
    pub fn new(layout: DeviceConfig, timing: Timing, loads: &[Load]) -> Result<Self> {
        let page = if loads.iter().any(|load| load.faults) { 1.0 } else { 0.0 };
        let faults = Faults { page, ..Faults::default() };
        let profile = Profile::Layout(Box::new(layout));
        let options = SimOptions { profile, timing, faults, ..SimOptions::default() };
        let (device, engine) = SimDevice::stepped("dsa-sim0", options)?;
        let clients = loads.iter().map(|load| Client::new(&device, *load)).collect::<Result<_>>()?;
        Ok(Self { device, engine, clients, random: SplitMix::new(1) })
    }

    /// Runs all clients until the first has completed `copies` copies. A warm-up of twice its number of copies in
    /// flight is not counted. Returns one outcome for each client.
    ///
    /// # Errors
    /// If the device hangs, or a copy fails.
    pub fn run(&mut self, copies: u64) -> Result<Vec<Outcome>> {
        let warm = 2 * self.clients[0].load.depth as u64;
        self.until(warm)?;
        for client in &mut self.clients {
            client.done = 0;
            client.latencies.clear();
        }
        let start = self.engine.now();
        self.until(copies)?;
        let elapsed_ns = self.engine.now() - start;
        let outcome = |client: &mut Client| Outcome {
            copies: client.done,
            elapsed_ns,
            latencies: std::mem::take(&mut client.latencies),
            bytes: client.load.bytes.into(),
        };
        Ok(self.clients.iter_mut().map(outcome).collect())
    }

    /// Submits copies from the first client, one every `gap_ns`, until the queue is full. Returns the number of
    /// accepted copies.
    ///
    /// # Errors
    /// If `at_most` copies were accepted.
    pub fn fill(&mut self, gap_ns: u64, at_most: usize) -> Result<usize> {
        for taken in 0..at_most {
            if self.clients[0].submit(taken, self.engine.now()) == SubmitResult::Retry {
                return Ok(taken);
            }
            let next = self.engine.now() + gap_ns;
            self.engine.run_until(next);
        }
        bail!("the queue took {at_most} descriptors and was not full")
    }

    fn until(&mut self, copies: u64) -> Result<()> {
        let deadline = self.engine.now() + TIMEOUT;
        while self.clients[0].done < copies {
            let now = self.engine.now();
            let mut waiting = false;
            for client in &mut self.clients {
                waiting |= client.turn(now, &mut self.random)?;
            }
            if waiting {
                self.engine.run_until(now + TICK);
            } else {
                self.engine.step();
            }
            ensure!(self.engine.now() < deadline, "no progress on {:?}", self.device);
        }
        Ok(())
    }
}

/// A slot of a client: one descriptor, direct or a batch.
#[derive(Debug)]
struct Slot {
    /// Boxed, so that its address stays valid while the device writes it.
    record: Box<CompletionRecord>,
    list: Vec<Descriptor>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Free, to be submitted at this time.
    Due(u64),
    /// Submitted at this time.
    Flying(u64),
}

#[derive(Debug)]
struct Client {
    // Dropped first: closing the queue ends the copies in flight before their memory is freed.
    portal: SimPortal,
    load: Load,
    slots: Vec<Slot>,
    records: Vec<CompletionRecord>,
    source: Vec<u8>,
    target: Vec<u8>,
    done: u64,
    latencies: Vec<f64>,
}

impl Client {
    fn new(device: &SimDevice, load: Load) -> Result<Self> {
        let slots = (0..load.depth.div_ceil(load.batch)).map(|_| Slot {
            record: Box::default(),
            list: Vec::new(),
            state: State::Due(0),
        });
        let mut client = Self {
            portal: device.open(&format!("wq0.{}", load.wq))?,
            load,
            slots: slots.collect(),
            records: (0..load.batch).map(|_| CompletionRecord::default()).collect(),
            source: vec![0xa5; load.bytes as usize],
            target: vec![0; load.bytes as usize],
            done: 0,
            latencies: Vec::new(),
        };
        if load.batch > 1 {
            for index in 0..client.slots.len() {
                client.slots[index].list = client.records.iter().map(|record| client.copy(record)).collect();
            }
        }
        Ok(client)
    }

    /// All copies of a client have the same source and destination, because the content is not checked.
    fn copy(&self, record: &CompletionRecord) -> Descriptor {
        let block = if self.load.faults { Flags::BLOCK_ON_FAULT } else { Flags::empty() };
        Descriptor {
            completion: std::ptr::from_ref(record) as u64,
            src: self.source.as_ptr() as u64,
            dst: self.target.as_ptr() as u64,
            size: self.load.bytes,
            ..Descriptor::new(Opcode::MemoryMove, Flags::CRAV | Flags::RCR | block)
        }
    }

    fn submit(&mut self, index: usize, now: u64) -> SubmitResult {
        let slot = &self.slots[index];
        slot.record.clear();
        let descriptor = match &slot.list[..] {
            [] => self.copy(&slot.record),
            list => Descriptor {
                completion: std::ptr::from_ref(&*slot.record) as u64,
                src: list.as_ptr() as u64,
                size: list.len() as u32,
                ..Descriptor::new(Opcode::Batch, Flags::CRAV | Flags::RCR)
            },
        };
        self.portal.fence();
        // SAFETY: the buffers, the record and the list of a slot are not moved or changed until the record is written.
        let submitted = unsafe { self.portal.submit(&descriptor) };
        if submitted == SubmitResult::Accepted {
            self.slots[index].state = State::Flying(now);
        }
        submitted
    }

    /// Processes completions and submits due copies. Returns whether a copy is due later.
    fn turn(&mut self, now: u64, random: &mut SplitMix) -> Result<bool> {
        let mut waiting = false;
        for index in 0..self.slots.len() {
            if let State::Flying(since) = self.slots[index].state
                && let Some(completed) = self.slots[index].record.read()
            {
                ensure!(completed.status == Status::SUCCESS, "a copy ended with {:?}", completed.status);
                self.done += self.load.batch as u64;
                self.latencies.push((now - since) as f64);
                let pause = if self.load.pause_ns > 0 { random.below(self.load.pause_ns) } else { 0 };
                self.slots[index].state = State::Due(now + pause);
            }
            if let State::Due(at) = self.slots[index].state {
                waiting |= at > now || self.submit(index, now) == SubmitResult::Retry;
            }
        }
        Ok(waiting)
    }
}
