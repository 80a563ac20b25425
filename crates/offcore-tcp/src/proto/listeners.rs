//! Listeners: addresses and ports that accept connections.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::addr::{AppId, ConnId, any_like};
use super::config::Buffers;
use super::options::ConnOptions;

/// An address and port that accepts connections.
#[derive(Debug)]
pub(super) struct Listener {
    /// The application that owns the connections.
    pub app: AppId,
    /// The application's user, if known.
    pub user: Option<u32>,
    /// `None` stands for all addresses; 0.0.0.0 and `::` for all addresses of one family.
    pub address: Option<IpAddr>,
    pub port: u16,
    /// Other listeners of the same application or user may have the same address and port.
    pub reuse_port: bool,
    /// Maximum number of half-open connections, and of connections to accept.
    pub backlog: usize,
    pub half_open: usize,
    pub accept: VecDeque<ConnId>,
    /// Buffer sizes of its connections.
    pub buffers: Buffers,
    /// Initial options of its connections.
    pub options: ConnOptions,
}

/// Maximum number of half-open connections. Users with listeners get equal shares. If a share shrinks, its existing
/// connections stay.
const HALVES: usize = 1 << 16;

/// A user that has listeners.
#[derive(Debug, Default)]
struct User {
    listeners: usize,
    half_open: usize,
}

/// The wildcards of each family, which overlap with the wildcard of both families.
const ALL_OF_ONE: [Option<IpAddr>; 2] =
    [Some(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), Some(IpAddr::V6(Ipv6Addr::UNSPECIFIED))];

/// Listeners by address and port.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    /// Several listeners at one address and port all allow sharing.
    by_address: HashMap<(Option<IpAddr>, u16), Vec<u32>>,
    all: Vec<Option<Listener>>,
    /// The users of all listeners.
    users: HashMap<Option<u32>, User>,
}

impl Listeners {
    /// Adds a listener. Returns `None` if the address and port are taken by a listener that does not share them.
    pub(super) fn insert(&mut self, listener: Listener) -> Option<u32> {
        let port = listener.port;
        let clashes: &[Option<IpAddr>] = match listener.address {
            None => &ALL_OF_ONE,
            Some(ip) if ip.is_unspecified() => &[None],
            Some(_) => &[],
        };
        if clashes.iter().any(|other| self.by_address.contains_key(&(*other, port))) {
            return None;
        }
        let here = self.by_address.entry((listener.address, port)).or_default();
        // All listeners at this address and port have the same properties.
        if let Some(&other) = here.first() {
            let other = self.all.get(other as usize)?.as_ref()?;
            let same_user = other.user.is_some() && other.user == listener.user;
            let same = other.app == listener.app || same_user;
            if !(other.reuse_port && listener.reuse_port && same) {
                return None;
            }
        }
        let free = self.all.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() - 1
        });
        here.push(index as u32);
        self.users.entry(listener.user).or_default().listeners += 1;
        self.all[index] = Some(listener);
        Some(index as u32)
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<Listener> {
        let listener = self.all.get_mut(index as usize)?.take()?;
        let key = (listener.address, listener.port);
        if let Some(here) = self.by_address.get_mut(&key) {
            here.retain(|other| *other != index);
            if here.is_empty() {
                self.by_address.remove(&key);
            }
        }
        if let Some(user) = self.users.get_mut(&listener.user) {
            user.listeners -= 1;
            user.half_open -= listener.half_open;
            if user.listeners == 0 {
                self.users.remove(&listener.user);
            }
        }
        Some(listener)
    }

    /// Returns whether a listener may have one more half-open connection: its queue has room, and its user has less
    /// than an equal share.
    pub(super) fn may_half_open(&self, index: u32) -> bool {
        let Some(listener) = self.get(index) else { return false };
        let Some(user) = self.users.get(&listener.user) else { return false };
        listener.half_open < listener.backlog && user.half_open < HALVES / self.users.len()
    }

    /// Counts a new half-open connection of a listener.
    pub(super) fn enter_half(&mut self, index: u32) {
        self.count_half(index, |half_open| *half_open += 1);
    }

    /// Counts the end of a half-open connection. The listener may no longer exist.
    pub(super) fn leave_half(&mut self, index: u32) {
        self.count_half(index, |half_open| *half_open -= 1);
    }

    fn count_half(&mut self, index: u32, count: impl Fn(&mut usize)) {
        let Some(Some(listener)) = self.all.get_mut(index as usize) else { return };
        count(&mut listener.half_open);
        self.users.get_mut(&listener.user).into_iter().for_each(|user| count(&mut user.half_open));
    }

    /// Returns the listener for connections to an address. A listener of the address has precedence over a wildcard of
    /// its family, which has precedence over the wildcard of both families. `choose` selects among several listeners:
    /// it returns an index below their number.
    pub(super) fn find(
        &self,
        address: IpAddr,
        port: u16,
        choose: impl FnOnce(usize) -> usize,
    ) -> Option<u32> {
        let at = |address| self.by_address.get(&(address, port));
        match &at(Some(address)).or_else(|| at(Some(any_like(address)))).or_else(|| at(None))?[..] {
            [one] => Some(*one),
            several => several.get(choose(several.len())).copied(),
        }
    }

    /// Returns whether any address has a listener at a port.
    pub(super) fn has_port(&self, port: u16) -> bool {
        self.by_address.keys().any(|(_, taken)| *taken == port)
    }

    pub(super) fn get(&self, index: u32) -> Option<&Listener> {
        self.all.get(index as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut Listener> {
        self.all.get_mut(index as usize)?.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listener_lookup_matches_family() {
        let mut listeners = Listeners::default();
        let mut listen = |address: Option<&str>, port| {
            let address = address.map(|address| address.parse().unwrap());
            let accept = VecDeque::new();
            let app = AppId::OWN;
            listeners.insert(Listener {
                app,
                user: None,
                address,
                port,
                reuse_port: false,
                backlog: 1,
                half_open: 0,
                accept,
                buffers: Buffers::default(),
                options: ConnOptions::default(),
            })
        };
        let [four, six, own] = ["0.0.0.0", "::", "10.0.0.2"].map(|address| listen(Some(address), 7).unwrap());
        assert_eq!((listen(None, 7), listen(Some("::"), 7)), (None, None));
        let all = listen(None, 8).unwrap();
        assert_eq!((listen(Some("0.0.0.0"), 8), listen(Some("::"), 8)), (None, None));
        let other = listen(Some("fd00::2"), 8).unwrap();
        let only = listen(Some("::"), 9).unwrap();
        let found = |address: &str, port| listeners.find(address.parse().unwrap(), port, |_| 0);
        assert_eq!(
            [found("10.0.0.1", 7), found("10.0.0.2", 7), found("fd00::1", 7)],
            [four, own, six].map(Some)
        );
        assert_eq!(
            [found("10.0.0.1", 8), found("fd00::1", 8), found("fd00::2", 8)],
            [all, all, other].map(Some)
        );
        assert_eq!([found("10.0.0.1", 9), found("fd00::1", 9)], [None, Some(only)]);
    }
}
