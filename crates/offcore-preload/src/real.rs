//! libc's own functions, for calls that do not concern sessions.
//!
//! All functions are looked up once, when the library is loaded, because a lookup takes locks and may allocate memory.
//! A function that is called earlier, or that libc does not have, fails with `ENOSYS`.

use core::ffi::{CStr, c_int, c_void};
use core::mem::transmute_copy;
use core::sync::atomic::{AtomicUsize, Ordering};

use libc::{
    addrinfo, c_char, c_uint, c_ulong, hostent, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t,
    ssize_t, timespec,
};

use crate::sys;

macro_rules! real {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $ret:ty;)*) => {
        #[allow(non_upper_case_globals, reason = "named as the functions")]
        mod address {
            use super::AtomicUsize;
            $(pub(super) static $name: AtomicUsize = AtomicUsize::new(0);)*
        }

        $(
            /// Calls libc's function of this name.
            ///
            /// # Safety
            /// The arguments must be valid, as libc's function requires.
            #[allow(clippy::too_many_arguments, reason = "as the functions")]
            pub(crate) unsafe fn $name($($arg: $type),*) -> $ret {
                let address = address::$name.load(Ordering::Relaxed);
                if address == 0 {
                    sys::set_errno(libc::ENOSYS);
                    return -1;
                }
                // SAFETY: `dlsym` returned this address for the function of this name, which has this type.
                let function: unsafe extern "C" fn($($type),*) -> $ret = unsafe { transmute_copy(&address) };
                // SAFETY: the caller guarantees that pointers and lengths are valid as libc's function requires.
                unsafe { function($($arg),*) }
            }
        )*

        /// Looks up all functions of the list.
        pub(super) fn find() {
            $(
                let name = concat!(stringify!($name), "\0").as_bytes();
                if let Ok(name) = CStr::from_bytes_with_nul(name) {
                    // SAFETY: `name` is a valid string. Behind this library, the lookup finds libc's function or a
                    // wrapper of it.
                    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
                    address::$name.store(found as usize, Ordering::Relaxed);
                }
            )*
        }
    };
}

/// Functions that the library replaces.
mod functions {
    use super::*;

    real! {
        fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
        fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
        fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
        fn listen(fd: c_int, backlog: c_int) -> c_int;
        fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
        fn read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t;
        fn readv(fd: c_int, to: *const iovec, count: c_int) -> ssize_t;
        fn preadv2(fd: c_int, to: *const iovec, count: c_int, position: off_t, flags: c_int) -> ssize_t;
        fn recv(fd: c_int, to: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
        fn recvfrom(fd: c_int, to: *mut c_void, len: size_t, flags: c_int, address: *mut sockaddr, address_len: *mut socklen_t) -> ssize_t;
        fn recvmsg(fd: c_int, header: *mut msghdr, flags: c_int) -> ssize_t;
        fn recvmmsg(fd: c_int, headers: *mut mmsghdr, count: c_uint, flags: c_int, time: *mut timespec) -> c_int;
        fn write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t;
        fn writev(fd: c_int, from: *const iovec, count: c_int) -> ssize_t;
        fn pwritev2(fd: c_int, from: *const iovec, count: c_int, position: off_t, flags: c_int) -> ssize_t;
        fn send(fd: c_int, from: *const c_void, len: size_t, flags: c_int) -> ssize_t;
        fn sendto(fd: c_int, from: *const c_void, len: size_t, flags: c_int, address: *const sockaddr, address_len: socklen_t) -> ssize_t;
        fn sendmsg(fd: c_int, header: *const msghdr, flags: c_int) -> ssize_t;
        fn sendmmsg(fd: c_int, headers: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
        fn sendfile(to: c_int, from: c_int, position: *mut off_t, count: size_t) -> ssize_t;
        fn splice(from: c_int, from_position: *mut off_t, to: c_int, to_position: *mut off_t, len: size_t, flags: c_uint) -> ssize_t;
        fn shutdown(fd: c_int, how: c_int) -> c_int;
        fn getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
        fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
        fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
        fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;
        fn sockatmark(fd: c_int) -> c_int;
        fn ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int;
        fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int;
        fn close(fd: c_int) -> c_int;
        fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
        fn dup(fd: c_int) -> c_int;
        fn dup2(from: c_int, to: c_int) -> c_int;
        fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int;
        fn poll(entries: *mut libc::pollfd, count: libc::nfds_t, time: c_int) -> c_int;
        fn ppoll(entries: *mut libc::pollfd, count: libc::nfds_t, time: *const timespec, mask: *const libc::sigset_t) -> c_int;
        fn select(count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set, exceptions: *mut libc::fd_set, time: *mut libc::timeval) -> c_int;
        fn pselect(count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set, exceptions: *mut libc::fd_set, time: *const timespec, mask: *const libc::sigset_t) -> c_int;
        fn epoll_wait(epoll: c_int, events: *mut libc::epoll_event, most: c_int, time: c_int) -> c_int;
        fn epoll_pwait(epoll: c_int, events: *mut libc::epoll_event, most: c_int, time: c_int, mask: *const libc::sigset_t) -> c_int;
        fn epoll_pwait2(epoll: c_int, events: *mut libc::epoll_event, most: c_int, time: *const timespec, mask: *const libc::sigset_t) -> c_int;
        fn epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut libc::epoll_event) -> c_int;
        fn execve(path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
        fn execvpe(path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
        fn posix_spawn(pid: *mut libc::pid_t, path: *const c_char, actions: *const libc::posix_spawn_file_actions_t, attributes: *const libc::posix_spawnattr_t, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
        fn posix_spawnp(pid: *mut libc::pid_t, path: *const c_char, actions: *const libc::posix_spawn_file_actions_t, attributes: *const libc::posix_spawnattr_t, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
        fn system(command: *const c_char) -> c_int;
        fn popen(command: *const c_char, mode: *const c_char) -> isize;
        fn fdopen(fd: c_int, mode: *const c_char) -> isize;
        fn fork() -> libc::pid_t;
        fn fexecve(fd: c_int, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    }
}
pub(crate) use functions::*;

/// Functions of libc that resolve names, as a list for another macro.
macro_rules! resolvers {
    ($of:ident) => {
        $of! {
            fn getaddrinfo(node: *const c_char, service: *const c_char, hints: *const addrinfo, found: *mut *mut addrinfo) -> c_int;
            fn getnameinfo(address: *const sockaddr, len: socklen_t, host: *mut c_char, host_len: socklen_t, service: *mut c_char, service_len: socklen_t, flags: c_int) -> c_int;
            fn gethostbyname(name: *const c_char) -> isize;
            fn gethostbyname2(name: *const c_char, family: c_int) -> isize;
            fn gethostbyname_r(name: *const c_char, found: *mut hostent, buffer: *mut c_char, len: size_t, result: *mut *mut hostent, error: *mut c_int) -> c_int;
            fn gethostbyname2_r(name: *const c_char, family: c_int, found: *mut hostent, buffer: *mut c_char, len: size_t, result: *mut *mut hostent, error: *mut c_int) -> c_int;
            fn gethostbyaddr(address: *const c_void, len: socklen_t, family: c_int) -> isize;
            fn gethostbyaddr_r(address: *const c_void, len: socklen_t, family: c_int, found: *mut hostent, buffer: *mut c_char, buffer_len: size_t, result: *mut *mut hostent, error: *mut c_int) -> c_int;
            fn res_query(name: *const c_char, class: c_int, kind: c_int, answer: *mut u8, len: c_int) -> c_int;
            fn res_search(name: *const c_char, class: c_int, kind: c_int, answer: *mut u8, len: c_int) -> c_int;
            fn res_send(question: *const u8, len: c_int, answer: *mut u8, answer_len: c_int) -> c_int;
            fn res_nquery(state: *mut c_void, name: *const c_char, class: c_int, kind: c_int, answer: *mut u8, len: c_int) -> c_int;
            fn res_nsearch(state: *mut c_void, name: *const c_char, class: c_int, kind: c_int, answer: *mut u8, len: c_int) -> c_int;
            fn res_nsend(state: *mut c_void, question: *const u8, len: c_int, answer: *mut u8, answer_len: c_int) -> c_int;
        }
    };
}
pub(crate) use resolvers;

/// Functions that resolve names.
pub(crate) mod resolver {
    use super::*;

    resolvers!(real);
}

/// Looks up all functions.
pub(crate) fn find() {
    functions::find();
    resolver::find();
}
