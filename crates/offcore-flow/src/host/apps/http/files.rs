//! The directory whose files are served. The kernel confines all lookups to it (openat2(2), `RESOLVE_BENEATH`),
//! including symbolic links.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{self, Advice, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::response::Entity;
use super::status::Status;
use super::target::Target;

/// Minimum length of files for which the kernel is told that they are read sequentially.
const LONG: u64 = 256 << 10;
/// Number of lookups of a name that is being renamed concurrently.
const TRIES: usize = 3;

/// The served directory.
#[derive(Debug)]
pub struct Root(OwnedFd);

/// A file that can be sent.
#[derive(Debug)]
pub struct Found {
    pub file: OwnedFd,
    pub name: Name,
    pub entity: Entity,
}

/// The name of a file for reopening it, and the properties that show that it is the same unmodified file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    path: Vec<u8>,
    device: u64,
    inode: u64,
    len: i64,
    modified: (i64, u64),
}

impl Name {
    fn new(path: Vec<u8>, stat: &Stat) -> Self {
        let modified = (stat.st_mtime, stat.st_mtime_nsec);
        Self { path, device: stat.st_dev, inode: stat.st_ino, len: stat.st_size, modified }
    }
}

/// The reason why a target names no file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    Because(Status),
    /// The target is a directory. Its name needs a trailing slash, so that relative links work.
    Slash,
}

impl Root {
    /// Opens the directory.
    ///
    /// # Errors
    /// Returns the error of the system if `path` is not a directory, or if the kernel has no openat2 (before Linux
    /// 5.6).
    pub fn open(path: &Path) -> io::Result<Self> {
        let with_path = |error: Errno| {
            let error = io::Error::from(error);
            let expected = "expected a directory that exists and can be read";
            io::Error::new(error.kind(), format!("{}: {error}; {expected}", path.display()))
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let this = Self(fs::open(path, flags, Mode::empty()).map_err(with_path)?);
        this.lookup(b".").map_err(with_path)?;
        Ok(this)
    }

    fn lookup(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        // A FIFO must not block the worker.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let mut last = Errno::AGAIN;
        for _ in 0..TRIES {
            match fs::openat2(&self.0, path, flags, Mode::empty(), resolve) {
                Err(error @ (Errno::AGAIN | Errno::INTR)) => last = error,
                other => return other,
            }
        }
        Err(last)
    }

    /// Opens the file that a target names. A directory stands for its `index.html`.
    ///
    /// # Errors
    /// Returns the reason why no file can be sent.
    pub fn find(&self, target: &Target) -> Result<Found, Missing> {
        let mut path = target.path.clone();
        if target.directory {
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend(b"index.html");
        }
        let failed = |error| Missing::Because(status_of(error));
        let file = self.lookup(&path).map_err(failed)?;
        let stat = fs::fstat(&file).map_err(failed)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {}
            FileType::Directory if !target.directory => return Err(Missing::Slash),
            _ => return Err(Missing::Because(Status::Forbidden)),
        }
        let entity = entity(&stat, &path);
        read_ahead(&file, entity.len);
        Ok(Found { file, entity, name: Name::new(path, &stat) })
    }

    /// Reopens a file that was sent in part. Returns `None` if it was replaced or modified, because the rest would not
    /// match the part that was sent.
    pub fn find_again(&self, name: &Name) -> Option<OwnedFd> {
        let file = self.lookup(&name.path).ok()?;
        let stat = fs::fstat(&file).ok()?;
        read_ahead(&file, u64::try_from(stat.st_size).unwrap_or(0));
        (Name::new(name.path.clone(), &stat) == *name).then_some(file)
    }
}

fn read_ahead(file: &OwnedFd, len: u64) {
    if len >= LONG {
        // The advice improves performance only, so errors are ignored.
        let _ = fs::fadvise(file, 0, None, Advice::Sequential);
    }
}

fn entity(stat: &Stat, path: &[u8]) -> Entity {
    let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
    let nanos = u32::try_from(stat.st_mtime_nsec).unwrap_or(0);
    let len = u64::try_from(stat.st_size).unwrap_or(0);
    Entity {
        len,
        etag: format!("\"{seconds:x}.{nanos:x}-{len:x}-{:x}\"", stat.st_ino),
        modified: SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos.min(999_999_999)),
        content_type: content_type(path),
    }
}

fn status_of(error: Errno) -> Status {
    match error {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG | Errno::XDEV | Errno::INVAL => {
            Status::NotFound
        }
        Errno::ACCESS | Errno::PERM | Errno::NXIO | Errno::NODEV => Status::Forbidden,
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN | Errno::INTR => Status::Unavailable,
        _ => Status::InternalError,
    }
}

/// Derives the content type from the suffix of a file name.
pub fn content_type(path: &[u8]) -> &'static str {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let suffix = name.iter().rposition(|byte| *byte == b'.').map_or(&b""[..], |dot| &name[dot + 1..]);
    let is = |(suffixes, _): &&(&str, &str)| {
        suffixes.split(' ').any(|known| known.as_bytes().eq_ignore_ascii_case(suffix))
    };
    CONTENT_TYPES.iter().find(is).map_or("application/octet-stream", |(_, kind)| kind)
}

const CONTENT_TYPES: [(&str, &str); 25] = [
    ("html htm", "text/html; charset=utf-8"),
    ("css", "text/css; charset=utf-8"),
    ("js mjs", "text/javascript; charset=utf-8"),
    ("txt log md", "text/plain; charset=utf-8"),
    ("csv", "text/csv; charset=utf-8"),
    ("json map", "application/json"),
    ("xml", "application/xml"),
    ("pdf", "application/pdf"),
    ("wasm", "application/wasm"),
    ("zip", "application/zip"),
    ("gz tgz", "application/gzip"),
    ("tar", "application/x-tar"),
    ("png", "image/png"),
    ("jpg jpeg", "image/jpeg"),
    ("gif", "image/gif"),
    ("webp", "image/webp"),
    ("avif", "image/avif"),
    ("svg", "image/svg+xml"),
    ("ico", "image/vnd.microsoft.icon"),
    ("woff", "font/woff"),
    ("woff2", "font/woff2"),
    ("mp3", "audio/mpeg"),
    ("ogg", "audio/ogg"),
    ("mp4", "video/mp4"),
    ("webm", "video/webm"),
];
