//! Socket addresses in the format of programs (`struct sockaddr`).

use core::ffi::c_int;
use core::mem;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::ptr;
use core::sync::atomic::Ordering;

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};
use offcore_session::slot::Slot;

use crate::sys::{self, Errno};

/// Returns the family of an address that a program passed.
///
/// # Safety
/// `address` is null, or valid for reads of `len` bytes.
unsafe fn family(address: *const sockaddr, len: socklen_t) -> Result<c_int, Errno> {
    if address.is_null() || (len as usize) < size_of::<u16>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: `address` is not null and has at least 2 bytes, as checked above; the caller guarantees `len` readable
    // bytes. The family is the first field of every address.
    Ok(c_int::from(unsafe { address.cast::<u16>().read_unaligned() }))
}

/// Reads an address that a program passed. An IPv4-mapped IPv6 address is converted to IPv4.
///
/// # Safety
/// `address` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn read(address: *const sockaddr, len: socklen_t) -> Result<SocketAddr, Errno> {
    // SAFETY: the caller guarantees that `address` is null or has `len` readable bytes; `read_as` is only called if
    // `family` found it not null.
    unsafe { read_as(family(address, len)?, address, len) }
}

/// Reads the peer of a datagram socket or, with `sends`, the destination of a datagram. Returns `None` for the family
/// `AF_UNSPEC`, which stands for no peer.
///
/// # Safety
/// `address` is null, or valid for reads of `len` bytes.
pub(crate) unsafe fn read_for_datagrams(
    v6: bool,
    sends: bool,
    address: *const sockaddr,
    len: socklen_t,
) -> Result<Option<SocketAddr>, Errno> {
    let least = if v6 { 24 } else { size_of::<sockaddr_in>() };
    // SAFETY: the caller guarantees that `address` is null or has `len` readable bytes.
    match unsafe { family(address, len) }? {
        libc::AF_UNSPEC if v6 || !sends => Ok(None),
        // As on Linux, the address is treated as an IPv4 address.
        // SAFETY: `address` is not null, as `family` checked; the caller guarantees `len` readable bytes.
        libc::AF_UNSPEC => unsafe { read_as(libc::AF_INET, address, len) }.map(Some),
        // SAFETY: the caller guarantees that `address` is null or has `len` readable bytes.
        libc::AF_INET => unsafe { read(address, len) }.map(Some),
        // SAFETY: the caller guarantees that `address` is null or has `len` readable bytes.
        libc::AF_INET6 if v6 => unsafe { read(address, len) }.map(Some),
        _ if (len as usize) < least || v6 && sends => Err(libc::EINVAL),
        _ => Err(libc::EAFNOSUPPORT),
    }
}

/// # Safety
/// `address` is valid for reads of `len` bytes.
unsafe fn read_as(family: c_int, address: *const sockaddr, len: socklen_t) -> Result<SocketAddr, Errno> {
    match family {
        libc::AF_INET if len as usize >= size_of::<sockaddr_in>() => {
            // SAFETY: the caller guarantees `len` readable bytes at `address`, and `len` is at least the size of the
            // structure.
            let v4 = unsafe { address.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            Ok(SocketAddr::new(ip.into(), u16::from_be(v4.sin_port)))
        }
        // 24 bytes suffice: the scope ID was added later (RFC 2553).
        libc::AF_INET6 if len as usize >= 24 => {
            // SAFETY: the structure consists of integers, for which all zeros are valid.
            let mut v6: sockaddr_in6 = unsafe { mem::zeroed() };
            let known = size_of::<sockaddr_in6>().min(len as usize);
            // SAFETY: `known` is at most the size of `v6`, and at most `len`; the caller guarantees `len` readable
            // bytes.
            // copy-ok: an address
            unsafe { ptr::copy_nonoverlapping(address.cast::<u8>(), (&raw mut v6).cast(), known) };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            Ok(SocketAddr::new(ip.to_canonical(), u16::from_be(v6.sin6_port)))
        }
        libc::AF_INET | libc::AF_INET6 => Err(libc::EINVAL),
        _ => Err(libc::EAFNOSUPPORT),
    }
}

/// Returns whether a program passed an IPv6 address.
///
/// # Safety
/// `address` was successfully read by [`read`].
pub(crate) unsafe fn is_v6(address: *const sockaddr) -> bool {
    // SAFETY: [`read`] found `address` valid, as the caller guarantees. The family is the first field of every address.
    c_int::from(unsafe { address.cast::<u16>().read_unaligned() }) == libc::AF_INET6
}

/// Writes an address to a program's buffer, truncated if the buffer is too short. Sets `len` to the full length of the
/// address.
///
/// # Safety
/// `to` is null, or `len` is null, or `len` is valid and `to` is valid for writes of `*len` bytes.
pub(crate) unsafe fn write(address: SocketAddr, v6: bool, to: *mut sockaddr, len: *mut socklen_t) {
    if to.is_null() || len.is_null() {
        return;
    }
    // SAFETY: the structure consists of integers, for which all zeros are valid.
    let (mut storage, v6) = (unsafe { mem::zeroed::<sockaddr_storage>() }, v6 || address.is_ipv6());
    let whole = if v6 {
        let ip = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        // SAFETY: `sockaddr_storage` has the size and alignment for an address of any family.
        let to = unsafe { &mut *(&raw mut storage).cast::<sockaddr_in6>() };
        to.sin6_family = libc::AF_INET6 as _;
        to.sin6_port = address.port().to_be();
        to.sin6_addr.s6_addr = ip.octets();
        size_of::<sockaddr_in6>()
    } else {
        let IpAddr::V4(ip) = address.ip() else { return };
        // SAFETY: `sockaddr_storage` has the size and alignment for an address of any family.
        let to = unsafe { &mut *(&raw mut storage).cast::<sockaddr_in>() };
        to.sin_family = libc::AF_INET as _;
        to.sin_port = address.port().to_be();
        to.sin_addr.s_addr = u32::from_ne_bytes(ip.octets());
        size_of::<sockaddr_in>()
    };
    // SAFETY: `to` and `len` are not null, as checked above, so the caller guarantees that `len` is valid and that `to`
    // has `*len` writable bytes. `storage` has at least `whole` bytes.
    unsafe {
        let room = (*len as usize).min(whole);
        // copy-ok: an address
        ptr::copy_nonoverlapping((&raw const storage).cast::<u8>(), to.cast(), room);
        *len = whole as socklen_t;
    }
}

/// Returns the unspecified address.
pub(crate) fn unspecified(v6: bool) -> IpAddr {
    if v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() }
}

/// One end of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Ours,
    Peer,
}

/// Returns an address of a session.
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
    // SAFETY: the structure consists of integers, for which all zeros are valid.
    let mut storage: sockaddr_storage = unsafe { mem::zeroed() };
    let mut len = size_of::<sockaddr_storage>() as socklen_t;
    // SAFETY: `storage` has `len` bytes, enough for an address of any family.
    unsafe { write(address, false, (&raw mut storage).cast(), &raw mut len) };
    let args = [fd as usize, &raw const storage as usize, len as usize, 0, 0, 0];
    // SAFETY: the arguments describe `storage`, which lives until the call returns.
    sys::result(unsafe { sys::call(libc::SYS_connect, args) }).map(drop)
}

/// Returns the address of a kernel socket.
pub(crate) fn of_kernel(fd: c_int) -> Option<SocketAddr> {
    // SAFETY: the structure consists of integers, for which all zeros are valid.
    let (mut storage, mut len) =
        (unsafe { mem::zeroed::<sockaddr_storage>() }, size_of::<sockaddr_storage>() as socklen_t);
    let args = [fd as usize, &raw mut storage as usize, &raw mut len as usize, 0, 0, 0];
    // SAFETY: `storage` and `len` live until the call returns, and `len` is the size of `storage`.
    if unsafe { sys::call(libc::SYS_getsockname, args) } < 0 {
        return None;
    }
    // SAFETY: the kernel has set `len`, and `storage` has room for an address of any family.
    unsafe { read((&raw const storage).cast(), len) }.ok()
}
