//! The directory of a program's private stack. Its name is unpredictable.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};

const PREFIX: &str = "offcore-exec-";
/// Number of names to try.
const TRIES: usize = 16;

/// A directory that only this user can read. It is removed when this is dropped.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    lock: File,
}

impl Directory {
    /// Creates a directory among the temporary files. Removes directories that killed commands have left first.
    ///
    /// # Errors
    /// System errors.
    pub(super) fn make() -> Result<Self> {
        Self::make_in(&std::env::temp_dir())
    }

    fn make_in(parent: &Path) -> Result<Self> {
        remove_left(parent);
        for _ in 0..TRIES {
            let mut random = [0; 8];
            getrandom(&mut random, GetRandomFlags::empty()).context("random bytes")?;
            let path = parent.join(format!("{PREFIX}{:016x}", u64::from_ne_bytes(random)));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error).with_context(|| path.display().to_string()),
            }
            match lock(&path) {
                Ok(Some(lock)) => return Ok(Self { path, lock }),
                // Another command has mistaken it for an abandoned one.
                Ok(None) => {}
                Err(error) => {
                    let _ = fs::remove_dir(&path);
                    return Err(error).with_context(|| format!("locking {}", path.display()));
                }
            }
        }
        bail!("{}: no unused name for a new directory was found", parent.display())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a descriptor that protects the directory from removal while any process holds it.
    pub(super) fn claim(&self) -> io::Result<File> {
        self.lock.try_clone()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Locks a directory of this user. Returns `None` if it is not such a directory, no longer exists, or is in use.
fn lock(path: &Path) -> Result<Option<File>, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(directory) = open(path, flags, Mode::empty()).map(File::from) else { return Ok(None) };
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => return Err(error),
    }
    // It may have been removed in the meantime and created again by another process.
    let (Ok(locked), Ok(found)) = (directory.metadata(), fs::symlink_metadata(path)) else { return Ok(None) };
    let same = (locked.dev(), locked.ino()) == (found.dev(), found.ino());
    Ok(Some(directory).filter(|_| same && found.uid() == geteuid().as_raw()))
}

/// Returns whether a directory name has the exact format. Other names with this prefix belong to other programs.
fn is_name(name: &OsStr) -> bool {
    let number = name.as_encoded_bytes().strip_prefix(PREFIX.as_bytes());
    number.is_some_and(|number| number.len() == 16 && number.iter().all(u8::is_ascii_hexdigit))
}

/// Removes this user's directories that no command and no stack uses.
fn remove_left(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if is_name(&entry.file_name())
            && let Ok(Some(_lock)) = lock(&entry.path())
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;

    #[test]
    fn abandoned_directories_are_removed() {
        let parent = std::env::temp_dir().join(format!("offcore-directory-{}", std::process::id()));
        let names = ["offcore-exec-0123456789abcdef", "offcore-exec-fedcba9876543210", "offcore-exec-notes"];
        let [left, claimed, other] = names.map(|name| {
            fs::create_dir_all(parent.join(name).join("below")).unwrap();
            parent.join(name)
        });
        // The state of a stack whose command was killed.
        let lock = lock(&claimed).unwrap().unwrap();
        let claim = lock.try_clone().unwrap();
        drop(lock);
        let first = Directory::make_in(&parent).unwrap();
        assert!(!left.exists() && claimed.exists() && other.exists());
        drop(claim);
        let second = Directory::make_in(&parent).unwrap();
        assert!(!claimed.exists() && other.exists());
        let paths = [first, second].map(|made| {
            assert_eq!(fs::metadata(made.path()).unwrap().mode() & 0o777, 0o700);
            made.path().to_owned()
        });
        assert_ne!(paths[0], paths[1]);
        assert!(paths.iter().all(|path| !path.exists()));
        fs::remove_dir_all(&parent).unwrap();
    }

    #[test]
    fn symlinks_are_not_removed() {
        let parent = std::env::temp_dir().join(format!("offcore-directory-links-{}", std::process::id()));
        fs::create_dir_all(parent.join("precious")).unwrap();
        std::os::unix::fs::symlink("precious", parent.join("offcore-exec-0123456789abcdef")).unwrap();
        drop(Directory::make_in(&parent).unwrap());
        assert!(parent.join("precious").exists() && parent.join("offcore-exec-0123456789abcdef").exists());
        fs::remove_dir_all(&parent).unwrap();
    }
}
