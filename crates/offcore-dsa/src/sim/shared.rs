//! State shared by the control side, the portals and the engine of a simulated device.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_utils::CachePadded;
use offcore_ring::spsc::Consumer;

use super::checks::Limits;
use super::stats::Counters;
use super::{DeviceState, Faults, SimOptions};
use crate::config::{DeviceCapabilities, DeviceConfig, Group, WqConfig};
use crate::descriptor::Descriptor;
use crate::wq::{WqInfo, WqMode};

/// A client, as passed to the engine.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) ring: Consumer<Descriptor>,
    pub(super) cell: Arc<PortalCell>,
    pub(super) wq: usize,
    pub(super) occupancy: Arc<Occupancy>,
}

/// Number of entries of a shared work queue that are in use or about to be used.
pub(super) type Occupancy = CachePadded<AtomicU32>;

/// State shared by a portal and the engine, in addition to the ring. It is read at every submission and rarely written.
#[derive(Debug)]
pub(super) struct PortalCell {
    /// Whether submissions take the slow path: the queue is shared, or submission faults are injected.
    pub(super) special: AtomicBool,
    pub(super) shared: bool,
    pub(super) withdrawn: AtomicBool,
    /// Number of entries of the shared queue that this client uses.
    pub(super) entries: AtomicU32,
    /// Indices of submissions for which the CPU's late store overwrites the record.
    pub(super) late_stores: Mutex<Vec<usize>>,
}

impl PortalCell {
    /// Releases an entry of the client, unless all have been released.
    pub(super) fn free_entry(&self, occupancy: &Occupancy) {
        let one_less = |entries: u32| entries.checked_sub(1);
        if self.entries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok() {
            occupancy.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Releases all of the client's entries.
    pub(super) fn free_entries(&self, occupancy: &Occupancy) {
        occupancy.fetch_sub(self.entries.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// A used work queue.
#[derive(Debug)]
pub(super) struct SimQueue {
    pub(super) info: WqInfo,
    pub(super) limits: Limits,
    pub(super) config: WqConfig,
    /// Its group, as an index among the used groups.
    pub(super) group: usize,
}

/// The immutable properties of the device.
#[derive(Debug)]
pub(super) struct DeviceLayout {
    pub(super) queues: Vec<SimQueue>,
    /// The used groups, with the number of DSA engines of each.
    pub(super) groups: Vec<(Group, usize)>,
    pub(super) capabilities: DeviceCapabilities,
    /// Number of read buffers for the groups that use the limit.
    pub(super) read_buffer_limit: u32,
}

impl DeviceLayout {
    pub(super) fn new(config: &DeviceConfig, capabilities: DeviceCapabilities) -> Self {
        let used: Vec<usize> =
            (0..config.groups.len()).filter(|&group| config.engines_in(group) > 0).collect();
        let groups =
            used.iter().map(|&group| (config.groups[group].clone(), config.engines_in(group))).collect();
        let queues = config.used_wqs().filter_map(|(number, wq)| {
            let number_of_group = wq.group?;
            let group = used.iter().position(|&group| group == number_of_group)?;
            Some(queue(config, &capabilities, number, wq, number_of_group, group))
        });
        Self { queues: queues.collect(), groups, read_buffer_limit: config.read_buffer_limit, capabilities }
    }
}

fn queue(
    config: &DeviceConfig,
    device: &DeviceCapabilities,
    number: usize,
    wq: &WqConfig,
    number_of_group: usize,
    group: usize,
) -> SimQueue {
    let ops = wq.op_config.unwrap_or(device.ops);
    let shared = wq.mode == WqMode::Shared;
    let classes = &config.groups[number_of_group];
    let info = WqInfo {
        name: config.wq_name(number),
        mode: wq.mode,
        size: wq.size,
        threshold: if shared { wq.threshold.min(wq.size) } else { wq.size },
        max_batch_size: wq.max_batch_size,
        max_transfer_size: wq.max_transfer_size,
        block_on_fault: wq.block_on_fault,
        ops,
        gen_cap: device.gen_cap,
        version: device.version,
        engines: config.engines_in(number_of_group) as u32,
        numa_node: None,
    };
    let limits = Limits {
        ops,
        max_transfer: wq.max_transfer_size,
        max_batch: wq.max_batch_size,
        block_on_fault: wq.block_on_fault,
        shared,
        ats: !wq.ats_disable,
        gen_cap: device.gen_cap,
        version: device.version,
        traffic_classes: [classes.traffic_class_a, classes.traffic_class_b].map(|class| class.unwrap_or(0)),
    };
    SimQueue { info, limits, config: wq.clone(), group }
}

/// Requests of the control side to the engine.
#[derive(Debug, Default)]
pub(super) struct PendingRequests {
    pub(super) arriving: Vec<Client>,
    pub(super) faults: Option<Faults>,
    pub(super) reset: bool,
}

/// The work queues and their open portals.
#[derive(Debug, Default)]
pub(super) struct OpenPortals {
    /// Number of resets. Portals opened before the last reset no longer work.
    pub(super) epoch: u64,
    pub(super) portals: Vec<u32>,
    /// Occupancy of each queue.
    pub(super) occupancy: Vec<Arc<Occupancy>>,
    pub(super) cells: Vec<Arc<PortalCell>>,
}

/// The state shared by all sides.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) name: String,
    pub(super) layout: DeviceLayout,
    /// Counts the changes that the engine must apply.
    pub(super) generation: CachePadded<AtomicU64>,
    /// The generation up to which the engine has applied changes.
    pub(super) acknowledged: CachePadded<AtomicU64>,
    /// Whether the engine is in a step.
    pub(super) stepping: CachePadded<AtomicBool>,
    /// Cleared when the engine is dropped.
    pub(super) alive: AtomicBool,
    state: AtomicU8,
    /// The value in [`OpenPortals`], readable without a lock.
    pub(super) epoch: AtomicU64,
    pub(super) pending_requests: Mutex<PendingRequests>,
    pub(super) opened: Mutex<OpenPortals>,
    pub(super) faults: Mutex<Faults>,
    pub(super) counters: Counters,
}

/// Locks a mutex. Poisoning is ignored, because no critical section leaves its value inconsistent.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(name: &str, config: &DeviceConfig, options: &SimOptions) -> Self {
        let layout = DeviceLayout::new(config, options.capabilities());
        let queues = layout.queues.len();
        let opened = OpenPortals {
            portals: vec![0; queues],
            occupancy: (0..queues).map(|_| Arc::default()).collect(),
            ..OpenPortals::default()
        };
        Self {
            name: name.into(),
            layout,
            generation: CachePadded::default(),
            acknowledged: CachePadded::default(),
            stepping: CachePadded::default(),
            alive: AtomicBool::new(true),
            state: AtomicU8::new(0),
            epoch: AtomicU64::new(0),
            pending_requests: Mutex::default(),
            opened: Mutex::new(opened),
            faults: Mutex::new(options.faults),
            counters: Counters::default(),
        }
    }

    pub(super) fn state(&self) -> DeviceState {
        if self.state.load(Ordering::Acquire) == 0 { DeviceState::Enabled } else { DeviceState::Halted }
    }

    pub(super) fn set_state(&self, state: DeviceState) {
        self.state.store(u8::from(state == DeviceState::Halted), Ordering::Release);
    }

    /// Notifies the engine of changes. It applies them in its next step.
    pub(super) fn notify(&self) -> u64 {
        self.generation.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// As `notify`, and waits until the engine has applied the changes or is not in a step.
    ///
    /// The engine sets `stepping` before it reads the generation, and this function raises the generation before it
    /// reads `stepping`. All four accesses are sequentially consistent, so at least one side sees the other's store. A
    /// later step applies the changes first. A present step ends, or acknowledges the generation.
    pub(super) fn notify_and_wait(&self) {
        let generation = self.notify();
        while self.stepping.load(Ordering::SeqCst) && self.acknowledged.load(Ordering::Acquire) < generation {
            std::hint::spin_loop();
        }
    }

    /// Whether a portal opened in `epoch` still belongs to a working device.
    pub(super) fn is_alive(&self, epoch: u64) -> bool {
        self.alive.load(Ordering::Acquire)
            && self.state() == DeviceState::Enabled
            && self.epoch.load(Ordering::Acquire) == epoch
    }
}
