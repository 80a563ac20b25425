//! Root's runtime directory for the preload library and the default stack.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Result, anyhow, bail};

/// Path of the directory.
pub(crate) const HOME: &str = "/run/offcore";

/// Creates a directory that is readable by all users, whatever the umask is, unless it exists.
pub(crate) fn make(path: &Path) -> io::Result<()> {
    match DirBuilder::new().create(path) {
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Ensures that the directory of a stack's socket exists. Only [`HOME`] is created.
///
/// # Errors
/// If another directory does not exist, or this one cannot be created.
pub(crate) fn make_way(socket: &Path) -> Result<()> {
    let socket = std::path::absolute(socket).map_err(|error| anyhow!("--serve: {error}"))?;
    match socket.parent() {
        Some(home) if home == Path::new(HOME) => {
            make(home).map_err(|error| anyhow!("--serve: making {HOME}: {error}"))
        }
        Some(directory) if !directory.is_dir() => bail!(
            "--serve {}: the directory {} does not exist: create it, or choose another path",
            socket.display(),
            directory.display()
        ),
        _ => Ok(()),
    }
}
