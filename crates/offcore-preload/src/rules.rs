//! Rules that select sockets for the stack.
//!
//! `OFFCORE_ONLY` has parts like `tcp:80,443` or `udp:53`, separated by `;` or spaces. A part without ports stands for
//! all ports. The ports are those on which a program listens, or to which it connects. Without `OFFCORE_ONLY`, all TCP
//! sockets use the stack, and UDP datagrams use it if the stack has a route to their destination. A UDP socket that
//! only listens stays with the kernel. Loopback addresses and the kernel's own addresses always belong to the kernel.

use core::ffi::c_int;
use core::net::{IpAddr, SocketAddr};

use crate::address;
use crate::environment;
use crate::sys::{self, Errno};
use crate::table::SocketKind;

/// The discard port (RFC 863).
const DISCARD: u16 = 9;

fn protocol_name(kind: SocketKind) -> &'static [u8] {
    if kind == SocketKind::OpenDatagrams { b"udp" } else { b"tcp" }
}

/// Returns whether a rule names the port, or `None` without rules.
pub(crate) fn names_port(kind: SocketKind, port: u16) -> Option<bool> {
    let rules = environment::stack_rules();
    if rules.is_empty() {
        return None;
    }
    let mut parts = rules.split(|byte| matches!(byte, b';' | b' ')).filter(|part| !part.is_empty());
    Some(parts.any(|part| {
        let Some(rest) = part.strip_prefix(protocol_name(kind)) else { return false };
        let Some(ports) = rest.strip_prefix(b":") else { return rest.is_empty() };
        ports.split(|byte| *byte == b',').any(|text| is_number(text, port))
    }))
}

fn is_number(text: &[u8], number: u16) -> bool {
    core::str::from_utf8(text).is_ok_and(|text| text.parse() == Ok(number))
}

/// Returns whether a datagram socket at an address of the stack may move to the stack. With port 0 its datagrams may
/// use any port, so a rule must name the protocol.
pub(crate) fn may_bind(kind: SocketKind, port: u16) -> bool {
    let parts = || environment::stack_rules().split(|byte| matches!(byte, b';' | b' '));
    names_port(kind, port)
        .is_none_or(|named| named || port == 0 && parts().any(|part| part.starts_with(protocol_name(kind))))
}

/// Returns whether a socket that listens on a port of all addresses also listens on the stack.
pub(crate) fn may_listen(kind: SocketKind, port: u16) -> bool {
    names_port(kind, port).unwrap_or(kind == SocketKind::OpenStream)
}

/// Reasons why a socket stays with the kernel.
pub(crate) const NEVER: &str = "loopback, multicast or broadcast";
pub(crate) const NOT_NAMED: &str = "no --only rule matches";
pub(crate) const KERNELS: &str = "an address of the kernel";

/// Returns the reason why a destination belongs to the kernel. `None` means that the stack may have it. The stack then
/// decides whether it has a route.
///
/// # Errors
/// The same as for [`is_kernel_address`].
pub(crate) fn kernel_reason(kind: SocketKind, to: SocketAddr) -> Result<Option<&'static str>, Errno> {
    let ip = to.ip();
    Ok(match ip {
        _ if ip.is_loopback() || ip.is_unspecified() => Some(NEVER),
        // A rule may name the port of a group.
        _ if ip.is_multicast() && names_port(kind, to.port()) != Some(true) => Some(NEVER),
        IpAddr::V4(ip) if ip.is_broadcast() => Some(NEVER),
        _ if names_port(kind, to.port()) == Some(false) => Some(NOT_NAMED),
        _ => is_kernel_address(ip)?.then_some(KERNELS),
    })
}

/// Returns whether an address belongs to the kernel, or is a broadcast address of a kernel interface.
///
/// The kernel's route to its own address has that address as its source. `bind` cannot test this: it succeeds for every
/// address with `ip_nonlocal_bind`, and in a namespace whose interfaces are down.
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM` or `ENOBUFS`.
pub(crate) fn is_kernel_address(ip: IpAddr) -> Result<bool, Errno> {
    let family = if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: `socket` takes no addresses.
    let fd = unsafe { sys::call(libc::SYS_socket, [family as usize, kind as usize, 0, 0, 0, 0]) };
    let fd = match sys::result(fd) {
        Ok(fd) => fd as c_int,
        Err(error @ (libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS)) => return Err(error),
        Err(_) => return Ok(false),
    };
    // Connecting a datagram socket sends nothing, so any port can be used.
    let to = SocketAddr::new(ip, DISCARD);
    let own = match address::connect(fd, to) {
        Ok(()) => address::of_kernel(fd).is_some_and(|local| local.ip() == ip),
        Err(libc::EACCES) => allow_broadcast(fd) && address::connect(fd, to).is_ok(),
        Err(_) => false,
    };
    let _ = sys::close(fd);
    Ok(own)
}

fn allow_broadcast(fd: c_int) -> bool {
    let one: c_int = 1;
    let (at, len) = ((&raw const one).cast(), size_of::<c_int>());
    // SAFETY: `one` lives until the call returns, and `len` is its size.
    unsafe { sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_BROADCAST, at, len) }.is_ok()
}
