//! `offcore bench tcp`: the cost of a segment, or of a connection, for the core that runs the TCP host stack.

mod table;

use anyhow::Context;
use clap::{Args, ValueEnum};
use offcore_bench::alternate::Extent;
use offcore_bench::copier::{Copier, Setup};
use offcore_bench::progress::Progress;
use offcore_bench::row::Row;
use offcore_bench::tcp::kernel::KernelOptions;
use offcore_bench::tcp::{self, CHUNKS, Options, SEGMENT, Side};
use offcore_bench::tcp::{flows, http, idle, neighbour, open_close, paths, programs, veth};
use offcore_bench::temperature::Temperature;
use offcore_dma::Mode;

use super::Rows;
use super::cells::{BenchArgs, FlagCases, or, setups, temperature};
use crate::args::size;
use crate::args::{choice, named, one_of, within};
use crate::failure::Failure;
use table::table;

/// The largest default chunk that is measured with hot data. Two copies of larger chunks do not fit into a core's
/// private caches.
const LARGEST_HOT: usize = 256 << 10;

pub(crate) const EXAMPLES: &str = "\
Examples:
  The core's cost of sending and receiving a segment, in a short run:
    offcore bench tcp --quick

  One cell as a JSON object:
    offcore bench tcp --side send --temperature remote --chunk 256K --connections 1 --format json

  100 connections, used in turn, with a simulated DSA device as the engine:
    offcore bench tcp --connections 100 --engine cpu,dsa-sim --mode cpu,offload

  The cost by segment size:
    offcore bench tcp --side send --segment 64,512,1448,8192 --chunk 256K --temperature remote

  One connection beside 10,000 idle ones, and the cost of opening and closing
  connections while 10,000 are open:
    offcore bench tcp --case idle,open-close

  A stream between the stack and the kernel's TCP over veth, in turns with a
  stream between two kernels; as root:
    offcore bench tcp --case veth

  A stream over slow, long and lossy paths, compared with the kernel's TCP; as
  root:
    offcore bench tcp --case paths

  Many connections at once, and short ones over a lossy path, compared with the
  kernel's TCP; as root:
    offcore bench tcp --case flows

  The rate of honest clients beside peers and programs that attack the stack; as
  root:
    offcore bench tcp --case neighbour

  The cost of a request for a file for the stack's core, by copy engine:
    offcore bench tcp --case requests

  nginx on the stack under wrk, in turns with nginx on the kernel's stack; as
  root:
    offcore bench tcp --case http

  nginx, PostgreSQL and PHP behind a TAP, compared with the kernel's stack; as
  root:
    offcore bench tcp --case programs

  Checksums by the core, which therefore reads all payload:
    offcore bench tcp --checksum core --side receive

Two hosts in this process are connected by a link in memory. Segments have 1448
bytes of payload unless --segment is given. The time of the measured host's worker
counts: protocol, headers, and copies or their submission. The far host, both
applications and the engine run on the other core, in turns. Every byte is
checked. All copies go through the caches, so the location of the data is the one
in the table.";

#[derive(Args, Debug)]
pub(crate) struct TcpBenchArgs {
    /// Cases to measure: the core's cost of a segment, of a connection or of a request, or rates compared with the
    /// kernel's stack
    #[arg(long = "case", value_name = "LIST", value_delimiter = ',', default_value = "core-cost")]
    pub cases: Vec<Case>,

    /// The measured host: send (the sender) or receive (the receiver), with open-close the client or the server
    /// [default: both]
    #[arg(long = "side", value_name = "LIST", value_delimiter = ',', value_parser = one_of(Side::NAMES, Side::find))]
    pub sides: Vec<Side>,

    /// Bytes per write of the application, 512 to 2M; with idle at most 256K [default: 4K,64K,256K,2M, hot: to 256K;
    /// idle: 64K]
    #[arg(long = "chunk", value_name = "LIST", value_delimiter = ',', value_parser = size(512..=2 << 20))]
    pub chunks: Vec<usize>,

    /// Payload bytes per segment, 64 to 8192, as with epping -m [default: 1448]
    #[arg(long = "segment", value_name = "LIST", value_delimiter = ',', value_parser = within(64..=8192))]
    pub segments: Vec<usize>,

    /// Number of connections, used in turn: 1 to 10000; above 100, FIFOs have 256K and chunks at most 256K; idle:
    /// number of idle connections; open-close: number of open connections [default: 1; idle, open-close: 10000]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = within(1..=10_000))]
    pub connections: Vec<usize>,

    /// Location of the data: in this core's cache (hot), in the other core's (remote), or in none (cold) [default: all
    /// three; idle: remote]
    #[arg(long = "temperature", value_name = "LIST", value_delimiter = ',', value_parser = temperature())]
    pub temperatures: Vec<Temperature>,

    /// Copies by the core (cpu), by an engine (offload), or by the cheaper of both as measured (auto) [default: all
    /// three; idle: cpu, without --engine]
    #[arg(long = "mode", value_name = "LIST", value_delimiter = ',', value_parser = named::<Mode>())]
    pub modes: Vec<Mode>,

    /// Copy engines: cpu for mode cpu, the others for the other modes [default: cpu,core:1]
    #[arg(long = "engine", value_name = "LIST", value_delimiter = ',', value_parser = choice::<Copier>(Copier::ALL.map(Copier::name)))]
    pub engines: Vec<Copier>,

    /// Checksums of the payload: completed and verified by the port, or computed by the core
    #[arg(long, value_name = "WHERE", default_value = "port")]
    pub checksum: Checksum,

    /// Allow the measured core non-temporal stores if they are faster for it, as outside of benchmarks; the reader of
    /// the data pays for them (column both)
    #[arg(long)]
    pub past_caches: bool,

    #[command(flatten)]
    pub bench: BenchArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// TSC cycles of the core per segment.
    CoreCost,
    /// The same for one connection beside idle connections, compared with the connection alone.
    Idle,
    /// TSC cycles of the core per connection that is opened, used once and closed.
    OpenClose,
    /// Gbit/s of a stream to and from the kernel's TCP over veth, compared with a stream between two kernels; needs
    /// root.
    Veth,
    /// The same over paths with round trip times of 20 to 200 ms, with loss or reordering; needs root.
    Paths,
    /// TSC cycles of the stack's core per request for a file, by copy engine.
    Requests,
    /// Connections to nginx per second, 5,000 at once, and short ones over a path with 2 % loss, on the stack and on
    /// the kernel's stack; needs root and nginx.
    Flows,
    /// Requests per second of honest clients beside peers and programs that attack the stack; needs root, nginx and
    /// python3.
    Neighbour,
    /// Requests per second that nginx answers over veth, on the stack and on the kernel's stack; needs root, nginx and
    /// wrk.
    Http,
    /// Answers per second of nginx, PostgreSQL and PHP behind a TAP, on the stack and on the kernel's stack; needs root
    /// and these programs.
    Programs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Checksum {
    Port,
    Core,
}

pub(crate) fn run(args: &TcpBenchArgs) -> Result<(), Failure> {
    let measured = cases(args)?;
    let mut rows = Rows::new(args.bench.format, table);
    let run = measured.into_iter().try_for_each(|(case, options)| measure(args, case, options, &mut rows));
    // Finished rows are written even after an error.
    rows.finish(None, |_, _| Ok(()))?;
    Ok(run?)
}

/// Measures a case that compares our stack with the kernel's.
type KernelCase = fn(&KernelOptions, &Progress, &mut dyn FnMut(Row)) -> anyhow::Result<()>;

fn measure(args: &TcpBenchArgs, case: Case, options: Options, rows: &mut Rows) -> anyhow::Result<()> {
    let (progress, emit) = (Progress::visible(), &mut |row| rows.push(row));
    let beside_kernel: KernelCase = match case {
        Case::CoreCost | Case::Requests => return tcp::run(&options, &progress, emit),
        Case::Idle => return idle::run(&options, &progress, emit),
        Case::OpenClose => return open_close::run(&options, &progress, emit),
        Case::Veth => veth::run,
        Case::Paths => paths::run,
        Case::Flows => flows::run,
        Case::Neighbour => neighbour::run,
        Case::Http => http::run,
        Case::Programs => programs::run,
    };
    let Options { sides, extent: Extent { hugepages, lcore, other_lcore, .. }, .. } = options;
    let (binary, quick) = (std::env::current_exe().context("looking for this program")?, args.bench.quick);
    beside_kernel(&KernelOptions { binary, quick, sides, hugepages, lcore, other_lcore }, &progress, emit)
}

/// Returns the cases with their options.
fn cases(args: &TcpBenchArgs) -> Result<Vec<(Case, Options)>, Failure> {
    const SEGMENTS: FlagCases<'_, Case> =
        FlagCases::new(&[Case::CoreCost, Case::Idle, Case::Requests], "core-cost, idle or requests");
    const SIDES: FlagCases<'_, Case> = FlagCases::new(
        &[Case::CoreCost, Case::Idle, Case::OpenClose, Case::Veth, Case::Paths],
        "core-cost, idle, open-close, veth or paths",
    );
    const CONNECTIONS: FlagCases<'_, Case> = FlagCases::new(
        &[Case::CoreCost, Case::Idle, Case::OpenClose, Case::Requests],
        "core-cost, idle, open-close or requests",
    );
    for (given, flag) in [
        (!args.chunks.is_empty(), "--chunk"),
        (!args.segments.is_empty(), "--segment"),
        (!args.temperatures.is_empty(), "--temperature"),
        (!args.modes.is_empty(), "--mode"),
        (!args.engines.is_empty(), "--engine"),
        (args.past_caches, "--past-caches"),
    ] {
        SEGMENTS.check(&args.cases, given, flag)?;
    }
    SIDES.check(&args.cases, !args.sides.is_empty(), "--side")?;
    CONNECTIONS.check(&args.cases, !args.connections.is_empty(), "--connections")?;
    args.cases.iter().map(|&case| Ok((case, options(args, case)?))).collect()
}

fn options(args: &TcpBenchArgs, case: Case) -> Result<Options, Failure> {
    let (connections, temperatures, chunks) = match case {
        Case::CoreCost => (1, &Temperature::ALL[..], &CHUNKS[..]),
        Case::Requests => (http::CONNECTIONS, &[Temperature::Remote][..], &http::SIZES[..]),
        Case::Idle => (idle::IDLE, &[Temperature::Remote][..], &[idle::CHUNK][..]),
        Case::OpenClose
        | Case::Veth
        | Case::Paths
        | Case::Flows
        | Case::Neighbour
        | Case::Http
        | Case::Programs => (open_close::OPEN, &[Temperature::Remote][..], &[idle::CHUNK][..]),
    };
    let connections = or(&args.connections, &[connections]);
    let small = case == Case::Idle || connections.iter().any(|&n| n > 100);
    let most = if small { 256 << 10 } else { usize::MAX };
    let chunks: Vec<usize> = match args.chunks.is_empty() {
        true => chunks.iter().copied().filter(|&chunk| chunk <= most).collect(),
        false => args.chunks.clone(),
    };
    if let Some(chunk) = chunks.iter().find(|&&chunk| chunk > most && case != Case::OpenClose) {
        return Err(format!(
            "--chunk {chunk}: expected at most 256K, the size of a FIFO with more than 100 --connections or --case idle"
        )
        .into());
    }
    let modes = match case {
        Case::Idle if args.engines.is_empty() => or(&args.modes, &[Mode::Cpu]),
        _ => args.modes.clone(),
    };
    let setups: Vec<Setup> = setups(&modes, &args.engines)?;
    Ok(Options {
        sides: if case == Case::Requests { vec![Side::Send] } else { or(&args.sides, &Side::ALL) },
        chunks,
        segments: or(&args.segments, &[SEGMENT]),
        connections,
        temperatures: or(&args.temperatures, temperatures),
        setups,
        // Explicitly requested chunks are measured in any case.
        largest_hot: if args.chunks.is_empty() { LARGEST_HOT } else { usize::MAX },
        past_caches: args.past_caches,
        asks: case == Case::Requests,
        checksums: args.checksum == Checksum::Port,
        noise_floor: true,
        extent: args.bench.extent()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::BenchCommand;
    use crate::cli::Command;
    use crate::cli::lines::{command, examples};

    fn parsed(line: &str) -> Result<Vec<(Case, Options)>, String> {
        let Command::Bench { command: BenchCommand::Tcp(args) } = command(line)? else { panic!("{line}") };
        cases(&args).map_err(|failure| failure.to_string())
    }

    #[test]
    fn help_examples_are_accepted() {
        examples(EXAMPLES, 13).iter().for_each(|line| drop(parsed(line).unwrap()));
    }

    #[test]
    fn errors_name_invalid_values() {
        for (flags, words) in [
            ("--side both", &["--side", "send, receive"][..]),
            ("--chunk 100", &["--chunk", "512"]),
            ("--chunk 4M", &["--chunk", "2M"]),
            ("--segment 9000", &["--segment", "64 to 8192"]),
            ("--connections 0", &["--connections", "from 1 to 10000"]),
            ("--connections 1000 --chunk 2M", &["--chunk", "256K"]),
            ("--case idle --chunk 2M", &["--chunk", "256K"]),
            ("--temperature warm", &["--temperature", "hot, remote, cold"]),
            ("--case open-close --segment 512", &["--segment", "core-cost, idle or requests"]),
            ("--mode auto --engine cpu", &["--mode", "leave nothing"]),
            ("--case open-close --past-caches", &["--past-caches", "core-cost, idle or requests"]),
            ("--case http --connections 9", &["--connections", "or requests"]),
            ("--case requests --side receive", &["--side", "core-cost, idle, open-close, veth or paths"]),
            ("--checksum host", &["--checksum", "port, core"]),
        ] {
            let error = parsed(&format!("offcore bench tcp {flags}")).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{flags}: {error}");
        }
    }

    #[test]
    fn defaults_follow_fifo_capacity() {
        let of = |line: &str| parsed(line).unwrap().remove(0).1;
        let options = of("offcore bench tcp");
        assert_eq!((options.chunks, options.setups.len()), (CHUNKS.to_vec(), 3));
        assert_eq!((options.largest_hot, options.past_caches), (256 << 10, false));
        assert_eq!(options.temperatures, Temperature::ALL);
        let given = of("offcore bench tcp --temperature hot --chunk 2M --past-caches");
        assert_eq!((given.largest_hot, given.past_caches), (usize::MAX, true));
        assert_eq!(of("offcore bench tcp --connections 1000").chunks, CHUNKS[..3]);
    }

    #[test]
    fn cases_have_separate_defaults() {
        let cases = parsed("offcore bench tcp --case idle,open-close").unwrap();
        let [(Case::Idle, idle), (Case::OpenClose, visits)] = &cases[..] else { panic!("{cases:?}") };
        assert_eq!((&idle.connections[..], &visits.connections[..]), (&[10_000][..], &[10_000][..]));
        assert_eq!((&idle.setups[..], &idle.chunks[..]), (&[Setup::CPU][..], &[64 << 10][..]));
        let line = "offcore bench tcp --case idle --engine cpu,core:1 --mode cpu,offload --connections 500";
        let idle = parsed(line).unwrap().remove(0).1;
        assert_eq!((idle.setups.len(), idle.connections), (2, vec![500]));
    }
}
