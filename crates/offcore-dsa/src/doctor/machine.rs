//! Checks of the machine: PCI devices, kernel, IOMMU, processor, hugepages.

use std::process::Command;

use offcore_stats::finding::Report;

use super::System;
use crate::config::sysfs::SysfsDevice;

/// PCI device IDs of DSA devices (vendor 8086).
const GENERATIONS: [(&str, &str); 3] =
    [("0x0b25", "Sapphire Rapids"), ("0x11fb", "Granite Rapids"), ("0x1212", "Diamond Rapids")];

/// A DSA device on the PCI bus.
pub(super) struct PciDevice {
    address: String,
    generation: &'static str,
    driver: Option<String>,
}

/// Returns the DSA devices on the PCI bus.
pub(super) fn hardware(system: &System) -> Vec<PciDevice> {
    let mut found = Vec::new();
    for address in system.names("sys/bus/pci/devices") {
        let dir = format!("sys/bus/pci/devices/{address}");
        let id = system.read(&format!("{dir}/device")).unwrap_or_default();
        let intel = system.read(&format!("{dir}/vendor")).as_deref() == Some("0x8086");
        let Some((_, generation)) = GENERATIONS.iter().find(|(device, _)| intel && *device == id) else {
            continue;
        };
        let driver = std::fs::read_link(system.path(&format!("{dir}/driver"))).ok();
        let driver = driver.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        found.push(PciDevice { address, generation, driver });
    }
    found
}

/// Checks that the idxd driver has the devices that are on the PCI bus.
pub(super) fn devices(hardware: &[PciDevice], devices: &[SysfsDevice], system: &System, report: &mut Report) {
    let names: Vec<&str> = devices.iter().map(|device| device.config.name.as_str()).collect();
    for pci in hardware {
        let PciDevice { address, generation, driver } = pci;
        let what = format!("{address} ({generation})");
        match driver.as_deref() {
            Some("idxd") => report.check("driver-binding", address).ok(format!("{what} is bound to idxd")),
            Some("vfio-pci") => report.check("driver-binding", address).problem(
                format!(
                    "{what} is bound to vfio-pci: a process that opens it, such as DPDK, has the whole device"
                ),
                format!(
                    "echo {address} > /sys/bus/pci/drivers/vfio-pci/unbind; echo {address} > \
                     /sys/bus/pci/drivers/idxd/bind"
                ),
            ),
            other => report.check("driver-binding", address).problem(
                format!("{what} is bound to {}", other.unwrap_or("no driver")),
                "modprobe idxd (kernel option CONFIG_INTEL_IDXD)",
            ),
        }
    }
    let drivers = system.dsa.drivers();
    match ["idxd", "user"].map(|name| drivers.join(name).is_dir()) {
        [true, true] => {
            report.check("devices", "system").ok(format!("idxd is loaded and has {}", names.join(", ")));
        }
        // Linux before 5.15.
        _ if drivers.join("dsa").is_dir() => report.check("devices", "system").warning(
            "the kernel has the bus of Linux before 5.15, with one driver 'dsa' for everything",
            "use a kernel from 6.6 on",
        ),
        _ => report.check("devices", "system").problem(
            format!("{}: there are no drivers 'idxd' and 'user'", drivers.display()),
            "modprobe idxd (kernel option CONFIG_INTEL_IDXD)",
        ),
    }
}

/// Checks the kernel and the processor.
pub(super) fn examine(system: &System, hardware: &[PciDevice], devices: &[SysfsDevice], report: &mut Report) {
    let config = KernelConfig::of(system);
    command_line(system, &config, report);
    kernel_config(&config, report);
    iommu(system, report);
    denylist(system, hardware, report);
    instructions(system, report);
    hugepages(system, report);
    monitoring(system, devices, report);
}

fn command_line(system: &System, config: &KernelConfig, report: &mut Report) {
    const ADVICE: &str = "add intel_iommu=on,sm_on to the kernel's command line (GRUB_CMDLINE_LINUX in \
                          /etc/default/grub, then update-grub) and boot";
    let Some(line) = system.read("proc/cmdline") else {
        return report.check("kernel-command-line", "system").not_applicable("/proc/cmdline cannot be read");
    };
    let words: Vec<&str> = line.split_whitespace().collect();
    // intel_iommu may be given several times and accepts several values separated by commas. All values count; the last
    // of two contradictory values wins.
    let values = words.iter().filter_map(|word| word.strip_prefix("intel_iommu="));
    let values: Vec<&str> = values.flat_map(|values| values.split(',')).collect();
    // Without an option, the kernel's build configuration decides; `None` if it cannot be read.
    let switch = |on: &str, off: &str, default: &str| {
        let last = values.iter().rev().find(|value| [on, off].contains(value));
        last.map(|value| *value == on).or_else(|| config.source.as_ref().map(|_| config.is_set(default)))
    };
    let on = switch("on", "off", "INTEL_IOMMU_DEFAULT_ON");
    let scalable = switch("sm_on", "sm_off", "INTEL_IOMMU_SCALABLE_MODE_DEFAULT_ON");
    let said = if values.is_empty() {
        "intel_iommu is not given".into()
    } else {
        format!("intel_iommu={}", values.join(","))
    };
    let check = "kernel-command-line";
    if words.iter().any(|word| matches!(*word, "iommu=off" | "iommu=soft")) || on == Some(false) {
        report.check(check, "system").problem(format!("{said}: the IOMMU is off"), ADVICE);
    } else if scalable == Some(false) {
        let found = format!("{said}: scalable mode is off, so that there is no shared virtual memory");
        report.check(check, "system").problem(found, ADVICE);
    } else if on.is_none() || scalable.is_none() {
        let found = format!("{said}, and what the kernel was built to do without it cannot be read");
        report.check(check, "system").not_applicable(found);
    } else {
        report.check(check, "system").ok(format!("{said}: IOMMU and scalable mode are on"));
    }
}

/// Options that must be built in or modules; without them, some function is missing.
const NEEDED: [&str; 6] =
    ["INTEL_IDXD", "INTEL_IDXD_SVM", "INTEL_IOMMU", "INTEL_IOMMU_SVM", "PCI_PASID", "PCI_PRI"];

fn kernel_config(config: &KernelConfig, report: &mut Report) {
    let Some(source) = &config.source else {
        let found = "neither /boot/config-RELEASE nor /proc/config.gz can be read";
        return report.check("kernel-config", "system").not_applicable(found);
    };
    let missing: Vec<String> =
        NEEDED.iter().filter(|name| !config.is_set(name)).map(|name| format!("CONFIG_{name}")).collect();
    if missing.is_empty() {
        report.check("kernel-config", "system").ok(format!("{source} has what DSA needs"));
    } else {
        let found = format!("{source} is without {}", missing.join(", "));
        report.check("kernel-config", "system").problem(found, "use a kernel that is built with these");
    }
}

/// The build configuration of the kernel.
struct KernelConfig {
    text: String,
    source: Option<String>,
}

impl KernelConfig {
    fn of(system: &System) -> Self {
        let release = system.read("proc/sys/kernel/osrelease").unwrap_or_default();
        let path = format!("boot/config-{release}");
        if let Some(text) = system.read(&path) {
            return Self { text, source: Some(format!("/{path}")) };
        }
        let packed = system.path("proc/config.gz");
        if packed.exists()
            && let Ok(output) = Command::new("gzip").arg("-dc").arg(packed).output()
            && output.status.success()
        {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            return Self { text, source: Some("/proc/config.gz".into()) };
        }
        Self { text: String::new(), source: None }
    }

    fn is_set(&self, option: &str) -> bool {
        let mut values =
            self.text.lines().filter_map(|line| line.strip_prefix("CONFIG_")?.strip_prefix(option));
        values.any(|value| matches!(value, "=y" | "=m"))
    }
}

/// Bits of the VT-d extended capability register.
const PAGE_REQUESTS: u64 = 1 << 29;
const PASID: u64 = 1 << 40;
const SCALABLE_MODE: u64 = 1 << 43;

fn iommu(system: &System, report: &mut Report) {
    let units = system.names("sys/class/iommu");
    let intel: Vec<&String> = units.iter().filter(|name| name.starts_with("dmar")).collect();
    if intel.is_empty() {
        let advice = "turn VT-d on in the firmware, and boot with intel_iommu=on,sm_on";
        return report.check("iommu", "system").problem("no Intel IOMMU under /sys/class/iommu", advice);
    }
    let lacking = intel.iter().filter_map(|unit| {
        let text = system.read(&format!("sys/class/iommu/{unit}/intel-iommu/ecap"))?;
        let bits = u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()?;
        (bits & SCALABLE_MODE == 0 || bits & PASID == 0).then_some((unit, bits))
    });
    let lacking: Vec<_> = lacking.collect();
    match lacking.first() {
        // The units of slow devices lack it on every machine. It is an error only if all units lack it.
        Some((unit, bits)) if lacking.len() == intel.len() => {
            let what = if bits & PAGE_REQUESTS == 0 { "PASIDs or page requests" } else { "PASIDs" };
            let found = match lacking.len() {
                1 => format!("{unit} has no scalable mode with {what} (ecap {bits:#x})"),
                units => format!(
                    "none of {units} Intel IOMMU units has scalable mode with {what} ({unit}: ecap {bits:#x})"
                ),
            };
            let advice = "turn on scalable mode or SVM for VT-d in the firmware";
            report.check("iommu", "system").problem(found, advice);
        }
        _ => report.check("iommu", "system").ok(format!("{} Intel IOMMU units", intel.len())),
    }
}

/// Checks whether vfio-pci may use first-generation devices: recent kernels deny it (INTEL-SA-01084).
fn denylist(system: &System, hardware: &[PciDevice], report: &mut Report) {
    let check = "vfio-denylist";
    let first = hardware.iter().find(|device| device.generation == "Sapphire Rapids");
    match (first, system.read("sys/module/vfio_pci/parameters/disable_denylist").as_deref()) {
        (None, _) => report.check(check, "system").not_applicable("no first-generation device"),
        (_, None) => report.check(check, "system").not_applicable("vfio-pci is not loaded"),
        (_, Some("Y" | "1")) => report.check(check, "system").warning(
            "vfio-pci accepts first-generation devices (disable_denylist=1): a program with access to one can harm \
             the host",
            "only for programs that you trust: INTEL-SA-01084, CVE-2024-21823",
        ),
        _ => {
            let found = "vfio-pci does not accept first-generation devices: use them with idxd; DPDK as the owner of a \
                         whole device (dmadev:ADDRESS) needs vfio_pci.disable_denylist=1 on the kernel's command line";
            report.check(check, "system").ok(found);
        }
    }
}

/// Checks for the instructions that submit descriptors and wait for completions.
pub(super) fn instructions(system: &System, report: &mut Report) {
    let text = system.read("proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    let check = "cpu-instructions";
    let lacks = |flag: &str| !has(flag);
    if flags.is_empty() {
        report.check(check, "system").not_applicable("/proc/cpuinfo names no flags");
    } else if lacks("movdir64b") {
        let found = "the processor has no MOVDIR64B: descriptors can only go by write()";
        report
            .check(check, "system")
            .warning(found, "in a virtual machine, pass the host's processor model through");
    } else if lacks("enqcmd") {
        let found = "no ENQCMD (it is off without SVA): shared work queues can only be used by write()";
        report
            .check(check, "system")
            .warning(found, "boot with intel_iommu=on,sm_on, or use dedicated work queues");
    } else if lacks("waitpkg") {
        let found = "MOVDIR64B and ENQCMD, no UMWAIT: waiting takes the whole core";
        report.check(check, "system").warning(found, "in a virtual machine, pass waitpkg through");
    } else {
        report.check(check, "system").ok("MOVDIR64B, ENQCMD, UMWAIT");
    }
}

/// Checks whether hugepages are reserved.
pub(super) fn hugepages(system: &System, report: &mut Report) {
    let dir = "sys/kernel/mm/hugepages";
    let sizes = system.names(dir).into_iter().filter_map(|name| {
        let kilobytes: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let pages: u64 = system.read(&format!("{dir}/{name}/nr_hugepages"))?.parse().ok()?;
        (pages > 0).then(|| format!("{pages} of {} MiB", kilobytes >> 10))
    });
    let sizes: Vec<String> = sizes.collect();
    if sizes.is_empty() {
        let found = "no hugepages are reserved: the device translates every 4 KiB";
        let advice = "echo 512 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
        report.check("hugepages", "system").warning(found, advice);
    } else {
        report.check("hugepages", "system").ok(sizes.join(", "));
    }
}

fn monitoring(system: &System, devices: &[SysfsDevice], report: &mut Report) {
    let there = |device: &&SysfsDevice| {
        system.path(&format!("sys/bus/event_source/devices/{}", device.config.name)).is_dir()
    };
    if devices.is_empty() {
        return;
    }
    if devices.iter().all(|device| there(&device)) {
        let found = format!("perf stat -e {}/…/ counts events of the device", devices[0].config.name);
        report.check("perf-events", "system").ok(found);
    } else {
        let found = "the kernel has no events of the device for perf (CONFIG_INTEL_IDXD_PERFMON)";
        report.check("perf-events", "system").not_applicable(found);
    }
}
