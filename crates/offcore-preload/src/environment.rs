//! What `offcore exec` tells the library: environment variables, which programs that are executed get, too.
//!
//! | variable | what |
//! |---|---|
//! | `OFFCORE_STACK` | path of the stack's socket |
//! | `OFFCORE_KEY` | 32 hexadecimal digits: the application, zeros as long as there is none; the library changes them in place |
//! | `OFFCORE_ONLY` | what goes to the stack: see [`crate::rules`] |
//! | `LD_PRELOAD` | this library |

use core::ffi::{CStr, c_char};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use offcore_session::message::KEY as KEY_LEN;

use crate::sys;

/// What an application is known by to the stack.
pub(crate) type Key = [u8; KEY_LEN];

/// `NAME=` of each variable.
const NAMES: [&[u8]; 4] = [b"OFFCORE_STACK=", b"OFFCORE_KEY=", b"OFFCORE_ONLY=", b"LD_PRELOAD="];
const STACK: usize = 0;
const KEY: usize = 1;
const ONLY: usize = 2;

/// The variables as they were when the program began, name included.
static OURS: [AtomicPtr<c_char>; NAMES.len()] = [const { AtomicPtr::new(ptr::null_mut()) }; NAMES.len()];

/// Bytes of a variable, name included.
///
/// # Safety
/// `variable` is a string that stays where it is.
unsafe fn bytes(variable: *const c_char) -> &'static [u8] {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(variable) }.to_bytes()
}

/// Finds the variables. `true`: there is a stack.
///
/// # Safety
/// `environment` is that of the program, which has just begun.
pub(crate) unsafe fn read(environment: *const *mut c_char) -> bool {
    // SAFETY: a list of strings that ends with a null.
    for variable in unsafe { list(environment) } {
        // SAFETY: a string of the environment that the program began with.
        let found = NAMES.iter().position(|name| unsafe { bytes(variable) }.starts_with(name));
        if let Some(found) = found {
            OURS[found].store(variable, Ordering::Relaxed);
        }
    }
    !stack().is_empty()
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
        // SAFETY: as above; it is not used beyond the null.
        at = unsafe { at.add(1) };
        if variable.is_null() {
            at = ptr::null();
            return None;
        }
        Some(variable)
    })
}

fn value(which: usize) -> &'static [u8] {
    let variable = OURS[which].load(Ordering::Relaxed);
    if variable.is_null() {
        return &[];
    }
    // SAFETY: a string of the environment that the program began with: libc never frees those.
    unsafe { bytes(variable) }.get(NAMES[which].len()..).unwrap_or_default()
}

/// Path of the stack's socket; empty without one.
pub(crate) fn stack() -> &'static [u8] {
    value(STACK)
}

/// What goes to the stack; empty for everything.
pub(crate) fn only() -> &'static [u8] {
    value(ONLY)
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

/// Changes the key, for programs that are executed from now on.
pub(crate) fn set_key(key: &Key) {
    let variable = OURS[KEY].load(Ordering::Relaxed);
    if value(KEY).len() != 2 * key.len() {
        return;
    }
    for (at, byte) in key.iter().enumerate() {
        for (digit, half) in [byte >> 4, byte & 15].into_iter().enumerate() {
            let digit_of = char::from_digit(half.into(), 16).unwrap_or('0') as c_char;
            // SAFETY: the variable has two digits for each byte behind its name, as looked up just now.
            unsafe { *variable.add(NAMES[KEY].len() + 2 * at + digit) = digit_of };
        }
    }
}

/// An environment that has our variables.
pub(crate) struct Environment {
    list: *const *mut c_char,
    /// Bytes that were mapped for it.
    mapped: usize,
}

impl Environment {
    /// `given`, with those of our variables that it lacks.
    ///
    /// # Safety
    /// `given` is null, or a list of strings that ends with a null.
    pub(crate) unsafe fn with_ours(given: *const *const c_char) -> Self {
        let given = given.cast::<*mut c_char>();
        // SAFETY: the caller's promise, here and below.
        let count = unsafe { list(given) }.count();
        let lacks = |name: &[u8]| {
            // SAFETY: strings of the list.
            !unsafe { list(given) }.any(|variable| unsafe { bytes(variable) }.starts_with(name))
        };
        let ours = OURS.iter().zip(NAMES).map(|(variable, name)| (variable.load(Ordering::Relaxed), name));
        let mut missing = ours.filter(|(variable, name)| !variable.is_null() && lacks(name)).peekable();
        let len = (count + NAMES.len() + 1) * size_of::<*mut c_char>();
        if missing.peek().is_none() {
            return Self { list: given, mapped: 0 };
        }
        let Ok(address) = sys::map(-1, len, true) else { return Self { list: given, mapped: 0 } };
        let to = address.cast::<*mut c_char>();
        // SAFETY: strings of the list.
        let all = unsafe { list(given) }.chain(missing.map(|(variable, _)| variable));
        for (at, variable) in all.enumerate() {
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
