//! DHCP for IPv4 (RFC 2131): writes messages of a client, and parses messages of a server.
//!
//! The options are defined in RFC 2132. RFC 3442 adds classless routes.

use std::net::Ipv4Addr;

use crate::{
    error::{Layer, WireError},
    ethernet::MacAddr,
    field::{be32, bytes, put},
};

/// UDP port of servers.
pub const SERVER_PORT: u16 = 67;
/// UDP port of clients.
pub const CLIENT_PORT: u16 = 68;
/// Length of a client's message in bytes: the minimum for BOOTP relays.
pub const LEN: usize = 300;
/// Maximum number of routes that are read from a message.
pub const MAX_ROUTES: usize = 16;
/// Maximum number of name servers that are read from a message.
pub const MAX_SERVERS: usize = 8;

/// Length of the fixed fields in bytes, including the magic cookie.
const FIXED: usize = 240;
const COOKIE: [u8; 4] = [99, 130, 83, 99];
const BOOT_REQUEST: u8 = 1;
const BOOT_REPLY: u8 = 2;
const ETHERNET: [u8; 2] = [1, 6];
const BROADCAST: [u8; 2] = [0x80, 0];

mod field {
    pub(super) const XID: usize = 4;
    pub(super) const SECS: usize = 8;
    pub(super) const FLAGS: usize = 10;
    pub(super) const CLIENT: usize = 12;
    pub(super) const YOURS: usize = 16;
    pub(super) const HARDWARE: usize = 28;
    pub(super) const NAME: usize = 44;
    pub(super) const FILE: usize = 108;
    pub(super) const COOKIE: usize = 236;
}

mod option {
    pub(super) const PAD: u8 = 0;
    pub(super) const MASK: u8 = 1;
    pub(super) const ROUTERS: u8 = 3;
    pub(super) const NAME_SERVERS: u8 = 6;
    pub(super) const MTU: u8 = 26;
    pub(super) const REQUESTED: u8 = 50;
    pub(super) const LEASE: u8 = 51;
    pub(super) const OVERLOAD: u8 = 52;
    pub(super) const KIND: u8 = 53;
    pub(super) const SERVER: u8 = 54;
    pub(super) const WANTED: u8 = 55;
    pub(super) const LONGEST: u8 = 57;
    pub(super) const RENEWAL: u8 = 58;
    pub(super) const REBINDING: u8 = 59;
    pub(super) const CLIENT_ID: u8 = 61;
    pub(super) const ROUTES: u8 = 121;
    pub(super) const END: u8 = 255;
}

/// Message types (RFC 2132, 9.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DhcpKind {
    Discover = 1,
    Offer = 2,
    Request = 3,
    Decline = 4,
    Ack = 5,
    Nak = 6,
    Release = 7,
}

/// A message from a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DhcpRequest {
    pub kind: DhcpKind,
    pub xid: u32,
    /// Seconds since the client began.
    pub secs: u16,
    pub mac: MacAddr,
    /// The address of the client, when it renews its lease.
    pub client: Option<Ipv4Addr>,
    /// The requested address.
    pub requested: Option<Ipv4Addr>,
    /// The selected server.
    pub server: Option<Ipv4Addr>,
}

impl DhcpRequest {
    /// Writes the message. A client without an address requests broadcast replies.
    pub fn write(&self, to: &mut [u8; LEN]) {
        *to = [0; LEN];
        let [ethernet, len] = ETHERNET;
        put(to, 0, [BOOT_REQUEST, ethernet, len, 0]);
        put(to, field::XID, self.xid.to_be_bytes());
        put(to, field::SECS, self.secs.to_be_bytes());
        match self.client {
            Some(client) => put(to, field::CLIENT, client.octets()),
            None => put(to, field::FLAGS, BROADCAST),
        }
        put(to, field::HARDWARE, self.mac.0);
        put(to, field::COOKIE, COOKIE);
        let mut at = FIXED;
        let mut option = |kind: u8, value: &[u8]| {
            let room = to.get_mut(at..at + 2 + value.len()).unwrap_or_default();
            #[allow(clippy::cast_possible_truncation, reason = "options below have a few bytes")]
            let bytes = [kind, value.len() as u8].into_iter().chain(value.iter().copied());
            room.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
            at += room.len();
        };
        option(option::KIND, &[self.kind as u8]);
        let MacAddr([a, b, c, d, e, f]) = self.mac;
        option(option::CLIENT_ID, &[ethernet, a, b, c, d, e, f]);
        if let Some(requested) = self.requested {
            option(option::REQUESTED, &requested.octets());
        }
        if let Some(server) = self.server {
            option(option::SERVER, &server.octets());
        }
        if !matches!(self.kind, DhcpKind::Decline | DhcpKind::Release) {
            option(option::LONGEST, &1500u16.to_be_bytes());
            // Classless routes come first in the list, because a server that sends them need not send routers (RFC
            // 3442).
            option(
                option::WANTED,
                &[
                    option::MASK,
                    option::ROUTES,
                    option::ROUTERS,
                    option::NAME_SERVERS,
                    option::MTU,
                    option::LEASE,
                    option::RENEWAL,
                    option::REBINDING,
                ],
            );
        }
        if let Some(end) = to.get_mut(at) {
            *end = option::END;
        }
    }
}

/// A route in a message: the network, its prefix length, and the gateway, which is 0.0.0.0 for networks on the link.
pub type DhcpRoute = (Ipv4Addr, u8, Ipv4Addr);

/// A message from a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DhcpReply {
    pub kind: DhcpKind,
    pub xid: u32,
    /// The address for the client.
    pub yours: Ipv4Addr,
    pub server: Option<Ipv4Addr>,
    /// Prefix length of the network.
    pub prefix: Option<u8>,
    /// The classless routes, or default routes over the routers.
    pub routes: Vec<DhcpRoute>,
    /// Name servers (RFC 2132, 3.8).
    pub name_servers: Vec<Ipv4Addr>,
    pub mtu: Option<u16>,
    /// Times in seconds: the duration of the lease, the time until the client renews it, and the time until the client
    /// rebinds by broadcast.
    pub lease: Option<u32>,
    pub renewal: Option<u32>,
    pub rebinding: Option<u32>,
}

impl DhcpReply {
    /// Parses the payload of a UDP datagram to the station `mac`.
    ///
    /// # Errors
    /// [`WireError::TooShort`]; [`WireError::Field`] for a message to another station, or of another type.
    pub fn parse(message: &[u8], mac: MacAddr) -> Result<Self, WireError> {
        let layer = Layer::Dhcp;
        let Some((head, options)) = message.split_first_chunk::<FIXED>() else {
            return Err(WireError::TooShort { layer, found: message.len(), needed: FIXED });
        };
        let wrong = |field, found, expected| WireError::Field { layer, field, found, expected };
        if head[0] != BOOT_REPLY {
            return Err(wrong("op", head[0].into(), BOOT_REPLY.into()));
        }
        if bytes::<6, _>(head, field::HARDWARE) != mac.0 || bytes::<4, _>(head, field::COOKIE) != COOKIE {
            return Err(wrong("chaddr", head[field::HARDWARE].into(), mac.0[0].into()));
        }
        let (name, file) = (&head[field::NAME..field::FILE], &head[field::FILE..field::COOKIE]);
        let overload = find(options, option::OVERLOAD).next().and_then(|value| value.first().copied());
        let overload = overload.unwrap_or(0);
        let areas =
            [options, if overload & 1 != 0 { file } else { &[] }, if overload & 2 != 0 { name } else { &[] }];
        let all = |kind: u8| areas.into_iter().flat_map(move |area| find(area, kind)).flatten().copied();
        let number = |kind: u8| {
            let mut value = all(kind);
            let four: [Option<u8>; 4] = [value.next(), value.next(), value.next(), value.next()];
            match four {
                [Some(a), Some(b), Some(c), Some(d)] => Some(u32::from_be_bytes([a, b, c, d])),
                _ => None,
            }
        };
        let kind = match all(option::KIND).next() {
            Some(2) => DhcpKind::Offer,
            Some(5) => DhcpKind::Ack,
            Some(6) => DhcpKind::Nak,
            found => return Err(wrong("message type", found.unwrap_or(0).into(), 2)),
        };
        let mut mtu = all(option::MTU);
        let servers: Vec<u8> = all(option::NAME_SERVERS).collect();
        let (servers, _) = servers.as_chunks::<4>();
        let classless: Vec<u8> = all(option::ROUTES).collect();
        let routes = match classless.is_empty() {
            false => routes(&classless),
            true => {
                let routers: Vec<u8> = all(option::ROUTERS).collect();
                let (routers, _) = routers.as_chunks::<4>();
                let default = |router: &[u8; 4]| (Ipv4Addr::UNSPECIFIED, 0, Ipv4Addr::from(*router));
                let mut routers = routers.iter().filter(|router| **router != [0; 4]);
                routers.next().map(default).into_iter().collect()
            }
        };
        Ok(Self {
            kind,
            xid: be32(head, field::XID),
            yours: Ipv4Addr::from(bytes::<4, _>(head, field::YOURS)),
            server: number(option::SERVER).map(Ipv4Addr::from_bits),
            prefix: number(option::MASK).map(|mask| mask.leading_ones() as u8),
            routes,
            name_servers: servers.iter().take(MAX_SERVERS).copied().map(Ipv4Addr::from).collect(),
            mtu: mtu.next().zip(mtu.next()).map(|(high, low)| u16::from_be_bytes([high, low])),
            lease: number(option::LEASE),
            renewal: number(option::RENEWAL),
            rebinding: number(option::REBINDING),
        })
    }
}

/// Returns the values of all options of a type. Several options are parts of one value (RFC 3396).
fn find(mut area: &[u8], kind: u8) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        loop {
            match *area {
                [option::PAD, ref rest @ ..] => area = rest,
                [option::END, ..] | [] | [_] => return None,
                [found, len, ref rest @ ..] => {
                    let (value, rest) = rest.split_at_checked(len.into())?;
                    area = rest;
                    if found == kind {
                        return Some(value);
                    }
                }
            }
        }
    })
}

/// Parses classless routes: prefix length, significant bytes of the network, and gateway.
fn routes(mut value: &[u8]) -> Vec<DhcpRoute> {
    let mut routes = Vec::new();
    while let [len @ 0..=32, rest @ ..] = value
        && routes.len() < MAX_ROUTES
    {
        let significant = usize::from(len.div_ceil(8));
        let Some((network, rest)) = rest.split_at_checked(significant) else { break };
        let Some((gateway, rest)) = rest.split_first_chunk::<4>() else { break };
        let mut address = [0; 4];
        address.iter_mut().zip(network).for_each(|(to, from)| *to = *from);
        let mask = u32::MAX.checked_shl(32 - u32::from(*len)).unwrap_or(0);
        let network = Ipv4Addr::from_bits(u32::from_be_bytes(address) & mask);
        routes.push((network, *len, Ipv4Addr::from(*gateway)));
        value = rest;
    }
    routes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

    fn reply(options: &[u8]) -> Vec<u8> {
        let mut message = vec![0; FIXED];
        message[..4].copy_from_slice(&[2, 1, 6, 0]);
        message[4..8].copy_from_slice(&7u32.to_be_bytes());
        message[16..20].copy_from_slice(&[10, 0, 0, 7]);
        message[28..34].copy_from_slice(&MAC.0);
        message[236..240].copy_from_slice(&COOKIE);
        message.extend(options);
        message
    }

    #[test]
    fn offer_is_parsed() {
        let options = [
            &[53, 1, 2, 54, 4, 10, 0, 0, 1, 0, 1, 4, 255, 255, 255, 0][..],
            &[
                3, 8, 10, 0, 0, 1, 10, 0, 0, 2, 26, 2, 5, 0x78, 51, 4, 0, 0, 0x0e, 0x10, 58, 4, 0, 0, 0, 60,
                6, 4, 10, 0, 0, 53, 255,
            ],
        ];
        let found = DhcpReply::parse(&reply(&options.concat()), MAC).unwrap();
        let expected = DhcpReply {
            kind: DhcpKind::Offer,
            xid: 7,
            yours: [10, 0, 0, 7].into(),
            server: Some([10, 0, 0, 1].into()),
            prefix: Some(24),
            routes: vec![(Ipv4Addr::UNSPECIFIED, 0, [10, 0, 0, 1].into())],
            name_servers: vec![[10, 0, 0, 53].into()],
            mtu: Some(1400),
            lease: Some(3600),
            renewal: Some(60),
            rebinding: None,
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn classless_routes_replace_routers() {
        // RFC 3442: 10.0.0.0/8, 10.27.129.0/24 and the default, in two parts.
        let options = [
            &[53, 1, 5, 3, 4, 9, 9, 9, 9, 121, 8, 8, 10, 1, 2, 3, 4, 24, 10, 121, 11][..],
            &[27, 129, 5, 6, 7, 8, 0, 1, 1, 1, 1, 255],
        ];
        let found = DhcpReply::parse(&reply(&options.concat()), MAC).unwrap();
        let route = |network: [u8; 4], len, gateway: [u8; 4]| (network.into(), len, gateway.into());
        let expected = [
            route([10, 0, 0, 0], 8, [1, 2, 3, 4]),
            route([10, 27, 129, 0], 24, [5, 6, 7, 8]),
            route([0; 4], 0, [1; 4]),
        ];
        assert_eq!(found.routes, expected);
    }

    #[test]
    fn overloaded_options_are_parsed() {
        let mut message = reply(&[53, 1, 5, 52, 1, 3, 255]);
        message[108..114].copy_from_slice(&[51, 4, 0, 0, 0, 9]);
        message[114] = 255;
        message[44..50].copy_from_slice(&[54, 4, 10, 0, 0, 3]);
        let found = DhcpReply::parse(&message, MAC).unwrap();
        assert_eq!((found.lease, found.server), (Some(9), Some([10, 0, 0, 3].into())));
    }

    #[test]
    fn messages_for_others_are_refused() {
        assert!(DhcpReply::parse(&reply(&[53, 1, 5]), MacAddr([2; 6])).is_err());
        assert!(DhcpReply::parse(&reply(&[53, 1, 1]), MAC).is_err(), "a client's message");
        assert!(DhcpReply::parse(&reply(&[])[..239], MAC).is_err());
    }

    #[test]
    fn request_options_are_written() {
        let request = DhcpRequest {
            kind: DhcpKind::Request,
            xid: 9,
            secs: 3,
            mac: MAC,
            client: None,
            requested: Some([10, 0, 0, 7].into()),
            server: Some([10, 0, 0, 1].into()),
        };
        let mut bytes = [0xee; LEN];
        request.write(&mut bytes);
        assert_eq!((bytes[0], &bytes[4..12]), (1, &[0, 0, 0, 9, 0, 3, 0x80, 0][..]));
        let value = |kind| find(&bytes[FIXED..], kind).next().map(<[u8]>::to_vec);
        assert_eq!(value(53), Some(vec![3]));
        assert_eq!(value(50), Some(vec![10, 0, 0, 7]));
        assert_eq!(value(54), Some(vec![10, 0, 0, 1]));
        assert_eq!(value(55).unwrap()[1], 121);
        assert_eq!(value(61), Some([&[1][..], &MAC.0].concat()));
    }

    proptest! {
        #[test]
        fn arbitrary_options_are_parsed(options in prop::collection::vec(any::<u8>(), 0..300)) {
            let message = [&[53, 1, 5][..], &options].concat();
            prop_assert!(DhcpReply::parse(&reply(&message), MAC).is_ok_and(|found| found.routes.len() <= MAX_ROUTES));
        }
    }
}
