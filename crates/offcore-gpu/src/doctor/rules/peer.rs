//! Access to a GPU's memory from outside: by the processor through a mapped dma-buf, by network cards through GPUDirect
//! RDMA.

use offcore_stats::finding::Report;

use super::SYSTEM;
use crate::doctor::Facts;
use crate::doctor::cuda::{MAPS_DMA_BUF, words};

/// The first kernel version whose network cards import dma-bufs.
const IMPORTS_DMA_BUF: (u32, u32) = (5, 12);

/// Returns whether CUDA exports every device's memory as dma-buf, or `None` if it was not queried.
fn dma_buf(facts: &Facts) -> Option<bool> {
    let devices = &facts.cuda.as_ref()?.devices;
    Some(!devices.is_empty() && devices.iter().all(|device| device.dma_buf == Some(true)))
}

/// Reports the possible locations of a pipeline's slots.
pub(super) fn slots(facts: &Facts, report: &mut Report) {
    let rule = report.check("slots", SYSTEM).wants(
        "a driver that exports GPU memory as dma-bufs and lets the processor map them (CUDA 13.3)",
        "the processor then writes a ring's slots, which say where a burst's packets are, straight into GPU memory; in \
         pinned host memory the GPU looks for them over PCIe, a read of about 1 µs each time. Answers are in pinned \
         host memory in any case, and a run's notes say where its slots are",
    );
    let version = facts.cuda.as_ref().map_or(0, |cuda| cuda.driver_version);
    let newer = "a driver with CUDA 13.3 or later";
    match dma_buf(facts) {
        Some(true) if version >= MAPS_DMA_BUF => {
            rule.ok("the driver exports dma-bufs and lets them be mapped: slots go into GPU memory")
        }
        Some(true) => rule.warning(
            format!(
                "the driver is for CUDA {}, and does not allow mapping its dma-bufs: slots stay in pinned host memory",
                words(version)
            ),
            newer,
        ),
        Some(false) => rule.warning(
            "the driver does not export every GPU's memory: slots stay in pinned host memory there",
            format!(
                "NVIDIA's open-source kernel driver (GPUs from Turing on, Linux from 5.12 on), best {newer}"
            ),
        ),
        None => rule.not_known(
            "CUDA was not asked whether the driver exports dma-bufs",
            "query CUDA (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED), or check the notes of a run",
        ),
    }
}

pub(super) fn gpudirect(facts: &Facts, report: &mut Report) {
    let rule = report.check("gpudirect", SYSTEM).wants(
        "the module nvidia_peermem, or a driver that exports dma-bufs",
        "a network card can then put packets into GPU memory itself (GPUDirect RDMA) for memory direct, \
         which is untested and whose driver needs nvidia_peermem; otherwise it receives into host memory, from where \
         the GPU copies them",
    );
    if !facts.nics.iter().any(|nic| nic.mlx5) {
        return rule.not_applicable(
            "no network card under mlx5_core, the only ones that do it: a pool in GPU memory is filled by copies",
        );
    }
    let without =
        facts.cuda.iter().flat_map(|cuda| &cuda.devices).find(|gpu| gpu.gpudirect_rdma == Some(false));
    if let Some(device) = without {
        return rule.warning(
            format!("{} ({}) does not do it", device.address, device.name),
            "keep its pool in host memory; GPUs for data centres and workstations do it",
        );
    }
    for module in ["nvidia_peermem", "nv_peer_mem"] {
        if facts.has_module(module) {
            return rule.ok(format!("{module} is loaded"));
        }
    }
    let open = facts.driver.as_ref().is_some_and(|driver| driver.open);
    let advice = "modprobe nvidia-peermem for memory direct; nothing for the others. Programs that take dma-bufs: \
                  NVIDIA's open-source kernel driver (from version 515 on, GPUs from Turing on, Linux from 5.12 on)";
    match (dma_buf(facts), open && imports_dma_buf(facts)) {
        (Some(true), _) if imports_dma_buf(facts) => rule.ok("the driver exports dma-bufs"),
        (Some(true), _) => {
            let found =
                "the driver exports dma-bufs, and this kernel is too old for network cards to take them";
            rule.warning(found, advice)
        }
        (None, true) => rule.not_known(
            "nvidia_peermem is not loaded; the driver is of open source, which can export dma-bufs",
            "let CUDA be asked (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED), or modprobe nvidia-peermem",
        ),
        _ => rule.warning("nvidia_peermem is not loaded, and the driver exports no dma-bufs", advice),
    }
}

/// Returns whether this kernel's network cards import dma-bufs. If the release is unreadable, this is assumed.
fn imports_dma_buf(facts: &Facts) -> bool {
    let release = facts.kernel.as_deref().unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= IMPORTS_DMA_BUF,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use offcore_stats::finding::Verdict;

    use crate::doctor::fixture::Fake;

    #[test]
    fn slots_depend_on_dma_buf_mapping() {
        let mut fake = Fake::good();
        fake.cuda().driver_version = 13_030;
        assert_eq!(fake.finding("slots", "system").verdict, Verdict::Ok);
        fake.cuda().driver_version = 12_080;
        let finding = fake.finding("slots", "system");
        assert!(finding.verdict == Verdict::Warning && finding.found.contains("CUDA 12.8"), "{finding:?}");
        fake.cuda().devices[0].dma_buf = Some(false);
        let finding = fake.finding("slots", "system");
        assert!(
            finding.verdict == Verdict::Warning && finding.found.contains("pinned host memory"),
            "{finding:?}"
        );
        fake.given.cuda = None;
        assert_eq!(fake.finding("slots", "system").verdict, Verdict::NotKnown);
    }

    #[test]
    fn gpudirect_needs_peermem_or_dma_buf() {
        let mut fake = Fake::good();
        assert_eq!(fake.finding("gpudirect", "system").found, "nvidia_peermem is loaded");
        fake.remove("sys/module/nvidia_peermem");
        assert_eq!(fake.finding("gpudirect", "system").found, "the driver exports dma-bufs");
        fake.set("proc/sys/kernel/osrelease", "5.4.0-200");
        assert_eq!(fake.finding("gpudirect", "system").verdict, Verdict::Warning);
        fake.set("proc/sys/kernel/osrelease", "6.1.0");
        fake.cuda().devices[0].dma_buf = None;
        let finding = fake.finding("gpudirect", "system");
        assert!(
            finding.verdict == Verdict::Warning && finding.advice.contains("nvidia-peermem"),
            "{finding:?}"
        );
        fake.given.cuda = None;
        assert_eq!(fake.finding("gpudirect", "system").verdict, Verdict::NotKnown, "an open driver may");
        fake.set("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05");
        assert_eq!(fake.finding("gpudirect", "system").verdict, Verdict::Warning, "a closed one does not");
    }

    #[test]
    fn gpudirect_needs_gpu_and_card_support() {
        let mut fake = Fake::good();
        fake.cuda().devices[0].gpudirect_rdma = Some(false);
        let finding = fake.finding("gpudirect", "system");
        assert!(finding.verdict == Verdict::Warning && finding.found.contains("NVIDIA H200"), "{finding:?}");
        fake.link(&fake.nic("driver"), "/sys/bus/pci/drivers/ice");
        assert_eq!(fake.finding("gpudirect", "system").verdict, Verdict::NotApplicable);
    }
}
