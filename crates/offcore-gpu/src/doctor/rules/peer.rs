//! Who besides the GPU reaches its memory: the processor by GDRCopy or dma-buf, network cards by GPUDirect RDMA.

use super::{Rule, SYSTEM};
use crate::doctor::{Facts, Finding, Given};

/// The CUDA version from which on the driver lets a dma-buf of GPU memory be mapped.
const MAPS_DMA_BUF: u32 = 13_030;
/// The kernel version from which on network cards import dma-bufs.
const IMPORTS_DMA_BUF: (u32, u32) = (5, 12);

/// Whether CUDA exports every device's memory as dma-bufs; none where it was not asked.
fn dma_buf(facts: &Facts) -> Option<bool> {
    let devices = &facts.cuda.as_ref()?.devices;
    Some(!devices.is_empty() && devices.iter().all(|device| device.dma_buf == Some(true)))
}

pub(super) fn gdrcopy(facts: &Facts, given: &Given) -> Finding {
    let rule = Rule::new(
        "gdrcopy",
        SYSTEM,
        "the module gdrdrv with libgdrapi, or a driver that maps dma-bufs (CUDA 13.3)",
        "a processor can then write bursts straight into GPU memory, where the GPU looks for them; offcore gpu keeps \
         them in pinned host memory so far",
    );
    let module = facts.has_module("gdrdrv");
    let file = facts.device_file("/dev/gdrdrv");
    let library = facts.libgdrapi.as_ref().map(|library| library.path.display().to_string());
    if let (true, Some(file), Some(library)) = (module, file, &library)
        && file.usable
    {
        return match given.gdrcopy_path.as_deref() {
            Some(asked) if !std::path::Path::new(library).starts_with(asked) => rule.warning(
                format!("there is no libgdrapi in {} (GDRCOPY_PATH_L), but {library}", asked.display()),
                "correct GDRCOPY_PATH_L, or unset it",
            ),
            _ => rule.ok(format!("gdrdrv is loaded, {library}")),
        };
    }
    if dma_buf(facts) == Some(true)
        && facts.cuda.as_ref().is_some_and(|cuda| cuda.driver_version >= MAPS_DMA_BUF)
    {
        return rule.ok("the driver maps dma-bufs: gdrdrv is not needed");
    }
    let missing = [
        (!module).then(|| "gdrdrv is not loaded".to_owned()),
        file.filter(|file| !file.usable).map(|file| format!("/dev/gdrdrv is not for us ({})", file.access)),
        (module && file.is_none()).then(|| "there is no /dev/gdrdrv".to_owned()),
        library.is_none().then(|| "there is no libgdrapi".to_owned()),
    ];
    let missing = missing.into_iter().flatten().collect::<Vec<_>>().join(", ");
    rule.warning(
        format!(
            "{missing}: bursts stay in pinned host memory and the GPU looks for them over PCIe, a read of about 1 µs \
             each time"
        ),
        "nothing for offcore gpu; for programs that use it, install GDRCopy (github.com/NVIDIA/gdrcopy) and modprobe \
         gdrdrv, set GDRCOPY_PATH_L if libgdrapi is in no usual place; or a driver with CUDA 13.3 or later",
    )
}

pub(super) fn gpudirect(facts: &Facts) -> Finding {
    let rule = Rule::new(
        "gpudirect",
        SYSTEM,
        "the module nvidia_peermem, or a driver that exports dma-bufs",
        "a network card can then put packets into GPU memory itself (GPUDirect RDMA): offcore gpu --memory direct, which is \
         untested and whose driver needs nvidia_peermem; otherwise it receives into host memory, from where the GPU copies \
         them",
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
    let advice = "modprobe nvidia-peermem for offcore gpu --memory direct; nothing for the others. Programs that take dma-bufs: \
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

/// Whether the kernel is of a release whose network cards import dma-bufs; one that does not say is taken to be.
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
    use crate::doctor::Verdict;
    use crate::doctor::fixture::Fake;

    #[test]
    fn without_gdrdrv_the_fall_back_is_said() {
        let fake = Fake::good("peer-gdrdrv");
        assert_eq!(fake.finding("gdrcopy", "system").verdict, Verdict::Ok);
        fake.remove("sys/module/gdrdrv");
        let finding = fake.finding("gdrcopy", "system");
        assert_eq!(finding.verdict, Verdict::Warning);
        assert!(
            finding.found.contains("gdrdrv is not loaded: bursts stay in pinned host memory"),
            "{finding:?}"
        );
        assert!(finding.advice.contains("modprobe gdrdrv"), "{finding:?}");
    }

    #[test]
    fn each_missing_part_of_gdrcopy_is_named() {
        let mut fake = Fake::good("peer-parts");
        fake.remove("usr/lib/x86_64-linux-gnu/libgdrapi.so.2");
        assert!(fake.finding("gdrcopy", "system").found.starts_with("there is no libgdrapi:"));
        fake.remove("dev/gdrdrv");
        let found = fake.finding("gdrcopy", "system").found;
        assert!(found.starts_with("there is no /dev/gdrdrv, there is no libgdrapi:"), "{found}");
        fake.set("dev/gdrdrv", "");
        fake.set("usr/lib64/libgdrapi.so", "");
        fake.given.gdrcopy_path = Some("/opt/gdr".into());
        let finding = fake.finding("gdrcopy", "system");
        assert!(finding.found.contains("/opt/gdr (GDRCOPY_PATH_L)"), "{finding:?}");
    }

    #[test]
    fn a_driver_that_maps_dma_bufs_needs_no_gdrdrv() {
        let mut fake = Fake::good("peer-map");
        fake.remove("sys/module/gdrdrv");
        fake.cuda().driver_version = 13_030;
        assert_eq!(fake.finding("gdrcopy", "system").verdict, Verdict::Ok);
        fake.cuda().devices[0].dma_buf = Some(false);
        assert_eq!(fake.finding("gdrcopy", "system").verdict, Verdict::Warning);
    }

    #[test]
    fn gpudirect_needs_peermem_or_dma_buf() {
        let mut fake = Fake::good("peer-direct");
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
    fn gpudirect_needs_a_gpu_and_a_card_that_do_it() {
        let mut fake = Fake::good("peer-device");
        fake.cuda().devices[0].gpudirect_rdma = Some(false);
        let finding = fake.finding("gpudirect", "system");
        assert!(finding.verdict == Verdict::Warning && finding.found.contains("NVIDIA H200"), "{finding:?}");
        fake.link(&fake.nic("driver"), "/sys/bus/pci/drivers/ice");
        assert_eq!(fake.finding("gpudirect", "system").verdict, Verdict::NotApplicable);
    }
}
