//! `offcore bench`: measures the published tables on this machine and writes rows as a table, JSON or CSV.
//!
//! * [`mod@vhost`]: `offcore bench vhost`
//! * [`mod@copy`]: `offcore bench copy`
//! * [`dma`]: `offcore bench dma`
//! * [`gpu`]: `offcore bench gpu`
//! * [`model`]: `offcore bench model`
//! * [`tcp`]: `offcore bench tcp`

pub(crate) mod cells;
mod columns;
mod copy;
mod dma;
mod end_to_end;
mod gpu;
mod latency;
mod model;
mod neighbour;
mod tcp;
mod vhost;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, anyhow, bail};
use clap::{Subcommand, ValueEnum};
use offcore_bench::peer::leftovers;
use offcore_bench::row::{Row, SCHEMA};
use offcore_flow::check_lcores;
use offcore_stats::lcore;
use rustix::fs::Access;
use serde_json::Value;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::args::Lcores;
use crate::failure::Failure;
use crate::output::{say, told, write};

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure the core's cost of a packet forwarded for guests: Table 8 of the vhost guide
    #[command(after_help = vhost::EXAMPLES)]
    Vhost(vhost::VhostArgs),
    /// Measure the core's cost of a packet forwarded in a new buffer (Table 5 of the packet-copy guide), and ports over
    /// veth
    #[command(after_help = copy::EXAMPLES)]
    Copy(copy::CopyArgs),
    /// Measure copies of 64 bytes to 1 MiB: the cost for the core, the rates of engines, the cost of a shared channel
    #[command(after_help = dma::EXAMPLES)]
    Dma(dma::DmaArgs),
    /// Measure l2fwd-nv's tables, and the smallest burst for which a GPU outperforms a core
    #[command(after_help = gpu::EXAMPLES)]
    Gpu(gpu::GpuArgs),
    /// Compare the timing of the simulated DSA device with all published figures
    #[command(after_help = model::EXAMPLES)]
    Model(model::ModelArgs),
    /// Measure the core's cost of a TCP segment in the host stack, by copy engine
    #[command(after_help = tcp::EXAMPLES)]
    Tcp(tcp::TcpBenchArgs),
}

/// How rows are written to stdout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A table.
    Table,
    /// JSON with one object per line.
    Json,
    /// CSV with one row per line, and the column names in the first line.
    Csv,
}

pub(crate) fn run(command: &BenchCommand, names: &[String]) -> Result<(), Failure> {
    clean_up_on_signals().map_err(|error| anyhow::anyhow!("handling signals: {error}"))?;
    let plot = match command {
        BenchCommand::Vhost(args) => &args.cells.plot,
        BenchCommand::Copy(args) => &args.cells.plot,
        BenchCommand::Gpu(args) => &args.plot,
        BenchCommand::Model(args) => &args.plot,
        BenchCommand::Dma(_) | BenchCommand::Tcp(_) => &None,
    };
    check_plot(plot.as_deref())?;
    let result = match command {
        BenchCommand::Vhost(args) => vhost::run(args),
        BenchCommand::Copy(args) => copy::run(args),
        BenchCommand::Dma(args) => dma::run(args),
        BenchCommand::Gpu(args) => {
            offcore_gpu::cuda::use_all_queues();
            gpu::run(args)
        }
        BenchCommand::Model(args) => model::run(args),
        BenchCommand::Tcp(args) => tcp::run(args),
    };
    result.map_err(|failure| match failure {
        Failure::Failed(error) => anyhow!("offcore {}: {}", names.join(" "), told(&error)).into(),
        usage => usage,
    })
}

/// Ends this process by a signal as usual, but first removes objects that it has created outside of the process and
/// writes the finished rows.
fn clean_up_on_signals() -> std::io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            leftovers::remove_all();
            let measured = lock_measured().take();
            // JSON rows are already written.
            if let Some(measured) = measured.filter(|all| all.format != Format::Json && !all.rows.is_empty())
            {
                say("interrupted: these are the rows that were finished");
                // An error cannot be reported any more.
                let _ = written(&measured);
            }
            let _ = emulate_default_handler(signal);
        }
    });
    Ok(())
}

/// Formats rows as a table.
type Table = Box<dyn Fn(&[Row]) -> String + Send>;

/// Measured rows that are not written yet, for the signal handler.
struct Measured {
    format: Format,
    rows: Vec<Row>,
    table: Table,
}

static MEASURED: Mutex<Option<Measured>> = Mutex::new(None);

fn lock_measured() -> MutexGuard<'static, Option<Measured>> {
    MEASURED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes the rows, except for JSON, which is written row by row.
fn written(Measured { format, rows, table }: &Measured) -> anyhow::Result<()> {
    match *format {
        Format::Json => {}
        Format::Csv => _ = write(&csv(rows)?)?,
        Format::Table => _ = write(&table(rows))?,
    }
    Ok(())
}

/// Rows to write: JSON rows are written immediately, others at the end or when a signal ends the process.
#[derive(Debug)]
pub(crate) struct Rows {
    format: Format,
    written: anyhow::Result<bool>,
}

impl Rows {
    /// Creates an empty list. `table` formats the rows as a table.
    pub(crate) fn new(format: Format, table: impl Fn(&[Row]) -> String + Send + 'static) -> Self {
        *lock_measured() = Some(Measured { format, rows: Vec::new(), table: Box::new(table) });
        Self { format, written: Ok(true) }
    }

    pub(crate) fn push(&mut self, mut row: Row) {
        (row.head.schema, row.head.cpu) = (SCHEMA, cpu_model());
        row.head.commit = option_env!("OFFCORE_COMMIT");
        if self.format == Format::Json && matches!(self.written, Ok(true)) {
            self.written =
                serde_json::to_string(&row).map_err(Into::into).and_then(|json| write(&(json + "\n")));
        }
        lock_measured().iter_mut().for_each(|measured| measured.rows.push(row.clone()));
    }

    /// Writes the remaining rows. `draw` creates the file for `--plot`.
    pub(crate) fn finish(
        self,
        plot: Option<&PathBuf>,
        draw: impl FnOnce(&[Row], &Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.written?;
        let Some(measured) = lock_measured().take() else { return Ok(()) };
        written(&measured)?;
        // Done last, so that rows that took minutes are not lost if the file cannot be written.
        if let Some(path) = plot {
            draw(&measured.rows, path).with_context(|| format!("--plot {}", path.display()))?;
        }
        Ok(())
    }
}

/// Returns Linux's name of the CPU.
fn cpu_model() -> Option<&'static str> {
    static MODEL: LazyLock<Option<String>> = LazyLock::new(|| {
        let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    MODEL.as_deref()
}

/// Parses the path of a plot.
pub(crate) fn plot_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.extension().is_none_or(|extension| extension != "svg") {
        return Err("expected a file name that ends in .svg".into());
    }
    Ok(path)
}

/// Checks that a plot can be written, before minutes are spent on it.
pub(crate) fn check_plot(path: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let plot = path.display();
    if path.symlink_metadata().is_ok() {
        bail!("--plot {plot}: it exists: expected a name that is not taken");
    }
    if !folder.is_dir() {
        bail!("--plot {plot}: there is no directory {}", folder.display());
    }
    rustix::fs::access(folder, Access::WRITE_OK)
        .with_context(|| format!("--plot {plot}: {} cannot be written", folder.display()))
}

/// Permitted frame lengths, including FCS.
pub(crate) const FRAME: RangeInclusive<usize> = 64..=1518;

/// Returns the measured lcore and the other one: the given ones, or the first two.
pub(crate) fn two_lcores(given: Option<&Lcores>) -> Result<(usize, Option<usize>), Failure> {
    let available = lcore::available().map_err(|error| anyhow!("--lcores: {error}"))?;
    let [lcore, other] = match given {
        None => [available.first().copied(), available.get(1).copied()],
        Some(Lcores(given)) => match given[..] {
            [a, b] => [Some(a), Some(b)],
            _ => {
                return Err(format!(
                    "--lcores: found {}, expected 2: the measured lcore and the other one",
                    given.len()
                )
                .into());
            }
        },
    };
    check_lcores(&[lcore, other].into_iter().flatten().collect::<Vec<_>>())?;
    if other.is_none() {
        say("warning: one lcore has all roles: even data that is called remote stays in its cache");
    }
    Ok((lcore.ok_or_else(|| anyhow!("--lcores: no lcore is available to this process"))?, other))
}

/// Formats rows as CSV. Columns are sorted by name.
fn csv(rows: &[Row]) -> anyhow::Result<String> {
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let Value::Object(fields) = serde_json::to_value(row)? else {
            return Err(anyhow!("a row is not an object"));
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

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_bench::row::Head;

    #[test]
    fn rows_become_csv() {
        let head = Head {
            bench: "vhost",
            case: "a, \"quoted\" case".into(),
            frame: 64,
            engine: "core:1".into(),
            ..Head::default()
        };
        let row = Row { head, ..Row::default() };
        let text = csv(&[row.clone(), row]).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        // No name or value before the quoted one contains a comma.
        let names: Vec<&str> = lines[0].split(',').collect();
        let values: Vec<&str> = lines[1].split(',').collect();
        let value = |name: &str| names.iter().position(|other| *other == name).map(|at| values[at]);
        assert!(names.is_sorted(), "{}", lines[0]);
        assert_eq!(value("bench"), Some("vhost"), "{}", lines[1]);
        assert_eq!(value("bound"), Some(""), "{}", lines[1]);
        assert_eq!(value("burst"), Some("0"), "{}", lines[1]);
        assert!(lines[1].contains(",\"a, \"\"quoted\"\" case\","), "{}", lines[1]);
    }
}
