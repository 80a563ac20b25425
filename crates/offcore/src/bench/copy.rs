//! `offcore bench copy`: Table 5 of the packet-copy guide (DPDK's dpdk-dma), and the required ports, over veth.

use anyhow::bail;
use clap::{Args, ValueEnum};
use offcore_bench::copy::veth::{self, Direction, PortKind, VethOptions};
use offcore_bench::copy::{self, FRAMES};
use offcore_bench::plot;
use offcore_bench::progress::Progress;
use offcore_bench::row::Row;
use offcore_bench::temperature::Temperature;

use super::cells::{CellArgs, FlagCases, or};
use super::columns::*;
use super::{Rows, end_to_end};
use crate::args::one_of;
use crate::failure::Failure;
use crate::output::table::digits;

/// Rounds of 32768 packets in case conversion.
#[cfg(feature = "dpdk")]
const ROUNDS: usize = 200;
/// Rounds with `--quick`.
#[cfg(feature = "dpdk")]
const QUICK_ROUNDS: usize = 50;

pub(crate) const EXAMPLES: &str = "\
Examples:
  The core's cost of forwarding a packet with a copy, in less than a minute:
    offcore bench copy --quick

  One cell as a JSON object:
    offcore bench copy --frame 1024 --temperature remote --format json

  Copies by the core, by a helper core and by a simulated DSA device:
    offcore bench copy --engine cpu,core:1,dsa-sim --frame 64,1024

  Copies by the core while the other core also copies, in a plot with the guide's
  bars:
    offcore bench copy --temperature remote --background --plot copy.svg

  Packets per second of the af_xdp and af_packet ports, in turns with
  dpdk-testpmd, as root:
    offcore bench copy --peer dpdk

  One of these ports without the peer:
    offcore bench copy --case end-to-end --port af_xdp --direction forward --frame 64

  The cost of converting an mbuf to a packet handle and back (a build with
  --features dpdk):
    offcore bench copy --case conversion

The core cost is the core's time per packet. The driver of a network card is not
included, nor is the time in which an engine copies. 'reaches' is the rate of core
and engine together, 'bottleneck' the slower of the two.";

#[derive(Args, Debug)]
pub(crate) struct CopyArgs {
    #[command(flatten)]
    pub cells: CellArgs,

    /// Cases to measure: the core's cost of a packet, packets per second over a veth pair, or the cost of conversion
    /// between DPDK's mbufs and packet handles [default: core-cost; end-to-end, with frames 64,1518, with --peer dpdk]
    #[arg(long = "case", value_name = "LIST", value_delimiter = ',')]
    pub cases: Vec<Case>,

    /// Port types for case end-to-end: af_xdp, af_packet [default: both]
    #[arg(long = "port", value_name = "LIST", value_delimiter = ',', value_parser = one_of(PortKind::NAMES, PortKind::find))]
    pub ports: Vec<PortKind>,

    /// Directions of the packets in case end-to-end: txonly, rxonly, forward [default: all three]
    #[arg(long = "direction", value_name = "LIST", value_delimiter = ',', value_parser = one_of(Direction::NAMES, Direction::find))]
    pub directions: Vec<Direction>,

    /// Also measure this other software, in turns
    #[arg(long, value_name = "PEER")]
    pub peer: Option<Peer>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// TSC cycles of the core for receiving, copying and sending a packet, including new addresses.
    CoreCost,
    /// Packets per second of a port over a veth pair.
    EndToEnd,
    /// TSC cycles for the conversion of an mbuf to a packet handle and back.
    Conversion,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// dpdk-testpmd with net_af_xdp and net_af_packet in place of our ports, end to end.
    Dpdk,
}

pub(crate) fn run(args: &CopyArgs) -> Result<(), Failure> {
    let cases = cases(args)?;
    let options = options(args)?;
    let mut rows = Rows::new(args.cells.bench.format, table);
    for case in cases {
        measure(case, args, &options, &mut |row| rows.push(row))?;
    }
    Ok(rows.finish(args.cells.plot.as_ref(), plot::packet_copy)?)
}

/// Returns the cases to measure. The other flags may require a case, and an error names it if it is missing.
fn cases(args: &CopyArgs) -> Result<Vec<Case>, String> {
    let cases = match (args.cases.is_empty(), args.peer) {
        (false, _) => args.cases.clone(),
        (true, Some(Peer::Dpdk)) => vec![Case::EndToEnd],
        (true, None) => vec![Case::CoreCost],
    };
    const COSTS: FlagCases<'_, Case> = FlagCases::new(&[Case::CoreCost], "core-cost");
    const RATES: FlagCases<'_, Case> = FlagCases::new(&[Case::EndToEnd], "end-to-end");
    for (given, flag, wanted) in [
        (!args.cells.temperatures.is_empty(), "--temperature", COSTS),
        (!args.cells.modes.is_empty(), "--mode", COSTS),
        (!args.cells.engines.is_empty(), "--engine", COSTS),
        (args.cells.background, "--background", COSTS),
        (args.cells.plot.is_some(), "--plot", COSTS),
        (!args.ports.is_empty(), "--port", RATES),
        (!args.directions.is_empty(), "--direction", RATES),
        (args.peer.is_some(), "--peer dpdk", RATES),
    ] {
        wanted.check(&cases, given, flag)?;
    }
    Ok(cases)
}

fn measure(
    case: Case,
    args: &CopyArgs,
    options: &copy::Options,
    emit: &mut dyn FnMut(Row),
) -> anyhow::Result<()> {
    let progress = Progress::visible();
    match case {
        Case::CoreCost => copy::run(options, &progress, emit),
        Case::EndToEnd => {
            let options = veth_options(args, options);
            match options.missing() {
                Some(missing) => bail!("end-to-end: {missing}"),
                None => veth::run(&options, &progress, emit),
            }
        }
        Case::Conversion => conversion(args, options, emit),
    }
}

#[cfg(feature = "dpdk")]
fn conversion(args: &CopyArgs, options: &copy::Options, emit: &mut dyn FnMut(Row)) -> anyhow::Result<()> {
    let rounds = if args.cells.bench.quick { QUICK_ROUNDS } else { ROUNDS };
    copy::conversion::run(options.extent.lcore, rounds, emit)
}

#[cfg(not(feature = "dpdk"))]
fn conversion(_: &CopyArgs, _: &copy::Options, _: &mut dyn FnMut(Row)) -> anyhow::Result<()> {
    bail!("conversion: {}", crate::args::eal::WITHOUT)
}

fn options(args: &CopyArgs) -> Result<copy::Options, Failure> {
    let cells = &args.cells;
    Ok(copy::Options {
        frames: or(&cells.frames, &FRAMES),
        temperatures: or(&cells.temperatures, &Temperature::ALL),
        setups: cells.setups()?,
        background: cells.background,
        extent: cells.bench.extent()?,
    })
}

fn veth_options(args: &CopyArgs, options: &copy::Options) -> VethOptions {
    let frames = or(&args.cells.frames, &veth::FRAMES);
    let mut veth =
        VethOptions::new(&frames, args.cells.bench.quick, options.extent.lcore, options.extent.other_lcore);
    veth.ports = or(&args.ports, &PortKind::ALL);
    veth.directions = or(&args.directions, &Direction::ALL);
    veth.testpmd = args.peer == Some(Peer::Dpdk);
    veth.hugepages = options.extent.hugepages;
    veth
}

fn table(rows: &[Row]) -> String {
    let of =
        |arrangement: &str| rows.iter().filter(|row| row.head.arrangement == arrangement).collect::<Vec<_>>();
    let counted = "by the interface at the far end or, with rxonly, by the port";
    let tables = [core_costs(&of("core-cost")), end_to_end::table(&of("end-to-end"), counted, "sender")];
    tables.into_iter().filter(|table| !table.is_empty()).collect::<Vec<_>>().join("\n")
}

fn core_costs(rows: &[&Row]) -> String {
    let list: &[Column] = &[
        CASE,
        DATA,
        FRAME,
        MODE,
        ("<engine", |row| {
            format!("{}{}", row.head.engine, if row.core.background { " +copier" } else { "" })
        }),
        ("cycles", |row| format!("{:.0}", row.figures.cycles_per_packet)),
        SPREAD,
        NS,
        MPPS,
        GBPS,
        REACHES,
        BOUND,
        OVER_CPU,
        AUTO,
        ("guide's", |row| digits(row.published.published, 0)),
        VERIFIED,
    ];
    listed(
        rows,
        list,
        "cycles, ns, Mpps, Gbit/s: cost of a packet for the core alone, without the driver of a network card;\n\
         reaches: Mpps of core and engine together; bottleneck: the slower of the two; +copier: while the other core\n\
         also copies; over cpu: speed relative to mode cpu; auto: speed relative to the better of cpu and offload,\n\
         which alternated with it; guide's: Gbit/s of a whole lcore of a Xeon Gold 6438N, with copies by software for\n\
         mode cpu and by DSA for mode offload; verified: packets whose content and order were checked, of the packets\n\
         sent.\n",
    )
}

#[cfg(test)]
mod tests {
    use super::super::cells::BLOCKS;
    use super::*;
    use crate::bench::BenchCommand;
    use crate::cli::Command;
    use crate::cli::lines::{command, examples};
    use offcore_bench::row::{Counts, Head};

    fn parsed(flags: &str) -> Result<(CopyArgs, copy::Options), String> {
        parsed_line(&format!("offcore bench copy {flags}"))
    }

    fn parsed_line(line: &str) -> Result<(CopyArgs, copy::Options), String> {
        let Command::Bench { command: BenchCommand::Copy(args) } = command(line)? else { panic!("{line}") };
        cases(&args)?;
        let options = options(&args).map_err(|failure| failure.to_string())?;
        Ok((args, options))
    }

    #[test]
    fn defaults_cover_the_whole_table() {
        let (args, options) = parsed("").unwrap();
        assert_eq!((options.frames.len(), options.temperatures.len(), options.setups.len()), (7, 3, 3));
        assert_eq!(
            (options.extent.blocks, options.background, options.extent.timeout),
            (BLOCKS, false, None)
        );
        assert_eq!(cases(&args).unwrap(), [Case::CoreCost]);
        let (args, options) = parsed("--peer dpdk --port af_xdp --direction rxonly,forward --quick").unwrap();
        assert_eq!(cases(&args).unwrap(), [Case::EndToEnd]);
        let veth = veth_options(&args, &options);
        assert_eq!((&veth.frames[..], veth.testpmd, veth.restarts), (&veth::FRAMES[..], true, 1));
        assert_eq!((veth.ports.len(), veth.directions.len()), (1, 2));
    }

    #[test]
    fn errors_name_invalid_values() {
        for (flags, words) in [
            ("--frame 63", &["--frame", "from 64 to 1518"][..]),
            ("--temperature warm", &["--temperature", "hot, remote, cold"]),
            ("--engine dsa", &["--engine", "cpu, core:1"]),
            ("--mode auto --engine cpu", &["--mode", "--engine", "leave nothing"]),
            ("--port tap", &["--port", "af_xdp, af_packet"]),
            ("--port af_xdp", &["--port", "--case end-to-end"]),
            ("--direction up --case end-to-end", &["--direction", "txonly, rxonly, forward"]),
            ("--peer dpdk --mode cpu", &["--mode", "core-cost"]),
            ("--case core-cost --peer dpdk", &["--peer dpdk", "end-to-end"]),
            ("--case end-to-end --plot a.svg", &["--plot", "core-cost"]),
            ("--peer vpp", &["--peer", "dpdk"]),
            ("--lcores 0", &["--lcores", "found 1, expected 2"]),
        ] {
            let error = parsed(flags).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{flags}: {error}");
        }
    }

    #[test]
    fn help_examples_are_accepted() {
        examples(EXAMPLES, 7).iter().for_each(|line| drop(parsed_line(line).unwrap()));
    }

    #[test]
    fn rows_become_two_tables() {
        let head = Head {
            arrangement: "core-cost",
            case: "forward".into(),
            frame: 1024,
            mode: "offload".into(),
            engine: "core:1".into(),
            temperature: "remote".into(),
            ..Head::default()
        };
        let mut cost = Row { head, ..Row::default() };
        (cost.figures.cycles_per_packet, cost.figures.gbps) = (80.4, 211.25);
        cost.published.published = Some(200.0);
        cost.ratios.offload.offload_over_cpu = Some(5.25);
        cost.core.bound = Some("engine");
        cost.counts = Counts { received: 9, verified: 9, lost: 0 };
        let text = table(std::slice::from_ref(&cost));
        let line = text.lines().nth(1).unwrap();
        assert!(line.trim_start().starts_with("forward  remote   1024  offload  core:1      80"), "{text}");
        assert!(
            line.contains("211.2") && line.contains("5.25x") && line.ends_with("200       9/9"),
            "{text}"
        );
        assert!(!text.contains("peer"), "{text}");
        let (case, port) = ("forward".into(), Some("af_xdp"));
        let head = Head { arrangement: "end-to-end", case, port, frame: 64, ..Head::default() };
        let mut rate = Row { head, ..Row::default() };
        (rate.figures.mpps, rate.peer.peer_ratio, rate.ends.fe_bound) = (1.5, Some(1.25), Some(true));
        let text = table(&[cost, rate]);
        let line = text.lines().find(|line| line.trim_start().starts_with("af_xdp")).unwrap();
        assert!(line.contains("1.25x") && line.contains("sender"), "{text}");
    }
}
