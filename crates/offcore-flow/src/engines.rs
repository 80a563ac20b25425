//! Devices by name.

pub mod dma_map;
pub mod simulator;

use std::collections::BTreeMap;
use std::sync::Arc;

use offcore_dma::core::CoreDevice;
use offcore_dma::cpu::CpuDevice;
use offcore_dma::mover::MAX_CHANNELS_PER_QUEUE;
use offcore_dma::share::{SharedChannel, Sharing};
use offcore_dma::{Channel, CopyDevice};
use offcore_dsa::driver::{DsaDevice, Options, Roots, discover};
use offcore_dsa::sim::SimDevice;
use offcore_mem::Pool;
use offcore_stats::lcore;

use crate::worker::idle::Idle;
use simulator::Simulator;

const EXPECTED: &str = "expected cpu, core:N (a helper thread on lcore N), dsa:wqN.M, dsa:auto, dsa-simN:wqN.M or \
                        dmadev:NAME (a DMA device of DPDK)";

/// Capacity of a channel in operations.
pub const CHANNEL_RING: usize = 1024;

/// The devices opened so far. Each device is opened once. Each worker gets its own channel if the device has enough
/// channels for all workers that ask; otherwise, the workers share one channel with a lock.
#[derive(Debug, Default)]
pub struct Engines {
    devices: BTreeMap<String, Arc<dyn CopyDevice>>,
    locked: BTreeMap<String, SharedChannel>,
    simulators: BTreeMap<String, (Simulator, Option<SimDevice>)>,
    workers: Vec<usize>,
    /// NUMA node of the packet buffers.
    node: Option<usize>,
    /// The packet buffers, which some devices must register.
    #[cfg_attr(not(feature = "dpdk"), allow(dead_code, reason = "what DPDK's devices reach"))]
    pool: Option<&'static Pool>,
    /// Whether idle helper threads nap.
    naps: bool,
    notes: Vec<String>,
}

impl Engines {
    /// Creates devices for workers on the lcores `workers`, with packet buffers on NUMA node `node`. A simulated device
    /// starts when a channel names it. With [`Idle::Sleep`], idle helper threads nap, too.
    pub fn new(simulators: &[Simulator], workers: &[usize], node: Option<usize>, idle: Idle) -> Self {
        Self {
            naps: idle == Idle::Sleep,
            simulators: simulators.iter().map(|s| (s.name(), (s.clone(), None))).collect(),
            workers: workers.into(),
            node,
            ..Self::default()
        }
    }

    /// Sets the pool of packet buffers for devices that must register memory.
    #[must_use]
    pub fn with_pool(self, pool: &'static Pool) -> Self {
        Self { pool: Some(pool), ..self }
    }

    /// Refuses names that no channel can have, whatever devices exist.
    ///
    /// # Errors
    /// An error message.
    pub fn check_name(name: &str) -> Result<(), String> {
        let checked = match name.split_once(':') {
            None if name == "cpu" => Ok(()),
            Some(("core", which)) => lcore_of(which).map(|_| ()),
            Some(("dmadev", _)) => Ok(()),
            Some((kind, which)) if kind == "dsa" || kind.starts_with("dsa-sim") => {
                options(which, None).map(|_| ())
            }
            _ => Err(EXPECTED.into()),
        };
        checked.map_err(|error| format!("channel '{name}': {error}"))
    }

    /// Returns the channels for `name`. `dsa:auto` stands for every work queue of type user; if some are on the NUMA
    /// node of the packet buffers, only these. Other names stand for themselves.
    ///
    /// # Errors
    /// An error message, if no such work queue exists.
    pub fn resolve(&mut self, name: &str) -> Result<Vec<String>, String> {
        if name != "dsa:auto" {
            return Ok(vec![name.into()]);
        }
        self.resolve_auto().map_err(|error| format!("channel 'dsa:auto': {error}"))
    }

    fn resolve_auto(&mut self) -> Result<Vec<String>, String> {
        let found = discover::list(&Roots::from_env()).map_err(|error| error.to_string())?;
        let ours: Vec<_> = found.iter().filter(|wq| wq.check(None).is_ok()).map(|wq| &wq.info).collect();
        let near: Vec<_> = ours.iter().filter(|wq| self.is_near(wq.numa_node)).collect();
        let chosen = if near.is_empty() { ours.iter().collect() } else { near };
        if chosen.is_empty() {
            return Err(
                "no work queue is enabled for users: `offcore dsa doctor` shows the reason; dsa-simN:wqN.M needs no \
                        hardware"
                    .into(),
            );
        }
        let names: Vec<String> = chosen.into_iter().map(|wq| format!("dsa:{}", wq.name)).collect();
        self.usable(names)
    }

    /// Returns up to eight of `names` that can be opened. Others may be in use or not accessible.
    fn usable(&mut self, names: Vec<String>) -> Result<Vec<String>, String> {
        let (mut usable, mut refused) = (Vec::new(), Vec::new());
        for name in names {
            if usable.len() == MAX_CHANNELS_PER_QUEUE {
                break;
            }
            if !self.devices.contains_key(&name) {
                match self.open(&name) {
                    Ok(device) => _ = self.devices.insert(name.clone(), device),
                    Err(error) => {
                        refused.push(error);
                        continue;
                    }
                }
            }
            usable.push(name);
        }
        if usable.is_empty() {
            return Err(format!("no work queue can be used: {}", refused.join("; ")));
        }
        self.notes.extend(refused.into_iter().map(|error| format!("warning: dsa:auto goes without {error}")));
        Ok(usable)
    }

    /// Returns a channel of the device `name`, and how it is shared. `workers` is the number of workers that will ask
    /// for a channel of this device.
    ///
    /// # Errors
    /// An error message, if the device does not exist or has no channel left.
    pub fn open_channel(
        &mut self,
        name: &str,
        workers: usize,
    ) -> Result<(Box<dyn Channel>, Sharing), String> {
        if let Some(shared) = self.locked.get(name) {
            return Ok((Box::new(shared.handle()), shared.sharing()));
        }
        let device = match self.devices.get(name) {
            Some(device) => Arc::clone(device),
            None => {
                let queue = |name: &str| name.split('/').next().map(str::to_owned);
                if let Some(other) = self.devices.keys().find(|other| queue(other) == queue(name)) {
                    return Err(format!(
                        "channels '{other}' and '{name}' are one queue: write it in one way"
                    ));
                }
                let device = self.open(name)?;
                self.devices.insert(name.into(), Arc::clone(&device));
                device
            }
        };
        let channel = device.open_channel(CHANNEL_RING).map_err(|error| error.to_string())?;
        if workers > device.max_channels() {
            let shared = self.locked.entry(name.into()).or_insert(SharedChannel::new(channel));
            return Ok((Box::new(shared.handle()), shared.sharing()));
        }
        let by_queue = workers > 1 && name.starts_with("dsa");
        Ok((channel, if by_queue { Sharing::SharedQueue } else { Sharing::Bound }))
    }

    /// Returns the lcores on which helper threads and simulated devices run.
    pub fn helper_lcores(&self) -> Vec<usize> {
        let helpers = self.devices.keys().filter_map(|name| name.strip_prefix("core:")?.parse().ok());
        let running = self.simulators.values().filter(|(_, device)| device.is_some());
        helpers.chain(running.filter_map(|(simulator, _)| simulator.lcore)).collect()
    }

    /// Returns notes for the user about the opened devices.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the NUMA node of the packet buffers in the driver's type.
    fn node(&self) -> Option<u32> {
        self.node.and_then(|node| node.try_into().ok())
    }

    /// Whether a device on this NUMA node is near the packet buffers. Unknown nodes are near.
    fn is_near(&self, theirs: Option<u32>) -> bool {
        theirs.zip(self.node).is_none_or(|(theirs, ours)| theirs as usize == ours)
    }

    fn open(&mut self, name: &str) -> Result<Arc<dyn CopyDevice>, String> {
        self.device(name).map_err(|error| format!("channel '{name}': {error}"))
    }

    fn device(&mut self, name: &str) -> Result<Arc<dyn CopyDevice>, String> {
        if name == "cpu" {
            return Ok(Arc::new(CpuDevice));
        }
        let (kind, which) = name.split_once(':').ok_or(EXPECTED)?;
        match kind {
            "core" => Ok(Arc::new(
                CoreDevice::start_with(lcore_of(which)?, self.naps).map_err(|error| error.to_string())?,
            )),
            "dmadev" => self.dmadev(which),
            "dsa" => {
                let (wq, options) = options(which, self.node())?;
                let device = DsaDevice::open(&Roots::from_env(), wq, options);
                let device = device.map_err(|error| error.to_string())?;
                self.notes.push(format!("{name}: descriptors are submitted by {}", device.submit_by()));
                self.notes.extend(device.warnings().iter().map(|text| format!("warning: {text}")));
                Ok(Arc::new(device))
            }
            simulated if simulated.starts_with("dsa-sim") => {
                let (wq, options) = options(which, self.node())?;
                let device = DsaDevice::simulated(&self.simulator(simulated)?, wq, options);
                Ok(Arc::new(device.map_err(|error| error.to_string())?))
            }
            _ => Err(EXPECTED.into()),
        }
    }

    #[cfg(feature = "dpdk")]
    fn dmadev(&mut self, which: &str) -> Result<Arc<dyn CopyDevice>, String> {
        let device = offcore_dpdk::dmadev::DmaDevice::open(which, self.pool);
        let device = device.map_err(|error| error.to_string())?;
        self.notes.extend(device.note());
        Ok(Arc::new(device))
    }

    #[cfg(not(feature = "dpdk"))]
    fn dmadev(&mut self, _: &str) -> Result<Arc<dyn CopyDevice>, String> {
        Err("this offcore was built without DPDK: install libdpdk-dev 22.11 or later and pkg-config, then cargo build \
             --release --features dpdk"
            .into())
    }

    /// Returns the simulated device, and starts it first if necessary.
    fn simulator(&mut self, name: &str) -> Result<SimDevice, String> {
        let helpers = self.helper_lcores();
        let Some((simulator, device)) = self.simulators.get_mut(name) else {
            return Err("there is no such simulated device".into());
        };
        if let Some(device) = device {
            return Ok(device.clone());
        }
        let available = lcore::available().map_err(|error| error.to_string())?;
        let free = |lcore: &&usize| !self.workers.contains(lcore) && !helpers.contains(lcore);
        let spare = available.iter().find(free).or(available.last()).copied();
        let lcore = simulator.lcore.or(spare).ok_or("no lcore is available to this process")?;
        simulator.lcore = Some(lcore);
        let started = SimDevice::start(name, simulator.options.clone(), lcore);
        let started = started.map_err(|error| error.to_string())?;
        *device = Some(started.clone());
        Ok(started)
    }
}

/// Parses a work queue's name and the options behind it: `wq0.1/direct/memory`.
fn options(which: &str, numa_node: Option<u32>) -> Result<(&str, Options), String> {
    let mut parts = which.split('/');
    let wq = parts.next().unwrap_or_default();
    let mut options = Options { numa_node, ..Options::default() };
    for part in parts {
        if which.split('/').filter(|other| *other == part).count() > 1 {
            return Err(format!("'/{part}' stands there twice: once is enough"));
        }
        match part {
            "direct" => options.batch = false,
            "memory" => options.cache_control = false,
            "block" => options.block_on_fault = true,
            found => {
                return Err(format!(
                    "'/{found}': expected /direct (no batch descriptors), /memory (copies are not put into the \
                     cache) or /block (the device waits for page faults)"
                ));
            }
        }
    }
    Ok((wq, options))
}

fn lcore_of(which: &str) -> Result<usize, String> {
    which.parse().map_err(|_| format!("'{which}' is no lcore; {EXPECTED}"))
}
