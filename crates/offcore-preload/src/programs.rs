//! Executed programs into which this library is not loaded: statically linked ones, and others that the dynamic linker of glibc
//! does not start. Their sockets are the kernel's. They are executed, since scripts use many that have no sockets. A line on the
//! standard error of `offcore exec` names each file once in a process and its forked children.
//!
//! The check is written by hand: it runs between `vfork` and `execve`, where nothing may be allocated, and needs two tables of a file.
//! `offcore exec` checks the program that it starts with the crate `object`, and in full.

use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::environment;
use crate::report;
use crate::sys::{self, Errno};

/// Bytes of a file that are looked at. They have the program headers.
const FIRST: usize = 4096;
/// Interpreters of scripts that are followed, as many as the kernel follows.
const DEEPEST: usize = 5;

// Constants of `elf.h`, and sizes of its structures of 64 bits.
const CLASS_32: u8 = 1;
const MACHINE_X86_64: u16 = 62;
const TYPE_DYN: u16 = 3;
const INTERP: u32 = 3;
const NOTE: u32 = 4;
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;

/// Files that were named, by hashes of device and inode. Forked children share the page.
const WORDS: usize = 512;
static NAMED: AtomicPtr<AtomicU64> = AtomicPtr::new(core::ptr::null_mut());

/// Makes the page.
pub(crate) fn begin() {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let args = [0, WORDS * 8, protection as usize, flags as usize, usize::MAX, 0];
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    if let Ok(page) = sys::result(unsafe { sys::call(libc::SYS_mmap, args) }) {
        NAMED.store(page as *mut AtomicU64, Ordering::Release);
    }
}

/// Records that a file is named. `true` for the first time.
fn is_first((device, inode): (u64, u64)) -> bool {
    let hash = (inode ^ device.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let (word, bit) = ((hash >> 55) as usize % WORDS, 1 << (hash >> 49 & 63));
    let page = NAMED.load(Ordering::Acquire);
    // SAFETY: the page is never unmapped, and has so many words, which are atomics.
    !page.is_null() && unsafe { &*page.add(word) }.fetch_or(bit, Ordering::Relaxed) & bit == 0
}

/// The program at a path is about to be executed.
///
/// # Safety
/// `path` is a string, or null.
pub(crate) unsafe fn at_path(directory: c_int, path: *const c_char) {
    if is_silent() || path.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(path) };
    if let Ok(fd) = open(directory, path) {
        look(fd, path);
        let _ = sys::close(fd);
    }
}

/// The program of that name is about to be executed, which is looked for in `PATH`.
///
/// # Safety
/// `name` is a string, or null.
pub(crate) unsafe fn in_path(name: *const c_char) {
    if is_silent() || name.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let file = unsafe { CStr::from_ptr(name) };
    if file.to_bytes().contains(&b'/') {
        // SAFETY: the caller's promise.
        return unsafe { at_path(libc::AT_FDCWD, name) };
    }
    for directory in environment::search_path().split(|byte| *byte == b':') {
        let mut bytes = [0u8; FIRST];
        let Some(path) = join(&mut bytes, directory, file.to_bytes()) else { continue };
        if let Ok(fd) = open(libc::AT_FDCWD, path) {
            look(fd, path);
            let _ = sys::close(fd);
            return;
        }
    }
}

/// The program that a descriptor has open is about to be executed.
pub(crate) fn at_descriptor(fd: c_int) {
    if !is_silent() {
        look(fd, c"a program");
    }
}

/// Whether no line is wanted, or a sandbox may forbid system calls.
fn is_silent() -> bool {
    environment::stack().is_empty() || environment::falls_back() || sys::is_sandboxed()
}

/// A path of a directory and a name.
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
    // `open` of a FIFO would wait.
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY) as usize;
    let args = [directory as usize, path.as_ptr() as usize, flags, 0, 0, 0];
    // SAFETY: a path that lives until the call returns.
    sys::result(unsafe { sys::call(libc::SYS_openat, args) }).map(|fd| fd as c_int)
}

fn read_at(fd: c_int, to: &mut [u8], position: u64) -> Option<usize> {
    let args = [fd as usize, to.as_mut_ptr() as usize, to.len(), position as usize, 0, 0];
    // SAFETY: room for so many bytes, which lives until the call returns.
    sys::result(unsafe { sys::call(libc::SYS_pread64, args) }).ok()
}

/// Names the file, or the interpreter of a script, if the library is not loaded into it.
fn look(fd: c_int, path: &CStr) {
    let mut first = [0u8; FIRST];
    let Some(len) = read_at(fd, &mut first, 0) else { return };
    let Some(line) = first[..len].strip_prefix(b"#!") else { return name(fd, path, &first[..len]) };
    let mut line = line;
    let mut next = [0u8; 256];
    for _ in 1..DEEPEST {
        let Some(path) = interpreter(&mut next, line) else { return };
        let Ok(fd) = open(libc::AT_FDCWD, path) else { return };
        let len = read_at(fd, &mut first, 0).unwrap_or(0);
        let script = first[..len].strip_prefix(b"#!");
        if script.is_none() {
            name(fd, path, &first[..len]);
        }
        let _ = sys::close(fd);
        let Some(script) = script else { return };
        line = script;
    }
}

/// The path in the first line of a script, behind its `#!`.
fn interpreter<'a>(to: &'a mut [u8; 256], line: &[u8]) -> Option<&'a CStr> {
    let line = line.split(|byte| *byte == b'\n').next()?;
    let path = line.split(|byte| matches!(byte, b' ' | b'\t')).find(|word| !word.is_empty())?;
    *to = [0; 256];
    // copy-ok: a path
    to.get_mut(..path.len())?.copy_from_slice(path);
    CStr::from_bytes_until_nul(to).ok()
}

fn name(fd: c_int, path: &CStr, first: &[u8]) {
    let why = why(first, |to, position| read_at(fd, to, position));
    let why = why.filter(|_| !is_dynamic_linker(path)).or_else(|| capabilities(fd));
    let Some(why) = why else { return };
    if sys::file_id(fd).is_some_and(is_first) {
        report::not_loaded(path.to_bytes(), why);
    }
}

/// A dynamic linker that is executed itself loads a program, and this library before it.
fn is_dynamic_linker(path: &CStr) -> bool {
    let name = path.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    name == b"ld-linux-x86-64.so.2" || name == b"ld.so"
}

/// The dynamic linker preloads nothing into a program that has file capabilities, unless root executes it.
fn capabilities(fd: c_int) -> Option<&'static [u8]> {
    // SAFETY: it has no arguments.
    let user = unsafe { sys::call(libc::SYS_geteuid, [0; 6]) };
    let args = [fd as usize, c"security.capability".as_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: a name that lives until the call returns, and no room for a value.
    let has = user != 0 && unsafe { sys::call(libc::SYS_fgetxattr, args) } > 0;
    has.then_some(b"has file capabilities")
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// The reason why the library is not loaded into a program with these first bytes. `None` if it is loaded, or for another file.
fn why(first: &[u8], read: impl Fn(&mut [u8], u64) -> Option<usize>) -> Option<&'static [u8]> {
    if !first.starts_with(b"\x7fELF") {
        return None;
    }
    if first.get(4) == Some(&CLASS_32) {
        return Some(b"is a program of 32 bits");
    }
    let kind = u16::from_le_bytes(number(first, 16)?);
    if u16::from_le_bytes(number(first, 18)?) != MACHINE_X86_64 {
        return Some(b"is a program of another processor");
    }
    let table = u64::from_le_bytes(number(first, 32)?);
    let count = usize::from(u16::from_le_bytes(number(first, 56)?));
    let mut linker: Option<bool> = None;
    for at in 0..count.min((FIRST - HEADER) / PROGRAM_HEADER) {
        let mut header = [0u8; PROGRAM_HEADER];
        read(&mut header, table.checked_add((at * PROGRAM_HEADER) as u64)?)?;
        let (offset, len) =
            (u64::from_le_bytes(number(&header, 8)?), u64::from_le_bytes(number(&header, 32)?));
        let mut content = [0u8; 256];
        let content = &mut content[..len.min(256) as usize];
        match u32::from_le_bytes(number(&header, 0)?) {
            INTERP => {
                let len = read(content, offset)?;
                let path = content[..len].split(|byte| *byte == 0).next().unwrap_or_default();
                linker = Some(path.ends_with(b"/ld-linux-x86-64.so.2"));
            }
            // Go's linker names itself in a note, whose name begins behind three numbers.
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

    /// A program with segments of these types and contents.
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
        why(&bytes[..bytes.len().min(FIRST)], read).map(|why| core::str::from_utf8(why).unwrap())
    }

    #[test]
    fn programs_without_glibc_are_named() {
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
    fn scripts_name_interpreters() {
        let mut room = [0u8; 256];
        let mut path = |line: &[u8]| interpreter(&mut room, line).map(|path| path.to_bytes().to_vec());
        assert_eq!(path(b" /bin/busybox sh -x\n/other"), Some(b"/bin/busybox".to_vec()));
        assert_eq!(path(b"/bin/sh"), Some(b"/bin/sh".to_vec()));
        assert_eq!((path(b"\n/bin/sh"), path(&[b'x'; 300])), (None, None));
    }

    #[test]
    fn directories_of_the_search_path_are_joined() {
        let mut bytes = [0u8; FIRST];
        assert_eq!(join(&mut bytes, b"/bin", b"true").unwrap(), c"/bin/true");
        let mut bytes = [0u8; FIRST];
        assert_eq!(join(&mut bytes, b"", b"true").unwrap(), c"./true");
        assert!(join(&mut [0u8; FIRST], &[b'x'; FIRST], b"true").is_none());
    }
}
