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
            row.port.unwrap_or(row.ring).into(),
            row.case.clone(),
            row.frame.to_string(),
            format!("{:.2}", row.mpps),
            format!("{:.2}-{:.2}", row.min, row.max),
            format!("{:.1}", row.gbps),
            digits(row.busy_cycles_per_packet, 0),
            digits(row.peer_median, 2),
            digits(row.peer_cycles_per_packet, 0),
            times(row.peer_ratio),
            times(row.peer_ratio_lower),
            or_dash(row.fe_bound.unwrap_or_default().then_some(other)),
            row.verified.to_string(),
        ]
    });
    columns(
        "<over|<case|frame|Mpps|min-max|Gbit/s|cycles|peer|peer's|ratio|at least|<bottleneck|verified",
        cells,
    ) + &format!(
        "Mpps: packets a second, {counted}; cycles: TSC of a round that moved packets, a packet; peer, peer's: the\n\
             same of the peer, in turns; ratio: our speed over its, with the lower bound of 90 %; bottleneck: the {other} was\n\
             too slow for both, and that is what was measured.\n"
    )
}
