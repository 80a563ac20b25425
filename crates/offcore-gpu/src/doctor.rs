//! Checks a machine for packet processing on a GPU: hardware and software, missing parts, and remedies.
//!
//! [`examine`] reads files under a root, which can be a directory other than `/`. The caller supplies information that
//! is not in files ([`Given`]): the planned run, and the CUDA driver's answers. The result is plain data: [`Facts`],
//! and a finding per rule.
//!
//! * [`facts`]: everything read; [`pci`]: PCI functions; [`cuda`]: facts from the CUDA driver and the kernels' PTX,
//! * `rules`: the expected state, and the reasons.

pub mod cuda;
pub mod facts;
#[cfg(test)]
mod fixture;
pub mod pci;
mod rules;
mod tree;

use std::path::Path;

use offcore_stats::finding::Report;

pub use cuda::{CudaDeviceFacts, CudaFacts, Ptx};
pub(crate) use cuda::{MAPS_DMA_BUF, words};
pub use facts::Facts;
use tree::Tree;

/// Input that the files under the root do not provide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// Bytes of the planned packet pool, or 0 if unknown.
    pub pool_bytes: u64,
    /// The selected network cards, by PCI address or interface name. Empty for all.
    pub nics: Vec<String>,
    /// Whether this build has `--device host`, which emulates a GPU by threads.
    pub has_host_device: bool,
    /// Requirements of the kernels' PTX.
    pub ptx: Option<Ptx>,
    /// Facts from the CUDA driver, if it was queried.
    pub cuda: Option<CudaFacts>,
    /// Why the query failed, if it did.
    pub cuda_error: Option<String>,
}

impl Default for Given {
    /// Returns the input without a pool, for this build, with everything else unknown.
    fn default() -> Self {
        Self {
            pool_bytes: 0,
            nics: vec![],
            has_host_device: crate::kernel::BUILT,
            ptx: None,
            cuda: None,
            cuda_error: None,
        }
    }
}

/// Examines everything under `root`, the directory that contains `sys`, `proc` and `dev`.
///
/// Files that are missing, unreadable or malformed count as unknown, so no error can occur.
pub fn examine(root: &Path, given: &Given) -> (Facts, Report) {
    let facts = Facts::read(&Tree::new(root), given);
    let report = rules::all(&facts, given);
    (facts, report)
}

#[cfg(test)]
mod tests {
    use offcore_stats::finding::Verdict;

    use super::*;
    use crate::doctor::fixture::{Fake, GPU, NIC};

    #[test]
    fn healthy_machine_has_no_warning() {
        let mut fake = Fake::good();
        fake.cuda().driver_version = 13_030;
        let report = fake.report().1;
        let bad: Vec<_> = report.findings.iter().filter(|f| f.verdict >= Verdict::Warning).collect();
        assert!(bad.is_empty(), "{bad:#?}");
        assert_eq!(report.worst(), Verdict::Ok);
    }

    #[test]
    fn findings_have_advice_and_reason() {
        let fakes = [Fake::good(), Fake::empty(), Fake::rubbish()];
        for fake in fakes {
            for finding in fake.report().1.findings {
                assert!(!finding.found.is_empty() && !finding.wanted.is_empty(), "{finding:?}");
                assert!(!finding.why.is_empty(), "{finding:?}");
                let wants_advice = finding.verdict >= Verdict::NotKnown;
                assert_eq!(!finding.advice.is_empty(), wants_advice, "{finding:?}");
            }
        }
    }

    #[test]
    fn empty_sysfs_reports_no_gpu() {
        let fake = Fake::empty();
        let (facts, report) = fake.report();
        assert!(facts.gpus.is_empty() && facts.nics.is_empty());
        let problems: Vec<_> = report.findings.iter().filter(|f| f.verdict == Verdict::Problem).collect();
        assert_eq!(problems.iter().map(|f| f.check).collect::<Vec<_>>(), ["gpu"], "one cause, one problem");
        let none = examine(Path::new("/nonexistent"), &Given::default()).1;
        assert_eq!(none.count(Verdict::Problem), 1);
    }

    #[test]
    fn invalid_sysfs_content_is_tolerated() {
        let fake = Fake::rubbish();
        let (facts, report) = fake.report();
        assert_eq!(facts.gpus.len(), 1, "vendor and class were left alone");
        let gpu = &facts.gpus[0];
        assert_eq!((gpu.function.numa_node, gpu.bar.as_ref()), (None, None));
        assert_eq!(facts.driver.as_ref().and_then(|driver| driver.version.clone()), None);
        assert!(serde_json::to_string(&facts).is_ok());
        let words = report.findings.iter().flat_map(|f| f.found.chars());
        assert!(words.into_iter().all(|c| !c.is_control()), "nothing for the terminal to obey");
    }

    #[test]
    fn json_names_are_stable() {
        let fake = Fake::good();
        let json = serde_json::to_value(fake.report().0).unwrap();
        assert_eq!(json["gpus"][0]["address"], GPU);
        assert_eq!(json["nics"][0]["address"], NIC);
        assert_eq!(json["gpus"][0]["link"]["generation"], 5);
        assert_eq!(json["pairs"][0]["meeting"], serde_json::json!({ "bridge": "0000:01:00.0" }));
    }

    #[test]
    fn two_gpus_have_separate_findings() {
        let fake = Fake::good();
        fake.second_gpu();
        let (facts, report) = fake.report();
        assert_eq!((facts.gpus.len(), facts.pairs.len()), (2, 2));
        let at = |check: &str| -> Vec<(&str, Verdict)> {
            let of = report.findings.iter().filter(|f| f.check == check);
            of.map(|f| (f.place.as_str(), f.verdict)).collect()
        };
        let other = "0000:c1:00.0";
        assert_eq!(at("numa-node"), [(GPU, Verdict::Ok), (other, Verdict::Warning)]);
        assert_eq!(at("common-bridge"), [(GPU, Verdict::Ok), (other, Verdict::Warning)]);
    }
}
