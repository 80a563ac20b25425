//! `offcore epping`: the stream source of Intel's mTCP guide, over real TCP.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::anyhow;
use clap::Args;
use clap::error::ErrorKind;
use offcore_config::iface::HostPort;
use offcore_config::names::Names;
use offcore_config::ports::QueueCopies;
use offcore_config::sections::{Epping, Section};
use offcore_dma::Mode;
use offcore_flow::SwitchConfig;
use offcore_flow::host::apps::Hosted;
use offcore_flow::host::apps::epping::Tally;
use offcore_port::spec::PortSpec;
use offcore_stats::tsc;
use serde::Serialize;

use crate::args::{EngineArgs, Format, PrintArgs, RunArgs, named, size};
use crate::failure::Failure;
use crate::output;
use crate::switch::{Watching, report, run_switch};
use crate::tcp::host;

/// The examples of `offcore epping --help`. A test parses each line that begins with `offcore`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  Send chunks of 256 KiB for 10 seconds to a sink on the kernel's side of tap0,
  with copies by the core; as root:
    offcore epping --port tap:tap0,addr=10.0.0.2/24 -c 10.0.0.1:9 -l 256K \\
      --duration 10
  Meanwhile, in another terminal, as root too:
    ip addr add 10.0.0.1/24 dev tap0
    socat -u TCP-LISTEN:9,fork,reuseaddr OPEN:/dev/null

  Use a helper thread on lcore 1 for copies of chunks into the send buffer, and
  of payload into packets of 512 bytes:
    offcore epping --port tap:tap0,addr=10.0.0.2/24 -c 10.0.0.1:9 -l 256K \\
      -du -m 512 --dma txq0@core:1

  Compare every byte with the answer of an echo server:
    offcore epping --port tap:tap0,addr=10.0.0.2/24 -c 10.0.0.1:7 -l 64K \\
      -n 16 --verify

A file for -f has one flag per line without dashes, and its value, such as
port tap:tap0,addr=10.0.0.2/24. It may have port, connect, lcores, dma and
dsa-sim. A port is written as in `offcore tcp --help`.";

/// Flags that are permitted in a file.
const KEYS: [&str; 5] = ["port", "connect", "lcores", "dma", "dsa-sim"];

/// The expected syntax of the receiver.
const ADDRESS: &str = "expected ADDRESS:PORT, such as 10.0.0.1:9";

#[derive(Args, Debug)]
pub(crate) struct EppingArgs {
    /// A port with its addresses, as KIND:ARGS,addr=10.0.0.2/24[,gw=10.0.0.1]
    #[arg(long = "port", value_name = "SPEC", required_unless_present = "file")]
    pub ports: Vec<HostPort>,

    /// The receiver: a TCP server that reads
    #[arg(short = 'c', long = "connect", value_name = "ADDRESS:PORT", required_unless_present = "file", value_parser = address)]
    pub to: Option<SocketAddr>,

    /// Length of a chunk in bytes, such as 256K
    #[arg(short = 'l', long = "length", value_name = "SIZE", default_value = "256K", value_parser = size(64..=1 << 30))]
    pub chunk: usize,

    /// Number of chunk buffers, sent in turn [default: 128 MiB in total]
    #[arg(short = 'n', long = "buffers", value_name = "N", value_parser = crate::args::within(1..=1 << 24))]
    pub buffers: Option<usize>,

    /// The engine of txq0 copies chunks into the send buffer
    #[arg(short = 'd')]
    pub offload_writes: bool,

    /// The engine also copies payload from the send buffer into packets (unpacking)
    #[arg(short = 'u')]
    pub offload_segments: bool,

    /// Maximum payload of a packet in bytes
    #[arg(short = 'm', value_name = "SIZE", value_parser = crate::args::within(64..=8192))]
    pub segment: Option<usize>,

    /// Compares the answers of an echo server with the sent bytes
    #[arg(long)]
    pub verify: bool,

    /// Reads flags from a file
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// Lcores, packet buffers, reports.
    #[command(flatten)]
    pub run: RunArgs,

    /// Copy engines.
    #[command(flatten)]
    pub engines: EngineArgs,

    /// The mode of the copies that -d and -u give to an engine; auto chooses by measurements [default: offload]
    #[arg(long, value_name = "MODE", value_parser = named::<Mode>())]
    pub mode: Option<Mode>,

    #[command(flatten)]
    pub print: PrintArgs,
}

impl EppingArgs {
    /// Returns the flags of the file, if any.
    pub(crate) fn file_flags(&self) -> Result<Option<Vec<String>>, clap::Error> {
        let Some(path) = &self.file else { return Ok(None) };
        let flags = fs::read_to_string(path)
            .map_err(|error| format!("-f {}: {error}", path.display()))
            .and_then(|text| flags(path, &text));
        let error = |text| clap::Error::raw(ErrorKind::ValueValidation, format!("{text}\n"));
        flags.map(Some).map_err(error)
    }
}

fn flags(path: &Path, text: &str) -> Result<Vec<String>, String> {
    let mut flags = Vec::new();
    let lines = text.lines().zip(1..).map(|(line, number)| (line.trim(), number));
    for (line, number) in lines.filter(|(line, _)| !line.is_empty() && !line.starts_with('#')) {
        let (key, value) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        if !KEYS.contains(&key) || value.is_empty() {
            let keys = KEYS.join(", ");
            return Err(format!(
                "{}:{number}: '{line}': expected one of {keys}, and a value",
                path.display()
            ));
        }
        flags.push(format!("--{key}={}", value.trim()));
    }
    Ok(flags)
}

/// Streams until the run ends, and prints a summary.
///
/// # Errors
/// [`Failure::Usage`] for flags that contradict each other, [`Failure::Failed`] for other errors: the receiver refused
/// the connection, or bytes came back wrong or not at all.
pub(crate) fn run(args: &EppingArgs) -> Result<(), Failure> {
    let to = receiver(args)?;
    let (config, ports, tally) = plan(args)?;
    if args.print.print(&args.run, &Section::Epping(section(args)?), &config, &ports)? {
        return Ok(());
    }
    run_switch(&config, Watching::new(&ports, &args.run, false, report::tables))?;
    Streamed { to, chunk: args.chunk, verify: args.verify, simulated: !args.engines.dsa_sims.is_empty() }
        .conclude(&tally, args.run.format)
}

/// The parameters of a stream whose results are printed.
pub(crate) struct Streamed {
    pub to: SocketAddr,
    /// Length of a chunk in bytes.
    pub chunk: usize,
    pub verify: bool,
    /// Whether a simulated device may have copied.
    pub simulated: bool,
}

impl Streamed {
    /// Prints the results.
    ///
    /// # Errors
    /// The receiver refused the connection, or bytes came back wrong or not at all.
    pub(crate) fn conclude(&self, tally: &Mutex<Tally>, format: Format) -> Result<(), Failure> {
        let to = self.to;
        let tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
        if tally.connections == 0 {
            let why = tally
                .ended
                .map_or_else(|| "it does not answer".into(), |cause| format!("{cause:?}").to_lowercase());
            return Err(anyhow!("no connection to {to}: {why}").into());
        }
        if tally.chunks == 0 {
            let why = match tally.ended {
                Some(cause) => {
                    format!("the last of {} connections was {cause:?}", tally.connections).to_lowercase()
                }
                None => "its window is closed, or its acknowledgements do not come".into(),
            };
            return Err(anyhow!("no chunk was acknowledged by {to}: {why}").into());
        }
        let summary = Summary::of(self, &tally);
        output::write(&match format {
            Format::Table => summary.text(),
            Format::Json => serde_json::to_string(&summary).map_err(anyhow::Error::new)? + "\n",
        })?;
        match (summary.wrong, summary.missing) {
            (Some(wrong @ 1..), _) => Err(anyhow!("{wrong} bytes came back that were not sent").into()),
            (_, Some(missing @ 1..)) => Err(anyhow!(
                "{missing} bytes that were acknowledged did not come back: is {to} an echo server?"
            )
            .into()),
            _ => Ok(()),
        }
    }
}

/// Returns the receiver's address.
fn receiver(args: &EppingArgs) -> Result<SocketAddr, String> {
    args.to.ok_or_else(|| format!("-c, or connect in the file of -f: {ADDRESS}"))
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let to = text.parse().ok().filter(|to: &SocketAddr| to.port() > 0);
    to.ok_or_else(|| ADDRESS.into())
}

pub(crate) type Planned = (SwitchConfig, Vec<PortSpec>, Arc<Mutex<Tally>>);

pub(crate) fn plan(args: &EppingArgs) -> Result<Planned, String> {
    if args.ports.is_empty() {
        return Err(
            "--port, or port in the file of -f: expected one, such as tap:tap0,addr=10.0.0.2/24".into()
        );
    }
    let mtus: Vec<_> =
        args.ports.iter().map(|port| (format!("--port {}", port.spec), port.iface.mtu)).collect();
    let tally = Arc::default();
    let app = section(args)?.app(
        Names::Flags,
        args.run.pool.mbuf_size,
        args.engines.dma.is_some(),
        &mtus,
        Arc::clone(&tally),
    );
    let app = Hosted::Epping(app.map_err(|refusal| refusal.text)?);
    let (config, ports) = host(&args.ports, app, &args.run, &args.engines, args.mode)?;
    Ok((config, ports, tally))
}

/// Returns the section of a configuration file with these flags.
pub(crate) fn section(args: &EppingArgs) -> Result<Epping, String> {
    Ok(Epping {
        connect: receiver(args)?,
        chunk: Some(args.chunk),
        buffers: args.buffers,
        segment: args.segment.map(|segment| segment as u16),
        offload_writes: args.offload_writes,
        offload_segments: args.offload_segments,
        verify: args.verify,
        copies: QueueCopies::default(),
    })
}

/// The results of a run.
#[derive(Debug, Serialize)]
struct Summary {
    to: SocketAddr,
    /// Bytes per chunk.
    chunk: usize,
    /// Whether a simulated device may have copied.
    simulated: bool,
    connections: u64,
    /// Acknowledged chunks, their bytes, and seconds from the connection to the last of them.
    chunks: u64,
    bytes: u64,
    seconds: f64,
    gbps: f64,
    /// Microseconds from a chunk's first copy to its acknowledgement.
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    /// Bytes that came back. With `--verify`, also bytes that differ from the sent ones, and bytes that were
    /// acknowledged but did not come back.
    returned: u64,
    wrong: Option<u64>,
    missing: Option<u64>,
}

impl Summary {
    fn of(stream: &Streamed, tally: &Tally) -> Self {
        let &Streamed { to, chunk, verify, simulated } = stream;
        let ticks = tally.began.map_or(0, |began| tally.last.saturating_sub(began));
        let seconds = ticks as f64 / tsc::hz() as f64;
        let bytes = tally.chunks * chunk as u64;
        let micros = |part| tally.latencies.percentile(part) as f64 * 1e6 / tsc::hz() as f64;
        Self {
            to,
            chunk,
            simulated,
            connections: tally.connections,
            chunks: tally.chunks,
            bytes,
            seconds,
            gbps: bytes as f64 * 8.0 / seconds.max(1e-9) / 1e9,
            p50_us: micros(0.5),
            p99_us: micros(0.99),
            p999_us: micros(0.999),
            returned: tally.returned,
            wrong: verify.then_some(tally.wrong),
            missing: verify.then_some(tally.missing),
        }
    }

    fn text(&self) -> String {
        let Self { to, chunk, chunks, seconds, gbps, p50_us, p99_us, p999_us, returned, .. } = self;
        let mut text = format!(
            "{chunks} chunks of {chunk} bytes to {to} in {seconds:.2} s: {gbps:.2} Gbit/s\n\
             a chunk, from its first copy to its acknowledgement: p50 {p50_us:.0} us, p99 {p99_us:.0} us, \
             p99.9 {p999_us:.0} us\n"
        );
        if let (Some(wrong), Some(missing)) = (self.wrong, self.missing) {
            text += &format!("{returned} bytes came back, {wrong} of them wrong; {missing} did not\n");
        } else if *returned > 0 {
            text += &format!("{returned} bytes came back, not compared: that is --verify\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Command;
    use crate::cli::lines::{command, examples};

    fn planned(words: &str) -> Result<Planned, String> {
        let line = format!("offcore epping --port tap:tap0,addr=10.0.0.2/24 -c 10.0.0.1:9 {words}");
        match command(&line) {
            Ok(Command::Epping(args)) => plan(&args),
            Ok(other) => Err(format!("{other:?}")),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn examples_in_help_are_parsed() {
        for line in examples(EXAMPLES, 3) {
            let Ok(Command::Epping(args)) = command(&line) else { panic!("{line} is no epping") };
            plan(&args).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    #[test]
    fn contradicting_options_are_refused() {
        planned("-du -m 1448 --dma txq0@core:1").unwrap();
        for (words, says) in [
            ("-d", "need an engine: add --dma"),
            ("--dma txq0@core:1", "add -d, -u or both"),
            ("-m 4096", "add --mbuf-size 8192"),
            ("-m 63", "64 to 8192"),
            ("-l 1M -n 100000", "expected 8 GiB at most"),
            ("-l none", "expected bytes such as"),
            ("-f /nowhere", "-f /nowhere: No such file"),
        ] {
            let error = planned(words).map(drop).unwrap_err();
            assert!(error.contains(says), "{words}: {error}");
        }
    }

    #[test]
    fn segment_must_fit_mtu() {
        let line = |more: &str| {
            let port = format!("--port tap:tap0,addr=10.0.0.2/24{more}");
            format!("offcore epping {port} -c 10.0.0.1:9 -u -m 4096 --mbuf-size 8192 --dma txq0@core:1")
        };
        let planned = |more| match command(&line(more)) {
            Ok(Command::Epping(args)) => plan(&args).map(drop),
            other => panic!("{other:?}"),
        };
        planned("").unwrap();
        planned(",mtu=4148").unwrap();
        let error = planned(",mtu=1500").unwrap_err();
        assert!(error.contains("has mtu=1500, expected 4148 or more"), "{error}");
    }

    #[test]
    fn only_verified_bytes_are_reported_correct() {
        let of = |verify| {
            let tally = Tally { returned: 1000, missing: 24, ..Tally::default() };
            let to = "10.0.0.1:7".parse().unwrap();
            Summary::of(&Streamed { to, chunk: 64, verify, simulated: false }, &tally)
        };
        let (plain, verified) = (of(false), of(true));
        assert!(plain.text().contains("1000 bytes came back, not compared"), "{}", plain.text());
        assert_eq!(serde_json::to_value(&plain).unwrap()["wrong"], serde_json::Value::Null);
        assert!(verified.text().contains("1000 bytes came back, 0 of them wrong; 24 did not"));
    }

    #[test]
    fn configuration_lines_become_flags() {
        let path = Path::new("x.conf");
        let text = "# a port\nport tap:tap0,addr=10.0.0.2/24\n\n  dma  txq0@core:1 \n";
        assert_eq!(flags(path, text).unwrap(), ["--port=tap:tap0,addr=10.0.0.2/24", "--dma=txq0@core:1"]);
        for line in ["ports tap:tap0", "port", "duration 3"] {
            let error = flags(path, &format!("\n{line}")).unwrap_err();
            assert!(error.starts_with("x.conf:2: ") && error.contains("expected one of port, "), "{error}");
        }
    }

    #[test]
    fn file_flag_expands_to_its_flags() {
        let path = std::env::temp_dir().join(format!("offcore-epping-{}.conf", std::process::id()));
        fs::write(&path, "port tap:tap0,addr=10.0.0.2/24\nconnect 10.0.0.1:9\ndma txq0@core:1\n").unwrap();
        let file = path.display();
        let parsed =
            [format!("-du -f {file}"), format!("-duf{file}"), format!("-d --file={file} -c 10.0.0.1:7")]
                .map(|words| command(&format!("offcore epping {words}")));
        fs::remove_file(&path).unwrap();
        let to = parsed.map(|parsed| match parsed {
            Ok(Command::Epping(args)) => {
                plan(&args).unwrap();
                receiver(&args).unwrap().port()
            }
            other => panic!("{other:?}"),
        });
        assert_eq!(to, [9, 9, 7]);
    }
}
