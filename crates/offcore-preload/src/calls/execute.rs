//! Executing programs, which get this library, too; and forking processes.

use core::ffi::{c_char, c_int};

use crate::environment::{self, with_our_variables};
use crate::link;
use crate::listeners;
use crate::programs;
use crate::real;
use crate::sys::{self, Errno};

type Strings = *const *const c_char;

/// Converts a result to a return value, and sets `errno` on an error.
fn return_value(result: Result<c_int, Errno>) -> c_int {
    result.unwrap_or_else(|error| sys::returned_int(Err(error)))
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn execve(
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: `path` is null or a valid string, as the function requires of its caller.
    unsafe { programs::check_path(libc::AT_FDCWD, path) };
    // SAFETY: the function requires of its caller that `environment` is null or a null-terminated list of strings. The
    // other arguments are passed on unchanged.
    return_value(unsafe {
        with_our_variables(environment, |environment| real::execve(path, arguments, environment))
    })
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn execvpe(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: `path` is null or a valid string, as the function requires of its caller.
    unsafe { programs::check_command(path) };
    // SAFETY: the function requires of its caller that `environment` is null or a null-terminated list of strings. The
    // other arguments are passed on unchanged.
    return_value(unsafe {
        with_our_variables(environment, |environment| real::execvpe(path, arguments, environment))
    })
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    programs::check_descriptor(fd);
    // SAFETY: the function requires of its caller that `environment` is null or a null-terminated list of strings. The
    // other arguments are passed on unchanged.
    return_value(unsafe {
        with_our_variables(environment, |environment| real::fexecve(fd, arguments, environment))
    })
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn execveat(
    directory: c_int,
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
    flags: c_int,
) -> c_int {
    match flags & libc::AT_EMPTY_PATH {
        // SAFETY: `path` is null or a valid string, as the function requires of its caller.
        0 => unsafe { programs::check_path(directory, path) },
        _ => programs::check_descriptor(directory),
    }
    let call = |environment: Strings| {
        let args =
            [directory as usize, path as usize, arguments as usize, environment as usize, flags as usize, 0];
        // SAFETY: `path` is null or a valid string, and both lists are null or null-terminated lists of strings, as
        // `execveat` requires of its caller.
        sys::returned_int(sys::result(unsafe { sys::call(libc::SYS_execveat, args) }))
    };
    // SAFETY: the function requires of its caller that `environment` is null or a null-terminated list of strings. The
    // other arguments are passed on unchanged.
    return_value(unsafe { with_our_variables(environment, call) })
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
    // SAFETY: `path` is null or a valid string, as the function requires of its caller.
    unsafe { programs::check_path(libc::AT_FDCWD, path) };
    let call = |environment| {
        // SAFETY: the caller guarantees pointers that are valid or null as `posix_spawn` requires; `environment` was
        // made from its list.
        unsafe { real::posix_spawn(pid, path, actions, attributes, arguments, environment) }
    };
    // SAFETY: the function requires of its caller that `environment` is null or a null-terminated list of strings.
    unsafe { with_our_variables(environment, call) }.unwrap_or_else(|error| error)
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
    // SAFETY: `path` is null or a valid string, as the function requires of its caller.
    unsafe { programs::check_command(path) };
    let call = |environment| {
        // SAFETY: the caller guarantees pointers that are valid or null as `posix_spawn` requires; `environment` was
        // made from its list.
        unsafe { real::posix_spawnp(pid, path, actions, attributes, arguments, environment) }
    };
    // SAFETY: the function requires of its caller that `environment` is null or a null-terminated list of strings.
    unsafe { with_our_variables(environment, call) }.unwrap_or_else(|error| error)
}

/// Repairs the program's own environment first: libc executes the shell with it, without calling the functions above.
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn system(command: *const c_char) -> c_int {
    environment::restore_variables();
    // SAFETY: `command` is null or a valid string, as `system` requires of its caller.
    unsafe { real::system(command) }
}

/// As [`system`].
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    environment::restore_variables();
    // SAFETY: `command` and `mode` are valid strings, as `popen` requires of its caller.
    unsafe { real::popen(command, mode) as *mut libc::FILE }
}

/// The child links itself to the stack at once, because it may soon give up the rights to do so.
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn fork() -> libc::pid_t {
    listeners::before_fork();
    // SAFETY: `fork` has no arguments.
    let child = unsafe { real::fork() };
    if child == 0 {
        link::link_child();
    }
    child
}

/// Returns the environment for calls that do not specify one.
fn current_environment() -> Strings {
    unsafe extern "C" {
        static environ: Strings;
    }
    // SAFETY: libc defines this variable, and changes it only when the program changes its environment.
    unsafe { environ }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: `path` and `arguments` are valid, as `execv` requires of its caller; libc keeps `environ` valid.
    unsafe { execve(path, arguments, current_environment()) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn execvp(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: `path` and `arguments` are valid, as `execvp` requires of its caller; libc keeps `environ` valid.
    unsafe { execvpe(path, arguments, current_environment()) }
}

/// The variadic functions. libc's versions do not call the functions of this library.
#[cfg(feature = "interpose")]
mod one_by_one {
    use core::arch::naked_asm;
    use core::ffi::{c_char, c_int};

    use super::{Strings, current_environment, execve, execvpe};
    use crate::sys;

    /// Number of arguments in registers after the path.
    const IN_REGISTERS: usize = 5;
    /// Maximum number of arguments that are copied to the caller's stack. More of them need a mapping.
    const FEW: usize = 128;

    /// Defines functions that pass the addresses of their register arguments and of their stack arguments.
    macro_rules! listed {
        ($($name:ident => $to:ident;)*) => {$(
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name(path: *const c_char) -> c_int {
                naked_asm!(
                    ".cfi_startproc",
                    "lea rax, [rsp + 8]",
                    "push r9",
                    "push r8",
                    "push rcx",
                    "push rdx",
                    "push rsi",
                    ".cfi_adjust_cfa_offset 40",
                    "mov rsi, rsp",
                    "mov rdx, rax",
                    "call {to}",
                    "add rsp, 40",
                    ".cfi_adjust_cfa_offset -40",
                    "ret",
                    ".cfi_endproc",
                    to = sym $to,
                )
            }
        )*};
    }

    listed! {
        execl => list;
        execlp => list_path;
        execle => list_environment;
    }

    /// Calls `execute` with the list of arguments up to the null, and with the argument that follows the null.
    ///
    /// # Safety
    /// `first` points to [`IN_REGISTERS`] arguments, and `rest` to the following ones. The list contains a null.
    unsafe fn with_list(
        first: Strings,
        rest: Strings,
        execute: impl FnOnce(Strings, *const c_char) -> c_int,
    ) -> c_int {
        // SAFETY: the caller guarantees that `first` and `rest` hold the arguments up to the null and one behind it. No
        // later one is read.
        let get = |at: usize| unsafe {
            if at < IN_REGISTERS { *first.add(at) } else { *rest.add(at - IN_REGISTERS) }
        };
        let mut len = 0;
        while !get(len).is_null() {
            len += 1;
        }
        let copy = |to: *mut *const c_char| {
            for at in 0..=len {
                // SAFETY: `to` has room for `len + 1` arguments, since `len` is below `FEW` or the mapping has that
                // size.
                unsafe { to.add(at).write(get(at)) };
            }
            execute(to, get(len + 1))
        };
        if len < FEW {
            return copy([core::ptr::null(); FEW].as_mut_ptr());
        }
        match sys::map(-1, (len + 1) * size_of::<*const c_char>(), true) {
            Ok(mapped) => copy(mapped.cast()),
            Err(error) => sys::returned_int(Err(error)),
        }
    }

    unsafe extern "C" fn list(path: *const c_char, first: Strings, rest: Strings) -> c_int {
        // SAFETY: `first` and `rest` point to the arguments of the variadic function, whose caller guarantees valid
        // strings up to the null.
        unsafe { with_list(first, rest, |arguments, _| execve(path, arguments, current_environment())) }
    }

    unsafe extern "C" fn list_path(path: *const c_char, first: Strings, rest: Strings) -> c_int {
        // SAFETY: `first` and `rest` point to the arguments of the variadic function, whose caller guarantees valid
        // strings up to the null.
        unsafe { with_list(first, rest, |arguments, _| execvpe(path, arguments, current_environment())) }
    }

    /// The environment follows the null.
    unsafe extern "C" fn list_environment(path: *const c_char, first: Strings, rest: Strings) -> c_int {
        // SAFETY: `first` and `rest` point to the arguments of the variadic function, whose caller guarantees valid
        // strings up to the null, and an environment behind it.
        unsafe {
            with_list(first, rest, |arguments, environment| execve(path, arguments, environment.cast()))
        }
    }
}
