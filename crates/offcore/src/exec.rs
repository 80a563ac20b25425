//! `offcore exec`: runs a program whose sockets use the stack.

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
use offcore_config::iface::{HostPort, check_addresses};
use offcore_session::message::KEY;
use offcore_tcp::proto::Algorithm;
use rustix::fs::FileType;
use rustix::rand::{GetRandomFlags, getrandom};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use crate::args::named;
use crate::failure::Failure;
use crate::output::say;
use crate::switch::plan;
use program::{Program, ProgramError};
use signals::Signals;
use stack::Stack;

/// The default of `--stack`.
pub(crate) const STACK: &str = "/run/offcore/stack.sock";

/// The examples of `offcore exec --help`. A test parses each line that begins with `offcore`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  Run a stack for programs, as root. Then run a program on it in another
  terminal:
    offcore tcp --port tap:tap0,addr=10.0.0.2/24 --idle sleep \\
      --serve /run/offcore/stack.sock
    ip addr add 10.0.0.1/24 dev tap0
    offcore exec -- nginx -g 'daemon off;'

  Use the stack only for TCP ports 80 and 443, to listen at or to connect to.
  All other sockets stay with the kernel:
    offcore exec --only tcp:80,443 -- nginx -g 'daemon off;'

  Start a stack for this program. It ends when the program and its background
  processes have ended:
    offcore exec --port tap:tap0,addr=10.0.0.2/24 -- nginx -g 'daemon off;'

A program must be dynamically linked with glibc. Loopback and the kernel's own
addresses stay with the kernel. A listener at the wildcard address accepts from
the stack and from the kernel. With -v a line on standard error shows for each
socket which network it uses, and why. docs/exec.md lists what works.

Exit codes: the program's; with --port 128 plus the signal's number if a signal
ended it; 127 program not found, 126 program cannot be run, 1 other failures,
2 usage.";

/// The flags of `offcore exec`.
#[derive(Args, Debug)]
pub(crate) struct ExecArgs {
    /// Socket of the stack, as in `offcore tcp --serve`
    #[arg(long, value_name = "PATH", default_value = STACK)]
    pub stack: PathBuf,

    /// Instead of --stack: starts a stack for the program on this port, as in `offcore tcp --port`; once or more
    #[arg(long = "port", value_name = "SPEC", conflicts_with = "stack", value_parser = host_port)]
    pub ports: Vec<String>,

    /// With --port: congestion control of connections, unless a program sets another one (TCP_CONGESTION) [default:
    /// cubic]
    #[arg(long, value_name = "NAME", requires = "ports", conflicts_with = "stack", value_parser = named::<Algorithm>())]
    pub congestion: Option<Algorithm>,

    /// Sockets that use the stack, as tcp[:PORT,...] or udp[:PORT,...]; once or more [default: all TCP sockets, and
    /// UDP sockets that send]
    #[arg(long, value_name = "RULE", value_parser = rule)]
    pub only: Vec<String>,

    /// Behaviour of calls if the stack cannot be reached; `kernel` also runs programs that cannot be preloaded
    #[arg(long, value_name = "HOW", value_enum, default_value = "fail")]
    pub fallback: Fallback,

    /// Behaviour of programs with listeners after the stack's death
    #[arg(long, value_name = "HOW", value_enum, default_value = "listen")]
    pub on_loss: OnLoss,

    /// The program and its arguments, from the first word that is not a flag, or after --
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// Behaviour of calls if the stack cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fallback {
    /// The call fails
    Fail,
    /// The socket uses the kernel's network
    Kernel,
}

/// Behaviour of programs with listeners after the stack's death.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLoss {
    /// It listens again on the next stack at the same path
    Listen,
    /// It ends with exit code 1
    Exit,
}

/// Parses one rule.
fn rule(text: &str) -> Result<String, String> {
    let expected = "expected tcp or udp, or with ports after a colon, such as tcp:80,443";
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
        let ranges = if port.contains('-') { "; ranges are not supported" } else { "" };
        is_port.then_some(()).ok_or_else(|| format!("port '{port}': {expected}{ranges}"))?;
    }
    Ok(text.into())
}

/// Parses a port with addresses. The stack parses it again.
fn host_port(text: &str) -> Result<String, String> {
    text.parse::<HostPort>().map(|_| text.into())
}

/// Executes the program, or starts it with a private stack.
///
/// # Errors
/// [`Failure::Program`] if the program cannot be run, with the reason. Other errors if the stack cannot be reached.
pub(crate) fn run(args: &ExecArgs) -> Result<(), Failure> {
    if !args.ports.is_empty() {
        return run_both(args);
    }
    let stack = std::path::absolute(&args.stack).context("--stack").map_err(whole)?;
    let mut command = command(args, &program(args)?, &stack)?;
    if let Err(error) = stack::reach(&stack) {
        match args.fallback {
            Fallback::Fail => return Err(error.into()),
            Fallback::Kernel => say(&format!("{error}; the program uses the kernel's network")),
        }
    }
    without_io_uring().map_err(whole)?;
    let error = command.exec();
    Err(not_run(ProgramError::Read { path: command.get_program().into(), source: error }))
}

/// Starts a stack and the program. Returns when the program and all its processes have ended, with the program's exit
/// code.
fn run_both(args: &ExecArgs) -> Result<(), Failure> {
    let ports: Vec<HostPort> = args.ports.iter().filter_map(|port| port.parse().ok()).collect();
    plan::check_duplicates(&ports.iter().map(|port| port.spec.clone()).collect::<Vec<_>>())?;
    check_addresses(&ports)?;
    // Refuse an unsuitable program before anything starts.
    let program = program(args)?;
    command(args, &program, Path::new(""))?;
    let mut signals = Signals::new().context("handling signals").map_err(whole)?;
    let mut stack = Stack::start(&args.ports, args.congestion).map_err(whole)?;
    stack.wait_until_serving(&mut signals).map_err(whole)?;
    without_io_uring().map_err(whole)?;
    let mut program = command(args, &program, &stack.path())?;
    if let Some(signal) = signals.ends() {
        drop(stack);
        // The exit code that a shell would use.
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

/// Finds the program. Refuses a program that cannot be preloaded, except with `--fallback kernel`.
fn program(args: &ExecArgs) -> Result<Program, Failure> {
    let Some(name) = args.program.first() else { return Err(Failure::Usage("no program".into())) };
    let mut program = Program::find(name).map_err(not_run)?;
    match program.check() {
        Err(error @ ProgramError::Unfit { .. }) if args.fallback == Fallback::Kernel => {
            say(&format!("{error}; it uses the kernel's network"));
        }
        checked => checked.map_err(not_run)?,
    }
    Ok(program)
}

/// Returns the command that runs the program, with the library's environment.
fn command(args: &ExecArgs, program: &Program, stack: &Path) -> Result<Command, Failure> {
    let [name, arguments @ ..] = args.program.as_slice() else {
        return Err(Failure::Usage("no program".into()));
    };
    let library = library::install().context("the preload library").map_err(whole)?;
    let mut command = program.command(name);
    command.args(arguments);
    // All processes belong to one application, whichever of them attaches first.
    let mut key = [0; KEY];
    getrandom(&mut key, GetRandomFlags::empty()).context("getrandom").map_err(whole)?;
    let key: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    command.env("OFFCORE_STACK", stack).env("OFFCORE_KEY", key);
    if !args.only.is_empty() {
        command.env("OFFCORE_ONLY", args.only.join(";"));
    }
    // The library writes to this file only, even if a program replaces its standard error. Under another `offcore exec`
    // a socket there may be a session.
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
    // Other preloaded libraries follow it.
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command.env("LD_PRELOAD", preload);
    Ok(command)
}

/// Disables io_uring in this process and its children, because its operations on a session's descriptor would bypass
/// the library. Sets `no_new_privs`, which the filter requires.
fn without_io_uring() -> anyhow::Result<()> {
    let calls = [libc::SYS_io_uring_setup].map(|call| (call, Vec::new()));
    let missing = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    let filter = SeccompFilter::new(calls.into(), SeccompAction::Allow, missing, TargetArch::x86_64)?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&program).context("installing the seccomp filter that disables io_uring")
}

/// Returns the failure of a program that cannot be run, with the exit code of `env` and `nohup`.
fn not_run(error: ProgramError) -> Failure {
    Failure::Program(error.exit_code(), error.into())
}

/// Returns an error with its causes in its text.
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
    fn exec_examples_in_help_are_parsed() {
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
        for stack in ["", "--stack /s"] {
            let error = command(&format!("offcore exec {stack} --congestion bbr -- true")).unwrap_err();
            assert!(error.contains("--congestion") || error.contains("--port"), "{error}");
        }
    }
}
