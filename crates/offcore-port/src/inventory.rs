//! The devices that can be used as ports: network interfaces of the kernel, and PCI network and DMA devices with any
//! driver.

mod links;
mod pci;

use std::collections::HashMap;
use std::io;
use std::path::Path;

use offcore_stats::named;
use offcore_wire::ethernet::MacAddr;

use crate::netdev::{Channels, Link, NetDev};

pub use pci::{PciDevice, PciKind, devices};

named! {
    /// XDP support of an interface's driver.
    pub enum Xdp {
        /// Unknown, because the kernel is older than 6.3.
        Unknown = "unknown",
        /// The driver has no support: the kernel runs programs behind the driver, and packets are copied.
        Generic = "generic",
        /// The driver runs programs, and packets are copied.
        Native = "native",
        /// The driver runs programs, and receives directly into the sockets' memory.
        ZeroCopy = "zero-copy",
    }
}

/// A network interface.
#[derive(Clone, Debug)]
pub struct Interface {
    pub name: String,
    pub driver: Option<String>,
    /// Bus address of its device, if it has one.
    pub bus: Option<String>,
    /// The NUMA node of its device, if any.
    pub numa_node: Option<u32>,
    /// Longest payload of a frame in bytes.
    pub mtu: usize,
    pub mac: MacAddr,
    /// Whether its frames are Ethernet frames.
    pub is_ethernet: bool,
    pub link: Link,
    /// Speed in Mbit/s, if known.
    pub speed: Option<u32>,
    /// Queues in use, if known.
    pub channels: Option<Channels>,
    /// IP addresses with their prefix lengths.
    pub addresses: Vec<String>,
    /// Its uses by the kernel's network stack: see [`uses`].
    pub uses: Vec<String>,
    /// XDP support of its driver.
    pub xdp: Xdp,
    /// Id of the attached XDP program.
    pub program: Option<u32>,
}

impl Interface {
    /// Returns the ports as which the interface can be opened without taking it away from other users.
    pub fn ports(&self) -> Vec<String> {
        let mut kinds = Vec::new();
        if self.is_ethernet && self.uses.is_empty() {
            kinds.push("af_xdp");
        }
        if self.is_ethernet {
            kinds.push("af_packet");
        }
        if self.driver.as_deref() == Some("tun") && self.is_ethernet {
            kinds.push("tap");
        }
        kinds.iter().map(|kind| format!("{kind}:{}", self.name)).collect()
    }

    /// Returns the obstacles to using the interface, and what to do about them.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let Self { name, .. } = self;
        if !self.is_ethernet {
            notes.push("carries no Ethernet frames".into());
        }
        match self.link {
            Link::Down => notes.push(format!("is down: ip link set {name} up")),
            Link::NoCarrier => notes.push("has no carrier".into()),
            Link::Up | Link::Gone => {}
        }
        if let Some(program) = self.program {
            notes.push(format!(
                "has XDP program {program}: unless it is ours, end the process that holds it, or ip link set {name} xdp off"
            ));
        }
        if self.is_ethernet && !self.uses.is_empty() {
            notes.push(format!(
                "is in use ({}): af_packet shares it with the kernel's stack, af_xdp:{name},force takes it away",
                self.uses.join(", ")
            ));
        }
        notes
    }
}

/// Uses of interfaces by the kernel's network stack.
#[derive(Debug)]
struct Uses {
    links: Vec<links::Listed>,
    addresses: HashMap<u32, Vec<String>>,
    routes: HashMap<u32, bool>,
}

impl Uses {
    fn look() -> io::Result<Self> {
        Ok(Self { links: links::list()?, addresses: links::addresses()?, routes: links::routes()? })
    }

    fn addresses(&self, index: u32) -> &[String] {
        self.addresses.get(&index).map_or(&[], Vec::as_slice)
    }

    fn of(&self, index: u32) -> Vec<String> {
        // Every interface has a link-local address. It does not count as a use.
        let own = self.addresses(index).iter().filter(|address| !address.starts_with("fe80:"));
        let mut uses: Vec<_> = own.map(|address| format!("address {address}")).collect();
        match self.routes.get(&index) {
            Some(true) => uses.push("the default route".into()),
            Some(false) if uses.is_empty() => uses.push("a route".into()),
            _ => {}
        }
        let of = |index| self.links.iter().find(|link| link.index == index);
        if let Some(master) = of(index).and_then(|link| link.master) {
            let name = of(master).map_or_else(|| format!("interface {master}"), |link| link.name.clone());
            uses.push(format!("a part of {name}"));
        }
        let uppers = self.links.iter().filter(|link| link.lower == Some(index) && link.index != index);
        uses.extend(uppers.map(|link| format!("{} on it", link.name)));
        uses
    }
}

/// Returns the uses of interface `index` in the calling thread's network namespace by the kernel's network stack:
/// addresses, routes, a bridge or bond that it is a member of, and VLANs and other interfaces on top of it. If the list
/// is empty, the interface is not in use.
///
/// # Errors
/// The kernel's error.
pub fn uses(index: u32) -> io::Result<Vec<String>> {
    Ok(Uses::look()?.of(index))
}

/// Returns the interfaces in the calling thread's network namespace, in the order of their indices. NUMA nodes are
/// looked up in `sysfs`, which is /sys or a tree like it.
///
/// # Errors
/// The kernel's error.
pub fn interfaces(sysfs: &Path) -> io::Result<Vec<Interface>> {
    let uses = Uses::look()?;
    let mut features = links::xdp_features();
    let mut all = Vec::new();
    for links::Listed { index, name, program, .. } in &uses.links {
        // An interface that was deleted meanwhile is skipped.
        let Ok(netdev) = NetDev::open(name) else { continue };
        let (Ok(mtu), Ok(mac), Ok(is_ethernet)) = (netdev.mtu(), netdev.mac(), netdev.is_ethernet()) else {
            continue;
        };
        let bus = netdev.bus();
        all.push(Interface {
            driver: netdev.driver(),
            numa_node: bus.as_ref().and_then(|bus| pci::numa_node(&sysfs.join("bus/pci/devices").join(bus))),
            bus,
            mtu,
            mac,
            is_ethernet,
            link: netdev.link(),
            speed: netdev.speed(),
            channels: netdev.channels(),
            addresses: uses.addresses(*index).to_vec(), // copy-ok: names
            uses: uses.of(*index),
            xdp: features.as_mut().map_or(Xdp::Unknown, |features| features(*index)),
            program: *program,
            name: name.clone(),
        });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_listed() {
        let all = interfaces(Path::new("/nonexistent")).unwrap();
        let lo = all.iter().find(|interface| interface.name == "lo").unwrap();
        assert_eq!((lo.mac, lo.numa_node, lo.program), (MacAddr([0; 6]), None, None));
        if lo.link != Link::Down {
            assert_eq!(lo.ports(), ["af_packet:lo"]);
            assert!(lo.uses.contains(&"address 127.0.0.1/8".to_owned()), "{:?}", lo.uses);
            assert!(lo.addresses.contains(&"127.0.0.1/8".to_owned()), "{:?}", lo.addresses);
        }
    }

    #[test]
    fn obstacles_name_their_remedy() {
        let interface = Interface {
            name: "eth0".into(),
            driver: None,
            bus: None,
            numa_node: None,
            mtu: 1500,
            mac: MacAddr([2; 6]),
            is_ethernet: true,
            link: Link::Down,
            speed: None,
            channels: None,
            addresses: vec![],
            uses: vec![],
            xdp: Xdp::Native,
            program: Some(7),
        };
        let notes = interface.notes();
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].contains("ip link set eth0 up") && notes[1].contains("XDP program 7"), "{notes:?}");
        let used = Interface { uses: vec!["the default route".into()], link: Link::Up, ..interface.clone() };
        assert_eq!(used.ports(), ["af_packet:eth0"]);
        assert!(used.notes()[1].contains("in use (the default route)"), "{:?}", used.notes());
        let tunnel = Interface { is_ethernet: false, link: Link::Up, program: None, ..interface };
        assert_eq!((tunnel.ports().len(), tunnel.notes().len()), (0, 1));
    }
}
