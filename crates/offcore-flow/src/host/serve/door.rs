//! Where processes attach: a socket at a path, and a lock against a second stack there.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, XattrFlags, fchmod, flock, fstat, open, setxattr};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};

use super::ServeError;

/// Processes that may wait to attach.
const BACKLOG: i32 = 128;
/// How often the lock is tried whose file others remove.
const TRIES: usize = 16;

/// The socket. It is removed when this is dropped.
#[derive(Debug)]
pub(super) struct Door {
    socket: OwnedFd,
    path: PathBuf,
    lock_path: PathBuf,
    /// Held as long as the socket is there.
    _lock: File,
}

impl Door {
    /// Opens it at `path`, for these other users, too. Where the file system has no lists of users it is open to all, and who they
    /// are is looked at when they attach, only.
    pub(super) fn open(path: &Path, others: &[u32]) -> Result<Self, ServeError> {
        let mut lock_path = OsString::from(path);
        lock_path.push(".lock");
        let lock_path = PathBuf::from(lock_path);
        let lock = lock(path, &lock_path)?;
        let failed = |what| move |source| ServeError::Path { what, path: path.to_owned(), source };
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(ServeError::NoSocket { path: path.to_owned() });
            }
            // Nobody has the lock: the stack that it was of is dead.
            Ok(_) => {
                fs::remove_file(path).map_err(|error| failed("removing")(errno(&error)))?;
            }
            Err(_) => {}
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(failed("making a socket for"))?;
        let address = SocketAddrUnix::new(path).map_err(failed("naming"))?;
        // Before it has a name: the file has this mode from its beginning.
        fchmod(&socket, Mode::from_raw_mode(0o600)).map_err(failed("restricting"))?;
        bind(&socket, &address).map_err(failed("binding"))?;
        let door = Self { socket, path: path.to_owned(), lock_path, _lock: lock };
        if !others.is_empty() && setxattr(path, ACL, &access_list(others), XattrFlags::empty()).is_err() {
            rustix::fs::chmod(path, Mode::from_raw_mode(0o666)).map_err(failed("opening"))?;
        }
        listen(&door.socket, BACKLOG).map_err(failed("listening at"))?;
        Ok(door)
    }

    /// The next process that wants to attach.
    pub(super) fn accept(&self) -> Result<OwnedFd, Errno> {
        accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // The lock last: whoever gets it finds neither.
        let _ = fs::remove_file(&self.path);
        let _ = fs::remove_file(&self.lock_path);
    }
}

/// Where the list of who may open a file is, see acl(5).
const ACL: &str = "system.posix_acl_access";

/// A list that lets its owner and these users read and write, as `linux/posix_acl_xattr.h` has it.
fn access_list(users: &[u32]) -> Vec<u8> {
    const VERSION: u32 = 2;
    const ALL: u16 = 6;
    let [owner, named, group, mask, others]: [u16; 5] = [1, 2, 4, 16, 32];
    let users: BTreeSet<u32> = users.iter().copied().collect();
    let users = users.into_iter().map(|user| (named, ALL, user));
    let entries = [(owner, ALL, u32::MAX)].into_iter().chain(users).chain([
        (group, 0, u32::MAX),
        (mask, ALL, u32::MAX),
        (others, 0, u32::MAX),
    ]);
    let mut list = VERSION.to_le_bytes().to_vec(); // copy-ok: a few bytes of an attribute
    for (tag, may, user) in entries {
        list.extend(tag.to_le_bytes());
        list.extend(may.to_le_bytes());
        list.extend(user.to_le_bytes());
    }
    list
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The lock of a socket at `path`.
fn lock(path: &Path, lock_path: &Path) -> Result<File, ServeError> {
    let failed = |source| ServeError::Path { what: "locking", path: lock_path.to_owned(), source };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    for _ in 0..TRIES {
        let file = open(lock_path, flags, Mode::from_raw_mode(0o600)).map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(taken(path, lock_path)),
            Err(error) => return Err(failed(error)),
        }
        // Who had it before may have removed the file in between: then this is a lock of nothing.
        let held = fstat(&file).map_err(failed)?;
        let found = fs::symlink_metadata(lock_path);
        if found.is_ok_and(|found| (found.dev(), found.ino()) == (held.st_dev, held.st_ino)) {
            let mut file = File::from(file);
            // For people: who finds it locked says who has it. Where that cannot be written it says less.
            let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
            return Ok(file);
        }
    }
    Err(taken(path, lock_path))
}

/// Another stack has the lock, whose process is in it.
fn taken(path: &Path, lock_path: &Path) -> ServeError {
    let process = fs::read_to_string(lock_path).unwrap_or_default().trim().parse().unwrap_or(0);
    ServeError::Taken { path: path.to_owned(), process }
}
