//! Which addresses and ports a session may have. All addresses overlap with each one, and what overlaps with what somebody has is
//! refused, as in Linux: one user's connections and datagrams do not come to another.

use std::net::IpAddr;

use offcore_tcp::proto::overlap;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::Serve;
use super::ports::ANY;
use super::session::{Listener, What};
use crate::host::Calls;

/// The first port that everybody may have.
const UNPRIVILEGED: u16 = 1024;
/// Sessions of one user that have a port, at most: half of those that are chosen from.
const OF_USER: usize = (*ANY.end() - *ANY.start()) as usize / 2;
/// Those of them at one port, at most.
const AT_PORT: usize = 1024;
/// Ports that are tried where somebody has each of them, perhaps with another address.
const TRIES: usize = 64;

impl Serve {
    /// Ports below 1024 are for root, as in the kernel, and for the stack's own user. No user has so many that others find none.
    pub(super) fn may_bind(&self, app: usize, port: u16) -> Result<(), Errno> {
        let user = self.user_of(app);
        let may =
            port == 0 || port >= UNPRIVILEGED || user.is_some_and(|user| user == 0 || user == self.user);
        if !may {
            return Err(Errno::ACCESS);
        }
        let same = (0..self.apps.len()).filter(|app| self.user_of(*app) == user);
        let has: usize = same.map(|app| self.ports.count(app) + self.bound.count(app)).sum();
        let mut here = self.ports.at(port).filter(|(app, _)| self.user_of(*app) == user);
        if has >= OF_USER || here.nth(AT_PORT - 1).is_some() { Err(Errno::NOBUFS) } else { Ok(()) }
    }

    /// The port of a stream: the requested one, or a free one. `listens` is set by `listen`: whether it shares the port, and the
    /// cookie of the kernel's listener.
    pub(super) fn stream_port(
        &self,
        app: usize,
        address: Option<IpAddr>,
        port: u16,
        listens: Option<(bool, u64)>,
    ) -> Result<u16, Errno> {
        let user = self.user_of(app);
        if port != 0 {
            // Others may have bound it, too: who listens first has it. It is shared among one user's, as in Linux.
            // Processes that share a kernel listener share its port.
            let (shares, cookie) = listens.unwrap_or((true, 0));
            let shared = |listener: &Listener| {
                listener.shares && shares || listener.cookie != 0 && listener.cookie == cookie
            };
            let has = |(other, what): (usize, &What)| {
                matches!(what, What::Listener(listener) if overlap(listener.address, address)
                    && !(shared(listener) && self.user_of(other) == user))
            };
            return if self.at(port).any(has) { Err(Errno::ADDRINUSE) } else { Ok(port) };
        }
        let bound = |port| self.bound.at(port).filter_map(|(app, number)| self.what(app, number));
        self.any_port(|port| {
            self.at(port).map(|(_, what)| what).chain(bound(port)).any(|what| match what {
                What::Bound(other, _) => overlap(*other, address),
                What::Listener(listener) => overlap(listener.address, address),
                _ => false,
            })
        })
    }

    /// Selects a port for a datagram socket. The stack checks requested ports.
    pub(super) fn datagram_port(&self, address: Option<IpAddr>, calls: &Calls<'_>) -> Result<u16, Errno> {
        let has = |what: &What| {
            let conn = if let What::Datagrams(conn) = what { Some(*conn) } else { None };
            let found = conn.and_then(|conn| calls.stack.datagram_address(conn));
            found.is_some_and(|(other, _)| overlap(other, address))
        };
        self.any_port(|port| self.at(port).any(|(_, what)| has(what)))
    }

    /// A port that nobody is to know in advance: one that nobody has, or else one that is not `taken`.
    fn any_port(&self, taken: impl Fn(u16) -> bool) -> Result<u16, Errno> {
        let mut bytes = [0; 4];
        getrandom(&mut bytes, GetRandomFlags::NONBLOCK)?;
        let from = u32::from_ne_bytes(bytes) as usize % ANY.len();
        if let Some(port) = self.ports.free(&self.bound, ANY.start() + from as u16) {
            return Ok(port);
        }
        ANY.cycle().skip(from).take(TRIES).find(|port| !taken(*port)).ok_or(Errno::ADDRINUSE)
    }

    pub(super) fn user_of(&self, app: usize) -> Option<u32> {
        self.apps.get(app)?.as_deref().map(|app| app.user)
    }

    /// Listeners and datagram sockets that have a port, and the applications that they are of.
    fn at(&self, port: u16) -> impl Iterator<Item = (usize, &What)> {
        self.ports.at(port).filter_map(|(app, number)| Some((app, self.what(app, number)?)))
    }

    fn what(&self, app: usize, number: u32) -> Option<&What> {
        let application = self.apps.get(app)?.as_deref()?;
        application.session(number).map(|session| &session.what)
    }
}
