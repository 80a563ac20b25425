//! Finds a device, and checks what can be checked without DPDK.

use std::path::Path;

use super::{DESCRIPTORS, EthError, Request, c_string, direct};
use crate::eal;
use crate::ffi::{self, EthInfo};
use crate::pci;

/// Rejects requests that cannot work.
pub(super) fn check(request: &Request) -> Result<(), EthError> {
    let device = &request.device;
    if device.starts_with("net_af_xdp") || device.starts_with("eth_af_xdp") {
        return Err(EthError::Device(format!(
            "{device}: DPDK's driver makes its UMEM of the memory that mbufs lie in, and ours are apart from the packet \
             buffers: use af_xdp:INTERFACE"
        )));
    }
    Ok(())
}

/// Returns the port of the device, and whether it was created here. A device that the EAL does not have is created or
/// probed.
pub(super) fn find(request: &Request) -> Result<(u16, bool), EthError> {
    let address = pci::address(&request.device);
    let device = address.as_ref().unwrap_or(&request.device);
    let name = c_string(device)?;
    let _alone = eal::one_at_a_time();
    // SAFETY: the EAL is running, and `name` is a C string.
    let port = || u16::try_from(unsafe { ffi::off_eth_find(name.as_ptr()) }).ok();
    // If the CPU cannot access the memory, the driver needs other arguments when the device is created.
    let memory = request.memory.as_ref().filter(|memory| !memory.is_mapped());
    if let Some(port) = port() {
        if let Some(memory) = memory {
            return Err(EthError::Device(format!(
                "{device} is there already, and its packets were to be in the memory of {}: leave it out of --eal",
                memory.device()
            )));
        }
        return match &request.args {
            Some(args) => Err(EthError::Device(format!(
                "{device} is there already, so args=[{args}] come too late: say them where it was made (--eal)"
            ))),
            None => Ok((port, false)),
        };
    }
    if let Some(address) = &address {
        pci::check(Path::new("/sys"), address).map_err(EthError::Device)?;
    }
    let args = match memory {
        None => request.args.clone(),
        Some(memory) => {
            let (address, given) = (address.as_deref(), request.args.as_deref());
            Some(direct::args(Path::new("/sys"), device, address, given, memory.device())?)
        }
    };
    let devargs = match &args {
        Some(args) => format!("{device},{args}"),
        None => device.clone(),
    };
    let devargs = c_string(&devargs)?;
    eal::forget();
    // SAFETY: the EAL is running, and `devargs` is a C string.
    let rc = unsafe { ffi::off_probe(devargs.as_ptr()) };
    let advice = match address.is_some() {
        true => {
            "bind it to vfio-pci (dpdk-devbind.py -b vfio-pci ADDRESS), as root; without an IOMMU add --iova-mode=pa"
        }
        false => {
            "expected a PCI address, or a virtual device as a driver's name and a number, such as net_null0, net_tap0, \
             or net_af_packet0 with args=[iface=eth0]"
        }
    };
    if rc < 0 {
        let what = format!("the EAL does not find or start {device}: {advice}");
        return Err(EthError::Dpdk { what, source: ffi::errno(rc), said: said() });
    }
    match port() {
        Some(port) => Ok((port, true)),
        None => Err(EthError::Device(format!("{device} is no network device of DPDK: {advice}{}", said()))),
    }
}

/// Returns DPDK's error messages, as the end of another message.
pub(super) fn said() -> String {
    let said = eal::said();
    if said.is_empty() { String::new() } else { format!("; DPDK says: {}", said.join("; ")) }
}

/// Returns the MTU to configure.
pub(super) fn mtu(request: &Request, info: &EthInfo) -> Result<u16, EthError> {
    let Some(mtu) = request.mtu else { return Ok(info.mtu) };
    // Virtual drivers do not report these limits.
    let max = if info.max_mtu == 0 { u16::MAX } else { info.max_mtu };
    if !(info.min_mtu..=max).contains(&mtu) {
        return Err(EthError::Device(format!("mtu={mtu}: the device takes {} to {max}", info.min_mtu)));
    }
    Ok(mtu)
}

pub(super) fn check_queues(request: &Request, info: &EthInfo) -> Result<(), EthError> {
    let most = info.max_rx_queues.min(info.max_tx_queues);
    if request.queues > most {
        let found = request.queues;
        return Err(EthError::Device(format!(
            "queues={found}: the device has {most}; a virtual one may get more by its args=[…]"
        )));
    }
    let ranges = [
        ("rx_desc", request.rx_desc, info.rx_desc_min, info.rx_desc_max),
        ("tx_desc", request.tx_desc, info.tx_desc_min, info.tx_desc_max),
    ];
    for (key, asked, min, max) in ranges {
        let max = if max == 0 { u16::MAX } else { max };
        if let Some(asked) = asked.filter(|asked| !(min..=max).contains(asked)) {
            return Err(EthError::Device(format!("{key}={asked}: the device takes {min} to {max}")));
        }
    }
    Ok(())
}

/// Returns the number of descriptors of a queue.
pub(super) fn descriptors(asked: Option<u16>, default: u16) -> u16 {
    asked.unwrap_or(if default == 0 { DESCRIPTORS } else { default })
}
