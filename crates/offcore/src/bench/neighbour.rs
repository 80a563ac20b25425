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
        "kept: packets per second of an honest guest beside a guest that causes as much work as it may, relative to\n\
         the rate alone; half is a fair share. noise: the same ratio without a second guest. of core: the honest\n\
         guest's share of the worker's time while it had packets. The steps of the bad guest, including the punching\n\
         of holes, take time from the honest guest's core.\n",
    )
}
