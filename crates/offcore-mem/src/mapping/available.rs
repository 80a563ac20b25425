//! Determines the machine's memory, and the memory that this process may still use within its control groups' limits.

use std::fs;
use std::path::Path;

/// Returns the machine's memory in bytes, including hugepages (proc(5), MemTotal).
pub fn all_memory() -> Option<usize> {
    meminfo("MemTotal:")
}

/// Returns the number of bytes that this process can allocate without taking memory from others: the kernel's estimate
/// for the machine (proc(5), MemAvailable), or less if a control group of this process has a limit (the kernel's
/// cgroup-v2.rst, `memory.max`; cgroup-v1/memory.rst).
pub fn available_memory() -> Option<usize> {
    let machine = meminfo("MemAvailable:")?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let left = available_in_cgroups(Path::new("/sys/fs/cgroup"), &groups);
    Some(left.map_or(machine, |left| left.min(machine)))
}

fn meminfo(name: &str) -> Option<usize> {
    // Miri warns about each of these files.
    let text = (!cfg!(miri)).then(|| fs::read_to_string("/proc/meminfo").ok())??;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: usize = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

/// Names of a control group's files.
struct Names {
    limit: &'static str,
    usage: &'static str,
    /// The name of a line in `memory.stat`.
    inactive: &'static str,
}

const V1: Names = Names {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    inactive: "total_inactive_file ",
};
const V2: Names = Names { limit: "memory.max", usage: "memory.current", inactive: "inactive_file " };

/// Returns the minimum of the memory that this process's groups and their ancestors have left; `None` without a limit.
/// `groups` is the text of `/proc/self/cgroup`.
fn available_in_cgroups(root: &Path, groups: &str) -> Option<usize> {
    let left_in = |root: &Path, group: &str, names: &Names| {
        let group = root.join(group);
        group
            .ancestors()
            .take_while(|group| group.starts_with(root))
            .filter_map(|group| left(group, names))
            .min()
    };
    let left =
        groups.lines().filter_map(|line| match (line.strip_prefix("0::/"), line.split_once(":memory:/")) {
            (Some(group), _) => left_in(root, group, &V2),
            (None, Some((_, group))) => left_in(&root.join("memory"), group, &V1),
            (None, None) => None,
        });
    left.min()
}

/// Returns the memory that a group has left; `None` without a limit. Inactive file pages count as free, because the
/// kernel frees them before it refuses memory.
fn left(group: &Path, names: &Names) -> Option<usize> {
    let number = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse::<usize>().ok();
    let (limit, usage) = (number(names.limit)?, number(names.usage)?);
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let inactive = stat.lines().find_map(|line| line.strip_prefix(names.inactive)?.parse::<usize>().ok());
    Some(limit.saturating_sub(usage.saturating_sub(inactive.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TempDir;

    fn group(root: &Path, name: &str, names: &Names, limit: &str, usage: usize, inactive: usize) {
        let group = root.join(name);
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join(names.limit), format!("{limit}\n")).unwrap();
        fs::write(group.join(names.usage), format!("{usage}\n")).unwrap();
        fs::write(group.join("memory.stat"), format!("anon 5\n{}{inactive}\n", names.inactive)).unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "writes files")]
    fn groups_limit_available_memory() {
        let directory = TempDir::new();
        let root = directory.0.as_path();
        group(root, "a", &V2, "1000", 700, 100);
        group(root, "a/b", &V2, "max", 700, 0);
        group(root, "a/b/c", &V2, "500", 90, 0);
        group(root, "memory/old", &V1, "100", 80, 10);
        for (groups, left) in [
            ("0::/\n", None),
            ("0::/none\n", None),
            ("4:memory:/a\n", None),
            ("4:memory:/old\n0::/\n", Some(30)),
            ("4:memory:/old\n0::/a\n", Some(30)),
            ("0::/a\n", Some(400)),
            ("0::/a/b\n", Some(400)),
            ("0::/a/b/c\n", Some(400)),
        ] {
            assert_eq!(available_in_cgroups(root, groups), left, "{groups}");
        }
        group(root, "a/b/c", &V2, "500", 490, 0);
        assert_eq!(available_in_cgroups(root, "0::/a/b/c\n"), Some(10));
        group(root, "a/b/c", &V2, "500", 600, 0);
        assert_eq!(available_in_cgroups(root, "0::/a/b/c\n"), Some(0), "above a limit that was lowered");
    }
}
