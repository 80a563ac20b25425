//! Reads small files under an untrusted root: limits their size, skips pipes, and removes control characters.

use std::fs::{self, File, Metadata};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// Maximum bytes read from a file.
const LONGEST: u64 = 256 << 10;

/// The directory that holds `sys`, `proc` and the rest.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Returns a path, absolute or not, under the root.
    pub(super) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let parts = path.as_ref().components().filter(|part| !matches!(part, Component::RootDir));
        self.root.join(parts.collect::<PathBuf>())
    }

    /// Returns the text of a file, without control characters except newlines and tabs, or `None` if it is missing or
    /// unreadable.
    pub(super) fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let path = self.path(path);
        // Opening a pipe would block until its other end opens.
        if !fs::metadata(&path).ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(LONGEST).read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        Some(text.trim().chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect())
    }

    /// Returns the first line of a file, unless empty.
    pub(super) fn line(&self, path: impl AsRef<Path>) -> Option<String> {
        let line = plain(self.text(path)?.lines().next()?);
        (!line.is_empty()).then_some(line)
    }

    /// Returns the decimal number in a file.
    pub(super) fn number<T: std::str::FromStr>(&self, path: impl AsRef<Path>) -> Option<T> {
        self.line(path)?.parse().ok()
    }

    /// Returns the hexadecimal number in a file.
    pub(super) fn hex(&self, path: impl AsRef<Path>) -> Option<u64> {
        hex(&self.line(path)?)
    }

    /// Returns the names in a directory, sorted. If it is missing, the list is empty.
    pub(super) fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(path)) else { return vec![] };
        let mut names: Vec<String> =
            entries.flatten().map(|entry| plain(&entry.file_name().to_string_lossy())).collect();
        names.sort();
        names
    }

    /// Returns the last component of a symbolic link's target.
    pub(super) fn link_name(&self, path: impl AsRef<Path>) -> Option<String> {
        Some(plain(&fs::read_link(self.path(path)).ok()?.file_name()?.to_string_lossy()))
    }

    pub(super) fn is_dir(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).is_dir()
    }

    pub(super) fn metadata(&self, path: impl AsRef<Path>) -> Option<Metadata> {
        fs::metadata(self.path(path)).ok()
    }

    /// Returns the components of the resolved path below the root, or `None` if it leaves the root.
    pub(super) fn real_parts(&self, path: impl AsRef<Path>) -> Option<Vec<String>> {
        let real = fs::canonicalize(self.path(path)).ok()?;
        let parts = real.strip_prefix(fs::canonicalize(&self.root).ok()?).ok()?.components();
        Some(parts.map(|part| plain(&part.as_os_str().to_string_lossy())).collect())
    }
}

/// Returns a line without control characters.
pub(super) fn plain(text: &str) -> String {
    text.trim().chars().filter(|c| !c.is_control()).collect()
}

/// Parses a hexadecimal number with or without 0x.
pub(super) fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::fixture::Fake;

    #[test]
    fn only_files_are_read_and_cleaned() {
        let fake = Fake::empty();
        fake.set("a/b", "\x1b[31mred\u{7}\n");
        let tree = Tree::new(&fake.0);
        assert_eq!(tree.text("a"), None);
        assert_eq!(tree.line("/a/b").as_deref(), Some("[31mred"));
    }
}
