//! Reports of a running switch, read from the statistics page like any other process would read it.

mod interfaces;

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use offcore_dma::mover::{Reason, Way};
use offcore_stats::page::{PageError, Reader, Snapshot};
use offcore_stats::stage::Group;
use offcore_stats::{Stage, tsc};
use offcore_tcp::proto::Info;
use serde::{Serialize, Serializer};

use crate::host::watched::{HostState, MOST};
pub use interfaces::{AddressReport, IfaceReport};

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
    /// See [`HOST_COUNTERS`](crate::host::watched::HOST_COUNTERS).
    #[serde(flatten, serialize_with = "as_map")]
    pub counts: Vec<(String, u64)>,
    /// Packets dropped since the start, by reason. Reasons without drops are omitted.
    #[serde(serialize_with = "as_map")]
    pub drops: Vec<(String, u64)>,
    /// See [`ServeCounts`](crate::host::serve::ServeCounts). Empty unless applications in other processes are served.
    #[serde(serialize_with = "as_map", skip_serializing_if = "Vec::is_empty")]
    pub serve: Vec<(String, u64)>,
}

impl TcpReport {
    /// Returns the counter `name`.
    pub fn count(&self, name: &str) -> u64 {
        self.counts.iter().find(|(known, _)| known == name).map_or(0, |(_, count)| *count)
    }

    /// Returns the counter `name` of the server for applications in other processes.
    pub fn served(&self, name: &str) -> u64 {
        self.serve.iter().find(|(known, _)| known == name).map_or(0, |(_, count)| *count)
    }
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

/// Creates reports from a statistics page.
#[derive(Debug)]
pub struct Reporter {
    reader: Reader,
    started: Instant,
    /// Last check before any packet was counted.
    quiet: Instant,
    /// Number of packets, and the time of the check that saw it change.
    moved: (u64, Instant),
    last: Option<(Instant, Vec<Snapshot>)>,
    host: Arc<HostState>,
}

impl Reporter {
    /// Creates a reporter for `reader`'s page and a host's state.
    pub fn new(reader: Reader, host: Arc<HostState>) -> Self {
        let started = Instant::now();
        Self { reader, started, quiet: started, moved: (0, started), last: None, host }
    }

    /// Checks whether packets arrive or leave. Call it regularly: the rates of a first report cover the time in which
    /// they do.
    ///
    /// # Errors
    /// If the page is damaged.
    pub fn look(&mut self) -> Result<(), PageError> {
        let now = Instant::now();
        let snapshot = self.reader.read()?;
        let queues = snapshot.iter().filter(|block| block.name.starts_with("port"));
        match queues.map(|block| value(block, "packets")).sum::<u64>() {
            0 => self.quiet = now,
            packets if packets != self.moved.0 => self.moved = (packets, now),
            _ => {}
        }
        Ok(())
    }

    /// Returns the current counters. Rates cover the time since the last report. In the first report, they cover the
    /// time in which [packets moved](Self::look), or the whole time if none did.
    ///
    /// # Errors
    /// If the page is damaged.
    pub fn report(&mut self, kind: &'static str) -> Result<Report, PageError> {
        let now = Instant::now();
        let snapshot = self.reader.read()?;
        let elapsed = match &self.last {
            Some((at, _)) => now - *at,
            None if self.moved.0 > 0 => self.moved.1.saturating_duration_since(self.quiet),
            None => now - self.quiet,
        };
        let before = self.last.as_ref().map_or(&[][..], |(_, blocks)| blocks);
        let mut report = Report {
            report: kind,
            seconds: (now - self.started).as_secs_f64(),
            over_seconds: elapsed.as_secs_f64(),
            tsc_hz: tsc::hz(),
            ..Report::default()
        };
        for block in &snapshot {
            let previous = before.iter().find(|b| b.name == block.name);
            add(&mut report, block, previous, elapsed);
        }
        let interfaces = self.host.interfaces.lock().unwrap_or_else(PoisonError::into_inner);
        let interfaces = interfaces.iter().enumerate();
        report.interfaces = interfaces.map(|(number, info)| IfaceReport::new(number, info)).collect();
        report.connections = self.host.connections.as_ref().map(|workers| {
            let mut all = Vec::new();
            for connections in workers {
                let connections = connections.lock().unwrap_or_else(PoisonError::into_inner);
                all.extend(connections.iter().map(ConnectionReport::from));
            }
            all.truncate(MOST);
            all
        });
        self.last = Some((now, snapshot));
        Ok(report)
    }
}

fn decisions(lcore: u32, block: &Snapshot) -> impl Iterator<Item = DecisionReport> {
    let names = block.counters.iter().map(|(name, _)| name);
    let classes = names.filter_map(|name| name.strip_prefix("auto_")?.strip_suffix("_way"));
    classes.filter_map(move |class| {
        let get = |what: &str| value(block, &format!("auto_{class}_{what}"));
        let way = match get("way") {
            1 => Way::Core,
            2 => Way::Engine,
            _ => return None,
        };
        let reason = usize::try_from(get("reason")).ok().and_then(|number| Reason::ALL.get(number));
        Some(DecisionReport {
            lcore,
            up_to: class.into(),
            way: way.name(),
            reason: reason.map_or("unknown", |reason| reason.name()),
            core_ticks: get("core_ticks"),
            engine_ticks: get("engine_ticks"),
            by_core: get("by_core"),
            by_engine: get("by_engine"),
            held_by_order: get("held"),
            changes: get("changes"),
        })
    })
}

fn value(block: &Snapshot, name: &str) -> u64 {
    block.counters.iter().find(|(n, _)| n == name).map_or(0, |(_, v)| *v)
}

/// Sets the report's fields (`=`), or adds to them (`+=`), from the block's counters with the same names.
macro_rules! read {
    ($block:ident, $report:ident $sets:tt $($counter:ident)+) => {
        $($report.$counter $sets value($block, stringify!($counter));)+
    };
}

fn bridge_port<'a>(report: &'a mut BridgeReport, name: &str) -> &'a mut BridgePortReport {
    let known = report.ports.iter().position(|port| port.port == name);
    let index = known.unwrap_or(report.ports.len());
    if known.is_none() {
        report.ports.push(BridgePortReport { port: name.into(), ..Default::default() });
    }
    &mut report.ports[index]
}

/// Adds a block of the learning switch: `aged`, or the block of a port from one worker.
fn bridge(report: &mut BridgeReport, what: &str, block: &Snapshot) {
    if let Some((name, _)) = what.split_once('/') {
        let port = bridge_port(report, name);
        read!(block, port += learned moved not_learned flooded flood_limited filtered refused);
        return;
    }
    for (name, value) in block.counters.iter().filter(|(name, _)| name != "addresses") {
        bridge_port(report, name).aged = *value;
    }
    report.addresses = value(block, "addresses");
}

/// Adds a block. Blocks are named `portN/rxQ`, `portN/rxQ/copy`, `pipelineN/workQ`, `lcoreN/channel/NAME/SHARING`,
/// `lcoreN/stages`, `lcoreN/mover`, `lcoreN/idle`, `lcoreN/turns`, `lcoreN/tcp`, `lcoreN/tcp_drops` and
/// `lcoreN/tcp_serve`. Blocks of the learning switch are named `bridge/aged` and `bridge/portN/lcoreN`.
fn add(report: &mut Report, block: &Snapshot, previous: Option<&Snapshot>, elapsed: Duration) {
    let Some((owner, what)) = block.name.split_once('/') else { return };
    if owner == "bridge" {
        return bridge(report.bridge.get_or_insert_default(), what, block);
    }
    let Some(lcore) = owner.strip_prefix("lcore").and_then(|n| n.parse().ok()) else {
        return port(report, owner, what, block, previous, elapsed);
    };
    if let Some(name) = what.strip_prefix("channel/") {
        return report.channels.push(channel(lcore, name, block));
    }
    if let Some(what) = what.strip_prefix("tcp") {
        return tcp(report, lcore, what, block);
    }
    let known = report.workers.iter().position(|w| w.lcore == lcore);
    let index = known.unwrap_or_else(|| {
        report.workers.push(WorkerReport { lcore, ..WorkerReport::default() });
        report.workers.len() - 1
    });
    let worker = &mut report.workers[index];
    match what {
        "idle" => {
            let slept = value(block, "slept_ticks") as f64 / report.tsc_hz as f64;
            worker.asleep = (100.0 * slept / report.seconds.max(1e-9)).min(100.0);
            read!(block, worker = sleeps woken);
        }
        "turns" => {
            let seconds = |counter| value(block, counter) as f64 / report.tsc_hz as f64;
            (worker.longest_us, worker.stalled) = (seconds("longest_ticks") * 1e6, seconds("stalled_ticks"));
            read!(block, worker = waited stalls);
            worker.turns = turns(block, report.tsc_hz);
        }
        "stages" => shares(worker, block),
        "mover" => {
            read!(block, worker = core_copies fallbacks overflow resets quarantined held_by_order);
            read!(block, worker = faults out_of_service probes);
            report.decisions.extend(decisions(lcore, block));
        }
        _ => {}
    }
}

/// Returns the turns of ports that had packets while turns were measured.
fn turns(block: &Snapshot, tsc_hz: u64) -> Vec<TurnsReport> {
    let of_port = |port: usize| {
        let count = |what| value(block, &format!("port{port}_{what}"));
        let [used, active, stalled] = ["used_ticks", "active_ticks", "stalled_ticks"]
            .map(|counter| count(counter) as f64 / tsc_hz as f64);
        TurnsReport { port, used, active, waited: count("waited"), stalled }
    };
    (0..block.counters.len()).map(of_port).filter(|turns| turns.used + turns.stalled > 0.0).collect()
}

/// Adds a block of a host: its counters, its drops, or the counters of its server.
fn tcp(report: &mut Report, lcore: u32, what: &str, block: &Snapshot) {
    // copy-ok: names and numbers, for a report
    let counts = block.counters.clone();
    let at = report.tcp.iter().position(|host| host.lcore == lcore).unwrap_or_else(|| {
        report.tcp.push(TcpReport { lcore, ..TcpReport::default() });
        report.tcp.len() - 1
    });
    let host = &mut report.tcp[at];
    match what {
        "_drops" => host.drops = counts.into_iter().filter(|(_, count)| *count > 0).collect(),
        "_serve" => host.serve = counts,
        _ => host.counts = counts,
    }
}

/// Adds a block of one queue of a port or of a pipeline.
fn port(
    report: &mut Report,
    owner: &str,
    what: &str,
    block: &Snapshot,
    previous: Option<&Snapshot>,
    elapsed: Duration,
) {
    if let Some(queue) = what.strip_prefix("rx").and_then(|queue| queue.strip_suffix("/copy")?.parse().ok()) {
        let mut copy = CopyReport { port: owner.into(), queue, ..Default::default() };
        read!(block, copy = packets bytes too_big no_buffer starved);
        report.copies.push(copy);
    } else if let Some(queue) = what.strip_prefix("work").and_then(|queue| queue.parse().ok()) {
        let failed = value(block, "failed") > 0;
        let mut work = WorkReport { pipeline: owner.into(), queue, failed, ..Default::default() };
        read!(block, work = bursts hits dropped marked steered quarantined);
        report.work.push(work);
    } else {
        report.queues.extend(queue(owner, what, block, previous, elapsed));
    }
}

/// Returns the counters of the channel `NAME/SHARING`, or `NAME/SHARING#N`.
fn channel(lcore: u32, name: &str, block: &Snapshot) -> ChannelReport {
    let name = name.split_once('#').map_or(name, |(name, _)| name);
    let (channel, sharing) = name.rsplit_once('/').unwrap_or((name, ""));
    let (channel, sharing) = (channel.into(), sharing.into());
    let mut report = ChannelReport { lcore, channel, sharing, ..Default::default() };
    read!(block, report = submitted completed failed bytes in_flight);
    report
}

fn queue(
    port: &str,
    what: &str,
    block: &Snapshot,
    previous: Option<&Snapshot>,
    elapsed: Duration,
) -> Option<QueueReport> {
    let (half, index) = what.split_at_checked(2)?;
    let rate = |name| {
        let before = previous.map_or(0, |b| value(b, name));
        (value(block, name) - before) as f64 / elapsed.as_secs_f64().max(1e-9)
    };
    let reasons = offcore_port::DropReason::ALL.map(offcore_port::DropReason::name);
    let drops = reasons.iter().map(|&r| (r.to_string(), value(block, r))).filter(|(_, n)| *n > 0);
    let mut report = QueueReport {
        port: port.into(),
        half: half.into(),
        queue: index.parse().ok()?,
        packets_per_second: rate("packets"),
        bits_per_second: rate("bytes") * 8.0,
        drops: drops.collect(),
        ..Default::default()
    };
    read!(block, report = packets bytes starved);
    Some(report)
}

fn shares(worker: &mut WorkerReport, block: &Snapshot) {
    let ticks = |stage: Stage| value(block, stage.name()) as f64;
    let percent = |part: f64, whole: f64| if whole > 0.0 { 100.0 * part / whole } else { 0.0 };
    let all: f64 = Stage::ALL.into_iter().map(ticks).sum();
    worker.stages = Stage::ALL.map(|s| (s.name().to_string(), percent(ticks(s), all))).into();
    let group = |g: Group| Stage::ALL.into_iter().filter(|s| s.group() == Some(g)).map(ticks).sum::<f64>();
    let sum: f64 = Group::ALL.into_iter().map(group).sum();
    worker.groups = Group::ALL.map(|g| (g.name().to_string(), percent(group(g), sum))).into();
}
