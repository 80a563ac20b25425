//! Unix sockets with a path: listening and connecting.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::fs::{FileType, FlockOperation, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::directory::{Directory, FileId};

/// Which side of the socket one is. Either side of the protocol can be either.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, displaydoc::Display)]
pub enum Role {
    /// Makes the socket and waits for a peer.
    #[displaydoc("server")]
    #[default]
    Server,
    /// Connects to a peer's socket.
    #[displaydoc("client")]
    Client,
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "server" => Ok(Self::Server),
            "client" => Ok(Self::Client),
            _ => Err(format!("socket role '{text}': expected server or client")),
        }
    }
}

/// Default mode of a socket's file, regardless of the umask: only its owner can connect.
const PRIVATE: u32 = 0o600;

/// Numeric owner, group and mode of a socket's file. The defaults are the owner and group of this process and mode
/// 0600.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    pub owner: Option<u32>,
    pub group: Option<u32>,
    /// Permissions, up to `0o777`. A client needs write permission to connect.
    pub mode: Option<u32>,
}

/// Why a socket cannot be had.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum SocketError {
    /// {path}: in use: a process is listening on it; stop that process or choose another path; a killed process may take some time to end
    InUse { path: PathBuf },
    /// {path}: exists and is not a socket; remove it or choose another path
    NotASocket { path: PathBuf },
    /// {path}: another file has replaced the socket; choose a directory that only this user can write to
    Replaced { path: PathBuf },
    /// {path}: {found} bytes are too long for a socket's path, at most 107 are possible
    TooLong { path: PathBuf, found: usize },
    /// {path}: {what}: {source}
    System { path: PathBuf, what: &'static str, source: Errno },
}

impl SocketError {
    /// Whether the file permissions deny access to this user.
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::System { source: Errno::ACCESS, .. })
    }
}

fn fail(path: &Path, what: &'static str) -> impl FnOnce(Errno) -> SocketError {
    let path = path.to_owned();
    move |source| {
        let what = match (what, source) {
            ("bind", Errno::NOENT) if path.parent().is_some_and(Path::exists) => {
                "cannot bind: sockets cannot be made in its directory"
            }
            ("bind", Errno::NOENT) => "cannot bind: its directory does not exist",
            ("chown", Errno::PERM) => "chown (root only, but for groups of this process)",
            ("connect", Errno::ACCESS) => {
                "connect (its owner, group or mode has to let this user write to it)"
            }
            ("bind", Errno::ACCESS | Errno::PERM) => "cannot bind: its directory has to be writable",
            _ => what,
        };
        SocketError::System { path, what, source }
    }
}

fn address(path: &Path) -> Result<SocketAddrUnix, SocketError> {
    SocketAddrUnix::new(path).map_err(|source| match source {
        Errno::NAMETOOLONG => SocketError::TooLong { path: path.to_owned(), found: path.as_os_str().len() },
        source => SocketError::System { path: path.to_owned(), what: "socket address", source },
    })
}

fn new_socket(path: &Path) -> Result<OwnedFd, SocketError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(fail(path, "socket"))
}

/// Connects to the socket at `path` without waiting.
pub(crate) fn connect(path: &Path) -> Result<OwnedFd, SocketError> {
    let socket = new_socket(path)?;
    match rustix::net::connect(&socket, &address(path)?) {
        // The kernel returns the same error for a socket without a listener.
        Err(Errno::CONNREFUSED) if path.metadata().is_ok_and(|found| !found.file_type().is_socket()) => {
            Err(SocketError::NotASocket { path: path.to_owned() })
        }
        connected => connected.map(|()| socket).map_err(fail(path, "connect")),
    }
}

/// Returns the user ID of the process that created the other end of a socket, in the user namespace of this process.
pub(crate) fn peer_user(socket: &OwnedFd) -> Result<u32, Errno> {
    match getsockopt(socket, PeerCredentials) {
        Ok(who) => Ok(who.uid()),
        Err(error) => Err(Errno::from_raw_os_error(error as i32)),
    }
}

/// A socket file that this process has bound. Its permissions can be changed safely even if other processes modify the
/// directory.
#[derive(Debug)]
pub struct SocketFile(OwnedFd);

impl SocketFile {
    /// Opens the socket at `path`. `bound` is the device and inode number of the file that was bound.
    ///
    /// # Errors
    /// [`SocketError::Replaced`] if the path refers to another file.
    pub fn open(path: &Path, bound: Option<FileId>) -> Result<Self, SocketError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(fail(path, "open"))?;
        let found = rustix::fs::fstat(&file).map_err(fail(path, "stat"))?;
        let is_own = FileType::from_raw_mode(found.st_mode) == FileType::Socket && found.st_nlink == 1;
        if !is_own || bound != Some((found.st_dev, found.st_ino)) {
            return Err(SocketError::Replaced { path: path.to_owned() });
        }
        Ok(Self(file))
    }

    /// Returns a path that refers to this file while it is open. Linux before 6.6 has no call that changes the mode of
    /// a descriptor opened with `O_PATH`.
    pub fn name(&self) -> String {
        format!("/proc/self/fd/{}", self.0.as_raw_fd())
    }
}

/// A listening socket. Its file is removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// The directory and the identity of its file, so that no other file is removed.
    directory: Directory,
    file: Option<FileId>,
}

impl Listener {
    /// Listens at `path`. A socket without a listener is replaced. A process that still listens has `timeout` to
    /// terminate.
    pub(crate) fn bind(path: &Path, access: SocketAccess, timeout: Duration) -> Result<Self, SocketError> {
        let address = address(path)?;
        let directory = Directory::of(path).map_err(fail(path, "bind"))?;
        let socket = new_socket(path)?;
        // Set before the socket has a path, so that the file never has more permissions.
        let mode = Mode::from_raw_mode(access.mode.unwrap_or(PRIVATE));
        rustix::fs::fchmod(&socket, mode).map_err(fail(path, "chmod"))?;
        // Only one process at a time checks the path and starts to listen.
        let _turn = turn(path, timeout);
        let bound = match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_once_stale(&directory, path, timeout)?;
                rustix::net::bind(&socket, &address)
            }
            result => result,
        };
        bound.map_err(fail(path, "bind"))?;
        let file = directory.socket(path);
        let listener = Self { socket, path: path.to_owned(), directory, file };
        // Set before any client can connect.
        listener.grant(access)?;
        rustix::net::listen(&listener.socket, 16).map_err(fail(path, "listen"))?;
        Ok(listener)
    }

    /// Sets owner, group and mode. Another process with write access to the directory may have replaced the file,
    /// possibly by a link. Such a file is not changed.
    fn grant(&self, SocketAccess { owner, group, mode }: SocketAccess) -> Result<(), SocketError> {
        let (owner, group) = (owner.map(Uid::from_raw), group.map(Gid::from_raw));
        let file = SocketFile::open(&self.path, self.file)?;
        let file = file.name();
        // The mode is set first, because only the owner may change it.
        rustix::fs::chmod(&file, Mode::from_raw_mode(mode.unwrap_or(PRIVATE)))
            .map_err(fail(&self.path, "chmod"))?;
        if owner.is_some() || group.is_some() {
            rustix::fs::chown(&file, owner, group).map_err(fail(&self.path, "chown"))?;
        }
        Ok(())
    }

    /// Accepts the next peer; returns `None` if none is waiting.
    pub(crate) fn accept(&self) -> Result<Option<OwnedFd>, SocketError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => Ok(Some(socket)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(source) => Err(fail(&self.path, "accept")(source)),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // If another process has removed the file first, nothing is left to do.
        let _ = self.directory.remove(&self.path, self.file);
    }
}

/// Locks the directory of a socket against other processes that replace a stale socket at the same time. Waits for the
/// lock no longer than `timeout`, and does not lock if the directory cannot be opened.
fn turn(path: &Path, timeout: Duration) -> Option<OwnedFd> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(parent, flags, Mode::empty()).ok()?;
    let end = Instant::now() + timeout;
    while let Err(Errno::WOULDBLOCK) = rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive)
    {
        if Instant::now() >= end {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(directory)
}

/// Like [`remove_stale`], but waits up to `timeout` for a process that may be about to terminate.
fn remove_once_stale(directory: &Directory, path: &Path, timeout: Duration) -> Result<(), SocketError> {
    let end = Instant::now() + timeout;
    loop {
        match remove_stale(directory, path) {
            Err(SocketError::InUse { .. }) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(20));
            }
            result => return result,
        }
    }
}

/// Removes the socket at `path` if no process listens on it.
fn remove_stale(directory: &Directory, path: &Path) -> Result<(), SocketError> {
    directory.stat(path).map_err(fail(path, "stat"))?;
    let file = directory.socket(path);
    if file.is_none() {
        return Err(SocketError::NotASocket { path: path.to_owned() });
    }
    match connect(path) {
        Err(SocketError::System { source: Errno::CONNREFUSED, .. }) => {
            directory.remove(path, file).map_err(fail(path, "removing a stale socket"))
        }
        // Connected, or the accept queue is full: a process is listening.
        Ok(_) | Err(SocketError::System { source: Errno::AGAIN, .. }) => {
            Err(SocketError::InUse { path: path.to_owned() })
        }
        Err(error) => Err(error),
    }
}
