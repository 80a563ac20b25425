//! The socket at which processes attach, and a lock that keeps a second stack away from its path.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use offcore_stats::time::{Micros, Time};
use offcore_vhost::connection::{Directory, FileId, SocketFile};
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Stat, XattrFlags, fchmod, flock, fstat, setxattr};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
};
use rustix::process::geteuid;

use super::ServeError;

/// Maximum number of processes that wait to attach.
const BACKLOG: i32 = 128;
/// Maximum length of a socket's path in bytes: `sun_path` of unix(7), without the terminating zero.
pub(super) const LONGEST: usize = 107;
/// Maximum length of a process number and a newline, in bytes.
const NUMBER: usize = 11;
/// The time after which a failed change of the access rights is repeated.
const RETRY: Micros = Micros::from_millis(100);
/// Number of attempts to take the lock while its file is removed concurrently.
const TRIES: usize = 16;

/// The socket. Its file is removed on drop.
#[derive(Debug)]
pub(super) struct ServeSocket {
    socket: OwnedFd,
    path: PathBuf,
    /// The identity of the socket's file, so that no other file is removed.
    file: Option<FileId>,
    /// The users of `--allow-uid`, and the barred ones among them.
    others: Vec<u32>,
    barred: Vec<u32>,
    /// The file has an access control list. It is changed again at `retry`, because the last change failed.
    has_list: bool,
    retry: Option<Time>,
    /// Held as long as the socket exists.
    lock: Lock,
}

impl ServeSocket {
    /// Opens the socket at `path` and admits these other users. On a file system without access control lists every
    /// user can connect, and only the check at attach time applies.
    pub(super) fn open(path: &Path, others: &[u32]) -> Result<Self, ServeError> {
        // The check precedes all writes.
        check(path)?;
        let lock = Lock::take(path)?;
        let failed = |what| move |source| ServeError::Path { what, path: path.to_owned(), source };
        // The lock is held now, so the stack that created the socket is dead. Sockets of other programs have no lock.
        if check(path)? {
            if is_listened_at(path) {
                return Err(ServeError::InUse { path: path.to_owned() });
            }
            lock.directory.remove(path, lock.directory.socket(path)).map_err(failed("removing"))?;
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(failed("making a socket for"))?;
        let address = SocketAddrUnix::new(path).map_err(failed("naming"))?;
        // The mode is set before the socket has a name, so that the file never has another mode.
        fchmod(&socket, Mode::from_raw_mode(0o600)).map_err(failed("restricting"))?;
        bind(&socket, &address).map_err(failed("binding"))?;
        let mut door = Self {
            socket,
            path: path.to_owned(),
            file: lock.directory.socket(path),
            others: others.to_vec(), // copy-ok: the numbers of users
            barred: Vec::new(),
            has_list: false,
            retry: None,
            lock,
        };
        if !others.is_empty() {
            door.admit()?;
        }
        listen(&door.socket, BACKLOG).map_err(failed("listening at"))?;
        Ok(door)
    }

    /// Lets other users connect. On a file system without access control lists, all users can connect.
    fn admit(&mut self) -> Result<(), ServeError> {
        self.has_list = self.set_access_list().is_ok();
        if !self.has_list {
            let file = SocketFile::open(&self.path, self.file)?;
            let failed = |source| ServeError::Path { what: "opening", path: self.path.clone(), source };
            rustix::fs::chmod(file.name(), Mode::from_raw_mode(0o666)).map_err(failed)?;
        }
        Ok(())
    }

    /// Admits the other users except the barred ones. If a user of the directory has replaced the file, the replacement
    /// is not changed.
    fn set_access_list(&self) -> Result<(), ServeError> {
        let file = SocketFile::open(&self.path, self.file)?;
        let admitted: Vec<_> =
            self.others.iter().copied().filter(|user| !self.barred.contains(user)).collect();
        let failed =
            |source| ServeError::Path { what: "admitting users to", path: self.path.clone(), source };
        setxattr(file.name(), ACL, &access_list(&admitted), XattrFlags::empty()).map_err(failed)
    }

    /// Prevents a user from connecting. Returns whether that is possible. It is not for root and the stack's own user,
    /// and on a file system without access control lists.
    pub(super) fn block_user(&mut self, user: u32, now: Time) -> bool {
        if self.others.contains(&user) && !self.barred.contains(&user) {
            self.barred.push(user);
            self.update(now);
        }
        self.has_list && self.retry.is_none() && self.barred.contains(&user)
    }

    /// Lets barred users connect again, except those for whom `stays` returns true.
    pub(super) fn retain_barred(&mut self, now: Time, stays: impl Fn(u32) -> bool) {
        let before = self.barred.len();
        self.barred.retain(|user| stays(*user));
        if self.barred.len() < before || self.retry.is_some_and(|retry| now >= retry) {
            self.update(now);
        }
    }

    /// Changes the access rights of the socket. After a failure they are changed later.
    fn update(&mut self, now: Time) {
        if !self.has_list {
            return;
        }
        let result = self.set_access_list();
        if let (Err(error), None) = (&result, self.retry) {
            tracing::warn!(%error, "the access rights of the socket could not be changed");
        }
        self.retry = result.is_err().then_some(now + RETRY);
    }

    /// Accepts the next process that wants to attach.
    pub(super) fn accept(&self) -> Result<OwnedFd, Errno> {
        accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for ServeSocket {
    fn drop(&mut self) {
        // Another file may have replaced the socket. The lock is released after the removal, so its next holder finds
        // neither file.
        let _ = self.lock.directory.remove(&self.path, self.file);
    }
}

/// Whether a process listens on the socket at a path. Sockets of any type refuse connections only if no process
/// listens.
fn is_listened_at(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let connected = socket.and_then(|socket| connect(&socket, &SocketAddrUnix::new(path)?));
    !matches!(connected, Err(Errno::CONNREFUSED | Errno::NOENT))
}

/// Whether a socket exists at the path. Fails if the path is invalid or another file is there.
fn check(path: &Path) -> Result<bool, ServeError> {
    let found = path.as_os_str().len();
    if !(1..=LONGEST).contains(&found) {
        return Err(ServeError::Length { path: path.to_owned(), found });
    }
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => Err(ServeError::NoSocket { path: path.to_owned() }),
        found => Ok(found.is_ok()),
    }
}

/// The attribute with a file's access control list, see acl(5).
const ACL: &str = "system.posix_acl_access";

/// An access control list that lets the owner and these users read and write, in the format of
/// `linux/posix_acl_xattr.h`.
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

/// The lock of a socket: a file next to it, which is removed on drop.
#[derive(Debug)]
struct Lock {
    file: File,
    id: Option<FileId>,
    path: PathBuf,
    directory: Directory,
}

impl Lock {
    /// Takes the lock of a socket at a path.
    fn take(socket: &Path) -> Result<Self, ServeError> {
        let mut path = OsString::from(socket);
        path.push(".lock");
        let path = PathBuf::from(path);
        let what = "creating and locking (in a directory in which this user can create files)";
        let failed = |source| ServeError::Path { what, path: path.clone(), source };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let directory = Directory::of(&path).map_err(failed)?;
        for _ in 0..TRIES {
            let is_file = |found: Stat| FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
            if directory.stat(&path).is_ok_and(|found| !is_file(found)) {
                return Err(ServeError::NoLock { path });
            }
            let file = directory.open(&path, flags, Mode::from_raw_mode(0o600)).map_err(failed)?;
            let file = File::from(file);
            if !is_lock(&file) {
                return Err(ServeError::NoLock { path });
            }
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(taken(socket, &path)),
                Err(error) => return Err(failed(error)),
            }
            // The previous holder may have removed the file in between. The lock would then have no effect.
            let held = fstat(&file).map_err(failed)?;
            let id = Some((held.st_dev, held.st_ino));
            if directory.file(&path) == id {
                let mut lock = Self { file, id, path, directory };
                // The process number is informational: the error message of another stack names this process. A failed
                // write is harmless.
                let _ = lock
                    .file
                    .set_len(0)
                    .and_then(|()| lock.file.rewind())
                    .and_then(|()| writeln!(lock.file, "{}", std::process::id()));
                return Ok(lock);
            }
        }
        Err(taken(socket, &path))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The file is still locked, so no other process uses it.
        let _ = self.directory.remove(&self.path, self.id);
    }
}

/// Whether a file is a lock file: private to this user, and empty or with the number that a stack writes. Any other
/// file is foreign.
fn is_lock(file: &File) -> bool {
    let mut bytes = Vec::new();
    let read = file.take(NUMBER as u64 + 1).read_to_end(&mut bytes);
    let number = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    let is_file = file.metadata().is_ok_and(|found| {
        found.is_file()
            && found.mode() & 0o777 == 0o600
            && found.uid() == geteuid().as_raw()
            && found.nlink() == 1
    });
    is_file && read.is_ok() && bytes.len() <= NUMBER && number.iter().all(u8::is_ascii_digit)
}

/// The error for a lock that another stack holds. The file contains the number of its process.
fn taken(path: &Path, lock_path: &Path) -> ServeError {
    let process = fs::read_to_string(lock_path).unwrap_or_default().trim().parse().unwrap_or(0);
    ServeError::Taken { path: path.to_owned(), process }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_users_can_be_blocked() {
        let path = std::env::temp_dir().join(format!("offcore-door-{}", std::process::id()));
        let mut door = ServeSocket::open(&path, &[54_321]).unwrap();
        // The file system may lack access control lists.
        let has_list = door.has_list;
        assert_eq!(
            [54_321, 54_322, 0].map(|user| door.block_user(user, Time::from_micros(1))),
            [has_list, false, false]
        );
        door.has_list = false;
        assert!(!door.block_user(54_321, Time::from_micros(1)), "every user can connect");
    }
}
