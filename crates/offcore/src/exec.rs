//! `offcore exec`: a program whose sockets are the stack's.

mod directory;
mod library;
mod program;
mod signals;
mod stack;

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow};
use clap::{Args, ValueEnum};
use offcore_session::message::KEY;
use rustix::fs::FileType;
use rustix::rand::{GetRandomFlags, getrandom};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use crate::Failure;
use crate::switch::plan;
use crate::tcp::HostPortArg;
use program::{Program, ProgramError};
use signals::Signals;
use stack::Stack;

/// Where a stack is looked for that nobody names.
pub(crate) const STACK: &str = "/run/offcore/stack.sock";

/// The examples of `offcore exec --help`. A test parses each line that begins with `offcore`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  A stack that programs can use, as root; then, in another terminal, a program
  on it:
    offcore tcp --port tap:tap0,addr=10.0.0.2/24 --idle sleep \\
      --serve /run/offcore/stack.sock
    offcore exec -- nginx -g 'daemon off;'

  Only what is said goes to the stack, by ports that are listened at, or
  connected to; everything else stays with the kernel:
    offcore exec --only tcp:80,443 -- nginx -g 'daemon off;'

  Both at once: a stack for this program alone, which ends with it and with what
  it leaves in the background:
    offcore exec --port tap:tap0,addr=10.0.0.2/24 -- nginx -g 'daemon off;'

A program has to be dynamically linked with glibc. Loopback and addresses of the
kernel's own stay with the kernel. What listens at all addresses is reached by
both; -v has a line on standard error for each socket that says where it goes,
and why. docs/exec.md says what works.

Exit codes: those of the program, and 128 and its number for a signal that has
ended one with --port; 127 there is no such program, 126 it cannot be run so,
1 failed otherwise, 2 usage.";

/// What `offcore exec` understands.
#[derive(Args, Debug)]
pub(crate) struct ExecArgs {
    /// Socket of the stack, as in `offcore tcp --serve`
    #[arg(long, value_name = "PATH", default_value = STACK)]
    pub stack: PathBuf,

    /// Instead of --stack: starts a stack for the program on this port, as `offcore tcp --port`; once or more
    #[arg(long = "port", value_name = "SPEC", conflicts_with = "stack", value_parser = host_port)]
    pub ports: Vec<String>,

    /// What goes to the stack, as tcp[:PORT,...] and udp[:PORT,...]; once or more [default: all of TCP, and UDP that is sent]
    #[arg(long, value_name = "RULE", value_parser = rule)]
    pub only: Vec<String>,

    /// How a call behaves if the stack cannot be reached: it fails, or its socket uses the kernel's network
    #[arg(long, value_name = "HOW", value_enum, default_value = "fail")]
    pub fallback: Fallback,

    /// How a program with listeners behaves after the stack's death: it listens again at the next stack of the same path, or ends
    /// with exit code 1
    #[arg(long, value_name = "HOW", value_enum, default_value = "listen")]
    pub on_loss: OnLoss,

    /// The program and its arguments, which begin with the first word that is no flag, or behind --
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// How a call behaves if the stack cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fallback {
    /// Its call fails
    Fail,
    /// It uses the kernel's network
    Kernel,
}

/// How a program with listeners behaves after the stack's death.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLoss {
    /// It listens again at the next stack at the same path
    Listen,
    /// It ends with exit code 1
    Exit,
}

/// One rule.
fn rule(text: &str) -> Result<String, String> {
    let expected = "expected tcp or udp, with ports behind a colon if not all are meant, such as tcp:80,443";
    for (at, _) in text.match_indices([',', ';', ' ']) {
        let (first, second) = (&text[..at], &text[at + 1..]);
        if second.starts_with("tcp") || second.starts_with("udp") {
            return Err(format!(
                "two rules, expected one: give each its own flag: --only {first} --only {second}"
            ));
        }
    }
    let (protocol, ports) = text.split_once(':').map_or((text, None), |(name, ports)| (name, Some(ports)));
    if !matches!(protocol, "tcp" | "udp") {
        return Err(expected.into());
    }
    for port in ports.iter().flat_map(|ports| ports.split(',')) {
        let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
        let ranges = if port.contains('-') { "; there are no ranges" } else { "" };
        is_port.then_some(()).ok_or_else(|| format!("port '{port}': {expected}{ranges}"))?;
    }
    Ok(text.into())
}

/// A port with addresses, which the stack parses again.
fn host_port(text: &str) -> Result<String, String> {
    text.parse::<HostPortArg>().map(|_| text.into())
}

/// Becomes the program, or starts it beside a stack of its own.
///
/// # Errors
/// [`Failure::Program`] for a program that cannot run so, and why; a stack that cannot be reached.
pub(crate) fn run(args: &ExecArgs) -> Result<(), Failure> {
    if !args.ports.is_empty() {
        return run_both(args);
    }
    let stack = std::path::absolute(&args.stack).context("--stack").map_err(whole)?;
    let mut command = command(args, &stack)?;
    stack::reach(&stack)?;
    without_io_uring().map_err(whole)?;
    let error = command.exec();
    Err(not_run(ProgramError::Read { path: command.get_program().into(), source: error }))
}

/// Starts a stack and the program, and ends as the program ends, when nothing that it has started is left.
fn run_both(args: &ExecArgs) -> Result<(), Failure> {
    let ports = args.ports.iter().filter_map(|port| Some(port.parse::<HostPortArg>().ok()?.spec));
    plan::check_twice(&ports.collect::<Vec<_>>())?;
    // What cannot run is refused before anything starts.
    command(args, Path::new(""))?;
    let mut signals = Signals::new().context("handling signals").map_err(whole)?;
    let mut stack = Stack::start(&args.ports).map_err(whole)?;
    stack.wait_until_it_serves(&mut signals).map_err(whole)?;
    without_io_uring().map_err(whole)?;
    let mut program = command(args, &stack.path())?;
    if let Some(signal) = signals.ends() {
        drop(stack);
        // As a shell does.
        std::process::exit(128 + signal);
    }
    let child = program
        .spawn()
        .map_err(|source| not_run(ProgramError::Read { path: program.get_program().into(), source }))?;
    let status = stack.wait(&child, &mut signals).map_err(whole)?;
    drop(stack);
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(()),
        (Some(code), _) => std::process::exit(code),
        (None, signal) => std::process::exit(128 + signal.unwrap_or(0)),
    }
}

/// The program, with what the library needs.
fn command(args: &ExecArgs, stack: &Path) -> Result<Command, Failure> {
    let [name, arguments @ ..] = args.program.as_slice() else {
        return Err(Failure::Usage("no program".into()));
    };
    let mut program = Program::find(name).map_err(not_run)?;
    program.check().map_err(not_run)?;
    let library = library::install().context("the preload library").map_err(whole)?;
    let mut command = program.command(name);
    command.args(arguments);
    // One application, whichever of its processes comes to the stack first.
    let mut key = [0; KEY];
    getrandom(&mut key, GetRandomFlags::empty()).context("getrandom").map_err(whole)?;
    let key: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    command.env("OFFCORE_STACK", stack).env("OFFCORE_KEY", key);
    if !args.only.is_empty() {
        command.env("OFFCORE_ONLY", args.only.join(";"));
    }
    // The library may write to this file only, whatever a program has for its standard error. Under another `offcore exec` a
    // socket there may be a session.
    let nested = std::env::var_os("OFFCORE_STACK").is_some();
    let stderr = rustix::fs::fstat(std::io::stderr()).ok();
    match stderr.filter(|file| !(nested && FileType::from_raw_mode(file.st_mode) == FileType::Socket)) {
        Some(file) => command.env("OFFCORE_STDERR", format!("{}:{}", file.st_dev, file.st_ino)),
        None => command.env_remove("OFFCORE_STDERR"),
    };
    match tracing::enabled!(tracing::Level::INFO) {
        true => command.env("OFFCORE_EXPLAIN", "1"),
        false => command.env_remove("OFFCORE_EXPLAIN"),
    };
    match args.fallback {
        Fallback::Fail => command.env_remove("OFFCORE_FALLBACK"),
        Fallback::Kernel => command.env("OFFCORE_FALLBACK", "kernel"),
    };
    match args.on_loss {
        OnLoss::Listen => command.env_remove("OFFCORE_ON_LOSS"),
        OnLoss::Exit => command.env("OFFCORE_ON_LOSS", "exit"),
    };
    command.env("OFFCORE_LIBRARY", &library);
    let mut preload = library.into_os_string();
    // Others that are preloaded come behind it.
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command.env("LD_PRELOAD", preload);
    Ok(command)
}

/// From now on this process, and all that it starts, has no io_uring: it would wait for a session's descriptor as for a socket,
/// and by system calls that no library sees. The kernel gives nobody new rights then (`no_new_privs`).
fn without_io_uring() -> anyhow::Result<()> {
    let calls = [libc::SYS_io_uring_setup].map(|call| (call, Vec::new()));
    let missing = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    let filter = SeccompFilter::new(calls.into(), SeccompAction::Allow, missing, TargetArch::x86_64)?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&program).context("a filter of system calls, so that there is no io_uring")
}

/// A program that is not run, with the exit code that `env` and `nohup` have then.
fn not_run(error: ProgramError) -> Failure {
    Failure::Program(error.exit_code(), error.into())
}

/// An error whose causes stand in its text.
fn whole(error: anyhow::Error) -> Failure {
    Failure::Failed(anyhow!("{error:#}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;
    use crate::cli::Command;
    use crate::cli::lines::{command, examples};

    #[test]
    fn examples_of_the_help_can_be_followed() {
        for line in examples(EXAMPLES, 4) {
            command(&line).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    #[test]
    fn a_program_needs_no_dashes_before_it() {
        let program = |line: &str| match command(line) {
            Ok(Command::Exec(args)) => (args.stack, args.program),
            other => panic!("{line}: {other:?}"),
        };
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        for (line, stack, expected) in [
            ("offcore exec hello", STACK, &["hello"][..]),
            ("offcore exec -- hello", STACK, &["hello"]),
            ("offcore exec --stack /s nginx -g off", "/s", &["nginx", "-g", "off"]),
            ("offcore exec nginx --stack /s -v -- x", STACK, &["nginx", "--stack", "/s", "-v", "--", "x"]),
            ("offcore exec --stack /s -- -x --only y", "/s", &["-x", "--only", "y"]),
            ("offcore exec -- switch --demo", STACK, &["switch", "--demo"]),
            ("offcore exec --only tcp -- p --demo", STACK, &["p", "--demo"]),
        ] {
            assert_eq!(program(line), (stack.into(), words(expected)), "{line}");
        }
        assert!(command("offcore exec --stak /s true").unwrap_err().contains("--stack"));
    }

    #[test]
    fn rules_name_protocols_and_ports() {
        let rules = |line: &str| match command(line) {
            Ok(Command::Exec(args)) => Ok(args.only),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error),
        };
        assert_eq!(
            rules("offcore exec --only tcp:80,443 --only udp -- true"),
            Ok(vec!["tcp:80,443".into(), "udp".into()])
        );
        for (rule, expected) in
            [("tcp:0", "port '0'"), ("tcp:", "port ''"), ("sctp", "expected tcp or udp"), ("", "expected")]
        {
            let error = rules(&format!("offcore exec --only={rule} -- true")).unwrap_err();
            assert!(error.contains(expected), "{rule}: {error}");
        }
        for two in ["tcp:80,udp:53", "tcp:80;udp:53", "udp,tcp", "tcp,udp:53"] {
            let error = rules(&format!("offcore exec --only={two} -- true")).unwrap_err();
            assert!(
                error.contains("two rules") && error.contains("give each its own flag: --only "),
                "{two}: {error}"
            );
        }
        assert!(command("offcore exec --stack /s").unwrap_err().contains("required"));
        let both = "offcore exec --stack /s --port tap:tap0,addr=10.0.0.2/24 -- true";
        assert!(command(both).unwrap_err().contains("cannot be used with"));
        assert!(command("offcore exec --port tap:tap0 -- true").unwrap_err().contains("no address"));
    }
}
