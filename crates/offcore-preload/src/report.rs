//! What the library says to people, each of it once in a process.
//!
//! It writes to the file that was the standard error of `offcore exec`, and to no other one: a program may have put a file of
//! its own there, or a connection. A line is one system call that does not wait. Without room for it, it is left out.

use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, Ordering};

use offcore_session::message::VERSION;

use crate::environment;
use crate::sys::{self, Errno};

/// A number in decimal digits.
struct Digits([u8; 10], usize);

impl Digits {
    fn new(mut number: u32) -> Self {
        let mut digits = Self([0; 10], 10);
        loop {
            digits.1 -= 1;
            digits.0[digits.1] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return digits;
            }
        }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.0[self.1..]
    }
}

/// Standard error.
const STDERR: c_int = 2;

/// Writes a line, if standard error is still that of `offcore exec`.
pub(crate) fn print(parts: &[&[u8]]) {
    // A sandbox may end the process for asking which file it is.
    let file = environment::stderr().filter(|_| !sys::is_sandboxed());
    if file.is_some() && sys::file_id(STDERR) == file && sys::has_room(STDERR) {
        sys::write_parts(STDERR, parts);
    }
}

fn once(said: &AtomicBool, parts: &[&[u8]]) {
    if !said.swap(true, Ordering::Relaxed) {
        print(parts);
    }
}

/// The stack cannot be reached.
pub(crate) fn no_stack(error: Errno) {
    static SAID: AtomicBool = AtomicBool::new(false);
    let why: &[u8] = match error {
        libc::ECONNREFUSED | libc::ENOENT => b"nobody serves it: start `offcore tcp ... --serve PATH`\n",
        libc::EACCES | libc::EPERM => b"this user may not: see --allow-uid of `offcore tcp`\n",
        libc::EPROTO => return,
        libc::EMFILE => b"no descriptors are left, here or there\n",
        libc::EUSERS => b"this user has 64 applications on it, or all users have 128: end some\n",
        libc::ECONNRESET | libc::EPIPE => b"it has no time: too many programs begin at once\n",
        libc::EAGAIN => b"it does not answer: it is stopped, or hangs\n",
        _ => b"errno ",
    };
    let number = Digits::new(error as u32);
    let rest: &[&[u8]] = if why.ends_with(b"\n") { &[] } else { &[number.as_bytes(), b"\n"] };
    let mut parts: [&[u8]; 6] = [b"offcore: no stack at ", environment::stack(), b": ", why, b"", b""];
    parts[4..4 + rest.len()].copy_from_slice(rest); // copy-ok: references
    once(&SAID, &parts);
}

/// The stack is gone, and a program's listener with it.
pub(crate) fn no_listener() {
    static SAID: AtomicBool = AtomicBool::new(false);
    let rest = b" is gone: what listened there accepts nothing more until the program listens again\n";
    once(&SAID, &[b"offcore: the stack at ", environment::stack(), rest]);
}

/// The stack is of another version.
pub(crate) fn other_version(found: u32) {
    static SAID: AtomicBool = AtomicBool::new(false);
    let (found, ours) = (Digits::new(found), Digits::new(VERSION));
    let parts: [&[u8]; 7] = [
        b"offcore: the stack at ",
        environment::stack(),
        b" speaks version ",
        found.as_bytes(),
        b", this library version ",
        ours.as_bytes(),
        b": use both of one build\n",
    ];
    once(&SAID, &parts);
}
