//! C library streams on sessions.
//!
//! glibc's streams make system calls directly. A stream on a session is therefore created with `fopencookie` and uses
//! the functions below.

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

/// Offset of the descriptor in glibc's `FILE` (`bits/types/struct_FILE.h`), behind the flags and 13 addresses.
const DESCRIPTOR: usize = 8 + 13 * 8;

unsafe extern "C" fn read(cookie: *mut c_void, to: *mut c_char, len: size_t) -> ssize_t {
    // SAFETY: glibc passes a buffer of the stream with `len` writable bytes.
    unsafe { receive::read(cookie as usize as c_int, to.cast(), len) }
}

/// A return value of 0 means an error here.
unsafe extern "C" fn write(cookie: *mut c_void, from: *const c_char, len: size_t) -> ssize_t {
    // SAFETY: glibc passes a buffer of the stream with `len` readable bytes.
    unsafe { send::write(cookie as usize as c_int, from.cast(), len) }.max(0)
}

unsafe extern "C" fn seek(_: *mut c_void, _: *mut i64, _: c_int) -> c_int {
    sys::set_errno(libc::ESPIPE);
    -1
}

unsafe extern "C" fn close(cookie: *mut c_void) -> c_int {
    // SAFETY: `close` takes no addresses.
    unsafe { descriptors::close(cookie as usize as c_int) }
}

unsafe extern "C" {
    static mut stdin: *mut FILE;
    static mut stdout: *mut FILE;
    static mut stderr: *mut FILE;
}

/// Replaces the standard streams of a program that was started with sessions as its standard descriptors, for example
/// by inetd.
pub(crate) fn standard() {
    // SAFETY: the variables belong to glibc, and no other code uses them before the program starts.
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

/// Replaces the standard input stream after a session became the standard input: glibc's own stream would read the
/// bytes in the pair instead of data. Data that the other streams of glibc write to the pair is sent by the stack.
pub(crate) fn input() {
    if session::get(libc::STDIN_FILENO).is_some() {
        // SAFETY: the mode is a valid string, and `stdin` belongs to glibc. A program does not use `stdin` while it
        // replaces its standard input.
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
        // SAFETY: `mode` is a valid string, as `fdopen` requires of its caller.
        return unsafe { real::fdopen(fd, mode) } as *mut FILE;
    }
    // SAFETY: `mode` is a valid string, as `fdopen` requires of its caller.
    let first = unsafe { CStr::from_ptr(mode) }.to_bytes().first();
    if !matches!(first, Some(b'r' | b'w' | b'a')) {
        sys::set_errno(libc::EINVAL);
        return core::ptr::null_mut();
    }
    let functions = Functions { read, write, seek, close };
    // SAFETY: the functions have the types that glibc requires; the cookie is not used as an address.
    let file = unsafe { fopencookie(fd as usize as *mut c_void, mode, functions) };
    if !file.is_null() {
        // `fileno` returns this field.
        // SAFETY: programs have this layout of `FILE` compiled in, so it cannot change. glibc does not use the field
        // for streams of `fopencookie`.
        unsafe { file.cast::<u8>().add(DESCRIPTOR).cast::<c_int>().write(fd) };
    }
    file
}
