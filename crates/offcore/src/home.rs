//! The directory of what is root's while the system runs: the preload library, and the stack that nobody names.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Result, anyhow, bail};

/// Its path.
pub(crate) const HOME: &str = "/run/offcore";

/// Makes a directory that everybody can read, whatever the umask is, unless it is there.
pub(crate) fn make(path: &Path) -> io::Result<()> {
    match DirBuilder::new().create(path) {
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Sees to it that there is a directory for a stack's socket: [`HOME`] is made.
///
/// # Errors
/// When another one is not there, or this one cannot be made.
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
