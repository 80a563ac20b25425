//! Options of datagram sockets: header fields of sent datagrams, and control messages of received ones.
//!
//! The values are stored in the words of the slot that hold the keep-alive settings of a stream. The kernel checks each
//! value on a separate socket.

use core::ffi::{c_int, c_void};
use core::net::IpAddr;
use core::sync::atomic::{AtomicU32, Ordering};

use libc::socklen_t;
use offcore_session::datagram::{More, PathMtu};

use crate::session::Session;
use crate::stream_options::{Fresh, refuse_unknown};
use crate::sys::{self, Errno};

// Constants of `linux/in6.h`, `linux/udp.h` and `linux/net_tstamp.h` that the crate libc lacks.
const IPV6_RECVORIGDSTADDR: c_int = 74;
const IPV6_DONTFRAG: c_int = 62;
pub(crate) const IPV6_MULTICAST_ALL: c_int = 29;
pub(crate) const UDP_CORK: c_int = 1;
pub(crate) const UDP_SEGMENT: c_int = 103;
pub(crate) const UDP_GRO: c_int = 104;
/// Bits of `SO_TIMESTAMPING`: software timestamps of received packets.
const TIMESTAMPING_RX_SOFTWARE: u32 = 1 << 3;
const TIMESTAMPING_SOFTWARE: u32 = 1 << 4;
/// Hardware timestamps. Linux accepts these bits without such hardware.
const TIMESTAMPING_OF_HARDWARE: u32 = 1 << 2 | 1 << 5 | 1 << 6;

/// Bits of the first word.
pub(crate) mod bit {
    pub(crate) const PKTINFO: u32 = 1;
    pub(crate) const TTL: u32 = 1 << 1;
    pub(crate) const TOS: u32 = 1 << 2;
    pub(crate) const ORIGINAL: u32 = 1 << 3;
    pub(crate) const PKTINFO6: u32 = 1 << 4;
    pub(crate) const HOPLIMIT: u32 = 1 << 5;
    pub(crate) const TCLASS: u32 = 1 << 6;
    pub(crate) const ORIGINAL6: u32 = 1 << 7;
    pub(crate) const TIMESTAMP: u32 = 1 << 8;
    pub(crate) const TIMESTAMPNS: u32 = 1 << 9;
    pub(crate) const LOST: u32 = 1 << 10;
    pub(crate) const GRO: u32 = 1 << 11;
    pub(crate) const CORK: u32 = 1 << 12;
    pub(crate) const DONTFRAG: u32 = 1 << 13;
    pub(crate) const ERRORS: u32 = offcore_session::datagram::HEARS_ERRORS;
    pub(crate) const ERRORS6: u32 = offcore_session::datagram::HEARS_ERRORS_6;
    pub(crate) const ALL_GROUPS: u32 = offcore_session::datagram::TAKES_ALL_GROUPS;
    pub(crate) const ALL_GROUPS6: u32 = offcore_session::datagram::TAKES_ALL_GROUPS_6;
    pub(crate) const LOOP: u32 = 1 << 18;
    pub(crate) const LOOP6: u32 = 1 << 19;
    /// Options that add a control message to a received datagram.
    pub(crate) const TOLD: u32 = (1 << 12) - 1;
}

/// Location of an option's value: `bits` bits of word `word`, starting at bit `shift`.
struct Row {
    level: c_int,
    name: c_int,
    word: usize,
    shift: u32,
    bits: u32,
}

const fn row(level: c_int, name: c_int, word: usize, shift: u32, bits: u32) -> Row {
    Row { level, name, word, shift, bits }
}

const fn flag(level: c_int, name: c_int, bit: u32) -> Row {
    row(level, name, 0, bit.trailing_zeros(), 1)
}

const ROWS: [Row; 30] = [
    flag(libc::IPPROTO_IP, libc::IP_PKTINFO, bit::PKTINFO),
    flag(libc::IPPROTO_IP, libc::IP_RECVTTL, bit::TTL),
    flag(libc::IPPROTO_IP, libc::IP_RECVTOS, bit::TOS),
    flag(libc::IPPROTO_IP, libc::IP_RECVORIGDSTADDR, bit::ORIGINAL),
    flag(libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, bit::PKTINFO6),
    flag(libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, bit::HOPLIMIT),
    flag(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, bit::TCLASS),
    flag(libc::IPPROTO_IPV6, IPV6_RECVORIGDSTADDR, bit::ORIGINAL6),
    flag(libc::SOL_SOCKET, libc::SO_TIMESTAMP, bit::TIMESTAMP),
    flag(libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, bit::TIMESTAMPNS),
    flag(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, bit::LOST),
    flag(libc::IPPROTO_UDP, UDP_GRO, bit::GRO),
    flag(libc::IPPROTO_UDP, UDP_CORK, bit::CORK),
    flag(libc::IPPROTO_IPV6, IPV6_DONTFRAG, bit::DONTFRAG),
    flag(libc::IPPROTO_IP, libc::IP_RECVERR, bit::ERRORS),
    flag(libc::IPPROTO_IPV6, libc::IPV6_RECVERR, bit::ERRORS6),
    flag(libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, bit::ALL_GROUPS),
    flag(libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, bit::ALL_GROUPS6),
    flag(libc::IPPROTO_IP, libc::IP_MULTICAST_LOOP, bit::LOOP),
    flag(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP, bit::LOOP6),
    row(libc::IPPROTO_IP, libc::IP_TTL, 1, 0, 8),
    row(libc::IPPROTO_IP, libc::IP_TOS, 1, 8, 8),
    row(libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, 1, 16, 8),
    row(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, 1, 24, 8),
    row(libc::IPPROTO_UDP, UDP_SEGMENT, 2, 0, 16),
    row(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, 2, 16, 4),
    row(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, 2, 20, 4),
    row(libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, 2, 24, 8),
    row(libc::SOL_SOCKET, libc::SO_TIMESTAMPING, 3, 0, 24),
    row(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, 3, 24, 8),
];

impl Row {
    fn mask(&self) -> u32 {
        (u32::MAX >> (32 - self.bits)) << self.shift
    }
}

/// Returns the words of a session that store the values.
fn words(session: &Session) -> [&AtomicU32; 4] {
    let wishes = &session.slot.wishes;
    [&wishes.keep_idle, &wishes.keep_interval, &wishes.keep_count, &wishes.untold]
}

fn find(level: c_int, name: c_int) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.level == level && row.name == name)
}

/// Returns the value of an option, or `None` if the table does not contain it.
pub(crate) fn get(session: &Session, level: c_int, name: c_int) -> Option<c_int> {
    let row = find(level, name)?;
    let word = words(session).get(row.word)?.load(Ordering::Relaxed);
    Some(((word & row.mask()) >> row.shift) as c_int)
}

/// Returns whether the table contains an option.
pub(crate) fn has(level: c_int, name: c_int) -> bool {
    find(level, name).is_some()
}

/// Returns whether the stack supports a value of `SO_TIMESTAMPING`. Timestamps of sent packets are not supported.
pub(crate) fn has_timestamps(value: c_int) -> bool {
    let known = TIMESTAMPING_RX_SOFTWARE | TIMESTAMPING_SOFTWARE | TIMESTAMPING_OF_HARDWARE;
    value as u32 & !known == 0
}

/// Supported options that are not in the table of values.
const OTHERS: [(c_int, c_int); 14] = [
    (libc::IPPROTO_IP, libc::IP_MULTICAST_IF),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
    (libc::SOL_SOCKET, libc::SO_BROADCAST),
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::SOL_SOCKET, 66), // SO_RCVTIMEO_NEW
    (libc::SOL_SOCKET, 67), // SO_SNDTIMEO_NEW
    (libc::SOL_SOCKET, libc::SO_SNDBUF),
    (libc::SOL_SOCKET, libc::SO_RCVBUF),
    (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE),
    (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE),
];

/// Options without an effect on a bound UDP socket, on Linux either.
pub(crate) const WITHOUT_EFFECT: [(c_int, c_int); 8] = [
    (libc::SOL_SOCKET, libc::SO_DEBUG),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::IPPROTO_IP, libc::IP_FREEBIND),
    (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT),
    (libc::IPPROTO_IPV6, 78), // IPV6_FREEBIND
];

/// Checks whether the stack supports this value of an option. The kernel checks the value, too.
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
    let is_there =
        has(level, name) || OTHERS.contains(&(level, name)) || WITHOUT_EFFECT.contains(&(level, name));
    if is_there {
        return Ok(());
    }
    // SAFETY: the caller guarantees that `value` is null or has `len` readable bytes.
    unsafe { refuse_unknown(&Fresh::datagrams(v6)?, level, name, value, len) }
}

/// Sets an option to a value that the kernel has checked.
pub(crate) fn set(session: &Session, level: c_int, name: c_int, value: c_int) {
    let Some(row) = find(level, name) else { return };
    let words = words(session);
    let Some(word) = words.get(row.word) else { return };
    let mut cleared = row.mask();
    if level == libc::SOL_SOCKET && matches!(name, libc::SO_TIMESTAMP | libc::SO_TIMESTAMPNS) {
        // As on Linux, either option clears the other one.
        cleared |= bit::TIMESTAMP | bit::TIMESTAMPNS;
    }
    let new = (value as u32) << row.shift & row.mask();
    let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| Some(old & !cleared | new));
}

/// Reads the options of the kernel socket `fd`.
pub(crate) fn of_kernel(fd: c_int, v6: bool) -> [u32; 4] {
    let mut all = [0u32; 4];
    for row in ROWS.iter().filter(|row| v6 || row.level != libc::IPPROTO_IPV6) {
        if let Some(word) = all.get_mut(row.word) {
            *word |= (sys::int_option(fd, row.level, row.name) as u32) << row.shift & row.mask();
        }
    }
    all
}

/// Stores the result of [`of_kernel`] in the session that replaces the socket.
pub(crate) fn store_values(session: &Session, all: [u32; 4]) {
    for (word, value) in words(session).into_iter().zip(all) {
        word.store(value, Ordering::Relaxed);
    }
    if all[0] & (bit::ERRORS | bit::ERRORS6) != 0 {
        session.mark();
    }
}

/// Returns the first word.
pub(crate) fn bits(session: &Session) -> u32 {
    session.slot.wishes.keep_idle.load(Ordering::Relaxed)
}

/// Returns whether `SO_TIMESTAMPING` requests software timestamps.
pub(crate) fn wants_software_timestamps(session: &Session) -> bool {
    session.slot.wishes.untold.load(Ordering::Relaxed) & TIMESTAMPING_SOFTWARE != 0
}

/// Returns the header fields for a datagram to an address, according to the socket's options.
pub(crate) fn fields_to_send(session: &Session, to: IpAddr) -> More {
    let [bits, headers, paths, last] = words(session).map(|word| word.load(Ordering::Relaxed));
    let v6 = to.is_ipv6();
    let [ttl, tos, hops, class] = headers.to_le_bytes();
    let [ttl, hops] =
        if to.is_multicast() { [paths, last].map(|word| (word >> 24) as u8) } else { [ttl, hops] };
    let (hops, tos, mode) = if v6 { (hops, class, paths >> 20) } else { (ttl, tos, paths >> 16) };
    let path_mtu = match (mode & 15) as c_int {
        _ if v6 && bits & bit::DONTFRAG != 0 => PathMtu::Do,
        libc::IP_PMTUDISC_WANT => PathMtu::Want,
        libc::IP_PMTUDISC_DO => PathMtu::Do,
        libc::IP_PMTUDISC_PROBE => PathMtu::Probe,
        _ => PathMtu::Ignore,
    };
    let no_loop = bits & if v6 { bit::LOOP6 } else { bit::LOOP } == 0;
    More { hops, tos, path_mtu: path_mtu as u8, segment: paths as u16, no_loop, ..More::default() }
}

/// Returns the name of an option in [`Kept`](offcore_session::slot::Kept).
pub(crate) fn kept_name(level: c_int, name: c_int) -> u32 {
    ((level as u32 & 0xff) + 1) << 16 | name as u32 & 0xffff
}

/// Returns whether a datagram socket may send broadcasts.
pub(crate) fn may_broadcast(session: &Session) -> bool {
    let kept = session.slot.kept.get(kept_name(libc::SOL_SOCKET, libc::SO_BROADCAST));
    kept.is_some_and(|value| value != 0)
}

/// Reads a value that a program passed.
///
/// # Safety
/// `value` is null, or valid for reads of `len` bytes. `T` is a structure of integers.
pub(crate) unsafe fn read<T: Copy>(value: *const c_void, len: socklen_t) -> Result<T, Errno> {
    if (len as usize) < size_of::<T>() {
        return Err(libc::EINVAL);
    }
    if value.is_null() {
        return Err(libc::EFAULT);
    }
    // SAFETY: `value` is not null and has at least the size of `T`, as checked; the caller guarantees `len` readable
    // bytes. Any bytes are a valid `T`.
    Ok(unsafe { value.cast::<T>().read_unaligned() })
}
