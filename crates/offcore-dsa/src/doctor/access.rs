//! Submission methods that the kernel permits.

use offcore_stats::finding::{Report, Rights};

use super::System;
use crate::config::sysfs::SysfsDevice;

/// The number of CAP_SYS_RAWIO.
const SYS_RAWIO: u32 = 17;

/// The first releases that map a portal only for CAP_SYS_RAWIO, for each series that got the fix.
const FIXED: [[u32; 3]; 4] = [[6, 6, 31], [6, 8, 10], [6, 9, 1], [6, 10, 0]];

/// Whether a kernel has the restriction of INTEL-SA-01084; `None` for series in which only some builds may have it.
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

/// Checks which submission method programs will use.
pub(super) fn mapping(system: &System, me: &Rights, devices: &[SysfsDevice], report: &mut Report) {
    let check = "portal-mapping";
    let release = system.read("proc/sys/kernel/osrelease").unwrap_or_default();
    let first = devices.iter().any(|device| device.capabilities.version < 0x200);
    let batch = if first { ", and Batch is not available on first-generation devices" } else { "" };
    match (has_mapping_rule(&release), me.has(SYS_RAWIO)) {
        (_, true) => report.check(check, "system").ok(format!("Linux {release}: CAP_SYS_RAWIO is there")),
        (Some(false), false) => {
            let advice = "update the kernel to 6.10, or 6.9.1, 6.8.10, 6.6.31 of its series";
            let found = format!(
                "Linux {release} maps portals for all users: a program can harm the host through the device \
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
    fn kernel_release_decides_portal_mapping() {
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
}
