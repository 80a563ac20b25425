//! The expected state and why: one small function per rule, from facts to a finding.
//!
//! * [`machine`]: driver, libraries, memory; [`gpu`]: a GPU; [`link`]: any PCIe function,
//! * [`peer`]: access to a GPU's memory; [`near`]: the network cards next to a GPU; [`nic`]: a network card.

mod gpu;
mod link;
mod machine;
mod near;
mod nic;
mod peer;

use super::{Facts, Finding, Given, Verdict};

/// Class and subclass of Ethernet cards.
const ETHERNET: u32 = 0x0200;

/// The place of findings that belong to no device.
const SYSTEM: &str = "system";

/// A rule, before its verdict.
struct Rule {
    check: &'static str,
    place: String,
    wanted: String,
    why: &'static str,
}

impl Rule {
    fn new(check: &'static str, place: &str, wanted: impl Into<String>, why: &'static str) -> Self {
        Self { check, place: place.into(), wanted: wanted.into(), why }
    }

    fn judge(self, verdict: Verdict, found: impl Into<String>, advice: impl Into<String>) -> Finding {
        let Self { check, place, wanted, why } = self;
        let (found, advice) = (found.into(), advice.into());
        Finding { check, place, verdict, found, wanted, why: why.into(), advice }
    }

    fn ok(self, found: impl Into<String>) -> Finding {
        self.judge(Verdict::Ok, found, "")
    }

    fn not_applicable(self, found: impl Into<String>) -> Finding {
        self.judge(Verdict::NotApplicable, found, "")
    }

    fn not_known(self, found: impl Into<String>, advice: impl Into<String>) -> Finding {
        self.judge(Verdict::NotKnown, found, advice)
    }

    fn warning(self, found: impl Into<String>, advice: impl Into<String>) -> Finding {
        self.judge(Verdict::Warning, found, advice)
    }

    fn problem(self, found: impl Into<String>, advice: impl Into<String>) -> Finding {
        self.judge(Verdict::Problem, found, advice)
    }
}

/// Applies all rules.
pub(super) fn all(facts: &Facts, given: &Given) -> Vec<Finding> {
    let mut findings = vec![machine::gpu(facts, given), machine::host_device(given)];
    let has_gpu = !facts.gpus.is_empty() || facts.cuda.as_ref().is_some_and(|cuda| !cuda.devices.is_empty());
    if has_gpu {
        findings.extend([
            machine::kernel_driver(facts),
            machine::uvm(facts),
            machine::device_files(facts),
            machine::libcuda(facts, given),
            machine::cuda(facts, given),
            machine::ptx(facts),
        ]);
    }
    findings.extend([machine::hugepages(facts, given), machine::locked_memory(facts, given)]);
    if has_gpu {
        findings.extend([
            machine::registration(given),
            peer::slots(facts),
            peer::gdrcopy(facts, given),
            peer::gpudirect(facts),
        ]);
    }
    for gpu in &facts.gpus {
        findings.push(gpu::driver(facts, gpu));
        findings.extend(gpu::cuda(facts, gpu));
        findings.extend(gpu::target(facts, gpu));
        findings.push(gpu::window(facts, gpu));
        findings.push(gpu::iommu(facts, gpu));
        findings.extend(link::all(facts, &gpu.function));
        findings.push(near::numa_node(facts, gpu));
        findings.push(near::common_bridge(facts, gpu));
    }
    findings.extend(facts.missing_nics.iter().map(|name| nic::missing(name)));
    findings.extend(facts.other_interfaces.iter().map(|interface| nic::mtu(interface, given)));
    for nic in &facts.nics {
        if !nic.function.is_emulated() {
            findings.extend(link::all(facts, &nic.function));
        }
        // An InfiniBand interface has no Ethernet frames.
        for interface in nic.interfaces.iter().filter(|_| nic.function.class >> 8 == ETHERNET) {
            findings.push(nic::mtu(interface, given));
            findings.push(nic::pause_frames(nic, interface));
        }
        findings.extend(nic::cqe_compression(nic));
    }
    findings
}

/// A size for people.
fn bytes(bytes: u64) -> String {
    match bytes {
        0x4000_0000.. => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
        0x10_0000.. => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        0x400.. => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{bytes} B"),
    }
    .replace(".0 ", " ")
}
