//! What `offcore exec` tells the library: environment variables, which programs that are executed get, too.
//!
//! | variable | what |
//! |---|---|
//! | `OFFCORE_STACK` | path of the stack's socket |
//! | `OFFCORE_KEY` | 32 hexadecimal digits: the application of this program and of all that it starts; a `+` once one of these has linked itself |
//! | `OFFCORE_ONLY` | what goes to the stack: see [`crate::rules`] |
//! | `OFFCORE_STDERR` | device and inode of the command's own standard error, the only file that is written to: see [`crate::report`] |
//! | `OFFCORE_EXPLAIN` | `1`: each decision is told there: see [`crate::explain`] |
//! | `LD_PRELOAD` | this library |
//!
//! The library has copies of its own: programs overwrite their environment with their title.

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};

use offcore_session::message::KEY as KEY_LEN;

use crate::sys;

/// What an application is known by to the stack.
pub(crate) type Key = [u8; KEY_LEN];

/// `NAME=` of each variable.
const NAMES: [&[u8]; 6] = [
    b"OFFCORE_STACK=",
    b"OFFCORE_KEY=",
    b"OFFCORE_ONLY=",
    b"OFFCORE_EXPLAIN=",
    b"OFFCORE_STDERR=",
    b"LD_PRELOAD=",
];
const STACK: usize = 0;
const KEY: usize = 1;
const ONLY: usize = 2;
const EXPLAIN: usize = 3;
const STDERR: usize = 4;
/// So many are nobody else's, whatever a program says.
const OWN: usize = 5;
/// Bytes of a variable, name and null included: those of a path, at most.
const LONGEST: usize = 4096;

/// A copy of a variable, name included; empty without one.
struct Variable {
    bytes: UnsafeCell<[u8; LONGEST]>,
    len: AtomicUsize,
}

// SAFETY: it is written before the program begins, and later (the key) by who holds the lock of the link to the stack, whose
// readers are content with either.
unsafe impl Sync for Variable {}

static OURS: [Variable; NAMES.len()] =
    [const { Variable { bytes: UnsafeCell::new([0; LONGEST]), len: AtomicUsize::new(0) } }; NAMES.len()];

impl Variable {
    fn bytes(&self) -> &'static [u8] {
        let len = self.len.load(Ordering::Acquire);
        // SAFETY: so many bytes were written, and a variable is static.
        unsafe { core::slice::from_raw_parts(self.bytes.get().cast::<u8>(), len) }
    }

    fn set(&self, bytes: &[u8]) {
        // One byte stays a null.
        let len = if bytes.len() < LONGEST { bytes.len() } else { 0 };
        // SAFETY: there is room; nobody reads it before its length is stored.
        // copy-ok: a variable
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.bytes.get().cast::<u8>(), len) };
        self.len.store(len, Ordering::Release);
    }
}

/// Bytes of a string.
///
/// # Safety
/// `string` is one that ends with a null.
unsafe fn bytes<'a>(string: *const c_char) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(string) }.to_bytes()
}

/// The strings of a list that ends with a null.
///
/// # Safety
/// It is such a list, or null.
unsafe fn list(environment: *const *mut c_char) -> impl Iterator<Item = *mut c_char> {
    let mut at = environment;
    core::iter::from_fn(move || {
        if at.is_null() {
            return None;
        }
        // SAFETY: not beyond the null at the end.
        let variable = unsafe { *at };
        if variable.is_null() {
            at = ptr::null();
            return None;
        }
        // SAFETY: up to the null at the end.
        at = unsafe { at.add(1) };
        Some(variable)
    })
}

/// Finds the variables. `true`: there is a stack.
///
/// # Safety
/// `environment` is that of the program, which has just begun.
pub(crate) unsafe fn read(environment: *const *mut c_char) -> bool {
    // SAFETY: a list of strings that ends with a null.
    for variable in unsafe { list(environment) } {
        // SAFETY: one of its strings.
        let variable = unsafe { bytes(variable) };
        if let Some(found) = NAMES.iter().position(|name| variable.starts_with(name)) {
            OURS[found].set(variable);
        }
    }
    !stack().is_empty()
}

fn value(which: usize) -> &'static [u8] {
    OURS[which].bytes().get(NAMES[which].len()..).unwrap_or_default()
}

/// Path of the stack's socket; empty without one.
pub(crate) fn stack() -> &'static [u8] {
    value(STACK)
}

/// What goes to the stack; empty for everything.
pub(crate) fn only() -> &'static [u8] {
    value(ONLY)
}

/// Whether each decision is told.
pub(crate) fn explains() -> bool {
    value(EXPLAIN) == b"1"
}

/// Device and inode of the standard error of `offcore exec`.
pub(crate) fn stderr() -> Option<(u64, u64)> {
    let (device, inode) = core::str::from_utf8(value(STDERR)).ok()?.split_once(':')?;
    Some((device.parse().ok()?, inode.parse().ok()?))
}

/// The application's key; zeros where it has none.
pub(crate) fn key() -> Key {
    let mut key = Key::default();
    let digit = |digit: u8| (digit as char).to_digit(16).unwrap_or(0) as u8;
    for (byte, digits) in key.iter_mut().zip(value(KEY).chunks_exact(2)) {
        *byte = digit(digits[0]) << 4 | digit(digits[1]);
    }
    key
}

/// Whether a process from which this one comes was linked to the stack.
pub(crate) fn was_linked() -> bool {
    value(KEY).len() > 2 * KEY_LEN
}

/// Changes the key, for programs that are executed from now on: this process is linked.
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

/// An environment that has our variables.
pub(crate) struct Environment {
    list: *const *mut c_char,
    /// Bytes that were mapped for it.
    mapped: usize,
}

impl Environment {
    /// `given`, with our variables: the library among those that are preloaded is the program's to say, if it says any.
    ///
    /// # Safety
    /// `given` is null, or a list of strings that ends with a null.
    pub(crate) unsafe fn with_ours(given: *const *const c_char) -> Self {
        let given = given.cast::<*mut c_char>();
        // SAFETY: the caller's promise, here and below.
        let theirs = || unsafe { list(given) };
        // SAFETY: one of its strings.
        let is = |variable: &*mut c_char, name: &[u8]| unsafe { bytes(*variable) }.starts_with(name);
        let len = (theirs().count() + NAMES.len() + 1) * size_of::<*mut c_char>();
        let mapped = if stack().is_empty() { Err(libc::ENOENT) } else { sys::map(-1, len, true) };
        let Ok(address) = mapped else { return Self { list: given, mapped: 0 } };
        let to = address.cast::<*mut c_char>();
        let replaced = |variable: &*mut c_char| NAMES[..OWN].iter().any(|name| is(variable, name));
        let ours = OURS.iter().zip(NAMES).filter(|(variable, name)| {
            let given = !NAMES[..OWN].contains(name) && theirs().any(|variable| is(&variable, name));
            !variable.bytes().is_empty() && !given
        });
        let ours = ours.map(|(variable, _)| variable.bytes.get().cast::<c_char>());
        for (at, variable) in theirs().filter(|variable| !replaced(variable)).chain(ours).enumerate() {
            // SAFETY: there is room for all of them and a null, which is there already.
            unsafe { to.add(at).write(variable) };
        }
        Self { list: to, mapped: len }
    }

    pub(crate) fn as_ptr(&self) -> *const *const c_char {
        self.list.cast()
    }
}

impl Drop for Environment {
    /// The program was not executed after all.
    fn drop(&mut self) {
        if self.mapped > 0 {
            sys::unmap(self.list.cast_mut().cast(), self.mapped);
        }
    }
}
