//! Tests of the measurement itself: it measures, and it detects errors.

use super::*;
use crate::method::copier::Copier;
use crate::report::golden;

fn options(temperature: Temperature) -> Options {
    let lcores = offcore_stats::lcore::available().unwrap();
    Options {
        frames: vec![64, 1518],
        temperatures: vec![temperature],
        setups: Setup::combine(&[Mode::Cpu, Mode::Offload, Mode::Auto], &Copier::ALL),
        background: true,
        blocks: 4,
        bursts: 1,
        timeout: Some(Duration::ZERO),
        hugepages: Hugepages::None,
        lcore: lcores[0],
        other_lcore: lcores.get(1).copied(),
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
            let known = if row.published.is_some() { ", published" } else { "" };
            let beside = if row.background { ", background" } else { "" };
            golden::check(&format!("copy, {}{known}{beside}", row.mode), &row);
            assert_eq!((row.bench, row.arrangement, row.ring), ("copy", "core-cost", "none"));
            assert_eq!((row.metric, row.unit), ("core_cost", "tsc_cycles_per_packet"));
            // Four warm-up blocks and the counted blocks, with two windows each.
            let windows = 2 * (4 + blocks) as u64;
            assert!(row.runs == blocks && row.verified >= windows * temperature.window() as u64, "{row:?}");
            assert_eq!(row.received, row.verified);
            assert!(row.cycles_per_packet > 0.0 && row.lost == 0, "{row:?}");
            assert_eq!(row.simulated, row.engine.starts_with("dsa-sim"), "{row:?}");
            assert_eq!(row.published.is_some(), row.frame < 1518 && row.mode != "auto", "{row:?}");
            assert_eq!(row.auto_over_better.is_some(), row.mode == "auto", "{row:?}");
            assert_eq!(row.offload_over_cpu.is_some(), row.mode == "offload", "{row:?}");
            let by_engine = row.mode != "cpu";
            assert_eq!(row.sustained_mpps.is_some() && row.bound.is_some(), by_engine, "{row:?}");
            assert_eq!(row.background_copies_per_packet.is_some(), row.background, "{row:?}");
            // One copy of each packet. The copy of a short packet may include the following bytes of its buffer.
            let copied = row.copied_bytes_per_packet.unwrap();
            assert!(copied >= (row.frame - FCS_LEN) as f64 && copied <= row.frame.max(128) as f64, "{row:?}");
        }
    }
}

#[test]
fn published_figures_match_guide() {
    assert_eq!(published(1024, Mode::Cpu), Some(44.0));
    assert_eq!(published(1024, Mode::Offload), Some(200.0));
    assert_eq!((published(1024, Mode::Auto), published(1518, Mode::Cpu)), (None, None));
}
