//! Multicast listener discovery, versions 1 (RFC 2710) and 2 (RFC 3810): a host reports the groups in which it is a
//! member.

use std::net::Ipv6Addr;
use std::time::Duration;

use crate::{
    checksum::Sum,
    error::{Layer, WireError},
    field::{be16, bytes, put},
    icmp::field,
    igmp::{Record, exponential},
    ip::IpProtocol,
};

/// Type: multicast listener query.
pub const QUERY: u8 = 130;
/// Type: a report of version 1.
pub const REPORT_V1: u8 = 131;
/// Type: the last listener of a group has left, in version 1.
pub const DONE: u8 = 132;
/// Type: a report of version 2.
pub const REPORT_V2: u8 = 143;

/// The group of all MLDv2 routers, to which reports are sent.
pub const REPORTS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);

/// The hop-by-hop options header before each message: a router alert (RFC 2711), padded.
pub const ROUTER_ALERT: [u8; 8] = [IpProtocol::ICMPV6.0, 0, 5, 2, 0, 0, 1, 0];

/// Length of a version 1 message, and minimum length of a version 2 query, in bytes.
const V1_LEN: usize = 24;
const V2_QUERY_LEN: usize = 28;
/// Length of a record without sources, and of the header of a report.
const RECORD_LEN: usize = 20;
const REPORT_LEN: usize = 8;
/// Offset of the group in version 1 messages and in queries.
const GROUP: usize = 8;

/// A multicast listener query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerQuery {
    /// The group; `None` for a general query.
    pub group: Option<Ipv6Addr>,
    /// Maximum response delay.
    pub within: Duration,
    /// Whether the router uses version 1.
    pub is_v1: bool,
    /// The robustness variable: how often a change is reported. 0 if the query does not contain it.
    pub robustness: u8,
}

impl ListenerQuery {
    pub(super) fn parse(message: &[u8]) -> Result<Self, WireError> {
        let Some(head) = message.first_chunk::<V1_LEN>() else {
            let (layer, found) = (Layer::Icmpv6, message.len());
            return Err(WireError::TooShort { layer, found, needed: V1_LEN });
        };
        let group = Ipv6Addr::from(bytes::<16, _>(head, GROUP));
        if !group.is_unspecified() && !group.is_multicast() {
            return Err(WireError::NoGroup { layer: Layer::Icmpv6, found: group.into() });
        }
        let code = be16(head, field::REST);
        let v2 = message.first_chunk::<V2_QUERY_LEN>();
        let millis = if v2.is_some() { exponential(code.into(), 12) } else { code.into() };
        Ok(Self {
            group: Some(group).filter(|group| !group.is_unspecified()),
            within: Duration::from_millis(millis.into()),
            is_v1: v2.is_none(),
            robustness: v2.map_or(0, |query| query[V1_LEN] & 7),
        })
    }
}

/// Returns the group of a version 1 report.
pub(super) fn reported(message: &[u8]) -> Result<Ipv6Addr, WireError> {
    let needed = V1_LEN;
    let error = WireError::TooShort { layer: Layer::Icmpv6, found: message.len(), needed };
    let head = message.first_chunk::<V1_LEN>().ok_or(error)?;
    Ok(Ipv6Addr::from(bytes::<16, _>(head, GROUP)))
}

/// Writes a version 2 report with its checksum between `src` and [`REPORTS`], with as many records as fit into `to`.
/// Returns the length in bytes and the number of records.
pub fn write_report(to: &mut [u8], records: &[(Record, Ipv6Addr)], src: Ipv6Addr) -> (usize, usize) {
    let Some((head, body)) = to.split_first_chunk_mut::<REPORT_LEN>() else { return (0, 0) };
    let (rooms, _) = body.as_chunks_mut::<RECORD_LEN>();
    let mut count = 0u16;
    for (room, (record, group)) in rooms.iter_mut().zip(records) {
        *room = [0; RECORD_LEN];
        room[0] = *record as u8;
        put(room, 4, group.octets());
        count += 1;
    }
    let [high, low] = count.to_be_bytes();
    *head = [REPORT_V2, 0, 0, 0, 0, 0, high, low];
    let len = REPORT_LEN + usize::from(count) * RECORD_LEN;
    seal(to, len, src, REPORTS);
    (len, count.into())
}

/// Writes a version 1 message, [`REPORT_V1`] or [`DONE`], with its checksum between `src` and `dst`. Returns its
/// length.
pub fn write_v1(to: &mut [u8], kind: u8, group: Ipv6Addr, src: Ipv6Addr, dst: Ipv6Addr) -> usize {
    let Some(head) = to.first_chunk_mut::<V1_LEN>() else { return 0 };
    *head = [0; V1_LEN];
    head[field::TYPE] = kind;
    put(head, GROUP, group.octets());
    seal(to, V1_LEN, src, dst);
    V1_LEN
}

fn seal(message: &mut [u8], len: usize, src: Ipv6Addr, dst: Ipv6Addr) {
    let Some(message) = message.get_mut(..len) else { return };
    #[allow(clippy::cast_possible_truncation, reason = "a packet's length has 16 bits")]
    let pseudo = Sum::pseudo_v6(src, dst, IpProtocol::ICMPV6, len as u32);
    let [high, low] = (pseudo + Sum::of(message)).checksum().to_be_bytes();
    message[field::CHECKSUM] = high;
    message[field::CHECKSUM + 1] = low;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Icmpv6;

    fn address(text: &str) -> Ipv6Addr {
        text.parse().unwrap()
    }

    fn query(code: u16, group: &str, more: &[u8]) -> Vec<u8> {
        let [high, low] = code.to_be_bytes();
        [&[QUERY, 0, 0, 0, high, low, 0, 0][..], &address(group).octets(), more].concat()
    }

    fn read(message: &[u8]) -> ListenerQuery {
        match Icmpv6::parse(message) {
            Ok(Icmpv6::ListenerQuery(query)) => query,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn both_query_versions_are_parsed() {
        let first = read(&query(10_000, "::", &[]));
        let within = Duration::from_secs(10);
        assert_eq!(first, ListenerQuery { group: None, within, is_v1: true, robustness: 0 });
        let second = read(&query(1000, "ff02::1:ff00:2", &[2, 125, 0, 0]));
        let (group, within) = (Some(address("ff02::1:ff00:2")), Duration::from_secs(1));
        assert_eq!(second, ListenerQuery { group, within, is_v1: false, robustness: 2 });
        // RFC 3810, 5.1.3: 1, an exponent of 3 bits, and 12 bits of mantissa.
        assert_eq!(read(&query(0x9001, "::", &[0; 4])).within, Duration::from_millis(0x1001 << 4));
        assert!(Icmpv6::parse(&query(0, "fe80::1", &[])).is_err(), "no group");
        for len in 8..24 {
            assert!(Icmpv6::parse(&query(0, "::", &[])[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn report_records_fit_buffer() {
        let groups = ["ff02::1:ff00:1", "ff02::1:ff00:2", "ff05::9"].map(address);
        let records = groups.map(|group| (Record::ToExclude, group));
        let mut bytes = [0xee; 50];
        assert_eq!(write_report(&mut bytes, &records, address("fe80::1")), (48, 2));
        assert_eq!(bytes[..8][4..], [0, 0, 0, 2]);
        assert_eq!((bytes[8], &bytes[12..28]), (4, &groups[0].octets()[..]));
        let pseudo = Sum::pseudo_v6(address("fe80::1"), REPORTS, IpProtocol::ICMPV6, 48);
        assert!((pseudo + Sum::of(&bytes[..48])).is_valid());
        assert_eq!(write_report(&mut [0; 4], &records, address("fe80::1")), (0, 0));
    }

    #[test]
    fn version_1_reports_name_their_group() {
        let (src, group) = (address("fe80::1"), address("ff05::9"));
        let mut bytes = [0; 24];
        assert_eq!(write_v1(&mut bytes, REPORT_V1, group, src, group), 24);
        assert_eq!(Icmpv6::parse(&bytes), Ok(Icmpv6::ListenerReport { group }));
        assert!((Sum::pseudo_v6(src, group, IpProtocol::ICMPV6, 24) + Sum::of(&bytes)).is_valid());
    }
}
