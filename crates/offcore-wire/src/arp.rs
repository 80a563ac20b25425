//! ARP (RFC 826) for IPv4 over Ethernet.

use std::net::Ipv4Addr;

use crate::{
    error::{Layer, WireError},
    ethernet::{EtherType, MacAddr},
    field::{be16, bytes, put},
};

/// Length of a packet in bytes.
pub const LEN: usize = 28;

/// Hardware type: Ethernet.
const ETHERNET: u16 = 1;
/// Lengths of hardware and protocol addresses in the packet: 6 and 4 bytes.
const ADDRESS_LENS: [u8; 2] = [6, 4];

mod field {
    pub(super) const HARDWARE: usize = 0;
    pub(super) const PROTOCOL: usize = 2;
    pub(super) const ADDRESS_LENS: usize = 4;
    pub(super) const OPERATION: usize = 6;
    pub(super) const SENDER_MAC: usize = 8;
    pub(super) const SENDER_IP: usize = 14;
    pub(super) const TARGET_MAC: usize = 18;
    pub(super) const TARGET_IP: usize = 24;
}

/// The operation of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArpOperation {
    /// Asks for the MAC address of the target IP address.
    Request,
    /// Gives the sender's MAC address.
    Reply,
}

/// An ARP packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arp {
    pub operation: ArpOperation,
    pub sender_mac: MacAddr,
    /// 0.0.0.0 in a probe (RFC 5227).
    pub sender_ip: Ipv4Addr,
    /// Only meaningful in a reply.
    pub target_mac: MacAddr,
    pub target_ip: Ipv4Addr,
}

impl Arp {
    /// Parses the payload of an Ethernet frame. Bytes beyond [`LEN`] (padding) are ignored. The addresses are not
    /// checked.
    ///
    /// # Errors
    /// The packet is shorter than [`LEN`] bytes, is not for IPv4 over Ethernet, or is neither a request nor a reply.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let layer = Layer::Arp;
        let Some(packet) = bytes.first_chunk::<LEN>() else {
            return Err(WireError::TooShort { layer, found: bytes.len(), needed: LEN });
        };
        for (field, at, expected) in [
            ("hardware type", field::HARDWARE, ETHERNET),
            ("protocol type", field::PROTOCOL, EtherType::IPV4.0),
            ("address lengths", field::ADDRESS_LENS, u16::from_be_bytes(ADDRESS_LENS)),
        ] {
            let found = be16(packet, at);
            if found != expected {
                return Err(WireError::Field { layer, field, found, expected });
            }
        }
        let operation = match be16(packet, field::OPERATION) {
            1 => ArpOperation::Request,
            2 => ArpOperation::Reply,
            found => return Err(WireError::Operation { found }),
        };
        Ok(Self {
            operation,
            sender_mac: mac(packet, field::SENDER_MAC),
            sender_ip: ip(packet, field::SENDER_IP),
            target_mac: mac(packet, field::TARGET_MAC),
            target_ip: ip(packet, field::TARGET_IP),
        })
    }

    /// Writes the packet.
    pub fn write(&self, to: &mut [u8; LEN]) {
        let operation: u16 = match self.operation {
            ArpOperation::Request => 1,
            ArpOperation::Reply => 2,
        };
        put(to, field::HARDWARE, ETHERNET.to_be_bytes());
        put(to, field::PROTOCOL, EtherType::IPV4.0.to_be_bytes());
        put(to, field::ADDRESS_LENS, ADDRESS_LENS);
        put(to, field::OPERATION, operation.to_be_bytes());
        put(to, field::SENDER_MAC, self.sender_mac.0);
        put(to, field::SENDER_IP, self.sender_ip.octets());
        put(to, field::TARGET_MAC, self.target_mac.0);
        put(to, field::TARGET_IP, self.target_ip.octets());
    }
}

fn mac(packet: &[u8; LEN], at: usize) -> MacAddr {
    MacAddr(bytes(packet, at))
}

fn ip(packet: &[u8; LEN], at: usize) -> Ipv4Addr {
    Ipv4Addr::from(bytes::<4, _>(packet, at))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const REQUEST: [u8; LEN] = [
        0, 1, 8, 0, 6, 4, 0, 1, 0x52, 0x54, 0, 0x12, 0x34, 0x56, 10, 0, 2, 15, 0, 0, 0, 0, 0, 0, 10, 0, 2, 2,
    ];

    #[test]
    fn arp_request_is_parsed() {
        let expected = Arp {
            operation: ArpOperation::Request,
            sender_mac: "52:54:00:12:34:56".parse().unwrap(),
            sender_ip: Ipv4Addr::new(10, 0, 2, 15),
            target_mac: MacAddr::ZERO,
            target_ip: Ipv4Addr::new(10, 0, 2, 2),
        };
        assert_eq!(Arp::parse(&REQUEST), Ok(expected));
        // The same packet in a frame of minimum length.
        assert_eq!(Arp::parse(&[&REQUEST[..], &[0; 18]].concat()), Ok(expected));
    }

    #[test]
    fn malformed_arp_is_rejected() {
        for found in 0..LEN {
            let error = WireError::TooShort { layer: Layer::Arp, found, needed: LEN };
            assert_eq!(Arp::parse(&REQUEST[..found]), Err(error));
        }
        let says = |at: usize, value: u8| {
            let mut packet = REQUEST;
            packet[at] = value;
            Arp::parse(&packet).unwrap_err().to_string()
        };
        assert_eq!(says(1, 6), "ARP field hardware type is 6, expected 1");
        assert_eq!(says(2, 0x86), "ARP field protocol type is 34304, expected 2048");
        assert_eq!(says(4, 255), "ARP field address lengths is 65284, expected 1540");
        assert_eq!(says(5, 16), "ARP field address lengths is 1552, expected 1540");
        for operation in [0, 3, 8, 255] {
            let expected = format!("ARP operation is {operation}, expected 1 (request) or 2 (reply)");
            assert_eq!(says(7, operation), expected);
        }
    }

    proptest! {
        #[test]
        fn written_form_round_trips(reply: bool, macs: [[u8; 6]; 2], ips: [[u8; 4]; 2], mut to: [u8; LEN]) {
            let arp = Arp {
                operation: if reply { ArpOperation::Reply } else { ArpOperation::Request },
                sender_mac: MacAddr(macs[0]),
                sender_ip: Ipv4Addr::from(ips[0]),
                target_mac: MacAddr(macs[1]),
                target_ip: Ipv4Addr::from(ips[1]),
            };
            arp.write(&mut to);
            prop_assert_eq!(Arp::parse(&to), Ok(arp));
            let theirs = etherparse::ArpPacketSlice::from_slice(&to).unwrap();
            prop_assert_eq!(theirs.operation().0, 1 + u16::from(reply));
            prop_assert_eq!((theirs.sender_hw_addr(), theirs.target_hw_addr()), (&macs[0][..], &macs[1][..]));
            prop_assert_eq!((theirs.sender_protocol_addr(), theirs.target_protocol_addr()), (&ips[0][..], &ips[1][..]));
        }
    }
}
