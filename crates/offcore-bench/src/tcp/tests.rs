//! Tests of the cases: that they run and that their rows describe the measurement.

use super::*;
use crate::report::golden;

fn options(setups: &[Setup], temperatures: &[Temperature], connections: usize) -> Options {
    Options {
        sides: vec![Side::Send, Side::Receive],
        chunks: vec![4096],
        segments: vec![SEGMENT],
        connections: vec![connections],
        temperatures: temperatures.to_vec(),
        largest_hot: 256 << 10,
        setups: setups.to_vec(),
        checksums: true,
        past_caches: false,
        asks: false,
        noise_floor: true,
        extent: Extent::short(2),
    }
}

type Case = fn(&Options, &Progress, &mut dyn FnMut(Row)) -> Result<()>;

fn measured(case: Case, options: &Options) -> Vec<Row> {
    let mut rows = Vec::new();
    case(options, &Progress::hidden(), &mut |row| rows.push(row)).unwrap();
    rows
}

#[test]
fn ratios_stand_beside_a_noise_floor() {
    let temperatures = [Temperature::Remote, Temperature::Cold];
    let rows = measured(run, &options(&[Setup::CPU, Setup::HELPER], &temperatures, 1));
    assert_eq!(rows.len(), 2 * 2 * 2);
    for row in &rows {
        golden::check(&format!("tcp, {}, {}", row.head.case, row.head.mode), row);
        assert!(
            row.counts.verified > 0 && row.counts.verified == row.counts.received && row.counts.lost == 0,
            "{row:?}"
        );
        assert!(row.figures.cycles_per_packet > 0.0 && row.ratios.noise.noise_floor.is_some(), "{row:?}");
        let ratios = [
            row.ratios.offload.offload_over_cpu,
            row.ratios.offload.offload_over_cpu_median,
            row.ratios.offload.offload_over_cpu_lower,
        ];
        assert!(ratios.iter().all(|ratio| ratio.is_some() == (row.head.mode == "offload")), "{row:?}");
        assert_eq!(row.ratios.offload.offload_over_cpu_both.is_some(), row.head.mode == "offload");
        // Two full segments and the rest of a chunk, or the combined rests of several chunks.
        let payload = row.tcp.payload.payload_per_packet.unwrap();
        assert!((4096.0 / 3.0..=SEGMENT as f64).contains(&payload), "{row:?}");
        assert!(
            (row.tcp.payload.payload_gbps.unwrap() - payload * 8.0 / row.figures.ns_per_packet).abs() < 1e-6,
            "{row:?}"
        );
        assert!(row.core.guest_ns_per_packet > Some(0.0), "{row:?}");
        assert!(row.core.both_ns_per_packet > row.core.guest_ns_per_packet, "{row:?}");
    }
    let data: Vec<_> =
        rows.iter().map(|row| (row.head.case.as_str(), row.head.temperature.as_str())).collect();
    for side in ["send", "receive"] {
        assert!(data.contains(&(side, "remote")) && data.contains(&(side, "cold")), "{data:?}");
    }
}

#[test]
fn long_chunks_are_not_measured_hot() {
    let mut options = options(&[Setup::CPU], &[Temperature::Hot, Temperature::Remote], 1);
    options.chunks = vec![256 << 10, 2 << 20];
    let loads = options.loads();
    let loads: Vec<_> = loads.iter().map(|load| (load.temperature, load.chunk)).collect();
    let (hot, remote) = (Temperature::Hot, Temperature::Remote);
    assert_eq!(loads, [(hot, 256 << 10), (remote, 256 << 10), (remote, 2 << 20)]);
}

#[test]
fn one_connection_beside_idle_ones() {
    let mut options = options(&[Setup::CPU], &[Temperature::Remote], 300);
    options.sides = vec![Side::Receive];
    let rows = measured(idle::run, &options);
    let idle: Vec<_> = rows.iter().map(|row| (row.tcp.connections, row.tcp.idle_connections)).collect();
    assert_eq!(idle, [(Some(1), Some(0)), (Some(1), Some(300))]);
    for (row, beside) in rows.iter().zip([false, true]) {
        golden::check(if beside { "tcp, idle, beside" } else { "tcp, idle, alone" }, row);
        // A window has 64 chunks with at least three segments each.
        assert!(row.counts.verified >= 64 * 3 && row.counts.verified == row.counts.received, "{row:?}");
        assert!(row.ratios.noise.noise_floor.is_some(), "{row:?}");
        let ratios = [
            row.tcp.beside.beside_over_alone,
            row.tcp.beside.beside_over_alone_median,
            row.tcp.beside.beside_over_alone_lower,
        ];
        assert!(ratios.iter().all(|ratio| ratio.is_some() == beside), "{row:?}");
    }
}

#[test]
fn connections_opened_used_and_closed() {
    let options = options(&[Setup::CPU], &[Temperature::Remote], 70);
    let rows = measured(open_close::run, &options);
    let hosts: Vec<&str> = rows.iter().map(|row| row.head.case.as_str()).collect();
    assert_eq!(hosts, ["open-close client", "open-close server"]);
    for row in rows {
        golden::check("tcp, open-close", &row);
        assert_eq!((row.tcp.connections, row.figures.unit), (Some(70), "tsc_cycles_per_connection"));
        // Four warm-up blocks and one counted block, with two turns of two windows each.
        assert!(row.counts.verified >= 5 * 4 * 70 && row.counts.verified % (4 * 70) == 0, "{row:?}");
        assert!(row.figures.cycles_per_packet > 0.0 && row.counts.verified == row.counts.received, "{row:?}");
    }
}
