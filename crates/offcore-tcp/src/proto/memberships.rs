//! Multicast groups joined by datagram sockets, and the sockets that receive a datagram to a group or broadcast
//! address.

use std::net::IpAddr;

use arrayvec::ArrayVec;
use offcore_session::datagram::Header;
use offcore_stats::time::Time;

use super::addr::ConnId;
use super::call_error::CallError;
use super::iface::ResolvedRoute;
use super::joined::MulticastDatagram;
use super::net::Net;
use super::packet::{DropReason, Out, Place, Verdict};
use super::stack::Stack;

/// Maximum number of IPv4 groups per socket (`igmp_max_memberships` of Linux).
const OF_SOCKET: usize = 20;
/// Maximum number of joins of a user.
const OF_USER: u32 = 512;
/// Users with joins have equal shares of this number. If a share shrinks, its existing joins stay.
const MAX_JOINS: u32 = 1024;
/// Maximum number of sockets that receive one datagram, and of additional copies caused by one burst of packets.
const RECEIVERS: usize = 64;
const COPIES: usize = 256;

/// A group and an interface. The interface is selected by the index, else by the address, else by the route to the
/// group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Membership {
    pub group: IpAddr,
    /// The index of the interface; 0 for none.
    pub index: u32,
    pub address: Option<IpAddr>,
}

impl Stack {
    /// Joins a multicast group for a datagram socket: the host receives its packets and reports the group to routers
    /// and switches. The socket leaves its groups when it is closed.
    ///
    /// # Errors
    /// [`CallError::Gone`]; [`CallError::NoRoute`] without such an interface; [`CallError::NotOurs`] for an address
    /// that is not a group; [`CallError::InUse`] if the socket has joined it; [`CallError::TooMany`].
    pub fn join_group(
        &mut self,
        now: Time,
        socket: ConnId,
        membership: &Membership,
    ) -> Result<(), CallError> {
        let group = membership.group;
        if !group.is_multicast() {
            return Err(CallError::NotOurs);
        }
        let iface = self.net.iface_of(membership).ok_or(CallError::NoRoute)?;
        let found = self.udp.get(socket).filter(|socket| !socket.closed).ok_or(CallError::Gone)?;
        let (user, groups) = (found.reuse.user, &found.joined.groups);
        let any = group.is_ipv6() && membership.index == 0;
        if groups.iter().any(|(by, joined)| *joined == group && (any || *by == iface)) {
            return Err(CallError::InUse);
        }
        let of_family = groups.iter().filter(|(_, joined)| joined.is_ipv4()).count();
        let count = self.udp.joins.get(&user).copied().unwrap_or(0);
        let users = self.udp.joins.len() as u32 + u32::from(count == 0);
        if group.is_ipv4() && of_family >= OF_SOCKET || count >= OF_USER.min(MAX_JOINS / users) {
            return Err(CallError::TooMany);
        }
        self.net.join(now, iface, group);
        self.udp.joins.insert(user, count + 1);
        if let Some(found) = self.udp.get_mut(socket) {
            found.joined.groups.push((iface, group));
        }
        Ok(())
    }

    /// Leaves a group.
    ///
    /// # Errors
    /// [`CallError::Gone`]; [`CallError::NoRoute`] without such an interface; [`CallError::NotOurs`] if the socket has
    /// not joined the group.
    pub fn leave_group(
        &mut self,
        now: Time,
        socket: ConnId,
        membership: &Membership,
    ) -> Result<(), CallError> {
        let iface = self.net.iface_of(membership).ok_or(CallError::NoRoute)?;
        let group = membership.group;
        let any = group.is_ipv6() && membership.index == 0;
        let found = self.udp.get_mut(socket).filter(|socket| !socket.closed).ok_or(CallError::Gone)?;
        let groups = &mut found.joined.groups;
        let at = groups.iter().position(|(by, joined)| *joined == group && (any || *by == iface));
        let (by, group) = groups.remove(at.ok_or(CallError::NotOurs)?);
        let user = found.reuse.user;
        self.left(now, user, by, group);
        Ok(())
    }

    /// Leaves all groups of a socket.
    pub(super) fn leave_groups(&mut self, now: Time, socket: ConnId) {
        let Some(found) = self.udp.get_mut(socket) else { return };
        let user = found.reuse.user;
        for (iface, group) in std::mem::take(&mut found.joined.groups) {
            self.left(now, user, iface, group);
        }
    }

    fn left(&mut self, now: Time, user: u32, iface: u8, group: IpAddr) {
        let _ = self.net.leave(now, iface, group);
        if let Some(count) = self.udp.joins.get_mut(&user) {
            *count -= 1;
            if *count == 0 {
                self.udp.joins.remove(&user);
            }
        }
    }

    /// Sets `IP_MULTICAST_ALL` and `IPV6_MULTICAST_ALL` of a socket.
    pub fn receive_all_groups(&mut self, socket: ConnId, v4: bool, v6: bool) {
        if let Some(found) = self.udp.get_mut(socket) {
            found.joined.all = [v4, v6];
        }
    }

    /// Returns the index of the interface of a membership. The group may be the unspecified address of its family.
    pub fn index_of(&self, membership: &Membership) -> Option<u32> {
        let iface = self.net.iface_of(membership)?;
        self.net.ifaces.get(usize::from(iface)).map(|iface| iface.index)
    }

    /// Passes a datagram to a group or broadcast address to its sockets.
    #[inline(never)]
    pub(super) fn deliver_multicast(
        &mut self,
        iface: u8,
        mut header: Header,
        port: u16,
        skip: usize,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let receivers = self.receivers(iface, &header, port, out);
        let here = self.net.ifaces.get(usize::from(iface));
        if let Some(IpAddr::V4(own)) = here.and_then(|here| here.multicast_source(header.local)) {
            header.more.own = Some(own);
        }
        match receivers.as_slice() {
            [] => Err(DropReason::NoConnection),
            [only] => self.take_datagram(*only, header, skip, out),
            several => {
                out.to_many.push(MulticastDatagram {
                    header,
                    skip: skip as u32,
                    count: several.len() as u32,
                });
                out.receivers.extend_from_slice(several);
                Ok(Verdict::Copies)
            }
        }
    }

    /// Returns the sockets that receive a datagram.
    fn receivers(&self, iface: u8, header: &Header, port: u16, out: &Out) -> ArrayVec<ConnId, RECEIVERS> {
        let all = self.udp.receivers(iface, header.local, port, header.peer);
        let most = if out.receivers.len() + RECEIVERS > COPIES { 1 } else { RECEIVERS };
        all.take(most).collect()
    }

    /// Finds sockets of this host that receive a sent datagram, and adds them to [`Out::to_many`]. `header` is their
    /// header. The payload follows `skip` bytes of headers in the packet. Returns whether there are any.
    pub(super) fn find_local_receivers(
        &mut self,
        way: &ResolvedRoute,
        mut header: Header,
        port: u16,
        skip: usize,
        out: &mut Out,
    ) -> bool {
        let Some(here) = self.net.ifaces.get(usize::from(way.iface)) else { return false };
        if !here.is_in_group(header.local) && !here.is_broadcast(header.local) {
            return false;
        }
        header.more.index = here.index;
        if let IpAddr::V4(own) = way.source {
            header.more.own = Some(own);
        }
        let receivers = self.receivers(way.iface, &header, port, out);
        if !receivers.is_empty() {
            out.to_many.push(MulticastDatagram { header, skip: skip as u32, count: receivers.len() as u32 });
            out.receivers.extend_from_slice(&receivers);
        }
        !receivers.is_empty()
    }

    /// Queues the copy of a datagram for a socket. Drops it, and counts that, if the pool or the socket has no room.
    pub(crate) fn copy_to(
        &mut self,
        socket: ConnId,
        many: &MulticastDatagram,
        has_packet: bool,
        out: &mut Out,
    ) -> Option<Place> {
        let taken = match has_packet {
            true => self.take_datagram(socket, many.header, many.skip as usize, out),
            false => {
                self.udp.count_lost(socket);
                Err(DropReason::NoSpace)
            }
        };
        match taken {
            Ok(Verdict::Place) => out.places.pop(),
            Ok(_) => None,
            Err(reason) => {
                self.drops.count(reason);
                None
            }
        }
    }
}

impl Net {
    /// Returns the interface of a membership.
    fn iface_of(&self, membership: &Membership) -> Option<u8> {
        let &Membership { group, index, address } = membership;
        let address = address.filter(|address| !address.is_unspecified());
        let at = match (index, address) {
            (0, None) => self.way(group).map_or(Some(0), |way| Some(usize::from(way.iface))),
            (0, Some(address)) => self.ifaces.iter().position(|iface| iface.owns(address)),
            (index, _) => self.ifaces.iter().position(|iface| iface.index == index),
        };
        at.filter(|at| *at < self.ifaces.len()).map(|at| at as u8)
    }
}
