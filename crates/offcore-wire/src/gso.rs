//! TCP packets that a virtio driver leaves to the device to cut into segments (`VIRTIO_NET_HDR_GSO_TCPV4` and `TCPV6`,
//! virtio 1.2, 5.1.6.2), cut in software.
//!
//! A [`Segmenter`] is made from the virtio-net header, the first bytes of the frame and its length. It gives the
//! segments one after another: which part of the payload each has, and, once the caller has summed that part up, the
//! headers to go in front. The payload itself is never seen, so it may lie in several places.

use std::{iter::FusedIterator, net::Ipv4Addr, ops::Range};

use crate::{
    checksum::Sum,
    ethernet::{self, EtherType, VLAN_TAG_LEN},
    ip::IpProtocol,
    ipv4, ipv6, tcp,
    tcp::TcpFlags,
    virtio_net::{NetHeader, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6},
};

/// Longest headers of a packet to be segmented, Ethernet to TCP with all options, in bytes.
pub const MAX_HEADERS: usize = 256;
/// Least payload of a segment in bytes. What TCP's smallest maximum segment size leaves beside all options is 8 (Linux
/// has the same bound); a smaller one serves only to make one packet very many.
pub const MIN_SIZE: u16 = 8;

/// VLAN tags in front of the IP header, at most.
const MAX_TAGS: usize = 2;

/// Headers of a packet to be segmented: it gives the segments' headers.
#[derive(Debug, Clone)]
pub struct Segmenter {
    headers: [u8; MAX_HEADERS],
    header_len: usize,
    ip: Ip,
    ip_at: usize,
    tcp_at: usize,
    payload_len: usize,
    size: usize,
    ident: u16,
    seq: u32,
    flags: u8,
}

/// The version of IP.
#[derive(Debug, Clone, Copy)]
enum Ip {
    V4,
    V6,
}

/// A part of a packet to be segmented that becomes a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Which segment it is, from 0.
    pub index: usize,
    /// Its payload: a range of the bytes that follow the frame's headers.
    pub payload: Range<usize>,
    pub last: bool,
}

impl Segmenter {
    /// Takes a frame of `frame_len` bytes that begins with `front`, which must have all headers in it:
    /// [`MAX_HEADERS`] bytes, or the whole frame, are enough. IP's length and checksum fields may hold anything.
    ///
    /// # Errors
    /// [`GsoError`]: the packet is none that can be segmented, and to be dropped.
    pub fn new(header: &NetHeader, front: &[u8], frame_len: usize) -> Result<Self, GsoError> {
        let version = match header.gso_type & !VIRTIO_NET_HDR_GSO_ECN {
            VIRTIO_NET_HDR_GSO_TCPV4 => Ip::V4,
            VIRTIO_NET_HDR_GSO_TCPV6 => Ip::V6,
            _ => return Err(GsoError::Type { found: header.gso_type }),
        };
        if header.gso_size < MIN_SIZE {
            return Err(GsoError::Size { found: header.gso_size });
        }
        let (ethertype, ip_at) = ip_header_at(front)?;
        let tcp_at = match version {
            Ip::V4 if ethertype == EtherType::IPV4 => tcp_after_ipv4(front, ip_at)?,
            Ip::V6 if ethertype == EtherType::IPV6 => tcp_after_ipv6(front, ip_at)?,
            _ => return Err(GsoError::EtherType { found: ethertype, gso_type: header.gso_type }),
        };
        let transport: &[u8; tcp::HEADER_LEN] = at(front, tcp_at)?;
        let tcp_len = usize::from(transport[tcp::field::DATA_OFFSET] >> 4) * 4;
        if tcp_len < tcp::HEADER_LEN {
            return Err(GsoError::TcpHeader { found: tcp_len });
        }
        let (start, offset) = (usize::from(header.csum_start), header.csum_offset);
        if header.needs_checksum() && (start != tcp_at || offset != tcp::CHECKSUM_OFFSET) {
            return Err(GsoError::Checksum { csum_start: header.csum_start, csum_offset: offset, tcp_at });
        }
        let header_len = tcp_at + tcp_len;
        if header_len > MAX_HEADERS {
            return Err(GsoError::TooLong { found: header_len });
        }
        let too_short = GsoError::TooShort { found: front.len().min(frame_len), needed: header_len };
        let payload_len = frame_len.checked_sub(header_len).ok_or(too_short)?;
        let mut headers = [0; MAX_HEADERS];
        for (to, from) in headers.iter_mut().zip(front.get(..header_len).ok_or(too_short)?) {
            *to = *from;
        }
        let size = usize::from(header.gso_size);
        // The longest segment must have a length that IP can tell.
        let longest = header_len - ip_at + payload_len.min(size);
        if longest > usize::from(u16::MAX) {
            return Err(GsoError::TooLong { found: longest });
        }
        Ok(Self {
            ident: u16::from_be_bytes([headers[ip_at + 4], headers[ip_at + 5]]),
            seq: u32::from_be_bytes(std::array::from_fn(|i| transport[tcp::field::SEQ + i])),
            flags: transport[tcp::field::FLAGS],
            headers,
            header_len,
            ip: version,
            ip_at,
            tcp_at,
            payload_len,
            size,
        })
    }

    /// Length of the headers, Ethernet to TCP, in bytes: the frame's payload begins there, and so does each segment's.
    pub fn header_len(&self) -> usize {
        self.header_len
    }

    /// Length of the longest segment with its headers, in bytes.
    pub fn longest(&self) -> usize {
        self.header_len + self.payload_len.min(self.size)
    }

    /// The segments in order; a packet without payload is one.
    pub fn segments(&self) -> impl FusedIterator<Item = Segment> + use<> {
        let (len, size) = (self.payload_len, self.size);
        let count = len.div_ceil(size).max(1);
        (0..count).map(move |index| Segment {
            index,
            payload: index * size..len.min((index + 1) * size),
            last: index + 1 == count,
        })
    }

    /// The headers of `segment`, whose payload comes to `payload`: lengths, IP identification and sequence number are
    /// its own, PSH and FIN are on the last only, CWR on the first only, and the checksums are complete.
    pub fn headers(&mut self, segment: &Segment, payload: Sum) -> &[u8] {
        let Self { ip_at, tcp_at, header_len, .. } = *self;
        #[allow(clippy::cast_possible_truncation, reason = "`new` has checked the longest segment's length")]
        let len16 = |from: usize| (header_len - from + segment.payload.len()) as u16;
        let pseudo = match self.ip {
            Ip::V4 => {
                self.put(ip_at + ipv4::field::TOTAL_LEN, len16(ip_at).to_be_bytes());
                #[allow(clippy::cast_possible_truncation, reason = "identifications wrap")]
                let ident = self.ident.wrapping_add(segment.index as u16);
                self.put(ip_at + ipv4::field::IDENT, ident.to_be_bytes());
                self.put(ip_at + ipv4::field::CHECKSUM, [0; 2]);
                let sum = Sum::of(&self.headers[ip_at..tcp_at]);
                self.put(ip_at + ipv4::field::CHECKSUM, sum.checksum().to_be_bytes());
                let address =
                    |at: usize| Ipv4Addr::from(std::array::from_fn(|i| self.headers[ip_at + at + i]));
                let (src, dst) = (address(ipv4::field::SRC), address(ipv4::field::DST));
                Sum::pseudo_v4(src, dst, IpProtocol::TCP, len16(tcp_at))
            }
            Ip::V6 => {
                let after = ip_at + ipv6::HEADER_LEN;
                self.put(ip_at + ipv6::field::PAYLOAD_LEN, len16(after).to_be_bytes());
                let addresses = &self.headers[ip_at + ipv6::field::SRC..after];
                Sum::of(addresses) + Sum::from(u16::from(IpProtocol::TCP.0)) + Sum::from(len16(tcp_at))
            }
        };
        #[allow(clippy::cast_possible_truncation, reason = "sequence numbers wrap")]
        let seq = self.seq.wrapping_add(segment.payload.start as u32);
        self.put(tcp_at + tcp::field::SEQ, seq.to_be_bytes());
        let mut flags = self.flags;
        if !segment.last {
            flags &= !(TcpFlags::FIN | TcpFlags::PSH).0;
        }
        if segment.index > 0 {
            flags &= !TcpFlags::CWR.0;
        }
        self.put(tcp_at + tcp::field::FLAGS, [flags]);
        self.put(tcp_at + tcp::field::CHECKSUM, [0; 2]);
        let sum = pseudo + Sum::of(&self.headers[tcp_at..header_len]) + payload;
        self.put(tcp_at + tcp::field::CHECKSUM, sum.checksum().to_be_bytes());
        &self.headers[..header_len]
    }

    /// Writes a field of the headers, which `new` has found to be there.
    fn put<const N: usize>(&mut self, at: usize, value: [u8; N]) {
        for (to, from) in self.headers.iter_mut().skip(at).zip(value) {
            *to = from;
        }
    }
}

/// The `N` bytes at `at`.
fn at<const N: usize>(front: &[u8], at: usize) -> Result<&[u8; N], GsoError> {
    let error = GsoError::TooShort { found: front.len(), needed: at + N };
    front.get(at..).and_then(<[u8]>::first_chunk).ok_or(error)
}

/// The EtherType behind any VLAN tags, and where what it says begins.
fn ip_header_at(front: &[u8]) -> Result<(EtherType, usize), GsoError> {
    let mut end = ethernet::HEADER_LEN;
    let mut tags = 0;
    loop {
        let ethertype = EtherType(u16::from_be_bytes(*at(front, end - 2)?));
        if !matches!(ethertype, EtherType::VLAN | EtherType::QINQ) || tags == MAX_TAGS {
            return Ok((ethertype, end));
        }
        end += VLAN_TAG_LEN;
        tags += 1;
    }
}

fn tcp_after_ipv4(front: &[u8], ip_at: usize) -> Result<usize, GsoError> {
    let header: &[u8; ipv4::HEADER_LEN] = at(front, ip_at)?;
    let version_ihl = header[ipv4::field::VERSION_IHL];
    let len = usize::from(version_ihl & 0x0f) * 4;
    if version_ihl >> 4 != 4 || len < ipv4::HEADER_LEN {
        return Err(GsoError::IpHeader { found: version_ihl });
    }
    let protocol = IpProtocol(header[ipv4::field::PROTOCOL]);
    let more_or_offset = header[ipv4::field::FLAGS_OFFSET] & 0x3f | header[ipv4::field::FLAGS_OFFSET + 1];
    if protocol != IpProtocol::TCP || more_or_offset != 0 {
        return Err(GsoError::NotTcp { found: protocol });
    }
    Ok(ip_at + len)
}

/// Hop-by-hop options, destination options, and a routing header that has done its work may come before TCP. Any other
/// routing header changes the pseudo header.
fn tcp_after_ipv6(front: &[u8], ip_at: usize) -> Result<usize, GsoError> {
    let header: &[u8; ipv6::HEADER_LEN] = at(front, ip_at)?;
    if header[0] >> 4 != 6 {
        return Err(GsoError::IpHeader { found: header[0] });
    }
    let mut next = IpProtocol(header[ipv6::field::NEXT_HEADER]);
    let mut end = ip_at + ipv6::HEADER_LEN;
    // Each is 8 bytes at least, and the first MAX_HEADERS bytes are all there can be.
    while end < MAX_HEADERS {
        let extension = match next {
            IpProtocol::TCP => return Ok(end),
            IpProtocol::HOP_BY_HOP | IpProtocol::DESTINATION_OPTIONS | IpProtocol::ROUTING => {
                at::<4>(front, end)?
            }
            _ => break,
        };
        if next == IpProtocol::ROUTING && extension[3] != 0 {
            break;
        }
        next = IpProtocol(extension[0]);
        end += 8 + usize::from(extension[1]) * 8;
    }
    Err(GsoError::NotTcp { found: next })
}

/// Why a packet cannot be segmented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum GsoError {
    /// packet to be segmented: checksum asked for at csum_start {csum_start} + csum_offset {csum_offset}, expected
    /// {tcp_at} + 16, which is TCP's
    Checksum { csum_start: u16, csum_offset: u16, tcp_at: usize },
    /// packet to be segmented: it carries {found}, expected what gso_type {gso_type:#04x} says
    EtherType { found: EtherType, gso_type: u8 },
    /// packet to be segmented: its IP header begins with {found:#04x}
    IpHeader { found: u8 },
    /// packet to be segmented: it carries {found} or is a fragment, expected TCP
    NotTcp { found: IpProtocol },
    /// packet to be segmented: gso_size {found}, expected {MIN_SIZE:?} or more
    Size { found: u16 },
    /// packet to be segmented: TCP header says it is {found} bytes long; the least is 20
    TcpHeader { found: usize },
    /// packet to be segmented: {found} bytes, expected at most {MAX_HEADERS:?} of headers and 65535 a segment
    TooLong { found: usize },
    /// packet to be segmented: headers need {needed} bytes, but only {found} are there
    TooShort { found: usize, needed: usize },
    /// packet to be segmented: gso_type {found:#04x}, expected TCP over IPv4 or IPv6
    Type { found: u8 },
}
