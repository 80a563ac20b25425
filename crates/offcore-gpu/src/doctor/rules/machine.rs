//! The machine: presence of a GPU, driver, device files, libraries, versions, memory.

use super::{Rule, SYSTEM, bytes};
use crate::doctor::cuda::{cuda_of_driver, words};
use crate::doctor::facts::{Gpu, Hugepages};
use crate::doctor::{Facts, Finding, Given, LockedMemory};

/// The path of the kernel driver's own library, for programs that deliberately use another.
const COMPATIBLE: &str = "compat";

pub(super) fn gpu(facts: &Facts, given: &Given) -> Finding {
    let rule = Rule::new(
        "gpu",
        SYSTEM,
        "an NVIDIA GPU on the PCI bus",
        "kernels are for CUDA; everything else goes to the stand-in on the processor's cores",
    );
    let name = |gpu: &Gpu| {
        let model = gpu.model.clone().unwrap_or_else(|| format!("device {:#06x}", gpu.function.device));
        format!("{} ({model})", gpu.function.address)
    };
    let shown = facts.cuda.as_ref().map_or(0, |cuda| cuda.devices.len());
    match (&facts.gpus[..], shown) {
        ([], 0) => rule.problem(
            "no function of vendor 10de and class 03 under /sys/bus/pci/devices",
            match given.has_host_device {
                true => {
                    "use --device host, which runs the same kernels on threads; in a virtual machine or container, \
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

pub(super) fn host_device(given: &Given) -> Finding {
    let rule = Rule::new(
        "host-device",
        SYSTEM,
        "a build with --device host",
        "it runs the kernels on threads, to check results and pipelines without a GPU",
    );
    if given.has_host_device {
        rule.ok("--device host is there")
    } else {
        let advice = "install a C++ compiler (apt-get install g++) and build again";
        rule.warning("--device host is absent: there was no C++ compiler at the build", advice)
    }
}

pub(super) fn kernel_driver(facts: &Facts) -> Finding {
    let rule = Rule::new(
        "kernel-driver",
        SYSTEM,
        "NVIDIA's kernel driver",
        "CUDA is a library on top of it, of the same version",
    );
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

pub(super) fn uvm(facts: &Facts) -> Finding {
    let rule =
        Rule::new("uvm-module", SYSTEM, "the module nvidia_uvm", "CUDA opens /dev/nvidia-uvm when it starts");
    if facts.has_module("nvidia_uvm") {
        rule.ok("it is loaded")
    } else if facts.cuda.is_some() {
        rule.ok("CUDA works, though /sys/module/nvidia_uvm is not there")
    } else if facts.driver.is_none() {
        rule.not_applicable("the kernel driver comes first")
    } else {
        let found = "it is not loaded; CUDA loads it where nvidia-modprobe is installed";
        rule.warning(found, "modprobe nvidia_uvm, or nvidia-modprobe -u -c 0 as root")
    }
}

pub(super) fn device_files(facts: &Facts) -> Finding {
    let rule = Rule::new(
        "device-files",
        SYSTEM,
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

pub(super) fn libcuda(facts: &Facts, given: &Given) -> Finding {
    let rule = Rule::new(
        "libcuda",
        SYSTEM,
        "libcuda of the kernel driver's version",
        "it is loaded when the program runs; one of another version does not start (error 803)",
    );
    let Some(library) = &facts.libcuda else {
        return match (&facts.cuda, &facts.driver) {
            (Some(_), _) => rule.ok("it is loaded, from a place that was not looked at"),
            (None, None) => rule.not_applicable("the kernel driver comes first"),
            (None, Some(_)) => rule.problem(
                "no libcuda.so in CUDA_PATH_L, in LD_LIBRARY_PATH or in the usual places",
                "install the driver's library (Debian: libcuda1, Ubuntu: libnvidia-compute-VERSION), or set \
                 CUDA_PATH_L to its directory; ldconfig -p | grep libcuda shows others",
            ),
        };
    };
    let path = library.path.display();
    let version = library.version.as_deref();
    let driver = facts.driver.as_ref().and_then(|driver| driver.version.as_deref());
    let on_purpose = library.path.components().any(|part| part.as_os_str() == COMPATIBLE);
    if let (Some(version), Some(driver)) = (version, driver)
        && version != driver
        && !on_purpose
        && facts.cuda.is_none()
    {
        return rule.problem(
            format!("{path} is of version {version}, the kernel driver of {driver}"),
            "boot, or unload and load the modules nvidia_uvm and nvidia, after the driver was updated; in a \
             container, take the host's library",
        );
    }
    if let Some(asked) = given.cuda_path.as_deref().filter(|asked| !library.path.starts_with(asked)) {
        return rule.warning(
            format!("there is none in {} (CUDA_PATH_L), but {path}", asked.display()),
            "correct CUDA_PATH_L, or unset it",
        );
    }
    rule.ok(match version {
        Some(version) => format!("{path}, version {version}"),
        None => format!("{path}"),
    })
}

pub(super) fn cuda(facts: &Facts, given: &Given) -> Finding {
    let rule = Rule::new(
        "cuda",
        SYSTEM,
        "a CUDA driver that answers",
        "only it knows a device's memory, capabilities and limits",
    );
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
        (None, Some(error)) if facts.libcuda.is_none() => {
            rule.not_applicable(format!("{error}; libcuda comes first"))
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

pub(super) fn ptx(facts: &Facts) -> Finding {
    let wanted = match facts.ptx.and_then(|ptx| Some((ptx, ptx.needs_cuda()?))) {
        Some((ptx, needs)) => {
            format!("a driver with CUDA {} for PTX {}.{}", words(needs), ptx.version.0, ptx.version.1)
        }
        None => "a driver that reads the kernels' PTX".into(),
    };
    let why = "a driver refuses PTX that is newer than itself (CUDA_ERROR_UNSUPPORTED_PTX_VERSION)";
    let rule = Rule::new("ptx-version", SYSTEM, wanted, why);
    let Some(ptx) = facts.ptx else { return rule.not_applicable("there is no PTX to be judged") };
    let Some(needs) = ptx.needs_cuda() else {
        let found = format!("PTX version {}.{}, of which it is not known", ptx.version.0, ptx.version.1);
        return rule.not_known(found, "load the kernels: the driver says whether it reads them");
    };
    let of_driver = || cuda_of_driver(facts.driver.as_ref()?.version.as_deref()?);
    let (has, exact) = match &facts.cuda {
        Some(cuda) => (cuda.driver_version, true),
        None => match of_driver() {
            Some(known) => known,
            None => return rule.not_known("the driver's CUDA version is not known", "nvidia-smi shows it"),
        },
    };
    if has >= needs {
        rule.ok(format!("the driver has CUDA {}{}", words(has), if exact { "" } else { " or later" }))
    } else if exact {
        rule.problem(
            format!("the driver has CUDA {}", words(has)),
            "install a later driver, or rebuild the kernels with an older compiler: cargo xtask kernels",
        )
    } else {
        rule.not_known(
            format!("the driver's branch is later than those known here: CUDA {} or later", words(has)),
            "nvidia-smi shows the driver's CUDA version",
        )
    }
}

pub(super) fn hugepages(facts: &Facts, given: &Given) -> Finding {
    let rule = Rule::new(
        "hugepages",
        SYSTEM,
        match given.pool_bytes {
            0 => "free hugepages".into(),
            pool => format!("free hugepages for a pool of {}", bytes(pool)),
        },
        "a pool of 4 KiB pages takes long to be registered, and devices translate every page",
    );
    let free = |pages: &Hugepages| pages.bytes.saturating_mul(pages.free);
    let reserved: Vec<String> = facts
        .hugepages
        .iter()
        .filter(|pages| pages.total > 0)
        .map(|pages| format!("{} of {} pages of {} free", pages.free, pages.total, bytes(pages.bytes)))
        .collect();
    let most = facts.hugepages.iter().map(free).max().unwrap_or(0);
    if most > 0 && most >= given.pool_bytes {
        return rule.ok(reserved.join(", "));
    }
    let pages = given.pool_bytes.div_ceil(2 << 20).max(512);
    let advice = format!("echo {pages} > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
    match reserved.is_empty() {
        true => rule.warning("none are reserved", advice),
        false => rule.warning(reserved.join(", "), advice),
    }
}

pub(super) fn locked_memory(facts: &Facts, given: &Given) -> Finding {
    let rule = Rule::new(
        "locked-memory",
        SYSTEM,
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
        None => rule.not_known("the limit was not asked for", "ulimit -l shows it in KiB"),
    }
}

/// Maximum bytes per call of cuMemHostRegister: 16 bytes of bookkeeping per 4 KiB page must fit in 2 GiB.
const MOST_AT_ONCE: u64 = 512 << 30;

pub(super) fn registration(given: &Given) -> Finding {
    let rule = Rule::new(
        "registration",
        SYSTEM,
        "a pool of less than 512 GiB",
        "drivers from R580 on register less than that in a call, at about 0.1 s for each GiB of 4 KiB pages",
    );
    match given.pool_bytes {
        0 => rule.not_applicable("there is no pool yet"),
        pool if pool < MOST_AT_ONCE => rule.ok(format!("the pool has {}", bytes(pool))),
        pool => rule.warning(
            format!("the pool has {}", bytes(pool)),
            "take a smaller pool (--mbufs): one that the driver does not register is no GPU's",
        ),
    }
}

#[cfg(test)]
mod tests;
