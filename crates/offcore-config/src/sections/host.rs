//! `[tcp]` and `[epping]`: a TCP/IP host on ports.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use offcore_flow::host::apps::Hosted;
use offcore_flow::host::apps::epping::{EppingConfig, Tally};
use offcore_flow::host::serve::ServeConfig;
use offcore_mem::HEADROOM;
use offcore_port::spec::values::{Account, Number};
use offcore_tcp::proto::Algorithm;
use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use crate::names::{Key, Names, Refusal};
use crate::ports::QueueCopies;
use crate::service::ServiceSpec;
use crate::values::{Choice, Size, choice};

/// `[tcp]`: a TCP/IP host with a service, or for applications in other processes.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tcp {
    /// The service: echo, sink, source or http:DIR, optionally with a colon and another port. Default: echo, unless
    /// serve is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub service: Option<ServiceSpec>,
    /// Path of the socket to which applications in other processes attach, instead of a service.
    #[serde(default, deserialize_with = "socket", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub serve: Option<PathBuf>,
    /// With serve: users whose processes may attach, by name or number, in addition to the stack's user and root.
    #[serde(default, deserialize_with = "users", skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Account>")]
    pub allow: Vec<u32>,
    /// With serve: maximum memory for the data of one application's connections. Default: 256M.
    #[serde(
        default,
        deserialize_with = "Memory::optional",
        serialize_with = "Memory::write",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Memory")]
    pub memory_per_application: Option<usize>,
    /// With serve: maximum number of connections, datagram sockets and listeners of an application; a listener counts
    /// twice. Default: 65536.
    #[serde(default, deserialize_with = "Connections::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Connections")]
    pub connections_per_application: Option<usize>,
    /// Congestion control of connections, unless an application sets another one (TCP_CONGESTION). Default: cubic.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<Algorithm>")]
    pub congestion: Option<Algorithm>,
    /// Whether reports contain up to 1000 connections. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub report_connections: bool,
    /// Engines of the host's copies: rx from packets to receive buffers, tx from send buffers to packets.
    #[serde(default, skip_serializing_if = "QueueCopies::is_empty")]
    pub copies: QueueCopies,
}

type Memory = Size<{ 4 << 20 }, { 65_536 << 20 }>;
type Connections = Number<1, 1_048_576>;

/// Reads the path of a socket.
fn socket<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
    let path = String::deserialize(deserializer)?;
    match path.is_empty() {
        true => Err(D::Error::custom("expected the path of a socket")),
        false => Ok(Some(path.into())),
    }
}

/// Reads the address of a receiver.
fn receiver<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    let address = text.parse().ok().filter(|address: &SocketAddr| address.port() > 0);
    address.ok_or_else(|| D::Error::custom("expected ADDRESS:PORT, such as 10.0.0.1:9"))
}

/// Reads users, by name or number.
fn users<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    #[derive(Deserialize)]
    struct User(#[serde(deserialize_with = "Account::user")] Option<u32>);

    let users = Vec::<User>::deserialize(deserializer)?;
    Ok(users.into_iter().filter_map(|user| user.0).collect())
}

impl Tcp {
    /// The default of `memory_per_application`, in bytes.
    const MEMORY: usize = 256 << 20;
    /// The default of `connections_per_application`: a sixteenth of a stack's connections, and the number of an
    /// application's sessions.
    const CONNECTIONS: usize = 65_536;

    /// Returns the application of the host.
    ///
    /// # Errors
    /// Settings for applications in other processes without `serve`, or a service beside it.
    pub fn app(&self, names: Names) -> Result<Hosted, Refusal> {
        let serve = names.of(Key::Serve);
        let Some(path) = &self.serve else {
            let given = [
                ("allow", !self.allow.is_empty()),
                ("memory_per_application", self.memory_per_application.is_some()),
                ("connections_per_application", self.connections_per_application.is_some()),
            ];
            if let Some((key, _)) = given.into_iter().find(|(_, given)| *given) {
                let text = format!("tcp.{key} is for applications in other processes: add {serve}");
                return Err(Refusal { key: Key::Serve, text });
            }
            let ServiceSpec { service, port } = self.service.clone().unwrap_or_default();
            return Ok(Hosted::Service(service, port));
        };
        if self.service.is_some() {
            let service = names.of(Key::Service);
            let text = format!("{service} and {serve} cannot be used together: remove one of them");
            return Err(Refusal { key: Key::Service, text });
        }
        Ok(Hosted::Others(ServeConfig {
            path: path.clone(),
            allow: self.allow.clone(),
            memory: self.memory_per_application.unwrap_or(Self::MEMORY),
            connections: self.connections_per_application.unwrap_or(Self::CONNECTIONS),
        }))
    }
}

/// `[epping]`: the stream source of the mTCP guide, over TCP.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Epping {
    /// The receiver: a TCP server that reads.
    #[serde(deserialize_with = "receiver")]
    #[schemars(with = "String")]
    pub connect: SocketAddr,
    /// Length of a chunk. Default: 256K.
    #[serde(
        default,
        deserialize_with = "Chunk::optional",
        serialize_with = "Chunk::write",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Chunk")]
    pub chunk: Option<usize>,
    /// Number of chunk buffers, sent in turn. Default: 128 MiB in total.
    #[serde(default, deserialize_with = "Buffers::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Buffers")]
    pub buffers: Option<usize>,
    /// Maximum payload of a packet in bytes.
    #[serde(default, deserialize_with = "Segment::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Segment")]
    pub segment: Option<u16>,
    /// Whether the engine of tx copies chunks into the send buffer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub offload_writes: bool,
    /// Whether the engine of tx copies payload from the send buffer into packets.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub offload_segments: bool,
    /// Whether the answers of an echo server are compared with the sent bytes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub verify: bool,
    /// Engines of the copies.
    #[serde(default, skip_serializing_if = "QueueCopies::is_empty")]
    pub copies: QueueCopies,
}

type Chunk = Size<64, { 1 << 30 }>;
type Buffers = Number<1, { 1 << 24 }>;
type Segment = Number<64, 8192>;

impl Epping {
    /// Default length of a chunk.
    const CHUNK: usize = 256 << 10;
    /// Default size of all buffers in bytes: larger than most caches.
    const SOURCE: usize = 128 << 20;
    /// Length of a packet's headers with timestamps, in bytes.
    const HEADERS: usize = 52;
    /// Maximum size of all buffers.
    const LARGEST: usize = 8 << 30;

    /// Returns the application, which counts in `tally`. Packet buffers have `buffer` bytes. `has_engine` tells
    /// whether an engine is assigned to its copies. `ports` are the host's, with
    /// their names in messages.
    ///
    /// # Errors
    /// Buffers that are too large in total, segments that fit no packet, or an engine without a use.
    pub fn app(
        &self,
        names: Names,
        buffer: usize,
        has_engine: bool,
        ports: &[(String, Option<u16>)],
        tally: Arc<Mutex<Tally>>,
    ) -> Result<EppingConfig, Refusal> {
        let chunk = self.chunk.unwrap_or(Self::CHUNK);
        let buffers = self.buffers.unwrap_or((Self::SOURCE / chunk).max(1));
        if buffers.checked_mul(chunk).is_none_or(|bytes| bytes > Self::LARGEST) {
            let most = Self::LARGEST >> 30;
            let (buffers, chunk) = (names.with(Key::Buffers, buffers), names.with(Key::Chunk, chunk));
            let text = format!("{buffers} of {chunk}: expected {most} GiB at most");
            return Err(Refusal { key: Key::Chunk, text });
        }
        self.check_segment(names, buffer, ports)?;
        let offloads = self.offload_writes || self.offload_segments;
        let text = match (names, !has_engine) {
            (Names::Flags, true) if offloads => {
                "-d and -u need an engine: add --dma txq0@core:1 or another one"
            }
            (Names::Flags, false) if !offloads => {
                "--dma: add -d, -u or both, which select the engine's copies"
            }
            (Names::File, true) if offloads => {
                "offload_writes and offload_segments need an engine: add copies = { tx = [\"NAME\"] }"
            }
            (Names::File, false) if !offloads => {
                "copies without a use: add offload_writes, offload_segments or both"
            }
            _ => {
                return Ok(EppingConfig {
                    to: self.connect,
                    chunk,
                    buffers,
                    segment: self.segment,
                    offload_writes: self.offload_writes,
                    offload_segments: self.offload_segments,
                    verify: self.verify,
                    tally,
                });
            }
        };
        Err(Refusal { key: Key::Dma, text: text.into() })
    }

    /// Refuses a segment that is longer than a packet buffer, or than the MTU of a port. The MTU of the interface is
    /// checked when the host starts.
    fn check_segment(
        &self,
        names: Names,
        buffer: usize,
        ports: &[(String, Option<u16>)],
    ) -> Result<(), Refusal> {
        let Some(segment) = self.segment.map(usize::from) else { return Ok(()) };
        let found = names.with(Key::Segment, segment);
        let room = buffer - HEADROOM;
        if segment > room {
            let wanted = (segment + HEADROOM).next_power_of_two();
            let add = match names {
                Names::Flags => format!("add --mbuf-size {wanted}"),
                Names::File => format!("set buffer = {wanted} in process.pool"),
            };
            let text = format!("{found}: a packet buffer has room for {room}; {add}");
            return Err(Refusal { key: Key::Segment, text });
        }
        let wanted = segment + Self::HEADERS;
        let short =
            ports.iter().find_map(|(port, mtu)| Some((port, mtu.filter(|mtu| usize::from(*mtu) < wanted)?)));
        match short {
            Some((port, mtu)) => {
                let text = format!("{found}: {port} has mtu={mtu}, expected {wanted} or more");
                Err(Refusal { key: Key::Segment, text })
            }
            None => Ok(()),
        }
    }
}
