//! The preload library, which is embedded in the binary, as a file that the dynamic linker can load.

mod old;

use std::fs::{self, File, OpenOptions, Permissions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::home::{self, HOME};

/// The library that the build script has built.
const LIBRARY: &[u8] = include_bytes!(env!("OFFCORE_PRELOAD"));

/// Another build's library is removed after this time without a program start.
const UNUSED: Duration = Duration::from_hours(24);

/// Writes the library to the first usable directory of this user, unless it exists, and returns its path.
pub(super) fn install() -> io::Result<PathBuf> {
    let user = fs::metadata("/proc/self")?.uid();
    let mut errors = Vec::new();
    for directory in directories(user) {
        match usable(&directory, user).and_then(|()| write_to(&directory)) {
            Ok(path) => return Ok(path),
            Err(error) => errors.push(format!("{}: {error}", directory.display())),
        }
    }
    Err(io::Error::other(errors.join("; ")))
}

/// Writes the library to a directory, unless it exists. Its name contains a hash of its content, so libraries of other
/// builds stay available to running programs.
fn write_to(directory: &Path) -> io::Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    LIBRARY.hash(&mut hasher);
    let path = directory.join(format!("preload-{:016x}.so", hasher.finish()));
    if !is_there(&path)? {
        let (new, mut file) = create(directory)?;
        let written = file.write_all(LIBRARY).and_then(|()| {
            file.set_permissions(Permissions::from_mode(0o755))?;
            fs::rename(&new, &path)
        });
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written?;
        old::remove(directory, UNUSED);
    }
    Ok(path)
}

/// Creates a new file. A process with the same ID may have left one behind, or may use one from another namespace.
fn create(directory: &Path) -> io::Result<(PathBuf, File)> {
    let mut number = 0;
    loop {
        let new = directory.join(format!("preload-{}-{number}.new", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&new) {
            Ok(file) => return Ok((new, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Returns whether the library exists unchanged. Then its timestamp is set to the time of this use.
fn is_there(path: &Path) -> io::Result<bool> {
    let mut found = Vec::new();
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    (&file).take(LIBRARY.len() as u64 + 1).read_to_end(&mut found)?;
    let _ = file.set_modified(SystemTime::now());
    Ok(found == LIBRARY)
}

/// Returns directories for the library in order of preference.
fn directories(user: u32) -> impl Iterator<Item = PathBuf> {
    let name = outer_id(&fs::read_to_string("/proc/self/uid_map").unwrap_or_default(), user);
    let first = match std::env::var_os("XDG_RUNTIME_DIR").filter(|path| name != 0 && !path.is_empty()) {
        Some(path) => Some(PathBuf::from(path).join("offcore")),
        None => (name == 0).then(|| PathBuf::from(HOME)),
    };
    let temporary = std::env::temp_dir().join(format!("offcore-{name}"));
    // In a world-writable directory, any user can take the name. In the home directory of another user, that user could
    // replace the library.
    let is_own = |home: &PathBuf| {
        fs::metadata(home).is_ok_and(|found| found.uid() == user && found.mode() & 0o022 == 0)
    };
    let own = std::env::home_dir().filter(is_own).map(|home| home.join(".offcore"));
    first.into_iter().chain([temporary]).chain(own)
}

/// Returns the ID of a user outside of this process's user namespace (user_namespaces(7)). Root in a namespace uses
/// another directory than root outside.
fn outer_id(map: &str, user: u32) -> u32 {
    let ranges = map.lines().filter_map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    let outside = |(inner, outer, len): (u32, u32, u32)| {
        user.checked_sub(inner).filter(|at| *at < len).and_then(|at| outer.checked_add(at))
    };
    ranges.filter_map(outside).next().unwrap_or(user)
}

/// Creates the directory if it does not exist. Only this user may write to it, all users can read it, and libraries can
/// be loaded from it.
fn usable(path: &Path, user: u32) -> io::Result<()> {
    home::make(path)?;
    let found = fs::symlink_metadata(path)?;
    let advice = match (found.is_dir(), found.uid() == user) {
        (_, false) => "set TMPDIR to a directory of your own",
        (false, true) => "remove it",
        (true, true) if found.mode() & 0o022 != 0 => "take that right away (chmod go-w)",
        (true, true) => "",
    };
    if !advice.is_empty() {
        let found = match (found.is_dir(), found.mode() & 0o022) {
            (false, _) => format!("no directory, of user {}", found.uid()),
            (true, 0) => format!("a directory of user {}", found.uid()),
            (true, _) => format!("a directory of user {} that others can write to", found.uid()),
        };
        let expected = format!("a directory of user {user} that no other user can write to");
        return Err(io::Error::other(format!("found {found}, expected {expected}: {advice}")));
    }
    let mounted = rustix::fs::statvfs(path)?.f_flag;
    match mounted.contains(rustix::fs::StatVfsMountFlags::NOEXEC) {
        true => Err(io::Error::other("it is mounted noexec, so libraries cannot be loaded from it")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_ids_map_to_outer_ids() {
        let all = "         0          0 4294967295\n";
        assert_eq!((outer_id(all, 0), outer_id(all, 1000)), (0, 1000));
        let one = "         0       1000          1\n         1     100000      65536\n";
        assert_eq!((outer_id(one, 0), outer_id(one, 33)), (1000, 100_032));
        assert_eq!(outer_id(one, 70_000), 70_000, "an id that is not mapped");
        assert_eq!(outer_id("", 5), 5, "a kernel without user namespaces");
    }
}
