//! Receiving.

use core::ffi::{c_int, c_uint, c_void};

use libc::{iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t, timespec};

use crate::address::{self, End};
use crate::control;
use crate::datagrams;
use crate::link;
use crate::real;
use crate::report;
use crate::session::{self, Session, Target};
use crate::stream;
use crate::sys::{self, Errno};
use crate::vectors::{Buffers, buffer};

/// Receives into buffers, and writes the sender of a datagram to `from`.
///
/// # Safety
/// The buffers are valid for writes. `from` is null, or valid for writes of `*len` bytes.
unsafe fn receive(
    session: &Session,
    buffers: Buffers<'_>,
    how: c_int,
    from: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<usize, Errno> {
    if !session.is_datagrams() {
        // SAFETY: the caller guarantees that the buffers are writable.
        let received = unsafe { stream::receive(session, buffers, how) };
        if !from.is_null() && !len.is_null() {
            // A stream returns no address.
            // SAFETY: `len` is not null, so it is valid, as the caller guarantees.
            unsafe { *len = 0 };
        }
        return received;
    }
    if how & libc::MSG_ERRQUEUE != 0 {
        let error = datagrams::errors::take(session)?;
        // SAFETY: the caller guarantees that `from` is null or has `*len` writable bytes, and that the buffers are
        // writable.
        unsafe {
            address::write(error.to, session.entry.v6, from, len);
            return Ok(buffers.put(error.payload()));
        }
    }
    // SAFETY: the caller guarantees that the buffers are writable.
    let Some(received) = (unsafe { datagrams::receive(session, buffers, how) })? else {
        if !from.is_null() && !len.is_null() {
            // SAFETY: `len` is not null, so it is valid, as the caller guarantees.
            unsafe { *len = 0 };
        }
        return Ok(0);
    };
    // SAFETY: the caller guarantees that `from` is null or has `*len` writable bytes.
    unsafe { address::write(received.header.peer, session.entry.v6, from, len) };
    Ok(if how & libc::MSG_TRUNC != 0 { received.len } else { received.copied })
}

/// Receives into buffers, without the sender's address.
///
/// # Safety
/// The buffers are valid for writes.
unsafe fn receive_data(session: &Session, buffers: Buffers<'_>, how: c_int) -> Result<usize, Errno> {
    // SAFETY: the caller guarantees that the buffers are writable, and both addresses are null.
    unsafe { receive(session, buffers, how, core::ptr::null_mut(), core::ptr::null_mut()) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t {
    match session::find(fd) {
        Target::Session(_) if len == 0 => 0,
        Target::Session(session) => {
            // SAFETY: `to` has `len` writable bytes, as `read` requires of its caller.
            sys::returned(unsafe { receive_data(&session, Buffers::one(&buffer(to, len)), 0) })
        }
        Target::Dead => sys::returned(receive_from_dead(fd)),
        // SAFETY: `to` has `len` writable bytes, as `read` requires of its caller.
        _ => unsafe { real::read(fd, to, len) },
    }
}

/// Reads from a session whose stack is gone: first returns the pending error, and then the end of the stream.
fn receive_from_dead(fd: c_int) -> Result<usize, Errno> {
    while sys::take_bytes(fd, usize::MAX)?.0 > 0 {}
    Ok(0)
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: `to` has `len` writable bytes, as `read` requires of its caller.
    unsafe { read(fd, to, len) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __read_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t) -> ssize_t {
    report::check(len, room);
    // SAFETY: `to` has `len` writable bytes, as `read` requires of its caller.
    unsafe { read(fd, to, len) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn readv(fd: c_int, to: *const iovec, count: c_int) -> ssize_t {
    let Some(session) = session::get(fd) else {
        // SAFETY: `to` points to `count` buffers that are valid for writes, as `readv` requires of its caller.
        return unsafe { real::readv(fd, to, count) };
    };
    // SAFETY: `to` points to `count` buffers that are valid for writes, as `readv` requires of its caller.
    let received = unsafe {
        Buffers::counted(to, count).and_then(|buffers| match buffers.len() {
            0 => Ok(0),
            _ => receive_data(&session, buffers, 0),
        })
    };
    sys::returned(received)
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn preadv2(
    fd: c_int,
    to: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> ssize_t {
    match session::get(fd) {
        // A socket has no file position. -1 stands for the current position.
        Some(_) if position != -1 => sys::returned(Err(libc::ESPIPE)),
        Some(session) => {
            let how = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
            // SAFETY: `to` points to `count` buffers that are valid for writes, as `preadv2` requires of its caller.
            sys::returned(unsafe {
                Buffers::counted(to, count).and_then(|buffers| receive_data(&session, buffers, how))
            })
        }
        // SAFETY: `to` points to `count` buffers that are valid for writes, as `preadv2` requires of its caller.
        None => unsafe { real::preadv2(fd, to, count, position, flags) },
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn preadv64v2(
    fd: c_int,
    to: *const iovec,
    count: c_int,
    position: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: `to` points to `count` buffers that are valid for writes, as `preadv2` requires of its caller.
    unsafe { preadv2(fd, to, count, position, flags) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn recv(fd: c_int, to: *mut c_void, len: size_t, how: c_int) -> ssize_t {
    match session::find(fd) {
        Target::Session(session) => {
            // SAFETY: `to` has `len` writable bytes, as `recv` requires of its caller.
            sys::returned(unsafe { receive_data(&session, Buffers::one(&buffer(to, len)), how) })
        }
        Target::Dead => sys::returned(receive_from_dead(fd)),
        // SAFETY: `to` has `len` writable bytes, as `recv` requires of its caller.
        _ => unsafe { real::recv(fd, to, len, how) },
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __recv_chk(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    room: size_t,
    how: c_int,
) -> ssize_t {
    report::check(len, room);
    // SAFETY: `to` has `len` writable bytes, as `recv` requires of its caller.
    unsafe { recv(fd, to, len, how) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn recvfrom(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    how: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    match session::find(fd) {
        Target::Session(session) => {
            // SAFETY: `to` has `len` writable bytes, and `from` is null or has `*from_len` writable bytes, as
            // `recvfrom` requires of its caller.
            sys::returned(unsafe { receive(&session, Buffers::one(&buffer(to, len)), how, from, from_len) })
        }
        Target::Dead => sys::returned(receive_from_dead(fd)),
        // SAFETY: `to` has `len` writable bytes, and `from` is null or has `*from_len` writable bytes, as `recvfrom`
        // requires of its caller.
        _ => unsafe { real::recvfrom(fd, to, len, how, from, from_len) },
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    to: *mut c_void,
    len: size_t,
    room: size_t,
    how: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    report::check(len, room);
    // SAFETY: `to` has `len` writable bytes, and `from` is null or has `*from_len` writable bytes, as `recvfrom`
    // requires of its caller.
    unsafe { recvfrom(fd, to, len, how, from, from_len) }
}

/// Receives a message.
///
/// # Safety
/// The addresses in the header are null, or valid for writes of the lengths in the header.
unsafe fn message(session: &Session, header: &mut msghdr, how: c_int) -> Result<usize, Errno> {
    header.msg_flags = 0;
    let parts = *header;
    // SAFETY: the caller guarantees that `msg_iov` of the header points to `msg_iovlen` buffers.
    let buffers = unsafe { Buffers::of_message(&parts) }?;
    if !session.is_datagrams() {
        // SAFETY: the caller guarantees that the buffers are writable.
        let received = unsafe { stream::receive(session, buffers, how) }?;
        (header.msg_namelen, header.msg_controllen) = (0, 0);
        header.msg_flags = how & libc::MSG_OOB;
        return Ok(received);
    }
    if how & libc::MSG_ERRQUEUE != 0 {
        let error = datagrams::errors::take(session)?;
        // SAFETY: the caller guarantees that the buffers, `msg_name` and `msg_control` are writable for their lengths.
        let copied = unsafe {
            let len = &raw mut header.msg_namelen;
            address::write(error.to, session.entry.v6, header.msg_name.cast(), len);
            control::tell_error(header, &error, session.entry.v6);
            buffers.put(error.payload())
        };
        header.msg_flags |= if copied < error.payload().len() { libc::MSG_TRUNC } else { 0 };
        return Ok(copied);
    }
    // SAFETY: the caller guarantees that the buffers are writable.
    let received = unsafe { datagrams::receive(session, buffers, how) }?;
    let Some(received) = received else {
        (header.msg_namelen, header.msg_controllen) = (0, 0);
        return Ok(0);
    };
    // SAFETY: the caller guarantees that `msg_name` and `msg_control` are writable for their lengths.
    unsafe {
        let len = &raw mut header.msg_namelen;
        address::write(received.header.peer, session.entry.v6, header.msg_name.cast(), len);
        control::tell(session, header, &received.header, received.segment);
    }
    if received.copied < received.len {
        header.msg_flags |= libc::MSG_TRUNC;
    }
    Ok(if how & libc::MSG_TRUNC != 0 { received.len } else { received.copied })
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn recvmsg(fd: c_int, header: *mut msghdr, how: c_int) -> ssize_t {
    let Some(session) = session::get(fd) else {
        // SAFETY: `header` is null or valid, and its addresses are writable for its lengths, as `recvmsg` requires of
        // its caller.
        let received = unsafe { real::recvmsg(fd, header, how) };
        if received >= 0 {
            // SAFETY: the kernel has received a message with this header.
            unsafe { adopt(header) };
        }
        return received;
    };
    // SAFETY: `header` is null or valid, and its addresses are valid for writes, as `recvmsg` requires of its caller.
    sys::returned(unsafe { header.as_mut() }.ok_or(libc::EFAULT).and_then(|header| {
        // SAFETY: `header` is null or valid, and its addresses are valid for writes, as `recvmsg` requires of its
        // caller.
        unsafe { message(&session, header, how) }
    }))
}

/// Adopts descriptors that arrived with a message, since they may be sessions.
///
/// # Safety
/// A message was received with `header`.
unsafe fn adopt(header: *const msghdr) {
    if !link::is_used() {
        return;
    }
    // SAFETY: the caller has received a message with `header`.
    unsafe { link::rights(header, crate::adopt::adopt) };
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn recvmmsg(
    fd: c_int,
    headers: *mut mmsghdr,
    count: c_uint,
    how: c_int,
    time: *mut timespec,
) -> c_int {
    let Some(session) = session::get(fd) else {
        // SAFETY: the pointers are valid, as `recvmmsg` requires of its caller: `headers` for `count` headers, and
        // `time` unless it is null.
        return unsafe { real::recvmmsg(fd, headers, count, how, time) };
    };
    // SAFETY: the pointers are valid, as `recvmmsg` requires of its caller: `headers` for `count` headers, and `time`
    // unless it is null.
    let time = unsafe { time.as_mut() };
    // SAFETY: `headers` points to `count` headers with writable buffers, as `recvmmsg` requires of its caller.
    sys::returned_int(unsafe { messages(&session, headers, count, how, time) })
}

/// Receives several messages. As on Linux, the timeout is only checked after each message, so it does not end a call
/// that waits for one.
///
/// # Safety
/// `headers` points to `count` headers. Their addresses are null, or valid for writes of the lengths in the headers.
unsafe fn messages(
    session: &Session,
    headers: *mut mmsghdr,
    count: c_uint,
    how: c_int,
    mut time: Option<&mut timespec>,
) -> Result<usize, Errno> {
    const SECOND: i64 = 1_000_000_000;
    let valid = |time: &timespec| time.tv_sec >= 0 && (0..SECOND).contains(&time.tv_nsec);
    if !time.as_deref().is_none_or(valid) {
        return Err(libc::EINVAL);
    }
    let end = time
        .as_deref()
        .map(|time| sys::now() + i128::from(time.tv_sec) * i128::from(SECOND) + i128::from(time.tv_nsec));
    let (mut done, mut how_each) = (0, how & !libc::MSG_WAITFORONE);
    while done < count {
        // SAFETY: `done` is below `count`, and the caller guarantees that `headers` points to `count` headers.
        let header = unsafe { &mut *headers.add(done as usize) };
        // SAFETY: the caller guarantees that the addresses in the header are null or writable for the header's lengths.
        match unsafe { message(session, &mut header.msg_hdr, how_each) } {
            Ok(len) => header.msg_len = len as c_uint,
            Err(error) if done == 0 => return Err(error),
            Err(error) => {
                if session.is_datagrams() && error != libc::EAGAIN {
                    session.return_failure(error);
                }
                break;
            }
        }
        done += 1;
        if how & libc::MSG_WAITFORONE != 0 {
            how_each |= libc::MSG_DONTWAIT;
        }
        if let (Some(time), Some(end)) = (time.as_deref_mut(), end) {
            let left = (end - sys::now()).clamp(0, i64::MAX.into()) as i64;
            (time.tv_sec, time.tv_nsec) = (left / SECOND, left % SECOND);
            if left == 0 {
                break;
            }
        }
    }
    Ok(done as usize)
}

/// Returns whether a stream is at the urgent mark. A stream without a peer (port 0) fails with `EINVAL`.
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn sockatmark(fd: c_int) -> c_int {
    match session::get(fd) {
        Some(session) if session.is_open() && address::of(session.slot, End::Peer).port() != 0 => {
            c_int::from(session.is_at_mark())
        }
        Some(_) => sys::returned_int(Err(libc::EINVAL)),
        // SAFETY: `sockatmark` takes no addresses.
        None => unsafe { real::sockatmark(fd) },
    }
}
