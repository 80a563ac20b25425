//! `offcore demo`: shows and explains measurements of `offcore_bench::demo` and `offcore_bench::tcp`.

pub(crate) mod tcp;

use anyhow::anyhow;
use offcore_bench::demo::{self, DemoResult, DemoRow};
use offcore_bench::progress::Progress;
use offcore_mem::Hugepages;
use offcore_stats::lcore;
use serde::Serialize;

use crate::args::{DemoArgs, DemoSystem, Format};
use crate::failure::Failure;
use crate::output::table::{columns, wrapped};
use crate::output::{say, told, write};

/// Runs a demo and shows the results.
pub(crate) fn run(args: &DemoArgs) -> Result<(), Failure> {
    match args.system {
        DemoSystem::Switch => run_switch(args),
        DemoSystem::Tcp => tcp::run(args),
    }
}

fn run_switch(args: &DemoArgs) -> Result<(), Failure> {
    let (lcore, other_lcore) = two_lcores("forwards", "plays the guests and the engine")?;
    let options = demo::Options { quick: args.quick, hugepages: Hugepages::Auto, lcore, other_lcore };
    let result = demo::run(&options, &Progress::visible());
    let result = result.map_err(|error| anyhow!("offcore demo: {}", told(&error)))?;
    match args.format {
        Format::Table => write(&format!("{}\n{}", table(&result), wrapped(&meaning(&result.rows))))?,
        Format::Json => write(&json(&result)?)?,
    };
    let lost: u64 = result.rows.iter().map(|row| row.lost).sum();
    if lost > 0 {
        return Err(anyhow!("{lost} packets were lost").into());
    }
    Ok(())
}

/// Returns the measured lcore and the other one, and prints their roles.
fn two_lcores(one: &str, other: &str) -> anyhow::Result<(usize, Option<usize>)> {
    let lcores = lcore::available().map_err(anyhow::Error::new)?;
    let (Some(&lcore), other_lcore) = (lcores.first(), lcores.get(1).copied()) else {
        return Err(anyhow!("no lcore is available to this process"));
    };
    match other_lcore {
        Some(number) => say(&format!("lcore {lcore} {one}; lcore {number} {other}")),
        None => say("warning: one lcore has all roles: the data stays in its cache, so copies look cheap"),
    }
    Ok((lcore, other_lcore))
}

fn table(result: &DemoResult) -> String {
    let rows = result.rows.iter().map(|row| {
        [
            row.frame.to_string(),
            format!("{:.0}", row.cpu_cycles),
            format!("{:.1}", row.cpu_ns),
            format!("{:.0}", row.offload_cycles),
            format!("{:.1}", row.offload_ns),
            format!("{:.2}", ratio(row)),
            format!("{:.0}", row.engine_ns_per_copy),
            format!("{:.2}", row.sustained_mpps),
            row.bound.into(),
            row.verified.to_string(),
        ]
    });
    let ghz = result.tsc_hz as f64 / 1e9;
    format!(
        "Cost of a guest's packet for the forwarding core, with copies by the core and by an engine\n\
         (TSC, {ghz:.2} GHz), the engine's time per copy, and the rate of both together\n"
    ) + &columns("frame|core: cycles|ns|engine: cycles|ns|ratio|ns/copy|Mpps|<bottleneck|verified", rows)
}

/// Explains the result and its limits.
fn meaning(rows: &[DemoRow]) -> String {
    let Some(last) = rows.last() else { return "Nothing was measured.".into() };
    let pays = match break_even_frame(rows) {
        Some(frame) if frame == rows[0].frame => "lowers CPU cost at every size".to_owned(),
        Some(frame) => format!("lowers CPU cost from {frame} B upward"),
        None => format!("does not lower CPU cost up to {} B", last.frame),
    };
    format!(
        "Offloading {pays} ({} B: {:.0} instead of {:.0} cycles). \
         This is CPU cost, not throughput: the helper core takes {:.0} ns per copy.",
        last.frame, last.offload_cycles, last.cpu_cycles, last.engine_ns_per_copy
    )
}

/// Returns the factor that offloading saves on the core's cost of a packet.
fn ratio(row: &DemoRow) -> f64 {
    row.cpu_cycles / row.offload_cycles
}

/// Returns the smallest frame length from which all are cheaper with an engine.
fn break_even_frame(rows: &[DemoRow]) -> Option<usize> {
    rows.iter().rev().take_while(|row| ratio(row) > 1.0).last().map(|row| row.frame)
}

/// Formats one object per packet size, and a summary object.
fn json(result: &DemoResult) -> anyhow::Result<String> {
    #[derive(Serialize)]
    struct Size<'a> {
        report: &'static str,
        tsc_hz: u64,
        ratio: f64,
        #[serde(flatten)]
        row: &'a DemoRow,
    }
    #[derive(Serialize)]
    struct Summary {
        report: &'static str,
        /// `null` if offloading pays at no size.
        pays_from_frame: Option<usize>,
        verified: u64,
        lost: u64,
        meaning: String,
    }
    let mut text = String::new();
    for row in &result.rows {
        let size = Size { report: "demo", tsc_hz: result.tsc_hz, ratio: ratio(row), row };
        text += &(serde_json::to_string(&size)? + "\n");
    }
    let summary = Summary {
        report: "demo_summary",
        pays_from_frame: break_even_frame(&result.rows),
        verified: result.rows.iter().map(|row| row.verified).sum(),
        lost: result.rows.iter().map(|row| row.lost).sum(),
        meaning: meaning(&result.rows),
    };
    Ok(text + &serde_json::to_string(&summary)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(cycles: &[(f64, f64)]) -> Vec<DemoRow> {
        let row = |(index, &(cpu, offload)): (usize, &(f64, f64))| DemoRow {
            frame: 64 << index,
            cpu_cycles: cpu,
            cpu_ns: cpu / 2.0,
            offload_cycles: offload,
            offload_ns: offload / 2.0,
            engine_ns_per_copy: 345.6,
            sustained_mpps: 1.5,
            bound: "engine",
            verified: 10,
            lost: 0,
        };
        cycles.iter().enumerate().map(row).collect()
    }

    #[test]
    fn summary_names_the_break_even() {
        for (cycles, pays, example) in [
            (
                &[(300.0, 200.0), (900.0, 300.0)][..],
                "lowers CPU cost at every size",
                "128 B: 300 instead of 900 cycles",
            ),
            (&[(100.0, 200.0), (900.0, 300.0)], "lowers CPU cost from 128 B upward", "300 instead of 900"),
            (&[(300.0, 200.0), (100.0, 200.0), (900.0, 300.0)], "from 256 B upward", "256 B: 300"),
            (&[(300.0, 200.0), (200.0, 300.0)], "does not lower CPU cost up to 128 B", "300 instead of 200"),
        ] {
            let text = meaning(&rows(cycles));
            assert!(text.contains(pays) && text.contains(example), "{text}");
            assert!(text.contains("not throughput") && text.contains("346 ns"), "{text}");
        }
    }

    #[test]
    fn table_and_json_have_every_size() {
        let result = DemoResult { rows: rows(&[(100.0, 200.0), (900.0, 300.0)]), tsc_hz: 2_000_000_000 };
        let text = table(&result);
        assert_eq!(text.lines().count(), 5);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        let last: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["128", "900", "450.0", "300", "150.0", "3.00", "346", "1.50", "engine", "10"]);
        let text = json(&result).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines.len(), 3);
        assert_eq!((&lines[1]["report"], &lines[1]["frame"]), (&"demo".into(), &128.into()));
        assert_eq!(lines[1]["ratio"], 3.0);
        assert_eq!((&lines[2]["pays_from_frame"], &lines[2]["verified"]), (&128.into(), &20.into()));
    }
}
