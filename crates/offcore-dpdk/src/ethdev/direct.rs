//! Checks and configures network cards that access a device's memory which the CPU cannot access.
//!
//! The driver must not access any byte of a packet then. The driver mlx5 of DPDK supports this (GPUDirect RDMA),
//! provided that it copies neither the beginnings of sent packets into its descriptors nor short packets out of large
//! receive buffers.

use std::path::Path;

use super::EthError;
use crate::pci;

/// The driver's kernel module.
const DRIVER: &str = "mlx5_core";
/// Arguments for the number of bytes of a packet that are copied into a descriptor: for a single packet in the
/// descriptor, and for several ones.
const INLINED: [&str; 2] = ["txq_inline_max", "txq_inline_mpw"];
/// Other arguments that enable copies unless they are 0. Their default is 0.
const COPYING: [&str; 2] = ["txq_inline_min", "mprq_en"];

/// Returns the arguments for device `name`: the given ones, and others that keep its driver from accessing packets.
/// `address` is the device's PCI address, if it has one, and `sys` the path of sysfs.
///
/// # Errors
/// If it is not such a network card, or given arguments enable copies.
pub(super) fn args(
    sys: &Path,
    name: &str,
    address: Option<&str>,
    given: Option<&str>,
    memory: &str,
) -> Result<String, EthError> {
    let driver = address.and_then(|address| pci::kernel_driver(sys, address));
    if driver.as_deref() != Some(DRIVER) {
        let found = match (address, driver) {
            (None, _) => "has no PCI address".into(),
            (Some(_), None) => "is bound to no driver".into(),
            (Some(_), Some(driver)) => format!("is bound to {driver}"),
        };
        return Err(EthError::Device(format!(
            "{name} {found}: only network cards under {DRIVER} put packets into the memory of {memory}; without them, \
             receive into host memory"
        )));
    }
    let pairs = given.unwrap_or_default().split(',').filter_map(|pair| pair.split_once('='));
    for (key, value) in pairs {
        if (INLINED.contains(&key) || COPYING.contains(&key)) && value.trim() != "0" {
            return Err(EthError::Device(format!(
                "{name}: {key}={value} has its driver copy bytes of packets, which are in the memory of {memory}: leave it \
                 out"
            )));
        }
    }
    let is_given =
        |key: &&&str| given.unwrap_or_default().split(',').any(|pair| pair.split('=').next() == Some(key));
    let more = INLINED.iter().filter(|key| !is_given(key)).map(|key| format!("{key}=0"));
    Ok(given.map(str::to_owned).into_iter().chain(more).collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    const ADDRESS: &str = "0000:3b:00.0";

    /// Creates a tree in which the card is bound to this driver.
    fn tree(name: &str, driver: &str) -> std::path::PathBuf {
        let sys = std::env::temp_dir().join(format!("offcore-direct-{}-{name}", std::process::id()));
        let device = sys.join("bus/pci/devices").join(ADDRESS);
        std::fs::create_dir_all(&device).unwrap();
        std::os::unix::fs::symlink(format!("../../../bus/pci/drivers/{driver}"), device.join("driver"))
            .unwrap();
        sys
    }

    #[test]
    fn packet_touching_drivers_are_refused() {
        let sys = tree("mlx5", "mlx5_core");
        let of =
            |given| args(&sys, "3b:00.0", Some(ADDRESS), given, "cuda:0").map_err(|error| error.to_string());
        assert_eq!(of(None).unwrap(), "txq_inline_max=0,txq_inline_mpw=0");
        assert_eq!(
            of(Some("txq_inline_max=0,dv_flow_en=1")).unwrap(),
            "txq_inline_max=0,dv_flow_en=1,txq_inline_mpw=0"
        );
        for (given, word) in [("mprq_en=1", "mprq_en=1"), ("a=b,txq_inline_min=18", "txq_inline_min=18")] {
            let error = of(Some(given)).unwrap_err();
            assert!(error.contains(word) && error.contains("cuda:0"), "{error}");
        }
        std::fs::remove_dir_all(sys).unwrap();
    }

    #[test]
    fn unreachable_memory_is_named() {
        let sys = tree("vfio", "vfio-pci");
        let error = args(&sys, "3b:00.0", Some(ADDRESS), None, "cuda:0").unwrap_err().to_string();
        assert!(error.contains("3b:00.0 is bound to vfio-pci") && error.contains("mlx5_core"), "{error}");
        let error = args(&sys, "net_ring0", None, None, "cuda:0").unwrap_err().to_string();
        assert!(error.contains("net_ring0 has no PCI address"), "{error}");
        std::fs::remove_dir_all(sys).unwrap();
    }
}
