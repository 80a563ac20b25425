//! Helpers for tests: guest memory, in ordinary pages filled with zeros, and temporary directories.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{GuestMemory, GuestRegion, Hugepages, Mapping};

/// Creates a region of `len` bytes at guest physical address `guest` and front-end address `user`.
pub fn region(guest: u64, user: u64, len: usize) -> GuestRegion {
    let (mapping, _fd) = Mapping::memfd("guest", len, Hugepages::None).unwrap();
    GuestRegion::new(guest, user, len as u64, mapping, 0).unwrap()
}

/// Creates a table with one region of `len` bytes at guest and front-end address 0.
pub fn guest_memory(len: usize) -> Arc<GuestMemory> {
    guest_regions([(0, 0, len)])
}

/// Creates a table of regions, given by guest physical address, front-end address and length.
pub fn guest_regions<const N: usize>(regions: [(u64, u64, usize); N]) -> Arc<GuestMemory> {
    let regions = regions.map(|(guest, user, len)| region(guest, user, len));
    Arc::new(GuestMemory::new(regions.into()).unwrap())
}

/// A temporary directory, deleted on drop.
#[derive(Debug)]
pub struct TempDir(pub PathBuf);

impl TempDir {
    /// Creates an empty directory.
    #[allow(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("offcore-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    /// Returns the path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns the text of a file without leading and trailing white space.
    pub fn get(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).unwrap().trim().to_owned()
    }

    /// Writes a file; missing directories are created.
    pub fn set(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.file(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// Sets the permissions of a file.
    pub fn mode(&self, name: &str, mode: u32) {
        fs::set_permissions(self.file(name), fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Creates or replaces a symbolic link; missing directories are created.
    pub fn link(&self, name: &str, target: &str) {
        let path = self.file(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(target, path).unwrap();
    }

    /// Removes a file, a link, or a directory with its contents.
    pub fn remove(&self, name: &str) {
        let path = self.file(name);
        let is_directory = path.is_dir() && !path.is_symlink();
        let result = if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        result.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
