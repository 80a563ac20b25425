//! Test fixture: a sysfs tree and a /dev/dsa in a temporary directory. A FIFO stands in for a work queue's device file.
//! The test reads what the driver submits by write() from it, and acts as the device.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

use offcore_mem::testing::TempDir;

use super::{Completed, CompletionRecord, Descriptor, Flags, Opcode, Roots, Status};

pub(super) struct Tree(TempDir);

impl Tree {
    /// Creates a device with a dedicated queue wq0.0 and a shared queue wq0.1, in the same group as two DSA engines.
    pub(super) fn new() -> Self {
        let tree = Self(TempDir::new());
        let device = [
            ("version", "0x100"),
            ("gen_cap", "0x40915f0107"),
            ("op_cap", "00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03ff"),
            ("numa_node", "1"),
            ("pasid_enabled", "1"),
            ("state", "enabled"),
        ];
        device.iter().for_each(|(name, text)| tree.set(name, text));
        for (engine, group) in
            [("engine0.0", "0"), ("engine0.1", "0"), ("engine0.2", "1"), ("engine0.3", "-1")]
        {
            tree.set(&format!("{engine}/group_id"), group);
        }
        for (wq, mode) in [("wq0.0", "dedicated"), ("wq0.1", "shared")] {
            let queue = [
                ("size", "16"),
                ("mode", mode),
                ("threshold", if mode == "shared" { "12" } else { "0" }),
                ("max_batch_size", "32"),
                ("max_transfer_size", "16384"),
                ("block_on_fault", "0"),
                ("group_id", "0"),
                ("state", "enabled"),
                ("type", "user"),
                ("name", "dpdk_app"),
                ("driver_name", "user"),
            ];
            queue.iter().for_each(|(name, text)| tree.set(&format!("{wq}/{name}"), text));
            let node = tree.roots().device_node(wq);
            fs::create_dir_all(node.parent().unwrap()).unwrap();
            let mode = rustix::fs::Mode::from_raw_mode(0o600);
            rustix::fs::mknodat(rustix::fs::CWD, &node, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        }
        tree
    }

    pub(super) fn roots(&self) -> Roots {
        Roots { sysfs: self.0.file("sysfs"), dev: self.0.file("dev") }
    }

    /// Writes a file of the device, such as `version` or `wq0.0/state`.
    pub(super) fn set(&self, name: &str, text: &str) {
        self.0.set(&format!("sysfs/dsa0/{name}"), format!("{text}\n"));
    }

    pub(super) fn remove(&self, name: &str) {
        self.0.remove(&format!("sysfs/dsa0/{name}"));
    }

    /// Returns the device's end of a work queue.
    pub(super) fn device_end(&self, wq: &str) -> DeviceEnd {
        let mut open = OpenOptions::new();
        open.read(true).custom_flags(libc::O_NONBLOCK);
        DeviceEnd { file: open.open(self.roots().device_node(wq)).unwrap() }
    }
}

pub(super) struct DeviceEnd {
    file: File,
}

impl DeviceEnd {
    /// Returns the descriptors submitted since the last call.
    pub(super) fn submitted(&mut self) -> Vec<Descriptor> {
        let mut descriptors = Vec::new();
        let mut bytes = [0; 64];
        // A FIFO without a writer returns end of file, an empty FIFO returns WouldBlock.
        while let Ok(64) = self.file.read(&mut bytes) {
            descriptors.push(Descriptor::from_bytes(&bytes));
        }
        descriptors
    }
}

/// Returns the completion record of a descriptor.
pub(super) fn record(descriptor: &Descriptor) -> &'static CompletionRecord {
    // SAFETY: the address is the address of a record of the channel under test, which outlives the use.
    unsafe { &*std::ptr::with_exposed_provenance(descriptor.completion as usize) }
}

/// Returns the descriptors of a batch.
pub(super) fn members(batch: &Descriptor) -> Vec<Descriptor> {
    assert_eq!(batch.src % 64, 0);
    let list = std::ptr::with_exposed_provenance::<Descriptor>(batch.src as usize);
    // SAFETY: the list is in the channel's ring, which does not change while the device has the batch.
    unsafe { std::slice::from_raw_parts(list, batch.size as usize) }.to_vec()
}

/// Copies some bytes of a descriptor's range.
pub(super) fn copy(descriptor: &Descriptor, range: std::ops::Range<usize>) {
    let src = std::ptr::with_exposed_provenance::<u8>(descriptor.src as usize);
    let dst = std::ptr::with_exposed_provenance_mut::<u8>(descriptor.dst as usize);
    // SAFETY: source and destination are parts of the test's buffers.
    unsafe { dst.add(range.start).copy_from_nonoverlapping(src.add(range.start), range.len()) };
}

/// Executes a descriptor and writes its record, if one is requested.
pub(super) fn complete(descriptor: &Descriptor) {
    match descriptor.opcode().unwrap() {
        Opcode::MemoryMove => copy(descriptor, 0..descriptor.size as usize),
        Opcode::Batch => members(descriptor).iter().for_each(complete),
        Opcode::Drain | Opcode::Noop => {}
        other => panic!("{other:?} was not asked for"),
    }
    if descriptor.flags().contains(Flags::RCR) {
        record(descriptor).write(&Completed::of(Status::SUCCESS));
    }
}
