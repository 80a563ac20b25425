//! ICMP: echo replies, and errors about connections (RFC 5927 for their validation; RFC 1191 and 8201 for the path
//! MTU).

use std::net::IpAddr;

use offcore_stats::time::Time;
use offcore_wire::{Icmpv4, Icmpv6, Igmp, ethernet, icmpv4, icmpv6, ipv6};

use super::addr::ConnId;
use super::flows::Entry;
use super::groups::Query;
use super::ip::{ETHERNET, IpHeaders, set_hops};
use super::output::payload_of;
use super::packet::{Cause, DropReason, Out, RxSeg, Verdict};
use super::quoted::Quoted;
use super::segment::position;
use super::stack::Stack;
use super::tcb::State;
use super::undelivered::IcmpError;

/// Minimum accepted MTU. With a lower one a peer could make this host send mostly headers (as Linux).
const LEAST_V4: u16 = 552;
/// The minimum MTU of IPv6 links (RFC 8200, 5).
const LEAST_V6: u16 = 1280;

/// Common MTUs. If a router does not report its MTU, the next lower value than the refused length is used (RFC 1191,
/// 7.1).
const PLATEAUS: [u16; 8] = [32_000, 17_914, 8166, 4352, 2002, 1492, 1006, 508];

/// Returns the MTU to try after a packet of `len` bytes was too long.
fn plateau(len: u16) -> u16 {
    PLATEAUS.into_iter().find(|mtu| *mtu < len).unwrap_or(LEAST_V4)
}

impl Stack {
    /// Processes an ICMP message. Echo requests are answered in place.
    pub(super) fn icmp(
        &mut self,
        now: Time,
        ip: &IpHeaders,
        packet: &mut RxSeg<'_>,
        to_us: bool,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let end = ip.end.min(packet.head.len());
        let message = packet.head.get(ip.transport..end).ok_or(DropReason::Malformed)?;
        match Icmpv4::parse(message).map_err(|_| DropReason::Malformed)? {
            Icmpv4::EchoRequest { .. } if to_us => {
                let head = packet.head.get_mut(ip.transport..).and_then(<[u8]>::first_chunk_mut);
                icmpv4::make_echo_reply(head.ok_or(DropReason::Malformed)?);
                reverse_headers(packet.head, 26, 4);
                set_hops(packet.head);
                Ok(Verdict::Reply)
            }
            Icmpv4::Unreachable { code, mtu, quoted } => {
                self.unreachable_v4(now, ip.src, code, mtu, quoted, out);
                Ok(Verdict::Consumed)
            }
            Icmpv4::TimeExceeded { code, quoted } => {
                let error = IcmpError { v6: false, kind: icmpv4::TIME_EXCEEDED, code, info: 0 };
                self.datagram_failed(error, ip.src, Quoted::v4(quoted), out);
                Ok(Verdict::Consumed)
            }
            Icmpv4::ParameterProblem { pointer, quoted } => {
                let (kind, info) = (icmpv4::PARAMETER_PROBLEM, pointer.into());
                let error = IcmpError { v6: false, kind, code: 0, info };
                self.datagram_failed(error, ip.src, Quoted::v4(quoted), out);
                Ok(Verdict::Consumed)
            }
            _ => Ok(Verdict::Consumed),
        }
    }

    pub(super) fn icmpv6(
        &mut self,
        now: Time,
        iface: u8,
        ip: &IpHeaders,
        packet: &mut RxSeg<'_>,
        to_us: bool,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let end = ip.end.min(packet.head.len());
        let message = packet.head.get(ip.transport..end).ok_or(DropReason::Malformed)?;
        match Icmpv6::parse(message).map_err(|_| DropReason::Malformed)? {
            Icmpv6::EchoRequest { .. } if to_us => {
                let head = packet.head.get_mut(ip.transport..).and_then(<[u8]>::first_chunk_mut);
                icmpv6::make_echo_reply(head.ok_or(DropReason::Malformed)?);
                reverse_headers(packet.head, 22, 16);
                set_hops(packet.head);
                Ok(Verdict::Reply)
            }
            Icmpv6::NeighborSolicit(question) => Ok(self.net.solicited(now, iface, ip, &question, out)),
            // The parser needs the whole message.
            Icmpv6::RouterAdvert(_) if ip.end > end => Err(DropReason::Malformed),
            Icmpv6::RouterAdvert(advert) => Ok(self.router_advertised(now, iface, ip, &advert, out)),
            Icmpv6::NeighborAdvert(answer) => Ok(self.net.advertised(now, iface, ip, &answer, out)),
            Icmpv6::Unreachable { code, quoted } => {
                self.unreachable_v6(ip.src, code, quoted, out);
                Ok(Verdict::Consumed)
            }
            Icmpv6::PacketTooBig { mtu, quoted } => {
                self.packet_too_big(now, ip.src, mtu, quoted, out);
                Ok(Verdict::Consumed)
            }
            Icmpv6::TimeExceeded { code, quoted } => {
                let error = IcmpError { v6: true, kind: icmpv6::TIME_EXCEEDED, code, info: 0 };
                self.datagram_failed(error, ip.src, Quoted::v6(quoted), out);
                Ok(Verdict::Consumed)
            }
            Icmpv6::ParameterProblem { code, pointer, quoted } => {
                let error = IcmpError { v6: true, kind: icmpv6::PARAMETER_PROBLEM, code, info: pointer };
                self.datagram_failed(error, ip.src, Quoted::v6(quoted), out);
                Ok(Verdict::Consumed)
            }
            // Only routers on the link send queries, with a router alert (RFC 3810, 6.2).
            Icmpv6::ListenerQuery(query) => {
                let IpAddr::V6(src) = ip.src else { return Err(DropReason::Malformed) };
                let alerts = ip.transport > ETHERNET + ipv6::HEADER_LEN;
                if ip.hops != 1 || !src.is_unicast_link_local() || !alerts {
                    return Err(DropReason::Malformed);
                }
                self.net.group_query_received(now, iface, Query::v6(&query));
                Ok(Verdict::Consumed)
            }
            Icmpv6::ListenerReport { group } => {
                // RFC 2710, 3.
                if ip.hops != 1 {
                    return Err(DropReason::Malformed);
                }
                self.net.group_reported(now, iface, group.into());
                Ok(Verdict::Consumed)
            }
            _ => Ok(Verdict::Consumed),
        }
    }

    /// Handles IGMP queries of routers and reports of other hosts.
    #[cold]
    pub(super) fn igmp(
        &mut self,
        now: Time,
        iface: u8,
        ip: &IpHeaders,
        head: &[u8],
    ) -> Result<Verdict, DropReason> {
        let message = head.get(ip.transport..ip.end.min(head.len())).ok_or(DropReason::Malformed)?;
        let message = Igmp::parse(message).map_err(|_| DropReason::Malformed)?;
        if ip.hops != 1 {
            return Err(DropReason::Malformed);
        }
        if let Some(query) = Query::v4(&message) {
            self.net.group_query_received(now, iface, query);
        } else if let Igmp::Report { group } = message {
            self.net.group_reported(now, iface, group.into());
        }
        Ok(Verdict::Consumed)
    }

    /// Returns the connection that an error is about, if it quotes data in flight.
    fn quoted(&mut self, quoted: Option<Quoted<'_>>) -> Option<ConnId> {
        let Quoted { key, seq, .. } = quoted?.segment()?;
        let Entry::Conn(index) = self.flows.find(&key, |entry| self.key_of(entry))? else { return None };
        let (id, conn) = self.conns.at(index)?;
        let sender = &conn.tcb.sender;
        if conn.tcb.state == State::SynSent {
            return (seq == sender.seq(0).wrapping_sub(1)).then_some(id);
        }
        let at = position(seq, sender.seq(0), sender.una())?;
        // SND.UNA =< SEG.SEQ < SND.NXT (RFC 5927, 4.1): a forged error for an idle connection matches no data in
        // flight.
        (sender.una()..sender.published_to()).contains(&at).then_some(id)
    }

    /// Processes an error about our SYN-ACK. A hard error ends the attempt silently. A smaller MTU is stored.
    fn half_error(&mut self, quoted: Option<Quoted<'_>>, hard: bool, mtu: Option<u16>) {
        let Some(Quoted { key, seq, .. }) = quoted.and_then(Quoted::segment) else { return };
        let Some(Entry::Half(index)) = self.flows.find(&key, |entry| self.key_of(entry)) else { return };
        let Some(half) = self.halves.get_mut(index) else { return };
        if seq != half.both.iss {
            return;
        }
        if let Some(mtu) = mtu {
            let offered = &mut half.both.offered;
            offered.mss = offered.mss.min(payload_of(mtu, key.remote().ip(), false));
        }
        if hard {
            self.drop_half(index);
        }
    }

    /// Processes an IPv4 Destination Unreachable message.
    #[cold]
    fn unreachable_v4(
        &mut self,
        now: Time,
        offender: IpAddr,
        code: u8,
        mtu: u16,
        quoted: &[u8],
        out: &mut Out,
    ) {
        let mtu = match (mtu, quoted) {
            (0, [_, _, high, low, ..]) => plateau(u16::from_be_bytes([*high, *low])),
            _ => mtu,
        };
        let hard = matches!(code, icmpv4::PROTOCOL_UNREACHABLE | icmpv4::PORT_UNREACHABLE);
        let smaller = (code == icmpv4::FRAGMENTATION_NEEDED).then_some(mtu.max(LEAST_V4));
        if let Some(mtu) = smaller {
            self.datagram_too_long(now, Quoted::v4(quoted), mtu);
        }
        let kind = icmpv4::DESTINATION_UNREACHABLE;
        let error = IcmpError { v6: false, kind, code, info: smaller.unwrap_or(0).into() };
        self.datagram_failed(error, offender, Quoted::v4(quoted), out);
        self.half_error(Quoted::v4(quoted), hard, smaller);
        let Some(id) = self.quoted(Quoted::v4(quoted)) else { return };
        match code {
            icmpv4::FRAGMENTATION_NEEDED => self.set_path_mtu(now, id, mtu.max(LEAST_V4)),
            // Hard errors (RFC 1122, 4.2.3.9).
            icmpv4::PROTOCOL_UNREACHABLE | icmpv4::PORT_UNREACHABLE => self.unreachable(id, out),
            _ => {}
        }
    }

    /// Processes an IPv6 Destination Unreachable message.
    #[cold]
    fn unreachable_v6(&mut self, offender: IpAddr, code: u8, quoted: &[u8], out: &mut Out) {
        let error = IcmpError { v6: true, kind: icmpv6::DESTINATION_UNREACHABLE, code, info: 0 };
        self.datagram_failed(error, offender, Quoted::v6(quoted), out);
        if code == icmpv6::PORT_UNREACHABLE {
            self.half_error(Quoted::v6(quoted), true, None);
        }
        if code == icmpv6::PORT_UNREACHABLE
            && let Some(id) = self.quoted(Quoted::v6(quoted))
        {
            self.unreachable(id, out);
        }
    }

    /// Ends a connection in SYN-SENT only: an established connection has a peer (RFC 5927, 6.1).
    fn unreachable(&mut self, id: ConnId, out: &mut Out) {
        if self.conns.get(id).is_some_and(|conn| conn.tcb.state == State::SynSent) {
            self.over(id, Cause::Unreachable, out);
        }
    }

    /// Processes a Packet Too Big message. It is ignored if its MTU is below the minimum of IPv6 links (RFC 8201, 4).
    #[cold]
    fn packet_too_big(&mut self, now: Time, offender: IpAddr, mtu: u32, quoted: &[u8], out: &mut Out) {
        let error = IcmpError { v6: true, kind: icmpv6::PACKET_TOO_BIG, code: 0, info: mtu };
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
        if mtu >= LEAST_V6 {
            self.half_error(Quoted::v6(quoted), false, Some(mtu));
            self.datagram_too_long(now, Quoted::v6(quoted), mtu);
            self.datagram_failed(error, offender, Quoted::v6(quoted), out);
        }
        if mtu >= LEAST_V6
            && let Some(id) = self.quoted(Quoted::v6(quoted))
        {
            self.set_path_mtu(now, id, mtu);
        }
    }

    /// Reduces the segment size after repeated losses, because the path's routers may not report their MTU (RFC 2923,
    /// 2.1). The lower limit is the minimum MTU of IPv6 links, which nearly every IPv4 link supports.
    #[cold]
    pub(super) fn avoid_black_hole(&mut self, now: Time, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let (sender, remote) = (&conn.tcb.sender, conn.tcb.key.remote().ip());
        let headers = LEAST_V6 - payload_of(LEAST_V6, remote, conn.tcb.agreed.timestamps.is_some());
        let shorter = plateau(sender.mss() + headers).max(LEAST_V6);
        if conn.tcb.report_path(now, shorter) {
            self.conns.touch(id);
        }
    }

    /// Limits the segments of all connections on interface `iface` to packets of `mtu` bytes.
    #[cold]
    pub(super) fn cut_segments_by(&mut self, iface: u8, mtu: u16) {
        for index in 0..self.conns.slots() as u32 {
            let Some((id, conn)) = self.conns.at(index) else { continue };
            let tcb = &mut conn.tcb;
            let mss = payload_of(mtu, tcb.key.remote().ip(), tcb.agreed.timestamps.is_some());
            if tcb.hop.iface() == iface && mss < tcb.sender.mss() {
                // This is the link's MTU, not an estimate of the path's, so longer packets are not probed later.
                tcb.path = None;
                tcb.sender.set_mss(mss);
                self.conns.touch(id);
            }
        }
    }

    /// Processes a path MTU reported by a router. If the report is accepted, all sockets with this destination use it.
    fn set_path_mtu(&mut self, now: Time, id: ConnId, mtu: u16) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.tcb.report_path(now, mtu) {
            let to = conn.tcb.key.remote().ip();
            self.net.learn_path(now, to, mtu);
            self.conns.touch(id);
        }
    }

    /// Applies an unverified path MTU report after data was lost.
    #[cold]
    pub(super) fn apply_reported_mtu(&mut self, now: Time, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if let Some(mss) = conn.tcb.path.as_ref().and_then(|path| path.claimed) {
            conn.tcb.cut_segments(now, mss);
        }
    }
}

/// Turns the link and IP headers of a request into the headers of its answer by swapping source and destination. The IP
/// addresses of `len` bytes begin at `addresses`. The swap does not change checksums.
fn reverse_headers(head: &mut [u8], addresses: usize, len: usize) {
    let (link, _) = head.split_at_mut(ethernet::HEADER_LEN);
    let (dst, src) = link.split_at_mut(6);
    dst.swap_with_slice(&mut src[..6]);
    let (src, dst) = head[addresses..addresses + 2 * len].split_at_mut(len);
    src.swap_with_slice(dst);
}
