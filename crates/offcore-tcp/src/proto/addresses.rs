//! Addition and removal of own addresses and routes at run time.
//!
//! When an address is removed, its connections stay. As on Linux, they send nothing until the host has the address
//! again, and otherwise time out.

use std::net::{IpAddr, Ipv6Addr};

use offcore_stats::time::Time;
use offcore_wire::ipv6;

use super::iface::{AddressLifetime, AddressState, OwnAddress, Prefix};
use super::net::{DETECTION, Net, solicitation};
use super::packet::{Event, Out};
use super::tcb::Tcb;

impl Net {
    /// Adds an address to an interface, and detects whether another host has it (RFC 4862, 5.4; RFC 5227).
    pub(super) fn add_address(
        &mut self,
        now: Time,
        number: u8,
        prefix: Prefix,
        life: AddressLifetime,
        out: &mut Out,
    ) {
        let runs_neighbour_protocols = self.runs_neighbour_protocols();
        let iface = &mut self.ifaces[usize::from(number)];
        let mut own = OwnAddress::new(prefix, life);
        match prefix.address {
            IpAddr::V4(_) => own.probe(now),
            IpAddr::V6(address) => {
                own.standing = AddressState::Tentative { until: now + DETECTION };
                if runs_neighbour_protocols {
                    // The group is reported before the solicitation, so that answers pass a snooping switch.
                    iface.groups.join(now, ipv6::solicited_node(address).into());
                    iface.groups.timers(now, iface.sender(number), out);
                    out.controls.push(solicitation(number, iface.mac, Ipv6Addr::UNSPECIFIED, address, None));
                }
            }
        }
        iface.addresses.retain(|own| own.prefix.address != prefix.address);
        iface.addresses.push(own);
    }

    /// Removes an address of an interface.
    pub(super) fn remove_address(&mut self, now: Time, number: u8, address: IpAddr, out: &mut Out) {
        let iface = &mut self.ifaces[usize::from(number)];
        let Some(at) = iface.addresses.iter().position(|own| own.prefix.address == address) else { return };
        let own = iface.addresses.remove(at);
        if let IpAddr::V6(address) = address {
            let _ = iface.groups.leave(now, ipv6::solicited_node(address).into());
        }
        if own.standing == AddressState::Preferred {
            out.events.push(Event::Address { iface: number, address, held: false });
        }
        self.routes_changed();
    }

    /// Makes connections look up their routes again after a change of addresses or routes.
    pub(super) fn routes_changed(&mut self) {
        self.routes = self.routes.wrapping_add(1);
        self.neighbours.renew();
    }

    /// Returns whether a connection has a route.
    #[inline]
    pub(super) fn has_route(&self, tcb: &mut Tcb) -> bool {
        tcb.hop.is_current(self.routes) || self.refresh_route(tcb)
    }

    #[cold]
    fn refresh_route(&self, tcb: &mut Tcb) -> bool {
        let (local, remote) = (tcb.key.local().ip(), tcb.key.remote().ip());
        if !self.owns(local) {
            return false;
        }
        let Some(way) = self.way(remote) else { return false };
        tcb.hop.refresh(self.routes, way);
        true
    }
}
