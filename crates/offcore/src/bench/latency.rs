//! The table of `offcore bench vhost --case latency`.

use offcore_bench::row::Row;

use super::columns::*;
use crate::output::table::{digits, or_dash, us};

/// Returns whether the row belongs to this table.
pub(super) fn is_latency(row: &Row) -> bool {
    row.figures.metric == "latency"
}

/// Formats the latency rows as a table, or returns an empty text without such rows.
pub(super) fn table(rows: &[Row]) -> String {
    let rows: Vec<_> = rows.iter().filter(|row| is_latency(row)).collect();
    let list: &[Column] = &[
        FRAME,
        MODE,
        ("<at most", |row| or_dash(row.load.max_latency_us.map(|us| format!("{us:.0} us")))),
        ENGINE,
        ("load", |row| percent(row.load.load)),
        MPPS,
        ("of Mpps", |row| digits(row.load.capacity_mpps, 2)),
        P50_US,
        P99_US,
        ("p99.9", |row| us(row.latency.p999_ns)),
        ("max", |row| us(Some(row.figures.spread.max))),
        ("by engine", |row| percent(row.load.engine_share)),
        LOST,
    ];
    listed(
        &rows,
        list,
        "latency: from a packet's due time to its return; load: share of the closed-loop rate of the same arrangement\n\
         (of Mpps) at which packets are sent; at most: --max-latency; by engine: share of the copies. The sender's\n\
         thread also runs the engine, so the engine takes time from the sender.\n",
    )
}
