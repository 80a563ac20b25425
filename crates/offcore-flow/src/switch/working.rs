//! l2fwd-nv's pipelines as a switch: between a port's RX queue and a TX queue, packets are gathered in bursts and
//! processed by a GPU, by the CPU, or not at all.
//!
//! ```text
//! RX queue -> gather | bursts: a device, or the CPU on the sending lcore | -> by result -> TX queue
//!                                                                                    \-- ring -> another port
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use offcore_gpu::device::{Device, DeviceError, Launch, Memory};
use offcore_gpu::devices;
use offcore_gpu::layout::{Kind, MAX_BURST};
use offcore_gpu::patterns::Patterns;
use offcore_gpu::pipeline::{Setup, Work, Worker};
use offcore_mem::{DeviceMemory, Hugepages, Pool};
use offcore_port::Port;

use super::{Assembly, Route, SwitchConfig, SwitchError};
use crate::forward::Forward;
use crate::mirror::Stamping;
use crate::pipeline::{OnHit, QueuesSetup, work_queues};

/// What processes bursts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workload {
    /// Nothing: packets pass unchanged.
    None,
    /// The sending lcore.
    #[default]
    Cpu,
    /// A device.
    Device(Launch),
}

impl Workload {
    /// The name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cpu => "cpu",
            Self::Device(launch) => launch.name(),
        }
    }
}

/// The configuration of a switch of pipelines.
#[derive(Clone, Debug)]
pub struct Working {
    /// What processes bursts.
    pub workload: Workload,
    /// The devices, assigned to pipelines round-robin; empty except with [`Workload::Device`].
    pub devices: Vec<String>,
    /// Where a device processes packets.
    pub memory: Memory,
    /// The work, which determines a packet's result.
    pub kind: Kind,
    /// Whether to swap the MAC addresses.
    pub swap: bool,
    /// Bytes before the payload.
    pub skip: u32,
    /// Bytes to split off before the payload, if packets are split.
    pub split_at: Option<usize>,
    /// Minimum nanoseconds per packet.
    pub forced_ns: u32,
    /// The patterns of [`Kind::Match`].
    pub patterns: Option<Arc<Patterns>>,
    /// Maximum packets per burst, 1 to 4096.
    pub burst: usize,
    /// How long a packet waits for its burst to fill.
    pub burst_timeout: Duration,
    /// Maximum bursts in flight per pipeline, a power of two from 2 to 4096.
    pub slots: usize,
    /// Blocks per pipeline, 1 to 64.
    pub blocks: u32,
    /// Threads per block, 1 to 1024.
    pub threads: u32,
    /// Time without an answer after which a device is considered hung.
    pub timeout: Duration,
    /// What happens to packets by their result.
    pub on_hit: OnHit,
    /// The port that [`OnHit::Steer`] sends to. It is used for nothing else, and comes after all forwarding ports.
    pub elsewhere: Option<usize>,
    /// Page size of the burst rings.
    pub hugepages: Hugepages,
    /// Whether to profile the run.
    pub profile: bool,
}

impl Default for Working {
    fn default() -> Self {
        Self {
            workload: Workload::Cpu,
            devices: Vec::new(),
            memory: Memory::Host,
            kind: Kind::Nothing,
            swap: true,
            skip: 42,
            split_at: None,
            forced_ns: 0,
            patterns: None,
            burst: 64,
            burst_timeout: Duration::from_micros(100),
            slots: 64,
            blocks: 4,
            threads: 256,
            timeout: Duration::from_secs(1),
            on_hit: OnHit::Pass,
            elsewhere: None,
            hugepages: Hugepages::Auto,
            profile: false,
        }
    }
}

/// Refuses invalid configurations.
pub(super) fn check(config: &SwitchConfig, ports: &[Box<dyn Port>], devices: &Devices) -> Result<(), String> {
    let Some(working) = &config.working else { return Ok(()) };
    if config.forward != Forward::Io {
        return Err(format!("pipelines do not forward by mode '{}': expected io", config.forward));
    }
    if !(1..=MAX_BURST).contains(&working.burst) {
        return Err(format!("--burst {}: expected 1 to {MAX_BURST}", working.burst));
    }
    let by_device = matches!(working.workload, Workload::Device(_));
    if by_device && working.devices.is_empty() {
        return Err(format!("workload {} needs a device: give one with --device", working.workload.name()));
    }
    let lcores = config.lcores.len();
    if lcores > 1 && !lcores.is_multiple_of(2) {
        return Err(format!(
            "--lcores: {lcores} lcores cannot be paired, expected one, or an even number (one receives, one sends)"
        ));
    }
    match working.elsewhere {
        Some(elsewhere) if elsewhere >= ports.len() => {
            return Err(format!("--steer: port {elsewhere} of {}, counted from 0", ports.len()));
        }
        _ => {}
    }
    working.check_direct()?;
    let base = |memory: Option<&DeviceMemory>| memory.map(DeviceMemory::base);
    match ports.iter().find(|port| base(port.memory()) != base(devices.memory())) {
        Some(port) => Err(format!(
            "--memory {}: the packets of {} are elsewhere: expected a port dpdk: whose network card reaches the memory of {}",
            working.memory,
            port.name(),
            working.devices.join(",")
        )),
        None => Ok(()),
    }
}

impl Working {
    /// Refuses settings that are not possible with packets in device memory ([`Memory::Direct`]).
    ///
    /// # Errors
    /// The conflict, with the names of the flags.
    pub fn check_direct(&self) -> Result<(), String> {
        if self.memory != Memory::Direct {
            return Ok(());
        }
        let refuse = |text: &str| Err(format!("--memory direct has packets in the device's memory: {text}"));
        if !matches!(self.workload, Workload::Device(_)) {
            return refuse(&format!(
                "--workload {} uses no device; add -w kernel, persistent or graph",
                self.workload.name()
            ));
        }
        if self.devices.len() > 1 {
            return refuse(&format!(
                "only one device can hold them; --device names {}",
                self.devices.join(",")
            ));
        }
        if self.split_at.is_some() {
            return refuse(
                "--split puts their first bytes into host memory, which is not possible; leave it out",
            );
        }
        if matches!(self.on_hit, OnHit::Mark(_)) {
            return refuse("--on-match mark writes them by the CPU, which is not possible; choose another");
        }
        Ok(())
    }
}

/// The devices of a switch, each opened once.
#[derive(Debug, Default)]
pub struct Devices {
    opened: BTreeMap<String, Box<dyn Device>>,
    memory: Option<DeviceMemory>,
}

impl Devices {
    /// Opens the configured devices. With [`Memory::Direct`] the device allocates memory for the packets of `pool`.
    ///
    /// # Errors
    /// The error of a device.
    pub fn open(config: &SwitchConfig, pool: &Pool) -> Result<Self, DeviceError> {
        let mut devices = Self::default();
        let Some(working) = &config.working else { return Ok(devices) };
        if !matches!(working.workload, Workload::Device(_)) {
            return Ok(devices);
        }
        for name in &working.devices {
            if !devices.opened.contains_key(name) {
                devices.opened.insert(name.clone(), devices::open(name)?);
            }
        }
        if working.memory == Memory::Direct
            && let Some(device) = devices.opened.values_mut().next()
        {
            devices.memory = Some(device.pool(pool.chunks() * pool.chunk_size())?);
        }
        Ok(devices)
    }

    /// The memory for packets, if not in the pool; ports are opened with it.
    pub fn memory(&self) -> Option<&DeviceMemory> {
        self.memory.as_ref()
    }

    /// The devices' notes for the user.
    pub(super) fn notes(&self) -> Vec<String> {
        self.opened.values().flat_map(|device| device.notes()).collect()
    }

    /// Iterates over the devices.
    pub(super) fn each(&mut self) -> impl Iterator<Item = &mut Box<dyn Device>> {
        self.opened.values_mut()
    }
}

impl Assembly<'_> {
    /// Adds a pipeline between a port's RX queue and a TX queue; `index` counts pipelines.
    pub(super) fn add_pipeline(
        &mut self,
        working: &Working,
        index: usize,
        &Route { worker, sender, rx_port, tx_port, queue }: &Route,
        ports: &mut [Box<dyn Port>],
        devices: &mut Devices,
    ) -> Result<(), SwitchError> {
        let rx = self.open_rx(worker, rx_port, queue, ports)?;
        let tx = self.open_tx(sender, tx_port, queue, ports)?;
        let elsewhere = match working.elsewhere {
            Some(port) => Some(Stamping::new(self.ring_to(port)?)),
            None => None,
        };
        let worker_of_bursts = match working.workload {
            Workload::None => Worker::None,
            Workload::Cpu => Worker::Cpu,
            Workload::Device(launch) => {
                let name = &working.devices[index % working.devices.len()];
                let device =
                    devices.opened.get_mut(name).ok_or_else(|| SwitchError::Config(format!("no {name}")))?;
                let (blocks, threads, memory) = (working.blocks, working.threads, working.memory);
                Worker::Device { device: &mut **device, launch, blocks, threads, memory }
            }
        };
        let setup = Setup {
            burst: working.burst,
            slots: working.slots,
            worker: worker_of_bursts,
            work: Work {
                kind: working.kind,
                swap: working.swap,
                skip: working.skip,
                split_at: working.split_at,
                forced_ns: working.forced_ns,
                patterns: working.patterns.as_deref(),
            },
            timeout: working.timeout,
            pool: self.pool,
            hugepages: working.hugepages,
        };
        let name = format!("pipeline{rx_port}");
        let queues = QueuesSetup {
            burst_timeout: working.burst_timeout,
            on_hit: working.on_hit,
            elsewhere,
            stats: &self.page,
            name: &name,
            index: queue,
        };
        let (to, from) = work_queues(setup, queues)?;
        let addresses = self.addresses(tx_port, &*ports[tx_port]);
        self.forward(worker, rx, Box::new(to), addresses);
        self.forward(sender, Box::new(from), tx, addresses);
        Ok(())
    }
}
