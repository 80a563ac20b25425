//! The sections of a file. A setting that is not given is `None`, so that the plan knows which settings contradict one
//! another.

mod gpu;
mod host;
mod switch;

use std::time::Duration;

use offcore_dma::Mode;
use offcore_flow::Idle;
use offcore_mem::Hugepages;
use offcore_port::spec::values::{Number, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::values::{Choice, choice};

pub use gpu::{Gpu, OnMatch, Work, WorkKind, device_name};
pub use host::{Epping, Tcp};
pub use switch::{Copy, Forward, Switch};

/// The section of a file that describes its system.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Section {
    Switch(Switch),
    Copy(Copy),
    Gpu(Box<Gpu>),
    Tcp(Box<Tcp>),
    Epping(Epping),
}

impl Section {
    /// Returns the burst size without `process.burst`.
    pub fn burst(&self) -> usize {
        match self {
            Self::Switch(_) => 32,
            Self::Copy(copy) => copy.burst(),
            Self::Gpu(_) | Self::Tcp(_) | Self::Epping(_) => offcore_mem::BURST,
        }
    }
}

/// `[process]`: the instance and its workers. Changes need a restart.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// Name of the instance: 1 to 31 letters, digits, '-', '_' and '.'. Default: the name of the file without .toml.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Lcores of the workers. Default: the first lcore that no engine uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lcores: Option<Vec<usize>>,
    /// The packet buffers.
    #[serde(default, skip_serializing_if = "Pool::is_default")]
    pub pool: Pool,
    /// Behaviour of an idle worker: poll, or sleep until packets arrive. Default: poll.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<Idle>")]
    pub idle: Option<Idle>,
    /// Maximum packets per burst. Default: 32.
    #[serde(default, deserialize_with = "Burst::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Burst")]
    pub burst: Option<usize>,
    /// SCHED_FIFO priority of the workers; needs root or CAP_SYS_NICE.
    #[serde(default, deserialize_with = "Priority::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Priority")]
    pub rt_priority: Option<i32>,
    /// Arguments for DPDK's EAL in its own syntax; only with dpdk ports and dmadev engines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eal: Option<String>,
}

type Burst = Number<1, { offcore_mem::BURST as u64 }>;
type Priority = Number<1, 99>;

/// `process.pool`: the packet buffers.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Number of packet buffers. Default: 16384.
    #[serde(default, deserialize_with = "Buffers::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Buffers")]
    pub buffers: Option<usize>,
    /// Size of a packet buffer in bytes, including 256 bytes of headroom: a power of two. Default: 2048.
    #[serde(default, deserialize_with = "buffer", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Buffer")]
    pub buffer: Option<usize>,
    /// Page size: auto selects the largest available, none selects ordinary pages. Default: auto.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<Hugepages>")]
    pub pages: Option<Hugepages>,
}

type Buffers = Number<64, { 1 << 24 }>;
type Buffer = Number<2048, 32768>;

fn buffer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    Buffer::power_of_two(deserializer).map(Some)
}

impl Pool {
    /// Default number of packet buffers.
    pub const BUFFERS: usize = 16384;
    /// Default size of a packet buffer in bytes.
    pub const BUFFER: usize = 2048;

    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// `[engines.NAME]`: an engine that copies.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "kind")]
pub enum Engine {
    #[serde(rename = "core")]
    Core(HelperThread),
    #[serde(rename = "dsa")]
    Dsa(WorkQueues),
    #[serde(rename = "dsa-sim")]
    Simulator(SimulatedDevice),
    #[serde(rename = "dmadev")]
    DmaDev(DmaDevice),
}

/// A helper thread.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HelperThread {
    /// Its lcore.
    pub lcore: usize,
}

/// Work queues of Intel DSA.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkQueues {
    /// Work queues such as wq0.1, with options behind a '/': direct, memory, block. Default: every work queue that is
    /// enabled for users, on the NUMA node of the packet buffers if there are some.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub work_queues: Vec<String>,
}

/// A simulated DSA device.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SimulatedDevice {
    /// Device number. Engines with equal numbers share one device. Set lcore, profile, generation, seed and fault in
    /// one of them. Default: a separate device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u32>,
    /// Numbers of its work queues. Default: 0.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub work_queues: Vec<u32>,
    /// Lcore of the thread that simulates the device. Default: one without a worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lcore: Option<usize>,
    /// A built-in layout (such as net, vhost or vpp), or the path of an accel-config JSON file. Default: net.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Generation: spr or dsa2. Default: spr.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<String>,
    /// Seed of all randomness. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Faults to inject, as in `offcore switch --dsa-sim`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

/// A DMA device of DPDK.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DmaDevice {
    /// Its name in the EAL.
    pub device: String,
}

impl Engine {
    /// The kinds of engines.
    pub(crate) const KINDS: [&str; 4] = ["core", "dsa", "dsa-sim", "dmadev"];

    /// Returns the given number of a simulated device.
    pub(crate) fn device_number(&self) -> Option<u32> {
        match self {
            Self::Simulator(device) => device.device,
            _ => None,
        }
    }

    /// Reads the keys of an engine of a kind in [`KINDS`](Self::KINDS).
    pub(crate) fn of_kind<'de, D: Deserializer<'de>>(kind: &str, keys: D) -> Result<Self, D::Error> {
        match kind {
            "core" => HelperThread::deserialize(keys).map(Self::Core),
            "dsa" => WorkQueues::deserialize(keys).map(Self::Dsa),
            "dsa-sim" => SimulatedDevice::deserialize(keys).map(Self::Simulator),
            _ => DmaDevice::deserialize(keys).map(Self::DmaDev),
        }
    }
}

type MaxLatency = Time<1_000, 1_000_000_000>;

/// `[copies]`: the choice of core or engine for copies of queues that name engines.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Copies {
    /// The core (cpu), the engines (offload), or the cheaper of both as measured (auto). Default: offload if a queue
    /// names engines, else cpu.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<Mode>")]
    pub mode: Option<Mode>,
    /// With mode auto: maximum time from the submission of a copy to the publication of its packet; the core copies if
    /// the engine takes longer.
    #[serde(
        default,
        deserialize_with = "MaxLatency::optional",
        serialize_with = "MaxLatency::write",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "MaxLatency")]
    pub max_latency: Option<Duration>,
}
