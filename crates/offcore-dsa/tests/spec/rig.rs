//! Test rig: a stepped device with a portal, records, and memory with inaccessible pages.

pub(crate) use crate::pages::Pages;
use offcore_dsa::completion::Completed;
use offcore_dsa::config::{DeviceConfig, Group, WqConfig};
use offcore_dsa::sim::{Generation, Profile, SimDevice, SimEngine, SimOptions, SimPortal};
use offcore_dsa::wq::WqMode;
use offcore_dsa::{CompletionRecord, Descriptor, Flags, Opcode, Status, SubmitResult};

/// Completion record valid and requested.
pub(crate) const RECORD: Flags = Flags::CRAV.union(Flags::RCR);

/// Returns a dedicated queue of 64 descriptors in the first group.
pub(crate) fn dedicated() -> WqConfig {
    WqConfig {
        size: 64,
        group: Some(0),
        block_on_fault: true,
        max_batch_size: 64,
        max_transfer_size: 2 << 20,
        label: "spec".into(),
        ..WqConfig::default()
    }
}

/// Returns a shared queue of 64 descriptors in the first group.
pub(crate) fn shared(threshold: u32) -> WqConfig {
    WqConfig { mode: WqMode::Shared, threshold, ..dedicated() }
}

/// Returns a layout with one group of `wqs` and `engines` DSA engines.
pub(crate) fn layout(wqs: &[WqConfig], engines: usize) -> DeviceConfig {
    let mut config = DeviceConfig {
        name: "dsa0".into(),
        groups: vec![Group::default(); 4],
        wqs: vec![WqConfig::default(); 8],
        engines: vec![None; 4],
        ..DeviceConfig::default()
    };
    config.wqs[..wqs.len()].clone_from_slice(wqs);
    config.engines[..engines].fill(Some(0));
    config
}

/// Returns the options of a device with this layout.
pub(crate) fn options(config: DeviceConfig) -> SimOptions {
    SimOptions { profile: Profile::Layout(Box::new(config)), ..SimOptions::default() }
}

/// As `options`, for the second generation.
pub(crate) fn second_generation(config: DeviceConfig) -> SimOptions {
    SimOptions { generation: Generation::Dsa2, ..options(config) }
}

/// Submissions of tests. Their memory stays valid until the device has stopped.
pub(crate) trait Submit {
    fn send(&mut self, descriptor: &Descriptor) -> SubmitResult;
}

impl Submit for SimPortal {
    fn send(&mut self, descriptor: &Descriptor) -> SubmitResult {
        // SAFETY: the tests keep the descriptor's memory valid until the device has stopped.
        unsafe { self.submit(descriptor) }
    }
}

/// A stepped device with its first work queue open.
pub(crate) struct Rig {
    pub(crate) device: SimDevice,
    pub(crate) engine: SimEngine,
    pub(crate) portal: SimPortal,
    records: Box<[CompletionRecord]>,
}

impl Rig {
    pub(crate) fn new(options: SimOptions) -> Self {
        let (device, engine) = SimDevice::stepped("dsa-sim0", options).unwrap();
        let portal = device.open(&device.work_queues()[0].name).unwrap();
        let records = std::iter::repeat_with(CompletionRecord::default).take(256).collect();
        Self { device, engine, portal, records }
    }

    /// Creates a rig with a dedicated queue and a DSA engine.
    pub(crate) fn plain() -> Self {
        Self::new(options(layout(&[dedicated()], 1)))
    }

    /// Creates a rig with a dedicated queue and `engines` DSA engines.
    pub(crate) fn with_engines(engines: usize) -> Self {
        Self::new(options(layout(&[dedicated()], engines)))
    }

    pub(crate) fn record(&self, index: usize) -> &CompletionRecord {
        &self.records[index]
    }

    /// Returns the address of a record.
    pub(crate) fn place(&self, index: usize) -> u64 {
        &raw const self.records[index] as u64
    }

    /// Returns the descriptor with a completion record.
    pub(crate) fn with_record(&self, descriptor: Descriptor, index: usize) -> Descriptor {
        let flags = descriptor.flags() | RECORD;
        Descriptor { completion: self.place(index), ..descriptor }.with_flags(flags)
    }

    /// Clears record `index` and submits the descriptor with it.
    pub(crate) fn submit(&mut self, descriptor: Descriptor, index: usize) {
        let descriptor = self.with_record(descriptor, index);
        self.submit_raw(&descriptor);
    }

    /// Submits the descriptor unchanged.
    pub(crate) fn submit_raw(&mut self, descriptor: &Descriptor) {
        assert_eq!(self.portal.send(descriptor), SubmitResult::Accepted);
    }

    /// Submits the descriptor, runs until the device is idle, and returns the record.
    pub(crate) fn run(&mut self, descriptor: Descriptor) -> Completed {
        self.records[0].clear();
        self.submit(descriptor, 0);
        self.engine.run_until_idle();
        self.records[0].read().expect("a record")
    }

    /// Runs a list of descriptors as a batch, with the records from 1 on. Returns the batch's record and the members'
    /// records.
    pub(crate) fn run_batch(&mut self, members: &[Descriptor]) -> (Completed, Vec<Option<Completed>>) {
        let members: Vec<Descriptor> =
            members.iter().zip(1..).map(|(member, index)| self.with_record(*member, index)).collect();
        self.records[1..=members.len()].iter().for_each(CompletionRecord::clear);
        let batch = self.run(batch(&members));
        (batch, self.records[1..=members.len()].iter().map(CompletionRecord::read).collect())
    }
}

/// Returns a batch descriptor over a list.
pub(crate) fn batch(members: &[Descriptor]) -> Descriptor {
    Descriptor {
        src: members.as_ptr() as u64,
        size: members.len() as u32,
        ..Descriptor::new(Opcode::Batch, Flags::empty())
    }
}

pub(crate) fn noop() -> Descriptor {
    Descriptor::new(Opcode::Noop, Flags::empty())
}

/// Returns an operation with source, destination and size.
pub(crate) fn operation(op: Opcode, src: u64, dst: u64, size: usize) -> Descriptor {
    Descriptor { src, dst, size: size as u32, ..Descriptor::new(op, Flags::empty()) }
}

/// Returns a memory move between two slices of the same length.
pub(crate) fn copy(src: &[u8], dst: &mut [u8]) -> Descriptor {
    assert_eq!(src.len(), dst.len());
    operation(Opcode::MemoryMove, src.as_ptr() as u64, dst.as_mut_ptr() as u64, src.len())
}

/// Returns bytes that differ by position.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed).collect()
}

/// Whether the record has any error.
pub(crate) fn is_error(record: &Completed) -> bool {
    !record.status.is_success() && record.status != Status::NONE
}
