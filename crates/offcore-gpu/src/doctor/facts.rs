//! Facts about a machine, from files and from the caller.

use offcore_stats::finding::Rights;
use serde::Serialize;

use super::pci::{self, Bar, PciFunction};
use super::tree::{Tree, plain};
use super::{CudaFacts, Given, Ptx};

/// All facts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Facts {
    pub kernel: Option<String>,
    /// Whether the processor reports a hypervisor.
    pub virtual_machine: bool,
    /// NVIDIA's kernel driver, if it is loaded.
    pub driver: Option<Driver>,
    /// Facts from the CUDA driver.
    pub cuda: Option<CudaFacts>,
    /// Requirements of the kernels' PTX.
    pub ptx: Option<Ptx>,
    /// The relevant kernel modules that are loaded.
    pub modules: Vec<String>,
    /// NVIDIA's device files.
    pub device_files: Vec<DeviceFile>,
    pub locked_memory: Option<LockedMemory>,
    /// Whether this process is exempt from that limit by CAP_IPC_LOCK.
    pub may_lock_all: bool,
    /// NUMA nodes.
    pub numa_nodes: usize,
    /// NVIDIA's GPUs on the PCI bus.
    pub gpus: Vec<GpuFacts>,
    /// Network cards on the PCI bus.
    pub nics: Vec<Nic>,
    /// Requested network cards and interfaces that do not exist.
    pub missing_nics: Vec<String>,
    /// Each GPU with each network card.
    pub pairs: Vec<PciPair>,
}

/// NVIDIA's kernel driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Driver {
    /// Its version, such as `580.65.06`, or `None` if /proc/driver/nvidia/version does not contain it.
    pub version: Option<String>,
    /// Whether it is the open-source one, which dma-buf requires.
    pub open: bool,
}

/// A device file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceFile {
    /// Its path: `/dev/nvidia0`.
    pub path: String,
    /// Mode, owner and group as text.
    pub access: String,
    /// Whether its mode lets this process read and write it. A container's device rules can still forbid it.
    pub usable: bool,
}

/// A limit on the memory that a process may lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LockedMemory {
    /// No limit.
    Unlimited,
    /// A limit in bytes.
    Bytes(u64),
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuFacts {
    /// Its PCI function.
    #[serde(flatten)]
    pub function: PciFunction,
    /// Its model, as the kernel driver reports it.
    pub model: Option<String>,
    /// The number of its device file.
    pub minor: Option<u32>,
    /// The largest BAR of its memory.
    pub bar: Option<Bar>,
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// Its PCI function.
    #[serde(flatten)]
    pub function: PciFunction,
    /// Its network interfaces in the kernel.
    pub interfaces: Vec<String>,
    /// Whether its driver is mlx5_core, which supports GPUDirect RDMA.
    pub mlx5: bool,
}

impl Nic {
    /// Returns whether `name` is its address or the name of an interface.
    pub fn is_called(&self, name: &str) -> bool {
        self.function.address == name || self.interfaces.iter().any(|interface| interface == name)
    }
}

/// The distance between a GPU and a network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PciPair {
    /// The GPU's address.
    pub gpu: String,
    /// The network card's address.
    pub nic: String,
    /// The point at which their PCI paths meet.
    pub meeting: Meeting,
}

/// The point at which the paths of two PCI functions meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Meeting {
    /// At this bridge: traffic between them bypasses the processor.
    Bridge(String),
    /// At this root complex.
    RootComplex(String),
    /// They are below different root complexes.
    Nowhere,
    /// The kernel does not expose the paths.
    NotKnown,
}

/// The modules that give network cards access to a GPU's memory.
const MODULES: [&str; 2] = ["nv_peer_mem", "nvidia_peermem"];

/// The number of CAP_IPC_LOCK.
const IPC_LOCK: u32 = 14;

impl Facts {
    /// Reads everything, and adds the caller's input.
    pub(super) fn read(tree: &Tree, given: &Given) -> Self {
        let gpus = gpus(tree);
        let nics = nics(tree, &given.nics);
        let interfaces = tree.names("sys/class/net");
        let is_there =
            |name: &String| nics.iter().any(|nic| nic.is_called(name)) || interfaces.contains(name);
        let missing_nics = given.nics.iter().filter(|name| !is_there(name)).cloned().collect();
        let me = Rights::of(&tree.text("proc/self/status").unwrap_or_default());
        Self {
            kernel: tree.line("proc/sys/kernel/osrelease"),
            virtual_machine: is_virtual(tree),
            driver: driver(tree),
            cuda: given.cuda.clone(),
            ptx: given.ptx,
            modules: MODULES
                .iter()
                .filter(|name| tree.is_dir(format!("sys/module/{name}")))
                .map(|name| (*name).to_owned())
                .collect(),
            device_files: device_files(tree, &me),
            locked_memory: locked_memory(&tree.text("proc/self/limits").unwrap_or_default()),
            may_lock_all: me.has(IPC_LOCK),
            numa_nodes: tree.names("sys/devices/system/node").iter().filter(|name| is_node(name)).count(),
            pairs: pairs(&gpus, &nics),
            gpus,
            nics,
            missing_nics,
        }
    }

    /// Returns whether a module is loaded.
    pub fn has_module(&self, name: &str) -> bool {
        self.modules.iter().any(|module| module == name)
    }

    /// Returns a device file by its path.
    pub fn device_file(&self, path: &str) -> Option<&DeviceFile> {
        self.device_files.iter().find(|file| file.path == path)
    }
}

fn is_virtual(tree: &Tree) -> bool {
    let text = tree.text("proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    flags.split_whitespace().any(|flag| flag == "hypervisor")
}

/// Parses `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build …`.
fn driver(tree: &Tree) -> Option<Driver> {
    let line = tree.line("proc/driver/nvidia/version")?;
    let is_version = |word: &&str| {
        let numbers = || word.split('.');
        (2..=3).contains(&numbers().count())
            && numbers().all(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let version = line.split_whitespace().find(is_version).map(str::to_owned);
    Some(Driver { version, open: line.contains("Open Kernel Module") })
}

fn device_files(tree: &Tree, me: &Rights) -> Vec<DeviceFile> {
    let names = tree.names("dev").into_iter().filter(|name| name.starts_with("nvidia"));
    let files = names.filter_map(|name| {
        let path = format!("/dev/{name}");
        // nvidia-caps is a directory.
        let meta = tree.metadata(&path).filter(|meta| !meta.is_dir())?;
        let (usable, access) = me.may_use(&meta);
        Some(DeviceFile { path, access, usable })
    });
    files.collect()
}

fn gpus(tree: &Tree) -> Vec<GpuFacts> {
    let functions = pci::functions(tree, 0x03).into_iter().filter(|function| function.vendor == pci::NVIDIA);
    let gpus = functions.map(|function| {
        let address = &function.address;
        let text = tree.text(format!("proc/driver/nvidia/gpus/{address}/information")).unwrap_or_default();
        let field = |name: &str| {
            text.lines()
                .find_map(|line| Some(plain(line.strip_prefix(name)?.trim_start().strip_prefix(':')?)))
        };
        GpuFacts {
            model: field("Model").filter(|model| !model.is_empty()),
            minor: field("Device Minor").and_then(|minor| minor.parse().ok()),
            bar: pci::largest_bar(tree, address),
            function,
        }
    });
    gpus.collect()
}

/// Returns all network cards, or the ones in `names`.
fn nics(tree: &Tree, names: &[String]) -> Vec<Nic> {
    let nics = pci::functions(tree, 0x02).into_iter().map(|function| {
        let interfaces = interfaces(tree, &function.address);
        let mlx5 = function.driver.as_deref() == Some("mlx5_core");
        Nic { function, interfaces, mlx5 }
    });
    nics.filter(|nic| names.is_empty() || names.iter().any(|name| nic.is_called(name))).collect()
}

/// Returns the interfaces of the card at `address`, or of the virtio device on it.
fn interfaces(tree: &Tree, address: &str) -> Vec<String> {
    let dir = pci::directory(address);
    let below = tree.names(&dir).into_iter().filter(|name| name.starts_with("virtio"));
    let places = below.map(|name| format!("{dir}/{name}/net")).chain([format!("{dir}/net")]);
    places.flat_map(|place| tree.names(&place)).collect()
}

fn pairs(gpus: &[GpuFacts], nics: &[Nic]) -> Vec<PciPair> {
    let of = |gpu: &PciFunction, nic: &PciFunction| PciPair {
        gpu: gpu.address.clone(),
        nic: nic.address.clone(),
        meeting: meeting(gpu, nic),
    };
    gpus.iter().flat_map(|gpu| nics.iter().map(move |nic| of(&gpu.function, &nic.function))).collect()
}

fn meeting(one: &PciFunction, other: &PciFunction) -> Meeting {
    let (Some(root), Some(other_root)) = (&one.path.root, &other.path.root) else { return Meeting::NotKnown };
    if root != other_root {
        return Meeting::Nowhere;
    }
    let both = one.path.bridges.iter().zip(&other.path.bridges);
    match both.take_while(|(a, b)| a == b).last() {
        Some((bridge, _)) => Meeting::Bridge(bridge.clone()),
        None => Meeting::RootComplex(root.clone()),
    }
}

/// Returns whether this is the name of a NUMA node's directory.
fn is_node(name: &str) -> bool {
    name.strip_prefix("node").is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Returns the soft limit of `/proc/self/limits`. The line has the name, the soft limit, the hard limit and the unit.
fn locked_memory(limits: &str) -> Option<LockedMemory> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(LockedMemory::Unlimited),
        bytes => bytes.parse().ok().map(LockedMemory::Bytes),
    }
}

#[cfg(test)]
mod tests;
