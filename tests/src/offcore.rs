//! Driver for the `offcore` binary, run as by a user.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use offcore_bench::peer::process::{Process, TIMEOUT};
pub use rustix::process::Signal;
use serde_json::Value;

use crate::netns::Netns;

/// A running `offcore`, killed on drop.
///
/// Its waits read standard output from top to bottom. Each wait continues after the line that ended the previous one.
#[derive(Debug)]
pub struct Offcore {
    process: Process,
    /// Number of lines of standard output that earlier waits have consumed.
    read: usize,
    /// Maximum time without progress.
    timeout: Duration,
}

/// A line of standard output.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// The line without its newline.
    pub text: String,
    /// The line as JSON, or `None` if it is not JSON. With `--format json` every line is.
    pub json: Option<Value>,
}

/// The status and output of a finished `offcore`.
#[derive(Debug)]
pub struct Finished {
    /// Its exit status: 0 for success, 1 for failure, 2 for a usage error.
    pub status: ExitStatus,
    /// Standard output as lines.
    pub lines: Vec<Line>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Offcore {
    /// Starts `offcore` with these arguments. [`binary`] chooses the executable.
    ///
    /// # Errors
    /// If the binary does not exist or cannot be started.
    pub fn start(args: &[&str]) -> Result<Self> {
        Self::spawn(Command::new(binary()?), args)
    }

    /// Starts `offcore` in a network namespace, where it creates its TAP interfaces. Unix sockets are not affected.
    ///
    /// # Errors
    /// As [`Offcore::start`].
    pub fn start_in(netns: &Netns, args: &[&str]) -> Result<Self> {
        Self::start_behind(netns, &[], args)
    }

    /// Starts `offcore` in a namespace, behind `prefix`, a command that executes its arguments.
    ///
    /// # Errors
    /// As [`Offcore::start`].
    pub fn start_behind(netns: &Netns, prefix: &[&str], args: &[&str]) -> Result<Self> {
        let binary = binary()?;
        let [first, more @ ..] = prefix else { return Self::spawn(netns.command(binary), args) };
        let mut command = netns.command(first);
        command.args(more).arg(binary);
        Self::spawn(command, args)
    }

    /// Runs `offcore` to its end, for runs that end by themselves, such as refused arguments.
    ///
    /// # Errors
    /// As [`Offcore::start`] and [`Offcore::wait`].
    pub fn run(args: &[&str]) -> Result<Finished> {
        Self::start(args)?.wait()
    }

    fn spawn(mut command: Command, args: &[&str]) -> Result<Self> {
        command.args(args);
        Ok(Self { process: Process::spawn("offcore", command)?, read: 0, timeout: TIMEOUT })
    }

    /// Returns the process ID.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Writes a line to standard input. Commands that do not read input ignore it.
    ///
    /// # Errors
    /// If `offcore` has ended.
    pub fn command(&mut self, line: &str) -> Result<()> {
        self.process.write_line(line)
    }

    /// Waits for a line of standard output that `wanted` accepts, after the line that ended the last wait.
    ///
    /// # Errors
    /// If `offcore` ends, prints no line for 30 s, or runs for 2 minutes without the wanted line.
    pub fn wait_for(&mut self, what: &str, mut wanted: impl FnMut(&Line) -> bool) -> Result<Line> {
        let mut read = self.read;
        let found = self.process.wait_for(0, self.timeout, what, |text| {
            for line in lines(text).skip(read) {
                read += 1;
                let line = Line::new(line);
                if wanted(&line) {
                    return Some(line);
                }
            }
            None
        });
        self.read = read;
        found
    }

    /// Waits until the number that `counter` reads from some lines (periodic statistics) is `at_least`, and returns
    /// that line. Lines without the number are skipped.
    ///
    /// # Errors
    /// If `offcore` ends, or the number has not grown for 30 s.
    pub fn wait_for_count(
        &mut self,
        what: &str,
        at_least: u64,
        counter: impl Fn(&Value) -> Option<u64>,
    ) -> Result<Line> {
        let mut last = None;
        let mut moved = Instant::now();
        loop {
            let line =
                self.wait_for(what, |line| line.json.as_ref().is_some_and(|j| counter(j).is_some()))?;
            let count = line.json.as_ref().and_then(&counter);
            if count >= Some(at_least) {
                return Ok(line);
            }
            if count > last {
                last = count;
                moved = Instant::now();
            } else if moved.elapsed() >= self.timeout {
                bail!(
                    "offcore: waited for {what} of {at_least}; it has stayed at {} for {:.1} s\n{}",
                    last.unwrap_or(0),
                    moved.elapsed().as_secs_f64(),
                    self.process.tail()
                );
            }
        }
    }

    /// Returns all complete lines printed so far, including lines that waits have consumed.
    pub fn lines(&self) -> Vec<Line> {
        lines(&self.process.stdout_from(0)).map(Line::new).collect()
    }

    /// Returns the last line that is JSON, even if a wait has consumed it.
    pub fn last_report(&self) -> Option<Value> {
        let text = self.process.stdout_from(0);
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.rsplit('\n').find_map(|line| serde_json::from_str(line).ok())
    }

    /// Returns the standard error output so far.
    pub fn stderr(&self) -> String {
        self.process.stderr()
    }

    /// Sends a signal. [`Signal::INT`] and [`Signal::TERM`] request a clean stop, [`Signal::HUP`] requests a reload,
    /// and [`Signal::KILL`] ends the process immediately.
    ///
    /// # Errors
    /// If `offcore` has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// Requests a clean stop by SIGINT and waits for it.
    ///
    /// # Errors
    /// As [`Offcore::signal`] and [`Offcore::wait`].
    pub fn stop(mut self) -> Result<Finished> {
        self.signal(Signal::INT)?;
        self.wait()
    }

    /// Returns whether `offcore` has ended.
    pub fn has_ended(&mut self) -> bool {
        self.process.exit_status(Duration::ZERO).is_some()
    }

    /// Waits for `offcore` to end by itself, whatever its status.
    ///
    /// # Errors
    /// If it has printed nothing for 30 s, or has not ended after 2 minutes.
    pub fn wait(mut self) -> Result<Finished> {
        let status = self.process.wait_for_exit(self.timeout)?;
        let stdout = self.process.stdout_from(0);
        let lines = stdout.lines().map(Line::new).collect();
        Ok(Finished { status, lines, stdout, stderr: self.process.stderr() })
    }

    /// Returns the end of the output on both streams, for assertion messages.
    pub fn tail(&self) -> String {
        self.process.tail()
    }
}

impl Line {
    fn new(text: &str) -> Self {
        Self { text: text.to_owned(), json: serde_json::from_str(text).ok() }
    }
}

/// Returns the complete lines of a text that may still grow.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'))
}

/// Copies the binary to `path`.
///
/// # Errors
/// If the binary does not exist or cannot be copied.
pub fn copy_binary(path: &Path) -> Result<()> {
    // The copy could not be executed (ETXTBSY) while a child of another test has it open for writing. Therefore this
    // process opens no descriptor that a child could inherit.
    let status = Command::new("cp").arg(binary()?).arg(path).status().context("cp")?;
    ensure!(status.success(), "cp to {}: {status}", path.display());
    Ok(())
}

/// Returns the path of the `offcore` binary under test: `CARGO_BIN` from the environment, otherwise `offcore` beside
/// the test in the target directory, from the test's build profile or, failing that, from the release profile.
///
/// # Errors
/// If neither exists. Building the tests does not build or update the binary: `cargo build --release` does.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("CARGO_BIN") {
        let path = PathBuf::from(path);
        if !path.is_file() {
            bail!(
                "CARGO_BIN is {}, which is not a file: give it the path of the offcore binary",
                path.display()
            );
        }
        return Ok(path);
    }
    let profile = profile_dir()?;
    let target = profile.parent().context("the profile's directory is in the target directory")?;
    let candidates = [profile.join("offcore"), target.join("release/offcore")];
    match candidates.iter().find(|path| path.is_file()) {
        Some(path) => Ok(path.clone()),
        None => bail!(
            "no offcore binary at {} or {}: run `cargo build --release`, or set CARGO_BIN",
            candidates[0].display(),
            candidates[1].display()
        ),
    }
}

/// Returns the directory of the build profile in the target directory. A test executable is in its `deps`.
pub(crate) fn profile_dir() -> Result<PathBuf> {
    let test = std::env::current_exe().context("cannot find the test executable")?;
    let dir = test.parent().context("an executable is in a directory")?;
    let profile = if dir.ends_with("deps") { dir.parent() } else { Some(dir) };
    Ok(profile.unwrap_or(Path::new("/")).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Need, require};

    /// Starts a script that imitates the output of `offcore --format json`.
    fn stand_in(script: &str) -> Offcore {
        // A shell cannot trap signals that were ignored at its start, as SIGINT is in a background job.
        let mut command = Command::new("env");
        command.args(["--default-signal=INT", "sh", "-c"]);
        Offcore::spawn(command, &[script]).unwrap()
    }

    #[test]
    fn waits_advance_through_output() {
        let mut offcore = stand_in(
            r#"for n in 1 2 3; do echo "{\"event\":\"tick\",\"n\":$n}"; done; echo done; printf part"#,
        );
        let tick = |line: &Line| line.json.as_ref().is_some_and(|j| j["event"] == "tick");
        assert_eq!(offcore.wait_for("a tick", tick).unwrap().json.unwrap()["n"], 1);
        assert_eq!(offcore.wait_for("a tick", tick).unwrap().json.unwrap()["n"], 2);
        let done = offcore.wait_for("done", |line| line.text == "done").unwrap();
        assert_eq!(done.json, None);
        let finished = offcore.wait().unwrap();
        assert_eq!(finished.lines.len(), 5);
        assert_eq!(
            finished.lines[4].text, "part",
            "an unfinished last line counts once the program has ended"
        );
    }

    #[test]
    fn an_end_before_the_line_is_an_error() {
        let mut offcore = stand_in("echo 'cannot bind' >&2; exit 1");
        let error = offcore.wait_for("the first statistics", |_| true).unwrap_err().to_string();
        for part in ["the first statistics", "exit status: 1", "cannot bind"] {
            assert!(error.contains(part), "{part:?} is missing in: {error}");
        }
        assert!(offcore.has_ended());
        let finished = offcore.wait().unwrap();
        assert_eq!((finished.status.code(), finished.stderr.trim()), (Some(1), "cannot bind"));
    }

    #[test]
    fn wait_for_count_returns_first_match() {
        let mut offcore =
            stand_in(r#"echo '{"x":1}'; n=0; while :; do n=$((n+7)); echo "{\"rx\":$n}"; sleep 0.01; done"#);
        let line = offcore.wait_for_count("received packets", 50, |j| j["rx"].as_u64()).unwrap();
        assert_eq!(line.json.unwrap()["rx"], 56);
        assert!(offcore.last_report().unwrap()["rx"].as_u64() >= Some(56));
    }

    #[test]
    fn hung_count_is_an_error() {
        let mut offcore = stand_in(r#"while :; do echo '{"rx":5}'; sleep 0.1; done"#);
        offcore.timeout = Duration::from_secs(1);
        let error =
            offcore.wait_for_count("received packets", 6, |j| j["rx"].as_u64()).unwrap_err().to_string();
        assert!(error.contains("stayed at 5"), "{error}");
    }

    /// Each case runs in its own process, because an environment variable selects the binary.
    #[test]
    fn cargo_bin_selects_the_binary() {
        const NAME: &str = "offcore::tests::cargo_bin_selects_the_binary";
        const CASE: &str = "OFFCORE_TEST_BINARY_CASE";
        match std::env::var(CASE).as_deref() {
            Ok("named") => {
                let finished = Offcore::run(&["-c", "echo $((6 * 7)); exit 2"]).unwrap();
                assert_eq!((finished.status.code(), finished.stdout.as_str()), (Some(2), "42\n"));
            }
            Ok("missing") => {
                let error = Offcore::start(&[]).unwrap_err().to_string();
                assert!(error.contains("CARGO_BIN is /nonexistent"), "{error}");
            }
            Ok("namespace") => {
                let netns = Netns::new().unwrap();
                let finished =
                    Offcore::start_in(&netns, &["-c", "ls /sys/class/net"]).unwrap().wait().unwrap();
                assert_eq!(finished.stdout, "lo\n", "it sees interfaces of another namespace");
            }
            _ => {
                let mut cases = vec![("named", "/bin/sh"), ("missing", "/nonexistent")];
                if require(&[Need::Root, Need::Ip]).is_some() {
                    cases.push(("namespace", "/bin/sh"));
                }
                for (case, binary) in cases {
                    let mut child = Command::new(std::env::current_exe().unwrap());
                    child.args(["--exact", NAME, "--nocapture"]).env(CASE, case).env("CARGO_BIN", binary);
                    crate::netns::checked(&mut child).unwrap();
                }
            }
        }
    }

    #[test]
    fn sigint_stops_offcore_cleanly() {
        // `wait` returns immediately when a signal arrives. A foreground child would have to end first.
        let mut offcore =
            stand_in("trap 'echo report; exit 0' INT; echo up; while :; do sleep 0.05 & wait; done");
        offcore.wait_for("up", |line| line.text == "up").unwrap();
        let finished = offcore.stop().unwrap();
        assert!(finished.status.success());
        assert_eq!(finished.stdout, "up\nreport\n");
    }
}
