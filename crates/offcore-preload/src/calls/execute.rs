//! Programs that are executed: they get the library, too. Processes that are forked.

use core::ffi::{c_char, c_int};

use crate::environment::Environment;
use crate::link;
use crate::real;

type Strings = *const *const c_char;

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let environment = Environment::with_ours(environment);
        real::execve(path, arguments, environment.as_ptr())
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn execvpe(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let environment = Environment::with_ours(environment);
        real::execvpe(path, arguments, environment.as_ptr())
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let environment = Environment::with_ours(environment);
        real::fexecve(fd, arguments, environment.as_ptr())
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn posix_spawn(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const libc::posix_spawn_file_actions_t,
    attributes: *const libc::posix_spawnattr_t,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let environment = Environment::with_ours(environment);
        real::posix_spawn(pid, path, actions, attributes, arguments, environment.as_ptr())
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn posix_spawnp(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const libc::posix_spawn_file_actions_t,
    attributes: *const libc::posix_spawnattr_t,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let environment = Environment::with_ours(environment);
        real::posix_spawnp(pid, path, actions, attributes, arguments, environment.as_ptr())
    }
}

/// The child introduces itself to the stack while it may: it could be about to give up its rights.
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn fork() -> libc::pid_t {
    // SAFETY: it takes nothing.
    let child = unsafe { real::fork() };
    if child == 0 {
        link::forked();
    }
    child
}

/// The environment of a call that names none.
fn usual() -> Strings {
    unsafe extern "C" {
        static environ: Strings;
    }
    // SAFETY: libc's variable.
    unsafe { environ }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { execve(path, arguments, usual()) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn execvp(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { execvpe(path, arguments, usual()) }
}
