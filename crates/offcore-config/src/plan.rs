//! From a file to the configuration of a switch.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use offcore_dma::Mode;
use offcore_flow::bridge::BridgeConfig;
use offcore_flow::dma_map::{Entry, QueueHalf};
use offcore_flow::host::apps::Hosted;
use offcore_flow::host::apps::epping::Tally;
use offcore_flow::mirror::{Direction, Mirror};
use offcore_flow::switch::{EthPeers, Hosting, Run};
use offcore_flow::{DmaMap, Simulator, SwitchConfig, SwitchError};
use offcore_port::spec::PortSpec;
use offcore_port::stats::PortNames;
use offcore_stats::lcore;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::document::{Document, Problems, unknown};
use crate::engines::Channels;
use crate::names::{Key, Names, Refusal};
use crate::ports::{ForwardingKeys, Keys, Port, PortKeys, QueueCopies, check_name};
use crate::sections::{Copies, Forward, Gpu, Pool, Process, Section};
use crate::{engines, ports};

/// The version of the file's format.
const VERSION: u64 = 1;
/// The sections that describe a system. A file has exactly one.
const SYSTEMS: [&str; 5] = ["switch", "copy", "gpu", "tcp", "epping"];

/// A file after all checks.
#[derive(Debug)]
pub struct Plan {
    /// Name of the instance.
    pub name: String,
    pub system: System,
    pub config: SwitchConfig,
    /// The ports. Targets of mirrors and of `steer` follow the others.
    pub ports: Vec<PortSpec>,
    /// The packet buffers.
    pub pool: Pool,
    /// Arguments for DPDK's EAL.
    pub eal: Option<String>,
}

/// The system of a file.
#[derive(Clone, Debug)]
pub enum System {
    Switch,
    Copy,
    Gpu,
    Tcp,
    /// With the results so far.
    Epping(Arc<Mutex<Tally>>),
}

/// `[[mirror]]`: packets of a port are also sent to another port.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MirrorSection {
    /// The port whose packets are mirrored.
    of: String,
    /// rx: packets received from the port, tx: packets sent to it, both. Default: both.
    #[serde(default)]
    direction: Option<String>,
    /// The port to which copies are sent. It has no other task. Several mirrors may share it.
    to: String,
}

/// Parses the text of a file. `file` is its name in messages.
///
/// # Errors
/// All problems of the file.
pub fn parse(text: &str, file: &str) -> Result<Plan, Problems> {
    let mut document = Document::parse(text);
    // The rest of a file with syntax errors is not what its author meant.
    let plan = match document.problems.is_empty() {
        true => Reading { document: &mut document }.plan(file),
        false => None,
    };
    let mut list = std::mem::take(&mut document.problems);
    match plan {
        Some(plan) if list.is_empty() => Ok(plan),
        _ => {
            list.sort_by_key(|problem| problem.line);
            list.dedup();
            Err(Problems { file: file.into(), list })
        }
    }
}

struct Reading<'a, 'i> {
    document: &'a mut Document<'i>,
}

impl Reading<'_, '_> {
    fn plan(mut self, file: &str) -> Option<Plan> {
        self.version();
        let process: Option<Process> = self.section("process");
        let copies: Option<Copies> = self.section("copies");
        let mut channels = engines::read(self.document);
        let is_host = ["tcp", "epping"].into_iter().any(|key| self.document.root.contains_key(key));
        let section = self.system();
        let keys = if is_host { Keys::Host } else { Keys::Forwarding };
        let ports = ports::read(self.document, keys);
        let mirrors = self.mirrors();
        self.unknown_sections();
        if !self.document.problems.is_empty() {
            return None;
        }
        let (process, copies, section) = (process?, copies?, section?);
        let name = self.name(&process, file)?;
        let ports = self.ordered(ports, &section, &mirrors)?;
        let mirrors = self.resolved(&mirrors, &ports)?;
        let lcores = process.lcores.clone();
        let count = lcores.as_ref().map_or(1, Vec::len);
        let dma = self.dma(&section, &ports, &mut channels, count);
        channels.check_used(self.document);
        let mode = self.mode(&copies, &dma)?;
        let lcores = self.lcores(lcores, &section, &ports, &channels.simulators(), &dma)?;
        let (run, system) = self.run(&section, &ports, lcores.len(), &process)?;
        let burst = match &section {
            Section::Copy(copy) => {
                let least = copy.copying(None, EthPeers::new(), 1).batch;
                if process.burst.is_some_and(|burst| burst < least) {
                    let text = format!(
                        "expected at least {least}, the batch of [copy]: its packets are received together"
                    );
                    self.document.add_about(Key::Burst.path(), text);
                }
                process.burst.unwrap_or_else(|| copy.burst())
            }
            _ => process.burst.unwrap_or_else(|| section.burst()),
        };
        let work = match &section {
            Section::Switch(switch) => switch.work.map_or(0, |time| time.as_nanos() as u64),
            _ => 0,
        };
        let (names, ports): (Vec<_>, Vec<_>) = ports.into_iter().map(|port| (port.name, port.spec)).unzip();
        self.refused_duplicates(&names, &ports);
        let config = SwitchConfig {
            run,
            mirrors,
            mode,
            dma,
            simulators: channels.simulators(),
            lcores,
            names: PortNames(names),
            burst,
            work_ns: work,
            rt_priority: process.rt_priority,
            idle: process.idle.unwrap_or_default(),
            max_latency: copies.max_latency,
        };
        if let Err(SwitchError::Config { field, text }) = config.check(&ports) {
            let key = Key::from(field);
            self.document.add_about(key.path(), text);
        }
        Some(Plan { name, system, config, ports, pool: process.pool, eal: process.eal })
    }

    fn version(&mut self) {
        let Some(version) = self.document.take("version") else {
            self.document.add(None, "version", format!("is missing: write version = {VERSION} first"));
            return;
        };
        let number = version.get_ref().as_integer().and_then(|number| number.as_str().parse::<u64>().ok());
        if number != Some(VERSION) {
            self.document.add(Some(version.span()), "version", format!("expected {VERSION}"));
        }
    }

    /// Reads a section. An absent section has its defaults.
    fn section<T: serde::de::DeserializeOwned + Default>(&mut self, key: &str) -> Option<T> {
        if !self.document.root.contains_key(key) {
            return Some(T::default());
        }
        let (table, at) = self.document.take_table(key)?;
        self.document.read(table, at, key)
    }

    fn system(&mut self) -> Option<Section> {
        let given: Vec<&str> =
            SYSTEMS.into_iter().filter(|key| self.document.root.contains_key(*key)).collect();
        let [key] = given[..] else {
            let text = match given[..] {
                [] => format!("no system: expected one of the sections {}", SYSTEMS.join(", ")),
                _ => format!("sections {}: expected only one of them", given.join(" and ")),
            };
            self.document.add(None, "", text);
            given.iter().for_each(|key| drop(self.document.take(key)));
            return None;
        };
        let (table, at) = self.document.take_table(key)?;
        match key {
            "switch" => self.document.read(table, at, key).map(Section::Switch),
            "copy" => self.document.read(table, at, key).map(Section::Copy),
            "gpu" => self.document.read(table, at, key).map(|gpu| Section::Gpu(Box::new(gpu))),
            "tcp" => self.document.read(table, at, key).map(|tcp| Section::Tcp(Box::new(tcp))),
            _ => self.document.read(table, at, key).map(Section::Epping),
        }
    }

    fn mirrors(&mut self) -> Vec<(MirrorSection, Range<usize>)> {
        let Some(value) = self.document.take("mirror") else { return Vec::new() };
        let at = value.span();
        let toml::de::DeValue::Array(tables) = value.into_inner() else {
            self.document.add(Some(at), "mirror", "expected a list: write [[mirror]] before each mirror");
            return Vec::new();
        };
        let mut mirrors = Vec::new();
        for table in tables {
            if let Some((table, at)) = self.document.table(table, "mirror")
                && let Some(mirror) = self.document.read(table, at.clone(), "mirror")
            {
                mirrors.push((mirror, at));
            }
        }
        mirrors
    }

    fn unknown_sections(&mut self) {
        let known = ["version", "process", "engines", "copies", "port", "mirror"];
        let rest: Vec<_> =
            self.document.root.iter().map(|(key, _)| (key.get_ref().to_string(), key.span())).collect();
        for (key, at) in rest {
            let text = unknown("section", &key, known.into_iter().chain(SYSTEMS));
            self.document.add(Some(at), &key, text);
        }
    }

    fn name(&mut self, process: &Process, file: &str) -> Option<String> {
        let stem =
            || Path::new(file).file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into());
        let name = process.name.clone().unwrap_or_else(stem);
        match check_name(&name) {
            Ok(()) => Some(name),
            Err(error) => {
                self.document.add_about("process.name", error);
                None
            }
        }
    }

    /// Returns the value, or adds the refusal.
    fn refused<T>(&mut self, key: Key, result: Result<T, String>) -> Option<T> {
        result.map_err(|text| self.document.add_about(key.path(), text)).ok()
    }

    fn accepted<T>(&mut self, result: Result<T, Refusal>) -> Option<T> {
        result
            .map_err(|Refusal { key, text }| match text.starts_with(key.path()) {
                true => self.document.add_text_about(key.path(), text),
                false => self.document.add_about(key.path(), text),
            })
            .ok()
    }

    /// Returns the ports with targets of mirrors and of `steer` behind the others.
    fn ordered(
        &mut self,
        ports: Vec<Port>,
        section: &Section,
        mirrors: &[(MirrorSection, Range<usize>)],
    ) -> Option<Vec<Port>> {
        let steer = match section {
            Section::Gpu(gpu) => gpu.work.steer.as_ref(),
            _ => None,
        };
        if let Some((_, at)) = mirrors.iter().find(|(mirror, _)| Some(&mirror.to) == steer) {
            self.document.add(Some(at.clone()), "mirror.to", "this port is the target of gpu.work.steer");
        }
        let targets: Vec<&String> = mirrors.iter().map(|(mirror, _)| &mirror.to).chain(steer).collect();
        let (targets, mut ordered): (Vec<Port>, Vec<Port>) =
            ports.into_iter().partition(|port| targets.contains(&&port.name));
        if ordered.is_empty() {
            self.document.add(None, "port", "no port, expected one [[port]] at least");
            return None;
        }
        if let Some(steer) = steer
            && !targets.iter().any(|port| port.name == *steer)
        {
            self.document.add_about(Key::Steer.path(), format!("there is no port '{steer}'"));
            return None;
        }
        ordered.extend(targets);
        Some(ordered)
    }

    fn resolved(&mut self, mirrors: &[(MirrorSection, Range<usize>)], ports: &[Port]) -> Option<Vec<Mirror>> {
        let mut resolved = Vec::new();
        for (MirrorSection { of, direction, to }, at) in mirrors {
            let mut find = |key: &str, name: &str| {
                let found = ports.iter().position(|port| port.name == name);
                if found.is_none() {
                    let names = ports.iter().map(|port| port.name.as_str());
                    let text = format!("port '{name}': {}", unknown("port", name, names));
                    self.document.add(Some(at.clone()), &format!("mirror.{key}"), text);
                }
                found
            };
            let (port, to) = (find("of", of), find("to", to));
            let direction: Result<Direction, String> =
                direction.as_ref().map_or(Ok(Direction::Both), |text| text.parse());
            match (port, to, direction) {
                (Some(port), Some(to), Ok(direction)) => {
                    let mirror = Mirror { port, direction, to };
                    if resolved.contains(&mirror) {
                        self.document.add(Some(at.clone()), "mirror", "the same mirror occurs twice");
                    }
                    resolved.push(mirror);
                }
                (_, _, Err(error)) => self.document.add(Some(at.clone()), "mirror.direction", error),
                _ => return None,
            }
        }
        Some(resolved)
    }

    fn dma(&mut self, section: &Section, ports: &[Port], channels: &mut Channels, lcores: usize) -> DmaMap {
        let host: Option<(&str, &QueueCopies)> = match section {
            Section::Tcp(tcp) => Some(("tcp.copies", &tcp.copies)),
            Section::Epping(epping) => Some(("epping.copies", &epping.copies)),
            _ => None,
        };
        if let Some((path, copies)) = host {
            let queues = u16::try_from(lcores).unwrap_or(u16::MAX);
            return DmaMap { entries: channels.map(self.document, path, copies, None, queues) };
        }
        let mut entries = Vec::new();
        for (index, port) in ports.iter().enumerate() {
            let PortKeys::Forwarding(ForwardingKeys { copies, .. }) = &port.keys else { continue };
            let path = format!("port.{}.copies", port.name);
            let mapped = channels.map(self.document, &path, copies, Some(index), port.spec.queues());
            self.check_copies(section, port, &path, &mapped);
            entries.extend(mapped);
        }
        DmaMap { entries }
    }

    /// Refuses engines for queues that make no copies.
    fn check_copies(&mut self, section: &Section, port: &Port, path: &str, mapped: &[Entry]) {
        let stage = match section {
            Section::Copy(_) => true,
            Section::Switch(switch) => switch.mode() == Forward::Copy,
            _ => false,
        };
        let has = |half: QueueHalf| mapped.iter().any(|entry| entry.half == half);
        if port.spec.offloads() || mapped.is_empty() {
            return;
        }
        if !stage {
            let text =
                "this port makes no copies: engines are for queues of vhost ports, and for rx of [copy]";
            self.document.add_about(path, text);
        } else if has(QueueHalf::Tx) {
            self.document.add_about(path, "expected rx only: the copy stage is behind a port's RX queues");
        }
    }

    fn mode(&mut self, copies: &Copies, dma: &DmaMap) -> Option<Mode> {
        let mapped = !dma.entries.is_empty();
        let count = self.document.problems.len();
        if let Some(mode @ (Mode::Offload | Mode::Auto)) = copies.mode
            && !mapped
        {
            let text = format!("mode {mode} needs engines: add copies = {{ tx = [\"NAME\"] }} to a port");
            self.document.add_about(Key::Mode.path(), text);
        }
        if copies.max_latency.is_some() && copies.mode != Some(Mode::Auto) {
            let text = "requires mode = \"auto\", which chooses between core and engine";
            self.document.add_about(Key::MaxLatency.path(), text);
        }
        let usual = if mapped { Mode::Offload } else { Mode::Cpu };
        (self.document.problems.len() == count).then(|| copies.mode.unwrap_or(usual))
    }

    /// Returns the treatment of packets.
    fn run(
        &mut self,
        section: &Section,
        ports: &[Port],
        lcores: usize,
        process: &Process,
    ) -> Option<(Run, System)> {
        match section {
            Section::Switch(switch) => {
                if switch.mode() != Forward::L2 {
                    self.refuse_learning(ports);
                }
                let sets_no_address =
                    matches!(switch.mode(), Forward::Io | Forward::Macswap | Forward::L2 | Forward::Rxonly);
                if sets_no_address || switch.mac_updating == Some(false) {
                    self.refuse_eth_peers(ports);
                }
                let (eth_peers, bridge) = (eth_peers(ports), self.bridge(ports)?);
                let run = self.accepted(switch.run(Names::File, eth_peers, bridge))?;
                Some((run, System::Switch))
            }
            Section::Copy(copy) => {
                self.refuse_learning(ports);
                if copy.mac_updating == Some(false) {
                    self.refuse_eth_peers(ports);
                }
                let copying = copy.copying(None, eth_peers(ports), lcores);
                Some((Run::Copy(copying), System::Copy))
            }
            Section::Gpu(gpu) => {
                self.refuse_learning(ports);
                self.refuse_eth_peers(ports);
                let elsewhere = gpu.work.steer.as_ref();
                let elsewhere = elsewhere.and_then(|name| ports.iter().position(|port| port.name == *name));
                let pages = process.pool.pages.unwrap_or_default();
                let mut working = self.accepted(gpu.working(Names::File, elsewhere, pages))?;
                working.patterns = self.accepted(gpu.read_patterns(Names::File))?;
                let specs: Vec<PortSpec> = ports.iter().map(|port| port.spec.clone()).collect();
                self.accepted(Gpu::check_ports(Names::File, working.memory, &specs))?;
                Some((Run::Pipelines(working), System::Gpu))
            }
            Section::Tcp(tcp) => {
                let app = self.accepted(tcp.app(Names::File))?;
                let mut hosting = self.hosting(ports, app);
                hosting.congestion = tcp.congestion.unwrap_or_default();
                hosting.connections = tcp.report_connections;
                Some((Run::Host(hosting), System::Tcp))
            }
            Section::Epping(epping) => {
                let tally: Arc<Mutex<Tally>> = Arc::default();
                let buffer = process.pool.buffer.unwrap_or(Pool::BUFFER);
                let mtus: Vec<_> =
                    ports.iter().map(|port| (format!("port '{}'", port.name), port.mtu())).collect();
                let has_engine = !epping.copies.is_empty();
                let app = epping.app(Names::File, buffer, has_engine, &mtus, Arc::clone(&tally));
                let app = self.accepted(app)?;
                Some((Run::Host(self.hosting(ports, Hosted::Epping(app))), System::Epping(tally)))
            }
        }
    }

    fn hosting(&mut self, ports: &[Port], app: Hosted) -> Hosting {
        let ifaces: Vec<_> = ports
            .iter()
            .filter_map(|port| match &port.keys {
                PortKeys::Host(iface) => Some(iface.clone()),
                PortKeys::Forwarding(_) => None,
            })
            .collect();
        for (index, (port, iface)) in ports.iter().zip(&ifaces).enumerate() {
            let twice = crate::iface::shared_address(iface, &ifaces[..index]);
            if let Some((other, address)) = twice {
                let text = format!("port '{}' has the address {address}, too", ports[other].name);
                self.document.add_about(&format!("port.{}.addresses", port.name), text);
            }
        }
        Hosting { ifaces, app, congestion: offcore_tcp::proto::Algorithm::default(), connections: false }
    }

    /// Returns the rules of ports of a learning switch.
    fn bridge(&mut self, ports: &[Port]) -> Option<BridgeConfig> {
        let mut bridge = BridgeConfig::default();
        let count = self.document.problems.len();
        for (index, port) in ports.iter().enumerate() {
            let PortKeys::Forwarding(keys) = &port.keys else { continue };
            if let Some(vlan) = &keys.vlan {
                match vlan.rule(index) {
                    Ok(rule) => bridge.vlans.push(rule),
                    Err(error) => self.document.add_about(&format!("port.{}.vlan", port.name), error),
                }
            }
            if let Some(stations) = &keys.fdb {
                match stations.rule(index) {
                    Ok(rule) => bridge.stations.push(rule),
                    Err(error) => self.document.add_about(&format!("port.{}.fdb", port.name), error),
                }
            }
        }
        (self.document.problems.len() == count).then_some(bridge)
    }

    /// Refuses rules of a learning switch elsewhere.
    fn refuse_learning(&mut self, ports: &[Port]) {
        for port in ports {
            let PortKeys::Forwarding(keys) = &port.keys else { continue };
            for (key, given) in [("vlan", keys.vlan.is_some()), ("fdb", keys.fdb.is_some())] {
                if given {
                    let text = "requires [switch] with forward = \"l2\"";
                    self.document.add_about(&format!("port.{}.{key}", port.name), text);
                }
            }
        }
    }

    /// Refuses addresses of peers that no packet gets.
    fn refuse_eth_peers(&mut self, ports: &[Port]) {
        for port in ports {
            if matches!(&port.keys, PortKeys::Forwarding(ForwardingKeys { eth_peer: Some(_), .. })) {
                let text = "this system sets no destination addresses: remove it";
                self.document.add_about(&format!("port.{}.eth_peer", port.name), text);
            }
        }
    }

    /// Returns the given lcores, or the first lcores that no engine uses.
    fn lcores(
        &mut self,
        given: Option<Vec<usize>>,
        section: &Section,
        ports: &[Port],
        simulators: &[Simulator],
        dma: &DmaMap,
    ) -> Option<Vec<usize>> {
        match (given, section) {
            (Some(given), _) => {
                if let Some((_, twice)) =
                    given.iter().enumerate().find(|(at, lcore)| given[..*at].contains(lcore))
                {
                    self.document.add_about(Key::Lcores.path(), format!("lcore {twice} occurs twice"));
                }
                Some(given)
            }
            (None, Section::Gpu(gpu)) => {
                let pipelines = ports.iter().map(|port| usize::from(port.spec.queues())).sum();
                self.refused(Key::Lcores, gpu.lcores(pipelines))
            }
            (None, _) => self.refused(Key::Lcores, free_lcore(simulators, dma)).map(|lcore| vec![lcore]),
        }
    }

    fn refused_duplicates(&mut self, names: &[String], ports: &[PortSpec]) {
        let labels: Vec<String> = names.iter().map(|name| format!("port '{name}'")).collect();
        if let Err(text) = check_duplicates(ports, &labels) {
            self.document.add_about("port", text);
        }
    }
}

/// Returns the destination addresses of ports.
fn eth_peers(ports: &[Port]) -> EthPeers {
    let peers = ports.iter().enumerate().filter_map(|(index, port)| match &port.keys {
        PortKeys::Forwarding(keys) => Some((index, keys.eth_peer?)),
        PortKeys::Host(_) => None,
    });
    peers.collect()
}

/// Checks that no two ports create the same socket, interface or file. `labels` name the ports in the error.
///
/// # Errors
/// The first two such ports.
pub fn check_duplicates(ports: &[PortSpec], labels: &[String]) -> Result<(), String> {
    let made = |port: &PortSpec| match port.bare() {
        PortSpec::Vhost(vhost) if !vhost.client => Some(("listen at", vhost.path.clone())),
        PortSpec::VirtioUser(virtio) if virtio.server => Some(("listen at", virtio.path.clone())),
        PortSpec::Tap(tap) => Some(("have interface", PathBuf::from(&tap.name))),
        PortSpec::AfPacket(spec) => Some(("have interface", PathBuf::from(&spec.name))),
        PortSpec::AfXdp(spec) => Some(("have interface", PathBuf::from(&spec.name))),
        PortSpec::Pcap(pcap) => pcap.output.clone().map(|path| ("write", path)),
        _ => None,
    };
    let mut makers = HashMap::new();
    for (index, port) in ports.iter().enumerate() {
        let Some((does, what)) = made(port) else { continue };
        if let Some(other) = makers.insert((does, what.clone()), index) {
            let (one, two) = (&labels[other], &labels[index]);
            return Err(format!(
                "{one} and {two}: both {does} {}; expected a different one for each",
                what.display()
            ));
        }
    }
    Ok(())
}

/// Returns the first lcore on which no helper thread and no simulated device runs, or the first lcore.
///
/// # Errors
/// No lcore is available to this process.
pub fn free_lcore(simulators: &[Simulator], dma: &DmaMap) -> Result<usize, String> {
    let available = lcore::available().map_err(|error| error.to_string())?;
    let is_helper = |lcore: &usize| {
        let name = format!("core:{lcore}");
        dma.entries.iter().any(|entry| entry.channels.contains(&name))
            || simulators.iter().any(|simulator| simulator.lcore == Some(*lcore))
    };
    let free = available.iter().find(|lcore| !is_helper(lcore)).or(available.first());
    free.copied().ok_or_else(|| "no lcore is available to this process".into())
}
