//! Tests of the measurement itself on the replacement for a GPU: it measures, and it detects errors. Skipped without
//! the device's kernels.

use offcore_gpu::host::{Fault, HostDevice};
use offcore_gpu::kernel;
use offcore_stats::lcore;

use super::session::Place;
use super::*;
use crate::report::golden;

fn options(case: Case) -> Options {
    let lcores = lcore::available().unwrap();
    Options {
        cases: vec![case],
        sizes: vec![64, 1518],
        windows: Windows {
            count: 2,
            length: Duration::from_millis(8),
            warm_up: Duration::from_millis(2),
            limit: Duration::from_secs(3600),
        },
        slots: 4,
        hugepages: Hugepages::None,
        ..Options::new(STAND_IN, true, &lcores)
    }
}

fn measured(options: &Options) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let device = Box::new(HostDevice::new()?);
    let Outcome { notes, failures } = run(options, device, &Progress::hidden(), &mut |row| rows.push(row))?;
    ensure!(failures.is_empty(), "{}", failures.join("; "));
    assert!(notes.iter().any(|note| note.contains("stand in for a GPU")), "{notes:?}");
    Ok(rows)
}

/// Checks the columns that every row has.
fn is_complete(row: &Row, options: &Options) {
    let gpu = row.gpu.as_ref().unwrap();
    golden::check(&format!("gpu, {}, {}", row.head.case, gpu.setup.workload), row);
    assert_eq!(
        (row.head.bench, row.head.ring, gpu.setup.pipelines),
        ("gpu", "none", usize::from(gpu.setup.workload != "core"))
    );
    let by_device = !["none", "cpu", "core"].contains(&gpu.setup.workload);
    assert_eq!(row.figures.simulated, by_device, "{row:?}");
    assert_eq!(gpu.setup.device, if by_device { "host" } else { "none" });
    assert_eq!(
        gpu.setup.device_name.as_ref().is_some_and(|name| name.contains("stand in for a GPU")),
        by_device
    );
    assert_eq!(gpu.setup.threads, by_device.then_some(options.threads), "{row:?}");
    assert_eq!(
        gpu.setup.blocks.is_some_and(|blocks| blocks > 0),
        gpu.setup.workload == "persistent",
        "{row:?}"
    );
    assert!(
        row.counts.verified > 0 && row.counts.received >= row.counts.verified && row.counts.lost == 0,
        "{row:?}"
    );
    assert!(row.figures.mpps > 0.0 && row.figures.gbps > 0.0 && gpu.times.kbursts_per_s > 0.0, "{row:?}");
    assert_eq!(gpu.times.submit_ns_per_burst.is_some(), gpu.setup.workload != "core", "{row:?}");
    if row.figures.metric == "rate" {
        assert!(
            row.figures.spread.runs == options.windows.count
                && row.figures.spread.min <= row.figures.spread.median
                && row.figures.spread.median <= row.figures.spread.max,
            "{row:?}"
        );
        assert!(row.core.bound.is_some() && gpu.times.collect_ns_per_burst.is_some(), "{row:?}");
        assert_eq!(gpu.times.ends_mpps.is_some(), gpu.setup.workload != "core", "{row:?}");
    }
    if gpu.setup.workload != "core" {
        let [p50, p99] = [row.latency.p50_ns, row.latency.p99_ns].map(Option::unwrap);
        assert!(0.0 <= p50 && p50 <= p99, "{row:?}");
    }
}

fn workloads(rows: &[Row]) -> Vec<(&'static str, &'static str, usize)> {
    let named = rows.iter().map(|row| (row.gpu.as_ref().unwrap(), row.head.burst));
    named.map(|(gpu, burst)| (gpu.setup.workload, gpu.setup.memory, burst)).collect()
}

#[test]
fn the_published_tables_are_complete() {
    if !kernel::BUILT {
        return;
    }
    let options = options(Case::Io);
    let rows = measured(&options).unwrap();
    rows.iter().for_each(|row| is_complete(row, &options));
    assert_eq!(workloads(&rows), [[("none", "host", 64), ("persistent", "gpu", 64)]; 2].concat());
    let published: Vec<_> = rows.iter().map(|row| (row.head.frame, row.published.published)).collect();
    assert_eq!(published, [(64, Some(18.0)), (64, Some(19.0)), (1518, None), (1518, None)]);

    let options = Options { cases: vec![Case::Workload], bursts: vec![16, 7], ..options };
    let rows = measured(&options).unwrap();
    rows.iter().for_each(|row| is_complete(row, &options));
    assert_eq!(rows.len(), 2 * 8);
    assert_eq!(
        workloads(&rows)[2..5],
        [("kernel", "host", 16), ("persistent", "host", 16), ("graph", "host", 16)]
    );
    for row in &rows {
        let gpu = row.gpu.as_ref().unwrap();
        let device = gpu.setup.device == "host";
        assert_eq!(gpu.model.model_gbps.is_some() && gpu.model.model.is_some(), device, "{row:?}");
        assert_eq!(
            row.published.published.is_some() && gpu.model.published_v100.is_some(),
            device && row.head.burst == 16 && gpu.setup.memory == "gpu",
            "{row:?}"
        );
    }
}

#[test]
fn forced_rows_state_their_time() {
    if !kernel::BUILT {
        return;
    }
    let options = Options { bursts: vec![16, 300], ..options(Case::Forced) };
    let rows = measured(&options).unwrap();
    assert_eq!(rows.len(), 2 * 5);
    for row in &rows {
        is_complete(row, &options);
        let gpu = row.gpu.as_ref().unwrap();
        let burst = match (gpu.setup.workload, row.head.burst) {
            ("none", _) => None,
            ("cpu", burst) => Some(burst as u64 * 1000),
            (_, burst) => Some(burst.div_ceil(256) as u64 * 1000),
        };
        assert_eq!(gpu.forced_ns_per_packet, burst.map(|_| 1000), "{row:?}");
        assert_eq!(gpu.forced_ns_per_burst, burst, "{row:?}");
    }
}

/// Takes seconds, because automata of 5,000 patterns are built for every pipeline.
#[test]
fn every_work_is_measured_beside_a_core() {
    if !kernel::BUILT {
        return;
    }
    let options = Options { bursts: vec![64, 5], memories: vec![Memory::Host], ..options(Case::BreakEven) };
    let rows = measured(&options).unwrap();
    // A core and three device workloads for each kind of work, and workload `none` once.
    assert_eq!(rows.len(), 4 * 4 * 2 + 2);
    for row in &rows {
        is_complete(row, &options);
        let gpu = row.gpu.as_ref().unwrap();
        assert_eq!(
            gpu.break_even.baseline_mpps.is_some(),
            !["none", "cpu"].contains(&gpu.setup.workload),
            "{row:?}"
        );
        assert_eq!(gpu.break_even.model_break_even_burst.is_some(), gpu.setup.device == "host", "{row:?}");
        if gpu.setup.work == "match" && gpu.setup.workload != "none" {
            assert_eq!(gpu.break_even.baseline, Some("aho-corasick crate, interleaved"));
        }
        // A payload of 1 KiB.
        assert_eq!(row.head.frame, 1070);
    }
    let of_match = rows.iter().filter(|row| row.gpu.as_ref().unwrap().setup.work == "match");
    let bursts: Vec<_> = of_match.map(|row| row.head.burst).collect();
    assert_eq!(bursts, [[5, 64]; 4].concat());
}

#[test]
fn paced_packets_have_latencies() {
    if !kernel::BUILT {
        return;
    }
    let options = Options { bursts: vec![16], ..options(Case::Latency) };
    let rows = measured(&options).unwrap();
    assert_eq!(rows.len(), 4 * 3);
    for row in &rows {
        is_complete(row, &options);
        assert_eq!(
            (row.figures.metric, row.figures.unit, row.head.arrangement),
            ("latency", "ns", "open-loop")
        );
        assert!(row.load.load.is_some() && row.load.capacity_mpps.is_some_and(|mpps| mpps > 0.0), "{row:?}");
        let parts = [
            Some(row.figures.spread.min),
            row.latency.p50_ns,
            row.latency.p90_ns,
            row.latency.p99_ns,
            row.latency.p999_ns,
            Some(row.figures.spread.max),
        ];
        assert!(parts.is_sorted_by(|a, b| a <= b), "{row:?}");
    }
}

/// The test switch changes a byte in flight, in an address, a number or a payload, before the timed part and during it.
#[test]
fn a_corrupted_packet_is_found() {
    if !kernel::BUILT {
        return;
    }
    let sound = Options { bursts: vec![16], memories: vec![Memory::Host], ..options(Case::Workload) };
    measured(&sound).unwrap();
    // The first 1024 packets are checked completely.
    for (number, at, words) in [
        (5, 3, "addresses wrong"),
        (1023, 26, "was expected"),
        (500, 700, "other bytes"),
        (100, 1019, "other bytes"),
        (1500, 3, "addresses wrong"),
        (1499, 16, "length"),
    ] {
        let options = Options { corrupted: Some((number, at)), ..sound.clone() };
        let error = format!("{:#}", measured(&options).unwrap_err());
        assert!(error.contains(words) && error.contains("workload, burst 16, none"), "{error}");
    }
}

#[test]
fn failed_device_leaves_rest_measured() {
    if !kernel::BUILT {
        return;
    }
    let options = Options { bursts: vec![16], memories: vec![Memory::Host], ..options(Case::Workload) };
    let device = HostDevice::new().unwrap().with_fault(Fault::Dies(3));
    let mut rows = Vec::new();
    let outcome = run(&options, Box::new(device), &Progress::hidden(), &mut |row| rows.push(row)).unwrap();
    let failure = outcome.failures.concat();
    assert!(failure.starts_with("workload, burst 16, kernel, memory host"), "{failure}");
    assert!(failure.contains("the device has failed: its threads have ended"), "{failure}");
    let workloads: Vec<_> = workloads(&rows).into_iter().map(|(workload, ..)| workload).collect();
    assert_eq!(workloads, ["none", "cpu", "persistent", "graph"]);
}

/// If time runs out, cells have one window less, but at least one.
#[test]
fn short_time_means_fewer_windows() {
    if !kernel::BUILT {
        return;
    }
    let mut options = Options { bursts: vec![16], ..options(Case::Latency) };
    options.windows.limit = Duration::ZERO;
    let options = Options { cases: vec![Case::Workload, Case::Latency], ..options };
    let rows = measured(&options).unwrap();
    assert_eq!(rows.len(), 8 + 4 * 3);
    assert!(rows.iter().filter(|row| row.figures.metric == "rate").all(|row| row.figures.spread.runs == 1));
}

#[test]
fn generator_and_verifier_use_separate_lcores() {
    if !kernel::BUILT {
        return;
    }
    let options = Options { bursts: vec![64], pipelines: 1, ..options(Case::Workload) };
    let mut rig =
        Rig::new(&options, Box::new(HostDevice::new().unwrap()), cases::groups(&options, Case::Workload))
            .unwrap();
    let (first, last) = (options.lcores[0], options.lcores[options.lcores.len() - 1]);
    rig.places = vec![Place { generator: first, verifier: Some(last) }];
    let mut rows = Vec::new();
    cases::workload(&mut rig, &Progress::hidden(), &mut |row| rows.push(row));
    assert_eq!(rows.len(), 8);
    for row in &rows {
        is_complete(row, &options);
        assert_eq!(row.gpu.as_ref().unwrap().setup.lcores_per_pipeline, 2);
    }
}

#[test]
fn invalid_options_are_refused_by_name() {
    if !kernel::BUILT {
        return;
    }
    let base = options(Case::Workload);
    for (options, words) in [
        (Options { bursts: vec![0], ..base.clone() }, "--bursts 0: expected 1 to 4096"),
        (Options { sizes: vec![1519], ..base.clone() }, "--sizes 1519: expected 64 to 1518"),
        (Options { slots: 48, ..base.clone() }, "--slots 48: expected a power of two"),
        (Options { pipelines: base.lcores.len() + 1, ..base.clone() }, "expected one for each pipeline"),
        (Options { windows: Windows { count: 0, ..base.windows }, ..base.clone() }, "no window"),
        (Options { threads: 2000, bursts: vec![16], ..base.clone() }, "2000 threads per block"),
    ] {
        let error = format!("{:#}", measured(&options).unwrap_err());
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_device_is_named_or_found() {
    let error = open(Some("cuda0")).unwrap_err().to_string();
    assert!(error.contains("cuda0") && error.contains("expected"), "{error}");
    // A GPU that no machine has, also by its number.
    for name in ["cuda:4095", "4095"] {
        assert!(open(Some(name)).unwrap_err().to_string().contains("cuda:4095"));
    }
    if kernel::BUILT {
        let (device, line) = open(None).unwrap();
        let stands_in = device.name() == STAND_IN;
        let says = |line: &String| line.contains("in place of a GPU") && !line.contains("or name --device");
        assert_eq!(line.as_ref().is_some_and(says), stands_in, "{line:?}");
        assert_eq!(line.is_some(), stands_in);
    }
}
