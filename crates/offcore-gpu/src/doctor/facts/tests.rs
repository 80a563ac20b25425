//! Facts from synthetic trees.

use super::*;
use crate::doctor::fixture::{Fake, GPU, NIC};
use crate::doctor::pci::IommuGroup;

fn facts(fake: &Fake) -> Facts {
    Facts::read(&Tree::new(&fake.0), &fake.given)
}

#[test]
fn healthy_machine_facts_are_read() {
    let fake = Fake::good();
    let facts = facts(&fake);
    assert_eq!(facts.driver, Some(Driver { version: Some("580.65.06".into()), open: true }));
    assert_eq!(facts.kernel.as_deref(), Some("6.8.0-60-generic"));
    assert!(!facts.virtual_machine && facts.may_lock_all);
    let gpu = &facts.gpus[0];
    assert_eq!((gpu.model.as_deref(), gpu.minor), (Some("NVIDIA H200"), Some(0)));
    assert_eq!(gpu.function.iommu, Some(IommuGroup { number: 7, kind: Some("identity".into()) }));
    let nic = &facts.nics[0];
    assert_eq!((nic.mlx5, &nic.interfaces[..]), (true, &["eth0".to_owned()][..]));
    assert_eq!((&facts.modules[..], facts.numa_nodes), (&["nvidia_peermem".to_owned()][..], 2));
}

#[test]
fn driver_versions_are_found() {
    let fake = Fake::good();
    let line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:";
    fake.set("proc/driver/nvidia/version", line);
    assert_eq!(facts(&fake).driver, Some(Driver { version: Some("535.104.05".into()), open: false }));
    fake.set("proc/driver/nvidia/version", "1. .2 3..4 a.b 1.2.3.4 12");
    assert_eq!(facts(&fake).driver, Some(Driver { version: None, open: false }));
}

#[test]
fn device_file_access_follows_its_mode() {
    let fake = Fake::good();
    let status =
        "Uid:\t77777\t77777\t77777\t77777\nGid:\t77777\t77777\t77777\t77777\nGroups:\t5\nCapEff:\t0\n";
    fake.set("proc/self/status", status);
    let mode = |mode| {
        fake.mode("dev/nvidia0", mode);
        facts(&fake).device_file("/dev/nvidia0").unwrap().usable
    };
    assert_eq!((mode(0o666), mode(0o660), mode(0o664)), (true, false, false));
    assert!(!facts(&fake).may_lock_all);
}

#[test]
fn common_bridge_of_two_paths() {
    let meeting_with = |way: &str| {
        let fake = Fake::good();
        fake.move_device(NIC, way);
        facts(&fake).pairs[0].meeting.clone()
    };
    assert_eq!(
        meeting_with("pci0000:00/0000:00:01.0/0000:05:00.0/0000:06:00.0"),
        Meeting::Bridge("0000:00:01.0".into())
    );
    assert_eq!(meeting_with("pci0000:00/0000:00:02.0"), Meeting::RootComplex("pci0000:00".into()));
    assert_eq!(meeting_with("pci0000:00"), Meeting::RootComplex("pci0000:00".into()));
    assert_eq!(meeting_with("pci0000:80/0000:80:01.0"), Meeting::Nowhere);
    assert_eq!(meeting_with("vmbus/x"), Meeting::NotKnown);
}

#[test]
fn only_named_cards_are_checked() {
    let mut fake = Fake::good();
    fake.device("0000:e1:00.0", "pci0000:e0", "0x020000", "0x8086", "ice");
    assert_eq!(facts(&fake).nics.len(), 2);
    fake.given.nics = vec!["eth0".into()];
    assert_eq!(facts(&fake).nics[0].function.address, NIC);
    fake.given.nics = vec!["0000:e1:00.0".into()];
    let facts = facts(&fake);
    assert_eq!((facts.nics.len(), facts.nics[0].function.address.as_str()), (1, "0000:e1:00.0"));
    assert_eq!((facts.pairs.len(), facts.pairs[0].gpu.as_str()), (1, GPU));
}

#[test]
fn virtio_interfaces_are_found() {
    let fake = Fake::good();
    fake.device("0000:e1:00.0", "pci0000:e0", "0x020000", "0x1af4", "virtio-pci");
    fake.set("sys/devices/pci0000:e0/0000:e1:00.0/virtio3/net/ens4/mtu", "8896");
    let nic = facts(&fake).nics.remove(1);
    assert_eq!(nic.interfaces, ["ens4"]);
}
