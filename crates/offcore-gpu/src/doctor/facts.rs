//! Facts about a machine, from files and from the caller.

mod access;

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::pci::{self, Bar, PciFunction};
use super::tree::{Tree, plain};
use super::{CudaFacts, Given, LockedMemory, Ptx};

/// All facts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Facts {
    /// The kernel's release.
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
    /// NVIDIA's and GDRCopy's device files.
    pub device_files: Vec<DeviceFile>,
    /// The CUDA driver's library, libcuda.
    pub libcuda: Option<Library>,
    /// GDRCopy's library, libgdrapi.
    pub libgdrapi: Option<Library>,
    /// Hugepages by size.
    pub hugepages: Vec<Hugepages>,
    /// The limit on locked memory.
    pub locked_memory: Option<LockedMemory>,
    /// Whether this process is exempt from that limit by CAP_IPC_LOCK.
    pub may_lock_all: bool,
    /// NUMA nodes.
    pub numa_nodes: usize,
    /// NVIDIA's GPUs on the PCI bus.
    pub gpus: Vec<Gpu>,
    /// Network cards on the PCI bus.
    pub nics: Vec<Nic>,
    /// Requested network interfaces without a card on the PCI bus, such as veth and tap.
    pub other_interfaces: Vec<Interface>,
    /// Requested network cards and interfaces that do not exist.
    pub missing_nics: Vec<String>,
    /// Each GPU with each network card.
    pub pairs: Vec<Pair>,
}

/// NVIDIA's kernel driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Driver {
    /// Its version, such as `580.65.06`; `None` if /proc/driver/nvidia/version does not contain it.
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

/// A library that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Library {
    /// The name that was found.
    pub path: PathBuf,
    /// The version in the file name, if any.
    pub version: Option<String>,
}

/// Hugepages of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Hugepages {
    /// Page size in bytes.
    pub bytes: u64,
    /// Reserved pages.
    pub total: u64,
    /// Free pages.
    pub free: u64,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Its PCI function.
    #[serde(flatten)]
    pub function: PciFunction,
    /// Its model, as the kernel driver calls it.
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
    pub interfaces: Vec<Interface>,
    /// Whether its driver is mlx5_core, which supports GPUDirect RDMA.
    pub mlx5: bool,
}

impl Nic {
    /// Whether `name` is its address or one of its interfaces.
    pub fn is_called(&self, name: &str) -> bool {
        self.function.address == name || self.interfaces.iter().any(|interface| interface.name == name)
    }
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// Speed in Mbit/s.
    pub speed: Option<u32>,
}

/// The distance between a GPU and a network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// The GPU's address.
    pub gpu: String,
    /// The network card's address.
    pub nic: String,
    /// Where their PCI paths meet.
    pub meeting: Meeting,
    /// The distance of their NUMA nodes from the firmware; 10 is the same node.
    pub numa_distance: Option<u32>,
}

/// Where the paths of two PCI functions meet.
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

/// The relevant modules: the driver's, those for peer access, the network cards'.
const MODULES: [&str; 9] = [
    "gdrdrv",
    "mlx5_core",
    "mlx5_ib",
    "nouveau",
    "nv_peer_mem",
    "nvidia",
    "nvidia_peermem",
    "nvidia_uvm",
    "vfio_pci",
];

impl Facts {
    /// Reads everything, and adds the caller's input.
    pub(super) fn read(tree: &Tree, given: &Given) -> Self {
        let gpus = gpus(tree);
        let nics = nics(tree, &given.nics);
        let (other_interfaces, missing_nics) = others(tree, &given.nics, &nics);
        let me = access::Me::of(tree);
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
            libcuda: library(tree, "libcuda.so", given.cuda_path.as_deref(), &given.library_path),
            libgdrapi: library(tree, "libgdrapi.so", given.gdrcopy_path.as_deref(), &given.library_path),
            hugepages: hugepages(tree),
            locked_memory: given.locked_memory,
            may_lock_all: me.may_lock_all(),
            numa_nodes: nodes(tree).len(),
            pairs: pairs(tree, &gpus, &nics),
            gpus,
            nics,
            other_interfaces,
            missing_nics,
        }
    }

    /// Whether a module is loaded.
    pub fn has_module(&self, name: &str) -> bool {
        self.modules.iter().any(|module| module == name)
    }

    /// A device file by its path.
    pub fn device_file(&self, path: &str) -> Option<&DeviceFile> {
        self.device_files.iter().find(|file| file.path == path)
    }
}

fn is_virtual(tree: &Tree) -> bool {
    let text = tree.text("proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    flags.split_whitespace().any(|flag| flag == "hypervisor")
}

/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build …`
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

fn device_files(tree: &Tree, me: &access::Me) -> Vec<DeviceFile> {
    let ours = |name: &String| name.starts_with("nvidia") || name == "gdrdrv";
    let names = tree.names("dev").into_iter().filter(ours);
    let files = names.filter_map(|name| {
        let path = format!("/dev/{name}");
        // nvidia-caps is a directory.
        let meta = tree.metadata(&path).filter(|meta| !meta.is_dir())?;
        let (usable, access) = me.may_use(&meta);
        Some(DeviceFile { path, access, usable })
    });
    files.collect()
}

/// The default library paths. Programs also use /etc/ld.so.cache.
const LIBRARY_DIRECTORIES: [&str; 12] = [
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/lib",
    "/usr/local/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/usr/lib/wsl/lib",
];

/// The first file `name`, or `name` with a version suffix, in `first` if given, then in `path`, then in the default
/// paths.
fn library(tree: &Tree, name: &str, first: Option<&Path>, path: &[PathBuf]) -> Option<Library> {
    let usual = LIBRARY_DIRECTORIES.iter().map(Path::new);
    let mut places = first.into_iter().chain(path.iter().map(PathBuf::as_path)).chain(usual);
    places.find_map(|place| {
        // `libcuda.so` before `libcuda.so.1` before `libcuda.so.580.65.06`.
        let names = tree.names(place);
        let mut fitting: Vec<&String> =
            names.iter().filter(|file| *file == name || file.starts_with(&format!("{name}."))).collect();
        fitting.sort_by_key(|file| file.len());
        fitting.into_iter().find_map(|file| {
            let path = place.join(file);
            let real = tree.follow(&path)?;
            let real = plain(&real.file_name()?.to_string_lossy());
            let version = real.strip_prefix(&format!("{name}.")).filter(|version| version.contains('.'));
            Some(Library { path, version: version.map(str::to_owned) })
        })
    })
}

fn hugepages(tree: &Tree) -> Vec<Hugepages> {
    const DIR: &str = "sys/kernel/mm/hugepages";
    let sizes = tree.names(DIR).into_iter().filter_map(|name| {
        let kilobytes: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let pages = |file: &str| tree.number(format!("{DIR}/{name}/{file}"));
        let (total, free) = (pages("nr_hugepages")?, pages("free_hugepages")?);
        Some(Hugepages { bytes: kilobytes.checked_mul(1024)?, total, free })
    });
    sizes.collect()
}

fn gpus(tree: &Tree) -> Vec<Gpu> {
    let functions = pci::functions(tree, 0x03).into_iter().filter(|function| function.vendor == pci::NVIDIA);
    let gpus = functions.map(|function| {
        let address = &function.address;
        let text = tree.text(format!("proc/driver/nvidia/gpus/{address}/information")).unwrap_or_default();
        let field = |name: &str| {
            text.lines()
                .find_map(|line| Some(plain(line.strip_prefix(name)?.trim_start().strip_prefix(':')?)))
        };
        Gpu {
            model: field("Model").filter(|model| !model.is_empty()),
            minor: field("Device Minor").and_then(|minor| minor.parse().ok()),
            bar: pci::largest_bar(tree, address),
            function,
        }
    });
    gpus.collect()
}

/// All network cards, or those in `names`.
fn nics(tree: &Tree, names: &[String]) -> Vec<Nic> {
    let nics = pci::functions(tree, 0x02).into_iter().map(|function| {
        let interfaces = interfaces(tree, &function.address);
        let mlx5 = function.driver.as_deref() == Some("mlx5_core");
        Nic { function, interfaces, mlx5 }
    });
    nics.filter(|nic| names.is_empty() || names.iter().any(|name| nic.is_called(name))).collect()
}

/// The `names` that no card has: existing interfaces, and names of nothing.
fn others(tree: &Tree, names: &[String], nics: &[Nic]) -> (Vec<Interface>, Vec<String>) {
    let rest = names.iter().filter(|name| !nics.iter().any(|nic| nic.is_called(name))).cloned();
    let all = tree.names(INTERFACES);
    let (there, missing): (Vec<String>, Vec<String>) = rest.partition(|name| all.contains(name));
    (there.into_iter().map(|name| interface(tree, INTERFACES, name)).collect(), missing)
}

/// The interfaces of the card at `address`: its own, or those of the virtio device on it.
fn interfaces(tree: &Tree, address: &str) -> Vec<Interface> {
    let dir = pci::directory(address);
    let below = tree.names(&dir).into_iter().filter(|name| name.starts_with("virtio"));
    let places = below.map(|name| format!("{dir}/{name}/net")).chain([format!("{dir}/net")]);
    let interfaces = places.flat_map(|place| {
        tree.names(&place).into_iter().map(|name| interface(tree, &place, name)).collect::<Vec<_>>()
    });
    interfaces.collect()
}

/// All interfaces of the network namespace of this /sys.
const INTERFACES: &str = "sys/class/net";

fn interface(tree: &Tree, place: &str, name: String) -> Interface {
    Interface {
        mtu: tree.number(format!("{place}/{name}/mtu")),
        // -1 means that it is not known.
        speed: tree.number(format!("{place}/{name}/speed")),
        name,
    }
}

fn pairs(tree: &Tree, gpus: &[Gpu], nics: &[Nic]) -> Vec<Pair> {
    let of = |gpu: &PciFunction, nic: &PciFunction| Pair {
        gpu: gpu.address.clone(),
        nic: nic.address.clone(),
        meeting: meeting(gpu, nic),
        numa_distance: gpu.numa_node.zip(nic.numa_node).and_then(|(from, to)| distance(tree, from, to)),
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

/// The directory of NUMA nodes.
const NODES: &str = "sys/devices/system/node";

/// The existing NUMA nodes, in order.
fn nodes(tree: &Tree) -> Vec<u32> {
    let nodes = tree.names(NODES).into_iter().filter_map(|name| name.strip_prefix("node")?.parse().ok());
    let mut nodes: Vec<u32> = nodes.collect();
    nodes.sort_unstable();
    nodes
}

/// The distance of two NUMA nodes. A node's row has a number per existing node, in order.
fn distance(tree: &Tree, from: u32, to: u32) -> Option<u32> {
    let column = nodes(tree).iter().position(|node| *node == to)?;
    tree.line(format!("{NODES}/node{from}/distance"))?.split_whitespace().nth(column)?.parse().ok()
}

#[cfg(test)]
mod tests;
