//! Addresses that are derived from other addresses.

use std::net::Ipv6Addr;

use crate::ethernet::MacAddr;

/// Returns the solicited-node multicast address of `addr`: `ff02::1:ff00:0` with the lower 24 bits of `addr` (RFC 4291,
/// 2.7.1).
#[inline]
pub fn solicited_node(addr: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = addr.octets();
    Ipv6Addr::from([0xff, 0x02, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c])
}

/// Returns the MAC address of the multicast group `addr`: `33:33` and the lower 32 bits of `addr` (RFC 2464, 7).
#[inline]
pub fn multicast_mac(addr: Ipv6Addr) -> MacAddr {
    let [.., a, b, c, d] = addr.octets();
    MacAddr([0x33, 0x33, a, b, c, d])
}

/// Returns the link-local address of an interface, made from its MAC address by modified EUI-64 (RFC 2464, 4 and 5):
/// with `ff:fe` in the middle and the universal/local bit inverted.
#[inline]
pub fn link_local(mac: MacAddr) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0;
    Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_match_rfc_examples() {
        let address = |text: &str| text.parse::<Ipv6Addr>().unwrap();
        let mac = |text: &str| text.parse::<MacAddr>().unwrap();
        // RFC 4291, 2.7.1
        assert_eq!(solicited_node(address("4037::01:800:200e:8c6c")), address("ff02::1:ff0e:8c6c"));
        // RFC 2464, 4: the example of an interface identifier.
        assert_eq!(link_local(mac("34:56:78:9a:bc:de")), address("fe80::3656:78ff:fe9a:bcde"));
        assert_eq!(link_local(mac("02:00:00:00:00:01")), address("fe80::ff:fe00:1"));
        assert_eq!(multicast_mac(address("ff02::1:ff0e:8c6c")), mac("33:33:ff:0e:8c:6c"));
        assert_eq!(multicast_mac(address("ff02::1")), mac("33:33:00:00:00:01"));
    }
}
