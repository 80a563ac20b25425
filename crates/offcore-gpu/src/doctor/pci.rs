//! PCI functions (GPUs, network cards), their links, and the bridges on their paths.

use serde::Serialize;

use super::tree::{Tree, hex};

/// NVIDIA's vendor number.
pub(super) const NVIDIA: u16 = 0x10de;
const DEVICES: &str = "sys/bus/pci/devices";

/// Red Hat's vendor number, used by virtio devices.
const VIRTIO: u16 = 0x1af4;

/// A PCI function. A virtual function has the link of its physical function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PciFunction {
    /// Its address, such as `0000:3b:00.0`.
    pub address: String,
    pub vendor: u16,
    pub device: u16,
    /// Class, subclass and programming interface: 0x030200 for a GPU without a display.
    pub class: u32,
    pub driver: Option<String>,
    /// Its NUMA node, if the firmware reports it.
    pub numa_node: Option<u32>,
    /// Its IOMMU group, if there is an IOMMU.
    pub iommu: Option<IommuGroup>,
    /// Its PCIe link.
    pub link: PcieLink,
    pub path: PciPath,
}

impl PciFunction {
    /// Returns whether it is emulated or on-chip and has no link.
    pub fn is_emulated(&self) -> bool {
        self.vendor == VIRTIO
    }
}

/// An IOMMU group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IommuGroup {
    pub number: u32,
    /// Its translation type, as in the kernel: `identity`, `DMA`, `DMA-FQ`.
    pub kind: Option<String>,
}

/// A PCIe link, and the function's capabilities. Values that the kernel does not report, as in most virtual machines,
/// are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PcieLink {
    pub generation: Option<u8>,
    /// Current number of lanes.
    pub width: Option<u8>,
    /// Maximum generation of the function.
    pub max_generation: Option<u8>,
    /// Maximum lanes of the function.
    pub max_width: Option<u8>,
}

/// The path from the processor to a function.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PciPath {
    /// The root complex, such as `pci0000:3a`; `None` if the kernel does not expose the path.
    pub root: Option<String>,
    /// The bridges from the root port on, outermost first.
    pub bridges: Vec<String>,
}

/// A BAR.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Bar {
    pub number: usize,
    pub bytes: u64,
}

/// Returns the functions of this base class (0x02 network, 0x03 display), by address.
pub(super) fn functions(tree: &Tree, class: u32) -> Vec<PciFunction> {
    let all = tree.names(DEVICES).into_iter().filter_map(|address| function(tree, address));
    all.filter(|function| function.class >> 16 == class).collect()
}

fn function(tree: &Tree, address: String) -> Option<PciFunction> {
    let dir = directory(&address);
    let number = |file: &str| tree.hex(format!("{dir}/{file}"));
    // A virtual function does not show a link, so the link of its physical function is used.
    let owner = format!("{dir}/physfn");
    let physical = if tree.is_dir(&owner) { &owner } else { &dir };
    Some(PciFunction {
        vendor: u16::try_from(number("vendor")?).ok()?,
        device: u16::try_from(number("device")?).ok()?,
        class: u32::try_from(number("class")?).ok()?,
        driver: tree.link_name(format!("{dir}/driver")),
        // -1 means no node.
        numa_node: tree.number(format!("{dir}/numa_node")),
        iommu: iommu(tree, &dir),
        link: link(tree, physical),
        path: path(tree, &dir),
        address,
    })
}

/// Returns the directory of a function.
pub(super) fn directory(address: &str) -> String {
    format!("{DEVICES}/{address}")
}

fn iommu(tree: &Tree, dir: &str) -> Option<IommuGroup> {
    let number = tree.link_name(format!("{dir}/iommu_group"))?.parse().ok()?;
    Some(IommuGroup { number, kind: tree.line(format!("sys/kernel/iommu_groups/{number}/type")) })
}

fn link(tree: &Tree, dir: &str) -> PcieLink {
    let generation = |file: &str| generation(&tree.line(format!("{dir}/{file}"))?);
    // 0 and 255 are unknown links.
    let width = |file: &str| tree.number(format!("{dir}/{file}")).filter(|width| (1u8..=32).contains(width));
    PcieLink {
        generation: generation("current_link_speed"),
        width: width("current_link_width"),
        max_generation: generation("max_link_speed"),
        max_width: width("max_link_width"),
    }
}

/// Returns the generation of a speed in the kernel's format: `16.0 GT/s PCIe`.
fn generation(text: &str) -> Option<u8> {
    let speed = text.split_whitespace().next()?;
    match speed.strip_suffix(".0").unwrap_or(speed) {
        "2.5" => Some(1),
        "5" => Some(2),
        "8" => Some(3),
        "16" => Some(4),
        "32" => Some(5),
        "64" => Some(6),
        _ => None,
    }
}

/// Returns the path to the function at `dir`, as in `devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0`.
fn path(tree: &Tree, dir: &str) -> PciPath {
    let parts = tree.real_parts(dir).unwrap_or_default();
    let Some(first) = parts.iter().position(|part| part.starts_with("pci") && part.contains(':')) else {
        return PciPath::default();
    };
    let (root, rest) = (parts[first].clone(), &parts[first + 1..]);
    let bridges = rest.split_last().map_or(&[][..], |(_, bridges)| bridges);
    PciPath { root: Some(root), bridges: bridges.to_vec() }
}

/// Returns the largest memory BAR of the function at `address`.
pub(super) fn largest_bar(tree: &Tree, address: &str) -> Option<Bar> {
    const MEMORY: u64 = 0x200;
    const BARS: usize = 6;
    let dir = directory(address);
    let text = tree.text(format!("{dir}/resource"))?;
    let bars = text.lines().take(BARS).enumerate().filter_map(|(number, line)| {
        let mut words = line.split_whitespace().map(hex);
        let (first, last, flags) = (words.next()??, words.next()??, words.next()??);
        let bytes = last.checked_sub(first)?.checked_add(1)?;
        (flags & MEMORY != 0 && last > 0).then_some((number, bytes))
    });
    let (number, bytes) = bars.max_by_key(|(_, bytes)| *bytes)?;
    Some(Bar { number, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::fixture::{Fake, GPU};

    fn gpu(fake: &Fake) -> PciFunction {
        functions(&Tree::new(&fake.0), 0x03).remove(0)
    }

    #[test]
    fn function_has_link_and_path() {
        let fake = Fake::good();
        let gpu = gpu(&fake);
        assert_eq!((gpu.address.as_str(), gpu.vendor, gpu.driver.as_deref()), (GPU, NVIDIA, Some("nvidia")));
        assert_eq!((gpu.link.generation, gpu.link.width), (Some(5), Some(16)));
        assert_eq!(gpu.path.root.as_deref(), Some("pci0000:00"));
        assert_eq!(gpu.path.bridges, ["0000:00:01.0", "0000:01:00.0", "0000:02:00.0"]);
    }

    #[test]
    fn virtual_function_inherits_its_link() {
        let fake = Fake::good();
        fake.set(&fake.nic("current_link_speed"), "Unknown");
        fake.link(&fake.nic("physfn"), "/nowhere");
        let nic = || functions(&Tree::new(&fake.0), 0x02).remove(0);
        assert_eq!(nic().link.generation, None);
        let gpu = fake.file("sys/bus/pci/devices").join(GPU);
        fake.link(&fake.nic("physfn"), gpu.to_str().unwrap());
        assert_eq!(nic().link.generation, Some(5));
    }

    #[test]
    fn unknown_links_stay_unknown() {
        let fake = Fake::good();
        fake.set(&fake.gpu("current_link_speed"), "Unknown");
        fake.set(&fake.gpu("current_link_width"), "255");
        fake.set(&fake.gpu("max_link_width"), "0");
        let link = gpu(&fake).link;
        assert_eq!((link.generation, link.width, link.max_width), (None, None, None));
        assert_eq!((generation("2.5 GT/s PCIe"), generation("64.0 GT/s PCIe")), (Some(1), Some(6)));
        assert_eq!(generation(""), None);
    }

    #[test]
    fn largest_bar_is_the_memory_bar() {
        let fake = Fake::good();
        let tree = Tree::new(&fake.0);
        let bar = largest_bar(&tree, GPU).unwrap();
        assert_eq!((bar.number, bar.bytes), (2, 256 << 30));
        fake.set(&fake.gpu("resource"), "0x0 0xffffffffffffffff 0x200\n0x5 0x1 0x200\nx\n");
        assert_eq!(largest_bar(&tree, GPU), None);
    }
}
