//! The tables of `offcore bench vhost`.

use offcore_bench::memory::page_name;
use offcore_bench::row::Row;

use super::super::{end_to_end, latency as latency_table, neighbour as neighbour_table, verified};
use crate::output::table::{columns, digits, or_dash, times};

pub(super) fn table(rows: &[Row]) -> String {
    let (far, near): (Vec<&Row>, Vec<&Row>) = rows
        .iter()
        .filter(|row| !latency_table::is_latency(row) && !neighbour_table::is_neighbour(row))
        .partition(|row| row.arrangement == "end-to-end");
    let costs = !near.is_empty();
    let cells = near.into_iter().map(|row| {
        let over_cpu = row.offload_over_cpu.or(row.idle_channel_over_cpu);
        let over_best = row.auto_over_better.or(row.auto_over_oracle);
        let ratio = over_cpu.or(over_best).or(row.peer_ratio);
        [
            match row.work_ns {
                0 => row.case.clone(),
                ns => format!("{} {ns} ns", row.case),
            },
            match row.guest {
                Some("linux") => format!("{}, linux", row.ring),
                _ => row.ring.into(),
            },
            row.temperature.clone(),
            row.frame.to_string(),
            row.mode.clone(),
            engine_name(row),
            format!("{:.0}{}", row.cycles_per_packet, if row.unsteady > 0 { "!" } else { "" }),
            format!("{:.0}-{:.0}", row.min, row.max),
            format!("{}/{}", row.runs, row.runs + row.rejected),
            format!("{:.1}", row.ns_per_packet),
            digits(row.guest_ns_per_packet, 0),
            format!("{:.2}", row.mpps),
            digits(row.sustained_mpps, 2),
            or_dash(row.bound),
            digits(row.copied_bytes_per_packet, 0),
            times(over_cpu),
            times(over_best),
            match row.peer_ratio_lower {
                Some(lower) => format!("{} >{lower:.2}", times(row.peer_ratio)),
                None => times(row.peer_ratio),
            },
            times(row.peer_both_ratio),
            or_dash(ratio.and(row.noise_floor).map(|share| format!("{:.1} %", share * 100.0))),
            digits(row.published, 2),
            pages(row),
            or_dash(row.copy_routine.as_ref()),
            verified(row),
        ]
    });
    let latencies = latency_table::table(rows) + &neighbour_table::table(rows);
    let far = end_to_end::table(&far, "at the far side", "front end");
    if !costs {
        return [far, peers(rows), latencies].concat();
    }
    let mut text = columns(
        "<case|<ring|<data|frame|<mode|<engine|cycles|min-max|blocks|ns|guest|Mpps|reaches|<bottleneck|\
             copied|over cpu|auto|peer|with guest|noise|guide's|<pages|<routine|verified",
        cells,
    );
    text += "cycles, ns, Mpps: what a packet costs the core alone, the median; blocks: those that count, of those that were\n\
             measured; guest: nanoseconds of the guests' core for a packet; reaches: Mpps of core and engine together;\n\
             copied: bytes that core and engine copied for a packet; +copier: another one on the other core beside;\n\
             idle: with an engine's channel that nothing is given to;\n\
             over cpu: its speed over that of cpu; auto: over that of the better of cpu and offload, all that it spent on\n\
             learning included, in case flip over that of who knows; peer: ours over that of --peer, and its lower bound at\n\
             90 %; with guest: the same of core and guest together; all of them ratios of sums of what alternated.\n\
             noise: how far from 1 the ratio of what two equal things cost the core was in this run;\n\
             guide's: Mpps of a whole Xeon 8471N core at 1.8 GHz, with DSA where an engine copies; pages: of all memory,\n\
             or ours/the peer's packet buffers; routine: by which the core copied, out of the guest+into it; verified: of\n\
             the packets sent, those whose content and order were checked.\n";
    let blank = if far.is_empty() { "" } else { "\n" };
    text + &clock(rows) + &peers(rows) + &break_even(rows) + &breakdown(rows) + blank + &far + &latencies
}

fn pages(row: &Row) -> String {
    let theirs = row.about_peer.peer_page_bytes.map(|bytes| page_name(bytes as usize));
    match (row.pages, theirs) {
        (None, _) => "-".into(),
        (Some(ours), Some(theirs)) if ours != theirs => format!("{ours}/{theirs}"),
        (Some(ours), _) => ours.into(),
    }
}

/// Describes the stability of the core's clock.
fn clock(rows: &[Row]) -> String {
    let Some(ratio) = rows.iter().filter_map(|row| row.core_cycles_per_tick).reduce(f64::max) else {
        return String::new();
    };
    let (rejected, unsteady): (Vec<_>, Vec<_>) = rows.iter().map(|row| (row.rejected, row.unsteady)).unzip();
    let rejected = rejected.into_iter().max().unwrap_or(0);
    let marked = unsteady.into_iter().filter(|&unsteady| unsteady > 0).count();
    let mut text = format!(
        "clock: {ratio:.2} core cycles in a TSC tick; at most {rejected} blocks of a cell were thrown away because that changed"
    );
    if marked > 0 {
        text +=
            &format!("; in {marked} rows, marked !, it changed too often, and blocks count that should not");
    }
    text + "\n"
}

/// Describes the peers with which rows were compared.
fn peers(rows: &[Row]) -> String {
    let mut lines: Vec<String> = Vec::new();
    for row in rows.iter().filter(|row| row.peer_ratio.is_some()) {
        let about = &row.about_peer;
        let or_unknown = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".into());
        let line = format!(
            "peer {}: {}, compiled for {}; {} B pages; features {}",
            row.peer.as_deref().unwrap_or_default(),
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
    match row.idle_channel {
        Some(engine) => format!("{} +{engine} idle", row.engine),
        None if row.background => format!("{} +copier", row.engine),
        None => row.engine.clone(),
    }
}

/// Returns, for each case, format, temperature and engine, the size from which offloading costs the core less than
/// copying. It is interpolated linearly between the two adjacent measured sizes.
fn break_even(rows: &[Row]) -> String {
    let mut text = String::new();
    // Packet processing would be in both modes, and submit-reap has no counterpart.
    let rows = || rows.iter().filter(|row| ["loop", "guest-to-guest"].contains(&row.case.as_str()));
    let of = |row: &Row| (row.case.clone(), row.ring, row.guest, row.temperature.clone());
    let mut done = Vec::new();
    for row in rows().filter(|row| row.mode == "offload") {
        let key = (of(row), row.engine.as_str());
        if done.contains(&key) {
            continue;
        }
        done.push(key);
        let Row { case, ring, temperature, engine, .. } = row;
        let core = |frame| {
            let core = |other: &&Row| {
                other.mode == "cpu"
                    && other.engine == "cpu"
                    && !other.background
                    && other.idle_channel.is_none()
                    && other.variants == row.variants
            };
            rows().filter(core).find(|other| other.frame == frame && of(other) == of(row))
        };
        let same = rows()
            .filter(|other| other.mode == "offload" && other.engine == row.engine && of(other) == of(row));
        // Ticks that the engine saves, by size.
        let saved = same.filter_map(|other| {
            Some((other.frame, core(other.frame)?.cycles_per_packet - other.cycles_per_packet))
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
        let shares = [row.share_switching?, row.share_virtqueue?, row.share_copy?].map(percent);
        let [switching, virtqueue, copy] = shares;
        let (case, ring, data) = (row.case.clone(), row.ring.into(), row.temperature.clone());
        let (mode, engine) = (row.mode.clone(), engine_name(row));
        Some([case, ring, data, row.frame.to_string(), mode, engine, switching, virtqueue, copy])
    });
    let table = columns("<case|<ring|<data|frame|<mode|<engine|switching|virtqueue|copying", cells);
    if table.is_empty() {
        return table;
    }
    format!(
        "\nShares of the core's cycles, by the stage clock (the guide's Figure 3; copying is 59 % at 1518 bytes there):\n\
         {}copying: copies made by the core, or handing them over and learning of their end.\n",
        table
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_bench::row::AboutPeer;

    #[test]
    fn break_even_lies_between_two_sizes() {
        let row = |frame, mode: &str, cycles_per_packet| Row {
            case: "loop".into(),
            ring: "split",
            temperature: "hot".into(),
            engine: if mode == "cpu" { "cpu" } else { "core:1" }.into(),
            mode: mode.into(),
            frame,
            cycles_per_packet,
            ..Row::default()
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
        rows.extend(rows.clone().into_iter().map(|row| Row { ring: "packed", ..row }));
        rows.insert(0, Row { background: true, ..row(64, "cpu", 1e6) });
        let text = break_even(&rows);
        assert_eq!(text.lines().filter(|line| line.contains("from about 144 bytes on")).count(), 2, "{text}");
    }

    #[test]
    fn rows_become_a_table() {
        let row = Row {
            bench: "vhost",
            case: "loop".into(),
            ring: "packed",
            frame: 64,
            mode: "offload".into(),
            engine: "core:1".into(),
            temperature: "remote".into(),
            cycles_per_packet: 80.4,
            copied_bytes_per_packet: Some(144.0),
            bound: Some("engine"),
            received: 9,
            verified: 9,
            lost: 1,
            ..Row::default()
        };
        let text = table(std::slice::from_ref(&row));
        let line = text.lines().nth(1).unwrap();
        assert!(
            line.contains("loop  packed  remote     64  offload  core:1      80") && line.ends_with("9/10"),
            "{text}"
        );
        assert!(!text.contains("Figure 3") && line.contains(" engine ") && line.contains(" 144"), "{text}");
        let beside = table(&[Row { background: true, ..row.clone() }]);
        assert!(beside.contains("core:1 +copier"), "{beside}");
        let (min, max) = (3.4, 4.6);
        let busy =
            Row { arrangement: "end-to-end", mpps: 4.1, min, max, fe_bound: Some(true), ..row.clone() };
        let text = table(&[busy]);
        assert!(text.contains(" 4.10  3.40-4.60 ") && text.contains(" front end "), "{text}");
        let doubtful = Row {
            unsteady: 2,
            runs: 7,
            rejected: 2,
            core_cycles_per_tick: Some(1.7),
            pages: Some("2M"),
            about_peer: AboutPeer { peer_page_bytes: Some(4096), ..AboutPeer::default() },
            peer_ratio: Some(1.25),
            peer_ratio_lower: Some(1.21),
            noise_floor: Some(0.015),
            ..row.clone()
        };
        let text = table(std::slice::from_ref(&doubtful));
        for words in
            [" 80! ", " 7/9 ", "1.25x >1.21", "1.5 %", "2M/4K", "1.70 core cycles", "in 1 rows, marked !"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
        let shares = [0.25, 0.15, 0.6].map(Some);
        let [share_switching, share_virtqueue, share_copy] = shares;
        let text = table(&[Row { share_switching, share_virtqueue, share_copy, ..row }]);
        assert!(text.contains("Figure 3") && text.contains("25 %       15 %     60 %"), "{text}");
    }
}
