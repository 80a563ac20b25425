//! `offcore bench vhost`: Table 8 of the vhost guide, and the shares of Figure 3.

mod table;

use std::time::Duration;

use clap::{Args, ValueEnum};
use offcore_bench::copier::Copier;
use offcore_bench::end_to_end::{self, EndToEndOptions};
use offcore_bench::flip;
use offcore_bench::latency::{self, LatencyOptions};
use offcore_bench::lockstep::OtherCore;
use offcore_bench::neighbour::{self, NeighbourOptions};
use offcore_bench::plot;
use offcore_bench::progress::Progress;
use offcore_bench::row::Row;
use offcore_bench::submit_reap;
use offcore_bench::temperature::Temperature;
use offcore_bench::vhost::{self, FRAMES};
use offcore_bench::work_sweep;
use offcore_bench::workload::{GuestKind, Ring, Route};
use offcore_stats::lcore;

use super::Rows;
use super::cells::{CellArgs, FlagCases, or};
use crate::args::{one_of, within};
use crate::failure::Failure;
use table::table;

pub(crate) const EXAMPLES: &str = "\
Examples:
  The default cases in a short run of a few minutes:
    offcore bench vhost --quick

  One cell as a JSON object:
    offcore bench vhost --frame 1518 --temperature remote --format json

  DPDK's librte_vhost as the peer, with a plot (a build with --features dpdk, as
  root):
    offcore bench vhost --peer dpdk-lib --temperature remote --plot cost.svg

  Guests that use their virtqueues like Linux, with the same peer:
    offcore bench vhost --guest linux --peer dpdk-lib --temperature remote

  Mode auto compared with the better of the core and an engine:
    offcore bench vhost --mode cpu,offload,auto --engine cpu,core:1

  The same with mixed frame lengths, and with data whose temperature changes:
    offcore bench vhost --case imix,flip --ring split

  A simulated DSA device as the engine:
    offcore bench vhost --engine cpu,dsa-sim,dsa-sim-direct --frame 1518

  Packets per second, in turns with dpdk-testpmd, as root:
    offcore bench vhost --case end-to-end --peer dpdk --ring split,packed

  Packets per second from guest to guest, in turns with Open vSwitch, as root:
    offcore bench vhost --case guest-to-guest-e2e --peer ovs

  The core's cost of a packet from guest to guest, and packets per second:
    offcore bench vhost --case guest-to-guest --ring split --frame 1024,1518
    offcore bench vhost --case guest-to-guest-e2e --frame 1024,1518

  The effect of offloading on an application that works on every packet:
    offcore bench vhost --case work-ns --frame 512,1518 --plot work.svg

  Latencies at 50, 80 and 95 % of capacity, and with mode auto limited to 20 us:
    offcore bench vhost --case latency --max-latency 20

  A guest's rate beside a guest that causes as much work as it may:
    offcore bench vhost --case neighbour --frame 64

The core cost is the core's time per packet. The time in which an engine copies is
not included. 'reaches' is the rate of core and engine together, 'bottleneck' the
slower of the two.";

/// Default frame lengths of case flip: the core's copy of cold data is most expensive for the longest frames.
const FLIP_FRAMES: [usize; 2] = [512, 1518];

#[derive(Args, Debug)]
pub(crate) struct VhostArgs {
    #[command(flatten)]
    pub cells: CellArgs,

    /// Cases to measure: the core's cost of a packet or of an offloaded copy, packets per second through a socket, or
    /// latencies [default: core-cost and submit-reap; end-to-end with --peer dpdk; guest-to-guest-e2e with --peer ovs]
    #[arg(long = "case", value_name = "LIST", value_delimiter = ',')]
    pub cases: Vec<Case>,

    /// With case latency: maximum microseconds for a packet through an engine, in the second row of mode auto [default:
    /// 20]
    #[arg(long, value_name = "MICROSECONDS", value_parser = within(1..=1_000_000))]
    pub max_latency: Option<usize>,

    /// Virtqueue formats: split, packed [default: both]
    #[arg(long = "ring", value_name = "LIST", value_delimiter = ',', value_parser = one_of(Ring::NAMES, Ring::find))]
    pub rings: Vec<Ring>,

    /// Use of virtqueues by guests: simple (one descriptor per packet), or linux (as in Linux, with event index,
    /// offload headers and indirect tables)
    #[arg(long = "guest", value_name = "LIST", value_delimiter = ',', default_value = "simple", value_parser = one_of(GuestKind::NAMES, GuestKind::find))]
    pub guests: Vec<GuestKind>,

    /// Copies of a payload from guest to guest: 1 (where possible), or 2 (always)
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub copies: u8,

    /// Also measure this other software, in turns
    #[arg(long, value_name = "PEER")]
    pub peer: Option<Peer>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// TSC cycles of the core for forwarding a packet.
    CoreCost,
    /// The same with frames of the Internet mix: 64, 594 and 1518 bytes in the ratio 7:4:1.
    Imix,
    /// Core cost with data that is alternately hot and cold, for 100 ms each: mode auto compared with an oracle.
    Flip,
    /// TSC cycles for submitting a copy and for detecting its completion.
    SubmitReap,
    /// Core cost with 0 to 1600 ns of application work per packet.
    WorkNs,
    /// Packets per second between a back end and a front end on two cores, with copies by the core.
    EndToEnd,
    /// Latencies between the two for packets that are sent on a schedule (open loop).
    Latency,
    /// The rate of an honest guest beside a guest that causes the worker as much work as it may.
    Neighbour,
    /// TSC cycles of the core for forwarding a packet from one guest to another.
    GuestToGuest,
    /// Packets per second from one front end to another through a back end, with copies by the core.
    #[value(name = "guest-to-guest-e2e")]
    GuestToGuestEndToEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// DPDK's librte_vhost in the harness of core-cost.
    DpdkLib,
    /// dpdk-testpmd's net_vhost in place of our back end, end to end.
    Dpdk,
    /// Open vSwitch with DPDK in place of our back end, from guest to guest; both are learning switches.
    Ovs,
}

pub(crate) fn run(args: &VhostArgs) -> Result<(), Failure> {
    let options = options(args)?;
    let cases = cases(args)?;
    let mut rows = Rows::new(args.cells.bench.format, table);
    for case in cases {
        measure(case, args, &options, &mut |row| rows.push(row))?;
    }
    let drawn = if args.cases.contains(&Case::WorkNs) { plot::work_sweep } else { plot::core_cost };
    Ok(rows.finish(args.cells.plot.as_ref(), drawn)?)
}

/// Returns the cases to measure. The other flags may require a case, and an error names it if it is missing.
fn cases(args: &VhostArgs) -> Result<Vec<Case>, String> {
    let cases = match (args.cases.is_empty(), args.peer) {
        (false, _) => args.cases.clone(),
        (true, Some(Peer::Dpdk)) => vec![Case::EndToEnd],
        (true, Some(Peer::Ovs)) => vec![Case::GuestToGuestEndToEnd],
        (true, _) => vec![Case::CoreCost, Case::SubmitReap],
    };
    const COSTS: FlagCases<'_, Case> = FlagCases::new(
        &[Case::CoreCost, Case::Imix, Case::GuestToGuest],
        "core-cost, imix or guest-to-guest",
    );
    const RATES: FlagCases<'_, Case> =
        FlagCases::new(&[Case::EndToEnd, Case::GuestToGuestEndToEnd], "end-to-end or guest-to-guest-e2e");
    const ENGINES: FlagCases<'_, Case> = FlagCases::new(
        &[Case::CoreCost, Case::Imix, Case::Flip, Case::GuestToGuest, Case::WorkNs, Case::SubmitReap],
        "core-cost, imix, flip, guest-to-guest, work-ns or submit-reap",
    );
    const BETWEEN: FlagCases<'_, Case> = FlagCases::new(
        &[Case::GuestToGuest, Case::GuestToGuestEndToEnd],
        "guest-to-guest or guest-to-guest-e2e",
    );
    const DRAWN: FlagCases<'_, Case> = FlagCases::new(
        &[Case::CoreCost, Case::Imix, Case::GuestToGuest, Case::WorkNs],
        "core-cost, guest-to-guest or work-ns",
    );
    let cells = &args.cells;
    for (given, flag, wanted) in [
        (!cells.temperatures.is_empty(), "--temperature", COSTS),
        (!cells.engines.is_empty(), "--engine", ENGINES),
        (args.guests != [GuestKind::Simple], "--guest linux", COSTS),
        (args.copies != 1, "--copies 2", BETWEEN),
        (args.max_latency.is_some(), "--max-latency", FlagCases::new(&[Case::Latency], "latency")),
        (args.peer == Some(Peer::DpdkLib), "--peer dpdk-lib", COSTS),
        (args.peer == Some(Peer::Dpdk), "--peer dpdk", RATES),
        (args.peer == Some(Peer::Ovs), "--peer ovs", FlagCases::new(&RATES.cases[1..], "guest-to-guest-e2e")),
        (cells.plot.is_some(), "--plot", DRAWN),
        (cells.background, "--background", COSTS),
    ] {
        wanted.check(&cases, given, flag)?;
    }
    let rings = args.rings.iter().any(|&ring| ring != Ring::Split);
    for (given, flag, unwanted, names) in [
        (
            rings,
            "--ring packed",
            &[Case::Latency, Case::Neighbour, Case::SubmitReap][..],
            "latency and neighbour, which use split rings, and submit-reap, which uses none",
        ),
        (!cells.frames.is_empty(), "--frame", &[Case::Imix], "imix, which has its own lengths"),
        (
            !cells.modes.is_empty(),
            "--mode",
            &[Case::EndToEnd, Case::GuestToGuestEndToEnd, Case::Neighbour],
            "end-to-end, guest-to-guest-e2e and neighbour, in which the core copies",
        ),
    ] {
        if given && cases.iter().all(|case| unwanted.contains(case)) {
            return Err(format!("{flag} does not apply to {names}: add another --case, or remove {flag}"));
        }
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
        Case::Imix => vhost::run(&vhost::Options { imix: true, ..options.clone() }, &progress, emit),
        Case::Flip => {
            let frames = or(&args.cells.frames, &FLIP_FRAMES);
            flip::run(&vhost::Options { frames, ..options.clone() }, &progress, emit)
        }
        Case::WorkNs => work_sweep::run(options, &progress, emit),
        Case::SubmitReap => {
            lcore::pin(options.extent.lcore)?;
            let other = OtherCore::start(options.extent.other_lcore)?;
            let bursts = if args.cells.bench.quick { 2_000 } else { 20_000 };
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
            let mut end_to_end = EndToEndOptions::new(
                &options.frames,
                args.cells.bench.quick,
                options.extent.lcore,
                options.extent.other_lcore,
            );
            end_to_end.route = if case == Case::EndToEnd { Route::Loop } else { Route::GuestToGuest };
            end_to_end.rings.clone_from(&options.rings);
            end_to_end.one_copy = options.one_copy;
            end_to_end.peer = match args.peer {
                Some(Peer::Dpdk) => Some(end_to_end::Peer::Testpmd),
                Some(Peer::Ovs) => Some(end_to_end::Peer::Ovs),
                Some(Peer::DpdkLib) | None => None,
            };
            end_to_end.hugepages = options.extent.hugepages;
            end_to_end::run(&end_to_end, &progress, emit)
        }
        Case::Latency => {
            let frames = or(&args.cells.frames, &latency::FRAMES);
            let mut latency = LatencyOptions::new(
                &frames,
                args.cells.bench.quick,
                options.extent.lcore,
                options.extent.other_lcore,
            );
            if let Some(us) = args.max_latency {
                latency.max_latency = Duration::from_micros(us as u64);
            }
            latency.hugepages = options.extent.hugepages;
            if !args.cells.modes.is_empty() {
                latency.modes.clone_from(&args.cells.modes);
            }
            latency::run(&latency, &progress, emit)
        }
        Case::Neighbour => {
            let frames = or(&args.cells.frames, &neighbour::FRAMES);
            let mut neighbour = NeighbourOptions::new(
                &frames,
                args.cells.bench.quick,
                options.extent.lcore,
                options.extent.other_lcore,
            );
            neighbour.hugepages = options.extent.hugepages;
            neighbour::run(&neighbour, &progress, emit)
        }
    }
}

fn options(args: &VhostArgs) -> Result<vhost::Options, Failure> {
    let cells = &args.cells;
    Ok(vhost::Options {
        route: Route::Loop,
        one_copy: args.copies == 1,
        rings: or(&args.rings, &Ring::ALL),
        guests: args.guests.clone(),
        frames: or(&cells.frames, &FRAMES),
        imix: false,
        temperatures: or(&cells.temperatures, &Temperature::ALL),
        setups: cells.setups()?,
        background: cells.background,
        breakdown: true,
        dpdk_lib: args.peer == Some(Peer::DpdkLib),
        noise_floor: true,
        extent: cells.bench.extent()?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::cells::{BLOCKS, QUICK_BLOCKS};
    use super::*;
    use crate::bench::BenchCommand;
    use crate::cli::Command;
    use crate::cli::lines::{command, examples};
    use offcore_bench::copier::Setup;

    fn bench(flags: &str) -> Result<vhost::Options, String> {
        parsed_line(&format!("offcore bench vhost {flags}"))
    }

    fn parsed_line(line: &str) -> Result<vhost::Options, String> {
        let Command::Bench { command: BenchCommand::Vhost(args) } = command(line)? else { panic!("{line}") };
        cases(&args)?;
        options(&args).map_err(|failure| failure.to_string())
    }

    #[test]
    fn defaults_cover_the_whole_table() {
        let all = bench("").unwrap();
        assert_eq!((all.frames.len(), all.temperatures.len(), all.setups.len()), (7, 3, 3));
        assert_eq!((all.extent.blocks, all.dpdk_lib), (BLOCKS, false));
        assert_eq!((all.rings, all.background), (Ring::ALL.to_vec(), false));
        let one = bench(
            "--quick --frame 64,1518 --temperature cold --engine core:1 --mode offload --peer dpdk-lib",
        )
        .unwrap();
        assert_eq!(one.frames, [64, 1518]);
        assert_eq!((one.temperatures, one.setups), (vec![Temperature::Cold], vec![Setup::HELPER]));
        assert_eq!((one.extent.blocks, one.dpdk_lib), (QUICK_BLOCKS, true));
        assert_eq!((one.rings, one.guests), (Ring::ALL.to_vec(), vec![GuestKind::Simple]));
        let packed =
            bench("--quick --case guest-to-guest --ring packed --background --peer dpdk-lib").unwrap();
        assert_eq!((packed.rings, packed.background), (vec![Ring::Packed], true));
    }

    #[test]
    fn errors_name_invalid_values() {
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
            ("--case imix --frame 64", &["--frame", "imix"]),
            ("--guest windows", &["--guest", "simple, linux"]),
            ("--case latency --guest linux", &["--guest linux", "core-cost"]),
            ("--ring chained", &["--ring", "split, packed"]),
            ("--case latency --ring split,packed", &["--ring packed", "latency"]),
            ("--case latency --engine dsa-sim", &["--engine", "core-cost"]),
            ("--case latency,work-ns --temperature hot", &["--temperature", "core-cost"]),
            ("--case end-to-end --mode cpu,auto", &["--mode", "end-to-end"]),
            ("--copies 2", &["--copies 2", "guest-to-guest"]),
            ("--max-latency 20", &["--max-latency", "--case latency"]),
            ("--case guest-to-guest --copies 3", &["--copies", "1..=2"]),
            ("--lcores 0", &["--lcores", "found 1, expected 2"]),
            ("--lcores 0,1023", &["--lcores", "1023", "available lcores"]),
        ] {
            let error = bench(flags).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{flags}: {error}");
        }
    }

    #[test]
    fn help_examples_are_accepted() {
        examples(EXAMPLES, 14).iter().for_each(|line| drop(parsed_line(line).unwrap()));
    }
}
