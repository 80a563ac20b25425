//! What is wrong with a set-up, and what to do about it.
//!
//! [`examine`] looks at everything that has to be right for a program to use a work queue, from the kernel's command
//! line to the permissions of the character device, and says of each whether it is. All that it reads lies under a
//! root that can be another directory than `/`.

mod access;
mod device;
mod machine;
mod queue;

use std::fmt;
use std::path::{Path, PathBuf};

use crate::config::sysfs::{self, Device, Roots};

/// Where to look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct System {
    /// The directory that holds `proc`, `sys`, `dev` and `boot`.
    pub root: PathBuf,
    /// The DSA bus and the character devices.
    pub dsa: Roots,
}

impl Default for System {
    /// This system, with the roots that the environment names.
    fn default() -> Self {
        Self { root: "/".into(), dsa: Roots::from_env() }
    }
}

impl System {
    /// The system whose files are under `root`.
    pub fn under(root: &Path) -> Self {
        Self { root: root.to_owned(), dsa: Roots::under(root) }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn read(&self, path: &str) -> Option<String> {
        sysfs::read(&self.path(path))
    }

    /// The names in a directory, sorted; none when it is not there.
    fn names(&self, path: &str) -> Vec<String> {
        sysfs::names(&self.path(path))
    }
}

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It does not matter here.
    NotApplicable,
    /// As it should be.
    Ok,
    /// It works, but not as well as it could.
    Warning,
    /// It keeps DSA from being used.
    Problem,
}

impl Verdict {
    /// A stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotApplicable => "not applicable",
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One check's result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The check's stable name: `kernel-command-line`.
    pub check: &'static str,
    /// What was looked at: `system`, `dsa0`, `wq0.1`.
    pub place: String,
    /// How it is.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do; empty where nothing is to be done.
    pub advice: String,
}

/// All that was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// In the order in which one would look: the machine, its devices, their work queues.
    pub findings: Vec<Finding>,
}

impl Report {
    /// The worst verdict.
    pub fn worst(&self) -> Verdict {
        self.findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::NotApplicable)
    }

    /// Findings of a verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.findings.iter().filter(|finding| finding.verdict == verdict).count()
    }

    fn add(
        &mut self,
        check: &'static str,
        place: &str,
        verdict: Verdict,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) {
        let (found, advice) = (found.into(), advice.into());
        self.findings.push(Finding { check, place: place.into(), verdict, found, advice });
    }

    fn ok(&mut self, check: &'static str, place: &str, found: impl Into<String>) {
        self.add(check, place, Verdict::Ok, found, "");
    }

    fn not_applicable(&mut self, check: &'static str, place: &str, found: impl Into<String>) {
        self.add(check, place, Verdict::NotApplicable, found, "");
    }

    fn warning(
        &mut self,
        check: &'static str,
        place: &str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.add(check, place, Verdict::Warning, found, advice);
    }

    fn problem(
        &mut self,
        check: &'static str,
        place: &str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.add(check, place, Verdict::Problem, found, advice);
    }
}

/// How to come by a device.
pub const WITHOUT_DSA: &str = "DSA is in Xeon processors from the 4th generation (Sapphire Rapids) on, and is not passed to \
     ordinary virtual machines. Bare-metal instances have it: AWS m7i, c7i, r7i in the metal sizes, Google Cloud \
     c3-*-metal. Where the processor has it, the firmware may hide it (look for DSA or accelerators in its I/O settings). \
     Until then 'dsa-sim0:wq0.0' works wherever 'dsa:wq0.0' does, and 'offcore predict' says what a device would give";

/// Looks at everything.
pub fn examine(system: &System) -> Report {
    let mut report = Report::default();
    let devices = match sysfs::devices(&system.dsa) {
        Ok(devices) => devices,
        Err(error) => {
            let found = format!("{}: {error}", system.dsa.sysfs.display());
            report.problem("devices", "system", found, "look with the rights to read sysfs");
            Vec::new()
        }
    };
    let hardware = machine::hardware(system);
    if devices.is_empty() && hardware.is_empty() {
        let found = "no DSA device on the PCI bus, and none under the idxd driver";
        report.problem("devices", "system", found, WITHOUT_DSA);
        machine::instructions(system, &mut report);
        machine::hugepages(system, &mut report);
        return report;
    }
    machine::devices(&hardware, &devices, system, &mut report);
    machine::examine(system, &hardware, &devices, &mut report);
    let me = access::Me::of(system);
    access::mapping(system, &me, &devices, &mut report);
    for device in &devices {
        device::examine(system, &me, device, &mut report);
        queue::examine(system, &me, device, &mut report);
    }
    user_queues(&devices, &mut report);
    report
}

/// Whether there is anything for a program to use.
fn user_queues(devices: &[Device], report: &mut Report) {
    let usable = |device: &Device| {
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
        false => report.ok("user-queues", "system", format!("programs can use {}", names.join(", "))),
        true => {
            let name = &devices[0].config.name;
            let found = "no work queue is enabled for programs";
            report.problem("user-queues", "system", found, format!("offcore dsa configure vhost -d {name}"));
        }
    }
}
