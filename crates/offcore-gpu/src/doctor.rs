//! Checks a machine for packet processing on a GPU: what it has, what is missing, and what to do.
//!
//! [`examine`] reads files under a root, which can be a directory other than `/`. The caller supplies what files do not
//! tell ([`Given`]): limits and paths of its process, the planned run, and the CUDA driver's answers. The [`Report`] is
//! plain data: [`Facts`], and a [`Finding`] per rule.
//!
//! * [`facts`]: everything read; [`pci`]: PCI functions; [`cuda`]: facts from the CUDA driver and the kernels' PTX,
//! * `rules`: the expected state, and why.

pub mod cuda;
pub mod facts;
#[cfg(test)]
mod fixture;
pub mod pci;
mod rules;
mod tree;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use cuda::{CudaDevice, CudaFacts, Ptx};
pub use facts::Facts;
use tree::Tree;

/// Input that the files under the root do not provide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// The environment's `CUDA_PATH_L`: the directory with libcuda.
    pub cuda_path: Option<PathBuf>,
    /// The environment's `GDRCOPY_PATH_L`: the directory with libgdrapi.
    pub gdrcopy_path: Option<PathBuf>,
    /// The directories of the environment's `LD_LIBRARY_PATH`.
    pub library_path: Vec<PathBuf>,
    /// The limit RLIMIT_MEMLOCK, if it is known.
    pub locked_memory: Option<LockedMemory>,
    /// Bytes of the planned packet pool; 0: unknown.
    pub pool_bytes: u64,
    /// Bytes of the longest frame, with its Ethernet header and without FCS.
    pub frame_bytes: usize,
    /// The selected network cards, by PCI address or interface name; empty: all.
    pub nics: Vec<String>,
    /// Whether this build has the stand-in on threads, `--device host`.
    pub has_host_device: bool,
    /// Requirements of the kernels' PTX.
    pub ptx: Option<Ptx>,
    /// Facts from the CUDA driver, if it was queried.
    pub cuda: Option<CudaFacts>,
    /// Why the query failed, if it did.
    pub cuda_error: Option<String>,
}

impl Default for Given {
    /// Frames of 1514 bytes, no pool, this build, nothing else known.
    fn default() -> Self {
        Self {
            cuda_path: None,
            gdrcopy_path: None,
            library_path: vec![],
            locked_memory: None,
            pool_bytes: 0,
            frame_bytes: 1514,
            nics: vec![],
            has_host_device: crate::kernel::BUILT,
            ptx: None,
            cuda: None,
            cuda_error: None,
        }
    }
}

/// A limit on the memory that a process may lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LockedMemory {
    /// No limit.
    Unlimited,
    /// A limit in bytes.
    Bytes(u64),
}

/// The verdict of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Not relevant on this machine.
    #[serde(rename = "not applicable")]
    NotApplicable,
    /// As expected.
    Ok,
    /// Cannot be determined; the advice says how to check.
    #[serde(rename = "not known")]
    NotKnown,
    /// It works, but not optimally.
    Warning,
    /// It prevents the use of the GPU or of a requested port.
    Problem,
}

impl Verdict {
    /// A stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotApplicable => "not applicable",
            Self::Ok => "ok",
            Self::NotKnown => "not known",
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

/// The result of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The rule's stable name: `pcie-link`.
    pub check: &'static str,
    /// What was checked: `system`, a PCI address, a network interface.
    pub place: String,
    /// The verdict.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// The expected state.
    pub wanted: String,
    /// The reason for it.
    pub why: String,
    /// The advice; empty if there is nothing to do.
    pub advice: String,
}

/// The doctor's report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The facts.
    pub facts: Facts,
    /// The findings in diagnostic order: the machine, its GPUs, its network cards.
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
}

/// Examines everything under `root`, the directory that holds `sys`, `proc`, `dev`, `usr` and `lib`.
///
/// Files that are missing, unreadable or malformed count as unknown; there is no error.
pub fn examine(root: &Path, given: &Given) -> Report {
    let facts = Facts::read(&Tree::new(root), given);
    let findings = rules::all(&facts, given);
    Report { facts, findings }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::fixture::{Fake, GPU, NIC};

    #[test]
    fn a_machine_as_wanted_has_no_warning() {
        let mut fake = Fake::good("good");
        fake.cuda().driver_version = 13_030;
        let report = examine(&fake.root, &fake.given);
        let bad: Vec<_> = report.findings.iter().filter(|f| f.verdict >= Verdict::Warning).collect();
        assert!(bad.is_empty(), "{bad:#?}");
        // Pause frames and CQE compression cannot be seen in files.
        let unknown: Vec<_> = report.findings.iter().filter(|f| f.verdict == Verdict::NotKnown).collect();
        assert_eq!(unknown.iter().map(|f| f.check).collect::<Vec<_>>(), ["pause-frames", "cqe-compression"]);
        assert_eq!(report.worst(), Verdict::NotKnown);
    }

    #[test]
    fn findings_have_advice_and_reason() {
        let fakes = [Fake::good("reasons"), Fake::empty("reasons-none"), Fake::rubbish("reasons-rubbish")];
        for fake in fakes {
            for finding in examine(&fake.root, &fake.given).findings {
                assert!(!finding.found.is_empty() && !finding.wanted.is_empty(), "{finding:?}");
                assert!(!finding.why.is_empty(), "{finding:?}");
                let wants_advice = finding.verdict >= Verdict::NotKnown;
                assert_eq!(!finding.advice.is_empty(), wants_advice, "{finding:?}");
            }
        }
    }

    #[test]
    fn empty_root_is_a_machine_without_a_gpu() {
        let fake = Fake::empty("empty");
        let report = examine(&fake.root, &fake.given);
        assert!(report.facts.gpus.is_empty() && report.facts.nics.is_empty());
        let problems: Vec<_> = report.findings.iter().filter(|f| f.verdict == Verdict::Problem).collect();
        assert_eq!(problems.iter().map(|f| f.check).collect::<Vec<_>>(), ["gpu"], "one cause, one problem");
        let none = examine(Path::new("/nonexistent"), &Given::default());
        assert_eq!(none.count(Verdict::Problem), 1);
    }

    #[test]
    fn rubbish_in_every_file_is_survived() {
        let fake = Fake::rubbish("rubbish");
        let report = examine(&fake.root, &fake.given);
        assert_eq!(report.facts.gpus.len(), 1, "vendor and class were left alone");
        let gpu = &report.facts.gpus[0];
        assert_eq!((gpu.function.numa_node, gpu.bar.as_ref()), (None, None));
        assert_eq!(report.facts.driver.as_ref().and_then(|driver| driver.version.clone()), None);
        assert!(serde_json::to_string(&report).is_ok());
        let words = report.findings.iter().flat_map(|f| f.found.chars());
        assert!(words.into_iter().all(|c| !c.is_control()), "nothing for the terminal to obey");
    }

    #[test]
    fn json_names_are_stable() {
        let fake = Fake::good("json");
        let json = serde_json::to_value(examine(&fake.root, &fake.given)).unwrap();
        assert_eq!(json["facts"]["gpus"][0]["address"], GPU);
        assert_eq!(json["facts"]["nics"][0]["address"], NIC);
        assert_eq!(json["facts"]["gpus"][0]["config"]["known"]["max_read_request"], 4096);
        assert_eq!(json["facts"]["pairs"][0]["meeting"], serde_json::json!({ "bridge": "0000:01:00.0" }));
        assert_eq!(json["findings"][0]["check"], "gpu");
        assert_eq!(json["findings"][0]["verdict"], "ok");
    }

    #[test]
    fn two_gpus_have_findings_of_their_own() {
        let fake = Fake::good("two");
        fake.second_gpu();
        let report = examine(&fake.root, &fake.given);
        assert_eq!(report.facts.gpus.len(), 2);
        let at = |check: &str| -> Vec<(&str, Verdict)> {
            let of = report.findings.iter().filter(|f| f.check == check);
            of.map(|f| (f.place.as_str(), f.verdict)).collect()
        };
        let other = "0000:c1:00.0";
        assert_eq!(at("numa-node"), [(GPU, Verdict::Ok), (other, Verdict::Warning)]);
        assert_eq!(at("common-bridge"), [(GPU, Verdict::Ok), (other, Verdict::Warning)]);
        assert_eq!(report.facts.pairs.len(), 2);
    }
}
