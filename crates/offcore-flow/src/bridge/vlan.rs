//! VLAN membership of ports, and where packets are tagged (IEEE 802.1Q).
//!
//! VLAN 0 contains packets without a tag, or with a priority tag only, from ports without a rule. Tags are 802.1Q tags
//! (EtherType 0x8100). A provider tag (0x88a8) in front of them is payload, as for any customer bridge.

use std::fmt;
use std::str::FromStr;

use super::fdb::MAX_PORTS;

/// Number of VLAN identifiers. 0 means no VLAN, the last one is reserved.
pub const VLANS: usize = 4096;
const RESERVED: u16 = 4095;

/// A rule for a port: `PORT=access:VLAN` or `PORT=trunk:VLAN,VLAN-VLAN,…[,native=VLAN]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VlanRule {
    pub port: usize,
    /// VLAN membership of the port.
    pub vlans: PortVlans,
}

/// VLAN membership of a port. A port without a rule is in every VLAN, and its packets keep their tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortVlans {
    /// The port is in one VLAN. It sends packets without a tag, and does not accept packets with a VLAN tag.
    Access(u16),
    /// The port sends and accepts tagged packets in these VLANs.
    Trunk {
        /// First and last identifier of each range.
        tagged: Vec<(u16, u16)>,
        /// The VLAN of packets without a tag. Its packets are sent without a tag.
        native: Option<u16>,
    },
}

impl FromStr for VlanRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected =
            "expected PORT=access:VLAN or PORT=trunk:VLAN,FIRST-LAST,...[,native=VLAN], such as 0=access:10";
        let (port, rule) = text.split_once('=').ok_or_else(|| format!("no '=': {expected}"))?;
        let port = port.parse().map_err(|_| format!("'{port}' is no port number: {expected}"))?;
        let vlans = match rule.split_once(':') {
            Some(("access", id)) => PortVlans::Access(vlan(id)?),
            Some(("trunk", list)) => trunk(list)?,
            _ => return Err(format!("'{rule}': {expected}")),
        };
        Ok(Self { port, vlans })
    }
}

fn trunk(list: &str) -> Result<PortVlans, String> {
    let (mut tagged, mut native) = (Vec::new(), None);
    for part in list.split(',') {
        if let Some(id) = part.strip_prefix("native=") {
            if native.replace(vlan(id)?).is_some() {
                return Err("native= is given twice: expected it once".into());
            }
            continue;
        }
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (vlan(first)?, vlan(last)?);
        if first > last {
            return Err(format!("VLANs {part}: expected the smaller first"));
        }
        tagged.push((first, last));
    }
    Ok(PortVlans::Trunk { tagged, native })
}

fn vlan(text: &str) -> Result<u16, String> {
    let id = text.parse().ok().filter(|id| (1..RESERVED).contains(id));
    id.ok_or_else(|| format!("VLAN '{text}': expected a number from 1 to 4094"))
}

impl fmt::Display for VlanRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.vlans {
            PortVlans::Access(id) => write!(f, "{}=access:{id}", self.port),
            PortVlans::Trunk { tagged, native } => {
                write!(f, "{}=trunk:", self.port)?;
                let ranges = tagged.iter().map(|&(first, last)| match first == last {
                    true => first.to_string(),
                    false => format!("{first}-{last}"),
                });
                let native = native.map(|id| format!("native={id}"));
                f.write_str(&ranges.chain(native).collect::<Vec<_>>().join(","))
            }
        }
    }
}

/// The change of a packet's tag when the packet is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retag {
    /// The tag is kept.
    Keep,
    /// The tag is removed.
    Pop,
    /// A tag with this VLAN is added to a packet without a tag.
    Push(u16),
    /// The VLAN in the tag is replaced.
    Set(u16),
}

/// The VLANs of all ports. They never change, so workers share them.
#[derive(Debug)]
pub struct Vlans {
    /// Member ports of each VLAN, a bit each.
    members: Box<[u64]>,
    /// The VLAN of each port's packets without a tag. Its packets are sent without a tag.
    untagged: [Option<u16>; MAX_PORTS],
    /// Ports that accept tagged packets, a bit each.
    takes_tagged: u64,
    /// Whether any packet's tag may change.
    retags: bool,
}

impl Vlans {
    /// Creates the tables for `ports` ports, at most [`MAX_PORTS`]. Each port has at most one rule, and rules only name
    /// existing ports.
    pub fn new(ports: usize, rules: &[VlanRule]) -> Self {
        let all = u64::MAX >> (MAX_PORTS - ports);
        let mut vlans = Self {
            members: vec![all; VLANS].into(),
            untagged: [Some(0); MAX_PORTS],
            takes_tagged: all,
            retags: !rules.is_empty(),
        };
        vlans.members[usize::from(RESERVED)] = 0;
        for rule in rules {
            let bit = 1 << rule.port;
            vlans.members.iter_mut().for_each(|members| *members &= !bit);
            let untagged = match &rule.vlans {
                PortVlans::Access(id) => {
                    vlans.takes_tagged &= !bit;
                    Some(*id)
                }
                PortVlans::Trunk { tagged, native } => {
                    for id in tagged.iter().flat_map(|&(first, last)| first..=last) {
                        vlans.members[usize::from(id)] |= bit;
                    }
                    *native
                }
            };
            if let Some(id) = untagged {
                vlans.members[usize::from(id)] |= bit;
            }
            vlans.untagged[rule.port] = untagged;
        }
        vlans
    }

    /// Returns the VLAN of a packet received on `port` with this tag, or `None` if the port does not accept it.
    #[inline]
    pub fn of(&self, port: usize, tag: Option<u16>) -> Option<u16> {
        match tag {
            None | Some(0) => self.untagged[port],
            Some(id) => (self.takes_tagged & self.members(id) & 1 << port != 0).then_some(id),
        }
    }

    /// Returns the member ports of the VLAN, a bit each.
    #[inline]
    pub fn members(&self, vlan: u16) -> u64 {
        self.members[usize::from(vlan) % VLANS]
    }

    /// Whether any packet's tag may change.
    #[inline]
    pub fn retags(&self) -> bool {
        self.retags
    }

    /// Returns how the tag of a packet in `vlan` changes when the packet leaves through `port`.
    #[inline]
    pub fn retag(&self, port: usize, vlan: u16, tag: Option<u16>) -> Retag {
        match tag {
            // Only ports without a rule are in VLAN 0.
            _ if vlan == 0 => Retag::Keep,
            None if self.untagged[port] == Some(vlan) => Retag::Keep,
            Some(_) if self.untagged[port] == Some(vlan) => Retag::Pop,
            None => Retag::Push(vlan),
            Some(id) if id == vlan => Retag::Keep,
            Some(_) => Retag::Set(vlan),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vlans(ports: usize, rules: &[&str]) -> Vlans {
        let rules: Vec<VlanRule> = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        Vlans::new(ports, &rules)
    }

    #[test]
    fn vlan_rules_round_trip() {
        for text in ["0=access:10", "63=trunk:10,20-30", "1=trunk:5,native=1", "1=trunk:native=4094"] {
            assert_eq!(text.parse::<VlanRule>().unwrap().to_string(), text);
        }
        for (text, expected) in [
            ("access:10", "no '='"),
            ("x=access:10", "'x' is no port number"),
            ("0=hybrid:10", "PORT=access:VLAN"),
            ("0=access", "PORT=access:VLAN"),
            ("0=access:0", "1 to 4094"),
            ("0=access:4095", "1 to 4094"),
            ("0=trunk:", "VLAN ''"),
            ("0=trunk:30-20", "the smaller first"),
            ("0=trunk:5,native=1,native=2", "twice"),
        ] {
            let error = text.parse::<VlanRule>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn bridge_without_rules_keeps_tags() {
        let vlans = vlans(64, &[]);
        assert!(!vlans.retags());
        for (tag, vlan) in [(None, Some(0)), (Some(0), Some(0)), (Some(7), Some(7)), (Some(4095), None)] {
            assert_eq!(vlans.of(63, tag), vlan);
            if let Some(vlan) = vlan {
                assert_eq!(vlans.members(vlan), u64::MAX);
                assert_eq!(vlans.retag(0, vlan, tag), Retag::Keep);
            }
        }
        assert_eq!(vlans.members(4095), 0);
    }

    #[test]
    fn access_ports_and_trunks() {
        let vlans = vlans(4, &["0=access:10", "1=trunk:10,20-22", "2=trunk:20,native=10"]);
        assert!(vlans.retags());
        assert_eq!(
            [0, 10, 20, 22, 30].map(|vlan| vlans.members(vlan)),
            [0b1000, 0b1111, 0b1110, 0b1010, 0b1000]
        );
        // The VLAN of packets without a tag, with a priority tag, and with VLAN 10, 20 and 30 on each port.
        let taken = |port| [None, Some(0), Some(10), Some(20), Some(30)].map(|tag| vlans.of(port, tag));
        assert_eq!(taken(0), [Some(10), Some(10), None, None, None]);
        assert_eq!(taken(1), [None, None, Some(10), Some(20), None]);
        assert_eq!(taken(2), [Some(10), Some(10), Some(10), Some(20), None]);
        assert_eq!(taken(3), [Some(0), Some(0), Some(10), Some(20), Some(30)]);
        // How the tag changes when packets of VLAN 10 leave each port.
        let left = |tag| [0, 1, 2, 3].map(|port| vlans.retag(port, 10, tag));
        assert_eq!(left(None), [Retag::Keep, Retag::Push(10), Retag::Keep, Retag::Push(10)]);
        assert_eq!(left(Some(0)), [Retag::Pop, Retag::Set(10), Retag::Pop, Retag::Set(10)]);
        assert_eq!(left(Some(10)), [Retag::Pop, Retag::Keep, Retag::Pop, Retag::Keep]);
        assert_eq!(vlans.retag(3, 0, Some(0)), Retag::Keep);
    }
}
