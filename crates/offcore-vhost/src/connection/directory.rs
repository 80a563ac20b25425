//! The directory of a socket.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// Device and inode number of a file.
pub type FileId = (u64, u64);

/// The directory of a file, opened once. Files are examined and removed relative to it. If a user of a directory above
/// it later replaces a part of the path by a symbolic link, no file elsewhere is affected.
#[derive(Debug)]
pub struct Directory(OwnedFd);

impl Directory {
    /// Opens the directory of the file at `path`.
    ///
    /// # Errors
    /// Returns the error of the system.
    pub fn of(path: &Path) -> Result<Self, Errno> {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, parent, flags, Mode::empty()).map(Self)
    }

    /// Returns the status of the file in this directory that has the name of `path`, without following a link.
    ///
    /// # Errors
    /// Returns the error of the system, for example for a missing file.
    pub fn stat(&self, path: &Path) -> Result<Stat, Errno> {
        rustix::fs::statat(&self.0, Self::name(path)?, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Returns the identity of such a file.
    pub fn file(&self, path: &Path) -> Option<FileId> {
        self.stat(path).ok().map(|found| (found.st_dev, found.st_ino))
    }

    /// Returns the identity of such a file if it is a socket.
    pub fn socket(&self, path: &Path) -> Option<FileId> {
        let found = self.stat(path).ok()?;
        let is_socket = FileType::from_raw_mode(found.st_mode) == FileType::Socket;
        is_socket.then_some((found.st_dev, found.st_ino))
    }

    /// Removes the file with the name of `path` if it still is `file`.
    ///
    /// # Errors
    /// Returns the error of the system.
    pub fn remove(&self, path: &Path, file: Option<FileId>) -> Result<(), Errno> {
        match file.is_some() && self.file(path) == file {
            true => rustix::fs::unlinkat(&self.0, Self::name(path)?, AtFlags::empty()),
            false => Ok(()),
        }
    }

    /// Opens a file in this directory.
    ///
    /// # Errors
    /// Returns the error of the system.
    pub fn open(&self, path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        rustix::fs::openat(&self.0, Self::name(path)?, flags | OFlags::NOFOLLOW, mode)
    }

    fn name(path: &Path) -> Result<&Path, Errno> {
        path.file_name().map(Path::new).ok_or(Errno::ISDIR)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn replaced_path_removes_no_other_file() {
        let root = std::env::temp_dir().join(format!("offcore-directory-{}", std::process::id()));
        let [own, other, moved] = ["own", "other", "moved"].map(|name| root.join(name));
        for directory in [&own, &other] {
            fs::create_dir_all(directory).unwrap();
            fs::write(directory.join("file"), "").unwrap();
        }
        let path = own.join("file");
        let directory = Directory::of(&path).unwrap();
        let file = directory.file(&path);
        assert!(file.is_some() && directory.socket(&path).is_none());
        fs::rename(&own, &moved).unwrap();
        symlink(&other, &own).unwrap();
        directory.remove(&path, Directory::of(&path).unwrap().file(&path)).unwrap();
        assert!(moved.join("file").exists(), "it is not the file that was named");
        directory.remove(&path, file).unwrap();
        assert!(!moved.join("file").exists() && other.join("file").exists());
        fs::remove_dir_all(root).unwrap();
    }
}
