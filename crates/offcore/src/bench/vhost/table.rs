//! The tables of `offcore bench vhost`.

use offcore_bench::memory::page_name;
use offcore_bench::row::{Head, Row};

use super::super::columns::*;
use super::super::{end_to_end, latency as latency_table, neighbour as neighbour_table};
use crate::output::table::{columns, digits, or_dash, times};

/// Columns of the core costs.
const COSTS: &[Column] = &[
    ("<case", |row| match row.figures.work_ns {
        0 => row.head.case.clone(),
        ns => format!("{} {ns} ns", row.head.case),
    }),
    ("<ring", |row| match row.head.guest {
        Some("linux") => format!("{}, linux", row.head.ring),
        _ => row.head.ring.into(),
    }),
    DATA,
    FRAME,
    MODE,
    ("<engine", engine_name),
    CYCLES,
    SPREAD,
    ("blocks", |row| format!("{}/{}", row.figures.spread.runs, row.figures.spread.runs + row.clock.rejected)),
    NS,
    ("guest", |row| digits(row.core.guest_ns_per_packet, 0)),
    MPPS,
    REACHES,
    BOUND,
    ("copied", |row| digits(row.core.copied_bytes_per_packet, 0)),
    ("over cpu", |row| times(over_cpu(row))),
    ("auto", |row| times(over_best(row))),
    ("peer", |row| match row.peer.peer_ratio_lower {
        Some(_) => bounded(row.peer.peer_ratio, row.peer.peer_ratio_lower),
        None => times(row.peer.peer_ratio),
    }),
    ("with guest", |row| times(row.core.peer_both_ratio)),
    ("noise", |row| noise(row, over_cpu(row).or(over_best(row)).or(row.peer.peer_ratio))),
    ("guide's", |row| digits(row.published.published, 2)),
    ("<pages", pages),
    ("<routine", |row| or_dash(row.core.copy_routine.as_ref())),
    VERIFIED,
];
const COSTS_NOTE: &str = "\
    cycles, ns, Mpps: cost of a packet for the core alone, the median; blocks: blocks that count, of all measured\n\
    blocks; guest: nanoseconds of the guests' core per packet; reaches: Mpps of core and engine together; bottleneck:\n\
    the slower of the two; copied: bytes per packet that core and engine copied; +copier: while the other core also\n\
    copies; idle: with an unused channel of this engine; over cpu: speed relative to mode cpu; auto: speed relative\n\
    to the better of cpu and offload, including the cost of learning, in case flip relative to an oracle; peer: our\n\
    speed relative to the peer's, and its lower bound at 90 %; with guest: the same for core and guest together; all\n\
    of these are ratios of sums of variants that alternated. noise: deviation from 1 of the ratio of two equal\n\
    variants in this run; guide's: Mpps of a whole Xeon 8471N core at 1.8 GHz, with DSA in rows of an engine; pages:\n\
    page size of all memory, or of our packet buffers and the peer's (ours/peer's); routine: copy routines of the\n\
    core, out of the guest's memory + into it; verified: packets whose content and order were checked, of the packets\n\
    sent.\n";

fn over_cpu(row: &Row) -> Option<f64> {
    row.ratios.offload.offload_over_cpu.or(row.core.idle_channel_over_cpu)
}

fn over_best(row: &Row) -> Option<f64> {
    row.ratios.auto.auto_over_better.or(row.ratios.auto.auto_over_oracle)
}

pub(super) fn table(rows: &[Row]) -> String {
    let (far, near): (Vec<&Row>, Vec<&Row>) = rows
        .iter()
        .filter(|row| !latency_table::is_latency(row) && !neighbour_table::is_neighbour(row))
        .partition(|row| row.head.arrangement == "end-to-end");
    let latencies = latency_table::table(rows) + &neighbour_table::table(rows);
    let far = end_to_end::table(&far, "at the far side", "front end");
    if near.is_empty() {
        return [far, peers(rows), latencies].concat();
    }
    let text = listed(&near, COSTS, COSTS_NOTE);
    let blank = if far.is_empty() { "" } else { "\n" };
    text + &clock(rows) + &peers(rows) + &break_even(rows) + &breakdown(rows) + blank + &far + &latencies
}

fn pages(row: &Row) -> String {
    let theirs = row.ends.about_peer.peer_page_bytes.map(|bytes| page_name(bytes as usize));
    match (row.peer.pages, theirs) {
        (None, _) => "-".into(),
        (Some(ours), Some(theirs)) if ours != theirs => format!("{ours}/{theirs}"),
        (Some(ours), _) => ours.into(),
    }
}

/// Describes the stability of the core's clock.
fn clock(rows: &[Row]) -> String {
    let Some(ratio) = rows.iter().filter_map(|row| row.clock.core_cycles_per_tick).reduce(f64::max) else {
        return String::new();
    };
    let (rejected, unsteady): (Vec<_>, Vec<_>) =
        rows.iter().map(|row| (row.clock.rejected, row.clock.unsteady)).unzip();
    let rejected = rejected.into_iter().max().unwrap_or(0);
    let marked = unsteady.into_iter().filter(|&unsteady| unsteady > 0).count();
    let mut text = format!(
        "clock: {ratio:.2} core cycles per TSC tick; at most {rejected} blocks of a cell were rejected because it \
         changed"
    );
    if marked > 0 {
        text += &format!("; in {marked} rows, marked !, it changed too often, so some unsteady blocks count");
    }
    text + "\n"
}

/// Describes the peers with which rows were compared.
fn peers(rows: &[Row]) -> String {
    let mut lines: Vec<String> = Vec::new();
    for row in rows.iter().filter(|row| row.peer.peer_ratio.is_some()) {
        let about = &row.ends.about_peer;
        let or_unknown = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".into());
        let line = format!(
            "peer {}: {}, compiled for {}; {} B pages; features {}",
            row.peer.peer.as_deref().unwrap_or_default(),
            or_unknown(&about.peer_version),
            or_unknown(&about.peer_target),
            about.peer_page_bytes.map_or("? ".into(), |bytes| bytes.to_string()),
            or_unknown(&about.peer_features),
        );
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Returns the engine of a row, and whether a channel was idle.
fn engine_name(row: &Row) -> String {
    match row.core.idle_channel {
        Some(engine) => format!("{} +{engine} idle", row.head.engine),
        None if row.core.background => format!("{} +copier", row.head.engine),
        None => row.head.engine.clone(),
    }
}

/// Returns, for each case, format, temperature and engine, the size from which offloading costs the core less than
/// copying. It is interpolated linearly between the two adjacent measured sizes.
fn break_even(rows: &[Row]) -> String {
    let mut text = String::new();
    // Packet processing would be in both modes, and submit-reap has no counterpart.
    let rows = || rows.iter().filter(|row| ["loop", "guest-to-guest"].contains(&row.head.case.as_str()));
    let of = |row: &Row| (row.head.case.clone(), row.head.ring, row.head.guest, row.head.temperature.clone());
    let mut done = Vec::new();
    for row in rows().filter(|row| row.head.mode == "offload") {
        let key = (of(row), row.head.engine.as_str());
        if done.contains(&key) {
            continue;
        }
        done.push(key);
        let Head { case, ring, temperature, engine, .. } = &row.head;
        let core = |frame| {
            let core = |other: &&Row| {
                other.head.mode == "cpu"
                    && other.head.engine == "cpu"
                    && !other.core.background
                    && other.core.idle_channel.is_none()
                    && other.peer.variants == row.peer.variants
            };
            rows().filter(core).find(|other| other.head.frame == frame && of(other) == of(row))
        };
        let same = rows().filter(|other| {
            other.head.mode == "offload" && other.head.engine == row.head.engine && of(other) == of(row)
        });
        // Ticks that the engine saves, by size.
        let saved = same.filter_map(|other| {
            Some((
                other.head.frame,
                core(other.head.frame)?.figures.cycles_per_packet - other.figures.cycles_per_packet,
            ))
        });
        let mut saved: Vec<(usize, f64)> = saved.collect();
        saved.sort_by_key(|&(frame, _)| frame);
        let what = match (saved.first(), saved.iter().rposition(|&(_, saved)| saved < 0.0)) {
            (None, _) => continue,
            (Some((least, _)), None) => format!("at {least} bytes already"),
            (_, Some(last)) if last + 1 == saved.len() => {
                format!("above {} bytes only, if at all", saved[last].0)
            }
            (_, Some(last)) => {
                let ((below, lost), (above, won)) = (saved[last], saved[last + 1]);
                let part = -lost / (won - lost);
                format!("from about {:.0} bytes on", below as f64 + part * (above - below) as f64)
            }
        };
        text += &format!(
            "break-even, {case}, {ring}, {temperature} data: {engine} costs the core less than copying {what}\n"
        );
    }
    text
}

/// Formats Figure 3 of the vhost guide from the rows with shares, or returns an empty text without such rows.
fn breakdown(rows: &[Row]) -> String {
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let cells = rows.iter().filter_map(|row| {
        let shares =
            [row.shares.share_switching?, row.shares.share_virtqueue?, row.shares.share_copy?].map(percent);
        let [switching, virtqueue, copy] = shares;
        let (case, ring, data) = (row.head.case.clone(), row.head.ring.into(), row.head.temperature.clone());
        let (mode, engine) = (row.head.mode.clone(), engine_name(row));
        Some([case, ring, data, row.head.frame.to_string(), mode, engine, switching, virtqueue, copy])
    });
    let table = columns("<case|<ring|<data|frame|<mode|<engine|switching|virtqueue|copying", cells);
    if table.is_empty() {
        return table;
    }
    format!(
        "\nShares of the core's cycles, by the stage clock (the guide's Figure 3; copying is 59 % at 1518 bytes there):\n\
         {}copying: copies by the core, or their submission and completion.\n",
        table
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_bench::row::{Counts, Shares};

    fn row(ring: &'static str, temperature: &str, frame: usize, mode: &str) -> Row {
        let engine = if mode == "cpu" { "cpu" } else { "core:1" }.into();
        let (case, mode, temperature) = ("loop".into(), mode.into(), temperature.into());
        Row {
            head: Head { case, frame, mode, engine, ring, temperature, ..Head::default() },
            ..Row::default()
        }
    }

    #[test]
    fn break_even_lies_between_two_sizes() {
        let row = |frame, mode: &str, cycles| {
            let mut row = row("split", "hot", frame, mode);
            row.figures.cycles_per_packet = cycles;
            row
        };
        let mut rows = vec![row(64, "cpu", 80.0), row(64, "offload", 120.0)];
        assert!(break_even(&rows).contains("above 64 bytes only"), "{}", break_even(&rows));
        rows.extend([row(164, "cpu", 130.0), row(164, "offload", 120.0)]);
        let text = break_even(&rows);
        assert_eq!(
            text,
            "break-even, loop, split, hot data: core:1 costs the core less than copying from about 144 bytes on\n"
        );
        assert!(break_even(&rows[2..]).contains("at 164 bytes already"));
        assert!(break_even(&rows[..1]).is_empty());
        // Each format has its own break-even, and a copier in the background is not the core's cost.
        let mut packed = rows.clone();
        packed.iter_mut().for_each(|row| row.head.ring = "packed");
        rows.append(&mut packed);
        rows.insert(0, row(64, "cpu", 1e6));
        rows[0].core.background = true;
        let text = break_even(&rows);
        assert_eq!(text.lines().filter(|line| line.contains("from about 144 bytes on")).count(), 2, "{text}");
    }

    #[test]
    fn rows_become_a_table() {
        let mut row = row("packed", "remote", 64, "offload");
        row.figures.cycles_per_packet = 80.4;
        (row.core.copied_bytes_per_packet, row.core.bound) = (Some(144.0), Some("engine"));
        row.counts = Counts { received: 9, verified: 9, lost: 1 };
        let text = table(std::slice::from_ref(&row));
        let line = text.lines().nth(1).unwrap();
        assert!(
            line.contains("loop  packed  remote     64  offload  core:1      80") && line.ends_with("9/10"),
            "{text}"
        );
        assert!(!text.contains("Figure 3") && line.contains(" engine ") && line.contains(" 144"), "{text}");
        let mut beside = row.clone();
        beside.core.background = true;
        let text = table(&[beside]);
        assert!(text.contains("core:1 +copier"), "{text}");
        let mut busy = row.clone();
        (busy.head.arrangement, busy.ends.fe_bound) = ("end-to-end", Some(true));
        (busy.figures.mpps, busy.figures.spread.min, busy.figures.spread.max) = (4.1, 3.4, 4.6);
        let text = table(&[busy]);
        assert!(text.contains(" 4.10  3.40-4.60 ") && text.contains(" front end "), "{text}");
        let mut doubtful = row.clone();
        doubtful.figures.spread.runs = 7;
        (doubtful.clock.rejected, doubtful.clock.unsteady) = (2, 2);
        doubtful.clock.core_cycles_per_tick = Some(1.7);
        (doubtful.peer.pages, doubtful.ends.about_peer.peer_page_bytes) = (Some("2M"), Some(4096));
        (doubtful.peer.peer_ratio, doubtful.peer.peer_ratio_lower) = (Some(1.25), Some(1.21));
        doubtful.ratios.noise.noise_floor = Some(0.015);
        let text = table(std::slice::from_ref(&doubtful));
        for words in
            [" 80! ", " 7/9 ", "1.25x >1.21", "1.5 %", "2M/4K", "1.70 core cycles", "in 1 rows, marked !"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
        let [share_switching, share_virtqueue, share_copy] = [0.25, 0.15, 0.6].map(Some);
        let shares = Shares { share_switching, share_virtqueue, share_copy };
        let text = table(&[Row { shares, ..row }]);
        assert!(text.contains("Figure 3") && text.contains("25 %       15 %     60 %"), "{text}");
    }
}
