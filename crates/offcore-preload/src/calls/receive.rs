//! What is received.

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

/// Receives to buffers, and says who has sent a datagram.
///
/// # Safety
/// The buffers are the program's to be written; `from` is null, or of `*len` bytes.
unsafe fn receive(
    session: &Session,
    buffers: Buffers<'_>,
    how: c_int,
    (from, len): (*mut sockaddr, *mut socklen_t),
) -> Result<usize, Errno> {
    if !session.is_datagrams() {
        // SAFETY: the caller's promise.
        let received = unsafe { stream::receive(session, buffers, how) };
        if !from.is_null() && !len.is_null() {
            // A stream tells nobody's address.
            // SAFETY: the caller's promise.
            unsafe { *len = 0 };
        }
        return received;
    }
    if how & libc::MSG_ERRQUEUE != 0 {
        let error = datagrams::errors::take(session)?;
        // SAFETY: the caller's promise.
        unsafe {
            address::write(error.to, session.entry.v6, from, len);
            return Ok(buffers.put(error.payload()));
        }
    }
    // SAFETY: the caller's promise.
    let Some(received) = (unsafe { datagrams::receive(session, buffers, how) })? else {
        if !from.is_null() && !len.is_null() {
            // SAFETY: the caller's promise.
            unsafe { *len = 0 };
        }
        return Ok(0);
    };
    // SAFETY: the caller's promise.
    unsafe { address::write(received.header.peer, session.entry.v6, from, len) };
    Ok(if how & libc::MSG_TRUNC != 0 { received.len } else { received.copied })
}

const NOBODY: (*mut sockaddr, *mut socklen_t) = (core::ptr::null_mut(), core::ptr::null_mut());

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t {
    match session::find(fd) {
        Target::Session(_) if len == 0 => 0,
        Target::Session(session) => {
            // SAFETY: the caller's promise.
            sys::returned(unsafe { receive(&session, Buffers::one(&buffer(to, len)), 0, NOBODY) })
        }
        Target::Dead => sys::returned(dead(fd)),
        // SAFETY: the caller's promise.
        _ => unsafe { real::read(fd, to, len) },
    }
}

/// What a session of a stack that is gone has: an error, and then its end.
fn dead(fd: c_int) -> Result<usize, Errno> {
    while sys::take_bytes(fd, usize::MAX)?.0 > 0 {}
    Ok(0)
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __read(fd: c_int, to: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { read(fd, to, len) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __read_chk(fd: c_int, to: *mut c_void, len: size_t, room: size_t) -> ssize_t {
    report::check(len, room);
    // SAFETY: the caller's promise.
    unsafe { read(fd, to, len) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn readv(fd: c_int, to: *const iovec, count: c_int) -> ssize_t {
    let Some(session) = session::get(fd) else {
        // SAFETY: the caller's promise.
        return unsafe { real::readv(fd, to, count) };
    };
    // SAFETY: the caller's promise.
    let received = unsafe {
        Buffers::counted(to, count).and_then(|buffers| match buffers.len() {
            0 => Ok(0),
            _ => receive(&session, buffers, 0, NOBODY),
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
        // A socket has no positions; -1 is where it is.
        Some(_) if position != -1 => sys::returned(Err(libc::ESPIPE)),
        Some(session) => {
            let how = if flags & libc::RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
            // SAFETY: the caller's promise.
            sys::returned(unsafe {
                Buffers::counted(to, count).and_then(|buffers| receive(&session, buffers, how, NOBODY))
            })
        }
        // SAFETY: the caller's promise.
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
    // SAFETY: the caller's promise.
    unsafe { preadv2(fd, to, count, position, flags) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn recv(fd: c_int, to: *mut c_void, len: size_t, how: c_int) -> ssize_t {
    match session::find(fd) {
        Target::Session(session) => {
            // SAFETY: the caller's promise.
            sys::returned(unsafe { receive(&session, Buffers::one(&buffer(to, len)), how, NOBODY) })
        }
        Target::Dead => sys::returned(dead(fd)),
        // SAFETY: the caller's promise.
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
    // SAFETY: the caller's promise.
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
            // SAFETY: the caller's promise.
            sys::returned(unsafe { receive(&session, Buffers::one(&buffer(to, len)), how, (from, from_len)) })
        }
        Target::Dead => sys::returned(dead(fd)),
        // SAFETY: the caller's promise.
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
    // SAFETY: the caller's promise.
    unsafe { recvfrom(fd, to, len, how, from, from_len) }
}

/// Receives as a message.
///
/// # Safety
/// The header's addresses are the program's to be written.
unsafe fn message(session: &Session, header: &mut msghdr, how: c_int) -> Result<usize, Errno> {
    header.msg_flags = 0;
    let parts = *header;
    // SAFETY: the caller's promise.
    let buffers = unsafe { Buffers::of_message(&parts) }?;
    if !session.is_datagrams() {
        // SAFETY: the caller's promise.
        let received = unsafe { stream::receive(session, buffers, how) }?;
        (header.msg_namelen, header.msg_controllen) = (0, 0);
        header.msg_flags = how & libc::MSG_OOB;
        return Ok(received);
    }
    if how & libc::MSG_ERRQUEUE != 0 {
        let error = datagrams::errors::take(session)?;
        // SAFETY: the caller's promise.
        let copied = unsafe {
            let len = &raw mut header.msg_namelen;
            address::write(error.to, session.entry.v6, header.msg_name.cast(), len);
            control::tell_error(header, &error, session.entry.v6);
            buffers.put(error.payload())
        };
        header.msg_flags |= if copied < error.payload().len() { libc::MSG_TRUNC } else { 0 };
        return Ok(copied);
    }
    // SAFETY: the caller's promise.
    let received = unsafe { datagrams::receive(session, buffers, how) }?;
    let Some(received) = received else {
        (header.msg_namelen, header.msg_controllen) = (0, 0);
        return Ok(0);
    };
    // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        let received = unsafe { real::recvmsg(fd, header, how) };
        if received >= 0 {
            // SAFETY: a header that the kernel has filled.
            unsafe { adopt(header) };
        }
        return received;
    };
    // SAFETY: the caller's promise.
    sys::returned(unsafe { header.as_mut() }.ok_or(libc::EFAULT).and_then(|header| {
        // SAFETY: the caller's promise.
        unsafe { message(&session, header, how) }
    }))
}

/// Descriptors that came with a message may be sessions.
///
/// # Safety
/// `header` is of a message that was received.
unsafe fn adopt(header: *const msghdr) {
    if !link::is_used() {
        return;
    }
    // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        return unsafe { real::recvmmsg(fd, headers, count, how, time) };
    };
    // SAFETY: the caller's promise.
    let time = unsafe { time.as_mut() };
    // SAFETY: the caller's promise.
    sys::returned_int(unsafe { messages(&session, headers, count, how, time) })
}

/// Receives messages. As Linux: the time is looked at after each of them, so that it ends no call that waits for one.
///
/// # Safety
/// `headers` are `count` ones whose addresses are the program's to be written.
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
        // SAFETY: the caller's promise.
        let header = unsafe { &mut *headers.add(done as usize) };
        // SAFETY: the caller's promise.
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

/// Where a stream is that is told its own address for its peer's.
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn sockatmark(fd: c_int) -> c_int {
    match session::get(fd) {
        Some(session) if session.is_open() && address::of(session.slot, End::Peer).port() != 0 => {
            c_int::from(session.is_at_mark())
        }
        Some(_) => sys::returned_int(Err(libc::EINVAL)),
        // SAFETY: the caller's promise.
        None => unsafe { real::sockatmark(fd) },
    }
}
