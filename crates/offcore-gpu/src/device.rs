//! Devices: what works on the bursts of a ring.
//!
//! A device is told where packets, bursts and answers are, and starts to serve one ring. Then it is two things: a
//! [`Launcher`] with the lcore that submits, which says that there is a burst where the device does not look for itself,
//! and a [`Watch`] with the lcore that collects, which says whether the device is still at work.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::str::FromStr;

use offcore_mem::DeviceMemory;

use crate::layout::PipelineView;

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// There is none of this kind here.
    #[error("{device}: {reason}")]
    Absent {
        /// The device as it was asked for.
        device: String,
        /// Why, and what to do.
        reason: String,
    },
    /// It does not start.
    #[error("{device} cannot serve a burst ring: {reason}")]
    Start {
        /// The device.
        device: String,
        /// Why.
        reason: String,
    },
}

/// How bursts come to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launch {
    /// A kernel is launched for each burst, or for several that have come.
    Kernel,
    /// One kernel serves bursts until it is told to end: it polls the ring.
    Persistent,
    /// Graphs of kernels, each of which waits for a slot of its own.
    Graph,
}

impl Launch {
    /// Every one of them.
    pub const ALL: [Self; 3] = [Self::Kernel, Self::Persistent, Self::Graph];

    /// The name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Persistent => "persistent",
            Self::Graph => "graph",
        }
    }
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Launch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|launch| launch.name() == text);
        known.ok_or_else(|| format!("workload type '{text}': expected kernel, persistent or graph"))
    }
}

/// Where a device works on packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// Where they are: in the host's memory, which it reads and writes.
    #[default]
    Host,
    /// In memory of its own, where it copies them; what it changes it writes back.
    Gpu,
    /// In memory of its own, where network cards put them and fetch them (GPUDirect RDMA): see [`Device::pool`]. The CPU
    /// does not reach them.
    Direct,
}

impl Memory {
    /// Those with packets in the host's memory.
    pub const ALL: [Self; 2] = [Self::Host, Self::Gpu];

    /// The name in options and JSON.
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

/// What a device is to serve.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    /// Packets, bursts and work. What it points to outlives the service: see [`Device::start`].
    pub view: PipelineView,
    /// How bursts come to it.
    pub launch: Launch,
    /// Blocks of lanes that serve the ring by turns, where the device polls: 1 to 64.
    pub blocks: u32,
    /// Lanes of a block: 1 to 1024.
    pub lanes: u32,
    /// Where packets are worked on. With [`Memory::Gpu`] the device fills in [`PoolView::staging`], with [`Memory::Direct`]
    /// [`PoolView::base`].
    ///
    /// [`PoolView::staging`]: crate::layout::PoolView::staging
    /// [`PoolView::base`]: crate::layout::PoolView::base
    pub memory: Memory,
}

impl Service {
    /// Looks at the numbers, for the device of this name.
    ///
    /// # Errors
    /// When one is out of range.
    pub(crate) fn check(&self, device: &str) -> Result<(), DeviceError> {
        for (what, found, most) in [("blocks", self.blocks, 64), ("lanes of a block", self.lanes, 1024)] {
            if !(1..=most).contains(&found) {
                let reason = format!("{found} {what}: expected 1 to {most}");
                return Err(DeviceError::Start { device: device.into(), reason });
            }
        }
        Ok(())
    }

    /// The memory that [`Device::pool`] has given, if packets are there.
    ///
    /// # Errors
    /// When they are, and it has given none that is large enough.
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
                    "its packets are to be in its memory (--memory direct), where {found} bytes are for them, expected \
                     {expected}"
                );
                Err(DeviceError::Start { device: device.into(), reason })
            }
        }
    }
}

/// A device: it can serve several rings.
pub trait Device: fmt::Debug + Send {
    /// Its name: `host`, `cuda:0`.
    fn name(&self) -> &str;

    /// Memory of its own for the packets of a pool of `len` bytes, which network cards reach: where services with
    /// [`Memory::Direct`] find them that are started afterwards. The device keeps it, too.
    ///
    /// # Errors
    /// When it has none, in words.
    fn pool(&mut self, len: usize) -> Result<DeviceMemory, DeviceError> {
        let _ = len;
        let reason = "its memory is not for network cards: expected --memory host or gpu".into();
        Err(DeviceError::Absent { device: self.name().into(), reason })
    }

    /// Serves a ring, from turn 0 on.
    ///
    /// # Errors
    /// Numbers out of range, and what the device refuses.
    ///
    /// # Safety
    /// The memory that `service` points to stays until the launcher has [ended](Launcher::end) and said that nobody is left
    /// at work; packets are the device's from when they are submitted until their burst is answered.
    unsafe fn start(&mut self, service: Service) -> Result<Started, DeviceError>;

    /// What a person should know about it and the services that it has started: which memory it uses, what it does without.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Begins (`true`) or ends the part of the run that a profiler looks at.
    ///
    /// # Errors
    /// When the device knows no profiler.
    fn profile(&mut self, begin: bool) -> Result<(), DeviceError> {
        let _ = begin;
        let reason = "it has no profiler: expected a CUDA device".into();
        Err(DeviceError::Absent { device: self.name().into(), reason })
    }
}

/// A service that has been started: its two halves.
#[derive(Debug)]
pub struct Started {
    /// For the lcore that submits.
    pub launcher: Box<dyn Launcher>,
    /// For the lcore that collects.
    pub watch: Box<dyn Watch>,
    /// Where bursts are to be written, if the device has a better place for them than the ring's own memory.
    pub slots: Option<DeviceSlots>,
}

/// The slots of a ring in memory of the device's own, where it polls them without asking for them over the bus.
#[derive(Debug)]
pub struct DeviceSlots {
    /// Where the CPU writes them: as many bytes as the ring has slots and strides, aligned to 64, all 0. The mapping may be
    /// write-combining.
    pub base: NonNull<u8>,
    /// Keeps the mapping.
    pub keep: Box<dyn Keep>,
}

// SAFETY: the memory is for whoever has the value, which is moved to the lcore that submits.
unsafe impl Send for DeviceSlots {}

/// Something that is only there to be dropped in time.
pub trait Keep: fmt::Debug + Send {}
impl<T: fmt::Debug + Send> Keep for T {}

/// The half of a service that goes with the lcore that submits.
pub trait Launcher: fmt::Debug + Send {
    /// A burst is about to be submitted with [`Memory::Direct`]; it is called for no other. Whether what network cards have put
    /// into the device's memory until now is seen by whoever sees the burst: otherwise it must not be submitted.
    fn arrived(&mut self) -> bool {
        true
    }

    /// The burst of this turn has been submitted, and has so many packets: called once for each, in order.
    fn submitted(&mut self, turn: u64, packets: usize);

    /// Ends the service. The ring's [quit](crate::ring::Submitter::quit) has been called for as many waiters as
    /// [`Launcher::waiters`] says. Returns whether nobody is left at work: if not, the memory has to stay for good.
    fn end(self: Box<Self>) -> bool;

    /// The same for who owns the memory: `memory` keeps it where it is. It is dropped when nobody is left at work and the
    /// device has let go of it, which may be later, and stays for good if somebody is left.
    fn end_with(self: Box<Self>, memory: Box<dyn Any + Send>) -> bool {
        let ended = self.end();
        if !ended {
            // Somebody may still use it.
            std::mem::forget(memory);
        }
        ended
    }

    /// How many wait for bursts at a time.
    fn waiters(&self) -> usize;
}

/// The half of a service that goes with the lcore that collects.
pub trait Watch: fmt::Debug + Send {
    /// Why nobody is at work any more although the service was not ended, as far as it is known without waiting. Nobody will
    /// touch a packet then.
    fn failure(&mut self) -> Option<String>;

    /// Asks a device that stands still to give up. Returns whether nobody is at work any more; does not wait for it.
    fn give_up(&mut self) -> bool;
}
