//! Headers of the segments of a connection. The constant fields are prepared once, and the variable fields are written
//! into copies.

use crate::{
    checksum::Sum,
    ethernet::{self, EtherType, EthernetFrame, MacAddr},
    field::put,
    ip::IpProtocol,
    ipv4::{self, Ipv4Packet},
    ipv6::{self, Ipv6Packet},
    tcp::{self, TcpFlags, TcpOptions, TcpSegment, Timestamps},
};

/// Maximum length of the headers in bytes: Ethernet, IPv6, and TCP with timestamps.
pub const TCP_HEADERS_LEN: usize = ethernet::HEADER_LEN + ipv6::HEADER_LEN + TIMED;

/// Length of a TCP header with timestamps, as [`TcpOptions::write`] lays them out, and the offsets of both timestamps.
const TIMED: usize = tcp::HEADER_LEN + 12;
const VALUE: usize = tcp::HEADER_LEN + 4;
const ECHO: usize = tcp::HEADER_LEN + 8;

/// The fields that vary between the segments of a connection.
#[derive(Debug, Clone, Copy)]
pub struct TcpVarying {
    pub src_mac: MacAddr,
    pub dst_mac: MacAddr,
    /// ECN codepoint, 0 to 3.
    pub ecn: u8,
    pub seq: u32,
    pub ack: u32,
    pub flags: TcpFlags,
    pub window: u16,
    /// The urgent pointer. Only valid with [`TcpFlags::URG`].
    pub urgent: u16,
    /// Only used if the connection has timestamps.
    pub timestamps: Timestamps,
    /// Length of the payload in bytes. With the headers, it must fit into an IP packet.
    pub payload_len: usize,
    /// The sum of the payload. With `None`, the port completes the checksum: the field gets the sum of the pseudo
    /// header.
    pub payload: Option<Sum>,
}

/// The headers of Ethernet, IPv4 or IPv6, and TCP, with timestamps or without options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpTemplate {
    /// The headers, at the end of the array.
    bytes: [u8; TCP_HEADERS_LEN],
    is_v6: bool,
    has_timestamps: bool,
    /// Sums of the constant fields: of the IPv4 header, of the pseudo header and of the TCP header.
    ip: Sum,
    pseudo: Sum,
    tcp: Sum,
}

impl TcpTemplate {
    /// Creates a template from the headers of any segment of the connection. Returns `None` if they have IP options,
    /// extension headers, or other TCP options than timestamps.
    pub fn new(headers: &[u8]) -> Option<Self> {
        let frame = EthernetFrame::new_checked(headers).ok()?;
        let (is_v6, ip_len, pseudo) = match frame.ethertype() {
            EtherType::IPV4 => {
                let ip = Ipv4Packet::head_of(frame.payload(), usize::from(u16::MAX)).ok()?;
                (false, ipv4::HEADER_LEN, Sum::pseudo_v4(ip.src(), ip.dst(), IpProtocol::TCP, 0))
            }
            EtherType::IPV6 => {
                let ip = Ipv6Packet::head_of(frame.payload(), usize::from(u16::MAX)).ok()?;
                (true, ipv6::HEADER_LEN, Sum::pseudo_v6(ip.src(), ip.dst(), IpProtocol::TCP, 0))
            }
            _ => return None,
        };
        let segment = TcpSegment::new_checked(frame.payload().get(ip_len..)?).ok()?;
        let mut options = TcpOptions::NONE;
        options.read(segment.options());
        let has_timestamps = options.timestamps.is_some();
        let alone = TcpOptions { timestamps: options.timestamps, ..TcpOptions::NONE };
        let (mut written, tcp_len) = ([0; TIMED], tcp::HEADER_LEN + alone.len());
        alone.write(&mut written);
        let plain = segment.options() == &written[..alone.len()];
        if !plain || headers.len() != ethernet::HEADER_LEN + ip_len + tcp_len {
            return None;
        }
        let mut bytes = [0; TCP_HEADERS_LEN];
        bytes[TCP_HEADERS_LEN - headers.len()..].copy_from_slice(headers);
        let mut template = Self { bytes, is_v6, has_timestamps, ip: Sum::ZERO, pseudo, tcp: Sum::ZERO };
        template.blank();
        Some(template)
    }

    /// Returns the length of the headers in bytes.
    #[inline]
    pub fn header_len(&self) -> usize {
        TCP_HEADERS_LEN - self.ip_at() + ethernet::HEADER_LEN
    }

    /// Returns the offset of the TCP header in the headers.
    #[inline]
    pub fn transport(&self) -> usize {
        ethernet::HEADER_LEN + if self.is_v6 { ipv6::HEADER_LEN } else { ipv4::HEADER_LEN }
    }

    /// Returns whether the segments have timestamps.
    pub fn has_timestamps(&self) -> bool {
        self.has_timestamps
    }

    const fn tcp_at(&self) -> usize {
        TCP_HEADERS_LEN - if self.has_timestamps { TIMED } else { tcp::HEADER_LEN }
    }

    const fn ip_at(&self) -> usize {
        self.tcp_at() - if self.is_v6 { ipv6::HEADER_LEN } else { ipv4::HEADER_LEN }
    }

    /// Clears the variable fields, and sums the constant ones.
    fn blank(&mut self) {
        let none = TcpVarying {
            src_mac: MacAddr([0; 6]),
            dst_mac: MacAddr([0; 6]),
            ecn: 0,
            seq: 0,
            ack: 0,
            flags: TcpFlags(0),
            window: 0,
            urgent: 0,
            timestamps: Timestamps { value: 0, echo: 0 },
            payload_len: 0,
            payload: None,
        };
        let (ip, tcp) = (self.ip_at(), self.tcp_at());
        // `write_as` combines its values with these bits.
        self.bytes[ip + 1] &= if self.is_v6 { !0x30 } else { !0x03 };
        let mut bytes = [0; TCP_HEADERS_LEN];
        self.write(&mut bytes, &none);
        put(&mut bytes, tcp + tcp::field::CHECKSUM, [0; 2]);
        if !self.is_v6 {
            put(&mut bytes, ip + ipv4::field::TOTAL_LEN, [0; 2]);
            put(&mut bytes, ip + ipv4::field::CHECKSUM, [0; 2]);
            self.ip = Sum::of(&bytes[ip..tcp]);
        }
        self.tcp = Sum::of(&bytes[tcp..]);
        self.bytes = bytes;
    }

    /// Writes the headers to the end of `to`. The bytes before them are overwritten, too.
    #[inline]
    pub fn write(&self, to: &mut [u8; TCP_HEADERS_LEN], varying: &TcpVarying) {
        const IP4: usize = ipv4::HEADER_LEN;
        const IP6: usize = ipv6::HEADER_LEN;
        match (self.is_v6, self.has_timestamps) {
            (false, true) => self.write_as::<IP4, TIMED>(to, varying),
            (false, false) => self.write_as::<IP4, { tcp::HEADER_LEN }>(to, varying),
            (true, true) => self.write_as::<IP6, TIMED>(to, varying),
            (true, false) => self.write_as::<IP6, { tcp::HEADER_LEN }>(to, varying),
        }
    }

    /// Writes headers of constant lengths, so that all offsets are constants.
    #[inline(always)]
    fn write_as<const IP: usize, const TCP: usize>(
        &self,
        to: &mut [u8; TCP_HEADERS_LEN],
        varying: &TcpVarying,
    ) {
        let v = varying;
        let tcp = TCP_HEADERS_LEN - TCP;
        let ip = tcp - IP;
        let link = ip - ethernet::HEADER_LEN;
        let transport_len = TCP + v.payload_len;
        *to = self.bytes;
        put(to, link + ethernet::field::DST, v.dst_mac.0);
        put(to, link + ethernet::field::SRC, v.src_mac.0);
        if IP == ipv4::HEADER_LEN {
            let total_len = (IP + transport_len) as u16;
            let sum = u32::from(self.ip.value()) + u32::from(total_len) + u32::from(v.ecn);
            to[ip + ipv4::field::DSCP_ECN] |= v.ecn;
            put(to, ip + ipv4::field::TOTAL_LEN, total_len.to_be_bytes());
            put(to, ip + ipv4::field::CHECKSUM, Sum::from(sum).checksum().to_be_bytes());
        } else {
            // The lower half of the traffic class is in the upper half of the second byte.
            to[ip + ipv6::field::VERSION_CLASS_LABEL + 1] |= v.ecn << 4;
            put(to, ip + ipv6::field::PAYLOAD_LEN, (transport_len as u16).to_be_bytes());
        }
        put(to, tcp + tcp::field::SEQ, v.seq.to_be_bytes());
        put(to, tcp + tcp::field::ACK, v.ack.to_be_bytes());
        to[tcp + tcp::field::FLAGS] = v.flags.0;
        put(to, tcp + tcp::field::WINDOW, v.window.to_be_bytes());
        put(to, tcp + tcp::field::URGENT, v.urgent.to_be_bytes());
        // Sums the fields: reading back the header would stall on the stores.
        let mut words = u64::from(v.seq) + u64::from(v.ack) + u64::from(v.flags.0) + u64::from(v.window);
        words += u64::from(v.urgent);
        if TCP == TIMED {
            put(to, tcp + VALUE, v.timestamps.value.to_be_bytes());
            put(to, tcp + ECHO, v.timestamps.echo.to_be_bytes());
            words += u64::from(v.timestamps.value) + u64::from(v.timestamps.echo);
        }
        let pseudo = u64::from(self.pseudo.value()) + transport_len as u64;
        let field = match v.payload {
            None => Sum::from(pseudo).value(),
            Some(payload) => {
                let all = pseudo + words + u64::from(self.tcp.value()) + u64::from(payload.value());
                Sum::from(all).checksum()
            }
        };
        put(to, tcp + tcp::field::CHECKSUM, field.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;
    use crate::{Ipv4Header, Ipv6Header, TcpHeader};

    const MACS: [MacAddr; 2] = [MacAddr([2, 0, 0, 0, 0, 1]), MacAddr([2, 0, 0, 0, 0, 2])];

    /// Writes the headers of a segment with the individual writers.
    fn headers(is_v6: bool, timed: bool, v: &TcpVarying) -> Vec<u8> {
        let ip_len = if is_v6 { ipv6::HEADER_LEN } else { ipv4::HEADER_LEN };
        let mut options = TcpOptions::NONE;
        options.timestamps = timed.then_some(v.timestamps);
        let tcp_len = tcp::HEADER_LEN + options.len();
        let transport_len = tcp_len + v.payload_len;
        let mut bytes = vec![0; ethernet::HEADER_LEN + ip_len + tcp_len];
        let (link, rest) = bytes.split_first_chunk_mut().unwrap();
        let pseudo = if is_v6 {
            ethernet::write_header(link, v.dst_mac, v.src_mac, EtherType::IPV6);
            let (src, dst) =
                (Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1), Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 2));
            let header = Ipv6Header {
                src,
                dst,
                next_header: IpProtocol::TCP,
                traffic_class: v.ecn,
                flow_label: 0,
                hop_limit: 64,
                payload_len: transport_len as u16,
            };
            header.write(rest.first_chunk_mut().unwrap());
            Sum::pseudo_v6(src, dst, IpProtocol::TCP, transport_len as u32)
        } else {
            ethernet::write_header(link, v.dst_mac, v.src_mac, EtherType::IPV4);
            let (src, dst) = (Ipv4Addr::new(10, 1, 2, 3), Ipv4Addr::new(192, 168, 255, 254));
            let header = Ipv4Header {
                src,
                dst,
                protocol: IpProtocol::TCP,
                dscp_ecn: v.ecn,
                ident: 7,
                dont_fragment: true,
                ttl: 64,
                total_len: (ip_len + transport_len) as u16,
            };
            header.write(rest.first_chunk_mut().unwrap());
            Sum::pseudo_v4(src, dst, IpProtocol::TCP, transport_len as u16)
        };
        let segment = &mut rest[ip_len..];
        let (fixed, rest) = segment.split_first_chunk_mut().unwrap();
        let TcpVarying { seq, ack, flags, window, urgent, .. } = *v;
        let header = TcpHeader { src_port: 40_000, dst_port: 80, seq, ack, flags, window, urgent };
        header.write(fixed, options.len());
        options.write(rest);
        let field = match v.payload {
            None => pseudo.value(),
            Some(payload) => (pseudo + Sum::of(segment) + payload).checksum(),
        };
        segment[16..18].copy_from_slice(&field.to_be_bytes());
        bytes
    }

    fn varying(seed: u32) -> TcpVarying {
        let mut state = u64::from(seed) << 32 | 0x9e37_79b9;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 32) as u32
        };
        // The extreme values occur, too, because ones' complement has two zeros.
        let mut number = || match next() % 8 {
            0 => 0,
            1 => u32::MAX,
            _ => next(),
        };
        TcpVarying {
            src_mac: MACS[(seed % 2) as usize],
            dst_mac: MACS[(seed / 2 % 2) as usize],
            ecn: (number() % 4) as u8,
            seq: number(),
            ack: number(),
            flags: TcpFlags(number() as u8),
            window: number() as u16,
            urgent: number() as u16,
            timestamps: Timestamps { value: number(), echo: number() },
            payload_len: number() as usize % 60_000,
            payload: (!seed.is_multiple_of(3)).then(|| Sum::from(number() as u16)),
        }
    }

    #[test]
    fn tcp_template_matches_header_writers() {
        for (is_v6, timed) in [(false, false), (false, true), (true, false), (true, true)] {
            let template = TcpTemplate::new(&headers(is_v6, timed, &varying(77))).unwrap();
            assert_eq!(template.has_timestamps(), timed);
            for seed in 0..5000 {
                let varying = varying(seed);
                let mut bytes = [0xa5; TCP_HEADERS_LEN];
                template.write(&mut bytes, &varying);
                let expected = headers(is_v6, timed, &varying);
                assert_eq!(template.header_len(), expected.len());
                assert_eq!(
                    bytes[TCP_HEADERS_LEN - template.header_len()..],
                    expected,
                    "{is_v6} {timed} {varying:?}"
                );
                assert_eq!(template.transport() + if timed { TIMED } else { 20 }, template.header_len());
            }
        }
    }

    #[test]
    fn unsupported_headers_have_no_template() {
        let bytes = headers(false, true, &varying(1));
        assert!(TcpTemplate::new(&bytes[..bytes.len() - 1]).is_none());
        assert!(TcpTemplate::new(&[&bytes[..], &[0]].concat()).is_none());
        let mut sack = bytes.clone();
        // SACK permitted replaces the padding.
        sack[54..56].copy_from_slice(&[4, 2]);
        assert!(TcpTemplate::new(&sack).is_none());
        let mut arp = bytes;
        arp[12..14].copy_from_slice(&[8, 6]);
        assert!(TcpTemplate::new(&arp).is_none());
    }
}
