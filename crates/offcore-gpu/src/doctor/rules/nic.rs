//! A network card: MTU, pause frames, compressed completions.

use super::Rule;
use crate::doctor::facts::{Interface, Nic};
use crate::doctor::{Finding, Given, Verdict};

/// Bytes of an Ethernet header.
const HEADER: usize = 14;

/// A requested card or interface that does not exist.
pub(super) fn missing(name: &str) -> Finding {
    let rule = Rule::new(
        "nic",
        name,
        "a network card on the PCI bus, or a network interface",
        "it was asked for: where it lies to the GPU and what frames it takes is to be judged",
    );
    rule.problem(
        "neither a network card under /sys/bus/pci/devices nor an interface under /sys/class/net",
        "offcore port list shows what is there; /sys shows the interfaces of the network namespace that it was \
         mounted in",
    )
}

pub(super) fn mtu(interface: &Interface, given: &Given) -> Finding {
    let needed = given.frame_bytes.saturating_sub(HEADER);
    let rule = Rule::new(
        "mtu",
        &interface.name,
        format!("an MTU of at least {needed} bytes, for frames of {} with their header", given.frame_bytes),
        "the card drops longer frames, and the port refuses to send them",
    );
    let name = &interface.name;
    match interface.mtu {
        Some(mtu) if mtu as usize >= needed => rule.ok(format!("{mtu} bytes")),
        Some(mtu) => {
            let advice =
                format!("ip link set {name} mtu {needed}, and the same at the peer and the switch between");
            // An unrequested interface may serve another purpose.
            let verdict = if given.nics.is_empty() { Verdict::Warning } else { Verdict::Problem };
            rule.judge(verdict, format!("{mtu} bytes"), advice)
        }
        None => rule.not_known("/sys does not tell it", format!("ip link show {name}")),
    }
}

pub(super) fn pause_frames(nic: &Nic, interface: &Interface) -> Finding {
    let name = &interface.name;
    let rule = Rule::new(
        "pause-frames",
        name,
        "pause frames off while something is measured",
        "with them a slow pipeline stops the sender: nothing is dropped, and the rate is the slowest receiver's",
    );
    if nic.function.driver.as_deref() == Some("virtio-pci") {
        return rule.not_applicable("a virtio card has none");
    }
    let advice = format!("ethtool -a {name} shows them, ethtool -A {name} rx off tx off turns them off");
    rule.not_known("files do not tell them", advice)
}

/// Of the cards that have it.
pub(super) fn cqe_compression(nic: &Nic) -> Option<Finding> {
    let address = &nic.function.address;
    let rule = Rule::new(
        "cqe-compression",
        address,
        "CQE_COMPRESSION set to AGGRESSIVE (1) for small frames",
        "a completion of 64 bytes for each packet of 64 bytes fills the PCIe link before the wire is full",
    );
    let interface = nic.interfaces.first().map_or("INTERFACE", |interface| &interface.name);
    nic.mlx5.then(|| {
        let advice = format!(
            "mlxconfig -d {address} query | grep CQE_COMPRESSION (NVIDIA's mstflint: mstconfig) shows it, set \
             CQE_COMPRESSION=1 and a boot change it; ethtool --show-priv-flags {interface} shows rx_cqe_compress"
        );
        rule.not_known("only the card's firmware tools tell it", advice)
    })
}

#[cfg(test)]
mod tests {
    use crate::doctor::Verdict;
    use crate::doctor::fixture::{Fake, NIC};

    #[test]
    fn small_mtu_is_a_problem_of_the_named_card() {
        let mut fake = Fake::good("nic-mtu");
        assert_eq!(fake.finding("mtu", "eth0").verdict, Verdict::Ok);
        fake.given.frame_bytes = 1515;
        assert_eq!(fake.finding("mtu", "eth0").verdict, Verdict::Warning);
        fake.given.nics = vec!["eth0".into()];
        let finding = fake.finding("mtu", "eth0");
        assert_eq!((finding.verdict, finding.found.as_str()), (Verdict::Problem, "1500 bytes"));
        assert!(finding.advice.starts_with("ip link set eth0 mtu 1501"), "{finding:?}");
        fake.set(&fake.nic("net/eth0/mtu"), "lots");
        assert_eq!(fake.finding("mtu", "eth0").verdict, Verdict::NotKnown);
        fake.given.frame_bytes = 0;
        fake.set(&fake.nic("net/eth0/mtu"), "0");
        assert_eq!(fake.finding("mtu", "eth0").verdict, Verdict::Ok);
    }

    #[test]
    fn interface_without_card_has_its_mtu_checked() {
        let mut fake = Fake::good("nic-others");
        fake.set("sys/class/net/veth0/mtu", "1400");
        fake.given.nics = vec!["veth0".into(), "../veth0".into(), "0000:04:00.0".into()];
        assert_eq!(fake.finding("mtu", "veth0").verdict, Verdict::Problem);
        let missing = fake.finding("nic", "../veth0");
        assert!(missing.verdict == Verdict::Problem && missing.advice.contains("port list"), "{missing:?}");
        assert_eq!(fake.report().findings.iter().filter(|finding| finding.check == "nic").count(), 1);
    }

    #[test]
    fn unknown_settings_name_the_command() {
        let fake = Fake::good("nic-unknown");
        let pause = fake.finding("pause-frames", "eth0");
        assert!(pause.verdict == Verdict::NotKnown && pause.advice.contains("ethtool -a eth0"), "{pause:?}");
        let cqe = fake.finding("cqe-compression", NIC);
        assert!(cqe.advice.contains("mlxconfig -d 0000:04:00.0"), "{cqe:?}");
    }

    #[test]
    fn cqe_and_pause_rules_depend_on_the_driver() {
        let fake = Fake::good("nic-virtio");
        fake.link(&fake.nic("driver"), "/sys/bus/pci/drivers/virtio-pci");
        assert_eq!(fake.finding("pause-frames", "eth0").verdict, Verdict::NotApplicable);
        assert!(fake.report().findings.iter().all(|finding| finding.check != "cqe-compression"));
    }
}
