//! Sending.

use core::ffi::{c_int, c_uint, c_void};
use core::net::SocketAddr;

use libc::{iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t};

use crate::address;
use crate::control::Control;
use crate::datagrams;
use crate::decide::{self, Decided};
use crate::real;
use crate::session::{self, Session, Target};
use crate::stream;
use crate::sys::{self, Errno};
use crate::vectors::{Buffers, buffer};

/// Sends buffers. `to` is the destination of a datagram.
///
/// # Safety
/// The buffers are valid for reads.
unsafe fn send_buffers(
    session: &Session,
    buffers: Buffers<'_>,
    how: c_int,
    to: Option<SocketAddr>,
) -> Result<usize, Errno> {
    // SAFETY: the caller guarantees that the buffers are readable.
    unsafe {
        match session.is_datagrams() {
            true => datagrams::send(session, buffers, how, to, &Control::default()),
            false => stream::send(session, buffers, how),
        }
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t {
    match session::find(fd) {
        Target::Session(session) => {
            // SAFETY: `from` has `len` readable bytes, as `write` requires of its caller.
            sys::returned(unsafe { send_buffers(&session, Buffers::one(&buffer(from, len)), 0, None) })
        }
        // SAFETY: `from` has `len` readable bytes, as `write` requires of its caller.
        _ => unsafe { real::write(fd, from, len) },
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: `from` has `len` readable bytes, as `write` requires of its caller.
    unsafe { write(fd, from, len) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn writev(fd: c_int, from: *const iovec, count: c_int) -> ssize_t {
    match session::get(fd) {
        // SAFETY: `from` points to `count` buffers that are valid for reads, as `writev` requires of its caller.
        Some(session) => sys::returned(unsafe {
            Buffers::counted(from, count).and_then(|buffers| send_buffers(&session, buffers, 0, None))
        }),
        // SAFETY: `from` points to `count` buffers that are valid for reads, as `writev` requires of its caller.
        None => unsafe { real::writev(fd, from, count) },
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn pwritev2(
    fd: c_int,
    from: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> ssize_t {
    match session::get(fd) {
        Some(_) if position != -1 => sys::returned(Err(libc::ESPIPE)),
        Some(session) => {
            let how = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
            // SAFETY: `from` points to `count` buffers that are valid for reads, as `pwritev2` requires of its caller.
            sys::returned(unsafe {
                Buffers::counted(from, count).and_then(|buffers| send_buffers(&session, buffers, how, None))
            })
        }
        // SAFETY: `from` points to `count` buffers that are valid for reads, as `pwritev2` requires of its caller.
        None => unsafe { real::pwritev2(fd, from, count, position, flags) },
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn pwritev64v2(
    fd: c_int,
    from: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: `from` points to `count` buffers that are valid for reads, as `pwritev2` requires of its caller.
    unsafe { pwritev2(fd, from, count, position, flags) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn send(fd: c_int, from: *const c_void, len: size_t, how: c_int) -> ssize_t {
    match session::find(fd) {
        Target::Session(session) => {
            // SAFETY: `from` has `len` readable bytes, as `send` requires of its caller.
            sys::returned(unsafe { send_buffers(&session, Buffers::one(&buffer(from, len)), how, None) })
        }
        // SAFETY: `from` has `len` readable bytes, as `send` requires of its caller.
        _ => unsafe { real::send(fd, from, len, how) },
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __send(fd: c_int, from: *const c_void, len: size_t, how: c_int) -> ssize_t {
    // SAFETY: `from` has `len` readable bytes, as `send` requires of its caller.
    unsafe { send(fd, from, len, how) }
}

/// Returns the session and the destination of a message. The destination may decide whether an undecided socket becomes
/// a session. Returns `None` without a session.
///
/// # Safety
/// `to` is null, or valid for reads of `len` bytes.
unsafe fn addressed(
    fd: c_int,
    to: *const sockaddr,
    len: socklen_t,
    how: c_int,
) -> Result<Option<(Session, Option<SocketAddr>)>, Errno> {
    let address = |v6| match to.is_null() {
        true => Ok(None),
        // SAFETY: `to` is not null, so it has `len` readable bytes, as the caller guarantees.
        false => unsafe { address::read_for_datagrams(v6, true, to, len) },
    };
    let session = match session::find(fd) {
        Target::Session(session) => session,
        Target::Undecided(entry) if entry.kind == crate::table::SocketKind::OpenDatagrams => {
            // The kernel reports errors of the address.
            let Ok(Some(to)) = address(entry.v6) else { return Ok(None) };
            match decide::send(fd, entry, to)? {
                Decided::Session(session) => session,
                Decided::Kernel | Decided::Loopback(_) => return Ok(None),
            }
        }
        Target::Undecided(_) if how & libc::MSG_FASTOPEN != 0 => return Err(libc::EOPNOTSUPP),
        _ => return Ok(None),
    };
    // The address of a stream is ignored.
    let to = if session.is_datagrams() { address(session.entry.v6)? } else { None };
    Ok(Some((session, to)))
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn sendto(
    fd: c_int,
    from: *const c_void,
    len: size_t,
    how: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> ssize_t {
    // SAFETY: `to` is null or has `to_len` readable bytes, as `sendto` requires of its caller.
    match unsafe { addressed(fd, to, to_len, how) } {
        Ok(Some((session, to))) => {
            // SAFETY: `from` has `len` readable bytes, as `sendto` requires of its caller.
            sys::returned(unsafe { send_buffers(&session, Buffers::one(&buffer(from, len)), how, to) })
        }
        // SAFETY: `from` has `len` and `to` has `to_len` readable bytes, as `sendto` requires of its caller.
        Ok(None) => unsafe { real::sendto(fd, from, len, how, to, to_len) },
        Err(error) => sys::returned(Err(error)),
    }
}

/// Sends a message. Returns `None` if the kernel must send it.
///
/// # Safety
/// The addresses in the header are null, or valid for reads of the lengths in the header.
unsafe fn message(fd: c_int, header: &msghdr, how: c_int) -> Result<Option<usize>, Errno> {
    // SAFETY: the caller guarantees that `msg_name` is null or has `msg_namelen` readable bytes.
    let Some((session, to)) = (unsafe { addressed(fd, header.msg_name.cast(), header.msg_namelen, how) })?
    else {
        return Ok(None);
    };
    // SAFETY: the caller guarantees that the buffers and the control messages in the header are readable.
    unsafe {
        let buffers = Buffers::of_message(header)?;
        if session.is_datagrams() {
            let control = Control::of(header, session.entry.v6)?;
            return datagrams::send(&session, buffers, how, to, &control).map(Some);
        }
        send_buffers(&session, buffers, how, to).map(Some)
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn sendmsg(fd: c_int, header: *const msghdr, how: c_int) -> ssize_t {
    if crate::table::get(fd).is_some() {
        // SAFETY: `header` is null or valid, as `sendmsg` requires of its caller.
        let Some(header) = (unsafe { header.as_ref() }) else { return sys::returned(Err(libc::EFAULT)) };
        // SAFETY: the addresses in the header are valid for reads, as `sendmsg` requires of its caller.
        match unsafe { message(fd, header, how) } {
            Ok(None) => {}
            Ok(Some(sent)) => return sys::returned(Ok(sent)),
            Err(error) => return sys::returned(Err(error)),
        }
    }
    // SAFETY: the addresses in the header are valid for reads, as `sendmsg` requires of its caller.
    unsafe { real::sendmsg(fd, header, how) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn sendmmsg(
    fd: c_int,
    headers: *mut mmsghdr,
    count: c_uint,
    how: c_int,
) -> c_int {
    if crate::table::get(fd).is_none() {
        // SAFETY: `headers` points to `count` valid headers, as `sendmmsg` requires of its caller.
        return unsafe { real::sendmmsg(fd, headers, count, how) };
    }
    let (mut done, count) = (0, count.min(libc::UIO_MAXIOV as c_uint));
    while done < count {
        // SAFETY: `done` is below `count`, and `headers` points to `count` headers, as `sendmmsg` requires of its
        // caller.
        let header = unsafe { &mut *headers.add(done as usize) };
        // SAFETY: the addresses in the header are valid for reads, as `sendmmsg` requires of its caller.
        match unsafe { message(fd, &header.msg_hdr, how) } {
            Ok(Some(len)) => header.msg_len = len as c_uint,
            // The kernel sends all messages if it sends the first one.
            // SAFETY: `headers` points to `count` valid headers, as `sendmmsg` requires of its caller.
            Ok(None) => return unsafe { real::sendmmsg(fd, headers, count, how) },
            Err(error) if done == 0 => return sys::returned_int(Err(error)),
            Err(_) => break,
        }
        done += 1;
    }
    done as c_int
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn sendfile(
    to: c_int,
    from: c_int,
    position: *mut off_t,
    count: size_t,
) -> ssize_t {
    let Some(session) = session::get(to) else {
        // SAFETY: `position` is null or valid, as `sendfile` requires of its caller.
        return unsafe { real::sendfile(to, from, position, count) };
    };
    // The kernel sends at most this number of bytes per call.
    let count = count.min(0x7fff_f000);
    // SAFETY: `position` is null or valid, as `sendfile` requires of its caller.
    let at = unsafe { position.as_ref() }.copied();
    let sent = match at {
        Some(at) if at < 0 => Err(libc::EINVAL),
        at => stream::send_file(&session, from, at.unwrap_or(-1), count, 0),
    };
    if let (Ok(sent), Some(at)) = (sent, at) {
        // SAFETY: `position` is not null, and is valid for writes, as `sendfile` requires of its caller.
        unsafe { *position = at + sent as off_t };
    }
    sys::returned(sent)
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn sendfile64(to: c_int, from: c_int, position: *mut off_t, count: size_t) -> ssize_t {
    // SAFETY: `position` is null or valid, as `sendfile` requires of its caller.
    unsafe { sendfile(to, from, position, count) }
}

/// All flags of `splice`.
const SPLICE_FLAGS: c_uint =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn splice(
    from: c_int,
    from_position: *mut off_t,
    to: c_int,
    to_position: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    // The flag only concerns the pipe. The socket's own flag decides whether the socket waits.
    let wait = flags & libc::SPLICE_F_NONBLOCK == 0;
    match (session::get(from), session::get(to)) {
        // SAFETY: `from_position` and `to_position` are null or valid, as `splice` requires of its caller.
        (None, None) => unsafe { real::splice(from, from_position, to, to_position, len, flags) },
        _ if len == 0 => 0,
        _ if flags & !SPLICE_FLAGS != 0 => sys::returned(Err(libc::EINVAL)),
        (Some(_), _) if !from_position.is_null() => sys::returned(Err(libc::EINVAL)),
        (_, Some(_)) if !to_position.is_null() => sys::returned(Err(libc::ESPIPE)),
        // At least one side must be a pipe.
        (Some(_), Some(_)) => sys::returned(Err(libc::EINVAL)),
        (Some(session), None) => sys::returned(stream::splice_out(&session, to, len, wait)),
        (None, Some(session)) => {
            let more = flags & libc::SPLICE_F_MORE != 0;
            sys::returned(stream::splice_in(&session, from, len, wait, more))
        }
    }
}
