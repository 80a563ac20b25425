//! Router discovery (RFC 4861): writes solicitations of a host, and parses advertisements of a router.

use std::net::Ipv6Addr;

use crate::{
    checksum::Sum,
    error::{Layer, WireError},
    ethernet::MacAddr,
    field::{be16, be32, bytes, put},
    icmp::field,
};

use super::neighbor::{SOURCE_LINK, UNIT, pseudo, walk};

/// Type: a router solicitation.
pub const SOLICIT: u8 = 133;
/// Type: a router advertisement.
pub const ADVERT: u8 = 134;

/// Length of a solicitation in bytes.
pub const SOLICIT_LEN: usize = 16;

/// Length of an advertisement without options.
const HEAD_LEN: usize = 16;

/// Offsets of the fields of an advertisement (4.2).
const FLAGS: usize = 5;
const LIFETIME: usize = 6;

/// Option types (4.6; RFC 8106, 5.1).
const PREFIX: u8 = 3;
const MTU: u8 = 5;
const NAME_SERVERS: u8 = 25;

/// Flags of a prefix option (4.6.2).
const ON_LINK: u8 = 0x80;
const AUTONOMOUS: u8 = 0x40;

/// A request to routers for advertisements (4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterSolicit {
    /// The sender's MAC address.
    pub source_link: MacAddr,
}

impl RouterSolicit {
    /// Writes the message with its checksum between `src` and `dst`.
    pub fn write(&self, to: &mut [u8; SOLICIT_LEN], src: Ipv6Addr, dst: Ipv6Addr) {
        let MacAddr([a, b, c, d, e, f]) = self.source_link;
        *to = [SOLICIT, 0, 0, 0, 0, 0, 0, 0, SOURCE_LINK, 1, a, b, c, d, e, f];
        #[allow(clippy::cast_possible_truncation, reason = "16")]
        let sum = pseudo(src, dst)(SOLICIT_LEN as u32) + Sum::of(to);
        put(to, field::CHECKSUM, sum.checksum().to_be_bytes());
    }
}

/// Preference of a default router (RFC 4191, 2.1), in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Preference {
    Low,
    Medium,
    High,
}

/// A router advertisement (4.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterAdvert<'a> {
    /// Time in seconds for which the sender is a default router. 0 means that it is not.
    pub lifetime: u16,
    pub preference: Preference,
    options: &'a [u8],
}

/// An option of an advertisement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterOption<'a> {
    /// The router's MAC address.
    SourceLink(MacAddr),
    /// A prefix of the link.
    Prefix(PrefixOption),
    /// The link's MTU.
    Mtu(u32),
    /// Name servers.
    NameServers(NameServers<'a>),
}

/// A prefix (4.6.2). Lifetimes are in seconds; `u32::MAX` means infinite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixOption {
    pub prefix: Ipv6Addr,
    pub len: u8,
    /// Addresses with this prefix are neighbours.
    pub on_link: bool,
    /// Hosts may form their own addresses with this prefix (RFC 4862).
    pub autonomous: bool,
    pub valid: u32,
    pub preferred: u32,
}

/// Name servers (RFC 8106, 5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NameServers<'a> {
    /// Time in seconds for which the servers may be used. 0 means no longer.
    pub lifetime: u32,
    addresses: &'a [u8],
}

impl<'a> RouterAdvert<'a> {
    pub(super) fn parse(message: &'a [u8]) -> Result<Self, WireError> {
        let layer = Layer::Icmpv6;
        let Some((head, options)) = message.split_first_chunk::<HEAD_LEN>() else {
            return Err(WireError::TooShort { layer, found: message.len(), needed: HEAD_LEN });
        };
        if head[field::CODE] != 0 {
            let found = head[field::CODE].into();
            return Err(WireError::Field { layer, field: "code", found, expected: 0 });
        }
        walk(options).try_for_each(|option| option.map(drop))?;
        let preference = match head[FLAGS] >> 3 & 3 {
            1 => Preference::High,
            3 => Preference::Low,
            _ => Preference::Medium,
        };
        Ok(Self { lifetime: be16(head, LIFETIME), preference, options })
    }

    /// Returns the options that [`RouterOption`] supports. Options of a wrong length are skipped.
    pub fn options(&self) -> impl Iterator<Item = RouterOption<'a>> + use<'a> {
        walk(self.options).map_while(Result::ok).filter_map(RouterOption::parse)
    }
}

impl<'a> RouterOption<'a> {
    fn parse(option: &'a [u8]) -> Option<Self> {
        match option {
            [SOURCE_LINK, 1, mac @ ..] => Some(Self::SourceLink(MacAddr(*mac.first_chunk()?))),
            [MTU, 1, ..] => Some(Self::Mtu(be32(option.first_chunk::<UNIT>()?, 4))),
            [PREFIX, 4, ..] => {
                let option = option.first_chunk::<32>()?;
                let flags = option[3];
                Some(Self::Prefix(PrefixOption {
                    prefix: Ipv6Addr::from(bytes::<16, _>(option, 16)),
                    len: option[2],
                    on_link: flags & ON_LINK != 0,
                    autonomous: flags & AUTONOMOUS != 0,
                    valid: be32(option, 4),
                    preferred: be32(option, 8),
                }))
            }
            [NAME_SERVERS, 3..=255, ..] => {
                let (head, addresses) = option.split_first_chunk::<UNIT>()?;
                Some(Self::NameServers(NameServers { lifetime: be32(head, 4), addresses }))
            }
            _ => None,
        }
    }
}

impl<'a> NameServers<'a> {
    /// Returns the addresses of the servers.
    pub fn addresses(&self) -> impl Iterator<Item = Ipv6Addr> + use<'a> {
        self.addresses.as_chunks::<16>().0.iter().map(|address| Ipv6Addr::from(*address))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::icmpv6::Icmpv6;

    const HEAD: [u8; 16] = [134, 0, 0, 0, 64, 0b1000, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];

    fn read(options: &[u8]) -> Vec<String> {
        let message = [&HEAD[..], options].concat();
        let Ok(Icmpv6::RouterAdvert(advert)) = Icmpv6::parse(&message) else { panic!("{message:?}") };
        advert.options().map(|option| format!("{option:?}")).collect()
    }

    #[test]
    fn advertisement_is_parsed() {
        let Ok(Icmpv6::RouterAdvert(advert)) = Icmpv6::parse(&HEAD) else { panic!() };
        assert_eq!((advert.lifetime, advert.preference), (1800, Preference::High));
        let mut prefix = [0; 32];
        prefix[..4].copy_from_slice(&[3, 4, 64, 0xc0]);
        prefix[4..12].copy_from_slice(&[0, 0, 0x0e, 0x10, 0, 0, 0x07, 0x08]);
        prefix[16..20].copy_from_slice(&[0x20, 1, 0x0d, 0xb8]);
        let mut servers = [0; 40];
        servers[..8].copy_from_slice(&[25, 5, 0, 0, 0, 0, 0, 60]);
        servers[23] = 1;
        servers[39] = 2;
        let link = [1, 1, 2, 0, 0, 0, 0, 9];
        let unknown = [200, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let found = read(&[&link[..], &unknown, &prefix, &[5, 1, 0, 0, 0, 0, 5, 0x78], &servers].concat());
        assert_eq!(found[0], "SourceLink(02:00:00:00:00:09)");
        assert_eq!(
            found[1],
            "Prefix(PrefixOption { prefix: 2001:db8::, len: 64, on_link: true, autonomous: true, valid: 3600, \
             preferred: 1800 })"
        );
        assert_eq!(found[2], "Mtu(1400)");
        let message = [&HEAD[..], &servers].concat();
        let Ok(Icmpv6::RouterAdvert(advert)) = Icmpv6::parse(&message) else { panic!() };
        let Some(RouterOption::NameServers(servers)) = advert.options().next() else { panic!() };
        let addresses: Vec<_> = servers.addresses().map(|address| address.to_string()).collect();
        assert_eq!((servers.lifetime, addresses), (60, vec!["::1".to_string(), "::2".into()]));
    }

    #[test]
    fn wrong_option_lengths_are_rejected() {
        for options in [&[1u8, 0, 0, 0, 0, 0, 0, 0][..], &[1, 2, 0, 0, 0, 0, 0, 0], &[5], &[5, 1, 0]] {
            assert!(Icmpv6::parse(&[&HEAD[..], options].concat()).is_err(), "{options:?}");
        }
        assert!(Icmpv6::parse(&HEAD[..15]).is_err());
        // A prefix option of 8 bytes is skipped.
        assert_eq!(read(&[3, 1, 64, 0xc0, 0, 0, 0, 0]), Vec::<String>::new());
    }

    #[test]
    fn solicitation_checksum_is_valid() {
        let [src, dst] = ["fe80::1", "ff02::2"].map(|text| text.parse::<Ipv6Addr>().unwrap());
        let mut bytes = [0xee; SOLICIT_LEN];
        RouterSolicit { source_link: MacAddr([2, 0, 0, 0, 0, 9]) }.write(&mut bytes, src, dst);
        assert_eq!((bytes[..2].to_vec(), &bytes[8..]), (vec![133, 0], &[1, 1, 2, 0, 0, 0, 0, 9][..]));
        assert!((pseudo(src, dst)(16) + Sum::of(&bytes)).is_valid());
    }

    proptest! {
        #[test]
        fn arbitrary_options_are_parsed(options in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(Icmpv6::RouterAdvert(advert)) = Icmpv6::parse(&[&HEAD[..], &options].concat()) {
                prop_assert!(advert.options().count() <= options.len() / UNIT);
            }
        }
    }
}
