//! The table of `offcore bench vhost --case neighbour`.

use offcore_bench::row::Row;

use crate::output::table::{columns, digits, or_dash};

/// Returns whether the row belongs to this table.
pub(super) fn is_neighbour(row: &Row) -> bool {
    row.attack.is_some()
}

/// Formats the rows with attacks as a table, or returns an empty text without such rows.
pub(super) fn table(rows: &[Row]) -> String {
    if !rows.iter().any(is_neighbour) {
        return String::new();
    }
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let cells = rows.iter().filter(|row| is_neighbour(row)).map(|row| {
        [
            row.attack.unwrap_or_default().to_owned(),
            row.frame.to_string(),
            digits(row.capacity_mpps, 2),
            format!("{:.2}", row.mpps),
            or_dash(row.beside_over_alone.map(percent)),
            format!("{} to {}", percent(row.min), percent(row.max)),
            or_dash(row.noise_floor.map(percent)),
            or_dash(row.core_share.map(percent)),
            digits(row.longest_turn_us, 0),
            row.lost.to_string(),
        ]
    });
    columns("<beside|frame|alone Mpps|beside|kept|of blocks|noise|of core|longest turn us|lost", cells)
        + "kept: an honest guest's packets a second beside one that has the worker work as much as it may, over those alone; half\n\
           is a fair part. noise: the same of nothing. of core: of the worker's time while it had\n\
           packets. The bad guest's own steps take time of the honest one's core, and so do holes that it punches.\n"
}
