//! Creating, binding, connecting and accepting sockets.

use core::ffi::c_int;
use core::mem;
use core::net::SocketAddr;
use core::sync::atomic::Ordering;

use libc::{sockaddr, sockaddr_storage, socklen_t};
use offcore_session::message::Accepted;
use offcore_session::slot::{state, wish};

use crate::address::{self, End};
use crate::carried;
use crate::datagrams;
use crate::decide::{self, Decided};
use crate::link;
use crate::listeners;
use crate::real;
use crate::session::{self, Session, Target};
use crate::sys::{self, Errno};
use crate::table::{self, Entry, SocketKind};

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: `socket` takes no addresses.
    let fd = unsafe { real::socket(domain, kind, protocol) };
    if fd >= 0
        && let Err(error) = decide::note_socket(fd, domain, kind, protocol)
    {
        let _ = sys::close(fd);
        return sys::returned_int(Err(error));
    }
    fd
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn bind(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
    let decided = match session::find(fd) {
        Target::Undecided(entry) => {
            // SAFETY: `to` is null or has `len` readable bytes, as `bind` requires of its caller.
            unsafe { address::read(to, len) }.map_or(Ok(Decided::Kernel), |to| decide::bind(fd, entry, to))
        }
        Target::Session(_) => Err(libc::EINVAL),
        Target::Kernel | Target::Dead => Ok(Decided::Kernel),
    };
    match decided {
        Ok(Decided::Kernel | Decided::Loopback(_)) => {
            // SAFETY: `to` is null or has `len` readable bytes, as `bind` requires of its caller.
            let bound = unsafe { real::bind(fd, to, len) };
            // A listener that was just closed may still exist on the stack.
            if sys::of_libc(bound as isize) == Err(libc::EADDRINUSE)
                // SAFETY: `to` is null or has `len` readable bytes, as `bind` requires of its caller.
                && unsafe { address::read(to, len) }.is_ok_and(|to| decide::release(fd, to))
            {
                // SAFETY: `to` is null or has `len` readable bytes, as `bind` requires of its caller.
                return unsafe { real::bind(fd, to, len) };
            }
            bound
        }
        Ok(Decided::Session(_)) => 0,
        Err(error) => sys::returned_int(Err(error)),
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: `to` is null or has `len` readable bytes, as `connect` requires of its caller.
    let address = unsafe { address::read(to, len) };
    let signals = sys::Blocked::new();
    let decided = match (session::find(fd), address) {
        (Target::Session(session), _) if session.is_datagrams() => {
            drop(signals);
            // SAFETY: `to` is null or has `len` readable bytes, as `connect` requires of its caller.
            let to = unsafe { address::read_for_datagrams(session.entry.v6, false, to, len) };
            return sys::returned_int(to.and_then(|to| datagrams::connect(&session, to)).map(|()| 0));
        }
        (Target::Session(session), address) => {
            drop(signals);
            return sys::returned_int(connect_again(&session, address).map(|()| 0));
        }
        // SAFETY: `address::read` has read `to` successfully.
        (Target::Undecided(entry), Ok(address)) if entry.v6 || !unsafe { address::is_v6(to) } => {
            decide::connect(fd, entry, address)
        }
        _ => {
            drop(signals);
            // SAFETY: `to` is null or has `len` readable bytes, as `connect` requires of its caller.
            return unsafe { real::connect(fd, to, len) };
        }
    };
    let interrupted = signals.is_interrupted();
    drop(signals);
    let result = match decided {
        // SAFETY: `to` is null or has `len` readable bytes, as `connect` requires of its caller.
        Ok(Decided::Kernel) => return unsafe { real::connect(fd, to, len) },
        Ok(Decided::Loopback(here)) => return connect_kernel(fd, here),
        Ok(Decided::Session(session)) if session.is_datagrams() => Ok(()),
        Ok(Decided::Session(session)) if interrupted && !session.is_nonblocking() => Err(libc::EINTR),
        Ok(Decided::Session(session)) => first_connected(&session),
        Err(error) => Err(error),
    };
    sys::returned_int(result.map(|()| 0))
}

/// Connects a kernel socket.
fn connect_kernel(fd: c_int, to: SocketAddr) -> c_int {
    // SAFETY: the structure consists of integers, for which all zeros are valid.
    let mut storage: sockaddr_storage = unsafe { mem::zeroed() };
    let mut len = size_of::<sockaddr_storage>() as socklen_t;
    let v6 = sys::int_option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) == libc::AF_INET6;
    // SAFETY: `storage` has `len` bytes, enough for an address of any family, and lives until the call returns.
    unsafe {
        address::write(to, v6, (&raw mut storage).cast(), &raw mut len);
        real::connect(fd, (&raw const storage).cast(), len)
    }
}

/// Returns the result of a new stream's `connect`. If a blocking call fails, the descriptor becomes a new socket again.
fn first_connected(session: &Session) -> Result<(), Errno> {
    let result = decide::connect_result(session);
    if result.is_err() && session.is_over() && !session.is_nonblocking() {
        decide::reopen(session)?;
    }
    result
}

/// Handles `connect` of a stream that is already a session. An address of family `AF_UNSPEC` disconnects it.
fn connect_again(session: &Session, to: Result<SocketAddr, Errno>) -> Result<(), Errno> {
    match to {
        Ok(to) => decide::connect_session(session, to),
        Err(libc::EAFNOSUPPORT) if session.slot.state() != state::LISTENING => {
            session.set_option_bit(wish::RESET, true);
            decide::reopen(session).map(drop)
        }
        Err(error) => Err(error),
    }
}

/// Called by glibc's own functions.
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: `to` is null or has `len` readable bytes, as `connect` requires of its caller.
    unsafe { connect(fd, to, len) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    match session::find(fd) {
        Target::Session(session) => sys::returned_int(listen_session(&session)),
        Target::Undecided(entry) => {
            // SAFETY: `listen` takes no addresses.
            if unsafe { real::listen(fd, backlog) } < 0 {
                return -1;
            }
            sys::returned_int(decide::listen(fd, entry, backlog).map(|_| 0))
        }
        // SAFETY: `listen` takes no addresses.
        Target::Kernel | Target::Dead => unsafe { real::listen(fd, backlog) },
    }
}

fn listen_session(session: &Session) -> Result<usize, Errno> {
    match session.slot.state() {
        _ if session.is_datagrams() => Err(libc::EOPNOTSUPP),
        state::LISTENING => Ok(0),
        _ => Err(libc::EINVAL),
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn accept(fd: c_int, from: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: `from` is null, or `len` is valid and `from` has `*len` writable bytes, as `accept` requires of its
    // caller.
    unsafe { accept4(fd, from, len, 0) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    loop {
        let taken = match session::find(fd) {
            // SAFETY: `from` is null, or `len` is valid and `from` has `*len` writable bytes, as `accept` requires of
            // its caller.
            Target::Session(session) => unsafe { take_connection(&session, from, len, flags) },
            Target::Dead => Err(GONE),
            // SAFETY: `from` is null, or `len` is valid and `from` has `*len` writable bytes, as `accept` requires of
            // its caller.
            _ => return unsafe { real::accept4(fd, from, len, flags) },
        };
        let made = if taken == Err(GONE) {
            listeners::make_again(fd)
        } else {
            return sys::returned_int(taken.map(|fd| fd as usize));
        };
        if let Err(error) = made {
            return sys::returned_int(Err(error));
        }
    }
}

/// Internal error: the stack of the listener has ended. `accept` does not return it.
const GONE: Errno = libc::EOWNERDEAD;

/// Takes a connection from a listener's queue.
///
/// # Safety
/// `from` is null, or `len` is valid and `from` is valid for writes of `*len` bytes.
unsafe fn take_connection(
    listener: &Session,
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> Result<c_int, Errno> {
    if flags & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) != 0 {
        return Err(libc::EINVAL);
    }
    if listener.is_datagrams() {
        return Err(libc::EOPNOTSUPP);
    }
    if listener.slot.state() != state::LISTENING || listener.has_option_bit(wish::NO_READ) {
        return Err(libc::EINVAL);
    }
    if !from.is_null() && len.is_null() {
        return Err(libc::EFAULT);
    }
    // If the process has no free descriptor, the connection stays in the queue.
    let free = sys::fcntl(listener.fd, libc::F_DUPFD_CLOEXEC, 0)?;
    let _ = sys::close(free as c_int);
    let cloexec = if flags & libc::SOCK_CLOEXEC != 0 { libc::MSG_CMSG_CLOEXEC } else { 0 };
    let mut bytes = [0; Accepted::LEN];
    let (read, received) = match link::receive(listener.fd, &mut bytes, cloexec) {
        Err(libc::ECONNRESET) => return Err(GONE),
        received => received?,
    };
    let accepted = Accepted::from_bytes(&bytes[..read]);
    let (Some(accepted), [fd]) = (accepted, received.as_slice()) else {
        received.close();
        // If the process has no room for the descriptor, the kernel closes it. A length of 0 means that the stack has
        // closed the queue.
        return Err(match read {
            0 if listener.has_option_bit(wish::NO_READ) => libc::EINVAL,
            0 => GONE,
            _ => libc::EMFILE,
        });
    };
    let fd = *fd;
    let nonblocking = if flags & libc::SOCK_NONBLOCK != 0 { libc::O_NONBLOCK } else { 0 };
    let _ = sys::fcntl(fd, libc::F_SETFL, nonblocking as usize);
    if accepted.session.place == 0 {
        table::set(fd, None);
        if !from.is_null() {
            // SAFETY: the caller guarantees that `from` is null, or has `*len` writable bytes.
            unsafe { real::getpeername(fd, from, len) };
        }
        return Ok(fd);
    }
    table::set(fd, Some(Entry::session(SocketKind::Stream, listener.entry.v6, accepted.session)));
    let session = session::get(fd).ok_or(libc::ECONNABORTED)?;
    session.note_family();
    session.slot.wishes.told.fetch_or(wish::ACCEPTED, Ordering::AcqRel);
    if listener.slot.wishes.told.load(Ordering::Relaxed) & wish::TIMED != 0 {
        carried::copy_times(listener.fd, fd);
    }
    // SAFETY: the caller guarantees that `from` is null, or has `*len` writable bytes.
    unsafe { address::write(address::of(session.slot, End::Peer), session.entry.v6, from, len) };
    Ok(fd)
}

/// Writes an address of a session to the program's buffer.
///
/// # Safety
/// `to` is null, or `len` is null, or `len` is valid and `to` is valid for writes of `*len` bytes.
unsafe fn write_name(
    session: &Session,
    end: End,
    to: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<(), Errno> {
    if to.is_null() || len.is_null() {
        return Err(libc::EFAULT);
    }
    // SAFETY: `to` and `len` are not null, so `len` is valid, as the caller guarantees.
    if (unsafe { *len } as i32) < 0 {
        return Err(libc::EINVAL);
    }
    let has_peer = if session.is_datagrams() {
        datagrams::peer(session).is_some()
    } else {
        session.slot.state() == state::OPEN && !session.is_over() && !session.has_ended()
    };
    if end == End::Peer && !has_peer {
        return Err(libc::ENOTCONN);
    }
    // SAFETY: `to` has `*len` writable bytes, as the caller guarantees.
    unsafe { address::write(address::of(session.slot, end), session.entry.v6, to, len) };
    Ok(())
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn getsockname(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int {
    match session::get(fd) {
        // SAFETY: `len` is valid and `to` has `*len` writable bytes, as `getsockname` requires of its caller.
        Some(session) => sys::returned_int(unsafe { write_name(&session, End::Ours, to, len) }.map(|()| 0)),
        // SAFETY: `len` is valid and `to` has `*len` writable bytes, as `getsockname` requires of its caller.
        None => unsafe { real::getsockname(fd, to, len) },
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn getpeername(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int {
    match session::get(fd) {
        // SAFETY: `len` is valid and `to` has `*len` writable bytes, as `getpeername` requires of its caller.
        Some(session) => sys::returned_int(unsafe { write_name(&session, End::Peer, to, len) }.map(|()| 0)),
        // SAFETY: `len` is valid and `to` has `*len` writable bytes, as `getpeername` requires of its caller.
        None => unsafe { real::getpeername(fd, to, len) },
    }
}
