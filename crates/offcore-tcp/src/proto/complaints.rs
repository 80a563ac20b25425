//! ICMP errors about received packets, with a rate limit. A packet to a group or a broadcast address causes no error
//! (RFC 1122, 3.2.2; RFC 4443, 2.4).

use std::net::IpAddr;

use offcore_stats::time::Time;
use offcore_wire::{EtherType, EthernetFrame, IpProtocol, Ipv6Packet, icmpv4, icmpv6};

use super::ip::{ETHERNET, Envelope, IpHeaders};
use super::packet::{Out, RxSeg};
use super::stack::Stack;

/// An error: its type, its code, and the second word of its header.
#[derive(Debug, Clone, Copy)]
pub(super) struct IcmpErrorHead {
    pub kind: u8,
    pub code: u8,
    pub rest: u32,
}

impl Stack {
    /// Sends an error because no socket has the port (RFC 1122, 4.1.3.1; RFC 4443, 3.1).
    #[cold]
    pub(super) fn port_unreachable(&mut self, now: Time, ip: &IpHeaders, head: &[u8], out: &mut Out) {
        let (kind, code) = match ip.dst {
            IpAddr::V4(_) => (icmpv4::DESTINATION_UNREACHABLE, icmpv4::PORT_UNREACHABLE),
            IpAddr::V6(_) => (icmpv6::DESTINATION_UNREACHABLE, icmpv6::PORT_UNREACHABLE),
        };
        let quoted = &head[ETHERNET..ip.end.min(head.len())];
        self.send_icmp_error(now, Some(ip.dst), ip.src, IcmpErrorHead { kind, code, rest: 0 }, quoted, out);
    }

    /// Sends an error because the host does not support the transport protocol (RFC 1122, 3.2.2.1). For IPv6 see
    /// [`send_parameter_problem`](Self::not_understood).
    #[cold]
    pub(super) fn protocol_unreachable(&mut self, now: Time, ip: &IpHeaders, head: &[u8], out: &mut Out) {
        let (kind, code) = (icmpv4::DESTINATION_UNREACHABLE, icmpv4::PROTOCOL_UNREACHABLE);
        let quoted = &head[ETHERNET..ip.end.min(head.len())];
        self.send_icmp_error(now, Some(ip.dst), ip.src, IcmpErrorHead { kind, code, rest: 0 }, quoted, out);
    }

    /// Sends an error because an IPv6 packet has an unknown header or option (RFC 8200, 4; RFC 4443, 3.4).
    #[cold]
    pub(super) fn send_parameter_problem(&mut self, now: Time, iface: u8, packet: &RxSeg<'_>, out: &mut Out) {
        let Ok(frame) = EthernetFrame::new_checked(packet.head) else { return };
        if frame.ethertype() != EtherType::IPV6 {
            return;
        }
        let available = (packet.len as usize).saturating_sub(ETHERNET);
        let Ok(ip) = Ipv6Packet::head_of(frame.payload(), available) else { return };
        let Some(problem) = ip.problem() else { return };
        let Some(here) = self.net.ifaces.get(usize::from(iface)) else { return };
        let (src, dst) = (IpAddr::from(ip.src()), IpAddr::from(ip.dst()));
        let to_us = here.owns(dst) && frame.dst() == here.mac;
        let to_group = problem.of_groups && frame.dst().is_multicast() && here.is_in_group(dst);
        let from_host =
            !src.is_unspecified() && !src.is_multicast() && !src.is_loopback() && !self.net.owns(src);
        if !from_host || !to_us && !to_group {
            return;
        }
        let complaint =
            IcmpErrorHead { kind: icmpv6::PARAMETER_PROBLEM, code: problem.code, rest: problem.pointer };
        self.send_icmp_error(now, to_us.then_some(dst), src, complaint, frame.payload(), out);
    }

    /// Sends an error about the packet `quoted`. Without `from` the route determines the source address.
    fn send_icmp_error(
        &mut self,
        now: Time,
        from: Option<IpAddr>,
        to: IpAddr,
        complaint: IcmpErrorHead,
        quoted: &[u8],
        out: &mut Out,
    ) {
        let Self { udp, origins, net, .. } = self;
        let Some(way) = net.way(to) else { return };
        // As on Linux, errors to this host do not count.
        let looped = net.loopback == Some(way.iface);
        if !looped && !udp.may_send_icmp_error(now, || origins.ident(u64::MAX - now.as_secs())) {
            return;
        }
        let from = from.unwrap_or(way.source);
        let protocol = if to.is_ipv4() { IpProtocol::ICMP } else { IpProtocol::ICMPV6 };
        let IcmpErrorHead { kind, code, rest } = complaint;
        self.net.send(now, way, Envelope::new(from, to, protocol), out, |bytes, envelope| {
            let at = envelope.len();
            let room = &mut bytes[at..];
            let len = match (from, to) {
                (IpAddr::V6(from), IpAddr::V6(to)) => {
                    icmpv6::write_error(room, kind, code, rest, quoted, from, to)
                }
                _ => icmpv4::write_error(room, kind, code, rest, quoted),
            };
            envelope.write(bytes, len);
            at + len
        });
    }
}
