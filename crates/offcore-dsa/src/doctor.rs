//! Diagnosis of a set-up, with advice.
//!
//! [`examine`] checks everything that a program needs to use a work queue, from the kernel's command line to the
//! permissions of the character device, and reports each result. All files that it reads are under a root directory,
//! which can be another directory than `/`.

mod access;
mod device;
mod machine;
mod queue;

use std::path::{Path, PathBuf};

use offcore_stats::finding::{Report, Rights};

use crate::config::sysfs::{self, Roots, SysfsDevice};

/// The system to examine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct System {
    /// The directory that holds `proc`, `sys`, `dev` and `boot`.
    pub root: PathBuf,
    /// The DSA bus and the character devices.
    pub dsa: Roots,
}

impl Default for System {
    /// Returns this system, with the roots that the environment names.
    fn default() -> Self {
        Self { root: "/".into(), dsa: Roots::from_env() }
    }
}

impl System {
    /// Returns the system with its files under `root`.
    pub fn under(root: &Path) -> Self {
        Self { root: root.to_owned(), dsa: Roots::under(root) }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn read(&self, path: &str) -> Option<String> {
        sysfs::read(&self.path(path))
    }

    /// Returns the names in a directory, sorted; an empty list if it does not exist.
    fn names(&self, path: &str) -> Vec<String> {
        sysfs::names(&self.path(path))
    }
}

/// Advice on how to get a device.
pub const WITHOUT_DSA: &str = "DSA is in Xeon processors from the 4th generation (Sapphire Rapids) on, and is not passed to \
     ordinary virtual machines. Bare-metal instances have it: AWS m7i, c7i, r7i in the metal sizes, Google Cloud \
     c3-*-metal. Where the processor has it, the firmware may hide it (look for DSA or accelerators in its I/O settings). \
     Until then 'dsa-sim0:wq0.0' works wherever 'dsa:wq0.0' does, and 'offcore predict' says what a device would give";

/// Runs all checks.
pub fn examine(system: &System) -> Report {
    let mut report = Report::default();
    let devices = match sysfs::devices(&system.dsa) {
        Ok(devices) => devices,
        Err(error) => {
            let found = format!("{}: {error}", system.dsa.sysfs.display());
            report.check("devices", "system").problem(found, "look with the rights to read sysfs");
            Vec::new()
        }
    };
    let hardware = machine::hardware(system);
    if devices.is_empty() && hardware.is_empty() {
        let found = "no DSA device on the PCI bus, and none under the idxd driver";
        report.check("devices", "system").problem(found, WITHOUT_DSA);
        machine::instructions(system, &mut report);
        machine::hugepages(system, &mut report);
        return report;
    }
    machine::devices(&hardware, &devices, system, &mut report);
    machine::examine(system, &hardware, &devices, &mut report);
    let me = Rights::of(&system.read("proc/self/status").unwrap_or_default());
    access::mapping(system, &me, &devices, &mut report);
    for device in &devices {
        device::examine(system, &me, device, &mut report);
        queue::examine(system, &me, device, &mut report);
    }
    user_queues(&devices, &mut report);
    report
}

/// Checks whether there is a queue that a program can use.
fn user_queues(devices: &[SysfsDevice], report: &mut Report) {
    let usable = |device: &SysfsDevice| {
        let queues = device.config.wqs.iter().zip(&device.wqs);
        let used = queues.enumerate().filter(|(_, (wq, state))| {
            wq.kind == crate::config::WqType::User && state.state == "enabled" && state.node.is_some()
        });
        used.map(|(number, _)| device.config.wq_name(number)).collect::<Vec<_>>()
    };
    let names: Vec<String> = devices.iter().flat_map(usable).collect();
    if devices.is_empty() {
        return;
    }
    match names.is_empty() {
        false => report.check("user-queues", "system").ok(format!("programs can use {}", names.join(", "))),
        true => {
            let name = &devices[0].config.name;
            let found = "no work queue is enabled for programs";
            report
                .check("user-queues", "system")
                .problem(found, format!("offcore dsa configure vhost -d {name}"));
        }
    }
}
