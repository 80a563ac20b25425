//! `offcore bench gpu`: l2fwd-nv's published tables, and the smallest burst for which a device outperforms a core.

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::Args;
use clap::builder::TypedValueParser;
use offcore_bench::gpu::{self, Case, Memory, Options, Outcome, WorkKind, plot};
use offcore_bench::progress::Progress;
use offcore_bench::row::{GpuColumns, Row};
use offcore_flow::check_lcores;
use offcore_stats::lcore;

use super::cells::{BenchArgs, FlagCases};
use super::columns::{self, *};
use super::{FRAME, Rows, plot_file};
use crate::args::{Lcores, one_of, within};
use crate::failure::Failure;
use crate::output::say;
use crate::output::table::{digits, or_dash, times, us};

pub(crate) const EXAMPLES: &str = "\
Examples:
  All cases on the first GPU, or on threads if there is no GPU, in less than four
  minutes:
    offcore bench gpu

  The same with results as JSON, only on a GPU:
    offcore bench gpu --device cuda:0 --format json

  The published workload table in a short run, on threads in place of a GPU:
    offcore bench gpu --device host --case workload --quick

  A plot of the smallest burst for which a GPU is faster at pattern matching:
    offcore bench gpu --case break-even --work match --plot match.svg

  One pipeline with bursts of 64 packets in host memory:
    offcore bench gpu --case workload --pipelines 1 --bursts 64 --memory host

No ports take part: each pipeline has a generator and a verifier, which send
packets in a loop and check all of them, on separate lcores if there are enough.
Threads in place of a GPU (device 'host') give correct results, but their times
do not show the times of a GPU.";

#[derive(Args, Debug)]
#[command(mut_arg("quick", |arg| arg.help("Measure fewer cells and windows: about a minute")))]
#[command(mut_arg("lcores", |arg| {
    arg.value_name("LIST").help("Lcores of generators and verifiers [default: everywhere]")
}))]
pub(crate) struct GpuArgs {
    /// The device: cuda:N (or N), or host, which simulates a GPU by threads [default: cuda:0, or host without a GPU]
    #[arg(short = 'g', long, value_name = "NAME")]
    pub device: Option<String>,

    /// Cases to measure: io, workload, forced, break-even, latency, or all
    #[arg(long = "case", value_name = "LIST", value_delimiter = ',', value_parser = case(), default_value = "all")]
    pub cases: Vec<AnyCase>,

    /// Number of pipelines, 1 to 64, each with a generator and a verifier [default: 4, or fewer if
    /// less than two lcores per pipeline and a spare lcore are available; 1 with device host]
    #[arg(short, long, value_name = "N", value_parser = within(1..=64))]
    pub pipelines: Option<usize>,

    /// Packets per burst, 1 to 4096 [default: several sizes for each case]
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', value_parser = within(1..=4096))]
    pub bursts: Vec<usize>,

    /// Frame lengths of case io in bytes, including FCS [default: 64,128,256,512,1024]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = within(FRAME))]
    pub sizes: Vec<usize>,

    /// Work of case break-even: swap, crc32c, checksum, match [default: all four]
    #[arg(long = "work", value_name = "LIST", value_delimiter = ',', value_parser = one_of(WorkKind::WORKS.map(WorkKind::name), WorkKind::find))]
    pub works: Vec<WorkKind>,

    /// Memory in which a device processes packets: host (in place), gpu (in a copy in GPU memory) [default: both; in
    /// cases forced and latency only the first, with --quick in case break-even, too]
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', value_parser = memory())]
    pub memory: Vec<Memory>,

    /// Maximum bursts in flight per pipeline: a power of two
    #[arg(long, value_name = "N", default_value = "64", value_parser = within(2..=4096))]
    pub slots: usize,

    /// Blocks per pipeline of workload persistent, 1 to 64 [default: 4, and 32 in case break-even; with device host on
    /// a small machine 1]
    #[arg(long, value_name = "N", value_parser = within(1..=64))]
    pub blocks: Option<usize>,

    /// Threads per block, 1 to 1024: on a GPU at least 32, and at most 256 with workload kernel
    #[arg(long, value_name = "N", default_value = "256", value_parser = within(1..=1024))]
    pub threads: usize,

    /// Plot the tables to an SVG file
    #[arg(long, value_name = "FILE.svg", value_parser = plot_file)]
    pub plot: Option<PathBuf>,

    #[command(flatten)]
    pub bench: BenchArgs,
}

/// A case, or `None` for all of them.
type AnyCase = Option<Case>;

fn case() -> impl TypedValueParser<Value = AnyCase> {
    let find = |name: &str| if name == "all" { Some(None) } else { Case::find(name).map(Some) };
    one_of(Case::NAMES.into_iter().chain(["all"]), find)
}

fn memory() -> impl TypedValueParser<Value = Memory> {
    one_of(Memory::ALL.map(Memory::name), |name| Memory::ALL.into_iter().find(|memory| memory.name() == name))
}

pub(crate) fn run(args: &GpuArgs) -> Result<(), Failure> {
    check(args)?;
    let (device, line) = gpu::open(args.device.as_deref()).context("--device")?;
    if let Some(line) = line {
        say(&line);
    }
    let options = options(args, device.name())?;
    let mut rows = Rows::new(args.bench.format, table);
    let Outcome { notes, failures } =
        gpu::run(&options, device, &Progress::visible(), &mut |row| rows.push(row))?;
    notes.iter().for_each(|note| say(note));
    // An incomplete measurement is not drawn.
    let plot = if failures.is_empty() { args.plot.as_ref() } else { None };
    rows.finish(plot, plot::draw)?;
    match failures.len() {
        0 => Ok(()),
        count => Err(anyhow!("{count} measurements failed:\n  {}", failures.join("\n  ")).into()),
    }
}

/// Returns the cases to measure, without duplicates.
fn cases(args: &GpuArgs) -> Vec<Case> {
    let asked = |case: &Case| args.cases.iter().any(|any| any.is_none_or(|any| any == *case));
    Case::ALL.into_iter().filter(asked).collect()
}

/// Rejects flags that no case uses, because the results would suggest that they were applied.
fn check(args: &GpuArgs) -> Result<(), String> {
    let cases = cases(args);
    for (given, flag, case) in
        [(!args.sizes.is_empty(), "--sizes", Case::Io), (!args.works.is_empty(), "--work", Case::BreakEven)]
    {
        FlagCases::new(&[case], case.name()).check(&cases, given, flag)?;
    }
    if !args.slots.is_power_of_two() {
        return Err(format!(
            "--slots {}: expected a power of two, such as {}",
            args.slots,
            args.slots.next_power_of_two()
        ));
    }
    Ok(())
}

fn options(args: &GpuArgs, device: &str) -> Result<Options, Failure> {
    let available = lcore::available().map_err(|error| anyhow!("--lcores: {error}"))?;
    let given = args.bench.lcores.as_ref().map_or(&available, |Lcores(given)| given);
    check_lcores(given)?;
    let mut options = Options::new(device, args.bench.quick, given);
    options.cases = cases(args);
    options.bursts.clone_from(&args.bursts);
    if !args.sizes.is_empty() {
        options.sizes.clone_from(&args.sizes);
    }
    if !args.works.is_empty() {
        options.works.clone_from(&args.works);
    }
    if !args.memory.is_empty() {
        options.memories.clone_from(&args.memory);
    }
    options.pipelines = args.pipelines.unwrap_or(options.pipelines);
    options.blocks = args.blocks.map(|blocks| blocks as u32).or(options.blocks);
    (options.slots, options.threads, options.hugepages) =
        (args.slots, args.threads as u32, args.bench.hugepages);
    if options.pipelines > given.len() {
        return Err(format!(
            "--pipelines {}: found {} lcores, expected at least one per pipeline; use fewer pipelines",
            options.pipelines,
            given.len()
        )
        .into());
    }
    Ok(options)
}

fn table(rows: &[Row]) -> String {
    let tables = Case::ALL.map(|case| {
        let rows: Vec<_> = rows.iter().filter(|row| row.head.case == case.name()).collect();
        let (list, note) = match case {
            Case::Io | Case::Workload => (PUBLISHED, PUBLISHED_NOTE),
            Case::Forced => (FORCED, FORCED_NOTE),
            Case::BreakEven => (BREAK_EVEN, BREAK_EVEN_NOTE),
            Case::Latency => (LATENCY, LATENCY_NOTE),
        };
        listed(&rows, list, note)
    });
    let tables: Vec<_> = tables.into_iter().filter(|table| !table.is_empty()).collect();
    let simulated = rows.iter().any(|row| row.figures.simulated);
    let note = "device host: threads in place of a GPU; their times do not show the times of a GPU.\n";
    tables.join("\n") + if simulated { note } else { "" }
}

/// The text below the two published tables.
const PUBLISHED_NOTE: &str = "\
A100, V100: published Gbit/s of l2fwd-nv with four pipelines (assumed), a 100 Gbit/s port, and packets in GPU memory
(io with memory host: in CPU memory). The published figures include a network card; here there is no port and no
card, with workload none either. Workloads kernel and graph use one more core on a GPU, for the thread that launches
kernels. model: Gbit/s of a model of l2fwd-nv, fitted to its second table; p50, p99: from the submission of a burst
to its return, in a closed loop; submit, collect: time of an lcore to submit a burst and to collect it; bottleneck:
generator if the rate is within 10 % of the generator's own limit (workload none).
";
/// The text below forced times.
const FORCED_NOTE: &str = "\
ns/packet: forced time per packet; ns/burst: the resulting minimum time per burst: a core processes packets one
after the other, the threads of a block process theirs at the same time. The rows of a core and of a device thus
compare one core with a block of threads. model: Gbit/s of l2fwd-nv with four pipelines (assumed) on an A100, where
all packets of a burst wait at the same time.
";
/// The text below the break-even table.
const BREAK_EVEN_NOTE: &str = "\
Mpps: rate of all pipelines; core's Mpps: rate of a core that only does the same work, with the best bursts for it
(match: aho-corasick crate, interleaved); over core: Mpps relative to that core; break-even: the smallest of these
bursts for which one pipeline, while all of them run, outperforms the core, as with all longer bursts; model's: the
same for l2fwd-nv on an A100, with one of four pipelines.
";
/// The text below latencies.
const LATENCY_NOTE: &str = "\
latency: from a packet's due time to its return; load: share of the rate of a closed loop (of Mpps) at which packets
are sent. A packet waits for other packets of its burst for at most 100 us.
";

/// Formats a cell from the columns of this benchmark.
fn gpu_cell(row: &Row, cell: impl Fn(&GpuColumns) -> String) -> String {
    row.gpu.as_ref().map(cell).unwrap_or_default()
}

const WORKLOAD: Column = ("<workload", |row| gpu_cell(row, |gpu| gpu.setup.workload.into()));
const MEMORY: Column = ("<memory", |row| gpu_cell(row, |gpu| gpu.setup.memory.into()));
const DEVICE: Column = ("<device", |row| gpu_cell(row, |gpu| gpu.setup.device.clone()));
const BURST: Column = ("burst", |row| row.head.burst.to_string());
const SUBMIT: Column = ("submit ns", |row| gpu_cell(row, |gpu| digits(gpu.times.submit_ns_per_burst, 0)));
const COLLECT: Column = ("collect", |row| gpu_cell(row, |gpu| digits(gpu.times.collect_ns_per_burst, 0)));

/// Columns of the two published tables.
const PUBLISHED: &[Column] = &[
    CASE,
    columns::FRAME,
    BURST,
    WORKLOAD,
    MEMORY,
    DEVICE,
    GBPS,
    MPPS,
    RATES,
    ("A100", |row| digits(row.published.published, 0)),
    ("V100", |row| gpu_cell(row, |gpu| digits(gpu.model.published_v100, 0))),
    ("model", |row| gpu_cell(row, |gpu| digits(gpu.model.model_gbps, 0))),
    P50_US,
    P99_US,
    SUBMIT,
    COLLECT,
    BOUND,
    VERIFIED,
];
/// Columns of forced times.
const FORCED: &[Column] = &[
    BURST,
    ("ns/packet", |row| gpu_cell(row, |gpu| or_dash(gpu.forced_ns_per_packet))),
    WORKLOAD,
    MEMORY,
    DEVICE,
    ("ns/burst", |row| gpu_cell(row, |gpu| or_dash(gpu.forced_ns_per_burst))),
    MPPS,
    GBPS,
    RATES,
    ("model", |row| gpu_cell(row, |gpu| digits(gpu.model.model_gbps, 1))),
    P50_US,
    P99_US,
    BOUND,
    VERIFIED,
];
/// Columns of the break-even table.
const BREAK_EVEN: &[Column] = &[
    ("<work", |row| gpu_cell(row, |gpu| gpu.setup.work.into())),
    WORKLOAD,
    MEMORY,
    DEVICE,
    BURST,
    MPPS,
    RATES,
    GBPS,
    ("core's Mpps", |row| gpu_cell(row, |gpu| digits(gpu.break_even.baseline_mpps, 2))),
    ("over core", |row| gpu_cell(row, |gpu| times(gpu.break_even.over_baseline))),
    ("break-even", |row| gpu_cell(row, |gpu| or_dash(gpu.break_even.break_even_burst))),
    ("model's", |row| gpu_cell(row, |gpu| or_dash(gpu.break_even.model_break_even_burst))),
    SUBMIT,
    COLLECT,
    BOUND,
    VERIFIED,
];
/// Columns of latencies.
const LATENCY: &[Column] = &[
    BURST,
    WORKLOAD,
    MEMORY,
    DEVICE,
    ("load", |row| percent(row.load.load)),
    ("Mpps", |row| format!("{:.3}", row.figures.mpps)),
    ("of Mpps", |row| digits(row.load.capacity_mpps, 3)),
    P50_US,
    ("p90", |row| us(row.latency.p90_ns)),
    P99_US,
    ("p99.9", |row| us(row.latency.p999_ns)),
    ("max", |row| us(Some(row.figures.spread.max))),
    VERIFIED,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::BenchCommand;
    use crate::cli::Command;
    use crate::cli::lines::{command, examples};
    use offcore_bench::row::GpuSetup;

    fn parsed(flags: &str) -> Result<(GpuArgs, Options), String> {
        parsed_line(&format!("offcore bench gpu {flags}"))
    }

    fn parsed_line(line: &str) -> Result<(GpuArgs, Options), String> {
        let Command::Bench { command: BenchCommand::Gpu(args) } = command(line)? else { panic!("{line}") };
        check(&args)?;
        let options = options(&args, args.device.as_deref().unwrap_or("host"))
            .map_err(|failure| failure.to_string())?;
        Ok((args, options))
    }

    #[test]
    fn defaults_cover_all_gpu_cases() {
        let (_, options) = parsed("").unwrap();
        assert_eq!((&options.cases[..], options.pipelines, options.quick), (&Case::ALL[..], 1, false));
        assert_eq!((options.sizes.len(), options.works.len(), options.memories.len()), (5, 4, 2));
        let (_, options) = parsed("--case latency,io,io -b 1,4096 --memory gpu --quick").unwrap();
        assert_eq!(options.cases, [Case::Io, Case::Latency]);
        assert_eq!((&options.bursts[..], &options.memories[..]), (&[1, 4096][..], &[Memory::Gpu][..]));
    }

    #[test]
    fn errors_name_invalid_values() {
        for (flags, words) in [
            ("--case tables", &["--case", "io, workload, forced, break-even, latency, all"][..]),
            ("--bursts 0", &["--bursts", "from 1 to 4096"]),
            ("--bursts 64,4097", &["--bursts", "4097"]),
            ("--sizes 63", &["--sizes", "from 64 to 1518"]),
            ("--sizes 64 --case workload", &["--sizes", "--case io"]),
            ("--work match --case io", &["--work", "--case break-even"]),
            ("--work aes", &["--work", "swap, crc32c, checksum, match"]),
            ("--memory disk", &["--memory", "host, gpu"]),
            ("--pipelines 0", &["--pipelines", "from 1 to 64"]),
            ("--slots 100", &["--slots", "such as 128"]),
            ("--lcores 1023", &["--lcores", "1023"]),
        ] {
            let error = parsed(flags).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{flags}: {error}");
        }
    }

    #[test]
    fn help_examples_are_accepted() {
        examples(EXAMPLES, 5).iter().for_each(|line| drop(parsed_line(line).unwrap()));
    }

    #[test]
    fn every_case_has_a_table() {
        let row = |case: Case| {
            let device = "host".into();
            let setup =
                GpuSetup { workload: "kernel", work: "swap", memory: "gpu", device, ..GpuSetup::default() };
            let mut gpu = GpuColumns { setup, ..GpuColumns::default() };
            (gpu.forced_ns_per_packet, gpu.forced_ns_per_burst) = (Some(100), Some(6400));
            gpu.break_even.break_even_burst = Some(256);
            let mut row = Row { gpu: Some(gpu), ..Row::default() };
            (row.head.case, row.head.frame, row.head.burst) = (case.to_string(), 1024, 64);
            (row.figures.simulated, row.figures.gbps) = (true, 12.34);
            row
        };
        let text = table(&Case::ALL.map(row));
        for words in ["100  kernel    gpu     host        6400", "12.3", "256", "in place of a GPU", "load"] {
            assert!(text.contains(words), "no '{words}' in {text}");
        }
    }
}
