//! PCI devices and their drivers, as listed in sysfs.

use std::path::Path;

/// Kernel drivers that stay bound to a device that DPDK uses.
const SHARED: [&str; 3] = ["mlx4_core", "mlx5_core", "mana"];
/// Kernel drivers that give a device to user space programs such as DPDK applications.
const USERSPACE_DRIVERS: [&str; 3] = ["vfio-pci", "igb_uio", "uio_pci_generic"];

/// Parses `name` as a PCI address, with or without the domain; returns the address in its long form, such as
/// `0000:43:00.0`.
pub(crate) fn address(name: &str) -> Option<String> {
    let (bus, function) = name.rsplit_once('.')?;
    let parts: Vec<&str> = bus.split(':').collect();
    let hex = |text: &str, len: usize| text.len() == len && text.bytes().all(|c| c.is_ascii_hexdigit());
    let tail = |bus, device| hex(bus, 2) && hex(device, 2) && hex(function, 1);
    match parts[..] {
        [bus, device] if tail(bus, device) => Some(format!("0000:{bus}:{device}.{function}").to_lowercase()),
        [domain, bus, device] if hex(domain, 4) && tail(bus, device) => Some(name.to_lowercase()),
        _ => None,
    }
}

/// Returns the kernel driver to which the device at `address` is bound, according to the sysfs at `sys`.
pub(crate) fn kernel_driver(sys: &Path, address: &str) -> Option<String> {
    let path = std::fs::read_link(sys.join("bus/pci/devices").join(address).join("driver")).ok()?;
    Some(path.file_name()?.to_string_lossy().into_owned())
}

/// Checks whether DPDK can use the device at `address`, according to the sysfs at `sys`. The error says why not, and
/// what to do.
pub(crate) fn check(sys: &Path, address: &str) -> Result<(), String> {
    let device = sys.join("bus/pci/devices").join(address);
    if !device.exists() {
        return Err(format!("there is no PCI device {address}: lspci -D lists them"));
    }
    match kernel_driver(sys, address).as_deref() {
        Some(driver) if SHARED.contains(&driver) || USERSPACE_DRIVERS.contains(&driver) => Ok(()),
        None => Err(format!(
            "PCI device {address} is bound to no driver, expected vfio-pci: dpdk-devbind.py -b vfio-pci {address}"
        )),
        Some(driver) => Err(format!(
            "PCI device {address} is bound to the kernel's driver {driver}, expected vfio-pci: `offcore port list` says whether \
             it is in use, and what to do if it is not"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_are_recognized() {
        assert_eq!(address("0000:43:00.0").as_deref(), Some("0000:43:00.0"));
        assert_eq!(address("43:0A.1").as_deref(), Some("0000:43:0a.1"));
        for name in ["net_null0", "43:00", "1:43:00.0", "0000:43:00.00", "0000:4z:00.0", "a.b", ""] {
            assert_eq!(address(name), None, "{name}");
        }
    }

    #[test]
    fn device_owner_decides_the_remedy() {
        let root = std::env::temp_dir().join(format!("offcore-pci-{}", std::process::id()));
        let device = root.join("bus/pci/devices/0000:43:00.0");
        let says = |word: &str| {
            let text = check(&root, "0000:43:00.0").unwrap_err();
            assert!(text.contains(word) && text.contains("0000:43:00.0"), "{word}: {text}");
        };
        says("there is no PCI device");
        std::fs::create_dir_all(device.join("net/eth7")).unwrap();
        says("bound to no driver");
        for (driver, usable) in [("ice", false), ("vfio-pci", true), ("mlx5_core", true)] {
            let link = device.join("driver");
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(format!("../../../bus/pci/drivers/{driver}"), link).unwrap();
            if usable {
                assert!(check(&root, "0000:43:00.0").is_ok(), "{driver}");
            } else {
                says("driver ice, expected vfio-pci");
                says("offcore port list");
            }
        }
        std::fs::remove_dir_all(root).unwrap();
    }
}
