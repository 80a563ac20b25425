//! What a peer finds on the machine: programs and free hugepages.

use std::path::{Path, PathBuf};

/// Where `name` is, in PATH or the directories for administrators that an ordinary user's PATH leaves out.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

/// MiB of 2 MiB hugepages that nobody uses or has reserved.
pub fn free_hugepage_mib() -> u32 {
    let count = |name: &str| -> u32 {
        std::fs::read_to_string(Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").join(name))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(0)
    };
    count("free_hugepages").saturating_sub(count("resv_hugepages")).saturating_mul(2)
}
