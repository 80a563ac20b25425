//! Every command of the README, the documents and the help texts works as printed.
//!
//! Each document gets its own `/tmp`, `/run`, `/srv`, working directory, and network namespace with `eth0` and `eth1`.
//! A command runs until it ends, or until it can be stopped by SIGINT. If the machine lacks a requirement, the command
//! may fail with the message that says so, provided that the document mentions the requirement next to the command.

mod expected;

use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use offcore_bench::machine::find_program;
use offcore_bench::peer::process::{Process, TIMEOUT};
use peers::offcore::{Signal, copy_binary};
use peers::{Need, Netns, Offcore, TempDir, exclusive, require};

use expected::{MAY_LACK, NOT_RUN};

/// The text under one heading of a document, or a help text.
#[derive(Debug, Default)]
struct Section {
    /// The whole text. It must mention the requirements of the commands.
    text: String,
    commands: Vec<String>,
}

/// Returns the sections of a Markdown document, with the commands from indented blocks and from table cells.
fn sections(document: &str) -> Vec<Section> {
    let mut sections = vec![Section::default()];
    let (mut fenced, mut block, mut before) = (false, false, "");
    for line in document.lines() {
        fenced ^= line.starts_with("```");
        if line.starts_with('#') && !fenced {
            sections.push(Section::default());
        }
        let section = sections.last_mut().unwrap();
        let _ = writeln!(section.text, "{line}");
        let code = line.strip_prefix("    ").filter(|_| !fenced && (block || before.is_empty()));
        block = code.is_some();
        match code {
            Some(code) if before.ends_with('\\') => section.go_on(code),
            Some(code) if is_command(code) => section.command(code),
            _ if line.starts_with('|') && !fenced => {
                let cells =
                    line.split('|').filter_map(|cell| cell.trim().strip_prefix('`')?.split('`').next());
                let cells = cells.filter(|cell| cell.starts_with("offcore "));
                cells.for_each(|cell| section.command(cell));
            }
            _ => {}
        }
        before = line;
    }
    sections
}

/// Returns a help text with its examples.
fn examples(help: &str) -> Section {
    let mut section = Section { text: help.to_owned(), ..Section::default() };
    let mut before = "";
    for line in help.split("\nExamples:").nth(1).unwrap_or_default().lines() {
        match line.trim_start() {
            line if before.ends_with('\\') => section.go_on(line),
            line if line.starts_with("offcore ") => section.command(line),
            _ => {}
        }
        before = line;
    }
    section
}

impl Section {
    fn command(&mut self, line: &str) {
        self.commands.push(line.trim_end_matches('\\').to_owned());
    }

    fn go_on(&mut self, line: &str) {
        if let Some(command) = self.commands.last_mut() {
            command.push_str(line.trim_end_matches('\\').trim_start());
        }
    }
}

/// Returns whether a line begins with a program of this machine, or with flags that show how channels are assigned to
/// ports.
fn is_command(line: &str) -> bool {
    let word = line.trim_start_matches('(').split(' ').next().unwrap_or_default();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(word);
    let program = !word.is_empty() && (find_program(word).is_some() || path.is_file());
    program || matches!(word, "offcore" | "--dma" | "--port" | "cd" | "echo")
}

/// Returns the line as the shell gets it: with the path of the release binary, and with ports if a line shows only
/// flags.
fn as_run(line: &str) -> String {
    let line = line.replace("cargo run --release -- ", "offcore ");
    if line.starts_with("--dma") {
        return format!("offcore switch --port vhost:/tmp/vm1.sock --port vhost:/tmp/vm2.sock {line}");
    }
    if line.starts_with("--port") { format!("offcore switch {line}") } else { line }
}

/// The environment in which the commands of one document run.
struct Place {
    here: Netns,
    there: Netns,
    dir: TempDir,
}

impl Place {
    fn new() -> Self {
        let place =
            Self { here: Netns::new().unwrap(), there: Netns::new().unwrap(), dir: TempDir::new().unwrap() };
        for name in ["eth0", "eth1"] {
            let (here, there) = (place.here.name(), place.there.name());
            let ends = ["type", "veth", "peer", "name", name, "numrxqueues", "4", "numtxqueues", "4"];
            let here = ["link", "add", name, "netns", here, "numrxqueues", "4", "numtxqueues", "4"];
            place.here.ip(&[&here[..], &ends, &["netns", there]].concat()).unwrap();
            place.there.ip(&["link", "set", name, "up"]).unwrap();
            place.here.ip(&["link", "set", name, "up"]).unwrap();
        }
        for dir in ["tmp", "run/bin", "srv/www", "work"] {
            fs::create_dir_all(place.dir.file(dir)).unwrap();
        }
        copy_binary(&place.dir.file("run/bin/offcore")).unwrap();
        fs::write(place.dir.file("work/in.pcap"), super::no_harm::capture(9)).unwrap();
        let examples = place.dir.file("work/examples/run");
        fs::create_dir_all(&examples).unwrap();
        for file in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/run")).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), examples.join(file.file_name())).unwrap();
        }
        for patterns in ["rules.txt", "signatures.txt"] {
            fs::write(place.dir.file("work").join(patterns), "evil.example\n").unwrap();
        }
        place
    }

    fn spawn(&self, line: &str) -> Process {
        let mut command = self.here.command("sh");
        // The shell executes a line with only one program by `exec`, so that the program gets the signal.
        let exec = if line.starts_with('(') { "" } else { "exec " };
        let script = "cd \"$0\"/work && mount --bind \"$0\"/srv /srv && mount --bind \"$0\"/run /run && \
                      mount --bind \"$0\"/tmp /tmp && PATH=/run/bin:$PATH && ";
        command.args(["-c", &format!("{script}{exec}{line}")]).arg(self.dir.path());
        Process::spawn(line, command).unwrap()
    }

    /// Runs a command to its end. Retries if it needs something that another command is still creating.
    fn run_when_ready(&self, line: &str) -> Option<String> {
        let started = Instant::now();
        loop {
            let mut process = self.spawn(line);
            let status = process.wait_for_exit(TIMEOUT).unwrap();
            if status.success() || started.elapsed() > TIMEOUT {
                return judge(line, None, status, &process);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Waits until the process has ended, or has a handler for SIGINT, or has had enough time to install one.
fn settled(process: &mut Process) -> Option<ExitStatus> {
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(1) {
        if let Some(status) = process.exit_status(Duration::from_millis(20)) {
            return Some(status);
        }
        let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        if caught.is_some_and(|mask| mask & 1 << (Signal::INT.as_raw() - 1) != 0) {
            return None;
        }
    }
    None
}

/// Checks how a command ended. Returns an error message if it is not as expected.
fn judge(command: &str, stated: Option<&str>, status: ExitStatus, process: &Process) -> Option<String> {
    let said = process.stderr() + &process.stdout_from(0);
    if status.success()
        || status.signal() == Some(Signal::INT.as_raw())
        // `offcore exec` has this exit code if a signal arrives before the program starts.
        || status.code() == Some(128 + Signal::INT.as_raw())
        || said.contains("error: interrupted")
    {
        return None;
    }
    match MAY_LACK.iter().find(|(message, _)| stated.is_some() && said.contains(message)) {
        Some((_, need)) if stated.is_some_and(|stated| stated.contains(need)) => None,
        Some((_, need)) => Some(format!("{command}: no word of {need:?} beside it, which it needs")),
        None => Some(format!("{command}: {status}: {}", said.trim())),
    }
}

/// Stops a command that runs until it is interrupted. Returns an error message if it does not end as expected.
fn stop(command: &str, section: &Section, mut process: Process) -> Option<String> {
    if command.starts_with("dpdk-testpmd") {
        let asks =
            process.wait_for(0, TIMEOUT, "the prompt", |said| said.contains("testpmd> ").then_some(()));
        if let Err(e) = asks.and_then(|()| process.write_line("quit")) {
            return Some(e.to_string());
        }
    } else if process.exit_status(Duration::from_millis(200)).is_none() {
        // The process may have ended in the meantime.
        let _ = process.signal(Signal::INT);
    }
    match process.wait_for_exit(TIMEOUT) {
        Ok(status) => judge(command, Some(&section.text), status, &process),
        Err(e) => Some(e.to_string()),
    }
}

/// Runs the commands of a section in order, and returns what went wrong. A running `offcore` command is stopped when
/// the next command with ports begins. Other programs run in parallel.
fn run_section(place: &Place, section: &Section) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut running: Vec<(String, Process)> = Vec::new();
    // The last command is stopped first, while its peers still run.
    let stop_all = |running: &mut Vec<(String, Process)>| {
        running
            .drain(..)
            .rev()
            .filter_map(|(command, process)| stop(&command, section, process))
            .collect::<Vec<_>>()
    };
    for command in section.commands.iter().map(|line| as_run(line)) {
        if NOT_RUN.iter().any(|(beginning, _why)| command.starts_with(beginning)) {
            continue;
        }
        if command.starts_with("ip ") || command.starts_with("ping ") {
            wrong.extend(place.run_when_ready(&command));
            continue;
        }
        let serves = |command: &str| command.contains("--serve ") || command.starts_with("dpdk-testpmd");
        let alone =
            command.starts_with("offcore ") && (command.contains("--port ") || !command.contains(" exec "));
        if alone && !running.iter().all(|(command, _)| command.starts_with("dpdk-testpmd")) {
            wrong.extend(stop_all(&mut running));
        }
        let mut process = place.spawn(&command);
        settled(&mut process);
        if let Some(socket) = command.split_once("--serve /").and_then(|(_, path)| path.split(' ').next()) {
            super::switch::wait_until("the socket is there", || place.dir.file(socket).exists());
        }
        if serves(&command) || alone {
            running.push((command, process));
        } else {
            wrong.extend(stop(&command, section, process));
        }
    }
    wrong.extend(stop_all(&mut running));
    wrong
}

fn documents() -> Vec<(String, Vec<Section>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let docs = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let mut documents: Vec<_> =
        docs.filter(|path| path.extension().is_some_and(|kind| kind == "md")).collect();
    documents.sort();
    documents.push(root.join("README.md"));
    let sections = documents.into_iter().map(|path| {
        let text = fs::read_to_string(&path).unwrap();
        (path.file_name().unwrap().display().to_string(), sections(&text))
    });
    sections.collect()
}

/// Returns the long help of every command with the command's name.
fn help_texts() -> Vec<(String, Vec<Section>)> {
    let mut texts = Vec::new();
    let mut commands = vec![String::new()];
    while let Some(command) = commands.pop() {
        let args: Vec<_> = command.split_whitespace().chain(["--help"]).collect();
        let help = Offcore::run(&args).unwrap().stdout;
        let list =
            help.split("\nCommands:\n").nth(1).unwrap_or_default().split("\n\n").next().unwrap_or_default();
        let names = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        let names = names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
        commands.extend(names.map(|name| format!("{command} {name}")));
        texts.push((format!("offcore{command} --help"), vec![examples(&help)]));
    }
    texts
}

#[test]
fn commands_run_as_printed() {
    let Some(()) = require(&[Need::Root, Need::Ip, Need::Ping, Need::Testpmd]) else { return };
    let mut wrong = Vec::new();
    let mut run = 0;
    for (name, sections) in documents().into_iter().chain(help_texts()) {
        let _cores = exclusive(&[]);
        let place = Place::new();
        for section in sections.iter().filter(|section| !section.commands.is_empty()) {
            wrong.extend(run_section(&place, section).into_iter().map(|wrong| format!("{name}: {wrong}")));
            run += section.commands.len();
        }
    }
    assert!(wrong.is_empty(), "{} of {run}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(run > 200, "{run} commands were found");
}

#[test]
fn documents_link_to_install_section() {
    for (name, sections) in documents() {
        let commands =
            sections.iter().flat_map(|section| &section.commands).any(|line| line.starts_with("offcore "));
        let said = sections.iter().any(|section| section.text.contains("README.md#install"));
        assert!(said || !commands || name == "README.md", "{name}");
    }
}
