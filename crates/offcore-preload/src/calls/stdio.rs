//! Streams of the C library over sessions.
//!
//! glibc's streams read and write by system calls of their own. Those of a session are streams with functions of their own
//! instead (`fopencookie`), which come back here.

use core::ffi::{CStr, c_char, c_int, c_void};

use libc::{FILE, size_t, ssize_t};

use super::{descriptors, receive, send};
use crate::real;
use crate::session;
use crate::sys;

/// glibc's `cookie_io_functions_t`.
#[repr(C)]
struct Functions {
    read: unsafe extern "C" fn(*mut c_void, *mut c_char, size_t) -> ssize_t,
    write: unsafe extern "C" fn(*mut c_void, *const c_char, size_t) -> ssize_t,
    seek: unsafe extern "C" fn(*mut c_void, *mut i64, c_int) -> c_int,
    close: unsafe extern "C" fn(*mut c_void) -> c_int,
}

unsafe extern "C" {
    fn setvbuf(file: *mut FILE, buffer: *mut c_char, mode: c_int, len: size_t) -> c_int;
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
}

/// Where glibc's `FILE` has its descriptor (`bits/types/struct_FILE.h`): behind the flags and 13 addresses.
const DESCRIPTOR: usize = 8 + 13 * 8;

unsafe extern "C" fn read(cookie: *mut c_void, to: *mut c_char, len: size_t) -> ssize_t {
    // SAFETY: the stream's buffer.
    unsafe { receive::read(cookie as usize as c_int, to.cast(), len) }
}

/// 0 is an error here.
unsafe extern "C" fn write(cookie: *mut c_void, from: *const c_char, len: size_t) -> ssize_t {
    // SAFETY: the stream's buffer.
    unsafe { send::write(cookie as usize as c_int, from.cast(), len) }.max(0)
}

unsafe extern "C" fn seek(_: *mut c_void, _: *mut i64, _: c_int) -> c_int {
    sys::set_errno(libc::ESPIPE);
    -1
}

unsafe extern "C" fn close(cookie: *mut c_void) -> c_int {
    // SAFETY: the stream's descriptor.
    unsafe { descriptors::close(cookie as usize as c_int) }
}

unsafe extern "C" {
    static mut stdin: *mut FILE;
    static mut stdout: *mut FILE;
    static mut stderr: *mut FILE;
}

/// A program that has just been executed may have sessions for its standard streams, as those of inetd have.
pub(crate) fn standard() {
    // SAFETY: glibc's variables, which nobody else uses yet.
    unsafe {
        for (fd, stream, mode) in
            [(0, &raw mut stdin, c"r"), (1, &raw mut stdout, c"w"), (2, &raw mut stderr, c"w")]
        {
            if session::get(fd).is_some() {
                let file = fdopen(fd, mode.as_ptr());
                if !file.is_null() {
                    *stream = file;
                }
            }
        }
        if session::get(2).is_some() {
            setvbuf(stderr, core::ptr::null_mut(), libc::_IONBF, 0);
        }
    }
}

/// A session is put in the place of the standard input: glibc's own stream would read what lies in the pair. What its other
/// streams write there is sent by the stack.
pub(crate) fn input() {
    if session::get(libc::STDIN_FILENO).is_some() {
        // SAFETY: a string; glibc's variable, which a program that changes its standard input does not use at that time.
        unsafe {
            let file = fdopen(libc::STDIN_FILENO, c"r".as_ptr());
            if !file.is_null() {
                stdin = file;
            }
        }
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if session::get(fd).is_none() {
        // SAFETY: the caller's promise.
        return unsafe { real::fdopen(fd, mode) } as *mut FILE;
    }
    // SAFETY: the caller's promise: a string.
    let first = unsafe { CStr::from_ptr(mode) }.to_bytes().first();
    if !matches!(first, Some(b'r' | b'w' | b'a')) {
        sys::set_errno(libc::EINVAL);
        return core::ptr::null_mut();
    }
    let functions = Functions { read, write, seek, close };
    // SAFETY: the functions are as glibc wants them; the cookie is no address.
    let file = unsafe { fopencookie(fd as usize as *mut c_void, mode, functions) };
    if !file.is_null() {
        // What `fileno` returns.
        // SAFETY: glibc's layout, which programs have compiled in; streams with functions of their own do not use it.
        unsafe { file.cast::<u8>().add(DESCRIPTOR).cast::<c_int>().write(fd) };
    }
    file
}
