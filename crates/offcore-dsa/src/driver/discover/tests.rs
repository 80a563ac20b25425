use super::*;
use crate::descriptor::Opcode;
use crate::driver::fixture::Tree;
use crate::driver::open::refusal;
use crate::driver::{Options, open};
use crate::portal::SubmitBy;

fn refused(tree: &Tree, options: &Options) -> String {
    open(&tree.roots(), "wq0.0", options).unwrap_err().to_string()
}

#[test]
fn work_queues_have_their_properties() {
    let tree = Tree::new();
    let found = list(&tree.roots()).unwrap();
    assert_eq!(found.iter().map(|f| f.info.name.as_str()).collect::<Vec<_>>(), ["wq0.0", "wq0.1"]);
    let info = &found[1].info;
    assert_eq!((info.mode, info.size, info.threshold), (WqMode::Shared, 16, 12));
    assert_eq!((info.max_batch_size, info.max_transfer_size), (32, 16384));
    assert_eq!((info.version, info.gen_cap, info.numa_node), (0x100, 0x40_915f_0107, Some(1)));
    assert_eq!(info.engines, 2, "of the queue's group, not of the device");
    assert!(info.ops.contains(Opcode::CacheFlush) && info.ops.contains(Opcode::MemoryMove));
    assert!(!info.ops.contains(Opcode::DixGenerate));
    assert_eq!(found[0].info.threshold, 16, "a dedicated queue has no threshold");
}

#[test]
fn op_config_limits_operations() {
    let tree = Tree::new();
    tree.set("wq0.0/op_config", "00000000,00000000,00000000,00000000,00000000,00000000,00000000,00000009");
    let ops = find(&tree.roots(), "wq0.0").unwrap().info.ops;
    assert_eq!(ops.0, [9, 0, 0, 0]);
}

#[test]
fn no_device_is_an_empty_list() {
    let roots = Roots { sysfs: "/nonexistent".into(), dev: "/nonexistent".into() };
    assert!(list(&roots).unwrap().is_empty());
    let error = find(&roots, "wq0.0").unwrap_err().to_string();
    assert!(error.contains("no work queue is") && error.contains("modprobe idxd"), "{error}");
}

#[test]
fn unmappable_portal_is_opened_by_write() {
    let tree = Tree::new();
    // A FIFO cannot be mapped, and not every CPU has MOVDIR64B.
    let mut device = tree.device_end("wq0.0");
    let opened = open(&tree.roots(), "wq0.0", &Options::default()).unwrap();
    assert_eq!(opened.portal.kind(), SubmitBy::Write);
    assert_eq!(opened.portal.kind().to_string(), "write()");
    assert!(!opened.portal.allows_batch(), "not by write() on version 1");
    let probes = device.submitted();
    assert_eq!(probes.len(), 1);
    assert_eq!((probes[0].opcode(), probes[0].completion), (Some(Opcode::Noop), 0));
    tree.set("version", "0x200");
    assert!(open(&tree.roots(), "wq0.0", &Options::default()).unwrap().portal.allows_batch());
}

#[test]
fn every_broken_queue_is_refused_by_name() {
    let cases: [(&str, &str, &[&str]); 7] = [
        ("wq0.0/state", "disabled", &["wq0.0 is disabled", "accel-config enable-wq dsa0/wq0.0"]),
        ("wq0.0/type", "kernel", &["type kernel", "expected user"]),
        ("wq0.0/type", "none", &["type none", "expected user"]),
        ("wq0.0/driver_name", "dmaengine", &["driver_name 'dmaengine'", "expected 'user'"]),
        ("pasid_enabled", "0", &["dsa0 has no shared virtual memory", "sm_on"]),
        ("wq0.0/mode", "both", &["wq0.0/mode", "found 'both'", "dedicated or shared"]),
        ("wq0.0/size", "many", &["wq0.0/size", "found 'many'", "a number"]),
    ];
    for (file, text, expected) in cases {
        let tree = Tree::new();
        tree.set(file, text);
        let error = refused(&tree, &Options::default());
        assert!(expected.iter().all(|part| error.contains(part)), "{file}: {error}");
    }
}

#[test]
fn names_nodes_and_rights_are_checked() {
    let tree = Tree::new();
    let options = Options { wq_name: Some("offcore".into()), ..Options::default() };
    let error = refused(&tree, &options);
    assert!(error.contains("named 'dpdk_app'") && error.contains("'offcore…'"), "{error}");
    let options = Options { wq_name: Some("dpdk_".into()), numa_node: Some(0), ..Options::default() };
    let opened = open(&tree.roots(), "wq0.0", &options).unwrap();
    assert!(opened.warnings[0].contains("NUMA node 1, its user on node 0"), "{:?}", opened.warnings);
    drop(opened);

    for (wq, expected) in [("wq0.7", "(wq0.0, wq0.1 are)"), ("queue1", "expected wqDEVICE.QUEUE")] {
        let error = open(&tree.roots(), wq, &Options::default()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let node = tree.roots().device_node("wq0.0");
    fs::remove_file(&node).unwrap();
    assert!(refused(&tree, &Options::default()).contains("is /dev/dsa there?"));
    // A directory cannot be opened for writing.
    fs::create_dir(&node).unwrap();
    assert!(refused(&tree, &Options::default()).contains("cannot be opened"));
}

#[test]
fn older_kernels_have_fewer_files() {
    let tree = Tree::new();
    tree.remove("wq0.0/driver_name");
    tree.remove("numa_node");
    let opened = open(&tree.roots(), "wq0.0", &Options { numa_node: Some(0), ..Options::default() }).unwrap();
    assert_eq!((opened.info.numa_node, opened.warnings.len()), (None, 0));
    tree.remove("version");
    assert!(refused(&tree, &Options::default()).contains("dsa0/version cannot be read"));
}

#[test]
fn open_errnos_are_explained() {
    let tree = Tree::new();
    let found = find(&tree.roots(), "wq0.0").unwrap();
    let node = tree.roots().device_node("wq0.0");
    let cases = [
        (Errno::BUSY, "wq0.0 is dedicated and in use by another process"),
        (Errno::ACCESS, "chmod or chown"),
        (Errno::OPNOTSUPP, "dsa0 has no shared virtual memory"),
        (Errno::NXIO, "cannot be opened"),
    ];
    for (reason, expected) in cases {
        let error = refusal(reason, &node, &found).to_string();
        assert!(error.contains(expected), "{error}");
    }
    // /dev/full can be opened, but it can neither be mapped as a portal nor be written.
    fs::remove_file(&node).unwrap();
    std::os::unix::fs::symlink("/dev/full", &node).unwrap();
    let error = refused(&tree, &Options::default());
    assert!(error.contains("CAP_SYS_RAWIO") && error.contains("write() is refused"), "{error}");
}
