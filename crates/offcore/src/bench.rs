//! `offcore bench`: the published tables, re-measured here; rows written as a table, JSON or CSV.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand, ValueEnum};
use offcore_bench::core_cost::Copier;
use offcore_bench::end_to_end::{self, EndToEndOptions};
use offcore_bench::lockstep::OtherCore;
use offcore_bench::plot;
use offcore_bench::progress::Progress;
use offcore_bench::row::Row;
use offcore_bench::submit_reap;
use offcore_bench::temperature::Temperature;
use offcore_bench::vhost::{self, FRAMES};
use offcore_bench::work_sweep;
use offcore_mem::Hugepages;
use offcore_stats::lcore;
use serde_json::Value;

use crate::Failure;
use crate::args::{Lcores, choice, hugepages, lcores};
use crate::output::write;
use crate::report::columns;

/// A B B A blocks of a cell; the design asks for 200.
const BLOCKS: usize = 200;
/// The same with `--quick`.
const QUICK_BLOCKS: usize = 60;
/// How long a cell may take with `--quick`, so that 21 of them take less than a minute.
const QUICK_PATIENCE: Duration = Duration::from_secs(2);

/// What `offcore bench` measures.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Table 8 of the vhost guide: what forwarding a packet from guest to guest costs the core
    #[command(after_help = EXAMPLES)]
    Vhost(VhostArgs),
}

/// The examples of `offcore bench vhost --help`. A test parses each line that begins with `offcore`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  Everything, roughly, in less than a minute:
    offcore bench vhost --quick

  One cell, as an object that names what was measured and how:
    offcore bench vhost --frame 1518 --temperature remote --format json

  Beside DPDK's librte_vhost (a build with --features dpdk, as root), drawn:
    offcore bench vhost --peer dpdk-lib --temperature remote --plot cost.svg

  Packets a second, in turns with dpdk-testpmd, as root:
    offcore bench vhost --case end-to-end --peer dpdk

  What offloading leaves to an application that works on every packet:
    offcore bench vhost --case work-ns --frame 512,1518 --plot work.svg

A core cost is what the core spends on a packet: an engine has a rate of its
own. 'reaches' is what both reach together, 'bound' which of them is the limit.";

/// What `offcore bench vhost` understands.
#[derive(Args, Debug)]
pub(crate) struct VhostArgs {
    /// Frame lengths in bytes, FCS included [default: 64,128,256,512,1024,1280,1518]
    #[arg(long = "frame", value_name = "LIST", value_delimiter = ',', value_parser = frame)]
    pub frames: Vec<usize>,

    /// Where the data is: in this core's cache, in the other's, in none [default: all three]
    #[arg(long = "temperature", value_name = "LIST", value_delimiter = ',', value_parser = temperature())]
    pub temperatures: Vec<Temperature>,

    /// Who copies: the core, a helper core [default: both]
    #[arg(long = "engine", value_name = "LIST", value_delimiter = ',')]
    pub engines: Vec<Engine>,

    /// What is measured: what a packet costs the core, packets a second through a socket, or what a copy costs that
    /// somebody else makes [default: core-cost and submit-reap; end-to-end with --peer dpdk]
    #[arg(long = "case", value_name = "LIST", value_delimiter = ',')]
    pub cases: Vec<Case>,

    /// Measure other people's software beside ours, in turns
    #[arg(long, value_name = "PEER")]
    pub peer: Option<Peer>,

    /// The measured lcore and the guest's [default: the first two]
    #[arg(long, value_name = "A,B", value_parser = lcores)]
    pub lcores: Option<Lcores>,

    /// Pages of packet buffers and guests: the largest to be had, or these or none
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = hugepages())]
    pub hugepages: Hugepages,

    /// Fewer blocks: less than a minute for everything
    #[arg(long)]
    pub quick: bool,

    /// Draw the rows of core-cost, or of work-ns, as an SVG
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,

    /// A table for people, JSON with one object a line, or CSV
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,
}

/// How rows are written to stdout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// One object a line.
    Json,
    /// One line a row, the names in the first.
    Csv,
}

/// Who copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// The core itself.
    Cpu,
    /// A helper thread on the other core.
    #[value(name = "core:1")]
    Helper,
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
}

/// What is measured beside ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// DPDK's librte_vhost in the harness of core-cost.
    DpdkLib,
    /// dpdk-testpmd's net_vhost in place of our back end, end to end.
    Dpdk,
}

fn frame(text: &str) -> Result<usize, String> {
    let found = text.parse().ok().filter(|frame| (64..=1518).contains(frame));
    found.ok_or_else(|| "expected a number from 64 to 1518".into())
}

fn temperature() -> impl clap::builder::TypedValueParser<Value = Temperature> {
    choice(Temperature::ALL.map(Temperature::name))
}

/// Measures and writes what the flags ask for.
///
/// # Errors
/// [`Failure::Usage`] for lcores that are not to be had, [`Failure::Failed`] for the rest.
pub(crate) fn run(command: &BenchCommand) -> Result<(), Failure> {
    let BenchCommand::Vhost(args) = command;
    let options = options(args).map_err(Failure::Usage)?;
    let mut rows = Vec::new();
    let mut written = Ok(true);
    let mut emit = |row: Row| {
        if args.format == Format::Json && matches!(written, Ok(true)) {
            written = serde_json::to_string(&row).map_err(Into::into).and_then(|json| write(&(json + "\n")));
        }
        rows.push(row);
    };
    for case in cases(args).map_err(Failure::Usage)? {
        measure(case, args, &options, &mut emit)
            .context("offcore bench vhost")
            .map_err(|error| anyhow!("{error:#}"))?;
    }
    if let Some(path) = &args.plot {
        let drawn = if args.cases.contains(&Case::WorkNs) { plot::work_sweep } else { plot::core_cost };
        drawn(&rows, path).with_context(|| format!("--plot {}", path.display()))?;
    }
    match args.format {
        Format::Json => written?,
        Format::Csv => write(&csv(&rows)?)?,
        Format::Table => write(&table(&rows))?,
    };
    Ok(())
}

/// The cases to measure; those that the other flags need are there, or it is said what is missing.
fn cases(args: &VhostArgs) -> Result<Vec<Case>, String> {
    let cases = match (args.cases.is_empty(), args.peer) {
        (false, _) => args.cases.clone(),
        (true, Some(Peer::Dpdk)) => vec![Case::EndToEnd],
        (true, _) => vec![Case::CoreCost, Case::SubmitReap],
    };
    let need = |flag: &str, case, name| match cases.contains(&case) {
        true => Ok(()),
        false => Err(format!("{flag} goes with --case {name}: add it, or leave {flag} out")),
    };
    match args.peer {
        Some(Peer::DpdkLib) => need("--peer dpdk-lib", Case::CoreCost, "core-cost")?,
        Some(Peer::Dpdk) => need("--peer dpdk", Case::EndToEnd, "end-to-end")?,
        None => {}
    }
    if args.plot.is_some() && !cases.contains(&Case::WorkNs) {
        need("--plot", Case::CoreCost, "core-cost or work-ns")?;
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
        Case::WorkNs => work_sweep::run(options, &progress, emit),
        Case::SubmitReap => {
            lcore::pin(options.lcore)?;
            let other = OtherCore::start(options.other_lcore)?;
            for &frame in &options.frames {
                emit(submit_reap::run(frame as u32, if args.quick { 2_000 } else { 20_000 }, &other)?);
            }
            Ok(())
        }
        Case::EndToEnd => {
            let mut end_to_end =
                EndToEndOptions::new(&options.frames, args.quick, options.lcore, options.other_lcore);
            end_to_end.testpmd = args.peer == Some(Peer::Dpdk);
            end_to_end.hugepages = options.hugepages;
            end_to_end::run(&end_to_end, &progress, emit)
        }
    }
}

fn options(args: &VhostArgs) -> Result<vhost::Options, String> {
    let available = lcore::available().map_err(|error| format!("--lcores: {error}"))?;
    let [lcore, other_lcore] = match &args.lcores {
        None => [available.first().copied(), available.get(1).copied()],
        Some(Lcores(given)) => match given[..] {
            [a, b] => [Some(a), Some(b)],
            _ => {
                return Err(format!(
                    "--lcores: found {} of them, expected the measured one and the guest's",
                    given.len()
                ));
            }
        },
    };
    for found in [lcore, other_lcore].into_iter().flatten() {
        if !available.contains(&found) {
            return Err(format!("--lcores: {}", lcore::LcoreError::Unavailable { found, available }));
        }
    }
    let copier = |engine: &Engine| match engine {
        Engine::Cpu => Copier::Core,
        Engine::Helper => Copier::Helper,
    };
    Ok(vhost::Options {
        frames: if args.frames.is_empty() { FRAMES.into() } else { args.frames.clone() },
        temperatures: match args.temperatures.is_empty() {
            true => Temperature::ALL.into(),
            false => args.temperatures.clone(),
        },
        copiers: match args.engines.is_empty() {
            true => vec![Copier::Core, Copier::Helper],
            false => args.engines.iter().map(copier).collect(),
        },
        dpdk_lib: args.peer == Some(Peer::DpdkLib),
        blocks: if args.quick { QUICK_BLOCKS } else { BLOCKS },
        patience: args.quick.then_some(QUICK_PATIENCE),
        hugepages: args.hugepages,
        lcore: lcore.ok_or("--lcores: this process may run on no lcore")?,
        other_lcore,
    })
}

/// Columns are in the order of their names.
fn csv(rows: &[Row]) -> anyhow::Result<String> {
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let Value::Object(fields) = serde_json::to_value(row)? else {
            return Err(anyhow!("a row is no object"));
        };
        if index == 0 {
            text += &fields.keys().map(String::as_str).collect::<Vec<_>>().join(",");
            text.push('\n');
        }
        let cells = fields.values().map(|value| match value {
            Value::Null => String::new(),
            Value::String(text) if text.contains([',', '"', '\n']) => {
                format!("\"{}\"", text.replace('"', "\"\""))
            }
            Value::String(text) => text.clone(),
            other => other.to_string(),
        });
        text += &cells.collect::<Vec<_>>().join(",");
        text.push('\n');
    }
    Ok(text)
}

fn table(rows: &[Row]) -> String {
    const HEADS: [&str; 13] = [
        "case", "data", "frame", "engine", "cycles", "min-max", "ns", "Mpps", "reaches", "bound", "peer",
        "guide's", "verified",
    ];
    let mut cells = vec![HEADS.map(String::from)];
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    cells.extend(rows.iter().map(|row| {
        [
            match row.work_ns {
                0 => row.case.clone(),
                ns => format!("{} {ns} ns", row.case),
            },
            row.temperature.clone(),
            row.frame.to_string(),
            row.engine.clone(),
            format!("{:.0}", row.cycles_per_packet),
            format!("{:.0}-{:.0}", row.min, row.max),
            format!("{:.1}", row.ns_per_packet),
            format!("{:.2}", row.mpps),
            or_dash(row.sustained_mpps.map(|mpps| format!("{mpps:.2}"))),
            or_dash(row.bound.map(String::from)),
            or_dash(row.peer_ratio.map(|ratio| format!("{ratio:.2}x"))),
            or_dash(row.published.map(|mpps| format!("{mpps:.2}"))),
            format!("{}/{}", row.verified, row.received + row.lost),
        ]
    }));
    let mut text = columns(&cells, "llrlrrrrrlrrr");
    text += "cycles, ns, Mpps: what a packet costs the core alone; reaches: Mpps of core and engine together;\n\
             peer: our speed over librte_vhost's beside it; guide's: Mpps of a whole Xeon 8471N core at 1.8 GHz, with\n\
             DSA where an engine copies; verified: of the packets sent, those whose content and order were checked.\n";
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn bench(flags: &str) -> Result<vhost::Options, String> {
        let words = ["offcore", "bench", "vhost"].into_iter().chain(flags.split_whitespace());
        let command = Cli::try_parse_from(words).map_err(|e| e.to_string())?.command;
        let Command::Bench { command: BenchCommand::Vhost(args) } = command else { panic!("{flags}") };
        cases(&args)?;
        options(&args)
    }

    #[test]
    fn defaults_are_the_whole_table() {
        let all = bench("").unwrap();
        assert_eq!((all.frames.len(), all.temperatures.len(), all.copiers.len()), (7, 3, 2));
        assert_eq!((all.blocks, all.dpdk_lib), (BLOCKS, false));
        let one =
            bench("--quick --frame 64,1518 --temperature cold --engine core:1 --peer dpdk-lib").unwrap();
        assert_eq!(one.frames, [64, 1518]);
        assert_eq!((one.temperatures, one.copiers), (vec![Temperature::Cold], vec![Copier::Helper]));
        assert_eq!((one.blocks, one.dpdk_lib), (QUICK_BLOCKS, true));
    }

    #[test]
    fn bad_values_are_named() {
        for (flags, words) in [
            ("--frame 63", &["--frame", "from 64 to 1518"][..]),
            ("--temperature warm", &["--temperature", "hot, remote, cold"]),
            ("--engine dsa", &["--engine", "cpu, core:1"]),
            ("--peer vpp", &["--peer", "dpdk-lib"]),
            ("--case end-to-end --peer dpdk-lib", &["--peer dpdk-lib", "core-cost"]),
            ("--case submit-reap --peer dpdk", &["--peer dpdk", "end-to-end"]),
            ("--case end-to-end --plot a.svg", &["--plot", "work-ns"]),
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
        assert_eq!(seen, 5);
    }

    #[test]
    fn rows_become_csv_and_a_table() {
        let row = Row {
            bench: "vhost",
            case: "a, \"quoted\" case".into(),
            frame: 64,
            engine: "core:1".into(),
            temperature: "remote".into(),
            cycles_per_packet: 80.4,
            bound: Some("engine"),
            received: 9,
            verified: 9,
            lost: 1,
            ..Row::default()
        };
        let text = csv(&[row.clone(), row.clone()]).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("arrangement,bench,bound,burst,"), "{}", lines[0]);
        assert!(lines[1].starts_with(",vhost,engine,0,"), "{}", lines[1]);
        assert!(lines[1].contains(",\"a, \"\"quoted\"\" case\","), "{}", lines[1]);
        let text = table(&[row]);
        let line = text.lines().nth(1).unwrap();
        assert!(line.contains("remote     64  core:1      80") && line.ends_with("9/10"), "{text}");
    }
}
