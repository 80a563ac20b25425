//! The MTU of a host's interfaces: it follows the ports' interfaces up to the limit of `mtu=`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use offcore_port::Port;

use super::config::HostIface;
use crate::host::Mtu;

/// The default without `mtu=` and without an interface.
const USUAL: u16 = 1500;
/// The least MTU for IPv4: every host accepts such packets (RFC 791, 3.1).
const LEAST: u16 = 576;
/// The least MTU for IPv6 (RFC 8200, 5).
const LEAST_V6: u16 = 1280;

/// The MTU of one interface. The control thread updates it.
#[derive(Debug)]
pub(super) struct HostMtu {
    port: usize,
    given: Option<u16>,
    has_v6: bool,
    now: Mtu,
    /// The last known MTU of the port's interface.
    found: Option<usize>,
}

impl HostMtu {
    pub(super) fn new(port: usize, iface: &HostIface, of: &dyn Port) -> Self {
        let (given, found) = (iface.mtu, of.mtu());
        let has_v6 = iface.slaac || iface.addresses.iter().any(|prefix| prefix.address.is_ipv6());
        Self { port, given, has_v6, now: Arc::new(AtomicU16::new(choose(given, found))), found }
    }

    /// The value that the workers read.
    pub(super) fn shared(&self) -> Mtu {
        Arc::clone(&self.now)
    }

    /// A warning for the user.
    pub(super) fn warning(&self) -> Option<String> {
        let (port, found) = (self.port, self.found?);
        if let Some(given) = self.given
            && usize::from(given) > found
        {
            return Some(format!(
                "warning: port{port}: mtu={given} is above its interface's MTU of {found}: the host's MTU is {}",
                choose(self.given, self.found)
            ));
        }
        let least = if self.has_v6 { LEAST_V6 } else { LEAST };
        (found < least.into()).then(|| {
            format!("warning: port{port}: its interface's MTU is {found}, expected {least} or more: the interface drops longer packets")
        })
    }

    /// Follows a change of the interface's MTU.
    pub(super) fn tend(&mut self, ports: &[Box<dyn Port>]) {
        let found = ports.get(self.port).and_then(|port| port.mtu());
        // A missing interface has no MTU. It may return with the same one.
        if found.is_none() || found == self.found {
            return;
        }
        self.found = found;
        let mtu = choose(self.given, found);
        if self.now.swap(mtu, Ordering::Relaxed) != mtu {
            tracing::info!("port{}: the host's MTU is now {mtu}, the MTU of its interface", self.port);
        }
        if let Some(warning) = self.warning() {
            tracing::warn!("{}", warning.trim_start_matches("warning: "));
        }
    }
}

fn choose(given: Option<u16>, found: Option<usize>) -> u16 {
    let found = found.map(|found| u16::try_from(found).unwrap_or(u16::MAX));
    match (given, found) {
        (Some(given), Some(found)) => given.min(found),
        (given, found) => given.or(found).unwrap_or(USUAL),
    }
    .max(LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_limits_given_mtu() {
        for (given, found, expected) in [
            (None, None, 1500),
            (None, Some(1400), 1400),
            (None, Some(9000), 9000),
            (None, Some(65_536), 65_535),
            (Some(1500), Some(1400), 1400),
            (Some(1300), Some(1400), 1300),
            (Some(9000), None, 9000),
            (None, Some(68), 576),
        ] {
            assert_eq!(choose(given, found), expected, "{given:?} {found:?}");
        }
    }

    #[test]
    fn warnings_contain_both_mtus() {
        let of = |given, found, has_v6| {
            let now = Arc::new(AtomicU16::new(choose(given, found)));
            HostMtu { port: 2, given, has_v6, now, found }.warning()
        };
        let above = of(Some(1500), Some(1400), false).unwrap();
        assert!(above.contains("port2: mtu=1500 is above its interface's MTU of 1400"), "{above}");
        assert!(of(None, Some(1000), true).unwrap().contains("is 1000, expected 1280"));
        for (given, found) in [(Some(1400), Some(1500)), (None, Some(1400)), (Some(9000), None), (None, None)]
        {
            assert_eq!(of(given, found, true), None);
        }
    }
}
