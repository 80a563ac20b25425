//! `offcore bench vhost`: Table 8 of the vhost guide, and Figure 3's shares.

use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::{Args, ValueEnum};
use offcore_bench::copier::Copier;
use offcore_bench::end_to_end::{self, EndToEndOptions};
use offcore_bench::latency::{self, LatencyOptions};
use offcore_bench::lockstep::OtherCore;
use offcore_bench::plot;
use offcore_bench::progress::Progress;
use offcore_bench::row::Row;
use offcore_bench::submit_reap;
use offcore_bench::temperature::Temperature;
use offcore_bench::vhost::{self, FRAMES};
use offcore_bench::work_sweep;
use offcore_bench::workload::{Ring, Route};
use offcore_stats::lcore;

use super::cells::{CellArgs, or};
use super::{Rows, latency as latency_table, two_lcores};
use crate::Failure;
use crate::args::{choice, within};
use crate::report::columns;

/// The examples of `offcore bench vhost --help`. A test parses each line that begins with `offcore`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  Everything, roughly, in less than a minute:
    offcore bench vhost --quick

  One cell, as an object that names what was measured and how:
    offcore bench vhost --frame 1518 --temperature remote --format json

  Beside DPDK's librte_vhost (a build with --features dpdk, as root), drawn:
    offcore bench vhost --peer dpdk-lib --temperature remote --plot cost.svg

  Whether auto keeps up with the better of the core and an engine:
    offcore bench vhost --mode cpu,offload,auto --engine cpu,core:1

  The same with a simulated DSA behind the driver:
    offcore bench vhost --engine cpu,dsa-sim,dsa-sim-direct --frame 1518

  Packets a second, in turns with dpdk-testpmd, as root:
    offcore bench vhost --case end-to-end --peer dpdk --ring split,packed

  From guest to guest, in turns with Open vSwitch, as root:
    offcore bench vhost --case guest-to-guest-e2e --peer ovs

  From one guest to another: what a packet costs the core, and packets a second:
    offcore bench vhost --case guest-to-guest --ring split --frame 1024,1518
    offcore bench vhost --case guest-to-guest-e2e --frame 1024,1518

  What offloading leaves to an application that works on every packet:
    offcore bench vhost --case work-ns --frame 512,1518 --plot work.svg

  How long packets take at 50, 80 and 95 % of capacity, and with auto held to 20 us:
    offcore bench vhost --case latency --max-latency 20

A core cost is what the core spends on a packet: an engine has a rate of its
own. 'reaches' is what both reach together, 'bound' which of them is the limit.";

/// What `offcore bench vhost` understands.
#[derive(Args, Debug)]
pub(crate) struct VhostArgs {
    #[command(flatten)]
    pub cells: CellArgs,

    /// What is measured: what a packet costs the core, packets a second through a socket, or what a copy costs that
    /// somebody else makes [default: core-cost and submit-reap; end-to-end with --peer dpdk; guest-to-guest-e2e with
    /// --peer ovs]
    #[arg(long = "case", value_name = "LIST", value_delimiter = ',')]
    pub cases: Vec<Case>,

    /// Case latency: microseconds that a packet may take through an engine in the second of the rows of mode auto
    /// [default: 20]
    #[arg(long, value_name = "MICROSECONDS", value_parser = within(1..=1_000_000))]
    pub max_latency: Option<usize>,

    /// Formats of virtqueues: split, packed [default: both; split with --quick]
    #[arg(long = "ring", value_name = "LIST", value_delimiter = ',', value_parser = ring())]
    pub rings: Vec<Ring>,

    /// How often ours copies a payload from guest to guest: once where it can, or twice in any case
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub copies: u8,

    /// Measure other people's software beside ours, in turns
    #[arg(long, value_name = "PEER")]
    pub peer: Option<Peer>,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// TSC ticks that forwarding a packet takes the core.
    CoreCost,
    /// TSC ticks that handing a copy over and learning of its end takes.
    SubmitReap,
    /// Core cost with work of 0 to 1600 ns on every packet.
    WorkNs,
    /// Packets a second between a back end and a front end on two cores, the core copying.
    EndToEnd,
    /// How long packets take between the two when they come at a pace of their own.
    Latency,
    /// TSC ticks that forwarding a packet from one guest to another takes the core.
    GuestToGuest,
    /// Packets a second from one front end to another through a back end, the core copying.
    #[value(name = "guest-to-guest-e2e")]
    GuestToGuestEndToEnd,
}

/// What is measured beside ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// DPDK's librte_vhost in the harness of core-cost.
    DpdkLib,
    /// dpdk-testpmd's net_vhost in place of our back end, end to end.
    Dpdk,
    /// Open vSwitch with DPDK in place of our back end, from guest to guest, both as learning switches.
    Ovs,
}

fn ring() -> impl clap::builder::TypedValueParser<Value = Ring> {
    choice(Ring::ALL.map(Ring::name))
}

/// Measures and writes what the flags ask for.
///
/// # Errors
/// [`Failure::Usage`] for lcores that are not to be had, [`Failure::Failed`] for the rest.
pub(crate) fn run(args: &VhostArgs) -> Result<(), Failure> {
    let options = options(args).map_err(Failure::Usage)?;
    let cases = cases(args).map_err(Failure::Usage)?;
    let mut rows = Rows::new(args.cells.format);
    for case in cases {
        measure(case, args, &options, &mut |row| rows.push(row))
            .context("offcore bench vhost")
            .map_err(|error| anyhow!("{error:#}"))?;
    }
    let drawn = if args.cases.contains(&Case::WorkNs) { plot::work_sweep } else { plot::core_cost };
    Ok(rows.finish(args.cells.plot.as_ref(), drawn, table)?)
}

/// The cases to measure; those that the other flags need are there, or it is said what is missing.
fn cases(args: &VhostArgs) -> Result<Vec<Case>, String> {
    let cases = match (args.cases.is_empty(), args.peer) {
        (false, _) => args.cases.clone(),
        (true, Some(Peer::Dpdk)) => vec![Case::EndToEnd],
        (true, Some(Peer::Ovs)) => vec![Case::GuestToGuestEndToEnd],
        (true, _) => vec![Case::CoreCost, Case::SubmitReap],
    };
    let need = |flag: &str, wanted: &[Case], names| match cases.iter().any(|case| wanted.contains(case)) {
        true => Ok(()),
        false => Err(format!("{flag} goes with --case {names}: add it, or leave {flag} out")),
    };
    const COSTS: &[Case] = &[Case::CoreCost, Case::GuestToGuest];
    const RATES: &[Case] = &[Case::EndToEnd, Case::GuestToGuestEndToEnd];
    const ENGINES: &[Case] = &[Case::CoreCost, Case::GuestToGuest, Case::WorkNs, Case::SubmitReap];
    // What no case heeds would be taken for what was measured.
    if args.rings.iter().any(|&ring| ring != Ring::Split)
        && cases.iter().all(|case| matches!(case, Case::Latency | Case::SubmitReap))
    {
        return Err(
            "--ring packed goes with any --case but latency, whose rings are split, and submit-reap, which \
                    has none: add another, or leave --ring out"
                .into(),
        );
    }
    if !args.cells.temperatures.is_empty() {
        need("--temperature", COSTS, "core-cost or guest-to-guest")?;
    }
    if !args.cells.engines.is_empty() {
        need("--engine", ENGINES, "core-cost, guest-to-guest, work-ns or submit-reap")?;
    }
    if !args.cells.modes.is_empty() && cases.iter().all(|case| RATES.contains(case)) {
        return Err(
            "--mode goes with any --case but end-to-end and guest-to-guest-e2e, where the core copies: add \
                    another, or leave --mode out"
                .into(),
        );
    }
    if args.copies != 1 {
        const BETWEEN: &[Case] = &[Case::GuestToGuest, Case::GuestToGuestEndToEnd];
        need("--copies 2", BETWEEN, "guest-to-guest or guest-to-guest-e2e")?;
    }
    if args.max_latency.is_some() {
        need("--max-latency", &[Case::Latency], "latency")?;
    }
    match args.peer {
        Some(Peer::DpdkLib) => need("--peer dpdk-lib", COSTS, "core-cost or guest-to-guest")?,
        Some(Peer::Dpdk) => need("--peer dpdk", RATES, "end-to-end or guest-to-guest-e2e")?,
        Some(Peer::Ovs) => need("--peer ovs", &[Case::GuestToGuestEndToEnd], "guest-to-guest-e2e")?,
        None => {}
    }
    if args.cells.plot.is_some() && !cases.contains(&Case::WorkNs) {
        need("--plot", COSTS, "core-cost, guest-to-guest or work-ns")?;
    }
    if args.cells.background {
        need("--background", COSTS, "core-cost or guest-to-guest")?;
    }
    Ok(cases)
}

fn measure(
    case: Case,
    args: &VhostArgs,
    options: &vhost::Options,
    emit: &mut dyn FnMut(Row),
) -> anyhow::Result<()> {
    let progress = Progress::visible();
    match case {
        Case::CoreCost => vhost::run(options, &progress, emit),
        Case::GuestToGuest => {
            let options = vhost::Options { route: Route::GuestToGuest, ..options.clone() };
            vhost::run(&options, &progress, emit)
        }
        Case::WorkNs => work_sweep::run(options, &progress, emit),
        Case::SubmitReap => {
            lcore::pin(options.lcore)?;
            let other = OtherCore::start(options.other_lcore)?;
            let bursts = if args.cells.quick { 2_000 } else { 20_000 };
            let mut copiers: Vec<_> = options.setups.iter().map(|setup| setup.copier).collect();
            copiers.dedup();
            for copier in copiers.into_iter().filter(|copier| *copier != Copier::Core) {
                for &frame in &options.frames {
                    emit(submit_reap::run(copier, frame as u32, bursts, &other)?);
                }
            }
            Ok(())
        }
        Case::EndToEnd | Case::GuestToGuestEndToEnd => {
            let mut end_to_end =
                EndToEndOptions::new(&options.frames, args.cells.quick, options.lcore, options.other_lcore);
            end_to_end.route = if case == Case::EndToEnd { Route::Loop } else { Route::GuestToGuest };
            end_to_end.rings.clone_from(&options.rings);
            end_to_end.one_copy = options.one_copy;
            end_to_end.peer = match args.peer {
                Some(Peer::Dpdk) => Some(end_to_end::Peer::Testpmd),
                Some(Peer::Ovs) => Some(end_to_end::Peer::Ovs),
                Some(Peer::DpdkLib) | None => None,
            };
            end_to_end.hugepages = options.hugepages;
            end_to_end::run(&end_to_end, &progress, emit)
        }
        Case::Latency => {
            let frames = or(&args.cells.frames, &latency::FRAMES);
            let mut latency =
                LatencyOptions::new(&frames, args.cells.quick, options.lcore, options.other_lcore);
            if let Some(us) = args.max_latency {
                latency.max_latency = Duration::from_micros(us as u64);
            }
            latency.hugepages = options.hugepages;
            if !args.cells.modes.is_empty() {
                latency.modes.clone_from(&args.cells.modes);
            }
            latency::run(&latency, &progress, emit)
        }
    }
}

fn options(args: &VhostArgs) -> Result<vhost::Options, String> {
    let cells = &args.cells;
    let (lcore, other_lcore) = two_lcores(cells.lcores.as_ref())?;
    Ok(vhost::Options {
        route: Route::Loop,
        one_copy: args.copies == 1,
        rings: match (args.rings.is_empty(), args.cells.quick) {
            (false, _) => args.rings.clone(),
            (true, false) => Ring::ALL.into(),
            (true, true) => vec![Ring::Split],
        },
        frames: or(&cells.frames, &FRAMES),
        temperatures: or(&cells.temperatures, &Temperature::ALL),
        setups: cells.setups()?,
        background: cells.background,
        breakdown: true,
        dpdk_lib: args.peer == Some(Peer::DpdkLib),
        blocks: cells.blocks(),
        patience: cells.patience(),
        hugepages: cells.hugepages,
        lcore,
        other_lcore,
    })
}

fn table(rows: &[Row]) -> String {
    const HEADS: [&str; 17] = [
        "case", "ring", "data", "frame", "mode", "engine", "cycles", "min-max", "ns", "Mpps", "reaches",
        "bound", "copied", "auto", "peer", "guide's", "verified",
    ];
    let mut cells = vec![HEADS.map(String::from)];
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    cells.extend(rows.iter().filter(|row| !latency_table::is_latency(row)).map(|row| {
        [
            match row.work_ns {
                0 => row.case.clone(),
                ns => format!("{} {ns} ns", row.case),
            },
            row.ring.into(),
            row.temperature.clone(),
            row.frame.to_string(),
            row.mode.clone(),
            engine_name(row),
            format!("{:.0}", row.cycles_per_packet),
            format!("{:.0}-{:.0}", row.min, row.max),
            format!("{:.1}", row.ns_per_packet),
            format!("{:.2}", row.mpps),
            or_dash(row.sustained_mpps.map(|mpps| format!("{mpps:.2}"))),
            or_dash(row.bound.or(row.fe_bound.unwrap_or_default().then_some("front end")).map(String::from)),
            or_dash(row.copied_bytes_per_packet.map(|bytes| format!("{bytes:.0}"))),
            or_dash(row.auto_over_better.map(|ratio| format!("{ratio:.2}x"))),
            or_dash(row.peer_ratio.map(|ratio| format!("{ratio:.2}x"))),
            or_dash(row.published.map(|mpps| format!("{mpps:.2}"))),
            format!("{}/{}", row.verified, row.received + row.lost),
        ]
    }));
    let latencies = latency_table::table(rows);
    if cells.len() == 1 {
        return latencies;
    }
    let mut text = columns(&cells, "lllrllrrrrrlrrrrr");
    text += "cycles, ns, Mpps: what a packet costs the core alone; reaches: Mpps of core and engine together;\n\
             copied: bytes that core and engine copied for a packet; +copier: another one on the other core beside;\n\
             auto: its speed over that of the better of cpu and offload, which alternated with it;\n\
             peer: our speed over that of --peer beside it; guide's: Mpps of a whole Xeon 8471N core at 1.8 GHz, with\n\
             DSA where an engine copies; verified: of the packets sent, those whose content and order were checked.\n";
    text + &peers(rows) + &break_even(rows) + &breakdown(rows) + &latencies
}

/// What the peers are that rows were measured beside.
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

/// The engine of a row, with what worked beside it.
fn engine_name(row: &Row) -> String {
    let beside = if row.background { " +copier" } else { "" };
    format!("{}{beside}", row.engine)
}

/// For each case, format, temperature and engine from which size on offloading costs the core less than copying, by a
/// straight line between the two sizes that were measured around it.
fn break_even(rows: &[Row]) -> String {
    let mut text = String::new();
    // Work on packets would be in both, submit-reap has no counterpart.
    let rows = || rows.iter().filter(|row| ["loop", "guest-to-guest"].contains(&row.case.as_str()));
    let of = |row: &Row| (row.case.clone(), row.ring, row.temperature.clone());
    let mut done = Vec::new();
    for row in rows().filter(|row| row.mode == "offload") {
        let key = (of(row), row.engine.as_str());
        if done.contains(&key) {
            continue;
        }
        done.push(key);
        let Row { case, ring, temperature, engine, .. } = row;
        let core = |frame| {
            let core = |other: &&Row| other.mode == "cpu" && other.engine == "cpu" && !other.background;
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

/// Figure 3 of the vhost guide, from the rows that have shares; nothing when none has.
fn breakdown(rows: &[Row]) -> String {
    const HEADS: [&str; 9] =
        ["case", "ring", "data", "frame", "mode", "engine", "switching", "virtqueue", "copying"];
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let mut cells = vec![HEADS.map(String::from)];
    cells.extend(rows.iter().filter_map(|row| {
        let shares = [row.share_switching?, row.share_virtqueue?, row.share_copy?].map(percent);
        let [switching, virtqueue, copy] = shares;
        let (case, ring, data) = (row.case.clone(), row.ring.into(), row.temperature.clone());
        let (mode, engine) = (row.mode.clone(), engine_name(row));
        Some([case, ring, data, row.frame.to_string(), mode, engine, switching, virtqueue, copy])
    }));
    if cells.len() == 1 {
        return String::new();
    }
    format!(
        "\nShares of the core's cycles, by the stage clock (the guide's Figure 3; copying is 59 % at 1518 bytes there):\n\
         {}copying: copies made by the core, or handing them over and learning of their end.\n",
        columns(&cells, "lllrllrrr")
    )
}

#[cfg(test)]
mod tests {
    use super::super::cells::{BLOCKS, QUICK_BLOCKS};
    use super::*;
    use crate::args::{Cli, Command};
    use crate::bench::BenchCommand;
    use clap::Parser;
    use offcore_bench::copier::Setup;

    fn bench(flags: &str) -> Result<vhost::Options, String> {
        let words = ["offcore", "bench", "vhost"].into_iter().chain(flags.split_whitespace());
        let command = Cli::try_parse_from(words).map_err(|e| e.to_string())?.command;
        let Command::Bench { command: BenchCommand::Vhost(args) } = command else { panic!("{flags}") };
        cases(&args)?;
        options(&args)
    }

    #[test]
    fn the_break_even_is_between_the_sizes_around_it() {
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
        // Each format has its own, and a copier beside is not the core's cost.
        rows.extend(rows.clone().into_iter().map(|row| Row { ring: "packed", ..row }));
        rows.insert(0, Row { background: true, ..row(64, "cpu", 1e6) });
        let text = break_even(&rows);
        assert_eq!(text.lines().filter(|line| line.contains("from about 144 bytes on")).count(), 2, "{text}");
    }

    #[test]
    fn defaults_are_the_whole_table() {
        let all = bench("").unwrap();
        assert_eq!((all.frames.len(), all.temperatures.len(), all.setups.len()), (7, 3, 3));
        assert_eq!((all.blocks, all.dpdk_lib), (BLOCKS, false));
        assert_eq!((all.rings, all.background), (Ring::ALL.to_vec(), false));
        let one = bench(
            "--quick --frame 64,1518 --temperature cold --engine core:1 --mode offload --peer dpdk-lib",
        )
        .unwrap();
        assert_eq!(one.frames, [64, 1518]);
        assert_eq!((one.temperatures, one.setups), (vec![Temperature::Cold], vec![Setup::HELPER]));
        assert_eq!((one.blocks, one.dpdk_lib), (QUICK_BLOCKS, true));
        assert_eq!(one.rings, [Ring::Split]);
        let packed =
            bench("--quick --case guest-to-guest --ring packed --background --peer dpdk-lib").unwrap();
        assert_eq!((packed.rings, packed.background), (vec![Ring::Packed], true));
    }

    #[test]
    fn bad_values_are_named() {
        for (flags, words) in [
            ("--frame 63", &["--frame", "from 64 to 1518"][..]),
            ("--temperature warm", &["--temperature", "hot, remote, cold"]),
            ("--engine dsa", &["--engine", "cpu, core:1"]),
            ("--mode dsa", &["--mode", "cpu, offload, auto"]),
            ("--mode auto --engine cpu", &["--mode", "--engine", "leave nothing"]),
            ("--peer vpp", &["--peer", "dpdk-lib"]),
            ("--case end-to-end --peer dpdk-lib", &["--peer dpdk-lib", "core-cost"]),
            ("--case submit-reap --peer dpdk", &["--peer dpdk", "end-to-end"]),
            ("--case end-to-end --peer ovs", &["--peer ovs", "guest-to-guest-e2e"]),
            ("--case end-to-end --plot a.svg", &["--plot", "work-ns"]),
            ("--case guest-to-guest --peer dpdk", &["--peer dpdk", "guest-to-guest-e2e"]),
            ("--case submit-reap --background", &["--background", "core-cost"]),
            ("--ring chained", &["--ring", "split, packed"]),
            ("--case latency --ring split,packed", &["--ring packed", "latency"]),
            ("--case latency --engine dsa-sim", &["--engine", "core-cost"]),
            ("--case latency,work-ns --temperature hot", &["--temperature", "core-cost"]),
            ("--case end-to-end --mode cpu,auto", &["--mode", "end-to-end"]),
            ("--copies 2", &["--copies 2", "guest-to-guest"]),
            ("--max-latency 20", &["--max-latency", "--case latency"]),
            ("--case guest-to-guest --copies 3", &["--copies", "1..=2"]),
            ("--lcores 0", &["--lcores", "found 1 of them"]),
            ("--lcores 0,1023", &["--lcores", "1023", "choose one of these"]),
        ] {
            let error = bench(flags).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{flags}: {error}");
        }
    }

    #[test]
    fn every_example_of_the_help_is_accepted() {
        let mut seen = 0;
        for flags in EXAMPLES.lines().filter_map(|line| line.trim().strip_prefix("offcore bench vhost")) {
            bench(flags).unwrap();
            seen += 1;
        }
        assert_eq!(seen, 10);
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
        assert!(!text.contains("Figure 3") && line.contains("engine     144"), "{text}");
        let beside = table(&[Row { background: true, ..row.clone() }]);
        assert!(beside.contains("core:1 +copier"), "{beside}");
        let busy = table(&[Row { bound: None, fe_bound: Some(true), ..row.clone() }]);
        assert!(busy.contains(" front end "), "{busy}");
        let shares = [0.25, 0.15, 0.6].map(Some);
        let [share_switching, share_virtqueue, share_copy] = shares;
        let text = table(&[Row { share_switching, share_virtqueue, share_copy, ..row }]);
        assert!(text.contains("Figure 3") && text.contains("25 %       15 %     60 %"), "{text}");
    }
}
