//! `offcore dsa`: lists, configures, diagnoses and monitors DSA devices, and explains their codes.
//!
//! * [`list`]: current devices, [`configure`]: wanted configuration, [`doctor`]: problems,
//! * [`perf`]: current activity.

mod configure;
mod doctor;
mod list;
mod perf;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use offcore_dsa::config::sysfs::{self, Roots, SysfsDevice};
use offcore_dsa::explain;

use crate::args::Format;
use crate::failure::Failure;
use crate::output::write;

#[derive(Debug, Subcommand)]
pub(crate) enum DsaCommand {
    /// Show devices, groups, work queues and DSA engines
    #[command(after_help = list::EXAMPLES)]
    List(ListArgs),
    /// Configure a device, or show or save its configuration
    #[command(after_help = configure::EXAMPLES)]
    Configure(Box<ConfigureArgs>),
    /// Diagnose obstacles to the use of DSA on this machine
    #[command(after_help = doctor::EXAMPLES)]
    Doctor(DoctorArgs),
    /// Watch work queues: occupancy, clients, errors
    #[command(after_help = perf::EXAMPLES)]
    Perf(PerfArgs),
    /// Explain a status code or a completion record
    #[command(after_help = EXPLAIN_EXAMPLES)]
    Explain(ExplainArgs),
}

const EXPLAIN_EXAMPLES: &str = "\
Examples:
  A status, as a driver or another program reports it:
    offcore dsa explain 0x83

  A completion record of 32 bytes, in memory order:
    offcore dsa explain 03000000 00100000 00705634 127f0000 00000000 00000000 00000000 00000000

  The cmd_status of a device:
    offcore dsa explain 0x80200000";

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// Only this device, such as dsa0
    #[arg(value_name = "DEVICE")]
    pub device: Option<String>,

    #[command(flatten)]
    pub roots: RootArgs,

    /// A table, or JSON with one device per line
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,
}

#[derive(Args, Debug)]
pub(crate) struct ConfigureArgs {
    /// A built-in layout: vhost, vpp, mtcp, dpdk, or accel-config's os, app, net, storage, user_default
    #[arg(value_name = "LAYOUT", conflicts_with_all = ["file", "wqs", "mode", "engines", "disable"])]
    pub layout: Option<String>,

    /// Layouts from a file in accel-config's JSON
    #[arg(short = 'c', long = "config", value_name = "FILE", conflicts_with_all = ["wqs", "mode", "engines", "disable"])]
    pub file: Option<PathBuf>,

    /// The device [default: the device in the layout, or dsa0 for a built-in layout]
    #[arg(short, long, value_name = "DEVICE")]
    pub device: Option<String>,

    /// One group with this many work queues of equal size
    #[arg(short, long, value_name = "N", conflicts_with = "disable")]
    pub wqs: Option<usize>,

    /// Mode of the work queues: d (dedicated) or s (shared) [default: d]
    #[arg(short, long, value_name = "MODE", value_parser = configure::mode(), requires = "wqs", conflicts_with = "disable")]
    pub mode: Option<offcore_dsa::WqMode>,

    /// DSA engines of the group [default: all]
    #[arg(short, long, value_name = "N", requires = "wqs", conflicts_with = "disable")]
    pub engines: Option<usize>,

    /// Disable the device and its work queues
    #[arg(long, conflicts_with = "print")]
    pub disable: bool,

    /// Print accel-config commands for the layout without changing the device
    #[arg(long)]
    pub print: bool,

    /// Write the current layout as accel-config JSON before a change; - for standard output
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,

    /// Change a device even if programs use it
    #[arg(long)]
    pub force: bool,

    #[command(flatten)]
    pub roots: RootArgs,
}

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// A directory with copies of another machine's proc, sys, dev and boot
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,

    /// Show all checks, not only the failed ones
    #[arg(short, long)]
    pub all: bool,

    /// Lines of text, or JSON with one object per line
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,
}

#[derive(Args, Debug)]
pub(crate) struct PerfArgs {
    /// Only this device, such as dsa0
    #[arg(value_name = "DEVICE")]
    pub device: Option<String>,

    /// Seconds between two reports
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = perf::interval)]
    pub interval: Duration,

    /// Stop after this many reports
    #[arg(short = 'n', long, value_name = "N")]
    pub count: Option<u64>,

    #[command(flatten)]
    pub roots: RootArgs,

    /// A table, or JSON with one work queue per line
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,
}

#[derive(Args, Debug)]
pub(crate) struct ExplainArgs {
    /// A code, or the bytes of a completion record
    #[arg(value_name = "TEXT", required = true)]
    pub text: Vec<String>,
}

/// Where the kernel's trees are.
#[derive(Args, Debug)]
pub(crate) struct RootArgs {
    /// The devices [default: DSA_SYSFS_PATH, or /sys/bus/dsa/devices]
    #[arg(long, value_name = "DIR")]
    pub sysfs: Option<PathBuf>,

    /// The character devices [default: DSA_DEV_PATH, or /dev/dsa]
    #[arg(long, value_name = "DIR")]
    pub dev: Option<PathBuf>,
}

impl RootArgs {
    fn roots(&self) -> Roots {
        let environment = Roots::from_env();
        Roots {
            sysfs: self.sysfs.clone().unwrap_or(environment.sysfs),
            dev: self.dev.clone().unwrap_or(environment.dev),
        }
    }

    /// Returns all devices, or the requested one.
    fn devices(&self, name: Option<&str>) -> anyhow::Result<Vec<SysfsDevice>> {
        let roots = self.roots();
        if let Some(name) = name {
            return Ok(vec![sysfs::find(&roots, name)?]);
        }
        let shown = roots.sysfs.display();
        let found = sysfs::devices(&roots).map_err(|error| anyhow::anyhow!("{shown}: {error}"))?;
        anyhow::ensure!(!found.is_empty(), "{shown}: no DSA device; 'offcore dsa doctor' shows the reason");
        Ok(found)
    }
}

pub(crate) fn run(command: &DsaCommand) -> Result<(), Failure> {
    match command {
        DsaCommand::List(args) => {
            write(&list::text(&args.roots.devices(args.device.as_deref())?, args.format)?)?;
        }
        DsaCommand::Configure(args) => configure::run(args)?,
        DsaCommand::Doctor(args) => doctor::run(args)?,
        DsaCommand::Perf(args) => perf::run(args)?,
        DsaCommand::Explain(args) => {
            let text = explain::from_text(&args.text).map_err(|error| Failure::Usage(error.to_string()))?;
            write(&(text.trim_end().to_owned() + "\n"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "../../offcore-dsa/tests/fixtures/mod.rs"]
mod fixtures;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    /// Parses a line without quotes.
    pub(super) fn parse(line: &str) -> Result<DsaCommand, String> {
        let words = ["offcore", "dsa"].into_iter().chain(line.split_whitespace());
        let command = Cli::try_parse_from(words).map_err(|error| error.to_string())?.command;
        let Command::Dsa { command } = command else { panic!("{line}") };
        Ok(command)
    }

    #[test]
    fn help_examples_are_accepted() {
        let mut seen = 0;
        for help in [list::EXAMPLES, configure::EXAMPLES, doctor::EXAMPLES, perf::EXAMPLES, EXPLAIN_EXAMPLES]
        {
            for line in help.lines().filter_map(|line| line.trim().strip_prefix("offcore dsa ")) {
                match parse(line).unwrap() {
                    DsaCommand::Explain(args) => {
                        explain::from_text(&args.text).unwrap_or_else(|error| panic!("{line}: {error}"));
                    }
                    DsaCommand::Configure(args) => configure::sources(&args).map(drop).unwrap(),
                    _ => {}
                }
                seen += 1;
            }
        }
        assert_eq!(seen, 17);
    }

    #[test]
    fn contradicting_flags_are_named() {
        for (line, words) in [
            ("configure vhost -w 1", &["LAYOUT", "--wqs"][..]),
            ("configure vhost -c a.conf", &["LAYOUT", "--config"]),
            ("configure -m d", &["--wqs"]),
            ("configure -w 1 -m x", &["--mode", "dedicated"]),
            ("configure --disable --print", &["--disable", "--print"]),
            ("perf --interval 0", &["--interval"]),
            ("explain", &["TEXT"]),
            ("exec", &["exec"]),
        ] {
            let error = parse(line).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{line}: {error}");
        }
    }

    #[test]
    fn sysfs_root_flag_is_followed() {
        let tree = fixtures::Tree::healthy();
        let roots = RootArgs { sysfs: Some(tree.roots().sysfs), dev: Some(tree.roots().dev) };
        assert_eq!(roots.devices(None).unwrap()[0].config.name, "dsa0");
        let text = roots.devices(Some("dsa7")).unwrap_err().to_string();
        assert!(text.contains("dsa7") && text.contains("found dsa0"), "{text}");
        let none = RootArgs { sysfs: Some("/nowhere".into()), dev: None };
        assert!(none.devices(None).unwrap_err().to_string().contains("offcore dsa doctor"));
    }
}
