//! Conversion of script segments to frames, and of frames to script segments.

use std::net::{IpAddr, SocketAddr};

use offcore_wire::{
    EtherType, EthernetFrame, Icmpv6, IpProtocol, Ipv4Header, Ipv4Packet, Ipv6Header, Ipv6Packet, MacAddr,
    NeighborAdvert, SackBlock, Sum, TcpFlags, TcpHeader, TcpOptions, TcpSegment, ethernet, icmpv4, icmpv6,
    tcp,
};

use crate::language::{Icmp, IcmpKind, Segment, TcpOption};

/// MAC addresses of the host under test and of all other hosts.
pub(crate) const OURS: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
pub(crate) const THEIRS: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);

/// The peer's initial sequence number. Its sequence numbers wrap around after 4 KB.
const PEER_ISN: u32 = 0xffff_f000;

/// Returns the byte of the sender's stream at `seq`. As in scripts, the first byte is at 1.
pub(crate) fn content(seq: u32) -> u8 {
    (seq ^ seq >> 8 ^ seq >> 16) as u8
}

/// Returns a byte that differs from the stream's byte at `seq`.
pub(crate) fn altered(seq: u32) -> u8 {
    !content(seq)
}

/// A connection from the script's point of view.
#[derive(Debug, Clone)]
pub(crate) struct Flow {
    pub(crate) ours: SocketAddr,
    pub(crate) theirs: SocketAddr,
    /// Our initial sequence number, known after the first SYN.
    isn: Option<u32>,
    /// Difference between our timestamps and those in the script.
    stamps: Option<u32>,
}

impl Flow {
    pub(crate) fn new(ours: SocketAddr, theirs: SocketAddr) -> Self {
        Self { ours, theirs, isn: None, stamps: None }
    }

    /// Makes the next SYN define a new initial sequence number and new timestamps.
    pub(crate) fn renumber(&mut self) {
        (self.isn, self.stamps) = (None, None);
    }

    fn ours_at(&self, seq: u32) -> u32 {
        self.isn.unwrap_or(0).wrapping_add(seq)
    }

    /// Returns the frame of a segment from the peer.
    pub(crate) fn frame(&self, segment: &Segment) -> Vec<u8> {
        let options = self.options(segment.options.as_deref().unwrap_or_default());
        let header = TcpHeader {
            src_port: self.theirs.port(),
            dst_port: self.ours.port(),
            seq: PEER_ISN.wrapping_add(segment.seq),
            ack: segment.ack.map_or(0, |ack| self.ours_at(ack)),
            flags: segment.flags,
            window: segment.window.unwrap_or(0),
            urgent: segment.urgent,
        };
        let mut fixed = [0; tcp::HEADER_LEN];
        header.write(&mut fixed, options.len());
        let byte = if segment.altered { altered } else { content };
        let payload = (0..segment.len).map(|at| byte(segment.seq.wrapping_add(at)));
        let mut bytes: Vec<u8> = fixed.into_iter().chain(options).chain(payload).collect();
        let pseudo = pseudo(self.theirs.ip(), self.ours.ip(), IpProtocol::TCP, bytes.len());
        let sum = (pseudo + Sum::of(&bytes)).checksum() ^ u16::from(segment.bad_checksum);
        bytes[16..18].copy_from_slice(&sum.to_be_bytes());
        packet(self.theirs.ip(), self.ours.ip(), IpProtocol::TCP, segment.ecn, &bytes)
    }

    fn options(&self, options: &[TcpOption]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for option in options {
            match option {
                TcpOption::End => bytes.push(0),
                TcpOption::Nop => bytes.push(1),
                TcpOption::Mss(mss) => bytes.extend([[2, 4], mss.to_be_bytes()].as_flattened()),
                TcpOption::Scale(scale) => bytes.extend([3, 3, *scale]),
                TcpOption::SackPermitted => bytes.extend([4, 2]),
                TcpOption::Sack(blocks) => {
                    bytes.extend([5, 2 + 8 * blocks.len() as u8]);
                    let edges = blocks.iter().flat_map(|block| [block.0, block.1]);
                    bytes.extend(edges.flat_map(|edge| self.ours_at(edge).to_be_bytes()));
                }
                TcpOption::Timestamps(value, echo) => {
                    // An echo of 0 stands for no echo.
                    let echo = if *echo == 0 { 0 } else { self.stamps.unwrap_or(0).wrapping_add(*echo) };
                    bytes.extend([8, 10]);
                    bytes.extend([value.unwrap_or(0), echo].iter().flat_map(|stamp| stamp.to_be_bytes()));
                }
                TcpOption::Unknown(kind, value) => {
                    bytes.extend([*kind, 2 + value.len() as u8]);
                    bytes.extend(value);
                }
            }
        }
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// Returns the frame of an ICMP error about a segment from the host under test.
    pub(crate) fn error(&self, icmp: &Icmp) -> Vec<u8> {
        let header = TcpHeader {
            src_port: self.ours.port(),
            dst_port: self.theirs.port(),
            seq: self.ours_at(icmp.seq),
            ack: 0,
            flags: TcpFlags::ACK,
            window: 0,
            urgent: 0,
        };
        let mut bytes = [0; tcp::HEADER_LEN];
        header.write(&mut bytes, 0);
        let whole = tcp::HEADER_LEN + icmp.len as usize;
        let quoted = &ip_packet(self.ours.ip(), self.theirs.ip(), IpProtocol::TCP, 0, &bytes, whole);
        let mut message = [0; 256];
        let (src, dst) = (self.theirs.ip(), self.ours.ip());
        let (protocol, len) = match (src, dst) {
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let (kind, code, rest) = match icmp.kind {
                    IcmpKind::Unreachable { v6, .. } => (icmpv6::DESTINATION_UNREACHABLE, v6, 0),
                    IcmpKind::TooBig { mtu } => (icmpv6::PACKET_TOO_BIG, 0, mtu.into()),
                    IcmpKind::TimeExceeded => (icmpv6::TIME_EXCEEDED, 0, 0),
                };
                let len = icmpv6::write_error(&mut message, kind, code, rest, quoted, src, dst);
                (IpProtocol::ICMPV6, len)
            }
            _ => {
                let (kind, code, rest) = match icmp.kind {
                    IcmpKind::Unreachable { v4, .. } => (icmpv4::DESTINATION_UNREACHABLE, v4, 0),
                    IcmpKind::TooBig { mtu } => (icmpv4::DESTINATION_UNREACHABLE, 4, mtu.into()),
                    IcmpKind::TimeExceeded => (icmpv4::TIME_EXCEEDED, 0, 0),
                };
                (IpProtocol::ICMP, icmpv4::write_error(&mut message, kind, code, rest, quoted))
            }
        };
        packet(src, dst, protocol, 0, &message[..len])
    }

    /// Parses the segment in a frame from the host under test. `expected` has the script's value of the first
    /// timestamp.
    ///
    /// # Errors
    /// Describes defects that are independent of the expected segment.
    pub(crate) fn read(&mut self, frame: &[u8], expected: Option<&Segment>) -> Result<Segment, String> {
        let (src, dst, ecn, bytes) = open(frame)?;
        let sum = pseudo(src, dst, IpProtocol::TCP, bytes.len()) + Sum::of(bytes);
        if !sum.is_valid() {
            return Err("a segment with a wrong TCP checksum".into());
        }
        let segment = TcpSegment::new_checked(bytes).map_err(|error| error.to_string())?;
        let ends = (SocketAddr::new(src, segment.src_port()), SocketAddr::new(dst, segment.dst_port()));
        if ends != (self.ours, self.theirs) {
            return Err(format!("a segment from {} to {}", ends.0, ends.1));
        }
        let flags = segment.flags();
        if flags.contains(TcpFlags::SYN) && self.isn.is_none() {
            self.isn = Some(segment.seq());
        }
        let seq = segment.seq().wrapping_sub(self.isn.unwrap_or(0));
        let first = if flags.contains(TcpFlags::SYN) { seq.wrapping_add(1) } else { seq };
        let mut bytes = segment.payload().iter().enumerate();
        if let Some((at, byte)) = bytes.find(|(at, byte)| **byte != content(first.wrapping_add(*at as u32))) {
            return Err(format!(
                "a segment of {seq} whose payload is {byte:#x} at {}",
                first.wrapping_add(at as u32)
            ));
        }
        if let (None, Some(value)) = (self.stamps, read_options(segment.options()).timestamps) {
            let options = expected.and_then(|expected| expected.options.as_deref()).unwrap_or_default();
            let first = options.iter().find_map(|option| match option {
                TcpOption::Timestamps(value, _) => *value,
                _ => None,
            });
            self.stamps = first.map(|first| value.value.wrapping_sub(first));
        }
        let acked = segment.ack().wrapping_sub(PEER_ISN);
        Ok(Segment {
            ecn,
            flags,
            seq,
            len: segment.payload().len() as u32,
            ack: flags.contains(TcpFlags::ACK).then_some(acked),
            window: Some(segment.window()),
            urgent: segment.urgent(),
            options: Some(self.read_options(segment.options())),
            altered: false,
            bad_checksum: false,
        })
    }

    fn read_options(&self, mut rest: &[u8]) -> Vec<TcpOption> {
        let mut options = Vec::new();
        while let Some((kind, after)) = rest.split_first() {
            let simple = match kind {
                0 => Some(TcpOption::End),
                1 => Some(TcpOption::Nop),
                _ => None,
            };
            if let Some(simple) = simple {
                options.push(simple);
                rest = after;
                continue;
            }
            let len = after.first().map_or(2, |len| usize::from(*len)).clamp(2, rest.len().max(2));
            let (option, after) = rest.split_at(len.min(rest.len()));
            let known = read_options(option);
            let relative =
                |block: &SackBlock| (block.start.wrapping_sub(PEER_ISN), block.end.wrapping_sub(PEER_ISN));
            options.push(match (kind, known.mss, known.window_scale, known.timestamps) {
                (2, Some(mss), ..) => TcpOption::Mss(mss),
                (3, _, Some(scale), _) => TcpOption::Scale(scale),
                (4, ..) => TcpOption::SackPermitted,
                (5, ..) => TcpOption::Sack(known.sack.iter().map(relative).collect()),
                (8, _, _, Some(stamps)) => {
                    let value = stamps.value.wrapping_sub(self.stamps.unwrap_or(0));
                    TcpOption::Timestamps(Some(value), stamps.echo)
                }
                _ => TcpOption::Unknown(*kind, option.get(2..).unwrap_or_default().to_vec()),
            });
            rest = after;
        }
        options
    }
}

fn pseudo(src: IpAddr, dst: IpAddr, protocol: IpProtocol, len: usize) -> Sum {
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => Sum::pseudo_v4(src, dst, protocol, len as u16),
        (IpAddr::V6(src), IpAddr::V6(dst)) => Sum::pseudo_v6(src, dst, protocol, len as u32),
        _ => Sum::ZERO,
    }
}

/// Returns an IP packet whose header states a payload length of `len` bytes.
fn ip_packet(src: IpAddr, dst: IpAddr, protocol: IpProtocol, ecn: u8, payload: &[u8], len: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let total_len = (20 + len) as u16;
            let header = Ipv4Header {
                src,
                dst,
                protocol,
                dscp_ecn: ecn,
                ident: 1,
                dont_fragment: true,
                ttl: 64,
                total_len,
            };
            let mut fixed = [0; 20];
            header.write(&mut fixed);
            bytes.extend(fixed);
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let header = Ipv6Header {
                src,
                dst,
                next_header: protocol,
                traffic_class: ecn,
                flow_label: 0,
                hop_limit: 255,
                payload_len: len as u16,
            };
            let mut fixed = [0; 40];
            header.write(&mut fixed);
            bytes.extend(fixed);
        }
        _ => {}
    }
    bytes.extend(payload);
    bytes
}

/// Returns a frame to the host under test.
fn packet(src: IpAddr, dst: IpAddr, protocol: IpProtocol, ecn: u8, payload: &[u8]) -> Vec<u8> {
    let mut link = [0; ethernet::HEADER_LEN];
    let kind = if src.is_ipv4() { EtherType::IPV4 } else { EtherType::IPV6 };
    ethernet::write_header(&mut link, OURS, THEIRS, kind);
    let ip = ip_packet(src, dst, protocol, ecn, payload, payload.len());
    link.into_iter().chain(ip).collect()
}

/// Returns the addresses, the ECN codepoint and the payload of a TCP packet from the host under test.
fn open(frame: &[u8]) -> Result<(IpAddr, IpAddr, u8, &[u8]), String> {
    let link = EthernetFrame::new_checked(frame).map_err(|error| error.to_string())?;
    if (link.src(), link.dst()) != (OURS, THEIRS) {
        return Err(format!("a frame from {:?} to {:?}", link.src(), link.dst()));
    }
    let (src, dst, ecn, protocol, bytes) = if link.ethertype() == EtherType::IPV4 {
        let ip = Ipv4Packet::new_checked(link.payload()).map_err(|error| error.to_string())?;
        if !ip.verify_checksum() || !ip.dont_fragment() {
            return Err("an IPv4 packet with a wrong checksum, or that may be fragmented".into());
        }
        (ip.src().into(), ip.dst().into(), ip.ecn(), ip.protocol(), ip.payload())
    } else {
        let ip = Ipv6Packet::new_checked(link.payload()).map_err(|error| error.to_string())?;
        (ip.src().into(), ip.dst().into(), ip.traffic_class() & 3, ip.next_header(), ip.payload())
    };
    if protocol != IpProtocol::TCP {
        return Err(format!("a packet of protocol {}", protocol.0));
    }
    Ok((src, dst, ecn, bytes))
}

/// Returns the answer of the peer's station to an ARP request or neighbour solicitation. Group reports have no answer.
/// Returns `None` for other frames.
pub(crate) fn neighbour(frame: &[u8], theirs: IpAddr) -> Option<Option<Vec<u8>>> {
    let link = EthernetFrame::new_checked(frame).ok()?;
    match (link.ethertype(), theirs) {
        (EtherType::ARP, IpAddr::V4(address)) => {
            let question = offcore_wire::Arp::parse(link.payload()).ok()?;
            Some((question.target_ip == address).then(|| {
                let answer = offcore_wire::Arp {
                    operation: offcore_wire::ArpOperation::Reply,
                    sender_mac: THEIRS,
                    sender_ip: address,
                    target_mac: OURS,
                    target_ip: question.sender_ip,
                };
                let mut frame = [0; ethernet::HEADER_LEN + offcore_wire::arp::LEN];
                let (link, rest) = frame.split_at_mut(ethernet::HEADER_LEN);
                if let (Some(link), Some(rest)) = (link.first_chunk_mut(), rest.first_chunk_mut()) {
                    ethernet::write_header(link, OURS, THEIRS, EtherType::ARP);
                    answer.write(rest);
                }
                frame.to_vec()
            }))
        }
        (EtherType::ARP, _) => Some(None),
        (EtherType::IPV6, _) => {
            let ip = Ipv6Packet::new_checked(link.payload()).ok()?;
            if ip.dst() == icmpv6::listener::REPORTS {
                return Some(None);
            }
            let Icmpv6::NeighborSolicit(question) = Icmpv6::parse(ip.payload()).ok()? else { return None };
            if ip.next_header() != IpProtocol::ICMPV6 {
                return None;
            }
            Some((IpAddr::from(question.target) == theirs).then(|| {
                let answer = NeighborAdvert {
                    router: false,
                    solicited: true,
                    replaces: true,
                    target: question.target,
                    target_link: Some(THEIRS),
                };
                let mut message = [0; 32];
                let len = answer.write(&mut message, question.target, ip.src());
                packet(theirs, ip.src().into(), IpProtocol::ICMPV6, 0, &message[..len])
            }))
        }
        _ => None,
    }
}

/// Parses the options of a segment.
fn read_options(bytes: &[u8]) -> TcpOptions {
    let mut options = TcpOptions::NONE;
    options.read(bytes);
    options
}
