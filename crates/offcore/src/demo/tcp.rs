//! `offcore demo tcp`: the core's cost of a segment by copying engine, as [`offcore_bench::tcp`] measures it, in one
//! table and two sentences.

use std::time::Duration;

use anyhow::anyhow;
use offcore_bench::alternate::{Extent, TURN_BURSTS};
use offcore_bench::copier::Setup;
use offcore_bench::progress::Progress;
use offcore_bench::row::Row;
use offcore_bench::tcp::{self, CHUNKS, Options, SEGMENT, Side};
use offcore_bench::temperature::Temperature;
use offcore_mem::Hugepages;
use serde::Serialize;

use super::two_lcores;
use crate::args::{DemoArgs, Format};
use crate::failure::Failure;
use crate::output::table::{columns, wrapped};
use crate::output::{kib, told, write};

/// A B B A blocks of a chunk size.
const BLOCKS: usize = 100;
/// A B B A blocks with `--quick`.
const QUICK_BLOCKS: usize = 10;
/// Ratios may deviate from 1 by this share because of memory placement, which blocks cannot detect. The value is from
/// the noise floors of `offcore bench tcp` on a quiet machine.
const PLACEMENT: f64 = 0.05;
/// Time limit of one chunk size, even on a busy machine.
const TIMEOUT: Duration = Duration::from_millis(1500);

/// One side and chunk size.
#[derive(Clone, Debug, Serialize)]
struct DemoRow {
    report: &'static str,
    /// `send` or `receive`: the side whose core is measured.
    side: String,
    /// Bytes per write of the application.
    chunk: usize,
    /// Nanoseconds per segment when the core copies, and when a helper core copies.
    cpu_ns: f64,
    offload_ns: f64,
    engine_ns_per_copy: f64,
    /// Difference between the ratio of sums over all blocks and its lower bound at 90 %, as a share of the ratio.
    spread: f64,
    /// Number of segments whose bytes were checked.
    verified: u64,
}

impl DemoRow {
    fn ratio(&self) -> f64 {
        self.cpu_ns / self.offload_ns
    }
}

/// Runs the demo and shows the results.
pub(super) fn run(args: &DemoArgs) -> Result<(), Failure> {
    let (lcore, other_lcore) =
        two_lcores("is the measured host's", "has the other host, both applications and the engine")?;
    let options = Options {
        sides: vec![Side::Send, Side::Receive],
        segments: vec![SEGMENT],
        chunks: CHUNKS.to_vec(),
        connections: vec![1],
        temperatures: vec![Temperature::Remote],
        setups: vec![Setup::CPU, Setup::HELPER],
        largest_hot: usize::MAX,
        checksums: true,
        past_caches: false,
        asks: false,
        noise_floor: false,
        extent: Extent {
            blocks: if args.quick { QUICK_BLOCKS } else { BLOCKS },
            bursts: TURN_BURSTS,
            timeout: Some(TIMEOUT),
            hugepages: Hugepages::Auto,
            lcore,
            other_lcore,
        },
    };
    let mut rows = Vec::new();
    let result = tcp::run(&options, &Progress::visible(), &mut |row| add(&mut rows, &row));
    result.map_err(|error| anyhow!("offcore demo tcp: {}", told(&error)))?;
    match args.format {
        Format::Table => write(&format!("{}\n{}", table(&rows), wrapped(&meaning(&rows))))?,
        Format::Json => write(&json(&rows)?)?,
    };
    Ok(())
}

fn add(rows: &mut Vec<DemoRow>, row: &Row) {
    let chunk = row.tcp.chunk.unwrap_or_default();
    if rows.last().is_none_or(|last| (&last.side, last.chunk) != (&row.head.case, chunk)) {
        rows.push(DemoRow {
            report: "demo",
            side: row.head.case.clone(),
            chunk,
            cpu_ns: 0.0,
            offload_ns: 0.0,
            engine_ns_per_copy: 0.0,
            spread: 0.0,
            verified: 0,
        });
    }
    let Some(demo) = rows.last_mut() else { return };
    demo.verified += row.counts.verified;
    match row.core.engine_ns_per_copy {
        None => demo.cpu_ns = row.figures.ns_per_packet,
        Some(ns) => (demo.offload_ns, demo.engine_ns_per_copy) = (row.figures.ns_per_packet, ns),
    }
    if let (Some(ratio), Some(lower)) =
        (row.ratios.offload.offload_over_cpu, row.ratios.offload.offload_over_cpu_lower)
    {
        demo.spread = 1.0 - lower / ratio;
    }
}

fn table(rows: &[DemoRow]) -> String {
    let cells = rows.iter().map(|row| {
        [
            row.side.clone(),
            kib(row.chunk),
            format!("{:.0}", row.cpu_ns),
            format!("{:.0}", row.offload_ns),
            format!("{:.2}", row.ratio()),
            format!("{:.0} %", 100.0 * row.spread),
            format!("{:.0}", row.engine_ns_per_copy),
            row.verified.to_string(),
        ]
    });
    "Cost of a TCP segment of 1448 bytes for the core of the host that sends or receives it\n".to_owned()
        + &columns(
            "<side|chunk|core copies: ns|engine copies: ns|ratio|spread|engine ns/copy|verified",
            cells,
        )
}

/// Explains the result and its limits.
fn meaning(rows: &[DemoRow]) -> String {
    let of = |side: Side| rows.iter().rfind(|row| row.side == side.name());
    let (Some(send), Some(receive)) = (of(Side::Send), of(Side::Receive)) else {
        return "Nothing was measured.".into();
    };
    let spread = rows.iter().map(|row| row.spread).fold(PLACEMENT, f64::max);
    format!(
        "With copies offloaded, a segment of a {} chunk takes {:.0} ns of the core instead of {:.0} to send, and one of a {} \
         chunk {:.0} instead of {:.0} to receive. This is CPU cost, not throughput: the helper core takes {:.0} ns per \
         copy. A ratio within {:.0} % of 1 shows nothing here; offcore bench tcp has a noise floor for each cell.",
        kib(send.chunk),
        send.offload_ns,
        send.cpu_ns,
        kib(receive.chunk),
        receive.offload_ns,
        receive.cpu_ns,
        send.engine_ns_per_copy,
        100.0 * spread,
    )
}

/// Formats one object per row, and a summary object.
fn json(rows: &[DemoRow]) -> anyhow::Result<String> {
    #[derive(Serialize)]
    struct Summary {
        report: &'static str,
        verified: u64,
        meaning: String,
    }
    let mut text = String::new();
    for row in rows {
        text += &(serde_json::to_string(row)? + "\n");
    }
    let verified = rows.iter().map(|row| row.verified).sum();
    let summary = Summary { report: "demo_summary", verified, meaning: meaning(rows) };
    Ok(text + &serde_json::to_string(&summary)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_both_modes_are_one() {
        let mut rows = Vec::new();
        let ratio = |engine: Option<f64>, of| engine.map(|_| of);
        for (side, chunk, ns, engine) in [
            ("send", 4096, 200.0, None),
            ("send", 4096, 100.0, Some(300.0)),
            ("receive", 4096, 150.0, None),
            ("receive", 4096, 120.0, Some(310.0)),
        ] {
            let mut row = Row::default();
            (row.head.case, row.tcp.chunk) = (side.into(), Some(chunk));
            (row.figures.ns_per_packet, row.core.engine_ns_per_copy) = (ns, engine);
            row.ratios.offload.offload_over_cpu = ratio(engine, 1.2);
            row.ratios.offload.offload_over_cpu_lower = ratio(engine, 1.08);
            row.counts.verified = 7;
            add(&mut rows, &row);
        }
        let text = table(&rows);
        let last: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["receive", "4K", "150", "120", "1.25", "10", "%", "310", "14"]);
        let text = meaning(&rows);
        assert!(text.contains("a 4K chunk takes 100 ns of the core instead of 200 to send"), "{text}");
        assert!(
            text.contains("120 instead of 150 to receive") && text.contains("within 10 % of 1"),
            "{text}"
        );
        assert!(text.contains("not throughput"), "{text}");
        let lines: Vec<serde_json::Value> =
            json(&rows).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((lines.len(), &lines[2]["verified"]), (3, &28.into()));
    }
}
