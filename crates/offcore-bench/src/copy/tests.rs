//! Tests of the measurement itself: it measures, and it detects errors.

use super::*;
use crate::method::copier::Copier;
use crate::report::golden;

fn options(temperature: Temperature) -> Options {
    Options {
        frames: vec![64, 1518],
        temperatures: vec![temperature],
        setups: Setup::combine(&[Mode::Cpu, Mode::Offload, Mode::Auto], &Copier::ALL),
        background: true,
        extent: Extent::short(4),
    }
}

fn measured(options: &Options) -> Vec<Row> {
    let mut rows = Vec::new();
    run(options, &Progress::hidden(), &mut |row| rows.push(row)).unwrap();
    rows
}

/// Takes seconds if other work keeps the cores busy, because each of about a hundred windows is handed from core to
/// core.
#[test]
fn copied_packet_rows_are_complete() {
    for temperature in Temperature::ALL {
        let mut options = options(temperature);
        if temperature != Temperature::Hot {
            options.setups.retain(|setup| setup.copier != Copier::DsaSim { batch: false });
            options.frames = vec![512];
        }
        let rows = measured(&options);
        // The core in two variants, and each engine in two modes.
        assert_eq!(rows.len(), if temperature == Temperature::Hot { 2 * 8 } else { 6 });
        let blocks = if temperature == Temperature::Cold { 2 } else { 4 };
        for row in rows {
            let known = if row.published.published.is_some() { ", published" } else { "" };
            let beside = if row.core.background { ", background" } else { "" };
            golden::check(&format!("copy, {}{known}{beside}", row.head.mode), &row);
            assert_eq!((row.head.bench, row.head.arrangement, row.head.ring), ("copy", "core-cost", "none"));
            assert_eq!((row.figures.metric, row.figures.unit), ("core_cost", "tsc_cycles_per_packet"));
            // Four warm-up blocks and the counted blocks, with two windows each.
            let windows = 2 * (4 + blocks) as u64;
            assert!(
                row.figures.spread.runs == blocks
                    && row.counts.verified >= windows * temperature.window() as u64,
                "{row:?}"
            );
            assert_eq!(row.counts.received, row.counts.verified);
            assert!(row.figures.cycles_per_packet > 0.0 && row.counts.lost == 0, "{row:?}");
            assert_eq!(row.figures.simulated, row.head.engine.starts_with("dsa-sim"), "{row:?}");
            assert_eq!(
                row.published.published.is_some(),
                row.head.frame < 1518 && row.head.mode != "auto",
                "{row:?}"
            );
            assert_eq!(row.ratios.auto.auto_over_better.is_some(), row.head.mode == "auto", "{row:?}");
            assert_eq!(row.ratios.offload.offload_over_cpu.is_some(), row.head.mode == "offload", "{row:?}");
            let by_engine = row.head.mode != "cpu";
            assert_eq!(row.core.sustained_mpps.is_some() && row.core.bound.is_some(), by_engine, "{row:?}");
            assert_eq!(row.core.background_copies_per_packet.is_some(), row.core.background, "{row:?}");
            // One copy of each packet. The copy of a short packet may include the following bytes of its buffer.
            let copied = row.core.copied_bytes_per_packet.unwrap();
            assert!(
                copied >= (row.head.frame - FCS_LEN) as f64 && copied <= row.head.frame.max(128) as f64,
                "{row:?}"
            );
        }
    }
}

#[test]
fn published_figures_match_guide() {
    assert_eq!(published(1024, Mode::Cpu), Some(44.0));
    assert_eq!(published(1024, Mode::Offload), Some(200.0));
    assert_eq!((published(1024, Mode::Auto), published(1518, Mode::Cpu)), (None, None));
}
