//! The simulated peer: the data that it has sent and received, and the encoding of its frames.

use std::net::Ipv4Addr;
use std::ops::Range;

use offcore_stats::time::Time;
use offcore_wire::{
    Arp, ArpOperation, EtherType, EthernetFrame, IpProtocol, Ipv4Header, TcpFlags, TcpHeader, TcpOptions,
    TcpSegment, Timestamps, arp, ethernet, icmpv4, ipv4,
};

use crate::frame;
use crate::host::mac;

/// Addresses of the host under test and of the peer.
pub(crate) const OURS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
pub(crate) const THEIRS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
/// Offset of the TCP header.
const TCP: usize = ethernet::HEADER_LEN + ipv4::HEADER_LEN;
/// Sequence number of the peer's SYN. Its sequence numbers wrap around soon.
pub(crate) const PEER_ISN: u32 = u32::MAX - 5000;

/// Returns the byte at a position of the peer's stream.
pub(crate) fn theirs(position: u32) -> u8 {
    (position.wrapping_mul(0x9e37_79b1) >> 24) as u8
}

/// Returns the byte at a position of the host's stream.
pub(crate) fn ours(position: u32) -> u8 {
    (position.wrapping_mul(0x85eb_ca6b) >> 23) as u8
}

/// State of both ends of the connection.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) ports: (u16, u16),
    /// Sequence number of the host's SYN.
    pub(crate) isn: u32,
    /// All stream positions that the peer has sent, acceptable or not. A FIN occupies one position.
    pub(crate) sent: Vec<Range<u64>>,
    /// Position after the last correct data of the peer.
    pub(crate) next: u64,
    /// Position after the last data of the host, including its FIN.
    pub(crate) seen: u64,
    /// The peer's largest valid acknowledgement.
    pub(crate) acked: u64,
    /// The host's largest acknowledgement, and the largest right edge of its window.
    pub(crate) host_acked: u64,
    pub(crate) host_edge: u64,
    pub(crate) host_scale: u8,
    pub(crate) sack: bool,
    /// The host's last timestamp, or `None` if timestamps are not used.
    pub(crate) stamp: Option<u32>,
}

impl Peer {
    /// Creates a peer that has sent nothing, from the ports of the host and the peer.
    pub(crate) fn new(ports: (u16, u16), sack: bool) -> Self {
        Self {
            ports,
            isn: 0,
            sent: Vec::new(),
            next: 0,
            seen: 0,
            acked: 0,
            host_acked: 0,
            host_edge: 0,
            host_scale: 0,
            sack,
            stamp: None,
        }
    }

    /// Processes the host's SYN or SYN-ACK.
    pub(crate) fn take_syn(&mut self, frame: &[u8]) {
        let segment = segment(frame).expect("a SYN");
        assert!(segment.flags().contains(TcpFlags::SYN));
        let mut options = TcpOptions::NONE;
        options.read(segment.options());
        self.isn = segment.seq();
        self.ports = (segment.src_port(), segment.dst_port());
        self.host_scale = options.window_scale.unwrap_or(0);
        self.stamp = options.timestamps.map(|stamps| stamps.value);
    }

    /// Returns the header and options of the peer's next correct segment, which acknowledges all seen data.
    pub(crate) fn segment(&self, now: Time, window: u16) -> (TcpHeader, TcpOptions) {
        let header = TcpHeader {
            src_port: self.ports.1,
            dst_port: self.ports.0,
            seq: self.seq(self.next),
            ack: self.ack(self.seen),
            flags: TcpFlags::ACK,
            window,
            urgent: 0,
        };
        let mut options = TcpOptions::NONE;
        options.timestamps = self.stamp.map(|echo| Timestamps { value: clock(now), echo });
        (header, options)
    }

    pub(crate) fn seq(&self, position: u64) -> u32 {
        PEER_ISN.wrapping_add(1).wrapping_add(position as u32)
    }

    pub(crate) fn ack(&self, position: u64) -> u32 {
        self.isn.wrapping_add(1).wrapping_add(position as u32)
    }

    /// Converts a sequence number of the peer to a stream position.
    pub(crate) fn position(&self, seq: u32) -> Option<u64> {
        near(seq.wrapping_sub(self.seq(0)), self.next)
    }

    /// Converts a sequence number of the host to a stream position.
    pub(crate) fn host_position(&self, seq: u32) -> Option<u64> {
        near(seq.wrapping_sub(self.ack(0)), self.seen)
    }

    /// Returns the frame of a segment with `len` bytes of the peer's stream, and records the sent data and
    /// acknowledgement.
    pub(crate) fn frame(&mut self, header: &TcpHeader, options: &TcpOptions, len: usize, ecn: u8) -> Vec<u8> {
        let mut frame = frame::forge(&front(), THEIRS, header, options);
        frame[ethernet::HEADER_LEN + 1] = ecn & 3;
        let at = header.seq.wrapping_sub(self.seq(0));
        let payload: Vec<u8> = (0..len as u32).map(|i| theirs(at.wrapping_add(i))).collect();
        frame::append(&mut frame, &payload);
        let fin = header.flags.contains(TcpFlags::FIN);
        if let Some(start) = self.position(header.seq) {
            self.remember(start..start + len as u64 + u64::from(fin));
        } else if let Some(end) = self.position(header.seq.wrapping_add(len as u32)) {
            self.remember(0..end + u64::from(fin));
        }
        if let Some(ack) = self.host_position(header.ack).filter(|ack| *ack <= self.seen) {
            self.acked = self.acked.max(ack);
        }
        frame
    }

    fn remember(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        self.sent.push(range);
        self.sent.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::with_capacity(self.sent.len());
        for range in self.sent.drain(..) {
            match merged.last_mut().filter(|last| range.start <= last.end) {
                Some(last) => last.end = last.end.max(range.end),
                None => merged.push(range),
            }
        }
        self.sent = merged;
    }

    /// Returns the position up to which the peer has sent all bytes.
    pub(crate) fn sent_to(&self) -> u64 {
        self.sent.first().filter(|first| first.start == 0).map_or(0, |first| first.end)
    }

    pub(crate) fn has_sent(&self, range: &Range<u64>) -> bool {
        self.sent.iter().any(|sent| sent.start <= range.start && range.end <= sent.end)
    }

    /// Returns an ICMP error of a router about the host's segment at `seq`.
    pub(crate) fn error(&self, code: u8, mtu: u16, seq: u32) -> Vec<u8> {
        let (src_port, dst_port) = self.ports;
        let header =
            TcpHeader { src_port, dst_port, seq, ack: 0, flags: TcpFlags::ACK, window: 0, urgent: 0 };
        let mut quoted = [0; ipv4::HEADER_LEN + 20];
        let (ip, tcp) = quoted.split_first_chunk_mut().unwrap();
        ip_header(OURS, THEIRS, IpProtocol::TCP, 1500).write(ip);
        header.write(tcp.first_chunk_mut().unwrap(), 0);
        let mut message = [0; 64];
        let len =
            icmpv4::write_error(&mut message, icmpv4::DESTINATION_UNREACHABLE, code, mtu.into(), &quoted);
        let mut frame = front();
        let ip = ip_header(THEIRS, OURS, IpProtocol::ICMP, ipv4::HEADER_LEN + len);
        ip.write(frame[ethernet::HEADER_LEN..].first_chunk_mut().unwrap());
        frame.extend_from_slice(&message[..len]);
        frame
    }
}

/// Returns the peer's timestamp clock.
pub(crate) fn clock(now: Time) -> u32 {
    now.wrapping_millis() + 1
}

/// Returns the position nearest to `near` whose distance from position 0 is `distance` modulo 2^32.
fn near(distance: u32, near: u64) -> Option<u64> {
    near.checked_add_signed(distance.wrapping_sub(near as u32).cast_signed().into())
}

fn ip_header(src: Ipv4Addr, dst: Ipv4Addr, protocol: IpProtocol, total_len: usize) -> Ipv4Header {
    Ipv4Header {
        src,
        dst,
        protocol,
        dscp_ecn: 0,
        ident: 0,
        dont_fragment: true,
        ttl: 64,
        total_len: total_len as u16,
    }
}

/// Returns the Ethernet and IPv4 headers of the peer's frames.
pub(crate) fn front() -> Vec<u8> {
    let mut front = vec![0; TCP];
    let (link, ip) = front.split_first_chunk_mut().unwrap();
    ethernet::write_header(link, mac(1), mac(2), EtherType::IPV4);
    ip_header(THEIRS, OURS, IpProtocol::TCP, ipv4::HEADER_LEN).write(ip.first_chunk_mut().unwrap());
    front
}

/// Returns an ARP message of the peer.
pub(crate) fn arp(operation: ArpOperation) -> Vec<u8> {
    let mut frame = vec![0; ethernet::HEADER_LEN + arp::LEN];
    let (link, message) = frame.split_first_chunk_mut().unwrap();
    ethernet::write_header(link, mac(1), mac(2), EtherType::ARP);
    let said = Arp { operation, sender_mac: mac(2), sender_ip: THEIRS, target_mac: mac(1), target_ip: OURS };
    said.write(message.first_chunk_mut().unwrap());
    frame
}

/// Returns whether a frame is an ARP request for the peer.
pub(crate) fn asks(frame: &[u8]) -> bool {
    let link = EthernetFrame::new_checked(frame).unwrap();
    let question = (link.ethertype() == EtherType::ARP).then(|| Arp::parse(link.payload()).unwrap());
    question.is_some_and(|arp| arp.operation == ArpOperation::Request && arp.target_ip == THEIRS)
}

/// Returns the segment in a frame and checks its checksums. Returns `None` for other frames.
pub(crate) fn segment(frame: &[u8]) -> Option<TcpSegment<'_>> {
    let link = EthernetFrame::new_checked(frame).unwrap();
    if link.ethertype() != EtherType::IPV4 {
        return None;
    }
    let ip = offcore_wire::Ipv4Packet::new_checked(link.payload()).unwrap();
    assert!(ip.verify_checksum(), "an IPv4 header with a wrong checksum");
    if ip.protocol() != IpProtocol::TCP {
        return None;
    }
    let segment = TcpSegment::new_checked(ip.payload()).unwrap();
    assert!(segment.verify_checksum_v4(ip.src(), ip.dst()), "a segment with a wrong checksum");
    Some(segment)
}
