//! What a running switch tells: read from the statistics page, as any other process would read it.

use std::time::{Duration, Instant};

use offcore_stats::page::{PageError, Reader, Snapshot};
use offcore_stats::stage::Group;
use offcore_stats::{Stage, tsc};
use serde::{Serialize, Serializer};

/// Counters of one queue half.
#[derive(Clone, Debug, Serialize)]
pub struct QueueReport {
    /// Such as `port0`.
    pub port: String,
    /// `rx` or `tx`.
    pub half: String,
    /// Queue index.
    pub queue: u32,
    /// Packets since the start.
    pub packets: u64,
    /// Bytes since the start, without FCS.
    pub bytes: u64,
    /// Packets a second over the last interval.
    pub packets_per_second: f64,
    /// Bits a second over the last interval, without FCS.
    pub bits_per_second: f64,
    /// Packets dropped since the start, by reason; reasons without drops are left out.
    #[serde(serialize_with = "as_map")]
    pub drops: Vec<(String, u64)>,
    /// Polls that found no free packet buffer.
    pub starved: u64,
}

/// Counters of one channel of one worker.
#[derive(Clone, Debug, Serialize)]
pub struct ChannelReport {
    /// The worker's lcore.
    pub lcore: u32,
    /// The channel, such as `core:1`.
    pub channel: String,
    /// Copies accepted.
    pub submitted: u64,
    /// Copies completed.
    pub completed: u64,
    /// Copies failed, aborted or given up.
    pub failed: u64,
    /// Bytes copied.
    pub bytes: u64,
    /// Copies in flight.
    pub in_flight: u64,
}

/// Where one worker's cycles went since the start, from the sampled bursts.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerReport {
    /// The worker's lcore.
    pub lcore: u32,
    /// Share of all sampled TSC ticks by stage, in percent.
    #[serde(serialize_with = "as_map")]
    pub stages: Vec<(String, f64)>,
    /// Share by Figure 3's group, in percent of the three groups' sum.
    #[serde(serialize_with = "as_map")]
    pub groups: Vec<(String, f64)>,
    /// Copies made by the core because that was the plan.
    pub core_copies: u64,
    /// Copies that the core finished for a channel that failed.
    pub fallbacks: u64,
    /// Copies that the core made because every channel was full.
    pub overflow: u64,
    /// Channel resets because of lost copies.
    pub resets: u64,
    /// Copies held in quarantine.
    pub quarantined: u64,
}

/// Named values as one object, in their order.
fn as_map<S: Serializer, V: Serialize>(values: &[(String, V)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(values.iter().map(|(name, value)| (name, value)))
}

/// One report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `interval` or `final`.
    pub report: &'static str,
    /// Seconds since the start.
    pub seconds: f64,
    /// TSC ticks a second.
    pub tsc_hz: u64,
    /// The queues.
    pub queues: Vec<QueueReport>,
    /// The channels.
    pub channels: Vec<ChannelReport>,
    /// The workers.
    pub workers: Vec<WorkerReport>,
}

/// Makes reports from a statistics page.
#[derive(Debug)]
pub struct Reporter {
    reader: Reader,
    started: Instant,
    last: Option<(Instant, Vec<Snapshot>)>,
}

impl Reporter {
    /// A reporter over `reader`'s page.
    pub fn new(reader: Reader) -> Self {
        Self { reader, started: Instant::now(), last: None }
    }

    /// The counters now; rates are over the time since the last report.
    ///
    /// # Errors
    /// When the page is damaged.
    pub fn report(&mut self, kind: &'static str) -> Result<Report, PageError> {
        let now = Instant::now();
        let snapshot = self.reader.read()?;
        let elapsed = now - self.last.as_ref().map_or(self.started, |(at, _)| *at);
        let before = self.last.as_ref().map_or(&[][..], |(_, blocks)| blocks);
        let mut report = Report {
            report: kind,
            seconds: (now - self.started).as_secs_f64(),
            tsc_hz: tsc::hz(),
            queues: Vec::new(),
            channels: Vec::new(),
            workers: Vec::new(),
        };
        for block in &snapshot {
            let previous = before.iter().find(|b| b.name == block.name);
            add(&mut report, block, previous, elapsed);
        }
        self.last = Some((now, snapshot));
        Ok(report)
    }
}

fn value(block: &Snapshot, name: &str) -> u64 {
    block.counters.iter().find(|(n, _)| n == name).map_or(0, |(_, v)| *v)
}

/// Blocks are named `portN/rxQ`, `lcoreN/channel/NAME`, `lcoreN/stages` and `lcoreN/mover`.
fn add(report: &mut Report, block: &Snapshot, previous: Option<&Snapshot>, elapsed: Duration) {
    let Some((owner, what)) = block.name.split_once('/') else { return };
    let Some(lcore) = owner.strip_prefix("lcore").and_then(|n| n.parse().ok()) else {
        report.queues.extend(queue(owner, what, block, previous, elapsed));
        return;
    };
    if let Some(name) = what.strip_prefix("channel/") {
        let get = |name| value(block, name);
        report.channels.push(ChannelReport {
            lcore,
            channel: name.split_once('#').map_or(name, |(name, _)| name).into(),
            submitted: get("submitted"),
            completed: get("completed"),
            failed: get("failed"),
            bytes: get("bytes"),
            in_flight: get("in_flight"),
        });
        return;
    }
    let known = report.workers.iter().position(|w| w.lcore == lcore);
    let index = known.unwrap_or_else(|| {
        report.workers.push(WorkerReport {
            lcore,
            stages: Vec::new(),
            groups: Vec::new(),
            core_copies: 0,
            fallbacks: 0,
            overflow: 0,
            resets: 0,
            quarantined: 0,
        });
        report.workers.len() - 1
    });
    let worker = &mut report.workers[index];
    match what {
        "stages" => shares(worker, block),
        "mover" => {
            worker.core_copies = value(block, "core_copies");
            worker.fallbacks = value(block, "fallbacks");
            worker.overflow = value(block, "overflow");
            worker.resets = value(block, "resets");
            worker.quarantined = value(block, "quarantined");
        }
        _ => {}
    }
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
    let reasons = offcore_port::Drop::ALL.map(offcore_port::Drop::name);
    let drops = reasons.iter().map(|&r| (r.to_string(), value(block, r))).filter(|(_, n)| *n > 0);
    Some(QueueReport {
        port: port.into(),
        half: half.into(),
        queue: index.parse().ok()?,
        packets: value(block, "packets"),
        bytes: value(block, "bytes"),
        packets_per_second: rate("packets"),
        bits_per_second: rate("bytes") * 8.0,
        drops: drops.collect(),
        starved: value(block, "starved"),
    })
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
