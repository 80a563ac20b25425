//! Writing of TCP headers.

use std::net::IpAddr;

use offcore_wire::{IpProtocol, Sum, TcpFlags, TcpHeader, TcpOptions, tcp};

use super::ip::{self, Envelope};

/// The fields of a TCP header to write.
#[derive(Debug, Clone)]
pub(crate) struct Fields {
    pub src_port: u16,
    pub dst_port: u16,
    pub seq: u32,
    pub ack: u32,
    pub flags: TcpFlags,
    pub window: u16,
    pub options: TcpOptions,
}

/// How the checksum is completed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TxChecksum {
    /// By the port: the field contains the sum of the pseudo header.
    Port,
    /// By the stack. The value is the sum of the payload, which begins at an even offset.
    Payload(Sum),
}

/// Writes Ethernet, IP and TCP headers in front of `payload_len` bytes to the beginning of `to`, which must be long
/// enough. Returns their length and the offset of the TCP header.
#[inline]
pub(crate) fn write(
    to: &mut [u8],
    envelope: &Envelope,
    fields: &Fields,
    payload_len: usize,
    checksum: TxChecksum,
) -> (usize, usize) {
    let at = envelope.len();
    let options_len = fields.options.len();
    let header_len = tcp::HEADER_LEN + options_len;
    let transport_len = header_len + payload_len;
    envelope.write(to, transport_len);
    let transport = &mut to[at..at + header_len];
    let header = TcpHeader {
        src_port: fields.src_port,
        dst_port: fields.dst_port,
        seq: fields.seq,
        ack: fields.ack,
        flags: fields.flags,
        window: fields.window,
        urgent: 0,
    };
    let (fixed, options) = transport.split_first_chunk_mut().expect("a header is 20 bytes at least");
    header.write(fixed, options_len);
    fields.options.write(options);
    let pseudo = ip::pseudo(envelope.src, envelope.dst, IpProtocol::TCP, transport_len);
    let field = match checksum {
        TxChecksum::Port => pseudo.value(),
        TxChecksum::Payload(payload) => (pseudo + Sum::of(transport) + payload).checksum(),
    };
    let place = usize::from(tcp::CHECKSUM_OFFSET);
    transport[place..place + 2].copy_from_slice(&field.to_be_bytes());
    (at + header_len, at)
}

/// Returns the reset that answers a segment without a connection (RFC 9293, 3.10.7.1). A reset is not answered.
pub(crate) fn reset_for(segment: &super::segment::Segment) -> Option<Fields> {
    if segment.has(TcpFlags::RST) {
        return None;
    }
    let (seq, ack, flags) = if segment.has(TcpFlags::ACK) {
        (segment.ack, 0, TcpFlags::RST)
    } else {
        (0, segment.seq.wrapping_add(segment.seq_len()), TcpFlags::RST | TcpFlags::ACK)
    };
    Some(Fields {
        src_port: segment.dst_port,
        dst_port: segment.src_port,
        seq,
        ack,
        flags,
        window: 0,
        options: TcpOptions::default(),
    })
}

/// Returns the payload bytes that fit a packet of `mtu` bytes, behind headers with the options of every segment.
pub(crate) fn payload_of(mtu: u16, to: IpAddr, timestamps: bool) -> u16 {
    let headers = if to.is_ipv4() { 40 } else { 60 } + if timestamps { 12 } else { 0 };
    mtu.saturating_sub(headers).max(8)
}
