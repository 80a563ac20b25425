//! `offcore bench dma`: the cost of copies for the core, the throughput of engines, and the cost of sharing a channel.

use std::time::Duration;

use clap::Args;
use clap::builder::TypedValueParser;
use offcore_bench::copier::Copier;
use offcore_bench::dma::{self, Options, SIZES, Subject, sharing};
use offcore_bench::progress::Progress;
use offcore_bench::row::Row;
use offcore_bench::temperature::Temperature;
use offcore_dma::share::Sharing;
use offcore_stats::lcore;

use super::cells::{BenchArgs, or, temperature};
use super::columns::*;
use super::{Rows, two_lcores};
use crate::args::size;
use crate::args::{Lcores, one_of, within};
use crate::failure::Failure;
use crate::output::table::{digits, or_dash};

/// Rounds of a combination, and its time limit.
const ROUNDS: (usize, Duration) = (400, Duration::from_millis(500));
/// Rounds and time limit with `--quick`.
const QUICK_ROUNDS: (usize, Duration) = (100, Duration::from_millis(80));
/// Copies in flight per worker with `--sharing`.
const SHARED_DEPTH: usize = 32;

pub(crate) const EXAMPLES: &str = "\
Examples:
  Copies by the core, a helper core and a simulated DSA device, in a short run:
    offcore bench dma --quick

  The effect of the batch size:
    offcore bench dma --engine dsa-sim --size 1024 --batch 1,2,4,8,16,32,64,128

  The core's copy routines, with uncached data:
    offcore bench dma --engine cpu,plain-sse2,ahead-sse2 --temperature cold

  Few and many copies in flight, with results as JSON:
    offcore bench dma --size 4K,64K,1M --depth 1,16,128 --format json

  Two workers that share a dedicated queue with a lock, share a shared queue, or
  have a queue each:
    offcore bench dma --sharing lock,swq,bound --workers 2

Cycles are TSC cycles per copy, without the wait for the engine. GB/s and
latencies use the copier's clock, which is virtual for dsa-sim.";

#[derive(Args, Debug)]
#[command(mut_arg("quick", |arg| arg.help("Measure three sizes and two batch sizes, with fewer rounds")))]
pub(crate) struct DmaArgs {
    /// Copy sizes in bytes, 1 to 1M [default: 64,256,1K,4K,16K,64K,256K,1M]
    #[arg(long = "size", value_name = "LIST", value_delimiter = ',', value_parser = size(1..=1 << 20))]
    pub sizes: Vec<usize>,

    /// Copies per batch, 1 to 128 [default: 1,8,32,128]
    #[arg(long = "batch", value_name = "LIST", value_delimiter = ',', value_parser = within(1..=128))]
    pub batches: Vec<usize>,

    /// Copies in flight, 1 to 256, reduced if they exceed 16 MiB [default: 128]
    #[arg(long = "depth", value_name = "LIST", value_delimiter = ',', value_parser = within(1..=256))]
    pub depths: Vec<usize>,

    /// Location of the data: in this core's cache (hot), in the other core's (remote), or in none (cold) [default:
    /// remote; with --sharing hot]
    #[arg(long = "temperature", value_name = "LIST", value_delimiter = ',', value_parser = temperature())]
    pub temperatures: Vec<Temperature>,

    /// Copiers: cpu, a routine of the core such as ahead-avx2, core:1, dsa-sim, dsa-sim-direct [default: cpu, core:1
    /// and both dsa-sim]
    #[arg(long = "engine", value_name = "LIST", value_delimiter = ',')]
    pub subjects: Vec<Subject>,

    /// Measure workers that use a simulated DSA device at the same time: a dedicated queue with a lock (lock), a shared
    /// work queue (swq), or a dedicated queue each (bound)
    #[arg(long = "sharing", value_name = "LIST", value_delimiter = ',', value_parser = sharing())]
    pub sharings: Vec<Sharing>,

    /// Number of workers with --sharing, each on its own lcore
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = within(1..=4), requires = "sharings")]
    pub workers: usize,

    #[command(flatten)]
    pub bench: BenchArgs,
}

/// Parses how workers share a channel: a lock around one dedicated queue, one shared work queue, or a dedicated queue
/// each.
fn sharing() -> impl TypedValueParser<Value = Sharing> {
    one_of(["lock", "swq", "bound"], Sharing::find)
}

pub(crate) fn run(args: &DmaArgs) -> Result<(), Failure> {
    let mut rows = Rows::new(args.bench.format, table);
    let mut emit = |row: Row| rows.push(row);
    let measured = if args.sharings.is_empty() {
        let options = options(args)?;
        dma::run(&options, &Progress::visible(), &mut emit)
    } else {
        let options = sharing_options(args)?;
        sharing::run(&options, &Progress::visible(), &mut emit)
    };
    measured?;
    Ok(rows.finish(None, |_, _| Ok(()))?)
}

fn options(args: &DmaArgs) -> Result<Options, Failure> {
    let (lcore, other_lcore) = two_lcores(args.bench.lcores.as_ref())?;
    let (rounds, timeout) = if args.bench.quick { QUICK_ROUNDS } else { ROUNDS };
    Ok(Options {
        sizes: or(&args.sizes, if args.bench.quick { &[64, 1024, 16 << 10] } else { &SIZES }),
        batches: or(&args.batches, if args.bench.quick { &[1, 32] } else { &[1, 8, 32, 128] }),
        depths: or(&args.depths, &[128]),
        temperatures: or(&args.temperatures, &[Temperature::Remote]),
        subjects: or(&args.subjects, &Copier::ALL.map(Subject::Copier)),
        rounds,
        timeout,
        hugepages: args.bench.hugepages,
        lcore,
        other_lcore,
    })
}

fn sharing_options(args: &DmaArgs) -> Result<sharing::Options, String> {
    let flags = [
        ("--engine", args.subjects.is_empty(), "the engine is always dsa-sim"),
        ("--temperature", args.temperatures.is_empty(), "each worker's data is hot"),
    ];
    for (flag, absent, reason) in flags {
        if !absent {
            return Err(format!("{flag} cannot be used with --sharing: {reason}"));
        }
    }
    let available = lcore::available().map_err(|error| format!("--lcores: {error}"))?;
    let lcores = args.bench.lcores.as_ref().map_or(available.clone(), |Lcores(given)| given.clone());
    if lcores.len() < args.workers || !lcores.iter().all(|lcore| available.contains(lcore)) {
        return Err(format!(
            "--workers {}: found lcores {lcores:?} of {available:?}, expected one for each worker",
            args.workers
        ));
    }
    let depth = match args.depths[..] {
        [] => SHARED_DEPTH,
        [depth] if depth * args.workers <= 128 => depth,
        _ => {
            return Err(
                "--depth with --sharing: expected one number, at most 128 in the sum of all workers".into()
            );
        }
    };
    Ok(sharing::Options {
        sharings: args.sharings.clone(),
        lcores: lcores[..args.workers].to_vec(),
        sizes: or(&args.sizes, &[64, 1024]),
        batches: or(&args.batches, &[1, 8, 32]),
        depth,
        rounds: if args.bench.quick { 500 } else { 5_000 },
        hugepages: args.bench.hugepages,
    })
}

fn table(rows: &[Row]) -> String {
    let list: &[Column] = &[
        DATA,
        ("bytes", FRAME.1),
        ENGINE,
        ("<sharing", |row| or_dash(row.dma.sharing)),
        ("batch", |row| row.head.burst.to_string()),
        ("in flight", |row| row.head.window.to_string()),
        ("submit", |row| digits(row.dma.submit_cycles, 1)),
        ("reap", |row| digits(row.dma.reap_cycles, 1)),
        NS,
        ("GB/s", |row| digits(row.dma.gigabytes_per_s, 2)),
        ("p50 ns", |row| digits(row.latency.p50_ns, 0)),
        ("p99 ns", |row| digits(row.latency.p99_ns, 0)),
        CHECKED,
    ];
    listed(
        &rows.iter().collect::<Vec<_>>(),
        list,
        "submit, reap: TSC cycles of the core per copy; ns: both together; GB/s, p50, p99: from the submission of the\n\
         first copy on, by the copier's clock, which is virtual for dsa-sim; verified: copies whose bytes were\n\
         compared.\n",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::BenchCommand;
    use crate::cli::Command;
    use crate::cli::lines::{command, examples};

    fn parse(line: &str) -> Result<DmaArgs, String> {
        let Command::Bench { command: BenchCommand::Dma(args) } = command(line)? else { panic!("{line}") };
        if args.sharings.is_empty() {
            options(&args).map(drop).map_err(|failure| failure.to_string())?
        } else {
            sharing_options(&args).map(drop)?
        }
        Ok(args)
    }

    #[test]
    fn help_examples_are_accepted() {
        for line in examples(EXAMPLES, 5) {
            match parse(&line) {
                // A machine with a single core has no second worker.
                Err(error) if lcore::available().unwrap().len() < 2 => {
                    assert!(error.contains("--workers"), "{error}")
                }
                parsed => drop(parsed.unwrap()),
            }
        }
    }

    #[test]
    fn sizes_have_units() {
        let args = parse("offcore bench dma --size 64,4K,1M --depth 1,128").unwrap();
        assert_eq!((args.sizes, args.depths), (vec![64, 4096, 1 << 20], vec![1, 128]));
    }

    #[test]
    fn errors_name_invalid_values() {
        for (flags, words) in [
            ("--size 2M", ["--size", "from 1 to 1M"]),
            ("--batch 129", ["--batch", "from 1 to 128"]),
            ("--engine gpu", ["--engine", "dsa-sim-direct"]),
            ("--sharing queue", ["--sharing", "lock, swq, bound"]),
            ("--sharing lock --engine cpu", ["--engine", "--sharing"]),
            ("--sharing lock --depth 100", ["--depth", "at most 128"]),
            ("--workers 2", ["--sharing", "required"]),
        ] {
            let error = parse(&format!("offcore bench dma {flags}")).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{flags}: {error}");
        }
    }

    #[test]
    fn rows_become_a_table() {
        let mut row = Row::default();
        (row.head.frame, row.head.engine) = (4096, "dsa-sim".into());
        (row.dma.submit_cycles, row.dma.gigabytes_per_s) = (Some(12.34), Some(29.97));
        let text = table(&[row]);
        assert!(text.contains("12.3") && text.contains("29.97"), "{text}");
    }
}
