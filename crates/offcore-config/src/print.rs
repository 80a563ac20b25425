//! Writes the file that describes the same as a command line.

use std::collections::BTreeMap;

use offcore_flow::bridge::vlan::PortVlans;
use offcore_flow::dma_map::{Entry, QueueHalf};
use offcore_flow::switch::{HostIface, Hosting, Run};
use offcore_flow::{Simulator, SwitchConfig};
use offcore_port::spec::PortSpec;
use offcore_tcp::proto::Route;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use toml::Value;

use crate::ports::QueueCopies;
use crate::sections::{
    Copies, DmaDevice, Engine, HelperThread, Process, Section, SimulatedDevice, WorkQueues,
};

/// A table whose keys keep their order.
#[derive(Debug, Default)]
struct Ordered(Vec<(String, Value)>);

impl Serialize for Ordered {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl Ordered {
    fn push(&mut self, key: &str, value: impl Into<Value>) {
        self.0.push((key.into(), value.into()));
    }
}

#[derive(Serialize)]
struct File<'a> {
    version: u32,
    process: &'a Process,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    engines: BTreeMap<String, Engine>,
    #[serde(skip_serializing_if = "Option::is_none")]
    copies: Option<Copies>,
    #[serde(flatten)]
    section: &'a Section,
    port: Vec<Ordered>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mirror: Vec<Ordered>,
}

/// Returns the text of a file for a configuration that was not read from one. Ports are named `port0`, `port1`, …
///
/// # Errors
/// Settings that a file does not have.
pub fn print(
    process: &Process,
    mut section: Section,
    config: &SwitchConfig,
    ports: &[PortSpec],
) -> Result<String, String> {
    let engines = engines(config)?;
    let names = Names(&engines);
    let ifaces: &[HostIface] = match &config.run {
        Run::Host(Hosting { ifaces, .. }) => ifaces,
        _ => &[],
    };
    match &mut section {
        Section::Tcp(tcp) => tcp.copies = names.copies(config.dma.entries.iter()),
        Section::Epping(epping) => epping.copies = names.copies(config.dma.entries.iter()),
        Section::Gpu(gpu) if gpu.work.steer.is_some() => {
            gpu.work.steer = config.run.elsewhere().map(|port| format!("port{port}"));
        }
        _ => {}
    }
    let copies = (!config.dma.entries.is_empty())
        .then_some(Copies { mode: Some(config.mode), max_latency: config.max_latency });
    let port = |(index, spec): (usize, &PortSpec)| match ifaces.get(index) {
        Some(iface) => host_port(index, spec, iface),
        None => forwarding_port(index, spec, config, &names),
    };
    let file = File {
        version: 1,
        process,
        engines: engines.iter().map(|(name, (engine, _))| (name.clone(), engine.clone())).collect(),
        copies,
        section: &section,
        port: ports.iter().enumerate().map(port).collect::<Result<_, _>>()?,
        mirror: config.mirrors.iter().map(mirror).collect(),
    };
    toml::to_string(&file).map_err(|error| error.to_string())
}

/// Engines by name, each with its channel.
type Named = BTreeMap<String, (Engine, String)>;

/// Returns an engine for each channel.
fn engines(config: &SwitchConfig) -> Result<Named, String> {
    let mut engines = Named::new();
    let mut described = Vec::new();
    for channel in config.dma.entries.iter().flat_map(|entry| &entry.channels) {
        let (kind, which) = channel.split_once(':').unwrap_or((channel, ""));
        if engines.values().any(|(_, known)| known == channel) {
            continue;
        }
        let name = engine_name(channel, &engines);
        let engine = match kind {
            "core" => Engine::Core(HelperThread { lcore: which.parse().unwrap_or_default() }),
            "dsa" if which == "auto" => Engine::Dsa(WorkQueues { work_queues: Vec::new() }),
            "dsa" => Engine::Dsa(WorkQueues { work_queues: vec![which.into()] }),
            "dmadev" => Engine::DmaDev(DmaDevice { device: which.into() }),
            "cpu" => return Err("a file has no engine 'cpu': leave the queue out of --dma".into()),
            _ => {
                let simulator = config.simulators.iter().find(|simulator| simulator.name() == kind);
                let simulator = simulator.ok_or_else(|| format!("channel '{channel}' has no device"))?;
                let is_first = !described.contains(&simulator.number);
                described.push(simulator.number);
                simulated(simulator, which, is_first)?
            }
        };
        engines.insert(name, (engine, channel.clone()));
    }
    Ok(engines)
}

/// Returns a name for the engine of a channel that no other engine has.
fn engine_name(channel: &str, engines: &Named) -> String {
    let is_known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let name: String = channel.chars().map(|c| if is_known(c) { c } else { '-' }).take(24).collect();
    match engines.contains_key(&name) {
        false => name,
        true => format!("{name}-{}", engines.len()),
    }
}

fn simulated(simulator: &Simulator, which: &str, is_first: bool) -> Result<Engine, String> {
    let queue = which.rsplit_once('.').and_then(|(_, queue)| queue.parse().ok());
    let queue = queue.ok_or_else(|| format!("work queue '{which}': a file has its number only"))?;
    let mut device = SimulatedDevice {
        device: Some(simulator.number),
        work_queues: vec![queue],
        ..SimulatedDevice::default()
    };
    if is_first {
        device.lcore = simulator.lcore;
        for (key, value) in simulator.text.split(',').filter_map(|part| part.split_once('=')) {
            match key {
                "profile" => device.profile = Some(value.into()),
                "gen" => device.generation = Some(value.into()),
                "seed" => device.seed = value.parse().ok(),
                "fault" => device.fault = Some(value.into()),
                "lcore" => {}
                _ => {
                    return Err(format!(
                        "--dsa-sim {key}={value}: a file has profile, gen, seed and fault only"
                    ));
                }
            }
        }
    }
    Ok(Engine::Simulator(device))
}

/// Writes channels as engines.
struct Names<'a>(&'a Named);

impl Names<'_> {
    fn engines(&self, entry: &Entry) -> Vec<String> {
        let name =
            |channel: &String| self.0.iter().find(|(_, (_, known))| known == channel).map(|(name, _)| name);
        entry.channels.iter().filter_map(name).cloned().collect()
    }

    fn copies<'e>(&self, entries: impl Iterator<Item = &'e Entry>) -> QueueCopies {
        let mut copies = QueueCopies::default();
        for entry in entries {
            let half = if entry.half == QueueHalf::Rx { "rxq" } else { "txq" };
            let queue = format!("{half}{}", entry.queue);
            if entry.weight != 1 {
                copies.weights.insert(queue.clone(), entry.weight);
            }
            copies.queues.insert(queue, self.engines(entry));
        }
        copies
    }
}

/// Starts the table of a port: its name, and the keys of its kind.
fn port_table(index: usize, spec: &PortSpec) -> Ordered {
    let mut table = Ordered::default();
    let (kind, keys) = spec.keys();
    table.push("name", format!("port{index}"));
    table.push("kind", kind);
    for (key, value) in keys {
        let value = match value.as_deref() {
            _ if key == "dmas" => continue,
            Some(text) if matches!(&*key, "args" | "rss") => bracketed(text).into(),
            Some(text) if STRINGS.contains(&&*key) => text.into(),
            None | Some("on") => Value::Boolean(true),
            Some("off") => Value::Boolean(false),
            Some(text) => scalar(text),
        };
        table.push(&key, value);
    }
    if let PortSpec::Impair(impair) = spec {
        let text = spec.to_string();
        let own = text.strip_suffix(&impair.port.to_string()).and_then(|text| text.strip_prefix("impair:"));
        let keys = own.unwrap_or_default().split(',').filter_map(|part| part.split_once('='));
        table.push(
            "impair",
            keys.map(|(key, value)| (key.to_owned(), scalar(value))).collect::<toml::Table>(),
        );
    }
    table
}

/// Keys of ports whose values are strings, even if they look like numbers or switches.
const STRINGS: [&str; 8] = ["device", "fanout", "input", "interface", "mac", "mode", "output", "socket"];

/// Returns a number as an integer.
fn scalar(text: &str) -> Value {
    text.parse().map_or_else(|_| Value::String(text.into()), Value::Integer)
}

/// Returns the text inside the brackets, if there are any.
fn bracketed(text: &str) -> &str {
    text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text)
}

fn forwarding_port(
    index: usize,
    spec: &PortSpec,
    config: &SwitchConfig,
    names: &Names<'_>,
) -> Result<Ordered, String> {
    let mut table = port_table(index, spec);
    let makes_copies = spec.offloads() || matches!(config.run, Run::Copy(_));
    let mapped = (0..spec.queues())
        .flat_map(|queue| [(QueueHalf::Rx, queue), (QueueHalf::Tx, queue)])
        .filter_map(|(half, queue)| {
            let channels = config.dma.channels(index, half, queue);
            let weight = config.dma.weight(index, half, queue);
            (makes_copies && !channels.is_empty()).then(|| Entry {
                port: None,
                half,
                queue,
                weight,
                channels: channels.to_vec(),
            })
        });
    let copies = names.copies(mapped.collect::<Vec<_>>().iter());
    if !copies.is_empty() {
        table.push("copies", Value::try_from(&copies).map_err(|error| error.to_string())?);
    }
    let eth_peers = match &config.run {
        Run::Forward { eth_peers, .. } => Some(eth_peers),
        Run::Copy(copying) if copying.ports.is_some() => {
            return Err(
                "--portmask: a file has only the ports that take part; leave the other ones out".into()
            );
        }
        Run::Copy(copying) => copying.eth_peers.as_ref(),
        _ => None,
    };
    if let Some(peer) = eth_peers.and_then(|peers| peers.get(&index)) {
        table.push("eth_peer", peer.to_string());
    }
    if let Run::Bridge(bridge) = &config.run {
        if let Some(rule) = bridge.vlans.iter().find(|rule| rule.port == index) {
            table.push("vlan", vlan(&rule.vlans));
        }
        if let Some(rule) = bridge.stations.iter().find(|rule| rule.port == index) {
            let mut stations = toml::Table::new();
            if !rule.addresses.is_empty() {
                let addresses = rule.addresses.iter().map(|address| Value::String(address.to_string()));
                stations.insert("addresses".into(), addresses.collect::<Vec<_>>().into());
            }
            if rule.locked {
                stations.insert("locked".into(), true.into());
            }
            table.push("fdb", stations);
        }
    }
    Ok(table)
}

fn vlan(vlans: &PortVlans) -> toml::Table {
    let mut table = toml::Table::new();
    match vlans {
        PortVlans::Access(id) => _ = table.insert("access".into(), i64::from(*id).into()),
        PortVlans::Trunk { tagged, native } => {
            let ranges = tagged.iter().map(|&(first, last)| match first == last {
                true => first.to_string(),
                false => format!("{first}-{last}"),
            });
            table.insert("trunk".into(), ranges.collect::<Vec<_>>().join(",").into());
            if let Some(id) = native {
                table.insert("native".into(), i64::from(*id).into());
            }
        }
    }
    table
}

fn host_port(index: usize, spec: &PortSpec, iface: &HostIface) -> Result<Ordered, String> {
    let mut table = port_table(index, spec);
    // These keys belong to the interface of a host.
    table.0.retain(|(key, _)| key != "mtu" && key != "mac");
    let mut addresses: Vec<Value> =
        iface.addresses.iter().map(|prefix| format!("{}/{}", prefix.address, prefix.len).into()).collect();
    addresses.extend(
        [("dhcp", iface.dhcp), ("slaac", iface.slaac)]
            .into_iter()
            .filter(|(_, on)| *on)
            .map(|(name, _)| name.into()),
    );
    table.push("addresses", addresses);
    let (gateways, routes): (Vec<&Route>, Vec<&Route>) =
        iface.routes.iter().partition(|route| route.to.len == 0);
    if !gateways.is_empty() {
        let gateways = gateways.iter().map(|route| Value::String(route.gateway.to_string()));
        table.push("gateway", gateways.collect::<Vec<_>>());
    }
    if !routes.is_empty() {
        let routes = routes
            .iter()
            .map(|route| Value::String(format!("{}/{}@{}", route.to.address, route.to.len, route.gateway)));
        table.push("routes", routes.collect::<Vec<_>>());
    }
    if let Some(vlan) = iface.vlan {
        table.push("vlan", i64::from(vlan));
    }
    if let Some(mtu) = iface.mtu {
        table.push("mtu", i64::from(mtu));
    }
    if let Some(mac) = iface.mac {
        table.push("mac", mac.to_string());
    }
    Ok(table)
}

fn mirror(mirror: &offcore_flow::mirror::Mirror) -> Ordered {
    let mut table = Ordered::default();
    table.push("of", format!("port{}", mirror.port));
    match (mirror.direction.has_rx(), mirror.direction.has_tx()) {
        (true, false) => table.push("direction", "rx"),
        (false, true) => table.push("direction", "tx"),
        _ => {}
    }
    table.push("to", format!("port{}", mirror.to));
    table
}
