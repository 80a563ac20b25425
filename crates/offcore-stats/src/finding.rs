//! Findings of a doctor: checks of a machine, their verdicts, advice, and the rights of the examined process.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use crate::lcore;

/// How something is, from what does not matter to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, displaydoc::Display)]
pub enum Verdict {
    /// not applicable
    NotApplicable,
    /// ok
    Ok,
    /// not known
    NotKnown,
    /// warning
    Warning,
    /// problem
    Problem,
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The check's stable name: `kernel-command-line`.
    pub check: &'static str,
    /// The object of the check: `system`, `dsa0`, a PCI address.
    pub place: String,
    pub verdict: Verdict,
    pub found: String,
    /// The expected state and the reason; both are empty if `found` and `advice` contain them.
    pub wanted: String,
    pub why: &'static str,
    /// The advice; empty if no action is needed.
    pub advice: String,
}

impl Finding {
    /// Adds the expected state and the reason.
    pub fn wants(&mut self, wanted: impl Into<String>, why: &'static str) -> &mut Self {
        (self.wanted, self.why) = (wanted.into(), why);
        self
    }

    fn judge(&mut self, verdict: Verdict, found: impl Into<String>, advice: impl Into<String>) {
        (self.verdict, self.found, self.advice) = (verdict, found.into(), advice.into());
    }

    /// Records that the check does not apply here.
    pub fn not_applicable(&mut self, found: impl Into<String>) {
        self.judge(Verdict::NotApplicable, found, "");
    }

    /// Records that the state is as expected.
    pub fn ok(&mut self, found: impl Into<String>) {
        self.judge(Verdict::Ok, found, "");
    }

    /// Records that the state cannot be determined here; the advice says how to determine it.
    pub fn not_known(&mut self, found: impl Into<String>, advice: impl Into<String>) {
        self.judge(Verdict::NotKnown, found, advice);
    }

    /// Records that the device works, but not as well as it could.
    pub fn warning(&mut self, found: impl Into<String>, advice: impl Into<String>) {
        self.judge(Verdict::Warning, found, advice);
    }

    /// Records a state that prevents the use of the device.
    pub fn problem(&mut self, found: impl Into<String>, advice: impl Into<String>) {
        self.judge(Verdict::Problem, found, advice);
    }
}

/// All findings, in the order of a manual examination.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub findings: Vec<Finding>,
}

impl Report {
    /// Begins a check. Its verdict is `NotKnown` until another one is recorded.
    pub fn check(&mut self, check: &'static str, place: &str) -> &mut Finding {
        let (found, wanted, advice) = Default::default();
        let verdict = Verdict::NotKnown;
        self.findings.push_mut(Finding {
            check,
            place: place.into(),
            verdict,
            found,
            wanted,
            why: "",
            advice,
        })
    }

    /// Returns the worst verdict.
    pub fn worst(&self) -> Verdict {
        self.findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::NotApplicable)
    }

    /// Returns the number of findings with this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.findings.iter().filter(|finding| finding.verdict == verdict).count()
    }
}

/// A process's rights and lcores, as reported in `/proc/PID/status`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rights {
    user: Option<u32>,
    groups: Vec<u32>,
    capabilities: u64,
    /// The lcores on which it may run; empty if the file does not contain them.
    pub lcores: Vec<usize>,
}

/// The number of CAP_DAC_OVERRIDE.
const DAC_OVERRIDE: u32 = 1;

impl Rights {
    /// Parses the contents of a status file. Missing fields mean no rights and no lcores.
    pub fn of(status: &str) -> Self {
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .unwrap_or_default()
                .trim()
        };
        // The fields are the real, effective, saved and file system ids.
        let effective = |name: &str| field(name).split_whitespace().nth(1)?.parse().ok();
        let extra = field("Groups").split_whitespace().filter_map(|group| group.parse().ok());
        Self {
            user: effective("Uid"),
            groups: effective("Gid").into_iter().chain(extra).collect(),
            capabilities: u64::from_str_radix(field("CapEff"), 16).unwrap_or(0),
            lcores: lcore::parse_list(field("Cpus_allowed_list")).unwrap_or_default(),
        }
    }

    /// Whether the process has the capability with this number (linux/capability.h).
    pub fn has(&self, capability: u32) -> bool {
        self.capabilities >> capability & 1 == 1
    }

    /// Returns whether the process may read and write a file by its mode, and the mode and the owner in words.
    pub fn may_use(&self, meta: &Metadata) -> (bool, String) {
        let (mode, owner, group) = (meta.mode() & 0o777, meta.uid(), meta.gid());
        let shift = if self.user == Some(owner) {
            6
        } else if self.groups.contains(&group) {
            3
        } else {
            0
        };
        let allowed = mode >> shift & 0o6 == 0o6 || self.has(DAC_OVERRIDE);
        let user = self.user.map_or("unknown".into(), |user| user.to_string());
        (allowed, format!("mode {mode:04o}, user {owner}, group {group}; we are user {user}"))
    }
}
