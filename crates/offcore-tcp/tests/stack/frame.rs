//! Parses and forges frames with IPv4 and TCP.

use std::net::Ipv4Addr;

use offcore_wire::{EtherType, EthernetFrame, IpProtocol, Sum, TcpFlags, TcpHeader, TcpOptions, TcpSegment};

/// Offsets of the IPv4 and TCP headers.
const IP: usize = 14;
const TCP: usize = 34;

/// The fields of a frame that tests check.
pub(crate) struct Seen {
    pub(crate) ports: (u16, u16),
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) flags: TcpFlags,
    /// The value on the wire, without scaling.
    pub(crate) window: u16,
    pub(crate) options: TcpOptions,
    /// Length of the payload in bytes.
    pub(crate) len: usize,
    /// ECN codepoint, 0 to 3.
    pub(crate) ecn: u8,
}

/// Parses a frame with IPv4 and TCP. Returns `None` for other frames.
pub(crate) fn read(frame: &[u8]) -> Option<Seen> {
    let is_v4 = EthernetFrame::new_checked(frame).ok()?.ethertype() == EtherType::IPV4;
    let segment = TcpSegment::new_checked(frame.get(TCP..).filter(|_| is_v4 && frame[IP + 9] == 6)?).ok()?;
    Some(Seen {
        ports: (segment.src_port(), segment.dst_port()),
        seq: segment.seq(),
        ack: segment.ack(),
        flags: segment.flags(),
        window: segment.window(),
        options: read_options(segment.options()),
        len: segment.payload().len(),
        ecn: frame[IP + 1] & 3,
    })
}

/// Returns a frame with the Ethernet and IPv4 header of `like`, but with another source address, this TCP header and
/// these options.
pub(crate) fn forge(like: &[u8], from: Ipv4Addr, header: &TcpHeader, options: &TcpOptions) -> Vec<u8> {
    let mut frame = like[..TCP].to_vec();
    frame.resize(TCP + 20 + options.len(), 0);
    let len = (frame.len() - IP) as u16;
    frame[IP + 2..IP + 4].copy_from_slice(&len.to_be_bytes());
    frame[IP + 12..IP + 16].copy_from_slice(&from.octets());
    let (fixed, rest) = frame[TCP..].split_first_chunk_mut().unwrap();
    header.write(fixed, options.len());
    options.write(rest);
    mend(&mut frame);
    frame
}

/// Adds payload to a forged frame.
pub(crate) fn append(frame: &mut Vec<u8>, payload: &[u8]) {
    frame.extend_from_slice(payload);
    let len = (frame.len() - IP) as u16;
    frame[IP + 2..IP + 4].copy_from_slice(&len.to_be_bytes());
    mend(frame);
}

/// Updates both checksums.
pub(crate) fn mend(frame: &mut [u8]) {
    frame[IP + 10..IP + 12].fill(0);
    let sum = Sum::of(&frame[IP..TCP]).checksum();
    frame[IP + 10..IP + 12].copy_from_slice(&sum.to_be_bytes());
    frame[TCP + 16..TCP + 18].fill(0);
    let address = |at: usize| Ipv4Addr::new(frame[at], frame[at + 1], frame[at + 2], frame[at + 3]);
    let len = (frame.len() - TCP) as u16;
    let pseudo = Sum::pseudo_v4(address(IP + 12), address(IP + 16), IpProtocol::TCP, len);
    let sum = (pseudo + Sum::of(&frame[TCP..])).checksum();
    frame[TCP + 16..TCP + 18].copy_from_slice(&sum.to_be_bytes());
}

/// Parses the options of a segment.
fn read_options(bytes: &[u8]) -> TcpOptions {
    let mut options = TcpOptions::NONE;
    options.read(bytes);
    options
}
