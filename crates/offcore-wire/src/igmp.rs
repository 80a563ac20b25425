//! IGMP, versions 1 to 3 (RFC 1112, 2236, 3376): a host reports the IPv4 groups in which it is a member.

use std::net::Ipv4Addr;
use std::time::Duration;

use crate::{
    checksum::Sum,
    error::{Layer, WireError},
    field::{bytes, put},
    icmp::field,
};

/// Type: membership query.
pub const QUERY: u8 = 0x11;
/// Type: a report of version 1.
pub const REPORT_V1: u8 = 0x12;
/// Type: a report of version 2.
pub const REPORT_V2: u8 = 0x16;
/// Type: the last listener of a group has left, in version 2.
pub const LEAVE: u8 = 0x17;
/// Type: a report of version 3.
pub const REPORT_V3: u8 = 0x22;

/// The group of all IGMPv3 routers, to which reports are sent.
pub const REPORTS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 22);
/// The group of all routers, to which [`LEAVE`] is sent.
pub const ALL_ROUTERS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 2);

/// Length of a message of versions 1 and 2, and minimum length of a version 3 query, in bytes.
const LEN: usize = 8;
const V3_QUERY_LEN: usize = 12;

/// Types of records without sources, in IGMPv3 and MLDv2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// The group is joined (MODE_IS_EXCLUDE).
    IsExclude = 2,
    /// The group was left (CHANGE_TO_INCLUDE_MODE).
    ToInclude = 3,
    /// The group was just joined (CHANGE_TO_EXCLUDE_MODE).
    ToExclude = 4,
}

/// An IGMP message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Igmp {
    /// A membership query.
    Query {
        /// The group; `None` for a general query.
        group: Option<Ipv4Addr>,
        /// Maximum response time.
        within: Duration,
        /// The router's version.
        version: u8,
        /// The robustness variable: how often a change is reported. 0 if the query does not contain it.
        robustness: u8,
    },
    /// A version 1 or 2 report of another host.
    Report { group: Ipv4Addr },
    /// Another message.
    Other { kind: u8 },
}

impl Igmp {
    /// Parses the payload of an IPv4 packet. The checksum is not verified.
    ///
    /// # Errors
    /// [`WireError::TooShort`] below 8 bytes; [`WireError::NoGroup`] for a query about an address that is not
    /// multicast.
    pub fn parse(message: &[u8]) -> Result<Self, WireError> {
        let Some(head) = message.first_chunk::<LEN>() else {
            return Err(WireError::TooShort { layer: Layer::Igmp, found: message.len(), needed: LEN });
        };
        let group = Ipv4Addr::from(bytes::<4, _>(head, field::REST));
        let code = head[field::CODE];
        Ok(match head[field::TYPE] {
            QUERY if !group.is_unspecified() && !group.is_multicast() => {
                return Err(WireError::NoGroup { layer: Layer::Igmp, found: group.into() });
            }
            QUERY => {
                let v3 = message.first_chunk::<V3_QUERY_LEN>();
                let (version, tenths) = match v3 {
                    Some(_) => (3, exponential(code.into(), 4)),
                    // A version 1 query has 0 in this field, which means ten seconds.
                    None if code == 0 => (1, 100),
                    None => (2, code.into()),
                };
                Self::Query {
                    group: Some(group).filter(|group| !group.is_unspecified()),
                    within: Duration::from_millis(u64::from(tenths) * 100),
                    version,
                    robustness: v3.map_or(0, |query| query[LEN] & 7),
                }
            }
            REPORT_V1 | REPORT_V2 => Self::Report { group },
            kind => Self::Other { kind },
        })
    }
}

/// Decodes a time. In the lower half of its range, a code is the time. In the upper half, three bits are an exponent
/// and `bits` bits are the mantissa (RFC 3376, 4.1.1; RFC 3810, 5.1.3).
pub(crate) fn exponential(code: u32, bits: u32) -> u32 {
    let half = 1 << (bits + 3);
    if code < half {
        return code;
    }
    let mantissa = (code & ((1 << bits) - 1)) | 1 << bits;
    mantissa << (((code >> bits) & 7) + 3)
}

/// Writes a version 3 report with its checksum, with as many records as fit into `to`. Returns the length in bytes and
/// the number of records.
pub fn write_report(to: &mut [u8], records: &[(Record, Ipv4Addr)]) -> (usize, usize) {
    let Some((head, body)) = to.split_first_chunk_mut::<LEN>() else { return (0, 0) };
    let (rooms, _) = body.as_chunks_mut::<8>();
    let mut count = 0u16;
    for (room, (record, group)) in rooms.iter_mut().zip(records) {
        let [a, b, c, d] = group.octets();
        *room = [*record as u8, 0, 0, 0, a, b, c, d];
        count += 1;
    }
    let [high, low] = count.to_be_bytes();
    *head = [REPORT_V3, 0, 0, 0, 0, 0, high, low];
    let len = LEN + usize::from(count) * 8;
    seal(to, len);
    (len, count.into())
}

/// Writes a version 1 or 2 message, [`REPORT_V1`], [`REPORT_V2`] or [`LEAVE`], with its checksum. Returns its length.
pub fn write_plain(to: &mut [u8], kind: u8, group: Ipv4Addr) -> usize {
    let Some(head) = to.first_chunk_mut::<LEN>() else { return 0 };
    *head = [kind, 0, 0, 0, 0, 0, 0, 0];
    put(head, field::REST, group.octets());
    seal(to, LEN);
    LEN
}

fn seal(message: &mut [u8], len: usize) {
    let Some(message) = message.get_mut(..len) else { return };
    let [high, low] = Sum::of(message).checksum().to_be_bytes();
    message[field::CHECKSUM] = high;
    message[field::CHECKSUM + 1] = low;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(code: u8, group: [u8; 4], more: &[u8]) -> Vec<u8> {
        [&[QUERY, code, 0, 0], &group[..], more].concat()
    }

    #[test]
    fn three_query_versions_are_parsed() {
        let read = |message: &[u8]| match Igmp::parse(message) {
            Ok(Igmp::Query { group, within, version, robustness }) => {
                (group.is_some(), within.as_millis(), version, robustness)
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(read(&query(0, [0; 4], &[])), (false, 10_000, 1, 0));
        assert_eq!(read(&query(10, [239, 1, 2, 3], &[])), (true, 1000, 2, 0));
        assert_eq!(read(&query(100, [0; 4], &[2, 125, 0, 0])), (false, 10_000, 3, 2));
        // RFC 3376, 4.1.1: 1, an exponent of 3 bits, and 4 bits of mantissa.
        assert_eq!(read(&query(0x92, [0; 4], &[0; 4])).1, u128::from(0x12u32 << 4) * 100);
        assert!(Igmp::parse(&query(1, [10, 0, 0, 1], &[])).is_err(), "no group");
        for len in 0..LEN {
            assert!(Igmp::parse(&query(1, [0; 4], &[])[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn report_records_fit_buffer() {
        let groups = [[239, 0, 0, 1], [239, 0, 0, 2]].map(Ipv4Addr::from);
        let records = groups.map(|group| (Record::ToExclude, group));
        let mut bytes = [0xee; 20];
        assert_eq!(write_report(&mut bytes, &records), (16, 1));
        assert_eq!(bytes[4..16], [0, 0, 0, 1, 4, 0, 0, 0, 239, 0, 0, 1]);
        assert!(Sum::of(&bytes[..16]).is_valid());
        assert_eq!(write_report(&mut [0; 4], &records), (0, 0));
    }

    #[test]
    fn v1_and_v2_reports_round_trip() {
        let group = Ipv4Addr::new(239, 1, 2, 3);
        for kind in [REPORT_V1, REPORT_V2] {
            let mut bytes = [0; 8];
            assert_eq!(write_plain(&mut bytes, kind, group), 8);
            assert_eq!(Igmp::parse(&bytes), Ok(Igmp::Report { group }));
            assert!(Sum::of(&bytes).is_valid());
        }
    }
}
