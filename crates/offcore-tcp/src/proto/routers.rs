//! Router discovery and stateless address autoconfiguration of an interface (RFC 4861, 6.3; RFC 4862; RFC 7559; RFC
//! 8106).
//!
//! Advertisements are not authenticated: every host on the link can send them. The interface accepts a limited number
//! per second, only from the link, and stores a limited number of routers, prefixes, addresses and name servers.

use std::net::{IpAddr, Ipv6Addr};

use arrayvec::ArrayVec;
use offcore_stats::time::{Micros, Time};
use offcore_wire::icmpv6::router::{PrefixOption, RouterOption, SOLICIT_LEN};
use offcore_wire::{RouterAdvert, RouterSolicit, ipv6};

use super::autoconf::{Autoconf, put};
use super::iface::{AddressLifetime, AddressState, Iface, Origin, Prefix, Route, link_local};
use super::ip::IpHeaders;
use super::lease::SECOND;
use super::neighbour::AdvertFlags;
use super::net::{Net, discovery};
use super::packet::{DropReason, Out, Verdict};
use super::stack::Stack;

/// Maximum number of addresses per interface.
const ADDRESSES: usize = 16;
/// The first and the maximum interval between two solicitations. The interval doubles (RFC 7559, 2).
const FIRST_WAIT: Micros = Micros::from_secs(4);
const LONGEST_WAIT: Micros = Micros::from_secs(3600);
/// An unauthenticated advertisement does not shorten the lifetime of an address below this (RFC 4862, 5.5.3).
const TWO_HOURS: Micros = Micros::from_secs(7200);
/// The minimum MTU of IPv6 (RFC 8200, 5).
const LEAST_MTU: u32 = 1280;

const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);

impl Stack {
    /// Starts autoconfiguration of an interface's IPv6 addresses and routes from router advertisements. The stack must
    /// have one worker.
    pub fn start_slaac(&mut self, now: Time, iface: u8, out: &mut Out) {
        self.net.start_slaac(now, iface, out);
    }

    /// Processes a router advertisement.
    #[cold]
    pub(super) fn router_advertised(
        &mut self,
        now: Time,
        iface: u8,
        ip: &IpHeaders,
        advert: &RouterAdvert<'_>,
        out: &mut Out,
    ) -> Verdict {
        let before = self.net.ifaces.get(usize::from(iface)).map_or(0, |iface| iface.mtu);
        let verdict = self.net.router_advertised(now, iface, ip, advert, out);
        self.fit_mtu(iface, before);
        verdict
    }
}

impl Net {
    fn start_slaac(&mut self, now: Time, number: u8, out: &mut Out) {
        let seed = self.seed ^ u64::from(number).rotate_left(40);
        let Some(iface) = self.ifaces.get(usize::from(number)) else { return };
        if self.autoconfs.iter().any(|autoconf| autoconf.iface == number) {
            return;
        }
        let own = link_local(iface.mac);
        if !iface.addresses.iter().any(|other| other.prefix.address == own.address) {
            self.add_address(now, number, own, AddressLifetime::permanent(Origin::LinkLocal), out);
        }
        self.autoconfs.push(Autoconf::new(now, number, seed));
    }

    /// Returns an interface that still waits for its first address, if there is one.
    pub(super) fn awaits_advertised_address(&self) -> Option<u8> {
        let waiting = self.autoconfs.iter().filter(|autoconf| !autoconf.has_none).find(|autoconf| {
            let all = &self.ifaces[usize::from(autoconf.iface)].addresses;
            let mut own = all.iter().filter(|own| own.life.origin == Origin::Slaac);
            own.all(|own| matches!(own.standing, AddressState::Tentative { .. }))
        });
        waiting.map(|autoconf| autoconf.iface)
    }

    /// Runs the timers of autoconfiguration.
    pub(super) fn autoconf_timers(&mut self, now: Time, out: &mut Out) {
        for at in 0..self.autoconfs.len() {
            let autoconf = &self.autoconfs[at];
            if autoconf.deadline(&self.ifaces).is_some_and(|due| due <= now) {
                let mut autoconf = self.autoconfs.remove(at);
                self.run_autoconf(now, &mut autoconf, out);
                self.autoconfs.insert(at, autoconf);
            }
        }
    }

    fn run_autoconf(&mut self, now: Time, autoconf: &mut Autoconf, out: &mut Out) {
        let number = autoconf.iface;
        if autoconf.ask.is_some_and(|due| due <= now) {
            self.solicit_routers(now, autoconf, out);
        }
        let had_routers = !autoconf.routers.is_empty();
        autoconf.routers.retain(|router| router.until > now);
        autoconf.on_link.retain(|prefix| prefix.until > now);
        autoconf.name_servers.retain(|server| server.until > now);
        if had_routers && autoconf.routers.is_empty() {
            (autoconf.ask, autoconf.wait) = (Some(now + SECOND.random(&mut autoconf.chance)), Micros::ZERO);
        }
        self.set_routes(autoconf);
        let iface = &mut self.ifaces[usize::from(number)];
        let mut gone = ArrayVec::<IpAddr, ADDRESSES>::new();
        for own in iface.addresses.iter_mut().filter(|own| own.life.origin == Origin::Slaac) {
            own.deprecated |= own.life.preferred <= now;
            if own.life.valid <= now && !gone.is_full() {
                gone.push(own.prefix.address);
            }
        }
        for address in gone {
            self.remove_address(now, number, address, out);
        }
    }

    /// Sends a router solicitation once the link-local address is valid.
    fn solicit_routers(&mut self, now: Time, autoconf: &mut Autoconf, out: &mut Out) {
        let iface = &self.ifaces[usize::from(autoconf.iface)];
        let own = link_local(iface.mac).address;
        let IpAddr::V6(from) = own else { return };
        match iface.address_state_of(own) {
            Some(AddressState::Preferred) => {}
            Some(AddressState::Tentative { until }) => {
                return autoconf.ask = Some(until.max(now + Micros::new(1)));
            }
            // Another host has the address, so the interface cannot be configured (RFC 4862, 5.4.5).
            _ => {
                (autoconf.ask, autoconf.has_none) = (None, true);
                return;
            }
        }
        let message = RouterSolicit { source_link: iface.mac };
        let station = ipv6::multicast_mac(ALL_ROUTERS);
        out.controls.push(discovery(autoconf.iface, iface.mac, station, from, ALL_ROUTERS, |bytes| {
            message.write(bytes.first_chunk_mut().expect("the buffer is longer"), from, ALL_ROUTERS);
            SOLICIT_LEN
        }));
        autoconf.wait = (autoconf.wait * 2).clamp(FIRST_WAIT, LONGEST_WAIT);
        // Plus or minus a tenth.
        let jitter = (autoconf.wait / 5).random(&mut autoconf.chance);
        autoconf.ask = Some(now + autoconf.wait - autoconf.wait / 10 + jitter);
    }

    fn router_advertised(
        &mut self,
        now: Time,
        number: u8,
        ip: &IpHeaders,
        advert: &RouterAdvert<'_>,
        out: &mut Out,
    ) -> Verdict {
        let IpAddr::V6(router) = ip.src else { return Verdict::Drop(DropReason::Malformed) };
        // The message must originate on the link (RFC 4861, 6.1.2).
        if ip.hops != 255 || !router.is_unicast_link_local() {
            return Verdict::Drop(DropReason::Malformed);
        }
        let Some(at) = self.autoconfs.iter().position(|autoconf| autoconf.iface == number) else {
            return Verdict::Consumed;
        };
        if !self.autoconfs[at].may_take(now) {
            return Verdict::Drop(DropReason::RateLimit);
        }
        let mut autoconf = self.autoconfs.remove(at);
        autoconf.take_router(now, router, advert);
        for option in advert.options() {
            self.take_option(now, &mut autoconf, router, option, out);
        }
        self.set_routes(&mut autoconf);
        let own = &self.ifaces[usize::from(number)].addresses;
        autoconf.has_none = !own.iter().any(|own| own.life.origin == Origin::Slaac);
        self.autoconfs.insert(at, autoconf);
        Verdict::Consumed
    }

    fn take_option(
        &mut self,
        now: Time,
        autoconf: &mut Autoconf,
        router: Ipv6Addr,
        option: RouterOption<'_>,
        out: &mut Out,
    ) {
        let number = autoconf.iface;
        match option {
            RouterOption::SourceLink(mac) if autoconf.has(router) => {
                let said = AdvertFlags { answer: false, replaces: true, wanted: true };
                self.learned(now, (number, router.into()), mac, said, out);
            }
            RouterOption::SourceLink(_) => {}
            RouterOption::Mtu(mtu) => {
                if let Ok(mtu) = u16::try_from(mtu.max(LEAST_MTU)) {
                    self.ifaces[usize::from(number)].set_router_mtu(mtu);
                }
            }
            RouterOption::Prefix(prefix) => self.take_prefix(now, autoconf, &prefix, out),
            RouterOption::NameServers(servers) => {
                let until = lifetime(now, servers.lifetime);
                for server in servers.addresses() {
                    put(&mut autoconf.name_servers, now, server, until);
                }
            }
        }
    }

    fn take_prefix(&mut self, now: Time, autoconf: &mut Autoconf, option: &PrefixOption, out: &mut Out) {
        let &PrefixOption { prefix, len, on_link, autonomous, valid, preferred } = option;
        if len > 128 || prefix.is_multicast() || prefix.is_unicast_link_local() {
            return;
        }
        let whole = Prefix { address: prefix.into(), len };
        let network = Prefix { address: whole.network(), len };
        if on_link {
            put(&mut autoconf.on_link, now, network, lifetime(now, valid));
        }
        // An interface identifier has 64 bits (RFC 4291, 2.5.1).
        let is_usable = autonomous && len == 64 && preferred <= valid;
        let (IpAddr::V6(network), true) = (network.address, is_usable) else { return };
        let number = autoconf.iface;
        let iface = &mut self.ifaces[usize::from(number)];
        let (preferred, until) = (lifetime(now, preferred), lifetime(now, valid));
        let address = with_identifier(network, iface);
        if let Some(own) = iface.addresses.iter_mut().find(|own| own.prefix.address == address) {
            // An advertisement does not change a static address.
            if own.life.origin == Origin::Slaac {
                own.life.preferred = preferred;
                own.deprecated = preferred <= now;
                own.life.valid = extended(now, own.life.valid, until);
            }
            return;
        }
        let own = iface.addresses.iter().filter(|own| own.life.origin == Origin::Slaac);
        if valid > 0 && own.count() < ADDRESSES {
            // The prefix determines which addresses are neighbours, the address does not (RFC 5942).
            let own = Prefix { address, len: 128 };
            let life = AddressLifetime { origin: Origin::Slaac, preferred, valid: until };
            self.add_address(now, number, own, life, out);
        }
    }

    /// Updates the interface's routes: one to each on-link prefix, and a default route through a router.
    fn set_routes(&mut self, autoconf: &mut Autoconf) {
        let iface = &mut self.ifaces[usize::from(autoconf.iface)];
        let gateway = Ipv6Addr::UNSPECIFIED.into();
        let mut routes: Vec<_> = autoconf.on_link.iter().map(|on| Route { to: on.value, gateway }).collect();
        routes.extend(autoconf.router().map(|router| Route::default_by(router.into())));
        // A static route is not removed later.
        routes.retain(|route| autoconf.routes.contains(route) || !iface.routes.contains(route));
        if routes != autoconf.routes {
            iface.routes.retain(|route| !autoconf.routes.contains(route));
            iface.routes.extend(routes.iter().copied());
            autoconf.routes = routes;
            self.routes_changed();
        }
    }

    /// Handles a neighbour that does not answer. Other routers are preferred to a silent one (RFC 4861, 6.3.6).
    pub(super) fn neighbour_is_silent(&mut self, number: u8, address: IpAddr) {
        let Some(at) = self.autoconfs.iter().position(|autoconf| autoconf.iface == number) else { return };
        let mut autoconf = self.autoconfs.remove(at);
        if let Some(router) = autoconf.routers.iter_mut().find(|router| address == router.address) {
            router.is_silent = true;
            // If all routers are silent, each is tried again.
            if autoconf.routers.iter().all(|router| router.is_silent) {
                autoconf.routers.iter_mut().for_each(|router| router.is_silent = false);
                autoconf.routers.rotate_left(1);
            }
            self.set_routes(&mut autoconf);
        }
        self.autoconfs.insert(at, autoconf);
    }
}

/// Returns the end of a lifetime. `u32::MAX` seconds stand for no end.
fn lifetime(now: Time, seconds: u32) -> Time {
    if seconds == u32::MAX { Time::NEVER } else { now + Micros::from_secs(seconds.into()) }
}

/// Returns the end of an address's lifetime after an advertisement has given another one (RFC 4862, 5.5.3).
fn extended(now: Time, valid: Time, given: Time) -> Time {
    let two_hours = now + TWO_HOURS;
    if given > two_hours || given > valid { given } else { valid.min(two_hours) }
}

/// Returns the address of an interface in a network with a prefix of 64 bits, based on its MAC address (RFC 4291,
/// Appendix A).
fn with_identifier(network: Ipv6Addr, iface: &Iface) -> IpAddr {
    let identifier = ipv6::link_local(iface.mac).to_bits() & u128::from(u64::MAX);
    Ipv6Addr::from_bits(network.to_bits() | identifier).into()
}
