//! Columns of the tables, and tables as lists of columns.

use offcore_bench::row::Row;

use crate::output::kib;
use crate::output::table::{columns, digits, or_dash, times, us};

/// A column: its heading in the format of [`columns`], and its cell in a row.
pub(super) type Column = (&'static str, fn(&Row) -> String);

/// Formats rows and a note below them, or returns an empty text without rows.
pub(super) fn listed(rows: &[&Row], list: &[Column], note: &str) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let heads: Vec<_> = list.iter().map(|(head, _)| *head).collect();
    let cells = rows.iter().map(|row| list.iter().map(|(_, cell)| cell(row)).collect::<Vec<_>>());
    columns(&heads.join("|"), cells) + note
}

/// Formats a share.
pub(super) fn percent(share: Option<f64>) -> String {
    or_dash(share.map(|share| format!("{:.0} %", share * 100.0)))
}

/// Formats the noise floor if the row has a ratio.
pub(super) fn noise(row: &Row, ratio: Option<f64>) -> String {
    or_dash(ratio.and(row.ratios.noise.noise_floor).map(|share| format!("{:.1} %", share * 100.0)))
}

/// Formats a ratio and its lower bound.
pub(super) fn bounded(ratio: Option<f64>, lower: Option<f64>) -> String {
    or_dash(lower.map(|lower| format!("{} >{lower:.2}", times(ratio))))
}

/// Returns a mark for rows during which the clock changed or other processes used the cores.
pub(super) fn mark(row: &Row) -> &'static str {
    if row.clock.unsteady > 0 { "!" } else { "" }
}

pub(super) const CASE: Column = ("<case", |row| row.head.case.clone());
pub(super) const FRAME: Column = ("frame", |row| row.head.frame.to_string());
pub(super) const DATA: Column = ("<data", |row| row.head.temperature.clone());
pub(super) const MODE: Column = ("<mode", |row| row.head.mode.clone());
pub(super) const ENGINE: Column = ("<engine", |row| row.head.engine.clone());
pub(super) const CHUNK: Column = ("chunk", |row| or_dash(row.tcp.chunk.map(kib)));
pub(super) const OPEN: Column = ("connections", |row| or_dash(row.tcp.connections));
pub(super) const CYCLES: Column =
    ("cycles", |row| format!("{:.0}{}", row.figures.cycles_per_packet, mark(row)));
/// Minimum and maximum of cycles.
pub(super) const SPREAD: Column = ("min-max", |row| {
    let spread = row.figures.spread;
    format!("{:.0}-{:.0}", spread.min, spread.max)
});
/// Minimum and maximum of rates.
pub(super) const RATES: Column = ("min-max", |row| {
    let spread = row.figures.spread;
    format!("{:.2}-{:.2}", spread.min, spread.max)
});
/// Minimum and maximum of shares.
pub(super) const KEPT: Column = ("kept", |row| {
    let spread = row.figures.spread;
    format!("{} to {}", percent(Some(spread.min)), percent(Some(spread.max)))
});
pub(super) const NS: Column = ("ns", |row| format!("{:.1}", row.figures.ns_per_packet));
pub(super) const MPPS: Column = ("Mpps", |row| format!("{:.2}", row.figures.mpps));
pub(super) const GBPS: Column = ("Gbit/s", |row| format!("{:.1}", row.figures.gbps));
/// Gbit/s of payload.
pub(super) const PAYLOAD: Column = ("Gbit/s", |row| digits(row.tcp.payload.payload_gbps, 1));
pub(super) const COPY: Column = ("copy", |row| percent(row.shares.share_copy));
pub(super) const REACHES: Column = ("reaches", |row| digits(row.core.sustained_mpps, 2));
pub(super) const BOUND: Column = ("<bottleneck", |row| or_dash(row.core.bound));
pub(super) const OVER_CPU: Column = ("over cpu", |row| times(row.ratios.offload.offload_over_cpu));
pub(super) const AUTO: Column = ("auto", |row| times(row.ratios.auto.auto_over_better));
/// The noise floor if the row has a ratio of modes.
pub(super) const NOISE: Column =
    ("noise", |row| noise(row, row.ratios.offload.offload_over_cpu.or(row.ratios.auto.auto_over_better)));
pub(super) const P50_US: Column = ("p50 us", |row| us(row.latency.p50_ns));
pub(super) const P99_US: Column = ("p99", |row| us(row.latency.p99_ns));
pub(super) const LOST: Column = ("lost", |row| row.counts.lost.to_string());
/// Number of checked packets.
pub(super) const CHECKED: Column = ("verified", |row| row.counts.verified.to_string());
/// Numbers of checked and of sent packets.
pub(super) const VERIFIED: Column =
    ("verified", |row| format!("{}/{}", row.counts.verified, row.counts.received + row.counts.lost));
