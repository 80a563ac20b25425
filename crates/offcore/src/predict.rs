//! `offcore predict`: predicts the benefit of DSA for this machine, or for a guide's machine, at given packet sizes.

use std::fmt::Write;

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use offcore_bench::predict::{self, GUIDES, Guide, Machine, Options};
use offcore_bench::progress::Progress;
use offcore_bench::row::Row;
use offcore_bench::temperature::Temperature;
use offcore_bench::vhost::FRAMES;
use offcore_mem::Hugepages;

use crate::args::within;
use crate::bench::cells::{BenchArgs, or, temperature};
use crate::bench::{FRAME, Rows, two_lcores};
use crate::failure::Failure;
use crate::output::table::{columns, digits, or_dash};
use crate::output::told;

/// A B B A blocks of a frame length.
const BLOCKS: usize = 200;
/// A B B A blocks with `--quick`.
const QUICK_BLOCKS: usize = 40;

pub(crate) const EXAMPLES: &str = "\
Examples:
  Predict the gain from one DSA device for one core and a 100G port:
    offcore predict

  The same for a larger machine, with two packet sizes:
    offcore predict --cores 8 --ports 2 --devices 2 --frame 512,1518

  Uncached data, with results as JSON:
    offcore predict --temperature cold --quick --format json

  The machines of the guides, with published figures beside the prediction:
    offcore predict --machine guide

The core's cost per packet is measured on this machine, with the real driver and
a simulated device. The device's speed comes from a model with a virtual clock,
so only the figures of 'cpu' are measurements.";

#[derive(Args, Debug)]
#[command(mut_arg("quick", |arg| arg.help("Measure fewer blocks: a few seconds")))]
pub(crate) struct PredictArgs {
    /// This machine, or the machines of the guides
    #[arg(long, value_name = "MACHINE", default_value = "here")]
    pub machine: MachineArg,

    /// Number of forwarding cores, each with the measured performance
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=1024))]
    pub cores: usize,

    /// Number of ports
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=64))]
    pub ports: usize,

    /// Speed of a port in Gbit/s
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = within(1..=1000))]
    pub port_gbps: usize,

    /// Number of DSA devices
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=64))]
    pub devices: usize,

    /// Number of DSA engines per device
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = within(1..=4))]
    pub engines: usize,

    /// Frame lengths in bytes, including FCS [default: 64,128,256,512,1024,1280,1518]
    #[arg(long = "frame", value_name = "LIST", value_delimiter = ',', value_parser = within(FRAME))]
    pub frames: Vec<usize>,

    /// Location of the data: in this core's cache (hot), in the other core's (remote), or in none (cold)
    #[arg(long, value_name = "WHERE", default_value = "remote", value_parser = temperature())]
    pub temperature: Temperature,

    #[command(flatten)]
    pub bench: BenchArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MachineArg {
    /// This machine, as measured.
    Here,
    /// The machines of the guides, from published figures.
    Guide,
}

/// Measures, predicts, and writes the result.
pub(crate) fn run(args: &PredictArgs) -> Result<(), Failure> {
    let failed = |error: anyhow::Error| anyhow!("offcore predict: {}", told(&error));
    let format = args.bench.format;
    match args.machine {
        MachineArg::Here => {
            let options = options(args)?;
            let described = options.clone();
            let mut rows = Rows::new(format, move |rows| here(rows, &described));
            predict::run(&options, &Progress::visible(), &mut |row| rows.push(row)).map_err(failed)?;
            Ok(rows.finish(None, |_, _| Ok(()))?)
        }
        MachineArg::Guide => {
            check_machine_flags(args)?;
            let mut rows = Rows::new(format, |rows| GUIDES.iter().map(|g| guide(g, rows)).collect());
            for guide in GUIDES {
                guide.rows().map_err(failed)?.into_iter().for_each(|row| rows.push(row));
            }
            Ok(rows.finish(None, |_, _| Ok(()))?)
        }
    }
}

/// Rejects flags that describe or measure a machine for predictions of the guides' machines.
fn check_machine_flags(args: &PredictArgs) -> Result<(), String> {
    let given = [
        (args.cores != 1, "--cores"),
        (args.ports != 1, "--ports"),
        (args.port_gbps != 100, "--port-gbps"),
        (args.devices != 1, "--devices"),
        (args.engines != 4, "--engines"),
        (!args.frames.is_empty(), "--frame"),
        (args.temperature != Temperature::Remote, "--temperature"),
        (args.bench.lcores.is_some(), "--lcores"),
        (args.bench.hugepages != Hugepages::Auto, "--hugepages"),
        (args.bench.quick, "--quick"),
    ];
    match given.into_iter().find(|(given, _)| *given) {
        Some((_, flag)) => Err(format!("{flag} requires --machine here: the guides' machines are fixed")),
        None => Ok(()),
    }
}

fn options(args: &PredictArgs) -> Result<Options, Failure> {
    let (lcore, other_lcore) = two_lcores(args.bench.lcores.as_ref())?;
    Ok(Options {
        machine: Machine {
            cores: args.cores,
            ports: args.ports,
            port_gbps: args.port_gbps as f64,
            devices: args.devices,
            engines: args.engines,
        },
        frames: or(&args.frames, &FRAMES),
        temperature: args.temperature,
        blocks: if args.bench.quick { QUICK_BLOCKS } else { BLOCKS },
        hugepages: args.bench.hugepages,
        lcore,
        other_lcore,
    })
}

fn here(rows: &[Row], options: &Options) -> String {
    let Machine { cores, ports, port_gbps, devices, engines } = options.machine;
    let mut text = format!(
        "Forwarding from guest to guest, {} data; cores: {cores}; ports: {ports}, of {port_gbps:.0} Gbit/s each;\n\
         DSA devices: {devices}, with {engines} DSA engines each\n",
        options.temperature
    );
    // Only a single core is measured.
    let measured = if cores > 1 { "measured, scaled" } else { "measured" };
    let cells = rows.iter().map(|row| {
        [
            row.head.frame.to_string(),
            row.head.mode.clone(),
            format!("{:.2}", row.figures.mpps),
            format!("{:.2}-{:.2}", row.figures.spread.min, row.figures.spread.max),
            format!("{:.1}", row.figures.gbps),
            or_dash(row.core.bound),
            if row.figures.ns_per_packet > 0.0 {
                format!("{:.1}", row.figures.ns_per_packet)
            } else {
                "-".into()
            },
            digits(row.core.engine_ns_per_copy, 1),
            if row.figures.simulated { "model" } else { measured }.into(),
        ]
    });
    text += &columns("frame|<mode|Mpps|from-to|Gbit/s|<bottleneck|core ns|device ns|<source", cells);
    text += "Gbit/s: of frames, including FCS; core ns: cost of a packet for a core, measured here with bursts of 32\n\
             packets (portal stores are those of the simulator); device ns: time of a busy device per copy, from the\n\
             model; from-to: four fifths of the measurements, and 15 % in either direction for the device; auto: 95 %\n\
             of the better of the two, at least 89 %.\n";
    text
}

fn guide(guide: &Guide, rows: &[Row]) -> String {
    let rows = rows.iter().filter(|row| row.head.case == guide.name);
    let cells = rows.map(|row| {
        [
            row.head.frame.to_string(),
            row.head.mode.clone(),
            digits(row.published.published, 2),
            format!("{:.2}", row.figures.mpps),
            or_dash(row.model.error.map(|error| format!("{:+.1} %", error * 100.0))),
            or_dash(row.core.bound),
            match row.model.role {
                Some("fitted") => "fitted".into(),
                _ => "model".into(),
            },
        ]
    });
    let mut text = format!("{}: {}\n", guide.name, guide.machine);
    text += &columns("frame|<mode|guide|predicted|error|<bottleneck|<source", cells);
    let [a, b] = guide.fitted_cpu;
    let _ = write!(
        text,
        "Mpps. The guide's software: with copies by the core, between {:.0} cycles at {a} bytes and {:.0} at {b},\n\
         interpolated; with copies by DSA, {:.0} cycles at every size, from the figure for {} bytes. Cells that\n\
         contain such a figure are marked fitted.\n\n",
        guide.cpu_ns(a) * guide.hz / 1e9,
        guide.cpu_ns(b) * guide.hz / 1e9,
        guide.offload_cycles(),
        guide.fitted_offload,
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Command;
    use crate::cli::lines::{command, examples};

    fn parse(line: &str) -> Result<Options, String> {
        let Command::Predict(args) = command(line)? else { panic!("{line}") };
        options(&args).map_err(|failure| failure.to_string())
    }

    #[test]
    fn help_examples_are_accepted() {
        examples(EXAMPLES, 4).iter().for_each(|line| drop(parse(line).unwrap()));
    }

    #[test]
    fn flags_describe_the_machine() {
        let options = parse("offcore predict --cores 8 --devices 2 --engines 1 --frame 512 --quick").unwrap();
        let machine = options.machine;
        assert_eq!((machine.cores, machine.devices, machine.engines, machine.ports), (8, 2, 1, 1));
        assert_eq!((options.frames, options.blocks), (vec![512], QUICK_BLOCKS));
    }

    #[test]
    fn errors_name_invalid_values() {
        for (flags, words) in [
            ("--cores 0", ["--cores", "from 1 to 1024"]),
            ("--engines 5", ["--engines", "from 1 to 4"]),
            ("--frame 2000", ["--frame", "from 64 to 1518"]),
            ("--machine mine", ["--machine", "here, guide"]),
        ] {
            let error = parse(&format!("offcore predict {flags}")).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{flags}: {error}");
        }
    }

    #[test]
    fn guide_has_both_columns_and_the_error() {
        let rows = GUIDES[0].rows().unwrap();
        let text = guide(&GUIDES[0], &rows);
        assert!(text.contains("1518  offload   4.67") && text.contains("392 cycles"), "{text}");
        assert_eq!(text.lines().filter(|line| line.ends_with("fitted")).count(), 3);
    }
}
