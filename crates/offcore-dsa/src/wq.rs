//! The properties of a work queue as sysfs or the simulator reports them.

use std::fmt;

use crate::descriptor::Opcode;

/// Mode of a work queue: the clients that may submit descriptors, and their instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, displaydoc::Display)]
pub enum WqMode {
    /// One client, which counts its own descriptors; MOVDIR64B. A descriptor too many is silently dropped.
    #[displaydoc("dedicated")]
    #[default]
    Dedicated,
    /// Many clients; ENQCMD, which says whether the descriptor was accepted.
    #[displaydoc("shared")]
    Shared,
}

/// The operations that a device or work queue supports: bit N of OPCAP or OPCFG is operation code N.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct OpSet(pub [u64; 4]);

impl OpSet {
    /// Whether the set contains the operation.
    pub const fn contains(&self, op: Opcode) -> bool {
        let code = op as usize;
        self.0[code / 64] >> (code % 64) & 1 == 1
    }

    /// Returns the set with `op` added.
    #[must_use]
    pub const fn with(mut self, op: Opcode) -> Self {
        let code = op as usize;
        self.0[code / 64] |= 1 << (code % 64);
        self
    }

    /// Returns the set with `op` removed.
    #[must_use]
    pub const fn without(mut self, op: Opcode) -> Self {
        let code = op as usize;
        self.0[code / 64] &= !(1 << (code % 64));
        self
    }

    /// Whether every operation of `self` is in `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).all(|(ours, theirs)| ours & !theirs == 0)
    }
}

impl fmt::Debug for OpSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d] = self.0;
        write!(f, "{d:016x}{c:016x}{b:016x}{a:016x}")
    }
}

/// The properties of a work queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WqInfo {
    /// `wq0.1`: work queue 1 of device 0.
    pub name: String,
    /// The access mode.
    pub mode: WqMode,
    /// Number of descriptors that the queue holds.
    pub size: u32,
    /// Shared: number of descriptors that the queue holds for unprivileged submitters. Dedicated: the same as `size`.
    pub threshold: u32,
    /// Maximum number of descriptors of a batch; 0 or 1 when batches cannot be used.
    pub max_batch_size: u32,
    pub max_transfer_size: u64,
    /// Whether descriptors may ask to block on a page fault.
    pub block_on_fault: bool,
    /// Operations that the queue accepts.
    pub ops: OpSet,
    /// GENCAP: capabilities of the device.
    pub gen_cap: u64,
    /// Version of the device: 0x100, 0x200, …
    pub version: u32,
    /// Number of DSA engines in the queue's group. With one engine, descriptors of the same kind complete in order.
    pub engines: u32,
    /// The device's NUMA node, if it has one.
    pub numa_node: Option<u32>,
}

/// Bits of GENCAP (section 9.2.4).
pub mod gen_cap {
    /// Block on fault is supported.
    pub const BLOCK_ON_FAULT: u64 = 1 << 0;
    /// Source and destination of a memory move may overlap.
    pub const OVERLAP: u64 = 1 << 1;
    /// Cache control for the destination is supported.
    pub const CACHE_CONTROL_MEMORY: u64 = 1 << 2;
    /// Cache control of the cache flush operation is supported.
    pub const CACHE_CONTROL_FLUSH: u64 = 1 << 3;
    /// Destination readback is supported.
    pub const DESTINATION_READBACK: u64 = 1 << 8;
    /// Readback addresses of a drain are supported.
    pub const DRAIN_READBACK: u64 = 1 << 9;
    /// A batch may be continued after a fault on its descriptor list.
    pub const BATCH_CONTINUATION: u64 = 1 << 15;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_bits() {
        let ops = OpSet::default().with(Opcode::CacheFlush).with(Opcode::Noop);
        assert_eq!(ops.0, [0x1_0000_0001, 0, 0, 0]);
        assert!(ops.contains(Opcode::CacheFlush) && !ops.contains(Opcode::MemoryMove));
        assert!(ops.is_subset(&ops) && !ops.is_subset(&ops.without(Opcode::Noop)));
        assert!(format!("{ops:?}").ends_with("0000000100000001"));
    }
}
