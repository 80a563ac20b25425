//! Removes libraries of other builds that are no longer used.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Removes libraries and incomplete files that are older than `unused`, unless a process has mapped them: a program
/// needs the file to start others. Processes that this user may not inspect are skipped.
pub(super) fn remove(directory: &Path, unused: Duration) {
    let mut old = old(directory, unused);
    if !old.is_empty() {
        keep_unmapped(&mut old);
    }
    for path in old {
        let _ = fs::remove_file(path);
    }
}

fn old(directory: &Path, unused: Duration) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let is_old = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let ours = name.starts_with("preload-") && (name.ends_with(".so") || name.ends_with(".new"));
        let modified = fs::symlink_metadata(path).and_then(|found| found.modified());
        let age = modified.ok().and_then(|modified| modified.elapsed().ok());
        ours && age.is_some_and(|age| age > unused)
    };
    entries.map(|entry| entry.path()).filter(is_old).collect()
}

/// Keeps only the libraries that no process has mapped.
fn keep_unmapped(old: &mut Vec<PathBuf>) {
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(maps) = fs::read(process.path().join("maps")) else { continue };
        let maps = String::from_utf8_lossy(&maps);
        // Compares names, because the directory may have another path in another process's mount namespace.
        old.retain(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            !maps.contains(name)
        });
    }
}
