//! The link of a PCIe function, GPU or network card.

use offcore_stats::finding::Report;

use crate::doctor::Facts;
use crate::doctor::pci::PciFunction;

pub(super) fn link(facts: &Facts, function: &PciFunction, report: &mut Report) {
    let rule = report.check("pcie-link", &function.address).wants(
        "the link at the maximum of the function",
        "all packets outside GPU memory cross it, forwarded ones twice",
    );
    let link = &function.link;
    let (Some(generation), Some(width)) = (link.generation, link.width) else {
        let found = "the kernel does not report the link's speed and width";
        return rule.not_known(
            found,
            match facts.virtual_machine {
                true => "in a virtual machine, check on its host, or nvidia-smi -q under PCI for a GPU",
                false => "nvidia-smi -q shows it under PCI for a GPU, lspci -vv as root for others",
            },
        );
    };
    let now = words(generation, width);
    let most = (link.max_generation.unwrap_or(generation), link.max_width.unwrap_or(width));
    if generation >= most.0 && width >= most.1 {
        return rule.ok(format!("{now}, {:.1} GB/s each way", gigabytes(generation, width)));
    }
    let at_most = format!(
        "{now}, {:.1} GB/s; the function can do {}",
        gigabytes(generation, width),
        words(most.0, most.1)
    );
    rule.warning(
        at_most,
        match width < most.1 {
            true => {
                "put it into a slot of as many lanes; check riser, cable, and the firmware's bifurcation of the slot"
            }
            false => {
                "a GPU lowers the speed when it is idle: look again while it works (nvidia-smi -q, PCI). If it stays so, \
                 check the slot's generation, its link speed in the firmware, riser and cable"
            }
        },
    )
}

fn words(generation: u8, width: u8) -> String {
    format!("generation {generation}, {width} lanes")
}

/// Returns GB/s per direction after line coding, before headers.
fn gigabytes(generation: u8, width: u8) -> f64 {
    let lane = match generation {
        1 => 0.25,
        2 => 0.5,
        3 => 0.985,
        4 => 1.969,
        5 => 3.938,
        _ => 7.563,
    };
    lane * f64::from(width)
}

#[cfg(test)]
mod tests {
    use offcore_stats::finding::Verdict;

    use crate::doctor::fixture::{Fake, GPU};

    #[test]
    fn slow_link_is_a_warning_with_its_cause() {
        let fake = Fake::good();
        assert_eq!(fake.finding("pcie-link", GPU).found, "generation 5, 16 lanes, 63.0 GB/s each way");
        fake.set(&fake.gpu("current_link_speed"), "2.5 GT/s PCIe");
        let idle = fake.finding("pcie-link", GPU);
        assert!(idle.verdict == Verdict::Warning && idle.advice.contains("idle"), "{idle:?}");
        fake.set(&fake.gpu("current_link_width"), "8");
        let narrow = fake.finding("pcie-link", GPU);
        assert!(narrow.verdict == Verdict::Warning && narrow.advice.contains("slot"), "{narrow:?}");
    }

    #[test]
    fn unknown_link_is_no_warning() {
        let fake = Fake::good();
        fake.set(&fake.gpu("current_link_speed"), "Unknown");
        fake.set("proc/cpuinfo", "flags : fpu hypervisor\n");
        let finding = fake.finding("pcie-link", GPU);
        assert!(finding.verdict == Verdict::NotKnown && finding.advice.contains("host"), "{finding:?}");
    }
}
