//! The machine: presence of a GPU, driver, device files, CUDA, versions, memory.

use offcore_stats::finding::Report;

use super::{SYSTEM, bytes};
use crate::doctor::cuda::words;
use crate::doctor::facts::{GpuFacts, LockedMemory};
use crate::doctor::{Facts, Given};

pub(super) fn gpu(facts: &Facts, given: &Given, report: &mut Report) {
    let rule = report.check("gpu", SYSTEM).wants(
        "an NVIDIA GPU on the PCI bus",
        "kernels are for CUDA; everything else goes to the stand-in on the processor's cores",
    );
    let name = |gpu: &GpuFacts| {
        let model = gpu.model.clone().unwrap_or_else(|| format!("device {:#06x}", gpu.function.device));
        format!("{} ({model})", gpu.function.address)
    };
    let shown = facts.cuda.as_ref().map_or(0, |cuda| cuda.devices.len());
    match (&facts.gpus[..], shown) {
        ([], 0) => rule.problem(
            "no function of vendor 10de and class 03 under /sys/bus/pci/devices",
            match given.has_host_device {
                true => {
                    "use the device host, which runs the same kernels on threads; in a virtual machine or container, \
                     pass a GPU to it; otherwise check lspci -d 10de:"
                }
                false => {
                    "the workload cpu needs no device; in a virtual machine or container, pass a GPU to it; \
                     otherwise check lspci -d 10de:"
                }
            },
        ),
        ([], devices) => rule.not_known(
            format!("CUDA has {devices} devices, of which none is under /sys/bus/pci/devices"),
            "check links and distances on the host: this system does not expose them",
        ),
        (gpus, _) => rule.ok(gpus.iter().map(name).collect::<Vec<_>>().join(", ")),
    }
}

pub(super) fn host_device(given: &Given, report: &mut Report) {
    let rule = report.check("host-device", SYSTEM).wants(
        "a build with the device host",
        "it runs the kernels on threads, to check results and pipelines without a GPU",
    );
    if given.has_host_device {
        rule.ok("the device host is there")
    } else {
        let advice = "install a C++ compiler (apt-get install g++) and build again";
        rule.warning("the device host is absent: there was no C++ compiler at the build", advice)
    }
}

pub(super) fn kernel_driver(facts: &Facts, report: &mut Report) {
    let rule = report
        .check("kernel-driver", SYSTEM)
        .wants("NVIDIA's kernel driver", "CUDA is a library on top of it, of the same version");
    match &facts.driver {
        Some(driver) => {
            let kind = if driver.open { "open source" } else { "closed source, or does not say" };
            match &driver.version {
                Some(version) => rule.ok(format!("version {version}, {kind}")),
                None => rule.not_known("/proc/driver/nvidia/version names no version", "nvidia-smi"),
            }
        }
        None if facts.cuda.is_some() => rule.ok("CUDA works, though there is no /proc/driver/nvidia/version"),
        None => rule.problem(
            "there is no /proc/driver/nvidia/version: the module nvidia is not loaded",
            "modprobe nvidia; if there is none, install the driver (Debian: nvidia-open-kernel-dkms and \
             nvidia-driver, Ubuntu: nvidia-driver-VERSION-open) and take nouveau away; in a container, run it with \
             the host's driver (docker run --gpus all)",
        ),
    }
}

pub(super) fn device_files(facts: &Facts, report: &mut Report) {
    let rule = report.check("device-files", SYSTEM).wants(
        "/dev/nvidiactl, /dev/nvidia-uvm and a /dev/nvidiaN for each GPU, for reading and writing",
        "CUDA speaks with the kernel driver through them",
    );
    if facts.driver.is_none() && facts.cuda.is_none() {
        return rule.not_applicable("the kernel driver comes first");
    }
    let minors = facts.gpus.iter().filter_map(|gpu| gpu.minor).map(|minor| format!("/dev/nvidia{minor}"));
    let wanted = ["/dev/nvidiactl".into(), "/dev/nvidia-uvm".into()].into_iter().chain(minors);
    let (mut missing, mut closed, mut open) = (vec![], vec![], vec![]);
    for path in wanted {
        match facts.device_file(&path) {
            None => missing.push(path),
            Some(file) if !file.usable => closed.push(format!("{path} ({})", file.access)),
            Some(_) => open.push(path),
        }
    }
    if facts.cuda.is_some() && !(missing.is_empty() && closed.is_empty()) {
        rule.ok("CUDA works with the device files that it has")
    } else if !closed.is_empty() {
        rule.problem(
            format!("not for us: {}", closed.join(", ")),
            "chmod a+rw, or NVreg_DeviceFileMode=0666 as an option of the module nvidia",
        )
    } else if !missing.is_empty() {
        rule.warning(
            format!("not there: {}; CUDA makes them where nvidia-modprobe is installed", missing.join(", ")),
            "nvidia-modprobe -u -c 0 as root, or nvidia-smi; in a container, docker run --gpus all",
        )
    } else {
        rule.ok(open.join(", "))
    }
}

pub(super) fn cuda(facts: &Facts, given: &Given, report: &mut Report) {
    let rule = report
        .check("cuda", SYSTEM)
        .wants("a CUDA driver that answers", "only it knows a device's memory, capabilities and limits");
    match (&facts.cuda, &given.cuda_error) {
        (Some(cuda), _) => {
            let found = format!("CUDA {}, devices: {}", words(cuda.driver_version), cuda.devices.len());
            match cuda.devices.is_empty() {
                false => rule.ok(found),
                true => rule.problem(found, "check CUDA_VISIBLE_DEVICES, and dmesg for lines with NVRM"),
            }
        }
        // Already reported.
        (None, Some(error)) if facts.driver.is_none() => {
            rule.not_applicable(format!("{error}; the kernel driver comes first"))
        }
        (None, Some(error)) => rule.problem(
            format!("it did not start: {error}"),
            "correct what else is found here; dmesg | grep NVRM says what the kernel driver thinks",
        ),
        (None, None) => rule.not_known(
            "it was not asked",
            "run offcore gpu doctor on the machine itself, with the CUDA driver's library",
        ),
    }
}

pub(super) fn ptx(facts: &Facts, report: &mut Report) {
    let wanted = match facts.ptx.and_then(|ptx| Some((ptx, ptx.needs_cuda()?))) {
        Some((ptx, needs)) => {
            format!("a driver with CUDA {} for PTX {}.{}", words(needs), ptx.version.0, ptx.version.1)
        }
        None => "a driver that reads the kernels' PTX".into(),
    };
    let why = "a driver refuses PTX that is newer than itself (CUDA_ERROR_UNSUPPORTED_PTX_VERSION)";
    let rule = report.check("ptx-version", SYSTEM).wants(wanted, why);
    let Some(ptx) = facts.ptx else { return rule.not_applicable("there is no PTX to be judged") };
    let Some(needs) = ptx.needs_cuda() else {
        let found = format!("PTX version {}.{}, of which it is not known", ptx.version.0, ptx.version.1);
        return rule.not_known(found, "load the kernels: the driver says whether it reads them");
    };
    let Some(cuda) = &facts.cuda else {
        return rule.not_known("the driver's CUDA version is not known", "nvidia-smi shows it");
    };
    let found = format!("the driver has CUDA {}", words(cuda.driver_version));
    match cuda.driver_version >= needs {
        true => rule.ok(found),
        false => rule.problem(
            found,
            "install a later driver, or rebuild the kernels with an older compiler: cargo xtask kernels",
        ),
    }
}

pub(super) fn locked_memory(facts: &Facts, given: &Given, report: &mut Report) {
    let rule = report.check("locked-memory", SYSTEM).wants(
        match given.pool_bytes {
            0 => "a limit on locked memory that the pool fits in".into(),
            pool => format!("a limit on locked memory of at least {}, the pool", bytes(pool)),
        },
        "AF_XDP, vfio and verbs count the pool's pages against it when they pin them for a network card",
    );
    match facts.locked_memory {
        Some(LockedMemory::Unlimited) => rule.ok("there is no limit"),
        Some(LockedMemory::Bytes(limit)) if given.pool_bytes <= limit => {
            rule.ok(format!("the limit is {}", bytes(limit)))
        }
        Some(LockedMemory::Bytes(limit)) if facts.may_lock_all => {
            rule.ok(format!("the limit is {}, and does not hold with CAP_IPC_LOCK", bytes(limit)))
        }
        Some(LockedMemory::Bytes(limit)) => rule.warning(
            format!("the limit is {}", bytes(limit)),
            "ulimit -l unlimited, LimitMEMLOCK=infinity for a service, docker run --ulimit memlock=-1, or a line \
             'USER - memlock unlimited' in /etc/security/limits.conf",
        ),
        None => rule.not_known("/proc/self/limits does not tell it", "ulimit -l shows it in KiB"),
    }
}

#[cfg(test)]
mod tests;
