//! The machine's rules on synthetic machines.

use offcore_stats::finding::Verdict;

use crate::doctor::Ptx;
use crate::doctor::facts::LockedMemory;
use crate::doctor::fixture::Fake;

#[test]
fn no_gpu_is_a_problem() {
    let mut fake = Fake::empty();
    let finding = fake.finding("gpu", "system");
    assert!(finding.verdict == Verdict::Problem && finding.advice.contains("the device host"), "{finding:?}");
    fake.given.has_host_device = false;
    assert!(!fake.finding("gpu", "system").advice.contains("the device host"));
    let absent = fake.finding("host-device", "system");
    assert!(absent.verdict == Verdict::Warning && absent.advice.contains("C++ compiler"), "{absent:?}");
}

#[test]
fn unreadable_pci_bus_is_not_known() {
    let fake = Fake::good();
    fake.remove("sys/bus/pci");
    assert_eq!(fake.finding("gpu", "system").verdict, Verdict::NotKnown);
    assert_eq!(fake.finding("cuda", "system").verdict, Verdict::Ok);
    assert_eq!(fake.report().1.count(Verdict::Problem), 0);
}

#[test]
fn no_kernel_driver_is_one_problem() {
    let mut fake = Fake::good();
    fake.given.cuda = None;
    fake.remove("proc/driver/nvidia");
    fake.remove(&fake.gpu("driver"));
    let report = fake.report().1;
    let problems: Vec<_> = report.findings.iter().filter(|f| f.verdict == Verdict::Problem).collect();
    assert_eq!(problems.iter().map(|f| f.check).collect::<Vec<_>>(), ["kernel-driver"]);
    assert!(problems[0].advice.contains("modprobe nvidia"), "{problems:?}");
}

#[test]
fn device_files_must_be_accessible() {
    let mut fake = Fake::good();
    fake.given.cuda = None;
    let finding = fake.finding("device-files", "system");
    assert_eq!(finding.found, "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0");
    fake.remove("dev/nvidia0");
    let finding = fake.finding("device-files", "system");
    assert!(finding.verdict == Verdict::Warning && finding.found.contains("/dev/nvidia0"), "{finding:?}");
    fake.set("dev/nvidia0", "");
    fake.mode("dev/nvidia0", 0o660);
    fake.set("proc/self/status", "Uid:\t77777\t77777\t77777\t77777\nGid:\t77777\t77777\nCapEff:\t0\n");
    let finding = fake.finding("device-files", "system");
    assert!(
        finding.verdict == Verdict::Problem && finding.found.starts_with("not for us: /dev/nvidia0 ("),
        "{finding:?}"
    );
}

#[test]
fn cuda_init_failure_is_explained() {
    let mut fake = Fake::good();
    fake.cuda().devices.clear();
    assert!(fake.finding("cuda", "system").advice.contains("CUDA_VISIBLE_DEVICES"));
    fake.given.cuda = None;
    assert_eq!(fake.finding("cuda", "system").verdict, Verdict::NotKnown);
    fake.given.cuda_error = Some("CUDA_ERROR_SYSTEM_NOT_READY".into());
    let finding = fake.finding("cuda", "system");
    assert!(finding.verdict == Verdict::Problem && finding.found.contains("NOT_READY"), "{finding:?}");
}

#[test]
fn cuda_start_failure_is_one_problem() {
    let mut fake = Fake::good();
    fake.given.cuda = None;
    fake.given.cuda_error = Some("no CUDA driver was found".into());
    let problems = |fake: &Fake| -> Vec<&'static str> {
        let findings = fake.report().1.findings;
        findings.iter().filter(|f| f.verdict == Verdict::Problem).map(|f| f.check).collect()
    };
    assert_eq!(problems(&fake), ["cuda"]);
    fake.remove("proc/driver/nvidia/version");
    assert_eq!(problems(&fake), ["kernel-driver"]);
    let finding = fake.finding("cuda", "system");
    assert!(finding.found.starts_with("no CUDA driver was found; the kernel driver comes"), "{finding:?}");
}

#[test]
fn ptx_newer_than_the_driver_is_a_problem() {
    let mut fake = Fake::good();
    fake.given.ptx = Some(Ptx { version: (9, 5), target: (7, 5) });
    let finding = fake.finding("ptx-version", "system");
    assert_eq!((finding.verdict, finding.found.as_str()), (Verdict::Problem, "the driver has CUDA 13.0"));
    assert!(
        finding.wanted.contains("CUDA 13.5") && finding.advice.contains("cargo xtask kernels"),
        "{finding:?}"
    );
    fake.given.ptx = Some(Ptx { version: (8, 8), target: (7, 0) });
    assert_eq!(fake.finding("ptx-version", "system").verdict, Verdict::Ok);
    fake.given.cuda = None;
    assert_eq!(fake.finding("ptx-version", "system").verdict, Verdict::NotKnown);
    fake.given.ptx = Some(Ptx { version: (1, 0), target: (1, 0) });
    assert_eq!(fake.finding("ptx-version", "system").verdict, Verdict::NotKnown);
}

#[test]
fn low_memlock_limit_is_a_warning() {
    let fake = Fake::good();
    let limit =
        |soft: &str| fake.set("proc/self/limits", format!("Max locked memory  {soft}  unlimited  bytes\n"));
    assert_eq!(fake.finding("locked-memory", "system").found, "there is no limit");
    limit("8388608");
    assert_eq!(fake.report().0.locked_memory, Some(LockedMemory::Bytes(8 << 20)), "the soft one");
    assert!(fake.finding("locked-memory", "system").found.contains("CAP_IPC_LOCK"));
    fake.set("proc/self/status", "CapEff:\t0\n");
    let finding = fake.finding("locked-memory", "system");
    assert_eq!((finding.verdict, finding.found.as_str()), (Verdict::Warning, "the limit is 8 MiB"));
    assert!(finding.wanted.contains("64 MiB") && finding.advice.contains("ulimit -l"), "{finding:?}");
    limit("67108864");
    assert_eq!(fake.finding("locked-memory", "system").verdict, Verdict::Ok);
    limit("what");
    assert_eq!(fake.finding("locked-memory", "system").verdict, Verdict::NotKnown);
}
