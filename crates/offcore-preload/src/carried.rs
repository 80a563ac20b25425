//! Options that a session takes over from the kernel socket that it replaces.

use core::ffi::c_int;
use core::sync::atomic::Ordering;

use offcore_session::slot::wish;

use crate::datagram_options;
use crate::memberships;
use crate::session::Session;
use crate::sys;
use crate::table::{Entry, SocketKind};

/// Options of datagram sockets that the slot stores by name.
const KEPT: [(c_int, c_int); 6] = [
    (libc::SOL_SOCKET, libc::SO_BROADCAST),
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
    (libc::IPPROTO_IP, libc::IP_MULTICAST_IF),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF),
];

/// Options of a kernel socket that a session supports, too.
pub(crate) struct CarriedOptions {
    wishes: u32,
    keep: [c_int; 3],
    told: u32,
    /// Options of a datagram socket, stored instead of `keep`.
    datagrams: Option<[u32; 4]>,
    /// Values of the options in [`KEPT`].
    kept: [c_int; KEPT.len()],
}

impl CarriedOptions {
    /// Reads the options of `fd`. Copies options that the kernel applies to `end`.
    pub(crate) fn of(fd: c_int, entry: Entry, end: c_int) -> Self {
        let mut wishes = 0;
        let none = libc::linger { l_onoff: 0, l_linger: 0 };
        let linger = sys::socket_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, none).unwrap_or(none);
        for (bit, on) in [
            (wish::NO_DELAY, sys::int_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY) != 0),
            (wish::CORK, sys::int_option(fd, libc::IPPROTO_TCP, libc::TCP_CORK) != 0),
            (wish::KEEP_ALIVE, sys::int_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE) != 0),
            (wish::RESET, linger.l_onoff != 0 && linger.l_linger == 0),
        ] {
            wishes |= if on { bit } else { 0 };
        }
        let keep = [libc::TCP_KEEPIDLE, libc::TCP_KEEPINTVL, libc::TCP_KEEPCNT];
        let keep = keep.map(|name| sys::int_option(fd, libc::IPPROTO_TCP, name));
        // Accepted sockets inherit the timeouts.
        let told = if copy_times(fd, end) { wish::TIMED } else { 0 };
        let datagrams = entry.kind == SocketKind::OpenDatagrams;
        let datagrams = datagrams.then(|| datagram_options::of_kernel(fd, entry.v6));
        let kept = KEPT.map(|(level, name)| match level {
            libc::IPPROTO_IPV6 if !entry.v6 => 0,
            _ => sys::int_option(fd, level, name),
        });
        Self { wishes, keep, told, datagrams, kept }
    }

    pub(crate) fn give(&self, session: &Session) {
        let wishes = &session.slot.wishes;
        let [idle, interval, count] = self.keep;
        wishes.keep_idle.store(idle as u32, Ordering::Relaxed);
        wishes.keep_interval.store(interval as u32, Ordering::Relaxed);
        wishes.keep_count.store(count as u32, Ordering::Relaxed);
        if let Some(options) = self.datagrams {
            datagram_options::store_values(session, options);
            for ((level, name), value) in KEPT.into_iter().zip(self.kept).filter(|(_, value)| *value != 0) {
                if memberships::has_interface(level, name, value) {
                    session.slot.kept.set(datagram_options::kept_name(level, name), value as u32);
                }
            }
        }
        wishes.told.fetch_or(self.told, Ordering::AcqRel);
        if self.wishes != 0 {
            wishes.options.fetch_or(self.wishes, Ordering::AcqRel);
            session.slot.inherit_cork();
            session.mark();
        }
    }
}

/// Copies the timeouts of a socket (`SO_RCVTIMEO`, `SO_SNDTIMEO`). Returns whether it has any.
pub(crate) fn copy_times(from: c_int, to: c_int) -> bool {
    let mut any = false;
    for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
        let time = sys::socket_option(from, libc::SOL_SOCKET, name, zero);
        if let Some(time) = time.filter(|time| time.tv_sec != 0 || time.tv_usec != 0) {
            let (at, len) = ((&raw const time).cast(), size_of::<libc::timeval>());
            // SAFETY: `time` lives until the call returns, and `len` is its size.
            let _ = unsafe { sys::setsockopt(to, libc::SOL_SOCKET, name, at, len) };
            any = true;
        }
    }
    any
}
