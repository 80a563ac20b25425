//! What goes to the stack, and what stays with the kernel.
//!
//! `OFFCORE_ONLY` has parts like `tcp:80,443` or `udp:53`, separated by `;` or spaces, where a part without ports is all of
//! them. A port is the one that a program listens at, or connects to. Without it all of TCP goes to the stack, and of UDP
//! what is sent to where the stack has a way: a UDP socket that only listens stays with the kernel. Loopback and the
//! kernel's own addresses are always the kernel's.

use core::ffi::c_int;
use core::net::{IpAddr, SocketAddr};

use crate::address;
use crate::environment;
use crate::sys;
use crate::table::Kind;

fn word(kind: Kind) -> &'static [u8] {
    if kind == Kind::OpenDatagrams { b"udp" } else { b"tcp" }
}

/// Whether a rule names the port; `None` when there are no rules.
pub(crate) fn named(kind: Kind, port: u16) -> Option<bool> {
    let rules = environment::only();
    if rules.is_empty() {
        return None;
    }
    let mut parts = rules.split(|byte| matches!(byte, b';' | b' ')).filter(|part| !part.is_empty());
    Some(parts.any(|part| {
        let Some(rest) = part.strip_prefix(word(kind)) else { return false };
        let Some(ports) = rest.strip_prefix(b":") else { return rest.is_empty() };
        ports.split(|byte| *byte == b',').any(|text| is_number(text, port))
    }))
}

fn is_number(text: &[u8], number: u16) -> bool {
    core::str::from_utf8(text).is_ok_and(|text| text.parse() == Ok(number))
}

/// Whether a socket that listens at a port, of all addresses, is the stack's, too.
pub(crate) fn may_listen(kind: Kind, port: u16) -> bool {
    named(kind, port).unwrap_or(kind == Kind::OpenStream)
}

/// What keeps a socket with the kernel, in words.
pub(crate) const NEVER: &str = "loopback, multicast or broadcast";
pub(crate) const NOT_NAMED: &str = "no --only names it";
pub(crate) const KERNELS: &str = "an address of the kernel's own";

/// Why what goes to an address is the kernel's. `None`: it may be the stack's, and whether that has a way there is its own to
/// say.
pub(crate) fn keeps(kind: Kind, to: SocketAddr) -> Option<&'static str> {
    let ip = to.ip();
    match ip {
        _ if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() => Some(NEVER),
        IpAddr::V4(ip) if ip.is_broadcast() => Some(NEVER),
        _ if named(kind, to.port()) == Some(false) => Some(NOT_NAMED),
        _ if is_kernels(ip) => Some(KERNELS),
        _ => None,
    }
}

/// Whether an address is one of the kernel's own: then a socket can be bound to it.
pub(crate) fn is_kernels(ip: IpAddr) -> bool {
    let family = if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: it takes no addresses.
    let fd = unsafe { sys::call(libc::SYS_socket, [family as usize, kind as usize, 0, 0, 0, 0]) };
    let Some(fd) = c_int::try_from(fd).ok().filter(|fd| *fd >= 0) else { return false };
    let bound = address::bind(fd, SocketAddr::new(ip, 0));
    let _ = sys::close(fd);
    bound.is_ok()
}
