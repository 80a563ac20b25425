//! Control messages of datagrams, as on Linux: `ip(7)`, `ipv6(7)`, `udp(7)`, `socket(7)`.

use core::ffi::c_int;
use core::mem;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::ptr;

use libc::{cmsghdr, in_pktinfo, in6_pktinfo, msghdr, sockaddr_in, sockaddr_in6, timespec, timeval};
use offcore_session::datagram::{Header, More, PathMtu};
use offcore_session::undelivered::Undelivered;

use crate::address::{self, End};
use crate::datagram_options::{self as options, UDP_GRO, UDP_SEGMENT, bit};
use crate::session::Session;
use crate::sys::Errno;

// Constants of `linux/in6.h` that the crate libc lacks.
const IPV6_2292PKTINFO: c_int = 2;
const IPV6_2292HOPLIMIT: c_int = 8;
const IPV6_DONTFRAG: c_int = 62;
const IPV6_ORIGDSTADDR: c_int = 74;

/// Control messages of `sendmsg`.
#[derive(Clone, Copy, Default)]
pub(crate) struct Control {
    local: Option<IpAddr>,
    index: u32,
    hops: Option<u8>,
    tos: Option<u8>,
    segment: Option<u16>,
    whole: Option<bool>,
}

impl Control {
    /// Reads the control messages of a `sendmsg` call. `v6` is the family of the socket.
    ///
    /// # Errors
    /// `EINVAL` for an unknown message, and for a wrong length or value, as on Linux.
    ///
    /// # Safety
    /// The header's `msg_control` is null, or valid for reads of `msg_controllen` bytes.
    pub(crate) unsafe fn of(header: &msghdr, v6: bool) -> Result<Self, Errno> {
        let mut all = Self::default();
        if header.msg_control.is_null() {
            return Ok(all);
        }
        let mut left = header.msg_controllen;
        let mut at = header.msg_control.cast::<u8>();
        let head = size_of::<cmsghdr>();
        while left >= head {
            // SAFETY: at least the size of a header is left, and the caller guarantees `left` readable bytes at `at`.
            let message = unsafe { at.cast::<cmsghdr>().read_unaligned() };
            let len = message.cmsg_len;
            if len < head || len > left {
                return Err(libc::EINVAL);
            }
            // SAFETY: `len` is at least `head` and at most `left`, so the address lies within the message.
            let data = Data { at: unsafe { at.add(head) }, len: len - head };
            // SAFETY: `data` is readable: it lies within the `left` bytes at `at`, which the caller guarantees.
            unsafe { all.take(message.cmsg_level, message.cmsg_type, &data, v6) }?;
            let step = len.next_multiple_of(align_of::<cmsghdr>());
            if step >= left {
                break;
            }
            left -= step;
            // SAFETY: `step` is less than `left`, so the address lies within the control messages.
            at = unsafe { at.add(step) };
        }
        Ok(all)
    }

    /// # Safety
    /// `data` is valid for reads.
    unsafe fn take(&mut self, level: c_int, kind: c_int, data: &Data, v6: bool) -> Result<(), Errno> {
        let byte = |value: c_int, least: c_int| {
            u8::try_from(value).ok().filter(|byte| c_int::from(*byte) >= least).ok_or(libc::EINVAL)
        };
        // SAFETY: the caller guarantees that `data` is readable. All types below are structures of integers.
        unsafe {
            match (level, kind) {
                // UDP ignores these messages.
                (libc::SOL_SOCKET, libc::SCM_RIGHTS | libc::SCM_CREDENTIALS) => {}
                (libc::IPPROTO_UDP, UDP_SEGMENT) => self.segment = Some(data.read::<u16>()?),
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info = data.read::<in_pktinfo>()?;
                    self.index = info.ipi_ifindex as u32;
                    self.set_local(Ipv4Addr::from(info.ipi_spec_dst.s_addr.to_ne_bytes()).into());
                }
                (libc::IPPROTO_IP, libc::IP_TTL) => self.hops = Some(byte(data.read::<c_int>()?, 1)?),
                (libc::IPPROTO_IP, libc::IP_TOS) if data.len == 1 => self.tos = Some(data.read::<u8>()?),
                (libc::IPPROTO_IP, libc::IP_TOS) => self.tos = Some(byte(data.read::<c_int>()?, 0)?),
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO | IPV6_2292PKTINFO) if v6 => {
                    let info = data.read::<in6_pktinfo>()?;
                    self.index = info.ipi6_ifindex;
                    self.set_local(Ipv6Addr::from(info.ipi6_addr.s6_addr).to_canonical());
                }
                (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT | IPV6_2292HOPLIMIT) if v6 => {
                    self.hops = number_or_default(data.read::<c_int>()?)?.or(self.hops);
                }
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) if v6 => {
                    self.tos = number_or_default(data.read::<c_int>()?)?.or(self.tos);
                }
                (libc::IPPROTO_IPV6, IPV6_DONTFRAG) if v6 => match data.read::<c_int>()? {
                    on @ (0 | 1) => self.whole = Some(on == 1),
                    _ => return Err(libc::EINVAL),
                },
                _ => return Err(libc::EINVAL),
            }
        }
        Ok(())
    }

    fn set_local(&mut self, local: IpAddr) {
        if !local.is_unspecified() {
            self.local = Some(local);
        }
    }

    /// Returns the source address, if a message has one.
    pub(crate) fn local(&self) -> Option<IpAddr> {
        self.local
    }

    /// Returns the header fields of the datagram. A control message takes precedence over the socket's option.
    pub(crate) fn header_fields(&self, session: &Session, to: IpAddr) -> More {
        let mut more = options::fields_to_send(session, to);
        more.index = self.index;
        more.hops = self.hops.unwrap_or(more.hops);
        more.tos = self.tos.unwrap_or(more.tos);
        more.segment = self.segment.unwrap_or(more.segment);
        match self.whole {
            Some(true) if to.is_ipv6() => more.path_mtu = PathMtu::Do as u8,
            _ => {}
        }
        more
    }
}

/// Converts a number from 0 to 255. -1 selects the default.
fn number_or_default(value: c_int) -> Result<Option<u8>, Errno> {
    match value {
        -1 => Ok(None),
        value => u8::try_from(value).map(Some).map_err(|_| libc::EINVAL),
    }
}

/// The data of a control message.
struct Data {
    at: *const u8,
    len: usize,
}

impl Data {
    /// # Safety
    /// The data is valid for reads, and `T` is a structure of integers.
    unsafe fn read<T: Copy>(&self) -> Result<T, Errno> {
        if self.len != size_of::<T>() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the data has the size of `T`, as checked, and is readable, as the caller guarantees. Any bytes are a
        // valid `T`.
        Ok(unsafe { self.at.cast::<T>().read_unaligned() })
    }
}

/// A program's buffer for control messages.
struct Room {
    at: *mut u8,
    left: usize,
    used: usize,
    cut: bool,
}

impl Room {
    /// Appends a message. It is truncated if the buffer is too short.
    ///
    /// # Safety
    /// `at` is valid for writes of `left` bytes.
    unsafe fn put<T: Copy>(&mut self, level: c_int, kind: c_int, value: T) {
        let head = size_of::<cmsghdr>();
        if self.left < head {
            self.cut = true;
            return;
        }
        let whole = head + size_of::<T>();
        let len = whole.min(self.left);
        self.cut |= len < whole;
        // SAFETY: the structure consists of integers, for which all zeros are valid.
        let mut header: cmsghdr = unsafe { mem::zeroed() };
        (header.cmsg_len, header.cmsg_level, header.cmsg_type) = (len as _, level, kind);
        let step = whole.next_multiple_of(align_of::<cmsghdr>()).min(self.left);
        // SAFETY: `len` and `step` are at most `left`, and the caller guarantees that `left` bytes are writable.
        unsafe {
            self.at.cast::<cmsghdr>().write_unaligned(header);
            // copy-ok: a control message
            ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), self.at.add(head), len - head);
            self.at = self.at.add(step);
        }
        self.left -= step;
        self.used += step;
    }
}

/// Writes the control messages of a received datagram in the order of Linux. `segment` is the length of each datagram
/// that `UDP_GRO` has joined.
///
/// # Safety
/// The header's `msg_control` is null, or valid for writes of `msg_controllen` bytes.
pub(crate) unsafe fn tell(session: &Session, header: &mut msghdr, of: &Header, segment: Option<u16>) {
    let port = address::of(session.slot, End::Ours).port();
    let bits = options::bits(session);
    let times = options::wants_software_timestamps(session);
    if bits & bit::TOLD == 0 && !times {
        header.msg_controllen = 0;
        return;
    }
    let left = if header.msg_control.is_null() { 0 } else { header.msg_controllen };
    let mut room = Room { at: header.msg_control.cast(), left, used: 0, cut: false };
    // SAFETY: `room` describes the header's control buffer, which the caller guarantees to be writable.
    unsafe {
        tell_of_socket(&mut room, &of.more, bits, times);
        if let Some(segment) = segment {
            room.put(libc::IPPROTO_UDP, UDP_GRO, c_int::from(segment));
        }
        match of.local {
            IpAddr::V4(local) => tell_of_v4(&mut room, &of.more, bits, local, port),
            IpAddr::V6(local) => tell_of_v6(&mut room, &of.more, bits, local, port),
        }
    }
    header.msg_controllen = room.used as _;
    header.msg_flags |= if room.cut { libc::MSG_CTRUNC } else { 0 };
}

/// Writes the control message of an error: `struct sock_extended_err`, and the address of the node that sent the error.
///
/// # Safety
/// The header's `msg_control` is null, or valid for writes of `msg_controllen` bytes.
pub(crate) unsafe fn tell_error(header: &mut msghdr, error: &Undelivered, v6: bool) {
    let left = if header.msg_control.is_null() { 0 } else { header.msg_controllen };
    let mut room = Room { at: header.msg_control.cast(), left, used: 0, cut: false };
    let ee = libc::sock_extended_err {
        ee_errno: error.error,
        ee_origin: error.origin as u8,
        ee_type: error.kind,
        ee_code: error.code,
        ee_pad: 0,
        ee_info: error.info,
        ee_data: 0,
    };
    // SAFETY: the structures consist of integers, for which all zeros are valid. `room` describes the header's control
    // buffer, which the caller guarantees to be writable.
    unsafe {
        if v6 {
            let mut offender: sockaddr_in6 = mem::zeroed();
            if let Some(ip) = error.offender {
                let ip = match ip {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                };
                offender.sin6_family = libc::AF_INET6 as _;
                offender.sin6_addr.s6_addr = ip.octets();
            }
            room.put(libc::IPPROTO_IPV6, libc::IPV6_RECVERR, (ee, offender));
        } else {
            let mut offender: sockaddr_in = mem::zeroed();
            if let Some(IpAddr::V4(ip)) = error.offender {
                offender.sin_family = libc::AF_INET as _;
                offender.sin_addr.s_addr = u32::from_ne_bytes(ip.octets());
            }
            room.put(libc::IPPROTO_IP, libc::IP_RECVERR, (ee, offender));
        }
    }
    header.msg_controllen = room.used as _;
    header.msg_flags |= libc::MSG_ERRQUEUE | if room.cut { libc::MSG_CTRUNC } else { 0 };
}

/// # Safety
/// The buffer of `room` is valid for writes.
unsafe fn tell_of_socket(room: &mut Room, more: &More, bits: u32, times: bool) {
    let (seconds, micros) = ((more.time / 1_000_000) as i64, (more.time % 1_000_000) as i64);
    let time = timespec { tv_sec: seconds, tv_nsec: micros * 1000 };
    // SAFETY: the caller guarantees that the buffer of `room` is writable.
    unsafe {
        if bits & bit::TIMESTAMP != 0 {
            let time = timeval { tv_sec: seconds, tv_usec: micros };
            room.put(libc::SOL_SOCKET, libc::SO_TIMESTAMP, time);
        }
        if bits & bit::TIMESTAMPNS != 0 {
            room.put(libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, time);
        }
        if times {
            let none = timespec { tv_sec: 0, tv_nsec: 0 };
            room.put(libc::SOL_SOCKET, libc::SO_TIMESTAMPING, [time, none, none]);
        }
        if bits & bit::LOST != 0 && more.lost > 0 {
            room.put(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, more.lost);
        }
    }
}

/// # Safety
/// The buffer of `room` is valid for writes.
unsafe fn tell_of_v4(room: &mut Room, more: &More, bits: u32, local: Ipv4Addr, port: u16) {
    let index = more.index as c_int;
    let address = libc::in_addr { s_addr: u32::from_ne_bytes(local.octets()) };
    // SAFETY: the caller guarantees that the buffer of `room` is writable. All values are structures of integers.
    unsafe {
        if bits & bit::PKTINFO6 != 0 {
            let ipi6_addr = libc::in6_addr { s6_addr: local.to_ipv6_mapped().octets() };
            let info = in6_pktinfo { ipi6_addr, ipi6_ifindex: index as _ };
            room.put(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
        }
        if bits & bit::PKTINFO != 0 {
            let own = more.own.unwrap_or(local);
            let ipi_spec_dst = libc::in_addr { s_addr: u32::from_ne_bytes(own.octets()) };
            let info = in_pktinfo { ipi_ifindex: index, ipi_spec_dst, ipi_addr: address };
            room.put(libc::IPPROTO_IP, libc::IP_PKTINFO, info);
        }
        if bits & bit::TTL != 0 {
            room.put(libc::IPPROTO_IP, libc::IP_TTL, c_int::from(more.hops));
        }
        if bits & bit::TOS != 0 {
            room.put(libc::IPPROTO_IP, libc::IP_TOS, more.tos);
        }
        if bits & bit::ORIGINAL != 0 {
            let mut name: sockaddr_in = mem::zeroed();
            name.sin_family = libc::AF_INET as _;
            (name.sin_port, name.sin_addr) = (port.to_be(), address);
            room.put(libc::IPPROTO_IP, libc::IP_ORIGDSTADDR, name);
        }
    }
}

/// # Safety
/// The buffer of `room` is valid for writes.
unsafe fn tell_of_v6(room: &mut Room, more: &More, bits: u32, local: Ipv6Addr, port: u16) {
    let address = libc::in6_addr { s6_addr: local.octets() };
    // SAFETY: the caller guarantees that the buffer of `room` is writable. All values are structures of integers.
    unsafe {
        if bits & bit::PKTINFO6 != 0 {
            let info = in6_pktinfo { ipi6_addr: address, ipi6_ifindex: more.index as _ };
            room.put(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
        }
        if bits & bit::HOPLIMIT != 0 {
            room.put(libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, c_int::from(more.hops));
        }
        if bits & bit::TCLASS != 0 {
            room.put(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, c_int::from(more.tos));
        }
        if bits & bit::ORIGINAL6 != 0 {
            let mut name: sockaddr_in6 = mem::zeroed();
            name.sin6_family = libc::AF_INET6 as _;
            (name.sin6_port, name.sin6_addr) = (port.to_be(), address);
            room.put(libc::IPPROTO_IPV6, IPV6_ORIGDSTADDR, name);
        }
    }
}
