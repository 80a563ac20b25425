//! The table of `offcore bench vhost --case latency`.

use offcore_bench::row::Row;

use crate::output::table::{columns, digits, or_dash, us};

/// Returns whether the row belongs to this table.
pub(super) fn is_latency(row: &Row) -> bool {
    row.metric == "latency"
}

/// Formats the latency rows as a table, or returns an empty text without such rows.
pub(super) fn table(rows: &[Row]) -> String {
    if !rows.iter().any(is_latency) {
        return String::new();
    }
    let cells = rows.iter().filter(|row| is_latency(row)).map(|row| {
        [
            row.frame.to_string(),
            row.mode.clone(),
            or_dash(row.max_latency_us.map(|us| format!("{us:.0} us"))),
            row.engine.clone(),
            or_dash(row.load.map(|load| format!("{:.0} %", load * 100.0))),
            format!("{:.2}", row.mpps),
            digits(row.capacity_mpps, 2),
            us(row.p50_ns),
            us(row.p99_ns),
            us(row.p999_ns),
            us(Some(row.max)),
            or_dash(row.engine_share.map(|share| format!("{:.0} %", share * 100.0))),
            row.lost.to_string(),
        ]
    });
    columns("frame|<mode|<at most|<engine|load|Mpps|of Mpps|p50 us|p99|p99.9|max|by engine|lost", cells)
        + "latency: from when a packet was due until it is back, sent at that share of what a closed loop of the same\n\
           arrangement reaches; at most: --max-latency; the engine is run by the sender's thread, so it takes its time.\n"
}
