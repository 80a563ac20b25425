//! Messages for the user. Each kind is printed once per process.
//!
//! The library writes only to the file that was the standard error of `offcore exec`, because the program may have
//! replaced it by another file or a connection. A line is one non-blocking system call. If it would block, the line is
//! dropped.

use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, Ordering};

use offcore_session::message::VERSION;

use crate::environment;
use crate::step::Step;
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

/// Writes a line, if standard error is still the file of `offcore exec`.
pub(crate) fn print(parts: &[&[u8]]) {
    // A sandbox may kill the process for `fstat`.
    let file = environment::stderr().filter(|_| !sys::is_sandboxed());
    if file.is_some() && sys::file_id(STDERR) == file && sys::has_room(STDERR) {
        sys::write_parts(STDERR, parts);
    }
}

fn print_once(said: &AtomicBool, parts: &[&[u8]]) {
    if !said.swap(true, Ordering::Relaxed) {
        print(parts);
    }
}

/// Returns the reason why the stack cannot be reached, and a remedy. Returns `None` if the errno is printed instead.
fn unreachable_reason(step: Step, error: Errno) -> Option<&'static [u8]> {
    Some(match (step, error) {
        (Step::Page, _) => b"this process may not use madvise(MADV_WIPEONFORK): allow it in the sandbox",
        (Step::Connect, libc::ECONNREFUSED | libc::ENOENT) => {
            b"nothing listens there: start a stack with `offcore tcp --port SPEC --serve` and this path"
        }
        (Step::Connect | Step::Welcome, libc::EACCES) => {
            b"access denied for this user: either --allow-uid of `offcore tcp` does not admit it, or the stack must first close files of this user: try again"
        }
        (Step::Welcome, libc::EUSERS) => b"too many programs of this user on this stack: end some",
        (Step::Welcome, libc::EMFILE) => {
            b"the user's share of the stack's descriptors (ulimit -Hn) is used up: end some programs"
        }
        (Step::Welcome, libc::ENOBUFS) => {
            b"this program has 1023 processes on the stack, the maximum: end some"
        }
        (Step::Welcome, libc::ENOMEM) => b"the stack has no memory left for programs of this user: end some",
        (_, libc::ENOMEM) => b"the system has no memory left for the stack's buffers",
        (Step::Welcome | Step::Message, libc::ECONNRESET | libc::EPIPE) | (Step::Welcome, libc::EAGAIN) => {
            b"the stack is busy: too many programs start at once"
        }
        (Step::Connect | Step::Message, libc::EAGAIN) => b"the stack does not answer: it is stopped or hung",
        (_, libc::EMFILE) => b"this process has no descriptors left: raise its limit (ulimit -n)",
        (_, libc::ENFILE) => b"the system has no descriptors left",
        (Step::Socket, _) => b"this process may not create Unix sockets (AF_UNIX): allow them in the sandbox",
        (Step::Connect, libc::EPERM) => b"this process may not connect Unix sockets: allow it in the sandbox",
        (Step::Message, libc::EPERM | libc::EACCES | libc::ENOSYS) => {
            b"this process may not use sendmsg and recvmsg: allow them in the sandbox"
        }
        _ => return None,
    })
}

/// Reports that the stack cannot be reached.
pub(crate) fn no_stack(step: Step, error: Errno) {
    static SAID: AtomicBool = AtomicBool::new(false);
    // Already printed.
    if (step, error) == (Step::Welcome, libc::EPROTO) {
        return;
    }
    let number = Digits::new(error as u32);
    let (why, number): (_, &[u8]) = match unreachable_reason(step, error) {
        Some(why) => (why, b""),
        None => (&b"errno "[..], number.as_bytes()),
    };
    let rest: &[u8] = match environment::falls_back() {
        true => b"; sockets use the kernel's network\n",
        false => b"; sockets that need it fail\n",
    };
    print_once(&SAID, &[b"offcore: no stack at ", environment::stack_path(), b": ", why, number, rest]);
}

/// Reports that the stack has ended, and a listener whose kernel socket was not kept.
pub(crate) fn no_listener() {
    static SAID: AtomicBool = AtomicBool::new(false);
    let rest = b" has ended: a listener accepts no connections until the program calls listen again\n";
    print_once(&SAID, &[b"offcore: the stack at ", environment::stack_path(), rest]);
}

/// Reports that the stack has ended, and that the program exits.
pub(crate) fn report_exit() {
    static SAID: AtomicBool = AtomicBool::new(false);
    let rest = b" has ended: the program exits (--on-loss exit)\n";
    print_once(&SAID, &[b"offcore: the stack at ", environment::stack_path(), rest]);
}

/// Reports that a new stack refuses a process's listener at this port, and that the process exits.
pub(crate) fn report_refused_listener(error: Errno, port: u16) {
    static SAID: AtomicBool = AtomicBool::new(false);
    let number = Digits::new(error as u32);
    let (why, number): (&[u8], &[u8]) = match error {
        libc::EADDRINUSE => (b"another program listens on this address", b""),
        libc::EADDRNOTAVAIL => (b"the stack does not have this address", b""),
        libc::EACCES if port < 1024 => (
            b"access denied for this user: see --allow-uid of `offcore tcp`; ports below 1024 need root or the stack's user",
            b"",
        ),
        libc::EACCES => (b"access denied for this user: see --allow-uid of `offcore tcp`", b""),
        _ => (b"errno ", number.as_bytes()),
    };
    let begin = b"offcore: this process cannot listen again on the stack at ";
    print_once(&SAID, &[begin, environment::stack_path(), b": ", why, number, b"; it exits\n"]);
}

/// Reports a stack of another version.
pub(crate) fn other_version(found: u32) {
    static SAID: AtomicBool = AtomicBool::new(false);
    let (found, ours) = (Digits::new(found), Digits::new(VERSION));
    let parts: [&[u8]; 7] = [
        b"offcore: the stack at ",
        environment::stack_path(),
        b" has version ",
        found.as_bytes(),
        b", this library has version ",
        ours.as_bytes(),
        b": use the same build of both\n",
    ];
    print_once(&SAID, &parts);
}

/// Reports that an executed program does not load the library.
pub(crate) fn not_loaded(path: &[u8], why: &[u8]) {
    let rest = b": this library is not loaded into it, and its sockets use the kernel's network\n";
    print(&[b"offcore: ", path, b" ", why, rest]);
}

/// Reports that the kernel cannot dispatch the resolver's system calls.
pub(crate) fn no_dispatch() {
    static SAID: AtomicBool = AtomicBool::new(false);
    let line = b"offcore: names are resolved over the kernel's network: the stack needs Linux 5.11 and prctl for that\n";
    print_once(&SAID, &[line]);
}

/// Ends the program if a length exceeds the size that its compiler knew. libc does so, too.
pub(crate) fn check(len: usize, room: usize) {
    if len > room {
        print(&[b"*** buffer overflow detected ***: terminated\n"]);
        // SAFETY: `abort` takes no arguments and does not return.
        unsafe { libc::abort() }
    }
}
