//! l2fwd-nv's pipelines as a switch: between a port's RX queue and a TX queue, packets are gathered in bursts and
//! processed by a GPU, by the CPU, or not at all.
//!
//! ```text
//! RX queue -> gather | bursts: a device, or the CPU on the sending lcore | -> by result -> TX queue
//!                                                                                    \-- ring -> another port
//! ```

use std::collections::BTreeMap;

use offcore_gpu::device::{DeviceError, GpuDevice, Memory};
use offcore_gpu::devices;
use offcore_gpu::layout::MAX_BURST;
use offcore_gpu::pipeline::{PipelineWorker, Setup, Work};
use offcore_mem::{DeviceMemory, Pool};
use offcore_port::Port;

use super::config::{Run, SwitchConfig, Working, Workload};
use super::{Assembly, Route};
use crate::error::{Field, SwitchError};
use crate::mirror::Stamping;
use crate::pipeline::{OnHit, QueuesSetup, work_queues};

impl Working {
    /// Refuses invalid configurations.
    pub(super) fn check(&self, lcores: usize, ports: usize) -> Result<(), SwitchError> {
        if !(1..=MAX_BURST).contains(&self.burst) {
            return Field::Burst.refuse(format!("{}, expected 1 to {MAX_BURST}", self.burst));
        }
        if lcores > 1 && !lcores.is_multiple_of(2) {
            return Field::Lcores.refuse(format!(
                "{lcores} lcores cannot be paired, expected one, or an even number (one receives, one sends)"
            ));
        }
        Field::Elsewhere.check_ports(ports, self.elsewhere.into_iter())?;
        if self.memory == Memory::Direct { self.check_direct() } else { Ok(()) }
    }

    /// Refuses settings that are not possible with packets in device memory.
    fn check_direct(&self) -> Result<(), SwitchError> {
        if !matches!(self.workload, Workload::Device(_)) {
            let name = self.workload.name();
            return Field::Memory.refuse(format!("direct, but workload {name} uses no device"));
        }
        if self.devices.len() > 1 {
            let names = self.devices.join(",");
            return Field::Devices
                .refuse(format!("{names}, expected one: with memory direct it has all packets"));
        }
        if self.split_at.is_some() {
            return Field::SplitAt
                .refuse("puts first bytes into host memory: not possible with memory direct");
        }
        if matches!(self.on_hit, OnHit::Mark(_)) {
            return Field::OnHit.refuse("mark, which the CPU writes: not possible with memory direct");
        }
        Ok(())
    }

    /// Refuses devices and ports that do not match the configuration.
    pub(super) fn check_opened(&self, ports: &[Box<dyn Port>], devices: &Devices) -> Result<(), SwitchError> {
        if matches!(self.workload, Workload::Device(_)) && self.devices.is_empty() {
            return Field::Devices
                .refuse(format!("none, expected one for workload {}", self.workload.name()));
        }
        let base = |memory: Option<&DeviceMemory>| memory.map(DeviceMemory::base);
        match ports.iter().find(|port| base(port.memory()) != base(devices.memory())) {
            Some(port) => Field::Memory.refuse(format!(
                "{}, but the packets of {} are elsewhere: expected a port dpdk: whose network card reaches the memory of {}",
                self.memory,
                port.name(),
                self.devices.join(",")
            )),
            None => Ok(()),
        }
    }
}

/// The devices of a switch, each opened once.
#[derive(Debug, Default)]
pub struct Devices {
    opened: BTreeMap<String, Box<dyn GpuDevice>>,
    memory: Option<DeviceMemory>,
}

impl Devices {
    /// Opens the configured devices. With [`Memory::Direct`] the device allocates memory for the packets of `pool`.
    ///
    /// # Errors
    /// The error of a device.
    pub fn open(config: &SwitchConfig, pool: &Pool) -> Result<Self, DeviceError> {
        let mut devices = Self::default();
        let Run::Pipelines(working) = &config.run else { return Ok(devices) };
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
    pub(super) fn each(&mut self) -> impl Iterator<Item = &mut Box<dyn GpuDevice>> {
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
        devices: &mut Devices,
    ) -> Result<(), SwitchError> {
        let rx = self.open_rx(worker, rx_port, queue)?;
        let tx = self.open_tx(sender, tx_port, queue)?;
        let elsewhere = match working.elsewhere {
            Some(port) => Some(Stamping::new(self.ring_to(port)?)),
            None => None,
        };
        let worker_of_bursts = match working.workload {
            Workload::None => PipelineWorker::None,
            Workload::Cpu => PipelineWorker::Cpu,
            Workload::Device(launch) => {
                let name = &working.devices[index % working.devices.len()];
                let Some(device) = devices.opened.get_mut(name) else {
                    return Field::Devices.refuse(format!("{name}, which is not open"));
                };
                let (blocks, threads, memory) = (working.blocks, working.threads, working.memory);
                PipelineWorker::Device { device: &mut **device, launch, blocks, threads, memory }
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
        self.forward(worker, rx_port, rx, Box::new(to), None);
        self.forward(sender, rx_port, Box::new(from), tx, None);
        Ok(())
    }
}
