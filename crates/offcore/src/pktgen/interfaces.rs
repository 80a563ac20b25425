//! The kernel's counters of the interfaces behind ports, compared with the ports' own.

use offcore_flow::pktgen::Running;
use offcore_flow::pktgen::report::PortCounts;
use offcore_port::Port;
use offcore_port::netdev::{NetDev, NetDevCounters};
use offcore_port::spec::PortSpec;
use serde::Serialize;

/// The interface behind a port.
#[derive(Debug)]
struct Interface {
    port: usize,
    netdev: NetDev,
    /// Whether the kernel receives the packets that the port sends, and vice versa.
    mirrored: bool,
    before: NetDevCounters,
}

/// The interfaces of all ports that have one.
#[derive(Debug)]
pub(super) struct Interfaces {
    interfaces: Vec<Interface>,
    /// The ports' counters at the time when the interfaces' counters were first read.
    ports: Vec<PortCounts>,
}

/// The counters of one port and its interface since the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Compared {
    pub port: usize,
    pub interface: String,
    /// Packets that the port sent.
    pub sent: u64,
    /// Packets that the interface received from it.
    pub interface_sent: u64,
    /// The difference between the two.
    pub sent_difference: i64,
    /// Packets that the port received.
    pub received: u64,
    /// Packets that the interface had for it.
    pub interface_received: u64,
    /// The difference between the two.
    pub received_difference: i64,
    /// Packets that the kernel dropped at the interface in either direction.
    pub interface_dropped: u64,
}

impl Interfaces {
    /// Opens the interfaces and reads their counters. Interfaces that cannot be read are left out.
    pub(super) fn open(specs: &[PortSpec], ports: &[Box<dyn Port>]) -> Self {
        let mut interfaces = Vec::new();
        for (port, spec) in specs.iter().enumerate().take(ports.len()) {
            let (name, mirrored) = match spec.bare() {
                PortSpec::AfPacket(spec) => (&spec.name, false),
                PortSpec::AfXdp(spec) => (&spec.name, false),
                PortSpec::Tap(spec) => (&spec.name, true),
                _ => continue,
            };
            if let Ok(netdev) = NetDev::open(name)
                && let Ok(before) = netdev.counters()
            {
                interfaces.push(Interface { port, netdev, mirrored, before });
            }
        }
        Self { interfaces, ports: Vec::new() }
    }

    /// Returns the speed of the first interface's link in bit/s, if it is known.
    pub(super) fn speed(&self) -> Option<f64> {
        let first = self.interfaces.first().filter(|first| !first.mirrored)?;
        Some(f64::from(first.netdev.speed()?) * 1e6)
    }

    /// Starts the comparison.
    pub(super) fn begin(&mut self, running: &Running) {
        self.ports = running.port_counts();
        self.interfaces.retain_mut(|interface| {
            let counters = interface.netdev.counters();
            counters.map(|now| interface.before = now).is_ok()
        });
    }

    /// Returns the counters of ports and interfaces. Interfaces that no longer exist are left out.
    pub(super) fn compare(&self, running: &Running) -> Vec<Compared> {
        let ports = running.port_counts();
        let compared = self.interfaces.iter().filter_map(|interface| {
            let (now, before) = (interface.netdev.counters().ok()?, &interface.before);
            let passed = |now: u64, before: u64| now.wrapping_sub(before);
            let out = passed(now.tx_packets, before.tx_packets);
            let into = passed(now.rx_packets, before.rx_packets);
            let (interface_sent, interface_received) =
                if interface.mirrored { (into, out) } else { (out, into) };
            let before = self.ports.get(interface.port).copied().unwrap_or_default();
            let counts = ports.get(interface.port)?;
            let sent = counts.tx_packets - before.tx_packets;
            let received = counts.rx_packets - before.rx_packets;
            let dropped = |counters: &NetDevCounters| counters.rx_dropped.wrapping_add(counters.tx_dropped);
            Some(Compared {
                port: interface.port,
                interface: interface.netdev.name().into(),
                sent,
                interface_sent,
                sent_difference: interface_sent.wrapping_sub(sent).cast_signed(),
                received,
                interface_received,
                received_difference: interface_received.wrapping_sub(received).cast_signed(),
                interface_dropped: dropped(&now).wrapping_sub(dropped(&interface.before)),
            })
        });
        compared.collect()
    }
}

impl Compared {
    /// Describes a difference. Returns `None` if the counters agree.
    pub(super) fn difference(&self) -> Option<String> {
        let Self { port, interface, .. } = self;
        let part = |what: &str, ours: u64, theirs: u64, difference: i64| {
            (difference != 0).then(|| format!("{what} {ours}, {interface} counted {theirs} ({difference:+})"))
        };
        let parts: Vec<_> = [
            part("sent", self.sent, self.interface_sent, self.sent_difference),
            part("received", self.received, self.interface_received, self.received_difference),
            (self.interface_dropped > 0).then(|| format!("dropped by the kernel {}", self.interface_dropped)),
        ]
        .into_iter()
        .flatten()
        .collect();
        (!parts.is_empty()).then(|| format!("counters differ: port{port} {}", parts.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_interface_differences_are_printed() {
        let same = Compared {
            port: 1,
            interface: "eth0".into(),
            sent: 5,
            interface_sent: 5,
            sent_difference: 0,
            received: 7,
            interface_received: 7,
            received_difference: 0,
            interface_dropped: 0,
        };
        assert_eq!(same.difference(), None);
        let other = Compared { interface_received: 9, received_difference: 2, interface_dropped: 3, ..same };
        let text = other.difference().unwrap();
        assert_eq!(text, "counters differ: port1 received 7, eth0 counted 9 (+2); dropped by the kernel 3");
    }
}
