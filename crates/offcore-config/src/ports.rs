//! `[[port]]`: a port's name, the keys of its kind, and the settings of the system that uses it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use offcore_flow::bridge::stations::StationRule;
use offcore_flow::bridge::vlan::VlanRule;
use offcore_flow::switch::HostIface;
use offcore_port::spec::values::Number;
use offcore_port::spec::{ImpairSpec, LineFaults, PortSpec};
use offcore_port::stats::is_port;
use offcore_wire::MacAddr;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::document::{Document, Table, Value};
use crate::iface;
use crate::names::Names;

/// A port of a file.
#[derive(Clone, Debug)]
pub struct Port {
    pub name: String,
    pub spec: PortSpec,
    pub keys: PortKeys,
}

impl Port {
    /// The MTU of a host's port, if it is given.
    pub(crate) fn mtu(&self) -> Option<u16> {
        match &self.keys {
            PortKeys::Host(iface) => iface.mtu,
            PortKeys::Forwarding(_) => None,
        }
    }
}

/// The settings of a port that do not depend on its kind.
#[derive(Clone, Debug)]
pub enum PortKeys {
    Forwarding(ForwardingKeys),
    Host(HostIface),
}

/// Settings of a port of a switch, a copy stage or a pipeline.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForwardingKeys {
    /// Engines of the queues' copies.
    #[serde(default)]
    pub copies: QueueCopies,
    /// With forward = "l2": the port's VLANs. A port without this key is in every VLAN, and its packets keep their
    /// tags.
    #[serde(default)]
    pub vlan: Option<Vlan>,
    /// With forward = "l2": static addresses of the port.
    #[serde(default)]
    pub fdb: Option<Stations>,
    /// Destination address of packets that mac, copy, txonly and flowgen send on the port.
    #[serde(default, deserialize_with = "address")]
    #[schemars(with = "String")]
    pub eth_peer: Option<MacAddr>,
    /// Faults of the line: packets of the port are lost, delayed or changed.
    #[serde(default)]
    pub impair: Option<LineFaults>,
}

/// VLANs of a port.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Vlan {
    /// The only VLAN of the port, which sends and accepts packets without a tag.
    #[serde(default, deserialize_with = "VlanId::optional")]
    #[schemars(with = "VlanId")]
    pub access: Option<u16>,
    /// VLANs whose packets are tagged, such as "10,20-29".
    #[serde(default)]
    pub trunk: Option<String>,
    /// With trunk: the VLAN of packets without a tag.
    #[serde(default, deserialize_with = "VlanId::optional")]
    #[schemars(with = "VlanId")]
    pub native: Option<u16>,
}

type VlanId = Number<1, 4094>;

/// Static addresses of a port.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Stations {
    /// Addresses that belong to this port only.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Whether packets from other addresses are dropped.
    #[serde(default)]
    pub locked: bool,
}

/// Settings of a port of a host.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct HostKeys {
    /// Addresses such as "192.0.2.10/24", and dhcp or slaac for addresses that the network assigns.
    #[serde(default)]
    addresses: Vec<String>,
    /// The default gateway, or one for each address family.
    #[serde(default)]
    gateway: OneOrMany,
    /// Routes, as NETWORK/LENGTH@GATEWAY.
    #[serde(default)]
    routes: Vec<String>,
    /// The VLAN of all packets; without it, packets have no tag.
    #[serde(default, deserialize_with = "VlanId::optional")]
    #[schemars(with = "VlanId")]
    vlan: Option<u16>,
    /// The MTU. It cannot exceed the MTU of the port's interface.
    #[serde(default)]
    mtu: Option<u16>,
    /// The Ethernet address of the host. Default: the port's, except on a TAP port.
    #[serde(default)]
    mac: Option<String>,
    /// Faults of the line: packets of the port are lost, delayed or changed.
    #[serde(default)]
    impair: Option<LineFaults>,
}

/// A text, or a list of texts.
#[derive(Clone, Debug, Default)]
struct OneOrMany(Vec<String>);

impl JsonSchema for OneOrMany {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "OneOrMany".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" } }] })
    }
}

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Texts;

        impl<'de> Visitor<'de> for Texts {
            type Value = Vec<String>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an address, or a list of addresses")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Vec<String>, E> {
                Ok(vec![text.into()])
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
                let mut texts = Vec::new();
                while let Some(text) = list.next_element()? {
                    texts.push(text);
                }
                Ok(texts)
            }
        }

        deserializer.deserialize_any(Texts).map(Self)
    }
}

fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<MacAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(|error| D::Error::custom(format_args!("{error}")))
}

/// Engines of queues: the key is `rx` or `tx` for all queues, or `rxqN` or `txqN` for one; `weights` has the weights of
/// single queues.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct QueueCopies {
    #[serde(flatten)]
    pub queues: BTreeMap<String, Vec<String>>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub weights: BTreeMap<String, u16>,
}

impl QueueCopies {
    /// Whether no queue has engines.
    pub fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    fn check(key: &str) -> Result<(), String> {
        let half = key.strip_prefix("rx").or(key.strip_prefix("tx"));
        // One way to write a number: no sign and no leading zeros.
        let is_number = |text: &str| text.parse::<u16>().is_ok_and(|number| number.to_string() == text);
        let is_queue = |rest: &str| rest.strip_prefix('q').is_some_and(is_number);
        match half.is_some_and(|rest| rest.is_empty() || is_queue(rest)) {
            true => Ok(()),
            false => Err(format!("'{key}': expected rx, tx, rxqN, txqN or weights")),
        }
    }
}

impl<'de> Deserialize<'de> for QueueCopies {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Queues;

        impl<'de> Visitor<'de> for Queues {
            type Value = QueueCopies;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("engines by queue, such as { tx = [\"dsa\"] }")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<QueueCopies, A::Error> {
                let mut copies = QueueCopies::default();
                while let Some(key) = map.next_key::<String>()? {
                    if key == "weights" {
                        copies.weights = map.next_value()?;
                        continue;
                    }
                    QueueCopies::check(&key).map_err(A::Error::custom)?;
                    let engines: Vec<String> = map.next_value()?;
                    if engines.is_empty() {
                        return Err(A::Error::custom(format_args!("{key}: expected one engine at least")));
                    }
                    copies.queues.insert(key, engines);
                }
                match copies.weights.iter().find(|(key, weight)| {
                    **weight == 0 || QueueCopies::check(key).is_err() || !key.contains('q')
                }) {
                    Some((key, _)) => Err(A::Error::custom(format_args!(
                        "weights.{key}: expected rxqN or txqN, and a weight from 1 to 65535"
                    ))),
                    None => Ok(copies),
                }
            }
        }

        deserializer.deserialize_map(Queues)
    }
}

impl JsonSchema for QueueCopies {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "QueueCopies".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let engines = json_schema!({ "type": "array", "items": { "type": "string" }, "minItems": 1 });
        json_schema!({
            "type": "object",
            "properties": {
                "rx": engines,
                "tx": engines,
                "weights": {
                    "type": "object",
                    "patternProperties": { "^[rt]xq(0|[1-9][0-9]*)$": { "type": "integer", "minimum": 1, "maximum": 65535 } },
                    "additionalProperties": false
                }
            },
            "patternProperties": { "^[rt]xq(0|[1-9][0-9]*)$": engines },
            "additionalProperties": false
        })
    }
}

/// The keys of a port that belong to a system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    Forwarding,
    Host,
}

impl Keys {
    const fn names(self) -> &'static [&'static str] {
        match self {
            Self::Forwarding => &["copies", "vlan", "fdb", "eth_peer", "impair"],
            Self::Host => &["addresses", "gateway", "routes", "vlan", "mtu", "mac", "impair"],
        }
    }

    /// The schema of these keys.
    pub(crate) fn schema(self, generator: &mut SchemaGenerator) -> Schema {
        match self {
            Self::Forwarding => ForwardingKeys::json_schema(generator),
            Self::Host => HostKeys::json_schema(generator),
        }
    }
}

/// The longest name of a port or an engine, in bytes: names of blocks of the statistics page contain it.
const MAX_NAME: usize = 31;

/// Checks a name: letters, digits, '-', '_' and '.', beginning with a letter or a digit.
///
/// # Errors
/// The expected characters.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let is_known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let begins = name.chars().next().is_some_and(|first| first.is_ascii_alphanumeric());
    match begins && name.len() <= MAX_NAME && name.chars().all(is_known) {
        true => Ok(()),
        false => Err(format!(
            "name '{name}': expected 1 to {MAX_NAME} letters, digits, '-', '_' and '.', beginning with a letter or digit"
        )),
    }
}

/// Reads the ports of a file.
pub(crate) fn read<'i>(document: &mut Document<'i>, keys: Keys) -> Vec<Port> {
    let mut ports: Vec<Port> = Vec::new();
    let Some(value) = document.take("port") else { return ports };
    let at = value.span();
    let toml::de::DeValue::Array(tables) = value.into_inner() else {
        document.add(Some(at), "port", "expected a list: write [[port]] before each port");
        return ports;
    };
    for table in tables {
        let (at, count) = (table.span(), document.problems.len());
        if let Some(port) = read_port(document, table, keys)
            && document.problems.len() == count
        {
            if ports.iter().any(|other| other.name == port.name) {
                let text =
                    format!("name '{}' is used twice, expected a different one for each port", port.name);
                document.add(Some(at), &format!("port.{}.name", port.name), text);
            }
            ports.push(port);
        }
    }
    ports
}

fn read_port<'i>(document: &mut Document<'i>, value: Value<'i>, keys: Keys) -> Option<Port> {
    let (mut table, at) = document.table(value, "port")?;
    let name = match table.remove("name") {
        Some(name) => {
            let text = document.text_of(&name, "port.name")?;
            let reserved = || match is_port(&text) {
                true => Ok(()),
                false => Err(format!(
                    "name '{text}' is that of a ring, mirror or pipeline of the switch: choose another"
                )),
            };
            if let Err(error) = check_name(&text).and_then(|()| reserved()) {
                document.add(Some(name.span()), "port.name", error);
            }
            text
        }
        None => {
            document.add(
                Some(at.clone()),
                "port",
                "key 'name' is missing: each port needs a name of its own",
            );
            return None;
        }
    };
    let path = format!("port.{name}");
    let (kind, kind_at) = match table.remove("kind") {
        Some(kind) => (document.text_of(&kind, &format!("{path}.kind"))?, kind.span()),
        None => {
            let text = format!("key 'kind' is missing, expected one of {}", PortSpec::KINDS.join(", "));
            document.add(Some(at), &path, text);
            return None;
        }
    };
    if !PortSpec::KINDS.contains(&kind.as_str()) {
        let text = format!("kind '{kind}' is not known, expected one of {}", PortSpec::KINDS.join(", "));
        document.add(Some(kind_at), &format!("{path}.kind"), text);
        return None;
    }
    let (common, own) = split(table, keys);
    let spec = document.read_with(own, at.clone(), &path, |table| PortSpec::of_kind(&kind, table));
    let read = match keys {
        Keys::Forwarding => {
            let keys: Option<ForwardingKeys> = document.read(common, at.clone(), &path);
            keys.map(|keys| (keys.impair.clone(), PortKeys::Forwarding(keys)))
        }
        Keys::Host => {
            let keys: Option<HostKeys> = document.read(common, at.clone(), &path);
            keys.and_then(|keys| host(document, &at, &path, spec.as_ref()?, keys))
        }
    };
    let ((impair, keys), mut spec) = (read?, spec?);
    if let PortKeys::Host(HostIface { mtu: Some(mtu), .. }) = keys {
        iface::set_mtu(&mut spec, mtu);
    }
    if let PortSpec::Vhost(vhost) = &spec
        && vhost.dmas.is_some()
    {
        let text = "dmas names channels: use copies = { tx = [\"NAME\"] } with engines of this file";
        document.add(Some(at), &format!("{path}.dmas"), text);
        return None;
    }
    let spec = match impair {
        Some(line) => PortSpec::Impair(ImpairSpec::new(line, spec).ok()?),
        None => spec,
    };
    Some(Port { name, spec, keys })
}

/// Separates the keys of the system from the keys of the port's kind.
fn split(table: Table<'_>, keys: Keys) -> (Table<'_>, Table<'_>) {
    table.into_iter().partition(|(key, _)| keys.names().contains(&key.get_ref().as_ref()))
}

fn host(
    document: &mut Document<'_>,
    at: &Range<usize>,
    path: &str,
    spec: &PortSpec,
    keys: HostKeys,
) -> Option<(Option<LineFaults>, PortKeys)> {
    let HostKeys { addresses, gateway, routes, vlan, mtu, mac, impair } = keys;
    let mut iface = HostIface::default();
    let given = addresses.iter().map(|text| ("addresses", "addr", text.clone()));
    let given = given.chain(gateway.0.iter().map(|text| ("gateway", "gw", text.clone())));
    let given = given.chain(routes.iter().map(|text| ("routes", "route", text.clone())));
    let given = given.chain(vlan.map(|vlan| ("vlan", "vlan", vlan.to_string())));
    let given = given.chain(mtu.map(|mtu| ("mtu", "mtu", mtu.to_string())));
    let given = given.chain(mac.map(|mac| ("mac", "mac", mac)));
    let count = document.problems.len();
    for (key, flag, text) in given {
        if let Err(error) = iface::set(&mut iface, flag, &text) {
            let error = error.strip_prefix(&format!("{flag}=")).map_or(error.clone(), str::to_owned);
            document.add_about(&format!("{path}.{key}"), error);
        }
    }
    if document.problems.len() > count {
        return None;
    }
    if let Err(error) = iface::check(&iface, Names::File) {
        document.add(Some(at.clone()), path, error);
        return None;
    }
    iface::complete(&mut iface, spec);
    Some((impair, PortKeys::Host(iface)))
}

impl Vlan {
    /// Returns the rule for port number `port`.
    pub(crate) fn rule(&self, port: usize) -> Result<VlanRule, String> {
        if self.trunk.iter().any(|trunk| trunk.contains('=')) {
            return Err("trunk: expected VLANs and ranges, such as \"10,20-29\"".into());
        }
        let rule = match (self.access, &self.trunk, self.native) {
            (Some(access), None, None) => format!("{port}=access:{access}"),
            (None, Some(trunk), None) => format!("{port}=trunk:{trunk}"),
            (None, Some(trunk), Some(native)) => format!("{port}=trunk:{trunk},native={native}"),
            _ => return Err("expected access, or trunk with an optional native VLAN".into()),
        };
        rule.parse()
    }
}

impl Stations {
    /// Returns the rule for port number `port`.
    pub(crate) fn rule(&self, port: usize) -> Result<StationRule, String> {
        if let Some(wrong) = self.addresses.iter().find(|address| address.parse::<MacAddr>().is_err()) {
            return Err(format!("'{wrong}': expected a MAC address, such as 52:54:00:00:00:02"));
        }
        let mut parts = self.addresses.clone();
        parts.extend(self.locked.then(|| "locked".into()));
        match parts.is_empty() {
            true => Err("expected addresses, locked = true, or both".into()),
            false => format!("{port}={}", parts.join(",")).parse(),
        }
    }
}
