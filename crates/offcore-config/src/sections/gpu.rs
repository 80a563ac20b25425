//! `[gpu]`: pipelines of l2fwd-nv.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use offcore_flow::Topology;
use offcore_flow::pipeline::OnHit;
use offcore_flow::switch::{Working, Workload};
use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::host::HOST;
use offcore_gpu::layout::{Kind, MAX_BURST};
use offcore_gpu::patterns::Patterns;
use offcore_mem::Hugepages;
use offcore_port::spec::PortSpec;
use offcore_port::spec::values::{Number, Time, show_time};
use offcore_stats::lcore;
use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use crate::names::{Key, Names, Refusal};
use crate::values::{Choice, Choices, choice};

/// `[gpu]`: one lcore receives packets and collects them in bursts, a GPU or the CPU processes them, another lcore
/// sends them.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Processing of packets: none, on the CPU of the sending lcore, by a kernel per burst, by a persistent kernel, or
    /// by graphs of kernels. Default: cpu.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<Workload>")]
    pub workload: Option<Workload>,
    /// The devices, assigned to pipelines round-robin, such as cuda:0; host: threads that stand in for a GPU.
    #[serde(default, deserialize_with = "devices", skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// Memory in which a device processes packets: host memory, a copy in GPU memory, or GPU memory that network cards
    /// access. Default: host; gpu on a GPU with a work that reads payloads.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<Memory>")]
    pub memory: Option<Memory>,
    /// The work.
    #[serde(default, skip_serializing_if = "Work::is_default")]
    pub work: Work,
    /// Output port of a port's packets: the same port, its neighbour, or the next port. Default: loop.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<Topology>")]
    pub topology: Option<Topology>,
    /// Maximum packets per burst. Default: 64.
    #[serde(default, deserialize_with = "Burst::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Burst")]
    pub burst: Option<usize>,
    /// How long a packet waits for its burst to fill. Default: 100us.
    #[serde(
        default,
        deserialize_with = "BurstTimeout::optional",
        serialize_with = "BurstTimeout::write",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "BurstTimeout")]
    pub burst_timeout: Option<Duration>,
    /// Maximum bursts in flight per pipeline: a power of two. Default: 64.
    #[serde(default, deserialize_with = "slots", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Slots")]
    pub slots: Option<usize>,
    /// Number of bursts per pipeline that a persistent kernel or a graph processes concurrently. Default: 4; 32 on a
    /// GPU with a work that reads payloads.
    #[serde(default, deserialize_with = "Blocks::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Blocks")]
    pub blocks: Option<u32>,
    /// Threads per block. Default: 256.
    #[serde(default, deserialize_with = "Threads::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Threads")]
    pub threads: Option<u32>,
    /// Time without an answer after which a device is considered hung and the CPU takes over. Default: 1s.
    #[serde(
        default,
        deserialize_with = "DeviceTimeout::optional",
        serialize_with = "DeviceTimeout::write",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "DeviceTimeout")]
    pub timeout: Option<Duration>,
    /// Whether the run is profiled with a CUDA profiler. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub profile: bool,
}

type Burst = Number<1, { MAX_BURST as u64 }>;
type BurstTimeout = Time<0, 1_000_000_000>;
type DeviceTimeout = Time<1_000_000, 3_600_000_000_000>;
type Slots = Number<2, 4096>;
type Blocks = Number<1, 64>;
type Threads = Number<1, 1024>;

fn slots<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    Slots::power_of_two(deserializer).map(Some)
}

/// `gpu.work`: the work on each packet.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Work {
    /// Swap the addresses; the others also compute the payload's CRC-32C, its Internet checksum, or the lowest pattern
    /// in it. Default: swap.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<WorkKind>")]
    pub kind: Option<WorkKind>,
    /// Whether addresses are swapped. Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap: Option<bool>,
    /// With match: file of patterns, one per line, \xNN for any byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patterns: Option<PathBuf>,
    /// With match: action for packets with a match. Default: pass, or steer if steer names a port.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<OnMatch>")]
    pub on_match: Option<OnMatch>,
    /// With on_match = "mark": the DSCP. Default: 46.
    #[serde(default, deserialize_with = "Dscp::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Dscp")]
    pub mark: Option<u8>,
    /// With match: the port to which packets with a match are sent. It has no other task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steer: Option<String>,
    /// Bytes before the payload. Default: 42.
    #[serde(default, deserialize_with = "Skip::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Skip")]
    pub skip: Option<u32>,
    /// Buffer split: bytes that go into a separate buffer, so that a device gets only the rest.
    #[serde(default, deserialize_with = "SplitAt::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "SplitAt")]
    pub split_at: Option<usize>,
    /// Minimum time per packet: in sequence on a CPU, in parallel for the threads of a block on a device. Default: 0ns.
    #[serde(
        default,
        deserialize_with = "PacketTime::optional",
        serialize_with = "PacketTime::write",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "PacketTime")]
    pub packet_time: Option<Duration>,
}

type PacketTime = Time<0, 20_000_000>;
type Dscp = Number<0, 63>;
type Skip = Number<0, 65_535>;
type SplitAt = Number<14, 1024>;

/// The work on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkKind {
    Swap,
    Crc32c,
    Checksum,
    Match,
}

impl Choices for WorkKind {
    const ALL: &'static [(&'static str, Self)] = &[
        ("swap", Self::Swap),
        ("crc32c", Self::Crc32c),
        ("checksum", Self::Checksum),
        ("match", Self::Match),
    ];
}

/// The action for packets with a match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnMatch {
    /// Forward and count them.
    Pass,
    /// Forward them with another DSCP.
    Mark,
    /// Drop them.
    Drop,
    /// Drop all others.
    Only,
    /// Send them to the port of `steer`.
    Steer,
}

impl Choices for OnMatch {
    const ALL: &'static [(&'static str, Self)] = &[
        ("pass", Self::Pass),
        ("mark", Self::Mark),
        ("drop", Self::Drop),
        ("only", Self::Only),
        ("steer", Self::Steer),
    ];
}

impl Work {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    fn kind(&self) -> WorkKind {
        self.kind.unwrap_or(WorkKind::Swap)
    }
}

impl Gpu {
    /// Expedited forwarding (RFC 3246).
    const DSCP: u8 = 46;

    /// Returns the configuration of the pipelines, without patterns. `elsewhere` is the number of the port of `steer`.
    ///
    /// # Errors
    /// Settings that have no effect.
    pub fn working(
        &self,
        names: Names,
        elsewhere: Option<usize>,
        hugepages: Hugepages,
    ) -> Result<Working, Refusal> {
        self.check_device(names)?;
        self.check_work(names)?;
        let default = Working::default();
        let workload = self.workload.unwrap_or_default();
        let (memory, blocks) = self.for_work(&default);
        let work = &self.work;
        let working = Working {
            topology: self.topology.unwrap_or(default.topology),
            workload,
            devices: self.devices.clone(),
            memory,
            kind: match work.kind() {
                WorkKind::Swap => Kind::Nothing,
                WorkKind::Crc32c => Kind::Crc32c,
                WorkKind::Checksum => Kind::Checksum,
                WorkKind::Match => Kind::Match,
            },
            swap: work.swap.unwrap_or(true),
            skip: work.skip.unwrap_or(default.skip),
            split_at: work.split_at,
            forced_ns: work.packet_time.map_or(0, |time| time.as_nanos() as u32),
            patterns: None,
            burst: self.burst.unwrap_or(default.burst),
            burst_timeout: self.burst_timeout.unwrap_or(default.burst_timeout),
            slots: self.slots.unwrap_or(default.slots),
            blocks,
            threads: self.threads.unwrap_or(default.threads),
            timeout: self.timeout.unwrap_or(default.timeout),
            on_hit: self.on_hit(names)?,
            elsewhere,
            hugepages,
            profile: self.profile,
        };
        check_timeout(names, &working)?;
        Ok(working)
    }

    /// Reads the patterns of `work.patterns`.
    ///
    /// # Errors
    /// The file cannot be read, or a pattern is wrong.
    pub fn read_patterns(&self, names: Names) -> Result<Option<Arc<Patterns>>, Refusal> {
        let Some(file) = &self.work.patterns else { return Ok(None) };
        Patterns::read(file).map(|patterns| Some(Arc::new(patterns))).map_err(|error| Refusal {
            key: Key::Patterns,
            text: format!("{}: {error}", names.of(Key::Patterns)),
        })
    }

    /// Refuses settings of devices without a device.
    fn check_device(&self, names: Names) -> Result<(), Refusal> {
        let workload = self.workload.unwrap_or_default();
        let with = names.with(Key::Workload, workload.name());
        let for_device = [
            (Key::Devices, !self.devices.is_empty()),
            (Key::Memory, self.memory.is_some()),
            (Key::Profile, self.profile),
            (Key::Blocks, self.blocks.is_some()),
            (Key::Threads, self.threads.is_some()),
            (Key::GpuTimeout, self.timeout.is_some()),
        ];
        let by_device = matches!(workload, Workload::Device(_));
        if let Some((key, _)) = for_device.into_iter().find(|&(_, given)| given && !by_device) {
            let wanted = names.with(Key::Workload, "kernel, persistent or graph");
            let text = format!("{} is for a device, and {with} uses none: add {wanted}", names.of(key));
            return Err(Refusal { key, text });
        }
        if self.blocks.is_some() && workload == Workload::Device(Launch::Kernel) {
            let (blocks, wanted) = (names.of(Key::Blocks), names.with(Key::Workload, "persistent or graph"));
            let text = format!("{blocks} is for {wanted}, found {with}: leave it out");
            return Err(Refusal { key: Key::Blocks, text });
        }
        if names == Names::File && by_device && self.devices.is_empty() {
            let text = format!("{with} needs {}, such as [\"cuda:0\"] or [\"host\"]", names.of(Key::Devices));
            return Err(Refusal { key: Key::Devices, text });
        }
        Ok(())
    }

    /// Refuses settings of work that is not done.
    fn check_work(&self, names: Names) -> Result<(), Refusal> {
        let work = &self.work;
        let refuse = |key: Key, text: String| Err(Refusal { key, text });
        if self.workload == Some(Workload::None) {
            let nothing = [
                (Key::WorkKind, work.kind() != WorkKind::Swap),
                (Key::PacketTime, work.packet_time.is_some_and(|time| !time.is_zero())),
                (Key::Swap, work.swap == Some(false)),
            ];
            if let Some((key, _)) = nothing.into_iter().find(|&(_, given)| given) {
                let (found, wanted) = (
                    names.with(Key::Workload, "none"),
                    names.with(Key::Workload, "cpu, kernel, persistent or graph"),
                );
                let text = format!("{} with {found}, which does no work: add {wanted}", names.of(key));
                return refuse(key, text);
            }
        }
        let matching = names.with(Key::WorkKind, "match");
        match (work.kind() == WorkKind::Match, &work.patterns) {
            (true, None) => {
                let text = format!(
                    "{matching} needs {} with one pattern per line",
                    names.with(Key::Patterns, "FILE")
                );
                return refuse(Key::WorkKind, text);
            }
            (false, Some(file)) => {
                let given = names.with(Key::Patterns, file.display());
                return refuse(Key::Patterns, format!("{given} is for {matching}: add it"));
            }
            _ => {}
        }
        if work.swap == Some(false) && work.kind() == WorkKind::Swap && self.workload != Some(Workload::None)
        {
            let (swap, kind) = (names.of(Key::Swap), names.with(Key::WorkKind, "swap"));
            return refuse(Key::Swap, format!("{swap} with {kind}: nothing would be done; use another one"));
        }
        match (work.skip, work.split_at) {
            (Some(_), Some(_)) => {
                let (skip, split) = (names.of(Key::Skip), names.of(Key::Split));
                let text = format!(
                    "{skip} and {split}: the payload begins where packets are split; leave {skip} out"
                );
                refuse(Key::Skip, text)
            }
            (Some(_), None) if work.kind() == WorkKind::Swap => {
                let (skip, wanted) =
                    (names.of(Key::Skip), names.with(Key::WorkKind, "crc32c, checksum or match"));
                let text =
                    format!("{skip} is for {wanted}, which read payload: add one, or leave {skip} out");
                refuse(Key::Skip, text)
            }
            _ => Ok(()),
        }
    }

    /// Returns the location of packets during processing, and the number of blocks. A GPU that reads payloads uses its
    /// own memory, so that they cross the bus once, and 32 blocks, as for the figures in docs/gpu.md that compare with
    /// a core. Fewer blocks and host memory have not been measured in that comparison. The host device's blocks are
    /// threads, so a small number is best.
    fn for_work(&self, default: &Working) -> (Memory, u32) {
        let is_host = self.devices.iter().any(|device| device == HOST);
        let on_gpu = matches!(self.workload, Some(Workload::Device(_))) && !is_host;
        let by_work = match self.work.kind() != WorkKind::Swap && on_gpu {
            true => (Memory::Gpu, 32),
            false => (default.memory, default.blocks),
        };
        (self.memory.unwrap_or(by_work.0), self.blocks.unwrap_or(by_work.1))
    }

    /// Returns the action for packets with a match.
    fn on_hit(&self, names: Names) -> Result<OnHit, Refusal> {
        let work = &self.work;
        let is_match = work.kind() == WorkKind::Match;
        let refuse = |key: Key, text: String| Err(Refusal { key, text });
        let matching = names.with(Key::WorkKind, "match");
        let patterns = names.with(Key::Patterns, "FILE");
        if work.on_match.is_some() && !is_match {
            let text = format!("{} is for {matching}: add it, and {patterns}", names.of(Key::OnMatch));
            return refuse(Key::OnMatch, text);
        }
        if work.mark.is_some() && work.on_match != Some(OnMatch::Mark) {
            let text = format!("{} is for {}: add it", names.of(Key::Mark), names.with(Key::OnMatch, "mark"));
            return refuse(Key::Mark, text);
        }
        let steering = names.with(Key::OnMatch, "steer");
        match (work.on_match, &work.steer) {
            (None | Some(OnMatch::Steer), Some(_)) if is_match => Ok(OnHit::Steer),
            (None, Some(_)) => {
                let text = format!("{} is for {matching}: add it, and {patterns}", names.of(Key::Steer));
                refuse(Key::Steer, text)
            }
            (Some(OnMatch::Steer), None) => {
                let steer = names.of(Key::Steer);
                refuse(
                    Key::OnMatch,
                    format!("{steering} needs {steer}: the port that matching packets are sent to"),
                )
            }
            (Some(other), Some(_)) => {
                let steer = names.of(Key::Steer);
                refuse(Key::Steer, format!("{steer} is for {steering}, found {}", other.name_of()))
            }
            (Some(OnMatch::Drop), None) => Ok(OnHit::Drop),
            (Some(OnMatch::Only), None) => Ok(OnHit::Only),
            (Some(OnMatch::Mark), None) => Ok(OnHit::Mark(work.mark.unwrap_or(Self::DSCP))),
            (None | Some(OnMatch::Pass), None) => Ok(OnHit::Pass),
        }
    }
}

impl Gpu {
    /// Refuses ports whose packets cannot be in device memory.
    ///
    /// # Errors
    /// The first such port.
    pub fn check_ports(names: Names, memory: Memory, ports: &[PortSpec]) -> Result<(), Refusal> {
        if memory != Memory::Direct {
            return Ok(());
        }
        match ports.iter().find(|port| !matches!(port, PortSpec::Dpdk(_))) {
            Some(other) => {
                let direct = names.with(Key::Memory, "direct");
                let text = format!(
                    "{direct} has packets in the device's memory, which {other} cannot access: expected only ports dpdk:, of \
                     network cards under mlx5_core"
                );
                Err(Refusal { key: Key::Memory, text })
            }
            None => Ok(()),
        }
    }

    /// Returns two lcores per pipeline if enough are available. Otherwise pipelines share them.
    ///
    /// # Errors
    /// The kernel does not report the available lcores.
    pub fn lcores(&self, pipelines: usize) -> Result<Vec<usize>, String> {
        let mut available = lcore::available().map_err(|error| error.to_string())?;
        let wanted = 2 * pipelines.max(1);
        // The launching thread gets its own core if enough are available.
        let launches = matches!(self.workload, Some(Workload::Device(Launch::Kernel | Launch::Graph)));
        available.truncate(wanted.min(available.len().saturating_sub(launches.into()).max(2)));
        if available.len() > 1 {
            available.truncate(available.len() / 2 * 2);
        }
        Ok(available)
    }
}

/// Returns the device with a name or a number: `host`, `cuda:N`, `cuda`, `N`.
///
/// # Errors
/// The expected names.
pub fn device_name(name: &str) -> Result<String, String> {
    match name {
        HOST => Ok(HOST.into()),
        "cuda" => Ok("cuda:0".into()),
        _ => match name.strip_prefix("cuda:").unwrap_or(name).parse::<u16>() {
            Ok(number) => Ok(format!("cuda:{number}")),
            Err(_) => Err(format!("'{name}' is no device: expected host, cuda:N, or the number of a GPU")),
        },
    }
}

/// Reads the names of devices.
fn devices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let names = Vec::<String>::deserialize(deserializer)?;
    names.iter().map(|name| device_name(name).map_err(D::Error::custom)).collect()
}

/// Refuses a forced time that makes a burst take longer than the device's timeout.
fn check_timeout(names: Names, working: &Working) -> Result<(), Refusal> {
    let Working { threads, timeout, burst, forced_ns, .. } = working;
    let forced = burst.div_ceil(*threads as usize) as u32 * Duration::from_nanos((*forced_ns).into());
    if matches!(working.workload, Workload::Device(_)) && forced >= *timeout {
        let (found, limit) = match names {
            Names::Flags => (forced_ns.to_string(), format!("{} ms", timeout.as_millis())),
            Names::File => (show_time(Duration::from_nanos((*forced_ns).into())), show_time(*timeout)),
        };
        let text = format!(
            "{}: {threads} threads take {} ms for a burst of {burst} packets, longer than {}: raise that, or use smaller \
             bursts",
            names.with(Key::PacketTime, found),
            forced.as_millis(),
            names.with(Key::GpuTimeout, limit),
        );
        return Err(Refusal { key: Key::PacketTime, text });
    }
    Ok(())
}
