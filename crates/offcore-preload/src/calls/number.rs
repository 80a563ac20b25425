//! `syscall(2)`: system calls by number.

use core::ffi::{c_int, c_uint};

use libc::{c_long, iovec, mmsghdr, msghdr, off_t, sockaddr, socklen_t, timespec};

use super::{descriptors, duplicates, epoll, execute, make, polling, receive, send, state};
use crate::sys;

/// Makes a system call by its number. If this library replaces the function for the call, the replacement is used.
///
/// io_uring cannot wait for sessions, so `io_uring_setup` fails with `ENOSYS`.
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let (fd, flags) = (a as c_int, d as c_int);
    let (address, len) = (e as *mut sockaddr, f as *mut socklen_t);
    // SAFETY: the caller of `syscall` passes the arguments of system call `number`, so its addresses are valid for that
    // call's reads and writes.
    unsafe {
        match number {
            libc::SYS_read => receive::read(fd, b as _, c) as c_long,
            libc::SYS_readv => receive::readv(fd, b as *const iovec, c as c_int) as c_long,
            libc::SYS_recvfrom => receive::recvfrom(fd, b as _, c, flags, address, len) as c_long,
            libc::SYS_recvmsg => receive::recvmsg(fd, b as *mut msghdr, c as c_int) as c_long,
            libc::SYS_recvmmsg => {
                receive::recvmmsg(fd, b as *mut mmsghdr, c as c_uint, flags, e as *mut timespec).into()
            }
            libc::SYS_write => send::write(fd, b as _, c) as c_long,
            libc::SYS_writev => send::writev(fd, b as *const iovec, c as c_int) as c_long,
            libc::SYS_sendto => send::sendto(fd, b as _, c, flags, address, f as socklen_t) as c_long,
            libc::SYS_sendmsg => send::sendmsg(fd, b as *const msghdr, c as c_int) as c_long,
            libc::SYS_sendmmsg => send::sendmmsg(fd, b as *mut mmsghdr, c as c_uint, flags).into(),
            libc::SYS_sendfile => send::sendfile(fd, b as c_int, c as *mut off_t, d) as c_long,
            libc::SYS_splice => send::splice(fd, b as _, c as c_int, d as _, e, f as c_uint) as c_long,
            libc::SYS_poll => polling::poll(a as _, b as _, c as c_int).into(),
            libc::SYS_select => polling::select(fd, b as _, c as _, d as _, e as _).into(),
            libc::SYS_epoll_ctl => epoll::epoll_ctl(fd, b as c_int, c as c_int, d as _).into(),
            libc::SYS_epoll_wait => epoll::epoll_wait(fd, b as _, c as c_int, flags).into(),
            libc::SYS_epoll_pwait => epoll::epoll_pwait(fd, b as _, c as c_int, flags, e as _).into(),
            libc::SYS_epoll_pwait2 => epoll::epoll_pwait2(fd, b as _, c as c_int, d as _, e as _).into(),
            libc::SYS_socket => make::socket(fd, b as c_int, c as c_int).into(),
            libc::SYS_bind => make::bind(fd, b as _, c as socklen_t).into(),
            libc::SYS_connect => make::connect(fd, b as _, c as socklen_t).into(),
            libc::SYS_listen => make::listen(fd, b as c_int).into(),
            libc::SYS_accept => make::accept4(fd, b as _, c as _, 0).into(),
            libc::SYS_accept4 => make::accept4(fd, b as _, c as _, flags).into(),
            libc::SYS_getsockname => make::getsockname(fd, b as _, c as _).into(),
            libc::SYS_getpeername => make::getpeername(fd, b as _, c as _).into(),
            libc::SYS_getsockopt => state::getsockopt(fd, b as c_int, c as c_int, d as _, e as _).into(),
            libc::SYS_setsockopt => {
                state::setsockopt(fd, b as c_int, c as c_int, d as _, e as socklen_t).into()
            }
            libc::SYS_shutdown => state::shutdown(fd, b as c_int).into(),
            libc::SYS_ioctl => state::ioctl(fd, b as _, c).into(),
            libc::SYS_fcntl => state::fcntl(fd, b as c_int, c).into(),
            libc::SYS_close => descriptors::close(fd).into(),
            libc::SYS_close_range => descriptors::close_range(a as c_uint, b as c_uint, c as c_int).into(),
            libc::SYS_dup => descriptors::dup(fd).into(),
            libc::SYS_dup2 => duplicates::dup2(fd, b as c_int).into(),
            libc::SYS_dup3 => duplicates::dup3(fd, b as c_int, c as c_int).into(),
            libc::SYS_execve => execute::execve(a as _, b as _, c as _).into(),
            libc::SYS_execveat => execute::execveat(fd, b as _, c as _, d as _, e as c_int).into(),
            libc::SYS_prctl => prctl(fd, b, c, d, e).into(),
            libc::SYS_seccomp => {
                let result = sys::result(sys::call(number, [a, b, c, d, e, f]));
                if a <= libc::SECCOMP_SET_MODE_FILTER as usize && result.is_ok() {
                    sys::begin_sandbox();
                }
                sys::returned(result) as c_long
            }
            libc::SYS_io_uring_setup => sys::returned(Err(libc::ENOSYS)) as c_long,
            _ => sys::returned(sys::result(sys::call(number, [a, b, c, d, e, f]))) as c_long,
        }
    }
}

/// Detects that the program filters its system calls. The library then makes fewer of them, too.
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn prctl(option: c_int, b: usize, c: usize, d: usize, e: usize) -> c_int {
    let args = [option as usize, b, c, d, e, 0];
    // SAFETY: the caller passes null, numbers, or addresses that are valid for `option` in `b` to `e`.
    let result = sys::result(unsafe { sys::call(libc::SYS_prctl, args) });
    if option == libc::PR_SET_SECCOMP && result.is_ok() {
        sys::begin_sandbox();
    }
    sys::returned_int(result)
}
