//! Multicast groups of an interface: reports to routers and to snooping switches (RFC 3376 and 2236; RFC 3810 and
//! 2710).
//!
//! A snooping switch forwards a group's packets only to ports that have reported it. Neighbour discovery also uses
//! groups: a host that does not report the solicited-node groups of its addresses cannot be resolved (RFC 4861, 7.2.1).

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use offcore_stats::SplitMix;
use offcore_stats::time::{Micros, Time};
use offcore_wire::icmpv6::listener;
use offcore_wire::igmp::{self, Record};
use offcore_wire::{EtherType, Igmp, ListenerQuery};
use offcore_wire::{IpProtocol, Ipv4Header, MacAddr, ethernet, ipv4, ipv6};

use super::call_error::CallError;
use super::ip::{ETHERNET, Envelope};
use super::packet::{Control, Out};

/// When an interface has this many groups, each new group removes a group without users. The number of groups with
/// users is limited by the shares of [`Stack::join_group`](super::stack::Stack::join_group).
const MOST: usize = 1024;
/// Number of reports of a change (the robustness variable): the default and the maximum.
const ROBUSTNESS: u8 = 2;
const MOST_ROBUST: u8 = 7;
/// Maximum time between two reports of a change (RFC 3376, 8.11; RFC 3810, 9.11), and the same in version 1 of MLD and
/// versions 1 and 2 of IGMP (RFC 2236, 8.10).
const CHANGE: Micros = Micros::from_secs(1);
const OLD_CHANGE: Micros = Micros::from_secs(10);
/// Older Version Querier Present Timeout, with the default query interval of 125 s (RFC 3376, 8.12; RFC 3810, 9.12).
const OLD_ROUTER: Micros = Micros::from_secs(260);
/// Minimum time between two answers to queries. It bounds the cost of a flood of queries.
const QUIET: Micros = Micros::from_millis(100);
/// IPv4 records that fit one report.
const RECORDS: usize = 10;

const ALL_SYSTEMS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 1);
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);

/// A group. A group without users has been left, and its final reports are due.
#[derive(Debug, Default)]
struct Group {
    users: u32,
    /// Time of the next report.
    due: Option<Time>,
    /// Remaining reports of a change.
    changes: u8,
}

/// Routers of an older version.
#[derive(Debug, Clone, Copy, Default)]
struct Older {
    /// End of the presence of an IGMPv2 or MLDv1 router.
    v2: Time,
    /// End of the presence of an IGMPv1 router.
    v1: Time,
}

/// The source addresses of reports.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sender {
    pub iface: u8,
    pub mac: MacAddr,
    /// Our IPv4 address, or the unspecified address until probing has finished.
    pub v4: Ipv4Addr,
    /// The link-local address, likewise (RFC 3810, 5.2.13).
    pub v6: Ipv6Addr,
}

/// Groups of one interface.
#[derive(Debug)]
pub(crate) struct Groups {
    groups: BTreeMap<IpAddr, Group>,
    v4: Older,
    v6: Older,
    robustness: u8,
    /// Time of the next report.
    next: Option<Time>,
    /// Queries before this time are ignored.
    quiet: Time,
    chance: SplitMix,
}

/// A query of either family.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Query {
    pub group: Option<IpAddr>,
    /// Maximum response time.
    pub within: Micros,
    pub is_v4: bool,
    /// 1 and 2 are IGMPv1 and IGMPv2, 1 is MLDv1; 0 is the newest version.
    pub older: u8,
    pub robustness: u8,
}

impl Query {
    /// Creates a query from MLD.
    pub(crate) fn v6(query: &ListenerQuery) -> Self {
        let &ListenerQuery { group, within, is_v1, robustness } = query;
        let within = Micros::from(within);
        Self { group: group.map(IpAddr::V6), within, is_v4: false, older: u8::from(is_v1) * 2, robustness }
    }

    /// Creates a query from IGMP.
    pub(crate) fn v4(message: &Igmp) -> Option<Self> {
        let &Igmp::Query { group, within, version, robustness } = message else { return None };
        let (within, older) = (Micros::from(within), if version < 3 { version } else { 0 });
        Some(Self { group: group.map(IpAddr::V4), within, is_v4: true, older, robustness })
    }
}

impl Groups {
    pub(crate) fn new(seed: u64) -> Self {
        let (v4, v6) = Default::default();
        let (groups, chance) = (BTreeMap::new(), SplitMix::new(seed));
        Self { groups, v4, v6, robustness: ROBUSTNESS, next: None, quiet: Time::ZERO, chance }
    }

    /// Returns whether packets to the group are received.
    pub(crate) fn contains(&self, group: IpAddr) -> bool {
        self.groups.get(&group).is_some_and(|group| group.users > 0)
    }

    /// Adds a user of a group. The first user causes reports.
    pub(crate) fn join(&mut self, now: Time, group: IpAddr) {
        if self.groups.len() >= MOST && !self.groups.contains_key(&group) {
            // The pending reports of the removed group are discarded.
            let left = self.groups.iter().find(|(_, entry)| entry.users == 0).map(|(group, _)| *group);
            left.and_then(|left| self.groups.remove(&left));
        }
        let entry = self.groups.entry(group).or_default();
        entry.users += 1;
        if entry.users == 1 && is_reported(group) {
            (entry.changes, entry.due) = (self.robustness, Some(now));
            self.look();
        }
    }

    /// Removes a user of a group. The last user causes reports.
    pub(crate) fn leave(&mut self, now: Time, group: IpAddr) -> Result<(), CallError> {
        let entry = self.groups.get_mut(&group).filter(|entry| entry.users > 0).ok_or(CallError::Gone)?;
        entry.users -= 1;
        if entry.users == 0 {
            match is_reported(group) {
                true => (entry.changes, entry.due) = (self.robustness, Some(now)),
                false => drop(self.groups.remove(&group)),
            }
            self.look();
        }
        Ok(())
    }

    /// Reports all IPv6 groups again. The link-local address is now valid, and routers ignore reports from the
    /// unspecified address.
    pub(crate) fn report_v6(&mut self, now: Time) {
        for (group, entry) in &mut self.groups {
            if group.is_ipv6() && entry.users > 0 && is_reported(*group) {
                (entry.changes, entry.due) = (entry.changes.max(1), Some(now));
            }
        }
        self.look();
    }

    /// Handles a query. Each group is reported within the maximum response time. Older versions have a delay for each
    /// group (RFC 3376, 5.2; RFC 3810, 6.2; RFC 2236, 3).
    pub(crate) fn asked(&mut self, now: Time, query: Query) {
        let older = if query.is_v4 { &mut self.v4 } else { &mut self.v6 };
        match query.older {
            1 => older.v1 = now + OLD_ROUTER,
            2 => older.v2 = now + OLD_ROUTER,
            _ if query.robustness > 0 => self.robustness = query.robustness.clamp(1, MOST_ROBUST),
            _ => {}
        }
        let is_old = older.v1.max(older.v2) > now;
        let within = query.within.max(Micros::new(1));
        let earliest = now.max(self.quiet);
        let together = earliest + within.random(&mut self.chance);
        for (group, entry) in &mut self.groups {
            let is_meant = query.group.is_none_or(|asked| asked == *group);
            if !is_meant || group.is_ipv4() != query.is_v4 || entry.users == 0 || !is_reported(*group) {
                continue;
            }
            let due = if is_old { earliest + within.random(&mut self.chance) } else { together };
            if entry.due.is_none_or(|at| at > due) {
                entry.due = Some(due);
            }
        }
        self.look();
    }

    /// Handles another host's report of a group in an older version. One report is enough for the router.
    pub(crate) fn reported(&mut self, now: Time, group: IpAddr) {
        let older = if group.is_ipv4() { self.v4 } else { self.v6 };
        if let Some(entry) = self.groups.get_mut(&group)
            && entry.users > 0
            && older.v1.max(older.v2) > now
        {
            (entry.changes, entry.due) = (0, None);
            self.look();
        }
    }

    /// Returns the time of the next report.
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.next
    }

    /// Sends due reports.
    pub(crate) fn timers(&mut self, now: Time, from: Sender, out: &mut Out) {
        if self.next.is_none_or(|due| due > now) {
            return;
        }
        self.quiet = now + QUIET;
        let mut due: Vec<(Record, IpAddr)> = Vec::new();
        for (group, entry) in
            self.groups.iter_mut().filter(|(_, entry)| entry.due.is_some_and(|at| at <= now))
        {
            let record = match (entry.users, entry.changes) {
                (0, _) => Record::ToInclude,
                (_, 0) => Record::IsExclude,
                _ => Record::ToExclude,
            };
            due.push((record, *group));
            let older = if group.is_ipv4() { self.v4 } else { self.v6 };
            let is_old = older.v1.max(older.v2) > now;
            // A version without records reports only once that a group was left.
            entry.changes = if is_old && entry.users == 0 { 0 } else { entry.changes.saturating_sub(1) };
            let interval = if is_old { OLD_CHANGE } else { CHANGE };
            entry.due = (entry.changes > 0).then(|| now + Micros::new(1) + interval.random(&mut self.chance));
        }
        self.groups.retain(|_, entry| entry.users > 0 || entry.due.is_some());
        self.look();
        let (v4, v6): (Vec<_>, Vec<_>) = due.into_iter().partition(|(_, group)| group.is_ipv4());
        send_v4(now, &v4, self.v4, from, out);
        send_v6(now, &v6, self.v6, from, out);
    }

    fn look(&mut self) {
        self.next = self.groups.values().filter_map(|group| group.due).min();
    }
}

/// Returns whether a group is reported. The group of all hosts is not, nor is a group whose scope is smaller than the
/// link (RFC 3376, 5; RFC 3810, 6).
fn is_reported(group: IpAddr) -> bool {
    match group {
        IpAddr::V4(group) => group != ALL_SYSTEMS,
        IpAddr::V6(group) => group != ALL_NODES && group.octets()[1] & 0xf >= 2,
    }
}

fn send_v4(now: Time, records: &[(Record, IpAddr)], older: Older, from: Sender, out: &mut Out) {
    let mut groups = records.iter().filter_map(|(record, group)| match group {
        IpAddr::V4(group) => Some((*record, *group)),
        IpAddr::V6(_) => None,
    });
    if older.v1.max(older.v2) <= now {
        let groups: Vec<_> = groups.collect();
        for part in groups.chunks(RECORDS) {
            out.controls.push(packet_v4(from, igmp::REPORTS, |bytes| igmp::write_report(bytes, part).0));
        }
        return;
    }
    let is_v1 = older.v1 > now;
    for (record, group) in groups.by_ref() {
        let (kind, to) = match record {
            Record::ToInclude if is_v1 => continue,
            Record::ToInclude => (igmp::LEAVE, igmp::ALL_ROUTERS),
            _ if is_v1 => (igmp::REPORT_V1, group),
            _ => (igmp::REPORT_V2, group),
        };
        out.controls.push(packet_v4(from, to, |bytes| igmp::write_plain(bytes, kind, group)));
    }
}

fn send_v6(now: Time, records: &[(Record, IpAddr)], older: Older, from: Sender, out: &mut Out) {
    let groups = records.iter().filter_map(|(record, group)| match group {
        IpAddr::V6(group) => Some((*record, *group)),
        IpAddr::V4(_) => None,
    });
    let groups: Vec<_> = groups.collect();
    if older.v2 > now {
        for (record, group) in groups {
            let (kind, to) = match record {
                Record::ToInclude => (listener::DONE, ALL_ROUTERS),
                _ => (listener::REPORT_V1, group),
            };
            let write = |bytes: &mut [u8]| listener::write_v1(bytes, kind, group, from.v6, to);
            out.controls.push(packet_v6(from, to, write));
        }
        return;
    }
    let mut left = &groups[..];
    while !left.is_empty() {
        let mut written = left.len();
        out.controls.push(packet_v6(from, listener::REPORTS, |bytes| {
            let (len, records) = listener::write_report(bytes, left, from.v6);
            written = records;
            len
        }));
        left = left.get(written.max(1)..).unwrap_or_default();
    }
}

/// Creates an IGMP packet: TTL 1, with a router alert.
fn packet_v4(from: Sender, to: Ipv4Addr, write: impl FnOnce(&mut [u8]) -> usize) -> Control {
    /// Internetwork control, as Linux sets it.
    const DSCP: u8 = 0xc0;
    Control::new(from.iface, |bytes| {
        let (link, rest) = bytes.split_first_chunk_mut().expect("the buffer has room for all headers");
        ethernet::write_header(link, ipv4::multicast_mac(to), from.mac, EtherType::IPV4);
        let (head, rest) = rest.split_first_chunk_mut().expect("the buffer has room for all headers");
        let total = ipv4::ALERT_LEN + write(rest);
        let header = Ipv4Header {
            src: from.v4,
            dst: to,
            protocol: IpProtocol::IGMP,
            dscp_ecn: DSCP,
            ident: 0,
            dont_fragment: true,
            ttl: 1,
            total_len: total as u16,
        };
        header.write_with_router_alert(head);
        ETHERNET + total
    })
}

/// Creates an MLD packet: hop limit 1, with a router alert.
fn packet_v6(from: Sender, to: Ipv6Addr, write: impl FnOnce(&mut [u8]) -> usize) -> Control {
    let envelope = Envelope::new(from.v6.into(), to.into(), IpProtocol::HOP_BY_HOP);
    let envelope = Envelope { src_mac: from.mac, dst_mac: ipv6::multicast_mac(to), hops: 1, ..envelope };
    Control::new(from.iface, |bytes| {
        let at = envelope.len();
        let (alert, rest) = bytes[at..].split_at_mut(listener::ROUTER_ALERT.len());
        alert.copy_from_slice(&listener::ROUTER_ALERT);
        let len = listener::ROUTER_ALERT.len() + write(rest);
        envelope.write(bytes, len);
        at + len
    })
}
