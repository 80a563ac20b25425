//! Executed programs that do not load this library: statically linked ones, and others that the dynamic linker of glibc
//! does not start. Their sockets use the kernel. They are executed nevertheless, because scripts use many programs
//! without sockets. A line on the standard error of `offcore exec` names each file once per process and its forked
//! children.
//!
//! The check does not use a parser crate: it runs between `vfork` and `execve`, where memory cannot be allocated, and
//! needs only two tables of a file. `offcore exec` checks the program that it starts with the crate `object`, and
//! completely.

use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::environment;
use crate::report;
use crate::sys::{self, Errno};

/// Number of bytes of a file that are read. They contain the program headers.
const FIRST: usize = 4096;
/// Maximum number of nested script interpreters, as in the kernel.
const DEEPEST: usize = 5;

// Constants of `elf.h`, and sizes of its structures of 64 bits.
const CLASS_32: u8 = 1;
const MACHINE_X86_64: u16 = 62;
const TYPE_DYN: u16 = 3;
const INTERP: u32 = 3;
const NOTE: u32 = 4;
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;

/// Number of words for files that were named. The index is a hash of device and inode. Forked children share the page.
const WORDS: usize = 512;
static NAMED: AtomicPtr<AtomicU64> = AtomicPtr::new(core::ptr::null_mut());

/// Maps the page.
pub(crate) fn begin() {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let args = [0, WORDS * 8, protection as usize, flags as usize, usize::MAX, 0];
    // SAFETY: a new mapping at an address that the kernel chooses does not affect existing memory.
    if let Ok(page) = sys::result(unsafe { sys::call(libc::SYS_mmap, args) }) {
        NAMED.store(page as *mut AtomicU64, Ordering::Release);
    }
}

/// Records that a file was named. Returns `true` for the first time.
fn is_first(device: u64, inode: u64) -> bool {
    let hash = (inode ^ device.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let (word, bit) = ((hash >> 55) as usize % WORDS, 1 << (hash >> 49 & 63));
    let page = NAMED.load(Ordering::Acquire);
    // SAFETY: the page has `WORDS` words, which are atomics, and is never unmapped.
    !page.is_null() && unsafe { &*page.add(word) }.fetch_or(bit, Ordering::Relaxed) & bit == 0
}

/// Checks a program that is about to be executed by its path.
///
/// # Safety
/// `path` is null, or a valid string.
pub(crate) unsafe fn check_path(directory: c_int, path: *const c_char) {
    if is_silent() || path.is_null() {
        return;
    }
    // SAFETY: `path` is not null, so it is a valid string, as the caller guarantees.
    let path = unsafe { CStr::from_ptr(path) };
    if let Ok(fd) = open(directory, path) {
        check_file(fd, path);
        let _ = sys::close(fd);
    }
}

/// Checks a program that is about to be executed by its name, which is searched for in `PATH`.
///
/// # Safety
/// `name` is null, or a valid string.
pub(crate) unsafe fn check_command(name: *const c_char) {
    if is_silent() || name.is_null() {
        return;
    }
    // SAFETY: `name` is not null, so it is a valid string, as the caller guarantees.
    let file = unsafe { CStr::from_ptr(name) };
    if file.to_bytes().contains(&b'/') {
        // SAFETY: `name` is not null, so it is a valid string, as the caller guarantees.
        return unsafe { check_path(libc::AT_FDCWD, name) };
    }
    for directory in environment::search_path().split(|byte| *byte == b':') {
        let mut bytes = [0u8; FIRST];
        let Some(path) = join(&mut bytes, directory, file.to_bytes()) else { continue };
        if let Ok(fd) = open(libc::AT_FDCWD, path) {
            check_file(fd, path);
            let _ = sys::close(fd);
            return;
        }
    }
}

/// Checks a program that is about to be executed by its descriptor.
pub(crate) fn check_descriptor(fd: c_int) {
    if !is_silent() {
        check_file(fd, c"a program");
    }
}

/// Returns whether no line is required, or whether a sandbox may forbid the system calls.
fn is_silent() -> bool {
    environment::stack_path().is_empty() || environment::falls_back() || sys::is_sandboxed()
}

/// Joins a directory and a name.
fn join<'a>(to: &'a mut [u8; FIRST], directory: &[u8], name: &[u8]) -> Option<&'a CStr> {
    let directory = if directory.is_empty() { b"." } else { directory };
    let mut at = 0;
    for part in [directory, b"/", name] {
        // copy-ok: a path
        to.get_mut(at..at + part.len())?.copy_from_slice(part);
        at += part.len();
    }
    CStr::from_bytes_until_nul(to).ok()
}

fn open(directory: c_int, path: &CStr) -> Result<c_int, Errno> {
    // Without this flag, `open` would wait for a FIFO.
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY) as usize;
    let args = [directory as usize, path.as_ptr() as usize, flags, 0, 0, 0];
    // SAFETY: `path` lives until the call returns.
    sys::result(unsafe { sys::call(libc::SYS_openat, args) }).map(|fd| fd as c_int)
}

fn read_at(fd: c_int, to: &mut [u8], position: u64) -> Option<usize> {
    let args = [fd as usize, to.as_mut_ptr() as usize, to.len(), position as usize, 0, 0];
    // SAFETY: `to` has `to.len()` writable bytes and lives until the call returns.
    sys::result(unsafe { sys::call(libc::SYS_pread64, args) }).ok()
}

/// Names the file, or the interpreter of a script, if it does not load the library.
fn check_file(fd: c_int, path: &CStr) {
    let mut first = [0u8; FIRST];
    let Some(len) = read_at(fd, &mut first, 0) else { return };
    let Some(line) = first[..len].strip_prefix(b"#!") else { return report_file(fd, path, &first[..len]) };
    let mut line = line;
    let mut next = [0u8; 256];
    for _ in 1..DEEPEST {
        let Some(path) = interpreter(&mut next, line) else { return };
        let Ok(fd) = open(libc::AT_FDCWD, path) else { return };
        let len = read_at(fd, &mut first, 0).unwrap_or(0);
        let script = first[..len].strip_prefix(b"#!");
        if script.is_none() {
            report_file(fd, path, &first[..len]);
        }
        let _ = sys::close(fd);
        let Some(script) = script else { return };
        line = script;
    }
}

/// Returns the path in the first line of a script, without its `#!`.
fn interpreter<'a>(to: &'a mut [u8; 256], line: &[u8]) -> Option<&'a CStr> {
    let line = line.split(|byte| *byte == b'\n').next()?;
    let path = line.split(|byte| matches!(byte, b' ' | b'\t')).find(|word| !word.is_empty())?;
    *to = [0; 256];
    // copy-ok: a path
    to.get_mut(..path.len())?.copy_from_slice(path);
    CStr::from_bytes_until_nul(to).ok()
}

fn report_file(fd: c_int, path: &CStr, first: &[u8]) {
    let why = reason_not_loaded(first, |to, position| read_at(fd, to, position));
    let why = why.filter(|_| !is_dynamic_linker(path)).or_else(|| check_capabilities(fd));
    let Some(why) = why else { return };
    if sys::file_id(fd).is_some_and(|(device, inode)| is_first(device, inode)) {
        report::not_loaded(path.to_bytes(), why);
    }
}

/// Returns whether a file is the dynamic linker. If it is executed directly, it loads this library before the program.
fn is_dynamic_linker(path: &CStr) -> bool {
    let name = path.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    name == b"ld-linux-x86-64.so.2" || name == b"ld.so"
}

/// Checks for file capabilities. The dynamic linker preloads nothing into such a program, unless root executes it.
fn check_capabilities(fd: c_int) -> Option<&'static [u8]> {
    // SAFETY: `geteuid` has no arguments.
    let user = unsafe { sys::call(libc::SYS_geteuid, [0; 6]) };
    let args = [fd as usize, c"security.capability".as_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: the name lives until the call returns, and the value has length 0, so nothing is written.
    let has = user != 0 && unsafe { sys::call(libc::SYS_fgetxattr, args) } > 0;
    has.then_some(b"has file capabilities")
}

fn number_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Returns the reason why a program with these first bytes does not load the library. Returns `None` if it does, or for
/// other files.
fn reason_not_loaded(first: &[u8], read: impl Fn(&mut [u8], u64) -> Option<usize>) -> Option<&'static [u8]> {
    if !first.starts_with(b"\x7fELF") {
        return None;
    }
    if first.get(4) == Some(&CLASS_32) {
        return Some(b"is a program of 32 bits");
    }
    let kind = u16::from_le_bytes(number_at(first, 16)?);
    if u16::from_le_bytes(number_at(first, 18)?) != MACHINE_X86_64 {
        return Some(b"is a program of another processor");
    }
    let table = u64::from_le_bytes(number_at(first, 32)?);
    let count = usize::from(u16::from_le_bytes(number_at(first, 56)?));
    let mut linker: Option<bool> = None;
    for at in 0..count.min((FIRST - HEADER) / PROGRAM_HEADER) {
        let mut header = [0u8; PROGRAM_HEADER];
        read(&mut header, table.checked_add((at * PROGRAM_HEADER) as u64)?)?;
        let (offset, len) =
            (u64::from_le_bytes(number_at(&header, 8)?), u64::from_le_bytes(number_at(&header, 32)?));
        let mut content = [0u8; 256];
        let content = &mut content[..len.min(256) as usize];
        match u32::from_le_bytes(number_at(&header, 0)?) {
            INTERP => {
                let len = read(content, offset)?;
                let path = content[..len].split(|byte| *byte == 0).next().unwrap_or_default();
                linker = Some(path.ends_with(b"/ld-linux-x86-64.so.2"));
            }
            // Go's linker marks programs with a note. The note's name begins behind three numbers.
            NOTE if read(content, offset).is_some() && content.get(12..16) == Some(b"Go\0\0") => {
                return Some(b"is a Go program, which makes system calls without libc");
            }
            _ => {}
        }
    }
    match linker {
        Some(true) => None,
        Some(false) => Some(b"is linked with another libc"),
        None if kind == TYPE_DYN => Some(b"is statically linked (PIE)"),
        None => Some(b"is statically linked"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;

    /// Returns a program with segments of these types and contents.
    fn program(kind: u16, segments: &[(u32, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0u8; HEADER + segments.len() * PROGRAM_HEADER];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[16..18].copy_from_slice(&kind.to_le_bytes());
        bytes[18..20].copy_from_slice(&MACHINE_X86_64.to_le_bytes());
        bytes[32..40].copy_from_slice(&(HEADER as u64).to_le_bytes());
        bytes[56..58].copy_from_slice(&(segments.len() as u16).to_le_bytes());
        for (at, (kind, content)) in segments.iter().enumerate() {
            let (at, offset) = (HEADER + at * PROGRAM_HEADER, bytes.len() as u64);
            bytes[at..at + 4].copy_from_slice(&kind.to_le_bytes());
            bytes[at + 8..at + 16].copy_from_slice(&offset.to_le_bytes());
            bytes[at + 32..at + 40].copy_from_slice(&(content.len() as u64).to_le_bytes());
            bytes.extend_from_slice(content);
        }
        bytes
    }

    fn reason(bytes: &[u8]) -> Option<&'static str> {
        let read = |to: &mut [u8], position: u64| {
            let there = bytes.get(position as usize..)?;
            let len = there.len().min(to.len());
            to[..len].copy_from_slice(&there[..len]);
            Some(len)
        };
        reason_not_loaded(&bytes[..bytes.len().min(FIRST)], read)
            .map(|why| core::str::from_utf8(why).unwrap())
    }

    #[test]
    fn unsupported_programs_are_explained() {
        let (glibc, musl) = (&b"/lib64/ld-linux-x86-64.so.2\0"[..], &b"/lib/ld-musl-x86_64.so.1\0"[..]);
        let go = b"\x04\0\0\0\x01\0\0\0\x04\0\0\0Go\0\0x";
        let gnu = b"\x04\0\0\0\x01\0\0\0\x04\0\0\0GNU\0x";
        assert_eq!(reason(&program(3, &[(6, b""), (INTERP, glibc), (NOTE, gnu)])), None);
        assert_eq!(reason(&program(2, &[(1, b""), (NOTE, gnu)])), Some("is statically linked"));
        assert_eq!(reason(&program(3, &[(1, b"")])), Some("is statically linked (PIE)"));
        assert_eq!(reason(&program(3, &[(INTERP, musl)])), Some("is linked with another libc"));
        let of_go = program(2, &[(INTERP, glibc), (NOTE, go)]);
        assert_eq!(reason(&of_go), Some("is a Go program, which makes system calls without libc"));
        let mut other = program(2, &[]);
        other[4] = 1;
        assert_eq!(reason(&other), Some("is a program of 32 bits"));
        assert_eq!((reason(b"#!/bin/sh\n"), reason(b"\x7fELF")), (None, None));
        let cut = program(2, &[(INTERP, glibc)]);
        assert_eq!(reason(&cut[..80]), None, "its headers are cut: the kernel refuses it");
    }

    #[test]
    fn shebang_interpreter_is_parsed() {
        let mut room = [0u8; 256];
        let mut path = |line: &[u8]| interpreter(&mut room, line).map(|path| path.to_bytes().to_vec());
        assert_eq!(path(b" /bin/busybox sh -x\n/other"), Some(b"/bin/busybox".to_vec()));
        assert_eq!(path(b"/bin/sh"), Some(b"/bin/sh".to_vec()));
        assert_eq!((path(b"\n/bin/sh"), path(&[b'x'; 300])), (None, None));
    }

    #[test]
    fn search_path_directories_are_joined() {
        let mut bytes = [0u8; FIRST];
        assert_eq!(join(&mut bytes, b"/bin", b"true").unwrap(), c"/bin/true");
        let mut bytes = [0u8; FIRST];
        assert_eq!(join(&mut bytes, b"", b"true").unwrap(), c"./true");
        assert!(join(&mut [0u8; FIRST], &[b'x'; FIRST], b"true").is_none());
    }
}
