//! Options of sessions, for `getsockopt` and `setsockopt`.
//!
//! Timeouts of calls (`SO_RCVTIMEO`, `SO_SNDTIMEO`) are set on the session's end, since the kernel implements them.
//! Options that the stack needs are stored in the slot. Options that do not matter to the stack are checked by the
//! kernel on a temporary socket, and stored in the slot.

use core::ffi::{c_int, c_void};
use core::mem;
use core::ptr;
use core::sync::atomic::{AtomicU32, Ordering};

use libc::socklen_t;
use offcore_session::message::{Call, Question};
use offcore_session::slot::{number, state, wish};

use crate::datagram_options::{self, kept_name, read};
use crate::datagrams;
use crate::link;
use crate::memberships::{self, MembershipOption};
use crate::real;
use crate::session::Session;
use crate::stream_options;
use crate::sys::{self, Errno};

/// Constants of `asm-generic/socket.h` that the crate libc lacks for glibc.
const SO_COOKIE: c_int = 57;
const SO_RCVTIMEO_NEW: c_int = 66;
const SO_SNDTIMEO_NEW: c_int = 67;

/// Writes a value to the program's buffer. It is truncated if the buffer is too short.
///
/// # Safety
/// `to` is null, or `len` is null, or `len` is valid and `to` is valid for writes of `*len` bytes.
unsafe fn give<T: Copy>(value: T, to: *mut c_void, len: *mut socklen_t) -> Result<(), Errno> {
    if to.is_null() || len.is_null() {
        return Err(libc::EFAULT);
    }
    // SAFETY: `to` and `len` are not null, so the caller guarantees that `len` is valid and that `to` has `*len`
    // writable bytes.
    unsafe {
        if (*len as i32) < 0 {
            return Err(libc::EINVAL);
        }
        let room = (*len as usize).min(size_of::<T>());
        // copy-ok: an option
        ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), to.cast(), room);
        *len = room as socklen_t;
    }
    Ok(())
}

/// Writes `SO_MAX_PACING_RATE` as 64 bits, or as 32 bits if the program's buffer is too short for 64.
///
/// # Safety
/// The same as for [`give`].
unsafe fn give_pacing_rate(rate: u64, to: *mut c_void, len: *mut socklen_t) -> Result<(), Errno> {
    // SAFETY: `len` is null or points to a length, as the caller guarantees.
    match unsafe { len.as_ref() } {
        // SAFETY: the caller guarantees that `to` or `len` is null, or that `to` has `*len` writable bytes.
        Some(&room) if room as i32 >= size_of::<u64>() as i32 => unsafe { give(rate, to, len) },
        // SAFETY: the caller guarantees that `to` or `len` is null, or that `to` has `*len` writable bytes.
        _ => unsafe { give(rate.min(u32::MAX.into()) as u32, to, len) },
    }
}

/// Returns the linger time of `close` in seconds plus one, or 0 without `SO_LINGER`.
fn linger_of(session: &Session) -> u32 {
    let kept = &session.slot.kept;
    match session.is_datagrams() {
        true => kept.get(kept_name(libc::SOL_SOCKET, libc::SO_LINGER)).unwrap_or(0),
        false => kept.number(number::LINGER),
    }
}

fn set_linger(session: &Session, seconds: u32) {
    let kept = &session.slot.kept;
    match session.is_datagrams() {
        true => kept.set(kept_name(libc::SOL_SOCKET, libc::SO_LINGER), seconds),
        false => kept.change(number::LINGER, |_| seconds),
    }
}

/// Returns the value of an option if it is not the default.
fn kept_value(session: &Session, level: c_int, name: c_int) -> Option<c_int> {
    let kept = &session.slot.kept;
    match session.is_datagrams() {
        true => kept.get(kept_name(level, name)).map(|value| value as c_int),
        false => stream_options::get(kept, level, name),
    }
}

/// Returns the value of `TCP_CONGESTION` of a stream.
fn congestion_name(session: &Session) -> [u8; 16] {
    let which = number::decode(session.slot.kept.number(number::CONGESTION)).unwrap_or(0);
    let name = stream_options::congestion_name(which).unwrap_or_default();
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(name).for_each(|(to, from)| *to = *from);
    bytes
}

/// Calls `ask` with a new kernel socket of the same kind.
fn by_kernel<T>(session: &Session, ask: impl FnOnce(c_int) -> Result<T, Errno>) -> Result<T, Errno> {
    let family = if session.entry.v6 { libc::AF_INET6 } else { libc::AF_INET };
    let kind = if session.is_datagrams() { libc::SOCK_DGRAM } else { libc::SOCK_STREAM };
    let fd = sys::socket(family, kind | libc::SOCK_CLOEXEC)?;
    let result = ask(fd);
    let _ = sys::close(fd);
    result
}

/// Handles `setsockopt`. Options that the stack does not need are checked by the kernel and stored.
///
/// # Safety
/// `value` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn set(
    session: &Session,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Errno> {
    let (wishes, kept) = (&session.slot.wishes, &session.slot.kept);
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    let number = || unsafe { read::<c_int>(value, len) };
    let count = |word: &AtomicU32, most: c_int| {
        let number = number()?;
        if !(1..=most).contains(&number) {
            return Err(libc::EINVAL);
        }
        word.store(number as u32, Ordering::Relaxed);
        if session.has_option_bit(wish::KEEP_ALIVE) {
            session.mark();
        }
        Ok(())
    };
    let is_bound = session.slot.state() == state::BOUND;
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => session.set_option_bit(wish::KEEP_ALIVE, number()? != 0),
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
            let linger = unsafe { read::<libc::linger>(value, len) }?;
            session.set_option_bit(wish::RESET, linger.l_onoff != 0 && linger.l_linger == 0);
            let seconds = if linger.l_onoff != 0 { linger.l_linger.max(0) as u32 + 1 } else { 0 };
            set_linger(session, seconds);
        }
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | SO_RCVTIMEO_NEW | SO_SNDTIMEO_NEW) => {
            // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
            let done = unsafe { real::setsockopt(session.fd, level, name, value, len) };
            wishes.told.fetch_or(wish::TIMED, Ordering::AcqRel);
            return sys::of_libc(done as isize).map(drop);
        }
        (libc::SOL_SOCKET, libc::SO_ZEROCOPY) if session.is_datagrams() => return Err(libc::EOPNOTSUPP),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) if !session.is_datagrams() => {
            let on = number()? != 0;
            session.set_option_bit(wish::NO_DELAY, on);
            if on {
                // As on Linux, each call with a value other than 0 pushes corked data.
                session.slot.push();
                session.mark();
            }
        }
        // A datagram socket has no TCP options. It stores other options in the same words.
        (libc::IPPROTO_TCP, _) if session.is_datagrams() => return Err(libc::ENOPROTOOPT),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => return count(&wishes.keep_idle, 32_767),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => return count(&wishes.keep_interval, 32_767),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => return count(&wishes.keep_count, 127),
        (libc::IPPROTO_TCP, libc::TCP_CORK) if !session.is_datagrams() => {
            session.slot.cork(number()? != 0);
            session.mark();
        }
        // As on Linux, the limit can only be removed while the socket is not connected.
        (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP) if !is_bound && number()? == 0 => {
            return Err(libc::EINVAL);
        }
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => {
            number()?;
            return Err(if session.entry.v6 { libc::EINVAL } else { libc::ENOPROTOOPT });
        }
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) if !session.is_datagrams() => {
            // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
            let which = unsafe { stream_options::congestion(value, len) }?;
            kept.change(number::CONGESTION, |_| number::encode(which as u32));
            session.mark();
        }
        (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE) if !session.is_datagrams() => {
            // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
            kept.set_pacing_rate(unsafe { stream_options::pacing_rate(value, len) }?);
            session.mark();
        }
        (
            libc::SOL_SOCKET,
            libc::SO_SNDBUF | libc::SO_RCVBUF | libc::SO_SNDBUFFORCE | libc::SO_RCVBUFFORCE,
        ) => {
            // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
            let size = unsafe { stream_options::buffer_of(session.entry.v6, name, value, len) }?;
            let sends = matches!(name, libc::SO_SNDBUF | libc::SO_SNDBUFFORCE);
            let word = if sends { &wishes.send_buffer } else { &wishes.receive_buffer };
            word.store(size, Ordering::Relaxed);
            session.mark();
        }
        _ if !session.is_datagrams() => {
            if (level, name) == (libc::IPPROTO_TCP, libc::TCP_QUICKACK) && number()? & 1 != 0 {
                session.slot.wishes.options.fetch_xor(wish::QUICK_ACK, Ordering::AcqRel);
            }
            // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
            unsafe { stream_options::set(kept, session.entry.v6, level, name, value, len) }?;
            session.mark();
        }
        // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
        _ => return unsafe { set_of_datagrams(session, level, name, value, len) },
    }
    Ok(())
}

/// Handles `setsockopt` for a datagram socket.
///
/// # Safety
/// `value` is null, or valid for reads of `len` bytes.
unsafe fn set_of_datagrams(
    session: &Session,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Errno> {
    if let Some(option) = MembershipOption::of(level, name, value, len) {
        // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
        return unsafe { memberships::set(session, &option) };
    }
    if let (libc::IPPROTO_IP, libc::IP_MULTICAST_IF) | (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF) =
        (level, name)
    {
        // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
        return unsafe {
            memberships::set_sending_interface(session, level == libc::IPPROTO_IPV6, value, len)
        };
    }
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    unsafe { datagram_options::check(session.entry.v6, level, name, value, len) }?;
    let is_known = datagram_options::has(level, name);
    if (level, name) == (libc::SOL_SOCKET, libc::SO_TIMESTAMPING) {
        // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
        let wanted = unsafe { read::<c_int>(value, len) }?;
        if !datagram_options::has_timestamps(wanted) {
            return Err(libc::EINVAL);
        }
    }
    let value = by_kernel(session, |fd| {
        // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
        unsafe { sys::setsockopt(fd, level, name, value, len as usize) }?;
        Ok(sys::int_option(fd, level, name))
    })?;
    if !is_known {
        session.slot.kept.set(kept_name(level, name), value as u32);
        return Ok(());
    }
    datagram_options::set(session, level, name, value);
    match (level, name, value) {
        (libc::IPPROTO_UDP, datagram_options::UDP_CORK, 0) => datagrams::cork::push(session),
        (libc::IPPROTO_IP, libc::IP_RECVERR | libc::IP_MULTICAST_ALL, _)
        | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR | datagram_options::IPV6_MULTICAST_ALL, _) => {
            session.mark();
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Handles `getsockopt`.
///
/// # Safety
/// `to` is null, or `len` is null, or `len` is valid and `to` is valid for writes of `*len` bytes.
pub(crate) unsafe fn get(
    session: &Session,
    level: c_int,
    name: c_int,
    to: *mut c_void,
    len: *mut socklen_t,
) -> Result<(), Errno> {
    let wishes = &session.slot.wishes;
    let wants = |bit| c_int::from(session.has_option_bit(bit));
    let kept = |word: &AtomicU32, usual: c_int| match word.load(Ordering::Relaxed) {
        0 => usual,
        kept => kept as c_int,
    };
    let number = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_TYPE) if session.is_datagrams() => libc::SOCK_DGRAM,
        (libc::SOL_SOCKET, libc::SO_TYPE) => libc::SOCK_STREAM,
        (libc::SOL_SOCKET, libc::SO_DOMAIN) if session.entry.v6 => libc::AF_INET6,
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => libc::AF_INET,
        (libc::SOL_SOCKET, libc::SO_PROTOCOL) if session.is_datagrams() => libc::IPPROTO_UDP,
        (libc::SOL_SOCKET, libc::SO_PROTOCOL) => libc::IPPROTO_TCP,
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            let mut error: c_int = 0;
            let mut size = size_of::<c_int>() as socklen_t;
            // This also clears the error that `poll` reports.
            // SAFETY: `error` and `size` live until the call returns, and `size` is the size of `error`.
            unsafe { real::getsockopt(session.fd, level, name, (&raw mut error).cast(), &raw mut size) };
            session.take_error().unwrap_or(0)
        }
        (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => c_int::from(session.slot.state() == state::LISTENING),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => wants(wish::KEEP_ALIVE),
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            let seconds = linger_of(session) as c_int;
            let linger = libc::linger { l_onoff: c_int::from(seconds > 0), l_linger: (seconds - 1).max(0) };
            // SAFETY: the caller guarantees that `to` and `len` are null or that `to` has `*len` writable bytes.
            return unsafe { give(linger, to, len) };
        }
        (
            libc::SOL_SOCKET,
            libc::SO_RCVTIMEO
            | libc::SO_SNDTIMEO
            | SO_RCVTIMEO_NEW
            | SO_SNDTIMEO_NEW
            | libc::SO_INCOMING_CPU
            | SO_COOKIE,
        ) => {
            // SAFETY: the caller guarantees that `to` and `len` are null or that `to` has `*len` writable bytes.
            let done = unsafe { real::getsockopt(session.fd, level, name, to, len) };
            return sys::of_libc(done as isize).map(drop);
        }
        (libc::SOL_SOCKET, libc::SO_SNDBUF) if wishes.send_buffer.load(Ordering::Relaxed) != 0 => {
            wishes.send_buffer.load(Ordering::Relaxed) as c_int * 2
        }
        (libc::SOL_SOCKET, libc::SO_RCVBUF) if wishes.receive_buffer.load(Ordering::Relaxed) != 0 => {
            wishes.receive_buffer.load(Ordering::Relaxed) as c_int * 2
        }
        (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE) if !session.is_datagrams() => {
            // SAFETY: the caller guarantees that `to` and `len` are null or that `to` has `*len` writable bytes.
            return unsafe { give_pacing_rate(session.slot.kept.pacing_rate(), to, len) };
        }
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) if !session.is_datagrams() => wants(wish::NO_DELAY),
        (libc::IPPROTO_TCP, libc::TCP_CORK) if !session.is_datagrams() => wants(wish::CORK),
        (libc::IPPROTO_TCP, _) if session.is_datagrams() => return Err(libc::ENOPROTOOPT),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => kept(&wishes.keep_idle, 7200),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => kept(&wishes.keep_interval, 75),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => kept(&wishes.keep_count, 9),
        (libc::IPPROTO_TCP, libc::TCP_INFO) if session.is_open() => {
            // SAFETY: the caller guarantees that `to` and `len` are null or that `to` has `*len` writable bytes.
            return unsafe { give(tcp_info(session)?, to, len) };
        }
        (libc::IPPROTO_TCP, libc::TCP_MAXSEG) if session.is_open() => {
            tcp_info(session)?.tcpi_snd_mss as c_int
        }
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) if !session.is_datagrams() => {
            // SAFETY: the caller guarantees that `to` and `len` are null or that `to` has `*len` writable bytes.
            return unsafe { give(congestion_name(session), to, len) };
        }
        (libc::IPPROTO_IP, libc::IP_MTU) | (libc::IPPROTO_IPV6, libc::IPV6_MTU) if session.is_datagrams() => {
            datagrams::peer(session).ok_or(libc::ENOTCONN)?;
            session.slot.mtu().load(Ordering::Relaxed) as c_int
        }
        _ if session.is_datagrams() && datagram_options::has(level, name) => {
            datagram_options::get(session, level, name).unwrap_or(0)
        }
        _ => match kept_value(session, level, name) {
            Some(value) => value,
            None => {
                return by_kernel(session, |fd| {
                    // SAFETY: the caller guarantees that `to` and `len` are null or that `to` has `*len` writable
                    // bytes.
                    let done = unsafe { real::getsockopt(fd, level, name, to, len) };
                    sys::of_libc(done as isize).map(drop)
                });
            }
        },
    };
    // SAFETY: the caller guarantees that `to` and `len` are null or that `to` has `*len` writable bytes.
    unsafe { give(number, to, len) }
}

/// Returns the fields of `TCP_INFO` that the stack provides.
fn tcp_info(session: &Session) -> Result<libc::tcp_info, Errno> {
    // SAFETY: the structure consists of integers, for which all zeros are valid.
    let mut info: libc::tcp_info = unsafe { mem::zeroed() };
    let number = session.slot.identity.number.load(Ordering::Relaxed);
    let (answer, received) = link::ask(&Question::new(Call::Info, number, 0), &[])?;
    received.close();
    let [state, rto, snd_mss, rcv_mss, unacked, rtt, rttvar, cwnd, ssthresh, retransmitted, ..] = answer.info;
    info.tcpi_state = state as u8;
    info.tcpi_rto = rto;
    (info.tcpi_snd_mss, info.tcpi_rcv_mss, info.tcpi_advmss) = (snd_mss, rcv_mss, snd_mss);
    info.tcpi_unacked = unacked;
    (info.tcpi_rtt, info.tcpi_rttvar) = (rtt, rttvar);
    (info.tcpi_snd_cwnd, info.tcpi_snd_ssthresh) = (cwnd, ssthresh);
    info.tcpi_total_retrans = retransmitted;
    info.tcpi_pmtu = snd_mss + 40;
    Ok(info)
}
