//! Errors of datagrams that were not delivered, in the form of Linux's `IP_RECVERR` and `IPV6_RECVERR` (`struct
//! sock_extended_err` of `linux/errqueue.h`).

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Maximum number of quoted bytes of the datagram.
pub const PAYLOAD: usize = 64;
/// Number of words of an error in a message.
pub const WORDS: usize = 12 + PAYLOAD / 4;

/// The source of an error (`SO_EE_ORIGIN_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Origin {
    /// The sending host.
    Local = 1,
    /// An ICMP message.
    Icmp = 2,
    /// An ICMPv6 message.
    Icmp6 = 3,
}

/// An error of a socket's datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Undelivered {
    /// The `errno`.
    pub error: u32,
    pub origin: Origin,
    /// Type and code of the ICMP message.
    pub kind: u8,
    pub code: u8,
    /// The MTU of the path, or the offset of the wrong field. 0 in other messages.
    pub info: u32,
    /// The sender of the message.
    pub offender: Option<IpAddr>,
    /// The destination of the datagram.
    pub to: SocketAddr,
    /// The first bytes of the datagram, as the message quotes them.
    pub payload: [u8; PAYLOAD],
    pub len: u8,
}

impl Undelivered {
    /// Returns the quoted bytes of the datagram.
    pub fn payload(&self) -> &[u8] {
        &self.payload[..usize::from(self.len).min(PAYLOAD)]
    }

    /// Encodes the error for an answer: errno; origin, type, code and length, 8 bits each; info; port, and families of
    /// both addresses; both addresses; payload.
    pub fn to_words(&self) -> [u32; WORDS] {
        let mut words = [0; WORDS];
        let family = |address: Option<IpAddr>| match address {
            None => 0,
            Some(IpAddr::V4(_)) => 4,
            Some(IpAddr::V6(_)) => 6,
        };
        let [to, offender] = [Some(self.to.ip()), self.offender];
        words[0] = self.error;
        words[1] = u32::from_le_bytes([self.origin as u8, self.kind, self.code, self.len]);
        words[2] = self.info;
        words[3] = u32::from(self.to.port()) | family(to) << 16 | family(offender) << 24;
        for (at, address) in [(4, to), (8, offender)] {
            let mut octets = [0; 16];
            match address {
                Some(IpAddr::V4(v4)) => octets[..4].copy_from_slice(&v4.octets()), // copy-ok: an address
                Some(IpAddr::V6(v6)) => octets = v6.octets(),
                None => {}
            }
            write(&mut words[at..at + 4], &octets);
        }
        write(&mut words[12..], &self.payload);
        words
    }

    /// Decodes an error. Returns `None` if the words are invalid.
    pub fn from_words(words: &[u32; WORDS]) -> Option<Self> {
        let [origin, kind, code, len] = words[1].to_le_bytes();
        let origin =
            [Origin::Local, Origin::Icmp, Origin::Icmp6].into_iter().find(|known| *known as u8 == origin)?;
        let address = |at: usize, family: u32| -> Option<IpAddr> {
            let mut octets = [0; 16];
            read(&words[at..at + 4], &mut octets);
            match family & 0xff {
                4 => Some(Ipv4Addr::from(*octets.first_chunk::<4>()?).into()),
                6 => Some(Ipv6Addr::from(octets).into()),
                _ => None,
            }
        };
        let to = SocketAddr::new(address(4, words[3] >> 16)?, words[3] as u16);
        let offender = address(8, words[3] >> 24);
        let mut payload = [0; PAYLOAD];
        read(&words[12..], &mut payload);
        let (error, info) = (words[0], words[2]);
        Some(Self { error, origin, kind, code, info, offender, to, payload, len })
    }
}

fn write(words: &mut [u32], bytes: &[u8]) {
    for (word, four) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = four.first_chunk().map_or(0, |four| u32::from_le_bytes(*four));
    }
}

fn read(words: &[u32], bytes: &mut [u8]) {
    for (word, four) in words.iter().zip(bytes.chunks_exact_mut(4)) {
        four.copy_from_slice(&word.to_le_bytes()); // copy-ok: a few bytes of a message
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn undelivered_error_round_trips() {
        let mut v4 = Undelivered {
            error: 111,
            origin: Origin::Icmp,
            kind: 3,
            code: 4,
            info: 1400,
            offender: Some(Ipv4Addr::new(10, 0, 0, 1).into()),
            to: SocketAddr::new(Ipv4Addr::new(10, 0, 0, 9).into(), 65_535),
            payload: core::array::from_fn(|at| at as u8),
            len: 64,
        };
        let to = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), 7);
        let v6 = Undelivered { origin: Origin::Icmp6, offender: Some(to.ip()), to, len: 0, ..v4 };
        let local = Undelivered { origin: Origin::Local, offender: None, ..v4 };
        for error in [v4, v6, local] {
            assert_eq!(Undelivered::from_words(&error.to_words()), Some(error));
        }
        v4.len = 200;
        assert_eq!(v4.payload().len(), PAYLOAD, "a length that cannot be");
        assert_eq!(Undelivered::from_words(&[0; WORDS]), None);
        let mut words = v4.to_words();
        words[3] = 9 << 16;
        assert_eq!(Undelivered::from_words(&words), None, "of no family");
    }
}
