//! A directory for sockets and temporary files that is removed with its owner.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

use super::leftovers;

/// A new, empty directory under the system's temporary directory. It is removed with its content on drop.
///
/// Its path is short, so that a socket in it stays below the 107 bytes of a Unix socket address.
#[derive(Debug)]
pub struct TempDir {
    path: PathBuf,
}

impl TempDir {
    /// Creates the directory, readable only by its owner.
    ///
    /// # Errors
    /// If the directory cannot be created. The error names it.
    pub fn new() -> Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let path = std::env::temp_dir().join(unique_name());
        let make = || {
            let made = std::fs::DirBuilder::new().mode(0o700).create(&path);
            made.with_context(|| format!("cannot make the directory {}", path.display()))
        };
        leftovers::make(&path.to_string_lossy(), make, remove)?;
        Ok(Self { path })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of a file in the directory, which need not exist.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        leftovers::remove(&self.path.to_string_lossy());
    }
}

fn remove(path: &str) {
    // A directory that was removed elsewhere, or is still being written to, must not fail a successful test.
    let _ = std::fs::remove_dir_all(path);
}

/// Returns a name that no other live process uses and that this process uses once: `oc`, the process ID, `n` and a
/// count.
///
/// The first thousand names of a process have at most 15 characters, so that they can also name a network interface.
pub fn unique_name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("oc{}n{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tempdir_is_private_and_removed() {
        use std::os::unix::fs::PermissionsExt;
        let dir = TempDir::new().unwrap();
        let path = dir.path().to_owned();
        std::fs::write(dir.file("x"), "x").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        drop(dir);
        assert!(!path.exists());
    }

    #[test]
    fn names_differ() {
        assert_ne!(unique_name(), unique_name());
    }
}
