//! Devices, which process the bursts of a ring.
//!
//! A device gets the addresses of packets, bursts and answers, and starts to serve one ring. The service has two
//! halves: a [`Launcher`] on the lcore that submits, which notifies the device of a burst if it does not poll, and a
//! [`Watch`] on the lcore that collects, which checks whether the device still runs.

use offcore_stats::named;
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use offcore_mem::DeviceMemory;

use crate::layout::PipelineView;
use crate::trie::Trie;

/// Why a device cannot be used.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum DeviceError {
    /// {device}: {reason}
    Absent { device: String, reason: String },
    /// {device} cannot serve a burst ring: {reason}
    Start { device: String, reason: String },
}

named! {
    /// How a device gets bursts.
    pub enum Launch {
        /// One kernel launch per burst, or per batch of bursts.
        Kernel = "kernel",
        /// One kernel that polls the ring until it is told to quit.
        Persistent = "persistent",
        /// Graphs of kernels. Each kernel waits for one slot.
        Graph = "graph",
    }
}

/// The location of packets while a device processes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// In host memory, in place.
    #[default]
    Host,
    /// In a copy in its own memory; it writes changes back.
    Gpu,
    /// In its own memory, which network cards access (GPUDirect RDMA): see [`GpuDevice::pool`]. The CPU cannot access
    /// them.
    Direct,
}

impl Memory {
    /// The variants with packets in host memory.
    pub const ALL: [Self; 2] = [Self::Host, Self::Gpu];

    /// Returns the name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gpu => "gpu",
            Self::Direct => "direct",
        }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The parameters of a service.
#[derive(Clone, Debug)]
pub struct Service {
    /// Packets, bursts and work. The memory outlives the service: see [`GpuDevice::start`].
    pub view: PipelineView,
    /// The patterns of [`Kind::Match`](crate::layout::Kind::Match). The device keeps them, and sets
    /// [`WorkView::trie`](crate::layout::WorkView::trie).
    pub trie: Option<Arc<Trie>>,
    /// How the device gets bursts.
    pub launch: Launch,
    /// Blocks that serve the ring in turn, if the device polls: 1 to 64.
    pub blocks: u32,
    /// Threads per block: 1 to 1024.
    pub threads: u32,
    /// The location of packets during processing. The device sets [`PoolView::staging`] for [`Memory::Gpu`], and
    /// [`PoolView::base`] for [`Memory::Direct`].
    ///
    /// [`PoolView::staging`]: crate::layout::PoolView::staging
    /// [`PoolView::base`]: crate::layout::PoolView::base
    pub memory: Memory,
}

impl Service {
    /// Checks the numbers; `device` is the device's name.
    pub(crate) fn check(&self, device: &str) -> Result<(), DeviceError> {
        for (what, found, most) in [("blocks", self.blocks, 64), ("threads per block", self.threads, 1024)] {
            if !(1..=most).contains(&found) {
                let reason = format!("{found} {what}: expected 1 to {most}");
                return Err(DeviceError::Start { device: device.into(), reason });
            }
        }
        Ok(())
    }

    /// Returns the memory from [`GpuDevice::pool`], if packets are in it.
    pub(crate) fn direct(
        &self,
        device: &str,
        memory: Option<&DeviceMemory>,
    ) -> Result<Option<DeviceMemory>, DeviceError> {
        if self.memory != Memory::Direct {
            return Ok(None);
        }
        let pool = &self.view.pool;
        let expected = (pool.chunks as usize) << pool.chunk_shift;
        match memory {
            Some(memory) if memory.len() >= expected => Ok(Some(memory.clone())),
            _ => {
                let found = memory.map_or(0, DeviceMemory::len);
                let reason = format!(
                    "packets must be in its memory (memory direct), but it has {found} bytes for them, expected \
                     {expected}"
                );
                Err(DeviceError::Start { device: device.into(), reason })
            }
        }
    }
}

/// A device that can serve several rings.
pub trait GpuDevice: fmt::Debug + Send {
    /// Returns its name: `host`, `cuda:0`.
    fn name(&self) -> &str;

    /// Allocates device memory, accessible to network cards, for a pool of `len` bytes. It holds the packets of
    /// services that are started afterwards with [`Memory::Direct`]. The device also holds a reference.
    ///
    /// # Errors
    /// The device has no such memory.
    fn pool(&mut self, len: usize) -> Result<DeviceMemory, DeviceError> {
        let _ = len;
        let reason = "its memory is not for network cards: expected memory host or gpu".into();
        Err(DeviceError::Absent { device: self.name().into(), reason })
    }

    /// Starts to serve a ring from turn 0 on.
    ///
    /// # Errors
    /// A number is out of range, or the device refuses.
    ///
    /// # Safety
    /// The memory in `service` must stay valid until the launcher has [ended](Launcher::end) and returned that the
    /// device has stopped. A packet belongs to the device from its submission until its burst is answered.
    unsafe fn start(&mut self, service: Service) -> Result<Started, DeviceError>;

    /// Returns notes for the user about the device and its services, such as the memory that they use and missing
    /// features.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Starts (`true`) or stops profiling.
    ///
    /// # Errors
    /// The device has no profiler.
    fn profile(&mut self, begin: bool) -> Result<(), DeviceError> {
        let _ = begin;
        let reason = "it has no profiler: expected a CUDA device".into();
        Err(DeviceError::Absent { device: self.name().into(), reason })
    }
}

/// A started service.
#[derive(Debug)]
pub struct Started {
    /// For the lcore that submits.
    pub launcher: Box<dyn Launcher>,
    /// For the lcore that collects.
    pub watch: Box<dyn Watch>,
    /// The memory to which bursts must be written, unless it is the ring's own memory.
    pub slots: Option<DeviceSlots>,
}

/// Ring slots in device memory, which the device polls without crossing the bus.
#[derive(Debug)]
pub struct DeviceSlots {
    /// The CPU's address of the slots: as many bytes as the ring's slots take, aligned to 64 and zeroed. The mapping
    /// may be write-combining.
    pub base: NonNull<u8>,
    /// Keeps the mapping alive.
    pub keep: Box<dyn Keep>,
}

// SAFETY: the memory belongs to the owner of the value, which is moved to the lcore that submits.
unsafe impl Send for DeviceSlots {}

/// A value that is held only for its drop.
pub trait Keep: fmt::Debug + Send {}
impl<T: fmt::Debug + Send> Keep for T {}

/// The half of a service on the lcore that submits.
pub trait Launcher: fmt::Debug + Send {
    /// Called before a burst is submitted with [`Memory::Direct`]. Flushes writes of network cards to device memory, so
    /// that the device sees them with the burst. If it returns false, the burst must not be submitted.
    fn flush_writes(&mut self) -> bool {
        true
    }

    /// Called once for each submitted burst, in order of `turn`.
    fn submitted(&mut self, turn: u64, packets: usize);

    /// Ends the service. The ring's [quit](crate::ring::Submitter::quit) has been called for [`Launcher::waiters`]
    /// waiters. Returns whether the device has stopped; if not, the memory must stay valid forever.
    fn end(self: Box<Self>) -> bool;

    /// Ends the service and takes `memory`, which keeps the service's memory alive. It is dropped when the device has
    /// stopped and released the memory, which may be later, and leaked if the device does not stop.
    fn end_with(self: Box<Self>, memory: Box<dyn Any + Send>) -> bool {
        let ended = self.end();
        if !ended {
            // The device may still use it.
            std::mem::forget(memory);
        }
        ended
    }

    /// Returns the number of blocks or nodes that wait for bursts.
    fn waiters(&self) -> usize;
}

/// The half of a service on the lcore that collects.
pub trait Watch: fmt::Debug + Send {
    /// Returns why the device has stopped although the service was not ended, or `None` if it runs or the state is
    /// unknown. Does not block. After a failure the device does not access packets.
    fn failure(&mut self) -> Option<String>;

    /// Tells a hung device to stop. Returns whether it has stopped, without blocking.
    fn request_abort(&mut self) -> bool;
}
