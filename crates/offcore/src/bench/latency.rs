//! The table of `offcore bench vhost --case latency`.

use offcore_bench::row::Row;

use crate::report::columns;

/// Whether the row is of this table.
pub(super) fn is_latency(row: &Row) -> bool {
    row.metric == "latency"
}

/// The rows that are latencies, as a table; nothing when none is.
pub(super) fn table(rows: &[Row]) -> String {
    const HEADS: [&str; 13] = [
        "frame",
        "mode",
        "bound",
        "engine",
        "load",
        "Mpps",
        "of Mpps",
        "p50 us",
        "p99",
        "p99.9",
        "max",
        "by engine",
        "lost",
    ];
    let us = |ns: Option<f64>| ns.map_or("-".into(), |ns| format!("{:.1}", ns / 1e3));
    let mut cells = vec![HEADS.map(String::from)];
    cells.extend(rows.iter().filter(|row| is_latency(row)).map(|row| {
        [
            row.frame.to_string(),
            row.mode.clone(),
            row.max_latency_us.map_or("-".into(), |us| format!("{us:.0} us")),
            row.engine.clone(),
            row.load.map_or("-".into(), |load| format!("{:.0} %", load * 100.0)),
            format!("{:.2}", row.mpps),
            row.capacity_mpps.map_or("-".into(), |mpps| format!("{mpps:.2}")),
            us(row.p50_ns),
            us(row.p99_ns),
            us(row.p999_ns),
            us(Some(row.max)),
            row.engine_share.map_or("-".into(), |share| format!("{:.0} %", share * 100.0)),
            row.lost.to_string(),
        ]
    }));
    if cells.len() == 1 {
        return String::new();
    }
    columns(&cells, "rlllrrrrrrrrr")
        + "latency: from when a packet was due until it is back, sent at that share of what a closed loop of the same\n\
           arrangement reaches; bound: --max-latency; the engine is run by the sender's thread, so it takes its time.\n"
}
