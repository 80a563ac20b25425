//! `offcore bench tcp`: what a segment costs the core of the TCP host stack.

use clap::builder::TypedValueParser;
use clap::{Args, ValueEnum};
use offcore_bench::alternate::TURN_BURSTS;
use offcore_bench::copier::{Copier, Setup};
use offcore_bench::progress::Progress;
use offcore_bench::row::Row;
use offcore_bench::tcp::{self, CHUNKS, HEADERS, Options, SEGMENT, Side, TEMPERATURES};
use offcore_bench::temperature::Temperature;
use offcore_dma::Mode;

use super::cells::{BenchArgs, blocks, or, setups, timeout};
use super::{Rows, two_lcores, verified};
use crate::Failure;
use crate::args::size;
use crate::args::{choice, mode, one_of, within};
use crate::output::kib;
use crate::output::table::{columns, digits, or_dash, times};

pub(crate) const EXAMPLES: &str = "\
Examples:
  What sending and receiving a segment costs the core, roughly:
    offcore bench tcp --quick

  One cell, as an object that names what was measured and how:
    offcore bench tcp --side send --temperature remote --chunk 256K --connections 1 --format json

  A hundred connections that take turns, with a simulated DSA beside the core:
    offcore bench tcp --connections 100 --engine cpu,dsa-sim --mode cpu,offload

  What unpacking costs by the size of segments:
    offcore bench tcp --side send --segment 64,512,1448,8192 --chunk 256K --temperature remote

  Without checksums completed by the port, so that the core reads all payload:
    offcore bench tcp --checksum core --side receive

Two hosts in this process, a wire between them that hands packets over, segments
of 1448 bytes where --segment says nothing else. Timed is the measured host's worker: protocol, copies or their
hand-over, headers. The far host, both applications and the engine run on the
other core, each in turns of its own; every byte is checked.";

#[derive(Args, Debug)]
pub(crate) struct TcpBenchArgs {
    /// Which host's core: send, receive [default: both]
    #[arg(long = "side", value_name = "LIST", value_delimiter = ',', value_parser = one_of(Side::NAMES, Side::find))]
    pub sides: Vec<Side>,

    /// Bytes that applications write at a time, 512 to 2M [default: 4K,64K,256K,2M]
    #[arg(long = "chunk", value_name = "LIST", value_delimiter = ',', value_parser = size(512..=2 << 20))]
    pub chunks: Vec<usize>,

    /// Bytes of payload in a segment, 64 to 8192: unpacking, as epping -m has it [default: 1448]
    #[arg(long = "segment", value_name = "LIST", value_delimiter = ',', value_parser = within(64..=8192))]
    pub segments: Vec<usize>,

    /// Connections that take turns, 1 to 10000; more than 100 have FIFOs of 256K, for chunks of no more [default: 1]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = within(1..=10_000))]
    pub connections: Vec<usize>,

    /// Where the data is: in this core's cache, or in the other's [default: both]
    #[arg(long = "temperature", value_name = "LIST", value_delimiter = ',', value_parser = temperature())]
    pub temperatures: Vec<Temperature>,

    /// Who decides: cpu is the core's own copies, offload an engine's, auto whichever costs less [default: all three]
    #[arg(long = "mode", value_name = "LIST", value_delimiter = ',', value_parser = mode())]
    pub modes: Vec<Mode>,

    /// Who can copy: the core, for mode cpu; engines, for the other modes [default: cpu,core:1]
    #[arg(long = "engine", value_name = "LIST", value_delimiter = ',', value_parser = choice::<Copier>(Copier::ALL.map(Copier::name)))]
    pub engines: Vec<Copier>,

    /// Who sums payload up: the port, which completes and verifies checksums, or the core
    #[arg(long, value_name = "WHO", default_value = "port")]
    pub checksum: Checksum,

    #[command(flatten)]
    pub bench: BenchArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Checksum {
    Port,
    Core,
}

fn temperature() -> impl TypedValueParser<Value = Temperature> {
    one_of(TEMPERATURES.map(Temperature::name), Temperature::find)
}

pub(crate) fn run(args: &TcpBenchArgs) -> Result<(), Failure> {
    let options = options(args).map_err(Failure::Usage)?;
    let mut rows = Rows::new(args.bench.format);
    tcp::run(&options, &Progress::visible(), &mut |row| rows.push(row))?;
    Ok(rows.finish(None, |_, _| Ok(()), table)?)
}

fn options(args: &TcpBenchArgs) -> Result<Options, String> {
    let (lcore, other_lcore) = two_lcores(args.bench.lcores.as_ref())?;
    let connections = or(&args.connections, &[1]);
    let most = if connections.iter().any(|&n| n > 100) { 256 << 10 } else { usize::MAX };
    let chunks: Vec<usize> = match args.chunks.is_empty() {
        true => CHUNKS.into_iter().filter(|&chunk| chunk <= most).collect(),
        false => args.chunks.clone(),
    };
    if let Some(chunk) = chunks.iter().find(|&&chunk| chunk > most) {
        return Err(format!(
            "--chunk {chunk}: with more than 100 --connections expected at most 256K, which their FIFOs hold"
        ));
    }
    let setups: Vec<Setup> = setups(&args.modes, &args.engines)?;
    Ok(Options {
        sides: or(&args.sides, &[Side::Send, Side::Receive]),
        chunks,
        segments: or(&args.segments, &[SEGMENT]),
        connections,
        temperatures: or(&args.temperatures, &TEMPERATURES),
        setups,
        checksums: args.checksum == Checksum::Port,
        blocks: blocks(args.bench.quick),
        bursts: TURN_BURSTS,
        timeout: timeout(args.bench.quick),
        hugepages: args.bench.hugepages,
        lcore,
        other_lcore,
    })
}

fn table(rows: &[Row]) -> String {
    let cells = rows.iter().map(|row| {
        [
            row.case.clone(),
            row.temperature.clone(),
            or_dash(row.connections),
            or_dash(row.chunk.map(kib)),
            (row.frame - HEADERS).to_string(),
            row.mode.clone(),
            row.engine.clone(),
            format!("{:.0}", row.cycles_per_packet),
            format!("{:.0}-{:.0}", row.min, row.max),
            format!("{:.1}", row.ns_per_packet),
            digits(row.payload_gbps, 1),
            or_dash(row.bound),
            times(row.offload_over_cpu),
            times(row.auto_over_better),
            verified(row),
        ]
    });
    columns(
        "<side|<data|connections|chunk|segment|<mode|<engine|cycles|min-max|ns|Gbit/s|<bound|over cpu|auto|verified",
        cells,
    ) + "cycles, ns: what a segment of up to so many bytes costs the core of the host that sends or receives it, with the\n\
           acknowledgements; Gbit/s: payload of that core alone, no network card's driver in it; bound: the limit of core\n\
           and engine together; over cpu: offloaded over copied by the core, auto: over the better of the two, which\n\
           alternated with it; verified: segments whose bytes were checked.\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::BenchCommand;
    use crate::cli::Command;
    use crate::cli::lines::{command, examples};

    fn parsed(line: &str) -> Result<Options, String> {
        let Command::Bench { command: BenchCommand::Tcp(args) } = command(line)? else { panic!("{line}") };
        options(&args)
    }

    #[test]
    fn every_example_of_the_help_is_accepted() {
        examples(EXAMPLES, 5).iter().for_each(|line| drop(parsed(line).unwrap()));
    }

    #[test]
    fn bad_values_are_named() {
        for (flags, words) in [
            ("--side both", &["--side", "send, receive"][..]),
            ("--chunk 100", &["--chunk", "512"]),
            ("--chunk 4M", &["--chunk", "2M"]),
            ("--segment 9000", &["--segment", "64 to 8192"]),
            ("--connections 0", &["--connections", "from 1 to 10000"]),
            ("--connections 1000 --chunk 2M", &["--chunk", "256K"]),
            ("--temperature cold", &["--temperature", "hot, remote"]),
            ("--mode auto --engine cpu", &["--mode", "leave nothing"]),
            ("--checksum nobody", &["--checksum", "port, core"]),
        ] {
            let error = parsed(&format!("offcore bench tcp {flags}")).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{flags}: {error}");
        }
    }

    #[test]
    fn defaults_follow_what_fifos_hold() {
        let options = parsed("offcore bench tcp").unwrap();
        assert_eq!((options.chunks, options.setups.len()), (CHUNKS.to_vec(), 3));
        assert_eq!(parsed("offcore bench tcp --connections 1000").unwrap().chunks, CHUNKS[..3]);
    }
}
