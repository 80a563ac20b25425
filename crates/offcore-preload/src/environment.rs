//! Environment variables with which `offcore exec` configures the library. Executed programs get them, too.
//!
//! | variable | meaning |
//! |---|---|
//! | `OFFCORE_STACK` | path of the stack's socket |
//! | `OFFCORE_KEY` | 32 hexadecimal digits: key of the application; a `+` follows once a process was linked |
//! | `OFFCORE_ONLY` | selects sockets for the stack: see [`crate::rules`] |
//! | `OFFCORE_STDERR` | device and inode of the standard error of `offcore exec`: see [`crate::report`] |
//! | `OFFCORE_EXPLAIN` | `1`: the library prints each decision: see [`crate::explain`] |
//! | `OFFCORE_FALLBACK` | `kernel`: sockets use the kernel if the stack cannot be reached; otherwise, calls fail |
//! | `OFFCORE_ON_LOSS` | `exit`: a program with listeners exits after the stack's end |
//! | `OFFCORE_LIBRARY` | path of this library |
//! | `LD_PRELOAD` | this library, then the program's own preloaded libraries |
//!
//! An application consists of a program and all programs that it starts. The library writes only to the file in
//! `OFFCORE_STDERR`. It keeps copies of the variables, because programs overwrite their environment with their title.

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_int};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};

use offcore_session::message::KEY as KEY_LEN;

use crate::sys::{self, Errno};

/// The key that identifies an application to the stack.
pub(crate) type Key = [u8; KEY_LEN];

/// The prefix `NAME=` of each variable.
const NAMES: [&[u8]; 8] = [
    b"OFFCORE_STACK=",
    b"OFFCORE_KEY=",
    b"OFFCORE_ONLY=",
    b"OFFCORE_EXPLAIN=",
    b"OFFCORE_STDERR=",
    b"OFFCORE_FALLBACK=",
    b"OFFCORE_ON_LOSS=",
    b"OFFCORE_LIBRARY=",
];
const STACK: usize = 0;
const KEY: usize = 1;
const ONLY: usize = 2;
const EXPLAIN: usize = 3;
const STDERR: usize = 4;
const FALLBACK: usize = 5;
const ON_LOSS: usize = 6;
const LIBRARY: usize = 7;
/// The variable of the dynamic linker.
const PRELOAD: &[u8] = b"LD_PRELOAD=";
/// Maximum length of a variable in bytes, including the name and the null. It is the maximum length of a path.
const LONGEST: usize = 4096;

/// A copy of a variable with its name, or empty if the variable is not set.
struct Variable {
    bytes: UnsafeCell<[u8; LONGEST]>,
    len: AtomicUsize,
}

// SAFETY: a variable is written before the program begins. Later, only the key is written, under the lock of the link
// to the stack. Readers of the key accept the old and the new value.
unsafe impl Sync for Variable {}

static OURS: [Variable; NAMES.len()] =
    [const { Variable { bytes: UnsafeCell::new([0; LONGEST]), len: AtomicUsize::new(0) } }; NAMES.len()];

impl Variable {
    fn bytes(&self) -> &'static [u8] {
        let len = self.len.load(Ordering::Acquire);
        // SAFETY: `len` bytes were written before `len` was stored, and the variable is static.
        unsafe { core::slice::from_raw_parts(self.bytes.get().cast::<u8>(), len) }
    }

    fn set(&self, bytes: &[u8]) {
        // At least one byte stays null.
        let len = if bytes.len() < LONGEST { bytes.len() } else { 0 };
        // SAFETY: `len` is less than `LONGEST`, and no reader uses the new bytes before their length is stored.
        // copy-ok: a variable
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.bytes.get().cast::<u8>(), len) };
        self.len.store(len, Ordering::Release);
    }
}

/// Returns the bytes of a string.
///
/// # Safety
/// `string` is a valid string that ends with a null.
unsafe fn bytes<'a>(string: *const c_char) -> &'a [u8] {
    // SAFETY: the caller guarantees that `string` points to bytes that end with a null.
    unsafe { CStr::from_ptr(string) }.to_bytes()
}

/// Returns the strings of a list that ends with a null.
///
/// # Safety
/// `environment` is null, or such a list.
unsafe fn list(environment: *const *mut c_char) -> impl Iterator<Item = *mut c_char> {
    let mut at = environment;
    core::iter::from_fn(move || {
        if at.is_null() {
            return None;
        }
        // SAFETY: the caller guarantees a list that ends with a null, and no null was read yet, so `at` points to an
        // entry.
        let variable = unsafe { *at };
        if variable.is_null() {
            at = ptr::null();
            return None;
        }
        // SAFETY: this entry is not null, so the list has another one.
        at = unsafe { at.add(1) };
        Some(variable)
    })
}

/// Copies the variables. Returns whether a stack is configured.
///
/// # Safety
/// `environment` is the initial environment of the program.
pub(crate) unsafe fn read(environment: *const *mut c_char) -> bool {
    // SAFETY: the initial environment is a list of strings that ends with a null.
    for variable in unsafe { list(environment) } {
        // SAFETY: each entry of the environment is a valid string.
        let variable = unsafe { bytes(variable) };
        if let Some(found) = NAMES.iter().position(|name| variable.starts_with(name)) {
            OURS[found].set(variable);
        }
    }
    !stack_path().is_empty()
}

fn value(which: usize) -> &'static [u8] {
    OURS[which].bytes().get(NAMES[which].len()..).unwrap_or_default()
}

/// Returns the path of the stack's socket, or an empty string without a stack.
pub(crate) fn stack_path() -> &'static [u8] {
    value(STACK)
}

/// Returns the rules that select sockets for the stack. An empty string selects all sockets.
pub(crate) fn stack_rules() -> &'static [u8] {
    value(ONLY)
}

/// Returns whether a socket uses the kernel's network if the stack cannot be reached.
pub(crate) fn falls_back() -> bool {
    value(FALLBACK) == b"kernel"
}

/// Returns whether a program with listeners exits after the stack's end.
pub(crate) fn exits_on_loss() -> bool {
    value(ON_LOSS) == b"exit"
}

/// Returns whether the library prints each decision.
pub(crate) fn prints_decisions() -> bool {
    value(EXPLAIN) == b"1"
}

/// Returns the device and inode of the standard error of `offcore exec`.
pub(crate) fn stderr() -> Option<(u64, u64)> {
    let (device, inode) = core::str::from_utf8(value(STDERR)).ok()?.split_once(':')?;
    Some((device.parse().ok()?, inode.parse().ok()?))
}

/// Returns the application's key, or zeros without a key.
pub(crate) fn key() -> Key {
    let mut key = Key::default();
    let digit = |digit: u8| (digit as char).to_digit(16).unwrap_or(0) as u8;
    for (byte, digits) in key.iter_mut().zip(value(KEY).chunks_exact(2)) {
        *byte = digit(digits[0]) << 4 | digit(digits[1]);
    }
    key
}

/// Returns whether an ancestor of this process was linked to the stack.
pub(crate) fn was_linked() -> bool {
    value(KEY).len() > 2 * KEY_LEN
}

/// Changes the key for programs that are executed from now on, after this process was linked.
pub(crate) fn set_key(key: &Key) {
    let mut variable = [b'+'; NAMES[KEY].len() + 2 * KEY_LEN + 1];
    let (name, digits) = variable.split_at_mut(NAMES[KEY].len());
    name.copy_from_slice(NAMES[KEY]); // copy-ok: a variable
    let hexadecimal = |half: u8| char::from_digit(half.into(), 16).unwrap_or('0') as u8;
    for (byte, digits) in key.iter().zip(digits.chunks_exact_mut(2)) {
        digits[0] = hexadecimal(byte >> 4);
        digits[1] = hexadecimal(byte & 15);
    }
    OURS[KEY].set(&variable);
}

/// Maximum number of variables in [`Room`]. More of them need a mapping.
const FEW: usize = 512;

/// Memory for an environment on the caller's stack.
///
/// A `vfork` child shares its parent's memory, so its mappings would stay in the parent.
struct Room {
    list: [*mut c_char; FEW],
    preload: [u8; LONGEST],
}

/// Calls `execute` with `given` and our variables. The program preloads this library, then the libraries in `given`.
///
/// # Errors
/// `ENOMEM`.
///
/// # Safety
/// `given` is null, or a list of strings that ends with a null.
pub(crate) unsafe fn with_our_variables<T>(
    given: *const *const c_char,
    execute: impl FnOnce(*const *const c_char) -> T,
) -> Result<T, Errno> {
    // SAFETY: the caller guarantees that `given` is null or a list of strings that ends with a null.
    if stack_path().is_empty() || unsafe { has_our_variables(given) } {
        return Ok(execute(given));
    }
    // SAFETY: the caller guarantees that `given` is null or a list of strings that ends with a null.
    let count = unsafe { list(given.cast()) }.count() + NAMES.len() + 2;
    // SAFETY: the caller guarantees that `given` is null or a list of strings that ends with a null.
    let preload = unsafe { preload_of(given) };
    let preload_len = PRELOAD.len() + library().len() + preload.map_or(0, |given| given.len() + 1) + 1;
    if count <= FEW && preload_len <= LONGEST {
        let mut room = Room { list: [ptr::null_mut(); FEW], preload: [0; LONGEST] };
        // SAFETY: `room` has space for `count` entries, which include a null, and for the libraries. The caller
        // guarantees that `given` is null or a list of strings that ends with a null.
        unsafe { write(given, room.list.as_mut_ptr(), room.preload.as_mut_ptr()) };
        return Ok(execute(room.list.as_ptr().cast()));
    }
    let list_len = count * size_of::<*mut c_char>();
    let mapped = sys::map(-1, list_len + preload_len, true)?;
    // SAFETY: the mapping has space for `count` entries and for the libraries behind them. The caller guarantees that
    // `given` is null or a list of strings that ends with a null.
    unsafe { write(given, mapped.cast(), mapped.add(list_len)) };
    let result = execute(mapped.cast::<*const c_char>());
    sys::unmap(mapped, list_len + preload_len);
    Ok(result)
}

/// Returns the path of this library.
fn library() -> &'static [u8] {
    value(LIBRARY)
}

/// Returns the value of `LD_PRELOAD` in an environment. The dynamic linker uses the last one.
///
/// # Safety
/// `given` is null, or a list of strings that ends with a null.
unsafe fn preload_of<'a>(given: *const *const c_char) -> Option<&'a [u8]> {
    // SAFETY: the caller guarantees that `given` is null or a list of strings that ends with a null.
    let variables = unsafe { list(given.cast()) }.map(|variable| unsafe { bytes(variable) });
    variables.filter_map(|variable| variable.strip_prefix(PRELOAD)).last()
}

/// Returns whether a list of libraries, separated by colons or spaces, contains this one.
fn has_library(preloaded: &[u8]) -> bool {
    preloaded.split(|byte| matches!(byte, b':' | b' ')).any(|path| path == library())
}

/// Returns whether an environment has all of our variables with our values.
///
/// # Safety
/// `given` is null, or a list of strings that ends with a null.
unsafe fn has_our_variables(given: *const *const c_char) -> bool {
    let has = |ours: &Variable, name: &[u8]| {
        // SAFETY: the caller guarantees that `given` is null or a list of strings that ends with a null.
        let mut variables = unsafe { list(given.cast()) }.map(|variable| unsafe { bytes(variable) });
        match ours.bytes() {
            [] => !variables.any(|variable| variable.starts_with(name)),
            ours => {
                let mut same = variables.filter(|variable| variable.starts_with(name));
                same.next() == Some(ours) && same.next().is_none()
            }
        }
    };
    // SAFETY: the caller guarantees that `given` is null or a list of strings that ends with a null.
    unsafe { preload_of(given) }.is_some_and(has_library)
        && OURS.iter().zip(NAMES).all(|(ours, name)| has(ours, name))
}

/// Writes an environment to `to`: the variables of `given` without ours, then ours. Writes `LD_PRELOAD` to `preload`.
///
/// # Safety
/// `given` is valid as for [`with_our_variables`]. `to` has space for all variables and a null, and is filled with
/// nulls. `preload` has space for the libraries.
unsafe fn write(given: *const *const c_char, to: *mut *mut c_char, preload: *mut u8) {
    // SAFETY: the caller guarantees that `given` is null or a list of strings that ends with a null.
    let theirs = unsafe { preload_of(given) };
    let is_ours = |variable: &*mut c_char| {
        // SAFETY: `variable` is a string of `given`.
        let variable = unsafe { bytes(*variable) };
        variable.starts_with(PRELOAD) || NAMES.iter().any(|name| variable.starts_with(name))
    };
    let ours = OURS.iter().filter(|ours| !ours.bytes().is_empty());
    let ours = ours.map(|ours| ours.bytes.get().cast::<c_char>());
    // SAFETY: the caller guarantees that `given` is null or a list of strings that ends with a null.
    let variables = unsafe { list(given.cast()) }.filter(|variable| !is_ours(variable));
    for (at, variable) in variables.chain(ours).chain([preload.cast::<c_char>()]).enumerate() {
        // SAFETY: the caller guarantees that `to` has space for all variables and a null.
        unsafe { to.add(at).write(variable) };
    }
    let theirs = theirs.filter(|theirs| !theirs.is_empty());
    let (library, separator): (&[u8], &[u8]) = match theirs {
        Some(theirs) if has_library(theirs) => (b"", b""),
        Some(_) => (library(), b":"),
        None => (library(), b""),
    };
    // SAFETY: the caller guarantees that `preload` has space for all libraries and a null.
    unsafe { join(preload, &[PRELOAD, library, separator, theirs.unwrap_or_default()]) };
}

/// Writes a string that consists of several parts.
///
/// # Safety
/// `to` has space for all parts and a null.
unsafe fn join(mut to: *mut u8, parts: &[&[u8]]) {
    for part in parts.iter().copied().chain([&b"\0"[..]]) {
        // SAFETY: the caller guarantees that `to` has space for all parts and a null.
        unsafe {
            // copy-ok: a variable
            ptr::copy_nonoverlapping(part.as_ptr(), to, part.len());
            to = to.add(part.len());
        }
    }
}

/// Returns the directories in which execvp(3) searches for a program.
pub(crate) fn search_path() -> &'static [u8] {
    unsafe extern "C" {
        static environ: *const *mut c_char;
    }
    // SAFETY: libc keeps `environ` valid, and the program does not change its strings while it executes another
    // program.
    let mut variables = unsafe { list(environ).map(|variable| bytes(variable)) };
    variables.find_map(|variable| variable.strip_prefix(b"PATH=")).unwrap_or(b"/bin:/usr/bin")
}

/// Restores our variables in the program's own environment, which libc's `system` and `popen` use.
pub(crate) fn restore_variables() {
    unsafe extern "C" {
        static environ: *const *const c_char;
        fn setenv(name: *const c_char, value: *const c_char, overwrite: c_int) -> c_int;
    }
    let set = |variables: *const *const c_char| {
        // SAFETY: `variables` is a list of strings that ends with a null.
        for variable in unsafe { list(variables.cast()) }.map(|variable| unsafe { bytes(variable) }) {
            let mut name = [0u8; 32];
            let Some(end) =
                variable.iter().position(|byte| *byte == b'=').filter(|end| *end < name.len() - 1)
            else {
                continue;
            };
            if NAMES.contains(&&variable[..=end]) || PRELOAD == &variable[..=end] {
                name[..end].copy_from_slice(&variable[..end]); // copy-ok: a name
                // SAFETY: `name` ends with a null, and the value is the rest of a string that ends with a null.
                unsafe { setenv(name.as_ptr().cast(), variable.as_ptr().add(end + 1).cast(), 1) };
            }
        }
    };
    // SAFETY: libc keeps `environ` valid: it is null or a list of strings that ends with a null.
    unsafe {
        if !stack_path().is_empty() && !has_our_variables(environ) {
            let _ = with_our_variables(environ, set);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use std::ffi::CString;

    use super::*;

    /// Returns the environment that an executed program gets.
    fn executed(given: &[&str]) -> Vec<String> {
        let strings: Vec<_> = given.iter().map(|variable| CString::new(*variable).unwrap()).collect();
        let list: Vec<_> = strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect();
        let read = |environment: *const *const c_char| {
            // SAFETY: `environment` is a list of strings that ends with a null.
            let variables = unsafe { super::list(environment.cast()) };
            // SAFETY: each variable is a string that ends with a null.
            variables
                .map(|variable| String::from_utf8(unsafe { bytes(variable) }.to_vec()).unwrap())
                .collect()
        };
        // SAFETY: `list` ends with a null, and its strings live until the call returns.
        unsafe { with_our_variables(list.as_ptr(), read) }.unwrap()
    }

    #[test]
    fn exec_passes_preload_variables() {
        assert_eq!(executed(&["A=b", "OFFCORE_ONLY=x"]), ["A=b", "OFFCORE_ONLY=x"], "without a stack");
        for (which, value) in [(STACK, "/s"), (KEY, "00+"), (LIBRARY, "/l.so")] {
            OURS[which].set(&[NAMES[which], value.as_bytes()].concat());
        }
        let ours = ["OFFCORE_STACK=/s", "OFFCORE_KEY=00+", "OFFCORE_LIBRARY=/l.so"];
        let expected = |theirs: &[&str], preload: &str| {
            let preload = format!("LD_PRELOAD={preload}");
            [theirs, &ours, &[preload.as_str()]].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(executed(&[]), expected(&[], "/l.so"));
        assert_eq!(executed(&["A=b", "LD_PRELOAD="]), expected(&["A=b"], "/l.so"));
        assert_eq!(executed(&["LD_PRELOAD=/x.so /y.so", "A=b"]), expected(&["A=b"], "/l.so:/x.so /y.so"));
        assert_eq!(executed(&["LD_PRELOAD=/x.so:/l.so"]), expected(&[], "/x.so:/l.so"));
        assert_eq!(executed(&["LD_PRELOAD=/l.so.1"]), expected(&[], "/l.so:/l.so.1"));
        // The dynamic linker uses the last one.
        assert_eq!(executed(&["LD_PRELOAD=/x.so", "LD_PRELOAD=/y.so"]), expected(&[], "/l.so:/y.so"));
        let others = ["OFFCORE_STACK=/other", "OFFCORE_ONLY=tcp", "OFFCORE_KEY=ff"];
        assert_eq!(executed(&others), expected(&[], "/l.so"));
        let many: Vec<_> = (0..2 * FEW).map(|number| format!("V{number}=x")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert_eq!(executed(&many), expected(&many, "/l.so"));
        let long = format!("LD_PRELOAD=/{}.so", "x".repeat(LONGEST));
        assert_eq!(executed(&[&long]), expected(&[], &format!("/l.so:{}", &long["LD_PRELOAD=".len()..])));
        // A correct environment is not copied.
        let right = [&ours[..], &["B=c", "LD_PRELOAD=/l.so"]].concat();
        assert_eq!(executed(&right), right);
    }
}
