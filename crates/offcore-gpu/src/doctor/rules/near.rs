//! The network cards near a GPU. A single suitable card is enough, and it is the card to use.

use offcore_stats::finding::Report;

use crate::doctor::Facts;
use crate::doctor::facts::{GpuFacts, Meeting, PciPair};

fn pairs<'a>(facts: &'a Facts, gpu: &'a GpuFacts) -> impl Iterator<Item = &'a PciPair> {
    facts.pairs.iter().filter(|pair| pair.gpu == gpu.function.address)
}

pub(super) fn numa_node(facts: &Facts, gpu: &GpuFacts, report: &mut Report) {
    let rule = report.check("numa-node", &gpu.function.address).wants(
        "a network card on the GPU's NUMA node",
        "from another node each packet and each word of the handshake crosses the link between sockets",
    );
    if facts.numa_nodes <= 1 {
        return rule.ok("there is one NUMA node");
    }
    let Some(node) = gpu.function.numa_node else {
        let advice = "nvidia-smi topo -m shows what the driver knows; else the board's manual, slot by slot";
        return rule.not_known("the firmware does not tell the GPU's NUMA node", advice);
    };
    if facts.nics.is_empty() {
        return rule.not_applicable(format!("node {node}, and no network card on the PCI bus"));
    }
    let words = facts.nics.iter().map(|nic| {
        let address = &nic.function.address;
        match nic.function.numa_node {
            Some(other) if other == node => format!("{address} too"),
            Some(other) => format!("{address} on node {other}"),
            None => format!("{address} on a node that is not known"),
        }
    });
    let found = format!("node {node}; {}", words.collect::<Vec<_>>().join(", "));
    let nodes = || facts.nics.iter().map(|nic| nic.function.numa_node);
    if nodes().any(|other| other == Some(node)) {
        rule.ok(found)
    } else if nodes().all(|other| other.is_none()) {
        rule.not_known(found, "nvidia-smi topo -m shows what the driver knows")
    } else {
        rule.warning(
            found,
            format!(
                "take a GPU on the network card's node, or move one of them to a slot of the other's; keep lcores \
                 and the pool on node {node}"
            ),
        )
    }
}

pub(super) fn common_bridge(facts: &Facts, gpu: &GpuFacts, report: &mut Report) {
    let rule = report.check("common-bridge", &gpu.function.address).wants(
        "a network card below the same PCIe switch",
        "what one sends the other then does not pass the processor, which carries it slower or not at all",
    );
    let mut at_bridge = false;
    let mut seen = true;
    let words = pairs(facts, gpu).map(|pair| {
        let nic = &pair.nic;
        match &pair.meeting {
            Meeting::Bridge(bridge) => {
                at_bridge = true;
                format!("{nic} meets it at bridge {bridge}")
            }
            Meeting::RootComplex(root) => format!("{nic} only at root complex {root}"),
            Meeting::Nowhere => format!("{nic} is below another root complex"),
            Meeting::NotKnown => {
                seen = false;
                format!("the way to {nic} is not shown")
            }
        }
    });
    let found = words.collect::<Vec<_>>().join(", ");
    if found.is_empty() {
        rule.not_applicable("no network card on the PCI bus")
    } else if at_bridge {
        rule.ok(found)
    } else if facts.virtual_machine {
        let found = format!("{found}; in a virtual machine these are the ways that it is shown");
        rule.not_known(found, "look on its host: nvidia-smi topo -m, lspci -t")
    } else if !seen {
        rule.not_known(found, "nvidia-smi topo -m, lspci -t")
    } else {
        rule.warning(
            found,
            "put both into slots of one switch if the board has one; until then keep the pool in host memory, which \
             does not need it",
        )
    }
}

/// Reports a requested card or interface that does not exist.
pub(super) fn missing(name: &str, report: &mut Report) {
    let rule = report.check("nic", name).wants(
        "a network card on the PCI bus, or a network interface",
        "it was asked for: where it lies to the GPU is to be judged",
    );
    rule.problem(
        "neither a network card under /sys/bus/pci/devices nor an interface under /sys/class/net",
        "offcore port list shows what is there; /sys shows the interfaces of the network namespace that it was \
         mounted in",
    )
}

#[cfg(test)]
mod tests {
    use offcore_stats::finding::Verdict;

    use crate::doctor::fixture::{Fake, GPU, NIC};

    #[test]
    fn card_on_another_node_is_a_warning() {
        let fake = Fake::good();
        assert_eq!(fake.finding("numa-node", GPU).found, "node 0; 0000:04:00.0 too");
        fake.set(&fake.nic("numa_node"), "1");
        let finding = fake.finding("numa-node", GPU);
        assert_eq!(finding.found, "node 0; 0000:04:00.0 on node 1");
        assert!(finding.verdict == Verdict::Warning && finding.advice.contains("node 0"), "{finding:?}");
    }

    #[test]
    fn unknown_node_matters_with_several_nodes() {
        let fake = Fake::good();
        fake.set(&fake.nic("numa_node"), "-1");
        assert_eq!(fake.finding("numa-node", GPU).verdict, Verdict::NotKnown);
        fake.set(&fake.gpu("numa_node"), "-1");
        assert_eq!(fake.finding("numa-node", GPU).verdict, Verdict::NotKnown);
        fake.remove("sys/devices/system/node/node1");
        assert_eq!(fake.finding("numa-node", GPU).verdict, Verdict::Ok);
    }

    #[test]
    fn no_common_bridge_is_a_warning() {
        let fake = Fake::good();
        assert_eq!(fake.finding("common-bridge", GPU).verdict, Verdict::Ok);
        fake.move_device(NIC, "pci0000:00/0000:00:02.0");
        let finding = fake.finding("common-bridge", GPU);
        assert_eq!(finding.found, "0000:04:00.0 only at root complex pci0000:00");
        assert_eq!(finding.verdict, Verdict::Warning);
        fake.set("proc/cpuinfo", "flags : hypervisor");
        assert_eq!(fake.finding("common-bridge", GPU).verdict, Verdict::NotKnown);
    }

    #[test]
    fn one_near_card_of_several_is_enough() {
        let fake = Fake::good();
        fake.device("0000:e1:00.0", "pci0000:e0", "0x020000", "0x8086", "ice");
        fake.set("sys/bus/pci/devices/0000:e1:00.0/numa_node", "1");
        for check in ["numa-node", "common-bridge"] {
            let finding = fake.finding(check, GPU);
            assert!(finding.verdict == Verdict::Ok && finding.found.contains("0000:e1:00.0"), "{finding:?}");
        }
    }

    #[test]
    fn without_a_card_nothing_is_compared() {
        let fake = Fake::good();
        fake.remove("sys/bus/pci/devices/0000:04:00.0");
        for check in ["numa-node", "common-bridge"] {
            assert_eq!(fake.finding(check, GPU).verdict, Verdict::NotApplicable);
        }
    }

    #[test]
    fn missing_named_card_is_a_problem() {
        let mut fake = Fake::good();
        fake.set("sys/class/net/veth0/mtu", "1500");
        fake.given.nics = ["veth0", "eth0", "../veth0"].map(String::from).to_vec();
        let missing = fake.finding("nic", "../veth0");
        assert!(missing.verdict == Verdict::Problem && missing.advice.contains("port list"), "{missing:?}");
        assert_eq!(fake.report().1.findings.iter().filter(|finding| finding.check == "nic").count(), 1);
    }
}
