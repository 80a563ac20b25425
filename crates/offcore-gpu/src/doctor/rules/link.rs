//! Link and settings of a PCIe function, GPU or network card.

use super::Rule;
use crate::doctor::pci::{ConfigSpace, PciFunction, PcieControl};
use crate::doctor::{Facts, Finding};

/// Expected MaxReadReq in bytes.
const READ_REQUEST: u32 = 4096;
/// Expected MaxPayload in bytes, if supported.
const PAYLOAD: u32 = 256;

pub(super) fn all(facts: &Facts, function: &PciFunction) -> [Finding; 3] {
    [link(facts, function), read_request(facts, function), payload(facts, function)]
}

fn link(facts: &Facts, function: &PciFunction) -> Finding {
    let rule = Rule::new(
        "pcie-link",
        &function.address,
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
    let port = (link.port_generation.unwrap_or(most.0), link.port_width.unwrap_or(most.1));
    if (generation, width) == most || generation >= most.0 && width >= most.1 {
        return rule.ok(format!("{now}, {:.1} GB/s each way", gigabytes(generation, width)));
    }
    let at_most = format!(
        "{now}, {:.1} GB/s; the function can do {}",
        gigabytes(generation, width),
        words(most.0, most.1)
    );
    let limited = (port.0 < most.0 && generation >= port.0) || (port.1 < most.1 && width >= port.1);
    if limited {
        let found = format!("{at_most}, the port above it {}", words(port.0, port.1));
        rule.warning(found, "put the card into a slot of more lanes or of a later generation")
    } else if width < most.1 {
        let advice = "reseat the card; check riser, cable, and the firmware's bifurcation of the slot";
        rule.warning(at_most, advice)
    } else {
        rule.warning(
            at_most,
            "a GPU lowers the speed when it is idle: look again while it works (nvidia-smi -q, PCI). If it stays so, \
             check the slot's link speed in the firmware, riser and cable",
        )
    }
}

fn words(generation: u8, width: u8) -> String {
    format!("generation {generation}, {width} lanes")
}

/// GB/s per direction after line coding, before headers.
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

/// Checks the settings, if readable.
fn settings(
    rule: Rule,
    facts: &Facts,
    function: &PciFunction,
    judge: impl FnOnce(Rule, &PcieControl) -> Finding,
) -> Finding {
    let address = &function.address;
    match &function.config {
        // A virtual function in a guest reads zeroes, which mean 128, in place of its card's settings.
        ConfigSpace::Known(PcieControl { max_payload: 128, max_read_request: 128, .. })
            if facts.virtual_machine =>
        {
            rule.not_known(
                "128 bytes, as a virtual function shows whatever its card has",
                "check the card on the virtual machine's host: lspci -vv as root, DevCtl",
            )
        }
        ConfigSpace::Known(control) => judge(rule, control),
        ConfigSpace::NoPcie => rule.not_applicable("it has no valid PCI Express capability"),
        ConfigSpace::HeaderOnly | ConfigSpace::Unreadable => rule.not_known(
            "its configuration space cannot be read without CAP_SYS_ADMIN",
            format!("run this as root, or lspci -vv -s {address} as root: DevCtl"),
        ),
    }
}

fn read_request(facts: &Facts, function: &PciFunction) -> Finding {
    let address = &function.address;
    let rule = Rule::new(
        "max-read-request",
        address,
        "MaxReadReq of 4096 bytes",
        "smaller ones need more requests per packet, each with a header and a round trip",
    );
    settings(rule, facts, function, |rule, control| {
        let found = format!("{} bytes", control.max_read_request);
        match control.max_read_request >= READ_REQUEST {
            true => rule.ok(found),
            false => rule.warning(
                found,
                format!("setpci -s {address} CAP_EXP+8.w=5000:7000 as root, after each boot"),
            ),
        }
    })
}

fn payload(facts: &Facts, function: &PciFunction) -> Finding {
    let rule = Rule::new(
        "max-payload",
        &function.address,
        "MaxPayload of 256 bytes where the function can",
        "each PCIe packet has 20 to 28 bytes of overhead: with 128 bytes of payload that is a sixth of the link",
    );
    settings(rule, facts, function, |rule, control| {
        let PcieControl { max_payload, max_payload_supported, .. } = control;
        let found = format!("{max_payload} bytes, {max_payload_supported} supported");
        match *max_payload >= PAYLOAD.min(*max_payload_supported) {
            true => rule.ok(found),
            false => rule.warning(
                found,
                "boot with pci=pcie_bus_safe on the kernel's command line, which sets the most that all on the way \
                 can",
            ),
        }
    })
}

#[cfg(test)]
mod tests {
    use crate::doctor::Verdict;
    use crate::doctor::fixture::{Fake, GPU, NIC, config_space};

    #[test]
    fn slow_link_is_a_warning_with_its_cause() {
        let fake = Fake::good("link-low");
        assert_eq!(fake.finding("pcie-link", GPU).found, "generation 5, 16 lanes, 63.0 GB/s each way");
        fake.set(&fake.gpu("current_link_speed"), "2.5 GT/s PCIe");
        let idle = fake.finding("pcie-link", GPU);
        assert!(idle.verdict == Verdict::Warning && idle.advice.contains("idle"), "{idle:?}");
        fake.set(&fake.gpu("current_link_width"), "8");
        let narrow = fake.finding("pcie-link", GPU);
        assert!(narrow.verdict == Verdict::Warning && narrow.advice.contains("seat"), "{narrow:?}");
    }

    #[test]
    fn slot_of_an_earlier_generation_is_named() {
        let fake = Fake::good("link-slot");
        fake.set("sys/bus/pci/devices/0000:02:01.0/max_link_speed", "16.0 GT/s PCIe");
        fake.set(&fake.nic("current_link_speed"), "16.0 GT/s PCIe");
        let finding = fake.finding("pcie-link", NIC);
        assert!(finding.found.ends_with("the port above it generation 4, 16 lanes"), "{finding:?}");
        assert!(finding.verdict == Verdict::Warning && finding.advice.contains("slot"), "{finding:?}");
    }

    #[test]
    fn unknown_link_is_no_warning() {
        let fake = Fake::good("link-unknown");
        fake.set(&fake.gpu("current_link_speed"), "Unknown");
        fake.set("proc/cpuinfo", "flags : fpu hypervisor\n");
        let finding = fake.finding("pcie-link", GPU);
        assert!(finding.verdict == Verdict::NotKnown && finding.advice.contains("host"), "{finding:?}");
    }

    #[test]
    fn small_read_requests_are_a_warning() {
        let fake = Fake::good("link-read");
        fake.set_bytes(&fake.nic("config"), &config_space(256, 512));
        let finding = fake.finding("max-read-request", NIC);
        assert_eq!((finding.verdict, finding.found.as_str()), (Verdict::Warning, "512 bytes"));
        assert!(finding.advice.starts_with("setpci -s 0000:04:00.0 CAP_EXP+8.w=5000:7000"), "{finding:?}");
        assert_eq!(fake.finding("max-read-request", GPU).verdict, Verdict::Ok);
    }

    #[test]
    fn small_payloads_are_a_warning() {
        let fake = Fake::good("link-payload");
        assert_eq!(fake.finding("max-payload", GPU).verdict, Verdict::Ok);
        fake.set_bytes(&fake.gpu("config"), &config_space(128, 4096));
        let finding = fake.finding("max-payload", GPU);
        assert_eq!((finding.verdict, finding.found.as_str()), (Verdict::Warning, "128 bytes, 512 supported"));
    }

    #[test]
    fn virtual_function_shows_no_settings() {
        let fake = Fake::good("link-virtual");
        fake.set_bytes(&fake.nic("config"), &config_space(128, 128));
        assert_eq!(fake.finding("max-read-request", NIC).verdict, Verdict::Warning);
        fake.set("proc/cpuinfo", "flags : hypervisor");
        let finding = fake.finding("max-read-request", NIC);
        assert!(finding.verdict == Verdict::NotKnown && finding.advice.contains("host"), "{finding:?}");
        fake.set(&fake.nic("vendor"), "0x1af4");
        let findings = fake.report().findings;
        assert!(findings.iter().all(|finding| finding.place != NIC || finding.check != "max-read-request"));
    }

    #[test]
    fn unreadable_config_space_claims_nothing() {
        let fake = Fake::good("link-rights");
        fake.set_bytes(&fake.gpu("config"), &config_space(128, 128)[..64]);
        for check in ["max-read-request", "max-payload"] {
            let finding = fake.finding(check, GPU);
            assert!(finding.verdict == Verdict::NotKnown && finding.advice.contains("root"), "{finding:?}");
        }
    }
}
