//! A GPU: its driver, CUDA's view of it, its memory BAR, its IOMMU group.

use offcore_stats::finding::Report;

use super::bytes;
use crate::doctor::Facts;
use crate::doctor::facts::GpuFacts;

pub(super) fn driver(facts: &Facts, gpu: &GpuFacts, report: &mut Report) {
    let address = &gpu.function.address;
    let rule = report
        .check("driver-binding", address)
        .wants("the driver nvidia", "CUDA sees only the GPUs that NVIDIA's own driver has");
    match gpu.function.driver.as_deref() {
        Some("nvidia") => rule.ok("bound to nvidia"),
        Some("vfio-pci") => rule.problem(
            "bound to vfio-pci: it is meant for a virtual machine",
            format!(
                "echo {address} > /sys/bus/pci/drivers/vfio-pci/unbind; echo {address} > \
                 /sys/bus/pci/drivers/nvidia/bind"
            ),
        ),
        Some(other) => rule.problem(
            format!("bound to {other}"),
            format!("put 'blacklist {other}' into a file of /etc/modprobe.d, install NVIDIA's driver, and boot"),
        ),
        None if facts.driver.is_none() && facts.cuda.is_none() => {
            rule.not_applicable("bound to none: the kernel driver comes first")
        }
        None if facts.cuda.as_ref().is_some_and(|cuda| cuda.device(address).is_some()) => {
            rule.ok("CUDA has it, though the kernel shows no driver")
        }
        None => rule.problem(
            "bound to none: the driver is loaded and does not bind to it",
            "dmesg | grep NVRM says why: a GPU older or newer than the driver knows, or too little room for its \
             BARs (turn on 'Above 4G Decoding' in the firmware)",
        ),
    }
}

/// Checks CUDA's view of it, if CUDA was queried.
pub(super) fn cuda(facts: &Facts, gpu: &GpuFacts, report: &mut Report) {
    let Some(cuda) = &facts.cuda else { return };
    let rule = report.check("cuda-device", &gpu.function.address).wants(
        "a CUDA device",
        "the pool is registered with CUDA once; descriptors carry offsets, so its address at the GPU may be another",
    );
    let Some(device) = cuda.device(&gpu.function.address) else {
        let advice = "check CUDA_VISIBLE_DEVICES; in a container, the devices that it was given";
        return rule.warning("CUDA does not show it to this process", advice);
    };
    let (major, minor) = device.compute_capability;
    let memory = bytes(device.memory_bytes);
    let addresses = if device.host_pointers { "the same addresses as here" } else { "addresses of its own" };
    let name = &device.name;
    rule.ok(format!(
        "{name}, {memory} of memory, compute capability {major}.{minor}, {addresses} for a registered pool"
    ))
}

/// Checks that it can run the kernels' PTX, if both are known.
pub(super) fn target(facts: &Facts, gpu: &GpuFacts, report: &mut Report) {
    let device = facts.cuda.as_ref().and_then(|cuda| cuda.device(&gpu.function.address));
    let Some((ptx, device)) = facts.ptx.zip(device) else { return };
    let (major, minor) = ptx.target;
    let rule = report.check("ptx-target", &gpu.function.address).wants(
        format!("compute capability {major}.{minor} or later, the target of the kernels' PTX"),
        "PTX is compiled for later devices than its target when it is loaded, never for earlier ones",
    );
    let (has_major, has_minor) = device.compute_capability;
    let found = format!("compute capability {has_major}.{has_minor}");
    match device.compute_capability >= ptx.target {
        true => rule.ok(found),
        false => {
            rule.problem(found, "use a later GPU, or build the kernels for this one: cargo xtask kernels")
        }
    }
}

/// Checks that kernels have no time limit, if CUDA was queried.
pub(super) fn display(facts: &Facts, gpu: &GpuFacts, report: &mut Report) {
    let device = facts.cuda.as_ref().and_then(|cuda| cuda.device(&gpu.function.address));
    let Some(device) = device else { return };
    let rule = report.check("kernel-time", &gpu.function.address).wants(
        "no time limit on kernels",
        "kernels of workload types persistent and graph run as long as the program; with a limit they would be killed, and are \
         refused",
    );
    match device.kernel_timeout {
        false => rule.ok("there is none"),
        true => rule.warning(
            "the driver kills kernels that run for seconds: the GPU has a display",
            "use a GPU without a display, or stop the X server (systemctl isolate multi-user.target); workload type kernel \
             works as it is",
        ),
    }
}

/// The default BAR size; a larger one needs resizable BAR.
const LEAST_WINDOW: u64 = 256 << 20;

pub(super) fn window(facts: &Facts, gpu: &GpuFacts, report: &mut Report) {
    let address = &gpu.function.address;
    let rule = report.check("memory-window", address).wants(
        "a BAR as large as the GPU's memory",
        "the processor and network cards access the GPU's memory through it, up to its size",
    );
    let Some(bar) = &gpu.bar else {
        let advice = format!("lspci -vv -s {address} as root shows the BARs");
        return rule.not_known("its BARs cannot be read", advice);
    };
    let memory = facts.cuda.as_ref().and_then(|cuda| cuda.device(address)).map(|device| device.memory_bytes);
    let found = match memory {
        Some(memory) => format!("BAR {} has {}, the memory {}", bar.number, bytes(bar.bytes), bytes(memory)),
        None => format!("BAR {} has {}", bar.number, bytes(bar.bytes)),
    };
    if memory.map_or(bar.bytes > LEAST_WINDOW, |memory| bar.bytes >= memory) {
        return rule.ok(found);
    }
    rule.warning(
        found,
        "turn on 'Above 4G Decoding' and 'Resizable BAR' in the firmware, if it has them; else keep pools in GPU memory \
         smaller than the BAR",
    )
}

pub(super) fn iommu(facts: &Facts, gpu: &GpuFacts, report: &mut Report) {
    let rule = report.check("iommu", &gpu.function.address).wants(
        "no IOMMU, or one in passthrough mode",
        "with translation, traffic between a network card and a GPU goes through the processor",
    );
    let Some(group) = &gpu.function.iommu else { return rule.ok("no IOMMU group") };
    let number = group.number;
    match group.kind.as_deref() {
        Some("identity") => rule.ok(format!("group {number} is in passthrough mode")),
        Some(kind) if kind.starts_with("DMA") && !facts.virtual_machine => rule.warning(
            format!("group {number} translates ({kind})"),
            "boot with iommu=pt on the kernel's command line",
        ),
        Some(kind) => rule.not_applicable(format!("group {number} is of type {kind}")),
        None => {
            let advice = format!("cat /sys/kernel/iommu_groups/{number}/type as root");
            rule.not_known(format!("group {number}, of a type that cannot be read"), advice)
        }
    }
}

#[cfg(test)]
mod tests {
    use offcore_stats::finding::Verdict;

    use crate::doctor::fixture::{Fake, GPU};

    #[test]
    fn gpu_bound_elsewhere_is_a_problem() {
        let fake = Fake::good();
        assert_eq!(fake.finding("driver-binding", GPU).verdict, Verdict::Ok);
        for (driver, remedy) in [("vfio-pci", "unbind"), ("nouveau", "blacklist nouveau")] {
            fake.link(&fake.gpu("driver"), &format!("/sys/bus/pci/drivers/{driver}"));
            let finding = fake.finding("driver-binding", GPU);
            assert_eq!(finding.verdict, Verdict::Problem);
            assert!(finding.found.contains(driver) && finding.advice.contains(remedy), "{finding:?}");
        }
    }

    #[test]
    fn gpu_refused_by_the_driver_is_a_problem() {
        let mut fake = Fake::good();
        fake.remove(&fake.gpu("driver"));
        assert_eq!(fake.finding("driver-binding", GPU).verdict, Verdict::Ok, "CUDA has it");
        fake.given.cuda = None;
        let finding = fake.finding("driver-binding", GPU);
        assert_eq!(finding.verdict, Verdict::Problem);
        assert!(finding.advice.contains("NVRM"), "{finding:?}");
        fake.remove("proc/driver/nvidia/version");
        assert_eq!(fake.finding("driver-binding", GPU).verdict, Verdict::NotApplicable);
    }

    #[test]
    fn cuda_device_properties_are_reported() {
        let mut fake = Fake::good();
        fake.cuda().devices[0].host_pointers = false;
        let finding = fake.finding("cuda-device", GPU);
        assert!(finding.found.contains("139 GiB") && finding.found.contains("of its own"), "{finding:?}");
        fake.cuda().devices[0].address = "0000:FF:00.0".into();
        let finding = fake.finding("cuda-device", GPU);
        assert_eq!(finding.verdict, Verdict::Warning);
        assert!(finding.advice.contains("CUDA_VISIBLE_DEVICES"), "{finding:?}");
        fake.given.cuda = None;
        assert!(fake.report().1.findings.iter().all(|finding| finding.check != "cuda-device"));
    }

    #[test]
    fn gpu_older_than_the_ptx_is_a_problem() {
        let mut fake = Fake::good();
        assert_eq!(fake.finding("ptx-target", GPU).verdict, Verdict::Ok);
        fake.cuda().devices[0].compute_capability = (6, 1);
        let finding = fake.finding("ptx-target", GPU);
        assert_eq!((finding.verdict, finding.found.as_str()), (Verdict::Problem, "compute capability 6.1"));
    }

    #[test]
    fn limit_on_kernels_is_a_warning() {
        let mut fake = Fake::good();
        assert_eq!(fake.finding("kernel-time", GPU).verdict, Verdict::Ok);
        fake.cuda().devices[0].kernel_timeout = true;
        let finding = fake.finding("kernel-time", GPU);
        assert!(finding.verdict == Verdict::Warning && finding.found.contains("display"), "{finding:?}");
    }

    #[test]
    fn small_bar_is_a_warning() {
        let mut fake = Fake::good();
        let small = "0xf0000000 0xf0ffffff 0x40200\n0xe0000000 0xefffffff 0x14220c\n";
        fake.set(&fake.gpu("resource"), small);
        let finding = fake.finding("memory-window", GPU);
        assert_eq!(finding.found, "BAR 1 has 256 MiB, the memory 139 GiB");
        assert!(
            finding.verdict == Verdict::Warning && finding.advice.contains("Resizable BAR"),
            "{finding:?}"
        );
        fake.given.cuda = None;
        assert_eq!(fake.finding("memory-window", GPU).verdict, Verdict::Warning);
        fake.remove(&fake.gpu("resource"));
        assert_eq!(fake.finding("memory-window", GPU).verdict, Verdict::NotKnown);
    }

    #[test]
    fn translating_iommu_is_a_warning() {
        let fake = Fake::good();
        let kind = "sys/kernel/iommu_groups/7/type";
        fake.set(kind, "DMA-FQ\n");
        let finding = fake.finding("iommu", GPU);
        assert!(finding.verdict == Verdict::Warning && finding.advice.contains("iommu=pt"), "{finding:?}");
        fake.remove(kind);
        assert_eq!(fake.finding("iommu", GPU).verdict, Verdict::NotKnown);
        fake.remove(&fake.gpu("iommu_group"));
        assert_eq!(fake.finding("iommu", GPU).verdict, Verdict::Ok);
    }
}
