//! PCI network and DMA devices and their drivers, read from a tree like /sys.

use std::fs;
use std::io;
use std::path::Path;

use super::Interface;

/// Drivers that give a device to a user space program, such as a DPDK application.
const USERSPACE_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];
/// Kernel drivers that DPDK can use a device together with.
const SHARED: [&str; 2] = ["mlx4_core", "mlx5_core"];

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PciKind {
    /// A network card: class 02.
    Network,
    /// A DMA engine, DSA or I/OAT: an Intel device of class 08, subclass 80.
    Dma,
}

/// A PCI device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciDevice {
    /// Its address, such as `0000:43:00.0`.
    pub address: String,
    pub kind: PciKind,
    pub vendor: u16,
    pub device: u16,
    pub driver: Option<String>,
    /// The NUMA node of the device, if any.
    pub numa_node: Option<u32>,
    pub interfaces: Vec<String>,
    /// The interfaces that the kernel's network stack uses, with their uses.
    pub in_use: Vec<String>,
    /// Whether the device is behind an IOMMU, as vfio-pci requires.
    pub has_iommu: bool,
}

impl PciDevice {
    /// Whether the device is available to user space programs such as DPDK applications.
    pub fn is_for_userspace(&self) -> bool {
        self.driver.as_deref().is_some_and(|driver| USERSPACE_DRIVERS.contains(&driver))
    }

    /// Whether the kernel drives it as a network card whose interface is not visible here.
    fn is_elsewhere(&self) -> bool {
        self.kind == PciKind::Network
            && self.driver.is_some()
            && !self.is_for_userspace()
            && self.interfaces.is_empty()
    }

    /// Returns the ports or channels as which the device can be opened, in addition to the ports of its interfaces.
    pub fn uses(&self) -> Vec<String> {
        let shared = self.driver.as_deref().is_some_and(|driver| SHARED.contains(&driver));
        match self.kind {
            PciKind::Network if shared || self.is_for_userspace() => {
                vec![format!("dpdk:{}", self.address)]
            }
            PciKind::Dma if self.is_for_userspace() => vec![format!("dmadev:{}", self.address)],
            PciKind::Dma if self.driver.as_deref() == Some("idxd") => vec!["dsa:auto".into()],
            _ => vec![],
        }
    }

    /// Returns the obstacles to using the device, and what to do about them.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let Self { address, .. } = self;
        match (&self.driver, self.kind) {
            (None, PciKind::Network) => {
                notes.push("has no driver: load its driver, or vfio-pci for DPDK".into())
            }
            (None, PciKind::Dma) => {
                notes.push("has no driver: load idxd or ioatdma, or vfio-pci for DPDK".into())
            }
            _ => {}
        }
        if !self.in_use.is_empty() {
            notes.push(format!(
                "is in use ({}): with a driver for DPDK the kernel's stack would lose it",
                self.in_use.join("; ")
            ));
        } else if self.is_elsewhere() {
            notes.push(
                "has no interface here, though the kernel drives it: another network namespace may use it"
                    .into(),
            );
        } else if self.uses().is_empty() {
            notes.push(format!("for DPDK: dpdk-devbind.py --bind vfio-pci {address}"));
        }
        if !self.has_iommu && self.driver.as_deref().is_none_or(|driver| driver == "vfio-pci") {
            notes.push(
                "has no IOMMU, which vfio-pci wants: intel_iommu=on on the kernel's command line".into(),
            );
        }
        notes
    }
}

/// Returns the devices in `sysfs`, which is /sys or a tree like it, ordered by address. The list is empty on a machine
/// without PCI. `interfaces` determine which devices are in use.
///
/// # Errors
/// If the list exists and cannot be read.
pub fn devices(sysfs: &Path, interfaces: &[Interface]) -> io::Result<Vec<PciDevice>> {
    let entries = match fs::read_dir(sysfs.join("bus/pci/devices")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        entries => entries?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let entry = entry?;
        let address = entry.file_name().to_string_lossy().into_owned();
        all.extend(read(&entry.path(), address));
    }
    for device in &mut all {
        let own = interfaces.iter().filter(|interface| device.interfaces.contains(&interface.name));
        let used = own.filter(|interface| !interface.uses.is_empty());
        device.in_use = used.map(|one| format!("{}: {}", one.name, one.uses.join(", "))).collect();
    }
    all.sort_by(|a, b| a.address.cmp(&b.address));
    Ok(all)
}

/// Reads the device in directory `at`; `None` if it is not a network or DMA device.
fn read(at: &Path, address: String) -> Option<PciDevice> {
    let hex = |file: &str| {
        let text = fs::read_to_string(at.join(file)).ok()?;
        u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
    };
    let (class, vendor, device) = (hex("class")?, hex("vendor")?, hex("device")?);
    let kind = match (class >> 8, vendor) {
        (0x0200..=0x02ff, _) => PciKind::Network,
        (0x0880, 0x8086) => PciKind::Dma,
        _ => return None,
    };
    let names = |at: &Path| -> Vec<String> {
        let entries = fs::read_dir(at).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    // A virtio device is between the PCI device and its interface.
    let between = names(at).into_iter().filter(|name| name.starts_with("virtio"));
    let mut interfaces: Vec<_> = between.flat_map(|virtio| names(&at.join(virtio).join("net"))).collect();
    interfaces.extend(names(&at.join("net")));
    interfaces.sort();
    Some(PciDevice {
        address,
        kind,
        vendor: u16::try_from(vendor).ok()?,
        device: u16::try_from(device).ok()?,
        driver: fs::read_link(at.join("driver"))
            .ok()
            .and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned())),
        numa_node: numa_node(at),
        interfaces,
        in_use: vec![],
        has_iommu: at.join("iommu_group").exists(),
    })
}

/// Returns the NUMA node of the device in directory `at`. The file contains -1 if the device has no node.
pub(super) fn numa_node(at: &Path) -> Option<u32> {
    fs::read_to_string(at.join("numa_node")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_mem::testing::TempDir;
    use std::path::PathBuf;

    /// Adds a device to a tree.
    fn device(tree: &TempDir, address: &str, class: &str, vendor: &str, driver: Option<&str>) -> PathBuf {
        let at = format!("bus/pci/devices/{address}");
        for (file, text) in [("class", class), ("vendor", vendor), ("device", "0x1592"), ("numa_node", "1")] {
            tree.set(&format!("{at}/{file}"), format!("{text}\n"));
        }
        if let Some(driver) = driver {
            tree.link(&format!("{at}/driver"), &format!("../../drivers/{driver}"));
        }
        tree.file(&at)
    }

    #[test]
    fn devices_list_their_uses() {
        let tree = TempDir::new();
        let nic = device(&tree, "0000:43:00.0", "0x020000", "0x8086", Some("ice"));
        let elsewhere = devices(&tree.0, &[]).unwrap()[0].notes();
        assert!(elsewhere[0].contains("another network namespace"), "{elsewhere:?}");
        fs::create_dir_all(nic.join("net/eth0")).unwrap();
        let bound = device(&tree, "0000:43:00.1", "0x020000", "0x8086", Some("vfio-pci"));
        fs::create_dir_all(bound.join("iommu_group")).unwrap();
        device(&tree, "0000:5e:00.0", "0x020000", "0x15b3", Some("mlx5_core"));
        device(&tree, "0000:6a:01.0", "0x088000", "0x8086", Some("idxd"));
        device(&tree, "0000:6a:02.0", "0x088000", "0x8086", None);
        device(&tree, "0000:00:1f.0", "0x060100", "0x8086", None);
        let all = devices(&tree.0, &[]).unwrap();
        let uses: Vec<_> =
            all.iter().map(|device| (device.address.as_str(), device.uses().join(" "))).collect();
        assert_eq!(
            uses,
            [
                ("0000:43:00.0", String::new()),
                ("0000:43:00.1", "dpdk:0000:43:00.1".into()),
                ("0000:5e:00.0", "dpdk:0000:5e:00.0".into()),
                ("0000:6a:01.0", "dsa:auto".into()),
                ("0000:6a:02.0", String::new()),
            ]
        );
        assert_eq!((all[0].interfaces.as_slice(), all[0].numa_node), (&["eth0".to_owned()][..], Some(1)));
        assert!(all[0].notes()[0].contains("--bind vfio-pci 0000:43:00.0"), "{:?}", all[0].notes());
        assert!(all[1].notes().is_empty() && all[1].is_for_userspace());
        assert!(all[4].notes()[0].contains("no driver"), "{:?}", all[4].notes());
    }

    #[test]
    fn devices_in_use_are_left_alone() {
        let tree = TempDir::new();
        let nic = device(&tree, "0000:00:03.0", "0x020000", "0x1af4", Some("virtio-pci"));
        fs::create_dir_all(nic.join("virtio0/net/lo")).unwrap();
        let mut interfaces = super::super::interfaces(&tree.0).unwrap();
        for (uses, note) in [
            (&[][..], "--bind vfio-pci"),
            (&["the default route".to_owned()], "is in use (lo: the default route)"),
        ] {
            interfaces.iter_mut().for_each(|interface| interface.uses = uses.into());
            let all = devices(&tree.0, &interfaces).unwrap();
            assert_eq!(all[0].interfaces, ["lo"]);
            let notes = all[0].notes();
            assert!(notes.iter().any(|found| found.contains(note)), "{notes:?}");
            assert_eq!(notes.iter().any(|found| found.contains("--bind")), uses.is_empty(), "{notes:?}");
        }
    }

    #[test]
    fn damaged_entries_are_left_out() {
        let tree = TempDir::new();
        let at = device(&tree, "0000:01:00.0", "0x020000", "0x8086", None);
        fs::write(at.join("class"), "what?").unwrap();
        let at = device(&tree, "0000:02:00.0", "0x020000", "0x8086", None);
        fs::write(at.join("numa_node"), "-1\n").unwrap();
        let all = devices(&tree.0, &[]).unwrap();
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].address.as_str(), all[0].numa_node), ("0000:02:00.0", None));
        assert_eq!(devices(Path::new("/nonexistent"), &[]).unwrap(), []);
    }
}
