//! One-time advice about settings of a host, its network or its peers that cannot work.

use std::path::Path;
use std::time::{Duration, Instant};

use offcore_flow::report::{Report, Reporter};
use offcore_flow::switch::HostIface;
use offcore_port::inventory::{Interface, interfaces};
use offcore_port::spec::PortSpec;
use offcore_port::stats::PortNames;

use crate::output::say;

/// Interval between two checks of the counters.
const EVERY: Duration = Duration::from_secs(1);

/// Time within which a network usually assigns addresses.
pub(super) const ADDRESS_TIMEOUT: Duration = Duration::from_secs(5);

/// Warns about addresses of a host that the kernel also has.
pub(super) fn warn_kernel_addresses(ports: &[PortSpec], ifaces: &[HostIface], names: &PortNames) {
    for text in shared_addresses(ports, ifaces, names, || interfaces(Path::new("/sys")).unwrap_or_default()) {
        say(&text);
    }
}

fn shared_addresses(
    ports: &[PortSpec],
    ifaces: &[HostIface],
    names: &PortNames,
    list: impl Fn() -> Vec<Interface>,
) -> Vec<String> {
    let mut warnings = Vec::new();
    for (number, (port, iface)) in ports.iter().zip(ifaces).enumerate() {
        if !matches!(port.bare(), PortSpec::AfPacket(_) | PortSpec::Tap(_)) || iface.addresses.is_empty() {
            continue;
        }
        for Interface { name, addresses, .. } in list() {
            for (address, own) in addresses.iter().filter_map(|text| Some((text.split_once('/')?.0, text))) {
                if iface.addresses.iter().any(|prefix| prefix.address.to_string() == address) {
                    warnings.push(format!(
                        "warning: {} {port}: addr={address} is also the kernel's, which takes packets to it and resets \
                         connections of this host: choose another address, or run `ip addr del {own} dev {name}`",
                        names.of(number)
                    ));
                }
            }
        }
    }
    warnings
}

/// Returns advice about interfaces to which the network has assigned no address.
pub(super) fn missing_addresses(ports: &[PortSpec], ifaces: &[HostIface], report: &Report) -> Vec<String> {
    let mut advice = Vec::new();
    for ((port, iface), found) in ports.iter().zip(ifaces).zip(&report.interfaces) {
        for (wanted, origin, what) in [
            (iface.dhcp, "dhcp", "addr=dhcp: no DHCP server has assigned an address"),
            (iface.slaac, "slaac", "addr=slaac: no router has advertised a prefix for addresses"),
        ] {
            if wanted && !found.addresses.iter().any(|address| address.origin == origin) {
                advice.push(format!(
                    "{} {port}: {what} within {} s; the host continues to ask",
                    found.port,
                    ADDRESS_TIMEOUT.as_secs()
                ));
            }
        }
    }
    advice
}

/// Checks the counters of a host until advice was given.
pub(super) struct Advice {
    /// `None` when no further checks are necessary.
    reporter: Option<Reporter>,
    due: Instant,
}

impl Advice {
    pub(super) fn new(reporter: Reporter) -> Self {
        Self { reporter: Some(reporter), due: Instant::now() }
    }

    /// Gives advice if a check is due `now`.
    pub(super) fn look(&mut self, now: Instant) -> anyhow::Result<()> {
        if now >= self.due {
            self.due = now + EVERY;
            self.tell()?;
        }
        Ok(())
    }

    /// Checks and gives advice, whenever the last check was.
    pub(super) fn tell(&mut self) -> anyhow::Result<()> {
        let Some(reporter) = &mut self.reporter else { return Ok(()) };
        let report = reporter.report("advice")?;
        let text = advice(&report);
        if let Some(text) = &text {
            say(text);
        }
        // A switch has no host and never gets one.
        if text.is_some() || report.tcp.is_empty() {
            self.reporter = None;
        }
        Ok(())
    }
}

/// Returns advice about packets without computed checksums. In this case pings are answered, but TCP does not work.
fn advice(report: &Report) -> Option<String> {
    let drops = report.tcp.iter().flat_map(|host| &host.drops);
    let open: u64 = drops.filter(|(reason, _)| reason == "open_checksum").map(|(_, count)| count).sum();
    (open > 0).then(|| {
        format!(
            "warning: packets without a computed checksum are dropped, {open} so far, because the sender left the \
             checksum to its interface: run `ethtool -K INTERFACE tx off` there, for instance at the other end of a \
             veth pair"
        )
    })
}

#[cfg(test)]
mod tests {
    use offcore_config::iface::HostPort;
    use offcore_flow::report::{AddressReport, IfaceReport, TcpReport};

    use super::*;

    fn host(texts: &[&str]) -> (Vec<PortSpec>, Vec<HostIface>) {
        texts.iter().map(|text| text.parse::<HostPort>().unwrap()).map(|port| (port.spec, port.iface)).unzip()
    }

    #[test]
    fn kernel_addresses_are_reported() {
        // The loopback interface has this address in every network namespace.
        let (ports, mut ifaces) = host(&[
            "af_packet:lo,addr=10.0.0.2/24",
            "impair:loss=1%,tap:t,addr=10.0.0.3/24",
            "vhost:/s,addr=10.0.0.4/24",
        ]);
        let list = || {
            let mut all = interfaces(Path::new("/sys")).unwrap();
            all.retain(|interface| interface.name == "lo");
            all[0].addresses = ["2", "3", "4", "5"].map(|host| format!("10.0.0.{host}/24")).into();
            all
        };
        let warnings = shared_addresses(&ports, &ifaces, &PortNames::default(), list);
        let expected = [(0, "af_packet:lo", 2), (1, "impair:loss=1%,tap:t", 3)];
        assert_eq!(warnings.len(), expected.len(), "{warnings:?}");
        for (text, (number, port, host)) in warnings.iter().zip(expected) {
            let begin = format!("warning: port{number} {port}: addr=10.0.0.{host} is also the kernel's");
            assert!(text.starts_with(&begin), "{text}");
            assert!(text.ends_with(&format!("or run `ip addr del 10.0.0.{host}/24 dev lo`")), "{text}");
        }
        ifaces.iter_mut().for_each(|iface| iface.addresses.clear());
        assert!(shared_addresses(&ports, &ifaces, &PortNames::default(), list).is_empty());
    }

    #[test]
    fn missing_addresses_are_reported() {
        let (ports, ifaces) = host(&["tap:a,addr=dhcp,addr=slaac", "tap:b,addr=10.0.0.2/24"]);
        let found = |origins: &[&'static str]| IfaceReport {
            port: "port0".into(),
            mtu: 1500,
            addresses: origins
                .iter()
                .map(|origin| AddressReport {
                    address: "10.0.0.9/24".into(),
                    origin,
                    state: "preferred",
                    preferred_seconds: None,
                    valid_seconds: None,
                })
                .collect(),
            gateways: Vec::new(),
            name_servers: Vec::new(),
            dhcp_server: None,
        };
        let told = |origins: &[&'static str]| {
            let report = Report { interfaces: vec![found(origins), found(&["static"])], ..Report::default() };
            missing_addresses(&ports, &ifaces, &report)
        };
        assert!(told(&["dhcp", "slaac"]).is_empty());
        let text = told(&["link-local", "dhcp"]);
        assert_eq!(text.len(), 1);
        assert!(text[0].starts_with("port0 tap:a: addr=slaac: no router"), "{text:?}");
        let text = told(&[]);
        assert!(
            text.len() == 2 && text[0].contains("no DHCP server has assigned an address within 5 s"),
            "{text:?}"
        );
    }

    #[test]
    fn partial_checksum_drops_name_their_cause() {
        let host = |reason: &str| TcpReport { drops: vec![(reason.into(), 12)], ..TcpReport::default() };
        let told = |hosts: Vec<TcpReport>| advice(&Report { tcp: hosts, ..Report::default() });
        assert_eq!(told(vec![host("checksum")]), None);
        let text = told(vec![host("checksum"), host("open_checksum")]).unwrap();
        assert!(text.contains(", 12 so far,") && text.contains("ethtool -K INTERFACE tx off"), "{text}");
    }
}
