//! The binary `offcore`: the command line and the commands that it starts.
//!
//! * [`args`]: syntax of arguments, with flags for DPDK,
//! * [`run`]: `offcore run`: configuration files,
//! * [`switch`]: `offcore switch`: rejects contradictions, opens ports, writes reports,
//! * [`copy`]: `offcore copy`, dpdk-dma's application, [`gpu`]: `offcore gpu`, l2fwd-nv's,
//! * [`demo`]: `offcore demo`, [`mod@bench`]: `offcore bench`,
//! * [`exec`]: `offcore exec`, unmodified programs on the stack,
//! * [`predict`]: `offcore predict`, [`dsa`]: `offcore dsa`,
//! * [`pktgen`]: `offcore pktgen`, [`tcp`]: `offcore tcp`, [`epping`]: `offcore epping`,
//! * [`port`]: `offcore port`, [`doctor`]: output of the doctors of `dsa` and `gpu`,
//! * [`service`]: systemd, man pages, completions,
//! * [`home`]: the directory of sockets and libraries, [`output`]: output and tables, [`failure`]: why a command fails.
//!
//! Results go to stdout, everything else to stderr. Exit codes: 0 success, 1 failure, 2 usage error. `exec` also
//! returns the program's exit codes.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod cli;
mod copy;
mod demo;
mod doctor;
mod dsa;
mod epping;
mod exec;
mod failure;
mod gpu;
mod home;
mod output;
mod pktgen;
mod port;
mod predict;
mod run;
mod service;
mod signals;
mod switch;
mod tcp;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::CommandFactory;
use clap::error::ErrorKind;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use cli::{Cli, Command};
use failure::Failure;
use output::say;

fn main() -> ExitCode {
    let cli = match Cli::of(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => return told(&error),
    };
    if let Err(text) = start_logging(cli.verbose.max(cli.command.verbose())) {
        say(&format!("error: {text}"));
        return ExitCode::from(2);
    }
    let result = match &cli.command {
        Command::Run(args) => run::run(args),
        Command::Check(args) => run::check(args),
        Command::Schema => run::schema(),
        Command::Completions(args) => service::completions(args, Cli::command()),
        Command::Man(args) => service::man(args, Cli::command()),
        Command::Switch(args) => switch::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Copy(args) => copy::run(args),
        Command::Gpu(args) => gpu::run(args),
        Command::Bench { command } => bench::run(command, &cli.names),
        Command::Pktgen(args) => pktgen::run(args),
        Command::Tcp(args) => tcp::run(args),
        Command::Epping(args) => epping::run(args),
        Command::Exec(args) => exec::run(args),
        Command::Predict(args) => predict::run(args),
        Command::Dsa { command } => dsa::run(command),
        Command::Port { command } => port::run(command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(text)) => usage(&cli.names, &text),
        Err(Failure::File(problems)) => {
            say(&problems);
            ExitCode::from(2)
        }
        Err(failure) => {
            say(&format!("error: {failure}"));
            match failure {
                Failure::Program(code, _) => ExitCode::from(code),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Prints the parser's output: help, or an error in the flags.
fn told(error: &clap::Error) -> ExitCode {
    match error.print().and_then(|()| std::io::stdout().flush()) {
        Ok(()) => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)),
        Err(unwritten) => {
            say(&format!("error: it cannot be written: {unwritten}"));
            ExitCode::FAILURE
        }
    }
}

/// Reports an error in the flags in the format of the parser.
fn usage(names: &[String], text: &str) -> ExitCode {
    let mut root = Cli::command();
    root.build();
    let mut command = &mut root;
    for name in names {
        command = command.find_subcommand_mut(name).expect("the subcommand was parsed");
    }
    let _ = command.error(ErrorKind::ArgumentConflict, text).print();
    ExitCode::from(2)
}

fn start_logging(verbose: u8) -> Result<(), String> {
    // A value that is not UTF-8 is not a level either.
    let asked = std::env::var_os("OFFCORE_LOG").unwrap_or_default().to_string_lossy().into_owned();
    let filter = match (verbose, asked) {
        (0, text) if !text.is_empty() => log_filter(&text).map_err(|error| {
            format!("OFFCORE_LOG='{text}': {error}; expected a level, or levels by crate such as offcore_vhost=debug")
        })?,
        (0, _) => Targets::new().with_default(LevelFilter::WARN),
        (1, _) => Targets::new().with_default(LevelFilter::INFO),
        (2, _) => Targets::new().with_default(LevelFilter::DEBUG),
        (_, _) => Targets::new().with_default(LevelFilter::TRACE),
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry().with(lines).with(filter).init();
    Ok(())
}

/// Parses levels strictly. `tracing` accepts any word as the name of a crate, including spaces and the empty word, so a
/// misspelt level would disable everything else.
fn log_filter(text: &str) -> Result<Targets, String> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    for part in &parts {
        if !part.contains('=') {
            let level = part.parse::<LevelFilter>().ok().filter(|_| !part.is_empty());
            level.ok_or_else(|| format!("'{part}' is no level"))?;
        }
    }
    parts.join(",").parse().map_err(|error: tracing_subscriber::filter::ParseError| error.to_string())
}
