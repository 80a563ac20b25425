//! Opens the ports that the command line describes.

use offcore_mem::{DeviceMemory, Pool};
use offcore_port::af_packet::AfPacketPort;
use offcore_port::af_xdp::AfXdpPort;
use offcore_port::generator::{GenCounters, GenPort};
use offcore_port::impair::ImpairPort;
use offcore_port::netdev::NetDev;
use offcore_port::pcap::PcapPort;
use offcore_port::spec::{AfPacketSpec, DpdkSpec, PortSpec, VhostSpec};
use offcore_port::stats::PortNames;
use offcore_port::tap::TapPort;
use offcore_port::vhost::VhostPort;
use offcore_port::virtio_user::VirtioUserPort;
use offcore_port::{Port, PortError, address, inventory};
use offcore_vhost::backend::BackendConfig;
use offcore_vhost::connection::{Role, SocketAccess};
use offcore_vhost::features;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::claims;
use super::report::PortLine;
use crate::output::say;

/// The counters of the generators among the ports, and the ports whose link state changes.
#[derive(Debug)]
pub(crate) struct Observed {
    generators: Vec<Option<GenCounters>>,
    links: Vec<bool>,
}

/// Opens the ports in order, if no two of them conflict. Packets are in `memory`, if it is given, and in the pool
/// otherwise.
///
/// # Errors
/// The first port that cannot be opened. The ports before it are closed again.
pub(crate) fn open(
    specs: &[PortSpec],
    pool: &'static Pool,
    memory: Option<&DeviceMemory>,
) -> Result<(Vec<Box<dyn Port>>, Observed), PortError> {
    claims::check(specs)?;
    raise_fd_limit();
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let mut needed = OTHERS;
    let mut ports = Vec::with_capacity(specs.len());
    let mut generators = Vec::with_capacity(specs.len());
    for spec in specs {
        needed += descriptors(spec);
        if needed > limit {
            let reason = format!(
                "the front ends of the ports up to this one may pass {needed} descriptors, and the limit of this \
                 process is {limit}: raise the limit (ulimit -Hn), or use fewer queues"
            );
            return Err(PortError::Other { port: spec.to_string(), reason });
        }
        let (port, generator) = open_one(spec, pool, memory)?;
        ports.push(port);
        generators.push(generator);
    }
    let link = |spec: &PortSpec| !matches!(spec, PortSpec::Gen(_) | PortSpec::Impair(_) | PortSpec::Pcap(_));
    Ok((ports, Observed { generators, links: specs.iter().map(link).collect() }))
}

/// Raises the limit of open files to the maximum.
pub(crate) fn raise_fd_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If this is refused, the limit stays unchanged.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Approximate number of descriptors for everything except front ends' virtqueues.
const OTHERS: u64 = 64;

/// Returns the number of descriptors that a front end may pass for a port: three for each virtqueue, and files of
/// memory while they are mapped.
fn descriptors(spec: &PortSpec) -> u64 {
    match spec {
        PortSpec::Vhost(spec) => u64::from(spec.queues) * 2 * 3 + 16,
        PortSpec::Impair(spec) => descriptors(&spec.port),
        _ => 0,
    }
}

fn open_one(
    spec: &PortSpec,
    pool: &'static Pool,
    memory: Option<&DeviceMemory>,
) -> Result<(Box<dyn Port>, Option<GenCounters>), PortError> {
    Ok(match spec {
        PortSpec::Gen(spec) => {
            let port = GenPort::open(spec, pool)?;
            let counters = port.counters();
            return Ok((Box::new(port), Some(counters)));
        }
        PortSpec::Impair(spec) => {
            let (inner, generator) = open_one(&spec.port, pool, memory)?;
            return Ok((Box::new(ImpairPort::new(spec, inner, pool)), generator));
        }
        PortSpec::AfPacket(spec) => (af_packet(spec, pool)?, None),
        PortSpec::AfXdp(spec) => (Box::new(AfXdpPort::open(spec, pool)?), None),
        PortSpec::Dpdk(spec) => (dpdk(spec, pool, memory)?, None),
        PortSpec::Pcap(spec) => (Box::new(PcapPort::open(spec)?), None),
        PortSpec::Tap(spec) => (Box::new(TapPort::open(spec, pool)?), None),
        PortSpec::Vhost(vhost) => {
            let name = spec.to_string();
            (Box::new(VhostPort::open(&name, address::derived(&name), backend(vhost))?), None)
        }
        PortSpec::VirtioUser(spec) => (Box::new(VirtioUserPort::open(spec, pool)?), None),
    })
}

fn af_packet(spec: &AfPacketSpec, pool: &'static Pool) -> Result<Box<dyn Port>, PortError> {
    let port = AfPacketPort::open(spec, pool)?;
    warn_shared(&spec.name);
    Ok(Box::new(port))
}

/// Describes how the kernel's stack uses an interface, such as `address 192.0.2.2/24`. Returns an empty text if it is
/// unused.
fn uses(interface: &str) -> String {
    let uses = NetDev::open(interface).and_then(|device| inventory::uses(device.index()));
    uses.unwrap_or_default().join(", ")
}

fn warn_shared(interface: &str) {
    let uses = uses(interface);
    if !uses.is_empty() {
        say(&format!("warning: {interface} is in use ({uses}): the kernel receives its packets, too"));
    }
}

#[cfg(feature = "dpdk")]
fn dpdk(
    spec: &DpdkSpec,
    pool: &'static Pool,
    memory: Option<&DeviceMemory>,
) -> Result<Box<dyn Port>, PortError> {
    if spec.device.starts_with("net_pcap") && spec.args.as_ref().is_some_and(|args| args.contains("tx_pcap"))
    {
        let reason = "its driver overwrites files: expected a port pcap:IN,OUT, which does not".into();
        return Err(PortError::Other { port: spec.to_string(), reason });
    }
    match spec.interface() {
        // The port's driver attaches its own XDP program.
        Some(name) if spec.device.starts_with("net_af_xdp") && !uses(name).is_empty() => {
            let reason = format!(
                "interface '{name}' is in use ({}) and would be taken away: expected an unused one, or \
                 af_xdp:{name},force",
                uses(name)
            );
            return Err(PortError::Other { port: spec.to_string(), reason });
        }
        Some(name) => warn_shared(name),
        None => {}
    }
    let port = offcore_port::dpdk::DpdkPort::open(spec, pool, memory)?;
    port.notes().iter().for_each(|note| say(note));
    Ok(Box::new(port))
}

#[cfg(not(feature = "dpdk"))]
fn dpdk(spec: &DpdkSpec, _: &'static Pool, _: Option<&DeviceMemory>) -> Result<Box<dyn Port>, PortError> {
    Err(PortError::Other { port: spec.to_string(), reason: crate::args::eal::WITHOUT.into() })
}

fn backend(spec: &VhostSpec) -> BackendConfig {
    let mut config = BackendConfig::new(&spec.path);
    config.role = if spec.client { Role::Client } else { Role::Server };
    config.access = SocketAccess { owner: spec.owner, group: spec.group, mode: spec.mode };
    config.queue_pairs = spec.queues;
    if let Some(mib) = spec.max_memory {
        config.max_memory = u64::from(mib) << 20;
    }
    for (offered, bits) in [
        (spec.packed, features::VIRTIO_F_RING_PACKED),
        (spec.in_order, features::VIRTIO_F_IN_ORDER),
        (spec.mrg, features::VIRTIO_NET_F_MRG_RXBUF),
        (spec.indirect, features::VIRTIO_F_INDIRECT_DESC),
        (spec.event_idx, features::VIRTIO_F_EVENT_IDX),
        (spec.offloads, OFFLOADS),
    ] {
        if !offered {
            config.features &= !bits;
        }
    }
    config
}

/// All features for checksums and segmentation.
const OFFLOADS: u64 = features::VIRTIO_NET_F_CSUM
    | features::VIRTIO_NET_F_GUEST_CSUM
    | features::VIRTIO_NET_F_HOST_TSO4
    | features::VIRTIO_NET_F_HOST_TSO6
    | features::VIRTIO_NET_F_HOST_ECN
    | features::VIRTIO_NET_F_HOST_USO
    | features::VIRTIO_NET_F_GUEST_TSO4
    | features::VIRTIO_NET_F_GUEST_TSO6
    | features::VIRTIO_NET_F_GUEST_ECN
    | features::VIRTIO_NET_F_GUEST_USO4
    | features::VIRTIO_NET_F_GUEST_USO6;

impl Observed {
    pub(crate) fn lines(&self, ports: &[Box<dyn Port>], names: &PortNames) -> Vec<PortLine> {
        let ports = ports.iter().zip(&self.generators).enumerate();
        let lines = ports.map(|(index, (port, generator))| PortLine {
            port: names.of(index),
            name: port.name().into(),
            mac: port.mac().to_string(),
            status: port.status(),
            peer: port.peer(),
            generator: generator.as_ref().map(|counters| counters.report().into()),
        });
        lines.collect()
    }

    /// Returns whether changes of the state of port `index` are reported. Ports without a link, and ports with
    /// impairments, show counters in their state.
    pub(crate) fn has_link(&self, index: usize) -> bool {
        self.links[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_a_vhost_port_become_features() {
        let config_of = |text: &str| match text.parse().unwrap() {
            PortSpec::Vhost(spec) => backend(&spec),
            other => panic!("{other} is no vhost port"),
        };
        let config = config_of("vhost:/tmp/a");
        assert_eq!((config.features, config.role, config.queue_pairs), (features::OFFERED, Role::Server, 1));
        let config = config_of("vhost:/tmp/a,client,queues=3,mrg=off,event_idx=off");
        assert_eq!(
            features::OFFERED & !config.features,
            features::VIRTIO_NET_F_MRG_RXBUF | features::VIRTIO_F_EVENT_IDX
        );
        assert_eq!((config.role, config.queue_pairs), (Role::Client, 3));
        let config = config_of("vhost:/tmp/a,indirect=off");
        assert_eq!(features::OFFERED & !config.features, features::VIRTIO_F_INDIRECT_DESC);
        let config = config_of("vhost:/tmp/a,packed=off,in_order=off");
        assert_eq!(
            features::OFFERED & !config.features,
            features::VIRTIO_F_RING_PACKED | features::VIRTIO_F_IN_ORDER
        );
        let config = config_of("vhost:/tmp/a,offloads=off");
        assert_eq!(features::OFFERED & !config.features, OFFLOADS);
    }
}
