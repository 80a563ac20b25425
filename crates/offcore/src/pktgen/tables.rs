//! A generator's reports as text.

use std::fmt::Write;

use offcore_flow::pktgen::rate::WIRE_OVERHEAD;
use offcore_flow::pktgen::report::{Counts, DirectionReport, Figures, PktgenReport};
use offcore_port::spec::PortSpec;
use serde::Serialize;

use super::args::PktgenArgs;
use super::interfaces::Compared;
use crate::output::table::{columns, digits, or_dash, rate};
use crate::switch::report::StoppedBy;

/// A report with the data to print.
#[derive(Debug, Serialize)]
pub(super) struct Line<'a> {
    #[serde(flatten)]
    pub report: &'a PktgenReport,
    /// The interfaces' counters next to the ports' counters.
    pub interfaces: &'a [Compared],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<StoppedBy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unfinished: Option<usize>,
}

/// Formats a report and, for the last one, the reason for the stop.
pub(super) fn report(line: &Line<'_>, args: &PktgenArgs) -> String {
    let mut text = String::new();
    let Line { report, interfaces, stopped_by, .. } = *line;
    let PktgenReport { seconds, .. } = report;
    let asked = asked(report, args);
    // No packets return from an output capture, and packets that have not arrived yet are not known to be lost.
    let comes_back =
        args.at.ports.iter().any(|port| !matches!(port.bare(), PortSpec::Pcap(spec) if spec.input.is_none()));
    let is_known = stopped_by.is_some() && comes_back;
    // Writing to a String cannot fail.
    let _ = match stopped_by {
        None => writeln!(text, "── {seconds:.1} s: {asked}{}", if report.running { "" } else { ", stopped" }),
        Some(_) => writeln!(text, "══ {seconds:.1} s in all, sent for {:.1} s: {asked}", report.over_seconds),
    };
    let name = |one: &DirectionReport| format!("{} to {}", one.from, one.to);
    let rates = |name: &str, figures| rates(name, figures, report.over_seconds, is_known);
    let all = (report.directions.len() > 1).then(|| rates("all", &report.all));
    let rows = all.into_iter().chain(report.directions.iter().map(|one| rates(&name(one), &one.figures)));
    text += &columns("<ports|sent|packets/s|bit/s (L1)|received|packets/s|bit/s (L1)|lost|lost, %", rows);
    let rows = report.directions.iter().filter_map(|one| latencies(&name(one), &one.figures));
    text += &columns("<latency, µs|min|p50|p90|p99|p99.9|max", rows);
    text += &remarks(&report.all.counts);
    for difference in interfaces.iter().filter_map(Compared::difference).filter(|_| stopped_by.is_some()) {
        let _ = writeln!(text, "  {difference}");
    }
    text
}

/// Describes the requested settings.
fn asked(report: &PktgenReport, args: &PktgenArgs) -> String {
    let PktgenReport { rate, size, flows, burst, .. } = report;
    let plural = if *flows == 1 { "" } else { "s" };
    match &args.pcap {
        None => format!("rate {rate}, size {size}, {flows} flow{plural}, bursts of {burst}"),
        Some(file) if args.rate.is_some() => format!("{} at rate {rate}", file.display()),
        Some(file) => format!("{} at {} times its speed", file.display(), args.speed.unwrap_or(1.0)),
    }
}

/// Formats the row of a direction, or of all. Losses are known at the end, or once packets have arrived.
fn rates(name: &str, figures: &Figures, seconds: f64, is_known: bool) -> Vec<String> {
    let counts = &figures.counts;
    let lost = Some(counts.lost).filter(|_| is_known || counts.received > 0);
    let share = lost.filter(|_| counts.sent > 0).map(|lost| 100.0 * lost as f64 / counts.sent as f64);
    let sent = figures.tx_gbps * 1e9 + figures.tx_mpps * 1e6 * (WIRE_OVERHEAD * 8) as f64;
    vec![
        name.into(),
        counts.sent.to_string(),
        rate(figures.tx_mpps * 1e6, seconds),
        rate(sent, seconds),
        counts.received.to_string(),
        rate(figures.rx_mpps * 1e6, seconds),
        rate(figures.gbps_l1 * 1e9, seconds),
        or_dash(lost),
        digits(share, 4),
    ]
}

fn latencies(name: &str, figures: &Figures) -> Option<Vec<String>> {
    let of = &figures.latencies;
    let values = [of.min_ns, of.p50_ns, of.p90_ns, of.p99_ns, of.p999_ns, of.max_ns];
    let shown = values.into_iter().map(|ns| Some(format!("{:.1}", ns? / 1e3))).collect::<Option<Vec<_>>>()?;
    Some([vec![name.to_string()], shown].concat())
}

/// Formats counters that are only shown if they are not 0.
fn remarks(counts: &Counts) -> String {
    let all = [
        (counts.reordered, "reordered"),
        (counts.duplicates, "duplicates"),
        (counts.corrupt, "corrupt"),
        (counts.foreign, "foreign"),
        (counts.malformed, "malformed"),
        (counts.tx_dropped, "dropped by the sending port"),
        (counts.rx_dropped, "dropped by the receiving port"),
        (counts.given_up, "given up: due for more than a second"),
    ];
    let said: Vec<_> =
        all.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    let verified = (counts.verified > 0).then(|| format!("{} verified", counts.verified));
    let parts: Vec<_> = verified.into_iter().chain(said).collect();
    if parts.is_empty() { String::new() } else { format!("  {}\n", parts.join(", ")) }
}

#[cfg(test)]
mod tests {
    use offcore_flow::pktgen::report::Latencies;

    use crate::cli::Command;
    use crate::cli::lines::command;

    use super::*;

    #[test]
    fn tables_have_rates_latencies_and_errors() {
        let counts = Counts {
            sent: 1000,
            received: 999,
            verified: 999,
            lost: 2,
            duplicates: 1,
            foreign: 3,
            ..Counts::default()
        };
        let latencies = Latencies { min_ns: Some(800.0), p50_ns: Some(1250.0), ..Latencies::default() };
        let latencies = Latencies { p90_ns: Some(2e3), p99_ns: Some(3e3), p999_ns: Some(4e3), ..latencies };
        let latencies = Latencies { max_ns: Some(5e6), ..latencies };
        let figures =
            Figures { counts, tx_mpps: 1.5, tx_gbps: 0.768, gbps_l1: 0.25, latencies, ..Figures::default() };
        let one = PktgenReport {
            report: "interval",
            seconds: 1.0,
            over_seconds: 1.0,
            running: true,
            rate: "1.5Mpps".into(),
            size: "64".into(),
            flows: 1,
            burst: 1,
            all: figures,
            directions: vec![DirectionReport { from: 0, to: 1, figures }],
        };
        let expected = "\
── 1.0 s: rate 1.5Mpps, size 64, 1 flow, bursts of 1
  ports   sent  packets/s  bit/s (L1)  received  packets/s  bit/s (L1)  lost  lost, %
  0 to 1  1000    1.500 M     1.008 G       999          0   250.000 M     2   0.2000
  latency, µs  min  p50  p90  p99  p99.9     max
  0 to 1       0.8  1.2  2.0  3.0    4.0  5000.0
  999 verified, 1 duplicates, 3 foreign
";
        let args = |flags: &str| match command(&format!("offcore pktgen {flags}")).unwrap() {
            Command::Pktgen(args) => *args,
            other => panic!("{other:?}"),
        };
        let said = |report_of: &PktgenReport, stopped_by, flags: &str| {
            report(&Line { report: report_of, interfaces: &[], stopped_by, unfinished: None }, &args(flags))
        };
        assert_eq!(said(&one, None, "--port tap:t"), expected);
        let last = said(&one, Some(StoppedBy::Count), "--port tap:t --pcap a --speed 2");
        assert!(last.starts_with("══ 1.0 s in all, sent for 1.0 s: a at 2 times its speed\n"), "{last}");
        // The text depends on whether packets were expected.
        let none =
            Figures { counts: Counts { sent: 10, lost: 10, ..Counts::default() }, ..Figures::default() };
        let none = PktgenReport {
            all: none,
            directions: vec![DirectionReport { from: 0, to: 0, figures: none }],
            ..one
        };
        for (stopped_by, port, ending) in [
            (None, "tap:t", " -        -"),
            (Some(StoppedBy::Count), "tap:t", "10  100.0000"),
            (Some(StoppedBy::Count), "pcap:-,o", " -        -"),
        ] {
            let text = said(&none, stopped_by, &format!("--port {port}"));
            assert!(text.lines().nth(2).unwrap().ends_with(ending), "{text}");
        }
    }
}
