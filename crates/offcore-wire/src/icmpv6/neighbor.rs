//! Neighbor discovery (RFC 4861): requests for the MAC address of a neighbor, and the answers.

use std::net::Ipv6Addr;

use crate::{
    checksum::Sum,
    error::{Layer, WireError},
    ethernet::MacAddr,
    field::{bytes, put},
    icmp::field,
    ip::IpProtocol,
};

/// Type: a neighbor solicitation.
pub const SOLICIT: u8 = 135;
/// Type: a neighbor advertisement.
pub const ADVERT: u8 = 136;

/// Length of either message in bytes, with a MAC address option.
pub const LEN: usize = HEAD_LEN + UNIT;

/// The hop limit of neighbor discovery packets. It ensures that a packet does not come from behind a router (7.1).
pub const HOP_LIMIT: u8 = 255;

/// Length of either message without options.
const HEAD_LEN: usize = 24;
/// The unit of option lengths, and the length of a MAC address option.
pub(super) const UNIT: usize = 8;

/// Offset of the target address.
const TARGET: usize = 8;

/// Option types (4.6.1).
pub(super) const SOURCE_LINK: u8 = 1;
const TARGET_LINK: u8 = 2;

/// Flags of an advertisement (4.4).
const ROUTER: u8 = 0x80;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

/// A request for a MAC address (4.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeighborSolicit {
    /// The address whose MAC address is requested.
    pub target: Ipv6Addr,
    /// The sender's MAC address. `None` if the source is the unspecified address (duplicate address detection).
    pub source_link: Option<MacAddr>,
}

/// The answer with a MAC address (4.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeighborAdvert {
    /// Whether the sender is a router.
    pub router: bool,
    /// Whether it answers a solicitation.
    pub solicited: bool,
    /// Whether it replaces a cached MAC address ("override").
    pub replaces: bool,
    /// The IP address that has the MAC address.
    pub target: Ipv6Addr,
    /// The MAC address.
    pub target_link: Option<MacAddr>,
}

impl NeighborSolicit {
    pub(super) fn parse(message: &[u8]) -> Result<Self, WireError> {
        let Parts { target, link, .. } = Parts::checked(message, SOURCE_LINK)?;
        Ok(Self { target, source_link: link })
    }

    /// Writes the message with its checksum between `src` and `dst`. Returns its length in bytes: 32, or 24 without
    /// [`NeighborSolicit::source_link`].
    pub fn write(&self, to: &mut [u8; LEN], src: Ipv6Addr, dst: Ipv6Addr) -> usize {
        let option = self.source_link.map(|link| (SOURCE_LINK, link));
        write(to, [SOLICIT, 0], self.target, option, pseudo(src, dst))
    }
}

impl NeighborAdvert {
    pub(super) fn parse(message: &[u8]) -> Result<Self, WireError> {
        let Parts { flags, target, link } = Parts::checked(message, TARGET_LINK)?;
        Ok(Self {
            router: flags & ROUTER != 0,
            solicited: flags & SOLICITED != 0,
            replaces: flags & OVERRIDE != 0,
            target,
            target_link: link,
        })
    }

    /// Writes the message with its checksum between `src` and `dst`. Returns its length in bytes: 32, or 24 without
    /// [`NeighborAdvert::target_link`].
    pub fn write(&self, to: &mut [u8; LEN], src: Ipv6Addr, dst: Ipv6Addr) -> usize {
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let flags =
            flag(self.router, ROUTER) | flag(self.solicited, SOLICITED) | flag(self.replaces, OVERRIDE);
        let option = self.target_link.map(|link| (TARGET_LINK, link));
        write(to, [ADVERT, flags], self.target, option, pseudo(src, dst))
    }
}

/// The common fields of both messages.
struct Parts {
    flags: u8,
    target: Ipv6Addr,
    link: Option<MacAddr>,
}

impl Parts {
    /// Parses a message. `option` is the type of the option with the MAC address.
    fn checked(message: &[u8], option: u8) -> Result<Self, WireError> {
        let layer = Layer::Icmpv6;
        let Some((head, options)) = message.split_first_chunk::<HEAD_LEN>() else {
            return Err(WireError::TooShort { layer, found: message.len(), needed: HEAD_LEN });
        };
        if head[field::CODE] != 0 {
            let found = head[field::CODE].into();
            return Err(WireError::Field { layer, field: "code", found, expected: 0 });
        }
        let target = Ipv6Addr::from(bytes::<16, _>(head, TARGET));
        if target.is_multicast() {
            return Err(WireError::MulticastTarget { layer, found: target });
        }
        Ok(Self { flags: head[field::REST], target, link: link(options, option)? })
    }
}

/// Returns the MAC address in the first option of type `wanted`, if any. Options of other types are skipped (4.6).
fn link(options: &[u8], wanted: u8) -> Result<Option<MacAddr>, WireError> {
    let mut link = None;
    for option in walk(options) {
        let option = option?;
        if let [kind, _, mac @ ..] = option
            && *kind == wanted
        {
            let (layer, kind, found) = (Layer::Icmpv6, *kind, option.len());
            let wrong = WireError::OptionLength { layer, kind, found, min: UNIT, max: UNIT };
            link = link.or(Some(MacAddr(mac.try_into().map_err(|_| wrong)?)));
        }
    }
    Ok(link)
}

/// Returns the options of a message, including type and length. The first option with a wrong length is an error and
/// ends the list.
pub(super) fn walk(mut options: &[u8]) -> impl Iterator<Item = Result<&[u8], WireError>> {
    std::iter::from_fn(move || {
        let kind = *options.first()?;
        let (found, max) = match options.first_chunk::<UNIT>() {
            Some([_, units, ..]) => (usize::from(*units) * UNIT, options.len() / UNIT * UNIT),
            None => (options.len(), UNIT),
        };
        let fits = (UNIT..=max).contains(&found);
        let (option, rest) = options.split_at(if fits { found } else { options.len() });
        options = rest;
        let error = WireError::OptionLength { layer: Layer::Icmpv6, kind, found, min: UNIT, max };
        Some(if fits { Ok(option) } else { Err(error) })
    })
}

fn write(
    to: &mut [u8; LEN],
    [kind, flags]: [u8; 2],
    target: Ipv6Addr,
    option: Option<(u8, MacAddr)>,
    pseudo: impl FnOnce(u32) -> Sum,
) -> usize {
    put(to, field::TYPE, [kind, 0, 0, 0, flags, 0, 0, 0]);
    put(to, TARGET, target.octets());
    let mut len = HEAD_LEN;
    if let Some((option, MacAddr([a, b, c, d, e, f]))) = option {
        put(to, HEAD_LEN, [option, 1, a, b, c, d, e, f]);
        len = LEN;
    }
    #[allow(clippy::cast_possible_truncation, reason = "LEN at most")]
    let sum = pseudo(len as u32) + Sum::of(to.get(..len).unwrap_or_default());
    put(to, field::CHECKSUM, sum.checksum().to_be_bytes());
    len
}

pub(super) fn pseudo(src: Ipv6Addr, dst: Ipv6Addr) -> impl FnOnce(u32) -> Sum {
    move |len| Sum::pseudo_v6(src, dst, IpProtocol::ICMPV6, len)
}
