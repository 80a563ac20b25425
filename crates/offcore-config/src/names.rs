//! The names of settings: a user of the command line knows flags, the author of a file knows keys.

use std::fmt;

use offcore_flow::switch::Field;

/// Whether settings come from the command line or from a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    Flags,
    File,
}

/// A setting was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub key: Key,
    /// The whole message, with the names of settings.
    pub text: String,
}

impl Names {
    /// Returns the name of a setting.
    pub fn of(self, key: Key) -> &'static str {
        let (flag, path) = key.names();
        match self {
            Self::Flags => flag,
            Self::File => path,
        }
    }

    /// Writes a setting with its value, or with values that are joined by commas and `or`: `--mode cpu or auto`,
    /// `copies.mode = "cpu" or "auto"`.
    pub fn with(self, key: Key, value: impl fmt::Display) -> String {
        let (name, value) = (self.of(key), value.to_string());
        if self == Self::Flags {
            return format!("{name} {value}");
        }
        let quoted = |word: &str| match word.strip_suffix(',').unwrap_or(word) {
            "or" => word.to_owned(),
            number if number.parse::<u64>().is_ok() => word.to_owned(),
            bare => word.replacen(bare, &format!("\"{bare}\""), 1),
        };
        format!("{name} = {}", value.split(' ').map(quoted).collect::<Vec<_>>().join(" "))
    }
}

macro_rules! keys {
    ($($key:ident = $flag:literal, $path:literal;)*) => {
        /// A setting.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Key {
            $($key,)*
        }

        impl Key {
            const fn names(self) -> (&'static str, &'static str) {
                match self {
                    $(Self::$key => ($flag, $path),)*
                }
            }

            /// Returns the key in a file, such as `copies.mode`. Keys of ports are without the port.
            pub const fn path(self) -> &'static str {
                self.names().1
            }
        }
    };
}

keys! {
    Addresses = "addr= of --port", "port.addresses";
    Ageing = "--ageing", "switch.ageing";
    Batch = "--dma-batch", "copy.batch";
    Blocks = "--blocks", "gpu.blocks";
    Buffers = "-n", "epping.buffers";
    Burst = "--burst", "process.burst";
    Chunk = "-l", "epping.chunk";
    Connect = "-c", "epping.connect";
    Devices = "--device", "gpu.devices";
    Dma = "--dma", "port";
    EthPeer = "--eth-peer", "port.eth_peer";
    Fdb = "--fdb", "port.fdb";
    FdbSize = "--fdb-size", "switch.addresses";
    FloodLimit = "--flood-limit", "switch.flood_limit";
    Forward = "--forward", "switch.forward";
    Frame = "--txpkts", "switch.frame";
    GpuTimeout = "--timeout", "gpu.timeout";
    Lcores = "--lcores", "process.lcores";
    MacUpdating = "--mac-updating or --no-mac-updating", "switch.mac_updating";
    Mark = "--mark", "gpu.work.mark";
    MaxLatency = "--max-latency", "copies.max_latency";
    Memory = "--memory", "gpu.memory";
    Mirrors = "--mirror", "mirror";
    Mode = "--mode", "copies.mode";
    OnMatch = "--on-match", "gpu.work.on_match";
    PacketTime = "--packet-time", "gpu.work.packet_time";
    Patterns = "--patterns", "gpu.work.patterns";
    Pool = "--mbufs and --mbuf-size", "process.pool";
    PortMask = "--portmask", "port";
    Ports = "--port", "port";
    Profile = "--profile", "gpu.profile";
    RingSize = "--ring-size", "copy.ring_size";
    Segment = "-m", "epping.segment";
    Serve = "--serve", "tcp.serve";
    Service = "--app", "tcp.service";
    Simulators = "--dsa-sim", "engines";
    Skip = "--skip", "gpu.work.skip";
    Split = "--split", "gpu.work.split_at";
    Steer = "--steer", "gpu.work.steer";
    Swap = "--no-swap", "gpu.work.swap";
    Threads = "--threads", "gpu.threads";
    Topology = "--port-topology", "switch.topology";
    Vlan = "--vlan", "port.vlan";
    Work = "--work-ns", "switch.work";
    WorkKind = "--work", "gpu.work.kind";
    Workload = "--workload", "gpu.workload";
}

impl From<Field> for Key {
    fn from(field: Field) -> Self {
        match field {
            Field::Addresses => Self::Addresses,
            Field::Batch => Self::Batch,
            Field::Burst => Self::Burst,
            Field::Devices => Self::Devices,
            Field::Dma => Self::Dma,
            Field::Elsewhere => Self::Steer,
            Field::EthPeers => Self::EthPeer,
            Field::Frame => Self::Frame,
            Field::Lcores => Self::Lcores,
            Field::Memory => Self::Memory,
            Field::Mirrors => Self::Mirrors,
            Field::OnHit => Self::OnMatch,
            Field::Pool => Self::Pool,
            Field::PortMask => Self::PortMask,
            Field::RingSize => Self::RingSize,
            Field::Receiver => Self::Connect,
            Field::Segment => Self::Segment,
            Field::Serve => Self::Serve,
            Field::Service => Self::Service,
            Field::Simulators => Self::Simulators,
            Field::SplitAt => Self::Split,
            Field::Vlans => Self::Vlan,
            Field::Stations => Self::Fdb,
            // Fields of the packet generator are not in files.
            Field::Bidirectional | Field::Flows | Field::LinkSpeed | Field::Ports | Field::Sizes => {
                Self::Ports
            }
        }
    }
}
