//! The rights of this process: file access and locked memory.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use crate::doctor::tree::Tree;

/// Bits of capabilities.
const DAC_OVERRIDE: u64 = 1 << 1;
const IPC_LOCK: u64 = 1 << 14;

/// This process from /proc/self/status; an unprivileged default if that is missing.
#[derive(Debug)]
pub(super) struct Me {
    user: Option<u32>,
    groups: Vec<u32>,
    capabilities: u64,
}

impl Me {
    pub(super) fn of(tree: &Tree) -> Self {
        let status = tree.text("proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap_or_default()
        };
        // Real, effective, saved, file system.
        let effective = |name: &str| field(name).split_whitespace().nth(1)?.parse().ok();
        let extra = field("Groups").split_whitespace().filter_map(|group| group.parse().ok());
        Self {
            user: effective("Uid"),
            groups: effective("Gid").into_iter().chain(extra).collect(),
            capabilities: u64::from_str_radix(field("CapEff").trim(), 16).unwrap_or(0),
        }
    }

    /// Whether this process is exempt from the limit on locked memory.
    pub(super) fn may_lock_all(&self) -> bool {
        self.capabilities & IPC_LOCK != 0
    }

    /// Whether this process may read and write a file by its mode, and the mode and owner as text.
    pub(super) fn may_use(&self, meta: &Metadata) -> (bool, String) {
        let (mode, owner, group) = (meta.mode() & 0o777, meta.uid(), meta.gid());
        let shift = if self.user == Some(owner) {
            6
        } else if self.groups.contains(&group) {
            3
        } else {
            0
        };
        let allowed = mode >> shift & 0o6 == 0o6 || self.capabilities & DAC_OVERRIDE != 0;
        (allowed, format!("mode {mode:04o}, user {owner}, group {group}"))
    }
}
