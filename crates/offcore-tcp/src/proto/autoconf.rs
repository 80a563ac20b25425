//! The state of an interface's router discovery and address autoconfiguration.

use std::net::{IpAddr, Ipv6Addr};

use arrayvec::ArrayVec;
use offcore_stats::SplitMix;
use offcore_stats::time::{Micros, Time};
use offcore_wire::RouterAdvert;
use offcore_wire::icmpv6::router::Preference;

use super::iface::{Iface, Origin, Prefix, Route};

/// Limits of the state of one interface.
const ROUTERS: usize = 8;
const PREFIXES: usize = 16;
const NAME_SERVERS: usize = 8;
/// Maximum number of advertisements processed per second.
const ADVERTS: u8 = 16;

/// A default router.
#[derive(Debug, Clone, Copy)]
pub(super) struct Router {
    pub address: Ipv6Addr,
    preference: Preference,
    pub until: Time,
    /// It has not answered the last neighbour solicitations.
    pub is_silent: bool,
}

/// A value from an advertisement, and its expiry time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timed<T> {
    pub value: T,
    pub until: Time,
}

/// The autoconfiguration of one interface.
#[derive(Debug)]
pub(crate) struct Autoconf {
    pub iface: u8,
    pub(super) routers: ArrayVec<Router, ROUTERS>,
    pub(super) on_link: ArrayVec<Timed<Prefix>, PREFIXES>,
    pub(super) name_servers: ArrayVec<Timed<Ipv6Addr>, NAME_SERVERS>,
    /// The routes that the interface has because of it.
    pub(super) routes: Vec<Route>,
    /// Time of the next router solicitation, and the interval before it.
    pub(super) ask: Option<Time>,
    pub(super) wait: Micros,
    /// The second of the last advertisement, and the number of advertisements in that second.
    taken: (u64, u8),
    /// The interface gets no address: its link-local address is a duplicate, or the last advertisement offered none.
    pub(super) has_none: bool,
    pub(super) chance: SplitMix,
}

impl Autoconf {
    pub(super) fn new(now: Time, iface: u8, seed: u64) -> Self {
        Self {
            iface,
            routers: ArrayVec::new(),
            on_link: ArrayVec::new(),
            name_servers: ArrayVec::new(),
            routes: Vec::new(),
            ask: Some(now),
            wait: Micros::ZERO,
            taken: (0, 0),
            has_none: false,
            chance: SplitMix::new(seed),
        }
    }

    /// Returns the time of the next timer.
    pub(super) fn deadline(&self, ifaces: &[Iface]) -> Option<Time> {
        let routers = self.routers.iter().map(|router| router.until);
        let on_link = self.on_link.iter().map(|prefix| prefix.until);
        let servers = self.name_servers.iter().map(|server| server.until);
        let addresses =
            ifaces.get(usize::from(self.iface)).map(|iface| &iface.addresses[..]).unwrap_or_default();
        let own = addresses.iter().filter(|own| own.life.origin == Origin::Slaac);
        let own = own
            .flat_map(|own| [own.life.valid, if own.deprecated { Time::NEVER } else { own.life.preferred }]);
        let all = routers.chain(on_link).chain(servers).chain(own).chain(self.ask);
        all.min().filter(|due| *due != Time::NEVER)
    }

    /// Returns the name servers from router advertisements.
    pub(super) fn name_servers(&self) -> impl Iterator<Item = IpAddr> {
        self.name_servers.iter().map(|server| server.value.into())
    }

    /// Returns whether an advertisement may be processed now.
    pub(super) fn may_take(&mut self, now: Time) -> bool {
        let (second, count) = &mut self.taken;
        if *second != now.as_secs() {
            (*second, *count) = (now.as_secs(), 0);
        }
        *count = count.saturating_add(1);
        *count <= ADVERTS
    }

    pub(super) fn has(&self, router: Ipv6Addr) -> bool {
        self.routers.iter().any(|known| known.address == router)
    }

    pub(super) fn take_router(&mut self, now: Time, address: Ipv6Addr, advert: &RouterAdvert<'_>) {
        let until = now + Micros::from_secs(advert.lifetime.into());
        let router = Router { address, preference: advert.preference, until, is_silent: false };
        match self.routers.iter().position(|router| router.address == address) {
            Some(at) if advert.lifetime == 0 => {
                self.routers.remove(at);
            }
            Some(at) => self.routers[at] = router,
            None if advert.lifetime > 0 && !self.routers.is_full() => self.routers.push(router),
            None => {}
        }
        // Solicitations end with a default router (RFC 7559, 2.1).
        if !self.routers.is_empty() {
            (self.ask, self.wait) = (None, Micros::ZERO);
        }
    }

    /// Returns the gateway of the default route: the answering router with the highest preference, or the first of
    /// equal ones.
    pub(super) fn router(&self) -> Option<Ipv6Addr> {
        let all = self.routers.iter().rev();
        all.max_by_key(|router| (!router.is_silent, router.preference)).map(|router| router.address)
    }
}

/// Stores a value until a time, if there is room. A time in the past removes the value.
pub(super) fn put<T: PartialEq, const N: usize>(
    all: &mut ArrayVec<Timed<T>, N>,
    now: Time,
    value: T,
    until: Time,
) {
    match all.iter().position(|known| known.value == value) {
        Some(at) if until <= now => {
            all.remove(at);
        }
        Some(at) => all[at].until = until,
        None if until > now && !all.is_full() => all.push(Timed { value, until }),
        None => {}
    }
}
