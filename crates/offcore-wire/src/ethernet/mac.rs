//! MAC addresses and their text form.

use std::{fmt, str::FromStr};

/// A 48-bit MAC address in transmission order.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// `ff:ff:ff:ff:ff:ff`: all stations.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// `02:00:00:00:00:00`: the first locally administered address that [`MacAddr::local`] returns.
    pub const LOCAL: Self = Self::local(0);

    /// `00:00:00:00:00:00`: no station.
    pub const ZERO: Self = Self([0; 6]);

    /// Returns `02:00:00:00:00:PORT`, the address that testpmd and the dpdk-dma application use for the peer of a port.
    pub const fn local(port: u8) -> Self {
        Self([0x02, 0, 0, 0, 0, port])
    }

    /// Returns whether every bit is set.
    #[inline]
    pub fn is_broadcast(self) -> bool {
        self == Self::BROADCAST
    }

    /// Returns whether the group bit is set. Broadcast is multicast, too.
    #[inline]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 0x01 != 0
    }

    /// Returns whether it is the address of a single station: neither a group nor zero.
    #[inline]
    pub fn is_unicast(self) -> bool {
        !self.is_multicast() && self != Self::ZERO
    }

    /// Returns whether the address is locally administered.
    #[inline]
    pub const fn is_local(self) -> bool {
        self.0[0] & 0x02 != 0
    }
}

impl From<[u8; 6]> for MacAddr {
    fn from(octets: [u8; 6]) -> Self {
        Self(octets)
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [o0, o1, o2, o3, o4, o5] = self.0;
        write!(f, "{o0:02x}:{o1:02x}:{o2:02x}:{o3:02x}:{o4:02x}:{o5:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Parses six octets of two hexadecimal digits each, separated by `:` or by `-`.
impl FromStr for MacAddr {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, ParseMacError> {
        let separator = if text.contains('-') { '-' } else { ':' };
        let parts = text.split(separator).count();
        if parts != 6 {
            return Err(ParseMacError::Parts { found: parts, text: text.to_owned() });
        }
        let mut octets = [0; 6];
        for (octet, part) in octets.iter_mut().zip(text.split(separator)) {
            // `from_str_radix` alone would accept "+f".
            let two_digits = part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
            *octet = match u8::from_str_radix(part, 16) {
                Ok(value) if two_digits => value,
                _ => return Err(ParseMacError::Octet { part: part.to_owned(), text: text.to_owned() }),
            };
        }
        Ok(Self(octets))
    }
}

/// Why a text is not a MAC address.
#[derive(Debug, Clone, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum ParseMacError {
    /// '{text}' is not a MAC address: '{part}' is not two hexadecimal digits; write it like 02:00:00:00:00:01
    Octet { part: String, text: String },
    /// '{text}' is not a MAC address: it has {found} parts, expected 6; write it like 02:00:00:00:00:01
    Parts { found: usize, text: String },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn address_kinds_are_distinguished() {
        assert!(MacAddr::BROADCAST.is_broadcast() && MacAddr::BROADCAST.is_multicast());
        assert!(!MacAddr::BROADCAST.is_unicast());
        assert!(!MacAddr::ZERO.is_unicast() && !MacAddr::ZERO.is_multicast());
        assert!(MacAddr::LOCAL.is_unicast() && MacAddr::LOCAL.is_local());
        let mdns = MacAddr([0x01, 0x00, 0x5e, 0, 0, 0xfb]);
        assert!(mdns.is_multicast() && !mdns.is_broadcast() && !mdns.is_local());
        assert_eq!(MacAddr::local(7).to_string(), "02:00:00:00:00:07");
    }

    #[test]
    fn malformed_mac_addresses_are_rejected() {
        let error = |text: &str| text.parse::<MacAddr>().unwrap_err().to_string();
        assert_eq!(
            error("02:00:00"),
            "'02:00:00' is not a MAC address: it has 3 parts, expected 6; write it like 02:00:00:00:00:01"
        );
        for (text, part) in [
            ("02:00:0g:00:00:01", "0g"),
            ("2:00:00:00:00:01", "2"),
            ("02:00:+1:00:00:01", "+1"),
            ("02:00::00:00:01", ""),
            ("02:00:é:00:00:01", "é"),
            ("02:00:00:00:00:001", "001"),
        ] {
            let expected = ParseMacError::Octet { part: part.to_owned(), text: text.to_owned() };
            assert_eq!(text.parse::<MacAddr>(), Err(expected));
        }
        assert!(error("02-00:00-00-00-00-01").contains("'00:00' is not two hexadecimal digits"));
        assert!(error("").contains("1 parts"));
    }

    proptest! {
        #[test]
        fn text_round_trips(octets: [u8; 6]) {
            let mac = MacAddr(octets);
            prop_assert_eq!(mac.to_string().parse::<MacAddr>(), Ok(mac));
            let dashes = mac.to_string().to_uppercase().replace(':', "-");
            prop_assert_eq!(dashes.parse::<MacAddr>(), Ok(mac));
        }

        #[test]
        fn any_text_is_parsed_or_refused(text: String) {
            if let Ok(mac) = text.parse::<MacAddr>() {
                prop_assert_eq!(mac.to_string(), text.to_lowercase().replace('-', ":"));
            }
        }
    }
}
