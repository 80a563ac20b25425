//! A program under a driver's control: its output is collected, and it is killed when this process ends.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal};

/// Time without progress of a program after which a wait fails, unless its driver specifies another time. On a machine
/// with five busy threads per core, testpmd starts silently for more than 10 s.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Number of timeouts after which a wait ends even if the program keeps printing: a program that repeats a warning
/// forever produces output but makes no progress.
const MOST_TIMEOUTS: u32 = 4;

/// Length of the end of a program's output that an error shows, in bytes.
const TAIL: usize = 4096;

/// A running program. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    transcript: Arc<Transcript>,
}

/// Output of a program so far.
#[derive(Debug)]
struct Transcript {
    state: Mutex<Printed>,
    changed: Condvar,
}

#[derive(Debug)]
struct Printed {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// Both streams in order of arrival, for error messages.
    both: Vec<u8>,
    open_streams: u8,
    last_output: Instant,
}

#[derive(Clone, Copy)]
enum Stream {
    Stdout,
    Stderr,
}

impl Process {
    /// Starts `command` with its three streams piped. Errors refer to it as `name`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn spawn(name: &str, mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let shown = format!("{command:?}");
        let mut child = spawn_tied(command).with_context(|| format!("cannot start {name}: {shown}"))?;
        let transcript = Arc::new(Transcript {
            state: Mutex::new(Printed {
                stdout: Vec::new(),
                stderr: Vec::new(),
                both: format!("$ {shown}\n").into_bytes(),
                open_streams: 2,
                last_output: Instant::now(),
            }),
            changed: Condvar::new(),
        });
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("stdout was asked for")?;
        let stderr = child.stderr.take().context("stderr was asked for")?;
        collect(stdout, Stream::Stdout, &transcript);
        collect(stderr, Stream::Stderr, &transcript);
        Ok(Self { name: name.to_owned(), child, stdin, transcript })
    }

    /// Returns the program's process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends `line` and a newline to the program's standard input.
    ///
    /// # Errors
    /// If the program has closed its input or has ended. The error contains the end of the output.
    pub fn write_line(&mut self, line: &str) -> Result<()> {
        let written = match &mut self.stdin {
            Some(stdin) => stdin.write_all(format!("{line}\n").as_bytes()).and_then(|()| stdin.flush()),
            None => bail!("the input of {} is closed", self.name),
        };
        written.map_err(|e| anyhow!("cannot send {line:?} to {}: {e}\n{}", self.name, self.tail()))
    }

    /// Returns the length of the program's standard output so far, in bytes. The answer to the next input begins there.
    pub fn printed(&self) -> usize {
        self.transcript.lock().stdout.len()
    }

    /// Returns the standard output from byte `from` on.
    pub fn stdout_from(&self, from: usize) -> String {
        text_from(&self.transcript.lock().stdout, from)
    }

    /// Returns the whole standard error.
    pub fn stderr(&self) -> String {
        text_from(&self.transcript.lock().stderr, 0)
    }

    /// Waits until `found` returns a value for the standard output from byte `from` on.
    ///
    /// # Errors
    /// If the program ends first, prints nothing for `timeout`, or prints for four times that without a match. The
    /// error names the awaited `what` and contains the end of the output.
    pub fn wait_for<T>(
        &mut self,
        from: usize,
        timeout: Duration,
        what: &str,
        mut found: impl FnMut(&str) -> Option<T>,
    ) -> Result<T> {
        let start = Instant::now();
        let transcript = Arc::clone(&self.transcript);
        let mut printed = transcript.lock();
        let mut seen = None;
        loop {
            if seen != Some(printed.stdout.len()) {
                seen = Some(printed.stdout.len());
                if let Some(value) = found(&text_from(&printed.stdout, from)) {
                    return Ok(value);
                }
            }
            if printed.open_streams == 0 {
                drop(printed);
                let end = match self.exit_status(Duration::from_secs(1)) {
                    Some(status) => format!("it ended with {status}"),
                    None => "it closed its output".to_owned(),
                };
                bail!("{}: waited for {what}, but {end}\n{}", self.name, self.tail());
            }
            let quiet = printed.last_output.max(start).elapsed();
            let in_all = start.elapsed();
            if quiet >= timeout || in_all >= timeout * MOST_TIMEOUTS {
                drop(printed);
                bail!(
                    "{}: waited {:.1} s for {what}; nothing new was printed for {:.1} s\n{}",
                    self.name,
                    in_all.as_secs_f64(),
                    quiet.as_secs_f64(),
                    self.tail()
                );
            }
            printed = transcript
                .changed
                .wait_timeout(printed, timeout - quiet)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Waits until the program has ended and all its output has been collected.
    ///
    /// # Errors
    /// If it has not ended after printing nothing for `timeout`.
    pub fn wait_for_exit(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.exit_status(Duration::from_millis(50)) {
                self.drain();
                return Ok(status);
            }
            let quiet = self.transcript.lock().last_output.max(start).elapsed();
            if quiet >= timeout || start.elapsed() >= timeout * MOST_TIMEOUTS {
                bail!(
                    "{}: still running {:.1} s after it was expected to end\n{}",
                    self.name,
                    start.elapsed().as_secs_f64(),
                    self.tail()
                );
            }
        }
    }

    /// Returns the program's exit status, after waiting at most `longest` for its end.
    pub fn exit_status(&mut self, longest: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            // A child of this process can always be waited for. An error would mean that other code has reaped it. In
            // this case it has ended with an unknown status, and the caller's deadline reports it.
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if start.elapsed() >= longest {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends `signal` to the program.
    ///
    /// # Errors
    /// If it has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        // A child that has not been reaped keeps its process ID, so the signal cannot reach another process.
        if self.exit_status(Duration::ZERO).is_some() {
            bail!("{}: has already ended, so {signal:?} cannot be sent\n{}", self.name, self.tail());
        }
        let pid = Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal)
            .with_context(|| format!("cannot send {signal:?} to {}", self.name))
    }

    /// Kills the program and waits for its end. Does nothing if it has ended.
    pub fn kill(&mut self) {
        // Fails only if the program has already been waited for. Its input is closed afterwards, because a program may
        // begin to clean up at the end of its input.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.stdin = None;
    }

    /// Returns the end of both output streams for an error message.
    pub fn tail(&self) -> String {
        let printed = self.transcript.lock();
        let from = printed.both.len().saturating_sub(TAIL);
        let cut = if from > 0 { "…" } else { "" };
        format!("--- output of {} ---\n{cut}{}\n---", self.name, text_from(&printed.both, from).trim_end())
    }

    /// Waits until both streams are read to their end, which is reached soon after the program's end. If a grandchild
    /// holds them open, the wait ends after a second.
    fn drain(&self) {
        let start = Instant::now();
        let mut printed = self.transcript.lock();
        while printed.open_streams > 0 && start.elapsed() < Duration::from_secs(1) {
            printed = self
                .transcript
                .changed
                .wait_timeout(printed, Duration::from_millis(100))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Transcript {
    /// Locks the output. A panic of another thread does not invalidate it.
    fn lock(&self) -> MutexGuard<'_, Printed> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn text_from(bytes: &[u8], from: usize) -> String {
    String::from_utf8_lossy(bytes.get(from..).unwrap_or_default()).into_owned()
}

/// Reads `source` to its end into the transcript, on a new thread.
fn collect(mut source: impl Read + Send + 'static, stream: Stream, transcript: &Arc<Transcript>) {
    let transcript = Arc::clone(transcript);
    std::thread::spawn(move || {
        let mut buffer = [0; 8192];
        loop {
            let read = match source.read(&mut buffer) {
                Ok(read) => read,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => 0,
            };
            let new = &buffer[..read];
            let mut printed = transcript.lock();
            match stream {
                Stream::Stdout => printed.stdout.extend_from_slice(new),
                Stream::Stderr => printed.stderr.extend_from_slice(new),
            }
            printed.both.extend_from_slice(new);
            printed.last_output = Instant::now();
            if read == 0 {
                printed.open_streams -= 1;
            }
            transcript.changed.notify_all();
            if read == 0 {
                return;
            }
        }
    });
}

/// Spawns a child that the kernel kills when this process ends, even if this process is killed.
///
/// The kernel ties a child to the *thread* that spawned it. A test's thread ends with the test, while a guest may be
/// shared by several tests. Therefore one thread that lives until the process ends spawns all children.
fn spawn_tied(mut command: Command) -> std::io::Result<Child> {
    type Request = (Command, Sender<std::io::Result<Child>>);
    static SPAWNER: OnceLock<Sender<Request>> = OnceLock::new();

    let parent = rustix::process::getpid();
    // SAFETY: between fork and exec the closure only makes four system calls. It takes no lock and allocates no memory,
    // so the state of the other threads at the fork does not matter.
    unsafe {
        command.pre_exec(move || {
            // Ignored signals are inherited: under nohup, a program would survive SIGHUP.
            libc::signal(libc::SIGHUP, libc::SIG_DFL);
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            if rustix::process::getppid() != Some(parent) {
                // The parent ended before the request above was made.
                return Err(std::io::ErrorKind::BrokenPipe.into());
            }
            Ok(())
        });
    }
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, requests) = mpsc::channel::<Request>();
        std::thread::spawn(move || {
            for (mut command, answer) in requests {
                // If the receiver is gone, the answer is not needed.
                let _ = answer.send(command.spawn());
            }
        });
        sender
    });
    let (answer, child) = mpsc::channel();
    let gone = || std::io::Error::other("the spawning thread is gone");
    spawner.send((command, answer)).map_err(|_| gone())?;
    child.recv().map_err(|_| gone())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Process::spawn("sh", command).unwrap()
    }

    #[test]
    fn wait_sees_output_after_mark() {
        let mut sh = sh("while read -r line; do echo \"got $line\"; done");
        sh.write_line("one").unwrap();
        sh.wait_for(0, TIMEOUT, "one", |text| text.contains("got one\n").then_some(())).unwrap();
        let mark = sh.printed();
        sh.write_line("two").unwrap();
        let text =
            sh.wait_for(mark, TIMEOUT, "two", |text| text.ends_with('\n').then(|| text.to_owned())).unwrap();
        assert_eq!(text, "got two\n");
    }

    #[test]
    fn silent_program_ends_the_wait() {
        let mut sh = sh("echo out; echo err >&2; sleep 60");
        sh.wait_for(0, TIMEOUT, "out", |text| text.contains("out").then_some(())).unwrap();
        let error =
            sh.wait_for(0, Duration::from_millis(300), "the prompt", |_| None::<()>).unwrap_err().to_string();
        for part in ["the prompt", "nothing new", "out", "err"] {
            assert!(error.contains(part), "{part:?} is missing in: {error}");
        }
    }

    #[test]
    fn endless_output_ends_the_wait() {
        let mut sh = sh("while :; do echo again; sleep 0.02; done");
        let start = Instant::now();
        // Long enough for the next line to arrive in time on a busy machine.
        let timeout = Duration::from_millis(500);
        sh.wait_for(0, timeout, "news", |_| None::<()>).unwrap_err();
        assert!(start.elapsed() >= MOST_TIMEOUTS * timeout);
    }

    #[test]
    fn an_early_end_is_reported_with_its_status() {
        let mut sh = sh("echo bye; exit 3");
        let error = sh.wait_for(0, TIMEOUT, "the prompt", |_| None::<()>).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("bye"), "{error}");
        assert_eq!(sh.wait_for_exit(TIMEOUT).unwrap().code(), Some(3));
        assert!(sh.signal(Signal::INT).is_err(), "a program that has ended cannot be signalled");
    }

    #[test]
    fn dropped_process_is_killed() {
        let sh = sh("exec sleep 60");
        let proc = format!("/proc/{}", sh.id());
        assert!(std::path::Path::new(&proc).exists());
        drop(sh);
        assert!(!std::path::Path::new(&proc).exists());
    }

    #[test]
    fn program_outlives_its_starting_thread() {
        let mut cat = std::thread::spawn(|| sh("exec cat")).join().unwrap();
        cat.write_line("still here").unwrap();
        cat.wait_for(0, TIMEOUT, "the echo", |text| text.contains("still here").then_some(())).unwrap();
    }

    /// Kills a whole test process and checks that its child ends, which is the purpose of `spawn_tied`.
    #[test]
    fn program_dies_with_its_test_process() {
        const CHILD_OF: &str = "OFFCORE_TEST_DYING_PARENT";
        if std::env::var_os(CHILD_OF).is_some() {
            let sleeper = sh("exec sleep 61");
            writeln!(std::io::stdout(), "sleeper {}", sleeper.id()).unwrap();
            loop {
                std::thread::park();
            }
        }
        let mut parent = Command::new(std::env::current_exe().unwrap());
        parent.args(["--exact", "peer::process::tests::program_dies_with_its_test_process"]);
        parent.env(CHILD_OF, "1");
        let mut parent = Process::spawn("test process", parent).unwrap();
        let id: u32 = parent
            .wait_for(0, TIMEOUT, "the sleeper's id", |text| {
                text.lines().find_map(|line| line.split("sleeper ").nth(1)?.trim().parse().ok())
            })
            .unwrap();
        let status = format!("/proc/{id}/stat");
        assert!(
            !std::fs::read_to_string(&status).unwrap().contains(") Z "),
            "it lives as long as its parent"
        );
        parent.kill();
        let start = Instant::now();
        // An orphan may remain a zombie until init reaps it.
        while std::fs::read_to_string(&status).is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(start.elapsed() < TIMEOUT, "the sleeper outlived its parent");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
