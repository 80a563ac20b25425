//! The table of packets per second between two programs.

use offcore_bench::row::Row;

use crate::output::table::{columns, digits, or_dash, times};

/// Formats the rows as a table, or returns an empty text without rows. `counted` says where packets are counted,
/// `other` names the sender.
pub(super) fn table(rows: &[&Row], counted: &str, other: &str) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let cells = rows.iter().map(|row| {
        [
            row.head.port.unwrap_or(row.head.ring).into(),
            row.head.case.clone(),
            row.head.frame.to_string(),
            format!("{:.2}", row.figures.mpps),
            format!("{:.2}-{:.2}", row.figures.spread.min, row.figures.spread.max),
            format!("{:.1}", row.figures.gbps),
            digits(row.ends.busy_cycles_per_packet, 0),
            digits(row.peer.peer_median, 2),
            digits(row.ends.peer_cycles_per_packet, 0),
            times(row.peer.peer_ratio),
            times(row.peer.peer_ratio_lower),
            or_dash(row.ends.fe_bound.unwrap_or_default().then_some(other)),
            row.counts.verified.to_string(),
        ]
    });
    columns(
        "<over|<case|frame|Mpps|min-max|Gbit/s|cycles|peer|peer's|ratio|at least|<bottleneck|verified",
        cells,
    ) + &format!(
        "Mpps: packets per second, counted {counted}; cycles: TSC cycles per packet, in rounds that moved\n\
             packets; peer, peer's: the same two figures of the peer, in turns; ratio: our speed over the peer's; at\n\
             least: its lower bound at 90 %; bottleneck: the {other} was too slow for both sides and limited the\n\
             result.\n"
    )
}
