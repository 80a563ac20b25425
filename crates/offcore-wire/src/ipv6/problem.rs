//! Detection of unknown headers and options, for a Parameter Problem message (RFC 4443, 3.4; RFC 8200, 4).

use super::{HEADER_LEN, Ipv6Packet, MAX_EXTENSIONS, field};
use crate::ip::IpProtocol;

/// Codes of a Parameter Problem message.
const ERRONEOUS_FIELD: u8 = 0;
const UNKNOWN_NEXT_HEADER: u8 = 1;
const UNKNOWN_OPTION: u8 = 2;

/// An unknown header or option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Code of the message.
    pub code: u8,
    /// Offset in the packet, in bytes.
    pub pointer: u32,
    /// Whether the error is sent even for a packet to a multicast group.
    pub of_groups: bool,
}

impl Ipv6Packet<'_> {
    /// Returns the first header or option that is unknown to a host with TCP, UDP and ICMPv6. Returns `None` if all are
    /// known, if the option type forbids an error, or if the headers are incomplete.
    #[cold]
    pub fn problem(&self) -> Option<Problem> {
        let mut protocol = self.next_header();
        // Offsets of the header in the payload, and of the Next Header field that identifies it.
        let (mut at, mut named) = (0, field::NEXT_HEADER);
        for number in 0..=MAX_EXTENSIONS + 1 {
            let header = self.payload.get(at..)?;
            match protocol {
                IpProtocol::TCP | IpProtocol::UDP | IpProtocol::ICMPV6 | IpProtocol::NO_NEXT_HEADER => {
                    return None;
                }
                IpProtocol::HOP_BY_HOP if number == 0 => {}
                IpProtocol::DESTINATION_OPTIONS | IpProtocol::ROUTING => {}
                IpProtocol::FRAGMENT => {
                    // For a fragment, only the reassembled packet is checked.
                    if (u16::from_be_bytes([*header.get(2)?, *header.get(3)?]) & !6) != 0 {
                        return None;
                    }
                }
                _ => return Some(problem(UNKNOWN_NEXT_HEADER, named)),
            }
            let &[next, units, _, segments_left, ..] = header else { return None };
            let len = if protocol == IpProtocol::FRAGMENT { 8 } else { 8 + usize::from(units) * 8 };
            let header = header.get(..len)?;
            match protocol {
                IpProtocol::ROUTING if segments_left > 0 => {
                    return Some(problem(ERRONEOUS_FIELD, HEADER_LEN + at + 2));
                }
                IpProtocol::HOP_BY_HOP | IpProtocol::DESTINATION_OPTIONS => {
                    match unknown_option(header.get(2..)?) {
                        None => {}
                        // The option type requests a silent drop (RFC 8200, 4.2).
                        Some((_, 0x40..=0x7f)) => return None,
                        Some((option, kind)) => {
                            let found = problem(UNKNOWN_OPTION, HEADER_LEN + at + 2 + option);
                            return Some(Problem { of_groups: kind < 0xc0, ..found });
                        }
                    }
                }
                _ => {}
            }
            (protocol, named) = (IpProtocol(next), HEADER_LEN + at);
            at += len;
        }
        None
    }
}

#[allow(clippy::cast_possible_truncation, reason = "an offset in a packet")]
fn problem(code: u8, pointer: usize) -> Problem {
    Problem { code, pointer: pointer as u32, of_groups: false }
}

/// Returns the offset and type of the first option that a host must not skip.
fn unknown_option(options: &[u8]) -> Option<(usize, u8)> {
    const PAD1: u8 = 0;
    let mut at = 0;
    loop {
        at += match *options.get(at..)? {
            [PAD1, ..] => 1,
            [kind @ 0x40..=0xff, ..] => return Some((at, kind)),
            [_, len, ..] => 2 + usize::from(len),
            _ => return None,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ipv6::Ipv6Header;

    /// Returns the problem of a packet whose payload begins with header number `first`.
    fn problem_of(first: u8, payload: &[u8]) -> Option<(u8, u32, bool)> {
        let header = Ipv6Header {
            src: "fe80::1".parse().unwrap(),
            dst: "fe80::2".parse().unwrap(),
            next_header: IpProtocol(first),
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            payload_len: payload.len().try_into().unwrap(),
        };
        let mut bytes = [0; 40];
        header.write(&mut bytes);
        let packet = [&bytes[..], payload].concat();
        let found = Ipv6Packet::new_checked(&packet).unwrap().problem();
        found.map(|problem| (problem.code, problem.pointer, problem.of_groups))
    }

    #[test]
    fn unknown_next_headers_are_found() {
        assert_eq!(problem_of(89, &[0; 8]), Some((1, 6, false)));
        assert_eq!(problem_of(60, &[89, 0, 1, 4, 0, 0, 0, 0, 1]), Some((1, 40, false)));
        // Hop-by-hop options may only be the first header.
        assert_eq!(problem_of(60, &[0, 0, 1, 4, 0, 0, 0, 0, 6, 0, 1, 4, 0, 0, 0, 0]), Some((1, 40, false)));
        for known in [6, 17, 58, 59] {
            assert_eq!(problem_of(known, &[0; 8]), None);
            assert_eq!(problem_of(0, &[known, 0, 1, 4, 0, 0, 0, 0]), None);
        }
    }

    #[test]
    fn option_types_select_the_error() {
        let option = |kind| problem_of(60, &[6, 0, 0, kind, 1, 0, 0, 0, 0]);
        assert_eq!(option(0x05), None);
        assert_eq!(option(0x45), None);
        assert_eq!(option(0x85), Some((2, 43, true)));
        assert_eq!(option(0xc5), Some((2, 43, false)));
        let second = [&[60, 1, 1, 12][..], &[0; 12], &[6, 0, 0x9e, 4, 0, 0, 0, 0]].concat();
        assert_eq!(problem_of(0, &second), Some((2, 58, true)));
    }

    #[test]
    fn routing_header_is_found() {
        assert_eq!(problem_of(43, &[6, 0, 0, 1, 0, 0, 0, 0]), Some((0, 42, false)));
        assert_eq!(problem_of(43, &[6, 0, 0, 0, 0, 0, 0, 0]), None);
    }

    #[test]
    fn fragment_causes_no_problem() {
        assert_eq!(problem_of(44, &[89, 0, 0, 1, 0, 0, 0, 0, 1, 2]), None);
        assert_eq!(problem_of(44, &[89, 0, 0, 0, 0, 0, 0, 0, 1, 2]), Some((1, 40, false)));
    }

    #[test]
    fn truncated_headers_cause_no_problem() {
        let chain = [60, 0, 1, 4, 0, 0, 0, 0, 43, 0, 1, 4, 0, 0, 0, 0, 6, 0, 0, 1, 0, 0, 0, 0];
        assert_eq!(problem_of(0, &chain), Some((0, 58, false)));
        for len in 0..chain.len() {
            assert_eq!(problem_of(0, &chain[..len]), None, "{len} bytes");
        }
    }
}
