//! Static addresses and locked ports, like `bridge fdb add … static` and `bridge link set … locked on` of the Linux
//! bridge. A static address belongs to its port in every VLAN.

use std::fmt;
use std::str::FromStr;

use offcore_wire::MacAddr;

/// A rule for a port: `PORT=MAC,MAC…[,locked]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StationRule {
    pub port: usize,
    /// Addresses that belong to this port only.
    pub addresses: Vec<MacAddr>,
    /// Whether packets from other addresses are dropped.
    pub locked: bool,
}

impl FromStr for StationRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected PORT=MAC,MAC,...[,locked], such as 0=52:54:00:00:00:02,locked";
        let (port, rule) = text.split_once('=').ok_or_else(|| format!("no '=': {expected}"))?;
        let port = port.parse().map_err(|_| format!("'{port}' is no port number: {expected}"))?;
        let mut parsed = Self { port, addresses: Vec::new(), locked: false };
        for part in rule.split(',') {
            if part == "locked" {
                if std::mem::replace(&mut parsed.locked, true) {
                    return Err("locked is given twice: expected it once".into());
                }
                continue;
            }
            let address: MacAddr = part.parse().map_err(|error| format!("{error}: {expected}"))?;
            if !address.is_unicast() {
                return Err(format!("{address} is no station's address: expected a unicast one"));
            }
            if parsed.addresses.contains(&address) {
                return Err(format!("{address} is given twice: expected it once"));
            }
            parsed.addresses.push(address);
        }
        Ok(parsed)
    }
}

impl fmt::Display for StationRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.addresses.iter().map(MacAddr::to_string).chain(self.locked.then(|| "locked".into()));
        write!(f, "{}={}", self.port, parts.collect::<Vec<_>>().join(","))
    }
}

/// The rules of all ports. They never change, so workers share them.
#[derive(Debug)]
pub struct Stations {
    /// Addresses and their ports, sorted by address.
    ports: Box<[(MacAddr, usize)]>,
    /// Ports that are locked, a bit each.
    locked: u64,
}

impl Stations {
    /// Creates the table from rules. Ports are below 64, and no address belongs to two ports.
    pub fn new(rules: &[StationRule]) -> Self {
        let each = |rule: &StationRule| {
            let port = rule.port;
            rule.addresses.clone().into_iter().map(move |address| (address, port))
        };
        let mut ports: Vec<_> = rules.iter().flat_map(each).collect();
        ports.sort_unstable();
        let locked = rules.iter().filter(|rule| rule.locked);
        Self { ports: ports.into(), locked: locked.fold(0, |locked, rule| locked | 1 << rule.port) }
    }

    /// Whether any rule exists.
    #[inline(always)]
    pub fn any(&self) -> bool {
        !self.ports.is_empty() || self.locked != 0
    }

    /// Returns the port to which the address belongs.
    pub fn find(&self, address: MacAddr) -> Option<usize> {
        let at = self.ports.binary_search_by_key(&address, |&(address, _)| address).ok()?;
        Some(self.ports[at].1)
    }

    /// Whether packets from an address that belongs to port `known` are accepted from `port`.
    pub fn admit(&self, port: usize, known: Option<usize>) -> bool {
        known.map_or(self.locked & 1 << port == 0, |known| known == port)
    }
}
