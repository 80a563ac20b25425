//! The addresses and ports that sessions may use. The wildcard address overlaps with every address. As in Linux, a
//! request is refused if its address and port overlap with another session's. So connections and datagrams for one user
//! never reach another.

use std::net::IpAddr;

use offcore_tcp::proto::overlap;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::Serve;
use super::ports::ANY;
use super::session::{Listener, Session, SessionKind};
use crate::host::Calls;

/// The first port that is not privileged.
const UNPRIVILEGED: u16 = 1024;
/// Maximum number of sessions with a port per user: half the number of ephemeral ports.
const OF_USER: usize = (*ANY.end() - *ANY.start()) as usize / 2;
/// Maximum number of such sessions per user at one port.
const AT_PORT: usize = 1024;
/// Number of ports that are tried if every port is in use, possibly with another address.
const TRIES: usize = 64;

impl Serve {
    /// Checks whether an application may use a port. Ports below 1024 are reserved for root, as in the kernel, and for
    /// the stack's own user. The number of ports per user is limited, so that other users find free ports.
    pub(super) fn may_bind(&self, app: usize, port: u16) -> Result<(), Errno> {
        let user = self.registry.user_of(app);
        let may = port == 0
            || port >= UNPRIVILEGED
            || user.is_some_and(|user| user == 0 || user == self.admission.user);
        if !may {
            return Err(Errno::ACCESS);
        }
        let same = (0..self.registry.apps.len()).filter(|app| self.registry.user_of(*app) == user);
        let has: usize = same.map(|app| self.ports.used.count(app) + self.ports.bound.count(app)).sum();
        let mut here = self.ports.used.at(port).filter(|(app, _)| self.registry.user_of(*app) == user);
        if has >= OF_USER || here.nth(AT_PORT - 1).is_some() { Err(Errno::NOBUFS) } else { Ok(()) }
    }

    /// Returns the port for a stream: the requested one, or a free one. `listens` is `None` for `bind`. For `listen` it
    /// has the `SO_REUSEPORT` flag and the cookie of the kernel's listener.
    pub(super) fn stream_port(
        &self,
        app: usize,
        address: Option<IpAddr>,
        port: u16,
        listens: Option<(bool, u64)>,
    ) -> Result<u16, Errno> {
        let user = self.registry.user_of(app);
        if port != 0 {
            // Several sessions may be bound to the port; the first that listens gets it. As in Linux, only sessions of
            // the same user can share it. Processes that share a kernel listener share its port.
            let (shares, cookie) = listens.unwrap_or((true, 0));
            let shared = |listener: &Listener| {
                listener.shares && shares || listener.cookie != 0 && listener.cookie == cookie
            };
            let has = |(other, what): (usize, &SessionKind)| {
                matches!(what, SessionKind::Listener(listener) if overlap(listener.address, address)
                    && !(shared(listener) && self.registry.user_of(other) == user))
            };
            return if self.at(port).any(has) { Err(Errno::ADDRINUSE) } else { Ok(port) };
        }
        let bound = |port| self.ports.bound.at(port).filter_map(|(app, number)| self.what(app, number));
        self.any_port(|port| {
            self.at(port).map(|(_, what)| what).chain(bound(port)).any(|what| match what {
                SessionKind::Bound(other, _) => overlap(*other, address),
                SessionKind::Listener(listener) => overlap(listener.address, address),
                _ => false,
            })
        })
    }

    /// Selects a port for a datagram socket. The stack checks requested ports.
    pub(super) fn datagram_port(&self, address: Option<IpAddr>, calls: &Calls<'_>) -> Result<u16, Errno> {
        let has = |what: &SessionKind| {
            let conn = if let SessionKind::Datagrams(conn) = what { Some(*conn) } else { None };
            let found = conn.and_then(|conn| calls.stack.datagram_address(conn));
            found.is_some_and(|(other, _)| overlap(other, address))
        };
        self.any_port(|port| self.at(port).any(|(_, what)| has(what)))
    }

    /// Selects a random port, so that it is not predictable: an unused port, or else a port that is not `taken`.
    fn any_port(&self, taken: impl Fn(u16) -> bool) -> Result<u16, Errno> {
        let mut bytes = [0; 4];
        getrandom(&mut bytes, GetRandomFlags::NONBLOCK)?;
        let from = u32::from_ne_bytes(bytes) as usize % ANY.len();
        if let Some(port) = self.ports.used.free(&self.ports.bound, ANY.start() + from as u16) {
            return Ok(port);
        }
        ANY.cycle().skip(from).take(TRIES).find(|port| !taken(*port)).ok_or(Errno::ADDRINUSE)
    }

    /// Listeners and datagram sockets at a port, with the index of their application.
    fn at(&self, port: u16) -> impl Iterator<Item = (usize, &SessionKind)> {
        self.ports.used.at(port).filter_map(|(app, number)| Some((app, self.what(app, number)?)))
    }

    fn what(&self, app: usize, number: u32) -> Option<&SessionKind> {
        let application = self.registry.apps.get(app)?.as_deref()?;
        application.session(number).map(Session::kind)
    }
}
