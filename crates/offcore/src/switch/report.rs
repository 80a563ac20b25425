//! Writes a switch's reports: tables as text, or JSON with one object per line.

mod tcp;

use std::fmt::Write;
use std::time::Duration;

use offcore_flow::pktgen::rate::WIRE_OVERHEAD;
use offcore_flow::report::{BridgeReport, ChannelReport, DecisionReport, QueueReport, Report};
use offcore_flow::report::{TurnsReport, WorkerReport};
use offcore_port::PeerReport;
use offcore_port::generator::GenReport;
use offcore_port::stats::is_port;
use offcore_stats::Stage;
use offcore_stats::stage::Group;
use offcore_wire::ethernet;
use serde::Serialize;

use crate::output::table::{SHORTEST, columns, rate, wrapped};

/// A report with the workers' counters and the ports' data.
#[derive(Debug, Serialize)]
pub(crate) struct Line<'a> {
    /// The workers' counters.
    #[serde(flatten)]
    pub report: &'a Report,
    pub ports: &'a [PortLine],
    /// The reason for the stop, in the final report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<StoppedBy>,
    /// Packets whose copies were never completed, in the final report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unfinished: Option<usize>,
    /// The measurement, in the final report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measurement>,
}

impl<'a> Line<'a> {
    /// Creates a report that is not the final one.
    pub(crate) fn interval(report: &'a Report, ports: &'a [PortLine]) -> Self {
        Self { report, ports, stopped_by: None, unfinished: None, measured: None }
    }
}

/// Received packets, and their time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Measurement {
    pub packets: u64,
    /// Their bytes, without FCS.
    pub bytes: u64,
    /// Seconds from before the first packet until after the last, with a resolution of one millisecond.
    pub seconds: f64,
    /// Million packets per second, unless the time was too short.
    pub mpps: Option<f64>,
    /// Gbit/s on the wire, including FCS, preambles and gaps.
    pub gbps_l1: Option<f64>,
}

impl Measurement {
    /// Creates a measurement of these packets in this time.
    pub(crate) fn new(packets: u64, bytes: u64, time: Duration) -> Self {
        let seconds = time.as_secs_f64();
        let per_second = |what: f64| (seconds >= SHORTEST).then(|| what / seconds);
        let bits = bytes as f64 * 8.0 + packets as f64 * ON_WIRE;
        let (mpps, gbps_l1) = (per_second(packets as f64 / 1e6), per_second(bits / 1e9));
        Self { packets, bytes, seconds, mpps, gbps_l1 }
    }
}

/// The reason for the stop of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StoppedBy {
    /// A command, or the end of commands.
    Command,
    /// `--count`, or the end of a capture.
    Count,
    /// SIGINT, SIGTERM or SIGHUP.
    Signal,
    /// `--duration`.
    Duration,
    /// The number of packets of `--packets` was reached.
    Packets,
    /// `--until-idle`.
    Idle,
    /// The reader has closed the output.
    Output,
    /// The parent process has ended.
    Parent,
    /// A worker ended by itself.
    Worker,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PortLine {
    /// The port's name, such as `port0`.
    pub port: String,
    /// The port as written on the command line.
    pub name: String,
    /// Its Ethernet address.
    pub mac: String,
    /// The port's description of its state.
    pub status: String,
    /// The other end of a vhost port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<PeerReport>,
    /// The counters of a generator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generator: Option<Generator>,
}

/// [`GenReport`] with stable names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Generator {
    pub sent: u64,
    pub received: u64,
    pub verified: u64,
    /// Missing numbers below the highest received one, for each flow. `None` if nothing was received.
    pub lost: Option<u64>,
    /// Packets that were sent and have not returned (yet). `None` if nothing was received, or packets of other senders.
    pub missing: Option<u64>,
    pub reordered: u64,
    pub duplicates: u64,
    pub corrupt: u64,
    pub foreign: u64,
}

impl From<GenReport> for Generator {
    fn from(report: GenReport) -> Self {
        let missing = report.missing();
        let GenReport { sent, received, verified, lost, reordered, duplicates, corrupt, foreign, .. } =
            report;
        let lost = (received > 0).then_some(lost);
        Self { sent, received, verified, lost, missing, reordered, duplicates, corrupt, foreign }
    }
}

pub(crate) fn tables(line: &Line<'_>) -> String {
    let report = line.report;
    let mut text = heading(line);
    text += &queues(&report.queues, report.over_seconds);
    text += &channels(&report.channels);
    if let Some(learning) = &report.bridge {
        text += &bridge(learning);
    }
    text += &wrapped(&tcp::hosts(report));
    text += &wrapped(&tcp::interfaces(report));
    text += &tcp::connections(report);
    text += &costs(line);
    text
}

/// Formats the end of a report: the distribution of cycles, the copying engines, the decisions of mode `auto`, and the
/// ports' states.
pub(crate) fn costs(line: &Line<'_>) -> String {
    let report = line.report;
    let mut text = stages(&report.workers);
    text += &groups(&report.workers);
    for worker in &report.workers {
        text += &wrapped(&core_copies(worker));
    }
    text += &decisions(&report.decisions);
    text += &wrapped(&port_statuses(line));
    text
}

/// Formats the heading of a report.
pub(crate) fn heading(line: &Line<'_>) -> String {
    match line.stopped_by {
        None => format!("── {:.1} s\n", line.report.seconds),
        Some(_) => {
            format!("══ {:.1} s in all, rates from the first packet to the last\n", line.report.seconds)
        }
    }
}

/// Formats the end of the final report: the ports' states, and unfinished copies.
fn port_statuses(line: &Line<'_>) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    if line.stopped_by.is_some() {
        for port in line.ports {
            let _ = writeln!(text, "  {} {}: {}", port.port, port.name, port.status);
        }
    }
    if let Some(unfinished @ 1..) = line.unfinished {
        let _ = writeln!(text, "  {unfinished} packets in flight were never completed");
    }
    text
}

/// Bits per frame on the wire in addition to its bytes: FCS, preamble and gap.
const ON_WIRE: f64 = ((ethernet::FCS_LEN + WIRE_OVERHEAD) * 8) as f64;

/// Formats the number of packets of queues and their rates: packets per second, and bits per second on the wire.
pub(crate) fn traffic(queues: &[&QueueReport], seconds: f64) -> [String; 3] {
    let sum = |of: fn(&QueueReport) -> f64| queues.iter().fold(0.0, |sum, queue| sum + of(queue));
    let packets = sum(|queue| queue.packets_per_second);
    [
        queues.iter().map(|queue| queue.packets).sum::<u64>().to_string(),
        rate(packets, seconds),
        rate(sum(|queue| queue.bits_per_second) + packets * ON_WIRE, seconds),
    ]
}

/// Formats the packets of all ports, of each port, and of its queues if it has several.
pub(crate) fn queues(queues: &[QueueReport], seconds: f64) -> String {
    let row = |name: String, all: &[&QueueReport]| {
        let [packets, rate, bits] = traffic(all, seconds);
        [name, packets, rate, bits, dropped(all)]
    };
    let of = |port: Option<&str>, half: &str| -> Vec<&QueueReport> {
        // Packets that a port passes to a pipeline are not counted twice.
        let is_it = |queue: &&QueueReport| {
            queue.half == half && port.map_or(is_port(&queue.port), |port| queue.port == port)
        };
        queues.iter().filter(is_it).collect()
    };
    let mut ports: Vec<&str> = Vec::new();
    for queue in queues {
        if !ports.contains(&&*queue.port) {
            ports.push(&queue.port);
        }
    }
    let halves = |port| ["rx", "tx"].map(|half| (port, half, of(port, half)));
    let several = ports.iter().filter(|port| is_port(port)).count() > 1;
    let all = halves(None).into_iter().filter(|_| several);
    let each = ports.iter().flat_map(|port| halves(Some(*port)));
    let mut rows = Vec::new();
    for (port, half, queues) in all.chain(each).filter(|(.., queues)| !queues.is_empty()) {
        rows.push(row(format!("{} {half}", port.unwrap_or("all")), &queues));
        let several = queues.iter().filter(|_| port.is_some() && queues.len() > 1);
        rows.extend(several.map(|queue| row(format!("  {half}q{}", queue.queue), &[queue])));
    }
    columns("<port|packets|packets/s|bit/s (L1)|<dropped", rows)
}

/// Formats the reasons for drops with their counts, and how often the pool was empty.
fn dropped(queues: &[&QueueReport]) -> String {
    let mut reasons: Vec<(&str, u64)> = Vec::new();
    for (reason, n) in queues.iter().flat_map(|queue| &queue.drops) {
        match reasons.iter_mut().find(|(known, _)| known == reason) {
            Some((_, count)) => *count += n,
            None => reasons.push((reason, *n)),
        }
    }
    let mut parts: Vec<String> = reasons.iter().map(|(reason, n)| format!("{reason} {n}")).collect();
    let starved: u64 = queues.iter().map(|queue| queue.starved).sum();
    if starved > 0 {
        parts.push(format!("(pool empty in {starved} polls)"));
    }
    if parts.is_empty() { "-".into() } else { parts.join(", ") }
}

/// Formats a line for each channel. A failed copy was completed by the core.
pub(crate) fn channels(channels: &[ChannelReport]) -> String {
    let rows = channels.iter().map(|channel| {
        [
            format!("lcore{} {}", channel.lcore, channel.channel),
            if channel.sharing == "bound" { "-".into() } else { channel.sharing.clone() },
            channel.submitted.to_string(),
            channel.completed.to_string(),
            channel.failed.to_string(),
            channel.in_flight.to_string(),
            channel.bytes.to_string(),
        ]
    });
    columns("<channel|<shared by|copies submitted|completed|failed|in flight|bytes", rows)
}

/// Formats the learning switch's table, and counters of packets that were not simply forwarded.
fn bridge(bridge: &BridgeReport) -> String {
    let rows = bridge.ports.iter().map(|port| {
        [
            port.port.clone(),
            port.learned.to_string(),
            port.moved.to_string(),
            port.aged.to_string(),
            port.not_learned.to_string(),
            port.flooded.to_string(),
            port.flood_limited.to_string(),
            port.filtered.to_string(),
            port.refused.to_string(),
        ]
    });
    columns("<bridge|learned|moved|aged|not learned|flooded|over flood limit|filtered|refused", rows)
        + &format!("  {} addresses known\n", bridge.addresses)
}

/// Formats the decisions of mode `auto` for each size with the reasons.
fn decisions(decisions: &[DecisionReport]) -> String {
    let rows = decisions.iter().map(|decision| {
        [
            format!("lcore{} {} B", decision.lcore, decision.up_to),
            decision.way.into(),
            decision.reason.into(),
            decision.core_ticks.to_string(),
            decision.engine_ticks.to_string(),
            decision.by_core.to_string(),
            decision.by_engine.to_string(),
            decision.held_by_order.to_string(),
            decision.changes.to_string(),
        ]
    });
    columns("<copies of up to|<by|<because|core: ticks|engine: ticks|by core|by engine|held|changes", rows)
}

fn stages(workers: &[WorkerReport]) -> String {
    let heads = ["<cycles, %"].into_iter().chain(Stage::ALL.map(Stage::name));
    shares(heads.collect(), workers, |worker| &worker.stages)
}

/// Formats Figure 3's groups. Each heading names the stages that it sums.
fn groups(workers: &[WorkerReport]) -> String {
    let head = |group: Group| {
        let stages = Stage::ALL.into_iter().filter(|stage| stage.group() == Some(group));
        format!("{group} ({})", stages.map(Stage::name).collect::<Vec<_>>().join("+"))
    };
    let heads = Group::ALL.map(head);
    let heads = ["<busy cycles, %"].into_iter().chain(heads.iter().map(String::as_str));
    shares(heads.collect(), workers, |worker| &worker.groups)
}

fn shares(
    heads: Vec<&str>,
    workers: &[WorkerReport],
    values: impl Fn(&WorkerReport) -> &[(String, f64)],
) -> String {
    let rows = workers.iter().map(|worker| {
        let percent = values(worker).iter().map(|(_, percent)| format!("{percent:.1}"));
        [format!("lcore{}", worker.lcore)].into_iter().chain(percent).collect::<Vec<_>>()
    });
    columns(&heads.join("|"), rows)
}

/// Describes the core's copies. Rare events are only shown if they happened.
fn core_copies(worker: &WorkerReport) -> String {
    let head = format!("  lcore{} made {} copies itself", worker.lcore, worker.core_copies);
    let mut text = head.clone();
    for (count, what) in [
        (worker.overflow, "of them because channels were full or out of service"),
        (worker.fallbacks, "more for a channel that failed"),
        (worker.resets, "channel resets"),
        (worker.quarantined, "copies put in quarantine"),
        (worker.held_by_order, "of the core's copies held by order"),
        (worker.faults, "page faults in guests' memory"),
        (worker.out_of_service, "times a channel out of service"),
        (worker.probes, "probes of such a channel"),
    ] {
        if count > 0 {
            let _ = write!(text, ", {count} {what}");
        }
    }
    if worker.sleeps > 0 {
        let _ =
            write!(text, "; it slept {:.1}\u{a0}% of the time, in {} sleeps", worker.asleep, worker.sleeps);
    }
    if worker.waited > 0 {
        let _ = write!(
            text,
            "; {} turns waited for other ports, the longest turn took {:.0} us",
            worker.waited, worker.longest_us
        );
        // Over a shorter time, the share is based on only a few turns.
        for TurnsReport { port, used, active, .. } in
            worker.turns.iter().filter(|turns| turns.active >= SHORTEST)
        {
            let share = 100.0 * used / active.max(*used);
            let _ = write!(
                text,
                ", port {port} had {share:.0}\u{a0}% of the core while it had packets ({active:.1} s)"
            );
        }
    }
    if worker.stalls > 0 {
        let _ = write!(text, "; it waited {} times for memory, {:.3} s", worker.stalls, worker.stalled);
    }
    if worker.core_copies == 0 && text == head { String::new() } else { text + "\n" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_flow::report::BridgePortReport;

    fn report() -> Report {
        let queue = |half: &str, drops: &[(&str, u64)], starved| QueueReport {
            port: "port1".into(),
            half: half.into(),
            queue: 0,
            packets: 1_000_000,
            bytes: 60_000_000,
            packets_per_second: 2_500_000.0,
            bits_per_second: 1.2e9,
            drops: drops.iter().map(|(reason, n)| (reason.to_string(), *n)).collect(),
            starved,
        };
        let channel = ChannelReport {
            lcore: 0,
            channel: "core:1".into(),
            sharing: "lock".into(),
            submitted: 900,
            completed: 896,
            failed: 1,
            bytes: 54_000,
            in_flight: 3,
        };
        let worker = WorkerReport {
            lcore: 0,
            stages: Stage::ALL.map(|stage| (stage.name().into(), 10.0)).into(),
            groups: Group::ALL.map(|group| (group.name().into(), 33.3)).into(),
            core_copies: 7,
            overflow: 5,
            held_by_order: 2,
            ..WorkerReport::default()
        };
        let decision = DecisionReport {
            lcore: 0,
            up_to: "2048".into(),
            way: "engine",
            reason: "cheaper",
            core_ticks: 310,
            engine_ticks: 41,
            by_core: 7,
            by_engine: 900,
            held_by_order: 2,
            changes: 1,
        };
        Report {
            report: "interval",
            seconds: 2.04,
            over_seconds: 2.04,
            tsc_hz: 2_000_000_000,
            queues: vec![queue("rx", &[], 4), queue("tx", &[("full", 12), ("down", 3)], 0)],
            channels: vec![channel],
            workers: vec![worker],
            decisions: vec![decision],
            ..Report::default()
        }
    }

    #[test]
    fn tables_show_rates_drops_copies_cycles() {
        let report = report();
        let text = tables(&Line::interval(&report, &[]));
        let expected = "\
── 2.0 s
  port      packets  packets/s  bit/s (L1)  dropped
  port1 rx  1000000    2.500 M     1.680 G  (pool empty in 4 polls)
  port1 tx  1000000    2.500 M     1.680 G  full 12, down 3
  channel        shared by  copies submitted  completed  failed  in flight  bytes
  lcore0 core:1  lock                    900        896       1          3  54000
  cycles, %    rx  virtqueue  header  copy  submit  poll  publish    tx  application  idle
  lcore0     10.0       10.0    10.0  10.0    10.0  10.0     10.0  10.0         10.0  10.0
  busy cycles, %  switching (rx+header+tx)  virtqueue (virtqueue+publish)  copy (copy+submit+poll)
  lcore0                              33.3                           33.3                     33.3
  lcore0 made 7 copies itself, 5 of them because channels were full or out of service, 2 of the
    core's copies held by order
  copies of up to  by      because  core: ticks  engine: ticks  by core  by engine  held  changes
  lcore0 2048 B    engine  cheaper          310             41        7        900     2        1
";
        assert_eq!(text, expected);
    }

    #[test]
    fn ports_are_sums_of_their_queues() {
        let mut all = report().queues;
        all.insert(1, QueueReport { queue: 1, starved: 1, ..all[0].clone() });
        all.push(QueueReport { port: "port2".into(), drops: vec![("full".into(), 8)], ..all[2].clone() });
        let expected = "
  port      packets  packets/s  bit/s (L1)  dropped
  all rx    2000000    5.000 M     3.360 G  (pool empty in 5 polls)
  all tx    2000000    5.000 M     3.360 G  full 20, down 3
  port1 rx  2000000    5.000 M     3.360 G  (pool empty in 5 polls)
    rxq0    1000000    2.500 M     1.680 G  (pool empty in 4 polls)
    rxq1    1000000    2.500 M     1.680 G  (pool empty in 1 polls)
  port1 tx  1000000    2.500 M     1.680 G  full 12, down 3
  port2 tx  1000000    2.500 M     1.680 G  full 8
";
        assert_eq!(format!("\n{}", queues(&all, 1.0)), expected);
        let short = queues(&all, 0.05);
        assert!(short.contains("all tx    2000000          -           -"), "{short}");
    }

    #[test]
    fn last_table_shows_port_status() {
        let report = report();
        let port = PortLine {
            peer: None,
            port: "port0".into(),
            name: "gen:size=64".into(),
            mac: "02:00:00:00:00:01".into(),
            status: "5 sent".into(),
            generator: None,
        };
        let stopped_by = Some(StoppedBy::Signal);
        let line = Line::interval(&report, std::slice::from_ref(&port));
        let text = tables(&Line { stopped_by, unfinished: Some(2), ..line });
        assert!(text.starts_with("══ 2.0 s in all"), "{text}");
        assert!(text.contains("  port0 gen:size=64: 5 sent\n  2 packets in flight were never"), "{text}");
    }

    #[test]
    fn table_shows_the_learning_switch() {
        let port = BridgePortReport { port: "port0".into(), learned: 12, flooded: 3, ..Default::default() };
        let bridge = Some(BridgeReport { addresses: 11, ports: vec![port] });
        let report = Report { bridge, ..report() };
        let text = tables(&Line::interval(&report, &[]));
        let expected = "
  bridge  learned  moved  aged  not learned  flooded  over flood limit  filtered  refused
  port0        12      0     0            0        3                 0         0        0
  11 addresses known
";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn json_names_are_stable() {
        let report = report();
        let generator = Some(GenReport { sent: 5, verified: 4, ..GenReport::default() }.into());
        let port = PortLine {
            peer: None,
            port: "port0".into(),
            name: "gen:size=64".into(),
            mac: "02:00:00:00:00:01".into(),
            status: String::new(),
            generator,
        };
        let line = Line::interval(&report, std::slice::from_ref(&port));
        let line = Line { stopped_by: Some(StoppedBy::Duration), unfinished: Some(0), ..line };
        let json = serde_json::to_string(&line).unwrap();
        assert!(!json.contains('\n'));
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["report"], "interval");
        assert_eq!(value["stopped_by"], "duration");
        assert_eq!(value["unfinished"], 0);
        assert_eq!(value["queues"][1]["port"], "port1");
        assert_eq!(value["queues"][1]["half"], "tx");
        assert_eq!(value["queues"][1]["packets_per_second"], 2_500_000.0);
        assert_eq!(value["channels"][0]["in_flight"], 3);
        assert_eq!(value["workers"][0]["overflow"], 5);
        assert_eq!(value["decisions"][0]["way"], "engine");
        assert_eq!(value["ports"][0]["generator"]["verified"], 4);
        let without = Line::interval(&report, &[]);
        assert!(!serde_json::to_string(&without).unwrap().contains("stopped_by"));
    }
}
