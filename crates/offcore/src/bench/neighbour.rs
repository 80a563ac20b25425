//! The table of `offcore bench vhost --case neighbour`.

use offcore_bench::row::Row;

use super::columns::*;
use crate::output::table::digits;

/// Returns whether the row belongs to this table.
pub(super) fn is_neighbour(row: &Row) -> bool {
    row.load.attack.is_some()
}

/// Formats the rows with attacks as a table, or returns an empty text without such rows.
pub(super) fn table(rows: &[Row]) -> String {
    let rows: Vec<_> = rows.iter().filter(|row| is_neighbour(row)).collect();
    let list: &[Column] = &[
        ("<beside", |row| row.load.attack.unwrap_or_default().to_owned()),
        FRAME,
        ("alone Mpps", |row| digits(row.load.capacity_mpps, 2)),
        ("beside", MPPS.1),
        ("kept", |row| percent(row.tcp.beside.beside_over_alone)),
        ("of blocks", KEPT.1),
        ("noise", |row| percent(row.ratios.noise.noise_floor)),
        ("of core", |row| percent(row.load.core_share)),
        ("longest turn us", |row| digits(row.load.longest_turn_us, 0)),
        LOST,
    ];
    listed(
        &rows,
        list,
        "kept: an honest guest's packets a second beside one that has the worker work as much as it may, over those alone; half\n\
         is a fair part. noise: the same of nothing. of core: of the worker's time while it had\n\
         packets. The bad guest's own steps take time of the honest one's core, and so do holes that it punches.\n",
    )
}
