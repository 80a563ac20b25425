//! Who we are, and what the kernel lets us do with a work queue's character device.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use offcore_stats::finding::Report;

use super::System;
use crate::config::sysfs::Device;

/// Bit of CAP_SYS_RAWIO.
const SYS_RAWIO: u64 = 1 << 17;
/// Bit of CAP_DAC_OVERRIDE.
const DAC_OVERRIDE: u64 = 1 << 1;

/// This process, as /proc/self/status tells it.
#[derive(Debug, Default)]
pub(super) struct Me {
    user: u32,
    groups: Vec<u32>,
    capabilities: u64,
    /// The lcores that it may run on.
    pub(super) lcores: Vec<usize>,
}

impl Me {
    pub(super) fn of(system: &System) -> Self {
        let status = system.read("proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap_or_default()
        };
        // Real, effective, saved, file system.
        let effective = |name: &str| field(name).split_whitespace().nth(1)?.parse().ok();
        let extra = field("Groups").split_whitespace().filter_map(|group| group.parse().ok());
        Self {
            user: effective("Uid").unwrap_or_default(),
            groups: effective("Gid").into_iter().chain(extra).collect(),
            capabilities: u64::from_str_radix(field("CapEff").trim(), 16).unwrap_or(0),
            lcores: lcores(field("Cpus_allowed_list").trim()),
        }
    }

    /// Whether the portal may be mapped on kernels that ask for the right to do raw I/O.
    pub(super) fn may_map(&self) -> bool {
        self.capabilities & SYS_RAWIO != 0
    }

    /// Whether this process may read and write a file, and the file's mode and owner in words.
    pub(super) fn may_use(&self, path: &Path) -> (bool, String) {
        let Ok(meta) = std::fs::metadata(path) else { return (false, "it cannot be looked at".into()) };
        let (mode, owner, group) = (meta.mode() & 0o777, meta.uid(), meta.gid());
        let shift = if owner == self.user {
            6
        } else if self.groups.contains(&group) {
            3
        } else {
            0
        };
        let allowed = mode >> shift & 0o6 == 0o6 || self.capabilities & DAC_OVERRIDE != 0;
        (allowed, format!("mode {mode:04o}, user {owner}, group {group}; we are user {}", self.user))
    }
}

/// `0,2-3` as numbers.
pub(super) fn lcores(list: &str) -> Vec<usize> {
    let ranges = list.split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?.min(65_535))
    });
    ranges.flatten().collect()
}

/// The releases from which on a portal is only mapped for CAP_SYS_RAWIO, for each series that got the fix.
const FIXED: [[u32; 3]; 4] = [[6, 6, 31], [6, 8, 10], [6, 9, 1], [6, 10, 0]];

/// Whether a kernel has the rule of INTEL-SA-01084; `None` for series of which only some builds may have it.
fn has_mapping_rule(release: &str) -> Option<bool> {
    let mut numbers = release.split(['.', '-', '+']).map(|number| number.parse::<u32>().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    let [major, minor, patch] = [next(), next(), next()];
    if [major, minor] >= [6, 10] {
        return Some(true);
    }
    let series = FIXED.iter().find(|[a, b, _]| [*a, *b] == [major, minor]);
    series.map(|[_, _, first]| patch >= *first)
}

/// By which way descriptors will go.
pub(super) fn mapping(system: &System, me: &Me, devices: &[Device], report: &mut Report) {
    let check = "portal-mapping";
    let release = system.read("proc/sys/kernel/osrelease").unwrap_or_default();
    let first = devices.iter().any(|device| device.capabilities.version < 0x200);
    let batch = if first { ", and Batch is not available on first-generation devices" } else { "" };
    match (has_mapping_rule(&release), me.may_map()) {
        (_, true) => report.check(check, "system").ok(format!("Linux {release}: CAP_SYS_RAWIO is there")),
        (Some(false), false) => {
            let advice = "update the kernel to 6.10, or 6.9.1, 6.8.10, 6.6.31 of its series";
            let found = format!(
                "Linux {release} maps portals for everybody: a program can harm the host through the device \
                 (INTEL-SA-01084, CVE-2024-21823)"
            );
            report.check(check, "system").warning(found, advice);
        }
        (Some(true), false) => {
            let found = format!(
                "Linux {release} maps portals only for CAP_SYS_RAWIO, which we lack: descriptors go by write(), one \
                 system call a burst{batch}"
            );
            let advice = "run as root, or setcap cap_sys_rawio+ep on the program";
            report.check(check, "system").warning(found, advice);
        }
        (None, false) => {
            let found = format!(
                "Linux {release} may map portals only for CAP_SYS_RAWIO, which we lack (INTEL-SA-01084 was fixed in \
                 some builds of it); without the right descriptors go by write(){batch}"
            );
            let advice = "run as root, or setcap cap_sys_rawio+ep on the program";
            report.check(check, "system").warning(found, advice);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mapping_rule_is_known_by_release() {
        for (release, rule) in [
            ("6.18.44-fc", Some(true)),
            ("7.0.0", Some(true)),
            ("6.10.0-rc1", Some(true)),
            ("6.9.0", Some(false)),
            ("6.9.1", Some(true)),
            ("6.6.30-generic", Some(false)),
            ("6.6.31", Some(true)),
            ("6.8.0-45-generic", Some(false)),
            ("5.15.0-91-generic", None),
            ("", None),
        ] {
            assert_eq!(has_mapping_rule(release), rule, "{release}");
        }
    }

    #[test]
    fn lists_of_lcores_are_read() {
        assert_eq!(lcores("0,2-4"), [0, 2, 3, 4]);
        assert_eq!(lcores(""), [0; 0]);
    }
}
