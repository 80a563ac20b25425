//! Decodes the blocks of the statistics page into a report. The counters of a block are decoded into the struct that
//! declared them.

use std::str::FromStr;
use std::time::Duration;

use offcore_dma::channel::ChannelStats;
use offcore_dma::mover::{MoverStats, Reason, Way};
use offcore_port::DropReason;
use offcore_port::stats::{PortNames, QueueCounts, RX, TX};
use offcore_stats::page::Snapshot;
use offcore_stats::stage::{Group, STAGES};
use offcore_stats::{Family, Label, Stage};
use offcore_tcp::path::PathStats;
use offcore_tcp::proto::{DropReason as StackDrop, StackCounts};

use super::{BridgePortReport, BridgeReport, ChannelReport, CopyReport, DecisionReport, QueueReport, Report};
use super::{TcpReport, TurnsReport, WorkReport, WorkerReport};
use crate::bridge::{AgedCounts, BRIDGE, BRIDGE_AGED, BRIDGE_PORT, DatabaseCounts, PortCounts};
use crate::copy::{COPY, CopyCounts};
use crate::host::serve::{ServeCounts, TCP_SERVE};
use crate::host::watched::{TCP, TCP_DROPS};
use crate::pipeline::{WORK, WorkCounts};
use crate::worker::idle::{IDLE, IdleCounts};
use crate::worker::stats::{AUTO, CHANNEL, ChannelGauges, ClassCounts, MOVER};
use crate::worker::turns::{PORT_TURNS, PortTurnCounts, TURNS, TurnCounts};

/// A block, and its counters at the time of the last report.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen<'a> {
    pub(super) block: &'a Snapshot,
    pub(super) previous: Option<&'a Snapshot>,
    /// The time since then.
    pub(super) elapsed: Duration,
    pub(super) names: &'a PortNames,
}

/// Adds a block to a report; `None` if the report cannot show it, because it lacks a label or was never used.
pub(super) type Decode = fn(&mut Report, &Seen<'_>) -> Option<()>;

/// The families in reports.
pub(super) const FAMILIES: [(&Family, Decode); 17] = [
    (&RX, |report, seen| queue(report, "rx", seen)),
    (&TX, |report, seen| queue(report, "tx", seen)),
    (&COPY, copy),
    (&WORK, work),
    (&CHANNEL, channel),
    (&STAGES, stages),
    (&MOVER, mover),
    (&AUTO, decision),
    (&IDLE, idle),
    (&TURNS, turns),
    (&PORT_TURNS, port_turns),
    (&TCP, tcp),
    (&TCP_DROPS, tcp_drops),
    (&TCP_SERVE, tcp_serve),
    (&BRIDGE_PORT, bridge_port),
    (&BRIDGE_AGED, aged),
    (&BRIDGE, bridge),
];

/// Returns the packets that a queue has counted; 0 for a block of other counters.
pub(super) fn packets(block: &Snapshot) -> u64 {
    let is_queue = block.is_of(&RX) || block.is_of(&TX);
    if is_queue { QueueCounts::decode(block).packets } else { 0 }
}

/// Adds a block to a report.
pub(super) fn add(report: &mut Report, seen: &Seen<'_>) {
    if let Some((_, decode)) = FAMILIES.iter().find(|(family, _)| seen.block.is_of(family)) {
        let _ = decode(report, seen);
    }
}

impl Seen<'_> {
    fn label(&self, label: Label) -> Option<&str> {
        self.block.label(label)
    }

    fn parse<T: FromStr>(&self, label: Label) -> Option<T> {
        self.label(label)?.parse().ok()
    }
}

fn queue(report: &mut Report, half: &str, seen: &Seen<'_>) -> Option<()> {
    let QueueCounts { packets, bytes, starved } = QueueCounts::decode(seen.block);
    let before = seen.previous.map(QueueCounts::decode).unwrap_or_default();
    let per_second = |count: u64| count as f64 / seen.elapsed.as_secs_f64().max(1e-9);
    let drops = DropReason::ALL.map(|reason| (reason.name().to_string(), seen.block.value(reason.name())));
    report.queues.push(QueueReport {
        port: seen.label(Label::Port)?.into(),
        half: half.into(),
        queue: seen.parse(Label::Queue)?,
        packets,
        bytes,
        packets_per_second: per_second(packets.wrapping_sub(before.packets)),
        bits_per_second: per_second(bytes.wrapping_sub(before.bytes)) * 8.0,
        drops: drops.into_iter().filter(|(_, packets)| *packets > 0).collect(),
        starved,
    });
    Some(())
}

fn copy(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let (port, queue) = (seen.label(Label::Port)?.into(), seen.parse(Label::Queue)?);
    let CopyCounts { packets, bytes, too_big, no_buffer, starved } = CopyCounts::decode(seen.block);
    report.copies.push(CopyReport { port, queue, packets, bytes, too_big, no_buffer, starved });
    Some(())
}

fn work(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let (pipeline, queue) = (seen.label(Label::Port)?.into(), seen.parse(Label::Queue)?);
    let WorkCounts { bursts, hits, dropped, marked, steered, failed, quarantined } =
        WorkCounts::decode(seen.block);
    let failed = failed > 0;
    let work = WorkReport { pipeline, queue, bursts, hits, dropped, marked, steered, failed, quarantined };
    report.work.push(work);
    Some(())
}

fn channel(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let ChannelStats { submitted, completed, failed, bytes } = ChannelStats::decode(seen.block);
    let ChannelGauges { in_flight } = ChannelGauges::decode(seen.block);
    report.channels.push(ChannelReport {
        lcore: seen.parse(Label::Lcore)?,
        channel: seen.label(Label::Channel)?.into(),
        sharing: seen.label(Label::Sharing)?.into(),
        submitted,
        completed,
        failed,
        bytes,
        in_flight,
    });
    Some(())
}

/// Returns the report of the worker of a block.
fn worker<'a>(report: &'a mut Report, seen: &Seen<'_>) -> Option<&'a mut WorkerReport> {
    let lcore = seen.parse(Label::Lcore)?;
    let known = report.workers.iter().position(|worker| worker.lcore == lcore);
    let index = known.unwrap_or_else(|| {
        report.workers.push(WorkerReport { lcore, ..WorkerReport::default() });
        report.workers.len() - 1
    });
    Some(&mut report.workers[index])
}

fn stages(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let worker = worker(report, seen)?;
    let ticks = |stage: Stage| seen.block.value(stage.name()) as f64;
    let percent = |part: f64, whole: f64| if whole > 0.0 { 100.0 * part / whole } else { 0.0 };
    let all: f64 = Stage::ALL.into_iter().map(ticks).sum();
    worker.stages = Stage::ALL.map(|s| (s.name().to_string(), percent(ticks(s), all))).into();
    let group = |g: Group| Stage::ALL.into_iter().filter(|s| s.group() == Some(g)).map(ticks).sum::<f64>();
    let sum: f64 = Group::ALL.into_iter().map(group).sum();
    worker.groups = Group::ALL.map(|g| (g.name().to_string(), percent(group(g), sum))).into();
    Some(())
}

fn mover(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let worker = worker(report, seen)?;
    let stats = MoverStats::decode(seen.block);
    worker.core_copies = stats.core_copies;
    worker.fallbacks = stats.fallbacks;
    worker.overflow = stats.overflow;
    worker.resets = stats.resets;
    worker.quarantined = stats.quarantined;
    worker.held_by_order = stats.held_by_order;
    worker.faults = stats.faults;
    worker.out_of_service = stats.out_of_service;
    worker.probes = stats.probes;
    Some(())
}

fn decision(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let counts = ClassCounts::decode(seen.block);
    let way = match counts.way {
        1 => Way::Core,
        2 => Way::Engine,
        _ => return None,
    };
    let reason = usize::try_from(counts.reason).ok().and_then(|number| Reason::ALL.get(number));
    let ClassCounts { by_core, by_engine, held: held_by_order, changes, core_ticks, engine_ticks, .. } =
        counts;
    report.decisions.push(DecisionReport {
        lcore: seen.parse(Label::Lcore)?,
        up_to: seen.label(Label::Class)?.into(),
        way: way.name(),
        reason: reason.map_or("unknown", |reason| reason.name()),
        core_ticks,
        engine_ticks,
        by_core,
        by_engine,
        held_by_order,
        changes,
    });
    Some(())
}

fn idle(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let (tsc_hz, seconds) = (report.tsc_hz as f64, report.seconds.max(1e-9));
    let IdleCounts { sleeps, woken, slept_ticks } = IdleCounts::decode(seen.block);
    let worker = worker(report, seen)?;
    worker.asleep = (100.0 * (slept_ticks as f64 / tsc_hz) / seconds).min(100.0);
    (worker.sleeps, worker.woken) = (sleeps, woken);
    Some(())
}

fn turns(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let tsc_hz = report.tsc_hz as f64;
    let worker = worker(report, seen)?;
    let TurnCounts { waited, longest_ticks, stalls, stalled_ticks } = TurnCounts::decode(seen.block);
    (worker.longest_us, worker.stalled) =
        (longest_ticks as f64 / tsc_hz * 1e6, stalled_ticks as f64 / tsc_hz);
    (worker.waited, worker.stalls) = (waited, stalls);
    Some(())
}

/// Adds the turns of a port, if it had packets while turns were measured.
fn port_turns(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let tsc_hz = report.tsc_hz as f64;
    let port = seen.names.number(seen.label(Label::Port)?)?;
    let PortTurnCounts { used_ticks, active_ticks, waited, stalled_ticks } =
        PortTurnCounts::decode(seen.block);
    let [used, active, stalled] =
        [used_ticks, active_ticks, stalled_ticks].map(|ticks| ticks as f64 / tsc_hz);
    let worker = worker(report, seen)?;
    if used + stalled > 0.0 {
        worker.turns.push(TurnsReport { port, used, active, waited, stalled });
    }
    Some(())
}

/// Returns the report of the host of a block.
fn host<'a>(report: &'a mut Report, seen: &Seen<'_>) -> Option<&'a mut TcpReport> {
    let lcore = seen.parse(Label::Lcore)?;
    let index = report.tcp.iter().position(|host| host.lcore == lcore).unwrap_or_else(|| {
        report.tcp.push(TcpReport { lcore, ..TcpReport::default() });
        report.tcp.len() - 1
    });
    Some(&mut report.tcp[index])
}

fn tcp(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let host = host(report, seen)?;
    (host.stack, host.path) = (StackCounts::decode(seen.block), PathStats::decode(seen.block));
    Some(())
}

fn tcp_serve(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    host(report, seen)?.serve = Some(ServeCounts::decode(seen.block));
    Some(())
}

fn tcp_drops(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let drops = StackDrop::ALL.map(|reason| (reason.name().to_string(), seen.block.value(reason.name())));
    host(report, seen)?.drops = drops.into_iter().filter(|(_, packets)| *packets > 0).collect();
    Some(())
}

/// Returns the learning switch's report of the block's port.
fn bridged<'a>(bridge: &'a mut BridgeReport, seen: &Seen<'_>) -> Option<&'a mut BridgePortReport> {
    let name = seen.label(Label::Port)?;
    let known = bridge.ports.iter().position(|port| port.port == name);
    let index = known.unwrap_or_else(|| {
        bridge.ports.push(BridgePortReport { port: name.into(), ..Default::default() });
        bridge.ports.len() - 1
    });
    Some(&mut bridge.ports[index])
}

/// Adds the counters of one worker for a port.
fn bridge_port(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    let port = bridged(report.bridge.get_or_insert_default(), seen)?;
    let PortCounts { learned, moved, not_learned, flooded, flood_limited, filtered, refused } =
        PortCounts::decode(seen.block);
    port.learned += learned;
    port.moved += moved;
    port.not_learned += not_learned;
    port.flooded += flooded;
    port.flood_limited += flood_limited;
    port.filtered += filtered;
    port.refused += refused;
    Some(())
}

fn bridge(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    report.bridge.get_or_insert_default().addresses = DatabaseCounts::decode(seen.block).addresses;
    Some(())
}

fn aged(report: &mut Report, seen: &Seen<'_>) -> Option<()> {
    bridged(report.bridge.get_or_insert_default(), seen)?.aged = AgedCounts::decode(seen.block).aged;
    Some(())
}
