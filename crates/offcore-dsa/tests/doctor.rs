//! The doctor on a healthy machine and on faulty machines. Each machine is a tree of files.

#![allow(clippy::unwrap_used, reason = "tests may")]

mod fixtures;

use fixtures::{PCI, RELEASE, Tree};
use offcore_dsa::config::{DeviceCapabilities, built_in, profile};
use offcore_dsa::doctor::{System, examine};
use offcore_stats::finding::{Finding, Report, Verdict};

fn look(tree: &Tree) -> Report {
    examine(&System::under(&tree.0))
}

fn list(report: &Report, verdict: Verdict) -> Vec<(&str, &str)> {
    let found = report.findings.iter().filter(|finding| finding.verdict == verdict);
    found.map(|finding| (finding.check, finding.place.as_str())).collect()
}

/// Asserts that the report has exactly these problems, and that the first one contains these words and advice.
fn problems(tree: &Tree, expected: &[(&str, &str)], words: &[&str]) {
    let report = look(tree);
    assert_eq!(list(&report, Verdict::Problem), expected, "{:#?}", report.findings);
    assert_eq!(report.worst(), Verdict::Problem);
    says(&report, expected[0].0, words);
}

fn says<'a>(report: &'a Report, check: &str, words: &[&str]) -> &'a Finding {
    let worst = report.findings.iter().filter(|finding| finding.check == check);
    let finding = worst.max_by_key(|finding| finding.verdict).unwrap_or_else(|| panic!("no check {check}"));
    let text = format!("{} | {}", finding.found, finding.advice);
    assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
    assert!(finding.verdict < Verdict::Warning || !finding.advice.is_empty(), "{finding:?}");
    finding
}

const DSA0: &str = "sys/bus/dsa/devices/dsa0";

#[test]
fn healthy_machine_has_no_findings() {
    let tree = Tree::healthy();
    let report = look(&tree);
    assert_eq!(report.worst(), Verdict::Ok, "{:#?}", report.findings);
    let checks = "kernel-command-line kernel-config iommu cpu-instructions hugepages driver-binding portal-mapping \
                  device-state command-status shared-virtual-memory layout traffic-class numa-distance wq-state \
                  driver-name permissions block-on-fault wq-size user-queues";
    for check in checks.split(' ') {
        let found: Vec<_> = report.findings.iter().filter(|finding| finding.check == check).collect();
        assert!(
            !found.is_empty() && found.iter().all(|finding| finding.verdict == Verdict::Ok),
            "{check}: {found:?}"
        );
    }
    says(&report, "user-queues", &["wq0.0, wq0.1"]);
}

#[test]
fn missing_dsa_names_alternatives() {
    let report = look(&Tree::new());
    assert_eq!(list(&report, Verdict::Problem), [("devices", "system")]);
    says(&report, "devices", &["no DSA device", "Sapphire Rapids", "metal", "dsa-sim"]);
}

#[test]
fn broken_01_scalable_mode_is_not_turned_on() {
    let tree = Tree::healthy();
    tree.set("proc/cmdline", "root=/dev/sda1 intel_iommu=on");
    tree.set(&format!("{DSA0}/pasid_enabled"), 0);
    let expected = [("kernel-command-line", "system"), ("shared-virtual-memory", "dsa0")];
    problems(&tree, &expected, &["scalable mode is off", "intel_iommu=on,sm_on"]);
    // A later option wins. A kernel may also be built with the option enabled.
    tree.set(&format!("{DSA0}/pasid_enabled"), 1);
    tree.set("proc/cmdline", "intel_iommu=on,sm_on intel_iommu=off");
    problems(&tree, &[("kernel-command-line", "system")], &["the IOMMU is off"]);
    // Several options are combined.
    tree.set("proc/cmdline", "intel_iommu=on quiet intel_iommu=sm_on");
    assert_eq!(says(&look(&tree), "kernel-command-line", &["on,sm_on"]).verdict, Verdict::Ok);
    tree.set("proc/cmdline", "intel_iommu=on,sm_on intel_iommu=sm_off");
    problems(&tree, &[("kernel-command-line", "system")], &["scalable mode is off"]);
    tree.set("proc/cmdline", "quiet");
    problems(&tree, &[("kernel-command-line", "system")], &["not given", "the IOMMU is off"]);
    let path = format!("boot/config-{RELEASE}");
    let config = tree.get(&path);
    let more = "\nCONFIG_INTEL_IOMMU_DEFAULT_ON=y\nCONFIG_INTEL_IOMMU_SCALABLE_MODE_DEFAULT_ON=y";
    tree.set(&path, config + more);
    assert_eq!(look(&tree).worst(), Verdict::Ok);
    // Without an option and a kernel configuration the state is unknown. An option alone is sufficient.
    tree.remove(&path);
    let verdict = |line: &str| {
        tree.set("proc/cmdline", line);
        says(&look(&tree), "kernel-command-line", &[]).verdict
    };
    assert_eq!(verdict("quiet"), Verdict::NotApplicable);
    assert_eq!(verdict("intel_iommu=on"), Verdict::NotApplicable);
    assert_eq!(verdict("intel_iommu=on,sm_on"), Verdict::Ok);
    assert_eq!(verdict("intel_iommu=off"), Verdict::Problem);
    assert_eq!(verdict("intel_iommu=sm_off"), Verdict::Problem);
}

#[test]
fn broken_02_the_driver_is_not_loaded() {
    let tree = Tree::healthy();
    tree.remove("sys/bus/dsa");
    tree.remove(&format!("sys/bus/pci/devices/{PCI}/driver"));
    let expected = [("driver-binding", PCI), ("devices", "system")];
    problems(&tree, &expected, &["no driver", "modprobe idxd"]);
}

#[test]
fn broken_03_the_device_is_bound_to_vfio() {
    let tree = Tree::healthy();
    tree.remove(DSA0);
    tree.link(&format!("sys/bus/pci/devices/{PCI}/driver"), "../../../../bus/pci/drivers/vfio-pci");
    tree.set("sys/module/vfio_pci/parameters/disable_denylist", "Y");
    problems(&tree, &[("driver-binding", PCI)], &["vfio-pci", "idxd/bind"]);
    assert_eq!(says(&look(&tree), "vfio-denylist", &["CVE-2024-21823"]).verdict, Verdict::Warning);
    tree.set("sys/module/vfio_pci/parameters/disable_denylist", "N");
    assert_eq!(
        says(&look(&tree), "vfio-denylist", &["does not accept", "dmadev", "vfio_pci.disable_denylist=1"])
            .verdict,
        Verdict::Ok
    );
}

#[test]
fn broken_04_a_queue_is_not_enabled() {
    let tree = Tree::healthy();
    for wq in ["wq0.0", "wq0.1"] {
        tree.set(&format!("{DSA0}/{wq}/state"), "disabled");
        tree.remove(&format!("{DSA0}/{wq}/driver"));
        tree.remove(&format!("dev/dsa/{wq}"));
    }
    let expected = [
        ("wq-state", "wq0.0"),
        ("wq-driver", "wq0.0"),
        ("wq-state", "wq0.1"),
        ("wq-driver", "wq0.1"),
        ("user-queues", "system"),
    ];
    problems(&tree, &expected, &["disabled", "enable-wq dsa0/wq0"]);
}

#[test]
fn broken_05_driver_name_is_missing() {
    let tree = Tree::healthy();
    tree.set(&format!("{DSA0}/wq0.1/driver_name"), "");
    tree.set(&format!("{DSA0}/wq0.1/state"), "disabled");
    tree.remove(&format!("{DSA0}/wq0.1/driver"));
    tree.remove("dev/dsa/wq0.1");
    tree.set(&format!("{DSA0}/cmd_status"), "0x80200000");
    let report = look(&tree);
    says(&report, "driver-name", &["driver_name is not set", "--driver-name=user"]);
    says(&report, "command-status", &["0x80200000", "driver_name"]);
    assert!(list(&report, Verdict::Problem).contains(&("layout", "wq0.1")));
    // A kernel without the attribute does not need it.
    for wq in 0..8 {
        tree.remove(&format!("{DSA0}/wq0.{wq}/driver_name"));
    }
    let report = look(&tree);
    assert!(
        report
            .findings
            .iter()
            .all(|finding| { finding.check != "driver-name" || finding.verdict == Verdict::NotApplicable })
    );
    assert!(!list(&report, Verdict::Problem).contains(&("layout", "wq0.1")), "{:#?}", report.findings);
}

#[test]
fn broken_06_all_queues_are_kernel_type() {
    let tree = Tree::healthy();
    tree.remove(DSA0);
    let caps = DeviceCapabilities::spr();
    tree.device(&built_in("os", &caps).unwrap(), &caps);
    tree.enable(0, &[0]);
    tree.link(&format!("{DSA0}/wq0.0/driver"), "../../../drivers/dmaengine");
    tree.set(&format!("{DSA0}/wq0.0/clients"), 3);
    problems(&tree, &[("user-queues", "system")], &["no work queue", "configure vhost -d dsa0"]);
    says(&look(&tree), "wq-type", &["type kernel", "dmaengine", "3 clients"]);
}

#[test]
fn broken_07_device_file_may_not_be_opened() {
    let tree = Tree::healthy();
    tree.me(4242, 0, "0-3");
    tree.mode("dev/dsa/wq0.1", 0o666);
    problems(&tree, &[("permissions", "wq0.0")], &["mode 0600", "we are user 4242", "chmod 660"]);
    tree.remove("dev/dsa/wq0.0");
    problems(&tree, &[("permissions", "wq0.0")], &["is not there", "container"]);
}

#[test]
fn broken_08_the_device_is_halted() {
    let tree = Tree::healthy();
    tree.set(&format!("{DSA0}/state"), "halted");
    tree.set(&format!("{DSA0}/errors"), "0x10300021a0b 0x0 0x7f0000000000 0x0");
    problems(&tree, &[("device-state", "dsa0")], &["halted", "reset"]);
    let software =
        says(&look(&tree), "software-error", &["0x1a", "wq0.2", "others after it", "explain 0x1a"]).verdict;
    assert_eq!(software, Verdict::Warning);
}

#[test]
fn broken_09_there_is_no_iommu() {
    let tree = Tree::healthy();
    tree.remove("sys/class/iommu");
    problems(&tree, &[("iommu", "system")], &["VT-d"]);
    // An IOMMU without scalable mode is not sufficient.
    tree.set("sys/class/iommu/dmar0/intel-iommu/ecap", "f050da");
    problems(&tree, &[("iommu", "system")], &["scalable mode", "0xf050da"]);
    // Two IOMMUs without scalable mode are not sufficient; one with scalable mode is.
    tree.set("sys/class/iommu/dmar1/intel-iommu/ecap", "f050de");
    problems(&tree, &[("iommu", "system")], &["none of 2", "scalable mode", "0xf050da"]);
    tree.set("sys/class/iommu/dmar1/intel-iommu/ecap", "90020f050da");
    assert_eq!(look(&tree).worst(), Verdict::Ok);
}

#[test]
fn broken_10_kernel_lacks_shared_memory() {
    let tree = Tree::healthy();
    let path = format!("boot/config-{RELEASE}");
    let config = tree.get(&path).replace("CONFIG_INTEL_IDXD_SVM=y", "# CONFIG_INTEL_IDXD_SVM is not set");
    tree.set(&path, config);
    problems(&tree, &[("kernel-config", "system")], &["CONFIG_INTEL_IDXD_SVM"]);
    // The configuration is neither here nor in /proc, so the state is unknown.
    tree.remove(&path);
    assert_eq!(says(&look(&tree), "kernel-config", &["/proc/config.gz"]).verdict, Verdict::NotApplicable);
}

#[test]
fn broken_11_the_layout_breaks_a_rule() {
    let tree = Tree::healthy();
    tree.set(&format!("{DSA0}/wq0.0/mode"), "shared");
    tree.set(&format!("{DSA0}/group0.0/read_buffers_allowed"), 12);
    let expected = [("layout", "group0.0"), ("layout", "wq0.0")];
    problems(&tree, &expected, &["allowed: "]);
    let report = look(&tree);
    let texts: Vec<&str> = report.findings.iter().map(|finding| finding.found.as_str()).collect();
    assert!(texts.iter().any(|text| text.contains("read-buffers-per-engine")), "{texts:?}");
    assert!(texts.iter().any(|text| text.contains("breaks threshold")), "{texts:?}");
}

#[test]
fn broken_12_nothing_is_configured() {
    let tree = Tree::healthy();
    tree.remove(DSA0);
    tree.remove("dev/dsa");
    let caps = DeviceCapabilities::spr();
    let mut empty = profile("vhost").unwrap();
    empty.wqs.iter_mut().for_each(|wq| *wq = Default::default());
    tree.device(&empty, &caps);
    let expected = [("device-state", "dsa0"), ("layout", "dsa0"), ("user-queues", "system")];
    problems(&tree, &expected, &["disabled", "configure vhost -d dsa0"]);
}

#[test]
fn degraded_setup_is_a_warning() {
    type Change = (&'static str, &'static [&'static str], fn(&Tree));
    let changes: [Change; 13] = [
        ("cpu-instructions", &["MOVDIR64B", "write()"], |tree| tree.set("proc/cpuinfo", "flags\t: fpu sse2")),
        ("cpu-instructions", &["ENQCMD"], |tree| tree.set("proc/cpuinfo", "flags\t: movdir64b waitpkg")),
        ("hugepages", &["nr_hugepages"], |tree| {
            tree.set("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", 0)
        }),
        ("numa-distance", &["node 0", "distance up to 21", "lcores 0-3"], |tree| tree.me(0, !0, "4-7")),
        ("portal-mapping", &["write()", "Batch is not available", "cap_sys_rawio"], |tree| {
            tree.mode("dev/dsa/wq0.0", 0o666);
            tree.mode("dev/dsa/wq0.1", 0o666);
            tree.me(4242, 0, "0-3");
        }),
        ("traffic-class", &["classes 0 and 1", "tc_override"], |tree| {
            tree.set(&format!("{DSA0}/group0.0/traffic_class_a"), 0)
        }),
        ("traffic-class", &["classes 1 and 0"], |tree| {
            tree.set(&format!("{DSA0}/version"), "0x200");
            tree.set(&format!("{DSA0}/group0.0/traffic_class_b"), 0)
        }),
        ("block-on-fault", &["hold up"], |tree| tree.set(&format!("{DSA0}/wq0.0/block_on_fault"), 1)),
        ("ats", &["not reported"], |tree| tree.set(&format!("{DSA0}/wq0.1/ats_disable"), 1)),
        ("wq-size", &["8 descriptors", "32 or more"], |tree| tree.set(&format!("{DSA0}/wq0.1/size"), 8)),
        ("wq-size", &["batches of 16"], |tree| tree.set(&format!("{DSA0}/wq0.1/max_batch_size"), 16)),
        ("wq-clients", &["process 77", "EBUSY"], |tree| {
            tree.set(&format!("{DSA0}/wq0.1/clients"), 1);
            tree.set(&format!("{DSA0}/wq0.1/dsa!wq0.1/file0/pid"), 77);
        }),
        ("command-status", &["max_batch_size"], |tree| tree.set(&format!("{DSA0}/cmd_status"), "0x27")),
    ];
    for (check, words, change) in changes {
        let tree = Tree::healthy();
        change(&tree);
        let report = look(&tree);
        assert_eq!(report.worst(), Verdict::Warning, "{check}: {:#?}", report.findings);
        let warned = list(&report, Verdict::Warning);
        assert!(warned.iter().all(|(found, _)| *found == check), "{check}: {warned:?}");
        says(&report, check, words);
    }
}

#[test]
fn low_threshold_is_a_warning() {
    let tree = Tree::healthy();
    tree.remove(DSA0);
    let caps = DeviceCapabilities::spr();
    let mut config = profile("app").unwrap();
    config.wqs[1].threshold = 10;
    tree.device(&config, &caps);
    tree.enable(0, &[0, 1]);
    let report = look(&tree);
    let low = report
        .findings
        .iter()
        .find(|finding| finding.place == "wq0.1" && finding.check == "wq-size")
        .unwrap();
    assert!(low.found.contains("threshold 10 of 32") && low.advice.contains("31"), "{low:?}");
}

#[test]
fn portals_for_everybody_are_a_warning() {
    let tree = Tree::healthy();
    tree.me(4242, 0, "0-3");
    for wq in ["wq0.0", "wq0.1"] {
        tree.mode(&format!("dev/dsa/{wq}"), 0o666);
    }
    tree.set("proc/sys/kernel/osrelease", "6.8.0-45-generic");
    says(&look(&tree), "portal-mapping", &["for all users", "CVE-2024-21823", "6.8.10"]);
    tree.set("proc/sys/kernel/osrelease", "5.15.0");
    says(&look(&tree), "portal-mapping", &["may map"]);
}

#[test]
fn proc_config_is_read_too() {
    let tree = Tree::healthy();
    let path = format!("boot/config-{RELEASE}");
    let config = tree.get(&path);
    tree.remove(&path);
    tree.set("proc/config", &config);
    let packed = std::process::Command::new("gzip").arg(tree.file("proc/config")).status();
    assert!(packed.is_ok_and(|status| status.success()), "gzip is needed");
    std::fs::rename(tree.file("proc/config.gz"), tree.file("proc/config.gz.tmp")).unwrap();
    assert_eq!(says(&look(&tree), "kernel-config", &[]).verdict, Verdict::NotApplicable);
    std::fs::rename(tree.file("proc/config.gz.tmp"), tree.file("proc/config.gz")).unwrap();
    assert_eq!(says(&look(&tree), "kernel-config", &["/proc/config.gz has"]).verdict, Verdict::Ok);
}

#[test]
fn doctor_handles_any_sysfs_tree() {
    let tree = Tree::healthy();
    let mut files = vec![tree.0.clone()];
    let mut at = 0;
    while at < files.len() {
        if files[at].is_dir() && !files[at].is_symlink() {
            let entries = std::fs::read_dir(&files[at]).unwrap();
            files.extend(entries.map(|entry| entry.unwrap().path()));
        }
        at += 1;
    }
    let files: Vec<_> = files.into_iter().filter(|path| path.is_file()).collect();
    for rubbish in
        ["", "-1", "18446744073709551616", "0xffffffffffffffff", "\u{fffd} \u{0} ,,--", "0-99999999999999"]
    {
        for file in &files {
            std::fs::write(file, rubbish).unwrap();
        }
        look(&tree);
    }
}
