//! Options of TCP sockets, of sessions and of undecided sockets.
//!
//! An option works as on Linux, or it fails as on a Linux that lacks it. The tables below, and [`crate::options`], list
//! the supported options. Every other option accepts only its default value.
//!
//! The kernel checks each value on a temporary socket. An undecided socket stores its options in the kernel. A session
//! stores them in its slot, which `getsockopt` and the stack read.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use libc::socklen_t;
use offcore_session::slot::{Kept, Slot, number};

use crate::sys::{self, Errno};

use libc::{IPPROTO_IP as IP, IPPROTO_IPV6 as IPV6, IPPROTO_TCP as TCP, SOL_SOCKET as SOCKET};

/// Number of switches that have an effect. The others have no effect on a TCP socket of Linux, either.
#[cfg(test)]
pub(crate) const EFFECTIVE: usize = 9;

/// Bits of buffers whose size the program has set.
const SO_BUF_LOCK: c_int = 72;

/// An option with two values: level, name, and the value other than the default. The slot stores one bit.
type Switch = (c_int, c_int, c_int);

pub(crate) const SWITCHES: [Switch; 38] = [
    (SOCKET, libc::SO_REUSEADDR, 1),
    (SOCKET, libc::SO_REUSEPORT, 1),
    (SOCKET, libc::SO_OOBINLINE, 1),
    (IP, libc::IP_FREEBIND, 1),
    (IPV6, 78, 1), // IPV6_FREEBIND
    (IP, libc::IP_BIND_ADDRESS_NO_PORT, 1),
    (TCP, libc::TCP_QUICKACK, 0),
    (IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO),
    (IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO),
    (SOCKET, libc::SO_DEBUG, 1),
    (SOCKET, libc::SO_BROADCAST, 1),
    (SOCKET, libc::SO_NO_CHECK, 1),
    (SOCKET, libc::SO_RXQ_OVFL, 1),
    (SOCKET, libc::SO_SELECT_ERR_QUEUE, 1),
    (IP, libc::IP_RECVOPTS, 1),
    (IP, libc::IP_RETOPTS, 1),
    (IP, libc::IP_PKTINFO, 1),
    (IP, libc::IP_RECVTTL, 1),
    (IP, libc::IP_RECVTOS, 1),
    (IP, libc::IP_PASSSEC, 1),
    (IP, libc::IP_ORIGDSTADDR, 1),
    (IP, libc::IP_CHECKSUM, 1),
    (IP, libc::IP_MULTICAST_LOOP, 0),
    (IP, libc::IP_MULTICAST_ALL, 0),
    (IPV6, libc::IPV6_MULTICAST_LOOP, 0),
    (IPV6, 29, 0), // IPV6_MULTICAST_ALL
    (IPV6, libc::IPV6_RECVPKTINFO, 1),
    (IPV6, libc::IPV6_RECVHOPLIMIT, 1),
    (IPV6, libc::IPV6_RECVHOPOPTS, 1),
    (IPV6, libc::IPV6_RECVRTHDR, 1),
    (IPV6, libc::IPV6_RECVDSTOPTS, 1),
    (IPV6, libc::IPV6_RECVTCLASS, 1),
    (IPV6, libc::IPV6_RECVPATHMTU, 1),
    (IPV6, libc::IPV6_DONTFRAG, 1),
    (IPV6, 2, 1),  // IPV6_2292PKTINFO
    (IPV6, 8, 1),  // IPV6_2292HOPLIMIT
    (IPV6, 74, 1), // IPV6_ORIGDSTADDR
    (IPV6, 11, 1), // IPV6_FLOWINFO
];

/// Options with a number as their value, and their index in the slot.
const NUMBERS: [(c_int, c_int, usize); 8] = [
    (TCP, libc::TCP_MAXSEG, number::MAXSEG),
    (SOCKET, libc::SO_RCVLOWAT, number::RCVLOWAT),
    (TCP, libc::TCP_DEFER_ACCEPT, number::DEFER_ACCEPT),
    (TCP, libc::TCP_LINGER2, number::LINGER2),
    (TCP, libc::TCP_USER_TIMEOUT, number::USER_TIMEOUT),
    (TCP, libc::TCP_SYNCNT, number::SYNCNT),
    (TCP, libc::TCP_NOTSENT_LOWAT, number::NOTSENT_LOWAT),
    (TCP, libc::TCP_WINDOW_CLAMP, number::WINDOW_CLAMP),
];

/// Options with a value of one byte, and their place in the slot.
const BYTES: [(c_int, c_int, number::KeptByte); 4] = [
    (IP, libc::IP_TOS, number::TOS),
    (IPV6, libc::IPV6_TCLASS, number::TCLASS),
    (IP, libc::IP_TTL, number::TTL),
    (IPV6, libc::IPV6_UNICAST_HOPS, number::HOPS),
];

/// Options that [`crate::options`] handles.
const OTHERS: [(c_int, c_int); 18] = [
    (SOCKET, libc::SO_KEEPALIVE),
    (SOCKET, libc::SO_LINGER),
    (SOCKET, libc::SO_RCVTIMEO),
    (SOCKET, libc::SO_SNDTIMEO),
    (SOCKET, 66), // SO_RCVTIMEO_NEW
    (SOCKET, 67), // SO_SNDTIMEO_NEW
    (SOCKET, libc::SO_SNDBUF),
    (SOCKET, libc::SO_RCVBUF),
    (SOCKET, libc::SO_SNDBUFFORCE),
    (SOCKET, libc::SO_RCVBUFFORCE),
    (SOCKET, libc::SO_MAX_PACING_RATE),
    (TCP, libc::TCP_NODELAY),
    (TCP, libc::TCP_CORK),
    (TCP, libc::TCP_KEEPIDLE),
    (TCP, libc::TCP_KEEPINTVL),
    (TCP, libc::TCP_KEEPCNT),
    (TCP, libc::TCP_CONGESTION),
    (IPV6, libc::IPV6_V6ONLY),
];

/// Errors of missing options for which Linux does not return `ENOPROTOOPT`.
const ABSENT: [(c_int, c_int, Errno); 10] = [
    // The stack has no kernel interfaces.
    (SOCKET, libc::SO_BINDTODEVICE, libc::ENODEV),
    (SOCKET, libc::SO_BINDTOIFINDEX, libc::ENODEV),
    (SOCKET, libc::SO_ZEROCOPY, libc::EOPNOTSUPP),
    (SOCKET, libc::SO_PEEK_OFF, libc::EOPNOTSUPP),
    (IP, 50, libc::EADDRNOTAVAIL),   // IP_UNICAST_IF
    (IPV6, 76, libc::EADDRNOTAVAIL), // IPV6_UNICAST_IF
    (IP, libc::IP_MTU_DISCOVER, libc::EINVAL),
    (IPV6, libc::IPV6_MTU_DISCOVER, libc::EINVAL),
    (TCP, libc::TCP_ULP, libc::ENOENT),
    (TCP, libc::TCP_FASTOPEN_CONNECT, libc::EOPNOTSUPP),
];

/// Congestion controls of the stack.
const CONGESTION: [&[u8]; 3] = [b"cubic", b"reno", b"bbr"];

/// The place of an option in the slot.
#[derive(Clone, Copy)]
enum Row {
    Switch(usize, c_int),
    Byte(number::KeptByte),
    Number(usize),
}

/// Number of options that a slot stores.
const ROWS: usize = SWITCHES.len() + BYTES.len() + NUMBERS.len();

fn row(level: c_int, name: c_int) -> Option<Row> {
    rows().find(|(l, n, _)| (*l, *n) == (level, name)).map(|(_, _, row)| row)
}

/// Returns all options that a slot stores.
fn rows() -> impl Iterator<Item = (c_int, c_int, Row)> {
    let switches = SWITCHES.iter().enumerate();
    let switches = switches.map(|(at, (level, name, other))| (*level, *name, Row::Switch(at, *other)));
    let bytes = BYTES.iter().map(|(level, name, half)| (*level, *name, Row::Byte(*half)));
    switches.chain(bytes).chain(NUMBERS.iter().map(|(level, name, at)| (*level, *name, Row::Number(*at))))
}

impl Row {
    /// Returns the value in a slot, or `None` for the default.
    fn of(self, kept: &Kept) -> Option<c_int> {
        match self {
            Self::Switch(at, other) => (kept.number(at / 32) & 1 << (at % 32) != 0).then_some(other),
            Self::Byte(half) => half.of(kept.number(half.at)).map(c_int::from),
            Self::Number(at) => number::decode(kept.number(at)).map(|value| value as c_int),
        }
    }

    /// Stores a value, or `None` for the default.
    fn keep(self, kept: &Kept, value: Option<c_int>) {
        match self {
            Self::Switch(at, other) => {
                let (word, bit) = (at / 32, 1 << (at % 32));
                let on = value == Some(other);
                kept.change(word, |bits| if on { bits | bit } else { bits & !bit });
            }
            Self::Byte(half) => {
                kept.change(half.at, |number| half.replace(number, value.map(|value| value as u8)));
            }
            Self::Number(at) => {
                kept.change(at, |_| value.map_or(0, |value| number::encode(value as u32)));
            }
        }
    }
}

/// Checks whether the stack accepts an option with this value. The kernel checks the value, too.
///
/// # Errors
/// Returns the kernel's error on a new socket, or the error of a Linux that lacks the option or the value.
///
/// # Safety
/// `value` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn check(
    v6: bool,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Errno> {
    if (level, name) == (TCP, libc::TCP_CONGESTION) {
        // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
        return unsafe { congestion(value, len) }.map(drop);
    }
    let number = (len as usize >= size_of::<c_int>() && !value.is_null())
        // SAFETY: `value` is not null and `len` is at least the size of an `int`, as checked; the caller guarantees
        // `len` bytes.
        .then(|| unsafe { value.cast::<c_int>().read_unaligned() });
    let discovers = matches!((level, name), (IP, libc::IP_MTU_DISCOVER) | (IPV6, libc::IPV6_MTU_DISCOVER));
    let is_there = match discovers {
        true => {
            number.is_some_and(|number| (libc::IP_PMTUDISC_WANT..=libc::IP_PMTUDISC_DO).contains(&number))
        }
        false => row(level, name).is_some() || OTHERS.contains(&(level, name)),
    };
    if is_there {
        return Ok(());
    }
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    unsafe { refuse_unknown(&Fresh::new(v6)?, level, name, value, len) }
}

/// Refuses an option that the stack lacks, except its default value. `fresh` is a new socket of the same kind.
///
/// # Errors
/// Returns the kernel's error, or the error of a Linux that lacks the option.
///
/// # Safety
/// `value` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn refuse_unknown(
    fresh: &Fresh,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Errno> {
    let number = (len as usize >= size_of::<c_int>() && !value.is_null())
        // SAFETY: `value` is not null and `len` is at least the size of an `int`, as checked; the caller guarantees
        // `len` bytes.
        .then(|| unsafe { value.cast::<c_int>().read_unaligned() });
    let before = sys::socket_option(fresh.0, level, name, 0 as c_int);
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    unsafe { sys::setsockopt(fresh.0, level, name, value, len as usize) }?;
    // SAFETY: `len` is not 0, and the kernel has just read `len` bytes at `value`.
    let nothing =
        len == 0 || level == SOCKET && name == libc::SO_BINDTODEVICE && unsafe { *value.cast::<u8>() } == 0;
    let same = len as usize == size_of::<c_int>() && before.is_some() && before == number;
    if nothing || same {
        return Ok(());
    }
    let other = ABSENT.iter().find(|(l, n, _)| (*l, *n) == (level, name));
    Err(other.map_or(libc::ENOPROTOOPT, |(_, _, error)| *error))
}

/// Returns the number of a congestion control with this name.
///
/// # Safety
/// `value` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn congestion(value: *const c_void, len: socklen_t) -> Result<usize, Errno> {
    if len == 0 {
        return Err(libc::EINVAL);
    }
    if value.is_null() {
        return Err(libc::EFAULT);
    }
    // SAFETY: `value` is not null, and the caller guarantees `len` readable bytes. The kernel reads at most 15, too.
    let name = unsafe { core::slice::from_raw_parts(value.cast::<u8>(), (len as usize).min(15)) };
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    CONGESTION.iter().position(|known| *known == name).ok_or(libc::ENOENT)
}

/// Returns the number of a kernel socket's congestion control, if the stack has it.
fn congestion_of(fd: c_int) -> Option<usize> {
    let name = sys::socket_option(fd, TCP, libc::TCP_CONGESTION, [0u8; 16])?;
    // SAFETY: the arguments describe the local array `name`.
    unsafe { congestion(name.as_ptr().cast(), name.len() as socklen_t) }.ok()
}

/// Returns the number of the kernel's default, which both families share, if the stack has it.
fn default_congestion() -> Option<usize> {
    const UNKNOWN: usize = usize::MAX;
    static USUAL: AtomicUsize = AtomicUsize::new(UNKNOWN);
    let mut number = USUAL.load(Ordering::Relaxed);
    if number == UNKNOWN {
        let found = Fresh::new(false).ok().and_then(|fresh| congestion_of(fresh.0));
        number = found.unwrap_or(CONGESTION.len());
        USUAL.store(number, Ordering::Relaxed);
    }
    (number < CONGESTION.len()).then_some(number)
}

/// Returns the name of the congestion control with this number.
pub(crate) fn congestion_name(which: u32) -> Option<&'static [u8]> {
    CONGESTION.get(which as usize).copied()
}

/// Reads the value of `SO_MAX_PACING_RATE`: 32 bits, where all ones stand for no limit, or 64 bits.
///
/// # Safety
/// `value` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn pacing_rate(value: *const c_void, len: socklen_t) -> Result<u64, Errno> {
    if (len as usize) < size_of::<u32>() {
        return Err(libc::EINVAL);
    }
    if value.is_null() {
        return Err(libc::EFAULT);
    }
    if len as usize >= size_of::<u64>() {
        // SAFETY: `value` is not null and `len` is at least 8, as checked; the caller guarantees `len` readable bytes.
        return Ok(unsafe { value.cast::<u64>().read_unaligned() });
    }
    // SAFETY: `value` is not null and `len` is at least 4, as checked; the caller guarantees `len` readable bytes.
    let rate = unsafe { value.cast::<u32>().read_unaligned() };
    Ok(if rate == u32::MAX { u64::MAX } else { rate.into() })
}

/// Sets an option of a session that the slot stores.
///
/// # Errors
/// See [`check`].
///
/// # Safety
/// `value` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn set(
    kept: &Kept,
    v6: bool,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Result<(), Errno> {
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    unsafe { check(v6, level, name, value, len) }?;
    let Some(row) = row(level, name) else { return Ok(()) };
    let fresh = Fresh::new(v6)?;
    let usual = sys::int_option(fresh.0, level, name);
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    unsafe { sys::setsockopt(fresh.0, level, name, value, len as usize) }?;
    let now = sys::int_option(fresh.0, level, name);
    row.keep(kept, (now != usual).then_some(now));
    Ok(())
}

/// Returns the value of an option if it is not the default.
pub(crate) fn get(kept: &Kept, level: c_int, name: c_int) -> Option<c_int> {
    row(level, name)?.of(kept)
}

/// Returns the options of a kernel socket that differ from the defaults. `is_named`: the program has set the congestion
/// control, possibly to the kernel's default, which may not be the stack's.
pub(crate) fn of_kernel(fd: c_int, v6: bool, is_named: bool) -> Kept {
    let kept = Kept::default();
    for (at, (level, name, row)) in rows().enumerate().filter(|(_, (level, ..))| v6 || *level != IPV6) {
        let now = sys::int_option(fd, level, name);
        row.keep(&kept, (now != default_value(at, v6, level, name)).then_some(now));
    }
    let none = libc::linger { l_onoff: 0, l_linger: 0 };
    let linger = sys::socket_option(fd, SOCKET, libc::SO_LINGER, none).filter(|linger| linger.l_onoff != 0);
    kept.change(number::LINGER, |_| linger.map_or(0, |linger| linger.l_linger.max(0) as u32 + 1));
    let rate = sys::socket_option(fd, SOCKET, libc::SO_MAX_PACING_RATE, u64::MAX);
    kept.set_pacing_rate(rate.unwrap_or(u64::MAX));
    let which = congestion_of(fd).filter(|which| is_named || Some(*which) != default_congestion());
    kept.change(number::CONGESTION, |_| which.map_or(0, |which| number::encode(which as u32)));
    kept
}

/// Returns the payload sizes of a kernel socket's send and receive buffers in bytes, or 0 for a size that the program
/// has not set. Linux doubles the value to cover its overhead.
pub(crate) fn buffers(fd: c_int, v6: bool) -> [u32; 2] {
    // Linux before 5.14 does not report which sizes were set.
    let told = sys::socket_option(fd, SOCKET, SO_BUF_LOCK, 0 as c_int);
    let fresh = Fresh::new(v6);
    [(libc::SO_SNDBUF, 1), (libc::SO_RCVBUF, 2)].map(|(name, bit)| {
        let bytes = sys::int_option(fd, SOCKET, name);
        let usual = || fresh.as_ref().is_ok_and(|fresh| sys::int_option(fresh.0, SOCKET, name) == bytes);
        let is_set = told.map_or_else(|| !usual(), |told| told & bit != 0);
        if is_set { bytes as u32 / 2 } else { 0 }
    })
}

/// Returns the buffer size in bytes of payload that the kernel uses for an option value.
///
/// # Errors
/// Returns the kernel's error.
///
/// # Safety
/// `value` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn buffer_of(
    v6: bool,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Result<u32, Errno> {
    let fresh = Fresh::new(v6)?;
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    unsafe { sys::setsockopt(fresh.0, SOCKET, name, value, len as usize) }?;
    let sends = matches!(name, libc::SO_SNDBUF | libc::SO_SNDBUFFORCE);
    let name = if sends { libc::SO_SNDBUF } else { libc::SO_RCVBUF };
    Ok(sys::int_option(fresh.0, SOCKET, name) as u32 / 2)
}

/// Sets the options that a slot stores on a new kernel socket.
pub(crate) fn set_on_kernel(slot: &Slot, fd: c_int) {
    let Slot { kept, wishes, .. } = slot;
    for (level, name, value) in [
        (SOCKET, libc::SO_SNDBUF, &wishes.send_buffer),
        (SOCKET, libc::SO_RCVBUF, &wishes.receive_buffer),
        (TCP, libc::TCP_KEEPIDLE, &wishes.keep_idle),
        (TCP, libc::TCP_KEEPINTVL, &wishes.keep_interval),
        (TCP, libc::TCP_KEEPCNT, &wishes.keep_count),
    ] {
        match value.load(Ordering::Relaxed) {
            0 => {}
            value => drop(sys::set_int_option(fd, level, name, value as c_int)),
        }
    }
    let linger = kept.number(number::LINGER) as c_int;
    if linger > 0 {
        let linger = libc::linger { l_onoff: 1, l_linger: linger - 1 };
        let (at, len) = ((&raw const linger).cast(), size_of::<libc::linger>());
        // SAFETY: `linger` lives until the call returns, and `len` is its size.
        let _ = unsafe { sys::setsockopt(fd, SOCKET, libc::SO_LINGER, at, len) };
    }
    let rate = kept.pacing_rate();
    if rate < u64::MAX {
        let (at, len) = ((&raw const rate).cast(), size_of::<u64>());
        // SAFETY: `rate` lives until the call returns, and `len` is its size.
        let _ = unsafe { sys::setsockopt(fd, SOCKET, libc::SO_MAX_PACING_RATE, at, len) };
    }
    if let Some(name) = number::decode(kept.number(number::CONGESTION)).and_then(congestion_name) {
        // SAFETY: `name` is a static string of this length.
        let _ = unsafe { sys::setsockopt(fd, TCP, libc::TCP_CONGESTION, name.as_ptr().cast(), name.len()) };
    }
    for (level, name, row) in rows() {
        if let Some(value) = row.of(kept) {
            let _ = sys::set_int_option(fd, level, name, value);
        }
    }
}

/// Returns the value of option number `at` on a new socket.
fn default_value(at: usize, v6: bool, level: c_int, name: c_int) -> c_int {
    const KNOWN: u64 = 1 << 32;
    static USUAL: [[AtomicU64; ROWS]; 2] = [const { [const { AtomicU64::new(0) }; ROWS] }; 2];
    let word = &USUAL[usize::from(v6)][at];
    let known = word.load(Ordering::Relaxed);
    if known & KNOWN != 0 {
        return known as c_int;
    }
    let value = Fresh::new(v6).map_or(0, |fresh| sys::int_option(fresh.0, level, name));
    word.store(KNOWN | u64::from(value as u32), Ordering::Relaxed);
    value
}

/// A new kernel socket, closed on drop.
pub(crate) struct Fresh(pub(crate) c_int);

impl Fresh {
    pub(crate) fn new(v6: bool) -> Result<Self, Errno> {
        Self::of_kind(v6, libc::SOCK_STREAM)
    }

    pub(crate) fn datagrams(v6: bool) -> Result<Self, Errno> {
        Self::of_kind(v6, libc::SOCK_DGRAM)
    }

    fn of_kind(v6: bool, kind: c_int) -> Result<Self, Errno> {
        let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
        sys::socket(family, kind | libc::SOCK_CLOEXEC).map(Self)
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        let _ = sys::close(self.0);
    }
}
