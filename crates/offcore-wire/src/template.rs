//! The Ethernet, IPv4 and UDP headers of generated packets, built once and written to many packets.
//!
//! The layout is the same as in testpmd's `txonly` and `flowgen`: no IPv4 options, identification 0, time to live 64, a
//! filled-in IPv4 checksum, and no UDP checksum.

mod tcp;

use std::net::Ipv4Addr;

use crate::{
    checksum::{self, Sum},
    error::{Layer, WireError},
    ethernet::{self, EtherType, MacAddr},
    field::{be16, bytes, put},
    ip::IpProtocol,
    ipv4, udp,
};

pub use tcp::{TCP_HEADERS_LEN, TcpTemplate, TcpVarying};

/// Length of the three headers in bytes.
pub const UDP_HEADERS_LEN: usize = UDP + udp::HEADER_LEN;

/// Maximum length of a frame with an IPv4 packet, in bytes without FCS.
pub const MAX_FRAME_LEN: usize = IP + u16::MAX as usize;

/// Offset of the IPv4 header.
pub(crate) const IP: usize = ethernet::HEADER_LEN;

/// Offset of the UDP header.
pub(crate) const UDP: usize = IP + ipv4::HEADER_LEN;

const TTL: u8 = 64;

/// One end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpEndpoint {
    /// MAC address.
    pub mac: MacAddr,
    /// IPv4 address.
    pub ip: Ipv4Addr,
    pub port: u16,
}

/// The addresses that all packets of a flow share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpFlow {
    pub src: UdpEndpoint,
    pub dst: UdpEndpoint,
}

impl UdpFlow {
    /// Returns the flow of testpmd's `txonly`: 198.18.0.1 to 198.18.0.2 (RFC 2544's test network), both with the
    /// discard port.
    pub const fn txonly(src: MacAddr, dst: MacAddr) -> Self {
        const DISCARD: u16 = 9;
        Self {
            src: UdpEndpoint { mac: src, ip: Ipv4Addr::new(198, 18, 0, 1), port: DISCARD },
            dst: UdpEndpoint { mac: dst, ip: Ipv4Addr::new(198, 18, 0, 2), port: DISCARD },
        }
    }

    /// Returns flow number `flow` of testpmd's `flowgen`: from 10.254.0.0 port 1000 to 10.253.0.0 + `flow` port 1001,
    /// and from MAC address 00:01:02:03:04:00 to 00:01:02:03:04:01.
    pub const fn flowgen(flow: u16) -> Self {
        let [high, low] = flow.to_be_bytes();
        Self {
            src: UdpEndpoint {
                mac: MacAddr([0, 1, 2, 3, 4, 0]),
                ip: Ipv4Addr::new(10, 254, 0, 0),
                port: 1000,
            },
            dst: UdpEndpoint {
                mac: MacAddr([0, 1, 2, 3, 4, 1]),
                ip: Ipv4Addr::new(10, 253, high, low),
                port: 1001,
            },
        }
    }
}

/// The 42 bytes of headers for packets of a flow with the same length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpTemplate {
    bytes: [u8; UDP_HEADERS_LEN],
}

impl UdpTemplate {
    /// Builds the headers for frames of `frame_len` bytes, without FCS.
    ///
    /// # Errors
    /// [`FrameLenError`] unless `frame_len` is [`UDP_HEADERS_LEN`] to [`MAX_FRAME_LEN`].
    pub fn new(flow: &UdpFlow, frame_len: usize) -> Result<Self, FrameLenError> {
        let error = FrameLenError { found: frame_len };
        let ip_len = frame_len.checked_sub(IP).and_then(|len| u16::try_from(len).ok()).ok_or(error)?;
        let udp_len = match frame_len {
            UDP_HEADERS_LEN.. => ip_len - 20,
            _ => return Err(error),
        };

        let mut bytes = [0; UDP_HEADERS_LEN];
        put(&mut bytes, ethernet::field::DST, flow.dst.mac.0);
        put(&mut bytes, ethernet::field::SRC, flow.src.mac.0);
        put(&mut bytes, ethernet::field::ETHERTYPE, EtherType::IPV4.0.to_be_bytes());

        bytes[IP + ipv4::field::VERSION_IHL] = ipv4::VERSION_IHL_PLAIN;
        put(&mut bytes, IP + ipv4::field::TOTAL_LEN, ip_len.to_be_bytes());
        bytes[IP + ipv4::field::TTL] = TTL;
        bytes[IP + ipv4::field::PROTOCOL] = IpProtocol::UDP.0;
        put(&mut bytes, IP + ipv4::field::SRC, flow.src.ip.octets());
        put(&mut bytes, IP + ipv4::field::DST, flow.dst.ip.octets());
        let checksum = Sum::of(&bytes[IP..UDP]).checksum();
        put(&mut bytes, IP + ipv4::field::CHECKSUM, checksum.to_be_bytes());

        put(&mut bytes, UDP + udp::field::SRC_PORT, flow.src.port.to_be_bytes());
        put(&mut bytes, UDP + udp::field::DST_PORT, flow.dst.port.to_be_bytes());
        put(&mut bytes, UDP + udp::field::LENGTH, udp_len.to_be_bytes());
        Ok(Self { bytes })
    }

    /// Returns the headers.
    #[inline]
    pub fn as_bytes(&self) -> &[u8; UDP_HEADERS_LEN] {
        &self.bytes
    }

    /// Returns the length of the frames that these headers describe, in bytes without FCS.
    #[inline]
    pub fn frame_len(&self) -> usize {
        IP + usize::from(be16(&self.bytes, IP + ipv4::field::TOTAL_LEN))
    }

    /// Sets the IPv4 destination and updates the checksum, for generators that vary it per packet.
    #[inline]
    pub fn set_dst_ip(&mut self, ip: Ipv4Addr) {
        const DST: usize = IP + ipv4::field::DST;
        const CHECKSUM: usize = IP + ipv4::field::CHECKSUM;
        let old = Sum::of(&bytes::<4, _>(&self.bytes, DST));
        put(&mut self.bytes, DST, ip.octets());
        let updated = checksum::update(be16(&self.bytes, CHECKSUM), old, Sum::of(&ip.octets()));
        put(&mut self.bytes, CHECKSUM, updated.to_be_bytes());
    }

    /// Writes the headers to the start of `frame`, which should be [`UdpTemplate::frame_len`] bytes long.
    ///
    /// # Errors
    /// [`WireError::TooShort`] if `frame` is shorter than the headers.
    #[inline]
    pub fn write(&self, frame: &mut [u8]) -> Result<(), WireError> {
        let found = frame.len();
        let Some(headers) = frame.first_chunk_mut() else {
            return Err(WireError::TooShort { layer: Layer::Udp, found, needed: UDP_HEADERS_LEN });
        };
        *headers = self.bytes;
        Ok(())
    }
}

/// a UDP packet cannot be a frame of {found} bytes; choose {UDP_HEADERS_LEN:?} to {MAX_FRAME_LEN:?}, FCS not counted
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub struct FrameLenError {
    pub found: usize,
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    use super::*;
    use crate::{Ipv4Packet, UdpDatagram};

    fn flows() -> impl Strategy<Value = UdpFlow> {
        let end = any::<([u8; 6], [u8; 4], u16)>().prop_map(|(mac, ip, port)| UdpEndpoint {
            mac: MacAddr(mac),
            ip: Ipv4Addr::from(ip),
            port,
        });
        (end.clone(), end).prop_map(|(src, dst)| UdpFlow { src, dst })
    }

    /// Builds the same headers with etherparse. Its builder computes a UDP checksum, which is cleared here because the
    /// template has none.
    fn by_etherparse(flow: &UdpFlow, frame_len: usize) -> Vec<u8> {
        let mut ip = etherparse::Ipv4Header::new(
            0,
            TTL,
            etherparse::IpNumber::UDP,
            flow.src.ip.octets(),
            flow.dst.ip.octets(),
        )
        .unwrap();
        ip.dont_fragment = false;
        let builder = PacketBuilder::ethernet2(flow.src.mac.0, flow.dst.mac.0)
            .ip(etherparse::IpHeaders::Ipv4(ip, Default::default()))
            .udp(flow.src.port, flow.dst.port);
        let mut frame = Vec::new();
        builder.write(&mut frame, &vec![0; frame_len - UDP_HEADERS_LEN]).unwrap();
        frame[40..42].fill(0);
        frame
    }

    #[test]
    fn frame_length_limits_are_checked() {
        let flow = UdpFlow::txonly(MacAddr::LOCAL, MacAddr::local(1));
        for found in [0, 13, 14, 33, 41, 65_550, usize::MAX] {
            assert_eq!(UdpTemplate::new(&flow, found), Err(FrameLenError { found }));
        }
        for frame_len in [42, 60, 1514, 65_549] {
            assert_eq!(UdpTemplate::new(&flow, frame_len).unwrap().frame_len(), frame_len);
        }
        assert_eq!(
            FrameLenError { found: 20 }.to_string(),
            "a UDP packet cannot be a frame of 20 bytes; choose 42 to 65549, FCS not counted"
        );
        let template = UdpTemplate::new(&flow, 60).unwrap();
        assert!(template.write(&mut [0; 41]).is_err());
    }

    proptest! {
        #[test]
        fn udp_template_matches_etherparse(flow in flows(), frame_len in 42..2000usize) {
            let template = UdpTemplate::new(&flow, frame_len).unwrap();
            let expected = by_etherparse(&flow, frame_len);
            let mut frame = vec![0; frame_len];
            template.write(&mut frame).unwrap();
            prop_assert_eq!(&frame, &expected);
            let ip = Ipv4Packet::new_checked(&frame[14..]).unwrap();
            prop_assert!(ip.verify_checksum());
            prop_assert_eq!(UdpDatagram::new_checked(ip.payload()).unwrap().payload().len(), frame_len - 42);
        }

        #[test]
        fn changed_destination_matches_new_template(flow in flows(), ip: [u8; 4]) {
            let mut varied = UdpTemplate::new(&flow, 60).unwrap();
            varied.set_dst_ip(Ipv4Addr::from(ip));
            let dst = UdpEndpoint { ip: Ipv4Addr::from(ip), ..flow.dst };
            prop_assert_eq!(varied, UdpTemplate::new(&UdpFlow { dst, ..flow }, 60).unwrap());
        }
    }
}
