//! A run of several steps. Each is announced, watched, timed and counted, and a run continues after a failure.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::{Pid, Signal};

use crate::executables::Executable;

/// Time limit for tests without output. Tests end by themselves when they make no progress, so this limit is for
/// unexpected hangs. A compiler on a busy machine may print nothing for longer.
const SILENCE: Duration = Duration::from_secs(10 * 60);
/// Time limit for a step.
const LIMIT: Duration = Duration::from_secs(120 * 60);
/// How long to wait for output after a program has ended: its children may hold its streams open.
const AFTER_END: Duration = Duration::from_secs(2);

/// Numbers of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// Returns the numbers in one line if it is a harness's summary.
    fn of_line(line: &str) -> Self {
        let Some(counts) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". ")) else {
            return Self::default();
        };
        let count = |word: &str| {
            counts
                .1
                .split("; ")
                .find_map(|part| part.trim().strip_suffix(word)?.trim().parse().ok())
                .unwrap_or(0)
        };
        Self { passed: count("passed"), failed: count("failed"), skipped: count("ignored") }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Output of test harnesses.
#[derive(Debug, Default)]
struct Seen {
    tally: Tally,
    skips: u64,
}

impl Seen {
    fn line(&mut self, line: &str) {
        self.tally.add(Tally::of_line(line));
        self.skips += u64::from(line.starts_with("SKIP:"));
    }

    /// Counts skipped tests. A test that cannot run here prints a message and returns, which its harness counts as a
    /// pass.
    fn tally(&self) -> Tally {
        let Tally { passed, failed, skipped } = self.tally;
        Tally { passed: passed.saturating_sub(self.skips), failed, skipped: skipped + self.skips }
    }
}

/// The result of a check that this project implements.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// No errors were found.
    Passed,
    /// These errors were found.
    Failed(Vec<String>),
    /// The check could not run, for this reason.
    Skipped(String),
}

impl Outcome {
    /// Returns `Passed` if the list is empty.
    pub(crate) fn of(findings: Vec<String>) -> Self {
        if findings.is_empty() { Self::Passed } else { Self::Failed(findings) }
    }
}

struct Done {
    name: String,
    took: Duration,
    tally: Tally,
    /// The reason if the step failed.
    failure: Option<String>,
}

/// A run in progress.
pub(crate) struct Steps {
    started: Instant,
    done: Vec<Done>,
}

impl Steps {
    /// Starts a run.
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), done: Vec::new() }
    }

    /// Runs a program to its end and shows its output. The result is only success or failure.
    pub(crate) fn command(&mut self, name: &str, command: &mut Command) {
        self.run(name, |_| watch(command, LIMIT, |_| true));
    }

    /// Runs `cargo test --no-run --message-format=json…`. Returns the executables.
    pub(crate) fn build(&mut self, name: &str, command: &mut Command) -> Vec<Executable> {
        let mut built = Vec::new();
        self.run(name, |_| {
            watch(command, LIMIT, |line| {
                built.extend(Executable::of_line(line));
                !line.starts_with('{')
            })
        });
        built
    }

    /// Runs a program and counts the tests that it reports. A program without tests is a failure.
    pub(crate) fn tests(&mut self, name: &str, command: &mut Command) {
        self.watch_tests(name, command, true);
    }

    /// Like `tests`, if other steps run the tests that are ignored here.
    pub(crate) fn chosen_tests(&mut self, name: &str, command: &mut Command) {
        self.watch_tests(name, command, false);
    }

    fn watch_tests(&mut self, name: &str, command: &mut Command, counts_ignored: bool) {
        self.run(name, |seen| {
            let seen = seen.insert(Seen::default());
            let result = watch(command, SILENCE, |line| {
                seen.line(line);
                true
            });
            if !counts_ignored {
                seen.tally.skipped = 0;
            }
            result
        });
    }

    /// Runs named programs, `jobs` at a time, and counts the tests that they report. A program without tests is a
    /// failure. If several run at a time, the output of each is shown when it has ended.
    pub(crate) fn programs(&mut self, name: &str, programs: Vec<(String, Command)>, jobs: usize) {
        self.run(name, |seen| {
            let (queue, failed) = (Mutex::new(programs.into_iter()), Mutex::new(Vec::new()));
            let seen = Mutex::new(seen.insert(Seen::default()));
            let next = || lock(&queue).next();
            let work = || {
                while let Some((name, mut command)) = next() {
                    let mut lines = Vec::new();
                    let ended = watch(&mut command, SILENCE, |line| {
                        lines.push(line.to_owned());
                        jobs == 1
                    });
                    let mut seen = lock(&seen);
                    lines.iter().for_each(|line| seen.line(line));
                    if jobs > 1 {
                        println!("     {name}\n{}", lines.join("\n"));
                    }
                    lock(&failed).extend(ended.err().map(|error| format!("{name}: {error:#}")));
                }
            };
            std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
            let failed = lock(&failed);
            ensure!(failed.is_empty(), "{}", failed.join("; "));
            Ok(())
        });
    }

    /// Runs a step. If it has tests, it stores the output of its harnesses in the option.
    fn run(&mut self, name: &str, step: impl FnOnce(&mut Option<Seen>) -> Result<()>) {
        let started = self.announce(name);
        let mut seen = None;
        let mut failure = step(&mut seen).err().map(|error| format!("{error:#}"));
        let mut tally = seen.as_ref().map(Seen::tally).unwrap_or_default();
        if seen.is_some() && failure.is_none() && tally == Tally::default() {
            failure = Some("it ran no tests".to_owned());
        }
        if failure.is_some() && tally.failed == 0 {
            tally.failed = 1;
        }
        self.record(name, started, tally, failure);
    }

    /// Runs a check that this project implements. It counts as one test.
    pub(crate) fn check(&mut self, name: &str, check: impl FnOnce() -> Result<Outcome>) {
        let started = self.announce(name);
        let (mut tally, mut failure) = (Tally::default(), None);
        match check() {
            Ok(Outcome::Passed) => tally.passed = 1,
            Ok(Outcome::Skipped(why)) => {
                println!("SKIP: {why}");
                tally.skipped = 1;
            }
            Ok(Outcome::Failed(findings)) => {
                findings.iter().for_each(|finding| println!("{finding}"));
                tally.failed = 1;
                failure = Some(format!("{} findings", findings.len()));
            }
            Err(error) => {
                println!("error: {error:#}");
                tally.failed = 1;
                failure = Some(format!("{error:#}"));
            }
        }
        self.record(name, started, tally, failure);
    }

    fn announce(&self, name: &str) -> Instant {
        println!("\n=== {name} (at {})", clock(self.started.elapsed()));
        Instant::now()
    }

    fn record(&mut self, name: &str, started: Instant, tally: Tally, failure: Option<String>) {
        let took = started.elapsed();
        let end = failure.as_deref().unwrap_or("ok");
        println!("=== {name}: {end}, {tally}, took {}", clock(took));
        self.done.push(Done { name: name.to_owned(), took, tally, failure });
    }

    /// Prints the steps and the sum of their tests. Returns whether the run passed.
    pub(crate) fn finish(self, skips_fail: bool) -> bool {
        let mut sum = Tally::default();
        println!("\n{:<44} {:>6} {:>7} {:>7} {:>8}", "step", "time", "passed", "failed", "skipped");
        for Done { name, took, tally, .. } in &self.done {
            let Tally { passed, failed, skipped } = tally;
            println!("{name:<44} {:>6} {passed:>7} {failed:>7} {skipped:>8}", clock(*took));
            sum.add(*tally);
        }
        println!("{:<44} {:>6}", "all", clock(self.started.elapsed()));
        for Done { name, failure, .. } in &self.done {
            if let Some(failure) = failure {
                println!("FAILED: {name}: {failure}");
            }
        }
        if skips_fail && sum.skipped > 0 {
            println!("FAILED: {} skipped, which CI=true does not allow", sum.skipped);
        }
        println!("{sum}");
        let failed = self.done.iter().any(|done| done.failure.is_some());
        !failed && (sum.skipped == 0 || !skips_fail)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Formats minutes and seconds.
fn clock(duration: Duration) -> String {
    format!("{}:{:02}", duration.as_secs() / 60, duration.as_secs() % 60)
}

/// Prints a line, including its end, to the stream it came from.
type Show = fn(&str);

/// Runs a program, passes every line to `look`, and prints the lines for which it returns `true`. Kills the program and
/// its descendants if it prints nothing for `silence`, or takes too long.
///
/// # Errors
/// If it fails or was killed. The text says which.
fn watch(command: &mut Command, silence: Duration, mut look: impl FnMut(&str) -> bool) -> Result<()> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let (sender, lines) = mpsc::channel();
    let stdout = child.stdout.take().context("standard output is piped")?;
    let stderr = child.stderr.take().context("standard error is piped")?;
    read_lines(stdout, sender.clone(), |line| print!("{line}"));
    read_lines(stderr, sender, |line| eprint!("{line}"));
    let end = |status: ExitStatus| if status.success() { Ok(()) } else { Err(anyhow!("{status}")) };
    let started = Instant::now();
    let (mut last_output, mut ended) = (started, None);
    loop {
        match lines.recv_timeout(Duration::from_millis(200)) {
            Ok((line, show)) => {
                last_output = Instant::now();
                if look(line.trim_end()) {
                    show(&line);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return end(child.wait()?),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some((status, when)) = ended {
            if Instant::now().duration_since(when) > AFTER_END {
                return end(status);
            }
        } else if let Some(status) = child.try_wait()? {
            ended = Some((status, Instant::now()));
        } else if last_output.elapsed() > silence || started.elapsed() > LIMIT {
            let (after, silent) = (clock(started.elapsed()), clock(last_output.elapsed()));
            stop(&mut child)?;
            bail!("stopped after {after}, {silent} after its last output");
        }
    }
}

/// Sends each line when it arrives, with the function that prints it.
fn read_lines(from: impl Read + Send + 'static, to: Sender<(String, Show)>, show: Show) {
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        while matches!(from.read_until(b'\n', &mut line), Ok(1..)) {
            if to.send((String::from_utf8_lossy(&line).into_owned(), show)).is_err() {
                break;
            }
            line.clear();
        }
    });
}

/// Kills a program and its descendants, because cargo does not kill its children.
fn stop(child: &mut Child) -> Result<()> {
    for pid in descendants(child.id()) {
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            // It may have ended in the meantime.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
    child.kill().context("cannot kill the step")?;
    child.wait()?;
    Ok(())
}

/// Returns the descendants of the process `root`.
fn descendants(root: u32) -> Vec<u32> {
    let parents: Vec<(u32, u32)> = std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            // The name in parentheses may contain anything. State and parent follow it.
            let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
            Some((pid, parent))
        })
        .collect();
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        let of = found[next];
        found.extend(parents.iter().filter(|&&(_, parent)| parent == of).map(|&(pid, _)| pid));
        next += 1;
    }
    found.split_off(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn lines_are_counted() {
        let line = "test result: FAILED. 11 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s";
        assert_eq!(Tally::of_line(line), Tally { passed: 11, failed: 2, skipped: 1 });
        assert_eq!(Tally::of_line("test a ... ok"), Tally::default());
    }

    #[test]
    fn a_step_counts_its_tests_and_its_skips() {
        let mut steps = Steps::new();
        steps.tests(
            "some",
            &mut shell("echo 'SKIP: x: no y' >&2; echo 'test result: ok. 3 passed; 0 failed; 0 ignored'"),
        );
        assert_eq!(steps.done[0].tally, Tally { passed: 2, failed: 0, skipped: 1 });
        assert!(steps.done[0].failure.is_none());
        assert!(!steps.finish(true), "under CI a skip is a failure");
    }

    #[test]
    fn failed_step_counts_without_a_test() {
        let mut steps = Steps::new();
        steps.command("some", &mut shell("exit 3"));
        assert_eq!(steps.done[0].tally.failed, 1);
        steps.tests("other", &mut shell("echo test result: ok. 0 passed; 0 failed; 0 ignored"));
        assert_eq!(steps.done[1].tally.failed, 1, "no tests");
        steps.check("third", || Ok(Outcome::Passed));
        assert_eq!(steps.done[2].tally.passed, 1);
        assert!(!steps.finish(false));
    }

    #[test]
    fn late_step_dies_with_its_children() {
        let script = "sleep 1000 & echo $!; wait";
        let mut pid = 0;
        let ended = watch(&mut shell(script), Duration::from_millis(300), |line| {
            pid = line.parse().unwrap();
            false
        });
        assert!(ended.unwrap_err().to_string().contains("stopped after"));
        // The process ends asynchronously, and may stay a zombie until its new parent reaps it.
        let deadline = Instant::now() + Duration::from_secs(10);
        while std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(Instant::now() < deadline, "process {pid} has not ended");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn orphans_output_does_not_block_the_step() {
        let mut orphan = 0;
        let started = Instant::now();
        let ended = watch(&mut shell("sleep 1000 & echo $!"), LIMIT, |line| {
            orphan = line.parse().unwrap();
            false
        });
        let took = started.elapsed();
        let _ = rustix::process::kill_process(Pid::from_raw(orphan).unwrap(), Signal::KILL);
        ended.unwrap();
        assert!(took < Duration::from_secs(60));
    }
}
