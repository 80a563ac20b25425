//! The expected state and the reasons: one small function per rule, from facts to a finding.
//!
//! * [`machine`]: driver, CUDA, memory; [`gpu`]: a GPU; [`link`]: any PCIe function,
//! * [`peer`]: access to a GPU's memory; [`near`]: the network cards next to a GPU.

mod gpu;
mod link;
mod machine;
mod near;
mod peer;

use offcore_stats::finding::Report;

use super::{Facts, Given};

/// The place of findings that belong to no device.
const SYSTEM: &str = "system";

/// Applies all rules.
pub(super) fn all(facts: &Facts, given: &Given) -> Report {
    let mut findings = Report::default();
    let report = &mut findings;
    machine::gpu(facts, given, report);
    machine::host_device(given, report);
    let has_gpu = !facts.gpus.is_empty() || facts.cuda.as_ref().is_some_and(|cuda| !cuda.devices.is_empty());
    if has_gpu {
        machine::kernel_driver(facts, report);
        machine::device_files(facts, report);
        machine::cuda(facts, given, report);
        machine::ptx(facts, report);
    }
    machine::locked_memory(facts, given, report);
    if has_gpu {
        peer::slots(facts, report);
        peer::gpudirect(facts, report);
    }
    for gpu in &facts.gpus {
        gpu::driver(facts, gpu, report);
        gpu::cuda(facts, gpu, report);
        gpu::target(facts, gpu, report);
        gpu::display(facts, gpu, report);
        gpu::window(facts, gpu, report);
        gpu::iommu(facts, gpu, report);
        link::link(facts, &gpu.function, report);
        near::numa_node(facts, gpu, report);
        near::common_bridge(facts, gpu, report);
    }
    for name in &facts.missing_nics {
        near::missing(name, report);
    }
    for nic in facts.nics.iter().filter(|nic| !nic.function.is_emulated()) {
        link::link(facts, &nic.function, report);
    }
    findings
}

/// Formats a size.
fn bytes(bytes: u64) -> String {
    match bytes {
        0x4000_0000.. => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
        0x10_0000.. => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        0x400.. => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{bytes} B"),
    }
    .replace(".0 ", " ")
}
