//! Headers of generated packets that a user configures: Ethernet, optionally an 802.1Q tag, IPv4 or IPv6, and UDP or
//! TCP.
//!
//! [`Traffic`] describes them. A [`HeaderTemplate`] is built from it once and written to many packets. The flows of a
//! template differ in the fields that [`Vary`] selects: flow 0 has the configured addresses and ports, and flow n has n
//! added to them.
//!
//! Lengths and checksums are right in every packet. UDP over IPv4 has no checksum.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{
    checksum::Sum,
    ethernet::{self, EtherType, MacAddr},
    ip::IpProtocol,
    ipv4, ipv6, tcp, udp,
};

/// Maximum length of the headers in bytes: with a tag, IPv6 and TCP.
pub const MAX_HEADERS_LEN: usize =
    ethernet::HEADER_LEN + ethernet::VLAN_TAG_LEN + ipv6::HEADER_LEN + tcp::HEADER_LEN;

const TTL: u8 = 64;
/// The window in generated segments.
const WINDOW: u16 = 65_535;

/// The transport protocol of generated packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TCP segments with ACK set, without a connection.
    Tcp,
    /// UDP datagrams.
    Udp,
}

/// The fields that differ between flows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Vary {
    pub src_ip: bool,
    pub dst_ip: bool,
    pub src_port: bool,
    pub dst_port: bool,
}

/// The configuration of generated packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    /// Source MAC address.
    pub src_mac: MacAddr,
    /// Destination MAC address.
    pub dst_mac: MacAddr,
    /// The ID of an 802.1Q tag, 0 to 4095.
    pub vlan: Option<u16>,
    /// Source address, of the same family as the destination address.
    pub src_ip: IpAddr,
    pub dst_ip: IpAddr,
    /// UDP or TCP.
    pub transport: Transport,
    pub src_port: u16,
    pub dst_port: u16,
    /// The fields that differ between flows.
    pub vary: Vary,
}

/// Source and destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Addresses {
    V4(Ipv4Addr, Ipv4Addr),
    V6(Ipv6Addr, Ipv6Addr),
}

/// The headers of packets of any length and flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderTemplate {
    /// The headers of flow 0, without lengths and checksums.
    bytes: [u8; MAX_HEADERS_LEN],
    /// Offset of the IP header.
    ip: usize,
    transport: usize,
    /// Offset of the payload.
    len: usize,
    addresses: Addresses,
    kind: Transport,
    ports: [u16; 2],
    vary: Vary,
}

/// source {src} and destination {dst} are not of one family: choose both IPv4 or both IPv6
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub struct FamilyError {
    pub src: IpAddr,
    pub dst: IpAddr,
}

impl HeaderTemplate {
    /// Builds a template for this traffic.
    ///
    /// # Errors
    /// [`FamilyError`] if one address is IPv4 and the other IPv6.
    pub fn new(traffic: &Traffic) -> Result<Self, FamilyError> {
        let addresses = match (traffic.src_ip, traffic.dst_ip) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Addresses::V4(src, dst),
            (IpAddr::V6(src), IpAddr::V6(dst)) => Addresses::V6(src, dst),
            (src, dst) => return Err(FamilyError { src, dst }),
        };
        let ip = ethernet::HEADER_LEN + traffic.vlan.map_or(0, |_| ethernet::VLAN_TAG_LEN);
        let (ethertype, ip_len) = match addresses {
            Addresses::V4(..) => (EtherType::IPV4, ipv4::HEADER_LEN),
            Addresses::V6(..) => (EtherType::IPV6, ipv6::HEADER_LEN),
        };
        let (protocol, transport_len) = match traffic.transport {
            Transport::Tcp => (IpProtocol::TCP, tcp::HEADER_LEN),
            Transport::Udp => (IpProtocol::UDP, udp::HEADER_LEN),
        };
        let transport = ip + ip_len;
        let mut bytes = [0; MAX_HEADERS_LEN];
        put(&mut bytes, ethernet::field::DST, traffic.dst_mac.0);
        put(&mut bytes, ethernet::field::SRC, traffic.src_mac.0);
        let mut at = ethernet::field::ETHERTYPE;
        if let Some(id) = traffic.vlan {
            put(&mut bytes, at, EtherType::VLAN.0.to_be_bytes());
            put(&mut bytes, at + 2, (id & 0x0fff).to_be_bytes());
            at += ethernet::VLAN_TAG_LEN;
        }
        put(&mut bytes, at, ethertype.0.to_be_bytes());
        match addresses {
            Addresses::V4(..) => {
                bytes[ip + ipv4::field::VERSION_IHL] = ipv4::VERSION_IHL_PLAIN;
                bytes[ip + ipv4::field::TTL] = TTL;
                bytes[ip + ipv4::field::PROTOCOL] = protocol.0;
            }
            Addresses::V6(..) => {
                bytes[ip + ipv6::field::VERSION_CLASS_LABEL] = 0x60;
                bytes[ip + ipv6::field::NEXT_HEADER] = protocol.0;
                bytes[ip + ipv6::field::HOP_LIMIT] = TTL;
            }
        }
        if traffic.transport == Transport::Tcp {
            bytes[transport + tcp::field::DATA_OFFSET] = 5 << 4;
            bytes[transport + tcp::field::FLAGS] = tcp::TcpFlags::ACK.0;
            put(&mut bytes, transport + tcp::field::WINDOW, WINDOW.to_be_bytes());
        }
        Ok(Self {
            bytes,
            ip,
            transport,
            len: transport + transport_len,
            addresses,
            kind: traffic.transport,
            ports: [traffic.src_port, traffic.dst_port],
            vary: traffic.vary,
        })
    }

    /// Returns the length of the headers in bytes, which is the offset of the payload.
    #[inline]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the packets have a checksum that covers the payload. If so, [`write`](Self::write) needs the sum
    /// of the payload.
    #[inline]
    pub fn sums_payload(&self) -> bool {
        self.kind == Transport::Tcp || matches!(self.addresses, Addresses::V6(..))
    }

    /// Writes the headers of a packet of flow `flow` to the start of `frame`, which may be only the first part of the
    /// packet. `frame_len` is the length of the packet in bytes, without FCS. The length fields limit it. `number` is
    /// used for the TCP sequence number. `payload` is the sum of the payload, if it is needed.
    ///
    /// # Panics
    /// If `frame` is shorter than the headers.
    #[inline]
    pub fn write(&self, frame: &mut [u8], flow: u32, number: u32, frame_len: usize, payload: Sum) {
        let mut head = self.bytes;
        self.finish(&mut head, flow, number, frame_len, payload);
        frame[..self.len].copy_from_slice(&head[..self.len]);
    }

    #[inline]
    fn finish(
        &self,
        head: &mut [u8; MAX_HEADERS_LEN],
        flow: u32,
        number: u32,
        frame_len: usize,
        payload: Sum,
    ) {
        let transport_len = (frame_len - self.transport) as u16;
        let protocol = if self.kind == Transport::Tcp { IpProtocol::TCP } else { IpProtocol::UDP };
        let addresses = self.addresses_of(flow);
        let pseudo = match addresses {
            Addresses::V4(src, dst) => {
                let total = (frame_len - self.ip) as u16;
                put(head, self.ip + ipv4::field::TOTAL_LEN, total.to_be_bytes());
                put(head, self.ip + ipv4::field::SRC, src.octets());
                put(head, self.ip + ipv4::field::DST, dst.octets());
                let checksum = Sum::of(&head[self.ip..self.transport]).checksum();
                put(head, self.ip + ipv4::field::CHECKSUM, checksum.to_be_bytes());
                if self.sums_payload() {
                    Sum::pseudo_v4(src, dst, protocol, transport_len)
                } else {
                    Sum::ZERO
                }
            }
            Addresses::V6(src, dst) => {
                put(head, self.ip + ipv6::field::PAYLOAD_LEN, transport_len.to_be_bytes());
                put(head, self.ip + ipv6::field::SRC, src.octets());
                put(head, self.ip + ipv6::field::DST, dst.octets());
                Sum::pseudo_v6(src, dst, protocol, transport_len.into())
            }
        };
        let [src, dst] = self.ports;
        let add = |port: u16, varies: bool| if varies { port.wrapping_add(flow as u16) } else { port };
        put(head, self.transport, add(src, self.vary.src_port).to_be_bytes());
        put(head, self.transport + 2, add(dst, self.vary.dst_port).to_be_bytes());
        match self.kind {
            Transport::Tcp => {
                put(head, self.transport + tcp::field::SEQ, number.to_be_bytes());
                let sum = pseudo + Sum::of(&head[self.transport..self.len]) + payload;
                put(head, self.transport + tcp::field::CHECKSUM, sum.checksum().to_be_bytes());
            }
            Transport::Udp => {
                put(head, self.transport + udp::field::LENGTH, transport_len.to_be_bytes());
                if self.sums_payload() {
                    let sum = pseudo + Sum::of(&head[self.transport..self.len]) + payload;
                    put(head, self.transport + udp::field::CHECKSUM, sum.checksum_nonzero().to_be_bytes());
                }
            }
        }
    }

    #[inline]
    fn addresses_of(&self, flow: u32) -> Addresses {
        let Vary { src_ip, dst_ip, .. } = self.vary;
        match self.addresses {
            Addresses::V4(src, dst) => {
                let add = |address: Ipv4Addr, varies| match varies {
                    true => Ipv4Addr::from_bits(address.to_bits().wrapping_add(flow)),
                    false => address,
                };
                Addresses::V4(add(src, src_ip), add(dst, dst_ip))
            }
            Addresses::V6(src, dst) => {
                let add = |address: Ipv6Addr, varies| match varies {
                    true => Ipv6Addr::from_bits(address.to_bits().wrapping_add(flow.into())),
                    false => address,
                };
                Addresses::V6(add(src, src_ip), add(dst, dst_ip))
            }
        }
    }
}

/// Writes `value` at offset `at`, which is inside the headers in any case.
#[inline(always)]
fn put<const N: usize>(head: &mut [u8; MAX_HEADERS_LEN], at: usize, value: [u8; N]) {
    if let Some(field) = head.get_mut(at..).and_then(<[u8]>::first_chunk_mut) {
        *field = value;
    }
}

#[cfg(test)]
mod tests;
