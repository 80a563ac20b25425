//! The table of packets a second between two programs.

use offcore_bench::row::Row;

use crate::report::columns;

/// The rows, for people; nothing when there are none. `counted` says where packets are counted, `other` is who sends them.
pub(super) fn table(rows: &[&Row], counted: &str, other: &str) -> String {
    const HEADS: [&str; 13] = [
        "over", "case", "frame", "Mpps", "min-max", "Gbit/s", "cycles", "peer", "peer's", "ratio",
        "at least", "bound", "verified",
    ];
    if rows.is_empty() {
        return String::new();
    }
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    let mut cells = vec![HEADS.map(String::from)];
    cells.extend(rows.iter().map(|row| {
        let times = |ratio: Option<f64>| or_dash(ratio.map(|ratio| format!("{ratio:.2}x")));
        let whole = |cycles: Option<f64>| or_dash(cycles.map(|cycles| format!("{cycles:.0}")));
        [
            row.port.unwrap_or(row.ring).into(),
            row.case.clone(),
            row.frame.to_string(),
            format!("{:.2}", row.mpps),
            format!("{:.2}-{:.2}", row.min, row.max),
            format!("{:.1}", row.gbps),
            whole(row.busy_cycles_per_packet),
            or_dash(row.peer_median.map(|mpps| format!("{mpps:.2}"))),
            whole(row.peer_cycles_per_packet),
            times(row.peer_ratio),
            times(row.peer_ratio_lower),
            or_dash(row.fe_bound.unwrap_or_default().then(|| other.into())),
            row.verified.to_string(),
        ]
    }));
    columns(&cells, "llrrrrrrrrrlr")
        + &format!(
            "Mpps: packets a second, {counted}; cycles: TSC of a round that moved packets, a packet; peer, peer's: the\n\
             same of the peer, in turns; ratio: our speed over its, with the lower bound of 90 %; bound: the {other} was\n\
             too slow for both, and that is what was measured.\n"
        )
}
