//! Reports of a running switch, read from the statistics page like any other process would read it.

mod decode;
mod interfaces;
mod reporter;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;

use offcore_tcp::path::PathStats;
use offcore_tcp::proto::{Info, StackCounts};
use serde::{Serialize, Serializer};

use crate::host::serve::ServeCounts;
pub use interfaces::{AddressReport, IfaceReport};
pub use reporter::Reporter;

/// Counters of one queue half.
#[derive(Clone, Debug, Default, Serialize)]
pub struct QueueReport {
    /// The port, such as `port0`.
    pub port: String,
    /// `rx` or `tx`.
    pub half: String,
    pub queue: u32,
    pub packets: u64,
    /// Bytes since the start, without FCS.
    pub bytes: u64,
    /// Packets per second over the last interval.
    pub packets_per_second: f64,
    /// Bits per second over the last interval, without FCS.
    pub bits_per_second: f64,
    /// Packets dropped since the start, by reason. Reasons without drops are omitted.
    #[serde(serialize_with = "as_map")]
    pub drops: Vec<(String, u64)>,
    /// Polls that found no free packet buffer.
    pub starved: u64,
}

/// Counters of the copy stage around one RX queue: see [`copy`](mod@crate::copy).
#[derive(Clone, Debug, Default, Serialize)]
pub struct CopyReport {
    /// The port, such as `port0`.
    pub port: String,
    pub queue: u32,
    /// Packets for which copying was started.
    pub packets: u64,
    pub bytes: u64,
    /// Packets dropped because they were longer than allowed.
    pub too_big: u64,
    /// Packets dropped because no packet buffer was available for a long time.
    pub no_buffer: u64,
    /// Polls that left packets waiting for a packet buffer.
    pub starved: u64,
}

/// Counters of the work in one pipeline: see [`pipeline`](mod@crate::pipeline).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkReport {
    /// The pipeline, such as `pipeline0`, with the number of its RX port.
    pub pipeline: String,
    pub queue: u32,
    pub bursts: u64,
    /// Packets in these bursts with a non-zero result.
    pub hits: u64,
    pub dropped: u64,
    pub marked: u64,
    /// Packets sent to another port because of their result.
    pub steered: u64,
    /// Whether the device has failed. The CPU takes over if it can.
    pub failed: bool,
    /// Packets held back because a hung device may still write them.
    pub quarantined: u64,
}

/// Counters of one channel of one worker.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ChannelReport {
    pub lcore: u32,
    /// The channel, such as `core:1`.
    pub channel: String,
    /// How workers share the channel: `bound` for one worker, `lock`, or `swq` for a shared work queue.
    pub sharing: String,
    pub submitted: u64,
    pub completed: u64,
    /// Copies that failed, were aborted or were given up.
    pub failed: u64,
    pub bytes: u64,
    pub in_flight: u64,
}

/// Where one worker's cycles were spent since the start, from the sampled bursts, and its counters.
#[derive(Clone, Debug, Default, Serialize)]
// fields-ok: plain figures
pub struct WorkerReport {
    pub lcore: u32,
    /// Share of each stage in all sampled TSC ticks, in percent.
    #[serde(serialize_with = "as_map")]
    pub stages: Vec<(String, f64)>,
    /// Share of each group of Figure 3 in the sum of the three groups, in percent.
    #[serde(serialize_with = "as_map")]
    pub groups: Vec<(String, f64)>,
    /// Copies that the core made as planned.
    pub core_copies: u64,
    /// Copies that the core finished after their channel failed.
    pub fallbacks: u64,
    /// Copies that the core made because every channel was full.
    pub overflow: u64,
    /// Channel resets because of lost copies.
    pub resets: u64,
    pub quarantined: u64,
    /// Copies by the core that had to wait for older copies by an engine.
    pub held_by_order: u64,
    /// Copies that failed because a guest's memory could not be reached.
    pub faults: u64,
    /// Number of times that a channel was taken out of service.
    pub out_of_service: u64,
    /// Bursts sent to check whether such a channel works again.
    pub probes: u64,
    /// Share of the time since the start in which the worker slept, in percent; 0 unless it sleeps when idle.
    pub asleep: f64,
    /// Number of sleeps.
    pub sleeps: u64,
    /// Number of sleeps ended by an event and not by a timeout.
    pub woken: u64,
    /// Turns that ports' queues had to wait because they had used more CPU time than others.
    pub waited: u64,
    /// The longest turn so far, in microseconds; 0 while no round was long.
    pub longest_us: f64,
    /// Number of times that the worker slept in a turn to wait for a page of a port's memory, and the total in seconds.
    pub stalls: u64,
    pub stalled: f64,
    /// CPU time of each port while turns were measured, for ports that had packets then.
    pub turns: Vec<TurnsReport>,
}

/// CPU time that a port had from a worker while turns were measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TurnsReport {
    /// Port number, from 0.
    pub port: usize,
    /// Seconds that its turns with packets took.
    pub used: f64,
    /// Seconds in which it had packets, or in which other ports waited for its next packets.
    pub active: f64,
    /// Turns that it had to wait.
    pub waited: u64,
    /// Seconds that the worker slept for its memory.
    pub stalled: f64,
}

/// Decision of mode `auto` on one worker for the copies in one size class.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DecisionReport {
    pub lcore: u32,
    /// Bytes of the longest copy in the class; `max` for the last class.
    pub up_to: String,
    /// The chosen way: `core` or `engine`.
    pub way: &'static str,
    /// Reason for the last change.
    pub reason: &'static str,
    /// TSC ticks of the worker's whole rounds per copy if the core makes all copies; 0 if not measured.
    pub core_ticks: u64,
    /// The same if an engine makes all copies.
    pub engine_ticks: u64,
    pub by_core: u64,
    pub by_engine: u64,
    /// Copies by the core that had to wait for older copies by an engine.
    pub held_by_order: u64,
    pub changes: u64,
}

/// Counters of a host's stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TcpReport {
    pub lcore: u32,
    #[serde(flatten, serialize_with = "stack_counts")]
    pub stack: StackCounts,
    #[serde(flatten, serialize_with = "path_stats")]
    pub path: PathStats,
    /// Packets dropped since the start, by reason. Reasons without drops are omitted.
    #[serde(serialize_with = "as_map")]
    pub drops: Vec<(String, u64)>,
    /// `None` unless applications in other processes are served.
    #[serde(serialize_with = "serve_counts", skip_serializing_if = "Option::is_none")]
    pub serve: Option<ServeCounts>,
}

/// A connection of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConnectionReport {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// State as in RFC 9293, such as `ESTABLISHED`.
    pub state: &'static str,
    /// Bytes received; `unread` is the number of bytes that the application has not read.
    pub received: u64,
    pub unread: u64,
    /// Bytes that the peer has acknowledged, and bytes that it has not acknowledged.
    pub acknowledged: u64,
    pub unacknowledged: u64,
    /// Bytes of payload in a segment, and bytes of the congestion window.
    pub mss: u16,
    pub cwnd: u64,
    /// Round trip time, in microseconds.
    pub srtt: u64,
    /// Retransmitted segments.
    pub again: u64,
}

impl From<&Info> for ConnectionReport {
    fn from(info: &Info) -> Self {
        let &Info { local, remote, state, received, unread, acknowledged, unacknowledged, .. } = info;
        let &Info { mss, cwnd, srtt, stats, .. } = info;
        let srtt = srtt.get();
        let again = [stats.fast, stats.timeout, stats.probes].map(u64::from).iter().sum();
        Self { local, remote, state, received, unread, acknowledged, unacknowledged, mss, cwnd, srtt, again }
    }
}

/// Serializes named values as one object, in their order.
fn as_map<S: Serializer, V: Serialize>(values: &[(String, V)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(values.iter().map(|(name, value)| (name, value)))
}

fn stack_counts<S: Serializer>(counts: &StackCounts, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(counts.named())
}

fn path_stats<S: Serializer>(stats: &PathStats, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(stats.named())
}

fn serve_counts<S: Serializer>(counts: &Option<ServeCounts>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(counts.unwrap_or_default().named())
}

/// Counters of the learning switch for one port, over all workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BridgePortReport {
    /// The port, such as `port0`.
    pub port: String,
    pub learned: u64,
    pub moved: u64,
    /// Stations behind the port that were forgotten.
    pub aged: u64,
    /// Packets whose source was not learned because the database is full.
    pub not_learned: u64,
    pub flooded: u64,
    /// Packets from the port that were dropped because of the flood limit.
    pub flood_limited: u64,
    /// Packets from the port without another port to go to.
    pub filtered: u64,
    /// Packets whose source address belongs to another port, or is missing on a locked port.
    pub refused: u64,
}

/// Counters of the learning switch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BridgeReport {
    pub addresses: u64,
    pub ports: Vec<BridgePortReport>,
}

/// A report.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// `interval` or `final`.
    pub report: &'static str,
    pub seconds: f64,
    /// Duration that the rates cover.
    pub over_seconds: f64,
    /// TSC ticks per second.
    pub tsc_hz: u64,
    pub queues: Vec<QueueReport>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<CopyReport>,
    /// The work of pipelines.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub work: Vec<WorkReport>,
    pub channels: Vec<ChannelReport>,
    pub workers: Vec<WorkerReport>,
    /// Decisions of mode `auto`. Size classes that were never used are omitted.
    pub decisions: Vec<DecisionReport>,
    /// The learning switch, in mode `l2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bridge: Option<BridgeReport>,
    /// TCP/IP hosts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tcp: Vec<TcpReport>,
    /// A host's interfaces.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<IfaceReport>,
    /// The first 1000 connections of a host, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<Vec<ConnectionReport>>,
}
