//! Addresses of sockets, as programs have them.

use core::ffi::c_int;
use core::mem;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::ptr;
use core::sync::atomic::Ordering;

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};
use offcore_session::slot::Slot;

use crate::sys::{self, Errno};

/// The family of an address that a program gave.
///
/// # Safety
/// `address` is of `len` bytes, or null.
unsafe fn family(address: *const sockaddr, len: socklen_t) -> Result<c_int, Errno> {
    if address.is_null() || (len as usize) < size_of::<u16>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's promise; the family is at the beginning of every address.
    Ok(c_int::from(unsafe { address.cast::<u16>().read_unaligned() }))
}

/// An address that a program gave; IPv4 in IPv6 is IPv4.
///
/// # Safety
/// `address` is of `len` bytes, or null.
pub(crate) unsafe fn read(address: *const sockaddr, len: socklen_t) -> Result<SocketAddr, Errno> {
    // SAFETY: the caller's promise.
    unsafe { read_as(family(address, len)?, address, len) }
}

/// What a datagram socket is to be connected to or, with `sends`, a datagram is to be sent to. `None`: nobody, by an address
/// of no family.
///
/// # Safety
/// `address` is of `len` bytes, or null.
pub(crate) unsafe fn read_for_datagrams(
    v6: bool,
    sends: bool,
    address: *const sockaddr,
    len: socklen_t,
) -> Result<Option<SocketAddr>, Errno> {
    let least = if v6 { 24 } else { size_of::<sockaddr_in>() };
    // SAFETY: the caller's promise.
    match unsafe { family(address, len) }? {
        libc::AF_UNSPEC if v6 || !sends => Ok(None),
        // As Linux: it is taken for one of IPv4.
        // SAFETY: the caller's promise.
        libc::AF_UNSPEC => unsafe { read_as(libc::AF_INET, address, len) }.map(Some),
        // SAFETY: the caller's promise.
        libc::AF_INET => unsafe { read(address, len) }.map(Some),
        // SAFETY: the caller's promise.
        libc::AF_INET6 if v6 => unsafe { read(address, len) }.map(Some),
        _ if (len as usize) < least || v6 && sends => Err(libc::EINVAL),
        _ => Err(libc::EAFNOSUPPORT),
    }
}

/// # Safety
/// `address` is of `len` bytes.
unsafe fn read_as(family: c_int, address: *const sockaddr, len: socklen_t) -> Result<SocketAddr, Errno> {
    match family {
        libc::AF_INET if len as usize >= size_of::<sockaddr_in>() => {
            // SAFETY: it is as long.
            let v4 = unsafe { address.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            Ok(SocketAddr::new(ip.into(), u16::from_be(v4.sin_port)))
        }
        // 24 bytes will do: the scope came later (RFC 2553).
        libc::AF_INET6 if len as usize >= 24 => {
            // SAFETY: a structure of numbers.
            let mut v6: sockaddr_in6 = unsafe { mem::zeroed() };
            let known = size_of::<sockaddr_in6>().min(len as usize);
            // SAFETY: both have so many bytes.
            // copy-ok: an address
            unsafe { ptr::copy_nonoverlapping(address.cast::<u8>(), (&raw mut v6).cast(), known) };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            Ok(SocketAddr::new(ip.to_canonical(), u16::from_be(v6.sin6_port)))
        }
        libc::AF_INET | libc::AF_INET6 => Err(libc::EINVAL),
        _ => Err(libc::EAFNOSUPPORT),
    }
}

/// Whether an address is of IPv6, as the program wrote it.
///
/// # Safety
/// `address` was read by [`read`].
pub(crate) unsafe fn is_v6(address: *const sockaddr) -> bool {
    // SAFETY: the family is at the beginning of every address.
    c_int::from(unsafe { address.cast::<u16>().read_unaligned() }) == libc::AF_INET6
}

/// Gives a program an address, as long as it has room for; `len` becomes the address's own length.
///
/// # Safety
/// `to` is null, or of `*len` bytes.
pub(crate) unsafe fn write(address: SocketAddr, v6: bool, to: *mut sockaddr, len: *mut socklen_t) {
    if to.is_null() || len.is_null() {
        return;
    }
    // SAFETY: structures of numbers.
    let (mut storage, v6) = (unsafe { mem::zeroed::<sockaddr_storage>() }, v6 || address.is_ipv6());
    let whole = if v6 {
        let ip = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        // SAFETY: there is room for an address of any family.
        let to = unsafe { &mut *(&raw mut storage).cast::<sockaddr_in6>() };
        to.sin6_family = libc::AF_INET6 as _;
        to.sin6_port = address.port().to_be();
        to.sin6_addr.s6_addr = ip.octets();
        size_of::<sockaddr_in6>()
    } else {
        let IpAddr::V4(ip) = address.ip() else { return };
        // SAFETY: as above.
        let to = unsafe { &mut *(&raw mut storage).cast::<sockaddr_in>() };
        to.sin_family = libc::AF_INET as _;
        to.sin_port = address.port().to_be();
        to.sin_addr.s_addr = u32::from_ne_bytes(ip.octets());
        size_of::<sockaddr_in>()
    };
    // SAFETY: the caller's promise: `*len` bytes, and a length.
    unsafe {
        let room = (*len as usize).min(whole);
        // copy-ok: an address
        ptr::copy_nonoverlapping((&raw const storage).cast::<u8>(), to.cast(), room);
        *len = whole as socklen_t;
    }
}

/// The address that stands for any.
pub(crate) fn unspecified(v6: bool) -> IpAddr {
    if v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() }
}

/// One end of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Ours,
    Peer,
}

/// An address of a session.
pub(crate) fn of(slot: &Slot, end: End) -> SocketAddr {
    let identity = &slot.identity;
    let ports = identity.ports.load(Ordering::Relaxed);
    let (words, port) = match end {
        End::Ours => (&identity.local, ports as u16),
        End::Peer => (&identity.remote, (ports >> 16) as u16),
    };
    let mut octets = [0; 16];
    for (four, word) in octets.chunks_exact_mut(4).zip(words) {
        four.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()); // copy-ok: an address
    }
    let ip: IpAddr = match identity.family.load(Ordering::Relaxed) {
        6 => Ipv6Addr::from(octets).into(),
        _ => Ipv4Addr::from([octets[0], octets[1], octets[2], octets[3]]).into(),
    };
    SocketAddr::new(ip, port)
}

/// Connects a kernel socket.
pub(crate) fn connect(fd: c_int, address: SocketAddr) -> Result<(), Errno> {
    // SAFETY: a structure of numbers.
    let mut storage: sockaddr_storage = unsafe { mem::zeroed() };
    let mut len = size_of::<sockaddr_storage>() as socklen_t;
    // SAFETY: there is room for an address of any family.
    unsafe { write(address, false, (&raw mut storage).cast(), &raw mut len) };
    let args = [fd as usize, &raw const storage as usize, len as usize, 0, 0, 0];
    // SAFETY: an address that lives until the call returns.
    sys::result(unsafe { sys::call(libc::SYS_connect, args) }).map(drop)
}

/// The address that a socket of the kernel's has.
pub(crate) fn of_kernel(fd: c_int) -> Option<SocketAddr> {
    // SAFETY: a structure of numbers.
    let (mut storage, mut len) =
        (unsafe { mem::zeroed::<sockaddr_storage>() }, size_of::<sockaddr_storage>() as socklen_t);
    let args = [fd as usize, &raw mut storage as usize, &raw mut len as usize, 0, 0, 0];
    // SAFETY: both live until the call returns.
    if unsafe { sys::call(libc::SYS_getsockname, args) } < 0 {
        return None;
    }
    // SAFETY: so many bytes are there.
    unsafe { read((&raw const storage).cast(), len) }.ok()
}
