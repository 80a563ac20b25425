//! One host on several workers: selects the worker whose stack processes a packet.
//!
//! A keyed hash of both endpoints assigns each flow to one worker, regardless of the queue on which its packets arrive:
//! ports spread packets by their own hashes, and TAP ports and guests may change the queue. Fragments have no ports and
//! are assigned by their addresses; the reassembled packet is assigned again. Messages for address resolution go to all
//! workers.

use offcore_wire::{Icmpv4, Icmpv6, IpProtocol};

use super::addr::FlowKey;
use super::ip::{self, Frame, IpHeaders};
use super::packet::HEAD;
use super::quoted::Quoted;
use super::siphash::FlowHash;

/// A worker of several whose stacks form one host. They have the same secret, interfaces and addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The worker's number, below `of`. Worker 0 acts for all: it announces addresses and answers address resolution.
    pub worker: u32,
    /// The number of workers, at least 1.
    pub of: u32,
}

impl Default for Share {
    fn default() -> Self {
        Self { worker: 0, of: 1 }
    }
}

/// The owner of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    Worker(u32),
    /// All workers. Each gets a copy.
    All,
    /// The worker that received it.
    Anybody,
}

/// The mapping of flows to workers.
#[derive(Debug)]
pub(crate) struct Steering {
    hash: FlowHash,
    pub share: Share,
}

impl Steering {
    pub(crate) fn new(secret: &[u8; 16], share: Share) -> Self {
        Self { hash: FlowHash::of_workers(secret), share }
    }

    /// Returns the worker of a flow.
    #[inline]
    pub(crate) fn worker(&self, flow: &FlowKey) -> u32 {
        let hash = self.hash.hash(flow) >> 32;
        ((hash * u64::from(self.share.of)) >> 32) as u32
    }

    /// Returns whether a flow belongs to this worker.
    #[inline]
    pub(crate) fn is_ours(&self, flow: &FlowKey) -> bool {
        self.share.of == 1 || self.worker(flow) == self.share.worker
    }

    /// Returns the owner of the packet of `len` bytes that begins with `head`. A malformed packet is counted by its
    /// receiver.
    #[inline]
    pub(crate) fn owner(&self, head: &[u8], len: usize) -> Owner {
        match self.owner_of_any(head, len) {
            // No such message is longer. The limit avoids many copies.
            Owner::All if len > HEAD => Owner::Anybody,
            owner => owner,
        }
    }

    #[inline]
    fn owner_of_any(&self, head: &[u8], len: usize) -> Owner {
        let mut ip = IpHeaders::NONE;
        match ip::parse(head, len, &mut ip) {
            Ok(Frame::Ip) => {}
            Ok(Frame::Arp) => return Owner::All,
            Err(_) => return Owner::Anybody,
        }
        let transport = head.get(ip.transport..ip.end.min(head.len())).unwrap_or_default();
        let flow = match ip.protocol {
            _ if ip.fragment => ip.flow(0, 0),
            IpProtocol::TCP | IpProtocol::UDP => match transport {
                &[a, b, c, d, ..] => ip.flow(u16::from_be_bytes([c, d]), u16::from_be_bytes([a, b])),
                _ => None,
            },
            IpProtocol::IGMP => return Owner::All,
            IpProtocol::ICMP | IpProtocol::ICMPV6 => return self.owner_of_message(&ip, transport),
            _ => None,
        };
        flow.map_or(Owner::Anybody, |flow| Owner::Worker(self.worker(&flow)))
    }

    /// Returns the owner of an ICMP message. An error belongs to the worker of the flow that it quotes.
    #[cold]
    fn owner_of_message(&self, ip: &IpHeaders, message: &[u8]) -> Owner {
        let quoted = if ip.protocol == IpProtocol::ICMP {
            match Icmpv4::parse(message) {
                Ok(Icmpv4::Unreachable { quoted, .. }) => Quoted::v4(quoted),
                _ => None,
            }
        } else {
            match Icmpv6::parse(message) {
                Ok(
                    Icmpv6::NeighborSolicit(_)
                    | Icmpv6::NeighborAdvert(_)
                    | Icmpv6::ListenerQuery(_)
                    | Icmpv6::ListenerReport { .. },
                ) => return Owner::All,
                Ok(Icmpv6::Unreachable { quoted, .. } | Icmpv6::PacketTooBig { quoted, .. }) => {
                    Quoted::v6(quoted)
                }
                _ => None,
            }
        };
        quoted.map_or(Owner::Anybody, |quoted| Owner::Worker(self.worker(&quoted.key)))
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use offcore_wire::{MacAddr, icmpv4, icmpv6};

    use super::*;
    use crate::proto::ip::Envelope;

    const OF: u32 = 5;

    fn steering(worker: u32) -> Steering {
        Steering::new(&[7; 16], Share { worker, of: OF })
    }

    /// Creates a frame with these bytes behind the IP header.
    fn frame(src: IpAddr, dst: IpAddr, protocol: IpProtocol, payload: &[u8]) -> Vec<u8> {
        let envelope = Envelope::new(src, dst, protocol);
        let at = envelope.len();
        let mut bytes = vec![0; at + payload.len()];
        envelope.write(&mut bytes, payload.len());
        bytes[at..].copy_from_slice(payload);
        bytes
    }

    fn owner(bytes: &[u8]) -> Owner {
        steering(0).owner(&bytes[..bytes.len().min(HEAD)], bytes.len())
    }

    fn ends(number: u16) -> [(IpAddr, IpAddr); 2] {
        let [high, low] = number.to_be_bytes();
        let v4 = (IpAddr::from([10, 0, high, low]), IpAddr::from([10, 1, 0, 1]));
        let v6 =
            (IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, number]), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 1, 1]));
        [v4, v6]
    }

    #[test]
    fn flow_steering_is_even_and_stable() {
        let mut counts = [0; OF as usize];
        for (number, (peer, us)) in (0..5000).flat_map(|number| ends(number).map(|ends| (number, ends))) {
            let ports = [1000u16.wrapping_add(number).to_be_bytes(), 80u16.to_be_bytes()].concat();
            let of = |protocol, more: &[u8]| owner(&frame(peer, us, protocol, &[&ports, more].concat()));
            let Owner::Worker(worker) = of(IpProtocol::TCP, &[0; 16]) else { panic!("a flow has one") };
            counts[worker as usize] += 1;
            assert_eq!(of(IpProtocol::TCP, &[1; 300]), Owner::Worker(worker));
            assert_eq!(of(IpProtocol::UDP, &[2; 20]), Owner::Worker(worker));
        }
        // 2,000 each, with a standard deviation of 40.
        assert!(counts.iter().all(|count| (1700..2300).contains(count)), "{counts:?}");
    }

    #[test]
    fn icmp_errors_follow_quoted_flow() {
        let protocols = [IpProtocol::TCP, IpProtocol::UDP];
        let all = (0..100).flat_map(ends).flat_map(|ends| protocols.map(|protocol| (ends, protocol)));
        for ((peer, us), protocol) in all {
            let ports = [4000u16.to_be_bytes(), 80u16.to_be_bytes()];
            let flow = frame(peer, us, protocol, &[ports[0], ports[1]].concat());
            // The quoted packet was sent by us, so its source is our endpoint.
            let ours = [&ports[1][..], &ports[0], &[0; 16]].concat();
            let quoted = &frame(us, peer, protocol, &ours)[ip::ETHERNET..];
            let mut message = [0; 100];
            let router = ends(9999)[usize::from(us.is_ipv6())].0;
            let error = match (router, us) {
                (IpAddr::V6(router_ip), IpAddr::V6(to)) => {
                    let (kind, code) = (icmpv6::DESTINATION_UNREACHABLE, icmpv6::PORT_UNREACHABLE);
                    let len = icmpv6::write_error(&mut message, kind, code, 0, quoted, router_ip, to);
                    frame(router, us, IpProtocol::ICMPV6, &message[..len])
                }
                _ => {
                    let (kind, code) = (icmpv4::DESTINATION_UNREACHABLE, icmpv4::PORT_UNREACHABLE);
                    let len = icmpv4::write_error(&mut message, kind, code, 0, quoted);
                    frame(router, us, IpProtocol::ICMP, &message[..len])
                }
            };
            assert_eq!(owner(&error), owner(&flow));
        }
    }

    #[test]
    fn fragments_go_to_one_worker() {
        let (peer, us) = ends(1)[0];
        let part = |offset: u16, payload: &[u8]| {
            let mut bytes = frame(peer, us, IpProtocol::UDP, payload);
            bytes[20..22].copy_from_slice(&(offset | 1 << 13).to_be_bytes());
            bytes[24..26].fill(0);
            let sum = offcore_wire::Sum::of(&bytes[14..34]).checksum();
            bytes[24..26].copy_from_slice(&sum.to_be_bytes());
            owner(&bytes)
        };
        assert!(matches!(part(0, &[1, 2, 3, 4, 5, 6, 7, 8]), Owner::Worker(_)));
        assert_eq!(part(0, &[1, 2, 3, 4, 5, 6, 7, 8]), part(1, &[9; 8]));
    }

    #[test]
    fn arp_is_steered_to_all_workers() {
        let arp = |len: usize| {
            let mut bytes = vec![0; len];
            let link = bytes.first_chunk_mut().unwrap();
            offcore_wire::ethernet::write_header(
                link,
                MacAddr([0xff; 6]),
                MacAddr([2; 6]),
                offcore_wire::EtherType::ARP,
            );
            owner(&bytes)
        };
        assert_eq!(arp(60), Owner::All);
        assert_eq!(arp(1500), Owner::Anybody);
        assert_eq!(owner(&[0; 60]), Owner::Anybody);
        let (peer, us) = ends(1)[0];
        assert_eq!(owner(&frame(peer, us, IpProtocol::TCP, &[1, 2, 3])), Owner::Anybody, "no ports");
    }
}
